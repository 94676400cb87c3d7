"""What `convert released` did with every tensor, and how it is printed."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from .inventory import weight_of

_EXPERT = re.compile(r"(?<=\.experts\.)\d+(?=\.)")


@dataclass
class ReleasedReport:
    r"""Result of `to_released`.

    `kept` counts tensors whose bytes are those of `base` or of a source that is packed; `from_base` those of parts that
    the source lacks; `changed` are tensors stored as they were, unlike in `base`; `new` those that `base` lacks;
    `squares` has, for every tensor that was rounded, the squares of the error and of the values.
    """

    source: str
    base: str | None = None
    kept: int = 0
    from_base: Counter = field(default_factory=Counter)
    changed: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)
    squares: dict[str, tuple[float, float]] = field(default_factory=dict)
    not_quantised: list[str] = field(default_factory=list)
    config: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    def add_error(self, name: str, error: float, values: float) -> None:
        """Add the squares of one piece of a tensor."""
        before = self.squares.get(name, (0.0, 0.0))
        self.squares[name] = before[0] + error, before[1] + values

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

    def lines(self) -> Iterator[str]:
        """Yield the lines that are printed; the experts of a layer share one."""
        yield f"kept                {self.kept} tensors"
        for part, count in self.from_base.items():
            yield f"taken from base     {part}: {count} tensors that {self.source} lacks"
        yield from _listed("stored as trained", self.changed)
        errors = self.relative_errors()
        exact = [name for name, error in errors.items() if error == 0]
        if exact:
            yield f"rounded, no loss    {len(exact)} tensors"
        rounded: dict[str, list[float]] = defaultdict(list)
        for name, error in errors.items():
            if error:
                rounded[_EXPERT.sub("*", name)].append(error)
        for name, found in sorted(rounded.items()):
            about = f"{found[0]:.2e}" if len(found) == 1 else f"{max(found):.2e} at most in {len(found)} tensors"
            yield f"rounded             {name}: relative error {about}"
        yield from _listed("new", self.new)
        yield from (f"config.json         {change}" for change in self.config)
        yield from (f"left behind         {name}" for name in self.left)


def _listed(title: str, names: list[str]) -> Iterator[str]:
    for name, count in sorted(Counter(_EXPERT.sub("*", name) for name in names).items()):
        yield f"{title:<19} {name}" + (f": {count} tensors" if count > 1 else "")
