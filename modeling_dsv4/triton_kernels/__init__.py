"""Triton kernels of DeepSeek-V4.1 and V4, as a repository of the `kernels` library.

Each function has the signature of a reference function of the package and is tested against it. Only files of this
folder are imported; `python -m convert kernels DST` writes them in the layout that `kernels.get_kernel` loads.
"""

from .engram_gather import add_memory, gather_rows
from .expert_routing import route_tokens
from .hyper_connections import hyper_connection_site
from .index_scores import select_entries
from .newton_schulz import newton_schulz
from .packed_experts import packed_experts
from .packed_linear import packed_linear, packed_swiglu
from .rms_norm import rms_norm
from .rotary_store import rotate_store
from .sinkhorn_step import sinkhorn_step
from .sparse_attention import sparse_attention
from .wide_linear import wide_linear

VERSION = 1

__all__ = [
    "add_memory",
    "gather_rows",
    "hyper_connection_site",
    "newton_schulz",
    "packed_experts",
    "packed_linear",
    "packed_swiglu",
    "rms_norm",
    "rotate_store",
    "route_tokens",
    "select_entries",
    "sinkhorn_step",
    "sparse_attention",
    "wide_linear",
]
