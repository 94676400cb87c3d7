"""DeepSeek-V4.1 and V4 for Hugging Face transformers; importing registers the classes with the Auto classes."""

import sys

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
)

from .cache import Dsv4Cache
from .configuration_deepseek_v4 import Dsv4Config
from .configuration_deepseek_v41 import Dsv41Config, Dsv41TextConfig, Dsv41VisionConfig
from .draft_scheduler import DSparkScheduler
from .modeling_deepseek_v4 import Dsv4ForCausalLM, Dsv4Model
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
# A folder in the released layout finds its processor by the config class, whichever package is imported first.
if "processing_dsv4" in sys.modules:
    sys.modules["processing_dsv4"].register()

__all__ = [
    "DSparkScheduler",
    "Dsv4Cache",
    "Dsv4Config",
    "Dsv4ForCausalLM",
    "Dsv4Model",
    "Dsv4QuantizationConfig",
    "Dsv41Config",
    "Dsv41ForCausalLM",
    "Dsv41ForConditionalGeneration",
    "Dsv41Model",
    "Dsv41TextConfig",
    "Dsv41TextModel",
    "Dsv41VisionConfig",
]
