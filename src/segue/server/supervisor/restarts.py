"""When a child that ended is started again, and when no more. Decisions only: no clock, no process."""

from __future__ import annotations

from collections import deque

#: The pause before each restart within `WINDOW_S`, in seconds. One more end within it is one too many.
PAUSES_S = (0.0, 0.5, 1.0, 2.0, 4.0)
#: Seconds of service, without those of loading, after which an end no longer counts.
WINDOW_S = 60.0


class Restarts:
    """The restarts of one unit of children.

    Only time in which the unit served moves the window on: a model that takes longer to load than the
    window, and a child that never gets ready, reach the limit too.
    """

    def __init__(self) -> None:
        self._served_s = 0.0
        self._ends: deque[float] = deque()

    def ended(self, served_s: float) -> float | None:
        """The unit failed, `served_s` seconds after it was ready (0: it never was). Returns the pause before
        it is started again, None if it is not."""
        self._served_s += served_s
        while self._ends and self._served_s - self._ends[0] >= WINDOW_S:
            self._ends.popleft()
        if len(self._ends) == len(PAUSES_S):
            return None
        self._ends.append(self._served_s)
        return PAUSES_S[len(self._ends) - 1]
