"""Number formats of the released checkpoints and of the cache: FP8 E4M3, FP4 E2M1, and their block scales.

Pure functions on tensors, all along the last axis. Three formats round activations and cache entries (contract
section 2); two store weights:

    fp8     E4M3 values, one power-of-two scale per block        linear inputs, window entries, dense weights (tiles)
    mxfp4   E2M1 values, one power-of-two scale per 32           index queries and keys, expert weights (rows)
    nvfp4   E2M1 values, one E4M3 scale per 16, no global scale  compressed entries

A quantised tensor is always a pair (values, scale) with x = values * scale. Scales are stored as uint8 codes: a
power-of-two scale as its biased exponent (E8M0), an NVFP4 scale as its E4M3 byte. Two FP4 codes share a byte, the even
column in the low nibble.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

E4M3_MAX = 448.0
E2M1_MAX = 6.0
# Floors of the block maximum (contract section 2): they fix the scale of an all-zero block.
FP8_AMAX_FLOOR = 1e-4
MXFP4_AMAX_FLOOR = 6 * 2.0**-126
NVFP4_AMAX_FLOOR = 6 * 2.0**-9

FP8_BLOCK, MXFP4_BLOCK, NVFP4_BLOCK = 32, 32, 16

# Codes of a stored weight that are looked up at a time: their int32 copies are the only memory beside the result.
LOOKUP_CODES = 1 << 20

# Rounding boundaries between neighbouring magnitudes. A tie goes to the even code (contract section 2), so the
# boundary above an even code belongs to it and the boundary above an odd code to the next one.
_E2M1_TIES_DOWN = (0.25, 1.25, 2.5, 5.0)
_E2M1_TIES_UP = (0.75, 1.75, 3.5)


def power_of_two_scale(amax: torch.Tensor, top: float, floor: float) -> torch.Tensor:
    r"""Return the smallest power of two that brings a block maximum below the format's largest value.

    Implements contract section 2:  2 ** ceil(log2(max(amax, floor) * fp32(1 / top))), on the float32 bit pattern, so
    that it is exact at powers of two.

    Args:
        amax (`torch.Tensor` of any shape, float32): largest magnitude of each block.
        top (`float`): largest value of the format (448 or 6).
        floor (`float`): smallest block maximum.

    Returns:
        `torch.Tensor` of the shape of `amax`, uint8: E8M0 codes, scale = 2 ** (code - 127).
    """
    # Made on the device: a copy from the host could not be part of a captured graph.
    reciprocal = torch.full((), 1.0 / top, dtype=torch.float32, device=amax.device)
    bits = (amax.float().clamp(min=floor) * reciprocal).view(torch.int32)
    return ((bits >> 23) + ((bits & 0x7FFFFF) != 0)).clamp(0, 254).to(torch.uint8)


def decode_e8m0(code: torch.Tensor) -> torch.Tensor:
    r"""Return the value of E8M0 codes: 2 ** (code - 127), NaN for code 255.

    Args:
        code (`torch.Tensor` of any shape, uint8 or float8_e8m0fnu).

    Returns:
        `torch.Tensor` of the shape of `code`, float32.
    """
    code = as_bytes(code).to(torch.int32)
    value = (code << 23).view(torch.float32)
    # Exponent field 0 would read as zero; 2**-127 is a subnormal. Field 255 would read as infinity.
    value = torch.where(code == 0, torch.full_like(value, 2.0**-127), value)
    return torch.where(code == 255, torch.full_like(value, float("nan")), value)


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """Return the bytes of an 8-bit tensor as uint8, without a copy."""
    return x if x.dtype == torch.uint8 else x.view(torch.uint8)


def decode_scale(scale: torch.Tensor) -> torch.Tensor:
    r"""Return stored weight scales as float32.

    Args:
        scale (`torch.Tensor` of any shape): float8_e8m0fnu or uint8 (power-of-two codes), or float32 (V4 -Base).

    Returns:
        `torch.Tensor` of the same shape, float32.
    """
    return scale if scale.dtype == torch.float32 else decode_e8m0(scale)


def encode_e2m1(x: torch.Tensor) -> torch.Tensor:
    r"""Round to FP4 E2M1, ties to the even code; magnitudes above 6 become 6 and the sign of zero is kept.

    Args:
        x (`torch.Tensor` of any shape, float32).

    Returns:
        `torch.Tensor` of the same shape, uint8: codes 0 to 15, sign in bit 3.
    """
    magnitude = x.abs()
    code = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    for boundary in _E2M1_TIES_DOWN:
        code += magnitude > boundary
    for boundary in _E2M1_TIES_UP:
        code += magnitude >= boundary
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def decode_e2m1(code: torch.Tensor) -> torch.Tensor:
    """Return the float32 values of E2M1 codes 0 to 15 (uint8, any shape)."""
    # The table is computed on the device: a copy from the host could not be part of a captured graph. Codes from 2 on are
    # the top bits of a float32 with another exponent bias; 0 and 1 are 0 and a half.
    codes = torch.arange(16, dtype=torch.int32, device=code.device)
    magnitude = codes & 7
    small = (magnitude.float() * 0.5).view(torch.int32)
    bits = torch.where(magnitude < 2, small, (magnitude << 22) + (126 << 23)) | (codes & 8) << 28
    return bits.view(torch.float32)[code.long()]


def pack_nibbles(code: torch.Tensor) -> torch.Tensor:
    """Pack codes `[..., N]` (uint8, N even) two a byte `[..., N // 2]`, even column in the low nibble."""
    return code[..., 0::2] | (code[..., 1::2] << 4)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Unpack bytes `[..., N // 2]` (uint8 or int8) to codes `[..., N]` uint8; the inverse of `pack_nibbles`."""
    packed = as_bytes(packed)
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)


