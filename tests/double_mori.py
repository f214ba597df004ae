"""`mori.io` as far as `mori` uses it, with the same signatures: engines that copy within this process, on a
thread of each. `Faults` says what goes wrong."""

from __future__ import annotations

import ctypes
import enum
import itertools
import queue
import threading
from dataclasses import dataclass, field
from typing import Any

import msgspec


class BackendType(enum.Enum):
    RDMA = 2


class MemoryLocationType(enum.Enum):
    CPU = 1
    GPU = 2


class PollCqMode(enum.Enum):
    POLLING = 0
    EVENT = 1


class StatusCode(enum.Enum):
    SUCCESS = 0
    IN_PROGRESS = 2
    ERR_RDMA_OP = 13


@dataclass
class Faults:
    """running: clear it, and nothing is copied. fails: transfers end with an error; the bytes land all the
    same where `lands` is set. raises: building a connection raises. port: of engines. late: where writes go
    that are copied only when the test does it (`IOEngine.copy`)."""

    running: threading.Event = field(default_factory=threading.Event)
    fails: bool = False
    lands: bool = True
    raises: str = ""
    port: int | None = None
    late: list[Any] | None = None
    writes: list[int] = field(default_factory=list)
    taken: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))  # one for each write


FAULTS = Faults()
ENGINES: dict[str, IOEngine] = {}
MADE: list[IOEngine] = []


class TransferStatus:
    def __init__(self) -> None:
        self.code = StatusCode.IN_PROGRESS
        self.message = ""
        self.ended = threading.Event()

    def InProgress(self) -> bool:
        return self.code is StatusCode.IN_PROGRESS

    def Succeeded(self) -> bool:
        return self.code is StatusCode.SUCCESS

    def Failed(self) -> bool:
        return self.code is StatusCode.ERR_RDMA_OP

    def Message(self) -> str:
        return self.message

    def WaitFor(self, timeout_ms: int = -1) -> StatusCode:
        self.ended.wait(timeout_ms / 1000)
        return self.code


class IOEngineConfig:
    def __init__(self, host: str = "", port: int = 0) -> None:
        self.host, self.port = host, port


class RdmaBackendConfig:
    def __init__(
        self,
        qp_per_transfer: int = 1,
        post_batch_size: int = -1,
        num_worker_threads: int = -1,
        poll_cq_mode: PollCqMode = PollCqMode.POLLING,
        enable_notification: bool = True,
        notif_per_qp: int = 1024,
        enable_transfer_chunking: bool = False,
        chunk_bytes: int = 65536,
        max_chunks_per_transfer: int = 64,
        num_nics_per_transfer: int = 1,
    ) -> None:
        assert not enable_notification


class EngineDesc(msgspec.Struct, frozen=True, array_like=True):
    key: str
    host: str
    port: int

    def pack(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @staticmethod
    def unpack(data: bytes) -> EngineDesc:
        return msgspec.msgpack.decode(data, type=EngineDesc)


class MemoryDesc(msgspec.Struct, frozen=True, array_like=True):
    engine_key: str
    id: int
    device_id: int
    data: int
    size: int
    loc: MemoryLocationType

    def pack(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @staticmethod
    def unpack(data: bytes) -> MemoryDesc:
        return msgspec.msgpack.decode(data, type=MemoryDesc)


class IOEngine:
    ports = itertools.count(20000)

    def __init__(self, key: str, config: IOEngineConfig) -> None:
        self.key, self.host, self.port = key, config.host, config.port
        self.memory: dict[int, MemoryDesc] = {}
        self.known: dict[str, EngineDesc] = {}
        self.uids = itertools.count()
        self.used: set[int] = set()
        self.work: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.thread: threading.Thread | None = None
        ENGINES[key] = self  # the newest of that name
        MADE.append(self)

    def get_engine_desc(self) -> EngineDesc:
        return EngineDesc(self.key, self.host, self.port)

    def create_backend(self, type: BackendType, config: RdmaBackendConfig | None = None) -> None:
        assert type is BackendType.RDMA
        self.port = next(self.ports) if FAULTS.port is None else FAULTS.port

    def register_remote_engine(self, engine_desc: EngineDesc) -> None:
        self.known[engine_desc.key] = engine_desc

    def register_memory(self, ptr: int, size: int, device_id: int, mem_loc: MemoryLocationType) -> MemoryDesc:
        described = MemoryDesc(self.key, len(self.memory), device_id, ptr, size, mem_loc)
        self.memory[described.id] = described
        return described

    def allocate_transfer_uid(self) -> int:
        return next(self.uids)

    def _batch_single_side_transfer(
        self,
        func: bool,
        local_dest_mem_desc: list[MemoryDesc],
        local_offsets: list[list[int]],
        remote_src_mem_desc: list[MemoryDesc],
        remote_offsets: list[list[int]],
        sizes: list[list[int]],
        transfer_uid: list[int],
    ) -> list[TransferStatus]:
        """`func`: whether it writes."""
        statuses = [TransferStatus() for _ in sizes]
        counts = {len(x) for x in (local_dest_mem_desc, local_offsets, remote_src_mem_desc, remote_offsets)}
        assert counts == {len(sizes)} == {len(transfer_uid)}
        assert not self.used & set(transfer_uid), "one of another transfer"
        self.used |= set(transfer_uid)
        if FAULTS.raises:
            raise RuntimeError(FAULTS.raises)
        if self.thread is None:
            self.thread = threading.Thread(target=self.run, daemon=True, name="double-mori")
            self.thread.start()
        for i, status in enumerate(statuses):
            local, remote = local_dest_mem_desc[i], remote_src_mem_desc[i]
            assert remote.engine_key in self.known
            assert self.memory[local.id] == local
            rows = list(zip(local_offsets[i], remote_offsets[i], sizes[i], strict=True))
            assert all(at + n <= local.size and to + n <= remote.size for at, to, n in rows)
            pairs = [(remote.data + to, local.data + at, n) for at, to, n in rows]
            work = status, pairs if func else [(at, to, n) for to, at, n in pairs]
            if func and FAULTS.late is not None:
                FAULTS.late.append(work)
            else:
                self.work.put(work)
            if func:
                FAULTS.writes.append(len(rows))
                FAULTS.taken.release()
        return statuses

    def batch_read(self, *args: Any) -> list[TransferStatus]:
        return self._batch_single_side_transfer(False, *args)

    def batch_write(self, *args: Any) -> list[TransferStatus]:
        return self._batch_single_side_transfer(True, *args)

    def run(self) -> None:
        while (work := self.work.get()) is not None:
            self.copy(*work)

    @staticmethod
    def copy(status: TransferStatus, pairs: list[tuple[int, int, int]]) -> None:
        for to, at, n in pairs:
            FAULTS.running.wait(20)
            if not FAULTS.fails or FAULTS.lands:
                ctypes.memmove(to, at, n)
        status.message = "the peer does not answer" if FAULTS.fails else ""
        status.code = StatusCode.ERR_RDMA_OP if FAULTS.fails else StatusCode.SUCCESS
        status.ended.set()


def reset() -> None:
    """Nothing is wrong, and no engine of a test that has ended has a thread."""
    FAULTS.__init__()  # type: ignore[misc]
    FAULTS.running.set()
    ENGINES.clear()
    while MADE:
        engine = MADE.pop()
        engine.work.put(None)
        if engine.thread is not None:
            engine.thread.join(20)


reset()


def modules(name: str) -> Any:
    """This module."""
    import double_mori

    assert name == "mori.io"
    return double_mori
