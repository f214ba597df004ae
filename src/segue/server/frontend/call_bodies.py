"""The calls in a piece of a model's output: JSON, Qwen-Coder's XML, Python, DeepSeek's blocks.

Each reader gives all calls of the piece, or none where any of it is not a call: the piece is text then.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from segue.server.frontend.reply_parts import ToolCall, new_call_id
from segue.server.frontend.written_values import LiteralReader, read_json, read_value

#: Calls that one text may hold; a text with more is none. They are made at its end, all at once.
MAX_CALLS_READ: Final = 256

#: The JSON schemas of the parameters of the request's functions, by the function's name.
Tools = Mapping[str, Mapping[str, Any]]
#: A reader of calls: of a text, for these tools; whether the mark that ends calls stood after the text.
Read = Callable[[str, Tools, bool], list[ToolCall]]


def tools_by_name(tools: list[dict[str, Any]] | None) -> Tools:
    """The schemas of the parameters of OpenAI's tools."""
    found: dict[str, Mapping[str, Any]] = {}
    for tool in tools or []:
        parameters = tool["function"].get("parameters")
        found[tool["function"]["name"]] = parameters if isinstance(parameters, dict) else {}
    return found


def _given(arguments: Any) -> Any:
    """`arguments` as a model writes them: nothing, null and an empty text are none."""
    nothing = arguments is None or (isinstance(arguments, str) and not arguments.strip())
    return {} if nothing else arguments


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


# ---- JSON ----------------------------------------------------------------------------------------

_BETWEEN_CALLS: Final = re.compile(r"[ \t\r\n;,]*")


def json_calls(text: str, tools: Tools, ended: bool = True) -> list[ToolCall]:
    """The calls in `text`: an object, a list, or several one after another."""
    return _calls_of(_json_items(text))


def declared_json_calls(text: str, tools: Tools, ended: bool = True) -> list[ToolCall]:
    """`json_calls` of which JSON of other keys, or of another name, is the answer itself. If not `ended` (a
    mark stood before them), text after them is dropped."""
    items = _json_items(text, rest=not ended)
    return _calls_of(items) if all(_declared(item, tools) for item in items) else []


def _json_items(text: str, *, rest: bool = False) -> list[object]:
    """The objects in `text`; none if any of it is no JSON, or for too many. With `rest` words may follow."""
    items: list[object] = []
    text, at = text.strip(), 0
    while at < len(text):
        if rest and items and text[at] not in "{[":
            break
        try:
            value, end = read_json(text, at)
        except ValueError:
            return []
        items += value if isinstance(value, list) else [value]
        if len(items) > MAX_CALLS_READ:
            return []
        separators = _BETWEEN_CALLS.match(text, end)
        at = end if separators is None else separators.end()
    return items


def _calls_of(items: list[object]) -> list[ToolCall]:
    calls = [as_call(item) for item in items]
    return [call for call in calls if call is not None] if None not in calls else []


_CALL_KEYS: Final = frozenset({"name", "arguments", "parameters", "type", "id", "function"})


def _declared(item: object, tools: Tools) -> bool:
    if not isinstance(item, dict) or not _CALL_KEYS.issuperset(item):
        return False
    function = item.get("function", item)
    name = function.get("name") if isinstance(function, dict) else None
    return isinstance(name, str) and name in tools


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
        return one_call(name, _given(item.get("arguments", item.get("parameters"))))
    except (ValueError, TypeError, RecursionError):
        return None


_NAMED: Final = re.compile(r"\s*([\w.-]{1,256})\s*(?:\[CALL_ID\][\w-]*)?\[ARGS\]\s*")


def mistral_calls(text: str, tools: Tools, ended: bool = True) -> list[ToolCall]:
    """Mistral's list of calls, or `NAME[ARGS]{…}`; text after them is dropped."""
    named = _NAMED.match(text)
    if named is None:
        return _calls_of(_json_items(text, rest=True))
    try:
        return [one_call(named[1], _given(read_json(text, named.end())[0]))]
    except ValueError:
        return []


_DEEPSEEK_CALL: Final = re.compile(
    r"\s*<｜tool▁call▁begin｜>([^<]{1,256})<｜tool▁sep｜>(?:([^\n{]{1,256})\n```json\s*)?\s*"
)
_DEEPSEEK_END: Final = re.compile(r"\s*(?:```\s*)?(?:<｜tool▁call▁end｜>\s*|$)")


def deepseek_calls(text: str, tools: Tools, ended: bool = True) -> list[ToolCall]:
    """DeepSeek-V3's `function<sep>NAME` with fenced JSON, and V3.1's `NAME<sep>JSON`."""
    calls: list[ToolCall] = []
    text, at = text.strip(), 0
    while at < len(text):
        head = _DEEPSEEK_CALL.match(text, at)
        if head is None or len(calls) == MAX_CALLS_READ:
            return []
        try:
            arguments, end = read_json(text, head.end())
            calls.append(one_call((head[2] or head[1]).strip(), _given(arguments)))
        except ValueError:
            return []
        tail = _DEEPSEEK_END.match(text, end)
        if tail is None:
            return []
        at = tail.end()
    return calls


