"""The language model of both families: the forward path, the head and the losses.

        input_ids ── embed ── N equal streams ──> layers 0 … L-1 (Dsv4DecoderLayer) ── collapse ── norm ── head

The forward path is all here; each mechanism has a file of its own. Rows are shifted so that their real tokens come
first (`SequenceLayout`) and outputs are shifted back. The entry files name the classes.

Sources: V4.1 report section 2, V4 report section 2, contract sections 4 and spec_v4.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast
from transformers.utils import can_return_tuple, logging
from transformers.utils.deprecation import deprecate_kwarg

from .attention import LayerContext, SharedState
from .balance_loss import mean_over_labels
from .cache import Dsv4Cache, check_cache, check_empty
from .capture import OutputCapture, Wanted
from .decode_graph import DecodeGraph
from .decoder import Dsv4DecoderLayer, StreamState
from .decoder_replay import DecoderReplay, check_replay
from .draft_losses import DraftBatch, DraftLosses, DraftTraining, detached, draft_losses, sample_anchors
from .dspark import Dsv4DSpark
from .engram_reads import begin_reads
from .hyper_connections import Dsv4HyperHead, collapse_streams, first_pre
from .layers import Dsv4Head, Dsv4RMSNorm
from .mtp import Dsv4Mtp
from .ngram_hash import Dsv4NgramHash
from .pretrained_model import Dsv4PreTrainedModel
from .rotary import rotary_frequencies, rotary_table
from .sequence_layout import SequenceLayout, follows_layout, read_attention_mask

logger = logging.get_logger(__name__)


@dataclass
class Dsv4ModelOutput(MoeModelOutputWithPast):
    r"""Output of the text model.

    Args:
        last_hidden_state (`[B, S, H]`): collapsed, normalised.
        cache (`Dsv4Cache`, *optional*).
        hidden_states (tuple of `[B, S, H]`, *optional*): collapsed input of every layer, then the final state.
        router_logits (tuple of `[B * S, E]` float32, *optional*): of every layer.
        selections (`{layer: [B, S, index_topk] int64}`, *optional*): compressed positions, -1 = none, of every layer that
            selects.
        streams (`[B, S, N, H]`, *optional*): residual streams after the last layer, before they are collapsed.
        draft_features (`[B, S, targets * H]`, *optional*): what the DSpark drafter reads of the backbone.
        balance (`[B, S]`, *optional*): `sequence_balance` of each position's sequence, summed over the layers.
        divergence (`[B, S]`, *optional*): `indexer_divergence` of each position, summed over the layers that select.
    """

    selections: dict[int, torch.Tensor] | None = None
    streams: torch.Tensor | None = None
    draft_features: torch.Tensor | None = None
    balance: torch.Tensor | None = None
    divergence: torch.Tensor | None = None


@dataclass
class Dsv4CausalLMOutput(MoeCausalLMOutputWithPast):
    r"""Output of the language models: `loss`, `logits` `[B, S, V]` float32, and the fields of `Dsv4ModelOutput`.

    In training, before their weights: `aux_loss`, the sequence-wise balance loss, `indexer_loss`, the divergence of the
    indexers from the attention of their layers, `mtp_loss` (V4), the loss of the token after the next one, and
    `draft_losses` (`DraftLosses`) of a DSpark drafter. `loss_parts`: what each part adds to `loss`, detached.
    """

    selections: dict[int, torch.Tensor] | None = None
    streams: torch.Tensor | None = None
    draft_features: torch.Tensor | None = None
    indexer_loss: torch.Tensor | None = None
    mtp_loss: torch.Tensor | None = None
    draft_losses: DraftLosses | None = None
    loss_parts: dict[str, torch.Tensor] | None = None

    def add_loss(self, name: str, part: torch.Tensor, weight: float = 1.0) -> None:
        """Add a part to the loss."""
        part = part * weight
        self.loss = part if self.loss is None else self.loss + part.to(self.loss.device)
        self.loss_parts = (self.loss_parts or {}) | {name: part.detach()}


def _columns_read(logits_to_keep: int | torch.Tensor, columns: int) -> int:
    """How many of the last columns hold all that `logits_to_keep` names (0 = all)."""
    if isinstance(logits_to_keep, int) and logits_to_keep >= 0:
        return min(logits_to_keep or columns, columns)
    if not isinstance(logits_to_keep, torch.Tensor):
        raise ValueError(
            f"logits_to_keep is {logits_to_keep!r}; accepted: a number of last columns >= 0 (0 = all), or an index tensor."
        )
    named = torch.arange(columns, device=logits_to_keep.device)[logits_to_keep]
    return columns - int(named.min()) if len(named) else 1


class Dsv4LanguageModel(Dsv4PreTrainedModel):
    """Embedding, layers, final collapse and norm; the entry files derive from it."""

    # For `from_pretrained(distributed_config=...)`: whole experts on each rank, everything else sharded by layer.
    _ep_plan = {
        "layers.*.mlp.experts": "ep_dispatch_experts",
        "layers.*.mlp.experts.gate_up_proj": "grouped_gemm",
        "layers.*.mlp.experts.down_proj": "grouped_gemm",
    }
    _fsdp_plan = {"embed_tokens": "free_full_weight", "layers.*": "free_full_weight", "norm": "keep_full_weight"}

    def __init__(self, config):
        super().__init__(config)
        text = self.config.get_text_config()
        self.embed_tokens = nn.Embedding(text.vocab_size, text.hidden_size)
        self.layers = nn.ModuleList([Dsv4DecoderLayer(text, layer) for layer in range(text.num_hidden_layers)])
        self.norm = Dsv4RMSNorm(text.hidden_size, text.rms_norm_eps)
        if not text.single_pass_hc:
            self.hc_head = Dsv4HyperHead(text)
        if text.engram_layer_ids:
            self.ngram_hash = Dsv4NgramHash(text)
        self.gradient_checkpointing = False

    @can_return_tuple
    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Dsv4Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_router_logits: bool | None = None,
        output_selections: bool = False,
        output_streams: bool = False,
        output_draft_features: bool = False,
        logits_to_keep: int | torch.Tensor = 0,
        output_balance: bool = False,
        output_divergence: bool = False,
        decoder_replay: str = "full",
        **kwargs,
    ) -> Dsv4ModelOutput:
        r"""Run all layers.

        Args:
            input_ids (`[B, S]`, int64): token ids; needed beside `inputs_embeds` by models with Engram.
            attention_mask: see `read_attention_mask`.
            position_ids (`[B or 1, S]`): of the real tokens of each row, checked against mask and cache; where they restart
                at 0, another document begins, which sees nothing of the ones before.
            cache (`Dsv4Cache`, *optional*): continued and extended in place.
            inputs_embeds (`[B, S, H]`, *optional*): used instead of the embeddings of `input_ids`.
            use_cache (`bool`, *optional*): make a cache if none is given; defaults to the config, and to `False` in
                training mode.
            output_hidden_states, output_router_logits, output_selections, output_streams, output_draft_features,
                output_balance, output_divergence (`bool`, *optional*): see `Dsv4ModelOutput`.
            logits_to_keep (`int` or index tensor, *optional*, defaults to 0): last columns whose final state will be
                read, 0 = all; "exact" and "bounded" return zeros for the columns that they leave out.
            decoder_replay (`str`, *optional*, defaults to `"full"`): "full" runs every layer on every token; "exact" gives
                the same final states and cache, without decoder work that nothing reads; "bounded" approximates the
                windows of the decoder from the last `sliding_window` tokens of the call. See `DecoderReplay`.

        Raises:
            ValueError: for inputs that contradict each other, the cache or the model.
        """
        text = self.config.get_text_config()
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        if output_router_logits is None:
            output_router_logits = text.output_router_logits
        wanted = Wanted(
            output_hidden_states, output_router_logits, output_selections, output_streams, output_draft_features,
            output_balance, output_divergence,
        )  # fmt: skip
        self._check_inputs(input_ids, inputs_embeds, cache, wanted, kwargs)
        embeds = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        layout, valid = self._layout(attention_mask, position_ids, cache, embeds)
        keep = _columns_read(logits_to_keep, embeds.shape[1])
        keep = layout.columns if any(wanted) or layout.is_packed else keep
        check_replay(decoder_replay, keep=keep, columns=layout.columns, window=text.sliding_window)
        if cache is None and self._wants_cache(use_cache, layout):
            cache = Dsv4Cache(self.config, "packed" if text.cache_rounding else "float")
        context, rows = self._context(input_ids, layout, cache, embeds, output_divergence)
        replay = DecoderReplay(decoder_replay, text, context, keep, cache)
        rows = self._begin_reads(rows, layout, replay)
        streams = layout.shift(embeds).unsqueeze(2).expand(-1, -1, text.hc_mult, -1)
        flow = StreamState(streams.contiguous(), first_pre(streams), SharedState())
        draft_layers = self._draft_layers(output_draft_features or cache is not None)
        capture = OutputCapture(text, layout, wanted, embeds, draft_layers, replay.layout)
        for index, layer in enumerate(self.layers):
            flow, context = replay.enter(index, flow)
            flow = flow.settled() if capture.reads_streams(index) else flow
            with capture.watching(layer, flow, context.layout):
                flow = layer(flow, context, rows.get(index), None if cache is None else cache.layers[index])
            capture.add_selection(index, flow)
        flow = flow.settled()
        pre = flow.pre if text.single_pass_hc else self.hc_head(flow.streams)
        hidden = self.norm(collapse_streams(flow.streams, pre.to(flow.streams.device)))
        hidden = layout.unshift(layout.put_tail(hidden, replay.layout))
        if cache is not None:
            self._feed_drafter(
                capture.draft_features, flow.streams, layout.shift(embeds), layout, replay.layout, cache
            )
            cache.advance(layout, valid, replay.window_floor)
        return Dsv4ModelOutput(last_hidden_state=hidden, cache=cache, **capture.fields(hidden, flow))

    def _begin_reads(self, rows, layout: SequenceLayout, replay: DecoderReplay) -> dict:
        """Begin to read the Engram rows of the tokens that each layer is given."""
        rows = {index: layout.take_tail(found, replay.layout_entering(index)) for index, found in rows.items()}
        return begin_reads({index: self.layers[index].engram.embedding for index in rows}, rows)

    @property
    def drafter(self) -> Dsv4DSpark | Dsv4Mtp | None:
        """The drafter, if the model was made or loaded with one."""
        return getattr(self, "mtp", None)

    @property
    def drafter_device(self) -> torch.device:
        """Where the drafter computes: another device than the first layers' where a device map says so."""
        device = self.drafter[0].input_layernorm.weight.device
        # Weights that are offloaded come when they are used.
        return self.norm.weight.device if device.type == "meta" else device

    def _draft_layers(self, wanted: bool) -> list[int]:
        """Layers whose entering streams the drafter reads."""
        return self.drafter.target_layers if wanted and self.drafter is not None else []

    def _feed_drafter(self, features, streams, embeds, layout, last_layout, cache) -> None:
        """Let the drafter keep what it needs of the tokens that the last layer computed, if it saw all before them."""
        if self.drafter is None or not cache.draft:
            return
        if cache.draft[0].parts is not None or not (layout.is_static or bool(layout.past.any())):
            device = self.drafter_device
            features = [part.to(device) for part in features]
            streams, embeds = streams.to(device), layout.take_tail(embeds, last_layout).to(device)
            with torch.no_grad():
                self.drafter.observe(features, streams, embeds, last_layout.to(device), cache)

    @property
    def _checkpoints(self) -> bool:
        """Whether layers will run a second time in the backward pass."""
        return self.gradient_checkpointing and self.training and torch.is_grad_enabled()

    def _wants_cache(self, use_cache: bool | None, layout: SequenceLayout) -> bool:
        if layout.is_packed and use_cache:
            raise ValueError("use_cache is True and position_ids restart; accepted: packed documents without a cache.")
        if layout.is_packed:
            return False
        if self._checkpoints:
            if use_cache:
                logger.warning_once("use_cache=True with gradient checkpointing: no cache is made.")
            return False
        if use_cache is None:
            # Entries in a cache carry no gradient; nobody asks for one by default while training.
            return self.config.get_text_config().use_cache and not self.training
        return use_cache

    def _check_inputs(self, input_ids, inputs_embeds, cache, wanted: Wanted, kwargs) -> None:
        if input_ids is None and inputs_embeds is None:
            raise ValueError("input_ids and inputs_embeds are both None; accepted: input_ids, or both.")
        shapes = [list(t.shape) for t in (input_ids, inputs_embeds) if t is not None]
        text, size = self.config.get_text_config(), shapes[-1][:2]
        width = [] if inputs_embeds is None else [text.hidden_size]
        if shapes[-1] != size + width or len(size) < 2 or 0 in size or any(s[:2] != size for s in shapes):
            raise ValueError(
                f"input_ids / inputs_embeds have the shapes {shapes}; accepted: [B, S] and [B, S, {text.hidden_size}], "
                "not empty."
            )
        if kwargs.get("pixel_values") is not None:
            raise ValueError("pixel_values were given to a text model; accepted: by Dsv41ForConditionalGeneration.")
        reader = "Engram looks up n-grams of" if text.engram_layer_ids else "first layers route by"
        if input_ids is None and (text.engram_layer_ids or text.num_hash_layers):
            raise ValueError(f"inputs_embeds without input_ids; this model's {reader} token ids, so accepted: both.")
        if kwargs.get("output_attentions"):
            raise ValueError("output_attentions is True; accepted: False. Attention weights are never materialised.")
        check_cache(cache, text)
        if cache is not None and self._checkpoints:
            raise ValueError(
                "cache is given while gradients are checkpointed, which would fill it twice; accepted: None."
            )
        if wanted.draft_features and (self.drafter is None or not self.drafter.target_layers):
            raise ValueError("output_draft_features is True for a model without a DSpark drafter; accepted: False.")

    def _layout(self, attention_mask, position_ids, cache, embeds) -> tuple[SequenceLayout, torch.Tensor | None]:
        """Return the layout of the call and the mask of its columns before shifting (`None`: all real)."""
        batch, columns = embeds.shape[:2]
        seen, seen_mask = (0, None) if cache is None else (cache.columns, cache.column_mask)
        valid = read_attention_mask(attention_mask, batch, columns, seen, seen_mask, more_may_follow=cache is not None)
        if cache is None:
            past = torch.zeros(batch, dtype=torch.long, device=embeds.device)
            layout = SequenceLayout.from_mask(valid, past, columns, begins=True)
        else:
            layout = cache.layout(valid, batch, columns, embeds.device)
        if follows_layout(position_ids, layout):
            return layout, valid
        if cache is not None:
            raise ValueError(
                "position_ids must count the real tokens of each row from 0 (after the cached ones); accepted with a cache: "
                "rows of one document."
            )
        real = torch.ones(batch, columns, dtype=torch.bool, device=embeds.device) if valid is None else valid
        return SequenceLayout.from_documents(position_ids.to(embeds.device).expand(batch, -1), real), valid

    def _context(
        self, input_ids, layout, cache, embeds, trains_indexers: bool = False
    ) -> tuple[LayerContext, dict[int, torch.Tensor]]:
        """Return what the layers share, and the Engram rows of every Engram layer."""
        text, device = self.config.get_text_config(), embeds.device
        frequencies = {
            "main": rotary_frequencies(text.qk_rope_head_dim, text.rope_theta, device=device),
            "compress": rotary_frequencies(text.qk_rope_head_dim, text.compress_rope_theta, text.yarn, device=device),
        }
        tables = {name: rotary_table(layout.position_ids, speed) for name, speed in frequencies.items()}
        ids = None if input_ids is None else layout.shift(input_ids)
        image_mask, asks_nothing = None, layout.is_static or torch.compiler.is_exporting()
        image_token_id = getattr(self.config, "image_token_id", None)
        if ids is not None and image_token_id is not None and text.has_image_bias:
            image_mask = ids == image_token_id
            image_mask = image_mask if asks_nothing or bool(image_mask.any()) else None
        rows = {}
        if text.engram_layer_ids:
            compressed = self.ngram_hash.compress(ids, image_mask, check=not asks_nothing)
            if cache is not None:
                extra = cache.keep_extra(layout.columns)
                compressed = cache.ngram_ids.append(compressed, layout, keep_extra=extra)
            rows = self.ngram_hash(compressed, layout.past, layout.columns)
        return LayerContext(layout, tables, frequencies, image_mask, ids, trains_indexers=trains_indexers), rows


