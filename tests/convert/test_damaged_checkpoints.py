"""Damaged checkpoints: a clear error, or the same tensors as before; never slow, never large, never another exception.

Every number is one damage, drawn from a seed. 60 of them run with every test run, 500 before a release, some of each in
a process of their own (a crash would be seen there).
"""

import json
import math
import os
import random
import resource
import shutil
import time
from functools import cache

import pytest

from convert.checkpoint_folder import CheckpointFolder
from convert.verify import verify
from modeling_dsv4 import Dsv4ForCausalLM, Dsv41ForCausalLM
from tests.golden_cases import CHECKPOINT_V4
from tests.processes import CONTEXT
from tests.released_folders import Folder, same_bytes, small_folder

INDEX = "model.safetensors.index.json"
MOST_SECONDS, MOST_BYTES = 10, 10**9
BIG = (2**31, 2**53, 2**62, 2**63 - 1, 2**64 - 1, 10**30, 10**4000)
PATHS = ("../{}", "/etc/passwd", "..\\{}", "C:{}", "x/../../{}", "", ".", "..", "/", "{}\0", "\0", "./{}", "~/{}", "{}/",
         "missing.safetensors", "config.json", 5, None, True, ["{}"], {"a": "{}"}, 1e99)  # fmt: skip


# ---- damages: each takes a random source and the folder -------------------------------------------------------------------


def some_shard(rng, path):
    return rng.choice(sorted(path.glob("*.safetensors")))


def header_of(file):
    """Length, header as text, and data of a shard."""
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return length, raw[8 : 8 + length].decode(), raw[8 + length :]


def write_header(file, text, data, length=None):
    raw = text.encode()
    file.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + data)


def change_header(rng, path, change):
    """Rewrite the header of a shard after `change(header, names)`, padded to its old length where that is possible."""
    file = some_shard(rng, path)
    length, text, data = header_of(file)
    header = json.loads(text)
    change(header, [name for name in header if name != "__metadata__"])
    write_header(file, json.dumps(header, separators=(",", ":")).ljust(length), data)


def flip_header(rng, path):
    file = some_shard(rng, path)
    length = header_of(file)[0]
    with open(file, "r+b") as handle:
        flip(rng, handle, 8 + length)


def flip_index(rng, path):
    with open(path / INDEX, "r+b") as handle:
        flip(rng, handle, handle.seek(0, os.SEEK_END))


def flip(rng, handle, size):
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        place = rng.randrange(size)
        handle.seek(place)
        byte = handle.read(1)[0]
        handle.seek(place)
        handle.write(bytes([byte ^ 1 << rng.randrange(8)]))


def truncate(rng, path):
    file = rng.choice([some_shard(rng, path), path / INDEX, path / "config.json"])
    size = file.stat().st_size
    os.truncate(file, rng.choice((0, 1, 7, 8, 9, rng.randrange(size), size - 1)))


def swap_shapes(rng, path):
    def change(header, names):
        first, second = rng.sample(names, 2)
        one, other = header[first], header[second]
        kind = rng.randrange(4)
        if kind == 0:
            one["shape"], other["shape"] = other["shape"], one["shape"]
        elif kind == 1:
            one["shape"] = one["shape"][::-1]
        elif kind == 2:
            one["shape"] = [*one["shape"], 1]
        elif math.prod(one["shape"]) != math.prod(other["shape"]):  # equal sizes: another file, and a whole one
            one["data_offsets"], other["data_offsets"] = other["data_offsets"], one["data_offsets"]

    change_header(rng, path, change)


