"""Number formats: exact against the goldens, the float64 oracle and tables written out here (fault kind K7)."""

import math

import numpy as np
import pytest
import torch

from modeling_dsv4 import fp_codecs
from tests import golden_cases as golden
from tests.reference import formats

CODEC_INPUTS = (
    "normal", "lognormal_wide", "zeros", "signed_zeros", "e2m1_ties", "e4m3_ties", "scale_boundaries",
    "tiny", "huge", "one_outlier", "floor_region", "bf16_valued",
)  # fmt: skip
KINDS = ("fp8", "mxfp4", "nvfp4")
BLOCK = {"fp8": 32, "mxfp4": 32, "nvfp4": 16}
# Code -> value of E2M1, written out (contract section 2).
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
# The value halfway between two neighbours -> the neighbour with the even code.
E2M1_TIES = {0.25: 0.0, 0.75: 1.0, 1.25: 1.0, 1.75: 2.0, 2.5: 2.0, 3.5: 4.0, 5.0: 4.0}
SCALE_CODES = (0, 1, 127, 254, 255)
SCALE_VALUES = (2.0**-127, 2.0**-126, 1.0, 2.0**127, math.nan)


def quantize(kind, x, **options):
    return getattr(fp_codecs, f"quantize_{kind}")(x, **options)


def dequantize(kind, parts, **options):
    return getattr(fp_codecs, f"dequantize_{kind}")(*parts, **options)


def rounded(kind, x, **options):
    return getattr(fp_codecs, f"round_{kind}")(x, **options)


def codes_of(kind, values):
    """Return one code per element of a quantised tensor."""
    return values.view(torch.uint8) if kind == "fp8" else fp_codecs.unpack_nibbles(values)


