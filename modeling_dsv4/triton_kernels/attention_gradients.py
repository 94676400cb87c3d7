"""Gradients of sparse attention over float values: of queries, window and entries.

A program recomputes the weights of 64 heads of one query and has the gradients of one half of the channels; those of
window and entries are summed over queries by float32 atomics.

Source: derivative of `attend_with_sinks` in `modeling_dsv4/sparse_attention.py`.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def _attend_backward(
    queries,
    out,
    grad,
    lses,
    deltas,
    grad_queries,
    past,
    floor,
    window,
    grad_window,
    window_row,
    entries,
    grad_entries,
    entries_row,
    selection,
    scale,
    length,
    held,
    slots,
    ratio,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    SELECTS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HALF: tl.constexpr,
):
    HEAD_BLOCKS: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    WINDOW_TILES: tl.constexpr = (WINDOW + BLOCK_K - 1) // BLOCK_K
    query = (tl.program_id(0) // HEAD_BLOCKS).to(tl.int64)
    row, t = query // length, (query % length).to(tl.int32)
    head = (tl.program_id(0) % HEAD_BLOCKS) * BLOCK_H + tl.arange(0, BLOCK_H)
    # A program has the gradients of one half of the channels; for the weights it needs the other half too.
    mine = tl.program_id(1) * HALF + tl.arange(0, HALF)
    rest = (1 - tl.program_id(1)) * HALF + tl.arange(0, HALF)
    here = (query * HEADS + head)[:, None] * DIM
    is_mine = (head < HEADS)[:, None] & (mine < DIM)[None, :]
    is_rest = (head < HEADS)[:, None] & (rest < DIM)[None, :]
    q_mine = tl.load(queries + here + mine[None, :], mask=is_mine, other=0.0)
    q_rest = tl.load(queries + here + rest[None, :], mask=is_rest, other=0.0)
    g_mine = tl.load(grad + here + mine[None, :], mask=is_mine, other=0.0)
    g_rest = tl.load(grad + here + rest[None, :], mask=is_rest, other=0.0)
    delta = tl.sum(g_mine.to(tl.float32) * tl.load(out + here + mine[None, :], mask=is_mine, other=0.0), 1)
    delta += tl.sum(g_rest.to(tl.float32) * tl.load(out + here + rest[None, :], mask=is_rest, other=0.0), 1)
    tl.store(deltas + query * HEADS + head, delta, mask=head < HEADS)
    lse = tl.load(lses + query * HEADS + head, mask=head < HEADS, other=0.0)

    position = tl.load(past + row).to(tl.int32) + t
    first = 0
    if floor is not None:
        first = tl.load(floor + row).to(tl.int32)
    tiles = WINDOW_TILES
    if entries is not None:
        if not SELECTS:
            slots = tl.minimum(slots, (position + 1) // ratio)
        tiles += tl.cdiv(slots, BLOCK_K)
    grad_q = tl.zeros((BLOCK_H, HALF), tl.float32)
    window += row * window_row
    grad_window += row * window_row
    if entries is not None:
        entries += row * entries_row
        grad_entries += row * entries_row

    for tile in tl.range(0, tiles, num_stages=1):
        place = tile * BLOCK_K + tl.arange(0, BLOCK_K)
        back = WINDOW - 1 - place
        column = held + t - back
        keep = (back >= 0) & (column >= 0) & (position - back >= first)
        values, grads = window + column * DIM, grad_window + column * DIM
        if entries is not None:
            in_window = tile < WINDOW_TILES
            slot = place - WINDOW_TILES * BLOCK_K
            exists = (slot >= 0) & (slot < slots)
            if SELECTS:
                slot = tl.load(selection + query * slots + slot, mask=exists, other=-1)
                exists = slot >= 0
            keep = tl.where(in_window, keep, exists)
            values = tl.where(in_window, values, entries + slot * DIM)
            grads = tl.where(in_window, grads, grad_entries + slot * DIM)
        kv_mine = tl.load(values[:, None] + mine[None, :], mask=keep[:, None] & (mine < DIM)[None, :], other=0.0)
        kv_rest = tl.load(values[:, None] + rest[None, :], mask=keep[:, None] & (rest < DIM)[None, :], other=0.0)
        weights = tl.zeros((BLOCK_H, BLOCK_K), q_mine.dtype)
        slopes = tl.zeros((BLOCK_H, BLOCK_K), q_mine.dtype)
        if length > 0:  # always: see `_attend`
            # Products of halves are scaled before they are added: as a sum they would be a chain.
            logits = tl.dot(q_mine, tl.trans(kv_mine), input_precision="ieee") * scale
            logits += tl.dot(q_rest, tl.trans(kv_rest), input_precision="ieee") * scale
            p = tl.where(keep[None, :], tl.exp(logits - lse[:, None]), 0.0)
            slope = p * (tl.dot(g_mine, tl.trans(kv_mine), input_precision="ieee") - delta[:, None])
            slope += p * tl.dot(g_rest, tl.trans(kv_rest), input_precision="ieee")
            weights, slopes = p.to(q_mine.dtype), slope.to(q_mine.dtype)
        grad_q = tl.dot(slopes, kv_mine, grad_q, input_precision="ieee")
        grad_kv = tl.zeros((BLOCK_K, HALF), tl.float32)
        if length > 0:
            grad_kv = tl.dot(tl.trans(slopes), q_mine, input_precision="ieee") * scale
        grad_kv = tl.dot(tl.trans(weights), g_mine, grad_kv, input_precision="ieee")
        inside = keep[:, None] & (mine < DIM)[None, :]
        tl.atomic_add(grads[:, None] + mine[None, :], grad_kv, mask=inside, sem="relaxed")
    tl.store(grad_queries + here + mine[None, :], (grad_q * scale).to(grad_queries.dtype.element_ty), mask=is_mine)


def attention_gradients(
    grad,
    queries,
    window,
    entries,
    past,
    sinks,
    floor,
    selection,
    out,
    lses,
    *,
    scale: float,
    window_size: int,
    ratio: int,
):
    r"""Return the gradients of queries, window, entries (or `None`) and sinks.

    Args:
        grad, out (`torch.Tensor` of shape `[B, T, H, D]`): gradient of the output, and the output.
        queries, window, entries, past, sinks, floor, selection: of `sparse_attention`, float values, contiguous.
        lses (`torch.Tensor` of shape `[B, T, H]`, float32): logarithm of the sum of all weights, the sink's included.
    """
    batch, length, heads, dim = queries.shape
    grad_queries, deltas = torch.empty_like(queries), torch.empty_like(lses)
    grad_window = torch.zeros_like(window, dtype=torch.float32)
    grad_entries = None if entries is None else torch.zeros_like(entries, dtype=torch.float32)
    block_h = min(64, max(16, triton.next_power_of_2(heads)))
    _attend_backward[(batch * length * triton.cdiv(heads, block_h), 2)](
        queries,
        out,
        grad.contiguous(),
        lses,
        deltas,
        grad_queries,
        past,
        floor,
        window,
        grad_window,
        window.stride(0),
        entries,
        grad_entries,
        0 if entries is None else entries.stride(0),
        selection,
        scale,
        length,
        window.shape[1] - length,
        0 if entries is None else entries.shape[1] if selection is None else selection.shape[-1],
        ratio,
        HEADS=heads,
        DIM=dim,
        WINDOW=window_size,
        SELECTS=selection is not None,
        BLOCK_H=block_h,
        BLOCK_K=16 if queries.dtype == torch.float32 else 64,
        HALF=max(triton.next_power_of_2(dim), 32) // 2,
        num_warps=8,
    )
    grad_sinks = -((sinks - lses).exp() * deltas).sum((0, 1))
    if entries is not None:
        grad_entries = grad_entries.to(entries.dtype)
    return grad_queries, grad_window.to(window.dtype), grad_entries, grad_sinks.to(sinks.dtype)
