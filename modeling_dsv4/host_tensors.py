"""Tensors that stay in host memory: Engram tables and packed experts.

A released checkpoint has 200 GB of Engram rows and 280 GB of experts. They are used as the file's own bytes, mapped
into memory, and must survive everything that walks over a model's parameters: `.to()`, device maps, dtype casts, PEFT,
compile and save. So they are kept where `nn.Module` does not look, but still appear in `state_dict()`. Only a device map
that names such a module itself moves it.
"""

from __future__ import annotations

import ctypes
import mmap
from copy import deepcopy
from functools import lru_cache

import torch
from torch import nn


class HostTensors(nn.Module):
    r"""Module whose tensors stay on the host, under names that may contain dots.

    The tensors are in `state_dict()` but not in `parameters()`: no optimizer, device map or cast touches them. They
    never require a gradient.

    Args:
        specs (`dict[str, tuple[tuple[int, ...], torch.dtype]]`): name -> (shape, dtype); allocated on the meta device
            until `assign` or `load_state_dict` gives them memory.
    """

    def __init__(self, specs: dict[str, tuple[tuple[int, ...], torch.dtype]]):
        super().__init__()
        self.__dict__["_host"] = {
            name: nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)
            for name, (shape, dtype) in specs.items()
        }

    def host_names(self) -> list[str]:
        """Return the names of the host tensors, relative to this module."""
        return list(self._host)

    def host_tensor(self, name: str) -> torch.Tensor:
        """Return one host tensor."""
        return self._host[name]

    def assign(self, name: str, value: torch.Tensor) -> None:
        """Use `value` as the host tensor `name`, without a copy.

        Raises:
            ValueError: if shape or dtype differ from what the module expects.
        """
        expected = self._host[name]
        if value.shape != expected.shape or value.dtype != expected.dtype:
            raise ValueError(
                f"{name}: got {value.dtype} {list(value.shape)}, expected {expected.dtype} {list(expected.shape)}."
            )
        parameter = nn.Parameter(value.detach(), requires_grad=False)
        parameter._is_hf_initialized = True
        self._host[name] = parameter

    def move_to(self, device: torch.device | str | int) -> None:
        """Move the tensors to a device. Nothing else does: not `.to()`, nor a device map that names a module above."""
        for name, tensor in self._host.items():
            self.assign(name, tensor.to(device))

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, value in self._host.items():
            destination[prefix + name] = value if keep_vars else value.detach()

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ):
        own = {prefix + name: name for name in self._host}
        for key, name in own.items():
            if key not in state_dict:
                if strict:
                    missing_keys.append(key)
                continue
            try:
                self.assign(name, state_dict[key])
            except ValueError as error:
                error_msgs.append(f"{prefix}{error}")
        # `own` keys are hidden from the base class, which knows nothing of them and would call them unexpected.
        rest = {key: value for key, value in state_dict.items() if key not in own}
        super()._load_from_state_dict(rest, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)

    def __deepcopy__(self, memo):
        # The bytes are read-only and may be larger than memory: a copy of the model shares them.
        for value in self._host.values():
            memo[id(value)] = value
        copy = self.__class__.__new__(self.__class__)
        memo[id(self)] = copy
        nn.Module.__init__(copy)
        for key, value in self.__dict__.items():
            copy.__dict__[key] = dict(value) if key == "_host" else deepcopy(value, memo)
        return copy


@lru_cache(maxsize=1)
def _madvise():
    """The system's `madvise`, or `None` where there is none."""
    try:
        function = ctypes.CDLL(None).madvise
    except (AttributeError, OSError, TypeError):  # Windows
        return None
    function.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
    return function


def read_ahead(tensor: torch.Tensor, rows: torch.Tensor | None = None) -> None:
    r"""Ask the system for the pages of a mapped tensor that are about to be read; returns at once and changes nothing.

    Pages asked for together are read side by side, and nothing around them is: a fault for each in turn is several times
    slower, and reads megabytes around a row of 256 bytes.

    Args:
        tensor (`torch.Tensor` of shape `[N, ...]`, contiguous): a host tensor; any other is left alone.
        rows (`torch.Tensor` of shape `[R]`, int64, ascending, *optional*): along the first axis; `None` means all.
    """
    if tensor.device.type != "cpu" or 0 in (tensor.numel(), 1 if rows is None else len(rows)) or _madvise() is None:
        return
    start = tensor.data_ptr()
    if rows is None:
        _will_need(start // mmap.PAGESIZE, (start + tensor.nbytes - 1) // mmap.PAGESIZE)
        return
    size = tensor.nbytes // len(tensor)
    first, last = (start + size * rows) // mmap.PAGESIZE, (start + size * rows + size - 1) // mmap.PAGESIZE
    # Rows whose pages follow each other are one request.
    cuts = (first[1:] > last[:-1] + 1).nonzero().flatten()
    begins, ends = [0, *(cuts + 1).tolist()], [*cuts.tolist(), len(first) - 1]
    for begin, end in zip(first[begins].tolist(), last[ends].tolist(), strict=True):
        _will_need(begin, end)


def _will_need(first_page: int, last_page: int) -> None:
    _madvise()(first_page * mmap.PAGESIZE, (last_page - first_page + 1) * mmap.PAGESIZE, mmap.MADV_WILLNEED)


def host_modules(model: nn.Module) -> dict[str, HostTensors]:
    """Return the modules of `model` that keep host tensors, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, HostTensors)}
