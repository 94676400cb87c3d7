"""Rotation by position, rounding to a format of the cache, and storing, in one pass over the new values.

The bytes are those of `CacheCodec.encode` for the rotated values, bit for bit.

Source: contract sections 2 and 5; the references are `rotate` (`modeling_dsv4/rotary.py`), `hadamard_rotate`
(`modeling_dsv4/sparse_attention.py`) and the codecs of `modeling_dsv4/cache_storage.py`.
"""

import torch
import triton
import triton.language as tl

from .number_formats import (
    decode_e2m1,
    decode_e4m3,
    decode_e8m0,
    encode_e2m1,
    encode_e4m3,
    power_of_two_scale,
    round_to,
    spread,
)

# Channels per scale of each format.
GROUPS = {"float": 16, "fp8": 32, "fp8_tail": 64, "nvfp4": 16, "mxfp4": 32}


@triton.jit
def _pairs(x):
    """Split channels `[ROWS, N]` into even and odd ones `[ROWS, N / 2]`."""
    return tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))


@triton.jit
def _channels(even, odd):
    """Undo `_pairs`."""
    return tl.reshape(tl.join(even, odd), (even.shape[0], 2 * even.shape[1]))


@triton.jit
def _hadamard(even, odd, ROWS: tl.constexpr, PAIRS: tl.constexpr):
    """Multiply rows, given as even and odd channels `[ROWS, PAIRS]`, by the Hadamard matrix without its factor."""
    even, odd = even + odd, even - odd
    for step in tl.static_range(0, 16):
        if (1 << step) < PAIRS:
            even = _butterfly(even, 1 << step, ROWS, PAIRS)
            odd = _butterfly(odd, 1 << step, ROWS, PAIRS)
    return even, odd


