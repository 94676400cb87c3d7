"""What the documents say runs: README and model cards as code, and the commands they name."""

import re
import subprocess
from pathlib import Path

import pytest
from PIL import Image

from tests.golden_cases import CHECKPOINT_V4, CHECKPOINT_V41

ROOT = Path(__file__).parents[1]
CARDS = sorted((ROOT / "model_cards").glob("*.md"))


def python_blocks(path):
    return re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)


def test_the_readme_runs_block_by_block(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (20, 12), (200, 30, 30)).save("photo.jpg")
    names = {"folder_v4": str(CHECKPOINT_V4)}
    blocks = python_blocks(ROOT / "README.md")
    assert len(blocks) >= 5
    for block in blocks:
        block = re.sub(r'folder = ".*"', f"folder = {str(CHECKPOINT_V41)!r}", block)
        exec(compile(block.replace("max_new_tokens=100", "max_new_tokens=5"), "README.md", "exec"), names)
    assert (tmp_path / "prefix.safetensors").exists()


@pytest.mark.parametrize("card", CARDS, ids=lambda path: path.stem)
def test_the_model_cards_run(card):
    assert card.read_text(encoding="utf-8").startswith("---\nlibrary_name: transformers\n")
    blocks = python_blocks(card)
    assert blocks
    for block in blocks:
        exec(compile(block, card.name, "exec"), {"folder": str(CHECKPOINT_V41)})


def test_the_readme_names_the_make_targets_and_ci_calls_them():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for command in ("make demo", "make test"):
        assert command in readme and f"\n{command.split()[1]}:" in makefile
    calls = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line.startswith("make ")]
    assert calls == ["make quality", "make test"]


def test_nothing_of_a_machine_is_in_the_repository():
    """Tracked text files name no absolute home or work folder."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    assert tracked
    for name in tracked:
        if Path(name).suffix in (".py", ".md", ".toml", ".txt", ".yaml", "") and (ROOT / name).is_file():
            text = (ROOT / name).read_text(encoding="utf-8", errors="ignore")
            assert not re.search(r"/(?:work|root|home)/\w", text), name
