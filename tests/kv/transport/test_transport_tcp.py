from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import random
import resource
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from areas import whole
from ranks import make_tcp, rank
from segue.kv.errors import BootstrapTimeout, ConfigError, PeerRefused, TransferFailed
from segue.kv.ids import RankId
from segue.kv.layout.blocks import CopyBlock
from segue.kv.layout.content import whole_pages
from segue.kv.layout.spec import KVShape, PoolSpec
from segue.kv.transport.base import Fenced, PeerGone, TransportEvent, WriteFailed, Written
from segue.kv.transport.epochs import Grants
from segue.kv.transport.memory.pool_memory import Memory, Region, allocate
from segue.kv.transport.net import key_handshake as handshake
from segue.kv.transport.net.ioloop import Timer
from segue.kv.transport.net.stream import Channel
from segue.kv.transport.tcp import tcp_wire
from segue.kv.transport.tcp.tcp_in import InStream
from segue.kv.transport.tcp.tcp_net import TcpTuning
from segue.kv.transport.tcp.tcp_out import PeerWriter
from segue.kv.transport.tcp.tcp_sockets import TcpAddress

MiB = 2**20
ROGUE = rank("rogue")


class Reader:
    def __init__(self, **options: float) -> None:
        self.events: queue.SimpleQueue[TransportEvent] = queue.SimpleQueue()
        self.memory = allocate(MiB)
        self.transport = make_tcp(self.events.put, rank("bbbb"), **options)  # type: ignore[arg-type]
        self.endpoint = self.transport.register(self.memory)
        self.address = msgspec.msgpack.decode(self.endpoint.data, type=TcpAddress)

    def next(self) -> TransportEvent:
        return self.events.get(timeout=60)

    def knock(self) -> socket.socket:
        sock = socket.create_connection((self.address.host, self.address.port), 30)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock

    def enter(self, peer: RankId = ROGUE, group: bytes = bytes(16)) -> socket.socket:
        """A hand-made writer, so that it can misbehave."""
        sock = self.knock()
        door = handshake.WriterProof(self.address.key, handshake.StreamHello(peer, group, 0, 1))
        sock.sendall(door.respond(exactly(sock, handshake.CHALLENGE_BYTES)))
        door.finish(exactly(sock, handshake.VERDICT_BYTES))
        return sock

    def close(self) -> None:
        self.transport.close()
        self.memory.close()


