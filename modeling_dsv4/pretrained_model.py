"""What the model classes of both families have in common but for the forward path: flags, initialisation, token map.

Sources: V4 report section 2.2 (initialisation), contract section 8 (token map).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.utils import logging

from .attention import Dsv4Attention, Dsv4Compressor
from .decoder import Dsv4DecoderLayer
from .engram import Dsv4EngramMemory, Dsv4PackedEngramTable
from .engram_reads import EngramStatistics
from .expert_placement import ExpertPlacementMixin
from .host_tensors import host_modules
from .hyper_connections import Dsv4HyperConnection, Dsv4HyperHead
from .kernel_seam import KernelsMixin
from .layers import Dsv4GroupedLinear, Dsv4RMSNorm
from .moe import Dsv4Experts, Dsv4TopKRouter, balanced_token_experts
from .ngram_hash import Dsv4NgramHash, build_token_map
from .quantization import PACKED_DTYPES
from .released_loading import ReleasedCheckpointMixin

logger = logging.get_logger(__name__)

# Start of the mixing scales: the static coefficients A = 0.5, C = 1 dominate a fresh model (V4 report section 2.2).
INITIAL_MIXING_SCALE = 0.01


class Dsv4PreTrainedModel(ReleasedCheckpointMixin, ExpertPlacementMixin, KernelsMixin, PreTrainedModel):
    """Loading, saving, initialisation and flags common to all classes."""

    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Dsv4DecoderLayer", "Dsv4DSparkStage", "Dsv4MtpLayer"]
    # Sinks, a selection per query and heads of 512 channels are beyond the generic attention backends.
    _supports_sdpa = False
    _supports_flash_attn = False
    _supports_flex_attn = False
    _supports_attention_backend = False
    # Everything that depends on the sequence is in the cache, which can be rolled back.
    _is_stateful = False
    _can_compile_fullgraph = False
    _keep_in_fp32_modules_strict = [
        "attn_hc",
        "ffn_hc",
        "hc_head",
        "sinks",
        "e_score_correction_bias",
        "e_score_correction_bias_vl",
        "position_bias",
    ]

    def post_init(self) -> None:
        """Finish a class; of the modules that stay in float32 and the layers that are not split, it names those that it has."""
        super().post_init()
        present = {part for name in self.state_dict() for part in name.split(".")}
        self._keep_in_fp32_modules_strict &= present
        self._no_split_modules &= {type(module).__name__ for module in self.modules()}  # FSDP2 refuses others

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        std = self.config.get_text_config().initializer_range
        if isinstance(module, (nn.Linear, nn.Embedding, Dsv4GroupedLinear, Dsv4TopKRouter)):
            if module.weight.dtype.itemsize > 1:  # packed weights come from a file, never from here
                init.normal_(module.weight, mean=0.0, std=std)
            if getattr(module, "bias", None) is not None:
                init.zeros_(module.bias)
            if isinstance(module, Dsv4TopKRouter):
                self._init_router(module)
        elif isinstance(module, Dsv4RMSNorm):
            init.ones_(module.weight)
        elif isinstance(module, Dsv4Experts):
            init.normal_(module.gate_up_proj, mean=0.0, std=std)
            init.normal_(module.down_proj, mean=0.0, std=std)
        elif isinstance(module, Dsv4Attention):
            init.zeros_(module.sinks)
        elif isinstance(module, (Dsv4HyperConnection, Dsv4HyperHead)):
            init.normal_(module.fn, mean=0.0, std=std)
            init.zeros_(module.base)
            init.constant_(module.scale, INITIAL_MIXING_SCALE)
        elif isinstance(module, Dsv4EngramMemory):
            init.ones_(module.q_weight)
            init.ones_(module.k_weight)
        elif isinstance(module, Dsv4Compressor) and module.position_bias is not None:
            init.zeros_(module.position_bias)

    @staticmethod
    def _init_router(router: Dsv4TopKRouter) -> None:
        for name, buffer in router.named_buffers():
            if name == "tid2eid":
                table = balanced_token_experts(len(buffer), len(router.weight), buffer.shape[1])
                init.copy_(buffer, table.to(buffer.device))
            else:
                init.zeros_(buffer)

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Count parameters; packed FP4 counts two a byte, scales count none, host tensors are included."""
        total = super().num_parameters(only_trainable, exclude_embeddings)
        for name, parameter in self.named_parameters():
            if name.endswith("weight_scale_inv") and (parameter.requires_grad or not only_trainable):
                total -= parameter.numel()
        if only_trainable:
            return total
        tensors = [module.host_tensor(n) for module in host_modules(self).values() for n in module.host_names()
                   if not n.endswith("weight_scale_inv")]  # fmt: skip
        return total + sum(t.numel() * (2 if t.dtype == torch.int8 else 1) for t in tensors)

    def _set_gradient_checkpointing(self, enable: bool = True, gradient_checkpointing_func=checkpoint, **kwargs):
        """Replace the reentrant form, which sees no gradient through the tuples that layers hand on."""
        options = getattr(gradient_checkpointing_func, "keywords", {})
        if enable and options.get("use_reentrant"):
            logger.warning_once("use_reentrant=True: layers hand on tuples, so use_reentrant=False is used instead.")
            gradient_checkpointing_func = partial(gradient_checkpointing_func, use_reentrant=False)
        super()._set_gradient_checkpointing(enable, gradient_checkpointing_func, **kwargs)

    @property
    def is_gradient_checkpointing(self) -> bool:
        """As `is_activation_checkpointing`; PEFT and TRL ask by this old name, of which transformers would warn the user."""
        return self.is_activation_checkpointing

    def requires_grad_(self, requires_grad: bool = True):
        """As `nn.Module.requires_grad_`, but packed weights never require a gradient."""
        for parameter in self.parameters():
            parameter.requires_grad_(requires_grad and parameter.dtype not in PACKED_DTYPES)
        return self

    def train(self, mode: bool = True):
        """Set training mode; says once that packed weights stay frozen where norms train: the whole model was meant to."""
        trains = any(m.weight.requires_grad for m in self.modules() if isinstance(m, Dsv4RMSNorm))
        if mode and trains and any(p.dtype in PACKED_DTYPES for p in self.parameters()):
            logger.warning_once(
                "Packed weights (FP8, FP4) are frozen in training; load with Dsv4QuantizationConfig(dequantize=True) to "
                "train all weights."
            )
        return super().train(mode)

    def set_tokenizer(self, tokenizer) -> None:
        r"""Build the Engram token map from a tokenizer.

        Args:
            tokenizer: a fast transformers tokenizer or a `tokenizers.Tokenizer`.

        Raises:
            TypeError: if no `tokenizers.Tokenizer` is in it.
            ValueError: if its compressed vocabulary is not the one the config names.
        """
        if self.config.get_text_config().needs_token_map:
            self.set_token_map(build_token_map(tokenizer))

    def set_token_map(self, token_map: torch.Tensor) -> None:
        """Use a token map `[tokens]` (integer) for the Engram hash; checked against the config."""
        for module in self.modules():
            if isinstance(module, Dsv4NgramHash):
                module.set_token_map(token_map)

    def engram_statistics(self) -> dict[int, EngramStatistics]:
        """Return what was read of every packed Engram table since the model was loaded, by layer."""
        memories = (
            layer for layer in self.modules() if isinstance(layer, Dsv4DecoderLayer) and hasattr(layer, "engram")
        )
        tables = {layer.layer_idx: layer.engram.embedding for layer in memories}
        return {i: replace(t.statistics) for i, t in tables.items() if isinstance(t, Dsv4PackedEngramTable)}

    @property
    def token_map(self) -> torch.Tensor | None:
        """The token map in use `[tokens]` (int64), or `None`."""
        hashes = (module for module in self.modules() if isinstance(module, Dsv4NgramHash))
        return next((found.token_map for found in hashes), None)
