from __future__ import annotations

import mmap
import os
import queue
import socket
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from areas import whole
from ranks import make_shm, rank
from segue.kv.errors import BootstrapTimeout, ConfigError, OutOfCapacity, PeerRefused
from segue.kv.ids import RankId
from segue.kv.layout.blocks import CopyBlock
from segue.kv.transport.base import Fenced, PeerGone, TransportEvent, Written
from segue.kv.transport.memory.host_memory import available_bytes
from segue.kv.transport.memory.pool_memory import Memory, allocate, host_region, sealed
from segue.kv.transport.net import key_handshake as handshake
from segue.kv.transport.shm.shm_out import MappedPeer
from segue.kv.transport.shm.shm_table import SLOTS, GrantTable, GrantView
from segue.kv.transport.shm.shm_wire import ShmAddress

MiB = 2**20
ROGUE = rank("rogue")


class Reader:
    def __init__(self, **options: float) -> None:
        self.events: queue.SimpleQueue[TransportEvent] = queue.SimpleQueue()
        self.memory = allocate(MiB)
        self.transport = make_shm(self.events.put, rank("bbbb"), **options)  # type: ignore[arg-type]
        self.endpoint = self.transport.register(self.memory)
        self.address = msgspec.msgpack.decode(self.endpoint.data, type=ShmAddress)

    def next(self) -> TransportEvent:
        return self.events.get(timeout=60)

    def later(self, seconds: float) -> None:
        """So much time has passed for its thread."""
        loop = self.transport._loop
        clock = loop._clock
        loop.post(lambda: setattr(loop, "_clock", lambda: clock() + seconds))

    def enter(self, peer: RankId = ROGUE) -> tuple[socket.socket, list[int]]:
        """A hand-made writer, so that it can misbehave."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.settimeout(60)
        sock.connect(self.address.name)
        door = handshake.WriterProof(self.address.key, handshake.StreamHello(peer, bytes(16), 0, 1))
        sock.send(door.respond(sock.recv(1000)))
        verdict, fds, _, _ = socket.recv_fds(sock, 1000, 2)
        door.finish(verdict)
        return sock, fds


@pytest.fixture
def reader() -> Iterator[Reader]:
    made = Reader()
    yield made
    made.transport.close()
    made.memory.close()


def test_a_closed_socket_of_a_living_process_is_no_proof(reader: Reader) -> None:
    sock, fds = reader.enter()
    sock.close()
    gone = reader.next()
    assert isinstance(gone, PeerGone)
    assert (gone.peer, gone.proven) == (rank("rogue"), False)
    reader.transport.fence(rank("rogue"), 1)
    assert reader.next() == Fenced(rank("rogue"), 1, proven=False)
    for fd in fds:
        os.close(fd)


def test_a_goodbye_is_a_proof(reader: Reader) -> None:
    sock, fds = reader.enter()
    for fd in fds:
        os.close(fd)
    sock.send(b"goodbye")
    sock.close()
    gone = reader.next()
    assert isinstance(gone, PeerGone)
    assert gone.proven


def test_a_second_connection_of_a_name_keeps_it_alive(reader: Reader) -> None:
    first, fds1 = reader.enter()
    second, fds2 = reader.enter()
    first.send(b"goodbye")
    assert first.recv(1) == b""  # it was heard
    first.close()
    reader.transport.fence(rank("rogue"), 1)
    assert reader.next() == Fenced(rank("rogue"), 1, proven=False)
    second.send(b"goodbye")
    second.close()
    gone = reader.next()
    assert isinstance(gone, PeerGone)
    assert gone.proven
    for fd in (*fds1, *fds2):
        os.close(fd)


def test_a_process_that_died_with_its_socket_inherited_is_dead(reader: Reader) -> None:
    """A fork of the writer keeps the socket open: the pidfd still tells of the writer's death."""
    keeps, told = os.pipe()
    writer = os.fork()
    if writer == 0:
        reader.enter()
        if os.fork() == 0:
            os.close(told)
            os.read(keeps, 1)
        os._exit(0)
    os.close(keeps)
    os.waitpid(writer, 0)
    gone = reader.next()
    assert isinstance(gone, PeerGone)
    assert gone.proven
    os.close(told)


def test_a_writer_cannot_change_the_grants_or_shrink_the_pool(reader: Reader) -> None:
    sock, (pool, table) = reader.enter()
    with pytest.raises(PermissionError):
        mmap.mmap(table, 4096)
    for fd in (pool, table):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
        os.close(fd)
    sock.close()


@pytest.mark.parametrize("frame", [b"x", b"", bytes(handshake.RESPONSE_BYTES), bytes(4000)])
def test_noise_at_the_door_is_refused(reader: Reader, frame: bytes) -> None:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(60)
    sock.connect(reader.address.name)
    sock.recv(1000)
    sock.send(frame)
    answer = sock.recv(1000)
    assert answer == b"" or b"not a segue stream" in answer
    sock.close()
    rogue, fds = reader.enter()  # the door still opens
    rogue.close()
    for fd in fds:
        os.close(fd)


