"""Rotary position embedding on the last channels of a head, in adjacent pairs, with and without YaRN.

Source: contract section 5. Two tables serve a model: plain RoPE for window-only layers, and a larger base with YaRN for
everything in the compressed layers (queries, window entries, compressed entries, index queries and keys, output).
"""

from __future__ import annotations

import math

import torch


def rotary_frequencies(
    dim: int, theta: float, yarn: dict | None = None, *, device: torch.device | None = None
) -> torch.Tensor:
    r"""Return the rotation speed of every channel pair.

    Implements contract section 5:  f_i = theta ** (-2i / dim); with YaRN
    f = f / factor * ramp + f * (1 - ramp), where ramp rises from 0 to 1 between the pairs that turn `beta_fast` and
    `beta_slow` times within the original length. No attention factor.

    Args:
        dim (`int`): rotated channels (even).
        theta (`float`): base.
        yarn (`dict`, *optional*): `factor`, `beta_fast`, `beta_slow`, `original_max_position_embeddings`.
        device (`torch.device`, *optional*): of the result.

    Returns:
        `torch.Tensor` of shape `[dim // 2]`, float32: radians per position. Every step is rounded to float32, as in the release.
    """
    frequencies = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim)
    if yarn is None:
        return frequencies

    def pair_that_turns(turns: float) -> float:
        length = yarn["original_max_position_embeddings"]
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_that_turns(yarn["beta_fast"])), 0)
    high = min(math.ceil(pair_that_turns(yarn["beta_slow"])), dim - 1)
    pairs = torch.arange(dim // 2, dtype=torch.float32, device=device)
    ramp = ((pairs - low) / max(high - low, 1e-3)).clamp(0, 1)
    return frequencies / yarn["factor"] * ramp + frequencies * (1 - ramp)


def rotary_table(position_ids: torch.Tensor, frequencies: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Return cosine and sine of every position and channel pair.

    Args:
        position_ids (`torch.Tensor` of shape `[..., S]`, integer): token positions from 0.
        frequencies (`torch.Tensor` of shape `[P]`, float32): radians per position.

    Returns:
        two `torch.Tensor` of shape `[..., S, P]`, float32. The angle is a float32 product (contract section 5); its
        cosine and sine are rounded once, so that they do not depend on a vector library.
    """
    angle = (position_ids[..., None].float() * frequencies).double()
    return angle.cos().float(), angle.sin().float()


def rotate(x: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor], *, inverse: bool = False) -> torch.Tensor:
    r"""Rotate the last channels of every vector by its position.

    Pairs are adjacent channels (2i, 2i + 1) read as complex numbers; the product is taken in float32 or wider and cast
    back once (contract section 5). `inverse` applies the conjugate: the attention output is turned back at the
    query's position before its projection.

    Args:
        x (`torch.Tensor` of shape `[B, S, D]` or `[B, S, H, D]`, any float dtype).
        table: cosine and sine, each `[B or 1, S, P]` with 2P <= D.

    Returns:
        `torch.Tensor` of the shape and dtype of `x`.
    """
    cos, sin = (t.unsqueeze(-2) if x.ndim == 4 else t for t in table)
    if inverse:
        sin = -sin
    width = 2 * cos.shape[-1]
    rest, tail = x.split([x.shape[-1] - width, width], dim=-1)
    even, odd = tail.unflatten(-1, (-1, 2)).to(torch.promote_types(x.dtype, torch.float32)).unbind(-1)
    tail = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)
    return torch.cat([rest, tail.to(x.dtype)], dim=-1)
