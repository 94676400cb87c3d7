"""Experts: routing against the oracle, both banks bit for bit, rounding order, what is unpacked, gradients."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from modeling_dsv4 import moe
from modeling_dsv4.fp_codecs import quantize_fp4_rows, quantize_fp8_tiles
from modeling_dsv4.moe import Dsv4Experts, Dsv4PackedExperts, Dsv4SparseMoeBlock, Dsv4TopKRouter, route_tokens
from tests.modeling.mechanism_models import random_values
from tests.reference import experts, formats

HIDDEN, WIDTH, EXPERTS, CHOSEN = 64, 32, 8, 3


def _config(**changes):
    values = {
        "n_routed_experts": EXPERTS,
        "hidden_size": HIDDEN,
        "moe_intermediate_size": WIDTH,
        "num_experts_per_tok": CHOSEN,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "gate_temp": 1.0,
        "swiglu_limit": 0.8,
        "num_hash_layers": 0,
        "has_image_bias": True,
    }
    config = SimpleNamespace(**(values | changes))
    config.experts_of = lambda layer: (config.n_routed_experts, config.num_experts_per_tok)
    return config


# ---- routing -----------------------------------------------------------------------------------------------------------


def test_routing_equals_the_oracle():
    x, weight, bias = (
        random_values(40, HIDDEN),
        random_values(EXPERTS, HIDDEN, seed=2, scale=0.3),
        random_values(EXPERTS, seed=3),
    )
    weights, indices = route_tokens(x @ weight.mT, bias, k=CHOSEN, normalize=True, scaling=1.5)
    for t in range(40):
        chosen, expected = experts.route(x[t].numpy(), weight.numpy(), bias.numpy(), CHOSEN, 1.5)
        assert indices[t].tolist() == list(chosen)
        np.testing.assert_allclose(weights[t], expected, rtol=1e-12)
    np.testing.assert_allclose(weights.sum(-1), np.full(40, 1.5), rtol=1e-12)


def test_the_bias_enters_the_choice_only():
    logits = torch.zeros(1, 4, dtype=torch.float64)
    bias = torch.tensor([0.0, 5.0, -5.0, 1.0], dtype=torch.float64)
    weights, indices = route_tokens(logits, bias, k=2, normalize=False, scaling=2.0)
    assert indices.tolist() == [[1, 3]]
    np.testing.assert_allclose(weights, np.full((1, 2), 2 * np.sqrt(np.log(2))), rtol=1e-14)


def test_equal_scores_go_to_the_lower_expert():
    for count in (3, 8, 64, 384):
        logits = torch.zeros(5, count)
        logits[:, count // 2] = 1.0
        weights, indices = route_tokens(logits, torch.zeros(count), k=3, normalize=True, scaling=1.0)
        expected = [count // 2] + [e for e in range(count) if e != count // 2][:2]
        assert indices.tolist() == [expected] * 5


def test_large_logits_are_linear_and_small_ones_vanish():
    logits = torch.tensor([[400.0, 25.0, -400.0, 0.0]], dtype=torch.float64)
    weights, indices = route_tokens(logits, torch.zeros(4), k=4, normalize=False, scaling=1.0)
    assert indices.tolist() == [[0, 1, 3, 2]]
    np.testing.assert_allclose(weights, [[20.0, 5.0, np.sqrt(np.log(2)), 0.0]], rtol=1e-9, atol=1e-30)


def _router(**changes):
    router = Dsv4TopKRouter(_config(**changes), 0).double()
    router.weight.data.copy_(random_values(EXPERTS, HIDDEN, scale=0.3))
    router.e_score_correction_bias.copy_(random_values(EXPERTS, seed=2))
    router.e_score_correction_bias_vl.copy_(random_values(EXPERTS, seed=3))
    return router


def test_image_tokens_have_a_bias_of_their_own():
    router, x = _router(), random_values(30, HIDDEN, seed=4)
    image = torch.arange(30) % 3 == 0
    _, weights, indices = router(x, image)
    differs = 0
    for t in range(30):
        text = experts.route(
            x[t].numpy(), router.weight.detach().numpy(), router.e_score_correction_bias.numpy(), CHOSEN, 1.5
        )
        vision = experts.route(
            x[t].numpy(), router.weight.detach().numpy(), router.e_score_correction_bias_vl.numpy(), CHOSEN, 1.5
        )
        chosen, expected = vision if image[t] else text
        assert indices[t].tolist() == list(chosen)
        np.testing.assert_allclose(weights[t].detach(), expected, rtol=1e-12)
        differs += list(text[0]) != list(vision[0])
    assert differs > 10
    assert torch.equal(router(x)[2], router(x, torch.zeros(30, dtype=torch.bool))[2])


def test_the_temperature_divides_the_logits():
    plain, warm, x = _router(), _router(gate_temp=2.0), random_values(10, HIDDEN, seed=5)
    np.testing.assert_allclose(warm(x)[0].detach() * 2, plain(x)[0].detach(), rtol=1e-13)
    expected = route_tokens(plain(x)[0] / 2, warm.e_score_correction_bias, k=CHOSEN, normalize=True, scaling=1.5)
    assert torch.equal(warm(x)[2], expected[1])


def test_routing_is_float32_for_bfloat16_inputs():
    router = _router().bfloat16()
    router.e_score_correction_bias = random_values(EXPERTS, seed=2, dtype=torch.float32)
    x = random_values(20, HIDDEN, seed=6, dtype=torch.bfloat16)
    logits, weights, _ = router(x)
    assert logits.dtype == weights.dtype == torch.float32
    np.testing.assert_allclose(logits.detach(), x.double() @ router.weight.detach().double().mT, atol=1e-5)


def test_gradient_reaches_the_router_and_not_the_bias():
    router, x = _router(), random_values(12, HIDDEN, seed=7).requires_grad_()
    _, weights, _ = router(x)
    (weights * random_values(12, CHOSEN, seed=8)).sum().backward()
    assert router.weight.grad.abs().max() > 0 and x.grad.abs().max() > 0
    assert {name for name, _ in router.named_parameters()} == {"weight"}
    assert not router.e_score_correction_bias.requires_grad
    bias = random_values(EXPERTS).requires_grad_()
    weights, _ = route_tokens(
        random_values(4, EXPERTS, seed=9).requires_grad_(), bias, k=2, normalize=True, scaling=1.0
    )
    weights.sum().backward()
    assert bias.grad is None


def test_gradient_of_the_routing_weights():
    bias, logits = random_values(6, seed=2), random_values(4, 6, seed=3).requires_grad_()
    for normalize in (True, False):

        def route(values, normalize=normalize):
            return route_tokens(values, bias, k=2, normalize=normalize, scaling=1.5)[0]

        assert torch.autograd.gradcheck(route, logits)


# ---- banks ---------------------------------------------------------------------------------------------------------------


def _banks(expert_dtype="fp4", scale_dtype=torch.float8_e8m0fnu, dtype=torch.float64, block=(32, 32), **changes):
    """A packed bank, the float bank of the same values, and the float64 matrices per expert and name."""
    bank = Dsv4Experts(_config(**changes))
    packed = Dsv4PackedExperts(bank, expert_dtype, block, scale_dtype)
    matrices = {}
    for name in packed.host_names():
        if name.endswith("_scale_inv"):
            continue
        expert, projection = name.split(".")[:2]
        shape = (WIDTH, HIDDEN) if projection != "down_proj" else (HIDDEN, WIDTH)
        seed = 10 * int(expert) + ("gate_proj", "up_proj", "down_proj").index(projection)
        weight = random_values(*shape, seed=seed, dtype=torch.float32, scale=0.3)
        if expert_dtype == "fp4":
            values, scale = quantize_fp4_rows(weight)
            codes = scale.view(torch.uint8).numpy()
            exact = formats.dequantize_fp4_rows(values.view(torch.uint8).numpy(), codes)
        else:
            values, scale = quantize_fp8_tiles(weight, block_size=block)
            codes = scale.view(torch.uint8).numpy()
            exact = formats.dequantize_fp8_tiles(values.view(torch.uint8).numpy(), codes, block)
        packed.assign(name, values)
        scale = torch.from_numpy(formats.decode_e8m0(codes)).float() if scale_dtype == torch.float32 else scale
        packed.assign(f"{name}_scale_inv", scale)
        matrices[int(expert), projection] = exact
    for expert in range(EXPERTS):
        gate_up = np.concatenate([matrices[expert, "gate_proj"], matrices[expert, "up_proj"]])
        bank.gate_up_proj.data[expert] = torch.from_numpy(gate_up).float()
        bank.down_proj.data[expert] = torch.from_numpy(matrices[expert, "down_proj"]).float()
    return packed, bank.to(dtype), matrices


def _routing(tokens=12, experts_used=EXPERTS, seed=5):
    generator = torch.Generator().manual_seed(seed)
    indices = torch.stack([torch.randperm(experts_used, generator=generator)[:CHOSEN] for _ in range(tokens)])
    return torch.rand(tokens, CHOSEN, generator=generator, dtype=torch.float64), indices


@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("expert_dtype", "scale_dtype", "block"),
    [
        ("fp4", torch.float8_e8m0fnu, (32, 32)),
        ("fp4", torch.float32, (32, 32)),
        ("fp8", torch.float8_e8m0fnu, (32, 32)),
        ("fp8", torch.float32, (128, 128)),
    ],
)
def test_packed_and_float_banks_are_equal_bit_for_bit(expert_dtype, scale_dtype, block, dtype, rounds):
    packed, bank, _ = _banks(expert_dtype, scale_dtype, dtype, block)
    packed.quantize_activations = bank.quantize_activations = rounds
    bank.activation_block = packed.activation_block
    weights, indices = _routing()
    weights = weights.to(torch.promote_types(dtype, torch.float32))
    x, y = (random_values(12, HIDDEN, seed=3, dtype=dtype).requires_grad_() for _ in range(2))
    found, expected = packed(x, indices, weights), bank(y, indices, weights)
    assert found.dtype == torch.promote_types(dtype, torch.float32)
    assert torch.equal(found, expected)
    found.square().sum().backward()
    expected.square().sum().backward()
    assert torch.equal(x.grad, y.grad) and x.grad.abs().max() > 0
    assert bank.gate_up_proj.grad is not None and not list(packed.parameters())


def test_nothing_unpacked_is_kept_for_the_backward_pass():
    """Adapters train over packed experts: a layer's experts in floats would be four times its file."""
    packed, bank, _ = _banks(dtype=torch.float32)
    weights, indices = _routing()
    matrices = {tuple(m.shape) for p in (bank.gate_up_proj, bank.down_proj) for m in (p[0], p[0].mT)}
    for some, keeps in ((packed, False), (bank, True)):
        shapes = set()
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda t, shapes=shapes: shapes.add(tuple(t.shape)) or t, lambda t: t
        )
        with hooks:
            some(random_values(12, HIDDEN, seed=3, dtype=torch.float32).requires_grad_(), indices, weights.float())
        assert bool(shapes & matrices) == keeps, shapes


