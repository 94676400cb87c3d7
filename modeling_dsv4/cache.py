"""The cache: everything that depends on the sequence, for both families.

One object owns it all (design: nothing sequence-dependent lives on a module): the window entries of every layer, the
compressed entries and index keys of every source layer, the projected tokens of its open group, and the last n-gram
ids. Shared parts belong to the source layer and are changed once; the layers that read them hold nothing.

Rows have lengths of their own (`lengths`), so left and right padding need no special case. `get_seq_length()` counts
columns, padding included, as `generate` expects.

With `max_length` every tensor is allocated by the first call and written in place from then on. A later call of one
column without padding then waits for no value on the host and has one shape for every length (`SequenceLayout.is_static`),
so that it can be captured (`DecodeGraph`) or compiled; only `columns` and `column_mask` are counted on the host.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers.cache_utils import Cache, CacheLayerMixin

from .cache_storage import (
    COMPRESSED_NVFP4,
    INDEX_MXFP4,
    UNROUNDED,
    WINDOW_FP8,
    CacheCodec,
    EntryStore,
    TokenRing,
    unrotated_fp8,
)
from .sequence_layout import SequenceLayout

KV_FORMATS = ("packed", "float")
# While drafts are verified, a ring keeps what one verification may drop; never more than this many tokens.
MAX_RECORDED = 128
# Tensors of a `Dsv4Cache` beside those of its parts, `None` where there is nothing to say.
STATE = ("lengths", "column_mask", "_droppable", "window_floor")


class SourceStore:
    """What a source layer owns for itself and the layers that read it: entries, index keys, the open group."""

    def __init__(
        self, config, layer: int, rollback: int, codecs: dict[str, CacheCodec], capacity: int | None, spare: int | None
    ):
        self.ratio = config.ratio(layer)
        # Rounded up: the group that a last token leaves open has a place too.
        limit = None if capacity is None else -(-capacity // self.ratio)
        self.entries = EntryStore(codecs["compressed"], limit)
        self.index_keys = EntryStore(codecs["index"], limit) if config.selects(layer) else None
        # Projected tokens that the next group, or a group re-opened by a rollback, still needs. Never rounded.
        reach = self.ratio * (2 if config.overlaps(layer) else 1) - 1 + rollback
        self.open_group = TokenRing(reach, UNROUNDED, spare) if self.ratio > 1 else None
        own_index_group = config.pools_index_keys and config.selects(layer)
        self.open_index_group = TokenRing(reach, UNROUNDED, spare) if own_index_group else None

    @property
    def parts(self) -> list:
        parts = self.entries, self.index_keys, self.open_group, self.open_index_group
        return [part for part in parts if part is not None]


class Dsv4CacheLayer(CacheLayerMixin):
    r"""Cache of one layer: its window, and the store that it owns if it is a source layer.

    `update` of the generic interface does not fit (key = value, entries are pooled and shared); attention uses
    `window` and `store`. `keys` and `values` stay `None`.
    """

    is_sliding = True
    is_croppable = True
    supports_early_init = False

    def __init__(self, owner: Dsv4Cache, window: TokenRing, store: SourceStore | None):
        super().__init__()
        self._owner, self.window, self.store = owner, window, store

    @property
    def is_compileable(self) -> bool:
        return self._owner.max_length is not None

    def keep_extra(self, columns: int) -> int:
        """Slots that the window keeps beyond its size for a call of `columns` columns."""
        return self._owner.keep_extra(columns)

    @property
    def record_past(self) -> bool:
        """Whether the cache keeps what a verification of drafts may drop; `generate` switches it off through this."""
        return self._owner.record_past

    @record_past.setter
    def record_past(self, value: bool) -> None:
        self._owner.record_past = value

    @property
    def parts(self) -> list:
        return [self.window] + (self.store.parts if self.store is not None else [])

    def lazy_initialization(self, key_states, value_states):
        raise TypeError("Dsv4Cache stores shared, pooled entries; it is filled by the model's own attention.")

    def update(self, key_states, value_states, *args, **kwargs):
        raise TypeError("Dsv4Cache stores shared, pooled entries; it is filled by the model's own attention.")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._owner.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self._owner.get_seq_length()

    def get_max_length(self) -> int:
        return self._owner.get_max_length()


class Dsv4Cache(Cache):
    r"""Cache of a DeepSeek-V4.1 or V4 model, with the whole interface of transformers' `Cache`.

    Invariant after every method: the cache equals one that has only ever seen the tokens it now holds.

    Args:
        config (`Dsv41Config`, `Dsv41TextConfig` or `Dsv4Config`): schedule, sizes, rounding.
        kv_format (`str`, *optional*, defaults to `"packed"`): "packed" stores FP8 / FP4 bytes, "float" the rounded
            values in the model's dtype; both give the same logits.
        rollback (`int`, *optional*, defaults to 16): tokens per row that `crop` can take back.
        max_length (`int`, *optional*): fixed capacity in columns, padding included, allocated once by the first call;
            `None` grows.

    Raises:
        ValueError: for an unknown format, a bad `rollback` or `max_length`, or "packed" with `cache_rounding=False`
            (unrounded values cannot be packed).
    """

    def __init__(self, config, kv_format: str = "packed", rollback: int = 16, max_length: int | None = None):
        text = config.get_text_config()
        if kv_format not in KV_FORMATS:
            raise ValueError(f"kv_format is {kv_format!r}; accepted: {KV_FORMATS}.")
        if kv_format == "packed" and not text.cache_rounding:
            raise ValueError("kv_format='packed' with cache_rounding=False; accepted: kv_format='float'.")
        if not isinstance(rollback, int) or rollback < 0:
            raise ValueError(f"rollback is {rollback!r}; accepted: an integer >= 0.")
        if max_length is not None and (not isinstance(max_length, int) or max_length < 1):
            raise ValueError(f"max_length is {max_length!r}; accepted: None or an integer >= 1.")
        self.kv_format, self.rollback, self.max_length = kv_format, rollback, max_length
        codecs = cache_codecs(text, kv_format)
        spare = None if max_length is None else min(max_length, MAX_RECORDED)
        layers = []
        for layer, mode in enumerate(text.layer_modes):
            window = TokenRing(text.sliding_window - 1 + rollback, codecs["window"], spare)
            store = SourceStore(text, layer, rollback, codecs, max_length, spare) if mode == "full" else None
            layers.append(Dsv4CacheLayer(self, window, store))
        super().__init__(layers=layers)
        # What a drafter keeps of the last tokens (contract section 12); empty until a model that has one fills it.
        kinds = [(size, codecs["window"] if of_window else UNROUNDED) for size, of_window in text.draft_rings]
        self.draft = [TokenRing(size + rollback, codec, spare) for size, codec in kinds]
        reach = text.engram_max_ngram_size - 1 if text.engram_layer_ids else 0
        self.ngram_ids = TokenRing(reach + rollback, UNROUNDED, spare) if text.engram_layer_ids else None
        # What a saved cache must share with the configuration that reads it.
        widths = [text.sliding_window, text.head_dim, text.qk_rope_head_dim, text.index_head_dim, reach]
        self._schedule = [pooled_tokens(text), *widths, text.cache_formats, text.cache_rounding, len(self.draft)]
        self._clear()

    def _clear(self) -> None:
        self.columns = 0
        self.lengths: torch.Tensor | None = None
        self.column_mask: torch.Tensor | None = None  # [B, columns] bool, None while every column is real
        self.record_past = False
        self._droppable: torch.Tensor | None = None  # [B] tokens that a rollback can still take back
        # [B] position before which the windows behind the cut hold nothing (bounded replay), None = nowhere.
        self.window_floor: torch.Tensor | None = None

    @property
    def _parts(self) -> list:
        parts = [part for layer in self.layers for part in layer.parts]
        return [*parts, *([] if self.ngram_ids is None else [self.ngram_ids]), *self.draft]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Every tensor of the parts, and what is counted of the rows: all that a step in a fixed capacity changes."""
        stored = [tensor for part in self._parts for tensor in part.parts or ()]
        return stored + [t for t in (self.lengths, self._droppable, self.window_floor) if t is not None]

    def layout(self, valid: torch.Tensor | None, batch: int, columns: int, device: torch.device) -> SequenceLayout:
        r"""Return the layout of the next call; changes nothing.

        Args:
            valid (`torch.Tensor` of shape `[B, S]`, bool, or `None`): real columns of the call.
            batch, columns (`int`): B and S.
            device (`torch.device`): of the call.

        Raises:
            ValueError: if the batch differs from the cached one, or the capacity would be passed.
        """
        if self.lengths is not None and len(self.lengths) != batch:
            raise ValueError(f"the call has {batch} rows; accepted: {len(self.lengths)}, as the cache holds.")
        self.check_room(columns)
        if self.lengths is None:
            past = torch.zeros(batch, dtype=torch.long, device=device)
        else:
            past = self.lengths.to(device, copy=True)  # which are counted in place
        layout = SequenceLayout.from_mask(valid, past, columns, begins=self.lengths is None)
        is_static = self.max_length is not None and self.lengths is not None and columns == 1 and valid is None
        return replace(layout, is_static=True) if is_static else layout

    def check_room(self, columns: int) -> None:
        """Raise a `ValueError` if `columns` more would pass the capacity."""
        if self.max_length is not None and self.columns + columns > self.max_length:
            raise ValueError(
                f"the cache was made for {self.max_length} tokens (max_length); it holds {self.columns} "
                f"and {columns} more were given."
            )

    def keep_extra(self, columns: int) -> int:
        """Slots that rings keep beyond their size for a call of `columns` columns (drafts being verified)."""
        return min(columns, MAX_RECORDED) if self.record_past else 0

    def advance(
        self, layout: SequenceLayout, valid: torch.Tensor | None, window_floor: torch.Tensor | None = None
    ) -> None:
        """Count the tokens of a finished call; `valid` is the mask of its columns before shifting, or `None`."""
        self.window_floor = window_floor
        held = torch.zeros_like(layout.past) if self._droppable is None else self._droppable
        bound = self.rollback + self.keep_extra(layout.columns)
        self._put("_droppable", (held + layout.new).clamp(max=bound))
        self._put("lengths", layout.lengths)
        self.advance_columns(layout.columns, valid)

    def advance_columns(self, count: int, valid: torch.Tensor | None = None) -> None:
        """Count columns: what `advance` does on the host, and a replayed graph leaves out."""
        if valid is not None or self.column_mask is not None:
            batch, device = len(self.lengths), self.lengths.device
            before, new = self.column_mask, valid
            if before is None:
                before = torch.ones(batch, self.columns, dtype=torch.bool, device=device)
            if new is None:
                new = torch.ones(batch, count, dtype=torch.bool, device=device)
            self.column_mask = torch.cat([before, new], dim=1)
        self.columns += count

    def _put(self, name: str, value: torch.Tensor) -> None:
        """Set a tensor of the state, in place where the capacity is fixed."""
        held = getattr(self, name)
        if self.max_length is None:
            setattr(self, name, value)
        elif held is None:
            with torch.inference_mode(False):  # a later call may write outside of that mode
                setattr(self, name, value.clone())
        else:
            held.copy_(value)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns seen, padding included."""
        return self.columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Capacity in columns, or -1 for a growing cache."""
        return -1 if self.max_length is None else self.max_length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.columns + query_length, 0

    @property
    def batch_size(self) -> int:
        return -1 if self.lengths is None else len(self.lengths)

    @property
    def is_initialized(self) -> bool:
        return self.lengths is not None

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        return self.layers[layer_idx].update(key_states, value_states)

    def activate_past_recording(self) -> None:
        """Keep what a verification of drafts may drop until the next `crop`."""
        self.record_past = True

    def is_recording_past(self, layer_idx: int = 0) -> bool:
        return self.record_past

    def crop(self, tokens_to_remove: int) -> None:
        r"""Drop the last columns; afterwards the cache equals one that never saw them.

        Args:
            tokens_to_remove (`int` or 0-d tensor): zero or negative; `-n` drops n columns; all of them or more: the cache is
                empty afterwards, which needs no rollback.

        Raises:
            ValueError: for a positive number, or if more real tokens of a row would go than `rollback` allows.
        """
        count = -int(tokens_to_remove)
        if count < 0:
            raise ValueError(f"crop takes the columns to remove as a negative number, got {-count}.")
        if self.lengths is None:
            return
        if count >= self.columns > 0:
            self.reset()
            return
        if count and self.column_mask is not None:
            dropped = self.column_mask[:, -count:].sum(-1)
        else:
            dropped = torch.full_like(self.lengths, count)
        self._drop(dropped)
        self.columns -= count
        if self.column_mask is not None:
            self.column_mask = self.column_mask[:, : self.columns]

    def crop_rows(self, tokens_to_remove: torch.Tensor) -> None:
        r"""Drop a number of last tokens of its own from each row; dropped columns that others keep become padding.

        Args:
            tokens_to_remove (`torch.Tensor` of shape `[B]`, integer): tokens of each row, 0 or more.

        Raises:
            ValueError: if a row would lose more than `rollback` allows.
        """
        if self.lengths is None:
            raise ValueError("crop_rows on an empty cache; accepted: a cache that holds tokens.")
        dropped = tokens_to_remove.to(self.lengths)
        if dropped.shape != self.lengths.shape or bool((dropped < 0).any()):
            raise ValueError(
                f"tokens_to_remove is {tokens_to_remove.tolist()}; accepted: {len(self.lengths)} counts >= 0."
            )
        self._drop(dropped)
        mask = self.column_mask
        if mask is None:
            mask = torch.ones(len(dropped), self.columns, dtype=torch.bool, device=dropped.device)
        # Of each row, the first `length` real columns stay real.
        mask = mask & (mask.cumsum(-1) <= self.lengths[:, None])
        used = mask.any(0).nonzero()
        self.columns = int(used[-1]) + 1 if len(used) else 0
        mask = mask[:, : self.columns]
        self.column_mask = None if bool(mask.all()) else mask

    def align_columns(self, column_mask: torch.Tensor) -> None:
        r"""Say anew in which columns the tokens lie; a token's entries do not depend on its column.

        Args:
            column_mask (`torch.Tensor` of shape `[B, columns]`, bool): real columns, as many in a row as it has tokens.

        Raises:
            ValueError: if a row has another number of tokens.
        """
        counts = column_mask.sum(-1).to(self.lengths)
        if not torch.equal(counts, self.lengths):
            raise ValueError(f"column_mask has {counts.tolist()} real columns; accepted: {self.lengths.tolist()}.")
        self.columns = column_mask.shape[1]
        self.column_mask = None if bool(column_mask.all()) else column_mask

    def _drop(self, dropped: torch.Tensor) -> None:
        """Drop `dropped` `[B]` real tokens of each row from every part, and trim rings to their size."""
        if bool((dropped > self._droppable).any()):
            raise ValueError(
                f"crop would drop {dropped.tolist()} tokens of the rows; accepted: at most {self._droppable.tolist()} "
                f"(rollback={self.rollback})."
            )
        self._put("lengths", self.lengths - dropped)
        self._put("_droppable", (self._droppable - dropped).clamp(max=self.rollback))
        for part in self._parts:
            if isinstance(part, TokenRing):
                part.trim(self.lengths)

    def _map(self, function) -> None:
        if self.lengths is None:
            return
        with torch.inference_mode(False), torch.no_grad():  # a later call may write outside of that mode
            for part in self._parts:
                part.map(function)
            for name in STATE:
                if getattr(self, name) is not None:
                    setattr(self, name, function(getattr(self, name)))

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Take row `beam_idx[i]` as row i (beam search)."""
        self._map(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times."""
        self._map(lambda t: t.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices`."""
        self._map(lambda t: t[indices.to(t.device) if isinstance(indices, torch.Tensor) else indices])

    def reset(self) -> None:
        """Forget every token; the object can be used again."""
        for part in self._parts:
            part.reset()
        self._clear()

    def to(self, device: torch.device | str) -> Dsv4Cache:
        """Move everything to `device` and return the cache."""
        self._map(lambda t: t.to(device))
        return self

    def nbytes(self, allocated: bool = False) -> dict[str, int]:
        r"""Return the bytes of each part, summed over rows.

        Args:
            allocated (`bool`, *optional*, defaults to `False`): capacity instead of what is in use.

        Returns:
            `{"window", "compressed", "index", "draft", "state"}` -> bytes.
        """
        sizes = dict.fromkeys(("window", "compressed", "index", "draft", "state"), 0)
        if self.lengths is None:
            return sizes
        longest = None if allocated else int(self.lengths.max())
        for layer in self.layers:
            sizes["window"] += layer.window.nbytes(longest)
            if layer.store is not None:
                used = None if allocated else int((self.lengths // layer.store.ratio).sum())
                sizes["compressed"] += layer.store.entries.nbytes(used)
                if layer.store.index_keys is not None:
                    sizes["index"] += layer.store.index_keys.nbytes(used)
                for group in (layer.store.open_group, layer.store.open_index_group):
                    sizes["state"] += 0 if group is None else group.nbytes(longest)
        sizes["draft"] = sum(ring.nbytes(longest) for ring in self.draft)
        sizes["state"] += 0 if self.ngram_ids is None else self.ngram_ids.nbytes(longest)
        sizes["state"] += sum(getattr(self, name).nbytes for name in STATE if getattr(self, name) is not None)
        return sizes

    def save(self, path: str) -> None:
        """Write the cache to a safetensors file (no pickle); `load` reads it back equal."""
        tensors, dtypes = {}, {}
        for i, part in enumerate(self._parts):
            for j, tensor in enumerate(part.parts or ()):
                tensors[f"{i}.{j}"] = tensor.contiguous()
                dtypes[str(i)] = str(part.dtype).removeprefix("torch.")
        for name in STATE:
            if getattr(self, name) is not None:
                tensors[name] = getattr(self, name).contiguous()
        about = {k: getattr(self, k) for k in ("kv_format", "rollback", "max_length", "columns", "record_past")}
        about |= {"dtypes": dtypes, "schedule": self._schedule}
        save_file(tensors, path, metadata={"dsv4_cache": json.dumps(about)})

    @classmethod
    def load(cls, path: str, config) -> Dsv4Cache:
        r"""Read a cache that `save` wrote, onto the CPU (`to` moves it).

        Raises:
            OSError: if the file is not such a cache, or was made for another configuration.
        """
        try:
            with safe_open(path, framework="pt") as file:
                about: dict[str, Any] = json.loads((file.metadata() or {}).get("dsv4_cache", "{}"))
                tensors = {name: file.get_tensor(name) for name in file.keys()} if about else {}
        except (SafetensorError, ValueError) as error:
            raise OSError(f"{path} is not a saved Dsv4Cache ({error}).") from error
        needed = {"kv_format", "rollback", "max_length", "columns", "record_past", "dtypes", "schedule"}
        if not about.keys() >= needed:
            raise OSError(f"{path} is not a saved Dsv4Cache.")
        cache = cls(config, about["kv_format"], about["rollback"], about["max_length"])
        if cache._schedule != about["schedule"]:
            raise OSError(
                f"{path} was made for another configuration: {about['schedule']}, expected {cache._schedule}."
            )
        cache.columns, cache.record_past = about["columns"], about["record_past"]
        for name in STATE:
            setattr(cache, name, tensors.pop(name, None))
        parts = cache._parts
        for key in sorted(tensors, key=lambda k: tuple(map(int, k.split(".")))):
            index = int(key.split(".")[0])
            parts[index].parts = (parts[index].parts or ()) + (tensors[key],)
            parts[index].dtype = getattr(torch, about["dtypes"][str(index)])
        return cache


def check_cache(cache, config=None) -> None:
    """Raise a `ValueError` unless `cache` is of the kind these models fill (installed or remote code) or `None`.

    With a text configuration, also if the cache was made for another schedule.
    """
    if cache is not None and all(kind.__name__ != Dsv4Cache.__name__ for kind in type(cache).__mro__):
        raise ValueError(f"cache is a {type(cache).__name__}; accepted: Dsv4Cache, which owns the shared entries.")
    if cache is not None and config is not None:
        found, expected = cache._schedule[0], pooled_tokens(config)
        if found != expected:
            raise ValueError(
                f"cache was made for layers that pool {found} tokens; accepted: {expected}, as the model's."
            )


def pooled_tokens(config) -> list[int]:
    """Return how many tokens each layer of a text configuration pools into an entry, 0 for one that makes none."""
    return [config.ratio(layer) if mode == "full" else 0 for layer, mode in enumerate(config.layer_modes)]


def check_empty(cache, learner: str) -> None:
    """Raise a `ValueError` if `cache` holds tokens: what is being trained, `learner`, reads whole rows."""
    if cache is not None and cache.get_seq_length():
        raise ValueError(
            f"cache holds {cache.get_seq_length()} tokens while {learner} is trained; accepted: an empty one."
        )


def cache_codecs(config, kv_format: str = "float") -> dict[str, CacheCodec]:
    r"""Return the codec of each kind of value for a text configuration.

    Args:
        config (`Dsv41TextConfig` or `Dsv4Config`): `cache_rounding=False` switches all rounding off.
        kv_format (`str`, *optional*, defaults to `"float"`): "packed" or "float".

    Returns:
        `{"window", "compressed", "index"}` -> `CacheCodec`.
    """
    if config.cache_formats == "v4":
        unrotated = unrotated_fp8(config.qk_rope_head_dim)
        codecs = {"window": unrotated, "compressed": unrotated, "index": INDEX_MXFP4}
    else:
        codecs = {"window": WINDOW_FP8, "compressed": COMPRESSED_NVFP4, "index": INDEX_MXFP4}
    if not config.cache_rounding:
        return dict.fromkeys(codecs, UNROUNDED)
    return codecs if kv_format == "packed" else {name: codec.as_float() for name, codec in codecs.items()}
