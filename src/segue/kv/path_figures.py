"""Measured speeds of the paths to a peer, and the chosen one: for logs, metrics and `segue ps`."""

from __future__ import annotations

import msgspec


class PathFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The speed of a path: `page_s` until a single page has landed; `bytes_per_s` of many."""

    page_s: float
    bytes_per_s: float

    def describe(self) -> str:
        """The figures as text."""
        return f"{self.bytes_per_s / 1e9:.2f} GB/s, {self.page_s * 1e6:.0f} us a page"


class PathCandidate(msgspec.Struct, frozen=True, kw_only=True):
    """One transport that was considered for a pair: its figures, or why it has none. `late`: it works, but
    the measurement was not complete in time."""

    transport: str
    figures: PathFigures | None = None
    why_not: str = ""
    late: bool = False

    def describe(self) -> str:
        """The candidate as text."""
        return f"{self.transport} {self.why_not if self.figures is None else self.figures.describe()}"


class PathChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The `transport` that a pair uses, and the `candidates`: the figures of each that either side offers, or
    why it has none. `slow` is a sentence if the one taken is far slower than this host's memory."""

    transport: str
    candidates: list[PathCandidate]
    slow: str = ""

    @property
    def taken(self) -> PathCandidate:
        """The candidate that was taken."""
        return next(one for one in self.candidates if one.transport == self.transport)

    def describe(self) -> str:
        """The choice as one line."""
        others = [one.describe() for one in self.candidates if one.transport != self.transport]
        return "; ".join([self.taken.describe(), *others, *([self.slow] if self.slow else [])])
