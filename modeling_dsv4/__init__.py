"""DeepSeek-V4.1 and V4 for Hugging Face transformers; importing registers the classes with the Auto classes."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
)

from .cache import Dsv4Cache
from .configuration_deepseek_v41 import Dsv41Config, Dsv41TextConfig, Dsv41VisionConfig
from .modeling_deepseek_v41 import (
    Dsv41ForCausalLM,
    Dsv41ForConditionalGeneration,
    Dsv41Model,
    Dsv41TextModel,
)
from .quantization import Dsv4QuantizationConfig

AutoConfig.register("deepseek_v41", Dsv41Config, exist_ok=True)
AutoModel.register(Dsv41Config, Dsv41Model, exist_ok=True)
AutoModelForCausalLM.register(Dsv41Config, Dsv41ForCausalLM, exist_ok=True)
AutoModelForImageTextToText.register(Dsv41Config, Dsv41ForConditionalGeneration, exist_ok=True)
AutoModelForMultimodalLM.register(Dsv41Config, Dsv41ForConditionalGeneration, exist_ok=True)

__all__ = [
    "Dsv4Cache",
    "Dsv4QuantizationConfig",
    "Dsv41Config",
    "Dsv41ForCausalLM",
    "Dsv41ForConditionalGeneration",
    "Dsv41Model",
    "Dsv41TextConfig",
    "Dsv41TextModel",
    "Dsv41VisionConfig",
]
