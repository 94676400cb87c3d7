"""Every tensor of a V4.1 or V4 checkpoint in the released layout, derived from a configuration.

One description: name, shape and stored dtype follow from the config alone. Names are written in the models' vocabulary
and go through the name table, so that no second list of released names exists.

Source: contract section 1, proven against the inventories of the released checkpoints (96,085 tensors of V4.1-Flash,
69,187 of V4-Flash, 145,116 of V4-Pro).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

import torch

from modeling_dsv4.configuration_deepseek_v4 import Dsv4Config
from modeling_dsv4.configuration_deepseek_v41 import Dsv41Config
from modeling_dsv4.quantization import SCALE_DTYPES
from modeling_dsv4.weight_names import WeightNames

Row = tuple[str, tuple[int, ...], torch.dtype]

RELEASED_NAMES = WeightNames(language_prefix="", vision_prefix="")
RELEASED_QUANTIZATION = {
    "deepseek_v41": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [32, 32],
        "scale_fmt": "ue8m0",
        "expert_dtype": "fp4",
    },
    "deepseek_v4": {  # names the format of experts beside it
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
}
# Columns that share a scale in a row-wise format: packed FP4 experts and Engram tables.
ROW_BLOCK = 32


@dataclass(frozen=True)
class Formats:
    """How quantised matrices are stored: rows and columns of an FP8 tile, dtype of scales, and FP4 or FP8 experts."""

    tile: tuple[int, int] = (32, 32)
    scale: torch.dtype = torch.float8_e8m0fnu
    experts: str = "fp4"

    @classmethod
    def of(cls, config: Dsv41Config | Dsv4Config) -> Formats:
        """Return the formats of a configuration, those of the release where it has no quantization."""
        quantization = getattr(config, "quantization_config", None)
        if quantization is None:
            return cls(tuple(RELEASED_QUANTIZATION[config.model_type]["weight_block_size"]))
        # V4.1 names the format of experts inside the quantization, V4 at the top.
        experts = quantization.get("expert_dtype") or getattr(config, "expert_dtype", None) or "fp8"
        scale = SCALE_DTYPES[quantization.get("scale_fmt") or "float"]
        return cls(tuple(quantization.get("weight_block_size", (32, 32))), scale, experts)


def released_tensors(
    config: Dsv41Config | Dsv4Config, formats: Formats | None = None
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    r"""Return shape and dtype of every tensor that a released folder with this configuration holds.

    Args:
        config (`Dsv41Config` or `Dsv4Config`): without a vision part there are no vision tensors, without draft stages or
            an MTP layer no `mtp.*`.
        formats (`Formats`, *optional*): defaults to those of the configuration.

    Returns:
        `{released name: (shape, dtype)}` in the order of the released shards: vision, embedding, layers, head, draft
        stages, Engram. Shapes are as stored (two FP4 values a byte); E8M0 scales are `float8_e8m0fnu`.
    """
    return {
        RELEASED_NAMES.to_released(name): (shape, dtype)
        for name, shape, dtype in _rows(config, formats or Formats.of(config))
    }


def payload_bytes(tensors: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> int:
    """Return the bytes of tensors given as `{name: (shape, dtype)}`, headers not counted."""
    return sum(prod(shape) * dtype.itemsize for shape, dtype in tensors.values())


def is_scale(name: str) -> bool:
    """Whether a released name is that of the scales of a weight."""
    return name.endswith(".scale")


def weight_of(name: str) -> str:
    """Return the released name of the weight that a scale belongs to; of other tensors their own."""
    return name.removesuffix(".scale") + ".weight" if is_scale(name) else name


def scale_of(weight: str) -> str:
    """Return the released name of the scales of a weight."""
    return weight.removesuffix(".weight") + ".scale"


def shard_part(name: str) -> str:
    """Return the part of the model that shares a shard with this released name (contract section 1).

    Parts are the vision side, the embedding, every layer, head and norm, every draft stage, every layer's Engram.
    """
    words = name.split(".")
    if words[0] in ("layers", "mtp"):
        return ".".join(words[:3] if words[2] == "engram" else words[:2])
    if words[0] in ("norm", "head") or words[0].startswith("hc_head_"):
        return "head"
    return "embed" if words[0] == "embed" else "vision"


def _rows(config: Dsv41Config | Dsv4Config, formats: Formats) -> Iterator[Row]:
    text = config.get_text_config()
    if getattr(config, "vision_config", None) is not None:
        yield from _vision(config.vision_config, text.hidden_size)
    yield from _plain("embed_tokens", text.vocab_size, text.hidden_size)
    for layer in range(text.num_hidden_layers):
        prefix = f"layers.{layer}."
        yield from _block(prefix, text, text.n_routed_experts, formats, layer)
        yield from _sources(prefix, text, layer, formats)
    yield from _plain("norm", text.hidden_size)
    yield from _plain("lm_head", text.vocab_size, text.hidden_size)
    if not text.single_pass_hc:
        yield from _collapse("", text)
        if text.has_mtp:
            yield from _mtp_layer("mtp.0.", text, formats)
    for stage in range(text.draft_stages):
        yield from _draft_stage(f"mtp.{stage}.", text, stage, formats)
    if text.engram_layer_ids:
        for layer, rows in zip(text.engram_layer_ids, text.engram_num_embeddings, strict=True):
            yield from _engram(f"layers.{layer}.engram.", text, rows, formats)


def _ceil(size: int, block: int) -> int:
    return -(-size // block)


def _plain(name: str, *shape: int, bias: bool = False) -> Iterator[Row]:
    yield f"{name}.weight", shape, torch.bfloat16
    if bias:
        yield f"{name}.bias", shape[:1], torch.bfloat16


def _fp8_tiles(name: str, out_features: int, in_features: int, formats: Formats) -> Iterator[Row]:
    rows, columns = formats.tile
    yield f"{name}.weight", (out_features, in_features), torch.float8_e4m3fn
    yield f"{name}.weight_scale_inv", (_ceil(out_features, rows), _ceil(in_features, columns)), formats.scale


def _expert(name: str, out_features: int, in_features: int, formats: Formats) -> Iterator[Row]:
    if formats.experts == "fp8":
        yield from _fp8_tiles(name, out_features, in_features, formats)
        return
    yield f"{name}.weight", (out_features, in_features // 2), torch.int8
    yield f"{name}.weight_scale_inv", (out_features, _ceil(in_features, ROW_BLOCK)), formats.scale


def _block(prefix: str, text, experts: int, formats: Formats, layer: int) -> Iterator[Row]:
    """What backbone layers and the stages behind them share."""
    hidden, inner, heads, width = text.hidden_size, text.moe_intermediate_size, text.num_attention_heads, text.head_dim
    yield from _plain(prefix + "input_layernorm", hidden)
    yield from _plain(prefix + "post_attention_layernorm", hidden)
    attention = prefix + "self_attn."
    yield from _fp8_tiles(attention + "q_a_proj", text.q_lora_rank, hidden, formats)
    yield from _plain(attention + "q_a_norm", text.q_lora_rank)
    yield from _fp8_tiles(attention + "q_b_proj", heads * width, text.q_lora_rank, formats)
    yield from _fp8_tiles(attention + "kv_proj", width, hidden, formats)
    yield from _plain(attention + "kv_norm", width)
    yield attention + "sinks", (heads,), torch.float32
    yield from _fp8_tiles(
        attention + "o_a_proj", text.o_groups * text.o_lora_rank, heads * width // text.o_groups, formats
    )
    yield from _fp8_tiles(attention + "o_b_proj", hidden, text.o_groups * text.o_lora_rank, formats)
    yield from _plain(prefix + "mlp.gate", experts, hidden)
    if layer < text.num_hash_layers:
        yield prefix + "mlp.gate.tid2eid", (text.vocab_size, text.num_experts_per_tok), torch.int64
    else:
        yield prefix + "mlp.gate.e_score_correction_bias", (experts,), torch.float32
        if text.has_image_bias:
            yield prefix + "mlp.gate.e_score_correction_bias_vl", (experts,), torch.float32
    sizes = {"gate_proj": (inner, hidden), "down_proj": (hidden, inner), "up_proj": (inner, hidden)}
    for part, (out_features, in_features) in sizes.items():
        yield from _fp8_tiles(f"{prefix}mlp.shared_experts.{part}", out_features, in_features, formats)
    for expert in range(experts):
        for part, (out_features, in_features) in sizes.items():
            yield from _expert(f"{prefix}mlp.experts.{expert}.{part}", out_features, in_features, formats)
    streams = text.hc_mult
    for site in ("attn_hc", "ffn_hc"):
        yield f"{prefix}{site}.fn", (streams * (streams + 2), streams * hidden), torch.float32
        yield f"{prefix}{site}.base", (streams * (streams + 2),), torch.float32
        yield f"{prefix}{site}.scale", (3,), torch.float32


def _sources(prefix: str, text, layer: int, formats: Formats) -> Iterator[Row]:
    """The compressor of a layer that pools and the indexer of a layer that selects."""
    hidden, width, attention = text.hidden_size, text.head_dim, prefix + "self_attn."
    makes_entries = text.mode(layer) == "full"
    if makes_entries:
        yield from _compressor(attention + "compressor.", text, layer, width)
    if text.selects(layer):
        index = text.index_n_heads * text.index_head_dim
        yield from _fp8_tiles(attention + "indexer.q_b_proj", index, text.q_lora_rank, formats)
        yield from _plain(attention + "indexer.weights_proj", text.index_n_heads, hidden)
        if text.pools_index_keys:
            yield from _compressor(attention + "indexer.compressor.", text, layer, text.index_head_dim)
        elif makes_entries:
            yield from _plain(attention + "indexer.k_proj", text.index_head_dim, width)
            yield from _plain(attention + "indexer.k_norm", text.index_head_dim)


def _compressor(prefix: str, text, layer: int, width: int) -> Iterator[Row]:
    ratio, channels = text.ratio(layer), width * (2 if text.overlaps(layer) else 1)
    yield from _plain(prefix + "kv_proj", channels, text.hidden_size)
    if ratio > 1:  # groups of one token need no weighting
        yield from _plain(prefix + "gate_proj", channels, text.hidden_size)
    if text.has_position_bias:
        yield prefix + "position_bias", (ratio, channels), torch.float32
    yield from _plain(prefix + "kv_norm", width)


def _collapse(prefix: str, text) -> Iterator[Row]:
    """V4's learned collapse of the streams."""
    yield prefix + "hc_head.fn", (text.hc_mult, text.hc_mult * text.hidden_size), torch.float32
    yield prefix + "hc_head.base", (text.hc_mult,), torch.float32
    yield prefix + "hc_head.scale", (1,), torch.float32


