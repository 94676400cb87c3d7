"""The configuration: the released file in and out, the schedule that follows from it, and one message per fault."""

import copy
import hashlib
import json

import pytest
import torch
from transformers import AutoConfig, AutoModel

from modeling_dsv4 import (
    Dsv4QuantizationConfig,
    Dsv41Config,
    Dsv41ForCausalLM,
    Dsv41Model,
    Dsv41TextConfig,
    Dsv41TextModel,
    Dsv41VisionConfig,
)
from modeling_dsv4.configuration_common import PACKED_METHOD
from modeling_dsv4.quantization import pack_modules
from tests.golden_cases import CHECKPOINT_V41, GOLDEN, load_json

RELEASED_FILE = GOLDEN / "config_v41_flash.json"
RELEASED = load_json(RELEASED_FILE)


def released(**changes):
    """The released dictionary with changed entries; a key is a path with dots."""
    config = copy.deepcopy(RELEASED)
    for path, value in changes.items():
        *parents, key = path.split(".")
        place = config
        for parent in parents:
            place = place[parent]
        place[key] = value
    return config


def leaves(config, prefix=""):
    """Paths of every key of a configuration dictionary, objects included."""
    for key, value in config.items():
        yield prefix + key
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")


# ---- in and out ------------------------------------------------------------------------------------------------------


def test_golden_config_is_the_released_file():
    data = RELEASED_FILE.read_bytes()
    blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    assert (len(data), blob) == (3311, "09917a9139b22d5bf8be52132787f435147b1020")


@pytest.mark.parametrize("read", [Dsv41Config.from_dict, lambda d: Dsv41Config(**d)], ids=["from_dict", "constructor"])
def test_released_config_is_written_back_equal(read):
    assert json.loads(read(released()).to_json_string()) == RELEASED


def test_released_file_survives_save_and_load_through_every_door(tmp_path):
    (tmp_path / "config.json").write_bytes(RELEASED_FILE.read_bytes())
    for turn, reader in enumerate((AutoConfig, Dsv41Config)):
        config = reader.from_pretrained(tmp_path)
        assert type(config) is Dsv41Config
        config.save_pretrained(tmp_path / str(turn))
        assert load_json(tmp_path / str(turn) / "config.json") == RELEASED
        again = reader.from_pretrained(tmp_path / str(turn))
        assert json.loads(again.to_json_string()) == RELEASED


def test_copies_are_equal_and_independent():
    config = Dsv41Config.from_dict(released())
    twin = copy.deepcopy(config)
    twin.text_config.kv_source_layer_ids.append(39)
    twin.quantization_config["weight_block_size"][0] = 128
    assert json.loads(config.to_json_string()) == RELEASED
    # Defaults are not shared between configs either.
    first, second = Dsv41TextConfig(), Dsv41TextConfig()
    first.compress_ratios[0] = 1
    first.rope_scaling["factor"] = 1
    assert second.compress_ratios[0] == 0 and second.rope_scaling["factor"] == 16


def test_method_is_renamed_in_memory_only():
    config = Dsv41Config.from_dict(released())
    assert config.quantization_config["quant_method"] == PACKED_METHOD
    assert config.to_dict()["quantization_config"]["quant_method"] == "fp8"
    assert json.loads(config.to_json_string(use_diff=False))["quantization_config"]["quant_method"] == "fp8"


def test_unknown_keys_are_kept_at_every_level():
    config = Dsv41Config.from_dict(
        released(
            **{
                "vendor_note": {"a": [1]},
                "text_config.future_key": 7,
                "vision_config.other": "x",
                "quantization_config.fmt": "e4m3",
            }
        )
    )
    assert (config.vendor_note, config.text_config.future_key, config.vision_config.other) == ({"a": [1]}, 7, "x")
    written = json.loads(config.to_json_string())
    assert written["vendor_note"] == {"a": [1]} and written["text_config"]["future_key"] == 7
    assert written["vision_config"]["other"] == "x" and written["quantization_config"]["fmt"] == "e4m3"
    for path in ("vendor_note", "text_config.future_key", "vision_config.other", "quantization_config.fmt"):
        *parents, key = path.split(".")
        place = written
        for parent in parents:
            place = place[parent]
        del place[key]
    assert written == RELEASED


