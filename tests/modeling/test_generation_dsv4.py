"""`generate` on the tiny model: every mode of transformers equals the same thing done without a cache, or refuses.

The model is in float64, so that equal means equal tokens: nothing is close to a tie.
"""

import copy
import io
import json
from contextlib import redirect_stdout

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import DynamicCache, GenerationConfig, PreTrainedTokenizerFast, TextStreamer, pipeline

from modeling_dsv4 import Dsv4Cache, Dsv41ForCausalLM
from tests.grids import half_of
from tests.modeling.tiny_model import FIVE_LAYERS, PAD, five_layer_model, new_model, some_ids

NEW = 11
GREEDY = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": PAD}
PROMPT = 19
SHORT = GREEDY | {"max_new_tokens": 6}  # where every token is decoded several times over


@pytest.fixture
def model():
    """A shared float64 model; not to be changed."""
    return five_layer_model()


@pytest.fixture
def ids():
    return some_ids(2, PROMPT, seed=11)


@torch.no_grad()
def greedy_by_hand(model, ids, count=NEW):
    """Append the best next token `count` times, recomputing everything."""
    for _ in range(count):
        logits = model(ids, use_cache=False).logits[:, -1]
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
    return ids


@pytest.fixture(scope="module")
def expected():
    return greedy_by_hand(five_layer_model(), some_ids(2, PROMPT, seed=11))


