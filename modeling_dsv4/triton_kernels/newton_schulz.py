r"""Newton–Schulz iterations of stacks of matrices in bfloat16 products with float32 sums (V4 report §2.4).

A step is A = X X^T; P = a I + b A + c A A; X <- P X, three products. A and P are symmetric: only the tiles on and above
the diagonal are computed, and written twice. The first two have kernels with their sums fused; the last is a plain
product, since a I lies in P (which rounds a with the diagonal of P, where the flat function adds a X in float32).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

# Shapes of the symmetric products, of X X^T and of the polynomial: the fastest measured on an H200.
_TILE = 128
_GRAM_DEPTH, _GRAM_OPTIONS = 32, {"num_warps": 4, "num_stages": 4}
_POLY_DEPTH, _POLY_OPTIONS = 64, {"num_warps": 4, "num_stages": 3}
_BLOCK = 8192
_TINY = tl.constexpr(1.1754943508222875e-38)


@triton.jit
def _energy_kernel(u, peaks, energies, area, blocks, BLOCK: tl.constexpr):
    """Largest magnitude of a block of one matrix, and the sum of squares in units of it, which cannot underflow."""
    matrix, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(u + matrix * area + at, mask=at < area, other=0.0).to(tl.float32)
    peak = tl.max(tl.abs(x), 0)
    x = x / tl.maximum(peak, _TINY)
    tl.store(peaks + tl.program_id(0), peak)
    tl.store(energies + tl.program_id(0), tl.sum(x * x, 0))


@triton.jit
def _normalise_kernel(
    u, x, peaks, energies, blocks, rows, cols, stride_r, stride_c, eps,
    PARTS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """X = U / max(|U|, eps) in the dtype of X; the strides of U transpose it where it is tall."""
    matrix = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    peak = tl.load(peaks + matrix * blocks + part, mask=part < blocks, other=0.0)
    energy = tl.load(energies + matrix * blocks + part, mask=part < blocks, other=0.0)
    top = tl.maximum(tl.max(peak, 0), _TINY)
    peak = peak / top
    norm = tl.maximum(tl.sqrt(tl.sum(energy * peak * peak, 0)), eps / top)
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    col = (tl.program_id(2) * COLS + tl.arange(0, COLS))[None, :]
    inside = (row < rows) & (col < cols)
    start = matrix * rows * cols
    value = tl.load(u + start + row * stride_r + col * stride_c, mask=inside, other=0.0).to(tl.float32)
    tl.store(x + start + row * cols + col, (value / top / norm).to(x.dtype.element_ty), mask=inside)


@triton.jit
def _upper_tile(t, side):
    """Row and column of tile t of those on and above the diagonal: rows i and side - 1 - i share side + 1 tiles."""
    row, col = t // (side + 1), t % (side + 1)
    folded = col >= side - row
    return tl.where(folded, side - 1 - row, row), tl.where(folded, side - 1 - row + col - (side - row), row + col)


@triton.jit
def _symmetric_kernel(x, gram, out, rows, cols, a, b, c, POLY: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr):
    """out = X X^T, or a I + b gram + c X X^T, for stacked `[n rows, cols]` X; `[TILE, DEPTH]` and `[TILE, TILE]` blocks."""
    side = rows // TILE
    matrix = tl.program_id(0) // (side * (side + 1) // 2)
    i, j = _upper_tile(tl.program_id(0) % (side * (side + 1) // 2), side)
    above, below = matrix * rows + i * TILE, matrix * rows + j * TILE
    acc = tl.zeros([TILE, TILE], tl.float32)
    for k in range(0, cols, DEPTH):
        acc = tl.dot(x.load([above, k]), x.load([below, k]).T, acc)
    if POLY:
        acc = c * acc + b * gram.load([above, j * TILE]).to(tl.float32)
        place = tl.arange(0, TILE)
        acc += tl.where((i * TILE + place)[:, None] == (j * TILE + place)[None, :], a, 0.0)
    tile = acc.to(out.dtype)
    out.store([above, j * TILE], tile)
    if i != j:
        out.store([below, i * TILE], tile.T)


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
        `torch.Tensor` of shape `[..., r, c]`, dtype `dtype`, not contiguous where r > c.
    """
    tall = update.shape[-2] > update.shape[-1]
    rows, cols = sorted(update.shape[-2:])
    x = torch.empty(update.numel() // (rows * cols), rows, cols, dtype=dtype, device=update.device)
    _normalise(update, x, tall, eps)
    x = _iterate(x, coefficients).view(*update.shape[:-2], rows, cols)
    return x.mT if tall else x


def _normalise(update: torch.Tensor, x: torch.Tensor, tall: bool, eps: float) -> None:
    """Write the updates, each over max(its norm, eps), into X `[n, rows, cols]`, rows <= cols."""
    count, rows, cols = x.shape
    blocks = triton.cdiv(rows * cols, _BLOCK)
    peaks, energies = (torch.empty(count, blocks, dtype=torch.float32, device=x.device) for _ in range(2))
    _energy_kernel[(count * blocks,)](update, peaks, energies, rows * cols, blocks, BLOCK=_BLOCK, num_warps=8)
    _normalise_kernel[(count, triton.cdiv(rows, 64), triton.cdiv(cols, 64))](
        update, x, peaks, energies, blocks, rows, cols, *((1, rows) if tall else (cols, 1)), eps,
        PARTS=triton.next_power_of_2(blocks), ROWS=64, COLS=64,
    )  # fmt: skip


def _iterate(x: torch.Tensor, coefficients: Sequence[Sequence[float]]) -> torch.Tensor:
    """Run the steps in four buffers whatever their number (`x` is one of them)."""
    count, rows, cols = x.shape
    gram, y = x.new_empty(count, rows, rows), torch.empty_like(x)
    poly = torch.empty_like(gram)
    tiles = _tiles(x)
    if tiles:
        sources = [_blocks(t, _TILE, _GRAM_DEPTH) for t in (x, y)]
        squares = [_blocks(gram, _TILE, _POLY_DEPTH), *(_blocks(t, _TILE, _TILE) for t in (gram, poly))]
        launch_gram, launch_poly = _Launcher((tiles, 1, 1), _GRAM_OPTIONS), _Launcher((tiles, 1, 1), _POLY_OPTIONS)
    for step, (a, b, c) in enumerate(coefficients):
        if tiles:
            launch_gram(sources[step % 2], None, squares[1], rows, cols, a, b, c, False, _TILE, _GRAM_DEPTH)
            launch_poly(*squares, rows, rows, a, b, c, True, _TILE, _POLY_DEPTH)
        else:
            torch.bmm(x, x.mT, out=gram)
            torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=poly)
            poly.diagonal(dim1=1, dim2=2).add_(a)
        torch.bmm(poly, x, out=y)
        x, y = y, x
    return x


