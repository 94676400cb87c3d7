"""Storage of the cache: codecs read back what rounding gives, rings and stores against lists of tokens."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modeling_dsv4.cache_storage import (
    COMPRESSED_NVFP4,
    INDEX_MXFP4,
    UNROUNDED,
    WINDOW_FP8,
    EntryStore,
    TokenRing,
)
from modeling_dsv4.sequence_layout import SequenceLayout
from tests.reference import formats

CODECS = {"fp8": WINDOW_FP8, "nvfp4": COMPRESSED_NVFP4, "mxfp4": INDEX_MXFP4}
# Bytes of one value and bytes of scale per value.
BYTES = {"fp8": 1 + 1 / 32, "nvfp4": 1 / 2 + 1 / 16, "mxfp4": 1 / 2 + 1 / 32}


def _bits(x):
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def _magnitudes(rows, width, seed):
    """Values of all sizes, a size per block of 16: zero blocks, NVFP4's subnormal scales, values beyond its largest."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randn(rows, width // 16, 16, generator=generator)
    exponents = torch.randint(-30, 16, (rows, width // 16, 1), generator=generator)
    subnormal = torch.rand(rows, width // 16, 1, generator=generator) < 0.3
    exponents = torch.where(subnormal, torch.randint(-10, -2, exponents.shape, generator=generator), exponents)
    blocks = blocks * 2.0**exponents
    empty = torch.rand(rows, width // 16, 1, generator=generator) < 0.1
    sparse = torch.rand(blocks.shape, generator=generator) < 0.1
    return blocks.masked_fill(empty, 0.0).masked_fill(sparse, -0.0).flatten(1)


# ---- codecs --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", list(CODECS))
def test_packed_values_read_back_as_rounded_bit_for_bit(kind, dtype):
    codec, seen_scales = CODECS[kind], set()
    for seed in range(2):
        x = _magnitudes(2048, 128, seed).to(dtype)  # three million values over all formats and dtypes
        parts = codec.encode(x)
        assert all(part.dtype == torch.uint8 for part in parts)
        assert sum(part.nbytes for part in parts) == round(BYTES[kind] * x.numel())
        assert torch.equal(_bits(codec.decode(parts, dtype)), _bits(codec.rounded(x)))
        floats = codec.as_float()
        (kept,) = floats.encode(x)
        assert kept.dtype == dtype and torch.equal(_bits(floats.decode((kept,), dtype)), _bits(codec.rounded(x)))
        seen_scales |= set(parts[1].unique().tolist())
    if kind == "nvfp4":  # every subnormal scale (codes 1 to 7), the largest one, and nothing negative or NaN
        assert set(range(1, 8)) <= seen_scales and max(seen_scales) == 126
    # A small part against the oracle, which knows nothing of bytes.
    sample = _magnitudes(64, 128, 9).to(dtype)
    expected = getattr(formats, f"round_{kind}")(sample.float().numpy())
    np.testing.assert_array_equal(codec.rounded(sample).double(), torch.from_numpy(expected).to(dtype).double())


@pytest.mark.parametrize("kind", list(CODECS))
def test_unwritten_bytes_read_as_zero(kind):
    parts = tuple(torch.zeros_like(part) for part in CODECS[kind].encode(torch.ones(3, 32)))
    assert not CODECS[kind].decode(parts, torch.float32).any()


def test_unrounded_keeps_the_values_and_drops_the_graph():
    x = torch.randn(2, 8, requires_grad=True)
    (kept,) = UNROUNDED.encode(x)
    assert torch.equal(kept, x) and not kept.requires_grad
    assert not any(part.requires_grad for part in WINDOW_FP8.encode(x))


# ---- rings ---------------------------------------------------------------------------------------------------------------


class _Rows:
    """The tokens of every row as lists: what a ring stands for."""

    def __init__(self, batch):
        self.rows, self.next = [[] for _ in range(batch)], 1

    def call(self, new, columns):
        """Return `[B, S, 2]` values and the layout of a call in which row b has `new[b]` tokens."""
        past = torch.tensor([len(row) for row in self.rows])
        x = torch.full((len(self.rows), columns, 2), -999.0)
        for b, count in enumerate(new):
            for s in range(count):
                x[b, s] = torch.tensor([self.next, b])
                self.rows[b].append([float(self.next), float(b)])
                self.next += 1
        valid = torch.arange(columns) < torch.tensor(new)[:, None]
        return x, SequenceLayout.from_mask(None if valid.all() else valid, past, columns)

    def drop(self, counts):
        for row, count in zip(self.rows, counts, strict=True):
            del row[len(row) - count :]


def _assert_ring(ring, rows, known):
    """The last `known[b]` tokens of row b are there, each in the slot of its position."""
    held = ring.parts[0]
    for b, row in enumerate(rows.rows):
        for position in range(len(row) - min(known[b], len(row)), len(row)):
            assert held[b, position % held.shape[1]].tolist() == row[position], b


def _lengths(rows):
    return torch.tensor([len(row) for row in rows.rows])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_ring_keeps_the_last_tokens_of_every_row(data):
    batch, size = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 6))
    spare = data.draw(st.sampled_from([None, 9]))
    ring, rows, known = TokenRing(size, UNROUNDED, spare), _Rows(batch), [0] * batch
    addresses = set()
    for _ in range(data.draw(st.integers(1, 6))):
        columns = data.draw(st.integers(1, 9))
        new = [data.draw(st.integers(0, columns)) for _ in range(batch)]
        extra = data.draw(st.sampled_from([0, 0, columns]))
        before = [list(row) for row in rows.rows]
        x, layout = rows.call(new, columns)
        out = ring.append(x, layout, keep_extra=extra)
        assert out.shape == (batch, size + columns, 2)
        for b in range(batch):
            seen = min(known[b], size)
            if seen:
                assert out[b, size - seen : size].tolist() == before[b][-seen:]
            assert out[b, size : size + new[b]].tolist() == rows.rows[b][len(before[b]) :]
        known = [min(k + n, size + extra) for k, n in zip(known, new, strict=True)]
        assert ring.parts[0].shape[1] == max(size + (extra if spare is None else spare), 1)
        addresses.add(ring.parts[0].data_ptr())
        _assert_ring(ring, rows, known)
        action = data.draw(st.sampled_from(["nothing", "trim", "drop"]))
        if action == "trim":
            ring.trim(_lengths(rows))
            known = [min(k, size) for k in known]
        if action == "drop":
            counts = [data.draw(st.integers(0, k)) for k in known]
            rows.drop(counts)
            ring.trim(_lengths(rows))
            known = [min(k - c, size) for k, c in zip(known, counts, strict=True)]
        if action != "nothing":
            assert ring.parts[0].shape[1] == max(size + (spare or 0), 1)
            _assert_ring(ring, rows, known)
        seen = [row[len(row) - min(k, len(row), size) :] for k, row in zip(known, rows.rows, strict=True)]
        last = ring.last(size, _lengths(rows)).tolist()
        assert [row[size - len(s) :] for row, s in zip(last, seen, strict=True)] == seen
    assert spare is None or len(addresses) == 1


@pytest.mark.parametrize("kind", list(CODECS))
def test_a_packed_ring_returns_rounded_values(kind):
    ring, codec = TokenRing(5, CODECS[kind]), CODECS[kind]
    x = _magnitudes(2 * 7, 32, 1).view(2, 7, 32)
    layout = SequenceLayout.from_mask(None, torch.zeros(2, dtype=torch.long), 7)
    out = ring.append(x, layout)
    assert torch.equal(out[:, 5:], codec.rounded(x)) and not out[:, :5].any()
    again = ring.append(x[:, :1], SequenceLayout.from_mask(None, torch.full((2,), 7), 1))
    assert torch.equal(again[:, :5], codec.rounded(x)[:, 2:])
    assert ring.nbytes() == round(2 * 5 * 32 * BYTES[kind]) and ring.nbytes(2) == round(2 * 2 * 32 * BYTES[kind])


def test_the_gradient_flows_to_the_new_tokens_only():
    ring = TokenRing(3, WINDOW_FP8)
    layout = SequenceLayout.from_mask(None, torch.zeros(1, dtype=torch.long), 2)
    first = torch.randn(1, 2, 32, requires_grad=True)
    ring.append(first, layout)
    second = torch.randn(1, 2, 32, requires_grad=True)
    out = ring.append(second, SequenceLayout.from_mask(None, torch.full((1,), 2), 2))
    out.sum().backward()
    assert torch.equal(second.grad, torch.ones_like(second)) and first.grad is None


def test_an_empty_ring_does_nothing():
    ring = TokenRing(3, UNROUNDED)
    ring.trim(torch.tensor([1]))
    ring.map(lambda t: t[:0])
    assert ring.parts is None and ring.nbytes() == 0
    ring.append(torch.ones(1, 2, 4), SequenceLayout.from_mask(None, torch.zeros(1, dtype=torch.long), 2))
    ring.reset()
    assert ring.parts is None


# ---- stores --------------------------------------------------------------------------------------------------------------


def _write(store, rows, new, width=32, seed=0):
    """Write `new[b]` entries to row b; `rows` are the lists of rounded entries so far."""
    first = torch.tensor([len(row) for row in rows])
    most = max(new)
    x = _magnitudes(len(rows) * max(most, 1), width, seed).view(len(rows), max(most, 1), width)[:, :most]
    for b, count in enumerate(new):
        rows[b].extend(store.codec.rounded(x[b, :count]).unbind(0))
    counts = torch.tensor([len(row) for row in rows])
    return store.write(x, first, counts, int(counts.max()))


def _assert_view(view, rows):
    assert view.count == max(map(len, rows))
    read = view.read()
    for b, row in enumerate(rows):
        if row:
            assert torch.equal(read[b, : len(row)], torch.stack(row))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_store_holds_the_entries_of_ragged_rows(data):
    batch = data.draw(st.integers(1, 3))
    store, rows = EntryStore(CODECS[data.draw(st.sampled_from(list(CODECS)))]), [[] for _ in range(batch)]
    for step in range(data.draw(st.integers(1, 6))):
        new = [data.draw(st.integers(0, 9)) for _ in range(batch)]
        view = _write(store, rows, new, seed=step)
        _assert_view(view, rows)
        if view.count:
            indices = torch.randint(-1, view.count, (batch, 2, 5), generator=torch.Generator().manual_seed(step))
            assert torch.equal(view.gather(indices)[0, 1, 2], view.read()[0, indices[0, 1, 2].clamp(min=0)])
            assert torch.equal(view.read(0, 1), view.read()[:, :1])
        # A rollback is only a smaller count: the next write goes over what was dropped.
        for row in rows:
            del row[len(row) - data.draw(st.integers(0, min(2, len(row)))) :]


def test_a_store_grows_by_doubling():
    store, rows, sizes = EntryStore(INDEX_MXFP4), [[], []], []
    for step in range(70):
        _assert_view(_write(store, rows, [1, step % 2], seed=step), rows)
        sizes.append(store.parts[0].shape[1])
    assert sorted(set(sizes)) == [16, 32, 64, 128] and sizes.index(32) == 16 and sizes.index(64) == 32
    assert store.nbytes() == round(2 * 128 * 32 * BYTES["mxfp4"])
    assert store.nbytes(105) == round(105 * 32 * BYTES["mxfp4"])


def test_a_store_of_fixed_capacity_is_allocated_once_and_refuses_more():
    store, rows = EntryStore(COMPRESSED_NVFP4, capacity=5), [[]]
    _write(store, rows, [1])
    address = store.parts[0].data_ptr()
    _write(store, rows, [4])
    assert store.parts[0].data_ptr() == address and store.parts[0].shape[1] == 5
    with pytest.raises(ValueError, match=r"made for 5 entries \(max_length\) and 6 are needed"):
        _write(store, rows, [1])


def test_writing_nothing_gives_an_empty_view():
    view = EntryStore(WINDOW_FP8).write(torch.zeros(2, 0, 32), torch.zeros(2).long(), torch.zeros(2).long(), 0)
    assert view.count == 0 and view.read().shape == (2, 0, 32)


@pytest.mark.parametrize("kind", list(CODECS))
def test_new_entries_carry_the_gradient(kind):
    store, rows = EntryStore(CODECS[kind]), [[], []]
    _write(store, rows, [3, 1])
    x = _magnitudes(4, 32, 7).view(2, 2, 32).requires_grad_()
    first, counts = torch.tensor([3, 1]), torch.tensor([5, 2])
    view = store.write(x, first, counts, 5)
    read = view.read()
    assert torch.equal(read[0, 3:5], CODECS[kind].rounded(x[0])) and torch.equal(
        read[1, 1], CODECS[kind].rounded(x[1, 0])
    )
    read.sum().backward()
    assert torch.equal(x.grad[0], torch.ones(2, 32)) and torch.equal(x.grad[1, 0], torch.ones(32))
    assert not x.grad[1, 1].any()  # beyond the row's own entries: never written
    assert not any(part.requires_grad for part in store.parts)
    with torch.no_grad():
        assert not store.write(x, first, counts, 5).read().requires_grad
