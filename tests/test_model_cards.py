"""The finished model cards: metadata that the Hub reads, numbers of the configuration, and code that runs as it stands.

What the Hub itself checks on a push needs the network; its readers are used here.
"""

import re

import pytest
from huggingface_hub import ModelCard
from huggingface_hub.utils import validate_repo_id
from PIL import Image

from convert.hub import make_hub_folder
from convert.info import ModelSizes, count_text, size_text
from convert.model_card import _facts, _parts
from convert.small_tokenizer import small_tokenizer_files
from convert.tiny import SMALL_TEXT, SMALL_VISION, make_tiny, small_config
from examples import digits
from modeling_dsv4 import Dsv4Config, Dsv41Config
from tests.golden_cases import CHECKPOINT_V4, CHECKPOINT_V41, GOLDEN, load_json
from tests.processes import CONTEXT
from tests.test_docs import ROOT, blocks

CARDS = sorted((ROOT / "model_cards").glob("*.md"))
# Released config, and the number of tensors that its inventory has.
RELEASED = {
    "deepseek-v41-flash": (Dsv41Config, "config_v41_flash.json", 96_085),
    "deepseek-v4-flash": (Dsv4Config, "config_v4_flash.json", 69_187),
    "deepseek-v4-pro": (Dsv4Config, "config_v4_pro.json", 145_116),
}
KNOWN = {
    "library_name", "pipeline_tag", "license", "base_model", "base_model_relation", "language", "tags", "metrics",
    "model-index",
}  # fmt: skip


def config_of(name):
    if name in RELEASED:
        cls, file, _ = RELEASED[name]
        return cls(**load_json(GOLDEN / file))
    parts = (digits.TEXT, digits.VISION) if "digits" in name else (SMALL_TEXT, SMALL_VISION)
    return small_config(small_tokenizer_files(), *parts)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders that stand for the repositories: as `convert hub` writes them, and one that `convert tiny` made."""
    root = tmp_path_factory.mktemp("repositories")
    made = {
        family: str(make_hub_folder(source, root / family, progress=False).folder)
        for family, source in (("v41", CHECKPOINT_V41), ("v4", CHECKPOINT_V4))
    }
    return made | {"tiny": str(make_tiny(root / "tiny", progress=False))}


def test_there_is_a_card_for_every_checkpoint():
    assert {card.stem for card in CARDS} == {*RELEASED, "deepseek-v41-digits", "deepseek-v41-flash-tiny-random"}


@pytest.mark.parametrize("card", CARDS, ids=lambda path: path.stem)
def test_the_metadata_is_complete_and_fits_the_configuration(card):
    data = ModelCard(card.read_text(encoding="utf-8")).data.to_dict()
    config = config_of(card.stem)
    has_images = getattr(config, "vision_config", None) is not None
    assert data.keys() <= KNOWN and data["library_name"] == "transformers"
    # The tiny card shows the text class.
    if card.stem != "deepseek-v41-flash-tiny-random":
        assert data["pipeline_tag"] == ("image-text-to-text" if has_images else "text-generation")
    assert data["license"] in {"mit", "apache-2.0", "unknown"} and data["language"][0] == "en"
    wanted = {config.model_type, "moe", "sparse-attention", "conversational", "fp8", "fp4"}
    wanted |= {"engram"} if config.get_text_config().engram_layer_ids else set()
    assert wanted <= set(data["tags"])
    assert ("custom_code" in data["tags"]) == ("trust_remote_code=True" in card.read_text(encoding="utf-8"))
    if card.stem in RELEASED:
        validate_repo_id(data["base_model"])
        assert data["base_model"].startswith("deepseek-ai/") and data["base_model_relation"] == "quantized"
    else:
        assert "base_model" not in data  # trained from nothing: no tree shows it as a copy


def test_the_score_is_the_one_in_the_text():
    card = ModelCard((ROOT / "model_cards" / "deepseek-v41-digits.md").read_text(encoding="utf-8"))
    (result,) = card.data.eval_results
    assert result.metric_type == "accuracy" and f"{100 * result.metric_value:.1f} % right" in " ".join(
        card.text.split()
    )


@pytest.mark.parametrize(
    "name",
    [
        "deepseek-v41-flash",
        "deepseek-v4-flash",
        pytest.param("deepseek-v4-pro", marks=pytest.mark.slow),
        "deepseek-v41-digits",
    ],
)
def test_the_numbers_are_those_of_the_configuration(name):
    text, sizes = (ROOT / "model_cards" / f"{name}.md").read_text(encoding="utf-8"), ModelSizes(config_of(name))
    assert _facts(sizes) in text and _parts(sizes) in text
    if name in RELEASED:
        stored, count = sum(row.bytes for row in sizes.rows), sum(row.parameters for row in sizes.rows)
        assert len(sizes.rows) == RELEASED[name][2]
        words = " ".join(text.split())
        assert f"{count_text(count)} parameters, {size_text(stored)} in all" in words
        assert f"({len(sizes.rows):,} tensors)" in words


# V4-Pro's is V4-Flash's.
RUN = [pytest.param(card, marks=pytest.mark.slow if card.stem == "deepseek-v4-pro" else ()) for card in CARDS]


@pytest.mark.parametrize("card", RUN, ids=lambda path: path.stem)
def test_the_code_runs_as_it_stands(card, folders, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (20, 12), (200, 30, 30)).save("photo.jpg")
    is_v4 = card.stem in RELEASED and RELEASED[card.stem][0] is Dsv4Config
    found = blocks(card)
    assert found and {language for language, _ in found} == {"python"}
    program = "\n".join(text for _, text in found).replace("max_new_tokens=100", "max_new_tokens=5")
    program = re.sub(r'"organisation/[\w.-]+"', repr(folders["v4" if is_v4 else "v41"]), program)
    if is_v4:  # remote code registers its own quantiser: in another process
        process = CONTEXT.Process(target=exec, args=(program, {}))
        process.start()
        process.join(timeout=300)
        assert process.exitcode == 0
    else:
        exec(compile(program, card.name, "exec"), {"folder": folders["tiny"]})
