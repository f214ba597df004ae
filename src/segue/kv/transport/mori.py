"""`mori`: MoRI-IO of AMD ROCm over RDMA. Not verified on hardware; written from amd-mori 1.2.4 and its
sources.

One engine for each transport, for what it proves does not depend on peers. All regions are registered once.
A write names bytes by region and offset, never by address. Its engine listens for peers at a port of its
own that asks nobody for a key: let only the fleet reach it.

Proof of an end: `Succeeded` of each status is the only end of a write. A failed status says nothing of
bytes that its siblings still move, and a status must outlive what writes into it, so those that did not
succeed are kept. That a registration which was revoked stops writes is not established, so a receiving end
proves nothing.
"""

from __future__ import annotations

import importlib
import mmap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from segue.kv.errors import DECODE_ERRORS, BootstrapTimeout, ConfigError, PeerRefused, TransferFailed
from segue.kv.ids import RankId
from segue.kv.transport.base import EventSink
from segue.kv.transport.library.library_api import Handle, Library, ReceivingEnd, UnprovenEnd, WritingEnd
from segue.kv.transport.library.library_modules import Modules, device_number, missing
from segue.kv.transport.library.library_transport import LibraryTransport
from segue.kv.transport.memory.pool_memory import Memory, MemoryKind, Region, host_region
from segue.kv.transport.options import TransportOptions
from segue.kv.transport.tcp.tcp_wire import PartRows

#: As SGLang has them: what one send queue holds is too little for a hand-off.
_QUEUE_PAIRS = _WORKERS = 4
MEET_MS = 20_000
_RDMA_DEVICES = Path("/sys/class/infiniband")

Descriptor = Annotated[bytes, msgspec.Meta(max_length=4096)]


class MoriBlob(msgspec.Struct, frozen=True, array_like=True):
    """How a writer reaches a receiver: what the library packed of its engine and of each region."""

    engine: Descriptor
    memories: Annotated[list[Descriptor], msgspec.Meta(min_length=1, max_length=65536)]


class MoriTransport(LibraryTransport):
    """See this module and `library`."""

    name = "mori"
    preference = 30
    memory_kinds = frozenset(MemoryKind)

    def __init__(
        self, on_event: EventSink, options: TransportOptions, modules: Modules = importlib.import_module
    ) -> None:
        super().__init__(on_event, options, MoriLibrary(options, modules))

    @classmethod
    def unusable(cls) -> str:
        """The package, which needs the libraries of ROCm, or an RDMA device is missing."""
        reason = super().unusable() or missing("mori.io", "amd-mori, on a host with ROCm")
        if not reason and not any(_RDMA_DEVICES.glob("*")):
            reason = "no RDMA device"
        return reason


