"""The model with images: goldens, decoding, batches, chunks, causality, routing and errors."""

import copy

import numpy as np
import pytest
import torch
from transformers.modeling_outputs import BaseModelOutputWithPooling

from modeling_dsv4 import (
    Dsv4Cache,
    Dsv4QuantizationConfig,
    Dsv41Config,
    Dsv41ForCausalLM,
    Dsv41ForConditionalGeneration,
)
from tests import golden_cases as golden

from .golden_model import rounding
from .image_models import (
    GREEDY,
    IMAGE,
    batch_left,
    case_inputs,
    decode_case,
    encode,
    exact_model,
    golden_model,
    image_inputs,
    load_golden,
    logits_of,
    prompt,
    record,
    shared_tiny,
    tiny_config,
    tiny_model,
    vision_parameters,
)

EXACT = 1e-9  # float64 without rounding: nothing but the order of sums
# An expert multiplies all its tokens at once, and the last bits of a product depend on how many those are.
UNMOVED = 1e-12


def generate(model, inputs, steps, **options):
    """Greedy token ids and the logits of every step `[B, steps, V]` (float32, as `generate` hands them out)."""
    settings = GREEDY | {"output_logits": True, "return_dict_in_generate": True, "max_new_tokens": steps}
    out = model.generate(**inputs, **settings, **options)
    return out.sequences, torch.stack(out.logits, dim=1)


def assert_same_generation(result, expected):
    """Equal tokens, and logits equal to what float32 can tell."""
    assert torch.equal(result[0], expected[0])
    torch.testing.assert_close(result[1], expected[1], atol=1e-6, rtol=1e-6)


def moves(before, after):
    """How far the logits of each position `[S]` of one row have moved."""
    return (before - after)[0].abs().amax(-1)


# ---- goldens ------------------------------------------------------------------------------------------------------------

# The noqdq answer of this case is in the manifest but its file is not among the public ones.
MODES = [mode for mode in ("qdq", "noqdq") if mode in golden.manifest()["cases"]["image"]["files"]]


@pytest.mark.parametrize("mode", MODES)
def test_golden_case_from_pixels(mode):
    """Three rows with two, one and no image: logits, streams, selections, routing and n-gram rows by the rules."""
    case = golden.load_case("image", mode)
    with rounding(golden_model(), mode == "qdq") as model:
        report = golden.assert_case("image", mode, case, record(model, case))
    assert report["logits"].size == 126 and {"streams.9", "topk.8", "router_idx.9", "engram_hash"} <= report.keys()


def test_golden_case_in_bfloat16():
    """The rms of the deviation from the float32 golden is within 1.5 times the recorded one."""
    case, model = golden.load_case("image"), load_golden(torch.bfloat16, dequantize=True)
    logits = logits_of(model, **case_inputs(case)).float().numpy()
    errors = (logits[..., case["logits_vocab"]] - case["logits"])[case["attention_mask"].astype(bool)]
    recorded = golden.manifest()["cases"]["image"]["bf16_vs_fp32"]["rms"]
    assert np.sqrt(np.mean(np.square(errors))) <= 1.5 * recorded


def test_float64_agrees_with_the_golden():
    """The float64 twin that the exact tests below use is the same model."""
    case = golden.load_case("image")
    with rounding(exact_model(), True) as model:
        out = logits_of(model, **case_inputs(case))
    assert golden.logit_errors(case, out.numpy()).max() <= golden.LOGIT_BOUND["qdq"]


@pytest.mark.parametrize("mode, kv_format", [("qdq", "packed"), ("qdq", "float"), ("noqdq", "float")])
def test_golden_generation_with_an_image(mode, kv_format):
    """Greedy tokens equal; the logits of every step within the bound of the mode (packed and float alike)."""
    case = decode_case(mode)
    with rounding(golden_model(), mode == "qdq") as model:
        out = model.generate(
            **case_inputs(case), **GREEDY, max_new_tokens=12, kv_format=kv_format, output_logits=True,
            return_dict_in_generate=True,
        )  # fmt: skip
    assert np.array_equal(out.sequences.numpy(), case["sequences"])
    steps = torch.stack(out.logits, dim=1).numpy()
    known = np.arange(steps.shape[-1]) != IMAGE  # the goldens hold 0 there
    assert np.abs(steps - case["step_logits"])[..., known].max() <= golden.LOGIT_BOUND[mode]


# ---- K2: spans cut everywhere -------------------------------------------------------------------------------------------


