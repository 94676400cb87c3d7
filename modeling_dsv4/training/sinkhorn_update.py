r"""The Sinkhorn-balanced update of id tables (V4.1 §2.5, Algorithm 1). Not the doubly stochastic Sinkhorn of mHC.

Pure functions. `[m, n]`: m rows are ids (tokens, n-grams), n columns hidden features, whatever their sizes.
The update is never written out: after K alternating normalisations it is `r_i G_ij c_j`, and only r and c are carried.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch

ITERATIONS = 11
MASK_THRESHOLD = 1e-3
EPS = 1e-20
# Gradients are scaled by this power of two (exact) before they are squared, so that elements down to about 3e-29 (and
# up to 4e9) keep a normal square in float32; r is scaled back.
_SCALE = 2.0**32
# A column without any weight has no scale: 1/eps would square to infinity in float32, and 0 * inf is NaN.
_MAX_COLUMN_SCALE = 1e18

Reduce = Callable[[torch.Tensor], torch.Tensor]


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def balance_scales(
    blocks: Sequence[Callable[[], torch.Tensor]],
    columns: int,
    *,
    keep: bool = True,
    total_rows: int | torch.Tensor | None = None,
    iterations: int = ITERATIONS,
    mask_threshold: float = MASK_THRESHOLD,
    eps: float = EPS,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    sum_over_row_shards: Reduce | None = None,
    sum_over_column_shards: Reduce | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Return the row and column scales that balance a matrix given in blocks of rows.

    Implements V4.1 §2.5, Algorithm 1, lines 3-6, as U^(k) = diag(r) G diag(c):
    rho_i = |G_i|; r_i = [rho_i > tau mean(rho)]; odd k: r_i <- r_i / (r_i |G_i c| + eps); even k: the same for columns.
    Differs from the source: U is not written out (the same numbers up to rounding).

    Args:
        blocks (sequence of callables returning `[rows, n]`, `dtype`):
            The squared update (`scaled_square`) in consecutive row blocks.
        columns (`int`):
            n of this shard.
        keep (`bool`, *optional*, defaults to `True`):
            Keep the squares between the passes. Without, every block is asked for again in each of the
            2 + iterations // 2 passes, and no more than one is in memory.
        total_rows (`int` or 0-d tensor, *optional*):
            m over all row shards; the rows of `blocks` by default.
        iterations (`int`, *optional*, defaults to 11):
            K, odd.
        mask_threshold (`float`, *optional*, defaults to 1e-3):
            tau. Rows with rho <= tau * mean(rho) get no update.
        eps (`float`, *optional*, defaults to 1e-20):
            Added to every norm.
        dtype, device:
            float32 or float64, and where the scales live (needed when this shard holds no row).
        sum_over_row_shards, sum_over_column_shards (callable, *optional*):
            Add a tensor up over the ranks that hold other rows (one float64 scalar, then n values for each even k), or
            other columns (m values for rho and for each odd k > 1), of the same matrix.

    Returns:
        `tuple`: r `[m]` (0 for masked rows) and c `[n]`, `dtype`.

    Raises:
        ValueError: if `iterations` is not odd.
    """
    if iterations < 1 or iterations % 2 == 0:
        raise ValueError(f"iterations must be odd (Algorithm 1 ends on a row normalisation), got {iterations}")
    across_rows = sum_over_row_shards or _same
    squares = [functools.partial(_same, block()) for block in blocks] if keep else list(blocks)
    energy = [block().sum(1) for block in squares]
    rows = [len(part) for part in energy]
    norms = torch.cat(energy) if energy else torch.zeros(0, dtype=dtype, device=device)
    norms = (sum_over_column_shards(norms) if sum_over_column_shards else norms).sqrt()
    # The mean runs over up to 4e8 rows: float64, where a float32 running sum would lose digits.
    mean = across_rows(norms.sum(dtype=torch.float64)) / (sum(rows) if total_rows is None else total_rows)
    kept = norms > (mask_threshold * mean).to(dtype)
    r = kept / (norms + eps * _SCALE)  # k = 1; r carries the scale of the squares from here on
    c = torch.ones(columns, dtype=dtype, device=device)
    pairs = iterations // 2
    if pairs:
        energy = _column_energy(squares, rows, r, columns)
    for pair in range(pairs):
        c = _normalise_columns(c, across_rows(energy), eps)
        r, energy = _sweep(squares, rows, r, c, eps, sum_over_column_shards, want_columns=pair < pairs - 1)
    return r * _SCALE, c


