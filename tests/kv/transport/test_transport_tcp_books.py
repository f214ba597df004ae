"""The tables of `tcp` for parts, fences and streams, turn by turn and without a network."""

from __future__ import annotations

import errno
import itertools
import select
import socket
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from test_transport_stall import STALL_S, VirtualLoop

from areas import whole
from ranks import rank
from segue.kv.errors import PeerLost, SegueError, TransferFailed
from segue.kv.layout.blocks import CopyBlock
from segue.kv.transport.base import Fenced, TransportEvent, WriteFailed, Written
from segue.kv.transport.epochs import Grants
from segue.kv.transport.memory.pool_memory import Memory, Region, host_region
from segue.kv.transport.net import key_handshake as handshake
from segue.kv.transport.net.stream import PlainChannel
from segue.kv.transport.tcp import tcp_wire
from segue.kv.transport.tcp.tcp_in import InStream, TcpListener
from segue.kv.transport.tcp.tcp_net import TcpTuning
from segue.kv.transport.tcp.tcp_out import PeerWriter
from segue.kv.transport.tcp.tcp_wire import LANDED, REFUSED

MiB = 2**20
PEER = rank("bbbb")


class Line:
    """A channel to a reader that takes what there is room for and answers when the test says so."""

    buffered = False
    numbers = itertools.count(100)

    def __init__(self, room: int = MiB) -> None:
        self.room = room
        self.fd = next(self.numbers)
        self.data: list[bytes] = []
        self.closed = False

    def fileno(self) -> int:
        return self.fd

    def send_rows(self, cursor: tcp_wire.Cursor, _limit_bytes: int) -> int:
        nbytes = min(cursor.left, self.room)
        if not nbytes:
            return -1
        self.room -= nbytes
        cursor.advance(nbytes)
        return nbytes

    def receive(self, nbytes: int) -> bytes | None:
        """A part of the received bytes; the rest stays where no poll sees it, as in a record of TLS."""
        if not self.data:
            return None
        data = self.data.pop(0)
        assert len(data) <= nbytes, "the rest would wait until more comes"
        return data

    def close(self, *, reset: bool = False) -> None:
        self.closed = True


class Loops(VirtualLoop):
    """One that knows several descriptors; some it cannot watch."""

    def __init__(self, *, full: bool = False) -> None:
        super().__init__()
        self.of: dict[int, Callable[[int], None]] = {}
        self.posted: list[Callable[[], None]] = []
        self.asked: dict[int, int] = {}
        self._full = full

    def change(self, fd: int, events: int) -> None:
        self.asked[fd] = events

    def watch(self, fd: int, _events: int, ready: Callable[[int], None]) -> None:
        if self._full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.of[fd] = ready

    def unwatch(self, fd: int) -> None:
        self.of.pop(fd, None)

    def post(self, call: Callable[[], None]) -> None:
        self.posted.append(call)


class Path:
    """A path by some lines, and what it told."""

    def __init__(self, *lines: Line, loop: Loops | None = None, **tuning: int) -> None:
        self.loop, self.lines = loop or Loops(), lines
        self.events: list[TransportEvent] = []
        self.ends: list[SegueError] = []
        self.writer = PeerWriter(
            self.loop,  # type: ignore[arg-type]
            PEER,
            list(lines),  # type: ignore[arg-type]
            Memory([Region(0, MiB)]),
            MiB,
            self.events.append,
            lambda _path, error: self.ends.append(error),
            tuning=TcpTuning(**tuning),
            stall_s=STALL_S,
        )
        self.writer.open()

    def write(self, epoch: int, tag: int, nbytes: int = 100) -> None:
        self.writer.write(epoch, tag, [CopyBlock(0, 0, 1, nbytes)], nbytes, 0.0)

    def answer(self, part: int, status: int = LANDED, line: int = 0) -> None:
        self.hear(tcp_wire.pack_ack(status, part), line)

    def hear(self, data: bytes, line: int = 0) -> None:
        self.lines[line].data.append(data)
        self.loop.of[self.lines[line].fd](select.EPOLLIN)

    def room(self, line: int) -> None:
        self.lines[line].room = MiB
        self.loop.of[self.lines[line].fd](select.EPOLLOUT)

    def kinds(self) -> list[type]:
        return [type(event) for event in self.events]