@pytest.fixture(scope="module")
def tokenizer():
    """One word per id (see `words`); the text says which ids were there."""
    raw = Tokenizer(models.WordLevel({f"t{i:03}": i for i in range(128)}, unk_token="t000"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="t000", eos_token="t002", padding_side="left")


def words(ids):
    """The words of a row of ids, special ones left out."""
    return [f"t{int(i):03}" for i in ids if i not in (0, 2)]


# ---- the modes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kv_format", "decoder_replay"), half_of(("packed", "float"), ("full", "exact")))
def test_greedy(model, ids, expected, kv_format, decoder_replay):
    out = model.generate(
        ids, **GREEDY, kv_format=kv_format, decoder_replay=decoder_replay, return_dict_in_generate=True
    )
    assert torch.equal(out.sequences, expected)
    cache = out.past_key_values if hasattr(out, "past_key_values") else out.cache
    assert isinstance(cache, Dsv4Cache) and cache.kv_format == kv_format


@torch.no_grad()
def test_bounded_replay_generates_what_its_forward_says(model, ids):
    out = model.generate(ids, **GREEDY, decoder_replay="bounded")
    cache, token, expected = Dsv4Cache(model.config), ids, [ids]
    for _ in range(NEW):
        logits = model(token, cache=cache, logits_to_keep=1, decoder_replay="bounded").logits[:, -1]
        token = logits.argmax(-1, keepdim=True)
        expected.append(token)
    assert torch.equal(out, torch.cat(expected, dim=1))


def test_greedy_without_a_cache(model, ids, expected):
    out = model.generate(ids, **GREEDY, use_cache=False, return_dict_in_generate=True)
    assert torch.equal(out.sequences, expected) and out.past_key_values is None


def test_end_of_sequence_fills_with_padding(model, ids, expected):
    stop = int(expected[0, PROMPT + 4])
    out = model.generate(ids, **GREEDY | {"eos_token_id": stop})
    for row, full in zip(out, expected, strict=True):
        new = full[PROMPT:].tolist()
        end = new.index(stop) + 1 if stop in new else len(new)
        assert row[PROMPT:].tolist()[:end] == new[:end] and set(row[PROMPT + end :].tolist()) <= {PAD}


def test_sampling_with_a_seed(model, ids):
    options = SHORT | {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9}
    runs = []
    for use_cache in (True, True, False):
        torch.manual_seed(3)
        runs.append(model.generate(ids, **options, use_cache=use_cache))
    assert torch.equal(runs[0], runs[1]) and torch.equal(runs[0], runs[2])
    torch.manual_seed(4)
    assert not torch.equal(model.generate(ids, **options), runs[0])


def test_several_samples_per_prompt(model, ids):
    options = GREEDY | {"do_sample": True, "num_return_sequences": 3}
    torch.manual_seed(3)
    out = model.generate(ids, **options)
    torch.manual_seed(3)
    assert torch.equal(out, model.generate(ids, **options, use_cache=False))
    assert out.shape == (6, PROMPT + NEW) and torch.equal(out[:, :PROMPT], ids.repeat_interleave(3, 0))


@pytest.mark.parametrize("options", [{}, {"num_return_sequences": 3}, {"do_sample": True}])
def test_beams(model, ids, options):
    runs = []
    for use_cache in (True, False):
        torch.manual_seed(5)
        runs.append(model.generate(
            ids, **SHORT | options, num_beams=3, use_cache=use_cache, return_dict_in_generate=True, output_scores=True
        ))  # fmt: skip
    assert torch.equal(runs[0].sequences, runs[1].sequences)
    torch.testing.assert_close(runs[0].sequences_scores, runs[1].sequences_scores)
    assert len(runs[0].sequences) == 2 * options.get("num_return_sequences", 1)


@pytest.mark.parametrize("num_beams", [1, 3])
def test_left_padded_rows_equal_their_runs_alone(model, num_beams):
    rows = [some_ids(1, n, seed=n)[0] for n in (3, 19, 10)]
    ids = torch.full((3, 19), PAD)
    for row, target in zip(rows, ids, strict=True):
        target[19 - len(row) :] = row
    options = GREEDY if num_beams == 1 else SHORT
    out = model.generate(ids, attention_mask=(ids != PAD).long(), **options, num_beams=num_beams)
    for row, got in zip(rows, out, strict=True):
        alone = model.generate(row[None], **options, num_beams=num_beams)[0]
        assert torch.equal(got[19 - len(row) :], alone)


def test_a_returned_cache_is_continued(model, ids, expected):
    """Two calls of generate on one cache equal one; a second prompt appended to the answer equals a fresh run."""
    first = model.generate(ids, **GREEDY | {"max_new_tokens": 6}, return_dict_in_generate=True)
    cache = first.past_key_values
    again = model.generate(
        first.sequences, **GREEDY | {"max_new_tokens": NEW - 6}, past_key_values=copy.deepcopy(cache)
    )
    assert torch.equal(again, expected)
    turn = torch.cat([first.sequences, some_ids(2, 7, seed=5)], dim=1)
    fresh = model.generate(turn, **GREEDY)
    for name in ("cache", "past_key_values"):
        assert torch.equal(model.generate(turn, **GREEDY, **{name: copy.deepcopy(cache)}), fresh)


@pytest.mark.parametrize("size", [1, 7, 64])
def test_prefill_in_chunks(model, ids, expected, size):
    assert torch.equal(model.generate(ids, **GREEDY, prefill_chunk_size=size), expected)


def _repeating():
    """A prompt that repeats itself, so that looking it up finds drafts."""
    part = some_ids(1, 7, seed=10)
    return torch.cat([part, part, part[:, :4]], dim=1)


@pytest.mark.parametrize("kv_format", ["packed", "float"])
def test_prompt_lookup_is_greedy(model, kv_format):
    ids = _repeating()
    lengths = []
    hook = model.model.layers[0].register_forward_pre_hook(lambda m, args: lengths.append(args[0].streams.shape[1]))
    out = model.generate(ids, **GREEDY, prompt_lookup_num_tokens=4, kv_format=kv_format)
    hook.remove()
    assert torch.equal(out, model.generate(ids, **GREEDY))
    # The drafts were really verified: some forward took more than one new token.
    assert any(1 < n < ids.shape[1] for n in lengths)


@pytest.mark.parametrize(
    ("seed", "kv_format"),
    [
        pytest.param(
            seed, kv_format, marks=() if (seed, kv_format) in ((0, "packed"), (1, "float")) else pytest.mark.slow
        )
        for seed in range(50)
        for kv_format in ("packed", "float")
    ],
)
def test_lookup_and_assistants_are_greedy(model, seed, kv_format):
    """Prompts of any length that repeat themselves; an assistant whose drafts are partly accepted."""
    part = some_ids(1, 5 + seed % 9, seed=seed)
    ids = torch.cat([part, part, part[:, : seed % 5]], dim=1)
    greedy = GREEDY | {"suppress_tokens": [PAD]}  # of ids with padding, an assistant infers a mask
    plain = model.generate(ids, **greedy)
    assistant = new_model(torch.float64, seed=1, **FIVE_LAYERS)
    assistant.model.load_state_dict(model.model.state_dict())  # the same body under another head
    with torch.no_grad():
        assistant.lm_head.weight.lerp_(model.lm_head.weight, 0.7)
    assistant.generation_config.num_assistant_tokens = 1 + seed % 6
    for options in ({"prompt_lookup_num_tokens": 1 + seed % 7}, {"assistant_model": assistant}):
        assert torch.equal(model.generate(ids, **greedy, kv_format=kv_format, **options), plain)


@pytest.mark.parametrize(
    ("seed", "draft_tokens"), [(0, 1), (0, 5), pytest.param(1, 1, marks=pytest.mark.slow), (1, 5)]
)
def test_an_assistant_is_greedy(model, ids, expected, seed, draft_tokens):
    """The model itself as assistant (seed 0: every draft accepted), and another one (most rejected)."""
    assistant = new_model(torch.float64, seed=seed, **FIVE_LAYERS)
    assistant.generation_config.num_assistant_tokens = draft_tokens
    assert torch.equal(model.generate(ids[:1], **GREEDY, assistant_model=assistant), expected[:1])


def test_assisted_sampling_draws_the_same_kind_of_tokens(model):
    out = model.generate(
        some_ids(1, PROMPT, seed=11),
        **GREEDY | {"do_sample": True},
        assistant_model=new_model(torch.float64, seed=1, **FIVE_LAYERS),
    )
    assert out.shape == (1, PROMPT + NEW)


@pytest.mark.parametrize("num_beams", [1, 2])
def test_inputs_embeds_beside_input_ids(model, ids, num_beams):
    embeds, options = model.get_input_embeddings()(ids).detach(), SHORT | {"num_beams": num_beams}
    expected = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, inputs_embeds=embeds, **options), expected)
    assert not torch.equal(model.generate(ids, inputs_embeds=embeds.flip(1), **options), expected)
    with pytest.raises(ValueError, match="inputs_embeds without input_ids"):
        model.generate(inputs_embeds=embeds, **options)


