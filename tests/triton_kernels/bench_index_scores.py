"""Scoring and selection at the released sizes (32 heads of 128 channels, k 512, 2048 candidate blocks of 8): see `cases`."""

from functools import partial

import torch

from modeling_dsv4 import Dsv41TextConfig
from modeling_dsv4.attention import Dsv4Indexer
from modeling_dsv4.cache_storage import INDEX_MXFP4, EntryView
from modeling_dsv4.fp_codecs import dequantize_mxfp4, round_mxfp4
from modeling_dsv4.sparse_attention import index_scores, select_topk
from modeling_dsv4.triton_kernels.index_scores import select_entries

from .timing import in_graph

HEADS, CHANNELS, K, BLOCK, BLOCKS = 32, 128, 512, 8, 2048
# Of the released layers: 2 reads an entry every second token, 20 makes candidates, 24 selects among them.
FULL, SOURCE, REINDEX = 2, 20, 24
CONTEXTS = {"4K": 1 << 12, "64K": 1 << 16, "1M": 1 << 20}


def cases():
    """Decode at 4K and 1M, and a chunk of 2048 queries at 64K and 1M, of the three kinds of layers.

    Bytes: every packed key once (68), or those of the pool of one query, and the pool; operations: of the products.
    """
    for context, tokens in (("4K", 1), ("1M", 1), ("64K", 2048), ("1M", 2048)):
        for layer, name, ratio in ((FULL, "full", 2), (SOURCE, "source", 1), (REINDEX, "reindex", 1)):
            entries = CONTEXTS[context] // ratio
            pooled = layer == REINDEX and entries > BLOCK * BLOCKS
            if layer == REINDEX and not pooled:
                continue  # its pool would hold every entry
            queries, keys, weights, visible, pool = _inputs(tokens, entries, pooled)
            blocks = {"block_size": BLOCK, "pool_blocks": BLOCKS if layer == SOURCE else 0}
            kernel = partial(select_entries, queries, keys, weights, visible, k=K, pool=pool, **blocks)
            view, compiled = EntryView(keys, INDEX_MXFP4, queries.dtype), None
            eager = partial(_indexer(layer)._select_entries, queries, weights, visible, view, pool)
            if tokens == 1:
                kernel = in_graph(kernel)
                if (layer, context) == (FULL, "1M"):
                    compiled = partial(torch.compile(_select), queries, keys, weights, visible)
            elif context == "1M" or pooled:
                eager = None  # takes seconds to minutes
            looked_up = min(entries, BLOCK * BLOCKS) if pooled else entries
            moved = 68 * (entries if pooled and tokens > 1 else looked_up) + (pool.nbytes if pooled else 0)
            flops = 2 * tokens * looked_up * HEADS * CHANNELS
            yield f"index {name}, {tokens} x {entries // 1024}K entries", kernel, eager, compiled, moved, flops


def _inputs(tokens, entries, pooled):
    queries = round_mxfp4(torch.randn(1, tokens, HEADS, CHANNELS, device="cuda")).bfloat16()
    keys = torch.randint(256, (1, entries, CHANNELS // 2), device="cuda", dtype=torch.uint8)
    scales = torch.randint(122, 130, (1, entries, CHANNELS // 32), device="cuda", dtype=torch.uint8)
    weights = (torch.randn(1, tokens, HEADS, device="cuda") * (HEADS * CHANNELS) ** -0.5).bfloat16()
    visible = torch.arange(entries - tokens + 1, entries + 1, device="cuda")[None]
    pool = None
    if pooled:
        scores = torch.rand(tokens, entries // BLOCK, device="cuda")
        pool = select_topk(scores, BLOCKS).int()[None]
    return queries, (keys, scales), weights, visible, pool


def _indexer(layer):
    with torch.device("meta"):
        return Dsv4Indexer(Dsv41TextConfig(), layer)


def _select(queries, keys, weights, visible):
    scores = index_scores(queries, dequantize_mxfp4(*keys).to(queries.dtype), weights)
    hidden = torch.arange(scores.shape[-1], device=scores.device) >= visible[..., None]
    return select_topk(scores.masked_fill(hidden, float("-inf")), K)
