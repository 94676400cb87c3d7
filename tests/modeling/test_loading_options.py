"""Other doors into the loader: options of `from_pretrained`, state dicts, key mappings, unusual folders."""

import copy
import os
import pathlib

import pytest
import torch
from tokenizers import Tokenizer
from transformers import FineGrainedFP8Config

from modeling_dsv4 import Dsv4QuantizationConfig, Dsv41Config, Dsv41ForCausalLM
from tests.released_folders import same_bytes, small_folder, stored_tensors

IDS = torch.arange(20, 37)[None]
DEQUANTIZE = Dsv4QuantizationConfig(dequantize=True)


@pytest.fixture(scope="module")
def golden():
    return small_folder()


@pytest.fixture(scope="module")
def small(golden, tmp_path_factory):
    return golden.write(tmp_path_factory.mktemp("small") / "ckpt")


def load(folder, **options):
    return Dsv41ForCausalLM.from_pretrained(folder, **options)


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


@pytest.fixture(scope="module")
def packed(small):
    return load(small)


@pytest.fixture(scope="module")
def expected(packed):
    return logits(packed)


def test_loading_info_is_empty(small):
    model, info = load(small, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    assert isinstance(model, Dsv41ForCausalLM)


OPTIONS = [
    {"torch_dtype": torch.bfloat16},
    {"dtype": "bfloat16"},
    {"local_files_only": True},
    {"low_cpu_mem_usage": True},
    {"use_safetensors": True},
    {"trust_remote_code": True},
    {"attn_implementation": "eager"},
    {"ignore_mismatched_sizes": True},
    {"device_map": "auto", "max_memory": {"cpu": "1GB"}},
    {"quantization_config": Dsv4QuantizationConfig()},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_usual_options_change_nothing(options, small, expected):
    assert torch.equal(logits(load(small, **options)), expected)


@pytest.mark.parametrize("spelling", [str, pathlib.Path, lambda p: f"{p}/", os.path.relpath], ids=range(4))
def test_path_spellings(spelling, small, expected):
    assert torch.equal(logits(load(spelling(small))), expected)


def test_subfolder(golden, tmp_path, expected):
    golden.write(tmp_path / "inner")
    assert torch.equal(logits(load(tmp_path, subfolder="inner")), expected)


def test_single_file_without_index(golden, tmp_path, expected):
    folder = golden.copy()
    folder.shards = {"model.safetensors": {n: t for tensors in golden.shards.values() for n, t in tensors.items()}}
    folder.index = False
    assert torch.equal(logits(load(folder.write(tmp_path))), expected)


def test_given_config_is_used_and_not_changed(small, packed, expected):
    config = Dsv41Config.from_pretrained(small)
    written = config.to_json_string()
    assert torch.equal(logits(load(small, config=config)), expected)
    assert config.to_json_string() == written
    assert torch.equal(logits(load(small, config=packed.config)), expected)  # of a loaded model


@pytest.mark.parametrize("dequantize", [False, True], ids=["packed", "float"])
def test_state_dict_is_loaded_like_files(dequantize, small, packed):
    options = {"quantization_config": DEQUANTIZE} if dequantize else {}
    model = load(None, config=Dsv41Config.from_pretrained(small), state_dict=stored_tensors(small), **options)
    model.set_tokenizer(Tokenizer.from_file(str(small / "tokenizer.json")))
    assert torch.equal(logits(model), logits(load(small, **options)))
    incomplete = {name: t for name, t in stored_tensors(small).items() if name != "norm.weight"}
    with pytest.raises(ValueError, match="missing from the checkpoint: norm.weight"):
        load(None, config=Dsv41Config.from_pretrained(small), state_dict=incomplete, **options)


def test_key_mapping_is_applied_first(golden, tmp_path, expected):
    folder = golden.copy()
    folder.rename(lambda name: "wrapped.inner." + name)
    model = load(folder.write(tmp_path), key_mapping={r"^wrapped\.": "", r"^inner\.": ""})
    assert torch.equal(logits(model), expected)
    model.save_pretrained(tmp_path / "out")
    assert "norm.weight" in stored_tensors(tmp_path / "out")
    with pytest.raises(ValueError, match="tensors of the checkpoint have no place in the model: wrapped.inner"):
        load(tmp_path)


def test_key_mapping_may_not_merge_tensors(small):
    with pytest.raises(ValueError, match=r"key_mapping .* layers\.[01]\.attn\.attn_sink"):
        load(small, key_mapping={r"^layers\.1\.": "layers.0."})


def test_ignore_mismatched_sizes_replaces_float_tensors_only(golden, tmp_path):
    folder = golden.copy()
    folder["head.weight"] = folder["head.weight"][:300]
    path = folder.write(tmp_path / "ckpt")
    model, info = load(path, ignore_mismatched_sizes=True, output_loading_info=True)
    assert [key[0] for key in info["mismatched_keys"]] == ["lm_head.weight"]
    assert model.lm_head.weight.shape == (384, 96) and model.lm_head.weight.float().std().item() < 0.05
    folder["layers.2.attn.wq_a.weight"] = folder["layers.2.attn.wq_a.weight"][:16]
    with pytest.raises(ValueError, match=r"layers.2.attn.wq_a.weight in .* has shape \[16, 96\]"):
        load(folder.write(tmp_path / "ckpt"), ignore_mismatched_sizes=True)


def test_vision_only_folder_is_refused(golden, tmp_path):
    folder = golden.copy()
    folder.keep(lambda name: name.startswith(("vision.", "aligner.", "image_")))
    with pytest.raises(ValueError, match=r"tensors are missing from .*ckpt: head.weight, embed.weight"):
        load(folder.write(tmp_path / "ckpt"))


def test_pickles_are_refused(golden, tmp_path):
    folder = golden.copy()
    folder.shards, folder.index = {}, False
    torch.save({"norm.weight": torch.ones(96)}, folder.write(tmp_path) / "pytorch_model.bin")
    with pytest.raises(OSError, match="no file named model.safetensors"):
        load(tmp_path)


def test_quantizing_floats_while_loading_is_refused(small, tmp_path):
    load(small, dtype=torch.bfloat16, quantization_config=DEQUANTIZE).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="quantization_config was given for a checkpoint whose config.json has none"):
        load(tmp_path, quantization_config=Dsv4QuantizationConfig())


@pytest.mark.parametrize("options", [{"quant_method": "fp8", "dequantize": True}, FineGrainedFP8Config()], ids=type)
def test_other_quantization_configs_are_refused(options, small):
    with pytest.raises(ValueError, match="Dsv4QuantizationConfig"):
        load(small, quantization_config=options)


def test_strict_load_state_dict_names_faults(packed):
    state = packed.state_dict()
    name = "model.layers.1.engram.embedding.weight"
    model = copy.deepcopy(packed)
    with pytest.raises(RuntimeError, match=f"Missing key.*{name}"):
        model.load_state_dict({k: v for k, v in state.items() if k != name})
    with pytest.raises(RuntimeError, match=r"weight: got torch.uint8 \[3150, 32\], expected torch.float8_e4m3fn"):
        model.load_state_dict({**state, name: state[name].view(torch.uint8)})
    with pytest.raises(RuntimeError, match="Unexpected key.*engram.embedding.bias"):
        model.load_state_dict({**state, name.replace("weight", "bias"): torch.ones(1)})


def test_state_dict_survives_torch_save(packed, tmp_path):
    torch.save(packed.state_dict(), tmp_path / "state.pt")
    again = torch.load(tmp_path / "state.pt")
    assert again.keys() == packed.state_dict().keys()
    assert all(same_bytes(again[name], tensor) for name, tensor in packed.state_dict().items())


def test_misspelled_settings_are_refused():
    with pytest.raises(ValueError, match="dequantise.*accepted: .*dequantize"):
        Dsv4QuantizationConfig(dequantise=True)
    read = Dsv4QuantizationConfig.from_dict({"quant_method": "fp8", "a_later_key": 1})
    assert read.to_dict()["a_later_key"] == 1
