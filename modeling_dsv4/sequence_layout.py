"""Row layout: where the real tokens of each row are, for any padding and for packed documents.

A batch arrives with padding on the left, on the right or nowhere. Inside the model every row is shifted so that its new
tokens start at column 0 and padding comes last; position, group and window of a token then follow from its column and
from how many tokens of the row came before, and every row equals its run alone. Documents that were packed one behind the
other get a row each. Outputs are shifted back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class SequenceLayout:
    r"""The tokens of one forward call.

    Args:
        past (`torch.Tensor` of shape `[B]`, int64): real tokens of each row before this call.
        new (`torch.Tensor` of shape `[B]`, int64): real tokens of each row in this call.
        columns (`int`): columns of the call, padding included (S).
        order (`torch.Tensor` of shape `[B, S]`, int64, or `None`): which of the caller's B * S places each column comes
            from; `None` if unchanged.
        inverse (`torch.Tensor`, int64, or `None`): which column each of the caller's places went to, in the caller's shape.
        is_ragged (`bool`): whether rows differ in `new`.
        floor (`torch.Tensor` of shape `[B]`, int64, or `None`): position before which a window holds nothing; `None` = 0.
        is_static (`bool`): whether no shape may depend on values: a step of decoding in a cache of fixed capacity.
        is_whole (`bool`): whether the host knows that no row has a past or padding, so that shapes follow from `columns`.
    """

    past: torch.Tensor
    new: torch.Tensor
    columns: int
    order: torch.Tensor | None = None
    inverse: torch.Tensor | None = None
    is_ragged: bool = False
    floor: torch.Tensor | None = None
    is_static: bool = False
    is_whole: bool = False

    @classmethod
    def from_mask(
        cls, valid: torch.Tensor | None, past: torch.Tensor, columns: int, *, begins: bool = False
    ) -> SequenceLayout:
        r"""Make the layout of a call.

        Args:
            valid (`torch.Tensor` of shape `[B, S]`, bool, or `None`): real tokens; `None` when all are.
            past (`torch.Tensor` of shape `[B]`, int64): real tokens of each row before this call.
            columns (`int`): columns of the call.
            begins (`bool`, *optional*, defaults to `False`): whether `past` is known to be 0.
        """
        if valid is None:
            return cls(past, torch.full_like(past, columns), columns, is_whole=begins)
        new = valid.sum(-1)
        order = torch.argsort(~valid, dim=-1, stable=True)
        is_ragged = bool((new != columns).any())
        if torch.equal(order, torch.arange(columns, device=order.device).expand_as(order)):
            return cls(past, new, columns, is_ragged=is_ragged)
        first = torch.arange(len(order), device=order.device)[:, None] * columns
        return cls(past, new, columns, first + order, first + torch.argsort(order, dim=-1), is_ragged)

    @classmethod
    def from_documents(cls, position_ids: torch.Tensor, valid: torch.Tensor) -> SequenceLayout:
        r"""Make the layout of rows that hold several documents each: every document is a row of its own, as if it came alone.

        Args:
            position_ids (`torch.Tensor` of shape `[B, S]`, int64): positions that restart at 0 with every document.
            valid (`torch.Tensor` of shape `[B, S]`, bool): real tokens.

        Raises:
            ValueError: if the real tokens of a document do not count from 0.
        """
        source = valid.flatten().nonzero()[:, 0]
        position, row = position_ids.flatten()[source], source // valid.shape[1]
        document = (position == 0).cumsum(0) - 1
        follows = (position[1:] == position[:-1] + 1) & (row[1:] == row[:-1])
        if not bool((follows | (position[1:] == 0)).all()) or bool((position[:1] != 0).any()):
            raise ValueError(
                "position_ids must count the real tokens of each row from 0 (after the cached ones), or of each packed "
                "document from 0."
            )
        new = document.bincount()
        columns = int(new.max())
        order = new.new_zeros(len(new), columns).index_put((document, position), source)
        inverse = torch.zeros_like(position_ids).flatten().index_put((source,), document * columns + position)
        is_ragged = bool((new != columns).any())
        return cls(torch.zeros_like(new), new, columns, order, inverse.view_as(position_ids), is_ragged)

    @property
    def is_packed(self) -> bool:
        """Whether rows of the caller hold several documents."""
        return self.order is not None and self.order.shape != self.inverse.shape

    @property
    def lengths(self) -> torch.Tensor:
        """Real tokens of each row after this call, `[B]` int64."""
        return self.past + self.new

    @property
    def position_ids(self) -> torch.Tensor:
        """Position of every (shifted) column, `[B, S]` int64; columns of padding continue the count."""
        return self.past[:, None] + torch.arange(self.columns, device=self.past.device)

    @property
    def real(self) -> torch.Tensor:
        """Which (shifted) columns hold real tokens, `[B, S]` bool."""
        return torch.arange(self.columns, device=self.new.device) < self.new[:, None]

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> SequenceLayout:
        """Return the layout on `device`; a model that is spread over devices hands it on so."""
        tensors = {name: getattr(self, name) for name in ("past", "new", "order", "inverse", "floor")}
        return replace(
            self, **{k: None if t is None else t.to(device, non_blocking=non_blocking) for k, t in tensors.items()}
        )

    def shift(self, x: torch.Tensor) -> torch.Tensor:
        """Move the real tokens of the caller's `[B, S, ...]` to the front of their rows."""
        return x if self.order is None else x.flatten(0, 1)[self.order.to(x.device)]

    def unshift(self, x: torch.Tensor) -> torch.Tensor:
        """Undo `shift`; what lies at padding afterwards has no meaning."""
        # The last layers may lie on another device than the first.
        return x if self.inverse is None else x.flatten(0, 1)[self.inverse.to(x.device)]

    def tail(self, count: int) -> SequenceLayout:
        """The layout of the last `count` real tokens of each row; `self` if that is all of them."""
        if count >= self.columns:
            return self
        skipped = (self.new - count).clamp(min=0)
        past = self.past + skipped
        before = torch.zeros_like(past) if self.floor is None else self.floor
        floor = torch.where(skipped > 0, past, before)  # the windows of a row that skips begin with its first token
        return replace(
            self,
            past=past,
            new=self.new - skipped,
            columns=count,
            order=None,
            inverse=None,
            floor=floor,
            is_whole=False,
        )

    def take_tail(self, x: torch.Tensor, tail: SequenceLayout) -> torch.Tensor:
        """Of `[B, S, ...]` in these columns, those of `tail`."""
        if tail.columns == self.columns:
            return x
        if not self.is_ragged:
            return x[:, self.columns - tail.columns :]
        return take_rows_from(x, tail.past - self.past, tail.columns)

    def put_tail(self, x: torch.Tensor, tail: SequenceLayout) -> torch.Tensor:
        """Undo `take_tail`, with zeros in the columns that it left out."""
        if tail.columns == self.columns:
            return x
        whole = x.new_zeros(x.shape[0], self.columns, *x.shape[2:])
        if not self.is_ragged:
            whole[:, self.columns - tail.columns :] = x
            return whole
        columns = (tail.past - self.past)[:, None] + torch.arange(tail.columns, device=tail.past.device)
        rows = torch.arange(len(x), device=x.device)[:, None]
        return whole.index_put((rows, columns.to(x.device)), x)