@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("limit", [0.2, 100.0])
def test_banks_equal_the_oracle(limit, rounds):
    packed, bank, matrices = _banks(swiglu_limit=limit)
    packed.quantize_activations = bank.quantize_activations = rounds
    weights, indices = _routing()
    x = random_values(12, HIDDEN, seed=3)
    expected = np.zeros((12, HIDDEN))
    for t in range(12):
        for weight, e in zip(weights[t].tolist(), indices[t].tolist(), strict=True):
            w1, w2, w3 = (matrices[e, name] for name in ("gate_proj", "down_proj", "up_proj"))
            rounding = formats.round_fp8 if rounds else None
            expected[t] += experts.expert(x[t].numpy(), w1, w2, w3, limit, weight, rounding)
    for some in (packed, bank):
        np.testing.assert_allclose(some(x, indices, weights).detach(), expected, atol=1e-10)


def test_the_routing_weight_comes_before_the_rounding_of_the_down_input():
    packed, _, matrices = _banks(swiglu_limit=100.0)
    packed.quantize_activations = True
    x, e = random_values(1, HIDDEN, seed=3), 2
    found = packed(x, torch.tensor([[e]]), torch.full((1, 1), 0.3, dtype=torch.float64))
    w1, w2, w3 = (matrices[e, name] for name in ("gate_proj", "down_proj", "up_proj"))
    inside = experts.expert(x[0].numpy(), w1, w2, w3, 100.0, 0.3, formats.round_fp8)
    outside = 0.3 * experts.expert(x[0].numpy(), w1, w2, w3, 100.0, 1.0, formats.round_fp8)
    np.testing.assert_allclose(found[0].detach(), inside, atol=1e-12)
    assert np.abs(inside - outside).max() > 1e-4


