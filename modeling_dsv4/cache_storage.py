"""How the cache keeps values: codecs, the ring of the last tokens of each row, and the growing store of entries.

A codec turns values into the tensors that are stored and back; packed storage reads back exactly what rounding gives,
so `packed` and `float` caches produce the same logits. Rings and stores know nothing of attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from .fp_codecs import (
    as_bytes,
    dequantize_fp8,
    dequantize_mxfp4,
    dequantize_nvfp4,
    quantize_fp8,
    quantize_mxfp4,
    quantize_nvfp4,
    round_fp8,
    round_mxfp4,
    round_nvfp4,
)
from .sequence_layout import SequenceLayout, take_rows_from

# Channels per scale of V4's window and compressed entries (contract spec_v4, item 2).
V4_BLOCK = 64


@dataclass(frozen=True)
class CacheCodec:
    r"""One storage format.

    `rounded(x)` is what a value becomes by being stored; `encode(x)` the tensors that are kept for it (uint8 when
    packed); `decode(parts, dtype)` the value again, equal to `rounded(x)` bit for bit. Kernels know the rounding as
    `format` (`None`: they do not) and the stored tensors as `stored_format`; the last `rotary` channels are not rounded.
    """

    rounded: Callable[[torch.Tensor], torch.Tensor]
    quantize: Callable | None = None
    dequantize: Callable | None = None
    format: str | None = None
    rotary: int = 0

    @property
    def is_packed(self) -> bool:
        return self.quantize is not None

    @property
    def stored_format(self) -> str:
        return self.format if self.is_packed else "float"

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.quantize(x.detach()) if self.is_packed else (self.rounded(x).detach(),)

    def decode(self, parts: tuple[torch.Tensor, ...], dtype: torch.dtype) -> torch.Tensor:
        return self.dequantize(*parts).to(dtype) if self.is_packed else parts[0]

    def as_float(self) -> CacheCodec:
        """The same rounding, stored unpacked."""
        return replace(self, quantize=None, dequantize=None)


def _quantize_fp8(x: torch.Tensor, **block: int) -> tuple[torch.Tensor, torch.Tensor]:
    values, scale = quantize_fp8(x, **block)
    return as_bytes(values), scale


def _dequantize_fp8(values: torch.Tensor, scale: torch.Tensor, **block: int) -> torch.Tensor:
    return dequantize_fp8(values.view(torch.float8_e4m3fn), scale, **block)


def unrotated_fp8(rotary: int) -> CacheCodec:
    r"""Return V4's format: FP8 in blocks of 64 on the channels before the rotary ones, which stay in the model's dtype.

    Source: contract spec_v4, item 2.

    Args:
        rotary (`int`): channels at the end that are not rounded.
    """

    def split(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.split([x.shape[-1] - rotary, rotary], dim=-1)

    def rounded(x: torch.Tensor) -> torch.Tensor:
        head, tail = split(x)
        return torch.cat([round_fp8(head, block=V4_BLOCK), tail], dim=-1)

    def quantize(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        head, tail = split(x)
        return *_quantize_fp8(head, block=V4_BLOCK), tail.contiguous()

    def dequantize(values: torch.Tensor, scale: torch.Tensor, tail: torch.Tensor) -> torch.Tensor:
        return torch.cat([_dequantize_fp8(values, scale, block=V4_BLOCK), tail], dim=-1)

    return CacheCodec(rounded, quantize, dequantize, "fp8_tail", rotary)


def _unrounded(x: torch.Tensor) -> torch.Tensor:
    return x


UNROUNDED = CacheCodec(_unrounded, format="float")
WINDOW_FP8 = CacheCodec(round_fp8, _quantize_fp8, _dequantize_fp8, "fp8")
COMPRESSED_NVFP4 = CacheCodec(round_nvfp4, quantize_nvfp4, dequantize_nvfp4, "nvfp4")
INDEX_MXFP4 = CacheCodec(round_mxfp4, quantize_mxfp4, dequantize_mxfp4, "mxfp4")


class _Storage:
    """Values of every row in the format of a codec: `parts` `[B, slots, ...]`, and the `dtype` that is read."""

    def __init__(self, codec: CacheCodec):
        self.codec = codec
        self.parts: tuple[torch.Tensor, ...] | None = None
        self.dtype: torch.dtype | None = None

    def _empty(self, x: torch.Tensor, slots: int) -> tuple[torch.Tensor, ...]:
        """Stored tensors of `slots` slots a row for values like `x` `[B, S, ...]`, zeros."""
        return _zeros(self.codec.encode(x.new_zeros(x.shape[0], 1, *x.shape[2:])), slots)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply `function` to every stored tensor."""
        if self.parts is not None:
            self.parts = tuple(function(part) for part in self.parts)

    def reset(self) -> None:
        """Forget everything."""
        self.parts = None


