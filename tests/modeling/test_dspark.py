"""The drafter against the goldens and the float64 oracle: base, Markov and confidence logits, and its ring in the cache."""

import copy
from functools import cache

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from modeling_dsv4 import (
    Dsv4Cache,
    Dsv4QuantizationConfig,
    Dsv41Config,
    Dsv41ForCausalLM,
    Dsv41ForConditionalGeneration,
)
from modeling_dsv4.drafter_loading import Dsv4DraftStages
from modeling_dsv4.quantization import pack_modules
from tests import golden_cases as golden
from tests.modeling import golden_model
from tests.modeling.draft_models import drafting_model, golden_drafter
from tests.modeling.test_weight_names import DTYPES, INVENTORY, expand
from tests.modeling.tiny_model import oracle_weights, some_ids
from tests.reference import drafter, text_model
from tests.released_folders import same_bytes, small_folder, stored_tensors

BOUND = 1e-4  # of the goldens; producers agree to 6e-6
ORACLE = 2e-6


@torch.no_grad()
def draft_after(model, ids, kv_format="float", cache=None):
    """Draft after `ids` `[B, S]` of which the last one is not processed: base, Markov and confidence logits, tokens."""
    record = {"markov_logits": []}
    hook = model.lm_head.register_forward_hook(lambda m, args, out: record.update(base_logits=out))
    if cache is None:
        cache = Dsv4Cache(model.config, kv_format)
        model(ids[:, :-1], cache=cache)

    def choose(step, logits):
        record["markov_logits"].append(logits)
        return logits.argmax(-1)

    block = model.draft(ids[:, -1], cache, choose)
    hook.remove()
    record["markov_logits"] = torch.stack(record["markov_logits"], 1)
    return record | {"confidence_logit_raw_hidden": block.confidence, "draft_tokens": block.tokens}


@pytest.mark.parametrize("mode", ["qdq", "noqdq"])
def test_golden(mode):
    case = golden.load_tensors(golden.DSPARK_V41 / f"draft_24.{mode}.safetensors")
    inputs = golden.load_tensors(golden.DSPARK_V41 / "draft_24.qdq.safetensors")
    ids, anchors = torch.as_tensor(inputs["input_ids"]).long(), inputs["anchors"][0]
    model, worst = golden_drafter(), 0
    with golden_model.rounding(model, mode == "qdq"):
        for j, anchor in enumerate(anchors):
            got = draft_after(model, ids[:, : anchor + 1])
            assert got.pop("draft_tokens")[0].tolist() == case["draft_tokens"][0, j].tolist()
            worst = max([worst, *(np.abs(v[0].numpy() - case[k][0, j]).max() for k, v in got.items())])
        with torch.no_grad():
            features = model.model(ids, use_cache=False, output_draft_features=True).draft_features[0]
        np.testing.assert_allclose(features, case["target_features"][0], atol=1e-3)
    print(f"{mode}: base, Markov and confidence logits within {worst:.1e}")
    assert worst < BOUND


def test_golden_of_the_packed_model():
    """FP8 and FP4 weights as they lie in the file give the drafts of the dequantised model."""
    options = Dsv4QuantizationConfig(quantize_activations=False)
    packed = Dsv41ForCausalLM.from_pretrained(
        golden.CHECKPOINT_V41, dtype=torch.float32, quantization_config=options, use_mtp=True
    ).eval()
    ids = some_ids(1, 24, seed=4)
    got, expected = draft_after(packed, ids, "packed"), draft_after(golden_drafter(), ids, "packed")
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, atol=BOUND, rtol=0)


@cache
def oracle_run(rounding=True):
    """Ids, the tiny model's oracle weights and config, and the features that the drafter reads."""
    model, ids = drafting_model(), some_ids(1, 30, seed=2)
    config = model.config.text_config.to_dict()
    weights = oracle_weights(model)
    record = text_model.forward(weights, config, ids.numpy(), rounding=rounding, token_map=list(range(128)))
    streams = {layer: record[f"streams.{layer}"][0] for layer in range(config["num_hidden_layers"])}
    return ids, weights, config, drafter.features_of(streams, config["dspark_target_layer_ids"]), record


