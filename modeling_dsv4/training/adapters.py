"""LoRA where PEFT has no layer of its own: banks of routed experts and the grouped output projection, float or packed.

`lora_layers(model, config)` tells PEFT of them. Then `target_modules` may name `experts` (both matrices of every routed expert,
each expert with factors of its own) and `o_a_proj` beside the linear layers. Over packed weights nothing merges: their
format is coarser than an adapter (V4 report section 5), so the merge is refused and the ways out are named.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig
from peft.tuners import lora
from peft.tuners.tuners_utils import check_adapters_to_merge
from torch import nn

from ..layers import grouped_product


def lora_layers(model: nn.Module, config: LoraConfig | str) -> LoraConfig:
    r"""Make PEFT use this file's layers for a model of ours.

    Args:
        model (`nn.Module`): the model that will be adapted, installed or remote code.
        config (`LoraConfig` or `str`): as usual, or the folder of a saved adapter, since PEFT does not save which layers
            it was told of: `PeftModel.from_pretrained(model, folder, config=lora_layers(model, folder))`.

    Returns:
        the `LoraConfig`, for `get_peft_model`, `model.add_adapter` or TRL.
    """
    if not isinstance(config, LoraConfig):
        config = LoraConfig.from_pretrained(config)
    packed = any(getattr(module, "is_packed", False) for module in model.modules())
    layers = PACKED_LAYERS if packed else LAYERS
    # By name, since a model of remote code has classes of its own; a derived class goes before torch's.
    found = sorted(
        {kind for module in model.modules() for kind in type(module).__mro__}, key=lambda k: -len(k.__mro__)
    )
    config._register_custom_module({kind: layers[kind.__name__] for kind in found if kind.__name__ in layers})
    return config


def _refuse_mixed_batch(adapter_names) -> None:
    if adapter_names is not None:
        raise ValueError(f"adapter_names is {adapter_names!r}; accepted with experts or o_a_proj adapted: None.")


class LoraGroupedLinear(lora.Linear):
    """Factors of the whole matrix `[O, I]`: every group reads `A` `[r, I]`, and group g has its own rows of `B` `[O, r]`."""

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: LoraConfig, **kwargs: Any) -> None:
        """As PEFT's; a bias of the factors would never be read."""
        if config.lora_bias:
            raise ValueError(f"lora_bias is {config.lora_bias!r}; accepted for o_a_proj: False.")
        super().update_layer(adapter_name, r, lora_alpha, config=config, **kwargs)

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        return module.in_features, module.out_features

    @property
    def lora_variants(self):
        return {(): None}

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Map `[..., G, I]` to `[..., O]`; dtype of the base layer's result."""
        _refuse_mixed_batch(kwargs.pop("adapter_names", None))
        if self.disable_adapters and self.merged:
            self.unmerge()
        base = self.get_base_layer()
        result = base(x)
        if self.disable_adapters or self.merged:
            return result
        added = result
        for name in self.active_adapters:
            if name in self.lora_A:
                narrow = self.lora_A[name](self.lora_dropout[name](x.to(self.lora_A[name].weight.dtype)))
                rows = self.lora_B[name].weight.unflatten(0, (base.groups, -1))
                added = added + grouped_product(narrow, rows) * self.scaling[name]
        return added.to(result.dtype)


class ExpertFactors(nn.Module):
    """One side of the factors of a bank: `gate_up` and `down`, each `[E, rows, columns]`."""

    def __init__(self, experts: int, gate_up: tuple[int, int], down: tuple[int, int]):
        super().__init__()
        self.gate_up = nn.Parameter(torch.zeros(experts, *gate_up))
        self.down = nn.Parameter(torch.zeros(experts, *down))


