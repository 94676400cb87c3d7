"""The command line: exit codes, help, messages on standard error."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from convert.__main__ import main

ROOT = Path(__file__).parents[2]


def usage_exit(argv):
    with pytest.raises(SystemExit) as exit_:
        main(argv)
    return exit_.value.code


@pytest.mark.parametrize("family", ["v41", "v4"])
def test_a_checkpoint_is_made_and_its_folder_printed(tmp_path, capsys, family):
    assert main(["tiny", str(tmp_path / "x"), "--seed", "5", "--family", family]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'x'}\n"
    assert (tmp_path / "x" / "config.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--size", "much"], "size is 'much'; accepted: bytes, or a number with one of B, KB, MB, GB, TB."),
        (["--size", "0.5B"], "size is '0.5B'; accepted: bytes, or a number with one of B, KB, MB, GB, TB."),
        (["--seed", "-1"], "seed is -1; accepted: an integer >= 0."),
    ],
)
def test_a_wrong_input_exits_with_1_and_says_what(tmp_path, capsys, arguments, message):
    assert main(["tiny", str(tmp_path / "x"), *arguments]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err == f"python -m convert tiny: {message}\n"
    assert list(tmp_path.iterdir()) == []


def test_a_taken_folder_exits_with_1_and_is_named(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["tiny", str(tmp_path)]) == 1
    assert f"tiny: {tmp_path} exists and is not an empty folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv", [[], ["nothing"], ["tiny"], ["tiny", "x", "--seed", "one"], ["tiny", "x", "--tokenizer", "own"], ["tiny", "x", "y"],
              ["hub", "x"], ["hub", "x", "y", "--decoder-replay", "none"], ["released", "x"], ["verify"], ["info", "x", "y"]]
)  # fmt: skip
def test_wrong_usage_exits_with_2(argv, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert usage_exit(argv) == 2
    assert capsys.readouterr().err.startswith("usage: ")
    assert list(tmp_path.iterdir()) == []


def test_help_lists_every_command_with_its_options(capsys):
    assert usage_exit(["--help"]) == 0
    text = capsys.readouterr().out
    assert (
        all(command in text for command in ("tiny", "hub", "released", "verify", "info"))
        and "exit codes: 0 done, 1 an input is wrong, 2 usage" in text
    )
    assert usage_exit(["tiny", "--help"]) == 0
    text = capsys.readouterr().out
    assert all(option in text for option in ("DST", "--seed", "--family", "--tokenizer", "--size"))
    assert usage_exit(["released", "--help"]) == 0
    text = capsys.readouterr().out
    assert all(option in text for option in ("SRC", "DST", "--base", "--bf16", "--max-shard-size", "--json"))


def test_the_module_runs_and_its_help_imports_no_torch():
    code = "import sys; sys.argv[1:] = ['tiny', '--help']; import runpy\n"
    code += "try: runpy.run_module('convert', run_name='__main__')\n"
    code += "except SystemExit as done: sys.exit(10 * done.code + ('torch' in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: python -m convert tiny")


def test_installed_under_its_own_name(tmp_path, monkeypatch, capsys):
    """setup.py installs the folder as the package `dsv4_convert`; nothing inside it may import `convert` by that name."""
    (tmp_path / "dsv4_convert").symlink_to(ROOT / "convert")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "convert"]:
        monkeypatch.setitem(sys.modules, name, None)  # importing it raises
    try:
        installed = importlib.import_module("dsv4_convert.__main__")
        assert installed.main(["tiny", str(tmp_path / "x"), "--size", "1MB"]) == 1
        assert capsys.readouterr().err.startswith("dsv4-convert tiny: size is 1000000 bytes; accepted: at least ")
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "dsv4_convert"]:
            del sys.modules[name]
