"""Products with packed weights: FP8 tiles, dense and grouped, with the FP8 rounding of the input.

For a few rows the weight is unpacked in registers, so that its bytes are read once and nothing else is moved; for many it
is unpacked once and multiplied by the matrix library.

Sources: contract section 2, `modeling_dsv4/layers.py`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from .number_formats import cast, round_to
from .packed_rows import Tile, multiply_rows, round_fp8_rows, unpack_fp8_tiles

# From this many rows on, unpacking a weight once for all of them is cheaper than once for every tile of rows.
MANY_ROWS = 256


@triton.jit
def _linear_kernel(
    x,
    weight,
    scale,
    out,
    M,
    N,
    GROUPS: tl.constexpr,
    PARTS: tl.constexpr,
    K: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    ONE_SCALE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLS: tl.constexpr,
    ROUND_BLOCK: tl.constexpr,
):
    """`out[p, m, g * N + n] = weight[g * N + n] . x[m, g]` over part p of K, for program_id(2) = g * PARTS + p."""
    group, part = tl.program_id(2) // PARTS, tl.program_id(2) % PARTS
    SPAN: tl.constexpr = K // PARTS
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    row = group * N + tl.minimum(n, N - 1)
    acc = multiply_rows(
        weight + part * SPAN,
        scale + part * (SPAN // TILE_COLS),
        row,
        row // TILE_ROWS,
        x + group * K + part * SPAN,
        m,
        m < M,
        GROUPS * K,
        K,
        SPAN,
        BN,
        BM,
        BK,
        SPLIT,
        STAGES,
        False,
        ONE_SCALE,
        TILE_COLS,
        ROUND_BLOCK,
    )
    at = out + (part * M + m)[None, :] * (GROUPS * N) + (group * N + n)[:, None]
    tl.store(at, cast(acc, out.dtype.element_ty), mask=(m < M)[None, :] & (n < N)[:, None])


@triton.jit
def swiglu(gate, up, limit):
    """silu(min(gate, limit)) * clamp(up, -limit, limit), float32."""
    gate = tl.minimum(gate, limit)
    return gate / (1 + tl.exp(-gate)) * tl.minimum(tl.maximum(up, -limit), limit)


def clamped_swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    """`swiglu` by PyTorch, float32."""
    return F.silu(gate.float().clamp(max=limit)) * up.float().clamp(-limit, limit)


@triton.jit
def _swiglu_kernel(
    x,
    gate_weight,
    gate_scale,
    up_weight,
    up_scale,
    out,
    M,
    N,
    limit,
    K: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLS: tl.constexpr,
    ROUND_BLOCK: tl.constexpr,
):
    """`out[m, n] = swiglu(gate[n] . x[m], up[n] . x[m])`."""
    dtype: tl.constexpr = out.dtype.element_ty
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    row = tl.minimum(n, N - 1)
    tile_row = row // TILE_ROWS
    gate = multiply_rows(
        gate_weight, gate_scale, row, tile_row, x, m, m < M,
        K, K, K, BN, BM, BK, SPLIT, STAGES, False, TILE_ROWS % BN == 0, TILE_COLS, ROUND_BLOCK,
    )  # fmt: skip
    up = multiply_rows(
        up_weight, up_scale, row, tile_row, x, m, m < M,
        K, K, K, BN, BM, BK, SPLIT, STAGES, False, TILE_ROWS % BN == 0, TILE_COLS, ROUND_BLOCK,
    )  # fmt: skip
    value = cast(swiglu(round_to(gate, dtype), round_to(up, dtype), limit), dtype)
    tl.store(out + m[None, :] * N + n[:, None], value, mask=(m < M)[None, :] & (n < N)[:, None])


@triton.jit
def _sum_parts_kernel(parts, out, size, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.load(parts + at, mask=at < size, other=0.0)
    for part in tl.static_range(1, PARTS):
        acc += tl.load(parts + part * size + at, mask=at < size, other=0.0)
    tl.store(out + at, cast(acc, out.dtype.element_ty), mask=at < size)


class _PackedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, scale, block_size, activation_block, groups):
        ctx.save_for_backward(weight, scale)
        ctx.block_size, ctx.groups = block_size, groups
        shape = *x.shape[: -1 if groups == 1 else -2], len(weight)
        x = x.reshape(-1, groups, x.shape[-1])
        if len(x) >= MANY_ROWS or len(x) == 0:
            x = x if activation_block is None else round_fp8_rows(x, block=activation_block)
            unpacked = unpack_fp8_tiles(weight, scale, block_size=block_size, dtype=x.dtype)
            return _grouped_product(x, unpacked.unflatten(0, (groups, -1)).mT).view(shape)
        return multiply_few(x.contiguous(), weight, scale, block_size, activation_block).view(shape)

    @staticmethod
    def backward(ctx, grad):
        weight, scale = ctx.saved_tensors
        unpacked = unpack_fp8_tiles(weight, scale, block_size=ctx.block_size, dtype=grad.dtype)
        grad = grad.unflatten(-1, (ctx.groups, -1))
        dx = _grouped_product(grad.reshape(-1, *grad.shape[-2:]), unpacked.unflatten(0, (ctx.groups, -1)))
        shape = *grad.shape[: -2 if ctx.groups == 1 else -1], dx.shape[-1]
        return dx.view(shape), None, None, None, None, None


def _grouped_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`[M, G, I]` times `[G, I, O]`: `[M, G, O]`."""
    if len(weight) == 1:
        return x @ weight[0]
    out = torch.empty(*x.shape[:2], weight.shape[-1], dtype=x.dtype, device=x.device)
    torch.bmm(x.transpose(0, 1), weight, out=out.transpose(0, 1))
    return out