def exactly(sock: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        more = sock.recv(nbytes - len(data))
        assert more, "closed"
        data += more
    return data


def part(epoch: int, rows: list[tuple[int, int]], nbytes: int | None = None, ident: int = 1) -> bytes:
    total = sum(length for _, length in rows) if nbytes is None else nbytes
    return tcp_wire.pack_header(epoch, ident, total, b"".join(struct.pack("<QQ", *row) for row in rows))


def answer(sock: socket.socket) -> tuple[int, int]:
    return tcp_wire.parse_ack(exactly(sock, tcp_wire.ACK.size))


def flipped(frame: bytes, at: int) -> bytes:
    return frame[:at] + bytes([frame[at] ^ 1]) + frame[at + 1 :]


@pytest.fixture(scope="module")
def shared() -> Iterator[Reader]:
    made = Reader()
    yield made
    made.close()


@pytest.fixture
def reader() -> Iterator[Reader]:
    made = Reader()
    yield made
    made.close()


def test_a_part_lands_and_is_answered(reader: Reader) -> None:
    reader.transport.grant(rank("rogue"), 9, whole(MiB))
    sock = reader.enter()
    sock.sendall(part(9, [(100, 3), (10, 2)], ident=77) + b"abcde")
    assert answer(sock) == (tcp_wire.LANDED, 77)
    assert (reader.memory.buffer[100:103], reader.memory.buffer[10:12]) == (b"abc", b"de")
    sock.close()


def test_fence_stops_a_part_in_its_middle(reader: Reader) -> None:
    reader.transport.grant(rank("rogue"), 9, whole(MiB))
    sock = reader.enter()
    sock.sendall(part(9, [(0, 6)]) + b"abc")
    while reader.memory.buffer[:3] != b"abc":
        pass
    reader.transport.fence(rank("rogue"), 9)
    assert reader.next() == Fenced(rank("rogue"), 9, proven=True)
    sock.sendall(b"def")
    assert answer(sock) == (tcp_wire.REFUSED, 1)
    assert reader.memory.buffer[:6] == b"abc\0\0\0"
    reader.transport.grant(rank("rogue"), 10, whole(MiB))  # the stream is in step for the next part
    sock.sendall(part(10, [(0, 1)], ident=2) + b"z")
    assert answer(sock) == (tcp_wire.LANDED, 2)
    sock.close()


def test_a_fence_is_answered_by_the_loop_once_it_is_out_of_what_it_was_in(reader: Reader) -> None:
    inside, out = threading.Event(), threading.Event()

    def a_slice() -> None:
        inside.set()
        assert out.wait(60)

    reader.transport._loop.post(a_slice)
    assert inside.wait(60)
    reader.transport.fence(ROGUE, 9)
    assert reader.events.empty(), "the slice may still be landing"
    out.set()
    assert reader.next() == Fenced(ROGUE, 9, proven=True)


def test_the_rest_of_a_part_wakes_the_reader_however_little_it_is() -> None:
    """Found by the bench: with less left than the low-water mark the stream slept until it was cut."""
    reader = Reader(slice_bytes=1000, lowat_bytes=1000)
    reader.transport.grant(rank("rogue"), 9, whole(MiB))
    sock = reader.enter()
    sock.sendall(part(9, [(0, 17_200)]) + b"a" * 500)
    while reader.memory.buffer[499:500] != b"a":
        pass
    sock.sendall(b"a" * 16_700)
    assert answer(sock) == (tcp_wire.LANDED, 1)
    assert reader.memory.buffer[:17_201] == b"a" * 17_200 + b"\0"
    sock.close()
    reader.close()


@pytest.mark.parametrize(
    "rows", [[(MiB, 1)], [(MiB - 1, 2)], [(2**64 - 1, 2)], [(2**63, 1)], [(0, 1), (MiB + 1, 1)]]
)
def test_a_range_outside_the_pool_ends_the_streams_of_that_peer(
    reader: Reader, rows: list[tuple[int, int]]
) -> None:
    reader.transport.grant(rank("rogue"), 9, whole(MiB))
    refused(reader, 9, rows)
    assert not np.frombuffer(reader.memory.buffer, np.uint8).any()


def refused(reader: Reader, epoch: int, rows: list[tuple[int, int]]) -> None:
    """A part with these rows ends the streams of its writer."""
    sock = reader.enter()
    sock.sendall(part(epoch, rows) + b"x" * sum(n for _, n in rows))
    gone = reader.next()
    assert isinstance(gone, PeerGone)
    assert (gone.peer, gone.proven) == (rank("rogue"), True)
    assert "outside the pages granted" in str(gone.error)
    with contextlib.suppress(ConnectionResetError):  # it may have had more to say
        assert sock.recv(1) == b""
    sock.close()


SPEC = PoolSpec(
    shape=KVShape(layers=3, kv_heads=1, k_dim=4, v_dim=2, dtype="lineage", item_bytes=8),
    pages=10,
    page_tokens=4,
    layer_count=3,
    head_count=1,
)
#: K and V of page 7 in layer 1, and how long they are
K7, V7, K_BYTES, V_BYTES = SPEC.offset(1, False, 28), SPEC.offset(1, True, 28), 128, 64


@pytest.mark.parametrize(
    "rows",
    [
        [(SPEC.offset(1, False, 24), K_BYTES)],  # the page before
        [(K7, K_BYTES + 1)],  # into the page after
        [(K7 - 1, 2)],
        [(V7 + V_BYTES, 1)],
        [(K7, K_BYTES), (V7, V_BYTES), (SPEC.offset(2, True, 36), 1)],  # only its last row
        [(2**64 - 1, 2)],
    ],
)
def test_a_writer_that_writes_outside_its_own_pages_is_cut_and_nothing_lands(
    reader: Reader, rows: list[tuple[int, int]]
) -> None:
    """Hole 11: a peer that was granted an epoch wrote into another request's pages, which then was taken."""
    reader.transport.grant(rank("rogue"), 9, whole_pages(SPEC, [7, 2]))
    reader.transport.grant(
        rank("rogue"), 10, whole_pages(SPEC, [6, 8, 9])
    )  # its other hand-off: not this epoch's
    reader.transport.grant(rank("other"), 9, whole_pages(SPEC, [6, 8, 9]))
    refused(reader, 9, rows)
    assert not np.frombuffer(reader.memory.buffer, np.uint8).any()


def test_a_write_of_all_of_its_own_pages_lands(reader: Reader) -> None:
    reader.transport.grant(rank("rogue"), 9, whole_pages(SPEC, [7, 2, 3]))
    sock = reader.enter()
    rows = [
        (SPEC.offset(layer, value, page * 4), pages * (V_BYTES if value else K_BYTES))
        for page, pages in ((7, 1), (2, 2))
        for layer in range(3)
        for value in (False, True)
    ]
    nbytes = sum(n for _, n in rows)
    sock.sendall(part(9, rows) + b"x" * nbytes)
    assert answer(sock) == (tcp_wire.LANDED, 1)
    assert np.count_nonzero(np.frombuffer(reader.memory.buffer, np.uint8)) == nbytes == 3 * SPEC.page_bytes
    sock.close()


def test_a_writer_into_a_grant_without_pages_is_cut_and_ends_nobody_else(reader: Reader) -> None:
    """The grant of a prompt that decode had whole in its cache: there is nothing to write, and a peer that
    wrote all the same ended the thread under everybody's streams."""
    reader.transport.grant(rank("rogue"), 9, whole_pages(SPEC, []))
    refused(reader, 9, [(0, 1)])
    reader.transport.grant(rank("rogue"), 10, whole_pages(SPEC, [0]))
    sock = reader.enter()
    sock.sendall(part(10, [(0, 1)]) + b"x")
    assert answer(sock) == (tcp_wire.LANDED, 1)
    sock.close()


def test_a_grant_that_is_no_part_of_the_memory_ends_nobody_else(reader: Reader) -> None:
    reader.transport.grant(rank("rogue"), 9, whole(MiB + 1))  # a bug of ours: it must not become a wild write
    sock = reader.enter()
    sock.sendall(part(9, [(MiB, 1)]) + b"x")
    gone = reader.next()
    assert isinstance(gone, PeerGone)
    assert "a grant up to byte" in str(gone.error)
    sock.close()


@pytest.mark.parametrize(
    "frame",
    [
        bytes(tcp_wire.HEADER.size),
        tcp_wire.HEADER.pack(tcp_wire.MAGIC, 2, 1, 0, 9, 1, 1),
        tcp_wire.HEADER.pack(tcp_wire.MAGIC, 1, 0, 0, 9, 1, 1),
        tcp_wire.HEADER.pack(tcp_wire.MAGIC, 1, tcp_wire.MAX_PART_ROWS + 1, 0, 9, 1, tcp_wire.MAX_PART_BYTES),
        tcp_wire.HEADER.pack(tcp_wire.MAGIC, 1, 1, 0, 9, 1, tcp_wire.MAX_PART_BYTES + 1),
        part(9, [(0, 5)], nbytes=4),
        part(9, [(0, 0), (0, 5)]),
        part(9, [(0, 2**64 - 1), (0, 6)], nbytes=5),
        # One bit of where it lands: the epoch, the part, the offset of the row.
        *(flipped(part(9, [(0, 5)]), at) for at in (16, 24, 40)),
    ],
)
def test_an_illegal_part_ends_the_streams_of_that_peer_only(reader: Reader, frame: bytes) -> None:
    for peer in (rank("rogue"), rank("other")):
        reader.transport.grant(peer, 9, whole(MiB))
    other, sock = reader.enter(rank("other")), reader.enter()
    sock.sendall(frame)
    gone = reader.next()
    assert isinstance(gone, PeerGone)
    assert (gone.peer, gone.proven) == (rank("rogue"), True)
    assert not np.frombuffer(reader.memory.buffer, np.uint8).any()
    other.sendall(part(9, [(0, 1)]) + b"z")
    assert answer(other) == (tcp_wire.LANDED, 1)
    other.close()
    sock.close()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(min_size=1, max_size=600))
