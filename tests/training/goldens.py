"""The stored cases: inputs and float64 results of an independent implementation of the rules."""

import functools
import json
from pathlib import Path

import torch
from safetensors.torch import load_file

DATA = Path(__file__).with_name("data")


@functools.lru_cache(maxsize=1)
def manifest() -> dict:
    return json.loads((DATA / "optim_goldens.json").read_text(encoding="utf-8"))


@functools.lru_cache(maxsize=1)
def _tensors() -> dict:
    return load_file(DATA / "optim_goldens.safetensors")


def cases(kind: str) -> list[dict]:
    return [case for case in manifest()["cases"] if case["kind"] == kind]


def tensor(case: dict, name: str) -> torch.Tensor:
    key = f"{case['id']}.{name}"
    return _tensors()[manifest()["same"].get(key, key)].clone()


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of the expected value; the norm itself where that is zero."""
    size = expected.double().norm().item()
    return (actual.double() - expected.double()).norm().item() / (size or 1.0)
