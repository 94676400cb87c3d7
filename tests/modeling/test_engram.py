"""Engram memory: gate formula, packed and float tables, image positions."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from modeling_dsv4.engram import Dsv4EngramMemory, Dsv4EngramTable, Dsv4PackedEngramTable, engram_gate
from modeling_dsv4.fp_codecs import quantize_fp8
from tests.modeling.mechanism_models import random_values
from tests.reference import engram as oracle
from tests.reference import formats

ROWS, DIM = 40, 64


# ---- gate ----------------------------------------------------------------------------------------------------------------


def test_gate_equals_the_oracle():
    streams, keys, value = random_values(2, 5, 4, 6), random_values(2, 5, 4, 6, seed=2), random_values(2, 5, 6, seed=3)
    q_weight, k_weight = random_values(4, 6, seed=4), random_values(4, 6, seed=5)
    gate = engram_gate(streams, keys, q_weight, k_weight, eps=1e-20)
    assert gate.shape == (2, 5, 4)
    for b in range(2):
        for s in range(5):
            expected = oracle.gated(
                *(t.numpy() for t in (streams[b, s], keys[b, s], value[b, s], q_weight, k_weight)), 1e-20
            )
            found = streams[b, s] + gate[b, s][:, None] * value[b, s]
            np.testing.assert_allclose(found, expected, atol=1e-13)


@pytest.mark.parametrize(("dot", "expected"), [(4.0, 2.0), (-4.0, -2.0), (0.0, 1e-3), (-1e-9, -1e-3), (1e-9, 1e-3)])
def test_gate_is_the_sigmoid_of_a_signed_root_with_a_floor(dot, expected):
    # One channel of size 1: the norms are 1, and d is the product of the weights.
    one = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    found = engram_gate(one, one, torch.full((1, 1), dot, dtype=torch.float64), one[0, 0], eps=0.0)
    assert float(found) == pytest.approx(1 / (1 + np.exp(-expected)), rel=1e-12)


def test_gate_ignores_the_size_of_streams_and_keys():
    streams, keys, w = random_values(1, 3, 2, 8), random_values(1, 3, 2, 8, seed=2), torch.ones(2, 8)
    small = engram_gate(streams * 1e-6, keys * 1e5, w, w, eps=1e-20)
    # A mean square of 1e-12 beside an eps of 1e-20: eight digits are left. An eps of 1e-6 would leave none.
    np.testing.assert_allclose(small, engram_gate(streams, keys, w, w, eps=1e-20), rtol=1e-7)
    assert (engram_gate(streams * 1e-6, keys, w, w, eps=1e-6) - small).abs().max() > 0.05


def test_gate_is_float32_for_bfloat16():
    args = [random_values(2, 3, 4, 8, dtype=torch.bfloat16), random_values(2, 3, 4, 8, seed=2, dtype=torch.bfloat16)]
    weights = [random_values(4, 8, seed=3, dtype=torch.bfloat16), random_values(4, 8, seed=4, dtype=torch.bfloat16)]
    found = engram_gate(*args, *weights, eps=1e-20)
    assert found.dtype == torch.float32
    exact = engram_gate(*(t.double() for t in args + weights), eps=1e-20)
    np.testing.assert_allclose(found, exact, atol=1e-6)


def test_gradient_of_the_gate():
    args = [
        t.requires_grad_()
        for t in (random_values(1, 2, 2, 3), random_values(1, 2, 2, 3, seed=2), random_values(2, 3, seed=3))
    ]
    args.append(random_values(2, 3, seed=4).requires_grad_())
    assert torch.autograd.gradcheck(lambda *a: engram_gate(*a, eps=1e-20), args)


# ---- tables --------------------------------------------------------------------------------------------------------------


def _tables(scale_dtype=torch.float8_e8m0fnu, dim=DIM):
    """A packed table and the float table of the same values."""
    values, scale = quantize_fp8(random_values(ROWS, dim) * 2.0 ** torch.arange(ROWS).remainder(9)[:, None])
    packed = Dsv4PackedEngramTable(ROWS, dim, scale_dtype)
    packed.assign("weight", values)
    codes = formats.dequantize_fp8_rows
    padded = -(-dim // 32) * 32
    bytes_ = np.zeros((ROWS, padded), dtype=np.uint8)
    bytes_[:, :dim] = values.view(torch.uint8).numpy()
    exact = codes(bytes_, scale.numpy())[:, :dim]
    if scale_dtype == torch.float32:
        scale = torch.from_numpy(formats.decode_e8m0(scale.numpy())).float()
    packed.assign("weight_scale_inv", scale.view(scale_dtype))
    table = Dsv4EngramTable(ROWS, dim)
    table.weight.data.copy_(torch.from_numpy(exact))
    return packed, table


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("scale_dtype", [torch.float8_e8m0fnu, torch.float32])
@pytest.mark.parametrize("dim", [64, 32, 40])
def test_packed_gather_equals_the_float_table(dim, scale_dtype, dtype):
    packed, table = _tables(scale_dtype, dim)
    rows = torch.randint(0, ROWS, (2, 7, 6), generator=torch.Generator().manual_seed(1))
    found = packed.gather(rows, dtype)
    assert found.dtype == dtype and found.shape == (2, 7, 6, dim)
    assert torch.equal(found, table.gather(rows, dtype))
    assert torch.equal(found[0, 3, 2].double(), table.weight[rows[0, 3, 2]].detach().double())


def test_the_packed_table_is_no_parameter_and_is_never_cast():
    packed, _ = _tables()
    before = packed.host_tensor("weight").view(torch.uint8).clone()
    moved = torch.nn.Sequential(packed).to(torch.bfloat16)[0]
    assert not list(moved.parameters()) and set(moved.state_dict()) == {"weight", "weight_scale_inv"}
    assert torch.equal(moved.host_tensor("weight").view(torch.uint8), before)


# ---- memory --------------------------------------------------------------------------------------------------------------


def _memory(packed=False):
    config = SimpleNamespace(
        hc_mult=3, hidden_size=32, engram_num_embeddings=[7, ROWS], engram_layer_ids=[1, 4],
        engram_max_ngram_size=3, engram_n_heads=2, engram_head_dim=DIM, rms_norm_eps=1e-20,
    )  # fmt: skip
    memory = Dsv4EngramMemory(config, 4).double()
    table, plain = _tables()
    memory.embedding = table if packed else plain.double()
    memory.kv_proj.weight.data.copy_(random_values(4 * 32, 4 * DIM, seed=6, scale=0.05))
    memory.q_weight.data.copy_(random_values(3, 32, seed=7))
    memory.k_weight.data.copy_(random_values(3, 32, seed=8))
    return memory


@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_memory_equals_the_oracle(packed, rounds):
    memory, streams = _memory(packed), random_values(2, 4, 3, 32, seed=9)
    memory.kv_proj.quantize_activations = rounds
    rows = torch.randint(0, ROWS, (2, 4, 4), generator=torch.Generator().manual_seed(2))
    image = torch.tensor([[0, 1, 0, 0], [1, 1, 0, 0]]).bool()
    found = memory(streams, rows, image).detach()
    table = _tables()[1].weight.detach().double().numpy()
    for b in range(2):
        for s in range(4):
            looked_up = table[rows[b, s].numpy()].reshape(-1)
            looked_up = formats.round_fp8(looked_up) if rounds else looked_up
            projected = memory.kv_proj.weight.detach().numpy() @ looked_up
            weights = memory.q_weight.detach().numpy(), memory.k_weight.detach().numpy()
            own = streams[b, s].numpy()
            expected = (
                own
                if image[b, s]
                else oracle.gated(own, projected[:96].reshape(3, 32), projected[96:], *weights, 1e-20)
            )
            np.testing.assert_allclose(found[b, s], expected, atol=1e-10)


def test_image_positions_are_untouched_and_without_gradient():
    memory, streams = _memory(), random_values(1, 4, 3, 32, seed=9)
    rows = torch.randint(0, ROWS, (1, 4, 4), generator=torch.Generator().manual_seed(2))
    image = torch.tensor([[True, False, True, False]])
    found = memory(streams, rows, image)
    assert torch.equal(found[:, ::2], streams[:, ::2]) and not torch.equal(found[:, 1::2], streams[:, 1::2])
    found[:, ::2].sum().backward()
    assert not memory.kv_proj.weight.grad.any() and not memory.q_weight.grad.any()


def test_all_text_needs_no_mask():
    memory, streams = _memory(), random_values(1, 4, 3, 32, seed=9)
    rows = torch.zeros(1, 4, 4, dtype=torch.long)
    assert torch.equal(memory(streams, rows), memory(streams, rows, torch.zeros(1, 4, dtype=torch.bool)))


def test_the_sum_is_float32_and_cast_once():
    memory, streams = _memory().bfloat16(), random_values(1, 4, 3, 32, seed=9, dtype=torch.bfloat16)
    rows = torch.randint(0, ROWS, (1, 4, 4), generator=torch.Generator().manual_seed(2))
    projected = memory.kv_proj(memory.embedding.gather(rows, torch.bfloat16).flatten(-2))
    gate = engram_gate(
        streams, projected[..., :96].unflatten(-1, (3, 32)), memory.q_weight, memory.k_weight, eps=1e-20
    )
    expected = (streams.float() + gate[..., None] * projected[..., None, 96:].float()).bfloat16()
    assert torch.equal(memory(streams, rows), expected)
