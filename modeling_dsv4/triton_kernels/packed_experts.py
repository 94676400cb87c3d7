"""Routed experts from a packed bank: grouped products with clamped SwiGLU, routing weight and FP8 rounding fused.

A pair is a token and one of its slots. Each pair's result is kept, and a token's results are added in the order of their
experts, so that a sum is the same in every call.

Sources: contract sections 2 and 7, `modeling_dsv4/moe.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .expert_groups import Groups, group_pairs, tile_pairs
from .number_formats import (
    FP4_SHORTFALL,
    cast,
    e2m1_operands,
    e4m3_operand,
    operand_dtype,
    operand_scale,
    round_fp8,
    round_to,
    spread,
)
from .packed_linear import clamped_swiglu, swiglu
from .packed_rows import RoundRows, Tile, multiply_rows, round_fp8_rows

# Longer calls are cut: grouping compares all pairs of a call with each other, and results of pairs take memory.
MAX_TOKENS = 8192


@triton.jit
def _scale_row(row, PART: tl.constexpr, TILE_ROWS: tl.constexpr):
    """Row of scales of a row of a stack of matrices with `PART` rows each, whose last tile may be shorter."""
    return row // PART * tl.cdiv(PART, TILE_ROWS) + row % PART // TILE_ROWS


@triton.jit
def _gate_up_kernel(
    x,
    weight,
    scale,
    routing,
    hidden,
    order,
    tile_expert,
    tile_first,
    tile_last,
    experts,
    limit,
    K: tl.constexpr,
    N: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    FP4: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLS: tl.constexpr,
    ROUND_BLOCK: tl.constexpr,
):
    """`hidden[pair] = round_fp8(silu(gate) * up * routing[pair])`, in the order of columns that `multiply_rows` takes."""
    expert = tl.load(tile_expert + tl.program_id(1)).to(tl.int64)
    if (expert < 0) | (expert >= experts):
        return
    pair, inside = tile_pairs(order, tile_first, tile_last, BM)
    # Rows of gate and of up, side by side in one tile.
    row = tl.minimum(tl.program_id(0) * BN + tl.arange(0, 2 * BN) % BN, N - 1) + tl.arange(0, 2 * BN) // BN * N
    both = multiply_rows(
        weight + expert * (2 * N * (K // 2 if FP4 else K)),
        scale + expert * (2 * tl.cdiv(N, TILE_ROWS) * tl.cdiv(K, TILE_COLS)),
        row,
        _scale_row(row, N, TILE_ROWS),
        x,
        pair // PER_TOKEN,
        inside,
        K,
        K,
        K,
        2 * BN,
        BM,
        BK,
        SPLIT,
        STAGES,
        FP4,
        False,
        TILE_COLS,
        ROUND_BLOCK if BM == 1 else 0,
    )
    dtype: tl.constexpr = hidden.dtype.element_ty
    gate, up = tl.split(tl.permute(tl.reshape(both, [2, BN, BM]), [1, 2, 0]))
    share = tl.load(routing + pair, mask=inside, other=0.0)
    value = round_to(swiglu(round_to(gate, dtype), round_to(up, dtype), limit) * share[None, :], dtype)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    if ROUND_BLOCK > 0:
        value = tl.where((n < N)[:, None], value, 0.0)
        blocks = tl.reshape(tl.trans(value), [BM * BN // ROUND_BLOCK, ROUND_BLOCK])
        value = round_to(tl.trans(tl.reshape(round_fp8(blocks), [BM, BN])), dtype)
    column = n % 2 * (N // 2) + n // 2 if FP4 else n
    at = hidden + pair[None, :].to(tl.int64) * N + column[:, None]
    tl.store(at, value.to(dtype), mask=inside[None, :] & (n < N)[:, None])


@triton.jit
def _grouped_kernel(
    x,
    weight,
    scale,
    out,
    order,
    tile_expert,
    tile_first,
    tile_last,
    experts,
    K: tl.constexpr,
    N: tl.constexpr,
    PART: tl.constexpr,
    PER_ROW: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    FP4: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLS: tl.constexpr,
):
    """`out[pair] = weight[expert of pair] x[pair // PER_ROW]`."""
    expert = tl.load(tile_expert + tl.program_id(1)).to(tl.int64)
    if (expert < 0) | (expert >= experts):
        return
    pair, inside = tile_pairs(order, tile_first, tile_last, BM)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.minimum(n, N - 1)
    acc = multiply_rows(
        weight + expert * (N * (K // 2 if FP4 else K)),
        scale + expert * (N // PART * tl.cdiv(PART, TILE_ROWS) * tl.cdiv(K, TILE_COLS)),
        row,
        _scale_row(row, PART, TILE_ROWS),
        x,
        pair // PER_ROW,
        inside,
        K,
        K,
        K,
        BN,
        BM,
        BK,
        SPLIT,
        STAGES,
        FP4,
        False,
        TILE_COLS,
        0,
    )
    at = out + pair[None, :].to(tl.int64) * N + n[:, None]
    tl.store(at, cast(acc, out.dtype.element_ty), mask=inside[None, :] & (n < N)[:, None])


@triton.jit
def _transposed_kernel(
    grad,
    weight,
    scale,
    out,
    order,
    tile_expert,
    tile_first,
    tile_last,
    experts,
    K: tl.constexpr,
    N: tl.constexpr,
    PART: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    FP4: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLS: tl.constexpr,
):
    """`out[pair] = grad[pair] weight[expert of pair]`."""
    expert = tl.load(tile_expert + tl.program_id(1)).to(tl.int64)
    if (expert < 0) | (expert >= experts):
        return
    DTYPE: tl.constexpr = operand_dtype(grad.dtype.element_ty)
    WIDTH: tl.constexpr = BK // 2 if FP4 else BK
    PER_SCALE: tl.constexpr = TILE_COLS // 2 if FP4 else TILE_COLS
    GROUPS: tl.constexpr = WIDTH // PER_SCALE
    width: tl.constexpr = K // 2 if FP4 else K
    groups: tl.constexpr = tl.cdiv(K, TILE_COLS)
    pair, inside = tile_pairs(order, tile_first, tile_last, BM)
    k = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    weight += expert * (N * width)
    scale += expert * (N // PART * tl.cdiv(PART, TILE_ROWS) * groups)
    grad += pair[:, None].to(tl.int64) * N
    acc = tl.zeros([BM, WIDTH], tl.float32)
    odd_acc = tl.zeros([BM, WIDTH], tl.float32)
    for start in tl.range(0, N, BN):
        n = start + tl.arange(0, BN)
        packed = tl.load(
            weight + n[:, None] * width + k[None, :], mask=(n < N)[:, None] & (k < width)[None, :], other=0
        )
        codes = tl.load(
            scale + _scale_row(n, PART, TILE_ROWS)[:, None] * groups + group[None, :],
            mask=(n < N)[:, None] & (group < groups)[None, :],
            other=0,
        )
        s = spread(operand_scale(codes, FP4, DTYPE), BN, GROUPS, PER_SCALE)
        values = tl.load(grad + n[None, :], mask=inside[:, None] & (n < N)[None, :], other=0.0).to(DTYPE)
        if FP4:
            even, odd = e2m1_operands(packed, s)
            acc = tl.dot(values, even, acc, input_precision="ieee")
            odd_acc = tl.dot(values, odd, odd_acc, input_precision="ieee")
        else:
            acc = tl.dot(values, e4m3_operand(packed, DTYPE) * s, acc, input_precision="ieee")
    if FP4:
        acc = tl.interleave(acc, odd_acc) * FP4_SHORTFALL
    column = tl.program_id(0) * BK + tl.arange(0, BK)
    at = out + pair[:, None].to(tl.int64) * K + column[None, :]
    tl.store(at, cast(acc, out.dtype.element_ty), mask=inside[:, None] & (column < K)[None, :])


@triton.jit
def _sum_kernel(results, indices, out, experts, H, PER_TOKEN: tl.constexpr, SLOTS: tl.constexpr, BH: tl.constexpr):
    """Add the results of a token's pairs, the lowest expert first."""
    token = tl.program_id(0)
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    slot = tl.arange(0, SLOTS)
    expert = tl.load(indices + token * PER_TOKEN + slot, mask=slot < PER_TOKEN, other=experts).to(tl.int32)
    before = (expert[None, :] < expert[:, None]) | (
        (expert[None, :] == expert[:, None]) & (slot[None, :] < slot[:, None])
    )
    rank = tl.sum(before.to(tl.int32), axis=1)
    acc = tl.zeros([BH], tl.float32)
    for turn in tl.static_range(PER_TOKEN):
        pair = token * PER_TOKEN + tl.sum(tl.where(rank == turn, slot, 0))
        here = tl.sum(tl.where(rank == turn, expert, 0)) < experts
        acc += tl.load(results + pair.to(tl.int64) * H + h, mask=(h < H) & here, other=0.0).to(tl.float32)
    tl.store(out + token.to(tl.int64) * H + h, acc, mask=h < H)


