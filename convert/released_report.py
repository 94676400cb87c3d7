"""What `convert released` did with every tensor, and how it is printed."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median

import torch

from .inventory import weight_of

# Formats of written tensors, and the relative error (root of squares) with which they round Gaussian weights of any
# spread. A float of p significant bits: 0.425 * 2**-p, which power-of-two scales leave as it is (E4M3: p = 4). E2M1 has
# p = 2, but so few exponents that the small weights of a block of 32 lose more; heavy tails make it 0.14.
FORMATS = {
    torch.int8: ("FP4", 0.12),
    torch.float8_e4m3fn: ("FP8", 0.027),
    torch.bfloat16: ("BF16", 0.0017),
    torch.float16: ("F16", 0.00021),
    torch.float32: ("F32", 2.5e-8),
}


@dataclass
class ReleasedReport:
    r"""Result of `to_released`.

    `kept` counts tensors whose bytes are those of `base` or of a source that is packed; `from_base` those of parts that
    the source lacks; `changed` are tensors stored as they were, unlike in `base`; `new` those that `base` lacks;
    `squares` has, for every tensor that was rounded, the squares of the error and of the values, `dtypes` what it was
    rounded to.
    """

    source: str
    base: str | None = None
    kept: int = 0
    from_base: Counter = field(default_factory=Counter)
    changed: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)
    squares: dict[str, tuple[float, float]] = field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    not_quantised: list[str] = field(default_factory=list)
    config: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    def add_error(self, name: str, dtype: torch.dtype, error: float, values: float) -> None:
        """Add the squares of one piece of a tensor that is rounded to `dtype`."""
        before = self.squares.get(name, (0.0, 0.0))
        self.squares[name] = before[0] + error, before[1] + values
        self.dtypes[name] = dtype

    def relative_errors(self) -> dict[str, float]:
        """Return |written - source| / |source| of every tensor that was rounded."""
        return {n: (error / values) ** 0.5 if values else 0.0 for n, (error, values) in self.squares.items()}

    def count(self, origins: dict, source, base) -> None:
        """Note where the bytes of the tensors of a shard came from: `{name: folder, or None for rounded ones}`."""
        for name, origin in origins.items():
            if base is not None and name not in base.places:
                self.new.append(name)
            elif origin is not None and weight_of(name) not in source.places:
                self.from_base[name.split(".")[0]] += 1
            elif origin is not None and origin is (base or source):
                self.kept += 1
            elif origin is not None:
                self.changed.append(name)

    def to_dict(self) -> dict:
        """Return the form of `--json`: every tensor that was rounded has its format and relative error."""
        errors = self.relative_errors()
        return {
            "source": self.source,
            "base": self.base,
            "kept": self.kept,
            "from_base": dict(self.from_base),
            "changed": self.changed,
            "new": self.new,
            "rounded": {
                name: {"format": FORMATS[self.dtypes[name]][0], "relative_error": error}
                for name, error in errors.items()
            },
            "not_quantised": self.not_quantised,
            "config": self.config,
            "left": self.left,
        }

    def lines(self) -> Iterator[str]:
        """Yield the lines that are printed: one for everything of a kind."""
        yield f"kept                {_tensors(self.kept)}, byte for byte"
        for part, count in self.from_base.items():
            yield f"taken from base     {part}: {_tensors(count)} that {self.source} lacks"
        if self.changed:
            yield f"stored as trained   {_tensors(len(self.changed))}"
        yield from self._rounded()
        if self.new:
            yield f"new                 {_tensors(len(self.new))}"
        yield from (f"config.json         {change}" for change in self.config)
        if self.left:
            yield f"left behind         {len(self.left)} files that are no part of the layout: {', '.join(self.left)}"

    def _rounded(self) -> Iterator[str]:
        errors = self.relative_errors()
        found: dict[torch.dtype, dict[str, float]] = defaultdict(dict)
        for name, error in errors.items():
            if error:
                found[self.dtypes[name]][name] = error
        exact = len(errors) - sum(map(len, found.values()))
        if exact:
            yield f"rounded, no loss    {_tensors(exact)}"
        for dtype, (title, normal) in FORMATS.items():
            if dtype in found:
                worst = max(found[dtype], key=found[dtype].get)
                typical, most = median(found[dtype].values()), found[dtype][worst]
                count = _tensors(len(found[dtype]))
                yield (
                    f"rounded to {title:<8} {count}: relative error {typical:.3g} (median), {most:.3g} at most, in {worst}; "
                    f"normal for {title}: {normal:.2g}"
                )
        if found:
            yield "                    (|written - source| / |source|; normal: of Gaussian weights. Every tensor: --json)"


def _tensors(count: int) -> str:
    return f"{count} tensor" + "s" * (count != 1)
