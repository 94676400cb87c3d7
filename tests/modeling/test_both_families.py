"""Fault kinds that V4 and V4.1 share, over both families.

Tests of whole V4.1 models that ask for nothing of V4.1 alone are collected here a second time, with V4's model and ids
in place of the fixtures of their own file. The others are parametrised by family.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from modeling_dsv4 import Dsv4Cache, Dsv4ForCausalLM, Dsv4QuantizationConfig, Dsv41ForCausalLM, attention
from modeling_dsv4.cache import cache_codecs
from modeling_dsv4.cache_storage import CacheCodec, unrotated_fp8
from modeling_dsv4.hyper_connections import Dsv4HyperConnection, Dsv4HyperHead, collapse_streams
from tests.golden_cases import CHECKPOINT_V4, CHECKPOINT_V41
from tests.modeling import test_fault_kinds as v41_tests
from tests.modeling import tiny_model as v41
from tests.modeling import v4_models as v4

# With V4's fixtures (below); pytest collects imported tests.
from tests.modeling.test_fault_kinds import (  # noqa: F401
    test_k1_a_mask_that_contradicts_the_cache_is_refused,
    test_k1_every_row_equals_its_run_alone,
    test_k1_no_mask_and_a_mask_of_ones_are_the_same,
    test_k1_optional_outputs_are_in_the_callers_columns,
    test_k1_other_masks_are_refused,
    test_k1_rows_of_padded_queries_may_be_filled,
    test_k1_what_lies_at_padding_has_no_influence,
    test_k2_a_copied_cache_continues_with_another_suffix,
    test_k2_a_second_turn_on_the_same_cache,
    test_k2_chunks_of_every_size,
    test_k2_prefill_and_decode_everywhere,
    test_k3_later_rows_of_a_batch_do_not_matter,
    test_k9_nothing_sequence_dependent_stays_on_the_model,
    test_k9_reordered_rows_continue_as_themselves,
    test_k9_rollback_forgets,
)
from tests.modeling.test_modeling_deepseek_v41 import test_logits_to_keep, test_tuples_instead_of_outputs  # noqa: F401
from tests.reference import mhc, text_model, v4_model
from tests.released_folders import Folder, change, remove, small_folder

LENGTH = 41


@pytest.fixture
def model():
    """V4, for the imported tests; not to be changed."""
    return v4.small_model()


@pytest.fixture
def float32_model():
    return v4.small_model(torch.float32)


@pytest.fixture
def ids():
    return v41.some_ids(2, LENGTH, seed=1)


# ---- the families -----------------------------------------------------------------------------------------------------------


def _v41_oracle(model, ids):
    return v41.oracle_logits(model, ids[None])[0]


def _v4_oracle(model, ids):
    config = model.config.to_dict()
    # An absent limit selects every visible entry; the oracle always turns by YaRN, of which a factor of 1 is plain RoPE.
    config["index_topk"] = config["index_topk"] or 10**6
    if model.config.yarn is None:
        config["rope_scaling"] = v4.SMALL["rope_scaling"] | {"factor": 1}
    weights = v41.oracle_weights(model)
    return v4_model.forward(weights, config, ids.tolist(), rounding=config["cache_rounding"])["logits"]


def _v4_new(dtype=torch.float64, **changes):
    return v4.random_model(dtype, **(v4.SMALL | changes))


ROPE = {
    "rope_scaling.rope_type": "default", "rope_scaling.factor": 8, "rope_scaling.beta_fast": 0.5, "rope_scaling.beta_slow": 0.25,
    "rope_scaling.original_max_position_embeddings": 128,
}  # fmt: skip
V4_VALUES = ROPE | {
    "swiglu_limit": 1.0, "rms_norm_eps": 1e-2, "rope_theta": 500.0, "compress_rope_theta": 500.0, "num_experts_per_tok": 1,
    "norm_topk_prob": False, "routed_scaling_factor": 2.5, "sliding_window": 7, "compress_ratios": [0, 4, 16, 4, 16, 0],
    "index_topk": 3, "num_hash_layers": 1, "hc_sinkhorn_iters": 2, "hc_eps": 1e-2, "gate_temp": 2.0, "cache_rounding": False,
}  # fmt: skip
V4_SCHEDULES = [
    {"index_topk": None}, {"compress_ratios": [16, 16, 4, 16, 4, 4]}, {"compress_ratios": [0, 4, 128, 4, 7, 4]},
    {"sliding_window": 1}, {"hc_mult": 2}, {"num_hash_layers": 0}, {"num_hash_layers": 6}, {"cache_rounding": False},
    {"rope_scaling": {"rope_type": "default"}},
]  # fmt: skip


@dataclass(frozen=True)
class Family:
    """What a test needs of a family: models of small size, their oracle, and the golden folder."""

    model_class: type
    checkpoint: Any
    shared: Callable  # dtype -> model that may not be changed
    new: Callable  # dtype, changed keys -> model
    oracle: Callable  # model, ids [S] -> logits [S, V]
    bound: float  # between a float64 model and the oracle
    pooling_layers: tuple[int, ...]


FAMILIES = {
    "v41": Family(Dsv41ForCausalLM, CHECKPOINT_V41, v41.shared_model, v41.new_model, _v41_oracle, 2e-6, (2, 5)),
    "v4": Family(Dsv4ForCausalLM, CHECKPOINT_V4, v4.small_model, _v4_new, _v4_oracle, 1e-10, (1, 2, 3, 4, 5)),
}


@pytest.fixture(params=FAMILIES)
def family(request):
    return FAMILIES[request.param]


@torch.no_grad()
def logits_of(model, ids, **options):
    return model(ids, **options).logits


# ---- K2: splits (every one of them: slow) -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "kv_format"), [(16, "packed"), (37, "float")])
def test_k2_prefill_and_decode_of_v4(model, ids, first, kv_format):
    v41_tests.test_k2_prefill_and_decode(model, ids, first, kv_format)


@pytest.mark.parametrize("size", [3, 13, 16])
def test_k2_chunks_of_v4(model, ids, size):
    v41_tests.test_k2_chunks(model, ids, size)


# ---- K3: causality ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kv_format", ["packed", "float"])
@pytest.mark.parametrize("count", range(1, 17))
def test_k2_every_crop_of_v4_at_every_offset(model, count, kv_format):
    """Over groups of 4 that overlap and groups of 16: cropped and continued equals never seen."""
    row = v41.some_ids(1, 52, seed=3)
    whole = logits_of(model, row, use_cache=False)
    for length in range(33, 49):
        cache = Dsv4Cache(model.config, kv_format, rollback=16)
        logits_of(model, torch.cat([row[:, : length - count], v41.some_ids(1, count, seed=9)], 1), cache=cache)
        cache.crop(-count)
        found = logits_of(model, row[:, length - count : length - count + 3], cache=cache)
        assert (
            found - whole[:, length - count : length - count + 3]
        ).abs().max() < v41.EXACT and found.abs().max() > 0.1


@pytest.mark.parametrize("length", [2, 9, 20])
def test_k3_earlier_logits_of_v4_do_not_move_by_a_bit(float32_model, length):
    v41_tests.test_k3_earlier_logits_do_not_move_by_a_bit(float32_model, length)


@pytest.mark.parametrize(("name", "layer"), [(n, layer) for n, f in FAMILIES.items() for layer in f.pooling_layers])
def test_k3_an_entry_moves_the_queries_that_attend_it_and_no_other(name, layer, monkeypatch):
    """Change one pooled entry of one layer: those that selected it move, or, in a layer without a selection, that see it."""
    model, ids, column = FAMILIES[name].shared(torch.float32), v41.some_ids(1, LENGTH, seed=2), 1
    attend, codecs = model.model.layers[layer].self_attn, attention.cache_codecs
    outputs, selections, at_work, change = [], [], [], False

    def changed(config, kv_format="float"):
        kinds = dict(codecs(config, kv_format))
        rounded = kinds["compressed"].rounded

        def entries(x):
            x = rounded(x).clone()
            if change and at_work[-1] == layer:
                x[:, column] += 3.0
            return x

        return kinds | {"compressed": CacheCodec(entries)}

    def keep(module, args, output):
        outputs.append(output[0])
        selections.append(output[1].selection)

    monkeypatch.setattr(attention, "cache_codecs", changed)
    hooks = [
        block.register_forward_pre_hook(lambda module, args: at_work.append(module.layer_idx))
        for block in model.model.layers
    ]
    hooks.append(attend.register_forward_hook(keep))
    try:
        logits_of(model, ids, use_cache=False)
        change = True
        logits_of(model, ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    visible = (torch.arange(LENGTH) + 1) // attend.ratio > column
    attended = (selections[0][0] == column).any(-1) if attend.selects else visible
    assert 0 < attended.sum() and (attended.sum() < visible.sum() or not attend.selects)
    assert torch.equal((outputs[0] != outputs[1]).any(-1)[0], attended)


# ---- K4: boundary lengths and keys ------------------------------------------------------------------------------------------------


def test_k4_boundary_lengths_of_v4_equal_the_oracle(model):
    """Around the ratios 4 and 16, the window 8, topk * ratio and their residues; V4.1 has every length in its own file.

    The oracle is causal (below), so that one run gives the logits of every prefix.
    """
    ids = v41.some_ids(1, LENGTH, seed=1)
    expected, worst = _v4_oracle(model, ids[0]), 0.0
    for length in (*range(1, 11), 12, 13, 15, 16, 17, 18, 19, 31, 32, 33, 34, LENGTH):
        worst = max(worst, np.abs(logits_of(model, ids[:, :length])[0].numpy() - expected[:length]).max())
    print(f"largest difference {worst:.1e}")
    assert worst < FAMILIES["v4"].bound


def test_k4_the_v4_oracle_is_causal():
    model, ids = v4.small_model(), v41.some_ids(1, 23, seed=1)[0]
    whole = _v4_oracle(model, ids)
    for length in (1, 4, 7, 16, 17, 22):
        np.testing.assert_allclose(_v4_oracle(model, ids[:length]), whole[:length], atol=1e-12)


@pytest.mark.parametrize(
    "changed", V4_SCHEDULES, ids=lambda changed: ",".join(f"{k}={v}" for k, v in changed.items())[:60]
)
def test_k4_other_schedules_of_v4_equal_the_oracle(changed):
    model, ids = _v4_new(**changed), v41.some_ids(1, 33, seed=3)
    expected = _v4_oracle(model, ids[0])
    for length in (1, 5, 16, 33):
        assert np.abs(logits_of(model, ids[:, :length])[0].numpy() - expected[:length]).max() < 1e-10


@cache
def logits_of_two_rows():
    """Of the shared V4 model."""
    return logits_of(v4.small_model(), v41.some_ids(2, LENGTH, seed=1))


@pytest.mark.parametrize("key", V4_VALUES)
def test_k4_every_key_of_v4_changes_something(model, ids, key):
    name, _, inner = key.partition(".")
    value = v4.SMALL[name] | {inner: V4_VALUES[key]} if inner else V4_VALUES[key]
    other = Dsv4ForCausalLM(v4.tiny_config(**(v4.SMALL | {name: value}))).to(torch.float64).eval()
    held = model.state_dict()
    for tensor_name, tensor in other.state_dict().items():
        if tensor_name in held:
            tensor.copy_(held[tensor_name][:, : tensor.shape[1]] if tensor.ndim == 2 else held[tensor_name])
    difference = (logits_of(other, ids) - logits_of_two_rows()).abs().max()
    assert difference > 1e-4, difference


# ---- K5: nothing is lost on load ----------------------------------------------------------------------------------------------------

WQ, W1, APE = "layers.2.attn.wq_a", "layers.2.ffn.experts.3.w1", "layers.2.attn.compressor.ape"
TABLE = "layers.0.ffn.gate.tid2eid"


FAULTS = {
    "missing tensor": (remove(f"{WQ}.weight"), f"{WQ}.weight"),
    "missing scale": (remove(f"{WQ}.scale"), f"{WQ}.scale"),
    "missing expert scale": (remove(f"{W1}.scale"), f"{W1}.scale"),
    "missing norm": (remove("norm.weight"), "norm.weight"),
    "wrong dtype": (change(f"{WQ}.weight", lambda t: t.float()), f"{WQ}"),
    "wrong expert dtype": (change(f"{W1}.weight", lambda t: t.to(torch.int32)), f"{W1}.weight"),
    "wrong shape": (change(f"{WQ}.weight", lambda t: t[:-1].contiguous()), f"{WQ}.weight"),
    "wrong scale shape": (change(f"{W1}.scale", lambda t: t[:, :1].contiguous()), f"{W1}.scale"),
    "unknown tensor": (lambda folder: _new(folder, "layers.2.attn.wq_c.weight"), "layers.2.attn.wq_c.weight"),
    "expert beyond the last": (lambda folder: _new(folder, "layers.2.ffn.experts.99.w1.weight"), "experts.99"),
    "zero matches": (lambda folder: folder.rename(lambda name: "other." + name), "other."),
}
V4_FAULTS = {
    "missing table": (remove(TABLE), TABLE),
    "table of floats": (change(TABLE, lambda t: t.float()), TABLE),
    "table of other width": (change(TABLE, lambda t: t[:, :1].contiguous()), TABLE),
    "missing position bias": (remove(APE), APE),
    "short position bias": (change(APE, lambda t: t[:1].contiguous()), APE),
    "missing collapse": (remove("hc_head_fn"), "hc_head_fn"),
    "hash layer with a bias": (lambda folder: _new(folder, "layers.0.ffn.gate.bias"), "layers.0.ffn.gate.bias"),
}
# Both ways to load V4; V4.1's faults are told apart in test_broken_checkpoints.
FAULT_CASES = [("v41", fault, False) for fault in FAULTS]
FAULT_CASES += [("v4", fault, dequantize) for fault in FAULTS | V4_FAULTS for dequantize in (False, True)]


def _new(folder, name):
    next(iter(folder.shards.values()))[name] = torch.zeros(4)


@cache
def _golden_folder(name):
    return small_folder() if name == "v41" else Folder(FAMILIES[name].checkpoint)


@pytest.mark.parametrize(("name", "fault", "dequantize"), FAULT_CASES)
def test_k5_a_broken_folder_raises_and_names_the_tensor(name, fault, dequantize, tmp_path):
    edit, named = (FAULTS | V4_FAULTS)[fault]
    folder = _golden_folder(name).copy()
    edit(folder)
    options = Dsv4QuantizationConfig(dequantize=dequantize)
    with pytest.raises((ValueError, OSError)) as error:
        FAMILIES[name].model_class.from_pretrained(folder.write(tmp_path), quantization_config=options)
    assert named in str(error.value), str(error.value)


@pytest.mark.parametrize("name", FAMILIES)
def test_k5_a_truncated_shard_is_named(name, tmp_path):
    path = _golden_folder(name).write(tmp_path)
    shard = sorted(path.glob("*.safetensors"))[-1]
    with open(shard, "r+b") as handle:
        handle.truncate(shard.stat().st_size - 100)
    with pytest.raises(OSError, match=shard.name):
        FAMILIES[name].model_class.from_pretrained(path)


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("build", ["plain", "mtp"])
def test_k5_every_tensor_of_a_v4_folder_is_used_once(build, prefix, tmp_path):
    folder = v4.with_mtp() if build == "mtp" else v4.v4_folder()
    folder.rename(lambda name: prefix + name)
    stored = {name.removeprefix(prefix) for name in folder.shards[v4.SHARD]}
    model = v4.load(folder.write(tmp_path), dequantize=False)
    names = [model.weight_names.to_released(name) for name in model.state_dict()]
    assert len(names) == len(set(names)) and set(names) == stored


def test_k5_an_mtp_layer_that_the_config_does_not_announce_stays_on_disk(tmp_path):
    folder = v4.with_mtp()
    folder.config["num_nextn_predict_layers"] = 0
    model, ids = v4.load(folder.write(tmp_path)), v4.some_ids(1, 9)
    assert not hasattr(model.model, "mtp")
    assert torch.equal(logits_of(model, ids), logits_of(v4.golden_model(), ids))


def test_k5_an_announced_mtp_layer_must_be_there(tmp_path):
    folder = v4.v4_folder()
    folder.config["num_nextn_predict_layers"] = 1
    with pytest.raises(ValueError, match=r"missing.*mtp\.0\."):
        v4.load(folder.write(tmp_path))


# ---- K7: number formats ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_k7_packed_and_rounded_cache_values_are_the_same(family, dtype):
    """Prompt, a chunk and single tokens with either cache: bit for bit the same logits."""
    model, ids = family.shared(dtype), v41.some_ids(2, LENGTH, seed=6)
    caches = [Dsv4Cache(model.config, kv_format) for kv_format in ("packed", "float")]
    for part in ids.split([19, 9, 1, 1, 1, 1, LENGTH - 32], dim=1):
        assert torch.equal(*(logits_of(model, part, cache=cache) for cache in caches))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("width", [1, 24, 64, 65, 144, 448])
def test_k7_v4_cache_format_equals_the_oracle(width, dtype):
    """FP8 on the channels before the rotary ones, 64 to a scale, ragged sizes; ties, zeros, floors and large values."""
    rotary, generator = 8, torch.Generator().manual_seed(width)
    x = torch.randn(40, width + rotary, generator=generator).to(dtype)
    x[0], x[1], x[2], x[3] = 0, 1e-6, 1e30 if dtype != torch.float16 else 1, -0.0
    x[4:20] *= 2.0 ** torch.arange(-8, 8)[:, None].to(dtype)
    halves = torch.arange(width) % 16 * 2 + 1  # odd numbers of half steps: ties of E4M3 under a scale of 1
    x[20, :width] = (256 + halves * 16).clamp(max=448).to(dtype)
    x[21] = -x[20]
    # A power-of-two scale shows only where values are subnormal under it: far below the largest of their block.
    x[22, :width] = (1.3 * 2.0 ** -(torch.arange(width) / 2)).to(dtype)
    codec = unrotated_fp8(rotary)
    expected = v4_model.round_kv(x.double().numpy(), rotary)
    rounded = codec.rounded(x)
    assert rounded.dtype == dtype
    assert torch.equal(rounded, torch.as_tensor(expected).to(dtype))
    parts = codec.encode(x)
    assert [p.dtype for p in parts] == [torch.uint8, torch.uint8, dtype]
    assert [p.shape[-1] for p in parts] == [width, -(-width // 64), rotary]
    assert torch.equal(codec.decode(parts, dtype), rounded)
    assert torch.equal(codec.as_float().decode(codec.as_float().encode(x), dtype), rounded)
    assert torch.equal(codec.rounded(rounded), rounded)


def test_k7_gradients_pass_the_v4_format_straight_through():
    x = torch.randn(3, 72, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 72, dtype=torch.float64)
    (unrotated_fp8(8).rounded(x) * weight).sum().backward()
    assert torch.equal(x.grad, weight)


@pytest.mark.parametrize("width", [1, 2, 32, 128])
def test_k7_hadamard_is_the_written_out_matrix(width):
    x = torch.randn(5, width, dtype=torch.float64)
    got = attention.hadamard_rotate(x)
    np.testing.assert_allclose(got, v4_model.hadamard(x.numpy()), atol=1e-13)
    torch.testing.assert_close(attention.hadamard_rotate(got), x, atol=1e-13, rtol=0)  # its own inverse
    assert attention.hadamard_rotate(x.bfloat16()).dtype == torch.bfloat16


def test_k7_each_family_has_its_formats():
    v41_codecs = cache_codecs(v41.shared_model().config.get_text_config(), "packed")
    v4_codecs = cache_codecs(v4.small_model().config, "packed")
    assert v41_codecs["index"] is v4_codecs["index"]
    assert v41_codecs["window"] is not v4_codecs["window"] and v4_codecs["window"] is v4_codecs["compressed"]


# ---- K8: hyper-connections ----------------------------------------------------------------------------------------------------------------


def test_k8_a_strongly_asymmetric_mixing_equals_the_oracle(family):
    """Every site moves stream s to stream s + 1: a transposed matrix would move it the other way."""
    model, ids = family.new(torch.float64), v41.some_ids(1, 19, seed=8)
    count = model.config.get_text_config().hc_mult
    for module in model.modules():
        if isinstance(module, Dsv4HyperConnection):
            cycle = 6.0 * torch.eye(count, dtype=torch.float64).roll(1, dims=1)
            module.base.data[2 * count :] += cycle.flatten()
    straight = family.oracle(model, ids[0])
    assert np.abs(logits_of(model, ids)[0].numpy() - straight).max() < family.bound
    for module in model.modules():
        if isinstance(module, Dsv4HyperConnection):
            comb = module.base.data[2 * count :].view(count, count)
            comb.copy_(comb.T.clone())
    assert np.abs(logits_of(model, ids)[0].numpy() - straight).max() > 0.1


def _head(count=4, width=6, dtype=torch.float64):
    config = v4.tiny_config(hc_mult=count, hidden_size=width)
    head, generator = Dsv4HyperHead(config).to(dtype), torch.Generator().manual_seed(count)
    for parameter in head.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return head, torch.randn(2, 3, count, width, generator=generator, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_k8_the_learned_collapse_is_the_written_out_sum(count):
    head, streams = _head(count)
    got = collapse_streams(streams, head(streams)).detach()
    fn, base, scale = (getattr(head, n).detach().numpy() for n in ("fn", "base", "scale"))
    for row in range(2):
        for t in range(3):
            flat = streams[row, t].flatten().numpy()
            root = np.sqrt((flat**2).mean() + 1e-6)
            share = mhc.sigmoid(fn @ flat / root * scale[0] + base) + 1e-6
            np.testing.assert_allclose(got[row, t], mhc.collapse(streams[row, t].numpy(), share), atol=1e-12)


def test_k8_gradients_of_the_learned_collapse():
    head, streams = _head()
    parameters = [p.detach().requires_grad_() for p in head.parameters()]
    names = [name for name, _ in head.named_parameters()]

    def collapsed(streams, *values):
        return collapse_streams(
            streams, torch.func.functional_call(head, dict(zip(names, values, strict=True)), (streams,))
        )

    assert torch.autograd.gradcheck(collapsed, (streams.requires_grad_(), *parameters))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factor", [1.0, 1e4])
def test_k8_gradients_of_the_learned_collapse_are_finite_and_scale(dtype, factor):
    def gradients(dtype, scaled_by):
        head, streams = _head()
        weight = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        streams = streams.to(rounded_to).to(dtype).requires_grad_()
        head = head if dtype == torch.float64 else head.float()
        (collapse_streams(streams, head(streams)).double() * weight * scaled_by).sum().backward()
        return [g.double() for g in (streams.grad, *(p.grad for p in head.parameters()))]

    rounded_to = dtype
    for got, exact in zip(gradients(dtype, factor), gradients(torch.float64, 1.0), strict=True):
        assert got.isfinite().all()
        error = (got / factor - exact).norm() / exact.norm()
        assert error < (1e-5 if dtype == torch.float32 else 2e-2), error


def test_the_oracles_are_two_programs():
    assert v4_model.Row is not text_model.Row and not issubclass(v4_model.Row, text_model.Row)