def test_lesson_17_random_bytes_before_the_handshake(shared: Reader, data: bytes) -> None:
    sock = shared.knock()
    sock.sendall(data)
    sock.shutdown(socket.SHUT_WR)
    try:
        while sock.recv(1000):
            pass
    except ConnectionResetError:
        pass
    sock.close()
    shared.enter(rank("after")).close()
    assert isinstance(shared.next(), PeerGone)
    assert not np.frombuffer(shared.memory.buffer, np.uint8).any()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**20)), min_size=0, max_size=5),
    nbytes=st.one_of(st.none(), st.integers(0, 2**64 - 1)),
    epoch=st.integers(0, 2**64 - 1),
    noise=st.binary(max_size=300),
)
def test_lesson_22_random_parts_after_the_handshake(
    shared: Reader, rows: list[tuple[int, int]], nbytes: int | None, epoch: int, noise: bytes
) -> None:
    """An authenticated peer without a grant can neither change memory nor end the process."""
    sock = shared.enter()
    sock.sendall(part(epoch, rows, nbytes) + noise)
    sock.close()
    gone = shared.next()
    assert isinstance(gone, PeerGone)
    assert gone.proven
    assert not np.frombuffer(shared.memory.buffer, np.uint8).any()


def test_strangers_are_bounded_in_number_and_time() -> None:
    reader = Reader(max_pending=4, handshake_s=0.3)
    socks = [reader.knock() for _ in range(3)]
    assert socks[0].recv(1000)
    assert socks[0].recv(1000) == b""  # two from one address are let wait; the oldest went
    for sock in socks[1:]:
        assert len(exactly(sock, handshake.CHALLENGE_BYTES)) == handshake.CHALLENGE_BYTES
        assert sock.recv(1000) == b""  # the deadline passed
    for sock in socks:
        sock.close()
    reader.close()


