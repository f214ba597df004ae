"""`shm` when something of the host fails: descriptors, memory, system calls, processes, threads."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import gc
import mmap
import os
import resource
import select
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from shm_sides import MiB, Side, reader_lost, take

from areas import whole
from ranks import rank
from segue.kv.errors import Internal, OutOfCapacity, PeerRefused, SegueError, TransferFailed
from segue.kv.layout.blocks import CopyBlock
from segue.kv.transport.base import Fenced, PeerGone, WriteFailed, Written
from segue.kv.transport.kinds import KINDS
from segue.kv.transport.memory import pool_memory as memory
from segue.kv.transport.memory.pool_memory import allocate, map_shared
from segue.kv.transport.net import key_handshake as handshake
from segue.kv.transport.net.ioloop import Timer
from segue.kv.transport.shm import shm_host, shm_in, shm_out
from segue.kv.transport.shm import shm_transport as shm
from segue.kv.transport.shm.shm_host import HOST, ShmHost
from segue.kv.transport.shm.shm_table import TABLE_BYTES
from segue.kv.transport.shm.shm_transport import ShmTransport
from segue.kv.transport.shm.shm_wire import GOODBYE


@pytest.fixture(scope="module", autouse=True)
def libraries() -> None:
    """Libraries of other transports open descriptors when they are first looked at: before any is counted.
    And what earlier tests have left to the garbage collector is closed."""
    KINDS.available()
    gc.collect()


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side]]:
    """A writer and a reader that are not connected; afterwards no descriptor and no mapping is left."""
    before, maps = descriptors(), mappings()
    writer, reader = Side(rank("aaaa")), Side(rank("bbbb"))
    yield writer, reader
    writer.close()
    reader.close()
    assert descriptors() == before
    assert mappings() == maps


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def mappings() -> int:
    with open("/proc/self/maps", encoding="utf-8") as maps:
        return sum("memfd:segue" in line for line in maps)


def works(writer: Side, reader: Side, epoch: int = 7) -> None:
    """A write lands."""
    writer.transport.connect(reader.me, reader.endpoint, 60)
    reader.transport.grant(writer.me, epoch, whole(MiB))
    writer.memory.buffer[:3] = b"abc"
    writer.transport.write(reader.me, epoch, 1, [CopyBlock(0, 100, 1, 3)])
    event = writer.next()
    assert isinstance(event, Written), event
    assert reader.memory.buffer[100:103] == b"abc"


# ---- a death must be one --------------------------------------------------------------------------


@pytest.mark.parametrize("goodbye_first", [True, False])
def test_a_stale_death_does_not_reach_the_peer_that_joined_meanwhile(
    sides: tuple[Side, Side], goodbye_first: bool
) -> None:
    """One leaves and exits while another joins and a third knocks, and the I/O thread is busy: the kernel
    gives the pidfd of the second the number that the first one's had."""
    _, reader = sides
    told, tell = os.pipe()
    obey, order = os.pipe()
    leaver = os.fork()
    if leaver == 0:
        sock, proof, answer = reader.begin(rank("leaves"))
        sock.send(answer)
        take(sock, proof)
        if goodbye_first:
            sock.send(GOODBYE)
        os.write(tell, b"1")
        os.read(obey, 1)
        if not goodbye_first:
            sock.send(GOODBYE)
        sock.close()
        os.write(tell, b"2")
        os.read(obey, 1)
        os._exit(0)
    assert os.read(told, 1) == b"1"
    joins, proof, answer = reader.begin(rank("joins"))
    knocks = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    free = reader.busy()
    os.write(order, b"1")
    assert os.read(told, 1) == b"2"  # the leaver's socket has ended
    knocks.connect(reader.address.name)
    joins.send(answer)
    os.write(order, b"2")
    os.waitpid(leaver, 0)  # its process, too
    free.set()
    fds = take(joins, proof)
    assert reader.next() == reader_lost(rank("leaves"), proven=True)
    assert reader.writers() == {rank("joins")}
    reader.transport.fence(rank("joins"), 1)
    assert reader.next() == Fenced(rank("joins"), 1, proven=False)
    for fd in (*fds, told, tell, obey, order):
        os.close(fd)
    joins.send(GOODBYE)
    assert isinstance(reader.next(), PeerGone)
    joins.close()
    knocks.close()


