"""DeepSeek-V4.1 for transformers: the text model and the causal language model.

        input_ids ── embed ── N equal streams ──> layers 0 … L-1 (Dsv4DecoderLayer) ── collapse ── norm ── head

The forward path is all here; each mechanism has a file of its own. Rows are shifted so that their real tokens come
first (`SequenceLayout`) and outputs are shifted back.

Sources: V4.1 report section 2, contract section 4.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast
from transformers.utils import can_return_tuple
from transformers.utils.deprecation import deprecate_kwarg

from .attention import Dsv4Attention, LayerContext, SharedState
from .cache import Dsv4Cache
from .capture import OutputCapture
from .configuration_deepseek_v41 import Dsv41Config
from .decoder import Dsv4DecoderLayer, StreamState
from .engram import Dsv4EngramMemory
from .generation_dsv4 import Dsv4GenerationMixin, check_cache, check_replay
from .host_tensors import host_modules
from .hyper_connections import Dsv4HyperConnection, collapse_streams, first_pre
from .layers import Dsv4Head, Dsv4RMSNorm
from .moe import Dsv4Experts, Dsv4TopKRouter
from .ngram_hash import Dsv4NgramHash, build_token_map
from .quantization import register_quantizer
from .released_loading import ReleasedCheckpointMixin, weight_transforms
from .rotary import rotary_frequencies, rotary_table
from .sequence_layout import SequenceLayout, check_position_ids, read_attention_mask
from .weight_names import WeightNames

# Start of the mixing scales: the static coefficients A = 0.5, C = 1 dominate a fresh model (V4 report section 2.2).
INITIAL_MIXING_SCALE = 0.01


@dataclass
class Dsv41ModelOutput(MoeModelOutputWithPast):
    r"""Output of the text model.

    Args:
        last_hidden_state (`[B, S, H]`): collapsed, normalised.
        cache (`Dsv4Cache`, *optional*).
        hidden_states (tuple of `[B, S, H]`, *optional*): collapsed input of every layer, then the final state.
        router_logits (tuple of `[B * S, E]` float32, *optional*): of every layer.
        selections (`{layer: [B, S, index_topk] int64}`, *optional*): compressed positions, -1 = none, of every layer that
            selects.
    """

    selections: dict[int, torch.Tensor] | None = None


@dataclass
class Dsv41CausalLMOutput(MoeCausalLMOutputWithPast):
    r"""Output of the language models: `loss`, `logits` `[B, S, V]` float32, and the fields of `Dsv41ModelOutput`."""

    selections: dict[int, torch.Tensor] | None = None


def _composite(config) -> Dsv41Config:
    """Return a composite config; a text config alone is wrapped."""
    return config if hasattr(config, "text_config") else Dsv41Config(text_config=config)


def _text_only(config) -> Dsv41Config:
    """Return the config of a model without vision tower and drafts: what it would save must say so."""
    config = _composite(config)
    text = config.text_config
    if config.vision_config is None and not text.num_nextn_predict_layers:
        return config
    config = copy.deepcopy(config)
    config.vision_config, text = None, config.text_config
    text.num_nextn_predict_layers = 0
    text.compress_ratios = text.compress_ratios[: text.num_hidden_layers]
    return config


class Dsv41PreTrainedModel(ReleasedCheckpointMixin, PreTrainedModel):
    """Loading, saving, initialisation and flags common to the V4.1 classes."""

    config_class = Dsv41Config
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Dsv4DecoderLayer"]
    # Sinks, a selection per query and heads of 512 channels are beyond the generic attention backends.
    _supports_sdpa = False
    _supports_flash_attn = False
    _supports_flex_attn = False
    _supports_attention_backend = False
    # Everything that depends on the sequence is in the cache, which can be rolled back.
    _is_stateful = False
    _can_compile_fullgraph = False
    _keep_in_fp32_modules_strict = ["attn_hc", "ffn_hc", "sinks", "e_score_correction_bias"]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        std = self.config.get_text_config().initializer_range
        if isinstance(module, (nn.Linear, nn.Embedding, Dsv4TopKRouter)):
            if module.weight.dtype.itemsize > 1:  # packed weights come from a file, never from here
                init.normal_(module.weight, mean=0.0, std=std)
            if isinstance(module, Dsv4TopKRouter):
                init.zeros_(module.e_score_correction_bias)
                init.zeros_(module.e_score_correction_bias_vl)
        elif isinstance(module, Dsv4RMSNorm):
            init.ones_(module.weight)
        elif isinstance(module, Dsv4Experts):
            init.normal_(module.gate_up_proj, mean=0.0, std=std)
            init.normal_(module.down_proj, mean=0.0, std=std)
        elif isinstance(module, Dsv4Attention):
            init.zeros_(module.sinks)
        elif isinstance(module, Dsv4HyperConnection):
            init.normal_(module.fn, mean=0.0, std=std)
            init.zeros_(module.base)
            init.constant_(module.scale, INITIAL_MIXING_SCALE)
        elif isinstance(module, Dsv4EngramMemory):
            init.ones_(module.q_weight)
            init.ones_(module.k_weight)

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Count parameters; packed FP4 counts two a byte, scales count none, host tensors are included."""
        total = super().num_parameters(only_trainable, exclude_embeddings)
        for name, parameter in self.named_parameters():
            if name.endswith("weight_scale_inv") and (parameter.requires_grad or not only_trainable):
                total -= parameter.numel()
        if only_trainable:
            return total
        tensors = [module.host_tensor(n) for module in host_modules(self).values() for n in module.host_names()
                   if not n.endswith("weight_scale_inv")]  # fmt: skip
        return total + sum(t.numel() * (2 if t.dtype == torch.int8 else 1) for t in tensors)

    def set_tokenizer(self, tokenizer) -> None:
        r"""Build the Engram token map from a tokenizer.

        Args:
            tokenizer: a fast transformers tokenizer or a `tokenizers.Tokenizer`.

        Raises:
            ValueError: if its compressed vocabulary is not the one the config names.
        """
        if self.config.get_text_config().needs_token_map:
            self.set_token_map(build_token_map(tokenizer))

    def set_token_map(self, token_map: torch.Tensor) -> None:
        """Use a token map `[tokens]` (integer) for the Engram hash; checked against the config."""
        for module in self.modules():
            if isinstance(module, Dsv4NgramHash):
                module.set_token_map(token_map)


