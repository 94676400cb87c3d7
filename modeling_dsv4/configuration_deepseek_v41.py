"""Configuration of DeepSeek-V4.1: the released config.json, its layer schedule, and one check per key.

The three classes read the released file unchanged and write it back equal: every key of that file is a field, other
keys are kept as they are. What follows from the keys (which layer compresses, whose entries it reads, who selects,
where the decoder starts) is a property, so that no second copy can disagree with the file.

Sources: the released config.json (contract, revision dba1be0a40aa), V4.1 report sections 2.1 to 2.4.
"""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers import __version__ as transformers_version
from transformers.configuration_utils import SubConfigSpec

# What `quantization_config.quant_method` is called in memory. The file says "fp8", which transformers would hand to its
# own block-FP8 quantiser; that one cannot read this layout and expands everything to BF16 without a recent GPU.
PACKED_METHOD = "deepseek_fp8"
RELEASED_METHOD = "fp8"
RELEASED_ARCHITECTURE = "DeepseekV41ForCausalLM"

ROPE_KEYS = ("rope_type", "factor", "beta_fast", "beta_slow", "original_max_position_embeddings")

# Keys of `PreTrainedConfig` itself; they are written only when they differ from these defaults.
_BASE_DEFAULTS = PreTrainedConfig().to_dict()


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    # JSON readers accept NaN and Infinity, which no key means.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_float_dtype(value: Any) -> bool:
    dtype = getattr(torch, value, None) if isinstance(value, str) else value
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point


def _int_from(low: int):
    return (lambda v: _is_int(v) and v >= low), f"an integer >= {low}"


def _number_above(low: float):
    return (lambda v: _is_number(v) and v > low), f"a number > {low}"


def _one_of(*values):
    return (lambda v: v in values and type(v) in {type(x) for x in values}), "one of " + ", ".join(map(repr, values))


def _optional(rule):
    return (lambda v: v is None or rule[0](v)), f"null or {rule[1]}"


def _list_of(low: int, count: int | None = None):
    def accepts(value):
        fits = isinstance(value, (list, tuple)) and all(_is_int(x) and x >= low for x in value)
        return fits and count in (None, len(value))

    return accepts, f"a list of {'' if count is None else f'{count} '}integers >= {low}"


BOOL = (lambda v: isinstance(v, bool)), "true or false"
POSITIVE = _int_from(1)
COUNT = _int_from(0)
TOKEN_ID = _optional((lambda v: _is_int(v) and v >= 0, "a token id >= 0"))
TOKEN_IDS = _optional((lambda v: TOKEN_ID[0](v) or (isinstance(v, list) and all(_is_int(x) for x in v)), "token ids"))
OBJECT = (lambda v: isinstance(v, dict) or hasattr(v, "to_dict")), "an object"

# Keys that every config of transformers has.
COMMON_RULES = {
    "architectures": _optional(
        (lambda v: isinstance(v, list) and all(isinstance(x, str) for x in v), "a list of names")
    ),
    "dtype": _optional((_is_float_dtype, "a floating torch dtype, such as 'bfloat16'")),
    "transformers_version": _optional((lambda v: isinstance(v, str), "a version string")),
}
# Keys of the released `quantization_config`; those that are absent have the released values.
QUANTIZATION_RULES = {
    "quant_method": _one_of(RELEASED_METHOD, PACKED_METHOD),
    "activation_scheme": _one_of("dynamic"),
    "weight_block_size": _list_of(1, count=2),
    "scale_fmt": _one_of("ue8m0", "float"),
    "expert_dtype": _one_of("fp4", "fp8"),
}


def _check(owner: str, key: str, value: Any, accepted: str, ok: bool) -> None:
    """Raise a `ValueError` that names the key, its value and what is accepted, unless `ok`."""
    if not ok:
        raise ValueError(f"{owner}.{key} is {value!r}; accepted: {accepted}.")


