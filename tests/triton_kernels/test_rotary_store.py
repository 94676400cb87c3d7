"""RoPE, rounding and storing in one pass, against `rotate` and the codecs, bit for bit."""

import pytest
import torch

from modeling_dsv4.cache_storage import COMPRESSED_NVFP4, INDEX_MXFP4, UNROUNDED, WINDOW_FP8, unrotated_fp8
from modeling_dsv4.rotary import rotary_table, rotate
from modeling_dsv4.sparse_attention import hadamard_rotate
from modeling_dsv4.triton_kernels.rotary_store import rotate_store

TAIL = 16
CODECS = {
    "float": UNROUNDED,
    "fp8": WINDOW_FP8,
    "fp8_tail": unrotated_fp8(TAIL),
    "nvfp4": COMPRESSED_NVFP4,
    "mxfp4": INDEX_MXFP4,
}
POISON = 0xA5


def bits(x):
    return x.contiguous().view(torch.uint8)


def same(a, b):
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def make_vectors(device, dtype, *shape):
    """Vectors of all magnitudes, zeros of both signs, and values at the ties of E2M1 and E4M3."""
    size = torch.randint(-126, 30, (*shape[:-1], 1), device=device).float().exp2()
    x = torch.randn(shape, device=device) * size
    x[0, 0], x[0, 1] = 0.0, -0.0
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -5.0, -0.0, 0.0, 17.0, 0.001953125, 0.0029296875, 448.0]
    x[1, 0, ..., : len(ties)] = torch.tensor(ties, device=device)
    return x.to(dtype)


def make_table(device, tokens, pairs=TAIL // 2):
    positions = torch.arange(tokens, device=device) + torch.tensor([[3], [70000]], device=device)
    return rotary_table(positions, torch.rand(pairs, device=device))


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("dim", (128, 80, 48))
@pytest.mark.parametrize("codec", CODECS)
def test_bytes_and_values_are_those_of_the_codec(device, codec, dim, dtype):
    x, table = make_vectors(device, dtype, 2, 5, dim), make_table(device, 5)
    expected = rotate(x, table)
    encoded = CODECS[codec].encode(expected)
    first, counts = torch.tensor([1, 3], device=device), torch.tensor([4, 9], device=device)
    parts = tuple(torch.full((2, 9, 7 + part.shape[2]), POISON, device=device).to(part.dtype) for part in encoded)
    views = tuple(part[:, :, 3 : 3 + new.shape[2]] for part, new in zip(parts, encoded, strict=True))
    held = tuple(part[:, :, : new.shape[2]].clone() for part, new in zip(parts, encoded, strict=True))
    for before, new in zip(held, encoded, strict=True):
        before[0, 1:4], before[1, 3:8] = new[0, :3], new[1]
    tail = TAIL if codec == "fp8_tail" else 0
    values = rotate_store(x, table, codec, tail=tail, parts=views, first=first, counts=counts)
    assert same(values, CODECS[codec].rounded(expected))
    for part, view, before in zip(parts, views, held, strict=True):
        assert (
            same(view, before) and (part[..., :3] == part[0, 0, 0]).all() and (part[..., -4:] == part[0, 0, 0]).all()
        )


@pytest.mark.parametrize("hadamard", (False, True))
def test_index_queries_are_rotated_and_rounded(device, hadamard):
    x, table = make_vectors(device, torch.bfloat16, 2, 3, 5, 64), make_table(device, 3)
    expected = rotate(x, table)
    expected = INDEX_MXFP4.rounded(hadamard_rotate(expected) if hadamard else expected)
    assert same(rotate_store(x, table, "mxfp4", hadamard=hadamard), expected)


def test_one_table_serves_all_rows(device):
    x, table = make_vectors(device, torch.float32, 2, 5, 48), make_table(device, 5)
    table = tuple(part[1:] for part in table)
    assert same(rotate_store(x, table, "fp8"), WINDOW_FP8.rounded(rotate(x, table)))


@pytest.mark.parametrize("packed", (False, True))
@pytest.mark.parametrize("tokens", (3, 11))
def test_a_ring_keeps_the_last_tokens_of_each_row(device, tokens, packed):
    slots, codec = 7, WINDOW_FP8 if packed else WINDOW_FP8.as_float()
    x, table = make_vectors(device, torch.float32, 2, tokens, 48), make_table(device, tokens)
    past = torch.tensor([5, 16], device=device)
    new = torch.tensor([tokens, tokens - 2], device=device)
    encoded = codec.encode(rotate(x, table))
    parts = tuple(torch.full((2, slots, part.shape[2]), POISON, device=device).to(part.dtype) for part in encoded)
    expected = tuple(part.clone() for part in parts)
    for part, fresh in zip(expected, encoded, strict=True):
        for row in range(2):
            for t in range(int(new[row])):
                part[row, (int(past[row]) + t) % slots] = fresh[row, t]
    rotate_store(x, table, "fp8", parts=parts, first=past, counts=past + new, ring=True, values=False)
    assert all(same(a, b) for a, b in zip(parts, expected, strict=True))


def test_no_vectors_and_unknown_codecs(device):
    table = make_table(device, 0)
    assert rotate_store(torch.empty(2, 0, 48, device=device), table, "fp8").shape == (2, 0, 48)
    with pytest.raises(ValueError, match="'int8'"):
        rotate_store(torch.empty(2, 0, 48, device=device), table, "int8")
