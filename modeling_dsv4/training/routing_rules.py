"""Which update rule a parameter gets, by its role: one table for V4.1 and V4 (V4.1 §2.5; V4 report §2.4).

Names are the canonical ones: without the prefixes that wrappers add. First match wins.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Splits = tuple[int, ...] | None


@dataclass(frozen=True)
class ModelFacts:
    """What the rules need of a configuration; counts and widths in heads and channels."""

    family: str
    num_attention_heads: int
    head_dim: int
    index_n_heads: int
    index_head_dim: int
    o_groups: int
    moe_intermediate_size: int
    hidden_size: int
    hc_mult: int
    has_indexer: bool
    has_engram: bool
    vision_heads: int
    vision_hidden_size: int
    vision_intermediate_size: int

    @classmethod
    def of(cls, config: Any, family: str | None = None) -> ModelFacts:
        """Read a model's config (composite or text).

        Raises:
            ValueError: for a model of neither family, or a field that is missing.
        """
        text = getattr(config, "text_config", None) or config
        vision = getattr(config, "vision_config", None)
        model_type = str(getattr(config, "model_type", ""))
        if family is None:
            family = next(
                (f for f, prefix in (("v41", "deepseek_v41"), ("v4", "deepseek_v4")) if prefix in model_type), ""
            )
        if family not in ("v41", "v4"):
            raise ValueError(
                f"cannot route a model of type {model_type!r}: expected deepseek_v41 or deepseek_v4 (or pass family=)"
            )

        def count(field: str, source: Any = text) -> int:
            value = getattr(source, field, None)
            if value is None:
                raise ValueError(f"config of type {model_type!r} has no `{field}`, which the routing needs")
            return int(value)

        return cls(
            family=family,
            num_attention_heads=count("num_attention_heads"),
            head_dim=count("head_dim"),
            index_n_heads=int(getattr(text, "index_n_heads", 0) or 0),
            index_head_dim=int(getattr(text, "index_head_dim", 0) or 0),
            o_groups=count("o_groups"),
            moe_intermediate_size=count("moe_intermediate_size"),
            hidden_size=count("hidden_size"),
            hc_mult=int(getattr(text, "hc_mult", 0) or 0),
            has_indexer=bool(getattr(text, "index_source_layer_ids", None)),
            has_engram=bool(getattr(text, "engram_layer_ids", None)),
            vision_heads=count("num_attention_heads", vision) if vision is not None else 0,
            vision_hidden_size=count("hidden_size", vision) if vision is not None else 0,
            vision_intermediate_size=count("intermediate_size", vision) if vision is not None else 0,
        )


@dataclass(frozen=True)
class Rule:
    r"""One row of the table.

    Attributes:
        label (`str`): the role, as the report prints it.
        pattern (`str`): searched in the canonical parameter name.
        algorithm (`str`): "muon", "sinkhorn" or "adamw".
        decays (`bool`): whether weight decay applies.
        splits (callable, *optional*): (facts, rows) -> rows of each block, or None.
        part (`str`, *optional*): module or parameter that a model of this kind must contain; a rule whose part is
            missing has gone stale.
        expected (callable, *optional*): (facts) -> whether this model must contain it.
    """

    label: str
    pattern: str
    algorithm: str
    decays: bool = True
    splits: Callable[[ModelFacts, int], Splits] | None = None
    part: str | None = None
    expected: Callable[[ModelFacts], bool] = lambda facts: True

    def matches(self, name: str) -> bool:
        return re.search(self.pattern, name) is not None


def _equal(blocks: int, rows: int) -> Splits:
    return (rows,) * blocks if blocks > 1 else None


def _heads(facts: ModelFacts, rows: int) -> Splits:
    return _equal(facts.num_attention_heads, facts.head_dim)


def _index_heads(facts: ModelFacts, rows: int) -> Splits:
    return _equal(facts.index_n_heads, facts.index_head_dim)


def _output_groups(facts: ModelFacts, rows: int) -> Splits:
    return _equal(facts.o_groups, rows // facts.o_groups)


def _halves(rows: int, width: int) -> Splits:
    """Overlapping compressors (V4 CSA) store the projections of two paths above each other."""
    return (width, width) if rows == 2 * width else None


def _compressor(facts: ModelFacts, rows: int) -> Splits:
    return _halves(rows, facts.head_dim)


def _index_compressor(facts: ModelFacts, rows: int) -> Splits:
    return _halves(rows, facts.index_head_dim)


def _gate_up(facts: ModelFacts, rows: int) -> Splits:
    return (rows // 2, rows - rows // 2)


def _engram(facts: ModelFacts, rows: int) -> Splits:
    return _equal(facts.hc_mult + 1, facts.hidden_size)


def _vision_qkv(facts: ModelFacts, rows: int) -> Splits:
    """Query and key by heads; the value as one matrix."""
    width = facts.vision_hidden_size // facts.vision_heads
    return (width,) * (2 * facts.vision_heads) + (facts.vision_hidden_size,)


def _rules(table: str) -> tuple[Rule, ...]:
    """Return the table of a family. V4: no head-wise split, AdamW for id tables, decay on everything of AdamW's."""
    v41 = table == "v41"
    tables, small = ("sinkhorn" if v41 else "adamw"), not v41
    return (
        Rule("token embedding", r"(^|\.)embed_tokens\.weight$", tables, part=r"(^|\.)embed_tokens($|\.)"),
        Rule("prediction head", r"(^|\.)lm_head\.weight$", tables),
        Rule("engram table", r"\.engram\.embedding\.weight$", "sinkhorn"),
        Rule("markov head", r"\bmarkov_head\.(embed|head)\.weight$", tables),
        Rule("confidence head", r"\bconfidence_head\.proj\.weight$", "adamw"),
        Rule(
            "engram projection",
            r"\.engram\.kv_proj\.weight$",
            "muon",
            splits=_engram,
            part=r"\.engram\.kv_proj($|\.)",
            expected=lambda f: f.has_engram,
        ),
        Rule("engram gains", r"\.engram\.[qk]_weight$", "adamw"),
        Rule("vision qkv", r"\bvision_tower\..*\.attn\.qkv\.weight$", "muon", splits=_vision_qkv),
        Rule("vision gate and up", r"\bvision_tower\..*\.mlp\.gate_up_proj\.weight$", "muon", splits=_gate_up),
        Rule("vision matrices", r"\bvision_tower\..*(patch_embed|proj|down_proj)\.weight$", "muon"),
        Rule("projector", r"\bmulti_modal_projector\.linear_\d\.weight$", "muon"),
        Rule("image delimiters", r"(^|\.)image_(start|end|newline)$", "adamw", decays=small),
        Rule(
            "indexer query",
            r"\.indexer\.q_b_proj\.weight$",
            "muon",
            splits=_index_heads if v41 else None,
            part=r"\.indexer\.q_b_proj($|\.)",
            expected=lambda f: f.has_indexer,
        ),
        Rule("indexer key and weights", r"\.indexer\.(k_proj|weights_proj)\.weight$", "muon"),
        Rule(
            "indexer compressor", r"\.indexer\.compressor\.(kv|gate)_proj\.weight$", "muon", splits=_index_compressor
        ),
        Rule("compressor", r"\.compressor\.(kv|gate)_proj\.weight$", "muon", splits=_compressor),
        Rule(
            "query by heads" if v41 else "query",
            r"\.q_b_proj\.weight$",
            "muon",
            splits=_heads if v41 else None,
            part=r"\.self_attn\.q_b_proj($|\.)",
        ),
        Rule(
            "output groups",
            r"\.o_a_proj\.weight$",
            "muon",
            splits=_output_groups,
            part=r"\.self_attn\.o_a_proj($|\.)",
        ),
        Rule("attention matrices", r"\.(q_a_proj|kv_proj|o_b_proj)\.weight$", "muon", part=r"\.q_a_proj($|\.)"),
        Rule("router", r"\.gate\.weight$", "muon", part=r"\.mlp\.gate($|\.)"),
        Rule(
            "experts gate and up", r"\.experts\.gate_up_proj$", "muon", splits=_gate_up, part=r"\.mlp\.experts($|\.)"
        ),
        Rule("experts down", r"\.experts\.down_proj$", "muon"),
        Rule("shared experts", r"\.shared_experts\.(gate|up|down)_proj\.weight$", "muon"),
        Rule("hyper-connection mixing", r"(^|[._])(attn_hc|ffn_hc|hc_head)\.fn$", "muon"),
        Rule(
            "hyper-connection base and scale",
            r"(^|[._])(attn_hc|ffn_hc|hc_head)\.(base|scale)$",
            "adamw",
            decays=small,
        ),
        Rule("sinks", r"\.sinks$", "adamw", decays=small),
        Rule("position bias", r"\.position_bias$", "adamw", decays=small),
        Rule("draft projections", r"(^|\.)(main_proj|e_proj|h_proj)\.weight$", "muon"),
        Rule("norms", r"norm\d?\.weight$", "adamw"),
        Rule("biases", r"\.bias$", "adamw", decays=small),
    )


RULES = {"v41": _rules("v41"), "v4": _rules("v4")}
# Roles that learn from the start, at the full rate, though they belong to the vision tower (V4.1 §2.5).
VISION_AT_FULL_RATE = re.compile(r"\bvision_tower\.norm\.weight$")
VISION = re.compile(r"(^|\.)vision_tower\.")

_WRAPPERS = re.compile(
    r"(?:^|(?<=\.))(?:module\.|_orig_mod\.|_fsdp_wrapped_module\.|_checkpoint_wrapped_module\.|base_model\.model\."
    r"|modules_to_save\.[^.]+\.|base_layer\.(?!lora_))"
)


def canonical_name(name: str) -> str:
    """Strip what DDP, compile, checkpointing, FSDP and PEFT put into a parameter's name.

    `base_layer` stays in front of an adapter: PEFT nests one expert bank's adapter inside the other's wrapper so.
    """
    return _WRAPPERS.sub("", name)
