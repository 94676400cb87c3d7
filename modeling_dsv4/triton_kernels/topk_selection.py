"""Exact top-k of long rows of scores, columns ascending, and the candidate blocks of a row.

    scores [C] ──best of 8──> [C / 8] ── ... ──> a row that one program holds ──> k blocks ──> k of their columns ── ...

A program holds its columns as order-preserving integers, finds the k-th best bit by bit, and one running sum gives every
chosen column its place. A longer row is searched from above: the k blocks of the best maxima (of equal ones, the first)
hold the k best columns, because a block that loses does so against k columns that are better, or equal and further left.

Source: contract sections 6.2 and 6.3; ties go to the lower column.
"""

import torch
import triton
import triton.language as tl

# Columns that one program holds, or 8 k if that is more.
ROW = 1 << 12
# Columns whose maxima one program computes: of 8, of 64, of 512 and of 4096.
TILE, MAX_LEVELS = 1 << 12, 4
MAX_K = 1 << 12

# Integers of the same bits, and the bits of infinity.
_INTEGERS = {
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float16: (torch.int16, 0x7C00),
    torch.float32: (torch.int32, 0x7F800000),
}
_NOTHING = tl.constexpr(-(2**31))


@triton.jit
def _ordered(bits, BITS: tl.constexpr, INFINITY: tl.constexpr):
    """Map the bits of floats to int32 of the same order; -inf and NaN to `_NOTHING`."""
    bits = bits.to(tl.int32)
    keys = bits ^ ((bits >> 31) & ((1 << (BITS - 1)) - 1))
    keys = tl.where(keys == -1, 0, keys)  # the two zeros are equal
    return tl.where((keys >= -INFINITY) & (keys <= INFINITY), keys, _NOTHING)


@triton.jit
def _kth_best(keys, k, low, high):
    """Largest integer that at least k keys reach, if `low` is one and no key is above `high`."""
    while low < high:
        middle = (low | high) - ((low ^ high) >> 1)  # the mean, rounded up
        reached = tl.sum((keys >= middle).to(tl.int32)) >= k
        low, high = tl.where(reached, middle, low), tl.where(reached, high, middle - 1)
    return low