class _ReleasedConfig(PreTrainedConfig):
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
        _check(kind, "model_type", kwargs.get("model_type", kind), repr(kind), kwargs.get("model_type", kind) == kind)
        for key, (accepts, accepted) in COMMON_RULES.items():
            value = kwargs.get(key, getattr(self, key, None))
            _check(kind, key, value, accepted, accepts(value))
        super().__post_init__(**kwargs)
        self.check()

    def check(self) -> None:
        """Check every key by its rule.

        Raises:
            ValueError: with the key, the value and what is accepted.
        """
        for key, (accepts, accepted) in self.RULES.items():
            value = getattr(self, key)
            _check(self.model_type, key, value, accepted, accepts(value))

    def to_dict(self) -> dict[str, Any]:
        output = super().to_dict()
        # The version that wrote the file is part of the file: a released config is written back equal.
        output["transformers_version"] = self.transformers_version or transformers_version
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


class Dsv41TextConfig(_ReleasedConfig):
    r"""Language-model part of a DeepSeek-V4.1 configuration, with the released V4.1-Flash values as defaults.

    Args (beyond the released keys, which are described in the model card):
        gate_temp (`float`, defaults to 1.0): divisor of the router logits (contract section 7).
        cache_rounding (`bool`, defaults to `True`): round window, compressed and index values as the release does
            (contract section 2). `False` keeps them in the model's dtype: comparisons, and warm-up of QAT.
        output_router_logits (`bool`, defaults to `False`): return router logits from every forward.
        rope_scaling / rope_parameters: YaRN settings flat (`rope_theta` beside `rope_scaling`), or in transformers'
            form: `rope_parameters` flat, or nested as `{"main": {...}, "compress": {...}}`. Written in the flat form.
    """

    model_type = "deepseek_v41_text"
    base_config_key = "text_config"
    attribute_map = {"num_experts": "n_routed_experts", "num_local_experts": "n_routed_experts"}

    vocab_size: int = 129280
    hidden_size: int = 5120
    moe_intermediate_size: int = 2304
    num_hidden_layers: int = 40
    num_attention_heads: int = 64
    num_key_value_heads: int = 1
    head_dim: int = 512
    qk_rope_head_dim: int = 64
    q_lora_rank: int = 1280
    o_lora_rank: int = 1024
    o_groups: int = 8
    hidden_act: str = "silu"
    swiglu_limit: float = 10.0
    rms_norm_eps: float = 1e-20
    attention_bias: bool = False
    attention_dropout: float = 0.0
    initializer_range: float = 0.02
    use_cache: bool = True
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 1048576
    rope_theta: float = 10000
    rope_scaling: dict | None = None
    n_routed_experts: int = 384
    n_shared_experts: int = 1
    num_experts_per_tok: int = 6
    scoring_func: str = "sqrtsoftplus"
    topk_method: str = "noaux_tc"
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.5
    sliding_window: int = 128
    compress_ratios: list[int] | None = None
    compress_rope_theta: float = 160000
    kv_source_layer_ids: list[int] | None = None
    index_source_layer_ids: list[int] | None = None
    index_n_heads: int = 32
    index_head_dim: int = 128
    index_topk: int | None = 512
    candidate_source_layer_id: int = 20
    candidate_topk_blocks: int = 2048
    candidate_block_size: int = 8
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    engram_layer_ids: list[int] | None = None
    engram_num_embeddings: list[int] | None = None
    engram_max_ngram_size: int = 4
    engram_vocab_size: int = 16000000
    engram_n_heads: int = 8
    engram_head_dim: int = 256
    engram_pad_token_id: int = 2
    engram_compressed_vocab_size: int = 99092
    num_nextn_predict_layers: int = 3
    dspark_block_size: int = 5
    dspark_noise_token_id: int = 128799
    dspark_target_layer_ids: list[int] | None = None
    dspark_markov_rank: int = 256
    dspark_n_routed_experts: int = 128
    dspark_num_experts_per_tok: int = 3
    # Not in the released text part:
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    gate_temp: float = 1.0
    cache_rounding: bool = True
    output_router_logits: bool = False

    WRITTEN_IF_CHANGED = (
        "pad_token_id", "bos_token_id", "eos_token_id", "gate_temp", "cache_rounding", "output_router_logits",
    )  # fmt: skip

    # Schedule of the released file; a config that names other depths must name its own schedule.
    RELEASED_SCHEDULE = {
        "compress_ratios": [0, 0] + [2] * 18 + [1] * 20 + [0] * 3,
        "kv_source_layer_ids": [2, 8, 14, 20],
        "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
        "engram_layer_ids": [1, 14],
        "engram_num_embeddings": [384006168, 384016682],
        "dspark_target_layer_ids": [37, 38, 39],
    }
    RELEASED_ROPE_SCALING = {
        "rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 65536,
    }  # fmt: skip

    RULES = {
        "vocab_size": POSITIVE,
        "hidden_size": POSITIVE,
        "moe_intermediate_size": POSITIVE,
        "num_hidden_layers": POSITIVE,
        "num_attention_heads": POSITIVE,
        "num_key_value_heads": _one_of(1),
        "head_dim": POSITIVE,
        "qk_rope_head_dim": (lambda v: _is_int(v) and v >= 2 and v % 2 == 0, "an even integer >= 2"),
        "q_lora_rank": POSITIVE,
        "o_lora_rank": POSITIVE,
        "o_groups": POSITIVE,
        "hidden_act": _one_of("silu"),
        "swiglu_limit": _number_above(0),
        "rms_norm_eps": _number_above(0),
        "attention_bias": _one_of(False),
        "attention_dropout": (lambda v: _is_number(v) and v == 0, "0 (the architecture has no attention dropout)"),
        "initializer_range": _number_above(0),
        "use_cache": BOOL,
        "tie_word_embeddings": BOOL,
        "max_position_embeddings": POSITIVE,
        "rope_theta": _number_above(0),
        "compress_rope_theta": _number_above(0),
        "n_routed_experts": POSITIVE,
        "n_shared_experts": COUNT,
        "num_experts_per_tok": POSITIVE,
        "scoring_func": _one_of("sqrtsoftplus"),
        "topk_method": _one_of("noaux_tc"),
        "norm_topk_prob": BOOL,
        "routed_scaling_factor": _number_above(0),
        "sliding_window": POSITIVE,
        "compress_ratios": _list_of(0),
        "kv_source_layer_ids": _list_of(0),
        "index_source_layer_ids": _list_of(0),
        "index_n_heads": POSITIVE,
        "index_head_dim": POSITIVE,
        "index_topk": _optional(POSITIVE),
        "candidate_source_layer_id": _int_from(-1),
        "candidate_topk_blocks": POSITIVE,
        "candidate_block_size": POSITIVE,
        "hc_mult": POSITIVE,
        "hc_sinkhorn_iters": POSITIVE,
        "hc_eps": (lambda v: _is_number(v) and v >= 0, "a number >= 0"),
        "engram_layer_ids": _list_of(0),
        "engram_num_embeddings": _list_of(1),
        "engram_max_ngram_size": _int_from(2),
        "engram_vocab_size": _int_from(2),
        "engram_n_heads": POSITIVE,
        "engram_head_dim": POSITIVE,
        "engram_pad_token_id": COUNT,
        "engram_compressed_vocab_size": POSITIVE,
        "num_nextn_predict_layers": COUNT,
        "dspark_block_size": POSITIVE,
        "dspark_noise_token_id": COUNT,
        "dspark_target_layer_ids": _list_of(0),
        "dspark_markov_rank": POSITIVE,
        "dspark_n_routed_experts": POSITIVE,
        "dspark_num_experts_per_tok": POSITIVE,
        "pad_token_id": TOKEN_ID,
        "bos_token_id": TOKEN_ID,
        "eos_token_id": TOKEN_IDS,
        "gate_temp": _number_above(0),
        "cache_rounding": BOOL,
        "output_router_logits": BOOL,
    }

    def __post_init__(self, **kwargs):
        for key, value in self.RELEASED_SCHEDULE.items():
            given = getattr(self, key)
            if given is None or isinstance(given, tuple):
                setattr(self, key, list(value if given is None else given))
        self._read_rope(kwargs.pop("rope_parameters", None))
        super().__post_init__(**kwargs)

    def _read_rope(self, parameters: dict | None) -> None:
        """Fold transformers' flat or nested `rope_parameters` into the released keys."""
        if parameters is not None:
            _check(self.model_type, "rope_parameters", parameters, "an object", isinstance(parameters, dict))
            main, compress = parameters.get("main", parameters), parameters.get("compress", parameters)
            self.rope_theta = main.get("rope_theta", self.rope_theta)
            if compress is not parameters:
                self.compress_rope_theta = compress.get("rope_theta", self.compress_rope_theta)
            scaling = {k: v for k, v in compress.items() if k not in ("rope_theta", "partial_rotary_factor")}
            self.rope_scaling = scaling or self.rope_scaling
        if self.rope_scaling is None:
            self.rope_scaling = dict(self.RELEASED_ROPE_SCALING)

    # ---- what follows from the keys --------------------------------------------------------------------------------

    @property
    def yarn(self) -> dict | None:
        """YaRN settings of the compressed layers, or `None` for plain RoPE (contract section 5)."""
        scaling = {"rope_type": self.rope_scaling.get("type"), **self.rope_scaling}
        return None if scaling["rope_type"] == "default" else scaling

    @property
    def layer_modes(self) -> list[str]:
        """Per backbone layer: "window", "full", "reindex" or "reuse" (V4.1 report section 2.3.1)."""
        modes = []
        for layer in range(self.num_hidden_layers):
            if self.compress_ratios[layer] == 0:
                modes.append("window")
            elif layer in self.kv_source_layer_ids:
                modes.append("full")
            else:
                modes.append("reindex" if layer in self.index_source_layer_ids else "reuse")
        return modes

    def kv_source(self, layer: int) -> int | None:
        """The layer whose compressed entries `layer` attends, or `None` for a window layer."""
        return self._last_source(layer, self.kv_source_layer_ids)

    def index_source(self, layer: int) -> int | None:
        """The layer whose selection `layer` uses, or `None` for a window layer."""
        return self._last_source(layer, self.index_source_layer_ids)

    def _last_source(self, layer: int, sources: list[int]) -> int | None:
        if self.compress_ratios[layer] == 0:
            return None
        return max((source for source in sources if source <= layer), default=None)

    def uses_candidates(self, layer: int) -> bool:
        """Whether `layer` selects inside the candidate pool (V4.1 report section 2.3.2)."""
        source = self.candidate_source_layer_id
        return 0 <= source < layer and self.layer_modes[layer] == "reindex" and self.kv_source(layer) == source

    @property
    def replay_cut(self) -> int | None:
        """First decoder layer, the last that makes global entries (report section 2.2), or `None` without one."""
        return max(self.kv_source_layer_ids, default=None)

    @property
    def needs_token_map(self) -> bool:
        """Whether the n-gram hash needs a tokenizer's map (an Engram whose compressed vocabulary is smaller)."""
        return bool(self.engram_layer_ids) and self.engram_compressed_vocab_size != self.vocab_size

    # ---- checks that need several keys -----------------------------------------------------------------------------

    def check(self) -> None:
        self._check_rope()
        super().check()
        self._check_sizes()
        self._check_schedule()
        self._check_engram()

    def _check_rope(self) -> None:
        scaling = self.rope_scaling
        _check(self.model_type, "rope_scaling", scaling, "an object", isinstance(scaling, dict))
        kind = scaling.get("rope_type", scaling.get("type"))
        _check(self.model_type, "rope_scaling.rope_type", kind, "'yarn' or 'default'", kind in ("yarn", "default"))
        if kind == "yarn":
            for key in ROPE_KEYS[1:]:
                value = scaling.get(key)
                ok = _is_number(value) and value > 0
                _check(self.model_type, f"rope_scaling.{key}", value, "a number > 0", ok)
            factor = scaling.get("attention_factor", 1.0)
            _check(self.model_type, "rope_scaling.attention_factor", factor, "1.0 (no mscale)", factor in (None, 1.0))

    def _check_sizes(self) -> None:
        def check(key, accepted, ok):
            _check(self.model_type, key, getattr(self, key), accepted, ok)

        heads, groups = self.num_attention_heads, self.o_groups
        check("o_groups", f"a divisor of num_attention_heads ({heads})", heads % groups == 0)
        check("qk_rope_head_dim", f"at most head_dim ({self.head_dim})", self.qk_rope_head_dim <= self.head_dim)
        accepted = f"at least qk_rope_head_dim ({self.qk_rope_head_dim})"
        check("index_head_dim", accepted, self.index_head_dim >= self.qk_rope_head_dim)
        check("num_experts_per_tok", f"at most n_routed_experts ({self.n_routed_experts})",
              self.num_experts_per_tok <= self.n_routed_experts)  # fmt: skip
        check("n_shared_experts", "1 (the released layout has one shared expert)", self.n_shared_experts == 1)
        check("tie_word_embeddings", "false (the released head is its own matrix)", not self.tie_word_embeddings)

    def _check_schedule(self) -> None:
        def check(key, accepted, ok):
            _check(self.model_type, key, getattr(self, key), accepted, ok)

        depth, ratios = self.num_hidden_layers, self.compress_ratios
        stages = self.num_nextn_predict_layers
        check("compress_ratios", f"{depth} entries, or {depth} + {stages} with the draft stages",
              len(ratios) in (depth, depth + stages))  # fmt: skip
        check("compress_ratios", "0 for the draft stages, which are window-only", not any(ratios[depth:]))
        for key in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids"):
            ids = getattr(self, key)
            accepted = f"layers below {depth}, ascending, each once"
            check(key, accepted, ids == sorted(set(ids)) and max(ids, default=0) < depth)
        for key in ("kv_source_layer_ids", "index_source_layer_ids"):
            check(key, "layers whose compress_ratios entry is not 0", all(ratios[i] for i in getattr(self, key)))
        check("index_source_layer_ids", f"every layer of kv_source_layer_ids {self.kv_source_layer_ids}",
              set(self.kv_source_layer_ids) <= set(self.index_source_layer_ids))  # fmt: skip
        for layer in range(depth):
            source = self.kv_source(layer)
            check("kv_source_layer_ids", f"a source at or before layer {layer}, which compresses",
                  ratios[layer] == 0 or source is not None)  # fmt: skip
            check("compress_ratios", f"layer {layer} with the ratio of its source layer {source}",
                  source is None or ratios[layer] == ratios[source])  # fmt: skip
        candidate = self.candidate_source_layer_id
        accepted = f"-1, or one of kv_source_layer_ids {self.kv_source_layer_ids}"
        check("candidate_source_layer_id", accepted, candidate == -1 or candidate in self.kv_source_layer_ids)
        pool = self.candidate_topk_blocks * self.candidate_block_size
        check("candidate_topk_blocks", f"blocks that hold index_topk ({self.index_topk}) entries or more",
              candidate == -1 or self.index_topk is None or pool >= self.index_topk)  # fmt: skip
        if stages:
            targets = self.dspark_target_layer_ids
            check("dspark_target_layer_ids", f"layers below {depth}, at least one", targets and max(targets) < depth)
            check("dspark_num_experts_per_tok", f"at most dspark_n_routed_experts ({self.dspark_n_routed_experts})",
                  self.dspark_num_experts_per_tok <= self.dspark_n_routed_experts)  # fmt: skip
            check("dspark_noise_token_id", f"below vocab_size ({self.vocab_size})",
                  self.dspark_noise_token_id < self.vocab_size)  # fmt: skip

    def _check_engram(self) -> None:
        if not self.engram_layer_ids:
            return

        def check(key, accepted, ok):
            _check(self.model_type, key, getattr(self, key), accepted, ok)

        check("engram_num_embeddings", f"one entry for each of engram_layer_ids {self.engram_layer_ids}",
              len(self.engram_num_embeddings) == len(self.engram_layer_ids))  # fmt: skip
        check("engram_compressed_vocab_size", f"at most vocab_size ({self.vocab_size})",
              self.engram_compressed_vocab_size <= self.vocab_size)  # fmt: skip
        check("engram_pad_token_id", f"below vocab_size ({self.vocab_size})",
              self.engram_pad_token_id < self.vocab_size)  # fmt: skip


