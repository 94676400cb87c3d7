"""V4's configuration and inventories: the released files in and out, their variants, and one message per fault."""

import copy
import hashlib
import json
import re
from collections import Counter

import pytest
import torch
from transformers import DeepseekV4Config

from modeling_dsv4 import Dsv4Config, Dsv4ForCausalLM, Dsv4QuantizationConfig
from modeling_dsv4.configuration_common import PACKED_METHOD
from modeling_dsv4.quantization import Dsv4HfQuantizer
from modeling_dsv4.weight_names import OPTIONAL_PARTS
from tests.golden_cases import CHECKPOINT_V4, GOLDEN, load_json
from tests.modeling.test_weight_names import DTYPES, expand

NAMES = ("flash", "pro")
FILES = {name: GOLDEN / f"config_v4_{name}.json" for name in NAMES}
RELEASED = {name: load_json(FILES[name]) for name in NAMES}
INVENTORY = {name: load_json(GOLDEN / f"tensors_v4_{name}.json") for name in NAMES}
# Length and SHA-256 of the released files.
DIGESTS = {
    "flash": (1749, "b628e63398a645abc711d92207f8737dd8140f7a4ef1e0a5b3616019e0ddd818"),
    "pro": (1828, "5fe4568daee51c208cb8a79538eaeda090ae011ade1dee2c386aa95f569c810e"),
}


def flash(**changes):
    """The released Flash dictionary with some keys changed."""
    return copy.deepcopy(RELEASED["flash"]) | changes


def flash_0731():
    """The -0731 build: two more ratios and the keys of its drafter."""
    drafter = {"dspark_block_size": 5, "dspark_noise_token_id": 128799, "dspark_target_layer_ids": [40, 41, 42]}
    ratios = [*RELEASED["flash"]["compress_ratios"], 0, 0]
    return flash(compress_ratios=ratios, **drafter, dspark_markov_rank=256)


def flash_base():
    """A -Base build: FP8 experts and float32 scales, which a file says by leaving two keys out."""
    config = flash()
    del config["expert_dtype"], config["quantization_config"]["scale_fmt"]
    return config


VARIANTS = {"flash": flash, "pro": lambda: copy.deepcopy(RELEASED["pro"]), "0731": flash_0731, "base": flash_base}


# ---- in and out --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_golden_configs_are_the_released_files(name):
    data = FILES[name].read_bytes()
    assert (len(data), hashlib.sha256(data).hexdigest()) == DIGESTS[name]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("read", [Dsv4Config.from_dict, lambda d: Dsv4Config(**d)], ids=["from_dict", "constructor"])
def test_variants_are_written_back_equal(variant, read, tmp_path):
    released = VARIANTS[variant]()
    config = read(copy.deepcopy(released))
    assert json.loads(config.to_json_string()) == released
    config.save_pretrained(tmp_path)
    assert load_json(tmp_path / "config.json") == released
    assert json.loads(Dsv4Config.from_pretrained(tmp_path).to_json_string()) == released


def test_defaults_are_the_released_flash_values():
    written = json.loads(Dsv4Config().to_json_string())
    for key, value in RELEASED["flash"].items():
        if key in ("architectures", "expert_dtype", "quantization_config", "torch_dtype", "transformers_version"):
            continue
        if key == "rope_scaling":  # the default is spelled in the new way
            value = {("rope_type" if k == "type" else k): v for k, v in value.items()}
        assert written[key] == value, key


def test_copies_are_independent():
    first, second = Dsv4Config(), Dsv4Config()
    first.compress_ratios[0] = 4
    first.rope_scaling["factor"] = 1
    assert second.compress_ratios[0] == 0 and second.rope_scaling["factor"] == 16
    twin = copy.deepcopy(Dsv4Config.from_dict(flash()))
    twin.compress_ratios[0] = 4
    assert json.loads(Dsv4Config.from_dict(flash()).to_json_string()) == RELEASED["flash"]