@triton.jit
def _select_kernel(
    scores, maxima, visible, pool, out, k, score_row, maxima_row, columns, pool_row, kept,
    UNIT: tl.constexpr, LEVELS: tl.constexpr, POOL_BLOCK: tl.constexpr, BITS: tl.constexpr, INFINITY: tl.constexpr,
    WIDTH: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """Select in one row of columns that stand for `UNIT` visible ones, from the highest level of maxima downwards."""
    row = tl.program_id(0).to(tl.int64)
    scores, maxima, out = scores + row * score_row, maxima + row * maxima_row, out + row * kept
    entries = columns
    if visible is not None:
        entries = tl.minimum(tl.cdiv(tl.load(visible + row).to(tl.int32), UNIT), columns)
    places = tl.arange(0, WIDTH)
    low, high = tl.full((), -(1 << (BITS - 1)), tl.int32), tl.full((), INFINITY, tl.int32)
    for above in tl.static_range(LEVELS + 1):
        source, size = scores, columns
        for below in tl.static_range(1, LEVELS - above + 1):
            source = maxima if below == 1 else source + size
            size = tl.cdiv(size, 8)
        positions = places
        if above > 0:  # among the blocks that the level above chose
            block = tl.load(out + places // 8, places // 8 < tl.minimum(k, tl.cdiv(size, 8)), other=-1)
            positions = tl.where(block < 0, size, block * 8 + places % 8)
        there = positions < tl.cdiv(entries, 1 << (3 * (LEVELS - above)))
        keys = tl.where(there, _ordered(tl.load(source + positions, there, other=0), BITS, INFINITY), _NOTHING)
        last = tl.full((), _NOTHING, tl.int32)
        if tl.sum((keys > _NOTHING).to(tl.int32)) > k:
            # The best is the same on every level, and what k maxima reach k columns reach.
            if above == 0:
                high = tl.max(keys)
            low = _kth_best(keys, k, low, high)
            last = low
        better, equal = (keys > last).to(tl.int32), ((keys == last) & (keys > _NOTHING)).to(tl.int32)
        # Both counts share a word: neither exceeds 2**15.
        counts = better | (equal << 16)
        total, before = tl.sum(counts), tl.cumsum(counts) - counts
        room, ties = k - (total & 0xFFFF), (before >> 16) & 0xFFFF
        place = (before & 0xFFFF) + tl.minimum(ties, room)
        if POOL_BLOCK > 0 and above == LEVELS:
            block = tl.load(pool + row * pool_row + positions // POOL_BLOCK, there, other=0)
            positions = block * POOL_BLOCK + positions % POOL_BLOCK
        tl.debug_barrier()  # all blocks are read
        tl.store(out + place, positions, (better > 0) | ((equal > 0) & (ties < room)))
        found = tl.minimum((total & 0xFFFF) + ((total >> 16) & 0xFFFF), k)
        slots = tl.arange(0, KEPT)
        tl.store(out + slots, -1, (slots >= found) & (slots < kept))
        tl.debug_barrier()  # all chosen are written


@triton.jit
def _maxima_kernel(
    scores, visible, best, columns, best_row,
    UNIT: tl.constexpr, LEVELS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Best of each 8, 64, ... visible columns of a row, the levels one after the other in a row of `best`."""
    row, start = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE
    entries = columns
    if visible is not None:
        entries = tl.minimum(tl.cdiv(tl.load(visible + row).to(tl.int32), UNIT), columns)
    if start < entries:
        column = start + tl.arange(0, TILE)
        maxima = tl.load(scores + row * columns + column, column < entries, other=float("-inf")).to(tl.float32)
        out, count = best + row * best_row, columns
        for level in tl.static_range(1, LEVELS + 1):
            maxima = tl.max(tl.reshape(maxima, (TILE >> (3 * level), 8)), axis=1)
            place = (start >> (3 * level)) + tl.arange(0, TILE >> (3 * level))
            count = tl.cdiv(count, 8)
            tl.store(out + place, maxima.to(best.dtype.element_ty), place < count)
            out += count


@triton.jit
def _candidates_kernel(
    scores, visible, best, columns, count, BLOCK_SIZE: tl.constexpr, SIZE: tl.constexpr, BLOCKS: tl.constexpr
):
    """Best score of each block of a row that has visible columns, +inf for the block of the newest."""
    row = tl.program_id(0).to(tl.int64)
    entries = tl.minimum(tl.load(visible + row).to(tl.int32), columns)
    blocks = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    if tl.program_id(1) * BLOCKS * BLOCK_SIZE < entries:
        places = tl.arange(0, SIZE)[None, :]
        column = blocks[:, None] * BLOCK_SIZE + places
        there = (places < BLOCK_SIZE) & (column < entries)
        maxima = tl.max(tl.load(scores + row * columns + column, there, other=float("-inf")).to(tl.float32), axis=1)
        maxima = tl.where(blocks == (entries - 1) // BLOCK_SIZE, float("inf"), maxima)
        tl.store(best + row * count + blocks, maxima.to(best.dtype.element_ty), blocks * BLOCK_SIZE < entries)


def select_topk(scores: torch.Tensor, k: int, visible: torch.Tensor | None = None) -> torch.Tensor:
    r"""Return the k best columns: score descending, then the lower column; columns of score -inf or NaN never.

    Args:
        scores (`torch.Tensor` of shape `[..., C]`, bfloat16, float16 or float32).
        k (`int`): columns wanted, at most 4096.
        visible (`torch.Tensor` of shape `[...]`, integer, *optional*): columns of each row that count, from the left;
            what lies behind them is not read.

    Returns:
        `torch.Tensor` of shape `[..., min(k, C)]`, int32: columns ascending, -1 (at the end) where there is none.
    """
    return _select(_rows(scores), visible, k).unflatten(0, scores.shape[:-1])


def select_candidate_blocks(scores: torch.Tensor, visible: torch.Tensor, *, block_size: int, k: int) -> torch.Tensor:
    r"""Return the blocks of entries in which later layers may select; the block of the newest visible one is kept.

    Args:
        scores (`torch.Tensor` of shape `[B, T, C]`, C at least 1): index scores; columns that are not visible are not read.
        visible (`torch.Tensor` of shape `[B, T]`, integer): visible entries of each query.
        block_size (`int`): consecutive entries of a block.
        k (`int`): blocks kept, at most 4096.

    Returns:
        `torch.Tensor` of shape `[B, T, min(k, ceil(C / block_size))]`, int32: blocks ascending, -1 where there is none.
    """
    rows, size = _rows(scores), triton.next_power_of_2(block_size)
    best = rows.new_empty(len(rows), triton.cdiv(rows.shape[1], block_size))
    blocks = max(1, TILE // size)
    _candidates_kernel[(len(rows), triton.cdiv(best.shape[1], blocks))](
        rows, visible, best, rows.shape[1], best.shape[1], BLOCK_SIZE=block_size, SIZE=size, BLOCKS=blocks
    )
    return _select(best, visible, k, unit=block_size).unflatten(0, scores.shape[:-1])


def select_in_pool(scores: torch.Tensor, k: int, pool: torch.Tensor, block_size: int) -> torch.Tensor:
    r"""Return the k best entries of the blocks of a pool.

    Args:
        scores (`torch.Tensor` of shape `[B, T, P * block_size]`): of the entries of the pool, -inf where not visible.
        k (`int`): entries wanted, at most 4096.
        pool (`torch.Tensor` of shape `[B, T, P]`, int32): blocks ascending, -1 (at the end) where there is none.
        block_size (`int`): consecutive entries of a block.

    Returns:
        `torch.Tensor` of shape `[B, T, min(k, P * block_size)]`, int32: entries ascending, -1 where there is none.
    """
    found = _select(_rows(scores), None, k, pool=pool.flatten(0, -2).contiguous(), pool_block=block_size)
    return found.unflatten(0, scores.shape[:-1])


def _rows(scores: torch.Tensor) -> torch.Tensor:
    if scores.dtype not in _INTEGERS:
        raise ValueError(f"scores are {scores.dtype}; accepted: {', '.join(map(str, _INTEGERS))}.")
    return scores.reshape(-1, scores.shape[-1]).contiguous()


def _select(scores, visible, k, *, unit=1, pool=None, pool_block=0):
    """Select in rows `[R, C]` of columns that stand for `unit` visible ones, or for the entries of a pool `[R, P]`."""
    if k > MAX_K:
        raise ValueError(f"k is {k}; accepted: at most {MAX_K}.")
    rows, columns = scores.shape
    width = max(ROW, 8 * triton.next_power_of_2(k))
    sizes = [columns]
    while sizes[-1] > width:
        sizes.append(triton.cdiv(sizes[-1], 8))
    levels = len(sizes) - 1
    if levels > MAX_LEVELS:
        raise ValueError(f"rows have {columns} columns; accepted: at most {width * 8**MAX_LEVELS}.")
    visible = None if visible is None else visible.reshape(-1)
    out = torch.empty(rows, min(k, columns), dtype=torch.int32, device=scores.device)
    maxima = scores
    if levels:
        maxima = scores.new_empty(rows, sum(sizes[1:]))
        _maxima_kernel[(rows, triton.cdiv(columns, TILE))](
            scores, visible, maxima, columns, maxima.shape[1], UNIT=unit, LEVELS=levels, TILE=TILE, num_warps=4
        )
    integer, infinity = _INTEGERS[scores.dtype]
    _select_kernel[(rows,)](
        scores.view(integer), maxima.view(integer), visible, out if pool is None else pool, out, k,
        columns, maxima.shape[1], columns, 0 if pool is None else pool.shape[1], out.shape[1],
        UNIT=unit, LEVELS=levels, POOL_BLOCK=pool_block, BITS=8 * scores.itemsize, INFINITY=infinity,
        WIDTH=width, KEPT=triton.next_power_of_2(k), num_warps=8 if width <= ROW else 16,
    )  # fmt: skip
    return out
