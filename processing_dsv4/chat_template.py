"""The prompt formats as Jinja templates, for tools that only know templates.

A template is built from the fixed wording, so it says the same as the Python renderer. It gives the same string except
where a template cannot:

- `strict: true` tools are shown as they are; the renderer shows the schema that strict mode enforces.
- V4 prints small floats (below 1e-4) in its own way, a template as Python does.
- Arguments given as a JSON text are not parsed; pass dicts. A text becomes one parameter called `arguments`.
- Numbers beyond 64 bits are not turned into floats.
- Conversations that the renderer refuses are mostly rendered; only unknown roles and images in answers are refused.
- A template cannot tell an open last message from a finished one. Without a generation prompt it keeps the reasoning
  of an assistant message at the end; the renderer does so for open messages and with `keep_last_reasoning=True`.

Token ids made from a rendered string are not safe: whoever writes a control token into a message gets one.
"""

import functools
import json

from .prompt_constants import (
    ASSISTANT,
    BOS,
    DEFAULT_EFFORT_LEVEL,
    DSML,
    EFFORT_LEVELS,
    EOS,
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
)

# The parts of the template that need no wording. Every tag trims the whitespace around it, so layout costs nothing.
_BODY = """
{%- macro parts(content) -%}
    {%- if content is string -%}{{- content -}}
    {%- else -%}
        {%- for part in content -%}
            {%- if not loop.first -%}{{- '\\n\\n' -}}{%- endif -%}
            {%- if part.type == 'text' -%}{{- part.text -}}
            {%- elif part.type in ['image', 'image_url'] -%}{{- image -}}
            {%- else -%}{{- raise_exception('a part must be of type text, image or image_url, got ' ~ part.type) -}}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}

{%- macro calls_of(message) -%}
    {{- '\\n\\n<' ~ dsml ~ calls_tag ~ '>\\n' -}}
    {%- for call in message.tool_calls -%}
        {{- '<' ~ dsml ~ invoke_tag ~ ' name="' ~ call.function.name ~ '">\\n' -}}
        {%- set arguments = call.function.arguments -%}
        {%- if arguments is not mapping -%}{%- set arguments = {'arguments': arguments} -%}{%- endif -%}
        {%- if not arguments -%}{{- empty_arguments -}}{%- endif -%}
        {%- for name, value in arguments.items() -%}
            {{- '<' ~ dsml ~ parameter_tag ~ ' name="' ~ name ~ '" string="' -}}
            {{- 'true">' ~ value if value is string else 'false">' ~ (value | tojson) -}}
            {{- '</' ~ dsml ~ parameter_tag ~ '>\\n' -}}
        {%- endfor -%}
        {{- '</' ~ dsml ~ invoke_tag ~ '>\\n' -}}
    {%- endfor -%}
    {{- '</' ~ dsml ~ calls_tag ~ '>' -}}
{%- endmacro -%}

{%- set effort = reasoning_effort if reasoning_effort is defined and reasoning_effort is not none else '' -%}
{%- if enable_thinking is defined and enable_thinking is not none -%}{%- set thinking = enable_thinking -%}
{%- else -%}{%- set thinking = effort != 'none' -%}
{%- endif -%}
{%- set choice = tool_choice if tool_choice is defined and tool_choice is not none else 'auto' -%}
{%- set format = response_format if response_format is defined and response_format is not none else {} -%}
{%- set keep_last = keep_last_reasoning is defined and keep_last_reasoning -%}
{%- set keep_open = keep_last_reasoning is not defined and not add_generation_prompt -%}

{#- Tools: none of them on request, one of them where the choice names it. -#}
{%- set ns = namespace(tools=[], turns=[], head=[], run=[], open=true, found=false, previous='', last=-1) -%}
{%- if tools and choice != 'none' -%}
    {%- for tool in tools -%}
        {%- if choice is string or tool.function.name == choice.function.name -%}{%- set ns.tools = ns.tools + [tool] -%}{%- endif -%}
    {%- endfor -%}
{%- endif -%}

{%- set empty = ['', [], [{'type': 'text', 'text': ''}]] -%}
{#- Turns: empty system messages vanish, results are sorted into the order of their calls. -#}
{%- for message in messages -%}
    {%- if message.role not in ['system', 'user', 'assistant', 'tool', 'latest_reminder'] -%}
        {{- raise_exception('unknown role: ' ~ message.role) -}}
    {%- elif message.role == 'system' -%}
        {%- if message.content not in empty -%}
            {%- if (not ns.turns and not ns.head) or not system_token -%}{%- set ns.head = ns.head + [message] -%}
            {%- else -%}{%- set ns.turns = ns.turns + [message] -%}
            {%- endif -%}
        {%- endif -%}
    {%- elif message.role == 'latest_reminder' and system_token and ns.turns and ns.turns[-1].role == 'latest_reminder' -%}
        {#- Of several reminders in a row the first counts. -#}
    {%- elif message.role == 'user' and not system_token and ns.turns and ns.turns[-1].role == 'user' and message.content in empty -%}
        {#- V4 joins user messages in a row and leaves the empty ones out. -#}
    {%- elif message.role == 'user' and not system_token and ns.turns and ns.turns[-1].role == 'user' and ns.turns[-1].content in empty -%}
        {%- set ns.turns = ns.turns[:-1] + [message] -%}
    {%- elif message.role != 'tool' -%}
        {%- set ns.turns = ns.turns + [message] -%}
        {%- if message.role == 'assistant' -%}{%- set ns.last = ns.turns | length - 1 -%}{%- endif -%}
        {%- if message.role == 'assistant' and message.tool_calls -%}
            {%- set ns.run = [] -%}
            {%- set ns.open = true -%}
            {%- for result in messages[loop.index:] -%}
                {%- if result.role != 'tool' -%}{%- set ns.open = false -%}{%- endif -%}
                {%- if ns.open -%}{%- set ns.run = ns.run + [result] -%}{%- endif -%}
            {%- endfor -%}
            {%- for result in ns.run -%}
                {%- set ns.found = false -%}
                {%- for call in message.tool_calls -%}
                    {%- if call.id and result.tool_call_id == call.id -%}{%- set ns.found = true -%}{%- endif -%}
                {%- endfor -%}
                {%- if not ns.found -%}{%- set ns.turns = ns.turns + [result] -%}{%- endif -%}
            {%- endfor -%}
            {%- for call in message.tool_calls -%}
                {%- for result in ns.run -%}
                    {%- if call.id and result.tool_call_id == call.id -%}{%- set ns.turns = ns.turns + [result] -%}{%- endif -%}
                {%- endfor -%}
            {%- endfor -%}
        {%- endif -%}
    {%- endif -%}
{%- endfor -%}

{#- Head: effort, system text, tools, format of the answer. -#}
{{- bos -}}
{%- set ns.line = '' -%}
{%- if thinking and (ns.head or ns.turns or ns.tools or format.type in ['json_object', 'json_schema'] or not system_token) -%}
    {%- if effort is string and effort in effort_levels -%}{%- set ns.line = effort_lines[effort_levels[effort]] -%}
    {%- elif effort in ['', 'none'] -%}{%- set ns.line = effort_lines[default_level] -%}
    {%- elif effort_number and effort | int >= 1 and effort | int <= 100 -%}
        {%- set ns.line = effort_number[0] ~ (effort | int) ~ effort_number[1] -%}
    {%- else -%}{{- raise_exception('unknown reasoning_effort: ' ~ effort) -}}
    {%- endif -%}
{%- endif -%}
{%- set ns.format = '' -%}
{%- if format.type == 'json_object' -%}{%- set ns.format = json_object -%}
{%- elif format.type == 'json_schema' -%}{%- set ns.format = schema_head ~ (format.json_schema.schema | tojson) -%}
{%- endif -%}
{%- if system_token and (ns.line or ns.head or ns.tools or ns.format) -%}{{- system -}}{%- endif -%}
{{- ns.line -}}
{%- for message in ns.head -%}
    {%- if not loop.first -%}{{- '\\n\\n' -}}{%- endif -%}
    {{- parts(message.content) -}}
{%- endfor -%}
{%- if ns.tools -%}
    {{- '\\n\\n' ~ tools_head -}}
    {%- for tool in ns.tools -%}
        {%- if not loop.first -%}{{- '\\n' -}}{%- endif -%}
        {{- '{"name": ' ~ (tool.function.name | tojson) -}}
        {{- ', "description": ' ~ ((tool.function.description or '') | tojson) -}}
        {{- ', "parameters": ' ~ ((tool.function.parameters or {}) | tojson) ~ '}' -}}
    {%- endfor -%}
    {{- tools_tail -}}
{%- endif -%}
{%- if ns.format -%}{{- '\\n\\n' ~ ns.format -}}{%- endif -%}

{%- for message in ns.turns -%}
    {%- if message.role == 'assistant' -%}
        {%- if message.content is not string and message.content -%}
            {%- for part in message.content -%}
                {%- if part.type != 'text' -%}{{- raise_exception('images in assistant messages are not supported') -}}{%- endif -%}
            {%- endfor -%}
        {%- endif -%}
        {%- set kept = thinking and (ns.tools or (loop.index0 == ns.last and (keep_last or (keep_open and loop.last and (ns.head or ns.format or loop.index0 or not system_token))))) -%}
        {{- assistant -}}
        {%- if kept -%}{{- think -}}{%- else -%}{{- think_end -}}{%- endif -%}
        {%- generation -%}
        {%- if kept -%}{{- message.reasoning_content or '' -}}{{- think_end -}}{%- endif -%}
        {{- parts(message.content or '') -}}
        {%- if message.tool_calls -%}{{- calls_of(message) -}}{%- endif -%}
        {{- eos -}}
        {%- endgeneration -%}
    {%- else -%}
        {%- if message.role == 'system' -%}{{- system -}}
        {%- elif message.role == 'latest_reminder' -%}{{- reminder -}}
        {%- elif ns.previous in ['user', 'tool'] -%}{{- '\\n\\n' -}}
        {%- else -%}{{- user -}}
        {%- endif -%}
        {%- if message.role == 'tool' -%}{{- '<tool_result>' -}}{%- endif -%}
        {{- parts(message.content) -}}
        {%- if message.role == 'tool' -%}{{- '</tool_result>' -}}{%- endif -%}
    {%- endif -%}
    {%- set ns.previous = message.role -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- assistant -}}
    {{- think if thinking else think_end -}}
    {%- if ns.tools and choice not in ['auto', 'none'] -%}{{- '\\n\\n<' ~ dsml ~ calls_tag ~ '>\\n' -}}{%- endif -%}
{%- endif -%}
"""


