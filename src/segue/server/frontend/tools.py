"""Tool calls in the output, in the form of the model's family (`call_families`).

A call is given out whole, when it is complete: half a call helps nobody, and what turns out not to be a
call is returned as text. A mark within a text of a call is that text. `forced` is for `tool_choice`: the
grammar makes the output JSON, so a text that `max_tokens` cuts is a call with the arguments so far, as with
OpenAI and vLLM, and never text.
"""

from __future__ import annotations

import json
import re
from typing import Final, Literal

from segue.server.frontend.call_bodies import (
    MAX_CALLS_READ,
    Tools,
    json_calls,
    one_call,
)
from segue.server.frontend.call_families import CallFamily
from segue.server.frontend.detokenize import StopStrings
from segue.server.frontend.reply_parts import (
    Filtered,
    Part,
    PlainText,
    ReplyParser,
    ToolCall,
    TrailingSpace,
    new_call_id,
)
from segue.server.frontend.written_values import read_json

#: Letters by which a text is known that cannot be a call.
_START_CHARS = 32


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


#: Characters of one answer that may be read in vain, before marks that may stand within a call: the work is
#: linear in the text. Then the first mark ends a call.
_MAX_READ_IN_VAIN: Final = 2**24
#: A mark that begins no call has its text looked at again: that counts as at least so many characters read,
#: and as each of the text so many times, …
_FALSE_MARK, _FALSE_MARK_TIMES = 2**20, 32
#: … in pieces of so many. To look for several marks in one takes as long for each as the piece is.
_PIECE: Final = 256
_FUNCTION, _FUNCTION_END = "<function=", "</function>"


class _Body:
    """The text after the mark that opens calls, up to the first mark before which all of it is calls.

    A mark within a text of a call is that text: before it stands half a call. A call in XML without its mark
    ends with its function, if neither its mark nor another function follows. With `plain` the first mark is
    the end in any case: for what has no other one.
    """

    def __init__(
        self, family: CallFamily, tools: Tools, stops: tuple[str, ...], budget: int, *, plain: bool
    ) -> None:
        self._family, self._tools, self.plain = family, tools, plain
        self._marks = tuple(filter(None, (family.close, family.open, *stops)))
        tags = [_FUNCTION_END] if "<" in family.first and not plain else []
        self._sought = self._marks[:1] if budget <= 0 else (*self._marks, *tags)
        self._search = StopStrings(self._sought)
        self._kept: list[str] = []
        self._begun = False
        #: how many characters may be read in vain
        self.budget = budget
        #: a function has ended: what follows it, so far
        self._waits, self._ahead = False, ""
        #: the mark that has ended it, and the calls before that; None while it goes on
        self.mark: str | None = None
        self.calls: list[ToolCall] = []
        #: the text after the end
        self.rest = ""

    def feed(self, text: str) -> bool:
        """Whether it has ended."""
        if not self._begun and (letters := text.lstrip()):
            self._begun = True
            if self._family.first and letters[0] not in self._family.first:  # it cannot be a call
                self._kept.append(text[: -len(letters)])
                self.mark, self.rest = "", letters
                return True
        while text and self.mark is None:
            if self._waits:
                text = self._after_function(text)
                continue
            self._kept.append(self._search.feed(text))
            mark, text = self._search.matched, self._search.rest
            if mark is not None:
                self._search = StopStrings(self._sought)
                self._meet(mark)
        self.rest = text
        return self.mark is not None

    def taken(self, *, whole: bool = False) -> str:
        """The text up to its end, or `whole` if there is none."""
        return "".join(self._kept) + (self._ahead + self._search.flush() if whole else "")

    def _meet(self, mark: str) -> None:
        if mark == _FUNCTION_END:
            self._waits = True
        elif self._ends_at(mark):
            return
        self._kept.append(mark)

    def _ends_at(self, mark: str) -> bool:
        if self.plain or self.budget > 0:
            text = self.taken()
            read = self._family.read if self.plain else self._family.certain or self._family.read
            self.calls = read(text, self._tools, mark == self._family.close)
            if self.calls or self.plain:
                self.mark = mark
            else:
                self.budget -= len(text)
        return self.mark is not None

    def _after_function(self, text: str) -> str:
        """The text that is left to look at."""
        text, self._ahead = self._ahead + text, ""
        rest = text.lstrip()
        self._kept.append(text[: len(text) - len(rest)])
        tags = (_FUNCTION, *self._marks)
        follows = any(rest.startswith(tag) for tag in tags)
        if not follows and any(tag.startswith(rest) for tag in tags):
            self._ahead, rest = rest, ""
        else:
            self._waits = False
            if not follows:
                self._ends_at("")
        return rest


