"""The learning part of `make demo`, at a few steps: its data, and that what is trained is what is saved packed."""

import sys

import pytest
import torch
from PIL import Image

from examples import digits
from modeling_dsv4 import Dsv4QuantizationConfig, Dsv41ForConditionalGeneration


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Folder, processor, and the float model after four steps, two of them with all rounding."""
    source, folder = tmp_path_factory.mktemp("float"), tmp_path_factory.mktemp("packed")
    config, processor = digits.make_folder(source)
    model = digits.new_model(config, processor, seed=0)
    examples = [digits.chat(processor, *pair) for pair in digits.digits()[0][:16]]
    digits.train(model, processor, examples, optimizer="muon", steps=4, seed=0, progress=False)
    digits.save_packed(model, source, folder)
    return folder, processor, model.eval()


def test_the_digits_are_split_once_and_for_all():
    learned, held_out = digits.digits()
    assert (len(learned), len(held_out)) == (1438, 359)
    assert {word for _, word in held_out} == {word for _, word in learned} == set(digits.WORDS)
    bytes_of = [{image.tobytes() for image, _ in part} for part in (learned, held_out)]
    assert not bytes_of[0] & bytes_of[1] and learned[0][0].size == (8, 8)


def test_every_mechanism_is_on(trained):
    text = trained[2].config.text_config
    assert set(text.layer_modes) == {"window", "full", "reuse", "reindex"}
    assert text.candidate_source_layer_id >= 0 and text.engram_layer_ids and text.hc_mult == 4
    assert text.cache_rounding and trained[2].config.vision_config is not None


def test_what_is_trained_is_what_the_packed_folder_computes(trained):
    """Weights that the release keeps in BF16 are rounded to it by hand; every other one was trained rounded."""
    folder, processor, model = trained
    packed = Dsv41ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    stored = packed.state_dict()
    kept = {"e_score_correction_bias", "sinks", "fn", "base", "scale"}  # float32 in the release
    inputs = digits.chat(processor, *digits.digits()[1][0])
    inputs.pop("assistant_masks")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            leaf = name.split(".")[-1]
            if f"{name}_scale_inv" not in stored and ".experts." not in name and not kept & {leaf}:
                parameter.copy_(parameter.bfloat16())
        found, expected = packed(**inputs).logits, model(**inputs).logits
        for name, parameter in model.named_parameters():
            parameter.copy_(before[name])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    unrounded = Dsv41ForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, quantization_config=Dsv4QuantizationConfig(dequantize=True)
    ).eval()
    assert (
        unrounded(**inputs).logits - found
    ).abs().max() > 1e-3  # inputs of layers are rounded in both of the others


def test_it_answers_and_draws(trained):
    folder, processor, model = trained
    images, words = zip(*digits.digits()[1][:3], strict=True)
    said = [digits.answers(model, processor, images, kv_format=kv, progress=False) for kv in ("packed", "float")]
    assert said[0] == said[1] and len(said[0]) == 3
    digits.draw(images, [words[0], "wrong", "?"], words, folder / "picture.png")
    with Image.open(folder / "picture.png") as sheet:
        colors = {color for _, color in sheet.convert("RGB").getcolors(1 << 20)}
    assert sheet.size == (12 * 72, 86) and any(red > green + 100 for red, green, _ in colors)


def test_options_and_a_missing_package(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert digits.main(["--optimizer", "adamw"]) == 1
    assert "pip install scikit-learn" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        digits.main(["--optimizer", "sgd"])
