"""One decoder layer: Engram, attention site and expert site on the residual streams.

Source: contract section 4 (order of a layer), V4.1 report section 2.4.1 (which pre a site uses).
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from .attention import Dsv4Attention, LayerContext, SharedState
from .cache import Dsv4CacheLayer
from .engram import Dsv4EngramMemory
from .engram_reads import EngramRead
from .hyper_connections import Dsv4HyperConnection, Expansion, HyperConnectionSite, expand_streams
from .layers import Dsv4RMSNorm
from .moe import Dsv4SparseMoeBlock
from .sequence_layout import SequenceLayout


class StreamState(NamedTuple):
    r"""What flows from layer to layer: streams `[B, S, N, D]`, the carried pre `[B, S, N]`, the attention state.

    The output of the last sublayer is `pending`: the next site adds it to the `unsettled` streams, which it reads anyway.
    """

    unsettled: torch.Tensor
    pre: torch.Tensor
    shared: SharedState
    pending: Expansion | None = None

    @property
    def streams(self) -> torch.Tensor:
        """The streams with all that sublayers added to them."""
        return self.unsettled if self.pending is None else expand_streams(self.unsettled, *self.pending)

    def settled(self) -> StreamState:
        """The same with nothing pending."""
        return StreamState(self.streams, self.pre, self.shared)

    def tail(self, layout: SequenceLayout, tail: SequenceLayout) -> StreamState:
        """What flows of the tokens of `tail`, when this is of those of `layout`."""
        parts = (self.unsettled, self.pre, *(self.pending or ()))
        streams, pre, *pending = (layout.take_tail(t, tail) for t in parts)
        return StreamState(streams, pre, self.shared.tail(layout, tail), Expansion(*pending) if pending else None)


class Dsv4DecoderLayer(GradientCheckpointingLayer):
    """(Engram) -> attention site -> expert site."""

    def __init__(self, config, layer_idx: int):
        super().__init__()
        self.layer_idx, self.single_pass = layer_idx, config.single_pass_hc
        if layer_idx in config.engram_layer_ids:
            self.engram = Dsv4EngramMemory(config, layer_idx)
        self.input_layernorm = Dsv4RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Dsv4Attention(config, layer_idx)
        self.attn_hc = Dsv4HyperConnection(config)
        self.post_attention_layernorm = Dsv4RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = Dsv4SparseMoeBlock(config, layer_idx)
        self.ffn_hc = Dsv4HyperConnection(config)

    def forward(
        self,
        flow: StreamState,
        context: LayerContext,
        engram_rows: torch.Tensor | EngramRead | None = None,
        cache: Dsv4CacheLayer | None = None,
    ) -> StreamState:
        r"""Run the layer.

        Args:
            flow (`StreamState`): from the layer before.
            context (`LayerContext`): of the tokens of `flow`.
            engram_rows (`torch.Tensor` of shape `[B, S, lookups]`, int64, or their read, *optional*): of an Engram layer.
            cache (`Dsv4CacheLayer`, *optional*): of this layer.

        Returns:
            `StreamState` of the same tokens, or of those of `context.next_layout`.
        """
        if engram_rows is not None:
            flow = flow._replace(unsettled=self.engram(flow.streams, engram_rows, context.image_mask), pending=None)
        shared = flow.shared
        site = self.attn_hc(flow.unsettled, flow.pending, flow.pre, partial(self.input_layernorm))
        if context.next_layout is not None:
            shared = self.self_attn.pool(site.x, shared, context, cache)
            tails = (part if part is None else context.layout.take_tail(part, context.next_layout) for part in site)
            site = HyperConnectionSite(*tails)
            context = context.tail(context.next_layout)
        x, shared = self.self_attn(site.x, shared, context, cache, site.rounded_for(self.self_attn))
        site = self.ffn_hc(site.streams, site.expansion(x), site.pre, partial(self.post_attention_layernorm))
        x = self.mlp(site.x, context.image_mask, context.input_ids, context.layout.real, site.rounded_for(self.mlp))
        return StreamState(site.streams, site.pre, shared, site.expansion(x))

    def entering_pre(self, flow: StreamState) -> torch.Tensor:
        """The pre `[B, S, N]` by which the streams that enter the layer are collapsed."""
        return flow.pre if self.single_pass else self.attn_hc(flow.streams).pre
