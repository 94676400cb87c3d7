"""Loading a released-layout checkpoint: map the files, check every tensor, hand each to its place.

Replaces one step of transformers' loader (a static method made for it). Everything is compared before anything is
loaded: a tensor that is missing, unknown, of the wrong dtype or shape raises and names tensor and file. Packed tensors
stay the file's own bytes; a dequantised model is filled a tensor at a time.
"""

from __future__ import annotations

import copy
import re
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter, WeightRenaming
from transformers.utils import cached_file, logging

from .checkpoint_map import TensorEntry, check_index, map_checkpoint
from .fp_codecs import dequantize_fp4_rows, dequantize_fp8_tiles
from .host_tensors import host_modules
from .ngram_hash import build_token_map
from .quantization import PACKED_DTYPES, loaded_dtype
from .weight_names import OPTIONAL_PARTS, WeightNames

logger = logging.get_logger(__name__)

_EXPERT_BANK = re.compile(r"\.mlp\.experts\.(gate_up_proj|down_proj)$")
_EXPERT = re.compile(r"\.mlp\.experts\.\d+\.")


class TableRenaming(WeightRenaming):
    r"""The name table as one of transformers' weight transforms, for saving and for checkpoints it reads itself.

    Args:
        names (`WeightNames`): of the model class.
        reverse (`bool`, *optional*, defaults to `False`): from our names to released ones.
    """

    __slots__ = ("names", "reverse")

    def __init__(self, names: WeightNames, reverse: bool = False):
        super().__init__("(?!)", "(?!)")  # the base class matches patterns; this table needs none
        self.names, self.reverse = names, reverse

    def rename_source_key(self, source_key: str) -> tuple[str, None]:
        renamed = self.names.to_released(source_key) if self.reverse else self.names.to_ours(source_key)
        if renamed is not None and renamed != source_key:
            self._was_used = True
        return renamed or source_key, None

    def reverse_transform(self) -> TableRenaming:
        return TableRenaming(self.names, not self.reverse)

    def __deepcopy__(self, memo) -> TableRenaming:
        return TableRenaming(self.names, self.reverse)


def weight_transforms(names: WeightNames) -> list:
    """Return the transforms of one model class: the table, and the fusing of per-expert float matrices."""
    merge = MergeModulelist(dim=0)
    gate_up = ["mlp.experts.*.gate_proj.weight", "mlp.experts.*.up_proj.weight"]
    return [
        TableRenaming(names),
        WeightConverter(gate_up, "mlp.experts.gate_up_proj", operations=[merge, Concatenate(dim=1)]),
        WeightConverter("mlp.experts.*.down_proj.weight", "mlp.experts.down_proj", operations=[merge]),
    ]


