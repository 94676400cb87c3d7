"""Attention of every layer mode against the float64 oracle, in tiles, in pieces and with padding."""

import numpy as np
import pytest
import torch

from modeling_dsv4 import Dsv4Cache, attention
from modeling_dsv4.attention import Dsv4Attention, LayerContext, SharedState
from modeling_dsv4.rotary import rotary_frequencies, rotary_table
from modeling_dsv4.sequence_layout import SequenceLayout
from tests.modeling.mechanism_models import fill, tiny_config
from tests.reference.text_model import Row

# Released name of every parameter of an attention layer (float weights).
RELEASED = {
    "q_a_proj": "wq_a",
    "q_a_norm": "q_norm",
    "q_b_proj": "wq_b",
    "kv_proj": "wkv",
    "kv_norm": "kv_norm",
    "o_a_proj": "wo_a",
    "o_b_proj": "wo_b",
    "compressor.kv_proj": "compressor.wkv",
    "compressor.gate_proj": "compressor.wgate",
    "compressor.kv_norm": "compressor.norm",
    "indexer.q_b_proj": "indexer.wq_b",
    "indexer.weights_proj": "indexer.weights_proj",
    "indexer.k_proj": "indexer.wk",
    "indexer.k_norm": "indexer.k_norm",
}
SCHEDULES = {
    # Window only; full, reuse, reindex of ratio 2; full (candidate source), reuse, reindex, reuse of ratio 1.
    "released": {
        "num_hidden_layers": 8,
        "compress_ratios": [0, 2, 2, 2, 1, 1, 1, 1],
        "kv_source_layer_ids": [1, 4],
        "index_source_layer_ids": [1, 3, 4, 6],
        "candidate_source_layer_id": 4,
    },
    "ratio 4": {
        "num_hidden_layers": 3,
        "compress_ratios": [4, 4, 4],
        "kv_source_layer_ids": [0],
        "index_source_layer_ids": [0, 2],
        "candidate_source_layer_id": 0,
    },
    "no candidates": {"candidate_source_layer_id": -1},
    "dense": {"index_topk": None},
}
BOUND = 2e-6  # the package's rotary tables are float32


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


class Stack:
    """The attention layers of a configuration, fed with an input of their own each."""

    def __init__(self, batch=1, length=30, seed=0, **changes):
        self.config = tiny_config(engram_layer_ids=[], engram_num_embeddings=[], **changes)
        layers = range(self.config.num_hidden_layers)
        self.layers = [fill(Dsv4Attention(self.config, i).double(), seed + i) for i in layers]
        generator = torch.Generator().manual_seed(seed + 100)
        shape = (batch, length, self.config.hidden_size)
        self.inputs = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in layers]

    def context(self, layout):
        text = self.config
        frequencies = {
            "main": rotary_frequencies(text.qk_rope_head_dim, text.rope_theta),
            "compress": rotary_frequencies(text.qk_rope_head_dim, text.compress_rope_theta, text.yarn),
        }
        tables = {name: rotary_table(layout.position_ids, speed) for name, speed in frequencies.items()}
        return LayerContext(layout, tables, frequencies)

    def run(self, columns=slice(None), valid=None, cache=None, inputs=None):
        """Return the outputs and the states of all layers for some columns of the inputs, in caller's order."""
        inputs = [x[:, columns] for x in (inputs or self.inputs)]
        batch, length = inputs[0].shape[:2]
        if cache is None:
            layout = SequenceLayout.from_mask(valid, torch.zeros(batch, dtype=torch.long), length)
        else:
            layout = cache.layout(valid, batch, length, torch.device("cpu"))
        context, state, outputs, states = self.context(layout), SharedState(), [], []
        for i, (layer, x) in enumerate(zip(self.layers, inputs, strict=True)):
            own = None if cache is None else cache.layers[i]
            out, state = layer(layout.shift(x), state, context, own)
            outputs.append(layout.unshift(out))
            states.append(state)
        if cache is not None:
            cache.advance(layout, valid)
        return outputs, states

    def oracle(self, row=0):
        """Return the oracle's record of one row of the inputs."""
        weights = {}
        for i, layer in enumerate(self.layers):
            weights[f"layers.{i}.attn.attn_sink"] = layer.sinks.numpy()
            for ours, released in RELEASED.items():
                for name, parameter in layer.named_parameters():
                    if name == f"{ours}.weight":
                        weights[f"layers.{i}.attn.{released}.weight"] = parameter.numpy()
        config = self.config.to_dict()
        reference = Row(weights, config, self.inputs[0].shape[1], None, self.config.cache_rounding, False, ())
        for i, x in enumerate(self.inputs):
            reference.attend(i, x[row].numpy())
        return reference.record


