"""Loading a released-layout checkpoint: map the files, check every tensor, hand each to its place.

Replaces one step of transformers' loader (a static method made for it). Everything is compared before anything is
loaded: a tensor that is missing, unknown, of the wrong dtype or shape raises and names tensor and file. Packed tensors
stay the file's own bytes; a dequantised model is filled a tensor at a time.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter, WeightRenaming
from transformers.dynamic_module_utils import custom_object_save
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.utils import cached_file, logging

from .checkpoint_map import TensorEntry, check_index, check_index_files, check_json_files, map_checkpoint
from .configuration_common import PACKED_METHOD
from .fp_codecs import dequantize_fp4_rows, dequantize_fp8_tiles
from .host_tensors import host_modules
from .ngram_hash import token_map_digest
from .quantization import PACKED_DTYPES, SCALE_DTYPES, loaded_dtype, register_quantizer
from .token_map import STORED_MAP, TOKEN_MAP_FILES, read_token_map, token_map_text
from .weight_names import OPTIONAL_PARTS, WeightNames

logger = logging.get_logger(__name__)

# The parts that a class may leave on disk: what they are for, and what loads them.
LEFT_PARTS = {
    "drafts": "the drafter, which speeds generation up; from_pretrained(..., use_mtp=True) or generate(use_mtp=True) loads it",
    "prediction head": "the prediction head, which makes logits; the ForCausalLM and ForConditionalGeneration classes load it",
    "vision": "the vision tower, which reads images; AutoModelForImageTextToText loads it",
}
_EXPERT_BANK = re.compile(r"\.mlp\.experts\.(gate_up_proj|down_proj)$")
_EXPERT = re.compile(r"\.mlp\.experts\.\d+\.")
_EXPERT_MATRIX = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight$")


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


def register_models(*model_classes: type) -> None:
    """Register the weight transforms of model classes, and the quantiser that their checkpoints ask for."""
    for model_class in model_classes:
        transforms = weight_transforms(model_class.weight_names)
        register_checkpoint_conversion_mapping(model_class.__name__, transforms, overwrite=True)
    register_quantizer()


@dataclasses.dataclass(frozen=True)
class MadeTensor:
    """A tensor that transformers' loader makes when it places it, so that one at a time is in memory (as its slices do)."""

    make: Callable[[], torch.Tensor]
    dtype: torch.dtype
    shape: tuple[int, ...]

    def __getitem__(self, index) -> torch.Tensor:
        return self.make()[index]

    def get_shape(self) -> list[int]:
        return list(self.shape)


