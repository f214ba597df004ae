"""When a peer that owes something is given up: the one rule of streams whose other end may fall silent."""

from __future__ import annotations

from collections.abc import Callable

from segue.kv.transport.net.ioloop import IoLoop, Timer


class SilenceWatch:
    """Calls `gone` once nothing has come for `silence_s` of what the peer owes. Runs on the loop's thread.

    since: when something last came of it, or when it began to be owed; None: nothing is owed.
    """

    def __init__(
        self,
        loop: IoLoop,
        silence_s: float,
        since: Callable[[], float | None],
        gone: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._silence_s = silence_s
        self._since = since
        self._gone = gone
        self._timer: Timer | None = None
        self._due = 0.0

    def start(self) -> None:
        """The peer owes something from now on. Idempotent."""
        if self._timer is None:
            self._wait(self._silence_s)

    def stop(self) -> None:
        """Call nothing any more. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wait(self, seconds: float) -> None:
        self._due = self._loop.time() + seconds
        self._timer = self._loop.later(seconds, self._check)

    def _check(self) -> None:
        self._timer = None
        since = self._since()
        if since is None:
            return
        now = self._loop.time()
        left_s = since + self._silence_s - now
        if left_s > 0:
            self._wait(left_s)
        elif now - self._due < self._silence_s / 2:
            self._gone()
        else:  # we slept ourselves (a stopped process): the answer may be waiting in the socket
            self._wait(self._silence_s / 2)
