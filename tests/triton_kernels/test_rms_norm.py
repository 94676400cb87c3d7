"""RMSNorm: the kernel against the module's own maths."""

import pytest
import torch

from modeling_dsv4.layers import Dsv4RMSNorm
from modeling_dsv4.triton_kernels import rms_norm

from .products import random


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1, 20), (2, 3, 512), (70, 33), (3, 5120), (0, 20)])
def test_rows_are_normalised_as_by_the_module(shape, dtype, device, poisoned):
    norm = Dsv4RMSNorm(shape[-1], 1e-20).to(device, dtype).requires_grad_(False)
    norm.weight.copy_(random(shape[-1], seed=1, device=device))
    x = 5 * random(*shape, device=device, dtype=dtype)
    x.view(-1)[: shape[-1]] = 0  # a row of zeros stays one
    out = rms_norm(x, norm.weight, eps=norm.eps)
    norm.kernels = None
    assert out.dtype == dtype
    torch.testing.assert_close(out, norm(x), rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)


def test_rows_of_a_wider_tensor_and_other_dtypes_of_the_weight(device):
    norm = Dsv4RMSNorm(24, 1e-6).to(device).requires_grad_(False)
    norm.weight.copy_(random(24, seed=1, device=device))
    x = random(4, 40, device=device, dtype=torch.bfloat16)[:, 8:32]
    norm.kernels = None
    torch.testing.assert_close(rms_norm(x, norm.weight, eps=1e-6), norm(x), rtol=1e-2, atol=0)


def test_the_module_asks_the_kernel_where_no_gradient_is_needed(device, watched):
    norm = Dsv4RMSNorm(32, 1e-6).to(device)
    norm.kernels, calls = watched("rms_norm")
    x = random(2, 32, device=device)
    expected = norm(x)
    assert not calls
    with torch.no_grad():
        torch.testing.assert_close(norm(x), expected, rtol=1e-6, atol=1e-6)
        norm.double()(x.double())
    assert len(calls) == 1
