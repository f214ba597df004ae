"""When a place is free again, for clients that found none. Without clock or I/O."""

from __future__ import annotations

import math
from collections.abc import Callable

from segue.kv import ErrorCode, SegueError

LONGEST_S = 60
#: The weight of the latest request in the mean.
WEIGHT = 1 / 16


class RetryAfter:
    """How long requests take, and what clients were told; `in_flight` says how many requests there are. Times
    are seconds of the caller's clock.

    While `n` requests run that take `t` seconds each, one ends every `t / n` seconds. Each client that is
    refused is promised the first such place that nobody was promised before.
    """

    def __init__(self, in_flight: Callable[[], int]) -> None:
        self._in_flight = in_flight
        self._mean_s = 0.0
        self._promised = 0.0

    def served(self, seconds: float) -> None:
        """A request has ended well after so long."""
        self._mean_s += (seconds - self._mean_s) * (WEIGHT if self._mean_s else 1.0)

    def refused(self, error: SegueError, now: float) -> SegueError:
        """`error`, with when to try again if it says that there is no place."""
        if error.info.code is ErrorCode.OUT_OF_CAPACITY:
            self._promised = max(self._promised, now) + self._mean_s / max(1, self._in_flight())
            self._promised = min(self._promised, now + LONGEST_S)
            error.retry_after_s = max(1, math.ceil(self._promised - now))
        return error
