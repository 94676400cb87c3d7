"""Time and memory of a training step: all weights or adapters, float or packed weights, with and without checkpointing."""

import time

import pytest
import torch
from peft import LoraConfig, get_peft_model

from convert.tiny import make_tiny
from modeling_dsv4 import Dsv4QuantizationConfig, Dsv41ForCausalLM
from modeling_dsv4.host_tensors import host_modules
from modeling_dsv4.training import Dsv4Optimizer, build_param_groups, lora_layers
from tests.modeling.tiny_model import some_ids

TARGETS = ["q_a_proj", "q_b_proj", "kv_proj", "o_a_proj", "o_b_proj", "gate_proj", "up_proj", "down_proj", "experts"]
KINDS = {"all weights, float": (False, False), "adapters, float": (False, True), "adapters, packed": (True, True)}
ROWS, TOKENS, STEPS = 2, 128, 2


def saved_bytes(run):
    """Bytes that a forward keeps for the backward pass, every storage once, parameters left out."""
    kept = {}

    def pack(tensor):
        if not isinstance(tensor, torch.nn.Parameter):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = run()
    return loss, sum(kept.values())


def weight_bytes(model):
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [m.host_tensor(n) for m in host_modules(model).values() for n in m.host_names()]
    return sum(t.nbytes for t in tensors)


def step_costs(folder, kind, checkpointing):
    """CPU seconds of a step, bytes of weights, bytes kept for the backward pass."""
    packed, adapters = KINDS[kind]
    options = Dsv4QuantizationConfig(dequantize=not packed)
    model = Dsv41ForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=options).train()
    held = weight_bytes(model)
    if adapters:
        model = get_peft_model(model, lora_layers(model, LoraConfig(r=8, target_modules=TARGETS)))
    if checkpointing:
        model.gradient_checkpointing_enable()
    optimizer = Dsv4Optimizer(build_param_groups(model, lr=1e-4, report=False))
    times = []
    for step in range(STEPS + 1):
        ids, start = some_ids(ROWS, TOKENS, seed=step), time.process_time()
        loss, kept = saved_bytes(lambda ids=ids: model(ids, labels=ids).loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.process_time() - start)
    return min(times[1:]), held, kept


@pytest.mark.benchmark
def test_costs_of_a_step(tmp_path, capsys):
    folder = make_tiny(tmp_path / "tiny", size="8MB", progress=False)
    found = {(kind, c): step_costs(folder, kind, c) for kind in KINDS for c in (False, True)}
    with capsys.disabled():
        print(f"\n{'':<22}{'checkpointing':>15}{'CPU s a step':>14}{'weights MB':>12}{'kept MB':>10}")
        for (kind, checkpointing), (seconds, held, kept) in found.items():
            print(f"{kind:<22}{checkpointing!s:>15}{seconds:>14.2f}{held / 1e6:>12.1f}{kept / 1e6:>10.1f}")
    for kind in KINDS:
        assert found[kind, True][2] < 0.3 * found[kind, False][2]
    assert found["adapters, packed", False][1] < 0.4 * found["adapters, float", False][1]
