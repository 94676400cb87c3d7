"""What `generate` does differently for these models: the cache it makes, its options, and what it refuses.

Three options live on the generation config of every model, are saved with it and can be given to `generate`:
`kv_format` ("packed" or "float"), `decoder_replay` ("full", "exact" or "bounded") and `use_mtp`.
"""

from __future__ import annotations

import torch
from transformers import GenerationMixin

from .cache import KV_FORMATS, Dsv4Cache, check_cache
from .decoder_replay import check_replay
from .draft_generation import Dsv4DraftMixin, check_draft_options

OPTIONS = {"kv_format": "packed", "decoder_replay": "exact", "use_mtp": False}


class Dsv4GenerationMixin(Dsv4DraftMixin, GenerationMixin):
    """`GenerationMixin` whose caches are `Dsv4Cache`."""

    def set_generation_options(self) -> None:
        """Put the options of this family on `generation_config` where they are missing, so that they are saved too."""
        config = self.generation_config
        for name, default in OPTIONS.items():
            if getattr(config, name, None) is None:
                setattr(config, name, default)
        # A config marked as derived from the model config drops unknown keys when it is read back.
        config._from_model_config = False

    def adjust_generation_fn(self, *args, use_mtp=False, **kwargs):
        # `from_pretrained(use_mtp=True)` loads the drafter; whether a call drafts is said to `generate`.
        super().adjust_generation_fn(*args, **kwargs)
        self.set_generation_options()

    def _prepare_generation_config(self, generation_config, draft_scheduler=None, **kwargs):
        self.set_generation_options()
        prepared = super()._prepare_generation_config(generation_config, **kwargs)
        config = prepared[0]
        for name, default in OPTIONS.items():
            if getattr(config, name, None) is None:
                setattr(config, name, getattr(self.generation_config, name, default))
        if config.kv_format not in KV_FORMATS:
            raise ValueError(f"kv_format is {config.kv_format!r}; accepted: {KV_FORMATS}.")
        check_replay(config.decoder_replay)
        config._draft_scheduler = draft_scheduler
        if config.use_mtp:
            check_draft_options(config)
            if self.drafter is None:
                self.load_drafter()
        elif draft_scheduler is not None:
            raise ValueError("draft_scheduler is given with use_mtp=False; accepted: use_mtp=True.")
        if "image" in self.input_modalities and self.config.image_token_id is not None:
            # An image token stands for an embedding that only an image has: it can be read, never written.
            config.suppress_tokens = [*(config.suppress_tokens or []), self.config.image_token_id]
        return prepared

    # transformers looks for `inputs_embeds` in this signature.
    def prepare_inputs_for_generation(self, input_ids, *args, inputs_embeds=None, **kwargs):
        """Keep the token ids beside prompt embeddings: n-grams and image positions are read from them.

        Whole sequences are cut to what the cache has not seen, which transformers' assisted decoding leaves out. A step of
        decoding adds a real token to every row, so neither mask nor positions say anything new, and nobody waits for them.
        """
        cache, mask = kwargs.get("cache"), kwargs.get("attention_mask")
        whole = mask is not None and mask.ndim == 2 and mask.shape[1] == input_ids.shape[1]
        if whole and cache is not None and inputs_embeds is None and kwargs.get("next_sequence_length") is None:
            if 0 < cache.get_seq_length() < input_ids.shape[1]:
                kwargs["next_sequence_length"] = input_ids.shape[1] - cache.get_seq_length()
        if cache is not None and kwargs.get("next_sequence_length") == 1 and not kwargs.get("is_first_iteration"):
            kwargs |= {"attention_mask": None, "position_ids": None}
        inputs = super().prepare_inputs_for_generation(input_ids, *args, inputs_embeds=inputs_embeds, **kwargs)
        embeds = inputs.get("inputs_embeds")
        if embeds is not None and inputs.get("input_ids") is None and input_ids.shape[1] >= embeds.shape[1]:
            inputs["input_ids"] = input_ids[:, -embeds.shape[1] :].clone()
        return inputs

    @staticmethod
    def create_masks_for_generate(attention_mask=None, **kwargs):
        """Keep the mask of padding: the model reads it and needs no other."""
        return attention_mask

    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length, *args, **kwargs
    ):
        """Make a `Dsv4Cache`; static, quantized, paged and offloaded implementations are refused by name."""
        model_kwargs["decoder_replay"] = generation_config.decoder_replay
        mask = model_kwargs.get("attention_mask")
        if mask is not None and mask.ndim == 2 and not bool(mask.bool().any(-1).all()):
            raise ValueError("attention_mask has a row without a single real token.")
        implementation = generation_config.cache_implementation
        if implementation not in (None, "dynamic"):
            raise ValueError(
                f"cache_implementation is {implementation!r}; accepted: None. These models cache shared, pooled "
                "entries in a Dsv4Cache of their own; pass cache=Dsv4Cache(...) for other settings."
            )
        if model_kwargs.get("cache") is not None:
            check_cache(model_kwargs["cache"])
            check_capacity(model_kwargs["cache"], generation_config, batch_size, max_cache_length, mask)
            model_kwargs["cache"]._is_user_defined = True
            return
        if generation_config.use_cache is False:
            return
        model_kwargs["cache"] = self._new_cache(generation_config.kv_format)
        if generation_config.is_assistant:
            model_kwargs["cache"].activate_past_recording()

    def _prefill(self, input_ids, generation_config, model_kwargs, is_first_iteration=True):
        """Give the prompt those embeddings of images that the cache has not seen yet."""
        seen = 0 if model_kwargs.get("cache") is None else model_kwargs["cache"].get_seq_length()
        encoded = (model_kwargs.get("mm_encoder_outputs") or {}).get("image")
        if encoded is not None and not seen:
            is_first_iteration = True  # an assistant's first call comes as a later one, which would drop the images
        elif encoded is not None and is_first_iteration:
            places = input_ids == self.config.image_token_id
            spans = torch.cat(list(encoded["pooler_output"]))
            if len(spans) == int(places.sum()):  # all ids and all images of the prompt came again
                is_new = (torch.arange(input_ids.shape[1], device=places.device) >= seen).expand_as(places)
                rest = type(encoded)(pooler_output=[spans[is_new[places].to(spans.device)]])
                model_kwargs["mm_encoder_outputs"] = model_kwargs["mm_encoder_outputs"] | {"image": rest}
        return super()._prefill(input_ids, generation_config, model_kwargs, is_first_iteration)

    def _new_cache(self, kv_format: str = "packed") -> Dsv4Cache:
        """Make an empty cache; unrounded values (`cache_rounding=False`) cannot be packed and are kept as floats."""
        rounding = self.config.get_text_config().cache_rounding
        return Dsv4Cache(self.config, kv_format=kv_format if rounding else "float")

    def generate_batch(self, *args, **kwargs):
        raise ValueError("continuous batching uses a paged cache; accepted: generate(), whose cache is a Dsv4Cache.")


def check_capacity(cache: Dsv4Cache, config, batch: int, columns: int, mask: torch.Tensor | None) -> None:
    """Raise a `ValueError` if a cache of fixed capacity is too small for `columns` columns and for drafts behind them.

    The ids that the cache has seen may be left out of a continued call; its mask (`[B, S]`, or its length) counts them.
    """
    if cache.columns and config.max_new_tokens is not None:
        given = config.max_length - config.max_new_tokens
        columns += (getattr(config, "_mask_length", given) if mask is None else mask.shape[1]) - given
    if config.prompt_lookup_num_tokens is not None:  # which is not cut where the text ends
        columns += config.prompt_lookup_num_tokens - 1
    elif config.use_mtp and batch * config.num_return_sequences > 1:  # rows end at different tokens of a block
        columns += 1
    if cache.max_length is not None and cache.max_length < columns:
        raise ValueError(
            f"the cache was made for {cache.max_length} tokens (max_length); accepted: at least {columns}, for the prompt "
            "and max_new_tokens, even if the text may end earlier."
        )
