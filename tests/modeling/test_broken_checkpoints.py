"""Broken released-layout folders: every fault raises, naming tensor and file, before weights are read.

Only the tokenizer is looked at after them.

`pytest -k broken -rP` prints the message of each.
"""

import json
import logging
import os

import pytest
import torch
from tokenizers import Tokenizer

from modeling_dsv4 import Dsv4QuantizationConfig, Dsv41ForCausalLM
from tests.golden_cases import CHECKPOINT_V41, load_json
from tests.released_folders import FIRST, SECOND, change, remove, small_folder, stored_tensors

IDS = torch.arange(20, 37)[None]
DEQUANTIZE = Dsv4QuantizationConfig(dequantize=True)


@pytest.fixture(scope="module")
def golden():
    return small_folder()


def load(folder, **options):
    return Dsv41ForCausalLM.from_pretrained(folder, **options)


WQ, WQS = "layers.2.attn.wq_a.weight", "layers.2.attn.wq_a.scale"  # FP8 [32, 96], scale [1, 3]
W1, W1S = "layers.2.ffn.experts.3.w1.weight", "layers.2.ffn.experts.3.w1.scale"  # FP4 [32, 48], scale [32, 3]
TABLE, TABLES = "layers.1.engram.embed.weight", "layers.1.engram.embed.scale"  # FP8 [3150, 32], scale [3150, 1]
NORM, SINK, BIAS, EMBED = "norm.weight", "layers.2.attn.attn_sink", "layers.2.ffn.gate.bias", "embed.weight"


def add(name, tensor):
    return lambda folder: folder.__setitem__(name, tensor)


def set_index(function):
    def edit(folder):
        index = {name: file for file, tensors in folder.shards.items() for name in tensors}
        folder.index = function(index)

    return edit


def cut(count):
    def damage(path):
        with open(path / SECOND, "r+b") as handle:
            handle.truncate(handle.seek(0, os.SEEK_END) + count if count < 0 else count)

    return damage


def overwrite(file, data):
    return lambda path: (path / file).write_bytes(data)


def delete(file):
    return lambda path: (path / file).unlink()


def as_bytes(dtype):
    return lambda t: t.view(torch.uint8).view(dtype)


def second_copy(folder):
    folder.shards[SECOND][WQ] = folder[WQ]
    folder.index = {name: file for file, tensors in folder.shards.items() for name in tensors}


def other_tokenizer(size):
    """The golden tokenizer without its last `size` words."""

    def edit(folder):
        content = json.loads(folder.tokenizer)
        words = sorted(content["model"]["vocab"].items(), key=lambda pair: pair[1])
        merges = content["model"].get("merges", [])
        dropped = {word for word, _ in words[len(words) - size :]}
        content["model"]["vocab"] = {word: i for word, i in words if word not in dropped}
        content["model"]["merges"] = [
            m for m in merges if "".join(m if isinstance(m, list) else m.split(" ")) not in dropped
        ]
        folder.tokenizer = json.dumps(content).encode()

    return edit