# ---- Python --------------------------------------------------------------------------------------

#: OpenAI lets a name have hyphens and begin with a digit; a parameter may be called as JSON likes.
_CALLED: Final = re.compile(r"""\s*([^\s()\[\]{},;:="']{1,256})\s*\(""")
_KEYWORD: Final = re.compile(r"""\s*([^\s()\[\]{},;:="'*]{1,256})\s*=""")
_AROUND_CALLS: Final = re.compile(r"[\s,;\[\]]*")


def python_calls(text: str, tools: Tools, ended: bool = True) -> list[ToolCall]:
    """`[f(a=1), g(b="x")]`, on one line or several, with or without the list. Only literals are arguments;
    nothing is run."""
    calls: list[ToolCall] = []
    reader = LiteralReader(text)
    reader.skip(_AROUND_CALLS)
    try:
        while not reader.at_end():
            name = reader.skip(_CALLED)
            if name is None or len(calls) == MAX_CALLS_READ:
                return []
            calls.append(one_call(name[1], _keywords(reader)))
            reader.skip(_AROUND_CALLS)
    except ValueError:
        return []
    return calls


def _keywords(reader: LiteralReader) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    more = True
    while not reader.take(")"):
        key = reader.skip(_KEYWORD) if more else None
        if key is None:
            raise ValueError("not a named argument")
        arguments[key[1]] = reader.value()
        more = reader.take(",")
    return arguments


def declared_python_calls(text: str, tools: Tools, ended: bool = True) -> list[ToolCall]:
    """`python_calls` without a mark: a list with a call of another function is the answer itself."""
    calls = python_calls(text, tools)
    return calls if all(call.name in tools for call in calls) else []


# ---- XML -----------------------------------------------------------------------------------------


def json_or_xml_calls(text: str, tools: Tools, ended: bool = True) -> list[ToolCall]:
    """Hermes's JSON, or the XML that Qwen-Coder writes between the same marks."""
    return (xml_calls if text.lstrip().startswith("<") else json_calls)(text, tools, ended)


def certain_json_or_xml_calls(text: str, tools: Tools, ended: bool = True) -> list[ToolCall]:
    """`json_or_xml_calls` without guesses of where a value ends."""
    if not text.lstrip().startswith("<"):
        return json_calls(text, tools)
    with contextlib.suppress(ValueError):
        return _XmlReader(text, tools, strict=True).read(ended)
    return []


_XML_TAG: Final = re.compile(
    r"<(?:(?P<function>function=)|(?P<parameter>parameter=))(?P<name>[^>\n]{1,256})>|</(?P<end>function|parameter)>"
)
_AFTER_VALUE: Final = re.compile(r"\s*(?:<parameter=|</?function[=>]|$)")
_AFTER_FUNCTION: Final = re.compile(r"\s*(?:<function=|$)")


def xml_calls(text: str, tools: Tools, ended: bool = True) -> list[ToolCall]:
    """`<function=NAME><parameter=KEY>VALUE</parameter></function>`, any number. A value has the type that
    the function's schema gives it. A value or a function without its end tag ends where the next one begins,
    or with `ended` where the text does."""
    for strict in (True, False):
        with contextlib.suppress(ValueError):
            return _XmlReader(text, tools, strict).read(ended)
    return []


