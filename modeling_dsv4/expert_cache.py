"""The unpacked matrices of routed experts that were used last, up to a number of bytes.

An expert is unpacked when a token is routed to it. Tokens that follow each other share experts, so the floats are kept
while they fit: one budget for all banks of a model. What is kept equals what would be unpacked again, bit for bit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from threading import Lock

import torch


class UnpackedExperts:
    r"""Least-recently-used cache of unpacked matrices.

    A copy (`deepcopy`, `pickle`) has the same bound and is empty.

    Args:
        max_bytes (`int`): of all matrices together, on all devices; 0 keeps none.
    """

    def __init__(self, max_bytes: int):
        self.max_bytes, self.nbytes = max_bytes, 0
        self._kept: OrderedDict[tuple, tuple[list[torch.Tensor], list[int], torch.Tensor]] = OrderedDict()
        self._lock = Lock()

    def get(
        self,
        sources: list[torch.Tensor],
        device: torch.device,
        dtype: torch.dtype,
        unpack: Callable[[], torch.Tensor],
    ) -> torch.Tensor:
        r"""Return what `unpack()` gives for `sources`, from an earlier call if it is still kept; not to be written to.

        Args:
            sources (`list[torch.Tensor]`): the packed tensors. One that was replaced or written to is unpacked anew.
            device (`torch.device`), dtype (`torch.dtype`): of the result.
            unpack (`Callable`): makes it.
        """
        key, versions = _key(sources, device, dtype), _versions(sources)
        with self._lock:
            found = self._kept.get(key)
            if found is not None and found[1] == versions:
                self._kept.move_to_end(key)
                return found[2]
        # Not an inference tensor, which autograd would refuse to multiply with later.
        with torch.inference_mode(False), torch.no_grad():
            matrix = unpack()
        with self._lock:
            self._keep(key, (sources, versions, matrix))
        return matrix

    def holds(self, sources: list[torch.Tensor], device: torch.device, dtype: torch.dtype) -> bool:
        """Whether `get` would unpack nothing."""
        found = self._kept.get(_key(sources, device, dtype))
        return found is not None and found[1] == _versions(sources)

    def _keep(self, key: tuple, entry: tuple) -> None:
        old = self._kept.pop(key, None)
        self.nbytes -= 0 if old is None else old[2].nbytes
        if entry[2].nbytes > self.max_bytes:
            return
        self._kept[key] = entry
        self.nbytes += entry[2].nbytes
        while self.nbytes > self.max_bytes:
            _, (_, _, matrix) = self._kept.popitem(last=False)
            self.nbytes -= matrix.nbytes

    def __reduce__(self):
        return UnpackedExperts, (self.max_bytes,)


def _key(sources: list[torch.Tensor], device: torch.device, dtype: torch.dtype) -> tuple:
    # The entry keeps its sources alive, so that an id is never one of another tensor.
    return (*map(id, sources), device, dtype)


def _versions(sources: list[torch.Tensor]) -> list[int]:
    return [0 if tensor.is_inference() else tensor._version for tensor in sources]
