"""Engram in plain Python integers and float64: token map, primes, multipliers, row ids, gate (V4.1 contract section 8)."""

import math
import unicodedata

import numpy as np

from .mhc import sigmoid

WHITE_SPACE = "".join(
    chr(c)
    for c in (
        *range(0x9, 0xE),
        0x20,
        0x85,
        0xA0,
        0x1680,
        *range(0x2000, 0x200B),
        0x2028,
        0x2029,
        0x202F,
        0x205F,
        0x3000,
    )
)
LARGEST_INT64 = 2**63 - 1
DEAD = -1


def normalize_text(text):
    """Return NFKC, NFD, without marks, lower case, runs of space / tab / CR / LF as one space, stripped.

    A text that is one space after that stays one space.
    """
    text = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    text = "".join(c for c in text if not unicodedata.category(c).startswith("M"))
    text = "".join(c.lower() for c in text)  # one by one: no context rule for the final sigma
    collapsed = []
    for c in text:
        c = " " if c in " \t\r\n" else c
        if not (c == " " and collapsed and collapsed[-1] == " "):
            collapsed.append(c)
    text = "".join(collapsed)
    return " " if text == " " else text.strip(WHITE_SPACE)


def build_token_map(tokenizer_file):
    """Return the list of compressed ids, one per token id of a `tokenizer.json`; ids count first appearances."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    seen, result = {}, []
    for token in range(tokenizer.get_vocab_size(with_added_tokens=True)):
        text = tokenizer.decode([token], skip_special_tokens=False)
        if "\ufffd" in text:
            key = tokenizer.id_to_token(token)
        else:
            key = normalize_text(text) or text
        if key not in seen:
            seen[key] = len(seen)
        result.append(seen[key])
    return result


def _is_prime(n):
    return n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1))


def primes(config):
    """Return {layer: primes}, per layer one prime per (n-gram size, head), sizes outermost; none is used twice.

    The search of every n-gram size begins after `engram_vocab_size - 1`, which is itself never taken, prime or not.
    """
    used, result = set(), {}
    for layer in config["engram_layer_ids"]:
        result[layer] = []
        for _ in range(2, config["engram_max_ngram_size"] + 1):
            candidate = config["engram_vocab_size"]
            for _ in range(config["engram_n_heads"]):
                while not _is_prime(candidate) or candidate in used:
                    candidate += 1
                used.add(candidate)
                result[layer].append(candidate)
    return result


def multipliers(config):
    """Return {layer: odd multipliers}, one per look-back 0 ... max_ngram_size - 1."""
    high = (LARGEST_INT64 // config["engram_compressed_vocab_size"]) // 2
    result = {}
    for layer in config["engram_layer_ids"]:
        drawn = np.random.default_rng(10007 * layer).integers(
            0, high, size=config["engram_max_ngram_size"], dtype=np.int64
        )
        result[layer] = [int(m) * 2 + 1 for m in drawn]
    return result


def look_back(compressed, position, size, pad):
    """Return `size` compressed ids, of position, position - 1, ...; from the first dead or missing one on all are pad."""
    found, alive = [], True
    for k in range(size):
        t = position - k
        alive = alive and t >= 0 and compressed[t] != DEAD
        found.append(compressed[t] if alive else pad)
    return found


def row_ids(token_ids, config, token_map, dead=None):
    """Return the table rows [S, layers, rows per token] of one unpadded row of token ids.

    `dead` [S] marks image positions. `token_map` None means that ids are not compressed.
    """
    mapped = (lambda i: int(token_map[int(i)])) if token_map is not None else int
    pad = mapped(config["engram_pad_token_id"])
    compressed = [
        DEAD if dead is not None and dead[t] else mapped(token) for t, token in enumerate(np.asarray(token_ids))
    ]
    sizes, heads = config["engram_max_ngram_size"], config["engram_n_heads"]
    all_primes, all_multipliers = primes(config), multipliers(config)
    rows = []
    for t in range(len(compressed)):
        ids = look_back(compressed, t, sizes, pad)
        rows.append([_rows_of(ids, all_multipliers[i], all_primes[i], heads) for i in config["engram_layer_ids"]])
    return np.array(rows, dtype=np.int64)


def _rows_of(ids, factors, moduli, heads):
    rows, offset, used, mixed = [], 0, 0, ids[0] * factors[0]
    for k in range(1, len(ids)):
        mixed ^= ids[k] * factors[k]
        for _ in range(heads):
            rows.append(mixed % moduli[used] + offset)
            offset += moduli[used]
            used += 1
    return rows


def gated(streams, key, value, q_weight, k_weight, eps):
    """Return the streams [N, D] of one token after the gated sum.

    `key`, `q_weight`, `k_weight` are [N, D], `value` is [D] and shared by the streams.
    """
    n, width = streams.shape
    result = streams.copy()
    for s in range(n):
        d = np.sum(streams[s] * q_weight[s] * k_weight[s] * key[s])
        d = d / np.sqrt(np.mean(streams[s] ** 2) + eps) / np.sqrt(np.mean(key[s] ** 2) + eps) / np.sqrt(width)
        gate = sigmoid(math.copysign(math.sqrt(max(abs(d), 1e-6)), d))
        result[s] = streams[s] + gate * value
    return result
