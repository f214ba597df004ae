"""`staged_tcp` and `staged_shm`: KV through slots in host memory, over the transport of that name.

    writer's memory → (copy) → slot → (inner transport) → reader's slot → (copy) → reader's memory

For memory that no transport takes: a device's without RDMA, or for `shm` memory that a peer cannot map.
Either side may have either kind of memory; both need this transport. The endpoint names a control stream
(TCP, authenticated as the streams of `tcp` are), over which slots are given as credits, one for each piece
(`staged_wire`). The inner transport has registered the slots alone: it never reaches the rank's memory.

Proofs:

- `Written`: the reader has said that its copies ended.
- `fence` at the reader: no copy of the epoch is under way, and none will begin. That is a proof whatever the
  inner transport proves, since our own process writes the memory. Slots of the epoch stay in quarantine until
  the writer, or the inner transport, says that nothing is written there.
- `fence` at the writer: nothing reads our memory for it, and the reader has answered for each piece that was
  filled; otherwise it is not `proven`. Once the path is gone, the reader's own fence is what proves that no
  copy of such a piece is under way.
- `PeerGone(proven=True)` at the reader: the stream has ended, and with it all copies for this writer.

A device copy whose wait raises (`CopyMayRun`) is taken to run until the process ends: its slot is never given
again, and no fence of its epoch is answered, so its pages stay in quarantine.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count
from typing import ClassVar

import msgspec

from segue.kv.errors import (
    DECODE_ERRORS,
    BootstrapTimeout,
    ConfigError,
    Internal,
    OutOfCapacity,
    PeerLost,
    PeerRefused,
    SegueError,
    TransferFailed,
)
from segue.kv.ids import RankId
from segue.kv.layout.blocks import CopyBlock
from segue.kv.layout.content import Content
from segue.kv.layout.spec import Plane
from segue.kv.transport.base import (
    Endpoint,
    EventSink,
    Fenced,
    PeerGone,
    Transport,
    TransportEvent,
    WriteFailed,
    Written,
)
from segue.kv.transport.library.library_wire import ControlStream
from segue.kv.transport.memory import ranges
from segue.kv.transport.memory.device_tensors import why_no_tensors
from segue.kv.transport.memory.pool_memory import Memory, MemoryKind, allocate
from segue.kv.transport.net.stream import Channel
from segue.kv.transport.options import TransportOptions
from segue.kv.transport.path_transport import PathTransport
from segue.kv.transport.shm.shm_transport import ShmTransport
from segue.kv.transport.staged.staged_copies import Copies, CopyMayRun, CopyThreads, PackedPiece, pin, unpin
from segue.kv.transport.staged.staged_in import InPiece, StagedReader
from segue.kv.transport.staged.staged_out import StagedWriter
from segue.kv.transport.staged.staged_slots import Slots
from segue.kv.transport.staged.staged_wire import StagedMessage
from segue.kv.transport.tcp import tcp_wire
from segue.kv.transport.tcp.tcp_net import NET, Net
from segue.kv.transport.tcp.tcp_transport import TcpTransport
from segue.kv.transport.write_book import not_granted

_CLOSE_S = 5.0
#: After a path has ended, for the inner one to notice its own end.
_LINGER_S = 1.0

log = logging.getLogger("segue.kv.transport")


class StagedAddress(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `Endpoint.data` besides the address of the control stream (`TcpAddress`)."""

    inner: Endpoint
    slot_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedTuning:
    """`slots` for what is written, and as many for what is read; each has a multiple of `unit_bytes`. At most
    `max_waiting` pieces wait for one peer."""

    slots: int = 8
    unit_bytes: int = 4096
    max_waiting: int = 65536


