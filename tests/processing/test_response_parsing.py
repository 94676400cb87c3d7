"""The response parser: public goldens, every way of cutting a stream, truncation, and what the prompt tells."""

import json
import random

import pytest

from processing_dsv4.chat_encoding import ChatOptions, render_conversation
from processing_dsv4.response_parsing import ResponseStart, ResponseStream, parse_text, read_prompt

from .conftest import golden_lines

CASES = golden_lines("parser_public.jsonl")
EOS = "<｜end▁of▁sentence｜>"
REASONING = ResponseStart("reasoning", thinking=True, parse_calls=True)
CONTENT = ResponseStart("content", parse_calls=True)


def block(*invokes):
    return "<｜DSML｜ calls>\n" + "".join(invokes) + "</｜DSML｜ calls>"


def invoke(name, *parameters):
    return f'<｜DSML｜ invoke name="{name}">\n' + "".join(parameters) + "</｜DSML｜ invoke>\n"


def parameter(name, value, is_text=True):
    kind = "true" if is_text else "false"
    return f'<｜DSML｜ parameter name="{name}" string="{kind}">{value}</｜DSML｜ parameter>\n'


def expected_message(case):
    message = json.loads(json.dumps(case["parsed"]))
    for call, decoded in zip(message.get("tool_calls", []), case["arguments_decoded"], strict=True):
        if decoded is not None:
            call["function"]["arguments"] = decoded
    return message


def in_chunks(text, start, sizes):
    stream = ResponseStream(start)
    events, position = [], 0
    while position < len(text):
        size = sizes()
        events += stream.feed(text[position : position + size])
        position += size
    message = stream.finalize()
    return message, events


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_goldens(case):
    start = read_prompt(case["prompt"], case["request"].get("tools"))
    assert start == read_prompt(case["prompt"])
    assert (start.parse_calls, start.json_output) == (case["parse_tool_calls"], case["parse_json_output"])
    assert start.thinking == (case["parse_start"] is not None)
    for output in (case["output"], case["output_with_eos"], case["output_with_eos"] + EOS + "junk"):
        assert parse_text(output, start) == expected_message(case)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_goldens_streamed(case):
    start = read_prompt(case["prompt"])
    assert in_chunks(case["output"], start, lambda: 1)[0] == expected_message(case)
    rng = random.Random(0)
    for _ in range(20):
        assert in_chunks(case["output_with_eos"], start, lambda: rng.randint(1, 9))[0] == expected_message(case)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_every_cut_into_two(case):
    start = read_prompt(case["prompt"])
    text = case["output_with_eos"]
    for cut in range(len(text) + 1):
        stream = ResponseStream(start)
        stream.feed(text[:cut])
        stream.feed(text[cut:])
        assert stream.finalize() == expected_message(case), cut


def test_events_add_up_to_the_message():
    text = "think</think>hello\n\n" + block(
        invoke("f", parameter("a", 'x"y'), parameter("n", "[1]", False)), invoke("g")
    )
    for size in (1, 3, 1000):
        message, events = in_chunks(text, REASONING, lambda size=size: size)
        joined = {kind: "".join(e.text for e in events if e.kind == kind) for kind in ("reasoning_content", "content")}
        assert joined == {"reasoning_content": "think", "content": "hello"}
        assert [e.text for e in events if e.kind == "tool_call"] == ["f", "g"]
        arguments = ["".join(e.text for e in events if e.kind == "arguments" and e.index == i) for i in (0, 1)]
        assert arguments == ['{"a": "x\\"y", "n": [1]}', "{}"]
        assert [c["function"]["arguments"] for c in message["tool_calls"]] == [{"a": 'x"y', "n": [1]}, {}]


def test_text_is_streamed_as_soon_as_it_is_certain():
    stream = ResponseStream(CONTENT)
    assert [event.text for event in stream.feed("Hello wor")] == ["Hello wor"]
    assert stream.feed("\n\n<") == []
    assert [event.text for event in stream.feed("b>")] == ["\n\n<b>"]


