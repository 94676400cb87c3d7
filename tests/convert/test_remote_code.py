"""Hub folders open in a process that has neither this package nor any optional one, and say what the package says."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from transformers.dynamic_module_utils import get_relative_import_files

from convert.hub import AUTO_MAPS, make_hub_folder
from convert.tiny import make_tiny
from modeling_dsv4 import Dsv4ForCausalLM, Dsv41ForCausalLM, Dsv41ForConditionalGeneration
from processing_dsv4 import Dsv41Processor
from tests.convert.fresh_process import answer
from tests.golden_cases import load_json
from tests.released_folders import same_bytes, stored_tensors

REPOSITORY = "some-body/a_model-v4.1"
PROGRAM = Path(__file__).with_name("fresh_process.py")
DRAFTS = re.compile(r"^mtp\.")


@pytest.fixture
def photo(tmp_path):
    Image.new("RGB", (90, 60), (200, 30, 30)).save(tmp_path / "photo.jpg")
    return tmp_path / "photo.jpg"


def run(home, *places):
    """Open each `(where, photo or "", save to)` in one fresh process, offline, `home` its only cache; returns what it found."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(home), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, PROGRAM, *(str(argument) for place in places for argument in place)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=home, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert all(one["loaded"] == [] and one["processor"] == "Dsv41Processor" for one in found)
    return found


def classes(family):
    return {name: reference.split(".")[1] for name, reference in AUTO_MAPS[family].items() if name != "AutoConfig"}


def cached_repository(folder, home):
    """Put a folder into a Hub cache as a download does: blobs, a snapshot of links to them, and the branch's commit."""
    commit, root = "ab" * 20, home / "hub" / f"models--{REPOSITORY.replace('/', '--')}"
    for file in (path for path in folder.rglob("*") if path.is_file()):
        blob = root / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(file.read_bytes())
        link = root / "snapshots" / commit / file.relative_to(folder)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(commit)


@pytest.mark.parametrize("kind", [pytest.param("folder", marks=pytest.mark.slow), "repository"])
def test_both_families_open_and_speak_as_with_the_package(tmp_path, photo, kind):
    home = tmp_path / "home"
    home.mkdir()
    source, v4_source = (make_tiny(tmp_path / family, family=family, progress=False) for family in ("v41", "v4"))
    folder = make_hub_folder(source, tmp_path / "hub", progress=False).folder
    v4_folder = make_hub_folder(v4_source, tmp_path / "v4 hub", progress=False).folder
    if kind == "repository":
        cached_repository(folder, home)
        shutil.rmtree(folder)
    found, v4_found = run(
        home,
        (folder if kind == "folder" else REPOSITORY, photo, home / "saved"),
        (v4_folder, "", home / "saved v4"),
    )
    check_v4(v4_found, v4_source)
    processor = Dsv41Processor.from_pretrained(source)
    text = answer(Dsv41ForCausalLM.from_pretrained(source, dtype="auto"), processor)
    with_images = Dsv41ForConditionalGeneration.from_pretrained(source, dtype="auto")
    assert found["classes"] == classes("deepseek_v41") and found["image processor"] == "Dsv41ImageProcessor"
    assert found["text"] == found["saved"] == text and found["image"] == answer(with_images, processor, str(photo))
    assert found["options"] == ["packed", "exact"]
    assert found["text-generation"] == ["Dsv41ForCausalLM", "assistant"]
    assert found["image-text-to-text"] == ["Dsv41ForConditionalGeneration", "assistant"]
    assert found.get("card") == (2 if kind == "folder" else None)
    check_saved(home / "saved", source)


def check_saved(saved, source):
    """What remote code saved: every tensor but the drafts, byte for byte, under its released name, and its code."""
    released, written = stored_tensors(source), stored_tensors(saved)
    assert all(DRAFTS.match(name) for name in released.keys() - written.keys())
    assert written and all(same_bytes(tensor, released[name]) for name, tensor in written.items())
    references = load_json(saved / "config.json")["auto_map"]
    assert references == AUTO_MAPS["deepseek_v41"]
    for module in {reference.split(".")[0] for reference in references.values()}:
        assert all(Path(file).is_file() for file in get_relative_import_files(str(saved / f"{module}.py")))


def check_v4(found, source):
    model = Dsv4ForCausalLM.from_pretrained(source, dtype="auto")
    assert found["classes"] == classes("deepseek_v4")
    assert found["text"] == found["saved"] == answer(model, Dsv41Processor.from_pretrained(source))
    assert found["text-generation"] == ["Dsv4ForCausalLM", "assistant"] and found["card"] == 1
