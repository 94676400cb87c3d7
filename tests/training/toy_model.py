"""A small trainable model with the parameter names, the router protocol and the vision switch of V4.1."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from .standin import namespace

VOCAB, HIDDEN, EXPERTS, TOP_K, IMAGE_TOKEN = 32, 16, 6, 2, 31
CONFIG = {
    "model_type": "deepseek_v41",
    "text_config": {
        "model_type": "deepseek_v41_text",
        "hidden_size": HIDDEN,
        "num_attention_heads": 2,
        "head_dim": 8,
        "o_groups": 2,
        "moe_intermediate_size": 8,
        "n_routed_experts": EXPERTS,
        "cache_rounding": True,
        "candidate_source_layer_id": 1,
    },
    "vision_config": {"num_attention_heads": 2, "hidden_size": 8, "intermediate_size": 12},
}


class Router(nn.Module):
    """Returns (logits, weights, indices); image tokens pick by their own biases."""

    def __init__(self, modalities=2):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, HIDDEN) * 0.3)
        self.register_buffer("e_score_correction_bias", torch.zeros(EXPERTS))
        if modalities == 2:
            self.register_buffer("e_score_correction_bias_vl", torch.zeros(EXPERTS))

    def forward(self, x, image_mask=None):
        logits = x @ self.weight.T
        bias = self.e_score_correction_bias.expand_as(logits)
        if image_mask is not None and hasattr(self, "e_score_correction_bias_vl"):
            bias = torch.where(image_mask[:, None], self.e_score_correction_bias_vl, bias)
        scores = F.softplus(logits).sqrt()
        indices = (scores + bias).topk(TOP_K, dim=-1).indices
        weights = scores.gather(1, indices)
        return logits, weights / weights.sum(-1, keepdim=True), indices


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 16, HIDDEN) * 0.2)
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, HIDDEN, 8) * 0.2)

    def forward(self, x, weights, indices):
        gate, up = torch.einsum("eih,nh->nei", self.gate_up_proj, x).chunk(2, dim=-1)
        out = torch.einsum("ehi,nei->neh", self.down_proj, F.silu(gate) * up)
        mix = torch.zeros(x.shape[0], EXPERTS, dtype=weights.dtype).scatter(1, indices, weights)
        return torch.einsum("ne,neh->nh", mix.to(out.dtype), out)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = Router(), Experts()

    def forward(self, x, image_mask):
        _, weights, indices = self.gate(x, image_mask=image_mask)
        return self.experts(x, weights, indices)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_a_proj, self.q_b_proj = nn.Linear(HIDDEN, 12, bias=False), nn.Linear(12, 16, bias=False)
        self.o_a_proj, self.o_b_proj = nn.Linear(16, 8, bias=False), nn.Linear(8, HIDDEN, bias=False)
        self.sinks = nn.Parameter(torch.zeros(2))

    def forward(self, x):
        q = self.q_b_proj(self.q_a_proj(x)).unflatten(-1, (2, 8)) * torch.sigmoid(self.sinks)[:, None]
        return self.o_b_proj(self.o_a_proj(q.flatten(-2)))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.self_attn, self.mlp = Attention(), Mlp()

    def forward(self, x, image_mask):
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x), image_mask)


class VisionTower(nn.Module):
    """`freeze_vision`: the body runs without gradients; the final norm trains always."""

    def __init__(self):
        super().__init__()
        self.freeze_vision = False
        self.patch_embed = nn.Linear(12, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8)])
        self.norm = nn.RMSNorm(8)

    def forward(self, pixels):
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.freeze_vision):
            x = self.layers[0](self.patch_embed(pixels.to(self.norm.weight.dtype)))
        return self.norm(x)


class ToyModel(nn.Module):
    def __init__(self, seed=0, checkpointing=None):
        super().__init__()
        torch.manual_seed(seed)
        self.config = namespace(CONFIG)
        self.checkpointing = checkpointing
        self.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.norm = nn.RMSNorm(HIDDEN)
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.vision_tower = VisionTower()
        self.multi_modal_projector = nn.ModuleDict({"linear_1": nn.Linear(8, HIDDEN)})
        self.seen_config = []

    def forward(self, input_ids, attention_mask=None, labels=None, pixel_values=None, **kwargs):
        text = self.config.text_config
        self.seen_config.append((text.cache_rounding, text.candidate_source_layer_id))
        x = self.embed_tokens(input_ids)
        image_mask = input_ids == IMAGE_TOKEN
        if pixel_values is not None:
            image = self.multi_modal_projector["linear_1"](self.vision_tower(pixel_values))
            x = x + image_mask[..., None] * image[:, None]
        x, image_mask = x.reshape(-1, HIDDEN), image_mask.reshape(-1)
        for layer in self.layers:
            if self.checkpointing is None or not self.training:
                x = layer(x, image_mask)
            else:
                x = checkpoint(layer, x, image_mask, use_reentrant=self.checkpointing == "reentrant")
        logits = self.lm_head(self.norm(x)).view(*input_ids.shape, VOCAB)
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        return {"loss": loss, "logits": logits}


class ToyData(torch.utils.data.Dataset):
    """Rows of 8 tokens: some images, some right padding."""

    def __init__(self, rows=48):
        generator = torch.Generator().manual_seed(11)
        self.rows = []
        for i in range(rows):
            ids = torch.randint(0, VOCAB - 1, (8,), generator=generator)
            ids[1 + i % 3] = IMAGE_TOKEN
            mask = torch.ones(8, dtype=torch.int64)
            mask[8 - i % 4 :] = 0
            labels = ids.masked_fill(mask == 0, -100)
            pixels = torch.randn(12, generator=generator)
            self.rows.append({"input_ids": ids, "attention_mask": mask, "labels": labels, "pixel_values": pixels})

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]
