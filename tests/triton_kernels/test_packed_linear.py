"""Packed linears: products and gradients against the reference in float64, and the modules with their kernels."""

import importlib

import pytest
import torch

from modeling_dsv4.fp_codecs import decode_e8m0, dequantize_fp8_tiles, quantize_fp8_tiles, round_fp8
from modeling_dsv4.layers import Dsv4GroupedLinear, Dsv4Linear, Dsv4MLP, clamped_swiglu

from .products import bound, dtypes, error, random

kernels = importlib.import_module("modeling_dsv4.triton_kernels.packed_linear")


def packed_matrix(rows, columns, device, block=(32, 32), seed=1):
    values, scale = quantize_fp8_tiles(random(rows, columns, seed=seed, spread=1), block_size=block)
    return values.to(device), scale.to(device), dequantize_fp8_tiles(values, scale, block_size=block).double()


@pytest.mark.parametrize(
    ("rows", "shape", "block", "rounds"),
    [
        (1, (70, 100), (32, 32), True),  # nothing fills a tile
        (1, (33, 1024), (32, 32), True),  # parts of K side by side
        (1, (40, 512), (32, 32), False),
        (3, (70, 100), (32, 32), True),
        (7, (130, 300), (128, 128), True),
        (1, (130, 300), (128, 128), True),
        (17, (64, 512), (32, 32), False),
        (20, (40, 96), (32, 32), True),  # unpacked as a whole
    ],
)
def test_products_and_gradients(rows, shape, block, rounds, device, poisoned, monkeypatch):
    monkeypatch.setattr(kernels, "MANY_ROWS", 20)
    weight, scale, exact = packed_matrix(*shape, device, block)
    for dtype in dtypes(device):
        x = random(rows, shape[1], seed=2, spread=1, device=device, dtype=dtype).requires_grad_()
        out = kernels.packed_linear(x, weight, scale, block_size=block, activation_block=block[1] if rounds else None)
        inputs = round_fp8(x, block=block[1]) if rounds else x
        assert out.dtype == dtype and out.shape == (rows, shape[0])
        assert error(out.detach().cpu(), inputs.detach().cpu().double() @ exact.mT) < bound(dtype)
        grad = random(rows, shape[0], seed=3, device=device, dtype=dtype)
        (found,) = torch.autograd.grad(out, x, grad)
        assert error(found.cpu(), grad.cpu().double() @ exact) < bound(dtype)


@pytest.mark.parametrize(
    ("rows", "tile"),
    [
        (20, (32, 64, 64, 1, 2, 4, 1)),  # the product transposed
        (5, (32, 8, 128, 1, 2, 2, 4)),  # parts of K apart, added in order
        (2, (16, 2, 64, 4, 2, 4, 2)),  # and parts side by side
        (3, (64, 16, 128, 1, 2, 4, 1)),  # two rows of tiles
    ],
)
def test_every_shape_of_tile(rows, tile, device, poisoned):
    weight, scale, exact = packed_matrix(100, 512, device)
    for dtype in dtypes(device):
        x = random(rows, 1, 512, seed=2, spread=1, device=device, dtype=dtype)
        out = kernels.multiply_few(x, weight, scale, (32, 32), 32, kernels.Tile(*tile))
        assert error(out[:, 0].cpu(), round_fp8(x[:, 0]).cpu().double() @ exact.mT) < bound(dtype)


@pytest.mark.parametrize("rows", [1, 5, 20])
def test_grouped_products_and_gradients(rows, device, poisoned, monkeypatch):
    monkeypatch.setattr(kernels, "MANY_ROWS", 20)
    weight, scale, exact = packed_matrix(3 * 48, 100, device)
    exact = exact.unflatten(0, (3, -1))
    for dtype in dtypes(device):
        x = random(rows, 3, 100, seed=2, device=device, dtype=dtype).requires_grad_()
        out = kernels.packed_linear(x, weight, scale, groups=3)
        expected = torch.einsum("mgi,gri->mgr", x.detach().cpu().double(), exact).flatten(1)
        assert error(out.detach().cpu(), expected) < bound(dtype)
        grad = random(rows, 3 * 48, seed=3, device=device, dtype=dtype)
        (found,) = torch.autograd.grad(out, x, grad)
        expected = torch.einsum("mgr,gri->mgi", grad.cpu().double().unflatten(1, (3, -1)), exact)
        assert error(found.cpu(), expected) < bound(dtype)


