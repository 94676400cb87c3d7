"""What packed products are made of: every code of the formats, and rounding, bit for bit."""

import pytest
import torch
import triton
import triton.language as tl

from modeling_dsv4.fp_codecs import dequantize_fp4_rows, dequantize_fp8_tiles, round_fp8
from modeling_dsv4.triton_kernels.number_formats import FP4_SHORTFALL, e2m1_operands, operand_dtype, operand_scale
from modeling_dsv4.triton_kernels.packed_rows import round_fp8_rows, unpack_fp8_tiles

from .products import dtypes, random


def equal_bits(a, b):
    return torch.equal(torch.nan_to_num(a, nan=123.0), torch.nan_to_num(b, nan=123.0))


def test_every_code_with_every_scale_is_unpacked_exactly(device, poisoned):
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    weight, scale = codes.repeat(256, 1).view(torch.float8_e4m3fn), codes[:, None].repeat(1, 256)
    for dtype in dtypes(device):
        found = unpack_fp8_tiles(weight, scale, block_size=(1, 1), dtype=dtype)
        assert equal_bits(found, dequantize_fp8_tiles(weight, scale, block_size=(1, 1), dtype=dtype))


@triton.jit
def unpack_e2m1(packed, scale, out, DTYPE: tl.constexpr):
    row, byte = tl.program_id(0) * 64 + tl.arange(0, 64)[:, None], tl.arange(0, 256)[None, :]
    s = tl.broadcast_to(operand_scale(tl.load(scale + row), True, DTYPE), [64, 256])
    even, odd = e2m1_operands(tl.load(packed + byte + row * 0), s)
    tl.store(out + row * 512 + 2 * byte, even.to(tl.float32) * FP4_SHORTFALL)
    tl.store(out + row * 512 + 2 * byte + 1, odd.to(tl.float32) * FP4_SHORTFALL)


def test_every_pair_of_fp4_codes_is_unpacked_exactly(device):
    """In scales from 2 ** -100 to 2 ** 33; the tiny ones vanish, larger ones are no longer finite."""
    packed = torch.arange(256, dtype=torch.uint8, device=device)
    scale = torch.arange(256, dtype=torch.uint8, device=device)
    expected = dequantize_fp4_rows(packed.repeat(256, 1), scale[:, None].repeat(1, 16))
    for dtype in (tl.bfloat16, tl.float32):
        out = torch.full((256, 512), float("nan"), device=device)
        unpack_e2m1[(4,)](packed, scale, out, operand_dtype(dtype))
        assert torch.equal(out[27:161], expected[27:161])
        assert (out[:27] - expected[:27]).abs().max() < 2.0**-97
        assert not out[161:].isfinite().all(1).any()


@pytest.mark.parametrize("block", [32, 128])
def test_rounding_of_rows_is_bitwise(block, device, poisoned):
    x = random(5, 100 if block == 32 else 300, spread=6, device=device)
    x[0], x[1, :40], x[2, 3] = 0.0, 1e-30, 3e38
    for dtype in (torch.float32, torch.bfloat16):
        expected = round_fp8(x.to(dtype), block=block)
        assert torch.equal(round_fp8_rows(x.to(dtype), block=block), expected)
        split = round_fp8_rows(x.to(dtype), block=block, split=True)
        assert torch.equal(split, torch.cat([expected[:, ::2], expected[:, 1::2]], dim=1))
