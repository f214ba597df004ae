"""`shm`: one copy, by the writer, from its own pool into the receiver's mapped pool.

The receiver listens on an abstract unix socket (a random name that no file system knows), lets in
processes of its own user that know the Endpoint's key, and passes them the memfd of its pool.
The socket then stays open for one purpose: its end, and the kernel's word that the process behind it
is dead, are the proof that nothing of this peer can land any more.

Proofs:
- `fence` at the writer: no copying thread is inside a slice of the epoch any more.
- `fence` at the receiver: only while the peer holds no mapping. Else another process writes; its
  `Drained` or death is the proof. Ending the grant in the shared table merely stops it early.
- `PeerGone(proven=True)`: the pidfd of the peer says, when asked, that the process has ended (its memory
  was gone before), or the peer said goodbye, which it does after its copying threads have ended and its
  mapping is unmapped. A closed socket alone proves nothing: the process may live and write. The
  mapping is not inherited by a fork of the writer (MADV_DONTFORK). A writer that could not map the pool says
  goodbye as well.

Not prevented: the writer maps the whole pool, so a writer with a bug may write into pages of other requests,
or of epochs that were never granted. It checks that its blocks lie inside both memories; that they lie in the
pages it was given is by construction (the planner makes them from the destination's page ids). Two things
protect: only processes of the same user that know the endpoint's key, which travels in authenticated sessions
only, get a mapping; and decode compares the checksum of the landed bytes before it commits.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from segue.kv.errors import DECODE_ERRORS, ConfigError, OutOfCapacity, SegueError, TransferFailed
from segue.kv.ids import RankId
from segue.kv.layout.blocks import CopyBlock
from segue.kv.layout.content import Content
from segue.kv.transport.base import Endpoint, EventSink, Fenced, Transport, WriteFailed
from segue.kv.transport.emitter import EventEmitter
from segue.kv.transport.memory import ranges
from segue.kv.transport.memory.copier import Copier, Copy, copy_slice
from segue.kv.transport.memory.copy_queue import CopyJob
from segue.kv.transport.memory.pool_memory import Memory, MemoryKind, allocate, map_shared
from segue.kv.transport.net import key_handshake as handshake
from segue.kv.transport.options import TransportOptions
from segue.kv.transport.paths import Paths
from segue.kv.transport.shm.shm_host import HOST, ShmHost
from segue.kv.transport.shm.shm_in import ShmListener
from segue.kv.transport.shm.shm_out import MappedPeer, map_peer
from segue.kv.transport.shm.shm_table import GrantTable
from segue.kv.transport.shm.shm_wire import ShmAddress
from segue.kv.transport.write_book import Write, fenced

_CLOSE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ShmTuning:
    """Sizes and bounds; the defaults are measured (bench/transport.py).

    slice_bytes: what a thread copies between two looks at the grant.
    max_writes: that wait.
    max_pending: connections that have not proven themselves.
    """

    slice_bytes: int = 1 * 2**20
    copy_threads: int = 2
    max_writes: int = 65536
    max_pending: int = 16


class ShmTransport(Transport):
    """`Transport` between processes of one user on one host."""

    name = "shm"
    preference = 10
    memory_kinds = frozenset({MemoryKind.SHARED})
    automatic = True

    def __init__(
        self,
        on_event: EventSink,
        options: TransportOptions,
        tuning: ShmTuning = ShmTuning(),
        *,
        copy: Copy = copy_slice,
        host: ShmHost = HOST,
    ) -> None:
        self._options = options
        self._tuning = tuning
        self._lock = threading.RLock()
        self._emitter = EventEmitter(self.name, on_event)
        self._incoming: ShmListener | None = None
        self._host = host
        self._table = GrantTable(host)
        self._paths: Paths[MappedPeer] = Paths(self.name, self.memory_kinds, self._emitter)
        self._loop = host.loop("segue-shm-io", self._crashed)
        self._copier = Copier(
            "segue-shm-copy",
            self._emitter.emit,
            self._crashed,
            slice_bytes=tuning.slice_bytes,
            max_jobs=tuning.max_writes,
            threads=tuning.copy_threads,
            copy=copy,
            host=host,
        )
        self._loop.start()
        self._copier.start()

    @classmethod
    def unusable(cls) -> str:
        """Tries one page of memory."""
        if missing := super().unusable():
            return missing
        try:
            memory = allocate(mmap.PAGESIZE)
            try:
                os.close(os.pidfd_open(os.getpid()))
                assert memory.only.fd is not None
                map_shared(memory.only.fd, memory.nbytes).close()
            finally:
                memory.close()
        except (OSError, OutOfCapacity) as exc:
            return f"its system calls do not work here: {exc}"
        return ""

    @classmethod
    def reaches(cls, ours: Endpoint, theirs: Endpoint) -> bool:
        """Only on one host, in one network namespace, as one user; the endpoints say so."""
        try:
            here, there = (msgspec.msgpack.decode(end.data, type=ShmAddress) for end in (ours, theirs))
        except DECODE_ERRORS:
            return False
        return here.version == there.version == 1 and here.host == there.host != ""

    # ---- the six methods -----------------------------------------------------------------------

    def register(self, memory: Memory) -> Endpoint:
        """See `Transport.register`. Raises ConfigError also for several regions, or one that can shrink."""
        with self._lock:
            self._paths.check_register(memory)
            fd = memory.only.fd
            if fd is None or not self._host.sealed(fd):
                raise ConfigError(
                    "shm needs memory from transport.memory.allocate (sealed against shrinking)"
                )
            name = b"\0segue-" + self._host.random_bytes(16).hex().encode()
            listener = self._host.listen(name)
            key = handshake.new_key(self._host.random_bytes)
            address = ShmAddress(version=1, name=name, key=key, host=self._host.id())
            self._paths.memory = memory
            self._incoming = ShmListener(
                self._loop,
                self._lock,
                listener,
                address.key,
                fd,
                self._table,
                self._emitter.emit,
                max_pending=self._tuning.max_pending,
                handshake_s=self._options.limits.handshake_s,
                host=self._host,
            )
        self._loop.post(self._incoming.listener.open)
        return Endpoint(self.name, memory.nbytes, msgspec.msgpack.encode(address))

    def connect(self, peer: RankId, endpoint: Endpoint, timeout_s: float) -> None:
        """See `Transport.connect`. Raises also ConfigError before `register`."""
        with self._lock:
            if self._paths.check_connect(peer) is None:
                return
        me = self._options.me
        mapped = map_peer(me, peer, endpoint, timeout_s, self._host)
        path = MappedPeer(
            self._loop, self._copier, me, peer, mapped, self._emitter.emit, self._forget, self._host
        )
        with self._lock:
            if self._paths.add(peer, path):
                self._loop.post(path.open)
                return
        mapped.unmap()
        mapped.leave(self._host, goodbye=True)

    def grant(self, peer: RankId, epoch: int, area: Content) -> None:
        """See `Transport.grant`; `area` binds nobody: the peer, of our own user, writes by itself. Raises
        OutOfCapacity when too many grants live."""
        with self._lock:
            if not self._emitter.closed:
                self._table.add(peer, epoch)

    def write(self, peer: RankId, epoch: int, tag: int, blocks: Sequence[CopyBlock]) -> None:
        """See `Transport.write`."""
        error: SegueError
        with self._lock:
            try:
                path, memory = self._paths.check_write(peer, epoch)
                if path.broken:
                    raise TransferFailed(f"no shm path to {peer}")
                pool = path.mapped.pool
                nbytes = ranges.check(blocks, memory.nbytes, len(pool))
                allowed = path.allowing(epoch)
                clock = self._loop.time
                write = Write(epoch, tag, nbytes, clock())
                job = CopyJob(peer, write, blocks, memory.buffer, pool, allowed, clock)
                if self._copier.submit(job):
                    return
                raise OutOfCapacity("too many writes are waiting in the shm transport")
            except SegueError as exc:
                error = exc
        self._emitter.soon(self._loop, WriteFailed(peer, epoch, tag, error))

    def fence(self, peer: RankId, epoch: int) -> None:
        """See `Transport.fence` and this module's docstring for what is proven."""
        with self._lock:
            if self._emitter.closed:
                return
            self._table.remove(peer, epoch)
            self._paths.fenced.add(peer, epoch)
            written = self._incoming is not None and self._incoming.may_write(peer)
            answer = Fenced(peer, epoch, proven=not written)
            now = self._copier.cancel(peer, epoch, fenced(epoch), partial(self._emitter.emit, answer))
        if now is not None:
            self._emitter.run_soon(self._loop, now)

    def close(self) -> None:
        """See `Transport.close`. Peers hear a goodbye once nothing can be written any more."""
        with self._lock:
            if self._emitter.closed:
                return
            self._emitter.closed = True
        quiet = self._copier.stop(_CLOSE_S)
        if quiet:  # else the process' death will be the proof
            for path in list(self._paths.of.values()):
                path.mapped.unmap()
        self._loop.stop(partial(self._release, quiet), _CLOSE_S)

    # ---- inside ----------------------------------------------------------------------------------

    def _crashed(self, exc: BaseException) -> None:
        self._emitter.fail(exc)
        with self._lock:
            names = dict.fromkeys(
                (*self._paths.of, *(self._incoming.writers if self._incoming is not None else ()))
            )
        self._emitter.all_gone(names)

    def _forget(self, path: MappedPeer) -> bool:
        with self._lock:
            return self._paths.remove(path.peer, path)

    def _release(self, quiet: bool) -> None:
        """The loop's last call: close every descriptor, after saying goodbye where it is true."""
        for path in self._paths.of.values():
            path.mapped.leave(self._host, goodbye=quiet)
        if self._incoming is not None:
            self._incoming.close()
        self._paths.of.clear()
        self._table.close()
        self._paths.memory = None
