"""The table that says what updates what, printed once when the groups are built."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .group_options import OPTIONS, momentum_dtype, working_dtype
from .newton_schulz import describe_splits, equal_runs, newton_schulz_flops


@dataclass
class ReportRow:
    """One role within one group. `elements` counts weights, `state_bytes` bytes, `flops` operations a step."""

    label: str
    algorithm: str
    splits: str
    tensors: int = 0
    elements: int = 0
    lr_scale: float = 1.0
    weight_decay: float = 0.0
    state_bytes: int = 0
    flops: float = 0.0


@dataclass
class RoutingReport:
    """Rows of the routing table, notes about what deserves a look, and the totals (`str()` is the printed form)."""

    rows: list[ReportRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    routing: str = ""

    @classmethod
    def of(cls, groups: Iterable[Mapping[str, Any]], routes: Sequence, rules: Sequence) -> RoutingReport:
        """Collect the table from the groups and the routes that made them."""
        groups = list(groups)
        group_of = {name: group for group in groups for name in group["names"]}
        rows: dict[tuple, ReportRow] = {}
        for route in routes:
            group = group_of[route.name]
            key = (route.label, id(group))
            row = rows.setdefault(
                key,
                ReportRow(
                    route.label,
                    route.algorithm,
                    describe_splits(group.get("row_splits")),
                    lr_scale=group["lr_scale"],
                    weight_decay=group["weight_decay"],
                ),
            )
            row.tensors += 1
            row.elements += route.parameter.numel()
            row.state_bytes += state_bytes(group, route.parameter)
            row.flops += step_flops(group, route.parameter.shape)
        report = cls(list(rows.values()), routing=groups[0].get("routing", ""))
        used = {route.label for route in routes}
        unused = [rule.label for rule in rules if rule.label not in used]
        if unused:
            report.notes.append("rules without a trainable parameter: " + ", ".join(unused))
        on_adamw = Counter(route.label for route in routes if _matrix_on_adamw(route))
        if on_adamw:
            counts = ", ".join(f"{label} ({count})" for label, count in on_adamw.items())
            report.notes.append(f"matrices on AdamW because their rule says so: {counts}")
        unnamed = [route.name for route in routes if not route.named]
        if unnamed:
            more = f" and {len(unnamed) - 10} more" if len(unnamed) > 10 else ""
            report.notes.append(f"named by no rule (shape decided): {', '.join(unnamed[:10])}{more}")
        return report

    def __str__(self) -> str:
        head = ("role", "algorithm", "blocks", "tensors", "elements", "lr x", "decay", "state", "FLOPs/step")
        lines = [
            (
                row.label,
                row.algorithm,
                row.splits,
                f"{row.tensors:,}",
                f"{row.elements:,}",
                f"{row.lr_scale:g}",
                f"{row.weight_decay:g}",
                _bytes(row.state_bytes),
                f"{row.flops:.3g}",
            )
            for row in self.rows
        ]
        total = (
            "total",
            "",
            "",
            f"{sum(r.tensors for r in self.rows):,}",
            f"{sum(r.elements for r in self.rows):,}",
            "",
            "",
            _bytes(sum(r.state_bytes for r in self.rows)),
            f"{sum(r.flops for r in self.rows):.3g}",
        )
        table = [head, *lines, total]
        widths = [max(len(line[i]) for line in table) for i in range(len(head))]
        text = ["  ".join(_align(cell, widths[i], i) for i, cell in enumerate(line)).rstrip() for line in table]
        return "\n".join([f"Optimizer routing {self.routing}", *text, *self.notes])


def _align(cell: str, width: int, column: int) -> str:
    return cell.ljust(width) if column < 3 else cell.rjust(width)


def _matrix_on_adamw(route) -> bool:
    shape = route.parameter.shape
    return route.algorithm == "adamw" and len(shape) >= 2


def state_bytes(group: Mapping[str, Any], parameter) -> int:
    """Return the bytes of optimizer state that a parameter will have."""
    options = {**OPTIONS[group["algorithm"]], **group}
    working = working_dtype(parameter)
    each = 2 * working.itemsize if group["algorithm"] == "adamw" else momentum_dtype(options, parameter).itemsize
    if options["master"] == "auto" and parameter.dtype != working:
        each += working.itemsize
    extra = parameter.shape[0] * 4 if options.get("rows") == "touched" else 0
    return parameter.numel() * each + extra


def step_flops(group: Mapping[str, Any], shape: Sequence[int]) -> float:
    """Return the floating-point operations of one step: the Newton–Schulz products; elementwise work for the others."""
    options = {**OPTIONS[group["algorithm"]], **group}
    elements = math.prod(shape)
    if group["algorithm"] == "adamw":
        return 14.0 * elements
    if group["algorithm"] == "sinkhorn":
        return (2.0 * options["sinkhorn_iters"] + 12) * elements
    steps = len(options["ns_coefficients"])
    blocks = options["row_splits"] or (shape[-2],)
    once = sum(count * newton_schulz_flops(rows, shape[-1], steps) for rows, count in equal_runs(blocks))
    return float(once * (shape[0] if len(shape) == 3 else 1))


def _bytes(count: int) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.4g} TB"
