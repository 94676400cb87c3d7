"""V4's multi-token prediction layer: from the state of a position and the next token to the token after it.

        streams [B, S, N, H] ──hnorm, h_proj──┐
        embed(next id) ──enorm, e_proj────────┴─ + ─> one window-only block ─ collapse ─ norm ─> shared head

As a drafter it proposes one token. Its window belongs to the cache: the entry that is kept with a token is that of the
position before it, whose next token it is.

Source: contract spec_v4 item 12, V4 report section 2.1 (depth 1).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from .attention import LayerContext, SharedState
from .cache import Dsv4Cache
from .cache_storage import TokenRing
from .decoder import Dsv4DecoderLayer, StreamState
from .dspark import DraftBlock, draft_context, window_frequencies
from .hyper_connections import Dsv4HyperHead, collapse_streams, first_pre
from .layers import Dsv4Linear, Dsv4RMSNorm
from .rotary import rotary_table
from .sequence_layout import SequenceLayout


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

    def enter(self, streams: torch.Tensor, next_embeds: torch.Tensor) -> torch.Tensor:
        """Return the streams `[B, S, N, H]` that enter the block (see `predict`)."""
        return self.e_proj(self.enorm(next_embeds)).unsqueeze(2) + self.h_proj(self.hnorm(streams))

    def predict(
        self,
        streams: torch.Tensor,
        next_embeds: torch.Tensor,
        context: LayerContext,
        cache: _ReadOnlyWindow | None = None,
    ) -> torch.Tensor:
        r"""Return the state from which the head predicts the token after the next one.

        Args:
            streams (`torch.Tensor` of shape `[B, S, N, H]`): of the backbone after its last layer.
            next_embeds (`torch.Tensor` of shape `[B, S, H]`): embedding of the token after each position.
            context (`LayerContext`): of the S positions.
            cache (*optional*): window entries of the positions before.

        Returns:
            `torch.Tensor` of shape `[B, S, H]`, normalised; dtype of the streams.
        """
        entering = self.enter(streams, next_embeds)
        leaving = self(StreamState(entering, first_pre(entering), SharedState()), context, cache=cache).streams
        return self.norm(collapse_streams(leaving, self.hc_head(leaving)))


class _ReadOnlyWindow:
    """A window as attention takes it, which does not keep what is added: a draft is no part of the past."""

    def __init__(self, ring: TokenRing, size: int, lengths: torch.Tensor):
        self.window, self._past, self._codec = self, ring.last(size, lengths), ring.codec

    def keep_extra(self, columns: int) -> int:
        return 0

    def append(self, x: torch.Tensor, layout: SequenceLayout, *, keep_extra: int = 0) -> torch.Tensor:
        return torch.cat([self._past, self._codec.rounded(x)], dim=1)


class Dsv4Mtp(nn.ModuleList):
    """The MTP layer as a drafter of one token; methods as in `Dsv4DSpark`."""

    target_layers: tuple[int, ...] = ()
    block_size = 1

    def __init__(self, config):
        super().__init__([Dsv4MtpLayer(config)])
        self.config = config

    def observe(
        self,
        features: list[torch.Tensor],
        streams: torch.Tensor,
        embeds: torch.Tensor,
        layout: SequenceLayout,
        cache: Dsv4Cache,
    ) -> None:
        """Keep the window entries of the positions before the tokens of a call (see `Dsv4DSpark.observe`)."""
        layer, (entries, last_streams), extra = self[0], cache.draft, cache.keep_extra(layout.columns)
        before = last_streams.append(streams, layout, keep_extra=extra)[:, -layout.columns - 1 : -1]
        entering = layer.enter(before, embeds)
        x = layer.input_layernorm(layer.attn_hc(entering).x)
        positions = (layout.position_ids - 1).clamp(min=0)  # the position before the first token is never attended
        table = rotary_table(positions, window_frequencies(self.config, embeds.device))
        entries.append(layer.self_attn.make_window(x, table), layout, keep_extra=extra)

    def propose(
        self,
        tokens: torch.Tensor,
        cache: Dsv4Cache,
        embed: Callable[[torch.Tensor], torch.Tensor],
        head: Callable[[torch.Tensor], torch.Tensor],
        choose: Callable[[int, torch.Tensor], torch.Tensor],
    ) -> DraftBlock:
        """Draft the token after `tokens` (see `Dsv4DSpark.propose`)."""
        entries, last_streams = cache.draft
        lengths = cache.lengths.to(tokens.device)
        past = lengths - 1
        layout = SequenceLayout(past, torch.ones_like(past), 1, floor=cache.window_floor).to(tokens.device)
        context = draft_context(self.config, layout, tokens[:, None])
        window = _ReadOnlyWindow(entries, self.config.sliding_window - 1, lengths)
        state = self[0].predict(last_streams.last(1, lengths), embed(tokens[:, None]), context, window)
        return DraftBlock(choose(0, head(state)[:, 0])[:, None], None)
