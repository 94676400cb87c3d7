"""Shared layers: RMSNorm, packed and grouped linear layers, clamped SwiGLU, the head."""

import copy
from functools import partial

import numpy as np
import pytest
import torch

from modeling_dsv4 import layers
from modeling_dsv4.fp_codecs import quantize_fp8_tiles
from modeling_dsv4.layers import (
    Dsv4GroupedLinear,
    Dsv4Head,
    Dsv4Linear,
    Dsv4MLP,
    Dsv4PlainLinear,
    Dsv4RMSNorm,
    clamped_swiglu,
)
from tests.modeling.mechanism_models import random_values
from tests.reference import experts, formats, text_model

_random = partial(random_values, dtype=torch.float32)


def _pack(linear, weight, block_size=(32, 32)):
    """Fill `linear` with packed `weight`; return the float64 weight that the bytes stand for."""
    linear.pack(block_size, torch.float8_e8m0fnu)
    values, scale = quantize_fp8_tiles(weight, block_size=block_size)
    linear.weight.data.view(torch.uint8).copy_(values.view(torch.uint8))
    linear.weight_scale_inv.data.view(torch.uint8).copy_(scale.view(torch.uint8))
    exact = formats.dequantize_fp8_tiles(values.view(torch.uint8).numpy(), scale.view(torch.uint8).numpy(), block_size)
    return torch.from_numpy(exact)


def _bytes(linear):
    return [p.detach().cpu().view(torch.uint8).clone() for p in (linear.weight, linear.weight_scale_inv)]


# ---- RMSNorm -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("eps", [1e-20, 1e-6])
def test_rms_norm_equals_the_oracle(eps):
    norm = Dsv4RMSNorm(24, eps).double()
    norm.weight.data.copy_(_random(24, seed=2))
    x = _random(3, 5, 24, dtype=torch.float64, scale=1e-4)
    expected = text_model.rms_norm(x.numpy(), norm.weight.detach().numpy(), eps)
    np.testing.assert_allclose(norm(x).detach(), expected, rtol=1e-13)


def test_rms_norm_casts_once_after_the_product_with_the_weight():
    norm = Dsv4RMSNorm(64, 1e-20).bfloat16()
    norm.weight.data.copy_(1 + _random(64, seed=3, scale=0.2))
    x = _random(200, 64, dtype=torch.bfloat16)
    found = norm(x)
    wide, weight = x.float(), norm.weight.detach().float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-20)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, (weight * normed).bfloat16())
    # The other order, which transformers' Llama norm has, is another function.
    assert not torch.equal(found, norm.weight * normed.bfloat16())


def test_a_float32_weight_keeps_its_precision_over_bfloat16_inputs():
    norm = Dsv4RMSNorm(64, 1e-20)
    norm.weight.data.copy_(1 + _random(64, seed=4, scale=1e-3))
    x = _random(100, 64, dtype=torch.bfloat16)
    rounded = copy.deepcopy(norm).bfloat16()
    assert norm(x).dtype == torch.bfloat16
    assert not torch.equal(norm(x), rounded(x))


def test_tiny_inputs_are_still_normalised():
    x = _random(4, 32, scale=1e-8)  # mean square 1e-16: an epsilon of 1e-6 would leave 1e-5 of the input
    found = Dsv4RMSNorm(32, 1e-20)(x)
    np.testing.assert_allclose(found.detach().square().mean(-1), np.ones(4), rtol=1e-3)


# ---- packed linear -----------------------------------------------------------------------------------------------------


SHAPES = [(96, 64), (70, 100), (32, 32), (1, 3), (33, 130), (128, 31)]


@pytest.mark.parametrize("pieces", ["one", "some", "most"])
@pytest.mark.parametrize("block_size", [(32, 32), (128, 128), (8, 16)])
@pytest.mark.parametrize("shape", SHAPES)
def test_packed_linear_equals_its_float_weight(monkeypatch, shape, block_size, pieces):
    out_features, in_features = shape
    limit = {"one": 1 << 24, "some": 3 * block_size[0] * in_features, "most": 1}[pieces]
    monkeypatch.setattr(layers, "MAX_UNPACKED_ELEMENTS", limit)
    linear = Dsv4Linear(in_features, out_features)
    weight = _pack(linear, _random(out_features, in_features), block_size)
    x = _random(2, 3, in_features, seed=2, dtype=torch.float64).requires_grad_()
    found = linear(x)
    np.testing.assert_allclose(found.detach(), x.detach().numpy() @ weight.numpy().T, atol=1e-12)
    upstream = _random(2, 3, out_features, seed=3, dtype=torch.float64)
    found.backward(upstream)
    np.testing.assert_allclose(x.grad, upstream.numpy() @ weight.numpy(), atol=1e-12)
    assert linear.weight.grad is None
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        assert torch.equal(linear.float_weight(dtype).double(), weight)


