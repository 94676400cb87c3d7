"""The one table between the tensor names of the released files and the parameter names of the models.

Used in both directions: for loading, saving and converting. A row maps a released stem to ours; the last part of the
name follows from how the tensor is stored:

    F8   dense FP8 tiles      `<stem>.weight` float8 and `<stem>.scale`   ours `<stem>.weight`, `<stem>.weight_scale_inv`
    F4   packed FP4 rows      the same, one scale per row and 32 columns
    W    a plain weight       `<stem>.weight`
    WB   weight and bias      `<stem>.weight` and `<stem>.bias`
    P    a bare parameter     `<stem>`

Numbers in names (layer, expert, stage, vision block) are holes `{}`; they appear in the same order on both sides.
One table serves V4.1 and V4; a checkpoint has the rows of its family. `mtp.*` (drafts) and the vision rows belong to
parts that not every model class has; what a class leaves on disk is listed when it loads (`OPTIONAL_PARTS`).

Source: the tensor inventories of the released checkpoints (contract section 1).
"""

from __future__ import annotations

import re

_BLOCK = {
    "attn_norm": ("input_layernorm", "W"),
    "ffn_norm": ("post_attention_layernorm", "W"),
    "attn.wq_a": ("self_attn.q_a_proj", "F8"),
    "attn.q_norm": ("self_attn.q_a_norm", "W"),
    "attn.wq_b": ("self_attn.q_b_proj", "F8"),
    "attn.wkv": ("self_attn.kv_proj", "F8"),
    "attn.kv_norm": ("self_attn.kv_norm", "W"),
    "attn.attn_sink": ("self_attn.sinks", "P"),
    "attn.wo_a": ("self_attn.o_a_proj", "F8"),
    "attn.wo_b": ("self_attn.o_b_proj", "F8"),
    "ffn.gate": ("mlp.gate", "W"),
    "ffn.gate.bias": ("mlp.gate.e_score_correction_bias", "P"),
    "ffn.gate.bias_vl": ("mlp.gate.e_score_correction_bias_vl", "P"),
    "ffn.gate.tid2eid": ("mlp.gate.tid2eid", "P"),
    "ffn.experts.{}.w1": ("mlp.experts.{}.gate_proj", "F4"),
    "ffn.experts.{}.w2": ("mlp.experts.{}.down_proj", "F4"),
    "ffn.experts.{}.w3": ("mlp.experts.{}.up_proj", "F4"),
    "ffn.shared_experts.w1": ("mlp.shared_experts.gate_proj", "F8"),
    "ffn.shared_experts.w2": ("mlp.shared_experts.down_proj", "F8"),
    "ffn.shared_experts.w3": ("mlp.shared_experts.up_proj", "F8"),
    "hc_attn_fn": ("attn_hc.fn", "P"),
    "hc_attn_base": ("attn_hc.base", "P"),
    "hc_attn_scale": ("attn_hc.scale", "P"),
    "hc_ffn_fn": ("ffn_hc.fn", "P"),
    "hc_ffn_base": ("ffn_hc.base", "P"),
    "hc_ffn_scale": ("ffn_hc.scale", "P"),
}
_LAYER = {
    **_BLOCK,
    "attn.compressor.wkv": ("self_attn.compressor.kv_proj", "W"),
    "attn.compressor.wgate": ("self_attn.compressor.gate_proj", "W"),
    "attn.compressor.norm": ("self_attn.compressor.kv_norm", "W"),
    "attn.compressor.ape": ("self_attn.compressor.position_bias", "P"),
    "attn.indexer.compressor.wkv": ("self_attn.indexer.compressor.kv_proj", "W"),
    "attn.indexer.compressor.wgate": ("self_attn.indexer.compressor.gate_proj", "W"),
    "attn.indexer.compressor.norm": ("self_attn.indexer.compressor.kv_norm", "W"),
    "attn.indexer.compressor.ape": ("self_attn.indexer.compressor.position_bias", "P"),
    "attn.indexer.wq_b": ("self_attn.indexer.q_b_proj", "F8"),
    "attn.indexer.weights_proj": ("self_attn.indexer.weights_proj", "W"),
    "attn.indexer.wk": ("self_attn.indexer.k_proj", "W"),
    "attn.indexer.k_norm": ("self_attn.indexer.k_norm", "W"),
    "engram.embed": ("engram.embedding", "F8"),
    "engram.wkv": ("engram.kv_proj", "F8"),
    "engram.q_weight": ("engram.q_weight", "P"),
    "engram.k_weight": ("engram.k_weight", "P"),
}
_COLLAPSE = {
    "hc_head_fn": ("hc_head.fn", "P"),
    "hc_head_base": ("hc_head.base", "P"),
    "hc_head_scale": ("hc_head.scale", "P"),
}
_DRAFT_STAGE = {
    **_BLOCK,
    **_COLLAPSE,
    "e_proj": ("e_proj", "F8"),
    "h_proj": ("h_proj", "F8"),
    "enorm": ("enorm", "W"),
    "hnorm": ("hnorm", "W"),
    "main_proj": ("main_proj", "F8"),
    "main_norm": ("main_norm", "W"),
    "norm": ("norm", "W"),
    "markov_head.embed": ("markov_head.embed", "W"),
    "markov_head.head": ("markov_head.head", "W"),
    "confidence_head.proj": ("confidence_head.proj", "W"),
}
_LANGUAGE_MODEL = {
    **_COLLAPSE,
    "embed": ("embed_tokens", "W"),
    "norm": ("norm", "W"),
    **{f"layers.{{}}.{released}": (f"layers.{{}}.{ours}", kind) for released, (ours, kind) in _LAYER.items()},
}
_VISION = {
    "vision.patch_embed.proj": ("vision_tower.patch_embed", "WB"),
    "vision.blocks.{}.norm1": ("vision_tower.layers.{}.norm1", "W"),
    "vision.blocks.{}.norm2": ("vision_tower.layers.{}.norm2", "W"),
    "vision.blocks.{}.attn.wqkv": ("vision_tower.layers.{}.attn.qkv", "WB"),
    "vision.blocks.{}.attn.wo": ("vision_tower.layers.{}.attn.proj", "WB"),
    "vision.blocks.{}.mlp.w1": ("vision_tower.layers.{}.mlp.gate_up_proj", "W"),
    "vision.blocks.{}.mlp.w2": ("vision_tower.layers.{}.mlp.down_proj", "W"),
    "vision.norm": ("vision_tower.norm", "W"),
    "aligner.w1": ("multi_modal_projector.linear_1", "WB"),
    "aligner.w2": ("multi_modal_projector.linear_2", "WB"),
    "image_start": ("image_start", "P"),
    "image_end": ("image_end", "P"),
    "image_newline": ("image_newline", "P"),
}