def test_strangers_are_bounded_in_number_and_time() -> None:
    reader = Reader(max_pending=2)
    socks = []
    for _ in range(3):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.settimeout(60)
        sock.connect(reader.address.name)
        socks.append(sock)
    frames = [sock.recv(1000) for sock in socks]
    assert [len(f) for f in frames] == [handshake.CHALLENGE_BYTES] * 3
    assert socks[0].recv(1000) == b""  # it was the oldest of too many
    rogue, fds = reader.enter()  # who proves itself at once gets in all the same
    reader.later(60.0)
    assert [sock.recv(1000) for sock in socks[1:]] == [b"", b""]  # and the deadline passed
    rogue.close()
    for fd in fds:
        os.close(fd)
    for sock in socks:
        sock.close()
    reader.transport.close()
    reader.memory.close()


def test_connect_has_a_deadline(reader: Reader) -> None:
    silent = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    silent.bind(b"\0segue-test-silent-%d" % os.getpid())
    silent.listen(1)
    address = msgspec.structs.replace(reader.address, name=b"\0segue-test-silent-%d" % os.getpid())
    endpoint = msgspec.structs.replace(reader.endpoint, data=msgspec.msgpack.encode(address))
    with pytest.raises(BootstrapTimeout):
        reader.transport.connect(rank("cccc"), endpoint, 0.1)
    silent.close()


def test_another_host_is_refused(reader: Reader) -> None:
    address = msgspec.structs.replace(reader.address, host="elsewhere")
    endpoint = msgspec.structs.replace(reader.endpoint, data=msgspec.msgpack.encode(address))
    with pytest.raises(PeerRefused, match="one host"):
        reader.transport.connect(rank("cccc"), endpoint, 60)


def test_an_endpoint_that_promises_too_much_is_refused(reader: Reader) -> None:
    endpoint = msgspec.structs.replace(reader.endpoint, nbytes=2 * MiB)
    with pytest.raises(PeerRefused, match="not what its endpoint says"):
        reader.transport.connect(rank("bbbb"), endpoint, 60)


def test_memory_that_can_shrink_is_refused() -> None:
    transport = make_shm(lambda _e: None, rank("aaaa"))
    fd = os.memfd_create("loose", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    memory = Memory([replace(host_region(mmap.mmap(fd, 4096)), fd=fd)])
    with pytest.raises(ConfigError, match="sealed"):
        transport.register(memory)
    transport.close()
    memory.close()


def test_writing_to_itself(reader: Reader) -> None:
    """Both ends in one process, even in one transport."""
    reader.memory.buffer[:3] = b"abc"
    reader.transport.connect(rank("bbbb"), reader.endpoint, 60)
    reader.transport.grant(rank("bbbb"), 3, whole(MiB))
    reader.transport.write(rank("bbbb"), 3, 1, [CopyBlock(0, 100, 1, 3)])
    assert isinstance(reader.next(), Written)
    assert reader.memory.buffer[100:103] == b"abc"


def test_grants_are_bounded_and_found() -> None:
    table = GrantTable()
    view = GrantView(table.fd)
    from segue.kv.transport.shm.shm_table import token

    for epoch in range(1, SLOTS + 1):
        table.add(rank("aaaa"), epoch)
    table.add(rank("aaaa"), 5)  # again: the same slot
    with pytest.raises(OutOfCapacity):
        table.add(rank("aaaa"), SLOTS + 1)
    slot = view.find(token(rank("aaaa"), 77))
    assert slot >= 0
    assert view.holds(slot, token(rank("aaaa"), 77))
    table.remove(rank("aaaa"), 77)
    assert not view.holds(slot, token(rank("aaaa"), 77))
    for other in (rank("bbbb"), rank("aaaa", dp_rank=1), rank("aaaa", number=1)):
        assert view.find(token(other, 78)) == -1
    table.remove_peer(rank("aaaa"))
    assert len(table) == 0
    view.close()
    table.close()


def test_a_writer_sees_between_two_slices_that_its_epoch_has_ended() -> None:
    """Also when another one has its slot by then."""
    table = GrantTable()
    view = GrantView(table.fd)
    mapped: Any = SimpleNamespace(grants=view)
    path = MappedPeer(None, None, ROGUE, rank("bbbb"), mapped, print, lambda _path: True)  # type: ignore[arg-type]
    allowed, other = path.allowing(3), path.allowing(4)
    assert not allowed()
    table.add(ROGUE, 3)
    assert allowed()
    table.remove(ROGUE, 3)
    assert not allowed()
    table.add(ROGUE, 4)
    assert (allowed(), other()) == (False, True)
    view.close()
    table.close()


def test_allocated_memory_is_sealed_and_zero() -> None:
    memory = allocate(5000)
    assert memory.nbytes == 8192
    assert sealed(memory.only.fd)
    assert not np.frombuffer(memory.buffer, np.uint8).any()
    memory.close()


def test_memory_that_the_host_does_not_have_is_refused_before_it_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel would fill such a memfd until it kills processes, so it must not even be asked."""

    def asked(*_args: object) -> None:
        raise AssertionError("the kernel was asked for the memory")

    monkeypatch.setattr(os, "posix_fallocate", asked)
    with pytest.raises(OutOfCapacity, match="--kv-gib"):
        allocate(available_bytes() + 2**30)


def test_what_is_available_is_a_part_of_the_host() -> None:
    assert 0 < available_bytes() < os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
