"""`Dsv4Optimizer` on plain tensors: stored cases, other optimizers where they coincide, state, options, gradients."""

import copy

import pytest
import torch

from modeling_dsv4.training import Dsv4Optimizer, newton_schulz

from .goldens import cases, manifest, relative_error, tensor
from .standin import set_gradients, snapshot, tiny_optimizer

TOLERANCES = manifest()["tolerances"]


def splits_of(case):
    if case["split"] is None:
        return None
    kind, value = case["split"]
    rows = tensor(case, "w0").shape[-2]
    return (rows // value,) * value if kind == "heads" else tuple(value)


def muon_for(case, parameter, **options):
    return Dsv4Optimizer(
        [parameter],
        algorithm="muon",
        momentum=case["mu"],
        nesterov=case["nesterov"],
        weight_decay=case["wd"],
        rms=case["gamma"],
        row_splits=splits_of(case),
        **options,
    )


def sinkhorn_for(case, parameter, **options):
    return Dsv4Optimizer(
        [parameter],
        algorithm="sinkhorn",
        momentum=case["beta"],
        rms=case["gamma"],
        sinkhorn_iters=case["K"],
        mask_threshold=case["tau"],
        eps=case["eps"],
        **options,
    )


def run_case(case, make, dtype, **options):
    """Return the optimizer and the relative error of the whole weight change."""
    start = tensor(case, "w0")
    parameter = torch.nn.Parameter(start.to(dtype, copy=True))
    first = parameter.detach().clone()
    optimizer = make(case, parameter, **options)
    for step, grad in enumerate(tensor(case, "grads")):
        optimizer.param_groups[0]["lr"] = case["lrs"][step] if "lrs" in case else case["lr"]
        parameter.grad = grad.to(dtype)
        optimizer.step()
    change = parameter.detach().double() - first.double()
    return optimizer, parameter, relative_error(change, tensor(case, "w") - start)


@pytest.mark.parametrize("chunk_bytes", [2**30, 400])
@pytest.mark.parametrize("case", cases("muon"), ids=lambda c: c["id"])
def test_stored_muon_cases(case, chunk_bytes):
    bounds = TOLERANCES["muon_weight_change"]
    optimizer, parameter, error = run_case(case, muon_for, torch.float64, ns_dtype="float64", chunk_bytes=chunk_bytes)
    assert error <= bounds["float64"]
    assert relative_error(optimizer.state[parameter]["momentum_buffer"], tensor(case, "m_ema")) <= 1e-12
    assert run_case(case, muon_for, torch.float32, chunk_bytes=chunk_bytes)[2] <= bounds["float32"]
    half = run_case(case, muon_for, torch.float32, ns_dtype="bfloat16", chunk_bytes=chunk_bytes)[2]
    assert half <= bounds["bf16_newton_schulz"]


@pytest.mark.parametrize(("chunk_bytes", "keep_bytes"), [(2**30, 2**32), (400, 2**32), (400, 0)])
@pytest.mark.parametrize("case", cases("sinkhorn"), ids=lambda c: c["id"])
def test_stored_sinkhorn_cases(case, chunk_bytes, keep_bytes):
    bounds = TOLERANCES["sinkhorn_weight_change"]
    bytes_ = {"chunk_bytes": chunk_bytes, "keep_bytes": keep_bytes}
    optimizer, parameter, error = run_case(case, sinkhorn_for, torch.float64, **bytes_)
    assert error <= bounds["float64"]
    assert relative_error(optimizer.state[parameter]["momentum_buffer"], tensor(case, "m")) <= 1e-12
    assert run_case(case, sinkhorn_for, torch.float32, **bytes_)[2] <= bounds["float32"]


@pytest.mark.parametrize("case", cases("sinkhorn"), ids=lambda c: c["id"])
def test_masked_rows_do_not_move(case):
    # Which rows move tells the mask, exactly, in float32 too; there is no decay in this rule.
    parameter = torch.nn.Parameter(tensor(case, "w0").float())
    optimizer = sinkhorn_for(case, parameter, lr=case["lr"])
    for grad, masked in zip(tensor(case, "grads"), tensor(case, "masked"), strict=True):
        before = parameter.detach().clone()
        parameter.grad = grad.float()
        optimizer.step()
        still = (parameter.detach() == before).all(1)
        assert torch.equal(still, masked.bool())


def test_a_bfloat16_update_stays_near_the_stored_case():
    # With beta = 0 the update is the gradient: rounding that is the only difference.
    (case,) = [c for c in cases("sinkhorn") if c["id"] == "sink/beta_0/K3"]
    parameter = torch.nn.Parameter(tensor(case, "w0").float())
    optimizer = sinkhorn_for(case, parameter, lr=case["lr"])
    for grad in tensor(case, "grads"):
        parameter.grad = grad.bfloat16().float()
        optimizer.step()
    change = parameter.detach().double() - tensor(case, "w0")
    bound = TOLERANCES["sinkhorn_weight_change"]["bf16_ghat_fp32_scales"]
    assert relative_error(change, tensor(case, "w") - tensor(case, "w0")) <= bound


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "options", [{}, {"master": "stochastic"}, {"rows": "touched", "idle_threshold": 0.1}], ids=str
)
def test_cuda_steps_equal_cpu_steps(options):
    dtype = torch.bfloat16 if "master" in options else torch.float32
    pairs = [tiny_optimizer(dtype, ns_dtype="float32", device=device, **options) for device in ("cpu", "cuda")]
    steps = 3
    for step in range(steps):
        for model, optimizer in pairs:
            set_gradients(model, step)
            optimizer.step()
    # Two devices round stochastically with different noise: each step may part them by one unit in the last place.
    rtol = steps * 2**-7 if "master" in options else 1e-4
    for (name, p), q in zip(pairs[0][0].named_parameters(), pairs[1][0].parameters(), strict=True):
        torch.testing.assert_close(p, q.cpu(), rtol=rtol, atol=1e-5, msg=name)