def _sets(selection):
    return [[j for j in row if j >= 0] for row in selection.tolist()]


# ---- against the oracle --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounding", [False, True])
@pytest.mark.parametrize("name", list(SCHEDULES))
def test_every_mode_equals_the_oracle(name, rounding):
    stack = Stack(cache_rounding=rounding, index_topk=3 if name != "dense" else None, **{
        k: v for k, v in SCHEDULES[name].items() if k != "index_topk"
    })  # fmt: skip
    modes = stack.config.layer_modes
    outputs, states = stack.run()
    record = stack.oracle()
    for i, out in enumerate(outputs):
        np.testing.assert_allclose(out[0], record[f"attn_out.{i}"], atol=BOUND, err_msg=f"layer {i} {modes[i]}")
        if f"topk.{i}" in record:
            assert _sets(states[i].selection[0]) == record[f"topk.{i}"], i
        if f"compressed_kv.{i}" in record:
            np.testing.assert_allclose(states[i].entries.read()[0], record[f"compressed_kv.{i}"], atol=BOUND)
    if name == "released":
        assert modes == ["window", "full", "reuse", "reindex", "full", "reuse", "reindex", "reuse"]
        # The pool restricts: some query of the reindex layer would have chosen another entry.
        outside = [
            set(mine) - set(pool)
            for mine, pool in zip(_sets(states[4].selection[0]), record["candidates.4"], strict=True)
        ]
        assert any(outside) and all(
            set(chosen) <= set(pool)
            for chosen, pool in zip(_sets(states[6].selection[0]), record["candidates.4"], strict=True)
        )


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17])
@pytest.mark.parametrize("name", ["released", "ratio 4"])
def test_short_rows_equal_the_oracle(name, length):
    stack = Stack(length=length, cache_rounding=False, **SCHEDULES[name])
    outputs, _ = stack.run()
    record = stack.oracle()
    for i, out in enumerate(outputs):
        np.testing.assert_allclose(out[0], record[f"attn_out.{i}"], atol=BOUND)


# ---- tiles, pieces, padding ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 700])
@pytest.mark.parametrize("name", list(SCHEDULES))
def test_tiles_of_any_size_give_the_same(monkeypatch, name, limit):
    stack = Stack(batch=2, length=19, **SCHEDULES[name])
    whole, states = stack.run()
    sizes, real = [], attention.attend_with_sinks
    monkeypatch.setattr(
        attention, "attend_with_sinks", lambda q, *a, **k: sizes.append(q.shape[1]) or real(q, *a, **k)
    )
    monkeypatch.setattr(attention, "MAX_TILE_ELEMENTS", limit)
    tiled, tiled_states = stack.run()
    assert min(sizes) < 19 and (limit > 1 or set(sizes) == {1})
    for a, b, x, y in zip(whole, tiled, states, tiled_states, strict=True):
        assert (a - b).abs().max() < 1e-6
        for one, other in ((x.selection, y.selection), (x.candidates, y.candidates)):
            assert one is other is None or torch.equal(one, other)


@pytest.mark.parametrize("pieces", [[1] * 8 + [22], [7, 1, 1, 2, 19], [29, 1]])
@pytest.mark.parametrize("name", list(SCHEDULES))
def test_pieces_with_a_cache_equal_one_call(name, pieces):
    stack = Stack(batch=2, **SCHEDULES[name])
    whole, states = stack.run()
    cache, start = Dsv4Cache(stack.config), 0
    for count in pieces:
        part, part_states = stack.run(slice(start, start + count), cache=cache)
        for a, b, x, y in zip(whole, part, states, part_states, strict=True):
            assert (a[:, start : start + count] - b).abs().max() < 1e-9
            if x.selection is not None:
                chosen, expected = y.selection, x.selection[:, start : start + count]
                assert [_sets(row) for row in chosen] == [_sets(row) for row in expected]
        start += count
    assert start == 30


MASKS = torch.tensor([[0] * 5 + [1] * 12, [1] * 9 + [0] * 8, [0, 1] * 8 + [1], [1] * 17]).bool()


