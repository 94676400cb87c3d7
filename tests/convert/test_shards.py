"""Streamed shards read back with the safetensors library."""

import json

import pytest
import torch
from safetensors import safe_open

from convert.shards import INDEX_NAME, plan_shards, write_shard, write_shards
from modeling_dsv4.checkpoint_map import check_index, map_checkpoint


def example():
    """Tensors of every stored dtype, with odd sizes, a scalar and an empty one."""
    torch.manual_seed(0)
    values = {
        "a.z": torch.randn(3, 5).to(torch.float8_e4m3fn),
        "a.scale": torch.randint(0, 255, (3, 1), dtype=torch.uint8).view(torch.float8_e8m0fnu),
        "b.w": torch.randn(7, 3, 2).to(torch.bfloat16),
        "b.f": torch.randn(5),
        "c.packed": torch.randint(-128, 127, (4, 3), dtype=torch.int8),
        "c.none": torch.zeros(0, 4),
        "c.one": torch.tensor(2.5),
    }
    return values, {name: (tuple(value.shape), value.dtype) for name, value in values.items()}


def by_rows(values, name, rows=2):
    return [values[name]] if values[name].dim() == 0 else list(values[name].split(rows))


def part(name):
    return name.split(".")[0]


def test_the_library_reads_what_was_streamed(tmp_path):
    values, tensors = example()
    plan = plan_shards(tensors, part=part, max_bytes=10**9)
    written = sum(write_shards(tmp_path, tensors, plan, lambda name: by_rows(values, name)))
    assert list(plan) == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    index = json.loads((tmp_path / INDEX_NAME).read_text())
    assert index["metadata"]["total_size"] == written == sum(value.nbytes for value in values.values())
    assert index["weight_map"] == {name: file for file, names in plan.items() for name in names}
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / file, framework="pt") as handle:
            assert handle.metadata() == {"format": "pt"}
            read = handle.get_tensor(name)
        assert (read.dtype, read.shape) == (values[name].dtype, values[name].shape)
        assert read.flatten().view(torch.uint8).equal(values[name].flatten().view(torch.uint8))


def test_every_tensor_starts_at_a_multiple_of_its_item_size(tmp_path):
    values, tensors = example()
    plan = plan_shards(tensors, part=lambda name: "all", max_bytes=10**9)
    list(write_shards(tmp_path, tensors, plan, lambda name: [values[name]]))
    _, entries = map_checkpoint([str(tmp_path / file) for file in plan])
    check_index(json.loads((tmp_path / INDEX_NAME).read_text())["weight_map"], entries)
    assert {entry.start % entry.dtype.itemsize for entry in entries.values()} == {0}


def test_parts_are_split_at_the_bound_and_never_joined():
    size = {name: ((n,), torch.int8) for name, n in (("a.0", 6), ("a.1", 5), ("a.2", 20), ("a.3", 1), ("b.0", 1))}
    plan = plan_shards(size, part=part, max_bytes=10)
    assert list(plan.values()) == [["a.0"], ["a.1"], ["a.2"], ["a.3"], ["b.0"]]
    plan = plan_shards(size, part=part, max_bytes=11)
    assert list(plan.values()) == [["a.0", "a.1"], ["a.2"], ["a.3"], ["b.0"]]


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([torch.zeros(2, 3)], r"w: its pieces have 24 bytes; accepted: 48\."),
        ([torch.zeros(4, 3), torch.zeros(1, 3)], r"w: its pieces have 60 bytes; accepted: 48\."),
        ([torch.zeros(4, 3, dtype=torch.float16)], r"w: a piece is torch.float16; accepted: torch.float32\."),
    ],
)
def test_pieces_that_do_not_fit_raise(tmp_path, pieces, message):
    with pytest.raises(ValueError, match=message):
        list(write_shard(tmp_path / "x.safetensors", {"w": ((4, 3), torch.float32)}, lambda name: pieces))