class Dsv41TextModel(Dsv41PreTrainedModel):
    """Language model of DeepSeek-V4.1 without a head."""

    weight_names = WeightNames("")
    # The head belongs to the classes that have one.
    _keys_to_ignore_on_load_unexpected = [r"^lm_head\."]

    def __init__(self, config: Dsv41Config):
        super().__init__(_text_only(config))
        text = self.config.get_text_config()
        self.embed_tokens = nn.Embedding(text.vocab_size, text.hidden_size)
        self.layers = nn.ModuleList([Dsv4DecoderLayer(text, layer) for layer in range(text.num_hidden_layers)])
        self.norm = Dsv4RMSNorm(text.hidden_size, text.rms_norm_eps)
        if text.engram_layer_ids:
            self.ngram_hash = Dsv4NgramHash(text)
        self.gradient_checkpointing = False
        self.post_init()

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
        output_selections: bool | None = None,
        decoder_replay: str = "full",
        **kwargs,
    ) -> Dsv41ModelOutput:
        r"""Run all layers.

        Args:
            input_ids (`[B, S]`, int64): token ids; needed beside `inputs_embeds` by models with Engram.
            attention_mask: see `read_attention_mask`. position_ids (`[B or 1, S]`): checked against mask and cache.
            cache (`Dsv4Cache`, *optional*): continued and extended in place.
            inputs_embeds (`[B, S, H]`, *optional*): used instead of the embeddings of `input_ids`.
            use_cache (`bool`, *optional*): make a cache if none is given; defaults to the config, and to `False` while
                gradients are recorded.
            output_hidden_states, output_router_logits, output_selections (`bool`, *optional*): see `Dsv41ModelOutput`.
            decoder_replay (`str`, *optional*, defaults to `"full"`).

        Raises:
            ValueError: for inputs that contradict each other, the cache or the model.
        """
        self._check_inputs(input_ids, inputs_embeds, cache, decoder_replay, kwargs)
        embeds = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if cache is None and self._wants_cache(use_cache):
            cache = Dsv4Cache(self.config, "packed" if self.config.text_config.cache_rounding else "float")
        layout, valid = self._layout(attention_mask, position_ids, cache, embeds)
        context, rows = self._context(input_ids, layout, cache, embeds)
        streams = layout.shift(embeds).unsqueeze(2).expand(-1, -1, self.config.text_config.hc_mult, -1)
        flow = StreamState(streams.contiguous(), first_pre(streams), SharedState())
        wanted = output_hidden_states, output_router_logits, output_selections
        capture = OutputCapture(self.config.text_config, layout, *wanted)
        for index, layer in enumerate(self.layers):
            with capture.watching(layer, flow):
                flow = layer(flow, context, rows.get(index), None if cache is None else cache.layers[index])
            capture.add_selection(index, flow)
        hidden = layout.unshift(self.norm(collapse_streams(flow.streams, flow.pre)))
        if cache is not None:
            cache.advance(layout, valid)
        return Dsv41ModelOutput(last_hidden_state=hidden, cache=cache, **capture.fields(hidden))

    def _wants_cache(self, use_cache: bool | None) -> bool:
        if use_cache is None:
            # Entries in a cache carry no gradient; nobody asks for one by default while training.
            return self.config.text_config.use_cache and not (torch.is_grad_enabled() and self.training)
        return use_cache

    def _check_inputs(self, input_ids, inputs_embeds, cache, decoder_replay, kwargs) -> None:
        if input_ids is None and inputs_embeds is None:
            raise ValueError("input_ids and inputs_embeds are both None; accepted: input_ids, or both.")
        if input_ids is None and self.config.text_config.engram_layer_ids:
            raise ValueError(
                "inputs_embeds without input_ids; this model's Engram looks up n-grams of token ids, so accepted: both."
            )
        if kwargs.get("output_attentions"):
            raise ValueError("output_attentions is True; accepted: False. Attention weights are never materialised.")
        check_cache(cache)
        check_replay(decoder_replay)

    def _layout(self, attention_mask, position_ids, cache, embeds) -> tuple[SequenceLayout, torch.Tensor | None]:
        """Return the layout of the call and the mask of its columns before shifting (`None`: all real)."""
        batch, columns = embeds.shape[:2]
        seen, seen_mask = (0, None) if cache is None else (cache.columns, cache.column_mask)
        valid = read_attention_mask(attention_mask, batch, columns, seen, seen_mask)
        if cache is None:
            past = torch.zeros(batch, dtype=torch.long, device=embeds.device)
            layout = SequenceLayout.from_mask(valid, past, columns)
        else:
            layout = cache.layout(valid, batch, columns, embeds.device)
        check_position_ids(position_ids, layout)
        return layout, valid

    def _context(self, input_ids, layout, cache, embeds) -> tuple[LayerContext, dict[int, torch.Tensor]]:
        """Return what the layers share, and the Engram rows of every Engram layer."""
        text, device = self.config.text_config, embeds.device
        frequencies = {
            "main": rotary_frequencies(text.qk_rope_head_dim, text.rope_theta, device=device),
            "compress": rotary_frequencies(text.qk_rope_head_dim, text.compress_rope_theta, text.yarn, device=device),
        }
        tables = {name: rotary_table(layout.position_ids, speed) for name, speed in frequencies.items()}
        ids = None if input_ids is None else layout.shift(input_ids)
        image_mask = None
        if ids is not None and self.config.image_token_id is not None:
            image_mask = ids == self.config.image_token_id
            image_mask = image_mask if bool(image_mask.any()) else None
        rows = {}
        if text.engram_layer_ids:
            compressed = self.ngram_hash.compress(ids, image_mask)
            if cache is not None:
                extra = cache.keep_extra(layout.columns)
                compressed = cache.ngram_ids.append(compressed, layout, keep_extra=extra)
            rows = self.ngram_hash(compressed, layout.past, layout.columns)
        return LayerContext(layout, tables, frequencies, image_mask), rows


