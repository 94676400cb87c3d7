"""Model output as a message: the official state machine, fed with chunks of any size.

The machine reads text and looks for literals, one set for each state. It never looks back, so how the text is cut into
chunks cannot matter: a chunk that could still become a literal is held until the next one decides. (The official parser
writes one space for each received chunk around a JSON answer; here it is one space for each stretch of text.)
"""

import json
from typing import NamedTuple

from .json_text import refuse_constant
from .prompt_constants import ASSISTANT, BOS, DSML, EOS, PROMPT_FORMATS, REMINDER, THINK, THINK_END, USER

# Where the machine can begin, by what the prompt has already written of the answer.
START_STATES = ("reasoning", "reasoning_continued", "content", "content_continued", "calls", "unknown")

_OPEN = "<" + DSML
_CLOSE = "</" + DSML
_BLOCK_ENDS = tuple(f"{_CLOSE}{form.calls_tag}>" for form in PROMPT_FORMATS.values())
_FORCED_CALLS = tuple(f"\n\n{_OPEN}{form.calls_tag}>\n" for form in PROMPT_FORMATS.values())


class ResponseStart(NamedTuple):
    """What the prompt says about the answer to come.

    `state` is one of `START_STATES`; `thinking` tells whether the message has a reasoning field; `parse_calls` whether
    tool calls are read or stay text; `json_output` whether an answer in JSON is freed from the text around it.
    """

    state: str = "content"
    thinking: bool = False
    parse_calls: bool = False
    json_output: bool = False


class ResponseEvent(NamedTuple):
    """A piece of the message: `kind` is "reasoning_content", "content", "tool_call" (a name) or "arguments" (text).

    `index` is the number of the tool call, None for other kinds.
    """

    kind: str
    text: str
    index: int | None = None


def read_prompt(prompt: str, tools=None) -> ResponseStart:
    """Find out from a prompt how the answer to it begins.

    Args:
        prompt (`str`): the prompt, or its end from the last answer header on. "" tells nothing.
        tools (`list`, *optional*): the tools of the request. A whole prompt shows itself whether tools are active;
            without one, tool calls are parsed if tools are given, or if nothing is known at all.

    Returns:
        `ResponseStart`.
    """
    head_end = min(
        (at for at in (prompt.find(t) for t in (USER, ASSISTANT, REMINDER)) if at >= 0), default=len(prompt)
    )
    _, _, tail = prompt.rpartition(ASSISTANT)
    return read_prompt_parts(prompt[:head_end], tail, tools)


def read_prompt_parts(head: str, tail: str, tools=None) -> ResponseStart:
    """As [`read_prompt`], from the text before the first turn and the text after the last answer header."""
    forms = PROMPT_FORMATS.values()
    if head.startswith(BOS):
        declined = tools is not None and not tools
        parse_calls = not declined and any(form.tools_head in head for form in forms)
    else:
        parse_calls = bool(tools) or (tools is None and not head and not tail)
    json_output = any(head.endswith("\n\n" + form.json_object) for form in forms)
    state, thinking = _start_state(tail)
    if state == "calls":
        parse_calls = True
    return ResponseStart(state=state, thinking=thinking, parse_calls=parse_calls, json_output=json_output)


def _start_state(tail: str) -> tuple[str, bool]:
    if tail.startswith(THINK):
        reasoning, closed, content = tail[len(THINK) :].partition(THINK_END)
        if closed:
            return ("content_continued" if content else "content"), True
        return ("reasoning_continued" if reasoning else "reasoning"), True
    if tail.startswith(THINK_END):
        return ("calls" if tail[len(THINK_END) :] in _FORCED_CALLS else "content"), False
    return ("unknown" if not tail.strip() else "content"), False


