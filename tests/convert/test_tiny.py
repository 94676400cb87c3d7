"""Random checkpoints: the folder is complete and as described, the bytes repeat, weights have the promised spread."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from convert import tiny
from convert.inventory import payload_bytes, released_tensors, shard_part
from convert.shards import INDEX_NAME, plan_shards
from convert.tiny import make_tiny, parse_size, released_config_dict
from modeling_dsv4 import Dsv41Config, Dsv41ForCausalLM
from modeling_dsv4.checkpoint_map import check_index, map_checkpoint
from modeling_dsv4.fp_codecs import (
    decode_e2m1,
    dequantize_fp4_rows,
    dequantize_fp8_tiles,
    dequantize_rows,
    unpack_nibbles,
)
from modeling_dsv4.ngram_hash import build_token_map, engram_primes

RELEASED_CONFIG = Path(__file__).parent / "data" / "config_v41_flash.json"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("tiny") / "checkpoint", seed=3, progress=False)


@pytest.fixture(scope="module")
def mapped(folder):
    tensors, entries = map_checkpoint(sorted(map(str, folder.glob("*.safetensors"))))
    check_index(json.loads((folder / INDEX_NAME).read_text())["weight_map"], entries)
    return tensors


def digests(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def unpacked(tensors, stem):
    """The float matrix of a packed one."""
    values, scale = tensors[f"{stem}.weight"], tensors[f"{stem}.scale"]
    if values.dtype == torch.int8:
        return dequantize_fp4_rows(values, scale)
    if len(scale) == len(values):
        return dequantize_rows(values, scale, block=32)
    return dequantize_fp8_tiles(values, scale)


def test_the_folder_has_the_files_of_a_release(folder):
    shards = [f"model-{i:05d}-of-00018.safetensors" for i in range(1, 19)]
    names = {"config.json", "tokenizer.json", "tokenizer_config.json", INDEX_NAME, *shards}
    assert {path.name for path in folder.iterdir()} == names


def test_it_holds_exactly_the_tensors_of_its_config(folder, mapped):
    expected = released_tensors(Dsv41Config.from_pretrained(folder))
    assert {name: (tuple(t.shape), t.dtype) for name, t in mapped.items()} == expected
    index = json.loads((folder / INDEX_NAME).read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in mapped.values())
    parts = {
        file: {shard_part(n) for n, f in index["weight_map"].items() if f == file} for file in mapped_files(index)
    }
    assert all(len(found) == 1 for found in parts.values())


def mapped_files(index):
    return set(index["weight_map"].values())


def test_the_config_has_the_released_form():
    content = RELEASED_CONFIG.read_text()
    written = released_config_dict(Dsv41Config(**json.loads(content)))
    assert json.dumps(written, indent=2) + "\n" == content


def test_the_config_switches_every_mechanism_on(folder):
    content = json.loads((folder / "config.json").read_text())
    released = json.loads(RELEASED_CONFIG.read_text())
    assert list(content) == list(released)
    for part in ("text_config", "vision_config", "quantization_config"):
        assert list(content[part]) == list(released[part])
    assert content["quantization_config"] == released["quantization_config"]
    text = Dsv41Config.from_pretrained(folder).text_config
    assert text.layer_modes == ["window"] * 2 + ["full", "reuse"] * 3 + ["reindex", "reuse"]
    assert [text.compress_ratios[i] for i in text.kv_source_layer_ids] == [2, 2, 1]
    assert text.uses_candidates(8) and text.replay_cut == 6
    assert text.engram_layer_ids == [1, 4] and text.num_nextn_predict_layers == 3
    # A pinned newest block may be all but empty; the others must still hold a whole selection.
    assert (text.candidate_topk_blocks - 1) * text.candidate_block_size >= text.index_topk == 8


def test_engram_sizes_follow_from_the_tokenizer(folder):
    text = Dsv41Config.from_pretrained(folder).text_config
    token_map = build_token_map(Tokenizer.from_file(str(folder / "tokenizer.json")))
    assert len(token_map) == text.vocab_size == 384
    assert int(token_map.max()) + 1 == text.engram_compressed_vocab_size
    assert [sum(map(sum, sizes)) for sizes in engram_primes(text)] == text.engram_num_embeddings


def test_bytes_follow_from_the_arguments(folder, tmp_path):
    again = make_tiny(tmp_path / "again", seed=3, progress=False)
    other = make_tiny(tmp_path / "other", seed=4, progress=False)
    assert digests(again) == digests(folder)
    changed = {name for name, digest in digests(other).items() if digest != digests(folder)[name]}
    assert changed == {path.name for path in folder.glob("*.safetensors")}


def test_no_two_tensors_are_alike(mapped):
    large = [t for t in mapped.values() if t.numel() >= 64 and t.dtype != torch.float8_e8m0fnu]
    same = {hashlib.sha256(t.contiguous().view(torch.uint8).numpy()).digest() for t in large if t.bool().any()}
    zero = sum(not t.bool().any() for t in large)
    assert len(same) + zero == len(large)


def test_weights_keep_activations_of_order_one(mapped):
    for stem in ("layers.3.attn.wq_b", "layers.5.attn.wo_b", "layers.0.ffn.experts.7.w2", "mtp.0.main_proj"):
        weight = unpacked(mapped, stem)
        assert weight.std() * weight.shape[1] ** 0.5 == pytest.approx(1, abs=0.05)
    assert unpacked(mapped, "layers.1.engram.embed").std() == pytest.approx(1, abs=0.05)
    assert mapped["embed.weight"].float().std() == pytest.approx(1, abs=0.05)
    assert mapped["head.weight"].float().std() == pytest.approx(128**-0.5, rel=0.05)
    norms = torch.cat([t.float() for name, t in mapped.items() if name.endswith("norm.weight")])
    assert norms.mean() == pytest.approx(1, abs=0.02) and norms.std() == pytest.approx(0.1, abs=0.02)
    sinks = torch.cat([t for name, t in mapped.items() if name.endswith("attn_sink")])
    assert 0.7 < sinks.std() < 1.3
    assert not any(t.any() for name, t in mapped.items() if name.endswith("ffn.gate.bias"))
    assert all(t.any() for name, t in mapped.items() if name.endswith("ffn.gate.bias_vl"))
    assert all(t.float().isfinite().all() for t in mapped.values() if t.dtype != torch.int8)


def test_every_scale_is_the_smallest_power_of_two_that_fits(mapped):
    """The largest code of a block lies in the upper half of the format's range, as the released rule leaves it."""
    tops = {"tiles": [], "rows": [], "fp4": []}
    for name, values in mapped.items():
        scale = mapped.get(name.removesuffix("weight") + "scale")
        if scale is None or not name.endswith(".weight"):
            continue
        if values.dtype == torch.int8:
            tops["fp4"].append(decode_e2m1(unpack_nibbles(values)).abs().unflatten(1, (-1, 32)).amax(-1))
        elif len(scale) == len(values):
            tops["rows"].append(values.float().abs().unflatten(1, (-1, 32)).amax(-1))
        else:
            tiles = values.float().abs().unflatten(1, (-1, 32)).unflatten(0, (-1, 32))
            tops["tiles"].append(tiles.amax((1, 3)))
    for kind, top in (("tiles", 448), ("rows", 448), ("fp4", 6)):
        found = torch.cat([t.flatten() for t in tops[kind]])
        assert len(found) > 1000
        assert top / 2 <= found.min() and found.max() <= top


