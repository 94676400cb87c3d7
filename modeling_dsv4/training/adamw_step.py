"""One AdamW step of a parameter group, by torch's functional AdamW on the local parts (everything is elementwise)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.adamw import adamw

from .group_options import working_dtype
from .muon_step import Entry
from .sharding import local_gradient, local_part
from .weight_write import round_stochastically, rounding_noise


class AdamWStep:
    """Applies AdamW to the parameters of one group, in float32 (float64 for float64 weights) whatever the weights are."""

    def __init__(self, group: dict[str, Any]):
        self.group = group

    def run(self, entries: Iterable[Entry]) -> None:
        """Update every (name, parameter, state). Low-precision weights are widened one at a time."""
        wide: dict[tuple, list[tuple]] = {}
        for name, parameter, state in entries:
            weight, grad = local_part(parameter), local_gradient(parameter)
            working = working_dtype(parameter)
            if weight.dtype == working:
                key = (weight.device, weight.dtype, grad.dtype)
                wide.setdefault(key, []).append((weight, grad.to(working), state))
                continue
            full = local_part(state["master"]) if "master" in state else weight.to(working)
            self._update([(full, grad.to(working), state)])
            noise = rounding_noise(self.group, name, parameter, state)
            weight.copy_(full if noise is None else round_stochastically(full, noise))
        for triples in wide.values():
            self._update(triples)

    def _update(self, triples: list[tuple[torch.Tensor, torch.Tensor, dict[str, Any]]]) -> None:
        states = [state for _, _, state in triples]
        beta1, beta2 = self.group["betas"]
        adamw(
            [weight for weight, _, _ in triples],
            [grad for _, grad, _ in triples],
            [local_part(state["exp_avg"]) for state in states],
            [local_part(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=float(self.group["lr"]),
            weight_decay=self.group["weight_decay"],
            eps=self.group["eps"],
            maximize=False,
        )
