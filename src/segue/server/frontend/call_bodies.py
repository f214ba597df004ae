"""The calls in a piece of a model's output: JSON, Qwen-Coder's XML, Python, DeepSeek's blocks.

Each reader gives all calls of the piece, or none where any of it is not a call: the piece is text then.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Final

from segue.server.frontend.openai_types import read_float
from segue.server.frontend.reply_parts import ToolCall, new_call_id

#: Calls that one text may hold; a text with more is none. They are made at its end, all at once.
MAX_CALLS_READ: Final = 256
#: Characters of calls in Python: its parser needs 0.3 ms for each KiB.
MAX_PYTHON_CHARS: Final = 2**16

#: The JSON schemas of a function's parameters, by the function's name and the parameter's.
Properties = Mapping[str, Mapping[str, Any]]
#: A reader of calls.
Read = Callable[[str, Properties], list[ToolCall]]


def properties_of(tools: list[dict[str, Any]] | None) -> Properties:
    """The schemas of the parameters of OpenAI's tools."""
    found: dict[str, Mapping[str, Any]] = {}
    for tool in tools or []:
        parameters = tool["function"].get("parameters")
        schemas = parameters.get("properties") if isinstance(parameters, dict) else None
        found[tool["function"]["name"]] = schemas if isinstance(schemas, dict) else {}
    return found


def one_call(name: str, arguments: Any) -> ToolCall:
    """A call with a fresh id; `arguments` is JSON text, or a value that JSON has. Raises ValueError for
    another value, and for text that is not Unicode."""
    if not isinstance(arguments, str):
        arguments = _json_text(arguments)
    (name + arguments).encode()  # the answer would fail at half a surrogate pair
    return ToolCall(new_call_id(), name, arguments)