class _Launcher:
    """Launches `_symmetric_kernel` on equal shapes: from the second time on in its compiled form.

    That skips Triton's inspection of the arguments, which takes the host as long as these products take the device.
    """

    def __init__(self, grid: tuple[int, int, int], options: dict):
        self.grid, self.options, self.compiled = grid, options, None

    def __call__(self, *arguments):
        if self.compiled is None:
            self.compiled = _symmetric_kernel[self.grid](*arguments, **self.options)
        else:
            self.compiled[self.grid](*arguments)


def _tiles(x: torch.Tensor) -> int:
    """Tiles of a symmetric product, 0 where they would not cover it or not fill the device."""
    count, rows, cols = x.shape
    side, rest = divmod(rows, _TILE)
    # A tile must not reach into the next matrix; descriptors ask for rows of whole 16 bytes.
    tiles = 0 if rest or cols % 8 else count * (side * (side + 1) // 2)
    return tiles if not x.is_cuda or tiles >= torch.cuda.get_device_properties(x.device).multi_processor_count else 0


def _blocks(tensor: torch.Tensor, rows: int, cols: int) -> TensorDescriptor:
    """A descriptor of all matrices below each other, in blocks of `[rows, cols]`."""
    return TensorDescriptor.from_tensor(tensor.view(-1, tensor.shape[-1]), [rows, cols])
