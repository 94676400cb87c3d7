"""Hyper-connections: orientation, doubly stochastic mixing, gradients eager and compiled (fault kind K8)."""

import itertools
import shutil
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from modeling_dsv4 import layers
from modeling_dsv4.fp_codecs import round_fp8
from modeling_dsv4.hyper_connections import (
    Dsv4HyperConnection,
    Expansion,
    collapse_streams,
    expand_streams,
    first_pre,
    hyper_connection_coefficients,
    hyper_connection_site,
    sinkhorn_normalize,
)
from modeling_dsv4.quantization import set_activation_rounding
from tests.grids import half_of
from tests.modeling import tiny_model
from tests.modeling.mechanism_models import random_values
from tests.reference import mhc

OPTIONS = {"iterations": 20, "eps": 1e-6, "norm_eps": 1e-20}
# Source j feeds destination k: nothing here is near its transpose.
ASYMMETRIC = torch.tensor(
    [[0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.9, 0.1], [0.7, 0.0, 0.0, 0.3], [0.3, 0.0, 0.1, 0.6]], dtype=torch.float64
)


def _site(count=4, width=6, seed=1, dtype=torch.float64):
    """fn, base, scale of a site whose coefficients depend strongly on its streams."""
    size = count * (count + 2)
    fn, base = random_values(size, count * width, seed=seed), random_values(size, seed=seed + 1)
    return fn.to(dtype), base.to(dtype), torch.tensor([0.7, -0.4, 0.9], dtype=dtype)


# ---- orientation -------------------------------------------------------------------------------------------------------


def test_expand_is_the_written_out_double_sum():
    streams, output = random_values(1, 1, 4, 3), random_values(1, 1, 3, seed=2)
    post = torch.tensor([[[0.5, 2.0, 0.0, 1.5]]], dtype=torch.float64)
    found = expand_streams(streams, output, post, ASYMMETRIC[None, None])[0, 0]
    h, y, c, m = streams[0, 0].tolist(), output[0, 0].tolist(), post[0, 0].tolist(), ASYMMETRIC.tolist()
    for k, d in itertools.product(range(4), range(3)):
        expected = c[k] * y[d] + m[0][k] * h[0][d] + m[1][k] * h[1][d] + m[2][k] * h[2][d] + m[3][k] * h[3][d]
        assert float(found[k, d]) == pytest.approx(expected, abs=1e-14)
    transposed = expand_streams(streams, output, post, ASYMMETRIC.mT[None, None])[0, 0]
    assert (transposed - found).abs().max() > 0.5


def test_a_cycle_moves_each_source_to_its_destination():
    cycle = torch.zeros(4, 4)
    for j in range(4):
        cycle[j, (j + 1) % 4] = 1  # stream j goes to stream j + 1
    streams = torch.arange(4.0)[None, None, :, None].expand(1, 1, 4, 2)
    found = expand_streams(streams, torch.zeros(1, 1, 2), torch.ones(1, 1, 4), cycle[None, None])
    assert found[0, 0, :, 0].tolist() == [3.0, 0.0, 1.0, 2.0]


def test_collapse_and_the_first_pre():
    streams, pre = random_values(2, 3, 4, 5), random_values(2, 3, 4, seed=2)
    found = collapse_streams(streams, pre)
    for b, s in itertools.product(range(2), range(3)):
        np.testing.assert_allclose(found[b, s], mhc.collapse(streams[b, s].numpy(), pre[b, s].numpy()), atol=1e-14)
    first = first_pre(streams.bfloat16())
    assert first.dtype == torch.float32 and first.tolist() == [[[1.0, 0.0, 0.0, 0.0]] * 3] * 2
    assert torch.equal(collapse_streams(streams, first_pre(streams)), streams[:, :, 0])


def test_sums_are_taken_in_float32_and_cast_once():
    streams, pre = (
        random_values(2, 9, 4, 16, dtype=torch.bfloat16),
        random_values(2, 9, 4, seed=2, dtype=torch.float32),
    )
    output, post = (
        random_values(2, 9, 16, seed=3, dtype=torch.bfloat16),
        random_values(2, 9, 4, seed=4, dtype=torch.float32),
    )
    comb = ASYMMETRIC.float().expand(2, 9, 4, 4)
    assert torch.equal(collapse_streams(streams, pre), collapse_streams(streams.float(), pre).bfloat16())
    wide = expand_streams(streams.float(), output.float(), post, comb)
    assert torch.equal(expand_streams(streams, output, post, comb), wide.bfloat16())


