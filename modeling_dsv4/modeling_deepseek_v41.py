"""DeepSeek-V4.1 for transformers: language model, vision model, and the classes with a head.

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
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.modeling_outputs import (
    BaseModelOutputWithPooling,
    MoeCausalLMOutputWithPast,
    MoeModelOutputWithPast,
)
from transformers.utils import can_return_tuple, logging
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
from .vision import Dsv41MultiModalProjector, Dsv41VisionTower, image_span, unshuffle, unshuffle_index
from .weight_names import WeightNames

logger = logging.get_logger(__name__)

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


def _without_absent_parts(config, has_vision: bool) -> Dsv41Config:
    """Return the config of a class that has no drafts, and maybe no vision tower: what it saves must say so.

    The text config of the result is shared with `config` where nothing in it changes, so that a setting made on a model
    reaches its parts.
    """
    config = _composite(config)
    text = config.text_config
    if text.num_nextn_predict_layers:
        config, text = copy.copy(config), copy.deepcopy(text)
        text.num_nextn_predict_layers = 0
        text.compress_ratios = text.compress_ratios[: text.num_hidden_layers]
        config.text_config = text
    if config.vision_config is not None and not has_vision:
        config = copy.copy(config)
        config.vision_config = None
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
            if getattr(module, "bias", None) is not None:
                init.zeros_(module.bias)
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
        elif isinstance(module, Dsv41Model):
            for delimiter in (module.image_start, module.image_newline, module.image_end):
                init.normal_(delimiter, mean=0.0, std=std)

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

    def _set_gradient_checkpointing(self, enable: bool = True, gradient_checkpointing_func=checkpoint, **kwargs):
        """Refuse the reentrant form, which sees no gradient through the tuples that layers hand on."""
        if enable and getattr(gradient_checkpointing_func, "keywords", {}).get("use_reentrant"):
            raise ValueError("use_reentrant is True; accepted: False (transformers' default).")
        super()._set_gradient_checkpointing(enable, gradient_checkpointing_func, **kwargs)

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

    def __init__(self, config: Dsv41Config):
        super().__init__(_without_absent_parts(config, has_vision=False))
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
        more_may_follow = cache is not None
        if cache is None and self._wants_cache(use_cache):
            cache = Dsv4Cache(self.config, "packed" if self.config.text_config.cache_rounding else "float")
        layout, valid = self._layout(attention_mask, position_ids, cache, embeds, more_may_follow)
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

    @property
    def _checkpoints(self) -> bool:
        """Whether layers will run a second time in the backward pass."""
        return self.gradient_checkpointing and self.training and torch.is_grad_enabled()

    def _wants_cache(self, use_cache: bool | None) -> bool:
        if self._checkpoints:
            if use_cache:
                logger.warning_once("use_cache=True with gradient checkpointing: no cache is made.")
            return False
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
        if cache is not None and self._checkpoints:
            raise ValueError("cache is given while gradients are checkpointed, which would fill it twice; accepted: None.")
        check_replay(decoder_replay)

    def _layout(
        self, attention_mask, position_ids, cache, embeds, more_may_follow
    ) -> tuple[SequenceLayout, torch.Tensor | None]:
        """Return the layout of the call and the mask of its columns before shifting (`None`: all real)."""
        batch, columns = embeds.shape[:2]
        seen, seen_mask = (0, None) if cache is None else (cache.columns, cache.column_mask)
        valid = read_attention_mask(attention_mask, batch, columns, seen, seen_mask, more_may_follow=more_may_follow)
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


class Dsv41Model(Dsv41PreTrainedModel):
    """Vision tower, projector and language model of DeepSeek-V4.1, without a head."""

    weight_names = WeightNames("language_model.", "")
    input_modalities = ("image", "text")

    def __init__(self, config: Dsv41Config):
        super().__init__(_without_absent_parts(config, has_vision=True))
        text, vision = self.config.get_text_config(), self.config.vision_config
        if vision is None:
            raise ValueError("vision_config is None; accepted: a vision config, or Dsv41ForCausalLM for text alone.")
        self.vision_tower = Dsv41VisionTower(vision)
        self.multi_modal_projector = Dsv41MultiModalProjector(vision, text.hidden_size)
        self.image_start = nn.Parameter(torch.empty(text.hidden_size))
        self.image_newline = nn.Parameter(torch.empty(text.hidden_size))
        self.image_end = nn.Parameter(torch.empty(text.hidden_size))
        self.language_model = Dsv41TextModel(self.config)
        self.post_init()

    @can_return_tuple
    def get_image_features(
        self,
        pixel_values: torch.Tensor,
        image_grid_hw: torch.Tensor,
        image_unshuffle_index: torch.Tensor | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPooling:
        r"""Encode images.

        Args:
            pixel_values (`[P, 3, p, p]`, float): patches of all images, row-major per image.
            image_grid_hw (`[images, 2]`, integer): patch rows and columns of each image.
            image_unshuffle_index (`[cells, ratio ** 2]`, int64, *optional*): plan of the image processor; made from the
                grid when absent.

        Returns:
            `last_hidden_state` `[P, V]` and `pooler_output`: for each image the embeddings of its whole span
            `[rows * (columns + 1) + 2, H]`.

        Raises:
            ValueError: if patches, grid and plan disagree.
        """
        ratio = self.config.vision_config.downsample_ratio
        sizes = image_grid_hw.prod(-1).tolist()
        cells = -(-image_grid_hw // ratio)
        counts = cells.prod(-1).tolist()
        if pixel_values.ndim != 4 or sum(sizes) != len(pixel_values):
            raise ValueError(
                f"pixel_values has shape {list(pixel_values.shape)}; accepted: [{sum(sizes)}, 3, patch, patch], the "
                f"patches of image_grid_hw {image_grid_hw.tolist()}."
            )
        if image_unshuffle_index is None:
            image_unshuffle_index = unshuffle_index(image_grid_hw, ratio)
        if tuple(image_unshuffle_index.shape) != (sum(counts), ratio**2):
            shape = list(image_unshuffle_index.shape)
            raise ValueError(f"image_unshuffle_index has shape {shape}; accepted: {[sum(counts), ratio**2]}.")
        features = self.vision_tower(pixel_values, image_grid_hw)
        pieces = zip(features.split(sizes), image_unshuffle_index.to(features.device).split(counts), strict=True)
        projected = self.multi_modal_projector(torch.cat([unshuffle(*piece) for piece in pieces]))
        delimiters = self.image_start, self.image_newline, self.image_end
        spans = [
            image_span(image, columns, *delimiters)
            for image, columns in zip(projected.split(counts), cells[:, 1].tolist(), strict=True)
        ]
        return BaseModelOutputWithPooling(last_hidden_state=features, pooler_output=spans)

    @can_return_tuple
    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        pixel_values: torch.Tensor | None = None,
        image_grid_hw: torch.Tensor | None = None,
        image_unshuffle_index: torch.Tensor | None = None,
        cache: Dsv4Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        mm_encoder_outputs: dict[str, BaseModelOutputWithPooling] | None = None,
        **kwargs,
    ) -> Dsv41ModelOutput:
        r"""Put image embeddings in their places and run the language model; other arguments as in `Dsv41TextModel`.

        Args:
            pixel_values, image_grid_hw, image_unshuffle_index: see `get_image_features`. Images fill the positions of
                `image_token_id` in reading order over the batch.
            mm_encoder_outputs (`{"image": output of get_image_features}`, *optional*): instead of pixels; a part of the
                positions may come in one call and the rest in the next (chunked prefill).

        Raises:
            ValueError: if the number of image positions and embeddings differ, or images come without `input_ids`.
        """
        encoded = (mm_encoder_outputs or {}).get("image")
        if pixel_values is not None:
            if encoded is not None or image_grid_hw is None:
                problem = "mm_encoder_outputs as well" if encoded is not None else "no image_grid_hw"
                raise ValueError(f"pixel_values came with {problem}; accepted: pixel_values with image_grid_hw alone.")
            encoded = self.get_image_features(pixel_values, image_grid_hw, image_unshuffle_index, return_dict=True)
        if encoded is not None and input_ids is None:
            raise ValueError("images came without input_ids, which say where they stand; accepted: input_ids as well.")
        if input_ids is not None and (inputs_embeds is None or encoded is not None):
            inputs_embeds = self._embed(input_ids, inputs_embeds, encoded)
        return self.language_model(input_ids=input_ids, inputs_embeds=inputs_embeds, cache=cache, **kwargs)

    def _embed(
        self, input_ids: torch.Tensor, embeds: torch.Tensor | None, encoded: BaseModelOutputWithPooling | None
    ) -> torch.Tensor:
        """Given or token embeddings `[B, S, H]` with the image positions overwritten."""
        embeds = self.language_model.embed_tokens(input_ids) if embeds is None else embeds
        places = input_ids == self.config.image_token_id
        count = int(places.sum())
        spans = [] if encoded is None else list(encoded.pooler_output)
        given = sum(len(span) for span in spans)
        if count != given:
            raise ValueError(
                f"input_ids has {count} image positions (id {self.config.image_token_id}) and the images have {given} "
                "embeddings; accepted: as many of one as of the other."
            )
        if not count:
            return embeds
        spans = torch.cat(spans).to(embeds)
        if spans.shape[-1] != embeds.shape[-1]:
            raise ValueError(f"image embeddings have width {spans.shape[-1]}; accepted: {embeds.shape[-1]}.")
        return embeds.masked_scatter(places[..., None], spans)


class _CausalHead:
    """Logits and loss on top of a model's output, for the classes with a head."""

    def _add_head(self, outputs: Dsv41ModelOutput, labels, logits_to_keep, num_items_in_batch=None):
        """Return logits of the kept positions, the loss if there are labels, and the model's optional outputs."""
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, keep])
        loss = None
        if labels is not None:
            options = {} if num_items_in_batch is None else {"num_items_in_batch": num_items_in_batch}
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.vocab_size, **options)
        return Dsv41CausalLMOutput(
            loss=loss,
            logits=logits,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            router_logits=outputs.router_logits,
            selections=outputs.selections,
        )


