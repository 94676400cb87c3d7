"""Mixture of experts: sqrt-softplus routing with a selection bias per modality, routed and shared experts.

A token's experts are chosen by score + bias and weighted by the scores alone; the bias of image positions is a second
one (V4.1 report section 2.1.1). Routed experts live in one of two banks with the same maths: fused float parameters, or
the file's own packed tensors on the host, of which only the routed ones are unpacked.

Sources: V4 report section 2.1, V4.1 report section 2.1.1, contract section 7.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from .expert_cache import UnpackedExperts
from .fp_codecs import MXFP4_BLOCK, dequantize_fp4_rows, dequantize_fp8_tiles, round_fp8
from .host_tensors import HostTensors, read_ahead
from .kernel_seam import AUTO, find_kernel
from .layers import Dsv4MLP, UnpackedProduct, apply_rounded, clamped_swiglu, rounded_weight, wide_linear
from .sparse_attention import wide

# Matrix libraries take other routines, with other rounding, for a handful of rows. An expert's rows are filled up to this
# many (or to all tokens of a call that has fewer), so that no token's result depends on where the others were routed.
MIN_EXPERT_ROWS = 16
# Tokens of a call whose float experts are computed together, without asking which were chosen: steps of decoding.
MAX_GROUPED_TOKENS = 512
# Experts whose pages are asked for before they are used: 150 MB of the release.
EXPERTS_AHEAD = 8
# The packed matrices of an expert that are taken in one product, gate and up, then down; a bank has a stack for each.
_PRODUCTS = (("gate_proj", "up_proj"), ("down_proj",))


def route_tokens(
    logits: torch.Tensor, bias: torch.Tensor, *, k: int, normalize: bool, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Choose and weight the experts of each token (contract section 7).

    s = sqrt(softplus(logits)); experts = top-k of s + bias (ties: the lower expert); weights = s / (sum of the chosen s
    + 1e-20) * scaling.

    Args:
        logits (`torch.Tensor` of shape `[N, E]`, float32).
        bias (`torch.Tensor` of shape `[N, E]` or `[E]`, float32): enters the choice only.
        k (`int`): experts per token. normalize (`bool`): divide by the sum. scaling (`float`): factor of the weights.

    Returns:
        weights (`[N, k]`, float32) and indices (`[N, k]`, int64), by score + bias descending.
    """
    # A stable sort keeps the lower expert first among equals, which topk does not promise.
    indices = (expert_scores(logits).detach() + bias).sort(dim=-1, descending=True, stable=True).indices[:, :k]
    return weigh_experts(logits, indices, normalize=normalize, scaling=scaling), indices


def expert_scores(logits: torch.Tensor) -> torch.Tensor:
    """Return sqrt(softplus(logits)), any shape."""
    return F.softplus(logits).sqrt()


def weigh_experts(logits: torch.Tensor, indices: torch.Tensor, *, normalize: bool, scaling: float) -> torch.Tensor:
    """Return the weights `[N, k]` of chosen experts `indices` `[N, k]` (see `route_tokens`)."""
    weights = expert_scores(logits).gather(-1, indices)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scaling


def balanced_token_experts(vocab_size: int, experts: int, k: int) -> torch.Tensor:
    r"""Return experts for every token id such that each expert serves equally many (V4 report 2.1, hash routing).

    Token ids are put in the order of a multiplicative hash; the token at place p takes experts p * k to p * k + k - 1,
    modulo their number. A loaded model uses the file's table instead.

    Args:
        vocab_size, experts, k (`int`): k <= experts.

    Returns:
        `torch.Tensor` of shape `[vocab_size, k]`, int64: k different experts a row.
    """
    hashed = (torch.arange(vocab_size) * 2654435761) % 2**32  # Knuth's multiplicative hash
    place = hashed.argsort(stable=True).argsort()
    return (place[:, None] * k + torch.arange(k)) % experts


