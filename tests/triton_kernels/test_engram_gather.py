"""Engram rows gathered and added by kernels, against the reference maths, the oracle and the module."""

import numpy as np
import pytest
import torch

from modeling_dsv4.engram import Dsv4EngramMemory, Dsv4PackedEngramTable
from modeling_dsv4.engram import add_memory as reference
from modeling_dsv4.engram_reads import EngramRead
from modeling_dsv4.fp_codecs import dequantize_rows, quantize_fp8
from modeling_dsv4.kernel_seam import KernelSet
from tests.modeling.mechanism_models import fill, tiny_config
from tests.reference import engram as oracle

BLOCK = 32


@pytest.fixture
def kernels(poisoned):
    from modeling_dsv4.triton_kernels import engram_gather

    return engram_gather


def make_table(rows, dim, seed=0):
    """Values over all exponents, zeros and both signs; scales from far below to far above one."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 256, (rows, dim), generator=generator, dtype=torch.uint8)
    values[(values & 0x7F) == 0x7F] = 0x80  # NaN has no place in a table
    scale = torch.randint(60, 190, (rows, -(-dim // BLOCK)), generator=generator, dtype=torch.uint8)
    return values.view(torch.float8_e4m3fn), scale


@pytest.mark.parametrize("scales", ["codes", "e8m0", "float32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dim", [256, 96, 40])
def test_rows_are_those_of_the_reference(kernels, device, dim, dtype, scales):
    values, scale = (part.to(device) for part in make_table(60, dim))
    if scales == "e8m0":
        scale = scale.view(torch.float8_e8m0fnu)
    if scales == "float32":
        scale = torch.rand(scale.shape, generator=torch.Generator().manual_seed(1)).to(device)
    rows = torch.randint(0, 60, (2, 3, 7), generator=torch.Generator().manual_seed(2)).to(device)
    found = kernels.gather_rows(values, scale, rows, block=BLOCK, dtype=dtype)
    assert found.dtype == dtype and found.any()
    assert torch.equal(found, dequantize_rows(values, scale, block=BLOCK, dtype=dtype)[rows])


def test_rows_beyond_the_table_are_not_read(kernels, device):
    values, scale = (part.to(device) for part in make_table(5, 64))
    found = kernels.gather_rows(
        values, scale, torch.tensor([4, 5, -1], device=device), block=BLOCK, dtype=torch.float32
    )
    assert found[0].isfinite().all() and found[1:].isnan().all()
    assert kernels.gather_rows(values, scale, torch.empty(2, 0, dtype=torch.int64, device=device), block=32, dtype=torch.float32).shape == (2, 0, 64)  # fmt: skip


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="pinned memory needs a CUDA device")
def test_rows_of_a_pinned_table(kernels, device):
    values, scale = make_table(1000, 256)
    rows = torch.randint(0, 1000, (3, 5, 24), generator=torch.Generator().manual_seed(2))
    expected = dequantize_rows(values, scale, block=BLOCK, dtype=torch.bfloat16)[rows]
    pinned = (values.view(torch.uint8).pin_memory().view(torch.float8_e4m3fn), scale.pin_memory())
    found = kernels.gather_rows(*pinned, rows.to(device), block=BLOCK, dtype=torch.bfloat16)
    assert torch.equal(found.cpu(), expected)


def make_memory(tokens, streams, hidden, dtype, device):
    generator = torch.Generator().manual_seed(hidden)
    shapes = (2, tokens, streams, hidden), (2, tokens, (streams + 1) * hidden), (streams, hidden), (streams, hidden)
    args = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    return args, (torch.rand(2, tokens, generator=generator) < 0.3).to(device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("tokens", "streams", "hidden"), [(3, 4, 48), (19, 2, 33)])
def test_memory_is_that_of_the_reference(kernels, device, tokens, streams, hidden, dtype):
    args, image = make_memory(tokens, streams, hidden, dtype, device)
    for mask in (None, image):
        found, expected = kernels.add_memory(*args, mask, eps=1e-20), reference(*args, mask, eps=1e-20)
        assert found.dtype == dtype
        if dtype == torch.float32:
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)
        else:  # a sum in another order moves few roundings
            torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-7)
            assert (found != expected).float().mean() < 0.01
        assert mask is None or torch.equal(found[mask], args[0][mask])


def test_memory_is_that_of_the_oracle(kernels, device):
    args, _ = make_memory(2, 3, 24, torch.float32, device)
    args[0][0, 0] = 0.0  # its dot product is below the floor
    found = kernels.add_memory(*args, eps=1e-20)
    streams, projected, q_weight, k_weight = (t.double().cpu().numpy() for t in args)
    for row in range(2):
        for token in range(2):
            keys, value = projected[row, token, :72].reshape(3, 24), projected[row, token, 72:]
            expected = oracle.gated(streams[row, token], keys, value, q_weight, k_weight, 1e-20)
            np.testing.assert_allclose(found[row, token].cpu(), expected, rtol=1e-5, atol=2e-6)


def test_the_module_computes_the_same(repository, device, poisoned):
    memory = fill(Dsv4EngramMemory(tiny_config(), 1), seed=2).to(device, torch.bfloat16)
    table = Dsv4PackedEngramTable(500, 32, torch.float8_e8m0fnu)
    values, scale = quantize_fp8(torch.randn(500, 32, generator=torch.Generator().manual_seed(3)))
    table.assign("weight", values.to(device))
    table.assign("weight_scale_inv", scale.view(torch.float8_e8m0fnu).to(device))
    memory.embedding = table
    streams = torch.randn(2, 6, 2, 64, generator=torch.Generator().manual_seed(4)).to(device, torch.bfloat16)
    rows = torch.randint(0, 500, (2, 6, 4), generator=torch.Generator().manual_seed(5)).to(device)
    image = (torch.arange(12).view(2, 6) % 5 == 0).to(device)
    results, reads = [], []
    for kernels in (None, KernelSet(str(repository))):
        memory.kernels = table.kernels = kernels
        reads.append(table.read(rows))
        with torch.no_grad():
            results.append(memory(streams, reads[-1], image))
    assert isinstance(reads[0], EngramRead) and reads[1] is rows
    torch.testing.assert_close(results[1], results[0], rtol=2**-7, atol=2**-7)
    assert not torch.equal(results[0], streams) and torch.equal(results[1][image], streams[image])
    assert table.gather(rows, torch.float64).dtype == torch.float64  # by the reference
    streams.requires_grad_()
    memory(streams, rows).sum().backward()  # the kernel has no backward
    assert streams.grad.any()
