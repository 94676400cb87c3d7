"""Number formats of the released checkpoints, by table, in float64 (V4.1 contract section 2).

A format is a sorted table of the magnitudes it can hold; encoding picks the nearest one, ties to the even code. The sign,
also that of zero, is the top bit of the code. Scales multiply: value = code value * scale. Every block runs along the
last axis.
"""

import numpy as np


def _e4m3_magnitude(code):
    exponent, mantissa = code >> 3, code & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    if exponent == 0:
        return mantissa / 8 * 2.0**-6
    return (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def _e2m1_magnitude(code):
    exponent, mantissa = code >> 1, code & 1
    if exponent == 0:
        return mantissa / 2
    return (1 + mantissa / 2) * 2.0 ** (exponent - 1)


E4M3_MAGNITUDES = np.array([_e4m3_magnitude(code) for code in range(127)])  # 0 ... 448, without NaN
E2M1_MAGNITUDES = np.array([_e2m1_magnitude(code) for code in range(8)])  # 0 ... 6
E4M3_VALUES = np.array([_e4m3_magnitude(c) for c in range(128)] + [-_e4m3_magnitude(c) for c in range(128)])
E2M1_VALUES = np.concatenate([E2M1_MAGNITUDES, -E2M1_MAGNITUDES])
E8M0_VALUES = np.array([2.0 ** (code - 127) for code in range(255)] + [float("nan")])


def decode_e4m3(codes):
    """Return the float64 values of E4M3 bytes (0x7F and 0xFF are NaN)."""
    return E4M3_VALUES[np.asarray(codes, dtype=np.uint8)]


def decode_e2m1(codes):
    """Return the float64 values of E2M1 codes 0..15, one code per element."""
    return E2M1_VALUES[np.asarray(codes, dtype=np.uint8)]


def decode_e8m0(codes):
    """Return the float64 powers of two of E8M0 bytes: 2^(code - 127), 255 is NaN."""
    return E8M0_VALUES[np.asarray(codes, dtype=np.uint8)]


def _nearest_even(magnitudes, values):
    """Return the code of the nearest magnitude, ties to the even code; values beyond the largest take its code."""
    values = np.abs(values)
    above = np.clip(np.searchsorted(magnitudes, values, side="left"), 1, len(magnitudes) - 1)
    below = above - 1
    middle = (magnitudes[below] + magnitudes[above]) / 2
    even = np.where(below % 2 == 0, below, above)
    return np.where(values < middle, below, np.where(values > middle, above, even))


def encode_e4m3(values):
    """Return E4M3 bytes of values, clamped to +-448, round to nearest even."""
    values = np.asarray(values, dtype=np.float64)
    return (_nearest_even(E4M3_MAGNITUDES, values) + 128 * np.signbit(values)).astype(np.uint8)


def encode_e2m1(values):
    """Return E2M1 codes 0..15 of values, clamped to +-6, round to nearest even."""
    values = np.asarray(values, dtype=np.float64)
    return (_nearest_even(E2M1_MAGNITUDES, values) + 8 * np.signbit(values)).astype(np.uint8)


def exponent_up(values):
    """Return ceil(log2 a) of positive float32 values, exact at powers of two."""
    mantissa, exponent = np.frexp(np.asarray(values, dtype=np.float32).astype(np.float64))  # a = m * 2^e, .5 <= m < 1
    return np.where(mantissa == 0.5, exponent - 1, exponent)


def _blocks(values, size):
    values = np.asarray(values).astype(np.float32)  # the formats are defined on values read in float32
    if values.shape[-1] % size:
        raise ValueError(f"values: last axis {values.shape[-1]} is not a multiple of the block size {size}")
    return values.reshape(*values.shape[:-1], values.shape[-1] // size, size)


def _power_of_two_scale(blocks, floor, top):
    """Return E8M0 bytes: P(max(amax, floor) * float32(1 / top)) of each block, the product taken in float32."""
    largest = np.maximum(np.abs(blocks).max(-1), np.float32(floor))
    return (exponent_up(largest * np.float32(1 / top)) + 127).astype(np.uint8)


def _divide(blocks, scale):
    return (blocks / scale[..., None].astype(np.float32)).astype(np.float64)  # a true float32 division


def quantize_fp8(values):
    """Return (E4M3 bytes [..., D], E8M0 bytes [..., D / 32]) of Q8."""
    blocks = _blocks(values, 32)
    scale = _power_of_two_scale(blocks, 1e-4, 448)
    return encode_e4m3(_divide(blocks, decode_e8m0(scale))).reshape(np.shape(values)), scale


def quantize_mxfp4(values):
    """Return (E2M1 codes [..., D], one per byte, E8M0 bytes [..., D / 32]) of Q4e8."""
    blocks = _blocks(values, 32)
    scale = _power_of_two_scale(blocks, 6 * 2.0**-126, 6)
    return encode_e2m1(_divide(blocks, decode_e8m0(scale))).reshape(np.shape(values)), scale


def quantize_nvfp4(values):
    """Return (E2M1 codes [..., D], one per byte, E4M3 bytes [..., D / 16]) of Q4e4; there is no global scale."""
    blocks = _blocks(values, 16)
    largest = np.maximum(np.abs(blocks).max(-1), np.float32(6 * 2.0**-9))
    scale = encode_e4m3(largest / np.float32(6))
    return encode_e2m1(_divide(blocks, decode_e4m3(scale))).reshape(np.shape(values)), scale


def _scaled(values, scale, size):
    return values * np.repeat(scale, size, axis=-1)


def round_fp8(values):
    """Q8: return values after a round trip through E4M3 with one power-of-two scale per 32."""
    codes, scale = quantize_fp8(values)
    return _scaled(decode_e4m3(codes), decode_e8m0(scale), 32)


def round_mxfp4(values):
    """Q4e8: return values after a round trip through E2M1 with one power-of-two scale per 32."""
    codes, scale = quantize_mxfp4(values)
    return _scaled(decode_e2m1(codes), decode_e8m0(scale), 32)


def round_nvfp4(values):
    """Q4e4: return values after a round trip through E2M1 with one E4M3 scale per 16."""
    codes, scale = quantize_nvfp4(values)
    return _scaled(decode_e2m1(codes), decode_e4m3(scale), 16)


def nearest_tie(values, kind):
    """Return, for every value, the nearest value halfway between two codes of its block's scale.

    `kind` is "fp8", "mxfp4" or "nvfp4". Two correct implementations may take different codes for a value that lies within
    float32 noise of its tie; whether a difference is of that sort is what this tells.
    """
    quantize, decode_scale, magnitudes, size = {
        "fp8": (quantize_fp8, decode_e8m0, E4M3_MAGNITUDES, 32),
        "mxfp4": (quantize_mxfp4, decode_e8m0, E2M1_MAGNITUDES, 32),
        "nvfp4": (quantize_nvfp4, decode_e4m3, E2M1_MAGNITUDES, 16),
    }[kind]
    values = np.asarray(values, dtype=np.float64)
    scale = np.repeat(decode_scale(quantize(values)[1]), size, axis=-1)
    middles = (magnitudes[1:] + magnitudes[:-1]) / 2
    nearest = np.abs(np.abs(values / scale)[..., None] - middles).argmin(axis=-1)
    return np.copysign(middles[nearest] * scale, values)


def unpack_fp4(packed):
    """Return E2M1 codes [..., 2 * n] of bytes [..., n]: the even column is the low nibble."""
    packed = np.asarray(packed).view(np.uint8)
    codes = np.empty((*packed.shape[:-1], packed.shape[-1] * 2), dtype=np.uint8)
    codes[..., 0::2] = packed & 15
    codes[..., 1::2] = packed >> 4
    return codes


def dequantize_fp8_tiles(codes, scale_codes, tile=(32, 32)):
    """Return the float64 weight [O, I] of E4M3 bytes and E8M0 bytes [ceil(O / tile), ceil(I / tile)]."""
    rows, columns = np.shape(codes)
    scale = np.repeat(np.repeat(decode_e8m0(scale_codes), tile[0], axis=0), tile[1], axis=1)
    return decode_e4m3(codes) * scale[:rows, :columns]


def dequantize_fp4_rows(packed, scale_codes, block=32):
    """Return the float64 weight [O, I] of packed E2M1 bytes [O, I / 2] and E8M0 bytes [O, I / block]."""
    return _scaled(decode_e2m1(unpack_fp4(packed)), decode_e8m0(scale_codes), block)


def dequantize_fp8_rows(codes, scale_codes, block=32):
    """Return the float64 n-gram table [R, E] of E4M3 bytes and E8M0 bytes [R, E / block]."""
    return _scaled(decode_e4m3(codes), decode_e8m0(scale_codes), block)
