"""Reference maths of compressed sparse attention: pooling, index scores, selection, candidates, attention.

Pure functions on tensors; no module, no config, no cache. Entries are compressed key-values (key = value, one head);
entry j of a layer with ratio r stands for tokens j * r to j * r + r - 1 of its row and is visible to a query at
position t if j < (t + 1) // r.

Sums and softmax run in float32 (float64 for float64 inputs); what the release rounds to bfloat16 is rounded to the
dtype of the inputs here (contract section 6.2).
"""

from __future__ import annotations

from contextlib import nullcontext

import torch


def wide(x: torch.Tensor) -> torch.Tensor:
    """Return `x` in float32, or unchanged if it is float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def full_precision(x: torch.Tensor):
    """Context in which products with `x` keep the dtype of their operands, also inside `torch.autocast`."""
    kind = x.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return nullcontext()


def pool_groups(values: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    r"""Pool the tokens of each group by a softmax over the group, channel by channel (contract section 6.1).

    Args:
        values (`torch.Tensor` of shape `[..., R, D]`, float32): R sources of a group.
        gates (`torch.Tensor` of shape `[..., R, D]`, float32): logits; -inf leaves a source out.

    Returns:
        `torch.Tensor` of shape `[..., D]`, dtype of `values`.
    """
    return (values * gates.softmax(dim=-2)).sum(dim=-2)


def hadamard_rotate(x: torch.Tensor) -> torch.Tensor:
    r"""Multiply the last axis by the orthonormal Hadamard matrix (V4 index queries and keys, contract spec_v4 item 9).

    Args:
        x (`torch.Tensor` of shape `[..., D]`, any float dtype, D a power of two).

    Returns:
        `torch.Tensor` of the shape and dtype of `x`; sums in float32 or wider, divided by sqrt(D).
    """
    size, width = x.shape[-1], 1
    out = wide(x)
    while width < size:
        low, high = out.unflatten(-1, (-1, 2, width)).unbind(-2)
        out = torch.stack([low + high, low - high], dim=-2).flatten(-3)
        width *= 2
    return (out * size**-0.5).to(x.dtype)


def index_scores(queries: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    r"""Score entries for queries:  sum over heads of relu(q_h . k_j) * w_h  (contract section 6.2).

    Args:
        queries (`torch.Tensor` of shape `[B, T, Hi, Di]`).
        keys (`torch.Tensor` of shape `[B, C, Di]`, the same keys for every query, or `[B, T, C, Di]`).
        weights (`torch.Tensor` of shape `[B, T, Hi]`).

    Returns:
        `torch.Tensor` of shape `[B, T, C]`, dtype of `queries`: the dot product, the product with the weight and the
        head sum are each rounded to it.
    """
    if keys.ndim == 3:
        dots = (queries.flatten(1, 2) @ keys.mT).unflatten(1, queries.shape[1:3])
    else:
        dots = queries @ keys.mT
    return (dots.relu() * weights[..., None]).sum(dim=2)


def select_topk(scores: torch.Tensor, k: int) -> torch.Tensor:
    r"""Return the k best columns: score descending, then the lower column; columns of score -inf never.

    Args:
        scores (`torch.Tensor` of shape `[..., C]`, any float dtype).
        k (`int`): columns wanted.

    Returns:
        `torch.Tensor` of shape `[..., min(k, C)]`, int64: columns ascending, -1 (at the end) where there is none.
    """
    count = scores.shape[-1]
    possible = scores > float("-inf")
    if count > k:
        last = scores.topk(k, dim=-1).values[..., -1:]
        better, equal = scores > last, scores == last
        room = k - better.sum(-1, keepdim=True)
        possible &= better | (equal & (equal.cumsum(-1) <= room))
    columns = torch.arange(count, device=scores.device).expand_as(scores)
    chosen = torch.where(possible, columns, count).topk(min(k, count), dim=-1, largest=False, sorted=True).values
    return torch.where(chosen == count, -1, chosen)


def select_candidate_blocks(scores: torch.Tensor, visible: torch.Tensor, *, block_size: int, k: int) -> torch.Tensor:
    r"""Return the blocks of entries in which later layers may select (contract section 6.3; report section 2.3.2).

    A block's score is the best score in it; the block of the newest visible entry is always kept.

    Args:
        scores (`torch.Tensor` of shape `[B, T, C]`): index scores, -inf where not visible.
        visible (`torch.Tensor` of shape `[B, T]`, int64): visible entries of each query.
        block_size (`int`): consecutive entries of a block.
        k (`int`): blocks kept.

    Returns:
        `torch.Tensor` of shape `[B, T, min(k, ceil(C / block_size))]` (one block if C is 0), int64: blocks ascending, -1
        where there is none.
    """
    # At least one block, so that a call without any entry is no special case.
    padding = max(-(-scores.shape[-1] // block_size), 1) * block_size - scores.shape[-1]
    padded = torch.nn.functional.pad(scores, (0, padding), value=float("-inf"))
    best = padded.unflatten(-1, (-1, block_size)).amax(-1)
    # The position of a padded query may lie beyond the last entry.
    newest = ((visible - 1) // block_size).clamp(0, best.shape[-1] - 1)[..., None]
    pinned = torch.where(visible[..., None] > 0, torch.inf, best.gather(-1, newest).to(torch.float32)).to(best.dtype)
    return select_topk(best.scatter(-1, newest, pinned), k)


def expand_blocks(blocks: torch.Tensor, *, block_size: int) -> torch.Tensor:
    """Return the entries of blocks `[..., K]` as `[..., K * block_size]`, ascending, -1 for the entries of block -1."""
    entries = blocks[..., None] * block_size + torch.arange(block_size, device=blocks.device)
    return torch.where(blocks[..., None] < 0, -1, entries).flatten(-2)


def attend_with_sinks(
    queries: torch.Tensor,
    window: torch.Tensor,
    window_mask: torch.Tensor,
    entries: torch.Tensor | None,
    entries_mask: torch.Tensor | None,
    sinks: torch.Tensor,
    *,
    scale: float,
) -> torch.Tensor:
    r"""Attend to window entries and compressed entries in one softmax with a sink per head.

    Implements contract section 6:  o = sum_j p_j kv_j / (sum_j p_j + exp(sink - m)),  p_j = exp(scale q . kv_j - m).
    Keys are values. Probabilities are rounded to the dtype of `queries` before the product, as in the release.

    Args:
        queries (`torch.Tensor` of shape `[B, T, H, D]`).
        window (`torch.Tensor` of shape `[B, W, D]`): the same for all queries of the tile.
        window_mask (`torch.Tensor` of shape `[B, T, W]`, bool): True = attend.
        entries (`torch.Tensor` of shape `[B, T, K, D]` (a selection per query) or `[B, C, D]` (the same), or `None`).
        entries_mask (`torch.Tensor` of shape `[B, T, K or C]`, bool, or `None`).
        sinks (`torch.Tensor` of shape `[H]`, float32): logits that only enter the denominator.
        scale (`float`): of the logits.

    Returns:
        `torch.Tensor` of shape `[B, T, H, D]`, dtype of `queries`; zeros where nothing may be attended.
    """
    weights, total = _softmax_parts(queries, window, window_mask, entries, entries_mask, sinks, scale)
    out = sum(_weighted(part.to(queries.dtype), kv) for part, kv in zip(weights, (window, entries), strict=False))
    return (out / total[..., None]).to(queries.dtype)


def attention_mass(queries, window, window_mask, entries, entries_mask, sinks, *, scale: float) -> torch.Tensor:
    r"""Return how the attention of `attend_with_sinks` to compressed entries is spread over them, all heads together.

    Args:
        as in `attend_with_sinks`.

    Returns:
        `torch.Tensor` of shape `[B, T, K or C]`, float32 or wider: sums to 1 over the entries, or is 0 where there are none.
    """
    (_, weights), total = _softmax_parts(queries, window, window_mask, entries, entries_mask, sinks, scale)
    mass = (weights / total[..., None]).sum(dim=2)
    return mass / mass.sum(-1, keepdim=True).clamp(min=torch.finfo(mass.dtype).tiny)


def _softmax_parts(queries, window, window_mask, entries, entries_mask, sinks, scale):
    """Unnormalised weights `[B, T, H, W]` and `[B, T, H, K or C]`, and their sum with the sinks `[B, T, H]`."""
    logits = [_logits(queries, window, window_mask, scale)]
    if entries is not None:
        logits.append(_logits(queries, entries, entries_mask, scale))
    sinks = sinks.to(logits[0].dtype)
    # The result does not depend on this shift, so no gradient needs to pass through it.
    top = torch.maximum(torch.cat(logits, dim=-1).amax(-1), sinks).detach()
    weights = [(part - top[..., None]).exp() for part in logits]
    return weights, sum(part.sum(-1) for part in weights) + (sinks - top).exp()


def indexer_divergence(scores: torch.Tensor, mass: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    r"""Return KL(mass || softmax(scores)) of every query, with which an indexer learns to score as its layer attends.

    Args:
        scores (`torch.Tensor` of shape `[B, T, K]`, any float dtype): index scores.
        mass (`torch.Tensor` of shape `[B, T, K]`): from `attention_mass`; no gradient flows to it.
        mask (`torch.Tensor` of shape `[B, T, K]`, bool): entries that are there.

    Returns:
        `torch.Tensor` of shape `[B, T]`, float32 or wider; 0 where no entry is there.
    """
    scores = wide(scores).masked_fill(~mask, torch.finfo(wide(scores).dtype).min)
    mass = mass.detach().to(scores.dtype)
    divergence = torch.special.xlogy(mass, mass) - mass * scores.log_softmax(dim=-1)
    return divergence.masked_fill(~mask, 0.0).sum(-1)


def _logits(queries, keys, mask, scale):
    """`[B, T, H, D]` x `[B, K, D]` or `[B, T, K, D]` -> masked logits `[B, T, H, K]` in float32 or wider."""
    with full_precision(queries):
        if keys.ndim == 3:
            dots = (wide(queries).flatten(1, 2) @ wide(keys).mT).unflatten(1, queries.shape[1:3])
        else:
            dots = wide(queries) @ wide(keys).mT
    return (dots * scale).masked_fill(~mask[:, :, None], float("-inf"))


def _weighted(weights, values):
    """`[B, T, H, K]` x `[B, K, D]` or `[B, T, K, D]` -> `[B, T, H, D]` in float32 or wider."""
    with full_precision(weights):
        if values.ndim == 3:
            return (wide(weights).flatten(1, 2) @ wide(values)).unflatten(1, weights.shape[1:3])
        return wide(weights) @ wide(values)