def test_the_method_is_renamed_in_memory_only():
    config = Dsv4Config.from_dict(flash())
    assert config.quantization_config["quant_method"] == PACKED_METHOD
    assert config.to_dict()["quantization_config"]["quant_method"] == "fp8"


@pytest.mark.parametrize("key", ["mtp_loss_weight", "cache_rounding", "gate_temp"])
def test_our_own_keys_are_written_when_changed(key):
    value = {"mtp_loss_weight": 0.1, "cache_rounding": False, "gate_temp": 2.0}[key]
    config = Dsv4Config.from_dict(flash(**{key: value}))
    assert json.loads(config.to_json_string()) == RELEASED["flash"] | {key: value}


def test_unknown_keys_are_kept():
    assert json.loads(Dsv4Config.from_dict(flash(vendor={"a": 1})).to_json_string())["vendor"] == {"a": 1}


# ---- what follows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_schedule(name):
    config = Dsv4Config.from_dict(RELEASED[name])
    depth = config.num_hidden_layers
    ratios = config.compress_ratios[:depth]
    assert depth == {"flash": 43, "pro": 61}[name]
    assert ratios == ([0, 0] + [4, 128] * 20 + [4] if name == "flash" else [128, 128] + [4, 128] * 29 + [4])
    for layer, ratio in enumerate(ratios):
        assert config.mode(layer) == ("full" if ratio else "window")
        assert config.selects(layer) == config.overlaps(layer) == (ratio == 4)
        assert not config.uses_candidates(layer) and not config.makes_candidates(layer)
    assert config.index_source_layer_ids == [i for i, ratio in enumerate(ratios) if ratio == 4]
    assert config.mode(depth) == "window" and config.ratio(depth) == 0  # the MTP block
    assert config.has_mtp and not config.has_image_bias and not config.single_pass_hc
    assert config.yarn == {"rope_type": "yarn", **RELEASED[name]["rope_scaling"]}


def test_builds_with_a_drafter_have_no_mtp_layer():
    assert not Dsv4Config.from_dict(flash_0731()).has_mtp
    assert not Dsv4Config.from_dict(flash(num_nextn_predict_layers=0)).has_mtp


def test_base_builds_say_float_scales_and_fp8_experts():
    config = Dsv4Config.from_dict(flash_base())
    quantization = Dsv4QuantizationConfig.from_dict(config.quantization_config)
    assert (quantization.scale_fmt, quantization.expert_dtype, config.expert_dtype) == ("float", None, None)
    model = meta_model("base", num_hidden_layers=4)
    experts = model.model.layers[3].mlp.experts
    assert experts.expert_dtype == "fp8"
    assert {t.dtype for t in model.state_dict().values()} == {
        torch.bfloat16, torch.float32, torch.int64, torch.float8_e4m3fn,
    }  # fmt: skip


def test_the_vision_variant_has_a_second_selection_bias():
    config = Dsv4Config.from_dict(flash(vision_config={"hidden_size": 8}))
    assert config.has_image_bias