def test_only_routed_experts_are_unpacked_and_each_once(monkeypatch):
    packed, _, _ = _banks()
    touched, real = [], moe.dequantize_fp4_rows
    monkeypatch.setattr(moe, "dequantize_fp4_rows", lambda w, s, **k: touched.append(w.data_ptr()) or real(w, s, **k))
    weights, indices = _routing()
    indices[:] = torch.tensor([6, 1, 4])
    packed(random_values(12, HIDDEN), indices, weights)
    wanted = [f"{e}.{p}.weight" for e in (1, 4, 6) for p in ("gate_proj", "up_proj", "down_proj")]
    assert sorted(touched) == sorted(packed.host_tensor(name).data_ptr() for name in wanted)


def test_experts_without_tokens_get_no_gradient_and_order_does_not_matter():
    _, bank, _ = _banks(dtype=torch.float64)
    weights, indices = _routing(experts_used=5)
    x = random_values(12, HIDDEN)
    out = bank(x, indices, weights)
    out.sum().backward()
    assert not bank.gate_up_proj.grad[5:].any() and all(bank.down_proj.grad[e].any() for e in range(5))
    flipped = bank(x, indices.flip(-1), weights.flip(-1))
    np.testing.assert_allclose(flipped.detach(), out.detach(), atol=1e-14)
    np.testing.assert_allclose(bank(x[3:4], indices[3:4], weights[3:4]).detach(), out[3:4].detach(), atol=1e-14)


