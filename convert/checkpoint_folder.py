"""A checkpoint folder as it lies on disk, under released names: configuration, headers, and where each tensor is.

Reads any folder that the package loads: released, made by `convert hub`, or saved by `save_pretrained` (packed or float,
released or our own names). No tensor is read here.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from modeling_dsv4.checkpoint_map import (
    TensorEntry,
    check_index,
    check_index_files,
    map_checkpoint,
    read_index,
    read_json,
)
from modeling_dsv4.configuration_deepseek_v4 import Dsv4Config
from modeling_dsv4.configuration_deepseek_v41 import Dsv41Config
from modeling_dsv4.quantization import PACKED_DTYPES
from modeling_dsv4.weight_names import WeightNames

from .hub_layout import released_files
from .shards import INDEX_NAME

CONFIG_NAME, SINGLE_NAME = "config.json", "model.safetensors"
CONFIGS = {kind.model_type: kind for kind in (Dsv41Config, Dsv4Config)}
# Names as the model classes write them: language model alone, with a head, with a head and images, with images.
TABLES = (
    WeightNames("", ""),
    WeightNames("model."),
    WeightNames("model.language_model.", "model."),
    WeightNames("language_model.", ""),
)
_BANK = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)$")


@dataclass(frozen=True)
class Place:
    """Where a released tensor lies: a stored tensor, or one expert's matrix in a stored bank `[E, 2I, H]`, `[E, H, I]`."""

    entry: TensorEntry
    expert: int | None = None
    half: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        if self.expert is None:
            return self.entry.shape
        _, rows, columns = self.entry.shape
        return rows if self.half is None else rows // 2, columns

    def of(self, stored: torch.Tensor) -> torch.Tensor:
        """Return the view of the stored tensor that this place is."""
        if self.expert is None:
            return stored
        matrix = stored[self.expert]
        return matrix if self.half is None else matrix.chunk(2)[self.half]


class CheckpointFolder:
    r"""Configuration, headers and mapped tensors of a folder.

    Args:
        path (`str` or path): the folder.

    Raises:
        OSError: if it is no checkpoint folder, or a header or index is broken; names the file.
        ValueError: for a configuration that is not accepted, and for tensors that have no released name.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self.files = released_files(path)
        self.config_dict, self.config = read_config(self.path, self.files)
        self.tensors, self.entries = read_tensors(self.path, self.files)
        self.places = released_places(self.entries)

    @property
    def is_packed(self) -> bool:
        """Whether any tensor is stored in FP8 or FP4."""
        return any(entry.dtype in PACKED_DTYPES for entry in self.entries.values())

    @property
    def has_released_names(self) -> bool:
        """Whether every tensor is stored under its released name, one matrix an expert."""
        return all(place.entry.name == name for name, place in self.places.items())

    def read(self, name: str) -> torch.Tensor:
        """Return the tensor of a released name, a view of its file."""
        place = self.places[name]
        return place.of(self.tensors[place.entry.name])


def read_config(path: Path, files: dict[str, Path]) -> tuple[dict, Dsv41Config | Dsv4Config]:
    r"""Return the content of config.json and the configuration that it makes.

    Raises:
        OSError, ValueError: if it is missing, broken, or not of these models; names the file.
    """
    if CONFIG_NAME not in files:
        raise OSError(f"{path} has no {CONFIG_NAME}; accepted: a checkpoint folder.")
    content = read_json(files[CONFIG_NAME])
    family = content.get("model_type")
    if family not in CONFIGS:
        raise ValueError(f"{files[CONFIG_NAME]}: model_type is {family!r:.80}; accepted: {', '.join(CONFIGS)}.")
    try:
        return content, CONFIGS[family].from_dict(copy.deepcopy(content))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{files[CONFIG_NAME]}: {error}") from error


def read_tensors(path: Path, files: dict[str, Path]) -> tuple[dict[str, torch.Tensor], dict[str, TensorEntry]]:
    r"""Map the shards of a folder, and compare them with its index.

    Returns:
        tensors and entries by stored name.

    Raises:
        OSError: if there are no weights, a file is missing or broken, or the index disagrees with the files.
    """
    if SINGLE_NAME in files:  # transformers prefers it, too
        return map_checkpoint([str(files[SINGLE_NAME])])
    if INDEX_NAME not in files:
        raise OSError(f"{path} has neither {INDEX_NAME} nor {SINGLE_NAME}; accepted: weights in safetensors files.")
    weight_map = read_index(files[INDEX_NAME])
    shards = [str(files.get(name, path / name)) for name in sorted(set(weight_map.values()))]
    check_index_files(weight_map, shards)
    tensors, entries = map_checkpoint(shards)
    check_index(weight_map, entries)
    return tensors, entries


def released_places(entries: dict[str, TensorEntry]) -> dict[str, Place]:
    r"""Return where the tensors lie by released name; banks of experts are taken apart.

    Raises:
        ValueError: if names are unknown, or two are the same tensor; names tensor and file.
    """
    unknown = []
    for names in TABLES:
        ours = {stored: names.to_ours(stored) for stored in entries}
        missing = [stored for stored, name in ours.items() if name is None]
        if not missing:
            break
        unknown.append(missing)
    else:
        fewest = min(unknown, key=len)
        listed = ", ".join(f"{name} in {entries[name].file}" for name in fewest[:5])
        raise ValueError(f"{len(fewest)} tensors have no released name: {listed}.")
    places: dict[str, Place] = {}
    for stored, name in ours.items():
        for part, place in _parts(name, entries[stored]):
            released = names.to_released(part)
            if released in places:
                both = f"{stored} in {entries[stored].file} and {places[released].entry.name}"
                raise ValueError(f"{both} are the same tensor, {released}.")
            places[released] = place
    return places


def _parts(name: str, entry: TensorEntry) -> Iterator[tuple[str, Place]]:
    """The tensors that a stored one consists of: itself, or the matrices of a bank."""
    bank = _BANK.match(name)
    if bank is None:
        yield name, Place(entry)
        return
    if len(entry.shape) != 3 or 0 in entry.shape:
        raise ValueError(f"{entry.name} in {entry.file} has shape {list(entry.shape)}; accepted: [E, rows, columns].")
    kinds = ("gate", "up") if bank[2] == "gate_up_proj" else ("down",)
    for expert in range(entry.shape[0]):
        for half, kind in enumerate(kinds):
            yield f"{bank[1]}.{expert}.{kind}_proj.weight", Place(entry, expert, half if len(kinds) > 1 else None)
