"""The Python renderer against the public goldens, and the rules that they do not reach."""

import pytest

from processing_dsv4.chat_encoding import ChatOptions, PromptPiece, effort_line, render_conversation
from processing_dsv4.prompt_constants import V4_FORMAT, V41_FORMAT

from .conftest import golden_lines

PROMPTS = golden_lines("prompts_public.jsonl")
ERRORS = golden_lines("prompt_errors_public.jsonl")
USER = {"role": "user", "content": "x"}


def render(messages, tools=None, version="v41", **options):
    return render_conversation(messages, tools, ChatOptions(**options), version)


def body(messages, tools=None, version="v41", **options):
    """The prompt without its first token and, in thinking, without the effort line."""
    text = render(messages, tools, version, **{"enable_thinking": False, **options}).text
    return text.removeprefix("<｜begin▁of▁sentence｜>")


@pytest.mark.parametrize("case", PROMPTS, ids=lambda case: case["id"])
def test_golden_prompts(case):
    wanted = (case["prompt"], [tuple(span) for span in case["special_ranges"]])
    hf = case["hf"]
    prompt = render(hf["messages"], hf["tools"], case["version"], **hf["kwargs"])
    assert (prompt.text, prompt.special_ranges) == wanted
    # The same request in the format of OpenAI: arguments as JSON texts, images as image_url.
    messages = [{k: v for k, v in message.items() if k != "prefix"} for message in case["request"]["messages"]]
    prompt = render(messages, case["request"].get("tools"), case["version"], **hf["kwargs"])
    assert (prompt.text, prompt.special_ranges) == wanted
    details = [part.detail for part in prompt.images]
    assert details == case.get("image_details", [])


@pytest.mark.parametrize("case", ERRORS, ids=lambda case: case["id"])
def test_golden_errors(case):
    hf = case["hf"]
    with pytest.raises((ValueError, TypeError)):
        render(hf["messages"], hf["tools"], case["version"], **hf["kwargs"])


def test_pieces_are_marked():
    pieces = render([USER, {"role": "assistant", "content": "<｜User｜><｜ref｜>"}], enable_thinking=False).pieces
    assert pieces[-5:] == (
        PromptPiece("<｜Assistant｜>", True, False),
        PromptPiece("</think>", True, False),
        PromptPiece("<｜User｜>", False, True),
        PromptPiece("<｜ref｜>", True, True),
        PromptPiece("<｜end▁of▁sentence｜>", True, True),
    )


def test_reminders_in_a_row():
    reminders = [{"role": "latest_reminder", "content": text} for text in "abc"]
    assert body([USER, *reminders, USER]) == "<｜User｜>x<｜latest_reminder｜>a<｜User｜>x"
    assert body([USER, *reminders], version="v4") == (
        "<｜User｜>x<｜latest_reminder｜>a<｜latest_reminder｜>b<｜latest_reminder｜>c"
    )


def test_empty_user_messages():
    empty = {"role": "user", "content": ""}
    assert body([empty, USER, empty]) == "<｜User｜>\n\nx\n\n"
    assert body([empty, USER, empty, USER], version="v4") == "<｜User｜>x\n\nx"
    assert body([empty, empty], version="v4") == "<｜User｜>"


def test_nothing_but_empty_system_messages():
    empty = {"role": "system", "content": ""}
    assert render([empty, empty], add_generation_prompt=True).text == "<｜begin▁of▁sentence｜><｜Assistant｜><think>"


@pytest.mark.parametrize("generation_prompt", [False, True])
@pytest.mark.parametrize("last", ["user", "assistant", "system"])
@pytest.mark.parametrize("thinking", [False, True])
def test_generation_prompt(generation_prompt, last, thinking):
    """The header of an answer is there exactly if it was asked for, whatever the last message is."""
    messages = [USER, {"role": last, "content": "y"}]
    text = render(messages, add_generation_prompt=generation_prompt, enable_thinking=thinking).text
    header = "<｜Assistant｜>" + ("<think>" if thinking else "</think>")
    assert text.endswith(header) == generation_prompt


def test_continuation():
    last = {"role": "assistant", "content": "so far ", "reasoning_content": "r"}
    open_ = dict(continue_final_message=True)
    assert body([USER, last], **open_).endswith("<｜Assistant｜></think>so far ")
    assert body([USER, last], enable_thinking=True, **open_).endswith("<｜Assistant｜><think>r</think>so far ")
    reasoning = dict(continue_final_message="reasoning_content", enable_thinking=True)
    assert body([USER, {**last, "content": ""}], **reasoning).endswith("<｜Assistant｜><think>r")
    assert body([USER, {"role": "assistant", "content": ""}], enable_thinking=True, **open_).endswith("<think>")
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    history = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "a", "content": "z"}]
    for messages, options, match in [
        ([last, USER], {}, "assistant message at the end"),
        ([USER, last], {"add_generation_prompt": True}, "exclude"),
        ([USER, *history, last], {}, "tool"),
        ([{"role": "user", "content": "json"}, last], {"response_format": {"type": "json_object"}}, "json_object"),
    ]:
        with pytest.raises(ValueError, match=match):
            render(messages, **open_, **options)
    with pytest.raises(ValueError, match="continue_final_message"):
        render([USER, last], continue_final_message="thoughts")
    with pytest.raises(ValueError, match="prefix"):
        render([USER, {**last, "prefix": True}])


