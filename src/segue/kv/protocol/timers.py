"""Timers of hand-offs, and the heap of all deadlines of one exchange."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class DeadlineEntry:
    """One entry of the exchange's deadline heap; `due` is called with it once its time has come."""

    __slots__ = ("at", "due", "live")

    def __init__(self, at: float, due: Callable[[DeadlineEntry], None]) -> None:
        self.at = at
        self.due = due
        self.live = True


class Deadlines:
    """A heap of timers with lazy deletion: adding and looking cost O(log n), cancelling O(1).

    The heap is rebuilt when more than half of it is cancelled, so its size is bounded by the
    number of live timers plus a constant.
    """

    SLACK = 64

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, DeadlineEntry]] = []
        self._sequence = 0
        self.live = 0

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, timer: DeadlineEntry) -> None:
        """Watch a live timer."""
        self._sequence += 1
        self.live += 1
        heapq.heappush(self._heap, (timer.at, self._sequence, timer))
        if len(self._heap) > self.SLACK + 2 * self.live:
            self._heap = [entry for entry in self._heap if entry[2].live]
            heapq.heapify(self._heap)

    def cancel(self, timer: DeadlineEntry) -> None:
        """Forget a timer. Idempotent."""
        if timer.live:
            timer.live = False
            self.live -= 1

    def next(self) -> float | None:
        """When the earliest live timer is due; None without one."""
        heap = self._heap
        while heap and not heap[0][2].live:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def pop_due(self, now: float) -> DeadlineEntry | None:
        """Take the earliest live timer that is due, cancelled from here on."""
        due = self.next()
        if due is None or due > now:
            return None
        timer = heapq.heappop(self._heap)[2]
        self.cancel(timer)
        return timer
