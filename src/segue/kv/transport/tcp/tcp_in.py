"""The receiving end of `tcp`: parts land straight in the pool while their epoch is granted.

Everything here runs on the loop's thread, so a call posted to the loop runs between two
slices: that is how `fence` proves that nothing of an epoch lands any more.
"""

from __future__ import annotations

import logging
import select
import socket
from collections.abc import Callable
from functools import partial

from segue.kv.errors import PeerLost, SegueError, TransferFailed
from segue.kv.ids import RankId
from segue.kv.transport.epochs import Grants
from segue.kv.transport.memory.pool_memory import Memory
from segue.kv.transport.net.ioloop import IoLoop
from segue.kv.transport.net.silence import SilenceWatch
from segue.kv.transport.net.stream import Channel, PlainChannel
from segue.kv.transport.tcp import tcp_wire
from segue.kv.transport.tcp.tcp_net import TcpTuning
from segue.kv.transport.tcp.tcp_wire import Cursor, Header

_SCRATCH_BYTES = 256 * 1024
_MAX_STEPS = 16  # or a slice of bytes: then other streams and calls have their turn

log = logging.getLogger("segue.tcp")


class InStream:
    """One authenticated stream. `broken` is called, once, when it can carry nothing more."""

    def __init__(
        self,
        loop: IoLoop,
        channel: Channel,
        peer: RankId,
        memory: Memory,
        grants: Grants,
        broken: Callable[[SegueError], None],
        *,
        tuning: TcpTuning,
        stall_s: float,
    ) -> None:
        self._loop = loop
        self._channel = channel
        self._fd = channel.fileno()
        self._peer = peer
        self._memory = memory
        self._grants = grants
        self._broken = broken
        self._slice_bytes = tuning.slice_bytes
        self._lowat_bytes = tuning.lowat_bytes
        self._lowat = 1
        self._scratch = bytearray(_SCRATCH_BYTES)
        self._head = bytearray()
        self._header: Header | None = None
        self._cursor: Cursor | None = None  # while bytes land
        self._drain = 0  # bytes still to throw away
        self._status = tcp_wire.LANDED
        self._moved_at = 0.0
        self._taken = 0  # bytes in this turn
        self._silence = SilenceWatch(loop, stall_s, self._owed_since, self._stalled)
        self._closed = False
        loop.watch(self._fd, select.EPOLLIN, self._ready)
        if channel.buffered:  # the peer's first bytes may have come with the last of the handshake
            loop.post(partial(self._ready, 0))

    def close(self) -> None:
        """Stop reading and close. Idempotent."""
        self._silence.stop()
        self._closed = True
        self._loop.unwatch(self._fd)
        self._channel.close()

    def _ready(self, _events: int) -> None:
        if self._closed:
            return
        try:
            steps, self._taken = 1, 0
            while (more := self._step()) and steps < _MAX_STEPS and self._taken < self._slice_bytes:
                steps += 1
            if more and self._channel.buffered:  # no poll sees what is inside
                self._loop.post(partial(self._ready, 0))
            # The rest of the bytes, however few, must be able to wake us.
            self._set_lowat(min(self._cursor.left, self._lowat_bytes) if self._cursor is not None else 1)
        except SegueError as exc:
            self._broken(exc)
        except OSError as exc:
            self._broken(PeerLost(f"the stream of {self._peer} broke: {exc.strerror}", peer=str(self._peer)))

    def _step(self) -> bool:
        """Read once. True when there may be more to read right now."""
        self._moved_at = self._loop.time()
        if self._drain:
            return self._throw_away()
        if self._cursor is not None:
            return self._land(self._cursor)
        want = tcp_wire.HEADER.size if self._header is None else self._header.rows * tcp_wire.ROW_BYTES
        data = self._channel.receive(want - len(self._head))
        if data is None:
            return False
        self._check_end(len(data))
        self._head += data
        if len(self._head) == want:
            head, self._head = self._head, bytearray()
            if self._header is None:
                self._header = tcp_wire.parse_header(head)
                self._silence.start()
            else:
                self._begin(self._header, head)
        return True

    def _begin(self, header: Header, data: bytearray) -> None:
        rows = tcp_wire.parse_rows(data, header)
        grant = self._grants.find(self._peer, header.epoch)
        if grant is None:
            self._status, self._drain = tcp_wire.REFUSED, header.nbytes
            return
        if not grant.holds(rows, self._memory.nbytes):
            text = f"{self._peer} writes outside the pages granted to epoch {header.epoch:x}"
            log.error("%s: its streams are closed", text)
            raise TransferFailed(text, retryable=False)
        # Whether the epoch is still granted is looked up before each slice.
        self._memory.to_addresses(rows)
        self._status, self._cursor = tcp_wire.LANDED, Cursor(rows)

    def _land(self, cursor: Cursor) -> bool:
        assert self._header is not None
        if (self._peer, self._header.epoch) not in self._grants:  # fenced between two slices
            self._status, self._drain, self._cursor = tcp_wire.REFUSED, cursor.left, None
            return True
        moved = self._channel.receive_rows(cursor, self._slice_bytes)
        self._check_end(moved)
        self._taken += max(moved, 0)
        if not cursor.left:
            self._answer()
            return True
        return moved >= (1 if self._channel.buffered else self._lowat_bytes)

    def _throw_away(self) -> bool:
        moved = self._channel.discard(self._scratch, self._drain)
        if moved < 0:
            return False
        self._check_end(moved)
        self._taken += moved
        self._drain -= moved
        if not self._drain:
            self._answer()
        return True

    def _answer(self) -> None:
        assert self._header is not None
        ack = tcp_wire.pack_ack(self._status, self._header.part)
        self._header = self._cursor = None
        if self._channel.send(ack) != len(ack):
            raise TransferFailed(f"{self._peer} does not read the answers to its writes")

    def _set_lowat(self, nbytes: int) -> None:
        """Sleep until this much is there: one wake-up and one call for many segments."""
        if nbytes != self._lowat and isinstance(self._channel, PlainChannel):
            self._channel.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)
            self._lowat = nbytes

    def _check_end(self, moved: int) -> None:
        if moved == 0:
            where = "" if self._header is None else " in the middle of a write"
            raise PeerLost(f"{self._peer} closed its stream{where}", peer=str(self._peer))

    def _owed_since(self) -> float | None:
        """The rest of a part that has begun is owed."""
        return None if self._header is None else self._moved_at

    def _stalled(self) -> None:
        self._broken(PeerLost(f"{self._peer} stalled in the middle of a write", peer=str(self._peer)))


