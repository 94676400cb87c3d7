"""The V4 language model: goldens of transformers' own implementation, the float64 oracle, builds, and the MTP layer.

The goldens were made without any rounding. With rounding the oracle of `tests/reference/v4_model.py` decides; in float64
model and oracle differ by 1e-14, so that no code and no selection flips.
"""

from functools import cache

import numpy as np
import pytest
import torch

from convert.inventory import released_tensors
from modeling_dsv4 import Dsv4Cache, Dsv4Config, Dsv4ForCausalLM, Dsv4Model
from tests import golden_cases as golden
from tests.grids import half_of
from tests.modeling import golden_model
from tests.modeling import v4_models as tiny
from tests.modeling.tiny_model import oracle_weights
from tests.reference import v4_model
from tests.released_folders import same_bytes, stored_tensors

EXACT = 1e-10  # float64, same sums in another order
CASES = [name for name in golden.manifest(golden.CASES_V4)["cases"] if name.startswith("text")]
SEQUENCES = ["generate_5", "generate_21"]


def case_of(name):
    return golden.load_tensors(golden.CASES_V4 / f"{name}.safetensors")


def ids_of(case):
    return torch.as_tensor(case["input_ids"]).long()


@cache
def golden_oracle():
    return v4_model.load_checkpoint(golden.CHECKPOINT_V4), golden.load_json(golden.CHECKPOINT_V4 / "config.json")


def assert_equal_to_oracle(output, expected, bound=EXACT):
    """Logits, streams, entries, routes and selections of one row."""
    for key in expected:
        if key.startswith("topk"):
            for chosen, positions in zip(output[key][0], expected[key], strict=True):
                assert sorted(j for j in chosen.tolist() if j >= 0) == positions, key
        elif key.startswith("router_idx"):
            assert np.array_equal(np.sort(output[key], -1), np.sort(expected[key], -1)), key
        elif key.startswith("router_w"):
            np.testing.assert_allclose(np.sort(output[key], -1), np.sort(expected[key], -1), atol=bound)
        elif key != "mtp_logits":
            np.testing.assert_allclose(output[key][0], expected[key], atol=bound, rtol=bound, err_msg=key)


# ---- goldens -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_goldens(name):
    """Logits, streams, final states, selections, routes and pooled entries, as far as the file holds them."""
    model, case = tiny.golden_model(), case_of(name)
    with golden_model.rounding(model, False):
        output = tiny.outputs_of(model, ids_of(case))
    case["attention_mask"] = np.ones_like(case["input_ids"])
    report = golden.compare_case(case, output)
    assert report["logits"].max() <= golden.LOGIT_BOUND["noqdq"]
    seen = set()
    for key, value in report.items():
        kind = key.split(".")[0]
        seen.add(kind)
        if kind in ("topk", "router_idx"):
            assert value == 0, key
        elif kind in ("streams", "final_hidden"):
            assert value <= golden.STREAM_BOUND["noqdq"], key
    assert {"streams", "final_hidden", "router_idx", "topk"} <= seen
    assert np.array_equal(output["logits"].argmax(-1), case["argmax"])
    for key in (k for k in case if k.startswith("router_w")):
        np.testing.assert_allclose(np.sort(output[key], -1), np.sort(case[key], -1), atol=2e-5)
    for key in (k for k in case if k.startswith("compressed_kv")):
        assert output[key].shape == case[key].shape
        np.testing.assert_allclose(output[key], case[key], atol=2e-5)
    streams = max(v for k, v in report.items() if k.startswith("streams"))
    print(f"{name}: logits {report['logits'].max():.1e}, streams {streams:.1e}")


def test_the_oracle_agrees_with_the_goldens():
    weights, config = golden_oracle()
    for name in ("text_17", "text_100"):
        case = case_of(name)
        expected = v4_model.forward(weights, config, case["input_ids"][0], rounding=False)
        got = expected["logits"][case["logits_positions"]][:, case["logits_vocab"]]
        assert np.abs(got - case["logits"][0]).max() < 1e-5
        for layer in (2, 4):
            for positions, chosen in zip(expected[f"topk.{layer}"], case[f"topk.{layer}"][0], strict=True):
                assert positions == sorted(j for j in chosen.tolist() if j >= 0)


