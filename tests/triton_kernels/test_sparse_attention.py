"""Attention to window and compressed entries, against `attend_with_sinks` and autograd of it."""

import importlib
from typing import NamedTuple

import pytest
import torch

from modeling_dsv4.cache_storage import COMPRESSED_NVFP4, UNROUNDED, WINDOW_FP8, unrotated_fp8
from modeling_dsv4.rotary import rotary_table, rotate
from modeling_dsv4.sparse_attention import attend_with_sinks
from modeling_dsv4.triton_kernels.sparse_attention import sparse_attention

kernels = importlib.import_module(sparse_attention.__module__)  # its name in the package is the function's

WINDOW, TAIL, RATIO = 8, 16, 2
CODECS = {"float": UNROUNDED, "fp8": WINDOW_FP8, "fp8_tail": unrotated_fp8(TAIL), "nvfp4": COMPRESSED_NVFP4}


class Problem(NamedTuple):
    """Values, and what the kernel is asked with."""

    queries: torch.Tensor
    window: torch.Tensor
    entries: torch.Tensor | None
    sinks: torch.Tensor
    past: torch.Tensor
    selection: torch.Tensor | None
    floor: torch.Tensor | None
    table: tuple

    def numbers(self):
        scale = self.queries.shape[-1] ** -0.5
        return {
            "scale": scale,
            "window_size": WINDOW,
            "ratio": RATIO,
            "selection": self.selection,
            "floor": self.floor,
        }

    def reference(self, window=None, entries=None):
        window = self.window if window is None else window
        entries = self.entries if entries is None else entries
        batch, length, _, dim = self.queries.shape
        held, device = window.shape[1] - length, window.device
        query = self.past[:, None] + torch.arange(length, device=device)
        key = (self.past - held)[:, None] + torch.arange(window.shape[1], device=device)
        first = torch.zeros_like(self.past) if self.floor is None else self.floor
        near = (key[:, None] <= query[..., None]) & (key[:, None] > query[..., None] - WINDOW)
        near &= key[:, None] >= first[:, None, None]
        mask = None
        if entries is not None and self.selection is not None:
            mask, rows = self.selection >= 0, torch.arange(batch, device=device)[:, None, None]
            entries = entries[rows, self.selection.clamp(min=0).long()]
        elif entries is not None:
            mask = torch.arange(entries.shape[1], device=device) < ((query + 1) // RATIO)[..., None]
        return attend_with_sinks(self.queries, window, near, entries, mask, self.sinks, scale=dim**-0.5)


@pytest.fixture(autouse=True)
def seed(poisoned):
    torch.manual_seed(0)


@pytest.fixture
def make(device):
    def make(past=(9, 31), length=2, heads=5, dim=64, held=11, count=18, chosen=6, floor=None):
        batch, past = len(past), torch.tensor(past, device=device)
        selection = None
        if chosen:
            visible = ((past[:, None] + torch.arange(length, device=device) + 1) // RATIO).clamp(max=count)[..., None]
            selection = (torch.rand(batch, length, chosen, device=device) * visible).int()
            absent = (torch.rand(batch, length, chosen, device=device) < 0.3) | (visible == 0)
            selection = torch.where(absent, -1, selection)
        positions = past[:, None] + torch.arange(length, device=device)
        return Problem(
            torch.randn(batch, length, heads, dim, device=device),
            torch.randn(batch, held + length, dim, device=device),
            torch.randn(batch, count, dim, device=device) if count else None,
            torch.randn(heads, device=device),
            past,
            selection,
            None if floor is None else torch.tensor(floor, device=device),
            rotary_table(positions, torch.rand(TAIL // 2, device=device)),
        )

    return make


CASES = {
    "selected": {},
    "all visible": {"chosen": 0, "count": 40, "past": (90, 9)},
    "many selected": {"chosen": 20, "count": 40, "past": (90, 1)},
    "window alone": {"count": 0, "chosen": 0},
    "no past": {"past": (0, 0), "held": 0, "length": 4},
    "a floor": {"floor": (9, 30), "length": 1},
    "odd sizes": {"heads": 3, "dim": 48, "length": 1, "held": 3},
}


@pytest.mark.parametrize(
    "case, shared", [(case, True) for case in [*CASES, "many heads"]] + [("selected", False), ("all visible", False)]
)
def test_attention_is_that_of_the_reference(make, monkeypatch, case, shared):
    monkeypatch.setattr(kernels, "SPLIT_PROGRAMS", 132 if shared else 0)
    problem = make(**CASES.get(case, {"heads": 65, "dim": 32, "length": 1, "past": (9,)}))
    entries = None if problem.entries is None else (problem.entries,)
    args = problem.queries, (problem.window,), problem.past, problem.sinks
    out = sparse_attention(*args, entries=entries, table=problem.table, **problem.numbers())
    expected = rotate(problem.reference(), problem.table, inverse=True)
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("few", (16, 0), ids=("in registers", "once"))
@pytest.mark.parametrize(
    "formats", (("fp8", "nvfp4"), ("float", "nvfp4"), ("fp8_tail", "fp8_tail"), ("float", "fp8_tail")), ids=str
)
def test_packed_parts_are_read_as_their_values(make, monkeypatch, formats, few):
    monkeypatch.setattr(kernels, "FEW_QUERIES", few)
    problem = make(dim=48, length=1, chosen=20)
    window, entries = (
        CODECS[name].encode(x) for name, x in zip(formats, (problem.window, problem.entries), strict=True)
    )
    roomy = tuple(torch.nn.functional.pad(part, (0, 0, 0, 12)) for part in entries)  # of a larger capacity
    kinds = {"window_format": formats[0], "entry_format": formats[1]}
    out = sparse_attention(
        problem.queries, window, problem.past, problem.sinks, entries=roomy, **kinds, **problem.numbers()
    )
    values = (CODECS[name].decode(x, torch.float32) for name, x in zip(formats, (window, entries), strict=True))
    torch.testing.assert_close(out, problem.reference(*values), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ("float", "fp8"))
def test_a_window_is_read_from_its_ring(make, name):
    problem, slots = make(held=9, length=3), 13
    encoded = CODECS[name].encode(problem.window)
    place = (problem.past[:, None] - 9 + torch.arange(12, device=problem.past.device)) % slots
    rows = torch.arange(2, device=place.device)[:, None]
    ring = tuple(part.new_zeros(2, slots, part.shape[2]) for part in encoded)
    for part, new in zip(ring, encoded, strict=True):
        part[rows, place] = new
    args = problem.queries, ring, problem.past, problem.sinks
    kinds = {"window_format": name, "ring": True, "entries": (problem.entries,)}
    expected = problem.reference(CODECS[name].decode(encoded, torch.float32))
    torch.testing.assert_close(sparse_attention(*args, **kinds, **problem.numbers()), expected, atol=2e-6, rtol=1e-5)


def test_a_query_that_sees_nothing_gets_zeros(make):
    problem = make(floor=(12, 34), chosen=4)._replace(selection=torch.full((2, 2, 4), -1, dtype=torch.int32))
    problem = problem._replace(selection=problem.selection.to(problem.queries.device))
    args = problem.queries, (problem.window,), problem.past, problem.sinks
    out = sparse_attention(*args, entries=(problem.entries,), **problem.numbers())
    assert (out == 0).all()


def test_values_and_sinks_of_another_dtype_are_read_in_that_of_the_queries(make):
    problem = make()
    problem = problem._replace(window=problem.window.bfloat16().float(), sinks=problem.sinks.bfloat16().float())
    args = problem.queries, (problem.window.bfloat16(),), problem.past, problem.sinks.bfloat16()
    out = sparse_attention(*args, entries=(problem.entries,), **problem.numbers())
    torch.testing.assert_close(out, problem.reference(), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("shift", (-200.0, 200.0))
def test_far_sinks_and_large_logits(make, shift):
    problem = make()
    problem = problem._replace(queries=problem.queries * 1e3, sinks=problem.sinks + shift)
    args = problem.queries, (problem.window,), problem.past, problem.sinks
    out = sparse_attention(*args, entries=(problem.entries,), **problem.numbers())
    torch.testing.assert_close(out, problem.reference(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", ("selected", "all visible", "window alone", "odd sizes"))
def test_gradients_are_those_of_the_reference(make, case):
    problem = make(**CASES[case])
    learned = [
        x.requires_grad_() for x in (problem.queries, problem.window, problem.entries, problem.sinks) if x is not None
    ]
    entries = None if problem.entries is None else (problem.entries,)
    out = sparse_attention(
        problem.queries, (problem.window,), problem.past, problem.sinks, entries=entries, **problem.numbers()
    )
    grad, expected = torch.randn_like(out), problem.reference()
    found = torch.autograd.grad(out, learned, grad)
    for a, b in zip(found, torch.autograd.grad(expected, learned, grad), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_gradients_pass_packed_entries_and_not_a_table(make):
    problem = make()
    queries, entries = problem.queries.requires_grad_(), COMPRESSED_NVFP4.encode(problem.entries)
    args = queries, (problem.window,), problem.past, problem.sinks
    kinds = {"entries": entries, "entry_format": "nvfp4", **problem.numbers()}
    expected = problem.reference(entries=COMPRESSED_NVFP4.decode(entries, torch.float32))
    grads = [torch.autograd.grad(out.sum(), queries)[0] for out in (sparse_attention(*args, **kinds), expected)]
    torch.testing.assert_close(*grads, atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match="through a table"):
        sparse_attention(*args, table=problem.table, **kinds)
    with pytest.raises(ValueError, match="'int8'"):
        sparse_attention(*args, **{**kinds, "entry_format": "int8"})
