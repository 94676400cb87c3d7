"""Decoding without launch overhead: one step of `generate` as a CUDA graph over a cache of fixed capacity.

A step of decoding in such a cache has one shape and waits for no value on the host (`SequenceLayout.is_static`). So its
kernels are recorded once and launched together from then on; what the host counts is counted beside it.
"""

from __future__ import annotations

import torch
from torch import nn

# Arguments that change nothing of a step: it is one token, without pixels, whose logits are all wanted.
WITHOUT_EFFECT = {
    "use_cache", "return_dict", "decoder_replay", "logits_to_keep", "image_grid_hw", "image_unshuffle_index",
}  # fmt: skip


class DecodeGraph:
    r"""A model as the loop of `generate` calls it: steps of decoding are replayed from a graph, all else runs as it is.

    The first step runs as it is too, which sets up what libraries set up once. The second is captured, which computes
    nothing, and replayed. Where a tensor of the cache was replaced, this begins anew. An object serves one loop:
    weights must stay where they are.

    Args:
        model: with a prediction head.
    """

    def __init__(self, model: nn.Module):
        self.model, self._can_capture = model, can_capture(model)
        self._tensors: list[torch.Tensor] = []  # of the cache that the last step ran on
        self._settings: tuple = ()
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, **inputs):
        """Return the output of the model; of a replayed step `logits` `[B, 1, V]` and `cache` alone."""
        if not (self._can_capture and is_step(inputs)):
            return self.model(**inputs)
        ids, cache = inputs["input_ids"], inputs["cache"]
        settings, tensors = (ids.shape, ids.device, cache.record_past), cache.tensors
        same = settings == self._settings and len(tensors) == len(self._tensors)
        if not (same and all(a is b for a, b in zip(tensors, self._tensors, strict=True))):
            self._graph = None
            output = self.model(**inputs)
            self._settings, self._tensors = settings, cache.tensors
            return output
        cache.check_room(1)
        with torch.cuda.device(ids.device):
            if self._graph is None:
                self._capture(ids, inputs)
            self._ids.copy_(ids)
            self._graph.replay()
        cache.advance_columns(1)
        return self._output_class(logits=self._logits.clone(), cache=cache)

    def _capture(self, ids: torch.Tensor, inputs: dict) -> None:
        cache, graph = inputs["cache"], torch.cuda.CUDAGraph()
        counted = cache.columns, cache.column_mask
        cache.column_mask = None
        self._ids = ids.clone()
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads may use the device
                # With its embedding, a token is not asked whether it stands for an image.
                embeds = self.model.get_input_embeddings()(self._ids)
                output = self.model(**inputs | {"input_ids": self._ids, "inputs_embeds": embeds})
        finally:
            cache.columns, cache.column_mask = counted
        self._graph, self._logits, self._output_class = graph, output.logits, type(output)


def is_step(inputs: dict) -> bool:
    """Whether these arguments of a forward are one token of every row, without padding, in a cache of fixed capacity."""
    given = {name for name, value in inputs.items() if value is not None and value is not False} - WITHOUT_EFFECT
    if given != {"input_ids", "cache"} or torch.is_grad_enabled():
        return False
    ids, cache = inputs["input_ids"], inputs["cache"]
    return ids.is_cuda and ids.shape[1] == 1 and cache.is_compileable and cache.is_initialized


def can_capture(model: nn.Module) -> bool:
    """Whether a step of this model waits for nothing on the host, lies on one CUDA device, and returns logits alone."""
    device, *others = {tensor.device for tensor in model.parameters()}
    if others or device.type != "cuda" or model.training:
        return False
    config = model.config.get_text_config()
    if any(getattr(config, name, False) for name in ("output_hidden_states", "output_router_logits")):
        return False  # a replayed step returns logits alone
    return not any(m.waits_for_host(device) for m in model.modules() if hasattr(m, "waits_for_host"))
