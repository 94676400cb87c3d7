"""The Sinkhorn kernels against the stored cases and the flat functions."""

import importlib

import pytest
import torch

from modeling_dsv4.training import Dsv4Optimizer
from modeling_dsv4.training.muon_step import advance_momentum, nesterov_update
from modeling_dsv4.training.sinkhorn_step import SinkhornStep
from modeling_dsv4.training.sinkhorn_update import sinkhorn_balance
from modeling_dsv4.training.weight_write import write_update
from tests.training.goldens import cases, manifest, relative_error, tensor

kernels = importlib.import_module("modeling_dsv4.triton_kernels.sinkhorn_step")
BOUNDS = manifest()["tolerances"]["sinkhorn_weight_change"]
STORED = [
    c for c in cases("sinkhorn") if c["K"] == 11 and c["steps"] < 9 or c["id"].split("/")[1] in ("eps_1e-8", "beta_0")
]
STORED += [c for c in cases("sinkhorn") if c["id"] == "sink/skew/K1"]


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("dtype", "keep", "bound"),
    [
        (torch.float32, True, "float32"),
        (torch.bfloat16, True, "bf16_ghat_fp32_scales"),
        pytest.param(torch.bfloat16, False, "float32", marks=pytest.mark.slow),
    ],
    ids=["float32", "bfloat16", "bfloat16 not kept"],
)
@pytest.mark.parametrize("case", STORED, ids=lambda c: c["id"])
def test_stored_cases(case, dtype, keep, bound, device):
    """Momenta, masked rows exactly, weight changes; those of bfloat16 weights in their float32 master."""
    start = tensor(case, "w0").float().to(device)
    weight, momentum = start.to(dtype, copy=True), torch.zeros_like(start)
    master = None if dtype == torch.float32 else start.clone()
    full = weight if master is None else master
    for grad, masked in zip(tensor(case, "grads"), tensor(case, "masked"), strict=True):
        before = full.clone()
        kernels.sinkhorn_step(
            weight,
            grad.float().to(device),
            momentum,
            beta=case["beta"],
            nesterov=True,
            scale=case["lr"] * case["gamma"],
            iterations=case["K"],
            mask_threshold=case["tau"],
            eps=case["eps"],
            master=master,
            keep=keep,
        )
        assert torch.equal((full == before).all(1).cpu(), masked.bool())
    assert relative_error(momentum.cpu(), tensor(case, "m")) <= 1e-6
    assert relative_error((full - start).cpu(), tensor(case, "w") - tensor(case, "w0")) <= BOUNDS[bound]
    assert torch.equal(weight, full.to(dtype))


def reference_step(weight, grad, momentum, *, beta, nesterov, scale, decay=0.0, master=None, **rule):
    """The same from the flat functions, which `test_sinkhorn_update` holds against Algorithm 1 and the stored cases."""
    working = torch.promote_types(weight.dtype, torch.float32)
    advance_momentum(grad, momentum, beta, working)
    update = nesterov_update(
        grad, momentum, beta, nesterov, torch.empty(grad.shape, device=grad.device, dtype=working)
    )
    write_update(weight, sinkhorn_balance(update, **rule), scale=scale, decay=decay, master=master)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(("rows", "columns"), [(37, 5), (41, 33), (1, 1)])
def test_ragged_blocks_of_many_programs(rows, columns, nesterov, keep, device, monkeypatch):
    """Half gradients, bfloat16 momenta (whose rounding may differ), decay; masked rows; equal calls give equal bits."""
    half = columns == 5
    for name, value in {"_TILE": 256, "_TILE_BYTES": 1024, "_MAX_TILES": 2}.items():
        monkeypatch.setattr(kernels, name, value)
    generator = torch.Generator().manual_seed(rows)
    grad, weight, momentum = (torch.randn(rows, columns, generator=generator).to(device) for _ in range(3))
    grad, momentum = grad.half(), momentum.bfloat16() if half else momentum
    grad[:: rows // 6 + 1], momentum[:: rows // 6 + 1] = 0, 1e-5
    options = {"beta": 0.9, "nesterov": nesterov, "scale": 0.01, "decay": 0.1}
    options |= {"mask_threshold": 0.1, "iterations": 5}
    results = []
    for step in (kernels.sinkhorn_step, kernels.sinkhorn_step, reference_step):
        extra = {} if step is reference_step else {"keep": keep}
        w, m = weight.clone(), momentum.clone()
        step(w, grad, m, **options, **extra)
        results.append((w, m))
    assert all(torch.equal(a, b) for a, b in zip(*results[:2], strict=True))
    assert relative_error(results[0][0] - weight, results[2][0] - weight) <= (1e-3 if half else 1e-5)
    assert relative_error(results[0][1], results[2][1]) <= (1e-3 if half else 1e-6)


def test_stochastic_rounding_is_unbiased_and_follows_its_seed(device):
    weight = torch.full((64, 64), 1.0, dtype=torch.bfloat16, device=device)
    grad = torch.ones(64, 64, device=device)

    def step(seed):
        w = weight.clone()
        # Balanced, this update is 1 everywhere: each weight is to fall by 0.3 of the distance to the next number.
        kernels.sinkhorn_step(w, grad, torch.zeros_like(grad), beta=0.9, nesterov=True, scale=0.3 * 2**-8, seed=seed)
        return w

    first = step(1)
    assert set(first.float().unique().tolist()) == {1.0, 1 - 2.0**-8}
    assert abs((first.float() < 1).float().mean().item() - 0.3) < 4 * (0.21 / 4096) ** 0.5
    assert torch.equal(first, step(1)) and not torch.equal(first, step(2))
    assert abs((first.float() < 1).float().mean(0).std().item() - (0.21 / 64) ** 0.5) < 0.02


@pytest.mark.parametrize("master", [None, "auto", "stochastic"])
def test_the_optimizer_uses_it_for_whole_matrices(master, device, watched, monkeypatch):
    (found, calls), moved = watched("sinkhorn_step"), {}
    generator = torch.Generator().manual_seed(0)
    start, grad = (torch.randn(60, 12, generator=generator).to(device, torch.bfloat16) for _ in range(2))
    for kernel in (found, None):
        monkeypatch.setattr(SinkhornStep, "kernels", kernel)
        p = torch.nn.Parameter(start.clone())
        p.grad = grad
        optimizer = Dsv4Optimizer([p], lr=1.0, algorithm="sinkhorn", master=master, weight_decay=0.05)
        optimizer.step()
        state = optimizer.state[p]
        moved[kernel] = state["master"] - start if master == "auto" else p.detach().float() - start.float()
        assert relative_error(state["momentum_buffer"], 0.05 * grad.float()) < 1e-6
    assert len(calls) == 1 and calls[0]["keep"]
    assert relative_error(moved[found], moved[None]) < {None: 1e-2, "auto": 5e-3, "stochastic": 0.05}[master]