class Dsv41VisionConfig(_ReleasedConfig):
    """Vision part (DeepSeek-ViT) of a DeepSeek-V4.1 configuration, with the released values as defaults."""

    model_type = "deepseek_v41_vision"
    base_config_key = "vision_config"

    num_hidden_layers: int = 32
    hidden_size: int = 1024
    num_attention_heads: int = 16
    intermediate_size: int = 2816
    patch_size: int = 14
    rope_theta: float = 10000
    downsample_ratio: int = 3
    max_image_tokens: int = 1024
    min_pixels: int = 295936
    max_wh_ratio: float | None = None

    RULES = {
        "num_hidden_layers": COUNT,
        "hidden_size": POSITIVE,
        "num_attention_heads": POSITIVE,
        "intermediate_size": POSITIVE,
        "patch_size": POSITIVE,
        "rope_theta": _number_above(0),
        "downsample_ratio": POSITIVE,
        "max_image_tokens": _int_from(4),
        "min_pixels": POSITIVE,
        "max_wh_ratio": _optional(_number_above(0)),
    }

    def check(self) -> None:
        super().check()
        # Each head rotates two halves, one per image axis, in pairs.
        _check(self.model_type, "num_attention_heads", self.num_attention_heads,
               f"a count that divides hidden_size ({self.hidden_size}) into multiples of 4",
               self.hidden_size % (4 * self.num_attention_heads) == 0)  # fmt: skip


