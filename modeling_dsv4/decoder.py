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
from .hyper_connections import Dsv4HyperConnection, collapse_streams, expand_streams
from .layers import Dsv4RMSNorm
from .moe import Dsv4SparseMoeBlock
from .sequence_layout import SequenceLayout


class StreamState(NamedTuple):
    r"""What flows from layer to layer: streams `[B, S, N, D]`, the carried pre `[B, S, N]`, the attention state."""

    streams: torch.Tensor
    pre: torch.Tensor
    shared: SharedState

    def tail(self, layout: SequenceLayout, tail: SequenceLayout) -> StreamState:
        """What flows of the tokens of `tail`, when this is of those of `layout`."""
        streams, pre = (layout.take_tail(t, tail) for t in (self.streams, self.pre))
        return StreamState(streams, pre, self.shared.tail(layout, tail))


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
        streams, pre, shared = flow
        if engram_rows is not None:
            streams = self.engram(streams, engram_rows, context.image_mask)
        # A site predicts its own coefficients; single pass, it collapses by the pre of the site before it.
        own_pre, post, comb = self.attn_hc(streams)
        x = self.input_layernorm(collapse_streams(streams, pre if self.single_pass else own_pre))
        if context.next_layout is not None:
            shared = self.self_attn.pool(x, shared, context, cache)
            take = partial(context.layout.take_tail, tail=context.next_layout)
            x, streams, own_pre, post, comb = map(take, (x, streams, own_pre, post, comb))
            context = context.tail(context.next_layout)
        x, shared = self.self_attn(x, shared, context, cache)
        streams, pre = expand_streams(streams, x, post, comb), own_pre

        own_pre, post, comb = self.ffn_hc(streams)
        x = self.post_attention_layernorm(collapse_streams(streams, pre if self.single_pass else own_pre))
        x = self.mlp(x, context.image_mask, context.input_ids, context.layout.real)
        return StreamState(expand_streams(streams, x, post, comb), own_pre, shared)

    def entering_pre(self, flow: StreamState) -> torch.Tensor:
        """The pre `[B, S, N]` by which the streams that enter the layer are collapsed."""
        return flow.pre if self.single_pass else self.attn_hc(flow.streams)[0]