@pytest.mark.parametrize("split", [None, 6, 12])
@pytest.mark.parametrize("name", list(SCHEDULES))
def test_padded_rows_equal_their_run_alone(name, split):
    stack = Stack(batch=4, length=17, **SCHEDULES[name])
    if split is None:
        outputs, _ = stack.run(valid=MASKS)
    else:  # rows with a longer past are padded in the second call: their queries lie beyond the last entry
        cache = Dsv4Cache(stack.config)
        parts = [stack.run(c, MASKS[:, c], cache)[0] for c in (slice(0, split), slice(split, 17))]
        outputs = [torch.cat(pair, dim=1) for pair in zip(*parts, strict=True)]
    for b, keep in enumerate(MASKS):
        alone, _ = stack.run(inputs=[x[b : b + 1, keep] for x in stack.inputs])
        for found, expected in zip(outputs, alone, strict=True):
            assert (found[b, keep] - expected[0]).abs().max() < 1e-9, b


def test_a_padded_query_beyond_the_last_entry_selects_nothing_that_is_not_there():
    stack = Stack(batch=2, length=6, **SCHEDULES["released"])
    cache, keep = Dsv4Cache(stack.config), torch.tensor([[1, 1, 1, 0, 0], [0, 1, 1, 1, 1]]).bool()
    stack.run(slice(0, 1), cache=cache)
    outputs, states = stack.run(slice(1, 6), keep, cache)
    counts = [state.entries.count for state in states[1:]]
    assert all(int(state.selection.max()) < count for state, count in zip(states[1:], counts, strict=True))
    for b, row in enumerate(keep):
        real = torch.cat([torch.tensor([True]), row])
        alone, _ = stack.run(inputs=[x[b : b + 1, real] for x in stack.inputs])
        for found, expected in zip(outputs, alone, strict=True):
            assert (found[b, row] - expected[0, 1:]).abs().max() < 1e-9


# ---- causality (K3) --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("position", [0, 7, 13, 14, 29])
def test_a_token_moves_nothing_before_it(position):
    stack = Stack(**SCHEDULES["released"])
    before, _ = stack.run()
    moved = [x.clone() for x in stack.inputs]
    for x in moved:
        x[:, position] += 1
    after, _ = stack.run(inputs=moved)
    for i, (a, b) in enumerate(zip(before, after, strict=True)):
        assert torch.equal(a[:, :position], b[:, :position]), i
        assert not torch.equal(a[:, position], b[:, position]), i


def test_the_window_is_eight_tokens_wide():
    stack = Stack(num_hidden_layers=1, compress_ratios=[0], kv_source_layer_ids=[], index_source_layer_ids=[],
                  candidate_source_layer_id=-1)  # fmt: skip
    before, _ = stack.run()
    moved = [x.clone() for x in stack.inputs]
    moved[0][:, 10] += 1
    changed = (before[0] != stack.run(inputs=moved)[0][0]).any(-1)[0].nonzero().flatten().tolist()
    assert changed == list(range(10, 18))


def test_an_entry_that_a_query_did_not_select_does_not_move_it():
    stack = Stack(**SCHEDULES["released"])
    before, states = stack.run()
    view = states[1].entries
    changed = view.parts[0].clone()
    changed[:, 2] += 1.0
    layer, context = stack.layers[2], stack.context(SequenceLayout.from_mask(None, torch.zeros(1).long(), 30))
    state = states[1]._replace(entries=attention.EntryView((changed,), view.codec, view.dtype))
    out, _ = layer(stack.inputs[2], state, context)
    selected = torch.tensor([2 in row for row in _sets(states[1].selection[0])])
    moved = (out != before[2])[0].any(-1)
    assert selected.any() and not selected.all() and torch.equal(moved, selected)


# ---- gradients -------------------------------------------------------------------------------------------------------------


def test_the_indexer_gets_no_gradient_and_everything_else_does():
    with torch.enable_grad():
        stack = Stack(**SCHEDULES["released"])
        stack.inputs = [x.requires_grad_() for x in stack.inputs]
        outputs, _ = stack.run()
        sum(out.square().sum() for out in outputs).backward()
    for i, layer in enumerate(stack.layers):
        for name, parameter in layer.named_parameters():
            has = parameter.grad is not None and bool(parameter.grad.abs().max() > 0)
            assert has == (not name.startswith("indexer.")), (i, name)
        assert stack.inputs[i].grad.isfinite().all()
