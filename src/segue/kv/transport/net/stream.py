"""One connection of a transport after it is made: plain, or under TLS. Never blocks.

Plain bytes go between socket and pool by the kernel alone. Under TLS each record (16 KiB) is encrypted from
and decrypted into the pool by OpenSSL, without the interpreter's lock; small rows are gathered first,
so that a record is full.
"""

from __future__ import annotations

import ctypes
import select
import socket
import ssl
from abc import ABC, abstractmethod

from segue.kv.transport.tcp.tcp_wire import Cursor, Vectors

RECORD_BYTES = 16 * 2**10  # a TLS record; OpenSSL writes one per call
_RST_ON_CLOSE = b"\x01\x00\x00\x00\x00\x00\x00\x00"
_LATER = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Channel(ABC):
    """A connected, non-blocking socket. Methods that move bytes raise OSError when it has broken."""

    #: bytes may wait inside, where no poll sees them: read until `receive` says "later"
    buffered = False
    #: the socket keeps the bounds of messages: what is received is one, whole
    messages = False
    _flags = int(socket.MSG_NOSIGNAL)

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._fd = sock.fileno()

    def fileno(self) -> int:
        """The descriptor to poll; the same after `close`."""
        return self._fd

    def handshake(self) -> int:
        """Go on with a handshake of its own: 0 when it is done, else the poll event to wait for. Raises
        ssl.SSLError when it has failed."""
        return 0

    def receive(self, nbytes: int) -> bytes | None:
        """At most `nbytes`; empty at the end, None: later."""
        try:
            return self.sock.recv(nbytes)
        except _LATER:
            return None

    def discard(self, scratch: bytearray, nbytes: int) -> int:
        """Read at most `nbytes` into nowhere; 0 at the end, -1: later."""
        try:
            return self.sock.recv_into(scratch, min(nbytes, len(scratch)))
        except _LATER:
            return -1

    def send(self, data: bytes) -> int:
        """How many bytes were taken; 0: later."""
        try:
            return self.sock.send(data, self._flags)
        except _LATER:
            return 0

    @abstractmethod
    def send_rows(self, cursor: Cursor, limit_bytes: int) -> int:
        """Send from `cursor` and advance it; -1: later."""

    @abstractmethod
    def receive_rows(self, cursor: Cursor, limit_bytes: int) -> int:
        """Receive into `cursor` and advance it; 0 at the end, -1: later."""

    def close(self, *, reset: bool = False) -> None:
        """Close; with `reset` what was not delivered is thrown away."""
        if reset:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RST_ON_CLOSE)
        self.sock.close()


class PlainChannel(Channel):
    """`Channel` over a bare socket."""

    def __init__(
        self, sock: socket.socket, vectors: Vectors | None = None, *, messages: bool = False
    ) -> None:
        super().__init__(sock)
        self.messages = messages
        self._vectors = vectors or Vectors()

    def send_rows(self, cursor: Cursor, limit_bytes: int) -> int:
        """See `Channel`."""
        return self._vectors.send(self._fd, cursor, limit_bytes)

    def receive_rows(self, cursor: Cursor, limit_bytes: int) -> int:
        """See `Channel`."""
        return self._vectors.receive(self._fd, cursor, limit_bytes)


class TlsChannel(Channel):
    """`Channel` over TLS. The handshake may still be ahead (`handshake`)."""

    buffered = True
    sock: ssl.SSLSocket
    _flags = 0  # TLS has no flags

    def __init__(self, sock: ssl.SSLSocket) -> None:
        super().__init__(sock)
        self._record = bytearray(RECORD_BYTES)
        self._record_address = ctypes.addressof(ctypes.c_char.from_buffer(self._record))

    def handshake(self) -> int:
        """See `Channel`."""
        try:
            self.sock.do_handshake()
        except ssl.SSLWantReadError:
            return select.EPOLLIN
        except ssl.SSLWantWriteError:
            return select.EPOLLOUT
        return 0

    def send_rows(self, cursor: Cursor, limit_bytes: int) -> int:
        """See `Channel`."""
        moved = 0
        while moved < limit_bytes and cursor.left:
            address, nbytes = cursor.piece(RECORD_BYTES)
            if nbytes < min(RECORD_BYTES, cursor.left):
                # Only full records are sent, so an attempt that is repeated has the same bytes again.
                address, nbytes = self._record_address, cursor.gather(self._record_address, RECORD_BYTES)
            try:
                sent = self.sock.send((ctypes.c_char * nbytes).from_address(address))
            except _LATER:
                break
            cursor.advance(sent)
            moved += sent
        return moved or -1

    def receive_rows(self, cursor: Cursor, limit_bytes: int) -> int:
        """See `Channel`."""
        moved = 0
        while moved < limit_bytes and cursor.left:
            address, nbytes = cursor.piece(RECORD_BYTES)
            try:
                got = self.sock.recv_into((ctypes.c_char * nbytes).from_address(address), nbytes)
            except _LATER:
                return moved or -1
            if not got:
                return moved
            cursor.advance(got)
            moved += got
        return moved