@pytest.mark.parametrize("name", SEQUENCES)
def test_greedy(name):
    """The recorded sequence and the logits of every step."""
    model, case = tiny.golden_model(), case_of(name)
    prompt, new = ids_of(case), case["step_logits"].shape[1]
    options = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None, "output_logits": True}
    with golden_model.rounding(model, False):
        out = model.generate(prompt, return_dict_in_generate=True, **options)
    assert np.array_equal(out.sequences.numpy(), case["sequences"])
    error = np.abs(torch.stack(out.logits, dim=1).numpy() - case["step_logits"]).max()
    print(f"{name}: step logits {error:.1e}")
    assert error <= golden.LOGIT_BOUND["noqdq"]


@pytest.mark.parametrize("name", CASES)
def test_bfloat16(name):
    """Where no route and no selection flips, the error is that of the producer's own bfloat16 run; few positions flip."""
    model, case = _bfloat16_model(), case_of(name)
    output, mask = tiny.outputs_of(model, ids_of(case)), np.ones(case["input_ids"].shape, bool)
    flipped = np.zeros(mask.size, bool)
    for key in (k for k in case if k.startswith(("topk", "router_idx"))):
        rows = zip(case[key].reshape(mask.size, -1), output[key].reshape(mask.size, -1), strict=True)
        flipped |= [{j for j in a if j >= 0} != {j for j in b if j >= 0} for a, b in rows]
    at, bound = case["logits_positions"], 1.5 * golden.manifest(golden.CASES_V4)["cases"][name]["bf16_vs_fp32_rms"]
    error = (output["logits"][:, at][..., case["logits_vocab"]] - case["logits"])[0].astype(np.float64)
    rms = float(np.sqrt((error[~flipped[at]] ** 2).mean()))
    print(f"{name}: rms {rms:.4f}, bound {bound:.4f}, {flipped.sum()} of {mask.size} positions flip")
    assert 0 < rms <= bound
    assert flipped.mean() <= 0.25


@cache
def _bfloat16_model():
    return tiny.load(dtype=torch.bfloat16, rounding=False)


