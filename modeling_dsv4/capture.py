"""Optional outputs of a forward call: collapsed layer inputs, router logits, selections, what losses and drafters read.

They are gathered outside the layers, so that a layer's forward has one result whether or not somebody looks.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn

from .balance_loss import sequence_balance
from .decoder import StreamState
from .hyper_connections import collapse_streams
from .moe import Dsv4TopKRouter
from .sequence_layout import SequenceLayout
from .sparse_attention import wide


class Wanted(NamedTuple):
    """Which optional outputs of `Dsv4ModelOutput` a call asks for; all of them are of every token."""

    hidden_states: bool = False
    router_logits: bool = False
    selections: bool = False
    streams: bool = False
    draft_features: bool = False
    balance: bool = False
    divergence: bool = False


class OutputCapture:
    r"""Gathers what was asked for, in the caller's column order.

    Args:
        config (`Dsv41TextConfig` or `Dsv4Config`): schedule.
        layout (`SequenceLayout`): of the call.
        wanted (`Wanted`): what to gather.
        embeddings (`torch.Tensor` of shape `[B, S, H]`): input of layer 0. Single pass, that layer collapses to one of its
            copies; it is given back as it is, so that a gradient can be read from it.
        draft_layers (`list[int]`): layers whose entering streams a drafter reads.
        last_layout (`SequenceLayout`): the tokens that the last layer computes, of which a drafter reads.
    """

    def __init__(
        self,
        config,
        layout: SequenceLayout,
        wanted: Wanted,
        embeddings: torch.Tensor,
        draft_layers: list[int],
        last_layout: SequenceLayout,
    ):
        self.embeddings = embeddings if config.single_pass_hc else None
        self.config, self.layout, self.wanted = config, layout, wanted
        self.draft_layers, self.last_layout = draft_layers, last_layout
        self.hidden_states: list[torch.Tensor] = []
        self.router_logits: list[torch.Tensor] = []
        self.selections: dict[int, torch.Tensor] = {}
        self.draft_features: list[torch.Tensor] = []
        self.balance: torch.Tensor | None = None

    def reads_streams(self, index: int) -> bool:
        """Whether the streams that enter layer `index` are looked at, not only those that a site has at hand."""
        return self.wanted.hidden_states or index in self.draft_layers

    @contextmanager
    def watching(self, layer: nn.Module, flow: StreamState, layout: SequenceLayout):
        """Gather what enters the layer, in the columns of `layout`, and its router's logits while it runs."""
        if layer.layer_idx in self.draft_layers:
            means = wide(flow.streams).mean(2).to(flow.streams.dtype)
            self.draft_features.append(layout.take_tail(means, self.last_layout))
        if self.wanted.hidden_states and not self.hidden_states and self.embeddings is not None:
            self.hidden_states.append(self.embeddings)
        elif self.wanted.hidden_states:
            pre = layer.entering_pre(flow).to(flow.streams.device)
            self.hidden_states.append(self.layout.unshift(collapse_streams(flow.streams, pre)))
        wanted = self.wanted.router_logits or self.wanted.balance
        routers = [m for m in layer.modules() if isinstance(m, Dsv4TopKRouter)] if wanted else []
        # Only kept in the layer: what is computed there is computed again when gradients are checkpointed.
        routed: list[tuple] = []
        handles = [r.register_forward_hook(lambda *call: routed.append((call[0], *call[2]))) for r in routers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        for router, logits, _, indices in routed:
            self._add_routing(router, *(t.unflatten(0, (-1, self.layout.columns)) for t in (logits, indices)))

    def _add_routing(self, router: nn.Module, logits: torch.Tensor, indices: torch.Tensor) -> None:
        """Gather what a router made: logits `[B, S, E]` and experts `[B, S, k]`, in shifted columns."""
        if self.wanted.router_logits:
            self.router_logits.append(self.layout.unshift(logits).flatten(0, 1))
        if self.wanted.balance and not router.hashes:
            real, normalize = self.layout.real.to(logits.device), self.config.balance_loss_normalized
            found = sequence_balance(logits, indices, real, normalize=normalize)
            self.balance = found if self.balance is None else self.balance + found.to(self.balance.device)

    def add_selection(self, index: int, flow: StreamState) -> None:
        """Gather the selection of layer `index`, if it makes one, filled with -1 to `index_topk` places."""
        if not self.wanted.selections or flow.shared.selection is None:
            return
        if index in self.config.index_source_layer_ids:
            chosen = self.layout.unshift(flow.shared.selection).long()
            missing = self.config.index_topk - chosen.shape[-1]
            self.selections[index] = nn.functional.pad(chosen, (0, missing), value=-1)

    def fields(self, last_hidden_state: torch.Tensor, flow: StreamState) -> dict:
        """Return the optional fields of a model output; `last_hidden_state` `[B, S, H]` is in caller's order."""
        found = {}
        if self.wanted.hidden_states:
            found["hidden_states"] = (*self.hidden_states, last_hidden_state)
        if self.wanted.router_logits:
            found["router_logits"] = tuple(self.router_logits)
        if self.wanted.selections:
            found["selections"] = self.selections
        if self.balance is not None:
            found["balance"] = self.layout.unshift(self.balance[:, None].expand(-1, self.layout.columns))
        if self.wanted.streams:
            found["streams"] = self.layout.unshift(flow.streams)
        if self.wanted.draft_features:
            features = [part.to(flow.streams.device) for part in self.draft_features]
            found["draft_features"] = self.layout.unshift(torch.cat(features, dim=-1))
        if flow.shared.divergence is not None:
            found["divergence"] = self.layout.unshift(flow.shared.divergence)
        return found
