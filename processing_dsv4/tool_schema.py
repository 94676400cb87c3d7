"""Tool definitions: what is accepted, and how a tool is written into the prompt.

A tool is `{"type": "function", "function": {"name", "description", "parameters", "strict"}}`, or a Python function,
which transformers turns into that form. Tools with `strict: true` are rewritten before they are shown, as the official
request conversion does: the server constrains the output to the rewritten schema, so the model must see that one.
"""

import re
from collections.abc import Mapping

from transformers.utils import get_json_schema

from .json_text import to_json_value

_NAME = re.compile(r"[A-Za-z0-9_-]+\Z")
_MAX_NAME_LENGTH = 128

_SCHEMA_TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
# Keywords of JSON Schema by the kind of value that they take, for a check of schemas that are not strict.
_SCHEMA_VALUED = ("items", "additionalProperties", "not", "contains", "propertyNames", "if", "then", "else")
_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_TEXTS = ("description", "title", "pattern", "format", "$ref", "$schema", "$id", "$comment")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")

# Strict schemas: the scalar types that a list of types may name, the formats of strings, and the keywords that a number
# keeps, in the order in which they are written.
_SCALAR_TYPES = ("string", "number", "integer", "boolean", "null")
_STRICT_FORMATS = ("email", "hostname", "ipv4", "ipv6", "uuid")
_STRICT_NUMBER_KEYS = ("const", "default", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


def normalize_tools(tools, shown: bool = True) -> list[dict]:
    """Check tool definitions and bring them into the form in which the prompt lists them.

    Args:
        tools (`list` of `dict` or functions, or `None`):
            Definitions in the format of OpenAI and transformers. None and an empty list mean: no tools.
        shown (`bool`, *optional*, defaults to `True`):
            False for a request that hides its tools; then only the outer form is checked, and nothing is returned.

    Returns:
        `list[dict]`: for every tool `{"name", "description", "parameters"}` in this order; a missing description is "",
        missing parameters are {}. The parameters of strict tools are rewritten.

    Raises:
        ValueError: for a name or a schema that is not accepted, and for strict tools beside others.
        TypeError: for something that is neither a dict nor a function.
    """
    if tools is None:
        return []
    if not isinstance(tools, (list, tuple)):  # an iterator would be empty for the next conversation of a batch
        raise TypeError(f"tools must be a list of definitions or functions, got {type(tools).__name__}")
    functions = [_function_of(tool, index) for index, tool in enumerate(tools)]
    if not shown:
        return []
    strict = [function.get("strict") or False for function in functions]
    if any(strict) and not all(strict):
        names = [function["name"] for function, flag in zip(functions, strict, strict=True) if not flag]
        raise ValueError(f"tools with strict=True cannot stand beside others in one request; not strict: {names}")
    return [_definition(function, flag) for function, flag in zip(functions, strict, strict=True)]


def are_strict(tools) -> bool:
    """Return whether `tools`, which [`normalize_tools`] accepted, are strict (all of them then are)."""
    return any(isinstance(tool, Mapping) and bool(tool["function"].get("strict")) for tool in tools or ())


def check_unique_names(tools: list[dict]) -> None:
    """Raise a ValueError if two of the normalized `tools` have the same name."""
    seen = set()
    for tool in tools:
        if tool["name"] in seen:
            raise ValueError(f"tool names must be unique, got {tool['name']!r} twice")
        seen.add(tool["name"])


def check_response_schema(schema, strict: bool):
    """Check the JSON schema of a response format and return it as plain JSON data.

    Args:
        schema (`dict` or `bool`): the schema that the answer must follow; shown to the model as it is.
        strict (`bool`): also require the subset of JSON Schema that strict mode can enforce.

    Raises:
        ValueError: if it is not a schema, or not in the subset.
    """
    where = "response_format['json_schema']['schema']"
    schema = to_json_value(schema, where)
    if strict:
        _strict_root(schema, where)
    else:
        _check_schema(schema, where)
    return schema


def _function_of(tool, index: int) -> dict:
    where = f"tools[{index}]"
    if callable(tool) and not isinstance(tool, Mapping):
        tool = get_json_schema(tool)
    if not isinstance(tool, Mapping):
        raise TypeError(f"{where} must be a definition (dict) or a function, got {type(tool).__name__}")
    if tool.get("type") != "function":
        raise ValueError(f"{where}['type'] must be 'function', got {tool.get('type')!r}")
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise ValueError(f"{where}['function'] must be a dict with a name, got {function!r}")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.match(name) or len(name) > _MAX_NAME_LENGTH:
        raise ValueError(
            f"{where}['function']['name'] must be 1 to {_MAX_NAME_LENGTH} letters, digits, '_' or '-', got {name!r}"
        )
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise ValueError(f"{where}['function']['description'] must be a string, got {description!r}")
    strict = function.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise ValueError(f"{where}['function']['strict'] must be True, False or None, got {strict!r}")
    return dict(function)


def _definition(function: dict, strict: bool) -> dict:
    where = f"the parameters of tool {function['name']!r}"
    description = to_json_value(function.get("description") or "", f"the description of tool {function['name']!r}")
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {"type": "object"} if strict else {}
    else:
        parameters = to_json_value(parameters, where)
        if not strict:
            _check_schema(parameters, where)
            kind = parameters.get("type") if isinstance(parameters, dict) else None
            if kind != "object":
                raise ValueError(
                    f"{where} must be a JSON schema of type 'object', got type {kind!r}; leave them out if empty"
                )
    if strict:
        parameters = _strict_root(parameters, where, allow_empty=True)
    return {"name": function["name"], "description": description, "parameters": parameters}


def _check_schema(schema, where: str) -> None:
    """Raise a ValueError where a keyword of JSON Schema has a value that it cannot have."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise ValueError(f"{where} must be a JSON schema (dict or bool), got {schema!r}")
    for key, value in schema.items():
        here = f"{where}[{key!r}]"
        if key in _SCHEMA_VALUED:
            _check_schema(value, here)
        elif key in _SCHEMA_MAPS:
            if not isinstance(value, dict):
                raise ValueError(f"{here} must be a dict of schemas, got {value!r}")
            for name, item in value.items():
                _check_schema(item, f"{here}[{name!r}]")
        elif key in _SCHEMA_LISTS:
            if not isinstance(value, list) or not value:
                raise ValueError(f"{here} must be a list of at least one schema, got {value!r}")
            for index, item in enumerate(value):
                _check_schema(item, f"{here}[{index}]")
        elif not _keyword_value_ok(key, value):
            raise ValueError(f"{here} has a value that JSON Schema does not allow: {value!r}")


def _keyword_value_ok(key: str, value) -> bool:
    if key == "type":
        names = value if isinstance(value, list) else [value]
        return bool(names) and _all_text(names) and set(names) <= set(_SCHEMA_TYPES)
    if key == "required":
        return isinstance(value, list) and _all_text(value) and len(set(value)) == len(value)
    if key == "enum":
        return isinstance(value, list)
    if key in _TEXTS:
        return isinstance(value, str)
    if key in _COUNTS:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0 and value == int(value)
    if key in _NUMBERS:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return number and (key != "multipleOf" or value > 0)
    return True


def _all_text(values: list) -> bool:
    return all(isinstance(value, str) for value in values)


def _strict_root(schema, where: str, allow_empty: bool = False) -> dict:
    rewritten = _strict(schema, where, allow_empty)
    if not isinstance(schema, dict) or schema.get("type") != "object":
        raise ValueError(f"{where}: the top level of a strict schema must be an object, got {schema!r}")
    definitions = schema.get("$def")
    if definitions is not None:
        if not isinstance(definitions, dict):
            raise ValueError(f"{where}['$def'] must be a dict of schemas, got {definitions!r}")
        rewritten["$def"] = {name: _strict(item, f"{where}['$def'][{name!r}]") for name, item in definitions.items()}
    return rewritten


def _strict(schema, where: str, allow_empty: bool = False) -> dict:
    """Rewrite one schema into the strict subset: known keywords only, in a fixed order."""
    if not isinstance(schema, dict) or not any(key in schema for key in ("type", "anyOf", "$ref")):
        raise ValueError(f"{where}: a strict schema needs one of 'type', 'anyOf', '$ref', got {schema!r}")
    description = _take(schema, "description", str, where)
    tail = {} if description is None else {"description": description}
    if "type" in schema:
        kind = schema["type"]
        if isinstance(kind, list):
            if not all(isinstance(name, str) and name in _SCALAR_TYPES for name in kind):
                raise ValueError(f"{where}: a list of types may name {list(_SCALAR_TYPES)}, got {kind!r}")
            return {"type": kind, **tail}
        if not isinstance(kind, str) or kind not in _SCHEMA_TYPES:
            raise ValueError(f"{where}: unknown type {kind!r}, expected one of {list(_SCHEMA_TYPES)}")
        if kind == "object":
            return {**_strict_object(schema, where, allow_empty), **tail}
        if kind == "array":
            if "items" not in schema:
                raise ValueError(f"{where}: a strict array needs 'items'")
            return {"type": kind, "items": _strict(schema["items"], f"{where}['items']"), **tail}
        if kind == "string":
            return {"type": kind, **tail, **_strict_string(schema, where)}
        if kind in ("integer", "number"):
            return {"type": kind, **tail, **_strict_number(schema, kind, where)}
        return {"type": kind, **tail}
    if "anyOf" in schema:
        choices = schema["anyOf"]
        if not isinstance(choices, list):
            raise ValueError(f"{where}['anyOf'] must be a list of schemas, got {choices!r}")
        return {"anyOf": [_strict(item, f"{where}['anyOf'][{i}]") for i, item in enumerate(choices)], **tail}
    return {"$ref": _take(schema, "$ref", str, where)}


def _strict_object(schema: dict, where: str, allow_empty: bool) -> dict:
    properties = _take(schema, "properties", dict, where) or {}
    if not properties and not allow_empty:
        raise ValueError(f"{where}: a strict object without properties is not allowed")
    if _take(schema, "additionalProperties", bool, where):
        raise ValueError(f"{where}: additionalProperties must not be true in a strict schema")
    names = list(properties)
    required = _take(schema, "required", list, where)
    if required is not None:
        if not _all_text(required) or len(set(required)) != len(required) or set(required) != set(names):
            raise ValueError(f"{where}: a strict object must require each of its properties once; got {required!r}")
    rewritten = {name: _strict(item, f"{where}['properties'][{name!r}]") for name, item in properties.items()}
    return {"type": "object", "properties": rewritten, "additionalProperties": False, "required": names}


def _strict_string(schema: dict, where: str) -> dict:
    out = {}
    pattern = _take(schema, "pattern", str, where)
    if pattern is not None:
        out["pattern"] = pattern
    form = _take(schema, "format", str, where)
    if form is not None:
        if form not in _STRICT_FORMATS:
            raise ValueError(f"{where}: unknown format {form!r}, expected one of {list(_STRICT_FORMATS)}")
        out["format"] = form
    choices = _take(schema, "enum", list, where)
    if choices is not None:
        if not _all_text(choices):
            raise ValueError(f"{where}: the enum of a strict string must list strings, got {choices!r}")
        out["enum"] = choices
    return out


def _strict_number(schema: dict, kind: str, where: str) -> dict:
    out = {}
    for key in _STRICT_NUMBER_KEYS:
        value = schema.get(key)
        if value is None:
            continue
        accepted = (int,) if kind == "integer" else (int, float)
        if not isinstance(value, accepted) or isinstance(value, bool):
            raise ValueError(f"{where}[{key!r}] must be of type {kind} in a strict schema, got {value!r}")
        out[key] = value
    return out


def _take(schema: dict, key: str, kind: type, where: str):
    value = schema.get(key)
    if value is not None and not isinstance(value, kind):
        raise ValueError(f"{where}[{key!r}] must be of type {kind.__name__}, got {value!r}")
    return value
