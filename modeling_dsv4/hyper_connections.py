"""Manifold-constrained hyper-connections: several residual streams, mixed by doubly stochastic matrices.

        streams [B, S, N, D] ──┬─ coefficients ──> pre A [B, S, N]   post C [B, S, N]   comb M [B, S, N, N]
                               ├─ collapse by a pre ──> x [B, S, D] ──> sublayer ──> y [B, S, D]
                               └─ expand:  streams'[k] = C[k] * y + sum_j M[j, k] * streams[j]

A site begins with the expansion of the sublayer before it, so that it reads the streams once and writes them once.
Single-pass (V4.1): it collapses by the A that the site before it predicted, so that the same pass can mix, predict and
collapse; the first site uses stream 0. Multi-pass (V4): a site collapses by its own A.

Sources: V4 report section 2.2, V4.1 report section 2.4.1, contract section 4.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from .fp_codecs import round_fp8
from .kernel_seam import AUTO, find_kernel, is_plain
from .sparse_attention import full_precision, wide

# Numbers of streams that the kernel computes: its tiles have powers of two.
KERNEL_STREAMS = (1, 2, 4, 8)


def sinkhorn_normalize(logits: torch.Tensor, *, iterations: int, eps: float) -> torch.Tensor:
    r"""Turn logits into a nearly doubly stochastic matrix by alternating normalisation.

    Implements contract section 4: softmax over the last axis plus eps stands for the first row step; then `iterations`
    column steps (axis -2) with a row step (axis -1) between each two; every divisor has eps added.

    Args:
        logits (`torch.Tensor` of shape `[..., N, N]`, float32): first index = source stream.
        iterations (`int`): column steps.
        eps (`float`): floor.

    Returns:
        `torch.Tensor` of shape `[..., N, N]`, float32: non-negative, columns sum to 1 up to eps.
    """
    matrix = logits.softmax(dim=-1) + eps
    matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        matrix = matrix / (matrix.sum(-1, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    return matrix


def hyper_connection_coefficients(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    *,
    iterations: int,
    eps: float,
    norm_eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    r"""Predict the mixing coefficients of one site from its streams.

    Implements contract section 4: u = (fn @ x) / rms(x) for the flattened streams x (the division comes after the
    projection); A = sigmoid(u_A s_0 + b_A) + eps, C = 2 sigmoid(u_C s_1 + b_C), M = sinkhorn(u_M s_2 + b_M).

    Args:
        streams (`torch.Tensor` of shape `[B, S, N, D]`).
        fn (`torch.Tensor` of shape `[N * (N + 2), N * D]`, float32).
        base (`torch.Tensor` of shape `[N * (N + 2)]`, float32) and scale (`[3]`, float32).
        iterations, eps: of `sinkhorn_normalize`. norm_eps (`float`): of the root mean square.

    Returns:
        pre A `[B, S, N]`, post C `[B, S, N]`, comb M `[B, S, N, N]` (source, destination), all float32 or wider.
    """
    count = streams.shape[-2]
    u = _normalised_projection(streams, fn, norm_eps)
    pre, post, comb = u.split([count, count, count * count], dim=-1)
    pre_base, post_base, comb_base = base.to(u.dtype).split([count, count, count * count])
    pre = torch.sigmoid(pre * scale[0] + pre_base) + eps
    post = 2 * torch.sigmoid(post * scale[1] + post_base)
    comb = (comb * scale[2] + comb_base).unflatten(-1, (count, count))
    return pre, post, sinkhorn_normalize(comb, iterations=iterations, eps=eps)


def _normalised_projection(streams: torch.Tensor, fn: torch.Tensor, eps: float) -> torch.Tensor:
    """Return (fn @ x) / rms(x) `[B, S, K]` of the flattened streams x, in float32 or wider."""
    x = wide(streams).flatten(-2)
    with full_precision(x):
        return (x @ fn.to(x.dtype).mT) * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def collapse_streams(streams: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """Return sum_s pre[s] * streams[s]: `[B, S, N, D]` and `[B, S, N]` -> `[B, S, D]`, dtype of the streams."""
    return (pre[..., None] * wide(streams)).sum(-2).to(streams.dtype)


def expand_streams(
    streams: torch.Tensor, output: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
) -> torch.Tensor:
    r"""Mix the streams and add a sublayer's output to each:  out[k] = post[k] * y + sum_j comb[j, k] * streams[j].

    Args:
        streams (`torch.Tensor` of shape `[B, S, N, D]`).
        output (`torch.Tensor` of shape `[B, S, D]`): y.
        post (`torch.Tensor` of shape `[B, S, N]`) and comb (`[B, S, N, N]`: source, destination), float32 or wider.

    Returns:
        `torch.Tensor` of shape `[B, S, N, D]`, dtype of the streams.
    """
    with full_precision(streams):
        mixed = comb.mT @ wide(streams)
    return (post[..., None] * wide(output)[..., None, :] + mixed).to(streams.dtype)


class Expansion(NamedTuple):
    """What a sublayer adds to the streams: output y `[B, S, D]`, post C `[B, S, N]`, comb M `[B, S, N, N]`."""

    output: torch.Tensor
    post: torch.Tensor
    comb: torch.Tensor


class HyperConnectionSite(NamedTuple):
    """Streams `[B, S, N, D]` before a sublayer, its input x `[B, S, D]`, and the site's pre, post and comb.

    `rounded` is x as packed matrices read it, rounded to FP8, where the site rounds a normalised x.
    """

    streams: torch.Tensor
    x: torch.Tensor
    pre: torch.Tensor
    post: torch.Tensor
    comb: torch.Tensor
    rounded: torch.Tensor | None = None

    def expansion(self, output: torch.Tensor) -> Expansion:
        """What the sublayer adds to the streams, when `output` `[B, S, D]` is its output."""
        return Expansion(output, self.post, self.comb)

    def rounded_for(self, sublayer: nn.Module) -> torch.Tensor | None:
        """`rounded`, unless a hook on `sublayer` may change x."""
        return self.rounded if is_plain(sublayer) else None


def hyper_connection_site(
    streams: torch.Tensor,
    pending: Expansion | None,
    pre: torch.Tensor | None,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    norm: Callable[[torch.Tensor], torch.Tensor] | None = None,
    round_block: int | None = None,
    **settings,
) -> HyperConnectionSite:
    r"""Run a whole site: settle the streams, predict the coefficients from them, collapse them to a sublayer's input.

    Args:
        streams (`torch.Tensor` of shape `[B, S, N, D]`).
        pending (`Expansion`, *optional*): of the sublayer before, not yet in the streams.
        pre (`torch.Tensor` of shape `[B, S, N]`, *optional*): carried A by which to collapse; `None`: the site's own.
        fn, base, scale, settings: of `hyper_connection_coefficients`.
        norm (*optional*): the sublayer's pre-norm.
        round_block (`int`, *optional*): channels per scale of the rounding of normalised x; `None`: it is not rounded.
    """
    if pending is not None:
        streams = expand_streams(streams, *pending)
    own_pre, post, comb = hyper_connection_coefficients(streams, fn, base, scale, **settings)
    x = collapse_streams(streams, own_pre if pre is None else pre)
    if norm is None:
        return HyperConnectionSite(streams, x, own_pre, post, comb)
    x = norm(x)
    rounded = None if round_block is None else round_fp8(x, block=round_block)
    return HyperConnectionSite(streams, x, own_pre, post, comb, rounded)


class Dsv4HyperConnection(nn.Module):
    """Parameters of one site: `fn` `[N * (N + 2), N * D]`, `base` `[N * (N + 2)]`, `scale` `[3]`, all float32."""

    kernels = AUTO

    def __init__(self, config):
        super().__init__()
        count, self.single_pass = config.hc_mult, config.single_pass_hc
        self.fn = nn.Parameter(torch.empty(count * (count + 2), count * config.hidden_size, dtype=torch.float32))
        self.base = nn.Parameter(torch.empty(count * (count + 2), dtype=torch.float32))
        self.scale = nn.Parameter(torch.empty(3, dtype=torch.float32))
        self.settings = {
            "iterations": config.hc_sinkhorn_iters,
            "eps": config.hc_eps,
            "norm_eps": config.rms_norm_eps,
        }
        self.quantize_activations, self.activation_block = False, 32

    def forward(
        self,
        streams: torch.Tensor,
        pending: Expansion | None = None,
        carried_pre: torch.Tensor | None = None,
        norm: partial | None = None,
    ) -> HyperConnectionSite:
        """Run the site (see `hyper_connection_site`); multi-pass, the carried pre `[B, S, N]` is not used.

        `norm` is `partial(module)`: accelerate moves the arguments of a module that it offloads, and would move a module.
        """
        pre = carried_pre if self.single_pass else None
        parameters = self.fn, self.base, self.scale
        settings = {"round_block": self.activation_block if self.quantize_activations else None, **self.settings}
        weight = norm.func.weight if norm is not None and is_plain(norm.func) else None
        given = [t for t in (streams, *(pending or ()), pre, *parameters, weight) if t is not None]
        kernel = find_kernel(self.kernels, "hyper_connection_site", *given)
        if kernel is None or streams.shape[-2] not in KERNEL_STREAMS:
            return hyper_connection_site(streams, pending, pre, *parameters, norm, **settings)
        site = HyperConnectionSite(*kernel(streams, pending, pre, *parameters, weight, **settings))
        return site if norm is None or weight is not None else site._replace(x=norm(site.x))


class Dsv4HyperHead(nn.Module):
    """Learned collapse after the last layer (V4): `fn` `[N, N * D]`, `base` `[N]`, `scale` `[1]`, all float32."""

    def __init__(self, config):
        super().__init__()
        count = config.hc_mult
        self.fn = nn.Parameter(torch.empty(count, count * config.hidden_size, dtype=torch.float32))
        self.base = nn.Parameter(torch.empty(count, dtype=torch.float32))
        self.scale = nn.Parameter(torch.empty(1, dtype=torch.float32))
        self.eps, self.norm_eps = config.hc_eps, config.rms_norm_eps

    def forward(self, streams: torch.Tensor) -> torch.Tensor:
        """Return the pre `[B, S, N]` that collapses `streams` `[B, S, N, D]` (contract spec_v4 item 5)."""
        u = _normalised_projection(streams, self.fn, self.norm_eps)
        return torch.sigmoid(u * self.scale + self.base.to(u.dtype)) + self.eps


def first_pre(streams: torch.Tensor) -> torch.Tensor:
    """Return the pre of the first site, stream 0 alone (contract section 4, item 1): `[B, S, N]`, float32 or wider."""
    pre = torch.zeros_like(wide(streams[..., 0]))
    pre[..., 0] = 1
    return pre
