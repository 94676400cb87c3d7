"""Reads of Engram rows in threads: what is read, when, what it costs, and that nothing but time depends on it."""

import threading
import time

import pytest
import torch
from accelerate.utils import send_to_device

from modeling_dsv4 import Dsv41ForCausalLM, engram_reads, language_model
from modeling_dsv4.engram import Dsv4PackedEngramTable
from modeling_dsv4.engram_reads import EngramRead, begin_reads
from modeling_dsv4.fp_codecs import quantize_fp8
from tests.golden_cases import CHECKPOINT_V41

ROWS, DIM = 500, 64
IDS = torch.randint(3, 380, (2, 37), generator=torch.Generator().manual_seed(1))
LAYERS = [1, 5]  # of the golden checkpoint


@pytest.fixture(scope="module")
def model():
    return Dsv41ForCausalLM.from_pretrained(CHECKPOINT_V41, dtype=torch.float32)


@pytest.fixture
def table():
    values, scale = quantize_fp8(torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(0)))
    table = Dsv4PackedEngramTable(ROWS, DIM, torch.float8_e8m0fnu)
    table.assign("weight", values)
    table.assign("weight_scale_inv", scale.view(torch.float8_e8m0fnu))
    return table


def engram_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("engram")]


def assert_no_thread_is_left():
    deadline = time.monotonic() + 5
    while engram_threads() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert not engram_threads()


# ---- one read -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ahead", "at_a_time"), [(1 << 20, 1 << 14), (7, 3), (0, 5)])
@pytest.mark.parametrize("threaded", [True, False])
def test_rows_come_as_they_are_in_the_table(table, monkeypatch, threaded, ahead, at_a_time):
    monkeypatch.setattr(engram_reads, "MAX_ROWS_AHEAD", ahead)
    monkeypatch.setattr(engram_reads, "ROWS_AT_A_TIME", at_a_time)
    rows = torch.randint(0, ROWS, (2, 9, 4), generator=torch.Generator().manual_seed(1))
    read = begin_reads({3: table}, {3: rows})[3] if threaded else table.read(rows)
    for _ in range(2):  # the second time as in the backward pass of a checkpointed layer
        found = read.take(torch.device("cpu"), torch.float32)
        scale = torch.exp2(table.host_tensor("weight_scale_inv").view(torch.uint8).float() - 127)
        exact = table.host_tensor("weight").float() * scale.repeat_interleave(32, -1)
        assert torch.equal(found, exact[rows]) and found.any()
    assert_no_thread_is_left()


def test_rows_are_read_once_and_in_ascending_order(table, monkeypatch):
    read, real = [], torch.index_select
    monkeypatch.setattr(
        torch, "index_select", lambda t, d, i, **k: read.append((len(t), i.tolist())) or real(t, d, i, **k)
    )
    table.gather(torch.tensor([[[31, 2, 31, 7], [2, 2, 39, 0]]]), torch.float32)
    assert [rows for size, rows in read if size == ROWS] == [[0, 2, 7, 31, 39]] * 2  # the values, and their scales


def test_only_the_wanted_rows_are_unpacked(table, monkeypatch):
    sizes, real = [], engram_reads.dequantize_rows
    monkeypatch.setattr(engram_reads, "dequantize_rows", lambda v, s, **k: sizes.append(len(v)) or real(v, s, **k))
    table.gather(torch.tensor([[[5, 5, 5], [9, 5, 9]]]), torch.float32)
    assert sizes == [2]


def test_buffers_are_bounded(table, monkeypatch):
    """Until the layer asks, at most `MAX_ROWS_AHEAD` rows were fetched."""
    monkeypatch.setattr(engram_reads, "MAX_ROWS_AHEAD", 10)
    fetched, real = [], EngramRead._fetch
    monkeypatch.setattr(EngramRead, "_fetch", lambda self, w, p: fetched.append(len(w)) or real(self, w, p))
    read = begin_reads({0: table}, {0: torch.arange(100)})[0]
    assert_no_thread_is_left()
    assert fetched == [10]
    read.take(torch.device("cpu"), torch.float32)
    assert fetched == [10, 90]


# ---- in the forward -------------------------------------------------------------------------------------------------------


def plain(monkeypatch):
    monkeypatch.setattr(language_model, "begin_reads", lambda tables, rows: rows)


def test_forward_chunks_and_decoding_equal_the_plain_path(model, monkeypatch):
    mask = torch.ones_like(IDS)
    mask[0, :5] = 0

    @torch.no_grad()
    def outputs():
        logits = model(IDS, attention_mask=mask).logits
        tokens = [
            model.generate(IDS, attention_mask=mask, max_new_tokens=3, do_sample=False, prefill_chunk_size=size)
            for size in (None, 8)
        ]
        return logits, *tokens

    found = outputs()
    assert_no_thread_is_left()
    plain(monkeypatch)
    assert all(torch.equal(a, b) for a, b in zip(found, outputs(), strict=True))
    assert found[0].any()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_training_equals_the_plain_path(checkpointing, monkeypatch):
    model = Dsv41ForCausalLM.from_pretrained(CHECKPOINT_V41, dtype=torch.float32).train()
    if checkpointing:
        model.activation_checkpointing_enable()
    weight = model.model.layers[1].engram.q_weight

    def gradient():
        model.zero_grad()
        model(IDS, labels=IDS).loss.backward()
        return weight.grad.clone()

    found = gradient()
    assert_no_thread_is_left()
    plain(monkeypatch)
    assert torch.equal(found, gradient()) and found.any()