def _zeros(parts: tuple[torch.Tensor, ...], slots: int) -> tuple[torch.Tensor, ...]:
    """Tensors like `parts` `[B, N, ...]` with `slots` slots a row."""
    # Not inference tensors, which a later call outside of that mode could not write to.
    with torch.inference_mode(False):
        return tuple(part.new_zeros(part.shape[0], slots, *part.shape[2:]) for part in parts)


class TokenRing(_Storage):
    r"""Values of the last tokens of each row: the one at position p lies in slot p % slots, whichever row has how many.

    A token is there until the one `slots` positions later takes its place, so that dropping the last ones moves nothing.
    Slots of tokens that are not there (before the first, or taken by dropped ones) hold nothing of meaning; the cache
    keeps count of how far a row may be rolled back (`Dsv4Cache.crop`).

    Args:
        size (`int`): tokens kept per row.
        codec (`CacheCodec`): how they are stored.
        spare (`int` or `None`): slots beyond `size`, allocated once, for all that a verification may drop; `None`: they
            come and go with `keep_extra`.
    """

    def __init__(self, size: int, codec: CacheCodec, spare: int | None = None):
        super().__init__(codec)
        self.size, self.spare = size, spare

    def append(self, x: torch.Tensor, layout: SequenceLayout, *, keep_extra: int = 0) -> torch.Tensor:
        r"""Add the new tokens of every row and return past and new values together.

        Args:
            x (`torch.Tensor` of shape `[B, S, ...]`): values before rounding, in shifted columns.
            layout (`SequenceLayout`): of the call.
            keep_extra (`int`, *optional*): tokens kept beyond `size` until the next `trim` (verification of drafts).

        Returns:
            `torch.Tensor` of shape `[B, size + S, ...]`, dtype of `x`, rounded; column i holds position past - size + i.
            The gradient flows to `x`, not to earlier calls.
        """
        slots, fresh = self._slots(keep_extra), self.codec.encode(x)
        if self.parts is None:
            self.parts, self.dtype = _zeros(fresh, slots), x.dtype
        past = self.codec.decode(self._last(self.size, layout.past), x.dtype)
        self._resize(slots, layout.past)
        self._write(fresh, layout)
        return torch.cat([past, self.codec.rounded(x)], dim=1)

    def store(
        self, x: torch.Tensor, layout: SequenceLayout, store: Callable, *, reach: int, keep_extra: int = 0
    ) -> torch.Tensor | RingView:
        r"""Do as `append`, by a kernel that encodes and writes.

        Args:
            x, layout, keep_extra: see `append`.
            store: writes the values for `x` into `parts` at positions `first` up to `counts`, as in a `ring`, and returns
                them if `values` is set.
            reach (`int`): tokens up to and with its own that a new one looks at.

        Returns:
            a view of the ring, if it then holds all that the new tokens look at; else what `append` returns.
        """
        slots = self._slots(keep_extra)
        if self.parts is None:
            self.parts, self.dtype = self._empty(x, slots), x.dtype
        held = layout.columns + reach - 1 <= slots
        past = None if held else self.last(self.size, layout.past)
        self._resize(slots, layout.past)
        fresh = store(parts=self.parts, first=layout.past, counts=layout.lengths, ring=True, values=not held)
        return RingView(self.parts, self.codec, x.dtype) if held else torch.cat([past, fresh], dim=1)

    def last(self, count: int, lengths: torch.Tensor) -> torch.Tensor:
        """Return the last `count` (at most `size`) values of rows of `lengths` `[B]`, `[B, count, ...]`, as stored."""
        return self.codec.decode(self._last(count, lengths), self.dtype)

    def trim(self, lengths: torch.Tensor) -> None:
        """Keep the last `size` tokens of rows of `lengths` `[B]`, int64."""
        if self.parts is not None:
            self._resize(self._slots(0), lengths)

    def _slots(self, keep_extra: int) -> int:
        return max(self.size + (keep_extra if self.spare is None else self.spare), 1)

    def _last(self, count: int, lengths: torch.Tensor) -> tuple[torch.Tensor, ...]:
        where = self._where(lengths[:, None] - count + torch.arange(count, device=lengths.device))
        return tuple(part[where] for part in self.parts)

    def _where(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Row and slot of positions `[B, N]` int64."""
        slots = positions.to(self.parts[0].device) % self.parts[0].shape[1]
        return torch.arange(len(slots), device=slots.device)[:, None], slots

    def _write(self, fresh: tuple[torch.Tensor, ...], layout: SequenceLayout) -> None:
        """Put the last new tokens of each row into their slots; what is padding of a row leaves its slots as they are."""
        count = min(layout.columns, self.parts[0].shape[1])
        start = (layout.new - count).clamp(min=0)
        columns = start[:, None] + torch.arange(count, device=start.device)
        where = self._where(layout.past[:, None] + columns)
        real = (columns < layout.new[:, None]).to(where[1].device) if layout.is_ragged else None
        for part, new in zip(self.parts, fresh, strict=True):
            new = new if count == layout.columns else take_rows_from(new, start, count)
            if real is not None:
                new = torch.where(real.view(*real.shape, *[1] * (new.ndim - 2)), new, part[where])
            part[where] = new

    def _resize(self, slots: int, lengths: torch.Tensor) -> None:
        """Have `slots` slots, with as many of the last tokens of rows of `lengths` `[B]` as fit."""
        held = self.parts[0].shape[1]
        if slots == held:
            return
        count = min(slots, held)
        kept = self._last(count, lengths)
        self.parts = _zeros(self.parts, slots)
        where = self._where(lengths[:, None] - count + torch.arange(count, device=lengths.device))
        for part, values in zip(self.parts, kept, strict=True):
            part[where] = values

    def nbytes(self, tokens: int | None = None) -> int:
        """Bytes allocated for all rows, or used by at most `tokens` tokens of each."""
        if self.parts is None:
            return 0
        slots = self.parts[0].shape[1]
        share = 1.0 if tokens is None else min(tokens, self.size) / slots
        return int(sum(part.nbytes for part in self.parts) * share)


@dataclass(frozen=True)
class EntryView:
    r"""Read access to the entries of one store; entry j of every row is column j.

    Args:
        parts (tuple of `torch.Tensor`, each `[B, C, ...]`): stored tensors.
        codec (`CacheCodec`): their format.
        dtype (`torch.dtype`): of what is read.
    """

    parts: tuple[torch.Tensor, ...]
    codec: CacheCodec
    dtype: torch.dtype

    @property
    def count(self) -> int:
        """Columns, the largest number of entries of any row."""
        return self.parts[0].shape[1]

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> EntryView:
        """Return the view with its parts on `device`, for a layer that lies on another device than the source."""
        return replace(self, parts=tuple(part.to(device, non_blocking=non_blocking) for part in self.parts))

    def unpacked(self) -> EntryView:
        """Return the same entries decoded, for readers that look them up many times."""
        return EntryView((self.read(),), UNROUNDED, self.dtype)

    def read(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Return entries `start` to `stop` of every row, `[B, stop - start, D]`."""
        return self.codec.decode(tuple(part[:, start:stop] for part in self.parts), self.dtype)

    def gather(self, indices: torch.Tensor) -> torch.Tensor:
        """Return the entries `indices` (`[B, T, K]`, integer; -1 reads entry 0) as `[B, T, K, D]`."""
        flat = indices.clamp(min=0).flatten(1).long()
        taken = tuple(
            part.gather(1, flat[..., None].expand(-1, -1, part.shape[-1])).unflatten(1, indices.shape[1:])
            for part in self.parts
        )
        return self.codec.decode(taken, self.dtype)


class RingView(EntryView):
    """Read access to a ring: the token at position p is column p % count."""


class EntryStore(_Storage):
    r"""Compressed entries (or index keys) of one source layer: a buffer that grows by doubling.

    Args:
        codec (`CacheCodec`): how entries are stored.
        capacity (`int` or `None`): fixed number of entries, allocated once, or `None` to grow.
    """

    def __init__(self, codec: CacheCodec, capacity: int | None = None):
        super().__init__(codec)
        self.capacity = capacity

    def write(
        self,
        x: torch.Tensor,
        first: torch.Tensor,
        counts: torch.Tensor,
        total: int | None,
        store: Callable | None = None,
    ) -> EntryView:
        r"""Write new entries of every row and return the view of all.

        Args:
            x (`torch.Tensor` of shape `[B, M, D]`): values before rounding; row b has `counts[b] - first[b]` of them.
            first (`torch.Tensor` of shape `[B]`, int64): column of each row's first new entry.
            counts (`torch.Tensor` of shape `[B]`, int64): entries each row has afterwards.
            total (`int` or `None`): largest of `counts`. `None`, where shapes may not depend on values: all M columns are
                written (what lies behind a row's count is never seen, and written again), and viewed is the capacity.
            store (*optional*): a kernel that encodes the values for `x` and writes them into `parts`, see `TokenRing.store`.

        Returns:
            `EntryView` of `total` columns. Where `x` needs a gradient, the new entries of the view carry it.
        """
        if total is not None:
            self._reserve(x, total)
        if store is not None:
            store(parts=self.parts, first=first, counts=counts, values=False)
            return EntryView(tuple(part[:, :total] for part in self.parts), self.codec, x.dtype)
        columns = first[:, None] + torch.arange(x.shape[1], device=x.device)
        rows = torch.arange(len(first), device=x.device)[:, None].expand_as(columns)
        if total is None:
            written, where = ..., (rows, columns)
        else:
            written = columns < counts[:, None]
            where = rows[written], columns[written]
        if x.shape[1]:
            for part, new in zip(self.parts, self.codec.encode(x), strict=True):
                part[where] = new[written]
        view = EntryView(tuple(part[:, :total] for part in self.parts), self.codec, x.dtype)
        if not (x.requires_grad and torch.is_grad_enabled()):
            return view
        values = view.read().clone().index_put(where, self.codec.rounded(x)[written])
        return EntryView((values,), UNROUNDED, x.dtype)

    def _reserve(self, x: torch.Tensor, total: int) -> None:
        """Make room for `total` entries, twice as much as was there when more is needed."""
        held = 0 if self.parts is None else self.parts[0].shape[1]
        if held >= max(total, 1):
            return
        if self.capacity is not None and total > self.capacity:
            raise ValueError(f"the cache was made for {self.capacity} entries (max_length) and {total} are needed.")
        size = self.capacity or max(total, 2 * held, 16)
        grown = self._empty(x, size)
        for old, new in zip(self.parts or (), grown, strict=False):
            new[:, :held] = old
        self.parts, self.dtype = grown, x.dtype

    def nbytes(self, entries: int | None = None) -> int:
        """Bytes allocated for all rows, or used by `entries` entries of all rows together."""
        if self.parts is None:
            return 0
        if entries is None:
            return sum(part.nbytes for part in self.parts)
        return sum(part[0, 0].nbytes for part in self.parts) * entries
