"""Decoder replay: "exact" leaves the bytes and logits of "full"; "bounded" is the written approximation; work is saved.

Models are in float64, so that sums in another order flip no code of the cache.
"""

import copy
from collections import Counter
from functools import cache

import numpy as np
import pytest
import torch

from modeling_dsv4 import Dsv4Cache
from modeling_dsv4.decoder_replay import REPLAY_MODES, decoder_tokens
from tests.grids import half_of
from tests.modeling import tiny_model as v41
from tests.modeling import v4_models as v4

WINDOW, ROLLBACK = 8, 5
# A decoder of six layers.
DEEP = {
    "compress_ratios": [0, 2, 1, 1, 1, 1, 1, 1], "kv_source_layer_ids": [1, 2], "index_source_layer_ids": [1, 2, 4, 6, 7],
    "candidate_source_layer_id": 2,
}  # fmt: skip
MODELS = {
    "tiny": lambda: v41.shared_model(torch.float64),
    "deep": cache(lambda: v41.new_model(torch.float64, **DEEP)),
    "v4": v4.small_model,
}


@pytest.fixture(params=MODELS)
def model(request):
    """A float64 model; not to be changed."""
    return MODELS[request.param]()


@torch.no_grad()
def prefill(model, ids, mode, chunk=None, keep=1, **options):
    """Run a prompt in chunks; return the last logits and the cache."""
    held = options.pop("cache", None) or Dsv4Cache(model.config, rollback=ROLLBACK, **options)
    for part in ids.split(chunk or ids.shape[1], dim=1):
        out = model(part, cache=held, logits_to_keep=keep, decoder_replay=mode)
    return out.logits, held


def assert_same_bytes(one, other):
    """Every stored tensor of two caches is equal bit for bit."""
    assert one.columns == other.columns and torch.equal(one.lengths, other.lengths)
    for first, second in zip(one._parts, other._parts, strict=True):
        assert len(first.parts) == len(second.parts)
        assert all(torch.equal(a, b) for a, b in zip(first.parts, second.parts, strict=True))
    assert any(bool(part.any()) for part in one.layers[-1].window.parts)


@torch.no_grad()
def decode(model, cache, token, count):
    """Greedy tokens `[B, count]` after `token` `[B, 1]`."""
    tokens = []
    for _ in range(count):
        token = model(token, cache=cache).logits[:, -1].argmax(-1, keepdim=True)
        tokens.append(token)
    return torch.cat(tokens, dim=1)


def check_exact(model, length, chunk, kv_format, crops, count):
    """Prefill both ways, then crop, continue, and compare everything."""
    ids = v41.some_ids(2, length, seed=length)
    whole, full = prefill(model, ids, "full", chunk, kv_format=kv_format)
    logits, exact = prefill(model, ids, "exact", chunk, kv_format=kv_format)
    assert (logits - whole).abs().max() < v41.EXACT and logits.abs().max() > 0.1
    assert_same_bytes(full, exact)
    for crop in crops:
        one, other = copy.deepcopy(full), copy.deepcopy(exact)
        one.crop(-crop), other.crop(-crop)
        assert torch.equal(decode(model, one, ids[:, -1:], count), decode(model, other, ids[:, -1:], count))
        if count:
            assert_same_bytes(one, other)


# ---- how much is computed ------------------------------------------------------------------------------------------------


def test_token_layers_of_the_released_schedule():
    released = {"rollback": 0, "window": 128, "layers": 20}
    assert sum(decoder_tokens("full", tokens=32768, keep=1, **released)) == 655_360
    assert sum(decoder_tokens("exact", tokens=32768, keep=1, **released)) == 26_690
    assert decoder_tokens("exact", tokens=32768, keep=1, **released)[-1] == 128
    assert decoder_tokens("exact", tokens=200, keep=1, **released) == [200] * 19 + [128]
    assert decoder_tokens("bounded", tokens=32768, keep=1, **released) == [255] + [128] * 19
    assert decoder_tokens("bounded", tokens=100, keep=1, **released) == [100] * 20


