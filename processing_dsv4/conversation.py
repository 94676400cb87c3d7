"""Messages as users write them, checked and brought into one form.

Accepted are the formats of transformers and of OpenAI: content as a string or as a list of parts, images as
`{"type": "image", ...}` or `{"type": "image_url", ...}`, tool calls with arguments as a dict or as a JSON text. What is
refused, is refused before anything is rendered; the verdicts are those of the official request conversion. One
difference is deliberate: tool calls without ids, as transformers writes them, are accepted when their results have no
ids either; results then belong to the calls in their order.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from .image_layout import DETAILS
from .json_text import check_text, parse_json, to_json_value

ROLES = ("system", "user", "assistant", "tool", "latest_reminder")
IMAGE_SOURCE_KEYS = ("image", "url", "path", "base64", "bytes")
# Names under which transformers and others store the reasoning of an answer.
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True)
class ImagePart:
    """An image of a message: where to load it from (None: it is passed beside the messages), and its detail level."""

    source: object
    detail: str


@dataclass(frozen=True)
class ToolCall:
    """A tool call: `arguments` is a dict of plain JSON data, or the raw text where that is not a JSON object."""

    id: str | None
    name: str
    arguments: dict | str


@dataclass(frozen=True)
class Message:
    """One message. `parts` are strings and [`ImagePart`]s; `calls` and `reasoning` are set for assistant messages only."""

    role: str
    parts: tuple
    reasoning: str | None = None
    calls: tuple[ToolCall, ...] = ()
    call_id: str | None = None

    @property
    def is_empty(self) -> bool:
        return self.parts in ((), ("",))


def normalize_messages(messages, may_end_in_calls: bool = False) -> list[Message]:
    """Check the messages of one conversation and bring them into one form.

    Args:
        messages (`list[dict]`): messages with `role`, `content` and, by role, `reasoning_content`, `tool_calls`,
            `tool_call_id`.
        may_end_in_calls (`bool`, *optional*, defaults to `False`):
            Accept calls without results in the last message, as in an example that teaches to call.

    Returns:
        `list[Message]`: one for each message, in order. Results of one assistant message are sorted into the order of
        its calls.

    Raises:
        ValueError: for an empty list, unknown roles or parts, missing content, images in answers, and calls and
            results that do not belong together.
        TypeError: if a message is not a dict.
    """
    if not isinstance(messages, (list, tuple)):
        raise TypeError(f"messages must be a list of dicts, got {type(messages).__name__}")
    if not messages:
        raise ValueError("messages is empty; a conversation needs at least one message")
    normalized = [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
    return _match_results(normalized, may_end_in_calls)


def _message(message, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise TypeError(f"{where} must be a dict, got {type(message).__name__}")
    role = message.get("role")
    if role not in ROLES:
        raise ValueError(f"{where}['role'] must be one of {list(ROLES)}, got {role!r}")
    content = message.get("content")
    if role == "assistant":
        return _assistant(message, content, where)
    if content is None:
        raise ValueError(f"{where}['content'] is missing; a {role} message needs a string or a list of parts")
    if role == "latest_reminder" and not isinstance(content, str):
        raise ValueError(f"{where}['content'] must be a string in a latest_reminder, got {type(content).__name__}")
    call_id = message.get("tool_call_id") if role == "tool" else None
    if call_id is not None and not isinstance(call_id, str):
        raise ValueError(f"{where}['tool_call_id'] must be a string, got {call_id!r}")
    return Message(role=role, parts=_parts(content, where), call_id=call_id)


def _assistant(message: Mapping, content, where: str) -> Message:
    calls = message.get("tool_calls")
    if calls is not None and (not isinstance(calls, (list, tuple)) or not calls):
        raise ValueError(f"{where}['tool_calls'] must be a list of at least one call, or left out; got {calls!r}")
    if content is None and calls is None:
        raise ValueError(f"{where}: an assistant message needs 'content' or 'tool_calls'")
    parts = () if content is None else _parts(content, where)
    if any(isinstance(part, ImagePart) for part in parts):
        raise ValueError(f"{where}: images in assistant messages are not supported")
    reasoning = next((message[key] for key in _REASONING_KEYS if message.get(key) is not None), None)
    if reasoning is not None and not isinstance(reasoning, str):
        raise ValueError(f"{where}['reasoning_content'] must be a string or None, got {type(reasoning).__name__}")
    check_text(reasoning or "", f"{where}['reasoning_content']")
    calls = tuple(_call(call, f"{where}['tool_calls'][{i}]") for i, call in enumerate(calls or ()))
    return Message(role="assistant", parts=parts, reasoning=reasoning, calls=calls)


def _parts(content, where: str) -> tuple:
    if isinstance(content, str):
        return (check_text(content, f"{where}['content']"),)
    if not isinstance(content, (list, tuple)):
        raise ValueError(f"{where}['content'] must be a string or a list of parts, got {type(content).__name__}")
    return tuple(_part(part, f"{where}['content'][{index}]") for index, part in enumerate(content))


def _part(part, where: str):
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text":
        if not isinstance(part.get("text"), str):
            raise ValueError(f"{where}['text'] must be a string, got {part.get('text')!r}")
        return check_text(part["text"], f"{where}['text']")
    if kind == "image":
        sources = [part[key] for key in IMAGE_SOURCE_KEYS if part.get(key) is not None]
        if len(sources) > 1:
            raise ValueError(f"{where} names more than one source of its image; use one of {list(IMAGE_SOURCE_KEYS)}")
        return ImagePart(source=sources[0] if sources else None, detail=_detail(part.get("detail"), where))
    if kind == "image_url":
        return _image_url(part.get("image_url"), where)
    raise ValueError(
        f"{where} must be a dict with the type 'text', 'image' or 'image_url', got {kind if kind is not None else part!r}"
    )


def _image_url(value, where: str) -> ImagePart:
    url, detail = (value.get("url"), value.get("detail")) if isinstance(value, Mapping) else (value, None)
    # Requests in this format come from elsewhere: a path would let their author read files of this machine.
    if not isinstance(url, str) or not url.lower().startswith(("http://", "https://", "data:")):
        shown = url if not isinstance(url, str) else url[:80]
        raise ValueError(f"{where}['image_url']['url'] must be an http(s) or a data URL, got {shown!r}")
    return ImagePart(source=url, detail=_detail(detail, where))


def _detail(detail, where: str) -> str:
    if detail is None:
        return "high"
    if detail not in DETAILS:
        raise ValueError(f"{where}['detail'] must be one of {list(DETAILS)}, got {detail!r}")
    return detail


def _call(call, where: str) -> ToolCall:
    if not isinstance(call, Mapping) or call.get("type") != "function":
        raise ValueError(f"{where} must be a dict with the type 'function', got {call!r}")
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f"{where}['function'] must be a dict with a 'name' (string), got {function!r}")
    call_id = call.get("id")
    if call_id is not None and not isinstance(call_id, str):
        raise ValueError(f"{where}['id'] must be a string, got {call_id!r}")
    arguments = function.get("arguments")
    if isinstance(arguments, Mapping):
        arguments = to_json_value(arguments, f"{where}['function']['arguments']")
    elif isinstance(arguments, str):
        arguments = _object_or_text(arguments)
    else:
        raise ValueError(f"{where}['function']['arguments'] must be a dict or a JSON text, got {arguments!r}")
    return ToolCall(id=call_id, name=check_text(function["name"], f"{where}['function']['name']"), arguments=arguments)


def _object_or_text(text: str) -> dict | str:
    try:
        value = parse_json(text)
    except ValueError:
        return text
    return value if isinstance(value, dict) else text


def _match_results(messages: list[Message], may_end_in_calls: bool) -> list[Message]:
    """Check that every call has its result right after it, and sort results into the order of the calls."""
    out = []
    index = 0
    while index < len(messages):
        message = messages[index]
        out.append(message)
        index += 1
        if message.role == "tool":
            raise ValueError(
                f"messages[{index - 1}]: a tool message must answer a call of the assistant message before it"
            )
        if message.calls and not (may_end_in_calls and index == len(messages)):
            count = len(message.calls)
            out.extend(_sorted_results(message, messages[index : index + count], index - 1))
            index += count
    return out


def _sorted_results(message: Message, results: list[Message], index: int) -> list[Message]:
    ids = [call.id for call in message.calls]
    if len(results) < len(ids) or any(result.role != "tool" for result in results):
        raise ValueError(f"messages[{index}] has {len(ids)} tool calls, but fewer tool messages follow it")
    if ids == [None] * len(ids) and all(result.call_id is None for result in results):
        return results
    if None in ids or len(set(ids)) < len(ids):
        raise ValueError(f"messages[{index}]: tool calls need ids, each one different; got {ids}")
    answered = {result.call_id: result for result in results}
    if set(answered) != set(ids):
        unknown = [result.call_id for result in results if result.call_id not in ids] or "an id twice"
        raise ValueError(f"messages[{index}]: its tool messages must answer the calls {ids}, got {unknown}")
    return [answered[call_id] for call_id in ids]
