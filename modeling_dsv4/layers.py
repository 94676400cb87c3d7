"""Shared building blocks: RMSNorm, the linear layers that can hold packed weights, the clamped SwiGLU, the head.

`Dsv4Linear` is every matrix that the release stores in FP8. It holds either a float weight or the file's bytes (FP8
tiles and their scales) and computes the same thing from both: the input is rounded to FP8 when asked, the weight is
dequantised exactly, products are summed in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from .fp_codecs import dequantize_fp8_tiles, round_fp8
from .kernel_seam import AUTO, KernelSet, find_kernel, is_plain
from .sparse_attention import full_precision, wide

# Rows of a packed weight that are dequantised at a time hold at most this many elements.
MAX_UNPACKED_ELEMENTS = 1 << 24


class Dsv4RMSNorm(nn.Module):
    """RMSNorm whose product with the weight is taken in float32 before the single cast (contract section 3)."""

    kernels = AUTO

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise `[..., D]`; dtype of `x`."""
        kernel = find_kernel(self.kernels, "rms_norm", x, self.weight)
        if kernel is not None:
            return kernel(x, self.weight, eps=self.eps)
        return (wide(self.weight) * unit_rms(wide(x), self.eps)).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}"


def unit_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Divide `[..., D]` by its root mean square over the last axis."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def clamped_swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    r"""Return silu(min(gate, limit)) * clamp(up, -limit, limit) in float32 or wider (contract section 7).

    Args:
        gate, up (`torch.Tensor` of shape `[..., I]`, any float dtype).
        limit (`float`): bound; the gate is bounded above only.

    Returns:
        `torch.Tensor` of shape `[..., I]`, float32 (float64 for float64 inputs).
    """
    return F.silu(wide(gate).clamp(max=limit)) * wide(up).clamp(-limit, limit)


class _PackedMatmul(torch.autograd.Function):
    """x @ W.T for FP8 tiles W, unpacked a block of rows at a time, forward and backward; nothing unpacked is kept."""

    @staticmethod
    def forward(ctx, x, weight, scale, block_size):
        ctx.save_for_backward(weight, scale)
        ctx.block_size = block_size
        pieces = [x @ rows.mT for _, rows in _unpacked_rows(weight, scale, block_size, x.dtype)]
        return torch.cat(pieces, dim=-1)

    @staticmethod
    def backward(ctx, grad):
        weight, scale = ctx.saved_tensors
        blocks = _unpacked_rows(weight, scale, ctx.block_size, grad.dtype)
        return sum(grad[..., part] @ rows for part, rows in blocks), None, None, None


class UnpackedProduct(torch.autograd.Function):
    """Product with a packed weight that is unpacked in the forward and again in the backward pass; no float copy is kept."""

    @staticmethod
    def forward(ctx, x, unpack, product, transposed):
        """Return `product(x, unpack(dtype))`; `transposed(grad, W)` is its gradient with respect to `x`."""
        ctx.unpack, ctx.transposed = unpack, transposed
        return product(x, unpack(x.dtype))

    @staticmethod
    def backward(ctx, grad):
        return ctx.transposed(grad, ctx.unpack(grad.dtype)), None, None, None


def _unpacked_rows(weight, scale, block_size, dtype):
    """Yield (slice of output features, their float rows), a whole number of tile rows at a time."""
    tile = block_size[0]
    step = max(1, MAX_UNPACKED_ELEMENTS // (weight.shape[1] * tile)) * tile
    for start in range(0, weight.shape[0], step):
        part = slice(start, min(start + step, weight.shape[0]))
        tiles = scale[start // tile : -(-part.stop // tile)]
        yield part, dequantize_fp8_tiles(weight[part], tiles, block_size=block_size, dtype=dtype)


def rounded_weight(weight: torch.Tensor, rounding: Callable[[torch.Tensor], torch.Tensor] | None) -> torch.Tensor:
    """Return a float weight as its packed form will be read back, if a rounding is set."""
    return weight if rounding is None else rounding(weight)


class PackableMatrix:
    r"""Holder of a matrix that the release stores as FP8 tiles; a base for modules with `in_features` and `out_features`.

    Float: `weight` `[O, I]` in the model's dtype. Packed (after `pack`): `weight` `[O, I]` float8_e4m3fn and
    `weight_scale_inv` `[ceil(O / rows), ceil(I / cols)]` (value = weight * scale; the name is transformers'). Packed
    tensors never require a gradient and never change dtype.
    """

    packed_as = "tiles"
    kernels = AUTO

    def _set_up(self) -> None:
        self.register_parameter("weight_scale_inv", None)
        self.block_size = (32, 32)
        self.quantize_activations, self.activation_block = False, 32
        self.round_weight: Callable[[torch.Tensor], torch.Tensor] | None = None  # see `simulate_packing`

    def pack(self, block_size: tuple[int, int], scale_dtype: torch.dtype) -> None:
        """Switch to packed storage, with empty tensors of the packed shapes on the device of the weight."""
        (rows, cols), (out_features, in_features) = block_size, self.weight.shape
        device = self.weight.device
        values = torch.empty(out_features, in_features, dtype=torch.float8_e4m3fn, device=device)
        scale = torch.empty(-(-out_features // rows), -(-in_features // cols), dtype=scale_dtype, device=device)
        self.block_size = tuple(block_size)
        self.weight = nn.Parameter(values, requires_grad=False)
        self.weight_scale_inv = nn.Parameter(scale, requires_grad=False)

    @property
    def is_packed(self) -> bool:
        return self.weight_scale_inv is not None

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype in which PEFT makes adapters: never that of packed bytes."""
        return torch.float32 if self.is_packed else self.weight.dtype

    def float_weight(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight `[O, I]` in `dtype`: dequantised if packed, rounded if it trains to be packed."""
        if not self.is_packed:
            return rounded_weight(self.weight, self.round_weight).to(dtype)
        return dequantize_fp8_tiles(self.weight, self.weight_scale_inv, block_size=self.block_size, dtype=dtype)

    def find_packed_kernel(self, name: str, x: torch.Tensor, *others: PackableMatrix) -> Callable | None:
        """Return a kernel of `x`, this packed matrix and others of its form, with its tensors given, if there is one."""
        matrices = self, *others
        if not all(m.is_packed and m.weight_scale_inv.dtype != torch.float32 for m in matrices):
            return None
        packed = [tensor for m in matrices for tensor in (m.weight, m.weight_scale_inv)]
        kernel = find_kernel(self.kernels, name, x, *packed)
        return kernel and partial(kernel, x, *packed, block_size=self.block_size)

    def take_input(self, x: torch.Tensor, rounded: torch.Tensor | None) -> tuple[torch.Tensor, int | None]:
        """Return the input, and by how many channels per scale it is still to be rounded (`None`: not).

        `rounded` is x as a site rounded it, if one did.
        """
        if not self.quantize_activations:
            return x, None
        return (x, self.activation_block) if rounded is None else (rounded, None)

    def requires_grad_(self, requires_grad: bool = True):
        return self if self.is_packed else super().requires_grad_(requires_grad)

    def _apply(self, fn, recurse=True):
        if not self.is_packed:
            return super()._apply(fn, recurse)
        # Moving is applied to the bytes: a cast (`.to(dtype)`, `.half()`) cannot reach them.
        for name, parameter in list(self._parameters.items()):
            if parameter is not None:
                moved = fn(parameter.data.view(torch.uint8)).view(parameter.dtype)
                self._parameters[name] = nn.Parameter(moved, requires_grad=False)
        return self


class Dsv4Linear(PackableMatrix, nn.Linear):
    r"""Linear layer without bias that the release stores as FP8 tiles.

    The gradient flows to the input, straight through all rounding, so adapters train over packed weights.

    Args:
        in_features, out_features (`int`).
    """

    def __init__(self, in_features: int, out_features: int):
        nn.Linear.__init__(self, in_features, out_features, bias=False)
        self._set_up()

    def forward(self, x: torch.Tensor, rounded: torch.Tensor | None = None) -> torch.Tensor:
        """Map `[..., I]` to `[..., O]`; dtype of `x`. `rounded`: x rounded to FP8, if the caller has it."""
        x, block = self.take_input(x, rounded)
        kernel = self.find_packed_kernel("packed_linear", x)
        if kernel is not None:
            return kernel(activation_block=block)
        if block is not None:
            x = round_fp8(x, block=block)
        if not self.is_packed:
            return F.linear(x, self.float_weight(self.weight.dtype))
        return _PackedMatmul.apply(x, self.weight, self.weight_scale_inv, self.block_size)


def apply_rounded(module: nn.Module, x: torch.Tensor, rounded: torch.Tensor | None) -> torch.Tensor:
    """Return `module(x)`; where it takes x rounded to FP8 too, and no adapter or hook may change x, `module(x, rounded)`."""
    takes = rounded is not None and isinstance(module, (Dsv4Linear, Dsv4MLP)) and is_plain(module)
    return module(x, rounded) if takes else module(x)


class Dsv4GroupedLinear(PackableMatrix, nn.Module):
    r"""Output projection with one matrix per group of heads; its input is not rounded (contract sections 2 and 6).

    Not an `nn.Linear`: what adapts or replaces all linear layers knows nothing of groups.

    Args:
        in_features (`int`): channels of one group.
        out_features (`int`): channels of all groups together.
        groups (`int`): group g maps its channels by rows g * O / G to (g + 1) * O / G - 1 of the weight.
    """

    def __init__(self, in_features: int, out_features: int, groups: int):
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.groups = in_features, out_features, groups
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self._set_up()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `[..., G, I]` to `[..., O]`; dtype of `x`."""
        kernel = self.find_packed_kernel("packed_linear", x)
        if kernel is not None:
            return kernel(groups=self.groups)
        if not self.is_packed:
            return grouped_product(x, self._grouped_weight(x.dtype))
        return UnpackedProduct.apply(x, self._grouped_weight, grouped_product, self._transposed)

    def _grouped_weight(self, dtype: torch.dtype) -> torch.Tensor:
        return self.float_weight(dtype).unflatten(0, (self.groups, -1))

    @staticmethod
    def _transposed(grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.einsum("...gr,gri->...gi", grad.unflatten(-1, weight.shape[:2]), weight)


def grouped_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Map each group `[..., G, I]` by its own matrix `[G, R, I]`: `[..., G * R]`."""
    return torch.einsum("...gi,gri->...gr", x, weight).flatten(-2)


class Dsv4MLP(nn.Module):
    """SwiGLU block with clamped pre-activations; the shared expert (contract section 7)."""

    def __init__(self, hidden_size: int, intermediate_size: int, limit: float):
        super().__init__()
        self.gate_proj = Dsv4Linear(hidden_size, intermediate_size)
        self.up_proj = Dsv4Linear(hidden_size, intermediate_size)
        self.down_proj = Dsv4Linear(intermediate_size, hidden_size)
        self.limit = limit

    def forward(self, x: torch.Tensor, rounded: torch.Tensor | None = None) -> torch.Tensor:
        """Map `[..., H]` to `[..., H]`; dtype of `x`. `rounded`: see `Dsv4Linear`."""
        gate, up = self.gate_proj, self.up_proj
        if all(isinstance(linear, Dsv4Linear) and is_plain(linear) for linear in (gate, up)):
            read, block = gate.take_input(x, rounded)
            kernel = gate.find_packed_kernel("packed_swiglu", read, up)
            if kernel is not None:
                return self.down_proj(kernel(limit=self.limit, activation_block=block))
        gate, up = (apply_rounded(linear, x, rounded) for linear in (gate, up))
        return self.down_proj(clamped_swiglu(gate, up, self.limit).to(x.dtype))


def wide_linear(x: torch.Tensor, weight: torch.Tensor, kernels: KernelSet | None = None) -> torch.Tensor:
    r"""Return x W^T as float32 products of float32 copies, the weight widened a block of rows at a time.

    Args:
        x (`torch.Tensor` of shape `[..., I]`, any float dtype) and weight (`[O, I]`, any float dtype).
        kernels (`KernelSet`, *optional*): of the calling module.

    Returns:
        `torch.Tensor` of shape `[..., O]`, float32 (float64 for float64 inputs).
    """
    kernel = find_kernel(kernels, "wide_linear", x, weight) if x.dtype == weight.dtype == torch.bfloat16 else None
    if kernel is not None:
        return kernel(x, weight)
    step = max(1, MAX_UNPACKED_ELEMENTS // weight.shape[1])
    rows = [weight] if weight.dtype == wide(x).dtype else weight.split(step)
    with full_precision(x):
        products = [F.linear(wide(x), part.to(wide(x).dtype)) for part in rows]
    return products[0] if len(products) == 1 else torch.cat(products, dim=-1)


class Dsv4Head(nn.Linear):
    """Prediction head whose logits are float32 products of float32 copies (contract section 4, item 3).

    The matrix keeps its dtype.
    """

    kernels = AUTO

    def __init__(self, hidden_size: int, vocab_size: int):
        super().__init__(hidden_size, vocab_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `[..., H]` to logits `[..., V]`, float32 (float64 for float64 inputs)."""
        return wide_linear(x, self.weight, self.kernels)


class Dsv4PlainLinear(nn.Linear):
    """Linear layer without bias that the release keeps in BF16; a wider stored weight is used in the input's dtype."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__(in_features, out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `[..., I]` to `[..., O]`; dtype of `x`."""
        return F.linear(x, self.weight.to(x.dtype))