@pytest.mark.parametrize("mode", ["full", "exact", "bounded"])
def test_layers_compute_the_tokens_of_the_rule_and_pool_all(mode):
    model, length, computed, pooled = MODELS["tiny"](), 100, Counter(), Counter()
    hooks = []
    for index, layer in enumerate(model.model.layers):
        count = lambda m, args, out, index=index: computed.update({index: args[0].shape[1]})  # noqa: E731
        hooks.append(layer.mlp.register_forward_hook(count))
        if hasattr(layer.self_attn, "compressor"):
            count = lambda m, args, out, index=index: pooled.update({index: args[0].shape[1]})  # noqa: E731
            hooks.append(layer.self_attn.compressor.kv_proj.register_forward_hook(count))
    prefill(model, v41.some_ids(1, length), mode)
    for hook in hooks:
        hook.remove()
    rule = decoder_tokens(mode, tokens=length, keep=1, rollback=ROLLBACK, window=WINDOW, layers=3)
    assert [computed[i] for i in range(8)] == [length] * 5 + rule
    assert pooled == {2: length, 5: length}
    assert (rule[-1] < length) == (mode != "full")


# ---- exact = full ----------------------------------------------------------------------------------------------------------


PROMPTS = [
    (1, None, "packed"),
    (8, None, "float"),
    (9, 1, "packed"),
    (41, None, "packed"),
    (60, None, "float"),
    (60, 23, "packed"),
]


@pytest.mark.parametrize(("model", "prompt"), half_of(MODELS, PROMPTS), indirect=["model"], ids=str)
def test_exact_leaves_the_bytes_and_tokens_of_full(model, prompt):
    length, chunk, kv_format = prompt
    check_exact(model, length, chunk, kv_format, [crop for crop in (0, ROLLBACK) if crop < length], 2)


@pytest.mark.slow
@pytest.mark.parametrize("length", [*range(1, 6 * WINDOW), *range(6 * WINDOW, 40 * WINDOW, 13), 40 * WINDOW])
def test_exact_leaves_the_bytes_and_tokens_of_full_at_every_length(model, length):
    formats = ("packed", "float") if length % 2 else ("float", "packed")
    check_exact(model, length, 1 + length % 23, formats[0], range(min(length, ROLLBACK + 1)), 2)
    check_exact(model, length, None, formats[1], [0], 64 if length % 8 == 0 else 2)


@pytest.mark.parametrize("sides", [("left", "left", "left"), ("right", "right", "right"), ("left", "right", "both")])
def test_exact_of_padded_rows(model, sides):
    rows, width = [v41.some_ids(1, n, seed=n)[0] for n in (60, 33, 5)], 63
    ids, mask = torch.full((3, width), v41.PAD), torch.zeros(3, width, dtype=torch.long)
    for b, (row, side) in enumerate(zip(rows, sides, strict=True)):
        start = {"left": width - len(row), "right": 0, "both": 1}[side]
        ids[b, start : start + len(row)], mask[b, start : start + len(row)] = row, 1
    results = []
    for mode in ("full", "exact"):
        cache = Dsv4Cache(model.config, rollback=ROLLBACK)
        with torch.no_grad():
            out = model(ids, attention_mask=mask, cache=cache, logits_to_keep=6, decoder_replay=mode)
        results.append((out.logits[mask[:, -6:].bool()], cache))
    (whole, full), (logits, exact) = results
    assert len(logits) and (logits - whole).abs().max() < v41.EXACT and logits.abs().max() > 0.1
    assert_same_bytes(full, exact)


KEEP = [3, 20, 0, torch.tensor([90, 97]), torch.tensor([-1]), torch.tensor([True] * 100)]


@pytest.mark.parametrize(("model", "keep"), half_of(MODELS, KEEP), indirect=["model"])
def test_all_wanted_logits_are_there(model, keep):
    ids = v41.some_ids(2, 100, seed=4)
    whole, full = prefill(model, ids, "full", keep=keep)
    logits, exact = prefill(model, ids, "exact", keep=keep)
    assert (logits - whole).abs().max() < v41.EXACT and logits.shape == whole.shape and logits.abs().max() > 0.1
    assert_same_bytes(full, exact)


