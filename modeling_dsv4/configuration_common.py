"""What the configurations of both families share: rules for keys, writing of the released form, the decoder's facts.

A configuration reads its released config.json unchanged and writes it back equal: every key of that file is a field,
other keys are kept as they are. What follows from the keys is a property. The mechanisms read the properties of
`DecoderConfig`; a difference between the families is a value here, never a second copy of a mechanism.
"""

from __future__ import annotations

import copy
import math
import re
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers import __version__ as transformers_version

# What `quantization_config.quant_method` is called in memory. The file says "fp8", which transformers would hand to its
# own block-FP8 quantiser; that one cannot read this layout and expands everything to BF16 without a recent GPU.
PACKED_METHOD = "deepseek_fp8"
RELEASED_METHOD = "fp8"

ROPE_KEYS = ("rope_type", "factor", "beta_fast", "beta_slow", "original_max_position_embeddings")

# Keys of `PreTrainedConfig` itself; they are written only when they differ from these defaults.
_BASE_DEFAULTS = PreTrainedConfig().to_dict()


def is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    # JSON readers accept NaN and Infinity, which no key means.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def is_float_dtype(value: Any) -> bool:
    dtype = getattr(torch, value, None) if isinstance(value, str) else value
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point


def int_from(low: int):
    return (lambda v: is_int(v) and v >= low), f"an integer >= {low}"


def number_above(low: float):
    return (lambda v: is_number(v) and v > low), f"a number > {low}"


def one_of(*values):
    return (lambda v: v in values and type(v) in {type(x) for x in values}), "one of " + ", ".join(map(repr, values))


def optional(rule):
    return (lambda v: v is None or rule[0](v)), f"null or {rule[1]}"


def list_of(low: int, count: int | None = None):
    def accepts(value):
        fits = isinstance(value, (list, tuple)) and all(is_int(x) and x >= low for x in value)
        return fits and count in (None, len(value))

    return accepts, f"a list of {'' if count is None else f'{count} '}integers >= {low}"


BOOL = (lambda v: isinstance(v, bool)), "true or false"
POSITIVE = int_from(1)
COUNT = int_from(0)
WEIGHT = (lambda v: is_number(v) and v >= 0), "a number >= 0"
TOKEN_ID = optional((lambda v: is_int(v) and v >= 0, "a token id >= 0"))
TOKEN_IDS = optional((lambda v: TOKEN_ID[0](v) or (isinstance(v, list) and all(is_int(x) for x in v)), "token ids"))
DIGEST = (lambda v: isinstance(v, str) and re.fullmatch("[0-9a-f]{64}", v) is not None), "64 hexadecimal digits"
OBJECT = (lambda v: isinstance(v, dict) or hasattr(v, "to_dict")), "an object"

# Keys that every config of transformers has.
COMMON_RULES = {
    "architectures": optional(
        (lambda v: isinstance(v, list) and all(isinstance(x, str) for x in v), "a list of names")
    ),
    "dtype": optional((is_float_dtype, "a floating torch dtype, such as 'bfloat16'")),
    "transformers_version": optional((lambda v: isinstance(v, str), "a version string")),
    # transformers opens this file, if named, instead of the folder's usual ones.
    "transformers_weights": optional(
        (lambda v: isinstance(v, str) and not set("/\\") & set(v), "a file of the checkpoint's own folder")
    ),
}
# Keys of the released `quantization_config`.
QUANTIZATION_RULES = {
    "quant_method": one_of(RELEASED_METHOD, PACKED_METHOD),
    "activation_scheme": one_of("dynamic"),
    "weight_block_size": list_of(1, count=2),
    "scale_fmt": one_of("ue8m0", "float"),
    "expert_dtype": optional(one_of("fp4", "fp8")),
}
# Keys of a DSpark drafter.
DSPARK_RULES = {
    "dspark_block_size": POSITIVE,
    "dspark_noise_token_id": COUNT,
    "dspark_target_layer_ids": list_of(0),
    "dspark_markov_rank": POSITIVE,
}


def check_key(owner: str, key: str, value: Any, accepted: str, ok: bool) -> None:
    """Raise a `ValueError` that names the key, its value and what is accepted, unless `ok`."""
    if not ok:
        raise ValueError(f"{owner}.{key} is {value!r}; accepted: {accepted}.")


def check_drafter(use_mtp: bool, config) -> None:
    """Raise a `ValueError` if a drafter is asked for (`use_mtp=True`) that a text configuration does not have."""
    if use_mtp and not config.draft_rings:
        raise ValueError(
            "use_mtp is True, but the checkpoint has no drafter (num_nextn_predict_layers is "
            f"{config.num_nextn_predict_layers}); accepted: False."
        )


