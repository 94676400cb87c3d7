"""K5 and K6 for every class of both families: every key is used once, and what was loaded comes back byte for byte."""

import json
import shutil

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText

from convert.released import to_released
from modeling_dsv4 import (
    Dsv4ForCausalLM,
    Dsv4Model,
    Dsv4QuantizationConfig,
    Dsv41Config,
    Dsv41ForCausalLM,
    Dsv41ForConditionalGeneration,
    Dsv41Model,
    Dsv41TextModel,
)
from modeling_dsv4.weight_names import OPTIONAL_PARTS
from tests.golden_cases import CHECKPOINT_V4, CHECKPOINT_V41
from tests.released_folders import Folder, contents, same_bytes, stored_tensors

# Class -> parts of the checkpoint that it leaves on disk.
CLASSES = {
    Dsv41TextModel: ("drafts", "prediction head", "vision"),
    Dsv41Model: ("drafts", "prediction head"),
    Dsv41ForCausalLM: ("drafts", "vision"),
    Dsv41ForConditionalGeneration: ("drafts",),
    Dsv4Model: ("drafts", "prediction head"),
    Dsv4ForCausalLM: (),
}
DEQUANTIZE = Dsv4QuantizationConfig(dequantize=True)
WHOLE = (Dsv41ForConditionalGeneration, Dsv4ForCausalLM)  # those that leave out nothing but drafts


def in_turn(values, whole=True):
    """Every class with both of two values, of which the fast run takes one in turn, and both for whole classes."""
    return [
        pytest.param(c, v, marks=() if (i + j) % 2 == 0 or (whole and c in WHOLE) else pytest.mark.slow)
        for i, c in enumerate(CLASSES)
        for j, v in enumerate(values)
    ]


def name_of(value):
    return {False: "packed", True: "float"}[value] if isinstance(value, bool) else getattr(value, "__name__", None)


def checkpoint(model_class):
    return CHECKPOINT_V4 if model_class in (Dsv4Model, Dsv4ForCausalLM) else CHECKPOINT_V41


@pytest.mark.parametrize(("model_class", "prefix"), in_turn(["", "model."]), ids=name_of)
def test_k5_every_key_is_used_once(model_class, prefix, tmp_path):
    stored, folder = stored_tensors(checkpoint(model_class)), Folder(checkpoint(model_class))
    folder.rename(lambda name: prefix + name)
    model = model_class.from_pretrained(folder.write(tmp_path), dtype="auto")
    patterns = [OPTIONAL_PARTS[part] for part in CLASSES[model_class]]
    wanted = {name for name in stored if not any(pattern.search(name) for pattern in patterns)}
    state = {model.weight_names.to_released(name): tensor for name, tensor in model.state_dict().items()}
    assert len(state) == len(model.state_dict()) and state.keys() == wanted
    assert all(same_bytes(state[name], stored[name]) for name in wanted)


@pytest.mark.parametrize(("model_class", "dequantize"), in_turn([False, True], whole=False), ids=name_of)
def test_k5_a_folder_of_another_model_is_refused(model_class, dequantize, tmp_path):
    """Zero matches is no success: neither with names of another model nor with those of the other family."""
    folder = Folder(checkpoint(model_class))
    folder.rename(lambda name: "transformer.h." + name)
    path, options = (
        folder.write(tmp_path / "x"),
        {"quantization_config": Dsv4QuantizationConfig(dequantize=dequantize)},
    )
    with pytest.raises(ValueError, match=r"have no place in the model: transformer\.h\."):
        model_class.from_pretrained(path, **options)
    other = CHECKPOINT_V41 if checkpoint(model_class) == CHECKPOINT_V4 else CHECKPOINT_V4
    shutil.copyfile(checkpoint(model_class) / "config.json", path / "config.json")
    for file in path.glob("model*"):
        file.unlink()
    for file in other.glob("model*"):
        shutil.copyfile(file, path / file.name)
    with pytest.raises(ValueError, match="have no place in the model|are missing from"):
        model_class.from_pretrained(path, **options)


@pytest.mark.parametrize(("model_class", "dequantize"), in_turn([False, True]), ids=name_of)
def test_k6_load_save_load_save_released(model_class, dequantize, tmp_path):
    source = checkpoint(model_class)
    options = {"quantization_config": DEQUANTIZE, "dtype": torch.bfloat16} if dequantize else {"dtype": "auto"}
    model_class.from_pretrained(source, **options).save_pretrained(tmp_path / "1")
    again = model_class.from_pretrained(tmp_path / "1", dtype=options["dtype"])
    again.save_pretrained(tmp_path / "2", save_original_format=False)
    assert json.loads((tmp_path / "1" / "config.json").read_text()) == json.loads(
        (tmp_path / "2" / "config.json").read_text()
    )
    to_released(tmp_path / "2", tmp_path / "out", base=source, progress=False)
    assert contents(tmp_path / "out") == contents(source)


@pytest.mark.parametrize(
    "auto", [AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText], ids=lambda c: c.__name__
)
def test_k6_a_fresh_model_becomes_a_release_that_every_door_opens(auto, tmp_path):
    """From a config alone: saved, converted, and loaded packed; the text class has a config without vision."""
    torch.manual_seed(0)
    model = Dsv41ForConditionalGeneration(Dsv41Config.from_pretrained(CHECKPOINT_V41)).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "saved")
    report = to_released(tmp_path / "saved", tmp_path / "out", progress=False)
    assert report.relative_errors() and max(report.relative_errors().values()) < 0.2
    found = auto.from_pretrained(tmp_path / "out", dtype="auto")
    state, stored = found.state_dict(), stored_tensors(tmp_path / "out")
    assert all(same_bytes(tensor, stored[found.weight_names.to_released(name)]) for name, tensor in state.items())
