"""The parts of an answer (text, reasoning, tool calls), and the face of a parser that finds them."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call as OpenAI shows it; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Thought:
    """A piece of the model's reasoning before its answer."""

    text: str


Part = str | Thought | ToolCall

#: White space at the end of a part that is held back until it is known whether the part ends there.
_MAX_HELD_SPACE = 64


class ReplyParser(ABC):
    """Splits a growing text into parts. The parts, joined, do not depend on where the text was cut."""

    #: Texts that it looks for. Decoding must not skip one that is a special token.
    marks: Sequence[str] = ()
    #: The mark that ends reasoning; empty if the parser finds none.
    thought_end = ""

    @property
    def thinking(self) -> bool:
        """Whether the text so far ends within reasoning."""
        return False

    @property
    def undecided(self) -> bool:
        """Whether the end of the text so far may turn out to begin reasoning."""
        return False

    @abstractmethod
    def feed(self, text: str) -> list[Part]:
        """The parts that became certain with `text`."""

    @abstractmethod
    def finish(self) -> list[Part]:
        """The rest, when the text has ended."""


class PlainText(ReplyParser):
    """All of it is text."""

    def feed(self, text: str) -> list[Part]:
        return [text] if text else []

    def finish(self) -> list[Part]:
        return []


class Filtered(ReplyParser):
    """`inner`, of whose parts `kept` says which are given out."""

    def __init__(self, inner: ReplyParser) -> None:
        self._inner = inner
        self.marks, self.thought_end = inner.marks, inner.thought_end

    @property
    def thinking(self) -> bool:
        return self._inner.thinking

    @property
    def undecided(self) -> bool:
        return self._inner.undecided

    def feed(self, text: str) -> list[Part]:
        return self.kept(self._inner.feed(text))

    def finish(self) -> list[Part]:
        return self.kept(self._inner.finish())

    @abstractmethod
    def kept(self, parts: list[Part]) -> list[Part]:
        """The parts to give out now, in place of `parts`."""


class TrailingSpace:
    """Holds back white space at the end of a growing text, at most `_MAX_HELD_SPACE` characters."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held = ""

    def feed(self, text: str) -> str:
        """`text` with what was held back before it, without its white space at the end."""
        text = self._held + text
        self._held = text[len(text.rstrip()) :][-_MAX_HELD_SPACE:]
        return text[: len(text) - len(self._held)]

    def take(self) -> str:
        """Give out the white space that is held back."""
        held, self._held = self._held, ""
        return held


def new_call_id() -> str:
    """An id for a call. A template that takes shorter ones is shown others (`past_messages`)."""
    return "call_" + secrets.token_hex(12)
