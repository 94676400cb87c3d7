"""`generate` with drafts equals `generate` without, whatever is drafted; the cache afterwards too.

The drafter of a random model is almost never right, so most tests let it propose the known continuation with planned
mistakes (`planned`).
"""

import copy
import itertools
import random
from functools import cache

import pytest
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from transformers.generation.streamers import BaseStreamer

from modeling_dsv4 import DSparkScheduler, Dsv4Cache
from modeling_dsv4.decoder_replay import REPLAY_MODES
from tests.grids import half_of
from tests.modeling.draft_models import drafting_image_model, drafting_model, planned
from tests.modeling.image_models import batch_left, image_inputs, prompt
from tests.modeling.tiny_model import FIVE_LAYERS, PAD, new_model, some_ids

# Without padding among the new tokens: a second turn would read it as a mask.
GREEDY = {
    "max_new_tokens": 12, "do_sample": False, "pad_token_id": PAD, "eos_token_id": None, "suppress_tokens": [PAD],
}  # fmt: skip
EXACT = 1e-9


def first_wrong(pattern):
    """Drafts whose mistake lies at the next position of `pattern` each time (a block has no mistake beyond its end)."""
    return lambda length, step: step == pattern[length % len(pattern)]


def drafted(model, ids, plain, wrong, **options):
    """Generate with planned drafts; `plain` `[B, T]` is the result without drafts, which may have left padding."""
    real = options.get("attention_mask", torch.ones_like(ids)).bool()
    offsets = (~real).sum(-1).tolist()
    with planned(model, [row[offset:] for row, offset in zip(plain, offsets, strict=True)], wrong):
        return model.generate(ids, **GREEDY | {"use_mtp": True, "return_dict_in_generate": True} | options)


@torch.no_grad()
def assert_same_cache(model, a, b):
    """Two caches hold the same tokens: lengths, columns, stored values, and what is computed next."""
    assert torch.equal(a.lengths, b.lengths) and a.columns == b.columns and not a.record_past
    mask_a, mask_b = a.column_mask, b.column_mask
    assert (mask_a is None and mask_b is None) or torch.equal(mask_a, mask_b)
    assert a.nbytes() == b.nbytes()
    a, b, ids = copy.deepcopy(a), copy.deepcopy(b), some_ids(len(a.lengths), 5, seed=99)
    masks = [None if m is None else torch.cat([m, torch.ones_like(ids).bool()], 1) for m in (mask_a, mask_b)]
    x, y = (model(ids, cache=cache, attention_mask=mask).logits for cache, mask in zip((a, b), masks, strict=True))
    torch.testing.assert_close(x, y, atol=EXACT, rtol=0)
    torch.testing.assert_close(
        *(model.draft(ids[:, 0], cache, lambda i, logits: logits.argmax(-1)).confidence for cache in (a, b)), atol=EXACT, rtol=0
    )  # fmt: skip


@cache
def without_drafts(block, batch, length, seed, options=()):
    """Ids and the output of plain decoding; `options` are pairs."""
    ids = some_ids(batch, length, seed=seed)
    return ids, drafting_model(block).generate(ids, **GREEDY | dict(options), return_dict_in_generate=True)


def check_cell(block, batch, kv_format, replay, length, wrong, seed, **options):
    """Drafts on and off give the same tokens and the same cache; returns the report."""
    model, options = drafting_model(block), {"kv_format": kv_format, "decoder_replay": replay} | options
    ids, plain = without_drafts(block, batch, length, seed, tuple(options.items()))
    out = drafted(model, ids, plain.sequences, wrong, **options)
    assert torch.equal(out.sequences, plain.sequences)
    assert_same_cache(model, out.cache, plain.cache)
    return out.draft_report


