"""Engram addresses: the tokenizer's compressed ids, the hash constants, and the table rows of every position.

A position looks up one row per n-gram size and hash head: the row is the hash of its last n compressed ids, modulo a
prime of that head. Everything is a deterministic function of the config, the tokenizer and the token ids.

Sources: V4.1 report section 2.4.2, contract section 8.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
import torch
from torch import nn

# An id that takes part in no n-gram: every position of an image span.
DEAD = -1


def is_prime(number: int) -> bool:
    """Return whether `number` is prime (trial division; table sizes are below 2 ** 25)."""
    return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))


def engram_primes(config) -> list[list[list[int]]]:
    r"""Return the table sizes: `[Engram layer][n-gram size - 2][head]`.

    For each layer and n-gram size the search starts above `engram_vocab_size - 1` and takes the next primes that no
    table has yet (contract section 8).

    Args:
        config (`Dsv41TextConfig`).
    """
    taken: set[int] = set()
    layers = []
    for _ in config.engram_layer_ids:
        sizes = []
        for _ in range(config.engram_max_ngram_size - 1):
            number, heads = config.engram_vocab_size - 1, []
            while len(heads) < config.engram_n_heads:
                number += 1
                if number not in taken and is_prime(number):
                    taken.add(number)
                    heads.append(number)
            sizes.append(heads)
        layers.append(sizes)
    return layers


def engram_multipliers(config) -> list[list[int]]:
    r"""Return the odd factors of the look-back ids: `[Engram layer][look-back]`.

    Drawn by numpy's default generator, seeded with 10007 * layer, below half of int64 max / compressed vocabulary, so
    that no product overflows (contract section 8).
    """
    high = (2**63 - 1) // config.engram_compressed_vocab_size // 2
    draws = (
        np.random.default_rng(10007 * layer).integers(0, high, size=config.engram_max_ngram_size, dtype=np.int64)
        for layer in config.engram_layer_ids
    )
    return [(draw * 2 + 1).tolist() for draw in draws]


def ngram_rows(
    ids: torch.Tensor,
    real: torch.Tensor,
    multipliers: torch.Tensor,
    primes: torch.Tensor,
    *,
    pad_id: int,
    columns: int,
) -> torch.Tensor:
    r"""Return the table rows of the last `columns` positions of each row.

    Implements contract section 8: h_1 = t_0 m_0, h_n = xor of t_k m_k for k < n, row = h_n mod prime + offset, with t_k
    the id k positions back; from the first id that is missing or DEAD on, every look-back is the pad id.

    Args:
        ids (`torch.Tensor` of shape `[B, P + S]`, int64): compressed ids or DEAD, P >= N - 1 look-back columns first.
        real (`torch.Tensor` of shape `[B, P + S]`, bool): columns that exist (position >= 0).
        multipliers (`torch.Tensor` of shape `[L, N]`, int64): per Engram layer and look-back.
        primes (`torch.Tensor` of shape `[L, N - 1, heads]`, int64).
        pad_id (`int`): compressed id of the pad token.
        columns (`int`): S.

    Returns:
        `torch.Tensor` of shape `[B, S, L, (N - 1) * heads]`, int64, ordered by size, then head.
    """
    reach = multipliers.shape[-1]
    total = ids.shape[1]
    alive = torch.ones_like(real[:, :columns])
    mixed: torch.Tensor | int = 0
    hashes = []
    for back in range(reach):
        span = slice(total - columns - back, total - back)
        alive = alive & real[:, span] & (ids[:, span] != DEAD)
        token = torch.where(alive, ids[:, span], pad_id)
        mixed = token[..., None] * multipliers[:, back] ^ mixed  # [B, S, L]
        if back:
            hashes.append(mixed)
    rows = torch.stack(hashes, dim=-1)[..., None] % primes  # [B, S, L, N - 1, heads]
    sizes = primes.flatten(1)
    offsets = (sizes.cumsum(-1) - sizes).view_as(primes)
    return (rows + offsets).flatten(-2)


def build_token_map(tokenizer) -> torch.Tensor:
    r"""Build the map from token ids to compressed ids (contract section 8).

    Tokens whose decoded text is equal after NFKC, NFD, accent stripping, lower case and white-space folding share an id;
    ids are numbered by first appearance.

    Args:
        tokenizer: a `tokenizers.Tokenizer`, or a transformers tokenizer that wraps one.

    Returns:
        `torch.Tensor` of shape `[len(tokenizer)]`, int64.

    Raises:
        TypeError: if no `tokenizers.Tokenizer` can be found.
    """
    from tokenizers import Regex, Tokenizer, normalizers

    raw = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not isinstance(raw, Tokenizer):
        raise TypeError(
            f"tokenizer is a {type(tokenizer).__name__}; accepted: a fast tokenizer or tokenizers.Tokenizer."
        )
    only_space = "\ue000"  # keeps a lone space from being stripped to nothing
    fold = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), only_space),
            normalizers.Strip(),
            normalizers.Replace(only_space, " "),
        ]
    )
    size = raw.get_vocab_size(with_added_tokens=True)
    texts = raw.decode_batch([[i] for i in range(size)], skip_special_tokens=False)
    numbers: dict[str, int] = {}
    compressed = [numbers.setdefault(_key(raw, i, text, fold), len(numbers)) for i, text in enumerate(texts)]
    return torch.tensor(compressed, dtype=torch.long)


def token_map_digest(token_map: torch.Tensor) -> str:
    """Return the SHA-256 of a token map `[tokens]` (integer) written as little-endian int32, in hexadecimal."""
    return hashlib.sha256(token_map.cpu().numpy().astype("<i4").tobytes()).hexdigest()


def _key(raw, token_id: int, text: str, fold) -> str:
    if "\ufffd" in text:  # half a character: only the token itself tells it from others
        return raw.id_to_token(token_id)
    return fold.normalize_str(text) or text


class Dsv4NgramHash(nn.Module):
    r"""Hash of all Engram layers: holds the token map (no parameter: a tokenizer gives it) and the constants.

    The map is set by `set_token_map`; a config whose compressed vocabulary equals its vocabulary needs none.

    Args:
        config (`Dsv41TextConfig`).

    Raises:
        ValueError: if a table has fewer rows than its primes need.
    """

    def __init__(self, config):
        super().__init__()
        self.layer_ids = tuple(config.engram_layer_ids)
        self.reach = config.engram_max_ngram_size
        self.pad_token_id = config.engram_pad_token_id
        self.vocab_size, self.compressed_size = config.vocab_size, config.engram_compressed_vocab_size
        self.digest = config.engram_token_map_sha256
        self.primes, self.multipliers = engram_primes(config), engram_multipliers(config)
        for layer, rows, sizes in zip(self.layer_ids, config.engram_num_embeddings, self.primes, strict=True):
            needed = sum(map(sum, sizes))
            if rows < needed:
                raise ValueError(
                    f"engram_num_embeddings has {rows} rows for layer {layer}; accepted: at least {needed}, the sum of "
                    f"the primes that engram_vocab_size={config.engram_vocab_size} gives."
                )
        self.token_map: torch.Tensor | None = None
        self.pad_id = self.pad_token_id  # compressed id of the pad token
        self._constants: tuple[torch.Tensor, torch.Tensor] | None = None

    def set_token_map(self, token_map: torch.Tensor | Iterable[int]) -> None:
        r"""Use a token map.

        Args:
            token_map (`[<= vocab_size]`, integer): compressed id of every token id.

        Raises:
            ValueError: if it is no map, is larger than the vocabulary, does not have the number of ids the config names,
                or is not the map whose digest the config has.
        """
        token_map = torch.as_tensor(token_map, dtype=torch.long)
        if token_map.ndim != 1 or not len(token_map) or bool((token_map < 0).any()):
            raise ValueError(
                "the token map is empty, not a list, or has ids below 0; accepted: an id >= 0 of every token."
            )
        found = int(token_map.max()) + 1
        if found != self.compressed_size or len(token_map) > self.vocab_size:
            raise ValueError(
                f"the tokenizer has {len(token_map)} tokens and {found} compressed ids; accepted: at most "
                f"{self.vocab_size} tokens and exactly engram_compressed_vocab_size={self.compressed_size} ids."
            )
        digest = token_map_digest(token_map)
        if self.digest not in (None, digest):
            raise ValueError(
                f"the tokenizer's token map has SHA-256 {digest}; accepted: engram_token_map_sha256={self.digest}, the map "
                "that the weights were trained with (set the key to null to use another tokenizer)."
            )
        self.token_map = token_map
        self.pad_id = int(token_map[self.pad_token_id])

    def compress(
        self, input_ids: torch.Tensor, image_mask: torch.Tensor | None, *, check: bool = True
    ) -> torch.Tensor:
        r"""Return compressed ids `[B, S]` int64, DEAD at image positions.

        Raises:
            ValueError: if the config needs a token map and none was set, or an id is beyond it. (Without `check`, which
                waits for the ids, indexing raises in its own way.)
        """
        if self.compressed_size == self.vocab_size:
            ids = input_ids
        else:
            if self.token_map is None:
                raise ValueError(
                    "this model's Engram needs the tokenizer's token map; call model.set_tokenizer(tokenizer) first."
                )
            self.token_map = self.token_map.to(input_ids.device)
            check = check and not torch.compiler.is_compiling()
            if check and bool((input_ids >= len(self.token_map)).any()):
                raise ValueError(
                    f"input_ids holds {int(input_ids.max())}; the token map ends at {len(self.token_map) - 1}."
                )
            ids = self.token_map[input_ids]
        return ids if image_mask is None else ids.masked_fill(image_mask, DEAD)

    def forward(self, ids: torch.Tensor, past: torch.Tensor, columns: int) -> dict[int, torch.Tensor]:
        r"""Return the table rows of every Engram layer: `{layer: [B, S, (N - 1) * heads] int64}`.

        Args:
            ids (`torch.Tensor` of shape `[B, P + S]`, int64): compressed ids, P look-back columns first (P may be 0).
            past (`torch.Tensor` of shape `[B]`, int64): real tokens of each row before the S new columns.
            columns (`int`): S.
        """
        ids = torch.nn.functional.pad(ids, (max(self.reach - 1 - (ids.shape[1] - columns), 0), 0))
        lookback = ids.shape[1] - columns
        positions = past[:, None] - lookback + torch.arange(ids.shape[1], device=ids.device)
        if self._constants is None or self._constants[0].device != ids.device:
            self._constants = tuple(torch.tensor(c, device=ids.device) for c in (self.multipliers, self.primes))
        rows = ngram_rows(ids, positions >= 0, *self._constants, pad_id=self.pad_id, columns=columns)
        return {layer: rows[:, :, i] for i, layer in enumerate(self.layer_ids)}
