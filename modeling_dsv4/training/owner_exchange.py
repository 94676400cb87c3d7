"""Whole matrices by owner: shards of many matrices go to one rank each, are worked on there once, and come back.

Two all-to-alls a wave. Newton–Schulz needs a whole matrix; gathering it on every rank would repeat the work R times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .newton_schulz import equal_runs


@dataclass
class Region:
    r"""Equal matrices of which every rank of a group holds a part.

    Attributes:
        shape (`tuple[int, int, int]`): [n, rows, cols] of the whole region (rows may be several blocks).
        dim (`int`): 1 or 2, the dimension that is cut.
        extents (`list[int]`): its size on every rank, possibly 0.
        block_rows (`int`): rows of one matrix; divides `rows`.
        cost (`int`): floating-point operations, for the balance between owners.
        bytes (`int`): memory that the owner needs.
        read (callable): returns this rank's part of the update `[n, rows or part, cols or part]`.
        write (callable): takes this rank's part of the result.
    """

    shape: tuple[int, int, int]
    dim: int
    extents: list[int]
    block_rows: int
    cost: int
    bytes: int
    read: Callable[[], torch.Tensor]
    write: Callable[[torch.Tensor], None]

    def part_shape(self, rank: int) -> list[int]:
        shape = list(self.shape)
        shape[self.dim] = self.extents[rank]
        return shape

    def part_numel(self, rank: int) -> int:
        n, rows, cols = self.part_shape(rank)
        return n * rows * cols


@dataclass
class Cut:
    r"""A run of equal blocks that no rank holds whole.

    Attributes:
        rows, count (`int`): rows of one block and how many blocks follow each other.
        extents (`list[int]`): size of every rank's part along the dimension that is cut.
        here (`slice`): this rank's rows of the run, counted in its local rows.
    """

    rows: int
    count: int
    extents: list[int]
    here: slice


def place_blocks(
    splits: Sequence[int], dim: int, extents: list[tuple[int, int]], rank: int, *, share_rows: bool
) -> tuple[tuple[int, tuple[int, ...]] | None, list[Cut]]:
    """Sort the row blocks of a cut parameter into those that lie on this rank whole and those that are cut.

    Args:
        splits: rows of each block.
        dim: 1 when rows are cut, 2 when columns are.
        extents: [start, stop) of every rank along that dimension.
        rank: this one.
        share_rows: for cut columns, break long runs of blocks up, so that every rank can own some.

    Returns:
        (first local row, rows of each block) of the whole blocks here, or None; and the cuts, alike on all ranks.
    """
    if dim == 2:
        sizes = [stop - start for start, stop in extents]
        return None, list(_column_cuts(splits, sizes, share_rows))
    low, high = extents[rank]
    own_start, own, cuts, start = 0, [], [], 0
    for rows in splits:
        stop = start + rows
        if any(lo <= start and stop <= hi for lo, hi in extents):
            if low <= start and stop <= high:
                own_start = own_start if own else start - low
                own.append(rows)
        else:
            parts = [max(0, min(hi, stop) - max(lo, start)) for lo, hi in extents]
            first = min(max(start, low), high) - low
            cuts.append(Cut(rows, 1, parts, slice(first, first + parts[rank])))
        start = stop
    return ((own_start, tuple(own)) if own else None), cuts


def _column_cuts(splits: Sequence[int], sizes: list[int], share_rows: bool) -> Iterator[Cut]:
    start = 0
    for rows, count in equal_runs(splits):
        step = -(-count // len(sizes)) if share_rows else count
        for first in range(0, count, step):
            blocks = min(step, count - first)
            yield Cut(rows, blocks, sizes, slice(start, start + rows * blocks))
            start += rows * blocks


def exchange(
    regions: Sequence[Region],
    work: Callable[[torch.Tensor], torch.Tensor],
    *,
    group: dist.ProcessGroup,
    dtype: torch.dtype,
    device: torch.device,
    wave_bytes: int,
) -> None:
    """Send every region to its owner, apply `work` to `[n, block rows, cols]` there, and write the parts of the result.

    Args:
        regions: the same on every rank of `group`, in the same order (only `read`, `write` differ).
        work: maps a stack of whole matrices to a stack of the same shape.
        dtype: of what travels, both ways.
        wave_bytes: what an owner may hold at once (one region at least).
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    for wave in _waves(regions, ranks, wave_bytes):
        parts = [[r.read().to(dtype).reshape(-1) for r in owned] for owned in wave]
        sent = torch.cat([part for owned in parts for part in owned])
        sent_sizes = [sum(part.numel() for part in owned) for owned in parts]
        del parts
        mine = wave[rank]
        received_sizes = [sum(r.part_numel(k) for r in mine) for k in range(ranks)]
        received = sent.new_empty(sum(received_sizes))
        dist.all_to_all_single(received, sent, received_sizes, sent_sizes, group=group)
        results = _work_on(mine, received.split(received_sizes), work, ranks)
        returned = torch.cat([part for k in range(ranks) for part in results[k]] or [received]).to(dtype)
        dist.all_to_all_single(sent, returned, sent_sizes, received_sizes, group=group)
        start = 0
        for region in (r for owned in wave for r in owned):
            stop = start + region.part_numel(rank)
            region.write(sent[start:stop].view(region.part_shape(rank)))
            start = stop


def _work_on(mine: list[Region], received, work, ranks: int) -> list[list[torch.Tensor]]:
    """Assemble each region from the ranks' parts, work on it, and cut the result up again, rank by rank."""
    results: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
    starts = [0] * ranks
    for region in mine:
        parts = []
        for k in range(ranks):
            stop = starts[k] + region.part_numel(k)
            parts.append(received[k][starts[k] : stop].view(region.part_shape(k)))
            starts[k] = stop
        whole = torch.cat(parts, dim=region.dim)
        blocks = whole.reshape(-1, region.block_rows, whole.shape[2])
        for k, part in enumerate(work(blocks).reshape(whole.shape).split(region.extents, dim=region.dim)):
            results[k].append(part.reshape(-1))
    return results


def _waves(regions: Sequence[Region], ranks: int, wave_bytes: int) -> list[list[list[Region]]]:
    """Give each region to the owner with the least work so far; start a new wave when an owner's memory is full."""
    waves: list[list[list[Region]]] = []
    work, held = [0] * ranks, [0] * ranks
    for region in regions:
        owner = min(range(ranks), key=lambda k: work[k])
        if not waves or (held[owner] and held[owner] + region.bytes > wave_bytes):
            waves.append([[] for _ in range(ranks)])
            held = [0] * ranks
        waves[-1][owner].append(region)
        work[owner] += region.cost
        held[owner] += region.bytes
    return waves
