"""`fake`: the whole protocol and no bytes, or a plain copy inside one process; for tests and simulators.

Without a `FakeNet` a write to any endpoint completes at once and moves nothing, also between
processes. With one, transports of the same net find each other: epochs, keys, bounds and deaths
behave as in `tcp` (the receiver checks each landing, so its fence is proven). With `hold=True` nothing
lands and no event is told until `deliver` says so: that is where a simulator puts delay,
reordering, the write that completes after its failure was reported, and the crash in between.
"""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import msgspec

from segue.core.errors import DECODE_ERRORS, ConfigError, PeerLost, PeerRefused, SegueError, TransferFailed
from segue.core.types import RankId
from segue.layout.blocks import CopyBlock
from segue.layout.content import Content
from segue.transport import handshake, ranges
from segue.transport.base import (
    Endpoint,
    EventSink,
    Fenced,
    PeerGone,
    Transport,
    TransportEvent,
    WriteFailed,
    Written,
)
from segue.transport.copier import copy_block
from segue.transport.epochs import FencedEpochs, Grants
from segue.transport.memory import Memory, MemoryKind
from segue.transport.options import TransportOptions


class FakeAddress(msgspec.Struct, frozen=True, kw_only=True):
    """What is in `Endpoint.data`."""

    version: int
    port: bytes
    key: bytes


