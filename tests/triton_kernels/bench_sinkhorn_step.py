"""The Sinkhorn step at the size of V4.1's embedding, against 28 bytes a weight: see `cases`."""

from functools import partial
from unittest import mock

import torch

from modeling_dsv4.training import Dsv4Optimizer
from modeling_dsv4.training.sinkhorn_step import SinkhornStep

SHAPE = (129280, 5120)
BYTES = 28


def cases():
    """Optimizer steps of one bfloat16 table, K = 11, float32 momentum.

    Bytes a weight: read G and M, write M and the kept update (12); read that in five sweeps (10) and once more, with W,
    to write W (6).
    """
    weight = torch.nn.Parameter(torch.randn(SHAPE, device="cuda", dtype=torch.bfloat16))
    weight.grad = torch.randn_like(weight)
    eager, compiled = (Dsv4Optimizer([weight], algorithm="sinkhorn", compile=c) for c in (False, True))
    numbers = weight.numel()
    yield (
        f"Sinkhorn step {SHAPE[0]} x {SHAPE[1]}, K 11",
        eager.step,
        partial(_without_kernels, eager),
        partial(_without_kernels, compiled),
        BYTES * numbers,
        0,
    )


def _without_kernels(optimizer):
    with mock.patch.object(SinkhornStep, "kernels", None):
        optimizer.step()