@pytest.mark.parametrize(
    ("start", "text", "content", "reasoning"),
    [
        (REASONING, "\n\n r \n\n</think>\n\n\nabc\n\n", "abc\n\n", " r "),
        (REASONING, "never closed\n\n", "", "never closed\n\n"),
        (REASONING, "abc</thi", "", "abc</thi"),
        (REASONING, "<think>r</think>a<think>b</think>c", "a<think>bc", "<think>r"),
        (REASONING, "", "", ""),
        (CONTENT, "\n\na", "a", None),
        (CONTENT, "</think>\n\nb", "\n\nb", None),
        (CONTENT, "a</think>b", "ab", None),
        (CONTENT, "hi\n\n<｜DSML｜ cal", "hi", None),
        (CONTENT, "hi\n\n<｜DSML", "hi\n\n<｜DSML", None),
        (CONTENT, "hi\n\n｜DSML｜ calls>", "hi\n\n｜DSML｜ calls>", None),
        (ResponseStart("content"), "<｜DSML｜ calls>", "<｜DSML｜ calls>", None),
        (ResponseStart("reasoning_continued", thinking=True), "\nx</think>\ny", "y", "\nx"),
        (ResponseStart("content_continued", thinking=True), "\nx", "\nx", ""),
        (ResponseStart("unknown"), "<think>r</think>a", "a", "r"),
        (ResponseStart("unknown"), "<thin", "<thin", None),
    ],
)
def test_text_fields(start, text, content, reasoning):
    for message in (parse_text(text, start), in_chunks(text, start, lambda: 1)[0]):
        assert message["content"] == content
        assert message.get("reasoning_content") == reasoning
        assert "tool_calls" not in message


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (invoke("f", parameter("a", "1")) + "text", [("f", {"a": "1"})]),
        (block(invoke("f")) + block(invoke("g")), [("f", {})]),
        (block("junk", invoke("f", "junk", parameter("a", "1"), "junk"), "junk"), [("f", {"a": "1"})]),
        (
            block(invoke("f", parameter("a", "ls 2>&1 < /dev/null && echo '</b>'"))),
            [("f", {"a": "ls 2>&1 < /dev/null && echo '</b>'"})],
        ),
        (block(invoke("f", parameter("a", " \n x "))), [("f", {"a": " \n x "})]),
        (block(invoke("f", parameter("a", "x</think>y"))), [("f", {"a": "x</think>y"})]),
        (block(invoke("f", parameter("a", "x</｜DSML｜ invoke>"))), [("f", {"a": "x"})]),
        (
            block(invoke("f", parameter("n", "2.50", False), parameter("b", "null", False))),
            [("f", {"n": 2.5, "b": None})],
        ),
        (block(invoke("f", parameter("n", "abc", False))), [("f", '{"n": abc}')]),
        (block(invoke("f", parameter("n", "NaN", False))), [("f", '{"n": NaN}')]),
        (block('<｜DSML｜ invoke name="f">\n<｜DSML｜ parameter name="a" string="true">1+'), [("f", '{"a": "1+"')]),
        (
            '<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n<｜DSML｜ parameter name="a" string="true">1+',
            [("f", '{"a": "1+')],
        ),
        ('<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n', [("f", "")]),
        ('<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>', [("f", {})]),
    ],
)
def test_tool_calls(text, calls):
    for message in (parse_text(text, CONTENT), in_chunks(text, CONTENT, lambda: 1)[0]):
        found = [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
        assert found == calls
        assert message["content"] == ""


def test_calls_without_invoke_give_nothing():
    assert parse_text("hi\n\n<｜DSML｜ calls>\nabc", CONTENT) == {"role": "assistant", "content": "hi"}


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ('{"a": 1}', '{"a": 1}'),
        ('x{"a": 1}y', ' {"a": 1}y'),
        ('a ```json\n{"a":1}\n``` b ```json\n{"b":2}\n``` c', ' {"a":1} '),
        ("text only", " "),
        ('{"a": "</think>"}', '{"a": "</think>"}'),
        ('\n\n{"a":1}\n\n', '{"a":1}\n\n'),
        ("```json\nabc\n```", "abc"),
        ("```jso", " "),
    ],
)
def test_json_answers(text, content):
    start = ResponseStart("content", json_output=True)
    assert parse_text(text, start)["content"] == in_chunks(text, start, lambda: 1)[0]["content"] == content


USER = {"role": "user", "content": "json"}
TOOLS = [{"type": "function", "function": {"name": "f"}}]
ANSWER = {"role": "assistant", "content": "abc", "reasoning_content": "r"}


@pytest.mark.parametrize("version", ["v41", "v4"])
@pytest.mark.parametrize(
    ("messages", "tools", "options", "start"),
    [
        ([USER], None, {}, ResponseStart("reasoning", True)),
        ([USER], TOOLS, {}, ResponseStart("reasoning", True, True)),
        ([USER], TOOLS, {"tool_choice": "none"}, ResponseStart("reasoning", True)),
        ([USER], None, {"enable_thinking": False}, ResponseStart("content")),
        ([USER], TOOLS, {"enable_thinking": False, "tool_choice": "required"}, ResponseStart("calls", False, True)),
        ([USER], None, {"response_format": {"type": "json_object"}}, ResponseStart("reasoning", True, False, True)),
        ([USER, ANSWER], None, {"continue_final_message": True}, ResponseStart("content_continued", True)),
        (
            [USER, {**ANSWER, "content": ""}],
            None,
            {"continue_final_message": True},
            ResponseStart("reasoning_continued", True),
        ),
        (
            [{"role": "user", "content": "<｜Assistant｜><think>"}],
            None,
            {"enable_thinking": False},
            ResponseStart("content"),
        ),
    ],
)
def test_what_a_prompt_tells(version, messages, tools, options, start):
    options = {"add_generation_prompt": "continue_final_message" not in options, **options}
    prompt = render_conversation(messages, tools, ChatOptions(**options), version).text
    assert read_prompt(prompt) == start


def test_what_the_end_of_a_prompt_tells():
    assert read_prompt("") == ResponseStart("unknown", parse_calls=True)
    assert read_prompt("<｜Assistant｜><think>", TOOLS) == ResponseStart("reasoning", True, True)
    assert read_prompt("<｜Assistant｜></think>") == ResponseStart("content")
    assert read_prompt("<｜Assistant｜></think>", []) == ResponseStart("content")


def test_misuse():
    with pytest.raises(ValueError, match=r"start\.state"):
        ResponseStream(ResponseStart("thinking"))
    stream = ResponseStream(CONTENT)
    with pytest.raises(TypeError, match="text"):
        stream.feed([1, 2])
    assert stream.finalize() == stream.finalize() == {"role": "assistant", "content": ""}
    with pytest.raises(ValueError, match="finalize"):
        stream.feed("x")
