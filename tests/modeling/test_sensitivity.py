"""The goldens catch the plausible mistakes: each mistake of `sensitivity.json` is made in the model, and a case must fail.

A mistake is made by a monkeypatch or a config value; the comparison is the one of test_goldens_v41. `pytest -rP` prints
which case caught which mistake. Two of the list belong to the vision projector (`aligner_*`) and are not made here.
One, a uniform first pre, changes nothing unless layer 0 has Engram: the streams are equal there. The test says so.
"""

import copy
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

from modeling_dsv4 import attention, decoder, engram, hyper_connections, language_model, layers, moe, ngram_hash
from modeling_dsv4.cache_storage import COMPRESSED_NVFP4, INDEX_MXFP4, WINDOW_FP8, CacheCodec
from modeling_dsv4.fp_codecs import round_fp8, round_mxfp4
from modeling_dsv4.rotary import rotate
from modeling_dsv4.sparse_attention import select_topk
from tests import golden_cases as golden
from tests.modeling import golden_model as released
from tests.reference import engram as oracle_engram
from tests.reference import text_model

# Cheap cases first; a mistake counts as caught at the first case that fails.
CASES = [
    ("text_3", "qdq"),
    ("text_17", "qdq"),
    ("padded", "qdq"),
    ("text_100", "noqdq"),
    ("image", "qdq"),
    ("text_100", "qdq"),
]
OUT_OF_SCOPE = {
    "aligner_gelu_tanh": "the projector of the vision tower",
    "aligner_patch_major": "the projector of the vision tower",
}


@pytest.fixture
def model():
    return copy.deepcopy(released.float_model())


# ---- the mistakes ------------------------------------------------------------------------------------------------------


def _layers(model):
    return model.model.layers


def _window(step):
    def make(model, patch):
        for layer in _layers(model):
            layer.self_attn.window += step

    return make


def _topk_minus_one(model, patch):
    for layer in _layers(model):
        if hasattr(layer.self_attn, "indexer"):
            layer.self_attn.indexer.topk -= 1


def _no_candidates(model, patch):
    patch.setattr(attention.Dsv4Indexer, "uses_candidates", False)


def _newest_block_not_pinned(model, patch):
    def unpinned(scores, visible, *, block_size, k):
        padded = nn.functional.pad(scores, (0, -scores.shape[-1] % block_size), value=float("-inf"))
        return select_topk(padded.unflatten(-1, (-1, block_size)).amax(-1), k)

    patch.setattr(attention, "select_candidate_blocks", unpinned)


def _reindex_reuses(model, patch):
    for layer in _layers(model):
        if layer.self_attn.mode == "reindex":
            layer.self_attn.selects = False


def _no_yarn(model, patch):
    plain = language_model.rotary_frequencies
    patch.setattr(
        language_model, "rotary_frequencies", lambda dim, theta, yarn=None, **k: plain(dim, theta, None, **k)
    )


def _yarn_on_window_layers(model, patch):
    for layer in _layers(model):
        layer.self_attn.rope = "compress"


def _no_inverse_rope(model, patch):
    patch.setattr(attention, "rotate", lambda x, table, inverse=False: x if inverse else rotate(x, table))


