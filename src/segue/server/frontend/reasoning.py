"""Reasoning before an answer: `<think>…</think>`, and Mistral's `[THINK]…[/THINK]`.

Known by the model's chat template. Only the beginning of an answer can be reasoning: a model that writes
about these marks later writes text. A template may write the first mark itself, at the end of the prompt.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from segue.server.frontend.detokenize import StopStrings
from segue.server.frontend.reply_parts import Filtered, Part, ReplyParser, Thought, TrailingSpace

#: The marks around reasoning, as templates have them.
_MARKS: Final = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
#: White space before reasoning; a text with more has none.
_MAX_LEADING: Final = 64


def thought_marks(template: str | None) -> tuple[str, str] | None:
    """The marks around the reasoning of a model with this chat template; None: it does not reason."""
    if template is None:
        return None
    return next((marks for marks in _MARKS if marks[1] in template), None)


def begun_by(prompt: str, marks: tuple[str, str], partial: str = "") -> bool:
    """Whether an answer to `prompt` begins within reasoning. `partial` is the beginning of the answer that
    the client has given, at the end of the prompt; there the last mark counts."""
    start, end = marks
    if partial:
        return partial.rfind(start) > partial.rfind(end)
    return prompt[-(_MAX_LEADING + len(start)) :].rstrip().endswith(start)


class _Stage(Enum):
    START = 0
    THOUGHT = 1
    AFTER = 2
    REST = 3


class ReasoningParser(ReplyParser):
    """Reasoning between `marks`, then what `inner` finds; text, without `inner`. `begun`: the prompt ends
    with the first mark."""

    def __init__(self, marks: tuple[str, str], inner: ReplyParser | None, *, begun: bool) -> None:
        self._open, self.thought_end = marks
        self.marks = (*marks, *(inner.marks if inner else ()))
        self._inner = inner
        self._begun = begun
        self._state = _Stage.START
        self._start = ""
        self._close = StopStrings([self.thought_end])
        self._space = TrailingSpace()
        self._said = False

    @property
    def thinking(self) -> bool:
        """See `ReplyParser.thinking`. True while a prompt that has begun it may go on with it."""
        return self._state is _Stage.THOUGHT or (self._state is _Stage.START and self._begun)

    @property
    def undecided(self) -> bool:
        """See `ReplyParser.undecided`."""
        return self._state is _Stage.START

    def feed(self, text: str) -> list[Part]:
        parts: list[Part] = []
        if self._state is _Stage.START:
            text = self._after_start(text)
        if self._state is _Stage.THOUGHT:
            self._think(parts, self._close.feed(text))
            text = ""
            if self._close.found():
                self._space.take()
                self._state, text = _Stage.AFTER, self._close.rest
        if self._state is _Stage.AFTER and (text := text.lstrip()):
            self._state = _Stage.REST
        if self._state is _Stage.REST and text:
            parts += self._inner.feed(text) if self._inner else [text]
        return parts

    def finish(self) -> list[Part]:
        parts: list[Part] = []
        if self._state is _Stage.START and self._start:
            start, self._start = self._start, ""
            if self._begun:
                self._think(parts, start)
            else:
                parts += self._inner.feed(start) if self._inner else [start]
        elif self._state is _Stage.THOUGHT:
            self._think(parts, self._close.flush())
        return [*parts, *(self._inner.finish() if self._inner else ())]

    def _after_start(self, text: str) -> str:
        """The text that the next state takes; nothing while the state stays."""
        self._start += text
        text = self._start.lstrip()
        leading = len(self._start) - len(text)
        if leading <= _MAX_LEADING and self._open.startswith(text):
            if text != self._open:
                return ""
        elif leading > _MAX_LEADING or not text.startswith(self._open):
            self._state = _Stage.THOUGHT if self._begun else _Stage.REST
            text, self._start = self._start, ""
            return text
        self._state, self._start = _Stage.THOUGHT, ""
        return text.removeprefix(self._open)

    def _think(self, parts: list[Part], text: str) -> None:
        text = self._space.feed(text if self._said else text.lstrip())
        if text:
            self._said = True
            parts.append(Thought(text))


class WithoutThoughts(Filtered):
    """`inner`, whose reasoning is not given out."""

    def kept(self, parts: list[Part]) -> list[Part]:
        return [part for part in parts if not isinstance(part, Thought)]
