"""Packed experts on accelerators: the banks of whole layers, as many as a budget of bytes holds.

Banks stay on the host unless a device map names them or `place_experts` is called; then decoding reads them at the speed
of device memory, and kernels take their products.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import nn
from transformers.utils import logging
from transformers.utils.hub import convert_file_size_to_int

from .moe import Dsv4PackedExperts


class ExpertPlacementMixin:
    """`place_experts` for models."""

    def place_experts(self, max_memory: int | str | None = None) -> list[str]:
        r"""Move banks of packed experts to the accelerators of their layers, the first layers first.

        Banks of layers on the host or on disk stay there.

        Args:
            max_memory (`int` or `str`, *optional*): bytes, or a text as "60GB", that banks may take of each device; the
                banks that do not fit stay where they are. `None`: all of them.

        Returns:
            The names of the banks that were moved.

        Raises:
            ValueError: if no layer with packed experts is on an accelerator, or a device has not the memory.
        """
        every = {name: module for name, module in self.named_modules() if isinstance(module, Dsv4PackedExperts)}
        devices = {name: bank.weight.device for name, bank in every.items()}
        banks = {name: bank for name, bank in every.items() if devices[name].type not in ("cpu", "meta")}
        budget = None if max_memory is None else convert_file_size_to_int(max_memory)
        if not banks:
            first = next(iter(devices), None)
            found = f"{first} is on {devices[first]}" if first else f"{type(self).__name__} has no packed experts"
            raise ValueError(f"{found}; accepted: a packed model with layers on accelerators.")
        placed: dict[torch.device, int] = defaultdict(int)
        new: dict[torch.device, int] = defaultdict(int)
        chosen = []
        for name, bank in sorted(banks.items(), key=lambda item: item[1].bank is None):  # what lies there counts first
            size, device = bank_bytes(bank), devices[name]
            if bank.bank is None:
                if budget is not None and placed[device] + size > budget:
                    continue
                new[device] += size
                chosen.append(name)
            placed[device] += size
        for device, size in new.items():
            free = _free_bytes(device) if device.type == "cuda" else size
            if size > free:
                raise ValueError(
                    f"experts need {size} bytes of {device}, which has {free} free; accepted: max_memory."
                )
        for name in logging.tqdm(chosen, desc="Placing experts", disable=None):
            banks[name].move_to(devices[name])
        return chosen


def bank_bytes(bank: nn.Module) -> int:
    """Bytes of the host tensors of a module."""
    return sum(bank.host_tensor(name).nbytes for name in bank.host_names())


def _free_bytes(device: torch.device) -> int:
    """What the device has free, and what PyTorch holds of it without using it."""
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + held