class LoraExperts(nn.Module, lora.LoraLayer):
    r"""A bank of routed experts, float or packed, with factors of rank r for every expert.

    W_e x + scaling * B_e A_e x, for the gate and up matrices together (`A` `[E, r, H]`, `B` `[E, 2I, r]`) and for the down
    matrix (`A` `[E, r, I]`, `B` `[E, H, r]`). The factors read what the base weights read, rounded if that is.
    """

    def __init__(
        self,
        base_layer: nn.Module,
        adapter_name: str,
        config: LoraConfig,
        r: int = 0,
        lora_alpha: int = 1,
        **kwargs: Any,
    ):
        nn.Module.__init__(self)
        lora.LoraLayer.__init__(self, base_layer)
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, r, lora_alpha, config)

    def waits_for_host(self, device: torch.device) -> bool:
        """Factors are taken expert by expert."""
        return True

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        return module.hidden_size, module.hidden_size

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: LoraConfig, **kwargs: Any) -> None:
        """Add an adapter; A is random and B zero, as PEFT begins."""
        if r <= 0:
            raise ValueError(f"r is {r}; accepted: an integer > 0.")
        if config.lora_bias or config.init_lora_weights not in (True, False):
            raise ValueError(
                f"lora_bias is {config.lora_bias!r}, init_lora_weights is {config.init_lora_weights!r}; accepted for "
                "experts: False, and True or False."
            )
        self.resolve_lora_variant(config=config)  # refuses DoRA and its like
        bank = self.get_base_layer()
        device = next(t.device for t in (*bank.parameters(), *bank.buffers()))
        self.r[adapter_name], self.lora_alpha[adapter_name] = r, lora_alpha
        self.scaling[adapter_name] = lora_alpha / (math.sqrt(r) if config.use_rslora else r)
        self.lora_dropout[adapter_name] = nn.Dropout(config.lora_dropout)
        first = ExpertFactors(bank.num_experts, (r, bank.hidden_size), (r, bank.width)).to(device)
        second = ExpertFactors(bank.num_experts, (2 * bank.width, r), (bank.hidden_size, r)).to(device)
        self.lora_A[adapter_name], self.lora_B[adapter_name] = first, second
        for factors in (first,) if config.init_lora_weights else (first, second):
            for matrix in (matrix for bank in factors.parameters() for matrix in bank.data):
                nn.init.kaiming_uniform_(matrix, a=math.sqrt(5))
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As the bank: `[N, H]`, indices `[N, k]` and weights `[N, k]` to `[N, H]`."""
        _refuse_mixed_batch(kwargs.pop("adapter_names", None))
        if self.disable_adapters and self.merged:
            self.unmerge()
        names = [] if self.disable_adapters or self.merged else [n for n in self.active_adapters if n in self.lora_A]
        return self.base_layer(x, *args, adapt=partial(self._adapt, names), **kwargs)

    def _adapt(self, names: list[str], expert: int, products: tuple) -> tuple:
        """Add the factors of one expert to its two products."""

        def adapted(product, part: str, x: torch.Tensor) -> torch.Tensor:
            result = product(x)
            for name in names:
                first, second = (getattr(side[name], part)[expert] for side in (self.lora_A, self.lora_B))
                narrow = F.linear(self.lora_dropout[name](x.to(first.dtype)), first)
                result = result + (F.linear(narrow, second) * self.scaling[name]).to(result.dtype)
            return result

        return tuple(partial(adapted, *pair) for pair in zip(products, PARTS, strict=True))

    def get_delta_weight(self, name: str, part: str) -> torch.Tensor:
        """Return what an adapter adds to `gate_up` `[E, 2I, H]` or `down` `[E, H, I]`."""
        first, second = (getattr(side[name], part) for side in (self.lora_A, self.lora_B))
        return second @ first * self.scaling[name]

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Add adapters to the weights."""
        for name in check_adapters_to_merge(self, adapter_names) or ():
            if name in self.lora_A:
                deltas = {part: self.get_delta_weight(name, part) for part in PARTS}
                if safe_merge and not all(delta.isfinite().all() for delta in deltas.values()):
                    raise ValueError(f"The adapter {name} holds infinities or NaN; accepted: finite factors.")
                self._add(deltas, 1)
                self.merged_adapters.append(name)

    def unmerge(self) -> None:
        """Take merged adapters out again."""
        while self.merged_adapters:
            name = self.merged_adapters.pop()
            self._add({part: self.get_delta_weight(name, part) for part in PARTS}, -1)

    @torch.no_grad()
    def _add(self, deltas: dict[str, torch.Tensor], sign: int) -> None:
        for part, delta in deltas.items():
            weight = getattr(self.get_base_layer(), f"{part}_proj")
            weight.add_(delta.to(weight.dtype), alpha=sign)


class Unmerged:
    """An adapter layer of a model with packed weights: no part of it is merged, so that it stays one model."""

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        raise ValueError(
            "The model holds packed weights, into which no adapter merges without rounding it away; accepted: a model loaded "
            "with Dsv4QuantizationConfig(dequantize=True), which merges, saves, and is packed again by `python -m convert "
            "released SRC DST`, or to keep the adapter beside the packed weights."
        )


class UnmergedLinear(Unmerged, lora.Linear):
    pass


class UnmergedEmbedding(Unmerged, lora.Embedding):
    pass


class UnmergedGroupedLinear(Unmerged, LoraGroupedLinear):
    pass


class UnmergedExperts(Unmerged, LoraExperts):
    pass


PARTS = ("gate_up", "down")
LAYERS = {"Dsv4GroupedLinear": LoraGroupedLinear, "Dsv4Experts": LoraExperts}
PACKED_LAYERS = {
    "Dsv4GroupedLinear": UnmergedGroupedLinear,
    "Dsv4PackedExperts": UnmergedExperts,
    "Linear": UnmergedLinear,
    "Embedding": UnmergedEmbedding,
}