def test_a_cache_that_records_drafts_keeps_what_they_may_drop(model):
    ids, caches = v41.some_ids(1, 150, seed=6), []
    for mode in ("full", "exact"):
        cache = Dsv4Cache(model.config, rollback=ROLLBACK)
        cache.activate_past_recording()
        prefill(model, ids, mode, cache=cache, keep=9)
        caches.append(cache)
    assert_same_bytes(*caches)
    for cache in caches:
        cache.crop(-40)
    assert torch.equal(*(decode(model, cache, ids[:, :1], 3) for cache in caches))


def test_optional_outputs_and_labels_need_every_token(model):
    ids = v41.some_ids(1, 60, seed=5)
    options = {"output_hidden_states": True, "output_router_logits": True, "output_selections": True}
    with torch.no_grad():
        one, other = (model(ids, **options, logits_to_keep=1, decoder_replay=mode) for mode in ("full", "exact"))
        assert torch.equal(one.hidden_states[-2], other.hidden_states[-2]) and one.hidden_states[-2][:, 0].any()
        assert torch.equal(one.router_logits[-1], other.router_logits[-1])
        losses = [model(ids, labels=ids, decoder_replay=mode).loss for mode in ("full", "exact")]
    assert losses[0] == losses[1] > 0


def test_without_a_cache_exact_saves_more():
    model, ids = MODELS["deep"](), v41.some_ids(1, 100)
    tokens = []
    hook = model.model.layers[-1].mlp.register_forward_hook(lambda m, args, out: tokens.append(args[0].shape[1]))
    with torch.no_grad():
        logits = [
            model(ids, use_cache=False, logits_to_keep=1, decoder_replay=mode).logits for mode in ("full", "exact")
        ]
    hook.remove()
    assert tokens == [100, WINDOW] and (logits[0] - logits[1]).abs().max() < v41.EXACT
    assert logits[1].abs().max() > 0.1


# ---- bounded -----------------------------------------------------------------------------------------------------------------


def window_floors(splits, start=0, floor=0):
    """The position before which each query's window is empty behind the cut, for calls of the given lengths."""
    floors = []
    for length in splits:
        start += length
        floor = start - WINDOW if length > WINDOW else floor
        floors += [floor] * length
    return floors


def kept_rows(splits):
    """The positions whose logits exist: the last window of every call."""
    ends = np.cumsum(splits)
    return [t for end, length in zip(ends, splits, strict=True) for t in range(end - min(length, WINDOW), end)]


@cache
def oracle_of_full(name):
    """What the oracle makes of 41 tokens with a model when nothing is bounded."""
    return v41.oracle_logits(MODELS[name](), v41.some_ids(1, 41, seed=3))


SPLITS = [(41,), (30, 11), (8, 9, 24), (40, 1), (5, 36), (13, 13, 15)]


@pytest.mark.parametrize(
    ("name", "splits"),
    [("deep", splits) for splits in SPLITS]
    + [pytest.param("tiny", splits, marks=() if len(splits) == 3 else pytest.mark.slow) for splits in SPLITS],
)
def test_bounded_equals_the_reference_at_the_same_split(name, splits):
    model, ids, start = MODELS[name](), v41.some_ids(1, 41, seed=3), 0
    expected, plain = v41.oracle_logits(model, ids, window_floors=window_floors(splits)), oracle_of_full(name)
    cache, found = Dsv4Cache(model.config, rollback=ROLLBACK), {}
    for length in splits:
        keep = min(length, WINDOW)
        with torch.no_grad():
            part = model(ids[:, start : start + length], cache=cache, logits_to_keep=keep, decoder_replay="bounded")
        start += length
        found |= dict(zip(range(start - keep, start), part.logits[0].numpy(), strict=True))
    assert list(found) == kept_rows(splits)
    for t, logits in found.items():
        np.testing.assert_allclose(logits, expected[0, t], atol=v41.ORACLE)
    assert max(abs(expected[0, t] - plain[0, t]).max() for t in found) > 1e-3  # it is an approximation


@cache
def oracle_after_bounded(crop, length=30):
    """Ids `[1, length - crop + 6]` and what the oracle makes of the last six, none of which sees beyond the last window."""
    ids, left = v41.some_ids(1, 36, seed=8), length - crop
    ids = torch.cat([ids[:, :left], ids[:, length:]], dim=1)
    floors = [length - WINDOW] * (left + 6)
    return ids, v41.oracle_logits(MODELS["deep"](), ids, window_floors=floors)[0, left:]


