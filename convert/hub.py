"""`convert hub`: a folder that transformers opens with `trust_remote_code=True`, without this package.

The weights stay the source's own files; beside them go the flat code with a complete `auto_map`, processor and chat
template, the Engram token map, generation options and a model card. Everything is read and decided before the first
file is written. `hub_layout` says how the released folder is kept inside.
"""

from __future__ import annotations

import filecmp
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm
from transformers.dynamic_module_utils import get_relative_import_files

from modeling_dsv4 import modeling_deepseek_v41
from modeling_dsv4.checkpoint_map import read_json
from modeling_dsv4.decoder_replay import check_replay
from modeling_dsv4.generation_dsv4 import OPTIONS
from modeling_dsv4.ngram_hash import Dsv4NgramHash, token_map_digest
from modeling_dsv4.token_map import STORED_MAP, read_token_map, token_map_text
from processing_dsv4 import processing_deepseek_v41
from processing_dsv4.processing_deepseek_v41 import Dsv41Processor

from .atomic_folder import new_folder
from .checkpoint_folder import CONFIG_NAME, CheckpointFolder
from .hub_layout import MANIFEST, ORIGINALS, folder_files, is_hub_folder
from .model_card import MODEL_CARD, model_card

# Every door of transformers to the classes of a family, as `module.Class` of the flat code.
AUTO_MAPS = {
    "deepseek_v41": {
        "AutoConfig": "configuration_deepseek_v41.Dsv41Config",
        "AutoModel": "modeling_deepseek_v41.Dsv41Model",
        "AutoModelForCausalLM": "modeling_deepseek_v41.Dsv41ForCausalLM",
        "AutoModelForImageTextToText": "modeling_deepseek_v41.Dsv41ForConditionalGeneration",
        "AutoModelForMultimodalLM": "modeling_deepseek_v41.Dsv41ForConditionalGeneration",
    },
    "deepseek_v4": {
        "AutoConfig": "configuration_deepseek_v4.Dsv4Config",
        "AutoModel": "modeling_deepseek_v4.Dsv4Model",
        "AutoModelForCausalLM": "modeling_deepseek_v4.Dsv4ForCausalLM",
    },
}
PROCESSOR_MODULES = ("processing_deepseek_v41", "image_processing_deepseek_v41")
CODE_FOLDERS = tuple(Path(module.__file__).parent for module in (modeling_deepseek_v41, processing_deepseek_v41))

GENERATION_CONFIG, TOKENIZER, TOKENIZER_CONFIG = "generation_config.json", "tokenizer.json", "tokenizer_config.json"
PROCESSOR_CONFIG, CHAT_TEMPLATE = "processor_config.json", "chat_template.jinja"
# What the processor reads of a folder.
PROCESSOR_FILES = (
    CONFIG_NAME,
    TOKENIZER,
    TOKENIZER_CONFIG,
    PROCESSOR_CONFIG,
    "preprocessor_config.json",
    CHAT_TEMPLATE,
)
WEIGHTS = ".safetensors"
# Optimizer states and weights of old kinds: they can run code when they are opened, so they are not published.
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")

Plan = dict[str, bytes | Path]


@dataclass
class HubResult:
    """What `make_hub_folder` did: `weights` is "hard links", "symbolic links", "copies" or "unchanged"."""

    folder: Path
    weights: str
    left_out: list[str]


