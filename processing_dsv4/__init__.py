"""Processors of DeepSeek-V4.1: images, conversations, answers. Importing registers them with the Auto classes."""

from transformers import AutoImageProcessor, AutoProcessor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from .image_processing_deepseek_v41 import Dsv41ImageProcessor
from .processing_deepseek_v41 import Dsv41Processor
from .response_parsing import ResponseStream

__all__ = ["Dsv41ImageProcessor", "Dsv41Processor", "ResponseStream", "register"]

MODEL_TYPE = "deepseek_v41"


def register() -> None:
    """Register the processors with `AutoProcessor` and `AutoImageProcessor`; may run any number of times.

    A saved folder names its processor class, which is found by that name. A folder in the released layout is found by
    its config class, so the model package (which registers that class) calls this again if it is imported later.
    """
    # Without a registered config the processors are still found by name, under their own class as the key.
    config_class = CONFIG_MAPPING[MODEL_TYPE] if MODEL_TYPE in CONFIG_MAPPING else Dsv41Processor
    AutoProcessor.register(config_class, Dsv41Processor, exist_ok=True)
    AutoImageProcessor.register(config_class, image_processor_classes={"pil": Dsv41ImageProcessor}, exist_ok=True)


# Each class names its Auto class, so that saving a processor copies its code and writes the auto_map.
Dsv41ImageProcessor.register_for_auto_class("AutoImageProcessor")
Dsv41Processor.register_for_auto_class("AutoProcessor")
register()