# fault: (change of the folder or None, damage of the written files or None, words of the message)
BROKEN = {
    "missing shard": (None, delete(SECOND), [SECOND, "is missing", "mtp.0."]),
    "truncated shard": (None, cut(-5), [SECOND, "truncated", "mtp.2.ffn"]),
    "shard cut inside its header": (None, cut(100), [SECOND, "truncated, or not safetensors"]),
    "empty shard": (None, cut(0), [SECOND, "0 bytes"]),
    "shard is a pickle": (None, overwrite(SECOND, b"\x80\x04" * 100), [SECOND, "not safetensors"]),
    "shard is a web page": (None, overwrite(SECOND, b"<!DOCTYPE html>" * 9), [SECOND, "not safetensors"]),
    "shard is a git-lfs pointer": (None, overwrite(SECOND, b"version https://git-lfs\noid sha256:0\n"), [SECOND]),
    "FP8 scale missing": (remove(WQS), None, [WQS, "missing from", "ckpt"]),
    "FP4 scale missing": (remove(W1S), None, [W1S, "missing from", "ckpt"]),
    "table scale missing": (remove(TABLES), None, [TABLES, "missing from", "ckpt"]),
    "FP8 weight missing": (remove(WQ), None, [WQ, "missing from", "ckpt"]),
    "expert missing": (remove(W1), None, [W1, "missing from", "ckpt"]),
    "norm missing": (remove(NORM), None, [NORM, "missing from", "ckpt"]),
    "selection bias missing": (remove(BIAS), None, [BIAS, "missing from", "ckpt"]),
    "unknown tensor": (add("layers.2.attn.wq_c.weight", torch.ones(2)), None, ["layers.2.attn.wq_c.weight", FIRST]),
    "layer beyond the config": (add("layers.10.attn_norm.weight", torch.ones(96)), None, ["layers.10.", FIRST]),
    "expert beyond the config": (
        add("layers.2.ffn.experts.8.w1.weight", torch.zeros(32, 48, dtype=torch.int8)),
        None,
        ["layers.2.ffn.experts.8.w1.weight", FIRST],
    ),
    "Engram of another layer": (add("layers.3.engram.q_weight", torch.ones(4, 96)), None, ["layers.3.engram", FIRST]),
    "scale without a weight": (add("layers.2.attn.q_norm.scale", torch.ones(1)), None, ["q_norm.scale", FIRST]),
    "scale beside a float weight": (
        add("layers.2.attn.indexer.weights_proj.scale", torch.ones(1)),
        None,
        ["weights_proj.scale", FIRST],
    ),
    "tensor in two shards": (second_copy, None, [WQ, FIRST, SECOND]),
    "tensor under two names": (add("model." + NORM, torch.ones(96)), None, ["model." + NORM, NORM, "same tensor"]),
    "FP8 weight of another shape": (change(WQ, lambda t: t[:16]), None, [WQ, FIRST, "[16, 96]", "[32, 96]"]),
    "FP8 weight transposed": (change(WQ, lambda t: t.view(torch.uint8).T.contiguous().view(t.dtype)), None, [WQ, FIRST]),
    "FP4 weight of another shape": (change(W1, lambda t: t[:, :32]), None, [W1, FIRST]),
    "FP8 scale of another shape": (change(WQS, lambda t: t[:, :2]), None, [WQS, FIRST, "[1, 2]", "[1, 3]"]),
    "FP4 scale of another shape": (change(W1S, lambda t: t[:16]), None, [W1S, FIRST, "[16, 3]", "[32, 3]"]),
    "table scale of another shape": (change(TABLES, lambda t: t[:100]), None, [TABLES, FIRST, "[100, 1]"]),
    "norm of another shape": (change(NORM, lambda t: t[:48]), None, [NORM, SECOND, "[48]", "[96]"]),
    "embedding of another vocabulary": (change(EMBED, lambda t: t[:300]), None, [EMBED, FIRST, "[300, 96]"]),
    "sinks of another shape": (change(SINK, lambda t: t[None]), None, [SINK, FIRST, "[1, 4]", "[4]"]),
    "integers where floats are expected": (change(NORM, lambda t: t.to(torch.int64)), None, [NORM, SECOND, "int64"]),
    "bytes where floats are expected": (change(EMBED, as_bytes(torch.int8)), None, [EMBED, FIRST, "int8"]),
    "booleans where floats are expected": (change(SINK, lambda t: t > 0), None, [SINK, FIRST, "bool"]),
    "FP8 where a norm is expected": (change(NORM, lambda t: t.to(torch.float8_e4m3fn)), None, [NORM, SECOND, "float8"]),
    "FP8 where sinks are expected": (change(SINK, lambda t: t.to(torch.float8_e4m3fn)), None, [SINK, FIRST, "float8"]),
    "FP4 bytes where FP8 is expected": (change(WQ, as_bytes(torch.int8)), None, [WQ, FIRST, "int8", "float8_e4m3fn"]),
    "E8M0 where FP8 is expected": (change(WQ, as_bytes(torch.float8_e8m0fnu)), None, [WQ, FIRST, "float8_e8m0fnu"]),
    "uint8 where FP4 is expected": (change(W1, as_bytes(torch.uint8)), None, [W1, FIRST, "uint8"]),
    "scale as bytes": (change(WQS, as_bytes(torch.uint8)), None, [WQS, FIRST, "uint8"]),
    "scale as FP8 values": (change(WQS, as_bytes(torch.float8_e4m3fn)), None, [WQS, FIRST, "float8_e4m3fn"]),
    "scale in BF16": (change(W1S, lambda t: t.bfloat16()), None, [W1S, FIRST, "bfloat16"]),
    "scalar where a matrix is expected": (change(WQ, lambda t: t[0, 0]), None, [WQ, FIRST]),
    "index names a missing file": (
        set_index(lambda index: {**index, NORM: "model-00003-of-00002.safetensors"}),
        None,
        ["model-00003-of-00002.safetensors", "is missing", NORM],
    ),
    "index names the wrong file": (set_index(lambda i: {**i, NORM: FIRST}), None, [NORM, FIRST, SECOND]),
    "index names a tensor that is nowhere": (set_index(lambda i: {**i, "layers.99.x": FIRST}), None, ["layers.99.x", FIRST]),
    "index leaves a tensor out": (
        set_index(lambda index: {n: f for n, f in index.items() if n != NORM}),
        None,
        [NORM, SECOND, "does not name"],
    ),
    "index leaves the folder": (set_index(lambda i: {**i, NORM: "../" + SECOND}), None, [NORM, "../" + SECOND]),
    "tokenizer of another vocabulary": (other_tokenizer(60), None, ["tokenizer.json", "engram_compressed_vocab_size=331"]),
    "tokenizer is broken": (None, overwrite("tokenizer.json", b"{}"), ["tokenizer.json", "no tokenizer"]),
    "config of a deeper model": (
        lambda f: f.config["text_config"].update(num_hidden_layers=5, compress_ratios=[0, 0, 2, 2, 2]),
        None,
        ["layers.4.", "missing from", "ckpt"],
    ),
    "config without quantization_config": (
        lambda f: f.config.pop("quantization_config"),
        None,
        ["packed", "no quantization_config", "layers.0.", FIRST],
    ),
}  # fmt: skip


