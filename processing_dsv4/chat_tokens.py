"""The tokenizer of V4.1: its nine own entries, its settings for chat, and exact encoding of marked prompts.

V4.1 uses the tokenizer of V4 with nine entries of its added vocabulary renamed; ids and everything else are the same.
"""

import json
import re

from .chat_template import build_chat_template
from .prompt_constants import ASSISTANT, CHAT_CONTROL_TOKENS, DSML, EOS, IMAGE, PAD, SYSTEM, THINK, THINK_END


def _entry(content: str, normalized: bool, special: bool) -> dict:
    return {
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": normalized,
        "special": special,
    }


# id -> (spelling in V4, entry in V4.1)
V41_ADDED_TOKENS = {
    128799: ("<｜place▁holder▁no▁799｜>", _entry(SYSTEM, True, False)),
    129264: ("<｜image2｜>", _entry(IMAGE, False, False)),
    129265: ("<｜/table>｜", _entry("<|place_holder_mm_span_0436|>", False, False)),
    129266: ("<｜table｜>", _entry("<|place_holder_mm_span_0437|>", False, False)),
    129267: ("<｜/td｜>", _entry("<|place_holder_mm_span_0438|>", False, False)),
    129268: ("<｜td｜>", _entry("<|place_holder_mm_span_0439|>", False, False)),
    129269: ("<｜/tr｜>", _entry("<|place_holder_mm_span_0440|>", False, False)),
    129270: ("<｜tr｜>", _entry("<|place_holder_mm_span_0441|>", False, False)),
    129279: ("<｜image｜>", _entry("<|place_holder_mm_span_0442|>", False, True)),
}

# transformers' own parser, for pipelines and servers that know nothing of `Dsv41Processor.parse_response`. It covers
# the plain cases: reasoning, an answer, tool calls. It does not know whether tools are active, it keeps stray think
# tags, and it drops what is cut off. A string parameter is matched with its delimiters, which the JSON parser then
# takes for the quotes of a string; other parameters are JSON.
_PARAMETER_END = rf"</{DSML} ?parameter"
RESPONSE_TEMPLATE = {
    "version": 1,
    "start_anchor": [ASSISTANT + THINK_END, ASSISTANT],
    "defaults": {"role": "assistant", "content": ""},
    "fields": {
        "reasoning_content": {
            "open": THINK,
            "close_pattern": rf"{THINK_END}|{re.escape(EOS)}|(?=<{DSML})",
            "content": "text",
        },
        "content": {"close": EOS, "content": "text"},
        "tool_calls": {
            "open_pattern": rf'\s*(?:<{DSML} ?(?:tool_)?calls>\s*)?<{DSML} ?invoke name="(?P<name>[^"]*)">',
            "close_pattern": rf"</{DSML} ?invoke>(?:\s*</{DSML} ?(?:tool_)?calls>.*)?",
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": (
                    rf'<{DSML} ?parameter name="(?P<key>[^"]*)" string="'
                    rf'(?:false">(?P<value>.*?){_PARAMETER_END}>|(?P<value>true">.*?{_PARAMETER_END})>)'
                ),
                "value_parser": {
                    "name": "json",
                    "args": {
                        "string_delims": [['true">', f"</{DSML} parameter"], ['true">', f"</{DSML}parameter"]],
                        "allow_non_json": True,
                    },
                },
            },
            "repeats": True,
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}


def v41_tokenizer_json(v4_json: str) -> str:
    """Turn the tokenizer.json of V4 into that of V4.1.

    Args:
        v4_json (`str`): the text of the V4 file, as released.

    Returns:
        `str`: the text of the V4.1 file: byte for byte the released one if `v4_json` is the released V4 file.

    Raises:
        ValueError: if one of the nine entries is not in the text.
    """
    text = v4_json
    for token_id, (old, entry) in V41_ADDED_TOKENS.items():
        start = text.find(f'"id": {token_id},')
        end = text.find("}", start)
        if start < 0 or json.dumps(old, ensure_ascii=False) not in text[start:end]:
            raise ValueError(f"this is not the tokenizer.json of V4: it has no added token {old!r} with id {token_id}")
        lines = [f'"id": {token_id}'] + [
            f"{json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}" for k, v in entry.items()
        ]
        text = text[:start] + ",\n      ".join(lines) + "\n    " + text[end:]
    return text.rstrip("\n") + "\n"


