"""Token ids to text, bit by bit: what was sent is never taken back.

Two things make this more than a call to `decode`. A character may be spread over several tokens, and a
decoder looks at neighbours (a leading space, a run of byte tokens). And a stop string may begin in one token
and end in another, so what may be its beginning is held back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"

#: A character has at most four bytes: after this many tokens a broken run is garbage, not a beginning.
_PATIENCE_TOKENS = 8
_WINDOW_TOKENS = 12
_MAX_WINDOW_TOKENS = 64
_CONTEXT_TOKENS = 4
#: Tokens that are decoded at once, which takes some 2 ms.
_PIECE_TOKENS = 256


class Decoder(Protocol):
    """The part of a tokenizer this needs."""

    def decode(self, ids: Sequence[int], *, skip_special: bool) -> str: ...


class Detokenizer:
    """Incremental decoding over a short window of the last tokens.

    The window begins at a *clean* boundary: a place where the text so far did not end in a partial
    character. So the concatenation of all `feed` results and `flush` equals `decode` of all ids. (One
    exception cannot be helped: a byte-fallback decoder that meets a broken byte turns the whole run of byte
    tokens before it into U+FFFD, also the characters that were sent already.)
    """

    def __init__(self, decoder: Decoder, *, skip_special: bool = True) -> None:
        self._decoder = decoder
        self._skip_special = skip_special
        self._window: list[int] = []
        self._sent = 0  # characters of decode(window) that were returned
        self._clean: list[int] = []  # clean boundaries within the window, ascending

    def feed(self, ids: Sequence[int]) -> str:
        """The text that became certain with `ids`."""
        if not ids:
            return ""
        self._window.extend(ids)
        text = self._decoder.decode(self._window, skip_special=self._skip_special)
        stable = len(text)
        if text.endswith(REPLACEMENT):
            stable = len(text.rstrip(REPLACEMENT))
            broken_tokens = len(self._window) - (self._clean[-1] if self._clean else 0)
            if broken_tokens > _PATIENCE_TOKENS:
                stable = max(stable, len(text) - 4)
        else:
            self._clean.append(len(self._window))
        new = text[self._sent : stable] if stable > self._sent else ""
        self._sent = max(self._sent, stable)
        # Only at a clean end is what was sent exactly what the rest of the window will decode to.
        clean = stable == len(text)
        if len(self._window) > (_WINDOW_TOKENS if clean else _MAX_WINDOW_TOKENS):
            self._shrink(text)
        return new

    def flush(self) -> str:
        """The text that was held back, at the end of the tokens."""
        text = self._decoder.decode(self._window, skip_special=self._skip_special) if self._window else ""
        new = text[self._sent :]
        self._sent = len(text)
        return new

    def _shrink(self, text: str) -> None:
        """Drop the front of the window up to a clean boundary that leaves some context."""
        limit = len(self._window) - _CONTEXT_TOKENS
        cut = max((b for b in self._clean if b <= limit), default=0)
        if cut == 0 and len(self._window) > _MAX_WINDOW_TOKENS:
            # No clean boundary in sight: a stream of partial characters. Bounded memory wins.
            cut = limit
        if cut == 0:
            return
        rest = self._window[cut:]
        rest_text = self._decoder.decode(rest, skip_special=self._skip_special)
        if not rest_text and len(self._window) <= _MAX_WINDOW_TOKENS:
            # Only special tokens: a decoder that strips the text's first space would strip again.
            return
        self._sent = max(0, len(rest_text) - (len(text) - self._sent))
        self._window = rest
        self._clean = [b - cut for b in self._clean if b > cut]


def decode_in_pieces(decoder: Decoder, ids: Sequence[int], *, skip_special: bool) -> Iterator[str]:
    """The text of `ids`, bit by bit. While a tokenizer decodes, no other thread of the process runs."""
    detokenizer = Detokenizer(decoder, skip_special=skip_special)
    for at in range(0, len(ids), _PIECE_TOKENS):
        yield detokenizer.feed(ids[at : at + _PIECE_TOKENS])
    yield detokenizer.flush()


class _Search:
    """How much of one string a growing text ends with (Knuth, Morris and Pratt): linear in the text, wherever
    its pieces end. The table grows as far as the text has matched."""

    __slots__ = ("_borders", "matched", "string")

    def __init__(self, string: str) -> None:
        self.string = string
        #: the length of the longest prefix of `string` that the text so far ends with
        self.matched = 0
        #: by length less one: the longest proper prefix of a prefix of `string` that this one ends with
        self._borders = [0]

    def feed(self, text: str) -> int:
        """The place in `text` after the first occurrence, which may have begun before; -1 if none."""
        string, borders, matched, at = self.string, self._borders, self.matched, 0
        while at < len(text):
            if not matched:
                at = text.find(string[0], at)
                if at < 0:
                    break
            elif text[at] != string[matched]:
                while len(borders) < matched:
                    self._grow()
                matched = borders[matched - 1]
                continue
            matched += 1
            at += 1
            if matched == len(string):
                self.matched = matched
                return at
        self.matched = matched
        return -1

    def _grow(self) -> None:
        string, borders = self.string, self._borders
        border, new = borders[-1], string[len(borders)]
        while border and string[border] != new:
            border = borders[border - 1]
        borders.append(border + 1 if string[border] == new else 0)


class StopStrings:
    """Looks for stop strings in a growing text and holds back what may become one. Linear in the text."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._searches = [_Search(stop) for stop in stops]
        self._include = include
        self._held = ""
        self.matched: str | None = None
        self.rest = ""  # the text after the match in the piece that completed it

    @property
    def watches(self) -> bool:
        """Whether there is anything to look for."""
        return bool(self._searches)

    def found(self) -> bool:
        """Whether a stop string was seen; the text has ended there."""
        return self.matched is not None

    def feed(self, text: str) -> str:
        """The text that is certain not to begin a stop string. After a match (`matched`) it is final."""
        if not self._searches or self.matched is not None:
            return text if self.matched is None else ""
        found = [(end, search.string) for search in self._searches if (end := search.feed(text)) >= 0]
        before, text = len(self._held), self._held + text
        self._held = ""
        if found:
            # The one that ends first: it is the one that was complete first as tokens arrived. If several end
            # there, the longest.
            end, stop = min(found, key=lambda f: (f[0], -len(f[1])))
            end += before
            self.matched = stop
            self.rest = text[end:]
            return text[:end] if self._include else text[: end - len(stop)]
        hold = max(search.matched for search in self._searches)
        if hold:
            self._held = text[-hold:]
            return text[:-hold]
        return text

    def flush(self) -> str:
        """The text that was held back, after an end without a match."""
        held, self._held = self._held, ""
        for search in self._searches:
            search.matched = 0
        return held
