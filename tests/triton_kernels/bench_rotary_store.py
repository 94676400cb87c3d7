"""Cases of the benchmark table: rotating, rounding and storing at the released sizes."""

from functools import partial

import torch

from modeling_dsv4.cache_storage import COMPRESSED_NVFP4, INDEX_MXFP4, WINDOW_FP8, unrotated_fp8
from modeling_dsv4.rotary import rotary_table, rotate
from modeling_dsv4.sparse_attention import hadamard_rotate
from modeling_dsv4.triton_kernels.rotary_store import rotate_store

from .bench_sparse_attention import ROUNDS, looped
from .timing import in_graph

TOKENS, PAIRS = 8192, 32
CODECS = {"fp8": (WINDOW_FP8, 512), "nvfp4": (COMPRESSED_NVFP4, 512), "mxfp4": (INDEX_MXFP4, 128)}
CODECS["fp8_tail"] = unrotated_fp8(2 * PAIRS), 512


def make(codec, tokens):
    encoder, dim = CODECS[codec]
    x = torch.randn(1, tokens, dim, device="cuda", dtype=torch.bfloat16)
    table = rotary_table(torch.arange(tokens, device="cuda")[None], torch.rand(PAIRS, device="cuda"))
    kinds = {"parts": encoder.encode(x), "first": torch.zeros(1, dtype=torch.long, device="cuda"), "values": False}
    return (x, table, codec), kinds | {"tail": 2 * PAIRS if codec == "fp8_tail" else 0}


def reference(x, table, codec, **_):
    return CODECS[codec][0].encode(rotate(x, table))


def cases():
    """`(name, kernel, eager, compiled, bytes, flops)` of every case."""
    for codec in CODECS:
        for tokens in (1, TOKENS):
            problems = [make(codec, tokens) for _ in range(ROUNDS)]
            (x, table, _), kinds = problems[0]
            moved = ROUNDS * sum(t.nbytes for t in (x, *table, *kinds["parts"]))
            kernel, eager = in_graph(looped(rotate_store, problems)), looped(reference, problems)
            compiled = looped(torch.compile(reference), problems)
            yield f"rotate and store {ROUNDS} x ({codec}, {tokens})", kernel, eager, compiled, moved, 0
    queries = torch.randn(1, TOKENS, 32, 128, device="cuda", dtype=torch.bfloat16)
    table = rotary_table(torch.arange(TOKENS, device="cuda")[None], torch.rand(PAIRS, device="cuda"))
    for hadamard in (False, True):

        def eager(hadamard=hadamard):
            x = rotate(queries, table)
            return INDEX_MXFP4.rounded(hadamard_rotate(x) if hadamard else x)

        name = f"index queries, {TOKENS} tokens{', Hadamard' if hadamard else ''}"
        kernel = partial(rotate_store, queries, table, "mxfp4", hadamard=hadamard)
        yield name, kernel, eager, torch.compile(eager), 2 * queries.nbytes, 0
