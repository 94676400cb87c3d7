"""`make demo`: make a small checkpoint, load it packed, continue three real passages, ask about two photographs, and
print what it costs.

    python -m examples.demo                 makes `.demo/v41` once (random weights, the real tokenizer, 86 MB)
    python -m examples.demo CKPT            the same with any V4.1 folder in the released layout

The passages are English, Chinese and code from files that Python and transformers install (`PASSAGES`), so nothing is
downloaded; the photographs are in `image_demo`. Sizes are read from the files and from /proc, never assumed.
"""

from __future__ import annotations

import argparse
import codecs
import re
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from math import lcm
from pathlib import Path

import torch
from transformers import AutoTokenizer
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from convert.info import ModelSizes, size_text
from convert.inventory import released_tensors
from convert.shards import INDEX_NAME
from convert.tiny import make_tiny
from examples.image_demo import ask_all, checkpoint_folder, picture_table, positive
from modeling_dsv4 import Dsv4Cache, Dsv41Config, Dsv41ForCausalLM
from modeling_dsv4.checkpoint_map import map_checkpoint

OWN_CHECKPOINT = Path(__file__).resolve().parents[1] / ".demo" / "v41"
PROMPT_TOKENS = 256  # longest prompt taken from a passage
NEW_TOKENS = 32


# ---- passages --------------------------------------------------------------------------------------------------------


def installed_text(module: str, *path: str) -> str:
    """Return the text of a module's source, or of a file beside it; `OSError` if it is not installed as a file."""
    try:
        spec = find_spec(module)
    except ModuleNotFoundError:
        spec = None
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        raise OSError(f"{module} is not installed as source")
    file = Path(spec.origin)
    return file.parent.joinpath(*path).read_text(encoding="utf-8") if path else file.read_text(encoding="utf-8")


def python_reference() -> str:
    """The chapter on types of the language reference that `help("TYPES")` shows."""
    try:
        return import_module("pydoc_data.topics").topics["types"][:4000]
    except (ImportError, KeyError, AttributeError) as error:
        raise OSError(f"pydoc_data.topics has no chapter on types ({error!r})") from error


def zen_of_python() -> str:
    """The poem that `import this` prints; the module stores it rotated by thirteen letters."""
    text = re.search(r'"""(.+?)"""', installed_text("this"), re.DOTALL)
    if text is None:
        raise OSError("the module `this` has changed")
    return codecs.decode(text[1], "rot13")


def cjk_codec_sample() -> str:
    """The sample text of CPython's codec tests; some distributions leave the package `test` out."""
    return chinese_part(installed_text("test", "cjkencodings", "gb18030-utf8.txt"))


def cpm_ant_sample() -> str:
    """The sample output in transformers' documentation of a Chinese model."""
    return chinese_part(installed_text("transformers", "models", "cpmant", "modeling_cpmant.py").replace("\\n", "\n"))


def chinese_part(text: str) -> str:
    """Return the lines of `text` that are mostly Chinese; `OSError` if there are none."""
    lines = [re.sub(r"^[^\u4e00-\u9fff\w]+|['\"\]]+$", "", line) for line in text.splitlines()]
    lines = [
        line for line in lines if 2 * len(re.findall(r"[\u3000-\u303f\u4e00-\u9fff\uff00-\uffef]", line)) > len(line)
    ]
    if not lines:
        raise OSError("no Chinese text")
    return "\n".join(lines)


def textwrap_source() -> str:
    return installed_text("textwrap")


def cache_source() -> str:
    return installed_text("transformers.cache_utils")


# For each language the places to look at, in this order.
PASSAGES: dict[str, tuple[Callable[[], str], ...]] = {
    "English": (python_reference, zen_of_python),
    "Chinese": (cjk_codec_sample, cpm_ant_sample),
    "code": (textwrap_source, cache_source),
}


def find_passage(language: str) -> tuple[str, str]:
    r"""Return the first passage of a language that is installed here, and the name of its source.

    Raises:
        OSError: if none is; names what was tried.
    """
    tried = []
    for source in PASSAGES[language]:
        try:
            return source(), source.__name__
        except OSError as error:
            tried.append(f"{source.__name__}: {error}")
    raise OSError(f"no {language} passage is installed ({'; '.join(tried)}).")


# ---- the checkpoint --------------------------------------------------------------------------------------------------


def own_checkpoint(folder: Path = OWN_CHECKPOINT) -> Path:
    """Return the demo's own checkpoint; made on the first call, made again if it is broken."""
    if folder.exists():
        try:
            expected = released_tensors(Dsv41Config.from_pretrained(folder))
            tensors, _ = map_checkpoint(sorted(map(str, folder.glob("*.safetensors"))))
            if set(tensors) == set(expected) and (folder / INDEX_NAME).is_file():
                return folder
        except (OSError, ValueError) as error:
            print(f"{folder} is broken ({error}); making it again", file=sys.stderr)
        shutil.rmtree(folder)
    return make_tiny(folder, tokenizer="real")


def given_or_own(path: str | None) -> Path:
    """Return the checkpoint of a command line, the demo's own if it names none; `OSError` if it is none."""
    return own_checkpoint() if path is None else checkpoint_folder(path)


def resident_bytes() -> dict[str, int] | None:
    """Return the anonymous and the file-backed resident bytes of this process; `None` where /proc does not tell."""
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
    except OSError:
        return None
    return {name: int(size) * 1024 for name, size in re.findall(r"^Rss(Anon|File):\s+(\d+) kB", status, re.MULTILINE)}


# ---- measuring -------------------------------------------------------------------------------------------------------