def make_hub_folder(
    src: str | os.PathLike,
    dst: str | os.PathLike,
    *,
    copy: bool = False,
    decoder_replay: str | None = None,
    progress: bool = True,
) -> HubResult:
    r"""Make a Hub folder of a checkpoint.

    Args:
        src (`str` or path): folder in the released layout, saved by `save_pretrained`, or a Hub folder; with tokenizer.
        dst (`str` or path): folder to make; new, empty, or the result of the same call, which is left as it is.
        copy (`bool`, *optional*, defaults to `False`): copy the weights. Otherwise they are hard links to the source's
            files, or, where the disk cannot have those, symbolic links.
        decoder_replay (`str`, *optional*): written into generation_config.json; by default what the source says, or
            "exact".
        progress (`bool`, *optional*, defaults to `True`): show a bar while weights are copied.

    Returns:
        `HubResult`.

    Raises:
        ValueError, OSError: if the source is damaged, incomplete or of another model, or the target is taken; before
            anything is written.
    """
    if decoder_replay is not None:
        check_replay(decoder_replay)
    src, dst = Path(src), Path(os.path.abspath(dst))
    if src.resolve() in (dst.resolve(), *dst.resolve().parents):
        raise ValueError(f"DST is {dst}, in the source {src}; accepted: a folder outside it.")
    plan, left_out = plan_hub_folder(src, decoder_replay=decoder_replay)
    if is_hub_folder(dst):
        changed = differences(plan, dst)
        if changed:
            raise OSError(
                f"{dst} exists and differs from what would be written in {len(changed)} files ({', '.join(changed[:5])}); "
                "accepted: a new name, an empty folder, or the result of the same command."
            )
        return HubResult(dst, "unchanged", left_out)
    return HubResult(dst, _write(plan, dst, copy, progress and copy), left_out)


def plan_hub_folder(src: Path, *, decoder_replay: str | None = None) -> tuple[Plan, list[str]]:
    r"""Return every file of the Hub folder of a checkpoint, as content or as the file it is taken from, and what is left out.

    Args:
        src (`Path`), decoder_replay: see `make_hub_folder`.

    Raises:
        ValueError, OSError: see `make_hub_folder`.
    """
    checkpoint = CheckpointFolder(src)
    files = checkpoint.files
    if any(name.startswith(f"{ORIGINALS}/") for name in files):
        raise OSError(
            f"{src} has a folder {ORIGINALS}/ of its own; accepted: a folder without, or made by this command."
        )
    for name in (TOKENIZER, TOKENIZER_CONFIG):
        if name not in files:
            raise OSError(f"{src} has no {name}; accepted: a checkpoint with the tokenizer's files beside it.")
    if decoder_replay is None and is_hub_folder(src):
        decoder_replay = read_json(src / GENERATION_CONFIG).get("decoder_replay")
    written = _written_files(checkpoint, decoder_replay)
    left_out = [name for name in files if name.endswith(PICKLES)]
    kept = {name: file for name, file in files.items() if name not in left_out}
    kept = {f"{ORIGINALS}/{name}" if name in written else name: file for name, file in kept.items()}
    manifest = {MANIFEST: _json({"written": sorted(written)})}
    return dict(sorted((kept | written | manifest).items())), left_out


def _written_files(checkpoint: CheckpointFolder, decoder_replay: str | None) -> dict[str, bytes]:
    """What the command adds or changes."""
    files, family = checkpoint.files, checkpoint.config.model_type
    written = {file.name: file.read_bytes() for file in code_files(family)}
    config = checkpoint.config_dict | {"auto_map": AUTO_MAPS[family]}
    if checkpoint.config.get_text_config().needs_token_map:
        token_map = _token_map(checkpoint)
        digest = {"engram_token_map_sha256": token_map_digest(token_map)}
        config["text_config"] = (config.get("text_config") or {}) | digest
        written[STORED_MAP] = token_map_text(token_map).encode()
    written[CONFIG_NAME] = _json(config)
    processor = _processor(files)
    written[GENERATION_CONFIG] = _json(_generation_options(checkpoint, processor.tokenizer, decoder_replay))
    written[TOKENIZER_CONFIG] = _json(read_json(files[TOKENIZER_CONFIG]) | _chat_settings(processor.tokenizer))
    written[PROCESSOR_CONFIG] = processor.to_json_string().encode()
    written[CHAT_TEMPLATE] = processor.chat_template.encode()
    written[MODEL_CARD] = model_card(checkpoint).encode()
    return written


def code_files(family: str) -> list[Path]:
    """Return the flat files that the classes of a family and its processor need, found by transformers' own scanner."""
    modules = {reference.split(".")[0] for reference in AUTO_MAPS[family].values()} | set(PROCESSOR_MODULES)
    files = set()
    for folder in CODE_FOLDERS:
        for entry in (folder / f"{module}.py" for module in modules):
            if entry.is_file():
                files |= {entry, *map(Path, get_relative_import_files(entry))}
    return sorted(files)