@functools.cache
def build_chat_template(version: str = "v41") -> str:
    """Return the Jinja template of a prompt format.

    Args:
        version (`str`, *optional*, defaults to `"v41"`): `"v41"` or `"v4"`.

    Returns:
        `str`: a template for transformers, with `generation` blocks around what an assistant wrote. It reads
        `messages`, `tools`, `add_generation_prompt`, `enable_thinking`, `reasoning_effort`, `tool_choice`,
        `response_format` and `keep_last_reasoning`.

    Raises:
        ValueError: for another version.
    """
    if version not in PROMPT_FORMATS:
        raise ValueError(f"version must be one of {list(PROMPT_FORMATS)}, got {version!r}")
    form = PROMPT_FORMATS[version]
    wording = {
        "bos": BOS,
        "eos": EOS,
        "system": SYSTEM,
        "user": USER,
        "assistant": ASSISTANT,
        "reminder": REMINDER,
        "think": THINK,
        "think_end": THINK_END,
        "dsml": DSML,
        "image": IMAGE if form.images else UNSUPPORTED_IMAGE,
        "system_token": form.system_token,
        "calls_tag": form.calls_tag,
        "invoke_tag": form.invoke_tag,
        "parameter_tag": form.parameter_tag,
        "empty_arguments": form.empty_arguments,
        "effort_levels": EFFORT_LEVELS,
        "effort_lines": form.effort_lines,
        "effort_number": form.effort_number.split("{}") if form.effort_number else None,
        "default_level": DEFAULT_EFFORT_LEVEL,
        "tools_head": form.tools_head,
        "tools_tail": TOOLS_TAIL,
        "schema_head": SCHEMA_HEAD,
        "json_object": form.json_object,
    }
    lines = [f"{{%- set {name} = {_literal(value)} -%}}" for name, value in wording.items()]
    return "\n".join(lines) + _BODY.rstrip("\n")


def _literal(value) -> str:
    # Jinja reads JSON literals, and lower-case true, false and none.
    return "none" if value is None else json.dumps(value, ensure_ascii=False)
