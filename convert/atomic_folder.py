"""A folder that appears only when it is complete.

What is written goes to a hidden folder beside the target, which is renamed at the end. A failure removes it; what a
killed process leaves is removed by the next run for the same target, while a running process holds a lock on its own.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: a leftover is taken for one of a killed process
    fcntl = None

# Room that must stay free on the disk beyond what is written: headers, index, file system.
SPARE_BYTES = 16 * 2**20


def check_target(target: str | os.PathLike, *, needed_bytes: int) -> None:
    r"""Check that a folder can be made; removes what a killed process left of it and changes nothing else.

    Args:
        target (`str` or path).
        needed_bytes (`int`): what will be written.

    Raises:
        OSError: if the target exists and is not an empty folder or is a mount point, another process is making it, or
            its disk has less room.
    """
    target = _real(target)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise OSError(f"{target} exists and is not an empty folder; accepted: a new name or an empty folder.")
    if os.path.ismount(target):  # no folder can be renamed to it
        raise OSError(f"{target} is a mount point; accepted: a folder inside it.")
    leftover = _temporary(target)
    if leftover.is_dir():
        with _locked(leftover):
            shutil.rmtree(leftover)
    existing = next(folder for folder in target.parents if folder.exists())
    free = shutil.disk_usage(existing).free
    if free < needed_bytes + SPARE_BYTES:
        raise OSError(f"{existing} has {free} bytes free; {needed_bytes + SPARE_BYTES} are needed for {target.name}.")


@contextmanager
def new_folder(target: str | os.PathLike, *, needed_bytes: int) -> Iterator[Path]:
    r"""Give a temporary folder beside `target` that becomes `target` when the block ends, or vanishes when it fails.

    Args:
        target (`str` or path): must not exist, or be an empty folder.
        needed_bytes (`int`): what will be written.

    Raises:
        OSError: before anything is written; see `check_target`.
    """
    check_target(target, needed_bytes=needed_bytes)
    target = _real(target)
    temporary = _temporary(target)
    temporary.mkdir(parents=True)
    with _locked(temporary):
        try:
            yield temporary
            if target.exists():
                target.rmdir()
            temporary.rename(target)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def _real(target: str | os.PathLike) -> Path:
    """Where links lead: what is removed and renamed at the end must be the folder itself."""
    return Path(os.path.realpath(target))


def _temporary(target: Path) -> Path:
    return target.parent / f".{target.name}.partial"


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a lock on a folder; the system releases it when the process ends, however it ends."""
    handle = os.open(folder, os.O_RDONLY) if fcntl else None
    try:
        if fcntl:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(handle)
        raise OSError(f"{folder} is being written by another process; accepted: one at a time.") from error
    try:
        yield
    finally:
        if fcntl:
            os.close(handle)
