"""Index scores over packed or float keys, and the selection that follows from them.

    queries [T, heads * channels] x keys [C, channels] ──relu, weight, head sum──> scores [T, C] ──> k entries a query

A program keeps the queries of a few tokens and walks over keys, which it unpacks once for all of them: keys are the
rows of the product and all heads of its tokens the columns, so the head sum stays within a row. Scores of a bounded number
of queries exist at a time. Products, weights and the head sum are rounded as in the reference; products and sums are
accumulated in float32 in another order. Products of MXFP4 values are sums of few bits, so the order does not matter to
them; a head sum may differ in its last float32 bits, and then, rarely, in its rounding. Tokens of a program share the
product that sums their heads, so one whose products are not finite makes the others' scores NaN.

Source: contract sections 6.2 and 6.3; the reference is `index_scores` and `Dsv4Indexer` of the package.
"""

import torch
import triton
import triton.language as tl

from .number_formats import PLAIN, decode_e2m1, decode_e8m0, relu_times, spread, unpack_e2m1
from .topk_selection import select_candidate_blocks, select_in_pool, select_topk

# Scores that exist at once: 256 MB in bfloat16.
MAX_SCORES = 1 << 27


@triton.jit
def _index_scores_kernel(
    queries, keys, scales, weights, visible, pool, scores,
    tokens, columns, key_count, query_row, weight_row, key_row, scale_row, visible_row, pool_row, pool_token,
    HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr, CHANNELS: tl.constexpr, WIDTH: tl.constexpr, PACKED: tl.constexpr,
    POOL_BLOCK: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Scores of `TOKENS` queries for `CHUNK` columns: keys in order, or with `POOL_BLOCK` those of the query's pool."""
    dtype: tl.constexpr = queries.dtype.element_ty
    ASM: tl.constexpr = dtype == tl.bfloat16 and not PLAIN
    # Packed keys are words of four channels.
    STEP: tl.constexpr = 4 if PACKED else 1
    WORDS: tl.constexpr = WIDTH // STEP
    STORED: tl.constexpr = CHANNELS // STEP
    SCALES: tl.constexpr = WIDTH // 32
    STORED_SCALES: tl.constexpr = (CHANNELS + 31) // 32
    row = tl.program_id(2).to(tl.int64)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    entries = tl.load(visible + row * visible_row + token, token < tokens, other=0).to(tl.int32)
    last = tl.minimum(tl.max(entries, axis=0), key_count)
    start = tl.program_id(1) * CHUNK
    stop = tl.minimum(columns if POOL_BLOCK else last, start + CHUNK)
    if start >= stop:
        return

    # Column n of the product is head n % HEADS_PADDED of token n // HEADS_PADDED.
    n = tl.arange(0, TOKENS * HEADS_PADDED)
    head, of = n % HEADS_PADDED, tl.program_id(0) * TOKENS + n // HEADS_PADDED
    there = (head < HEADS) & (of < tokens)
    weight = tl.load(weights + row * weight_row + of * HEADS + head, there, other=0.0).to(dtype)
    query = queries + row * query_row + (of.to(tl.int64) * HEADS + head) * CHANNELS
    c = tl.arange(0, WIDTH)[None, :]
    query = tl.load(query[:, None] + c, there[:, None] & (c < CHANNELS), other=0.0)
    if PACKED:
        half = tl.reshape(query, (TOKENS * HEADS_PADDED, WORDS, 2, 2))
        even, odd = tl.split(half)
        query0, query2 = tl.split(even)
        query1, query3 = tl.split(odd)
    c = tl.arange(0, WORDS)[None, :]
    if ASM:
        # The head sum is a product too, with at least 8 columns.
        t = tl.arange(0, 8 if TOKENS < 8 else TOKENS)
        of_token = ((n // HEADS_PADDED)[:, None] == t[None, :]).to(dtype)
        token = tl.where(t < TOKENS, tl.program_id(0) * TOKENS + t, tokens)
    out = scores + (row * tokens + token)[None, :] * columns

    for first in range(0, CHUNK, BLOCK):
        column = start + first + tl.arange(0, BLOCK)
        key, seen = column, column < stop
        if POOL_BLOCK:
            place = pool + row * pool_row + tl.program_id(0) * pool_token + column // POOL_BLOCK
            block = tl.load(place, seen, other=-1)
            key = block * POOL_BLOCK + column % POOL_BLOCK
            seen = (block >= 0) & (key < last)
        key = key.to(tl.int64)[:, None]
        found = tl.load(keys + row * key_row + key * STORED + c, seen[:, None] & (c < STORED), other=0)
        if PACKED:
            s = tl.arange(0, SCALES)[None, :]
            place = scales + row * scale_row + key * STORED_SCALES + s
            code = tl.load(place, seen[:, None] & (s < STORED_SCALES), other=0)
            if ASM:
                # No stored code is 255, the NaN.
                scale = tl.maximum(code.to(tl.int32) << 7, 0x40).to(tl.int16).to(tl.bfloat16, bitcast=True)
                key0, key1, key2, key3 = unpack_e2m1(found, spread(scale, BLOCK, SCALES, WORDS // SCALES))
            else:
                scale, codes = spread(decode_e8m0(code), BLOCK, SCALES, WORDS // SCALES), found.to(tl.int32)
                key0 = (decode_e2m1(codes & 15) * scale).to(dtype)
                key1 = (decode_e2m1((codes >> 4) & 15) * scale).to(dtype)
                key2 = (decode_e2m1((codes >> 8) & 15) * scale).to(dtype)
                key3 = (decode_e2m1((codes >> 12) & 15) * scale).to(dtype)
            dots = tl.dot(key0, query0.T, input_precision="ieee")
            dots = tl.dot(key1, query1.T, dots, input_precision="ieee")
            dots = tl.dot(key2, query2.T, dots, input_precision="ieee")
            dots = tl.dot(key3, query3.T, dots, input_precision="ieee")
        else:
            dots = tl.dot(found.to(dtype), query.T, input_precision="ieee")
        if ASM:
            parts = relu_times(dots, tl.broadcast_to(weight[None, :], (BLOCK, TOKENS * HEADS_PADDED)))
            total = tl.dot(parts, of_token)
        else:
            parts = tl.maximum(dots, 0.0).to(dtype).to(tl.float32) * weight[None, :].to(tl.float32)
            parts = tl.reshape(parts.to(dtype).to(tl.float32), (BLOCK, TOKENS, HEADS_PADDED))
            total = tl.sum(parts, axis=2)
        if POOL_BLOCK:
            total = tl.where(seen[:, None], total, float("-inf"))
        tl.store(out + column[:, None], total.to(dtype), (column < stop)[:, None] & (token < tokens)[None, :])


def index_scores(
    queries: torch.Tensor,
    keys: tuple[torch.Tensor, ...],
    weights: torch.Tensor,
    visible: torch.Tensor,
    pool: torch.Tensor | None = None,
    block_size: int = 0,
) -> torch.Tensor:
    r"""Score entries for queries:  sum over heads of relu(q_h . k_j) * w_h.

    Args:
        queries (`torch.Tensor` of shape `[B, T, Hi, Di]`, bfloat16, float16 or float32): rounded.
        keys (tuple of `torch.Tensor`): `[B, C, Di]` in the dtype of `queries`, or packed MXFP4: E2M1 codes
            `[B, C, Di // 2]` (uint8, even channels in the low nibbles) and E8M0 scales `[B, C, ceil(Di / 32)]` (uint8).
        weights (`torch.Tensor` of shape `[B, T, Hi]`, dtype of `queries`).
        visible (`torch.Tensor` of shape `[B, T]`, integer): entries that each query sees.
        pool (`torch.Tensor` of shape `[B, T, P]`, int32, *optional*): blocks of entries to score instead of all; -1: none.
        block_size (`int`, *optional*): entries of a block of the pool.

    Returns:
        `torch.Tensor` of shape `[B, T, C]`, dtype of `queries`; what a query does not see may be left unwritten. With a
        pool `[B, T, P * block_size]`, -inf for entries that are not there or not visible.
    """
    batch, tokens, heads, channels = queries.shape
    count = keys[0].shape[1]
    columns = count if pool is None else pool.shape[-1] * block_size
    scores = queries.new_empty(batch, tokens, columns)
    queries, weights, *keys = (x if x[0].is_contiguous() else x.contiguous() for x in (queries, weights, *keys))
    # Products take at least 16 columns.
    packed, padded = len(keys) == 2, max(16, triton.next_power_of_2(heads))
    if packed:
        if channels % 4:
            raise ValueError(f"packed keys have {channels} channels; accepted: multiples of 4.")
        keys[0] = keys[0].view(torch.int16)
    group, block, chunk, warps, stages = _shape(queries, padded, pool is not None)
    grid = triton.cdiv(tokens, group), triton.cdiv(columns, chunk), batch
    of_pool = (pool, pool.stride(0), pool.stride(1)) if pool is not None else (scores, 0, 0)
    _index_scores_kernel[grid](
        queries, keys[0], keys[-1], weights, visible, of_pool[0], scores,
        tokens, columns, count, queries.stride(0), weights.stride(0), keys[0].stride(0), keys[-1].stride(0),
        visible.stride(0), *of_pool[1:],
        HEADS=heads, HEADS_PADDED=padded, CHANNELS=channels,
        WIDTH=max(64 if packed else 16, triton.next_power_of_2(channels)), PACKED=packed, POOL_BLOCK=block_size,
        TOKENS=group, BLOCK=block, CHUNK=chunk, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return scores


def _shape(queries, heads, pooled):
    """Tokens of a program, keys of a step and of a program, warps and stages; measured on an H200."""
    tokens = 1 if pooled else triton.next_power_of_2(queries.shape[1])
    if not queries.is_cuda:  # the interpreter
        return min(tokens, 4), 32, 32, 4, 1
    if queries.dtype == torch.float32:
        return min(tokens, max(1, 16 // heads)), 32, 512, 4, 1
    tokens = min(tokens, max(1, 256 // heads))
    if tokens * heads > 128:
        return tokens, 64, 4096, 4, 3
    few = queries.shape[1] <= 8
    return tokens, 128, (256 if pooled else 512) if few else 2048, 4, 3


def select_entries(
    queries: torch.Tensor,
    keys: tuple[torch.Tensor, ...],
    weights: torch.Tensor,
    visible: torch.Tensor,
    *,
    k: int,
    pool: torch.Tensor | None = None,
    block_size: int = 0,
    pool_blocks: int = 0,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    r"""Score entries and select the k best of each query, tile by tile of queries.

    Args:
        queries, keys, weights, visible, pool, block_size: as in `index_scores`.
        k (`int`): entries wanted.
        pool_blocks (`int`, *optional*): blocks of a pool to choose for later layers.

    Returns:
        selection `[B, T, min(k, C)]` int32, ascending, -1 = none, and, with `pool_blocks`, the pool
        `[B, T, min(pool_blocks, ceil(C / block_size))]` int32.
    """
    batch, tokens = queries.shape[:2]
    count = keys[0].shape[1]
    if count == 0:
        none = visible.new_full((batch, tokens, 1), -1, dtype=torch.int32)
        return none[..., :0], none if pool_blocks else None
    columns = count if pool is None else pool.shape[-1] * block_size
    # A power of two, so that the tiles of a prompt that grows are of few sizes: kernels are compiled for each.
    step = 1 << (max(1, MAX_SCORES // (batch * columns)).bit_length() - 1)
    selections, pools = [], []
    for start in range(0, tokens, step):
        tile = slice(start, start + step)
        seen = visible[:, tile].contiguous()
        args = queries[:, tile], keys, weights[:, tile], seen
        if pool is not None:
            near = pool[:, tile]
            selections.append(select_in_pool(index_scores(*args, near, block_size), k, near, block_size))
            continue
        scores = index_scores(*args)
        selections.append(select_topk(scores, k, seen))
        if pool_blocks:
            pools.append(select_candidate_blocks(scores, seen, block_size=block_size, k=pool_blocks))
    return torch.cat(selections, dim=1), torch.cat(pools, dim=1) if pools else None