class Dsv41Config(_ReleasedConfig):
    r"""Configuration of a DeepSeek-V4.1 model: text part, vision part (or `None`), token ids and quantisation.

    Args:
        text_config (`Dsv41TextConfig` or `dict`, *optional*): defaults to the released text part.
        vision_config (`Dsv41VisionConfig` or `dict`, *optional*): `None` for a text-only model.
        image_token_id (`int`, defaults to 129264): id at every position of an image span.
        quantization_config (`dict`, *optional*): the released form (`quant_method: "fp8"`); kept in memory under this
            package's method name and written back in the released form.
    """

    model_type = "deepseek_v41"
    sub_configs_defaults = {
        "text_config": Dsv41TextConfig,
        "vision_config": SubConfigSpec(config_class=Dsv41VisionConfig, optional=True),
    }

    text_config: Dsv41TextConfig | dict | None = None
    vision_config: Dsv41VisionConfig | dict | None = None
    image_token_id: int | None = 129264
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool = False

    RULES = {
        "image_token_id": TOKEN_ID,
        "pad_token_id": TOKEN_ID,
        "bos_token_id": TOKEN_ID,
        "eos_token_id": TOKEN_IDS,
        "tie_word_embeddings": _one_of(False),
    }
    WRITTEN_IF_CHANGED = ("tie_word_embeddings",)

    def __post_init__(self, **kwargs):
        for key in ("text_config", "vision_config"):
            value = getattr(self, key)
            _check(self.model_type, key, value, "an object or null", value is None or OBJECT[0](value))
        self._check_quantization(kwargs.get("quantization_config"))
        for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
            if getattr(self, key) is None:
                text = self.text_config or {}
                setattr(self, key, text.get(key) if isinstance(text, dict) else getattr(text, key))
        super().__post_init__(**kwargs)
        quantization = getattr(self, "quantization_config", None)
        if isinstance(quantization, dict) and quantization.get("quant_method") == RELEASED_METHOD:
            self.quantization_config = {**quantization, "quant_method": PACKED_METHOD}
            if self.dtype is None:  # transformers would look for it in the files, whose E8M0 it does not know
                self.dtype = torch.bfloat16

    def _check_quantization(self, quantization: Any) -> None:
        """Check the released form; an object is another quantiser's, which checks itself."""
        ok = quantization is None or OBJECT[0](quantization)
        _check(self.model_type, "quantization_config", quantization, OBJECT[1], ok)
        if isinstance(quantization, dict):
            for key, (accepts, accepted) in QUANTIZATION_RULES.items():
                if key in quantization or key == "quant_method":
                    value = quantization.get(key)
                    _check(self.model_type, f"quantization_config.{key}", value, accepted, accepts(value))

    def to_dict(self) -> dict[str, Any]:
        output = super().to_dict()
        quantization = output.get("quantization_config")
        if quantization and quantization.get("quant_method") == PACKED_METHOD:
            output["quantization_config"] = {**quantization, "quant_method": RELEASED_METHOD}
        # Our class names carry a prefix of their own; the file keeps the released name, which serving engines look up.
        if output.get("architectures"):
            output["architectures"] = [
                re.sub(r"^Dsv41\w+$", RELEASED_ARCHITECTURE, n) for n in output["architectures"]
            ]
        return output