def _json_text(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        with contextlib.suppress(UnicodeEncodeError):
            text.encode()
            return text
        # Half a surrogate pair, which JSON can have as an escape only.
        return json.dumps(value, allow_nan=False)
    except RecursionError:
        raise ValueError("nested too deeply") from None


_BETWEEN_CALLS = re.compile(r"[ \t\r\n;,]*")


def json_calls(text: str, properties: Properties | None = None) -> list[ToolCall]:
    """The calls in `text`: an object, a list, or several one after another."""
    decoder = json.JSONDecoder()
    calls: list[ToolCall] = []
    text, at = text.strip(), 0
    while at < len(text):
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return []
        for item in value if isinstance(value, list) else [value]:
            call = as_call(item)
            if call is None or len(calls) == MAX_CALLS_READ:
                return []
            calls.append(call)
        separators = _BETWEEN_CALLS.match(text, end)
        at = end if separators is None else separators.end()
    return calls


def as_call(item: object) -> ToolCall | None:
    """The call that a decoded object describes, if it describes one."""
    if not isinstance(item, dict):
        return None
    # Some templates wrap a call as OpenAI does.
    inner = item.get("function")
    item = inner if isinstance(inner, dict) else item
    name = item.get("name")
    if not isinstance(name, str):
        return None
    try:
        return one_call(name, item.get("arguments", item.get("parameters", {})))
    except (ValueError, TypeError, RecursionError):
        return None


def json_or_xml_calls(text: str, properties: Properties) -> list[ToolCall]:
    """Hermes's JSON, or the XML that Qwen-Coder writes between the same marks."""
    return xml_calls(text, properties) if text.lstrip().startswith("<") else json_calls(text)


def xml_calls(text: str, properties: Properties) -> list[ToolCall]:
    """`<function=NAME><parameter=KEY>VALUE</parameter></function>`, any number. A value has the type that
    the function's schema gives it."""
    calls: list[ToolCall] = []
    at = 0
    while _more(text, at):
        if len(calls) == MAX_CALLS_READ:
            return []
        head = _XML_HEAD.match(text, at)
        if head is None:
            return []
        end = text.find("</function>", head.end())
        inside = text[head.end() : end if end >= 0 else len(text)]
        arguments = _xml_arguments(inside)
        if arguments is None:
            return []
        name = head[1].strip()
        try:
            calls.append(one_call(name, typed(arguments, properties.get(name, {}))))
        except ValueError:
            return []
        at = len(text) if end < 0 else end + len("</function>")
    return calls


_XML_HEAD = re.compile(r"\s*<function=([^>\n]{1,256})>")
_XML_PARAMETER = re.compile(r"\s*<parameter=([^>\n]{1,256})>")
_NOT_SPACE = re.compile(r"\S")


def _more(text: str, at: int) -> bool:
    return _NOT_SPACE.search(text, at) is not None


def _xml_arguments(text: str) -> dict[str, str] | None:
    arguments: dict[str, str] = {}
    at = 0
    while _more(text, at):
        head = _XML_PARAMETER.match(text, at)
        end = -1 if head is None else text.find("</parameter>", head.end())
        if head is None or end < 0:
            return None
        # The template puts a line break around a value; further ones are the value's.
        value = text[head.end() : end].removeprefix("\n").removesuffix("\n")
        arguments[head[1].strip()] = value
        at = end + len("</parameter>")
    return arguments


def python_calls(text: str, properties: Properties | None = None) -> list[ToolCall]:
    """`[f(a=1), g(b="x")]`, or one call without the list. Only literals are arguments; nothing is run."""
    text = text.strip()
    if len(text) > MAX_PYTHON_CHARS:
        return []
    try:
        with warnings.catch_warnings():
            # A backslash in a text that Python does not know is the model's, and kept.
            warnings.simplefilter("ignore")
            tree = ast.parse(text, mode="eval").body
        nodes = tree.elts if isinstance(tree, ast.List) else [tree]
        if not 1 <= len(nodes) <= MAX_CALLS_READ:
            return []
        return [_python_call(node) for node in nodes]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return []


def _python_call(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("not a call with named arguments")
    arguments: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("** has no name")
        arguments[keyword.arg] = _literal(keyword.value)
    return one_call(_dotted(node.func), arguments)


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    if isinstance(node, ast.Name):
        return node.id
    raise ValueError("not a name")


#: Models write JSON's words in Python, too.
_JSON_WORDS: Final[dict[str, bool | None]] = {"true": True, "false": False, "null": None}


def _literal(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=value) if value is None or isinstance(value, str | bool | int | float):
            return value
        case ast.Name(id=name) if name in _JSON_WORDS:
            return _JSON_WORDS[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            pairs = [
                (key and _literal(key), _literal(value)) for key, value in zip(keys, values, strict=True)
            ]
            if not all(isinstance(key, str) for key, _ in pairs):
                raise ValueError("a key that is no text")
            return dict(pairs)
    raise ValueError("not a literal")


_DEEPSEEK_CALL = re.compile(r"\s*<｜tool▁call▁begin｜>([^<]{1,256})<｜tool▁sep｜>")
_DEEPSEEK_END: Final = "<｜tool▁call▁end｜>"
_FENCED = re.compile(r"([^\n]{1,256})\n```json\n")


def deepseek_calls(text: str, properties: Properties | None = None) -> list[ToolCall]:
    """DeepSeek-V3's `function<sep>NAME` with fenced JSON, and V3.1's `NAME<sep>JSON`."""
    calls: list[ToolCall] = []
    at = 0
    while _more(text, at):
        head = _DEEPSEEK_CALL.match(text, at)
        if head is None or len(calls) == MAX_CALLS_READ:
            return []
        end = text.find(_DEEPSEEK_END, head.end())
        body = text[head.end() : end if end >= 0 else len(text)]
        name = head[1].strip()
        if fenced := _FENCED.match(body):
            name, body = fenced[1].strip(), body[fenced.end() :].rstrip().removesuffix("```")
        try:
            calls.append(one_call(name, json.loads(body)))
        except (ValueError, RecursionError):
            return []
        at = len(text) if end < 0 else end + len(_DEEPSEEK_END)
    return calls


def typed(arguments: dict[str, Any], schemas: Mapping[str, Any]) -> dict[str, Any]:
    """`arguments` in which a text is the value that its parameter's schema asks for. A text that is none
    of the schema's types stays text."""
    return {
        name: _as_type(value, _types(schemas.get(name))) if isinstance(value, str) else value
        for name, value in arguments.items()
    }


def _types(schema: object, depth: int = 0) -> frozenset[str]:
    if not isinstance(schema, dict) or depth > 4:
        return frozenset()
    named = schema.get("type")
    names = named if isinstance(named, list) else [named]
    found = {name for name in names if isinstance(name, str)}
    for union in ("anyOf", "oneOf"):
        choices = schema.get(union)
        for choice in choices if isinstance(choices, list) else ():
            found |= _types(choice, depth + 1)
    return frozenset(found)


_KINDS: Final[tuple[tuple[str, type | tuple[type, ...]], ...]] = (
    ("boolean", bool),
    ("integer", int),
    ("number", (int, float)),
    ("object", dict),
    ("array", list),
    ("null", type(None)),
)


def _no_number(word: str) -> Any:
    raise ValueError(f"JSON has no {word}")


def _as_type(text: str, types: frozenset[str]) -> Any:
    if not types or ("string" in types and not ("null" in types and text == "null")):
        return text
    word = text.strip()
    try:
        value = json.loads(
            word.lower() if word.lower() in _JSON_WORDS else word,
            parse_float=read_float,
            parse_constant=_no_number,
        )
    except (ValueError, RecursionError):
        return text
    for name, kind in _KINDS:
        if name in types and isinstance(value, kind) and (name == "boolean" or not isinstance(value, bool)):
            return value
    return text