# ---- the writing end ------------------------------------------------------------------------------


@pytest.mark.parametrize("at", range(1, 2 * tcp_wire.ACK.size))
def test_answers_may_come_in_pieces_cut_anywhere(at: int) -> None:
    path = Path(Line())
    path.write(9, 1)
    path.write(9, 2)
    data = tcp_wire.pack_ack(LANDED, 1) + tcp_wire.pack_ack(LANDED, 2)
    path.hear(data[:at])
    assert path.kinds() == [Written] * (at // tcp_wire.ACK.size)
    path.hear(data[at:])
    assert [(type(e), getattr(e, "tag", 0)) for e in path.events] == [(Written, 1), (Written, 2)]
    assert not path.ends
    path.writer.close()


@pytest.mark.parametrize("statuses", list(itertools.product((LANDED, REFUSED), repeat=3)))
def test_a_write_has_landed_only_if_each_of_its_parts_has_in_whatever_order(
    statuses: tuple[int, ...],
) -> None:
    path = Path(Line(), part_bytes=100)
    path.write(9, 1, 300)
    for part, status in enumerate(statuses, 1):
        assert not path.events
        path.answer(part, status)
    (end,) = path.events
    if REFUSED in statuses:
        assert isinstance(end, WriteFailed)
        assert end.refused, "nothing else is wrong"
    else:
        assert isinstance(end, Written)
        assert end.nbytes == 300
    path.writer.close()


def test_a_fence_waits_for_the_rest_of_a_part_that_is_half_sent_on_any_stream() -> None:
    """Unsent bytes are read from our pages, which must not belong to another request by then."""
    path = Path(Line(50), Line(50))
    path.write(9, 1)
    path.write(10, 1)
    for epoch in (9, 10):
        path.writer.fence(epoch)
    assert path.events == []
    for line, epoch in ((1, 10), (0, 9)):
        path.room(line)
        assert path.events == [], "it is sent, and may not have landed"
        path.answer(epoch - 8, line=line)
        assert path.kinds() == [Written, Fenced]
        assert path.events.pop() == Fenced(PEER, epoch, True)
        path.events.clear()
    path.writer.close()


@pytest.mark.parametrize("breaks", [False, True])
def test_each_fence_has_an_answer_of_its_own_after_the_end_of_what_it_waits_for(breaks: bool) -> None:
    path = Path(Line())
    path.write(9, 1)
    for _ in range(3):
        path.writer.fence(9)
    path.write(10, 1)
    if breaks:
        path.hear(b"")
        assert path.kinds() == [WriteFailed, WriteFailed, *[Fenced] * 3]
        assert len(path.ends) == 1
    else:
        path.answer(1)
        assert path.kinds() == [Written, *[Fenced] * 3]
    assert {e.proven for e in path.events if isinstance(e, Fenced)} == {not breaks}
    path.writer.close()


def test_what_waits_for_one_peer_is_bounded() -> None:
    path = Path(Line(0), max_parts=3)
    for tag in range(6):
        path.write(9, tag)
    assert [(type(e), getattr(e, "tag", 0)) for e in path.events] == [(WriteFailed, 4), (WriteFailed, 5)]
    assert "too many" in str(path.events[0].error)  # type: ignore[union-attr]
    path.room(0)
    for part in range(1, 5):
        path.answer(part)
    assert path.kinds()[2:] == [Written] * 4
    path.writer.close()


def test_a_path_that_cannot_be_watched_ends_alone() -> None:
    """A host has so many watches: one too many must not end the thread under all other paths."""
    line = Line()
    path = Path(line, loop=Loops(full=True))
    assert [type(error) for error in path.ends] == [PeerLost]
    assert line.closed
    path.write(9, 1)
    assert path.kinds() == [WriteFailed]


# ---- the receiving end ----------------------------------------------------------------------------


class Incoming:
    """A stream from a writer at the other end of `theirs`; epochs 9 to 19 are granted."""

    def __init__(self) -> None:
        ours, self.theirs = socket.socketpair()
        for sock in (ours, self.theirs):
            sock.setblocking(False)
        self.array = np.zeros(4096, np.uint8)
        self.loop, self.ends = Loops(), list[SegueError]()
        self.grants = Grants()
        for epoch in range(9, 20):
            self.grants.add(PEER, epoch, whole(4096))
        self.channel = PlainChannel(ours)
        self.stream = InStream(
            self.loop,  # type: ignore[arg-type]
            self.channel,
            PEER,
            Memory([host_region(self.array)]),
            self.grants,
            self.ends.append,
            tuning=TcpTuning(slice_bytes=1000, lowat_bytes=1),
            stall_s=STALL_S,
        )

    def hears(self, data: bytes) -> None:
        self.theirs.sendall(data)
        while select.select([self.channel.fileno()], [], [], 0)[0] and not self.ends:
            self.loop.of[self.channel.fileno()](select.EPOLLIN)

    def answers(self) -> list[tuple[int, int]]:
        data = self.theirs.recv(1000)
        return [tcp_wire.parse_ack(data[at:]) for at in range(0, len(data), tcp_wire.ACK.size)]

    def close(self) -> None:
        self.stream.close()
        self.theirs.close()


@pytest.fixture
def incoming() -> Iterator[Incoming]:
    made = Incoming()
    yield made
    made.close()


def part(epoch: int, ident: int, start: int, nbytes: int) -> bytes:
    """A part of one row, all of whose bytes are its number."""
    row = np.array([[start, nbytes]], "<u8").tobytes()
    return tcp_wire.pack_header(epoch, ident, nbytes, row) + bytes([ident]) * nbytes


def test_only_the_bytes_of_a_refused_part_are_thrown_away(incoming: Incoming) -> None:
    """The bytes that follow at once, as from a writer that never waits, belong to another hand-off."""
    parts = [part(epoch, n, 100 * n, 100) for n, epoch in enumerate((9, 1, 10, 2, 2, 11), 1)]
    incoming.hears(b"".join(parts))
    statuses = [LANDED, REFUSED, LANDED, REFUSED, REFUSED, LANDED]
    assert incoming.answers() == list(zip(statuses, range(1, 7), strict=True))
    landed = [n if status == LANDED else 0 for n, status in enumerate([REFUSED, *statuses])]
    assert incoming.array[:700:100].tolist() == landed
    assert np.count_nonzero(incoming.array) == 300
    assert not incoming.ends


@pytest.mark.parametrize(
    ("epoch", "sent"),
    [(9, tcp_wire.HEADER.size), (9, tcp_wire.HEADER.size + 5), (9, 60), (1, tcp_wire.HEADER.size), (1, 60)],
)
def test_a_writer_that_stands_still_anywhere_in_a_part_is_cut(
    incoming: Incoming, epoch: int, sent: int
) -> None:
    """In its rows, in bytes that land and in bytes that are thrown away."""
    incoming.hears(part(epoch, 1, 0, 100)[:sent])
    incoming.loop.wait(2.5 * STALL_S)
    assert ["stalled" in str(error) for error in incoming.ends] == [True]


@pytest.mark.parametrize("epoch", [9, 1])
def test_a_writer_with_nothing_to_say_is_not_cut(incoming: Incoming, epoch: int) -> None:
    incoming.hears(part(epoch, 1, 0, 100))
    incoming.loop.wait(10 * STALL_S)
    assert not incoming.ends


def test_each_epoch_of_a_stream_is_held_against_its_own_area(incoming: Incoming) -> None:
    incoming.hears(part(9, 1, 0, 10))
    incoming.grants.add(PEER, 20, whole(50))
    incoming.hears(part(20, 2, 40, 10))
    incoming.hears(part(9, 3, 60, 10))
    assert [status for status, _ in incoming.answers()] == [LANDED] * 3
    incoming.hears(part(20, 4, 41, 10))
    assert ["outside the pages granted" in str(error) for error in incoming.ends] == [True]
    assert np.count_nonzero(incoming.array) == 30


class Inside:
    """A channel under TLS that has decrypted all of `data` already: no poll tells of it."""

    buffered = True

    def __init__(self, data: bytes) -> None:
        self.data, self.sent, self.closed = data, b"", False

    def fileno(self) -> int:
        return 7

    def receive(self, nbytes: int) -> bytes | None:
        assert not self.closed
        found, self.data = self.data[:nbytes], self.data[nbytes:]
        return found or None

    def receive_rows(self, cursor: tcp_wire.Cursor, limit_bytes: int) -> int:
        assert not self.closed
        nbytes = min(cursor.left, limit_bytes, len(self.data))
        self.data = self.data[nbytes:]
        cursor.advance(nbytes)
        return nbytes or -1

    def send(self, data: bytes) -> int:
        self.sent += data
        return len(data)

    def close(self, *, reset: bool = False) -> None:
        self.closed = True


@pytest.mark.parametrize("closes", [False, True])
def test_parts_that_are_decrypted_already_are_read_without_a_poll_until_the_stream_is_closed(
    closes: bool,
) -> None:
    loop, grants, ends = Loops(), Grants(), list[SegueError]()
    grants.add(PEER, 9, whole(4096))
    channel = Inside(b"".join(part(9, n, 0, 10) for n in range(50)))
    stream = InStream(
        loop,  # type: ignore[arg-type]
        channel,  # type: ignore[arg-type]
        PEER,
        Memory([host_region(np.zeros(4096, np.uint8))]),
        grants,
        ends.append,
        tuning=TcpTuning(),
        stall_s=STALL_S,
    )
    loop.of[7](select.EPOLLIN)
    turns = 1
    while loop.posted:
        if closes:
            stream.close()
        loop.posted.pop(0)()
        turns += 1
    assert (
        len(channel.sent) < 50 * tcp_wire.ACK.size if closes else len(channel.sent) == 50 * tcp_wire.ACK.size
    )
    assert turns > 1, "others have their turn between"
    assert not ends
    stream.close()


def test_a_stream_that_was_closed_has_not_stalled(incoming: Incoming) -> None:
    incoming.hears(part(9, 1, 0, 100)[:60])
    incoming.stream.close()
    incoming.loop.wait(10 * STALL_S)
    assert not incoming.ends


@pytest.mark.parametrize("taken", [0, 5])
def test_a_writer_that_does_not_read_its_answers_is_cut(
    incoming: Incoming, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half an answer would put all later ones out of step, and a lost one leaves its write without an end."""
    monkeypatch.setattr(incoming.channel, "send", lambda _data: taken)
    incoming.hears(part(9, 1, 0, 10))
    assert [type(error) for error in incoming.ends] == [TransferFailed]


def test_a_stream_that_cannot_be_watched_takes_no_place() -> None:
    def full(*_args: Any) -> InStream:
        raise OSError(errno.ENOSPC, "No space left on device")

    ours, theirs = socket.socketpair()
    listener = TcpListener(
        Loops(),  # type: ignore[arg-type]
        ours,
        bytes(16),
        full,
        lambda *_args: None,
        lambda sock: PlainChannel(sock),
        tuning=TcpTuning(max_streams=1),
        handshake_s=1.0,
    )
    for _ in range(3):
        with pytest.raises(OSError, match="No space"):
            listener._admit(PlainChannel(theirs), handshake.StreamHello(PEER, bytes(16), 0, 1), b"yes")
    assert listener._open_channel(theirs) is not None
    for sock in (ours, theirs):
        sock.close()