def test_inference_mode_then_autograd(model):
    with torch.inference_mode():
        expected = model(IDS).logits
    found = model(IDS, labels=IDS)
    found.loss.backward()
    assert torch.equal(found.logits, expected)
    model.zero_grad()


def test_reads_begin_before_the_first_layer_and_overlap_those_before_theirs(model, monkeypatch):
    """Each thread is held until the layer before its Engram layer has run: a forward that waited earlier would fail."""
    begun, real, begin = [], EngramRead._fetch_first, EngramRead.begin
    passed = {id(model.model.layers[i].engram.embedding.statistics): threading.Event() for i in LAYERS}

    def held(read):
        assert passed[id(read.statistics)].wait(timeout=30)
        return real(read)

    monkeypatch.setattr(EngramRead, "_fetch_first", held)
    monkeypatch.setattr(EngramRead, "begin", lambda read, threads: begun.append(read) or begin(read, threads))
    before_first = []
    hooks = [model.model.layers[0].register_forward_pre_hook(lambda *_: before_first.extend(begun))]
    for event, layer in zip(passed.values(), LAYERS, strict=True):
        hooks.append(model.model.layers[layer - 1].register_forward_hook(lambda *_, event=event: event.set()))
    with torch.no_grad():
        model(IDS)
    for hook in hooks:
        hook.remove()
    assert len(before_first) == 2


def test_errors_of_a_thread_are_raised_by_the_forward(model, monkeypatch):
    def broken(read):
        raise OSError("the disk is gone")

    monkeypatch.setattr(EngramRead, "_fetch_first", broken)
    with pytest.raises(OSError, match="the disk is gone"), torch.no_grad():
        model(IDS)
    assert_no_thread_is_left()
    monkeypatch.undo()
    monkeypatch.setattr(model.model.layers[0].mlp, "forward", lambda *a: 1 / 0)  # a layer fails while both are read
    with pytest.raises(ZeroDivisionError), torch.no_grad():
        model(IDS)
    assert_no_thread_is_left()


def test_a_row_beyond_the_table_is_refused(table):
    read = begin_reads({0: table}, {0: torch.tensor([3, ROWS])})[0]
    with pytest.raises(IndexError):
        read.take(torch.device("cpu"), torch.float32)


def test_statistics_count_what_was_read(model, monkeypatch):
    rows, real = {}, language_model.begin_reads
    monkeypatch.setattr(language_model, "begin_reads", lambda t, r: rows.update(r) or real(t, r))
    before = model.engram_statistics()
    with torch.no_grad():
        model(IDS)
    after = model.engram_statistics()
    assert list(after) == list(rows) == LAYERS
    for layer, asked in rows.items():
        row_bytes = sum(t[0].nbytes for t in model.model.layers[layer].engram.embedding.read(asked).table)
        unique = len(set(asked.flatten().tolist()))
        assert after[layer].rows - before[layer].rows == asked.numel() == IDS.numel() * 6 > unique
        assert after[layer].unique - before[layer].unique == unique
        assert after[layer].nbytes - before[layer].nbytes == unique * row_bytes
        assert 0 < after[layer].wait - before[layer].wait < 10
    after[1].rows = -1  # a copy
    assert model.engram_statistics()[1].rows > 0


def test_float_tables_are_not_read_in_threads(model, table):
    float_table = torch.nn.Embedding(10, 4)
    rows = {1: torch.tensor([1, 2])}
    assert begin_reads({1: float_table}, rows) == rows
    assert Dsv41ForCausalLM(model.config).engram_statistics() == {}


def test_a_read_stays_where_it_is_when_a_layer_is_moved(table):
    read = begin_reads({1: table}, {1: torch.tensor([1, 2])})[1]
    assert send_to_device((read, 1), "meta")[0] is read
    assert read.take(torch.device("cpu"), torch.float32).shape == (2, DIM)


def test_a_layer_can_be_saved_whole_after_use(model, tmp_path):
    with torch.no_grad():
        model(IDS)
    torch.save(model.model.layers[1], tmp_path / "layer.pt")
    again = torch.load(tmp_path / "layer.pt", weights_only=False)
    assert again.engram.embedding.statistics == model.engram_statistics()[1]
    rows = torch.tensor([5, 3])
    expected = model.model.layers[1].engram.embedding.gather(rows, torch.float32)
    assert torch.equal(again.engram.embedding.gather(rows, torch.float32), expected)
