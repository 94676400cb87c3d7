"""Writing of a checkpoint folder: safetensors shards streamed tensor by tensor, their index, and a folder that appears
only when it is complete. Knows nothing of models.

A shard's header needs names, dtypes and shapes only, so it is written first and the data follows as it is made: memory
holds one piece of one tensor, whatever the size of the shard.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path

import torch

from modeling_dsv4.checkpoint_map import DTYPES

INDEX_NAME = "model.safetensors.index.json"
DEFAULT_SHARD_BYTES = 2 * 10**9
# Room that must stay free on the disk beyond what is written: headers, index, file system.
SPARE_BYTES = 16 * 2**20

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Tensors = dict[str, tuple[tuple[int, ...], torch.dtype]]


def plan_shards(
    tensors: Tensors, *, part: Callable[[str], str], max_bytes: int = DEFAULT_SHARD_BYTES
) -> dict[str, list[str]]:
    r"""Distribute tensors over shards: a new shard for every part, further ones where a part exceeds `max_bytes`.

    Args:
        tensors: `{name: (shape, dtype)}`; tensors of a part follow each other.
        part: name of a tensor -> the part it belongs to.
        max_bytes (`int`, *optional*, defaults to 2e9): data of a shard; a larger tensor gets a shard of its own.

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
    total = sum(prod(shape) * dtype.itemsize for shape, dtype in tensors.values())
    weight_map = {name: file for file, names in shards.items() for name in names}
    write_json(
        folder / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    )


def write_json(file: Path, content: dict) -> None:
    """Write JSON as the release does: indented by two spaces, one newline at the end."""
    file.write_bytes((json.dumps(content, ensure_ascii=False, indent=2) + "\n").encode())


def check_target(target: str | os.PathLike, *, needed_bytes: int) -> None:
    r"""Check that a folder can be made; changes nothing.

    Args:
        target (`str` or path).
        needed_bytes (`int`): what will be written.

    Raises:
        OSError: if the target exists and is not an empty folder, or its disk has less room.
    """
    target = Path(os.path.abspath(target))
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise OSError(f"{target} exists and is not an empty folder; accepted: a new name or an empty folder.")
    existing = next(folder for folder in target.parents if folder.exists())
    free = shutil.disk_usage(existing).free
    if free < needed_bytes + SPARE_BYTES:
        raise OSError(f"{existing} has {free} bytes free; {needed_bytes + SPARE_BYTES} are needed for {target.name}.")


@contextmanager
def new_folder(target: str | os.PathLike, *, needed_bytes: int) -> Iterator[Path]:
    r"""Give a temporary folder beside `target` that becomes `target` when the block ends, or vanishes when it fails.

    Args:
        target (`str` or path): must not exist, or be an empty folder.
        needed_bytes (`int`): what will be written.

    Raises:
        OSError: before anything is written, if the target is taken or the disk has less room.
    """
    check_target(target, needed_bytes=needed_bytes)
    target = Path(os.path.abspath(target))
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.parent / f".{target.name}.{os.getpid()}.partial"
    temporary.mkdir()
    try:
        yield temporary
        if target.exists():
            target.rmdir()
        temporary.rename(target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
