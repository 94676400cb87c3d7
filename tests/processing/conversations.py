"""Random chat requests in the format of the official API, for the comparisons with the official toolkit.

The generator is a plain function of a seeded `random.Random`; hypothesis draws the seed, so a failing request is named
by one number and can be made again.
"""

import json
import random

SPELLINGS = [
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜System｜>",
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜▁pad▁｜>",
    "<｜latest_reminder｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
    "<｜DSML｜ calls>",
    "<｜deepseek_image｜>",
    "<｜image｜>",
    "<｜ref｜>cat<｜/ref｜>",
    "<｜box｜>[[1, 2, 3, 4]]<｜/box｜>",
    "<｜point｜>",
    "<｜/polygon｜>",
    "<|place_holder_mm_span_0436|>",
    "<｜place▁holder▁no▁7｜>",
    "<tool_result>",
    "</tool_result>",
]
PLAIN = [
    "hello",
    " ",
    "\n",
    "\n\n",
    "  two  spaces ",
    "json",
    "日本の首都",
    "Übersetzt é",
    "مرحبا",
    "🦀👍🏽",
    "1234567 3.14",
    "2>&1 | grep 'x' < y",
    '{"a": [1, 2.5e-7]}',
    "\t```python\nprint(1)\n```",
    "‮\u200b",
    "a\u0301",
    "\x00\x1f",
]
VALUES = [
    "text",
    "",
    "<｜User｜>",
    0,
    -3,
    1e-5,
    2.5e-7,
    1e16,
    0.1,
    100.0,
    True,
    False,
    None,
    [],
    {},
    [1, "a", None],
    {"k": {"é": 1e-6}},
]
NAMES = ["calc", "get_weather", "now", "a-b_9", "search"]


def text(rng: random.Random, allow_empty: bool = True) -> str:
    count = rng.choice([0, 1, 1, 2, 3, 5]) if allow_empty else rng.choice([1, 2, 3])
    return "".join(rng.choice(SPELLINGS if rng.random() < 0.3 else PLAIN) for _ in range(count))


def content(rng: random.Random, images: bool):
    if rng.random() < 0.6:
        return text(rng)
    parts = []
    for _ in range(rng.randint(0, 3)):
        if images and rng.random() < 0.4:
            detail = rng.choice([None, "low", "high", "original", "auto"])
            url = {"url": f"https://img.example/{rng.randint(0, 9)}.png"}
            parts.append({"type": "image_url", "image_url": {**url, **({"detail": detail} if detail else {})}})
        else:
            parts.append({"type": "text", "text": text(rng)})
    return parts


def schema(rng: random.Random, depth: int = 0) -> dict:
    kind = rng.choice(
        ["string", "integer", "number", "boolean", "array", "object"] if depth < 2 else ["string", "number"]
    )
    if depth == 0:
        kind = "object"
    out: dict = {"type": kind}
    if rng.random() < 0.3:
        out["description"] = text(rng)
    if kind == "object":
        names = rng.sample(["a", "b", "c<｜User｜>", "d"], rng.randint(1 if depth else 0, 3))
        out["properties"] = {name: schema(rng, depth + 1) for name in names}
        if rng.random() < 0.5:
            out["required"] = names
        if rng.random() < 0.3:
            out["additionalProperties"] = False
    elif kind == "array":
        out["items"] = schema(rng, depth + 1)
    elif kind == "string" and rng.random() < 0.5:
        out[rng.choice(["minLength", "maxLength"])] = 2
        if rng.random() < 0.5:
            out["enum"] = ["x", "é"]
    elif kind in ("integer", "number"):
        if rng.random() < 0.5:
            out["minimum"] = 1 if kind == "integer" else rng.choice([1, 0.5, 1e-6])
        if rng.random() < 0.3:
            out["default"] = 3
    if rng.random() < 0.2:
        out["title"] = "T"
    return out


def tool(rng: random.Random, name: str, strict) -> dict:
    function: dict = {"name": name}
    if rng.random() < 0.7:
        function["description"] = text(rng)
    if rng.random() < 0.8:
        function["parameters"] = schema(rng)
    if strict is not None:
        function["strict"] = strict
    return {"type": "function", "function": function}


