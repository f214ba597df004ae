"""The receiving end of `tcp`: parts land straight in the pool while their epoch is granted.

Everything here runs on the loop's thread, so a call posted to the loop runs between two
slices: that is how `fence` proves that nothing of an epoch lands any more.
"""

from __future__ import annotations

import logging
import select
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from segue.kv.errors import PeerLost, SegueError, TransferFailed
from segue.kv.ids import RankId
from segue.kv.layout.content import Content
from segue.kv.transport.epochs import Grants
from segue.kv.transport.memory.pool_memory import Memory
from segue.kv.transport.net import key_handshake as handshake
from segue.kv.transport.net.ioloop import IoLoop, Timer
from segue.kv.transport.net.listener import AuthenticatedListener
from segue.kv.transport.net.stream import Channel, PlainChannel
from segue.kv.transport.tcp import tcp_wire
from segue.kv.transport.tcp.tcp_net import TcpTuning
from segue.kv.transport.tcp.tcp_wire import Cursor, Header

_SCRATCH_BYTES = 256 * 1024
_MAX_STEPS = 16  # or a slice of bytes: then other streams and calls have their turn

log = logging.getLogger("segue.tcp")


@dataclass(slots=True, eq=False)
class StreamGroup:
    """All streams of one `connect` of one peer."""

    peer: RankId
    ident: bytes
    streams: list[InStream] = field(default_factory=list)


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
        self._stall_s = stall_s
        self._scratch = bytearray(_SCRATCH_BYTES)
        self._area: Content | None = None  # area of the epoch that wrote last; its byte ranges
        self._ranges: tcp_wire.Rows = np.empty((0, 2), np.uint64)
        self._head = bytearray()
        self._header: Header | None = None
        self._cursor: Cursor | None = None  # while bytes land
        self._drain = 0  # bytes still to throw away
        self._status = tcp_wire.LANDED
        self._moved = False
        self._taken = 0  # bytes in this turn
        self._stall: Timer | None = None
        self._closed = False
        loop.watch(self._fd, select.EPOLLIN, self._ready)
        if channel.buffered:  # the peer's first bytes may have come with the last of the handshake
            loop.post(partial(self._ready, 0))

    def close(self) -> None:
        """Stop reading and close. Idempotent."""
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
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
        self._moved = True
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
                self._watch_stall()
            else:
                self._begin(self._header, head)
        return True

    def _begin(self, header: Header, data: bytearray) -> None:
        rows = tcp_wire.parse_rows(data, header)
        area = self._grants.area(self._peer, header.epoch)
        if area is None:
            self._status, self._drain = tcp_wire.REFUSED, header.nbytes
            return
        if area is not self._area:
            self._area, self._ranges = area, tcp_wire.ranges_of(area, self._memory.nbytes)
        if not tcp_wire.inside(rows, self._ranges):
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

    def _watch_stall(self) -> None:
        if self._stall is None:
            self._moved = False
            self._stall = self._loop.later(self._stall_s, self._check_stall)

    def _check_stall(self) -> None:
        self._stall = None
        if self._header is None:
            return
        if not self._moved:
            self._broken(PeerLost(f"{self._peer} stalled in the middle of a write", peer=str(self._peer)))
            return
        self._watch_stall()


class TcpListener:
    """Every stream that came in and has proven itself, by the peer and its `connect`.

    stream: makes the stream of an authenticated channel. gone: hears of a peer whose streams have ended.
    """

    def __init__(
        self,
        loop: IoLoop,
        sock: socket.socket,
        key: bytes,
        stream: Callable[[Channel, RankId, Callable[[SegueError], None]], InStream],
        gone: Callable[[RankId, SegueError], None],
        channel: Callable[[socket.socket], Channel],
        *,
        tuning: TcpTuning,
        handshake_s: float,
    ) -> None:
        self._stream = stream
        self._gone = gone
        self._channel = channel
        self._max_streams = tuning.max_streams
        self._count = 0
        self.groups: dict[RankId, StreamGroup] = {}
        self.listener = AuthenticatedListener(
            loop,
            sock,
            key,
            self._open_channel,
            self._admit,
            name="tcp",
            handshake_s=handshake_s,
            max_pending=tuning.max_pending,
        )

    def close(self) -> None:
        """Close every socket; no event."""
        self.listener.close()
        for group in self.groups.values():
            self._shut(group)
        self.groups.clear()

    def _open_channel(self, sock: socket.socket) -> Channel | None:
        return self._channel(sock) if self._count < self._max_streams else None

    def _admit(self, channel: Channel, hello: handshake.StreamHello, verdict: bytes) -> None:
        channel.send(verdict)
        group = self.groups.get(hello.rank)
        if group is not None and group.ident != hello.group:
            self._shut(group)  # the peer connects anew: what was left of the old streams is cut
            group = None
        if group is None:
            group = self.groups[hello.rank] = StreamGroup(hello.rank, hello.group)
        group.streams.append(self._stream(channel, hello.rank, partial(self._broken, group)))
        self._count += 1

    def _shut(self, group: StreamGroup) -> None:
        for stream in group.streams:
            stream.close()
        self._count -= len(group.streams)
        group.streams.clear()

    def _broken(self, group: StreamGroup, error: SegueError) -> None:
        self._shut(group)
        if self.groups.get(group.peer) is group:
            del self.groups[group.peer]
            self._gone(group.peer, error)