# ---- against the oracle --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_coefficients_equal_the_oracle(count):
    fn, base, scale = _site(count)
    streams = random_values(2, 3, count, 6, seed=5)
    pre, post, comb = hyper_connection_coefficients(streams, fn, base, scale, **OPTIONS)
    for b, s in itertools.product(range(2), range(3)):
        expected = mhc.coefficients(streams[b, s].numpy(), fn.numpy(), base.numpy(), scale.numpy())
        for found, value in zip((pre[b, s], post[b, s], comb[b, s]), expected, strict=True):
            np.testing.assert_allclose(found, value, atol=1e-12)
    assert (pre > 1e-6).all() and (pre < 1 + 2e-6).all() and (post > 0).all() and (post < 2).all()


def test_coefficients_do_not_depend_on_the_size_of_the_streams():
    fn, base, scale = _site(dtype=torch.float32)
    streams = random_values(1, 5, 4, 6, seed=6, dtype=torch.float32)
    for found, other in zip(
        hyper_connection_coefficients(streams, fn, base, scale, **OPTIONS),
        hyper_connection_coefficients(streams * 1e-7, fn, base, scale, **OPTIONS),
        strict=True,
    ):
        np.testing.assert_allclose(found, other, atol=2e-5)


def test_bfloat16_streams_give_float32_coefficients():
    fn, base, scale = _site(dtype=torch.float32)
    streams = random_values(1, 5, 4, 6, seed=7, dtype=torch.bfloat16)
    found = hyper_connection_coefficients(streams, fn, base, scale, **OPTIONS)
    expected = hyper_connection_coefficients(streams.double(), fn.double(), base.double(), scale.double(), **OPTIONS)
    for value, exact in zip(found, expected, strict=True):
        assert value.dtype == torch.float32
        np.testing.assert_allclose(value, exact, atol=2e-6)


def test_a_whole_site_equals_the_oracle():
    config = SimpleNamespace(
        hc_mult=4, hidden_size=6, hc_sinkhorn_iters=20, hc_eps=1e-6, rms_norm_eps=1e-20, single_pass_hc=True
    )
    site = Dsv4HyperConnection(config)
    assert {name: tuple(p.shape) for name, p in site.named_parameters()} == {
        "fn": (24, 24),
        "base": (24,),
        "scale": (3,),
    }
    assert all(p.dtype == torch.float32 for p in site.parameters())
    site = site.double()
    for parameter, value in zip(site.parameters(), _site(), strict=True):
        parameter.data.copy_(value)
    streams, output = random_values(1, 3, 4, 6, seed=8), random_values(1, 3, 6, seed=9)
    pre, post, comb = site(streams)[2:5]
    mixed = expand_streams(streams, output, post, comb).detach()
    for s in range(3):
        a, c, m = mhc.coefficients(streams[0, s].numpy(), *(p.detach().numpy() for p in site.parameters()))
        np.testing.assert_allclose(
            mixed[0, s], mhc.expand(streams[0, s].numpy(), output[0, s].numpy(), c, m), atol=1e-12
        )
        np.testing.assert_allclose(pre[0, s].detach(), a, atol=1e-12)


@pytest.mark.parametrize("carried", [False, True])
def test_a_site_first_settles_what_is_pending(carried):
    fn, base, scale = _site()
    streams, output = random_values(1, 3, 4, 6, seed=8), random_values(1, 3, 6, seed=9)
    carried_pre, post = random_values(1, 3, 4, seed=10), random_values(1, 3, 4, seed=11)
    pending = Expansion(output, post, ASYMMETRIC.expand(1, 3, 4, 4))
    site = hyper_connection_site(
        streams, pending, carried_pre if carried else None, fn, base, scale, lambda x: 3 * x, **OPTIONS
    )
    for s in range(3):
        mixed = mhc.expand(streams[0, s].numpy(), output[0, s].numpy(), post[0, s].numpy(), ASYMMETRIC.numpy())
        a, c, m = mhc.coefficients(mixed, fn.numpy(), base.numpy(), scale.numpy())
        x = 3 * mhc.collapse(mixed, carried_pre[0, s].numpy() if carried else a)
        for found, expected in zip(site[:5], (mixed, x, a, c, m), strict=True):
            np.testing.assert_allclose(found[0, s], expected, atol=1e-12)


