"""Six layers of the released widths on a GPU: decoding and where its time goes, prompts, Engram, beside the native V4.

pytest tests/triton_kernels/test_six_layers.py --run-benchmark -m "benchmark and gpu" -s --benchmark-out DIR
"""

import gc
import json
import time

import pytest
import torch

from modeling_dsv4 import Dsv4Cache
from modeling_dsv4.decode_graph import DecodeGraph

from .six_layers import engram_table, filled_cache, six_layers
from .timing import copy_rate, milliseconds

pytestmark = [
    pytest.mark.benchmark,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MILLION = 1 << 20
STEPS = 30
CHUNK = 4096
# Rows of a batch, and lengths of their prompts; the last ones of each do not fit.
NATIVE_LENGTHS = {1: (2048, 4096, 8192, 16384), 8: (2048, 4096), 64: (512, 1024, 2048)}
# A fiftieth of the released table, in one layer.
ENGRAM = {
    "engram_layer_ids": [1],
    "engram_num_embeddings": [8_000_000],
    "engram_vocab_size": 320_000,
    "engram_compressed_vocab_size": 129280,
}


@pytest.fixture(scope="module")
def model():
    yield six_layers("cuda")
    gc.collect()
    torch.cuda.empty_cache()


def step_of(run, cache, batch=1):
    """A function that decodes a step; every step sees other tokens."""
    return lambda: run(input_ids=torch.randint(0, 1000, (batch, 1), device="cuda"), cache=cache, logits_to_keep=1)


def keep(folder, name, found):
    (folder / f"{name}.json").write_text(json.dumps(found, indent=1), encoding="utf-8")


LINES = {
    "prompts": "six layers, 384 experts each, packed",
    "native_prompts": "native V4, six layers, 16 experts each, bfloat16",
}


def plot(folder):
    """Time and peak memory of a prompt against its length, of all that was measured into `folder`, as a picture."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 4), layout="constrained")
    axes[0].set(ylabel="seconds", yscale="log")
    axes[1].set(ylabel="peak GiB", ylim=(0, 80))
    for axis in axes:
        axis.set(xlabel="tokens of the prompt", xscale="log")
    for name in LINES:
        if (folder / f"{name}.json").exists():
            lengths, *values = zip(*json.loads((folder / f"{name}.json").read_text(encoding="utf-8")), strict=True)
            for axis, line in zip(axes, values, strict=True):
                axis.plot(lengths, line, marker="o", label=LINES[name])
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    figure.savefig(folder / "prompts.png", dpi=150)


@torch.no_grad()
@pytest.mark.parametrize("batch", [1, 8, 64])
def test_decoding(model, batch, benchmark_out):
    contexts = {1: (4096, 65536, MILLION), 8: (2048, 4096, 65536), 64: (1024, 4096)}[batch]
    found = {}
    for context in contexts:
        cache = filled_cache(model, context, context + 64, batch)
        found[context] = {"graph": milliseconds(step_of(DecodeGraph(model), cache, batch), STEPS, 4)}
        if context == 4096:
            cache = filled_cache(model, context, context + 64, batch)
            found[context]["eager"] = milliseconds(step_of(model, cache, batch), 10)
        if context == 4096 and batch < 64:
            model.set_kernels("off")
            cache = filled_cache(model, context, context + 64, batch)
            found[context]["reference"] = milliseconds(step_of(model, cache, batch), 3, 1)
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


def weight_bytes(model):
    """What a token must read at least: all matrices but the experts, and those of its six experts."""
    text = model.config.get_text_config()
    dense = sum(p.nbytes for name, p in model.named_parameters() if "embed_tokens" not in name)
    bank = model.model.layers[0].mlp.experts.bank
    experts = sum(t.nbytes for t in bank) * text.num_hidden_layers * text.num_experts_per_tok // text.n_routed_experts
    return {"dense": dense, "experts": experts}


@torch.no_grad()
@pytest.mark.parametrize("context", [4096, MILLION])
def test_breakdown_of_a_step(model, context, benchmark_out):
    """Where the time of a replayed step goes: kernels by name, gaps between them, and the bytes it cannot avoid."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    cache = filled_cache(model, context, context + 64)
    step = step_of(DecodeGraph(model), cache)
    total = 1e3 * milliseconds(step, STEPS, 4)
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(10):
            step()
        torch.cuda.synchronize()
    kernels = {}
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kernels.setdefault(event.name, []).append(event.time_range.elapsed_us())
    kernels = {name: {"launches": len(times) / 10, "us": sum(times) / 10} for name, times in kernels.items()}
    busy, launches = (sum(kernel[key] for kernel in kernels.values()) for key in ("us", "launches"))
    read, rate = weight_bytes(model), copy_rate()
    bound = 1e3 * sum(read.values()) / rate
    print(
        f"\ncontext {context}: {total:.0f} us; kernels {busy:.0f}, gaps {total - busy:.0f}, {launches:.0f} launches; ",
        end="",
    )
    print(f"weights {read['dense'] / 1e9:.3f} + {read['experts'] / 1e9:.3f} GB (experts): {bound:.0f} us")
    for name, kernel in sorted(kernels.items(), key=lambda item: -item[1]["us"])[:40]:
        print(f"  {name[:70]:<70}{kernel['launches']:>7.1f}{kernel['us']:>9.1f} us")
    keep(benchmark_out, f"breakdown_{context}", {"us": total, "bound": bound, "bytes": read, "kernels": kernels})
    assert 0 < busy and bound < total


@torch.no_grad()
def test_engram_beside_the_first_block(benchmark_out):
    """A table on the device, in pinned memory and in plain host memory, whose reads run beside the first block."""
    model, found = six_layers("cuda", **ENGRAM), {}
    memory = model.model.layers[1].engram
    for place in ("device", "pinned", "host"):
        engram_table(memory.embedding, place)
        prompt = torch.randint(0, 1000, (1, CHUNK), device="cuda")
        rows = torch.randint(ENGRAM["engram_num_embeddings"][0], (1, CHUNK, 24), device="cuda")
        table, times = memory.embedding, {}
        for name, some in (("gather of a token", rows[:, :1]), ("gather of a chunk", rows)):
            times[name] = milliseconds(lambda rows=some, table=table: table.gather(rows, torch.bfloat16), 5)
        cache = Dsv4Cache(model.config, max_length=16 * CHUNK)
        waited = memory.embedding.statistics.wait
        times["chunk"] = milliseconds(lambda c=cache, p=prompt: model(p, cache=c, logits_to_keep=1), 5)
        times["waited in a chunk"] = 1e3 * (memory.embedding.statistics.wait - waited) / 8
        times["step"] = milliseconds(step_of(DecodeGraph(model), cache), 10)
        found[place] = times
        shown = ", ".join(f"{name} {ms:.3f}" for name, ms in times.items())
        print(f"\nEngram table, {place}: ms of a {shown}", end="", flush=True)
    keep(benchmark_out, "engram", found)


@torch.no_grad()
def test_longest_prompt(model, benchmark_out):
    """A prompt of a million tokens in chunks; the plot shows time and memory on the way."""

    def chunk(cache):
        ids = torch.randint(0, model.vocab_size, (1, CHUNK), device="cuda")
        return model(ids, cache=cache, logits_to_keep=1, decoder_replay="exact").logits

    cache = Dsv4Cache(model.config, max_length=32 * CHUNK)
    for _ in range(32):  # compiles the kernels, of which some are for long contexts
        chunk(cache)
    cache, points = Dsv4Cache(model.config, max_length=MILLION + 64), []
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = time.monotonic()
    for first in range(0, MILLION, CHUNK):
        logits = chunk(cache)
        length = first + CHUNK
        if length & (length - 1) == 0:
            torch.cuda.synchronize()
            point = length, time.monotonic() - start, torch.cuda.max_memory_allocated() / 2**30
            points.append(point)
            print("\nprompt of {:>8} tokens: {:>7.2f} s, peak {:.1f} GiB".format(*point), end="", flush=True)
    print(f"; cache {sum(cache.nbytes().values()) / 1e9:.3f} GB")
    assert bool(logits.isfinite().all()) and cache.columns == MILLION
    keep(benchmark_out, "prompts", points)
    plot(benchmark_out)


def test_native_v4_beside_it(benchmark_out):
    """transformers' own class at V4's widths: six layers, 16 experts, bfloat16."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    gc.collect()
    torch.cuda.empty_cache()
    others = torch.cuda.memory_allocated()
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
    for batch, lengths in NATIVE_LENGTHS.items():
        for length in lengths:
            name = f"{batch} x {length}"
            try:
                found[name] = _time_native(native, batch, length, others)
            except torch.OutOfMemoryError:
                found[name] = "out of memory"
            print(f"\nnative V4, {name} tokens: {found[name]}", end="", flush=True)
            torch.cuda.empty_cache()
    keep(benchmark_out, "native_v4", found)
    rows = [(length, found[f"1 x {length}"]) for length in NATIVE_LENGTHS[1]]
    points = [(length, row["prefill_s"], row["peak"]) for length, row in rows if isinstance(row, dict)]
    keep(benchmark_out, "native_prompts", points)
    plot(benchmark_out)
    assert found["1 x 2048"] != "out of memory"


@torch.no_grad()
def _time_native(native, batch, length, others):
    """Seconds of a prompt, milliseconds of a step behind it, and the peak in GiB above what `others` hold."""
    ids = torch.randint(0, native.config.vocab_size, (batch, length), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        torch.cuda.synchronize()
        start = time.monotonic()
        cache = native(ids, use_cache=True, logits_to_keep=1).past_key_values
        torch.cuda.synchronize()
    prefill = time.monotonic() - start
    step = milliseconds(lambda: native(ids[:, :1], past_key_values=cache, use_cache=True), 10)
    return {"prefill_s": prefill, "step_ms": step, "peak": (torch.cuda.max_memory_allocated() - others) / 2**30}
