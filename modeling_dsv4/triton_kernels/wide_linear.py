"""Logits of the head and of the router: float32 sums of the exact products of bfloat16 numbers.

The reference widens both factors; a product of two bfloat16 numbers is exact in float32, so the matrix units give the same.

Sources: contract sections 4 and 7, `modeling_dsv4/layers.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .number_formats import operand_dtype


@triton.jit
def _wide_kernel(
    x,
    weight,
    out,
    M,
    N,
    K: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """`out[m, n] = weight[n] . x[m]`; with `SPLIT` > 1 a tile has parts of K side by side, as in `multiply_rows`."""
    DTYPE: tl.constexpr = operand_dtype(x.dtype.element_ty)
    PART: tl.constexpr = K // SPLIT
    row, column = tl.arange(0, SPLIT * BN), tl.arange(0, SPLIT * BM)
    n, m = tl.program_id(1) * BN + row % BN, tl.program_id(0) * BM + column % BM
    k = tl.arange(0, BK)
    weight += (tl.minimum(n, N - 1).to(tl.int64) * K + row // BN * PART)[:, None] + k[None, :]
    x += (m.to(tl.int64) * K + column // BM * PART)[None, :] + k[:, None]
    acc = tl.zeros([SPLIT * BN, SPLIT * BM], tl.float32)
    for start in tl.range(0, PART, BK, num_stages=STAGES):
        if PART % BK == 0:
            w = tl.load(weight + start)
            values = tl.load(x + start, mask=(m < M)[None, :], other=0.0)
        else:
            w = tl.load(weight + start, mask=k[None, :] < PART - start, other=0.0)
            values = tl.load(x + start, mask=(m < M)[None, :] & (k[:, None] < PART - start), other=0.0)
        acc = tl.dot(w.to(DTYPE), values.to(DTYPE), acc, input_precision="ieee")
    if SPLIT > 1:
        acc = tl.where((row // BN)[:, None] == (column // BM)[None, :], acc, 0.0)
        acc = tl.sum(tl.sum(tl.reshape(acc, [SPLIT, BN, SPLIT, BM]), axis=2), axis=0)
    n, m = tl.program_id(1) * BN + tl.arange(0, BN), tl.program_id(0) * BM + tl.arange(0, BM)
    at = out + m[None, :].to(tl.int64) * N + n[:, None]
    tl.store(at, acc, mask=(m < M)[None, :] & (n < N)[:, None])


def wide_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    r"""Return x W^T with products and sums in float32.

    Args:
        x (`torch.Tensor` of shape `[..., K]`, bfloat16) and weight (`[N, K]`, bfloat16).

    Returns:
        `torch.Tensor` of shape `[..., N]`, float32.
    """
    n, k = weight.shape
    rows = x.reshape(-1, k).contiguous()
    m = len(rows)
    out = torch.empty(*x.shape[:-1], n, dtype=torch.float32, device=x.device)
    if m == 0:
        return out
    if n >= 4096:
        bn, bm, bk, split, stages, warps = 64, min(64, max(16, triton.next_power_of_2(m))), 128, 1, 4, 4
    else:
        bn, bm, bk, split, stages, warps = 16, min(16, triton.next_power_of_2(m)), 128, 8 if m <= 4 else 4, 3, 4
    split = split if k % (split * bk) == 0 else 1
    grid = triton.cdiv(m, bm), triton.cdiv(n, bn)  # the first axis has no limit that rows could reach
    _wide_kernel[grid](rows, weight, out, m, n, k, bn, bm, bk, split, stages, num_warps=warps)
    return out
