"""JSON as the prompt formats write it.

The official encoder is a compiled program with its own JSON library: 64-bit integers, finite floats, no lone
surrogates, 127 levels. V4.1 then prints like Python's `json.dumps(ensure_ascii=False)`; V4 prints small floats in
another way. What a model sees in a tool call depends on these details, so they are written down here once.
"""

import json
import math
from collections.abc import Mapping

# Objects and arrays inside each other that the official parser accepts.
MAX_DEPTH = 127
_INT_RANGE = range(-(2**63), 2**64)


def _integer(text: str) -> int | float:
    if text == "-0":
        return -0.0
    value = int(text)
    return value if value in _INT_RANGE else _finite(text)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"number out of range: {text}")
    return value


def refuse_constant(text: str):
    """Raise a ValueError: `NaN` and the infinities, which Python's parser takes, are not JSON."""
    raise ValueError(f"{text} is not JSON")


def check_text(text: str, where: str) -> str:
    """Return `text`, or raise a ValueError if it has a lone surrogate, which neither a tokenizer nor JSON can take."""
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f"{where} contains a lone surrogate, which no tokenizer can encode: {text!r}") from error
    return text


def to_json_value(value, where: str, depth: int = 0):
    """Return `value` as plain JSON data, in the number range of the official encoder.

    Args:
        value (`Any`): dicts with string keys, lists, tuples, strings, numbers, booleans and None.
        where (`str`): how an error message calls the value.

    Returns:
        A new structure of dict, list, str, int, float, bool and None. Integers beyond 64 bits become floats.

    Raises:
        ValueError: for NaN, infinities, lone surrogates, and more than 127 levels.
        TypeError: for anything that JSON has no form for.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return check_text(value, where)
    if isinstance(value, int):
        if value in _INT_RANGE:
            return int(value)
        try:
            return float(value)
        except OverflowError as error:
            raise ValueError(f"{where} contains a number that is out of range") from error
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{where} contains {value}, which is not JSON; use finite numbers or None")
        return float(value)
    if depth >= MAX_DEPTH:
        raise ValueError(f"{where} is nested deeper than {MAX_DEPTH} levels, which the official encoder refuses")
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"{where} has the key {key!r} of type {type(key).__name__}; JSON keys are strings")
            to_json_value(key, where, depth)
        return {key: to_json_value(item, where, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json_value(item, where, depth + 1) for item in value]
    raise TypeError(f"{where} contains a {type(value).__name__}, which is not JSON: {value!r}")


def parse_json(text: str):
    """Parse a JSON text strictly.

    Args:
        text (`str`): one JSON value, surrounded by JSON whitespace at most.

    Returns:
        Plain JSON data; the last of several equal keys wins, in the place of the first.

    Raises:
        ValueError: if the official parser would refuse the text (syntax, NaN, overflow, lone surrogates, depth).
    """
    try:
        value = json.loads(text, parse_int=_integer, parse_float=_finite, parse_constant=refuse_constant)
    except RecursionError as error:
        raise ValueError("the JSON text is nested too deep") from error
    return to_json_value(value, "the JSON text")


def dump_json(value, short_floats: bool = False) -> str:
    """Print plain JSON data in one line, with a space after commas and colons.

    Args:
        value (`Any`): data as [`to_json_value`] and [`parse_json`] return it.
        short_floats (`bool`, *optional*, defaults to `False`):
            Print floats below 1e-4 as V4 does (0.00001, then 1e-6 without a zero) instead of as Python does (1e-05).

    Returns:
        `str`: the JSON text; characters outside ASCII stand as they are.
    """
    if not short_floats:
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, float):
        return _short_float(value)
    if isinstance(value, dict):
        items = (f"{json.dumps(key, ensure_ascii=False)}: {dump_json(item, True)}" for key, item in value.items())
        return "{" + ", ".join(items) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(dump_json(item, True) for item in value) + "]"
    return json.dumps(value, ensure_ascii=False)


def _short_float(value: float) -> str:
    text = repr(value)
    mantissa, _, exponent = text.partition("e-")
    if not exponent:
        return text
    if int(exponent) != 5:
        return f"{mantissa}e-{int(exponent)}"
    sign = "-" if value < 0 else ""
    return f"{sign}0.0000{mantissa.lstrip('-').replace('.', '')}"
