"""What a model does inside, for one text: entries that layers select, experts that tokens are routed to, n-gram rows.

python -m examples.inspect_model                       the demo's own checkpoint, a text of its own
python -m examples.inspect_model CKPT --text "..."     any V4.1 folder in the released layout
python -m examples.inspect_model --plot inside.png     the same as pictures (needs matplotlib)
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoTokenizer
from transformers.utils import logging

from examples.demo import given_or_own
from modeling_dsv4 import Dsv41ForCausalLM

TEXT = (
    "The river runs past the old mill. The miller reads while the river runs, and when the river runs dry, the miller "
    "runs past the old mill to the river."
)


@dataclass
class Inside:
    r"""What one text of S tokens did in a model.

    Args:
        tokens (`list[str]`): the text of every token.
        ratios (`dict[int, int]`): tokens that one entry of a selecting layer stands for.
        selections (`dict[int, torch.Tensor]`): `[S, k]` int64 entries that a layer selected for each token, -1 = none.
        experts (`torch.Tensor` of shape `[layers, S, k]`, int64): routed experts, the likeliest first.
        num_experts (`int`): of a layer.
        rows (`dict[int, torch.Tensor]`): `[S, lookups]` int64 rows of the n-gram table of every Engram layer: for each size
            of n-gram one for every head, sizes in turn.
        heads (`int`): lookups for one size of n-gram.
    """

    tokens: list[str]
    ratios: dict[int, int]
    selections: dict[int, torch.Tensor]
    experts: torch.Tensor
    num_experts: int
    rows: dict[int, torch.Tensor]
    heads: int

    def repeats(self, layer: int) -> torch.Tensor:
        """Which lookups `[S, lookups]` read a row that an earlier token of the text has read."""
        rows = self.rows[layer]
        same = rows[:, None] == rows[None]  # [S, S, lookups]
        return (same & torch.ones(len(rows), len(rows), dtype=torch.bool).tril(-1)[..., None]).any(1)

    def loads(self) -> torch.Tensor:
        """Share `[layers, E]` of the tokens that each expert serves."""
        counts = [torch.bincount(layer.flatten(), minlength=self.num_experts) for layer in self.experts]
        return torch.stack(counts) / self.experts.shape[1]


@torch.no_grad()
def look(model: Dsv41ForCausalLM, tokenizer, text: str) -> Inside:
    r"""Run a text and return what happened.

    Raises:
        ValueError: if the text has no token.
    """
    ids = tokenizer(text, return_tensors="pt").input_ids
    if not ids.numel():
        raise ValueError("text is empty; accepted: at least one token.")
    config, routed, hashed = model.config.text_config, [], {}
    # The routers' output is (logits, weights, experts); the hash gives the rows of all Engram layers at once.
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda *call: routed.append(call[2][2])) for layer in model.model.layers
    ]
    if config.engram_layer_ids:
        hooks.append(model.model.ngram_hash.register_forward_hook(lambda *call: hashed.update(call[2])))
    try:
        out = model(ids.to(model.device), use_cache=False, output_selections=True)
    finally:
        for hook in hooks:
            hook.remove()
    return Inside(
        tokens=[tokenizer.decode([token]) for token in ids[0]],
        ratios={layer: config.ratio(layer) for layer in out.selections},
        selections={layer: chosen[0].cpu() for layer, chosen in out.selections.items()},
        experts=torch.stack([chosen.cpu() for chosen in routed]),
        num_experts=config.n_routed_experts,
        rows={layer: rows[0].cpu() for layer, rows in hashed.items()},
        heads=config.engram_n_heads,
    )


def report(inside: Inside) -> str:
    """Return the last token's selections, the most and least loaded experts, and the n-grams that came again, as text."""
    last = len(inside.tokens) - 1
    lines = [
        f"{len(inside.tokens)} tokens; the last one is {inside.tokens[last]!r}",
        "",
        "entries it reads, as tokens:",
    ]
    for layer, chosen in inside.selections.items():
        ratio = inside.ratios[layer]
        entries = [entry for entry in chosen[last].tolist() if entry >= 0]
        texts = ["".join(inside.tokens[entry * ratio : (entry + 1) * ratio]) for entry in entries]
        lines.append(
            f"  layer {layer:>2}  "
            + "  ".join(f"{entry}:{text!r}" for entry, text in zip(entries, texts, strict=True))
        )
    lines += ["", f"experts, by share of the tokens (even: {inside.experts.shape[2] / inside.num_experts:.2f}):"]
    for layer, loads in enumerate(inside.loads()):
        most, least = int(loads.argmax()), int(loads.argmin())
        lines.append(f"  layer {layer:>2}  most {most}: {loads[most]:.2f}   least {least}: {loads[least]:.2f}")
    for layer in inside.rows:
        again = inside.repeats(layer)
        lines += ["", f"n-gram rows of layer {layer} that an earlier token has read:"]
        for place in range(again.shape[1] // inside.heads):
            size = place + 2
            whole = again[:, place * inside.heads : (place + 1) * inside.heads].all(1)
            found = [
                "".join(inside.tokens[max(end - size + 1, 0) : end + 1]) for end in whole.nonzero()[:, 0].tolist()
            ]
            lines.append(f"  {size}-grams  {len(found)} of {len(whole)}: " + "  ".join(map(repr, found[:8])))
    return "\n".join(lines)


def draw(inside: Inside, file: Path) -> None:
    r"""Draw a panel for every selecting layer, one for the experts and one for every n-gram table into a PNG file.

    Raises:
        OSError: if matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise OSError(f"{file} is matplotlib's to draw; pip install matplotlib ({error})") from error
    length = len(inside.tokens)
    panels = []
    for layer, chosen in inside.selections.items():
        grid = torch.zeros(length, length // inside.ratios[layer] + 1)
        grid[torch.arange(length)[:, None].expand_as(chosen)[chosen >= 0], chosen[chosen >= 0]] = 1
        panels.append((f"layer {layer}: entries of {inside.ratios[layer]}", "entry", "token", grid))
    panels.append(("experts: share of the tokens", "expert", "layer", inside.loads()))
    panels += [
        (f"layer {layer}: n-gram rows read before", "lookup", "token", inside.repeats(layer).float())
        for layer in inside.rows
    ]
    columns = 3
    figure = Figure(figsize=(5 * columns, 4 * -(-len(panels) // columns)), layout="constrained")
    FigureCanvasAgg(figure)
    places = list(figure.subplots(-(-len(panels) // columns), columns, squeeze=False).flat)
    for axes, (title, across, down, grid) in zip(places, panels, strict=False):
        axes.imshow(grid, aspect="auto", interpolation="nearest")
        axes.set(title=title, xlabel=across, ylabel=down)
    for axes in places[len(panels) :]:
        axes.remove()
    figure.savefig(file)


def main(argv: list[str] | None = None) -> int:
    """Run it; 0 when done, 1 when the folder is no checkpoint or matplotlib is missing for a plot."""
    parser = argparse.ArgumentParser(prog="python -m examples.inspect_model", description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", nargs="?", metavar="CKPT", help="V4.1 folder (default: the demo's own)")
    parser.add_argument("--text", default=TEXT)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="PNG file to draw")
    arguments = parser.parse_args(argv)
    logging.disable_progress_bar()
    try:
        folder = given_or_own(arguments.checkpoint)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        inside = look(Dsv41ForCausalLM.from_pretrained(folder, dtype="auto").eval(), tokenizer, arguments.text)
        print(report(inside))
        if arguments.plot:
            draw(inside, arguments.plot)
    except (OSError, ValueError) as error:
        print(f"inspect_model: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