class ReleasedCheckpoint:
    r"""The tensors of a checkpoint under a model's names, checked against what the model expects.

    Args:
        model (`PreTrainedModel`): on the meta device, packed or float.
        tensors (`dict[str, torch.Tensor]`): by the names of the files (or any names that the table knows).
        entries (`dict[str, TensorEntry]`): where each tensor lies, for messages.
        quantization (`Dsv4QuantizationConfig` or `None`): of the checkpoint; `None` for one of floats.
        source (`str`): folder, for messages; empty for a state dict.

    Raises:
        ValueError: for unknown tensors, and for packed ones without a quantization.
    """

    def __init__(self, model, tensors, entries: dict[str, TensorEntry], quantization, source: str):
        self.names: WeightNames = model.weight_names
        self.optional_parts: dict[str, re.Pattern] = model.optional_parts
        self.source = source
        self.block_size = tuple(quantization.weight_block_size) if quantization else (32, 32)
        self.expected: dict[str, torch.Tensor] = model.state_dict()
        self.tensors: dict[str, torch.Tensor] = {}
        self.entries: dict[str, TensorEntry] = {}
        self.left: dict[str, int] = {}
        unknown = []
        for name, tensor in tensors.items():
            ours = self.names.to_ours(name)
            part = self._absent_part(name, ours)
            if part is not None:
                self.left[part] = self.left.get(part, 0) + 1
            elif ours is None or not self._has_place(ours):
                unknown.append(entries[name])
            elif ours in self.tensors:
                raise ValueError(
                    f"{_where(entries[name])} and {_where(self.entries[ours])} are the same tensor, {ours}."
                )
            else:
                self.tensors[ours], self.entries[ours] = tensor, entries[name]
        self._refuse_unknown(unknown)
        if quantization is None:
            self._refuse_packed()

    def _absent_part(self, name: str, ours: str | None) -> str | None:
        """The optional part that `name` belongs to, if the model does not have it."""
        if ours is not None and self._has_place(ours):
            return None
        released = name.removeprefix("model.")
        return next((part for part, pattern in self.optional_parts.items() if pattern.search(released)), None)

    def _has_place(self, ours: str) -> bool:
        if ours in self.expected:
            return True
        if ours.endswith("_scale_inv"):  # of a weight that the model holds as floats
            return self._has_place(ours.removesuffix("_scale_inv"))
        found = _place_in_bank(ours)
        return found is not None and found[0] in self.expected

    @staticmethod
    def _refuse_unknown(unknown: list[TensorEntry]) -> None:
        if unknown:
            listed = ", ".join(map(_where, unknown[:5]))
            raise ValueError(f"{len(unknown)} tensors of the checkpoint have no place in the model: {listed}.")

    def _refuse_packed(self) -> None:
        for name, tensor in self.tensors.items():
            if tensor.dtype in PACKED_DTYPES:
                raise ValueError(
                    f"{_where(self.entries[name])} is packed ({tensor.dtype}), but the config has no "
                    "quantization_config; accepted: the released config.json, or float tensors."
                )

    def load_all(self, ignore_mismatched_sizes: bool) -> dict[str, torch.Tensor | MadeTensor]:
        r"""Return every tensor the model expects, by its name: a view of the files, or what makes another form of it.

        Raises:
            ValueError: naming what is missing, or tensor and file of what does not fit; before anything is read.
        """
        sources = {name: self._sources(name) for name in self.expected}
        wanted = self._wanted(sources)
        self._refuse_missing(wanted)
        for name, parameter in self.expected.items():
            shape = list(parameter.shape) if sources[name] == [name] else _expert_shape(name, parameter)
            ignored = ignore_mismatched_sizes and sources[name] == [name] and parameter.dtype not in PACKED_DTYPES
            for source in sources[name]:
                self._check(source, shape, parameter.dtype, ignored)
        self._refuse_unused(wanted)
        loaded = {}
        for name, parameter in self.expected.items():
            if sources[name] != [name]:
                make = partial(self._fused_bank, sources[name], parameter)
                loaded[name] = MadeTensor(make, parameter.dtype, tuple(parameter.shape))
            else:
                loaded[name] = self._float_or_stored(name, parameter.dtype)
        return loaded

    def _sources(self, name: str) -> list[str]:
        """The stored tensors that fill a parameter: itself, or the matrices of every expert of a bank."""
        if name in self.tensors or not _EXPERT_BANK.search(name):
            return [name]
        stem, _, kind = name.rpartition(".")
        parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
        return [f"{stem}.{e}.{part}.weight" for e in range(len(self.expected[name])) for part in parts]

    def _wanted(self, sources: dict[str, list[str]]) -> set[str]:
        """The stored tensors that have a use, scales included."""
        wanted = set()
        for name, parameter in self.expected.items():
            wanted.update(sources[name])
            packed = (s for s in sources[name] if s in self.tensors and self._is_dequantised(s, parameter.dtype))
            wanted.update(f"{source}_scale_inv" for source in packed)
        return wanted

    def _refuse_missing(self, wanted: set[str]) -> None:
        missing = sorted(wanted - self.tensors.keys())
        if missing:
            listed = ", ".join(self.names.to_released(name) or name for name in missing[:5])
            raise ValueError(f"{len(missing)} tensors are missing from {self.source or 'the checkpoint'}: {listed}.")

    def _refuse_unused(self, wanted: set[str]) -> None:
        unused = sorted(self.tensors.keys() - wanted)
        if unused:
            listed = ", ".join(_where(self.entries[name]) for name in unused[:5])
            raise ValueError(
                f"{len(unused)} tensors have no use (more experts than the config has, or a second form of a weight): "
                f"{listed}."
            )

    def _check(self, name: str, shape: list[int], dtype: torch.dtype, ignore_shape: bool = False) -> None:
        """Raise unless the stored tensor can fill `shape` and `dtype`."""
        tensor, where = self.tensors[name], _where(self.entries[name])
        stored = list(tensor.shape)
        if self._is_dequantised(name, dtype):
            accepted = (torch.float8_e4m3fn, torch.int8) if _EXPERT.search(name) else (torch.float8_e4m3fn,)
            if tensor.dtype not in accepted:
                raise ValueError(f"{where} is stored as {tensor.dtype}; accepted: {', '.join(map(str, accepted))}.")
            if tensor.dtype == torch.int8:
                stored[-1:] = [2 * size for size in stored[-1:]]
        else:
            loaded_dtype(where, tensor.dtype, dtype)
        if stored != shape and not (ignore_shape and len(stored) == len(shape)):
            raise ValueError(f"{where} has shape {stored}; accepted: {shape}.")
        if self._is_dequantised(name, dtype):
            self._check_scale(name, stored)

    def _check_scale(self, name: str, shape: list[int]) -> None:
        """Raise unless the scale fits a weight of `shape` `[O, I]`."""
        scale = self.tensors[f"{name}_scale_inv"]
        where = _where(self.entries[f"{name}_scale_inv"])
        if scale.dtype not in SCALE_DTYPES.values():
            accepted = ", ".join(map(str, SCALE_DTYPES.values()))
            raise ValueError(f"{where} is stored as {scale.dtype}; accepted: {accepted}.")
        rows, cols = self._tile(name)
        accepted = [-(-shape[0] // rows), -(-shape[1] // cols)]
        if list(scale.shape) != accepted:
            raise ValueError(f"{where} has shape {list(scale.shape)}; accepted: {accepted}.")

    def _is_dequantised(self, name: str, expected: torch.dtype) -> bool:
        """Whether bytes are stored where the model holds floats, in a place for which the release has a scale."""
        packed = self.tensors[name].dtype in PACKED_DTYPES and expected not in PACKED_DTYPES
        return packed and self.names.to_released(f"{name}_scale_inv") is not None

    def _tile(self, name: str) -> tuple[int, int]:
        """Rows and columns that share a scale: of a table and of FP4 one row, else the configured tile."""
        one_row = name.endswith("engram.embedding.weight") or self.tensors[name].dtype == torch.int8
        return (1, 32) if one_row else self.block_size

    def _float_or_stored(self, name: str, dtype: torch.dtype) -> torch.Tensor | MadeTensor:
        tensor = self.tensors[name]
        if not self._is_dequantised(name, dtype):
            dtype = loaded_dtype(name, tensor.dtype, dtype)
            if tensor.dtype == dtype:
                return tensor
            return MadeTensor(partial(tensor.to, dtype), dtype, tuple(tensor.shape))
        scale = self.tensors[f"{name}_scale_inv"]
        if tensor.dtype == torch.int8:
            shape = *tensor.shape[:-1], 2 * tensor.shape[-1]
            return MadeTensor(partial(dequantize_fp4_rows, tensor, scale, dtype=dtype), dtype, shape)
        make = partial(dequantize_fp8_tiles, tensor, scale, block_size=self._tile(name), dtype=dtype)
        return MadeTensor(make, dtype, tuple(tensor.shape))

    def _fused_bank(self, sources: list[str], parameter: torch.Tensor) -> torch.Tensor:
        """Fill `[E, 2I, H]` or `[E, H, I]` from the matrices of each expert."""
        bank = torch.empty(parameter.shape, dtype=parameter.dtype)
        places = [place for expert in bank for place in expert.chunk(len(sources) // len(bank))]
        for source, place in zip(sources, places, strict=True):
            place.copy_(self._float_or_stored(source, parameter.dtype)[...])
        return bank


def _where(entry: TensorEntry) -> str:
    return f"{entry.name} in {entry.file}"


def _place_in_bank(name: str) -> tuple[str, int, int | None] | None:
    """Where a bank holds the matrix `name` of an expert: its name, the expert, and the half of the rows (down: all)."""
    found = _EXPERT_MATRIX.match(name)
    if found is None:
        return None
    stem, expert, kind = found.groups()
    bank, half = ("down_proj", None) if kind == "down" else ("gate_up_proj", ("gate", "up").index(kind))
    return f"{stem}.{bank}", int(expert), half


def _expert_shape(name: str, bank: torch.Tensor) -> list[int]:
    """Shape of each stored matrix of a bank `[E, 2I, H]` or `[E, H, I]`."""
    _, rows, columns = bank.shape
    return [rows // 2, columns] if name.endswith("gate_up_proj") else [rows, columns]


class ReleasedCheckpointMixin:
    """`PreTrainedModel` with the loader above; a class names its table as `weight_names`."""

    weight_names: WeightNames
    optional_parts = OPTIONAL_PARTS
    # Where the weights' files lie; of a name on the Hub, in its cache.
    checkpoint_folder: str | None = None

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, use_safetensors: bool | None = None, **kwargs):
        """Load as any model of transformers; pickled weights are never opened, a local folder's JSON is checked first.

        Raises:
            ValueError: for `use_safetensors=False`.
            OSError: for a JSON file that is broken or too large, and for an index that leaves its folder.
        """
        if use_safetensors is False:
            raise ValueError("use_safetensors is False; accepted: True (pickled weights can run code).")
        if pretrained_model_name_or_path:
            check_json_files(os.path.join(pretrained_model_name_or_path, kwargs.get("subfolder") or ""))
        if kwargs.get("device_map") == "disk":  # transformers takes it in a dict only
            kwargs["device_map"] = {"": "disk"}
        return super().from_pretrained(pretrained_model_name_or_path, *args, use_safetensors=True, **kwargs)

    @staticmethod
    def _load_pretrained_model(model, state_dict, checkpoint_files, load_config, expected_keys=None):
        renamings = [t for t in load_config.weight_mapping or [] if type(t) is WeightRenaming]  # of `key_mapping=`
        tensors, entries = _stored_tensors(state_dict, checkpoint_files, load_config)
        if renamings:
            tensors, entries = _renamed(tensors, entries, renamings)
        quantization = getattr(load_config.hf_quantizer, "quantization_config", None)
        if getattr(quantization, "quant_method", None) != PACKED_METHOD:  # another quantiser reads floats
            quantization = None
        source = str(load_config.pretrained_model_name_or_path or "")
        if checkpoint_files:
            model.checkpoint_folder = os.path.dirname(os.path.abspath(checkpoint_files[0]))
        checkpoint = ReleasedCheckpoint(model, tensors, entries, quantization, source)
        tensors = checkpoint.load_all(load_config.ignore_mismatched_sizes)
        for part, count in checkpoint.left.items():
            if part in LEFT_PARTS:  # the backbone, beside which a drafter is loaded, is in memory
                logger.warning(
                    f"{type(model).__name__} leaves {count} tensors of the checkpoint on disk, as it is meant to: "
                    f"{LEFT_PARTS[part]}."
                )
        if is_deepspeed_zero3_enabled():  # its loader takes tensors only
            tensors = {name: tensor[...] for name, tensor in tensors.items()}
        on_host = _assign_host_tensors(model, tensors, load_config.device_map or {})
        _widen_parameters(model, tensors)
        weight_mapping = [t for t in load_config.weight_mapping or [] if t not in renamings]
        info, offload_index = PreTrainedModel._load_pretrained_model(
            model,
            tensors,
            # Layers offloaded to disk are read from these files again, as they are: not where they were dequantised.
            None if quantization and quantization.dequantize else checkpoint_files,
            dataclasses.replace(load_config, weight_mapping=weight_mapping),
            expected_keys=list(tensors),
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
        model._find_token_map(load_config)
        return info

    def _find_token_map(self, load_config) -> None:
        """Take the Engram token map from the checkpoint's own files, if the model needs one."""
        if not self.config.get_text_config().needs_token_map:
            return
        folder, options = load_config.pretrained_model_name_or_path, load_config.download_kwargs or {}
        for name in TOKEN_MAP_FILES if folder else ():
            file = cached_file(folder, name, _raise_exceptions_for_missing_entries=False, **options)
            if file:
                break
        else:
            logger.warning(
                f"{folder or 'a state dict'} has none of {', '.join(TOKEN_MAP_FILES)}; call "
                "model.set_tokenizer(tokenizer) before the first use."
            )
            return
        token_map = read_token_map(file)
        try:
            self.set_token_map(token_map)
        except ValueError as error:
            raise ValueError(f"{file} does not fit the model: {error}") from error

    def load_state_dict(self, state_dict, strict: bool = True, assign: bool = False):
        """Load by our names or by released ones, which `save_pretrained` writes and Trainer reads back this way.

        Released names may be a part of the whole (one shard, with `strict=False`); experts are put into their banks.
        """
        expected = self.state_dict()
        if any(name not in expected and self.weight_names.to_ours(name) is not None for name in state_dict):
            state_dict = self._under_our_names(state_dict, expected)
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    def _under_our_names(self, state_dict, expected: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Rename tensors; the matrices of experts that the model holds as a bank are copied into a copy of it."""
        renamed = {}
        for name, tensor in state_dict.items():
            ours = self.weight_names.to_ours(name) or name
            found = _place_in_bank(ours)
            if found is None or ours in expected:
                renamed[ours] = tensor
                continue
            name, expert, half = found
            if name not in renamed:
                renamed[name] = expected[name].clone()
            place = renamed[name][expert]
            (place if half is None else place.chunk(2)[half]).copy_(tensor)
        return renamed

    def save_pretrained(self, save_directory, is_main_process: bool = True, **kwargs):
        """Save in the released layout; a float model is saved without `quantization_config`, which its files lack.

        The Engram token map goes into a file, its digest into the config: no other tokenizer is taken for it later. A
        config that names code (`auto_map`) gets that code, from the installed package too.
        """
        quantization = getattr(self.config, "quantization_config", None)
        ours = hasattr(quantization, "get") and quantization.get("quant_method") == PACKED_METHOD
        if ours and not any(tensor.dtype in PACKED_DTYPES for tensor in self.state_dict().values()):
            del self.config.quantization_config
        token_map = self.token_map
        if token_map is not None:
            self.config.get_text_config().engram_token_map_sha256 = token_map_digest(token_map)
        if is_main_process and not os.path.isfile(save_directory):
            os.makedirs(save_directory, exist_ok=True)
            if token_map is not None:
                with open(os.path.join(save_directory, STORED_MAP), "w", encoding="utf-8") as file:
                    file.write(token_map_text(token_map))
            if getattr(self.config, "auto_map", None) and not self.is_remote_code():
                custom_object_save(self, save_directory)
        return super().save_pretrained(save_directory, is_main_process=is_main_process, **kwargs)

    def _get_files_timestamps(self, working_dir):
        """As transformers: what is newer is uploaded. The files above are written before it looks."""
        stamps = super()._get_files_timestamps(working_dir)
        return {name: time for name, time in stamps.items() if name != STORED_MAP and not name.endswith(".py")}


def _stored_tensors(
    state_dict, checkpoint_files: list[str] | None, load_config
) -> tuple[dict[str, torch.Tensor], dict[str, TensorEntry]]:
    """Return tensors and entries by stored name, from `state_dict=` or from the mapped files."""
    if state_dict is not None:
        entries = {n: TensorEntry(n, "state_dict", t.dtype, tuple(t.shape), 0, 0) for n, t in state_dict.items()}
        return dict(state_dict), entries
    files = checkpoint_files or []
    others = [file for file in files if not file.endswith(".safetensors")]
    if others or not files:
        raise OSError(f"{(others or ['no file'])[0]} holds the weights; accepted: safetensors files.")
    weight_map = (load_config.sharded_metadata or {}).get("weight_map")
    if weight_map:
        check_index_files(weight_map, files)
    tensors, entries = map_checkpoint(files)
    if weight_map:
        check_index(weight_map, entries)
    if load_config.disable_mmap:
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    return tensors, entries


def _renamed(tensors, entries, renamings: list[WeightRenaming]):
    """Return tensors and entries under the names that `key_mapping=` gives."""
    names = {}
    for name in tensors:
        new = name
        for renaming in renamings:
            new, _ = renaming.rename_source_key(new)
        if new in names:
            raise ValueError(f"key_mapping gives {names[new]} and {name} the same name, {new}; accepted: one each.")
        names[new] = name
    return {new: tensors[n] for new, n in names.items()}, {new: entries[n] for new, n in names.items()}


def _widen_parameters(model, tensors: dict[str, torch.Tensor]) -> None:
    """Expect float32 where float32 was kept: transformers casts to what the (meta) parameter says."""
    for name, tensor in tensors.items():
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        parameter = module._parameters.get(leaf)
        if parameter is not None and parameter.dtype != tensor.dtype:
            module._parameters[leaf] = nn.Parameter(parameter.to(tensor.dtype), requires_grad=parameter.requires_grad)


def _assign_host_tensors(model, tensors: dict[str, Any], device_map: dict[str, Any]) -> set[str]:
    """Give host modules their tensors, take them out of `tensors`, and return their names.

    They stay in the mapped files, unless the device map names the module itself and another device for it.

    Raises:
        ValueError: if the device map names a part of such a module.
    """
    given = set()
    for path, module in host_modules(model).items():
        part = next((place for place in device_map if place.startswith(f"{path}.")), None)
        if part is not None:
            raise ValueError(f"device_map names {part!r}; accepted: {path!r}, the whole module.")
        device = device_map.get(path, "cpu")
        for name in module.host_names():
            key = f"{path}.{name}"
            module.assign(name, tensors.pop(key)[...])
            given.add(key)
        if str(device) not in ("cpu", "disk"):
            module.move_to(device)
    return given
