"""Data paths between simulated nodes: real bytes, copied at the moment at which a write lands.

Two-sided (like `tcp`): the receiver's process performs the write and drops it by epoch, so its fence is
proven at once. One-sided (like `shm`): the writer's process copies into the receiver's memory, slice
by slice; nothing on the receiver can stop it, and only the writer's word or death is a proof.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from segue.core.errors import PeerLost, SegueError, TransferFailed
from segue.layout.blocks import CopyBlock
from segue.sim.world import Violation
from segue.transport.base import Fenced, PeerGone, TransportEvent, WriteFailed, Written

if TYPE_CHECKING:
    from segue.sim.node import KVNode


@dataclass(slots=True, eq=False)
class Write:
    """One write of one epoch, from posting until it has landed, failed or was cut."""

    epoch: int
    tag: int
    rows: list[tuple[int, int, int]]  # (source offset, destination offset, bytes)
    nbytes: int
    posted_at: float
    done: int = 0
    failed: bool = False


class Path:
    """From one prefill node to one decode node. All methods run in the writer's process unless said."""

    def __init__(self, writer: KVNode, reader: KVNode, one_sided: bool) -> None:
        self.writer = writer
        self.reader = reader
        self.one_sided = one_sided
        self.slow = 1.0
        self.closed = False
        self._queue: deque[Write] = deque()
        self._running: Write | None = None
        self._fencing: list[int] = []
        self._rng = writer.world.rng(f"path {writer.name} {reader.name}")
        self._ready_at = 0.0
        #: faults that wait for the next slice: called in the middle of a write
        self.mid_write: list[str] = []
        #: how many of the next slices land with one bit changed
        self.flips = 0
        #: the reader has seen that the writer's process is gone
        self.writer_gone = False

    # ---- the writer ----------------------------------------------------------------------------

    def write(self, epoch: int, tag: int, blocks: Sequence[CopyBlock]) -> None:
        """Queue a write; exactly one `Written` or `WriteFailed` follows."""
        rows = [
            (b.src_offset + r * b.src_stride, b.dst_offset + r * b.dst_stride, b.row_bytes)
            for b in blocks
            for r in range(b.rows)
        ]
        write = Write(epoch, tag, rows, sum(r[2] for r in rows), self.writer.world.now)
        if self.closed:
            self._report_failed(write, TransferFailed("the path is closed"))
            return
        self._queue.append(write)
        self._next()

    def fence(self, epoch: int) -> None:
        """No write of `epoch` starts any more; `Fenced` once none is under way."""
        for write in [w for w in self._queue if w.epoch == epoch]:
            self._queue.remove(write)
            self._report_failed(write, TransferFailed("fenced"))
        if self._running is not None and self._running.epoch == epoch:
            self._fencing.append(epoch)
        else:
            self._tell(Fenced(self.reader.peer_name, epoch, True))

    def _next(self) -> None:
        while self._running is None and self._queue:
            write = self._queue.popleft()
            if self.one_sided and not self.reader.granted(self.writer.me, write.epoch):
                # As shm: the reader's table is looked at when a write begins, and never again.
                self._report_failed(write, TransferFailed("this epoch may not be written"), refused=True)
                continue
            self._running = write
            self._slice(write)

    def _slice(self, write: Write) -> None:
        """Move the next part. On the way it may take long, and the process may stop or die."""
        rows, timing = write.rows, self.writer.world_timing
        left = len(rows) - write.done
        count = left if left < 2 or self._rng.random() < 0.6 else self._rng.randint(1, left - 1)
        part = rows[write.done : write.done + count]
        write.done += count
        nbytes = sum(r[2] for r in part)
        took_s = self.slow * (timing.slice_s * self._rng.random() + nbytes / timing.link_bytes_s)
        if self.one_sided:
            self.writer.after(took_s, self._copied, write, part)
        else:
            self.writer.check_source(self, write.epoch, part)
            memory = self.writer.engine.memory
            data = [(to, bytes(memory[at : at + size])) for at, to, size in part]
            self.writer.world.after(took_s, self.reader, self._arrived, write, data)

    def _copied(self, write: Write, part: list[tuple[int, int, int]]) -> None:
        """One-sided: our own copy, into whatever lies there now."""
        self.writer.check_source(self, write.epoch, part)
        memory = self.writer.engine.memory
        self._land(write.epoch, [(to, bytes(memory[at : at + size])) for at, to, size in part])
        self._after_slice(write, True)

    def _arrived(self, write: Write, data: list[tuple[int, bytes]]) -> None:
        """Two-sided, in the reader's process: it writes, or drops by epoch."""
        granted = not self.closed and self.reader.granted(self.writer.me, write.epoch)
        if granted:
            self._land(write.epoch, data)
        ack_s = self.writer.world_timing.latency_s * self._rng.random()
        self.writer.world.after(ack_s, self.writer, self._after_slice, write, granted)

    def _land(self, epoch: int, data: list[tuple[int, bytes]]) -> None:
        if self.flips and self.reader.alive:
            self.flips -= 1
            data = self.reader.deployment.checks.flips.wire(self.reader, epoch, data, self._rng)
        self.reader.landing(self, epoch, data)

    def _after_slice(self, write: Write, granted: bool) -> None:
        if self._running is not write:
            return
        if self.mid_write and write.done < len(write.rows):
            self.writer.faults.mid_write(self, self.mid_write.pop())
            if not self.writer.alive:
                return
        fenced = write.epoch in self._fencing
        if granted and not fenced and not self.closed and write.done < len(write.rows):
            self._slice(write)
            return
        self._running = None
        if not write.failed:
            if granted and write.done == len(write.rows):
                seconds = self.writer.world.now - write.posted_at
                self._tell(Written(self.reader.peer_name, write.epoch, write.tag, write.nbytes, seconds))
            else:
                refused = not granted and not self.closed
                self._report_failed(write, TransferFailed("the write was refused or cut"), refused=refused)
        while write.epoch in self._fencing:
            self._fencing.remove(write.epoch)
            self._tell(Fenced(self.reader.peer_name, write.epoch, True))
        self._next()

    def _tell(self, event: TransportEvent) -> None:
        """Events reach the I/O thread in their order."""
        world = self.writer.world
        at = world.now + self.writer.world_timing.hop_s * self._rng.random()
        self._ready_at = at = max(at, self._ready_at + 1e-9)
        world.at(at, self.writer, self.writer.transport_event, self.reader.me, event)

    def _report_failed(self, write: Write, error: SegueError, *, refused: bool = False) -> None:
        write.failed = True
        self._tell(WriteFailed(self.reader.peer_name, write.epoch, write.tag, error, refused))

    def busy_with(self, epoch: int) -> bool:
        """Whether a write of `epoch` is under way or waits."""
        running = self._running
        return (running is not None and running.epoch == epoch) or any(w.epoch == epoch for w in self._queue)

    # ---- faults --------------------------------------------------------------------------------

    def fail_write(self) -> None:
        """The running write is reported as failed, and goes on (until the fence, or its own end)."""
        if self._running is not None and not self._running.failed:
            self._report_failed(self._running, TransferFailed("the transport reported an error"))

    def cut(self) -> None:
        """Two-sided: the stream breaks. Nothing of it lands any more; both sides see it."""
        if self.closed or self.one_sided:
            return
        self.closed = True
        running, self._running = self._running, None
        for write in ([running] if running else []) + list(self._queue):
            if not write.failed:
                self._report_failed(write, TransferFailed("the stream broke"))
        self._queue.clear()
        while self._fencing:
            self._tell(Fenced(self.reader.peer_name, self._fencing.pop(), True))
        gone = PeerLost("the data stream broke")
        self._tell(PeerGone(self.reader.peer_name, False, gone))
        delay_s = self.writer.world_timing.break_seen_s * self._rng.random()
        self.reader.after(
            delay_s, self.reader.transport_event, self.writer.me, PeerGone(self.writer.peer_name, True, gone)
        )

    def writer_died(self) -> None:
        """The kernel tells the reader, once nothing of the dead process can land any more."""
        delay_s = self.writer.world_timing.break_seen_s * self._rng.random()
        if not self.one_sided:
            self.closed = True
        self.reader.after(delay_s, self._writer_gone)

    def _writer_gone(self) -> None:
        self.writer_gone = True
        gone = PeerGone(self.writer.peer_name, True, PeerLost("the writer's process ended"))
        self.reader.transport_event(self.writer.me, gone)

    def reader_died(self) -> None:
        """The writer hears it; its copies into a dead process's memory harm nobody."""
        delay_s = self.writer.world_timing.break_seen_s * self._rng.random()
        gone = PeerLost("the reader's process ended")
        if not self.one_sided:
            self.writer.after(delay_s, self.cut)
        self.writer.after(
            delay_s, self.writer.transport_event, self.reader.me, PeerGone(self.reader.peer_name, True, gone)
        )


def check_landing(node: KVNode, epoch: int, data: list[tuple[int, bytes]]) -> None:
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
