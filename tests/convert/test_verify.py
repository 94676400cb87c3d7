"""`convert verify`: whole folders pass, every kind of damage is found, by name, all at once."""

import json

import pytest
import torch

from convert.__main__ import main
from convert.hub import make_hub_folder
from convert.tiny import make_tiny
from convert.verify import verify
from modeling_dsv4 import Dsv4ForCausalLM, Dsv4QuantizationConfig, Dsv41ForCausalLM
from tests.golden_cases import CHECKPOINT_V4, CHECKPOINT_V41
from tests.released_folders import FIRST, SECOND, Folder

DEQUANTIZE = Dsv4QuantizationConfig(dequantize=True)
NORM, WQS, W1 = "norm.weight", "layers.2.attn.wq_a.scale", "layers.2.ffn.experts.3.w1.weight"


@pytest.fixture(scope="module")
def golden():
    return Folder()


def found(folder):
    """`{check: [tensor or message]}` of all problems."""
    problems = {}
    for problem in verify(folder, progress=False).problems:
        problems.setdefault(problem.check, []).append(problem.tensor or problem.message)
    return problems


@pytest.mark.parametrize("family", ["v41", "v4"])
def test_whole_folders_pass(family, tmp_path):
    """Released, made by `hub`, and saved: packed or float, of either dtype, with released or our own names."""
    golden = {"v41": CHECKPOINT_V41, "v4": CHECKPOINT_V4}[family]
    model_class = {"v41": Dsv41ForCausalLM, "v4": Dsv4ForCausalLM}[family]
    make_tiny(tmp_path / "tiny", family=family, progress=False)
    make_hub_folder(tmp_path / "tiny", tmp_path / "hub", progress=False)
    for number, options in enumerate(({"dtype": "auto"}, {"dtype": torch.float32})):
        for kind, extra in (("packed", {}), ("float", {"quantization_config": DEQUANTIZE})):
            model = model_class.from_pretrained(golden, **options, **extra)
            model.save_pretrained(tmp_path / f"{kind}{number}", save_original_format=bool(number))
    for folder in (golden, *tmp_path.iterdir()):
        report = verify(folder, progress=False)
        assert not report.problems, (folder.name, report.problems[:3])
        assert report.form == ("float" if "float" in folder.name else "packed")
        wanted = ["config", "files", "names", "shapes and dtypes", "values"] + ["hash constants"] * (family == "v41")
        wanted += ["hub files"] * (folder.name == "hub")
        assert sorted(report.checked) == sorted(wanted)


def change(name, function):
    return lambda folder: folder.__setitem__(name, function(folder[name].clone()))


def put(value, *places):
    def edit(tensor):
        view = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
        for place in places:
            view[place] = value
        return tensor

    return edit


DAMAGED = {  # fault: (edit, check, names of the tensors, words of a message)
    "missing": (lambda f: f.__delitem__(NORM), "names", [NORM], "is missing"),
    "layer too many": (
        lambda f: f.__setitem__("layers.10.attn_norm.weight", torch.ones(96).bfloat16()),
        "names", ["layers.10.attn_norm.weight"], "is not in a model with this config",
    ),
    "no released name": (lambda f: f.__setitem__("layers.0.x", torch.ones(1)), "names", None, "layers.0.x in"),
    "shape": (change(NORM, lambda t: t[:48]), "shapes and dtypes", [NORM], "has shape [48]; accepted: [96]"),
    "dtype": (change(W1, lambda t: t.view(torch.uint8)), "shapes and dtypes", [W1], "accepted: torch.int8"),
    "dtype of a norm": (change(NORM, lambda t: t.half()), "shapes and dtypes", [NORM], "stored as torch.float16"),
    "NaN scales": (change(WQS, put(255, (0, 0), (0, 2))), "values", [WQS], "has 2 values that are not finite"),
    "NaN codes": (
        change("layers.2.attn.wq_a.weight", put(0xFF, (3, 4))), "values", ["layers.2.attn.wq_a.weight"], "has 1 values",
    ),
    "infinity": (change(NORM, put(float("inf"), 7)), "values", [NORM], "has 1 values that are not finite"),
    "NaN in float32": (
        change("layers.0.attn.attn_sink", put(float("nan"), 0)), "values", ["layers.0.attn.attn_sink"], "not finite",
    ),
    "rows": (
        lambda f: f.config["text_config"].update(engram_vocab_size=600), "hash constants", None, "the sum of its primes",
    ),
    "token map": (
        lambda f: f.config["text_config"].update(engram_token_map_sha256="0" * 64), "hash constants", None, "config.json: 000",
    ),
    "vocabulary": (
        lambda f: f.config["text_config"].update(engram_compressed_vocab_size=330), "hash constants", None, "=330",
    ),
    "config": (lambda f: f.config["text_config"].update(o_groups=3), "config", None, "o_groups is 3; accepted: a divisor"),
    "family": (lambda f: f.config.update(model_type="gpt2"), "config", None, "model_type is 'gpt2'; accepted:"),
}  # fmt: skip