class Dsv41ForCausalLM(Dsv41PreTrainedModel, Dsv4GenerationMixin):
    """DeepSeek-V4.1 as a text model: language model and prediction head."""

    weight_names = WeightNames("model.")

    def __init__(self, config: Dsv41Config):
        super().__init__(_text_only(config))
        text = self.config.get_text_config()
        self.model = Dsv41TextModel(self.config)
        self.vocab_size = text.vocab_size
        self.lm_head = Dsv4Head(text.hidden_size, text.vocab_size)
        self.post_init()
        self.set_generation_options()

    @can_return_tuple
    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Dsv4Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs,
    ) -> Dsv41CausalLMOutput:
        r"""Run the model; arguments as in `Dsv41TextModel`, and:

        Args:
            labels (`[B, S]`, int64, *optional*): token ids, -100 where no loss is taken; shifted inside.
            logits_to_keep (`int` or index tensor, *optional*, defaults to 0): last positions with logits, 0 = all.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            return_dict=True,
            **{k: v for k, v in kwargs.items() if k not in ("return_dict", "num_items_in_batch")},
        )
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, keep])
        loss = None
        if labels is not None:
            options = {k: v for k, v in kwargs.items() if k == "num_items_in_batch"}
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.vocab_size, **options)
        return Dsv41CausalLMOutput(
            loss=loss,
            logits=logits,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            router_logits=outputs.router_logits,
            selections=outputs.selections,
        )


for _model_class in (Dsv41TextModel, Dsv41ForCausalLM):
    register_checkpoint_conversion_mapping(
        _model_class.__name__, weight_transforms(_model_class.weight_names), overwrite=True
    )
register_quantizer()
