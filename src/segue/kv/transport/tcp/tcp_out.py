"""The writing end of `tcp`: one path per peer, several streams, parts taken by whichever is free.

Everything here runs on the loop's thread.
"""

from __future__ import annotations

import select
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from segue.kv.errors import PeerLost, SegueError, TransferFailed
from segue.kv.ids import RankId
from segue.kv.layout.blocks import CopyBlock
from segue.kv.transport.base import Fenced, TransportEvent, WriteFailed
from segue.kv.transport.memory.pool_memory import Memory
from segue.kv.transport.net.ioloop import IoLoop, Timer
from segue.kv.transport.net.stream import RECORD_BYTES, Channel
from segue.kv.transport.paths import Write, fenced, not_granted
from segue.kv.transport.tcp import tcp_wire
from segue.kv.transport.tcp.tcp_net import TcpTuning
from segue.kv.transport.tcp.tcp_wire import Cursor, PartRows

Emit = Callable[[TransportEvent], None]


@dataclass(slots=True, eq=False)
class WritePart:
    """A piece of a write on its way. `head` keeps the bytes alive that `cursor` points at."""

    write: Write
    ident: int
    rows: PartRows
    head: bytes = b""
    cursor: Cursor | None = None
    sent_at: float = 0.0

    def load(self, memory: Memory) -> Cursor:
        """Build the vector that is sent: header, rows, then the data where it lies."""
        rows = self.rows.target.astype("<u8").tobytes()
        self.head = tcp_wire.pack_header(self.write.epoch, self.ident, self.rows.nbytes, rows)
        vector = np.empty((len(self.rows.source) + 1, 2), np.uint64)
        vector[0] = (np.frombuffer(self.head, np.uint8).ctypes.data, len(self.head))
        vector[1:] = self.rows.source
        memory.to_addresses(vector[1:])
        self.cursor = Cursor(vector)
        return self.cursor


@dataclass(slots=True, eq=False)
class OutStream:
    """One connection: the part being sent and those that wait for their ack."""

    channel: Channel
    sending: WritePart | None = None
    unanswered: dict[int, WritePart] = field(default_factory=dict)
    waiting: bool = False  # to be called when the socket has room
    inbox: bytes = b""
    moved_at: float = 0.0  # when `sending` began or last moved on
    answered_at: float = 0.0

    def stuck_since(self) -> float | None:
        """Since when nothing has come of what the peer owes us; None if it owes nothing. Each stream
        and direction is judged on its own: that more can be sent says nothing of the answers."""
        since = [self.moved_at] if self.sending is not None else []
        oldest = next(iter(self.unanswered.values()), None)
        if oldest is not None:
            since.append(max(oldest.sent_at, self.answered_at))
        return min(since, default=None)


