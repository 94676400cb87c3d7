"""What a falling loss does not show: the load of the experts by modality, and the size of the updates; plots at the end."""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import TrainerCallback
from transformers.utils import logging

from .router_load import RouterLoadCounter
from .sharding import local_part

logger = logging.get_logger(__name__)
MODALITIES = ("text", "image")
# Elements of a parameter that are compared before and after a step.
MEASURED_ELEMENTS = 1 << 16
PANELS = {"loss": "loss", "expert_load": "largest load / mean load", "update_rms": "RMS of the update / learning rate"}


class TrainingReportCallback(TrainerCallback):
    r"""Adds to every log of the loss of a `Dsv4Trainer`, and draws all logs when training ends.

    - `expert_load_text`, `expert_load_image`: load of the busiest expert over the mean load, the worst of all layers, since
      the last log. 1 is balance. Layers without a bias (hash routing) do not count.
    - `update_rms_muon`, `update_rms_sinkhorn`, `update_rms_adamw`: root mean square of what the logged step changed, over the learning
      rate, decay included, of at most 65,536 elements of each parameter. Muon and Sinkhorn aim at 0.18 (V4 report section 2.4).

    Args:
        plot (`str` or path, *optional*): PNG file to draw; needs matplotlib, without which a warning says so.
    """

    def __init__(self, plot: str | os.PathLike | None = None):
        self.plot = None if plot is None else Path(plot)
        self.counter: RouterLoadCounter | None = None
        self._before: list[tuple] = []
        self._updates: dict[str, list[float]] = {}

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        if self.counter is not None:  # of a training that was interrupted
            self.counter.detach()
        self.counter = RouterLoadCounter(model)
        self.counter.attach()

    def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        if (state.global_step + 1) % max(1, state.logging_steps):
            return
        self._before = [
            (group["algorithm"], group["lr"], parameter, _measured(parameter).clone())
            for group in optimizer.param_groups
            if "algorithm" in group and group["lr"]
            for parameter in group["params"]
            if parameter.grad is not None
        ]

    @torch.no_grad()
    def on_optimizer_step(self, args, state, control, **kwargs):
        sums: dict[str, list[float]] = {}
        for algorithm, lr, parameter, before in self._before:
            change = (_measured(parameter).float() - before.float()) / lr
            sums.setdefault(algorithm, []).append(
                torch.stack([change.square().sum(), change.new_tensor(change.numel())])
            )
        for algorithm, parts in sums.items():
            total, count = torch.stack(parts).sum(0).tolist()
            self._updates.setdefault(algorithm, []).append(math.sqrt(total / max(1, count)))
        self._before = []

    def collect(self) -> dict[str, float]:
        """Return what was measured since the last call."""
        found = {f"update_rms_{name}": sum(steps) / len(steps) for name, steps in self._updates.items()}
        worst: dict[str, float] = {}
        for load in self.counter.loads.values():
            if dist.is_available() and dist.is_initialized():
                dist.all_reduce(load)
            for modality, part in zip(MODALITIES, load.double(), strict=False):
                if part.any():
                    worst[modality] = max(worst.get(modality, 0.0), (part.max() / part.mean()).item())
        self._updates = {}
        self.counter.reset()
        return found | {f"expert_load_{modality}": value for modality, value in worst.items()}

    def on_train_end(self, args, state, control, **kwargs):
        self.counter.detach()
        if self.plot is not None and state.is_world_process_zero:
            draw_logs(state.log_history, self.plot)


def _measured(parameter: torch.Tensor) -> torch.Tensor:
    """The first elements of (this rank's part of) a parameter."""
    return local_part(parameter.detach()).flatten()[:MEASURED_ELEMENTS]


def draw_logs(log_history: list[dict], file: Path) -> None:
    """Draw the loss and its parts, the loads of experts and the sizes of updates over the steps into a PNG file."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        logger.warning(f"{file} is not drawn: pip install matplotlib ({error})")
        return
    figure = Figure(figsize=(12, 4), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (start, label) in zip(figure.subplots(1, len(PANELS)), PANELS.items(), strict=True):
        names = sorted({name for entry in log_history for name in entry if name.startswith(start)})
        for name in names:
            points = [(entry["step"], entry[name]) for entry in log_history if name in entry]
            axes.plot(*zip(*points, strict=True), label=name)
        axes.set(xlabel="step", ylabel=label)
        if names:
            axes.legend()
    figure.savefig(file)