def test_a_living_process_is_not_dead_whatever_the_loop_says(sides: tuple[Side, Side]) -> None:
    """At either end the kernel is asked: an event alone is no proof."""
    writer, reader = sides
    works(writer, reader)
    incoming, path = reader.incoming, writer.transport._paths.of[reader.me]
    (peer,) = incoming.writers[writer.me]
    reader.on_loop(lambda: incoming._died(peer, select.EPOLLIN))
    writer.on_loop(lambda: path._died(select.EPOLLIN))
    assert reader.writers() == {writer.me}
    reader.transport.fence(writer.me, 1)
    assert reader.next() == Fenced(writer.me, 1, proven=False)
    works(writer, reader, epoch=8)


def test_a_pidfd_says_ended_only_of_a_process_that_has() -> None:
    obey, order = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(obey, 1)
        os._exit(0)
    pidfd = os.pidfd_open(child)
    assert not HOST.ended(pidfd)
    os.write(order, b"1")
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # ended, and not yet forgotten
    assert HOST.ended(pidfd)
    os.waitpid(child, 0)
    assert HOST.ended(pidfd)
    os.close(pidfd)
    assert not HOST.ended(pidfd)  # a number that stands for nothing proves nothing
    os.close(obey)
    os.close(order)


# ---- a pool that cannot be mapped -------------------------------------------------------------------


@contextmanager
def madvise_fails(code: int, monkeypatch: pytest.MonkeyPatch, after: int = 0) -> Iterator[None]:
    """MADV_POPULATE_WRITE fails from its `after`-th call on, as on another kernel or in a full cgroup."""
    calls = []

    class Mapping(mmap.mmap):
        def madvise(self, option: int, *where: int) -> None:
            if option == memory._MADV_POPULATE_WRITE:
                calls.append(where)
                if len(calls) > after:
                    raise OSError(code, os.strerror(code))
            super().madvise(option, *where)

    with monkeypatch.context() as patch:
        patch.setattr(memory.mmap, "mmap", Mapping)
        yield
    assert len(calls) > after