def arguments(rng: random.Random) -> str:
    if rng.random() < 0.15:
        return rng.choice(
            ["", "[1]", "nope", '{"a": NaN}', '{"a": 1', '"x"', '{"a": "\\ud800"}', '{"n": 1e400}', '{"n": -0}']
        )
    names = rng.sample(["a", "b", "q<｜User｜>", "é", "n 1"], rng.randint(0, 3))
    return json.dumps({name: rng.choice(VALUES) for name in names}, ensure_ascii=rng.random() < 0.5)


def assistant(rng: random.Random, with_calls: bool, number: int) -> list[dict]:
    message: dict = {"role": "assistant"}
    if rng.random() < 0.5:
        message["reasoning_content"] = rng.choice([text(rng), None])
    if not with_calls:
        message["content"] = (
            text(rng) if rng.random() < 0.8 else [{"type": "text", "text": text(rng)} for _ in range(2)]
        )
        return [message]
    if rng.random() < 0.7:
        message["content"] = rng.choice([text(rng), "", None])
    calls, results = [], []
    for index in range(rng.randint(1, 3)):
        call_id = f"call_{number}_{index}"
        function = {"name": rng.choice(NAMES), "arguments": arguments(rng)}
        calls.append({"id": call_id, "type": "function", "function": function})
        results.append({"role": "tool", "tool_call_id": call_id, "content": content(rng, images=True)})
    message["tool_calls"] = calls
    rng.shuffle(results)
    return [message, *results]


def messages(rng: random.Random) -> list[dict]:
    out: list[dict] = []
    if rng.random() < 0.5:
        out.append({"role": "system", "content": content(rng, images=False)})
    for number in range(rng.randint(1, 6)):
        kind = rng.choice(["user", "user", "assistant", "calls", "system", "latest_reminder"])
        if kind in ("assistant", "calls"):
            out.extend(assistant(rng, kind == "calls", number))
        elif kind == "latest_reminder":
            out.append({"role": kind, "content": text(rng)})
        else:
            out.append({"role": kind, "content": content(rng, images=kind == "user")})
    return out


def request(rng: random.Random, version: str = "v41") -> dict:
    """One chat request that the official conversion may accept or refuse (most are accepted)."""
    out: dict = {
        "model": "DeepSeek-V4.1-Flash" if version == "v41" else "DeepSeek-V4-Pro",
        "messages": messages(rng),
    }
    if rng.random() < 0.4:
        out["thinking"] = {"type": rng.choice(["enabled", "disabled", "disabled"])}
    if rng.random() < 0.3:
        out["reasoning_effort"] = rng.choice(["none", "minimal", "low", "medium", "high", "xhigh", "max", "ultra"])
    if rng.random() < 0.5:
        strict = rng.choice([None, None, None, True])
        out["tools"] = [tool(rng, name, strict) for name in rng.sample(NAMES, rng.randint(0, 3))]
        if rng.random() < 0.3:
            named = {"type": "function", "function": {"name": rng.choice(NAMES)}}
            out["tool_choice"] = rng.choice(["auto", "none", "required", named])
    if rng.random() < 0.2:
        json_schema = {"name": "answer", "strict": rng.random() < 0.5, "schema": schema(rng)}
        out["response_format"] = rng.choice(
            [{"type": "text"}, {"type": "json_object"}, {"type": "json_schema", "json_schema": json_schema}]
        )
    if rng.random() < 0.15 and "tools" not in out:
        prefix = {"role": "assistant", "content": text(rng), "prefix": True}
        if rng.random() < 0.5:
            prefix["reasoning_content"] = text(rng)
        out["messages"].append(prefix)
    return out


def to_transformers(body: dict) -> tuple[list[dict], list | None, dict]:
    """The same request as arguments of `apply_chat_template`: (messages, tools, keyword arguments)."""
    turns = [{key: value for key, value in message.items() if key != "prefix"} for message in body["messages"]]
    continued = bool(body["messages"][-1].get("prefix"))
    options: dict = {"add_generation_prompt": not continued, "continue_final_message": continued}
    thinking = body.get("thinking", {}).get("type")
    if thinking is not None:
        options["enable_thinking"] = thinking != "disabled"
    for name in ("reasoning_effort", "tool_choice", "response_format"):
        if name in body:
            options[name] = body[name]
    return turns, body.get("tools"), options
