"""The tiny model of the fault-kind tests: eight layers of every mode, selections far smaller than what is visible.

Its weights are drawn wide, so that every part matters, and can be handed to the oracle under released names.
"""

from functools import cache

import numpy as np
import torch
from torch import nn

from modeling_dsv4 import Dsv41Config, Dsv41ForCausalLM
from modeling_dsv4.hyper_connections import Dsv4HyperConnection
from modeling_dsv4.moe import Dsv4TopKRouter
from tests.reference import text_model

PAD, IMAGE = 0, 127
LENGTH = 41
EXACT = 1e-9  # float64, the same sums in another order
ORACLE = 2e-6  # float64 model; its rotary tables are float32 numbers, the oracle's are not
TEXT = {
    "vocab_size": 128, "hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 8,
    "num_attention_heads": 4, "head_dim": 32, "qk_rope_head_dim": 16, "q_lora_rank": 32, "o_lora_rank": 32, "o_groups": 2,
    "swiglu_limit": 2.0, "max_position_embeddings": 512, "rope_theta": 10000.0, "compress_rope_theta": 160000.0,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 4, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 64,
    },
    "n_routed_experts": 8, "num_experts_per_tok": 2, "sliding_window": 8,
    "compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1], "kv_source_layer_ids": [2, 5], "index_source_layer_ids": [2, 4, 5, 6, 7],
    "index_n_heads": 8, "index_head_dim": 32, "index_topk": 2,
    "candidate_source_layer_id": 5, "candidate_topk_blocks": 2, "candidate_block_size": 2,
    "engram_layer_ids": [1, 3], "engram_vocab_size": 50, "engram_n_heads": 2, "engram_head_dim": 32,
    "engram_num_embeddings": [384, 552], "engram_pad_token_id": PAD, "engram_compressed_vocab_size": 128,
    "num_nextn_predict_layers": 0, "initializer_range": 0.15, "hc_sinkhorn_iters": 3,
}  # fmt: skip
# For tests that do not ask for more: a window with Engram, a source of ratio 2, its reader with Engram, the source of
# candidates, and a layer that selects among them.
FIVE_LAYERS = {
    "num_hidden_layers": 5, "compress_ratios": [0, 2, 2, 1, 1], "kv_source_layer_ids": [1, 3],
    "index_source_layer_ids": [1, 3, 4], "candidate_source_layer_id": 3, "engram_layer_ids": [0, 2],
}  # fmt: skip


def tiny_config(**changed):
    """The tiny configuration, with some text keys changed."""
    text = TEXT | changed
    return Dsv41Config(
        text_config=text, vision_config=None, image_token_id=IMAGE, pad_token_id=PAD, bos_token_id=1, eos_token_id=2
    )


def new_model(dtype=torch.float32, seed=0, **changed):
    """Make a tiny model with wide random weights, in evaluation mode."""
    torch.manual_seed(seed)
    model = Dsv41ForCausalLM(tiny_config(**changed)).eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, Dsv4HyperConnection):
                nn.init.normal_(module.base, std=0.5)
                nn.init.constant_(module.scale, 0.5)
            elif isinstance(module, Dsv4TopKRouter):
                nn.init.normal_(module.e_score_correction_bias, std=0.1)
                nn.init.normal_(module.e_score_correction_bias_vl, std=0.5)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=1.0)
        for name, parameter in model.named_parameters():
            if name.endswith(("norm.weight", "q_weight", "k_weight")):
                parameter.copy_(1 + 0.2 * torch.randn_like(parameter))
            elif name.endswith("sinks"):
                nn.init.normal_(parameter)
    return model.to(dtype)


@cache
def shared_model(dtype=torch.float32, **changed):
    """A tiny model that tests share and must not change."""
    return new_model(dtype, **changed)


@cache
def five_layer_model():
    """A shallower one in float64 that tests share and must not change."""
    return new_model(torch.float64, **FIVE_LAYERS)


def some_ids(batch, length, seed=0, low=3):
    """Random token ids `[B, S]`, neither special nor the image token."""
    return torch.randint(low, IMAGE, (batch, length), generator=torch.Generator().manual_seed(seed))


def oracle_weights(model):
    """The float64 weights of a tiny model under released names, one matrix per expert."""
    weights = {}
    for name, tensor in model.state_dict().items():
        array = tensor.detach().double().numpy()
        if name.endswith("experts.gate_up_proj"):
            stem = model.weight_names.to_released(name.replace("mlp.experts.gate_up_proj", "mlp.gate.weight"))
            stem = stem.removesuffix(".gate.weight")
            down = model.state_dict()[name.replace("gate_up_proj", "down_proj")].double().numpy()
            for expert, (gate_up, out) in enumerate(zip(array, down, strict=True)):
                gate, up = np.split(gate_up, 2)
                for short, matrix in (("w1", gate), ("w3", up), ("w2", out)):
                    weights[f"{stem}.experts.{expert}.{short}.weight"] = matrix
        elif not name.endswith("experts.down_proj"):
            weights[model.weight_names.to_released(name)] = array
    return weights


def oracle_logits(model, input_ids, **options):
    """Logits of the oracle for a tiny model: `[B, S, V]` float64."""
    text = model.config.text_config.to_dict()
    options.setdefault("rounding", text["cache_rounding"])
    options.setdefault("token_map", list(range(text["vocab_size"])))
    weights = options.pop("weights", None) or oracle_weights(model)
    return text_model.forward(weights, text, np.asarray(input_ids), **options)["logits"]


def two_rows():
    """Ids `[2, LENGTH]`; the second row has an image span and repeats n-grams of the first."""
    ids = some_ids(2, LENGTH, seed=1)
    ids[1, 20:26] = IMAGE
    ids[1, 30:38] = ids[0, 3:11]
    return ids


@torch.no_grad()
def run(model, ids, **options):
    """Run a model without gradients."""
    return model(ids, **options)


@cache
def oracle_row():
    """One row of ids with an image span, and everything that the oracle makes of it with the shared float64 model."""
    model, ids = shared_model(torch.float64), some_ids(1, LENGTH, seed=1)
    ids[0, 20:26] = IMAGE
    text = model.config.text_config.to_dict()
    weights, identity = oracle_weights(model), list(range(text["vocab_size"]))
    return ids, text_model.forward(weights, text, ids.numpy(), image_mask=(ids == IMAGE).numpy(), token_map=identity)
