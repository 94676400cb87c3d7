"""RMSNorm in one launch, products in float32 before the single cast.

Sources: contract section 3, `modeling_dsv4/layers.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _norm_kernel(x_ptr, weight_ptr, out_ptr, rows, eps, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr):
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    column = tl.arange(0, BD)
    at = row[:, None].to(tl.int64) * D + column[None, :]
    mask = (row < rows)[:, None] & (column < D)[None, :]
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=column < D, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, 1) / D + eps)
    tl.store(out_ptr + at, (weight[None, :] * (x * inverse[:, None])).to(out_ptr.dtype.element_ty), mask=mask)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    r"""Divide rows by their root mean square and multiply them by a weight.

    Args:
        x (`torch.Tensor` of shape `[..., D]`, float32 or narrower) and weight (`[D]`, float32 or narrower).
        eps: added to the mean square.

    Returns:
        `torch.Tensor` of shape `[..., D]`, dtype of `x`.
    """
    d = x.shape[-1]
    x, out = x.contiguous(), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, width = x.numel() // d, triton.next_power_of_2(d)
    height = max(1, min(2048 // width, triton.next_power_of_2(rows)))
    if rows:
        grid = (triton.cdiv(rows, height),)
        warps = max(1, min(8, height * width // 256))
        _norm_kernel[grid](x, weight, out, rows, eps, D=d, BR=height, BD=width, num_warps=warps)
    return out
