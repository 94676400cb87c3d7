"""Packed experts: a bank on one device and its kernels against the float64 oracle and the bank on the host."""

import copy
import importlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from modeling_dsv4.expert_placement import ExpertPlacementMixin, bank_bytes
from modeling_dsv4.fp_codecs import (
    dequantize_fp4_rows,
    dequantize_fp8_tiles,
    quantize_fp4_rows,
    quantize_fp8_tiles,
    round_fp8,
)
from modeling_dsv4.moe import Dsv4Experts, Dsv4PackedExperts
from tests.reference import experts as oracle

from .products import dtypes, error, random

kernels = importlib.import_module("modeling_dsv4.triton_kernels.packed_experts")

EXPERTS, HIDDEN, WIDTH, CHOSEN = 5, 96, 48, 3
NAMES = ("gate_proj", "up_proj", "down_proj")


def make_config(hidden=HIDDEN, width=WIDTH):
    config = SimpleNamespace(hidden_size=hidden, moe_intermediate_size=width, swiglu_limit=0.7, num_hash_layers=0)
    config.has_image_bias, config.gate_temp, config.norm_topk_prob, config.routed_scaling_factor = True, 1.0, True, 1.5
    config.experts_of = lambda layer: (EXPERTS, CHOSEN)
    return config


