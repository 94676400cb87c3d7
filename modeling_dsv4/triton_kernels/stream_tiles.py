"""Small device functions of the hyper-connection kernels: coefficients and streams of a tile, products of split float32."""

from __future__ import annotations

import triton
import triton.language as tl

# Triton's interpreter has no bfloat16 products.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def column(tile, index: tl.constexpr, WIDTH: tl.constexpr):
    """Column of `[T, WIDTH]` as `[T, 1]`.

    It comes out of a reduction: a chain of plain loads would be computed twice, also in the layout of the matrix unit.
    """
    return tl.sum(tl.where(tl.arange(0, WIDTH)[None, :] == index, tile, 0.0), axis=1)[:, None]


@triton.jit
def columns_of(ptr, rows, real, WIDTH: tl.constexpr):
    """The columns of rows of a float32 matrix `[tokens, WIDTH]`, as a tuple of `[T, 1]`."""
    at = rows[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    tile = tl.load(ptr + at, mask=real[:, None], other=0.0)
    columns = ()
    for index in tl.static_range(WIDTH):
        columns = columns + (column(tile, index, WIDTH),)
    return columns


@triton.jit
def load_streams(
    streams_ptr, output_ptr, row_start, columns, mask, N: tl.constexpr, D: tl.constexpr, PENDING: tl.constexpr
):
    """A tile `[T, W]` of each of the N streams and, with PENDING, one of the output: a tuple."""
    tiles = ()
    for j in tl.static_range(N):
        tiles = tiles + (tl.load(streams_ptr + row_start * N + (j * D + columns)[None, :], mask=mask, other=0.0),)
    if PENDING:
        tiles = tiles + (tl.load(output_ptr + row_start + columns[None, :], mask=mask, other=0.0),)
    return tiles


@triton.jit
def side_by_side(tiles, N: tl.constexpr):
    """N (a power of two) tiles `[T, W]` as one `[T, N * W]`, of the same registers."""
    for half in tl.static_range(N.bit_length() - 1):
        pairs = ()
        for i in tl.static_range(N >> (half + 1)):
            pair = tl.join(tiles[2 * i], tiles[2 * i + 1]).permute(0, 2, 1)
            pairs = pairs + (pair.reshape(pair.shape[0], 2 * pair.shape[2]),)
        tiles = pairs
    return tiles[0]


@triton.jit
def in_parts(values, like):
    """float32 `values` as the sum of two tensors of the dtype of `like`, in which products are made."""
    high = values.to(like.dtype)
    low = (values - high.to(tl.float32)).to(like.dtype)
    if INTERPRETED:
        high, low = high.to(tl.float32), low.to(tl.float32)
    return high, low
