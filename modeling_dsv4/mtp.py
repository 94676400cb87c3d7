"""V4's multi-token prediction layer: from the state of a position and the next token to the token after it.

        streams [B, S, N, H] ──hnorm, h_proj──┐
        embed(next id) ──enorm, e_proj────────┴─ + ─> one window-only block ─ collapse ─ norm ─> shared head

Source: contract spec_v4 item 12, V4 report section 2.1 (depth 1).
"""

from __future__ import annotations

import torch

from .attention import LayerContext, SharedState
from .decoder import Dsv4DecoderLayer, StreamState
from .hyper_connections import Dsv4HyperHead, collapse_streams, first_pre
from .layers import Dsv4Linear, Dsv4RMSNorm


class Dsv4MtpLayer(Dsv4DecoderLayer):
    """One window-only block with score routing, its own input projections, collapse and norm; embedding and head are shared."""

    def __init__(self, config):
        # The block stands behind the backbone: no compression, no hash routing.
        super().__init__(config, config.num_hidden_layers)
        self.enorm = Dsv4RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hnorm = Dsv4RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.e_proj = Dsv4Linear(config.hidden_size, config.hidden_size)
        self.h_proj = Dsv4Linear(config.hidden_size, config.hidden_size)
        self.hc_head = Dsv4HyperHead(config)
        self.norm = Dsv4RMSNorm(config.hidden_size, config.rms_norm_eps)

    def predict(self, streams: torch.Tensor, next_embeds: torch.Tensor, context: LayerContext) -> torch.Tensor:
        r"""Return the state from which the head predicts the token after the next one.

        Args:
            streams (`torch.Tensor` of shape `[B, S, N, H]`): of the backbone after its last layer.
            next_embeds (`torch.Tensor` of shape `[B, S, H]`): embedding of the token after each position.
            context (`LayerContext`): of the S positions.

        Returns:
            `torch.Tensor` of shape `[B, S, H]`, normalised; dtype of the streams.
        """
        entering = self.e_proj(self.enorm(next_embeds)).unsqueeze(2) + self.h_proj(self.hnorm(streams))
        flow = self(StreamState(entering, first_pre(entering), SharedState()), context)
        return self.norm(collapse_streams(flow.streams, self.hc_head(flow.streams)))
