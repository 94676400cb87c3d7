r"""Newton–Schulz iterations of stacks of matrices in bfloat16 products with float32 sums (V4 report §2.4).

A step is A = X X^T; P = b A + c A A; X <- a X + P X, each one kernel with its sum fused. A and P are symmetric: only the
tiles on and above the diagonal are computed, and written twice. Sums have a fixed order: equal inputs give equal bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

# Measured on an H200. Tile of the symmetric products, its depth, warps, stages; rows, columns, depth of P X, the same.
_SYMMETRIC = (128, 64, 4, 3)
_APPLY = (128, 256, 64, 8, 3)
_BLOCK = 8192
_TINY = tl.constexpr(1.1754943508222875e-38)


@triton.jit
def _energy_kernel(u, peaks, energies, area, blocks, BLOCK: tl.constexpr):
    """Largest magnitude of a block of one matrix, and the sum of squares in units of it, which cannot underflow."""
    matrix, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(u + matrix * area + at, mask=at < area, other=0.0).to(tl.float32)
    peak = tl.max(tl.abs(x), 0)
    x = x / tl.maximum(peak, _TINY)
    tl.store(peaks + matrix * blocks + block, peak)
    tl.store(energies + matrix * blocks + block, tl.sum(x * x, 0))


@triton.jit
def _normalise_kernel(
    u, x, peak, norm, rows, cols, stride_r, stride_c, area, padded_rows, padded_cols,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """X = U / peak / norm in the dtype of X, zeros in its padding; the strides of U transpose it where it is tall."""
    matrix = tl.program_id(0).to(tl.int64)
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS))[:, None]
    col = (tl.program_id(2) * COLS + tl.arange(0, COLS))[None, :]
    inside = (row < rows) & (col < cols)
    value = tl.load(u + matrix * area + row.to(tl.int64) * stride_r + col * stride_c, mask=inside, other=0.0)
    value = value.to(tl.float32) / tl.maximum(tl.load(peak + matrix), _TINY) / tl.load(norm + matrix)
    at = (matrix * padded_rows + row) * padded_cols + col
    tl.store(x + at, value.to(x.dtype.element_ty), mask=(row < padded_rows) & (col < padded_cols))


@triton.jit
def _upper_tile(t, side):
    """Row and column of tile t of those on and above the diagonal: rows i and side - 1 - i share side + 1 tiles."""
    row, col = t // (side + 1), t % (side + 1)
    folded = col >= side - row
    return tl.where(folded, side - 1 - row, row), tl.where(folded, side - 1 - row + col - (side - row), row + col)


@triton.jit
def _symmetric_kernel(
    x, gram, out, rows, cols, alpha, beta, ADD: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr
):
    """out = beta gram + alpha X X^T for stacked `[n rows, cols]` X; descriptors of `[TILE, DEPTH]` and `[TILE, TILE]`."""
    side = rows // TILE
    matrix = tl.program_id(0) // (side * (side + 1) // 2)
    i, j = _upper_tile(tl.program_id(0) % (side * (side + 1) // 2), side)
    above, below = matrix * rows + i * TILE, matrix * rows + j * TILE
    acc = tl.zeros([TILE, TILE], tl.float32)
    for k in range(0, cols, DEPTH):
        acc = tl.dot(x.load([above, k]), x.load([below, k]).T, acc)
    acc *= alpha
    if ADD:
        acc += beta * gram.load([above, j * TILE]).to(tl.float32)
    tile = acc.to(out.dtype)
    out.store([above, j * TILE], tile)
    if i != j:
        out.store([below, i * TILE], tile.T)


@triton.jit
def _apply_kernel(
    poly, x, add, out, rows, cols, a, ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr
):
    """out = a X + P X for stacked `[n rows, cols]` X and `[n rows, rows]` P."""
    down, across = rows // ROWS, tl.cdiv(cols, COLS)
    matrix, t = tl.program_id(0) // (down * across), tl.program_id(0) % (down * across)
    # Groups of tile rows share the columns of X that are in the L2 cache.
    first = t // (GROUP * across) * GROUP
    height = tl.minimum(down - first, GROUP)
    i, j = first + t % (GROUP * across) % height, t % (GROUP * across) // height
    top, left = matrix * rows + i * ROWS, j * COLS
    acc = tl.zeros([ROWS, COLS], tl.float32)
    for k in range(0, rows, DEPTH):
        acc = tl.dot(poly.load([top, k]), x.load([matrix * rows + k, left]), acc)
    acc += a * add.load([top, left]).to(tl.float32)
    out.store([top, left], acc.to(out.dtype))


def newton_schulz(
    update: torch.Tensor,
    coefficients: Sequence[Sequence[float]],
    *,
    eps: float = 1e-20,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    r"""Replace each matrix by (nearly) its orthogonal factor, as the flat `newton_schulz` does.

    Args:
        update (`torch.Tensor` of shape `[..., r, c]`, float32, bfloat16 or float16), contiguous, not changed:
            The (Nesterov) momentum of each matrix.
        coefficients (sequence of `(a, b, c)`): one triple a step.
        eps (`float`, *optional*, defaults to 1e-20): floor of the Frobenius norm.
        dtype (`torch.dtype`, *optional*, bfloat16 or float16): of the matrices between the products.

    Returns:
        `torch.Tensor` of shape `[..., r, c]`, dtype `dtype`, not always contiguous.
    """
    tall = update.shape[-2] > update.shape[-1]
    rows, cols = sorted(update.shape[-2:])
    count = update.numel() // (rows * cols)
    # Whole tiles of rows, so that no tile reaches into the next matrix; rows of 16 bytes, which descriptors ask for.
    shape = (count, triton.cdiv(rows, _SYMMETRIC[0]) * _SYMMETRIC[0], triton.cdiv(cols, 8) * 8)
    x = torch.empty(shape, dtype=dtype, device=update.device)
    _normalise(update, x, rows, cols, tall, eps)
    x = _iterate(x, coefficients)[:, :rows, :cols]
    return (x.mT if tall else x).unflatten(0, update.shape[:-2]) if update.ndim > 2 else (x.mT if tall else x)[0]


def _normalise(update: torch.Tensor, x: torch.Tensor, rows: int, cols: int, tall: bool, eps: float) -> None:
    count, area = x.shape[0], rows * cols
    blocks = triton.cdiv(area, _BLOCK)
    peaks, energies = (torch.empty(count, blocks, dtype=torch.float32, device=x.device) for _ in range(2))
    _energy_kernel[(count, blocks)](update, peaks, energies, area, blocks, BLOCK=_BLOCK, num_warps=8)
    peak = peaks.amax(1)
    floor = peak.clamp_min(_TINY.value)
    norm = torch.maximum((energies * (peaks / floor[:, None]).square()).sum(1).sqrt(), eps / floor)
    grid = (count, triton.cdiv(x.shape[1], 64), triton.cdiv(x.shape[2], 64))
    strides = (1, rows) if tall else (cols, 1)
    _normalise_kernel[grid](update, x, peak, norm, rows, cols, *strides, area, *x.shape[1:], ROWS=64, COLS=64)


def _iterate(x: torch.Tensor, coefficients: Sequence[Sequence[float]]) -> torch.Tensor:
    """Run the steps on `[n, rows, cols]`, rows a multiple of the tile, in four buffers whatever their number."""
    count, rows, cols = x.shape
    gram, poly = (_Views(x.new_empty(count * rows, rows)) for _ in range(2))
    x, y = _Views(x.view(count * rows, cols)), _Views(x.new_empty(count * rows, cols))
    for a, b, c in coefficients:
        _symmetric(x, gram, gram, rows, 1.0, None)
        _symmetric(gram, gram, poly, rows, c, b)
        _apply(poly, x, y, rows, a)
        x, y = y, x
    return x.tensor.view(count, rows, cols)


class _Views:
    """Descriptors of one buffer `[n rows, cols]`, by block shape."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor, self._made = tensor, {}

    def __getitem__(self, block: tuple[int, int]) -> TensorDescriptor:
        if block not in self._made:
            self._made[block] = TensorDescriptor.from_tensor(self.tensor, list(block))
        return self._made[block]


def _symmetric(x: _Views, gram: _Views, out: _Views, rows: int, alpha: float, beta: float | None) -> None:
    tile, depth, warps, stages = _SYMMETRIC
    side, square = rows // tile, (tile, tile)
    grid = (x.tensor.shape[0] // rows * (side * (side + 1) // 2),)
    _symmetric_kernel[grid](
        x[tile, depth], gram[square], out[square], rows, x.tensor.shape[1], alpha, beta or 0.0,
        ADD=beta is not None, TILE=tile, DEPTH=depth, num_warps=warps, num_stages=stages,
    )  # fmt: skip


def _apply(poly: _Views, x: _Views, out: _Views, rows: int, a: float) -> None:
    down, across, depth, warps, stages = _APPLY
    cols = x.tensor.shape[1]
    grid = (x.tensor.shape[0] // down * triton.cdiv(cols, across),)
    _apply_kernel[grid](
        poly[down, depth], x[depth, across], x[down, across], out[down, across], rows, cols, a,
        ROWS=down, COLS=across, DEPTH=depth, GROUP=8, num_warps=warps, num_stages=stages,
    )  # fmt: skip
