"""What a test grants when it means a whole memory."""

from __future__ import annotations

from segue.layout.content import Content, Plane


def whole(nbytes: int) -> Content:
    """All of a memory's first `nbytes`."""
    return Content((Plane(0, 1, 1),), ((0, nbytes),))
