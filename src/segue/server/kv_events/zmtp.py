"""ZMTP 3.0 (https://rfc.zeromq.org/spec/23/), ZMQ's protocol over TCP, as far as a publisher needs it, with
the NULL mechanism. Pure.

We speak it ourselves because libzmq bounds neither connections nor the bytes that wait for one of them.
"""

from __future__ import annotations

from collections.abc import Iterator

from segue.kv import PeerRefused

#: Ours: version 3.0, mechanism NULL.
GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
#: Bytes of a frame that a client may send, and frames of its message.
MAX_FRAME, MAX_FRAMES = 4096, 4

_MORE, _LONG, _COMMAND = 1, 2, 4


def head(size: int, *, more: bool) -> bytes:
    """The header of a frame of a message."""
    if size < 256:
        return bytes((_MORE if more else 0, size))
    return bytes((_LONG | (_MORE if more else 0),)) + size.to_bytes(8, "big")


def command(name: bytes, data: bytes = b"") -> bytes:
    """A command of less than 250 bytes."""
    return bytes((_COMMAND, 1 + len(name) + len(data), len(name))) + name + data


def ready(socket_type: bytes) -> bytes:
    """Our end of the handshake."""
    name = b"Socket-Type"
    value = len(socket_type).to_bytes(4, "big") + socket_type
    return command(b"READY", bytes((len(name),)) + name + value)


class FrameReader:
    """Cuts what a client sends into frames. Raises PeerRefused for what is not ZMTP 3 with NULL, or too
    large."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._greeted = False

    def feed(self, data: bytes) -> None:
        """The next bytes."""
        self._data += data

    def frames(self) -> Iterator[tuple[bool, bool, bytes]]:
        """Whole frames: whether each is a command, whether more of its message follows, and its bytes."""
        while (frame := self._next()) is not None:
            yield frame

    def _next(self) -> tuple[bool, bool, bytes] | None:
        data = self._data
        if not self._greeted:
            if (data and data[0] != 0xFF) or (len(data) >= 10 and not data[9] & 1):
                raise PeerRefused("it does not speak ZMTP")
            if len(data) >= 11 and data[10] < 3:
                raise PeerRefused("it speaks a ZMTP before 3.0")
            if len(data) < len(GREETING):
                return None
            if bytes(data[12:32]).rstrip(b"\0") != b"NULL":
                raise PeerRefused("it asks for another ZMTP mechanism than NULL")
            self._greeted = True
            del data[: len(GREETING)]
        if len(data) < 2:
            return None
        flags, at = data[0], 2
        size = data[1]
        if flags & _LONG:
            if len(data) < 9:
                return None
            size, at = int.from_bytes(data[1:9], "big"), 9
        if size > MAX_FRAME:
            raise PeerRefused(f"it sends a frame of {size} bytes")
        if len(data) < at + size:
            return None
        frame = bytes(data[at : at + size])
        del data[: at + size]
        return bool(flags & _COMMAND), bool(flags & _MORE), frame