@triton.jit
def _butterfly(x, WIDTH: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """Replace channels `WIDTH` apart by their sum and difference."""
    parts = tl.permute(tl.reshape(x, (ROWS, SIZE // (2 * WIDTH), 2, WIDTH)), (0, 1, 3, 2))
    low, high = tl.split(parts)
    parts = tl.permute(tl.join(low + high, low - high), (0, 1, 3, 2))
    return tl.reshape(parts, (ROWS, SIZE))


@triton.jit
def _rotate_store(
    x,
    cos,
    sin,
    rounded,
    values,
    values_row,
    values_column,
    scales,
    scales_row,
    scales_column,
    tail,
    tail_row,
    tail_column,
    first,
    counts,
    vectors,
    length,
    heads,
    table_row,
    factor,
    slots,
    DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    TAIL: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    HADAMARD: tl.constexpr,
    PACKED: tl.constexpr,
    RING: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    HALF: tl.constexpr = BLOCK_D // 2
    GROUPS: tl.constexpr = BLOCK_D // GROUP
    dtype: tl.constexpr = x.dtype.element_ty
    vector = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = vector < vectors
    token = vector // heads
    row, t = token // length, token % length
    channel, pair = tl.arange(0, BLOCK_D), tl.arange(0, HALF)
    inside = there[:, None] & (channel < DIM)[None, :]
    where = vector[:, None] * DIM + channel[None, :]
    even, odd = _pairs(tl.load(x + where, mask=inside, other=0.0).to(tl.float32))

    # Products and sums are rounded one by one, as in PyTorch: the kernel is compiled without fused multiply-add.
    turn = pair - (DIM // 2 - PAIRS)
    rotary = there[:, None] & ((turn >= 0) & (turn < PAIRS))[None, :]
    angle = row[:, None] * table_row + t[:, None] * PAIRS + turn[None, :]
    c = tl.load(cos + angle, mask=rotary, other=1.0)
    s = tl.load(sin + angle, mask=rotary, other=0.0)
    turned_even = tl.where(rotary, round_to(even * c - odd * s, dtype), even)
    odd = tl.where(rotary, round_to(even * s + odd * c, dtype), odd)
    even = turned_even
    if HADAMARD:
        even, odd = _hadamard(even, odd, ROWS, HALF)
        even, odd = round_to(even * factor, dtype), round_to(odd * factor, dtype)

    is_rounded = (pair < (DIM - TAIL) // 2)[None, :]
    if FORMAT == "float":
        low, high = even, odd
    else:
        largest = tl.where(is_rounded, tl.maximum(tl.abs(even), tl.abs(odd)), 0.0)
        largest = tl.max(tl.reshape(largest, (ROWS, GROUPS, GROUP // 2)), axis=2)
        if FORMAT == "nvfp4":
            amax = tl.maximum(largest, 0.01171875)  # 6 * 2**-9
            code = encode_e4m3(tl.minimum(tl.div_rn(amax, tl.full((ROWS, GROUPS), 6.0, tl.float32)), 448.0))
            scale = decode_e4m3(code.to(tl.uint8))
        elif FORMAT == "mxfp4":
            code = power_of_two_scale(largest, 0.16666666666666666, 7.052966104933725e-38)  # 1 / 6, 6 * 2**-126
            scale = decode_e8m0(code)
        else:
            code = power_of_two_scale(largest, 0.002232142857142857, 1e-4)  # 1 / 448
            scale = decode_e8m0(code)
        scale = spread(scale, ROWS, GROUPS, GROUP // 2)
        low, high = tl.div_rn(even, scale), tl.div_rn(odd, scale)
        if FORMAT == "nvfp4" or FORMAT == "mxfp4":
            low_code, high_code = encode_e2m1(low), encode_e2m1(high)
            low, high = decode_e2m1(low_code) * scale, decode_e2m1(high_code) * scale
        else:
            low_code = encode_e4m3(tl.minimum(tl.maximum(low, -448.0), 448.0))
            high_code = encode_e4m3(tl.minimum(tl.maximum(high, -448.0), 448.0))
            low = tl.where(is_rounded, decode_e4m3(low_code.to(tl.uint8)) * scale, even)
            high = tl.where(is_rounded, decode_e4m3(high_code.to(tl.uint8)) * scale, odd)

    if rounded is not None:
        tl.store(rounded + where, _channels(low, high).to(dtype), mask=inside)
    if values is not None:
        column = tl.load(first + row, mask=there, other=0) + t
        if counts is not None:
            count = tl.load(counts + row, mask=there, other=0)
            there &= column < count
            if RING:  # it keeps the last ones
                there &= column >= count - slots
        if RING:
            column = column % slots
        values += (row * values_row + column * values_column)[:, None]
        if not PACKED:
            tl.store(values + channel[None, :], _channels(low, high).to(dtype), mask=there[:, None] & inside)
        else:
            if FORMAT == "nvfp4" or FORMAT == "mxfp4":
                stored = there[:, None] & (pair < DIM // 2)[None, :]
                tl.store(values + pair[None, :], (low_code | (high_code << 4)).to(tl.uint8), mask=stored)
            else:
                stored = there[:, None] & (channel < DIM - TAIL)[None, :]
                tl.store(values + channel[None, :], _channels(low_code, high_code).to(tl.uint8), mask=stored)
            group = tl.arange(0, GROUPS)
            scales += (row * scales_row + column * scales_column)[:, None] + group[None, :]
            tl.store(scales, code.to(tl.uint8), mask=there[:, None] & (group * GROUP < DIM - TAIL)[None, :])
            if TAIL > 0:
                behind = channel - (DIM - TAIL)
                tail += (row * tail_row + column * tail_column)[:, None] + behind[None, :]
                stored = there[:, None] & inside & (behind >= 0)[None, :]
                tl.store(tail, _channels(even, odd).to(dtype), mask=stored)


def rotate_store(
    x: torch.Tensor,
    table: tuple[torch.Tensor, torch.Tensor],
    codec: str,
    *,
    tail: int = 0,
    hadamard: bool = False,
    parts: tuple[torch.Tensor, ...] | None = None,
    first: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    ring: bool = False,
    values: bool = True,
) -> torch.Tensor | None:
    r"""Rotate vectors by their positions, round them to a format of the cache, and write them where they belong.

    Args:
        x (`torch.Tensor` of shape `[B, S, D]` or `[B, S, H, D]`, float32, bfloat16 or float16): D even.
        table: cosine and sine, each `[B or 1, S, P]` float32; the last 2P channels are rotated in adjacent pairs.
        codec (`str`): "float" (nothing is rounded), "fp8" (a scale per 32 channels), "fp8_tail" (per 64, without the
            last `tail` channels), "nvfp4" or "mxfp4".
        tail (`int`, *optional*): channels at the end that "fp8_tail" keeps as they are.
        hadamard (`bool`, *optional*): multiply by the orthonormal Hadamard matrix after the rotation (D a power of two).
        parts (tuple of `torch.Tensor`, each `[B, C, ...]`, *optional*): the stored tensors of the format, or one of the
            rounded values; written in place.
        first (`torch.Tensor` of shape `[B]`, int64): with `parts`, the column for the first vector of each row.
        counts (`torch.Tensor` of shape `[B]`, int64): with `parts`, columns from here on are not written.
        ring (`bool`, *optional*): column i lies at i % C, and of more than C columns the last ones are written.
        values (`bool`, *optional*): whether the rounded values are wanted.

    Returns:
        `torch.Tensor` of the shape and dtype of `x`, what reading back gives, or `None`.

    Raises:
        ValueError: for another codec.
    """
    if codec not in GROUPS:
        raise ValueError(f"codec is {codec!r}; accepted: {tuple(GROUPS)}.")
    x = x.contiguous()
    cos, sin = (t.contiguous() for t in table)
    dim, heads = x.shape[-1], x.shape[2] if x.ndim == 4 else 1
    vectors = x.numel() // dim
    rounded = torch.empty_like(x) if values else None
    if vectors == 0:
        return rounded
    stored = (*(parts or ()), None, None, None)[:3]
    block_d = max(triton.next_power_of_2(dim), GROUPS[codec])
    rows = max(1, 512 // block_d)
    _rotate_store[(triton.cdiv(vectors, rows),)](
        x,
        cos,
        sin,
        rounded,
        *(a for part in stored for a in ((None, 0, 0) if part is None else (part, part.stride(0), part.stride(1)))),
        first,
        counts,
        vectors,
        x.shape[1],
        heads,
        cos.stride(0) if cos.shape[0] > 1 else 0,
        dim**-0.5,
        parts[0].shape[1] if parts else 0,
        DIM=dim,
        PAIRS=cos.shape[-1],
        TAIL=tail,
        FORMAT=codec,
        GROUP=GROUPS[codec],
        HADAMARD=hadamard,
        PACKED=parts is not None and parts[0].dtype == torch.uint8,
        RING=ring,
        ROWS=rows,
        BLOCK_D=block_d,
        num_warps=1,
        enable_fp_fusion=False,
    )
    return rounded