@pytest.mark.parametrize(
    ("crop", "later"),
    [
        pytest.param(crop, later, marks=pytest.mark.slow if (crop + m) % 3 else ())
        for crop in range(ROLLBACK + 1)
        for m, later in enumerate(REPLAY_MODES)
    ],
)
def test_decoding_after_bounded_sees_no_value_that_was_never_computed(tmp_path, later, crop):
    """Cropped below the computed window, the window is shorter: what was left out never comes back."""
    model, ids, length = MODELS["deep"](), v41.some_ids(1, 36, seed=8), 30
    _, cache = prefill(model, ids[:, :length], "bounded")
    cache.crop(-crop)
    cache.save(tmp_path / "cache.safetensors")
    cache = Dsv4Cache.load(tmp_path / "cache.safetensors", model.config)
    cache.batch_repeat_interleave(2)
    ids, expected = oracle_after_bounded(crop)
    with torch.no_grad():
        again = ids[:, length - crop :].repeat(2, 1)
        found = model(again[:, :3], cache=cache, decoder_replay=later, logits_to_keep=3).logits
        found = torch.cat([found, model(again[:, 3:], cache=cache, decoder_replay=later).logits], dim=1)
    for row in found:
        np.testing.assert_allclose(row.numpy(), expected, atol=v41.ORACLE)


def test_bounded_rows_of_a_batch_equal_their_runs_alone():
    model, mask = MODELS["deep"](), torch.ones(3, 41, dtype=torch.long)
    ids = v41.some_ids(3, 41, seed=9)
    mask[1, :20], mask[2, :36] = 0, 0
    ids[~mask.bool()] = v41.PAD
    with torch.no_grad():
        together = model(ids, attention_mask=mask, logits_to_keep=1, decoder_replay="bounded").logits
        for b, row in enumerate(together):
            alone = model(ids[b : b + 1, mask[b].bool()], logits_to_keep=1, decoder_replay="bounded").logits[0]
            assert (row - alone).abs().max() < v41.EXACT and row.abs().max() > 0.1


def test_bounded_of_v4_is_whole():
    """V4 pools up to its last layers; what bounded computes of them is all that anything reads."""
    ids = v41.some_ids(1, 60)
    model = MODELS["v4"]()
    full, bounded = (prefill(model, ids, mode)[0] for mode in ("full", "bounded"))
    assert (full - bounded).abs().max() < v41.EXACT and bounded.abs().max() > 0.1


@pytest.mark.parametrize(
    "options",
    [{}, {"logits_to_keep": WINDOW + 1}, {"logits_to_keep": 1, "output_hidden_states": True}, {"labels": True}],
    ids=str,
)
def test_bounded_refuses_what_it_does_not_compute(options):
    model, ids = MODELS["tiny"](), v41.some_ids(1, 20)
    options = options | ({"labels": ids} if "labels" in options else {})
    cache = Dsv4Cache(model.config)
    with pytest.raises(
        ValueError, match=r"'bounded' computes the last 8 final states and .* of 20 are wanted; accepted"
    ):
        model(ids, cache=cache, decoder_replay="bounded", **options)
    assert not cache.is_initialized and not any(part.parts for part in cache._parts)
    model(ids[:, :WINDOW], decoder_replay="bounded", output_hidden_states=True)


@pytest.mark.parametrize("mode", ["full", "exact", "bounded"])
@pytest.mark.parametrize("keep", [-1, slice(-2, None), None])
def test_other_columns_to_keep_are_refused(mode, keep):
    with pytest.raises(ValueError, match="logits_to_keep is .*; accepted: a number of last columns >= 0"):
        MODELS["tiny"]()(v41.some_ids(1, 30), logits_to_keep=keep, decoder_replay=mode)


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match=r"decoder_replay is 'half'; accepted: \('full', 'exact', 'bounded'\)"):
        MODELS["tiny"]()(v41.some_ids(1, 3), decoder_replay="half")
