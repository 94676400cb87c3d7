"""Folders that appear whole or not at all, also when the process is killed or another one makes the same folder."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from convert import atomic_folder
from convert.atomic_folder import check_target, new_folder

ROOT = Path(__file__).parents[2]


def test_a_folder_appears_only_when_it_is_complete(tmp_path):
    target = tmp_path / "deep" / "folder"
    with new_folder(target, needed_bytes=1) as folder:
        (folder / "file").write_text("x")
        assert folder.parent == target.parent and not target.exists()
    assert [path.name for path in target.parent.iterdir()] == ["folder"]
    assert (target / "file").read_text() == "x"


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failure_leaves_nothing(tmp_path, error):
    with pytest.raises(error):
        with new_folder(tmp_path / "folder", needed_bytes=1) as folder:
            (folder / "file").write_text("x")
            raise error
    assert list(tmp_path.iterdir()) == []


def test_an_empty_folder_is_taken_and_a_full_one_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with new_folder(tmp_path / "empty", needed_bytes=1) as folder:
        (folder / "file").touch()
    for taken in (tmp_path / "empty", tmp_path / "empty" / "file"):
        with pytest.raises(OSError, match=f"{taken} exists and is not an empty folder; accepted: a new name or"):
            with new_folder(taken, needed_bytes=1):
                pytest.fail("the block must not run")


def test_a_link_leads_to_its_folder_and_a_mount_point_is_refused(tmp_path, monkeypatch):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    with new_folder(tmp_path / "link", needed_bytes=1) as folder:
        (folder / "file").touch()
    assert (tmp_path / "disk" / "file").exists() and (tmp_path / "link").is_symlink()
    (tmp_path / "volume").mkdir()
    monkeypatch.setattr(atomic_folder.os.path, "ismount", lambda path: path == tmp_path / "volume")
    with pytest.raises(OSError, match="volume is a mount point; accepted: a folder inside it"):
        check_target(tmp_path / "volume", needed_bytes=1)


def test_too_little_room_is_told_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic_folder.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 10**9}))
    check_target(tmp_path / "a" / "b", needed_bytes=10**9 - atomic_folder.SPARE_BYTES)
    with pytest.raises(OSError, match=rf"{tmp_path} has 1000000000 bytes free; 1000000001 are needed for b\."):
        check_target(tmp_path / "a" / "b", needed_bytes=10**9 - atomic_folder.SPARE_BYTES + 1)
    assert list(tmp_path.iterdir()) == []


def writer(target):
    """A process that has begun to write `target` and waits."""
    code = f"""
from convert.atomic_folder import new_folder
with new_folder({str(target)!r}, needed_bytes=1) as folder:
    (folder / "half").write_text("x")
    print("begun", flush=True)
    input()
"""
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdin=-1, stdout=-1, text=True)
    assert process.stdout.readline() == "begun\n"
    return process


def test_what_a_killed_process_left_is_removed_and_a_running_one_is_left_alone(tmp_path):
    target = tmp_path / "folder"
    with writer(target) as process:
        with pytest.raises(OSError, match=r"\.folder\.partial is being written by another process; accepted: one at"):
            with new_folder(target, needed_bytes=1):
                pytest.fail("the block must not run")
        assert (tmp_path / ".folder.partial" / "half").exists()
        os.kill(process.pid, signal.SIGKILL)
    assert [path.name for path in tmp_path.iterdir()] == [".folder.partial"]
    with new_folder(target, needed_bytes=1) as folder:
        assert list(folder.iterdir()) == []
        (folder / "whole").touch()
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["folder", "folder/whole"]