_ENDINGS = {
    "F8": ((".weight", ".weight"), (".scale", ".weight_scale_inv")),
    "F4": ((".weight", ".weight"), (".scale", ".weight_scale_inv")),
    "W": ((".weight", ".weight"),),
    "WB": ((".weight", ".weight"), (".bias", ".bias")),
    "P": (("", ""),),
}

# Parts that a model class may not have: name of the part -> pattern of the released names left on disk.
OPTIONAL_PARTS = {
    "drafts": re.compile(r"^mtp\."),
    "prediction head": re.compile(r"^(head|lm_head)\."),
    "vision": re.compile(r"^(vision\.|aligner\.|image_(start|end|newline|pad)$)"),
}

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def _expand(rows: dict[str, tuple[str, str]], prefix: str) -> dict[str, str]:
    return {
        released + end: prefix + ours + our_end
        for released, (ours, kind) in rows.items()
        for end, our_end in _ENDINGS[kind]
    }


class WeightNames:
    """Both directions of the table for one model class.

    Args:
        language_prefix (`str`): where the language model sits in the class: "" (the text model itself), "model."
            (text with a head) or "model.language_model." (text and image with a head).
        vision_prefix (`str` or `None`): where the vision tower sits, or `None` for a class without one.
    """

    def __init__(self, language_prefix: str, vision_prefix: str | None = None):
        table = _expand(_LANGUAGE_MODEL, language_prefix)
        table["head.weight"] = "lm_head.weight"
        table |= _expand(
            {f"mtp.{{}}.{r}": (f"mtp.{{}}.{o}", k) for r, (o, k) in _DRAFT_STAGE.items()}, language_prefix
        )
        if vision_prefix is not None:
            table |= _expand(_VISION, vision_prefix)
        self._ours = table
        self._released = {ours: released for released, ours in table.items()}
        # Fused float banks exist only in models; the released layout keeps one matrix per expert.
        self._fused = {
            f"{language_prefix}{blocks}.{{}}.mlp.experts.{name}"
            for blocks in ("layers", "mtp")
            for name in ("gate_up_proj", "down_proj")
        }

    def to_ours(self, name: str) -> str | None:
        """Return the parameter name of a released name (with or without a leading `model.`), or `None`.

        A name that is already a parameter name of the class comes back unchanged.
        """
        if _NUMBER.sub("{}", name) in self._fused:
            return name
        return self._translate(name, self._ours, self._released) or self._translate(
            name.removeprefix("model."), self._ours, self._released
        )

    def to_released(self, name: str) -> str | None:
        """Return the released name of a parameter name, or `None`; a released name comes back unchanged."""
        return self._translate(name, self._released, self._ours)

    @staticmethod
    def _translate(name: str, table: dict[str, str], targets: dict[str, str]) -> str | None:
        numbers = _NUMBER.findall(name)
        template = _NUMBER.sub("{}", name)
        if template in table:
            return table[template].format(*numbers)
        return name if template in targets else None
