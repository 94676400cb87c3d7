"""Grouping of tokens by expert, on the device: no size depends on a value, so that it can be part of a CUDA graph.

A pair is a token and one of its slots, numbered token * k + slot. Pairs are put in the order of their experts, which is cut
into tiles of one expert each.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl


@triton.jit
def _group_kernel(
    indices,
    order,
    tile_expert,
    tile_first,
    tile_last,
    pairs,
    experts,
    BM: tl.constexpr,
    BP: tl.constexpr,
    CHUNK: tl.constexpr,
    ONE_EACH: tl.constexpr,
):
    """Place pairs behind those of lower experts and the earlier ones of their own; every BM-th pair opens a tile."""
    pair = tl.program_id(0) * BP + tl.arange(0, BP)
    expert = tl.load(indices + pair, mask=pair < pairs, other=experts).to(tl.int32)
    lower = tl.zeros([BP], tl.int32)
    same = tl.zeros([BP], tl.int32)
    earlier = tl.zeros([BP], tl.int32)
    start = 0
    while start < pairs:
        other = start + tl.arange(0, CHUNK)[None, :]
        other_expert = tl.load(indices + other, mask=other < pairs, other=experts + 1).to(tl.int32)
        equal = other_expert == expert[:, None]
        lower += tl.sum((other_expert < expert[:, None]).to(tl.int32), axis=1)
        same += tl.sum(equal.to(tl.int32), axis=1)
        earlier += tl.sum((equal & (other < pair[:, None])).to(tl.int32), axis=1)
        start += CHUNK
    place = lower + earlier
    tl.store(order + place, pair, mask=pair < pairs)
    opens = (earlier % BM == 0) & (expert < experts) & (pair < pairs)
    # Unique: an expert's first tile has a number above the last one of the expert before it.
    tile = pair if ONE_EACH else place // BM + expert
    if ONE_EACH:
        tl.store(tile_expert + tile, tl.where(opens, expert, -1), mask=pair < pairs)
    else:
        tl.store(tile_expert + tile, expert, mask=opens)
    tl.store(tile_first + tile, place, mask=opens)
    tl.store(tile_last + tile, tl.minimum(place + BM, lower + same), mask=opens)


class Groups(NamedTuple):
    """Pairs by expert `[P]`, and of each tile its expert (-1: unused) and its range of that order; int32."""

    order: torch.Tensor
    expert: torch.Tensor
    first: torch.Tensor
    last: torch.Tensor


def group_pairs(indices: torch.Tensor, experts: int, rows: int) -> Groups:
    """Group the pairs of `indices` `[N, k]` into tiles of at most `rows` pairs of one expert; absent ones may have tiles.

    Tiles of one row need no order: the kernels take the pair of the tile's number.
    """
    pairs = indices.numel()
    if rows == 1:
        return Groups(indices, indices.flatten(), indices, indices)
    tiles = pairs // rows + experts
    one_each = pairs <= tiles
    tiles = min(pairs, tiles)
    order, first, last = (torch.empty(n, dtype=torch.int32, device=indices.device) for n in (pairs, tiles, tiles))
    expert = torch.empty_like(first) if one_each else torch.full_like(first, -1)
    chunk = min(512, triton.next_power_of_2(pairs))
    grid = (triton.cdiv(pairs, 8),)
    _group_kernel[grid](indices, order, expert, first, last, pairs, experts, rows, 8, chunk, one_each, num_warps=4)
    return Groups(order, expert, first, last)


@triton.jit
def tile_pairs(order, tile_first, tile_last, BM: tl.constexpr):
    """Pairs of the tile program_id(1), and which of them there are; of one row, the tile is a pair of the only token."""
    if BM == 1:
        pair, inside = tl.program_id(1) + tl.arange(0, 1), tl.arange(0, 1) < 1
    else:
        place = tl.load(tile_first + tl.program_id(1)) + tl.arange(0, BM)
        inside = place < tl.load(tile_last + tl.program_id(1))
        pair = tl.load(order + place, mask=inside, other=0)
    return pair, inside