class _XmlReader:
    """One reading of a text. A tag within a value is text unless what follows it may follow a value; with
    `strict` also where it does not end a line although the value began on a new one, and within an
    example of a call, from `<function=` on a new line to its end tag. Without `strict` the end of a function
    ends its last value."""

    def __init__(self, text: str, tools: Tools, strict: bool) -> None:
        self._text, self._tools, self._strict = text, tools, strict
        self._calls: list[ToolCall] = []
        self._function: str | None = None
        self._key: str | None = None
        self._arguments: dict[str, str] = {}
        #: where the value begins, or the text between two tags
        self._at = 0
        self._examples = 0

    def read(self, ended: bool) -> list[ToolCall]:
        """All calls. Raises ValueError where any of the text is none."""
        for tag in _XML_TAG.finditer(self._text):
            if self._key is not None:
                self._within_value(tag)
            else:
                self._between(tag)
        end = len(self._text)
        if self._key is not None and ended and not self._strict:
            self._value_ends(end, end)
        self._need_space(end)
        if self._key is not None:
            raise ValueError("a value without an end")
        if self._function is not None:
            self._function_ends()
        return self._calls

    def _within_value(self, tag: re.Match[str]) -> None:
        text, start, end = self._text, tag.start(), tag.end()
        alone = text[start - 1] == "\n"
        if tag["function"]:
            self._examples += self._strict and alone
        elif self._examples:
            self._examples -= tag["end"] == "function"
        elif tag["end"] == "parameter":
            lined = self._strict and text[self._at] == "\n"
            within_line = lined and text[end : end + 1] not in ("\n", "")
            if not within_line and _AFTER_VALUE.match(text, end):
                self._value_ends(start, end)
        elif tag["end"] == "function" and alone and not self._strict and _AFTER_FUNCTION.match(text, end):
            self._value_ends(start, end)
            self._function_ends()
        elif tag["parameter"] and alone and self._may_begin(tag["name"].strip()):
            self._value_ends(start, end)
            self._key = tag["name"].strip()

    def _may_begin(self, key: str) -> bool:
        """Whether the function has this parameter, and no value for it yet."""
        known = self._tools.get(self._function or "", {}).get("properties")
        return key in (known or {key}) and key not in self._arguments and key != self._key

    def _between(self, tag: re.Match[str]) -> None:
        self._need_space(tag.start())
        self._at = tag.end()
        if tag["parameter"]:
            if self._function is None:
                raise ValueError("a parameter without a function")
            self._key = tag["name"].strip()
        elif self._function is not None and (tag["function"] or tag["end"] == "function"):
            self._function_ends()
        elif tag["end"]:
            raise ValueError("an end without its beginning")
        if tag["function"]:
            self._function = tag["name"].strip()

    def _need_space(self, end: int) -> None:
        if self._key is None and self._text[self._at : end].strip():
            raise ValueError("text between the tags")

    def _value_ends(self, end: int, after: int) -> None:
        # The template puts a line break around a value; further ones are the value's.
        value = self._text[self._at : end].removeprefix("\n").removesuffix("\n")
        self._arguments[self._key or ""] = value
        self._key, self._at = None, after

    def _function_ends(self) -> None:
        name = self._function or ""
        if len(self._calls) == MAX_CALLS_READ:
            raise ValueError("too many calls")
        self._calls.append(one_call(name, typed(self._arguments, self._tools.get(name, {}))))
        self._function, self._arguments = None, {}


# ---- types ---------------------------------------------------------------------------------------


def typed(arguments: dict[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """`arguments` in which a text is the value that its parameter in `schema` asks for. A text that is none
    of the parameter's types stays text."""
    properties = schema.get("properties")
    known = properties if isinstance(properties, dict) else {}
    return {
        name: _as_type(value, _types(known.get(name), schema)) if isinstance(value, str) else value
        for name, value in arguments.items()
    }


#: Parts of a schema that are looked at for the types of one parameter, and values of an enumeration.
_MAX_PARTS: Final = 256


def _types(schema: object, root: Mapping[str, Any]) -> frozenset[str]:
    """The types that `schema`, a part of `root`, may have; none if it does not say. Each part is looked at
    once, however many refer to it."""
    types: set[str] = set()
    parts, seen = [schema], set[int]()
    while parts and len(seen) < _MAX_PARTS:
        part = parts.pop()
        if not isinstance(part, dict) or id(part) in seen:
            continue
        seen.add(id(part))
        named = part.get("type")
        found = {name for name in (named if isinstance(named, list) else [named]) if isinstance(name, str)}
        if not found:
            values = part["enum"][:_MAX_PARTS] if isinstance(part.get("enum"), list) else []
            values = [*values, part["const"]] if "const" in part else values
            found |= {kind for value in values for kind, of in _KINDS if _is(value, kind, of)}
            found |= {kind for key, kind in (("properties", "object"), ("items", "array")) if key in part}
        if part.get("nullable") is True and found:
            found.add("null")
        types |= found
        listed = [part.get(key) for key in ("anyOf", "oneOf", "allOf")]
        parts += [one for some in listed if isinstance(some, list) for one in some[:_MAX_PARTS]]
        parts.append(target(part, root))
    return frozenset(types)


def target(schema: dict[str, Any], root: Mapping[str, Any]) -> object:
    """The part of `root` that `schema` refers to; None if it does not refer to one."""
    place = schema.get("$ref")
    if not isinstance(place, str) or not place.startswith("#/"):
        return None
    found: Any = root
    for step in place[2:].split("/"):
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


_KINDS: Final[tuple[tuple[str, type | tuple[type, ...]], ...]] = (
    ("boolean", bool),
    ("integer", int),
    ("number", (int, float)),
    ("object", dict),
    ("array", list),
    ("null", type(None)),
    ("string", str),
)


def _is(value: object, name: str, kind: type | tuple[type, ...]) -> bool:
    return isinstance(value, kind) and (name == "boolean" or not isinstance(value, bool))


def _as_type(text: str, types: frozenset[str]) -> Any:
    if not types or ("string" in types and not ("null" in types and text.strip() in ("null", "None"))):
        return text
    word = text.strip()
    try:
        value = read_value(word.lower() if word.lower() in ("true", "false", "null") else word)
        _json_text(value)  # JSON has no infinity
    except ValueError:
        return text
    if isinstance(value, float) and value.is_integer() and "integer" in types:
        return int(value)
    named = any(name in types and _is(value, name, kind) for name, kind in _KINDS)
    return value if named else text