class ReleasedCheckpoint:
    r"""The tensors of a checkpoint under a model's names, checked against what the model expects.

    Args:
        model (`PreTrainedModel`): on the meta device, packed or float.
        files (`list[str]`): safetensors shards.
        names (`WeightNames`): of the model class.
        weight_map (`dict[str, str]`, *optional*): of the index, compared with the shards.

    Raises:
        OSError: for a broken file or index. ValueError: for missing, unknown or unfitting tensors.
    """

    def __init__(self, model, files: list[str], names: WeightNames, weight_map: dict[str, str] | None = None):
        tensors, entries = map_checkpoint(files)
        if weight_map:
            check_index(weight_map, entries)
        self.names = names
        self.expected: dict[str, torch.Tensor] = model.state_dict()
        self.tensors: dict[str, torch.Tensor] = {}
        self.entries: dict[str, TensorEntry] = {}
        self.left: dict[str, int] = {}
        unknown = []
        for name, tensor in tensors.items():
            ours = names.to_ours(name)
            part = self._absent_part(name, ours)
            if part is not None:
                self.left[part] = self.left.get(part, 0) + 1
            elif ours is None or not self._has_place(ours):
                unknown.append(entries[name])
            elif ours in self.tensors:
                raise ValueError(f"{name} and {self.entries[ours].name} are the same tensor ({ours}).")
            else:
                self.tensors[ours], self.entries[ours] = tensor, entries[name]
        self._refuse_unknown(unknown)

    def _absent_part(self, name: str, ours: str | None) -> str | None:
        """The optional part that `name` belongs to, if the model does not have it."""
        if ours in self.expected:
            return None
        released = name.removeprefix("model.")
        return next((part for part, pattern in OPTIONAL_PARTS.items() if pattern.search(released)), None)

    def _has_place(self, ours: str) -> bool:
        if ours in self.expected:
            return True
        if ours.endswith("_scale_inv"):  # of a weight that the model holds as floats
            return self._has_place(ours.removesuffix("_scale_inv"))
        bank = _EXPERT.sub(".mlp.experts.", ours).replace(".gate_proj.weight", ".gate_up_proj")
        bank = bank.replace(".up_proj.weight", ".gate_up_proj").replace(".down_proj.weight", ".down_proj")
        return bank != ours and bank in self.expected

    @staticmethod
    def _refuse_unknown(unknown: list[TensorEntry]) -> None:
        if unknown:
            listed = ", ".join(f"{entry.name} ({entry.file})" for entry in unknown[:5])
            raise ValueError(f"{len(unknown)} tensors of the checkpoint have no place in the model: {listed}.")

    def load_all(self, ignore_mismatched_sizes: bool = False) -> dict[str, torch.Tensor]:
        r"""Return every tensor the model expects, by its name; packed ones are views of the files.

        Raises:
            ValueError: naming what is missing, or tensor and file of what does not fit.
        """
        self._refuse_missing()
        for name in self.expected:
            if not _EXPERT_BANK.search(name):
                self._check(name, self.expected[name], ignore_mismatched_sizes)
        loaded = {}
        for name, parameter in logging.tqdm(self.expected.items(), desc="Reading weights", disable=None):
            if _EXPERT_BANK.search(name) and name not in self.tensors:
                loaded[name] = self._fused_bank(name, parameter)
            else:
                loaded[name] = self._float_or_stored(name, parameter.dtype)
        return loaded

    def _refuse_missing(self) -> None:
        missing = [name for name in self.expected if name not in self.tensors and not _EXPERT_BANK.search(name)]
        for name, parameter in self.expected.items():
            if _EXPERT_BANK.search(name) and name not in self.tensors:
                missing += [s for e in range(len(parameter)) for s in _bank_sources(name, e) if s not in self.tensors]
        missing += [
            f"{name}_scale_inv"
            for name, tensor in self.tensors.items()
            if tensor.dtype in PACKED_DTYPES and name.endswith(".weight") and f"{name}_scale_inv" not in self.tensors
        ]
        if missing:
            listed = ", ".join(self.names.to_released(name) or name for name in sorted(set(missing))[:5])
            raise ValueError(f"{len(set(missing))} tensors are missing from the checkpoint: {listed}.")

    def _check(self, name: str, parameter: torch.Tensor, ignore_shape: bool = False) -> None:
        """Raise unless the stored tensor can fill `parameter`."""
        tensor, entry = self.tensors[name], self.entries[name]
        where = f"{entry.name} in {entry.file}"
        shape = list(tensor.shape)
        if self._is_dequantised(name, parameter.dtype):
            if tensor.dtype == torch.int8:
                shape[-1] *= 2
        else:
            loaded_dtype(where, tensor.dtype, parameter.dtype)
        if shape != list(parameter.shape) and not ignore_shape:
            raise ValueError(f"{where} has shape {shape}; accepted: {list(parameter.shape)}.")

    def _is_dequantised(self, name: str, expected: torch.dtype) -> bool:
        return self.tensors[name].dtype in PACKED_DTYPES and expected not in PACKED_DTYPES

    def _float_or_stored(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        tensor = self.tensors[name]
        if not self._is_dequantised(name, dtype):
            return tensor.to(loaded_dtype(name, tensor.dtype, dtype))
        scale = self.tensors[f"{name}_scale_inv"]
        if tensor.dtype == torch.int8:
            rows = (*tensor.shape[:-1], -(-2 * tensor.shape[-1] // 32))
            return dequantize_fp4_rows(tensor, self._scale_of(name, scale, rows), dtype=dtype)
        tile = self._tile(name, tensor, scale)
        return dequantize_fp8_tiles(tensor, scale, block_size=tile, dtype=dtype)

    def _scale_of(self, name: str, scale: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        if tuple(scale.shape) != tuple(shape):
            entry = self.entries[f"{name}_scale_inv"]
            raise ValueError(f"{entry.name} in {entry.file} has shape {list(scale.shape)}; accepted: {list(shape)}.")
        return scale

    def _tile(self, name: str, tensor: torch.Tensor, scale: torch.Tensor) -> tuple[int, int]:
        """Tile of an FP8 matrix: rows of a table have a scale each, dense layers the configured tile."""
        rows, cols = (1, 32) if name.endswith("engram.embedding.weight") else self.block_size
        self._scale_of(name, scale, (-(-tensor.shape[0] // rows), -(-tensor.shape[1] // cols)))
        return rows, cols

    block_size = (32, 32)

    def _fused_bank(self, name: str, parameter: torch.Tensor) -> torch.Tensor:
        """Fill `[E, 2I, H]` or `[E, H, I]` from the matrices of each expert."""
        bank = torch.empty(parameter.shape, dtype=parameter.dtype)
        for expert in range(len(bank)):
            sources = _bank_sources(name, expert)
            for source, place in zip(sources, bank[expert].chunk(len(sources)), strict=True):
                self._check(source, torch.empty(place.shape, dtype=place.dtype, device="meta"))
                place.copy_(self._float_or_stored(source, parameter.dtype))
        return bank


def _bank_sources(name: str, expert: int) -> list[str]:
    stem, _, kind = name.rpartition(".")
    parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
    return [f"{stem}.{expert}.{part}.weight" for part in parts]


class ReleasedCheckpointMixin:
    """`PreTrainedModel` with the loader above; a class names its table as `weight_names`."""

    weight_names: WeightNames

    @staticmethod
    def _load_pretrained_model(model, state_dict, checkpoint_files, load_config, expected_keys=None):
        files = checkpoint_files or []
        if state_dict is not None or not files or not all(file.endswith(".safetensors") for file in files):
            return PreTrainedModel._load_pretrained_model(model, state_dict, files, load_config, expected_keys)
        weight_map = (load_config.sharded_metadata or {}).get("weight_map")
        checkpoint = ReleasedCheckpoint(model, files, model.weight_names, weight_map)
        if load_config.hf_quantizer is not None:
            checkpoint.block_size = tuple(load_config.hf_quantizer.quantization_config.weight_block_size)
        tensors = checkpoint.load_all(load_config.ignore_mismatched_sizes)
        for part, count in checkpoint.left.items():
            logger.warning(f"{type(model).__name__} has no {part}: {count} tensors of the checkpoint stay on disk.")
        on_host = _assign_host_tensors(model, tensors)
        info, offload_index = PreTrainedModel._load_pretrained_model(
            model, tensors, files, load_config, expected_keys=list(tensors)
        )
        info.missing_keys -= on_host
        return info, offload_index

    @staticmethod
    def _finalize_model_loading(model, load_config, loading_info):
        found = copy.copy(loading_info)
        model._adjust_missing_and_unexpected_keys(found)
        problems = {
            "missing": sorted(set(found.missing_keys) - set(model.all_tied_weights_keys)),
            "unknown": sorted(found.unexpected_keys),
            "of another shape": [] if load_config.ignore_mismatched_sizes else sorted(map(str, found.mismatched_keys)),
            "not converted": sorted(found.conversion_errors),
        }
        problems = {kind: names for kind, names in problems.items() if names}
        if problems:
            listed = "; ".join(f"{kind}: {', '.join(names[:5])} ({len(names)})" for kind, names in problems.items())
            raise ValueError(f"{load_config.pretrained_model_name_or_path} does not fit the model: {listed}.")
        # Saving uses the registered transforms of the class, also when the loader needed none.
        if hasattr(model, "_weight_conversions"):
            del model._weight_conversions
        info = PreTrainedModel._finalize_model_loading(model, load_config, loading_info)
        model._build_token_map(load_config)
        return info

    def _build_token_map(self, load_config) -> None:
        """Build the Engram token map from the checkpoint's own tokenizer, if the model needs one."""
        if not self.config.get_text_config().needs_token_map:
            return
        folder, options = load_config.pretrained_model_name_or_path, load_config.download_kwargs or {}
        file = folder and cached_file(folder, "tokenizer.json", _raise_exceptions_for_missing_entries=False, **options)
        if not file:
            logger.warning(
                f"{folder} has no tokenizer.json; call model.set_tokenizer(tokenizer) before the first use."
            )
            return
        from tokenizers import Tokenizer

        self.set_token_map(build_token_map(Tokenizer.from_file(file)))


def _assign_host_tensors(model, tensors: dict[str, Any]) -> set[str]:
    """Give host modules their tensors, take them out of `tensors`, and return their names."""
    given = set()
    for path, module in host_modules(model).items():
        for name in module.host_names():
            key = f"{path}.{name}"
            module.assign(name, tensors.pop(key))
            given.add(key)
    return given
