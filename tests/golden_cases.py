"""Paths and readers of the golden data in `tests/golden` (its README says what each file holds).

Arrays come back as numpy; bfloat16 is widened to float32, which is exact. The comparison rules of the goldens
(`assert_case`) stand here once, so that the oracle and the model are held to the same bounds.
"""

import json
from functools import cache
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

GOLDEN = Path(__file__).parent / "golden"
CHECKPOINT_V41 = GOLDEN / "ckpt" / "v41_base_s11"
CHECKPOINT_V4 = GOLDEN / "ckpt" / "v4_base_s5"
CASES_V41 = GOLDEN / "v41" / "base_s11"
CASES_V4 = GOLDEN / "v4" / "base_s5"
DECODE_V41 = GOLDEN / "v41" / "base_s11_decode"
DSPARK_V41 = GOLDEN / "v41" / "base_s11_dspark"
GRADS_V41 = GOLDEN / "v41" / "base_s11_grads"
ENGRAM_REAL = GOLDEN / "v41" / "engram_real"
CODEC = GOLDEN / "codec"

# Largest absolute difference of a logit, of a residual stream value. float32 producers agree to 3.3e-5 (noqdq) and
# 9.4e-5 (qdq strict); a stream value is up to ten times a logit.
LOGIT_BOUND = {"noqdq": 1e-4, "qdq": 2e-4, "lin8": 2e-4}
STREAM_BOUND = {"noqdq": 1e-3, "qdq": 4e-3}
SHARED_INPUTS = ("input_ids", "attention_mask", "pixel_values", "image_grid_hws", "vision_token_types")


def load_json(path):
    """Return the parsed JSON file at `path`."""
    return json.loads(Path(path).read_text(encoding="utf-8"))


@cache
def manifest(folder=CASES_V41):
    """Return the manifest of one folder of cases; `["cases"][name]` describes a case."""
    return load_json(Path(folder) / "manifest.json")


def manifest_of_gradients(name):
    """Return the manifest of the gradients of one case: `["modes"][mode]` has the loss and the norms."""
    return load_json(GRADS_V41 / f"manifest_{name}.json")


def load_tensors(path):
    """Return every tensor of a safetensors file as a numpy array; bfloat16 becomes float32."""
    tensors = load_file(str(path))
    return {k: (v.float() if v.dtype == torch.bfloat16 else v).numpy() for k, v in tensors.items()}


def case_names(mode, folder=CASES_V41):
    """Return the names of the cases that have a file in this mode."""
    return [name for name, case in manifest(folder)["cases"].items() if mode in case.get("files", {})]


def load_case(name, mode="qdq", folder=CASES_V41):
    """Return the arrays of one V4.1 case, its inputs added from the qdq file where the mode's own file lacks them.

    `attention_mask` [B, S] is always present (all ones for unpadded cases).
    """
    files = manifest(folder)["cases"][name]["files"]
    arrays = load_tensors(Path(folder) / files[mode])
    if mode != "qdq":
        inputs = load_tensors(Path(folder) / files["qdq"])
        arrays |= {k: inputs[k] for k in SHARED_INPUTS if k in inputs and k not in arrays}
    arrays.setdefault("attention_mask", np.ones_like(arrays["input_ids"]))
    return arrays


def is_strict(name, mode, folder=CASES_V41):
    """Say whether the producers agree on this case without any rounding flip."""
    return manifest(folder)["cases"][name].get("strict", {}).get(mode, True)


def allowed_share(name, mode="qdq", folder=CASES_V41):
    """Return the share of positions that may differ by more than 1e-4: 0 if strict, else twice the recorded share."""
    if is_strict(name, mode, folder):
        return 0.0
    recorded = manifest(folder)["cases"][name]["agreement"][mode].values()
    return 2 * max(r["positions_over_1e_4"] / r["positions"] for r in recorded)


