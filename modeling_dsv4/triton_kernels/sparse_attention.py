"""Attention to a window and to compressed entries in one softmax with a sink per head, over packed or float values.

A program serves up to 64 heads of one query: keys are values and belong to no head, so the heads are the rows of every
matrix product. It walks through the window and then through the entries that its query selected, tile by tile; packed
entries are unpacked in registers. Where there are few queries, several programs share the tiles of one and a second
kernel combines them.

Source: contract section 6; the reference is `attend_with_sinks` in `modeling_dsv4/sparse_attention.py`.
"""

import torch
import triton
import triton.language as tl

from .attention_gradients import attention_gradients
from .number_formats import round_to
from .packed_values import FORMATS, read_rows, stored_tensors, tail_channels, unpack

# Beyond this many queries, packed values are unpacked once instead of by every query.
FEW_QUERIES = 16
# Tiles of a query are shared out among at most MAX_SPLITS programs, while there are fewer than SPLIT_PROGRAMS (one for
# each multiprocessor of an H200).
SPLIT_PROGRAMS, MAX_SPLITS = 132, 128
# Numbers that a program combines.
COMBINED = 1 << 14


@triton.jit
def _turn_back(x, cos, sin, start, DIM: tl.constexpr, PAIRS: tl.constexpr):
    """Rotate channels `start` and on of `x` `[H, N]` float32, if of the last 2 * PAIRS, by minus the angle of their pair."""
    half: tl.constexpr = x.shape[1] // 2
    pair = start // 2 + tl.arange(0, half) - (DIM // 2 - PAIRS)
    rotary = (pair >= 0) & (pair < PAIRS)
    c = tl.load(cos + pair, mask=rotary, other=1.0)[None, :]
    s = tl.load(sin + pair, mask=rotary, other=0.0)[None, :]
    even, odd = tl.split(tl.reshape(x, (x.shape[0], half, 2)))
    return tl.reshape(tl.join(even * c + odd * s, odd * c - even * s), (x.shape[0], 2 * half))


