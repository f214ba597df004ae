"""uvicorn behind a `Gate`: the registry's HTTP server, and the one of an instance's door.

Until one of its requests has proven itself a connection is a stranger's: there are few of them, and few
from one address. Each request, also a later one, has a deadline for its last byte and a bound for its
head, so a slow or endless one costs one connection for seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Generator
from typing import Final

import msgspec
import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from segue.core.errors import (
    BootstrapTimeout,
    ErrorInfo,
    Internal,
    OutOfCapacity,
    RequestTooLarge,
    SegueError,
    status_of,
)
from segue.session.gate import Gate
from segue.session.tls import GIVE_BOTH, HANDSHAKE_RECORD

log = logging.getLogger(__name__)

#: In an ASGI scope: call it when the request has proven who it comes from. May raise OutOfCapacity.
LET_IN: Final = "segue.let_in"
MAX_HEAD_BYTES: Final = 32 * 2**10


class ErrorBody(msgspec.Struct, frozen=True):
    """How an error travels."""

    error: ErrorInfo


class GuardedHttp(HttpToolsProtocol):
    """One connection; a `gate.Guest`. `guard` is set before anything else is called."""

    guard: GuardedServer
    _turned_away: SegueError | None = None
    _late: asyncio.TimerHandle | None = None
    _head_bytes = 0
    _in_head = True
    _said = False

    # ---- gate.Guest -----------------------------------------------------------------------------

    def turn_away(self, error: SegueError) -> None:
        """See `Guest`."""
        self._turned_away = error

    def cut(self, error: SegueError) -> None:
        """See `Guest`."""
        log.info("an http connection was ended: %s", error)
        self._stop_clock()
        if self.transport is not None:
            self.transport.abort()

    # ---- asyncio --------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._start_clock()
        if self._turned_away is not None:
            log.warning("%s was refused: %s", self.client, self._turned_away)
            self._last_words(self._turned_away)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_clock()
        self.guard.left(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if not self._said:
            self._said = True
            if data[0] == HANDSHAKE_RECORD:
                log.warning("%s speaks TLS and this side does not; %s", self.client, GIVE_BOTH)
        if self._in_head:
            self._start_clock()
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES + 64 * 2**10:
                self._last_words(RequestTooLarge(f"a request's head has more than {MAX_HEAD_BYTES} bytes"))
                return
        super().data_received(data)

    # ---- requests -------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self.scope[LET_IN] = self._let_in  # type: ignore[typeddict-unknown-key]

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_bytes = 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._stop_clock()
        self._in_head = True
        super().on_message_complete()

    def _let_in(self) -> None:
        self.guard.let_in(self)

    def _start_clock(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(self.guard.request_s, self._too_late)

    def _stop_clock(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _too_late(self) -> None:
        self._late = None
        if not self.transport.is_closing():
            self._last_words(BootstrapTimeout(f"a request was not complete after {self.guard.request_s} s"))

    def _last_words(self, error: SegueError) -> None:
        """An error that no handler answers; the connection ends with it."""
        body = msgspec.json.encode(ErrorBody(error.info))
        status = 400 if self._turned_away is not None else status_of(error.info.code)
        head = f"HTTP/1.1 {status} Refused\r\ncontent-type: application/json\r\nconnection: close\r\n"
        if self.cycle is None or self.cycle.response_complete:
            self.transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        self.transport.close()


class GuardedServer(uvicorn.Server):
    """Serves `app` on a bound, listening, non-blocking socket from `start` until `stop`.

    `request_s` is the deadline of one request's last byte, in seconds; at most `max_members`
    connections that have proven themselves are kept.
    """

    def __init__(
        self,
        app: Starlette,
        sock: socket.socket,
        *,
        server_tls: ssl.SSLContext | None,
        request_s: float,
        max_members: int,
        drain_s: float,
    ) -> None:
        config = uvicorn.Config(
            app,
            http=GuardedHttp,
            ws="none",
            loop="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=max(1, int(drain_s)),
        )
        super().__init__(config)
        self.request_s = request_s
        self._sock = sock
        self._max_members = max_members
        self._members: set[GuardedHttp] = set()
        self._up = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.counts: dict[str, int] = {}
        self._gate = Gate(self._incoming, server_tls=server_tls, handshake_s=request_s, count=self._count)

    @property
    def address(self) -> tuple[str, int]:
        """What was bound."""
        host, port = self._sock.getsockname()[:2]
        return str(host), int(port)

    @property
    def strangers(self) -> int:
        """Connections that have not proven themselves."""
        return len(self._gate.strangers)

    def start(self) -> asyncio.Task[None]:
        """Begin to serve; the task ends with the server."""
        self._task = asyncio.get_running_loop().create_task(self.serve([]), name="guarded-http")
        return self._task

    async def answering(self) -> None:
        """Wait until requests are answered; raises what the start raised."""
        task = self._task or self.start()
        up = asyncio.ensure_future(self._up.wait())
        try:
            await asyncio.wait({up, task}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            up.cancel()
        if task.done():
            task.result()
            raise Internal("the HTTP server ended at its start")

    async def stop(self) -> None:
        """Accept nobody, end what is idle, and give the rest its drain time. Frees the port. Idempotent."""
        await self._gate.close()
        self._sock.close()
        self.should_exit = True
        for stranger in self._gate.strangers:
            stranger.shutdown()
        if self._task is not None:
            await asyncio.wait({self._task})
        for left_over in list(self.server_state.connections):
            left_over.transport.abort()

    # ---- uvicorn --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Signals are the process's."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Open the gate instead of uvicorn's own servers."""
        self.servers = []
        self._gate.open(self._sock)
        self.started = True
        self._up.set()

    # ---- connections ----------------------------------------------------------------------------

    def let_in(self, connection: GuardedHttp) -> None:
        """A request of `connection` has proven itself. OutOfCapacity if there are too many such."""
        if connection in self._members:
            return
        if len(self._members) >= self._max_members:
            raise OutOfCapacity(f"{self._max_members} clients are connected already")
        self._members.add(connection)
        self._gate.let_in(connection)

    def left(self, connection: GuardedHttp) -> None:
        """Its socket is gone."""
        self._members.discard(connection)
        self._gate.left(connection)

    def _incoming(self) -> GuardedHttp:
        connection = GuardedHttp(
            config=self.config,
            server_state=self.server_state,
            app_state={},
            _loop=asyncio.get_running_loop(),
        )
        connection.guard = self
        return connection

    def _count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1
