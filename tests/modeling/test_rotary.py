"""Rotary embedding: frequencies and YaRN against the contract's numbers, rotation against complex numbers."""

import math

import numpy as np
import pytest
import torch

from modeling_dsv4.rotary import rotary_frequencies, rotary_table, rotate
from tests.reference import attention

RELEASED_YARN = {"factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 65536}
SMALL_YARN = {"factor": 4, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 256}
ONE_ULP = 2.4e-7  # the oracle rounds every step to float32, the package once at the end


def _config(width, theta, compress_theta, yarn):
    return {
        "qk_rope_head_dim": width,
        "rope_theta": theta,
        "compress_rope_theta": compress_theta,
        "rope_scaling": yarn,
    }


@pytest.mark.parametrize(("width", "yarn"), [(64, RELEASED_YARN), (16, SMALL_YARN), (2, SMALL_YARN)])
def test_frequencies_equal_the_oracle(width, yarn):
    config = _config(width, 10000.0, 160000.0, yarn)
    plain, scaled = rotary_frequencies(width, 10000.0), rotary_frequencies(width, 160000.0, yarn)
    assert plain.dtype == scaled.dtype == torch.float32 and len(plain) == width // 2
    np.testing.assert_allclose(plain, attention.frequencies(config, False), rtol=ONE_ULP)
    np.testing.assert_allclose(scaled, attention.frequencies(config, True), rtol=ONE_ULP)


def test_released_yarn_blends_pairs_15_to_25():
    # Contract section 5: correction dims 15.453 and 24.708; f / 16 above, f below, a straight ramp between.
    plain, scaled = rotary_frequencies(64, 160000.0).double(), rotary_frequencies(64, 160000.0, RELEASED_YARN).double()
    ratio = (scaled / plain).numpy()
    ramp = np.clip((np.arange(32) - 15) / 10, 0, 1)
    np.testing.assert_allclose(ratio, ramp / 16 + 1 - ramp, rtol=2e-7)
    assert ratio[15] == 1 > ratio[16] and ratio[25] == 1 / 16 < ratio[24]


def test_the_two_bases_differ():
    plain, compressed = rotary_frequencies(64, 10000.0), rotary_frequencies(64, 160000.0)
    assert plain[0] == compressed[0] == 1
    assert (compressed[1:] < plain[1:]).all()
    assert math.isclose(float(plain[16]), 0.01, rel_tol=1e-7) and math.isclose(
        float(compressed[16]), 1 / 400, rel_tol=1e-7
    )


def test_tables_are_cosines_of_float32_products():
    positions = torch.tensor([[0, 1, 65535, 1048575]])
    frequencies = rotary_frequencies(64, 160000.0, RELEASED_YARN)
    cos, sin = rotary_table(positions, frequencies)
    assert cos.dtype == sin.dtype == torch.float32 and cos.shape == (1, 4, 32)
    for s, position in enumerate(positions[0].tolist()):
        for i, f in enumerate(frequencies.numpy()):
            angle = float(np.float32(position) * f)
            assert float(cos[0, s, i]) == float(np.float32(math.cos(angle)))
            assert float(sin[0, s, i]) == float(np.float32(math.sin(angle)))


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("shape", [(2, 5, 24), (2, 5, 3, 24), (1, 1, 8), (2, 5, 3, 8)])
def test_rotation_is_a_complex_product_of_adjacent_pairs(shape, inverse):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    positions = torch.randint(0, 500, shape[:2], generator=generator)
    frequencies = rotary_frequencies(8, 100.0)
    cos, sin = (t.double() for t in rotary_table(positions, frequencies))
    found = rotate(x, (cos, sin), inverse=inverse)
    for b in range(shape[0]):
        for s in range(shape[1]):
            for vector, result in zip(x[b, s].reshape(-1, shape[-1]), found[b, s].reshape(-1, shape[-1]), strict=True):
                turn = [complex(c, -i if inverse else i) for c, i in zip(cos[b, s], sin[b, s], strict=True)]
                tail = vector[-8:].tolist()
                expected = [complex(tail[2 * i], tail[2 * i + 1]) * turn[i] for i in range(4)]
                flat = [part for z in expected for part in (z.real, z.imag)]
                assert vector[:-8].tolist() == result[:-8].tolist()
                np.testing.assert_allclose(result[-8:], flat, rtol=1e-14)


def test_rotation_equals_the_oracle():
    frequencies = rotary_frequencies(16, 160000.0, SMALL_YARN)
    positions = torch.arange(40)[None]
    x = torch.randn(1, 40, 3, 32, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found = rotate(x, rotary_table(positions, frequencies))
    expected = attention.rotate_all(x[0].numpy(), range(40), frequencies.numpy())
    np.testing.assert_allclose(found[0], expected, atol=4e-7)  # the tables are float32


def test_inverse_undoes_and_scores_depend_on_distance():
    frequencies = rotary_frequencies(16, 10000.0)
    x = torch.randn(1, 1, 16, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    q, k = x, x.flip(-1)

    def at(vector, position):
        return rotate(vector, rotary_table(torch.tensor([[position]]), frequencies))

    back = rotate(at(x, 77), rotary_table(torch.tensor([[77]]), frequencies), inverse=True)
    np.testing.assert_allclose(back, x, atol=1e-6)
    near, far = (at(q, 9) * at(k, 4)).sum(), (at(q, 1009) * at(k, 1004)).sum()
    assert abs(near - far) < 1e-4 < abs(near - (at(q, 9) * at(k, 5)).sum())
    assert torch.equal(at(x, 0), x)


def test_one_table_row_serves_all_rows_and_bfloat16_is_cast_once():
    frequencies = rotary_frequencies(8, 10000.0)
    table = rotary_table(torch.arange(6)[None], frequencies)
    x = torch.randn(3, 6, 2, 8, generator=torch.Generator().manual_seed(4)).bfloat16()
    found = rotate(x, table)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, rotate(x.float(), table).bfloat16())
    assert torch.equal(found[1:2], rotate(x[1:2], table))


def test_gradient_of_the_rotation():
    table = tuple(t.double() for t in rotary_table(torch.arange(3)[None], rotary_frequencies(4, 100.0)))
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda v: rotate(v, table), x)
    assert torch.autograd.gradcheck(lambda v: rotate(v, table, inverse=True), x)
