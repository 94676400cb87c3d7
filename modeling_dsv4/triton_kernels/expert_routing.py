"""The choice and the weights of experts, from the router's logits to both in one launch.

Sources: contract section 7, `modeling_dsv4/moe.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _route_kernel(
    logits,
    bias,
    weights,
    indices,
    experts,
    bias_stride,
    scaling,
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    NORMALIZE: tl.constexpr,
    BE: tl.constexpr,
):
    token = tl.program_id(0)
    e = tl.arange(0, BE)
    logit = tl.load(logits + token * experts + e, mask=e < experts, other=0.0)
    # log(1 + u) * u / ((1 + u) - 1) is log1p(u) to rounding; linear above 20, as PyTorch's softplus.
    u = tl.exp(tl.minimum(logit, 20.0))
    one_more = 1.0 + u
    small = one_more == 1.0
    softplus = tl.where(small, u, tl.log(one_more) * (u / tl.where(small, 1.0, one_more - 1.0)))
    score = tl.sqrt_rn(tl.where(logit > 20.0, logit, softplus))
    key = score + tl.load(bias + token * bias_stride + e, mask=e < experts, other=0.0)
    free = e < experts
    slot = tl.arange(0, SLOTS)
    chosen = tl.zeros([SLOTS], tl.int32)
    chosen_score = tl.zeros([SLOTS], tl.float32)
    for turn in tl.static_range(K):
        best = tl.max(tl.where(free, key, float("-inf")))
        expert = tl.min(tl.where(free & (key == best), e, experts))
        chosen = tl.where(slot == turn, expert, chosen)
        chosen_score = tl.where(slot == turn, tl.sum(tl.where(e == expert, score, 0.0)), chosen_score)
        free = free & (e != expert)
    if NORMALIZE:
        chosen_score = chosen_score / (tl.sum(chosen_score) + 1e-20)
    tl.store(weights + token * K + slot, chosen_score * scaling, mask=slot < K)
    tl.store(indices + token * K + slot, chosen.to(tl.int64), mask=slot < K)


def route_tokens(
    logits: torch.Tensor, bias: torch.Tensor, *, k: int, normalize: bool, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Choose and weight the experts of each token (contract section 7).

    Args:
        logits (`torch.Tensor` of shape `[N, E]`, float32).
        bias (`torch.Tensor` of shape `[N, E]` or `[E]`, float32): enters the choice only.
        k (`int`): experts per token. normalize (`bool`): divide by the sum. scaling (`float`): factor of the weights.

    Returns:
        weights (`[N, k]`, float32) and indices (`[N, k]`, int64), by score + bias descending, ties: the lower expert.
    """
    n, e = logits.shape
    weights = torch.empty(n, k, dtype=torch.float32, device=logits.device)
    indices = torch.empty(n, k, dtype=torch.int64, device=logits.device)
    if n:
        slots, padded = triton.next_power_of_2(k), triton.next_power_of_2(e)
        stride = e if bias.ndim == 2 else 0
        _route_kernel[(n,)](
            logits.contiguous(),
            bias.contiguous(),
            weights,
            indices,
            e,
            stride,
            scaling,
            k,
            slots,
            normalize,
            padded,
            num_warps=4,
        )
    return weights, indices
