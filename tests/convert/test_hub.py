"""Hub folders: what is in them, what stays the source's own, that they undo, repeat, and are written whole or not at all.

That they open without this package is in `test_remote_code.py`.
"""

import ast
import json
import os
import shutil
from pathlib import Path

import pytest
from safetensors import safe_open
from transformers import AutoTokenizer, GenerationConfig
from transformers.dynamic_module_utils import get_relative_import_files

from convert import hub
from convert.__main__ import main
from convert.hub import AUTO_MAPS, make_hub_folder
from convert.hub_layout import MANIFEST, released_files, written_by_hub
from convert.released import to_released
from convert.tiny import make_tiny
from modeling_dsv4.ngram_hash import token_map_digest
from modeling_dsv4.token_map import STORED_MAP, read_token_map
from processing_dsv4 import Dsv41Processor
from tests.golden_cases import load_json
from tests.released_folders import contents

FAMILIES = ("v41", "v4")
CARD = "---\nlicense: mit\nlanguage: [en]\ntags: [fp8, mine]\n---\n# Card of the source\n"


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Tiny checkpoints of both families, with a card, a licence and a folder of files as a release has them."""
    root = tmp_path_factory.mktemp("sources")
    for family in FAMILIES:
        folder = make_tiny(root / family, family=family, progress=False)
        (folder / "README.md").write_text(CARD)
        (folder / "LICENSE").write_text("a licence\n")
        (folder / "inference").mkdir()
        (folder / "inference" / "model.py").write_text("pass\n")
    return root


@pytest.fixture(scope="module")
def folders(sources, tmp_path_factory):
    root = tmp_path_factory.mktemp("hub")
    for family in FAMILIES:
        make_hub_folder(sources / family, root / family, progress=False)
    return root


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_the_sources_files_and_everything_else_is_undone(sources, folders, family):
    source, folder = sources / family, folders / family
    shards = sorted(source.glob("*.safetensors"))
    assert len(shards) > 5 and all(shard.samefile(folder / shard.name) for shard in shards)
    back = {name: path.read_bytes() for name, path in released_files(folder).items()}
    assert back == contents(source)
    assert contents(folder).keys() == back.keys() | set(written_by_hub(folder)) | {
        MANIFEST, "original/config.json", "original/tokenizer_config.json", "original/README.md",
    }  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_the_released_layout_of_it_is_the_source(sources, folders, family, tmp_path):
    to_released(folders / family, tmp_path / "back", progress=False)
    assert contents(tmp_path / "back") == contents(sources / family)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_configuration_stays_the_released_one(sources, folders, family):
    released, written = load_json(sources / family / "config.json"), load_json(folders / family / "config.json")
    assert written.pop("auto_map") == AUTO_MAPS[released["model_type"]]
    if family == "v41":
        digest = written["text_config"].pop("engram_token_map_sha256")
        assert digest == token_map_digest(read_token_map(sources / family / "tokenizer.json"))
        assert digest == token_map_digest(read_token_map(folders / family / STORED_MAP))
    assert written == released and list(written) == list(released)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_class_that_is_named_has_its_file_and_all_it_imports(folders, family):
    folder = folders / family
    references = set(load_json(folder / "config.json")["auto_map"].values())
    processor = load_json(folder / "processor_config.json")
    references |= {
        processor["auto_map"]["AutoProcessor"],
        processor["image_processor"]["auto_map"]["AutoImageProcessor"],
    }
    for module, name in (reference.split(".") for reference in references):
        tree = ast.parse((folder / f"{module}.py").read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
        assert all(Path(file).is_file() for file in get_relative_import_files(str(folder / f"{module}.py")))
    other = {"v41": "v4", "v4": "v41"}[family]
    assert not (folder / f"modeling_deepseek_{other}.py").exists()


@pytest.mark.parametrize("family", FAMILIES)
def test_processor_files_are_those_that_the_processor_saves(sources, folders, family, tmp_path):
    processor = Dsv41Processor.from_pretrained(sources / family)
    processor.save_pretrained(tmp_path)
    for name in ("processor_config.json", "chat_template.jinja"):
        assert (folders / family / name).read_bytes() == (tmp_path / name).read_bytes()
    saved, written = (load_json(path / "tokenizer_config.json") for path in (tmp_path, folders / family))
    assert {"pad_token", "padding_side", "chat_control_tokens", "response_template"} <= saved.keys() & written.keys()
    assert all(saved[key] == written[key] for key in ("pad_token", "padding_side", "chat_control_tokens"))
    tokenizer = AutoTokenizer.from_pretrained(folders / family)
    assert tokenizer.chat_template == processor.chat_template
    assert tokenizer.response_template == processor.tokenizer.response_template
    assert written["tokenizer_class"] == load_json(sources / family / "tokenizer_config.json")["tokenizer_class"]


def test_generation_options_are_read_back(sources, tmp_path):
    source = shutil.copytree(sources / "v4", tmp_path / "source")
    (source / "generation_config.json").write_text(
        json.dumps({"_from_model_config": True, "temperature": 0.5, "eos_token_id": [1, 2]})
    )
    make_hub_folder(source, tmp_path / "a", decoder_replay="bounded", progress=False)
    options = GenerationConfig.from_pretrained(tmp_path / "a")
    assert (options.decoder_replay, options.kv_format, options.use_mtp) == ("bounded", "packed", False)
    assert (options.temperature, options.eos_token_id, options.pad_token_id) == (0.5, [1, 2], 2)
    make_hub_folder(tmp_path / "a", tmp_path / "b", progress=False)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


@pytest.mark.parametrize("family", FAMILIES)
def test_made_of_its_own_result_or_again_it_is_the_same(sources, folders, family, tmp_path):
    make_hub_folder(folders / family, tmp_path / "twice", progress=False)
    assert contents(tmp_path / "twice") == contents(folders / family)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "twice").rglob("*")}
    result = make_hub_folder(sources / family, tmp_path / "twice", copy=True, progress=False)
    assert result.weights == "unchanged"
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "twice").rglob("*")} == before


def test_a_target_that_differs_is_left_alone(sources, folders, tmp_path):
    target = shutil.copytree(folders / "v41", tmp_path / "target")
    (target / "README.md").write_text("mine")
    (target / "more").write_text("mine")
    with pytest.raises(OSError, match=r"target exists and differs .* in 2 files \(more, README.md\)"):
        make_hub_folder(sources / "v41", target)
    assert (target / "README.md").read_text() == "mine"
    with pytest.raises(OSError, match="exists and is not an empty folder"):
        make_hub_folder(sources / "v41", sources / "v4")


def test_weights_are_copied_on_request_and_referenced_from_another_disk(sources, tmp_path, monkeypatch):
    def other_disk(*_):
        raise OSError(18, "Invalid cross-device link")

    assert make_hub_folder(sources / "v41", tmp_path / "copy", copy=True, progress=False).weights == "copies"
    monkeypatch.setattr(os, "link", other_disk)
    assert make_hub_folder(sources / "v41", tmp_path / "other", progress=False).weights == "symbolic links"
    assert contents(tmp_path / "copy") == contents(tmp_path / "other")
    for shard in (tmp_path / "copy").glob("*.safetensors"):
        assert not shard.is_symlink() and shard.stat().st_nlink == 1
        assert (tmp_path / "other" / shard.name).readlink() == sources / "v41" / shard.name


def test_links_of_a_hub_cache_lead_to_its_blobs(sources, tmp_path):
    snapshot = shutil.copytree(sources / "v4", tmp_path / "snapshot")
    shard = next(snapshot.glob("*.safetensors"))
    shard.rename(tmp_path / "blob")
    shard.symlink_to("../blob")
    make_hub_folder(snapshot, tmp_path / "hub", progress=False)
    assert not (tmp_path / "hub" / shard.name).is_symlink()
    assert (tmp_path / "hub" / shard.name).samefile(tmp_path / "blob")


def test_pickled_states_are_left_out_and_listed(sources, tmp_path, capsys):
    source = shutil.copytree(sources / "v4", tmp_path / "source")
    (source / "optimizer.pt").touch()
    assert main(["hub", str(source), str(tmp_path / "hub")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'hub'}\nweights: hard links\nleft out: optimizer.pt\n"
    assert not (tmp_path / "hub" / "optimizer.pt").exists()


def test_the_card_has_the_sources_metadata_and_the_checkpoints_facts(sources, folders):
    card = (folders / "v41" / "README.md").read_text()
    for line in (
        "license: mit",
        "library_name: transformers",
        "pipeline_tag: image-text-to-text",
        "- mine",
        "- custom_code",
    ):
        assert f"\n{line}\n" in card
    stored = 0
    for shard in (sources / "v41").glob("*.safetensors"):
        with safe_open(shard, framework="pt") as handle:
            tensors = {name: handle.get_tensor(name) for name in handle.keys()}
        stored += sum(tensor.nbytes for tensor in tensors.values() if str(tensor.dtype) == "torch.int8")
    assert f"| FP4, two values a byte | {stored / 1e6:.2f} MB |" in card
    assert "10 layers, width 128, vocabulary 384" in card and "The weights: LICENSE." in card
    assert "pipeline_tag: text-generation\n" in (folders / "v4" / "README.md").read_text()


def _without(name):
    return lambda folder: (folder / name).unlink()


def _own_originals(folder):
    (folder / "original").mkdir()
    (folder / "original" / "x").touch()


def _cut_shard(folder):
    shard = max(folder.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])


def _other_model(folder):
    config = load_json(folder / "config.json")
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))


def _broken_card(folder):
    (folder / "README.md").write_text("---\na: [\n---\n")


def _list_for_settings(folder):
    (folder / "tokenizer_config.json").write_text("[]")


def _other_tokenizer(folder):
    file = load_json(folder / "tokenizer.json")
    file["added_tokens"].append(file["added_tokens"][-1] | {"id": 384, "content": "<new>"})
    (folder / "tokenizer.json").write_text(json.dumps(file))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_without("tokenizer.json"), "has no tokenizer.json; accepted: a checkpoint with the tokenizer's files"),
        (_without("config.json"), "has no config.json"),
        (_own_originals, "has a folder original/ of its own"),
        (_cut_shard, "truncated"),
        (_other_model, "model_type is 'llama'; accepted: deepseek_v41, deepseek_v4"),
        (_broken_card, "README.md has broken front matter"),
        (_list_for_settings, "tokenizer_config.json holds a list; accepted: a JSON object"),
        (_other_tokenizer, "tokenizer.json does not fit .*385 tokens"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)  # fmt: skip
def test_a_wrong_source_is_named_and_nothing_is_written(sources, tmp_path, damage, message):
    source = shutil.copytree(sources / "v41", tmp_path / "source")
    damage(source)
    with pytest.raises((ValueError, OSError), match=message):
        make_hub_folder(source, tmp_path / "hub")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_wrong_arguments_are_named(sources, tmp_path, capsys):
    for target in (sources / "v41", sources / "v41" / "hub"):
        with pytest.raises(ValueError, match="DST is .*; accepted: a folder outside it"):
            make_hub_folder(sources / "v41", target)
    with pytest.raises(ValueError, match="decoder_replay is 'none'"):
        make_hub_folder(sources / "v41", tmp_path / "hub", decoder_replay="none")
    assert main(["hub", str(tmp_path / "nothing"), str(tmp_path / "hub")]) == 1
    assert "nothing is no folder" in capsys.readouterr().err


def test_an_interrupted_run_leaves_nothing(sources, tmp_path, monkeypatch):
    monkeypatch.setattr(hub.os, "link", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        make_hub_folder(sources / "v41", tmp_path / "hub", progress=False)
    assert list(tmp_path.iterdir()) == []
