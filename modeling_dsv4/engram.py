"""Engram: sparsely addressed memory that is gated into the residual streams.

        rows [B, S, 24] ──gather──> [B, S, 24 * 256] ──kv_proj──> key per stream, one value
        streams ── gate(stream . key) * value ──> added to each stream

Sources: V4.1 report section 2.4.2 (no short convolution), contract section 8.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from .engram_reads import EngramRead, EngramStatistics
from .host_tensors import HostTensors
from .kernel_seam import AUTO, find_kernel
from .layers import Dsv4Linear, rounded_weight
from .sparse_attention import wide

# Channels that share one scale in a packed table.
TABLE_BLOCK = 32


def engram_gate(
    streams: torch.Tensor, keys: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, *, eps: float
) -> torch.Tensor:
    r"""Return how far each stream opens for its memory.

    Implements contract section 8: d = sum(h w_q w_k key) / (rms(h) rms(key) sqrt(D)),
    gate = sigmoid(sign(d) sqrt(max(|d|, 1e-6))).

    Args:
        streams (`torch.Tensor` of shape `[B, S, N, D]`).
        keys (`torch.Tensor` of shape `[B, S, N, D]`): one key per stream.
        q_weight, k_weight (`torch.Tensor` of shape `[N, D]`).
        eps (`float`): of both mean squares.

    Returns:
        `torch.Tensor` of shape `[B, S, N]`, float32 (float64 for float64 inputs): probabilities.
    """
    h, key = wide(streams), wide(keys)
    dot = (h * (wide(q_weight) * wide(k_weight)) * key).sum(-1)
    dot = dot * torch.rsqrt(h.square().mean(-1) + eps) * torch.rsqrt(key.square().mean(-1) + eps) * h.shape[-1] ** -0.5
    return torch.sigmoid(torch.copysign(dot.abs().clamp(min=1e-6).sqrt(), dot))


def add_memory(
    streams: torch.Tensor,
    projected: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    image_mask: torch.Tensor | None = None,
    *,
    eps: float,
) -> torch.Tensor:
    r"""Add the gated memory to every stream (contract section 8).

    Args:
        streams (`torch.Tensor` of shape `[B, S, N, D]`).
        projected (`torch.Tensor` of shape `[B, S, (N + 1) * D]`): a key per stream, then the value they share.
        q_weight, k_weight, eps: as in `engram_gate`.
        image_mask (`torch.Tensor` of shape `[B, S]`, bool, *optional*): positions whose gate is 0.

    Returns:
        `torch.Tensor` of shape `[B, S, N, D]`, dtype of the streams.
    """
    count, hidden = streams.shape[-2:]
    keys, value = projected.split([count * hidden, hidden], dim=-1)
    gate = engram_gate(streams, keys.unflatten(-1, (count, hidden)), q_weight, k_weight, eps=eps)
    if image_mask is not None:
        gate = gate.masked_fill(image_mask[..., None], 0.0)
    return (wide(streams) + gate[..., None] * wide(value)[..., None, :]).to(streams.dtype)


class Dsv4EngramTable(nn.Embedding):
    """Float table `weight` `[rows, head_dim]`."""

    packed_as = "rows"
    round_weight: Callable[[torch.Tensor], torch.Tensor] | None = None  # of rows; see `simulate_packing`

    def packed(self, scale_dtype: torch.dtype) -> Dsv4PackedEngramTable:
        """Return the packed table of the same sizes, empty."""
        return Dsv4PackedEngramTable(*self.weight.shape, scale_dtype)

    def gather(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the rows `rows` `[...]` as `[..., head_dim]` in `dtype`."""
        return rounded_weight(self(rows), self.round_weight).to(dtype)


class Dsv4PackedEngramTable(HostTensors):
    """The file's own table on the host: `weight` `[rows, head_dim]` FP8 and `weight_scale_inv` `[rows, head_dim / 32]`."""

    kernels = AUTO

    def __init__(self, rows: int, head_dim: int, scale_dtype: torch.dtype):
        scale_shape = (rows, -(-head_dim // TABLE_BLOCK))
        super().__init__(
            {"weight": ((rows, head_dim), torch.float8_e4m3fn), "weight_scale_inv": (scale_shape, scale_dtype)}
        )
        self.statistics = EngramStatistics()

    def read(self, rows: torch.Tensor) -> EngramRead | torch.Tensor:
        """Return the read of the rows `rows` `[...]`, not begun yet, or `rows` if a kernel gathers them in the layer."""
        return rows if self._kernel(rows) else self._read(rows)

    def gather(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the rows `rows` `[...]` as `[..., head_dim]` in `dtype`, on the device of `rows`."""
        kernel = self._kernel(rows)
        if kernel is None or dtype == torch.float64:
            return self._read(rows).take(rows.device, dtype)
        return kernel(*self._table(), rows, block=TABLE_BLOCK, dtype=dtype)

    def waits_for_host(self, device: torch.device) -> bool:
        """Whether a call on `device` reads rows on the host: where no kernel gathers them."""
        return self._kernel(torch.empty(0, dtype=torch.long, device=device)) is None

    def _table(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.host_tensor("weight"), self.host_tensor("weight_scale_inv")

    def _read(self, rows: torch.Tensor) -> EngramRead:
        return EngramRead(self._table(), rows, TABLE_BLOCK, self.statistics)

    def _kernel(self, rows: torch.Tensor) -> Callable | None:
        """The kernel that reads the table from the device of `rows`: it lies there, or in pinned host memory."""
        reachable = all(part.device == rows.device or part.is_pinned() for part in self._table())
        return find_kernel(self.kernels, "gather_rows", rows) if reachable else None


class Dsv4EngramMemory(nn.Module):
    """Table, key and value projection, and gate weights of one Engram layer."""

    kernels = AUTO

    def __init__(self, config, layer_idx: int):
        super().__init__()
        streams, hidden = config.hc_mult, config.hidden_size
        rows = config.engram_num_embeddings[config.engram_layer_ids.index(layer_idx)]
        lookups = (config.engram_max_ngram_size - 1) * config.engram_n_heads
        self.embedding = Dsv4EngramTable(rows, config.engram_head_dim)
        self.kv_proj = Dsv4Linear(lookups * config.engram_head_dim, (streams + 1) * hidden)
        self.q_weight = nn.Parameter(torch.ones(streams, hidden))
        self.k_weight = nn.Parameter(torch.ones(streams, hidden))
        self.eps = config.rms_norm_eps

    def forward(
        self, streams: torch.Tensor, rows: torch.Tensor | EngramRead, image_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        r"""Add the gated memory to every stream.

        Args:
            streams (`torch.Tensor` of shape `[B, S, N, D]`).
            rows (`torch.Tensor` of shape `[B, S, (size - 1) * heads]`, int64): from `Dsv4NgramHash`, or their read.
            image_mask (`torch.Tensor` of shape `[B, S]`, bool, *optional*): positions whose gate is 0.

        Returns:
            `torch.Tensor` of shape `[B, S, N, D]`, dtype of the streams.
        """
        if isinstance(rows, EngramRead):
            found = rows.take(streams.device, streams.dtype)
        else:
            found = self.embedding.gather(rows, streams.dtype)
        args = streams, self.kv_proj(found.flatten(-2)), self.q_weight, self.k_weight
        kernel = find_kernel(self.kernels, "add_memory", *args)
        return (kernel or add_memory)(*args, image_mask, eps=self.eps)
