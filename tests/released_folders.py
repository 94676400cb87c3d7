"""Small released-layout folders for tests: read the golden one, change it, write it again.

`Folder` holds shards, index, config and tokenizer in memory; `write` makes the files, consistent with each other unless
a test damages them. It uses the library's writer only.
"""

import copy
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.golden_cases import CHECKPOINT_V41, load_json

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def same_bytes(a, b):
    """Whether two tensors have dtype, shape and every bit in common."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.detach().reshape(-1).view(torch.uint8), b.detach().reshape(-1).view(torch.uint8))


def contents(folder):
    """Every file of a folder by name, as bytes."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def stored_tensors(folder):
    """Every tensor of the safetensors files of a folder, by its name."""
    tensors = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        tensors |= load_file(str(file))
    return tensors


def remove(name):
    """An edit of a `Folder`."""
    return lambda folder: folder.__delitem__(name)


def change(name, function):
    """An edit of a `Folder`."""
    return lambda folder: folder.__setitem__(name, function(folder[name]))


class Folder:
    """A released-layout folder in memory: `shards` {file: {name: tensor}}, `config`, `tokenizer` (bytes or `None`).

    `index` (name -> file) is made from the shards unless a test sets it; `False` writes none.
    """

    def __init__(self, source=CHECKPOINT_V41):
        self.shards = {file.name: load_file(str(file)) for file in sorted(Path(source).glob("*.safetensors"))}
        self.config = load_json(Path(source) / "config.json")
        self.tokenizer = (Path(source) / "tokenizer.json").read_bytes()
        self.index = None

    def copy(self):
        """A copy that shares the tensors, not the dictionaries."""
        twin = copy.copy(self)
        twin.shards = {file: dict(tensors) for file, tensors in self.shards.items()}
        twin.config = copy.deepcopy(self.config)
        return twin

    def shard_of(self, name):
        return next(file for file, tensors in self.shards.items() if name in tensors)

    def __getitem__(self, name):
        return self.shards[self.shard_of(name)][name]

    def __setitem__(self, name, tensor):
        """Replace a tensor where it is; a new name goes to the first shard."""
        known = any(name in tensors for tensors in self.shards.values())
        self.shards[self.shard_of(name) if known else FIRST][name] = tensor

    def __delitem__(self, name):
        del self.shards[self.shard_of(name)][name]

    def rename(self, new_name):
        """Give every tensor the name `new_name(name)`."""
        self.shards = {f: {new_name(n): t for n, t in tensors.items()} for f, tensors in self.shards.items()}

    def keep(self, wanted):
        """Drop every tensor whose name `wanted` does not accept."""
        self.shards = {f: {n: t for n, t in tensors.items() if wanted(n)} for f, tensors in self.shards.items()}

    def write(self, path):
        """Write the folder and return its path."""
        path = Path(path)
        path.mkdir(parents=True, exist_ok=True)
        for file, tensors in self.shards.items():
            save_file({name: t.contiguous() for name, t in tensors.items()}, str(path / file), {"format": "pt"})
        index = self.index
        if index is None:
            index = {name: file for file, tensors in self.shards.items() for name in tensors}
        if index is not False:
            (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
        (path / "config.json").write_text(json.dumps(self.config))
        if self.tokenizer is not None:
            (path / "tokenizer.json").write_bytes(self.tokenizer)
        return path


def small_folder():
    """The first four layers of the golden checkpoint: window, window with Engram, full, reuse."""
    folder = Folder()
    folder.keep(lambda name: not name.startswith("layers.") or int(name.split(".")[1]) < 4)
    folder.config["text_config"].update(
        num_hidden_layers=4,
        compress_ratios=[0, 0, 2, 2, 0, 0, 0],
        kv_source_layer_ids=[2],
        index_source_layer_ids=[2],
        candidate_source_layer_id=-1,
        engram_layer_ids=[1],
        engram_num_embeddings=[3150],
        dspark_target_layer_ids=[3],
    )
    return folder
