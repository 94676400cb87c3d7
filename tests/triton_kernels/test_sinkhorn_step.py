"""The Sinkhorn kernel against the stored cases and against the flat functions, pass by pass."""

import pytest
import torch

from modeling_dsv4.training.muon_step import advance_momentum, nesterov_update
from modeling_dsv4.training.sinkhorn_update import sinkhorn_balance
from modeling_dsv4.training.weight_write import write_update
from modeling_dsv4.triton_kernels.sinkhorn_step import sinkhorn_step
from tests.training.goldens import cases, manifest, relative_error, tensor

BOUNDS = manifest()["tolerances"]["sinkhorn_weight_change"]


def reference_step(weight, grad, momentum, *, beta, nesterov, scale, decay=0.0, master=None, **rule):
    """The same from the flat functions, on float32 sources."""
    advance_momentum(grad, momentum, beta, torch.float32)
    update = nesterov_update(grad, momentum, beta, nesterov, torch.empty(grad.shape, device=grad.device))
    write_update(weight, sinkhorn_balance(update, **rule), scale=scale, decay=decay, master=master)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", cases("sinkhorn"), ids=lambda c: c["id"])
def test_stored_cases(case, dtype, keep, device):
    """Weight changes, momenta and exactly the masked rows; bfloat16 weights are judged by their float32 master."""
    start, moved = tensor(case, "w0"), None
    master = start.float().to(device)
    weight = master if dtype == torch.float32 else master.to(dtype)
    momentum = torch.zeros_like(master)
    for grad, masked in zip(tensor(case, "grads"), tensor(case, "masked"), strict=True):
        before = master.clone()
        sinkhorn_step(
            weight,
            grad.float().to(device),
            momentum,
            beta=case["beta"],
            nesterov=True,
            scale=case["lr"] * case["gamma"],
            iterations=case["K"],
            mask_threshold=case["tau"],
            eps=case["eps"],
            master=None if weight is master else master,
            keep=keep,
        )
        still = (master == before).all(1)
        assert torch.equal(still.cpu(), masked.bool())
    assert relative_error(momentum.cpu(), tensor(case, "m")) <= 1e-6
    moved = master.cpu().double() - start.float().double()
    bound = BOUNDS["float32" if dtype == torch.float32 or not keep else "bf16_ghat_fp32_scales"]
    assert relative_error(moved, tensor(case, "w") - start) <= bound
    assert torch.equal(weight, master.to(dtype))
