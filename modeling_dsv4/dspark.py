"""DSpark, the drafter of V4.1 (and of V4's -0731 build): five tokens from one pass over three small blocks.

        streams entering the target layers ─ mean ─ concat ─ main_proj ─ main_norm ─> m_p ─> a ring of entries per block
        [x, noise, noise, noise, noise] ─ embed ─> 3 blocks over ring and block ─ collapse ─ norm ─ head ─> base logits
        base logits + markov_head(previous token) ─> draft token;   confidence_head(state, previous token) ─> accepted?

A block is a backbone layer whose attention sees every entry of the ring and of the block, in both directions. The ring
belongs to the cache (`Dsv4Cache.draft`); it is filled by every forward of a model that has the drafter.

Sources: contract section 12, V4.1 report section 2.4.3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from .attention import Dsv4Attention, LayerContext, SharedState
from .cache import Dsv4Cache, cache_codecs
from .decoder import Dsv4DecoderLayer, StreamState
from .hyper_connections import Dsv4HyperHead, collapse_streams, first_pre
from .layers import Dsv4Head, Dsv4Linear, Dsv4RMSNorm
from .rotary import rotary_frequencies, rotary_table, rotate
from .sequence_layout import SequenceLayout
from .sparse_attention import attend_with_sinks


def window_frequencies(config, device: torch.device) -> torch.Tensor:
    """Return the rotation speeds `[P]` float32 of layers without compression, which draft stages are."""
    return rotary_frequencies(config.qk_rope_head_dim, config.rope_theta, device=device)


def draft_context(config, layout: SequenceLayout, input_ids: torch.Tensor | None = None) -> LayerContext:
    """Return the context of a draft stage for the tokens of `layout`."""
    frequencies = {"main": window_frequencies(config, layout.past.device)}
    tables = {"main": rotary_table(layout.position_ids, frequencies["main"])}
    return LayerContext(layout, tables, frequencies, input_ids=input_ids)


class DraftBlock(NamedTuple):
    """What a drafter proposes: tokens `[B, K]` int64 and, of DSpark, confidence logits `[B, K]` float32."""

    tokens: torch.Tensor
    confidence: torch.Tensor | None


class DraftContext(NamedTuple):
    """Entries of past tokens that a block attends: `[N, W, D]`, rounded, and which of them exist `[N, W]` bool."""

    entries: torch.Tensor
    mask: torch.Tensor


class Dsv4DraftAttention(Dsv4Attention):
    """Attention of a draft stage: every query sees the context and the whole block."""

    def forward(
        self,
        x: torch.Tensor,
        state: SharedState,
        context: LayerContext,
        cache: DraftContext,
        rounded: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, SharedState]:
        """Attend from a block `[N, K, H]`; `cache` is its context. Returns the output `[N, K, H]` and `state`."""
        table = context.tables[self.rope]
        _, queries = self.make_queries(x, table, rounded)
        block = cache_codecs(self.config)["window"].rounded(self.make_window(x, table, rounded))
        mask = torch.cat([cache.mask, cache.mask.new_ones(x.shape[:2])], dim=1)[:, None].expand(-1, x.shape[1], -1)
        entries = torch.cat([cache.entries, block], dim=1)
        out = attend_with_sinks(queries, entries, mask, None, None, self.sinks, scale=self.scale)
        return self.project(rotate(out, table, inverse=True)), state


class Dsv4MarkovHead(nn.Module):
    """Bias on the logits of a draft token from the token before it: `embed` `[V, R]`, `head` `[V, R]`."""

    def __init__(self, config):
        super().__init__()
        self.embed = nn.Embedding(config.vocab_size, config.dspark_markov_rank)
        self.head = Dsv4Head(config.dspark_markov_rank, config.vocab_size)


class Dsv4ConfidenceHead(nn.Module):
    """Logit that a draft token is accepted, from its state before the norm and the Markov embedding before it."""

    def __init__(self, config):
        super().__init__()
        self.proj = Dsv4Head(config.hidden_size + config.dspark_markov_rank, 1)


class Dsv4DSparkStage(Dsv4DecoderLayer):
    """One draft block; the first stage reads the backbone, the last one has the heads."""

    def __init__(self, config, stage: int):
        super().__init__(config, config.num_hidden_layers + stage)
        self.self_attn = Dsv4DraftAttention(config, self.layer_idx)
        if stage == 0:
            self.main_proj = Dsv4Linear(config.hidden_size * len(config.dspark_target_layer_ids), config.hidden_size)
            self.main_norm = Dsv4RMSNorm(config.hidden_size, config.rms_norm_eps)
        if stage == config.draft_stages - 1:
            if not config.single_pass_hc:
                self.hc_head = Dsv4HyperHead(config)
            self.norm = Dsv4RMSNorm(config.hidden_size, config.rms_norm_eps)
            self.markov_head = Dsv4MarkovHead(config)
            self.confidence_head = Dsv4ConfidenceHead(config)


class Dsv4DSpark(nn.ModuleList):
    r"""The drafter: its stages, and what is done with them.

    Args:
        config (`Dsv41TextConfig` or `Dsv4Config`): with `draft_stages` > 0.
    """

    def __init__(self, config):
        super().__init__([Dsv4DSparkStage(config, stage) for stage in range(config.draft_stages)])
        self.config = config

    @property
    def target_layers(self) -> list[int]:
        """Layers whose entering streams the drafter reads."""
        return self.config.dspark_target_layer_ids

    @property
    def block_size(self) -> int:
        """Tokens of a draft."""
        return self.config.dspark_block_size

    def make_entries(self, features: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        r"""Return what the stages attend of past tokens, not rounded yet.

        Args:
            features (`torch.Tensor` of shape `[B, S, targets * H]`): mean streams that enter the target layers.
            position_ids (`torch.Tensor` of shape `[B, S]`, int64).

        Returns:
            `torch.Tensor` of shape `[B, S, stages, D]`, dtype of `features`.
        """
        main = self[0].main_norm(self[0].main_proj(features))
        table = rotary_table(position_ids, window_frequencies(self.config, features.device))
        return torch.stack([stage.self_attn.make_window(main, table) for stage in self], dim=2)

    def run_block(
        self, embeds: torch.Tensor, first: torch.Tensor, entries: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        r"""Run the stages on blocks of draft positions.

        Args:
            embeds (`torch.Tensor` of shape `[N, K, H]`): of the known token and the noise tokens.
            first (`torch.Tensor` of shape `[N]`, int64): position of the known token.
            entries (`torch.Tensor` of shape `[N, W, stages, D]`): of past tokens, rounded. mask (`[N, W]`, bool).

        Returns:
            `torch.Tensor` of shape `[N, K, H]`: collapsed states before the last norm.
        """
        layout = SequenceLayout(first, torch.full_like(first, embeds.shape[1]), embeds.shape[1])
        context = draft_context(self.config, layout)
        streams = embeds.unsqueeze(2).expand(-1, -1, self.config.hc_mult, -1).contiguous()
        flow = StreamState(streams, first_pre(streams), SharedState())
        for stage, seen in zip(self, entries.unbind(2), strict=True):
            flow = stage(flow, context, None, DraftContext(seen, mask))
        streams = flow.streams
        return collapse_streams(streams, flow.pre if self.config.single_pass_hc else self[-1].hc_head(streams))

    def block_ids(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the ids `[N, K]` of blocks that begin with `tokens` `[N]`: noise follows."""
        noise = tokens.new_full((len(tokens), self.block_size - 1), self.config.dspark_noise_token_id)
        return torch.cat([tokens[:, None], noise], dim=1)

    def markov_logits(self, base: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """Add to base logits `[..., V]` the bias by the token before, `previous` `[...]` int64."""
        head = self[-1].markov_head
        return base + head.head(head.embed(previous))

    def confidence_logits(self, states: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """Return the logits `[...]` of acceptance, from states before the norm `[..., H]` and the tokens before `[...]`."""
        embedded = self[-1].markov_head.embed(previous).to(states.dtype)
        return self[-1].confidence_head.proj(torch.cat([states, embedded], dim=-1))[..., 0]

    def observe(
        self,
        features: list[torch.Tensor],
        streams: torch.Tensor,
        embeds: torch.Tensor,
        layout: SequenceLayout,
        cache: Dsv4Cache,
    ) -> None:
        r"""Keep of the tokens of a call what later drafts attend.

        Args:
            features (list of `[B, S, H]`): mean streams that enter each target layer.
            streams (`[B, S, N, H]`): after the last layer. embeds (`[B, S, H]`): of the tokens; both are MTP's.
            layout (`SequenceLayout`): of these tokens. cache (`Dsv4Cache`): of the call, with a ring for the drafter.
        """
        entries = self.make_entries(torch.cat(features, dim=-1), layout.position_ids)
        cache.draft[0].append(entries, layout, keep_extra=cache.keep_extra(layout.columns))

    def propose(
        self,
        tokens: torch.Tensor,
        cache: Dsv4Cache,
        embed: Callable[[torch.Tensor], torch.Tensor],
        head: Callable[[torch.Tensor], torch.Tensor],
        choose: Callable[[int, torch.Tensor], torch.Tensor],
    ) -> DraftBlock:
        r"""Draft the tokens after `tokens`, which the cache has not seen.

        Args:
            tokens (`torch.Tensor` of shape `[B]`, int64): the next token of each row.
            cache (`Dsv4Cache`): of everything before; it is not changed.
            embed, head: the model's embedding and prediction head.
            choose: from step i and its logits `[B, V]` to the draft tokens `[B]`.
        """
        window, lengths = self.config.sliding_window, cache.lengths.to(tokens.device)
        positions = lengths[:, None] - window + torch.arange(window, device=tokens.device)
        # Bounded replay leaves nothing before its floor.
        first = 0 if cache.window_floor is None else cache.window_floor[:, None].to(tokens.device)
        entries = cache.draft[0].last(window, lengths)
        states = self.run_block(embed(self.block_ids(tokens)), lengths, entries, positions >= first)
        base = head(self[-1].norm(states))
        previous, drafted = [tokens], []
        for step in range(self.block_size):
            drafted.append(choose(step, self.markov_logits(base[:, step], previous[-1])))
            previous.append(drafted[-1])
        confidence = self.confidence_logits(states, torch.stack(previous[:-1], dim=1))
        return DraftBlock(torch.stack(drafted, dim=1), confidence)
