"""Training of DeepSeek-V4 / V4.1: the optimizer, its routing, the Trainer and its callbacks (installed only)."""

from .newton_schulz import HYBRID_COEFFICIENTS, newton_schulz
from .optimizer import Dsv4Optimizer
from .sinkhorn_update import sinkhorn_balance

__all__ = ["HYBRID_COEFFICIENTS", "Dsv4Optimizer", "newton_schulz", "sinkhorn_balance"]
