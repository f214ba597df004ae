"""Tool calls in the output: found by the form that the model's own chat template teaches it.

| form | looks like | known by its template |
|---|---|---|
| Hermes, Qwen | `<tool_call>{"name": …, "arguments": {…}}</tool_call>` | `<tool_call>` |
| Qwen-Coder | `<tool_call><function=f><parameter=a>1</parameter></function></tool_call>` | `<tool_call>` |
| Mistral | `[TOOL_CALLS] [{"name": …, "arguments": {…}}]` or `[TOOL_CALLS]name[ARGS]{…}` | `[TOOL_CALLS]` |
| DeepSeek-V3 | calls between `<｜tool▁calls▁begin｜>` and `<｜tool▁calls▁end｜>` | the first of these |
| LFM2 | `<|tool_call_start|>[f(a=1)]<|tool_call_end|>` | `<|tool_list_start|>` or `<|tool_call_start|>` |
| Python (Llama 3.2, 4) | the whole answer is `[f(a=1), g(b="x")]` | `[func_name1(` |
| Llama 3 | the whole answer is `{"name": …, "parameters": {…}}` | `<|python_tag|>` or `"parameters"` |

A call is given out whole, when it is complete: half a call helps nobody, and what turns out not to be a
call is returned as text. `forced` is for `tool_choice`: the grammar makes the output JSON, so a text that
`max_tokens` cuts is a call with the arguments so far, as with OpenAI and vLLM, and never text.
"""

from __future__ import annotations

import json
import re
from typing import Any, Literal

from segue.server.frontend.call_bodies import (
    MAX_CALLS_READ,
    Properties,
    Read,
    deepseek_calls,
    json_calls,
    json_or_xml_calls,
    one_call,
    python_calls,
)
from segue.server.frontend.detokenize import StopStrings
from segue.server.frontend.reply_parts import (
    Filtered,
    Part,
    ReplyParser,
    ToolCall,
    TrailingSpace,
    new_call_id,
)

#: Letters by which a text is known that cannot be a call.
_START_CHARS = 32


def parser_for(template: str | None, properties: Properties | None = None) -> ReplyParser | None:
    """A fresh parser for a chat template, or None where the template has no tools. `properties` are the
    schemas of the functions' parameters."""
    if template is None:
        return None
    known = properties or {}
    if "<|tool_list_start|>" in template or "<|tool_call_start|>" in template:
        return MarkedParser("<|tool_call_start|>", "<|tool_call_end|>", python_calls, known)
    if "<｜tool▁calls▁begin｜>" in template:
        return MarkedParser("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", deepseek_calls, known)
    if "<tool_call>" in template:
        return MarkedParser("<tool_call>", "</tool_call>", json_or_xml_calls, known)
    if "[TOOL_CALLS]" in template:
        return MistralParser()
    if "[func_name1(" in template:
        return PythonParser()
    if "<|python_tag|>" in template or ('"parameters"' in template and "tools" in template):
        return LlamaParser()
    return None


class FirstCall(Filtered):
    """`inner`, of whose calls only the first is given out: the client takes one at a time."""

    def __init__(self, inner: ReplyParser) -> None:
        super().__init__(inner)
        self._called = False

    def kept(self, parts: list[Part]) -> list[Part]:
        kept: list[Part] = []
        for part in parts:
            if not isinstance(part, ToolCall):
                kept.append(part)
            elif not self._called:
                self._called = True
                kept.append(part)
        return kept


class WithoutSpace(Filtered):
    """`inner`, without the white space that the model writes between its text and a call, and between
    calls."""

    def __init__(self, inner: ReplyParser) -> None:
        super().__init__(inner)
        self._space = TrailingSpace()

    def finish(self) -> list[Part]:
        parts = super().finish()
        rest = self._space.take()
        return [*parts, rest] if rest else parts

    def kept(self, parts: list[Part]) -> list[Part]:
        kept: list[Part] = []
        for part in parts:
            if isinstance(part, str):
                if text := self._space.feed(part):
                    kept.append(text)
                continue
            if isinstance(part, ToolCall):
                self._space.take()
            kept.append(part)
        return kept


class MarkedParser(ReplyParser):
    """Calls between two marks, any number, with text between. `read` knows what stands there."""

    def __init__(self, start: str, end: str, read: Read, properties: Properties) -> None:
        self.marks = (start, end)
        self._start, self._end, self._read, self._properties = start, end, read, properties
        self._outside = StopStrings([start])
        #: the call in progress
        self._inside: list[str] | None = None
        self._closing = StopStrings([end])

    def feed(self, text: str) -> list[Part]:
        parts: list[Part] = []
        while text:
            if self._inside is not None:
                self._inside.append(self._closing.feed(text))
                if not self._closing.found():
                    break
                body, text = "".join(self._inside), self._closing.rest
                parts += self._read(body, self._properties) or [self._start + body + self._end]
                self._inside = None
                self._outside = StopStrings([self._start])
            else:
                parts.append(self._outside.feed(text))
                if not self._outside.found():
                    break
                text = self._outside.rest
                self._inside, self._closing = [], StopStrings([self._end])
        return [p for p in parts if p != ""]

    def finish(self) -> list[Part]:
        if self._inside is None:
            rest = self._outside.flush()
            return [rest] if rest else []
        # No end mark: the last call is often complete without it.
        body, self._inside = "".join(self._inside) + self._closing.flush(), None
        return list(self._read(body, self._properties)) or [self._start + body]


class _WholeParser(ReplyParser):
    """A parser of forms that are read at the end. Text that cannot be a call is passed on at once."""

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

    _MARK = "<|python_tag|>"
    marks = (_MARK,)

    def _may_be_call(self, start: str) -> bool:
        return start.startswith(("{", self._MARK)) or self._MARK.startswith(start)

    def _parse(self, text: str) -> list[Part]:
        return list(json_calls(text.strip().removeprefix(self._MARK))) or [text.replace(self._MARK, "")]


class PythonParser(_WholeParser):
    """The whole answer is a list of calls in Python."""

    def _may_be_call(self, start: str) -> bool:
        return start.startswith("[")

    def _parse(self, text: str) -> list[Part]:
        return list(python_calls(text)) or [text]


class MistralParser(_WholeParser):
    """Text, then `[TOOL_CALLS]` and calls to the end."""

    _MARK = "[TOOL_CALLS]"
    marks = (_MARK, "[ARGS]", "[CALL_ID]")
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
                try:
                    calls.append(one_call(named[1], arguments))
                except ValueError:
                    return [self._MARK + text]
            else:
                calls += json_calls(piece)
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
        return list(json_calls(text) or _cut_calls(text)) or ([] if text.lstrip().startswith("[") else [text])


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
        try:
            _, end = decoder.raw_decode(text, head.end())
        except (ValueError, RecursionError):
            end = len(text)
        try:
            calls.append(one_call(json.loads(head[1]), text[head.end() : end]))
        except ValueError:
            break  # its name is no text
        brace = re.compile(r"\s*\}").match(text, end)
        if brace is None:
            break
        at = brace.end()
    return calls
