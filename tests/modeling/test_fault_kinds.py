"""Faults that users of such models report, on the tiny configuration: padding, splits, causality, lengths, memory.

Equality of two ways to compute the same thing is tested in float64: what remains is 1e-12 instead of 1e-6, so that no
code of a rounded value can flip. Bit-identity is tested in float32. `tests/reference` is the oracle. Test names carry
the kind: K1 padding and batch, K2 every split, K3 causality, K4 boundary lengths and keys, K9 what the cache remembers.
"""

import copy
import functools

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from modeling_dsv4 import Dsv4Cache, Dsv41ForCausalLM, attention
from modeling_dsv4.cache_storage import CacheCodec
from tests.modeling.tiny_model import (
    EXACT,
    LENGTH,
    ORACLE,
    PAD,
    TEXT,
    new_model,
    oracle_logits,
    oracle_row,
    oracle_weights,
    run,
    shared_model,
    some_ids,
    tiny_config,
    two_rows,
)
from tests.reference import text_model


@pytest.fixture
def model():
    """The shared float64 model; not to be changed."""
    return shared_model(torch.float64)


@pytest.fixture
def float32_model():
    """The same in float32, for what must not move by a bit."""
    return shared_model()


@pytest.fixture
def ids():
    """Two rows of ids; the second has an image span and repeats n-grams of the first."""
    return two_rows()


def alone(model, row, **options):
    """Logits `[S, V]` of one unpadded row run alone, without a cache."""
    return run(model, row[None], use_cache=False, **options).logits[0]


# ---- K1: padding and batches -----------------------------------------------------------------------------------------------