# ---- token equality ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block", "batch", "kv_format"),
    [(1, 1, "packed"), (5, 3, "packed"), pytest.param(5, 1, "float", marks=pytest.mark.slow), (9, 2, "float")],
)
def test_tokens_and_cache_equal_plain_decoding(block, batch, kv_format):
    report = check_cell(block, batch, kv_format, "exact", 12, first_wrong([0, 3, 9, 1, 9]), seed=3)
    assert report.accepted > 0 and report.steps < 13


@pytest.mark.parametrize("batch", [1, 2])
def test_bounded_replay(batch):
    """Prompts longer than the window, whose decoder windows begin late; a block that is as long as the window."""
    report = check_cell(9, batch, "packed", "bounded", 21, first_wrong([9, 3, 0]), seed=4)
    assert report.accepted > 0 and len(report.verified) <= 7


@pytest.mark.slow
@pytest.mark.parametrize("block", range(1, 10))
@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("kv_format", ["packed", "float"])
@pytest.mark.parametrize("replay", REPLAY_MODES)
def test_grid(block, batch, kv_format, replay):
    for length in (2, 9, 24):
        check_cell(block, batch, kv_format, replay, length, first_wrong([2, 0, 9, 5, 1, 9]), seed=length)


@pytest.mark.slow
@pytest.mark.parametrize("cell", range(200))
def test_random_cell(cell):
    draw = random.Random(cell)
    pattern = [draw.randrange(10) for _ in range(draw.randint(1, 7))]
    chunk = draw.choice([None, None, draw.randint(1, 20)])
    check_cell(
        draw.randint(1, 9), draw.randint(1, 8), draw.choice(["packed", "float"]), draw.choice(REPLAY_MODES),
        draw.randint(1, 40), first_wrong(pattern), cell, prefill_chunk_size=chunk, max_new_tokens=draw.randint(1, 24),
    )  # fmt: skip


@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_rejection_at_every_position_and_group_offset(batch):
    """Groups of two tokens, an Engram look-back of three: every mistake from an even and from an odd length."""
    for wrong, length in itertools.product(range(6), (7, 8) if batch == 1 else (7,)):
        report = check_cell(5, batch, "packed", "exact", length, lambda n, s, w=wrong: s == w, 5, max_new_tokens=7)
        assert report.accepted_by_position[:wrong] == report.verified[:wrong]
        assert not any(report.accepted_by_position[wrong:])


def test_the_own_drafts_of_a_model():
    """Unplanned: what the random drafter proposes."""
    model, (ids, plain) = drafting_model(), without_drafts(5, 2, 9, 8)
    plain = plain.sequences[:, : 9 + 6]
    options = GREEDY | {"max_new_tokens": 6}
    for rows in (slice(0, 1), slice(0, 2)):
        out = model.generate(ids[rows], **options, use_mtp=True, return_dict_in_generate=True)
        assert torch.equal(out.sequences, plain[rows]) and out.draft_report.drafted > 0


# ---- options ----------------------------------------------------------------------------------------------------------------


class Alternating(LogitsProcessor):
    """A user's processor: even lengths may only get even tokens."""

    def __call__(self, input_ids, scores):
        return scores.masked_fill(torch.arange(scores.shape[-1]) % 2 != input_ids.shape[1] % 2, -torch.inf)


PROCESSORS = {
    "repetition": {"repetition_penalty": 1.7},
    "ngram": {"no_repeat_ngram_size": 2},
    "bad words": {"bad_words_ids": [[5], [8, 9]]},
    "suppress": {"suppress_tokens": list(range(20, 60)), "begin_suppress_tokens": [3, 4]},
    "min": {"min_new_tokens": 6, "eos_token_id": list(range(0, 128, 3))},
    "bias": {"sequence_bias": [[[7], 3.0], [[7, 9], 5.0]]},
    "decay": {"exponential_decay_length_penalty": (3, 1.5), "eos_token_id": 2},
    "forced": {"forced_eos_token_id": 2, "eos_token_id": 2},
    "prefix": {"prefix_allowed_tokens_fn": lambda row, ids: list(range(3 + len(ids) % 5 + row, 128, 2))},
    "own": {"logits_processor": LogitsProcessorList([Alternating()])},
    "watermark": {"watermarking_config": WatermarkingConfig(bias=2.5)},
}  # fmt: skip


