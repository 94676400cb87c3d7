"""Top-k of long rows: ties, hidden columns, rows longer than one program holds, candidate blocks."""

import pytest
import torch

from modeling_dsv4 import sparse_attention as reference

NAN, INF = float("nan"), float("inf")


@pytest.fixture
def kernels(monkeypatch, poisoned):
    """The module with rows so short that small inputs take every path."""
    from modeling_dsv4.triton_kernels import topk_selection

    monkeypatch.setattr(topk_selection, "ROW", 32)
    monkeypatch.setattr(topk_selection, "TILE", 128)
    monkeypatch.setattr(topk_selection, "MAX_LEVELS", 2)
    return topk_selection


def make_scores(kind, columns, dtype, device):
    generator = torch.Generator().manual_seed(columns)
    scores = torch.randn(4, columns, generator=generator)
    if kind == "ties":  # of both zeros too
        scores = scores.round() * torch.tensor([1.0, -1.0]).repeat(columns)[:columns]
    if kind == "equal":
        scores = torch.full_like(scores, -2.5)
    visible = torch.tensor([columns, columns // 2 + 1, min(columns, 3), 0])
    return scores.to(device, dtype), visible.to(device)


def hide(scores, visible, value):
    return scores.masked_fill(torch.arange(scores.shape[-1], device=scores.device) >= visible[..., None], value)


@pytest.mark.parametrize(
    ("columns", "k", "kind", "dtype"),
    [
        (13, 3, "ties", torch.bfloat16),
        (5, 8, "random", torch.float32),
        (32, 4, "equal", torch.float32),
        (200, 4, "ties", torch.bfloat16),
        (301, 6, "random", torch.float16),
        (600, 3, "equal", torch.bfloat16),
        (1100, 4, "random", torch.float32),
    ],
)
def test_columns_are_those_of_the_reference(kernels, device, columns, k, kind, dtype):
    scores, visible = make_scores(kind, columns, dtype, device)
    found = kernels.select_topk(hide(scores, visible, NAN), k, visible)
    assert found.dtype == torch.int32
    assert torch.equal(found, reference.select_topk(hide(scores, visible, -INF), k).int())


def test_minus_infinity_and_nan_are_never_chosen(kernels, device):
    row = torch.tensor([[-INF, 1.0, NAN, -INF, INF, -3.0e38, 2.0]], device=device)
    for dtype in (torch.float32, torch.bfloat16):
        assert kernels.select_topk(row.to(dtype), 6).tolist() == [[1, 4, 5, 6, -1, -1]]
        assert kernels.select_topk(row.to(dtype), 2).tolist() == [[4, 6]]


@pytest.mark.parametrize(("columns", "block_size", "k"), [(37, 3, 4), (301, 4, 6)])
def test_candidate_blocks_are_those_of_the_reference(kernels, device, columns, block_size, k):
    scores, visible = make_scores("ties", columns, torch.bfloat16, device)
    scores, visible = scores.view(2, 2, -1), visible.view(2, 2)
    found = kernels.select_candidate_blocks(hide(scores, visible, NAN), visible, block_size=block_size, k=k)
    hidden = hide(scores, visible, -INF)
    assert torch.equal(found, reference.select_candidate_blocks(hidden, visible, block_size=block_size, k=k).int())


@pytest.mark.parametrize("blocks", [5, 30])  # held by one program, and longer
def test_entries_of_a_pool(kernels, device, blocks):
    generator = torch.Generator().manual_seed(blocks)
    pool = torch.stack([torch.randperm(40, generator=generator)[:blocks].sort().values for _ in range(3)]).int()
    pool[1, 2:] = -1
    pool, visible = pool.to(device)[None], torch.tensor([[120, 120, 70]], device=device)
    entries = reference.expand_blocks(pool.long(), block_size=3)
    scores = torch.randn(entries.shape, generator=generator).round().to(device, torch.bfloat16)
    scores = scores.masked_fill((entries < 0) | (entries >= visible[..., None]), -INF)
    chosen = reference.select_topk(scores, 4)
    expected = torch.where(chosen < 0, -1, entries.gather(-1, chosen.clamp(min=0)))
    assert torch.equal(kernels.select_in_pool(scores, 4, pool, 3), expected.int())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="rows of a million columns take the interpreter minutes")
@pytest.mark.parametrize("kind", ["random", "ties", "equal"])
@pytest.mark.parametrize(
    ("columns", "k"), [(3000, 512), (40_000, 512), (1 << 17, 2048), (1 << 20, 512), (1 << 20, 1024)]
)
def test_released_sizes_every_time(device, poisoned, columns, k, kind):
    from modeling_dsv4.triton_kernels.topk_selection import select_topk

    scores, visible = make_scores(kind, columns, torch.bfloat16, device)
    expected = reference.select_topk(hide(scores, visible, -INF), k).int()
    for _ in range(20):  # a race would show as another result
        assert torch.equal(select_topk(hide(scores, visible, NAN), k, visible), expected)


def test_what_is_refused(kernels, device):
    with pytest.raises(ValueError, match="scores are torch.float64"):
        kernels.select_topk(torch.zeros(1, 3, device=device, dtype=torch.float64), 1)
    with pytest.raises(ValueError, match="k is 4097; accepted: at most 4096"):
        kernels.select_topk(torch.zeros(1, 3, device=device), 4097)
    with pytest.raises(ValueError, match="rows have 3000 columns; accepted: at most 2048"):
        kernels.select_topk(torch.zeros(1, 3000, device=device), 4)
