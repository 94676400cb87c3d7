"""What the documents say runs: README, `docs/` and model cards as code, the commands they name, and what they say of peers."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from PIL import Image
from transformers import DeepseekV4ForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.utils.quantization_config import FineGrainedFP8Config

from convert.__main__ import main as convert
from tests.golden_cases import CHECKPOINT_V4, CHECKPOINT_V41

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RELEASED = "path/to/DeepSeek-V4.1-Flash"  # in the documents; here it is the golden checkpoint
# Lines of shell blocks that are for people: they set up an environment or reach the network.
NOT_RUN = ("make ", "pip install ", "hf ", "curl ")
# What the Python blocks do less of here.
LESS = {
    "max_new_tokens=100": "max_new_tokens=3",
    "max_new_tokens=5": "max_new_tokens=3",
    "max_steps=2,": "max_steps=2, per_device_train_batch_size=1,",
}


def blocks(path):
    """(language, text) of every fenced block."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def run_shell(text):
    """Run the `convert` commands of a shell block in this process; other lines must be of a known kind."""
    for line in filter(None, (line.split("  #")[0].strip() for line in text.splitlines())):
        words = shlex.split(line)
        if words[:3] == ["python", "-m", "convert"]:
            assert convert(words[3:]) == 0, line
        else:
            assert line.startswith(NOT_RUN), line


@pytest.mark.filterwarnings("error::FutureWarning", "error::UserWarning")  # nothing to puzzle over
@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_every_block_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TQDM_DISABLE", "1")
    Image.new("RGB", (20, 12), (200, 30, 30)).save("photo.jpg")
    shutil.copytree(CHECKPOINT_V41, RELEASED)
    names = {"folder": RELEASED, "folder_v4": str(CHECKPOINT_V4)}
    for language, text in blocks(page):
        if language == "python":
            for much, less in LESS.items():
                text = text.replace(much, less)
            exec(compile(text, page.name, "exec"), names)
        elif language == "bash":
            run_shell(text)
        else:
            assert language == "text", f"{page.name}: a block in {language!r}; accepted: python, bash, text (drawings)"


def test_the_newcomers_page_is_short_and_has_the_five_jobs():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    jobs = text.partition("## Five jobs")[2].partition("\n## ")[0]
    assert re.findall(r"^\*\*(\d)\. ", jobs, re.MULTILINE) == list("12345")
    assert len(text.splitlines()) <= 250
    found = [text.count("\n") for language, text in blocks(ROOT / "README.md") if language == "python"]
    assert max(found) <= 14


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda path: path.stem)
def test_links_and_named_files_are_there(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (page.parent / target).exists(), target
    tracked = {path.name for path in ROOT.rglob("*.py") if ".venv" not in path.parts}
    for name in re.findall(r"`(?:\w+/)*(\w+\.py)`", text):
        assert name in tracked, name
    for name in re.findall(r"python -m (examples\.\w+)", text):
        assert (ROOT / f"{name.replace('.', '/')}.py").is_file(), name


def test_the_readme_names_the_make_targets_and_ci_calls_them():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for command in ("make demo", "make test"):
        assert command in readme and f"\n{command.split()[1]}:" in makefile
    calls = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line.startswith("make ")]
    assert calls == ["make quality", "make test"]


def test_make_says_what_it_installs_before_pip_is_silent():
    recipe = (ROOT / "Makefile").read_text(encoding="utf-8").partition("/.ready: constraints")[2].partition("\n\n")[0]
    assert re.findall(r"@echo|pip install --quiet", recipe) == ["@echo", "pip install --quiet"] * 3


def test_what_the_readme_says_of_transformers_is_so(monkeypatch):
    assert "deepseek_v41" not in CONFIG_MAPPING_NAMES
    assert DeepseekV4ForCausalLM._is_stateful  # which assisted generation refuses
    # Before there is a model: without an accelerator the quantiser of `fp8` checkpoints decides to expand them.
    from transformers.quantizers import quantizer_finegrained_fp8 as native

    monkeypatch.setattr(native.torch.cuda, "is_available", lambda: False)
    settings = FineGrainedFP8Config()
    native.FineGrainedFP8HfQuantizer(settings, pre_quantized=True).validate_environment()
    assert settings.dequantize


def test_the_page_of_kernels_lists_each_and_its_gradient():
    pytest.importorskip("triton")
    from modeling_dsv4 import triton_kernels

    table = (
        (ROOT / "docs" / "kernels.md")
        .read_text(encoding="utf-8")
        .partition("## What there is")[2]
        .partition("\n## ")[0]
    )
    rows = re.findall(r"^\| (`.+`) \| .* \| *(.*?) *\|$", table, re.MULTILINE)
    listed = {name: gradient for names, gradient in rows for name in re.findall(r"`(\w+)`", names)}
    assert sorted(listed) == sorted(triton_kernels.__all__)
    for name, gradient in listed.items():
        assert hasattr(getattr(triton_kernels, name), "has_backward") == (gradient not in ("no", "")), name


def test_nothing_of_a_machine_is_in_the_repository():
    """Tracked text files name no absolute home or work folder."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    assert tracked
    for name in tracked:
        if Path(name).suffix in (".py", ".md", ".toml", ".txt", ".yaml", "") and (ROOT / name).is_file():
            text = (ROOT / name).read_text(encoding="utf-8", errors="ignore")
            assert not re.search(r"/(?:work|root|home)/\w", text), name
