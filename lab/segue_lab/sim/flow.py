"""One direction of a stream of `tcp`: what is under way in it, and which writes its bytes belong to.

The simulator reads the meaning of the bytes (which write they belong to, where they may land) from the sent
bytes, not from the receiver.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from segue.kv.transport.net import key_handshake as handshake
from segue.kv.transport.tcp import tcp_wire
from segue_lab.sim.timing import Timing
from segue_lab.sim.world import Process

#: How long a packet that does not get through waits before it is sent again.
AGAIN_S = 0.1
#: Bytes that a stream takes before its reader has read some; more than any head or answer.
CAPACITIES = (300, 2000, 1 << 16)


@dataclass(slots=True, eq=False)
class SentPart:
    """A part of a write as it was sent: where it begins in the stream, its head's size, its rows."""

    start: int
    head: int
    end: int
    epoch: int
    rows: list[tuple[int, int]]
    #: a bit of its head has changed on the way
    spoiled: bool = False

    def rows_at(self, at: int, nbytes: int) -> list[tuple[int, int]]:
        """The places of `nbytes` of its data from byte `at` of the stream on: (offset, length)."""
        skip = at - self.start - self.head
        found: list[tuple[int, int]] = []
        for offset, length in self.rows:
            if skip >= length:
                skip -= length
                continue
            take = min(length - skip, nbytes)
            found.append((offset + skip, take))
            nbytes -= take
            skip = 0
            if not nbytes:
                break
        return found


class StreamEnd(Protocol):
    """A socket at one end of a stream."""

    process: Process
    closed: bool
    error: OSError | None
    outward: Flow | None

    @property
    def host(self) -> str: ...

    def changed(self) -> None: ...

    def reset_by_peer(self) -> None: ...

    def breaks(self, delay_s: float, code: int) -> None: ...


class StreamPath(Protocol):
    """The path that a stream belongs to, and its faults."""

    timing: Timing
    slow: float
    keepalive_s: float

    def stands_still(self, source: Process, target: Process) -> bool: ...

    def carried(self, flow: Flow, at: int, data: bytes) -> bytes: ...

    def reading(self, epoch: int, ranges: list[tuple[int, int]]) -> None: ...

    def landing(self, part: SentPart | None, at: int, data: list[tuple[int, bytes]]) -> None: ...

    def in_mid_write(self) -> None: ...


class Flow:
    """One direction of a stream; `forward` is the one from the writer to the reader."""

    def __init__(
        self, sender: StreamEnd, receiver: StreamEnd, path: StreamPath, rng: random.Random, *, forward: bool
    ) -> None:
        self.sender, self.receiver = sender, receiver
        self.path = path
        self.forward = forward
        self.rng = rng
        self.capacity = rng.choice(CAPACITIES) if forward else CAPACITIES[-1]
        #: bytes that have arrived and were not read
        self.buffer = bytearray()
        self.flying = 0
        self.read = 0
        self.ended = False
        self.lost = False
        #: bytes that wait for the way to be free, in order
        self._held: deque[bytes | None] = deque()
        self._ready_at = 0.0
        #: bytes that were sent, by the simulator's own reading: those of the handshake first
        self._sent = 0
        self._skip = handshake.RESPONSE_BYTES
        self._head = bytearray()
        self.parts: deque[SentPart] = deque()

    @property
    def room(self) -> int:
        """Bytes that can be taken now."""
        return self.capacity - self.flying - len(self.buffer)

    def send(self, data: bytes) -> None:
        """Put it on its way."""
        self._note(data)
        self.flying += len(data)
        cut = self.rng.randrange(len(data)) if self.rng.random() < 0.5 else 0
        for segment in (data[:cut], data[cut:]):
            if segment:
                self._go(segment)

    def finish(self) -> None:
        """The sender sends no more."""
        self._go(None)

    def _go(self, data: bytes | None) -> None:
        world, timing, path = self.sender.process.world, self.path.timing, self.path
        took_s = timing.latency_s * self.rng.random()
        if self.forward and data is not None:
            took_s += path.slow * (timing.slice_s * self.rng.random() + len(data) / timing.link_bytes_s)
        self._ready_at = at = max(world.now + took_s, self._ready_at + 1e-9)
        world.at(at, None, self._arrive, data)

    def _arrive(self, data: bytes | None) -> None:
        self._held.append(data)
        if len(self._held) == 1:
            self._deliver()

    def _deliver(self) -> None:
        """Deliver received bytes, unless the direction is blocked; then try again later."""
        if self.lost or self.receiver.error is not None:
            return
        if self.path.stands_still(self.sender.process, self.receiver.process):
            self.sender.process.world.after(AGAIN_S, None, self._deliver)
            return
        while self._held:
            data = self._held.popleft()
            if data is None:
                self.ended = True
            elif self.receiver.closed:
                self.sender.reset_by_peer()
                return
            else:
                self.flying -= len(data)
                self.buffer += data
        self.receiver.changed()

    def take(self, nbytes: int) -> bytes:
        """Read at most so many bytes of what has arrived."""
        most = min(nbytes, len(self.buffer))
        data = bytes(self.buffer[:most])
        del self.buffer[:most]
        while self.parts and self.parts[0].end <= self.read:
            self.parts.popleft()
        self.read += most
        self.sender.changed()  # it has room again
        return data

    # ---- what was sent ---------------------------------------------------------------------------

    def _note(self, data: bytes) -> None:
        if not self.forward:
            return
        at = 0
        while at < len(data):
            if self._skip:
                step = min(self._skip, len(data) - at)
                self._skip -= step
            else:
                want = tcp_wire.HEADER.size
                if len(self._head) >= want:
                    want += tcp_wire.HEADER.unpack(self._head[:want])[2] * tcp_wire.ROW_BYTES
                step = min(want - len(self._head), len(data) - at)
                self._head += data[at : at + step]
                if len(self._head) == want > tcp_wire.HEADER.size:
                    self._begin(self._sent + step)
            at += step
            self._sent += step

    def _begin(self, data_at: int) -> None:
        """The head of a part is complete; its data comes next."""
        size = tcp_wire.HEADER.size
        _, _, count, _, epoch, _, nbytes = tcp_wire.HEADER.unpack(self._head[:size])
        words = memoryview(self._head)[size:].cast("Q").tolist()
        rows = list(zip(words[::2], words[1::2], strict=True))
        assert len(rows) == count
        head = len(self._head)
        self.parts.append(SentPart(data_at - head, head, data_at + nbytes, epoch, rows))
        self._head = bytearray()
        self._skip = nbytes

    @property
    def sending(self) -> SentPart | None:
        """The part of which the head and not all data was sent."""
        return self.parts[-1] if self.parts and self.parts[-1].end > self._sent else None

    def part_at(self, at: int) -> SentPart | None:
        """The part that byte `at` of the stream belongs to."""
        return next((part for part in self.parts if part.start <= at < part.end), None)

    def carries(self, epoch: int) -> bool:
        """Whether a part of `epoch` is on its way: begun, and not all read by a living reader."""
        gone = self.lost or self.receiver.closed or not self.receiver.process.alive
        return not gone and any(part.epoch == epoch and part.end > self.read for part in self.parts)
