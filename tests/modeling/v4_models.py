"""Tiny V4 models: the golden checkpoint, a variant of it with an MTP layer, and what a model computes on the way."""

from functools import cache

import torch

from modeling_dsv4 import Dsv4Config, Dsv4ForCausalLM, Dsv4QuantizationConfig
from modeling_dsv4.fp_codecs import quantize_fp8_tiles
from tests.golden_cases import CHECKPOINT_V4
from tests.released_folders import Folder

SHARD = "model-00001-of-00001.safetensors"


def load(folder=CHECKPOINT_V4, dtype=torch.float32, *, dequantize=True, quantize_activations=None, rounding=True):
    """Load a V4 folder in evaluation mode; float64 is a float32 load, widened (exact)."""
    options = Dsv4QuantizationConfig(dequantize=dequantize, quantize_activations=quantize_activations)
    load_dtype = torch.float32 if dtype == torch.float64 else dtype
    model = Dsv4ForCausalLM.from_pretrained(folder, dtype=load_dtype, quantization_config=options)
    model.config.cache_rounding = rounding
    return model.to(dtype).eval()


@cache
def golden_model(dtype=torch.float32):
    """The dequantised golden checkpoint, shared by tests that put back what they change."""
    return load(dtype=dtype)


def v4_folder():
    """The golden folder in memory."""
    return Folder(CHECKPOINT_V4)


def with_mtp(seed=0):
    """The golden folder with an MTP layer: a copy of its last block (window-only, score routing) and new projections."""
    folder, generator = v4_folder(), torch.Generator().manual_seed(seed)
    tensors, last = folder.shards[SHARD], folder.config["num_hidden_layers"] - 1
    for name in [n for n in tensors if n.startswith(f"layers.{last}.")]:
        tensors["mtp.0" + name.removeprefix(f"layers.{last}")] = tensors[name].clone()
    width = folder.config["hidden_size"]

    def random(*shape, scale=1.0):
        return torch.randn(shape, generator=generator) * scale

    for name in ("e_proj", "h_proj"):
        values, scale = quantize_fp8_tiles(random(width, width, scale=width**-0.5), block_size=(128, 128))
        tensors[f"mtp.0.{name}.weight"], tensors[f"mtp.0.{name}.scale"] = values, scale
    for name in ("enorm", "hnorm", "norm"):
        tensors[f"mtp.0.{name}.weight"] = (1 + 0.1 * random(width)).bfloat16()
    for part in ("fn", "base", "scale"):
        tensors[f"mtp.0.hc_head_{part}"] = tensors[f"hc_head_{part}"] + 0.1 * random(*tensors[f"hc_head_{part}"].shape)
    folder.config["num_nextn_predict_layers"] = 1
    folder.config["compress_ratios"] = [*folder.config["compress_ratios"], 0]
    return folder


def base_variant():
    """A -Base build: FP8 experts in tiles, float32 scales, no `expert_dtype` and no `scale_fmt`."""
    folder, generator = v4_folder(), torch.Generator().manual_seed(3)
    tensors = folder.shards[SHARD]
    for name in [n for n in tensors if n.endswith(".scale")]:
        weight = name.removesuffix("scale") + "weight"
        shape = list(tensors[weight].shape)
        if tensors[weight].dtype == torch.int8:
            shape[1] *= 2
        values, scale = quantize_fp8_tiles(
            torch.randn(shape, generator=generator) * shape[1] ** -0.5, block_size=(128, 128)
        )
        # Any float may be a scale here, so that powers of two do not hide a wrong one.
        tensors[weight], tensors[name] = (
            values,
            scale.float() * (0.8 + 0.4 * torch.rand(scale.shape, generator=generator)),
        )
    folder.config.pop("expert_dtype")
    folder.config["quantization_config"].pop("scale_fmt")
    return folder


def some_ids(batch, length, seed=0):
    """Random token ids `[B, S]`, none special."""
    return torch.randint(3, 384, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def outputs_of(model, ids, **options):
    """Run ids `[1, S]` without a cache and return arrays under the names of the goldens."""
    record = {}

    def keep(index):
        def hook(module, args, output):
            record[f"streams.{index}"] = output.streams
            entries = output.shared.entries
            if module.self_attn.mode == "full":
                record[f"compressed_kv.{index}"] = entries.read()

        return hook

    def keep_router(index):
        def hook(module, args, output):
            record[f"router_w.{index}"], record[f"router_idx.{index}"] = output[1], output[2]

        return hook

    handles = []
    for index, layer in enumerate(model.model.layers):
        handles.append(layer.register_forward_hook(keep(index)))
        handles.append(layer.mlp.gate.register_forward_hook(keep_router(index)))
    try:
        out = model(ids, use_cache=False, output_selections=True, output_hidden_states=True, **options)
    finally:
        for handle in handles:
            handle.remove()
    record |= {"logits": out.logits, "final_hidden": out.hidden_states[-1]}
    record |= {f"topk.{layer}": chosen for layer, chosen in out.selections.items()}
    return {
        name: (value.float() if value.dtype == torch.bfloat16 else value).numpy() for name, value in record.items()
    }


def tiny_config(**changes):
    """The golden configuration without its quantisation, with some keys changed."""
    config = v4_folder().config
    config.pop("quantization_config")
    config.pop("expert_dtype")
    config.pop("layer_types")
    config.pop("compress_rates")
    return Dsv4Config(**(config | changes))


# Small sizes of the fault-kind tests: both compressions, a selection far smaller than what is visible, hash routing.
SMALL = {
    "vocab_size": 128, "num_hidden_layers": 6, "compress_ratios": [0, 4, 16, 4, 16, 4], "num_hash_layers": 2, "index_topk": 2,
    "n_routed_experts": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 4, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 64,
    },
}  # fmt: skip


# The -0731 build: DSpark stages instead of the MTP layer.
DSPARK = {
    "num_nextn_predict_layers": 1, "compress_ratios": [0, 4, 16, 4, 16, 4, 0, 0], "dspark_block_size": 4,
    "dspark_noise_token_id": 9, "dspark_target_layer_ids": [3, 5], "dspark_markov_rank": 8,
}  # fmt: skip


def random_model(dtype=torch.float64, seed=1, use_mtp=False, **changes):
    """A model with wide random weights, so that every part matters; hash tables and selection biases are random too."""
    model = Dsv4ForCausalLM(tiny_config(**changes), use_mtp=use_mtp).to(torch.float64).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict().items():
        if name.endswith("tid2eid"):
            rows = torch.rand(tensor.shape[0], model.config.n_routed_experts, generator=generator).argsort(-1)
            tensor.copy_(rows[:, : tensor.shape[1]])
            continue
        size = tensor.shape[-1] ** -0.5 if tensor.ndim > 1 else 0.3
        random = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        mean = 1.0 if name.endswith(("norm.weight", ".scale")) else 0.0
        tensor.copy_(random * (2.0 if "embed" in name else size) + mean)
    return model.to(dtype)


@cache
def drafting_model(build):
    """A small model with the MTP layer ("mtp") or with DSpark ("0731"), in float64; shared, not to be changed."""
    drafter = (
        DSPARK if build == "0731" else {"num_nextn_predict_layers": 1, "compress_ratios": [0, 4, 16, 4, 16, 4, 0]}
    )
    return random_model(use_mtp=True, **SMALL | drafter)


@cache
def small_model(dtype=torch.float64):
    """A small model that tests share and must not change."""
    return random_model(dtype, **SMALL)
