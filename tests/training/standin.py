"""Module trees with the parameter names of the two model families, tiny or at the released shapes (meta device)."""

import itertools
import json
import re
from pathlib import Path
from types import SimpleNamespace

import torch

from modeling_dsv4.training import Dsv4Optimizer, build_param_groups

DATA = Path(__file__).with_name("data")
BUFFERS = ("e_score_correction_bias", "e_score_correction_bias_vl", "tid2eid")

# Released name -> ours, both families (text classes keep `model.`; the image-text class is built by `PREFIX`).
_RENAMES = [
    (r"^embed\.weight$", "embed_tokens.weight"),
    (r"^head\.weight$", "lm_head.weight"),
    (r"^hc_head_(fn|base|scale)$", r"hc_head.\1"),
    (r"\.hc_head_(fn|base|scale)$", r".hc_head.\1"),
    (r"\.hc_(attn|ffn)_(fn|base|scale)$", r".\1_hc.\2"),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"^((?:layers|mtp)\.\d+)\.attn\.", r"\1.self_attn."),
    (r"\.attn_sink$", ".sinks"),
    (r"\.wq_a\.", ".q_a_proj."),
    (r"\.wq_b\.", ".q_b_proj."),
    (r"\.engram\.wkv\.", ".engram.kv_proj."),
    (r"\.wkv\.", ".kv_proj."),
    (r"\.wgate\.", ".gate_proj."),
    (r"\.wo_a\.", ".o_a_proj."),
    (r"\.wo_b\.", ".o_b_proj."),
    (r"\.indexer\.wk\.", ".indexer.k_proj."),
    (r"\.q_norm\.", ".q_a_norm."),
    (r"\.compressor\.norm\.", ".compressor.kv_norm."),
    (r"\.ape$", ".position_bias"),
    (r"\.ffn\.", ".mlp."),
    (r"\.gate\.bias_vl$", ".gate.e_score_correction_bias_vl"),
    (r"\.gate\.bias$", ".gate.e_score_correction_bias"),
    (r"\.shared_experts\.w1\.", ".shared_experts.gate_proj."),
    (r"\.shared_experts\.w3\.", ".shared_experts.up_proj."),
    (r"\.shared_experts\.w2\.", ".shared_experts.down_proj."),
    (r"\.engram\.embed\.", ".engram.embedding."),
    (r"^mtp\.\d+\.(main_proj|main_norm|markov_head|confidence_head|norm)\.", r"mtp.\1."),
    (r"^vision\.patch_embed\.proj\.", "vision_tower.patch_embed."),
    (r"^vision\.blocks\.(\d+)\.attn\.wqkv\.", r"vision_tower.layers.\1.attn.qkv."),
    (r"^vision\.blocks\.(\d+)\.attn\.wo\.", r"vision_tower.layers.\1.attn.proj."),
    (r"^vision\.blocks\.(\d+)\.mlp\.w1\.", r"vision_tower.layers.\1.mlp.gate_up_proj."),
    (r"^vision\.blocks\.(\d+)\.mlp\.w2\.", r"vision_tower.layers.\1.mlp.down_proj."),
    (r"^vision\.blocks\.", "vision_tower.layers."),
    (r"^vision\.norm\.", "vision_tower.norm."),
    (r"^aligner\.w(\d)\.", r"multi_modal_projector.linear_\1."),
]


def our_name(released: str) -> str:
    for pattern, replacement in _RENAMES:
        released = re.sub(pattern, replacement, released)
    if released.startswith("lm_head"):
        return released
    if re.match(r"(layers|embed_tokens|norm|hc_head|mtp)\b", released):
        return f"model.language_model.{released}"
    return f"model.{released}"


def _span(text: str) -> list[int]:
    if ".." in text:
        first, last = text.split("..")
        return list(range(int(first), int(last) + 1))
    return [int(x) for x in text.split(",")]


