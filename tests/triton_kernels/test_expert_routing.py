"""Routing: ties, biases and weights against the float64 oracle and the reference functions."""

import importlib

import numpy as np
import pytest
import torch

from modeling_dsv4.moe import Dsv4TopKRouter, route_tokens
from tests.reference import experts as oracle

from .products import random
from .test_packed_experts import make_config

kernels = importlib.import_module("modeling_dsv4.triton_kernels.expert_routing")


@pytest.mark.parametrize(("tokens", "experts", "k"), [(1, 7, 3), (5, 40, 6)])
def test_routes_equal_the_oracle(tokens, experts, k, device, poisoned):
    x, weight = random(tokens, 50, device=device), random(experts, 50, seed=1, device=device)
    bias = random(experts, seed=2, device=device) * 0.1
    logits = x @ weight.mT
    weights, indices = kernels.route_tokens(logits, bias, k=k, normalize=True, scaling=1.5)
    for t in range(tokens):
        row = x[t].cpu().double().numpy()
        chosen, expected = oracle.route(row, weight.cpu().double().numpy(), bias.cpu().double().numpy(), k, 1.5)
        assert indices[t].tolist() == list(chosen)
        np.testing.assert_allclose(weights[t].cpu(), expected, rtol=1e-5)


@pytest.mark.parametrize("normalize", [True, False])
def test_ties_extremes_and_a_bias_per_token_are_those_of_the_reference(normalize, device, poisoned):
    logits, bias = random(4, 24, device=device) * 3, random(4, 24, seed=1, device=device) * 0.1
    logits[1] = 0.5  # all equal: the lower experts
    logits[2, :3] = torch.tensor([400.0, 21.0, -400.0], device=device)
    bias[1] = 0.0
    bias[3, 5] = 100.0  # chosen by its bias, weighted by its score
    settings = {"k": 6, "normalize": normalize, "scaling": 2.0}
    found, expected = kernels.route_tokens(logits, bias, **settings), route_tokens(logits.double(), bias, **settings)
    assert torch.equal(found[1], expected[1]) and found[1].dtype == torch.int64
    torch.testing.assert_close(found[0].double(), expected[0], rtol=1e-5, atol=1e-7)
    one = kernels.route_tokens(logits, bias[0], **settings)
    assert torch.equal(one[1], route_tokens(logits.double(), bias[0], **settings)[1])


def test_the_router_uses_the_kernels(device, watched):
    router = Dsv4TopKRouter(make_config(), 0).to(device)
    router.weight.data.copy_(random(*router.weight.shape))
    router.e_score_correction_bias_vl.copy_(random(len(router.weight), seed=1))
    x, image = (
        random(3, router.weight.shape[1], seed=2, device=device),
        torch.tensor([True, False, True], device=device),
    )
    expected = router.double()(x.double(), image)
    router.float()
    router.kernels, calls = watched("route_tokens")
    router(x, image)
    assert not calls  # a gradient is wanted
    with torch.no_grad():
        logits, weights, indices = router(x, image)
    assert len(calls) == 1 and torch.equal(indices, expected[2])
    torch.testing.assert_close(logits.double(), expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(weights.double(), expected[1], rtol=1e-5, atol=1e-6)
