"""Cases of the benchmark table: sparse attention at the released sizes."""

from functools import partial

import torch

from modeling_dsv4.cache_storage import COMPRESSED_NVFP4, WINDOW_FP8, unrotated_fp8
from modeling_dsv4.rotary import rotary_table, rotate
from modeling_dsv4.sparse_attention import attend_with_sinks
from modeling_dsv4.triton_kernels.sparse_attention import sparse_attention

from .timing import in_graph

HEADS, DIM, WINDOW, TOPK, HELD, PAIRS = 64, 512, 128, 512, 143, 32
CODECS = {"fp8": WINDOW_FP8, "nvfp4": COMPRESSED_NVFP4, "fp8_tail": unrotated_fp8(2 * PAIRS)}
# Problems that a decoding case goes through in one graph, so that the cache of the device holds little of the next.
ROUNDS = 8


def make(tokens, count, past, formats=None, ratio=2, chosen=TOPK):
    """Arguments of the kernel for one row at position `past`; `formats` of window and entries, or float values."""
    window, entries = (torch.randn(1, n, DIM, device="cuda", dtype=torch.bfloat16) for n in (HELD + tokens, count))
    parts = [(window,), (entries,)]
    kinds = {}
    if formats is not None:
        parts = [CODECS[name].encode(x) for name, x in zip(formats, (window, entries), strict=True)]
        kinds = {"window_format": formats[0], "entry_format": formats[1]}
    position = past + torch.arange(tokens, device="cuda")[None]
    visible = ((position + 1) // ratio).clamp(max=count)[..., None]
    selection = (torch.rand(1, tokens, chosen, device="cuda") * visible).int().sort(-1).values if chosen else None
    kinds |= {"entries": parts[1], "selection": selection, "scale": DIM**-0.5, "window_size": WINDOW, "ratio": ratio}
    kinds["table"] = rotary_table(position, torch.rand(PAIRS, device="cuda"))
    queries = torch.randn(1, tokens, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    args = queries, parts[0], torch.full((1,), past, device="cuda"), torch.randn(HEADS, device="cuda")
    return args, kinds


def reference(args, kinds, step=16):
    """The same in plain PyTorch, `step` queries at a time, as the model does it."""
    (queries, window, past, sinks), outputs = args, []
    if "window_format" in kinds:
        window = (CODECS[kinds["window_format"]].decode(window, torch.bfloat16),)
    entries, selection = kinds["entries"], kinds["selection"]
    held = window[0].shape[1] - queries.shape[1]
    for start in range(0, queries.shape[1], step):
        t = torch.arange(start, min(start + step, queries.shape[1]), device="cuda")
        slot = torch.arange(max(0, held + start - WINDOW + 1), held + start + len(t), device="cuda")
        mask = (slot <= t[:, None] + held) & (slot > t[:, None] + held - WINDOW) & (past - held + slot >= 0)
        part = [x[:, slice(start, start + step)] for x in (queries, selection if selection is not None else queries)]
        if selection is None:
            near, near_mask = (
                entries,
                torch.arange(entries[0].shape[1], device="cuda") < (past + t[:, None] + 1) // kinds["ratio"],
            )
            near_mask = near_mask[None]
        else:
            near = tuple(x[0, part[1].long().clamp(min=0)] for x in entries)
            near_mask = part[1] >= 0
        near = CODECS[kinds["entry_format"]].decode(near, torch.bfloat16) if "entry_format" in kinds else near[0]
        outputs.append(
            attend_with_sinks(part[0], window[0][:, slot], mask[None], near, near_mask, sinks, scale=kinds["scale"])
        )
    return rotate(torch.cat(outputs, dim=1), kinds["table"], inverse=True)


def looped(function, problems):
    """Run `function` on every problem `(args, kinds)`."""

    def run():
        for args, kinds in problems:
            function(*args, **kinds)

    return run


def train(problem):
    """Forward and backward of the kernel."""
    args, kinds = problem
    (queries, (window,), past, sinks), (entries,) = args, kinds["entries"]
    learned = [x.detach().requires_grad_() for x in (queries, window, sinks, entries)]
    kinds = {**kinds, "entries": (learned[3],), "table": None}
    grad = torch.randn_like(queries)

    def step():
        out = sparse_attention(learned[0], (learned[1],), past, learned[2], **kinds)
        return torch.autograd.grad(out, learned, grad)

    return step


def cost(problem, keys, products=2):
    """Bytes that must move (entries once each that is selected) and operations."""
    (queries, window, _, _), kinds = problem
    entries = kinds["entries"]
    row = sum(part[0, 0].nbytes for part in entries)
    read = sum(part.nbytes for part in window) + min(queries.shape[1] * (keys - WINDOW), entries[0].shape[1]) * row
    return read + 2 * queries.nbytes, 2 * products * queries.shape[1] * keys * HEADS * DIM


def cases():
    """`(name, kernel, eager, compiled, bytes, flops)` of every case."""
    packed, tail = ("fp8", "nvfp4"), ("fp8_tail", "fp8_tail")
    decoding = {
        "1 token, 64K context": (lambda: make(1, 1 << 15, (1 << 16) - 2, packed), WINDOW + TOPK),
        "1 token, 1M context": (lambda: make(1, 1 << 19, (1 << 20) - 2, packed), WINDOW + TOPK),
        "6 tokens, 64K context": (lambda: make(6, 1 << 15, (1 << 16) - 8, packed), WINDOW + TOPK),
        "V4, 1 token, 8192 entries": (
            lambda: make(1, 1 << 13, (1 << 20) - 2, tail, ratio=128, chosen=0),
            WINDOW + (1 << 13),
        ),
    }
    for name, (build, keys) in decoding.items():
        problems = [build() for _ in range(ROUNDS)]
        eager = looped(lambda *args, **kinds: reference(args, kinds), problems)
        moved, flops = cost(problems[0], keys)
        kernel = in_graph(looped(sparse_attention, problems))
        yield f"sparse attention {ROUNDS} x ({name})", kernel, eager, None, ROUNDS * moved, ROUNDS * flops
    prefill = {
        "4096 tokens, 8K context": (4096, 1 << 12, 1 << 12, None),
        "4096 tokens, 1M context": (4096, 1 << 19, (1 << 20) - 4096, None),
        "4096 tokens, 1M context, packed": (4096, 1 << 19, (1 << 20) - 4096, packed),
    }
    for name, (tokens, count, past, formats) in prefill.items():
        args, kinds = problem = make(tokens, count, past, formats)
        eager = partial(reference, args, kinds)
        yield (
            f"sparse attention {name}",
            partial(sparse_attention, *args, **kinds),
            eager,
            None,
            *cost(problem, WINDOW + TOPK),
        )
    problem = make(4096, 1 << 12, 1 << 12)
    moved, flops = cost(problem, WINDOW + TOPK, products=7)
    yield "sparse attention training, 4096 tokens", train(problem), None, None, 3 * moved, flops
