"""Writing an update into a weight: decoupled decay, float32 master copies, stochastic rounding."""

from __future__ import annotations

import zlib

import torch

from .sharding import ShardLayout, local_part


def write_update(
    weight: torch.Tensor,
    update: torch.Tensor,
    *,
    scale: float,
    decay: float = 0.0,
    master: torch.Tensor | None = None,
    noise: torch.Generator | None = None,
) -> None:
    r"""Perform `weight <- weight (1 - decay) - scale * update` in the precision of `update`, in place.

    Args:
        weight (`torch.Tensor` of shape `[...]`, any floating dtype):
            Changed in place; may be a view.
        update (`torch.Tensor` of shape `[...]`):
            The direction; not changed.
        scale (`float`):
            Learning rate times whatever multiplies the update only.
        decay (`float`, *optional*, defaults to 0):
            Learning rate times weight decay.
        master (`torch.Tensor` of shape `[...]`, float32, *optional*):
            The weight in full precision; changed first, then rounded into `weight`.
        noise (`torch.Generator`, *optional*):
            Round bfloat16 weights stochastically with it (unbiased: small updates are not lost on average).
    """
    if master is None and noise is None and not decay:
        # One pass: mixed dtypes are added in the wider one and rounded once.
        weight.add_(update, alpha=-scale)
        return
    target = weight if master is None else master
    working = torch.promote_types(target.dtype, torch.float32)
    full = target if target.dtype == working else target.to(working)
    if decay:
        full.mul_(1 - decay)
    full.add_(update, alpha=-scale)
    if full is weight:
        return
    weight.copy_(round_stochastically(full, noise) if noise is not None else full)


def round_stochastically(full: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Round float32 to bfloat16, up or down with probabilities that make the mean exact; exact values stay."""
    bits = full.contiguous().view(torch.int32)
    noise = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, device=bits.device, generator=generator)
    rounded = (bits + noise).bitwise_and_(-(1 << 16)).view(torch.float32)
    # An all-ones exponent (inf, NaN) must not be carried into.
    return torch.where(full.isfinite(), rounded, full).to(torch.bfloat16)


def rounding_noise(group: dict, name: str, parameter: torch.Tensor, state: dict) -> torch.Generator | None:
    """Return the noise of a stochastically rounded parameter, or None.

    Fixed by parameter, step and shard: a resumed run rounds as the straight one did, replicas round alike.
    """
    if group["master"] != "stochastic" or parameter.dtype != torch.bfloat16:
        return None
    shard = 0
    for mesh_dim, _ in ShardLayout(parameter, name).shards:
        shard = shard * parameter.device_mesh.size(mesh_dim) + parameter.device_mesh.get_local_rank(mesh_dim)
    generator = torch.Generator(device=local_part(parameter).device)
    generator.manual_seed(zlib.crc32(f"{name}/{int(state['step'])}/{shard}".encode()))
    return generator
