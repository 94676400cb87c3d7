"""A hyper-connection site at the width of V4.1, against (2n + 2) d values a token ((3n + 2) d multi-pass): see `cases`."""

from functools import partial

import torch

from modeling_dsv4.hyper_connections import Expansion, hyper_connection_site
from modeling_dsv4.layers import Dsv4RMSNorm
from modeling_dsv4.triton_kernels import hyper_connection_site as kernel

from .timing import in_graph

N, D = 4, 5120
SETTINGS = {"iterations": 20, "eps": 1e-6, "norm_eps": 1e-6}


def _inputs(tokens, carried):
    draw = partial(torch.randn, device="cuda")
    streams, output = draw(1, tokens, N, D).bfloat16(), draw(1, tokens, D).bfloat16()
    pending = Expansion(output, 2 * draw(1, tokens, N).sigmoid(), draw(1, tokens, N, N).softmax(-1))
    pre = draw(1, tokens, N).sigmoid() if carried else None
    return streams, pending, pre, draw(N * (N + 2), N * D) * 0.02, draw(N * (N + 2)), torch.ones(3, device="cuda")


def _backward(run, inputs, norm):
    streams, pending, pre, *parameters = inputs
    leaves = [t.detach().requires_grad_() for t in (streams, *pending, pre, *parameters)]
    results = run(leaves[0], Expansion(*leaves[1:4]), leaves[4], *leaves[5:], norm, **SETTINGS)[:5]
    grads = [torch.randn_like(t) for t in results]
    return partial(torch.autograd.grad, results, leaves, grads, retain_graph=True)


def cases():
    """Bytes: streams, output, x and `fn`; backward: X, X', y, both gradients and both results. Operations: all of them."""
    norm = Dsv4RMSNorm(D, SETTINGS["norm_eps"]).cuda().bfloat16().requires_grad_(False)
    compiled = torch.compile(hyper_connection_site, dynamic=False)
    parameters = 4 * N * (N + 2) * N * D
    for name, tokens, carried, rounding in (
        ("single-pass", 8192, True, {}),
        ("single-pass with FP8 rounding", 8192, True, {"round_block": 32}),
        ("multi-pass", 8192, False, {}),
        ("single-pass", 64, True, {}),
        ("single-pass", 1, True, {}),
    ):
        inputs, settings = _inputs(tokens, carried), SETTINGS | rounding
        values = ((2 * N + 2 if carried else 3 * N + 2) + len(rounding)) * D * tokens
        operations = 2 * tokens * D * (N * N + 2 * N + N * N * (N + 2))
        yield (
            f"mHC site {name}, {tokens} tokens",
            in_graph(torch.no_grad()(partial(kernel, *inputs, norm.weight, **settings))),
            torch.no_grad()(partial(hyper_connection_site, *inputs, norm, **settings)),
            torch.no_grad()(partial(compiled, *inputs, norm, **settings)),
            2 * values + parameters,
            operations,
        )
    inputs = _inputs(4096, True)
    yield (
        "mHC site single-pass backward, 4096 tokens",
        _backward(kernel, inputs, norm.weight),
        _backward(hyper_connection_site, inputs, norm),
        _backward(compiled, inputs, norm),
        2 * (4 * N + 3) * D * 4096 + 2 * parameters,
        3 * operations // tokens * 4096,
    )
