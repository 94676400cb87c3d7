"""Attention of one layer: a sliding window of its own, and selected compressed entries of a source layer.

What a layer does follows from its mode (V4.1 report section 2.3.1): every layer makes its queries and window; a *full*
layer also pools entries, makes index keys from them and selects; a *reindex* layer selects again among the same
entries; a *reuse* layer takes entries and selection as they are. What is handed from layer to layer is one immutable
`SharedState`.

Sources: V4.1 report sections 2.2 and 2.3, contract section 6.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from .cache import Dsv4CacheLayer, cache_codecs
from .cache_storage import UNROUNDED, CacheCodec, EntryStore, EntryView, RingView, TokenRing
from .kernel_seam import AUTO, KernelSet, find_kernel
from .layers import Dsv4GroupedLinear, Dsv4Linear, Dsv4PlainLinear, Dsv4RMSNorm, apply_rounded, unit_rms
from .rotary import rotary_table, rotate
from .sequence_layout import SequenceLayout, take_rows_from
from .sparse_attention import (
    attend_with_sinks,
    attention_mass,
    expand_blocks,
    full_precision,
    hadamard_rotate,
    index_scores,
    indexer_divergence,
    pool_groups,
    select_candidate_blocks,
    select_topk,
    wide,
)

# Queries are processed in tiles whose largest intermediate has about this many elements.
MAX_TILE_ELEMENTS = 1 << 23
# The most entries, or blocks, that the kernel of the indexer selects.
MAX_KERNEL_TOPK = 4096
# A tile of attention is no longer than a window, whose keys it shares, or than this many queries.
MIN_TILE = 64


class SharedState(NamedTuple):
    r"""What layers hand on: entries and index keys of the latest source, the latest selection, the candidate pool.

    selection `[B, S, K]` int32: entries of each query, ascending, -1 = none. candidates `[B, S, blocks]` int32.
    divergence `[B, S]` or `None`: of the indexers so far, summed over layers (`indexer_divergence`).
    """

    entries: EntryView | None = None
    index_keys: EntryView | None = None
    selection: torch.Tensor | None = None
    candidates: torch.Tensor | None = None
    divergence: torch.Tensor | None = None

    def tail(self, layout: SequenceLayout, tail: SequenceLayout) -> SharedState:
        """What the queries of `tail` need of this, when it was made for those of `layout`."""
        of_tokens = self.selection, self.candidates, self.divergence
        return SharedState(
            self.entries, self.index_keys, *(None if t is None else layout.take_tail(t, tail) for t in of_tokens)
        )


class LayerContext(NamedTuple):
    r"""What the layers of one forward call share.

    tables: {"main", "compress"} -> cosine and sine `[B, S, P]` of the tokens; frequencies: the same keys -> `[P]`.
    image_mask `[B, S]` bool or `None`: positions of image spans. input_ids `[B, S]` int64 or `None`.
    next_layout: set for the one layer that pools all its tokens and computes only the last ones (`DecoderReplay`).
    pooled: whether entries of all tokens were pooled before, and these are the last ones.
    trains_indexers: whether indexers are compared with the attention of their layers.
    """

    layout: SequenceLayout
    tables: dict[str, tuple[torch.Tensor, torch.Tensor]]
    frequencies: dict[str, torch.Tensor]
    image_mask: torch.Tensor | None = None
    input_ids: torch.Tensor | None = None
    next_layout: SequenceLayout | None = None
    pooled: bool = False
    trains_indexers: bool = False

    def tail(self, tail: SequenceLayout) -> LayerContext:
        """The context of the tokens of `tail` alone."""
        tables = {
            name: tuple(self.layout.take_tail(part, tail) for part in table) for name, table in self.tables.items()
        }
        of_tokens = (None if t is None else self.layout.take_tail(t, tail) for t in (self.image_mask, self.input_ids))
        return LayerContext(tail, tables, self.frequencies, *of_tokens, pooled=True)


class NewEntries(NamedTuple):
    """Entries that a call completes: latents `[B, M, D]`, each row's first column `[B]` and counts afterwards `[B]`.

    total is the largest count, `None` in a static layout, which takes an entry of every row, complete or not.
    """

    latents: torch.Tensor
    first: torch.Tensor
    counts: torch.Tensor
    total: int | None


class Dsv4Compressor(nn.Module):
    r"""Pools each group of `ratio` tokens into one latent.

    V4.1 (contract section 6.1): a group pools its own tokens; ratio 1 has no gate. V4 (contract spec_v4 items 6, 7): a
    learned bias per place of the group joins the gates, and CSA groups overlap: an entry pools its own tokens by the
    second half of the channels and those of the group before by the first half.
    """

    def __init__(self, config, layer_idx: int, head_dim: int):
        super().__init__()
        self.ratio, self.overlaps = config.ratio(layer_idx), config.overlaps(layer_idx)
        width = head_dim * (2 if self.overlaps else 1)
        self.kv_proj = Dsv4PlainLinear(config.hidden_size, width)
        if self.ratio > 1:
            self.gate_proj = Dsv4PlainLinear(config.hidden_size, width)
        if config.has_position_bias:
            self.position_bias = nn.Parameter(torch.empty(self.ratio, width, dtype=torch.float32))
        else:
            self.register_parameter("position_bias", None)
        self.kv_norm = Dsv4RMSNorm(head_dim, config.rms_norm_eps)

    def forward(
        self, x: torch.Tensor, layout: SequenceLayout, ring: TokenRing | None = None, keep_extra: int = 0
    ) -> NewEntries:
        r"""Return the latents of the groups that the new tokens complete, neither rotated nor rounded.

        Args:
            x (`torch.Tensor` of shape `[B, S, H]`): input of the layer's attention.
            layout (`SequenceLayout`): of the call.
            ring (`TokenRing`, *optional*): keeps the tokens of the open group between calls.
            keep_extra (`int`, *optional*): see `TokenRing.append`.
        """
        first, counts = layout.past // self.ratio, layout.lengths // self.ratio
        if layout.is_static:
            total, width = None, 1
        elif layout.is_whole:
            total = width = layout.columns // self.ratio
        else:
            total, width = torch.stack([counts.max(), (counts - first).max()]).tolist()
        if self.ratio == 1:
            return NewEntries(self.kv_norm(self.kv_proj(x)), first, counts, total)
        # Keys and gates are float32 from here to the pooled latent.
        with full_precision(x):
            projected = torch.cat([self.kv_proj(wide(x)), self.gate_proj(wide(x))], dim=-1)
        if ring is not None:
            projected = ring.append(projected, layout, keep_extra=keep_extra)
        held = projected.shape[1] - layout.columns
        groups = self._groups(projected, layout, first, width, held)
        latents = self._pool(groups, first).to(x.dtype)
        return NewEntries(self.kv_norm(latents), first, counts, total)

    def _groups(self, projected, layout, first, width, held) -> torch.Tensor:
        """Projected tokens of each row's new groups `[B, M, R, 2 * channels]`; with overlap, of M + 1 groups."""
        before = 1 if self.overlaps else 0
        # A group before the first token, and groups that a shorter row does not complete, read zeros and are masked or
        # never written.
        projected = F.pad(projected, (0, 0, self.ratio * before, self.ratio))
        start = (first - before) * self.ratio - layout.past + held + self.ratio * before
        count = (width + before) * self.ratio
        return take_rows_from(projected, start, count).unflatten(1, (width + before, self.ratio))

    def _pool(self, groups: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        values, gates = groups.chunk(2, dim=-1)
        if self.position_bias is not None:
            gates = gates + self.position_bias.to(gates.dtype)
        if not self.overlaps:
            return pool_groups(values, gates)
        (values_before, values_own), (gates_before, gates_own) = (half.chunk(2, dim=-1) for half in (values, gates))
        entries = first[:, None] + torch.arange(groups.shape[1] - 1, device=first.device)
        no_group_before = (entries == 0)[..., None, None]
        gates_before = gates_before[:, :-1].masked_fill(no_group_before, float("-inf"))
        values = torch.cat([values_before[:, :-1], values_own[:, 1:]], dim=2)
        return pool_groups(values, torch.cat([gates_before, gates_own[:, 1:]], dim=2))


class Dsv4Indexer(nn.Module):
    """Scores entries for queries and selects; a full layer also makes the index keys (contract section 6.2)."""

    kernels = AUTO

    def __init__(self, config, layer_idx: int):
        super().__init__()
        self.heads, self.head_dim, self.topk = config.index_n_heads, config.index_head_dim, config.index_topk
        self.ratio = config.ratio(layer_idx)
        self.config, self.layer_idx = config, layer_idx
        self.rotates = config.pools_index_keys
        self.q_b_proj = Dsv4Linear(config.q_lora_rank, self.heads * self.head_dim)
        self.weights_proj = Dsv4PlainLinear(config.hidden_size, self.heads)
        if config.pools_index_keys:
            self.compressor = Dsv4Compressor(config, layer_idx, self.head_dim)
        elif config.mode(layer_idx) == "full":
            self.k_proj = Dsv4PlainLinear(config.head_dim, self.head_dim)
            self.k_norm = Dsv4RMSNorm(self.head_dim, config.rms_norm_eps)

    # Read when asked: training may lift the restriction for its first part.
    @property
    def makes_candidates(self) -> bool:
        return self.config.makes_candidates(self.layer_idx)

    @property
    def block_size(self) -> int:
        return self.config.candidate_block_size

    @property
    def uses_candidates(self) -> bool:
        return self.config.uses_candidates(self.layer_idx)

    def make_keys(self, x: torch.Tensor, new: NewEntries, context: LayerContext, cache: Dsv4CacheLayer | None):
        """Return index keys of the new entries `[B, M, Di]`, neither rotated by position nor rounded."""
        if not self.rotates:
            return self.k_norm(self.k_proj(new.latents))
        ring = None if cache is None else cache.store.open_index_group
        extra = 0 if cache is None else cache.keep_extra(context.layout.columns)
        return self.compressor(x, context.layout, ring, extra).latents

    def place(self, x: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Rotate index queries or keys by position, and in V4 by the Hadamard matrix."""
        x = rotate(x, table)
        return hadamard_rotate(x) if self.rotates else x

    def make_queries(self, x, q_latent, table, codec: CacheCodec) -> tuple[torch.Tensor, torch.Tensor]:
        """Return index queries `[B, S, Hi, Di]`, rounded, and head weights `[B, S, Hi]`; arguments as in `forward`."""
        queries = self.q_b_proj(q_latent).unflatten(-1, (self.heads, self.head_dim))
        weights = self.weights_proj(x) * (self.head_dim**-0.5 * self.heads**-0.5)
        store = _find_store(self.kernels, queries, codec)
        if store is not None:
            return store(table, hadamard=self.rotates), weights
        return codec.rounded(self.place(queries, table)), weights

    def forward(
        self,
        x: torch.Tensor,
        q_latent: torch.Tensor,
        table: tuple[torch.Tensor, torch.Tensor],
        keys: EntryView,
        candidates: torch.Tensor | None,
        codec: CacheCodec,
        layout: SequenceLayout,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        r"""Select entries for every query.

        Args:
            x (`torch.Tensor` of shape `[B, S, H]`): input of the layer's attention.
            q_latent (`torch.Tensor` of shape `[B, S, q_lora_rank]`): normalised query latent.
            table: cosine and sine of the tokens.
            keys (`EntryView`): index keys of the source layer, rounded.
            candidates (`torch.Tensor` of shape `[B, S, blocks]`, int32, *optional*): the pool to select in.
            codec (`CacheCodec`): rounding of index queries.
            layout (`SequenceLayout`): of the call.

        Returns:
            selection `[B, S, K]` int32 and, from the candidate source, the candidate blocks `[B, S, blocks]` int32.
        """
        queries, weights = self.make_queries(x, q_latent, table, codec)
        # Padding columns continue the count of positions beyond the entries that exist.
        visible = ((layout.position_ids + 1) // self.ratio).clamp(max=keys.count)
        pool = candidates if self.uses_candidates else None
        if pool is not None and pool.shape[-1] * self.block_size >= keys.count:
            pool = None  # it holds every entry
        kernel = find_kernel(self.kernels, "select_entries", queries, *keys.parts)
        blocks = self.config.candidate_topk_blocks if self.makes_candidates else 0
        if kernel is None or max(self.topk, blocks) > MAX_KERNEL_TOPK:
            return self._select_entries(queries, weights, visible, keys, pool)
        size = self.block_size if blocks or pool is not None else 0
        args = queries, keys.parts, weights, visible
        return kernel(*args, k=self.topk, pool=pool, block_size=size, pool_blocks=blocks)

    def _select_entries(self, queries, weights, visible, keys: EntryView, pool):
        """Select tile by tile of queries, among the entries of the blocks `pool` or among all (`None`)."""
        if pool is not None and pool[..., 0].numel() * pool.shape[-1] * self.block_size >= keys.count:
            keys = keys.unpacked()  # the queries together look up more keys than there are
        # In the pool every query has keys of its own; elsewhere they share them.
        each = keys.count if pool is None else pool.shape[-1] * self.block_size * self.head_dim
        step = max(1, MAX_TILE_ELEMENTS // max(1, len(queries) * each))
        selections, pools = [], []
        for tile in _tiles(queries.shape[1], step):
            args = queries[:, tile], weights[:, tile], visible[:, tile], keys
            selection, blocks = self._select(*args, None if pool is None else pool[:, tile])
            selections.append(selection.int())
            pools.append(blocks)
        return torch.cat(selections, dim=1), torch.cat(pools, dim=1) if self.makes_candidates else None

    def _select(self, queries, weights, visible, keys: EntryView, pool):
        """Select for one tile of queries."""
        if pool is not None:
            positions = expand_blocks(pool.long(), block_size=self.block_size)
            near = keys.gather(positions.clamp(max=keys.count - 1))
            hidden = (positions < 0) | (positions >= visible[..., None])
            scores = index_scores(queries, near, weights).masked_fill(hidden, float("-inf"))
            chosen = select_topk(scores, self.topk)
            return torch.where(chosen < 0, -1, positions.gather(-1, chosen.clamp(min=0))), None
        piece = max(1, MAX_TILE_ELEMENTS // max(1, queries[..., 0].numel()))
        scores = [index_scores(queries, keys.read(p.start, p.stop), weights) for p in _tiles(keys.count, piece)]
        scores = torch.cat(scores, dim=-1) if scores else queries.new_zeros(*queries.shape[:2], 0)
        hidden = torch.arange(keys.count, device=scores.device) >= visible[..., None]
        scores = scores.masked_fill(hidden, float("-inf"))
        blocks = None
        if self.makes_candidates:
            blocks = select_candidate_blocks(
                scores, visible, block_size=self.block_size, k=self.config.candidate_topk_blocks
            ).int()
        return select_topk(scores, self.topk), blocks


class Dsv4Attention(nn.Module):
    """Queries, window, compressed entries and grouped output of one layer (contract section 6)."""

    kernels = AUTO

    def __init__(self, config, layer_idx: int):
        super().__init__()
        self.heads, self.head_dim, self.window = config.num_attention_heads, config.head_dim, config.sliding_window
        self.groups, self.ratio = config.o_groups, config.ratio(layer_idx)
        self.config, self.mode = config, config.mode(layer_idx)
        self.rope = "main" if self.mode == "window" else "compress"
        self.scale = self.head_dim**-0.5
        self.q_a_proj = Dsv4Linear(config.hidden_size, config.q_lora_rank)
        self.q_a_norm = Dsv4RMSNorm(config.q_lora_rank, config.rms_norm_eps)
        self.q_b_proj = Dsv4Linear(config.q_lora_rank, self.heads * self.head_dim)
        self.kv_proj = Dsv4Linear(config.hidden_size, self.head_dim)
        self.kv_norm = Dsv4RMSNorm(self.head_dim, config.rms_norm_eps)
        group_width = self.heads * self.head_dim // self.groups
        self.o_a_proj = Dsv4GroupedLinear(group_width, self.groups * config.o_lora_rank, self.groups)
        self.o_b_proj = Dsv4Linear(self.groups * config.o_lora_rank, config.hidden_size)
        self.sinks = nn.Parameter(torch.empty(self.heads, dtype=torch.float32))
        if self.mode == "full":
            self.compressor = Dsv4Compressor(config, layer_idx, self.head_dim)
        self.selects = config.selects(layer_idx)
        if self.selects:
            self.indexer = Dsv4Indexer(config, layer_idx)

    def forward(
        self,
        x: torch.Tensor,
        state: SharedState,
        context: LayerContext,
        cache: Dsv4CacheLayer | None = None,
        rounded: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, SharedState]:
        r"""Attend.

        Args:
            x (`torch.Tensor` of shape `[B, S, H]`): normalised input, in shifted columns.
            state (`SharedState`): handed on by the layers before.
            context (`LayerContext`): of these tokens.
            cache (`Dsv4CacheLayer`, *optional*): of this layer.
            rounded (`torch.Tensor` of shape `[B, S, H]`, *optional*): x rounded to FP8, if the site did it.

        Returns:
            output `[B, S, H]`, dtype of `x`, and the state for the next layer.
        """
        if not context.pooled:
            state = self.pool(x, state, context, cache)
        table, codecs = context.tables[self.rope], cache_codecs(self.config)
        q_latent, queries = self.make_queries(x, table, rounded)
        window = self._keep_window(self._make_values(x, rounded), table, codecs["window"], context, cache)
        state = self._select(x, q_latent, state, context, codecs["index"])
        index = None
        if context.trains_indexers and self.selects:
            # Nothing of the backbone learns from the indexer.
            index = self.indexer.make_queries(x.detach(), q_latent.detach(), table, codecs["index"])
        out, divergence = self._attend(queries, window, state, context, index)
        if divergence is not None:
            state = state._replace(
                divergence=divergence if state.divergence is None else state.divergence + divergence
            )
        return self.project(out), state

    def make_queries(
        self, x: torch.Tensor, table: tuple, rounded: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the query latents `[B, S, q_lora_rank]` and the rotated queries `[B, S, heads, D]` of `x` `[B, S, H]`."""
        q_latent = self.q_a_norm(apply_rounded(self.q_a_proj, x, rounded))
        queries = self.q_b_proj(q_latent).unflatten(-1, (self.heads, self.head_dim))
        if self.config.normalizes_query_heads:
            # Every step is in the dtype of the queries, unlike a norm's (contract spec_v4 item 3).
            queries = unit_rms(queries, self.config.rms_norm_eps)
        turn = _find_store(self.kernels, queries, UNROUNDED)
        return q_latent, rotate(queries, table) if turn is None else turn(table)

    def make_window(self, x: torch.Tensor, table: tuple, rounded: torch.Tensor | None = None) -> torch.Tensor:
        """Return the rotated window entries `[B, S, D]` of `x` `[B, S, H]`, not rounded yet."""
        return rotate(self._make_values(x, rounded), table)

    def _make_values(self, x, rounded) -> torch.Tensor:
        """Return the window entries `[B, S, D]`, neither rotated nor rounded."""
        return self.kv_norm(apply_rounded(self.kv_proj, x, rounded))

    def _keep_window(self, values, table, codec: CacheCodec, context: LayerContext, cache) -> torch.Tensor | RingView:
        """Return past and new window entries, rounded: `[B, held + S, D]`, or the ring that a kernel wrote and will read."""
        ring, store = None if cache is None else cache.window, _find_store(self.kernels, values, codec)
        if ring is None:
            return codec.rounded(rotate(values, table)) if store is None else store(table)
        extra = cache.keep_extra(values.shape[1])
        if store is None or self._find_attention(values, context) is None or not isinstance(ring, TokenRing):
            return ring.append(rotate(values, table), context.layout, keep_extra=extra)
        return ring.store(values, context.layout, partial(store, table), reach=self.window, keep_extra=extra)

    def project(self, out: torch.Tensor) -> torch.Tensor:
        """Project the heads' outputs `[B, S, heads, D]`, turned back, to `[B, S, H]`."""
        return self.o_b_proj(self.o_a_proj(out.flatten(-2).unflatten(-1, (self.groups, -1))))

    def pool(
        self, x: torch.Tensor, state: SharedState, context: LayerContext, cache: Dsv4CacheLayer | None = None
    ) -> SharedState:
        """Of a full layer: pool entries and make index keys of all tokens; other layers hand the state on."""
        if self.mode != "full":
            return state
        store, codecs = None if cache is None else cache.store, cache_codecs(self.config)
        extra = 0 if cache is None else cache.keep_extra(x.shape[1])
        new = self.compressor(x, context.layout, store and store.open_group, extra)
        positions = (new.first[:, None] + torch.arange(new.latents.shape[1], device=x.device)) * self.ratio
        table = rotary_table(positions, context.frequencies[self.rope])
        entries = self._keep_entries(new.latents, table, new, store and store.entries, codecs["compressed"])
        keys = None
        if self.selects:
            # Gradients of index keys come from `indexer_divergence` alone and end here.
            with torch.set_grad_enabled(context.trains_indexers):
                latents = new._replace(latents=new.latents.detach())
                keys = self.indexer.make_keys(x.detach(), latents, context, cache)
                args = keys, table, new, store and store.index_keys, codecs["index"]
                keys = self._keep_entries(*args, indexer=self.indexer)
        return state._replace(entries=entries, index_keys=keys, selection=None)

    def _keep_entries(
        self,
        x,
        table,
        new: NewEntries,
        entries: EntryStore | None,
        codec: CacheCodec,
        indexer: Dsv4Indexer | None = None,
    ) -> EntryView:
        """Turn new entries, or the index keys of `indexer`, and write them to their store; without one, round them."""
        store = _find_store(self.kernels, x, codec)
        if store is None:
            x = rotate(x, table) if indexer is None else indexer.place(x, table)
        else:
            store = partial(store, table, hadamard=indexer is not None and indexer.rotates)
        if entries is not None:
            return entries.write(x, new.first, new.counts, new.total, store)
        return EntryView((codec.rounded(x) if store is None else store(),), UNROUNDED, x.dtype)

    def _select(self, x, q_latent, state, context, codec) -> SharedState:
        """Of a full or reindex layer: select entries; other layers hand the state on."""
        if not self.selects or self.config.index_topk is None:
            return state
        # A choice has no gradient; the language-model loss never reaches the indexer.
        with torch.no_grad():
            args = context.tables[self.rope], state.index_keys, state.candidates, codec, context.layout
            selection, candidates = self.indexer(x, q_latent, *args)
        candidates = state.candidates if candidates is None else candidates
        return state._replace(selection=selection, candidates=candidates)

    def _attend(self, queries, window, state: SharedState, context: LayerContext, index=None):
        """Attend, by a kernel if there is one.

        Returns the output, turned back, and, where `index` holds the queries and weights of an indexer, its divergence
        `[B, S]`.
        """
        table, kernel = context.tables[self.rope], self._find_attention(queries, context)
        if kernel is not None:
            return self._attend_by(kernel, queries, window, state, context.layout, table), None
        out, divergence = self._attend_by_tiles(queries, window, state, context.layout, index)
        return rotate(out, table, inverse=True), divergence

    def _attend_by_tiles(self, queries, window, state: SharedState, layout: SequenceLayout, index):
        """Attend tile by tile: no S x T scores and no S x K entries exist at once."""
        length, held = queries.shape[1], window.shape[1] - queries.shape[1]
        entries = state.entries if self.mode != "window" else None
        selection = state.selection if entries is not None else None
        # Numbers a query needs at once: scores of a window of keys before the tile and one in it; scores of the entries, or
        # entries of its own.
        each = self.heads * 2 * self.window
        if selection is not None:
            each += max(self.heads, self.head_dim) * selection.shape[-1]
        elif entries is not None:
            each += self.heads * entries.count
        everything = entries.read() if entries is not None and selection is None else None
        outputs, divergences = [], []
        step = min(MAX_TILE_ELEMENTS // (len(queries) * each), max(self.window, MIN_TILE))
        for tile in _tiles(length, max(1, step)):
            slots = slice(max(0, held + tile.start - self.window + 1), held + tile.stop)
            visible = (layout.position_ids[:, tile] + 1) // self.ratio if self.ratio else None
            args = queries[:, tile], window[:, slots], self._window_mask(tile, slots, held, layout)
            if entries is None or entries.count == 0:
                picked, mask = None, None
            elif selection is None:
                picked, mask = everything, torch.arange(entries.count, device=visible.device) < visible[..., None]
            else:
                picked, mask = entries.gather(selection[:, tile]), selection[:, tile] >= 0
            outputs.append(attend_with_sinks(*args, picked, mask, self.sinks, scale=self.scale))
            if index is not None and picked is not None:
                with torch.no_grad():
                    mass = attention_mass(*args, picked, mask, self.sinks, scale=self.scale)
                keys = state.index_keys.read() if selection is None else state.index_keys.gather(selection[:, tile])
                scores = index_scores(index[0][:, tile], keys, index[1][:, tile])
                divergences.append(indexer_divergence(scores, mass, mask))
        return torch.cat(outputs, dim=1), torch.cat(divergences, dim=1) if divergences else None

    def _find_attention(self, x: torch.Tensor, context: LayerContext) -> Callable | None:
        """The kernel of the whole attention, if there is one for queries or values `x`."""
        # There are no tensor cores for float32, and without them wide products are slower than PyTorch's. The divergence of
        # indexers needs the weights, which a kernel does not return.
        if context.trains_indexers or (x.dtype == torch.float32 and self.head_dim > 128):
            return None
        return find_kernel(self.kernels, "sparse_attention", x, self.sinks)

    def _attend_by(self, kernel: Callable, queries, window, state: SharedState, layout: SequenceLayout, table):
        """Attend by a kernel; returns the output, turned back."""
        entries = state.entries if self.mode != "window" else None
        is_ring = isinstance(window, RingView)
        window = window if is_ring else EntryView((window,), UNROUNDED, queries.dtype)
        kinds = {"window_format": window.codec.stored_format, "ring": is_ring, "floor": layout.floor}
        if entries is not None and entries.count:
            entries = entries if entries.codec.format else entries.unpacked()
            kinds |= {"entries": entries.parts, "entry_format": entries.codec.stored_format}
            kinds |= {"selection": state.selection, "ratio": self.ratio}
        kinds |= {"scale": self.scale, "window_size": self.window}
        attend = partial(kernel, queries, window.parts, layout.past, self.sinks, **kinds)
        if torch.is_grad_enabled():  # the kernel's own rotation has no gradient
            return rotate(attend(), table, inverse=True)
        return attend(table=table)

    def _window_mask(self, tile: slice, slots: slice, held: int, layout: SequenceLayout) -> torch.Tensor:
        """`[B, T, W]` bool: a query sees itself and the `window - 1` tokens before it, as far as they are there."""
        device = layout.past.device
        query = torch.arange(tile.start, tile.stop, device=device)[:, None] + held
        slot = torch.arange(slots.start, slots.stop, device=device)
        near = (slot <= query) & (slot > query - self.window)
        first = layout.past - held if layout.floor is None else layout.past - held - layout.floor
        return near & (first[:, None, None] + slot >= 0)


def _find_store(kernels: KernelSet | None, x: torch.Tensor, codec: CacheCodec) -> Callable | None:
    """The kernel that rotates `x` by a table, rounds as `codec` does, and stores, if there is one; it has no gradient."""
    kernel = None if torch.is_grad_enabled() or codec.format is None else find_kernel(kernels, "rotate_store", x)
    return kernel and partial(kernel, x, codec=codec.format, tail=codec.rotary)


def _tiles(length: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]
