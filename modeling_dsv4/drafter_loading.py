"""A drafter for a model that was loaded without one: its `mtp.*` tensors, from the checkpoint the model came from."""

from __future__ import annotations

import os
import re

from .configuration_common import check_drafter
from .dspark import Dsv4DSpark
from .kernel_seam import use_kernels
from .layers import Dsv4Linear
from .mtp import Dsv4Mtp
from .pretrained_model import Dsv4PreTrainedModel
from .quantization import Dsv4QuantizationConfig
from .weight_names import WeightNames


class Dsv4DraftStages(Dsv4PreTrainedModel):
    """The draft stages of a checkpoint alone, as loading takes them."""

    weight_names = WeightNames("")
    optional_parts = {"backbone": re.compile(r"^(?!mtp\.)")}

    def __init__(self, config):
        super().__init__(config)
        text = config.get_text_config()
        self.mtp = Dsv4DSpark(text) if text.draft_stages else Dsv4Mtp(text)
        self.post_init()


class LoadsDrafter:
    """`load_drafter` for the classes with a head."""

    def load_drafter(self, folder: str | None = None) -> None:
        r"""Load the drafter of a checkpoint into the model; `generate(use_mtp=True)` does it when there is none.

        Args:
            folder (`str`, *optional*): of the checkpoint, or its name on the Hub; by default the files of the model.

        Raises:
            ValueError: if the checkpoint has no drafter, if the model came from no files, or if they are gone.
        """
        if folder is None:
            folder = self.checkpoint_folder
            if folder is None:
                raise ValueError(
                    "use_mtp is True for a model without a drafter; accepted: one loaded with use_mtp=True."
                )
            if not os.path.isdir(folder):
                raise ValueError(f"{folder}, where the model came from, is gone; accepted: load_drafter(folder).")
        config = self.config_class.from_pretrained(folder)
        text, own = config.get_text_config(), self.config.get_text_config()
        check_drafter(True, text)
        linear = next(module for module in self.modules() if isinstance(module, Dsv4Linear))
        options = _quantization_like(linear, config)
        stages = Dsv4DraftStages.from_pretrained(folder, config=config, dtype=self.dtype, **options)
        own.num_nextn_predict_layers = text.num_nextn_predict_layers
        own.compress_ratios = text.compress_ratios
        for module in stages.mtp.modules():  # settings made on the model reach its drafter
            if hasattr(module, "config"):
                module.config = own
        use_kernels(stages.mtp, linear.kernels)
        # Weights that are offloaded lie nowhere; the drafter then goes to where others stay.
        present = (p.device for p in (self.lm_head.weight, *self.parameters()) if p.device.type != "meta")
        stages.mtp.to(next(present, stages.device)).train(self.training)
        self._language_model.mtp = stages.mtp
        self._no_split_modules |= stages._no_split_modules


def _quantization_like(linear: Dsv4Linear, config) -> dict:
    """Arguments of `from_pretrained` that load packed or float, and round inputs or not, as a layer of the model does."""
    if getattr(config, "quantization_config", None) is None:
        return {}
    return {"quantization_config": Dsv4QuantizationConfig(not linear.is_packed, linear.quantize_activations)}
