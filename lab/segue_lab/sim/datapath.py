"""Data paths: production's transports at both ends, what the simulator does to them and asks of them."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from segue.kv.errors import TransferFailed
from segue.kv.ids import RankId
from segue.kv.layout.blocks import CopyBlock
from segue.kv.layout.content import Content
from segue.kv.ranks.local_rank import FENCE_AGAIN_S
from segue.kv.transport.base import Endpoint, EventSink, Transport, TransportEvent, WriteFailed, Written
from segue.kv.transport.epochs import Grants
from segue.kv.transport.kinds import KINDS, TransportKinds
from segue.kv.transport.memory.copy_queue import CopyJob
from segue.kv.transport.memory.pool_memory import Memory, MemoryKind
from segue.kv.transport.options import TransportOptions
from segue.kv.transport.shm.shm_transport import ShmTransport, ShmTuning
from segue.kv.transport.tcp.tcp_net import TcpTuning
from segue.kv.transport.tcp.tcp_transport import TcpTransport
from segue_lab.sim.flow import Flow, SentPart
from segue_lab.sim.node_views import KVView
from segue_lab.sim.sim_host import SimHost
from segue_lab.sim.sim_threads import SimThread
from segue_lab.sim.streams import SimNet
from segue_lab.sim.unix import Memfd, UnixSocket
from segue_lab.sim.world import Injected, Process, Violation

#: Bytes of a part's head that nobody reads.
SPARE = (5, 6, 7)


class DataPath:
    """From a rank of a prefill node to one of a decode node, or between two of a decode node, whatever
    connections there are at the moment."""

    #: name of its transport
    name: ClassVar[str]

    def __init__(self, writer: KVView, mine: int, reader: KVView, rank: int) -> None:
        self.writer = writer
        self.reader = reader
        #: which rank of the writer, and which of the reader
        self.mine = mine
        self.rank = rank
        self.timing = writer.world_timing
        self.slow = 1.0
        #: faults that wait for the next time that a write is half done
        self.mid_write: list[Callable[[], None]] = []
        #: how many of the next slices that land come with one bit changed
        self.flips = 0
        #: writes without their event: (epoch, tag)
        self.running: dict[tuple[int, int], None] = {}
        #: writes whose event was told too early, by a fault
        self.lied: set[tuple[int, int]] = set()
        self.rng = writer.world.rng(f"path {writer.name} {reader.name}")

    @property
    def transport(self) -> SimTransport:
        """The writer's."""
        found: SimTransport = self.writer.transports[self.mine, self.name]
        return found

    def in_mid_write(self) -> None:
        """A write is half done."""
        if self.mid_write:
            self.writer.world.after(0.0, None, self.mid_write.pop())

    def land(self, epoch: int, data: list[tuple[int, bytes]]) -> None:
        """Bytes land in the reader's pool, unless a bit of them flips or its rank is gone."""
        reader = self.reader
        if self.rank in reader.ended_ranks:
            return
        memory = reader.engine.memory
        if self.flips and reader.alive:
            self.flips -= 1
            data = reader.flipped(epoch, data, self.rng)
        if reader.alive:
            check_landing(reader, epoch, data)
        for to, chunk in data:
            memory[to : to + len(chunk)] = chunk

    def busy_with(self, epoch: int) -> bool:
        """Whether a write of `epoch` waits or is under way."""
        return any(running == epoch for running, _ in self.running)

    def fail_write(self) -> None:
        """A running write is reported as failed, and goes on (until the fence, or its own end)."""
        for key in self.running:
            if key not in self.lied:
                self.lied.add(key)
                error = TransferFailed("the transport reported an error")
                self.transport.tell(WriteFailed(RankId(self.reader.me, self.rank), *key, error))
                return

    def cut(self) -> None:
        """Each connection breaks."""
        raise NotImplementedError

    def half_open(self, writers: bool) -> None:
        """Each connection breaks, and only one end hears of it."""
        raise NotImplementedError

    def stand_still(self, process: Process, seconds: float) -> None:
        """Nothing that `process` sends on it gets through for a while; nobody is told."""


