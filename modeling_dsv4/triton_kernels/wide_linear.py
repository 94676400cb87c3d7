"""Logits of the head and of the router: float32 sums of the exact products of bfloat16 numbers.

The reference widens both factors; a product of two bfloat16 numbers is exact in float32, so the matrix units give the same.
Few rows are bound by the bytes of the weight, which the kernel reads once; of many rows cuBLAS does the same faster.

Sources: contract sections 4 and 7, `modeling_dsv4/layers.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from .number_formats import operand_dtype
from .packed_rows import Tile

# As many as a tile of the kernel holds.
FEW_ROWS = 64


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


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a b of bfloat16 matrices, summed in float32."""
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def _few_rows(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    (m, k), n = rows.shape, len(weight)
    out = torch.empty(m, n, dtype=torch.float32, device=rows.device)
    if n >= 4096:
        tile = Tile(64, max(16, triton.next_power_of_2(m)), 128, 1, 4, 4)
    else:
        tile = Tile(16, min(16, triton.next_power_of_2(m)), 128, 8 if m <= 4 else 4, 3, 4)
    grid = triton.cdiv(m, tile.bm), triton.cdiv(n, tile.bn)
    _wide_kernel[grid](rows, weight, out, m, n, k, *tile.of(k), num_warps=tile.warps)
    return out


class _WideLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        rows = x.reshape(-1, weight.shape[1]).contiguous()
        out = _few_rows(rows, weight) if 0 < len(rows) <= FEW_ROWS else _product(rows, weight.mT)
        return out.view(*x.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad = grad.reshape(-1, len(weight))
        # Two parts hold 16 bits of each gradient; the results are rounded to bfloat16's 8.
        high = grad.bfloat16()
        parts = high, (grad - high).bfloat16()
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = sum(_product(part, weight) for part in parts).bfloat16().view(x.shape)
        if ctx.needs_input_grad[1]:
            rows = x.reshape(-1, x.shape[-1])
            of_weight = sum(_product(part.mT, rows) for part in parts).bfloat16()
        return of_x, of_weight


def wide_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    r"""Return x W^T with products and sums in float32.

    Args:
        x (`torch.Tensor` of shape `[..., K]`, bfloat16) and weight (`[N, K]`, bfloat16).

    Returns:
        `torch.Tensor` of shape `[..., N]`, float32. Its gradients are bfloat16.
    """
    return _WideLinear.apply(x, weight)


wide_linear.has_backward = True