class CausalHead:
    """Logits and loss on top of a model's output, for the classes with a head."""

    draft_training: DraftTraining | None = None

    def get_compiled_call(self, compile_config):
        """What `generate` decodes with over a cache of fixed capacity on a GPU: a CUDA graph, or what a config compiles."""
        return DecodeGraph(self) if compile_config is None else super().get_compiled_call(compile_config)

    def _run(self, inputs: dict, labels, logits_to_keep, num_items_in_batch) -> Dsv4CausalLMOutput:
        """Run the model on `inputs`, the other arguments of `forward`, and put the head and the losses on."""
        shift_labels = inputs.pop("shift_labels", None)
        if labels is not None:
            self._check_labels(labels, inputs, logits_to_keep)
        drafting = self._draft_training_of(inputs, labels, shift_labels)
        inputs |= {"logits_to_keep": logits_to_keep, "return_dict": True, **self._loss_inputs(labels, shift_labels)}
        if drafting is not None:
            inputs["output_draft_features"] = True
        labels = self._within_documents(labels, inputs["position_ids"])
        frozen = drafting is not None and drafting.stage == "frozen"
        with torch.set_grad_enabled(torch.is_grad_enabled() and not frozen):
            outputs = self.model(**inputs)
            result = self._add_head(outputs, labels, logits_to_keep, num_items_in_batch, shift_labels)
        if drafting is not None:
            self._add_draft_losses(result, drafting, inputs, labels, num_items_in_batch)
        return result

    @staticmethod
    def _check_labels(labels: torch.Tensor, inputs: dict, logits_to_keep) -> None:
        given = next((t for t in (inputs["input_ids"], inputs["inputs_embeds"]) if t is not None), labels)
        if labels.shape != given.shape[:2]:
            raise ValueError(f"labels have shape {list(labels.shape)}; accepted: {list(given.shape[:2])}.")
        if isinstance(logits_to_keep, int) and 0 < logits_to_keep < labels.shape[1]:
            raise ValueError(f"logits_to_keep is {logits_to_keep} with labels; accepted: 0, which keeps all logits.")

    def _draft_training_of(self, inputs: dict, labels, shift_labels) -> DraftTraining | None:
        """How this call trains the drafter, `None` if it does not."""
        if self.draft_training is None or not self.training or (labels is None and shift_labels is None):
            return None
        if labels is None:
            raise ValueError("shift_labels came without labels while a drafter is trained; accepted: labels.")
        if inputs["input_ids"] is None:
            raise ValueError("input_ids is None while a drafter is trained; accepted: the ids of inputs_embeds.")
        check_empty(inputs["cache"], "a drafter")
        return self.draft_training

    def _add_draft_losses(self, result, drafting: DraftTraining, inputs: dict, labels, num_items_in_batch) -> None:
        """Add the losses of the drafter to a result; with a frozen backbone they are all its loss."""
        batch = DraftBatch.make(inputs["input_ids"], labels, inputs["attention_mask"], inputs["position_ids"])
        shared = detached(self.get_input_embeddings()), detached(self.lm_head)
        read = result.draft_features, result.logits.detach(), batch, sample_anchors(batch, drafting.anchors)
        result.draft_losses = draft_losses(self.drafter, *shared, *read, num_items_in_batch)
        if drafting.stage == "frozen":
            result.loss, result.loss_parts = None, None
        result.add_loss("draft", drafting.total(result.draft_losses))

    def _put_head_on(self, model: nn.Module) -> None:
        """Finish a class: its model, the prediction head, initial weights, and the options of `generate`."""
        text = self.config.get_text_config()
        self.model, self.vocab_size = model, text.vocab_size
        self.lm_head = Dsv4Head(text.hidden_size, text.vocab_size)
        self.post_init()
        self.set_generation_options()

    @staticmethod
    def _within_documents(labels: torch.Tensor | None, position_ids: torch.Tensor | None, ahead: int = 1):
        """Labels without those that lie `ahead` tokens behind a token of the document before (no loss: -100)."""
        if labels is None or position_ids is None:
            return labels
        return labels.masked_fill(position_ids.to(labels.device) < ahead, -100)

    def _loss_inputs(self, labels, shift_labels) -> dict[str, bool]:
        """Which outputs of the model the parts of the loss need."""
        trains = self.training and torch.is_grad_enabled() and not (labels is None and shift_labels is None)
        text = self.config.get_text_config()
        return {
            "output_balance": trains and text.balance_loss_weight > 0,
            "output_divergence": trains and text.indexer_loss_weight > 0,
        }

    def _add_head(self, outputs: Dsv4ModelOutput, labels, logits_to_keep, num_items_in_batch, shift_labels):
        """Return logits of the kept positions, the loss if there are labels, and the model's optional outputs.

        `shift_labels` `[B, S]` are labels already shifted, as sequence parallelism passes them; they win over `labels`.
        """
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, keep])
        result = Dsv4CausalLMOutput(
            logits=logits,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            router_logits=outputs.router_logits,
            selections=outputs.selections,
            streams=outputs.streams,
            draft_features=outputs.draft_features,
        )
        if labels is None and shift_labels is None:
            return result
        if shift_labels is not None:
            shift_labels = shift_labels.contiguous()  # the loss views them as one row
        options = {"num_items_in_batch": num_items_in_batch, "shift_labels": shift_labels}
        options = {name: value for name, value in options.items() if value is not None}
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.vocab_size, **options)
        if not self.training:
            result.loss = loss
            return result
        result.add_loss("lm", loss)
        shifted = nn.functional.pad(labels[:, 1:], (0, 1), value=-100) if shift_labels is None else shift_labels
        text = self.config.get_text_config()
        if outputs.balance is not None:
            result.aux_loss = mean_over_labels(outputs.balance, shifted, num_items_in_batch)
            result.add_loss("balance", result.aux_loss, text.balance_loss_weight)
        if outputs.divergence is not None:
            result.indexer_loss = mean_over_labels(outputs.divergence, shifted, num_items_in_batch)
            result.add_loss("indexer", result.indexer_loss, text.indexer_loss_weight)
        return result
