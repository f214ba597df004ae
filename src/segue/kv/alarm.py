"""A loop's timer for the nearest of many deadlines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from segue.kv.io import Io


class Alarm:
    """Calls `ring` on the loop of `io` when the nearest deadline has come, or somewhat earlier."""

    def __init__(self, io: Io, ring: Callable[[], None]) -> None:
        self._io = io
        self._ring = ring
        self._timer: asyncio.TimerHandle | None = None
        self._at = 0.0

    def set(self, deadline: float | None, now: float) -> None:
        """The nearest deadline is this one, None if there is none; both in seconds of one clock."""
        if self._timer is not None:
            if deadline is not None and self._at <= deadline:
                return  # rings early enough; then the next one is set
            self._timer.cancel()
            self._timer = None
        if deadline is not None:
            # Its time is kept here: of a timer that is due already uvloop makes one that has none.
            self._at = deadline
            self._timer = self._io.loop.call_later(max(0.0, deadline - now), self._due)

    def _due(self) -> None:
        self._timer = None
        self._ring()
