"""The writing end of `tcp`: one path per peer, over one stream.

Everything here runs on the loop's thread.
"""

from __future__ import annotations

import select
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from segue.kv.errors import PeerLost, SegueError, TransferFailed
from segue.kv.ids import RankId
from segue.kv.layout.blocks import CopyBlock
from segue.kv.transport.base import TransportEvent
from segue.kv.transport.memory.pool_memory import Memory
from segue.kv.transport.net.ioloop import IoLoop
from segue.kv.transport.net.silence import SilenceWatch
from segue.kv.transport.net.stream import RECORD_BYTES, Channel
from segue.kv.transport.tcp import tcp_wire
from segue.kv.transport.tcp.tcp_net import TcpTuning
from segue.kv.transport.tcp.tcp_wire import Cursor, PartRows
from segue.kv.transport.write_book import Write, WriteBook, not_granted

Emit = Callable[[TransportEvent], None]


@dataclass(slots=True, eq=False)
class WritePart:
    """A piece of a write on its way. `head` keeps the bytes alive that `cursor` points at."""

    write: Write
    cursor: Cursor
    head: bytes
    sent_at: float = 0.0


def load(write: Write, ident: int, rows: PartRows, memory: Memory) -> WritePart:
    """Build the vector that is sent: header, rows, then the data where it lies."""
    head = tcp_wire.pack_header(write.epoch, ident, rows.nbytes, rows.target.astype("<u8").tobytes())
    vector = np.empty((len(rows.source) + 1, 2), np.uint64)
    vector[0] = (np.frombuffer(head, np.uint8).ctypes.data, len(head))
    vector[1:] = rows.source
    memory.to_addresses(vector[1:])
    return WritePart(write, Cursor(vector), head)


class PeerWriter:
    """The stream to one peer. `gone` is called once, when the path ends by itself."""

    def __init__(
        self,
        loop: IoLoop,
        peer: RankId,
        channel: Channel,
        memory: Memory,
        target_bytes: int,
        emit: Emit,
        gone: Callable[[PeerWriter, SegueError], None],
        *,
        tuning: TcpTuning,
        stall_s: float,
    ) -> None:
        self.peer = peer
        self.target_bytes = target_bytes
        self._loop = loop
        self._channel = channel
        self._memory = memory
        self._gone = gone
        self._part_bytes = tuning.part_bytes
        self._slice_bytes = tuning.slice_bytes
        self._stall_s = stall_s
        self._book: WriteBook[PartRows] = WriteBook(peer, emit, loop.time, tuning.max_parts)
        self._idents = 0
        self._sending: WritePart | None = None
        self._unanswered: dict[int, WritePart] = {}
        self._waits = False  # to be called when the socket has room
        self._inbox = b""
        self._moved_at = 0.0  # when `_sending` began or last moved on
        self._answered_at = 0.0
        self._silence = SilenceWatch(loop, stall_s, self._stuck_since, self._stalled)
        self._ended: SegueError | None = None

    def open(self) -> None:
        """Start to read acks. A path that cannot be watched ends at once, and no other with it."""
        try:
            self._loop.watch(self._channel.fileno(), select.EPOLLIN, self._ready)
        except OSError as exc:
            why = f"the stream to {self.peer} cannot be watched: {exc.strerror}"
            self.end(PeerLost(why, peer=str(self.peer)))

    def write(self, write: Write, blocks: Sequence[CopyBlock]) -> None:
        """Queue a checked write and start it."""
        if self._ended is not None:
            self._book.fail(write, self._ended)
            return
        self._book.add(write, tcp_wire.cut(blocks, self._part_bytes))
        if not self._waits:
            self._guard(self._pump)

    def fence(self, epoch: int) -> None:
        """Fail what is queued; say `Fenced` when what is in flight was answered."""
        self._book.fence(epoch)

    def close(self) -> None:
        """Close the stream without an event. Undelivered bytes are thrown away."""
        self._ended = self._ended or TransferFailed(f"{self.peer}: the path has ended")
        self._silence.stop()
        self._loop.unwatch(self._channel.fileno())
        self._channel.close(reset=bool(self._book.under_way))

    def end(self, error: SegueError) -> None:
        """The path broke: every write fails, every waiting fence is answered (unproven). Idempotent."""
        if self._ended is not None:
            return
        self.close()
        self._sending = None
        self._unanswered.clear()
        self._book.end(error)
        self._book.settle_all()
        self._gone(self, error)

    def _ready(self, events: int) -> None:
        if events & select.EPOLLOUT:
            self._guard(self._pump)
        if events & ~select.EPOLLOUT and self._ended is None:
            self._guard(self._read)

    def _guard(self, step: Callable[[], None]) -> None:
        try:
            step()
        except SegueError as exc:
            self.end(exc)
        except OSError as exc:
            self.end(PeerLost(f"the stream to {self.peer} broke: {exc.strerror}", peer=str(self.peer)))

    def _pump(self) -> None:
        """Send until the socket is full, nothing is left or a slice was sent. The rest waits for the
        loop's next turn: a reader that keeps up would keep the loop from answers, fences and the others."""
        moved = 0
        while moved < self._slice_bytes:
            part = self._sending
            if part is None:
                if not self._book.waiting:
                    break
                self._idents += 1
                write, rows = self._book.begin()
                part = self._sending = load(write, self._idents, rows, self._memory)
                self._moved_at = self._loop.time()
                self._silence.start()
            sent = self._channel.send_rows(part.cursor, self._slice_bytes)
            if sent < 0:
                break
            moved += sent
            self._moved_at = self._loop.time()
            if not part.cursor.left:
                part.sent_at = self._moved_at
                self._unanswered[self._idents] = part
                self._sending = None
        waits = self._sending is not None or bool(self._book.waiting)
        if waits != self._waits:
            self._waits = waits
            self._loop.change(self._channel.fileno(), select.EPOLLIN | (select.EPOLLOUT if waits else 0))

    def _read(self) -> None:
        # One TLS record at most, so nothing stays behind where no poll would see it.
        data = self._channel.receive(RECORD_BYTES)
        if data is None:
            return
        if not data:
            raise PeerLost(f"{self.peer} closed its stream", peer=str(self.peer))
        self._answered_at = self._loop.time()
        self._inbox += data
        while len(self._inbox) >= tcp_wire.ACK.size and self._ended is None:
            status, ident = tcp_wire.parse_ack(self._inbox)
            self._inbox = self._inbox[tcp_wire.ACK.size :]
            part = self._unanswered.pop(ident, None)
            if part is None:
                raise TransferFailed(f"{self.peer} answered a part that was not sent")
            if status == tcp_wire.LANDED:
                self._book.over(part.write)
            else:
                self._book.over(part.write, not_granted(self.peer, part.write.epoch), refused=True)

    def _stuck_since(self) -> float | None:
        """Since when nothing has come of what the peer owes us; None if it owes nothing. Each direction is
        judged on its own: that more can be sent says nothing of the answers."""
        since = [self._moved_at] if self._sending is not None else []
        oldest = next(iter(self._unanswered.values()), None)
        if oldest is not None:
            since.append(max(oldest.sent_at, self._answered_at))
        return min(since, default=None)

    def _stalled(self) -> None:
        self.end(PeerLost(f"{self.peer} answered nothing for {self._stall_s} s", peer=str(self.peer)))
