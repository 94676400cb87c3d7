"""Configuration of DeepSeek-V4.1: the released config.json and its layer schedule.

Sources: the released config.json (contract, revision dba1be0a40aa), V4.1 report sections 2.1 to 2.4.
"""

from __future__ import annotations

import re
from typing import Any

from transformers.configuration_utils import SubConfigSpec

from .configuration_common import (
    COUNT,
    DIGEST,
    DSPARK_RULES,
    OBJECT,
    POSITIVE,
    TOKEN_ID,
    TOKEN_IDS,
    DecoderConfig,
    ReleasedConfig,
    check_key,
    int_from,
    list_of,
    number_above,
    one_of,
    optional,
)

RELEASED_ARCHITECTURE = "DeepseekV41ForCausalLM"


class Dsv41TextConfig(DecoderConfig):
    r"""Language-model part of a DeepSeek-V4.1 configuration, with the released V4.1-Flash values as defaults.

    The released keys keep the names and meanings of the released file (contract section 1).

    Args (beyond those):
        engram_token_map_sha256 (`str`, *optional*): SHA-256 of the token map that the weights were trained with; another
            tokenizer is refused. Written by `save_pretrained`.
        gate_temp (`float`, defaults to 1.0): divisor of the router logits (contract section 7).
        cache_rounding (`bool`, defaults to `True`): round window, compressed and index values as the release does
            (contract section 2). `False` keeps them in the model's dtype: comparisons, and warm-up of QAT.
        output_router_logits (`bool`, defaults to `False`): return router logits from every forward.
        balance_loss_weight (`float`, defaults to 0.0): weight of the sequence-wise balance loss in training; the V4 report
            (section 2.1) trains with 1e-4.
        indexer_loss_weight (`float`, defaults to 0.0): weight of the divergence of the indexers from the attention of their
            layers in training, from which alone indexers learn.
        balance_loss_normalized (`bool`, defaults to `False`): count loads as DeepSeek-V3 does, see `sequence_balance`.
        rope_scaling / rope_parameters: YaRN settings flat (`rope_theta` beside `rope_scaling`), or in transformers'
            form: `rope_parameters` flat, or nested as `{"main": {...}, "compress": {...}}`. Written in the flat form.
    """

    model_type = "deepseek_v41_text"
    base_config_key = "text_config"

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
    engram_token_map_sha256: str | None = None
    gate_temp: float = 1.0
    cache_rounding: bool = True
    output_router_logits: bool = False
    balance_loss_weight: float = 0.0
    indexer_loss_weight: float = 0.0
    balance_loss_normalized: bool = False

    WRITTEN_IF_CHANGED = (
        *DecoderConfig.WRITTEN_IF_CHANGED, "bos_token_id", "eos_token_id", "engram_token_map_sha256",
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
    RULES = {
        **DecoderConfig.RULES,
        **DSPARK_RULES,
        "kv_source_layer_ids": list_of(0),
        "index_source_layer_ids": list_of(0),
        "candidate_source_layer_id": int_from(-1),
        "candidate_topk_blocks": POSITIVE,
        "candidate_block_size": POSITIVE,
        "engram_layer_ids": list_of(0),
        "engram_num_embeddings": list_of(1),
        "engram_max_ngram_size": int_from(2),
        "engram_vocab_size": int_from(2),
        "engram_n_heads": POSITIVE,
        "engram_head_dim": POSITIVE,
        "engram_pad_token_id": COUNT,
        "engram_compressed_vocab_size": POSITIVE,
        "engram_token_map_sha256": optional(DIGEST),
        "dspark_n_routed_experts": POSITIVE,
        "dspark_num_experts_per_tok": POSITIVE,
    }

    def __post_init__(self, **kwargs):
        for key, value in self.RELEASED_SCHEDULE.items():
            given = getattr(self, key)
            if given is None or isinstance(given, tuple):
                setattr(self, key, list(value if given is None else given))
        super().__post_init__(**kwargs)

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
        if self.ratio(layer) == 0:
            return None
        before = [source for source in sources if source <= layer]
        return max(before) if before else None

    def uses_candidates(self, layer: int) -> bool:
        """Whether `layer` selects inside the candidate pool (V4.1 report section 2.3.2)."""
        source = self.candidate_source_layer_id
        return 0 <= source < layer and self.mode(layer) == "reindex" and self.kv_source(layer) == source

    def makes_candidates(self, layer: int) -> bool:
        """Whether `layer` makes the candidate pool."""
        return layer == self.candidate_source_layer_id

    def experts_of(self, layer: int) -> tuple[int, int]:
        """Routed experts of `layer`, and how many of them serve a token; draft stages have fewer (contract section 12)."""
        if layer < self.num_hidden_layers:
            return super().experts_of(layer)
        return self.dspark_n_routed_experts, self.dspark_num_experts_per_tok

    @property
    def draft_stages(self) -> int:
        """Blocks of the DSpark drafter, 0 without one."""
        return self.num_nextn_predict_layers

    @property
    def replay_cut(self) -> int | None:
        """First decoder layer, the last that makes global entries (report section 2.2), or `None` without one."""
        return max(self.kv_source_layer_ids, default=None)

    @property
    def needs_token_map(self) -> bool:
        """Whether the n-gram hash needs a tokenizer's map (an Engram whose compressed vocabulary is smaller)."""
        return bool(self.engram_layer_ids) and self.engram_compressed_vocab_size != self.vocab_size

    def check(self) -> None:
        super().check()
        self._check_schedule()
        if self.draft_stages:
            self._check_drafter()
        if self.engram_layer_ids:
            self._check_engram()

    def _check_schedule(self) -> None:
        check, depth, ratios = self._require, self.num_hidden_layers, self.compress_ratios
        stages = self.num_nextn_predict_layers
        check("compress_ratios", f"{depth} entries, or {depth} + {stages} with the draft stages",
              len(ratios) in (depth, depth + stages))  # fmt: skip
        check("compress_ratios", "0 for the draft stages, which are window-only", not any(ratios[depth:]))
        for key in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids"):
            ids = getattr(self, key)
            check(
                key,
                f"layers below {depth}, ascending, each once",
                ids == sorted(set(ids)) and max(ids, default=0) < depth,
            )
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

    def _check_drafter(self) -> None:
        super()._check_drafter()
        accepted = f"at most dspark_n_routed_experts ({self.dspark_n_routed_experts})"
        ok = self.dspark_num_experts_per_tok <= self.dspark_n_routed_experts
        self._require("dspark_num_experts_per_tok", accepted, ok)

    def _check_engram(self) -> None:
        check = self._require
        check("engram_num_embeddings", f"one entry for each of engram_layer_ids {self.engram_layer_ids}",
              len(self.engram_num_embeddings) == len(self.engram_layer_ids))  # fmt: skip
        check("engram_compressed_vocab_size", f"at most vocab_size ({self.vocab_size})",
              self.engram_compressed_vocab_size <= self.vocab_size)  # fmt: skip
        check("engram_pad_token_id", f"below vocab_size ({self.vocab_size})",
              self.engram_pad_token_id < self.vocab_size)  # fmt: skip


class Dsv41VisionConfig(ReleasedConfig):
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
        "rope_theta": number_above(0),
        "downsample_ratio": POSITIVE,
        "max_image_tokens": int_from(4),
        "min_pixels": POSITIVE,
        "max_wh_ratio": optional(number_above(0)),
    }

    def check(self) -> None:
        super().check()
        # Each head rotates two halves, one per image axis, in pairs.
        accepted = f"a count that divides hidden_size ({self.hidden_size}) into multiples of 4"
        self._require("num_attention_heads", accepted, self.hidden_size % (4 * self.num_attention_heads) == 0)


class Dsv41Config(ReleasedConfig):
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
        "tie_word_embeddings": one_of(False),
    }
    WRITTEN_IF_CHANGED = ("tie_word_embeddings",)

    def __post_init__(self, **kwargs):
        for key in ("text_config", "vision_config"):
            value = getattr(self, key)
            check_key(self.model_type, key, value, "an object or null", value is None or OBJECT[0](value))
        for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
            if getattr(self, key) is None:
                text = self.text_config or {}
                setattr(self, key, text.get(key) if isinstance(text, dict) else getattr(text, key))
        super().__post_init__(**kwargs)

    def to_dict(self) -> dict[str, Any]:
        output = super().to_dict()
        # Our class names carry a prefix of their own; the file keeps the released name, which serving engines look up.
        if output.get("architectures"):
            output["architectures"] = [
                re.sub(r"^Dsv41\w+$", RELEASED_ARCHITECTURE, n) for n in output["architectures"]
            ]
        return output
