from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from shm_sides import MiB, Side, reader_lost

from areas import whole
from ranks import make_shm, rank
from segue.kv.errors import BootstrapTimeout, ConfigError, OutOfCapacity, PeerRefused
from segue.kv.layout.blocks import CopyBlock
from segue.kv.transport.base import Fenced, Written
from segue.kv.transport.memory.host_memory import available_bytes
from segue.kv.transport.memory.pool_memory import Memory, allocate, host_region, sealed
from segue.kv.transport.net import key_handshake as handshake
from segue.kv.transport.shm.shm_out import MappedPeer
from segue.kv.transport.shm.shm_table import SLOTS, GrantTable, GrantView

ROGUE = rank("rogue")


@pytest.fixture
def reader() -> Iterator[Side]:
    made = Side(rank("bbbb"))
    yield made
    made.close()


def test_a_closed_socket_of_a_living_process_is_no_proof(reader: Side) -> None:
    sock = reader.enter(ROGUE)
    sock.close()
    assert reader.next() == reader_lost(ROGUE, proven=False)
    reader.transport.fence(rank("rogue"), 1)
    assert reader.next() == Fenced(rank("rogue"), 1, proven=False)


def test_a_goodbye_is_a_proof(reader: Side) -> None:
    sock = reader.enter(ROGUE)
    sock.send(b"goodbye")
    sock.close()
    assert reader.next() == reader_lost(ROGUE, proven=True)


def test_a_second_connection_of_a_name_keeps_it_alive(reader: Side) -> None:
    first = reader.enter(ROGUE)
    second = reader.enter(ROGUE)
    first.send(b"goodbye")
    assert first.recv(1) == b""  # it was heard
    first.close()
    reader.transport.fence(rank("rogue"), 1)
    assert reader.next() == Fenced(rank("rogue"), 1, proven=False)
    second.send(b"goodbye")
    second.close()
    assert reader.next() == reader_lost(ROGUE, proven=True)


def test_a_process_that_died_with_its_socket_inherited_is_dead(reader: Side) -> None:
    """A fork of the writer keeps the socket open: the pidfd still tells of the writer's death."""
    keeps, told = os.pipe()
    writer = os.fork()
    if writer == 0:
        reader.enter(ROGUE)
        if os.fork() == 0:
            os.close(told)
            os.read(keeps, 1)
        os._exit(0)
    os.close(keeps)
    os.waitpid(writer, 0)
    assert reader.next() == reader_lost(ROGUE, proven=True)
    os.close(told)


@pytest.mark.parametrize("frame", [b"x", b"", bytes(handshake.RESPONSE_BYTES), bytes(4000)])
def test_noise_at_the_door_is_refused(reader: Side, frame: bytes) -> None:
    sock = reader.knock()
    sock.recv(1000)
    sock.send(frame)
    answer = sock.recv(1000)
    assert answer == b"" or b"not a segue stream" in answer
    sock.close()
    rogue = reader.enter(ROGUE)  # the door still opens
    rogue.close()


def test_connect_has_a_deadline(reader: Side) -> None:
    silent = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    silent.bind(b"\0segue-test-silent-%d" % os.getpid())
    silent.listen(1)
    address = msgspec.structs.replace(reader.address, name=b"\0segue-test-silent-%d" % os.getpid())
    endpoint = msgspec.structs.replace(reader.endpoint, data=msgspec.msgpack.encode(address))
    with pytest.raises(BootstrapTimeout):
        reader.transport.connect(rank("cccc"), endpoint, 0.1)
    silent.close()


def test_another_host_is_refused(reader: Side) -> None:
    address = msgspec.structs.replace(reader.address, host="elsewhere")
    endpoint = msgspec.structs.replace(reader.endpoint, data=msgspec.msgpack.encode(address))
    with pytest.raises(PeerRefused, match="one host"):
        reader.transport.connect(rank("cccc"), endpoint, 60)


def test_memory_that_can_shrink_is_refused() -> None:
    transport = make_shm(lambda _e: None, rank("aaaa"))
    fd = os.memfd_create("loose", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    memory = Memory([replace(host_region(mmap.mmap(fd, 4096)), fd=fd)])
    with pytest.raises(ConfigError, match="sealed"):
        transport.register(memory)
    transport.close()
    memory.close()


def test_writing_to_itself(reader: Side) -> None:
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
    path = MappedPeer(None, None, ROGUE, rank("bbbb"), mapped, print, lambda _path: True)
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
