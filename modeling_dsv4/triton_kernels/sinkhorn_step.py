r"""One Sinkhorn-balanced step of a whole matrix (V4.1 §2.5, Algorithm 1) in iterations // 2 + 2 passes over memory.

The first pass advances the momentum and keeps the update; a row normalisation and the column sums that follow it share
one read of the kept update; the last row normalisation and the write of the weight share another. Sums have a fixed
order: equal inputs give equal bits.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

# The update is multiplied by this power of two before it is squared, so that squares of small elements stay normal.
_SCALE = tl.constexpr(2.0**32)
# A column without any weight has no scale; 1 / eps would square to infinity.
_MAX_COLUMN_SCALE = tl.constexpr(1e18)
# Numbers of a tile, bytes of it and of all its copies in flight; tiles that one program adds up in float32.
_TILE, _TILE_BYTES, _FLIGHT_BYTES, _MAX_TILES = 8192, 65536, 196608, 512


@triton.jit
def _lerp(start, end, weight):
    # torch.lerp's two branches: each is exact at its end.
    step = end - start
    return tl.where(weight < 0.5, start + weight * step, end - step * (1 - weight))


@triton.jit
def _load_update(grad, momentum, kept, at, mask, beta, NESTEROV: tl.constexpr, KEPT: tl.constexpr):
    """The update times 2^32, float32: as kept by the first pass, or formed anew."""
    if KEPT:
        return tl.load(kept + at, mask=mask, other=0.0).to(tl.float32)
    update = tl.load(momentum + at, mask=mask, other=0.0).to(tl.float32)
    if NESTEROV:
        update = _lerp(tl.load(grad + at, mask=mask, other=0.0).to(tl.float32), update, beta)
    return update * _SCALE


@triton.jit
def _row_scales(square, norms, threshold, r, rows, mask, column_weight, eps, FIRST: tl.constexpr):
    """r of the next odd k: from the masked norms for k = 1, else r / (r |U c| + eps). All float32, `[ROWS]`."""
    if FIRST:
        norm = tl.load(norms + rows, mask=mask, other=0.0)
        return tl.where(norm > tl.load(threshold), tl.div_rn(1.0, norm + eps * _SCALE), 0.0)
    before = tl.load(r + rows, mask=mask, other=0.0)
    return before / (before * tl.sqrt(tl.sum(square * column_weight[None, :], 1)) + eps)


@triton.jit
def _momentum_kernel(
    grad, momentum, kept, norms, m, n, tiles, beta,
    NESTEROV: tl.constexpr, KEPT: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    col = tl.arange(0, COLS)
    for tile in tl.range(tiles, num_stages=STAGES):
        rows = (tl.program_id(0).to(tl.int64) * tiles + tile) * ROWS + tl.arange(0, ROWS)
        at, mask = rows[:, None] * n + col[None, :], (rows < m)[:, None] & (col < n)[None, :]
        g = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32)
        before = tl.load(momentum + at, mask=mask, other=0.0)
        after = _lerp(before.to(tl.float32), g, 1 - beta).to(before.dtype)
        tl.store(momentum + at, after, mask=mask)
        update = after.to(tl.float32)
        if NESTEROV:
            update = _lerp(g, update, beta)
        update *= _SCALE
        if KEPT:
            tl.store(kept + at, update.to(kept.dtype.element_ty), mask=mask)
        tl.store(norms + rows, tl.sqrt_rn(tl.sum(update * update, 1)), mask=rows < m)


@triton.jit
def _sweep_kernel(
    grad, momentum, kept, norms, threshold, r, c, partial, m, n, tiles, beta, eps,
    FIRST: tl.constexpr, NESTEROV: tl.constexpr, KEPT: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Normalise the rows (k odd) and add up this program's part of the column sums for k + 1."""
    col = tl.arange(0, COLS)
    weight = tl.load(c + col, mask=col < n, other=0.0)
    weight *= weight
    total = tl.zeros([COLS], tl.float32)
    for tile in tl.range(tiles, num_stages=STAGES):
        rows = (tl.program_id(0).to(tl.int64) * tiles + tile) * ROWS + tl.arange(0, ROWS)
        at, mask = rows[:, None] * n + col[None, :], (rows < m)[:, None] & (col < n)[None, :]
        square = _load_update(grad, momentum, kept, at, mask, beta, NESTEROV, KEPT)
        square *= square
        scale = _row_scales(square, norms, threshold, r, rows, rows < m, weight, eps, FIRST)
        tl.store(r + rows, scale, mask=rows < m)
        total += tl.sum(square * (scale * scale)[:, None], 0)
    tl.store(partial + tl.program_id(0).to(tl.int64) * n + col, total, mask=col < n)


