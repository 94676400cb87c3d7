"""One step of training the six layers on a GPU, with kernels and without: time of its parts, and memory.

pytest tests/triton_kernels/test_training_step.py --run-benchmark -m "benchmark and gpu" -s --benchmark-out DIR
"""

import gc
import json

import pytest
import torch

from modeling_dsv4 import kernel_seam
from modeling_dsv4.training import Dsv4Optimizer, build_param_groups, lora_layers

from .six_layers import six_layers
from .timing import milliseconds

pytestmark = [
    pytest.mark.benchmark,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TOKENS = 2048
BFLOAT16 = {"ns_dtype": "bfloat16"}  # of expert banks, too, which are float32's by default
ATTENTION = ["q_a_proj", "q_b_proj", "kv_proj", "o_a_proj", "o_b_proj"]


def lora_model():
    """Adapters in every attention, over all packed weights."""
    peft = pytest.importorskip("peft")
    model = six_layers("cuda")
    return peft.get_peft_model(model, lora_layers(model, peft.LoraConfig(r=16, target_modules=ATTENTION)))


def full_model():
    """All weights in bfloat16, with 16 experts a layer."""
    return six_layers("cuda", packed=False, n_routed_experts=16)


def step_of(model, repeats, warmup):
    """Median milliseconds of forward, backward and update, and the peak memory in GiB."""
    optimizer, narrow = (
        Dsv4Optimizer(build_param_groups(model, lr=1e-4, report=False, muon=muon)) for muon in ({}, BFLOAT16)
    )
    ids = torch.randint(0, 1000, (1, TOKENS), device="cuda")
    torch.cuda.reset_peak_memory_stats()

    def gradients():
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

    def forward():
        with torch.enable_grad():
            return model(input_ids=ids, labels=ids, use_cache=False).loss

    parts = {"forward": forward, "forward and backward": gradients, "update": optimizer.step}
    times = {name: milliseconds(part, repeats, warmup) for name, part in parts.items()}
    changed = sum(p.grad is not None and bool(p.grad.any()) for p in model.parameters())
    assert changed > 0 and all(p.grad is None or bool(p.grad.isfinite().all()) for p in model.parameters())
    times["GiB"] = torch.cuda.max_memory_allocated() / 2**30
    return times | {"update in bfloat16": milliseconds(narrow.step, repeats, warmup)}


@pytest.mark.parametrize("make", [lora_model, full_model])
def test_training_step(make, monkeypatch, benchmark_out):
    torch.manual_seed(0)
    model, found = make().train(), {}
    for kernels in ("auto", "off"):
        if kernels == "off":  # of the model and of the optimizer; their steps take seconds
            monkeypatch.setattr(kernel_seam, "_is_known", lambda device: False)
        model.zero_grad()
        gc.collect()
        torch.cuda.empty_cache()
        try:
            found[kernels] = step_of(model, *((3, 1) if kernels == "auto" else (1, 0)))
        except torch.OutOfMemoryError:
            found[kernels] = {"out of memory": torch.cuda.max_memory_allocated() / 2**30}
        shown = ", ".join(f"{name} {value:.1f}" for name, value in found[kernels].items())
        print(f"\n{make.__name__}, {TOKENS} tokens, kernels {kernels}: {shown}", end="", flush=True)
    (benchmark_out / f"training_{make.__name__}.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    assert "GiB" in found["auto"]