def test_a_kernel_that_cannot_populate_by_madvise_has_another_way(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, reader = sides
    with madvise_fails(errno.EINVAL, monkeypatch):
        works(writer, reader)
    assert writer.transport._paths.of[reader.me].mapped.pool is not reader.memory.buffer


def test_the_other_way_leaves_every_page_resident_and_writable_without_a_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = allocate(8 * MiB)
    monkeypatch.setattr(memory, "_POPULATE_BYTES", 3 * MiB)
    with madvise_fails(errno.EINVAL, monkeypatch):
        mapped = map_shared(pool.only.fd, pool.nbytes)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    mapped[:: mmap.PAGESIZE] = b"x" * (pool.nbytes // mmap.PAGESIZE)
    faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
    assert faults < pool.nbytes // mmap.PAGESIZE // 10
    assert pool.buffer[:: mmap.PAGESIZE].count(b"x") == pool.nbytes // mmap.PAGESIZE
    mapped.close()
    pool.close()


def test_a_fork_does_not_inherit_the_mapping() -> None:
    pool = allocate(4096)
    mapped = map_shared(pool.only.fd, pool.nbytes)
    with open("/proc/self/smaps", encoding="utf-8") as smaps:
        regions = smaps.read().split("memfd:segue")[1:]
    flags = [region.split("VmFlags:")[1].split("\n")[0].split() for region in regions]
    assert sum("dc" in each for each in flags) == 1
    mapped.close()
    pool.close()


@contextmanager
def _a_page_is_missing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An old kernel, and a page that the host cannot give: touching it would be SIGBUS."""

    def none(*_args: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with madvise_fails(errno.EINVAL, monkeypatch), monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", none)
        yield


def _out_of_address_space(_monkeypatch: pytest.MonkeyPatch) -> Any:
    @contextmanager
    def limited() -> Iterator[None]:
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        with open("/proc/self/statm", encoding="ascii") as statm:
            used = int(statm.read().split()[0]) * mmap.PAGESIZE
        resource.setrlimit(resource.RLIMIT_AS, (used + 64 * MiB, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))

    return limited()


@pytest.mark.parametrize(
    ("fault", "nbytes"),
    [
        (partial(madvise_fails, errno.ENOMEM), MiB),
        (partial(madvise_fails, errno.EFAULT), MiB),
        (partial(madvise_fails, errno.ENOMEM, after=1), 100 * MiB),
        (_a_page_is_missing, MiB),
        (_out_of_address_space, 256 * MiB),
    ],
    ids=["full cgroup", "no page", "in the middle", "an old kernel", "a real limit"],
)
def test_a_writer_that_cannot_map_is_no_writer(
    fault: Callable[[pytest.MonkeyPatch], Any], nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A typed error, nothing left at either end, and the reader has the proof that nothing is mapped."""
    writer, reader = Side(rank("aaaa")), Side(rank("bbbb"), nbytes)
    held, mapped = descriptors(), mappings()
    for _ in range(3):
        with fault(monkeypatch), pytest.raises(OutOfCapacity, match="cannot be mapped here"):
            writer.transport.connect(reader.me, reader.endpoint, 60)
        assert reader.next() == reader_lost(writer.me, proven=True)
        assert reader.writers() == set()
        assert (descriptors(), mappings()) == (held, mapped)
    reader.transport.fence(writer.me, 1)
    assert reader.next() == Fenced(writer.me, 1, proven=True)
    works(writer, reader)
    writer.close()
    reader.close()


def test_a_table_that_cannot_be_mapped_leaves_no_pool_mapped(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, reader = sides

    def full(_fd: int, _host: object) -> None:
        raise OSError(errno.ENOMEM, "no room")

    held, mapped = descriptors(), mappings()
    with monkeypatch.context() as patch:
        patch.setattr(shm_out, "GrantView", full)
        with pytest.raises(OutOfCapacity):
            writer.transport.connect(reader.me, reader.endpoint, 60)
    assert reader.next() == reader_lost(writer.me, proven=True)
    assert (descriptors(), mappings()) == (held, mapped)


@pytest.mark.parametrize("nbytes", [-1, 0, 2 * MiB, 2**62, 2**70])
def test_an_endpoint_of_another_size_is_refused_and_leaves_nothing(
    sides: tuple[Side, Side], nbytes: int
) -> None:
    writer, reader = sides
    held = descriptors()
    with pytest.raises(PeerRefused):
        writer.transport.connect(reader.me, msgspec.structs.replace(reader.endpoint, nbytes=nbytes), 30)
    assert reader.next() == reader_lost(writer.me, proven=True)
    assert descriptors() == held


# ---- system calls that fail -------------------------------------------------------------------------


class Calls:
    """Counts system calls of a thread, and has one of them fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, loop: Any, nth: int, code: int) -> None:
        self.names: list[str] = []
        self._thread = loop._thread
        self._nth, self._code = nth, code
        for name in ("accept", "setblocking", "getsockopt", "send", "recv", "sendmsg"):
            monkeypatch.setattr(socket.socket, name, self._wrap(name, getattr(socket.socket, name)))
        monkeypatch.setattr(os, "pidfd_open", self._wrap("pidfd_open", os.pidfd_open))
        loop._poller._epoll = Epoll(loop._poller._epoll, self._wrap)

    def end(self) -> list[str]:
        """No more fails; what was called until now."""
        self._nth = 0
        return self.names[:]

    def _wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread() is self._thread:
                self.names.append(name)
                if len(self.names) == self._nth:
                    raise OSError(self._code, os.strerror(self._code))
            return call(*args, **kwargs)

        return counted


class Epoll:
    """The loop's epoll, with calls that may fail."""

    def __init__(self, real: Any, wrap: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> None:
        self._real = real
        self.register = wrap("epoll_ctl", real.register)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EMFILE], ids=errno.errorcode.get)
def test_no_system_call_of_the_accept_path_ends_the_loop(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in turn fails once, for one peer: the next one is served, and nothing is left behind."""
    nth, spoiled, names = 0, 0, [""]
    while nth <= len(names):
        nth += 1
        before = descriptors()
        reader, victim, other = Side(rank("bbbb")), Side(rank("aaaa")), Side(rank("cccc"))
        with monkeypatch.context() as patch:
            calls = Calls(patch, reader.transport._loop, nth, code)
            try:
                victim.transport.connect(reader.me, reader.endpoint, 60)
            except TransferFailed:
                spoiled += 1
            names = calls.end()
            works(other, reader)
        assert reader.transport._emitter.failure == ""
        victim.close()
        other.close()
        reader.close()
        assert descriptors() == before, f"after {names[nth - 1 : nth]} had failed"
    assert spoiled
    assert {"accept", "getsockopt", "epoll_ctl", "recv", "send", "sendmsg"} <= set(names)


@pytest.mark.parametrize("nth", [1, 2])
def test_a_path_that_cannot_be_watched_ends_alone(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    writer, reader = sides
    with monkeypatch.context() as patch:
        loop = writer.transport._loop
        real = loop._poller._epoll
        Calls(patch, loop, nth, errno.ENOSPC)
        writer.transport.connect(reader.me, reader.endpoint, 60)
        gone = writer.next()
        loop._poller._epoll = real
    assert gone == reader_lost(reader.me, proven=False)
    assert reader.next() == reader_lost(writer.me, proven=True)
    works(writer, reader)


@contextmanager
def no_descriptors(left: int) -> Iterator[None]:
    """This process may open `left` more files."""
    taken = [os.open("/dev/null", os.O_RDONLY)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken[0] + 64, hard))
    try:
        while True:
            try:
                taken.append(os.open("/dev/null", os.O_RDONLY))
            except OSError:
                break
        for fd in taken[-left:] if left else []:
            os.close(fd)
        del taken[len(taken) - left :]
        yield
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("left", range(7))
def test_out_of_descriptors_is_a_typed_error_and_heals(sides: tuple[Side, Side], left: int) -> None:
    """Writer and reader share the table of files here, so all of their calls meet the limit."""
    writer, reader = sides
    with no_descriptors(left), pytest.raises(SegueError) as caught:
        writer.transport.connect(reader.me, reader.endpoint, 0.5)
    assert not isinstance(caught.value, Internal)
    works(writer, reader)
    while not writer.events.empty():
        writer.next()


def test_connections_that_never_say_goodbye_are_few(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each keeps a descriptor of the reader's until its process ends."""
    monkeypatch.setattr(shm_in, "DEATH_GRACE_S", 0.0)
    _, reader = sides
    held = descriptors()
    for _ in range(shm_in.MAX_PER_RANK):
        sock = reader.enter(rank("rude"))
        sock.close()
        assert reader.next() == reader_lost(rank("rude"), proven=False)
    assert descriptors() == held + shm_in.MAX_PER_RANK
    sock, proof, answer = reader.begin(rank("rude"))
    sock.send(answer)
    with pytest.raises(PeerRefused, match="goodbye"):
        take(sock, proof)
    sock.close()


def test_the_oldest_stranger_makes_room_long_before_its_deadline() -> None:
    reader = Side(rank("bbbb"), max_pending=2, handshake_s=3600.0)
    waiting = [reader.begin(rank(f"slow{n}")) for n in range(3)]
    assert waiting[0][0].recv(1000) == b"", "it was one too many"
    for n, (sock, proof, answer) in enumerate(waiting[1:], 1):
        sock.send(answer)
        for fd in take(sock, proof):
            os.close(fd)
        sock.send(GOODBYE)
        assert reader.next() == reader_lost(rank(f"slow{n}"), proven=True)
    for sock, _, _ in waiting:
        sock.close()
    reader.close()


def test_a_writer_that_gave_up_before_it_was_answered_is_no_writer(sides: tuple[Side, Side]) -> None:
    _, reader = sides
    sock, _, answer = reader.begin(rank("hasty"))
    free = reader.busy()
    sock.send(answer)
    sock.close()
    free.set()
    assert reader.next() == reader_lost(rank("hasty"), proven=True)
    assert reader.writers() == set()


# ---- what the holder of the descriptor can do ----------------------------------------------------------


def _fallocate(fd: int, mode: int, start: int, nbytes: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    done = libc.fallocate(fd, mode, ctypes.c_long(start), ctypes.c_long(nbytes))
    return 0 if done == 0 else ctypes.get_errno()


def test_what_a_peer_can_do_with_the_descriptor_of_the_pool(sides: tuple[Side, Side]) -> None:
    writer, reader = sides
    sock, proof, answer = reader.begin(rank("rogue"))
    sock.send(answer)
    pool, table = take(sock, proof)
    for seal in (0x1, 0x2, 0x4, 0x8, 0x10):  # the last two: WRITE and FUTURE_WRITE
        with pytest.raises(PermissionError):
            fcntl.fcntl(pool, memory._F_ADD_SEALS, seal)
    for size in (0, MiB - 1, 2 * MiB):
        with pytest.raises(PermissionError):
            os.ftruncate(pool, size)
    with pytest.raises(PermissionError):
        os.ftruncate(table, 0)
    with pytest.raises(PermissionError):
        mmap.mmap(table, 4096)
    assert _fallocate(pool, 0, MiB, 4096) == errno.EPERM
    works(writer, reader)  # others can still map and write
    reader.memory.buffer[:4096] = b"k" * 4096
    keep_size, punch_hole = 0x1, 0x2
    assert _fallocate(pool, keep_size | punch_hole, 0, 4096) == 0
    assert reader.memory.buffer[:4096] == bytes(4096), "it can write zeros, as it can write anything"
    assert _fallocate(table, keep_size | punch_hole, 0, 4096) == errno.EPERM
    sock.send(GOODBYE)
    sock.close()
    for fd in (pool, table):
        os.close(fd)


# ---- full books, dead threads ---------------------------------------------------------------------------


def test_more_writes_than_can_wait_fail_one_by_one() -> None:
    writer, reader = Side(rank("aaaa"), max_writes=2, copy_threads=1), Side(rank("bbbb"))
    writer.transport.connect(reader.me, reader.endpoint, 60)
    reader.transport.grant(writer.me, 3, whole(MiB))
    inside, go = threading.Event(), threading.Event()

    def hold(*_args: object) -> None:
        inside.set()
        go.wait(60)

    writer.transport._copier._copy = hold
    writer.transport.write(reader.me, 3, 0, [CopyBlock(0, 0, 1, 1)])
    assert inside.wait(60)
    for tag in range(1, 5):
        writer.transport.write(reader.me, 3, tag, [CopyBlock(0, 0, 1, 1)])
    for tag in (3, 4):
        failed = writer.next()
        assert isinstance(failed, WriteFailed)
        assert failed.tag == tag
        assert isinstance(failed.error, OutOfCapacity)
    go.set()
    assert [e.tag for e in (writer.next() for _ in range(3)) if isinstance(e, Written)] == [0, 1, 2]
    writer.close()
    reader.close()


def test_after_the_death_of_a_copying_thread_fences_are_answered_and_writes_refused(
    sides: tuple[Side, Side], hooked: threading.Event
) -> None:
    writer, reader = sides
    works(writer, reader)

    def bad(*_args: object) -> None:
        raise KeyError("a bug")

    writer.transport._copier._copy = bad
    writer.transport.write(reader.me, 7, 2, [CopyBlock(0, 0, 1, 1)])
    failed = writer.next()
    assert isinstance(failed, WriteFailed)
    assert isinstance(failed.error, Internal)
    assert writer.next() == reader_lost(reader.me, proven=False)
    writer.transport.fence(reader.me, 7)
    assert writer.next() == Fenced(reader.me, 7, proven=True)
    writer.transport.write(reader.me, 7, 3, [CopyBlock(0, 0, 1, 1)])
    assert isinstance(writer.next(), WriteFailed)
    assert hooked.wait(60)


def test_an_answer_that_was_due_when_the_loop_died_is_told(
    sides: tuple[Side, Side], hooked: threading.Event
) -> None:
    writer, reader = sides
    works(writer, reader)
    free = writer.busy()

    def die() -> None:
        raise KeyError("a bug")

    writer.transport._loop.post(die)
    writer.transport.fence(reader.me, 7)
    writer.transport.write(reader.me, 7, 9, [CopyBlock(0, 0, 1, 1)])  # of a fenced epoch
    free.set()
    assert writer.next() == Fenced(reader.me, 7, proven=True)
    failed = writer.next()
    assert isinstance(failed, WriteFailed)
    assert failed.tag == 9
    assert writer.next() == reader_lost(reader.me, proven=False)
    assert hooked.wait(60), "else the hook is put back before the thread has died"


# ---- a host without it ------------------------------------------------------------------------------------


def test_a_host_whose_system_calls_are_forbidden_says_so_and_uses_tcp(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from segue.server.instance.kv_settings import usable_transports

    assert ShmTransport.unusable() == ""
    assert usable_transports("auto", sides[0].memory) == ("shm", "tcp")

    def forbidden(*_args: object) -> int:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "pidfd_open", forbidden)
    held = descriptors()
    assert "not permitted" in KINDS.available()["shm"]
    assert descriptors() == held
    assert usable_transports("auto", sides[0].memory) == ("tcp",)
    assert usable_transports("shm", sides[0].memory) == ("shm",)
    assert "not permitted" in caplog.text


def test_memory_that_may_only_be_read_is_not_mapped() -> None:
    pool = allocate(4096)
    mapped = mappings()
    read_only = os.open(f"/proc/self/fd/{pool.only.fd}", os.O_RDONLY)
    with pytest.raises(OSError):
        map_shared(read_only, 4096)
    assert mappings() == mapped
    os.close(read_only)
    pool.close()


# ---- grants ------------------------------------------------------------------------------------------------


def test_what_was_not_granted_is_refused_and_the_grants_of_who_has_gone_are_over(
    sides: tuple[Side, Side],
) -> None:
    writer, reader = sides
    unmapped = mappings()
    works(writer, reader, epoch=7)
    writer.transport.write(reader.me, 8, 2, [CopyBlock(0, 200, 1, 3)])
    failed = writer.next()
    assert isinstance(failed, WriteFailed)
    assert failed.refused
    assert reader.memory.buffer[200:203] == bytes(3)
    table = reader.transport._table
    reader.transport.grant(rank("other"), 9, whole(MiB))
    assert len(table) == 2
    path = writer.transport._paths.of[reader.me]
    writer.on_loop(lambda: path._gone("the test says so"))
    assert reader.next() == reader_lost(writer.me, proven=True)
    assert mappings() == unmapped, "a goodbye while the pool is still mapped"
    assert len(table) == 1, "of the one that has gone, and of no other"
    writer.next()


def test_nothing_is_written_to_a_reader_whose_socket_has_ended(sides: tuple[Side, Side]) -> None:
    """Its process lives and grants the epoch still: nobody would hear of an end of these writes."""
    writer, reader = sides
    works(writer, reader)
    incoming = reader.incoming
    (peer,) = incoming.writers[writer.me]
    reader.on_loop(lambda: incoming._socket_ended(peer))
    writer.on_loop(lambda: None)
    writer.transport.write(reader.me, 7, 2, [CopyBlock(0, 200, 1, 3)])
    failed = writer.next()
    assert isinstance(failed, WriteFailed)
    assert "no shm path" in str(failed.error)
    assert writer.next() == reader_lost(reader.me, proven=False)
    assert reader.next() == reader_lost(writer.me, proven=False)


# ---- ends while something runs -----------------------------------------------------------------------------


@pytest.mark.parametrize("first", [False, True])
def test_a_writer_that_is_closed_inside_a_slice_says_no_goodbye_and_keeps_the_pool_mapped(
    monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    """Its thread still writes: only its process' death would be a proof. Whichever thread it is."""
    monkeypatch.setattr(shm, "_CLOSE_S", 0.01)
    monkeypatch.setattr(shm_in, "DEATH_GRACE_S", 0.0)
    writer, reader = Side(rank("aaaa"), copy_threads=2), Side(rank("bbbb"))
    writer.transport.connect(reader.me, reader.endpoint, 60)
    reader.transport.grant(writer.me, 3, whole(MiB))
    inside, go, entered = threading.Event(), threading.Event(), threading.Semaphore(0)
    threads = writer.transport._copier._threads

    def hold(*_args: object) -> None:
        entered.release()
        if threading.current_thread() is threads[0 if first else 1]:
            inside.set()
        assert go.wait(60)

    copier = writer.transport._copier
    copier._copy = hold
    path = writer.transport._paths.of[reader.me]
    for tag in range(2):
        writer.transport.write(reader.me, 3, tag, [CopyBlock(0, 0, 1, 10)])
    for _ in range(2):
        assert entered.acquire(timeout=60)
    ended = threads[1 if first else 0]
    alive = type(ended).is_alive
    monkeypatch.setattr(ended, "is_alive", lambda: False)  # as if it had left its slice
    assert inside.is_set()
    writer.transport.close()
    monkeypatch.setattr(ended, "is_alive", partial(alive, ended))
    assert not path.mapped.pool.closed
    assert reader.next() == reader_lost(writer.me, proven=False)
    assert reader.writers() == {writer.me}
    reader.transport.fence(writer.me, 3)
    assert reader.next() == Fenced(writer.me, 3, proven=False)
    go.set()
    for thread in threads:
        thread.join(60)
    path.mapped.unmap()
    reader.close()
    writer.memory.close()


def test_a_write_while_its_transport_closes_touches_no_pool_that_is_unmapped(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from the loop of a transport that stages over this one: it would have ended by a ValueError."""
    writer, reader = sides
    works(writer, reader)
    stop = writer.transport._loop.stop

    def late(*args: Any) -> bool:
        assert writer.transport._paths.of[reader.me].mapped.pool.closed
        writer.transport.write(reader.me, 7, 2, [CopyBlock(0, 0, 1, 1)])
        return stop(*args)

    monkeypatch.setattr(writer.transport._loop, "stop", late)
    writer.transport.close()
    assert writer.events.empty()


def test_a_path_that_is_not_wanted_when_it_stands_leaves_nothing(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The transport was closed while it connected, or two threads connected at once."""
    writer, reader = sides
    held, mapped = descriptors(), mappings()
    leave = shm_out.Mapped.leave

    def unmapped(self: shm_out.Mapped, host: ShmHost, *, goodbye: bool) -> None:
        assert self.pool.closed, "a goodbye is a proof"
        leave(self, host, goodbye=goodbye)

    with monkeypatch.context() as patch:
        patch.setattr(shm_out.Mapped, "leave", unmapped)
        patch.setattr(writer.transport._paths, "add", lambda *_: False)
        writer.transport.connect(reader.me, reader.endpoint, 60)
    assert reader.next() == reader_lost(writer.me, proven=True)
    assert (descriptors(), mappings()) == (held, mapped)


def test_what_waits_for_a_reader_whose_socket_has_ended_fails_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its death is waited for, its writes are not: the pages that they read are wanted by others."""
    monkeypatch.setattr(shm_out, "DEATH_GRACE_S", 3600.0)
    writer, reader = Side(rank("aaaa"), copy_threads=1), Side(rank("bbbb"))
    works(writer, reader)
    incoming = reader.incoming
    (peer,) = incoming.writers[writer.me]
    inside, go = threading.Event(), threading.Event()
    monkeypatch.setattr(writer.transport._copier, "_copy", lambda *_: (inside.set(), go.wait(60)))
    for tag in (2, 3):
        writer.transport.write(reader.me, 7, tag, [CopyBlock(0, 0, 1, 1)])
    assert inside.wait(60)
    reader.on_loop(lambda: incoming._socket_ended(peer))
    failed = writer.next()
    assert isinstance(failed, WriteFailed)
    assert failed.tag == 3
    go.set()
    failed = writer.next()
    assert isinstance(failed, WriteFailed)
    assert failed.tag == 2
    writer.close()
    reader.close()


def test_the_end_of_the_socket_of_a_reader_that_was_dead_already_is_a_proof(sides: tuple[Side, Side]) -> None:
    """The kernel had no descriptor for its process when the path was made."""
    writer, reader = sides
    works(writer, reader)
    incoming, path = reader.incoming, writer.transport._paths.of[reader.me]
    (peer,) = incoming.writers[writer.me]

    def forget_process() -> None:
        pidfd = path.mapped.pidfd
        assert pidfd is not None
        writer.transport._loop.unwatch(pidfd)
        os.close(pidfd)
        path.mapped = replace(path.mapped, pidfd=None)

    writer.on_loop(forget_process)
    reader.on_loop(lambda: incoming._socket_ended(peer))
    assert writer.next() == reader_lost(reader.me, proven=True)


def test_who_came_again_is_not_gone_because_its_old_socket_ended(sides: tuple[Side, Side]) -> None:
    """The old process closed its socket and died; the second of waiting for that is not the new one's."""
    _, reader = sides
    incoming = reader.incoming
    sock = reader.enter(rank("again"))
    (old,) = incoming.writers[rank("again")]
    timers: list[Timer] = []

    def later(_delay_s: float, call: Callable[[], None]) -> Timer:
        timers.append(Timer(call))
        return timers[-1]

    def leaves() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reader.transport._loop, "later", later)
            incoming._socket_ended(old)
        incoming._gone(old, "its process has ended")

    reader.on_loop(leaves)
    assert reader.next() == reader_lost(rank("again"), proven=True)
    assert [timer.call for timer in timers] == [None]
    sock.close()


# ---- whose process it is -----------------------------------------------------------------------------------


class Strange(ShmHost):
    """A host at which the other end of each socket belongs to somebody else."""

    def peer_uid(self, sock: socket.socket) -> int:
        return super().peer_uid(sock) + 1


def test_a_process_of_another_user_is_given_nothing_though_it_knows_the_key() -> None:
    reader = Side(rank("bbbb"))
    incoming = reader.incoming
    incoming._host = Strange()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(60)
    sock.connect(reader.address.name)
    assert sock.recv(1000) == b""
    sock.close()
    assert reader.writers() == set()
    reader.close()


def test_a_listener_of_another_user_is_not_proven_anything_to(sides: tuple[Side, Side]) -> None:
    """A process that took the name of an ended reader would learn our identity, and could make us write."""
    writer, reader = sides
    with pytest.raises(PeerRefused, match="another user"):
        shm_out.map_peer(writer.me, reader.me, reader.endpoint, 60, Strange())
    assert reader.writers() == set()


def test_the_kernel_tells_the_user_and_the_process_at_the_other_end() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    assert HOST.peer_uid(ours) == os.getuid()
    pidfd = HOST.peer_pidfd(ours)
    assert pidfd is not None
    assert not os.get_inheritable(pidfd), "else every child of this process holds it"
    os.close(pidfd)
    ours.close()
    theirs.close()


def test_on_an_older_kernel_the_process_is_found_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def credentials(_level: int, option: int, *_size: int) -> bytes:
        if option == socket.SO_PEERCRED:
            return struct.pack("3i", os.getpid(), 22, 33)
        raise OSError(errno.ENOPROTOOPT, "Protocol not available")

    sock: Any = SimpleNamespace(getsockopt=credentials)
    assert HOST.peer_uid(sock) == 22
    pidfd = HOST.peer_pidfd(sock)
    assert pidfd is not None
    assert not HOST.ended(pidfd)
    os.close(pidfd)

    def none(_pid: int) -> int:
        raise ProcessLookupError(errno.ESRCH, "No such process")

    monkeypatch.setattr(os, "pidfd_open", none)
    assert HOST.peer_pidfd(sock) is None


def test_a_process_that_ended_in_the_handshake_is_refused(sides: tuple[Side, Side]) -> None:
    _, reader = sides
    incoming = reader.incoming

    class Ended(ShmHost):
        def peer_pidfd(self, sock: socket.socket) -> int | None:
            return None

    sock, proof, answer = reader.begin(rank("ended"))
    incoming._host = Ended()
    sock.send(answer)
    with pytest.raises(PeerRefused, match="the process is gone"):
        take(sock, proof)
    incoming._host = HOST
    assert reader.writers() == set()
    sock.close()


def test_a_host_is_another_one_for_another_boot_and_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first network namespace has the same number on every host, so it alone says nothing."""
    here = HOST.id()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: 12345)
        other_user = HOST.id()
    with monkeypatch.context() as patch:
        patch.setattr(shm_host.Path, "read_text", lambda *_args, **_how: "another-boot\n")
        other_boot = HOST.id()
    assert len({here, other_user, other_boot}) == 3
    assert here == HOST.id()


@pytest.mark.parametrize("loose", ["pool", "table", "short table"])
def test_memory_that_could_shrink_under_a_writer_is_not_mapped(loose: str) -> None:
    """To touch what is not there any more ends the process (SIGBUS)."""
    mapped = mappings()
    pool, fds = allocate(4096), []
    for what, nbytes in (("pool", 4096), ("table", TABLE_BYTES)):
        if loose == what:
            fd = os.memfd_create("loose", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, nbytes)
        elif what == "pool":
            fd = os.dup(pool.only.fd)
        else:
            fd, ours = memory.readable(nbytes - 8 * (loose == "short table"))
            ours.close()
        fds.append(fd)

    class Told(ShmHost):
        def receive_fds(self, _sock: socket.socket, _nbytes: int) -> tuple[bytes, list[int], bool]:
            return bytes(handshake.VERDICT_BYTES), fds, False

    proof: Any = SimpleNamespace(finish=lambda _verdict: None)
    with pytest.raises(PeerRefused, match="memory is not what" if loose == "pool" else "table of grants"):
        shm_out.take_memory(None, proof, 4096, Told())
    for fd in fds:
        with pytest.raises(OSError):
            os.fstat(fd)
    pool.close()
    assert mappings() == mapped


@pytest.mark.skipif(
    subprocess.run(["unshare", "--net", "true"], check=False, capture_output=True).returncode != 0,
    reason="a network namespace may not be made here",
)
def test_who_has_another_network_namespace_is_on_another_host() -> None:
    """Abstract sockets end there: a container beside this one, with the same kernel and user."""
    ask = [sys.executable, "-c", "from segue.kv.transport.shm.shm_host import HOST; print(HOST.id())"]
    here, there = (
        subprocess.run([*where, *ask], check=True, capture_output=True, text=True).stdout.strip()
        for where in ([], ["unshare", "--net"])
    )
    assert here == HOST.id()
    assert there != here
