"""What `tcp` asks of the operating system, in one place: a loop, a listener, a connection, a channel."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable

from segue.transport.ioloop import IoLoop
from segue.transport.tcp_channel import PlainChannel


class Net:
    """The host's. Another one (the simulator's) runs the same transport in a world of its own."""

    def loop(self, name: str, on_crash: Callable[[BaseException], None]) -> IoLoop:
        """A loop, not started."""
        return IoLoop(name, on_crash)

    def time(self) -> float:
        """Seconds, monotonic."""
        return time.monotonic()

    def random_bytes(self, nbytes: int) -> bytes:
        """What nobody can guess: keys, and names of groups of streams."""
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
