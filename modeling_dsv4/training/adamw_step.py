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

# Elements of a low-precision weight that are widened at once: weight and gradient in float32 take 1 GiB.
_CHUNK_ELEMENTS = 2**27

# (weight, gradient, exp_avg, exp_avg_sq, step), all in the working dtype but the step.
_Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class AdamWStep:
    """Applies AdamW to the parameters of one group, in float32 (float64 for float64 weights) whatever the weights are."""

    def __init__(self, group: dict[str, Any]):
        self.group = group

    def run(self, entries: Iterable[Entry]) -> None:
        """Update every (name, parameter, state): wide weights in one call, low-precision ones in chunks of rows."""
        wide: dict[torch.device, list[_Tensors]] = {}
        for name, parameter, state in entries:
            weight, grad = local_part(parameter), local_gradient(parameter)
            moments = (local_part(state["exp_avg"]), local_part(state["exp_avg_sq"]))
            if weight.dtype == working_dtype(parameter):
                wide.setdefault(weight.device, []).append((weight, grad.to(weight.dtype), *moments, state["step"]))
                continue
            master = local_part(state["master"]) if "master" in state else None
            noise = rounding_noise(self.group, name, parameter, state)
            self._update_in_chunks((weight, grad, *moments), master, state["step"], noise)
        for tensors in wide.values():
            self._update(tensors)

    def _update_in_chunks(self, tensors, master: torch.Tensor | None, step: torch.Tensor, noise) -> None:
        weight, grad, mean, square = (torch.atleast_1d(t) for t in tensors)
        master = None if master is None else torch.atleast_1d(master)
        rows = max(1, _CHUNK_ELEMENTS // max(1, weight[:1].numel()))
        before = step.clone()
        for start in range(0, max(1, len(weight)), rows):
            cut = slice(start, start + rows)
            full = weight[cut].to(mean.dtype) if master is None else master[cut]
            step.copy_(before)  # every chunk takes the same step
            self._update([(full, grad[cut].to(mean.dtype), mean[cut], square[cut], step)])
            weight[cut].copy_(full if noise is None else round_stochastically(full, noise))

    def _update(self, tensors: list[_Tensors]) -> None:
        weights, grads, means, squares, steps = (list(column) for column in zip(*tensors, strict=True))
        beta1, beta2 = self.group["betas"]
        adamw(
            weights,
            grads,
            means,
            squares,
            [],
            steps,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=float(self.group["lr"]),
            weight_decay=self.group["weight_decay"],
            eps=self.group["eps"],
            maximize=False,
        )