# ---- the mixing matrix -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("iterations", [1, 2, 20])
def test_sinkhorn_equals_the_oracle(iterations):
    logits = random_values(50, 4, 4, scale=3.0)
    found = sinkhorn_normalize(logits, iterations=iterations, eps=1e-6)
    np.testing.assert_allclose(found, mhc.sinkhorn(logits.numpy(), iterations), atol=1e-13)
    # The last step is over columns: they end as sum / (sum + eps), whatever the rows do.
    errors = np.abs(found.numpy().sum(-2) - 1).max(), np.abs(found.numpy().sum(-1) - 1).max()
    assert errors[0] < (3e-4, 1e-4, 2e-6)[(1, 2, 20).index(iterations)] and errors[0] < errors[1]


def test_mixing_is_doubly_stochastic_and_never_amplifies():
    found = sinkhorn_normalize(random_values(500, 4, 4, dtype=torch.float32), iterations=20, eps=1e-6).double().numpy()
    assert (found >= 0).all()
    assert mhc.column_sum_error(found) < 3e-6
    assert mhc.row_sum_error(found) < 1e-3
    # A non-negative matrix has a spectral norm of at most sqrt(largest row sum * largest column sum), and at least 1 / that.
    norms = np.linalg.svd(found, compute_uv=False)[:, 0]
    assert norms.max() < 1 + 5e-4 and norms.min() > 1 - 5e-4


def test_twenty_iterations_are_near_the_limit():
    logits = random_values(500, 4, 4)
    limit = mhc.sinkhorn_limit(logits.numpy())
    assert mhc.doubly_stochastic_error(limit) < 1e-13 and abs(mhc.largest_gain(limit) - 1) < 1e-12
    errors = [
        np.abs(sinkhorn_normalize(logits, iterations=n, eps=1e-6).numpy() - limit).max() for n in (1, 5, 20, 100)
    ]
    assert errors[0] > errors[1] > errors[2] and errors[2] < 1e-3
    # What remains after many iterations is the eps.
    assert errors[3] < 1e-4
    exact = sinkhorn_normalize(logits, iterations=2000, eps=0.0)
    np.testing.assert_allclose(exact, limit, atol=1e-12)


def _mixed(streams, comb):
    """The streams after mixing alone: a sublayer that returns nothing."""
    silent = torch.zeros_like(streams[..., 0, :])
    return expand_streams(streams, silent, torch.ones_like(streams[..., 0]), comb)


def test_the_sum_over_streams_is_conserved():
    streams = random_values(1, 40, 4, 16, seed=3)
    comb = sinkhorn_normalize(random_values(1, 40, 4, 4), iterations=200, eps=0.0)
    np.testing.assert_allclose(_mixed(streams, comb).sum(2), streams.sum(2), atol=1e-9)
    # Forty layers with the released iterations and eps: conserved up to what is left of the row errors, never larger.
    mixed = streams
    for layer in range(40):
        mixed = _mixed(mixed, sinkhorn_normalize(random_values(1, 40, 4, 4, seed=layer), iterations=20, eps=1e-6))
    assert (mixed.sum(2) - streams.sum(2)).abs().max() < 1e-3 * streams.sum(2).abs().max()
    assert mixed.abs().max() <= streams.abs().max()


@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0, 1e4])
def test_extreme_logits_stay_finite(scale):
    logits = (random_values(200, 4, 4, dtype=torch.float32) * scale).requires_grad_()
    found = sinkhorn_normalize(logits, iterations=20, eps=1e-6)
    found.square().sum().backward()
    assert found.isfinite().all() and (found >= 0).all() and logits.grad.isfinite().all()


# ---- gradients -----------------------------------------------------------------------------------------------------------


def test_gradients_of_a_site():
    fn, base, scale = _site(3, 2)
    args = [
        t.requires_grad_()
        for t in (random_values(1, 2, 3, 2, seed=5), fn, base, scale, random_values(1, 2, 2, seed=6))
    ]

    def site(streams, fn, base, scale, output):
        pre, post, comb = hyper_connection_coefficients(streams, fn, base, scale, **OPTIONS)
        return collapse_streams(streams, pre), expand_streams(streams, output, post, comb)

    assert torch.autograd.gradcheck(site, args)


def _site_loss(streams, fn, base, scale, output, factor):
    pre, post, comb = hyper_connection_coefficients(streams, fn, base, scale, **OPTIONS)
    y = output * collapse_streams(streams, pre)
    return expand_streams(streams, y, post, comb).float().square().mean() * factor


