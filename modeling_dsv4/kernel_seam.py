"""Where optional kernels join the reference maths.

A kernel repository is a Python module whose functions have the signatures of reference functions (in this package:
`modeling_dsv4/triton_kernels/`, which `convert kernels` writes in the layout of the `kernels` library). A module that can
use one asks `find_kernel` in its forward and falls back to its own maths; nothing here imports triton.

Source: the `kernels` library's `get_kernel` and `get_local_kernel`.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from types import ModuleType

import torch
from torch import nn
from transformers.utils import logging

logger = logging.get_logger(__name__)

# The repository on the Hub and the version whose functions this code calls. `LOCAL_KERNELS=<id>=<path>` redirects it.
REPOSITORY, VERSION = "dsv4-transformers/dsv4-kernels", 1
INSTALLED = "modeling_dsv4.triton_kernels"


class KernelSet:
    r"""The kernels of one repository, loaded when the first tensor that they serve arrives.

    Args:
        source (`str`): "auto" (the installed package, else the Hub) or the path of a kernel repository.
    """

    def __init__(self, source: str):
        self.source = source
        self._module: ModuleType | None = None
        self._missing = False

    # A model that is copied or pickled keeps the choice; modules cannot be copied.
    def __deepcopy__(self, memo) -> KernelSet:
        return self

    def __reduce__(self):
        return KernelSet, (self.source,)

    def load(self) -> ModuleType | None:
        r"""Return the repository, or `None` (and warn once) if "auto" finds none.

        Raises:
            OSError: if the path is no kernel repository of this version.
            ImportError: if a path is given and the `kernels` library is not installed.
        """
        if self._module is None and not self._missing:
            self._module = _installed_or_from_hub() if self.source == "auto" else _from_folder(self.source)
            self._missing = self._module is None
            if self._module is not None:
                logger.info(f"kernels: {', '.join(sorted(self._module.__all__))} from {self._module.__name__}")
        return self._module

    def serves(self, tensors: tuple[torch.Tensor, ...]) -> bool:
        """Whether kernels can run on these tensors: plain ones, on one CUDA device, not float64, not being traced.

        "auto" serves the devices on which the kernels are known to compile and to be right; a path serves any.
        """
        device = tensors[0].device
        if self.source == "auto" and not _is_known(device):
            return False
        if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            return False
        if torch.compiler.is_compiling():
            return False
        return all(t.device == device and t.dtype != torch.float64 and type(t) in _PLAIN for t in tensors)


@lru_cache
def _is_known(device: torch.device) -> bool:
    """NVIDIA's from Hopper on: some kernels use instructions that older ones lack."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


_PLAIN = (torch.Tensor, nn.Parameter)
AUTO = KernelSet("auto")


def find_kernel(kernels: KernelSet | None, name: str, *tensors: torch.Tensor) -> Callable | None:
    r"""Return the kernel that computes `name` for these tensors, or `None` for the reference maths.

    Args:
        kernels (`KernelSet`, *optional*): of the calling module; `None`: kernels are off.
        name (`str`): function of the repository.
        tensors (`torch.Tensor`): the call's tensors; if one of them needs a gradient, the kernel must have a backward
            (`has_backward` on the function).
    """
    if kernels is None or not kernels.serves(tensors):
        return None
    kernel = getattr(kernels.load(), name, None)
    needs_gradient = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    if kernel is None or (needs_gradient and not getattr(kernel, "has_backward", False)):
        return None
    device = tensors[0].device
    is_elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
    return partial(_run_on, device, kernel) if is_elsewhere else kernel


def is_plain(module: nn.Module) -> bool:
    """Whether a kernel may take the place of a call of `module`: no adapter is around it, and nobody watches it."""
    return not (hasattr(module, "base_layer") or module._forward_hooks or module._forward_pre_hooks)


def _run_on(device: torch.device, kernel: Callable, *args, **kwargs):
    """Launch on the device of the tensors: Triton launches on the current one."""
    with torch.cuda.device(device):
        return kernel(*args, **kwargs)


def use_kernels(model: nn.Module, kernels: KernelSet | None) -> None:
    """Let every module of `model` that can use kernels ask `kernels` for them; `None`: they are off."""
    for module in model.modules():
        if hasattr(type(module), "kernels"):
            module.kernels = kernels


class KernelsMixin:
    """`set_kernels` for models."""

    def set_kernels(self, source: str | os.PathLike) -> None:
        r"""Choose the kernels of this model; the numbers stay within the rounding of its dtype.

        Args:
            source (`str` or path): "auto" (the default) uses them for tensors on an NVIDIA device of compute capability
                9.0 or more, if the installed package or the Hub has them; "off" never; a path loads a kernel repository,
                as written by `convert kernels`.

        Raises:
            ValueError: for another value. OSError, ImportError: see `KernelSet.load`.
        """
        if isinstance(source, os.PathLike) or (isinstance(source, str) and source not in ("auto", "off")):
            if not Path(source).is_dir():
                raise ValueError(f"kernels is {str(source)!r}; accepted: 'auto', 'off' or the folder of a repository.")
            kernels = KernelSet(str(source))
            kernels.load()
        elif source in ("auto", "off"):
            kernels = AUTO if source == "auto" else None
        else:
            raise ValueError(f"kernels is {source!r}; accepted: 'auto', 'off' or the folder of a repository.")
        use_kernels(self, kernels)


def _installed_or_from_hub() -> ModuleType | None:
    try:
        found = importlib.import_module(INSTALLED)
        if found.VERSION == VERSION:
            return found
        reason = f"{INSTALLED} has version {found.VERSION}, {VERSION} is needed"
    except ImportError as error:
        reason = str(error)
    try:
        return importlib.import_module("kernels").get_kernel(REPOSITORY, version=VERSION)
    # No library, no network, no such repository, no trust: each of them means the reference maths.
    except Exception as error:
        logger.warning_once(f"No kernels, the reference maths is used ({reason}; {REPOSITORY}: {error}).")
        return None


def _from_folder(path: str) -> ModuleType:
    try:
        library = importlib.import_module("kernels")
    except ImportError as error:
        raise ImportError("kernels from a folder are loaded by the `kernels` library: pip install kernels") from error
    try:
        found = library.get_local_kernel(Path(path))
    except Exception as error:
        raise OSError(f"{path} is no kernel repository that `kernels` loads: {error}") from error
    if getattr(found, "VERSION", None) != VERSION:
        raise OSError(f"{path} has version {getattr(found, 'VERSION', None)}; accepted: {VERSION}.")
    return found
