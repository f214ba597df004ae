"""Copies between a rank's memory and a staging slot: numpy on a host, torch where the memory is a device's.

The bytes in a slot are packed: the rows of the blocks, one after the other.
"""

from __future__ import annotations

import queue
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from segue.kv.errors import TransferFailed
from segue.kv.layout.blocks import CopyBlock
from segue.kv.transport.memory.copier import copy_block
from segue.kv.transport.memory.device_tensors import flat_tensor, torch_module
from segue.kv.transport.memory.pool_memory import Memory, MemoryKind
from segue.kv.transport.memory.ranges import pieces
from segue.kv.transport.staged.staged_wire import MAX_BLOCKS


@dataclass(frozen=True, slots=True)
class PackedPiece:
    """Some blocks of a write: `out` packs them into a slot, `into` leads from there to their place."""

    out: list[CopyBlock]
    into: list[CopyBlock]
    nbytes: int


def pack(blocks: Sequence[CopyBlock], slot_bytes: int) -> Iterator[PackedPiece]:
    """The same bytes in pieces of at most `slot_bytes`."""
    out: list[CopyBlock] = []
    into: list[CopyBlock] = []
    at = 0
    for b in pieces(blocks, slot_bytes):
        if at + b.nbytes > slot_bytes or len(out) >= MAX_BLOCKS:
            yield PackedPiece(out, into, at)
            out, into, at = [], [], 0
        group = b.rows * b.row_bytes
        out.append(replace(b, dst_offset=at, dst_stride=b.row_bytes, dst_group_stride=group))
        into.append(replace(b, src_offset=at, src_stride=b.row_bytes, src_group_stride=group))
        at += b.nbytes
    if out:
        yield PackedPiece(out, into, at)


class CopyMayRun(TransferFailed):
    """A copy was begun on a device, and the wait for its end raised: it may read and write from now on until
    the process ends."""


class CopyThreads:
    """Threads called `name` that run submitted work, which must not raise. They end with the process, even if
    a copy of a device hangs."""

    def __init__(self, name: str, count: int = 2) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._closed = False
        self._threads = [threading.Thread(target=self._run, name=name, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, work: Callable[[], None]) -> None:
        """Run `work` soon; dropped after `close`."""
        self._work.put(work)

    def close(self, timeout_s: float) -> bool:
        """Run nothing more that waits. True once nothing runs, False if something still does after
        `timeout_s`. Idempotent."""
        self._closed = True
        for _ in self._threads:
            self._work.put(None)
        ends_at = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, ends_at - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (work := self._work.get()) is not None and not self._closed:
            work()


class Copies:
    """Between `memory` and `slots`, which is one region of host memory. Calls return when every byte is
    there. A call that raises leaves nothing running, unless it raises CopyMayRun."""

    def __init__(self, memory: Memory, slots: Memory) -> None:
        self._memory = memory
        self._slots = slots

    def out(self, blocks: Sequence[CopyBlock], slot_offset: int) -> None:
        """Copy blocks of the memory into a slot."""
        self._copy([replace(b, dst_offset=b.dst_offset + slot_offset) for b in blocks], into=False)

    def into(self, blocks: Sequence[CopyBlock], slot_offset: int) -> None:
        """Copy what is in a slot to its place in the memory."""
        self._copy([replace(b, src_offset=b.src_offset + slot_offset) for b in blocks], into=True)

    def _copy(self, blocks: Sequence[CopyBlock], *, into: bool) -> None:
        devices: set[Any] = set()
        try:
            for block in blocks:
                for index, b in self._in_regions(block, into=into):
                    region = self._memory.regions[index]
                    if region.kind is not MemoryKind.DEVICE:
                        ends = (self._slots.buffer, region.buffer)
                        copy_block(*(ends if into else ends[::-1]), b)
                        continue
                    flat = flat_tensor(region)
                    devices.add(flat.device)  # before the copy: one that raises may have begun
                    _begin_copy(flat, self._slots.buffer, b, into=into)
        finally:
            _wait(devices)

    def _in_regions(self, b: CopyBlock, *, into: bool) -> Iterator[tuple[int, CopyBlock]]:
        """The block in parts that lie in one region each, with its offset counted from that region's start.
        Rows were checked: none crosses the end of one."""
        offset, stride = (b.dst_offset, b.dst_stride) if into else (b.src_offset, b.src_stride)
        group_stride = b.dst_group_stride if into else b.src_group_stride
        last = offset + (b.groups - 1) * group_stride + (b.rows - 1) * stride
        starts = self._memory.starts
        index = self._region_of(offset)
        if len(starts) == 1 or index == self._region_of(last):
            inside = offset - starts[index]
            yield index, replace(b, dst_offset=inside) if into else replace(b, src_offset=inside)
        else:
            limit_bytes = b.rows * b.row_bytes if b.groups > 1 else b.row_bytes
            for part in pieces([b], limit_bytes):
                yield from self._in_regions(part, into=into)

    def _region_of(self, offset: int) -> int:
        return bisect_right(self._memory.starts, offset) - 1


def _begin_copy(flat: Any, slots: Any, b: CopyBlock, *, into: bool) -> None:
    """Begin to copy a block between a device and the slots."""
    torch = torch_module()
    host = torch.frombuffer(slots, dtype=torch.uint8)
    shape = (b.groups, b.rows, b.row_bytes)
    source, target = (host, flat) if into else (flat, host)
    rows = source.as_strided(
        shape, (b.src_group_stride, b.src_stride, 1), source.storage_offset() + b.src_offset
    )
    target.as_strided(
        shape, (b.dst_group_stride, b.dst_stride, 1), target.storage_offset() + b.dst_offset
    ).copy_(rows, non_blocking=True)


def _wait(devices: set[Any]) -> None:
    """Until what was begun on this thread's streams of the devices has ended. Raises CopyMayRun if a wait
    raises, after the other waits."""
    failed: Exception | None = None
    for device in devices:
        try:
            if device.type != "cpu":
                getattr(torch_module(), device.type).current_stream(device).synchronize()
        except Exception as exc:
            failed = exc
    if failed is not None:
        raise CopyMayRun(f"a device copy could not be waited for: {failed!r}") from failed


def pin(slots: Memory, memory: Memory) -> None:
    """Have the driver of CUDA copy from and to the slots without a copy of its own, if `memory` is a CUDA
    device's; others copy from pageable memory."""
    if not any(region.device.startswith("cuda") for region in memory.regions):
        return
    region = slots.only
    cuda = torch_module().cuda
    cuda.check_error(cuda.cudart().cudaHostRegister(region.address, region.nbytes, 0))


def unpin(slots: Memory, memory: Memory) -> None:
    """Undo `pin`."""
    if any(region.device.startswith("cuda") for region in memory.regions):
        torch_module().cuda.cudart().cudaHostUnregister(slots.only.address)