def without_drafter(config):
    """Return a copy of a text configuration that has no DSpark drafter."""
    config = copy.deepcopy(config)
    config.num_nextn_predict_layers = 0
    config.compress_ratios = config.compress_ratios[: config.num_hidden_layers]
    return config


class ReleasedConfig(PreTrainedConfig):
    """Common part: validation by table, and writing of exactly the released keys plus what the user changed.

    `RULES` maps each key to (predicate, words for the message); `WRITTEN_IF_CHANGED` names the fields that the released
    file does not have: they are written only when they differ from their default.
    """

    RULES = {}
    WRITTEN_IF_CHANGED = ()

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs):
        # The Auto classes pass `dtype=None` on; it means "as in the file".
        return super().from_dict(config_dict, **{k: v for k, v in kwargs.items() if (k, v) != ("dtype", None)})

    def __post_init__(self, **kwargs):
        kind = type(self).model_type
        given = kwargs.get("model_type", kind)
        check_key(kind, "model_type", given, repr(kind), given == kind)
        for key, (accepts, accepted) in COMMON_RULES.items():
            value = kwargs.get(key, getattr(self, key, None))
            check_key(kind, key, value, accepted, accepts(value))
        self._check_quantization(kwargs.get("quantization_config"))
        super().__post_init__(**kwargs)
        self._take_over_quantization()
        self.check()

    def _check_quantization(self, quantization: Any) -> None:
        """Check the released form; an object is another quantiser's, which checks itself."""
        ok = quantization is None or OBJECT[0](quantization)
        check_key(self.model_type, "quantization_config", quantization, OBJECT[1], ok)
        if isinstance(quantization, dict):
            for key, (accepts, accepted) in QUANTIZATION_RULES.items():
                if key in quantization or key == "quant_method":
                    value = quantization.get(key)
                    check_key(self.model_type, f"quantization_config.{key}", value, accepted, accepts(value))

    def _take_over_quantization(self) -> None:
        """Rename the released method to ours, so that transformers asks our quantiser."""
        quantization = getattr(self, "quantization_config", None)
        if isinstance(quantization, dict) and quantization.get("quant_method") == RELEASED_METHOD:
            self.quantization_config = {**quantization, "quant_method": PACKED_METHOD}
            if self.dtype is None:  # transformers would look for it in the files, whose E8M0 it does not know
                self.dtype = torch.bfloat16

    def check(self) -> None:
        """Check every key by its rule.

        Raises:
            ValueError: with the key, the value and what is accepted.
        """
        for key, (accepts, accepted) in self.RULES.items():
            self._require(key, accepted, accepts(getattr(self, key)))

    def _require(self, key: str, accepted: str, ok: bool) -> None:
        check_key(self.model_type, key, getattr(self, key, None), accepted, ok)

    def to_dict(self) -> dict[str, Any]:
        output = super().to_dict()
        # The version that wrote the file is part of the file: a released config is written back equal.
        output["transformers_version"] = self.transformers_version or transformers_version
        quantization = output.get("quantization_config")
        if quantization and quantization.get("quant_method") == PACKED_METHOD:
            output["quantization_config"] = {**quantization, "quant_method": RELEASED_METHOD}
        return output

    def to_diff_dict(self) -> dict[str, Any]:
        defaults = type(self).default_config_fields()
        written = {}
        for key, value in self.to_dict().items():
            sub_config = getattr(self, key, None) if key in self.sub_configs else None
            if sub_config is not None:
                value = sub_config.to_diff_dict()
                value.pop("transformers_version")
                written[key] = value
            elif self._is_written(key, value, defaults):
                written[key] = value
        written.pop("_name_or_path", None)
        return written

    def _is_written(self, key: str, value: Any, defaults: dict[str, Any]) -> bool:
        if key in ("model_type", "transformers_version"):
            return True
        if key in self.sub_configs:  # an absent part (text-only model) is left out, not written as null
            return value is not None
        if key in self.WRITTEN_IF_CHANGED:
            return value != defaults.get(key)
        if key in _BASE_DEFAULTS:
            return value != _BASE_DEFAULTS[key]
        return True