class _Matrices(NamedTuple):
    """For every expert `parts` packed matrices, one behind the other, and how kernels read them."""

    weight: torch.Tensor
    scale: torch.Tensor
    parts: int
    fp4: bool
    tile: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of an expert's matrices together."""
        return self.weight.shape[1], self.weight.shape[2] * (2 if self.fp4 else 1)

    @property
    def layout(self) -> tuple:
        return self.fp4, *self.tile


def _ordered(x: torch.Tensor, fp4: bool, block: int | None) -> torch.Tensor:
    """Rows as `multiply_rows` takes them, rounded if `block` is given."""
    if block is not None:
        return round_fp8_rows(x, block=block, split=fp4)
    return torch.cat([x[:, 0::2], x[:, 1::2]], dim=-1) if fp4 else x.contiguous()


def _gate_up(x, stack: _Matrices, routing, groups: Groups, limit: float, block: int | None, tile: Tile):
    """Hidden values `[P, I]` of all pairs, ordered and rounded for the product with down."""
    rows, k = stack.shape
    hidden = torch.empty(routing.numel(), rows // 2, dtype=x.dtype, device=x.device)
    grid = triton.cdiv(rows // 2, tile.bn), len(groups.expert)
    _gate_up_kernel[grid](
        x,
        stack.weight,
        stack.scale,
        routing,
        hidden,
        *groups,
        len(stack.weight),
        limit,
        k,
        rows // 2,
        routing.shape[-1],
        *tile.of(k),
        *stack.layout,
        block or 0,
        num_warps=tile.warps,
    )
    return hidden


def _grouped(x, stack: _Matrices, groups: Groups, per_row: int, tile: Tile, out: torch.Tensor):
    """Fill `out` `[P, N]` with the products of ordered rows `x`, one for every `per_row` pairs."""
    n, k = stack.shape
    grid = triton.cdiv(n, tile.bn), len(groups.expert)
    _grouped_kernel[grid](
        x,
        stack.weight,
        stack.scale,
        out,
        *groups,
        len(stack.weight),
        k,
        n,
        n // stack.parts,
        per_row,
        *tile.of(k),
        *stack.layout,
        num_warps=tile.warps,
    )
    return out


class _GroupedProduct(torch.autograd.Function):
    """Products `[P, N]` of rows with their experts' matrices; a row has `per_row` pairs. Absent experts give zeros."""

    @staticmethod
    def forward(ctx, x, stack, groups, per_row, tile):
        ctx.stack, ctx.groups, ctx.per_row, ctx.tile = stack, groups, per_row, tile
        out = x.new_zeros(groups.order.numel(), stack.shape[0])
        return _grouped(_ordered(x, stack.fp4, None), stack, groups, per_row, tile, out)

    @staticmethod
    def backward(ctx, grad):
        n, k = ctx.stack.shape
        dx = grad.new_zeros(len(grad), k)
        bn, bm, bk = (
            (64, max(64, ctx.tile.bm), 128) if grad.dtype == torch.bfloat16 else (32, max(16, ctx.tile.bm), 64)
        )
        bk = max(bk, ctx.stack.tile[1])
        grid = triton.cdiv(k, bk), len(ctx.groups.expert)
        _transposed_kernel[grid](
            grad.contiguous(),
            ctx.stack.weight,
            ctx.stack.scale,
            dx,
            *ctx.groups,
            len(ctx.stack.weight),
            k,
            n,
            n // ctx.stack.parts,
            bn,
            bm,
            bk,
            *ctx.stack.layout,
            num_warps=4,
        )
        return dx.view(-1, ctx.per_row, k).sum(1, dtype=torch.float32).to(dx.dtype), None, None, None, None


class _SumSlots(torch.autograd.Function):
    """Float32 sum `[N, H]` of the results `[P, H]` of each token's pairs, the lowest expert first."""

    @staticmethod
    def forward(ctx, results, indices, experts):
        n, k = indices.shape
        ctx.k, ctx.dtype = k, results.dtype
        h = results.shape[-1]
        out = torch.empty(n, h, dtype=torch.float32, device=results.device)
        grid = n, triton.cdiv(h, 1024)
        _sum_kernel[grid](results, indices, out, experts, h, k, triton.next_power_of_2(k), 1024, num_warps=4)
        return out

    @staticmethod
    def backward(ctx, grad):
        return grad.to(ctx.dtype).repeat_interleave(ctx.k, 0), None, None


def _tiles(dtype: torch.dtype, tokens: int, pairs: int, experts: int, round_block: int) -> tuple[Tile, Tile]:
    """Tiles of the two products, the fastest of those measured on an H200: for one token, for few a tile, for many."""
    rows = max(32, round_block)  # whole blocks of hidden channels, which are rounded together
    columns, warps = (256, 4) if rows == 32 else (128, 16)
    narrow = dtype == torch.bfloat16
    if tokens == 1:
        return Tile(rows, 1, columns, 2 if narrow and rows == 32 else 1, 3, warps), Tile(16, 1, 256, 1, 3, 1)
    if pairs <= 4 * experts or not narrow:  # float32 has no matrix units and large operands
        return Tile(rows, 8, columns, 1, 3, warps), Tile(64, 8, 256, 1, 3, 4)
    if pairs <= 64 * experts:
        return Tile(max(64, rows), 64, 128, 1, 3, 4 if rows == 32 else 8), Tile(128, 64, 128, 1, 3, 4)
    return Tile(max(64, rows), 128, 128, 1, 3, 8), Tile(128, 128, 128, 1, 3, 8)


def packed_experts(
    x: torch.Tensor,
    indices: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor,
    down: torch.Tensor,
    down_scale: torch.Tensor,
    *,
    limit: float,
    block_size: tuple[int, int] | None = None,
    activation_block: int | None = 32,
) -> torch.Tensor:
    r"""Run each token through its experts; the sum is taken in float32, experts in ascending order.

    Args:
        x (`torch.Tensor` of shape `[N, H]`, bfloat16, float32 or float16).
        indices (`torch.Tensor` of shape `[N, k]`, int64) and weights (`[N, k]`, float32): from the router. Experts from E on
            are left out.
        gate_up, gate_up_scale: FP4 rows `[E, 2I, H / 2]` (int8) and `[E, 2I, ceil(H / 32)]` (E8M0), or FP8 tiles
            `[E, 2I, H]` (float8_e4m3fn) and `[E, 2 * ceil(I / rows), ceil(H / columns)]`; gate before up.
        down, down_scale: `[E, H, I / 2]` and `[E, H, ceil(I / 32)]`, or `[E, H, I]` and `[E, ceil(H / rows), ...]`.
        limit (`float`): bound of the SwiGLU's inputs.
        block_size (`tuple[int, int]`, *optional*): of FP8 tiles; `None` for FP4 rows.
        activation_block (`int`, *optional*, defaults to 32): channels a scale of the rounded inputs; `None`: not rounded.

    Returns:
        `torch.Tensor` of shape `[N, H]`, float32. Gradient: to `x` (straight through the rounding) and `weights`.

    Numerics: rounded where the reference rounds; products are summed in another order. FP4 scales from 2**34 on overflow.
    """
    if len(x) > MAX_TOKENS:
        parts = zip(*(t.split(MAX_TOKENS) for t in (x, indices, weights)), strict=True)
        stacks = gate_up, gate_up_scale, down, down_scale
        settings = {"limit": limit, "block_size": block_size, "activation_block": activation_block}
        return torch.cat([packed_experts(*part, *stacks, **settings) for part in parts])
    if len(x) == 0:
        return x.new_zeros(x.shape, dtype=torch.float32)
    fp4 = block_size is None
    first, second = (
        _Matrices(values.view(torch.uint8), scale.view(torch.uint8), parts, fp4, block_size or (1, 32))
        for values, scale, parts in ((gate_up, gate_up_scale, 2), (down, down_scale, 1))
    )
    experts, indices, weights = len(gate_up), indices.contiguous(), weights.contiguous()
    trains = torch.is_grad_enabled() and (x.requires_grad or weights.requires_grad)
    # Tiles of one row have no order that a backward pass could read.
    tile, down_tile = _tiles(
        x.dtype, max(2, len(x)) if trains else len(x), indices.numel(), experts, activation_block or 0
    )
    groups = group_pairs(indices, experts, tile.bm)
    if trains:
        rounded = x if activation_block is None else RoundRows.apply(x, activation_block)
        gate, up = _GroupedProduct.apply(rounded, first, groups, indices.shape[1], tile).chunk(2, dim=-1)
        hidden = (clamped_swiglu(gate, up, limit) * weights.view(-1, 1)).to(x.dtype)
        hidden = hidden if activation_block is None else RoundRows.apply(hidden, activation_block)
        return _SumSlots.apply(_GroupedProduct.apply(hidden, second, groups, 1, down_tile), indices, experts)
    # The rows of one token are rounded by each of their readers, which is less than a launch of its own.
    ordered = x.contiguous() if tile.bm == 1 and activation_block else _ordered(x, fp4, activation_block)
    hidden = _gate_up(ordered, first, weights, groups, limit, activation_block, tile)
    results = torch.empty(len(hidden), x.shape[1], dtype=x.dtype, device=x.device)
    return _SumSlots.apply(_grouped(hidden, second, groups, 1, down_tile, results), indices, experts)


packed_experts.has_backward = True