def test_the_model_loads_it_and_its_streams_stay_of_order_one(folder):
    model = Dsv41ForCausalLM.from_pretrained(folder, dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(
        "The river runs past the old mill, and the mill runs when the river is high.", return_tensors="pt"
    )
    with torch.no_grad():
        out = model(**inputs, output_hidden_states=True)
    spread = [hidden.float().std().item() for hidden in out.hidden_states]
    assert all(0.5 < value < 12 for value in spread), spread
    assert 0.7 < out.logits.std() < 1.4


# ---- larger ones -----------------------------------------------------------------------------------------------------


def test_size_is_met_by_more_and_wider_experts(tmp_path):
    folder = make_tiny(tmp_path / "large", size="9MB", progress=False)
    found = sum(path.stat().st_size for path in folder.iterdir())
    assert found == pytest.approx(9e6, rel=0.03)
    assert Dsv41Config.from_pretrained(folder).text_config.n_routed_experts > 8


@pytest.mark.parametrize("small", [tiny._small_v41, tiny._small_v4])
@pytest.mark.parametrize("size", ["50MB", "600MB", "2GB", "40GB"])
def test_planned_sizes_are_close_for_any_size(size, small):
    wanted, files = parse_size(size), tiny.small_tokenizer_files()
    config = tiny._tiny_config(small(files, real=False), files, wanted_bytes=wanted)
    tensors = released_tensors(config)
    assert tiny._folder_bytes(tensors) == pytest.approx(wanted, rel=0.03)
    assert config.get_text_config().n_routed_experts <= tiny.MOST_EXPERTS
    shards = plan_shards(tensors, part=shard_part, max_bytes=tiny.SHARD_BYTES)
    assert sum(map(len, shards.values())) == len(tensors)
    assert all(payload_bytes({name: tensors[name] for name in names}) <= 2e9 for names in shards.values())


def test_rows_of_a_large_packed_tensor_repeat_with_their_scales():
    rows, columns = 2 * tiny.PACKED_ELEMENTS // 256 + 40, 256
    tensors = {
        "layers.0.attn.wq_b.weight": ((rows, columns), torch.float8_e4m3fn),
        "layers.0.attn.wq_b.scale": ((-(-rows // 32), columns // 32), torch.float8_e8m0fnu),
    }
    weights = tiny.RandomWeights(tensors, seed=0)
    whole = {name: torch.cat([p.view(torch.uint8) for p in weights.pieces(name)]) for name in tensors}
    assert {name: tuple(t.shape) for name, t in whole.items()} == {name: shape for name, (shape, _) in tensors.items()}
    block = tiny.PACKED_ELEMENTS // 256
    weight, scale = whole.values()
    assert weight[block : 2 * block].equal(weight[:block]) and scale[block // 32 : block // 16].equal(
        scale[: block // 32]
    )
    assert weight[2 * block :].equal(weight[:40])


@pytest.mark.parametrize(
    ("text", "size"), [("2GB", 2 * 10**9), ("1.5 mb", 1_500_000), ("7K", 7_000), ("12B", 12), (5, 5), ("42", 42)]
)
def test_sizes(text, size):
    assert parse_size(text) == size


# ---- refusals, all before anything is written ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"family": "v3"}, r"family is 'v3'; accepted: v41, v4\."),
        ({"tokenizer": "tiny"}, r"tokenizer is 'tiny'; accepted: small, real\."),
        ({"seed": -1}, r"seed is -1; accepted: an integer >= 0\."),
        ({"seed": 1.5}, r"seed is 1\.5; accepted: an integer >= 0\."),
        (
            {"size": "2 elephants"},
            r"size is '2 elephants'; accepted: bytes, or a number with one of B, KB, MB, GB, TB\.",
        ),
        ({"size": "0"}, r"size is '0'; accepted: bytes, or"),
        ({"size": True}, r"size is True; accepted: bytes, or"),
        ({"size": "3MB"}, r"size is 3000000 bytes; accepted: at least 497\d{4} with this tokenizer\."),
    ],
)
def test_wrong_arguments_are_refused(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        make_tiny(tmp_path / "x", progress=False, **arguments)
    assert list(tmp_path.iterdir()) == []


def test_a_taken_folder_and_a_full_disk_are_refused(tmp_path, folder):
    before = digests(folder)
    with pytest.raises(OSError, match="exists and is not an empty folder"):
        make_tiny(folder, seed=9, progress=False)
    assert digests(folder) == before
    with pytest.raises(OSError, match="bytes free; 900000000016777216 are needed"):
        make_tiny(tmp_path / "x", size="900000TB", progress=False)
    assert list(tmp_path.iterdir()) == []
