"""Production's staged transports in virtual time: slots, copies between them and a pool, and what must hold.

Two paths lead to a peer: that of the transport, with the control stream and the copies, and that of the inner
transport, which moves bytes from slot to slot. Faults hit each alone, or both.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from segue.kv.ids import RankId
from segue.kv.layout.blocks import CopyBlock
from segue.kv.transport.base import Endpoint, EventSink, Transport
from segue.kv.transport.memory.copy_queue import CopyJob
from segue.kv.transport.memory.pool_memory import Memory, host_region
from segue.kv.transport.options import TransportOptions
from segue.kv.transport.staged.staged_copies import Copies
from segue.kv.transport.staged.staged_in import InPiece, LeaseState, StagedReader
from segue.kv.transport.staged.staged_out import OutPiece, PieceState, StagedWriter
from segue.kv.transport.staged.staged_transport import (
    StagedHost,
    StagedShmTransport,
    StagedTcpTransport,
    StagedTransport,
    StagedTuning,
)
from segue_lab.sim.datapath import ShmPath, SimShm, SimTcp, SimTransport, TcpPath
from segue_lab.sim.flow import Flow
from segue_lab.sim.node_views import KVView
from segue_lab.sim.sim_ioloop import SimIoLoop
from segue_lab.sim.sim_threads import SimThread
from segue_lab.sim.streams import SimNet
from segue_lab.sim.world import Violation

#: (from, to, bytes)
Rows = Sequence[tuple[int, int, int]]
#: The name of the inner transport of `staged_tcp` and of `staged_shm`.
SLOTS_OF = "slots of {}"
_COPY_THREADS = 2


class SimEvent:
    """A `threading.Event` that threads of the simulation wait for."""

    def __init__(self) -> None:
        self._set = False
        self._waiting: list[SimThread] = []

    def set(self) -> None:
        """Wake all."""
        self._set = True
        for thread in self._waiting:
            thread.woken()
        self._waiting.clear()

    def wait(self, timeout_s: float) -> bool:
        """In a thread: True if it was set in time."""
        thread = SimThread.current
        assert thread is not None, "the simulation itself cannot wait"
        if not self._set:
            self._waiting.append(thread)
            thread.sleep(timeout_s)
        return self._set


class SimCopying:
    """The threads that copy, as `CopyThreads`."""

    def __init__(self, node: KVView) -> None:
        self._node = node
        self._work: deque[Callable[[], None]] = deque()
        self._threads: list[SimThread] = []
        self._closed = False

    def submit(self, work: Callable[[], None]) -> None:
        """Run it on the next free thread."""
        if self._closed:
            return
        self._work.append(work)
        self._threads = [thread for thread in self._threads if not thread.over]
        if len(self._threads) < _COPY_THREADS:
            thread = SimThread(self._node, self._run)
            self._threads.append(thread)
            self._node.after(self._node.world_timing.hop_s * self._node.rng.random(), thread.run)

    def close(self, _timeout_s: float) -> bool:
        """End all; the wait takes no virtual time."""
        self._closed = True
        self._work.clear()
        for thread in self._threads:
            while not thread.over:
                thread.run()
        return True

    def _run(self) -> None:
        while self._work:
            self._work.popleft()()


class SimCopies(Copies):
    """Production's copies, row by row in virtual time."""

    def __init__(self, staged: SimStaged, memory: Memory, slots: Memory) -> None:
        super().__init__(memory, slots)
        self._staged = staged

    def out(self, blocks: Sequence[CopyBlock], slot_offset: int) -> None:
        """As production."""
        writer, piece = self._staged.writing(slot_offset)
        path = self._staged.path_to(writer.peer)

        def copy(rows: Rows) -> None:
            if self._staged.writing(slot_offset)[1] is not piece:
                raise Violation("3", f"a slot is given on while {writer.peer}'s piece is copied into it")
            path.copied_out([(at, slot_offset + to, size) for at, to, size in rows], piece.write.epoch)

        epoch = piece.write.epoch
        path.copying[epoch] += 1
        try:
            path.copy([row for b in blocks for row in b.ranges()], copy)
        finally:
            path.copying[epoch] -= 1

    def into(self, blocks: Sequence[CopyBlock], slot_offset: int) -> None:
        """As production."""
        reader, piece = self._staged.reading(slot_offset)
        path = self._staged.path_from(reader.peer)

        def copy(rows: Rows) -> None:
            if self._staged.reading(slot_offset)[1] is not piece:
                raise Violation("3", f"a slot is given on while {reader.peer}'s piece is copied out of it")
            path.copied_in([(slot_offset + at, to, size) for at, to, size in rows], piece.epoch)

        path.landings[piece.number] = piece.epoch
        try:
            path.copy([row for b in blocks for row in b.ranges()], copy)
        finally:
            del path.landings[piece.number]


