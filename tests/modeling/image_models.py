"""Models with images that several tests share, and inputs for them.

`golden_model` is the golden checkpoint as a float model. `exact_model` is the same in float64 with the rounding of cached
values off: what must be equal in exact arithmetic is then equal to 1e-9, with no rounding flip in between.
`tiny_model` is a fresh small float64 model, quick enough for beams and finite differences.
"""

from functools import cache

import numpy as np
import torch

from modeling_dsv4 import Dsv4QuantizationConfig, Dsv41Config, Dsv41ForConditionalGeneration
from tests import golden_cases as golden

IMAGE = golden.load_json(golden.CHECKPOINT_V41 / "config.json")["image_token_id"]
# Greedy generation as the goldens have it: no end of sentence, and never an image token.
GREEDY = {"do_sample": False, "eos_token_id": None}


def load_golden(dtype=torch.float32, **quantization):
    """Load the golden checkpoint with images, in evaluation mode."""
    settings = Dsv4QuantizationConfig(**quantization) if quantization else None
    folder = golden.CHECKPOINT_V41
    return Dsv41ForConditionalGeneration.from_pretrained(folder, dtype=dtype, quantization_config=settings).eval()


@cache
def golden_model():
    """The golden checkpoint in float32; put back what you change."""
    return load_golden(dequantize=True)


@cache
def exact_model():
    """The golden checkpoint in float64 without rounding; put back what you change."""
    model = load_golden(torch.float64, dequantize=True)
    model.config.text_config.cache_rounding = False
    return model


def tiny_config(**vision) -> Dsv41Config:
    """A config whose every mechanism is there and small; image token 7, no token map needed."""
    text = {
        "vocab_size": 128, "hidden_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 4,
        "num_attention_heads": 4, "head_dim": 16, "qk_rope_head_dim": 8, "q_lora_rank": 16, "o_lora_rank": 16,
        "o_groups": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8,
        "compress_ratios": [0, 2, 1, 1], "kv_source_layer_ids": [1, 2], "index_source_layer_ids": [1, 2, 3],
        "index_n_heads": 8, "index_head_dim": 16, "index_topk": 2, "candidate_source_layer_id": 2,
        "candidate_topk_blocks": 2, "candidate_block_size": 2, "hc_mult": 2, "hc_sinkhorn_iters": 3, "engram_layer_ids": [1],
        "engram_vocab_size": 50, "engram_n_heads": 2, "engram_head_dim": 8, "engram_compressed_vocab_size": 128,
        "engram_num_embeddings": [600], "engram_pad_token_id": 2, "num_nextn_predict_layers": 0,
        "rope_scaling": {"rope_type": "default"}, "initializer_range": 0.2,
    }  # fmt: skip
    sizes = {
        "num_hidden_layers": 2, "hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 16,
        "patch_size": 2, "downsample_ratio": 2, "max_image_tokens": 64, "min_pixels": 16,
    }  # fmt: skip
    return Dsv41Config(
        text_config=text,
        vision_config=sizes | vision,
        image_token_id=7,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )


def tiny_model(dtype=torch.float64, **vision) -> Dsv41ForConditionalGeneration:
    """A fresh small model without rounding; the same every time."""
    torch.manual_seed(0)
    model = Dsv41ForConditionalGeneration(tiny_config(**vision)).to(dtype)
    model.config.text_config.cache_rounding = False
    with torch.no_grad():  # nothing that a fresh model leaves at zero or one stays there
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model.eval()


@cache
def shared_tiny():
    """One `tiny_model` for tests that change nothing in it."""
    return tiny_model()


def grid_of(*sizes):
    """`image_grid_hw` of some (rows, columns)."""
    return torch.tensor(sizes)