class TcpPath(DataPath):
    """A path over `tcp`."""

    name = TcpTransport.name
    #: its streams carry the writes themselves
    carries_writes = True

    def __init__(self, writer: KVView, mine: int, reader: KVView, rank: int) -> None:
        super().__init__(writer, mine, reader, rank)
        #: how long a stream whose other end is silent is kept
        self.keepalive_s = 1.5 * self.timing.silence_s
        #: how many of the next heads and answers that are read come with one bit changed
        self.head_flips = 0
        self.flows: list[Flow] = []
        self._still: dict[Process, float] = {}

    # ---- what the streams ask ----------------------------------------------------------------------

    def stands_still(self, source: Process, target: Process) -> bool:
        """Whether nothing gets from `source` to `target` now."""
        network = self.writer.state.network
        return network.blocked(source, target) or self.writer.world.now < self._still.get(source, 0.0)

    def carried(self, flow: Flow, at: int, data: bytes) -> bytes:
        """The bytes of a head or an answer as they are read: the same, unless a bit flips."""
        part = flow.part_at(at)
        if not self.head_flips or not data or (flow.forward and part is None):
            return data
        index = self.rng.randrange(len(data))
        if part is not None:
            if at + index - part.start in SPARE:
                return data
            part.spoiled = True
        self.head_flips -= 1
        changed = bytearray(data)
        changed[index] ^= 1 << self.rng.randrange(8)
        self.writer.state.counts["heads and answers flipped"] += 1
        return bytes(changed)

    def reading(self, epoch: int, ranges: list[tuple[int, int]]) -> None:
        """3: the writer reads these bytes of its pool."""
        self.writer.check_source(self.reader.me, epoch, ranges)

    def landing(self, part: SentPart | None, at: int, data: list[tuple[int, bytes]]) -> None:
        """4: these bytes of the stream, from `at` on, land at these places of the reader's pool."""
        reader = self.reader
        if part is None or part.spoiled:
            why = "no write is there" if part is None else "a bit of the write's head has changed"
            raise Violation("4", f"{reader.name} lets bytes land at {data[0][0]}, but {why}")
        wanted = part.rows_at(at, sum(len(piece) for _, piece in data))
        if wanted != [(offset, len(piece)) for offset, piece in data]:
            raise Violation("4", f"{reader.name}: bytes for {wanted} of epoch {part.epoch:x} land elsewhere")
        self.land(part.epoch, data)

    def elsewhere(self, epoch: int, blocks: Sequence[CopyBlock]) -> list[CopyBlock]:
        """`blocks`, the first of them aimed at a page of the reader that `epoch` was not given, as a faulty
        writer would; empty if it was given all."""
        reader = self.reader
        exposed, spec = reader.exposed.get(epoch), reader.engine.spec
        free = sorted(set(range(spec.pages)) - (exposed.pages if exposed is not None else set()))
        if not free or not blocks:
            return []
        self.writer.state.counts["writes astray"] += 1
        at = spec.offset(0, False, self.rng.choice(free) * spec.page_tokens)
        first = blocks[0]
        return [CopyBlock(first.src_offset, at, 1, min(first.row_bytes, spec.k_token_bytes)), *blocks[1:]]

    # ---- what checks ask -----------------------------------------------------------------------------

    def busy_with(self, epoch: int) -> bool:
        """Whether a write of `epoch` waits or is being sent. Bytes on a stream that broke here belong to the
        reader, which has a fence of its own."""
        io = self.transport.net.io
        if io is not None and io.over:
            return False  # its thread has ended, by a fault
        return super().busy_with(epoch) or any(
            flow.carries(epoch) for flow in self.flows if not flow.sender.closed
        )

    # ---- faults --------------------------------------------------------------------------------------

    def cut(self) -> None:
        """Each stream breaks. Both ends see it, in their own time; what is under way may be lost."""
        for flow in self._open():
            for end in (flow, flow.receiver.outward):
                assert end is not None
                end.lost = end.rng.random() < 0.5
                end.receiver.breaks(self._soon_s(), errno.ECONNRESET)

    def half_open(self, writers: bool) -> None:
        """Each stream breaks, and only one end hears of it: the other one by its own watch, if it has one."""
        for flow in self._open():
            end = flow.sender if writers else flow.receiver
            end.breaks(self._soon_s(), errno.ECONNRESET)

    def stand_still(self, process: Process, seconds: float) -> None:
        """Nothing that `process` sends on it gets through for a while; nobody is told."""
        self._still[process] = self.writer.world.now + seconds

    def _soon_s(self) -> float:
        return self.timing.break_seen_s * self.rng.random()

    def _open(self) -> list[Flow]:
        self.flows = [f for f in self.flows if not (f.sender.closed and f.receiver.closed)]
        return self.flows


