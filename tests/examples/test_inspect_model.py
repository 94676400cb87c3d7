"""What is shown of a model: its own outputs, the rows that an n-gram shares, and a picture where matplotlib is."""

import sys

import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer

from examples import inspect_model
from modeling_dsv4 import Dsv41ForCausalLM
from tests.golden_cases import CHECKPOINT_V41

TEXT = "The mill runs past the mill runs."


@pytest.fixture(scope="module")
def seen():
    """A model, its tokenizer, and what happened in it."""
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT_V41)
    model = Dsv41ForCausalLM.from_pretrained(CHECKPOINT_V41, dtype=torch.float32).eval()
    return model, tokenizer, inspect_model.look(model, tokenizer, TEXT)


@torch.no_grad()
def test_it_shows_what_the_model_returns(seen):
    model, tokenizer, inside = seen
    out = model(tokenizer(TEXT, return_tensors="pt").input_ids, output_selections=True, output_router_logits=True)
    assert "".join(inside.tokens) == TEXT
    assert inside.selections.keys() == out.selections.keys() == set(model.config.text_config.index_source_layer_ids)
    assert all(torch.equal(chosen, out.selections[layer][0]) for layer, chosen in inside.selections.items())
    assert inside.experts.shape == (
        len(out.router_logits),
        len(inside.tokens),
        model.config.text_config.num_experts_per_tok,
    )
    torch.testing.assert_close(
        inside.loads().sum(1), torch.full((len(inside.experts),), float(inside.experts.shape[2]))
    )


def test_repeated_rows_are_those_of_repeated_ngrams(seen):
    model, tokenizer, inside = seen
    tokens = model.token_map[tokenizer(TEXT, return_tensors="pt").input_ids[0]].tolist()  # compressed: letters folded
    for layer in inside.rows:
        whole = inside.repeats(layer)[:, : inside.heads].all(1)
        pairs = [tuple(tokens[max(end - 1, 0) : end + 1]) for end in range(len(tokens))]
        assert whole.tolist() == [pair in pairs[:end] for end, pair in enumerate(pairs)]


def test_the_report_and_a_missing_package(seen, monkeypatch, capsys):
    text = inspect_model.report(seen[2])
    assert (
        f"{len(seen[2].tokens)} tokens" in text and "2-grams" in text and text.count("most ") == len(seen[2].experts)
    )
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert inspect_model.main([str(CHECKPOINT_V41), "--text", TEXT, "--plot", "inside.png"]) == 1
    said = capsys.readouterr()
    assert "entries it reads" in said.out and "pip install matplotlib" in said.err


def test_the_picture(seen, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib, which draws the picture, is an optional extra")
    inspect_model.draw(seen[2], tmp_path / "inside.png")
    with Image.open(tmp_path / "inside.png") as picture:
        assert picture.size == (1500, 1200) and len(picture.convert("RGB").getcolors(1 << 20)) > 20