class StagedHost:
    """The host of a staged transport: threads, memory, network. A simulator has its own."""

    net: Net = NET

    def copying(self, name: str) -> CopyThreads:
        """The threads that copy."""
        return CopyThreads(name)

    def event(self) -> threading.Event:
        """Something that a connecting thread waits for."""
        return threading.Event()

    def inner(self, kind: type[Transport], on_event: EventSink, options: TransportOptions) -> Transport:
        """The inner transport."""
        return kind(on_event, options)

    def slots(self, nbytes: int) -> Memory:
        """The memory of the slots. Raises OutOfCapacity."""
        return allocate(nbytes, "segue-staging")

    def copies(self, memory: Memory, slots: Memory) -> Copies:
        """The copies between the two."""
        return Copies(memory, slots)


HOST = StagedHost()


class StagedTransport(PathTransport[StagedWriter]):
    """See the module's text. A subclass names the inner transport."""

    memory_kinds = frozenset(MemoryKind)
    receiver_writes = True  # out of its slots
    inner_kind: ClassVar[type[Transport]]

    @classmethod
    def unusable(cls) -> str:
        """As the inner transport."""
        return cls.inner_kind.unusable()

    @classmethod
    def reaches(cls, ours: Endpoint, theirs: Endpoint) -> bool:
        """As the inner transport."""
        try:
            here, there = (_address(end).inner for end in (ours, theirs))
        except PeerRefused:
            return False
        return cls.inner_kind.reaches(here, there)

    def __init__(
        self,
        on_event: EventSink,
        options: TransportOptions,
        tuning: StagedTuning = StagedTuning(),
        host: StagedHost = HOST,
    ) -> None:
        super().__init__(on_event, options, host.net)
        self._host = host
        units = options.staging_bytes // (2 * tuning.slots) // tuning.unit_bytes
        self.slot_bytes = max(1, units) * tuning.unit_bytes
        self.max_waiting = tuning.max_waiting
        self._slots_bytes = 2 * tuning.slots * self.slot_bytes
        self._slots: Memory | None = None
        self._copies: Copies | None = None
        self.out_slots = Slots(0, self.slot_bytes, tuning.slots)
        self.in_slots = Slots(tuning.slots * self.slot_bytes, self.slot_bytes, tuning.slots)
        self._numbers = count(1)
        # A fence of an epoch ends it both ways, so no peer, nor our successor, may choose the same ones.
        self._inner_epochs = count(int.from_bytes(host.net.random_bytes(7), "big") + 1)
        #: by the number of a piece, and by the inner epoch of a slot
        self._writing: dict[int, StagedWriter] = {}
        self._reading: dict[int, tuple[StagedReader, InPiece]] = {}
        self._writers: list[StagedWriter] = []
        self._readers: dict[RankId, list[StagedReader]] = {}
        #: peers whose inner path ends, and is to be noticed before a new one is opened
        self._lingering: dict[RankId, threading.Event] = {}
        #: a device copy could not be waited for
        self._copies_may_run = False
        self._copying = host.copying(f"segue-{self.name}-copy")
        self._inner = host.inner(self.inner_kind, self._from_inner, _next_port(options))
        self._loop.start()

    # ---- the six methods -----------------------------------------------------------------------

    def register(self, memory: Memory) -> Endpoint:
        """See `Transport.register`. Raises ConfigError also when the port cannot be listened on, and for
        memory of a device that is no tensor's; OutOfCapacity without memory for the slots."""
        if why := why_no_tensors(memory):
            raise ConfigError(why)
        with self._lock:
            self._paths.check_register(memory)
            sock = self._sockets.listen()
            try:
                self._slots = slots = self._host.slots(self._slots_bytes)
                inner = self._inner.register(slots)
                pin(slots, memory)
            except OutOfCapacity as exc:
                sock.close()
                text = f"no memory for {self._slots_bytes} bytes of staging slots; lower staging_bytes"
                raise OutOfCapacity(text) from exc
            except BaseException:
                sock.close()
                raise
            self._copies = self._host.copies(memory, slots)
            self._paths.memory = memory
            told = self._listen(sock, memory.nbytes, self._admit)
        mine = StagedAddress(inner=inner, slot_bytes=self.slot_bytes)
        data = msgspec.msgpack.decode(told.data) | msgspec.to_builtins(mine)
        data["inner"]["data"] = inner.data
        return msgspec.structs.replace(told, data=msgspec.msgpack.encode(data))

    def connect(self, peer: RankId, endpoint: Endpoint, timeout_s: float) -> None:
        """See `Transport.connect`."""
        deadline = self._net.time() + timeout_s
        memory = self._memory_for(peer, lambda old: None if old.error is None else old.gone.wait, timeout_s)
        if memory is None:
            return
        with self._lock:
            linger = self._lingering.get(peer)
        if linger is not None:  # it stays where `_moved` finds it while it is waited for
            linger.wait(min(_LINGER_S, timeout_s))
            with self._lock:
                self._lingering.pop(peer, None)
        address, mine = self._sockets.address(peer, endpoint), _address(endpoint)
        if mine.slot_bytes < 1:
            raise PeerRefused(f"{peer} has slots of {mine.slot_bytes} bytes")
        channel = self._sockets.open_stream(peer, address, round(deadline - self._net.time(), 3))
        try:
            left_s = deadline - self._net.time()
            if left_s <= 0:
                raise BootstrapTimeout(f"{peer} made no {self.name} path within {timeout_s} s")
            self._inner.connect(peer, mine.inner, left_s)
        except BaseException:
            channel.close()
            raise
        path = StagedWriter(self, peer, endpoint.nbytes, mine.slot_bytes, self._host.event())
        path.stream = stream = self._stream(channel, peer, path.told, path.end)
        with self._lock:
            added = self._paths.add(peer, path)
            if added:
                self._writers.append(path)
        if not added:
            channel.close()
            self._paths.check_connect(peer)  # says why
            return
        self._loop.post(stream.open)

    def fence(self, peer: RankId, epoch: int) -> None:
        """See `Transport.fence` and this module's text for what is proven."""
        with self._lock:
            if self._emitter.closed:
                return
            self.grants.remove(peer, epoch)
            self._paths.fenced.add(peer, epoch)
        self._emitter.run_soon(self._loop, partial(self._fence, peer, epoch))

    def close(self) -> None:
        """See `Transport.close`."""
        with self._lock:
            if self._emitter.closed:
                return
            self._emitter.closed = True
        quiet = self._copying.close(_CLOSE_S) and not self._copies_may_run
        self._inner.close()
        self._loop.stop(self._release, _CLOSE_S)
        if not quiet:  # the slots stay as they are, for what still copies
            log.error("a copy of %s may still run after %g s; its memory must stay", self.name, _CLOSE_S)
            return
        memory, slots, self._slots, self._copies = self._paths.memory, self._slots, None, None
        self._paths.memory = None
        if slots is not None:
            if memory is not None:
                unpin(slots, memory)
            slots.close()

    # ---- on the loop: who is there -------------------------------------------------------------------

    def _admit(self, channel: Channel, peer: RankId, verdict: bytes) -> None:
        """See `AuthenticatedListener`."""
        for old in list(self._readers.get(peer, ())):
            old.end(PeerLost(f"{peer} connects anew", peer=str(peer)))
            old.replaced()
        channel.send(verdict)
        path = StagedReader(self, peer)
        path.stream = stream = self._stream(channel, peer, path.told, path.end)
        self._readers.setdefault(peer, []).append(path)
        stream.open()

    def _stream(
        self,
        channel: Channel,
        peer: RankId,
        told: Callable[[StagedMessage], None],
        ended: Callable[[SegueError], None],
    ) -> ControlStream:
        silence_s = self._options.limits.peer_silence_s
        return ControlStream(self._loop, channel, peer, told, ended, silence_s, StagedMessage)

    def writer_gone(self, path: StagedWriter) -> bool:
        """The path reads our memory no more. True if it was connected."""
        with self._lock:
            connected = self._paths.remove(path.peer, path)
            if connected:
                self._lingering[path.peer] = linger = self._host.event()
                if path.inner_gone:
                    linger.set()
        if path in self._writers:
            self._writers.remove(path)
        return connected

    def forget_reader(self, path: StagedReader) -> None:
        """The path has ended, and has no slot."""
        paths = self._readers.get(path.peer, [])
        if path in paths:
            paths.remove(path)
        if not paths:
            self._readers.pop(path.peer, None)

    def reader_gone(self, peer: RankId) -> bool:
        """A path writes our memory no more. True unless the peer is here by another one."""
        if any(other.over is None for other in self._readers.get(peer, ())):
            return False
        with self._lock:
            self.grants.remove_peer(peer)
        return True

    def _fence(self, peer: RankId, epoch: int) -> None:
        """First what the peer writes, then what we write to it."""
        readers = list(self._readers.get(peer, ()))
        waiting = len(readers)

        def one() -> None:
            nonlocal waiting
            waiting -= 1
            if waiting <= 0:
                self._fence_writes(peer, epoch)

        for reader in readers:
            reader.fence(epoch, one)
        if not readers:
            one()

    def _fence_writes(self, peer: RankId, epoch: int) -> None:
        path = next((path for path in self._writers if path.peer == peer), None)
        if path is None:
            self.emit(Fenced(peer, epoch, True))
        else:  # also one that has ended, as long as it reads our memory: then there is no other one
            path.fence(epoch)

    # ---- on the loop: pieces (WriterHost, ReaderHost) --------------------------------------------------

    def number(self) -> int:
        """For a piece; no two of this transport have the same."""
        return next(self._numbers)

    def now(self) -> float:
        """See `Write.posted`."""
        return self._net.time()

    def emit(self, event: TransportEvent) -> None:
        """Tell our owner."""
        self._emitter.emit(event)

    def copy_out(self, packed: PackedPiece, slot: int, ended: Callable[[SegueError | None], None]) -> None:
        """Copy into a slot of ours, on a thread that may wait."""
        self._copy(lambda copies: copies.out(packed.out, slot), ended)

    def copy_in(self, blocks: list[CopyBlock], slot: int, ended: Callable[[SegueError | None], None]) -> None:
        """Copy from a slot of ours, on a thread that may wait."""
        self._copy(lambda copies: copies.into(blocks, slot), ended)

    def _copy(self, copy: Callable[[Copies], None], ended: Callable[[SegueError | None], None]) -> None:
        copies = self._copies
        assert copies is not None

        def run() -> None:
            error: SegueError | None = None
            try:
                copy(copies)
            except CopyMayRun as exc:
                error = exc
                self._copies_may_run = True
            except Exception as exc:
                error = TransferFailed(f"a copy of {self.name} failed: {exc!r}")
            self._emitter.run_soon(self._loop, partial(ended, error))

        self._copying.submit(run)

    def inner_write(self, peer: RankId, epoch: int, tag: int, block: CopyBlock) -> None:
        """Write a slot of ours to one of the peer."""
        path = next(path for path in self._writers if tag in path.pieces)
        self._writing[tag] = path
        self._inner.write(peer, epoch, tag, [block])

    def inner_grant(self, peer: RankId, offset: int, nbytes: int, path: StagedReader, piece: InPiece) -> int:
        """Let the peer write into a slot; under which epoch."""
        epoch = next(self._inner_epochs)
        self._reading[epoch] = (path, piece)
        self._inner.grant(peer, epoch, Content((Plane(offset, 1, 1, 1, 1, 1),), ((0, nbytes),)))
        return epoch

    def inner_fence(self, peer: RankId, epoch: int) -> None:
        """Ask for the end of an epoch of the inner transport."""
        self._inner.fence(peer, epoch)

    def inner_forget(self, epoch: int) -> None:
        """Its slot is free; whatever comes of it is dropped."""
        self._reading.pop(epoch, None)

    def check(self, peer: RankId, epoch: int, blocks: list[CopyBlock], nbytes: int) -> None:
        """Raises TransferFailed unless blocks of a slot of `nbytes` lead into what the epoch was granted."""
        memory = self._paths.memory
        with self._lock:
            grant = self.grants.find(peer, epoch)
        if grant is None or memory is None:
            raise not_granted(peer, epoch)
        if ranges.check(blocks, nbytes, memory.nbytes) != nbytes:
            raise TransferFailed(f"{peer} has filled another slot than it asked for")
        for rows in tcp_wire.cut(blocks, 2**30, 2**20):
            if not grant.holds(rows.target, memory.nbytes):
                raise TransferFailed(f"{peer} writes outside what epoch {epoch:x} was granted")

    # ---- the inner transport ---------------------------------------------------------------------------

    def _from_inner(self, event: TransportEvent) -> None:
        """On any thread."""
        self._emitter.run_soon(self._loop, partial(self._moved, event))

    def _moved(self, event: TransportEvent) -> None:
        match event:
            case Written() | WriteFailed():
                if (writer := self._writing.pop(event.tag, None)) is not None:
                    writer.moved(event.tag, event)
            case Fenced(_, epoch, proven):
                if epoch in self._reading:
                    reader, piece = self._reading[epoch]
                    reader.fenced(piece, proven)
            case PeerGone(peer, proven, error):
                for reader, piece in list(self._reading.values()):
                    if proven and reader.peer == peer and reader.over is not None:
                        reader.fenced(piece, True)
                if isinstance(error, Internal):  # a bug has ended the inner transport, and so this one
                    for path in list(self._readers.get(peer, ())):
                        path.end(error)
                for writer in [writer for writer in self._writers if writer.peer == peer]:
                    writer.inner_gone = True
                    writer.end(error)
                with self._lock:
                    if (linger := self._lingering.get(peer)) is not None:
                        linger.set()

    # ---- the end -----------------------------------------------------------------------------------------

    def _crashed(self, exc: BaseException) -> None:
        self._emitter.fail(exc)
        self._emitter.run_soon(self._loop, self._end_all)

    def _end_all(self) -> None:
        """A bug has ended the thread. Each path tells its end when nothing is copied for it any more."""
        error = Internal(self._emitter.failure)
        ends = [writer.end for writer in self._writers]
        ends += [reader.end for readers in self._readers.values() for reader in readers]
        for end in ends:  # one call each: a bug at one path leaves the others theirs
            self._emitter.run_soon(self._loop, partial(end, error))

    def _release(self) -> None:
        """The loop's last call."""
        if self._listener is not None:
            self._listener.close()
        ends: list[StagedWriter | StagedReader] = [*self._writers, *chain(*self._readers.values())]
        for end in ends:
            end.stream.close()
        self._paths.of.clear()


class StagedTcpTransport(StagedTransport):
    """Over `tcp`."""

    name = "staged_tcp"
    preference = 60
    inner_kind = TcpTransport


class StagedShmTransport(StagedTransport):
    """Over `shm`."""

    name = "staged_shm"
    preference = 50
    inner_kind = ShmTransport


def _address(endpoint: Endpoint) -> StagedAddress:
    try:
        return msgspec.msgpack.decode(endpoint.data, type=StagedAddress)
    except DECODE_ERRORS as exc:
        raise PeerRefused(f"unreadable endpoint of a staging pool: {exc}") from exc


def _next_port(options: TransportOptions) -> TransportOptions:
    """The control stream has the port itself, the inner transport the one behind it."""
    port, advertised = options.port, options.advertise_port
    return replace(
        options,
        port=port + 1 if port else 0,
        advertise_port=None if advertised is None else advertised + 1,
    )