class ShmPath(DataPath):
    """A path over `shm`: the writer's threads copy into the reader's mapped pool."""

    name = ShmTransport.name

    def __init__(self, writer: KVView, mine: int, reader: KVView, rank: int) -> None:
        super().__init__(writer, mine, reader, rank)
        self._copying: Counter[int] = Counter()

    def busy_with(self, epoch: int) -> bool:
        """Whether a thread is inside a slice of `epoch`. A later one reads what was given up."""
        return self._copying[epoch] > 0

    def copy(self, job: CopyJob, blocks: Sequence[CopyBlock]) -> None:
        """One slice, on a thread of the writer; now and then with a moment in its middle."""
        thread, timing = SimThread.current, self.timing
        assert thread is not None
        rows = [row for b in blocks for row in b.ranges()]
        nbytes = sum(size for _, _, size in rows)
        took_s = self.slow * (timing.slice_s * self.rng.random() + nbytes / timing.link_bytes_s)
        first = len(rows)
        if len(rows) > 1 and (self.mid_write or self.rng.random() < 0.2):
            first = self.rng.randrange(1, len(rows))
        self._copying[job.write.epoch] += 1
        for part in (rows[:first], rows[first:]):
            if part:
                thread.sleep(took_s * len(part) / len(rows))
                self._copied(job, part)
                if len(part) < len(rows):
                    self.in_mid_write()
        self._copying[job.write.epoch] -= 1

    def _copied(self, job: CopyJob, rows: list[tuple[int, int, int]]) -> None:
        writer, mapping = self.writer, job.target
        if mapping.closed:
            raise Violation("4", f"{writer.name} copies into memory that it has unmapped")
        writer.check_source(self.reader.me, job.write.epoch, [(at, size) for at, _, size in rows])
        memory = writer.engine.memory
        self.land(job.write.epoch, [(to, bytes(memory[at : at + size])) for at, to, size in rows])

    def cut(self) -> None:
        """The unix sockets are closed, at one end or at both; the processes live."""
        for sock in self._sockets():
            assert sock.other is not None
            for end in self.rng.choice(((sock,), (sock.other,), (sock, sock.other))):
                end.cut()

    def half_open(self, writers: bool) -> None:
        """A unix socket is closed at one end only; the processes live."""
        for sock in self._sockets():
            assert sock.other is not None
            (sock if writers else sock.other).cut()

    def _sockets(self) -> list[UnixSocket]:
        things = self.transport.net.open_fds.values()
        return [
            thing
            for thing in list(things)
            if isinstance(thing, UnixSocket)
            and thing.other
            and thing.other.net is self.reader.transports[self.rank, self.name].net
        ]


class SimTransport(Transport):
    """Production's transport of one node, in a simulated network or host; and what it was asked."""

    net: SimNet
    inner: Transport
    memory_kinds = frozenset(MemoryKind)
    make_path: ClassVar[type[DataPath]]
    #: its queues are short in some scenarios
    may_be_full: ClassVar[bool] = True
    #: the live ones, by peer and epoch
    grants: Grants | Mapping[tuple[RankId, int], int]

    def __init__(self, node: KVView, rank: int, on_event: EventSink) -> None:
        self._node = node
        self.rank = rank
        self.tell = on_event
        #: how many of the next writes go where they must not
        self.astray = 0
        #: how many of the next calls of `connect`, and of `fence`, raise what they must not
        self.connect_raises = self.fence_raises = 0
        self._connecting = 0
        self._closed = False
        self._full = self.may_be_full and "full queues" in node.state.scenario.features
        self._rng = node.world.rng(f"{self.name} options {node.name}")

    @property
    def pool(self) -> bytearray | memoryview:
        """The memory that peers write into."""
        return self._node.engine.memory

    @property
    def lent(self) -> int:
        """Slots of a staging pool that are not free."""
        return 0

    def register(self, memory: Memory) -> Endpoint:
        """As production."""
        return self.inner.register(memory)

    def connect(self, peer: RankId, endpoint: Endpoint, timeout_s: float) -> None:
        """As production."""
        if self.connect_raises:
            self.connect_raises -= 1
            self._node.failed_at = self._node.world.now
            raise Injected("injected into connect")
        self._connecting += 1
        try:
            self.inner.connect(peer, endpoint, timeout_s)
        finally:
            self._connecting -= 1
            self._check_left()

    def grant(self, peer: RankId, epoch: int, area: Content) -> None:
        """As production."""
        self.inner.grant(peer, epoch, area)

    def write(self, peer: RankId, epoch: int, tag: int, blocks: Sequence[CopyBlock]) -> None:
        """As production; its event is waited for."""
        path = self._path(peer)
        path.running[epoch, tag] = None
        if self.astray and isinstance(path, TcpPath) and (wrong := path.elsewhere(epoch, blocks)):
            self.astray -= 1
            blocks = wrong
        self.inner.write(peer, epoch, tag, blocks)

    def fence(self, peer: RankId, epoch: int) -> None:
        """As production."""
        if self.fence_raises:
            self.fence_raises -= 1
            node = self._node
            node.failed_at = node.world.now
            node.no_answer_until = max(node.no_answer_until, node.world.now + FENCE_AGAIN_S)
            node.state.counts["fences not taken"] += 1
            raise Injected("injected into a fence")
        self.inner.fence(peer, epoch)

    def close(self) -> None:
        """As production: nothing is left open, at the latest once the last `connect` has ended, which nobody
        waits for."""
        self.inner.close()
        self._closed = True
        self._check_left()

    def _check_left(self) -> None:
        left = [thing for thing in self.net.open_fds.values() if not self._is_pool(thing)]
        # (Of a process that is killed nothing is left, once it has ended.)
        if left and self._closed and not self._connecting and self._node.alive:
            self._node.world.fail(Violation("21", f"{self._node.name} has closed {self.name} and has {left}"))

    def died(self) -> None:
        """The process has ended."""
        self.net.died()

    def _is_pool(self, thing: object) -> bool:
        """Whether an open descriptor is that of the pool, which outlives the transport."""
        return isinstance(thing, Memfd) and thing.data is self.pool

    def end_a_thread(self) -> None:
        """The next turn of its I/O thread ends that thread."""
        assert self.net.io is not None
        self.net.io.end()

    def _path(self, peer: RankId) -> DataPath:
        reader = self._node.state.by_leader[peer.leader]
        assert isinstance(reader, KVView)
        path: DataPath = self._node.data_path(self.rank, reader, peer.rank, self.name)
        return path

    def _event(self, event: TransportEvent) -> None:
        if isinstance(event, Written | WriteFailed):
            path, key = self._path(event.peer), (event.epoch, event.tag)
            if key not in path.running:
                raise Violation("2", f"{self._node.name}: a second event of a write: {event}")
            del path.running[key]
            if key in path.lied:
                path.lied.discard(key)
                return
        self.tell(event)


