"""The grant of a whole memory, for tests."""

from __future__ import annotations

from segue.kv.layout.content import Content
from segue.kv.layout.spec import Plane


def whole(nbytes: int) -> Content:
    """All of a memory's first `nbytes`."""
    return stretch(0, nbytes)


def stretch(start: int, nbytes: int) -> Content:
    """So many bytes of a memory from one on."""
    return Content((Plane(start, 1, 1, 1, 1, 1),), ((0, nbytes),))
