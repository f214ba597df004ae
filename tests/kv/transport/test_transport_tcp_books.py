"""The tables of `tcp` for parts, fences and streams, turn by turn, without a network and in virtual time."""

from __future__ import annotations

import errno
import fcntl
import itertools
import select
import socket
import sys
import termios
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from areas import whole
from ranks import rank
from segue.kv.errors import PeerLost, SegueError, TransferFailed
from segue.kv.layout.blocks import CopyBlock
from segue.kv.transport.base import Fenced, TransportEvent, WriteFailed, Written
from segue.kv.transport.epochs import Grants
from segue.kv.transport.memory.pool_memory import Memory, Region, host_region
from segue.kv.transport.net.ioloop import Timer
from segue.kv.transport.net.stream import PlainChannel
from segue.kv.transport.tcp import tcp_wire
from segue.kv.transport.tcp.tcp_in import InStream, InStreams
from segue.kv.transport.tcp.tcp_net import TcpTuning
from segue.kv.transport.tcp.tcp_out import PeerWriter
from segue.kv.transport.tcp.tcp_wire import LANDED, REFUSED
from segue.kv.transport.write_book import Write

MiB = 2**20
STALL_S = 1.0
PEER = rank("bbbb")


class Line:
    """A channel to a reader that takes what there is room for and answers when the test says so."""

    buffered = False
    numbers = itertools.count(100)

    def __init__(self, room: int = MiB) -> None:
        self.room, self.sent = room, 0
        self.fd = next(self.numbers)
        self.data: list[bytes] = []
        self.closed = False

    def fileno(self) -> int:
        return self.fd

    def send_rows(self, cursor: tcp_wire.Cursor, limit_bytes: int) -> int:
        nbytes = min(cursor.left, self.room, limit_bytes)
        if not nbytes:
            return -1
        self.room -= nbytes
        self.sent += nbytes
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


class Loops:
    """The loop's face to streams; its clock is the test's. It cannot watch if it is `full`."""

    def __init__(self, *, full: bool = False) -> None:
        self.now = 0.0
        self.of: dict[int, Callable[[int], None]] = {}
        self.posted: list[Callable[[], None]] = []
        self.asked: dict[int, int] = {}
        self._full = full
        self._timers: list[tuple[float, Timer]] = []

    def time(self) -> float:
        return self.now

    def change(self, fd: int, events: int) -> None:
        self.asked[fd] = events

    def watch(self, fd: int, events: int, ready: Callable[[int], None]) -> None:
        if self._full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.of[fd], self.asked[fd] = ready, events

    def unwatch(self, fd: int) -> None:
        self.of.pop(fd, None)

    def post(self, call: Callable[[], None]) -> None:
        self.posted.append(call)

    def later(self, delay_s: float, call: Callable[[], None]) -> Timer:
        timer = Timer(call)
        self._timers.append((self.now + delay_s, timer))
        return timer

    def wait(self, seconds: float, *, asleep: bool = False) -> None:
        """Time passes, and what is due is called in time; or at the end, of a process that was stopped."""
        end = self.now + seconds
        while due := [entry for entry in self._timers if entry[0] <= end]:
            entry = min(due, key=lambda found: found[0])
            self._timers.remove(entry)
            self.now = end if asleep else max(self.now, entry[0])
            if entry[1].call is not None:
                entry[1].call()
        self.now = end


class Path:
    """A path by some lines, and what it told."""

    def __init__(self, line: Line, loop: Loops | None = None, **tuning: int) -> None:
        self.loop, self.line = loop or Loops(), line
        self.events: list[TransportEvent] = []
        self.ends: list[SegueError] = []
        self.writer = PeerWriter(
            self.loop,  # type: ignore[arg-type]
            PEER,
            line,  # type: ignore[arg-type]
            Memory([Region(0, MiB)]),
            MiB,
            self.events.append,
            lambda _path, error: self.ends.append(error),
            tuning=TcpTuning(**tuning),
            stall_s=STALL_S,
        )
        self.writer.open()

    def write(self, epoch: int, tag: int, nbytes: int = 100) -> None:
        self.writer.write(Write(epoch, tag, nbytes, 0.0), [CopyBlock(0, 0, 1, nbytes)])

    def answer(self, part: int, status: int = LANDED) -> None:
        self.hear(tcp_wire.pack_ack(status, part))

    def hear(self, data: bytes) -> None:
        self.line.data.append(data)
        self.loop.of[self.line.fd](select.EPOLLIN)

    def room(self) -> None:
        self.line.room = MiB
        self.loop.of[self.line.fd](select.EPOLLOUT)

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


