"""A conversation as a prompt: the official V4.1 and V4 encodings, written out in Python.

The result is not one string but a list of pieces, each marked as text or as a control token. Whatever users, tools and
documents contain stays text, also where it spells a control token; only what this module writes becomes one. That is
why a Jinja template cannot give safe token ids: it can only give the string.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from .conversation import ImagePart, Message, ToolCall, normalize_messages
from .json_text import dump_json
from .prompt_constants import (
    ASSISTANT,
    BOS,
    DEFAULT_EFFORT_LEVEL,
    DSML,
    EFFORT_LEVELS,
    EOS,
    GROUNDING_PATTERN,
    IMAGE,
    PROMPT_FORMATS,
    REMINDER,
    SCHEMA_HEAD,
    SYSTEM,
    THINK,
    THINK_END,
    TOOLS_TAIL,
    UNSUPPORTED_IMAGE,
    USER,
    WORDING_PATTERN,
    PromptFormat,
)
from .tool_schema import are_strict, check_response_schema, check_unique_names, normalize_tools

_TOOL_CHOICES = ("auto", "none", "required")


class PromptPiece(NamedTuple):
    """A part of a prompt.

    `token` is True where `text` is one control token; `generated` where the text is an assistant's own writing, which
    is what training learns from.
    """

    text: str
    token: bool = False
    generated: bool = False


class RenderedPrompt(NamedTuple):
    """A prompt as pieces, and the images of its placeholders in their order in the prompt."""

    pieces: tuple[PromptPiece, ...]
    images: tuple[ImagePart, ...]

    @property
    def text(self) -> str:
        """`str`: the prompt as one string. Tokenised as a whole it is not safe: see the top of this module."""
        return "".join(piece.text for piece in self.pieces)

    @property
    def special_ranges(self) -> list[tuple[int, int]]:
        """`list[tuple[int, int]]`: (start, end) of every control token, in characters of [`text`]."""
        ranges, position = [], 0
        for piece in self.pieces:
            if piece.token:
                ranges.append((position, position + len(piece.text)))
            position += len(piece.text)
        return ranges


class ChatOptions(NamedTuple):
    """How a conversation is to be rendered; see [`render_conversation`] for the meaning of each field."""

    add_generation_prompt: bool = False
    continue_final_message: bool | str = False
    enable_thinking: bool | None = None
    reasoning_effort: str | int | float | None = None
    tool_choice: str | dict | None = None
    response_format: dict | None = None
    keep_last_reasoning: bool = False


def render_conversation(messages, tools=None, options: ChatOptions | None = None, version: str = "v41"):
    """Render a conversation by the official rules.

    Implements the prompt formats of DeepSeek-V4.1 and V4 as `deepseek-recipe` 0.2.0 renders chat requests.
    Differs from the source: numeric efforts (1 to 100) are accepted in V4.1, as the checkpoint's own encoder does; the
    answer header is only written on request, as in transformers, and without it the conversation may end in calls.

    Args:
        messages (`list[dict]`): the conversation, in the format of transformers or OpenAI.
        tools (`list`, *optional*): tool definitions or Python functions.
        options (`ChatOptions`, *optional*):
            add_generation_prompt: end with the header of an answer. continue_final_message: leave the last
            (assistant) message open; "reasoning_content" leaves its reasoning open. enable_thinking: None means yes,
            unless the effort is "none". reasoning_effort: a name of `EFFORT_LEVELS`, "none", or, in V4.1, a number.
            tool_choice: "auto", "none", "required" or `{"type": "function", "function": {"name"}}`. response_format:
            `{"type": "text" | "json_object" | "json_schema" | "regex", ...}`. keep_last_reasoning: keep the reasoning
            of the last assistant message, for training.
        version (`str`, *optional*, defaults to `"v41"`): `"v41"` or `"v4"`.

    Returns:
        `RenderedPrompt`.

    Raises:
        ValueError, TypeError: for whatever the official conversion refuses, naming the argument and its value.
    """
    if version not in PROMPT_FORMATS:
        raise ValueError(f"version must be one of {list(PROMPT_FORMATS)}, got {version!r}")
    writer = _PromptWriter(PROMPT_FORMATS[version])
    _check_prefix_fields(messages)
    options = options or ChatOptions()
    finished = not options.add_generation_prompt and not options.continue_final_message
    turns = normalize_messages(messages, may_end_in_calls=finished)
    shown = normalize_tools(tools, shown=options.tool_choice != "none")
    if shown and are_strict(tools) and options.response_format is not None:
        raise ValueError("response_format cannot be used with strict tools, which already constrain the answer")
    if options.continue_final_message and (tools or any(turn.calls for turn in turns)):
        raise ValueError("continue_final_message cannot be used with tools or after tool calls")
    writer.render(turns, shown, options)
    return RenderedPrompt(tuple(writer.pieces), tuple(writer.images))


def _check_prefix_fields(messages) -> None:
    # DeepSeek's API marks a message to be continued by a field; taken for a finished one it would be closed silently.
    if isinstance(messages, (list, tuple)):
        for index, message in enumerate(messages):
            if isinstance(message, Mapping) and message.get("prefix"):
                raise ValueError(f"messages[{index}]['prefix']: use continue_final_message=True instead of the field")


def resolve_thinking(enable_thinking: bool | None, effort) -> bool:
    """Return whether the model thinks: an explicit `enable_thinking` wins over an effort of "none"."""
    if enable_thinking is not None and not isinstance(enable_thinking, bool):
        raise ValueError(f"enable_thinking must be True, False or None, got {enable_thinking!r}")
    return effort != "none" if enable_thinking is None else enable_thinking


def effort_line(effort, form: PromptFormat) -> str:
    """Return the text that states the reasoning effort, "" where the format states none.

    Args:
        effort (`str`, `int`, `float` or `None`): a name; in V4.1 also a number from 1 to 100 or its decimal spelling.
        form (`PromptFormat`): the format.

    Raises:
        ValueError: for other names and numbers.
    """
    if effort is None or effort == "none":
        return form.effort_lines[DEFAULT_EFFORT_LEVEL]
    if isinstance(effort, str) and effort in EFFORT_LEVELS:
        return form.effort_lines[EFFORT_LEVELS[effort]]
    accepted = ["none", *EFFORT_LEVELS]
    if form.effort_number is not None:
        number = int(effort) if isinstance(effort, str) and effort.isascii() and effort.isdecimal() else effort
        if isinstance(number, (int, float)) and not isinstance(number, bool):
            if 1 <= number <= 100 and number == int(number):
                return form.effort_number.format(int(number))
        accepted.append("a whole number from 1 to 100")
    raise ValueError(f"reasoning_effort must be one of {accepted}, got {effort!r}")


def response_format_text(response_format, form: PromptFormat, messages: list[Message]) -> str:
    """Return the block that states the format of the answer, "" for formats that the prompt does not mention.

    Args:
        response_format (`dict` or `None`): `{"type": ...}` in the format of OpenAI.
        form (`PromptFormat`): the format.
        messages (`list[Message]`): the conversation, which must speak of JSON for `json_object`.

    Raises:
        ValueError: for an unknown type, missing fields, a schema that is not accepted, or no word "json" anywhere.
    """
    if response_format is None:
        return ""
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    if kind == "text":
        return ""
    if kind == "regex":
        if not isinstance(response_format.get("regex"), str):
            raise ValueError(f"response_format['regex'] must be a string, got {response_format.get('regex')!r}")
        return ""
    if kind == "json_object":
        if not any("json" in part.lower() for message in messages for part in message.parts if isinstance(part, str)):
            raise ValueError("response_format 'json_object' needs the word 'json' in one of the messages")
        return form.json_object
    if kind == "json_schema":
        outer = response_format.get("json_schema")
        if not isinstance(outer, Mapping) or "schema" not in outer:
            raise ValueError(f"response_format['json_schema'] must be a dict with a 'schema', got {outer!r}")
        strict, name = outer.get("strict"), outer.get("name")
        if not (strict is None or isinstance(strict, bool)) or not (name is None or isinstance(name, str)):
            raise ValueError(
                "response_format['json_schema'] takes 'strict' as a bool and 'name' as a string, "
                f"got {strict!r} and {name!r}"
            )
        schema = check_response_schema(outer["schema"], strict=bool(strict))
        return SCHEMA_HEAD + dump_json(schema, short_floats=form.short_floats)
    raise ValueError(
        "response_format must be a dict with the type 'text', 'json_object', 'json_schema' or 'regex', "
        f"got {response_format!r}"
    )


def apply_tool_choice(tools: list[dict], choice, thinking: bool) -> tuple[list[dict], bool]:
    """Apply a tool choice.

    Args:
        tools (`list[dict]`): normalized tools.
        choice (`str`, `dict` or `None`): "auto", "none", "required", or a named function.
        thinking (`bool`): whether the model thinks; a forced call is then refused.

    Returns:
        `(list[dict], bool)`: the tools to show, and whether the answer is forced to begin with a call.

    Raises:
        ValueError: for an unknown choice, an unknown name, two tools of one name, or a forced call while thinking.
    """
    name = None
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        function = choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
    if not (isinstance(name, str) or choice is None or (isinstance(choice, str) and choice in _TOOL_CHOICES)):
        raise ValueError(
            "tool_choice must be 'auto', 'none', 'required' or "
            f"{{'type': 'function', 'function': {{'name': ...}}}}, got {choice!r}"
        )
    if not tools or choice == "none":
        return [], False
    check_unique_names(tools)
    if choice in (None, "auto"):
        return tools, False
    if thinking:
        raise ValueError(f"tool_choice {choice!r} forces a call, which needs enable_thinking=False")
    if name is not None:
        tools = [tool for tool in tools if tool["name"] == name]
        if not tools:
            raise ValueError(f"tool_choice names the function {name!r}, which is not among the tools")
    return tools, True


class _PromptWriter:
    """Collects the pieces of one prompt. Text and control tokens go in by different methods, so they cannot mix."""

    def __init__(self, form: PromptFormat):
        self.form = form
        self.pieces: list[PromptPiece] = []
        self.images: list[ImagePart] = []
        self.generated = False

    def text(self, text: str) -> None:
        if text:
            self.pieces.append(PromptPiece(text, False, self.generated))

    def token(self, token: str) -> None:
        self.pieces.append(PromptPiece(token, True, self.generated))

    def wording(self, text: str) -> None:
        """Write fixed wording, whose control tokens are real."""
        for index, part in enumerate(WORDING_PATTERN.split(text)):
            self.token(part) if index % 2 else self.text(part)

    def answer(self, text: str) -> None:
        """Write what an assistant wrote: its grounding tags are tokens, all else is text."""
        for index, part in enumerate(GROUNDING_PATTERN.split(text)):
            self.token(part) if index % 2 else self.text(part)

    def parts(self, message: Message) -> None:
        """Write the parts of a message that is not an assistant's, with blank lines between them."""
        for index, part in enumerate(message.parts):
            if index:
                self.text("\n\n")
            if not isinstance(part, ImagePart):
                self.text(part)
            elif self.form.images:
                self.images.append(part)
                self.token(IMAGE)
            else:
                self.text(UNSUPPORTED_IMAGE)

    def render(self, turns: list[Message], tools: list[dict], options: ChatOptions) -> None:
        thinking = resolve_thinking(options.enable_thinking, options.reasoning_effort)
        effort = effort_line(options.reasoning_effort, self.form)
        continued = _check_continuation(turns, options)
        response = response_format_text(options.response_format, self.form, turns)
        tools, forced = apply_tool_choice(tools, options.tool_choice, thinking)

        head, body = self._split_head(turns)
        self.token(BOS)
        says_something = head or body or tools or response or not self.form.system_token
        self._head(effort if thinking and says_something else "", head, tools, response)
        last_answer = max((index for index, turn in enumerate(body) if turn.role == "assistant"), default=None)
        previous = None
        for index, turn in enumerate(body):
            if turn.role != "assistant":
                self._turn(turn, previous)
            elif continued and index == len(body) - 1:
                # V4.1 opens no reasoning for a message that nothing stands before.
                opens = thinking and bool(head or response or index or not self.form.system_token)
                self._open_answer(turn, opens, options.continue_final_message == "reasoning_content")
            else:
                keep = bool(tools) or (options.keep_last_reasoning and index == last_answer)
                self._finished_answer(turn, thinking and keep)
            previous = turn.role
        if options.add_generation_prompt:
            self.token(ASSISTANT)
            self.token(THINK if thinking else THINK_END)
            if forced:
                self.wording(f"\n\n<{DSML}{self.form.calls_tag}>\n")

    def _split_head(self, turns: list[Message]) -> tuple[list[Message], list[Message]]:
        """Separate the system messages of the head from the turns, and join neighbours that the format joins."""
        # Empty system messages vanish, also between others, which then become neighbours.
        filled = [turn for turn in turns if turn.role != "system" or not turn.is_empty]
        if self.form.system_token:
            head = filled[:1] if filled and filled[0].role == "system" else []
            return head, _without_repeated_reminders(filled[len(head) :])
        # V4 has no system token: all system messages move to the head.
        head = [turn for turn in filled if turn.role == "system"]
        return head, _with_joined_users([turn for turn in filled if turn.role != "system"])

    def _head(self, effort: str, system: list[Message], tools: list[dict], response: str) -> None:
        if self.form.system_token and (effort or system or tools or response):
            self.token(SYSTEM)
        self.text(effort)
        for index, message in enumerate(system):
            if index:
                self.text("\n\n")
            self.parts(message)
        if tools:
            self.wording("\n\n" + self.form.tools_head)
            self.text("\n".join(dump_json(tool, short_floats=self.form.short_floats) for tool in tools))
            self.text(TOOLS_TAIL)
        if response:
            self.text("\n\n" + response)

    def _turn(self, turn: Message, previous: str | None) -> None:
        if turn.role == "system":
            self.token(SYSTEM)
        elif turn.role == "latest_reminder":
            self.token(REMINDER)
        elif previous in ("user", "tool"):
            self.text("\n\n")
        else:
            self.token(USER)
        if turn.role == "tool":
            self.text("<tool_result>")
        self.parts(turn)
        if turn.role == "tool":
            self.text("</tool_result>")

    def _finished_answer(self, turn: Message, with_reasoning: bool) -> None:
        self.token(ASSISTANT)
        if with_reasoning:
            self.token(THINK)
            self.generated = True
            self.answer(turn.reasoning or "")
        self.token(THINK_END)
        self.generated = True
        self.answer("\n\n".join(turn.parts))
        if turn.calls:
            self._calls(turn.calls)
        self.token(EOS)
        self.generated = False

    def _open_answer(self, turn: Message, thinking: bool, reasoning_only: bool) -> None:
        content = "\n\n".join(turn.parts)
        self.token(ASSISTANT)
        if thinking:
            self.token(THINK)
            self.generated = True
            self.answer(turn.reasoning or "")
        if not thinking or (content and not reasoning_only):
            self.token(THINK_END)
            self.generated = True
            self.answer(content)
        self.generated = False

    def _calls(self, calls: tuple[ToolCall, ...]) -> None:
        form = self.form
        self.wording(f"\n\n<{DSML}{form.calls_tag}>\n")
        for call in calls:
            self.wording(f'<{DSML}{form.invoke_tag} name="')
            self.text(f'{call.name}">\n')
            arguments = call.arguments if isinstance(call.arguments, dict) else {"arguments": call.arguments}
            if not arguments:
                self.text(form.empty_arguments)
            for name, value in arguments.items():
                is_text = isinstance(value, str)
                self.wording(f'<{DSML}{form.parameter_tag} name="')
                self.text(f'{name}" string="{"true" if is_text else "false"}">')
                self.text(value if is_text else dump_json(value, short_floats=form.short_floats))
                self.wording(f"</{DSML}{form.parameter_tag}>\n")
            self.wording(f"</{DSML}{form.invoke_tag}>\n")
        self.wording(f"</{DSML}{form.calls_tag}>")


