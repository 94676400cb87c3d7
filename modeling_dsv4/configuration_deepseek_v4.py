"""Configuration of DeepSeek-V4 (Flash, Pro, -Base, -0731): the released config.json and what follows from it.

The mechanisms are those of V4.1; what differs is said here (contract spec_v4, "Numerics that differ").

Sources: the released config.json files (contract), V4 report section 2.
"""

from __future__ import annotations

import re
from typing import Any

from .configuration_common import COUNT, DSPARK_RULES, DecoderConfig, check_key, number_above, one_of, optional

RELEASED_ARCHITECTURE = "DeepseekV4ForCausalLM"
# Ratio of the overlapping, indexed compression (CSA); larger ratios are attended densely (HCA).
CSA_RATIO = 4
LAYER_TYPE_RATES = {
    "sliding_attention": 0,
    "compressed_sparse_attention": 4,
    "heavily_compressed_attention": 128,
}


class Dsv4Config(DecoderConfig):
    r"""Configuration of a DeepSeek-V4 model, with the released V4-Flash values as defaults.

    Args (beyond the released keys):
        mtp_loss_weight (`float`, defaults to 0.3): weight of the next-next-token loss in training (V4 report 2.1).
        gate_temp, cache_rounding, output_router_logits, balance_loss_weight, balance_loss_normalized,
        indexer_loss_weight: as in `Dsv41TextConfig`.
        layer_types, compress_rates: transformers' form of `compress_ratios`, read when that is absent.
        mlp_layer_types: transformers' form of `num_hash_layers`, which it replaces.
    """

    model_type = "deepseek_v4"

    single_pass_hc = False
    normalizes_query_heads = True
    has_position_bias = True
    pools_index_keys = True
    cache_formats = "v4"

    vocab_size: int = 129280
    hidden_size: int = 4096
    moe_intermediate_size: int = 2048
    num_hidden_layers: int = 43
    num_attention_heads: int = 64
    num_key_value_heads: int = 1
    head_dim: int = 512
    qk_rope_head_dim: int = 64
    q_lora_rank: int = 1024
    o_lora_rank: int = 1024
    o_groups: int = 8
    hidden_act: str = "silu"
    swiglu_limit: float = 10.0
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    attention_dropout: float = 0.0
    initializer_range: float = 0.02
    use_cache: bool = True
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 1048576
    rope_theta: float = 10000
    rope_scaling: dict | None = None
    n_routed_experts: int = 256
    n_shared_experts: int = 1
    num_experts_per_tok: int = 6
    num_hash_layers: int = 3
    scoring_func: str = "sqrtsoftplus"
    topk_method: str = "noaux_tc"
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.5
    sliding_window: int = 128
    compress_ratios: list[int] | None = None
    compress_rope_theta: float = 160000
    index_n_heads: int = 64
    index_head_dim: int = 128
    index_topk: int | None = 512
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    num_nextn_predict_layers: int = 1
    pad_token_id: int | None = None
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 1
    expert_dtype: str | None = None
    gate_temp: float = 1.0
    cache_rounding: bool = True
    output_router_logits: bool = False
    balance_loss_weight: float = 0.0
    indexer_loss_weight: float = 0.0
    balance_loss_normalized: bool = False
    mtp_loss_weight: float = 0.3

    WRITTEN_IF_CHANGED = (*DecoderConfig.WRITTEN_IF_CHANGED, "expert_dtype", "mtp_loss_weight")

    RULES = DecoderConfig.RULES | {
        "num_hash_layers": COUNT,
        "expert_dtype": optional(one_of("fp4", "fp8")),
        "mtp_loss_weight": number_above(0),
    }

    def __post_init__(self, **kwargs):
        # Released files spell the dtype key in the old way; it is written back as it was read.
        self._dtype_key = "torch_dtype" if "torch_dtype" in kwargs else "dtype"
        self._read_layer_types(kwargs)
        super().__post_init__(**kwargs)

    def _read_layer_types(self, keys: dict[str, Any]) -> None:
        """Fold transformers' form of the schedule into `compress_ratios` (unless given) and `num_hash_layers`."""
        rates, csa = LAYER_TYPE_RATES | (keys.get("compress_rates") or {}), "compressed_sparse_attention"
        ok = rates[csa] == CSA_RATIO and rates["heavily_compressed_attention"] != CSA_RATIO
        check_key(self.model_type, "compress_rates", rates, f"{csa}: {CSA_RATIO}, and another rate beside it", ok)
        kinds = keys.get("layer_types")
        if kinds is not None:
            unknown = sorted(set(kinds) - set(rates))
            check_key(self.model_type, "layer_types", kinds, f"entries of {sorted(rates)}", not unknown)
        if self.compress_ratios is None and kinds is not None:
            self.compress_ratios = [rates[kind] for kind in kinds]
        elif self.compress_ratios is None and self.num_hidden_layers == 43:
            self.compress_ratios = [0, 0] + [4, 128] * 20 + [4, 0]
        kinds = keys.get("mlp_layer_types")
        if kinds is not None:
            self.num_hash_layers = list(kinds).count("hash_moe")
            first = ["hash_moe"] * self.num_hash_layers + ["moe"] * (len(kinds) - self.num_hash_layers)
            check_key(self.model_type, "mlp_layer_types", kinds, "'hash_moe' layers, then 'moe'", list(kinds) == first)

    @property
    def layer_modes(self) -> list[str]:
        """Per backbone layer: "window", or "full" (every compressing layer makes its own entries)."""
        return ["full" if ratio else "window" for ratio in self.compress_ratios[: self.num_hidden_layers]]

    def selects(self, layer: int) -> bool:
        """Whether `layer` has an indexer: CSA does, HCA attends every visible entry."""
        return self.ratio(layer) == CSA_RATIO

    def overlaps(self, layer: int) -> bool:
        """Whether a group of `layer` also pools the group before it (CSA)."""
        return self.ratio(layer) == CSA_RATIO

    @property
    def index_source_layer_ids(self) -> list[int]:
        """Layers that select."""
        return [layer for layer in range(self.num_hidden_layers) if self.selects(layer)]

    @property
    def has_image_bias(self) -> bool:
        """Whether routers have a bias for image positions: the vision variant does."""
        return getattr(self, "vision_config", None) is not None

    @property
    def has_mtp(self) -> bool:
        """Whether the checkpoint's `mtp.0` is the next-next-token layer; builds with DSpark keep a drafter there."""
        return self.num_nextn_predict_layers > 0 and not hasattr(self, "dspark_block_size")

    @property
    def draft_stages(self) -> int:
        """Blocks of the DSpark drafter (-0731), 0 without one: the ratios beyond the backbone's."""
        has_dspark = self.num_nextn_predict_layers > 0 and hasattr(self, "dspark_block_size")
        return len(self.compress_ratios) - self.num_hidden_layers if has_dspark else 0

    @property
    def draft_rings(self) -> list[tuple[int, bool]]:
        """The MTP layer keeps its window, and the streams of the last token, whose next one is not known yet."""
        return [(self.sliding_window - 1, True), (1, False)] if self.has_mtp else super().draft_rings

    def check(self) -> None:
        depth, ratios = self.num_hidden_layers, self.compress_ratios
        ok = isinstance(ratios, (list, tuple)) and len(ratios) >= depth and not any(ratios[depth:])
        self._require("compress_ratios", f"{depth} entries or more (further ones, of draft stages, are 0)", ok)
        super().check()
        self._require("num_hash_layers", f"at most {depth}", self.num_hash_layers <= depth)
        if self.draft_stages:
            for key, (accepts, accepted) in DSPARK_RULES.items():
                self._require(key, f"a value as in builds with DSpark, {accepted}", accepts(getattr(self, key, None)))
            self._check_drafter()
        size, most = self.index_head_dim, max(1, self.draft_stages)
        self._require("index_head_dim", "a power of two (Hadamard rotation)", size & (size - 1) == 0)
        accepted = f"{'0 or' if most == 1 else '0 to'} {most}"
        self._require("num_nextn_predict_layers", accepted, self.num_nextn_predict_layers <= most)

    def to_dict(self) -> dict[str, Any]:
        output = super().to_dict()
        dtype_key = output.pop("_dtype_key", "dtype")
        if dtype_key != "dtype" and output.get("dtype") is not None:
            output[dtype_key] = output.pop("dtype")
        if output.get("architectures"):
            output["architectures"] = [re.sub(r"^Dsv4\w+$", RELEASED_ARCHITECTURE, n) for n in output["architectures"]]
        return output