def take_rows_from(x: torch.Tensor, start: torch.Tensor, count: int) -> torch.Tensor:
    r"""Return `count` consecutive columns of each row, from a start of its own.

    Args:
        x (`torch.Tensor` of shape `[B, N, ...]`).
        start (`torch.Tensor` of shape `[B]`, int64): first column of each row.
        count (`int`): columns.

    Returns:
        `torch.Tensor` of shape `[B, count, ...]`.
    """
    columns = (start[:, None] + torch.arange(count, device=start.device)).to(x.device)
    return x[torch.arange(len(x), device=x.device)[:, None], columns]


def read_attention_mask(
    attention_mask: torch.Tensor | None,
    batch: int,
    columns: int,
    seen: int,
    seen_mask: torch.Tensor | None,
    *,
    more_may_follow: bool = False,
) -> torch.Tensor | None:
    r"""Read which of the new columns are real from an attention mask.

    Accepted: `None`; 2-D `[B, seen + S]` (1 = real), or `[B, S]` when nothing came before; 4-D causal masks
    `[B or 1, 1, S, seen + S]`, boolean (True = attend) or additive, from which padding can be read. This architecture
    chooses what a query attends; a mask that hides more than padding and the future is refused.

    Args:
        attention_mask: the mask as given to `forward`.
        batch, columns (`int`): B and S of this call.
        seen (`int`): columns of earlier calls that the cache holds.
        seen_mask (`torch.Tensor` of shape `[B, seen]`, bool, or `None`): which of those were real; `None` = all.
        more_may_follow (`bool`, *optional*, defaults to `False`): a row may be all padding, since its tokens come with a
            later call (left padding that is longer than a chunk of the prompt).

    Returns:
        `torch.Tensor` of shape `[B, S]`, bool, or `None` when every column is real.

    Raises:
        ValueError: for another shape or content, or if the mask contradicts what the cache already holds.
    """
    if attention_mask is None:
        return None
    total = seen + columns
    keep = _causal_to_padding(attention_mask, columns, total) if attention_mask.ndim == 4 else attention_mask
    if keep.ndim != 2 or keep.shape[0] not in (1, batch) or keep.shape[1] != total:
        raise ValueError(
            f"attention_mask has shape {list(attention_mask.shape)}; accepted: [{batch}, {total}] "
            f"({seen} columns in the cache and {columns} new ones), or a causal [{batch}, 1, {columns}, {total}]."
        )
    if keep.is_floating_point() and bool((keep < 0).any()):
        raise ValueError(
            "attention_mask has two dimensions and negative values; accepted there: 1 = real, 0 = padding."
        )
    keep = keep.bool().expand(batch, total)
    if seen:
        before = torch.ones_like(keep[:, :seen]) if seen_mask is None else seen_mask
        if not torch.equal(keep[:, :seen], before):
            raise ValueError(
                "attention_mask differs from the mask with which the cached columns were computed; accepted: that mask, "
                "and the new columns after it."
            )
    keep = keep[:, seen:]
    if not keep.any(-1).all() and not seen and not more_may_follow:
        raise ValueError("attention_mask has a row without a single real token; accepted: one or more in each row.")
    return None if bool(keep.all()) else keep