def test_tuples_are_accepted_as_lists():
    config = Dsv41TextConfig(kv_source_layer_ids=(2, 8, 14, 20))
    assert config.kv_source_layer_ids == [2, 8, 14, 20]


def test_defaults_are_the_released_values():
    written = json.loads(Dsv41Config(vision_config={}).to_json_string())
    assert written["text_config"] == RELEASED["text_config"]
    assert written["vision_config"] == RELEASED["vision_config"]
    assert written["image_token_id"] == RELEASED["image_token_id"]


def test_parts_are_read_from_a_composite_folder(tmp_path):
    (tmp_path / "config.json").write_bytes(RELEASED_FILE.read_bytes())
    text, vision = Dsv41TextConfig.from_pretrained(tmp_path), Dsv41VisionConfig.from_pretrained(tmp_path)
    assert text.num_hidden_layers == 40 and text.hidden_size == 5120
    assert vision.num_hidden_layers == 32 and vision.hidden_size == 1024


# ---- rope forms ------------------------------------------------------------------------------------------------------

YARN = RELEASED["text_config"]["rope_scaling"]
OLD_YARN = {"type": "yarn", **{k: v for k, v in YARN.items() if k != "rope_type"}}
ROPE_FORMS = {
    "flat": {"rope_theta": 10000, "compress_rope_theta": 160000, "rope_scaling": YARN},
    "flat, old spelling": {"rope_theta": 10000, "compress_rope_theta": 160000, "rope_scaling": OLD_YARN},
    "rope_parameters flat": {"compress_rope_theta": 160000, "rope_parameters": {"rope_theta": 10000, **YARN}},
    "rope_parameters nested": {
        "rope_parameters": {
            "main": {"rope_type": "default", "rope_theta": 10000},
            "compress": {"rope_theta": 160000, **YARN},
        }
    },
}


@pytest.mark.parametrize("form", ROPE_FORMS)
def test_rope_forms_give_the_same_settings(form):
    text = released()["text_config"]
    for key in ("rope_theta", "compress_rope_theta", "rope_scaling"):
        del text[key]
    config = Dsv41TextConfig(**text, **copy.deepcopy(ROPE_FORMS[form]))
    assert (config.rope_theta, config.compress_rope_theta) == (10000, 160000)
    assert {k: config.yarn[k] for k in YARN} == YARN
    if form != "flat, old spelling":  # kept as it was written
        assert json.loads(config.to_json_string())["rope_scaling"] == YARN


def test_other_values_of_nested_rope_arrive():
    nested = {"main": {"rope_theta": 5.0}, "compress": {"rope_theta": 7.0, **YARN, "factor": 3}}
    config = Dsv41TextConfig(rope_parameters=nested)
    assert (config.rope_theta, config.compress_rope_theta, config.yarn["factor"]) == (5.0, 7.0, 3)


def test_plain_rope_has_no_yarn():
    assert Dsv41TextConfig(rope_scaling={"rope_type": "default"}).yarn is None


# ---- schedule (contract section 6.4, written out) ----------------------------------------------------------------------

# layer: (mode, compressed KV from, selection from, selects inside the candidates)
SCHEDULE = {
    0: ("window", None, None, False),
    1: ("window", None, None, False),
    2: ("full", 2, 2, False),
    **{layer: ("reuse", 2, 2, False) for layer in (3, 4, 5, 6, 7)},
    8: ("full", 8, 8, False),
    **{layer: ("reuse", 8, 8, False) for layer in (9, 10, 11, 12, 13)},
    14: ("full", 14, 14, False),
    **{layer: ("reuse", 14, 14, False) for layer in (15, 16, 17, 18, 19)},
    20: ("full", 20, 20, False),
    **{layer: ("reuse", 20, 20, False) for layer in (21, 22, 23)},
    24: ("reindex", 20, 24, True),
    **{layer: ("reuse", 20, 24, False) for layer in (25, 26, 27)},
    28: ("reindex", 20, 28, True),
    **{layer: ("reuse", 20, 28, False) for layer in (29, 30, 31)},
    32: ("reindex", 20, 32, True),
    **{layer: ("reuse", 20, 32, False) for layer in (33, 34, 35)},
    36: ("reindex", 20, 36, True),
    **{layer: ("reuse", 20, 36, False) for layer in (37, 38, 39)},
}


