"""Adapters under TRL at a few steps: every part is reached, and the saved adapter is the trained one."""

import sys

import pytest
import torch
from peft import PeftModel
from PIL import Image
from transformers import AutoProcessor

from examples import lora
from modeling_dsv4.training import lora_layers
from tests.golden_cases import CHECKPOINT_V41

pytest.importorskip("trl", reason="TRL, whose SFTTrainer the example uses, is an optional package")


@pytest.mark.slow
@pytest.mark.filterwarnings("error::FutureWarning")
def test_the_loss_falls_and_the_adapter_is_saved(tmp_path, monkeypatch):
    small = {
        name: Image.new("RGB", (24, 24), colour)
        for name, colour in zip(lora.PHOTOGRAPHS, ("red", "blue"), strict=True)
    }
    monkeypatch.setattr(lora, "photographs", lambda: small)
    processor, model = AutoProcessor.from_pretrained(CHECKPOINT_V41), lora.load(CHECKPOINT_V41)
    losses = lora.train(model, processor, tmp_path / "adapter", steps=6, progress=False)
    assert len(losses) == 6 and sum(losses[-2:]) < 0.8 * sum(losses[:2]), losses
    base = lora.load(CHECKPOINT_V41)
    loaded = PeftModel.from_pretrained(base, tmp_path / "adapter", config=lora_layers(base, tmp_path / "adapter"))
    factors = {name: p for name, p in loaded.named_parameters() if ".lora_B." in name}
    assert {target for target in lora.TARGETS if any(f".{target}." in name for name in factors)} == set(lora.TARGETS)
    assert all(bool(p.any()) for name, p in factors.items() if ".indexer." not in name)  # where no gradient arrives
    example = lora.conversations()[0]
    trained, again = (lora.answer(one.eval(), processor, example, new_tokens=3) for one in (model, loaded))
    assert again == trained
    assert {p.dtype for p in base.parameters()} > {torch.float32}  # still packed


def test_a_missing_package_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert lora.main([str(CHECKPOINT_V41)]) == 1
    assert "pip install scikit-learn" in capsys.readouterr().err
