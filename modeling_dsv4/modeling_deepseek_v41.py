"""DeepSeek-V4.1 for transformers: language model, vision model, and the classes with a head.

Sources: V4.1 report section 2, contract sections 4, 10 and 11.
"""

from __future__ import annotations

import copy

import torch
from torch import nn
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils import can_return_tuple
from transformers.utils.deprecation import deprecate_kwarg

from .cache import Dsv4Cache
from .configuration_common import check_drafter, without_drafter
from .configuration_deepseek_v41 import Dsv41Config
from .drafter_loading import LoadsDrafter
from .dspark import Dsv4DSpark
from .generation_dsv4 import Dsv4GenerationMixin
from .language_model import CausalHead, Dsv4CausalLMOutput, Dsv4LanguageModel, Dsv4ModelOutput
from .pretrained_model import Dsv4PreTrainedModel
from .released_loading import register_models
from .vision import Dsv41MultiModalProjector, Dsv41VisionTower, check_images, image_span, unshuffle, unshuffle_index
from .weight_names import WeightNames


def _composite(config) -> Dsv41Config:
    """Return a composite config; a text config alone is wrapped."""
    return config if hasattr(config, "text_config") else Dsv41Config(text_config=config)


def _without_absent_parts(config, has_vision: bool, use_mtp: bool) -> Dsv41Config:
    """Return the config of a class that may have no drafter and no vision tower: what it saves must say so.

    The text config of the result is shared with `config` where nothing in it changes, so that a setting made on a model
    reaches its parts.
    """
    config = _composite(config)
    check_drafter(use_mtp, config.text_config)
    if config.text_config.draft_stages and not use_mtp:
        config = copy.copy(config)
        config.text_config = without_drafter(config.text_config)
    if config.vision_config is not None and not has_vision:
        config = copy.copy(config)
        config.vision_config = None
    return config


class Dsv41TextModel(Dsv4LanguageModel):
    """Language model of DeepSeek-V4.1 without a head; with `use_mtp=True` it has the DSpark drafter as `mtp`."""

    config_class = Dsv41Config
    weight_names = WeightNames("")

    def __init__(self, config: Dsv41Config, use_mtp: bool = False):
        super().__init__(_without_absent_parts(config, False, use_mtp))
        if use_mtp:
            self.mtp = Dsv4DSpark(self.config.text_config)
        self.post_init()


class Dsv41Model(Dsv4PreTrainedModel):
    """Vision tower, projector and language model of DeepSeek-V4.1, without a head; text alone without vision config."""

    config_class = Dsv41Config
    weight_names = WeightNames("language_model.", "")
    input_modalities = ("image", "text")

    def __init__(self, config: Dsv41Config, use_mtp: bool = False):
        super().__init__(_without_absent_parts(config, True, use_mtp))
        text, vision = self.config.get_text_config(), self.config.vision_config
        if vision is not None:
            self.vision_tower = Dsv41VisionTower(vision)
            self.multi_modal_projector = Dsv41MultiModalProjector(vision, text.hidden_size)
            self.image_start = nn.Parameter(torch.empty(text.hidden_size))
            self.image_newline = nn.Parameter(torch.empty(text.hidden_size))
            self.image_end = nn.Parameter(torch.empty(text.hidden_size))
        self.language_model = Dsv41TextModel(self.config, use_mtp)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self and self.config.vision_config is not None:
            for delimiter in (self.image_start, self.image_newline, self.image_end):
                init.normal_(delimiter, mean=0.0, std=self.config.get_text_config().initializer_range)

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
        if self.config.vision_config is None:
            raise ValueError("pixel_values were given to a model without vision_config; accepted: text alone.")
        ratio, patch_size = self.config.vision_config.downsample_ratio, self.config.vision_config.patch_size
        check_images(pixel_values, image_grid_hw, image_unshuffle_index, patch_size=patch_size, ratio=ratio)
        cells = -(-image_grid_hw // ratio)
        sizes, counts = image_grid_hw.prod(-1).tolist(), cells.prod(-1).tolist()
        if image_unshuffle_index is None:
            image_unshuffle_index = unshuffle_index(image_grid_hw, ratio)
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
    ) -> Dsv4ModelOutput:
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
        image = self.config.image_token_id
        places = torch.zeros_like(input_ids, dtype=torch.bool) if image is None else input_ids == image
        count = int(places.sum())
        spans = [] if encoded is None else list(encoded.pooler_output)
        given = sum(len(span) for span in spans)
        if count != given:
            raise ValueError(
                f"input_ids has {count} image positions (id {image}) and the images have {given} "
                "embeddings; accepted: as many of one as of the other."
            )
        if not count:
            return embeds
        spans = torch.cat(spans).to(embeds)
        if spans.shape[-1] != embeds.shape[-1]:
            raise ValueError(f"image embeddings have width {spans.shape[-1]}; accepted: {embeds.shape[-1]}.")
        return embeds.masked_scatter(places[..., None], spans)


class Dsv41ForCausalLM(LoadsDrafter, CausalHead, Dsv4PreTrainedModel, Dsv4GenerationMixin):
    """DeepSeek-V4.1 as a text model: language model and prediction head."""

    config_class = Dsv41Config
    weight_names = WeightNames("model.")

    def __init__(self, config: Dsv41Config, use_mtp: bool = False):
        super().__init__(_without_absent_parts(config, False, use_mtp))
        self._put_head_on(Dsv41TextModel(self.config, use_mtp))

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
    ) -> Dsv4CausalLMOutput:
        r"""Run the model; arguments as in `Dsv41TextModel`, and:

        Args:
            labels (`[B, S]`, int64, *optional*): token ids, -100 where no loss is taken; shifted inside.
            logits_to_keep (`int` or index tensor, *optional*, defaults to 0): last positions with logits, 0 = all.
            num_items_in_batch (*optional*): labels of the whole batch, when this call is a part of it; divides the loss.
        """
        inputs = {
            "input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids, "cache": cache,
            "inputs_embeds": inputs_embeds, "use_cache": use_cache, **kwargs,
        }  # fmt: skip
        return self._run(inputs, labels, logits_to_keep, num_items_in_batch)


class Dsv41ForConditionalGeneration(LoadsDrafter, CausalHead, Dsv4PreTrainedModel, Dsv4GenerationMixin):
    """DeepSeek-V4.1 with images: vision tower, projector, language model and prediction head."""

    config_class = Dsv41Config
    weight_names = WeightNames("model.language_model.", "model.")
    input_modalities = ("image", "text")

    def __init__(self, config: Dsv41Config, use_mtp: bool = False):
        super().__init__(_without_absent_parts(config, True, use_mtp))
        self._put_head_on(Dsv41Model(self.config, use_mtp))

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
    ) -> Dsv4CausalLMOutput:
        r"""Run the model; images as in `Dsv41Model`, everything else as in `Dsv41ForCausalLM`."""
        inputs = {
            "input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids, "cache": cache,
            "inputs_embeds": inputs_embeds, "use_cache": use_cache, "pixel_values": pixel_values,
            "image_grid_hw": image_grid_hw, "image_unshuffle_index": image_unshuffle_index,
            "mm_encoder_outputs": mm_encoder_outputs, **kwargs,
        }  # fmt: skip
        return self._run(inputs, labels, logits_to_keep, num_items_in_batch)


register_models(Dsv41TextModel, Dsv41Model, Dsv41ForCausalLM, Dsv41ForConditionalGeneration)