def test_leading_axes_empty_inputs_and_strides(device):
    weight, scale, exact = packed_matrix(32, 64, device)
    x = random(2, 64, 3, device=device).transpose(1, 2)
    out = kernels.packed_linear(x, weight, scale, activation_block=32)
    assert error(out.cpu(), round_fp8(x).cpu().double() @ exact.mT) < 1e-6 and out.shape == (2, 3, 32)
    assert kernels.packed_linear(x[:0], weight, scale, activation_block=32).shape == (0, 3, 32)
    assert kernels.packed_linear(x.half(), weight, scale, activation_block=32).dtype == torch.float16


@pytest.mark.parametrize(("rows", "rounds"), [(1, True), (1, False), (3, True), (20, True)])
def test_two_products_and_their_swiglu(rows, rounds, device, poisoned, monkeypatch):
    monkeypatch.setattr(kernels, "MANY_ROWS", 20)
    (gate, gate_scale, g), (up, up_scale, u) = (packed_matrix(70, 1024, device, seed=seed) for seed in (1, 2))
    for dtype in dtypes(device):
        x = random(1, rows, 1024, seed=2, device=device, dtype=dtype) * 0.1
        block = 32 if rounds else None
        out = kernels.packed_swiglu(x, gate, gate_scale, up, up_scale, limit=2.0, activation_block=block)
        inputs = (round_fp8(x) if rounds else x).cpu().double()
        expected = clamped_swiglu(inputs @ g.mT, inputs @ u.mT, 2.0)
        assert out.dtype == dtype and error(out.cpu(), expected) < 3 * bound(dtype)


# ---- modules -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [False, True])
def test_modules_use_the_kernel(rounds, device, watched, monkeypatch):
    linear, grouped = Dsv4Linear(64, 96), Dsv4GroupedLinear(64, 96, 2)
    for module in (linear, grouped):
        module.pack((32, 32), torch.float8_e8m0fnu)
        values, scale, _ = packed_matrix(96, 64, "cpu")
        module.weight.data.copy_(values)
        module.weight_scale_inv.data.copy_(scale)
        module.to(device)
    linear.quantize_activations = rounds
    x, y = random(1, 3, 64, device=device), random(1, 3, 2, 64, device=device)
    expected = [module.double()(t.double()) for module, t in ((linear, x), (grouped, y))]
    kernel_set, calls = watched("packed_linear")
    for module, t, result in ((linear, x, expected[0]), (grouped, y, expected[1])):
        monkeypatch.setattr(module, "kernels", kernel_set)
        assert error(module(t), result) < 1e-6
    assert [call.get("groups", 1) for call in calls] == [1, 2]
    assert calls[0]["activation_block"] == (32 if rounds else None)
    # The shared expert, whose two first matrices are one kernel, unless something wraps them.
    block = Dsv4MLP(64, 96, 0.5)
    for module, seed in ((block.gate_proj, 3), (block.up_proj, 4), (block.down_proj, 5)):
        module.pack((32, 32), torch.float8_e8m0fnu)
        values, scale, _ = packed_matrix(*module.weight.shape, "cpu", seed=seed)
        module.weight.data.copy_(values)
        module.weight_scale_inv.data.copy_(scale)
        module.quantize_activations = rounds
    block.to(device)
    result = block(x.double())
    for module in (block.gate_proj, block.up_proj, block.down_proj):
        monkeypatch.setattr(module, "kernels", kernel_set)
    assert error(block(x), result) < 2e-6 and len(calls) == 3
    block.up_proj = torch.nn.Sequential(block.up_proj)
    assert error(block(x), result) < 2e-6 and len(calls) == 6
    linear.weight_scale_inv = torch.nn.Parameter(decode_e8m0(linear.weight_scale_inv), requires_grad=False)
    assert error(linear(x), expected[0]) < 1e-6 and len(calls) == 6  # float32 scales: the reference
    block.up_proj, seen = block.up_proj[0], []
    block.gate_proj.register_forward_hook(lambda *call: seen.append(call))
    assert error(block(x), result) < 2e-6 and len(calls) == 9 and seen  # who watches a matrix sees its call
