"""`shm`: one copy, by the writer, from its own pool into the receiver's mapped pool.

The receiver listens on an abstract unix socket (a random name that no file system knows), lets in
processes of its own user that know the Endpoint's key, and passes them the memfd of its pool.
The socket then stays open for one purpose: its end, and the kernel's word that the process behind it
is dead, are the proof that nothing of this peer can land any more.

What is proven, and by what:
- `fence` at the writer: no copying thread is inside a slice of the epoch any more.
- `fence` at the receiver: only while the peer holds no mapping. Else another process writes; its
  `Drained` or death is the proof. Ending the grant in the shared table merely stops it early.
- `PeerGone(proven=True)`: the pidfd of the peer says that the process has ended (its memory was gone
  before), or the peer said goodbye, which it does after its copying threads have ended and its
  mapping is unmapped. A closed socket alone proves nothing: the process may live and write. The
  mapping is not inherited by a fork of the writer (MADV_DONTFORK).
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import secrets
import select
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from segue.core.errors import (
    DECODE_ERRORS,
    BootstrapTimeout,
    ConfigError,
    Internal,
    OutOfCapacity,
    PeerLost,
    PeerRefused,
    SegueError,
    TransferFailed,
)
from segue.layout.blocks import CopyBlock
from segue.transport import handshake, ranges
from segue.transport.base import Endpoint, EventSink, Fenced, PeerGone, TransportEvent, WriteFailed
from segue.transport.copier import Copier, Job
from segue.transport.epochs import Ended
from segue.transport.host import host_id, peer_pidfd, peer_uid
from segue.transport.ioloop import IoLoop, Timer
from segue.transport.memory import Memory, sealed
from segue.transport.shm_table import TABLE_BYTES, GrantTable, GrantView, token

SLICE_BYTES = 1 * 2**20
COPY_THREADS = 2  # measured: bench/transport.py
_GOODBYE = b"goodbye"
_POPULATE_BYTES = 64 * 2**20
_MADV_POPULATE_WRITE = 23
_DEATH_GRACE_S = 1.0  # a killed process closes its socket a moment before its pidfd says so
_CLOSE_S = 5.0
OUT_OF_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
REST_S = 0.1

log = logging.getLogger("segue.shm")


class ShmAddress(msgspec.Struct, frozen=True, kw_only=True):
    """What is in `Endpoint.data`. `host` is `host.host_id()` of the listener."""

    version: int
    name: bytes
    key: bytes
    host: str


@dataclass(slots=True, eq=False)
class Incoming:
    """A peer's socket at the receiver. `name` is empty until it proved that it knows the key."""

    sock: socket.socket
    door: handshake.Listener
    name: str = ""
    pidfd: int | None = None
    goodbye: bool = False
    timer: Timer | None = None


@dataclass(slots=True, eq=False)
class Outgoing:
    """The path to one receiver: its pool, mapped here, and the epochs it grants."""

    name: str
    sock: socket.socket
    target: mmap.mmap
    grants: GrantView
    pidfd: int | None
    dead: bool = False
    broken: bool = False

    def unmap(self) -> None:
        """Give the receiver's pool back; no copy may be running."""
        self.target.close()
        self.grants.close()