# ---- transformers' form ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hashes", [0, 2, 3])
def test_transformers_form_means_the_same(hashes):
    """What transformers writes after reading the golden file has nested RoPE, layer types and expert layer types."""
    golden = load_json(CHECKPOINT_V4 / "config.json") | {"num_hash_layers": hashes}
    native = json.loads(DeepseekV4Config(**copy.deepcopy(golden)).to_json_string())
    assert "compress_ratios" not in native and "num_hash_layers" not in native and "rope_scaling" not in native
    ours, expected = Dsv4Config.from_dict(native), Dsv4Config.from_dict(golden)
    for key in Dsv4Config.default_config_fields():
        if key not in ("rope_scaling", "dtype"):
            assert getattr(ours, key) == getattr(expected, key), key
    numbers = ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings")
    assert ours.yarn["rope_type"] == "yarn" and all(ours.yarn[k] == expected.yarn[k] for k in numbers)
    again = Dsv4Config.from_dict(json.loads(ours.to_json_string()))
    assert json.loads(again.to_json_string()) == json.loads(ours.to_json_string())


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_parameters": {"rope_theta": 500, "rope_type": "yarn", "factor": 2, "beta_fast": 32, "beta_slow": 1,
                             "original_max_position_embeddings": 64}},
        {"rope_theta": 500, "rope_scaling": {"type": "yarn", "factor": 2, "beta_fast": 32, "beta_slow": 1,
                                             "original_max_position_embeddings": 64}},
        {"rope_parameters": {
            "main": {"rope_theta": 500, "rope_type": "default"},
            "compress": {"rope_theta": 160000, "rope_type": "yarn", "factor": 2, "beta_fast": 32, "beta_slow": 1,
                         "original_max_position_embeddings": 64}}},
    ],
    ids=["flat", "released", "nested"],
)  # fmt: skip
def test_rope_forms(rope):
    config = Dsv4Config(**rope)
    assert (config.rope_theta, config.compress_rope_theta) == (500, 160000)
    assert config.yarn["factor"] == 2 and config.yarn["rope_type"] == "yarn"


# ---- broken files ----------------------------------------------------------------------------------------------------------

LAYERS = ["sliding_attention"] * 2
BROKEN = {
    "num_hidden_layers": (45, "compress_ratios.*45 entries or more"),
    "compress_ratios": ([0] * 42, "compress_ratios.*43 entries or more"),
    "num_hash_layers": (44, "num_hash_layers is 44; accepted: at most 43"),
    "index_head_dim": (96, "index_head_dim is 96; accepted: a power of two"),
    "num_nextn_predict_layers": (2, "num_nextn_predict_layers is 2; accepted: 0 or 1"),
    "expert_dtype": ("int4", "expert_dtype is 'int4'.*'fp4', 'fp8'"),
    "mtp_loss_weight": (0, "mtp_loss_weight is 0; accepted: a number > 0"),
    "o_groups": (7, "o_groups is 7; accepted: a divisor of num_attention_heads"),
    "qk_rope_head_dim": (63, "qk_rope_head_dim is 63; accepted: an even integer"),
    "num_experts_per_tok": (300, "num_experts_per_tok is 300; accepted: at most n_routed_experts"),
    "scoring_func": ("softmax", "scoring_func is 'softmax'"),
    "model_type": ("deepseek_v3", "model_type is 'deepseek_v3'; accepted: 'deepseek_v4'"),
    "rope_scaling": ({"type": "linear", "factor": 2}, "rope_scaling.rope_type is 'linear'"),
    "n_shared_experts": (2, "n_shared_experts is 2"),
    "tie_word_embeddings": (True, "tie_word_embeddings is True"),
    "quantization_config": ({"quant_method": "gptq"}, "quantization_config.quant_method is 'gptq'"),
    "compress_rates": ({"compressed_sparse_attention": 8}, "compress_rates.*compressed_sparse_attention: 4"),
    "mlp_layer_types": (["moe"] + ["hash_moe"] * 42, "mlp_layer_types.*'hash_moe' layers, then 'moe'"),
    "hidden_size": ("4096", "hidden_size is '4096'"),
    "rms_norm_eps": (float("nan"), "rms_norm_eps is nan"),
}


@pytest.mark.parametrize("key", BROKEN)
def test_broken_values_are_named(key):
    value, message = BROKEN[key]
    with pytest.raises(ValueError, match=message):
        Dsv4Config.from_dict(flash(**{key: value}))


@pytest.mark.parametrize("ratios", [[0] * 43 + [4], None, "0,4", [0] * 42 + [-1]])
def test_broken_ratios_are_named(ratios):
    with pytest.raises(ValueError, match="compress_ratios"):
        Dsv4Config.from_dict(flash(compress_ratios=ratios, num_hidden_layers=43 if ratios else 12))


