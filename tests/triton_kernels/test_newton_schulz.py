"""The Newton–Schulz kernels against the stored cases and the flat function, in float64 and in bfloat16."""

import importlib

import pytest
import torch

from modeling_dsv4.training import Dsv4Optimizer
from modeling_dsv4.training.muon_step import MuonStep
from modeling_dsv4.training.newton_schulz import HYBRID_COEFFICIENTS
from modeling_dsv4.training.newton_schulz import newton_schulz as reference
from tests.training.goldens import cases, manifest, relative_error, tensor

kernels = importlib.import_module("modeling_dsv4.triton_kernels.newton_schulz")
TOLERANCES = manifest()["tolerances"]


@pytest.fixture
def small_tiles(monkeypatch, device):
    """Under the interpreter: many tiles in small matrices, so that every place of a tile is met."""
    if device.type == "cpu":
        for name in ("_TILE", "_GRAM_DEPTH", "_POLY_DEPTH"):
            monkeypatch.setattr(kernels, name, 16)
        monkeypatch.setattr(kernels, "_BLOCK", 128)


@pytest.mark.usefixtures("small_tiles", "poisoned")
@pytest.mark.parametrize(
    "case", [c for c in cases("newton_schulz") if c["coeffs"].startswith("8x")], ids=lambda c: c["id"]
)
def test_stored_cases(case, device):
    x, y = tensor(case, "x").float().to(device), tensor(case, "y")
    actual = kernels.newton_schulz(x, HYBRID_COEFFICIENTS)
    assert actual.shape == y.shape and actual.dtype == torch.bfloat16 and actual.isfinite().all()
    if case["id"] not in TOLERANCES["bf16_newton_schulz"]["skip"]:
        assert relative_error(actual.cpu(), y) <= TOLERANCES["bf16_newton_schulz"]["rel_fro"]


@pytest.mark.usefixtures("small_tiles", "poisoned")
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((2, 48, 56), torch.float32),
        ((1, 2, 72, 32), torch.float32),
        ((32, 32), torch.bfloat16),
        ((41, 33), torch.bfloat16),
        ((2, 5, 130), torch.float32),
        ((1, 1), torch.float32),
        # These fill a GPU with tiles; the others do not, and come as whole products there.
        *(pytest.param(shape, torch.float32, marks=pytest.mark.gpu) for shape in ((64, 512, 1280), (48, 648, 256))),
    ],
)
def test_as_near_to_float64_as_the_flat_function(shape, dtype, device):
    """Random matrices of several tiles, tall and wide, ragged; the input stays, equal calls give equal bits."""
    update = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(device, dtype)
    before = update.clone()
    steps = HYBRID_COEFFICIENTS[-3:]
    actual, again = (kernels.newton_schulz(update, steps) for _ in range(2))
    assert torch.equal(actual, again) and torch.equal(update, before)
    exact = reference(update.double(), steps)
    bound = 1.2 * relative_error(reference(update.float(), steps, dtype=torch.bfloat16), exact) + 1e-3
    assert relative_error(actual, exact) <= bound


@pytest.mark.usefixtures("small_tiles", "poisoned")
def test_zero_matrices_tiny_and_huge_ones_beside_each_other(device):
    one = torch.randn(20, 24, generator=torch.Generator().manual_seed(1)).to(device)
    stack = torch.stack([one, 0 * one, one * 1e-17, one * 1e30, one * 1e-32])
    actual = kernels.newton_schulz(stack, HYBRID_COEFFICIENTS[:3])
    assert not actual[1].any()
    assert relative_error(actual[2], actual[0]) < 1e-2 and relative_error(actual[3], actual[0]) < 1e-2
    # Under the floor of the norm, the update shrinks.
    exact = reference(stack[4].double(), HYBRID_COEFFICIENTS[:3])
    assert relative_error(actual[4], exact) < 2e-2 and exact.norm() < 1e-6


def test_the_optimizer_uses_it_for_bfloat16_products(device, watched, monkeypatch):
    """Head-wise weights move as without kernels, and float32 products never come here."""
    (found, calls), moved = watched("newton_schulz"), {}
    for kernel, ns_dtype in ((found, "bfloat16"), (found, "float32"), (None, "bfloat16")):
        monkeypatch.setattr(MuonStep, "kernels", kernel)
        generator = torch.Generator().manual_seed(0)
        p, grad = (torch.randn(48, 24, generator=generator).to(device) for _ in range(2))
        p = torch.nn.Parameter(p)
        p.grad, start = grad, p.detach().clone()
        Dsv4Optimizer([p], algorithm="muon", ns_dtype=ns_dtype, row_splits=(16, 16, 16)).step()
        moved[kernel, ns_dtype] = p.detach() - start
    assert len(calls) == 1
    for other in ((found, "bfloat16"), (None, "bfloat16")):
        assert 0 < relative_error(moved[other], moved[found, "float32"]) < 2e-2
