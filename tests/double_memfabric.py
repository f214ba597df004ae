"""`memfabric_hybrid` as far as `ascend` uses it, with the same signatures, and the memory of NPUs, which is
memory of this process. `Faults` says what goes wrong."""

from __future__ import annotations

import ctypes
import enum
import itertools
import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from segue.kv.transport.memory.pool_memory import Memory, Region

MEMORY: list[np.ndarray] = []


@dataclass
class Faults:
    """running: clear it, and calls stand still before they copy. status: what writes return; if it is not 0
    the bytes land all the same where `lands` is set. unseen: so many reads find no peer. initialize: what
    that returns. port: of the next engine that is written to."""

    running: threading.Event = field(default_factory=threading.Event)
    status: int = 0
    lands: bool = True
    unseen: int = 0
    initialize: int = 0
    port: int | None = None
    made: list[tuple[Any, ...]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    taken: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))  # one for each write


FAULTS = Faults()


def reset() -> None:
    """Nothing is wrong."""
    FAULTS.__init__()  # type: ignore[misc]
    FAULTS.running.set()
    TransferEngine.sessions.clear()


def device_memory(nbytes: int, device: str = "npu:0", page_bytes: int = 1) -> Memory:
    """Memory of a device that begins on a page."""
    array = np.zeros(nbytes + page_bytes, np.uint8)
    part = array[-array.ctypes.data % page_bytes :][:nbytes]
    return Memory([Region(part.ctypes.data, nbytes, device, owner=part)])


class TransDataOpType(enum.IntEnum):
    SDMA = 1


class TransferEngine:
    TransDataOpType = TransDataOpType
    sessions: dict[str, TransferEngine] = {}  # noqa: RUF012
    ports = itertools.count(15000)

    def __init__(self) -> None:
        self.session = ""
        self.role = ""
        self.slices: list[tuple[int, int]] = []

    def initialize(
        self,
        store_url: str,
        session_id: str,
        role: str,
        device_id: int,
        data_op_type: TransDataOpType = TransDataOpType.SDMA,
        store_server_role: str = "Decode",
        nic: str = "",
    ) -> int:
        FAULTS.made.append((store_url, session_id, role, device_id))
        if FAULTS.initialize or role not in ("Prefill", "Decode"):
            return FAULTS.initialize or -1
        self.role = role
        port = next(self.ports) if FAULTS.port is None else FAULTS.port
        self.session = f"{session_id}:{port}"
        if role == store_server_role:
            self.sessions[self.session] = self
        return 0

    def get_rpc_port(self) -> int:
        return int(self.session.rpartition(":")[2] or 0)

    def batch_register_memory(self, buffer_addrs: list[int], capacities: list[int]) -> int:
        self.slices = list(zip(buffer_addrs, capacities, strict=True))
        return 0

    def transfer_sync_read(
        self, dest_session: str, buffer: int, peer_buffer: int, length: int, flags: int = 0
    ) -> int:
        FAULTS.unseen -= 1
        if FAULTS.unseen >= 0 or not self.knows(dest_session, [peer_buffer], [length]):
            return -1
        ctypes.memmove(buffer, peer_buffer, length)
        return 0

    def batch_transfer_sync_write(
        self,
        dest_session: str,
        buffers: list[int],
        peer_buffers: list[int],
        lengths: list[int],
        flags: int = 0,
    ) -> int:
        if self.role != "Prefill" or not len(buffers) == len(peer_buffers) == len(lengths):
            return -1
        if not self.knows(dest_session, peer_buffers, lengths) or 0 in lengths:
            return -1
        FAULTS.sizes.append(len(lengths))
        FAULTS.taken.release()
        FAULTS.running.wait(20)
        if FAULTS.status == 0 or FAULTS.lands:
            for at, to, n in zip(buffers, peer_buffers, lengths, strict=True):
                ctypes.memmove(to, at, n)
        return FAULTS.status

    def knows(self, session: str, addresses: list[int], lengths: list[int]) -> bool:
        """Whether all of these lie in what the peer registered."""
        peer = self.sessions.get(session)
        return peer is not None and all(
            any(base <= at and at + n <= base + size for base, size in peer.slices)
            for at, n in zip(addresses, lengths, strict=True)
        )


reset()


def modules(name: str) -> Any:
    """This module, or what is used of torch."""
    import double_memfabric

    if name == "memfabric_hybrid":
        return double_memfabric
    assert name == "torch"

    def zeros(count: int, *, dtype: str, device: str) -> Any:
        assert (dtype, device.partition(":")[0]) == ("uint8", "npu")
        array = np.zeros(count, np.uint8)
        return SimpleNamespace(data_ptr=lambda: array.ctypes.data)

    return SimpleNamespace(zeros=zeros, uint8="uint8")
