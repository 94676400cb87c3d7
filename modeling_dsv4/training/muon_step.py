"""One Muon step of a parameter group: momentum, orthogonalisation in bounded chunks, decoupled decay (V4 report §2.4)."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..kernel_seam import AUTO, find_kernel
from .group_options import newton_schulz_dtype, working_dtype
from .newton_schulz import newton_schulz, newton_schulz_flops, shape_factor, split_blocks, workspace_bytes
from .owner_exchange import Region, exchange, place_blocks
from .sharding import ShardLayout, is_dtensor, local_gradient, local_part, summed
from .weight_write import rounding_noise, write_update

Entry = tuple[str, torch.nn.Parameter, dict[str, Any]]


def advance_momentum(grad: torch.Tensor, momentum: torch.Tensor, beta: float, working: torch.dtype) -> None:
    """Perform `M <- beta M + (1 - beta) G` in place, in `working` precision, rounded to M's dtype."""
    full = momentum.to(working)
    full.lerp_(grad.to(working), 1 - beta)
    if full is not momentum:
        momentum.copy_(full)


def nesterov_update(
    grad: torch.Tensor, momentum: torch.Tensor, beta: float, nesterov: bool, out: torch.Tensor
) -> torch.Tensor:
    """Write `beta M + (1 - beta) G` (Nesterov, M already advanced) or M into `out`, in the dtype of `out`."""
    if nesterov:
        return torch.lerp(grad.to(out.dtype), momentum.to(out.dtype), beta, out=out)
    return out.copy_(momentum)


@functools.lru_cache(maxsize=1)
def compiled_newton_schulz():
    """Return `newton_schulz` under torch.compile (made at first use; shapes are compiled one by one)."""
    return torch.compile(newton_schulz, dynamic=False)


@dataclass
class _Stack:
    """Views `[n, rows, cols]` of one parameter's tensors; `active [n] bool` masks idle experts out of the update."""

    weight: torch.Tensor
    grad: torch.Tensor
    momentum: torch.Tensor
    master: torch.Tensor | None
    active: torch.Tensor | None = None
    noise: torch.Generator | None = None

    def __getitem__(self, index) -> _Stack:
        """Cut all tensors alike; the first index also cuts `active`."""
        views = [None if t is None else t[index] for t in (self.weight, self.grad, self.momentum, self.master)]
        first = index[0] if isinstance(index, tuple) else index
        return _Stack(*views, None if self.active is None else self.active[first], self.noise)

    def blocks(self, splits: tuple[int, ...]) -> list[_Stack]:
        """View as stacks of the blocks."""
        tensors = (self.weight, self.grad, self.momentum, self.master)
        views = [None if t is None else split_blocks(t, splits) for t in tensors]
        experts = self.weight.shape[0]
        stacks = []
        for i, weight in enumerate(views[0]):
            repeats = weight.shape[0] // max(1, experts)
            active = None if self.active is None else self.active.repeat_interleave(repeats)
            stacks.append(_Stack(weight, *(None if v is None else v[i] for v in views[1:]), active, self.noise))
        return stacks


