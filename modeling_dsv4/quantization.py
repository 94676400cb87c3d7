"""The packed form of a model: which modules hold the file's bytes, and the quantiser that transformers sees.

config.json says `quant_method: fp8`, which transformers would hand to its own quantiser; the config class renames the
method in memory (`PACKED_METHOD`) and this file registers a quantiser under that name. transformers' own entry is never
touched. Loading swaps modules on the meta device; the bytes arrive unchanged (see released_loading).
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.quantizers.base import HfQuantizer
from transformers.utils.hub import convert_file_size_to_int
from transformers.utils.quantization_config import FineGrainedFP8Config

from .checkpoint_map import DTYPES
from .configuration_common import PACKED_METHOD, QUANTIZATION_RULES, RELEASED_METHOD
from .engram import TABLE_BLOCK
from .expert_cache import UnpackedExperts
from .fp_codecs import round_fp8, round_fp8_tiles, round_mxfp4

PACKED_DTYPES = (torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.int8)
SCALE_DTYPES = {"ue8m0": torch.float8_e8m0fnu, "float": torch.float32}

# What a user sets and no file has.
_OPTIONS = ("dequantize", "quantize_activations", "expert_cache_size")
DEFAULT_EXPERT_CACHE = "1GB"

# Tensors that the release widens to float32 before use: a checkpoint that stores them in float32 keeps them so.
WIDE_NAMES = re.compile(
    r"(norm|norm1|norm2|compressor\.(kv|gate)_proj|mlp\.gate|lm_head|confidence_head\.proj)\.weight$"
)


class Dsv4QuantizationConfig(FineGrainedFP8Config):
    r"""How packed weights are used; pass it to `from_pretrained(quantization_config=...)`.

    Args:
        dequantize (`bool`, *optional*, defaults to `False`): load a float model of the requested dtype instead.
        quantize_activations (`bool`, *optional*): round the inputs of FP8 and FP4 layers to FP8, as the release does.
            `None` means `True` for a packed model and `False` for a dequantised one.
        expert_cache_size (`int` or `str`, *optional*, defaults to `"1GB"`): bytes, or a text as "4GB", of unpacked experts
            that a packed model keeps for the next tokens, all layers together; 0 keeps none. Changes speed and memory only.
        activation_scheme, weight_block_size, scale_fmt, expert_dtype: the released keys; read from config.json.

    Raises:
        ValueError: naming the key, its value and what is accepted.
    """

    def __init__(
        self,
        dequantize: bool = False,
        quantize_activations: bool | None = None,
        expert_cache_size: int | str = DEFAULT_EXPERT_CACHE,
        activation_scheme: str = "dynamic",
        weight_block_size: tuple[int, int] | list[int] = (32, 32),
        scale_fmt: str = "ue8m0",
        expert_dtype: str = "fp4",
        **kwargs,
    ):
        for name, value, accepted in (
            ("dequantize", dequantize, (True, False)),
            ("quantize_activations", quantize_activations, (None, True, False)),
        ):
            if not any(value is x for x in accepted):
                raise ValueError(f"quantization_config.{name} is {value!r}; accepted: {accepted}.")
        _size_in_bytes(expert_cache_size)
        given = {
            "quant_method": kwargs.pop("quant_method", RELEASED_METHOD),
            "activation_scheme": activation_scheme,
            "weight_block_size": weight_block_size,
            "scale_fmt": scale_fmt,
            "expert_dtype": expert_dtype,
        }
        for name, value in given.items():
            accepts, words = QUANTIZATION_RULES[name]
            if not accepts(value):
                raise ValueError(f"quantization_config.{name} is {value!r}; accepted: {words}.")
        super().__init__(
            activation_scheme=activation_scheme,
            weight_block_size=tuple(weight_block_size),
            dequantize=dequantize,
            scale_fmt=scale_fmt,
            expert_dtype=expert_dtype or "fp8",
            quant_method=PACKED_METHOD,
        )
        self.expert_dtype = expert_dtype
        self.quantize_activations = quantize_activations
        self.expert_cache_size = expert_cache_size
        if kwargs:
            accepted = sorted([*given, *_OPTIONS])
            raise ValueError(f"quantization_config has the keys {sorted(kwargs)}; accepted: {accepted}.")
        self.unknown_keys: dict[str, Any] = {}

    @property
    def rounds_activations(self) -> bool:
        """Whether inputs of quantised layers are rounded."""
        return not self.dequantize if self.quantize_activations is None else self.quantize_activations

    def get_loading_attributes(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _OPTIONS}

    def get(self, key: str, default: Any = None) -> Any:
        """Read like the dictionary that it stands for in a config."""
        return getattr(self, key, default)

    def to_dict(self) -> dict[str, Any]:
        """Return the released form."""
        released = {
            "quant_method": RELEASED_METHOD,
            "activation_scheme": self.activation_scheme,
            "weight_block_size": list(self.weight_block_size),
            "scale_fmt": self.scale_fmt,
            "expert_dtype": self.expert_dtype,
            **self.unknown_keys,
        }
        absent = {"expert_dtype": None, "scale_fmt": "float"}  # what a file means that leaves the key out
        return {key: value for key, value in released.items() if key not in absent or value != absent[key]}

    @classmethod
    def from_dict(cls, config_dict, return_unused_kwargs=False, **kwargs):
        """Read the dictionary of a config.json, where an absent key has another meaning than our default."""
        accepted = {*_OPTIONS, *QUANTIZATION_RULES}
        known = {key: value for key, value in config_dict.items() if key in accepted}
        found = super().from_dict(
            {"scale_fmt": "float", "expert_dtype": None, **known}, return_unused_kwargs, **kwargs
        )
        config = found[0] if return_unused_kwargs else found
        config.unknown_keys = {key: value for key, value in config_dict.items() if key not in accepted}
        return found

    def to_diff_dict(self) -> dict[str, Any]:
        return self.to_dict()


def _size_in_bytes(size: int | str) -> int:
    try:
        if isinstance(size, bool) or convert_file_size_to_int(size) < 0:
            raise ValueError
        return convert_file_size_to_int(size)
    except (ValueError, AttributeError):
        raise ValueError(
            f"quantization_config.expert_cache_size is {size!r}; accepted: bytes >= 0, or a text as '4GB'."
        ) from None


def pack_modules(model: nn.Module, config: Dsv4QuantizationConfig) -> None:
    r"""Switch every module that the release quantises to packed storage, with empty tensors on the meta device.

    Args:
        model (`nn.Module`): built on the meta device; changed in place.
        config (`Dsv4QuantizationConfig`): formats.
    """
    block, scale_dtype = tuple(config.weight_block_size), SCALE_DTYPES[config.scale_fmt]
    expert_dtype = _expert_dtype(model, config)
    unpacked = UnpackedExperts(_size_in_bytes(config.expert_cache_size))
    # By attribute, and by the module's own class: the quantiser of a folder's code may serve the package's model, and the
    # other way round, since the registry has one entry.
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            kind = None if getattr(module, "is_packed", False) else getattr(module, "packed_as", None)
            if kind == "tiles":
                module.pack(block, scale_dtype)
            elif kind == "experts":
                setattr(parent, name, module.packed(expert_dtype, block, scale_dtype, unpacked))
            elif kind == "rows":
                setattr(parent, name, module.packed(scale_dtype))


def set_activation_rounding(model: nn.Module, enabled: bool, block: int = 32) -> None:
    """Switch the FP8 rounding of the inputs of quantised layers, with one scale per `block` channels, in place.

    Takes whole models or layers: sites of the hyper-connections round too, once for all matrices that read the same input.
    """
    for module in model.modules():
        if hasattr(module, "quantize_activations"):
            module.quantize_activations, module.activation_block = enabled, block


def simulate_packing(model: nn.Module, config: Dsv4QuantizationConfig | None) -> None:
    r"""Let a float model compute what its packed form would: quantisation-aware training (V4 report section 5).

    Every weight that the release packs is rounded where it is used (FP8 tiles, FP4 or FP8 experts, FP8 table rows), and,
    unless `config.quantize_activations` is `False`, so are the inputs of those layers. Gradients pass straight through.

    Args:
        model (`nn.Module`): changed in place; packed modules are left alone.
        config (`Dsv4QuantizationConfig`, *optional*): the formats of the folder to be written; `None` ends it.

    Raises:
        ValueError: for float32 scales, in which nothing is ever packed here.
    """
    if config is not None and config.scale_fmt != "ue8m0":
        raise ValueError(f"quantization_config.scale_fmt is {config.scale_fmt!r}; accepted for training: 'ue8m0'.")
    roundings: dict[str, Any] = {}
    if config is not None:
        tiles = partial(round_fp8_tiles, block_size=tuple(config.weight_block_size))
        experts = tiles if _expert_dtype(model, config) == "fp8" else round_mxfp4
        roundings = {"tiles": tiles, "experts": experts, "rows": partial(round_fp8, block=TABLE_BLOCK)}
    for module in model.modules():
        # By attribute, not by class: a model of remote code has classes of its own.
        if not hasattr(module, "round_weight") or getattr(module, "is_packed", False):
            continue
        module.round_weight = roundings.get(module.packed_as)
        rounds_inputs = config is not None and config.quantize_activations is not False
        set_activation_rounding(module, rounds_inputs, config.weight_block_size[1] if config is not None else 32)


def _expert_dtype(model: nn.Module, config: Dsv4QuantizationConfig) -> str:
    """V4 names the experts' format at the top of its config.json, V4.1 inside the quantisation."""
    return config.expert_dtype or getattr(getattr(model, "config", None), "expert_dtype", None) or "fp8"


