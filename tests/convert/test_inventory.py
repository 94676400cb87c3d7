"""The derived inventory against the released one (96,085 tensors), and against what models of other shapes expect."""

import copy
import itertools
import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from convert.inventory import payload_bytes, released_tensors, shard_part
from modeling_dsv4 import Dsv4QuantizationConfig, Dsv41Config, Dsv41ForConditionalGeneration
from modeling_dsv4.checkpoint_map import DTYPES
from modeling_dsv4.quantization import pack_modules
from modeling_dsv4.weight_names import OPTIONAL_PARTS

DATA = Path(__file__).parent / "data"
INVENTORY = json.loads((DATA / "tensors_v41_flash.json").read_text())
RELEASED_CONFIG = json.loads((DATA / "config_v41_flash.json").read_text())


def numbers(text):
    """Read "0..19" or "2,8,14"."""
    first, _, last = text.partition("..")
    return range(int(first), int(last) + 1) if last else [int(number) for number in text.split(",")]


def released_inventory():
    tensors = {}
    for row in INVENTORY["rows"]:
        holes = row["ranges"]
        for values in itertools.product(*map(numbers, holes.values())):
            name = row["name"].format(**dict(zip(holes, values, strict=True)))
            assert name not in tensors
            tensors[name] = tuple(row["shape"]), DTYPES[row["dtype"]]
    return tensors


@pytest.fixture(scope="module")
def derived():
    return released_tensors(Dsv41Config(**copy.deepcopy(RELEASED_CONFIG)))


def test_every_released_tensor_has_its_name_shape_and_dtype(derived):
    expected = released_inventory()
    assert len(expected) == INVENTORY["tensors"] == 96_085
    assert derived == expected


def test_the_payload_is_that_of_the_released_files(derived):
    assert payload_bytes(derived) == INVENTORY["payload_bytes"] == 510_286_023_000
    by_dtype = Counter()
    for name, (shape, dtype) in derived.items():
        by_dtype[dtype] += payload_bytes({name: (shape, dtype)})
    assert by_dtype == {DTYPES[name]: size for name, size in INVENTORY["bytes_by_dtype"].items()}


def test_parts_follow_each_other_as_the_released_shards_do(derived):
    parts = [part for part, _ in itertools.groupby(derived, key=shard_part)]
    engram = ["layers.1.engram", "layers.14.engram"]
    layers, stages = [f"layers.{i}" for i in range(40)], [f"mtp.{i}" for i in range(3)]
    assert parts == ["vision", "embed", *layers, "head", *stages, *engram]
    assert len(parts) == 48


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"hc_mult": 2, "o_groups": 3, "num_attention_heads": 6, "head_dim": 80},
        {"engram_layer_ids": [0], "engram_num_embeddings": [2_000], "engram_vocab_size": 50, "engram_n_heads": 3},
        {"engram_layer_ids": [], "engram_num_embeddings": []},
        {"n_routed_experts": 5, "moe_intermediate_size": 160, "q_lora_rank": 40},
        {"quantization": {"expert_dtype": "fp8", "weight_block_size": [32, 64]}},
        {"quantization": {"scale_fmt": "float"}},
    ],
    ids=["small", "streams-and-groups", "one-engram", "no-engram", "odd-sizes", "FP8 experts", "float scales"],
)
def test_a_packed_model_expects_exactly_these_tensors(changes):
    quantization = RELEASED_CONFIG["quantization_config"] | changes.get("quantization", {})
    text = {
        "vocab_size": 64, "hidden_size": 96, "moe_intermediate_size": 64, "num_hidden_layers": 4, "head_dim": 64,
        "num_attention_heads": 4, "qk_rope_head_dim": 16, "q_lora_rank": 32, "o_lora_rank": 24, "o_groups": 2,
        "n_routed_experts": 3, "num_experts_per_tok": 2, "compress_ratios": [0, 2, 1, 1], "kv_source_layer_ids": [1, 2],
        "index_source_layer_ids": [1, 2, 3], "candidate_source_layer_id": 2, "index_head_dim": 32, "index_n_heads": 4,
        "engram_layer_ids": [1, 3], "engram_num_embeddings": [3_000, 3_000], "engram_vocab_size": 50,
        "engram_compressed_vocab_size": 64, "engram_n_heads": 2, "engram_head_dim": 32, "num_nextn_predict_layers": 0,
        "dspark_target_layer_ids": [], "dspark_noise_token_id": 3,
    }  # fmt: skip
    vision = {"num_hidden_layers": 2, "hidden_size": 48, "num_attention_heads": 3, "intermediate_size": 40}
    config = Dsv41Config(
        text_config=text | {key: value for key, value in changes.items() if key != "quantization"},
        vision_config=vision,
        image_token_id=5,
        quantization_config=quantization,
    )
    derived = released_tensors(config)
    with torch.device("meta"):
        model = Dsv41ForConditionalGeneration(config)
    pack_modules(model, Dsv4QuantizationConfig(**quantization))
    names = type(model).weight_names
    expected = {names.to_released(name): (tuple(t.shape), t.dtype) for name, t in model.state_dict().items()}
    assert {name: shape for name, (shape, _) in expected.items()} == {name: s for name, (s, _) in derived.items()}
    # A fresh model is float32; only packed bytes have a dtype of their own before loading.
    packed = {name for name, (_, dtype) in derived.items() if dtype.itemsize == 1 or name.endswith(".scale")}
    assert {name: expected[name] for name in packed} == {name: derived[name] for name in packed}


def test_optional_parts_are_absent_when_the_config_has_none():
    content = copy.deepcopy(RELEASED_CONFIG)
    content["vision_config"] = None
    content["text_config"]["num_nextn_predict_layers"] = 0
    content["text_config"]["compress_ratios"] = content["text_config"]["compress_ratios"][:40]
    tensors = released_tensors(Dsv41Config(**content))
    for part in ("drafts", "vision"):
        assert not [name for name in tensors if OPTIONAL_PARTS[part].search(name)]
    assert len(tensors) == 96_085 - 2_401 - 266