def differing_rows(expected, actual, mask):
    """Count the rows [..., k] of two index arrays that differ as sets, where `mask` [B, S] is true (-1 = no entry)."""

    def as_sets(indices):
        rows = np.asarray(indices).reshape(mask.size, -1)
        return [frozenset(int(i) for i in row if i >= 0) for row in rows]

    pairs = zip(as_sets(expected), as_sets(actual), mask.reshape(-1), strict=True)
    return sum(a != b for a, b, keep in pairs if keep)


def logit_errors(golden, logits):
    """Return the largest absolute logit difference at every compared real position [N]; `logits` is [B, S, vocab]."""
    batch, length = golden["input_ids"].shape
    positions = golden.get("logits_positions", np.arange(length))
    vocabulary = golden.get("logits_vocab", np.arange(golden["logits"].shape[-1]))
    difference = np.abs(np.asarray(logits)[:, positions][..., vocabulary] - golden["logits"]).max(-1)
    return difference[golden["attention_mask"].astype(bool)[:, positions]]


def compare_case(golden, output):
    """Compare what an implementation returned with a golden, real positions only.

    Args:
        golden (`dict`): from `load_case`.
        output (`dict`): `logits` [B, S, vocab] and, where known, `streams.i` [B, S, N, D], `pre_mix.i` [B, S, N],
            `final_hidden` [B, S, D], `topk.i` [B, S, k], `router_idx.i` and `router_w.i` [B, S, k],
            `engram_hash` [B, S, layers, heads].

    Returns:
        `dict`: `logits` [N] largest error per position; per other key the largest error (values) or the number of
        differing rows (`topk`, `router_idx`, `engram_hash`). A key that the output lacks is not compared.
    """
    mask = golden["attention_mask"].astype(bool)
    report = {"logits": logit_errors(golden, output["logits"])}
    for key, expected in golden.items():
        kind = key.split(".")[0]
        if key == "logits" or output.get(key) is None:
            continue
        actual = output[key]
        if kind in ("topk", "router_idx"):
            report[key] = differing_rows(expected, actual, mask)
        elif kind == "engram_hash":
            report[key] = int((expected != np.asarray(actual))[mask].any(axis=(-1, -2)).sum())
        elif kind in ("streams", "pre_mix", "final_hidden"):
            at = golden["positions"]
            report[key] = float(np.abs(expected - np.asarray(actual)[:, at])[mask[:, at]].max())
    return report


def assert_case(name, mode, golden, output):
    """Hold an output to the rule of its case and mode, and return the report of `compare_case`.

    noqdq, strict qdq, lin8: every logit within `LOGIT_BOUND`, streams within `STREAM_BOUND`, every index set equal.
    qdq that is not strict: the median position within 1e-5, the share of positions over 1e-4 within `allowed_share`.
    """
    report = compare_case(golden, output)
    errors = report["logits"]
    if report.get("engram_hash"):
        raise AssertionError(f"{name} {mode}: n-gram rows differ at {report['engram_hash']} positions")
    if not is_strict(name, mode):
        share = float((errors > 1e-4).mean())
        if np.median(errors) > 1e-5 or share > allowed_share(name, mode):
            raise AssertionError(f"{name} {mode}: median {np.median(errors):.1e}, share over 1e-4 {share:.3f}")
        return report
    if not errors.max() <= LOGIT_BOUND[mode]:
        raise AssertionError(f"{name} {mode}: logits differ by {errors.max():.2e}; report {_worst(report)}")
    for key, value in report.items():
        kind = key.split(".")[0]
        if kind in ("topk", "router_idx") and value:
            raise AssertionError(f"{name} {mode}: {key} differs in {value} rows")
        if kind in ("streams", "pre_mix", "final_hidden") and not value <= STREAM_BOUND[mode]:
            raise AssertionError(f"{name} {mode}: {key} differs by {value:.2e}")
    return report


def _worst(report):
    return {k: v for k, v in report.items() if k != "logits" and v and (isinstance(v, int) or v > 1e-5)}
