"""Tool calls in the output: found by the form that the model's own template teaches it.

| form | looks like | known by its template |
|---|---|---|
| Hermes, Qwen | `<tool_call>{"name": …, "arguments": {…}}</tool_call>` | `<tool_call>` |
| Mistral | `[TOOL_CALLS] [{"name": …, "arguments": {…}}]` or `[TOOL_CALLS]name[ARGS]{…}` | `[TOOL_CALLS]` |
| Llama 3 | the whole answer is `{"name": …, "parameters": {…}}` | `<|python_tag|>` or `"parameters"` |

A call is given out whole, when its JSON is complete: half a call helps nobody, and what turns out not to be a
call is returned as text. `forced` is for `tool_choice`: the grammar makes the output JSON, so a text that
`max_tokens` cuts is a call with the arguments so far, as with OpenAI and vLLM, and never text.
"""

from __future__ import annotations

import json
import re
import secrets
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from segue.server.frontend.detokenize import StopStrings


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call as OpenAI shows it; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


#: Calls that one text may hold; a text with more is none. They are made at its end, all at once.
MAX_CALLS_READ = 256
#: Letters by which a text is known that cannot be a call.
_START_CHARS = 32
#: Text, or a call that is complete.
Part = str | ToolCall


class ToolParser(Protocol):
    """Splits a growing text into text and calls."""

    #: The marks are special tokens: they must not be skipped when decoding.
    keep_special: bool

    def feed(self, text: str) -> list[Part]: ...

    def finish(self) -> list[Part]:
        """The rest, when the text has ended."""
        ...


def parser_for(template: str | None) -> ToolParser | None:
    """A fresh parser for a chat template, or None where the template has no tools."""
    if template is None:
        return None
    if "<tool_call>" in template:
        return HermesParser()
    if "[TOOL_CALLS]" in template:
        return MistralParser()
    if "<|python_tag|>" in template or ('"parameters"' in template and "tools" in template):
        return LlamaParser()
    return None


class FirstCall:
    """`inner`, of whose calls only the first is given out: the client takes one at a time."""

    def __init__(self, inner: ToolParser) -> None:
        self._inner = inner
        self._called = False
        self.keep_special = inner.keep_special

    def feed(self, text: str) -> list[Part]:
        return self._first(self._inner.feed(text))

    def finish(self) -> list[Part]:
        return self._first(self._inner.finish())

    def _first(self, parts: list[Part]) -> list[Part]:
        kept: list[Part] = []
        for part in parts:
            if isinstance(part, str):
                kept.append(part)
            elif not self._called:
                self._called = True
                kept.append(part)
        return kept


class HermesParser:
    """`<tool_call>{json}</tool_call>`, any number, with text between."""

    keep_special = False
    _OPEN, _CLOSE = "<tool_call>", "</tool_call>"

    def __init__(self) -> None:
        self._outside = StopStrings([self._OPEN])
        #: the call in progress
        self._inside: list[str] | None = None
        self._end = StopStrings([self._CLOSE])
        self._after_call = False

    def feed(self, text: str) -> list[Part]:
        parts: list[Part] = []
        while text:
            if self._inside is not None:
                self._inside.append(self._end.feed(text))
                if not self._end.found():
                    break
                body, text = "".join(self._inside), self._end.rest
                parts += _calls(body) or [self._OPEN + body + self._CLOSE]
                self._inside = None
                self._after_call = True
                self._outside = StopStrings([self._OPEN])
            else:
                before = self._outside.feed(text)
                if self._after_call:
                    # The template puts a line break between calls; it is not the model's text.
                    before = before.lstrip("\n")
                    self._after_call = not before
                if before:
                    parts.append(before)
                if not self._outside.found():
                    break
                text = self._outside.rest
                self._inside, self._end = [], StopStrings([self._CLOSE])
        return [p for p in parts if p != ""]

    def finish(self) -> list[Part]:
        if self._inside is None:
            rest = self._outside.flush()
            return [rest] if rest else []
        # No end mark: the last call is often complete without it.
        body, self._inside = "".join(self._inside) + self._end.flush(), None
        return list(_calls(body)) or [self._OPEN + body]


class _WholeParser:
    """A parser of forms that are read at the end. Text that cannot be a call is passed on at once."""

    keep_special = False

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._start = ""
        self._plain = False

    def feed(self, text: str) -> list[Part]:
        if self._plain:
            return [text] if text else []
        self._texts.append(text)
        if len(self._start) < _START_CHARS:
            self._start = (self._start + text).lstrip()[:_START_CHARS]
            if not self._may_be_call(self._start):
                self._plain = True
                held = self._taken()
                return [held] if held else []
        return []

    def finish(self) -> list[Part]:
        text = self._taken()
        return self._parse(text) if text else []

    def _taken(self) -> str:
        text = "".join(self._texts)
        self._texts.clear()
        return text

    def _may_be_call(self, start: str) -> bool:
        """Whether a text may be one that begins so; of `start` at most `_START_CHARS` letters are shown."""
        raise AssertionError("each form says")

    def _parse(self, text: str) -> list[Part]:
        raise AssertionError("each form says")