@pytest.mark.parametrize("rounding", [True, False])
@pytest.mark.parametrize("anchor", [1, 8, 9, 29])
def test_oracle(anchor, rounding):
    """Fewer, as many and more tokens than the ring holds."""
    ids, weights, config, features, _ = oracle_run(rounding)
    model = drafting_model()
    with golden_model.rounding(model, rounding):
        got = draft_after(model, ids[:, : anchor + 1])
    block = drafter.Block(weights, config, features, int(ids[0, anchor]), anchor, rounding=rounding)
    np.testing.assert_allclose(got["base_logits"][0], block.base, atol=ORACLE)
    previous = int(ids[0, anchor])
    for step, token in enumerate(got["draft_tokens"][0].tolist()):
        logits = block.markov(step, previous)
        np.testing.assert_allclose(got["markov_logits"][0, step], logits, atol=ORACLE)
        np.testing.assert_allclose(
            got["confidence_logit_raw_hidden"][0, step], block.confidence(step, previous), atol=ORACLE
        )
        assert token == logits.argmax()
        previous = token


# ---- the ring --------------------------------------------------------------------------------------------------------------


def test_packed_and_float_rings_are_equal():
    model, ids = drafting_model(), some_ids(2, 30, seed=2)
    a, b = (draft_after(model, ids, kv_format) for kv_format in ("packed", "float"))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_bytes_of_the_ring():
    model, ids = drafting_model(dtype=torch.float32), some_ids(2, 40)
    cache, size = Dsv4Cache(model.config, rollback=3), 8 + 3
    assert cache.nbytes()["draft"] == 0
    model(ids, cache=cache)
    # Two stages, 32 channels in FP8 and one scale a token.
    assert cache.nbytes()["draft"] == 2 * size * 2 * (32 + 1)


@pytest.mark.parametrize("kv_format", ["packed", "float"])
@torch.no_grad()
def test_chunks_padding_and_rollback_leave_the_same_ring(kv_format):
    model, ids = drafting_model(), some_ids(2, 31, seed=6)
    expected = draft_after(model, ids, kv_format)
    cache = Dsv4Cache(model.config, kv_format, rollback=6)
    for part in (ids[:, :4], ids[:, 4:5], ids[:, 5:24]):
        model(part, cache=cache)
    model(some_ids(2, 6, seed=9), cache=cache)  # drafts, all rejected
    cache.crop(-6)
    model(ids[:, 24:30], cache=cache)
    got = draft_after(model, ids, cache=cache)
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, atol=1e-9, rtol=0)
    short = torch.full((2, 36), 0)
    short[:, :5], mask = 0, torch.ones(2, 36)
    short[:, 5:], mask[:, :5] = ids, 0
    cache = Dsv4Cache(model.config, kv_format)
    model(short[:, :-1], attention_mask=mask[:, :-1], cache=cache)
    got = draft_after(model, ids, cache=cache)
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, atol=1e-9, rtol=0)


def test_a_saved_and_a_copied_ring(tmp_path):
    model, ids = drafting_model(), some_ids(2, 20, seed=3)
    expected = draft_after(model, ids)
    cache = Dsv4Cache(model.config, "float")
    with torch.no_grad():
        model(ids[:, :-1], cache=cache)
    cache.save(tmp_path / "cache")
    for twin in (copy.deepcopy(cache), Dsv4Cache.load(tmp_path / "cache", model.config)):
        got = draft_after(model, ids, cache=twin)
        assert all(torch.equal(got[name], expected[name]) for name in got)
    cache.reorder_cache(torch.tensor([1, 0]))
    got = draft_after(model, ids.flip(0), cache=cache)
    torch.testing.assert_close(got["markov_logits"], expected["markov_logits"].flip(0))
    with pytest.raises(OSError, match="another configuration"):
        plain = copy.deepcopy(model.config)
        plain.text_config.num_nextn_predict_layers = 0
        Dsv4Cache.load(tmp_path / "cache", plain)


def test_a_cache_that_the_drafter_has_not_seen_is_refused():
    model, ids = drafting_model(), some_ids(1, 9)
    plain = copy.copy(model.config)
    plain.text_config = copy.deepcopy(plain.text_config)
    plain.text_config.num_nextn_predict_layers = 0
    cache = Dsv4Cache(plain)
    with torch.no_grad():
        model(ids, cache=cache)
    with pytest.raises(ValueError, match="tokens that the drafter has not seen"):
        draft_after(model, ids, cache=cache)
    with pytest.raises(ValueError, match="output_draft_features is True for a model without a DSpark drafter"):
        golden_model.float_model()(ids, output_draft_features=True)


# ---- names, sizes and loading -------------------------------------------------------------------------------------------------


