"""V4's drafters: the MTP layer proposes what its training forward predicts; the -0731 build loads DSpark."""

import copy

import pytest
import torch

from convert.inventory import payload_bytes, released_tensors
from modeling_dsv4 import Dsv4Cache, Dsv4Config, Dsv4ForCausalLM, Dsv4QuantizationConfig
from modeling_dsv4.dspark import Dsv4DSpark
from tests.grids import half_of
from tests.modeling import v4_models as tiny
from tests.modeling.test_configuration_deepseek_v4 import flash_0731
from tests.modeling.test_draft_generation import assert_same_cache, drafted, first_wrong
from tests.modeling.test_dspark import drafter_inventory

GREEDY = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def some_ids(batch, length, seed=0):
    return torch.randint(3, 120, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def mtp_logits(model, cache, tokens):
    record = []
    model.draft(tokens, cache, lambda step, logits: record.append(logits) or logits.argmax(-1))
    return record[0]


@pytest.mark.parametrize("kv_format", ["packed", "float"])
@torch.no_grad()
def test_a_draft_is_what_the_layer_predicts_in_training(kv_format):
    """One token, a few and more than the window; in chunks, padded, and after a rollback."""
    model, ids = tiny.drafting_model("mtp"), some_ids(2, 31, seed=1)
    streams = model.model(ids, output_streams=True, use_cache=False).streams
    expected = model.lm_head(model.model.predict_after_next(streams, ids))
    cache = Dsv4Cache(model.config, kv_format, rollback=5)
    for start, stop in ((0, 1), (1, 4), (4, 20), (20, 30)):
        model(ids[:, start:stop], cache=cache)
        torch.testing.assert_close(mtp_logits(model, cache, ids[:, stop]), expected[:, stop - 1], atol=1e-9, rtol=0)
    cache.crop_rows(torch.tensor([5, 2]))
    got = mtp_logits(model, cache, torch.stack([ids[0, 25], ids[1, 28]]))
    torch.testing.assert_close(got, torch.stack([expected[0, 24], expected[1, 27]]), atol=1e-9, rtol=0)
    padded, mask = torch.cat([torch.zeros(2, 4).long(), ids], 1), torch.ones(2, 35)
    mask[:, :4] = 0
    cache = Dsv4Cache(model.config, kv_format)
    model(padded[:, :30], attention_mask=mask[:, :30], cache=cache)
    torch.testing.assert_close(mtp_logits(model, cache, ids[:, 26]), expected[:, 25], atol=1e-9, rtol=0)


@pytest.mark.parametrize(("batch", "build"), half_of((1, 2), ("0731", "mtp")))
def test_tokens_and_cache_equal_plain_decoding(build, batch):
    model, ids = tiny.drafting_model(build), some_ids(batch, 11, seed=2)
    plain = model.generate(ids, **GREEDY, return_dict_in_generate=True)
    out = drafted(model, ids, plain.sequences, first_wrong([9, 0, 9]), **GREEDY)
    assert torch.equal(out.sequences, plain.sequences) and out.draft_report.accepted > 0
    assert (out.draft_report.calibration_error is None) == (build == "mtp")
    if build == "0731":
        assert_same_cache(model, out.cache, plain.cache)
    own = model.generate(ids, **GREEDY, use_mtp=True)
    assert torch.equal(own, plain.sequences)


def test_0731_has_the_tensors_and_bytes_of_its_release():
    config = Dsv4Config.from_dict(flash_0731())
    derived = released_tensors(config)
    assert len(derived) == 72_317 and payload_bytes(derived) == 166_878_536_440
    found, _ = drafter_inventory(config)
    expected = {name: shape for name, (shape, _) in derived.items() if name.startswith("mtp.")}
    assert {name: shape for name, (_, shape) in found.items()} == expected


def test_0731_loads_its_drafter_when_asked(tmp_path):
    model = tiny.drafting_model("0731")
    copy.deepcopy(model).float().save_pretrained(tmp_path)
    plain = Dsv4ForCausalLM.from_pretrained(tmp_path)
    assert plain.drafter is None and plain.config.num_nextn_predict_layers == 0
    loaded = Dsv4ForCausalLM.from_pretrained(tmp_path, use_mtp=True).double().eval()
    assert isinstance(loaded.drafter, Dsv4DSpark) and len(loaded.drafter) == 2
    ids = some_ids(1, 9)
    assert torch.equal(loaded.generate(ids, **GREEDY, use_mtp=True), loaded.generate(ids, **GREEDY))
    plain.double().eval().generate(ids, **GREEDY, use_mtp=True)  # the first use loads it
    for a, b in zip(loaded.drafter.parameters(), plain.drafter.parameters(), strict=True):
        assert torch.equal(a, b.to(a))


def test_a_checkpoint_without_a_drafter_is_refused():
    with pytest.raises(ValueError, match=r"no drafter \(num_nextn_predict_layers is 0\)"):
        Dsv4ForCausalLM(tiny.tiny_config(**tiny.SMALL), use_mtp=True)
    incomplete = tiny.DSPARK | {"dspark_block_size": 4}
    incomplete.pop("dspark_markov_rank")
    with pytest.raises(ValueError, match="dspark_markov_rank is None; accepted: a value"):
        tiny.tiny_config(**tiny.SMALL | incomplete)


def test_a_packed_folder_with_mtp_drafts(tmp_path):
    model = Dsv4ForCausalLM.from_pretrained(
        tiny.with_mtp().write(tmp_path), dtype=torch.float32, quantization_config=Dsv4QuantizationConfig(dequantize=True)
    ).double().eval()  # fmt: skip
    ids = tiny.some_ids(2, 9)
    assert torch.equal(model.generate(ids, **GREEDY, use_mtp=True), model.generate(ids, **GREEDY))
