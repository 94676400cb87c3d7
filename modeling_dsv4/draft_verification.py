"""Which drafts are accepted, so that the result is that of decoding without drafts.

Greedy: the drafts that the model would have chosen too. Sampling: draft x is kept with probability min(1, p(x) / q(x));
at the first rejection a token is drawn from max(p - q, 0), after the last accepted draft one from p. The tokens then have
the distribution p exactly (Leviathan et al. 2023, algorithm 1).
"""

from __future__ import annotations

import torch
from transformers import LogitsProcessorList


def accept_drafts(
    scores: torch.Tensor, drafts: torch.Tensor, draft_scores: torch.Tensor | None
) -> tuple[torch.Tensor, int]:
    r"""Return the tokens that a row gains.

    Args:
        scores (`torch.Tensor` of shape `[K + 1, V]`, float32): the model's, processed, at the drafts and after them.
        drafts (`torch.Tensor` of shape `[K]`, int64).
        draft_scores (`torch.Tensor` of shape `[K, V]`, float32, *optional*): whose softmax the drafts were drawn from;
            `None` decodes greedily.

    Returns:
        tokens `[n + 1]` int64 and n: the accepted drafts and one token more.
    """
    if draft_scores is None:
        chosen = scores.argmax(-1)
        matches = int((chosen[:-1] == drafts).cumprod(0).sum())
        return chosen[: matches + 1], matches
    target, proposal = scores.softmax(-1), draft_scores.softmax(-1)
    places = torch.arange(len(drafts), device=drafts.device)
    ratio = target[places, drafts] / proposal[places, drafts]
    matches = int((torch.rand_like(ratio) < ratio).cumprod(0).sum())
    rest = target[matches]
    if matches < len(drafts):
        excess = (rest - proposal[matches]).clamp(min=0)
        rest = torch.where(excess.sum() > 0, excess, rest)  # equal up to rounding
    return torch.cat([drafts[:matches], torch.multinomial(rest, 1)]), matches


def draw(scores: torch.Tensor, do_sample: bool) -> torch.Tensor:
    """Return a token per row of `scores` `[B, V]`: the best one, or one drawn from their softmax."""
    return torch.multinomial(scores.softmax(-1), 1)[:, 0] if do_sample else scores.argmax(-1)


def process_rows(
    processor: LogitsProcessorList, rows: list[torch.Tensor], scores: torch.Tensor, active: list[bool], pad: int
) -> torch.Tensor:
    r"""Apply logits processors to rows of different length.

    A processor may be bound to the number of rows and to the columns of the prompt, so it sees the whole batch once per
    length, cut or filled to it; only rows that have this length are kept.

    Args:
        rows (list of `torch.Tensor` `[length]`, int64): everything before the token that is scored, with left padding.
        scores (`torch.Tensor` of shape `[B, V]`, float32). active: rows that matter. pad (`int`): fills shorter rows.

    Returns:
        `torch.Tensor` of shape `[B, V]`.
    """
    if not processor:
        return scores
    processed = scores.clone()
    for length in sorted({len(row) for row, wanted in zip(rows, active, strict=True) if wanted}):
        ids = scores.new_full((len(rows), length), pad, dtype=torch.long)
        for target, row in zip(ids, rows, strict=True):
            target[: len(row)] = row[:length]
        result = processor(ids, scores.clone())
        chosen = torch.tensor([len(row) == length for row in rows], device=scores.device)
        processed = torch.where(chosen[:, None], result, processed)
    return processed