@pytest.mark.parametrize(
    ("key", "value", "accepted"),
    [
        ("dspark_block_size", 0, "an integer >= 1"),
        ("dspark_noise_token_id", 129280, "below vocab_size"),
        ("dspark_target_layer_ids", [43], "layers below 43"),
        ("dspark_markov_rank", None, "an integer >= 1"),
    ],
)
def test_keys_of_the_drafter_are_checked(key, value, accepted):
    with pytest.raises(ValueError, match=f"{key} is {re.escape(repr(value))}; accepted: .*{accepted}"):
        Dsv4Config(**flash_0731() | {key: value})


def test_unknown_layer_types_are_named():
    kinds = {"num_hidden_layers": 3, "compress_ratios": None, "layer_types": [*LAYERS, "linear_attention"]}
    with pytest.raises(ValueError, match="layer_types.*linear_attention.*heavily_compressed_attention"):
        Dsv4Config.from_dict(flash(**kinds))


# ---- the released models, without memory ---------------------------------------------------------------------------------------


def meta_model(variant, num_hidden_layers=None):
    """A released configuration (its first layers), packed as a load packs it, on the meta device."""
    released = VARIANTS[variant]()
    if num_hidden_layers is not None:
        released |= {"num_hidden_layers": num_hidden_layers}
        released["compress_ratios"] = released["compress_ratios"][:num_hidden_layers]
    config = Dsv4Config.from_dict(released)
    quantization = Dsv4QuantizationConfig.from_dict(config.quantization_config)
    previous = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            model = Dsv4ForCausalLM(config)
    finally:
        torch.set_default_dtype(previous)
    Dsv4HfQuantizer(quantization, pre_quantized=True).preprocess_model(model=model, dtype=torch.bfloat16)
    return model


def inventory_of(name):
    """Released name -> (dtype, shape, group, kind)."""
    dtypes = DTYPES | {"I64": torch.int64}
    table = {}
    for row in INVENTORY[name]["tensors"]:
        names = list(expand(row))
        assert len(names) == row["count"]
        table |= {n: (dtypes[row["dtype"]], tuple(row["shape"]), row["group"], row["kind"]) for n in names}
    return table


SUMS = {
    "flash": (69187, 284_332_240_471, 6_610_048_891),
    "pro": (145116, 1_572_997_201_763, 25_840_145_979),
}


@pytest.mark.parametrize("name", NAMES)
def test_released_models_have_exactly_the_inventory(name):
    """Every name, shape and dtype; parameters of the backbone and of the MTP layer."""
    inventory, model = inventory_of(name), meta_model(name)
    tensors, backbone, mtp = SUMS[name]
    found, sums = {}, Counter()
    for ours, tensor in model.state_dict().items():
        assert tensor.device.type == "meta"
        released = model.weight_names.to_released(ours)
        found[released] = tensor.dtype, tuple(tensor.shape)
        if inventory[released][3] == "param":
            sums[inventory[released][2]] += tensor.numel() * (2 if tensor.dtype == torch.int8 else 1)
    assert len(found) == tensors
    assert found == {released: entry[:2] for released, entry in inventory.items()}
    assert sums.pop("mtp") == mtp and sum(sums.values()) == backbone
    assert dict(sums) | {"mtp": mtp} == INVENTORY[name]["summary"]["params_by_group"]
    print(f"{name}: {len(found)} tensors, {backbone / 1e9:.3f} B + MTP {mtp / 1e9:.3f} B")


def test_models_with_a_drafter_leave_it_on_disk():
    inventory, model = inventory_of("flash"), meta_model("0731", num_hidden_layers=4)
    found = {model.weight_names.to_released(n) for n in model.state_dict()}
    assert found == {n for n in inventory if not n.startswith("mtp.") and not re.match(r"layers\.([4-9]|\d\d)\.", n)}
    assert OPTIONAL_PARTS["drafts"].search("mtp.2.markov_head.embed.weight")
