"""Triton kernels of DeepSeek-V4.1 and V4, as a repository of the `kernels` library.

Each function has the signature of a reference function of the package and is tested against it. Only files of this
folder are imported; `python -m convert kernels DST` writes them in the layout that `kernels.get_kernel` loads.
"""

from .newton_schulz import newton_schulz
from .sinkhorn_step import sinkhorn_step

VERSION = 1

__all__ = ["newton_schulz", "sinkhorn_step"]
