"""`convert kernels`: the Triton kernels as a repository that the `kernels` library loads."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from modeling_dsv4.kernel_seam import REPOSITORY, VERSION

from .atomic_folder import new_folder

SOURCES = Path(__file__).parents[1] / "modeling_dsv4" / "triton_kernels"
# One build for every backend that Triton serves, and for its interpreter on a CPU.
VARIANT = "build/torch-universal"
CARD = f"""---
license: apache-2.0
library_name: kernels
tags: [kernels, triton, deepseek_v41, deepseek_v4]
---

# Kernels of DeepSeek-V4.1 and V4

Pure Triton, tested on NVIDIA GPUs of compute capability 9.0, where the transformers integration of these models uses
them by itself (`model.set_kernels("auto")`); from a folder: `model.set_kernels("<path>")`, or `LOCAL_KERNELS="{REPOSITORY}=<path>"`.
Alone:

    from kernels import get_kernel
    kernels = get_kernel("{REPOSITORY}", version={VERSION})

Every function is named and shaped like the reference function that it replaces; see its docstring.
"""


def write_kernels(dst: str | os.PathLike) -> Path:
    r"""Write the kernel repository.

    Args:
        dst (`str` or path): folder to make; must not exist or be empty.

    Returns:
        `Path` of the folder.

    Raises:
        OSError: if `dst` exists and is not empty, or the kernels' sources are not installed.
    """
    sources = {path.name: path.read_bytes() for path in sorted(SOURCES.glob("*.py"))}
    if not sources:
        raise OSError(f"{SOURCES} holds no kernels; accepted: an installed modeling_dsv4.")
    digest = hashlib.sha256(b"".join(name.encode() + text for name, text in sources.items())).hexdigest()
    name = REPOSITORY.rpartition("/")[2]
    metadata = {
        # The name under which Python will know the module: another build, another module.
        "id": f"_{name.replace('-', '_')}_{digest[:16]}",
        "name": name,
        "version": VERSION,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": "cuda"},
    }
    with new_folder(dst, needed_bytes=sum(map(len, sources.values()))) as folder:
        variant = folder / VARIANT
        variant.mkdir(parents=True)
        for file, text in sources.items():
            (variant / file).write_bytes(text)
        (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")
        (folder / "CARD.md").write_text(CARD, encoding="utf-8")
    return Path(dst)
