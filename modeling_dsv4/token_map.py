"""The Engram token map on disk: stored beside the weights, or built from the tokenizer that lies there.

A stored map makes a folder independent of the tokenizer's files and of how this library reads them; its digest stands
in config.json (`engram_token_map_sha256`).

Source: contract section 8.
"""

from __future__ import annotations

import json
import os

import torch

from .checkpoint_map import read_json
from .ngram_hash import build_token_map

STORED_MAP = "engram_token_map.json"
# Where a folder may have the map, first choice first.
TOKEN_MAP_FILES = (STORED_MAP, "tokenizer.json")

_KEY, _MOST = "compressed_ids", 2**31


def token_map_text(token_map: torch.Tensor) -> str:
    """Return the content of a stored map: the compressed id of every token id, as JSON."""
    return json.dumps({_KEY: token_map.tolist()}, separators=(",", ":")) + "\n"


def read_token_map(file: str | os.PathLike) -> torch.Tensor:
    r"""Read a stored map, or build the map of a tokenizer.

    Args:
        file (`str` or path): named as one of `TOKEN_MAP_FILES`.

    Returns:
        `torch.Tensor` of shape `[tokens]`, int64.

    Raises:
        OSError: if the file is neither; names it.
    """
    if os.path.basename(file) == STORED_MAP:
        ids = read_json(file).get(_KEY)
        if not isinstance(ids, list) or not ids or not all(type(i) is int and 0 <= i < _MOST for i in ids):
            raise OSError(f"{file}: {_KEY} is {ids!r:.80}; accepted: a list of ids below {_MOST}.")
        return torch.tensor(ids, dtype=torch.long)
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise OSError(f"{file} is no tokenizer: {error}.") from error
    return build_token_map(tokenizer)