PROMPT = 30  # tokens of the golden prompt


@pytest.mark.parametrize(
    "mode, kv_format, sizes",
    [
        ("qdq", "packed", (1, 9, PROMPT - 1, PROMPT + 1)),
        ("qdq", "float", (7,)),
        ("noqdq", "float", (2,)),
        pytest.param("qdq", "packed", (*range(1, 14), PROMPT - 1, PROMPT + 1), marks=pytest.mark.slow),
        pytest.param("qdq", "float", (2, PROMPT - 1, PROMPT + 1), marks=pytest.mark.slow),
        pytest.param("noqdq", "float", (7, PROMPT - 1, PROMPT + 1), marks=pytest.mark.slow),
    ],
)
def test_prefill_in_chunks_of_any_size(mode, kv_format, sizes):
    """The span (positions 3 to 12) is cut at any place (slow: every one); the golden tokens follow."""
    case = decode_case(mode)
    inputs = case_inputs(case)
    assert inputs["input_ids"].shape[1] == PROMPT
    with rounding(golden_model(), mode == "qdq") as model:
        for size in sizes:
            out = model.generate(**inputs, **GREEDY, max_new_tokens=2, kv_format=kv_format, prefill_chunk_size=size)
            assert out[0].tolist() == case["sequences"][0, : PROMPT + 2].tolist(), f"chunks of {size}"


def test_every_split_equals_one_forward():
    """Prefill n positions and then the rest, for every n: the same logits (float64, no rounding)."""
    model = shared_tiny()
    inputs = image_inputs(model, 2, (4, 5), 1, (3, 3), 3)
    whole = logits_of(model, **inputs)
    encoded, rest = encode(model, inputs)
    rows = torch.cat(list(encoded.pooler_output))
    ids = rest["input_ids"]
    for cut in range(1, ids.shape[1]):
        cache, parts, used = Dsv4Cache(model.config, "float"), [], 0
        for piece in (ids[:, :cut], ids[:, cut:]):
            count = int((piece == model.config.image_token_id).sum())
            some = BaseModelOutputWithPooling(pooler_output=[rows[used : used + count]])
            images = {"mm_encoder_outputs": {"image": some}} if count else {}
            parts.append(logits_of(model, input_ids=piece, cache=cache, **images))
            used += count
        torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=EXACT, rtol=0)


def test_chunks_of_a_padded_batch_with_different_image_counts():
    """Chunks cut the spans of the rows at different places; features go to their own row and place."""
    model = shared_tiny()
    rows = [
        image_inputs(model, 2, (4, 5), 1, (3, 3), 3, seed=1),
        {"input_ids": prompt(model, 11, seed=2)},
        image_inputs(model, 1, (5, 3), 4, seed=3),
    ]
    batch = batch_left(rows)
    expected = generate(model, batch, 3)
    for size in (1, 2, 3, 5, 8, 13, 40):
        assert_same_generation(generate(model, batch, 3, prefill_chunk_size=size), expected)


def test_second_turn_on_a_cache_that_holds_an_image():
    """A new image and text continue a cache; only what is new is given, or all ids with all images."""
    model = shared_tiny()
    first = image_inputs(model, 3, (4, 5), 4, seed=1)
    both = image_inputs(model, 3, (4, 5), 4, (3, 3), 5, seed=1)
    expected = generate(model, both, 4)
    seen = first["input_ids"].shape[1]
    assert torch.equal(both["input_ids"][:, :seen], first["input_ids"])
    second = {"pixel_values": both["pixel_values"][20:], "image_grid_hw": both["image_grid_hw"][1:]}
    for given in (both | second, both):
        for options in ({}, {"prefill_chunk_size": 4}):
            cache = Dsv4Cache(model.config, "float")
            logits_of(model, **first, cache=cache)
            assert_same_generation(generate(model, given, 4, cache=cache, **options), expected)


def test_a_copied_cache_serves_two_questions():
    """The image is read once; each copy continues with a question of its own."""
    model = shared_tiny()
    image = image_inputs(model, 2, (5, 6), 1, seed=4)
    cache = Dsv4Cache(model.config, "float")
    logits_of(model, **image, cache=cache)
    for seed in (5, 6):
        question = prompt(model, 6, seed=seed)
        whole = image | {"input_ids": torch.cat([image["input_ids"], question], dim=1)}
        expected = logits_of(model, **whole)[:, -6:]
        copied = copy.deepcopy(cache)
        torch.testing.assert_close(logits_of(model, input_ids=question, cache=copied), expected, atol=EXACT, rtol=0)