def test_blocks_are_whole_tile_rows_and_nothing_larger_is_unpacked(monkeypatch):
    linear = Dsv4Linear(64, 200)
    _pack(linear, _random(200, 64))
    monkeypatch.setattr(layers, "MAX_UNPACKED_ELEMENTS", 64 * 64)
    sizes, real = [], layers.dequantize_fp8_tiles

    def spy(values, scale, **options):
        sizes.append((values.shape[0], scale.shape[0]))
        return real(values, scale, **options)

    monkeypatch.setattr(layers, "dequantize_fp8_tiles", spy)
    x = _random(2, 64, dtype=torch.float32).requires_grad_()
    linear(x).sum().backward()
    assert sizes == [(64, 2), (64, 2), (64, 2), (8, 1)] * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_packed_and_float_linear_compute_the_same(dtype):
    packed, plain = Dsv4Linear(64, 96), Dsv4Linear(64, 96).to(dtype)
    plain.weight.data.copy_(_pack(packed, _random(96, 64)))
    for enabled in (False, True):
        packed.quantize_activations = plain.quantize_activations = enabled
        x, y = (_random(5, 64, seed=2, dtype=dtype).requires_grad_() for _ in range(2))
        assert torch.equal(packed(x), plain(y))
        packed(x).float().square().sum().backward()
        plain(y).float().square().sum().backward()
        assert torch.equal(x.grad, y.grad)


@pytest.mark.parametrize("block_size", [(32, 32), (128, 128)])
def test_input_rounding_uses_the_tile_width_and_passes_gradients(block_size):
    linear = Dsv4Linear(256, 64)
    weight = _pack(linear, _random(64, 256), block_size)
    linear.quantize_activations = True
    x = (_random(4, 256, seed=2, dtype=torch.float64) * 2.0 ** torch.arange(256).div(32).floor()).requires_grad_()
    blocks = x.detach().float().numpy().reshape(4, -1, block_size[1])
    power = formats.exponent_up(np.maximum(np.abs(blocks).max(-1), np.float32(1e-4)) * np.float32(1 / 448))
    scale = 2.0 ** power[..., None]
    rounded = (formats.decode_e4m3(formats.encode_e4m3(blocks / scale)) * scale).reshape(4, 256)
    found = linear(x)
    np.testing.assert_allclose(found.detach(), rounded @ weight.numpy().T, rtol=1e-12, atol=1e-9)
    found.sum().backward()
    np.testing.assert_allclose(x.grad, weight.numpy().sum(0).repeat(4).reshape(256, 4).T, atol=1e-10)


def test_the_layer_that_the_release_does_not_round_stays_unrounded():
    linear = Dsv4GroupedLinear(64, 32, groups=1)
    weight = _pack(linear, _random(32, 64))
    linear.quantize_activations = True
    x = _random(4, 64, seed=2, dtype=torch.float64)
    np.testing.assert_allclose(linear(x[:, None]).detach(), x.numpy() @ weight.numpy().T, atol=1e-12)


CASTS = {
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "double": lambda m: m.double(),
    "to dtype": lambda m: m.to(torch.float64),
    "to device and dtype": lambda m: m.to("cpu", torch.float16),
    "deepcopy": copy.deepcopy,
    "requires_grad_": lambda m: m.requires_grad_(False),
    "state_dict": lambda m: m.load_state_dict(m.state_dict(), assign=True) and m,
    "in a container": lambda m: torch.nn.Sequential(m).to(torch.bfloat16)[0],
}


@pytest.mark.parametrize("scale_dtype", [torch.float8_e8m0fnu, torch.float32])
@pytest.mark.parametrize("name", list(CASTS))
def test_casts_never_touch_packed_bytes(name, scale_dtype):
    linear = Dsv4Linear(64, 70)
    linear.pack((32, 32), scale_dtype)
    generator = torch.Generator().manual_seed(1)
    for parameter in (linear.weight, linear.weight_scale_inv):
        raw = parameter.data.view(torch.uint8)
        raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8, generator=generator))
    before = _bytes(linear)
    moved = CASTS[name](linear)
    assert all(torch.equal(a, b) for a, b in zip(before, _bytes(moved), strict=True))
    assert (moved.weight.dtype, moved.weight_scale_inv.dtype) == (torch.float8_e4m3fn, scale_dtype)
    assert not moved.weight.requires_grad and not moved.weight_scale_inv.requires_grad
    assert moved.is_packed


def test_packed_tensors_move_to_another_device():
    linear = Dsv4Linear(64, 70)
    _pack(linear, _random(70, 64))
    linear.to("meta")
    assert linear.weight.device.type == linear.weight_scale_inv.device.type == "meta"
    assert linear.weight.dtype == torch.float8_e4m3fn
    empty = linear.to_empty(device="cpu")
    assert empty.weight.shape == (70, 64) and empty.weight_scale_inv.shape == (3, 2)
    assert empty.weight.dtype == torch.float8_e4m3fn


