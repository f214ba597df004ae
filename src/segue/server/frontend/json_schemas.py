"""JSON schemas of zod, pydantic and .NET, as llguidance takes them.

| keyword | becomes |
|---|---|
| an unknown `format`, a keyword that is null or asks for nothing | nothing: it is an annotation |
| `oneOf` | `anyOf`; named unless its branches exclude each other |
| `pattern` | itself without look-arounds and `\\b`, and named then; left out with back-references |
| `propertyNames` | the properties of its `enum`, or `patternProperties` |
| `not` | `false`, fewer types or fewer values of `enum` |
| `contains` | a first item that has it |
| `unevaluatedProperties`, `unevaluatedItems`: false | `additionalProperties`, `items` |
| `dependentRequired` | `required`, where the property is required |
| bounds of numbers | the nearest that llguidance takes, within them |

The new keyword admits the same values or fewer. A keyword without one is left out and named.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from segue.server.frontend.call_bodies import target

Schema = dict[str, Any]

#: Formats that llguidance knows; others are annotations.
_FORMATS: Final = (
    "date-time",
    "time",
    "date",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "uri",
    "uuid",
)
#: Keywords whose values are data.
DATA: Final = frozenset({"const", "default", "enum", "examples", "example"})
#: Keywords whose values are schemas by name.
BY_NAME: Final = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})
_LISTS: Final = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE: Final = ("additionalItems", "additionalProperties", "contains", "items", "propertyNames")
#: Keywords that apply other schemas to the same value.
_IN_PLACE: Final = ("$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas", "dependencies")
_TYPES: Final = ("null", "boolean", "integer", "number", "string", "array", "object")


@dataclass(frozen=True, slots=True)
class Fitted:
    """A schema that llguidance takes, and the keywords of the original that it does not hold."""

    schema: Any
    left_out: tuple[str, ...] = ()


def fitted(schema: Any) -> Fitted:
    """`schema` for llguidance. Raises RecursionError for one that is nested too deeply."""
    walk = _Walk(_dict(schema))
    made = walk.schema(schema)
    return Fitted(made, tuple(dict.fromkeys(walk.left_out)))


@dataclass(slots=True)
class _Walk:
    root: Schema
    left_out: list[str] = field(default_factory=list)

    def schema(self, schema: Any) -> Any:
        if not isinstance(schema, dict):
            return schema
        node = {key: value for key, value in schema.items() if value is not None or key in DATA}
        for key, new in _RENAMED.items():
            if key in node:
                node.setdefault(new, node.pop(key))
        for key in _LISTS:
            if isinstance(node.get(key), list):
                node[key] = [self.schema(part) for part in node[key]]
        for key in BY_NAME.intersection(node):
            if isinstance(node[key], dict):
                node[key] = {name: self.schema(part) for name, part in node[key].items()}
        for key in _SINGLE:
            value = node.get(key)
            if key in node:
                node[key] = [self.schema(p) for p in value] if isinstance(value, list) else self.schema(value)
        for key, rule in _RULES.items():
            if key in node and not rule(node, node.pop(key), self.root):
                self.left_out.append(key)
        return node


#: Gets a node without its keyword, the keyword's value, and the whole schema. Says if the node holds it.
Rule = Callable[[Schema, Any, Schema], bool]


def _dict(value: Any) -> Schema:
    """`value` where it is an object, as it should be."""
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _and(node: Schema, part: Any) -> None:
    node["allOf"] = [*_list(node.get("allOf")), part]


def _dropped(node: Schema, value: Any, root: Schema) -> bool:
    return True


def _if(node: Schema, value: Any, root: Schema) -> bool:
    return all(node.pop(key, True) in (True, {}) for key in ("then", "else"))


def _format(node: Schema, value: Any, root: Schema) -> bool:
    if value in _FORMATS:
        node["format"] = value
    return True


def _count(key: str) -> Rule:
    def rule(node: Schema, value: Any, root: Schema) -> bool:
        whole = isinstance(value, float) and value.is_integer()
        node[key] = int(value) if whole else value
        return True

    return rule


def _one_of(node: Schema, value: Any, root: Schema) -> bool:
    if "anyOf" in node:
        _and(node, {"anyOf": value})
    else:
        node["anyOf"] = value
    return _exclusive([_target(branch, root) for branch in _list(value)])


def _target(schema: Any, root: Schema) -> Schema:
    found = target(schema, root) if isinstance(schema, dict) else None
    return _dict(schema if found is None else found)


def _exclusive(branches: list[Schema]) -> bool:
    """Whether no value fits two of `branches`, by their types, by their values or by a required property's
    values."""
    kinds = [{str(n) for n in _names(b.get("type"))} for b in branches]
    whole = [{"number" if kind == "integer" else kind for kind in each} for each in kinds]
    if _apart(whole) or _apart([_values(branch) for branch in branches]):
        return True
    if any(kind != {"object"} for kind in kinds):
        return False
    return any(
        all(name in _list(b.get("required")) for b in branches)
        and _apart([_values(_dict(b.get("properties")).get(name)) for b in branches])
        for name in _dict(branches[0].get("properties"))
    )


def _names(kind: Any) -> list[Any]:
    return kind if isinstance(kind, list) else [kind] if isinstance(kind, str) else []


def _values(schema: Any) -> list[Any]:
    """The values of `const` or `enum`; none if it has neither."""
    node = _dict(schema)
    return [node["const"]] if "const" in node else _list(node.get("enum"))


def _apart(lists: Iterable[Collection[Any]]) -> bool:
    """Whether each of `lists` has something, and no two of them the same."""
    shown = [{repr(value) for value in values} for values in lists]
    return all(shown) and sum(map(len, shown)) == len(set[str]().union(*shown))


def _not(node: Schema, value: Any, root: Schema) -> bool:
    if value is False:
        return True
    if value is True or value == {}:
        _and(node, False)
        return True
    refused, own = _dict(value), node.get("type", list(_TYPES))
    if set(refused) == {"type"}:
        named = {str(name) for name in _names(refused["type"])}
        left = [
            name
            for name in _names(own)
            if name not in named and not (name == "integer" and "number" in named)
        ]
        node["type"] = left or own
        return bool(left) and ("integer" not in named or "number" not in left)
    values = {repr(each) for each in _values(refused)}
    if values and set(refused) <= {"const", "enum", "type"} and _list(node.get("enum")):
        left = [each for each in node["enum"] if repr(each) not in values]
        node["enum"] = left or node["enum"]
        return bool(left)
    return False


def _unique(node: Schema, value: Any, root: Schema) -> bool:
    return not value or (isinstance(node.get("maxItems"), int) and node["maxItems"] <= 1)


def _contains(node: Schema, value: Any, root: Schema) -> bool:
    fewest, most = node.pop("minContains", 1), node.pop("maxContains", None)
    if fewest == 0:
        return most is None
    if "prefixItems" in node or isinstance(node.get("items"), list) or fewest != 1:
        return False
    node["prefixItems"] = [value if "items" not in node else {"allOf": [node["items"], value]}]
    node["minItems"] = node.get("minItems") or 1
    return most is None


def _unevaluated(key: str) -> Rule:
    def rule(node: Schema, value: Any, root: Schema) -> bool:
        if value is True or value == {}:
            return True
        if any(applied in node for applied in _IN_PLACE) or isinstance(node.get(key), list):
            return False
        node.setdefault(key, value)
        return True

    return rule


def _property_names(node: Schema, value: Any, root: Schema) -> bool:
    if value is True or value in ({}, {"type": "string"}):
        return True
    others = node.get("additionalProperties", True)
    if not isinstance(value, dict) or "patternProperties" in node or node.get("properties"):
        return False
    if names := [name for name in _values(value) if isinstance(name, str)]:
        node["properties"] = dict.fromkeys(names, others)
    elif isinstance(value.get("pattern"), str) and set(value) <= {"type", "pattern"}:
        node["patternProperties"] = {value["pattern"]: others}
    else:
        return False
    node["additionalProperties"] = False
    return True


def _dependent_required(node: Schema, value: Any, root: Schema) -> bool:
    if not isinstance(value, dict):
        return False
    held = True
    for name, needed in value.items():
        if name in _list(node.get("required")) and isinstance(needed, list):
            node["required"] = [*node["required"], *(n for n in needed if n not in node["required"])]
        elif needed not in ([], {}, True):
            held = False
    return held


def _least_properties(node: Schema, value: Any, root: Schema) -> bool:
    if isinstance(value, int | float) and value <= len(_list(node.get("required"))):
        return True
    return _if_all_required("minProperties", node, value)


def _most_properties(node: Schema, value: Any, root: Schema) -> bool:
    closed = node.get("additionalProperties") is False and "patternProperties" not in node
    if closed and isinstance(value, int | float) and value >= len(_dict(node.get("properties"))):
        return True
    return _if_all_required("maxProperties", node, value)


def _if_all_required(key: str, node: Schema, value: Any) -> bool:
    if any(name not in _list(node.get("required")) for name in _dict(node.get("properties"))):
        return False
    return _count(key)(node, value, {})


#: llguidance takes bounds of numbers from the second of these to the first.
_LARGEST_INTEGER: Final = 2**63 - 1024  # as a float, the largest below 2**63
_LARGEST, _SMALLEST = 10.0**16, 1e-9


def _bound(key: str, *, least: bool) -> Rule:
    """A bound beyond those of floats is none; one that llguidance does not take becomes a stricter one."""

    def rule(node: Schema, value: Any, root: Schema) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float):
            node[key] = value  # the older form of exclusive bounds; or an error that is told
            return True
        outward = -value if least else value
        if outward >= _MAX_FLOAT:
            return True
        if node.get("type") == "integer" and isinstance(value, int):
            node[key] = max(min(value, _LARGEST_INTEGER), -_LARGEST_INTEGER)
            return outward >= -_LARGEST_INTEGER
        if outward > _LARGEST:
            outward = _LARGEST
        elif 0 < outward < _SMALLEST:
            outward = 0.0
        elif -_SMALLEST < outward < 0:
            outward = -_SMALLEST
        elif outward < -_LARGEST:
            return False
        else:
            node[key] = value
            return True
        node[key] = 0.0 - outward if least else outward
        return True

    return rule


_MAX_FLOAT: Final = 1.7976931348623157e308

#: A class that has no end is one piece, so that its end is looked for once.
_PIECE: Final = re.compile(
    r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\[(?:\\.|[^\]\\])*+\\?\Z|\(\?<?[=!]|\(|\)|.", re.DOTALL
)
_BACK_REFERENCE: Final = re.compile(r"\\(?:[1-9]|k<|c|u\{)")
_QUANTIFIER: Final = ("*", "+", "?", "{")


def _without_assertions(pattern: str) -> tuple[str, bool] | None:
    """`pattern` without look-arounds and word boundaries, and whether it had some. None: it has what cannot
    be left out."""
    kept: list[str] = []
    #: for each open group: whether it is a look-around
    groups: list[bool] = []
    around = 0  # how many of them are
    dropped = cut = False
    for piece in _PIECE.findall(pattern):
        within = around > 0
        if cut and piece in _QUANTIFIER:
            return None
        cut = False
        if piece[0] == "(":
            groups.append(piece != "(")
            around += groups[-1]
            within = around > 0
            dropped = dropped or within
        elif piece == ")" and groups:
            cut = groups.pop()
            around -= cut
        elif piece in (r"\b", r"\B"):
            within = dropped = cut = True
        elif _BACK_REFERENCE.match(piece) or piece == "[^]":
            return None
        elif piece[0] == "[" and len(piece) > 1:
            # A class has no classes within it in JSON's patterns.
            piece = "[" + re.sub(r"(?<!\\)(\[|&&|--|~~)", r"\\\1", piece[1:])
        if not within:
            kept.append(piece)
    return "".join(kept), dropped


def _pattern(node: Schema, value: Any, root: Schema) -> bool:
    made = _without_assertions(value) if isinstance(value, str) else (value, False)
    if made is None:
        return False
    node["pattern"], dropped = made
    return not dropped


def _pattern_properties(node: Schema, value: Any, root: Schema) -> bool:
    if not isinstance(value, dict):
        return False
    made = {name: _without_assertions(name) for name in value}
    kept = {pair[0]: value[name] for name, pair in made.items() if pair is not None}
    if kept:
        node["patternProperties"] = kept
    return all(pair is not None and not pair[1] for pair in made.values())


_RENAMED: Final = {"$recursiveRef": "$ref", "$dynamicRef": "$ref", "$dynamicAnchor": "$anchor"}
#: In this order: a later rule sees what an earlier one made.
_RULES: Final[dict[str, Rule]] = {
    **{key: _count(key) for key in ("minLength", "maxLength", "minItems", "maxItems")},
    "$recursiveAnchor": _dropped,
    "format": _format,
    "if": _if,
    "then": _dropped,
    "else": _dropped,
    "unevaluatedProperties": _unevaluated("additionalProperties"),
    "unevaluatedItems": _unevaluated("items"),
    "oneOf": _one_of,
    "not": _not,
    "uniqueItems": _unique,
    "contains": _contains,
    "minContains": _dropped,
    "maxContains": _dropped,
    "propertyNames": _property_names,
    "dependentRequired": _dependent_required,
    "dependencies": _dependent_required,
    "dependentSchemas": _dependent_required,
    "minProperties": _least_properties,
    "maxProperties": _most_properties,
    **{key: _bound(key, least=True) for key in ("minimum", "exclusiveMinimum")},
    **{key: _bound(key, least=False) for key in ("maximum", "exclusiveMaximum")},
    "pattern": _pattern,
    "patternProperties": _pattern_properties,
}
