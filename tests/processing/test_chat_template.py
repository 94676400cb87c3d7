"""The Jinja templates give the string of the Python renderer wherever they can."""

import random

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from processing_dsv4.chat_encoding import ChatOptions, render_conversation
from processing_dsv4.chat_template import build_chat_template

from . import conversations
from .conftest import golden_lines

TEMPLATES = {version: build_chat_template(version) for version in ("v41", "v4")}
# What a template cannot express (listed at the top of chat_template.py): id -> why.
NOT_EXPRESSIBLE = {
    "pub-v41-051": "strict tools are shown as they are",
    "pub-v4-062": "V4 prints 1e-05 as 0.00001",
}


def jinja(messages, tools, version, **options):
    rendered, spans = render_jinja_template([messages], tools=tools, chat_template=TEMPLATES[version], **options)
    return rendered[0], spans


@pytest.mark.parametrize("case", golden_lines("prompts_public.jsonl"), ids=lambda case: case["id"])
def test_goldens(case):
    hf = case["hf"]
    text, _ = jinja(hf["messages"], hf["tools"], case["version"], **hf["kwargs"])
    assert (text == case["prompt"]) == (case["id"] not in NOT_EXPRESSIBLE)


def _expressible(body: dict) -> bool:
    """Whether a template can render this request: no strict tools, and (V4) no floats that it prints its own way."""
    if any(tool["function"].get("strict") for tool in body.get("tools") or []):
        return False
    return body["model"] != "DeepSeek-V4-Pro" or not any(text in repr(body) for text in ("e-0", "1e-6"))


def _as_template_input(messages: list[dict]) -> list[dict]:
    """Arguments as dicts where they are JSON objects, as transformers' users write them."""
    from processing_dsv4.conversation import _object_or_text

    out = []
    for message in messages:
        if message.get("tool_calls"):
            calls = [
                {**c, "function": {**c["function"], "arguments": _object_or_text(c["function"]["arguments"])}}
                for c in message["tool_calls"]
            ]
            message = {**message, "tool_calls": calls}
        out.append({key: value for key, value in message.items() if value is not None})
    return out


@pytest.mark.parametrize("version", ["v41", "v4"])
def test_generated_conversations(version):
    compared = 0
    for seed in range(400):
        body = conversations.request(random.Random(seed), version)
        messages, tools, options = conversations.to_transformers(body)
        if options["continue_final_message"] or not _expressible(body):
            continue
        try:
            expected = render_conversation(messages, tools, ChatOptions(**options), version).text
        except ValueError:
            continue
        text, _ = jinja(_as_template_input(messages), tools, version, **options)
        assert text == expected, seed
        compared += 1
    assert compared > 150


def _continuations():
    for version in ("v41", "v4"):
        for first in (True, False):
            for thinking in (True, False):
                yield version, "content", thinking, first
            # transformers refuses to continue a reasoning that the prompt does not show.
            if version == "v4" or not first:
                yield version, "reasoning_content", True, first


@pytest.mark.parametrize(("version", "field", "thinking", "first"), list(_continuations()))
def test_continuation(version, field, thinking, first):
    last = {"role": "assistant", "content": "so far " if field == "content" else "", "reasoning_content": "r "}
    messages = [last] if first else [{"role": "user", "content": "x"}, last]
    options = {"continue_final_message": field, "enable_thinking": thinking}
    expected = render_conversation(messages, None, ChatOptions(**options), version).text
    assert jinja(messages, None, version, **options)[0] == expected


@pytest.mark.parametrize("keep", [True, False])
def test_reasoning_of_a_finished_conversation(keep):
    user = {"role": "user", "content": "x"}
    for answer in ({"content": "a", "reasoning_content": "r"}, {"content": "a"}):
        messages = [
            user,
            {"role": "assistant", "content": "0", "reasoning_content": "r0"},
            user,
            {"role": "assistant", **answer},
        ]
        options = {"keep_last_reasoning": keep}
        expected = render_conversation(messages, None, ChatOptions(**options)).text
        assert jinja(messages, None, "v41", **options)[0] == expected
        assert ("<think>" in expected) == keep


def test_generation_blocks_cover_what_the_renderer_marks():
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "c", "reasoning_content": "r", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "z"},
        {"role": "assistant", "content": "done"},
    ]
    tools = [{"type": "function", "function": {"name": "f"}}]
    text, spans = jinja(messages, tools, "v41", return_assistant_tokens_mask=True)
    pieces = render_conversation(messages, tools, ChatOptions()).pieces
    marked, position = [], 0
    for piece in pieces:
        if piece.generated:
            marked.extend(range(position, position + len(piece.text)))
        position += len(piece.text)
    assert [at for start, end in spans[0] for at in range(start, end)] == marked


def test_refusals():
    for messages in (
        [{"role": "developer", "content": "x"}],
        [{"role": "user", "content": [{"type": "audio"}]}],
        [{"role": "assistant", "content": [{"type": "image"}]}],
    ):
        with pytest.raises(Exception, match="unknown role|must be of type|not supported"):
            jinja(messages, None, "v41")
    with pytest.raises(Exception, match="reasoning_effort"):
        jinja([{"role": "user", "content": "x"}], None, "v41", reasoning_effort="huge")
    with pytest.raises(ValueError, match="version"):
        build_chat_template("v5")