class ShmTransport:
    """`Transport` between processes of one user on one host. `me` is what peers call this side."""

    name = "shm"

    def __init__(
        self,
        on_event: EventSink,
        *,
        me: str,
        slice_bytes: int = SLICE_BYTES,
        copy_threads: int = COPY_THREADS,
        max_writes: int = 65536,
        max_strangers: int = 16,
        handshake_s: float = 5.0,
    ) -> None:
        self._on_event = on_event
        self._me = handshake.checked_name(me)
        self._max_strangers = max_strangers
        self._handshake_s = handshake_s
        self._lock = threading.RLock()
        self._closed = False
        self._failed: BaseException | None = None
        self._memory: Memory | None = None
        self._listener: socket.socket | None = None
        self._address: ShmAddress | None = None
        self._table = GrantTable()
        self._ended = Ended()
        self._writers: dict[str, list[Incoming]] = {}
        self._strangers: dict[int, Incoming] = {}
        self._readers: dict[str, Outgoing] = {}
        self._loop = IoLoop("segue-shm-io", self._crashed)
        self._copier = Copier(
            "segue-shm-copy",
            self._emit,
            self._crashed,
            slice_bytes=slice_bytes,
            max_jobs=max_writes,
            threads=copy_threads,
        )
        self._loop.start()
        self._copier.start()

    # ---- the six methods -----------------------------------------------------------------------

    def register(self, memory: Memory) -> Endpoint:
        """See `Transport.register`. Raises ConfigError on a second memory or one that can shrink."""
        with self._lock:
            if self._memory is not None or self._closed:
                raise ConfigError("a transport registers one memory, once, before it is closed")
            if not sealed(memory.fd):
                raise ConfigError(
                    "shm needs memory from transport.memory.allocate (sealed against shrinking)"
                )
            name = b"\0segue-" + secrets.token_hex(16).encode()
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
            listener.bind(name)
            listener.listen(128)
            self._memory, self._listener = memory, listener
            self._address = ShmAddress(version=1, name=name, key=handshake.new_key(), host=host_id())
        self._loop.post(partial(self._loop.watch, listener.fileno(), select.EPOLLIN, self._knock))
        return Endpoint(self.name, memory.nbytes, msgspec.msgpack.encode(self._address))

    def connect(self, peer: str, endpoint: Endpoint, timeout_s: float) -> None:
        """See `Transport.connect`. Raises also ConfigError before `register`."""
        with self._lock:
            if self._closed:
                raise TransferFailed("the transport is closed")
            if self._memory is None:
                raise ConfigError("register the memory before connecting")
            if peer in self._readers:
                return
        path = _open_path(self._me, peer, endpoint, timeout_s)
        with self._lock:
            if self._closed or peer in self._readers:
                path.unmap()
                _farewell(path.sock)
                if path.pidfd is not None:
                    os.close(path.pidfd)
                return
            self._readers[peer] = path
        self._loop.post(partial(self._watch_reader, path))

    def grant(self, peer: str, epoch: int) -> None:
        """See `Transport.grant`. Raises OutOfCapacity when too many grants live."""
        with self._lock:
            if not self._closed:
                self._table.add(peer, epoch)

    def write(self, peer: str, epoch: int, tag: int, blocks: Sequence[CopyBlock]) -> None:
        """See `Transport.write`."""
        error: SegueError
        with self._lock:
            path = self._readers.get(peer)
            try:
                if path is None or path.broken or self._memory is None:
                    raise TransferFailed(f"no shm path to {peer}")
                if self._failed is not None:
                    raise Internal(f"the shm transport has failed: {self._failed!r}")
                if (peer, epoch) in self._ended:
                    raise TransferFailed(f"epoch {epoch:x} was fenced", retryable=False)
                nbytes = ranges.check(blocks, self._memory.nbytes, len(path.target))
                allowed = self._gate(path, epoch)
                job = Job(peer, epoch, tag, blocks, nbytes, self._memory.buffer, path.target, allowed)
                if self._copier.submit(job):
                    return
                raise OutOfCapacity("too many writes are waiting in the shm transport")
            except SegueError as exc:
                error = exc
        self._soon(WriteFailed(peer, epoch, tag, error))

    def fence(self, peer: str, epoch: int) -> None:
        """See `Transport.fence` and this module's docstring for what is proven."""
        with self._lock:
            if self._closed:
                return
            self._table.remove(peer, epoch)
            self._ended.add(peer, epoch)
            answer = Fenced(peer, epoch, proven=peer not in self._writers)
            now = self._copier.cancel(
                peer,
                epoch,
                TransferFailed(f"epoch {epoch:x} was fenced", retryable=False),
                partial(self._emit, answer),
            )
        if now is not None and self._failed is None:
            self._loop.post(now)
        elif now is not None:
            now()

    def close(self) -> None:
        """See `Transport.close`. Peers hear a goodbye once nothing can be written any more."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        quiet = self._copier.stop(_CLOSE_S)
        if quiet:  # else the process' death will be the proof
            for path in list(self._readers.values()):
                path.unmap()
        self._loop.stop(partial(self._release, quiet), _CLOSE_S)

    # ---- events --------------------------------------------------------------------------------

    def _emit(self, event: TransportEvent) -> None:
        if not self._closed:
            self._on_event(event)

    def _soon(self, event: TransportEvent) -> None:
        """Tell `event` from our thread; when that has died, from the caller's."""
        if self._failed is None:
            self._loop.post(partial(self._emit, event))
        else:
            self._emit(event)

    def _crashed(self, exc: BaseException) -> None:
        """A thread of ours ended by a bug: every peer is unreachable from now on."""
        self._failed = exc
        error = Internal(f"the shm transport has failed: {exc!r}")
        with self._lock:
            names = {*self._readers, *self._writers}
        for name in names:
            self._emit(PeerGone(name, False, error))

    def _gate(self, path: Outgoing, epoch: int) -> Callable[[], bool]:
        """A cheap test, called before each slice, of whether the receiver still grants `epoch`."""
        wanted = token(self._me, epoch)
        slot = -1

        def allowed() -> bool:
            nonlocal slot
            if slot < 0:
                slot = path.grants.find(wanted)
            return slot >= 0 and path.grants.holds(slot, wanted)

        return allowed

    # ---- the receiver's door (loop thread) --------------------------------------------------------

    def _knock(self, _events: int) -> None:
        assert self._listener is not None
        assert self._address is not None
        try:
            sock, _ = self._listener.accept()
        except OSError as exc:
            if exc.errno in OUT_OF_DESCRIPTORS:
                self._rest(exc)
            return  # or it left again
        sock.setblocking(False)
        peer = Incoming(sock, handshake.Listener(self._address.key))
        if peer_uid(sock) != os.getuid():
            _send(sock, peer.door.refuse("another user"))
            sock.close()
            return
        if len(self._strangers) >= self._max_strangers:
            # The oldest, so that a crowd cannot keep a peer out that proves itself at once.
            self._drop_stranger(next(iter(self._strangers.values())))
        self._strangers[sock.fileno()] = peer
        peer.timer = self._loop.later(self._handshake_s, partial(self._drop_stranger, peer))
        self._loop.watch(sock.fileno(), select.EPOLLIN, partial(self._greet, peer))
        _send(sock, peer.door.challenge())

    def _rest(self, exc: OSError) -> None:
        """No descriptor is free: do not let the kernel call us again at once, for nothing."""
        assert self._listener is not None
        log.error("shm cannot accept peers: %s", exc.strerror)
        self._loop.unwatch(self._listener.fileno())
        self._loop.later(REST_S, self._watch_door)

    def _watch_door(self) -> None:
        assert self._listener is not None
        self._loop.watch(self._listener.fileno(), select.EPOLLIN, self._knock)

    def _drop_stranger(self, peer: Incoming) -> None:
        if peer.timer is not None:
            peer.timer.cancel()
        self._strangers.pop(peer.sock.fileno(), None)
        self._loop.unwatch(peer.sock.fileno())
        peer.sock.close()

    def _greet(self, peer: Incoming, _events: int) -> None:
        assert self._memory is not None
        try:
            frame = peer.sock.recv(handshake.RESPONSE_BYTES + 1)
            hello, verdict = peer.door.accept(frame)
            pidfd = peer_pidfd(peer.sock)
            if pidfd is None:
                raise PeerRefused("the process is gone")
        except PeerRefused as exc:
            _send(peer.sock, peer.door.refuse(exc.info.text))
            self._drop_stranger(peer)
            return
        except OSError:
            self._drop_stranger(peer)
            return
        if peer.timer is not None:
            peer.timer.cancel()
        del self._strangers[peer.sock.fileno()]
        peer.name, peer.pidfd = hello.name, pidfd
        self._loop.unwatch(peer.sock.fileno())
        self._loop.watch(peer.sock.fileno(), select.EPOLLIN, partial(self._writer_says, peer))
        self._loop.watch(pidfd, select.EPOLLIN, partial(self._writer_died, peer))
        with self._lock:  # from here on the peer may hold a mapping
            self._writers.setdefault(peer.name, []).append(peer)
        try:
            socket.send_fds(peer.sock, [verdict], [self._memory.fd, self._table.fd])
        except OSError:
            self._writer_left(peer)

    def _writer_says(self, peer: Incoming, _events: int) -> None:
        try:
            data = peer.sock.recv(64)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data == _GOODBYE:
            peer.goodbye = True
        elif not data:
            self._writer_left(peer)

    def _writer_left(self, peer: Incoming) -> None:
        """The socket has ended. With a goodbye that is a proof; else wait for the process."""
        self._loop.unwatch(peer.sock.fileno())
        if peer.goodbye:
            self._writer_gone(peer, "said goodbye")
        else:
            peer.timer = self._loop.later(_DEATH_GRACE_S, partial(self._writer_silent, peer))

    def _writer_silent(self, peer: Incoming) -> None:
        error = PeerLost(f"{peer.name} closed its shm socket but its process lives", peer=peer.name)
        self._emit(PeerGone(peer.name, False, error))

    def _writer_died(self, peer: Incoming, _events: int) -> None:
        self._writer_gone(peer, "its process has ended")

    def _writer_gone(self, peer: Incoming, why: str) -> None:
        assert peer.pidfd is not None
        if peer.timer is not None:
            peer.timer.cancel()
        self._loop.unwatch(peer.sock.fileno())
        self._loop.unwatch(peer.pidfd)
        peer.sock.close()
        os.close(peer.pidfd)
        with self._lock:
            left = self._writers[peer.name]
            left.remove(peer)
            if left:
                return  # another connection of this name may still write
            del self._writers[peer.name]
            self._table.remove_peer(peer.name)
        self._emit(PeerGone(peer.name, True, PeerLost(f"{peer.name} is gone: {why}", peer=peer.name)))

    # ---- the writer's paths (loop thread) -----------------------------------------------------------

    def _watch_reader(self, path: Outgoing) -> None:
        self._loop.watch(path.sock.fileno(), select.EPOLLIN, partial(self._reader_left, path))
        if path.pidfd is not None:
            self._loop.watch(path.pidfd, select.EPOLLIN, partial(self._reader_died, path))

    def _reader_left(self, path: Outgoing, _events: int) -> None:
        """The receiver said goodbye or its socket ended: stop writing, then say so."""
        try:
            goodbye = path.sock.recv(64) == _GOODBYE
        except BlockingIOError:
            return
        except OSError:
            goodbye = False
        path.broken = True
        if goodbye or path.pidfd is None:
            path.dead = path.pidfd is None
            self._reader_gone(path)
            return
        self._loop.unwatch(path.sock.fileno())
        self._loop.later(_DEATH_GRACE_S, partial(self._reader_gone, path))
        self._stop_writing(path)

    def _stop_writing(self, path: Outgoing) -> None:
        error = PeerLost(f"{path.name} is gone", peer=path.name)
        now = self._copier.cancel(path.name, None, error, lambda: None)
        if now is not None:
            now()

    def _reader_died(self, path: Outgoing, _events: int) -> None:
        path.dead = True
        self._reader_gone(path)

    def _reader_gone(self, path: Outgoing) -> None:
        with self._lock:
            if self._readers.get(path.name) is not path:
                return
            del self._readers[path.name]
        self._loop.unwatch(path.sock.fileno())
        if path.pidfd is not None:
            self._loop.unwatch(path.pidfd)
            os.close(path.pidfd)
        error = PeerLost(
            f"{path.name} is gone: {'its process has ended' if path.dead else 'it closed'}", peer=path.name
        )

        def done() -> None:
            path.unmap()
            _farewell(path.sock)
            self._emit(PeerGone(path.name, path.dead, error))

        now = self._copier.cancel(path.name, None, error, done)
        if now is not None:
            now()

    def _release(self, quiet: bool) -> None:
        """The loop's last call: close every descriptor, after saying goodbye where it is true."""
        for path in list(self._readers.values()):
            if quiet:
                _farewell(path.sock)
            else:
                path.sock.close()
            if path.pidfd is not None:
                os.close(path.pidfd)
        for peer in [*self._strangers.values(), *(p for left in self._writers.values() for p in left)]:
            _farewell(peer.sock)
            if peer.pidfd is not None:
                os.close(peer.pidfd)
        if self._listener is not None:
            self._listener.close()
        self._readers.clear()
        self._strangers.clear()
        self._writers.clear()
        self._table.close()
        self._memory = None


