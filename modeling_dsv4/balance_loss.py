"""The sequence-wise balance loss: a weak pull against extreme imbalance of expert loads within one sequence.

Source: V4 report section 2.1 (alpha = 1e-4); the biases that balance loads over batches are the router's.
"""

from __future__ import annotations

import torch

from .moe import expert_scores
from .sparse_attention import wide


def sequence_balance(
    logits: torch.Tensor, indices: torch.Tensor, real: torch.Tensor, *, normalize: bool = False
) -> torch.Tensor:
    r"""Return sum_i f_i P_i of every sequence.

    Implements V4 report section 2.1: f_i is the share of the sequence's tokens that are routed to expert i, P_i the mean
    of s_i / sum_j s_j over its tokens, s the scores of `expert_scores`.

    Args:
        logits (`torch.Tensor` of shape `[B, S, E]`, float32): of the router. Gradients flow through P alone.
        indices (`torch.Tensor` of shape `[B, S, k]`, int64): experts of each token.
        real (`torch.Tensor` of shape `[B, S]`, bool): tokens that are no padding.
        normalize (`bool`, *optional*, defaults to `False`): multiply f_i by E / k as DeepSeek-V3 does, so that a balanced
            sequence gives 1.

    Returns:
        `torch.Tensor` of shape `[B]`, float32 (float64 for float64 logits).
    """
    scores = expert_scores(wide(logits))
    real = real[..., None].to(scores.dtype)
    tokens = real.sum(1).clamp(min=1)
    shares = (scores / scores.sum(-1, keepdim=True) * real).sum(1) / tokens
    picked = torch.zeros_like(scores).scatter(-1, indices, 1.0)
    frequencies = (picked * real).sum(1) / tokens
    if normalize:
        frequencies = frequencies * (logits.shape[-1] / indices.shape[-1])
    return (frequencies * shares).sum(-1)


def mean_over_labels(values: torch.Tensor, labels: torch.Tensor, total: torch.Tensor | int | None) -> torch.Tensor:
    r"""Return the mean of values of positions over those with a label, so that it adds up over micro-batches.

    Labels and their number may lie on another device than the values.

    Args:
        values (`torch.Tensor` of shape `[B, S]`): such as the balance of each position's sequence.
        labels (`torch.Tensor` of shape `[B, S]`, int64): label of each position, already shifted; -100 does not count.
        total (*optional*): labels of the whole batch, if these are a part of it.

    Returns:
        `torch.Tensor`, scalar.
    """
    counted = (labels != -100).to(values)
    total = counted.sum().clamp(min=1) if total is None else torch.as_tensor(total, device=values.device)
    return (values * counted).sum() / total
