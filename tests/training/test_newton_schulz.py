"""Newton–Schulz and the row splits, against stored cases and against the scalar map of the singular values."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modeling_dsv4.training.newton_schulz import (
    HYBRID_COEFFICIENTS,
    full_float32_products,
    newton_schulz,
    newton_schulz_flops,
    shape_factor,
    split_blocks,
)

from .goldens import cases, manifest, relative_error, tensor

TOLERANCES = manifest()["tolerances"]


def coefficients(case):
    return HYBRID_COEFFICIENTS if case["coeffs"].startswith("8x") else ((3.4445, -4.775, 2.0315),) * 5


@pytest.mark.parametrize("case", cases("newton_schulz"), ids=lambda c: c["id"])
def test_stored_cases(case):
    x, y = tensor(case, "x"), tensor(case, "y")
    deficient = case["id"] == "ns/rank3"
    steps = coefficients(case)
    assert relative_error(newton_schulz(x, steps), y) <= (1e-7 if deficient else TOLERANCES["float64"]["rel_fro"])
    single = newton_schulz(x.float(), steps)
    assert relative_error(single, y) <= (1e-2 if deficient else TOLERANCES["float32"]["rel_fro"])
    if case["id"] not in TOLERANCES["bf16_newton_schulz"]["skip"]:
        half = newton_schulz(x.float(), steps, dtype=torch.bfloat16)
        assert half.dtype == torch.bfloat16
        assert relative_error(half, y) <= TOLERANCES["bf16_newton_schulz"]["rel_fro"]


def singular_value_map(x, steps):
    """The same by an SVD: the iteration is an odd polynomial of each singular value and leaves the vectors alone."""
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    s = s / s.norm()
    for a, b, c in steps:
        s = a * s + b * s**3 + c * s**5
    return u @ torch.diag(s) @ v


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 14), st.integers(1, 14), st.integers(0, 10**6), st.integers(-9, 9))
def test_is_a_map_of_the_singular_values(rows, cols, seed, exponent):
    x = torch.randn(rows, cols, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 10.0**exponent
    expected = singular_value_map(x, HYBRID_COEFFICIENTS)
    assert relative_error(newton_schulz(x), expected) < 1e-7


def test_input_is_left_alone_and_stacks_equal_single_matrices():
    stack = torch.randn(3, 9, 5, generator=torch.Generator().manual_seed(1))
    before = stack.clone()
    together = newton_schulz(stack)
    assert torch.equal(stack, before)
    for one, matrix in zip(together, stack, strict=True):
        assert relative_error(one, newton_schulz(matrix)) < 1e-6


@pytest.mark.parametrize("scale", [1e-30, 1e-15, 1e15])
def test_magnitude_does_not_matter_in_float32_but_the_floor_does(scale):
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(2))
    expected = newton_schulz(x)
    assert relative_error(newton_schulz(x * scale, eps=1e-38), expected) < 1e-5
    if scale == 1e-30:
        # Below the floor the update shrinks, as the formula says: the singular values start at |U|_F / eps.
        floored = newton_schulz((x * scale).double(), eps=1e-20)
        assert floored.norm() < 1e-3


def test_zero_gives_zero_without_nan():
    assert torch.equal(newton_schulz(torch.zeros(4, 6)), torch.zeros(4, 6))


def test_bfloat16_is_wrong_on_rank_deficient_input_and_float32_is_not():
    # Why expert banks are worked on in float32 (ns_dtype="auto").
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(64, 4, generator=generator) @ torch.randn(4, 96, generator=generator)
    expected = newton_schulz(x.double())
    assert relative_error(newton_schulz(x), expected) < 1e-2
    assert relative_error(newton_schulz(x, dtype=torch.bfloat16), expected) > 0.5


def test_a_vector_is_refused():
    with pytest.raises(ValueError, match="matrix"):
        newton_schulz(torch.zeros(4))


@pytest.mark.parametrize(
    ("shape", "splits", "expected"),
    [
        ((6, 4), None, [(1, 6, 4)]),
        ((6, 4), (2, 2, 2), [(3, 2, 4)]),
        ((24, 4), (4, 4, 16), [(2, 4, 4), (1, 16, 4)]),
        ((3, 6, 4), None, [(3, 6, 4)]),
        ((3, 6, 4), (3, 3), [(6, 3, 4)]),
        ((3, 6, 4), (1, 1, 4), [(3, 1, 4), (3, 1, 4), (3, 4, 4)]),
    ],
)
def test_split_blocks_are_views_that_cover_everything_once(shape, splits, expected):
    tensor = torch.zeros(shape)
    views = split_blocks(tensor, splits)
    assert [tuple(view.shape) for view in views] == expected
    for view in views:
        view += 1
    assert torch.equal(tensor, torch.ones(shape))


def test_splits_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="add up to 6"):
        split_blocks(torch.zeros(6, 4), (4, 4))


def test_flops_and_shape_factor():
    assert newton_schulz_flops(512, 1280, 10) == 10 * (4 * 512**2 * 1280 + 2 * 512**3)
    assert newton_schulz_flops(1280, 512, 10) == newton_schulz_flops(512, 1280, 10)
    assert shape_factor(512, 1280) == 1280**0.5


def test_reduced_float32_products_are_switched_off_and_on_again():
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        with full_float32_products():
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