# The others are as simple as a list of tokens.
SEEN_OFTEN = ("repetition", "ngram", "min", "prefix", "own", "watermark")
ALONE = ("repetition", "min", "prefix")  # for one row as well


@pytest.mark.parametrize(
    ("name", "batch"),
    [
        pytest.param(n, b, marks=() if n in SEEN_OFTEN and (b == 3 or n in ALONE) else pytest.mark.slow)
        for n in PROCESSORS
        for b in (1, 3)
    ],
)
def test_logits_processors(name, batch):
    """Left padding as well: some processors are bound to the columns of the prompt."""
    model, ids = drafting_model(), some_ids(batch, 9, seed=8)
    mask = torch.ones_like(ids)
    if batch > 1:
        ids[1, :4], mask[1, :4] = PAD, 0
    options = {"attention_mask": mask, "max_new_tokens": 8} | PROCESSORS[name]
    plain = model.generate(ids, **GREEDY | options, output_scores=True, return_dict_in_generate=True)
    out = drafted(model, ids, plain.sequences, first_wrong([1, 9, 0]), **options, output_scores=True)
    assert torch.equal(out.sequences, plain.sequences)
    assert len(out.scores) == len(plain.scores)
    for step, (a, b) in enumerate(zip(out.scores, plain.scores, strict=True)):
        before = plain.sequences[:, ids.shape[1] : ids.shape[1] + step]
        ends = torch.tensor(options.get("eos_token_id") or -1).reshape(-1)
        unfinished = ~torch.isin(before, ends).any(-1)
        torch.testing.assert_close(a[unfinished], b[unfinished], atol=1e-4, rtol=0)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("offset", [0, 3])
def test_end_of_sequence_inside_a_block(batch, offset):
    model, (ids, free) = drafting_model(), without_drafts(5, batch, 9, 8)
    stop = int(free.sequences[0, 9 + offset])
    plain = model.generate(ids, **GREEDY | {"eos_token_id": stop}, return_dict_in_generate=True)
    out = drafted(model, ids, plain.sequences, first_wrong([9]), eos_token_id=stop)
    assert torch.equal(out.sequences, plain.sequences)
    if out.sequences.shape[1] < 21 or batch > 1:
        assert_same_cache(model, out.cache, plain.cache)


class Sums(StoppingCriteria):
    """Ends a text when the sum of its last three tokens is a multiple of a number."""

    def __init__(self, number):
        self.number = number

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -3:].sum(-1) % self.number == 0


@pytest.mark.parametrize("batch", [1, 3])
def test_stopping_criteria_inside_a_block(batch):
    model, ids = drafting_model(), some_ids(batch, 9, seed=8)
    lengths = set()
    for number in (2, 5, 7):
        # With an end-of-sequence token, rows that ended are filled with padding in plain decoding too.
        options = {"stopping_criteria": StoppingCriteriaList([Sums(number)]), "eos_token_id": 2}
        plain = model.generate(ids, **GREEDY | options)
        lengths.add(plain.shape[1])
        assert torch.equal(drafted(model, ids, plain, first_wrong([9, 2]), **options).sequences, plain)
    assert len(lengths) > 1


class Collector(BaseStreamer):
    def __init__(self):
        self.tokens, self.ended = [], False

    def put(self, value):
        self.tokens += value.reshape(-1).tolist()

    def end(self):
        self.ended = True


@pytest.mark.parametrize("chunk", [None, 4])
def test_streamer(chunk):
    """Through transformers' loop and through ours."""
    model, (ids, plain), streamer = drafting_model(), without_drafts(5, 1, 9, 8), Collector()
    plain = plain.sequences
    drafted(model, ids, plain, first_wrong([3, 9]), streamer=streamer, prefill_chunk_size=chunk)
    assert streamer.tokens == plain[0].tolist() and streamer.ended
    with pytest.raises(ValueError, match="streamer is given for 2 rows"):
        model.generate(ids.repeat(2, 1), **GREEDY, use_mtp=True, streamer=Collector())


