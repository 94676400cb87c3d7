"""Shared pytest options: `--run-benchmark` turns the timed comparisons on."""

import pytest


def pytest_addoption(parser):
    parser.addoption("--run-benchmark", action="store_true", default=False, help="run the tests marked `benchmark`")


def pytest_collection_modifyitems(config, items):
    if config.getoption("--run-benchmark"):
        return
    skip = pytest.mark.skip(reason="timed comparison: run with --run-benchmark -m benchmark")
    for item in items:
        if "benchmark" in item.keywords:
            item.add_marker(skip)
