"""JSON as the official encoder reads and prints it."""

import json
import math

import pytest

from processing_dsv4.json_text import dump_json, parse_json, to_json_value

# (JSON text, printed by V4.1, printed by V4), as the official toolkit prints them.
NUMBERS = [
    ("0.0001", "0.0001", "0.0001"),
    ("9.9e-5", "9.9e-05", "0.000099"),
    ("1e-5", "1e-05", "0.00001"),
    ("-1.2345e-5", "-1.2345e-05", "-0.000012345"),
    ("1e-6", "1e-06", "1e-6"),
    ("1.5e-7", "1.5e-07", "1.5e-7"),
    ("1e-10", "1e-10", "1e-10"),
    ("5e-324", "5e-324", "5e-324"),
    ("1e-400", "0.0", "0.0"),
    ("1e15", "1000000000000000.0", "1000000000000000.0"),
    ("1e16", "1e+16", "1e+16"),
    ("12345678901234567.8", "1.2345678901234568e+16", "1.2345678901234568e+16"),
    ("-0", "-0.0", "-0.0"),
    ("2.50", "2.5", "2.5"),
    ("100.0", "100.0", "100.0"),
    ("18446744073709551615", "18446744073709551615", "18446744073709551615"),
    ("18446744073709551616", "1.8446744073709552e+19", "1.8446744073709552e+19"),
    ("-9223372036854775808", "-9223372036854775808", "-9223372036854775808"),
    ("-9223372036854775809", "-9.223372036854776e+18", "-9.223372036854776e+18"),
]


@pytest.mark.parametrize(("text", "v41", "v4"), NUMBERS)
def test_numbers(text, v41, v4):
    value = parse_json(text)
    assert dump_json(value) == v41
    assert dump_json({"a": [value]}, short_floats=True) == f'{{"a": [{v4}]}}'


@pytest.mark.parametrize(
    "text",
    [
        "",
        "NaN",
        '{"a": Infinity}',
        '{"a": 1e400}',
        '{"a": 1,}',
        '{"a": 01}',
        '{"a": "\\ud800"}',
        '{"\\udc00": 1}',
        '{"a": "x\ny"}',
        "\ufeff{}",
        '{"a": 1}x',
        "1" * 5000,
        '{"a":' + "[" * 127 + "]" * 127 + "}",
        "[" * 100000,
    ],
)
def test_refused_texts(text):
    with pytest.raises(ValueError):
        parse_json(text)


def test_accepted_texts():
    assert parse_json('\t{"b": 1, "a": 2, "b": 3}\n') == {"b": 3, "a": 2}
    assert list(parse_json('{"b": 1, "a": 2, "b": 3}')) == ["b", "a"]
    assert parse_json('"\\ud83d\\ude00"') == "😀"
    assert parse_json('{"a":' + "[" * 126 + "]" * 126 + "}")["a"] != []


def test_python_values():
    value = {"t": (1, True, None), "big": 2**70, "s": "é\u2028\x00"}
    assert to_json_value(value, "x") == {"t": [1, True, None], "big": float(2**70), "s": "é\u2028\x00"}
    assert (
        dump_json(to_json_value(value, "x"))
        == '{"t": [1, true, null], "big": 1.1805916207174113e+21, "s": "é\u2028\\u0000"}'
    )
    for bad in (math.nan, math.inf, "\ud800", 10**400):
        with pytest.raises(ValueError, match="the value"):
            to_json_value({"a": bad}, "the value")
    for bad in (object(), {1: 2}, {"a": {2}}):
        with pytest.raises(TypeError, match="the value"):
            to_json_value({"a": bad}, "the value")


def test_both_printers_agree_but_for_small_floats():
    value = {"a": [1, 2.5, 'x"\n', None, {"é": []}], "b": {}, "c": False}
    assert dump_json(value, short_floats=True) == dump_json(value) == json.dumps(value, ensure_ascii=False)