def test_inputs_embeds_alone_without_engram(ids):
    model = new_model(torch.float64, engram_layer_ids=[], engram_num_embeddings=[])
    embeds = model.get_input_embeddings()(ids).detach()
    answers = model.generate(ids, **GREEDY)[:, PROMPT:]
    assert torch.equal(model.generate(inputs_embeds=embeds, **GREEDY), answers)


def test_streamer(model, tokenizer, expected):
    ids, text = some_ids(2, PROMPT, seed=11)[:1], io.StringIO()
    with redirect_stdout(text):
        model.generate(ids, **GREEDY, streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True))
    assert text.getvalue().split() == words(expected[0, PROMPT:])


def test_pipeline(model, tokenizer):
    """Prompts of different length in one batch of the pipeline."""
    rows = [some_ids(1, n, seed=n)[0] for n in (5, PROMPT)]
    options = {k: v for k, v in SHORT.items() if k != "eos_token_id"}
    make = pipeline("text-generation", model=model, tokenizer=tokenizer)
    prompts = [" ".join(words(row)) for row in rows]
    alone = [words(model.generate(row[None], **options, eos_token_id=2)[0, len(row) :]) for row in rows]
    for batch_size in (1, 2):
        answers = make(prompts, return_full_text=False, batch_size=batch_size, **options)
        assert [answer[0]["generated_text"].split() for answer in answers] == alone


def test_outputs_of_every_step(model, ids, expected):
    out = model.generate(
        ids, **GREEDY, return_dict_in_generate=True, output_logits=True, output_scores=True, output_hidden_states=True
    )
    assert len(out.logits) == len(out.hidden_states) == NEW
    with torch.no_grad():
        whole = model(expected, use_cache=False, output_hidden_states=True)
    got = torch.stack(out.logits, dim=1)
    # generate hands its logits on in float32.
    torch.testing.assert_close(got.double(), whole.logits[:, PROMPT - 1 : -1], atol=1e-5, rtol=1e-5)
    for step in range(1, NEW):
        for state, full in zip(out.hidden_states[step], whole.hidden_states, strict=True):
            torch.testing.assert_close(state[:, 0], full[:, PROMPT - 1 + step], atol=1e-9, rtol=0)


