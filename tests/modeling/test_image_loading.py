"""The vision side of checkpoints: packed loading, saving, released sizes and names."""

import shutil

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from modeling_dsv4 import (
    Dsv41Config,
    Dsv41ForConditionalGeneration,
    Dsv41Model,
)
from tests import golden_cases as golden

from .image_models import (
    GREEDY,
    case_inputs,
    decode_case,
    grid_of,
    image_inputs,
    load_golden,
    logits_of,
    prompt,
    random_patches,
    tiny_model,
    vision_parameters,
)


def is_vision(name):
    return name.startswith(("vision.", "aligner.", "image_"))


def stored_tensors(folder):
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(str(file))
    return tensors


@pytest.fixture(scope="module")
def packed():
    return load_golden("auto")


def test_packed_loading_keeps_vision_as_stored(packed):
    """With packed weights: BF16 stays BF16, FP32 stays FP32, every bit as in the file."""
    stored = {name: t for name, t in stored_tensors(golden.CHECKPOINT_V41).items() if is_vision(name)}
    ours = {packed.weight_names.to_released(name): p for name, p in vision_parameters(packed).items()}
    assert ours.keys() == stored.keys() and {t.dtype for t in stored.values()} == {torch.bfloat16, torch.float32}
    for name, tensor in stored.items():
        assert ours[name].dtype == tensor.dtype and torch.equal(ours[name], tensor), name


def test_packed_model_answers_with_an_image(packed):
    """The packed model computes in BF16 what the float model computes, to the noise that the goldens record."""
    case = golden.load_case("image")
    recorded = golden.manifest()["cases"]["image"]["lin8_vs_qdq"]["rms"]
    logits = logits_of(packed, **case_inputs(case)).float().numpy()
    errors = (logits[..., case["logits_vocab"]] - case["logits"])[case["attention_mask"].astype(bool)]
    assert np.sqrt(np.mean(np.square(errors))) <= 1.5 * recorded
    assert packed.generate(**case_inputs(decode_case("qdq")), **GREEDY, max_new_tokens=3).shape == (1, 33)


def test_saving_keeps_every_byte(packed, tmp_path):
    packed.save_pretrained(tmp_path)
    shutil.copy(golden.CHECKPOINT_V41 / "tokenizer.json", tmp_path)  # the n-gram hash needs it
    before, after = stored_tensors(golden.CHECKPOINT_V41), stored_tensors(tmp_path)
    assert {name for name in before if is_vision(name)} == {name for name in after if is_vision(name)}
    assert before.keys() - after.keys() == {name for name in before if name.startswith("mtp.")}
    for name, tensor in after.items():
        assert tensor.dtype == before[name].dtype, name
        assert torch.equal(tensor.view(torch.uint8), before[name].view(torch.uint8)), name
    again = Dsv41ForConditionalGeneration.from_pretrained(tmp_path, dtype="auto").eval()
    inputs = image_inputs(packed, 2, (4, 5), 3)
    assert torch.equal(logits_of(packed, **inputs), logits_of(again, **inputs))


def test_float_model_saves_and_loads(tmp_path):
    model = tiny_model(torch.float32)
    model.save_pretrained(tmp_path)
    with safe_open(next(tmp_path.glob("*.safetensors")), "pt") as file:
        assert {"vision.blocks.1.attn.wqkv.bias", "aligner.w2.weight", "image_newline"} <= set(file.keys())
    again = Dsv41ForConditionalGeneration.from_pretrained(tmp_path).eval()
    again.config.text_config.cache_rounding = False
    inputs = image_inputs(model, 2, (4, 5), 3)
    assert torch.equal(logits_of(model, **inputs), logits_of(again, **inputs))
    base = Dsv41Model.from_pretrained(tmp_path).eval()
    base.config.text_config.cache_rounding = False
    with torch.no_grad():
        assert torch.equal(base(**inputs).last_hidden_state, model.model(**inputs).last_hidden_state)


def test_released_size_and_names():
    """At the released sizes: 485,268,480 vision parameters (0.485 B), and every name, shape and dtype of the inventory."""
    released = Dsv41Config(**golden.load_json(golden.GOLDEN / "config_v41_flash.json"))
    released.text_config.num_hidden_layers, released.text_config.num_nextn_predict_layers = 1, 0
    for name in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids", "dspark_target_layer_ids"):
        setattr(released.text_config, name, [])
    released.text_config.compress_ratios, released.text_config.candidate_source_layer_id = [0], -1
    with torch.device("meta"):
        model = Dsv41ForConditionalGeneration(released).to(torch.bfloat16)
    found = {model.weight_names.to_released(name): p for name, p in vision_parameters(model).items()}
    assert sum(p.numel() for p in found.values()) == 485_268_480
    inventory = golden.load_json(golden.GOLDEN / "tensors_v41_flash.json")["tensors"]
    expected = {}
    for entry in inventory:
        if is_vision(entry["name"]):
            names = [entry["name"].replace("{b}", str(block)) for block in range(32)]
            names = dict.fromkeys(names)  # one name without a hole
            assert len(names) == entry["count"] and entry["dtype"] == "BF16"
            expected |= dict.fromkeys(names, tuple(entry["shape"]))
    assert {name: tuple(p.shape) for name, p in found.items()} == expected
    assert {p.dtype for p in found.values()} == {torch.bfloat16}


def test_helpers_count_as_the_contract_does():
    """rows * (columns + 1) + 2 positions for an image."""
    model = tiny_model()
    for rows, columns in [(1, 1), (4, 5), (5, 4), (6, 6)]:
        count = -(-rows // 2) * (-(-columns // 2) + 1) + 2
        assert int((prompt(model, 1, (rows, columns)) == model.config.image_token_id).sum()) == count
    assert random_patches(grid_of((2, 3)), 2).shape == (6, 3, 2, 2)
