"""One table of all kernels on a GPU: time, bytes, operations, the bound at the rates of the same run, and their ratio.

    pytest tests/triton_kernels/test_benchmark.py --run-benchmark -m "benchmark and gpu" -s --benchmark-out DIR

Each `bench_*.py` beside this file gives cases `(name, kernel, eager, compiled, bytes, flops)`: functions without
arguments, the fewest bytes the work must move and its operations. The bound is the longer of bytes / copy rate and
operations / bfloat16 product rate.
"""

import gc
import importlib
import json
from pathlib import Path

import pytest
import torch

from .timing import copy_rate, milliseconds, product_rate

pytestmark = [
    pytest.mark.benchmark,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MODULES = sorted(path.stem for path in Path(__file__).parent.glob("bench_*.py"))


@pytest.fixture(scope="module")
def rates():
    copy, product = copy_rate(), product_rate()
    print(f"\ncopy {copy / 1e9:.2f} TB/s, bfloat16 products {product / 1e9:.0f} TFLOP/s")
    print(f"{'':44}{'kernel':>9}{'eager':>9}{'compiled':>9}  ms {'MB':>9}{'GFLOP':>9}{'bound':>9}{'ratio':>7}")
    return copy, product


def timed(function):
    if function is None:
        return None
    try:
        return milliseconds(function)
    except (torch.OutOfMemoryError, RuntimeError) as error:  # the reference may not fit where the kernel does
        torch.cuda.empty_cache()
        return "memory" if isinstance(error, torch.OutOfMemoryError) else "error"


@pytest.mark.parametrize("module", MODULES)
def test_kernels(module, rates, benchmark_out):
    rows = []
    for name, kernel, eager, compiled, moved, flops in importlib.import_module(f"{__package__}.{module}").cases():
        times = {"kernel": milliseconds(kernel), "eager": timed(eager), "compiled": timed(compiled)}
        bound = max(moved / rates[0], flops / rates[1])
        rows.append({"name": name, **times, "bytes": moved, "flops": flops, "bound": bound})
        shown = "".join(f"{t:>9.3f}" if isinstance(t, float) else f"{t or '-':>9}" for t in times.values())
        ratio = times["kernel"] / bound
        print(f"{name:<44}{shown}     {moved / 1e6:>9.1f}{flops / 1e9:>9.1f}{bound:>9.4f}{ratio:>7.2f}", flush=True)
        del kernel, eager, compiled
        gc.collect()
        torch.cuda.empty_cache()
    (benchmark_out / f"{module}.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    assert rows
