"""The receiving end of `tcp`: parts land straight in the pool while their epoch is granted.

Everything here runs on the loop's thread, so a call posted to the loop runs between two
slices: that is how `fence` proves that nothing of an epoch lands any more.
"""

from __future__ import annotations

import errno
import logging
import select
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from segue.core.errors import PeerLost, PeerRefused, SegueError, TransferFailed
from segue.core.pending import PendingConnections
from segue.core.types import RankId
from segue.layout.content import Content
from segue.session.tls import explain
from segue.transport import handshake, tcp_wire
from segue.transport.epochs import Grants
from segue.transport.ioloop import IoLoop, Timer
from segue.transport.memory import Memory
from segue.transport.tcp_channel import Channel, PlainChannel, TlsChannel
from segue.transport.tcp_wire import Cursor, Header

_SCRATCH_BYTES = 256 * 1024
_MAX_STEPS = 16  # or a slice of bytes: then other streams and calls have their turn
OUT_OF_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
REST_S = 0.1

log = logging.getLogger("segue.tcp")


@dataclass(slots=True, eq=False)
class Group:
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
        slice_bytes: int,
        lowat_bytes: int,
        stall_s: float,
    ) -> None:
        self._loop = loop
        self._channel = channel
        self._fd = channel.fileno()
        self._peer = peer
        self._memory = memory
        self._grants = grants
        self._broken = broken
        self._slice_bytes = slice_bytes
        self._lowat_bytes = lowat_bytes
        self._lowat = 1
        self._stall_s = stall_s
        self._scratch = bytearray(_SCRATCH_BYTES)
        self._area: Content | None = None  # of the epoch that wrote last, and the byte ranges that it is
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
            # Whatever is still to come must be able to wake us.
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


class Stranger:
    """A connection whose other end has not yet proved that it knows the key. Under `tls` it must
    show a certificate first."""

    def __init__(
        self,
        loop: IoLoop,
        sock: socket.socket,
        key: bytes,
        deadline_s: float,
        left: Callable[[Stranger], object],
        admitted: Callable[[Stranger, handshake.Hello], None],
        tls: ssl.SSLContext | None,
        channel: Callable[[socket.socket], PlainChannel],
    ) -> None:
        self._loop = loop
        self._proof = handshake.Listener(key)
        self._frame = b""
        self._left = left
        self._admitted = admitted
        self._opening: TlsChannel | None = None
        self.channel: Channel
        if tls is None:
            self.channel = channel(sock)
        else:
            wrapped = tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
            self.channel = self._opening = TlsChannel(wrapped)
        self._fd = self.channel.fileno()
        self._timer = loop.later(deadline_s, self.close)
        loop.watch(self._fd, select.EPOLLIN, self._ready)
        if tls is None:
            self._say(self._proof.challenge())

    def close(self) -> None:
        """Drop it."""
        self._release()
        self.channel.close()

    def _release(self) -> None:
        self._timer.cancel()
        self._loop.unwatch(self._fd)
        self._left(self)

    def _say(self, frame: bytes) -> None:
        try:
            self.channel.send(frame)
        except OSError:
            return  # its end is seen where the stream is read

    def _ready(self, _events: int) -> None:
        try:
            if self._opening is not None and not self._open(self._opening):
                return
            self._read()
        except ssl.SSLError as exc:
            log.warning("a tcp stream was refused: %s", explain(exc))
            self.close()
        except OSError:
            self.close()  # its end

    def _open(self, channel: TlsChannel) -> bool:
        """One step of the TLS handshake. True when it is done, and the challenge sent."""
        wants = channel.handshake()
        self._loop.change(self._fd, wants or select.EPOLLIN)
        if wants:
            return False
        self._opening = None
        self.channel.send(self._proof.challenge())
        return True

    def _read(self) -> None:
        data = self.channel.receive(handshake.RESPONSE_BYTES - len(self._frame))
        if data is None:
            return
        self._frame += data
        if not data:
            self.close()
        elif len(self._frame) == handshake.RESPONSE_BYTES:
            try:
                hello, verdict = self._proof.accept(self._frame)
            except PeerRefused as exc:
                log.warning("a tcp stream was refused: %s", exc)
                self._say(self._proof.refuse(exc.info.text))
                self.close()
                return
            self.channel.send(verdict)
            self._release()
            self._admitted(self, hello)