# ---- decoding -----------------------------------------------------------------------------------------------------------


def mixed_rows(model):
    """Rows with two, no and one image, of different length."""
    return [
        image_inputs(model, 2, (4, 5), 1, (3, 3), 3, seed=1),
        {"input_ids": prompt(model, 9, seed=2)},
        image_inputs(model, (5, 3), 6, seed=3),
    ]


def test_left_padded_rows_equal_their_runs_alone():
    model, rows = exact_model(), mixed_rows(exact_model())
    batch = batch_left(rows)
    logits = logits_of(model, **batch)
    generated = model.generate(**batch, **GREEDY, max_new_tokens=5)
    for index, row in enumerate(rows):
        length = row["input_ids"].shape[1]
        torch.testing.assert_close(logits[index, -length:], logits_of(model, **row)[0], atol=EXACT, rtol=0)
        alone = model.generate(**row, **GREEDY, max_new_tokens=5)
        assert torch.equal(generated[index, -5:], alone[0, -5:])


def test_right_padded_rows_equal_their_runs_alone():
    model, rows = exact_model(), mixed_rows(exact_model())
    longest = max(row["input_ids"].shape[1] for row in rows)
    flipped = [row | {"input_ids": row["input_ids"].flip(-1)} for row in rows]
    batch = batch_left(flipped)
    batch["input_ids"], batch["attention_mask"] = batch["input_ids"].flip(-1), batch["attention_mask"].flip(-1)
    assert batch["input_ids"].shape[1] == longest
    logits = logits_of(model, **batch)
    for index, row in enumerate(rows):
        length = row["input_ids"].shape[1]
        torch.testing.assert_close(logits[index, :length], logits_of(model, **row)[0], atol=EXACT, rtol=0)


def test_decoding_equals_recomputing_without_a_cache():
    model = exact_model()
    batch = batch_left(mixed_rows(model))
    out = model.generate(**batch, **GREEDY, max_new_tokens=6, output_logits=True, return_dict_in_generate=True)
    mask = torch.nn.functional.pad(batch["attention_mask"], (0, 6), value=1)
    again = logits_of(model, **(batch | {"input_ids": out.sequences, "attention_mask": mask}), use_cache=False)
    # `generate` hands logits out in float32.
    torch.testing.assert_close(torch.stack(out.logits, dim=1), again[:, -7:-1].float(), atol=1e-6, rtol=0)


def written_out_beams(model, row, beams, steps):
    """The best continuation by beam search, every candidate recomputed from the pixels, without any cache."""
    ids = row["input_ids"]
    images = {name: row[name] for name in row if name != "input_ids"}
    kept = [(0.0, [])]
    for _ in range(steps):
        candidates = []
        for score, tokens in kept:
            text = torch.cat([ids, torch.tensor([tokens], dtype=torch.long)], dim=1)
            scores = logits_of(model, input_ids=text, **images, use_cache=False)[0, -1].log_softmax(-1)
            scores[IMAGE] = -torch.inf
            candidates += [(score + float(scores[t]), [*tokens, int(t)]) for t in scores.topk(beams).indices]
        kept = sorted(candidates, reverse=True)[:beams]
    return kept[0]


def test_beams_equal_a_written_out_search():
    """Rows with different image counts: features are expanded to the beams of their own row."""
    model, rows = shared_tiny(), mixed_rows(shared_tiny())
    out = model.generate(
        **batch_left(rows), **GREEDY, max_new_tokens=4, num_beams=3, output_scores=True, return_dict_in_generate=True
    )
    for index, row in enumerate(rows):
        score, tokens = written_out_beams(model, row, beams=3, steps=4)
        assert out.sequences[index, -4:].tolist() == tokens
        # transformers divides by the number of new tokens (length_penalty 1).
        assert float(out.sequences_scores[index]) == pytest.approx(score / 4, abs=1e-6)


def test_beams_with_chunks():
    model = shared_tiny()
    batch = batch_left(mixed_rows(model))
    expected = model.generate(**batch, **GREEDY, max_new_tokens=4, num_beams=3)
    for size in (1, 4, 9):
        out = model.generate(**batch, **GREEDY, max_new_tokens=4, num_beams=3, prefill_chunk_size=size)
        assert torch.equal(out, expected), f"chunks of {size}"


