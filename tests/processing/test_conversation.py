"""Messages in the formats of transformers and OpenAI: what is accepted, what is refused, how it is normalised."""

import pytest

from processing_dsv4.conversation import ImagePart, normalize_messages

USER = {"role": "user", "content": "x"}


def call(call_id="a", name="f", arguments="{}", **rest):
    ident = {} if call_id is None else {"id": call_id}
    return {**ident, "type": "function", "function": {"name": name, "arguments": arguments}, **rest}


def calling(*calls, **rest):
    return {"role": "assistant", "content": "", "tool_calls": list(calls), **rest}


def result(call_id="a", content="z"):
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def test_contents():
    turns = normalize_messages(
        [
            {"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": ""}]},
            {"role": "user", "content": [], "name": "ignored"},
            {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": [call()]},
            result(),
            {"role": "latest_reminder", "content": "now"},
        ]
    )
    assert [turn.parts for turn in turns] == [("a", ""), (), (), ("z",), ("now",)]
    assert turns[2].reasoning == "r"


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_names_of_reasoning(key):
    assert normalize_messages([{"role": "assistant", "content": "a", key: "r"}])[0].reasoning == "r"


def test_images():
    parts = [
        {"type": "image", "image": b"1", "detail": "low"},
        {"type": "image", "path": "p.png"},
        {"type": "image"},
        {"type": "image_url", "image_url": {"url": "https://a/b.png", "detail": None}},
        {"type": "image_url", "image_url": "data:image/png;base64,AA"},
    ]
    assert normalize_messages([{"role": "user", "content": parts}])[0].parts == (
        ImagePart(b"1", "low"),
        ImagePart("p.png", "high"),
        ImagePart(None, "high"),
        ImagePart("https://a/b.png", "high"),
        ImagePart("data:image/png;base64,AA", "high"),
    )


@pytest.mark.parametrize(
    "part",
    [
        "a",
        {"text": "a"},
        {"type": "audio"},
        {"type": "text", "text": None},
        {"type": "image", "image": "a.png", "url": "https://a/b.png"},
        {"type": "image", "image": "a.png", "detail": "huge"},
        {"type": "image_url", "image_url": {"url": ""}},
        {"type": "image_url", "image_url": {"url": "ftp://a/b.png"}},
        {"type": "image_url", "image_url": {"url": "/etc/passwd"}},
        {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
        {"type": "image_url"},
    ],
)
def test_refused_parts(part):
    with pytest.raises(ValueError, match=r"messages\[0\]\['content'\]\[0\]"):
        normalize_messages([{"role": "user", "content": [part]}])


@pytest.mark.parametrize(
    "bad",
    [
        [],
        [{"content": "x"}],
        [{"role": "developer", "content": "x"}],
        [{"role": "user"}],
        [{"role": "user", "content": 3}],
        [{"role": "latest_reminder", "content": [{"type": "text", "text": "a"}]}],
        [{"role": "assistant"}],
        [{"role": "assistant", "content": None, "reasoning_content": "r"}],
        [{"role": "assistant", "content": "x", "reasoning_content": 3}],
        [{"role": "assistant", "content": "x", "tool_calls": []}],
        [{"role": "assistant", "content": [{"type": "image", "image": "x"}]}],
        [{"role": "user", "content": "\ud800"}],
        [{"role": "assistant", "content": "a", "reasoning_content": "\udfff"}],
    ],
)
def test_refused_messages(bad):
    with pytest.raises(ValueError, match="messages"):
        normalize_messages(bad)


def test_refused_types():
    for bad in ("hello", None, [["a"]], ["hello"]):
        with pytest.raises(TypeError):
            normalize_messages(bad)


def test_arguments():
    texts = ['{"a": 1}', "", "[1]", '{"a": NaN}', '{"a": "\\ud800"}', {"b": (1, 2.5)}]
    message = calling(*(call(str(index), arguments=text) for index, text in enumerate(texts)))
    turns = normalize_messages([message, *(result(str(index)) for index in range(len(texts)))])
    expected = [{"a": 1}, "", "[1]", '{"a": NaN}', '{"a": "\\ud800"}', {"b": [1, 2.5]}]
    assert [item.arguments for item in turns[0].calls] == expected


@pytest.mark.parametrize(
    "bad",
    [
        {"id": "a", "function": {"name": "f", "arguments": "{}"}},
        {"id": "a", "type": "custom"},
        {"id": "a", "type": "function", "function": {"arguments": "{}"}},
        {"id": "a", "type": "function", "function": {"name": "f"}},
        {"id": "a", "type": "function", "function": {"name": "f", "arguments": [1]}},
        {"id": 3, "type": "function", "function": {"name": "f", "arguments": "{}"}},
        {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"x": float("nan")}}},
    ],
)
def test_refused_calls(bad):
    with pytest.raises(ValueError, match="tool_calls"):
        normalize_messages([calling(bad), result()])


def test_results_are_sorted_into_the_order_of_the_calls():
    turns = normalize_messages([calling(call("a"), call("b"), call("c")), result("c"), result("a"), result("b"), USER])
    assert [turn.call_id for turn in turns] == [None, "a", "b", "c", None]


def test_calls_without_ids_as_transformers_writes_them():
    calls = calling(call(None, "f"), call(None, "g"))
    turns = normalize_messages(
        [calls, {"role": "tool", "content": "1"}, {"role": "tool", "name": "g", "content": "2"}]
    )
    assert [turn.parts for turn in turns[1:]] == [("1",), ("2",)]


def test_an_example_may_end_in_calls():
    messages = [USER, calling(call("a"), call("b"))]
    assert len(normalize_messages(messages, may_end_in_calls=True)[1].calls) == 2
    for bad in ([*messages, result("a")], [*messages, USER]):
        with pytest.raises(ValueError, match="fewer tool messages"):
            normalize_messages(bad, may_end_in_calls=True)


@pytest.mark.parametrize(
    "bad",
    [
        [USER, result()],
        [calling(call())],
        [calling(call()), USER],
        [calling(call()), USER, result()],
        [calling(call("a"), call("b")), result("a")],
        [calling(call("a"), call("b")), result("a"), {"role": "system", "content": ""}, result("b")],
        [calling(call()), result("b")],
        [calling(call()), result(), result()],
        [calling(call("a"), call("a")), result("a"), result("a")],
        [calling(call("a"), call("b")), result("a"), result("a")],
        [calling(call()), {"role": "tool", "content": "z"}],
        [calling(call(None)), result()],
        [calling(call("a"), call(None)), result("a"), {"role": "tool", "content": "z"}],
    ],
)
def test_calls_and_results_that_do_not_belong_together(bad):
    with pytest.raises(ValueError, match=r"messages\[\d\]"):
        normalize_messages(bad)
