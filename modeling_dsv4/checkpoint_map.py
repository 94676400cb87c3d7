"""Validated memory mapping of safetensors files.

The library's reader touches a page of every tensor and reports a broken file without naming it. A released checkpoint
has 96,085 tensors; mapping it here reads the headers only, checks them, and makes each tensor a view of the mapped
file: ten microseconds a tensor and no memory of its own. Mappings are copy-on-write: nothing ever reaches the file.

Format: 8 bytes little-endian header length, a JSON header `{name: {dtype, shape, data_offsets}}`, then the data.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
from collections import Counter
from dataclasses import dataclass
from math import prod

import torch

# Bound on a header and on a JSON file beside the shards, tested before either is read: a hostile one of this size takes
# 0.7 GB to parse. A released shard has 0.3 MB of header, the whole of V4-Pro in one file 22 MB, its index 13 MB.
MAX_HEADER_BYTES = 32_000_000
# Sizes and offsets are 64-bit and torch has at most 64 axes; beyond them a product of sizes takes hours.
MAX_SIZE, MAX_AXES = 2**63, 64

# A private, writable mapping. Linux sets memory aside for one and refuses it where there is less, unless it is told not to
# (MAP_NORESERVE, which not every Python names): an Engram table has 98 GB in one file.
_PRIVATE: dict = {"access": mmap.ACCESS_COPY}
if sys.platform == "linux":
    _NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
    _PRIVATE = {"flags": mmap.MAP_PRIVATE | _NO_RESERVE, "prot": mmap.PROT_READ | mmap.PROT_WRITE}

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies: file, dtype, shape, and its byte range inside the file."""

    name: str
    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


def read_header(file: str) -> dict[str, TensorEntry]:
    r"""Read and check the header of a safetensors file.

    Args:
        file (`str`): path.

    Returns:
        `dict[str, TensorEntry]` in file order.

    Raises:
        OSError: if the file is no safetensors file, is truncated, or its header contradicts it; names the file.
    """
    size = os.path.getsize(file)
    with open(file, "rb") as handle:
        prefix = handle.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > min(MAX_HEADER_BYTES, size - 8):
            raise OSError(
                f"{file}: header of {length} bytes in a file of {size} bytes; truncated, or not safetensors."
            )
        raw = handle.read(length)
    try:
        header = json.loads(raw, object_pairs_hook=_unique_keys)
        if not isinstance(header, dict):
            raise ValueError("it is no object")
        header.pop("__metadata__", None)
        entries = [_entry(name, item, file, 8 + length) for name, item in header.items()]
    except (ValueError, RecursionError) as error:
        raise OSError(f"{file}: broken safetensors header ({error}).") from error
    _check_layout(sorted(entries, key=lambda entry: (entry.start, entry.stop)), file, 8 + length, size)
    return {entry.name: entry for entry in entries}


def _unique_keys(pairs):
    found = dict(pairs)
    if len(found) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise ValueError(f"name given twice: {sorted(key for key, count in counts.items() if count > 1)[:5]}")
    return found


def _entry(name: str, item: dict, file: str, base: int) -> TensorEntry:
    fields = item if isinstance(item, dict) else {}
    code, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not (isinstance(shape, list) and isinstance(offsets, list) and len(offsets) == 2):
        raise ValueError(f"{name}: {item!r:.200} is no dtype, shape and two data_offsets")
    if not isinstance(code, str) or code not in DTYPES:
        raise ValueError(f"{name}: unknown dtype {code!r}")
    if len(shape) > MAX_AXES or not all(type(n) is int and 0 <= n < MAX_SIZE for n in (*shape, *offsets)):
        raise ValueError(f"{name}: shape {shape!r:.200} or offsets {offsets} are not sizes")
    (start, stop), shape, dtype = offsets, tuple(shape), DTYPES[code]
    if stop - start != prod(shape) * dtype.itemsize:
        raise ValueError(f"{name}: {stop - start} bytes for {code} {list(shape)}")
    return TensorEntry(name, file, dtype, shape, base + start, base + stop)


def _check_layout(entries: list[TensorEntry], file: str, position: int, size: int) -> None:
    for entry in entries:
        if entry.start != position:
            raise OSError(f"{file}: {entry.name} starts at byte {entry.start}, expected {position} (gap or overlap).")
        if entry.stop > size:
            raise OSError(f"{file}: {size} bytes, but {entry.name} ends at byte {entry.stop} (truncated).")
        position = entry.stop
    if position != size:
        raise OSError(f"{file}: {size} bytes, but the header describes {position} (trailing bytes).")


def map_file(file: str, entries: dict[str, TensorEntry]) -> dict[str, torch.Tensor]:
    r"""Return the tensors of a checked file as views of one private mapping; no byte is read.

    Args:
        file (`str`): path.
        entries (`dict[str, TensorEntry]`): from `read_header(file)`.

    Returns:
        `dict[str, torch.Tensor]`, CPU, each with a storage object of its own.
    """
    with open(file, "rb") as handle:
        mapping = mmap.mmap(handle.fileno(), 0, **_PRIVATE)
    tensors = {}
    for name, entry in entries.items():
        count = entry.stop - entry.start
        if count == 0:
            tensors[name] = torch.empty(entry.shape, dtype=entry.dtype)
            continue
        data = torch.frombuffer(mapping, dtype=torch.uint8, count=count, offset=entry.start)
        if entry.start % entry.dtype.itemsize:  # legal in the format, but no tensor can view it
            data = data.clone()
        tensors[name] = data.view(entry.dtype).view(entry.shape)
    return tensors


