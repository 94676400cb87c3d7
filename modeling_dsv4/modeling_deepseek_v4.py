"""DeepSeek-V4 (Flash, Pro, -Base, -0731) for transformers, on the mechanisms of V4.1.

The classes have names of their own and are registered with no Auto class: `deepseek_v4` belongs to transformers.

Sources: V4 report section 2, contract spec_v4.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers.utils import can_return_tuple
from transformers.utils.deprecation import deprecate_kwarg

from .cache import Dsv4Cache, check_empty
from .configuration_common import check_drafter, without_drafter
from .configuration_deepseek_v4 import Dsv4Config
from .drafter_loading import LoadsDrafter
from .dspark import Dsv4DSpark
from .generation_dsv4 import Dsv4GenerationMixin
from .language_model import CausalHead, Dsv4CausalLMOutput, Dsv4LanguageModel
from .mtp import Dsv4Mtp
from .pretrained_model import Dsv4PreTrainedModel
from .released_loading import register_models
from .weight_names import WeightNames


def _without_drafter(config: Dsv4Config, use_mtp: bool) -> Dsv4Config:
    """Return the config of a model that leaves a DSpark drafter on disk: what it saves must say so."""
    check_drafter(use_mtp, config)
    if config.draft_stages and not use_mtp:
        return without_drafter(config)
    return config


class Dsv4Model(Dsv4LanguageModel):
    """Language model of DeepSeek-V4 without a head; `mtp` predicts the token after the next one.

    The -0731 build has a DSpark drafter instead, which `use_mtp=True` asks for.
    """

    config_class = Dsv4Config
    weight_names = WeightNames("")

    def __init__(self, config: Dsv4Config, use_mtp: bool = False):
        super().__init__(_without_drafter(config, use_mtp))
        if self.config.has_mtp:
            self.mtp = Dsv4Mtp(self.config)
        elif use_mtp:
            self.mtp = Dsv4DSpark(self.config)
        self.post_init()

    def predict_after_next(
        self,
        streams: torch.Tensor,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        r"""Run the MTP layer on every position whose next token is known.

        Args:
            streams (`torch.Tensor` of shape `[B, S, N, H]`): `output_streams` of the forward of `input_ids`.
            input_ids (`torch.Tensor` of shape `[B, S]`, int64): whole rows, from their first token on.
            attention_mask, position_ids (*optional*): of the same call.

        Returns:
            `torch.Tensor` of shape `[B, S - 1, H]`: normalised states; the head gives logits of token i + 2.
        """
        layout, _ = self._layout(attention_mask, position_ids, None, streams)
        context, _ = self._context(input_ids, layout, None, streams)
        # Next tokens are those of the row, not of the column beside; what the last one gets is dropped.
        embeds = self.embed_tokens(layout.shift(input_ids).roll(-1, dims=1))
        return layout.unshift(self.mtp[0].predict(layout.shift(streams), embeds, context))[:, :-1]


class Dsv4ForCausalLM(LoadsDrafter, CausalHead, Dsv4PreTrainedModel, Dsv4GenerationMixin):
    """DeepSeek-V4 with its prediction head."""

    config_class = Dsv4Config
    weight_names = WeightNames("model.")

    def __init__(self, config: Dsv4Config, use_mtp: bool = False):
        super().__init__(_without_drafter(config, use_mtp))
        self._put_head_on(Dsv4Model(self.config, use_mtp))

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
        r"""Run the model; arguments as in `Dsv4LanguageModel`, and:

        Args:
            labels (`[B, S]`, int64, *optional*): token ids, -100 where no loss is taken; shifted inside. In training the
                loss of the token after the next one is added, times `config.mtp_loss_weight`.
            logits_to_keep (`int` or index tensor, *optional*, defaults to 0): last positions with logits, 0 = all.
            num_items_in_batch (*optional*): labels of the whole batch, when this call is a part of it; divides the loss.
        """
        inputs = {
            "input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids, "cache": cache,
            "inputs_embeds": inputs_embeds, "use_cache": use_cache, **kwargs,
        }  # fmt: skip
        shift_labels = kwargs.get("shift_labels")
        if not (self.training and self.config.has_mtp) or (labels is None and shift_labels is None):
            return self._run(inputs, labels, logits_to_keep, num_items_in_batch)
        if input_ids is None:
            raise ValueError("input_ids is None while the MTP layer is trained; accepted: the ids of inputs_embeds.")
        check_empty(cache, "the MTP layer")
        result = self._run(inputs | {"output_streams": True}, labels, logits_to_keep, num_items_in_batch)
        states = self.model.predict_after_next(result.streams, input_ids, attention_mask, position_ids)
        targets = self._mtp_targets(labels, shift_labels, position_ids)
        result.mtp_loss = self._mtp_loss(states, targets, num_items_in_batch)
        result.add_loss("mtp", result.mtp_loss, self.config.mtp_loss_weight)
        return result

    def _mtp_targets(self, labels, shift_labels, position_ids) -> torch.Tensor:
        """Label of token i + 2 for every position i but the last, `[B, S - 1]`; -100 beyond the row and the document."""
        if shift_labels is None:
            labels = self._within_documents(labels, position_ids, ahead=2)
            return nn.functional.pad(labels[:, 2:], (0, 1), value=-100)
        if position_ids is not None:  # of the labelled tokens; the one behind the row is not known
            position_ids = nn.functional.pad(position_ids[:, 1:], (0, 1), value=2)
        return self._within_documents(shift_labels, position_ids, ahead=2)[:, 1:].contiguous()

    def _mtp_loss(self, states, targets, num_items_in_batch) -> torch.Tensor:
        """Cross entropy of token i + 2 given position i and token i + 1 (V4 report section 2.1); targets `[B, S - 1]`."""
        logits = self.lm_head(states)
        options = {} if num_items_in_batch is None else {"num_items_in_batch": num_items_in_batch}
        if not bool((targets != -100).any()):  # a mean over nothing is no number
            return logits.sum() * 0
        return self.loss_function(
            logits=logits, labels=None, shift_labels=targets, vocab_size=self.vocab_size, **options
        )


register_models(Dsv4Model, Dsv4ForCausalLM)