# -- beside other optimizers ------------------------------------------------------------------------------------------


def five_steps_of_torch(monkeypatch, shape, weight_decay, nesterov, half):
    """Run both for five steps; `half=False` takes torch's cast to bfloat16 away, so that nothing but rounding differs."""
    if not half:
        monkeypatch.setattr(torch.Tensor, "bfloat16", lambda self: self.clone())
    generator = torch.Generator().manual_seed(4)
    start = torch.randn(shape, dtype=torch.float64, generator=generator) * 0.05
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    triple = (3.4445, -4.7750, 2.0315)
    a = Dsv4Optimizer(
        [ours],
        lr=0.01,
        algorithm="muon",
        rms=0.2,
        ns_coefficients=(triple,) * 5,
        weight_decay=weight_decay,
        nesterov=nesterov,
        eps=1e-7,
        ns_dtype="bfloat16" if half else "float64",
    )
    b = torch.optim.Muon(
        [theirs],
        lr=0.01,
        weight_decay=weight_decay,
        nesterov=nesterov,
        ns_coefficients=triple,
        adjust_lr_fn="match_rms_adamw",
    )
    for _ in range(5):
        grad = torch.randn(shape, dtype=torch.float64, generator=generator)
        ours.grad, theirs.grad = grad.clone(), grad.clone()
        a.step()
        b.step()
    return a, b, ours, theirs, start


@pytest.mark.parametrize("shape", [(12, 20), (20, 12), (16, 16)])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_equals_torch_muon_where_the_settings_coincide(monkeypatch, shape, weight_decay):
    a, b, ours, theirs, _ = five_steps_of_torch(monkeypatch, shape, weight_decay, True, half=False)
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-14)
    mine, other = a.state[ours]["momentum_buffer"], b.state[theirs]["momentum_buffer"]
    torch.testing.assert_close(mine, other, rtol=1e-14, atol=0)