def _without_repeated_reminders(turns: list[Message]) -> list[Message]:
    # Of several reminders in a row V4.1 shows the first.
    pairs = zip(turns, [None, *turns], strict=False)
    return [
        turn for turn, before in pairs if turn.role != "latest_reminder" or before is None or before.role != turn.role
    ]


def _with_joined_users(turns: list[Message]) -> list[Message]:
    # V4 joins user messages in a row into one and leaves the empty ones out.
    out: list[Message] = []
    for turn in turns:
        if out and turn.role == "user" and out[-1].role == "user":
            both = [item for item in (out[-1], turn) if not item.is_empty]
            out[-1] = replace(turn, parts=tuple(part for item in both for part in item.parts))
        else:
            out.append(turn)
    return out


def _check_continuation(turns: list[Message], options: ChatOptions) -> bool:
    if not options.continue_final_message:
        return False
    last = turns[-1]
    if options.add_generation_prompt:
        raise ValueError("continue_final_message and add_generation_prompt exclude each other; choose one")
    if options.continue_final_message not in (True, "content", "reasoning_content"):
        raise ValueError(
            "continue_final_message must be a bool, 'content' or 'reasoning_content', "
            f"got {options.continue_final_message!r}"
        )
    if last.role != "assistant":
        raise ValueError(f"continue_final_message needs an assistant message at the end, got the role {last.role!r}")
    if isinstance(options.response_format, Mapping) and options.response_format.get("type") == "json_object":
        raise ValueError("continue_final_message cannot be used with the response_format 'json_object'")
    return True
