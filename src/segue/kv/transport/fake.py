"""`fake`: the whole protocol and no bytes. A write to any endpoint completes at once and moves nothing."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from time import perf_counter

from segue.kv.errors import PeerRefused, SegueError
from segue.kv.ids import RankId
from segue.kv.layout.blocks import CopyBlock
from segue.kv.layout.content import Content
from segue.kv.transport.base import (
    Endpoint,
    EventSink,
    Fenced,
    Transport,
    TransportEvent,
    WriteFailed,
    Written,
)
from segue.kv.transport.emitter import EventEmitter
from segue.kv.transport.memory import ranges
from segue.kv.transport.memory.pool_memory import Memory, MemoryKind
from segue.kv.transport.options import TransportOptions
from segue.kv.transport.paths import Paths


class FakeTransport(Transport):
    """`Transport` without a wire.

    Events come on the calling thread, before the method returns, but never nested: an event caused by a
    call from inside the sink follows after the sink returns.
    """

    name = "fake"
    preference = 90
    moves_bytes = False
    receiver_writes = True
    memory_kinds = frozenset(MemoryKind)

    def __init__(self, on_event: EventSink, options: TransportOptions) -> None:
        self._emitter = EventEmitter(self.name, on_event)
        self._lock = threading.RLock()
        self._paths: Paths[int] = Paths(self.name, self.memory_kinds, self._emitter)  # bytes of the target
        self._events: deque[TransportEvent] = deque()
        self._telling = False

    @classmethod
    def unusable(cls) -> str:
        """Empty: it works everywhere."""
        return ""

    def register(self, memory: Memory) -> Endpoint:
        """See `Transport.register`."""
        with self._lock:
            self._paths.check_register(memory)
            self._paths.memory = memory
        return Endpoint(self.name, memory.nbytes, b"")

    def connect(self, peer: RankId, endpoint: Endpoint, timeout_s: float) -> None:
        """See `Transport.connect`; never waits."""
        if endpoint.transport != self.name:
            raise PeerRefused(f"not a fake endpoint: {endpoint.transport}")
        with self._lock:
            if self._paths.check_connect(peer) is not None:
                self._paths.add(peer, endpoint.nbytes)

    def grant(self, peer: RankId, epoch: int, area: Content) -> None:
        """See `Transport.grant`; nothing lands in any case."""

    def write(self, peer: RankId, epoch: int, tag: int, blocks: Sequence[CopyBlock]) -> None:
        """See `Transport.write`."""
        posted = perf_counter()
        with self._lock:
            try:
                target_bytes, memory = self._paths.check_write(peer, epoch)
                nbytes = ranges.check_memory(blocks, memory, target_bytes)
            except SegueError as exc:
                self._events.append(WriteFailed(peer, epoch, tag, exc))
            else:
                self._events.append(Written(peer, epoch, tag, nbytes, perf_counter() - posted))
        self._emit_all()

    def fence(self, peer: RankId, epoch: int) -> None:
        """See `Transport.fence`; always proven."""
        with self._lock:
            self._paths.fenced.add(peer, epoch)
            self._events.append(Fenced(peer, epoch, True))
        self._emit_all()

    def close(self) -> None:
        """See `Transport.close`."""
        with self._lock:
            self._emitter.closed = True
            self._events.clear()
            self._paths.memory = None

    def _emit_all(self) -> None:
        with self._lock:
            if self._telling:
                return
            self._telling = True
        try:
            while self._events:
                self._emitter.emit(self._events.popleft())
        finally:
            self._telling = False
