"""`make demo` on a small checkpoint: what it prints, where passages come from, and how it treats broken folders."""

from importlib import import_module
from pathlib import Path

import pytest

from convert.tiny import make_tiny
from examples import demo


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("demo") / "checkpoint", progress=False)


@pytest.mark.slow
def test_the_whole_table(folder, capsys):
    assert demo.main([str(folder), "--new-tokens", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line[:34].strip(): line[34:] for line in lines if len(line) > 34}
    assert rows["weights on disk"].endswith(" MB") and rows["load"].endswith(" s")
    # Three source layers of ratios 2, 2 and 1; 64 + 32 channels: 3 groups of (36 + 4) + (16 + 1) bytes, less one half.
    assert rows["cache, growth a token"] == "106.0 B measured, 106.0 B by the sizes in config.json"
    if Path("/proc/self/status").exists():
        assert "after loading" in rows["resident, anonymous"]
    speeds = [line for line in lines if line.count("tok/s") == 2]
    assert [line.split()[0] for line in speeds] == ["English", "Chinese", "code"]
    photographs = [line for line in lines if line.count(" ms") == 3]
    assert [line.split()[0] for line in photographs] == ["china.jpg", "flower.jpg"]
    assert sum("  -> " in line for line in lines) == 3 + 2
    assert not any("random" in line for line in lines)  # only its own checkpoint is known to be noise


@pytest.mark.parametrize("language", demo.PASSAGES)
def test_every_passage_has_a_source_that_any_installation_has(language, monkeypatch):
    text, source = demo.find_passage(language)
    assert len(text) > 40 and source in {place.__name__ for place in demo.PASSAGES[language]}
    # Without the package `test`, or with the standard library as byte code alone, the last place still gives a text.
    last = demo.PASSAGES[language][-1]
    assert len(last()) > 40

    def absent():
        raise OSError("not here")

    monkeypatch.setitem(demo.PASSAGES, language, (absent, last))
    assert demo.find_passage(language) == (last(), last.__name__)
    monkeypatch.setitem(demo.PASSAGES, language, (absent,))
    with pytest.raises(OSError, match=rf"no {language} passage is installed \(absent: not here\)\."):
        demo.find_passage(language)


def test_chinese_passages_are_chinese():
    for place in demo.PASSAGES["Chinese"]:
        try:
            text = place()
        except OSError:
            continue
        chinese = sum("\u4e00" <= character <= "\u9fff" for character in text)
        assert chinese > 0.6 * len(text)


@pytest.mark.parametrize("example", ["chat", "demo", "inspect_model", "lora", "serve"])
def test_a_name_that_is_no_folder_is_not_looked_up_on_the_hub(example, tmp_path, capsys):
    assert import_module(f"examples.{example}").main([str(tmp_path / "nothing")]) == 1
    assert "nothing has no config.json; accepted: a folder in the released layout" in capsys.readouterr().err


def test_its_own_checkpoint_is_made_once_and_again_when_broken(tmp_path, monkeypatch, capsys):
    made = []

    def small(folder, *, tokenizer):
        assert tokenizer == "real"
        made.append(folder)
        return make_tiny(folder, progress=False)

    monkeypatch.setattr(demo, "make_tiny", small)
    folder = demo.own_checkpoint(tmp_path / ".demo" / "v41")
    assert demo.own_checkpoint(folder) == folder and made == [folder]
    shard = sorted(folder.glob("*.safetensors"))[4]
    shard.write_bytes(shard.read_bytes()[:-1])
    assert demo.own_checkpoint(folder) == folder and len(made) == 2
    assert f"{shard}: " in capsys.readouterr().err
    shard.unlink()
    assert demo.own_checkpoint(folder) == folder and len(made) == 3 and shard.exists()


def test_a_folder_that_is_no_checkpoint_exits_with_1(tmp_path, capsys, folder):
    assert demo.main([str(tmp_path / "nowhere")]) == 1
    assert "has no config.json; accepted: a folder in the released layout" in capsys.readouterr().err
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in folder.iterdir():
        content = file.read_bytes()
        broken.joinpath(file.name).write_bytes(content[:-1] if file.name.startswith("model-00005") else content)
    assert demo.main([str(broken)]) == 1
    assert "model-00005-of-00018.safetensors" in capsys.readouterr().err
