"""When one connection says something although there is nothing to say, and when its peer is given up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from segue.kv.limits import Limits


class Keepalive:
    """A connection sets `heard_at` and `sent_at` (the loop's time) whenever something comes or goes.

    After `keepalive_s` without sending `ping` is called; after `peer_silence_s` without hearing `silent`,
    once, with the seconds. Each connection has its own timer, so nothing that one peer does delays
    another's.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        limits: Limits,
        ping: Callable[[], None],
        silent: Callable[[float], None],
    ) -> None:
        self._loop = loop
        self._limits = limits
        self._ping = ping
        self._silent = silent
        self._timer: asyncio.TimerHandle | None = None
        self.heard_at = self.sent_at = loop.time()

    def start(self) -> None:
        """Watch from now on."""
        limits = self._limits
        due = min(self.sent_at + limits.keepalive_s, self.heard_at + limits.peer_silence_s)
        self._timer = self._loop.call_at(due, self._tick, due)

    def stop(self) -> None:
        """Idempotent."""
        if self._timer is not None:
            self._timer.cancel()

    def _tick(self, due: float) -> None:
        limits, now = self._limits, self._loop.time()
        if now - due > limits.keepalive_s and now - self.heard_at >= limits.peer_silence_s:
            # We were the ones who slept (stopped process, blocked loop, a clock that jumped). The peer's
            # bytes wait in the socket, or its next sign is on its way: its silence begins now.
            self.heard_at = now
        # The same sums as in `start`: a difference is rounded otherwise, and the timer would spin.
        if now >= self.heard_at + limits.peer_silence_s:
            self._silent(now - self.heard_at)
            return
        if now >= self.sent_at + limits.keepalive_s:
            self._ping()
        self.start()
