"""A killed command leaves no half folder, and the next run of it completes."""

import os
import random
import shutil
import signal
import sys
import time

import pytest

from convert.__main__ import main
from convert.tiny import make_tiny
from convert.verify import verify
from tests.processes import CONTEXT
from tests.released_folders import contents


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("source") / "x", progress=False)


def commands(source, target):
    return {
        "tiny": ["tiny", str(target), "--seed", "1"],
        "released": ["released", str(source), str(target), "--max-shard-size", "100KB"],
        "hub": ["hub", str(source), str(target), "--copy"],
    }


def run(arguments):
    sys.stdout = sys.stderr = open(os.devnull, "w")
    sys.exit(main(arguments))


def start(arguments):
    """A process that has imported everything: kills should meet the work, not the imports."""
    process = CONTEXT.Process(target=run, args=(arguments,))
    process.start()
    return process


def complete(arguments):
    process = start(arguments)
    process.join(timeout=300)
    assert process.exitcode == 0


def kill_and_run_again(command, source, folder, seeds):
    """Kill at random moments of the time that a whole run takes; returns how many kills found it at work."""
    target, caught = folder / "made", 0
    arguments = commands(source, target)[command]
    complete(arguments)  # the first process of the server waits for its imports
    shutil.rmtree(target)
    started = time.monotonic()
    complete(arguments)
    duration, expected = time.monotonic() - started, contents(target)
    for seed in seeds:
        shutil.rmtree(target)
        process = start(arguments)
        time.sleep(random.Random(seed).uniform(0.1, 0.9) * duration)
        process.kill()
        process.join(timeout=60)
        caught += process.exitcode == -signal.SIGKILL
        if target.exists():
            assert contents(target) == expected
            shutil.rmtree(target)
        complete(arguments)
        assert contents(target) == expected
        assert [path.name for path in folder.iterdir()] == ["made"]
    assert verify(target, progress=False).problems == []
    return caught


@pytest.mark.parametrize("command", ["tiny", "released", "hub"])
def test_a_killed_command_leaves_nothing_and_completes_again(command, source, tmp_path):
    kill_and_run_again(command, source, tmp_path, seeds=[1])


@pytest.mark.slow
@pytest.mark.parametrize("command", ["tiny", "released", "hub"])
def test_twenty_kills(command, source, tmp_path):
    caught = kill_and_run_again(command, source, tmp_path, seeds=range(7))
    print(f"{command}: {caught} of 7 kills found it at work")
    assert caught >= 2
