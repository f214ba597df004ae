"""Text of others, made harmless for a terminal and a log."""

from __future__ import annotations


def printable(text: str, limit: int = 200) -> str:
    """`text` with each character that a terminal would not print as its escape sequence of Python, cut after
    `limit` characters with `…`."""
    shown = text[:limit]
    if not shown.isprintable():
        shown = "".join(
            char if char.isprintable() else char.encode("unicode_escape").decode() for char in shown
        )
    return shown + "…" if len(text) > limit else shown
