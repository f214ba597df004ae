"""The messages of an `shm` path on its unix socket, and its address."""

from __future__ import annotations

import socket

import msgspec

GOODBYE = b"goodbye"
#: A killed process closes its socket a moment before its pidfd says that it has ended.
DEATH_GRACE_S = 1.0


class ShmAddress(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `Endpoint.data`. `host` is `ShmHost.id()` of the listener."""

    version: int
    name: bytes
    key: bytes
    host: str


def send(sock: socket.socket, frame: bytes) -> None:
    """Send to a peer that may have left already: its end is seen where the socket is read."""
    try:
        sock.send(frame, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
    except OSError:
        return


def send_goodbye(sock: socket.socket) -> None:
    """Say that nothing of this side will be written any more, and close."""
    send(sock, GOODBYE)
    sock.close()