def test_released_schedule():
    config = Dsv41Config.from_dict(released()).text_config
    assert sorted(SCHEDULE) == list(range(40))
    assert config.layer_modes == [SCHEDULE[layer][0] for layer in range(40)]
    for layer, (_, entries, selection, candidates) in SCHEDULE.items():
        assert config.kv_source(layer) == entries, layer
        assert config.index_source(layer) == selection, layer
        assert config.uses_candidates(layer) is candidates, layer
        assert config.compress_ratios[layer] == (0 if layer < 2 else 2 if layer < 20 else 1)
    assert config.replay_cut == 20
    assert config.needs_token_map


def test_schedule_without_candidates_compression_or_engram():
    config = Dsv41TextConfig(candidate_source_layer_id=-1)
    assert not any(config.uses_candidates(layer) for layer in range(40))
    plain = Dsv41TextConfig(
        num_hidden_layers=3,
        compress_ratios=[0, 0, 0],
        kv_source_layer_ids=[],
        index_source_layer_ids=[],
        candidate_source_layer_id=-1,
        engram_layer_ids=[],
        num_nextn_predict_layers=0,
    )
    assert plain.layer_modes == ["window"] * 3 and plain.replay_cut is None and not plain.needs_token_map


def test_reindex_layers_of_another_source_use_no_candidates():
    config = Dsv41TextConfig(index_source_layer_ids=[2, 5, 8, 14, 20, 24])
    assert config.layer_modes[5] == "reindex" and not config.uses_candidates(5) and config.uses_candidates(24)


# ---- text-only composite ----------------------------------------------------------------------------------------------


def test_text_only_composite(tmp_path):
    config = Dsv41Config(text_config=released()["text_config"])
    assert config.vision_config is None
    assert "vision_config" not in json.loads(config.to_json_string())
    config.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).vision_config is None
    assert Dsv41Config.from_dict({**released(), "vision_config": None}).vision_config is None


def test_text_models_say_that_they_lack_vision_and_drafts():
    config = Dsv41Config.from_pretrained(CHECKPOINT_V41)
    with torch.device("meta"):
        model = Dsv41ForCausalLM(config)
    assert model.config.vision_config is None and model.config.text_config.num_nextn_predict_layers == 0
    assert len(model.config.text_config.compress_ratios) == 10
    # The caller's config is not touched.
    assert config.vision_config is not None and config.text_config.num_nextn_predict_layers == 3


def test_token_ids_of_the_text_part_are_found():
    text = {**released()["text_config"], "bos_token_id": 5, "eos_token_id": [6, 7], "pad_token_id": 8}
    config = Dsv41Config(text_config=text)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (5, [6, 7], 8)


def test_only_changed_extras_are_written():
    config = Dsv41Config.from_dict(released(**{"text_config.gate_temp": 2.0, "text_config.cache_rounding": False}))
    written = json.loads(config.to_json_string())["text_config"]
    assert written.pop("gate_temp") == 2.0 and written.pop("cache_rounding") is False
    assert written == RELEASED["text_config"]


# ---- broken configs ----------------------------------------------------------------------------------------------------

