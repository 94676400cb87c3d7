"""Training the DSpark drafter: with the backbone frozen, or beside it without a gradient into it.

At sampled anchors of each row the drafter drafts a block from the true token there; each position of the block learns the
true token that follows (base and Markov logits, the latter after the true token before), and the confidence learns how
likely a draft drawn there would be accepted: sum_v min(p(v), q(v)) for the model's p and the draft's q.

Sources: V4.1 report section 2.4.3 (which stages), contract section 12 (what is computed). The report does not give the
losses; these are the ones that the drafter's use asks for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from .cache import cache_codecs
from .dspark import Dsv4DSpark
from .sequence_layout import read_attention_mask

STAGES = ("frozen", "joint")


@dataclass(frozen=True)
class DraftTraining:
    r"""How a drafter is trained; give it to `Dsv4Trainer(draft_training=...)`, or call `apply`.

    Args:
        stage (`str`, *optional*, defaults to `"frozen"`): "frozen" trains the drafter alone; "joint" adds its losses to
            the model's, and no gradient of theirs reaches the backbone, embedding or head.
        anchors (`int`, *optional*): blocks drafted in each row and forward.
        base_weight, markov_weight, confidence_weight (`float`, *optional*): of the three losses.

    Raises:
        ValueError: for an unknown stage, fewer than one anchor or a negative weight.
    """

    stage: str = "frozen"
    anchors: int = 16
    base_weight: float = 1.0
    markov_weight: float = 1.0
    confidence_weight: float = 0.1

    def __post_init__(self):
        if self.stage not in STAGES:
            raise ValueError(f"stage is {self.stage!r}; accepted: {STAGES}.")
        if not isinstance(self.anchors, int) or self.anchors < 1:
            raise ValueError(f"anchors is {self.anchors!r}; accepted: an integer >= 1.")
        for name in ("base_weight", "markov_weight", "confidence_weight"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)!r}; accepted: a number >= 0.")

    def apply(self, model: nn.Module) -> None:
        """Let `model`, a class with a head and a DSpark drafter, train so; frozen, only the drafter keeps gradients."""
        if not isinstance(model.drafter, Dsv4DSpark):
            raise ValueError("draft_training is given for a model without a DSpark drafter; accepted: None.")
        model.draft_training = self
        if self.stage == "frozen":
            model.requires_grad_(False)
            for parameter in model.drafter.parameters():
                parameter.requires_grad_(parameter.dtype.itemsize > 1)  # packed weights stay frozen

    def total(self, losses: DraftLosses) -> torch.Tensor:
        """The weighted sum of the losses."""
        weights = self.base_weight, self.markov_weight, self.confidence_weight
        return sum(weight * loss for weight, loss in zip(weights, losses, strict=True))


class DraftLosses(NamedTuple):
    """Scalars: cross entropy of base and of Markov logits, binary cross entropy of the confidence."""

    base: torch.Tensor
    markov: torch.Tensor
    confidence: torch.Tensor


class DraftBatch(NamedTuple):
    r"""Tokens of a training forward, all `[B, S]` in the caller's columns.

    ids, labels (int64, -100 = no loss), positions (int64: in the document), real (bool). Documents that are packed into a
    row begin anew at position 0.
    """

    ids: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor
    real: torch.Tensor

    @classmethod
    def make(cls, ids, labels, attention_mask=None, position_ids=None) -> DraftBatch:
        """Read a batch from the arguments of `forward`; positions count the real tokens of a row unless given."""
        real = read_attention_mask(attention_mask, *ids.shape, 0, None)
        real = torch.ones_like(ids, dtype=torch.bool) if real is None else real
        positions = (real.cumsum(-1) - 1).clamp(min=0) if position_ids is None else position_ids.expand_as(ids)
        return cls(ids, labels, positions, real)

    @property
    def starts(self) -> torch.Tensor:
        """Column of the first token of each token's document, `[B, S]`."""
        return torch.arange(self.ids.shape[1], device=self.ids.device) - self.positions

    def learns(self, columns: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        """Whether the tokens in `columns` `[B, ...]` are learned from blocks that begin at `anchors` (same shape)."""
        inside = (columns < self.ids.shape[1]) & (columns > anchors)
        columns = columns.clamp(max=self.ids.shape[1] - 1)
        same = take(self.starts, columns) == take(self.starts, anchors)
        return inside & same & take(self.real, columns) & (take(self.labels, columns) != -100)


def take(x: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Return `x[b, columns[b, ...]]` of `x` `[B, S, ...]`."""
    rows = torch.arange(len(x), device=x.device).view(-1, *[1] * (columns.ndim - 1))
    return x[rows, columns]


def sample_anchors(batch: DraftBatch, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Draw anchors among the real tokens whose successor is learned, without repetition.

    Returns:
        columns `[B, count]` int64, and which of them stand for an anchor `[B, count]` (rows may have fewer).
    """
    columns = torch.arange(batch.ids.shape[1], device=batch.ids.device).expand_as(batch.ids)
    possible = batch.learns(columns + 1, columns) & batch.real
    order = torch.rand(possible.shape, device=possible.device).masked_fill(~possible, -1.0)
    chosen = order.topk(min(count, possible.shape[1]), dim=-1)
    return chosen.indices, chosen.values >= 0


def draft_losses(
    drafter: Dsv4DSpark,
    embed: Callable[[torch.Tensor], torch.Tensor],
    head: Callable[[torch.Tensor], torch.Tensor],
    features: torch.Tensor,
    model_logits: torch.Tensor,
    batch: DraftBatch,
    anchors: tuple[torch.Tensor, torch.Tensor],
    num_items_in_batch: torch.Tensor | int | None = None,
) -> DraftLosses:
    r"""Return the losses of blocks at given anchors.

    A row's loss is its mean over targets times its number of labels, and the sum is divided by the labels of the whole
    batch: one batch equals its rows in several accumulated forwards.

    Args:
        drafter (`Dsv4DSpark`). embed, head: the model's; nothing is learned through them.
        features (`torch.Tensor` of shape `[B, S, targets * H]`): what the drafter reads of the backbone.
        model_logits (`torch.Tensor` of shape `[B, S, V]`): the backbone's.
        batch (`DraftBatch`). anchors: from `sample_anchors`.
        num_items_in_batch (*optional*): labels of the whole batch, when this call is a part of it.
    """
    columns, is_anchor = anchors
    window, size, config = drafter.config.sliding_window, drafter.block_size, drafter.config
    device = columns.device
    entries = cache_codecs(config)["window"].rounded(drafter.make_entries(features.detach(), batch.positions))
    seen = columns[..., None] - window + torch.arange(window, device=device)
    exists = seen >= take(batch.starts, columns)[..., None]
    states = drafter.run_block(
        embed(drafter.block_ids(take(batch.ids, columns).flatten())),
        take(batch.positions, columns).flatten(),
        take(entries, seen.clamp(min=0)).flatten(0, 1),
        exists.flatten(0, 1),
    )
    before = (columns[..., None] + torch.arange(size, device=device)).clamp(max=batch.ids.shape[1] - 1)
    valid = batch.learns(
        columns[..., None] + 1 + torch.arange(size, device=device), columns[..., None].expand_as(before)
    )
    valid = valid & is_anchor[..., None]
    previous, targets = take(batch.ids, before).flatten(0, 1), _after(batch.labels, before).flatten(0, 1)
    base = head(drafter[-1].norm(states))
    drafted = drafter.markov_logits(base, previous)
    with torch.no_grad():
        own = take(model_logits, before).flatten(0, 1).softmax(-1)
        accepted = torch.minimum(own, drafted.softmax(-1)).sum(-1)
    targets = targets.masked_fill(~valid.flatten(0, 1), -100)
    confidence = drafter.confidence_logits(states, previous)
    parts = (
        F.cross_entropy(base.flatten(0, 1), targets.flatten(), reduction="none"),
        F.cross_entropy(drafted.flatten(0, 1), targets.flatten(), reduction="none"),
        F.binary_cross_entropy_with_logits(confidence, accepted.to(confidence.dtype), reduction="none").flatten(),
    )
    labels = (batch.labels[:, 1:] != -100).sum(-1)
    weights = labels / valid.sum((1, 2)).clamp(min=1)
    weights = (weights[:, None, None] * valid).flatten() / (num_items_in_batch or labels.sum().clamp(min=1))
    return DraftLosses(*((part * weights).sum() for part in parts))


def _after(labels: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Labels of the columns after `columns`; of the last one, none."""
    return take(F.pad(labels, (0, 1), value=-100), columns + 1)


def detached(module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """`module` as a function whose parameters receive no gradient."""
    frozen = {name: parameter.detach() for name, parameter in module.named_parameters()}
    return lambda x: functional_call(module, frozen, (x,))
