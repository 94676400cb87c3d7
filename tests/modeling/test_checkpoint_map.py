"""The checked mapping of safetensors files: header faults by name, equality with the library's reader, no writes."""

import hashlib
import json
import os
import random
import sys
import tracemalloc
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from modeling_dsv4.checkpoint_map import (
    DTYPES,
    MAX_HEADER_BYTES,
    check_index,
    check_index_files,
    map_checkpoint,
    map_file,
    read_header,
)
from tests.golden_cases import CHECKPOINT_V4, CHECKPOINT_V41

SHARDS = [str(path) for folder in (CHECKPOINT_V41, CHECKPOINT_V4) for path in sorted(folder.glob("*.safetensors"))]


def item(dtype, shape, start, stop):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def write(path, header, data=b"", length=None):
    """A file with this header (a dict, or raw bytes) and these data bytes; `length` overrides the declared one."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + data)
    return str(path)


TWO = {"first": item("F32", [2], 0, 8), "second": item("U8", [3], 8, 11)}
DATA = bytes(range(11))


def same_bytes(a, b):
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and a.reshape(-1).view(torch.uint8).equal(b.reshape(-1).view(torch.uint8))
    )


# ---- what is right ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", SHARDS, ids=lambda f: Path(f).parent.name + "/" + Path(f).name)
def test_mapped_tensors_equal_the_librarys_reader(file):
    mapped, expected = map_file(file, read_header(file)), load_file(file)
    assert mapped.keys() == expected.keys()
    for name, tensor in mapped.items():
        assert same_bytes(tensor, expected[name]), name


def test_every_dtype_is_read_as_the_library_writes_it(tmp_path):
    tensors = {}
    for code, dtype in DTYPES.items():
        values = torch.arange(24, dtype=torch.uint8)
        tensors[code] = (values > 3) if dtype == torch.bool else values.view(dtype).clone()
    file = str(tmp_path / "all.safetensors")
    save_file(tensors, file, metadata={"format": "pt"})
    entries = read_header(file)
    mapped = map_file(file, entries)
    for code, tensor in tensors.items():
        assert entries[code].dtype == DTYPES[code] and same_bytes(mapped[code], tensor), code


def test_entries_say_where_tensors_lie(tmp_path):
    file = write(tmp_path / "a.safetensors", {"__metadata__": {"format": "pt"}, **TWO}, DATA)
    entries = read_header(file)
    data_start = os.path.getsize(file) - 11
    assert {n: (e.start - data_start, e.stop - data_start, e.shape, e.file) for n, e in entries.items()} == {
        "first": (0, 8, (2,), file),
        "second": (8, 11, (3,), file),
    }


def test_header_order_need_not_be_file_order(tmp_path):
    file = write(tmp_path / "a.safetensors", dict(reversed(TWO.items())), DATA)
    mapped = map_file(file, read_header(file))
    assert mapped["second"].tolist() == [8, 9, 10]
    assert bytes(mapped["first"].view(torch.uint8).tolist()) == DATA[:8]


def test_zero_size_and_scalar_tensors(tmp_path):
    header = {
        "empty": item("F32", [0, 4], 0, 0),
        "scalar": item("F32", [], 0, 4),
        "also empty": item("I8", [3, 0], 4, 4),
    }
    mapped = map_file(*(lambda f: (f, read_header(f)))(write(tmp_path / "a.safetensors", header, b"\0\0\x80?")))
    assert mapped["empty"].shape == (0, 4) and mapped["also empty"].shape == (3, 0)
    assert mapped["scalar"].shape == () and mapped["scalar"].item() == 1.0


@pytest.mark.parametrize("header", [{}, {"empty": item("F32", [0], 0, 0)}], ids=["no tensors", "only empty ones"])
def test_file_without_data(tmp_path, header):
    file = write(tmp_path / "a.safetensors", header)
    mapped = map_file(file, read_header(file))
    assert list(mapped) == list(header)


def test_unaligned_tensors_are_copied_exactly(tmp_path):
    """The library pads headers so that this does not happen; other writers need not."""
    values = torch.tensor([1.5, -2.25])
    for padding in range(8):
        header = {"byte": item("U8", [1], 0, 1), "floats": item("F32", [2], 1, 9)}
        raw = json.dumps(header).encode() + b" " * padding
        file = write(tmp_path / f"{padding}.safetensors", raw, b"\7" + values.numpy().tobytes())
        mapped = map_file(file, read_header(file))
        assert mapped["floats"].equal(values) and mapped["byte"].tolist() == [7]


def test_each_tensor_has_a_storage_of_its_own(tmp_path):
    file = write(tmp_path / "a.safetensors", TWO, DATA)
    mapped = map_file(file, read_header(file))
    assert mapped["first"].untyped_storage().nbytes() == 8
    assert mapped["first"].untyped_storage().data_ptr() != mapped["second"].untyped_storage().data_ptr()


def test_writes_never_reach_the_file(tmp_path):
    file = write(tmp_path / "a.safetensors", TWO, DATA)
    before = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    tensors, _ = map_checkpoint([file])
    tensors["first"].fill_(3.0)
    tensors["second"].add_(1)
    assert tensors["first"].tolist() == [3.0, 3.0] and tensors["second"].tolist() == [9, 10, 11]
    assert hashlib.sha256(Path(file).read_bytes()).hexdigest() == before
    # Another mapping, made after the write, sees the file.
    again, _ = map_checkpoint([file])
    assert again["second"].tolist() == [8, 9, 10]


def test_tensors_outlive_the_file_name(tmp_path):
    file = write(tmp_path / "a.safetensors", TWO, DATA)
    tensors, _ = map_checkpoint([file])
    os.remove(file)
    assert tensors["second"].tolist() == [8, 9, 10]


def test_mapping_reads_no_data(tmp_path):
    """A sparse file far larger than what is measured: only its header is read."""
    size = 1 << 33
    header = {"huge": item("U8", [size], 0, size)}
    file = Path(write(tmp_path / "a.safetensors", header))
    length = file.stat().st_size
    with open(file, "r+b") as handle:
        handle.truncate(length + size)
    tracemalloc.start()
    tensors, _ = map_checkpoint([str(file)])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20
    assert tensors["huge"].shape == (size,) and tensors["huge"][-1].item() == 0


# ---- header faults -----------------------------------------------------------------------------------------------------

BIG = 2**62
HEADER_FAULTS = {  # name: (header, data, declared length or None, words of the message)
    "empty object where data is": ({}, b"\0", None, "trailing bytes"),
    "not JSON": (b"{'first': 1}", b"", None, "broken safetensors header"),
    "not UTF-8": (b'{"\xff\xfe": 1}', b"", None, "broken safetensors header"),
    "a list": (b"[]", b"", None, "broken safetensors header (it is no object)"),
    "nested too deeply": (b"[" * 100_000, b"", None, "broken safetensors header"),
    "unknown dtype": ({"first": item("F8_E5M2", [1], 0, 1)}, b"\0", None, "first: unknown dtype 'F8_E5M2'"),
    "dtype is no string": ({"first": item(["F32"], [1], 0, 4)}, b"\0" * 4, None, "first"),
    "no dtype": ({"first": {"shape": [1], "data_offsets": [0, 1]}}, b"\0", None, "first"),
    "no shape": ({"first": {"dtype": "U8", "data_offsets": [0, 1]}}, b"\0", None, "first"),
    "no offsets": ({"first": {"dtype": "U8", "shape": [1]}}, b"\0", None, "first"),
    "entry is a number": ({"first": 5}, b"", None, "first"),
    "three offsets": ({"first": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1, 2]}}, b"\0", None, "first"),
    "negative size": ({"first": item("U8", [-1], 0, -1)}, b"", None, "first: shape [-1]"),
    "two negative sizes": ({"first": item("U8", [-1, -1], 0, 1)}, b"\0", None, "first: shape [-1, -1]"),
    "fractional size": ({"first": item("U8", [1.0], 0, 1)}, b"\0", None, "first: shape [1.0]"),
    "boolean size": ({"first": item("U8", [True], 0, 1)}, b"\0", None, "first: shape [True]"),
    "offsets as words": ({"first": item("U8", [1], "0", "1")}, b"\0", None, "first"),
    "too few bytes for the shape": ({"first": item("F32", [3], 0, 8)}, DATA[:8], None, "first: 8 bytes for F32 [3]"),
    "too many bytes for the shape": ({"first": item("F32", [1], 0, 8)}, DATA[:8], None, "first: 8 bytes for F32 [1]"),
    "size beyond 64 bits": ({"first": item("U8", [BIG, BIG], 0, 1)}, b"\0", None, "first: 1 bytes for U8"),
    "starts late": ({"first": item("U8", [2], 1, 3)}, b"\0" * 3, None, "first starts at byte"),
    "gap": ({**TWO, "second": item("U8", [3], 9, 12)}, DATA + b"\0", None, "second starts at byte"),
    "overlap": ({**TWO, "second": item("U8", [3], 7, 10)}, DATA[:10], None, "second starts at byte"),
    "the same bytes twice": (
        {"a": item("U8", [3], 0, 3), "b": item("U8", [3], 0, 3)},
        b"123",
        None,
        "b starts at byte",
    ),
    "offsets reversed": ({"first": item("U8", [1], 1, 0)}, b"\0", None, "first"),
    "truncated data": (TWO, DATA[:-1], None, "second ends at byte"),
    "no data": (TWO, b"", None, "first ends at byte"),
    "trailing bytes": (TWO, DATA + b"\0", None, "trailing bytes"),
    "declared length too short": (TWO, DATA, 10, "broken safetensors header"),
    "declared length beyond the file": (TWO, DATA, 10_000, "header of 10000 bytes in a file of"),
    "declared length of 2^64 - 1": (TWO, DATA, 2**64 - 1, "truncated, or not safetensors"),
    "length zero": (b"", DATA, 0, "broken safetensors header"),
    "name given twice": (
        b'{"first": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}, '
        b'"first": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}}',
        b"\0\0",
        None,
        "name given twice: ['first']",
    ),
}


@pytest.mark.skipif(sys.platform != "linux", reason="other systems set no memory aside for a mapping")
def test_a_file_larger_than_all_memory_is_mapped(tmp_path):
    with open("/proc/meminfo") as lines:
        kilobytes = {name: int(rest.split()[0]) for name, rest in (line.split(":") for line in lines)}
    size = (kilobytes["MemTotal"] + kilobytes["SwapTotal"]) * 2048
    file = write(tmp_path / "x.safetensors", {"a": item("U8", [size], 0, size)})
    os.truncate(file, os.path.getsize(file) + size)  # a hole: nothing is on the disk
    tensor = map_file(file, read_header(file))["a"]
    tensor[size // 2] = 7
    assert tensor[size // 2] == 7 and tensor[-1] == 0 and len(tensor) == size


@pytest.mark.parametrize("fault", HEADER_FAULTS)
def test_broken_header_names_file_and_tensor(tmp_path, fault):
    header, data, length, words = HEADER_FAULTS[fault]
    file = write(tmp_path / "broken.safetensors", header, data, length)
    with pytest.raises(OSError) as error:
        map_checkpoint([file])
    message = str(error.value)
    print(f"{fault} -> {message.replace(str(tmp_path) + os.sep, '')[:200]}")
    assert file in message and words in message


@pytest.mark.parametrize("size", range(9))
def test_broken_tiny_file_is_named(tmp_path, size):
    file = tmp_path / "tiny.safetensors"
    file.write_bytes(b"\x02" + b"\0" * (size - 1) if size else b"")
    with pytest.raises(OSError, match="tiny.safetensors"):
        read_header(str(file))


def test_broken_missing_file_and_folder_are_named(tmp_path):
    with pytest.raises(OSError, match="absent.safetensors"):
        map_checkpoint([str(tmp_path / "absent.safetensors")])
    (tmp_path / "folder.safetensors").mkdir()
    with pytest.raises(OSError, match="folder.safetensors"):
        map_checkpoint([str(tmp_path / "folder.safetensors")])


def test_name_in_two_files_is_named(tmp_path):
    first = write(tmp_path / "1.safetensors", TWO, DATA)
    second = write(tmp_path / "2.safetensors", {"second": item("U8", [1], 0, 1)}, b"\0")
    with pytest.raises(OSError) as error:
        map_checkpoint([first, second])
    assert all(part in str(error.value) for part in ("second", first, second))


def test_huge_declared_header_allocates_nothing(tmp_path):
    file = tmp_path / "a.safetensors"
    size = MAX_HEADER_BYTES + 100
    with open(file, "wb") as handle:
        handle.write((size - 8).to_bytes(8, "little"))
        handle.truncate(size)  # the declared length fits the (sparse) file, but not the bound
    tracemalloc.start()
    with pytest.raises(OSError, match="a.safetensors"):
        read_header(str(file))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


# ---- fuzzing -----------------------------------------------------------------------------------------------------------


def reads_or_names(file):
    """Either the file is refused with an `OSError` that names it, or it reads as the library reads it."""
    try:
        mapped, _ = map_checkpoint([file])
    except OSError as error:
        assert file in str(error)
        return False
    expected = load_file(file)
    assert mapped.keys() == expected.keys()
    assert all(same_bytes(mapped[name], expected[name]) for name in mapped)
    return True


@pytest.mark.parametrize("seed", range(8))
def test_flipped_bytes_are_refused_or_read_as_the_library_does(tmp_path, seed):
    random_source = random.Random(seed)
    good = Path(write(tmp_path / "good.safetensors", json.dumps(TWO).encode() + b"  ", DATA)).read_bytes()
    outcomes = set()
    for turn in range(60):
        data = bytearray(good)
        for _ in range(random_source.choice((1, 1, 2, 5))):
            data[random_source.randrange(len(data))] = random_source.randrange(256)
        if random_source.random() < 0.2:
            del data[random_source.randrange(len(data)) :]
        file = tmp_path / f"{turn}.safetensors"
        file.write_bytes(bytes(data))
        outcomes.add(reads_or_names(str(file)))
    assert False in outcomes


SIZES = st.lists(st.integers(0, 4), max_size=3)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shapes=st.lists(st.tuples(st.sampled_from(sorted(DTYPES)), SIZES), max_size=5), shuffle=st.randoms())
def test_any_legal_file_reads_as_the_library_reads_it(tmp_path, shapes, shuffle):
    header, data = {}, b""
    for index, (code, shape) in enumerate(shapes):
        count = DTYPES[code].itemsize
        for size in shape:
            count *= size
        header[f"t{index}"] = item(code, shape, len(data), len(data) + count)
        data += bytes(shuffle.randrange(2) for _ in range(count))
    names = list(header)
    shuffle.shuffle(names)
    raw = json.dumps({name: header[name] for name in names}).encode()
    file = write(tmp_path / "legal.safetensors", raw + b" " * (-len(raw) % 8), data)
    mapped, entries = map_checkpoint([file])
    assert set(mapped) == set(entries) == set(header)
    for name, (code, shape) in zip(header, shapes, strict=True):
        assert mapped[name].dtype == DTYPES[code] and list(mapped[name].shape) == shape
        start, stop = header[name]["data_offsets"]
        assert bytes(mapped[name].reshape(-1).view(torch.uint8).tolist()) == data[start:stop]


# ---- index --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def shards(tmp_path):
    files = [
        write(tmp_path / "1.safetensors", TWO, DATA),
        write(tmp_path / "2.safetensors", {"third": item("U8", [1], 0, 1)}, b"\0"),
    ]
    return files, map_checkpoint(files)[1]


def test_index_that_agrees_passes(shards):
    files, entries = shards
    index = {"first": "1.safetensors", "second": "1.safetensors", "third": "2.safetensors"}
    check_index_files(index, files)
    check_index(index, entries)


INDEX_FAULTS = {
    "names a tensor that is nowhere": ({"fourth": "2.safetensors"}, "fourth in 2.safetensors, which does not hold it"),
    "names the wrong file": ({"first": "2.safetensors"}, "first in 2.safetensors, but it is in 1.safetensors"),
    "leaves a tensor out": ({"third": None}, "2.safetensors holds 1 tensors that the index does not name: ['third']"),
}


@pytest.mark.parametrize("fault", INDEX_FAULTS)
def test_broken_index_names_tensor_and_file(shards, fault):
    _, entries = shards
    index = {"first": "1.safetensors", "second": "1.safetensors", "third": "2.safetensors"}
    changes, words = INDEX_FAULTS[fault]
    index = {name: shard for name, shard in {**index, **changes}.items() if shard}
    with pytest.raises(OSError) as error:
        check_index(index, entries)
    print(f"index {fault} -> {str(error.value).replace(os.path.dirname(entries['first'].file) + os.sep, '')}")
    assert words in str(error.value)


def test_broken_index_names_a_missing_file(shards, tmp_path):
    files, _ = shards
    index = {"first": "1.safetensors", "fifth": "3.safetensors"}
    with pytest.raises(OSError, match=r"3.safetensors is missing; the index names 1 tensors in it: fifth"):
        check_index_files(index, [*files, str(tmp_path / "3.safetensors")])


@pytest.mark.parametrize("shard", ["../1.safetensors", "a/../../1.safetensors", "/etc/passwd", "..\\1.safetensors", 3])
def test_broken_index_may_not_leave_the_folder(shards, shard):
    files, _ = shards
    with pytest.raises(OSError) as error:
        check_index_files({"first": shard}, files)
    assert "first" in str(error.value) and repr(shard) in str(error.value)