def multiply_few(x, weight, scale, block_size, activation_block, tile: Tile | None = None):
    """`[M, G, K]` times packed `[G * N, K]`: `[M, G, N]`."""
    m, groups, k = x.shape
    n = len(weight) // groups
    # One row is rounded by each of its readers, which is less than a launch of its own.
    if activation_block is not None and m > 1:
        x, activation_block = round_fp8_rows(x, block=activation_block), None
    tile = tile or _choose_tile(x.dtype, m, n, k, groups)
    parts = tile.parts if k % (tile.parts * tile.bk) == 0 else 1
    out = torch.empty(m, groups, n, dtype=x.dtype, device=x.device)
    target = out if parts == 1 else torch.empty(parts, *out.shape, dtype=torch.float32, device=x.device)
    _linear_kernel[triton.cdiv(n, tile.bn), triton.cdiv(m, tile.bm), groups * parts](
        x,
        weight.view(torch.uint8),
        scale.view(torch.uint8),
        target,
        m,
        n,
        groups,
        parts,
        k,
        *tile.of(k // parts),
        block_size[0] % tile.bn == 0 and (groups == 1 or n % block_size[0] == 0),
        *block_size,
        activation_block or 0,
        num_warps=tile.warps,
    )
    if parts > 1:
        _sum_parts_kernel[(triton.cdiv(out.numel(), 1024),)](target, out, out.numel(), parts, 1024, num_warps=4)
    return out


def _choose_tile(dtype: torch.dtype, m: int, n: int, k: int, groups: int) -> Tile:
    """The fastest of those measured on an H200 at the released sizes."""
    if m == 1 and n * groups >= 16384:
        return Tile(32, 1, 256, 1, 3, 2)
    if m == 1:
        return Tile(16, 1, 256, 4, 3, 4) if k % 1024 == 0 else Tile(16, 1, 128, 2, 3, 2)
    if m <= 16 or dtype != torch.bfloat16:  # float32 has no matrix units and large operands
        bn, bm, bk, warps = 32, min(16, triton.next_power_of_2(m)), 256, 2
    else:
        bn, bm, bk, warps = 64, 64, 128, 4
    # Parts of K are written and read again, which pays while the tiles alone are too few for the device.
    tiles = triton.cdiv(n, bn) * triton.cdiv(m, bm) * groups
    return Tile(bn, bm, bk, 1, 3, warps, 4 if tiles <= 256 else 1)


def packed_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    *,
    block_size: tuple[int, int] = (32, 32),
    activation_block: int | None = None,
    groups: int = 1,
) -> torch.Tensor:
    r"""Return x W^T for packed W, or each group of x by its own rows of W (contract section 2).

    Args:
        x (`torch.Tensor` of shape `[..., K]`, or `[..., G, K]` for `groups` > 1; bfloat16, float32 or float16).
        weight (`torch.Tensor` of shape `[N, K]`, float8_e4m3fn) and scale (`[ceil(N / rows), ceil(K / columns)]`, E8M0).
        block_size (`tuple[int, int]`, *optional*, defaults to `(32, 32)`): (rows, columns) per scale.
        activation_block (`int`, *optional*): round x to FP8 with one scale for so many channels; `None`: as it is.
        groups (`int`, *optional*, defaults to 1): group g maps its channels by rows g * N / G to (g + 1) * N / G - 1.

    Returns:
        `torch.Tensor` of shape `[..., N]`, dtype of `x`. Products of exact values, accumulated in float32. Gradient: to `x`
        alone, straight through the rounding.
    """
    return _PackedLinear.apply(x, weight, scale, block_size, activation_block, groups)