def _mtp_layer(prefix: str, text, formats: Formats) -> Iterator[Row]:
    """V4's layer for the token after the next one."""
    hidden = text.hidden_size
    yield from _block(prefix, text, text.n_routed_experts, formats, text.num_hidden_layers)
    for name in ("e_proj", "h_proj"):
        yield from _fp8_tiles(prefix + name, hidden, hidden, formats)
    for name in ("enorm", "hnorm", "norm"):
        yield from _plain(prefix + name, hidden)
    yield from _collapse(prefix, text)


def _draft_stage(prefix: str, text, stage: int, formats: Formats) -> Iterator[Row]:
    """A DSpark block; the first stage reads the backbone, the last one has the heads."""
    hidden, rank = text.hidden_size, text.dspark_markov_rank
    layer = text.num_hidden_layers + stage
    yield from _block(prefix, text, text.experts_of(layer)[0], formats, layer)
    if stage == 0:
        yield from _fp8_tiles(prefix + "main_proj", hidden, hidden * len(text.dspark_target_layer_ids), formats)
        yield from _plain(prefix + "main_norm", hidden)
    if stage == text.draft_stages - 1:
        if not text.single_pass_hc:
            yield from _collapse(prefix, text)
        yield from _plain(prefix + "norm", hidden)
        yield from _plain(prefix + "markov_head.embed", text.vocab_size, rank)
        yield from _plain(prefix + "markov_head.head", text.vocab_size, rank)
        yield from _plain(prefix + "confidence_head.proj", 1, hidden + rank)


