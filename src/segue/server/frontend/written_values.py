"""Values as models write them: JSON with raw line breaks in its texts, and literals of Python.

Nothing is run. Each reader looks at a character once.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

_DECODER: Final = json.JSONDecoder(strict=False)
_MAX_DEPTH: Final = 100

_SPACE: Final = re.compile(r"\s*")
_TEXT: Final = re.compile(
    r"""([rRuU]?)(?:"{3}((?:\\.|[^\\])*?)"{3}|'{3}((?:\\.|[^\\])*?)'{3}"""
    r"""|"(?!"")((?:\\.|[^"\\])*)"|'(?!'')((?:\\.|[^'\\])*)')""",
    re.DOTALL,
)
_NUMBER: Final = re.compile(r"-?(?:\d[\d_]*(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?(?!\w)")
_WORD: Final = re.compile(r"[A-Za-z]+(?!\w)")
#: Models write JSON's words in Python, too.
_WORDS: Final = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}
_ESCAPE: Final = re.compile(
    r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|x([0-9a-fA-F]{2})|([0-7]{1,3})|(.))", re.DOTALL
)
_LETTERS: Final = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "b": "\b",
    "f": "\f",
    "v": "\v",
    "a": "\a",
    "\\": "\\",
    "'": "'",
    '"': '"',
    "\n": "",
}


def read_json(text: str, at: int = 0) -> tuple[Any, int]:
    """The JSON value at `at`, and where it ends. A line break or a tab in a text may stand as it is.

    Raises ValueError, also for a value that is nested too deeply."""
    try:
        value, end = _DECODER.raw_decode(text, at)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return value, end


def read_value(text: str) -> Any:
    """The value that all of `text` is: JSON, else a literal of Python. Raises ValueError."""
    text = text.strip()
    try:
        value, end = read_json(text)
        if end == len(text):
            return value
    except ValueError:
        pass
    reader = LiteralReader(text)
    value = reader.value()
    if not reader.at_end():
        raise ValueError("more than one value")
    return value


class LiteralReader:
    """Reads literals of Python, and what stands around them, one after another."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def at_end(self) -> bool:
        """Whether nothing but white space is left."""
        self.skip(_SPACE)
        return self._at == len(self._text)

    def skip(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Go past what `pattern` matches here."""
        found = pattern.match(self._text, self._at)
        if found is not None:
            self._at = found.end()
        return found

    def take(self, mark: str) -> bool:
        """Go past `mark` and the white space before it, if it comes next."""
        self.skip(_SPACE)
        found = self._text.startswith(mark, self._at)
        self._at += len(mark) if found else 0
        return found

    def value(self, depth: int = 0) -> Any:
        """The literal that comes next: a text, a number, a word, a list, a tuple or a dict with texts as
        keys. Raises ValueError for anything else."""
        if depth > _MAX_DEPTH:
            raise ValueError("nested too deeply")
        self.skip(_SPACE)
        if (text := self.skip(_TEXT)) is not None:
            said = _said(text)
            while self.skip(_SPACE) and (text := self.skip(_TEXT)):
                said += _said(text)
            return said
        if (number := self.skip(_NUMBER)) is not None:
            return int(number[0]) if number[0].lstrip("-").replace("_", "").isdigit() else float(number[0])
        if (word := self.skip(_WORD)) is not None:
            if word[0] not in _WORDS:
                raise ValueError(f"{word[0]} is no literal")
            return _WORDS[word[0]]
        if self.take("["):
            return self._items("]", depth)[0]
        if self.take("("):
            items, commas = self._items(")", depth)
            return items[0] if len(items) == 1 and not commas else items
        if self.take("{"):
            return self._pairs(depth)
        raise ValueError("not a literal")

    def _items(self, end: str, depth: int) -> tuple[list[Any], int]:
        items: list[Any] = []
        commas = 0
        while not self.take(end):
            if len(items) > commas:
                raise ValueError("a comma is missing")
            items.append(self.value(depth + 1))
            commas += self.take(",")
        return items, commas

    def _pairs(self, depth: int) -> dict[str, Any]:
        pairs: dict[str, Any] = {}
        more = True
        while not self.take("}"):
            key = self.value(depth + 1) if more else None
            if not isinstance(key, str) or not self.take(":"):
                raise ValueError("a key that is no text")
            pairs[key] = self.value(depth + 1)
            more = self.take(",")
        return pairs


def _said(found: re.Match[str]) -> str:
    """The text that a literal of Python stands for. An escape that Python does not know is kept."""
    raw = next(group for group in found.groups()[1:] if group is not None)
    return raw if found[1] in ("r", "R") or "\\" not in raw else _ESCAPE.sub(_unescaped, raw)


def _unescaped(found: re.Match[str]) -> str:
    for group, base in ((1, 16), (2, 16), (3, 16), (4, 8)):
        if found[group] is not None:
            return chr(int(found[group], base))  # ValueError above U+10FFFF
    return _LETTERS.get(found[5], found[0])
