"""Small device functions of the hyper-connection kernels: coefficients of a tile of tokens, products of split float32."""

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
def in_parts(values, like):
    """float32 `values` as the sum of two tensors of the dtype of `like`, in which products are made."""
    high = values.to(like.dtype)
    low = (values - high.to(tl.float32)).to(like.dtype)
    if INTERPRETED:
        high, low = high.to(tl.float32), low.to(tl.float32)
    return high, low
