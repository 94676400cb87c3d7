"""A drafter that is loaded behind its model: it computes where the model does, and as the model was told to."""

import json
import logging
import shutil

import pytest
import torch

from modeling_dsv4 import Dsv4QuantizationConfig, Dsv41ForCausalLM
from tests.golden_cases import CHECKPOINT_V41
from tests.modeling.draft_models import golden_drafter

IDS = torch.arange(20, 33)[None]


def load(**options):
    """The golden checkpoint as floats, without a drafter."""
    quantization = Dsv4QuantizationConfig(dequantize=True)
    return Dsv41ForCausalLM.from_pretrained(
        CHECKPOINT_V41, dtype=torch.float32, quantization_config=quantization, **options
    )


def test_the_choice_of_kernels_reaches_the_drafter():
    model = load()
    model.set_kernels("off")
    model.load_drafter(CHECKPOINT_V41)
    chosen = [module.kernels for module in model.drafter.modules() if hasattr(module, "kernels")]
    assert len(chosen) > 10 and set(chosen) == {None}


def test_nothing_is_said_of_the_backbone_that_is_in_memory(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    model = load()
    assert "on disk, as it is meant to: the drafter" in caplog.text
    caplog.clear()
    model.load_drafter(CHECKPOINT_V41)
    assert not caplog.text


def test_beside_a_head_on_the_disk(tmp_path):
    """Weights that are offloaded lie on no device to which a drafter could go."""
    model = load(device_map={"model": "cpu", "lm_head": "disk"}, offload_folder=str(tmp_path))
    assert model.lm_head.weight.device.type == "meta"
    options = {"max_new_tokens": 6, "do_sample": False}
    text = model.generate(IDS, use_mtp=True, **options)
    assert {parameter.device.type for parameter in model.drafter.parameters()} == {"cpu"}
    assert torch.equal(text, golden_drafter().generate(IDS, **options))


def test_it_comes_from_the_commit_of_its_model(tmp_path):
    """On the Hub a name may mean something else by now: here `main` has no drafter."""
    root, commits = tmp_path / "models--someone--release", {"main": "a" * 40, "v1": "b" * 40}
    for name, commit in commits.items():
        shutil.copytree(CHECKPOINT_V41, root / "snapshots" / commit)
        (root / "refs").mkdir(exist_ok=True)
        (root / "refs" / name).write_text(commit)
    path = root / "snapshots" / commits["main"] / "config.json"
    config = json.loads(path.read_text())
    text = config["text_config"]
    text |= {"num_nextn_predict_layers": 0, "compress_ratios": text["compress_ratios"][:10]}
    path.write_text(json.dumps(config))
    quantization = Dsv4QuantizationConfig(dequantize=True)
    options = {"revision": "v1", "cache_dir": tmp_path, "quantization_config": quantization, "dtype": torch.float32}
    model = Dsv41ForCausalLM.from_pretrained("someone/release", **options)
    model.load_drafter()
    assert len(model.drafter) == 3


def test_files_that_are_elsewhere_or_gone(tmp_path, monkeypatch):
    shutil.copytree(CHECKPOINT_V41, tmp_path / "release")
    monkeypatch.chdir(tmp_path)
    quantization = Dsv4QuantizationConfig(dequantize=True)
    model = Dsv41ForCausalLM.from_pretrained("release", dtype=torch.float32, quantization_config=quantization)
    monkeypatch.chdir(tmp_path.parent)
    model.load_drafter()
    assert len(model.drafter) == 3
    shutil.move(tmp_path / "release", tmp_path / "moved")
    with pytest.raises(
        ValueError, match=r"release, where the model came from, is gone; accepted: load_drafter\(folder\)"
    ):
        model.load_drafter()
    made = Dsv41ForCausalLM(model.config)
    with pytest.raises(ValueError, match="accepted: one loaded with use_mtp=True"):
        made.load_drafter()
