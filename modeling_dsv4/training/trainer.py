"""`Dsv4Trainer`, and the optimizer factory for plain `Trainer` and TRL."""

from __future__ import annotations

import ast
import inspect
from typing import Any

import torch
from transformers import Trainer
from transformers.utils import logging

from ..draft_losses import DraftTraining
from .optimizer import Dsv4Optimizer
from .param_groups import build_param_groups

logger = logging.get_logger(__name__)
_GROUP_SETTINGS = set(inspect.signature(build_param_groups).parameters) - {"model", "lr"}
# What TrainingArguments holds when the user did not say anything: not the paper's values, so not taken.
_UNTOUCHED = {"weight_decay": 0.0, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8}


class Dsv4OptimizerFactory:
    r"""Make a `Dsv4Optimizer` for a model, where Trainer asks for an optimizer class.

    `Trainer(optimizer_cls_and_kwargs=(Dsv4OptimizerFactory, {"lr": 2e-4}))`; TRL's trainers take the same argument.
    Trainer does not pass its learning rate on: put it into the arguments.
    """

    def __call__(self, model: torch.nn.Module, *, lr: float, **settings: Any) -> Dsv4Optimizer:
        """Route the parameters and make the optimizer.

        Args:
            model: the model, before FSDP2 shards it or after.
            lr: base learning rate.
            settings: arguments of `build_param_groups`, and group options as `Dsv4Optimizer` takes them.

        Raises:
            ValueError: under a backend that flattens parameters (FSDP1, DeepSpeed stage > 0); what the two callees raise.
        """
        refuse_flattening_backends(model)
        routing = {key: value for key, value in settings.items() if key in _GROUP_SETTINGS}
        options = {key: value for key, value in settings.items() if key not in _GROUP_SETTINGS}
        optimizer = Dsv4Optimizer(build_param_groups(model, lr=lr, **routing), lr=lr, **options)
        low = {
            p.dtype for g in optimizer.param_groups for p in g["params"] if p.dtype.itemsize < 4 and not g["master"]
        }
        if low:
            logger.warning(
                f"Trainable weights are {sorted(map(str, low))} without a float32 copy: at fine-tuning rates most updates "
                "are lost to rounding. Load with dtype=torch.float32, or set master='auto' or master='stochastic'."
            )
        return optimizer


