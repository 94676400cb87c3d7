"""`convert info`: what a checkpoint weighs, what a token activates, and on what it runs; from config.json alone.

Every number is derived from the configuration through the tensor inventory and the cache's own formats.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import prod
from pathlib import Path

import torch

from modeling_dsv4.cache import cache_codecs
from modeling_dsv4.configuration_deepseek_v4 import Dsv4Config
from modeling_dsv4.configuration_deepseek_v41 import Dsv41Config
from modeling_dsv4.kernel_seam import AUTO
from modeling_dsv4.weight_names import OPTIONAL_PARTS

from .checkpoint_folder import CONFIG_NAME, read_config
from .hub_layout import released_files
from .inventory import is_scale, released_tensors

# What the window of the cache keeps beside the tokens that are attended (`Dsv4Cache(rollback=)`).
ROLLBACK = 16
# Share of an accelerator left to activations and the cache.
WORKING_SHARE = 0.1


@dataclass(frozen=True)
class Row:
    """One stored tensor: what it belongs to, its bytes and its parameters (0 for scales and routing tables)."""

    name: str
    group: str
    bytes: int
    parameters: int


def _group(name: str, text) -> str:
    words = name.split(".")
    if OPTIONAL_PARTS["drafts"].search(name):
        return "drafts"
    if OPTIONAL_PARTS["vision"].search(name):
        return "vision"
    if words[0] != "layers":
        return "embedding" if words[0] == "embed" else "head"
    if words[2] == "engram":
        return "Engram tables" if words[3] == "embed" else "Engram"
    cut = getattr(text, "replay_cut", None)
    half = "layers" if cut is None else "encoder" if int(words[1]) < cut else "decoder"
    return f"{half}, routed experts" if ".experts." in name else half


@dataclass(frozen=True)
class Activated:
    """Parameters that one token passes: in prefill, where no logits are made, and in decode."""

    prefill: int
    decode: int


def _in_prefill(name: str, cut: int) -> bool:
    _, layer, *words = name.split(".")
    if int(layer) != cut:
        return int(layer) < cut
    pooled = words[:2] == ["attn", "compressor"] or words[:3] in (
        ["attn", "indexer", "wk"],
        ["attn", "indexer", "k_norm"],
    )
    return pooled or words[:2] in (["attn", "wkv"], ["attn", "kv_norm"])


@dataclass(frozen=True)
class CacheSize:
    """Bytes of a packed cache for one row: per token of its length, and fixed for the windows."""

    per_token: Fraction
    windows: int


@dataclass(frozen=True)
class Machine:
    """Memory that a model may use: bytes of RAM, and of each accelerator."""

    ram: int
    accelerators: tuple[int, ...] = ()

    @classmethod
    def this(cls) -> Machine:
        """Return the memory of this machine."""
        ram = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        count = torch.cuda.device_count()
        return cls(ram, tuple(torch.cuda.get_device_properties(i).total_memory for i in range(count)))


@dataclass(frozen=True)
class Residency:
    """Where the bytes of a packed model lie on a machine, and the device map that puts them there."""

    file_pages: int
    accelerator: int
    device_map: str
    comment: str


class ModelSizes:
    """Sizes that follow from a configuration (`Dsv41Config` or `Dsv4Config`)."""

    def __init__(self, config: Dsv41Config | Dsv4Config):
        self.config, self.text = config, config.get_text_config()

    @cached_property
    def rows(self) -> list[Row]:
        r"""Every tensor of the checkpoint with its group.

        Groups: "embedding", "head", "encoder" and "decoder" (V4: "layers"), the routed experts of each, "Engram tables",
        "Engram", "drafts", "vision".
        """
        found = []
        for name, (shape, dtype) in released_tensors(self.config).items():
            count = prod(shape)
            is_parameter = not is_scale(name) and dtype.is_floating_point or dtype == torch.int8
            parameters = count * (2 if dtype == torch.int8 else 1) if is_parameter else 0
            found.append(Row(name, _group(name, self.text), count * dtype.itemsize, parameters))
        return found

    def activated(self) -> Activated:
        r"""Return how many parameters a token of text activates; the embedding is looked up, not counted.

        Of the routed experts `num_experts_per_tok` count, of the Engram tables the rows that are gathered. V4.1 prefills
        with the layers before the cut and what the layer at the cut needs for the entries and the window that it keeps
        (V4.1 report section 2.2); V4 with all layers.
        """
        text = self.text
        cut = getattr(text, "replay_cut", None)
        prefill = decode = Fraction(0)
        for row in self.rows:
            if row.group in ("drafts", "vision", "embedding"):
                continue
            count = Fraction(row.parameters)
            if row.group.endswith("routed experts"):
                count *= Fraction(text.num_experts_per_tok, text.n_routed_experts)
            elif row.group == "Engram tables" and count:
                count = Fraction((text.engram_max_ngram_size - 1) * text.engram_n_heads * text.engram_head_dim)
            decode += count
            if row.group != "head" and (cut is None or _in_prefill(row.name, cut)):
                prefill += count
        return Activated(int(prefill), int(decode))

    def cache(self) -> CacheSize:
        """Return the bytes of a packed cache, by its own codecs (open groups and the last token ids not counted)."""
        text = self.text
        codecs = cache_codecs(text, "packed")
        sample = {"window": text.head_dim, "compressed": text.head_dim, "index": text.index_head_dim}
        dtype = text.dtype if isinstance(text.dtype, torch.dtype) else torch.bfloat16
        size = {
            kind: sum(part.nbytes for part in codecs[kind].encode(torch.zeros(1, 1, width, dtype=dtype)))
            for kind, width in sample.items()
        }
        per_token = Fraction(0)
        for layer in range(text.num_hidden_layers):
            if text.mode(layer) == "full":
                entry = size["compressed"] + (size["index"] if text.selects(layer) else 0)
                per_token += Fraction(entry, text.ratio(layer))
        return CacheSize(per_token, text.num_hidden_layers * (text.sliding_window - 1 + ROLLBACK) * size["window"])

    def residency(self, machine: Machine) -> Residency:
        r"""Return what is resident when a packed model is loaded without drafts.

        Experts and Engram tables are used from the mapped file, and so is the rest on a CPU; an accelerator gets a copy
        of the rest. File pages can be dropped and read again, so RAM may be smaller.
        """
        text = self.text
        size, layers = Counter(), Counter()
        for row in self.rows:
            kind = "experts" if row.group.endswith("routed experts") else row.group
            size[kind] += row.bytes
            if kind == "experts":
                layers[int(row.name.split(".")[1])] += row.bytes
        dense = sum(count for kind, count in size.items() if kind not in ("experts", "Engram tables", "drafts"))
        host = size["experts"] + size["Engram tables"]
        budget = [int(count * (1 - WORKING_SHARE)) for count in machine.accelerators]
        if dense > sum(budget):
            pages = dense + host
            why = (
                f"the dense part, {size_text(dense)}, does not fit on {len(budget)} accelerators"
                if budget
                else "no accelerator"
            )
            return Residency(pages, 0, 'None (device_map="cpu")', f"{why}; {_pages(pages, machine.ram)}")
        free, followers = sum(budget) - dense, 0
        while followers < text.num_hidden_layers and sum(layers[i] for i in range(followers + 1)) <= free:
            followers += 1
        device_map = '"auto"' if dense > budget[0] else '{"": 0}'
        comment = (
            f"the experts of {followers} of {text.num_hidden_layers} layers would fit there, too, if the map names them "
            '("...layers.0.mlp.experts")'
        )
        return Residency(host, dense, device_map, f"{comment}; {_pages(host, machine.ram)}")


def _pages(pages: int, ram: int) -> str:
    if pages <= ram:
        return f"all file pages fit in {size_text(ram)} of RAM"
    return (
        f"{size_text(ram)} of RAM hold {ram / pages:.0%} of the file pages, the rest is read from disk when routed to"
    )


def kernels_state() -> str:
    """Return one line on the optional kernels of this machine."""
    if not torch.cuda.is_available():
        return "off; without a CUDA device the reference maths runs"
    module = AUTO.load()
    if module is None:
        return "none found; the reference maths runs"
    return f"{len(module.__all__)} from {module.__name__}, version {module.VERSION}"


def describe(path: str | os.PathLike, machine: Machine | None = None) -> Iterator[str]:
    r"""Yield the lines of `convert info`.

    Args:
        path (`str` or path): a checkpoint folder, or one that holds only config.json, or that file itself.
        machine (`Machine`, *optional*): defaults to this one.

    Raises:
        OSError, ValueError: if there is no config.json, or it is not accepted.
    """
    path = Path(path)
    files = {CONFIG_NAME: path} if path.is_file() else released_files(path)
    _, config = read_config(path, files)
    stored = sum(file.stat().st_size for name, file in files.items() if name.endswith(".safetensors"))
    bytes_of, parameters_of = Counter(), Counter()
    sizes = ModelSizes(config)
    for row in sizes.rows:
        bytes_of[row.group] += row.bytes
        parameters_of[row.group] += row.parameters
    yield f"{path}: {config.model_type}, {config.get_text_config().num_hidden_layers} layers, " + (
        f"{size_text(stored)} of weight files" if stored else "no weights beside config.json"
    )
    yield f"{'':<26}{'parameters':>14}{'packed':>12}"
    for group, count in parameters_of.items():
        yield f"  {group:<24}{count_text(count):>14}{size_text(bytes_of[group]):>12}"
    yield f"  {'all':<24}{count_text(sum(parameters_of.values())):>14}{size_text(sum(bytes_of.values())):>12}"
    active, cache = sizes.activated(), sizes.cache()
    yield f"activated per token: {count_text(active.prefill)} in prefill, {count_text(active.decode)} in decode"
    yield f"cache: {float(cache.per_token):.6g} bytes a token and row, {size_text(cache.windows)} of windows"
    where = sizes.residency(machine or Machine.this())
    yield f"resident, packed: {size_text(where.file_pages)} file pages (evictable), {size_text(where.accelerator)} accelerator"
    yield "                  anonymous: the cache, and what is unpacked while computing"
    yield f"device_map: {where.device_map}; {where.comment}"
    yield f"kernels: {kernels_state()}"


def count_text(parameters: int) -> str:
    """Return a number of parameters in words."""
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e7 else f"{parameters / 1e6:.3f} M"


def size_text(count: int) -> str:
    """Return a number of bytes, which may be negative, in words."""
    for unit, factor in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if abs(count) >= factor:
            return f"{count / factor:.2f} {unit}"
    return f"{count} B"
