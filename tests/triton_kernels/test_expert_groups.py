"""Tiles of pairs: each pair in one tile of its expert, in few and in many calls."""

import pytest
import torch

from modeling_dsv4.triton_kernels.expert_groups import group_pairs

EXPERTS, CHOSEN = 5, 3


@pytest.mark.parametrize(("tokens", "rows"), [(1, 2), (2, 8), (30, 2), (30, 8)])
def test_every_pair_is_in_one_tile_of_its_expert(tokens, rows, device, poisoned):
    """Few pairs have a tile number each, many have dense ones; the sixth expert is not in the bank."""
    generator = torch.Generator().manual_seed(tokens)
    indices = torch.stack([torch.randperm(EXPERTS + 1, generator=generator)[:CHOSEN] for _ in range(tokens)])
    groups = group_pairs(indices.to(device), EXPERTS, rows)
    found = []
    for expert, first, last in zip(*(t.tolist() for t in groups[1:]), strict=True):
        if expert >= 0:
            assert 0 < last - first <= rows
            found += [(expert, pair) for pair in groups.order[first:last].tolist()]
    assert sorted(found) == sorted((e, pair) for pair, e in enumerate(indices.flatten().tolist()) if e < EXPERTS)
