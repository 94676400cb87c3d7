"""How the benchmarks of this folder time work on a GPU, and the rates that bounds are made of."""

import torch


def milliseconds(function, repeats=20, warmup=3):
    """Median time of a function on the device."""
    for _ in range(warmup):
        function()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, end in events:
        start.record()
        function()
        end.record()
    torch.cuda.synchronize()
    return sorted(start.elapsed_time(end) for start, end in events)[repeats // 2]


def in_graph(run):
    """Return a function that replays `run` from a CUDA graph, so that launches from Python are not timed."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def copy_rate():
    """Bytes a millisecond of a large copy, read and written."""
    source = torch.randn(2**30, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    return 2 * source.nbytes / milliseconds(lambda: target.copy_(source))


def product_rate():
    """Operations a millisecond of a large bfloat16 product of random numbers."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / milliseconds(lambda: a @ b)
