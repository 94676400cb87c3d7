"""Training of DeepSeek-V4 / V4.1: the optimizer, its routing, the Trainer and its callbacks (installed only)."""

from ..draft_losses import DraftTraining
from .adapters import lora_layers
from .callbacks import MtpScheduleCallback, QatScheduleCallback, RouterBiasCallback, VisionScheduleCallback
from .data_collator import Dsv4DataCollator
from .newton_schulz import HYBRID_COEFFICIENTS, newton_schulz
from .optimizer import Dsv4Optimizer
from .param_groups import build_param_groups
from .report import TrainingReportCallback
from .sinkhorn_update import sinkhorn_balance
from .trainer import Dsv4OptimizerFactory, Dsv4Trainer

__all__ = [
    "HYBRID_COEFFICIENTS",
    "DraftTraining",
    "Dsv4DataCollator",
    "Dsv4Optimizer",
    "Dsv4OptimizerFactory",
    "Dsv4Trainer",
    "MtpScheduleCallback",
    "QatScheduleCallback",
    "RouterBiasCallback",
    "TrainingReportCallback",
    "VisionScheduleCallback",
    "build_param_groups",
    "lora_layers",
    "newton_schulz",
    "sinkhorn_balance",
]