class InStreams:
    """The stream of each writer that has proven itself, at most `max_streams`.

    stream: makes the stream of an authenticated channel. gone: hears of a peer whose stream has ended.
    """

    def __init__(
        self,
        stream: Callable[[Channel, RankId, Callable[[SegueError], None]], InStream],
        gone: Callable[[RankId, SegueError], None],
        max_streams: int,
    ) -> None:
        self._stream = stream
        self._gone = gone
        self._max_streams = max_streams
        self.of: dict[RankId, InStream] = {}

    @property
    def full(self) -> bool:
        """Nobody else is let in."""
        return len(self.of) >= self._max_streams

    def admit(self, channel: Channel, peer: RankId, verdict: bytes) -> None:
        """See `AuthenticatedListener`."""
        channel.send(verdict)
        stream: InStream = self._stream(channel, peer, lambda error: self._broken(peer, stream, error))
        if (old := self.of.get(peer)) is not None:
            old.close()  # the peer connects anew: what was left of its old stream is cut
        self.of[peer] = stream

    def close(self) -> None:
        """Close every stream; no event."""
        for stream in self.of.values():
            stream.close()
        self.of.clear()

    def _broken(self, peer: RankId, stream: InStream, error: SegueError) -> None:
        stream.close()
        if self.of.get(peer) is stream:
            del self.of[peer]
            self._gone(peer, error)
