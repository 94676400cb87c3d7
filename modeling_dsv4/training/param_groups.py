"""Parameter groups by role, for `Dsv4Optimizer` (V4.1 §2.5; V4 report §2.4)."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from .routing_report import RoutingReport
from .routing_rules import RULES, VISION, VISION_AT_FULL_RATE, ModelFacts, Rule, Splits, canonical_name

_LORA = re.compile(r"\.lora_(?P<part>A|B|embedding_A|embedding_B|magnitude_vector)\b")
_TRAINABLE_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
LORA_MODES = ("adamw", "muon_b", "muon")


@dataclass(frozen=True)
class Route:
    """Where one parameter goes and why."""

    name: str
    parameter: torch.nn.Parameter
    label: str
    algorithm: str
    decays: bool
    row_splits: Splits
    role: str
    named: bool = True
    options: tuple[tuple[str, Any], ...] = ()


def build_param_groups(
    model: torch.nn.Module,
    *,
    lr: float | None = None,
    weight_decay: float = 0.1,
    vision_lr_scale: float = 0.1,
    lora: str = "adamw",
    rules: Mapping[str, Mapping[str, Any]] | None = None,
    family: str | None = None,
    muon: Mapping[str, Any] | None = None,
    sinkhorn: Mapping[str, Any] | None = None,
    adamw: Mapping[str, Any] | None = None,
    report: bool = True,
) -> list[dict[str, Any]]:
    r"""Put every trainable parameter into the group of the rule that updates it.

    Implements V4.1 §2.5: Muon for matrices, query and key head by head; Algorithm 1 for the Engram tables, the token
    embedding and the prediction head; AdamW for norm weights (with decay), biases and scale factors (without). For V4
    (report §2.4): no head-wise split; AdamW for embedding and head; decay on everything of AdamW's.
    Differs from the source: where it is silent (output groups, compressor halves, gate and up, Engram branches are
    matrices of their own; adapters go to AdamW) every choice can be overridden by `rules`.

    Args:
        model (`torch.nn.Module`):
            A V4.1 or V4 model, bare or wrapped (DDP, PEFT, compile); may be on the meta device.
        lr (`float`, *optional*):
            Base learning rate. Without it the groups carry `lr_scale` and `Dsv4Optimizer(lr=...)` multiplies.
        weight_decay (`float`, *optional*, defaults to 0.1):
            Of all that decays; the Sinkhorn-balanced update has none.
        vision_lr_scale (`float`, *optional*, defaults to 0.1):
            Learning-rate factor of the vision tower without its final norm. The source says "smaller", no number.
        lora (`"adamw" | "muon_b" | "muon"`, *optional*, defaults to `"adamw"`):
            Adapters: all on AdamW without decay; Muon for B (split like its base), AdamW for A; Muon for both. Adapters
            of expert banks and embeddings, and DoRA magnitudes, are AdamW's always.
        rules (`Mapping[str, Mapping]`, *optional*):
            Regular expression over canonical names -> group options (`algorithm`, `row_splits`, `weight_decay`, ...)
            that replace or extend the built-in rule. The first that matches wins; one that matches nothing is an error.
        family (`"v41" | "v4"`, *optional*):
            Read from `model.config.model_type` by default.
        muon, sinkhorn, adamw (`Mapping`, *optional*):
            Further group options for all groups of the algorithm, such as `{"ns_dtype": "float32"}`.
        report (`bool`, *optional*, defaults to `True`):
            Print the routing table (rank 0 only).

    Returns:
        `list[dict]`: groups with `params, names, algorithm, weight_decay, lr_scale, role`, Muon's with `row_splits`; the
        first (a text group, whose rate Trainer logs) also holds `routing`, a hash of which name is updated how.

    Raises:
        ValueError: for a parameter that cannot be routed (dtype, dimensions, split that does not fit), a rule that
            matches nothing, a model part that the config promises and no rule finds, or a model with nothing to train.
    """
    if lora not in LORA_MODES:
        raise ValueError(f"`lora` must be one of {LORA_MODES}, got {lora!r}")
    facts = ModelFacts.of(_config(model), family)
    _refuse_stale_rules(model, facts)
    routes = _user_routes(_routes(model, facts, lora), rules or {})
    if not routes:
        raise ValueError("the model has no trainable parameter")
    extra = {"muon": dict(muon or {}), "sinkhorn": dict(sinkhorn or {}), "adamw": dict(adamw or {})}
    groups: dict[str, dict[str, Any]] = {}
    for route in sorted(routes, key=lambda r: r.role != "text"):  # stable: text first, each in the model's order
        scale = vision_lr_scale if route.role == "vision" else 1.0
        decay = weight_decay if route.decays and route.algorithm != "sinkhorn" else 0.0
        options = {"algorithm": route.algorithm, "weight_decay": decay, "lr_scale": scale, "role": route.role}
        if route.algorithm == "muon":
            options["row_splits"] = route.row_splits
        options |= extra[route.algorithm] | dict(route.options)
        if lr is not None:
            options["lr"] = lr * options["lr_scale"]
        group = groups.setdefault(repr(sorted(options.items())), {"params": [], "names": [], **options})
        group["params"].append(route.parameter)
        group["names"].append(route.name)
    result = list(groups.values())
    result[0]["routing"] = routing_hash(result)
    if report and (not dist.is_available() or not dist.is_initialized() or dist.get_rank() == 0):
        print(RoutingReport.of(result, routes, RULES[facts.family]))
    return result


def routing_hash(groups: Iterable[Mapping[str, Any]]) -> str:
    """Return 16 hex digits that change when a name changes its group, algorithm, split or place."""
    table = [[g["algorithm"], list(g.get("row_splits") or ()), list(g["names"])] for g in groups]
    return hashlib.sha256(json.dumps(table).encode()).hexdigest()[:16]


def _config(model: torch.nn.Module) -> Any:
    while getattr(model, "config", None) is None and isinstance(getattr(model, "module", None), torch.nn.Module):
        model = model.module
    config = getattr(model, "config", None)
    if config is None:
        raise ValueError(f"{type(model).__name__} has no `config`; the routing needs head counts and widths")
    return config


def _refuse_stale_rules(model: torch.nn.Module, facts: ModelFacts) -> None:
    """A renamed module must not silently lose its rule: what the config promises must be found, frozen or not."""
    names = [canonical_name(name) for name, _ in model.named_modules()]
    names += [canonical_name(name) for name, _ in model.named_parameters()]
    missing = [
        rule.label
        for rule in RULES[facts.family]
        if rule.part and rule.expected(facts) and not any(re.search(rule.part, name) for name in names)
    ]
    if missing:
        raise ValueError(f"rules that match nothing in this model, though its config promises these parts: {missing}")


def _routes(model: torch.nn.Module, facts: ModelFacts, lora: str) -> list[Route]:
    routes, refused, taken = [], [], set()
    for full_name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        name = canonical_name(full_name)
        name = full_name if name in taken else name  # two saved copies of one module
        taken.add(name)
        if parameter.dtype not in _TRAINABLE_DTYPES:
            refused.append(f"{full_name} ({parameter.dtype})")
        elif parameter.ndim > 3:
            refused.append(f"{full_name} ({parameter.ndim} dimensions)")
        else:
            routes.append(_route(name, parameter, facts, lora))
    if refused:
        raise ValueError(
            "no update rule for trainable parameters of packed dtypes or more than three dimensions "
            f"(freeze them, or load with dequantize=True): {refused[:20]}"
        )
    return routes


def _route(name: str, parameter: torch.nn.Parameter, facts: ModelFacts, lora: str) -> Route:
    role = "vision" if VISION.search(name) and not VISION_AT_FULL_RATE.search(name) else "text"
    adapter = _LORA.search(name)
    if adapter:
        return _adapter_route(name, parameter, facts, lora, adapter, role)
    rule = next((rule for rule in RULES[facts.family] if rule.matches(name)), None)
    if rule is None:
        return _fallback_route(name, parameter, role)
    splits = _splits(rule, name, parameter.shape, facts)
    return Route(name, parameter, rule.label, rule.algorithm, rule.decays, splits, role)


def _splits(rule: Rule, name: str, shape: torch.Size, facts: ModelFacts) -> Splits:
    splits = rule.splits(facts, shape[-2]) if rule.splits else None
    if splits is not None and sum(splits) != shape[-2]:
        raise ValueError(
            f"{name}: rule '{rule.label}' cuts {len(splits)} blocks, {sum(splits)} rows by the config, "
            f"but the parameter has {shape[-2]}"
        )
    return splits


def _fallback_route(name: str, parameter: torch.nn.Parameter, role: str) -> Route:
    """No rule names it: matrices are Muon's (the report's "all other modules"), vectors AdamW's without decay."""
    if parameter.ndim >= 2 and min(parameter.shape[-2:]) > 1:
        return Route(name, parameter, "other matrices", "muon", True, None, role, named=False)
    return Route(name, parameter, "other vectors", "adamw", False, None, role, named=False)


