"""A listening socket that strangers cannot exhaust: bounded, deadlined, and TLS for whoever begins it.

Shared by everything that listens on an asyncio loop: sessions, the registry, an instance's HTTP door.
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

from segue.core.errors import (
    BootstrapUnreachable,
    OutOfCapacity,
    PeerRefused,
    SegueError,
    Unauthorized,
)
from segue.core.strangers import MAX_STRANGERS, Strangers
from segue.session import tls
from segue.session.tasks import awaited, keep_running

log = logging.getLogger(__name__)

_OUT_OF_DESCRIPTORS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
#: Nothing tells when the system has descriptors again, so this one wait is blind.
_PAUSE_S: Final = 0.1
#: Connections that are accepted before those that are there have their turn: a flood must not keep heads that
#: have arrived from being read, nor streams from going on.
_AT_ONCE: Final = 16


class Guest(Protocol):
    """One incoming connection's protocol, from before its first byte on."""

    def turn_away(self, error: SegueError) -> None:
        """Called before `connection_made`: tell the peer, in plain bytes, and close."""
        ...

    def cut(self, error: SegueError) -> None:
        """End now. The connection was not made, took too long, or must make room for others."""
        ...


class Gate:
    """Accepts connections until `close`. `make` makes the protocol of each, which is also a `Guest`.

    A guest is a stranger from the first byte until `let_in` or `left`; strangers are bounded as
    `Strangers` says. Whether a TLS or a plain peer has come is seen from its first byte, so a
    plain one is told why it is turned away instead of reading garbage. `count` hears of each
    `refused` and of `strangers_dropped`. Without descriptors the oldest stranger goes, or else somebody
    whom `make_room` chooses.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        *,
        server_tls: ssl.SSLContext | None,
        handshake_s: float,
        count: Callable[[str], None],
        max_strangers: int = MAX_STRANGERS,
        make_room: Callable[[], object] = lambda: None,
    ) -> None:
        self._make = make
        self._tls = server_tls
        self._handshake_s = handshake_s
        self.strangers: Strangers[Any] = Strangers(max_strangers)
        self._count = count
        self._make_room = make_room
        self._admissions: dict[Any, tuple[asyncio.Task[Any], socket.socket]] = {}
        self._accepting: asyncio.Task[None] | None = None

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

    def guest(self, host: str) -> Any:
        """The protocol of one more connection, from `host`; another stranger may have to go for it."""
        guest = self._make()
        self._throw_out(self.strangers.add(guest, host))
        return guest

    def let_in(self, guest: Guest) -> None:
        """It has proven itself."""
        self.strangers.discard(guest)

    def left(self, guest: Guest) -> None:
        """Its socket is gone."""
        self.strangers.discard(guest)

    # ---- inside ---------------------------------------------------------------------------------

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        for number in itertools.count(1):
            # A connection that is there is accepted without a turn of the loop.
            if number % _AT_ONCE == 0:
                await asyncio.sleep(0)
            try:
                sock, where = await loop.sock_accept(listener)
            except OSError as error:
                if error.errno not in _OUT_OF_DESCRIPTORS:
                    log.warning("a connection was lost while it was accepted: %s", error)
                    continue
                log.error("cannot accept connections: %s", error.strerror)
                if self.strangers:
                    self._throw_out(self.strangers.oldest())
                else:
                    self._make_room()
                await asyncio.sleep(_PAUSE_S)
                continue
            self._admit(sock, where)

    def _admit(self, sock: socket.socket, where: tuple[Any, ...]) -> None:
        host, port = (str(where[0]), where[1]) if where else ("", 0)
        guest = self.guest(host)
        task = awaited(self._make_connection(guest, sock))
        self._admissions[guest] = (task, sock)
        task.add_done_callback(lambda task: self._made(task, guest, sock, f"{host}:{port}"))

    async def _make_connection(self, guest: Any, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        if self._tls is None:
            await loop.connect_accepted_socket(lambda: guest, sock)
            return
        try:
            async with asyncio.timeout(self._handshake_s):
                first = await _first_byte(loop, sock)
        except TimeoutError:
            raise BootstrapUnreachable(f"it said nothing for {self._handshake_s} s") from None
        if first != tls.HANDSHAKE_RECORD:
            guest.turn_away(
                PeerRefused(f"only TLS is spoken here and the other side began without; {tls.GIVE_BOTH}")
            )
            await loop.connect_accepted_socket(lambda: guest, sock)
            return
        await loop.connect_accepted_socket(
            lambda: guest, sock, ssl=self._tls, ssl_handshake_timeout=self._handshake_s
        )

    def _made(self, task: asyncio.Task[Any], guest: Any, sock: socket.socket, where: str) -> None:
        del self._admissions[guest]
        failure = asyncio.CancelledError() if task.cancelled() else task.exception()
        if failure is None:
            return
        sock.close()
        self.strangers.discard(guest)
        error: SegueError
        if isinstance(failure, ssl.SSLError):
            self._count("refused")
            error = Unauthorized(f"{where} was refused: {tls.explain(failure)}")
            log.warning("%s", error)
        elif isinstance(failure, SegueError):
            error = failure
        else:
            error = BootstrapUnreachable(f"a connection was not made: {failure or type(failure).__name__}")
            if not isinstance(failure, OSError | asyncio.CancelledError):
                log.error("a connection could not be accepted", exc_info=failure)
        guest.cut(error)

    def _throw_out(self, guest: Any | None) -> None:
        if guest is None:
            return
        self.strangers.discard(guest)
        self._count("strangers_dropped")
        admission = self._admissions.get(guest)
        if admission is not None:
            _hang_up(admission[1])
        guest.cut(OutOfCapacity("too many connections that have not proven themselves"))


def _hang_up(sock: socket.socket) -> None:
    """End a connection that is being made, as its peer would: a task that makes one must not be
    cancelled, since the loops then disagree on who closes what."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # it has ended already


async def _first_byte(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> int:
    """The first byte that the peer sends, left in the socket. ConnectionError if it leaves."""
    ready: asyncio.Future[None] = loop.create_future()

    def readable() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(sock, readable)
    try:
        await ready
    finally:
        loop.remove_reader(sock)
    data = sock.recv(1, socket.MSG_PEEK)
    if not data:
        raise ConnectionResetError("the peer left before its first byte")
    return data[0]