def map_checkpoint(files: list[str]) -> tuple[dict[str, torch.Tensor], dict[str, TensorEntry]]:
    r"""Map all shards of a checkpoint.

    Args:
        files (`list[str]`): paths of the shards.

    Returns:
        tensors and entries by name.

    Raises:
        OSError: if a file is broken or a name appears in two files; names file and tensor.
    """
    entries: dict[str, TensorEntry] = {}
    headers = {file: read_header(file) for file in files}
    for file, header in headers.items():
        for name, entry in header.items():
            if name in entries:
                raise OSError(f"tensor {name} is in {entries[name].file} and in {file}.")
            entries[name] = entry
    tensors = {}
    for file, header in headers.items():
        tensors.update(map_file(file, header))
    return tensors, entries


def read_json(file: str | os.PathLike) -> dict:
    r"""Read a JSON object of a checkpoint folder, such as config.json.

    Raises:
        OSError: if the file is missing, larger than `MAX_HEADER_BYTES`, or holds no JSON object; names the file.
    """
    size = os.path.getsize(file)
    if size > MAX_HEADER_BYTES:
        raise OSError(f"{file} has {size} bytes; accepted: at most {MAX_HEADER_BYTES}.")
    with open(file, "rb") as handle:
        raw = handle.read(MAX_HEADER_BYTES)
    try:
        content = json.loads(raw, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise OSError(f"{file} is no valid JSON ({error}).") from error
    if not isinstance(content, dict):
        raise OSError(f"{file} holds a {type(content).__name__}; accepted: a JSON object.")
    return content


def check_json_files(folder: str | os.PathLike) -> None:
    """Check the JSON files that transformers reads of a local folder, before it reads them; nothing for another name.

    Raises:
        OSError: for one that is too large, a config.json or an index that is broken; names the file.
    """
    for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
        file = os.path.join(folder, name)
        if name.endswith(".safetensors.index.json"):
            read_index(file)
        elif name == "config.json":
            read_json(file)
        elif name.endswith(".json") and os.path.getsize(file) > MAX_HEADER_BYTES:
            raise OSError(f"{file} has {os.path.getsize(file)} bytes; accepted: at most {MAX_HEADER_BYTES}.")


def read_index(file: str | os.PathLike) -> dict[str, str]:
    r"""Return the `weight_map` of a `model.safetensors.index.json`: tensor name -> file name.

    Raises:
        OSError: if the file is no index, or names a file outside its own folder; before any shard is opened.
    """
    content = read_json(file)
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not isinstance(content.get("metadata"), dict):
        raise OSError(f"{file} is no index; accepted: {{metadata: {{...}}, weight_map: {{tensor: file}}}}.")
    check_file_names(weight_map)
    return weight_map


def check_file_names(weight_map: dict[str, str]) -> None:
    """Refuse an index that names files outside the checkpoint's folder. Links are followed: Hub caches consist of them.

    Raises:
        OSError: naming the tensor and the file.
    """
    for name, shard in weight_map.items():
        # A backslash or a colon is a folder or a drive elsewhere.
        parts = shard.split("/") if isinstance(shard, str) else [""]
        if {"", ".", ".."} & set(parts) or set("\\:\0") & set(shard) or not shard.endswith(".safetensors"):
            raise OSError(
                f"the index names {name} in {shard!r:.200}; accepted: a .safetensors file in the checkpoint's own folder."
            )


def check_index_files(weight_map: dict[str, str], files: list[str]) -> None:
    """Compare the file names of an index with the shards found, before any is opened.

    Raises:
        OSError: for a shard that is missing or lies outside the checkpoint's folder; names it and a tensor of it.
    """
    check_file_names(weight_map)
    for file in files:
        if not os.path.isfile(file):
            held = [name for name, shard in weight_map.items() if os.path.basename(shard) == os.path.basename(file)]
            raise OSError(f"{file} is missing; the index names {len(held)} tensors in it: {', '.join(held[:3])}.")


def check_index(weight_map: dict[str, str], entries: dict[str, TensorEntry]) -> None:
    """Compare an index (`weight_map` of `model.safetensors.index.json`) with what the shards hold.

    Raises:
        OSError: naming the tensors and files that disagree.
    """
    for name, shard in weight_map.items():
        if name not in entries:
            raise OSError(f"the index names {name} in {shard}, which does not hold it.")
        actual = os.path.basename(entries[name].file)
        if actual != os.path.basename(shard):
            raise OSError(f"the index names {name} in {shard}, but it is in {actual}.")
    extra = [name for name in entries if name not in weight_map]
    if extra:
        raise OSError(
            f"{entries[extra[0]].file} holds {len(extra)} tensors that the index does not name: {extra[:5]}."
        )
