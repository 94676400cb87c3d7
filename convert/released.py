"""`convert released`: anything the package loads, in the released layout.

A tensor that was not trained keeps its bytes: what is stored packed is copied, and a float tensor that equals what the
checkpoint it was trained from (`base`) gives in the same dtype takes the bytes of that checkpoint. What differs is
rounded by the contract's rules (section 2) into the format of its place. Goes shard by shard, in pieces of rows: memory
holds a piece, whatever the size of a tensor.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from functools import lru_cache
from math import prod
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from modeling_dsv4.fp_codecs import (
    dequantize_fp4_rows,
    dequantize_fp8_tiles,
    quantize_fp4_rows,
    quantize_fp8_tiles,
)
from modeling_dsv4.quantization import PACKED_DTYPES
from modeling_dsv4.weight_names import OPTIONAL_PARTS

from .atomic_folder import new_folder
from .checkpoint_folder import CONFIG_NAME, CheckpointFolder
from .inventory import (
    ROW_BLOCK,
    Formats,
    is_scale,
    payload_bytes,
    released_tensors,
    scale_of,
    shard_part,
    weight_of,
)
from .released_config import released_config
from .released_report import ReleasedReport
from .shards import INDEX_NAME, plan_shards, write_index, write_json, write_shard
from .verify import expected_tensors

# Elements handled together.
PIECE_ELEMENTS = 1 << 18
DEFAULT_SHARD_BYTES = 5 * 10**9
# Files beside float weights that belong to training or to remote code, not to a checkpoint.
LEFT_SUFFIXES = (".py", ".bin", ".pt", ".pth", ".safetensors")


def to_released(
    src: str | os.PathLike,
    dst: str | os.PathLike,
    *,
    base: str | os.PathLike | None = None,
    bf16: bool = False,
    max_shard_bytes: int | None = None,
    progress: bool = True,
) -> ReleasedReport:
    r"""Write a checkpoint in the released layout.

    Args:
        src (`str` or path): released, made by `convert hub`, or saved by `save_pretrained`, packed or float.
        dst (`str` or path): folder to make; must not exist or be empty.
        base (`str` or path, *optional*): the packed checkpoint that `src` was trained from. Tensors that are equal in
            both keep its bytes, parts that `src` lacks (drafts, vision) come from it, and so do shards and other files.
        bf16 (`bool`, *optional*, defaults to `False`): write trained matrices in BF16, not in FP8 and FP4.
        max_shard_bytes (`int`, *optional*): largest shard. `None` keeps the shards of `base` or of a packed `src`, and
            means 5 GB otherwise.
        progress (`bool`, *optional*, defaults to `True`): show a bar.

    Returns:
        `ReleasedReport`.

    Raises:
        ValueError: for a bad `max_shard_bytes`, and for tensors that are missing, of another shape than those of `base`,
            or not finite.
        OSError: if a folder cannot be read or made. Nothing is left behind.
    """
    if max_shard_bytes is not None and max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes is {max_shard_bytes}; accepted: at least 1.")
    conversion = Conversion(CheckpointFolder(src), None if base is None else CheckpointFolder(base), bf16)
    shards = conversion.shards(max_shard_bytes)
    files, report = conversion.other_files(), conversion.report
    sizes = {name: path.stat().st_size for name, path in files.items()}
    with new_folder(dst, needed_bytes=conversion.largest_bytes + sum(sizes.values())) as folder:
        for name, path in files.items():
            _copy(path, folder / name)
        with tqdm(
            total=conversion.largest_bytes, unit="B", unit_scale=True, desc=str(dst), disable=not progress
        ) as bar:
            for file, names in shards.items():
                for written in conversion.write(folder, file, names):
                    bar.update(written)
            bar.total = bar.n  # what became smaller was counted as it was
        conversion.write_metadata(folder)
    return report


class Conversion:
    r"""Where the bytes of every released tensor come from, and the writing of them.

    Args:
        source (`CheckpointFolder`): what is converted.
        base (`CheckpointFolder` or `None`), bf16 (`bool`): see `to_released`.

    Raises:
        ValueError: if the source is incomplete, or is no relative of `base`.
    """

    def __init__(self, source: CheckpointFolder, base: CheckpointFolder | None, bf16: bool):
        self.source, self.base, self.bf16 = source, base, bf16
        _refuse_incomplete(source, base)
        if base is not None:
            _refuse_incomplete(base)
            _refuse_strangers(source, base)
        self.report = ReleasedReport(str(source.path), None if base is None else str(base.path))
        # The folder whose shards and files are kept: one that is in the released layout already.
        self.model = base or (source if source.is_packed and source.has_released_names else None)
        self.formats = Formats.of((base or source).config)
        self.layout = self._layout()
        self.written: dict[str, str] = {}
        self.written_bytes, self.has_packed, self.copied_whole = 0, False, True
        # Values and scales of a matrix follow each other: it is compared once, and a small one rounded once.
        self._is_same = lru_cache(maxsize=1)(self._has_same_numbers)
        self._rows = lru_cache(maxsize=1)(self._quantised_rows)

    def _layout(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of every tensor that is written, in the order of the release."""
        released = released_tensors(self.source.config, self.formats)
        if self.base is not None:
            released = released_tensors(self.base.config, self.formats) | released
        is_float = self.base is None and "quantization_config" not in self.source.config_dict
        layout = {}
        for name, found in released.items():
            stored = self.base if self.base is not None and name in self.base.places else self.source
            if name in stored.places and not is_float:
                layout[name] = stored.places[name].shape, stored.places[name].entry.dtype
            elif is_float or not (is_scale(name) and weight_of(name) in stored.places):  # none of a BF16 matrix
                layout[name] = found
        return layout

    @property
    def largest_bytes(self) -> int:
        """Bytes of all tensors if every matrix that may be written in BF16 is."""
        return sum(self._largest(name) for name in self.layout)

    def _largest(self, name: str) -> int:
        shape, dtype = self.layout[name]
        size = prod(shape) * dtype.itemsize
        is_float = name in self.source.places and self.source.places[name].entry.dtype not in PACKED_DTYPES
        return size * {torch.int8: 4, torch.float8_e4m3fn: 2}.get(dtype, 1) if self.bf16 and is_float else size

    def shards(self, max_bytes: int | None) -> dict[str, list[str]]:
        """Return the names of every file to write: those of a folder that is in the layout, or planned ones."""
        if max_bytes is None and self.model is not None:
            shards: dict[str, list[str]] = {}
            for name in (n for n in self.layout if n in self.model.places):
                file = os.path.relpath(self.model.places[name].entry.file, self.model.path)
                shards.setdefault(file, []).append(name)
            shards[file] += [name for name in self.layout if name not in self.model.places]
            return shards
        self.copied_whole = False
        sizes = {name: ((self._largest(name),), torch.uint8) for name in self.layout}
        return plan_shards(sizes, part=shard_part, max_bytes=max_bytes or DEFAULT_SHARD_BYTES)

    def other_files(self) -> dict[str, Path]:
        """Return the files beside weights, index and configuration that are kept; the others are listed."""
        owner = self.base or self.source
        weights = {place.entry.file for place in owner.places.values()}
        files = {n: p for n, p in owner.files.items() if str(p) not in weights and n not in (INDEX_NAME, CONFIG_NAME)}
        if self.model is None:
            files = {
                name: path for name, path in files.items() if not name.endswith(LEFT_SUFFIXES) and "/" not in name
            }
        weights = {place.entry.file for place in self.source.places.values()} | {INDEX_NAME, CONFIG_NAME}
        self.report.left = [n for n, p in self.source.files.items() if n not in files and not {n, str(p)} & weights]
        return files

    # ---- one shard ---------------------------------------------------------------------------------------------------

    def write(self, folder: Path, file: str, names: list[str]) -> Iterator[int]:
        """Write one shard, yielding bytes as they are written; a shard whose tensors are all kept is copied whole."""
        origins = {name: self._origin(name) for name in names}
        tensors = {}
        for name, origin in origins.items():
            shape, dtype = self.layout[name]
            if origin is None and self.bf16 and dtype in PACKED_DTYPES:
                if not is_scale(name):
                    tensors[name] = self.source.places[name].shape, torch.bfloat16
                    self.report.not_quantised.append(name.rpartition(".")[0])
            else:
                tensors[name] = shape, dtype
        whole, path = self._whole_file(origins), folder / file
        if whole is not None:
            _copy(whole, path)
            yield payload_bytes(tensors)
        else:
            self.copied_whole = False
            path.parent.mkdir(parents=True, exist_ok=True)
            yield from write_shard(path, tensors, lambda name: self._pieces(name, origins[name], tensors[name][1]))
        self.report.count(origins, self.source, self.base)
        self.written |= dict.fromkeys(tensors, file)
        self.written_bytes += payload_bytes(tensors)
        self.has_packed |= any(dtype in PACKED_DTYPES for _, dtype in tensors.values())

    def _whole_file(self, origins: dict[str, CheckpointFolder | None]) -> str | None:
        """The file that holds exactly these tensors, all of them kept, in the folder whose shards are kept."""
        if self.model is None or set(origins.values()) != {self.model}:
            return None
        files = {self.model.places[name].entry.file for name in origins}
        file = files.pop()
        held = sum(place.entry.file == file for place in self.model.places.values())
        return file if not files and held == len(origins) else None

    def _origin(self, name: str) -> CheckpointFolder | None:
        """The folder whose bytes are taken, `None` where they are made from the source's floats."""
        weight = weight_of(name)
        if weight not in self.source.places:
            return self.base
        stored = self.source.places[weight].entry.dtype
        if self.base is not None and name in self.base.places and self._is_same(weight):
            return self.base
        return self.source if stored == self.layout[weight][1] else None

    def _has_same_numbers(self, weight: str) -> bool:
        """Whether source and base give the same numbers, bit for bit, in the dtype of the source."""
        ours, theirs = self.source.read(weight), self.base.read(weight)
        scale = scale_of(weight)
        if ours.dtype == theirs.dtype:
            pairs = [(ours, theirs)]
            if ours.dtype in PACKED_DTYPES:
                pairs.append((self.source.read(scale), self.base.read(scale)))
            return all(_same_bytes(a, b) for pair in pairs for a, b in zip(*map(_flat_pieces, pair), strict=True))
        if theirs.dtype not in PACKED_DTYPES:
            pieces = zip(_flat_pieces(ours), _flat_pieces(theirs), strict=True)
            return all(_same_bytes(a, b.to(a.dtype)) for a, b in pieces)
        scales, tile = self.base.read(scale), self._tile(weight)
        for rows, scale_rows in _row_pieces(ours.shape, tile[0]):
            if not _same_bytes(ours[rows], _dequantise(theirs[rows], scales[scale_rows], tile, ours.dtype)):
                return False
        return True

    def _pieces(self, name: str, origin: CheckpointFolder | None, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        if origin is not None:
            yield from _flat_pieces(origin.read(name))
            return
        source = self.source.read(weight_of(name))
        if dtype not in PACKED_DTYPES and not is_scale(name):
            for piece in _flat_pieces(source):
                yield self._noted(name, dtype, piece, piece.to(dtype))
            return
        tile = self._tile(weight_of(name))
        for rows, _ in _row_pieces(source.shape, tile[0]):
            values, scale = self._rows(weight_of(name), rows.start, rows.stop)
            if is_scale(name):
                yield scale
            else:
                self._noted(name, dtype, source[rows], _dequantise(values, scale, tile, torch.float32))
                yield values

    def _quantised_rows(self, weight: str, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self.source.read(weight)[start:stop]
        if self.formats.scale != torch.float8_e8m0fnu:
            raise ValueError(f"{weight} was trained, but scale_fmt is 'float'; accepted: 'ue8m0', or BF16 (--bf16).")
        if not rows.isfinite().all():
            raise ValueError(f"{weight} in {self.source.places[weight].entry.file} has values that are not finite.")
        if self.layout[weight][1] == torch.int8:
            return quantize_fp4_rows(rows)
        return quantize_fp8_tiles(rows, block_size=self._tile(weight))

    def _tile(self, weight: str) -> tuple[int, int]:
        """Rows and columns that share a scale: of a table and of FP4 one row."""
        one_row = weight.endswith("engram.embed.weight") or self.layout[weight][1] == torch.int8
        return (1, ROW_BLOCK) if one_row else self.formats.tile

    def _noted(self, name: str, dtype: torch.dtype, source: torch.Tensor, written: torch.Tensor) -> torch.Tensor:
        """Add the squares of a piece, and of what rounding changed in it, to the report."""
        exact = source.double()
        error = (written.double() - exact).square().sum().item()
        self.report.add_error(name, dtype, error, exact.square().sum().item())
        return written

    # ---- metadata ----------------------------------------------------------------------------------------------------

    def write_metadata(self, folder: Path) -> None:
        """Write index and config.json; where they say what the kept files say, those are copied."""
        is_single = self.copied_whole and INDEX_NAME not in self.model.files
        if self.copied_whole and not is_single:
            shutil.copyfile(self.model.files[INDEX_NAME], folder / INDEX_NAME)
        elif not is_single:
            write_index(folder, self.written, self.written_bytes)
        content, self.report.config = released_config(
            self.source, self.base, is_packed=self.has_packed, floats=self.report.not_quantised
        )
        if self.model is not None and content == self.model.config_dict:
            shutil.copyfile(self.model.files[CONFIG_NAME], folder / CONFIG_NAME)
        else:
            write_json(folder / CONFIG_NAME, content)


def _refuse_incomplete(source: CheckpointFolder, base: CheckpointFolder | None = None) -> None:
    """Raise unless a folder has what its config promises; parts that a class lacks may be in the base."""
    expected = expected_tensors(source.config_dict, source.config)
    missing, unknown = sorted(expected.keys() - source.places.keys()), sorted(source.places.keys() - expected.keys())
    if base is not None:
        missing = [name for name in missing if name not in base.places or not _is_optional(name)]
    for names, problem in ((missing, "are missing from"), (unknown, "are not in a model with the config of")):
        if names:
            raise ValueError(f"{len(names)} tensors {problem} {source.path}: {', '.join(names[:5])}.")
    for name, place in source.places.items():
        shape, accepted = expected[name]
        if place.shape != shape or place.entry.dtype not in accepted:
            raise ValueError(
                f"{place.entry.name} in {place.entry.file} is {place.entry.dtype} {list(place.shape)}; accepted: "
                f"{' or '.join(map(str, accepted))} {list(shape)}."
            )


def _refuse_strangers(source: CheckpointFolder, base: CheckpointFolder) -> None:
    if not (base.is_packed and base.has_released_names):
        raise ValueError(
            f"base {base.path} holds floats or other names; accepted: a packed folder with released names."
        )
    if source.config.model_type != base.config.model_type:
        raise ValueError(
            f"base is a {base.config.model_type}; accepted: {source.config.model_type}, as {source.path}."
        )
    lacking = [n for n in base.places if weight_of(n) not in source.places]
    lost = [name for name in lacking if not _is_optional(name)]
    if lost:
        raise ValueError(f"{len(lost)} tensors of base are not in {source.path}: {', '.join(lost[:5])}.")
    for name, place in source.places.items():
        if name in base.places:
            theirs = base.places[name]
            packed = theirs.entry.dtype == torch.int8 != place.entry.dtype
            shape = (*theirs.shape[:-1], 2 * theirs.shape[-1]) if packed else theirs.shape
            if place.shape != shape:
                raise ValueError(f"{name} has shape {list(place.shape)}; accepted: {list(shape)}, as in {base.path}.")


def _is_optional(name: str) -> bool:
    return any(pattern.search(name) for pattern in OPTIONAL_PARTS.values())


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    # torch compares bytes thirty times more slowly.
    return np.array_equal(*(x.contiguous().view(torch.uint8).numpy() for x in (a, b)))


def _flat_pieces(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tensor.reshape(-1).split(PIECE_ELEMENTS)


def _row_pieces(shape: tuple[int, ...], tile_rows: int) -> Iterator[tuple[slice, slice]]:
    """Yield consecutive rows of a matrix, whole tiles, with the rows of their scales."""
    rows, columns = shape
    step = max(1, PIECE_ELEMENTS // columns // tile_rows) * tile_rows
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        yield slice(start, stop), slice(start // tile_rows, -(-stop // tile_rows))


def _dequantise(values: torch.Tensor, scale: torch.Tensor, tile: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    if values.dtype == torch.int8:
        return dequantize_fp4_rows(values, scale, dtype=dtype)
    return dequantize_fp8_tiles(values, scale, block_size=tile, dtype=dtype)