T, V, Q = "text_config.", "vision_config.", "quantization_config."
BROKEN = {  # path: (value, words of the message beside the key and the value)
    "model_type": ("llama", "'deepseek_v41'"),
    "dtype": ("bfloat61", "a floating torch dtype"),
    "architectures": ("DeepseekV41ForCausalLM", "a list of names"),
    "image_token_id": (-1, "a token id >= 0"),
    "eos_token_id": ("</s>", "token ids"),
    "text_config": ("small", "an object"),
    "vision_config": (3, "an object"),
    "quantization_config": ("fp8", "an object"),
    Q + "quant_method": ("gptq", "'fp8'"),
    Q + "activation_scheme": ("static", "'dynamic'"),
    Q + "weight_block_size": ([32], "a list of 2 integers >= 1"),
    Q + "scale_fmt": ("e5m2", "'ue8m0'"),
    Q + "expert_dtype": ("int4", "'fp4', 'fp8'"),
    T + "model_type": ("deepseek_v41", "'deepseek_v41_text'"),
    T + "vocab_size": (0, "an integer >= 1"),
    T + "hidden_size": ("5120", "an integer >= 1"),
    T + "num_hidden_layers": (40.0, "an integer >= 1"),
    T + "num_key_value_heads": (8, "one of 1"),
    T + "qk_rope_head_dim": (63, "an even integer"),
    T + "o_groups": (7, "a divisor of num_attention_heads (64)"),
    T + "index_head_dim": (32, "at least qk_rope_head_dim (64)"),
    T + "hidden_act": ("gelu", "'silu'"),
    T + "rms_norm_eps": (float("nan"), "a number > 0"),
    T + "swiglu_limit": (float("inf"), "a number > 0"),
    T + "attention_dropout": (0.1, "0 (the architecture has no attention dropout)"),
    T + "tie_word_embeddings": (True, "false"),
    T + "rope_scaling": ([1], "an object"),
    T + "rope_scaling.rope_type": ("linear", "'yarn' or 'default'"),
    T + "rope_scaling.factor": (-1, "a number > 0"),
    T + "rope_scaling.beta_fast": (None, "a number > 0"),
    T + "rope_scaling.attention_factor": (0.7, "1.0"),
    T + "scoring_func": ("softmax", "'sqrtsoftplus'"),
    T + "n_shared_experts": (2, "1"),
    T + "num_experts_per_tok": (385, "at most n_routed_experts (384)"),
    T + "compress_ratios": ([0, 0, 2], "40 entries, or 40 + 3"),
    T + "kv_source_layer_ids": ([8, 2, 14, 20], "ascending"),
    T + "index_source_layer_ids": ([2, 8, 14, 24], "every layer of kv_source_layer_ids"),
    T + "index_topk": (0, "null or an integer >= 1"),
    T + "candidate_source_layer_id": (24, "one of kv_source_layer_ids"),
    T + "candidate_topk_blocks": (10, "blocks that hold index_topk (512) entries"),
    T + "hc_mult": (0, "an integer >= 1"),
    T + "engram_layer_ids": ([1, 40], "layers below 40"),
    T + "engram_num_embeddings": ([384006168], "one entry for each of engram_layer_ids"),
    T + "engram_max_ngram_size": (1, "an integer >= 2"),
    T + "engram_compressed_vocab_size": (129281, "at most vocab_size (129280)"),
    T + "engram_pad_token_id": (129280, "below vocab_size"),
    T + "dspark_target_layer_ids": ([40], "layers below 40"),
    T + "dspark_num_experts_per_tok": (129, "at most dspark_n_routed_experts"),
    T + "dspark_noise_token_id": (129280, "below vocab_size"),
    T + "engram_token_map_sha256": ("c90dfa01", "null or 64 hexadecimal digits"),
    T + "gate_temp": (0, "a number > 0"),
    T + "cache_rounding": ("yes", "true or false"),
    V + "model_type": ("clip", "'deepseek_v41_vision'"),
    V + "num_attention_heads": (3, "multiples of 4"),
    V + "max_image_tokens": (1, "an integer >= 4"),
    V + "max_wh_ratio": (0, "null or a number > 0"),
}


@pytest.mark.parametrize("path", BROKEN)
def test_broken_config_names_key_value_and_accepted(path):
    value, words = BROKEN[path]
    with pytest.raises(ValueError) as error:
        Dsv41Config.from_dict(released(**{path: value}))
    message = str(error.value)
    print(f"{path} = {value!r} -> {message}")
    key = path.split(".", 1)[-1] if path.startswith((T, V)) else path
    assert key in message and repr(value) in message and "accepted: " in message and words in message