@triton.jit
def _column_kernel(partial, c, programs, n, eps, PARTS: tl.constexpr, COLS: tl.constexpr):
    """Add up the parts in float64 and normalise the columns (k even)."""
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    total = tl.zeros([COLS], tl.float64)
    for start in range(0, programs, PARTS):
        part = start + tl.arange(0, PARTS)
        at, mask = part[:, None] * n + col[None, :], (part < programs)[:, None] & (col < n)[None, :]
        total += tl.sum(tl.load(partial + at, mask=mask, other=0.0).to(tl.float64), 0)
    before = tl.load(c + col, mask=col < n, other=0.0)
    after = tl.div_rn(before, before * tl.sqrt_rn(total.to(tl.float32)) + eps)
    tl.store(c + col, tl.minimum(after, _MAX_COLUMN_SCALE), mask=col < n)


@triton.jit
def _round_stochastically(full, seed, rows, col):
    """float32 to bfloat16, up or down with probabilities that make the mean exact; inf and NaN stay."""
    # Seven rounds pass the tests of randomness that ten pass (Salmon et al., "Parallel random numbers", 2011).
    row, col = tl.broadcast(rows[:, None], col[None, :])
    noise, _, _, _ = tl.philox(seed, col, row, 0, 0, n_rounds=7)
    bits = full.to(tl.uint32, bitcast=True)
    finite = (bits & 0x7F800000) != 0x7F800000
    rounded = ((bits + (noise.to(tl.uint32) & 0xFFFF)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return tl.where(finite, rounded, full).to(tl.bfloat16)


@triton.jit(do_not_specialize=["seed"])
def _write_kernel(
    weight, master, grad, momentum, kept, norms, threshold, r, c, m, n, tiles, beta, eps, width, scale, keep_weight, seed,
    MASTER: tl.constexpr, STOCHASTIC: tl.constexpr,
    FIRST: tl.constexpr, NESTEROV: tl.constexpr, KEPT: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Normalise the rows for the last time and change the weight: W (1 - decay) - scale sqrt(n) r_i U_ij c_j."""
    col = tl.arange(0, COLS)
    column = tl.load(c + col, mask=col < n, other=0.0)
    for tile in tl.range(tiles, num_stages=STAGES):
        rows = (tl.program_id(0).to(tl.int64) * tiles + tile) * ROWS + tl.arange(0, ROWS)
        at, mask = rows[:, None] * n + col[None, :], (rows < m)[:, None] & (col < n)[None, :]
        target = master if MASTER else weight
        before = tl.load(target + at, mask=mask, other=0.0).to(tl.float32)
        update = _load_update(grad, momentum, kept, at, mask, beta, NESTEROV, KEPT)
        row = _row_scales(update * update, norms, threshold, r, rows, rows < m, column * column, eps, FIRST)
        update = update * (row * width)[:, None] * column[None, :]
        after = before * keep_weight - scale * update
        if MASTER:
            tl.store(master + at, after, mask=mask)
        if STOCHASTIC:
            tl.store(weight + at, _round_stochastically(after, seed, rows.to(tl.int32), col), mask=mask)
        else:
            tl.store(weight + at, after.to(weight.dtype.element_ty), mask=mask)


def sinkhorn_step(
    weight: torch.Tensor,
    grad: torch.Tensor,
    momentum: torch.Tensor,
    *,
    beta: float,
    nesterov: bool,
    scale: float,
    decay: float = 0.0,
    iterations: int = 11,
    mask_threshold: float = 1e-3,
    eps: float = 1e-20,
    master: torch.Tensor | None = None,
    seed: int | None = None,
    keep: bool = True,
) -> None:
    r"""Advance the momentum and write the balanced update into the weight, all in place.

    M <- beta M + (1 - beta) G; U <- beta M + (1 - beta) G (or M); W <- W (1 - decay) - scale sqrt(n) r_i U_ij c_j with
    r and c as `balance_scales` defines them.

    Args:
        weight (`torch.Tensor` of shape `[m, n]`, bfloat16, float16 or float32), contiguous as all arguments:
            Rows are ids, columns hidden features.
        grad (`torch.Tensor` of shape `[m, n]`), momentum (`torch.Tensor` of shape `[m, n]`):
            Of these dtypes too, each its own.
        beta, nesterov, scale, decay: the rule above.
        iterations, mask_threshold, eps: K (odd), tau and epsilon, as in `balance_scales`.
        master (`torch.Tensor` of shape `[m, n]`, float32, *optional*):
            The weight in full precision; changed first, then rounded into `weight`.
        seed (`int`, *optional*):
            Round bfloat16 weights stochastically, with this seed.
        keep (`bool`, *optional*, defaults to `True`):
            Keep the update between the passes, in bfloat16 for bfloat16 and float16 weights (the mask and the first row
            norms still see it in float32), else in float32. Without, every pass forms it from G and M.
    """
    m, n = weight.shape
    if not weight.numel():
        return
    kept = weight
    if keep:
        kept = torch.empty_like(weight, dtype=torch.float32 if weight.dtype == torch.float32 else torch.bfloat16)
    norms, r = (torch.empty(m, dtype=torch.float32, device=weight.device) for _ in range(2))
    c = torch.ones(n, dtype=torch.float32, device=weight.device)
    rule = {"NESTEROV": nesterov, "KEPT": keep}
    bytes_ = kept.itemsize if keep else grad.itemsize + momentum.itemsize

    programs, tiles, shape = _plan(weight, _TILE, 8 * _processors(weight), momentum.itemsize + grad.itemsize, stages=1)
    _momentum_kernel[(programs,)](grad, momentum, kept, norms, m, n, tiles, beta, **rule, **shape)
    threshold = (norms.mean(dtype=torch.float64) * mask_threshold).float()
    source = (grad, momentum, kept, norms, threshold, r, c)

    programs, tiles, shape = _plan(weight, _TILE_BYTES // bytes_, _processors(weight), bytes_, stages=3)
    partial = torch.empty(programs, n, dtype=torch.float32, device=weight.device)
    for pair in range(iterations // 2):
        _sweep_kernel[(programs,)](*source, partial, m, n, tiles, beta, eps, FIRST=pair == 0, **rule, **shape)
        _column_kernel[(triton.cdiv(n, 32),)](partial, c, programs, n, eps, PARTS=64, COLS=32)

    target = weight if master is None else master
    programs, tiles, shape = _plan(weight, _TILE, _processors(weight), bytes_ + target.itemsize, stages=4)
    shape["num_warps"] = 8 if seed is None else 16
    _write_kernel[(programs,)](
        weight, target, *source, m, n, tiles, beta, eps, math.sqrt(n), scale, 1 - decay, (seed or 0) & 0x7FFFFFFF,
        MASTER=master is not None, STOCHASTIC=seed is not None, FIRST=iterations == 1, **rule, **shape,
    )  # fmt: skip


def _plan(weight: torch.Tensor, numbers: int, programs: int, bytes_: int, stages: int) -> tuple[int, int, dict]:
    """Programs, tiles of each, and the shape of a tile of at most `numbers` (or one row) of `bytes_` each in flight."""
    m, n = weight.shape
    cols = triton.next_power_of_2(n)
    rows = max(1, triton.next_power_of_2(numbers // cols + 1) // 2)
    tiles = min(triton.cdiv(triton.cdiv(m, rows), programs), _MAX_TILES)
    stages = max(1, min(stages, 1 + _FLIGHT_BYTES // (rows * cols * bytes_)))
    return triton.cdiv(m, rows * tiles), tiles, {"ROWS": rows, "COLS": cols, "STAGES": stages, "num_warps": 8}


def _processors(tensor: torch.Tensor) -> int:
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count if tensor.is_cuda else 1
