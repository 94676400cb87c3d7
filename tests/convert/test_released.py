"""`convert released`: what was not trained keeps its bytes, what was is rounded as the reference rounds."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from convert.__main__ import main
from convert.hub import make_hub_folder
from convert.released import to_released
from convert.tiny import make_tiny
from convert.verify import verify
from modeling_dsv4 import Dsv4ForCausalLM, Dsv4QuantizationConfig, Dsv41ForCausalLM, Dsv41ForConditionalGeneration
from tests.golden_cases import CHECKPOINT_V4, CHECKPOINT_V41, load_json
from tests.reference import formats
from tests.released_folders import Folder, contents, same_bytes, stored_tensors

ROOT = Path(__file__).parents[2]
DEQUANTIZE = Dsv4QuantizationConfig(dequantize=True)
# Checkpoint, class, its language model's prefix, and the tile of FP8 matrices.
FAMILIES = {
    "v41": (CHECKPOINT_V41, Dsv41ForConditionalGeneration, "model.language_model.", (32, 32)),
    "v4": (CHECKPOINT_V4, Dsv4ForCausalLM, "model.", (128, 128)),
}
IDS = torch.tensor([[20, 21]])
# One FP8 matrix, FP4 matrices of the experts that are routed to, a BF16 vector and a float32 one.
TRAINED = (
    "layers.2.self_attn.q_a_proj.weight",
    "layers.3.mlp.experts.down_proj",
    "norm.weight",
    "layers.1.self_attn.sinks",
)


def differing(a, b):
    """Names of the tensors whose bytes are not the same in both folders."""
    a, b = stored_tensors(a), stored_tensors(b)
    return {name for name in a.keys() | b.keys() if name not in a or name not in b or not same_bytes(a[name], b[name])}


def load_float(family, dtype=torch.float32):
    checkpoint, model_class, _, _ = FAMILIES[family]
    return model_class.from_pretrained(checkpoint, dtype=dtype, quantization_config=DEQUANTIZE)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def trained(family, tmp_path_factory):
    """A float model after one step of SGD on `TRAINED`, saved; returns folder, model, and the names that changed."""
    _, _, prefix, _ = FAMILIES[family]
    model = load_float(family).train()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    chosen = [model.get_parameter(prefix + name) for name in TRAINED]
    model.requires_grad_(False)
    for parameter in chosen:
        parameter.requires_grad_(True)
    model(IDS, labels=IDS).loss.backward()
    for parameter in chosen:  # a step that rounding cannot swallow
        parameter.grad.mul_(0.2 * parameter.abs().mean() / parameter.grad.abs().mean())
    torch.optim.SGD(chosen, lr=1.0).step()
    changed = set()
    for name, parameter in model.named_parameters():
        if name.endswith("experts.down_proj"):
            for expert in (parameter != before[name]).any(-1).any(-1).nonzero()[:, 0].tolist():
                changed.add(name.replace("down_proj", f"{expert}.down_proj.weight"))
        elif not torch.equal(parameter, before[name]):
            changed.add(name)
    changed = {model.weight_names.to_released(name) for name in changed}
    assert 4 <= len(changed) < 3 + model.config.get_text_config().n_routed_experts  # some experts, not all
    folder = tmp_path_factory.mktemp("trained")
    model.save_pretrained(folder)
    return folder, model, changed


# ---- nothing was trained -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("linked", [False, True], ids=["files", "links to blobs"])
def test_a_released_folder_is_copied_byte_for_byte(family, tmp_path, linked):
    source = FAMILIES[family][0]
    if linked:  # the shape of a Hub cache
        (tmp_path / "blobs").mkdir()
        (tmp_path / "snapshot" / "inference").mkdir(parents=True)
        for number, file in enumerate(source.iterdir()):
            (tmp_path / "blobs" / str(number)).write_bytes(file.read_bytes())
            (tmp_path / "snapshot" / file.name).symlink_to(tmp_path / "blobs" / str(number))
        (tmp_path / "snapshot" / "inference" / "kernel.py").write_text("pass\n")
        source = tmp_path / "snapshot"
    report = to_released(source, tmp_path / "out", progress=False)
    assert contents(tmp_path / "out") == contents(source)
    assert report.kept == len(stored_tensors(source)) and not report.squares
    assert not any(path.is_symlink() for path in (tmp_path / "out").rglob("*"))


@pytest.mark.parametrize("kind", ["golden", "tiny"])
def test_a_hub_folder_gives_the_released_one_back(family, tmp_path, kind):
    source = FAMILIES[family][0] if kind == "golden" else make_tiny(tmp_path / "x", family=family, progress=False)
    make_hub_folder(source, tmp_path / "hub", progress=False)
    report = to_released(tmp_path / "hub", tmp_path / "out", progress=False)
    assert contents(tmp_path / "out") == contents(source)
    assert report.kept == len(stored_tensors(source)) and not report.left


@pytest.mark.parametrize("original", [True, False], ids=["released names", "our names"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_an_untrained_float_model_gives_the_base_back(family, tmp_path, dtype, original):
    base = FAMILIES[family][0]
    load_float(family, dtype).save_pretrained(tmp_path / "saved", save_original_format=original)
    report = to_released(tmp_path / "saved", tmp_path / "out", base=base, progress=False)
    assert contents(tmp_path / "out") == contents(base)
    drafts = sum(name.startswith("mtp.") for name in stored_tensors(base)) if family == "v41" else 0
    assert dict(report.from_base) == ({"mtp": drafts} if drafts else {})
    assert report.kept == len(stored_tensors(base)) - drafts and not report.changed and not report.config


def test_without_the_base_no_value_is_lost(family, tmp_path):
    """A block whose largest value was rounded down may get half the scale and twice the codes: the same numbers."""
    load_float(family, torch.bfloat16).save_pretrained(tmp_path / "saved")
    to_released(tmp_path / "saved", tmp_path / "out", progress=False)
    changed = differing(tmp_path / "out", FAMILIES[family][0])
    assert any(name.endswith(".scale") for name in changed)
    assert verify(tmp_path / "out", progress=False).problems == []
    again = FAMILIES[family][1].from_pretrained(tmp_path / "out", dtype=torch.bfloat16, quantization_config=DEQUANTIZE)
    for name, tensor in load_float(family, torch.bfloat16).state_dict().items():
        # The golden folder has some tensors in float32 that are released in BF16.
        written = again.state_dict()[name]
        assert same_bytes(tensor.to(written.dtype), written), name


def test_a_packed_model_that_was_saved_and_its_text_class(tmp_path):
    """Names of our own become released ones; what the text class left on disk comes from the base."""
    model = Dsv41ForCausalLM.from_pretrained(CHECKPOINT_V41, dtype="auto")
    for original in (True, False):
        saved, out = tmp_path / f"saved{original}", tmp_path / f"out{original}"
        model.save_pretrained(saved, save_original_format=original, max_shard_size="500KB")
        report = to_released(saved, out, base=CHECKPOINT_V41, progress=False)
        assert contents(out) == contents(CHECKPOINT_V41)
        assert dict(report.from_base) == {"mtp": 169, "vision": 19, "aligner": 4, "image_start": 1, "image_end": 1,
                                          "image_newline": 1}  # fmt: skip
        alone = to_released(saved, tmp_path / f"alone{original}", progress=False)
        assert differing(tmp_path / f"alone{original}", saved) == set() or not original
        assert alone.kept == len(stored_tensors(saved)) and not alone.squares


@pytest.mark.parametrize("size", [200_000, 10**9])
def test_shards_keep_to_their_size(tmp_path, size):
    to_released(CHECKPOINT_V41, tmp_path / "out", max_shard_bytes=size, progress=False)
    assert differing(tmp_path / "out", CHECKPOINT_V41) == set()
    index = load_json(tmp_path / "out" / "model.safetensors.index.json")
    tensors = stored_tensors(tmp_path / "out")
    per_file = {}
    for name, file in index["weight_map"].items():
        per_file.setdefault(file, []).append(tensors[name].nbytes)
    assert index["metadata"]["total_size"] == sum(map(sum, per_file.values()))
    assert all(sum(sizes) <= size or len(sizes) == 1 for sizes in per_file.values())
    assert verify(tmp_path / "out", progress=False).problems == []


# ---- something was trained ----------------------------------------------------------------------------------------------


def reference_codes(weight, dtype, tile):
    """The bytes of values and scales that the float64 reference stores for a matrix."""
    if dtype == torch.int8:
        codes, scale = formats.quantize_mxfp4(weight)
        return codes[:, 0::2] | codes[:, 1::2] << 4, scale
    rows, columns = (-(-size // edge) for size, edge in zip(weight.shape, tile, strict=True))
    padded = np.zeros((rows * tile[0], columns * tile[1]), dtype=np.float32)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    largest = np.abs(padded).reshape(rows, tile[0], columns, tile[1]).max((1, 3))
    exponents = formats.exponent_up(np.maximum(largest, np.float32(1e-4)) * np.float32(1 / 448))
    scale = np.repeat(np.repeat(2.0**exponents, tile[0], 0), tile[1], 1)[: weight.shape[0], : weight.shape[1]]
    return formats.encode_e4m3(weight / scale.astype(np.float32)), (exponents + 127).astype(np.uint8)


def test_after_a_step_only_the_trained_tensors_differ(family, trained, tmp_path):
    saved, _, changed = trained
    base, _, _, tile = FAMILIES[family]
    report = to_released(saved, tmp_path / "out", base=base, progress=False)
    found = differing(tmp_path / "out", base)
    assert {name for name in found if not name.endswith(".scale")} == changed
    assert {name.replace(".scale", ".weight") for name in found} == changed
    assert verify(tmp_path / "out", progress=False).problems == []
    for file in ("config.json", "tokenizer.json", "model.safetensors.index.json"):
        assert (
            file != "model.safetensors.index.json"
            or load_json(tmp_path / "out" / file)["weight_map"] == (load_json(base / file)["weight_map"])
        )
        assert (
            file == "model.safetensors.index.json"
            or (tmp_path / "out" / file).read_bytes() == (base / file).read_bytes()
        )
    written, floats, errors = stored_tensors(tmp_path / "out"), stored_tensors(saved), report.relative_errors()
    assert errors.keys() == {name for name in changed if written[name].dtype != torch.float32}
    for name in changed:
        exact, tensor = floats[name].numpy(), written[name]
        if tensor.dtype.itemsize > 1:
            assert torch.equal(tensor, floats[name].to(tensor.dtype))
            continue
        codes, scale = reference_codes(exact, tensor.dtype, tile)
        scales = written[name.replace(".weight", ".scale")].view(torch.uint8).numpy()
        assert (scales == scale).all() and (tensor.view(torch.uint8).numpy() == codes).all(), name
        if tensor.dtype == torch.int8:
            error = np.linalg.norm(formats.dequantize_fp4_rows(codes, scale) - exact) / np.linalg.norm(exact)
            assert errors[name] == pytest.approx(error, rel=1e-4) and 0.01 < error < 0.2


def test_trained_tensors_in_bf16(family, trained, tmp_path):
    saved, model, changed = trained
    base, model_class, _, _ = FAMILIES[family]
    to_released(saved, tmp_path / "out", base=base, bf16=True, progress=False)
    assert verify(tmp_path / "out", progress=False).problems == []
    written, stored = stored_tensors(tmp_path / "out"), stored_tensors(base)
    matrices = {name for name in changed if stored[name].dtype.itemsize == 1}
    assert {name for name, tensor in written.items() if tensor.dtype != stored[name].dtype} == matrices
    assert stored.keys() - written.keys() == {name.replace(".weight", ".scale") for name in matrices}
    listed = load_json(tmp_path / "out" / "config.json")["quantization_config"]["modules_to_not_convert"]
    assert listed == sorted(name.removesuffix(".weight") for name in matrices)
    to_released(tmp_path / "out", tmp_path / "twice", progress=False)
    assert contents(tmp_path / "twice") == contents(tmp_path / "out")
    again = model_class.from_pretrained(tmp_path / "out", dtype=torch.bfloat16, quantization_config=DEQUANTIZE)
    for name, tensor in again.state_dict().items():
        expected = model.state_dict()[name]
        assert torch.equal(tensor.float(), expected.bfloat16().float()) or torch.equal(tensor.float(), expected), name


def test_a_float_model_alone_in_bf16_needs_no_quantization(family, trained, tmp_path):
    saved, model, _ = trained
    to_released(saved, tmp_path / "out", bf16=True, progress=False)
    assert "quantization_config" not in load_json(tmp_path / "out" / "config.json")
    written = stored_tensors(tmp_path / "out")
    assert {tensor.dtype for tensor in written.values()} <= {torch.bfloat16, torch.float32, torch.int64}
    assert verify(tmp_path / "out", progress=False).problems == []
    again = FAMILIES[family][1].from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    name = FAMILIES[family][2] + TRAINED[1]
    assert torch.equal(again.get_parameter(name), model.get_parameter(name).bfloat16())


def test_a_merged_adapter(tmp_path):
    peft = pytest.importorskip("peft", reason="adapters need peft")
    model = load_float("v41")
    target = "model.language_model.layers.2.self_attn.q_b_proj"
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=[target]))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    adapted.merge_and_unload().save_pretrained(tmp_path / "saved")
    report = to_released(tmp_path / "saved", tmp_path / "out", base=CHECKPOINT_V41, progress=False)
    weight = "layers.2.attn.wq_b.weight"
    found = differing(tmp_path / "out", CHECKPOINT_V41)
    assert weight in found <= {weight, weight.replace(".weight", ".scale")}
    assert report.relative_errors().keys() == {weight}


def test_settings_that_differ_from_the_base_are_kept_and_told(tmp_path):
    model = load_float("v41")
    model.config.text_config.index_topk = 4
    model.save_pretrained(tmp_path / "saved")
    report = to_released(tmp_path / "saved", tmp_path / "out", base=CHECKPOINT_V41, progress=False)
    before = load_json(CHECKPOINT_V41 / "config.json")
    assert report.config == [f"text_config.index_topk: {before['text_config']['index_topk']} -> 4"]
    before["text_config"]["index_topk"] = 4
    assert load_json(tmp_path / "out" / "config.json") == before


def test_a_setting_that_is_the_default_again_is_kept_and_told(tmp_path):
    config, base = load_json(CHECKPOINT_V41 / "config.json"), tmp_path / "base"
    shutil.copytree(CHECKPOINT_V41, base)
    changed = config | {"text_config": config["text_config"] | {"indexer_loss_weight": 0.5}}
    (base / "config.json").write_text(json.dumps(changed))
    report = to_released(CHECKPOINT_V41, tmp_path / "out", base=base, progress=False)
    assert report.config == ["text_config.indexer_loss_weight: 0.5 -> the default"]
    assert load_json(tmp_path / "out" / "config.json") == config


# ---- the command, its memory, and what it refuses --------------------------------------------------------------------------


def test_the_command_prints_what_it_did(trained, family, tmp_path, capsys):
    saved, _, changed = trained
    (saved / "training_args.bin").write_bytes(b"pickle")
    base = str(FAMILIES[family][0])
    assert main(["released", str(saved), str(tmp_path / "out"), "--base", base, "--max-shard-size", "1MB"]) == 0
    printed = dict(
        line.split("  ", 1) for line in capsys.readouterr().out.splitlines() if line.startswith("rounded to")
    )
    assert list(printed) == ["rounded to FP4", "rounded to FP8", "rounded to BF16"]
    assert (
        printed["rounded to FP4"].endswith(".w2.weight; normal for FP4: 0.12")
        and "norm.weight" in printed["rounded to BF16"]
    )
    assert not (tmp_path / "out" / "training_args.bin").exists()
    assert main(["released", str(saved), str(tmp_path / "told"), "--base", base, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert "training_args.bin" in told["left"] and changed > told["rounded"].keys() > {"norm.weight"}
    assert main(["released", str(saved), str(tmp_path / "out2"), "--max-shard-size", "lots"]) == 1
    assert main(["released", str(saved), str(tmp_path / "out")]) == 1
    assert "exists and is not an empty folder" in capsys.readouterr().err


def test_shards_hold_a_byte_at_least(tmp_path):
    with pytest.raises(ValueError, match="max_shard_bytes is 0; accepted: at least 1"):
        to_released(CHECKPOINT_V41, tmp_path / "out", max_shard_bytes=0, progress=False)


def _broken(edit, tmp_path):
    folder = Folder()
    edit(folder)
    return folder.write(tmp_path / "source")


NORM, W1 = "norm.weight", "layers.2.ffn.experts.3.w1.weight"
REFUSED = {
    "a tensor is missing": (lambda f: f.__delitem__(W1), rf"1 tensors are missing from .*: {W1}"),
    "a tensor is unknown": (lambda f: f.__setitem__("layers.0.x", torch.ones(1)), "no released name: layers.0.x in"),
    "a layer too many": (
        lambda f: f.__setitem__("layers.10.attn_norm.weight", torch.ones(96).bfloat16()),
        "are not in a model with the config of .*: layers.10.attn_norm.weight",
    ),
    "another shape": (lambda f: f.__setitem__(NORM, f[NORM][:48]), rf"{NORM} in .* \[48\]; accepted: .* \[96\]"),
    "another dtype": (lambda f: f.__setitem__(W1, f[W1].view(torch.uint8)), rf"{W1} in .*uint8.*; accepted: torch.int8"),
}  # fmt: skip


@pytest.mark.parametrize("fault", REFUSED)
def test_a_broken_source_is_refused_before_anything_is_written(tmp_path, fault):
    edit, message = REFUSED[fault]
    source = _broken(edit, tmp_path)
    with pytest.raises(ValueError, match=message):
        to_released(source, tmp_path / "out", progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_other_bases_are_refused(tmp_path):
    load_float("v41").save_pretrained(tmp_path / "saved")
    saved, out = tmp_path / "saved", tmp_path / "out"
    with pytest.raises(ValueError, match="base is a deepseek_v4; accepted: deepseek_v41"):
        to_released(saved, out, base=CHECKPOINT_V4, progress=False)
    with pytest.raises(ValueError, match="holds floats or other names; accepted: a packed folder"):
        to_released(saved, out, base=saved, progress=False)
    other = make_tiny(tmp_path / "other", progress=False)
    with pytest.raises(ValueError, match="6 tensors of base are not in .*saved: layers.4.engram"):
        to_released(saved, out, base=other, progress=False)


def test_a_value_that_is_not_finite_is_named_and_nothing_is_left(tmp_path):
    model = load_float("v41")
    with torch.no_grad():
        model.model.language_model.layers[2].self_attn.q_a_proj.weight[3, 5] = float("inf")
    model.save_pretrained(tmp_path / "saved")
    with pytest.raises(ValueError, match="layers.2.attn.wq_a.weight in .* has values that are not finite"):
        to_released(tmp_path / "saved", tmp_path / "out", progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


MEMORY_PROGRAM = """
import json, sys, threading, time
from convert.hub import make_hub_folder
from convert.released import to_released
import torch

