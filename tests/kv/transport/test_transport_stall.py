"""Streams of `tcp` that are slow, silent or asleep, in virtual time: who has stalled, and who has not."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable

import numpy as np

from areas import whole
from ranks import rank
from segue.kv.errors import SegueError
from segue.kv.layout.blocks import CopyBlock
from segue.kv.transport.base import Fenced, TransportEvent, WriteFailed, Written
from segue.kv.transport.epochs import Grants
from segue.kv.transport.memory.pool_memory import Memory, Region
from segue.kv.transport.net.ioloop import Timer
from segue.kv.transport.tcp import tcp_wire
from segue.kv.transport.tcp.tcp_in import InStream
from segue.kv.transport.tcp.tcp_net import Net, TcpTuning
from segue.kv.transport.tcp.tcp_out import PeerWriter

MiB = 2**20
STALL_S = 1.0


class VirtualLoop:
    """The loop's face to a stream; its clock is the test's."""

    def __init__(self) -> None:
        self.now = 0.0
        self.ready: Callable[[int], None] = print
        self._timers: list[tuple[float, Timer]] = []

    def time(self) -> float:
        return self.now

    def watch(self, _fd: int, _events: int, ready: Callable[[int], None]) -> None:
        self.ready = ready

    def change(self, _fd: int, _events: int) -> None:
        pass

    def unwatch(self, _fd: int) -> None:
        self.ready = print

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


class Trickle:
    """A channel from a writer: the head of one part, and then its bytes, one at a time."""

    buffered = False

    def __init__(self, nbytes: int) -> None:
        rows = np.array([[0, nbytes]], "<u8").tobytes()
        self._head = tcp_wire.pack_header(9, 1, nbytes, rows)

    def fileno(self) -> int:
        return 7

    def receive(self, nbytes: int) -> bytes:
        data, self._head = self._head[:nbytes], self._head[nbytes:]
        return data

    def receive_rows(self, cursor: tcp_wire.Cursor, _limit_bytes: int) -> int:
        cursor.advance(1)
        return 1

    def close(self, *, reset: bool = False) -> None:
        pass


def test_a_stream_on_which_bytes_come_is_read_for_as_long_as_they_do() -> None:
    loop, grants, ends = VirtualLoop(), Grants(), list[SegueError]()
    grants.add(rank("aaaa"), 9, whole(MiB))
    stream = InStream(
        loop,  # type: ignore[arg-type]
        Trickle(1000),  # type: ignore[arg-type]
        rank("aaaa"),
        Memory([Region(0, MiB)]),
        grants,
        ends.append,
        tuning=TcpTuning(lowat_bytes=100),
        stall_s=STALL_S,
    )
    for _ in range(10):
        loop.ready(select.EPOLLIN)
        loop.wait(0.8 * STALL_S)
    assert not ends
    loop.wait(2 * STALL_S)
    assert ["stalled" in str(error) for error in ends] == [True]
    stream.close()


class Answering:
    """A channel to a reader that takes everything and answers when the test says so."""

    buffered = False

    def __init__(self) -> None:
        self.answers = b""

    def fileno(self) -> int:
        return 7

    def send_rows(self, cursor: tcp_wire.Cursor, _limit_bytes: int) -> int:
        nbytes = cursor.left
        cursor.advance(nbytes)
        return nbytes

    def receive(self, _nbytes: int) -> bytes | None:
        data, self.answers = self.answers, b""
        return data or None

    def close(self, *, reset: bool = False) -> None:
        pass


class Writing:
    """A path of so many writes, each of one part."""

    def __init__(self, writes: int, channel: Answering | None = None) -> None:
        self.loop, self.channel = VirtualLoop(), channel or Answering()
        self.events: list[TransportEvent] = []
        self.ends: list[SegueError] = []
        self.path = PeerWriter(
            self.loop,  # type: ignore[arg-type]
            rank("bbbb"),
            [self.channel],  # type: ignore[list-item]
            Memory([Region(0, MiB)]),
            MiB,
            self.events.append,
            lambda _path, error: self.ends.append(error),
            tuning=TcpTuning(),
            stall_s=STALL_S,
        )
        self.path.open()
        for tag in range(writes):
            self.path.write(9, tag, [CopyBlock(0, 0, 1, 100)], 100, 0.0)

    def answer(self, part: int) -> None:
        self.channel.answers += tcp_wire.pack_ack(tcp_wire.LANDED, part)
        self.loop.ready(select.EPOLLIN)


def test_a_part_that_waits_behind_others_has_not_stalled_while_answers_come() -> None:
    writing = Writing(5)
    for part in range(1, 6):
        writing.loop.wait(0.8 * STALL_S)
        writing.answer(part)
    assert [type(event) for event in writing.events] == 5 * [Written]
    assert not writing.ends
    writing.path.close()


def test_a_writer_that_was_stopped_reads_the_answers_that_wait_before_it_ends_a_path() -> None:
    writing = Writing(1)
    writing.loop.wait(10 * STALL_S, asleep=True)
    assert not writing.ends
    writing.answer(1)
    assert [type(event) for event in writing.events] == [Written]
    writing.path.close()


def test_a_writer_that_was_stopped_waits_no_longer_than_before_where_no_answer_comes() -> None:
    writing = Writing(1)
    writing.loop.wait(10 * STALL_S, asleep=True)
    writing.loop.wait(STALL_S)
    assert [type(event) for event in writing.events] == [WriteFailed]
    assert len(writing.ends) == 1


def test_a_reader_that_answered_for_a_while_and_then_no_more_ends_the_path() -> None:
    writing = Writing(2)
    writing.loop.wait(0.8 * STALL_S)
    writing.answer(1)
    writing.loop.wait(2 * STALL_S)
    assert [type(event) for event in writing.events] == [Written, WriteFailed]
    assert len(writing.ends) == 1


def test_a_data_port_can_be_listened_at_again_while_connections_of_before_linger() -> None:
    """Connections that this end closed first stay in the kernel (TIME_WAIT) for a minute."""
    first = Net().listen("127.0.0.1", 0)
    host, port = first.getsockname()
    with socket.create_connection((host, port), 10) as peer:
        select.select([first], [], [], 10)
        accepted, _ = first.accept()
        accepted.close()
        first.close()
        assert peer.recv(1) == b""
    Net().listen(host, port).close()


def test_a_fence_that_comes_after_the_end_of_a_half_sent_part_is_answered() -> None:
    class Full(Answering):
        def send_rows(self, cursor: tcp_wire.Cursor, _limit_bytes: int) -> int:
            return -1

    writing = Writing(1, Full())
    writing.loop.wait(3 * STALL_S)
    assert [type(event) for event in writing.events] == [WriteFailed]
    writing.path.fence(9)
    assert writing.events[1:] == [Fenced(rank("bbbb"), 9, True)]
