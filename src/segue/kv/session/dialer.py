"""Keeping a session to one peer open: the one way that leaders and frontends do it."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable

from segue.kv.backoff import Backoff, Uniform
from segue.kv.errors import SegueError
from segue.kv.session.api import Session
from segue.kv.session.tasks import keep_running

log = logging.getLogger("segue.kv.session")


class Dialer:
    """Keeps one session open: awaits `connect`, and after a loss connects again with growing pauses.

    The pauses, drawn with `uniform`, are timers of the loop and end at `stop`. `name` stands in the log,
    where two failures in a row for the same reason are one line. `refused` is called with each refusal that
    another try will not mend by itself. It is called with each failure once the peer could not be reached for
    `patience_s` seconds. So requests that wait for the peer can end with the reason.
    """

    def __init__(
        self,
        connect: Callable[[], Awaitable[Session]],
        name: str,
        *,
        refused: Callable[[SegueError], None] | None = None,
        patience_s: float = 0.0,
        uniform: Uniform = random.uniform,
    ) -> None:
        self._connect = connect
        self._patience_s = patience_s
        self._uniform = uniform
        self._refused = refused
        self._name = name
        self._task: asyncio.Task[None] | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin on `loop` (call it there)."""
        name = f"the session to {self._name}"
        self._task = keep_running(self._run, name=name, failed=self._refused, loop=loop)

    def stop(self) -> None:
        """End for good; an open session is left alone. Idempotent."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        clock = asyncio.get_running_loop().time
        backoff, said, since = Backoff(uniform=self._uniform), "", clock()
        while True:
            try:
                session = await self._connect()
            except SegueError as error:
                if str(error) != said:
                    said = str(error)
                    log.warning("cannot join %s: %s", self._name, said)
                waited = clock() - since >= self._patience_s
                if self._refused is not None and (waited or not error.info.retryable):
                    self._refused(error)
                await asyncio.sleep(backoff.next_s())
                continue
            backoff.reset()
            said = ""
            await session.ended()
            since = clock()
            await asyncio.sleep(backoff.next_s())