def anonymous():
    with open("/proc/self/status") as lines:
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

def watch():
    global peak
    while not done:
        peak = max(peak, anonymous())
        time.sleep(0.01)

source, base, target = sys.argv[1:]
peak, done, before = 0, False, anonymous()
watcher = threading.Thread(target=watch)
watcher.start()
report = to_released(source, target, base=base, progress=False)
done = True
watcher.join()
print(json.dumps([peak - before, len(report.squares)]))
"""


@pytest.mark.slow
def test_memory_holds_a_piece_not_a_shard(tmp_path):
    base = make_tiny(tmp_path / "base", size="12MB", progress=False)
    model = Dsv41ForConditionalGeneration.from_pretrained(base, dtype=torch.float32, quantization_config=DEQUANTIZE)
    with torch.no_grad():
        model.model.language_model.layers[3].mlp.experts.down_proj.mul_(1.01)
    model.save_pretrained(tmp_path / "saved")
    del model
    arguments = [sys.executable, "-c", MEMORY_PROGRAM, *(str(tmp_path / name) for name in ("saved", "base", "out"))]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(arguments, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    peak, rounded = json.loads(done.stdout.splitlines()[-1])
    sizes = [file.stat().st_size for file in (tmp_path / "saved").glob("*.safetensors")]
    print(
        f"RssAnon above the start: {peak / 1e6:.0f} MB for {max(sizes) / 1e6:.0f} MB in {len(sizes)} file; {rounded} rounded"
    )
    assert rounded >= 8 and peak < 24e6 < max(sizes) / 2