def test_num_return_sequences():
    """Sampling from the best token only: every returned sequence of a row is its greedy one."""
    model = shared_tiny()
    batch = batch_left(mixed_rows(model))
    greedy = model.generate(**batch, **GREEDY, max_new_tokens=4)
    out = model.generate(**batch, do_sample=True, top_k=1, num_return_sequences=3, max_new_tokens=4, eos_token_id=None)
    assert torch.equal(out, greedy.repeat_interleave(3, dim=0))
    beams = model.generate(**batch, **GREEDY, max_new_tokens=4, num_beams=3, num_return_sequences=2)
    assert beams.shape[0] == 6 and torch.equal(
        beams[::2], model.generate(**batch, **GREEDY, max_new_tokens=4, num_beams=3)
    )


@pytest.mark.parametrize("prefill", [{}, {"prefill_chunk_size": 5}])
def test_prompt_lookup_equals_greedy(prefill):
    """Candidates come from the prompt, some are dropped and the cache is rolled back."""
    model = shared_tiny()
    row = image_inputs(model, 2, (4, 5), 3, seed=8)
    greedy = model.generate(**row, **GREEDY, max_new_tokens=12)
    # What will be generated stands in the prompt already, so that candidates are found and partly right.
    told = torch.cat([row["input_ids"], greedy[:, -12:], row["input_ids"][:, -3:]], dim=1)
    row["input_ids"] = told
    expected = model.generate(**row, **GREEDY, max_new_tokens=14)
    lengths = []
    layer = model.model.language_model.layers[0]
    handle = layer.register_forward_pre_hook(lambda module, args: lengths.append(args[0].streams.shape[1]))
    out = model.generate(**row, **GREEDY, max_new_tokens=14, prompt_lookup_num_tokens=4, **prefill)
    handle.remove()
    assert torch.equal(out, expected)
    prefills = -(-told.shape[1] // prefill.get("prefill_chunk_size", told.shape[1]))
    assert max(lengths[prefills:]) > 1  # candidates were verified


def test_an_assistant_sees_the_images():
    """Candidates of another model of this kind: the greedy tokens, with one image and a cache each."""
    model, assistant = shared_tiny(), tiny_model()
    with torch.no_grad():
        for parameter in assistant.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    row = image_inputs(model, 2, (4, 5), 3, seed=8)
    expected = model.generate(**row, **GREEDY, max_new_tokens=8)
    seen = []
    handle = assistant.model.language_model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["inputs_embeds"]), with_kwargs=True
    )
    assert torch.equal(model.generate(**row, **GREEDY, max_new_tokens=8, assistant_model=assistant), expected)
    handle.remove()
    spans = torch.cat(list(encode(model, row)[0].pooler_output))
    torch.testing.assert_close(seen[0][0, 2 : 2 + len(spans)], spans)
    assert torch.equal(model.generate(**row, **GREEDY, max_new_tokens=8, assistant_model=model), expected)


def test_generation_from_input_embeddings():
    model = shared_tiny()
    row = image_inputs(model, 2, (4, 5), 3, seed=8)
    embeds = model.get_input_embeddings()(row["input_ids"]).detach()
    expected = model.generate(**row, **GREEDY, max_new_tokens=4)
    assert torch.equal(
        model.generate(**row, inputs_embeds=embeds, **GREEDY, max_new_tokens=4)[:, -4:], expected[:, -4:]
    )


def test_generation_without_a_cache():
    model = shared_tiny()
    batch = batch_left(mixed_rows(model))
    expected = model.generate(**batch, **GREEDY, max_new_tokens=4)
    assert torch.equal(model.generate(**batch, **GREEDY, max_new_tokens=4, use_cache=False), expected)


def test_an_image_token_is_never_generated():
    """It has no embedding of its own, so choosing it would end generation with an error."""
    model = tiny_model()
    image = model.config.image_token_id
    row = image_inputs(model, 2, (3, 3), 3)
    with torch.no_grad():
        weight = model.lm_head.weight
        others = weight.clone()
        weight[image] = 0
        best = model.generate(**row, **GREEDY, max_new_tokens=1)[0, -1]
        weight.copy_(others)
        weight[image] = 3 * others[best]  # now it would win whenever `best` did
    assert int(logits_of(model, **row)[0, -1].argmax()) == image
    for options in (GREEDY, GREEDY | {"num_beams": 2}, {"do_sample": True, "eos_token_id": None}):
        out = model.generate(**row, **options, max_new_tokens=6)
        assert image not in out[0, row["input_ids"].shape[1] :].tolist()