def test_a_fence_waits_for_the_rest_of_a_part_that_is_half_sent() -> None:
    """Unsent bytes are read from our pages, which must not belong to another request by then."""
    path = Path(Line(50))
    path.write(9, 1)
    path.writer.fence(9)
    assert path.events == []
    path.room()
    assert path.events == [], "it is sent, and may not have landed"
    path.answer(1)
    assert path.kinds() == [Written, Fenced]
    assert path.events[-1] == Fenced(PEER, 9, True)
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


def test_a_fence_fails_what_waits_of_its_own_epoch_alone() -> None:
    path = Path(Line(50))
    for tag, epoch in enumerate((9, 9, 10)):
        path.write(epoch, tag)
    path.writer.fence(9)
    assert [(type(e), getattr(e, "tag", 0)) for e in path.events] == [(WriteFailed, 1)]
    path.room()
    for part in (1, 2):
        path.answer(part)
    assert path.kinds()[1:] == [Written, Fenced, Written]
    path.writer.close()


def test_an_answer_to_nothing_ends_the_path() -> None:
    path = Path(Line())
    path.answer(1234)
    assert [type(error) for error in path.ends] == [TransferFailed]


def test_what_waits_for_one_peer_is_bounded() -> None:
    path = Path(Line(0), max_parts=3)
    for tag in range(6):
        path.write(9, tag)
    assert [(type(e), getattr(e, "tag", 0)) for e in path.events] == [(WriteFailed, 4), (WriteFailed, 5)]
    assert "too many" in str(path.events[0].error)  # type: ignore[union-attr]
    path.room()
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


def test_a_reader_that_keeps_up_does_not_keep_the_writer_from_its_other_work() -> None:
    """Each turn of the loop sends one slice; what comes between two turns (a fence, answers) is heard."""
    line = Line(10**9)
    path = Path(line, part_bytes=1000, slice_bytes=2500, max_parts=10_000)
    for tag in range(2):
        path.write(9, tag, 20_000)
    assert 2500 <= line.sent < 4000
    for _ in range(3):
        before = line.sent
        path.loop.of[line.fd](select.EPOLLOUT)
        assert 0 < line.sent - before < 4000
    assert path.loop.asked[line.fd] & select.EPOLLOUT
    before = line.sent
    path.writer.fence(9)
    assert [(type(e), getattr(e, "tag", 0)) for e in path.events] == [(WriteFailed, 1)], "the other has begun"
    for _ in range(2):
        path.loop.of[line.fd](select.EPOLLOUT)
    assert line.sent - before < 2000, "what had begun is ended, nothing else begins"
    assert not path.loop.asked[line.fd] & select.EPOLLOUT
    path.writer.close()


# ---- who has stalled, and who has not -----------------------------------------------------------


def test_a_part_that_waits_behind_others_has_not_stalled_while_answers_come() -> None:
    path = Path(Line())
    for tag in range(5):
        path.write(9, tag)
    for part in range(1, 6):
        path.loop.wait(0.8 * STALL_S)
        path.answer(part)
    assert path.kinds() == 5 * [Written]
    assert not path.ends
    path.writer.close()


