"""A byte of the KV that changes on the wire."""

from __future__ import annotations

import contextlib
import socket
import threading

#: Far enough into a connection to be KV, not the opening of the path.
SKIP_BYTES = 32 * 1024


class FlippingProxy:
    """Forwards `port` of 127.0.0.2 to the same port of 127.0.0.1. While `flips` is above 0, one byte of a
    connection's next piece changes for each."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.flips = 0
        self._listener = socket.create_server(("127.0.0.2", port))
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Take no connection any more; a connection ends when one of its sides does."""
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._port), timeout=10)
                far.settimeout(None)
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._forward, args=(source, sink), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(2**18)):
                if self.flips and len(data) >= SKIP_BYTES:
                    self.flips -= 1
                    data[-5] ^= 0x10
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        source.close()  # the other direction has ended by now, or does at once, and closes the other socket
