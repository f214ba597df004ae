"""Messages between the leader's thread and the main thread of a rank's process, over a local socket.

    frame   unsigned 32-bit length of the body, body (msgpack)

Both ends block: the leader has nothing else to do while its ranks compute, and a rank nothing while nobody
asks it. What must be heard meanwhile (hand-offs, signs of life) has a channel of its own
(`kv.ranks.rank_channel`).
"""

from __future__ import annotations

import socket
import struct
import time

from segue.kv import PeerLost, RequestTooLarge

HEAD = struct.Struct("!I")
#: More than any step takes: 64 sequences of 4,096 tokens with all their pages take less than 4 MiB.
MAX_BYTES = 64 * 2**20


class Pipe:
    """One end; errors call the other one `name`. Of one thread only."""

    def __init__(self, sock: socket.socket, name: str) -> None:
        self.name = name
        self._sock = sock

    def send(self, body: bytes, within_s: float) -> None:
        """Send one frame. Raises RequestTooLarge, and PeerLost if the other end has ended or does not read
        it in time."""
        if len(body) > MAX_BYTES:
            raise RequestTooLarge(f"a step for {self.name} takes {len(body)} bytes, at most {MAX_BYTES} may")
        self._sock.settimeout(within_s)
        try:
            self._sock.sendall(HEAD.pack(len(body)) + body)
        except TimeoutError:
            raise PeerLost(f"{self.name} did not read within {within_s:g} s") from None
        except OSError as exc:
            raise PeerLost(f"{self.name} has ended ({exc})") from exc

    def receive(self, within_s: float | None = None) -> bytes:
        """The next frame's body; without `within_s` it waits until the other end ends. Raises PeerLost."""
        until = None if within_s is None else time.monotonic() + within_s
        (length,) = HEAD.unpack(self._read(HEAD.size, until))
        if length > MAX_BYTES:
            raise PeerLost(f"{self.name} sent a frame of {length} bytes, at most {MAX_BYTES} are taken")
        return self._read(length, until)

    def _read(self, count: int, until: float | None) -> bytes:
        data = bytearray()
        while len(data) < count:
            self._sock.settimeout(None if until is None else max(1e-3, until - time.monotonic()))
            try:
                more = self._sock.recv(min(count - len(data), 2**20))
            except TimeoutError:
                raise PeerLost(f"{self.name} said nothing in the time that it had") from None
            except OSError as exc:
                raise PeerLost(f"{self.name} cannot be heard: {exc}") from exc
            if not more:
                raise PeerLost(f"{self.name} has ended")
            data += more
        return bytes(data)

    def close(self) -> None:
        """End it; the other end hears so. Idempotent."""
        self._sock.close()