def loaded_dtype(name: str, stored: torch.dtype, expected: torch.dtype) -> torch.dtype:
    r"""Return the dtype with which a stored tensor enters the model.

    Args:
        name (`str`): parameter name. stored, expected (`torch.dtype`): in the file, and of the parameter.

    Raises:
        ValueError: if bytes would be read as numbers or numbers as bytes.
    """
    if stored == expected:
        return stored
    floats = stored.is_floating_point and expected.is_floating_point  # a table of ids is not a table of numbers
    if stored in PACKED_DTYPES or expected in PACKED_DTYPES or not floats:
        raise ValueError(f"{name} is stored as {stored}; accepted: {expected}.")
    if stored == torch.float32 and expected.itemsize < 4 and WIDE_NAMES.search(name):
        return stored
    return expected


class Dsv4HfQuantizer(HfQuantizer):
    """Quantiser of released checkpoints: swaps modules before loading, refuses casts of bytes, saves what it loaded."""

    requires_calibration = False

    def validate_environment(self, *args, **kwargs):
        if not self.pre_quantized:
            raise ValueError(
                "quantization_config was given for a checkpoint whose config.json has none; accepted: released "
                "checkpoints, whose tensors are already packed (a saved float model loads without quantization_config)."
            )

    def _process_model_before_weight_loading(self, model, **kwargs):
        config = self.quantization_config
        if not config.dequantize:
            pack_modules(model, config)
        # One scale spans as many channels as a tile has columns: 32 in V4.1, 128 in V4.
        set_activation_rounding(model, config.rounds_activations, config.weight_block_size[1])

    def get_new_dtype(self, converter, param, dtype):
        stored = param.dtype if hasattr(param, "dtype") else DTYPES[param.get_dtype()]  # a lazy slice of safetensors
        target = loaded_dtype(converter.target_patterns[0], stored, dtype)
        return None if target == stored else target

    def _process_model_after_weight_loading(self, model, **kwargs):
        # The loader makes every floating tensor trainable, packed ones included.
        for module in model.modules():
            if getattr(module, "packed_as", None) == "tiles" and module.is_packed:
                module.weight.requires_grad_(False)
                module.weight_scale_inv.requires_grad_(False)
        return model

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True

    @property
    def is_qat_trainable(self) -> bool:
        return True

    @property
    def is_compileable(self) -> bool:
        return True


def register_quantizer() -> None:
    """Register under our own method name; may run twice (installed and remote code), the last one wins."""
    AUTO_QUANTIZATION_CONFIG_MAPPING[PACKED_METHOD] = Dsv4QuantizationConfig
    AUTO_QUANTIZER_MAPPING[PACKED_METHOD] = Dsv4HfQuantizer