class FakeNet:
    """Where the fake transports of one test meet."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.ports: dict[bytes, FakeTransport] = {}


@dataclass(slots=True, eq=False)
class HeldWrite:
    """A write that has not landed yet."""

    peer: RankId
    epoch: int
    tag: int
    blocks: Sequence[CopyBlock]
    nbytes: int
    posted: float


@dataclass(frozen=True, slots=True)
class _Path:
    port: bytes
    nbytes: int


class FakeTransport(Transport):
    """`Transport` without a wire. `copy` moves bytes between memories registered in one `net`.

    Without `hold`, events come on the calling thread, before the method returns, but never
    nested: an event caused by a call from inside the sink follows after the sink returns.
    """

    name = "fake"
    preference = 90
    moves_bytes = False
    memory_kinds = frozenset({MemoryKind.SHARED, MemoryKind.HOST})

    def __init__(
        self,
        on_event: EventSink,
        options: TransportOptions,
        *,
        net: FakeNet | None = None,
        copy: bool = False,
        hold: bool = False,
    ) -> None:
        self._on_event = on_event
        self._me = options.me
        self._net = net
        self._lock = net.lock if net is not None else threading.RLock()
        self._copy = copy
        self._hold = hold
        self._address = FakeAddress(version=1, port=secrets.token_bytes(16), key=handshake.new_key())
        self._memory: Memory | None = None
        self._grants = Grants()
        self._fenced = FencedEpochs()
        self._paths: dict[RankId, _Path] = {}
        self._writers: set[RankId] = set()
        self._events: deque[TransportEvent] = deque()
        self._telling = False
        self._inject: deque[SegueError] = deque()
        self._closed = False
        #: writes that wait for `deliver`, oldest first (only with `hold`)
        self.held: deque[HeldWrite] = deque()

    @classmethod
    def unusable(cls) -> str:
        """It works everywhere."""
        return ""

    # ---- the six methods -----------------------------------------------------------------------

    def register(self, memory: Memory) -> Endpoint:
        """See `Transport.register`."""
        with self._lock:
            if self._memory is not None or self._closed:
                raise ConfigError("a transport registers one memory, once, before it is closed")
            memory.check_kinds(self.name, self.memory_kinds)
            self._memory = memory
            if self._net is not None:
                self._net.ports[self._address.port] = self
        return Endpoint(self.name, memory.nbytes, msgspec.msgpack.encode(self._address))

    def connect(self, peer: RankId, endpoint: Endpoint, timeout_s: float) -> None:
        """See `Transport.connect`; never waits."""
        try:
            address = msgspec.msgpack.decode(endpoint.data, type=FakeAddress)
        except DECODE_ERRORS as exc:
            raise PeerRefused(f"unreadable fake endpoint: {exc}") from exc
        if endpoint.transport != self.name or address.version != 1:
            raise PeerRefused(f"not a fake endpoint of version 1: {endpoint.transport} v{address.version}")
        with self._lock:
            if self._closed:
                raise TransferFailed("the transport is closed")
            if self._memory is None:
                raise ConfigError("register the memory before connecting")
            if peer in self._paths:
                return
            if self._net is not None:
                target = self._net.ports.get(address.port)
                if target is None:
                    raise TransferFailed(f"nobody listens for {peer}")
                if target._address.key != address.key:
                    raise PeerRefused("the peer refused the stream: wrong key")
                target._writers.add(self._me)
            self._paths[peer] = _Path(address.port, endpoint.nbytes)

    def grant(self, peer: RankId, epoch: int, area: Content) -> None:
        """See `Transport.grant`. Raises OutOfCapacity when too many grants live."""
        with self._lock:
            if not self._closed:
                self._grants.add(peer, epoch, area)

    def write(self, peer: RankId, epoch: int, tag: int, blocks: Sequence[CopyBlock]) -> None:
        """See `Transport.write`."""
        with self._lock:
            path = self._paths.get(peer)
            try:
                if self._inject:
                    raise self._inject.popleft()
                if path is None or self._memory is None:
                    raise TransferFailed(f"no fake path to {peer}")
                if (peer, epoch) in self._fenced:
                    raise TransferFailed(f"epoch {epoch:x} was fenced", retryable=False)
                nbytes = ranges.check_memory(blocks, self._memory, path.nbytes)
            except SegueError as exc:
                self._events.append(WriteFailed(peer, epoch, tag, exc))
            else:
                held = HeldWrite(peer, epoch, tag, tuple(blocks), nbytes, perf_counter())
                if self._hold:
                    self.held.append(held)
                else:
                    self._events.append(self._land(held))
        self._tell()

    def fence(self, peer: RankId, epoch: int) -> None:
        """See `Transport.fence`; always proven."""
        with self._lock:
            self._grants.remove(peer, epoch)
            self._fenced.add(peer, epoch)
            error = TransferFailed(f"epoch {epoch:x} was fenced", retryable=False)
            self._drop(lambda w: w.peer == peer and w.epoch == epoch, error)
            self._events.append(Fenced(peer, epoch, True))
        self._tell()

    def close(self) -> None:
        """See `Transport.close`."""
        self._leave("closed")

    # ---- what a test or a simulator can do -----------------------------------------------------------

    def deliver(self, count: int | None = None, *, index: int = 0) -> int:
        """Let up to `count` held writes (all by default) from position `index` on land now, then
        tell every waiting event. The number of writes that were delivered."""
        done = 0
        with self._lock:
            while index < len(self.held) and (count is None or done < count):
                held = self.held[index]
                del self.held[index]
                self._events.append(self._land(held))
                done += 1
        self._tell(force=True)
        return done

    def fail_next(self, error: SegueError) -> None:
        """The next write (the one after it, if called twice, …) fails with `error`."""
        self._inject.append(error)

    def crash(self) -> None:
        """End like a killed process: nothing more is told here, held writes are lost, and peers
        of the same net get `PeerGone(proven=True)`."""
        self._leave("its process has ended")

    # ---- inside ------------------------------------------------------------------------------------

    def _land(self, w: HeldWrite) -> TransportEvent:
        assert self._memory is not None
        target = self._net.ports.get(self._paths[w.peer].port) if self._net is not None else None
        if self._net is not None:
            if target is None or target._memory is None:
                return WriteFailed(w.peer, w.epoch, w.tag, PeerLost(f"{w.peer} is gone", peer=str(w.peer)))
            if (self._me, w.epoch) not in target._grants:
                error = TransferFailed(f"epoch {w.epoch:x} is not granted by {w.peer}", retryable=False)
                return WriteFailed(w.peer, w.epoch, w.tag, error, refused=True)
            if self._copy:
                for block in w.blocks:
                    copy_block(self._memory.buffer, target._memory.buffer, block)
        return Written(w.peer, w.epoch, w.tag, w.nbytes, perf_counter() - w.posted)

    def _drop(self, hit: Callable[[HeldWrite], bool], error: SegueError) -> None:
        lost = [w for w in self.held if hit(w)]
        for w in lost:
            self.held.remove(w)
            self._events.append(WriteFailed(w.peer, w.epoch, w.tag, error))

    def _tell(self, force: bool = False) -> None:
        if self._hold and not force:
            return
        with self._lock:
            if self._telling:
                return
            self._telling = True
        try:
            while self._events and not self._closed:
                self._on_event(self._events.popleft())
        finally:
            self._telling = False

    def _gone(self, peer: RankId, why: str) -> None:
        error = PeerLost(f"{peer} is gone: {why}", peer=str(peer))
        with self._lock:
            self._grants.remove_peer(peer)
            self._writers.discard(peer)
            self._paths.pop(peer, None)
            self._drop(lambda w: w.peer == peer, error)
            self._events.append(PeerGone(peer, True, error))
        self._tell()

    def _leave(self, why: str) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self.held.clear()
            self._events.clear()
            others: list[FakeTransport] = []
            if self._net is not None:
                self._net.ports.pop(self._address.port, None)
                mine = self._address.port
                others = [
                    t
                    for t in self._net.ports.values()
                    if self._me in t._writers or any(p.port == mine for p in t._paths.values())
                ]
            self._memory = None
        for other in others:
            other._gone(self._me, why)
