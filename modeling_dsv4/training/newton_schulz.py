r"""Muon's orthogonalised update: the hybrid Newton–Schulz iteration and how a parameter is cut into its matrices.

Pure functions on plain tensors. Shapes: a parameter is `[r, c]` (one matrix) or `[E, r, c]` (an expert bank); rows may
be split into blocks, each of which is a matrix of its own (heads, output groups, gate and up projections).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence

import torch

# Eight fast steps that lift every singular value into [0.68, 1.13], then two that land on 1 (V4 report §2.4).
HYBRID_COEFFICIENTS = ((3.4445, -4.7750, 2.0315),) * 8 + ((2.0, -1.5, 0.5),) * 2
# Target root mean square of an update element, so that AdamW's learning rates carry over (V4.1 §2.5: gamma).
UPDATE_RMS = 0.18
# Floor of the Frobenius norm. Far below any real gradient, still a normal float32: larger values shrink small updates.
NORM_FLOOR = 1e-20


def newton_schulz(
    update: torch.Tensor,
    coefficients: Sequence[Sequence[float]] = HYBRID_COEFFICIENTS,
    *,
    eps: float = NORM_FLOOR,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
) -> torch.Tensor:
    r"""Replace each matrix by (nearly) its orthogonal factor: singular values go to 1, zero ones stay 0.

    Implements the V4 report §2.4: X = U / max(|U|_F, eps), then for each (a, b, c): A = X X^T; X <- a X + (b A + c A A) X,
    on the shorter side. Differs from the source: nothing.

    Args:
        update (`torch.Tensor` of shape `[..., r, c]`, floating point):
            The (Nesterov) momentum of each matrix. Magnitudes of any size; exact zeros give exact zeros.
        coefficients (sequence of `(a, b, c)`, *optional*, defaults to `HYBRID_COEFFICIENTS`):
            One triple a step.
        eps (`float`, *optional*, defaults to 1e-20):
            Floor of the Frobenius norm.
        dtype (`torch.dtype`, *optional*):
            Dtype of the matrix products; the dtype of `update` by default. bfloat16 is *wrong*, not merely noisy, for
            rank-deficient matrices: its rounding noise lies above the lift threshold (about 2.4e-5 of the norm).
        overwrite (`bool`, *optional*, defaults to `False`):
            Allow the normalisation to happen in the memory of `update` (its content is then lost).

    Returns:
        `torch.Tensor` of shape `[..., r, c]`, dtype `dtype`. Never aliases `update` unless `overwrite`.

    Raises:
        ValueError: if `update` has fewer than two dimensions.
    """
    if update.ndim < 2:
        raise ValueError(f"newton_schulz: `update` must be a matrix or a stack of matrices, got shape {update.shape}")
    dtype = dtype or update.dtype
    if update.numel() == 0:
        return update.to(dtype, copy=True)
    working = torch.promote_types(update.dtype, torch.float32)
    full = update if overwrite and update.dtype == working else update.to(working, copy=True)
    # Scale by the largest element first: squares of elements near the floor would underflow in float32.
    peak = torch.linalg.vector_norm(full, float("inf"), dim=(-2, -1), keepdim=True)
    full.div_(peak.clamp_min(torch.finfo(working).tiny))
    norm = torch.linalg.vector_norm(full, dim=(-2, -1), keepdim=True)
    full.div_(torch.maximum(norm, eps / peak.clamp_min(torch.finfo(working).tiny)))
    tall = full.shape[-2] > full.shape[-1]
    x = (full.mT if tall else full).to(dtype).reshape(-1, min(full.shape[-2:]), max(full.shape[-2:]))
    x = x.contiguous()
    del full
    x = _iterate(x, coefficients)
    x = x.view(*update.shape[:-2], *x.shape[-2:])
    return x.mT if tall else x


def _iterate(x: torch.Tensor, coefficients: Sequence[Sequence[float]]) -> torch.Tensor:
    """Run the steps on `[n, r, c]` with `r <= c`, in four buffers whatever their number (`x` is one of them)."""
    gram = x.new_empty(x.shape[0], x.shape[1], x.shape[1])
    poly, y = torch.empty_like(gram), torch.empty_like(x)
    for a, b, c in coefficients:
        torch.bmm(x, x.mT, out=gram)
        torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=poly)
        torch.baddbmm(x, poly, x, beta=a, out=y)
        x, y = y, x
    return x


def shape_factor(rows: int, cols: int) -> float:
    """Return sqrt(max(rows, cols)): an orthogonal `rows x cols` matrix times this has element RMS 1."""
    return math.sqrt(max(rows, cols))


def split_blocks(tensor: torch.Tensor, row_splits: Sequence[int] | None) -> list[torch.Tensor]:
    r"""View a parameter as stacks of equal matrices, one stack for each run of equal blocks.

    Args:
        tensor (`torch.Tensor` of shape `[r, c]` or `[E, r, c]`):
            Weight, gradient or momentum.
        row_splits (`Sequence[int]`, *optional*):
            Rows of each block, in order; `None` for one block.

    Returns:
        `list[torch.Tensor]` of shapes `[n, rows, c]`: views of `tensor` (writing to them writes to it). The order depends
        on shape and strides only, so equal layouts give matching lists.

    Raises:
        ValueError: if the blocks do not add up to the rows.
    """
    stacked = tensor.unsqueeze(0) if tensor.ndim == 2 else tensor
    if row_splits is None:
        return [stacked]
    if sum(row_splits) != stacked.shape[1] or min(row_splits) < 1:
        raise ValueError(f"row_splits {tuple(row_splits)} must be positive and add up to {stacked.shape[1]} rows")
    views, start = [], 0
    for rows, count in equal_runs(row_splits):
        run = stacked.narrow(1, start, rows * count).unflatten(1, (count, rows))
        start += rows * count
        if stacked.shape[0] == 1:
            views.append(run.squeeze(0))
        elif run.stride(0) == count * run.stride(1):
            views.append(run.flatten(0, 1))
        else:
            views.extend(run[:, i] for i in range(count))
    return views


def equal_runs(row_splits: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (rows, how many in a row) for each run of equal blocks."""
    start = 0
    for stop in range(1, len(row_splits) + 1):
        if stop == len(row_splits) or row_splits[stop] != row_splits[start]:
            yield row_splits[start], stop - start
            start = stop