def test_equals_torch_muon_in_bfloat16_up_to_its_rounding(monkeypatch):
    _, _, ours, theirs, start = five_steps_of_torch(monkeypatch, (24, 40), 0.1, True, half=True)
    # Five fast steps alone do not converge, so bfloat16 noise of 2^-9 a product is all that may differ.
    assert relative_error(ours.detach() - start, theirs.detach() - start) < 2e-2


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adamw_groups_equal_torch_adamw_bitwise(weight_decay):
    start = [torch.randn(7, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    ours, theirs = ([torch.nn.Parameter(t.clone()) for t in start] for _ in range(2))
    a = Dsv4Optimizer(ours, lr=3e-3, algorithm="adamw", weight_decay=weight_decay)
    b = torch.optim.AdamW(theirs, lr=3e-3, betas=(0.9, 0.95), eps=1e-20, weight_decay=weight_decay)
    for step in range(4):
        for i, (p, q) in enumerate(zip(ours, theirs, strict=True)):
            p.grad = torch.randn(7, generator=torch.Generator().manual_seed(10 * step + i))
            q.grad = p.grad.clone()
        a.step()
        b.step()
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("master", [None, "auto"])
def test_adamw_on_bfloat16_weights_is_float32_adamw_rounded_whatever_the_chunks(monkeypatch, master):
    start = torch.randn(10, 6, generator=torch.Generator().manual_seed(1)).bfloat16()
    results = []
    for chunk in (2**27, 13):
        monkeypatch.setattr("modeling_dsv4.training.adamw_step._CHUNK_ELEMENTS", chunk)
        ours = [torch.nn.Parameter(start.clone()), torch.nn.Parameter(start[0, 0].clone())]
        exact = [torch.nn.Parameter(p.detach().float()) for p in ours]
        a = Dsv4Optimizer(ours, lr=1e-2, algorithm="adamw", master=master)
        b = torch.optim.AdamW(exact, lr=1e-2, betas=(0.9, 0.95), eps=1e-20, weight_decay=0.1)
        for step in range(4):
            for i, (p, q) in enumerate(zip(ours, exact, strict=True)):
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(9 * step + i)).bfloat16()
                q.grad = p.grad.float()
                if master is None:
                    q.data.copy_(p.detach())
            a.step()
            b.step()
            for p, q in zip(ours, exact, strict=True):
                assert torch.equal(p, q.bfloat16())
        results.append(ours)
    assert all(torch.equal(p, q) for p, q in zip(*results, strict=True))


def test_head_wise_is_the_rule_on_each_head_alone():
    generator = torch.Generator().manual_seed(6)
    start, grad = torch.randn(24, 10, generator=generator), torch.randn(24, 10, generator=generator)
    whole = torch.nn.Parameter(start.clone())
    heads = [torch.nn.Parameter(part.clone()) for part in start.split(6)]
    a = Dsv4Optimizer([whole], lr=0.01, algorithm="muon", row_splits=(6,) * 4)
    b = Dsv4Optimizer(heads, lr=0.01, algorithm="muon")
    for _ in range(3):
        whole.grad = grad
        for head, part in zip(heads, grad.split(6), strict=True):
            head.grad = part.clone()
        a.step()
        b.step()
    torch.testing.assert_close(whole, torch.cat(list(heads)), rtol=1e-6, atol=1e-7)
    # The block's own sides scale the update: RMS 0.18 whatever the split.
    momentum = a.state[whole]["momentum_buffer"]
    assert momentum.shape == whole.shape
    once = torch.nn.Parameter(torch.zeros(24, 10))
    once.grad = grad
    Dsv4Optimizer([once], lr=1.0, algorithm="muon", row_splits=(6,) * 4).step()
    assert abs(once.detach().square().mean().sqrt().item() - 0.18) < 1e-3


# -- gradients --------------------------------------------------------------------------------------------------------


def test_a_missing_gradient_skips_the_parameter_and_a_zero_gradient_does_not():
    model, optimizer = tiny_optimizer()
    set_gradients(model, 0, skip=("layers.1",))
    before = snapshot(model)
    optimizer.step()
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) == ("layers.1" in name), name
        assert (len(optimizer.state[p]) == 0) == ("layers.1" in name)
    q = next(p for name, p in model.named_parameters() if name.endswith("1.self_attn.q_b_proj.weight"))
    q.grad = torch.zeros_like(q)
    old = q.detach().clone()
    optimizer.step()
    torch.testing.assert_close(q.detach(), old * (1 - 1e-3 * 0.1), rtol=1e-7, atol=0)