@triton.jit
def _attend(
    queries,
    out,
    tops,
    totals,
    sinks,
    past,
    floor,
    window,
    window_row,
    window_column,
    window_scale,
    window_scale_row,
    window_scale_column,
    window_tail,
    window_tail_row,
    window_tail_column,
    entries,
    entries_row,
    entries_column,
    entries_scale,
    entries_scale_row,
    entries_scale_column,
    entries_tail,
    entries_tail_row,
    entries_tail_column,
    selection,
    cos,
    sin,
    scale,
    length,
    held,
    slots,
    ratio,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    TAIL: tl.constexpr,
    PAIRS: tl.constexpr,
    WINDOW: tl.constexpr,
    WINDOW_FORMAT: tl.constexpr,
    ENTRY_FORMAT: tl.constexpr,
    RING: tl.constexpr,
    SELECTS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):
    HEAD_BLOCKS: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    WINDOW_TILES: tl.constexpr = (WINDOW + BLOCK_K - 1) // BLOCK_K
    query = (tl.program_id(0) // HEAD_BLOCKS).to(tl.int64)
    split = tl.program_id(1)
    row, t = query // length, (query % length).to(tl.int32)
    head = (tl.program_id(0) % HEAD_BLOCKS) * BLOCK_H + tl.arange(0, BLOCK_H)
    channel = tl.arange(0, BLOCK_D)
    here = query * HEADS * DIM + head[:, None] * DIM + channel[None, :]
    inside = (head < HEADS)[:, None] & (channel < DIM)[None, :]
    q = tl.load(queries + here, mask=inside, other=0.0)
    sink = tl.load(sinks + head, mask=head < HEADS, other=0.0).to(tl.float32)

    position = tl.load(past + row).to(tl.int32) + t
    first = 0
    if floor is not None:
        first = tl.load(floor + row).to(tl.int32)
    tiles = WINDOW_TILES
    if ENTRY_FORMAT != "none":
        if not SELECTS:
            slots = tl.minimum(slots, (position + 1) // ratio)
        tiles += tl.cdiv(slots, BLOCK_K)
    each = tl.cdiv(tiles, SPLITS)

    # From the sink on, no weight exceeds 1 and the sum of all is never 0.
    top = tl.maximum(sink, -1e30)
    total = tl.zeros((BLOCK_H,), tl.float32)
    acc = tl.zeros((BLOCK_H, BLOCK_D), tl.float32)
    window += row * window_row
    window_scale += row * window_scale_row
    window_tail += row * window_tail_row
    entries += row * entries_row
    entries_scale += row * entries_scale_row
    entries_tail += row * entries_tail_row

    start = split * each
    # Of the selection, a tile is read ahead: addresses that depend on a load in flight would end the pipeline.
    chosen = tl.full((BLOCK_K,), -1, tl.int32)
    if SELECTS:
        slot = (start - WINDOW_TILES) * BLOCK_K + tl.arange(0, BLOCK_K)
        selection += query * slots
        chosen = tl.load(selection + slot, mask=(slot >= 0) & (slot < slots), other=-1)
    for tile in tl.range(start, tl.minimum(start + each, tiles), num_stages=STAGES):
        in_window = tile < WINDOW_TILES
        place = tile * BLOCK_K + tl.arange(0, BLOCK_K)
        back = WINDOW - 1 - place
        if RING:
            column = (position - back) % held
        else:
            column = held + t - back
        keep = (back >= 0) & (column >= 0) & (position - back >= first)
        if ENTRY_FORMAT != "none":
            slot = place - WINDOW_TILES * BLOCK_K
            exists = (slot >= 0) & (slot < slots)
            if SELECTS:
                following = slot + BLOCK_K
                slot, exists = chosen, chosen >= 0
                chosen = tl.load(selection + following, mask=(following >= 0) & (following < slots), other=-1)
            column = tl.where(in_window, column, slot)
            keep = tl.where(in_window, keep, exists)
        from_window = window + column * window_column
        scales_from_window = window_scale + column * window_scale_column
        tail_from_window = window_tail + column * window_tail_column
        if ENTRY_FORMAT == "none":
            kv = read_rows(
                from_window, scales_from_window, tail_from_window, keep, q.dtype, WINDOW_FORMAT, DIM, TAIL, BLOCK_D
            )
        else:
            values = entries + column * entries_column
            scales = entries_scale + column * entries_scale_column
            tail = entries_tail + column * entries_tail_column
            if ENTRY_FORMAT == WINDOW_FORMAT:
                values = tl.where(in_window, from_window, values)
                scales = tl.where(in_window, scales_from_window, scales)
                tail = tl.where(in_window, tail_from_window, tail)
                kv = read_rows(values, scales, tail, keep, q.dtype, ENTRY_FORMAT, DIM, TAIL, BLOCK_D)
            elif in_window:
                kv = read_rows(
                    from_window, scales_from_window, tail_from_window, keep, q.dtype, WINDOW_FORMAT, DIM, TAIL, BLOCK_D
                )
            else:
                kv = read_rows(values, scales, tail, keep, q.dtype, ENTRY_FORMAT, DIM, TAIL, BLOCK_D)
        # This branch is always taken. Without it Triton takes the two products for a chain whose rows are shared out
        # among all warps, and as there are fewer rows than that it computes this one twice.
        weights = tl.zeros((BLOCK_H, BLOCK_K), q.dtype)
        fade = tl.zeros((BLOCK_H,), tl.float32)
        if length > 0:
            logits = tl.dot(q, tl.trans(kv), input_precision="ieee") * scale
            logits = tl.where(keep[None, :], logits, float("-inf"))
            higher = tl.maximum(top, tl.max(logits, 1))
            fade = tl.exp(top - higher)
            top = higher
            logits = tl.exp(logits - top[:, None])
            total = total * fade + tl.sum(logits, 1)
            weights = logits.to(q.dtype)
        acc = tl.dot(weights, kv, acc * fade[:, None], input_precision="ieee")

    if SPLITS == 1:
        total += tl.exp(sink - top)
        if tops is not None:
            tl.store(tops + query * HEADS + head, top + tl.log(total), mask=head < HEADS)
        x = acc / total[:, None]
        if PAIRS > 0:
            x = round_to(x, out.dtype.element_ty)
            x = _turn_back(x, cos + query * PAIRS, sin + query * PAIRS, 0, DIM, PAIRS)
        tl.store(out + here, x.to(out.dtype.element_ty), mask=inside)
    else:
        part = (query * SPLITS + split) * HEADS + head
        tl.store(out + part[:, None] * DIM + channel[None, :], acc, mask=inside)
        tl.store(tops + part, top, mask=head < HEADS)
        tl.store(totals + part, total, mask=head < HEADS)


@triton.jit
def _combine(
    parts,
    tops,
    totals,
    sinks,
    cos,
    sin,
    out,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    query = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.arange(0, BLOCK_S)
    channel = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    part = (query * SPLITS + split) * HEADS + head
    top = tl.load(tops + part, mask=split < SPLITS, other=float("-inf"))
    total = tl.load(totals + part, mask=split < SPLITS, other=0.0)
    inside = (split < SPLITS)[:, None] & (channel < DIM)[None, :]
    x = tl.load(parts + part[:, None] * DIM + channel[None, :], mask=inside, other=0.0)
    highest = tl.max(top, 0)
    fade = tl.exp(top - highest)
    total = tl.sum(total * fade, 0) + tl.exp(tl.load(sinks + head).to(tl.float32) - highest)
    x = (tl.sum(x * fade[:, None], 0) / total)[None, :]
    if PAIRS > 0:
        x = round_to(x, out.dtype.element_ty)
        x = _turn_back(x, cos + query * PAIRS, sin + query * PAIRS, tl.program_id(2) * BLOCK_C, DIM, PAIRS)
    where = (query * HEADS + head) * DIM + channel
    tl.store(out + where[None, :], x.to(out.dtype.element_ty), mask=(channel < DIM)[None, :])


class _SparseAttention(torch.autograd.Function):
    """Attention over float values, with gradients of queries, window, entries and sinks."""

    @staticmethod
    def forward(ctx, queries, window, entries, past, sinks, floor, selection, numbers):
        queries, window = queries.contiguous(), window.contiguous()
        entries, selection = (None if x is None else x.contiguous() for x in (entries, selection))
        lses = queries.new_empty(queries.shape[:3], dtype=torch.float32)
        given = {"entries": None if entries is None else (entries,), "selection": selection, "floor": floor}
        out = _forward(queries, (window,), past, sinks, lses=lses, **given, **numbers)
        ctx.save_for_backward(queries, window, entries, past, sinks, floor, selection, out, lses)
        ctx.numbers = numbers
        return out

    @staticmethod
    def backward(ctx, grad):
        grad_queries, grad_window, grad_entries, grad_sinks = attention_gradients(
            grad, *ctx.saved_tensors, **ctx.numbers
        )
        return grad_queries, grad_window, grad_entries, None, grad_sinks, None, None, None


def _slots(entries, selection) -> int:
    """Entries that a query looks at, at most."""
    return 0 if entries is None else entries[0].shape[1] if selection is None else selection.shape[-1]


def _forward(
    queries,
    window,
    past,
    sinks,
    *,
    scale,
    window_size,
    window_format="float",
    ring=False,
    entries=None,
    entry_format="float",
    selection=None,
    ratio=1,
    floor=None,
    table=None,
    lses=None,
):
    batch, length, heads, dim = queries.shape
    queries, selection = queries.contiguous(), None if selection is None else selection.contiguous()
    count = batch * length
    if count == 0:
        return torch.empty_like(queries)
    block_h = min(64, max(16, triton.next_power_of_2(heads)))
    slots = _slots(entries, selection)
    # Products of float32 are unrolled, tiles of it are small.
    block_k, stages = 16 if queries.dtype == torch.float32 else 32, 1
    tiles = triton.cdiv(window_size, block_k) + triton.cdiv(slots, block_k)
    splits = 1
    if lses is None:
        splits = max(1, min(tiles, MAX_SPLITS, SPLIT_PROGRAMS // (count * triton.cdiv(heads, block_h))))
        splits = triton.cdiv(tiles, triton.cdiv(tiles, splits))
    if count <= 2 and splits == tiles:
        block_h = 16  # a tile each leaves room for sharing out the heads too
    elif splits == 1 and {window_format, entry_format} == {"float"} and queries.dtype != torch.float32:
        block_k, stages = 64, 2
    programs = count * triton.cdiv(heads, block_h)
    out = parts = torch.empty_like(queries)
    tops, totals = lses, None
    if splits > 1:
        parts = queries.new_empty(batch, length, splits, heads, dim, dtype=torch.float32)
        tops, totals = queries.new_empty(2, batch, length, splits, heads, dtype=torch.float32)
    cos, sin = (None, None) if table is None else (t.expand(batch, -1, -1).contiguous() for t in table)
    pairs = 0 if table is None else cos.shape[-1]
    block_d = max(triton.next_power_of_2(dim), 16)
    _attend[(programs, splits)](
        queries,
        parts,
        tops,
        totals,
        sinks,
        past,
        floor,
        *stored_tensors(window, queries),
        *stored_tensors(entries, queries),
        selection,
        cos,
        sin,
        scale,
        length,
        window[0].shape[1] - (0 if ring else length),
        slots,
        ratio,
        HEADS=heads,
        DIM=dim,
        TAIL=tail_channels(window, window_format) or tail_channels(entries, entry_format),
        PAIRS=pairs,
        WINDOW=window_size,
        WINDOW_FORMAT=window_format,
        ENTRY_FORMAT="none" if entries is None else entry_format,
        RING=ring,
        SELECTS=selection is not None,
        SPLITS=splits,
        BLOCK_H=block_h,
        BLOCK_K=block_k,
        BLOCK_D=block_d,
        STAGES=stages,
        num_warps=8,
    )
    if splits > 1:
        block_s = triton.next_power_of_2(splits)
        block_c = min(block_d, COMBINED // block_s)
        _combine[(count, heads, block_d // block_c)](
            parts,
            tops,
            totals,
            sinks,
            cos,
            sin,
            out,
            HEADS=heads,
            DIM=dim,
            PAIRS=pairs,
            SPLITS=splits,
            BLOCK_S=block_s,
            BLOCK_C=block_c,
            num_warps=4,
        )
    return out


def sparse_attention(
    queries: torch.Tensor,
    window: tuple[torch.Tensor, ...],
    past: torch.Tensor,
    sinks: torch.Tensor,
    *,
    scale: float,
    window_size: int,
    window_format: str = "float",
    ring: bool = False,
    entries: tuple[torch.Tensor, ...] | None = None,
    entry_format: str = "float",
    selection: torch.Tensor | None = None,
    ratio: int = 1,
    floor: torch.Tensor | None = None,
    table: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    r"""Attend to a sliding window and to compressed entries in one softmax with a sink per head.

    Implements contract section 6, as `attend_with_sinks`; keys are values, nothing of the size of the selected entries is
    stored. Query t of a row stands at position past + t and sees `window_size` positions up to its own.

    Args:
        queries (`torch.Tensor` of shape `[B, T, H, D]`).
        window (tuple of `torch.Tensor`, each `[B, W + T, ...]`): stored tensors; column i holds position past - W + i.
        past (`torch.Tensor` of shape `[B]`, int64).
        sinks (`torch.Tensor` of shape `[H]`, float32): logits that only enter the denominator.
        scale (`float`): of the logits.
        window_size (`int`): positions that a query sees.
        window_format, entry_format (`str`, *optional*): "float" (one tensor in the dtype of the queries), "fp8" (E4M3 and
            a power-of-two scale per 32 channels), "fp8_tail" (per 64, and the last channels as they are) or "nvfp4" (E2M1
            and an E4M3 scale per 16).
        ring (`bool`, *optional*): `window` is `[B, C, ...]` and holds position p in column p % C, the queries' included.
        entries (tuple of `torch.Tensor`, each `[B, C, ...]`, *optional*): stored tensors, C up to 2**31 / D.
        selection (`torch.Tensor` of shape `[B, T, K]`, int32, *optional*): entries of each query, -1 = none; without it, a
            query sees the first (position + 1) // ratio.
        ratio (`int`, *optional*): tokens of an entry.
        floor (`torch.Tensor` of shape `[B]`, int64, *optional*): position before which a window holds nothing.
        table (*optional*): cosine and sine, each `[B or 1, T, P]` float32, by which the last 2P channels of the output are
            turned back.

    Returns:
        `torch.Tensor` of shape `[B, T, H, D]`, dtype of `queries`; zeros where nothing may be attended. Gradients flow to
        queries, sinks and float values; those of window and entries are summed in float32, in no fixed order.

    Raises:
        ValueError: for an unknown format, or where gradients are asked of values in a ring or through a table.
    """
    if window_format not in FORMATS or entry_format not in FORMATS:
        raise ValueError(f"the formats are {window_format!r} and {entry_format!r}; accepted: {FORMATS}.")
    learned = (queries, window[0], sinks, *(entries or ()))
    differentiates = torch.is_grad_enabled() and any(x.requires_grad for x in learned)
    if differentiates and (ring or table is not None):
        raise ValueError("gradients are asked of values in a ring or through a table; accepted: neither of both.")
    numbers = {"scale": scale, "window_size": window_size, "ratio": ratio}
    count, slots = queries.shape[0] * queries.shape[1], _slots(entries, selection)
    many = count > FEW_QUERIES and not ring
    if window_format == "float" or differentiates or many:
        window, window_format = (unpack(window, window_format, queries),), "float"
    if entries is not None:
        # Worth it where the queries look up nearly as many entries as there are.
        dense = many and 8 * count * slots >= entries[0].shape[0] * entries[0].shape[1]
        if entry_format == "float" or differentiates or dense:
            entries, entry_format = (unpack(entries, entry_format, queries),), "float"
    if differentiates:
        values = None if entries is None else entries[0]
        return _SparseAttention.apply(queries, window[0], values, past, sinks, floor, selection, numbers)
    kinds = {"window_format": window_format, "entry_format": entry_format, "ring": ring}
    given = {"entries": entries, "selection": selection, "floor": floor, "table": table}
    return _forward(queries, window, past, sinks, **kinds, **given, **numbers)


sparse_attention.has_backward = True
