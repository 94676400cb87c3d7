"""A layer's routed experts at the released sizes, random routes, in a CUDA graph; and the router."""

import torch

from modeling_dsv4 import moe
from modeling_dsv4.kernel_seam import AUTO
from modeling_dsv4.layers import wide_linear
from modeling_dsv4.triton_kernels import route_tokens

from .bench_packed_linear import scale_codes
from .timing import in_graph

EXPERTS, HIDDEN, WIDTH, CHOSEN = 384, 5120, 2304, 6
CALLS = 4  # with routes of their own


def random_bank():
    """A bank on the GPU that no file was read for: its stacks are filled in place."""

    class Config:
        hidden_size, moe_intermediate_size, swiglu_limit = HIDDEN, WIDTH, 10.0

        @staticmethod
        def experts_of(layer):
            return EXPERTS, CHOSEN

    with torch.device("meta"):
        bank = moe.Dsv4PackedExperts(moe.Dsv4Experts(Config), "fp4", (32, 32), torch.float8_e8m0fnu)
    bank.quantize_activations = True
    bank.move_to("cuda")
    for values, scale in (bank.bank[:2], bank.bank[2:]):
        values.random_(-128, 128)
        for part in scale:
            part.copy_(scale_codes(*part.shape))
    return bank


def cases():
    bank = random_bank()
    for tokens in (1, 8, 64, 2048, 8192):
        x = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
        weights = torch.rand(tokens, CHOSEN, device="cuda")
        routes = [torch.rand(tokens, EXPERTS, device="cuda").topk(CHOSEN).indices for _ in range(CALLS)]

        def run(kernels, x=x, weights=weights, routes=routes):
            bank.kernels = kernels
            with torch.no_grad():
                for indices in routes:
                    bank(x, indices, weights)

        used = sum(len(indices.unique()) for indices in routes)
        moved = used * 3 * HIDDEN * WIDTH * 17 / 32 + CALLS * tokens * HIDDEN * 6
        flops = CALLS * tokens * CHOSEN * 6 * HIDDEN * WIDTH
        eager = (lambda run=run: run(None)) if tokens < 8192 else None
        yield f"experts M={tokens} x{CALLS}", in_graph(lambda run=run: run(AUTO)), eager, None, moved, flops
    weight, bias = (
        torch.randn(EXPERTS, HIDDEN, device="cuda", dtype=torch.bfloat16),
        torch.zeros(EXPERTS, device="cuda"),
    )
    settings = {"k": CHOSEN, "normalize": True, "scaling": 1.5}
    for tokens in (1, 64):
        x = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)

        def route(kernels, choose, x=x):
            choose(wide_linear(x, weight, kernels), bias, **settings)

        kernel = in_graph(lambda route=route: route(AUTO, route_tokens))
        eager = in_graph(lambda route=route: route(None, moe.route_tokens))
        moved, flops = weight.nbytes + x.nbytes + 4 * tokens * EXPERTS, 2 * tokens * EXPERTS * HIDDEN
        yield f"router M={tokens}", kernel, eager, None, moved, flops
    head = torch.randn(129280, HIDDEN, device="cuda", dtype=torch.bfloat16)
    for tokens in (1, 8, 64):
        x = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
        kernel = in_graph(lambda x=x: wide_linear(x, head, AUTO))
        eager = lambda x=x: wide_linear(x, head)  # noqa: E731
        yield f"head M={tokens}", kernel, eager, None, head.nbytes + 4 * tokens * len(head), 2 * tokens * head.numel()