def _half_split_rope(model, patch):
    def half_split(x, table, inverse=False):
        cos, sin = (t.unsqueeze(-2) if x.ndim == 4 else t for t in table)
        sin = -sin if inverse else sin
        width = 2 * cos.shape[-1]
        rest, first, second = x.split([x.shape[-1] - width, width // 2, width // 2], dim=-1)
        return torch.cat([rest, first * cos - second * sin, first * sin + second * cos], dim=-1)

    patch.setattr(attention, "rotate", half_split)


def _no_sink(model, patch):
    for layer in _layers(model):
        layer.self_attn.sinks.data.fill_(float("-inf"))


def _sink_in_bfloat16(model, patch):
    for layer in _layers(model):
        layer.self_attn.sinks.data = layer.self_attn.sinks.data.bfloat16().float()


def _bias_vl_ignored(model, patch):
    for layer in _layers(model):
        layer.mlp.gate.e_score_correction_bias_vl.copy_(layer.mlp.gate.e_score_correction_bias)


def _hash_ignores_images(model, patch):
    compress = ngram_hash.Dsv4NgramHash.compress
    patch.setattr(
        ngram_hash.Dsv4NgramHash,
        "compress",
        lambda self, ids, image_mask, **options: compress(self, ids, None, **options),
    )


def _gate_open_on_images(model, patch):
    forward = engram.Dsv4EngramMemory.forward
    patch.setattr(
        engram.Dsv4EngramMemory, "forward", lambda self, streams, rows, image_mask=None: forward(self, streams, rows)
    )


def _no_engram(model, patch):
    patch.setattr(engram.Dsv4EngramMemory, "forward", lambda self, streams, rows, image_mask=None: streams)


def _pre_of_the_same_site(model, patch):
    """A site collapses by its own pre, as in V4."""
    for layer in _layers(model):
        layer.attn_hc.single_pass = layer.ffn_hc.single_pass = False


def _comb_transposed(model, patch):
    expand = hyper_connections.expand_streams
    for module in (hyper_connections, decoder):
        patch.setattr(module, "expand_streams", lambda streams, y, post, comb: expand(streams, y, post, comb.mT))


def _sinkhorn(iterations):
    def make(model, patch):
        for layer in _layers(model):
            layer.attn_hc.settings["iterations"] = layer.ffn_hc.settings["iterations"] = iterations

    return make


def _uniform_first_pre(model, patch):
    patch.setattr(language_model, "first_pre", lambda streams: torch.full_like(streams[..., 0], 1 / streams.shape[2]))


def _codecs(**changed):
    kinds = {"window": WINDOW_FP8, "compressed": COMPRESSED_NVFP4, "index": INDEX_MXFP4}
    kinds = {name: CacheCodec(changed.get(name, codec.rounded)) for name, codec in kinds.items()}

    def make(model, patch):
        patch.setattr(attention, "cache_codecs", lambda config, kv_format="float": kinds)

    return make


def _fp8_without_the_rotated_channels(x):
    rotated = 16  # qk_rope_head_dim of the checkpoint
    return torch.cat([round_fp8(x[..., :-rotated]), x[..., -rotated:]], dim=-1)


def _last_token_position(model, patch):
    table = attention.rotary_table

    def shifted(positions, frequencies):
        # Only positions of entries are made in this file: first + arange, times the ratio of the layer at work.
        step = positions[0, 1] - positions[0, 0] if positions.shape[1] > 1 else 1
        return table(positions + step - 1, frequencies)

    patch.setattr(attention, "rotary_table", shifted)


def _norm_eps(model, patch):
    for module in model.modules():
        if isinstance(module, (layers.Dsv4RMSNorm, engram.Dsv4EngramMemory)):
            module.eps = 1e-6
        if isinstance(module, hyper_connections.Dsv4HyperConnection):
            module.settings["norm_eps"] = 1e-6


def _router_setting(**changed):
    def make(model, patch):
        for layer in _layers(model):
            assert set(changed) <= set(layer.mlp.gate.settings)
            layer.mlp.gate.settings.update(changed)

    return make


def _swiglu_limit(model, patch):
    for module in model.modules():
        if isinstance(module, (layers.Dsv4MLP, moe.Dsv4Experts)):
            module.limit = 10.0


MISTAKES = {
    "window_plus_one": _window(1),
    "window_minus_one": _window(-1),
    "topk_minus_one": _topk_minus_one,
    "no_candidates": _no_candidates,
    "candidate_newest_block_not_pinned": _newest_block_not_pinned,
    "reindex_layer_reuses": _reindex_reuses,
    "no_yarn": _no_yarn,
    "yarn_and_compress_theta_on_swa_layers": _yarn_on_window_layers,
    "no_inverse_rope": _no_inverse_rope,
    "half_split_rope": _half_split_rope,
    "no_sink": _no_sink,
    "sink_bf16": _sink_in_bfloat16,
    "bias_vl_ignored": _bias_vl_ignored,
    "engram_hash_ignores_image_mask": _hash_ignores_images,
    "engram_gate_open_on_image_tokens": _gate_open_on_images,
    "no_engram": _no_engram,
    "mhc_pre_of_same_sublayer": _pre_of_the_same_site,
    "mhc_comb_transposed": _comb_transposed,
    "sinkhorn_19_iterations": _sinkhorn(19),
    "sinkhorn_3_iterations": _sinkhorn(3),
    "fp8_window_kv_only_on_nope_dims": _codecs(window=_fp8_without_the_rotated_channels),
    "compressed_kv_mxfp4_instead_of_nvfp4": _codecs(compressed=round_mxfp4),
    "no_cache_quantisation": _codecs(window=lambda x: x, compressed=lambda x: x, index=lambda x: x),
    "compressed_position_is_last_token": _last_token_position,
    "norm_eps_1e6": _norm_eps,
    "router_scale_ignored": _router_setting(scaling=1.0),
    "router_not_normalised": _router_setting(normalize=False),
    "swiglu_limit_10_instead_of_2": _swiglu_limit,
}  # fmt: skip
# 1e-6 beside the mean squares of ordinary activations is float32 noise; this case has embeddings of 2 ** -11 their size.
ONLY_SEEN_BY = {"norm_eps_1e6": "text_17_smallembed"}
NO_EFFECT_HERE = {"first_pre_mix_uniform": _uniform_first_pre}


def _failing_case(model, only=None):
    """Return the first case (or the case `only`) that the (mutated) model fails, with what the comparison said.

    A difference that one code at its rounding tie explains is no failure: it says nothing about the model.
    """
    for name, mode in [*CASES, ("text_17_smallembed", "qdq")]:
        if only not in (None, name):
            continue
        case = golden.load_case(name, mode)
        if name == "text_17_smallembed":
            model.get_input_embeddings().weight.data.mul_(2.0**-11)
        with released.rounding(model, mode != "noqdq"):
            output = released.outputs_of(model, case)
            try:
                golden.assert_case(name, mode, case, output)
            except AssertionError as error:
                check = released.holds(name, mode, case)
                if mode == "noqdq" or released.single_flip_that_explains(model, case, check) is None:
                    return f"{name} {mode}", str(error).split(": ", 1)[1].split(";")[0]
    return None


def test_the_list_is_complete():
    listed = set(golden.load_json(golden.GOLDEN / "v41" / "sensitivity.json")["mutants"]) - {"none"}
    assert listed == set(MISTAKES) | set(NO_EFFECT_HERE) | set(OUT_OF_SCOPE)


def test_the_model_as_it_is_holds(model):
    assert _failing_case(model) is None


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_caught(mistake, model, monkeypatch):
    MISTAKES[mistake](model, monkeypatch)
    caught = _failing_case(model, ONLY_SEEN_BY.get(mistake))
    assert caught is not None, f"{mistake} changes nothing that the goldens see"
    print(f"{mistake}: caught by {caught[0]} ({caught[1]})")


@pytest.mark.parametrize("mistake", NO_EFFECT_HERE)
def test_a_uniform_first_pre_is_equivalent(mistake, model, monkeypatch):
    """All streams are equal until a layer has run, so any first pre that sums to 1 collapses them alike."""
    assert 0 not in model.config.text_config.engram_layer_ids
    before = released.outputs_of(model, golden.load_case("text_17"))["logits"]
    NO_EFFECT_HERE[mistake](model, monkeypatch)
    after = released.outputs_of(model, golden.load_case("text_17"))["logits"]
    np.testing.assert_allclose(after, before, atol=1e-5)
    print(f"{mistake}: no effect, as the goldens say")


# ---- image positions, against the oracle: no vision tower needed -----------------------------------------------------------


@cache
def _image_row(image_token_id):
    """A row with two image spans, and what the oracle makes of it; embeddings are those of the image token.

    Without cache rounding: at a rounding tie float32 and the float64 oracle may store different codes.
    """
    case = golden.load_case("text_17")
    ids = case["input_ids"].copy()
    ids[0, 3:7] = ids[0, 12:14] = image_token_id
    config = text_model.load_config(golden.CHECKPOINT_V41)["text_config"]
    token_map = oracle_engram.build_token_map(golden.CHECKPOINT_V41 / "tokenizer.json")
    expected = text_model.forward(
        released.oracle_weights(),
        config,
        ids,
        image_mask=ids == image_token_id,
        token_map=token_map,
        rounding=False,
    )
    return case | {"input_ids": ids}, expected["logits"]


@pytest.mark.parametrize(
    "mistake", [None, "bias_vl_ignored", "engram_hash_ignores_image_mask", "engram_gate_open_on_image_tokens"]
)
def test_image_positions_against_the_oracle(mistake, model, monkeypatch):
    case, expected = _image_row(model.config.image_token_id)
    monkeypatch.setattr(model.config.text_config, "cache_rounding", False)
    if mistake is not None:
        MISTAKES[mistake](model, monkeypatch)
    with released.rounding(model, False):
        error = np.abs(released.outputs_of(model, case)["logits"] - expected).max()
    assert error < 1e-4 if mistake is None else error > 1e-2
    print(f"{mistake or 'as it is'}: logits differ by {error:.1e} from the oracle")