class SimStagedHost(StagedHost):
    """The host of one rank's staged transport."""

    def __init__(self, staged: SimStaged, node: KVView) -> None:
        self._staged = staged
        self._node = node
        self.net = staged.net

    def copying(self, name: str) -> Any:
        return SimCopying(self._node)

    def event(self) -> Any:
        return SimEvent()

    def inner(self, kind: type[Transport], on_event: EventSink, options: TransportOptions) -> Transport:
        return self._staged.make_inner(self._node, on_event, options)

    def slots(self, nbytes: int) -> Memory:
        self._staged.memory = bytearray(nbytes)
        return Memory([host_region(self._staged.memory)])

    def copies(self, memory: Memory, slots: Memory) -> Copies:
        return SimCopies(self._staged, memory, slots)


class StagedPath(TcpPath):
    """A path of a staged transport: its control stream, and copies at both ends."""

    carries_writes = False

    def __init__(self, writer: KVView, mine: int, reader: KVView, rank: int) -> None:
        super().__init__(writer, mine, reader, rank)
        #: copies out by epoch, and the epochs of the pieces that are copied in by their numbers
        self.copying: Counter[int] = Counter()
        self.landings: dict[int, int] = {}

    def carried(self, flow: Flow, at: int, data: bytes) -> bytes:
        """No bit flips in a control stream, which has no checksum of its own: only in the heads of the inner
        transport."""
        return data

    def busy_with(self, epoch: int) -> bool:
        """Whether either end copies something of `epoch`. After the end of a path or of its writer its
        copies at the reader do not count: the reader has a fence of its own."""
        side = self._side(self.writer, self.mine)
        writers = () if side._closed else side.inner._writers
        known = {number for writer in writers for number in writer.pieces}
        own = self.writer is self.reader
        return self.copying[epoch] > 0 or any(
            landing == epoch and (own or number in known) for number, landing in self.landings.items()
        )

    def copy(self, rows: Rows, copy: Callable[[Rows], None]) -> None:
        """One piece, on a thread of either end; now and then with a moment in its middle."""
        thread, timing = SimThread.current, self.timing
        assert thread is not None
        took_s = self.slow * timing.slice_s * self.rng.random()
        first = len(rows)
        if len(rows) > 1 and (self.mid_write or self.rng.random() < 0.3):
            first = self.rng.randrange(1, len(rows))
        try:
            for part in (rows[:first], rows[first:]):
                if part:
                    thread.sleep(took_s * len(part) / len(rows))
                    copy(part)
                    if len(part) < len(rows):
                        self.in_mid_write()
        except Violation as violation:
            self.writer.world.fail(violation)
            raise

    def copied_out(self, rows: Rows, epoch: int) -> None:
        """3: the writer copies what belongs to the hand-off."""
        writer, staged = self.writer, self._side(self.writer, self.mine)
        writer.check_source(self.reader.me, epoch, [(at, size) for at, _, size in rows])
        for at, to, size in rows:
            staged.memory[to : to + size] = writer.engine.memory[at : at + size]

    def copied_in(self, rows: Rows, epoch: int) -> None:
        """4: the reader copies what its epoch grants."""
        staged = self._side(self.reader, self.rank)
        self.land(epoch, [(to, bytes(staged.memory[at : at + size])) for at, to, size in rows])

    def cut(self) -> None:
        """The control stream breaks, or both streams do."""
        super().cut()
        inner = self.writer.data_path(self.mine, self.reader, self.rank, SLOTS_OF.format(self.name))
        if self.rng.random() < 0.5:
            inner.cut()

    def _side(self, node: KVView, rank: int) -> SimStaged:
        found: SimStaged = node.transports[rank, self.name]
        return found