def make_bank(expert_dtype="fp4", block=(32, 32), hidden=HIDDEN, width=WIDTH, scale_dtype=torch.float8_e8m0fnu):
    """A packed bank of random matrices on the host, and their values in float64 by expert."""
    with torch.device("meta"):
        bank = Dsv4PackedExperts(Dsv4Experts(make_config(hidden, width)), expert_dtype, block, scale_dtype)
    matrices = [[] for _ in range(EXPERTS)]
    for expert in range(EXPERTS):
        for kind, name in enumerate(NAMES):
            shape = (hidden, width) if name == "down_proj" else (width, hidden)
            weight = random(*shape, seed=3 * expert + kind, spread=1) * 0.1
            if expert_dtype == "fp4":
                values, scale = quantize_fp4_rows(torch.nn.functional.pad(weight, (0, -shape[1] % 32)))
                values = values[:, : shape[1] // 2].contiguous()
                exact = dequantize_fp4_rows(values, scale)
            else:
                values, scale = quantize_fp8_tiles(weight, block_size=block)
                exact = dequantize_fp8_tiles(values, scale, block_size=block)
            bank.assign(f"{expert}.{name}.weight", values)
            bank.assign(f"{expert}.{name}.weight_scale_inv", scale.to(scale_dtype))
            matrices[expert].append(exact.double().numpy())
    bank.weight = torch.empty(0)
    bank.quantize_activations = True
    return bank, matrices


def make_routing(tokens, device, routed=EXPERTS, seed=5):
    generator = torch.Generator().manual_seed(seed)
    indices = torch.stack([torch.randperm(routed, generator=generator)[:CHOSEN] for _ in range(tokens)])
    return indices.to(device), torch.rand(tokens, CHOSEN, generator=generator).to(device)


def expected_sum(x, indices, weights, matrices, limit, block):
    """One token and one expert at a time, in float64."""
    out = np.zeros(x.shape)
    rounding = block and (lambda v: round_fp8(torch.from_numpy(v), block=block).numpy())
    for t, token in enumerate(x.cpu().double().numpy()):
        for weight, e in zip(weights[t].tolist(), indices[t].tolist(), strict=True):
            if e < EXPERTS:
                gate, up, down = matrices[e]
                out[t] += oracle.expert(token, gate, down, up, limit, weight, rounding)
    return torch.from_numpy(out)


BANKS = [("fp4", (32, 32)), ("fp8", (32, 32)), ("fp8", (128, 128))]


@pytest.mark.parametrize(
    ("expert_dtype", "block", "tokens", "rounds"),
    [(*bank, tokens, True) for bank in BANKS for tokens in (1, 3)] + [(*BANKS[0], 1, False), (*BANKS[0], 3, False)],
)
def test_experts_equal_the_oracle(expert_dtype, block, tokens, rounds, device, poisoned):
    """Some experts have no token, some of the indices lie beyond the bank; no size is a multiple of a tile."""
    bank, matrices = make_bank(expert_dtype, block)
    bank.move_to(device)
    indices, weights = make_routing(tokens, device, routed=EXPERTS + 1)
    for dtype in dtypes(device):
        x = random(tokens, HIDDEN, seed=7, device=device, dtype=dtype)
        settings = {"limit": bank.limit, "block_size": None if expert_dtype == "fp4" else block}
        settings["activation_block"] = bank.activation_block if rounds else None
        out = kernels.packed_experts(x, indices, weights, *bank.bank, **settings)
        expected = expected_sum(x, indices, weights, matrices, bank.limit, settings["activation_block"])
        assert out.dtype == torch.float32
        # In bfloat16 gate and up are rounded, which may tip the FP8 rounding behind them by 2^-4 of a value: as often in the
        # bank's own maths.
        bank.kernels, bank.quantize_activations = None, rounds
        bound = 2e-6 if dtype == torch.float32 else 2 * error(bank(x, indices, weights).cpu(), expected)
        assert error(out.cpu(), expected) < bound < 5e-2


def test_tiles_of_one_expert_and_of_many(device, poisoned, monkeypatch):
    bank, matrices = make_bank()
    bank.move_to(device)
    tokens = 14
    monkeypatch.setattr(kernels, "MAX_TOKENS", 11)
    indices, weights = make_routing(tokens, device)
    indices[: tokens - 2] = torch.tensor([4, 1, 2], device=device)
    x = random(tokens, HIDDEN, seed=7, device=device)
    out = kernels.packed_experts(x, indices, weights, *bank.bank, limit=bank.limit)
    assert error(out.cpu(), expected_sum(x, indices, weights, matrices, bank.limit, 32)) < 2e-6


@pytest.mark.parametrize(("expert_dtype", "block", "tokens"), [(*BANKS[0], 1), *((*bank, 2) for bank in BANKS)])
def test_gradients_equal_those_of_the_bank_on_the_host(expert_dtype, block, tokens, device, poisoned):
    bank, _ = make_bank(expert_dtype, block)
    indices, weights = make_routing(tokens, device, routed=EXPERTS + 1)
    x = random(tokens, HIDDEN, seed=7, device=device)
    x.requires_grad_(), weights.requires_grad_()
    grad = random(tokens, HIDDEN, seed=8, device=device)
    expected = bank(x.double(), indices, weights.double())
    wanted = torch.autograd.grad(expected, (x, weights), grad.double())
    bank.move_to(device)
    tile = None if expert_dtype == "fp4" else block
    settings = {"limit": bank.limit, "block_size": tile, "activation_block": bank.activation_block}
    out = kernels.packed_experts(x, indices, weights, *bank.bank, **settings)
    assert error(out, expected) < 2e-6
    for found, reference in zip(torch.autograd.grad(out, (x, weights), grad), wanted, strict=True):
        assert error(found, reference) < 2e-6


# ---- the bank on a device ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("expert_dtype", "scale_dtype"), [("fp4", torch.float8_e8m0fnu), ("fp8", torch.float32)])
def test_a_moved_bank_is_the_same_bank(expert_dtype, scale_dtype, device):
    bank, _ = make_bank(expert_dtype, scale_dtype=scale_dtype)
    before = {name: t.clone() for name, t in bank.state_dict().items()}
    indices, weights = make_routing(4, device)
    x = random(4, HIDDEN, device=device)
    expected = bank(x, indices, weights)
    bank.move_to(device)
    assert torch.equal(bank(x, indices, weights), expected)  # without kernels: the reference maths
    after = bank.state_dict()
    assert list(after) == list(before)
    for name, value in before.items():
        assert after[name].dtype == value.dtype and after[name].device.type == device.type
        assert torch.equal(after[name].cpu().view(torch.uint8), value.view(torch.uint8))
    # What is loaded later reaches the stacks, and copies share them.
    other = {name: value.flip(0) if name.endswith("weight") else value for name, value in before.items()}
    copied = copy.deepcopy(bank)
    bank.load_state_dict(other)
    assert copied.bank is bank.bank
    up = bank.bank.gate_up[2, WIDTH:].cpu()
    assert torch.equal(up.view(torch.uint8), other["2.up_proj.weight"].view(torch.uint8))
    with pytest.raises(ValueError, match="expected"):
        bank.assign("0.gate_proj.weight", torch.zeros(2, 2))


def test_the_bank_uses_the_kernel(device, watched):
    bank, _ = make_bank()
    indices, weights = make_routing(1, device)
    x = random(1, HIDDEN, device=device)
    expected = bank(x.double(), indices, weights.double())
    bank.kernels, calls = watched("packed_experts")
    bank(x, indices, weights)
    bank.move_to(device)
    bank(x, indices, weights, adapt=lambda expert, products: products)
    assert not calls  # on the host, or with adapters: the reference
    assert error(bank(x, indices, weights), expected) < 2e-6 and len(calls) == 1
    bank.quantize_activations = False
    bank(x, indices, weights)
    assert calls[1]["activation_block"] is None


class Model(ExpertPlacementMixin, torch.nn.Module):
    def __init__(self, *devices):
        super().__init__()
        self.banks = torch.nn.ModuleList(make_bank()[0] for _ in devices)
        for bank, name in zip(self.banks, devices, strict=True):
            del bank.weight
            bank.weight = SimpleNamespace(device=torch.device(name))


def test_banks_follow_their_layers_within_a_budget(monkeypatch):
    model, moved = Model("cuda:0", "cuda:0", "cuda:1", "cpu"), []

    def move(bank, device):
        bank.__dict__["bank"] = ()
        moved.append(str(device))

    monkeypatch.setattr(Dsv4PackedExperts, "move_to", move)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (size * 3 // 2, size * 4))
    for held in ("memory_reserved", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, held, lambda device: 0)
    size = bank_bytes(model.banks[0])
    with pytest.raises(ValueError, match=f"experts need {2 * size} bytes of cuda:0, which has {size * 3 // 2} free"):
        model.place_experts()
    assert not moved
    assert model.place_experts(max_memory=size) == ["banks.0", "banks.2"] and moved == ["cuda:0", "cuda:1"]
    assert model.place_experts(max_memory=size) == []  # what lies there counts
    assert model.place_experts() == ["banks.1"]


@pytest.mark.parametrize(("devices", "found"), [(["cpu"], "banks.0 is on cpu"), ([], "Model has no packed experts")])
def test_a_model_without_a_place_for_experts_says_so(devices, found):
    with pytest.raises(ValueError, match=f"{found}; accepted: a packed model with layers on accelerators"):
        Model(*devices).place_experts()
