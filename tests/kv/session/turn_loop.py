"""A loop that does nothing by itself, and streams in memory: tests choose what happens within one turn.

What a test calls directly (bytes that arrive, a call of the owner) happens in the present turn; what
was given to `call_soon` runs at the next `turn`, as on asyncio's and uvloop's loops.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import socket
from collections import deque
from collections.abc import Callable
from typing import Any


class TurnLoop(asyncio.AbstractEventLoop):
    """Virtual time; `listeners` maps an address to what makes the protocol of a host's connection."""

    def __init__(self) -> None:
        self.now = 0.0
        self.listeners: dict[tuple[str, int], Callable[[str], Any]] = {}
        #: both ends of every stream that lives
        self.ends: list[End] = []
        #: as which host the connections of a host are seen, if not as itself
        self.seen_as: dict[str, str] = {}
        self.errors: list[dict[str, Any]] = []
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._count = 0
        self._dialling = ""

    # ---- what the code under test calls ----------------------------------------------------------

    def time(self) -> float:
        return self.now

    def call_soon(
        self, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_later(
        self, delay: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.now + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._count += 1
        heapq.heappush(self._timers, (when, self._count, handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        return asyncio.Task(coro, loop=self, **options)

    async def getaddrinfo(self, host: Any, port: Any, **options: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port))]

    async def create_connection(
        self, factory: Any, host: Any = None, port: Any = None, **options: Any
    ) -> Any:
        accept = self.listeners.get((host, port))
        if accept is None:
            raise ConnectionRefusedError("connection refused")
        protocol = factory()
        from_host = protocol._owner.host
        ours, theirs = End(self, (host, port)), End(self, (self.seen_as.get(from_host, from_host), 40000))
        ours.other, theirs.other = theirs, ours
        ours.protocol, theirs.protocol = protocol, accept(theirs.name[0])
        for end in (theirs, ours):
            self.ends.append(end)
            end.protocol.connection_made(end)
        return ours, protocol

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.errors.append(context)

    # ---- what tests call -------------------------------------------------------------------------

    def enter(self, call: Callable[..., Any], *args: Any) -> Any:
        """Call something within the present turn."""
        asyncio._set_running_loop(self)
        try:
            return call(*args)
        finally:
            asyncio._set_running_loop(None)

    def turn(self, seconds: float = 0.0) -> bool:
        """The next turn, so many seconds later: run what is due. False if there was nothing."""
        self.now += seconds
        while self._timers and self._timers[0][0] <= self.now:
            self._ready.append(heapq.heappop(self._timers)[2])
        batch, self._ready = self._ready, deque()
        for handle in batch:
            if not handle.cancelled():
                self.enter(handle._run)
        return bool(batch)

    def settle(self) -> None:
        """Everything that is under way arrives, and what follows from it; time stands still."""
        for _ in range(1000):
            moved = self.turn()
            for end in list(self.ends):
                moved = end.deliver() or moved
            if not moved:
                return
        raise AssertionError("it never comes to rest")


class End(asyncio.Transport):
    """One end of a stream. What the other end wrote waits in `arriving` until `deliver`."""

    def __init__(self, loop: TurnLoop, name: tuple[str, int]) -> None:
        super().__init__({"peername": name})
        self.loop = loop
        self.name = name
        self.other: End = self
        self.protocol: Any = None
        self.arriving = b""
        self.ends_after = False
        self.over = False
        self.no_more_out = False
        #: what of that which was written counts as not taken by the network yet
        self.backlog = 0

    def write(self, data: Any) -> None:
        if not self.over and not self.no_more_out:
            self.other.arriving += bytes(data)

    def write_eof(self) -> None:
        self.no_more_out = self.other.ends_after = True

    def can_write_eof(self) -> bool:
        return True

    def get_write_buffer_size(self) -> int:
        return self.backlog

    def is_closing(self) -> bool:
        return self.over

    def close(self) -> None:
        self.abort()

    def abort(self) -> None:
        if not self.over:
            self.over = True
            self.other.ends_after = True
            self.loop.call_soon(self._lost, None)

    def snap(self) -> None:
        """The connection breaks; each end hears of it in its next turn, and what was under way is lost."""
        for end in (self, self.other):
            end.arriving = b""
            if not end.over:
                end.over = True
                end.loop.call_soon(end._lost, ConnectionResetError("connection reset by peer"))

    def deliver(self, nbytes: int | None = None) -> bool:
        """The next bytes (all by default), or the other side's end of the stream, arrive now."""
        if self.over:
            return False
        data, self.arriving = self.arriving[:nbytes], self.arriving[len(self.arriving[:nbytes]) :]
        if data:
            self.loop.enter(self._feed, data)
        elif self.ends_after:
            self.loop.enter(self._ended)
        return bool(data) or self.over

    def _feed(self, data: bytes) -> None:
        at = 0
        while at < len(data) and not self.over:
            room = self.protocol.get_buffer(-1)
            size = min(len(room), len(data) - at)
            room[:size] = data[at : at + size]
            at += size
            self.protocol.buffer_updated(size)

    def _ended(self) -> None:
        if not self.protocol.eof_received():
            self.abort()

    def _lost(self, error: Exception | None) -> None:
        self.loop.ends.remove(self)
        self.protocol.connection_lost(error)