def _gradients(function, dtype, factor):
    fn, base, scale = _site(4, 16, dtype=torch.float32)
    streams, output = random_values(2, 5, 4, 16, seed=5, dtype=dtype), random_values(2, 5, 16, seed=6, dtype=dtype)
    args = [t.clone().requires_grad_() for t in (streams, fn, base, scale, output)]
    loss = function(*args, factor)
    loss.backward()
    return [loss.detach()] + [t.grad for t in args]


def _assert_equal_gradients(backend, dtype, factor):
    torch._dynamo.reset()
    eager = _gradients(_site_loss, dtype, factor)
    compiled = _gradients(torch.compile(_site_loss, fullgraph=True, backend=backend), dtype, factor)
    exact = _gradients(_site_loss, torch.float64, factor)
    for name, a, b, c in zip(
        ("loss", "streams", "fn", "base", "scale", "output"), eager, compiled, exact, strict=True
    ):
        assert a.isfinite().all() and b.isfinite().all(), name
        assert a.abs().max() > 0
        size = c.abs().max()
        bound = 1e-5 if dtype == torch.float32 else 2e-2
        assert (a - b).abs().max() <= bound * size, name
        assert (a - c).abs().max() <= 3 * bound * size, name


@pytest.mark.parametrize(("dtype", "factor"), half_of((torch.float32, torch.bfloat16), (1e4, 1.0)))
def test_gradients_are_finite_and_equal_in_a_captured_graph(dtype, factor):
    _assert_equal_gradients("aot_eager_decomp_partition", dtype, factor)


NEEDS_COMPILER = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None,
    reason="torch.compile on CPU needs a C++ compiler (g++ or clang++), and none is on PATH",
)


@NEEDS_COMPILER
@pytest.mark.parametrize("dtype", [torch.float32])
def test_compiled_gradients_of_a_few_iterations(monkeypatch, dtype):
    monkeypatch.setitem(OPTIONS, "iterations", 2)  # compilation takes a second per iteration
    _assert_equal_gradients("inductor", dtype, 1e4)


@NEEDS_COMPILER
@pytest.mark.slow
@pytest.mark.parametrize("factor", [1.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_gradients_of_the_released_iterations(dtype, factor):
    _assert_equal_gradients("inductor", dtype, factor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_scale_with_the_loss(dtype):
    once, scaled = _gradients(_site_loss, dtype, 1.0), _gradients(_site_loss, dtype, 2.0**13)
    for a, b in zip(once, scaled, strict=True):
        assert b.isfinite().all()
        np.testing.assert_allclose(
            b.float(), a.float() * 2.0**13, rtol=1e-2, atol=float(a.abs().max()) * 2.0**13 * 1e-6
        )


# ---- rounding ----------------------------------------------------------------------------------------------------------


class Wrapped(nn.Module):
    """What takes x alone, as adapters and other libraries' layers do."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


def rounding_model(sites=True):
    model = tiny_model.new_model(**tiny_model.FIVE_LAYERS)
    set_activation_rounding(model, True)
    for layer in model.model.layers:
        layer.attn_hc.quantize_activations = layer.ffn_hc.quantize_activations = sites
    return model


def test_sites_round_once_for_all_that_read_x(monkeypatch):
    ids, found, rounded = torch.arange(24)[None] + 3, {}, Counter()
    for sites in (True, False):
        monkeypatch.setattr(layers, "round_fp8", lambda x, at=sites, **o: rounded.update([at]) or round_fp8(x, **o))
        model = rounding_model(sites)
        attention = model.model.layers[1].self_attn
        attention.kv_proj = Wrapped(attention.kv_proj)
        found[sites] = model(ids).logits
    assert torch.equal(found[True], found[False])
    # q_a_proj, kv_proj, gate_proj and up_proj of five layers, but for the wrapped one, leave it to their sites.
    assert rounded[False] - rounded[True] == 19
    set_activation_rounding(model, False)
    assert not torch.equal(model(ids).logits, found[False])


@pytest.mark.parametrize(
    "name",
    [
        "self_attn",
        "self_attn.q_a_proj",
        "self_attn.kv_proj",
        "mlp",
        "mlp.shared_experts",
        "mlp.shared_experts.up_proj",
    ],
)
def test_a_hook_may_change_x_before_it_is_rounded(name):
    ids, found = torch.arange(24)[None] + 3, []
    for sites in (True, False):
        model = rounding_model(sites)
        plain = model(ids).logits
        hooked = model.model.layers[2].get_submodule(name)
        hooked.register_forward_pre_hook(lambda module, args: (args[0].flip(-1), *args[1:]))
        found.append(model(ids).logits)
    assert torch.equal(*found) and not torch.equal(found[0], plain)
