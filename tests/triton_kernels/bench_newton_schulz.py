"""Ten Newton–Schulz steps in bfloat16 against the plain operation count, which symmetric products undercut: see `cases`."""

from functools import partial

import torch

from modeling_dsv4.training.muon_step import compiled_newton_schulz
from modeling_dsv4.training.newton_schulz import HYBRID_COEFFICIENTS, newton_schulz_flops
from modeling_dsv4.training.newton_schulz import newton_schulz as reference
from modeling_dsv4.triton_kernels import newton_schulz

SHAPES = {
    "q_b by heads": (64, 512, 1280),
    "o_a by groups": (8, 1024, 4096),
    "q_a": (1, 1280, 5120),
    "q_b whole": (1, 32768, 1280),
    "o_b": (1, 5120, 8192),
    "experts gate or up": (16, 2304, 5120),
}


def cases():
    """One float32 update of each shape; bytes: the update read, the result written."""
    for name, shape in SHAPES.items():
        update = torch.randn(shape, device="cuda")
        count, rows, cols = shape
        yield (
            f"Newton-Schulz {name} {count} x {rows} x {cols}",
            partial(newton_schulz, update, HYBRID_COEFFICIENTS),
            partial(reference, update, dtype=torch.bfloat16),
            partial(compiled_newton_schulz(), update, dtype=torch.bfloat16),
            6 * update.numel(),
            count * newton_schulz_flops(rows, cols),
        )