@pytest.mark.parametrize("fault", DAMAGED)
def test_damage_is_found(golden, tmp_path, fault):
    edit, check, names, words = DAMAGED[fault]
    folder = golden.copy()
    edit(folder)
    report = verify(folder.write(tmp_path / "x"), progress=False)
    problems = [problem for problem in report.problems if problem.check == check]
    assert any(words in problem.message for problem in problems), report.problems
    assert {problem.check for problem in report.problems} == {check}
    if names:
        assert [problem.tensor for problem in problems] == names
        assert fault == "missing" or problems[0].file.endswith((FIRST, SECOND))


def test_routing_tables_name_experts_that_exist(tmp_path):
    folder = Folder(CHECKPOINT_V4)
    name = "layers.0.ffn.gate.tid2eid"
    folder.shards[next(iter(folder.shards))][name] = put(6, (5, 0))(folder[name].clone())
    assert found(folder.write(tmp_path / "x")) == {"values": [name]}


def test_files_are_compared_with_the_index(golden, tmp_path):
    path = golden.copy().write(tmp_path / "x")
    index = path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["metadata"]["total_size"] = 5
    index.write_text(json.dumps(content))
    assert "total_size is 5" in found(path)["files"][0]
    (path / SECOND).write_bytes((path / SECOND).read_bytes()[:-1])
    assert list(found(path)) == ["files"] and "truncated" in found(path)["files"][0]
    (path / SECOND).unlink()
    assert f"{SECOND} is missing" in found(path)["files"][0]


def test_what_hub_wrote_is_compared_with_what_was_released(tmp_path):
    make_hub_folder(CHECKPOINT_V41, tmp_path / "hub", progress=False)
    path = tmp_path / "hub"
    (path / "rotary.py").unlink()
    config = json.loads((path / "config.json").read_text())
    config["image_token_id"] = 5
    config["auto_map"]["AutoModel"] = "elsewhere.Model"
    config["text_config"]["engram_token_map_sha256"] = "0" * 64
    (path / "config.json").write_text(json.dumps(config))
    problems = found(path)
    assert [words.split(" ")[0] for words in problems["hub files"]] == ["rotary.py", "auto_map", "config.json"]
    assert problems["hub files"][1:] == [
        "auto_map names elsewhere.py for AutoModel, which is missing",
        "config.json differs from original/config.json in image_token_id",
    ]
    (path / "config.json").write_text(json.dumps(config | {"auto_map": ["elsewhere.Model"]}))
    assert "auto_map is ['elsewhere.Model']; accepted: classes by" in found(path)["hub files"][1]
    assert len(problems["hash constants"]) == 2  # the stored map and the tokenizer's


def test_all_problems_are_listed_in_lines_and_json(golden, tmp_path, capsys):
    folder = golden.copy()
    for edit in ("missing", "NaN scales", "dtype"):
        DAMAGED[edit][0](folder)
    path = folder.write(tmp_path / "x")
    assert main(["verify", str(path)]) == 1
    captured = capsys.readouterr()
    assert f"{NORM}: is missing" in captured.out and f"{WQS}: has 2 values" in captured.out and "ok" in captured.out
    assert captured.err.endswith(f"verify: {path} has 3 problems.\n")
    assert main(["verify", str(path), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["ok"] and [p["tensor"] for p in report["problems"]] == [NORM, W1, WQS]
    assert main(["verify", str(CHECKPOINT_V41), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True
    assert main(["verify", str(tmp_path / "nowhere")]) == 1