class DecoderConfig(ReleasedConfig):
    """Facts about a language model that the mechanisms read; the values here are V4.1's, V4 overrides what differs."""

    attribute_map = {"num_experts": "n_routed_experts", "num_local_experts": "n_routed_experts"}

    # A site collapses the streams by the pre of the site before it (V4.1), not by its own (V4).
    single_pass_hc = True
    # Each query head is divided by its root mean square, without a weight (V4).
    normalizes_query_heads = False
    # The tokens of a group carry a learned bias on their gates (V4).
    has_position_bias = False
    # Index keys are projected from the entry (V4.1) or pooled by a compressor of their own and rotated (V4).
    pools_index_keys = False
    # "v41": FP8 windows, NVFP4 entries; "v4": FP8 on the unrotated channels of both.
    cache_formats = "v41"
    # A second selection bias serves image positions.
    has_image_bias = True
    # Layers whose experts follow from the token id.
    num_hash_layers = 0
    engram_layer_ids = ()

    WRITTEN_IF_CHANGED = (
        "pad_token_id", "gate_temp", "cache_rounding", "output_router_logits", "balance_loss_weight",
        "indexer_loss_weight", "balance_loss_normalized",
    )  # fmt: skip

    RELEASED_ROPE_SCALING = {
        "rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 65536,
    }  # fmt: skip

    RULES = {
        "vocab_size": POSITIVE,
        "hidden_size": POSITIVE,
        "moe_intermediate_size": POSITIVE,
        "num_hidden_layers": POSITIVE,
        "num_attention_heads": POSITIVE,
        "num_key_value_heads": one_of(1),
        "head_dim": POSITIVE,
        "qk_rope_head_dim": (lambda v: is_int(v) and v >= 2 and v % 2 == 0, "an even integer >= 2"),
        "q_lora_rank": POSITIVE,
        "o_lora_rank": POSITIVE,
        "o_groups": POSITIVE,
        "hidden_act": one_of("silu"),
        "swiglu_limit": number_above(0),
        "rms_norm_eps": number_above(0),
        "attention_bias": one_of(False),
        "attention_dropout": (lambda v: is_number(v) and v == 0, "0 (the architecture has no attention dropout)"),
        "initializer_range": number_above(0),
        "use_cache": BOOL,
        "tie_word_embeddings": BOOL,
        "max_position_embeddings": POSITIVE,
        "rope_theta": number_above(0),
        "compress_rope_theta": number_above(0),
        "n_routed_experts": POSITIVE,
        "n_shared_experts": COUNT,
        "num_experts_per_tok": POSITIVE,
        "scoring_func": one_of("sqrtsoftplus"),
        "topk_method": one_of("noaux_tc"),
        "norm_topk_prob": BOOL,
        "routed_scaling_factor": number_above(0),
        "sliding_window": POSITIVE,
        "compress_ratios": list_of(0),
        "index_n_heads": POSITIVE,
        "index_head_dim": POSITIVE,
        "index_topk": optional(POSITIVE),
        "hc_mult": POSITIVE,
        "hc_sinkhorn_iters": POSITIVE,
        "hc_eps": (lambda v: is_number(v) and v >= 0, "a number >= 0"),
        "num_nextn_predict_layers": COUNT,
        "pad_token_id": TOKEN_ID,
        "bos_token_id": TOKEN_ID,
        "eos_token_id": TOKEN_IDS,
        "gate_temp": number_above(0),
        "cache_rounding": BOOL,
        "output_router_logits": BOOL,
        "balance_loss_weight": WEIGHT,
        "indexer_loss_weight": WEIGHT,
        "balance_loss_normalized": BOOL,
    }

    def __post_init__(self, **kwargs):
        self._read_rope(kwargs.pop("rope_parameters", None))
        super().__post_init__(**kwargs)

    def _read_rope(self, parameters: dict | None) -> None:
        """Fold transformers' flat or nested `rope_parameters` into the released keys."""
        if parameters is not None:
            check_key(self.model_type, "rope_parameters", parameters, "an object", isinstance(parameters, dict))
            main, compress = parameters.get("main", parameters), parameters.get("compress", parameters)
            self.rope_theta = main.get("rope_theta", self.rope_theta)
            if compress is not parameters:
                self.compress_rope_theta = compress.get("rope_theta", self.compress_rope_theta)
            scaling = {k: v for k, v in compress.items() if k not in ("rope_theta", "partial_rotary_factor")}
            self.rope_scaling = scaling or self.rope_scaling
        if self.rope_scaling is None:
            self.rope_scaling = dict(self.RELEASED_ROPE_SCALING)

    @property
    def yarn(self) -> dict | None:
        """YaRN settings of the compressed layers, or `None` for plain RoPE (contract section 5)."""
        scaling = {"rope_type": self.rope_scaling.get("type"), **self.rope_scaling}
        return None if scaling["rope_type"] == "default" else scaling

    @property
    def layer_modes(self) -> list[str]:
        """Per backbone layer: "window", "full", "reindex" or "reuse" (V4.1 report section 2.3.1)."""
        raise NotImplementedError

    @property
    def decoder_cut(self) -> int:
        """The last layer that pools entries: the decoder begins with it (V4.1 report section 2.2)."""
        return max([0, *(layer for layer, mode in enumerate(self.layer_modes) if mode == "full")])

    def mode(self, layer: int) -> str:
        """The mode of `layer`; draft stages, behind the backbone, are window-only."""
        return self.layer_modes[layer] if layer < self.num_hidden_layers else "window"

    def ratio(self, layer: int) -> int:
        """Tokens of one compressed entry of `layer`, 0 for a window-only layer."""
        return self.compress_ratios[layer] if layer < self.num_hidden_layers else 0

    def experts_of(self, layer: int) -> tuple[int, int]:
        """Routed experts of `layer`, and how many of them serve a token."""
        return self.n_routed_experts, self.num_experts_per_tok

    @property
    def draft_stages(self) -> int:
        """Blocks of the DSpark drafter, 0 without one."""
        return 0

    @property
    def draft_rings(self) -> list[tuple[int, bool]]:
        """What a drafter keeps of past tokens: (tokens, whether the values are window entries) of each ring."""
        return [(self.sliding_window, True)] if self.draft_stages else []

    def selects(self, layer: int) -> bool:
        """Whether `layer` has an indexer."""
        return self.mode(layer) in ("full", "reindex")

    def overlaps(self, layer: int) -> bool:
        """Whether a group of `layer` also pools the group before it."""
        return False

    def uses_candidates(self, layer: int) -> bool:
        """Whether `layer` selects inside a candidate pool."""
        return False

    def makes_candidates(self, layer: int) -> bool:
        """Whether `layer` makes the candidate pool."""
        return False

    @property
    def needs_token_map(self) -> bool:
        """Whether an n-gram hash needs a tokenizer's map."""
        return False

    def check(self) -> None:
        self._check_rope()
        super().check()
        self._check_sizes()

    def _check_rope(self) -> None:
        scaling = self.rope_scaling
        check_key(self.model_type, "rope_scaling", scaling, "an object", isinstance(scaling, dict))
        kind = scaling.get("rope_type", scaling.get("type"))
        check_key(self.model_type, "rope_scaling.rope_type", kind, "'yarn' or 'default'", kind in ("yarn", "default"))
        if kind == "yarn":
            for key in ROPE_KEYS[1:]:
                value = scaling.get(key)
                ok = is_number(value) and value > 0
                check_key(self.model_type, f"rope_scaling.{key}", value, "a number > 0", ok)
            factor = scaling.get("attention_factor", 1.0)
            check_key(
                self.model_type, "rope_scaling.attention_factor", factor, "1.0 (no mscale)", factor in (None, 1.0)
            )

    def _check_sizes(self) -> None:
        check = self._require
        heads, groups = self.num_attention_heads, self.o_groups
        check("o_groups", f"a divisor of num_attention_heads ({heads})", heads % groups == 0)
        check("qk_rope_head_dim", f"at most head_dim ({self.head_dim})", self.qk_rope_head_dim <= self.head_dim)
        accepted = f"at least qk_rope_head_dim ({self.qk_rope_head_dim})"
        check("index_head_dim", accepted, self.index_head_dim >= self.qk_rope_head_dim)
        for key in ("head_dim", "index_head_dim"):
            check(key, "an even number (FP4 packs two values a byte)", getattr(self, key) % 2 == 0)
        check("num_experts_per_tok", f"at most n_routed_experts ({self.n_routed_experts})",
              self.num_experts_per_tok <= self.n_routed_experts)  # fmt: skip
        check("n_shared_experts", "1 (the released layout has one shared expert)", self.n_shared_experts == 1)
        check("tie_word_embeddings", "false (the released head is its own matrix)", not self.tie_word_embeddings)

    def _check_drafter(self) -> None:
        """Check the keys of a DSpark drafter, beyond their own rules, against the backbone."""
        depth, targets = self.num_hidden_layers, self.dspark_target_layer_ids
        accepted = f"layers below {depth}, at least one"
        self._require("dspark_target_layer_ids", accepted, targets and max(targets) < depth)
        accepted = f"below vocab_size ({self.vocab_size})"
        self._require("dspark_noise_token_id", accepted, self.dspark_noise_token_id < self.vocab_size)