class StagedTcpPath(StagedPath):
    """A path of `staged_tcp`."""

    name = StagedTcpTransport.name


class StagedShmPath(StagedPath):
    """A path of `staged_shm`."""

    name = StagedShmTransport.name


class _SlotPath:
    """The questions of both kinds of inner paths to the two ends."""

    writer: KVView
    reader: KVView
    mine: int
    rank: int
    flips: int
    name: ClassVar[str]

    def sent(self, ranges: list[tuple[int, int]]) -> None:
        """3: only a slot that a piece has is read."""
        slots = self._staged(self.writer, self.mine)
        for at, _ in ranges:
            _, piece = slots.writing(at)
            if piece.state is not PieceState.WRITING:
                raise Violation("3", f"{self.writer.name} sends a slot of which a piece is {piece.state}")

    def put(self, epoch: int, data: list[tuple[int, bytes]], *, proven: bool) -> None:
        """4: bytes land in the slot of their own piece, while that may still be written."""
        outer, slots = self._outer(), self._staged(self.reader, self.rank)
        outer.flips, self.flips = outer.flips + self.flips, 0
        if self.rank in self.reader.ended_ranks or not self.reader.alive:
            return
        for to, chunk in data:
            _, piece = slots.reading(to)
            may = {LeaseState.HELD} if proven else {LeaseState.HELD, LeaseState.QUARANTINED}
            if piece.inner_epoch != epoch or piece.state not in may:
                text = f"bytes of inner epoch {epoch:x} land in a slot of {piece}"
                raise Violation("4", f"{self.reader.name}: {text}")
            slots.memory[to : to + len(chunk)] = chunk

    def elsewhere(self, epoch: int, blocks: Sequence[CopyBlock]) -> list[CopyBlock]:
        """None: a writer goes astray in the blocks of a piece."""
        return []

    def fail_write(self) -> None:
        """Not done: a write of `tcp` or `shm` that has failed reads its memory no more, and staging counts on
        it."""

    def _outer(self) -> StagedPath:
        name = self._staged(self.writer, self.mine).name
        found: StagedPath = self.writer.data_path(self.mine, self.reader, self.rank, name)
        return found

    def _staged(self, node: KVView, rank: int) -> SimStaged:
        return node.transports[rank, self.name].staged  # type: ignore[no-any-return]


class SlotTcpPath(_SlotPath, TcpPath):
    """From slot to slot over `tcp`."""

    name = SLOTS_OF.format(StagedTcpTransport.name)

    def reading(self, epoch: int, ranges: list[tuple[int, int]]) -> None:
        self.sent(ranges)

    def land(self, epoch: int, data: list[tuple[int, bytes]]) -> None:
        self.put(epoch, data, proven=True)


class SlotShmPath(_SlotPath, ShmPath):
    """From slot to slot over `shm`."""

    name = SLOTS_OF.format(StagedShmTransport.name)

    def land(self, epoch: int, data: list[tuple[int, bytes]]) -> None:
        self.put(epoch, data, proven=False)

    def _copied(self, job: CopyJob, rows: list[tuple[int, int, int]]) -> None:
        if job.target.closed:
            raise Violation("4", f"{self.writer.name} copies into slots that it has unmapped")
        self.sent([(at, size) for at, _, size in rows])
        memory = self._staged(self.writer, self.mine).memory
        self.land(job.write.epoch, [(to, bytes(memory[at : at + size])) for at, to, size in rows])


class _Inner(SimTransport):
    """The inner transport of `staged`."""

    staged: SimStaged
    may_be_full = False

    @property
    def pool(self) -> bytearray | memoryview:
        """The slots."""
        return self.staged.memory

    def fence(self, peer: RankId, epoch: int) -> None:
        """As production: that a transport takes no fence is injected into the staged one."""
        self.inner.fence(peer, epoch)


class SlotTcp(_Inner, SimTcp):
    """The inner transport of `staged_tcp`."""

    name = SlotTcpPath.name
    make_path = SlotTcpPath

    def register(self, memory: Memory) -> Endpoint:
        """As production."""
        self.net.pool = (memory.only.address, memory.nbytes)
        return super().register(memory)


