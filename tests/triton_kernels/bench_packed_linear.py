"""Packed linears at the released sizes; several different matrices in turn, more bytes than the L2 cache, in a CUDA graph."""

import torch

from modeling_dsv4.fp_codecs import decode_e8m0, round_fp8
from modeling_dsv4.kernel_seam import AUTO
from modeling_dsv4.layers import Dsv4GroupedLinear, Dsv4Linear

from .timing import in_graph

# Output and input channels; o_a has 8 groups.
MATRICES = {
    "q_a": (1280, 5120),
    "kv": (512, 5120),
    "q_b": (32768, 1280),
    "o_a": (8192, 4096),
    "o_b": (5120, 8192),
    "shared gate": (2304, 5120),
    "shared down": (5120, 2304),
}
L2_BYTES = 1 << 27


def scale_codes(*shape):
    return torch.randint(115, 122, shape, dtype=torch.uint8, device="cuda").view(torch.float8_e8m0fnu)


def packed_module(name):
    out, inputs = MATRICES[name]
    with torch.device("cuda"):
        module = Dsv4GroupedLinear(inputs, out, 8) if name == "o_a" else Dsv4Linear(inputs, out)
        module.pack((32, 32), torch.float8_e8m0fnu)
    module.weight.data.copy_(torch.randn(out, inputs, device="cuda").to(torch.float8_e4m3fn))
    module.weight_scale_inv.data.copy_(scale_codes(*module.weight_scale_inv.shape))
    module.quantize_activations = name != "o_a"
    return module


def unpacked_product(x, weight, scale):
    """What a user would write and compile."""
    tiles = weight.to(x.dtype).unflatten(1, (-1, 32)) * scale.to(x.dtype).repeat_interleave(32, 0)[..., None]
    return round_fp8(x) @ tiles.flatten(1).mT


@torch.no_grad()
def cases():
    for name, (out, inputs) in MATRICES.items():
        modules = [packed_module(name) for _ in range(2 + L2_BYTES // (out * inputs))]
        for rows in (1, 8, 64, 2048):
            x = torch.randn(rows, *((8, inputs) if name == "o_a" else (inputs,)), device="cuda", dtype=torch.bfloat16)

            def run(kernels, modules=modules, x=x):
                for module in modules:
                    module.kernels = kernels
                    with torch.no_grad():
                        module(x)

            kernel = in_graph(lambda: run(AUTO))
            compiled = None
            if name == "q_b" and rows == 1:  # one: to compile takes longer than all the rest
                product = torch.compile(unpacked_product)

                def compiled(modules=modules, x=x, product=product):
                    for module in modules:
                        product(x, module.weight, decode_e8m0(module.weight_scale_inv))

            n = len(modules)
            moved = n * (out * inputs * (1 + 2**-10) + 2 * rows * (x[0].numel() + out))
            yield f"{name} M={rows} x{n}", kernel, lambda: run(None), compiled, moved, 2 * n * rows * out * inputs
