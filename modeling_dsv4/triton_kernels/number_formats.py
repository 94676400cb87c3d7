"""Device functions for the number formats of weights and cache: E2M1, E4M3, E8M0, and rounding to them.

Rounding is integer arithmetic on float32 bits, so that it is the same bit for bit on a GPU and under Triton's
interpreter. Kernels that divide or multiply and add before rounding are launched with `enable_fp_fusion=False`.

Source: contract section 2, `modeling_dsv4/fp_codecs.py`.
"""

import torch
import triton
import triton.language as tl

# Without NVIDIA's instructions, in integer arithmetic and float32 operands: under the interpreter and on other devices.
PLAIN: tl.constexpr = tl.constexpr(triton.knobs.runtime.interpret or torch.version.hip is not None)


@triton.jit
def spread(x, ROWS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr):
    """Repeat one number per group `[ROWS, GROUPS]` for its SIZE members: `[ROWS, GROUPS * SIZE]`."""
    return tl.reshape(tl.broadcast_to(x[:, :, None], (ROWS, GROUPS, SIZE)), (ROWS, GROUPS * SIZE))


@triton.jit
def decode_e8m0(code):
    """2 ** (code - 127) of uint8 codes as float32; code 0 is a subnormal, code 255 NaN."""
    code = code.to(tl.int32)
    bits = tl.where(code == 0, 0x00400000, code << 23)
    return tl.where(code == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def decode_e4m3(code):
    """Values of E4M3 bytes (uint8) as float32."""
    if PLAIN:
        code = code.to(tl.int32)
        bits = ((code & 0x7F) << 20) | ((code & 0x80) << 24)
        # 2**120 is the difference of the exponents' biases.
        value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
        value = tl.where((code & 0x7F) == 0x7F, float("nan"), value)
    else:
        value = code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    return value


@triton.jit
def decode_e2m1(code):
    """Values of E2M1 codes 0 to 15 (integer) as float32."""
    code = code.to(tl.int32)
    # The three low bits are exponent and mantissa of a float32 2**126 too small; 0.5 is a subnormal of both formats.
    bits = ((code & 7) << 22) | ((code & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """Round float32 to the values of `dtype`, to nearest even; still float32."""
    if PLAIN and dtype == tl.bfloat16:  # the interpreter's casts cut off
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        return bits.to(tl.float32, bitcast=True)
    return x.to(dtype).to(tl.float32)


@triton.jit
def cast(x, dtype: tl.constexpr):
    """Float32 in `dtype`, rounded to nearest even."""
    return round_to(x, dtype).to(dtype)


@triton.jit
def widened(x):
    """`x` in float32; bfloat16 in pairs, where casts take three instructions for two values."""
    if PLAIN or x.dtype != tl.bfloat16:
        value = x.to(tl.float32)
    else:
        value = tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;",
            "=&r,=&r,r",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    return value


@triton.jit
def narrowed(x, dtype: tl.constexpr):
    """`cast`; to bfloat16 in pairs, where casts convert one at a time at a quarter of the speed."""
    if PLAIN or dtype != tl.bfloat16:
        value = cast(x, dtype)
    else:
        value = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    return value


@triton.jit
def power_of_two_scale(amax, reciprocal: tl.constexpr, floor: tl.constexpr):
    """E8M0 codes (int32) of the smallest power of two that is at least max(amax, floor) * reciprocal."""
    bits = (tl.maximum(amax, floor) * reciprocal).to(tl.int32, bitcast=True)
    return tl.minimum((bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32), 254)


@triton.jit
def encode_e4m3(x):
    """E4M3 bytes (int32, 0 to 255) of float32 values of magnitude at most 448, to nearest even."""
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    bits = bits & 0x7FFFFFFF
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Subnormals are multiples of 2**-9, the spacing of float32 from 2**14 on.
    shifted = bits.to(tl.float32, bitcast=True) + 16384.0
    subnormal = shifted.to(tl.int32, bitcast=True) - 0x46800000
    return sign | tl.where(bits < 0x3C800000, subnormal, normal)


@triton.jit
def encode_e2m1(x):
    """E2M1 codes (int32, 0 to 15) of float32 values, ties to the even code, magnitudes above 6 become 6."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    code = (magnitude > 0.25).to(tl.int32) + (magnitude >= 0.75).to(tl.int32) + (magnitude > 1.25).to(tl.int32)
    code += (magnitude >= 1.75).to(tl.int32) + (magnitude > 2.5).to(tl.int32) + (magnitude >= 3.5).to(tl.int32)
    code += (magnitude > 5.0).to(tl.int32)
    return code | ((bits >> 28) & 8)


@triton.jit
def round_e4m3(x):
    """Round float32 values of magnitude at most 448 to those of E4M3, to nearest even; still float32."""
    exponent = tl.maximum(x.to(tl.int32, bitcast=True) & 0x7F800000, 121 << 23)  # 2**-6 and below: multiples of 2**-9
    # 1.5 * 2**20 times the power of two below x: float32 of that size are as far apart as E4M3 values of the size of x.
    shift = (exponent + (20 << 23) | 0x400000).to(tl.float32, bitcast=True)
    return (x + shift) - shift


@triton.jit
def round_fp8(x):
    """Round float32 `[N, BLOCK]` to what E4M3 with one power-of-two scale per row stores; still float32."""
    code = power_of_two_scale(tl.max(tl.abs(x), axis=1), 1.0 / 448.0, 1e-4)[:, None]
    values = tl.minimum(tl.maximum(x * decode_e8m0(254 - code), -448.0), 448.0)
    return round_e4m3(values) * decode_e8m0(code)


# ---- packed weights as operands of a product ---------------------------------------------------------------------------
# Triton's interpreter has no inline assembly and no bfloat16 arithmetic; there the same values are made in float32.


@triton.constexpr_function
def operand_dtype(dtype):
    """Dtype of the operands of a product with inputs of `dtype`: bfloat16, which holds rounded inputs exactly, or float32."""
    return tl.bfloat16 if dtype == tl.bfloat16 and not PLAIN.value else tl.float32


# E2M1 bits are put where those of a bfloat16 2**126 too small lie, and multiplied by the scale times 2**94, so that
# scales from 2**-100 to 2**33 stay in range. Products are 2**32 too small.
FP4_SHORTFALL: tl.constexpr = tl.constexpr(4294967296.0)
FP4_SCALE_OFFSET: tl.constexpr = tl.constexpr(94)

# Four bytes hold eight codes. Two at a time: isolated, copied to where sign and magnitude belong, masked.
_E2M1_TO_BFLOAT16: tl.constexpr = tl.constexpr(
    """{
    .reg .b32 pair, one;
    prmt.b32 pair, $4, 0, 0x4140;
    and.b32 one, pair, 0x000F000F;
    mul.lo.u32 one, one, 0x1040;
    and.b32 one, one, 0x81C081C0;
    mul.bf16x2 $0, one, $5;
    and.b32 one, pair, 0x00F000F0;
    mul.lo.u32 one, one, 0x104;
    and.b32 one, one, 0x81C081C0;
    mul.bf16x2 $2, one, $5;
    prmt.b32 pair, $4, 0, 0x4342;
    and.b32 one, pair, 0x000F000F;
    mul.lo.u32 one, one, 0x1040;
    and.b32 one, one, 0x81C081C0;
    mul.bf16x2 $1, one, $6;
    and.b32 one, pair, 0x00F000F0;
    mul.lo.u32 one, one, 0x104;
    and.b32 one, one, 0x81C081C0;
    mul.bf16x2 $3, one, $6;
    }"""
)
_E4M3_TO_BFLOAT16: tl.constexpr = tl.constexpr(
    """{
    .reg .b16 low, high, h<4>;
    .reg .b32 two<2>;
    .reg .f32 f<4>;
    mov.b32 {low, high}, $2;
    cvt.rn.f16x2.e4m3x2 two0, low;
    cvt.rn.f16x2.e4m3x2 two1, high;
    mov.b32 {h0, h1}, two0;
    mov.b32 {h2, h3}, two1;
    cvt.f32.f16 f0, h0;
    cvt.f32.f16 f1, h1;
    cvt.f32.f16 f2, h2;
    cvt.f32.f16 f3, h3;
    cvt.rn.bf16x2.f32 $0, f1, f0;
    cvt.rn.bf16x2.f32 $1, f3, f2;
    }"""
)


@triton.jit
def operand_scale(code, FP4: tl.constexpr, DTYPE: tl.constexpr):
    """Scales of E8M0 codes (uint8) in bfloat16 or float32, times 2**94 for FP4."""
    if FP4:
        exponent = tl.minimum(code.to(tl.int32) + FP4_SCALE_OFFSET, 255)  # 255: infinite
        if DTYPE == tl.float32:
            scale = (exponent << 23).to(tl.float32, bitcast=True)
        else:
            scale = (exponent << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        scale = decode_e8m0(code).to(DTYPE)
    return scale


@triton.jit
def e2m1_operands(packed, scale):
    """Values of the low and of the high codes of bytes (uint8), times scale * 2**-126, in the dtype of the scale."""
    if scale.dtype == tl.float32:
        small = scale * 1.1754943508222875e-38
        even, odd = decode_e2m1(packed & 15) * small, decode_e2m1(packed >> 4) * small
    else:
        even, odd = tl.inline_asm_elementwise(
            _E2M1_TO_BFLOAT16,
            "=&r,=&r,=&r,=&r,r,r,r",
            [packed, scale],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    return even, odd


@triton.jit
def e4m3_operand(values, DTYPE: tl.constexpr):
    """Values of E4M3 bytes (uint8), in float32 or bfloat16."""
    if DTYPE == tl.float32:
        operand = decode_e4m3(values)
    else:
        operand = tl.inline_asm_elementwise(
            _E4M3_TO_BFLOAT16, "=&r,=&r,r", [values], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    return operand


@triton.jit
def unpack_e2m1(words, scale):
    """Values of the four E2M1 codes of each word (int16, the lowest first) times `scale` (bfloat16); NVIDIA only."""
    # Two words a register. Of each code the sign goes to bit 15, the rest to bits 8 to 6: a bfloat16 2**126 too small.
    return tl.inline_asm_elementwise(
        """
        {
            .reg .b32 high, t, big;
            mov.b32 big, 0x7E807E80;
            shr.u32 high, $4, 8;
            and.b32 t, $4, 0x000F000F;
            mul.lo.u32 t, t, 0x1040;
            and.b32 t, t, 0x81C081C0;
            mul.rn.bf16x2 t, t, big;
            mul.rn.bf16x2 $0, t, $5;
            and.b32 t, $4, 0x00F000F0;
            mul.lo.u32 t, t, 0x0104;
            and.b32 t, t, 0x81C081C0;
            mul.rn.bf16x2 t, t, big;
            mul.rn.bf16x2 $1, t, $5;
            and.b32 t, high, 0x000F000F;
            mul.lo.u32 t, t, 0x1040;
            and.b32 t, t, 0x81C081C0;
            mul.rn.bf16x2 t, t, big;
            mul.rn.bf16x2 $2, t, $5;
            and.b32 t, high, 0x00F000F0;
            mul.lo.u32 t, t, 0x0104;
            and.b32 t, t, 0x81C081C0;
            mul.rn.bf16x2 t, t, big;
            mul.rn.bf16x2 $3, t, $5;
        }
        """,
        "=r,=r,=r,=r,r,r",
        [words, scale],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def relu_times(x, weight):
    """relu(x) rounded to bfloat16 times `weight` (bfloat16), rounded; NVIDIA only."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 t; cvt.rn.relu.bf16x2.f32 t, $2, $1; mul.rn.bf16x2 $0, t, $3; }",
        "=r,r,r,r",
        [x, weight],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=2,
    )
