"""Rotary embedding, compressed entries, selection and attention of V4.1 in float64 loops (contract sections 5 and 6)."""

import math

import numpy as np

from .mhc import softmax


def frequencies(config, compressed_layer):
    """Return the rotary frequencies [rotary dims / 2], float32, of a window-only or a compressed layer.

    Every step is rounded to float32, as 1 / theta^(2i / d) is computed in practice: the correctly rounded theta^(-2i / d) is
    another float32 number for some i, which moves an angle by enough to change an FP8 code (golden text_100).
    """
    one, width = np.float32(1), config["qk_rope_head_dim"]
    theta = config["compress_rope_theta"] if compressed_layer else config["rope_theta"]
    exponents = [np.float32(2 * i) / np.float32(width) for i in range(width // 2)]
    plain = [one / np.float32(theta ** float(e)) for e in exponents]
    if not compressed_layer:
        return np.array(plain, dtype=np.float32)
    low, high = yarn_range(config, theta)
    factor, result = np.float32(config["rope_scaling"]["factor"]), []
    for i, f in enumerate(plain):
        ramp = np.float32(min(max((i - low) / max(high - low, 1e-3), 0.0), 1.0))
        result.append(f / factor * ramp + f * (one - ramp))
    return np.array(result, dtype=np.float32)


def yarn_range(config, theta):
    """Return (low, high): the frequency indices between which YaRN passes from unchanged to divided by its factor."""
    yarn, width = config["rope_scaling"], config["qk_rope_head_dim"]

    def index(rotations):
        length = yarn["original_max_position_embeddings"]
        return width * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    return max(math.floor(index(yarn["beta_fast"])), 0), min(math.ceil(index(yarn["beta_slow"])), width - 1)


def rotate(x, position, freqs, inverse=False):
    """Return x [..., d] with its last channels rotated as adjacent pairs; the angle is a float32 product."""
    result = np.array(x, dtype=np.float64)
    start = result.shape[-1] - 2 * len(freqs)
    for i, f in enumerate(freqs):
        angle = float(np.float32(position) * f)
        cos, sin = math.cos(angle), math.sin(angle) * (-1 if inverse else 1)
        a, b = result[..., start + 2 * i].copy(), result[..., start + 2 * i + 1].copy()
        result[..., start + 2 * i] = a * cos - b * sin
        result[..., start + 2 * i + 1] = a * sin + b * cos
    return result


def rotate_all(x, positions, freqs):
    """Return x [S, ..., d] with every row rotated to its own position."""
    return np.array([rotate(row, p, freqs) for row, p in zip(x, positions, strict=True)]).reshape(x.shape)


def pool_groups(values, gates, ratio):
    """Return the pooled latents [S // ratio, c]: per channel a softmax of the gates over the tokens of a group."""
    groups = values.shape[0] // ratio
    result = np.zeros((groups, values.shape[1]))
    for j in range(groups):
        group = slice(j * ratio, (j + 1) * ratio)
        result[j] = (softmax(gates[group], axis=0) * values[group]).sum(axis=0)
    return result


def visible_count(position, ratio):
    """Return how many compressed entries the query at this position (counted from 0) sees."""
    return (position + 1) // ratio


def index_scores(queries, keys, weights):
    """Return the scores [C] of one query token: sum over heads of relu(q_h . k_j) * w_h."""
    return np.maximum(queries @ keys.T, 0).T @ weights


def best(scores, count):
    """Return at most `count` positions by score descending, then the lower position; -inf is never taken."""
    order = sorted((j for j in range(len(scores)) if scores[j] > -np.inf), key=lambda j: (-scores[j], j))
    return order[:count]


def candidate_positions(scores, block_size, block_count):
    """Return the candidate positions (sorted) of one query from the scores [visible] of the candidate source layer.

    Blocks of consecutive entries are ranked by their largest score; the block of the newest visible entry always stays.
    """
    if len(scores) == 0:
        return []
    starts = range(0, len(scores), block_size)
    block_scores = [max(scores[start : start + block_size]) for start in starts]
    block_scores[-1] = np.inf
    kept = best(block_scores, block_count)
    return sorted(j for b in kept for j in range(b * block_size, min((b + 1) * block_size, len(scores))))


def attend(queries, entries, sinks, scale):
    """Return the attention output [H, c] of one token over entries [K, c], which are keys and values alike.

    The sink of a head adds exp(sink) to the denominator and nothing to the sum; no entry at all gives zeros.
    """
    result = np.zeros_like(queries)
    if len(entries) == 0:
        return result
    for h in range(len(queries)):
        logits = entries @ queries[h] * scale
        top = max(logits.max(), sinks[h])
        weights = np.exp(logits - top)
        result[h] = weights @ entries / (weights.sum() + math.exp(sinks[h] - top))
    return result


def grouped_output(heads, wo_a, groups):
    """Return the low-rank output [groups * rank] of heads [H, c]: group g maps its own heads with its own rows of wo_a."""
    parts, rank = heads.reshape(groups, -1), wo_a.shape[0] // groups
    return np.concatenate([wo_a[g * rank : (g + 1) * rank] @ parts[g] for g in range(groups)])