def drafter_inventory(config):
    """Released name -> (dtype, shape) of the packed drafter of a configuration, and its parameters."""
    with torch.device("meta"):
        stages = Dsv4DraftStages(config)
    pack_modules(stages, Dsv4QuantizationConfig(weight_block_size=config.quantization_config["weight_block_size"]))
    found, count = {}, 0
    for name, tensor in stages.state_dict().items():
        found[stages.weight_names.to_released(name)] = tensor.dtype, tuple(tensor.shape)
        if not name.endswith("_scale_inv"):
            count += tensor.numel() * (2 if tensor.dtype == torch.int8 else 1)
    return found, count


def test_released_drafter_has_exactly_the_inventory():
    found, count = drafter_inventory(Dsv41Config(**golden.load_json(golden.GOLDEN / "config_v41_flash.json")))
    expected = {
        name: (DTYPES[row["dtype"]], tuple(row["shape"]))
        for row in INVENTORY["tensors"] if row["group"] == "dspark" for name in expand(row)
    }  # fmt: skip
    assert found.keys() == expected.keys() and len(found) == 2401
    # Heads and norms take the dtype of the model, which meta tensors have not.
    assert {n for n in found if found[n][1] != expected[n][1]} == set()
    packed = {n for n in found if expected[n][0] in (torch.int8, torch.float8_e4m3fn, torch.float8_e8m0fnu)}
    assert {n for n in packed if found[n] != expected[n]} == set()
    print(f"DSpark: {count:,} parameters")
    assert count == INVENTORY["summary"]["params_by_group"]["dspark"]


def drafter_on_request(model):
    drafter = model.drafter
    return drafter is not None and len(drafter) == 3 and model.config.get_text_config().num_nextn_predict_layers == 3


@pytest.mark.parametrize("model_class", [Dsv41ForCausalLM, Dsv41ForConditionalGeneration])
def test_a_packed_folder_with_its_drafter_is_saved_as_it_was(model_class, tmp_path):
    model = model_class.from_pretrained(golden.CHECKPOINT_V41, dtype="auto", use_mtp=True)
    assert drafter_on_request(model) and model.generation_config.use_mtp is False
    model.save_pretrained(tmp_path)
    before, after = stored_tensors(golden.CHECKPOINT_V41), stored_tensors(tmp_path)
    drafts = {name for name in before if name.startswith("mtp.")}
    assert len(drafts) == 169 and drafts == {name for name in after if name.startswith("mtp.")}
    assert all(same_bytes(before[name], after[name]) for name in drafts)
    assert drafter_on_request(model_class.from_pretrained(tmp_path, dtype="auto", use_mtp=True))
    assert model_class.from_pretrained(tmp_path, dtype="auto").drafter is None


def test_auto_classes_load_the_drafter():
    model = AutoModelForCausalLM.from_pretrained(golden.CHECKPOINT_V41, dtype="auto", use_mtp=True)
    assert drafter_on_request(model)


@torch.no_grad()
def test_the_first_drafted_call_loads_the_drafter():
    options = Dsv4QuantizationConfig(dequantize=True)
    model = Dsv41ForCausalLM.from_pretrained(golden.CHECKPOINT_V41, dtype=torch.float32, quantization_config=options)
    assert model.drafter is None and not model.config.text_config.num_nextn_predict_layers
    ids = some_ids(1, 9)
    model.eval().generate(ids, max_new_tokens=2, use_mtp=True, eos_token_id=None)
    assert drafter_on_request(model)
    got, expected = draft_after(model, ids), draft_after(golden_drafter(), ids)
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_a_checkpoint_without_a_drafter_is_refused(tmp_path):
    folder = small_folder()
    del folder["mtp.2.norm.weight"]
    with pytest.raises(ValueError, match="missing .*mtp.2.norm.weight"):
        Dsv41ForCausalLM.from_pretrained(folder.write(tmp_path / "broken"), dtype="auto", use_mtp=True)
    model = Dsv41ForCausalLM.from_pretrained(tmp_path / "broken", dtype="auto")
    model.save_pretrained(tmp_path / "without")
    with pytest.raises(
        ValueError, match=r"checkpoint has no drafter \(num_nextn_predict_layers is 0\); accepted: False"
    ):
        Dsv41ForCausalLM.from_pretrained(tmp_path / "without", dtype="auto", use_mtp=True)
    model = Dsv41ForCausalLM.from_pretrained(tmp_path / "without", dtype="auto")
    with pytest.raises(ValueError, match="has no drafter"):
        model.generate(some_ids(1, 4), use_mtp=True)