def _engram(prefix: str, text, rows: int, formats: Formats) -> Iterator[Row]:
    hidden, streams = text.hidden_size, text.hc_mult
    looked_up = (text.engram_max_ngram_size - 1) * text.engram_n_heads * text.engram_head_dim
    by_rows = replace(formats, tile=(1, ROW_BLOCK))
    yield from _fp8_tiles(prefix + "embedding", rows, text.engram_head_dim, by_rows)
    yield from _fp8_tiles(prefix + "kv_proj", hidden * (streams + 1), looked_up, formats)
    yield prefix + "q_weight", (streams, hidden), torch.bfloat16
    yield prefix + "k_weight", (streams, hidden), torch.bfloat16


def _vision(vision, text_width: int) -> Iterator[Row]:
    width, inner = vision.hidden_size, vision.intermediate_size
    yield from _plain("vision_tower.patch_embed", width, 3 * vision.patch_size**2, bias=True)
    for layer in range(vision.num_hidden_layers):
        prefix = f"vision_tower.layers.{layer}."
        yield from _plain(prefix + "norm1", width)
        yield from _plain(prefix + "attn.qkv", 3 * width, width, bias=True)
        yield from _plain(prefix + "attn.proj", width, width, bias=True)
        yield from _plain(prefix + "norm2", width)
        yield from _plain(prefix + "mlp.gate_up_proj", 2 * inner, width)
        yield from _plain(prefix + "mlp.down_proj", width, inner)
    yield from _plain("vision_tower.norm", width)
    yield from _plain("multi_modal_projector.linear_1", text_width, width * vision.downsample_ratio**2, bias=True)
    yield from _plain("multi_modal_projector.linear_2", text_width, text_width, bias=True)
    for name in ("image_start", "image_end", "image_newline"):
        yield name, (text_width,), torch.bfloat16