def scaled_square(update: torch.Tensor) -> torch.Tensor:
    """Return `(2^32 update)^2`, written over `update`: what `balance_scales` adds up."""
    return update.mul_(_SCALE).square_()


def _column_energy(squares, rows: list[int], r: torch.Tensor, columns: int) -> torch.Tensor:
    """sum_i r_i^2 G_ij^2 for every column; block sums are added up in float64."""
    total = torch.zeros(columns, dtype=torch.float64, device=r.device)
    for block, weight in zip(squares, r.square().split(rows), strict=True):
        total += torch.mv(block().T, weight)
    return total.to(r.dtype)


def _sweep(
    squares, rows: list[int], r: torch.Tensor, c: torch.Tensor, eps: float, across_columns: Reduce | None, want_columns
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Normalise the rows (k odd) and add up the columns for k + 1, reading every block once if no rank shares a row."""
    weight = c.square()
    if across_columns is not None:
        parts = [torch.mv(block(), weight) for block in squares]
        r = _normalise_rows(r, across_columns(torch.cat(parts) if parts else torch.zeros_like(r)), eps)
        return r, _column_energy(squares, rows, r, len(c)) if want_columns else None
    total = torch.zeros(len(c), dtype=torch.float64, device=c.device)
    parts = []
    for block, part in zip(squares, r.split(rows), strict=True):
        square = block()
        part = _normalise_rows(part, torch.mv(square, weight), eps)
        if want_columns:
            total += torch.mv(square.T, part.square())
        parts.append(part)
    return torch.cat(parts) if parts else r, total.to(c.dtype)


def _normalise_rows(r: torch.Tensor, energy: torch.Tensor, eps: float) -> torch.Tensor:
    return r / (r * energy.sqrt() + eps)


def _normalise_columns(c: torch.Tensor, energy: torch.Tensor, eps: float) -> torch.Tensor:
    return (c / (c * energy.sqrt() + eps)).clamp_max_(_MAX_COLUMN_SCALE)


def sinkhorn_balance(
    update: torch.Tensor,
    *,
    iterations: int = ITERATIONS,
    mask_threshold: float = MASK_THRESHOLD,
    eps: float = EPS,
) -> torch.Tensor:
    r"""Balance an update so that every kept row has RMS 1 and the columns nearly equal ones.

    Implements V4.1 §2.5, Algorithm 1, lines 3-7: Delta = sqrt(n) U^(K). Differs from the source: nothing.

    Args:
        update (`torch.Tensor` of shape `[m, n]`, floating point):
            Rows are ids, columns hidden features.
        iterations, mask_threshold, eps:
            K (odd), tau and epsilon, as in `balance_scales`.

    Returns:
        `torch.Tensor` of shape `[m, n]`, float32 (float64 for float64 input), fresh memory. Masked rows are 0.

    Raises:
        ValueError: if `update` is not a matrix or `iterations` is not odd.
    """
    if update.ndim != 2:
        raise ValueError(f"sinkhorn_balance: `update` must have two dimensions [ids, hidden], got {update.shape}")
    full = update.to(torch.promote_types(update.dtype, torch.float32))
    r, c = balance_scales(
        [lambda: scaled_square(full.clone())],
        full.shape[1],
        iterations=iterations,
        mask_threshold=mask_threshold,
        eps=eps,
        dtype=full.dtype,
        device=full.device,
    )
    return apply_scales(full.clone(), r, c)


def apply_scales(update: torch.Tensor, r: torch.Tensor, c: torch.Tensor, total_columns: int | None = None):
    """Return `sqrt(n) r_i G_ij c_j`, written over `update` `[m, n]`; n is `total_columns` when columns are sharded."""
    width = update.shape[1] if total_columns is None else total_columns
    return update.mul_((r * math.sqrt(width))[:, None]).mul_(c)