def _send(sock: socket.socket, frame: bytes) -> None:
    """Send to a peer that may have left already: its end is seen where the socket is read."""
    try:
        sock.send(frame, socket.MSG_NOSIGNAL)
    except OSError:
        return


def _farewell(sock: socket.socket) -> None:
    _send(sock, _GOODBYE)
    sock.close()


def _open_path(me: str, peer: str, endpoint: Endpoint, timeout_s: float) -> Outgoing:
    """Connect, prove, receive the descriptors and map the receiver's pool."""
    try:
        address = msgspec.msgpack.decode(endpoint.data, type=ShmAddress)
    except DECODE_ERRORS as exc:
        raise PeerRefused(f"unreadable shm endpoint: {exc}") from exc
    if endpoint.transport != ShmTransport.name or address.version != 1:
        raise PeerRefused(f"not an shm endpoint of version 1: {endpoint.transport} v{address.version}")
    if address.host != host_id():
        raise PeerRefused("shm needs both sides on one host, in one network namespace, of one user")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.settimeout(timeout_s)
        sock.connect(address.name)
        if peer_uid(sock) != os.getuid():
            raise PeerRefused("the shm socket of the peer belongs to another user")
        door = handshake.Writer(address.key, handshake.Hello(me, bytes(16), 0, 1))
        sock.sendall(door.respond(_frame(sock, handshake.CHALLENGE_BYTES)))
        pool, grants = _take_memory(sock, door, endpoint.nbytes)
        pidfd = peer_pidfd(sock)
        sock.setblocking(False)
        return Outgoing(peer, sock, pool, grants, pidfd)
    except TimeoutError as exc:
        sock.close()
        raise BootstrapTimeout(f"{peer} did not answer on its shm socket within {timeout_s} s") from exc
    except OSError as exc:
        sock.close()
        raise TransferFailed(f"no shm path to {peer}: {exc}") from exc
    except SegueError:
        sock.close()
        raise


