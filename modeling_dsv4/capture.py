"""Optional outputs of a forward call: collapsed layer inputs, router logits, selections.

They are gathered outside the layers, so that a layer's forward has one result whether or not somebody looks.
"""

from __future__ import annotations

from contextlib import contextmanager

import torch
from torch import nn

from .balance_loss import sequence_balance
from .decoder import StreamState
from .hyper_connections import collapse_streams
from .moe import Dsv4TopKRouter
from .sequence_layout import SequenceLayout


class OutputCapture:
    r"""Gathers what was asked for, in the caller's column order.

    Args:
        config (`Dsv41TextConfig`): schedule, and the default of router logits.
        layout (`SequenceLayout`): of the call.
        hidden_states, router_logits, selections (`bool`, *optional*): what to gather.
        embeddings (`torch.Tensor` of shape `[B, S, H]`, *optional*): input of layer 0. Single pass, that layer collapses
            to one of its copies; it is given back as it is, so that a gradient can be read from it.
        balance (`bool`, *optional*): sum the balance of every sequence over the layers that choose experts.
    """

    def __init__(
        self,
        config,
        layout: SequenceLayout,
        hidden_states=None,
        router_logits=None,
        selections=None,
        embeddings: torch.Tensor | None = None,
        balance: bool = False,
    ):
        self.embeddings = embeddings if config.single_pass_hc else None
        self.config, self.layout = config, layout
        self.wants_router = config.output_router_logits if router_logits is None else router_logits
        self.hidden_states: list[torch.Tensor] | None = [] if hidden_states else None
        self.router_logits: list[torch.Tensor] | None = [] if self.wants_router else None
        self.selections: dict[int, torch.Tensor] | None = {} if selections else None
        self.wants_balance, self.balance = balance, None

    @contextmanager
    def watching(self, layer: nn.Module, flow: StreamState):
        """Gather the layer's collapsed input, and its router's logits while it runs."""
        if self.hidden_states == [] and self.embeddings is not None:
            self.hidden_states.append(self.embeddings)
        elif self.hidden_states is not None:
            self.hidden_states.append(self.layout.unshift(collapse_streams(flow.streams, layer.entering_pre(flow))))
        wanted = self.wants_router or self.wants_balance
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
        if self.wants_router:
            self.router_logits.append(self.layout.unshift(logits).flatten(0, 1))
        if self.wants_balance and not router.hashes:
            real, normalize = self.layout.real.to(logits.device), self.config.balance_loss_normalized
            found = sequence_balance(logits, indices, real, normalize=normalize)
            self.balance = found if self.balance is None else self.balance + found.to(self.balance.device)

    def add_selection(self, index: int, flow: StreamState) -> None:
        """Gather the selection of layer `index`, if it makes one, filled with -1 to `index_topk` places."""
        if self.selections is None or flow.shared.selection is None:
            return
        if index in self.config.index_source_layer_ids:
            chosen = self.layout.unshift(flow.shared.selection).long()
            missing = self.config.index_topk - chosen.shape[-1]
            self.selections[index] = nn.functional.pad(chosen, (0, missing), value=-1)

    def fields(self, last_hidden_state: torch.Tensor) -> dict:
        """Return the optional fields of a model output; `last_hidden_state` `[B, S, H]` is in caller's order."""
        hidden = None if self.hidden_states is None else (*self.hidden_states, last_hidden_state)
        router = None if self.router_logits is None else tuple(self.router_logits)
        found = {"hidden_states": hidden, "router_logits": router, "selections": self.selections}
        if self.balance is None:
            return found | {"balance": None}
        return found | {"balance": self.layout.unshift(self.balance[:, None].expand(-1, self.layout.columns))}