def released(family: str) -> tuple[dict, dict[str, tuple[tuple[int, ...], torch.dtype]], int]:
    """Return (config, {our name: (shape, dtype)}, parameter count by the inventory) of a Flash model."""
    data = json.loads((DATA / f"released_{family}_flash.json").read_text(encoding="utf-8"))
    tensors = {}
    for pattern, dtype, shape, ranges in data["tensors"]:
        dtype = getattr(torch, dtype)
        experts = _span(ranges["e"]) if "e" in ranges else None
        keys = [key for key in ranges if key != "e"]
        for values in itertools.product(*(_span(ranges[key]) for key in keys)):
            name = pattern
            for key, value in zip(keys, values, strict=True):
                name = name.replace("{" + key + "}", str(value))
            if experts is None:
                tensors[our_name(name)] = (tuple(shape), dtype)
                continue
            # One fused bank: w1 above w3, and w2.
            prefix, leaf = name.split(".experts.{e}.")
            bank = our_name(prefix + ".experts.x").removesuffix("x")
            if leaf == "w1.weight":
                tensors[bank + "gate_up_proj"] = ((len(experts), 2 * shape[0], shape[1]), dtype)
            elif leaf == "w2.weight":
                tensors[bank + "down_proj"] = ((len(experts), *shape), dtype)
    return data["config"], tensors, data["parameters"]


def namespace(config: dict) -> SimpleNamespace:
    return SimpleNamespace(**{k: namespace(v) if isinstance(v, dict) else v for k, v in config.items()})


def build_tree(tensors: dict, config: dict, *, device="cpu", seed=0) -> torch.nn.Module:
    """Make bare modules whose `named_parameters()` are the given names; correction biases and tables are buffers."""
    generator = torch.Generator().manual_seed(seed)
    root = torch.nn.Module()
    for name, (shape, dtype) in tensors.items():
        module = root
        *path, leaf = name.split(".")
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, torch.nn.Module())
            module = getattr(module, part)
        if device == "meta" or not dtype.is_floating_point:
            value = torch.zeros(shape, dtype=dtype, device=device)
        else:
            value = (torch.randn(shape, generator=generator) * 0.05).to(dtype)
        if leaf in BUFFERS:
            module.register_buffer(leaf, value)
        else:
            module.register_parameter(leaf, torch.nn.Parameter(value))
    root.config = namespace(config)
    return root


def tiny_v41(**changes) -> tuple[dict, dict]:
    """Return (config, tensors) of a V4.1 model with one layer of each kind and at most a few thousand weights a tensor."""
    text = {
        "model_type": "deepseek_v41_text",
        "vocab_size": 40,
        "hidden_size": 16,
        "num_attention_heads": 4,
        "head_dim": 8,
        "q_lora_rank": 12,
        "o_groups": 2,
        "o_lora_rank": 6,
        "moe_intermediate_size": 10,
        "n_routed_experts": 6,
        "index_n_heads": 4,
        "index_head_dim": 4,
        "index_source_layer_ids": [1],
        "engram_layer_ids": [1],
        "hc_mult": 2,
        **changes,
    }
    vision = {"num_attention_heads": 2, "hidden_size": 8, "intermediate_size": 12, "patch_size": 2}
    config = {"model_type": "deepseek_v41", "text_config": text, "vision_config": vision}
    f32, h, d = torch.float32, text["hidden_size"], text["head_dim"]
    tensors = {"embed_tokens.weight": (40, h), "norm.weight": (h,)}
    for i in range(2):
        tensors |= {f"layers.{i}.{name}": shape for name, shape in _layer(text).items()}
    tensors |= {
        "layers.1.self_attn.compressor.kv_proj.weight": (d, h),
        "layers.1.self_attn.compressor.gate_proj.weight": (d, h),
        "layers.1.self_attn.compressor.kv_norm.weight": (d,),
        "layers.1.self_attn.indexer.q_b_proj.weight": (16, 12),
        "layers.1.self_attn.indexer.weights_proj.weight": (4, h),
        "layers.1.self_attn.indexer.k_proj.weight": (4, d),
        "layers.1.self_attn.indexer.k_norm.weight": (4,),
        "layers.1.engram.embedding.weight": (60, 6),
        "layers.1.engram.kv_proj.weight": (3 * h, 12),
        "layers.1.engram.q_weight": (2, h),
        "layers.1.engram.k_weight": (2, h),
    }
    tensors = {f"model.language_model.{name}": shape for name, shape in tensors.items()}
    tensors |= {
        "lm_head.weight": (40, h),
        "model.vision_tower.patch_embed.weight": (8, 12),
        "model.vision_tower.patch_embed.bias": (8,),
        "model.vision_tower.layers.0.norm1.weight": (8,),
        "model.vision_tower.layers.0.attn.qkv.weight": (24, 8),
        "model.vision_tower.layers.0.attn.qkv.bias": (24,),
        "model.vision_tower.layers.0.attn.proj.weight": (8, 8),
        "model.vision_tower.layers.0.attn.proj.bias": (8,),
        "model.vision_tower.layers.0.norm2.weight": (8,),
        "model.vision_tower.layers.0.mlp.gate_up_proj.weight": (24, 8),
        "model.vision_tower.layers.0.mlp.down_proj.weight": (8, 12),
        "model.vision_tower.norm.weight": (8,),
        "model.multi_modal_projector.linear_1.weight": (h, 72),
        "model.multi_modal_projector.linear_1.bias": (h,),
        "model.multi_modal_projector.linear_2.weight": (h, h),
        "model.multi_modal_projector.linear_2.bias": (h,),
        "model.image_start": (h,),
        "model.image_end": (h,),
        "model.image_newline": (h,),
    }
    return config, {name: (shape, f32) for name, shape in tensors.items()}


