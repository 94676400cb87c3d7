"""What a Hub folder has beyond a folder in the released layout, and how to undo it.

`convert hub` writes code, processor files, token map and model card beside the released files. A released file that it
changes is kept, byte for byte, under `original/` (which serving engines skip), and `original/hub_files.json` lists what
the command wrote. So the released folder is: every file that is not listed, and every file of `original/` in its place.
"""

from __future__ import annotations

import os
from pathlib import Path

from modeling_dsv4.checkpoint_map import read_json

ORIGINALS = "original"
MANIFEST = f"{ORIGINALS}/hub_files.json"
# Traces of version control and downloads; no part of a checkpoint.
IGNORED_FOLDERS = (".git", ".cache", "__pycache__")


def is_hub_folder(folder: str | os.PathLike) -> bool:
    """Return whether `convert hub` made this folder."""
    return (Path(folder) / MANIFEST).is_file()


def written_by_hub(folder: str | os.PathLike) -> list[str]:
    r"""Return the names of the files that `convert hub` wrote into this folder, relative to it; `[]` for other folders.

    Raises:
        OSError: if the list is damaged.
    """
    file = Path(folder) / MANIFEST
    if not file.is_file():
        return []
    names = read_json(file).get("written")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise OSError(f"{file}: 'written' is {names!r:.200}; accepted: a list of names.")
    return names


def folder_files(folder: str | os.PathLike) -> dict[str, Path]:
    r"""Return every file of a folder: `{name: path}`, names relative to it, with `/`.

    Raises:
        OSError: if the folder does not exist.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise OSError(f"{folder} is no folder; accepted: a checkpoint folder.")
    files = {}
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in IGNORED_FOLDERS]
        for name in names:
            path = Path(parent) / name
            files[path.relative_to(folder).as_posix()] = path
    return files


def released_files(folder: str | os.PathLike) -> dict[str, Path]:
    r"""Return the files of a checkpoint as released: of a Hub folder without what `convert hub` did to it.

    Args:
        folder (`str` or path): in the released layout, saved by `save_pretrained`, or made by `convert hub`.

    Returns:
        `{name: path}`, sorted; names are relative to the folder, with `/`.

    Raises:
        OSError: if the folder does not exist or its list is damaged.
    """
    files = folder_files(folder)
    if is_hub_folder(folder):
        for name in written_by_hub(folder):
            files.pop(name, None)
        del files[MANIFEST]
        for name in [name for name in files if name.startswith(f"{ORIGINALS}/")]:
            files[name.removeprefix(f"{ORIGINALS}/")] = files.pop(name)
    return dict(sorted(files.items()))