def duplicate(rng, path):
    file = some_shard(rng, path)
    length, text, data = header_of(file)
    header = json.loads(text)
    name, other = rng.sample([name for name in header if name != "__metadata__"], 2)
    kind = rng.randrange(4)
    if kind == 0:  # the name twice in a header
        write_header(file, text.rstrip()[:-1] + f",{json.dumps(name)}:{json.dumps(header[name])}}}", data)
    elif kind == 1:  # a second name for the bytes of the first
        header[other] = header[name]
        write_header(file, json.dumps(header), data)
    elif kind == 2:  # the name twice in the index
        text = (path / INDEX).read_text()
        where = json.dumps(rng.choice([file.name for file in path.glob("*.safetensors")]))
        (path / INDEX).write_text(text.replace('"weight_map": {', f'"weight_map": {{{json.dumps(name)}: {where}, ', 1))
    else:  # the shard twice
        shutil.copyfile(file, path / "model-00009-of-00009.safetensors")
        content = json.loads((path / INDEX).read_text())
        content["weight_map"][name] = "model-00009-of-00009.safetensors"
        (path / INDEX).write_text(json.dumps(content))


def path_trick(rng, path):
    content = json.loads((path / INDEX).read_text())
    name, file = rng.choice(sorted(content["weight_map"].items()))
    target = rng.choice(PATHS)
    target = target.replace("{}", file) if isinstance(target, str) else target
    if rng.random() < 0.2:
        config = json.loads((path / "config.json").read_text())
        config["transformers_weights"] = target
        (path / "config.json").write_text(json.dumps(config))
    elif rng.random() < 0.2:
        content["weight_map"] = dict.fromkeys(content["weight_map"], target)
        (path / INDEX).write_text(json.dumps(content))
    else:
        content["weight_map"][name] = target
        (path / INDEX).write_text(json.dumps(content))


def huge(rng, path):
    file, big = some_shard(rng, path), rng.choice(BIG)
    length, text, data = header_of(file)
    kind = rng.randrange(6)
    if kind == 0:  # declared header
        write_header(file, text, data, length=min(big, 2**64 - 1))
    elif kind == 1:  # a file as large as its header says, all zeros
        with open(file, "r+b") as handle:
            handle.write((2**31).to_bytes(8, "little"))
            handle.truncate(2**32)
    elif kind == 2:  # index or config of 3 GB
        os.truncate(path / rng.choice([INDEX, "config.json"]), 3 * 10**9)
    elif kind == 3:
        rng.choice([path / INDEX, path / "config.json"]).write_text("[" * 200_000)
    else:
        header = json.loads(text)
        entry = header[rng.choice([name for name in header if name != "__metadata__"])]
        if kind == 4:
            entry[rng.choice(("shape", "data_offsets"))] = rng.choice(
                ([big], [big, big], [0, big], [1] * 70, [1] * 10**6)
            )
        else:
            header["extra"] = {"dtype": "U8", "shape": [big % 2**70, 0], "data_offsets": [len(data)] * 2}
        sizes = json.dumps(header) if big < 10**100 else text.replace(":[", f":[{'9' * 5000},", 1)
        write_header(file, sizes, data)


def odd_value(rng, path):
    def change(header, names):
        entry = header[rng.choice(names)]
        key = rng.choice(("dtype", "shape", "data_offsets"))
        entry[key] = rng.choice((None, True, -1, 1.5, float("nan"), "F8_E5M2", [], [-1], [None], [1.0], {}, "", ["a"]))
        if rng.random() < 0.2:
            del entry[key]

    change_header(rng, path, change)


def other_file(rng, path):
    some_shard(rng, path).write_bytes(
        rng.choice((b"\x80\x04" * 500, b"<!DOCTYPE html>" * 99, b"PK\3\4" * 99, bytes(4000)))
    )


def free_text(rng, path):
    """What is free text may be anything: the tensors stay the same."""
    file = some_shard(rng, path)
    _, text, data = header_of(file)
    header = json.loads(text) | {"__metadata__": {"format": "pt", "note": "x" * rng.randrange(2000)}}
    write_header(file, json.dumps(header), data)
    content = json.loads((path / INDEX).read_text())
    content["metadata"]["note"] = rng.choice((None, [1, [2]], {"a": "../b"}, "\0", 10**30))
    (path / INDEX).write_text(json.dumps(content))


DAMAGES = (flip_header, flip_header, flip_index, truncate, swap_shapes, duplicate, path_trick, huge, odd_value, other_file, free_text)  # fmt: skip


# ---- what must come of it ---------------------------------------------------------------------------------------------------


