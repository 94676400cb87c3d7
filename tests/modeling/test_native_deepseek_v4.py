"""Our V4 beside transformers' own: equal where both are right, untouched by us, and ours where the native one is not."""

import json
import subprocess
import sys
import textwrap
from functools import cache

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DeepseekV4Config, DeepseekV4ForCausalLM

from modeling_dsv4 import Dsv4Cache, Dsv4Config, Dsv4ForCausalLM
from tests.golden_cases import load_json
from tests.grids import half_of
from tests.modeling import v4_models as tiny

PAD = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The golden checkpoint as floats, in the released layout: what both implementations read."""
    path = tmp_path_factory.mktemp("v4_floats")
    tiny.golden_model().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def native(folder):
    return DeepseekV4ForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.fixture(scope="module")
def ours(folder):
    model = Dsv4ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.config.cache_rounding = False
    return model


def native_name(name):
    """The native name of one of our parameters."""
    name = name.replace("hc_head.", "hc_head.hc_").replace("self_attn.indexer.compressor.", "self_attn.indexer.")
    name = name.replace("self_attn.indexer.", "self_attn.compressor.indexer.")
    return name.replace("indexer.weights_proj", "indexer.scorer.weights_proj")


# ---- equal -----------------------------------------------------------------------------------------------------------------


def test_both_hold_the_same_weights(ours, native):
    theirs = native.state_dict()
    for name, tensor in ours.state_dict().items():
        assert torch.equal(theirs.pop(native_name(name)), tensor), name
    assert not theirs


@pytest.mark.parametrize("length", [1, 4, 5, 16, 37, 90])
def test_logits_are_equal(ours, native, length):
    ids = tiny.some_ids(2, length, seed=length)
    with torch.no_grad():
        error = (ours(ids).logits - native(ids, use_cache=False).logits).abs().max()
    print(f"{length} tokens: {error:.1e}")
    assert error < 1e-5


def test_loss_and_gradients_are_equal(ours, native):
    ids = tiny.some_ids(2, 37, seed=1)
    labels = ids.clone()
    labels[0, :9] = -100
    losses = []
    for model in (ours, native):
        model.train().zero_grad()
        losses.append(model(ids, labels=labels).loss)
        losses[-1].backward()
        model.eval()
    torch.testing.assert_close(*losses, atol=1e-6, rtol=0)
    theirs = dict(native.named_parameters())
    worst, with_gradient = 0.0, set()
    for name, parameter in ours.named_parameters():
        gradient = theirs[native_name(name)].grad
        if parameter.grad is None:
            assert ".indexer." in name and (gradient is None or not gradient.any()), name
            continue
        with_gradient.add(native_name(name))
        norm = gradient.norm()
        assert norm > 0, name
        worst = max(worst, float((parameter.grad - gradient).norm() / norm))
    assert all(p.grad is None or not p.grad.any() for n, p in theirs.items() if n not in with_gradient)
    print(f"loss {losses[0].item():.6f}, {len(with_gradient)} gradients, worst relative difference {worst:.1e}")
    assert worst < 1e-4
    ours.zero_grad(), native.zero_grad()


def test_greedy_tokens_are_equal(ours, native):
    ids = tiny.some_ids(2, 13, seed=3)
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": PAD}
    assert torch.equal(ours.generate(ids, **options), native.generate(ids, **options))


@pytest.mark.parametrize("form", ["released", "transformers"])
def test_both_read_each_others_configuration(form, folder):
    released = load_json(folder / "config.json")
    native = json.loads(DeepseekV4Config(**released).to_json_string())
    config = Dsv4Config.from_dict(native if form == "transformers" else released)
    theirs = DeepseekV4Config(**json.loads(config.to_json_string()))
    for key in (
        "layer_types",
        "mlp_layer_types",
        "qk_rope_head_dim",
        "compress_rates",
        "sliding_window",
        "index_topk",
    ):
        assert getattr(theirs, key) == getattr(DeepseekV4Config(**released), key), key


# ---- where the native one fails ------------------------------------------------------------------------------------------------


def left_padded(rows):
    width = max(map(len, rows))
    ids, mask = torch.full((len(rows), width), PAD), torch.zeros(len(rows), width, dtype=torch.long)
    for b, row in enumerate(rows):
        ids[b, width - len(row) :], mask[b, width - len(row) :] = row, 1
    return ids, mask


ROWS = (5, 18, 30)


def test_left_padded_rows_equal_their_runs_alone(ours, native):
    rows = [tiny.some_ids(1, n, seed=n)[0] for n in ROWS]
    ids, mask = left_padded(rows)
    worst = {}
    with torch.no_grad():
        for name, model in (("ours", ours), ("native", native)):
            logits = model(ids, attention_mask=mask).logits
            errors = [(logits[b, -len(row) :] - native(row[None]).logits[0]).abs().max() for b, row in enumerate(rows)]
            worst[name] = float(max(errors))
    print(worst)
    assert worst["ours"] < 1e-5


@pytest.mark.parametrize("num_beams", [1, 3])
def test_left_padded_generation_equals_the_rows_alone(ours, native, num_beams):
    rows = [tiny.some_ids(1, n, seed=n)[0] for n in ROWS]
    ids, mask = left_padded(rows)
    options = {
        "max_new_tokens": 5,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": PAD,
        "num_beams": num_beams,
    }
    alone = [ours.generate(row[None], **options)[0, len(row) :] for row in rows]
    got = ours.generate(ids, attention_mask=mask, **options)[:, ids.shape[1] :]
    assert torch.equal(got, torch.stack(alone))
    if num_beams == 1:  # a single unpadded row is where the native one is right
        theirs = [native.generate(row[None], **options)[0, len(row) :] for row in rows]
        assert torch.equal(torch.stack(alone), torch.stack(theirs))
    else:
        for b, row in enumerate(rows[:1]):
            # An oracle of the search: beams are recomputed in whole at every step, without a cache.
            again = ours.generate(row[None], use_cache=False, **options)[0, len(row) :]
            assert torch.equal(again, alone[b])


@cache
def logits_of_a_row_of_40():
    """Of the golden model in float64, without a cache."""
    with torch.no_grad():
        return tiny.golden_model(torch.float64)(tiny.some_ids(2, 40, seed=4), use_cache=False).logits


@pytest.mark.parametrize(("kv_format", "kept"), half_of(("packed", "float"), (3, 4, 15, 17, 23)))
def test_cropped_caches_continue_as_if_nothing_had_been(kept, kv_format):
    """Rollback over borders of both compressions, with rounding, in float64: no code flips."""
    model, ids, other = tiny.golden_model(torch.float64), tiny.some_ids(2, 40, seed=4), tiny.some_ids(2, 16, seed=5)
    with torch.no_grad():
        cache = Dsv4Cache(model.config, kv_format, rollback=16)
        model(ids[:, :kept], cache=cache)
        model(other, cache=cache)
        cache.crop(-16)
        got = torch.cat([model(part, cache=cache).logits for part in ids[:, kept:].split([1, 7, 32 - kept], dim=1)], 1)
    expected = logits_of_a_row_of_40()[:, kept:]
    torch.testing.assert_close(got, expected, atol=1e-10, rtol=0)


# ---- untouched --------------------------------------------------------------------------------------------------------------------

SCRIPT = """
    import sys, torch
    from transformers import AutoConfig, AutoModelForCausalLM, DeepseekV4Config, DeepseekV4ForCausalLM
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING

    def rules():
        found = get_checkpoint_conversion_mapping("deepseek_v4")
        return [(type(r).__name__, r.source_patterns, r.target_patterns, [type(o).__name__ for o in getattr(r, "operations", [])])
                for r in found]

    ids = torch.arange(3, 60)[None]

    def everything():
        model = DeepseekV4ForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
        config = AutoConfig.from_pretrained(sys.argv[1])
        with torch.no_grad():
            logits, tokens = model(ids).logits, model.generate(ids, max_new_tokens=2, do_sample=False, pad_token_id=2)
        classes = AutoModelForCausalLM._model_mapping[type(config)], type(config), dict(AUTO_QUANTIZER_MAPPING), dict(AUTO_QUANTIZATION_CONFIG_MAPPING)
        return rules(), logits, tokens, classes, config.to_json_string()

    before = everything()
    assert before[3][:2] == (DeepseekV4ForCausalLM, DeepseekV4Config)
    import modeling_dsv4
    ours = modeling_dsv4.Dsv4ForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
    with torch.no_grad():
        ours(ids)
    after = everything()
    assert len(before[0]) > 20 and before[0] == after[0]
    assert torch.equal(before[1], after[1]) and torch.equal(before[2], after[2])
    assert before[3][:2] == after[3][:2] and before[4] == after[4]
    for old, new in zip(before[3][2:], after[3][2:]):
        assert all(new[k] is v for k, v in old.items())
        assert set(new) - set(old) == {"deepseek_fp8"}
    print("untouched")
"""


def test_the_native_implementation_is_untouched(folder):
    """Rules, classes, quantisers, logits and tokens, before and after importing and using ours in one process."""
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.strip().endswith("untouched")


def test_auto_classes_keep_giving_the_native_one(folder):
    assert type(AutoConfig.from_pretrained(folder)) is DeepseekV4Config
    assert type(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)) is DeepseekV4ForCausalLM
