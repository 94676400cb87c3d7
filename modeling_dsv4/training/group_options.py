"""Options of an optimizer group: which exist for each algorithm, their defaults, and what values are accepted.

Every value is a string, number, bool, None or tuple of those, so that `torch.load(weights_only=True)` reads them back.
"""

from __future__ import annotations

from typing import Any

import torch

from .newton_schulz import HYBRID_COEFFICIENTS, NORM_FLOOR, UPDATE_RMS
from .sinkhorn_update import EPS, ITERATIONS, MASK_THRESHOLD

NS_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
MOMENTUM_DTYPES = ("auto", "bfloat16", "float32", "float64")
MASTERS = (None, "auto", "stochastic")

_COMMON = {"weight_decay": None, "master": None}
# Defaults: V4 report §2.4, V4.1 §2.5. eps floors: far below any real value, still normal numbers in float32.
OPTIONS: dict[str, dict[str, Any]] = {
    "muon": {
        **_COMMON,
        "weight_decay": 0.1,
        "momentum": 0.95,
        "nesterov": True,
        "rms": UPDATE_RMS,
        "ns_coefficients": HYBRID_COEFFICIENTS,
        "ns_dtype": "auto",
        "row_splits": None,
        "eps": NORM_FLOOR,
        "momentum_dtype": "auto",
        "idle_threshold": None,
        "chunk_bytes": 2**30,
        "compile": False,
    },
    "sinkhorn": {
        **_COMMON,
        "weight_decay": 0.0,
        "momentum": 0.95,
        "nesterov": True,
        "rms": UPDATE_RMS,
        "sinkhorn_iters": ITERATIONS,
        "mask_threshold": MASK_THRESHOLD,
        "eps": EPS,
        "momentum_dtype": "auto",
        "rows": "all",
        "chunk_bytes": 2**30,
        "keep_bytes": 2**32,
        "compile": False,
    },
    "adamw": {**_COMMON, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-20},
}
# Keys that groups may carry beside the options: bookkeeping of ours, of torch and of the schedulers.
BOOKKEEPING = {"params", "names", "param_names", "algorithm", "lr", "lr_scale", "initial_lr", "role", "routing"}
ALL_OPTIONS = {key for options in OPTIONS.values() for key in options}


def complete_group(group: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Return the group with every option of its algorithm filled in and checked.

    Args:
        group (`dict`): a parameter group; `algorithm` may come from `defaults`.
        defaults (`dict`): what the optimizer was made with (`None` values do not count), over the table above.

    Raises:
        ValueError: for an unknown algorithm or a value outside what an option accepts.
        TypeError: for a key that is no option of any algorithm.
    """
    algorithm = group.get("algorithm") or defaults.get("algorithm")
    if algorithm not in OPTIONS:
        raise ValueError(
            f"group option `algorithm` must be one of {sorted(OPTIONS)}, got {algorithm!r}; "
            "build_param_groups(model) routes a model's parameters"
        )
    unknown = set(group) - BOOKKEEPING - ALL_OPTIONS
    if unknown:
        raise TypeError(f"unknown group options {sorted(unknown)}; {algorithm} accepts {sorted(OPTIONS[algorithm])}")
    full = {key: value for key, value in group.items() if key in BOOKKEEPING}
    full["algorithm"] = algorithm
    if full.get("lr") is None:
        full["lr"] = defaults["lr"] * full.get("lr_scale", 1.0)
    for key, value in OPTIONS[algorithm].items():
        if key in group:
            full[key] = group[key]
        else:
            full[key] = defaults[key] if defaults.get(key) is not None else value
    full["row_splits"] = tuple(full["row_splits"]) if full.get("row_splits") is not None else None
    if algorithm != "muon":
        del full["row_splits"]
    _check(full)
    return full


def _check(group: dict[str, Any]) -> None:
    def require(key: str, accepted: str, holds) -> None:
        if key in group and not holds(group[key]):
            raise ValueError(f"group option `{key}` must be {accepted}, got {group[key]!r}")

    require("lr", "a number >= 0", lambda v: float(v) >= 0)
    require("weight_decay", "a number >= 0", lambda v: v is not None and v >= 0)
    require("momentum", "in [0, 1)", lambda v: 0 <= v < 1)
    require("rms", "positive", lambda v: v > 0)
    require("eps", "positive", lambda v: v > 0)
    require("betas", "two numbers in [0, 1)", lambda v: len(v) == 2 and all(0 <= b < 1 for b in v))
    require("master", f"one of {MASTERS}", lambda v: v in MASTERS)
    require("momentum_dtype", f"one of {MOMENTUM_DTYPES}", lambda v: v in MOMENTUM_DTYPES)
    require("ns_dtype", f"'auto' or one of {sorted(NS_DTYPES)}", lambda v: v == "auto" or v in NS_DTYPES)
    require("ns_coefficients", "one triple a step", lambda v: len(v) > 0 and all(len(t) == 3 for t in v))
    require("row_splits", "positive rows", lambda v: v is None or (len(v) > 0 and all(int(r) > 0 for r in v)))
    require("sinkhorn_iters", "odd and positive (Algorithm 1)", lambda v: v >= 1 and v % 2 == 1)
    require("mask_threshold", ">= 0", lambda v: v >= 0)
    require("rows", "'all' or 'touched'", lambda v: v in ("all", "touched"))
    require("idle_threshold", "None or >= 0", lambda v: v is None or v >= 0)
    require("chunk_bytes", "positive", lambda v: v > 0)
    require("keep_bytes", ">= 0", lambda v: v >= 0)
    if "ns_coefficients" in group:
        group["ns_coefficients"] = tuple(tuple(float(x) for x in triple) for triple in group["ns_coefficients"])


def working_dtype(parameter: torch.Tensor) -> torch.dtype:
    """Return the dtype of the update's arithmetic: float64 for float64 parameters, else float32."""
    return torch.promote_types(parameter.dtype, torch.float32)


def newton_schulz_dtype(group: dict[str, Any], parameter: torch.Tensor) -> torch.dtype:
    """Return the dtype of the matrix products for a parameter.

    `auto` is float32 on CPU and for expert banks (three dimensions: few tokens an expert make rank-deficient gradients,
    where bfloat16 is wrong), float64 for float64 parameters, bfloat16 elsewhere.
    """
    if group["ns_dtype"] != "auto":
        return NS_DTYPES[group["ns_dtype"]]
    if parameter.dtype == torch.float64:
        return torch.float64
    return torch.float32 if parameter.device.type == "cpu" or parameter.ndim == 3 else torch.bfloat16


def momentum_dtype(group: dict[str, Any], parameter: torch.Tensor) -> torch.dtype:
    """Return the dtype of the momentum buffer; `auto` is the working dtype."""
    name = group["momentum_dtype"]
    return working_dtype(parameter) if name == "auto" else getattr(torch, name)