class ResponseStream:
    """Parses one answer while it is being generated.

    Feed text with [`feed`], which returns what became certain by it; end with [`finalize`], which returns the message.
    The message does not depend on how the text was cut into chunks.
    """

    def __init__(self, start: ResponseStart):
        if start.state not in START_STATES:
            raise ValueError(f"start.state must be one of {list(START_STATES)}, got {start.state!r}")
        self.thinking = start.thinking
        self._start = start
        self._held = ""
        self._newlines = ""
        self._ended = False
        self._finished = False
        self._text = {"reasoning_content": [], "content": []}
        self._calls: list[tuple[str, list[str]]] = []
        self._name: list[str] = []
        self._events: list[ResponseEvent] = []
        self._trim = start.state in ("reasoning", "content", "unknown")
        self._spaced = False
        self._state = self._unknown
        if start.state.startswith("reasoning"):
            self._state = self._reasoning
        elif start.state.startswith("content"):
            self._enter_content(trim=self._trim)
        elif start.state == "calls":
            self._state = self._block

    def feed(self, text: str) -> list[ResponseEvent]:
        """Read a chunk.

        Args:
            text (`str`): the next characters of the answer, any number. The end-of-sentence token ends the message.

        Returns:
            `list[ResponseEvent]`: what the chunk made certain, in order.
        """
        if self._finished:
            raise ValueError("feed() after finalize(): the message is complete; make a new parser for the next answer")
        if not isinstance(text, str):
            raise TypeError(f"feed() takes text, got {type(text).__name__}; decode token ids first")
        return self._feed(text, last=False)

    def finalize(self) -> dict:
        """End the answer and return the message.

        Returns:
            `dict`: `role`, `content`, `reasoning_content` (if the model was thinking) and `tool_calls` (if any).
            Arguments are a dict where they are valid JSON, else the text as far as it was written.
        """
        if not self._finished:
            self._feed("", last=True)
            self._flush_newlines()
            self._finished = True
        message = {"role": "assistant", "content": "".join(self._text["content"])}
        if self.thinking:
            message["reasoning_content"] = "".join(self._text["reasoning_content"])
        if self._calls:
            message["tool_calls"] = [
                {"type": "function", "function": {"name": name, "arguments": _decoded("".join(arguments))}}
                for name, arguments in self._calls
            ]
        return message

    # -- the machine: each state is a method that consumes what it can of the held text and says whether it moved ------

    def _feed(self, text: str, last: bool) -> list[ResponseEvent]:
        self._events = []
        if not self._ended:
            self._held += text
            while self._state(last):
                pass
        return self._events

    def _scan(self, markers: dict, last: bool, write) -> bool:
        """Write the held text up to the first marker and run the action of that marker.

        Text that may be the beginning of a marker stays held, unless this is the `last` call. End of sentence is a
        marker in every state.
        """
        found, at = None, len(self._held)
        for marker in (EOS, *markers):
            position = self._held.find(marker)
            if 0 <= position < at or (position == at and found and len(marker) > len(found)):
                found, at = marker, position
        if found is None:
            keep = 0 if last else _partial_length(self._held, (EOS, *markers))
            at = len(self._held) - keep
            text, self._held = self._held[:at], self._held[at:]
            if text:
                write(text)
            return False
        text, self._held = self._held[:at], self._held[at + len(found) :]
        if text:
            write(text)
        if found == EOS:
            self._flush_newlines()
            self._ended = True
            self._held = ""
            self._state = self._drop
            return False
        markers[found]()
        return True

    def _unknown(self, last: bool) -> bool:
        # The prompt says nothing: an answer that opens with a think tag has reasoning.
        if not last and THINK.startswith(self._held):
            return False
        if self._held.startswith(THINK):
            self._held = self._held[len(THINK) :]
            self.thinking = True
            self._state = self._reasoning
        else:
            self._enter_content(trim=True)
        return True

    def _reasoning(self, last: bool) -> bool:
        markers = {THINK_END: self._end_reasoning}
        if self._start.parse_calls:
            markers[_OPEN] = self._enter_block
        return self._scan(markers, last, lambda text: self._write("reasoning_content", text))

    def _content(self, last: bool) -> bool:
        markers = {THINK_END: self._skip_think_end}
        if self._start.parse_calls:
            markers[_OPEN] = self._enter_block
        return self._scan(markers, last, lambda text: self._write("content", text))

    def _json_search(self, last: bool) -> bool:
        markers = {
            THINK_END: self._skip_think_end,
            "```json\n": self._enter_json,
            "```\n": self._enter_json,
            "{": lambda: self._enter_json("{"),
            "[": lambda: self._enter_json("["),
        }
        if self._start.parse_calls:
            markers[_OPEN] = self._enter_block
        return self._scan(markers, last, self._write_space)

    def _json_body(self, last: bool) -> bool:
        return self._scan({"\n```": self._leave_json}, last, lambda text: self._emit("content", text))

    def _json_tail(self, last: bool) -> bool:
        markers = {_OPEN: self._enter_block} if self._start.parse_calls else {}
        return self._scan(markers, last, self._write_space)

    def _block(self, last: bool) -> bool:
        markers = {'invoke name="': self._enter_name, **dict.fromkeys(_BLOCK_ENDS, self._leave_block)}
        return self._scan(markers, last, lambda text: None)

    def _call_name(self, last: bool) -> bool:
        return self._scan({'"': self._begin_call}, last, self._name.append)

    def _call(self, last: bool) -> bool:
        markers = {"parameter name=": self._enter_parameter, _CLOSE: self._end_call}
        return self._scan(markers, last, lambda text: None)

    def _parameter_name(self, last: bool) -> bool:
        return self._scan({" ": self._end_parameter_name}, last, self._write_arguments)

    def _parameter_kind(self, last: bool) -> bool:
        markers = {'true">': self._enter_string, 'false">': lambda: self._go(self._raw)}
        return self._scan(markers, last, lambda text: None)

    def _string(self, last: bool) -> bool:
        return self._scan({_CLOSE: self._end_string}, last, lambda text: self._write_arguments(_escaped(text)))

    def _raw(self, last: bool) -> bool:
        return self._scan({_CLOSE: lambda: self._go(self._call)}, last, self._write_arguments)

    def _drop(self, last: bool) -> bool:
        self._held = ""
        return False

    # -- actions of markers --------------------------------------------------------------------------------------------

    def _go(self, state) -> None:
        self._state = state

    def _end_reasoning(self) -> None:
        self._newlines = ""
        self._enter_content(trim=True)

    def _enter_content(self, trim: bool) -> None:
        self._trim = trim
        self._go(self._json_search if self._start.json_output else self._content)

    def _skip_think_end(self) -> None:
        self._flush_newlines()
        self._trim = False
        self._spaced = False

    def _enter_json(self, first: str = "") -> None:
        self._flush_newlines()
        if first:
            self._emit("content", first)
        self._go(self._json_body)

    def _leave_json(self) -> None:
        self._trim = False
        self._spaced = False
        self._go(self._json_tail)

    def _enter_block(self) -> None:
        self._newlines = ""
        self._go(self._block)

    def _leave_block(self) -> None:
        self._go(self._drop)

    def _enter_name(self) -> None:
        self._name = []
        self._go(self._call_name)

    def _begin_call(self) -> None:
        self._calls.append(("".join(self._name), []))
        self._events.append(ResponseEvent("tool_call", self._calls[-1][0], len(self._calls) - 1))
        self._go(self._call)

    def _enter_parameter(self) -> None:
        self._write_arguments(", " if self._has_arguments() else "{")
        self._go(self._parameter_name)

    def _end_parameter_name(self) -> None:
        self._write_arguments(": ")
        self._go(self._parameter_kind)

    def _enter_string(self) -> None:
        self._write_arguments('"')
        self._go(self._string)

    def _end_string(self) -> None:
        self._write_arguments('"')
        self._go(self._call)

    def _end_call(self) -> None:
        self._write_arguments("}" if self._has_arguments() else "{}")
        self._go(self._block)

    def _has_arguments(self) -> bool:
        return bool(self._calls[-1][1])

    # -- output --------------------------------------------------------------------------------------------------------

    def _emit(self, kind: str, text: str) -> None:
        self._text[kind].append(text)
        self._events.append(ResponseEvent(kind, text))

    def _write(self, kind: str, text: str) -> None:
        """Write text, without newlines at its start, and holding newlines at its end, which a marker may remove."""
        if self._trim:
            text = text.lstrip("\n")
            if not text:
                return
            self._trim = False
        text = self._newlines + text
        stripped = text.rstrip("\n")
        self._newlines = text[len(stripped) :]
        if stripped:
            self._emit(kind, stripped)

    def _flush_newlines(self) -> None:
        if self._newlines:
            text, self._newlines = self._newlines, ""
            if self._state in (self._json_search, self._json_tail):
                text = "" if self._spaced else " "
            if text:
                self._emit("reasoning_content" if self._state == self._reasoning else "content", text)

    def _write_space(self, text: str) -> None:
        """Write one space for a whole stretch of text around a JSON answer."""
        if self._trim:
            text = text.lstrip("\n")
            if not text:
                return
            self._trim = False
        if self._spaced:
            return
        if not text.strip("\n"):
            # Newlines alone may yet turn out to stand before tool calls, where they vanish.
            self._newlines += text
            return
        self._newlines = ""
        self._emit("content", " ")
        self._spaced = True

    def _write_arguments(self, text: str) -> None:
        self._calls[-1][1].append(text)
        self._events.append(ResponseEvent("arguments", text, len(self._calls) - 1))


def parse_text(text: str, start: ResponseStart) -> dict:
    """Parse a whole answer at once; see [`ResponseStream.finalize`] for the message."""
    stream = ResponseStream(start)
    stream.feed(text)
    return stream.finalize()


def _partial_length(text: str, markers) -> int:
    """Length of the longest end of `text` that is a beginning of one of the markers."""
    longest = min(len(text), max(len(marker) for marker in markers) - 1)
    for length in range(longest, 0, -1):
        end = text[-length:]
        if any(len(marker) > length and marker.startswith(end) for marker in markers):
            return length
    return 0


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _decoded(arguments: str) -> dict | str:
    try:
        value = json.loads(arguments, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments
