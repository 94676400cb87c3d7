"""Operands of products, and how near a product is."""

import torch


def random(*shape, seed=0, device="cpu", dtype=torch.float32, spread=0.0):
    """Normal numbers; `spread` > 0 gives each of them a size of its own."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp(torch.randn(shape, generator=generator) * spread)
    return (torch.randn(shape, generator=generator) * sizes).to(device, dtype)


def dtypes(device):
    return (torch.float32, torch.bfloat16) if device.type == "cuda" else (torch.float32,)


def error(found, expected):
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm())


def bound(dtype):
    """Sums in another order, then one rounding to `dtype`."""
    return 1e-6 if dtype == torch.float32 else 3e-3
