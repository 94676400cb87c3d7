"""The Sinkhorn-balanced update against Algorithm 1 written out line by line."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modeling_dsv4.training.sinkhorn_update import balance_scales, scaled_square, sinkhorn_balance

from .goldens import relative_error


def algorithm_1(update, iterations, tau, eps):
    """Lines 3-7 as they stand, on lists of float64 numbers."""
    rows = [[float(x) for x in row] for row in update.double()]
    m, n = len(rows), len(rows[0])
    rho = [sum(x * x for x in row) ** 0.5 for row in rows]
    mean = sum(rho) / m
    u = [[0.0] * n if rho[i] <= tau * mean else list(rows[i]) for i in range(m)]
    for k in range(1, iterations + 1):
        if k % 2:
            for i in range(m):
                norm = sum(x * x for x in u[i]) ** 0.5
                u[i] = [x / (norm + eps) for x in u[i]]
        else:
            for j in range(n):
                norm = sum(u[i][j] ** 2 for i in range(m)) ** 0.5
                for i in range(m):
                    u[i][j] /= norm + eps
    return torch.tensor(u, dtype=torch.float64) * n**0.5


def random_update(rows, cols, seed, skew=3.0):
    generator = torch.Generator().manual_seed(seed)
    scale = 10 ** (skew * (torch.rand(rows, 1, dtype=torch.float64, generator=generator) - 0.5))
    return torch.randn(rows, cols, dtype=torch.float64, generator=generator) * scale


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 12),
    st.integers(1, 9),
    st.integers(0, 10**6),
    st.sampled_from([1, 3, 5, 11]),
    st.sampled_from([0.0, 1e-3, 0.3]),
)
def test_equals_algorithm_1(rows, cols, seed, iterations, tau):
    update = random_update(rows, cols, seed)
    expected = algorithm_1(update, iterations, tau, 1e-20)
    actual = sinkhorn_balance(update, iterations=iterations, mask_threshold=tau)
    assert relative_error(actual, expected) < 1e-9
    single = sinkhorn_balance(update.float(), iterations=iterations, mask_threshold=tau)
    norms = update.norm(dim=1)
    if ((norms / (tau * norms.mean()) - 1).abs() > 1e-5).all() or tau == 0:
        assert relative_error(single, expected) < 1e-5


@pytest.mark.parametrize("block", [1, 3, 7])
@pytest.mark.parametrize("iterations", [1, 3, 11])
def test_row_blocks_change_nothing_kept_or_not(block, iterations):
    update = random_update(17, 6, 5)

    def scales(size, keep):
        asked = []

        def ask(i):
            asked.append(i)
            return scaled_square(update[i : i + size].clone())

        blocks = [functools.partial(ask, i) for i in range(0, 17, size)]
        result = balance_scales(blocks, 6, iterations=iterations, dtype=torch.float64, keep=keep)
        return *result, len(asked) / len(blocks)

    whole = scales(17, True)
    for keep in (True, False):
        r, c, times = scales(block, keep)
        assert relative_error(r, whole[0]) < 1e-12 and relative_error(c, whole[1]) < 1e-12
        assert times == (1 if keep or iterations == 1 else 2 + iterations // 2)


def test_kept_rows_have_rms_one_and_columns_are_balanced():
    update = random_update(200, 24, 7)
    balanced = sinkhorn_balance(update.float())
    torch.testing.assert_close(balanced.square().mean(1), torch.ones(200), atol=1e-5, rtol=0)
    columns = balanced.square().mean(0)
    assert (columns - 1).abs().max() < 0.05
    assert abs(balanced.square().sum().item() - 24 * 200) < 1e-1


def test_zero_rows_columns_and_matrices_stay_zero_in_float32():
    update = random_update(9, 5, 8).float()
    update[2] = 0
    update[:, 3] = 0
    balanced = sinkhorn_balance(update)
    assert balanced.isfinite().all()
    assert not balanced[2].any() and not balanced[:, 3].any()
    expected = algorithm_1(update, 11, 1e-3, 1e-20)
    assert relative_error(balanced, expected) < 1e-5
    assert not sinkhorn_balance(torch.zeros(4, 3)).any()


@pytest.mark.parametrize("scale", [1e-17, 1e-12, 1.0, 1e6])
def test_small_and_large_gradients_keep_their_squares_in_float32(scale):
    update = random_update(30, 8, 9, skew=1.0) * scale
    expected = algorithm_1(update, 11, 1e-3, 1e-20)
    assert relative_error(sinkhorn_balance(update.float()), expected) < 1e-4


def test_sums_over_row_shards_are_one_scalar_and_five_rows():
    update = random_update(12, 5, 10)
    calls = []

    def record(tensor):
        calls.append(tuple(tensor.shape))
        return tensor

    balance_scales([lambda: scaled_square(update.clone())], 5, dtype=torch.float64, sum_over_row_shards=record)
    assert calls == [()] + [(5,)] * 5


def test_even_iterations_and_vectors_are_refused():
    with pytest.raises(ValueError, match="odd"):
        sinkhorn_balance(torch.ones(3, 3), iterations=4)
    with pytest.raises(ValueError, match="two dimensions"):
        sinkhorn_balance(torch.ones(3))
