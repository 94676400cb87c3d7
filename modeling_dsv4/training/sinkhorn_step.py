"""One Sinkhorn-balanced step of a parameter group (V4.1 §2.5, Algorithm 1), dense or for the touched rows only."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..kernel_seam import AUTO, find_kernel
from .group_options import working_dtype
from .muon_step import Entry, advance_momentum, nesterov_update
from .sharding import ShardLayout, local_gradient, local_part, summed
from .sinkhorn_update import apply_scales, balance_scales, scaled_square
from .weight_write import rounding_noise, write_update


def nesterov_square(grad: torch.Tensor, momentum: torch.Tensor, beta: float, nesterov: bool, working: torch.dtype):
    """Return `scaled_square` of the Nesterov update `[rows, n]`, in `working` precision."""
    out = torch.empty(grad.shape, dtype=working, device=grad.device)
    return scaled_square(nesterov_update(grad, momentum, beta, nesterov, out))


def write_balanced(
    weight: torch.Tensor,
    grad: torch.Tensor,
    momentum: torch.Tensor,
    r: torch.Tensor,
    c: torch.Tensor,
    beta: float,
    nesterov: bool,
    width: int,
    **options: Any,
) -> None:
    """Take `sqrt(width) r_i U_ij c_j`, U the Nesterov update `[rows, n]`, from the weight, in the dtype of `r`."""
    out = torch.empty(grad.shape, dtype=r.dtype, device=grad.device)
    direction = apply_scales(nesterov_update(grad, momentum, beta, nesterov, out), r, c, width)
    write_update(weight, direction, scale=1.0, **options)


@functools.lru_cache(maxsize=1)
def compiled_passes():
    """Return the three functions under torch.compile (each becomes one fused pass), made at first use."""
    return torch.compile(advance_momentum), torch.compile(nesterov_square), torch.compile(write_balanced)


class SinkhornStep:
    r"""Applies Algorithm 1 to the parameters of one group.

    M <- b M + (1 - b) G; U <- b M + (1 - b) G; W <- W - lr rms sqrt(n) r_i U_ij c_j, with r and c from `balance_scales`.

    The dense rule (`rows="all"`) is the paper's: a row without gradient goes on moving at full size until its momentum
    falls under the mask (115 to 181 steps at the defaults). `rows="touched"` updates only rows that have a gradient in
    this step; the momentum of the others decays when they are touched again.

    A whole matrix under the dense rule goes to the `sinkhorn_step` kernel where there is one; for bfloat16 and float16
    weights that keeps the update in bfloat16 between its passes (master copies see it so rounded, 2^-9 an element).
    """

    kernels = AUTO

    def __init__(self, group: dict[str, Any]):
        self.group = group
        self.lr = float(group["lr"])
        passes = compiled_passes() if group["compile"] else (advance_momentum, nesterov_square, write_balanced)
        self.advance, self.square, self.write = passes
        self.rule = (group["momentum"], group["nesterov"])

    def run(self, entries: Iterable[Entry]) -> None:
        """Update every (name, parameter, state); the same entries in the same order on all ranks."""
        for name, parameter, state in entries:
            if parameter.ndim != 2:
                raise ValueError(f"{name}: 'sinkhorn' needs a matrix [ids, hidden], got {tuple(parameter.shape)}")
            if self.group["rows"] == "touched":
                self._run_touched(name, parameter, state)
            else:
                self._run_dense(name, parameter, state)

    def _run_dense(self, name: str, parameter: torch.nn.Parameter, state: dict[str, Any]) -> None:
        layout, working = ShardLayout(parameter, name), working_dtype(parameter)
        grad, momentum = local_gradient(parameter), local_part(state["momentum_buffer"])
        weight, master = local_part(parameter), state.get("master")
        master = None if master is None else local_part(master)
        noise = rounding_noise(self.group, name, parameter, state)
        if not layout.shards and self._run_kernel(weight, grad, momentum, master, noise):
            return
        cuts = self._row_blocks(*grad.shape, working)
        for cut in cuts:
            self.advance(grad[cut], momentum[cut], self.group["momentum"], working)
        blocks = [functools.partial(self.square, grad[cut], momentum[cut], *self.rule, working) for cut in cuts]
        r, c = self._scales(blocks, grad, layout, layout.shape[0], working)
        for cut in cuts:
            copy = None if master is None else master[cut]
            self._write(weight[cut], copy, grad[cut], momentum[cut], r[cut], c, layout, noise)

    def _run_kernel(self, weight, grad, momentum, master, noise) -> bool:
        """Do the whole step in the kernel, if there is one for these tensors; returns whether it was done."""
        tensors = [t for t in (weight, grad, momentum, master) if t is not None]
        kernel = find_kernel(self.kernels, "sinkhorn_step", *tensors)
        if kernel is None or not all(t.is_contiguous() for t in tensors):
            return False
        kept_size = 4 if weight.dtype == torch.float32 else 2
        kernel(
            weight,
            grad,
            momentum,
            beta=self.group["momentum"],
            nesterov=self.group["nesterov"],
            scale=self.lr * self.group["rms"],
            decay=self.lr * self.group["weight_decay"],
            iterations=self.group["sinkhorn_iters"],
            mask_threshold=self.group["mask_threshold"],
            eps=self.group["eps"],
            master=master,
            seed=None if noise is None else noise.initial_seed(),
            keep=weight.numel() * kept_size <= self.group["keep_bytes"],
        )
        return True

    def _run_touched(self, name: str, parameter: torch.nn.Parameter, state: dict[str, Any]) -> None:
        layout, working = ShardLayout(parameter, name), working_dtype(parameter)
        if layout.groups(1):
            raise ValueError(f"{name}: rows='touched' needs whole rows on every rank, but its columns are sharded")
        rows, grad = _touched_rows(parameter)
        momentum, seen = local_part(state["momentum_buffer"]), local_part(state["row_steps"])
        step = int(state["step"])
        # The rows' momentum as the dense rule would have left it, had their gradients been zero since the last touch.
        current = momentum.index_select(0, rows).to(working)
        current *= (self.group["momentum"] ** (step - 1 - seen[rows].to(working))).unsqueeze(1)
        self.advance(grad, current, self.group["momentum"], working)
        momentum.index_copy_(0, rows, current.to(momentum.dtype))
        seen[rows] = step
        cuts = self._row_blocks(*grad.shape, working)
        blocks = [functools.partial(self.square, grad[cut], current[cut], *self.rule, working) for cut in cuts]
        count = summed(torch.tensor(len(rows), dtype=torch.float64, device=grad.device), layout.groups(0))
        r, c = self._scales(blocks, grad, layout, count.clamp_min(1), working)
        weight, master = local_part(parameter), state.get("master")
        noise = rounding_noise(self.group, name, parameter, state)
        for cut in cuts:
            part = weight.index_select(0, rows[cut])
            copy = None if master is None else local_part(master).index_select(0, rows[cut])
            self._write(part, copy, grad[cut], current[cut], r[cut], c, layout, noise)
            weight.index_copy_(0, rows[cut], part)
            if master is not None:
                local_part(master).index_copy_(0, rows[cut], copy)

    def _row_blocks(self, rows: int, cols: int, working: torch.dtype) -> list[slice]:
        """Cut the rows so that a block's update, its square and one cast of its gradient fit `chunk_bytes`."""
        step = max(1, self.group["chunk_bytes"] // (3 * cols * working.itemsize))
        return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]

    def _scales(self, blocks: list[Callable], grad: torch.Tensor, layout: ShardLayout, total_rows, working):
        row_groups, column_groups = layout.groups(0), layout.groups(1)
        return balance_scales(
            blocks,
            grad.shape[1],
            keep=grad.numel() * working.itemsize <= self.group["keep_bytes"],
            total_rows=total_rows,
            iterations=self.group["sinkhorn_iters"],
            mask_threshold=self.group["mask_threshold"],
            eps=self.group["eps"],
            dtype=working,
            device=grad.device,
            sum_over_row_shards=functools.partial(summed, groups=row_groups) if row_groups else None,
            sum_over_column_shards=functools.partial(summed, groups=column_groups) if column_groups else None,
        )

    def _write(self, weight, master, grad, momentum, r, c, layout: ShardLayout, noise) -> None:
        # The learning rate goes into r, a tensor: as a number it would be compiled anew each time it changes.
        # A generator of noise cannot be compiled.
        write = self.write if noise is None else write_balanced
        write(
            weight,
            grad,
            momentum,
            r * (self.lr * self.group["rms"]),
            c,
            *self.rule,
            layout.shape[1],
            decay=self.lr * self.group["weight_decay"],
            master=master,
            noise=noise,
        )


def _touched_rows(parameter: torch.nn.Parameter) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the local rows that have a gradient, `[k] int64`, and their gradients `[k, n]`."""
    if parameter.grad is not None and parameter.grad.is_sparse:
        grad = parameter.grad.coalesce()
        rows, values = grad.indices()[0], grad.values()
        touched = (values != 0).any(1)
        return rows[touched], values[touched]
    grad = local_gradient(parameter)
    rows = (grad != 0).any(1).nonzero().squeeze(1)
    return rows, grad.index_select(0, rows)