def _blocks(x: torch.Tensor, block: int) -> torch.Tensor:
    """View `[..., N]` as `[..., ceil(N / block), block]` float32, the last block filled with zeros."""
    x = F.pad(x.float(), (0, -x.shape[-1] % block))
    return x.unflatten(-1, (-1, block))


def _unblocks(x: torch.Tensor, width: int) -> torch.Tensor:
    return x.flatten(-2)[..., :width]


def quantize_fp8(x: torch.Tensor, *, block: int = FP8_BLOCK) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Quantise to FP8 E4M3 with one power-of-two scale per block (contract section 2, Q8).

    Args:
        x (`torch.Tensor` of shape `[..., N]`, any float dtype).
        block (`int`, *optional*, defaults to 32): channels per scale; the last block may be shorter.

    Returns:
        values (`torch.Tensor` of shape `[..., N]`, float8_e4m3fn) and
        scale (`torch.Tensor` of shape `[..., ceil(N / block)]`, uint8 E8M0 codes).
    """
    blocks = _blocks(x, block)
    scale = power_of_two_scale(blocks.abs().amax(-1), E4M3_MAX, FP8_AMAX_FLOOR)
    values = (blocks / decode_e8m0(scale)[..., None]).clamp(-E4M3_MAX, E4M3_MAX)
    return _unblocks(values, x.shape[-1]).to(torch.float8_e4m3fn), scale


def dequantize_fp8(values: torch.Tensor, scale: torch.Tensor, *, block: int = FP8_BLOCK) -> torch.Tensor:
    """Return values `[..., N]` float8_e4m3fn times scale `[..., ceil(N / block)]` (E8M0 codes), as float32."""
    return _unblocks(_blocks(values, block) * decode_e8m0(scale)[..., None], values.shape[-1])


def quantize_mxfp4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Quantise to packed FP4 E2M1 with one power-of-two scale per 32 channels (contract section 2, Q4e8).

    Args:
        x (`torch.Tensor` of shape `[..., N]`, any float dtype, N even).

    Returns:
        packed (`torch.Tensor` of shape `[..., N // 2]`, uint8) and
        scale (`torch.Tensor` of shape `[..., ceil(N / 32)]`, uint8 E8M0 codes).
    """
    blocks = _blocks(x, MXFP4_BLOCK)
    scale = power_of_two_scale(blocks.abs().amax(-1), E2M1_MAX, MXFP4_AMAX_FLOOR)
    codes = encode_e2m1(blocks / decode_e8m0(scale)[..., None])
    return pack_nibbles(_unblocks(codes, x.shape[-1])), scale