packed_linear.has_backward = True


def packed_swiglu(
    x: torch.Tensor,
    gate: torch.Tensor,
    gate_scale: torch.Tensor,
    up: torch.Tensor,
    up_scale: torch.Tensor,
    *,
    limit: float,
    block_size: tuple[int, int] = (32, 32),
    activation_block: int | None = None,
) -> torch.Tensor:
    r"""Return silu(min(g, limit)) * clamp(u, -limit, limit) for g = x gate^T and u = x up^T (contract section 7).

    Args:
        x (`torch.Tensor` of shape `[..., K]`, bfloat16, float32 or float16).
        gate, up (`torch.Tensor` of shape `[N, K]`, float8_e4m3fn) and their scales (see `packed_linear`).
        limit (`float`): bound of g and u. block_size, activation_block: see `packed_linear`.

    Returns:
        `torch.Tensor` of shape `[..., N]`, dtype of `x`, to which g and u are rounded too.
    """
    n, k = gate.shape
    rows = x.reshape(-1, k)
    m = len(rows)
    if m == 0 or m >= MANY_ROWS:
        x = x if activation_block is None else round_fp8_rows(x, block=activation_block)
        matrices = (gate, gate_scale), (up, up_scale)
        g, u = (packed_linear(x, weight, scale, block_size=block_size) for weight, scale in matrices)
        return clamped_swiglu(g, u, limit).to(x.dtype)
    if activation_block is not None and m > 1:
        rows, activation_block = round_fp8_rows(rows, block=activation_block), None
    bm = min(16, triton.next_power_of_2(m))
    tile = Tile(16, bm, 128, min(8, 32 // bm), 3, 8 if bm <= 4 else 4)
    bn, bm, bk, split, stages = tile.of(k)
    out = torch.empty(m, n, dtype=x.dtype, device=x.device)
    grid = triton.cdiv(n, bn), triton.cdiv(m, bm)
    _swiglu_kernel[grid](
        rows.contiguous(),
        *(t.view(torch.uint8) for t in (gate, gate_scale, up, up_scale)),
        out,
        m,
        n,
        limit,
        k,
        bn,
        bm,
        bk,
        split,
        stages,
        *block_size,
        activation_block or 0,
        num_warps=tile.warps if split > 1 else 1,
    )
    return out.view(*x.shape[:-1], n)