class Dsv4Trainer(Trainer):
    r"""`Trainer` whose optimizer is `Dsv4Optimizer`, with the paper's defaults.

    `learning_rate` is the base rate. `weight_decay`, `adam_beta1`, `adam_beta2`, `adam_epsilon` of the arguments are taken
    only if they differ from TrainingArguments' own defaults, which are not the paper's; otherwise 0.1, (0.9, 0.95), 1e-20.
    `optim_args="key=value,..."` sets scalar settings from a command line.

    Gradient clipping (`max_grad_norm`, 1.0 by default) only reweights a step's gradient within the momentum: Muon and the
    Sinkhorn-balanced update do not depend on the gradient's scale. A trained table's gradient can dominate the norm.

    Args:
        optimizer_settings (`dict`, *optional*):
            Arguments of `build_param_groups` and group options, before all others.
        draft_training (`DraftTraining`, *optional*):
            Train the model's DSpark drafter, alone or beside the model.
    """

    def __init__(
        self,
        *args: Any,
        optimizer_settings: dict[str, Any] | None = None,
        draft_training: DraftTraining | None = None,
        **kwargs: Any,
    ):
        self.optimizer_settings = dict(optimizer_settings or {})
        self._loss_parts: dict[str, torch.Tensor] = {}
        self._parts_since = 0
        super().__init__(*args, **kwargs)
        if draft_training is not None:
            draft_training.apply(self.model)

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        """Make the optimizer, unless there is one or the caller chose another kind."""
        if self.optimizer is None and self.optimizer_cls_and_kwargs is None:
            settings = settings_from_arguments(self.args) | self.optimizer_settings
            self.optimizer = Dsv4OptimizerFactory()(self.model if model is None else model, **settings)
            return self.optimizer
        return super().create_optimizer(model)

    def compute_loss(self, model, inputs, return_outputs: bool = False, num_items_in_batch=None):
        """As Trainer's; in training it keeps what each part adds to the loss."""
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        parts = outputs.get("loss_parts") if isinstance(outputs, dict) and model.training else None
        if parts:
            # Trainer scales the loss to the ranks here, and later to the micro-batches if it could not give their items.
            total = sum(part.to(loss.device) for part in parts.values())
            if not self._loss_parts:
                self._parts_since = self.state.global_step
            scale = torch.where(total == 0, 1.0, loss.detach() / total)  # without labels there is nothing to scale
            if num_items_in_batch is None or not self.model_accepts_loss_kwargs:
                scale = scale / self.current_gradient_accumulation_steps
            for name, part in parts.items():
                self._loss_parts[name] = self._loss_parts.get(name, 0.0) + part.to(loss.device) * scale
        return (loss, outputs) if return_outputs else loss

    def _collected(self) -> dict[str, float]:
        """Return `loss_lm`, `loss_balance`, ..., means over the steps since the last log and the ranks, and what callbacks have."""
        logs: dict[str, float] = {}
        if self._loss_parts:
            steps = max(1, self.state.global_step - self._parts_since)
            summed = self.accelerator.reduce(torch.stack(list(self._loss_parts.values())), reduction="mean")
            logs = {f"loss_{name}": s / steps for name, s in zip(self._loss_parts, summed.tolist(), strict=True)}
        self._loss_parts = {}
        for callback in self.callback_handler.callbacks:
            logs |= callback.collect() if hasattr(callback, "collect") else {}
        return logs

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log the parts of the loss, and the vision tower's rate beside the first group's, which is a text group."""
        if "loss" in logs:
            logs.update(self._collected())
        if "learning_rate" in logs and self.optimizer is not None:
            first = self.optimizer.param_groups[0]
            for group in self.optimizer.param_groups:
                if group.get("role", "text") != "text" and first.get("initial_lr"):
                    # The logged rate is the step's own; the groups already hold the next one. Their ratio is fixed.
                    rate = logs["learning_rate"] * group["initial_lr"] / first["initial_lr"]
                    logs.setdefault(f"learning_rate_{group['role']}", rate)
        super().log(logs, *args, **kwargs)


def settings_from_arguments(args) -> dict[str, Any]:
    """Return the factory's settings that TrainingArguments ask for, and say which were taken."""
    taken = {key: getattr(args, key) for key, value in _UNTOUCHED.items() if getattr(args, key) != value}
    settings: dict[str, Any] = {"lr": args.learning_rate}
    if "weight_decay" in taken:
        settings["weight_decay"] = args.weight_decay
    adamw: dict[str, Any] = {}
    if "adam_beta1" in taken or "adam_beta2" in taken:
        second = args.adam_beta2 if "adam_beta2" in taken else 0.95
        adamw["betas"] = (args.adam_beta1, second)
    if "adam_epsilon" in taken:
        adamw["eps"] = args.adam_epsilon
    if adamw:
        settings["adamw"] = adamw
    settings |= parse_optim_args(args.optim_args)
    if taken:
        logger.info(f"Taken from TrainingArguments instead of the paper's values: {taken}")
    return settings


def parse_optim_args(text: str | None) -> dict[str, Any]:
    """Read `"key=value,key=value"`; values are Python numbers, booleans and None, else strings."""
    settings: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in (text or "").split(","))):
        key, equals, value = item.partition("=")
        if not equals or not key.strip():
            raise ValueError(f"optim_args: expected key=value, got {item!r}")
        try:
            settings[key.strip()] = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError):
            settings[key.strip()] = value.strip()
    return settings


def refuse_flattening_backends(model: torch.nn.Module) -> None:
    """Raise under FSDP1 and DeepSpeed stage > 0.

    They hand the optimizer one-dimensional flat shards, in which there are no matrices left to orthogonalise or balance;
    training would go wrong in silence.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel

    reason = "flattens parameters, so Muon and the Sinkhorn-balanced update would see no matrices"
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise ValueError(f"FSDP1 {reason}: use FSDP2 (fsdp_config={{'version': 2}})")
    try:
        from accelerate.state import AcceleratorState
    except ImportError:
        return
    if not AcceleratorState._shared_state:
        return
    state = AcceleratorState()
    plugin = getattr(state, "fsdp_plugin", None)
    if str(state.distributed_type).endswith("FSDP") and plugin is not None and plugin.fsdp_version == 1:
        raise ValueError(f"FSDP1 {reason}: use FSDP2 (fsdp_config={{'version': 2}})")
    deepspeed = getattr(state, "deepspeed_plugin", None) if str(state.distributed_type).endswith("DEEPSPEED") else None
    if deepspeed is not None and int(getattr(deepspeed, "zero_stage", 0)) > 0:
        raise ValueError(f"DeepSpeed ZeRO stage {deepspeed.zero_stage} {reason}: use FSDP2 or stage 0")