def dequantize_mxfp4(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the float32 values `[..., N]` of packed MXFP4 `[..., N // 2]` and its scale codes."""
    values = decode_e2m1(unpack_nibbles(packed))
    return _unblocks(_blocks(values, MXFP4_BLOCK) * decode_e8m0(scale)[..., None], values.shape[-1])


def quantize_nvfp4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Quantise to packed FP4 E2M1 with one E4M3 scale per 16 channels and no global scale (contract section 2, Q4e4).

    Source: V4.1 report section 2.4.4; largest magnitude 448 * 6 = 2688.

    Args:
        x (`torch.Tensor` of shape `[..., N]`, any float dtype, N even).

    Returns:
        packed (`torch.Tensor` of shape `[..., N // 2]`, uint8) and
        scale (`torch.Tensor` of shape `[..., ceil(N / 16)]`, uint8 bytes of E4M3 values).
    """
    blocks = _blocks(x, NVFP4_BLOCK)
    amax = blocks.abs().amax(-1).clamp(min=NVFP4_AMAX_FLOOR)
    # A true division here, unlike the power-of-two scales (contract section 2).
    scale = (amax / E2M1_MAX).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
    codes = encode_e2m1(blocks / scale.float()[..., None])
    return pack_nibbles(_unblocks(codes, x.shape[-1])), scale.view(torch.uint8)


def dequantize_nvfp4(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the float32 values `[..., N]` of packed NVFP4 `[..., N // 2]` and its E4M3 scale bytes."""
    values = decode_e2m1(unpack_nibbles(packed))
    scale = scale.view(torch.float8_e4m3fn).float()
    return _unblocks(_blocks(values, NVFP4_BLOCK) * scale[..., None], values.shape[-1])


class _RoundStraightThrough(torch.autograd.Function):
    """Round through a format and back; the gradient passes as if nothing had been rounded (V4.1 report, 2.4.4)."""

    @staticmethod
    def forward(ctx, x, quantize, dequantize):
        return dequantize(*quantize(x)).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        return grad, None, None


def round_fp8(x: torch.Tensor, *, block: int = FP8_BLOCK) -> torch.Tensor:
    """Round `[..., N]` to what FP8 with power-of-two block scales stores; dtype of `x`, straight-through gradient."""
    return _RoundStraightThrough.apply(x, partial(quantize_fp8, block=block), partial(dequantize_fp8, block=block))


def round_mxfp4(x: torch.Tensor) -> torch.Tensor:
    """Round `[..., N]` to what MXFP4 stores; dtype of `x`, straight-through gradient."""
    return _RoundStraightThrough.apply(x, quantize_mxfp4, dequantize_mxfp4)


def round_nvfp4(x: torch.Tensor) -> torch.Tensor:
    """Round `[..., N]` to what NVFP4 without a global scale stores; dtype of `x`, straight-through gradient."""
    return _RoundStraightThrough.apply(x, quantize_nvfp4, dequantize_nvfp4)


def round_fp8_tiles(weight: torch.Tensor, *, block_size: tuple[int, int] = (32, 32)) -> torch.Tensor:
    """Round a matrix `[O, I]` to what FP8 tiles store; dtype of `weight`, straight-through gradient."""
    options = {"block_size": block_size}
    return _RoundStraightThrough.apply(
        weight, partial(quantize_fp8_tiles, **options), partial(dequantize_fp8_tiles, **options)
    )


def quantize_fp8_tiles(
    weight: torch.Tensor, *, block_size: tuple[int, int] = (32, 32)
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Quantise a weight matrix to FP8 E4M3 with one power-of-two scale per tile, the released form.

    Args:
        weight (`torch.Tensor` of shape `[O, I]`, any float dtype).
        block_size (`tuple[int, int]`, *optional*, defaults to `(32, 32)`): (rows, columns) per tile, in elements.

    Returns:
        values (`[O, I]`, float8_e4m3fn) and scale (`[ceil(O / rows), ceil(I / columns)]`, float8_e8m0fnu).
    """
    (rows, cols), (out_features, in_features) = block_size, weight.shape
    padded = F.pad(weight.float(), (0, -in_features % cols, 0, -out_features % rows))
    tiles = padded.unflatten(1, (-1, cols)).unflatten(0, (-1, rows))
    scale = power_of_two_scale(tiles.abs().amax((1, 3)), E4M3_MAX, FP8_AMAX_FLOOR)
    values = (tiles / decode_e8m0(scale)[:, None, :, None]).clamp(-E4M3_MAX, E4M3_MAX)
    values = values.flatten(2, 3).flatten(0, 1)[:out_features, :in_features]
    return values.to(torch.float8_e4m3fn), scale.view(torch.float8_e8m0fnu)


def dequantize_fp8_tiles(
    values: torch.Tensor, scale: torch.Tensor, *, block_size: tuple[int, int] = (32, 32), dtype=torch.float32
) -> torch.Tensor:
    r"""Return the float weight of FP8 tiles; exact in bfloat16 and wider.

    Args:
        values (`torch.Tensor` of shape `[O, I]`, float8_e4m3fn).
        scale (`torch.Tensor` of shape `[ceil(O / rows), ceil(I / columns)]`, float8_e8m0fnu or float32): multiplier.
        block_size (`tuple[int, int]`, *optional*, defaults to `(32, 32)`): (rows, columns) per tile, in elements.
        dtype (`torch.dtype`, *optional*, defaults to float32): of the result.

    Returns:
        `torch.Tensor` of shape `[O, I]` and `dtype`.
    """
    rows, cols = block_size
    # Codes stay codes, so that the rows are unpacked in the dtype that is wanted.
    scale = scale if scale.dtype == torch.float32 else as_bytes(scale)
    scale = scale.repeat_interleave(rows, 0)[: values.shape[0]]
    return dequantize_rows(values, scale, block=cols, dtype=dtype)


def _lookup(table: torch.Tensor, code: torch.Tensor) -> torch.Tensor:
    """Return `table[code]` for byte codes; index_select is twice as fast here as a cast from float8."""
    codes = as_bytes(code).flatten()
    if len(codes) <= LOOKUP_CODES:
        return table.index_select(0, codes.int()).view(code.shape)
    values = torch.empty(len(codes), dtype=table.dtype, device=table.device)
    for some, place in zip(codes.split(LOOKUP_CODES), values.split(LOOKUP_CODES), strict=True):
        torch.index_select(table, 0, some.int(), out=place)
    return values.view(code.shape)


def _scale_rows(values: torch.Tensor, scale: torch.Tensor, block: int) -> torch.Tensor:
    """Multiply `[..., I]` by one scale per `block` columns `[..., ceil(I / block)]`, in place where it can."""
    width = values.shape[-1]
    if width % block:
        return values * scale.repeat_interleave(block, -1)[..., :width]
    values.unflatten(-1, (-1, block)).mul_(scale[..., None])
    return values


def _working_dtype(scale: torch.Tensor, dtype: torch.dtype) -> torch.dtype:
    """A power-of-two scale keeps every product exact in bfloat16; a float32 scale needs one rounding, at the end."""
    wide = scale.dtype == torch.float32 or dtype == torch.float16
    return torch.promote_types(dtype, torch.float32) if wide else dtype


def dequantize_rows(values: torch.Tensor, scale: torch.Tensor, *, block: int, dtype=torch.float32) -> torch.Tensor:
    r"""Return float rows of FP8 values with one scale per row and `block` columns.

    Args:
        values (`torch.Tensor` of shape `[..., I]`, float8_e4m3fn).
        scale (`torch.Tensor` of shape `[..., ceil(I / block)]`, float8_e8m0fnu, uint8 codes or float32).
        block (`int`): columns per scale.
        dtype (`torch.dtype`, *optional*, defaults to float32): of the result.

    Returns:
        `torch.Tensor` of shape `[..., I]` and `dtype`, fresh memory.
    """
    working = _working_dtype(scale, dtype)
    codes = torch.arange(256, dtype=torch.uint8, device=values.device)
    table = codes.view(torch.float8_e4m3fn).to(working)
    return _scale_rows(_lookup(table, values), decode_scale(scale).to(working), block).to(dtype)


def quantize_fp4_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Quantise a weight matrix to packed FP4 rows, the released form of routed experts.

    Args:
        weight (`torch.Tensor` of shape `[..., O, I]`, any float dtype, I even).

    Returns:
        packed (`[..., O, I // 2]`, int8) and scale (`[..., O, ceil(I / 32)]`, float8_e8m0fnu).
    """
    packed, scale = quantize_mxfp4(weight)
    return packed.view(torch.int8), scale.view(torch.float8_e8m0fnu)


def dequantize_fp4_rows(packed: torch.Tensor, scale: torch.Tensor, *, dtype=torch.float32) -> torch.Tensor:
    r"""Return the float weight of packed FP4 rows; exact in bfloat16 and wider.

    Args:
        packed (`torch.Tensor` of shape `[..., O, I // 2]`, int8 or uint8).
        scale (`torch.Tensor` of shape `[..., O, ceil(I / 32)]`, float8_e8m0fnu, uint8 codes or float32).
        dtype (`torch.dtype`, *optional*, defaults to float32): of the result.

    Returns:
        `torch.Tensor` of shape `[..., O, I]` and `dtype`.
    """
    working = _working_dtype(scale, dtype)
    codes = torch.arange(256, dtype=torch.uint8, device=packed.device)
    # One look-up per byte gives both of its values: a row of the table is one word.
    pairs = decode_e2m1(unpack_nibbles(codes[:, None])).to(working)
    word = {2: torch.int32, 4: torch.int64}.get(working.itemsize)
    if word is None:  # float64 pairs have no word type
        values = decode_e2m1(unpack_nibbles(packed)).to(working)
    else:
        values = _lookup(pairs.view(word).squeeze(-1), packed).view(working)
    return _scale_rows(values, decode_scale(scale).to(working), MXFP4_BLOCK).to(dtype)