# ---- K10: causality, routing, errors ------------------------------------------------------------------------------------


def test_positions_before_an_image_do_not_see_it():
    """Another image moves the logits from the second position of its span on (the first is learned), and none before."""
    model = exact_model()
    inputs = image_inputs(model, 3, (4, 5), 2, (3, 3), 4)
    before = logits_of(model, **inputs)
    for patches, start in ((slice(0, 20), 3), (slice(20, 29), 3 + 10 + 2)):
        pixels = inputs["pixel_values"].clone()
        pixels[patches] *= -1
        moved = moves(before, logits_of(model, **inputs | {"pixel_values": pixels}))
        assert bool((moved[: start + 1] <= UNMOVED).all()) and bool((moved[start + 1 :] > 1e-4).all())


def test_image_positions_are_causal():
    """Inside a span too: the embedding of a position moves itself and what follows, nothing before, for every position."""
    model = exact_model()
    encoded, rest = encode(model, image_inputs(model, 3, (4, 5), 2))
    (span,) = encoded.pooler_output
    before = logits_of(model, **rest, mm_encoder_outputs={"image": encoded})
    for place in range(len(span)):
        other = span.clone()
        other[place] += 0.1
        images = {"image": BaseModelOutputWithPooling(pooler_output=[other])}
        moved = moves(before, logits_of(model, **rest, mm_encoder_outputs=images))
        assert bool((moved[: 3 + place] <= UNMOVED).all()) and float(moved[3 + place]) > 1e-6


def routing(model, inputs):
    """Experts of every layer `[layers, S, k]`, from the routers."""
    found, text = [], model.model.language_model
    handles = [
        layer.mlp.gate.register_forward_hook(lambda module, args, routed: found.append(routed[2]))
        for layer in text.layers
    ]
    logits_of(model, **inputs)
    for handle in handles:
        handle.remove()
    return torch.stack(found)


def test_image_positions_are_routed_by_their_own_bias():
    """A large image bias draws every image position, delimiters included, and no text position."""
    model = tiny_model()
    inputs = image_inputs(model, 3, (4, 5), 4)
    places = inputs["input_ids"][0] == model.config.image_token_id
    before = routing(model, inputs)
    first = model.model.language_model.layers[0].mlp.gate
    with torch.no_grad():
        first.e_score_correction_bias_vl[3] += 100.0
    after = routing(model, inputs)
    assert bool((after[0, places] == 3).any(-1).all())
    assert torch.equal(before[0, ~places], after[0, ~places])
    assert not bool((before[0, places] == 3).any(-1).all())
    with torch.no_grad():
        first.e_score_correction_bias[2] += 100.0
    text = routing(model, inputs)
    assert torch.equal(after[0, places], text[0, places]) and bool((text[0, ~places] == 2).any(-1).all())


def test_ngrams_stop_at_images():
    """Image positions are dead for the n-gram hash: text after a span does not depend on the ids before it."""
    model = exact_model()
    hashes = []
    handle = model.model.language_model.ngram_hash.register_forward_hook(
        lambda module, args, rows: hashes.append(torch.stack(list(rows.values())))
    )
    inputs = image_inputs(model, 3, (3, 3), 4, seed=1)
    other = inputs | {"input_ids": inputs["input_ids"].clone()}
    other["input_ids"][:, :3] = torch.tensor([[200, 201, 202]])
    for each in (inputs, other):
        logits_of(model, **each)
    handle.remove()
    assert torch.equal(hashes[0][:, :, 3:], hashes[1][:, :, 3:])
    assert not torch.equal(hashes[0][:, :, :3], hashes[1][:, :, :3])


def test_counts_of_positions_and_embeddings_must_agree():
    model = tiny_model()
    inputs = image_inputs(model, 2, (4, 5), 3)
    ids, text = inputs["input_ids"], prompt(model, 8)
    narrow = BaseModelOutputWithPooling(pooler_output=[torch.zeros(10, 31)])
    with pytest.raises(ValueError, match="width 31; accepted: 32"):
        model(input_ids=ids, mm_encoder_outputs={"image": narrow})
    cases = [
        (inputs | {"input_ids": text}, "input_ids has 0 image positions .*the images have 10 "),
        (inputs | {"input_ids": ids[:, :-6]}, "input_ids has 7 image positions .*the images have 10 "),
        ({"input_ids": ids}, "input_ids has 10 image positions .*the images have 0 "),
    ]
    for wrong, message in cases:
        with pytest.raises(ValueError, match=message):
            model(**wrong)
        with pytest.raises(ValueError, match="image positions"):
            model.generate(**wrong, **GREEDY, max_new_tokens=2)