def test_a_flood_of_strangers_keeps_no_peer_out() -> None:
    reader = Reader()
    strangers = [reader.knock() for _ in range(200)]
    good = reader.enter()
    reader.transport.grant(rank("rogue"), 9, whole(MiB))
    good.sendall(part(9, [(0, 3)]) + b"abc")
    assert answer(good) == (tcp_wire.LANDED, 1)
    for sock in (*strangers, good):
        sock.close()
    reader.close()


def test_without_descriptors_it_waits_instead_of_spinning_and_then_lets_peers_in(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reader = Reader()
    with socket.socket() as sock, no_descriptors():
        sock.connect((reader.address.host, reader.address.port))  # the kernel accepts, the process cannot

        def tries() -> int:
            return sum("tcp cannot accept connections" in record.message for record in caplog.records)

        until = time.monotonic() + 60
        while not tries() and time.monotonic() < until:
            threading.Event().wait(0.01)
        sock.settimeout(0.5)
        with pytest.raises(TimeoutError):
            sock.recv(1)
        tried = tries()
    assert 1 <= tried < 50  # a thread that spins tries many thousand times
    with reader.knock() as sock:
        assert len(exactly(sock, handshake.CHALLENGE_BYTES)) == handshake.CHALLENGE_BYTES
    reader.close()


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """Not one descriptor is free for this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 8, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.dup(0))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in held:
            os.close(fd)


def test_a_writer_that_stalls_in_a_part_is_cut() -> None:
    reader = Reader(stall_s=0.2)
    reader.transport.grant(rank("rogue"), 9, whole(MiB))
    sock = reader.enter()
    sock.sendall(part(9, [(0, 6)]) + b"abc")
    gone = reader.next()
    assert isinstance(gone, PeerGone)
    assert "stalled" in str(gone.error)
    sock.close()
    reader.close()


class Mute:
    """A listener that lets a writer in and then never answers."""

    def __init__(self, key: bytes) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(30)
        self.key = key

    def admit(self) -> socket.socket:
        sock, _ = self.listener.accept()
        door = handshake.ListenerProof(self.key)
        sock.sendall(door.challenge())
        _, verdict = door.accept(exactly(sock, handshake.RESPONSE_BYTES))
        sock.sendall(verdict)
        return sock


def _mute_pair(stall_s: float) -> tuple[Reader, Mute, socket.socket]:
    writer, mute = Reader(stall_s=stall_s, streams=1), Mute(handshake.new_key())
    address = TcpAddress(version=1, host="127.0.0.1", port=mute.listener.getsockname()[1], key=mute.key)
    endpoint = msgspec.structs.replace(writer.endpoint, data=msgspec.msgpack.encode(address))
    admitted: list[socket.socket] = []
    thread = threading.Thread(target=lambda: admitted.append(mute.admit()))
    thread.start()
    writer.transport.connect(rank("mute"), endpoint, 30)
    thread.join()
    return writer, mute, admitted[0]


def test_a_receiver_that_never_answers_is_gone_in_bounded_time() -> None:
    writer, mute, sock = _mute_pair(0.2)
    both_asked = threading.Event()
    writer.transport._loop.post(lambda: both_asked.wait(60))
    writer.transport.write(rank("mute"), 9, 1, [CopyBlock(0, 0, 1, 100)])
    writer.transport.fence(rank("mute"), 9)
    both_asked.set()
    assert isinstance(writer.next(), WriteFailed)
    assert writer.next() == Fenced(rank("mute"), 9, proven=False)  # bytes may be under way
    gone = writer.next()
    assert isinstance(gone, PeerGone)
    assert not gone.proven
    for s in (sock, mute.listener):
        s.close()
    writer.close()


def test_a_receiver_that_takes_everything_and_answers_nothing_is_gone_all_the_same() -> None:
    """New writes that the socket takes are no sign of life: answers are (a half-open connection)."""
    writer, mute, sock = _mute_pair(0.2)
    tag = 0
    while writer.events.empty():
        tag += 1
        assert tag < 1000, "each write put the end off"
        writer.transport.write(rank("mute"), 9, tag, [CopyBlock(0, 0, 1, 100)])
        threading.Event().wait(0.02)
    failed = writer.next()
    assert isinstance(failed, WriteFailed)
    assert failed.tag == 1
    for s in (sock, mute.listener):
        s.close()
    writer.close()


class Greedy:
    """A channel to a reader that keeps up with whatever is sent, and answers only when `_read` asks."""

    buffered = False

    def __init__(self) -> None:
        self.sent = 0

    def fileno(self) -> int:
        return 7

    def send_rows(self, cursor: tcp_wire.Cursor, limit_bytes: int) -> int:
        nbytes = min(cursor.left, limit_bytes)
        cursor.advance(nbytes)
        self.sent += nbytes
        return nbytes

    def close(self, *, reset: bool = False) -> None:
        pass


class Watched:
    """The loop's face to a path: what it waits for."""

    def __init__(self) -> None:
        self.events = 0
        self.ready: Callable[[int], None] = print
        self.time = time.monotonic

    def watch(self, _fd: int, events: int, ready: Callable[[int], None]) -> None:
        self.events, self.ready = events, ready

    def change(self, _fd: int, events: int) -> None:
        self.events = events

    def unwatch(self, _fd: int) -> None:
        self.events = 0

    def later(self, _delay_s: float, call: Callable[[], None]) -> Timer:
        return Timer(call)


def test_a_reader_that_keeps_up_does_not_keep_the_writer_from_its_other_work() -> None:
    """Each turn of the loop sends one slice; what comes between two turns (a fence, answers) is heard."""
    channel, loop, told = Greedy(), Watched(), queue.SimpleQueue[TransportEvent]()
    path = PeerWriter(
        loop,  # type: ignore[arg-type]
        rank("bbbb"),
        [channel],  # type: ignore[list-item]
        Memory([Region(0, MiB)]),
        MiB,
        told.put,
        lambda _path, _error: None,
        tuning=TcpTuning(part_bytes=1000, slice_bytes=2500, max_parts=10_000),
        stall_s=30,
    )
    path.open()
    for tag in range(2):
        path.write(9, tag, [CopyBlock(0, 0, 1, 20_000)], 20_000, 0.0)
    assert 2500 <= channel.sent < 4000
    turns = 0
    while loop.events & select.EPOLLOUT and turns < 3:
        before = channel.sent
        loop.ready(select.EPOLLOUT)
        assert 0 < channel.sent - before < 4000
        turns += 1
    assert turns == 3
    before = channel.sent
    path.fence(9)
    failed = told.get_nowait()
    assert isinstance(failed, WriteFailed)
    assert failed.tag == 1  # the first write's end waits for the answers to what was sent of it
    assert told.empty()
    loop.ready(select.EPOLLOUT)
    loop.ready(select.EPOLLOUT)
    assert channel.sent - before < 2000  # what had begun is ended, nothing else begins
    assert not loop.events & select.EPOLLOUT
    path.close()


class Tireless:
    """A channel from a writer that is never behind: part after part of `part_bytes`, without an end."""

    buffered = False

    def __init__(self, part_bytes: int, epoch: int) -> None:
        self._head = part(epoch, [(0, part_bytes)])
        self._part_bytes = part_bytes
        self._at = 0
        self.taken = 0
        self.answers: list[tuple[int, int]] = []

    def fileno(self) -> int:
        return 7

    def receive(self, nbytes: int) -> bytes:
        data = self._head[self._at : self._at + nbytes]
        self._at += len(data)
        return data

    def discard(self, scratch: bytearray, nbytes: int) -> int:
        return self._payload(min(len(scratch), nbytes))

    def receive_rows(self, cursor: tcp_wire.Cursor, limit_bytes: int) -> int:
        nbytes = min(cursor.left, limit_bytes)
        cursor.advance(nbytes)
        return self._payload(nbytes)

    def _payload(self, nbytes: int) -> int:
        self.taken += nbytes
        if self.taken % self._part_bytes == 0:
            self._at = 0
        return nbytes

    def send(self, data: bytes) -> int:
        self.answers.append(tcp_wire.parse_ack(data))
        return len(data)

    def close(self, *, reset: bool = False) -> None:
        pass


@pytest.mark.parametrize("granted", [True, False])
@pytest.mark.parametrize("part_bytes", [1000, 10_000])
def test_a_writer_that_is_never_behind_does_not_keep_the_reader_from_its_other_work(
    granted: bool, part_bytes: int
) -> None:
    """Each turn of the loop takes one slice, of bytes that land and of bytes that are thrown away; a fence
    comes between two turns, and no byte lands after it."""
    channel, loop, grants = Tireless(part_bytes, 9), Watched(), Grants()
    if granted:
        grants.add(rank("aaaa"), 9, whole(MiB))
    stream = InStream(
        loop,  # type: ignore[arg-type]
        channel,  # type: ignore[arg-type]
        rank("aaaa"),
        Memory([Region(0, MiB)]),
        grants,
        lambda error: pytest.fail(str(error)),
        tuning=TcpTuning(slice_bytes=2500, lowat_bytes=1),
        stall_s=30,
    )
    for _ in range(20):
        before = channel.taken
        loop.ready(select.EPOLLIN)
        assert 0 < channel.taken - before < 2500 + part_bytes
    landed = {tcp_wire.LANDED if granted else tcp_wire.REFUSED}
    assert {status for status, _ in channel.answers} == landed
    grants.remove(rank("aaaa"), 9)
    told = len(channel.answers)
    for _ in range(20):
        loop.ready(select.EPOLLIN)
    assert {status for status, _ in channel.answers[told:]} == {tcp_wire.REFUSED}
    stream.close()


def test_an_answer_to_nothing_ends_the_path() -> None:
    writer, mute, sock = _mute_pair(30)
    sock.sendall(tcp_wire.pack_ack(0, 1234))
    gone = writer.next()
    assert isinstance(gone, PeerGone)
    assert isinstance(gone.error, TransferFailed)
    for s in (sock, mute.listener):
        s.close()
    writer.close()


@pytest.mark.parametrize("at", range(tcp_wire.ACK.size))
def test_an_answer_that_was_changed_on_its_way_ends_the_path(at: int) -> None:
    if at in (5, 6, 7):
        return  # filler
    with pytest.raises(TransferFailed):
        tcp_wire.parse_ack(flipped(tcp_wire.pack_ack(0, 1234), at))


def test_a_listener_that_does_not_know_the_key_gets_no_kv(reader: Reader) -> None:
    mute = Mute(b"another key 1234")
    address = TcpAddress(
        version=1, host="127.0.0.1", port=mute.listener.getsockname()[1], key=handshake.new_key()
    )
    endpoint = msgspec.structs.replace(reader.endpoint, data=msgspec.msgpack.encode(address))

    def impostor() -> None:
        sock, _ = mute.listener.accept()
        sock.sendall(handshake.ListenerProof(mute.key).challenge())
        exactly(sock, handshake.RESPONSE_BYTES)
        sock.sendall(struct.pack(">4sHB32s128s", b"SGUE", handshake.VERSION, 1, bytes(32), b""))
        sock.close()

    thread = threading.Thread(target=impostor)
    thread.start()
    with pytest.raises(PeerRefused, match="could not prove"):
        reader.transport.connect(rank("mute"), endpoint, 30)
    thread.join()
    mute.listener.close()


def test_a_listener_that_closes_without_a_word_has_refused_nothing(reader: Reader) -> None:
    """It may lack a descriptor, or have waited too long: the next try may do."""
    listener = socket.create_server(("127.0.0.1", 0))
    address = TcpAddress(version=1, host="127.0.0.1", port=listener.getsockname()[1], key=bytes(16))
    endpoint = msgspec.structs.replace(reader.endpoint, data=msgspec.msgpack.encode(address))
    thread = threading.Thread(target=lambda: listener.accept()[0].close())
    thread.start()
    with pytest.raises(TransferFailed, match="closed the stream during the handshake") as caught:
        reader.transport.connect(rank("dddd"), endpoint, 30)
    assert caught.value.info.retryable
    thread.join()
    listener.close()


def test_connect_has_a_deadline(reader: Reader) -> None:
    silent = socket.create_server(("127.0.0.1", 0))
    address = TcpAddress(version=1, host="127.0.0.1", port=silent.getsockname()[1], key=bytes(16))
    endpoint = msgspec.structs.replace(reader.endpoint, data=msgspec.msgpack.encode(address))
    with pytest.raises(BootstrapTimeout):
        reader.transport.connect(rank("cccc"), endpoint, 0.1)
    silent.close()


def test_a_port_in_use_is_one_sentence(reader: Reader) -> None:
    transport = make_tcp(lambda _e: None, rank("aaaa"), port=reader.address.port)
    memory = allocate(4096)
    with pytest.raises(ConfigError, match="choose another port"):
        transport.register(memory)
    transport.close()
    memory.close()


def test_a_peer_that_connects_anew_replaces_its_old_streams(reader: Reader) -> None:
    reader.transport.grant(rank("rogue"), 9, whole(MiB))
    old = reader.enter(group=b"1" * 16)
    new = reader.enter(group=b"2" * 16)
    assert old.recv(1) == b""
    new.sendall(part(9, [(0, 1)]) + b"z")
    assert answer(new) == (tcp_wire.LANDED, 1)
    assert reader.events.empty()  # the peer is not gone
    new.close()
    old.close()


def test_the_streams_of_a_path_that_is_not_wanted_when_it_stands_are_closed(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The transport was closed while it connected, or two threads connected at once."""
    writer = Reader(streams=3)
    opened, open_streams = list[Channel](), writer.transport._sockets.open_streams

    def kept(*args: Any) -> list[Channel]:
        opened.extend(open_streams(*args))
        return opened

    monkeypatch.setattr(writer.transport._sockets, "open_streams", kept)
    monkeypatch.setattr(writer.transport._paths, "add", lambda *_: False)
    writer.transport.connect(rank("rogue"), reader.endpoint, 60)
    assert [channel.sock.fileno() for channel in opened] == [-1] * 3
    assert isinstance(reader.next(), PeerGone)
    writer.close()


@pytest.mark.parametrize("streams", [1, 3, 8])
def test_streams_share_a_write_and_it_is_told_once(streams: int) -> None:
    events: queue.SimpleQueue[TransportEvent] = queue.SimpleQueue()
    reader = Reader()
    source = allocate(MiB)
    source.buffer[:] = np.random.default_rng(1).bytes(MiB)
    writer = make_tcp(events.put, rank("aaaa"), streams=streams, part_bytes=50_000)
    writer.register(source)
    writer.connect(rank("bbbb"), reader.endpoint, 30)
    reader.transport.grant(rank("aaaa"), 9, whole(MiB))
    writer.write(rank("bbbb"), 9, 1, [CopyBlock(0, 0, 1, MiB)])
    done = events.get(timeout=30)
    assert isinstance(done, Written)
    assert done.nbytes == MiB
    assert reader.memory.buffer[:] == source.buffer[:]
    assert events.empty()
    writer.close()
    reader.close()
    source.close()


# ---- tcp_wire ------------------------------------------------------------------------------------


def test_no_bit_of_a_head_or_of_an_answer_can_change_unseen() -> None:
    rows = struct.pack("<QQQQ", 4096, 3, 100, 2)
    head = tcp_wire.pack_header(9, 77, 5, rows)
    spare = {8 * at + bit for at in (5, 6, 7) for bit in range(8)}  # three bytes that nobody reads

    def parse(frame: bytes) -> None:
        header = tcp_wire.parse_header(frame[: tcp_wire.HEADER.size])
        tcp_wire.parse_rows(frame[tcp_wire.HEADER.size :][: header.rows * tcp_wire.ROW_BYTES], header)

    parse(head)
    for frame, read in ((head, parse), (tcp_wire.pack_ack(tcp_wire.LANDED, 77), tcp_wire.parse_ack)):
        for bit in set(range(8 * len(frame))) - spare:
            wrong = bytearray(frame)
            wrong[bit // 8] ^= 1 << bit % 8
            with pytest.raises((TransferFailed, ValueError)):  # the latter: fewer bytes than rows
                read(bytes(wrong))


@given(data=st.data(), pages=st.sets(st.integers(0, 9), min_size=1))
@settings(deadline=None)
def test_a_row_is_inside_exactly_when_each_of_its_bytes_is_granted(
    data: st.DataObject, pages: set[int]
) -> None:
    granted = np.zeros(SPEC.nbytes + 200, bool)
    for layer in range(3):
        for page in pages:
            granted[SPEC.offset(layer, False, 4 * page) :][:K_BYTES] = True
            granted[SPEC.offset(layer, True, 4 * page) :][:V_BYTES] = True
    found = tcp_wire.ranges_of(whole_pages(SPEC, list(pages)), SPEC.nbytes)
    edges = sorted({0, *found.ravel().tolist()})
    near = st.sampled_from(edges).flatmap(lambda edge: st.integers(max(0, edge - 2), edge + 2))
    rows = [
        (start, data.draw(st.integers(1, 200))) for start in data.draw(st.lists(near, min_size=1, max_size=4))
    ]
    wanted = all(granted[start : start + length].all() for start, length in rows)
    assert tcp_wire.inside(np.array(rows, np.uint64), found) is wanted


@given(
    blocks=st.lists(
        st.builds(
            CopyBlock,
            st.integers(0, 1000),
            st.integers(0, 1000),
            st.integers(0, 7),
            st.integers(0, 300),
            st.integers(0, 500),
            st.integers(300, 500),
            st.integers(0, 3),
            st.integers(0, 4000),
            st.integers(3500, 4000),
        ),
        max_size=5,
    ),
    part_bytes=st.integers(1, 2000),
)
@settings(deadline=None)
def test_cut_covers_each_byte_once_within_the_limits(blocks: list[CopyBlock], part_bytes: int) -> None:
    wanted = sorted((at + i, to + i) for b in blocks for at, to, nbytes in b.ranges() for i in range(nbytes))
    found = []
    for rows in tcp_wire.cut(blocks, part_bytes):
        assert 0 < rows.nbytes <= part_bytes
        assert int(rows.target[:, 1].sum()) == int(rows.source[:, 1].sum()) == rows.nbytes
        for (source, length), (target, _) in zip(rows.source.tolist(), rows.target.tolist(), strict=True):
            found += [(source + i, target + i) for i in range(length)]
    assert sorted(found) == wanted


@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=30),
    limit=st.integers(1, 400),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=30, deadline=None)
def test_a_cursor_visits_each_byte_once(lengths: list[int], limit: int, seed: int) -> None:
    memory = np.zeros((len(lengths), 100), np.uint8)
    rows = np.array([(memory[i].ctypes.data, n) for i, n in enumerate(lengths)], np.uint64)
    cursor = tcp_wire.Cursor(rows)
    visited = []
    base = memory.ctypes.data
    steps = random.Random(seed)
    while cursor.left:
        address, count = cursor.window(limit)
        assert 1 <= count <= tcp_wire.IOV_MAX
        iov = np.ctypeslib.as_array((ctypes.c_uint64 * (2 * count)).from_address(address)).reshape(-1, 2)
        reachable = [int(a) + i - base for a, n in iov.tolist() for i in range(int(n))]
        assert 0 < len(reachable) <= limit
        moved = min(steps.randrange(1, 60), len(reachable))
        visited += reachable[:moved]
        cursor.advance(moved)
    assert visited == [i * 100 + k for i, n in enumerate(lengths) for k in range(n)]