class PeerWriter:
    """All streams to one peer. `gone` is called once, when the path ends by itself."""

    def __init__(
        self,
        loop: IoLoop,
        peer: RankId,
        channels: list[Channel],
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
        self._memory = memory
        self._emit = emit
        self._gone = gone
        self._part_bytes = tuning.part_bytes
        self._slice_bytes = tuning.slice_bytes
        self._max_parts = tuning.max_parts
        self._stall_s = stall_s
        self._streams = [OutStream(channel) for channel in channels]
        self._queue: deque[WritePart] = deque()
        self._idents = 0
        self._fences: dict[int, int] = {}  # epoch → how many `Fenced` wait for its parts in flight
        self._stall: Timer | None = None
        self._stall_due = 0.0
        self._ended = False

    def open(self) -> None:
        """Start to read acks. A path that cannot be watched ends at once, and no other with it."""
        try:
            for stream in self._streams:
                self._loop.watch(stream.channel.fileno(), select.EPOLLIN, partial(self._ready, stream))
        except OSError as exc:
            why = f"the stream to {self.peer} cannot be watched: {exc.strerror}"
            self.end(PeerLost(why, peer=str(self.peer)))

    def write(self, epoch: int, tag: int, blocks: Sequence[CopyBlock], nbytes: int, posted: float) -> None:
        """Queue a checked write and start it."""
        write = Write(epoch, tag, nbytes, posted)
        if self._ended or len(self._queue) >= self._max_parts:
            reason = "the path has ended" if self._ended else "too many writes are waiting"
            self._emit(WriteFailed(self.peer, epoch, tag, TransferFailed(f"{self.peer}: {reason}")))
            return
        # Several streams share a large write; a small one is not worth a second header.
        share = max(self._part_bytes // 4, -(-nbytes // len(self._streams)))
        for rows in tcp_wire.cut(blocks, min(self._part_bytes, share)):
            self._idents += 1
            write.parts += 1
            self._queue.append(WritePart(write, self._idents, rows))
        if not write.parts:
            self._report(write)
            return
        self._pump_all()

    def fence(self, epoch: int) -> None:
        """Fail what is queued; say `Fenced` when what is in flight was answered."""
        error = fenced(epoch)
        dropped = [part for part in self._queue if part.write.epoch == epoch]
        if dropped:
            self._queue = deque(part for part in self._queue if part.write.epoch != epoch)
        for part in dropped:
            self._finish(part, error)
        if self._in_flight(epoch):
            self._fences[epoch] = self._fences.get(epoch, 0) + 1
        else:
            self._emit(Fenced(self.peer, epoch, True))

    def close(self) -> None:
        """Close every stream without an event. Undelivered bytes are thrown away."""
        self._ended = True
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
        for stream in self._streams:
            self._loop.unwatch(stream.channel.fileno())
            stream.channel.close(reset=stream.sending is not None or bool(stream.unanswered))

    def end(self, error: SegueError) -> None:
        """The path broke: every write fails, every waiting fence is answered (unproven). Idempotent."""
        if self._ended:
            return
        self.close()
        parts = [*self._queue]
        for stream in self._streams:
            parts += stream.unanswered.values()
            if stream.sending is not None:
                parts.append(stream.sending)
            stream.sending = None
            stream.unanswered.clear()
        self._queue.clear()
        for part in parts:
            self._finish(part, error)
        for epoch, count in self._fences.items():
            for _ in range(count):
                self._emit(Fenced(self.peer, epoch, False))
        self._fences.clear()
        self._gone(self, error)

    def _in_flight(self, epoch: int) -> bool:
        return any(
            part.write.epoch == epoch
            for s in self._streams
            for part in (*s.unanswered.values(), *([s.sending] if s.sending else []))
        )

    def _finish(self, part: WritePart, error: SegueError | None) -> None:
        write = part.write
        write.parts -= 1
        if write.error is None:
            write.error = error
        if not write.parts:
            self._report(write)

    def _report(self, write: Write) -> None:
        self._emit(write.end(self.peer, self._loop.time()))

    def _pump_all(self) -> None:
        for stream in self._streams:
            if self._ended:
                return
            if not stream.waiting:
                self._guard(stream, self._pump)

    def _ready(self, stream: OutStream, events: int) -> None:
        if events & select.EPOLLOUT:
            self._guard(stream, self._pump)
        if events & ~select.EPOLLOUT and not self._ended:
            self._guard(stream, self._read)

    def _guard(self, stream: OutStream, step: Callable[[OutStream], None]) -> None:
        try:
            step(stream)
        except SegueError as exc:
            self.end(exc)
        except OSError as exc:
            self.end(PeerLost(f"the stream to {self.peer} broke: {exc.strerror}", peer=str(self.peer)))

    def _pump(self, stream: OutStream) -> None:
        """Send until the socket is full, nothing is left or a slice was sent. The rest waits for the
        loop's next turn: a reader that keeps up would keep the loop from answers, fences and the others."""
        fd = stream.channel.fileno()
        moved = 0
        while moved < self._slice_bytes:
            part = stream.sending
            if part is None:
                if not self._queue:
                    break
                part = stream.sending = self._queue.popleft()
                part.load(self._memory)
                stream.moved_at = self._loop.time()
                self._watch_stall()
            assert part.cursor is not None
            sent = stream.channel.send_rows(part.cursor, self._slice_bytes)
            if sent < 0:
                break
            moved += sent
            stream.moved_at = self._loop.time()
            if not part.cursor.left:
                part.sent_at = stream.moved_at
                stream.unanswered[part.ident] = part
                stream.sending = part.cursor = None
        waits = stream.sending is not None or bool(self._queue)
        if waits != stream.waiting:
            stream.waiting = waits
            self._loop.change(fd, select.EPOLLIN | (select.EPOLLOUT if waits else 0))

    def _read(self, stream: OutStream) -> None:
        # One TLS record at most, so nothing stays behind where no poll would see it.
        data = stream.channel.receive(RECORD_BYTES)
        if data is None:
            return
        if not data:
            raise PeerLost(f"{self.peer} closed its stream", peer=str(self.peer))
        stream.answered_at = self._loop.time()
        stream.inbox += data
        while len(stream.inbox) >= tcp_wire.ACK.size and not self._ended:
            status, ident = tcp_wire.parse_ack(stream.inbox)
            stream.inbox = stream.inbox[tcp_wire.ACK.size :]
            part = stream.unanswered.pop(ident, None)
            if part is None:
                raise TransferFailed(f"{self.peer} answered a part that was not sent")
            part.write.refused |= status == tcp_wire.REFUSED and part.write.error is None
            self._finish(part, _refusal(self.peer, part.write.epoch, status))
            self._settle(part.write.epoch)

    def _settle(self, epoch: int) -> None:
        if epoch in self._fences and not self._in_flight(epoch):
            for _ in range(self._fences.pop(epoch)):
                self._emit(Fenced(self.peer, epoch, True))

    def _watch_stall(self, after_s: float | None = None) -> None:
        if self._stall is None:
            wait_s = self._stall_s if after_s is None else after_s
            self._stall_due = self._loop.time() + wait_s
            self._stall = self._loop.later(wait_s, self._check_stall)

    def _check_stall(self) -> None:
        self._stall = None
        now = self._loop.time()
        stuck = [since for stream in self._streams if (since := stream.stuck_since()) is not None]
        if not stuck:
            return
        left_s = min(stuck) + self._stall_s - now
        if left_s <= 0 and now - self._stall_due < self._stall_s / 2:
            self.end(PeerLost(f"{self.peer} answered nothing for {self._stall_s} s", peer=str(self.peer)))
        elif left_s <= 0:
            # We slept ourselves (a stopped process); the answers may be waiting in the socket.
            self._watch_stall(self._stall_s / 2)
        else:
            self._watch_stall(left_s)


def _refusal(peer: RankId, epoch: int, status: int) -> SegueError | None:
    if status == tcp_wire.LANDED:
        return None
    return not_granted(peer, epoch)