@pytest.mark.parametrize(
    ("options", "batch"),
    [
        pytest.param({"prefill_chunk_size": 1}, 1, marks=pytest.mark.slow),
        ({"prefill_chunk_size": 1}, 2),
        ({"prefill_chunk_size": 5}, 1),
        pytest.param({"prefill_chunk_size": 5}, 2, marks=pytest.mark.slow),
        ({"max_new_tokens": 1}, 1),
        ({"max_new_tokens": 1}, 2),
    ],
)
def test_chunked_prompts_and_a_single_token(batch, options):
    model, ids = drafting_model(), some_ids(batch, 11, seed=8)
    plain = model.generate(ids, **GREEDY | options, return_dict_in_generate=True)
    out = drafted(model, ids, plain.sequences, first_wrong([1, 9]), **options)
    assert torch.equal(out.sequences, plain.sequences)
    assert_same_cache(model, out.cache, plain.cache)


@pytest.mark.parametrize("batch", [1, 2])
def test_a_returned_cache_is_continued(batch):
    model, ids = drafting_model(), some_ids(batch, 11, seed=8)
    plain = model.generate(ids, **GREEDY)
    first = drafted(model, ids, plain, first_wrong([1, 9]), max_new_tokens=6)
    again = drafted(model, first.sequences, plain, first_wrong([9]), max_new_tokens=6, cache=first.cache)
    assert torch.equal(again.sequences, plain)
    turn = torch.cat([plain, some_ids(batch, 6, seed=5)], 1)
    fresh = model.generate(turn, **GREEDY)
    assert torch.equal(drafted(model, turn, fresh, first_wrong([9]), cache=again.cache).sequences, fresh)


@pytest.mark.parametrize("options", [{"prompt_lookup_num_tokens": 3}, {"assistant": True}])
@pytest.mark.parametrize("chunk", [None, 4])
def test_other_assistants_continue_a_cache_and_read_chunks(options, chunk):
    """What transformers' loop leaves out for prompt lookup and assistant models."""
    model = drafting_model()
    ids = some_ids(1, 6, seed=8).repeat(1, 2)
    short = GREEDY | {"max_new_tokens": 5}
    plain = model.generate(ids, **short)
    if "assistant" in options:
        options = {"assistant_model": new_model(torch.float64, **FIVE_LAYERS)}
    lengths = []
    hook = model.model.layers[0].register_forward_pre_hook(lambda m, args: lengths.append(args[0].streams.shape[1]))
    first = model.generate(ids, **short, **options, prefill_chunk_size=chunk, return_dict_in_generate=True)
    hook.remove()
    assert chunk is None or lengths[:2] == [4, 4]
    turn = torch.cat([first.sequences, some_ids(1, 3, seed=2)], 1)
    again = model.generate(
        turn, **short, **options, cache=first.cache, prefill_chunk_size=chunk, return_dict_in_generate=True
    )
    assert torch.equal(first.sequences, plain)
    fresh = model.generate(turn, **short, return_dict_in_generate=True)
    assert torch.equal(again.sequences, fresh.sequences)
    assert_same_cache(model, again.cache, fresh.cache)


def test_left_padded_rows_equal_their_runs_alone():
    model = drafting_model()
    rows = [some_ids(1, n, seed=n)[0] for n in (3, 17, 10)]
    ids = torch.full((3, 17), PAD)
    for row, target in zip(rows, ids, strict=True):
        target[17 - len(row) :] = row
    mask = (ids != PAD).long()
    plain = model.generate(ids, **GREEDY, attention_mask=mask)
    out = drafted(model, ids, plain, first_wrong([2, 9, 0]), attention_mask=mask)
    assert torch.equal(out.sequences, plain)
    for row, got in zip(rows, out.sequences, strict=True):
        assert torch.equal(got[17 - len(row) :], model.generate(row[None], **GREEDY, use_mtp=True)[0])