def _layer(text: dict) -> dict[str, tuple[int, ...]]:
    h, heads, d = text["hidden_size"], text["num_attention_heads"], text["head_dim"]
    experts, inner = text["n_routed_experts"], text["moe_intermediate_size"]
    mix = text["hc_mult"] * (2 + text["hc_mult"])
    layer = {
        "input_layernorm.weight": (h,),
        "post_attention_layernorm.weight": (h,),
        "self_attn.q_a_proj.weight": (12, h),
        "self_attn.q_a_norm.weight": (12,),
        "self_attn.q_b_proj.weight": (heads * d, 12),
        "self_attn.kv_proj.weight": (d, h),
        "self_attn.kv_norm.weight": (d,),
        "self_attn.o_a_proj.weight": (12, heads * d // 2),
        "self_attn.o_b_proj.weight": (h, 12),
        "self_attn.sinks": (heads,),
        "mlp.gate.weight": (experts, h),
        "mlp.gate.e_score_correction_bias": (experts,),
        "mlp.gate.e_score_correction_bias_vl": (experts,),
        "mlp.experts.gate_up_proj": (experts, 2 * inner, h),
        "mlp.experts.down_proj": (experts, h, inner),
        "mlp.shared_experts.gate_proj.weight": (inner, h),
        "mlp.shared_experts.up_proj.weight": (inner, h),
        "mlp.shared_experts.down_proj.weight": (h, inner),
    }
    for site in ("attn_hc", "ffn_hc"):
        layer |= {f"{site}.fn": (mix, h * text["hc_mult"]), f"{site}.base": (mix,), f"{site}.scale": (3,)}
    return layer


def set_gradients(model: torch.nn.Module, step: int, *, skip=()) -> None:
    """Give every parameter a gradient that depends on its name and the step only."""
    for name, parameter in model.named_parameters():
        if any(part in name for part in skip):
            parameter.grad = None
            continue
        generator = torch.Generator().manual_seed(step * 7919 + sum(name.encode()) * 31 + len(name))
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter)


def tiny_optimizer(dtype=torch.float32, device="cpu", **options) -> tuple[torch.nn.Module, Dsv4Optimizer]:
    """Return a tiny V4.1 stand-in and its routed optimizer."""
    config, tensors = tiny_v41()
    model = build_tree({name: (shape, dtype) for name, (shape, _) in tensors.items()}, config).to(device)
    return model, Dsv4Optimizer(build_param_groups(model, report=False), lr=1e-3, **options)


def snapshot(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}
