r"""Counting how often each expert is picked, by modality, for the load-balance biases (V4.1 §2.1; V4 report §2.1).

The protocol with the model, in one place:

* a router is any module with a buffer `e_score_correction_bias` `[E] float32`; it may have a second buffer
  `e_score_correction_bias_vl` for image tokens (V4.1). Hash-routed layers have neither and are not touched.
* its forward returns a tuple whose third entry is `indices [N, k] int64`, the experts picked for each token.
* its forward may take, by keyword or position, `image_mask [N] bool or None` (True: image token; without it all
  tokens are text) and `token_mask [N] bool or None` (True: a real token; without it the padding mask
  `attention_mask [B, S]` of the outermost forward is used, flattened row by row; 4-D masks do not tell padding).
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

BIAS_NAMES = ("e_score_correction_bias", "e_score_correction_bias_vl")
INDICES = 2


def bias_update(load: torch.Tensor, speed: float) -> torch.Tensor:
    r"""Return what to add to the biases: `speed * sign(mean(load) - load)`.

    Args:
        load (`torch.Tensor` of shape `[..., E]`, int64):
            Picks of each expert in one optimizer step, over all micro-batches and ranks.
        speed (`float`):
            1e-3 in the V4 report.

    Returns:
        `torch.Tensor` of shape `[..., E]`, float32: 0 where the load is the mean (also: where there was no token).
    """
    # In integers: sign(sum - E * load) is exact, where a float mean may miss equality.
    return torch.sign(load.sum(-1, keepdim=True) - load.shape[-1] * load).to(torch.float32) * speed


class RouterLoadCounter:
    r"""Counts picks through forward hooks, between `attach` and `detach`.

    Counted are forwards of the whole model in training mode with gradients enabled: not evaluation, not generation. The
    recomputation of gradient checkpointing runs outside such a forward and is not counted again, whichever kind it is.
    The counts are plain tensors, no buffers: DDP would broadcast rank 0's.

    Attributes:
        loads (`dict[str, torch.Tensor]`): router name -> `[modalities, E] int64` since the last `reset`.
    """

    def __init__(self, model: torch.nn.Module):
        self.model = model
        self.routers = {n: m for n, m in model.named_modules() if _has_bias(n, m)}
        if not self.routers:
            raise ValueError(f"no module of {type(model).__name__} has a buffer `{BIAS_NAMES[0]}`: nothing to balance")
        self.loads: dict[str, torch.Tensor] = {}
        self._handles: list = []
        self._counting = False
        self._attention_mask: torch.Tensor | None = None

    def attach(self) -> None:
        """Start counting, from zero."""
        self.detach()
        self.reset()
        self._handles = [
            self.model.register_forward_pre_hook(self._enter, with_kwargs=True),
            self.model.register_forward_hook(self._leave, always_call=True),
        ]
        for name, router in self.routers.items():
            self._handles.append(router.register_forward_hook(self._count_hook(name), with_kwargs=True))

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def reset(self) -> None:
        self.loads = {name: torch.zeros_like(self.biases(name), dtype=torch.int64) for name in self.routers}

    def biases(self, name: str) -> torch.Tensor:
        """Return a copy of a router's biases `[modalities, E]`."""
        return torch.stack([getattr(self.routers[name], bias) for bias in self.bias_names(name)])

    def bias_names(self, name: str) -> list[str]:
        return [bias for bias in BIAS_NAMES if getattr(self.routers[name], bias, None) is not None]

    def _enter(self, module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        self._counting = module.training and torch.is_grad_enabled()
        mask = _argument(module, args, kwargs, "attention_mask") if self._counting else None
        self._attention_mask = mask if isinstance(mask, torch.Tensor) and mask.ndim == 2 else None

    def _leave(self, module: torch.nn.Module, args: tuple, output: Any) -> None:
        self._counting, self._attention_mask = False, None

    def _count_hook(self, name: str):
        def hook(router: torch.nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
            if self._counting:
                image_mask = _argument(router, args, kwargs, "image_mask")
                token_mask = _argument(router, args, kwargs, "token_mask")
                self._count(name, output[INDICES].detach(), image_mask, token_mask)

        return hook

    @torch.no_grad()
    def _count(self, name: str, indices: torch.Tensor, image_mask, token_mask) -> None:
        load = self.loads[name]
        if load.device != indices.device:
            load = self.loads[name] = load.to(indices.device)
        if token_mask is None:
            token_mask = self._attention_mask
        weight = torch.ones(indices.shape[0], dtype=torch.int64, device=indices.device)
        if token_mask is not None:
            if token_mask.numel() != indices.shape[0]:
                raise ValueError(
                    f"router {name}: {indices.shape[0]} tokens, but the padding mask has {token_mask.numel()} entries; "
                    "pass `token_mask` to the router"
                )
            weight = token_mask.reshape(-1).to(device=indices.device).ne(0).to(torch.int64)
        place = indices
        if image_mask is not None and load.shape[0] > 1:
            offset = image_mask.reshape(-1, 1).to(device=indices.device, dtype=torch.int64) * load.shape[1]
            place = indices + offset
        load.view(-1).scatter_add_(0, place.reshape(-1), weight.unsqueeze(1).expand_as(indices).reshape(-1))


def _has_bias(name: str, module: torch.nn.Module) -> bool:
    """Whether a module is a balanced router; refuse one whose bias the balance rule could not own."""
    if BIAS_NAMES[0] in dict(module.named_parameters(recurse=False)):
        raise ValueError(f"{name}.{BIAS_NAMES[0]} is a Parameter: the balance rule owns it, so it must be a buffer")
    bias = dict(module.named_buffers(recurse=False)).get(BIAS_NAMES[0])
    if bias is not None and bias.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"{name}.{BIAS_NAMES[0]} is {bias.dtype}: steps of 1e-3 need float32")
    return bias is not None


def _argument(module: torch.nn.Module, args: tuple, kwargs: dict, name: str) -> Any:
    """Return a forward argument, however it was passed, or None."""
    if name in kwargs or not args:
        return kwargs.get(name)
    parameters = list(inspect.signature(type(module).forward).parameters)[1:]
    index = parameters.index(name) if name in parameters else len(args)
    return args[index] if index < len(args) else None