@pytest.mark.parametrize(("batch", "options"), half_of((1, 2), ({"prefill_chunk_size": 5}, {})))
def test_images(batch, options):
    """Drafts behind image spans, in one piece and in chunks that cut them; then a second turn with another image."""
    model = drafting_image_model()
    rows = [image_inputs(model, 3, (4, 5), 2, seed=1), {"input_ids": prompt(model, 6, seed=2)}][:batch]
    inputs = batch_left(rows)
    plain = model.generate(**inputs, **GREEDY, **options, return_dict_in_generate=True)
    out = drafted(model, inputs.pop("input_ids"), plain.sequences, first_wrong([2, 9]), **inputs, **options)
    assert torch.equal(out.sequences, plain.sequences) and out.draft_report.accepted > 0
    assert_same_cache(model, out.cache, plain.cache)
    if batch == 1:
        turn = image_inputs(model, 2, (2, 3), 2, seed=5)
        merged = torch.cat([rows[0]["pixel_values"], turn["pixel_values"]])
        grids = torch.cat([rows[0]["image_grid_hw"], turn["image_grid_hw"]])
        ids = torch.cat([plain.sequences, turn["input_ids"]], 1)
        images = {"pixel_values": merged, "image_grid_hw": grids}
        fresh = model.generate(ids, **images, **GREEDY)
        again = drafted(model, ids, fresh, first_wrong([9, 1]), **images, cache=out.cache, **options)
        assert torch.equal(again.sequences, fresh)


def test_two_caches_decoded_in_turn():
    """Ring and n-gram history are the cache's, not the model's."""
    model, prompts = drafting_model(), [some_ids(1, n, seed=n) for n in (7, 12)]
    plain = [model.generate(ids, **GREEDY) for ids in prompts]
    caches, ids = [Dsv4Cache(model.config), Dsv4Cache(model.config)], list(prompts)
    for _ in range(4):
        for i, past in enumerate(caches):
            out = drafted(model, ids[i], plain[i], first_wrong([9, 1]), max_new_tokens=3, cache=past)
            ids[i] = out.sequences
    assert all(torch.equal(a, b) for a, b in zip(ids, plain, strict=True))


def test_prompt_embeddings():
    model, (ids, plain) = drafting_model(), without_drafts(5, 2, 9, 8)
    plain = plain.sequences
    embeds = model.get_input_embeddings()(ids).detach()
    for rows in (slice(0, 1), slice(0, 2)):
        out = drafted(model, ids[rows], plain[rows], first_wrong([9]), inputs_embeds=embeds[rows])
        assert torch.equal(out.sequences, plain[rows])


@pytest.mark.parametrize("one_row_ends", [False, True])
def test_a_cache_of_fixed_capacity_needs_no_more_room_than_plain_decoding(one_row_ends):
    model, (ids, free) = drafting_model(), without_drafts(5, 2, 9, 8)
    free, settings = free.sequences[:, 9:].tolist(), {}
    if one_row_ends:
        settings["eos_token_id"] = next(token for token in free[0] if token not in free[1])
    plain, cache = (Dsv4Cache(model.config, max_length=9 + 12) for _ in range(2))
    text = model.generate(ids, cache=plain, **GREEDY | settings)
    out = drafted(model, ids, text, lambda n, s: (n + s) % 3 == 0, cache=cache, **settings)
    assert torch.equal(out.sequences, text) and bool((text[0] == PAD).any()) == one_row_ends
    assert torch.equal(cache.lengths, plain.lengths) and cache.columns == plain.columns == 20
    with torch.no_grad():
        torch.testing.assert_close(*(model(ids[:, :1], cache=c).logits for c in (cache, plain)), atol=EXACT, rtol=0)