# ---- rounding: the oracle ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "linear_rounding"),
    [
        (1, False), (4, True), (5, False), (17, True), (70, False), (70, True),
        *(pytest.param(*cell, marks=pytest.mark.slow) for cell in [(1, True), (4, False), (5, True), (17, False)]),
    ],
)  # fmt: skip
def test_with_rounding_the_oracle_decides(length, linear_rounding):
    """Cache rounding, and the FP8 rounding of layer inputs as a packed model does it."""
    weights, config = golden_oracle()
    model = _rounding_model() if linear_rounding else tiny.golden_model(torch.float64)
    ids = tiny.some_ids(1, length, seed=length)
    expected = v4_model.forward(weights, config, ids[0].tolist(), linear_rounding=linear_rounding)
    output = tiny.outputs_of(model, ids)
    assert_equal_to_oracle(output, expected)
    if length == 70:  # the two differ from each other and from the exact model, and selections leave entries out
        exact = v4_model.forward(weights, config, ids[0].tolist(), rounding=False)
        assert np.abs(expected["logits"] - exact["logits"]).max() > 0.02
        assert any(len(chosen) < (t + 1) // 4 for t, chosen in enumerate(expected["topk.2"]))


@cache
def _rounding_model():
    return tiny.load(dtype=torch.float64, quantize_activations=True)


# Sizes at which every format has more than one block: 192 = 128 + 64 channels of a linear input, 160 - 16 = 64 + 64 + 16
# channels of a cached vector, 64 = 32 + 32 of an index vector.
WIDE = {
    "hidden_size": 192, "moe_intermediate_size": 144, "head_dim": 160, "qk_rope_head_dim": 16, "q_lora_rank": 136,
    "o_lora_rank": 96, "index_head_dim": 64, "num_hidden_layers": 4, "compress_ratios": [0, 4, 16, 4], "num_hash_layers": 1,
    "num_nextn_predict_layers": 1,
}  # fmt: skip


@cache
def wide_model():
    """A float64 model of the sizes above that tests share."""
    return tiny.random_model(**WIDE)


@pytest.mark.parametrize("linear_rounding", [False, True])
def test_several_blocks_of_every_format(linear_rounding):
    model, ids = wide_model(), tiny.some_ids(1, 37, seed=4)
    expected = v4_model.forward(
        oracle_weights(model), model.config.to_dict(), ids[0].tolist(), linear_rounding=linear_rounding
    )
    set_rounding = [m for m in model.modules() if hasattr(m, "quantize_activations")]
    for module in set_rounding:
        module.quantize_activations, module.activation_block = linear_rounding, 128
    try:
        output = tiny.outputs_of(model, ids)
    finally:
        for module in set_rounding:
            module.quantize_activations = False
    assert_equal_to_oracle(output, expected)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_with_rounding_on_long_rows(seed):
    weights, config = golden_oracle()
    ids = tiny.some_ids(1, 200, seed=100 + seed)
    expected = v4_model.forward(weights, config, ids[0].tolist())
    assert_equal_to_oracle(tiny.outputs_of(tiny.golden_model(torch.float64), ids), expected)


# ---- builds: packed, dequantised, -Base --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("quantize_activations", "build"), half_of((True, False), ("released", "base")))
def test_packed_equals_dequantised(build, quantize_activations, folders):
    """Both loads, against each other and against the oracle's own reading of the files."""
    folder = folders[build]
    packed = tiny.load(folder, dequantize=False, quantize_activations=quantize_activations)
    floats = tiny.load(folder, quantize_activations=quantize_activations)
    assert packed.model.layers[3].mlp.experts.expert_dtype == {"released": "fp4", "base": "fp8"}[build]
    ids = tiny.some_ids(1, 40, seed=2)
    with torch.no_grad():
        got, expected = packed(ids).logits, floats(ids).logits
    assert torch.equal(got, expected) or (got - expected).abs().max() < 2e-4
    weights, config = v4_model.load_checkpoint(folder), golden.load_json(folder / "config.json")
    for name, tensor in floats.to(torch.float64).state_dict().items():
        if ".experts." not in name:
            np.testing.assert_allclose(tensor, weights[floats.weight_names.to_released(name)], rtol=1e-7)
    oracle = v4_model.forward(weights, config, ids[0].tolist(), linear_rounding=quantize_activations)
    # Float scales are rounded to float32 once more when they are multiplied.
    np.testing.assert_allclose(
        floats(ids).logits[0].detach(), oracle["logits"], atol=EXACT if build == "released" else 1e-5
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The golden folder, a -Base build of it, and the golden folder with an MTP layer."""
    place = tmp_path_factory.mktemp("v4")
    return {
        "released": golden.CHECKPOINT_V4,
        "base": tiny.base_variant().write(place / "base"),
        "mtp": tiny.with_mtp().write(place / "mtp"),
    }


@pytest.mark.parametrize(
    ("dequantize", "build"),
    [
        (False, "released"),
        (False, "base"),
        (False, "mtp"),
        (True, "mtp"),
        pytest.param(True, "released", marks=pytest.mark.slow),
        pytest.param(True, "base", marks=pytest.mark.slow),
    ],
)
def test_builds_are_saved_as_they_were_read(build, dequantize, folders, tmp_path):
    model = tiny.load(folders[build], dequantize=dequantize)
    model.save_pretrained(tmp_path)
    again = Dsv4ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = tiny.some_ids(1, 12)
    with torch.no_grad():
        assert torch.equal(again.eval()(ids).logits, model(ids).logits)
    if not dequantize:
        before, after = stored_tensors(folders[build]), stored_tensors(tmp_path)
        assert before.keys() == after.keys()
        assert not [
            name for name in before if before[name].dtype.itemsize == 1 and not same_bytes(before[name], after[name])
        ]


def test_the_vision_variant_loads_its_text_part(tmp_path):
    folder = tiny.v4_folder()
    experts = folder.config["n_routed_experts"]
    for layer in range(folder.config["num_hidden_layers"]):
        if layer >= folder.config["num_hash_layers"]:
            folder.shards[tiny.SHARD][f"layers.{layer}.ffn.gate.bias_vl"] = torch.zeros(experts)
    folder.shards[tiny.SHARD] |= {"vision.norm.weight": torch.ones(4), "aligner.w1.weight": torch.ones(4, 4)}
    folder.shards[tiny.SHARD] |= {f"image_{part}": torch.ones(64) for part in ("start", "end", "newline", "pad")}
    folder.config["vision_config"] = {"hidden_size": 4}
    model, ids = tiny.load(folder.write(tmp_path)), tiny.some_ids(1, 9)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, tiny.golden_model()(ids).logits)


# ---- the MTP layer ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mtp_model(folders):
    return tiny.load(folders["mtp"], dtype=torch.float64)


@pytest.mark.parametrize("rounding", [False, True])
def test_mtp_equals_the_oracle(mtp_model, folders, rounding):
    weights, config = v4_model.load_checkpoint(folders["mtp"]), golden.load_json(folders["mtp"] / "config.json")
    ids = tiny.some_ids(1, 23, seed=5)
    expected = v4_model.forward(weights, config, ids[0].tolist(), rounding=rounding, mtp=True)
    with golden_model.rounding(mtp_model, rounding), torch.no_grad():
        streams = mtp_model.model(ids, output_streams=True).streams
        logits = mtp_model.lm_head(mtp_model.model.predict_after_next(streams, ids))
    assert logits.shape == (1, 22, 384)
    np.testing.assert_allclose(logits[0], expected["mtp_logits"], atol=EXACT)


def test_mtp_of_a_wide_model_equals_the_oracle():
    model, ids = wide_model(), tiny.some_ids(1, 19, seed=6)
    expected = v4_model.forward(oracle_weights(model), model.config.to_dict(), ids[0].tolist(), mtp=True)
    with torch.no_grad():
        streams = model.model(ids, output_streams=True).streams
        logits = model.lm_head(model.model.predict_after_next(streams, ids))
    np.testing.assert_allclose(logits[0], expected["mtp_logits"], atol=EXACT)


def _cross_entropy(logits, labels, ahead):
    """Summed cross entropy of the token `ahead` places on, written out, and how many tokens it counts."""
    total, count = 0.0, 0
    for row, targets in zip(logits.double(), labels, strict=True):
        for t in range(len(targets) - ahead):
            if targets[t + ahead] != -100:
                total += row[t].exp().sum().log() - row[t, targets[t + ahead]]
                count += 1
    return total, count


@pytest.mark.parametrize("items", [None, 50])
@pytest.mark.parametrize("weight", [0.3, 0.1])
def test_loss_by_hand(mtp_model, weight, items):
    """loss = L(next token) + mtp_loss_weight * L(token after it)."""
    ids = tiny.some_ids(2, 14, seed=7)
    labels = ids.clone()
    labels[0, 4:7] = -100
    mtp_model.train()
    before, mtp_model.config.mtp_loss_weight = mtp_model.config.mtp_loss_weight, weight
    try:
        with torch.no_grad():
            out = mtp_model(ids, labels=labels, num_items_in_batch=items)
            streams = mtp_model.model(ids, output_streams=True).streams
            after_next = mtp_model.lm_head(mtp_model.model.predict_after_next(streams, ids))
    finally:
        mtp_model.config.mtp_loss_weight = before
        mtp_model.eval()
    (main, count), (mtp, mtp_count) = _cross_entropy(out.logits, labels, 1), _cross_entropy(after_next, labels, 2)
    torch.testing.assert_close(out.mtp_loss.double(), mtp / (items or mtp_count), atol=1e-5, rtol=0)
    expected = main / (items or count) + weight * mtp / (items or mtp_count)
    torch.testing.assert_close(out.loss.double(), expected, atol=1e-5, rtol=0)
    assert mtp_model(ids, labels=labels).mtp_loss is None  # evaluation: the loss of the next token alone


def test_gradient_reaches_the_mtp_layer_and_through_it_the_backbone(mtp_model):
    ids = tiny.some_ids(2, 21, seed=7)  # longer than an HCA group
    mtp_model.train().zero_grad()
    out = mtp_model(ids, labels=ids)
    out.mtp_loss.backward()
    mtp_model.eval()
    silent = [n for n, p in mtp_model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    mtp_model.zero_grad()
    # The backbone's own collapse and norm come after the streams that the layer reads.
    assert all(".indexer." in n or n in ("model.norm.weight",) or "model.hc_head." in n for n in silent), silent
    assert not [n for n in silent if ".mtp." in n]


@pytest.mark.parametrize(("kind", "side"), half_of(("2d", "4d"), ("left", "right")))
def test_mtp_of_padded_rows_equals_the_rows_alone(mtp_model, side, kind):
    rows, width = [tiny.some_ids(1, n, seed=n)[0] for n in (1, 2, 9, 16)], 18
    ids, mask = torch.full((4, width), 2), torch.zeros(4, width, dtype=torch.long)
    for b, row in enumerate(rows):
        at = slice(width - len(row), width) if side == "left" else slice(len(row))
        ids[b, at], mask[b, at] = row, 1
    given = mask
    if kind == "4d":
        given = torch.ones(width, width, dtype=torch.bool).tril() & mask.bool()[:, None, None]
    with torch.no_grad():
        streams = mtp_model.model(ids, attention_mask=given, output_streams=True).streams
        states = mtp_model.model.predict_after_next(streams, ids, given)
        for b, row in enumerate(rows):
            alone = mtp_model.model(row[None], output_streams=True).streams
            expected = mtp_model.model.predict_after_next(alone, row[None])[0]
            start = width - len(row) if side == "left" else 0
            got = states[b, start : start + len(row) - 1]
            torch.testing.assert_close(got, expected, atol=EXACT, rtol=0)


def test_losses_of_short_rows_are_numbers(mtp_model):
    mtp_model.train()
    try:
        out = mtp_model(tiny.some_ids(1, 2), labels=tiny.some_ids(1, 2))
        assert out.mtp_loss == 0 and out.loss.isfinite() and out.loss > 0
        out.loss.backward()
        assert all(p.grad.isfinite().all() for p in mtp_model.parameters() if p.grad is not None)
    finally:
        mtp_model.eval().zero_grad()


def test_training_the_mtp_layer_on_a_part_of_a_row_is_refused(mtp_model):
    ids, cache = tiny.some_ids(1, 8), Dsv4Cache(mtp_model.config, "float")
    with torch.no_grad():
        mtp_model(ids, cache=cache)
    mtp_model.train()
    try:
        with pytest.raises(ValueError, match="cache holds 8 tokens while the MTP layer is trained"):
            mtp_model(ids, labels=ids, cache=cache)
        assert cache.get_seq_length() == 8
        assert mtp_model(ids, labels=ids, cache=Dsv4Cache(mtp_model.config, "float")).mtp_loss > 0
    finally:
        mtp_model.eval()


def test_the_mtp_layer_is_recomputed_under_checkpointing(mtp_model):
    ids, calls, grads = tiny.some_ids(2, 11), [], []
    for checkpointed in (False, True):
        calls.clear()
        mtp_model.train().zero_grad()
        if checkpointed:
            mtp_model.activation_checkpointing_enable()
        hook = mtp_model.model.mtp[0].self_attn.register_forward_hook(lambda *a: calls.append(1))
        mtp_model(ids, labels=ids).loss.backward()
        hook.remove()
        mtp_model.activation_checkpointing_disable()
        assert len(calls) == 1 + checkpointed
        grads.append({n: p.grad.clone() for n, p in mtp_model.named_parameters() if p.grad is not None})
    mtp_model.eval().zero_grad()
    assert grads[0].keys() == grads[1].keys() and all(torch.equal(g, grads[1][n]) for n, g in grads[0].items())


def test_without_mtp_there_is_no_layer_and_no_loss_of_it():
    model, ids = tiny.load().train(), tiny.some_ids(1, 9)
    assert not hasattr(model.model, "mtp")
    assert model(ids, labels=ids).mtp_loss is None


def test_the_base_class_reads_the_same_folder(folders):
    model = Dsv4Model.from_pretrained(folders["mtp"], dtype=torch.float32).eval()
    full = Dsv4ForCausalLM.from_pretrained(folders["mtp"], dtype=torch.float32).eval()
    ids = tiny.some_ids(1, 20)
    with torch.no_grad():
        state = model(ids, output_streams=True)
        torch.testing.assert_close(full.lm_head(state.last_hidden_state), full(ids).logits)
    assert state.streams.shape == (1, 20, 4, 64)


# ---- hash routing ---------------------------------------------------------------------------------------------------------------


def test_a_fresh_model_routes_token_ids_evenly():
    """A model made from a config: every expert serves equally many ids, a row has k different ones, always the same table."""
    first, second = (Dsv4ForCausalLM(tiny.tiny_config(num_hash_layers=2)) for _ in range(2))
    tables = [layer.mlp.gate.tid2eid for layer in first.model.layers if layer.mlp.gate.hashes]
    assert len(tables) == 2 and torch.equal(tables[0], second.model.layers[0].mlp.gate.tid2eid)
    for table in tables:
        counts = table.flatten().bincount(minlength=6)
        assert counts.max() - counts.min() <= 1
        assert all(len(set(row)) == 2 for row in table.tolist())


def test_hash_layers_need_ids():
    model, ids = tiny.golden_model(), tiny.some_ids(1, 6)
    embeds = model.get_input_embeddings()(ids).detach()
    with pytest.raises(ValueError, match="inputs_embeds without input_ids.*route by token ids"):
        model(inputs_embeds=embeds)
    with torch.no_grad():
        assert torch.equal(model(ids, inputs_embeds=embeds).logits, model(ids).logits)
        plain = Dsv4ForCausalLM(tiny.tiny_config(num_hash_layers=0)).eval()
        embeds = plain.get_input_embeddings()(ids)
        assert torch.equal(plain(inputs_embeds=embeds).logits, plain(ids).logits)


# ---- classes ------------------------------------------------------------------------------------------------------------------


def test_a_fresh_model_is_saved_and_read_back(tmp_path):
    model = Dsv4ForCausalLM(tiny.tiny_config(num_nextn_predict_layers=1)).eval()
    model.save_pretrained(tmp_path)
    again, ids = Dsv4ForCausalLM.from_pretrained(tmp_path).eval(), tiny.some_ids(1, 20)
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, model(ids).logits, atol=0, rtol=0)
    assert isinstance(again.config, Dsv4Config)
    assert golden.load_json(tmp_path / "config.json")["architectures"] == ["DeepseekV4ForCausalLM"]


def test_streams_that_are_asked_for_are_returned(mtp_model):
    """Also where the MTP loss reads them."""
    ids = tiny.some_ids(1, 9, seed=3)
    with torch.no_grad():
        expected = mtp_model.model(ids, output_streams=True).streams
        assert torch.equal(mtp_model(ids, output_streams=True).streams, expected) and expected.any()
        assert mtp_model(ids).streams is None


def test_the_inventory_of_a_loaded_model_has_the_tiles_of_its_file():
    config = Dsv4ForCausalLM.from_pretrained(golden.CHECKPOINT_V4).config
    assert released_tensors(config) == released_tensors(Dsv4Config.from_pretrained(golden.CHECKPOINT_V4))
