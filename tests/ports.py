"""A port that is held without a listener, and one at which a double of an HTTP server answers."""

from __future__ import annotations

import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class HeldPort:
    """Its number, for as long as this lives. Bound and not listened at: who connects is refused at once, and
    who asks the system for any free port gets another one. Who names this one may listen there, with
    SO_REUSEADDR as all servers do. With `count` so many ports behind each other are held."""

    def __init__(self, host: str = "127.0.0.1", count: int = 1) -> None:
        with ExitStack() as stack:
            self.port = self._held(stack, host, 0)
            while count > 1:
                try:
                    for port in range(self.port + 1, self.port + count):
                        self._held(stack, host, port)
                    break
                except (OSError, OverflowError):  # somebody has one of them, or it is above 65535
                    self.port = self._held(stack, host, 0)
            weakref.finalize(self, stack.pop_all().close)

    @staticmethod
    def _held(stack: ExitStack, host: str, port: int) -> int:
        sock = stack.enter_context(socket.socket())
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        return int(sock.getsockname()[1])


@contextmanager
def answering(handler: Callable[..., BaseHTTPRequestHandler]) -> Iterator[str]:
    """The URL of an HTTP server on loopback whose requests `handler` answers until the block ends."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join(60)