def test_schedule_faults_name_the_layer():
    ratios = RELEASED["text_config"]["compress_ratios"]
    with pytest.raises(ValueError, match="layer 25 with the ratio of its source layer 20"):
        Dsv41Config.from_dict(released(**{T + "compress_ratios": [*ratios[:25], 2, *ratios[26:]]}))
    with pytest.raises(ValueError, match="kv_source_layer_ids .* a source at or before layer 2"):
        Dsv41Config.from_dict(released(**{T + "kv_source_layer_ids": [8, 14, 20]}))
    with pytest.raises(ValueError, match="compress_ratios .* 0 for the draft stages"):
        Dsv41Config.from_dict(released(**{T + "compress_ratios": [*ratios[:42], 2]}))


def test_missing_quant_method_is_named():
    config = released()
    del config["quantization_config"]["quant_method"]
    with pytest.raises(ValueError, match=r"quantization_config.quant_method is None; accepted: one of 'fp8'"):
        Dsv41Config.from_dict(config)


# Values that no released key accepts, by key where the general ones are legal for it.
WRONG = ("nonsense", -7, ["x"], 1j)
WRONG_FOR = {"transformers_version": (5, ["5"])}


@pytest.mark.parametrize("path", list(leaves(RELEASED)))
def test_every_released_key_has_a_rule(path):
    for value in WRONG_FOR.get(path, WRONG):
        if path == "architectures" and value == ["x"]:
            continue  # a list of names is its type
        with pytest.raises(ValueError) as error:
            Dsv41Config.from_dict(released(**{path: value}))
        assert path.split(".")[-1] in str(error.value) and repr(value) in str(error.value), value


@pytest.mark.parametrize(
    "options",
    [
        {"dequantize": 1},
        {"quantize_activations": "no"},
        {"activation_scheme": "static"},
        {"weight_block_size": (32, 0)},
        {"weight_block_size": "32"},
        {"scale_fmt": "ue4m3"},
        {"expert_dtype": "bf16"},
        {"quant_method": "gptq"},
    ],
    ids=str,
)
def test_broken_quantization_options_are_named(options):
    ((key, value),) = options.items()
    with pytest.raises(ValueError) as error:
        Dsv4QuantizationConfig(**options)
    print(f"{options} -> {error.value}")
    assert key in str(error.value) and repr(value) in str(error.value) and "accepted" in str(error.value)


def test_quantization_options_are_not_written():
    released = {**RELEASED["quantization_config"], "fmt": "e4m3"}
    options = Dsv4QuantizationConfig.from_dict({**released, "dequantize": False, "quantize_activations": False})
    assert options.to_dict() == released
    assert options.rounds_activations is False
    assert (
        Dsv4QuantizationConfig().rounds_activations and not Dsv4QuantizationConfig(dequantize=True).rounds_activations
    )


# ---- K4: every key that the model reads changes something -------------------------------------------------------------

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 6, "num_attention_heads": 4,
    "head_dim": 16, "qk_rope_head_dim": 8, "q_lora_rank": 16, "o_lora_rank": 8, "o_groups": 2, "swiglu_limit": 0.5,
    "rope_scaling": {**YARN, "factor": 4, "original_max_position_embeddings": 256},
    # A small base: the YaRN ramp then lies inside the four pairs.
    "compress_rope_theta": 100, "n_routed_experts": 6,
    "num_experts_per_tok": 2, "sliding_window": 4, "compress_ratios": [0, 2, 2, 1, 1, 1], "kv_source_layer_ids": [1, 3],
    "index_source_layer_ids": [1, 3, 4, 5], "index_n_heads": 2, "index_head_dim": 16, "index_topk": 3,
    "candidate_source_layer_id": 3, "candidate_topk_blocks": 2, "candidate_block_size": 2, "hc_mult": 3,
    "hc_sinkhorn_iters": 3, "engram_layer_ids": [0, 2], "engram_num_embeddings": [700, 700], "engram_max_ngram_size": 3,
    "engram_vocab_size": 100, "engram_n_heads": 2, "engram_head_dim": 8, "engram_pad_token_id": 2,
    "engram_compressed_vocab_size": 64, "num_nextn_predict_layers": 0, "pad_token_id": 2,
}  # fmt: skip
IMAGE_TOKEN = 63


