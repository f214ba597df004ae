"""The time of an event loop, which a test moves on: what is to be late is late by construction, and nothing
is because the machine stood still."""

from __future__ import annotations

import asyncio


class Jumps:
    """The clock of the running loop, from now on; the loop must be asyncio's own. All that is due on the way
    happens at the next turn, as it does in a process that was stopped: also the deadlines of the test."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._machine = loop.time
        self._ahead_s = 0.0
        loop.time = lambda: self._machine() + self._ahead_s  # type: ignore[method-assign]

    def over(self, seconds: float) -> None:
        """So much time has passed at once."""
        self._ahead_s += seconds
