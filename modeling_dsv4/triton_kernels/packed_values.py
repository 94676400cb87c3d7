"""Values as the cache stores them: reading rows in a kernel, and unpacking whole stores.

Source: contract section 2, `modeling_dsv4/cache_storage.py`.
"""

import torch
import triton
import triton.language as tl

from .number_formats import decode_e2m1, decode_e4m3, decode_e8m0, spread

# "float": one tensor of values; "fp8": E4M3 and a power-of-two scale per 32 channels; "fp8_tail": per 64, and the last
# channels as they are; "nvfp4": E2M1 two a byte and an E4M3 scale per 16.
FORMATS = ("float", "fp8", "fp8_tail", "nvfp4")


@triton.jit
def read_rows(
    values,
    scales,
    tail,
    keep,
    dtype,
    FORMAT: tl.constexpr,
    DIM: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Tile `[N, BLOCK_D]` in `dtype` of the stored rows at the pointers `values`, `scales`, `tail` `[N]`; else zeros."""
    channel = tl.arange(0, BLOCK_D)
    rows: tl.constexpr = keep.shape[0]
    if FORMAT == "float":
        x = tl.load(values[:, None] + channel[None, :], mask=keep[:, None] & (channel < DIM)[None, :], other=0.0)
    elif FORMAT == "nvfp4":
        pair = tl.arange(0, BLOCK_D // 2)
        code = tl.load(values[:, None] + pair[None, :], mask=keep[:, None] & (pair < DIM // 2)[None, :], other=0)
        group = tl.arange(0, BLOCK_D // 16)
        scale = tl.load(scales[:, None] + group[None, :], mask=keep[:, None] & (group * 16 < DIM)[None, :], other=0)
        scale = spread(decode_e4m3(scale), rows, BLOCK_D // 16, 8)
        pairs = tl.join(decode_e2m1(code & 15) * scale, decode_e2m1(code >> 4) * scale)
        x = tl.reshape(pairs, (rows, BLOCK_D))
    else:
        GROUP: tl.constexpr = 32 if FORMAT == "fp8" else 64
        PARTS: tl.constexpr = (BLOCK_D + GROUP - 1) // GROUP
        rounded = channel < DIM - TAIL
        code = tl.load(values[:, None] + channel[None, :], mask=keep[:, None] & rounded[None, :], other=0)
        group = tl.arange(0, PARTS)
        inside = keep[:, None] & (group * GROUP < DIM - TAIL)[None, :]
        scale = decode_e8m0(tl.load(scales[:, None] + group[None, :], mask=inside, other=127))
        x = decode_e4m3(code) * spread(scale, rows, PARTS, BLOCK_D // PARTS)
        if TAIL > 0:
            inside = keep[:, None] & (~rounded & (channel < DIM))[None, :]
            x += tl.load(tail[:, None] + (channel - (DIM - TAIL))[None, :], mask=inside, other=0.0).to(tl.float32)
    return x.to(dtype)


@triton.jit
def _unpack(
    values,
    values_row,
    values_column,
    scales,
    scales_row,
    scales_column,
    tail,
    tail_row,
    tail_column,
    out,
    count,
    FORMAT: tl.constexpr,
    DIM: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    keep = column < count
    dtype: tl.constexpr = out.dtype.element_ty
    values += row * values_row + column * values_column
    scales += row * scales_row + column * scales_column
    tail += row * tail_row + column * tail_column
    x = read_rows(values, scales, tail, keep, dtype, FORMAT, DIM, TAIL, BLOCK_D)
    channel = tl.arange(0, BLOCK_D)
    where = (row * count + column)[:, None] * DIM + channel[None, :]
    tl.store(out + where, x, mask=keep[:, None] & (channel < DIM)[None, :])


def tail_channels(parts, codec: str) -> int:
    """Channels at the end that are stored as they are."""
    return parts[2].shape[-1] if parts and codec == "fp8_tail" else 0


def unpack(parts: tuple[torch.Tensor, ...], codec: str, like: torch.Tensor) -> torch.Tensor:
    """Return the values `[B, C, D]` of stored tensors `[B, C, ...]`; D and dtype are those of `like` `[..., D]`."""
    if codec == "float":
        return parts[0].to(like.dtype)
    (batch, count), dim = parts[0].shape[:2], like.shape[-1]
    out = like.new_empty(batch, count, dim)
    grid = triton.cdiv(count, 16), batch
    block_d = max(triton.next_power_of_2(dim), 16)
    _unpack[grid](
        *stored_tensors(parts, like),
        out,
        count,
        FORMAT=codec,
        DIM=dim,
        TAIL=tail_channels(parts, codec),
        BLOCK_K=16,
        BLOCK_D=block_d,
    )
    return out


def stored_tensors(parts, absent):
    """Three stored tensors of a format, each with its strides of rows and columns; what a format lacks is never read."""
    parts = (*(parts or ()), *[absent] * 3)[:3]
    return [x for part in parts for x in (part, part.stride(0), part.stride(1))]
