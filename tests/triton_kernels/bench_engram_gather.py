"""Engram memory at the released sizes (24 rows of 256 a token, 4 streams of 5120): see `cases`."""

from functools import partial

import torch

from modeling_dsv4 import engram
from modeling_dsv4.fp_codecs import dequantize_rows
from modeling_dsv4.triton_kernels.engram_gather import add_memory, gather_rows

from .timing import in_graph

LOOKUPS, DIM, BLOCK, STREAMS, HIDDEN = 24, 256, 32, 4, 5120
ROWS = 1 << 23  # of 384 million; beyond every cache


def cases():
    """Gather for one and for 8192 tokens from a table on the device and from one in pinned memory; gate and sum.

    Bytes of the gather: rows with their scales, read once a look-up, and the floats written; of the sum: streams read
    and written, keys and value read.
    """
    values = torch.randint(0x78, (ROWS, DIM), device="cuda", dtype=torch.uint8).view(torch.float8_e4m3fn)
    scale = torch.randint(120, 130, (ROWS, DIM // BLOCK), device="cuda", dtype=torch.uint8)
    on_host = tuple(part.view(torch.uint8)[: ROWS >> 2].cpu().pin_memory() for part in (values, scale))
    on_host = on_host[0].view(torch.float8_e4m3fn), on_host[1]
    for place, table in (("device", (values, scale)), ("pinned", on_host)):
        for tokens in (1, 8192):
            rows = torch.randint(len(table[0]), (1, tokens, LOOKUPS), device="cuda")
            kernel = in_graph(partial(gather_rows, *table, rows, block=BLOCK, dtype=torch.bfloat16))
            eager = partial(_gather, *table, rows) if place == "device" else None
            compiled = partial(torch.compile(_gather), *table, rows) if eager and tokens > 1 else None
            moved = rows.numel() * (DIM + DIM // BLOCK + 2 * DIM)
            yield f"Engram gather, {place} table, {tokens} tokens", kernel, eager, compiled, moved, 0
    for tokens in (1, 8192):
        streams = torch.randn(1, tokens, STREAMS, HIDDEN, device="cuda", dtype=torch.bfloat16)
        projected = torch.randn(1, tokens, (STREAMS + 1) * HIDDEN, device="cuda", dtype=torch.bfloat16)
        weights = torch.randn(2, STREAMS, HIDDEN, device="cuda", dtype=torch.bfloat16)
        args = streams, projected, *weights
        compiled = partial(torch.compile(engram.add_memory), *args, eps=1e-20) if tokens > 1 else None
        moved = 2 * streams.nbytes + projected.nbytes
        kernel, eager = (partial(f, *args, eps=1e-20) for f in (add_memory, engram.add_memory))
        yield f"Engram gate and sum, {tokens} tokens", in_graph(kernel), eager, compiled, moved, 0


def _gather(values, scale, rows):
    found, scales = (part.view(torch.uint8)[rows.flatten()] for part in (values, scale))
    found = dequantize_rows(found.view(torch.float8_e4m3fn), scales, block=BLOCK, dtype=torch.bfloat16)
    return found.unflatten(0, rows.shape)