class SlotShm(_Inner, SimShm):
    """The inner transport of `staged_shm`."""

    name = SlotShmPath.name
    make_path = SlotShmPath


class SimStaged(SimTransport):
    """Production's `StagedTransport` of one rank."""

    kind: ClassVar[type[StagedTransport]]
    inner_kind: ClassVar[type[SlotTcp] | type[SlotShm]]
    inner: StagedTransport

    def __init__(self, node: KVView, on_event: EventSink, options: TransportOptions) -> None:
        super().__init__(node, options.me.rank, on_event)
        #: the slots
        self.memory = bytearray()
        self.net = SimNet(node, self.rank, self.name)
        slots, unit = self._rng.choice(((1, 1024), (2, 256), (2, 1024), (4, 64), (4, 256), (8, 64)))
        self.inner = self.kind(
            self._event,
            replace(options, host=node.host, staging_bytes=2 * slots * unit),
            StagedTuning(
                slots=slots, unit_bytes=unit, max_waiting=self._rng.choice((1, 3)) if self._full else 65536
            ),
            SimStagedHost(self, node),
        )
        self.grants = self.inner.grants

    def make_inner(self, node: KVView, on_event: EventSink, options: TransportOptions) -> Transport:
        """The transport between slots."""
        made = self.inner_kind(node, on_event, options)
        made.staged = self
        node.transports[self.rank, made.name] = made  # type: ignore[index]
        return made

    def register(self, memory: Memory) -> Endpoint:
        """As production."""
        return self.inner.register(memory)

    @property
    def lent(self) -> int:
        """Slots that are not free, but for those of a peer that is not connected any more: its process may
        still write there."""
        inner = self.inner
        away = [readers for readers in inner._readers.values() if all(reader.over for reader in readers)]
        quarantined = sum(
            piece.state is LeaseState.QUARANTINED
            for readers in away
            for reader in readers
            for piece in reader.pieces.values()
        )
        return inner.out_slots.held + inner.in_slots.held + len(inner._writing) - quarantined

    def end_a_thread(self) -> None:
        """The next turn of its I/O thread ends that thread."""
        assert isinstance(self.net.io, SimIoLoop)
        self.net.io.end()

    def path_to(self, peer: RankId) -> StagedPath:
        """The path by which we write."""
        path = self._path(peer)
        assert isinstance(path, StagedPath)
        return path

    def path_from(self, peer: RankId) -> StagedPath:
        """The path by which a peer writes to us."""
        writer = self._node.state.by_leader[peer.leader]
        assert isinstance(writer, KVView)
        found: StagedPath = writer.data_path(peer.rank, self._node, self.rank, self.name)
        return found

    def writing(self, at: int) -> tuple[StagedWriter, OutPiece]:
        """3: the piece that has the slot of ours that offset `at` lies in."""
        for writer in self.inner._writers:
            for piece in writer.pieces.values():
                has = piece.state in (PieceState.COPYING, PieceState.WRITING)
                if has and piece.slot <= at < piece.slot + self.inner.slot_bytes:
                    return writer, piece
        raise Violation("3", f"{self._node.name} uses a slot at {at} that no piece has")

    def reading(self, at: int) -> tuple[StagedReader, InPiece]:
        """4: the piece that a slot of ours was lent to."""
        for readers in self.inner._readers.values():
            for reader in readers:
                for piece in reader.pieces.values():
                    has = piece.state is not LeaseState.WAITING
                    if has and piece.slot <= at < piece.slot + self.inner.slot_bytes:
                        return reader, piece
        raise Violation("4", f"{self._node.name} uses a slot at {at} that it has lent to nobody")


class SimStagedTcp(SimStaged):
    """Production's `StagedTcpTransport`."""

    name = StagedTcpTransport.name
    preference = StagedTcpTransport.preference
    make_path = StagedTcpPath
    kind = StagedTcpTransport
    inner_kind = SlotTcp


class SimStagedShm(SimStaged):
    """Production's `StagedShmTransport`."""

    name = StagedShmTransport.name
    preference = StagedShmTransport.preference
    make_path = StagedShmPath
    kind = StagedShmTransport
    inner_kind = SlotShm