@pytest.mark.parametrize("answered", [True, False])
def test_a_writer_that_was_stopped_reads_the_answers_that_wait_before_it_ends_a_path(answered: bool) -> None:
    path = Path(Line())
    path.write(9, 1)
    path.loop.wait(10 * STALL_S, asleep=True)
    assert not path.ends
    if answered:
        path.answer(1)
    path.loop.wait(STALL_S)
    assert path.kinds() == [Written if answered else WriteFailed]
    assert len(path.ends) == (not answered)
    path.writer.close()


def test_a_reader_that_answered_for_a_while_and_then_no_more_ends_the_path() -> None:
    path = Path(Line())
    for tag in (1, 2):
        path.write(9, tag)
    path.loop.wait(0.8 * STALL_S)
    path.answer(1)
    path.loop.wait(2 * STALL_S)
    assert path.kinds() == [Written, WriteFailed]
    assert len(path.ends) == 1


@pytest.mark.parametrize("stuck", ["what is sent", "the answers"])
def test_each_direction_of_a_stream_is_judged_on_its_own(stuck: str) -> None:
    """That answers come says nothing of what cannot be sent, and the other way round."""
    head = tcp_wire.HEADER.size + tcp_wire.ROW_BYTES
    path = Path(Line(8 * (100 + head) + 50))
    for tag in range(8 + 1):
        path.write(9, tag)
    for part in range(1, 4):
        assert not path.ends or part == 3, "sooner than its time"
        path.loop.wait(0.6 * STALL_S)
        if stuck == "what is sent":
            path.answer(part) if not path.ends else None
        else:
            path.line.room += 1
            path.loop.of.get(path.line.fd, print)(select.EPOLLOUT)
    assert ["answered nothing" in str(error) for error in path.ends] == [True]


def test_a_fence_that_comes_after_the_end_of_a_half_sent_part_is_answered() -> None:
    path = Path(Line(0))
    path.write(9, 1)
    path.loop.wait(3 * STALL_S)
    for epoch in (9, 10):
        path.writer.fence(epoch)
    assert path.kinds() == [WriteFailed, Fenced, Fenced]
    assert path.events[1:] == [Fenced(PEER, 9, False), Fenced(PEER, 10, True)], "what was sent may still land"


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

    def unread(self) -> int:
        """Bytes that wait in the socket."""
        found = fcntl.ioctl(self.channel.fileno(), termios.FIONREAD, bytes(4))
        return int.from_bytes(found, sys.byteorder)

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


def test_a_stream_on_which_bytes_come_is_read_for_as_long_as_they_do(incoming: Incoming) -> None:
    incoming.hears(part(9, 1, 0, 100)[:-99])
    for _ in range(10):
        incoming.hears(b"x")
        incoming.loop.wait(0.8 * STALL_S)
    assert not incoming.ends
    incoming.loop.wait(2 * STALL_S)
    assert ["stalled" in str(error) for error in incoming.ends] == [True]


@pytest.mark.parametrize("part_bytes", [300, 4000])
@pytest.mark.parametrize("granted", [True, False])
def test_a_writer_that_is_never_behind_does_not_keep_the_reader_from_its_other_work(
    incoming: Incoming, granted: bool, part_bytes: int
) -> None:
    """Each turn of the loop takes one slice, of bytes that land and of bytes that are thrown away; a fence
    comes between two turns, and no byte lands after it."""
    fd, sent = incoming.channel.fileno(), part(9 if granted else 1, 1, 0, part_bytes)
    incoming.theirs.sendall(sent * (120_000 // len(sent)))
    for fenced in (False, True):
        for _ in range(10):
            before = incoming.unread()
            incoming.loop.of[fd](select.EPOLLIN)
            assert 0 < before - incoming.unread() < 1000 + 2 * len(sent)
        found = {status for status, _ in incoming.answers()}
        assert found == {LANDED if granted and not fenced else REFUSED}
        incoming.grants.remove(PEER, 9)


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
    streams = InStreams(full, lambda *_args: None, max_streams=1)
    for _ in range(3):
        with pytest.raises(OSError, match="No space"):
            streams.admit(PlainChannel(theirs), PEER, b"yes")
    assert not streams.full
    for sock in (ours, theirs):
        sock.close()
