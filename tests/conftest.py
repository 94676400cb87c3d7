"""Shared pytest options: `--run-benchmark` turns the timed comparisons on."""

import gc
import os
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    # Kernels run under Triton's interpreter, which must be chosen before anything imports triton.
    os.environ["TRITON_INTERPRET"] = "1"

# What is imported and collected stays, and the collector would walk all of it at each of its turns. It then takes fewer.
gc.disable()


def pytest_collection_finish():
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    gc.enable()


def pytest_addoption(parser):
    parser.addoption("--run-benchmark", action="store_true", default=False, help="run the tests marked `benchmark`")
    parser.addoption("--benchmark-out", metavar="DIR", help="folder for the tables and plots of benchmarks")


@pytest.fixture(scope="session")
def benchmark_out(request, tmp_path_factory):
    """Folder for what a benchmark keeps: tables as JSON, plots."""
    given = request.config.getoption("--benchmark-out")
    folder = Path(given) if given else tmp_path_factory.mktemp("benchmarks")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def pytest_collection_modifyitems(config, items):
    if config.getoption("--run-benchmark"):
        return
    skip = pytest.mark.skip(reason="timed comparison: run with --run-benchmark -m benchmark")
    for item in items:
        if "benchmark" in item.keywords:
            item.add_marker(skip)