class LlamaParser(_WholeParser):
    """The whole answer is one call, or several with `;` between."""

    keep_special = True
    _MARK = "<|python_tag|>"

    def _may_be_call(self, start: str) -> bool:
        return start.startswith(("{", self._MARK)) or self._MARK.startswith(start)

    def _parse(self, text: str) -> list[Part]:
        return list(_calls(text.strip().removeprefix(self._MARK))) or [text.replace(self._MARK, "")]


class MistralParser(_WholeParser):
    """Text, then `[TOOL_CALLS]` and calls to the end."""

    keep_special = True
    _MARK = "[TOOL_CALLS]"
    _NAMED = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\][\w-]*)?\[ARGS\]")

    def __init__(self) -> None:
        super().__init__()
        self._before = StopStrings([self._MARK])

    def feed(self, text: str) -> list[Part]:
        if self._before.found():
            self._texts.append(text)
            return []
        seen = self._before.feed(text)
        self._texts = [self._before.rest]
        return [seen] if seen else []

    def finish(self) -> list[Part]:
        if not self._before.found():
            rest = self._before.flush()
            return [rest] if rest else []
        return self._parse(self._taken())

    def _parse(self, text: str) -> list[Part]:
        calls: list[Part] = []
        for piece in text.split(self._MARK):
            named = self._NAMED.match(piece)
            if named:
                arguments = _json_prefix(piece[named.end() :])
                if arguments is None:
                    return [self._MARK + text]
                calls.append(_call(named[1], arguments))
            else:
                calls += _calls(piece)
            if len(calls) > MAX_CALLS_READ:
                return [self._MARK + text]
        return calls or [self._MARK + text]


class ForcedParser(_WholeParser):
    """`tool_choice` names a function (the output is its arguments) or asks for some (a list of calls)."""

    def __init__(self, form: Literal["arguments", "calls"], name: str = "") -> None:
        super().__init__()
        self._form = form
        self._name = name

    def _may_be_call(self, start: str) -> bool:
        return True

    def _parse(self, text: str) -> list[Part]:
        if self._form == "arguments":
            # Cut off by max_tokens or not: OpenAI too gives the arguments as they are.
            return [ToolCall(new_call_id(), self._name, text.strip())]
        return list(_calls(text) or _cut_calls(text)) or ([] if text.lstrip().startswith("[") else [text])


def new_call_id() -> str:
    """An id for a call; nine letters and digits at the end, which Mistral's template demands."""
    return "call_" + secrets.token_hex(12)


def _call(name: str, arguments: Any) -> ToolCall:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(new_call_id(), name, text)


def _json_prefix(text: str) -> Any | None:
    try:
        value, _ = json.JSONDecoder().raw_decode(text.lstrip())
    except (ValueError, RecursionError):
        return None
    return value


#: The head of a call as the grammar of `tool_choice: required` writes it; the arguments follow.
_CALL_HEAD = re.compile(r'\s*[\[,]?\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*')


def _cut_calls(text: str) -> list[ToolCall]:
    """The calls in a list that was cut: the last one has its arguments so far. A call that was cut
    before its arguments is left out."""
    decoder = json.JSONDecoder()
    calls: list[ToolCall] = []
    at = 0
    while len(calls) < MAX_CALLS_READ and (head := _CALL_HEAD.match(text, at)) is not None:
        name = json.loads(head[1])
        try:
            arguments, end = decoder.raw_decode(text, head.end())
        except (ValueError, RecursionError):
            calls.append(_call(name, text[head.end() :]))
            break
        calls.append(_call(name, arguments))
        brace = re.compile(r"\s*\}").match(text, end)
        if brace is None:
            break
        at = brace.end()
    return calls


_BETWEEN_CALLS = re.compile(r"[ \t\r\n;,]*")


def _calls(text: str) -> list[ToolCall]:
    """The calls in `text`: an object, a list, or several one after another. Empty if any is not a call."""
    decoder = json.JSONDecoder()
    calls: list[ToolCall] = []
    text, at = text.strip(), 0
    while at < len(text):
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return []
        for item in value if isinstance(value, list) else [value]:
            if not isinstance(item, dict) or len(calls) == MAX_CALLS_READ:
                return []
            # Some templates wrap a call as OpenAI does.
            inner = item.get("function")
            item = inner if isinstance(inner, dict) else item
            name = item.get("name")
            if not isinstance(name, str):
                return []
            calls.append(_call(name, item.get("arguments", item.get("parameters", {}))))
        separators = _BETWEEN_CALLS.match(text, end)
        at = end if separators is None else separators.end()
    return calls
