"""A listening socket whose unauthenticated connections are bounded in number and time, with TLS or without.

Used by everything that listens on an asyncio loop: sessions, the registry, the HTTP servers.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Any, Final, Protocol

from segue.kv.errors import (
    BootstrapUnreachable,
    OutOfCapacity,
    PeerRefused,
    SegueError,
    Unauthorized,
)
from segue.kv.pending import MAX_PENDING, PendingConnections, Refusals
from segue.kv.session import tls
from segue.kv.session.tasks import awaited, keep_running

log = logging.getLogger(__name__)

_OUT_OF_DESCRIPTORS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
#: Nothing tells when the system has descriptors again, so this one wait is blind.
PAUSE_S: Final = 0.1
#: Connections that are accepted before those that are there have their turn: a flood must not keep heads that
#: have arrived from being read, nor streams from going on.
AT_ONCE: Final = 16


class PendingProtocol(Protocol):
    """The protocol of one incoming connection, from before its first byte on."""

    def refuse_when_made(self, error: SegueError) -> None:
        """Called before `connection_made`: once it is made, tell the peer in plain bytes, and close."""
        ...

    def cut(self, error: SegueError) -> None:
        """Close now. The connection was not made, took too long, or others need its place."""
        ...


class GuardedListener:
    """Accepts connections until `close`. Used on one asyncio loop.

    - `make` makes the protocol of each connection; it is a `PendingProtocol` too.
    - A connection is *pending* from the first byte until `authenticated` or `closed`; `PendingConnections`
      bounds how many there are.
    - A pending connection that sends nothing for `handshake_s` seconds is closed; there are at most
      `max_pending` of them, `per_host` (default: half) from one address.
    - With `server_tls` only TLS is accepted. The first byte tells TLS from plain, so that a peer of the wrong
      kind is told why it is refused.
    - `tls_hint` tells a peer without TLS what to do.
    - `count` is called with `refused` or `pending_dropped` for each such connection.
    - Without file descriptors the oldest pending connection is closed, or else one that `make_room` chooses.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        *,
        server_tls: ssl.SSLContext | None,
        handshake_s: float,
        count: Callable[[str], None],
        max_pending: int = MAX_PENDING,
        per_host: int | None = None,
        make_room: Callable[[], object] = lambda: None,
        tls_hint: str = tls.GIVE_BOTH,
    ) -> None:
        self._make = make
        self._tls = server_tls
        self._handshake_s = handshake_s
        self.pending: PendingConnections[Any] = PendingConnections(max_pending, per_host)
        self._count = count
        self._make_room = make_room
        self._tls_hint = tls_hint
        self._admissions: dict[Any, tuple[asyncio.Task[Any], socket.socket]] = {}
        self._accepting: asyncio.Task[None] | None = None
        self._refusals = Refusals()

    def open(self, listener: socket.socket) -> None:
        """Begin to accept on a listening, non-blocking socket, which stays the caller's."""
        self._accepting = keep_running(lambda: self._accept(listener), name="accepting connections")

    async def close(self) -> None:
        """Accept nobody any more; connections that are being made are ended. Idempotent."""
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.wait({self._accepting})
        while self._admissions:
            for _, sock in self._admissions.values():
                _hang_up(sock)
            await asyncio.wait({task for task, _ in self._admissions.values()})

    def connection_from(self, host: str) -> Any:
        """The protocol of one more connection, from `host`; another pending one may be closed for it."""
        protocol = self._make()
        self.waits(protocol, host)
        return protocol

    def waits(self, protocol: PendingProtocol, host: str) -> None:
        """It is pending from now on, also after it was authenticated; another one may be closed for it."""
        self._drop(self.pending.add(protocol, host))

    def log_refused(self, where: str, reason: str) -> None:
        """Log a connection that was refused, as `Refusals` has it."""
        now = asyncio.get_running_loop().time()
        if line := self._refusals.line(f"{where} was refused: {reason}", reason, now):
            log.warning("%s", line)

    def authenticated(self, protocol: PendingProtocol) -> None:
        """Its peer is authenticated."""
        self.pending.discard(protocol)

    def closed(self, protocol: PendingProtocol) -> None:
        """Its socket is closed."""
        self.pending.discard(protocol)

    # ---- inside ---------------------------------------------------------------------------------

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        for number in itertools.count(1):
            # A connection that is there is accepted without a turn of the loop.
            if number % AT_ONCE == 0:
                await asyncio.sleep(0)
            try:
                sock, where = await accepted(loop, listener)
            except OSError as error:
                if error.errno not in _OUT_OF_DESCRIPTORS:
                    log.warning("a connection was lost while it was accepted: %s", error)
                    continue
                log.error("cannot accept connections: %s", error.strerror)
                if self.pending:
                    self._drop(self.pending.oldest())
                else:
                    self._make_room()
                await asyncio.sleep(PAUSE_S)
                continue
            self._admit(sock, where)

    def _admit(self, sock: socket.socket, where: tuple[Any, ...]) -> None:
        host, port = (str(where[0]), where[1]) if where else ("", 0)
        protocol = self.connection_from(host)
        task = awaited(self._make_connection(protocol, sock))
        self._admissions[protocol] = (task, sock)
        task.add_done_callback(lambda task: self._made(task, protocol, sock, f"{host}:{port}"))

    async def _make_connection(self, protocol: Any, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        if self._tls is None:
            await loop.connect_accepted_socket(lambda: protocol, sock)
            return
        try:
            async with asyncio.timeout(self._handshake_s):
                first = await _first_byte(loop, sock)
        except TimeoutError:
            raise BootstrapUnreachable(f"it said nothing for {self._handshake_s} s") from None
        if first != tls.HANDSHAKE_RECORD:
            protocol.refuse_when_made(
                PeerRefused(f"only TLS is spoken here and the other side began without; {self._tls_hint}")
            )
            await loop.connect_accepted_socket(lambda: protocol, sock)
            return
        await loop.connect_accepted_socket(
            lambda: protocol, sock, ssl=self._tls, ssl_handshake_timeout=self._handshake_s
        )

    def _made(self, task: asyncio.Task[Any], protocol: Any, sock: socket.socket, where: str) -> None:
        del self._admissions[protocol]
        failure = asyncio.CancelledError() if task.cancelled() else task.exception()
        if failure is None:
            return
        sock.close()
        self.pending.discard(protocol)
        error: SegueError
        if isinstance(failure, ssl.SSLError):
            self._count("refused")
            reason = tls.explain_tls(failure)
            error = Unauthorized(f"{where} was refused: {reason}")
            self.log_refused(where, reason)
        elif isinstance(failure, SegueError):
            error = failure
        else:
            error = BootstrapUnreachable(f"a connection was not made: {failure or type(failure).__name__}")
            if not isinstance(failure, OSError | asyncio.CancelledError):
                log.error("a connection could not be accepted", exc_info=failure)
        protocol.cut(error)

    def _drop(self, protocol: Any | None) -> None:
        if protocol is None:
            return
        self.pending.discard(protocol)
        self._count("pending_dropped")
        admission = self._admissions.get(protocol)
        if admission is not None:
            _hang_up(admission[1])
        protocol.cut(OutOfCapacity("too many connections that have not proven themselves"))


def _hang_up(sock: socket.socket) -> None:
    """End a connection that is being made, as its peer would: a task that makes one must not be
    cancelled, since the loops then disagree on who closes what."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # it has ended already


async def accepted(loop: asyncio.AbstractEventLoop, listener: socket.socket) -> tuple[socket.socket, Any]:
    """The next connection, non-blocking, and its address. Raises OSError.

    A cancelled call accepts nobody. `loop.sock_accept` may have: a connection that it has taken in the
    turn of the cancellation is given to nobody, and its client waits for an answer.
    """
    while True:
        try:
            sock, where = listener.accept()
        except (BlockingIOError, InterruptedError):
            await _readable(loop, listener)
            continue
        sock.setblocking(False)
        return sock, where


async def _readable(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
    ready: asyncio.Future[None] = loop.create_future()

    def readable() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(sock, readable)
    try:
        await ready
    finally:
        loop.remove_reader(sock)


async def _first_byte(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> int:
    """The first byte that the peer sends, left in the socket. ConnectionError if it leaves."""
    await _readable(loop, sock)
    data = sock.recv(1, socket.MSG_PEEK)
    if not data:
        raise ConnectionResetError("the peer left before its first byte")
    return data[0]