class Stopwatch(BaseStreamer):
    """Notes when the prompt and every new token arrive, and what the cache holds after the prompt."""

    def __init__(self, cache: Dsv4Cache):
        self.cache, self.times, self.after_prompt = cache, [], {}

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())
        if len(self.times) == 2:
            self.after_prompt = {"tokens": self.cache.get_seq_length(), **self.cache.nbytes()}

    def end(self) -> None:
        pass


@dataclass
class Continuation:
    """What one passage gave: text, speeds in tokens a second, and bytes of cache."""

    language: str
    source: str
    prompt_tokens: int
    prefill: float
    decode: float
    bytes_per_token: float
    fixed_bytes: int
    prompt_end: str
    text: str


def continue_passage(model, tokenizer, language: str, new_tokens: int = NEW_TOKENS) -> Continuation:
    r"""Continue the beginning of a passage greedily and measure it.

    Args:
        model (`Dsv41ForCausalLM`): packed.
        tokenizer: of the same folder.
        language (`str`): a key of `PASSAGES`.
        new_tokens (`int`, *optional*, defaults to 32).
    """
    passage, source = find_passage(language)
    ids = tokenizer(passage, add_special_tokens=False, return_tensors="pt").input_ids
    # Whole groups only, before and after: what is stored then grows by exactly the closed form.
    group = lcm(*(ratio for ratio in model.config.get_text_config().compress_ratios if ratio))
    length = min(PROMPT_TOKENS, ids.shape[1]) // group * group
    ids, new_tokens = ids[:, :length].to(model.device), -(-new_tokens // group) * group
    cache = Dsv4Cache(model.config, kv_format="packed")
    watch = Stopwatch(cache)
    # One token more: the last one is never fed back, so the cache holds `new_tokens` beyond the prompt.
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        cache=cache,
        streamer=watch,
        do_sample=False,
        min_new_tokens=new_tokens + 1,
        max_new_tokens=new_tokens + 1,
    )
    sizes, before = cache.nbytes(), watch.after_prompt
    grown = sum(sizes[part] - before[part] for part in ("compressed", "index"))
    return Continuation(
        language=language,
        source=source,
        prompt_tokens=length,
        prefill=length / (watch.times[1] - watch.times[0]),
        decode=new_tokens / (watch.times[-1] - watch.times[1]),
        bytes_per_token=grown / (cache.get_seq_length() - before["tokens"]),
        fixed_bytes=sizes["window"] + sizes["state"],
        prompt_end=tokenizer.decode(ids[0])[-40:],
        text=tokenizer.decode(output[0, length:]),
    )


def measure(folder: Path, *, new_tokens: int = NEW_TOKENS) -> tuple[dict[str, str], list[Continuation]]:
    r"""Load a checkpoint and continue the passages.

    Args:
        folder (`Path`): released layout.
        new_tokens (`int`, *optional*, defaults to 32): tokens made for every passage.

    Returns:
        what the whole folder costs, as `{label: text}`, and one `Continuation` for every passage.

    Raises:
        OSError, ValueError: if the folder is not such a checkpoint; names file and tensor.
    """
    checkpoint_folder(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    on_disk = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    before, start = resident_bytes(), time.perf_counter()
    model = Dsv41ForCausalLM.from_pretrained(folder, dtype="auto").eval()
    seconds, loaded = time.perf_counter() - start, resident_bytes()
    results = [continue_passage(model, tokenizer, language, new_tokens) for language in PASSAGES]
    used = resident_bytes()

    costs = {"weights on disk": size_text(on_disk), "load": f"{seconds:.2f} s"}
    for name, kind in (("Anon", "anonymous"), ("File", "file pages, evictable")):
        if before and loaded and used:
            grown = [size_text(now[name] - before[name]) for now in (loaded, used)]
            costs[f"resident, {kind}"] = f"{grown[0]} after loading, {grown[1]} after the passages"
    measured = " / ".join(sorted({f"{result.bytes_per_token:,.1f}" for result in results}))
    stored = float(ModelSizes(model.config).cache().per_token)
    costs["cache, growth a token"] = f"{measured} B measured, {stored:,.1f} B by the sizes in config.json"
    costs["cache, windows and state"] = size_text(max(result.fixed_bytes for result in results))
    return costs, results


def table(costs: dict[str, str], results: list[Continuation]) -> str:
    """Return both parts of `measure` as text."""
    lines = [f"{label:<34}{text}" for label, text in costs.items()]
    lines += ["", f"{'passage':<10}{'source':<20}{'prompt':>10}{'prefill':>15}{'decode':>15}"]
    lines += [
        f"{r.language:<10}{r.source:<20}{r.prompt_tokens:>6} tok{r.prefill:>9,.1f} tok/s{r.decode:>9,.1f} tok/s"
        for r in results
    ]
    lines += [f"\n{r.language}\n  …{r.prompt_end!r}\n  -> {r.text!r}" for r in results]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Run the demo; 0 when done, 1 when the folder is no released-layout checkpoint."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo", description=" ".join(__doc__.split("\n\n")[0].split())
    )
    parser.add_argument(
        "checkpoint", nargs="?", metavar="CKPT", help="V4.1 folder in the released layout (default: make one)"
    )
    parser.add_argument("--new-tokens", type=positive, default=NEW_TOKENS, metavar="N", help=f"default: {NEW_TOKENS}")
    arguments = parser.parse_args(argv)
    logging.disable_progress_bar()
    try:
        folder = given_or_own(arguments.checkpoint)
        print(f"{folder}\n")
        print(table(*measure(folder, new_tokens=arguments.new_tokens)))
        if Dsv41Config.from_pretrained(folder).vision_config is not None:
            print("\n" + picture_table(ask_all(folder, new_tokens=arguments.new_tokens)))
    except (OSError, ValueError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    if not arguments.checkpoint:
        print("\nThe weights of this checkpoint are random: the texts are noise, the costs are real.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
