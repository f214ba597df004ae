"""Time is injected: nobody in a pure room reads a clock.

Deadlines inside a process are absolute seconds of its own monotonic clock. On a wire a deadline
travels as the *remaining* budget in seconds, so that no two hosts' clocks are ever compared.
"""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    """A source of monotonic time. Called from any thread."""

    def now(self) -> float:
        """Seconds since an arbitrary origin; never decreases."""
        ...


class VirtualClock:
    """A clock for tests and the simulator: it begins at `start_s` seconds and moves only by `advance`."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        """Seconds; see `Clock.now`."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move forward; moving backwards is a ValueError."""
        if seconds < 0:
            raise ValueError(f"time moves forward only, not by {seconds} s")
        self._now_s += seconds