# Faults of tensors are tried for a float model too; those of files and index are found before the modes differ.
CASES = [(fault, "packed") for fault in BROKEN] + [
    (fault, "float") for fault, (_, damage, _) in BROKEN.items() if damage is None and not fault.startswith("index")
]


@pytest.mark.parametrize(("fault", "mode"), CASES)
def test_broken_checkpoint_names_tensor_and_file(fault, mode, golden, tmp_path):
    edit, damage, words = BROKEN[fault]
    folder = golden.copy()
    if edit is not None:
        edit(folder)
    path = folder.write(tmp_path / "ckpt")
    if damage is not None:
        damage(path)
    options = {}
    if mode == "float" and "quantization_config" in folder.config:
        options = {"quantization_config": DEQUANTIZE, "dtype": torch.float32}
    with pytest.raises((ValueError, OSError)) as error:
        load(path, **options)
    message = str(error.value).replace(str(tmp_path) + os.sep, "")
    print(f"{fault} ({mode}) -> {type(error.value).__name__}: {message}")
    assert all(word in message for word in words), (words, message)


def test_broken_folder_without_tokenizer_warns_then_refuses(golden, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    whole = load(golden.write(tmp_path / "whole"))
    folder = golden.copy()
    folder.tokenizer = None
    model = load(folder.write(tmp_path / "ckpt"))
    assert "ckpt has none of engram_token_map.json, tokenizer.json; call model.set_tokenizer(tokenizer)" in caplog.text
    with pytest.raises(ValueError, match=r"token map; call model.set_tokenizer\(tokenizer\) first") as error:
        model(IDS)
    print(f"no tokenizer.json -> warning, then {error.value}")
    model.set_tokenizer(Tokenizer.from_file(str(CHECKPOINT_V41 / "tokenizer.json")))
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, whole(IDS).logits)


def test_broken_fused_bank_is_named(golden, tmp_path):
    model = load(golden.write(tmp_path / "source"), dtype=torch.bfloat16, quantization_config=DEQUANTIZE)
    model.save_pretrained(tmp_path / "ckpt", save_original_format=False)
    folder, file = golden.copy(), "model.safetensors"
    folder.shards = {file: stored_tensors(tmp_path / "ckpt")}
    folder.config, folder.index = load_json(tmp_path / "ckpt" / "config.json"), False
    bank = "model.layers.3.mlp.experts.down_proj"
    whole = folder[bank]
    folder[bank] = whole[:4]
    with pytest.raises(ValueError, match=rf"{bank} in .*{file} has shape \[4, 96, 32\]; accepted: \[8, 96, 32\]"):
        load(folder.write(tmp_path / "ckpt"))
    # The same experts twice, fused and one by one.
    folder[bank] = whole
    folder.shards[file]["layers.3.ffn.experts.0.w2.weight"] = whole[0].clone()
    with pytest.raises(ValueError, match=r"have no use .*: layers.3.ffn.experts.0.w2.weight in .*" + file):
        load(folder.write(tmp_path / "ckpt"))