def _padded(rows, sides):
    """Put rows of ids into one batch: `[B, S]` ids and mask; a side is "left", "right", "both" or "inside"."""
    width = max(map(len, rows)) + 3
    ids, mask = torch.full((len(rows), width), PAD), torch.zeros(len(rows), width, dtype=torch.long)
    for b, (row, side) in enumerate(zip(rows, sides, strict=True)):
        n = len(row)
        at = {
            "left": torch.arange(width - n, width),
            "right": torch.arange(n),
            "both": torch.arange(1, n + 1),
            "inside": torch.tensor([i if i < n // 2 else i + 2 for i in range(n)]),
        }[side]
        ids[b, at], mask[b, at] = row, 1
    return ids, mask


def _as_given(mask, kind, queries=None):
    """A padding mask `[B, T]` in one of the forms that libraries pass, for the last `queries` columns."""
    if kind == "2d":
        return mask
    if kind == "2d bool":
        return mask.bool()
    total = mask.shape[1]
    causal = torch.ones(total, total, dtype=torch.bool).tril()[total - (queries or total) :]
    allowed = causal & mask.bool()[:, None, None]
    return (
        allowed
        if kind == "4d bool"
        else torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
    )


SIDES = {
    "left": ("left",) * 4, "right": ("right",) * 4, "mixed": ("left", "right", "both", "inside"),
}  # fmt: skip
ROW_LENGTHS = (13, 1, 22, 8)


MASKS = ("2d", "2d bool", "4d bool", "4d additive")
# Rows that differ in where their padding is, under every kind of mask; the others under one each.
FAST = [("mixed", kind) for kind in MASKS] + [("left", "2d"), ("right", "4d bool")]


@pytest.mark.parametrize(
    ("sides", "kind"),
    [pytest.param(s, k, marks=() if (s, k) in FAST else pytest.mark.slow) for s in SIDES for k in MASKS],
)
def test_k1_every_row_equals_its_run_alone(model, sides, kind):
    """Prompt and three decode steps; groups are counted per row."""
    rows = [some_ids(1, n + 3, seed=n)[0] for n in ROW_LENGTHS]
    expected = [alone(model, row) for row in rows]
    prompts = [row[:-3] for row in rows]
    ids, mask = _padded(prompts, SIDES[sides])
    cache = Dsv4Cache(model.config, "float")
    logits = run(model, ids, attention_mask=_as_given(mask, kind), cache=cache).logits
    for b, n in enumerate(ROW_LENGTHS):
        torch.testing.assert_close(logits[b][mask[b].bool()], expected[b][:n], atol=EXACT, rtol=0)
    assert cache.lengths.tolist() == list(ROW_LENGTHS)
    for step in range(3):
        mask = F.pad(mask, (0, 1), value=1)
        token = torch.stack([row[n + step] for row, n in zip(rows, ROW_LENGTHS, strict=True)])[:, None]
        logits = run(model, token, attention_mask=_as_given(mask, kind, 1), cache=cache).logits
        for b, n in enumerate(ROW_LENGTHS):
            torch.testing.assert_close(logits[b, 0], expected[b][n + step], atol=EXACT, rtol=0)


def test_k1_no_mask_and_a_mask_of_ones_are_the_same(model, ids):
    plain = run(model, ids).logits
    for kind in MASKS:
        assert torch.equal(run(model, ids, attention_mask=_as_given(torch.ones_like(ids), kind)).logits, plain)


def test_k1_what_lies_at_padding_has_no_influence(model):
    rows = [some_ids(1, n, seed=n)[0] for n in ROW_LENGTHS]
    ids, mask = _padded(rows, SIDES["mixed"])
    other = torch.where(mask.bool(), ids, some_ids(*ids.shape, seed=9))
    first, second = (run(model, x, attention_mask=mask).logits[mask.bool()] for x in (ids, other))
    assert torch.equal(first, second)


def test_k1_optional_outputs_are_in_the_callers_columns(model):
    rows = [some_ids(1, n, seed=n)[0] for n in ROW_LENGTHS]
    ids, mask = _padded(rows, SIDES["mixed"])
    wanted = {"output_hidden_states": True, "output_router_logits": True, "output_selections": True}
    out = run(model, ids, attention_mask=mask, **wanted)
    for b, row in enumerate(rows):
        single, real = run(model, row[None], **wanted), mask[b].bool()
        for batch, one in zip(out.hidden_states, single.hidden_states, strict=True):
            torch.testing.assert_close(batch[b][real], one[0], atol=EXACT, rtol=0)
        for batch, one in zip(out.router_logits, single.router_logits, strict=True):
            torch.testing.assert_close(batch.unflatten(0, ids.shape)[b][real], one, atol=EXACT, rtol=0)
        for layer, chosen in single.selections.items():
            assert torch.equal(out.selections[layer][b][real], chosen[0])


def _documents(*lengths):
    """The causal mask of documents packed into each row."""
    blocks = [torch.ones(n, n, dtype=torch.bool).tril() for n in lengths]
    return torch.block_diag(*blocks).bool().expand(2, 1, -1, -1)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(2, LENGTH - 1), "attention_mask has shape"),
        (torch.zeros(2, LENGTH), "without a single real token"),
        (torch.eye(LENGTH, dtype=torch.bool).expand(2, 1, -1, -1), "hides more than padding"),
        (torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool), "hides more than padding"),
        (_documents(20, LENGTH - 20), "hides more than padding"),
        (torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool).tril().triu(-7), "hides more than padding"),
        (torch.ones(2, 2, LENGTH, LENGTH, dtype=torch.bool).tril(), "attention_mask has shape"),
    ],
)
def test_k1_other_masks_are_refused(model, ids, mask, message):
    with pytest.raises(ValueError, match=message):
        run(model, ids, attention_mask=mask)


@pytest.mark.parametrize("fill", [True, False])
def test_k1_rows_of_padded_queries_may_be_filled(model, fill):
    """Some libraries let the rows of padding attend everything, others nothing."""
    ids, mask = _padded([some_ids(1, n, seed=n)[0] for n in ROW_LENGTHS], SIDES["left"])
    full = _as_given(mask, "4d bool").clone()
    full.masked_fill_(~mask.bool()[:, None, :, None], fill)
    logits = [run(model, ids, attention_mask=m).logits[mask.bool()] for m in (mask, full)]
    assert torch.equal(*logits)


def test_k1_a_mask_that_contradicts_the_cache_is_refused(model, ids):
    cache = Dsv4Cache(model.config, "float")
    run(model, ids[:, :5], cache=cache)
    mask = torch.ones(2, 6)
    mask[0, 0] = 0
    with pytest.raises(ValueError, match="differs from the mask"):
        run(model, ids[:, 5:6], attention_mask=mask, cache=cache)


