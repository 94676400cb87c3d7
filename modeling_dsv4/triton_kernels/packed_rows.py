"""What products with packed weights are made of: a tile of packed rows times inputs, rounding inputs, unpacking.

Sources: contract section 2, `modeling_dsv4/fp_codecs.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .number_formats import (
    FP4_SHORTFALL,
    cast,
    e2m1_operands,
    e4m3_operand,
    operand_dtype,
    operand_scale,
    round_fp8,
    spread,
)


class Tile(NamedTuple):
    """Weight rows, input rows and columns of a tile, parts of K side by side in it; stages, warps; parts of K apart."""

    bn: int
    bm: int
    bk: int
    split: int
    stages: int
    warps: int
    parts: int = 1

    def of(self, span: int) -> tuple[int, ...]:
        """Return the first five, without a split where its parts of `span` columns would not be whole tiles."""
        split = self.split if span % (self.split * self.bk) == 0 else 1
        return self.bn, self.bm, self.bk, split, self.stages


@triton.jit
def _repeat(x, TIMES: tl.constexpr, SIZE: tl.constexpr):
    """A vector `[SIZE]`, TIMES in a row."""
    return tl.reshape(tl.broadcast_to(x[None, :], [TIMES, SIZE]), [TIMES * SIZE])


@triton.jit
def _multiply(weight, values, acc, TRANSPOSED: tl.constexpr):
    """Add weight `[N, K]` times values `[K, M]`, or its transpose."""
    if TRANSPOSED:
        weight, values = tl.trans(values), tl.trans(weight)
    return tl.dot(weight, values, acc, input_precision="ieee")


@triton.jit
def multiply_rows(
    weight,
    scale,
    rows,
    scale_rows,
    x,
    x_rows,
    x_mask,
    X_STRIDE: tl.constexpr,
    K: tl.constexpr,
    SPAN: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    FP4: tl.constexpr,
    ONE_SCALE: tl.constexpr,
    TILE_COLS: tl.constexpr,
    ROUND_BLOCK: tl.constexpr,
):
    """Sum over `SPAN` of the K columns of packed weight rows `[BN]` times input rows `[BM]`: `[BN, BM]` float32.

    `ONE_SCALE`: all rows have the same row of scales (FP8 alone). `ROUND_BLOCK` > 0 rounds the inputs here, for a few
    rows; else, for FP4, a row holds its K/2 even columns and then the odd ones. `SPLIT` > 1 (SPAN a multiple of SPLIT * BK)
    gives more warps work: the tile then has as many parts of K side by side, each with rows and columns of its own, and only
    the products of a part with itself are kept.
    """
    DTYPE: tl.constexpr = operand_dtype(x.dtype.element_ty)
    PAIRS: tl.constexpr = FP4 and ROUND_BLOCK == 0  # even and odd inputs are loaded apart
    WIDTH: tl.constexpr = BK // 2 if FP4 else BK
    PER_SCALE: tl.constexpr = TILE_COLS // 2 if FP4 else TILE_COLS
    GROUPS: tl.constexpr = WIDTH // PER_SCALE
    ROWS: tl.constexpr = SPLIT * BN
    COLUMNS: tl.constexpr = SPLIT * BM
    X_WIDTH: tl.constexpr = WIDTH if PAIRS else BK
    width: tl.constexpr = K // 2 if FP4 else K
    span: tl.constexpr = SPAN // 2 if FP4 else SPAN
    x_part: tl.constexpr = (SPAN // 2 if PAIRS else SPAN) // SPLIT
    part: tl.constexpr = span // SPLIT
    groups: tl.constexpr = tl.cdiv(K, TILE_COLS)
    row_part, column_part = tl.arange(0, ROWS) // BN, tl.arange(0, COLUMNS) // BM
    if SPLIT > 1:
        rows, scale_rows = _repeat(rows, SPLIT, BN), _repeat(scale_rows, SPLIT, BN)
        x_rows, x_mask = _repeat(x_rows, SPLIT, BM), _repeat(x_mask, SPLIT, BM)
    # Weights are unpacked into registers; from 64 columns on their matrix instruction wants them in shared memory.
    WIDE: tl.constexpr = COLUMNS >= 64
    FOLD: tl.constexpr = ONE_SCALE and not WIDE
    k, x_k = tl.arange(0, WIDTH), tl.arange(0, X_WIDTH)
    weight += (rows * width + row_part * part)[:, None] + k[None, :]
    x += (x_rows * X_STRIDE + column_part * x_part)[None, :] + x_k[:, None]
    if FOLD:  # one scale for all rows of the tile: the inputs take it
        group = tl.arange(0, GROUPS)[:, None] + (column_part * (part // PER_SCALE))[None, :]
        scale += tl.max(scale_rows) * groups + group
    else:
        group = tl.arange(0, GROUPS)[None, :] + (row_part * (part // PER_SCALE))[:, None]
        scale += scale_rows[:, None] * groups + group
    codes = tl.load(scale, mask=group < groups, other=0)
    acc = tl.zeros([COLUMNS, ROWS] if WIDE else [ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, part, WIDTH, num_stages=STAGES):
        x_start = start if PAIRS or not FP4 else 2 * start
        wanted = x_mask[None, :]
        if SPAN % BK == 0:
            packed = tl.load(weight + start)
        else:
            packed = tl.load(weight + start, mask=k[None, :] < span - start, other=0)
            wanted = wanted & (x_k[:, None] < (span if PAIRS else SPAN) - x_start)
        values = tl.load(x + x_start, mask=wanted, other=0.0)
        s = operand_scale(codes, FP4, DTYPE)
        # Too narrow for an asynchronous copy: asked for an iteration ahead.
        later = start // PER_SCALE + GROUPS
        codes = tl.load(scale + later, mask=group < groups - later, other=0)
        if ROUND_BLOCK > 0:
            blocks = tl.reshape(tl.trans(values.to(tl.float32)), [COLUMNS * BK // ROUND_BLOCK, ROUND_BLOCK])
            values = tl.reshape(round_fp8(blocks), [COLUMNS, BK]).to(DTYPE)
            if FP4:
                values, odd_values = tl.split(tl.reshape(values, [COLUMNS, WIDTH, 2]))
                odd_values = tl.trans(odd_values)
            values = tl.trans(values)
        elif FP4:
            odd_values = tl.load(x + start + width, mask=wanted, other=0.0)
        values = values.to(DTYPE)
        if FOLD:
            values *= tl.reshape(tl.broadcast_to(s[:, None, :], [GROUPS, PER_SCALE, COLUMNS]), [BK, COLUMNS])
        else:
            s = spread(s, ROWS, GROUPS, PER_SCALE)
        if FP4:
            even, odd = e2m1_operands(packed, s)
            acc = _multiply(even, values, acc, WIDE)
            acc = _multiply(odd, odd_values.to(DTYPE), acc, WIDE)
        else:
            operand = e4m3_operand(packed, DTYPE)
            if not FOLD:
                operand *= s
            acc = _multiply(operand, values, acc, WIDE)
    if WIDE:
        acc = tl.trans(acc)
    if SPLIT > 1:
        acc = tl.where(row_part[:, None] == column_part[None, :], acc, 0.0)
        acc = tl.sum(tl.sum(tl.reshape(acc, [SPLIT, BN, SPLIT, BM]), axis=2), axis=0)
    return acc * FP4_SHORTFALL if FP4 else acc


@triton.jit
def _round_kernel(x, out, K, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, SPLIT: tl.constexpr):
    dtype: tl.constexpr = out.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * K
    column = (tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS))[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    value = round_fp8(tl.load(x + row + column, mask=column < K, other=0.0).to(tl.float32))
    value = cast(value, dtype)
    if SPLIT:
        even, odd = tl.split(tl.reshape(value, [BLOCKS * BLOCK // 2, 2]))
        pair = tl.program_id(1) * (BLOCKS * BLOCK // 2) + tl.arange(0, BLOCKS * BLOCK // 2)
        tl.store(out + row + pair, even, mask=pair < K // 2)
        tl.store(out + row + K // 2 + pair, odd, mask=pair < K // 2)
    else:
        tl.store(out + row + column, value, mask=column < K)


@triton.jit
def _unpack_kernel(
    weight, scale, out, N, K, TILE_ROWS: tl.constexpr, TILE_COLS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    DTYPE: tl.constexpr = operand_dtype(out.dtype.element_ty)
    n = tl.program_id(0) * BN + tl.arange(0, BN)[:, None]
    k = tl.program_id(1) * BK + tl.arange(0, BK)[None, :]
    mask = (n < N) & (k < K)
    packed = tl.load(weight + n * K + k, mask=mask, other=0)
    group = tl.program_id(1) * (BK // TILE_COLS) + tl.arange(0, BK // TILE_COLS)[None, :]
    groups = tl.cdiv(K, TILE_COLS)
    codes = tl.load(scale + (n // TILE_ROWS) * groups + group, mask=(n < N) & (group < groups), other=0)
    s = spread(operand_scale(codes, False, DTYPE), BN, BK // TILE_COLS, TILE_COLS)
    value = (e4m3_operand(packed, DTYPE) * s).to(tl.float32)
    tl.store(out + n * K + k, cast(value, out.dtype.element_ty), mask=mask)


def round_fp8_rows(x: torch.Tensor, *, block: int = 32, split: bool = False) -> torch.Tensor:
    """Round `[..., K]` to FP8, `block` channels a scale; `split` puts the even columns of a row before its odd ones."""
    rows, out = x.reshape(-1, x.shape[-1]).contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    blocks = max(1, 1024 // block)
    grid = len(rows), triton.cdiv(x.shape[-1], block * blocks)
    if len(rows):
        _round_kernel[grid](rows, out, x.shape[-1], block, blocks, split, num_warps=4)
    return out


class RoundRows(torch.autograd.Function):
    """`round_fp8_rows`; the gradient passes as if nothing had been rounded."""

    @staticmethod
    def forward(ctx, x, block):
        return round_fp8_rows(x, block=block)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def unpack_fp8_tiles(
    weight: torch.Tensor, scale: torch.Tensor, *, block_size: tuple[int, int] = (32, 32), dtype=torch.float32
) -> torch.Tensor:
    """Return the float weight of FP8 tiles; exact (see `dequantize_fp8_tiles`)."""
    (rows, cols), (n, k) = block_size, weight.shape
    out = torch.empty(n, k, dtype=dtype, device=weight.device)
    grid = triton.cdiv(n, 16), triton.cdiv(k, 256)
    _unpack_kernel[grid](
        weight.view(torch.uint8), scale.view(torch.uint8), out, n, k, rows, cols, 16, 256, num_warps=4
    )
    return out