CLASSES = Dsv41ForCausalLM, Dsv4ForCausalLM


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A whole folder of each family."""
    small = small_folder()
    small.config["text_config"]["dspark_target_layer_ids"] = [1, 2, 3]  # as many as its draft stages read
    parent = tmp_path_factory.mktemp("whole")
    return small.write(parent / "v41"), Folder(CHECKPOINT_V4).write(parent / "v4")


@cache
def read_whole(number, path):
    """The state of the model, and every tensor by released name, of one of the whole folders."""
    return CLASSES[number].from_pretrained(path, dtype="auto").state_dict(), CheckpointFolder(path)


def damaged(number, folders, path):
    """Write damage `number` into `path` and return its name with what the folder was before."""
    rng, family = random.Random(number), number % 2
    shutil.copytree(folders[family], path)
    damage = DAMAGES[number // 2 % len(DAMAGES)]
    damage(rng, path)
    return damage.__name__, CLASSES[family], *read_whole(family, folders[family])


def assert_refused_or_same(number, folders, path):
    """Load, verify and open a damaged folder; returns what came of it."""
    name, model_class, state, checkpoint = damaged(number, folders, path)
    outcomes, started = [name], time.process_time()  # what else runs on the machine does not count
    for use in (load, open_folder, look_at):
        try:
            outcomes.append(use(path, model_class, state, checkpoint))
        except (ValueError, OSError) as error:
            assert len(str(error)) > 20, error
            outcomes.append(f"{type(error).__name__}: {str(error)[:300]}")
    assert time.process_time() - started < MOST_SECONDS, outcomes
    if name == "free_text":
        assert outcomes[1:] == ["same", "same", "no problem"], outcomes
    return outcomes


def load(path, model_class, state, checkpoint):
    found = model_class.from_pretrained(path, dtype="auto").state_dict()
    assert found.keys() == state.keys() and all(same_bytes(found[key], state[key]) for key in state), "other tensors"
    return "same"


def open_folder(path, model_class, state, checkpoint):
    found = CheckpointFolder(path)
    if found.places.keys() == checkpoint.places.keys():
        assert all(same_bytes(found.read(key), checkpoint.read(key)) or _told(path) for key in found.places)
    return "same"


def _told(path):
    """Whether `verify` says what opening alone does not compare: shapes, dtypes."""
    return bool(verify(path, progress=False).problems)


def look_at(path, model_class, state, checkpoint):
    problems = verify(path, progress=False).problems
    return problems[0].message if problems else "no problem"


def run_alone(number, folders, path, results):
    for family, folder in enumerate(folders):
        read_whole(family, folder)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcomes = assert_refused_or_same(number, folders, path)
    results.put((outcomes, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))


def check_together(numbers, folders, tmp_path):
    before, refused = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0
    for number in numbers:
        outcomes = assert_refused_or_same(number, folders, tmp_path / str(number))
        print(number, *outcomes, sep=" | ")
        refused += "same" not in outcomes[1]
        shutil.rmtree(tmp_path / str(number))
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MOST_BYTES
    return refused


def check_alone(numbers, folders, tmp_path):
    for number in numbers:
        results = CONTEXT.Queue()
        process = CONTEXT.Process(target=run_alone, args=(number, folders, tmp_path / str(number), results))
        process.start()
        process.join(timeout=120)
        assert process.exitcode == 0, (number, process.exitcode)
        outcomes, grown = results.get(timeout=10)
        print(number, *outcomes, f"{grown} kB", sep=" | ")
        assert grown * 1024 < MOST_BYTES


def test_sixty_damages(folders, tmp_path):
    assert check_together(range(60), folders, tmp_path) > 40


@pytest.mark.slow
def test_two_damages_alone(folders, tmp_path):
    check_alone((1000, 1014), folders, tmp_path)  # a flipped bit, a huge number


@pytest.mark.slow
def test_five_hundred_damages(folders, tmp_path):
    assert check_together(range(480), folders, tmp_path) > 350


@pytest.mark.slow
def test_twenty_damages_alone(folders, tmp_path):
    check_alone(range(480, 500), folders, tmp_path)