def _adapter_route(name, parameter, facts: ModelFacts, lora: str, adapter: re.Match, role: str) -> Route:
    part = adapter["part"]
    of_experts = re.search(r"\.experts\.(base_layer\.)?lora_", name) is not None
    wanted = {"A": lora == "muon", "B": lora in ("muon", "muon_b")}.get(part, False)
    if not wanted or of_experts or parameter.ndim != 2:
        return Route(name, parameter, "adapters", "adamw", False, None, role)
    splits = None
    if part == "B":
        base = name[: adapter.start()] + ".weight"
        rule = next((rule for rule in RULES[facts.family] if rule.matches(base)), None)
        splits = _splits(rule, name, parameter.shape, facts) if rule else None
    return Route(name, parameter, f"adapters {part}", "muon", False, splits, role)


def _user_routes(routes: list[Route], rules: Mapping[str, Mapping[str, Any]]) -> list[Route]:
    """Apply the caller's rules; each must match something."""
    matched = dict.fromkeys(rules, 0)
    result = []
    for route in routes:
        pattern = next((p for p in rules if re.search(p, route.name)), None)
        if pattern is not None:
            matched[pattern] += 1
            options = dict(rules[pattern])
            algorithm = options.pop("algorithm", route.algorithm)
            splits = options.pop("row_splits", route.row_splits if algorithm == "muon" else None)
            splits = tuple(splits) if splits is not None else None
            if splits is not None and (route.parameter.ndim < 2 or sum(splits) != route.parameter.shape[-2]):
                raise ValueError(
                    f"rule {pattern!r}: row_splits {splits} do not fit {route.name} {route.parameter.shape}"
                )
            route = replace(
                route,
                label=f"rule {pattern}",
                algorithm=algorithm,
                row_splits=splits,
                named=True,
                options=tuple(sorted(options.items())),
            )
        result.append(route)
    unmatched = [pattern for pattern, count in matched.items() if not count]
    if unmatched:
        raise ValueError(f"rules that match no trainable parameter: {unmatched}")
    return result