def random_patches(grid, patch_size, seed=0, dtype=torch.float32):
    """Patches of images of these grids, values as of pixels."""
    count = int(grid.prod(-1).sum())
    draw = torch.rand(count, 3, patch_size, patch_size, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    return draw.to(dtype)


def span_length(rows, columns, ratio):
    """Prompt tokens of one image, counted one by one."""
    return 2 + sum(1 + len(range(0, columns, ratio)) for _ in range(0, rows, ratio))


def prompt(model, *parts, seed=0):
    """Token ids `[1, S]`: an integer is that many random text tokens, a pair the span of an image of that grid."""
    random = np.random.default_rng(seed)
    ratio, image = model.config.vision_config.downsample_ratio, model.config.image_token_id
    ids = []
    for part in parts:
        if isinstance(part, tuple):
            ids += [image] * span_length(*part, ratio)
        else:
            ids += random.integers(10, 120, part).tolist()
    return torch.tensor([ids])


def image_inputs(model, *parts, seed=0):
    """Arguments of `forward` for one row; parts as in `prompt`."""
    grid = grid_of(*[part for part in parts if isinstance(part, tuple)])
    pixels = random_patches(grid, model.config.vision_config.patch_size, seed, model.dtype)
    return {"input_ids": prompt(model, *parts, seed=seed), "pixel_values": pixels, "image_grid_hw": grid}


def batch_left(rows, pad=2):
    """Pad single rows (from `image_inputs`, or with `input_ids` alone) on the left and join them."""
    longest = max(row["input_ids"].shape[1] for row in rows)
    ids, masks = [], []
    for row in rows:
        extra = longest - row["input_ids"].shape[1]
        ids.append(torch.nn.functional.pad(row["input_ids"], (extra, 0), value=pad))
        masks.append(torch.nn.functional.pad(torch.ones_like(row["input_ids"]), (extra, 0)))
    joined = {"input_ids": torch.cat(ids), "attention_mask": torch.cat(masks)}
    for name in ("pixel_values", "image_grid_hw"):
        joined[name] = torch.cat([row[name] for row in rows if name in row])
    return joined


def logits_of(model, **inputs):
    """Logits of a forward pass without gradients."""
    with torch.no_grad():
        return model(**inputs).logits


def vision_parameters(model):
    """Parameters of tower, projector and delimiters by name."""
    parts = (".vision_tower.", ".multi_modal_projector.", ".image_")
    return {name: p for name, p in model.named_parameters() if any(part in name for part in parts)}


def decode_case(mode):
    """The golden generation with an image."""
    return golden.load_tensors(golden.DECODE_V41 / f"generate_30_image.{mode}.safetensors")


def encode(model, inputs):
    """`mm_encoder_outputs` of some inputs, and the inputs without their pixels."""
    with torch.no_grad():
        encoded = model.get_image_features(inputs["pixel_values"], inputs["image_grid_hw"])
    rest = {name: value for name, value in inputs.items() if name not in ("pixel_values", "image_grid_hw")}
    return encoded, rest


def case_inputs(case):
    """Arguments of `forward` for a golden case with images."""
    inputs = {"input_ids": torch.as_tensor(case["input_ids"]).long()}
    if "attention_mask" in case:
        inputs["attention_mask"] = torch.as_tensor(case["attention_mask"])
    return inputs | {
        "pixel_values": torch.as_tensor(case["pixel_values"]),
        "image_grid_hw": torch.as_tensor(case["image_grid_hws"]).long(),
    }


@torch.no_grad()
def record(model, case):
    """Run a golden case from its pixels; returns the arrays that `golden_cases.compare_case` knows."""
    found, handles = {}, []
    mask = torch.as_tensor(case["attention_mask"]).bool()
    # Inside the model the real tokens of each row come first; this is the way back.
    back = torch.argsort(torch.argsort(~mask, dim=-1, stable=True), dim=-1)[..., None]

    def unshift(values):
        values = values.reshape(*mask.shape, -1)
        return values.gather(1, back.expand(values.shape))

    def after_layer(index):
        def hook(module, args, flow):
            found[f"streams.{index}"] = unshift(flow.streams).view(flow.streams.shape)
            found[f"pre_mix.{index}"] = unshift(flow.pre)

        return hook

    def after_router(index):
        def hook(module, args, routed):
            found[f"router_idx.{index}"] = unshift(routed[2])

        return hook

    def after_hash(module, args, rows):
        stacked = torch.stack(list(rows.values()), dim=2)
        found["engram_hash"] = unshift(stacked).view(stacked.shape)

    text = model.model.language_model
    handles.append(text.ngram_hash.register_forward_hook(after_hash))
    for index, layer in enumerate(text.layers):
        handles.append(layer.register_forward_hook(after_layer(index)))
        handles.append(layer.mlp.gate.register_forward_hook(after_router(index)))
    try:
        out = model(**case_inputs(case), output_selections=True, output_hidden_states=True, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    found |= {"logits": out.logits, "final_hidden": out.hidden_states[-1]}
    found |= {f"topk.{layer}": chosen for layer, chosen in out.selections.items()}
    return {name: value.numpy() for name, value in found.items()}