def _causal_to_padding(mask: torch.Tensor, columns: int, total: int) -> torch.Tensor:
    """Reduce a causal `[B, 1, S, T]` mask to the padding `[B, T]` it was made from, or refuse it."""
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(f"attention_mask is 4-D and {mask.dtype}; accepted: bool (True = attend) or additive floats.")
    if mask.shape[1:] != (1, columns, total):
        raise ValueError(f"attention_mask has shape {list(mask.shape)}; accepted: [B, 1, {columns}, {total}].")
    allowed = (mask if mask.dtype == torch.bool else mask >= 0)[:, 0]
    keep = allowed[:, -1]
    causal = torch.ones(columns, total, dtype=torch.bool, device=mask.device).tril(total - columns)
    fits = (allowed == causal & keep[:, None]).all(-1)
    # Libraries let a padded query attend nothing, or everything. Anything else (a document before) is a choice.
    filled = ~keep[:, total - columns :] & (allowed.all(-1) | ~allowed.any(-1))
    if not bool((fits | filled).all()):
        raise ValueError("attention_mask is 4-D and hides more than padding and the future; accepted: causal masks.")
    return keep


def follows_layout(position_ids: torch.Tensor | None, layout: SequenceLayout) -> bool:
    r"""Whether given positions are those of a layout (they follow from mask and cache).

    Args:
        position_ids (`torch.Tensor` of shape `[B or 1, S]`, integer, or `None`): as given to `forward`.

    Raises:
        ValueError: for another shape.
    """
    if position_ids is None:
        return True
    batch = len(layout.past)
    if position_ids.ndim != 2 or position_ids.shape[0] not in (1, batch) or position_ids.shape[1] != layout.columns:
        raise ValueError(f"position_ids has shape {list(position_ids.shape)}; accepted: [{batch}, {layout.columns}].")
    given = layout.shift(position_ids.to(layout.past.device).expand(batch, -1))
    return torch.equal(given[layout.real], layout.position_ids[layout.real])
