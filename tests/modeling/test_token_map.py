"""The Engram token map on disk: which file a model takes it from, and what it refuses."""

import json
import shutil

import pytest
import torch
from tokenizers import Tokenizer

from modeling_dsv4 import Dsv41ForCausalLM
from modeling_dsv4.token_map import STORED_MAP
from tests.released_folders import small_folder

IDS = torch.arange(20, 37)[None]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return small_folder().write(tmp_path_factory.mktemp("small") / "ckpt")


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


def test_a_saved_folder_has_its_map_and_refuses_another(small, tmp_path):
    """The released folder has a tokenizer only; a saved one has the map too, and its digest where the map is lost."""
    model = Dsv41ForCausalLM.from_pretrained(small)
    assert "engram_token_map_sha256" not in model.config.to_diff_dict()["text_config"]
    model.save_pretrained(tmp_path)
    again = Dsv41ForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(again), logits(model)) and torch.equal(again.token_map, model.token_map)
    file = json.loads((small / "tokenizer.json").read_text())
    vocab = file["model"]["vocab"]
    first, second = [token for token, number in vocab.items() if number in (300, 301)]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (tmp_path / "tokenizer.json").write_text(json.dumps(file))
    with pytest.raises(ValueError, match="tokenizer's token map has SHA-256 .*set the key to null"):
        again.set_tokenizer(Tokenizer.from_file(str(tmp_path / "tokenizer.json")))
    (tmp_path / STORED_MAP).unlink()
    with pytest.raises(ValueError, match="tokenizer.json does not fit the model: .* SHA-256 .*set the key to null"):
        Dsv41ForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("content", ["{}", "[1]", '{"compressed_ids": [1, -2]}', '{"compressed_ids": "1"}', "{"])
def test_a_damaged_map_is_named(small, tmp_path, content):
    shutil.copytree(small, tmp_path / "ckpt")
    (tmp_path / "ckpt" / STORED_MAP).write_text(content)
    with pytest.raises(OSError, match=STORED_MAP):
        Dsv41ForCausalLM.from_pretrained(tmp_path / "ckpt")
