"""`Dsv4Optimizer`: its state, saved and resumed, and the memory of a step."""

import copy
import io
import pickle

import pytest
import torch

from modeling_dsv4.training import Dsv4Optimizer, build_param_groups
from tests.memory import allocations

from .standin import set_gradients, snapshot, tiny_optimizer


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {}),
        (torch.bfloat16, {}),
        (torch.bfloat16, {"master": "auto"}),
        (torch.bfloat16, {"master": "stochastic"}),
        (torch.float32, {"momentum_dtype": "bfloat16"}),
        (torch.float32, {"rows": "touched", "idle_threshold": 0.1}),
    ],
    ids=str,
)
def test_a_resumed_run_equals_the_straight_one_bitwise(dtype, options):
    straight, optimizer = tiny_optimizer(dtype, **options)
    for step in range(3):
        set_gradients(straight, step)
        optimizer.step()
    file = io.BytesIO()
    torch.save({"model": straight.state_dict(), "optimizer": optimizer.state_dict()}, file)
    for step in range(3, 6):
        set_gradients(straight, step)
        optimizer.step()
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed, other = tiny_optimizer(dtype, **options)
    resumed.load_state_dict(saved["model"])
    other.load_state_dict(saved["optimizer"])
    for step in range(3, 6):
        set_gradients(resumed, step)
        other.step()
    for (name, p), q in zip(straight.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(p, q), name
        for key, value in optimizer.state[p].items():
            assert value.dtype == other.state[q][key].dtype and torch.equal(value, other.state[q][key]), (name, key)
    if dtype == torch.bfloat16:
        assert all(v.dtype != torch.bfloat16 for s in optimizer.state.values() for v in s.values())


def test_loading_copies_so_that_both_optimizers_may_go_on():
    model, optimizer = tiny_optimizer()
    set_gradients(model, 0)
    optimizer.step()
    other_model, other = tiny_optimizer()
    other.load_state_dict(optimizer.state_dict())
    before = copy.deepcopy(optimizer.state_dict()["state"])
    set_gradients(other_model, 1)
    other.step()
    after = optimizer.state_dict()["state"]
    assert all(torch.equal(after[i][k], before[i][k]) for i in before for k in before[i])


def test_another_routing_is_refused_with_the_difference():
    model, optimizer = tiny_optimizer()
    other_model, _ = tiny_optimizer()
    groups = build_param_groups(other_model, report=False, rules={r"q_b_proj\.weight$": {"row_splits": None}})
    other = Dsv4Optimizer(groups, lr=1e-3)
    with pytest.raises(
        ValueError, match=r"(?s)another routing.*q_b_proj\.weight: saved muon, row_splits \(8, 8, 8, 8\)"
    ):
        other.load_state_dict(optimizer.state_dict())


def test_pickled_and_copied_optimizers_go_on_alike():
    model, optimizer = tiny_optimizer()
    set_gradients(model, 0)
    optimizer.step()
    pair = pickle.loads(pickle.dumps((model, optimizer)))
    for m, o in ((model, optimizer), pair):
        set_gradients(m, 1)
        o.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), pair[0].parameters(), strict=True))


def test_a_dry_step_makes_all_state_and_moves_nothing():
    # What torch.distributed.checkpoint does before it reads into an optimizer.
    model, optimizer = tiny_optimizer()
    before = snapshot(model)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert len(optimizer.state) == len(before)
    assert all(v.isfinite().all() for state in optimizer.state.values() for v in state.values())


def test_group_values_are_plain_and_schedulers_keep_the_ratios():
    _, optimizer = tiny_optimizer()
    allowed = (str, int, float, bool, tuple, list, type(None))
    for group in optimizer.param_groups:
        for key, value in group.items():
            assert key == "params" or isinstance(value, allowed), (key, value)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    optimizer.step()
    scheduler.step()
    rates = {group["role"]: group["lr"] for group in optimizer.param_groups}
    assert rates == pytest.approx({"text": 5e-4, "vision": 5e-5})


# -- memory and compilation -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ns_dtype", ["float32", "bfloat16"])
def test_a_step_on_an_expert_bank_needs_no_more_than_its_chunk(dtype, ns_dtype):
    p = torch.nn.Parameter(torch.randn(24, 64, 96).to(dtype))
    chunk = 2**18
    optimizer = Dsv4Optimizer([p], algorithm="muon", row_splits=(32, 32), ns_dtype=ns_dtype, chunk_bytes=chunk)
    p.grad = torch.randn(24, 64, 96).to(dtype)
    optimizer.step()
    extra = allocations(optimizer.step).peak
    assert 0.3 * chunk < extra <= 1.5 * chunk
    # Without the bound the same step needs several times as much.
    optimizer.param_groups[0]["chunk_bytes"] = 2**30
    assert allocations(optimizer.step).peak > 3 * chunk


def test_a_step_on_a_table_needs_its_row_block_and_a_few_row_vectors():
    p = torch.nn.Parameter(torch.randn(4096, 64))
    chunk = 2**18
    optimizer = Dsv4Optimizer([p], algorithm="sinkhorn", chunk_bytes=chunk, keep_bytes=0)
    p.grad = torch.randn(4096, 64)
    optimizer.step()
    assert allocations(optimizer.step).peak <= chunk + 6 * 4096 * 4
    optimizer.param_groups[0]["keep_bytes"] = 2**32
    assert allocations(optimizer.step).peak > 4096 * 64 * 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "shape", "options"),
    [
        ("muon", (48, 64), {"row_splits": (16,) * 3}),
        ("muon", (3, 20, 64), {}),
        ("sinkhorn", (100, 32), {}),
        ("sinkhorn", (100, 32), {"chunk_bytes": 4000, "keep_bytes": 0}),
    ],
)
def test_compiled_steps_equal_eager_ones(algorithm, shape, options):
    results = []
    for compiled in (False, True):
        generator = torch.Generator().manual_seed(0)
        p = torch.nn.Parameter(torch.randn(shape, generator=generator))
        optimizer = Dsv4Optimizer([p], lr=0.01, algorithm=algorithm, compile=compiled, **options)
        for _ in range(3):
            p.grad = torch.randn(shape, generator=generator)
            optimizer.step()
        results.append(p.detach())
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)