class Dsv41ForCausalLM(_CausalHead, Dsv41PreTrainedModel, Dsv4GenerationMixin):
    """DeepSeek-V4.1 as a text model: language model and prediction head."""

    weight_names = WeightNames("model.")

    def __init__(self, config: Dsv41Config):
        super().__init__(_without_absent_parts(config, has_vision=False))
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
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs,
    ) -> Dsv41CausalLMOutput:
        r"""Run the model; arguments as in `Dsv41TextModel`, and:

        Args:
            labels (`[B, S]`, int64, *optional*): token ids, -100 where no loss is taken; shifted inside.
            logits_to_keep (`int` or index tensor, *optional*, defaults to 0): last positions with logits, 0 = all.
            num_items_in_batch (*optional*): labels of the whole batch, when this call is a part of it; divides the loss.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **(kwargs | {"return_dict": True}),
        )
        return self._add_head(outputs, labels, logits_to_keep, num_items_in_batch)


class Dsv41ForConditionalGeneration(_CausalHead, Dsv41PreTrainedModel, Dsv4GenerationMixin):
    """DeepSeek-V4.1 with images: vision tower, projector, language model and prediction head."""

    weight_names = WeightNames("model.language_model.", "model.")
    input_modalities = ("image", "text")

    def __init__(self, config: Dsv41Config):
        super().__init__(_without_absent_parts(config, has_vision=True))
        text = self.config.get_text_config()
        self.model = Dsv41Model(self.config)
        self.vocab_size = text.vocab_size
        self.lm_head = Dsv4Head(text.hidden_size, text.vocab_size)
        self.post_init()
        self.set_generation_options()

    def get_image_features(self, *args, **kwargs) -> BaseModelOutputWithPooling:
        """Encode images; see `Dsv41Model.get_image_features`."""
        return self.model.get_image_features(*args, **kwargs)

    @can_return_tuple
    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Dsv4Cache | None = None,
        pixel_values: torch.Tensor | None = None,
        image_grid_hw: torch.Tensor | None = None,
        image_unshuffle_index: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        num_items_in_batch: torch.Tensor | int | None = None,
        mm_encoder_outputs: dict[str, BaseModelOutputWithPooling] | None = None,
        **kwargs,
    ) -> Dsv41CausalLMOutput:
        r"""Run the model; images as in `Dsv41Model`, everything else as in `Dsv41ForCausalLM`."""
        outputs = self.model(
            input_ids=input_ids,
            pixel_values=pixel_values,
            image_grid_hw=image_grid_hw,
            image_unshuffle_index=image_unshuffle_index,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            mm_encoder_outputs=mm_encoder_outputs,
            **(kwargs | {"return_dict": True}),
        )
        return self._add_head(outputs, labels, logits_to_keep, num_items_in_batch)


for _model_class in (Dsv41TextModel, Dsv41Model, Dsv41ForCausalLM, Dsv41ForConditionalGeneration):
    register_checkpoint_conversion_mapping(
        _model_class.__name__, weight_transforms(_model_class.weight_names), overwrite=True
    )
register_quantizer()
