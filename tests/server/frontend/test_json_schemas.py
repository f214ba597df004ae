"""Schemas of zod, pydantic and .NET: what llguidance takes holds the same or less, or is named."""

import json
import time
from typing import Any

import pytest
from frontend_rig import FakeBackend, Running
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from segue.server.frontend.json_schemas import fitted

TEXT, FREE = {"type": "string"}, {}
A, B = ({"type": "object", "properties": {"k": {"const": k}}, "required": ["k"]} for k in "ab")
DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
#: A schema, what is made of it (None: itself), and the keywords that are named.
ROWS: list[tuple[Any, Any, list[str]]] = [
    # annotations
    *(({"type": "string", "format": f}, TEXT, []) for f in ("url", "byte", "base64", "cuid", "jwt", "regex")),
    ({"type": "integer", "format": "int32"}, {"type": "integer"}, []),
    ({"type": "string", "format": "date-time"}, None, []),
    (
        {"title": None, "type": "string", "format": None, "minLength": None, "default": None},
        TEXT | {"default": None},
        [],
    ),
    ({"type": "object", "properties": None, "required": None}, {"type": "object"}, []),
    ({"type": "array", "uniqueItems": False}, {"type": "array"}, []),
    ({"type": "string", "minLength": 1.0}, {"type": "string", "minLength": 1}, []),
    ({"type": "object", "unevaluatedProperties": True, "propertyNames": TEXT}, {"type": "object"}, []),
    ({"type": "string", "if": FREE, "then": FREE}, TEXT, []),
    # unions
    ({"oneOf": [{"type": "integer"}, TEXT]}, {"anyOf": [{"type": "integer"}, TEXT]}, []),
    (
        {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        {"anyOf": [{"type": "integer"}, {"type": "number"}]},
        ["oneOf"],
    ),
    ({"oneOf": [A, B]}, {"anyOf": [A, B]}, []),
    ({"oneOf": [A, A]}, {"anyOf": [A, A]}, ["oneOf"]),
    (
        {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": {"a": A, "b": B}},
        {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": {"a": A, "b": B}},
        [],
    ),
    (
        {"oneOf": [{"const": 1}, {"const": 2}], "anyOf": [FREE]},
        {"anyOf": [FREE], "allOf": [{"anyOf": [{"const": 1}, {"const": 2}]}]},
        [],
    ),
    # patterns
    (
        {"type": "string", "pattern": DECIMAL},
        {"type": "string", "pattern": r"^[+-]?0*\d*\.?\d*$"},
        ["pattern"],
    ),
    ({"type": "string", "pattern": EMAIL}, {"type": "string", "pattern": "^" + EMAIL[17:]}, ["pattern"]),
    ({"type": "string", "pattern": r"^(?<!a(b))\ba$"}, {"type": "string", "pattern": "^a$"}, ["pattern"]),
    ({"type": "string", "pattern": r"^(a)\1$"}, TEXT, ["pattern"]),
    ({"type": "string", "pattern": r"^(?!a)*$"}, TEXT, ["pattern"]),
    (
        {"type": "string", "pattern": r"^[(?=[](?:a)(?<n>b)\(?=$"},
        {"type": "string", "pattern": r"^[(?=\[](?:a)(?<n>b)\(?=$"},
        [],
    ),
    # objects
    (
        {"type": "object", "propertyNames": {"enum": ["a"]}, "additionalProperties": TEXT},
        {"type": "object", "properties": {"a": TEXT}, "additionalProperties": False},
        [],
    ),
    (
        {"type": "object", "propertyNames": {"pattern": "^a"}},
        {"type": "object", "patternProperties": {"^a": True}, "additionalProperties": False},
        [],
    ),
    ({"type": "object", "propertyNames": {"maxLength": 3}}, {"type": "object"}, ["propertyNames"]),
    (
        {"type": "object", "unevaluatedProperties": False},
        {"type": "object", "additionalProperties": False},
        [],
    ),
    ({"allOf": [A], "unevaluatedProperties": False}, {"allOf": [A]}, ["unevaluatedProperties"]),
    (
        {"type": "object", "required": ["a"], "dependentRequired": {"a": ["b"]}},
        {"type": "object", "required": ["a", "b"]},
        [],
    ),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, {"type": "object"}, ["dependentRequired"]),
    (
        {"type": "object", "properties": {"a": TEXT}, "minProperties": 1},
        {"type": "object", "properties": {"a": TEXT}},
        ["minProperties"],
    ),
    ({"if": A, "then": {"required": ["b"]}, "else": FREE}, FREE, ["if"]),
    (
        {"patternProperties": {"^(?!a)": TEXT, r"(a)\1": TEXT}},
        {"patternProperties": {"^": TEXT}},
        ["patternProperties"],
    ),
    # not
    (
        {"type": "object", "properties": {"a": {"not": {}}}},
        {"type": "object", "properties": {"a": {"allOf": [False]}}},
        [],
    ),
    ({"not": {"type": "null"}}, {"type": ["boolean", "integer", "number", "string", "array", "object"]}, []),
    ({"enum": ["a", "b"], "not": {"const": "a"}}, {"enum": ["b"]}, []),
    ({"type": "string", "not": {"const": "a"}}, TEXT, ["not"]),
    # lists
    (
        {"type": "array", "items": TEXT, "uniqueItems": True},
        {"type": "array", "items": TEXT},
        ["uniqueItems"],
    ),
    (
        {"type": "array", "items": TEXT, "contains": {"const": "a"}},
        {"type": "array", "items": TEXT, "prefixItems": [{"allOf": [TEXT, {"const": "a"}]}], "minItems": 1},
        [],
    ),
    ({"type": "array", "contains": TEXT, "minContains": 2}, {"type": "array"}, ["contains"]),
    (
        {"type": "array", "prefixItems": [TEXT], "unevaluatedItems": False},
        {"type": "array", "prefixItems": [TEXT], "items": False},
        [],
    ),
    # numbers
    (
        {"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308},
        {"type": "number"},
        [],
    ),
    (
        {"type": "number", "minimum": -3.4e38, "maximum": 3.4e38},
        {"type": "number", "minimum": -1e16, "maximum": 1e16},
        [],
    ),
    ({"type": "number", "exclusiveMinimum": 5e-324}, {"type": "number", "exclusiveMinimum": 1e-9}, []),
    ({"type": "number", "minimum": 1e20}, {"type": "number"}, ["minimum"]),
    (
        {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
        {"type": "integer", "minimum": 1024 - 2**63, "maximum": 2**63 - 1024},
        [],
    ),
    ({"type": "integer", "minimum": -(2**31), "maximum": 2**31 - 1}, None, []),
    ({"$ref": "#/$defs/a", "const": "x", "$defs": {"a": TEXT}}, None, []),
    # what only looks like a keyword
    (
        {"type": "object", "properties": {"not": TEXT, "if": TEXT, "format": TEXT}, "default": {"not": 1}},
        None,
        [],
    ),
    ({"const": {"format": "x"}, "enum": [{"not": {}}]}, None, []),
    (
        {"$defs": {"n": {"properties": {"c": {"$recursiveRef": "#"}}}}, "$dynamicRef": "#n"},
        {"$defs": {"n": {"properties": {"c": {"$ref": "#"}}}}, "$ref": "#n"},
        [],
    ),
]


@pytest.mark.parametrize(("schema", "made", "named"), ROWS)
def test_each_keyword_becomes_what_llguidance_takes_or_is_named(
    schema: Any, made: Any, named: list[str]
) -> None:
    before = json.dumps(schema)
    found = fitted(schema)
    assert json.dumps(schema) == before, "the client's schema stays as it is"
    assert (found.schema, list(found.left_out)) == (schema if made is None else made, named)
    if "$ref" not in before:
        nested = fitted({"type": "object", "properties": {"x": {"type": "array", "items": schema}}})
        assert list(nested.left_out) == named
    if "$dynamicRef" not in before and "enum" not in schema:
        error = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(json.dumps(found.schema)))
        assert error == "", error


KEYWORDS = [
    *("not", "oneOf", "anyOf", "allOf", "if", "then", "else", "contains", "minContains", "maxContains"),
    *("uniqueItems", "propertyNames", "required", "items", "prefixItems", "properties", "patternProperties"),
    *("additionalProperties", "unevaluatedProperties", "unevaluatedItems", "pattern", "dependentRequired"),
    *("dependencies", "dependentSchemas", "minProperties", "maxProperties", "minItems", "minimum", "maximum"),
    *("exclusiveMinimum", "format", "type", "enum", "const", "$ref", "$recursiveRef"),
]
VALUES: Any = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.sampled_from([1.5, 1e300, -1e300, 5e-324, "a", "number", "#/a", "^(?!a)b", "(", ")", "[", "\\"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYWORDS), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(schema=VALUES)
def test_no_schema_raises(schema: Any) -> None:
    """Also those that are none: llguidance tells what is wrong."""
    json.dumps(fitted(schema).schema)


@pytest.mark.parametrize("piece", ["(", "[^", "[", r"[\\", "(?=a"])
def test_the_work_for_a_pattern_is_linear_in_its_length(piece: str) -> None:
    """A pattern of 100,000 open classes or groups took minutes."""

    def seconds(count: int) -> float:
        def once() -> float:
            began = time.thread_time()
            fitted({"type": "string", "pattern": piece * count})
            return time.thread_time() - began

        return min(once() for _ in range(3))

    assert seconds(32_000) < 32 * seconds(4_000), "about eight times, and not its square"


def test_keywords_that_no_grammar_holds_are_listed_in_the_answer(door: Running, backend: FakeBackend) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    ask: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
    for body, named in (
        (ask | {"response_format": form}, "response_format.uniqueItems"),
        (ask | {"guided_json": schema}, "guided_json.uniqueItems"),
        (ask | {"tools": [tool], "tool_choice": "required"}, "tools.uniqueItems"),
        (
            ask | {"tools": [tool], "tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tools.uniqueItems",
        ),
        (ask | {"tools": [tool]}, None),
    ):
        answer = door.post("/v1/chat/completions", body)
        assert (answer.status_code, answer.headers.get("x-segue-unknown-fields")) == (200, named)
        grammar = backend.requests[-1].sampling.grammar
        assert grammar is None or "uniqueItems" not in grammar.text
    answer = door.post("/v1/completions", {"prompt": "x", "guided_json": schema})
    assert answer.headers["x-segue-unknown-fields"] == "guided_json.uniqueItems"
