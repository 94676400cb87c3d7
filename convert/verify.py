"""`convert verify`: is a checkpoint folder what its config.json says?

Everything is derived from the configuration and compared with the files: index, headers, names, shapes, dtypes, then
every value that can be wrong (scales, NaN, routing tables) in pieces, and the constants of the n-gram hash. All problems
are collected; a stage that cannot run because of an earlier one is left out.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from tqdm import tqdm

from modeling_dsv4.checkpoint_map import TensorEntry, read_json
from modeling_dsv4.fp_codecs import as_bytes
from modeling_dsv4.ngram_hash import engram_multipliers, engram_primes, token_map_digest
from modeling_dsv4.quantization import PACKED_DTYPES, WIDE_NAMES
from modeling_dsv4.token_map import STORED_MAP, TOKEN_MAP_FILES, read_token_map

from .checkpoint_folder import CONFIG_NAME, Place, read_config, read_tensors, released_places
from .hub_layout import ORIGINALS, is_hub_folder, released_files, written_by_hub
from .inventory import RELEASED_NAMES, released_tensors
from .shards import INDEX_NAME

CHECKS = ("config", "files", "names", "shapes and dtypes", "values", "hash constants", "hub files")
# Key of config.json with the digest of the Engram token map.
DIGEST = "engram_token_map_sha256"
# Elements looked at together: bounds the memory, whatever the size of a tensor.
PIECE = 1 << 22
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
E4M3_NAN, E8M0_NAN = 0x7F, 0xFF


@dataclass
class Problem:
    """What is wrong: the check that found it, a sentence, and the tensor and file where one is to blame."""

    check: str
    message: str
    tensor: str | None = None
    file: str | None = None


@dataclass
class VerifyReport:
    """Result of `verify`: what was looked at, which checks ran, and every problem."""

    folder: str
    family: str | None = None
    form: str | None = None
    tensors: int = 0
    bytes: int = 0
    checked: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def add(self, check: str, message: str, entry: TensorEntry | None = None, tensor: str | None = None) -> None:
        """Note a problem."""
        self.problems.append(Problem(check, message, tensor, entry.file if entry else None))

    def begin(self, check: str) -> None:
        """Note that a check runs; some have several stages."""
        if check not in self.checked:
            self.checked.append(check)

    def attempt(self, check: str, function, *arguments):
        """Run a stage; its error becomes a problem and its result `None`."""
        self.begin(check)
        try:
            return function(*arguments)
        except (ValueError, TypeError, OSError) as error:
            self.add(check, str(error))
            return None

    def to_dict(self) -> dict:
        """Return the form of `--json`: the fields, and `ok`."""
        return {"ok": not self.problems, **asdict(self)}

    def lines(self) -> Iterator[str]:
        """Yield the lines that are printed."""
        yield f"{self.folder}: {self.family or 'unknown family'}, {self.form or 'unread'}, {self.tensors} tensors, {self.bytes} bytes"
        for check in CHECKS if is_hub_folder(self.folder) else CHECKS[:-1]:
            found = [problem for problem in self.problems if problem.check == check]
            state = f"{len(found)} problems" if found else "ok" if check in self.checked else "not checked"
            yield f"  {check:<18} {state}"
            for problem in found:
                where = f" ({problem.file})" if problem.file else ""
                yield f"    {problem.tensor + ': ' if problem.tensor else ''}{problem.message}{where}"


def verify(folder: str | os.PathLike, *, progress: bool = True) -> VerifyReport:
    r"""Compare a checkpoint folder with its own configuration.

    Args:
        folder (`str` or path): released, made by `convert hub`, or saved by `save_pretrained`, of either family.
        progress (`bool`, *optional*, defaults to `True`): show a bar while values are read.

    Returns:
        `VerifyReport`.

    Raises:
        OSError: if there is no such folder.
    """
    path, files, report = Path(folder), released_files(folder), VerifyReport(str(folder))
    content, config = report.attempt("config", read_config, path, files) or (None, None)
    tensors, entries = report.attempt("files", read_tensors, path, files) or ({}, {})
    places = report.attempt("names", released_places, entries) if entries else None
    report.tensors, report.bytes = len(tensors), sum(tensor.nbytes for tensor in tensors.values())
    if entries:
        report.form = "packed" if any(entry.dtype in PACKED_DTYPES for entry in entries.values()) else "float"
        report.attempt("files", _check_total, files, report.bytes)
    if config is not None:
        report.family = config.model_type
        expected = report.attempt("names", expected_tensors, content, config)
        if places and expected:
            _check_tensors(report, places, expected)
        if config.get_text_config().engram_layer_ids:
            report.attempt("hash constants", _check_hash, report, config.get_text_config(), path, files)
        if is_hub_folder(path):
            report.attempt("hub files", _check_hub, report, path, content)
    if entries:
        _check_values(report, tensors, entries, config, progress)
    return report


def expected_tensors(content: dict, config) -> dict[str, tuple[tuple[int, ...], tuple[torch.dtype, ...]]]:
    r"""Return shape and accepted dtypes of every tensor by released name.

    Args:
        content (`dict`): of config.json. Modules that it lists in `modules_to_not_convert`, and all modules without
            `quantization_config`, hold floats. Beside packed weights the model's own dtype is accepted, too, and float32
            where the release widens while loading.
        config (`Dsv41Config` or `Dsv4Config`): made from it.
    """
    quantization = content.get("quantization_config")
    floats = set((quantization or {}).get("modules_to_not_convert") or ())
    expected = {}
    for name, (shape, dtype) in released_tensors(config).items():
        is_float = quantization is None or name.rpartition(".")[0] in floats
        if dtype not in PACKED_DTYPES:
            expected[name] = shape, (dtype, *_other_floats(name, dtype, config, quantization is None))
        elif not is_float:
            expected[name] = shape, (dtype,)
        elif dtype != torch.float8_e8m0fnu:
            expected[name] = (*shape[:-1], shape[-1] * (2 if dtype == torch.int8 else 1)), FLOATS
    return expected


def _other_floats(name: str, dtype: torch.dtype, config, is_float_model: bool) -> tuple[torch.dtype, ...]:
    """The dtypes in which a plain tensor may be stored, beside the released one."""
    if not dtype.is_floating_point:
        return ()
    if is_float_model:
        return FLOATS
    wide = (torch.float32,) if WIDE_NAMES.search(RELEASED_NAMES.to_ours(name)) else ()
    return config.dtype, *wide


def _check_total(files: dict[str, Path], total: int) -> None:
    if INDEX_NAME not in files:
        return
    told = read_json(files[INDEX_NAME])["metadata"].get("total_size", total)
    if told != total:
        raise ValueError(f"{files[INDEX_NAME]}: total_size is {told}; the tensors have {total} bytes.")


def _check_tensors(report: VerifyReport, places: dict[str, Place], expected: dict) -> None:
    report.begin("shapes and dtypes")
    for name in sorted(expected.keys() - places.keys()):
        report.add("names", "is missing", tensor=name)
    for name in sorted(places.keys() - expected.keys()):
        report.add("names", "is not in a model with this config", places[name].entry, name)
    for name in sorted(expected.keys() & places.keys()):
        place, (shape, accepted) = places[name], expected[name]
        if place.shape != shape:
            report.add(
                "shapes and dtypes", f"has shape {list(place.shape)}; accepted: {list(shape)}", place.entry, name
            )
        if place.entry.dtype not in accepted:
            words = " or ".join(map(str, dict.fromkeys(accepted)))
            report.add("shapes and dtypes", f"is stored as {place.entry.dtype}; accepted: {words}", place.entry, name)


def _check_values(report: VerifyReport, tensors, entries: dict[str, TensorEntry], config, progress: bool) -> None:
    report.begin("values")
    experts = config.get_text_config().n_routed_experts if config else None
    with tqdm(total=report.bytes, unit="B", unit_scale=True, desc="Values", disable=not progress) as bar:
        for name, entry in entries.items():
            wrong = 0
            for piece in tensors[name].reshape(-1).split(PIECE):
                wrong += _wrong_values(piece, experts)
                bar.update(piece.nbytes)
            if wrong:
                what = f"outside 0 to {experts} - 1" if entry.dtype == torch.int64 else "that are not finite"
                report.add("values", f"has {wrong} values {what}", entry, name)


def _wrong_values(piece: torch.Tensor, experts: int | None) -> int:
    """Count the codes that mean NaN, the floats that are not finite, and the ids of experts that do not exist."""
    if piece.dtype == torch.float8_e8m0fnu:
        return int((as_bytes(piece) == E8M0_NAN).sum())
    if piece.dtype == torch.float8_e4m3fn:
        return int((as_bytes(piece) & E4M3_NAN == E4M3_NAN).sum())
    if piece.dtype == torch.int64 and experts is not None:
        return int(((piece < 0) | (piece >= experts)).sum())
    if piece.is_floating_point():
        return int((~piece.isfinite()).sum())
    return 0  # every pair of FP4 codes is two numbers


def _check_hash(report: VerifyReport, text, path: Path, files: dict[str, Path]) -> None:
    """Compare the n-gram constants of a config with each other, and token maps with them and with their digest."""
    check = "hash constants"
    for layer, rows, sizes in zip(text.engram_layer_ids, text.engram_num_embeddings, engram_primes(text), strict=True):
        needed = sum(map(sum, sizes))
        if rows < needed:
            report.add(check, f"layer {layer} has {rows} rows; accepted: at least {needed}, the sum of its primes")
    largest = max(max(factors) for factors in engram_multipliers(text))
    if largest * (text.engram_compressed_vocab_size - 1) >= 2**63:
        report.add(check, f"the factor {largest} overflows 64 bits with {text.engram_compressed_vocab_size} ids")
    if not text.needs_token_map:
        return
    digest = text.engram_token_map_sha256
    if is_hub_folder(path):  # the map and its digest were added
        files = files | {STORED_MAP: path / STORED_MAP}
        digest = (read_json(path / CONFIG_NAME).get("text_config") or {}).get(DIGEST)
    for name in TOKEN_MAP_FILES:
        if name in files:
            _check_token_map(report, text, files[name], digest)


def _check_token_map(report: VerifyReport, text, file: Path, digest: str | None) -> None:
    token_map = read_token_map(file)
    found, actual = int(token_map.max()) + 1, token_map_digest(token_map)
    if found != text.engram_compressed_vocab_size or len(token_map) > text.vocab_size:
        report.add(
            "hash constants",
            f"{file} has {len(token_map)} tokens and {found} compressed ids; accepted: at most {text.vocab_size} tokens and "
            f"exactly engram_compressed_vocab_size={text.engram_compressed_vocab_size} ids",
        )
    if digest not in (None, actual):
        report.add("hash constants", f"{file} gives the token map {actual}; config.json: {digest}")


def _check_hub(report: VerifyReport, path: Path, released: dict) -> None:
    """Compare what `convert hub` wrote with the released configuration and with its own list."""
    for name in written_by_hub(path):
        if not (path / name).is_file():
            report.add("hub files", f"{name} is missing")
    content = read_json(path / CONFIG_NAME)
    doors = content.pop("auto_map", None)
    if not isinstance(doors, dict):
        raise ValueError(f"{CONFIG_NAME}: auto_map is {doors!r:.200}; accepted: classes by the names of Auto classes.")
    for door, reference in doors.items():
        code = f"{str(reference).split('.')[0]}.py"
        if not (path / code).is_file():
            report.add("hub files", f"auto_map names {code} for {door}, which is missing")
    if "text_config" in released and DIGEST not in released["text_config"]:
        (content.get("text_config") or {}).pop(DIGEST, None)
    for key in sorted(content.keys() | released.keys()):
        if content.get(key) != released.get(key):
            report.add("hub files", f"{CONFIG_NAME} differs from {ORIGINALS}/{CONFIG_NAME} in {key}")
