"""One side of `shm`, and writers made by hand that come to it."""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from ranks import make_shm
from segue.kv.ids import RankId
from segue.kv.transport.base import PeerGone, TransportEvent
from segue.kv.transport.memory.pool_memory import allocate
from segue.kv.transport.net import key_handshake as handshake
from segue.kv.transport.shm.shm_in import ShmListener
from segue.kv.transport.shm.shm_wire import ShmAddress

MiB = 2**20


class Side:
    """A transport with its memory and the events it told."""

    def __init__(self, me: RankId, nbytes: int = MiB, **options: Any) -> None:
        self.events: queue.SimpleQueue[TransportEvent] = queue.SimpleQueue()
        self.me = me
        self.memory = allocate(nbytes)
        self.transport = make_shm(self.events.put, me, **options)
        self.endpoint = self.transport.register(self.memory)
        self.address = msgspec.msgpack.decode(self.endpoint.data, type=ShmAddress)

    def next(self) -> TransportEvent:
        return self.events.get(timeout=60)

    def on_loop(self, call: Callable[[], object]) -> Any:
        """The result of `call` on the I/O thread, after all earlier calls."""
        answer: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.transport._loop.post(lambda: answer.put(call()))
        return answer.get(timeout=60)

    def busy(self) -> threading.Event:
        """The I/O thread does nothing from now on until the event is set."""
        busy, free = threading.Event(), threading.Event()

        def wait() -> None:
            busy.set()
            free.wait(60)

        self.transport._loop.post(wait)
        assert busy.wait(60)
        return free

    @property
    def incoming(self) -> ShmListener:
        """Its listener, with who came in."""
        assert self.transport._incoming is not None
        return self.transport._incoming

    def writers(self) -> set[RankId]:
        """The ranks that may hold a mapping."""
        return set(self.on_loop(lambda: set(self.incoming.writers)))

    def knock(self) -> socket.socket:
        """A connection that has not said who it is."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.settimeout(60)
        sock.connect(self.address.name)
        return sock

    def begin(self, peer: RankId) -> tuple[socket.socket, handshake.WriterProof, bytes]:
        """A hand-made writer that has been asked who it is, and what it will answer."""
        sock = self.knock()
        proof = handshake.WriterProof(self.address.key, peer)
        return sock, proof, proof.respond(sock.recv(1000))

    def enter(self, peer: RankId) -> socket.socket:
        """A hand-made writer, so that it can misbehave."""
        sock, proof, answer = self.begin(peer)
        sock.send(answer)
        for fd in take(sock, proof):
            os.close(fd)
        return sock

    def close(self) -> None:
        self.transport.close()
        self.memory.close()


def take(sock: socket.socket, proof: handshake.WriterProof) -> list[int]:
    """The descriptors that the other side gives a hand-made writer that has proven itself."""
    verdict, fds, _, _ = socket.recv_fds(sock, 1000, 2)
    proof.finish(verdict)
    return fds


class reader_lost:
    """Equal to any `PeerGone` of this peer and proof."""

    def __init__(self, peer: RankId, proven: bool) -> None:
        self.fields = (peer, proven)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PeerGone) and (other.peer, other.proven) == self.fields

    __hash__ = None
