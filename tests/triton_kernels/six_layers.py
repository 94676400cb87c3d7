"""Six layers of the released widths with random packed weights, one of every kind of layer, made on a device.

Layers: window only, a source of ratio 2, a layer that reuses it, the candidate source of ratio 1, a layer that selects
again among its candidates, one that reuses that selection. 384 experts, and no Engram, unless a test wants it otherwise.
"""

import torch

from modeling_dsv4 import Dsv4Cache, Dsv4QuantizationConfig, Dsv41ForCausalLM, Dsv41TextConfig
from modeling_dsv4.moe import Dsv4PackedExperts
from modeling_dsv4.quantization import pack_modules, set_activation_rounding

# E8M0 exponents with which weights come out at a root mean square of about 0.02, E2M1 and E4M3 codes being random.
FP4_SCALE, FP8_SCALE = 127 - 7, 127 - 6


def six_layer_config(**changes):
    defaults = {"engram_layer_ids": [], "engram_num_embeddings": []}
    return Dsv41TextConfig(
        num_hidden_layers=6,
        compress_ratios=[0, 2, 2, 1, 1, 1],
        kv_source_layer_ids=[1, 3],
        index_source_layer_ids=[1, 3, 4],
        candidate_source_layer_id=3,
        num_nextn_predict_layers=0,
        **defaults | changes,
    )


@torch.no_grad()
def six_layers(device, packed=True, **changes):
    """Return the model in bfloat16; packed, with its experts on the device."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            model = Dsv41ForCausalLM(six_layer_config(**changes))
    finally:
        torch.set_default_dtype(default)
    if packed:
        pack_modules(model, Dsv4QuantizationConfig())
        set_activation_rounding(model, True)
    model.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(0)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        _fill(name, tensor, generator)
    for module in model.modules():
        if isinstance(module, Dsv4PackedExperts):
            module.move_to(device)
            for tensor in module.bank:
                _fill("experts", tensor, generator)
    return model.eval()


def _fill(name, tensor, generator):
    """Random values, in whatever form they are stored."""
    if tensor.dtype == torch.float8_e4m3fn:
        for rows in tensor.split(4096):
            rows.copy_(torch.randn(rows.shape, generator=generator, device=tensor.device))
    elif tensor.dtype == torch.float8_e8m0fnu:
        tensor.view(torch.uint8).fill_(FP4_SCALE if name == "experts" else FP8_SCALE)
    elif tensor.dtype == torch.int8:
        tensor.view(torch.uint8).random_(256, generator=generator)
    elif name.endswith("norm.weight"):
        tensor.fill_(1)
    elif "e_score_correction" in name or name.endswith(".base"):
        tensor.zero_()
    elif tensor.is_floating_point():
        tensor.normal_(std=0.02, generator=generator)


def engram_table(table, place):
    """Give a packed Engram table random rows: on the "device", in "pinned" memory or on the "host"."""
    generator = torch.Generator().manual_seed(2)
    for name in table.host_names():
        part = torch.empty(table.host_tensor(name).shape, dtype=torch.uint8, pin_memory=place == "pinned")
        part.random_(*((0, 0x78) if name == "weight" else (120, 124)), generator=generator)
        part = part.view(table.host_tensor(name).dtype)
        table.assign(name, part.cuda() if place == "device" else part)


@torch.no_grad()
def filled_cache(model, tokens, capacity, batch=1):
    """Return a cache of fixed capacity that holds `tokens` random tokens of each row, which nobody computed."""
    cache, device = Dsv4Cache(model.config, max_length=capacity), model.device
    model(torch.zeros(batch, 2, dtype=torch.long, device=device), cache=cache, logits_to_keep=1)  # allocates
    generator = torch.Generator(device).manual_seed(1)
    for layer in cache.layers:
        for part in layer.parts:
            if len(part.parts) == 1:
                part.parts[0].normal_(generator=generator)
                continue
            codes, scale = part.parts
            codes.random_(256, generator=generator)
            if part is layer.window:
                codes[(codes & 0x7F) == 0x7F] = 0  # E4M3 has no other NaN
                scale.fill_(127 - 9)
            elif part is layer.store.entries:
                scale.fill_(0x2C)  # 0.375 in E4M3
            else:
                scale.fill_(127 - 2)
    cache.lengths.fill_(tokens)
    cache.columns = tokens
    return cache