def differences(plan: Plan, folder: Path) -> list[str]:
    """Return the names of files in which a folder is not as planned; of weights only sizes and beginnings are compared."""
    present = folder_files(folder)
    changed = [name for name, content in plan.items() if name in present and not _is_same(content, present[name])]
    return sorted(present.keys() ^ plan.keys()) + changed


def _is_same(content: bytes | Path, file: Path) -> bool:
    if isinstance(content, bytes):
        return file.stat().st_size == len(content) and file.read_bytes() == content
    if not content.name.endswith(WEIGHTS):
        return filecmp.cmp(content, file, shallow=False)
    if content.samefile(file):
        return True
    with open(content, "rb") as one, open(file, "rb") as other:
        return content.stat().st_size == file.stat().st_size and one.read(2**20) == other.read(2**20)


def _write(plan: Plan, dst: Path, copy: bool, progress: bool) -> str:
    """Make the folder; returns what the weights became."""
    sizes = {name: len(file) if isinstance(file, bytes) else file.stat().st_size for name, file in plan.items()}
    needed = sum(size for name, size in sizes.items() if copy or not name.endswith(WEIGHTS))
    kinds = set()
    with (
        new_folder(dst, needed_bytes=needed) as folder,
        tqdm(total=sum(sizes.values()), unit="B", unit_scale=True, desc=str(dst), disable=not progress) as bar,
    ):
        for name, content in plan.items():
            kinds.add(_place(content, folder / name, link=name.endswith(WEIGHTS) and not copy))
            bar.update(sizes[name])
    return next((kind for kind in ("symbolic links", "hard links") if kind in kinds), "copies")


def _place(content: bytes | Path, file: Path, *, link: bool) -> str:
    """Write, link or copy one file; returns what weights became."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif not link:
        shutil.copyfile(content, file)
    else:
        source = content.resolve()  # a Hub cache has links to its blobs
        try:
            os.link(source, file)
            return "hard links"
        except OSError:  # another disk, or one without hard links
            os.symlink(source, file)
            return "symbolic links"
    return "copies"


def _processor(files: dict[str, Path]) -> Dsv41Processor:
    """Open the processor of the released files."""
    with tempfile.TemporaryDirectory() as folder:
        for name in PROCESSOR_FILES:
            if name in files:
                if name.endswith("_config.json"):
                    read_json(files[name])  # what transformers says of a broken one does not name it
                shutil.copyfile(files[name], Path(folder) / name)
        return Dsv41Processor.from_pretrained(folder)


def _token_map(checkpoint: CheckpointFolder):
    """The Engram token map, checked against the configuration."""
    stored = checkpoint.path / STORED_MAP
    file = stored if stored.is_file() else checkpoint.files[TOKENIZER]
    token_map = read_token_map(file)
    try:
        Dsv4NgramHash(checkpoint.config.get_text_config()).set_token_map(token_map)
    except ValueError as error:
        raise ValueError(f"{file} does not fit {checkpoint.path}: {error}") from error
    return token_map


def _generation_options(checkpoint: CheckpointFolder, tokenizer, decoder_replay: str | None) -> dict:
    """Content of generation_config.json: the source's, special tokens, and the options of these models."""
    options = read_json(checkpoint.files[GENERATION_CONFIG]) if GENERATION_CONFIG in checkpoint.files else {}
    options.pop("_from_model_config", None)  # a file so marked loses the keys below when it is read
    ids = {"bos_token_id": checkpoint.config.bos_token_id, "eos_token_id": checkpoint.config.eos_token_id}
    ids["pad_token_id"] = tokenizer.pad_token_id
    options = {name: value for name, value in ids.items() if value is not None} | OPTIONS | options
    return options if decoder_replay is None else options | {"decoder_replay": decoder_replay}


def _chat_settings(tokenizer) -> dict:
    """What the processor changed on the tokenizer, so that AutoTokenizer alone has it too."""
    return {
        "pad_token": tokenizer.pad_token,
        "padding_side": tokenizer.padding_side,
        "chat_control_tokens": tokenizer.chat_control_tokens,
        "response_template": tokenizer.response_template,
    }


def _json(content: dict) -> bytes:
    return (json.dumps(content, ensure_ascii=False, indent=2) + "\n").encode()