# ---- options and refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decoder_replay": "fast"}, r"decoder_replay is 'fast'; accepted: \('full', 'exact'"),
        ({"kv_format": "int8"}, r"kv_format is 'int8'; accepted: \('packed', 'float'\)"),
        ({"use_mtp": True}, "use_mtp is True for a model without a drafter"),
        ({"cache_implementation": "static"}, "cache_implementation is 'static'"),
        ({"cache_implementation": "offloaded"}, "cache_implementation is 'offloaded'"),
        ({"cache_implementation": "offloaded_static"}, "cache_implementation is 'offloaded_static'"),
        ({"cache_implementation": "quantized"}, "cache_implementation is 'quantized'"),
        ({"cache_implementation": "paged"}, "paged"),
        ({"past_key_values": DynamicCache()}, "cache is a DynamicCache; accepted: Dsv4Cache"),
        ({"cache": DynamicCache()}, "cache is a DynamicCache; accepted: Dsv4Cache"),
    ],
    ids=lambda value: ",".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) and "cache" not in value
    and "past_key_values" not in value else None,
)  # fmt: skip
def test_refusals_name_the_value(model, ids, options, message):
    with pytest.raises(ValueError, match=message):
        model.generate(ids, **GREEDY, **options)


def test_continuous_batching_is_refused(model, ids):
    with pytest.raises(ValueError, match="paged cache; accepted: generate"):
        model.generate_batch(ids.tolist())


@pytest.mark.parametrize(
    "options",
    [
        {"penalty_alpha": 0.6, "top_k": 4},
        {"dola_layers": "low"},
        {"num_beams": 3, "num_beam_groups": 3, "diversity_penalty": 0.5},
    ],
)
def test_modes_that_transformers_moved_out_say_so(model, ids, options):
    """They need `custom_generate` code from the Hub; without it transformers raises, it does not decode something else."""
    with pytest.raises((ValueError, OSError, ImportError, TypeError)):
        model.generate(ids, **GREEDY, **options)


def test_options_are_saved_and_read_back(tmp_path, ids):
    model = new_model()
    assert {k: getattr(model.generation_config, k) for k in ("kv_format", "decoder_replay", "use_mtp")} == {
        "kv_format": "packed", "decoder_replay": "exact", "use_mtp": False,
    }  # fmt: skip
    model.generation_config.kv_format, model.generation_config.decoder_replay = "float", "full"
    model.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "generation_config.json").read_text(encoding="utf-8"))
    assert (written["kv_format"], written["decoder_replay"], written["use_mtp"]) == ("float", "full", False)
    loaded = Dsv41ForCausalLM.from_pretrained(tmp_path).eval()
    assert (loaded.generation_config.kv_format, loaded.generation_config.decoder_replay) == ("float", "full")
    out = loaded.generate(ids, **GREEDY, return_dict_in_generate=True)
    assert out.past_key_values.kv_format == "float"
    assert torch.equal(out.sequences, model.generate(ids, **GREEDY))


def test_options_of_an_own_generation_config(model, ids, expected):
    """A plain GenerationConfig without our options takes the model's."""
    config = GenerationConfig(**GREEDY)
    out = model.generate(ids, generation_config=config, return_dict_in_generate=True)
    assert torch.equal(out.sequences, expected) and out.past_key_values.kv_format == "packed"
    config = GenerationConfig(**GREEDY, kv_format="float")
    out = model.generate(ids, generation_config=config, return_dict_in_generate=True)
    assert out.past_key_values.kv_format == "float"


def test_unrounded_values_are_cached_as_floats(ids):
    model = new_model(torch.float64, cache_rounding=False)
    out = model.generate(ids, **GREEDY, return_dict_in_generate=True)
    assert out.past_key_values.kv_format == "float"
    assert torch.equal(out.sequences, greedy_by_hand(model, ids))
