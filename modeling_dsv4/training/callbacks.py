"""Trainer callbacks: load-balance biases, the vision schedule, the QAT schedule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback
from transformers.training_args import ParallelMode

from ..quantization import simulate_packing
from .router_load import RouterLoadCounter, bias_update


class RouterBiasCallback(TrainerCallback):
    r"""Move the routers' correction biases after each optimizer step, by the load of each modality.

    Implements V4.1 §2.1 and the V4 report §2.1: b_i <- b_i + speed * sign(mean(load) - load_i), for text and image tokens
    from their own loads. Differs from the source: nothing. Loads are summed over the micro-batches and ranks of the step;
    padding, evaluation, generation and recomputation do not count; a skipped step changes nothing. The biases are buffers of
    the model and are saved with it: the callback has no state.

    Args:
        speed (`float`, *optional*, defaults to 1e-3):
            Step of a bias; 0 only counts. Leave the callback out when the router is frozen (adapters).
        process_group (`ProcessGroup`, *optional*):
            Ranks that see different tokens; all ranks by default. Ranks that see the same only multiply the loads.

    Attributes:
        last_loads (`dict[str, torch.Tensor]`): router -> `[modalities, E] int64` of the last step, on CPU.

    Raises:
        ValueError: at the start of training, if no router has a bias, or one is a Parameter or not float32.
    """

    def __init__(self, speed: float = 1e-3, process_group: dist.ProcessGroup | None = None):
        if speed < 0:
            raise ValueError(f"`speed` must be >= 0, got {speed}")
        self.speed, self.process_group = speed, process_group
        self.counter: RouterLoadCounter | None = None
        self.last_loads: dict[str, torch.Tensor] = {}

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        if self.counter is not None:
            self.counter.detach()
        self.counter = RouterLoadCounter(model)
        self.counter.attach()

    def on_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        if not getattr(optimizer, "step_was_skipped", False):
            self.update()
        self.counter.reset()

    def on_train_end(self, args, state, control, **kwargs):
        self.counter.detach()

    @torch.no_grad()
    def update(self) -> None:
        """Add the loads up over all ranks, in one all-reduce, and move every bias."""
        counter, names = self.counter, list(self.counter.loads)
        flat = torch.cat([counter.loads[name].reshape(-1).to(self._device()) for name in names])
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(flat, group=self.process_group)
        for name, part in zip(names, flat.split([counter.loads[n].numel() for n in names]), strict=True):
            load = part.view(counter.loads[name].shape)
            self.last_loads[name] = load.cpu()
            for bias_name, change in zip(counter.bias_names(name), bias_update(load, self.speed), strict=True):
                bias = getattr(counter.routers[name], bias_name)
                bias.add_(change.to(bias.device))

    def _device(self) -> torch.device:
        """One device for all routers: the one most likely to be able to communicate."""
        devices = [load.device for load in self.counter.loads.values()]
        return next((device for device in devices if device.type != "cpu"), devices[0])


class VisionScheduleCallback(TrainerCallback):
    r"""Keep the vision tower frozen until the learning rate starts to decay (V4.1 §2.5).

    The tower's final norm and the projector train from the start; the body joins at `start`, at its own, smaller rate
    (`vision_lr_scale` of `build_param_groups`), without a change of the parameter groups.

    The model's part: a module with the attribute `freeze_vision` runs the vision body without gradients while it is True.
    All parameters keep `requires_grad`, so DDP stays right (with `find_unused_parameters`). A model without the attribute
    gets `requires_grad` flipped instead, which DDP does not notice (its gradients would silently differ from rank to
    rank) and which is therefore refused there.

    Args:
        start (`int | "decay"`, *optional*, defaults to `"decay"`):
            First step (counted from 0) that trains the body; "decay": `max_steps - num_decay_steps` of the
            `warmup_stable_decay` schedule.

    Raises:
        ValueError: at the start of training, if the step cannot be told, there is no vision tower, or DDP would go wrong.
    """

    BODY = "vision_tower."
    FINAL_NORM = "vision_tower.norm."

    def __init__(self, start: int | str = "decay"):
        if start != "decay" and (isinstance(start, str) or start < 0):
            raise ValueError(f"`start` must be a step >= 0 or 'decay', got {start!r}")
        self.start = start
        self.start_step = 0
        self._switches: list[torch.nn.Module] = []
        self._body: list[torch.nn.Parameter] = []

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.start_step = decay_start(args, state) if self.start == "decay" else self.start
        self._switches = [m for m in model.modules() if hasattr(m, "freeze_vision")]
        if not self._switches:
            # Parameters that the user froze stay frozen: only trainable ones are ever switched.
            self._body = [p for name, p in model.named_parameters() if self._is_body(name) and p.requires_grad]
            if not self._body:
                raise ValueError(f"{type(model).__name__} has no trainable vision tower to schedule")
        distributed = args.parallel_mode == ParallelMode.DISTRIBUTED and not _is_sharded(model)
        if distributed and self.start_step > state.global_step:
            self._check_ddp(args, model)
        self._apply(state.global_step)

    def on_step_begin(self, args, state, control, **kwargs):
        self._apply(state.global_step)

    def on_train_end(self, args, state, control, **kwargs):
        self._apply(self.start_step)

    def _is_body(self, name: str) -> bool:
        return self.BODY in name and self.FINAL_NORM not in name

    def _apply(self, step: int) -> None:
        frozen = step < self.start_step
        for module in self._switches:
            module.freeze_vision = frozen
        for parameter in self._body:
            parameter.requires_grad_(not frozen)

    def _check_ddp(self, args, model: torch.nn.Module) -> None:
        if not self._switches:
            raise ValueError(
                "VisionScheduleCallback under DDP needs a model with `freeze_vision`: DDP fixes its list of parameters "
                "when it wraps the model and would not reduce the gradients of parameters that are switched on later"
            )
        checkpointing = getattr(model, "is_gradient_checkpointing", False) or args.gradient_checkpointing
        if args.ddp_find_unused_parameters is False or (args.ddp_find_unused_parameters is None and checkpointing):
            raise ValueError(
                "VisionScheduleCallback under DDP needs ddp_find_unused_parameters=True: "
                "the frozen vision body takes part in no backward"
            )


class MtpScheduleCallback(TrainerCallback):
    r"""Weigh V4's next-next-token loss less from the decay of the learning rate on (V4 report section 2.1: 0.3, then 0.1).

    The config gets the late weight when training ends.

    Args:
        early, late (`float`, *optional*, default to 0.3 and 0.1): weights before `start` and from it on.
        start (`int | "decay"`, *optional*, defaults to `"decay"`): as in `VisionScheduleCallback`.

    Raises:
        ValueError: at the start of training, if the model has no such loss or the step cannot be told.
    """

    def __init__(self, early: float = 0.3, late: float = 0.1, start: int | str = "decay"):
        if start != "decay" and (isinstance(start, str) or start < 0):
            raise ValueError(f"`start` must be a step >= 0 or 'decay', got {start!r}")
        self.early, self.late, self.start = early, late, start

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self._config = getattr(model, "config", None) or getattr(getattr(model, "module", None), "config", None)
        if not getattr(self._config, "has_mtp", False):
            raise ValueError(f"{type(model).__name__} has no next-next-token loss to schedule")
        self._step = decay_start(args, state) if self.start == "decay" else self.start

    def on_step_begin(self, args, state, control, **kwargs):
        self._config.mtp_loss_weight = self.early if state.global_step < self._step else self.late

    def on_train_end(self, args, state, control, **kwargs):
        self._config.mtp_loss_weight = self.late


def decay_start(args, state) -> int:
    """Return the first step of the decay phase of a `warmup_stable_decay` schedule."""
    decay_steps = (args.lr_scheduler_kwargs or {}).get("num_decay_steps")
    if decay_steps is None:
        raise ValueError(
            "start='decay' needs lr_scheduler_type='warmup_stable_decay' with lr_scheduler_kwargs={'num_decay_steps': ...}; "
            f"got {args.lr_scheduler_type!s} with {args.lr_scheduler_kwargs!r}. Pass a step instead."
        )
    return max(0, state.max_steps - int(decay_steps))


def _is_sharded(model: torch.nn.Module) -> bool:
    return any(type(p).__name__ == "DTensor" for p in model.parameters())


class QatScheduleCallback(TrainerCallback):
    r"""Train with other config values until `start_step`: rounding and index restrictions come late (V4.1 §2.3, §2.4).

    The text config gets `warmup` when a step begins and its own values back when the step ends, so that evaluation, saved
    configs and resumed runs always see the final ones. Several callbacks with their own steps may be used together.

    Args:
        start_step (`int`):
            First step (counted from 0) that trains with the config's own values.
        warmup (`Mapping[str, Any]`, *optional*, defaults to `{"cache_rounding": False}`):
            Attribute of the text config -> value before that; `{"candidate_source_layer_id": -1}` lifts the candidate
            restriction, `{"index_topk": None}` attends to all visible entries.
        quantization (`Dsv4QuantizationConfig`, *optional*):
            From `start_step` on, weights and layer inputs are rounded to these formats, those of the packed folder that
            will be written (`simulate_packing`). `None` leaves them as they are.

    Raises:
        ValueError: at the start of training, if the config has no such attribute.
    """

    def __init__(self, start_step: int, warmup: Mapping[str, Any] | None = None, quantization=None):
        if start_step < 0:
            raise ValueError(f"`start_step` must be >= 0, got {start_step}")
        self.start_step = start_step
        self.warmup = {"cache_rounding": False} if warmup is None else dict(warmup)
        self.quantization = quantization
        self._config: Any = None
        self._own: dict[str, Any] = {}

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self._restore()
        config = getattr(model, "config", None) or getattr(getattr(model, "module", None), "config", None)
        self._config = getattr(config, "text_config", None) or config
        missing = [name for name in self.warmup if not hasattr(self._config, name)]
        if missing:
            raise ValueError(f"{type(self._config).__name__} has no {missing}: nothing to schedule")
        self._model = model
        self._round_weights(True)

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step < self.start_step and not self._own:
            self._own = {name: getattr(self._config, name) for name in self.warmup}
            for name, value in self.warmup.items():
                setattr(self._config, name, value)
            self._round_weights(False)

    def on_step_end(self, args, state, control, **kwargs):
        self._restore()

    def on_train_end(self, args, state, control, **kwargs):
        self._restore()

    def _round_weights(self, enabled: bool) -> None:
        if self.quantization is not None:
            simulate_packing(self._model, self.quantization if enabled else None)

    def _restore(self) -> None:
        if self._own:
            self._round_weights(True)
        for name, value in self._own.items():
            setattr(self._config, name, value)
        self._own = {}