def test_gradient_of_a_bank():
    bank = Dsv4Experts(_config(hidden_size=4, moe_intermediate_size=3, n_routed_experts=3, swiglu_limit=50.0)).double()
    bank.gate_up_proj.data.copy_(random_values(3, 6, 4))
    bank.down_proj.data.copy_(random_values(3, 4, 3, seed=2))
    indices = torch.tensor([[0, 2], [2, 1], [0, 1]])
    args = random_values(3, 4, seed=3).requires_grad_(), torch.rand(3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: bank(x, indices, w), args)


def test_host_tensors_of_a_bank_survive_casts_and_are_checked():
    packed, _, _ = _banks()
    before = {name: packed.host_tensor(name).view(torch.uint8).clone() for name in packed.host_names()}
    moved = torch.nn.Sequential(packed).to(torch.bfloat16).half()[0]
    assert all(torch.equal(moved.host_tensor(n).view(torch.uint8), b) for n, b in before.items())
    assert set(packed.state_dict()) == set(before) and not list(packed.parameters())
    with pytest.raises(ValueError, match=r"0\.gate_proj\.weight"):
        packed.assign("0.gate_proj.weight", torch.zeros(WIDTH, HIDDEN // 2, dtype=torch.uint8))
    with pytest.raises(ValueError, match="expected"):
        packed.assign("0.gate_proj.weight", torch.zeros(WIDTH, HIDDEN, dtype=torch.int8))


# ---- the block -----------------------------------------------------------------------------------------------------------


def test_block_adds_routed_and_shared_experts_like_the_oracle():
    block = Dsv4SparseMoeBlock(_config(), 0).double()
    for i, parameter in enumerate(block.parameters()):
        parameter.data.copy_(random_values(*parameter.shape, seed=20 + i, scale=0.3))
    block.gate.e_score_correction_bias.copy_(random_values(EXPERTS, seed=2))
    block.gate.e_score_correction_bias_vl.copy_(random_values(EXPERTS, seed=3))
    x, image = random_values(2, 6, HIDDEN, seed=4), torch.arange(12).view(2, 6) % 4 == 1
    found = block(x, image).detach()
    shared = [getattr(block.shared_experts, n).weight.detach().numpy() for n in ("gate_proj", "down_proj", "up_proj")]
    for b in range(2):
        for s in range(6):
            token = x[b, s].numpy()
            gate = block.gate.e_score_correction_bias_vl if image[b, s] else block.gate.e_score_correction_bias
            chosen, weights = experts.route(token, block.gate.weight.detach().numpy(), gate.numpy(), CHOSEN, 1.5)
            expected = experts.expert(token, *shared, 0.8)
            for e, weight in zip(chosen, weights, strict=True):
                w1, w3 = block.experts.gate_up_proj[e].detach().numpy().reshape(2, WIDTH, HIDDEN)
                w2 = block.experts.down_proj[e].detach().numpy()
                expected = expected + experts.expert(token, w1, w2, w3, 0.8, weight)
            np.testing.assert_allclose(found[b, s], expected, atol=1e-10)
    assert not torch.equal(found, block(x).detach())


def test_block_sums_in_float32(monkeypatch):
    block = Dsv4SparseMoeBlock(_config(), 0)
    for i, parameter in enumerate(block.parameters()):
        parameter.data.copy_(random_values(*parameter.shape, seed=20 + i, scale=0.3))
    block = block.bfloat16()
    seen = []
    monkeypatch.setattr(moe.Dsv4Experts, "forward", lambda self, x, i, w: seen.append(w.dtype) or x.float() * 1.001)
    x = random_values(1, 3, HIDDEN, dtype=torch.bfloat16)
    found = block(x)
    expected = (x[0].float() * 1.001 + block.shared_experts(x[0]).float()).bfloat16()
    assert found.dtype == torch.bfloat16 and torch.equal(found[0], expected)
    assert seen == [torch.float32]