class SimKinds(TransportKinds):
    """Production's transports, but for how one is made."""

    def __init__(self, make: Callable[[str, EventSink, TransportOptions], SimTransport]) -> None:
        super().__init__(KINDS.known)
        self._make = make

    def create(self, name: str, on_event: EventSink, options: TransportOptions) -> Transport:
        """As production's, in virtual time."""
        return self._make(name, on_event, options)


class SimTcp(SimTransport):
    """Production's `TcpTransport`."""

    name = TcpTransport.name
    preference = TcpTransport.preference
    make_path = TcpPath

    def __init__(self, node: KVView, on_event: EventSink, options: TransportOptions) -> None:
        super().__init__(node, options.me.rank, on_event)
        rng = self._rng
        self.net = SimNet(node, self.rank, self.name)
        self.inner = TcpTransport(
            self._event,
            replace(options, host=node.host),
            TcpTuning(
                part_bytes=rng.choice((64, 400, 4096, 1 << 20)),
                slice_bytes=rng.choice((64, 400, 4096, 1 << 20)),
                lowat_bytes=rng.choice((1, 100, 1 << 19)),
                max_parts=rng.choice((1, 3)) if self._full else 65536,
            ),
            self.net,
        )
        self.grants = self.inner.grants


class SimShm(SimTransport):
    """Production's `ShmTransport`."""

    name = ShmTransport.name
    preference = ShmTransport.preference
    make_path = ShmPath

    def __init__(self, node: KVView, on_event: EventSink, options: TransportOptions) -> None:
        super().__init__(node, options.me.rank, on_event)
        self.host = SimHost(node, self.rank)
        self.net = self.host.net
        self.inner = ShmTransport(
            self._event,
            options,
            ShmTuning(
                slice_bytes=self._rng.choice((64, 400, 4096, 1 << 20)),
                copy_threads=self._rng.choice((1, 2, 2, 3)),
                max_writes=self._rng.choice((1, 3)) if self._full else 65536,
            ),
            copy=self._copy,
            host=self.host,
        )
        self.grants = self.inner._table._of

    def end_a_thread(self) -> None:
        """The next slice ends the thread that copies it, or the next turn the I/O thread."""
        if self._rng.random() < 0.5:
            super().end_a_thread()
        else:
            self.host.breaks = Injected("injected into a thread that copies")

    def register(self, memory: Memory) -> Endpoint:
        """As production, with a descriptor of the pool."""
        fd = self.net.open(Memfd(self.pool, self._node))
        return self.inner.register(Memory([replace(memory.only, fd=fd)]))

    def _copy(self, job: CopyJob, blocks: Sequence[CopyBlock]) -> None:
        if self.host.breaks is not None:
            raise self.host.breaks
        path = self._path(job.peer)
        assert isinstance(path, ShmPath)
        path.copy(job, blocks)


def check_landing(node: KVView, epoch: int, data: list[tuple[int, bytes]]) -> None:
    """Invariant 4: bytes land only in pages that are published under this epoch right now."""
    exposed = node.exposed.get(epoch)
    if exposed is None:
        raise Violation("4", f"a write of epoch {epoch:x} landed on {node.name} after its lease had ended")
    for to, chunk in data:
        pages = node.pages_at(to, len(chunk))
        if not pages <= exposed.pages:
            raise Violation(
                "4",
                f"a write landed in pages {sorted(pages)} of {node.name}, outside the published ones",
                (exposed.transfer.room,),
            )
