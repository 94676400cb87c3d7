"""What `convert released` prints: a line for every format, whose normal error is computed here from the format."""

import json

import numpy as np
import pytest
import torch

from convert.released_report import FORMATS, ReleasedReport
from tests.reference import formats

# What of the layout each format does to float64 weights [rows, columns]; floats keep p significant bits.
ROUNDINGS = {"FP4": formats.round_mxfp4, "FP8": formats.round_fp8} | {
    name: lambda x, bits=bits: np.round(np.ldexp(np.frexp(x)[0], bits)) * np.ldexp(1.0, np.frexp(x)[1] - bits)
    for name, bits in (("BF16", 8), ("F16", 11), ("F32", 24))
}


@pytest.mark.parametrize(("title", "normal"), FORMATS.values(), ids=lambda value: str(value))
def test_the_normal_error_is_that_of_gaussian_weights_of_any_spread(title, normal):
    weights = np.random.default_rng(0).standard_normal((64, 1024))
    for spread in 0.02 * 2 ** np.linspace(0, 1, 8):  # power-of-two scales: an octave is all there is
        exact = spread * weights
        error = np.linalg.norm(ROUNDINGS[title](exact) - exact) / np.linalg.norm(exact)
        assert error == pytest.approx(normal, rel=0.05), spread


def report():
    """Two FP4 experts of which the second is far off, an exact FP8 matrix, a vector in BF16, files that are left."""
    found = ReleasedReport("src", kept=1, changed=["sinks"] * 40, left=["code.py", "training_args.bin"])
    found.add_error("experts.0.w1.weight", torch.int8, 0.01, 1.0)
    found.add_error("experts.1.w1.weight", torch.int8, 0.04, 0.5)
    found.add_error("experts.1.w1.weight", torch.int8, 0.05, 0.5)
    found.add_error("wkv.weight", torch.float8_e4m3fn, 0.0, 1.0)
    found.add_error("norm.weight", torch.bfloat16, 4e-6, 1.0)
    return found


def test_a_line_for_every_format_names_the_worst_tensor_and_what_is_normal():
    assert list(report().lines()) == [
        "kept                1 tensor, byte for byte",
        "stored as trained   40 tensors",
        "rounded, no loss    1 tensor",
        "rounded to FP4      2 tensors: relative error 0.2 (median), 0.3 at most, in experts.1.w1.weight; normal for FP4: 0.12",
        "rounded to BF16     1 tensor: relative error 0.002 (median), 0.002 at most, in norm.weight; normal for BF16: 0.0017",
        "                    (|written - source| / |source|; normal: of Gaussian weights. Every tensor: --json)",
        "left behind         2 files that are no part of the layout: code.py, training_args.bin",
    ]


def test_json_has_every_tensor():
    found = json.loads(json.dumps(report().to_dict()))
    assert found["rounded"]["experts.1.w1.weight"] == {"format": "FP4", "relative_error": pytest.approx(0.3)}
    assert found["rounded"]["wkv.weight"] == {"format": "FP8", "relative_error": 0.0}
    assert len(found["rounded"]) == 4 and len(found["changed"]) == 40 and found["left"] == report().left