def assert_same(actual, expected):
    """Equal values, equal signs of zero, NaN where NaN."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    np.testing.assert_array_equal(actual, expected)
    number = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(actual[number]), np.signbit(expected[number]))


@pytest.fixture(scope="module")
def codec():
    return golden.load_tensors(golden.CODEC / "codec.safetensors")


@pytest.mark.parametrize("name", CODEC_INPUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_golden_codes_scales_and_values(codec, kind, name):
    x = torch.from_numpy(codec[f"{name}.input"])
    values, scale = quantize(kind, x)
    np.testing.assert_array_equal(codes_of(kind, values), codec[f"{name}.{kind}.code"])
    np.testing.assert_array_equal(scale, codec[f"{name}.{kind}.scale_code"])
    assert_same(dequantize(kind, (values, scale)), codec[f"{name}.{kind}.dequant"])
    assert_same(rounded(kind, x), codec[f"{name}.{kind}.dequant"])


def test_golden_tables_and_weights(codec):
    codes = torch.arange(256, dtype=torch.uint8)
    table = fp_codecs.dequantize_rows(
        codes.view(torch.float8_e4m3fn)[:, None], torch.full((256, 1), 127, dtype=torch.uint8), block=1
    )
    assert_same(table.squeeze(1), codec["table.e4m3"])
    assert_same(fp_codecs.decode_e2m1(codes[:16]), codec["table.e2m1"])
    values = torch.from_numpy(codec["weight_fp8.code"]).view(torch.float8_e4m3fn)
    scale = torch.from_numpy(codec["weight_fp8.scale_code"]).view(torch.float8_e8m0fnu)
    assert_same(fp_codecs.dequantize_fp8_tiles(values, scale), codec["weight_fp8.dequant"])
    packed = torch.from_numpy(codec["weight_fp4.packed"]).view(torch.int8)
    scale = torch.from_numpy(codec["weight_fp4.scale_code"]).view(torch.float8_e8m0fnu)
    assert_same(fp_codecs.dequantize_fp4_rows(packed, scale), codec["weight_fp4.dequant"])


# ---- E2M1 ------------------------------------------------------------------------------------------------------------


def test_all_fp4_codes_decode_and_come_back():
    codes = torch.arange(16, dtype=torch.uint8)
    values = fp_codecs.decode_e2m1(codes)
    assert_same(values, np.array(E2M1, dtype=np.float32))
    assert fp_codecs.encode_e2m1(values).tolist() == list(range(16))


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize(("tie", "even"), E2M1_TIES.items())
def test_fp4_ties_go_to_the_even_code(tie, even, sign):
    below, above = np.nextafter(np.float32(tie), np.float32(0)), np.nextafter(np.float32(tie), np.float32(9))
    magnitudes = np.array(E2M1[:8])
    x = torch.tensor([tie, float(below), float(above)], dtype=torch.float32) * sign
    found = fp_codecs.decode_e2m1(fp_codecs.encode_e2m1(x))
    lower, upper = magnitudes[magnitudes < tie].max(), magnitudes[magnitudes > tie].min()
    assert_same(found, np.array([even, lower, upper], dtype=np.float32) * np.float32(sign))


def test_fp4_saturates_and_keeps_the_sign_of_zero():
    x = torch.tensor([6.5, -7.0, math.inf, -math.inf, 0.0, -0.0, 1e-30, -1e-30])
    assert fp_codecs.encode_e2m1(x).tolist() == [7, 15, 7, 15, 0, 8, 0, 8]


def test_nibbles_pack_the_even_column_low():
    codes = torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)
    packed = fp_codecs.pack_nibbles(codes)
    assert packed.tolist() == [[0x21, 0x0F]]
    every_byte = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(fp_codecs.pack_nibbles(fp_codecs.unpack_nibbles(every_byte)), every_byte)
    assert torch.equal(fp_codecs.unpack_nibbles(every_byte.view(torch.int8)), fp_codecs.unpack_nibbles(every_byte))


# ---- every tie of every format, inside a block ---------------------------------------------------------------------------


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_every_e4m3_tie(sign):
    magnitudes = formats.E4M3_MAGNITUDES
    ties = (magnitudes[1:] + magnitudes[:-1]) / 2
    blocks = np.zeros((len(ties), 32), dtype=np.float32)
    blocks[:, 0], blocks[:, 5] = 448, sign * ties  # 448 makes the scale 1
    values, scale = quantize("fp8", torch.from_numpy(blocks))
    assert scale.unique().tolist() == [127]
    lower = np.arange(len(ties))
    even = np.where(lower % 2 == 0, lower, lower + 1) + (0 if sign > 0 else 128)
    np.testing.assert_array_equal(values.view(torch.uint8)[:, 5], even)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_every_nvfp4_scale_tie_and_value_tie(sign):
    # Scale ties: amax / 6 halfway between two E4M3 numbers; the even one is taken.
    lower = np.arange(1, 126)
    ties = (formats.E4M3_MAGNITUDES[lower] + formats.E4M3_MAGNITUDES[lower + 1]) / 2
    blocks = np.zeros((len(ties), 16), dtype=np.float32)
    blocks[:, 3] = sign * 6 * ties
    assert np.all((np.abs(blocks[:, 3]) / np.float32(6)).astype(np.float64) == ties)
    _, scale = quantize("nvfp4", torch.from_numpy(blocks))
    np.testing.assert_array_equal(scale[:, 0], np.where(lower % 2 == 0, lower, lower + 1))
    # Value ties under every scale that no floor hides.
    scales = formats.E4M3_MAGNITUDES[1:]
    blocks = np.zeros((len(scales), 16))
    blocks[:, 0], blocks[:, 1:8] = 6 * scales, sign * scales[:, None] * np.array(list(E2M1_TIES))
    values, found = quantize("nvfp4", torch.from_numpy(blocks.astype(np.float32)))
    np.testing.assert_array_equal(found[:, 0], np.arange(1, 127))
    decoded = fp_codecs.decode_e2m1(codes_of("nvfp4", values))[:, 1:8]
    assert_same(decoded, np.broadcast_to(np.float32(sign) * np.array(list(E2M1_TIES.values()), np.float32), (126, 7)))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_every_mxfp4_tie_under_every_scale(sign):
    exponents = np.arange(-126, 125)
    scales = 2.0**exponents
    blocks = np.zeros((len(scales), 32))
    blocks[:, 31], blocks[:, :7] = 6 * scales, sign * scales[:, None] * np.array(list(E2M1_TIES))
    values, found = quantize("mxfp4", torch.from_numpy(blocks.astype(np.float32)))
    np.testing.assert_array_equal(found[:, 0], exponents + 127)
    decoded = fp_codecs.decode_e2m1(codes_of("mxfp4", values))[:, :7]
    expected = np.float32(sign) * np.array(list(E2M1_TIES.values()), np.float32)
    assert_same(decoded, np.broadcast_to(expected, decoded.shape))


# ---- scales ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("view", [torch.uint8, torch.float8_e8m0fnu])
def test_scale_bytes_decode(view):
    code = torch.tensor(SCALE_CODES, dtype=torch.uint8).view(view)
    assert_same(fp_codecs.decode_e8m0(code), np.array(SCALE_VALUES, dtype=np.float32))
    assert_same(fp_codecs.decode_scale(code), np.array(SCALE_VALUES, dtype=np.float32))
    every = torch.arange(256, dtype=torch.uint8).view(view)
    assert_same(fp_codecs.decode_e8m0(every), formats.E8M0_VALUES.astype(np.float32))


def test_nvfp4_scale_bytes_decode():
    codes = torch.full((5, 8), 0x22, dtype=torch.uint8)  # sixteen ones
    scale = torch.tensor([[0], [1], [0x38], [126], [127]], dtype=torch.uint8)
    found = fp_codecs.dequantize_nvfp4(codes, scale)
    expected = np.array([[0.0], [2.0**-9], [1.0], [448.0], [math.nan]], dtype=np.float32)
    assert_same(found, np.broadcast_to(expected, (5, 16)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("scale_dtype", [torch.uint8, torch.float8_e8m0fnu, torch.float32])
@pytest.mark.parametrize(("code", "value"), list(zip(SCALE_CODES, SCALE_VALUES, strict=True)))
def test_scale_bytes_in_weights(code, value, scale_dtype, dtype):
    if scale_dtype == torch.float32:
        scale = torch.full((2, 1), value)
    else:
        scale = torch.full((2, 1), code, dtype=torch.uint8).view(scale_dtype)
    packed = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 16).reshape(2, 128, 16).transpose(0, 1)
    packed = packed[:, :, :1].contiguous().view(128, 2)  # two bytes a row: four columns
    expected = formats.decode_e2m1(formats.unpack_fp4(packed.numpy())) * value
    got = fp_codecs.dequantize_fp4_rows(packed.view(torch.int8), scale[:1].expand(128, 1), dtype=dtype)
    assert got.dtype == dtype
    assert_same(got.double(), torch.from_numpy(expected).to(dtype).double())
    values = torch.arange(256, dtype=torch.uint8).view(2, 128).view(torch.float8_e4m3fn)
    expected = formats.decode_e4m3(np.arange(256).reshape(2, 128)) * value
    with np.errstate(over="ignore"):
        got = fp_codecs.dequantize_fp8_tiles(values, scale[:1], block_size=(2, 128), dtype=dtype)
    assert got.dtype == dtype
    # The one rounding is that of the result: 448 * 2 ** 127 is infinite below float64, 2 ** -136 is 0 in bfloat16.
    assert_same(got.double(), torch.from_numpy(expected).to(dtype).double())


@pytest.mark.parametrize(("kind", "code", "value"), [("fp8", 105, 0.0), ("mxfp4", 1, 0.0), ("nvfp4", 1, 0.0)])
def test_all_zero_blocks_take_the_floor_scale(kind, code, value):
    # ceil(log2(1e-4 / 448)) = -22; 6 * 2 ** -126 / 6 = 2 ** -126; 2 ** -9 is the smallest E4M3 number.
    values, scale = quantize(kind, torch.zeros(3, 32))
    assert scale.unique().tolist() == [code] and not codes_of(kind, values).any()
    assert not rounded(kind, torch.zeros(3, 32)).any()


@pytest.mark.parametrize("kind", KINDS)
def test_powers_of_two_and_their_neighbours_take_the_right_scale(kind):
    top = {"fp8": 448, "mxfp4": 6, "nvfp4": 6}[kind]
    anchors = (top * 2.0 ** np.arange(-20, 8)).astype(np.float32)
    x = np.zeros((3 * len(anchors), 32), dtype=np.float32)
    x[:, 7] = np.concatenate([anchors, np.nextafter(anchors, np.float32(0)), np.nextafter(anchors, np.float32(1e9))])
    values, scale = quantize(kind, torch.from_numpy(x))
    codes, expected = getattr(formats, f"quantize_{kind}")(x)
    np.testing.assert_array_equal(scale, expected)
    np.testing.assert_array_equal(codes_of(kind, values), codes)


@pytest.mark.parametrize("kind", KINDS)
def test_denormals_are_not_flushed(kind):
    tiny = np.float32(2.0**-149)
    x = np.array([[tiny * 2**k * s for k in range(16) for s in (1, -1)]], dtype=np.float32)
    x = np.concatenate([x, x * np.float32(2.0**20), np.full((1, 32), tiny), np.full((1, 32), -tiny)])
    values, scale = quantize(kind, torch.from_numpy(x))
    codes, expected = getattr(formats, f"quantize_{kind}")(x)
    np.testing.assert_array_equal(scale, expected)
    np.testing.assert_array_equal(codes_of(kind, values), codes)
    assert_same(rounded(kind, torch.from_numpy(x)), getattr(formats, f"round_{kind}")(x).astype(np.float32))


def test_a_denormal_mxfp4_block_keeps_values():
    x = torch.full((1, 32), 2.0**-127)
    assert torch.equal(fp_codecs.round_mxfp4(x), x)


# ---- rounding ----------------------------------------------------------------------------------------------------------


def _spread(rows, width, seed):
    """Values over sixty binary orders of magnitude, with zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator)
    x = x * 2.0 ** torch.randint(-40, 20, (rows, 1), generator=generator)
    return x.masked_fill(torch.rand(rows, width, generator=generator) < 0.05, 0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_random_values_equal_the_oracle(kind):
    x = _spread(400, 64, seed=1)
    values, scale = quantize(kind, x)
    codes, expected = getattr(formats, f"quantize_{kind}")(x.numpy())
    np.testing.assert_array_equal(codes_of(kind, values), codes)
    np.testing.assert_array_equal(scale, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("width", [2, 14, 16, 18, 32, 34, 48, 64, 70, 96, 100])
@pytest.mark.parametrize("kind", KINDS)
def test_rounding_is_dequantised_quantisation_at_every_width(kind, width, dtype):
    x = _spread(6, width, seed=width).clamp(-6e4, 6e4).to(dtype)
    parts = quantize(kind, x)
    assert parts[1].dtype == torch.uint8 and parts[1].shape == (6, -(-width // BLOCK[kind]))
    assert parts[0].shape == (6, width if kind == "fp8" else width // 2)
    found = rounded(kind, x)
    assert found.dtype == dtype and found.shape == x.shape
    assert_same(found.double(), dequantize(kind, parts).to(dtype).double())
    # A short last block is a block of its own, as if it were filled with zeros.
    filled = np.zeros((6, -(-width // 32) * 32), dtype=np.float32)
    filled[:, :width] = x.float().numpy()
    expected = getattr(formats, f"round_{kind}")(filled)[:, :width]
    assert_same(found.double(), torch.from_numpy(expected).to(dtype).double())


@pytest.mark.parametrize("kind", KINDS)
def test_rounding_twice_changes_nothing(kind):
    # Not so for a value beyond the largest: NVFP4 rounds its scale, and a second scale may be another one.
    once = rounded(kind, _spread(200, 64, seed=4))
    if kind != "nvfp4":
        assert_same(rounded(kind, once), once)
    bfloat = once.bfloat16()
    assert torch.equal(bfloat.float(), once), "exact in bfloat16 (contract section 2)"


@pytest.mark.parametrize("kind", KINDS)
def test_leading_shapes_and_strides(kind):
    x = _spread(24, 64, seed=5).view(2, 3, 4, 64)
    assert_same(rounded(kind, x), rounded(kind, x.view(24, 64)).view(2, 3, 4, 64))
    strided = x.transpose(0, 2)
    assert_same(rounded(kind, strided), rounded(kind, x).transpose(0, 2))
    assert rounded(kind, x[:, :0]).shape == (2, 0, 4, 64)


@pytest.mark.parametrize("block", [16, 64, 128])
def test_other_block_sizes(block):
    x = _spread(5, 256, seed=6)
    values, scale = fp_codecs.quantize_fp8(x, block=block)
    amax = x.unflatten(-1, (-1, block)).abs().amax(-1).numpy()
    expected = formats.exponent_up(np.maximum(amax, np.float32(1e-4)) * np.float32(1 / 448)) + 127
    np.testing.assert_array_equal(scale, expected)
    assert_same(fp_codecs.dequantize_fp8(values, scale, block=block), fp_codecs.round_fp8(x, block=block))


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_passes_straight_through(kind):
    x = _spread(4, 64, seed=7).requires_grad_()
    upstream = torch.randn(4, 64, generator=torch.Generator().manual_seed(8))
    y = rounded(kind, x)
    assert not torch.equal(y, x)
    y.backward(upstream)
    assert torch.equal(x.grad, upstream)


# ---- weights -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [(32, 32), (128, 128), (8, 16)])
@pytest.mark.parametrize("shape", [(70, 100), (64, 64), (1, 3), (33, 32), (32, 130)])
def test_fp8_tiles_round_trip(shape, block_size):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(9)) * 2.0 ** torch.arange(shape[1]).remainder(
        9
    )
    values, scale = fp_codecs.quantize_fp8_tiles(weight, block_size=block_size)
    assert (values.dtype, scale.dtype) == (torch.float8_e4m3fn, torch.float8_e8m0fnu)
    rows, cols = block_size
    assert scale.shape == (-(-shape[0] // rows), -(-shape[1] // cols))
    for r in range(scale.shape[0]):
        for c in range(scale.shape[1]):
            tile = weight[r * rows : (r + 1) * rows, c * cols : (c + 1) * cols].numpy()
            power = float(formats.exponent_up(np.maximum(np.abs(tile).max(), np.float32(1e-4)) * np.float32(1 / 448)))
            assert scale.view(torch.uint8)[r, c] == power + 127
            codes = values[r * rows : (r + 1) * rows, c * cols : (c + 1) * cols].view(torch.uint8).numpy()
            np.testing.assert_array_equal(codes, formats.encode_e4m3(tile.astype(np.float64) / 2.0**power))
    expected = formats.dequantize_fp8_tiles(
        values.view(torch.uint8).numpy(), scale.view(torch.uint8).numpy(), block_size
    )
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        got = fp_codecs.dequantize_fp8_tiles(values, scale, block_size=block_size, dtype=dtype)
        assert got.dtype == dtype
        assert_same(got.double(), expected)  # exact in every one of them


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_fp4_rows_round_trip(dtype):
    weight = torch.randn(3, 5, 96, generator=torch.Generator().manual_seed(10))
    packed, scale = fp_codecs.quantize_fp4_rows(weight)
    assert (packed.dtype, packed.shape) == (torch.int8, (3, 5, 48))
    assert (scale.dtype, scale.shape) == (torch.float8_e8m0fnu, (3, 5, 3))
    codes, expected_scale = formats.quantize_mxfp4(weight.numpy())
    np.testing.assert_array_equal(fp_codecs.unpack_nibbles(packed), codes)
    np.testing.assert_array_equal(scale.view(torch.uint8), expected_scale)
    expected = formats.dequantize_fp4_rows(packed.view(torch.uint8).numpy(), expected_scale)
    got = fp_codecs.dequantize_fp4_rows(packed, scale, dtype=dtype)
    assert got.dtype == dtype
    assert_same(got.double(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_float_scales_are_multiplied_in_the_wider_dtype(dtype):
    generator = torch.Generator().manual_seed(11)
    values = torch.arange(254, dtype=torch.uint8).clamp(max=126).view(2, 127).view(torch.float8_e4m3fn)
    scale = torch.rand(1, 4, generator=generator) + 0.5
    got = fp_codecs.dequantize_fp8_tiles(values, scale, block_size=(32, 32), dtype=dtype)
    exact = values.double() * scale.double().repeat_interleave(32, 1)[:, :127]
    assert torch.equal(got, exact.to(dtype))
    packed = torch.randint(0, 256, (4, 48), dtype=torch.uint8, generator=generator).view(torch.int8)
    scale = torch.rand(4, 3, generator=generator) + 0.5
    got = fp_codecs.dequantize_fp4_rows(packed, scale, dtype=dtype)
    exact = fp_codecs.decode_e2m1(fp_codecs.unpack_nibbles(packed)).double() * scale.double().repeat_interleave(32, 1)
    assert torch.equal(got, exact.to(dtype))


def test_weights_are_fresh_memory():
    values, scale = fp_codecs.quantize_fp8_tiles(torch.ones(32, 64))
    before = values.view(torch.uint8).clone()
    fp_codecs.dequantize_fp8_tiles(values, scale).zero_()
    assert torch.equal(values.view(torch.uint8), before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_codes_are_read_under_every_default_dtype(dtype):
    codes = torch.arange(16, dtype=torch.uint8)
    expected, default = fp_codecs.decode_e2m1(codes), torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        assert torch.equal(fp_codecs.decode_e2m1(codes), expected)
    finally:
        torch.set_default_dtype(default)