class MuonStep:
    r"""Applies Muon to the parameters of one group.

    M <- mu M + (1 - mu) G; U <- mu M + (1 - mu) G; O = NewtonSchulz(each block of U);
    W <- W (1 - lr wd) - lr rms sqrt(max(block rows, block cols)) O.

    Matrices that lie here whole are stacked by shape and worked on in chunks of `chunk_bytes` of workspace; those cut
    across ranks go to an owner. Momentum and decay are elementwise, so no split ever shows in the state.
    Products in bfloat16 go to the `newton_schulz` kernel where there is one.
    """

    kernels = AUTO

    def __init__(self, group: dict[str, Any]):
        self.group = group
        self.lr = float(group["lr"])
        self.local: dict[tuple, list[_Stack]] = {}
        self.cut: dict[tuple, list[Region]] = {}

    def run(self, entries: Iterable[Entry]) -> None:
        """Update every (name, parameter, state); the same entries in the same order on all ranks."""
        for name, parameter, state in entries:
            self._plan(name, parameter, state)
        for (rows, cols, ns_dtype, working, _), stacks in self.local.items():
            self._run_local(stacks, rows, cols, ns_dtype, working)
        for (group, ns_dtype, working, device), regions in self.cut.items():
            exchange(
                regions,
                functools.partial(self._orthogonalise, dtype=ns_dtype),
                group=group,
                dtype=ns_dtype if ns_dtype == torch.bfloat16 else working,
                device=device,
                wave_bytes=self.group["chunk_bytes"],
            )

    def _plan(self, name: str, parameter: torch.nn.Parameter, state: dict[str, Any]) -> None:
        """Advance the momentum and sort the parameter's matrices into local stacks and exchanged regions."""
        layout, splits = ShardLayout(parameter, name), _checked_splits(name, parameter, self.group["row_splits"])
        working = working_dtype(parameter)
        tensors = (parameter, local_gradient(parameter), state["momentum_buffer"], state.get("master"))
        weight, grad, momentum, master = (None if t is None else _stacked(local_part(t)) for t in tensors)
        stack = _Stack(weight, grad, momentum, master, noise=rounding_noise(self.group, name, parameter, state))
        for index in _chunks(stack, self.group["chunk_bytes"], working):
            advance_momentum(stack.grad[index], stack.momentum[index], self.group["momentum"], working)
        if self.group["idle_threshold"] is not None and parameter.ndim == 3:
            stack.active = self._active_experts(stack, layout, working)
        keys = (newton_schulz_dtype(self.group, parameter), working, weight.device)
        if all(parameter.ndim == 3 and dim == 0 for _, dim in layout.shards):
            self._add_local(stack, splits, keys)
        elif layout.regular:
            self._add_cut(stack, splits, layout, keys)
        else:
            self._run_gathered(stack, splits, layout, keys)

    def _add_local(self, stack: _Stack, splits: tuple[int, ...], keys: tuple) -> None:
        for blocks in stack.blocks(splits):
            if blocks.weight.numel():
                self.local.setdefault((*blocks.weight.shape[1:], *keys), []).append(blocks)

    def _add_cut(self, stack: _Stack, splits: tuple[int, ...], layout: ShardLayout, keys: tuple) -> None:
        """One mesh dimension cuts the matrices: blocks that lie on one rank stay there, the others are exchanged."""
        dim, columns = layout.shards[0][1] + 3 - len(layout.shape), layout.shape[-1]
        experts = stack.weight.shape[0]
        own, cuts = place_blocks(splits, dim, layout.extents(), layout.rank(), share_rows=experts == 1)
        if own is not None:
            start, rows = own
            self._add_local(stack[:, start : start + sum(rows)], rows, keys)
        ns_dtype, working, _ = keys
        regions = self.cut.setdefault((layout.groups(layout.shards[0][1])[0], *keys), [])
        for cut in cuts:
            for first, last in ranges(experts, len(cut.extents)):
                part = stack[first:last, cut.here]
                matrices = (last - first) * cut.count
                flops = newton_schulz_flops(cut.rows, columns, len(self.group["ns_coefficients"]))
                regions.append(
                    Region(
                        shape=(last - first, cut.rows * cut.count, columns),
                        dim=dim,
                        extents=cut.extents,
                        block_rows=cut.rows,
                        cost=matrices * flops,
                        bytes=matrices * workspace_bytes(cut.rows, columns, ns_dtype, working),
                        read=functools.partial(self._read, part, working),
                        write=functools.partial(self._write, part, shape_factor(cut.rows, columns)),
                    )
                )

    def _run_local(self, stacks: list[_Stack], rows: int, cols: int, ns_dtype, working) -> None:
        """Fill chunks with matrices of one shape, from as many parameters as fit."""
        capacity = max(1, self.group["chunk_bytes"] // workspace_bytes(rows, cols, ns_dtype, working))
        for parts in _pack(stacks, capacity):
            # Nothing here may hold on to the update while the result is written: that would be a third of the memory.
            result = self._orthogonalise(self._read_all(parts, rows, cols, working), dtype=ns_dtype)
            sizes = [part.weight.shape[0] for part in parts]
            for part, direction in zip(parts, result.split(sizes), strict=True):
                self._write(part, shape_factor(rows, cols), direction)

    def _read_all(self, parts: list[_Stack], rows: int, cols: int, working: torch.dtype) -> torch.Tensor:
        sizes = [part.weight.shape[0] for part in parts]
        update = torch.empty(sum(sizes), rows, cols, dtype=working, device=parts[0].weight.device)
        for part, out in zip(parts, update.split(sizes), strict=True):
            self._read(part, working, out)
        return update

    def _run_gathered(self, stack: _Stack, splits: tuple[int, ...], layout: ShardLayout, keys: tuple) -> None:
        """Irregular placements (two mesh dimensions cut one matrix): every rank gathers it and does all the work."""
        ns_dtype, working, _ = keys
        update = self._read(stack, working).view(stack.weight.shape[-len(layout.shape) :])
        whole = layout.like(update).full_tensor()
        for blocks in split_blocks(whole, splits):
            factor = shape_factor(*blocks.shape[1:])
            blocks.copy_(self._orthogonalise(blocks.clone(), dtype=ns_dtype).mul_(factor))
        self._write(stack, 1.0, _stacked(layout.cut(whole)))

    def _read(self, stack: _Stack, working: torch.dtype, out: torch.Tensor | None = None) -> torch.Tensor:
        out = torch.empty(stack.weight.shape, dtype=working, device=stack.weight.device) if out is None else out
        nesterov_update(stack.grad, stack.momentum, self.group["momentum"], self.group["nesterov"], out)
        return out if stack.active is None else out.mul_(stack.active[:, None, None])

    def _write(self, stack: _Stack, factor: float, direction: torch.Tensor) -> None:
        write_update(
            stack.weight,
            direction,
            scale=self.lr * self.group["rms"] * factor,
            decay=self.lr * self.group["weight_decay"],
            master=stack.master,
            noise=stack.noise,
        )

    def _orthogonalise(self, update: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return O for `[n, rows, cols]`; the content of `update` is lost."""
        if dtype == torch.bfloat16 and update.numel():
            kernel = find_kernel(self.kernels, "newton_schulz", update)
            if kernel is not None:
                return kernel(update.contiguous(), self.group["ns_coefficients"], eps=self.group["eps"], dtype=dtype)
        function = compiled_newton_schulz() if self.group["compile"] else newton_schulz
        return function(update, self.group["ns_coefficients"], eps=self.group["eps"], dtype=dtype, overwrite=True)

    def _active_experts(self, stack: _Stack, layout: ShardLayout, working: torch.dtype) -> torch.Tensor:
        """Return which experts' updates exceed `idle_threshold` times the mean norm over all experts, `[E here] bool`.

        Departs from the paper, where old momentum alone gives an expert without tokens a full-size update.
        """
        energy = torch.zeros(stack.weight.shape[0], dtype=torch.float64, device=stack.weight.device)
        for experts, rows in _chunks(stack, self.group["chunk_bytes"], working):
            squares = self._read(stack[experts, rows], working).square_()
            energy[experts] += squares.sum((1, 2), dtype=torch.float64)
        norms = summed(energy, layout.groups(1, 2)).sqrt()
        mean = summed(norms.sum(), layout.groups(0)) / layout.shape[0]
        return norms > self.group["idle_threshold"] * mean


def _stacked(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.ndim == 3 else tensor.unsqueeze(0)


def _checked_splits(name: str, parameter: torch.nn.Parameter, row_splits: tuple[int, ...] | None) -> tuple[int, ...]:
    if parameter.ndim not in (2, 3):
        hint = "; flattened by FSDP1 or ZeRO? use FSDP2" if parameter.ndim == 1 and not is_dtensor(parameter) else ""
        raise ValueError(f"{name}: 'muon' needs two or three dimensions, got shape {tuple(parameter.shape)}{hint}")
    splits = row_splits or (parameter.shape[-2],)
    if sum(splits) != parameter.shape[-2]:
        raise ValueError(f"{name}: row_splits add up to {sum(splits)}, but it has {parameter.shape[-2]} rows")
    return splits


def ranges(total: int, parts: int) -> Iterator[tuple[int, int]]:
    """Cut `range(total)` into at most `parts` nearly equal, non-empty ranges."""
    parts = min(total, parts)
    for k in range(parts):
        yield k * total // parts, (k + 1) * total // parts


def _chunks(stack: _Stack, chunk_bytes: int, working: torch.dtype) -> Iterator[tuple[slice, slice]]:
    """Cut a parameter along experts and rows so that two working copies of a part fit `chunk_bytes`."""
    experts, rows, cols = stack.weight.shape
    if not stack.weight.numel():
        return
    rows_at_once = max(1, chunk_bytes // (2 * cols * working.itemsize))
    experts_at_once = max(1, rows_at_once // rows)
    for first in range(0, experts, experts_at_once):
        for start in range(0, rows, rows_at_once):
            yield slice(first, min(first + experts_at_once, experts)), slice(start, min(start + rows_at_once, rows))


def _pack(stacks: list[_Stack], capacity: int) -> Iterator[list[_Stack]]:
    """Yield lists of stacks that hold `capacity` matrices together (fewer in the last)."""
    parts, free = [], capacity
    for stack in stacks:
        start, count = 0, stack.weight.shape[0]
        while start < count:
            stop = min(count, start + free)
            parts.append(stack[start:stop])
            free -= stop - start
            start = stop
            if not free:
                yield parts
                parts, free = [], capacity
    if parts:
        yield parts
