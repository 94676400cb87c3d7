"""`push_to_hub` uploads what `save_pretrained` writes: files, names and bytes, from both kinds of class."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers.utils.hub as client
from huggingface_hub.errors import EntryNotFoundError

from convert.hub import AUTO_MAPS, make_hub_folder
from convert.tiny import make_tiny
from modeling_dsv4 import Dsv4ForCausalLM, Dsv41ForConditionalGeneration
from modeling_dsv4.token_map import STORED_MAP
from tests.golden_cases import load_json
from tests.released_folders import contents, same_bytes, stored_tensors

REPOSITORY = "somebody/model"
CLASSES = {"v41": Dsv41ForConditionalGeneration, "v4": Dsv4ForCausalLM}


class StandIn:
    """The calls of `HfApi` that an upload makes; keeps what was uploaded, since the files are gone afterwards."""

    def __init__(self):
        self.created, self.uploads = [], []

    def create_repo(self, repo_id, **options):
        self.created.append(repo_id)
        return SimpleNamespace(repo_id=repo_id)

    def create_commit(self, repo_id, operations, **options):
        files = {item.path_in_repo: Path(item.path_or_fileobj).read_bytes() for item in operations}
        assert len(files) == len(operations)
        self.uploads.append((repo_id, files))


@pytest.fixture
def hub(monkeypatch):
    def no_card(repo_id, **options):
        raise EntryNotFoundError("README.md")

    stand_in = StandIn()
    monkeypatch.setattr(client, "_hf_api", stand_in)
    monkeypatch.setattr(client.ModelCard, "load", no_card)
    return stand_in


@pytest.fixture(scope="module", params=CLASSES)
def model_and_folder(request, tmp_path_factory):
    """A model that the package loaded from a Hub folder, and the folder."""
    root = tmp_path_factory.mktemp(request.param)
    source = make_tiny(root / "source", family=request.param, progress=False)
    folder = make_hub_folder(source, root / "hub", progress=False).folder
    return CLASSES[request.param].from_pretrained(folder), folder


def test_the_upload_is_the_saved_folder(model_and_folder, hub, tmp_path):
    model, folder = model_and_folder
    model.save_pretrained(tmp_path / "saved")
    saved = contents(tmp_path / "saved")
    model.push_to_hub(REPOSITORY)
    model.save_pretrained(tmp_path / "pushed", push_to_hub=True, repo_id=REPOSITORY)
    (first, uploaded), (second, pushed) = hub.uploads
    assert hub.created == [first, second] == [REPOSITORY, REPOSITORY]
    for files in (uploaded, pushed):  # transformers adds a card where the repository has none
        assert b"library_name: transformers" in files.pop("README.md")
        assert files == saved

    references = load_json(folder / "config.json")["auto_map"]
    assert (
        load_json(tmp_path / "saved" / "config.json")["auto_map"] == references == AUTO_MAPS[model.config.model_type]
    )
    assert {f"{reference.split('.')[0]}.py" for reference in references.values()} <= saved.keys()
    assert all(saved[name] == (folder / name).read_bytes() for name in saved if name.endswith(".py"))
    assert (STORED_MAP in saved) == (model.config.model_type == "deepseek_v41")
    assert (
        load_json(tmp_path / "saved" / "config.json")["architectures"]
        == load_json(folder / "config.json")["architectures"]
    )


def test_a_second_save_uploads_only_what_it_wrote(model_and_folder, hub, tmp_path):
    model, _ = model_and_folder
    (tmp_path / "note.txt").write_text("mine")
    model.save_pretrained(tmp_path, push_to_hub=True, repo_id=REPOSITORY)
    assert hub.uploads[0][1].keys() == contents(tmp_path).keys() - {"note.txt"}


def test_packed_weights_are_saved_as_they_lay(model_and_folder, tmp_path):
    model, folder = model_and_folder
    model.save_pretrained(tmp_path)
    released, saved = stored_tensors(folder), stored_tensors(tmp_path)
    assert all(name.startswith("mtp.") for name in released.keys() - saved.keys())  # drafts stay where they are
    assert saved and all(same_bytes(tensor, released[name]) for name, tensor in saved.items())
