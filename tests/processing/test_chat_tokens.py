"""The tokenizer of V4.1: the nine entries, the settings for chat, exact encoding, and transformers' own parser."""

import copy
import hashlib
import json
import pickle

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from processing_dsv4 import Dsv41Processor
from processing_dsv4.chat_encoding import PromptPiece
from processing_dsv4.chat_template import build_chat_template
from processing_dsv4.chat_tokens import V41_ADDED_TOKENS, PieceEncoder, prepare_tokenizer, v41_tokenizer_json
from processing_dsv4.prompt_constants import CHAT_CONTROL_TOKENS

from .conftest import golden_lines

# Published digest of the released V4.1 tokenizer.json.
V41_SHA256 = "c90dfa01249db1be4245780a052ede752e1361c612ac6d08e2bdada7d599476b"


def entries(folder) -> dict:
    tokens = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    return {token["id"]: token for token in tokens}


def test_the_patched_file_is_the_released_one(released_folder):
    assert hashlib.sha256((released_folder / "tokenizer.json").read_bytes()).hexdigest() == V41_SHA256


def test_exactly_nine_entries_change(released_folder, v4_tokenizer_folder):
    before, after = entries(v4_tokenizer_folder), entries(released_folder)
    assert {i for i in before if before[i] != after[i]} == set(V41_ADDED_TOKENS)
    assert len(V41_ADDED_TOKENS) == 9 and set(before) == set(after)


def test_other_files_are_refused(released_folder):
    for text in ("{}", (released_folder / "tokenizer.json").read_text(encoding="utf-8")):
        with pytest.raises(ValueError, match="V4"):
            v41_tokenizer_json(text)


def test_a_v4_tokenizer_is_upgraded_and_saved(tmp_path, released_folder, v4_tokenizer_folder):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(v4_tokenizer_folder)
    Dsv41Processor(tokenizer=tokenizer).save_pretrained(tmp_path)
    assert entries(tmp_path) == entries(released_folder)
    saved = AutoTokenizer.from_pretrained(tmp_path)
    assert (saved.pad_token, saved.pad_token_id) == ("<｜▁pad▁｜>", 2) and saved.eos_token_id == 1
    assert saved.padding_side == "left"
    assert saved.chat_control_tokens == list(CHAT_CONTROL_TOKENS)
    assert saved.response_template["version"] == 1
    assert saved.chat_template == build_chat_template("v41")
    assert saved.convert_tokens_to_ids("<｜deepseek_image｜>") == 129264


def test_v4_keeps_its_entries(v4_processor, v4_tokenizer_folder):
    assert "<｜image2｜>" in v4_processor.tokenizer.get_vocab()
    assert v4_processor.tokenizer.chat_template == build_chat_template("v4")


def test_what_a_tokenizer_states_stays(released_folder):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(
        released_folder, padding_side="right", pad_token="<｜▁pad▁｜>", chat_template="x", chat_control_tokens=["a"]
    )
    prepare_tokenizer(tokenizer, "v41")
    assert (tokenizer.padding_side, tokenizer.chat_template, tokenizer.chat_control_tokens) == ("right", "x", ["a"])


def test_template_alone(released_folder, processor):
    """`tokenizer.apply_chat_template` works without the processor, and safely when asked to."""
    messages = [{"role": "user", "content": "hi <｜User｜>"}]
    text = processor.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == processor.apply_chat_template(messages, add_generation_prompt=True)
    ids = processor.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, sanitize_control_tokens=True, return_dict=False
    )
    assert ids.count(128803) == 1


@pytest.mark.parametrize(
    "spelling", [*CHAT_CONTROL_TOKENS, "<|place_holder_mm_span_0436|>", "<｜place▁holder▁no▁7｜>"]
)
def test_spellings_in_text_stay_text(processor, spelling):
    encoder = processor._encoder
    added = set(processor.tokenizer.get_added_vocab().values())
    ids, _ = encoder.encode([PromptPiece(f"a{spelling}b")])
    assert not added & set(ids)
    assert processor.tokenizer.decode(ids) == f"a{spelling}b"
    ids, _ = encoder.encode([PromptPiece(spelling, token=True)])
    assert ids == [processor.tokenizer.convert_tokens_to_ids(spelling)]


def test_text_between_tokens_is_encoded_as_one(processor):
    encoder = processor._encoder
    ids, marks = encoder.encode(
        [PromptPiece("hel"), PromptPiece("lo"), PromptPiece("<think>", True, True), PromptPiece("x", False, True)]
    )
    assert ids[:-2] == encoder.encode_text("hello") and marks == [0] * (len(ids) - 2) + [1, 1]


def test_missing_tokens_become_text():
    tokenizer = _tiny_tokenizer()
    ids, marks = PieceEncoder(tokenizer).encode(
        [PromptPiece("a"), PromptPiece("<think>", True), PromptPiece("b", False, True)]
    )
    assert tokenizer.decode(ids) == "a<think>b" and marks[-1] == 1 and sum(marks) == 1


def _tiny_tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def test_copies_and_pickles():
    processor = Dsv41Processor(tokenizer=_tiny_tokenizer())
    pieces = [PromptPiece("<｜User｜>", True), PromptPiece("hello")]
    expected = processor._encoder.encode(pieces)
    assert copy.deepcopy(processor)._encoder.encode(pieces) == expected
    pickled = pickle.dumps(processor)
    assert pickle.loads(pickled)._encoder.encode(pieces) == expected
    # The copy of the tokenizer is made again where it is needed, and not sent along.
    assert len(pickled) < 1.5 * len(pickle.dumps(processor.tokenizer)) + 20000


# Goldens that transformers' own parser cannot reproduce, and why.
BEYOND_THE_TEMPLATE = {
    "call_inside_thinking": "it trims the spaces around reasoning",
    "truncated_string_arg": "it drops unfinished parameters",
    "invalid_json_arg": "it decodes every parameter by itself",
    "tools_not_declared": "it does not know that no tools are active",
    "stray_think_end": "it keeps stray think tags",
    "prefix_content": "it returns the prefilled text too",
    "prefix_reasoning": "it returns the prefilled text too",
    "json_object_fenced": "it does not free JSON from the text around it",
}


@pytest.mark.parametrize("case", golden_lines("parser_public.jsonl"), ids=lambda case: case["name"])
def test_response_template(case, processors):
    tokenizer = processors[case["version"]].tokenizer
    found = tokenizer.parse_response(case["output_with_eos"], prefix=case["prompt"])
    expected = {key: value for key, value in case["parsed"].items() if value or key == "content"}
    for call, decoded in zip(expected.get("tool_calls", []), case["arguments_decoded"], strict=True):
        call["function"]["arguments"] = decoded
    assert (found == expected) == (case["name"] not in BEYOND_THE_TEMPLATE)