def test_sparse_gradients_equal_dense_ones_under_every_algorithm():
    for algorithm in ("sinkhorn", "adamw", "muon"):
        tables = [torch.nn.Embedding(20, 6, sparse=sparse) for sparse in (True, False)]
        tables[1].load_state_dict(tables[0].state_dict())
        ids = torch.tensor([3, 7, 3, 19])
        for table in tables:
            optimizer = Dsv4Optimizer(table.parameters(), lr=0.01, algorithm=algorithm)
            for _ in range(3):
                optimizer.zero_grad()
                table(ids).square().sum().backward()
                assert table.weight.grad.is_sparse == table.sparse
                optimizer.step()
        torch.testing.assert_close(tables[0].weight, tables[1].weight, rtol=1e-6, atol=1e-7)


def test_a_skipped_float16_step_changes_nothing():
    model, optimizer = tiny_optimizer()
    set_gradients(model, 0)
    optimizer.step()
    before, state = snapshot(model), copy.deepcopy(optimizer.state_dict()["state"])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    p = next(model.parameters())
    scaler.scale((p * float("inf")).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 1.0
    assert all(torch.equal(q, before[name]) for name, q in model.named_parameters())
    after = optimizer.state_dict()["state"]
    assert all(torch.equal(after[i][key], state[i][key]) for i in state for key in state[i])


def test_closure_runs_with_gradients():
    p = torch.nn.Parameter(torch.ones(4, 4))
    optimizer = Dsv4Optimizer([p], lr=0.1, algorithm="muon")

    def closure():
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 16
    assert not torch.equal(p, torch.ones(4, 4))


# -- options ----------------------------------------------------------------------------------------------------------


def test_bfloat16_weights_hardly_move_without_a_copy_and_do_with_one():
    start = (torch.randn(64, 64, generator=torch.Generator().manual_seed(1)) * 0.02).bfloat16()
    grads = [torch.randn(64, 64, generator=torch.Generator().manual_seed(9)).bfloat16()] * 100

    def moved(master):
        p = torch.nn.Parameter(start.clone())
        optimizer = Dsv4Optimizer([p], lr=1e-5, algorithm="muon", weight_decay=0.0, master=master)
        for grad in grads:
            p.grad = grad
            optimizer.step()
        return (p.detach() != start).double().mean().item(), p.detach().double() - start.double()

    exact = torch.nn.Parameter(start.float())
    optimizer = Dsv4Optimizer([exact], lr=1e-5, algorithm="muon", weight_decay=0.0)
    for grad in grads:
        exact.grad = grad.float()
        optimizer.step()
    change = exact.detach().double() - start.double()
    none, lost = moved(None)
    kept, whole = moved("auto")
    noisy, mean = moved("stochastic")
    assert none < 0.5 < kept and noisy > 0.5
    # The share of the true change that arrives: 1 with a copy (up to the last rounding), about 1 on average with noise.
    arrives = [(c * change).sum().item() / change.square().sum().item() for c in (lost, whole, mean)]
    assert arrives[0] < 0.5 and abs(arrives[1] - 1) < 0.1 and abs(arrives[2] - 1) < 0.1


def test_stochastic_rounding_is_unbiased_and_leaves_exact_values():
    from modeling_dsv4.training.weight_write import round_stochastically

    generator = torch.Generator().manual_seed(0)
    value = torch.full((20000,), 1.0 + 2**-7 * 0.3)
    rounded = round_stochastically(value, generator).float()
    assert set(rounded.tolist()) == {1.0, 1.0 + 2**-7}
    assert abs((rounded > 1).float().mean().item() - 0.3) < 0.02
    special = torch.tensor([1.0, -2.5, 0.0, float("inf"), -float("inf")])
    assert torch.equal(round_stochastically(special, generator).float(), special)
    assert round_stochastically(torch.tensor([float("nan")]), generator).isnan().all()


def test_touched_rows_move_alone_and_old_momentum_decays():
    generator = torch.Generator().manual_seed(2)
    start = torch.randn(30, 6, dtype=torch.float64, generator=generator)
    p = torch.nn.Parameter(start.clone())
    optimizer = Dsv4Optimizer([p], lr=0.01, algorithm="sinkhorn", rows="touched")
    # Touched at steps 1 and 4: the momentum of step 1 counts beta^3 of itself at step 4, as in the dense rule.
    rows = [2, 5, 6]
    grads = [torch.randn(3, 6, dtype=torch.float64, generator=generator) for _ in range(2)]
    other = torch.randn(4, 6, dtype=torch.float64, generator=generator)
    for step in range(1, 5):
        p.grad = torch.zeros_like(p)
        if step in (1, 4):
            p.grad[rows] = grads[step == 4]
        else:
            p.grad[10:14] = other
        before = p.detach().clone()
        optimizer.step()
        moved = (p.detach() != before).any(1).nonzero().flatten().tolist()
        assert moved == (rows if step in (1, 4) else [10, 11, 12, 13])
    expected = 0.95**3 * 0.05 * grads[0] + 0.05 * grads[1]
    torch.testing.assert_close(optimizer.state[p]["momentum_buffer"][rows], expected)
    # On a table whose rows are all touched it is the dense rule.
    pair = [torch.nn.Parameter(start.clone()) for _ in range(2)]
    modes = [
        Dsv4Optimizer([q], lr=0.01, algorithm="sinkhorn", rows=r)
        for q, r in zip(pair, ("touched", "all"), strict=True)
    ]
    for _ in range(3):
        grad = torch.randn(30, 6, dtype=torch.float64, generator=generator)
        for q, o in zip(pair, modes, strict=True):
            q.grad = grad.clone()
            o.step()
    torch.testing.assert_close(pair[0], pair[1], rtol=1e-12, atol=1e-12)


def test_touched_rows_take_sparse_gradients():
    tables = [torch.nn.Embedding(20, 6, sparse=sparse) for sparse in (True, False)]
    tables[1].load_state_dict(tables[0].state_dict())
    for table in tables:
        optimizer = Dsv4Optimizer(table.parameters(), lr=0.01, algorithm="sinkhorn", rows="touched")
        for ids in ([3, 7, 3], [7, 8, 9]):
            optimizer.zero_grad()
            table(torch.tensor(ids)).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(tables[0].weight, tables[1].weight, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("chunk_bytes", [2**30, 900, 100])
def test_idle_experts_keep_moving_by_default_and_stand_still_with_the_guard(chunk_bytes):
    generator = torch.Generator().manual_seed(3)
    start = torch.randn(4, 6, 8, generator=generator)
    first = torch.randn(4, 6, 8, generator=generator)
    later = torch.randn(4, 6, 8, generator=generator)
    later[1] = 0

    def change_of_expert_1(threshold):
        p = torch.nn.Parameter(start.clone())
        optimizer = Dsv4Optimizer(
            [p],
            lr=0.01,
            algorithm="muon",
            weight_decay=0.0,
            row_splits=(3, 3),
            idle_threshold=threshold,
            chunk_bytes=chunk_bytes,
        )
        p.grad = first * torch.tensor([1, 1e-3, 1, 1]).view(4, 1, 1)
        optimizer.step()
        before = p.detach().clone()
        p.grad = later
        optimizer.step()
        return [(p.detach() - before)[e].square().mean().sqrt().item() for e in range(4)]

    assert change_of_expert_1(None) == pytest.approx([0.0018] * 4, rel=2e-2)
    assert change_of_expert_1(0.01) == pytest.approx([0.0018, 0, 0.0018, 0.0018], rel=2e-2)


def test_auto_dtype_is_float32_on_cpu_and_the_products_use_what_is_asked(monkeypatch):
    used = []

    def record(update, coefficients, *, dtype, **kwargs):
        used.append(dtype)
        return newton_schulz(update, coefficients, dtype=dtype, **kwargs)

    monkeypatch.setattr("modeling_dsv4.training.muon_step.newton_schulz", record)
    for ns_dtype, weight, expected in (
        ("auto", torch.bfloat16, torch.float32),
        ("auto", torch.float32, torch.float32),
        ("auto", torch.float64, torch.float64),
        ("bfloat16", torch.float32, torch.bfloat16),
        ("float64", torch.float32, torch.float64),
    ):
        p = torch.nn.Parameter(torch.ones(3, 4, dtype=weight))
        p.grad = torch.ones_like(p)
        Dsv4Optimizer([p], algorithm="muon", ns_dtype=ns_dtype).step()
        assert used.pop() == expected


def test_auto_dtype_on_an_accelerator():
    from modeling_dsv4.training.group_options import newton_schulz_dtype

    class OnGpu:
        def __init__(self, ndim, dtype=torch.bfloat16):
            self.ndim, self.dtype, self.device = ndim, dtype, torch.device("cuda")

    group = {"ns_dtype": "auto"}
    assert newton_schulz_dtype(group, OnGpu(2)) == torch.bfloat16
    assert newton_schulz_dtype(group, OnGpu(3)) == torch.float32


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, ValueError, "algorithm"),
        ({"algorithm": "adam"}, ValueError, "'adam'"),
        ({"algorithm": "sinkhorn", "sinkhorn_iters": 4}, ValueError, "odd"),
        ({"algorithm": "muon", "ns_dtype": "float16"}, ValueError, "float16"),
        ({"algorithm": "muon", "row_split": (2, 2)}, TypeError, "row_split"),
        ({"algorithm": "muon", "momentum": 1.0}, ValueError, "momentum"),
        ({"algorithm": "muon", "lr": -1.0}, ValueError, "lr"),
        ({"algorithm": "muon", "master": "fp32"}, ValueError, "master"),
        ({"algorithm": "sinkhorn", "rows": "some"}, ValueError, "touched"),
    ],
)
def test_wrong_options_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        Dsv4Optimizer([torch.nn.Parameter(torch.ones(4, 4))], **options)


