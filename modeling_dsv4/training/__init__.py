"""Training of DeepSeek-V4 / V4.1: the optimizer, its routing, the Trainer and its callbacks (installed only)."""

from ..draft_losses import DraftTraining
from .callbacks import QatScheduleCallback, RouterBiasCallback, VisionScheduleCallback
from .data_collator import Dsv4DataCollator
from .newton_schulz import HYBRID_COEFFICIENTS, newton_schulz
from .optimizer import Dsv4Optimizer
from .param_groups import build_param_groups
from .sinkhorn_update import sinkhorn_balance
from .trainer import Dsv4OptimizerFactory, Dsv4Trainer

__all__ = [
    "HYBRID_COEFFICIENTS",
    "DraftTraining",
    "Dsv4DataCollator",
    "Dsv4Optimizer",
    "Dsv4OptimizerFactory",
    "Dsv4Trainer",
    "QatScheduleCallback",
    "RouterBiasCallback",
    "VisionScheduleCallback",
    "build_param_groups",
    "newton_schulz",
    "sinkhorn_balance",
]