def prepare_tokenizer(tokenizer, version: str) -> None:
    """Set a tokenizer up for chat, in place.

    A tokenizer of V4 gets the nine V4.1 entries for V4.1. Padding becomes the pad token (id 2): the released
    configuration pads with the end of sentence, which training would then mask. Batches are padded on the left. What
    the tokenizer already states about its template, parser and control tokens stays.

    Args:
        tokenizer (`PreTrainedTokenizerFast`): the tokenizer of a checkpoint.
        version (`str`): `"v41"` or `"v4"`.
    """
    added = {token.content for token in tokenizer.added_tokens_decoder.values()}
    if version == "v41" and SYSTEM not in added and V41_ADDED_TOKENS[128799][0] in added:
        backend = tokenizer.backend_tokenizer
        tokenizer._tokenizer = type(backend).from_str(_upgraded(backend.to_str()))
        added = {token.content for token in tokenizer.added_tokens_decoder.values()}
    if PAD in added and tokenizer.pad_token in (None, tokenizer.eos_token):
        tokenizer.pad_token = PAD
    if "padding_side" not in tokenizer.init_kwargs:
        tokenizer.padding_side = tokenizer.init_kwargs["padding_side"] = "left"
    if tokenizer.chat_template is None:
        tokenizer.chat_template = build_chat_template(version)
    if tokenizer.chat_control_tokens is None:
        tokenizer.chat_control_tokens = [token for token in CHAT_CONTROL_TOKENS if token in added]
    if tokenizer.response_template is None:
        tokenizer.response_template = RESPONSE_TEMPLATE


def _upgraded(backend_json: str) -> str:
    data = json.loads(backend_json)
    for entry in data["added_tokens"]:
        if entry["id"] in V41_ADDED_TOKENS:
            entry.update(V41_ADDED_TOKENS[entry["id"]][1])
    return json.dumps(data, ensure_ascii=False)


class PieceEncoder:
    """Turns the pieces of a prompt into token ids: control tokens by name, text without the added vocabulary.

    Text between two control tokens is encoded in one call, whatever messages it came from, as the official encoder
    does. It goes through a copy of the tokenizer that has no added tokens, so no spelling in it can become one.
    """

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self._plain = None
        self._token_ids: dict[str, int | None] = {}

    def __deepcopy__(self, memo):
        # The copy of the tokenizer never changes, so copies of a processor may share it.
        return self

    def __getstate__(self):
        return {"tokenizer": self.tokenizer, "_plain": None, "_token_ids": {}}

    def encode_text(self, text: str) -> list[int]:
        """Encode `text` without the added vocabulary; returns token ids."""
        if self._plain is None:
            backend = self.tokenizer.backend_tokenizer
            data = json.loads(backend.to_str())
            data.update(added_tokens=[], post_processor=None, truncation=None, padding=None)
            self._plain = type(backend).from_str(json.dumps(data, ensure_ascii=False))
        return self._plain.encode(text, add_special_tokens=False).ids

    def encode(self, pieces) -> tuple[list[int], list[int]]:
        """Encode the pieces of a prompt.

        Args:
            pieces (iterable of `PromptPiece`): the prompt.

        Returns:
            `(list[int], list[int])`: token ids, and for each of them 1 if an assistant wrote it, else 0. A control
            token that the tokenizer does not have is encoded as text.
        """
        ids: list[int] = []
        written: list[int] = []
        run: list[str] = []
        generated = False

        def flush():
            if run:
                encoded = self.encode_text("".join(run))
                ids.extend(encoded)
                written.extend([int(generated)] * len(encoded))
                run.clear()

        for piece in pieces:
            token_id = self._token_id(piece.text) if piece.token else None
            # What an assistant wrote begins and ends at control tokens; only a tokenizer without them needs this cut.
            if token_id is not None or piece.generated != generated:
                flush()
            generated = piece.generated
            if token_id is None:
                run.append(piece.text)
            else:
                ids.append(token_id)
                written.append(int(generated))
        flush()
        return ids, written

    def _token_id(self, token: str) -> int | None:
        if token not in self._token_ids:
            vocabulary = self.tokenizer.get_added_vocab()
            self._token_ids[token] = vocabulary.get(token)
        return self._token_ids[token]