def test_arguments_that_exclude_each_other():
    model = tiny_model()
    inputs = image_inputs(model, 2, (4, 5), 3)
    encoded, rest = encode(model, inputs)
    with pytest.raises(ValueError, match="no image_grid_hw"):
        model(**rest, pixel_values=inputs["pixel_values"])
    with pytest.raises(ValueError, match="mm_encoder_outputs as well"):
        model(**inputs, mm_encoder_outputs={"image": encoded})
    with pytest.raises(ValueError):
        model.generate(**inputs, mm_encoder_outputs={"image": encoded}, **GREEDY, max_new_tokens=2)


@pytest.mark.parametrize("image_token_id", [7, None])
def test_a_model_without_vision_reads_text_and_refuses_images(image_token_id):
    config = Dsv41Config(text_config=tiny_config().text_config, vision_config=None, image_token_id=image_token_id)
    model, inputs = Dsv41ForConditionalGeneration(config).eval(), image_inputs(shared_tiny(), 2, (4, 5), 3)
    ids = prompt(shared_tiny(), 6)
    assert model.generate(ids, **GREEDY, max_new_tokens=3).shape == (1, 9) and not vision_parameters(model)
    with pytest.raises(ValueError, match="without vision_config"):
        model(**inputs)


def test_encoder_outputs_given_by_hand():
    """The same bits as from pixels, in forward and in generate; the features are not used up."""
    model = golden_model()
    inputs = image_inputs(model, 2, (4, 5), 1, (3, 3), 3)
    encoded, rest = encode(model, inputs)
    expected = model.generate(**inputs, **GREEDY, max_new_tokens=4)
    for _ in range(2):
        given = {"mm_encoder_outputs": {"image": encoded}}
        assert torch.equal(logits_of(model, **inputs), logits_of(model, **rest, **given))
        assert torch.equal(model.generate(**rest, **given, **GREEDY, max_new_tokens=4), expected)


def test_images_beside_input_embeddings():
    """Given embeddings serve the text; images overwrite their own positions, and are never dropped in silence."""
    model = shared_tiny()
    inputs = image_inputs(model, 2, (4, 5), 3)
    embeds = model.get_input_embeddings()(inputs["input_ids"]).detach()
    assert torch.equal(logits_of(model, **inputs, inputs_embeds=embeds), logits_of(model, **inputs))
    with pytest.raises(ValueError, match="without input_ids"):
        model(inputs_embeds=embeds, **{name: inputs[name] for name in ("pixel_values", "image_grid_hw")})
    encoded, rest = encode(model, inputs)
    filled = embeds.clone()
    filled[0, 2:12] = torch.cat(list(encoded.pooler_output))
    assert torch.equal(logits_of(model, **rest, inputs_embeds=filled), logits_of(model, **inputs))


def test_delimiters_reach_the_language_model():
    """Each learned vector moves the logits from its own position on."""
    model = tiny_model()
    inputs = image_inputs(model, 2, (4, 5), 3)
    before = logits_of(model, **inputs)
    for name, place in (("image_start", 2), ("image_newline", 2 + 4), ("image_end", 2 + 9)):
        delimiter = getattr(model.model, name)
        with torch.no_grad():
            delimiter += 0.5
            after = logits_of(model, **inputs)
            delimiter -= 0.5
        moved = moves(before, after)
        assert bool((moved[:place] <= UNMOVED).all()) and bool((moved[place:] > 1e-6).all())


def test_text_alone():
    """Without images the model is the text model, in forward, in generation and under a loss."""
    model = golden_model()
    text = Dsv41ForCausalLM.from_pretrained(
        golden.CHECKPOINT_V41, dtype=torch.float32, quantization_config=Dsv4QuantizationConfig(dequantize=True)
    ).eval()
    ids = prompt(model, 12)
    assert torch.equal(logits_of(model, input_ids=ids), logits_of(text, input_ids=ids))
    assert torch.equal(model.generate(ids, **GREEDY, max_new_tokens=5), text.generate(ids, **GREEDY, max_new_tokens=5))
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids, labels=ids).loss, text(input_ids=ids, labels=ids).loss)