class Dsv4TopKRouter(nn.Module):
    r"""Router: `weight` `[E, H]`, and what chooses the experts.

    Usually float32 buffers `[E]` that are added to the scores, one for text and (V4.1) one for image positions; in V4's
    first layers a table `tid2eid` `[vocab, k]` int64 that maps token ids to experts.
    """

    kernels = AUTO

    def __init__(self, config, layer_idx: int):
        super().__init__()
        experts, chosen = config.experts_of(layer_idx)
        self.weight = nn.Parameter(torch.empty(experts, config.hidden_size))
        self.hashes = layer_idx < config.num_hash_layers
        if self.hashes:
            self.register_buffer("tid2eid", torch.zeros(config.vocab_size, chosen, dtype=torch.long))
        else:
            self.register_buffer("e_score_correction_bias", torch.zeros(experts, dtype=torch.float32))
        if config.has_image_bias and not self.hashes:
            self.register_buffer("e_score_correction_bias_vl", torch.zeros(experts, dtype=torch.float32))
        self.temperature = config.gate_temp
        self.top_k = chosen
        self.settings = {"normalize": config.norm_topk_prob, "scaling": config.routed_scaling_factor}

    def forward(
        self,
        x: torch.Tensor,
        image_mask: torch.Tensor | None = None,
        input_ids: torch.Tensor | None = None,
        token_mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        r"""Route tokens.

        Args:
            x (`torch.Tensor` of shape `[N, H]`).
            image_mask (`torch.Tensor` of shape `[N]`, bool, *optional*): positions of image spans.
            input_ids (`torch.Tensor` of shape `[N]`, int64): token ids; read by hash routing alone.
            token_mask (`torch.Tensor` of shape `[N]`, bool, *optional*): real tokens; changes nothing here, and tells
                whoever counts the load of the experts which rows are padding.

        Returns:
            logits (`[N, E]`), weights (`[N, k]`), both float32 or wider, and indices (`[N, k]`, int64).
        """
        logits = wide_linear(x, self.weight, self.kernels) / self.temperature
        if self.hashes:
            indices = self.tid2eid[input_ids]
            return logits, weigh_experts(logits, indices, **self.settings), indices
        bias = self.e_score_correction_bias
        if image_mask is not None:
            bias = torch.where(image_mask[:, None], self.e_score_correction_bias_vl, bias)
        choose = find_kernel(self.kernels, "route_tokens", logits, bias) or route_tokens
        return logits, *choose(logits, bias, k=self.top_k, **self.settings)


class _RoutedExperts:
    """The maths of a bank of routed experts; the bank says how an expert's two products are taken."""

    def expert_products(self, device: torch.device) -> Callable[[int], tuple[Callable, Callable]]:
        """Return a function from an expert to its products with gate-and-up `[2I, H]` and with down `[H, I]`."""
        raise NotImplementedError

    def experts_in_turn(self, experts: list[int], device: torch.device, dtype: torch.dtype) -> Iterable[int]:
        """Return `experts`, which will be used in this order; a bank may prepare the next ones."""
        return experts

    def forward(
        self, x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor, adapt: Callable | None = None
    ) -> torch.Tensor:
        r"""Run each token through its experts; the sum is taken in float32, experts in ascending order.

        Args:
            x (`torch.Tensor` of shape `[N, H]`).
            indices (`torch.Tensor` of shape `[N, k]`, int64) and weights (`[N, k]`, float32): from the router; in the order
                of transformers' expert parallelism. Experts that are not in the bank lie on another rank and are left out.
            adapt (callable, *optional*): expert and its two products -> the products to take instead.

        Returns:
            `torch.Tensor` of shape `[N, H]`, float32 (float64 for float64 inputs).
        """
        out = torch.zeros_like(wide(x))
        rounded, products_of = self._rounded(x), self.expert_products(x.device)
        for expert, tokens, share in self._tokens_of_experts(x, indices, weights):
            gate_and_up, down = products_of(expert) if adapt is None else adapt(expert, products_of(expert))
            missing = max(0, min(MIN_EXPERT_ROWS, len(x)) - len(tokens))
            gate, up = gate_and_up(F.pad(rounded[tokens], (0, 0, 0, missing))).chunk(2, dim=-1)
            # The routing weight enters before the down projection's input is rounded (contract section 7).
            hidden = clamped_swiglu(gate, up, self.limit) * F.pad(share, (0, 0, 0, missing))
            result = down(self._rounded(hidden.to(x.dtype)))
            out.index_add_(0, tokens, wide(result[: len(tokens)]))
        return out

    def _tokens_of_experts(self, x, indices, weights) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Yield each expert that runs, its tokens `[M]` and their routing weights `[M, 1]`."""
        if torch.compiler.is_exporting():  # no shape may depend on what is chosen: every expert runs all tokens
            everyone = torch.arange(len(x), device=x.device)
            for expert in range(self.num_experts):
                yield expert, everyone, weights.masked_fill(indices != expert, 0).sum(-1, keepdim=True)
            return
        here = indices[indices < self.num_experts].unique().tolist()
        for expert in self.experts_in_turn(here, x.device, x.dtype):
            tokens, slots = torch.where(indices == expert)
            yield expert, tokens, weights[tokens, slots, None]

    def _rounded(self, x: torch.Tensor) -> torch.Tensor:
        return round_fp8(x, block=self.activation_block) if self.quantize_activations else x


class Dsv4Experts(_RoutedExperts, nn.Module):
    """Float bank: `gate_up_proj` `[E, 2I, H]` and `down_proj` `[E, H, I]`, transformers' fused form."""

    packed_as = "experts"

    def __init__(self, config, layer_idx: int = 0):
        super().__init__()
        experts, hidden, width = config.experts_of(layer_idx)[0], config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * width, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, width))
        self.num_experts, self.hidden_size, self.width, self.limit = experts, hidden, width, config.swiglu_limit
        self.quantize_activations, self.activation_block = False, 32
        # Of one matrix; see `simulate_packing`.
        self.round_weight: Callable[[torch.Tensor], torch.Tensor] | None = None

    def packed(self, *formats) -> Dsv4PackedExperts:
        """Return the packed bank of the same sizes, empty; `formats` as `Dsv4PackedExperts` takes them."""
        return Dsv4PackedExperts(self, *formats)

    def waits_for_host(self, device: torch.device) -> bool:
        """Whether a call on `device` without gradients reads on the host which experts were chosen."""
        # Grouped products take rows of whole 16 bytes.
        fits = self.gate_up_proj.dtype == torch.bfloat16 and self.hidden_size % 8 == self.width % 8 == 0
        return device.type != "cuda" or not fits or self.round_weight is not None

    def forward(self, x, indices, weights, adapt=None):
        # Of many tokens, all pairs at once would take more memory than the host's loop takes time.
        few = len(x) <= MAX_GROUPED_TOKENS
        if adapt is None and few and not torch.is_grad_enabled() and not self.waits_for_host(x.device):
            return self.grouped(x, indices, weights)
        return super().forward(x, indices, weights, adapt)

    def grouped(self, x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """As `forward`, by matrix products over groups of rows, whose sizes stay on the device."""
        indices, order = indices.sort(dim=-1)
        weights = weights.gather(-1, order).masked_fill(indices >= self.num_experts, 0.0)
        place = indices.flatten().argsort(stable=True)
        ends = torch.searchsorted(
            indices.flatten()[place].contiguous(), torch.arange(self.num_experts, device=x.device), right=True
        ).int()
        rows = self._rounded(x)[place // indices.shape[1]]
        gate, up = F.grouped_mm(rows, self.gate_up_proj.mT, offs=ends).chunk(2, dim=-1)
        hidden = clamped_swiglu(gate, up, self.limit) * weights.flatten()[place, None]
        result = F.grouped_mm(self._rounded(hidden.to(x.dtype)), self.down_proj.mT, offs=ends)
        # Rows of experts on other ranks lie behind the last group, where nothing is computed.
        result = result.masked_fill((indices.flatten()[place] >= self.num_experts)[:, None], 0.0)
        return wide(result)[place.argsort()].unflatten(0, indices.shape).sum(1)

    def expert_products(self, device):
        # One unbind for all experts: its gradient is one stack, where indexing would fill a bank of zeros per expert.
        banks = self.gate_up_proj.unbind(0), self.down_proj.unbind(0)
        return lambda expert: tuple(
            partial(F.linear, weight=rounded_weight(bank[expert], self.round_weight)) for bank in banks
        )


class PackedBank(NamedTuple):
    r"""The packed matrices of all experts of a layer, stacked: what the kernels read.

    Args:
        gate_up (`[E, 2I, H / 2]` int8, FP4 rows, or `[E, 2I, H]` float8_e4m3fn), gate_up_scale (`[E, rows, columns]`).
        down (`[E, H, I / 2]` or `[E, H, I]`), down_scale (`[E, rows, columns]`).
    """

    gate_up: torch.Tensor
    gate_up_scale: torch.Tensor
    down: torch.Tensor
    down_scale: torch.Tensor


class Dsv4PackedExperts(_RoutedExperts, HostTensors):
    r"""Packed bank: the file's own tensors, one set per expert, on the host; or, after `move_to`, on an accelerator.

    There the tensors are views of one stack per kind (`bank`), whose products kernels can take without asking which
    experts were chosen. Saving, loading and names are the same.

    Names are `<expert>.gate_proj.weight`, `<expert>.gate_proj.weight_scale_inv`, and so for `up_proj` and `down_proj`.

    Args:
        bank (`Dsv4Experts`): gives sizes and settings.
        expert_dtype (`str`): "fp4" (packed rows, int8, one scale per 32 columns) or "fp8" (tiles).
        block_size (`tuple[int, int]`): tile of "fp8" weights; its columns are the block of the activation rounding.
        scale_dtype (`torch.dtype`): float8_e8m0fnu or float32.
        unpacked (`UnpackedExperts`, *optional*): keeps what was unpacked last; `None` keeps nothing.
    """

    is_packed = True
    kernels = AUTO

    def __init__(
        self,
        bank: Dsv4Experts,
        expert_dtype: str,
        block_size: tuple[int, int],
        scale_dtype: torch.dtype,
        unpacked: UnpackedExperts | None = None,
    ):
        experts, double_width, hidden = bank.gate_up_proj.shape
        shapes = {
            "gate_proj": (double_width // 2, hidden),
            "up_proj": (double_width // 2, hidden),
            "down_proj": (hidden, double_width // 2),
        }
        specs = {}
        for expert in range(experts):
            for name, (out_features, in_features) in shapes.items():
                if expert_dtype == "fp4":
                    weight = (out_features, in_features // 2), torch.int8
                    scale = (out_features, -(-in_features // MXFP4_BLOCK)), scale_dtype
                else:
                    weight = (out_features, in_features), torch.float8_e4m3fn
                    scale = (-(-out_features // block_size[0]), -(-in_features // block_size[1])), scale_dtype
                specs[f"{expert}.{name}.weight"], specs[f"{expert}.{name}.weight_scale_inv"] = weight, scale
        super().__init__(specs)
        self.expert_dtype, self.block_size = expert_dtype, block_size
        self.num_experts, self.hidden_size, self.width, self.limit = experts, hidden, double_width // 2, bank.limit
        # Empty: it tells PEFT, which finds no parameter here, on which device adapters belong.
        self.register_buffer("weight", torch.empty(0), persistent=False)
        self.quantize_activations, self.activation_block = False, block_size[1]
        self.unpacked = unpacked or UnpackedExperts(0)
        self.__dict__["bank"] = None

    def move_to(self, device):
        """Stack the tensors of all experts on a device, one expert at a time; theirs become views of the stacks."""
        stacks = [self._stack(names, part, device) for names in _PRODUCTS for part in ("weight", "weight_scale_inv")]
        self.__dict__["bank"] = PackedBank(*stacks)

    def _stack(self, names: tuple[str, ...], part: str, device) -> torch.Tensor:
        first = [self.host_tensor(f"0.{name}.{part}") for name in names]
        rows = [len(tensor) for tensor in first]
        stack = torch.empty(self.num_experts, sum(rows), first[0].shape[1], dtype=first[0].dtype, device=device)
        for expert, place in enumerate(stack):
            for name, view in zip(names, place.split(rows), strict=True):
                source = self.host_tensor(f"{expert}.{name}.{part}")
                if source.device.type != "meta":
                    view.copy_(source)
                super().assign(f"{expert}.{name}.{part}", view)
        return stack

    def assign(self, name, value):
        place = self.host_tensor(name)
        super().assign(name, value)
        if self.bank is not None:  # the stack is what the kernels read
            super().assign(name, place.copy_(value))

    def __deepcopy__(self, memo):
        memo[id(self.bank)] = self.bank
        return super().__deepcopy__(memo)

    def _kernel(self, *tensors: torch.Tensor) -> Callable | None:
        """The kernel that takes the products of the whole bank with `tensors`, if there is one."""
        if self.bank is None or self.bank.down_scale.dtype == torch.float32:
            return None
        return find_kernel(self.kernels, "packed_experts", *self.bank, *tensors)

    def waits_for_host(self, device: torch.device) -> bool:
        """Whether a call reads on the host which experts were chosen: where no kernel takes the products."""
        return self._kernel() is None

    def forward(self, x, indices, weights, adapt=None):
        kernel = self._kernel(x, weights) if adapt is None else None
        if kernel is None:
            return super().forward(x, indices, weights, adapt)
        return kernel(
            x,
            indices,
            weights,
            *self.bank,
            limit=self.limit,
            block_size=None if self.expert_dtype == "fp4" else self.block_size,
            activation_block=self.activation_block if self.quantize_activations else None,
        )

    def experts_in_turn(self, experts: list[int], device: torch.device, dtype: torch.dtype) -> Iterator[int]:
        # The files' pages of the next experts arrive while the ones before them compute.
        for place, expert in enumerate(experts):
            for later in experts[place + EXPERTS_AHEAD if place else 0 : place + EXPERTS_AHEAD + 1]:
                for names in _PRODUCTS:
                    packed = self._packed(later, names)
                    if not self.unpacked.holds(packed, device, dtype):
                        for tensor in packed:
                            read_ahead(tensor)
            yield expert

    def _packed(self, expert: int, names: tuple[str, ...]) -> list[torch.Tensor]:
        """Weight and scale of every named matrix of an expert."""
        parts = ("weight", "weight_scale_inv")
        return [self.host_tensor(f"{expert}.{name}.{part}") for name in names for part in parts]

    def _unpack(self, packed: list[torch.Tensor], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        # The packed bytes travel to the device, not the floats: a quarter of the transfer.
        packed = [tensor.to(device) for tensor in packed]
        if self.expert_dtype == "fp4":
            unpack = partial(dequantize_fp4_rows, dtype=dtype)
        else:
            unpack = partial(dequantize_fp8_tiles, block_size=self.block_size, dtype=dtype)
        matrices = [unpack(*pair) for pair in zip(packed[::2], packed[1::2], strict=True)]
        return matrices[0] if len(matrices) == 1 else torch.cat(matrices)

    def expert_products(self, device):
        def weight(expert: int, names: tuple[str, ...], dtype: torch.dtype) -> torch.Tensor:
            packed = self._packed(expert, names)
            return self.unpacked.get(packed, device, dtype, partial(self._unpack, packed, device, dtype))

        def product(x, unpack):
            return UnpackedProduct.apply(x, unpack, F.linear, torch.matmul)

        return lambda expert: tuple(partial(product, unpack=partial(weight, expert, names)) for names in _PRODUCTS)


class Dsv4SparseMoeBlock(nn.Module):
    """Router, routed experts and the shared expert."""

    def __init__(self, config, layer_idx: int):
        super().__init__()
        self.gate = Dsv4TopKRouter(config, layer_idx)
        self.experts = Dsv4Experts(config, layer_idx)
        self.shared_experts = Dsv4MLP(config.hidden_size, config.moe_intermediate_size, config.swiglu_limit)

    def forward(
        self,
        x: torch.Tensor,
        image_mask: torch.Tensor | None = None,
        input_ids: torch.Tensor | None = None,
        token_mask: torch.Tensor | None = None,
        rounded: torch.Tensor | None = None,
    ) -> torch.Tensor:
        r"""Map `[B, S, H]` to `[B, S, H]`, dtype of `x`.

        Args:
            x (`torch.Tensor` of shape `[B, S, H]`).
            image_mask (`torch.Tensor` of shape `[B, S]`, bool, *optional*): positions of image spans.
            input_ids (`torch.Tensor` of shape `[B, S]`, int64, *optional*): token ids, for hash routing.
            token_mask (`torch.Tensor` of shape `[B, S]`, bool, *optional*): real tokens, for whoever counts loads.
            rounded (`torch.Tensor` of shape `[B, S, H]`, *optional*): x rounded to FP8, if the site did it.
        """
        flat = x.flatten(0, 1)
        rounded = rounded if rounded is None else rounded.flatten(0, 1)
        masks = (None if t is None else t.flatten() for t in (image_mask, input_ids, token_mask))
        _, weights, indices = self.gate(flat, *masks)
        # Routed experts first, then the shared one, in one float32 sum (contract section 7).
        out = self.experts(flat, indices, weights) + apply_rounded(self.shared_experts, flat, rounded)
        return out.to(x.dtype).view_as(x)
