"""Logits with float32 products: the kernel against float64, the head with its kernel."""

import importlib

import pytest
import torch

from modeling_dsv4.layers import Dsv4Head

from .products import error, random

kernels = importlib.import_module("modeling_dsv4.triton_kernels.wide_linear")


@pytest.mark.parametrize(
    ("rows", "shape"),
    [
        (1, (20, 1024)),
        (1, (20, 100)),
        (5, (40, 512)),
        (17, (20, 100)),
        (3, (4100, 40)),
        (0, (20, 100)),
        (65, (20, 100)),
    ],
)
def test_products_are_exact_and_summed_in_float32(rows, shape, device, poisoned):
    x, weight = random(rows, shape[1], device=device), random(*shape, seed=1, device=device)
    x, weight = x.bfloat16(), weight.bfloat16()
    out = kernels.wide_linear(x[None], weight)
    assert out.dtype == torch.float32 and out.shape == (1, rows, shape[0])
    assert rows == 0 or error(out[0], x.double() @ weight.double().mT) < 1e-6


@pytest.mark.parametrize("rows", [3, 70])
def test_gradients_are_those_of_wide_products(rows, device):
    x = random(2, rows, 40, device=device).bfloat16().requires_grad_()
    weight = random(24, 40, seed=1, device=device).bfloat16().requires_grad_()
    grad = random(2, rows, 24, seed=2, device=device)
    of_x, of_weight = torch.autograd.grad(kernels.wide_linear(x, weight), (x, weight), grad)
    for found, expected in (
        (of_x, grad.double() @ weight.double()),
        (of_weight, torch.einsum("brn,brk->nk", grad.double(), x.double())),
    ):
        assert found.dtype == torch.bfloat16 and error(found, expected) < 3e-3  # rounded once


def test_the_head_uses_the_kernel_for_bfloat16_alone(device, watched):
    head = Dsv4Head(32, 50).to(device, torch.bfloat16)
    kernel_set, calls = watched("wide_linear")
    x = random(2, 3, 32, device=device, dtype=torch.bfloat16)
    expected = head.requires_grad_(False)(x)
    head.kernels = kernel_set
    torch.testing.assert_close(head(x), expected, rtol=1e-5, atol=1e-5)
    assert len(calls) == 1
    head(x.float()), head.float()(x)
    assert len(calls) == 1  # wider inputs, wider weights: the reference
    head.bfloat16().requires_grad_()(x).sum().backward()
    assert len(calls) == 2 and bool(head.weight.grad.any())