# ---- K2: every split -------------------------------------------------------------------------------------------------------


def _in_pieces(model, ids, sizes, cache):
    logits, start = [], 0
    for size in sizes:
        logits.append(run(model, ids[:, start : start + size], cache=cache).logits)
        start += size
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize(("kv_format", "first"), [("float", 1), ("packed", 17), ("packed", 40)])
def test_k2_prefill_and_decode(model, ids, first, kv_format):
    cache = Dsv4Cache(model.config, kv_format)
    pieces = _in_pieces(model, ids, [first] + [1] * (LENGTH - first), cache)
    torch.testing.assert_close(pieces, run(model, ids, use_cache=False).logits, atol=EXACT, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("kv_format", ["float", "packed"])
@pytest.mark.parametrize("first", range(1, LENGTH))
def test_k2_prefill_and_decode_everywhere(model, ids, first, kv_format):
    test_k2_prefill_and_decode(model, ids, first, kv_format)


@pytest.mark.parametrize("size", [3, 8, 13])
def test_k2_chunks(model, ids, size):
    sizes = [size] * (LENGTH // size) + ([LENGTH % size] if LENGTH % size else [])
    pieces = _in_pieces(model, ids, sizes, Dsv4Cache(model.config, "float"))
    torch.testing.assert_close(pieces, run(model, ids, use_cache=False).logits, atol=EXACT, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("size", range(1, LENGTH + 1))
def test_k2_chunks_of_every_size(model, ids, size):
    test_k2_chunks(model, ids, size)


@pytest.mark.parametrize("prefix", [1, 8, 23])
def test_k2_a_copied_cache_continues_with_another_suffix(model, ids, prefix):
    cache = Dsv4Cache(model.config, "float")
    run(model, ids[:, :prefix], cache=cache)
    suffixes = [some_ids(2, 9, seed=s) for s in (3, 4)]
    copies = [copy.deepcopy(cache), cache]
    for suffix, copied in zip(suffixes, copies, strict=True):
        whole = run(model, torch.cat([ids[:, :prefix], suffix], dim=1), use_cache=False).logits[:, prefix:]
        torch.testing.assert_close(_in_pieces(model, suffix, [4, 1, 4], copied), whole, atol=EXACT, rtol=0)


def test_k2_a_second_turn_on_the_same_cache(model):
    """Left-padded prompt, answers token by token, then a second prompt of another length on the same cache."""
    rows = [some_ids(1, n, seed=n)[0] for n in (9, 14)]
    ids, mask = _padded(rows, ("left", "left"))
    cache = Dsv4Cache(model.config, "float")
    run(model, ids, attention_mask=mask, cache=cache)
    answer, second = some_ids(2, 5, seed=5), some_ids(2, 6, seed=6)
    for t in range(5):
        mask = F.pad(mask, (0, 1), value=1)
        run(model, answer[:, t : t + 1], attention_mask=mask, cache=cache)
    turn = torch.ones(2, 6, dtype=torch.long)
    turn[0, :2] = 0  # the first row's second prompt is two tokens shorter
    mask = torch.cat([mask, turn], dim=1)
    logits = run(model, second, attention_mask=mask, cache=cache).logits
    for b, row in enumerate(rows):
        new = second[b][turn[b].bool()]
        expected = alone(model, torch.cat([row, answer[b], new]))[-len(new) :]
        torch.testing.assert_close(logits[b][turn[b].bool()], expected, atol=EXACT, rtol=0)


# ---- K3: causality ---------------------------------------------------------------------------------------------------------


def _flipped(ids, t):
    other = ids.clone()
    other[:, t] = (ids[:, t] + 7) % 120 + 3
    return other


@pytest.mark.parametrize("length", [2, 9, 17, pytest.param(LENGTH, marks=pytest.mark.slow)])
def test_k3_earlier_logits_do_not_move_by_a_bit(float32_model, length):
    model, ids = float32_model, some_ids(2, length, seed=2)
    before = run(model, ids).logits
    for t in range(length):
        after = run(model, _flipped(ids, t)).logits
        assert torch.equal(after[:, :t], before[:, :t]), t
        assert not torch.equal(after[:, t], before[:, t]), t


def test_k3_later_rows_of_a_batch_do_not_matter(model, ids):
    before = run(model, ids).logits[0]
    assert torch.equal(run(model, torch.stack([ids[0], _flipped(ids, 5)[1]])).logits[0], before)


@pytest.mark.parametrize("layer", [2, 3, 4, 5, 6, 7])
def test_k3_an_entry_that_was_not_selected_does_not_matter(layer, monkeypatch):
    """Change one compressed entry: only the queries that selected it move, in every mode of a compressed layer."""
    model, ids = shared_model(), some_ids(1, LENGTH, seed=2)
    attend, column = model.model.layers[layer].self_attn, 3
    outputs, selection = {}, {}

    def keep(module, args, output):
        outputs[len(outputs)] = output[0]
        selection["of queries"] = output[1].selection

    def change(module, args):
        x, state, *rest = args
        values = state.entries.parts[0].clone()
        values[:, column] += 3.0
        return x, state._replace(entries=attention.EntryView((values,), *_rest_of(state.entries))), *rest

    hooks = [attend.register_forward_hook(keep)]
    run(model, ids, use_cache=False)
    if attend.mode == "full":  # pools its own entries: they are changed where they are rounded, in this layer only
        _change_entries_of(layer, model, column, monkeypatch, hooks)
    else:
        hooks.append(attend.register_forward_pre_hook(change))
    run(model, ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    selected = (selection["of queries"][0] == column).any(-1)
    assert 0 < selected.sum() < LENGTH - attend.ratio * (column + 1)  # visible to more queries than selected it
    moved = (outputs[0] != outputs[1]).any(-1)[0]
    assert torch.equal(moved, selected)


def _rest_of(view):
    return view.codec, view.dtype


def _change_entries_of(layer, model, column, monkeypatch, hooks):
    codecs, at_work = attention.cache_codecs, []

    def changed(config, kv_format="float"):
        kinds = dict(codecs(config, kv_format))
        rounded = kinds["compressed"].rounded

        def change(x):
            x = rounded(x).clone()
            if at_work[-1] == layer:
                x[:, column] += 3.0
            return x

        return kinds | {"compressed": CacheCodec(change)}

    monkeypatch.setattr(attention, "cache_codecs", changed)
    for index, module in enumerate(model.model.layers):
        hooks.append(module.self_attn.register_forward_pre_hook(lambda *_, index=index: at_work.append(index)))


# ---- K4: boundary lengths, and every key of the configuration ---------------------------------------------------------------


def test_k4_every_length_equals_the_oracle(model):
    """1 to 41 tokens: around ratio 1 and 2, window 8, topk * ratio 4, block * ratio 4, and every residue of each.

    The oracle is causal (test_reference), so that one run of it gives the logits of every prefix.
    """
    ids, expected = oracle_row()
    worst = 0.0
    for length in range(1, LENGTH + 1):
        logits = run(model, ids[:, :length]).logits[0].numpy()
        worst = max(worst, np.abs(logits - expected["logits"][0, :length]).max())
    print(f"largest difference {worst:.1e}")
    assert worst < ORACLE


@pytest.mark.parametrize(
    "changed",
    [
        {"index_topk": None, "candidate_source_layer_id": -1},
        {"candidate_source_layer_id": -1},
        {"candidate_source_layer_id": 2},
        {"compress_ratios": [0, 0, 3, 3, 3, 4, 4, 4]},
        {"sliding_window": 1},
        {"hc_mult": 2, "engram_layer_ids": [0, 7]},
        {"engram_layer_ids": [], "engram_num_embeddings": []},
        {"cache_rounding": False},
        {"rope_scaling": {"rope_type": "default"}},
    ],
    ids=lambda changed: ",".join(changed),
)
def test_k4_other_schedules_equal_the_oracle(changed):
    model, ids = new_model(torch.float64, **changed), some_ids(1, 19, seed=3)
    if changed.get("rope_scaling"):
        # The oracle always turns by YaRN; a factor of 1 is plain RoPE.
        text = model.config.text_config.to_dict() | {"rope_scaling": TEXT["rope_scaling"] | {"factor": 1}}
        expected = text_model.forward(oracle_weights(model), text, ids.numpy(), token_map=list(range(128)))["logits"]
    else:
        expected = oracle_logits(model, ids.numpy())
    for length in (1, 2, 3, 5, 19):
        assert np.abs(run(model, ids[:, :length]).logits.numpy() - expected[:, :length]).max() < ORACLE


# Another value for every key of the text part that is read in a forward and changes no shape.
OTHER_VALUES = {
    "swiglu_limit": 1.0, "rms_norm_eps": 1e-2, "rope_theta": 500.0, "compress_rope_theta": 500.0,
    "rope_scaling.rope_type": "default", "rope_scaling.factor": 8, "rope_scaling.beta_fast": 2,
    "rope_scaling.beta_slow": 0.25, "rope_scaling.original_max_position_embeddings": 128,
    "num_experts_per_tok": 3, "norm_topk_prob": False, "routed_scaling_factor": 2.5, "sliding_window": 7,
    "compress_ratios": [0, 0, 3, 3, 3, 1, 1, 1], "index_topk": 3, "candidate_source_layer_id": -1,
    "candidate_topk_blocks": 1, "candidate_block_size": 3, "hc_sinkhorn_iters": 2, "hc_eps": 1e-2,
    "engram_vocab_size": 40, "engram_pad_token_id": 5, "gate_temp": 2.0, "cache_rounding": False,
}  # fmt: skip


@functools.cache
def logits_of_two_rows():
    """Of the shared float64 model."""
    return run(shared_model(torch.float64), two_rows()).logits


@pytest.mark.parametrize("key", OTHER_VALUES)
def test_k4_every_key_changes_something(model, ids, key):
    name, _, inner = key.partition(".")
    value = TEXT[name] | {inner: OTHER_VALUES[key]} if inner else OTHER_VALUES[key]
    other = Dsv41ForCausalLM(tiny_config(**{name: value})).to(torch.float64).eval()
    other.load_state_dict(model.state_dict())
    difference = (run(other, ids).logits - logits_of_two_rows()).abs().max()
    assert difference > 1e-4, difference


# ---- K9: what the n-gram memory remembers is in the cache ---------------------------------------------------------------------


def test_k9_two_caches_decoded_in_turn(model, ids):
    first, second = Dsv4Cache(model.config, "float"), Dsv4Cache(model.config, "float")
    expected = run(model, ids, use_cache=False).logits
    for part in (slice(0, 17), *(slice(t, t + 1) for t in range(17, 30))):  # past the image span of the second row
        for row, cache in ((0, first), (1, second)):
            logits = run(model, ids[row : row + 1, part], cache=cache).logits
            torch.testing.assert_close(logits[0], expected[row, part], atol=EXACT, rtol=0)


@pytest.mark.parametrize("at", [5, 22])  # 22 is inside the image span of the second row
def test_k9_reordered_rows_continue_as_themselves(model, ids, at):
    cache = Dsv4Cache(model.config, "float")
    run(model, ids[:, :at], cache=cache)
    order = torch.tensor([1, 0, 1])
    cache.batch_select_indices(torch.tensor([0, 1, 1]))
    cache.reorder_cache(order)
    rows = torch.tensor([0, 1, 1])[order]
    logits = _in_pieces(model, ids[rows, at:], [1, 2, LENGTH - at - 3], cache)
    torch.testing.assert_close(logits, run(model, ids[rows], use_cache=False).logits[:, at:], atol=EXACT, rtol=0)


def test_k9_rollback_forgets(model, ids):
    cache, other = Dsv4Cache(model.config, "float"), some_ids(2, 6, seed=8)
    run(model, ids[:, :21], cache=cache)
    run(model, other, cache=cache)
    cache.crop(-6)
    logits = _in_pieces(model, ids[:, 21:], [1, LENGTH - 22], cache)
    torch.testing.assert_close(logits, run(model, ids, use_cache=False).logits[:, 21:], atol=EXACT, rtol=0)


def test_k9_nothing_sequence_dependent_stays_on_the_model(model, ids):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    first = run(model, ids).logits
    run(model, some_ids(3, 13, seed=4))
    assert torch.equal(run(model, ids).logits, first)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