class MoriLibrary(Library):
    """`modules` imports the library."""

    def __init__(self, options: TransportOptions, modules: Modules) -> None:
        self._options = options
        self._modules = modules
        self._lock = threading.Lock()
        self._memories: list[Any] = []
        #: Statuses of posts that did not succeed: the library may still write into them.
        self.unfinished: list[Any] = []

    def load(self) -> None:
        """Make the engine; it listens from here on."""
        self.io = io = self._modules("mori.io")
        host = self._options.host
        if host in ("", "0.0.0.0", "::"):  # peers are told where the engine listens
            host = self._options.advertise or host
        self.engine = io.IOEngine(str(self._options.me), io.IOEngineConfig(host=host, port=0))
        self.engine.create_backend(
            io.BackendType.RDMA,
            io.RdmaBackendConfig(
                qp_per_transfer=_QUEUE_PAIRS,
                post_batch_size=-1,
                num_worker_threads=_WORKERS,
                poll_cq_mode=io.PollCqMode.POLLING,
                enable_notification=False,
            ),
        )
        if self.engine.get_engine_desc().port <= 0:
            raise ConfigError(f"mori listens at no port of {host}; see its log")
        self._page = mmap.mmap(-1, mmap.PAGESIZE)
        self.scratch = self.register(host_region(self._page))

    def register(self, region: Region) -> Any:
        """The library's description of a region that is registered now."""
        cpu = region.kind is not MemoryKind.DEVICE
        where = self.io.MemoryLocationType.CPU if cpu else self.io.MemoryLocationType.GPU
        # ROCm's torch calls its devices cuda.
        number = -1 if cpu else device_number(region.device, "cuda")
        return self.engine.register_memory(region.address, region.nbytes, number, where)

    def memories(self, memory: Memory) -> list[Any]:
        """The descriptions of all regions of our memory, which are registered at the first call."""
        with self._lock:
            if not self._memories:
                self._memories = [self.register(region) for region in memory.regions]
            return self._memories

    def receiving(self, peer: RankId, memory: Memory, greeting: bytes) -> ReceivingEnd:
        """See `Library.receiving`."""
        memories = [described.pack() for described in self.memories(memory)]
        return UnprovenEnd(msgspec.msgpack.encode(MoriBlob(self._desc(), memories)))

    def writing(self, peer: RankId, memory: Memory, target: Memory, blob: bytes) -> WritingEnd:
        """See `Library.writing`. Reads one byte from the peer: then a connection stands."""
        try:
            told = msgspec.msgpack.decode(blob, type=MoriBlob)
        except DECODE_ERRORS as exc:
            raise PeerRefused(f"unreadable description of a mori engine: {exc}") from exc
        engine = self.io.EngineDesc.unpack(told.engine)
        theirs = [self.io.MemoryDesc.unpack(packed) for packed in told.memories]
        if engine.key != str(peer) or any(m.engine_key != engine.key for m in theirs):
            raise PeerRefused(f"{peer} describes the mori engine of {engine.key}")
        if [m.size for m in theirs] != [region.nbytes for region in target.regions]:
            raise PeerRefused(f"{peer} describes other regions to mori than to segue")
        self.engine.register_remote_engine(engine)
        end = MoriWritingEnd(self, memory, target, theirs)
        end.meet()
        return end

    def _desc(self) -> bytes:
        packed: bytes = self.engine.get_engine_desc().pack()
        return packed


class MoriWritingEnd(WritingEnd):
    """Writes to one peer, from region to region."""

    def __init__(self, library: MoriLibrary, memory: Memory, target: Memory, theirs: list[Any]) -> None:
        self._library = library
        self._memory, self._target = memory, target
        self._ours, self._theirs = library.memories(memory), theirs
        self._running: dict[int, list[Any]] = {}

    def meet(self) -> None:
        """Build queue pairs and cross them once. Raises BootstrapTimeout or TransferFailed."""
        engine = self._library.engine
        uid = engine.allocate_transfer_uid()
        (status,) = engine.batch_read([self._library.scratch], [[0]], [self._theirs[0]], [[0]], [[1]], [uid])
        status.WaitFor(MEET_MS)
        if not status.Succeeded():
            self._library.unfinished.append(status)
            if status.InProgress():
                raise BootstrapTimeout(f"mori read nothing from its peer within {MEET_MS} ms")
            raise TransferFailed(f"mori cannot reach its peer: {status.Message()}")

    def post(self, rows: PartRows) -> Handle:
        """See `WritingEnd.post`. A call for each pair of regions, so that one that raises loses no status."""
        engine = self._library.engine
        statuses: list[Any] = []
        self._running[id(statuses)] = statuses
        for ours, theirs, at, to, sizes in self._by_regions(rows):
            uid = engine.allocate_transfer_uid()
            statuses += engine.batch_write([ours], [at], [theirs], [to], [sizes], [uid])
        return statuses

    def done(self, handle: Handle) -> bool:
        """See `WritingEnd.done`."""
        statuses = self._running[id(handle)]
        for status in statuses:
            if not status.Succeeded() and not status.InProgress():
                raise TransferFailed(f"mori failed: {status.Message()}")
        if all(status.Succeeded() for status in statuses):
            del self._running[id(handle)]
            return True
        return False

    def close(self) -> bool:
        """Nothing ends what still runs."""
        self._library.unfinished += [status for statuses in self._running.values() for status in statuses]
        return not self._running

    def _by_regions(self, rows: PartRows) -> Iterator[tuple[Any, Any, list[int], list[int], list[int]]]:
        """The rows of each pair of regions: their descriptions, offsets in both, and sizes."""
        source, at = self._memory.places(rows.source[:, 0])
        target, to = self._target.places(rows.target[:, 0])
        pair = source * len(self._theirs) + target
        for key in np.unique(pair):
            mine = pair == key
            ours, theirs = divmod(int(key), len(self._theirs))
            yield (
                self._ours[ours],
                self._theirs[theirs],
                at[mine].tolist(),
                to[mine].tolist(),
                rows.source[mine, 1].tolist(),
            )