def _take_memory(sock: socket.socket, door: handshake.Writer, nbytes: int) -> tuple[mmap.mmap, GrantView]:
    """The peer's verdict, and with it its pool and its table of grants, mapped."""
    verdict, fds, _flags, _ = socket.recv_fds(sock, handshake.VERDICT_BYTES + 1, 2)
    try:
        if len(verdict) != handshake.VERDICT_BYTES:
            raise PeerRefused("the peer closed the shm socket during the handshake")
        door.finish(verdict)
        if len(fds) != 2 or not sealed(fds[0]) or os.fstat(fds[0]).st_size < nbytes:
            raise PeerRefused("the peer's memory is not what its endpoint says")
        if not sealed(fds[1]) or os.fstat(fds[1]).st_size < TABLE_BYTES:
            # A table that can shrink would end this process at the next look.
            raise PeerRefused("the peer's table of grants is too small, or could become so")
        return _map_pool(fds[0], nbytes), GrantView(fds[1])
    finally:
        for fd in fds:
            os.close(fd)


def _frame(sock: socket.socket, nbytes: int) -> bytes:
    frame = sock.recv(nbytes + 1)
    if len(frame) != nbytes:
        raise PeerRefused("the peer closed the shm socket during the handshake")
    return frame


def _map_pool(fd: int, nbytes: int) -> mmap.mmap:
    """Map a peer's pool with its pages resident, in steps so that no other thread waits for long."""
    pool = mmap.mmap(fd, nbytes, mmap.MAP_SHARED)
    pool.madvise(mmap.MADV_DONTFORK)
    for start in range(0, nbytes, _POPULATE_BYTES):
        pool.madvise(_MADV_POPULATE_WRITE, start, min(_POPULATE_BYTES, nbytes - start))
    return pool
