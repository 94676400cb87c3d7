"""The fixed wording of the two prompt formats, and the spellings of their control tokens.

This is the only place where the wording is written down. The Python renderer joins it with the conversation, and the
Jinja template is built from it, so the two cannot drift apart. It is Python and not a data file because a data file
beside remote code is not copied with the code.

The wording of V4.1 and V4 was dumped from the official toolkit (`deepseek-recipe` 0.2.0).
"""

import re
from dataclasses import dataclass

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
PAD = "<｜▁pad▁｜>"
SYSTEM = "<｜System｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
REMINDER = "<｜latest_reminder｜>"
THINK = "<think>"
THINK_END = "</think>"
DSML = "｜DSML｜"
IMAGE = "<｜deepseek_image｜>"

# The eight grounding tags: the model writes them in its answers, where they stay control tokens.
GROUNDING_TAGS = (
    "<｜ref｜>",
    "<｜/ref｜>",
    "<｜box｜>",
    "<｜/box｜>",
    "<｜point｜>",
    "<｜/point｜>",
    "<｜polygon｜>",
    "<｜/polygon｜>",
)
GROUNDING_PATTERN = re.compile("(" + "|".join(map(re.escape, GROUNDING_TAGS)) + ")")

# Every token that steers the model. Most are `special: false` in the tokenizer, so its own list of special tokens
# would miss them.
CHAT_CONTROL_TOKENS = (
    BOS,
    EOS,
    PAD,
    SYSTEM,
    USER,
    ASSISTANT,
    REMINDER,
    THINK,
    THINK_END,
    DSML,
    IMAGE,
    *GROUNDING_TAGS,
)

# What the fixed wording itself contains as control tokens.
WORDING_PATTERN = re.compile("(" + "|".join(map(re.escape, (DSML, THINK, THINK_END))) + ")")

# Text that takes the place of an image in V4, which is a text model.
UNSUPPORTED_IMAGE = "[Unsupported Image]"

# Accepted names of the reasoning effort, and the level that each one means.
EFFORT_LEVELS = {
    "minimal": "low",
    "low": "low",
    "medium": "high",
    "high": "high",
    "xhigh": "high",
    "max": "max",
    "ultra": "max",
}
DEFAULT_EFFORT_LEVEL = "high"

_TOOLS_INTRODUCTION = """## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a "<{dsml}{calls}>" block like the following:

<{dsml}{calls}>
<{dsml}{invoke} name="$TOOL_NAME">
<{dsml}{parameter} name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{dsml}{parameter}>
...
</{dsml}{invoke}>
<{dsml}{invoke} name="$TOOL_NAME2">
...
</{dsml}{invoke}>
</{dsml}{calls}>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by {think}), you MUST output your complete reasoning inside {think}...{think_end} BEFORE any tool calls or final response.

Otherwise, output directly after {think_end} with tool calls or final response.

### Available Tool Schemas

"""
TOOLS_TAIL = "\n\nYou MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.\n"
SCHEMA_HEAD = "## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"

_V41_EFFORT = "Reasoning Effort: {} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
_V4_HIGH_EFFORT = (
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, "
    "rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate step, considered "
    "alternative, and rejected hypothesis to ensure absolutely no assumption is left unchecked.\n\n"
)
_V4_MAX_EFFORT = (
    "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n"
    "You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively decompose the "
    "problem into its most fundamental components, trace every causal chain to its root, and resolve the underlying "
    "cause rather than any surface symptom.\n"
    "Do not stop reasoning until you have independently verified the solution from multiple angles and are certain "
    "that no assumption remains unchecked and no error remains undiscovered.\n\n"
)


@dataclass(frozen=True)
class PromptFormat:
    """The wording and the rules in which V4.1 and V4 differ.

    `calls_tag`, `invoke_tag` and `parameter_tag` follow the DSML token inside a tag; V4.1 puts a space before them.
    `effort_lines` maps a level to the text at the start of the head; `effort_number` is the line for a numeric effort,
    with `{}` for the number, or None where the format has no numbers. `short_floats`: see `dump_json`.
    """

    calls_tag: str
    invoke_tag: str
    parameter_tag: str
    empty_arguments: str
    json_object: str
    effort_lines: dict
    effort_number: str | None
    system_token: bool
    images: bool
    short_floats: bool

    @property
    def tools_head(self) -> str:
        return _TOOLS_INTRODUCTION.format(
            dsml=DSML,
            think=THINK,
            think_end=THINK_END,
            calls=self.calls_tag,
            invoke=self.invoke_tag,
            parameter=self.parameter_tag,
        )


V41_FORMAT = PromptFormat(
    calls_tag=" calls",
    invoke_tag=" invoke",
    parameter_tag=" parameter",
    empty_arguments="\n",
    json_object=SCHEMA_HEAD + '{"type": "json_object"}',
    effort_lines={"low": _V41_EFFORT.format(50), "high": _V41_EFFORT.format(75), "max": _V41_EFFORT.format(100)},
    effort_number=_V41_EFFORT,
    system_token=True,
    images=True,
    short_floats=False,
)
V4_FORMAT = PromptFormat(
    calls_tag="tool_calls",
    invoke_tag="invoke",
    parameter_tag="parameter",
    empty_arguments="",
    json_object="You are a helpful assistant designed to output JSON.\n## Response Format:\n\nReply with JSON object ONLY.",
    effort_lines={"low": "", "high": _V4_HIGH_EFFORT, "max": _V4_MAX_EFFORT},
    effort_number=None,
    system_token=False,
    images=False,
    short_floats=True,
)
PROMPT_FORMATS = {"v41": V41_FORMAT, "v4": V4_FORMAT}
