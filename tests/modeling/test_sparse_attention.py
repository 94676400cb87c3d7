"""Maths of compressed sparse attention against brute force and float64 loops."""

import itertools
import math

import numpy as np
import pytest
import torch

from modeling_dsv4.sparse_attention import (
    attend_with_sinks,
    attention_mass,
    expand_blocks,
    index_scores,
    indexer_divergence,
    pool_groups,
    select_candidate_blocks,
    select_topk,
    wide,
)
from tests.reference import attention

INF = float("inf")


def _random(*shape, seed=1, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def test_wide_keeps_float64():
    expected = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float32}
    for dtype, wider in (expected | {torch.float64: torch.float64}).items():
        assert wide(torch.ones(1, dtype=dtype)).dtype == wider


# ---- pooling -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_pooling_is_a_softmax_over_the_group_per_channel(ratio):
    values, gates = _random(6 * ratio, 5, seed=1), _random(6 * ratio, 5, seed=2) * 3
    found = pool_groups(values.view(6, ratio, 5), gates.view(6, ratio, 5))
    expected = np.zeros((6, 5))
    for j, c in itertools.product(range(6), range(5)):
        group = [(math.exp(gates[j * ratio + i, c]), float(values[j * ratio + i, c])) for i in range(ratio)]
        expected[j, c] = sum(w * v for w, v in group) / sum(w for w, _ in group)
    np.testing.assert_allclose(found, expected, rtol=1e-13)
    np.testing.assert_allclose(found, attention.pool_groups(values.numpy(), gates.numpy(), ratio), rtol=1e-13)


def test_a_source_with_gate_minus_infinity_is_left_out():
    values, gates = _random(3, 2, 4), _random(3, 2, 4, seed=2)
    gates[1, 0] = -INF
    assert torch.equal(pool_groups(values, gates)[1], values[1, 1])


def test_gradient_of_pooling():
    args = [_random(2, 3, 2, seed=s).requires_grad_() for s in (1, 2)]
    assert torch.autograd.gradcheck(pool_groups, args)


# ---- index scores ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_query", [False, True])
def test_index_scores_equal_the_oracle(per_query):
    queries, weights = _random(2, 5, 3, 8), _random(2, 5, 3, seed=2)
    keys = _random(2, 5, 7, 8, seed=3) if per_query else _random(2, 7, 8, seed=3)
    found = index_scores(queries, keys, weights)
    for b, t in itertools.product(range(2), range(5)):
        own = keys[b, t] if per_query else keys[b]
        expected = attention.index_scores(queries[b, t].numpy(), own.numpy(), weights[b, t].numpy())
        np.testing.assert_allclose(found[b, t], expected, atol=1e-13)
        by_hand = [
            sum(max(float(queries[b, t, h] @ own[j]), 0.0) * float(weights[b, t, h]) for h in range(3))
            for j in range(7)
        ]
        np.testing.assert_allclose(found[b, t], by_hand, atol=1e-13)


@pytest.mark.parametrize("per_query", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_score_depends_on_no_other_key(dtype, per_query):
    queries, weights = _random(2, 5, 3, 8, dtype=dtype), _random(2, 5, 3, seed=2, dtype=dtype)
    keys = _random(2, 5, 11, 8, seed=3, dtype=dtype) if per_query else _random(2, 11, 8, seed=3, dtype=dtype)
    whole = index_scores(queries, keys, weights)
    assert whole.dtype == dtype and whole.shape == (2, 5, 11)
    for size in (1, 4, 11):
        pieces = torch.cat([index_scores(queries, part, weights) for part in keys.split(size, dim=-2)], dim=-1)
        np.testing.assert_allclose(pieces.double(), whole.double(), atol=1e-14 if dtype == torch.float64 else 0)
    assert index_scores(queries, keys[..., :0, :], weights).shape == (2, 5, 0)


def test_bfloat16_scores_are_rounded_after_every_step():
    queries, keys = _random(1, 4, 3, 8, dtype=torch.bfloat16), _random(1, 6, 8, seed=3, dtype=torch.bfloat16)
    weights = _random(1, 4, 3, seed=2, dtype=torch.bfloat16)
    dots = torch.einsum("bthd,bcd->bthc", queries.float(), keys.float()).bfloat16()
    products = (dots.float().relu() * weights.float()[..., None]).bfloat16()
    assert torch.equal(index_scores(queries, keys, weights), products.float().sum(2).bfloat16())


# ---- selection -----------------------------------------------------------------------------------------------------------


def _brute_force(row, k):
    """Sort by score descending, then the lower column; -inf never; columns ascending, -1 last."""
    possible = [j for j, score in enumerate(row) if score > -INF]
    chosen = sorted(sorted(possible, key=lambda j: (-row[j], j))[:k])
    return chosen + [-1] * (min(k, len(row)) - len(chosen))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("values", [(0.0,), (0.0, -0.0, 1.0), (-INF, 0.0), (-INF, 0.0, 0.5, 1.0, -2.0), (-INF,)])
def test_selection_breaks_ties_by_the_lower_column(values, dtype):
    generator = torch.Generator().manual_seed(len(values))
    for count, k in itertools.product((1, 2, 3, 7, 16, 33), (1, 2, 5, 16, 40)):
        table = torch.tensor(values, dtype=dtype)
        scores = table[torch.randint(0, len(values), (40, count), generator=generator)]
        found = select_topk(scores, k)
        assert found.dtype == torch.int64 and found.shape == (40, min(k, count))
        assert found.tolist() == [_brute_force(row, k) for row in scores.tolist()]


def test_selection_of_distinct_scores_with_hidden_entries():
    scores = _random(30, 4, 50).masked_fill(
        torch.rand(30, 4, 50, generator=torch.Generator().manual_seed(3)) < 0.6, -INF
    )
    for k in (1, 6, 20, 49, 50, 51):
        found = select_topk(scores, k)
        for row, chosen in zip(scores.flatten(0, 1).tolist(), found.flatten(0, 1).tolist(), strict=True):
            assert chosen == _brute_force(row, k)
            assert [j for j in chosen if j >= 0] == sorted(attention.best(row, k))


def test_selection_of_nothing():
    assert select_topk(torch.zeros(2, 3, 0), 4).shape == (2, 3, 0)
    assert select_topk(torch.full((1, 5), -INF), 3).tolist() == [[-1, -1, -1]]


# ---- candidates ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("block_size", [1, 2, 3, 8])
@pytest.mark.parametrize("k", [1, 2, 3, 50])
def test_candidates_equal_the_oracle(k, block_size, tied):
    count = 17
    scores = _random(2, count, count)
    if tied:
        scores = scores.clamp(min=0.4, max=0.4).where(scores > 0, torch.zeros(()).double())
    visible = torch.arange(1, count + 1).expand(2, count)
    scores = scores.masked_fill(torch.arange(count) >= visible[..., None], -INF)
    blocks = select_candidate_blocks(scores, visible, block_size=block_size, k=k)
    assert blocks.shape == (2, count, min(k, -(-count // block_size)))
    entries = expand_blocks(blocks, block_size=block_size)
    for b, t in itertools.product(range(2), range(count)):
        expected = attention.candidate_positions(scores[b, t, : t + 1].tolist(), block_size, k)
        found = [j for j in entries[b, t].tolist() if 0 <= j <= t]
        assert found == expected, (b, t)
        kept = [block for block in blocks[b, t].tolist() if block >= 0]
        assert kept == sorted(kept) and t // block_size in kept
        assert len(kept) == min(k, t // block_size + 1)


def test_the_newest_block_is_kept_whatever_it_scores():
    scores = torch.tensor([[[9.0, 9.0, 8.0, 8.0, 7.0, -50.0]]])
    kept = select_candidate_blocks(scores, torch.tensor([[6]]), block_size=2, k=2)
    assert kept.tolist() == [[[0, 2]]]
    # Only the first entry of the last block is visible.
    scores = torch.tensor([[[9.0, 9.0, 8.0, 8.0, -50.0, -INF]]])
    assert select_candidate_blocks(scores, torch.tensor([[5]]), block_size=2, k=2).tolist() == [[[0, 2]]]
    assert select_candidate_blocks(scores, torch.tensor([[5]]), block_size=2, k=1).tolist() == [[[2]]]


def test_without_visible_entries_there_are_no_candidates():
    scores = torch.full((1, 2, 3), -INF)
    scores[0, 1, 0] = 0.0
    found = select_candidate_blocks(scores, torch.tensor([[0, 1]]), block_size=2, k=2)
    assert found.tolist() == [[[-1, -1], [0, -1]]]


def test_no_entries_at_all():
    found = select_candidate_blocks(torch.zeros(1, 3, 0), torch.tensor([[0, 0, 0]]), block_size=4, k=2)
    assert found.tolist() == [[[-1], [-1], [-1]]]


def test_padded_queries_may_stand_beyond_the_last_entry():
    # A padded query's position counts on: nothing that it is given matters, but it must not read out of range.
    scores = _random(1, 3, 5, dtype=torch.float32)
    found = select_candidate_blocks(scores, torch.tensor([[5, 6, 30]]), block_size=2, k=2)
    assert found.shape == (1, 3, 2) and int(found.max()) <= 2


def test_blocks_expand_to_their_entries():
    blocks = torch.tensor([[0, 3, -1]])
    assert expand_blocks(blocks, block_size=3).tolist() == [[0, 1, 2, 9, 10, 11, -1, -1, -1]]


# ---- attention -----------------------------------------------------------------------------------------------------------


def _problem(batch=2, length=4, heads=3, dim=6, slots=5, count=4, per_query=True, seed=1):
    generator = torch.Generator().manual_seed(seed)
    queries, window = _random(batch, length, heads, dim, seed=seed), _random(batch, slots, dim, seed=seed + 1)
    shape = (batch, length, count, dim) if per_query else (batch, count, dim)
    entries = _random(*shape, seed=seed + 2)
    window_mask = torch.rand(batch, length, slots, generator=generator) < 0.6
    entries_mask = torch.rand(batch, length, count, generator=generator) < 0.6
    return queries, window, window_mask, entries, entries_mask, _random(heads, seed=seed + 3)


@pytest.mark.parametrize("per_query", [True, False, None])
def test_attention_equals_a_float64_loop(per_query):
    queries, window, window_mask, entries, entries_mask, sinks = _problem(per_query=bool(per_query))
    window_mask[0, 0], entries_mask[0, 0] = False, False  # a query that sees nothing
    if per_query is None:
        entries, entries_mask = None, None
    found = attend_with_sinks(queries, window, window_mask, entries, entries_mask, sinks, scale=0.3)
    for b, t in itertools.product(range(2), range(4)):
        seen = [window[b, j] for j in range(5) if window_mask[b, t, j]]
        if entries is not None:
            own = entries[b, t] if per_query else entries[b]
            seen += [own[j] for j in range(4) if entries_mask[b, t, j]]
        for h in range(3):
            weights = [math.exp(0.3 * float(queries[b, t, h] @ kv)) for kv in seen]
            total = sum(weights) + math.exp(sinks[h])
            expected = sum((w / total * kv for w, kv in zip(weights, seen, strict=True)), torch.zeros(6).double())
            np.testing.assert_allclose(found[b, t, h], expected, atol=1e-14)
        stacked = np.array([kv.numpy() for kv in seen])
        oracle = attention.attend(queries[b, t].numpy(), stacked, sinks.numpy(), 0.3)
        np.testing.assert_allclose(found[b, t], oracle, atol=1e-14)
    assert not found[0, 0].any()


def test_the_sink_only_enters_the_denominator():
    queries, window, _, _, _, _ = _problem()
    everything = torch.ones(2, 4, 5, dtype=torch.bool)
    few = torch.full((3,), -1e4, dtype=torch.float64)
    plain = attend_with_sinks(queries, window, everything, None, None, few, scale=0.3)
    expected = torch.softmax(torch.einsum("bthd,bkd->bthk", queries, window) * 0.3, -1) @ window[:, None]
    np.testing.assert_allclose(plain, expected, atol=1e-14)
    large = attend_with_sinks(queries, window, everything, None, None, -few, scale=0.3)
    assert not large.any()


@pytest.mark.parametrize("shift", [-2000.0, 2000.0])
def test_large_logits_stay_finite(shift):
    queries, window, mask, entries, entries_mask, sinks = _problem()
    found = attend_with_sinks(queries * 1e4, window, mask, entries, entries_mask, sinks + shift, scale=1.0)
    assert found.isfinite().all()


def test_bfloat16_rounds_probabilities_and_accumulates_in_float32():
    queries, window, mask, _, _, sinks = (t if t.dtype == torch.bool else t.bfloat16() for t in _problem())
    mask[:] = True
    sinks = sinks.float()
    found = attend_with_sinks(queries, window, mask, None, None, sinks, scale=0.3)
    logits = torch.einsum("bthd,bkd->bthk", queries.float(), window.float()) * 0.3
    top = torch.maximum(logits.amax(-1), sinks)[..., None]
    weights = (logits - top).exp()
    total = weights.sum(-1, keepdim=True) + (sinks - top[..., 0]).exp()[..., None]
    expected = (weights.bfloat16().float() @ window.float()[:, None] / total).bfloat16()
    assert found.dtype == torch.bfloat16
    assert (found.float() - expected.float()).abs().max() <= 2**-8 * expected.float().abs().max()
    assert (found == expected).float().mean() > 0.97


@pytest.mark.parametrize("per_query", [True, False, None])
def test_gradients_of_attention(per_query):
    queries, window, window_mask, entries, entries_mask, sinks = _problem(1, 2, 2, 3, 3, 2, bool(per_query), seed=5)
    window_mask[0, 0, 0] = True
    if per_query is None:
        entries, entries_mask = None, None

    def attend(q, w, s, e=None):
        return attend_with_sinks(q, w, window_mask, e, entries_mask, s, scale=0.5)

    args = [t.requires_grad_() for t in (queries, window, sinks, entries) if t is not None]
    assert torch.autograd.gradcheck(attend, args)


def test_hidden_entries_get_no_gradient_and_no_influence():
    queries, window, window_mask, entries, entries_mask, sinks = _problem()
    window, entries = window.requires_grad_(), entries.requires_grad_()
    out = attend_with_sinks(queries, window, window_mask, entries, entries_mask, sinks, scale=0.3)
    out.sum().backward()
    assert not entries.grad[~entries_mask].any() and entries.grad[entries_mask].abs().sum() > 0
    unseen = ~window_mask.any(1)
    assert not window.grad[unseen].any()
    moved = torch.where(entries_mask[..., None], entries.detach(), 1e3)
    again = attend_with_sinks(queries, window.detach(), window_mask, moved, entries_mask, sinks, scale=0.3)
    assert torch.equal(again, out.detach())


def test_gradient_of_index_scores():
    args = [t.requires_grad_() for t in (_random(1, 2, 2, 3), _random(1, 4, 3, seed=2), _random(1, 2, 2, seed=3))]
    assert torch.autograd.gradcheck(index_scores, args)


def test_attention_is_float32_inside_autocast():
    queries, window = _random(1, 4, 2, 8, dtype=torch.float32), _random(1, 4, 8, dtype=torch.float32)
    args = queries, window, torch.ones(1, 4, 4, dtype=torch.bool), None, None, torch.zeros(2)
    expected = attend_with_sinks(*args, scale=0.5)
    assert expected.any()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(attend_with_sinks(*args, scale=0.5), expected)


# ---- what an indexer learns from -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_query", [False, True])
def test_attention_mass_is_the_share_of_each_entry_in_all_heads_together(per_query):
    queries, window, sinks = _random(1, 4, 3, 8), _random(1, 6, 8, seed=2), _random(3, seed=3)
    entries = _random(1, 4, 5, 8, seed=4) if per_query else _random(1, 5, 8, seed=4)
    window_mask = torch.ones(1, 4, 6, dtype=torch.bool)
    mask = torch.tensor([[[1, 1, 1, 1, 1], [1, 0, 1, 0, 0], [0, 0, 0, 0, 0], [0, 1, 1, 0, 1]]]).bool()
    found = attention_mass(queries, window, window_mask, entries, mask, sinks, scale=0.3)
    for t, j in itertools.product(range(4), range(5)):
        total = 0.0
        for h in range(3):
            own = entries[0, t] if per_query else entries[0]
            exps = [math.exp(0.3 * float(queries[0, t, h] @ own[i])) * bool(mask[0, t, i]) for i in range(5)]
            rest = sum(math.exp(0.3 * float(queries[0, t, h] @ key)) for key in window[0]) + math.exp(sinks[h])
            total += np.array(exps) / (sum(exps) + rest)
        expected = total[j] / total.sum() if mask[0, t].any() else 0.0
        assert abs(float(found[0, t, j]) - expected) < 1e-12


def test_divergence_is_the_written_out_sum_and_learns_from_scores_alone():
    scores, mass = _random(1, 3, 4).requires_grad_(), _random(1, 3, 4, seed=2).abs().requires_grad_()
    mask = torch.tensor([[[1, 1, 1, 1], [1, 0, 1, 0], [0, 0, 0, 0]]]).bool()
    target = (mass * mask) / (mass * mask).sum(-1, keepdim=True).clamp(min=1e-30)
    found = indexer_divergence(scores, target, mask)
    for t in range(3):
        chosen = mask[0, t].nonzero()[:, 0].tolist()
        total = sum(math.exp(float(scores[0, t, j])) for j in chosen)
        logs = {j: math.log(target[0, t, j]) - math.log(math.exp(float(scores[0, t, j])) / total) for j in chosen}
        assert abs(float(found[0, t]) - sum(float(target[0, t, j]) * log for j, log in logs.items())) < 1e-12
    found.sum().backward()
    assert mass.grad is None
    # d KL / d scores = softmax(scores) - mass, over the entries that are there.
    soft = torch.softmax(scores.detach().masked_fill(~mask, -INF), -1).nan_to_num()
    assert torch.allclose(scores.grad, (soft - target.detach()) * mask, atol=1e-12)
