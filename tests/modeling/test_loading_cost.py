"""What loading costs: anonymous memory against its bound, bytes read, and time against reading the same bytes."""

import ctypes
import gc
import os
import re
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from convert import tiny
from modeling_dsv4 import Dsv4QuantizationConfig, Dsv41ForCausalLM

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/io"), reason="reads /proc, which Linux has")

IDS = torch.tensor([[20, 31, 44, 71, 90, 120, 133]])
DEQUANTIZE = Dsv4QuantizationConfig(dequantize=True)
# Python objects of one tensor (names, entry, parameter), and what a process allocates once.
OBJECT_BYTES, FIXED_BYTES = 6 << 10, 12 << 20


def proc(file, name):
    """One number of /proc/self, in bytes."""
    found = re.search(rf"^{name}:\s+(\d+)( kB)?", Path("/proc/self", file).read_text(), re.M)
    return int(found[1]) * (1024 if found[2] else 1)


@contextmanager
def memory_peaks():
    """Give a dictionary that holds, after the block, by how much anonymous and file memory grew at most."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = {name: proc("status", name) for name in ("RssAnon", "RssFile")}
    peaks, done = dict.fromkeys(before, 0), threading.Event()

    def watch():
        while not done.wait(0.001):
            for name, start in before.items():
                peaks[name] = max(peaks[name], proc("status", name) - start)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peaks
    finally:
        done.set()
        watcher.join()


def forget_pages(folder):
    """Let the next read of the files come from the disk."""
    for file in folder.glob("*.safetensors"):
        with open(file, "rb") as handle:
            os.fsync(handle.fileno())
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def folder_of(path, size, width, monkeypatch):
    """A random checkpoint whose matrices are `width` wide."""
    monkeypatch.setattr(tiny, "WIDTHS", (width,))
    return tiny.make_tiny(path, size=size, progress=False)


def load(folder, **options):
    return Dsv41ForCausalLM.from_pretrained(folder, **options)


def file_bytes(folder):
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    with pytest.MonkeyPatch.context() as monkeypatch:
        folder = folder_of(tmp_path_factory.mktemp("cost") / "ckpt", "60MB", 512, monkeypatch)
    load(folder)  # whatever a first load allocates once
    return folder


LOADS = {
    "packed": {},
    "float": {"dtype": torch.bfloat16, "quantization_config": DEQUANTIZE},
    "float on disk": {"dtype": torch.bfloat16, "quantization_config": DEQUANTIZE, "device_map": {"": "disk"}},
}


@pytest.mark.parametrize("kind", LOADS)
def test_anonymous_memory_is_what_must_be_anonymous_and_one_tensor(kind, folder, tmp_path):
    """Packed tensors stay in the mapped files; floats are made one at a time, where they belong."""
    options = LOADS[kind] | ({"offload_folder": str(tmp_path)} if "disk" in kind else {})
    with memory_peaks() as peaks:
        model = load(folder, **options)
    sizes = [tensor.nbytes for tensor in model.state_dict().values()]
    must_be = sum(sizes) if kind == "float" else 0
    # transformers' loop holds what it has just written to the disk while it makes the next one.
    one_tensor = max(sizes) * (2 if "disk" in kind else 1)
    bound = must_be + one_tensor + OBJECT_BYTES * len(sizes) + FIXED_BYTES
    print(f"\n{kind}: RssAnon +{peaks['RssAnon'] / 1e6:.0f} MB, bound {bound / 1e6:.0f} MB ({must_be / 1e6:.0f} must be), "
          f"{len(sizes)} tensors, largest {max(sizes) / 1e6:.1f} MB, files {file_bytes(folder) / 1e6:.0f} MB")  # fmt: skip
    assert peaks["RssAnon"] <= bound
    assert must_be or bound < file_bytes(folder)


def load_and_generate(folder, cache_size):
    """Load from cold files, generate 8 tokens, say what it cost, and return the peaks and the bytes read."""
    forget_pages(folder)
    start, read = time.perf_counter(), proc("io", "read_bytes")
    with memory_peaks() as peaks:
        model = load(folder, quantization_config=Dsv4QuantizationConfig(expert_cache_size=cache_size))
        loaded = time.perf_counter() - start
        tokens = model.generate(IDS, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    read = proc("io", "read_bytes") - read
    print(f"\n{file_bytes(folder) / 1e6:.0f} MB: load {loaded:.1f} s, with 8 tokens {time.perf_counter() - start:.1f} s, "
          f"read {read / 1e6:.0f} MB, RssAnon +{peaks['RssAnon'] / 1e6:.0f} MB, RssFile +{peaks['RssFile'] / 1e6:.0f} MB")  # fmt: skip
    assert tokens.shape == (1, IDS.shape[1] + 8)
    return peaks, read


def test_generating_keeps_within_the_budget_of_unpacked_experts(folder):
    budget = 4 << 20
    peaks, _ = load_and_generate(folder, budget)
    assert peaks["RssAnon"] <= budget + (96 << 20)


@pytest.mark.slow
def test_generating_from_2_gb_reads_what_is_routed_to(tmp_path, monkeypatch):
    """Two of 111 experts a token: neither memory nor disk sees the rest."""
    folder = folder_of(tmp_path / "ckpt", "2GB", 1536, monkeypatch)
    budget = 200 << 20
    peaks, read = load_and_generate(folder, budget)
    assert peaks["RssAnon"] <= budget + (300 << 20)
    assert max(read, peaks["RssFile"]) <= 0.7 * file_bytes(folder)


@pytest.mark.benchmark
def test_load_time_beside_reading_the_bytes_that_end_up_resident(tmp_path, monkeypatch):
    """Cold files of 4096-wide matrices, read once into fresh memory; the best of three turns."""
    folder = folder_of(tmp_path / "ckpt", "2GB", 4096, monkeypatch)

    def read_files():
        return [file.read_bytes() for file in folder.glob("*.safetensors")]

    def copied():
        return load(folder, disable_mmap=True)

    def mapped():
        return load(folder)

    times = {read_files: [], copied: [], mapped: []}
    for _ in range(3):
        for run, found in times.items():
            forget_pages(folder)
            start = time.perf_counter()
            kept = run()
            found.append(time.perf_counter() - start)
            del kept
            gc.collect()
    reading, copying, mapping = (min(found) for found in times.values())
    print(f"\n{file_bytes(folder) / 1e9:.2f} GB: read {reading:.2f} s, loaded into memory {copying:.2f} s "
          f"({copying / reading:.2f} x), mapped {mapping:.2f} s")  # fmt: skip
    assert copying <= 1.3 * reading and mapping < reading
