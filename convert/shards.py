"""Writing of a checkpoint: safetensors shards streamed tensor by tensor, and their index. Knows nothing of models.

A shard's header needs names, dtypes and shapes only, so it is written first and the data follows as it is made: memory
holds one piece of one tensor, whatever the size of the shard.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from math import prod
from pathlib import Path

import torch

from modeling_dsv4.checkpoint_map import DTYPES

INDEX_NAME = "model.safetensors.index.json"

SIZE_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Tensors = dict[str, tuple[tuple[int, ...], torch.dtype]]


def parse_size(text: str | int) -> int:
    r"""Return the bytes that a size names: an integer, or a number with B, KB, MB, GB or TB (powers of 1000).

    Raises:
        ValueError: if it is neither, or less than a byte.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?B?)\s*", str(text).upper())
    unit = match and SIZE_UNITS.get(match[2] if match[2].endswith("B") or not match[2] else match[2] + "B")
    size = int(float(match[1]) * unit) if unit and not isinstance(text, bool) else 0
    if not size:
        raise ValueError(
            f"size is {text!r}; accepted: bytes, or a number with one of {', '.join(list(SIZE_UNITS)[1:])}."
        )
    return size


def plan_shards(tensors: Tensors, *, part: Callable[[str], str], max_bytes: int) -> dict[str, list[str]]:
    r"""Distribute tensors over shards: a new shard for every part, further ones where a part exceeds `max_bytes`.

    Args:
        tensors: `{name: (shape, dtype)}`; tensors of a part follow each other.
        part: name of a tensor -> the part it belongs to.
        max_bytes (`int`): data of a shard; a larger tensor gets a shard of its own.

    Returns:
        `{file name: names}`, files named `model-00001-of-0000N.safetensors`.
    """
    shards: list[list[str]] = []
    current, filled = None, 0
    for name, (shape, dtype) in tensors.items():
        size = prod(shape) * dtype.itemsize
        if part(name) != current or filled + size > max_bytes:
            shards.append([])
            current, filled = part(name), 0
        shards[-1].append(name)
        filled += size
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": names for i, names in enumerate(shards, start=1)}


def write_shard(file: Path, tensors: Tensors, pieces: Callable[[str], Iterable[torch.Tensor]]) -> Iterator[int]:
    r"""Write one safetensors file, yielding the bytes of every piece as it is written.

    Wide dtypes come first, so that every tensor starts at a multiple of its item size; names are sorted within a width.

    Args:
        file (`Path`): must not exist.
        tensors: `{name: (shape, dtype)}` of this shard.
        pieces: name -> consecutive parts of the tensor along its first axis, in order.

    Raises:
        ValueError: if the pieces of a tensor have another dtype or do not add up to its size.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name][1].itemsize, name))
    header, position = {"__metadata__": {"format": "pt"}}, 0
    for name in order:
        shape, dtype = tensors[name]
        stop = position + prod(shape) * dtype.itemsize
        header[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [position, stop]}
        position = stop
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with open(file, "xb") as handle:
        handle.write(len(encoded).to_bytes(8, "little") + encoded)
        for name in order:
            start, stop = header[name]["data_offsets"]
            missing = stop - start
            for piece in pieces(name):
                if piece.dtype != tensors[name][1]:
                    raise ValueError(f"{name}: a piece is {piece.dtype}; accepted: {tensors[name][1]}.")
                handle.write(piece.contiguous().flatten().view(torch.uint8).numpy().data)
                missing -= piece.nbytes
                yield piece.nbytes
            if missing:
                raise ValueError(f"{name}: its pieces have {stop - start - missing} bytes; accepted: {stop - start}.")


def write_shards(
    folder: Path, tensors: Tensors, shards: dict[str, list[str]], pieces: Callable[[str], Iterable[torch.Tensor]]
) -> Iterator[int]:
    r"""Write all shards and `model.safetensors.index.json`, yielding the bytes of every piece as it is written.

    Args:
        folder (`Path`): exists.
        tensors: `{name: (shape, dtype)}`.
        shards: from `plan_shards`.
        pieces: see `write_shard`.
    """
    for file, names in shards.items():
        yield from write_shard(folder / file, {name: tensors[name] for name in names}, pieces)
    weight_map = {name: file for file, names in shards.items() for name in names}
    write_index(folder, weight_map, sum(prod(shape) * dtype.itemsize for shape, dtype in tensors.values()))


def write_index(folder: Path, weight_map: dict[str, str], total_bytes: int) -> None:
    """Write `model.safetensors.index.json`: tensor name -> file, and the bytes of all tensors."""
    content = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(folder / INDEX_NAME, content)


def write_json(file: Path, content: dict) -> None:
    """Write JSON as the release does: indented by two spaces, one newline at the end."""
    file.write_bytes((json.dumps(content, ensure_ascii=False, indent=2) + "\n").encode())
