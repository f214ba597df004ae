"""The operating system calls of `tcp`, in one place, and its sizes and limits."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from segue.kv.errors import ConfigError
from segue.kv.transport.net.ioloop import IoLoop
from segue.kv.transport.net.stream import PlainChannel
from segue.kv.transport.tcp.tcp_wire import MAX_PART_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpTuning:
    """Sizes and bounds; the defaults are measured (bench/transport.py). Raises ConfigError.

    part_bytes: of a write that is sent, and answered, at once.
    slice_bytes: at most this much lands after a fence was called, before it is answered.
    lowat_bytes: what a reader sleeps for; with 64 KiB a hand-off took 1.6 times as long.
    max_pending, max_streams: connections that have not and that have proven themselves.
    max_parts: that wait for one peer.
    """

    part_bytes: int = 16 * 2**20
    slice_bytes: int = 4 * 2**20
    lowat_bytes: int = 512 * 2**10
    max_pending: int = 32
    max_streams: int = 8192
    max_parts: int = 65536

    def __post_init__(self) -> None:
        if not 1 <= self.part_bytes <= MAX_PART_BYTES:
            raise ConfigError(f"part_bytes must be in 1 … {MAX_PART_BYTES}, not {self.part_bytes}")


class Net:
    """The host's. Another one (the simulator's) runs the same transport in a world of its own."""

    def loop(self, name: str, on_crash: Callable[[BaseException], None]) -> IoLoop:
        """A loop, not started."""
        return IoLoop(name, on_crash)

    def time(self) -> float:
        """Seconds, monotonic."""
        return time.monotonic()

    def random_bytes(self, nbytes: int) -> bytes:
        """Unpredictable bytes: keys."""
        return secrets.token_bytes(nbytes)

    def listen(self, host: str, port: int) -> socket.socket:
        """A listener that does not block. Raises OSError."""
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(128)
        except OSError:
            listener.close()
            raise
        return listener

    def connect(self, address: tuple[str, int], timeout_s: float) -> socket.socket:
        """A connected socket that blocks. Raises OSError, TimeoutError or UnicodeError."""
        return socket.create_connection(address, timeout=timeout_s)

    def channel(self, sock: socket.socket) -> PlainChannel:
        """The plain stream over a connected socket."""
        return PlainChannel(sock)


NET = Net()
