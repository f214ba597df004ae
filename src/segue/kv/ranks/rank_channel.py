"""The local channel between a leader and the worker process of one of its ranks, on an asyncio loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

from segue.kv.errors import PeerLost, SegueError
from segue.kv.ranks import rank_wire as wire


class RankChannel(asyncio.Protocol):
    """One end. `received` gets each message of the other end, which errors call `name`; it must not raise.

    `ended` is told why nothing can be said or heard any more: first with False, when the other end was silent
    for `silence_s` seconds (0: it need not speak), did not read `backlog_bytes` or said nonsense; then, or at
    once, with True, when the other end has closed. Each at most once, and not after `close`.
    """

    def __init__(
        self,
        name: str,
        frames: wire.Frames,
        received: Callable[[Any], None],
        ended: Callable[[SegueError, bool], None],
        *,
        backlog_bytes: int,
        ping_s: float = 0.0,
        silence_s: float = 0.0,
    ) -> None:
        self._name = name
        self._frames = frames
        self._received = received
        self._ended = ended
        self._backlog_bytes = backlog_bytes
        self._ping_s = ping_s
        self._silence_s = silence_s
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._heard_at = self._loop.time()
        self._ping_due = 0.0
        self._given_up: SegueError | None = None
        self._closed = False
        self._lost = asyncio.Event()

    def send(self, message: wire.Command | wire.Answer) -> None:
        """Say `message`; nothing once the channel has ended. Raises RequestTooLarge."""
        frame = wire.encode(message)
        transport = self._transport
        if transport is None or transport.is_closing() or self._given_up is not None:
            return
        transport.write(frame)
        if transport.get_write_buffer_size() > self._backlog_bytes:
            self._give_up(PeerLost(f"{self._name} does not read what it is told"))

    def close(self) -> None:
        """End this side; what was said is still delivered. Idempotent."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._transport.close()

    async def closed(self, within_s: float) -> None:
        """Wait until our end of the socket is closed, which the other end then hears: after what was said has
        been read, or without that in `within_s` seconds."""
        if self._transport is None:
            return
        try:
            async with asyncio.timeout(0 if self._given_up else within_s):
                await self._lost.wait()
        except TimeoutError:
            self._transport.abort()
            await self._lost.wait()

    # ---- asyncio ---------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have asyncio's methods but not its base class.
        self._transport = cast(asyncio.Transport, transport)
        self._heard_at = self._loop.time()
        if self._ping_s:
            self._ping_later()

    def data_received(self, data: bytes) -> None:
        if self._given_up is not None:
            return
        self._heard_at = self._loop.time()
        try:
            messages = self._frames.feed(data)
        except SegueError as error:
            # Not closed here: that the channel has ended must say that the other end closed it.
            self._give_up(error)
            return
        for message in messages:
            if isinstance(message, wire.PingCommand):
                self.send(wire.PongAnswer())
            elif not isinstance(message, wire.PongAnswer) and not self._closed:
                self._received(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost.set()
        if self._timer is not None:
            self._timer.cancel()
        if not self._closed:
            self._closed = True
            self._ended(self._given_up or PeerLost(f"{self._name} has ended"), True)

    # ---- inside ----------------------------------------------------------------------------------

    def _ping(self) -> None:
        now = self._loop.time()
        if now > self._ping_due + self._ping_s:
            self._heard_at = now  # it was we who stood still: what it said meanwhile is still to be read
        silent_s = now - self._heard_at
        if self._silence_s and silent_s > self._silence_s:
            self._give_up(PeerLost(f"{self._name} has said nothing for {silent_s:.1f} s"))
            return
        self.send(wire.PingCommand())
        self._ping_later()

    def _ping_later(self) -> None:
        self._ping_due = self._loop.time() + self._ping_s
        self._timer = self._loop.call_later(self._ping_s, self._ping)

    def _give_up(self, error: SegueError) -> None:
        if self._given_up is None and not self._closed:
            self._given_up = error
            self._ended(error, False)
