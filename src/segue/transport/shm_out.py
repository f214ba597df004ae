"""The writing end of `shm`: one path per peer, which is that peer's pool, mapped here.

`map_peer` runs on the caller's thread; a `Path` lives on the loop's, but for `allowing`.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec

from segue.core.errors import (
    DECODE_ERRORS,
    BootstrapTimeout,
    PeerLost,
    PeerRefused,
    SegueError,
    TransferFailed,
)
from segue.transport import handshake
from segue.transport.base import Endpoint, PeerGone, TransportEvent
from segue.transport.copier import Copier
from segue.transport.host import host_id, peer_pidfd, peer_uid
from segue.transport.ioloop import IoLoop
from segue.transport.memory import sealed
from segue.transport.shm_table import TABLE_BYTES, GrantView, token
from segue.transport.shm_wire import DEATH_GRACE_S, GOODBYE, ShmAddress, farewell

_POPULATE_BYTES = 64 * 2**20
_MADV_POPULATE_WRITE = 23


@dataclass(frozen=True, slots=True)
class Mapped:
    """A receiver's pool and its table of grants, mapped here, and the socket that they came over."""

    sock: socket.socket
    pool: mmap.mmap
    grants: GrantView
    pidfd: int | None

    def unmap(self) -> None:
        """Give the receiver's memory back; no copy may be running."""
        self.pool.close()
        self.grants.close()

    def leave(self, *, goodbye: bool) -> None:
        """Close the descriptors of a path that is not open (any more). A `goodbye` is a proof for the
        peer, so only after `unmap`."""
        if goodbye:
            farewell(self.sock)
        else:
            self.sock.close()
        if self.pidfd is not None:
            os.close(self.pidfd)


class Path:
    """The path to the receiver `name`. `forget` takes it out of the transport's table: False if it is
    not there any more."""

    def __init__(
        self,
        loop: IoLoop,
        copier: Copier,
        me: str,
        name: str,
        mapped: Mapped,
        emit: Callable[[TransportEvent], None],
        forget: Callable[[Path], bool],
    ) -> None:
        self._loop = loop
        self._copier = copier
        self._me = me
        self.name = name
        self.mapped = mapped
        self._emit = emit
        self._forget = forget
        #: Nothing may be written any more.
        self.broken = False

    def open(self) -> None:
        """Watch the receiver."""
        self._loop.watch(self.mapped.sock.fileno(), select.EPOLLIN, self._left)
        if self.mapped.pidfd is not None:
            self._loop.watch(self.mapped.pidfd, select.EPOLLIN, self._died)

    def allowing(self, epoch: int) -> Callable[[], bool]:
        """A cheap test, called before each slice, of whether the receiver still grants `epoch`."""
        wanted, grants = token(self._me, epoch), self.mapped.grants
        slot = -1

        def allowed() -> bool:
            nonlocal slot
            if slot < 0:
                slot = grants.find(wanted)
            return slot >= 0 and grants.holds(slot, wanted)

        return allowed

    def _left(self, _events: int) -> None:
        """The receiver said goodbye or its socket ended: stop writing, then say so."""
        try:
            goodbye = self.mapped.sock.recv(64) == GOODBYE
        except BlockingIOError:
            return
        except OSError:
            goodbye = False
        self.broken = True
        if goodbye or self.mapped.pidfd is None:
            self._gone(dead=self.mapped.pidfd is None)
            return
        self._loop.unwatch(self.mapped.sock.fileno())
        self._loop.later(DEATH_GRACE_S, partial(self._gone, dead=False))
        self._cancel(PeerLost(f"{self.name} is gone", peer=self.name), lambda: None)

    def _died(self, _events: int) -> None:
        self._gone(dead=True)

    def _gone(self, *, dead: bool) -> None:
        if not self._forget(self):
            return
        self._loop.unwatch(self.mapped.sock.fileno())
        if self.mapped.pidfd is not None:
            self._loop.unwatch(self.mapped.pidfd)
            os.close(self.mapped.pidfd)
        why = "its process has ended" if dead else "it closed"
        error = PeerLost(f"{self.name} is gone: {why}", peer=self.name)

        def done() -> None:
            self.mapped.unmap()
            farewell(self.mapped.sock)
            self._emit(PeerGone(self.name, dead, error))

        self._cancel(error, done)

    def _cancel(self, error: SegueError, then: Callable[[], None]) -> None:
        """End all our writes with `error`, and then run `then`."""
        now = self._copier.cancel(self.name, None, error, then)
        if now is not None:
            now()


def map_peer(me: str, peer: str, endpoint: Endpoint, timeout_s: float) -> Mapped:
    """Connect, prove, receive the descriptors and map the receiver's pool. Raises what
    `Transport.connect` does."""
    try:
        address = msgspec.msgpack.decode(endpoint.data, type=ShmAddress)
    except DECODE_ERRORS as exc:
        raise PeerRefused(f"unreadable shm endpoint: {exc}") from exc
    if endpoint.transport != "shm" or address.version != 1:
        raise PeerRefused(f"not an shm endpoint of version 1: {endpoint.transport} v{address.version}")
    if address.host != host_id():
        raise PeerRefused("shm needs both sides on one host, in one network namespace, of one user")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.settimeout(timeout_s)
        sock.connect(address.name)
        if peer_uid(sock) != os.getuid():
            raise PeerRefused("the shm socket of the peer belongs to another user")
        proof = handshake.Writer(address.key, handshake.Hello(me, bytes(16), 0, 1))
        sock.sendall(proof.respond(read_frame(sock, handshake.CHALLENGE_BYTES)))
        pool, grants = take_memory(sock, proof, endpoint.nbytes)
        pidfd = peer_pidfd(sock)
        sock.setblocking(False)
        return Mapped(sock, pool, grants, pidfd)
    except TimeoutError as exc:
        sock.close()
        raise BootstrapTimeout(f"{peer} did not answer on its shm socket within {timeout_s} s") from exc
    except OSError as exc:
        sock.close()
        raise TransferFailed(f"no shm path to {peer}: {exc}") from exc
    except SegueError:
        sock.close()
        raise


def take_memory(sock: socket.socket, proof: handshake.Writer, nbytes: int) -> tuple[mmap.mmap, GrantView]:
    """The peer's verdict, and with it its pool and its table of grants, mapped."""
    verdict, fds, _flags, _ = socket.recv_fds(sock, handshake.VERDICT_BYTES + 1, 2)
    try:
        if len(verdict) != handshake.VERDICT_BYTES:
            raise PeerRefused("the peer closed the shm socket during the handshake")
        proof.finish(verdict)
        if len(fds) != 2 or not sealed(fds[0]) or os.fstat(fds[0]).st_size < nbytes:
            raise PeerRefused("the peer's memory is not what its endpoint says")
        if not sealed(fds[1]) or os.fstat(fds[1]).st_size < TABLE_BYTES:
            # A table that can shrink would end this process at the next look.
            raise PeerRefused("the peer's table of grants is too small, or could become so")
        return _map_pool(fds[0], nbytes), GrantView(fds[1])
    finally:
        for fd in fds:
            os.close(fd)


def read_frame(sock: socket.socket, nbytes: int) -> bytes:
    """One frame of the handshake, of exactly so many bytes; PeerRefused for anything else."""
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
