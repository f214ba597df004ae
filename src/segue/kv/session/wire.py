"""The socket under one connection, but for reading: what is written, what waits for the peer, how it ends."""

from __future__ import annotations

import asyncio
import socket
from typing import cast

#: How long a closed connection may take to hand its last bytes over before it is cut.
LINGER_S = 1.0


def send_at_once(transport: asyncio.BaseTransport) -> None:
    """Set TCP_NODELAY on the socket of `transport`, if it is TCP: small messages leave at once."""
    sock = transport.get_extra_info("socket")
    if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class Wire:
    """Made before its transport is; until `made` nothing can be written."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.lost = False
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._out: list[bytes | bytearray] = []
        self._out_bytes = 0
        self._cut: asyncio.TimerHandle | None = None

    def made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is there."""
        # uvloop's transports have asyncio's methods but not its base class.
        self._transport = cast(asyncio.Transport, transport)
        send_at_once(transport)

    def gone(self) -> None:
        """The connection is closed."""
        self.lost = True
        if self._cut is not None:
            self._cut.cancel()

    def write(self, data: bytes | bytearray, *, later: bool) -> None:
        """Send `data`, or with `later` keep it until `flush`."""
        if later:
            self._out.append(data)
            self._out_bytes += len(data)
        elif self._transport is not None:
            self._transport.write(data)

    def flush(self) -> None:
        """Hand what was kept to the transport, in one piece."""
        out, self._out, self._out_bytes = self._out, [], 0
        if out and self._transport is not None and not self.lost:
            self._transport.write(out[0] if len(out) == 1 else b"".join(out))

    @property
    def backlog_bytes(self) -> int:
        """Bytes that wait to be sent."""
        waiting = self._transport.get_write_buffer_size() if self._transport is not None else 0
        return waiting + self._out_bytes

    def linger(self) -> None:
        """Send what waits and say that it is the end; the peer's own end, or `LINGER_S`, closes the socket.
        To close one with unread bytes would destroy what was sent last."""
        transport = self._transport
        if transport is None or self.lost:
            return
        self.flush()
        if transport.can_write_eof():
            transport.write_eof()
        else:
            transport.close()
        self._cut = self._loop.call_later(LINGER_S, transport.abort)

    def abort(self) -> None:
        """Cut the socket now, with all that waits."""
        self._out.clear()
        if self._transport is not None:
            self._transport.abort()

    @property
    def host(self) -> str:
        """The numeric host of the other end, or empty if unknown."""
        name = self._name()
        return str(name[0]) if name else ""

    @property
    def address(self) -> str:
        """Host and port of the other end, for texts too."""
        name = self._name()
        return f"{name[0]}:{name[1]}" if name else "an unknown address"

    def _name(self) -> tuple[str, int] | None:
        return self._transport.get_extra_info("peername") if self._transport is not None else None
