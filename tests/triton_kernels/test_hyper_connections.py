"""The kernels of a hyper-connection site against the reference: results and gradients."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from modeling_dsv4.fp_codecs import round_fp8
from modeling_dsv4.hyper_connections import Dsv4HyperConnection, Expansion, hyper_connection_site
from modeling_dsv4.kernel_seam import KernelSet
from modeling_dsv4.layers import Dsv4RMSNorm

pytest.importorskip("triton")

from modeling_dsv4.triton_kernels import hyper_connections as kernels  # noqa: E402
from tests.reference import mhc  # noqa: E402

SETTINGS = {"iterations": 4, "eps": 1e-6, "norm_eps": 1e-6}
# Tokens, width, streams; whether an expansion is pending, whether the pre is carried, whether there is a norm.
CASES = [
    (3, 40, 4, True, True, True),
    (66, 72, 4, True, True, False),
    (5, 72, 4, False, True, True),
    (18, 40, 4, True, False, True),
    (2, 40, 4, True, False, False),
    (7, 24, 2, True, True, True),
    (4, 16, 1, True, True, False),
]


def _inputs(tokens, d, n, pending, carried, norm, device, dtype):
    g = torch.Generator().manual_seed(tokens)
    names = ["streams", "output", "post", "comb", "pre", "fn", "base", "scale", "norm"]
    draw = lambda *shape: torch.randn(shape, generator=g)  # noqa: E731
    values = [
        draw(1, tokens, n, d).to(dtype),
        draw(1, tokens, d).to(dtype) if pending else None,
        draw(1, tokens, n).sigmoid() * 2 if pending else None,
        (2 * draw(1, tokens, n, n)).softmax(-1) if pending else None,
        draw(1, tokens, n).sigmoid() if carried else None,
        draw(n * (n + 2), n * d) * d**-0.5,
        draw(n * (n + 2)),
        torch.tensor([0.7, -0.4, 0.9]),
        draw(d).to(dtype) if norm else None,
    ]
    return {name: None if v is None else v.to(device) for name, v in zip(names, values, strict=True)}


def _kernel(streams, output, post, comb, pre, fn, base, scale, norm, **options):
    pending = None if output is None else (output, post, comb)
    return kernels.hyper_connection_site(streams, pending, pre, fn, base, scale, norm, **SETTINGS, **options)


def _reference(streams, output, post, comb, pre, fn, base, scale, norm, **options):
    pending = None if output is None else Expansion(output, post, comb)
    module = Dsv4RMSNorm(streams.shape[-1], SETTINGS["norm_eps"])

    def normalised(x):
        return torch.func.functional_call(module, {"weight": norm}, (x,))

    given = None if norm is None else normalised
    site = hyper_connection_site(streams, pending, pre, fn, base, scale, given, **SETTINGS, **options)
    return [t for t in site if t is not None]


@pytest.mark.parametrize("case", CASES)
def test_a_site_in_float32(case, device, poisoned):
    inputs = _inputs(*case, device, torch.float32)
    with torch.no_grad():
        for found, expected in zip(_kernel(**inputs), _reference(**inputs), strict=True):
            torch.testing.assert_close(found, expected, atol=4e-6, rtol=4e-6)


@pytest.mark.parametrize("case", CASES[:4])
def test_a_site_in_bfloat16(case, device, poisoned):
    inputs = _inputs(*case, device, torch.bfloat16)
    with torch.no_grad():
        settled, x, *coefficients = _kernel(**inputs)
        reference = _reference(**inputs)
        # One rounding to bfloat16, of sums in another order.
        torch.testing.assert_close(settled, reference[0], atol=1e-6, rtol=2**-7)
        # What follows from the streams that were made.
        inputs |= {"streams": settled, "output": None}
        expected = _reference(**inputs)
        torch.testing.assert_close(x, expected[1], atol=0.02, rtol=2**-6)
        for found, value in zip(coefficients, expected[2:], strict=True):
            torch.testing.assert_close(found, value, atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    ("tokens", "d", "carried", "block"),
    [
        (3, 40, True, 32),
        (2, 72, False, 32),
        (3, 40, True, 128),
        (18, 160, True, 128),
        pytest.param(66, 160, True, 32, marks=pytest.mark.slow),
        pytest.param(66, 160, True, 128, marks=pytest.mark.slow),
        pytest.param(2, 72, False, 128, marks=pytest.mark.slow),
    ],
)
def test_rounding_x(tokens, d, carried, block, device, poisoned):
    for dtype in (torch.float32, torch.bfloat16):
        inputs = _inputs(tokens, d, 4, True, carried, True, device, dtype)
        with torch.no_grad():
            plain, rounding = _kernel(**inputs), _kernel(**inputs, round_block=block)
        for value, expected in zip(rounding, (*plain, round_fp8(plain[1], block=block)), strict=True):
            assert torch.equal(value, expected)
        assert not torch.equal(rounding[-1], plain[1])
    # There is nothing to round for packed matrices before a norm.
    assert len(_kernel(**inputs | {"norm": None}, round_block=block)) == 5


def test_a_norm_that_is_more_than_its_weight(device):
    """An adapter around the norm, or a hook on it, does what it does without kernels."""
    torch.manual_seed(0)
    config = SimpleNamespace(hc_mult=4, single_pass_hc=True, hidden_size=40, hc_sinkhorn_iters=4, hc_eps=1e-6)
    config.rms_norm_eps = 1e-6
    site, norm = Dsv4HyperConnection(config).to(device), Dsv4RMSNorm(40, 1e-6).to(device)
    for parameter in site.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    streams, pre = torch.randn(1, 3, 4, 40, device=device), torch.rand(1, 3, 4, device=device)
    kernel_set = KernelSet("a folder")
    kernel_set._module = kernels
    norm.register_forward_hook(lambda module, args, output: 3 * output)
    found = {}
    for name in (None, kernel_set):
        site.kernels = name
        with torch.no_grad():
            found[name] = site(streams, None, pre, partial(norm)).x
    torch.testing.assert_close(found[None], found[kernel_set], atol=1e-5, rtol=1e-5)


def test_parameters_that_were_cast(device, poisoned):
    """A model may be cast as a whole; the coefficients are float32 all the same."""
    inputs = _inputs(*CASES[0], device, torch.bfloat16)
    inputs |= {name: inputs[name].bfloat16().requires_grad_() for name in ("fn", "base", "scale")}
    found, expected = _kernel(**inputs), _reference(**inputs)
    for a, b in zip(found[2:], expected[2:], strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, atol=2e-2, rtol=0)  # which follow from streams that differ by a rounding
    found[2].sum().backward()
    assert inputs["fn"].grad.dtype == torch.bfloat16 and bool(inputs["fn"].grad.any())


# Many tokens are many tiles, which the interpreter takes seconds for.
FEW = [pytest.param(case, marks=pytest.mark.slow if case[0] > 60 else ()) for case in CASES]


@pytest.mark.parametrize("case", FEW)
def test_gradients(case, device, poisoned):
    inputs = _inputs(*case, device, torch.float32)
    options = {"round_block": 32} if case[0] % 2 else {}
    grads = {}
    for run in (_kernel, _reference):
        leaves = {name: None if t is None else t.clone().requires_grad_() for name, t in inputs.items()}
        g = torch.Generator().manual_seed(0)
        results = run(**leaves, **options)
        sum((r * torch.randn(r.shape, generator=g).to(device)).sum() for r in results).backward()
        grads[run] = {name: t.grad for name, t in leaves.items() if t is not None}
    for name, expected in grads[_reference].items():
        size = expected.abs().max()
        torch.testing.assert_close(grads[_kernel][name] / size, expected / size, atol=5e-6, rtol=0, msg=name)


def test_a_site_equals_the_oracle(device):
    inputs = _inputs(3, 40, 4, True, True, False, device, torch.float32)
    arrays = {name: t.double().cpu().numpy() for name, t in inputs.items() if t is not None}
    found = [t.double().cpu().numpy() for t in _kernel(**inputs)]
    for s in range(3):
        settled = mhc.expand(*(arrays[name][0, s] for name in ("streams", "output", "post", "comb")))
        x = mhc.collapse(settled, arrays["pre"][0, s])
        parameters = (arrays[name] for name in ("fn", "base", "scale"))
        expected = settled, x, *mhc.coefficients(settled, *parameters, iterations=4, norm_eps=SETTINGS["norm_eps"])
        for value, exact in zip(found, expected, strict=True):
            np.testing.assert_allclose(value[0, s], exact, atol=4e-6)


def test_frozen_parameters_get_no_gradient(device):
    inputs = _inputs(3, 40, 4, True, True, True, device, torch.float32)
    inputs["streams"].requires_grad_()
    sum(t.sum() for t in _kernel(**inputs)).backward()
    assert inputs["streams"].grad.isfinite().all() and inputs["fn"].grad is None


@pytest.mark.parametrize(("count", "calls"), [(4, 1), (3, 0)])
@pytest.mark.parametrize("single_pass", [True, False])
def test_a_module_uses_the_kernel_where_it_can(count, calls, single_pass, device, watched):
    inputs = _inputs(3, 40, count, True, True, True, device, torch.float32)
    config = SimpleNamespace(
        hc_mult=count, hidden_size=40, hc_sinkhorn_iters=4, hc_eps=1e-6, rms_norm_eps=1e-6, single_pass_hc=single_pass
    )
    site, norm = Dsv4HyperConnection(config).to(device), Dsv4RMSNorm(40, 1e-6).to(device)
    with torch.no_grad():
        for name, parameter in site.named_parameters():
            parameter.copy_(inputs[name])
        norm.weight.copy_(inputs["norm"])
    pending = Expansion(*(inputs[name] for name in ("output", "post", "comb")))
    site.kernels = None
    site.quantize_activations = True
    reference = site(inputs["streams"], pending, inputs["pre"], partial(norm))
    site.kernels, seen = watched("hyper_connection_site")
    found = site(inputs["streams"], pending, inputs["pre"], partial(norm))
    for value, expected in zip(found[:5], reference[:5], strict=True):
        torch.testing.assert_close(value, expected, atol=4e-6, rtol=4e-6)
    assert torch.equal(found.rounded, round_fp8(found.x, block=32))
    assert len(seen) == calls