class TcpListener:
    """The listening socket and everything that came in through it."""

    def __init__(
        self,
        loop: IoLoop,
        listener: socket.socket,
        key: bytes,
        tls: ssl.SSLContext | None,
        stream: Callable[[Channel, RankId, Callable[[SegueError], None]], InStream],
        gone: Callable[[RankId, SegueError], None],
        prepare: Callable[[socket.socket], None],
        channel: Callable[[socket.socket], PlainChannel],
        *,
        max_strangers: int,
        max_streams: int,
        handshake_s: float,
    ) -> None:
        self._loop = loop
        self._listener = listener
        self._key = key
        self._tls = tls
        self._stream = stream
        self._gone = gone
        self._prepare = prepare
        self._channel = channel
        self._max_streams = max_streams
        self._handshake_s = handshake_s
        self._strangers: PendingConnections[Stranger] = PendingConnections(max_strangers)
        self._count = 0
        self._pause: Timer | None = None
        self.groups: dict[RankId, Group] = {}

    def open(self) -> None:
        """Start to accept."""
        self._loop.watch(self._listener.fileno(), select.EPOLLIN, self._accept)

    def close(self) -> None:
        """Close every socket; no event."""
        self._loop.unwatch(self._listener.fileno())
        self._listener.close()
        for stranger in self._strangers:
            stranger.close()
        if self._pause is not None:
            self._pause.cancel()
        for group in self.groups.values():
            self._shut(group)
        self.groups.clear()

    def _accept(self, _events: int) -> None:
        try:
            sock, where = self._listener.accept()
        except OSError as exc:
            if exc.errno in OUT_OF_DESCRIPTORS:
                self._rest(exc)
            return  # or it left again
        sock.setblocking(False)
        if self._count >= self._max_streams:
            sock.close()
            return
        try:
            self._prepare(sock)
            stranger = Stranger(
                self._loop,
                sock,
                self._key,
                self._handshake_s,
                self._strangers.discard,
                self._admit,
                self._tls,
                self._channel,
            )
        except OSError:
            sock.close()
            return  # it has left already
        victim = self._strangers.add(stranger, str(where[0]))
        if victim is not None:
            victim.close()

    def _rest(self, exc: OSError) -> None:
        """No descriptor is free: the kernel would call us again at once, and for nothing. Nothing tells
        when one is, so this one wait is blind."""
        log.error("tcp cannot accept streams: %s", exc.strerror)
        if (oldest := self._strangers.oldest()) is not None:
            oldest.close()
        self._loop.unwatch(self._listener.fileno())
        self._pause = self._loop.later(REST_S, self.open)

    def _admit(self, stranger: Stranger, hello: handshake.Hello) -> None:
        group = self.groups.get(hello.rank)
        if group is not None and group.ident != hello.group:
            self._shut(group)  # the peer connects anew: what was left of the old streams is cut
            group = None
        if group is None:
            group = self.groups[hello.rank] = Group(hello.rank, hello.group)
        group.streams.append(self._stream(stranger.channel, hello.rank, partial(self._broken, group)))
        self._count += 1

    def _shut(self, group: Group) -> None:
        for stream in group.streams:
            stream.close()
        self._count -= len(group.streams)
        group.streams.clear()

    def _broken(self, group: Group, error: SegueError) -> None:
        self._shut(group)
        if self.groups.get(group.peer) is group:
            del self.groups[group.peer]
            self._gone(group.peer, error)
