"""A deadline that is moved and lifted far more often than it passes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

#: A timer that comes later than that was kept from it: the process was stopped, or its loop was blocked.
#: Bytes that have come meanwhile were not read, and get as long again.
STOOD_STILL_S = 1.0


class Deadline:
    """Calls `passed` once when the deadline has come, on the clock of `loop`, in seconds.

    A timer is made for the earliest of its times alone; when it fires it is made again for what the deadline
    is by then. So one that is always lifted in time costs a comparison and no timer.
    If it was we who stood still when it came, it is moved once, by `STOOD_STILL_S`.
    """

    __slots__ = ("_at_s", "_looks_s", "_loop", "_moved", "_passed", "_timer")

    def __init__(self, loop: asyncio.AbstractEventLoop, passed: Callable[[], None]) -> None:
        self._loop = loop
        self._passed = passed
        self._at_s: float | None = None
        self._moved = False
        self._timer: asyncio.TimerHandle | None = None
        #: when the timer fires. Kept here: of a timer that is due already uvloop makes one that has no time.
        self._looks_s = 0.0

    @property
    def is_set(self) -> bool:
        """There is a deadline, and it has not passed."""
        return self._at_s is not None

    def set(self, at_s: float) -> None:
        """Replace the deadline by this one."""
        self._at_s, self._moved = at_s, False
        if self._timer is None or at_s < self._looks_s:
            self._drop()
            self._look_at(at_s)

    def lift(self) -> None:
        """There is none."""
        self._at_s = None

    def close(self) -> None:
        """There is none any more, and its owner is not known here."""
        self._at_s = None
        self._drop()
        self._passed = _nothing

    def _drop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_at(self, when_s: float) -> None:
        self._looks_s = when_s
        self._timer = self._loop.call_at(when_s, self._look)

    def _look(self) -> None:
        self._timer, at_s = None, self._at_s
        if at_s is None:
            return
        if at_s > self._looks_s:
            self._look_at(at_s)
        elif not self._moved and self._loop.time() > at_s + STOOD_STILL_S:
            self._moved, self._at_s = True, self._loop.time() + STOOD_STILL_S
            self._look_at(self._at_s)
        else:
            self._at_s = None
            self._passed()


def _nothing() -> None: ...