@pytest.mark.slow
def test_rows_that_end_far_apart_under_bounded_replay():
    """What plain decoding feeds behind an ended row is longer than a window."""
    model, ids = drafting_model(), some_ids(2, 9, seed=3)
    settings = GREEDY | {"max_new_tokens": 30, "decoder_replay": "bounded", "return_dict_in_generate": True}
    free = model.generate(ids, **settings).sequences
    settings["eos_token_id"] = next(t for t in free[0, 9:].tolist() if t not in free[1, 9:].tolist())
    plain, found = model.generate(ids, **settings), model.generate(ids, use_mtp=True, **settings)
    assert torch.equal(plain.sequences, found.sequences) and plain.sequences.shape[1] == 9 + 30
    assert (plain.sequences[0] == PAD).sum() > 8
    assert torch.equal(plain.cache.lengths, found.cache.lengths)


@pytest.mark.parametrize(
    ("rows", "options", "more"), [(1, {}, 0), (2, {"use_mtp": True}, 1), (1, {"prompt_lookup_num_tokens": 4}, 3)]
)
def test_a_capacity_that_is_too_small_is_refused_before_work_begins(rows, options, more, monkeypatch):
    model, ids, needed = drafting_model(), some_ids(rows, 9, seed=8), 9 + 12 - 1 + more
    text = model.generate(ids, **GREEDY)
    out = model.generate(ids, cache=Dsv4Cache(model.config, max_length=needed), **GREEDY, **options)
    assert torch.equal(getattr(out, "sequences", out), text)
    monkeypatch.setattr(model.model, "forward", None)
    with pytest.raises(
        ValueError, match=rf"made for {needed - 1} tokens \(max_length\); accepted: at least {needed}, for"
    ):
        model.generate(ids, cache=Dsv4Cache(model.config, max_length=needed - 1), **GREEDY, **options)


def test_a_continued_cache_counts_what_it_has_seen():
    """Only the new ids are given, with the mask of all."""
    model, ids, settings = drafting_model(), some_ids(1, 9, seed=8), GREEDY | {"max_new_tokens": 3}
    settings["attention_mask"] = torch.ones(1, 16).long()
    for capacity in (18, 17):
        cache = Dsv4Cache(model.config, max_length=capacity)
        with torch.no_grad():
            model(ids, cache=cache)
        if capacity == 18:
            assert model.generate(ids[:, :7], cache=cache, **settings).shape == (1, 10) and cache.columns == 18
            continue
        with pytest.raises(ValueError, match=r"made for 17 tokens \(max_length\); accepted: at least 18"):
            model.generate(ids[:, :7], cache=cache, **settings)
        assert cache.columns == 9


# ---- refusals -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 3}, "num_beams is 3 with use_mtp=True; accepted: 1"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens is 3 with use_mtp=True"),
        ({"assistant_early_exit": 2}, "assistant_early_exit is 2"),
        ({"guidance_scale": 1.5}, "guidance_scale is 1.5"),
        ({"use_cache": False}, "use_cache is False with use_mtp=True"),
        ({"watermarking_config": SynthIDTextWatermarkingConfig(ngram_len=3, keys=[1, 2])}, "SynthIDText"),
        ({"use_mtp": False, "draft_scheduler": DSparkScheduler()}, "draft_scheduler is given with use_mtp=False"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states is True with use_mtp=True"),
    ],
)  # fmt: skip
def test_refusals_name_the_value(options, message):
    with pytest.raises(ValueError, match=message):
        drafting_model().generate(some_ids(2, 9), **GREEDY | {"use_mtp": True} | options)


def test_two_kinds_of_drafts_are_refused():
    with pytest.raises(ValueError, match="assistant_model is given with use_mtp=True"):
        drafting_model().generate(some_ids(1, 9), **GREEDY, use_mtp=True, assistant_model=new_model(torch.float64))
    with pytest.raises(ValueError, match="model without a drafter; accepted: one loaded with use_mtp=True"):
        new_model(torch.float64).generate(some_ids(1, 9), **GREEDY, use_mtp=True)
