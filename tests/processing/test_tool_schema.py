"""Tool definitions: forms, names, strict schemas. Expected values were read off the official request conversion."""

import pytest

from processing_dsv4.tool_schema import are_strict, check_response_schema, check_unique_names, normalize_tools


def tool(name="f", **function):
    return {"type": "function", "function": {"name": name, **function}}


def strict(properties, **schema):
    parameters = {"type": "object", "properties": properties, "required": list(properties), **schema}
    return normalize_tools([tool(strict=True, parameters=parameters)])[0]["parameters"]


def one(schema):
    return strict({"a": schema})["properties"]["a"]


def test_listed_form():
    assert normalize_tools(None) == normalize_tools([]) == []
    assert normalize_tools([tool()]) == [{"name": "f", "description": "", "parameters": {}}]
    shown = normalize_tools([tool(parameters={"type": "object", "x": 1}, description="d", foo=2)])[0]
    assert list(shown.items()) == [("name", "f"), ("description", "d"), ("parameters", {"type": "object", "x": 1})]


def test_functions_become_definitions():
    def add(a: int, b: int = 2):
        """
        Add two numbers.

        Args:
            a: the first
            b: the second
        """

    shown = normalize_tools([add])[0]
    assert shown["name"] == "add" and shown["description"] == "Add two numbers."
    assert shown["parameters"]["required"] == ["a"]


@pytest.mark.parametrize("name", ["", "a b", "é", "a" * 129, None, 3])
def test_refused_names(name):
    with pytest.raises(ValueError, match="name"):
        normalize_tools([tool(name)])
    with pytest.raises(ValueError, match="name"):
        normalize_tools([tool(name)], shown=False)


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        True,
        [],
        "x",
        {"properties": {}},
        {"type": "array"},
        {"type": ["object"]},
        {"type": "object", "properties": "bad"},
        {"type": "object", "required": "a"},
        {"type": "object", "required": ["a", "a"]},
        {"type": "object", "properties": {"a": {"type": "text"}}},
        {"type": "object", "properties": {"a": {"minimum": "x"}}},
        {"type": "object", "properties": {"a": {"minLength": 1.5}}},
        {"type": "object", "properties": {"a": {"anyOf": []}}},
        {"type": "object", "properties": {"a": 3}},
        {"type": "object", "title": True},
    ],
)
def test_refused_parameters(parameters):
    with pytest.raises(ValueError, match="'f'"):
        normalize_tools([tool(parameters=parameters)])
    assert normalize_tools([tool(parameters=parameters)], shown=False) == []


@pytest.mark.parametrize("bad", [{"name": "f"}, {"type": "function"}, {"type": "other", "function": {"name": "f"}}])
def test_refused_forms(bad):
    with pytest.raises(ValueError, match=r"tools\[0\]"):
        normalize_tools([bad])
    with pytest.raises(TypeError):
        normalize_tools(["f"])
    with pytest.raises(TypeError):
        normalize_tools(tool())
    with pytest.raises(TypeError):  # exhausted by the first conversation of a batch
        normalize_tools(iter([tool()]))


def test_names_must_be_unique():
    with pytest.raises(ValueError, match="unique"):
        check_unique_names(normalize_tools([tool(), tool()]))


def test_strict_tools_stand_alone():
    tools = [tool("f", strict=True), tool("g")]
    with pytest.raises(ValueError, match=r"strict.*\['g'\]"):
        normalize_tools(tools)
    assert normalize_tools(tools, shown=False) == []
    assert are_strict(tools[:1]) and not are_strict(tools[1:]) and not are_strict(None)


def test_strict_objects():
    empty = {"type": "object", "properties": {}, "additionalProperties": False, "required": []}
    assert normalize_tools([tool(strict=True)])[0]["parameters"] == empty
    assert normalize_tools([tool(strict=True, parameters={"type": "object"})])[0]["parameters"] == empty
    out = strict({"b": {"type": "string"}, "a": {"type": "null"}}, title="T", description="D")
    assert list(out) == ["type", "properties", "additionalProperties", "required", "description"]
    assert out["required"] == ["b", "a"]
    with pytest.raises(ValueError, match="without properties"):
        strict({"a": {"type": "object"}})
    with pytest.raises(ValueError, match="additionalProperties"):
        strict({"a": {"type": "string"}}, additionalProperties=True)
    for required in (["a", "a"], ["a", "z"], []):
        with pytest.raises(ValueError, match="require"):
            strict({"a": {"type": "string"}}, required=required)


def test_strict_keeps_only_what_it_knows():
    number = {"multipleOf": 2, "minimum": 1, "default": 1, "const": 3, "enum": [1], "title": "t", "description": "d"}
    assert list(one({"type": "integer", **number})) == [
        "type",
        "description",
        "const",
        "default",
        "minimum",
        "multipleOf",
    ]
    text = {"enum": ["a"], "pattern": "x", "format": "email", "minLength": 1, "const": "x", "default": "q"}
    assert list(one({"type": "string", **text}).items()) == [
        ("type", "string"),
        ("pattern", "x"),
        ("format", "email"),
        ("enum", ["a"]),
    ]
    assert one({"type": "array", "items": {"type": "string", "maxLength": 2}, "minItems": 1}) == {
        "type": "array",
        "items": {"type": "string"},
    }
    assert one({"type": ["string", "null"], "enum": ["x"], "description": "d"}) == {
        "type": ["string", "null"],
        "description": "d",
    }
    assert one({"anyOf": [{"type": "string", "minLength": 1}], "title": "t"}) == {"anyOf": [{"type": "string"}]}
    assert one({"$ref": "#/$def/x", "description": "d"}) == {"$ref": "#/$def/x"}
    assert strict({"a": {"type": "null"}}, **{"$def": {"x": {"type": "string", "title": "t"}}})["$def"] == {
        "x": {"type": "string"}
    }


@pytest.mark.parametrize(
    "schema",
    [
        {},
        True,
        {"oneOf": [{"type": "string"}]},
        {"type": "foo"},
        {"type": None},
        {"type": ["object", "null"]},
        {"type": "array"},
        {"type": "string", "format": "date"},
        {"type": "string", "enum": [1]},
        {"type": "integer", "minimum": 1.5},
        {"type": "integer", "default": "x"},
        {"anyOf": [{}]},
        {"$ref": 5},
    ],
)
def test_strict_refuses(schema):
    with pytest.raises(ValueError, match="'a'"):
        one(schema)


def test_response_schemas():
    schema = {
        "type": "object",
        "title": "T",
        "properties": {"a": {"type": "string", "minLength": 1}},
        "required": ["a"],
    }
    assert check_response_schema(schema, strict=True) == check_response_schema(schema, strict=False) == schema
    assert check_response_schema(True, strict=False) is True
    for bad in (None, "x", {"type": "object", "properties": 3}):
        with pytest.raises(ValueError, match="response_format"):
            check_response_schema(bad, strict=False)
    for bad in ({"type": "array", "items": {"type": "string"}}, {"type": "object"}, {"$ref": "#"}, True):
        with pytest.raises(ValueError, match="response_format"):
            check_response_schema(bad, strict=True)