def test_unusable_parameters_are_refused_by_name():
    with pytest.raises(ValueError, match=r"w: a meta parameter"):
        Dsv4Optimizer([("w", torch.nn.Parameter(torch.ones(4, 4, device="meta")))], algorithm="muon")
    packed = torch.nn.Parameter(torch.ones(4, 4).to(torch.float8_e4m3fn))
    with pytest.raises(ValueError, match=r"w: dtype torch.float8"):
        Dsv4Optimizer([("w", packed)], algorithm="muon")
    flat = torch.nn.Parameter(torch.ones(16))
    flat.grad = torch.ones(16)
    with pytest.raises(ValueError, match="FSDP1"):
        Dsv4Optimizer([("w", flat)], algorithm="muon").step()
    p = torch.nn.Parameter(torch.ones(4, 4))
    p.grad = torch.ones(4, 4)
    with pytest.raises(ValueError, match="w: row_splits add up to 3"):
        Dsv4Optimizer([("w", p)], algorithm="muon", row_splits=(1, 2)).step()


def test_named_parameters_and_defaults_by_algorithm():
    model = torch.nn.Linear(3, 3)
    optimizer = Dsv4Optimizer(
        [
            {"params": [("weight", model.weight)], "algorithm": "muon"},
            {"params": [("bias", model.bias)], "algorithm": "adamw", "weight_decay": 0.0},
        ],
        lr=0.5,
    )
    first, second = optimizer.param_groups
    assert first["names"] == ["weight"] and second["names"] == ["bias"]
    assert (first["weight_decay"], first["rms"], len(first["ns_coefficients"])) == (0.1, 0.18, 10)
    assert (second["betas"], second["eps"], second["lr"]) == ((0.9, 0.95), 1e-20, 0.5)
    assert "betas" not in first and "rms" not in second
