"""Engram memory on the device: rows of an FP8 table, and the gated sum into the streams.

The table may lie on the device or in pinned host memory, which a kernel reads through the bus, a row where it is looked
up. The gate takes one read and one write of the streams; the weights of a stream stay in registers over several tokens.

Source: contract section 8; the references are `dequantize_rows` and `add_memory` of the package.
"""

import torch
import triton
import triton.language as tl

from .number_formats import decode_e4m3, decode_e8m0, spread

# Rows that one program gathers, and tokens whose memory it adds.
ROWS = 16
TOKENS = 8


@triton.jit
def _gather_kernel(
    values, scales, rows, out, count, table_rows,
    DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    SCALES: tl.constexpr = (DIM + BLOCK - 1) // BLOCK
    PADDED: tl.constexpr = WIDTH // BLOCK
    place = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    row = tl.load(rows + place, place < count, other=0)
    # A row beyond the table is no memory access; it shows as NaN.
    inside = ((row >= 0) & (row < table_rows))[:, None]
    column, s = tl.arange(0, WIDTH)[None, :], tl.arange(0, PADDED)[None, :]
    codes = tl.load(values + row[:, None] * DIM + column, inside & (column < DIM), other=0)
    scale = tl.load(scales + row[:, None] * SCALES + s, inside & (s < SCALES), other=0)
    if scale.dtype == tl.uint8:
        scale = decode_e8m0(scale)
    found = tl.where(inside, decode_e4m3(codes) * spread(scale, COUNT, PADDED, BLOCK), float("nan"))
    written = (place < count)[:, None] & (column < DIM)
    tl.store(out + place.to(tl.int64)[:, None] * DIM + column, found.to(out.dtype.element_ty), written)


def gather_rows(
    values: torch.Tensor, scale: torch.Tensor, rows: torch.Tensor, *, block: int, dtype: torch.dtype
) -> torch.Tensor:
    r"""Return rows of an FP8 table as floats, exact in bfloat16 and wider where scales are powers of two.

    Args:
        values (`torch.Tensor` of shape `[R, D]`, float8_e4m3fn): on the device of `rows` or in pinned host memory.
        scale (`torch.Tensor` of shape `[R, ceil(D / block)]`, float8_e8m0fnu, uint8 codes or float32): beside `values`.
        rows (`torch.Tensor` of any shape, int64): rows beyond the table give NaN.
        block (`int`): channels that share a scale, a power of two.
        dtype (`torch.dtype`): of the result.

    Returns:
        `torch.Tensor` of shape `[*rows.shape, D]`.
    """
    count, dim = rows.numel(), values.shape[1]
    out = torch.empty(*rows.shape, dim, dtype=dtype, device=rows.device)
    if scale.dtype != torch.float32:
        scale = scale.view(torch.uint8)
    if count:
        _gather_kernel[(triton.cdiv(count, ROWS),)](
            values.view(torch.uint8), scale, rows.contiguous(), out, count, values.shape[0],
            DIM=dim, WIDTH=max(block, triton.next_power_of_2(dim)), BLOCK=block, COUNT=ROWS,
        )  # fmt: skip
    return out


@triton.jit
def _add_memory_kernel(
    streams, projected, q_weight, k_weight, image, out, tokens, eps, root,
    STREAMS: tl.constexpr, HIDDEN: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    stream, first = tl.program_id(0) % STREAMS, (tl.program_id(0) // STREAMS).to(tl.int64) * COUNT
    c = tl.arange(0, WIDTH)
    of_stream, there = stream * HIDDEN + c, c < HIDDEN
    weight = tl.load(q_weight + of_stream, there, other=0.0).to(tl.float32)
    weight *= tl.load(k_weight + of_stream, there, other=0.0).to(tl.float32)
    for token in range(COUNT):
        at = first + token
        near = there & (at < tokens)
        h = tl.load(streams + at * (STREAMS * HIDDEN) + of_stream, near, other=0.0).to(tl.float32)
        key = tl.load(projected + at * ((STREAMS + 1) * HIDDEN) + of_stream, near, other=0.0).to(tl.float32)
        value = tl.load(projected + at * ((STREAMS + 1) * HIDDEN) + STREAMS * HIDDEN + c, near, other=0.0).to(
            tl.float32
        )
        dot = tl.sum(h * weight * key)
        dot *= tl.rsqrt(tl.sum(h * h) / HIDDEN + eps) * tl.rsqrt(tl.sum(key * key) / HIDDEN + eps) * root
        size = tl.sqrt(tl.maximum(tl.abs(dot), 1e-6))
        gate = tl.sigmoid(tl.where(dot.to(tl.int32, bitcast=True) < 0, -size, size))
        if MASKED:
            gate = tl.where(tl.load(image + at, at < tokens, other=0) != 0, 0.0, gate)
        h += gate * value
        tl.store(out + at * (STREAMS * HIDDEN) + of_stream, h.to(out.dtype.element_ty), near)


def add_memory(
    streams: torch.Tensor,
    projected: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    image_mask: torch.Tensor | None = None,
    *,
    eps: float,
) -> torch.Tensor:
    r"""Add the gated memory to every stream; sums in float32.

    Args:
        streams (`torch.Tensor` of shape `[B, S, N, D]`, float).
        projected (`torch.Tensor` of shape `[B, S, (N + 1) * D]`): a key per stream, then the value they share.
        q_weight, k_weight (`torch.Tensor` of shape `[N, D]`).
        image_mask (`torch.Tensor` of shape `[B, S]`, bool, *optional*): positions whose gate is 0.
        eps (`float`): of both mean squares.

    Returns:
        `torch.Tensor` of shape `[B, S, N, D]`, dtype of `streams`, fresh memory.
    """
    count, hidden = streams.shape[-2:]
    tokens = streams.numel() // (count * hidden)
    out = torch.empty_like(streams, memory_format=torch.contiguous_format)
    group = 1 if tokens <= 4 * TOKENS else TOKENS
    masked = image_mask is not None
    if tokens:
        _add_memory_kernel[(count * triton.cdiv(tokens, group),)](
            streams.contiguous(), projected.contiguous(), q_weight.contiguous(), k_weight.contiguous(),
            image_mask.contiguous().view(torch.uint8) if masked else out, out, tokens, eps, hidden**-0.5,
            STREAMS=count, HIDDEN=hidden, WIDTH=triton.next_power_of_2(hidden), MASKED=masked, COUNT=group,
            num_warps=8,
        )  # fmt: skip
    return out
