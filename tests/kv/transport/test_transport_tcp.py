from __future__ import annotations

import contextlib
import ctypes
import queue
import random
import socket
import struct
import threading
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from areas import whole
from ranks import make_tcp, rank
from segue.kv.errors import ConfigError, TransferFailed
from segue.kv.ids import RankId
from segue.kv.layout.blocks import CopyBlock
from segue.kv.layout.content import whole_pages
from segue.kv.layout.spec import KVShape, PoolSpec
from segue.kv.transport.base import Fenced, PeerGone, TransportEvent, Written
from segue.kv.transport.memory.pool_memory import allocate
from segue.kv.transport.net import key_handshake as handshake
from segue.kv.transport.tcp import tcp_wire
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

    def enter(self, peer: RankId = ROGUE) -> socket.socket:
        """A hand-made writer, so that it can misbehave."""
        sock = self.knock()
        door = handshake.WriterProof(self.address.key, peer)
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


def test_a_port_in_use_is_one_sentence(reader: Reader) -> None:
    transport = make_tcp(lambda _e: None, rank("aaaa"), port=reader.address.port)
    memory = allocate(4096)
    with pytest.raises(ConfigError, match="choose another port"):
        transport.register(memory)
    transport.close()
    memory.close()


def test_a_peer_that_connects_anew_replaces_its_old_streams(reader: Reader) -> None:
    reader.transport.grant(rank("rogue"), 9, whole(MiB))
    old = reader.enter()
    new = reader.enter()
    assert old.recv(1) == b""
    new.sendall(part(9, [(0, 1)]) + b"z")
    assert answer(new) == (tcp_wire.LANDED, 1)
    assert reader.events.empty()  # the peer is not gone
    new.close()
    old.close()


def test_the_stream_of_a_path_that_is_not_wanted_when_it_stands_is_closed(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The transport was closed while it connected, or two threads connected at once."""
    writer = Reader()
    monkeypatch.setattr(writer.transport._paths, "add", lambda *_: False)
    writer.transport.connect(rank("rogue"), reader.endpoint, 60)
    assert isinstance(reader.next(), PeerGone)
    writer.close()


def test_a_write_in_many_parts_is_told_once() -> None:
    events: queue.SimpleQueue[TransportEvent] = queue.SimpleQueue()
    reader = Reader()
    source = allocate(MiB)
    source.buffer[:] = np.random.default_rng(1).bytes(MiB)
    writer = make_tcp(events.put, rank("aaaa"), part_bytes=50_000)
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