def test_float_linear_still_casts():
    linear = Dsv4Linear(8, 4).bfloat16()
    assert linear.weight.dtype == torch.bfloat16 and linear.weight_scale_inv is None
    assert list(linear.state_dict()) == ["weight"]


# ---- grouped linear ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("groups", "width", "rank"), [(2, 64, 48), (4, 20, 7), (1, 33, 5), (8, 32, 32), (3, 40, 50)])
def test_each_group_has_its_own_rows(groups, width, rank, packed):
    # Tiles are ragged in both directions and cross group borders.
    linear = Dsv4GroupedLinear(width, groups * rank, groups).double()
    weight = _random(groups * rank, width, dtype=torch.float64)
    if packed:
        weight = _pack(linear, weight.float())
    else:
        linear.weight.data.copy_(weight)
    linear.quantize_activations = True  # the release does not round this input
    x = _random(2, 3, groups, width, seed=2, dtype=torch.float64).requires_grad_()
    found = linear(x)
    expected = torch.zeros(2, 3, groups * rank, dtype=torch.float64)
    for g in range(groups):
        for r in range(rank):
            expected[..., g * rank + r] = (x[..., g, :] * weight[g * rank + r]).sum(-1)
    np.testing.assert_allclose(found.detach(), expected.detach(), atol=1e-12)
    found.backward(torch.ones_like(found))
    per_group = weight.unflatten(0, (groups, rank)).sum(1)
    np.testing.assert_allclose(x.grad, per_group.expand(2, 3, groups, width), atol=1e-12)


# ---- SwiGLU --------------------------------------------------------------------------------------------------------------


def test_the_gate_is_clamped_above_and_up_on_both_sides():
    gate = torch.tensor([-50.0, -3.0, 0.5, 2.0, 50.0], dtype=torch.float64)
    up = torch.tensor([-50.0, 50.0, 1.0, -2.5, 3.0], dtype=torch.float64)
    found = clamped_swiglu(gate[:, None], up[None], 2.0)
    for i, g in enumerate(gate.tolist()):
        for j, u in enumerate(up.tolist()):
            g_, u_ = min(g, 2.0), max(min(u, 2.0), -2.0)
            assert float(found[i, j]) == pytest.approx(g_ / (1 + np.exp(-g_)) * u_, rel=1e-14)
    assert found[0, 2] != 0 and abs(found[0, 2]) < 1e-19  # not clamped below: silu(-50), not silu(-2)


def test_swiglu_works_in_float32():
    gate, up = _random(50, seed=1, dtype=torch.bfloat16), _random(50, seed=2, dtype=torch.bfloat16)
    found = clamped_swiglu(gate, up, 10.0)
    assert found.dtype == torch.float32
    assert torch.equal(found, torch.nn.functional.silu(gate.float()) * up.float())


@pytest.mark.parametrize("rounds", [False, True])
def test_shared_expert_equals_the_oracle(rounds):
    mlp = Dsv4MLP(64, 96, 0.7)
    weights = {
        name: _pack(getattr(mlp, name), _random(*getattr(mlp, name).weight.shape, seed=i)).numpy()
        for i, name in enumerate(("gate_proj", "up_proj", "down_proj"))
    }
    for name in weights:
        getattr(mlp, name).quantize_activations = rounds
    x = _random(6, 64, seed=9, dtype=torch.float64)
    expected = [
        experts.expert(
            row, weights["gate_proj"], weights["down_proj"], weights["up_proj"], 0.7,
            round_input=formats.round_fp8 if rounds else None,
        )
        for row in x.numpy()
    ]  # fmt: skip
    np.testing.assert_allclose(mlp(x).detach(), expected, atol=1e-10)


# ---- head and plain linear -------------------------------------------------------------------------------------------------


def test_head_products_are_float32_for_any_block_of_rows(monkeypatch):
    head = Dsv4Head(32, 50).bfloat16()
    x = _random(2, 3, 32, dtype=torch.bfloat16)
    expected = (x.double() @ head.weight.detach().double().mT).numpy()
    whole = head(x)
    assert whole.dtype == torch.float32
    np.testing.assert_allclose(whole.detach(), expected, atol=2e-6)
    monkeypatch.setattr(layers, "MAX_UNPACKED_ELEMENTS", 7 * 32)
    np.testing.assert_allclose(head(x).detach(), expected, atol=2e-6)
    assert head(x.double()).dtype == torch.float64


def test_plain_linear_uses_a_wider_weight_in_the_dtype_of_the_input():
    linear = Dsv4PlainLinear(16, 8)
    x = _random(3, 16, dtype=torch.bfloat16)
    assert torch.equal(linear(x), torch.nn.functional.linear(x, linear.weight.bfloat16()))
    assert linear(x.float()).dtype == torch.float32