def small_config(**changes):
    top = {key: changes.pop(key) for key in ("image_token_id",) if key in changes}
    return Dsv41Config(text_config=copy.deepcopy({**SMALL, **changes}), **{"image_token_id": IMAGE_TOKEN, **top})


def small_outcome(config):
    """Shapes, dtypes, logits and selections of a model whose weights depend on nothing but their names and shapes."""
    model = Dsv41ForCausalLM(config).float().eval()
    for name, tensor in model.state_dict().items():
        generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha1(name.encode()).digest()[:4], "big"))
        noise = torch.randn(tensor.shape, generator=generator)
        tensor.copy_(1 + 0.2 * noise if "norm" in name else 0.3 * noise)
    text = config.text_config
    if text.needs_token_map:
        model.set_token_map(torch.arange(text.vocab_size) % text.engram_compressed_vocab_size)
    # The hash makes this a fixed, irregular sequence; it ends with an image span.
    ids = torch.tensor([[3 + (t * t * 7 + t // 3) % 59 for t in range(44)] + [IMAGE_TOKEN] * 3 + [5, 2]])
    with torch.no_grad():
        output = model(ids % text.vocab_size, output_selections=True)
    shapes = {name: (tuple(t.shape), t.dtype) for name, t in model.state_dict().items()}
    extras = (output.cache is None, output.router_logits is None)
    return shapes, output.logits, output.selections, extras


@pytest.fixture(scope="module")
def small():
    return small_outcome(small_config())


MUTATIONS = {
    "vocab_size": 65, "hidden_size": 64, "moe_intermediate_size": 32, "num_attention_heads": 2, "head_dim": 32,
    "qk_rope_head_dim": 4, "q_lora_rank": 32, "o_lora_rank": 16, "o_groups": 4, "swiglu_limit": 0.25,
    "rms_norm_eps": 1e-2, "use_cache": False, "rope_theta": 5000, "rope_scaling": {"rope_type": "default"},
    "rope_scaling.factor": 8, "rope_scaling.beta_fast": 4, "rope_scaling.beta_slow": 3,
    "rope_scaling.original_max_position_embeddings": 16, "n_routed_experts": 7, "num_experts_per_tok": 3,
    "norm_topk_prob": False, "routed_scaling_factor": 1.0, "sliding_window": 5, "compress_rope_theta": 10000,
    "compress_ratios": [0, 1, 1, 1, 1, 1], "index_source_layer_ids": [1, 3, 4], "index_n_heads": 4,
    "index_head_dim": 8, "index_topk": 4, "candidate_source_layer_id": -1, "candidate_topk_blocks": 3,
    "candidate_block_size": 4, "hc_mult": 2, "hc_sinkhorn_iters": 2, "hc_eps": 1e-2, "engram_layer_ids": [0, 3],
    "engram_num_embeddings": [700, 701], "engram_max_ngram_size": 2, "engram_vocab_size": 90, "engram_n_heads": 1,
    "engram_head_dim": 16, "engram_pad_token_id": 3, "engram_compressed_vocab_size": 50, "gate_temp": 2.0,
    "cache_rounding": False, "output_router_logits": True, "image_token_id": 62,
}  # fmt: skip
PAIRED = {  # keys that need others to stay legal
    "num_hidden_layers": {"num_hidden_layers": 7, "compress_ratios": [0, 2, 2, 1, 1, 1, 1]},
    "kv_source_layer_ids": {"kv_source_layer_ids": [1, 2, 3], "index_source_layer_ids": [1, 2, 3, 4, 5]},
}
UNUSED_AT_FORWARD = {
    "engram_token_map_sha256": "checked when a token map is set (test_ngram_hash)",
    "num_key_value_heads": "one legal value",
    "hidden_act": "one legal value",
    "attention_bias": "one legal value",
    "attention_dropout": "one legal value",
    "tie_word_embeddings": "one legal value",
    "n_shared_experts": "one legal value",
    "scoring_func": "one legal value",
    "topk_method": "one legal value",
    "max_position_embeddings": "a statement about training; positions have no table that ends",
    "initializer_range": "read by fresh weights only (own test below)",
    "pad_token_id": "read by generate and by collators",
    "balance_loss_weight": "read in training (test_balance_loss)",
    "balance_loss_normalized": "read in training (test_balance_loss)",
    "indexer_loss_weight": "read in training (test_indexer_training)",
    "bos_token_id": "read by generate",
    "eos_token_id": "read by generate",
    "num_nextn_predict_layers": "the text classes have no drafts",
    "dspark_block_size": "the text classes have no drafts",
    "dspark_noise_token_id": "the text classes have no drafts",
    "dspark_target_layer_ids": "the text classes have no drafts",
    "dspark_markov_rank": "the text classes have no drafts",
    "dspark_n_routed_experts": "the text classes have no drafts",
    "dspark_num_experts_per_tok": "the text classes have no drafts",
}


def test_every_text_key_is_mutated_or_listed():
    rules = set(Dsv41TextConfig.RULES) | {"rope_scaling"}
    covered = {key.split(".")[0] for key in MUTATIONS} | set(PAIRED) | set(UNUSED_AT_FORWARD)
    assert rules <= covered and covered - rules == {"image_token_id"}
    assert not (set(MUTATIONS) | set(PAIRED)) & set(UNUSED_AT_FORWARD)


@pytest.mark.parametrize("key", [*MUTATIONS, *PAIRED])
def test_key_changes_the_model(key, small):
    if key.startswith("rope_scaling."):
        changes = {"rope_scaling": {**SMALL["rope_scaling"], key.split(".")[1]: MUTATIONS[key]}}
    else:
        changes = PAIRED.get(key) or {key: MUTATIONS[key]}
    shapes, logits, selections, extras = small_outcome(small_config(**changes))
    old_shapes, old_logits, old_selections, old_extras = small
    if shapes != old_shapes or extras != old_extras:
        return
    selected = any(not torch.equal(selections[i], old_selections[i]) for i in selections)
    difference = (logits - old_logits).abs().max().item()
    assert difference > 1e-3 or selected, f"{key}: logits move by {difference:.1e}"


def test_initializer_range_sets_fresh_weights():
    stds = [
        Dsv41ForCausalLM(small_config(initializer_range=r)).model.layers[1].self_attn.q_a_proj.weight.std().item()
        for r in (0.02, 0.1)
    ]
    assert stds == pytest.approx([0.02, 0.1], rel=0.15)


PACKED_KEYS = {"weight_block_size": [64, 64], "scale_fmt": "float", "expert_dtype": "fp8"}


@pytest.mark.parametrize("key", PACKED_KEYS)
def test_quantization_key_changes_packed_tensors(key):
    config = Dsv41Config.from_pretrained(CHECKPOINT_V41)
    found = []
    for options in ({}, {key: PACKED_KEYS[key]}):
        with torch.device("meta"):
            model = Dsv41TextModel(config)
        pack_modules(model, Dsv4QuantizationConfig(**options))
        found.append({name: (t.shape, t.dtype) for name, t in model.state_dict().items()})
    assert found[0] != found[1]


def test_auto_model_follows_the_registered_config():
    with torch.device("meta"):
        assert type(AutoModel.from_config(small_config())) is Dsv41Model


def test_packed_config_without_dtype_computes_in_bfloat16(tmp_path):
    config = released()
    del config["dtype"]
    assert Dsv41Config.from_dict(config).dtype == torch.bfloat16
    assert Dsv41Config.from_dict({**config, "torch_dtype": "float16"}).dtype == torch.float16  # the old spelling
    del config["quantization_config"]
    assert Dsv41Config.from_dict(config).dtype is None
    (tmp_path / "config.json").write_bytes(RELEASED_FILE.read_bytes())
    assert AutoConfig.from_pretrained(tmp_path, dtype=None).dtype == torch.bfloat16
