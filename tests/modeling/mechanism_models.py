"""Tiny text configurations and models with strong random weights, for tests that need whole layers."""

import torch

from modeling_dsv4 import Dsv41TextConfig, Dsv41TextModel

TINY = {
    "vocab_size": 128,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 32,
    "o_lora_rank": 16,
    "o_groups": 2,
    "swiglu_limit": 2.0,
    "n_routed_experts": 4,
    "num_experts_per_tok": 1,
    "sliding_window": 8,
    "compress_ratios": [0, 2, 2, 1, 1],
    "kv_source_layer_ids": [1, 3],
    "index_source_layer_ids": [1, 2, 3, 4],
    "index_n_heads": 8,
    "index_head_dim": 32,
    "index_topk": 2,
    "candidate_source_layer_id": 3,
    "candidate_topk_blocks": 2,
    "candidate_block_size": 2,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 3,
    "engram_layer_ids": [1],
    "engram_num_embeddings": [500],
    "engram_max_ngram_size": 3,
    "engram_vocab_size": 60,
    "engram_n_heads": 2,
    "engram_head_dim": 32,
    "engram_pad_token_id": 2,
    "engram_compressed_vocab_size": 128,
    "num_nextn_predict_layers": 0,
    "max_position_embeddings": 4096,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 64,
    },
    "pad_token_id": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def tiny_config(**changes):
    """Return a tiny `Dsv41TextConfig` with a small top-k, so that selection matters."""
    return Dsv41TextConfig(**(TINY | changes))


def random_values(*shape, seed=1, dtype=torch.float64, scale=1.0):
    """Normal numbers, the same in every dtype."""
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale).to(dtype)


def fill(module, seed=0, scale=None):
    """Fill every parameter with random values large enough that every part of the module moves its output."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        size = scale or (parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.3)
        values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * size
        parameter.data.copy_(values + ("norm" in name or name.endswith(("_weight", ".scale"))))
    return module


def tiny_model(seed=0, dtype=torch.float64, **changes):
    """Return a tiny text model; in float64 a call in pieces differs from one call by 1e-13, so no code ever flips."""
    model = Dsv41TextModel(tiny_config(**changes)).eval().to(dtype)
    return fill(model, seed)