def describe_splits(row_splits: Sequence[int] | None) -> str:
    """Return `64 x 512` for 64 blocks of 512 rows, `32 x 64 + 1024` for uneven ones, `whole` for none."""
    if not row_splits:
        return "whole"
    return " + ".join(f"{count} x {rows}" if count > 1 else f"{rows}" for rows, count in equal_runs(row_splits))


def newton_schulz_flops(rows: int, cols: int, steps: int = len(HYBRID_COEFFICIENTS)) -> int:
    """Return the floating-point operations of one matrix: steps * (4 r^2 c + 2 r^3) with r the shorter side."""
    short, long = min(rows, cols), max(rows, cols)
    return steps * (4 * short * short * long + 2 * short**3)


def workspace_bytes(rows: int, cols: int, dtype: torch.dtype, working: torch.dtype = torch.float32) -> int:
    """Return the bytes that one matrix needs beside its state while it is orthogonalised.

    Two moments compete: forming the update (gradient in the working dtype, update) and the iteration (update, X, its
    successor, and two square matrices).
    """
    area, square = rows * cols, min(rows, cols) ** 2
    return max(2 * area * working.itemsize, area * working.itemsize + (2 * area + 2 * square) * dtype.itemsize)


@contextlib.contextmanager
def full_float32_products() -> Iterator[None]:
    """Forbid TF32 / bfloat16 shortcuts in float32 products: 10 mantissa bits are as wrong here as bfloat16's 7."""
    before = torch.get_float32_matmul_precision()
    if before == "highest":
        yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