def test_history_of_reasoning():
    messages = [
        USER,
        {"role": "assistant", "content": "1", "reasoning_content": "first"},
        USER,
        {"role": "assistant", "content": "2", "reasoning_content": "second"},
    ]
    tools = [{"type": "function", "function": {"name": "f"}}]
    plain = render(messages).text
    assert "first" not in plain and "second" not in plain
    kept = render(messages, keep_last_reasoning=True).text
    assert "first" not in kept and kept.endswith("<think>second</think>2<｜end▁of▁sentence｜>")
    both = render(messages, tools).text
    assert "<think>first</think>1" in both and "<think>second</think>2" in both
    none = render(messages, tools, tool_choice="none").text
    assert "first" not in none and "## Tools" not in none
    assert "first" not in render(messages, tools, enable_thinking=False, keep_last_reasoning=True).text


@pytest.mark.parametrize(
    ("effort", "number"),
    [(None, 75), ("minimal", 50), ("low", 50), ("medium", 75), ("xhigh", 75), ("max", 100), ("ultra", 100)]
    + [(1, 1), (42, 42), (100, 100), ("7", 7), (50.0, 50)],
)
def test_efforts(effort, number):
    assert effort_line(effort, V41_FORMAT).startswith(f"Reasoning Effort: {number} (range")
    if isinstance(effort, str) and not effort.isdecimal():
        assert f"Reasoning Effort: {number} " in render([USER], reasoning_effort=effort).text


@pytest.mark.parametrize("effort", ["LOW", "", "auto", 0, 101, 1.5, True, "0", "101", "-1", [], {}])
def test_refused_efforts(effort):
    with pytest.raises(ValueError, match="reasoning_effort"):
        render([USER], reasoning_effort=effort)


def test_efforts_of_v4():
    assert effort_line("low", V4_FORMAT) == effort_line("minimal", V4_FORMAT) == ""
    with pytest.raises(ValueError, match="reasoning_effort"):
        effort_line(50, V4_FORMAT)


def test_thinking_switch():
    assert render([USER], reasoning_effort="none", add_generation_prompt=True).text.endswith("</think>")
    both = render([USER], reasoning_effort="none", enable_thinking=True, add_generation_prompt=True).text
    assert "Effort: 75" in both and both.endswith("<think>")
    with pytest.raises(ValueError, match="enable_thinking"):
        render([USER], enable_thinking="yes")


@pytest.mark.parametrize("choice", ["always", {}, {"type": "x"}, {"type": "function", "name": "f"}, True, 3, ["auto"]])
def test_refused_tool_choices(choice):
    with pytest.raises(ValueError, match="tool_choice"):
        render([USER], [{"type": "function", "function": {"name": "f"}}], enable_thinking=False, tool_choice=choice)


def test_tool_choice_without_tools_has_no_effect():
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        assert body([USER], tool_choice=choice, add_generation_prompt=True) == "<｜User｜>x<｜Assistant｜></think>"


def test_named_tool_choice():
    tools = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
    named = {"type": "function", "function": {"name": "g"}}
    text = body([USER], tools, tool_choice=named, add_generation_prompt=True)
    assert '"name": "g"' in text and '"name": "f"' not in text and text.endswith("</think>\n\n<｜DSML｜ calls>\n")
    with pytest.raises(ValueError, match="'h'"):
        body([USER], tools, tool_choice={"type": "function", "function": {"name": "h"}})


@pytest.mark.parametrize(
    "response_format",
    [
        "json_object",
        {},
        {"type": "xml"},
        {"type": "regex"},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "a"}},
        {"type": "json_schema", "json_schema": {"name": 3, "schema": {}}},
        {"type": "json_schema", "json_schema": {"strict": "yes", "schema": {}}},
    ],
)
def test_refused_response_formats(response_format):
    with pytest.raises(ValueError, match="response_format"):
        render([USER], response_format=response_format)


def test_response_formats_that_the_prompt_does_not_mention():
    for response_format in (None, {"type": "text"}, {"type": "regex", "regex": "a+"}):
        assert body([USER], response_format=response_format) == "<｜User｜>x"


def test_strict_tools_and_response_format_exclude_each_other():
    tools = [{"type": "function", "function": {"name": "f", "strict": True}}]
    with pytest.raises(ValueError, match="strict"):
        render([USER], tools, response_format={"type": "text"})
    assert "## Tools" not in render([USER], tools, response_format={"type": "text"}, tool_choice="none").text


def test_shell_arguments_stay_text():
    call = {"id": "a", "type": "function", "function": {"name": "sh", "arguments": {"cmd": "ls 2>&1 </dev/null"}}}
    result = {"role": "tool", "tool_call_id": "a", "content": "ok"}
    assert 'string="true">ls 2>&1 </dev/null</｜DSML｜ parameter>' in body(
        [{"role": "assistant", "tool_calls": [call]}, result]
    )


def test_versions():
    with pytest.raises(ValueError, match="version"):
        render([USER], version="v5")
