"""Six layers of the released widths on a GPU: decoding, prompts up to a million tokens, beside transformers' native V4.

pytest tests/triton_kernels/test_six_layers.py --run-benchmark -m "benchmark and gpu" -s --benchmark-out DIR
"""

import gc
import json
import time

import pytest
import torch

from modeling_dsv4 import Dsv4Cache
from modeling_dsv4.decode_graph import DecodeGraph

from .six_layers import filled_cache, six_layers
from .test_benchmark import copy_rate, milliseconds

pytestmark = [
    pytest.mark.benchmark,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MILLION = 1 << 20
STEPS = 30
CHUNK = 4096


@pytest.fixture(scope="module")
def model():
    yield six_layers("cuda")
    gc.collect()
    torch.cuda.empty_cache()


def step_time(run, ids, cache):
    """Median milliseconds of a step of decoding; every step sees another token."""
    tokens = torch.randint(0, 1000, (ids.shape[0], STEPS + 8), device=ids.device)
    place = iter(range(STEPS + 8))
    return milliseconds(
        lambda: run(input_ids=tokens[:, [next(place)]], cache=cache, logits_to_keep=1), repeats=STEPS, warmup=4
    )


def plot(folder, points):
    """Time and peak memory of a prompt against its length, as a picture."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    lengths, seconds, memory = zip(*points, strict=True)
    for axis, values, label in zip(axes, (seconds, memory), ("seconds", "peak GiB"), strict=True):
        axis.plot(lengths, values, marker="o")
        axis.set(xlabel="tokens of the prompt", ylabel=label, xscale="log", ylim=(0, None))
    figure.savefig(folder / "prompts.png", dpi=150)


def keep(folder, name, found):
    (folder / f"{name}.json").write_text(json.dumps(found, indent=1), encoding="utf-8")


@torch.no_grad()
@pytest.mark.parametrize("batch", [1, 8, 64])
def test_decoding(model, batch, benchmark_out):
    contexts = {1: (4096, 65536, MILLION), 8: (4096, 65536), 64: (4096,)}[batch]
    found = {}
    for context in contexts:
        ids = torch.zeros(batch, 1, dtype=torch.long, device="cuda")
        cache = filled_cache(model, context, context + 64, batch)
        found[context] = {"graph": step_time(DecodeGraph(model), ids, cache)}
        if context == 4096:
            found[context]["eager"] = step_time(model, ids, filled_cache(model, context, context + 64, batch))
            model.set_kernels("off")
            found[context]["reference"] = step_time(model, ids, filled_cache(model, context, context + 64, batch))
            model.set_kernels("auto")
        shown = ", ".join(f"{name} {ms:.2f} ms" for name, ms in found[context].items())
        rate = 1e3 * batch / found[context]["graph"]
        print(f"\ndecoding, batch {batch}, context {context}: {shown}; {rate:.0f} tokens/s", end="", flush=True)
        del cache
        gc.collect()
        torch.cuda.empty_cache()
    keep(benchmark_out, f"decoding_{batch}", found)
    if batch == 1:
        ratio = found[MILLION]["graph"] / found[4096]["graph"]
        print(f"\n1M to 4K: {ratio:.2f} (bound 1.2); bounds 3 ms and 3.6 ms")
        assert found[4096]["graph"] <= 3 and found[MILLION]["graph"] <= 3.6 and ratio <= 1.2


@torch.no_grad()
def test_weight_bytes_of_a_step(model):
    """What a token must read at least: all matrices but the experts, and those of its six experts."""
    text = model.config.get_text_config()
    dense = sum(p.nbytes for name, p in model.named_parameters() if "embed_tokens" not in name)
    bank = model.model.layers[0].mlp.experts.bank
    experts = sum(t.nbytes for t in bank) * text.num_hidden_layers * text.num_experts_per_tok // text.n_routed_experts
    ms = (dense + experts) / copy_rate()
    print(f"\na step reads {(dense + experts) / 1e9:.3f} GB of weights ({experts / 1e9:.3f} of experts): {ms:.2f} ms")
    assert ms < 3


@torch.no_grad()
def test_longest_prompt(model, benchmark_out):
    """A prompt of a million tokens in chunks; the plot shows time and memory on the way."""
    cache, points = Dsv4Cache(model.config, max_length=MILLION + 64), []
    torch.cuda.reset_peak_memory_stats()
    start = time.monotonic()
    for first in range(0, MILLION, CHUNK):
        ids = torch.randint(0, model.vocab_size, (1, CHUNK), device="cuda")
        logits = model(ids, cache=cache, logits_to_keep=1, decoder_replay="exact").logits
        length = first + CHUNK
        if length & (length - 1) == 0:
            torch.cuda.synchronize()
            point = length, time.monotonic() - start, torch.cuda.max_memory_allocated() / 2**30
            points.append(point)
            print("\nprompt of {:>8} tokens: {:>7.2f} s, peak {:.1f} GiB".format(*point), end="", flush=True)
    print(f"; cache {sum(cache.nbytes().values()) / 1e9:.3f} GB")
    assert bool(logits.isfinite().all()) and cache.columns == MILLION
    keep(benchmark_out, "prompts", points)
    plot(benchmark_out, points)


def test_native_v4_beside_it(benchmark_out):
    """transformers' own class at V4's widths: six layers, 16 experts, bfloat16."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    gc.collect()
    torch.cuda.empty_cache()
    sparse, heavy = "compressed_sparse_attention", "heavily_compressed_attention"
    config = DeepseekV4Config(
        num_hidden_layers=6,
        n_routed_experts=16,
        vocab_size=32000,
        layer_types=["sliding_attention", "sliding_attention", sparse, heavy, sparse, heavy],
        mlp_layer_types=["moe"] * 6,
    )
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            native = DeepseekV4ForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(default)
    found = {}
    for length in (2048, 4096, 8192, 16384):
        ids = torch.randint(0, 32000, (1, length), device="cuda")
        torch.cuda.reset_peak_memory_stats()
        try:
            with torch.no_grad():
                for _ in range(2):
                    torch.cuda.synchronize()
                    start = time.monotonic()
                    output = native(ids, use_cache=True, logits_to_keep=1)
                    torch.cuda.synchronize()
                prefill = time.monotonic() - start
                cache = output.past_key_values
                step = milliseconds(lambda c=cache, i=ids: native(i[:, :1], past_key_values=c, use_cache=True), 10)
            found[length] = {"prefill_s": prefill, "step_ms": step, "peak": torch.cuda.max_memory_allocated() / 2**30}
            print(f"\nnative V4, {length} tokens: {found[length]}", end="", flush=True)
            del output, cache
        except torch.OutOfMemoryError:
            found[length] = "out of memory"
            print(f"\nnative V4, {length} tokens: out of memory")
            break
    keep(benchmark_out, "native_v4", found)
    assert found[2048] != "out of memory"