class MarkedParser(ReplyParser):
    """Calls between the marks of `family`, any number. The text around them is `around`'s, and calls within
    the reasoning that `around` finds are calls; the mark that ends it ends a call without an end, too."""

    def __init__(self, family: CallFamily, tools: Tools, around: ReplyParser | None = None) -> None:
        self._family, self._tools = family, tools
        self._around = around or PlainText()
        self.marks = tuple(filter(None, (family.open, family.close, *family.more, *self._around.marks)))
        self.thought_end = self._around.thought_end
        self._outside = self._watch()
        #: whether a line, or what follows a call, begins
        self._begins = True
        #: whether the first mark ends the next body
        self._plain = False
        self._budget = _MAX_READ_IN_VAIN
        #: the mark before the call in progress; empty if it has none
        self._opened = ""
        #: the call in progress
        self._body: _Body | None = None

    @property
    def thinking(self) -> bool:
        return self._around.thinking

    @property
    def undecided(self) -> bool:
        return self._around.undecided

    def feed(self, text: str) -> list[Part]:
        parts: list[Part] = []
        while text:
            if self._body is None:
                self._pass_on(parts, self._outside.feed(text))
                mark, text = self._outside.matched, self._outside.rest
                if mark is None:
                    break
                self._outside = self._watch()
                if mark == self._family.open or self._begins:
                    self._opened = mark if mark == self._family.open else ""
                    stops = (self.thought_end,) if self.thought_end else ()
                    plain, self._plain = self._plain or self._budget <= 0, False
                    self._body = _Body(self._family, self._tools, stops, self._budget, plain=plain)
                    text = mark.removeprefix(self._opened) + text
                else:
                    self._pass_on(parts, mark)
            elif self._body.feed(text):
                text = self._ended(parts, self._body)
            else:
                break
        return parts

    def finish(self) -> list[Part]:
        parts: list[Part] = []
        while (body := self._body) is not None:
            # No end mark: the last call is often complete without it.
            text, self._body = body.taken(whole=True), None
            calls = self._own(self._family.read(text, self._tools, False))
            if calls:
                parts += calls
            elif body.plain:
                parts += self._around.feed(self._opened + text)
            else:
                # It has no end: the first mark in it is taken for one, and calls may come after that.
                again = max(_FALSE_MARK, _FALSE_MARK_TIMES * len(text))
                self._plain, self._budget = True, body.budget - again
                text = self._opened + text
                for at in range(0, len(text), _PIECE):
                    parts += self.feed(text[at : at + _PIECE])
        return [*parts, *self._around.feed(self._outside.flush()), *self._around.finish()]

    def _ended(self, parts: list[Part], body: _Body) -> str:
        """Take the calls of a body, or its text; give the text after it."""
        mark, calls, self._body = body.mark or "", self._own(body.calls), None
        self._budget = body.budget
        ended = mark == self._family.close
        parts += calls
        self._begins = bool(calls)
        if not calls:
            self._pass_on(parts, self._opened + body.taken() + (mark if ended else ""))
        return body.rest if ended else mark + body.rest

    def _watch(self) -> StopStrings:
        return StopStrings([mark for mark in (self._family.open, self._family.bare) if mark])

    def _pass_on(self, parts: list[Part], text: str) -> None:
        """Text that is no call."""
        if text:
            self._begins = text.endswith("\n")
        parts += self._around.feed(text)

    def _own(self, calls: list[ToolCall]) -> list[ToolCall]:
        """`calls`; without a mark before them, they are calls if all of them are of the request's tools."""
        return calls if self._opened or all(call.name in self._tools for call in calls) else []


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


class UnmarkedParser(_WholeParser):
    """The whole answer is calls of `family`, or text."""

    def __init__(self, family: CallFamily, tools: Tools) -> None:
        super().__init__()
        self._family, self._tools = family, tools
        self.marks: tuple[str, ...] = family.more

    def _may_be_call(self, start: str) -> bool:
        return any(start.startswith(s) or s.startswith(start) for s in (*self._family.first, *self.marks))

    def _parse(self, text: str) -> list[Part]:
        said, text = text, text.strip()
        ended = not text.startswith(self.marks)
        for mark in self.marks:
            text, said = text.strip().removeprefix(mark), said.replace(mark, "")
        return list(self._family.read(text, self._tools, ended)) or [said]


def call_parser(family: CallFamily, tools: Tools, around: ReplyParser | None = None) -> ReplyParser:
    """A fresh parser of one answer; `around` reads what is no call."""
    if family.open:
        return MarkedParser(family, tools, around)
    return UnmarkedParser(family, tools)


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
        return list(json_calls(text, {}) or _cut_calls(text)) or (
            [] if text.lstrip().startswith("[") else [text]
        )


#: The head of a call as the grammar of `tool_choice: required` writes it; the arguments follow.
_CALL_HEAD = re.compile(
    r'\s*+[\[,]?\s*+\{\s*+"name"\s*+:\s*+("(?:[^"\\]|\\.)*+")\s*+,\s*+"arguments"\s*+:\s*+'
)


def _cut_calls(text: str) -> list[ToolCall]:
    """The calls in a list that was cut: the last one has its arguments so far. A call that was cut
    before its arguments is left out."""
    calls: list[ToolCall] = []
    at = 0
    while len(calls) < MAX_CALLS_READ and (head := _CALL_HEAD.match(text, at)) is not None:
        try:
            _, end = read_json(text, head.end())
        except ValueError:
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
