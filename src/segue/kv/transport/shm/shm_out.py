"""The writing end of `shm`: one path per peer, which is that peer's pool, mapped here.

`map_peer` runs on the caller's thread; a `MappedPeer` lives on the loop's, but for `allowing`.
"""

from __future__ import annotations

import mmap
import select
import socket
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import msgspec

from segue.kv.errors import (
    DECODE_ERRORS,
    BootstrapTimeout,
    OutOfCapacity,
    PeerLost,
    PeerRefused,
    SegueError,
    TransferFailed,
)
from segue.kv.ids import RankId
from segue.kv.transport.base import Endpoint, PeerGone, TransportEvent
from segue.kv.transport.memory.copier import Copier
from segue.kv.transport.net import key_handshake as handshake
from segue.kv.transport.net.ioloop import IoLoop
from segue.kv.transport.shm.shm_host import HOST, ShmHost
from segue.kv.transport.shm.shm_table import TABLE_BYTES, GrantView, token
from segue.kv.transport.shm.shm_wire import DEATH_GRACE_S, GOODBYE, ShmAddress, send_goodbye

_ENDED = "its process has ended"


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

    def leave(self, host: ShmHost, *, goodbye: bool) -> None:
        """Close the descriptors of a path that is not open (any more). A `goodbye` is a proof for the
        peer, so only after `unmap`."""
        if goodbye:
            send_goodbye(self.sock)
        else:
            self.sock.close()
        if self.pidfd is not None:
            host.close(self.pidfd)


class MappedPeer:
    """The path to the receiver `peer`. `forget` takes it out of the transport's table: False if it is
    not there any more."""

    def __init__(
        self,
        loop: IoLoop,
        copier: Copier,
        me: RankId,
        peer: RankId,
        mapped: Mapped,
        emit: Callable[[TransportEvent], None],
        forget: Callable[[MappedPeer], bool],
        host: ShmHost = HOST,
    ) -> None:
        self._host = host
        self._loop = loop
        self._copier = copier
        self._me = me
        self.peer = peer
        self.mapped = mapped
        self._emit = emit
        self._forget = forget
        #: Nothing may be written any more.
        self.broken = False

    def open(self) -> None:
        """Watch the receiver. A path that cannot be watched ends at once, and no other with it."""
        try:
            self._loop.watch(self.mapped.sock.fileno(), select.EPOLLIN, self._socket_ended)
            if self.mapped.pidfd is not None:
                self._loop.watch(self.mapped.pidfd, select.EPOLLIN, self._died)
        except OSError as exc:
            self.broken = True
            self._gone(f"it cannot be watched: {exc.strerror}")

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

    def _socket_ended(self, _events: int) -> None:
        """The receiver said goodbye or its socket ended: stop writing, then say so."""
        try:
            goodbye = self.mapped.sock.recv(64) == GOODBYE
        except BlockingIOError:
            return
        except OSError:
            goodbye = False
        self.broken = True
        if self.mapped.pidfd is None:
            self._gone(_ENDED, dead=True)
        elif goodbye:
            self._gone("it closed")
        else:
            self._loop.unwatch(self.mapped.sock.fileno())
            self._loop.later(DEATH_GRACE_S, partial(self._gone, "it closed"))
            self._cancel(PeerLost(f"{self.peer} is gone", peer=str(self.peer)), lambda: None)

    def _died(self, _events: int) -> None:
        if self.mapped.pidfd is not None and self._host.ended(self.mapped.pidfd):
            self._gone(_ENDED, dead=True)

    def _gone(self, why: str, *, dead: bool = False) -> None:
        if not self._forget(self):
            return
        self._loop.unwatch(self.mapped.sock.fileno())
        if self.mapped.pidfd is not None:
            self._loop.unwatch(self.mapped.pidfd)
            self._host.close(self.mapped.pidfd)
        error = PeerLost(f"{self.peer} is gone: {why}", peer=str(self.peer))

        def done() -> None:
            self.mapped.unmap()
            send_goodbye(self.mapped.sock)
            self._emit(PeerGone(self.peer, dead, error))

        self._cancel(error, done)

    def _cancel(self, error: SegueError, then: Callable[[], None]) -> None:
        """End all our writes with `error`, and then run `then`."""
        now = self._copier.cancel(self.peer, None, error, then)
        if now is not None:
            now()


def map_peer(me: RankId, peer: RankId, endpoint: Endpoint, timeout_s: float, host: ShmHost = HOST) -> Mapped:
    """Connect, prove, receive the descriptors and map the receiver's pool. Raises what
    `Transport.connect` does."""
    try:
        address = msgspec.msgpack.decode(endpoint.data, type=ShmAddress)
    except DECODE_ERRORS as exc:
        raise PeerRefused(f"unreadable shm endpoint: {exc}") from exc
    if endpoint.transport != "shm" or address.version != 1:
        raise PeerRefused(f"not an shm endpoint of version 1: {endpoint.transport} v{address.version}")
    with ExitStack() as undo:
        try:
            if address.host != host.id():
                raise PeerRefused("shm needs both sides on one host, in one network namespace, of one user")
            sock = host.new_socket()
            # After a failure from here on nothing of the peer's memory stays mapped, and the peer is told: it
            # may count us among its writers by then.
            undo.callback(send_goodbye, sock)
            sock.settimeout(timeout_s)
            sock.connect(address.name)
            if host.peer_uid(sock) != host.uid():
                raise PeerRefused("the shm socket of the peer belongs to another user")
            proof = handshake.WriterProof(address.key, me)
            sock.sendall(proof.respond(read_frame(sock, handshake.CHALLENGE_BYTES)))
            pool, grants = take_memory(sock, proof, endpoint.nbytes, host)
            undo.callback(pool.close)
            undo.callback(grants.close)
            pidfd = host.peer_pidfd(sock)
            sock.setblocking(False)
        except TimeoutError as exc:
            raise BootstrapTimeout(f"{peer} did not answer on its shm socket within {timeout_s} s") from exc
        except OSError as exc:
            raise TransferFailed(f"no shm path to {peer}: {exc}") from exc
        undo.pop_all()
        return Mapped(sock, pool, grants, pidfd)


def take_memory(
    sock: socket.socket, proof: handshake.WriterProof, nbytes: int, host: ShmHost = HOST
) -> tuple[mmap.mmap, GrantView]:
    """The peer's verdict, and with it its pool and its table of grants, mapped. Raises also OutOfCapacity
    when they cannot be mapped in this process; nothing is, then."""
    verdict, fds, lost = host.receive_fds(sock, handshake.VERDICT_BYTES + 1)
    try:
        _whole(verdict, handshake.VERDICT_BYTES)
        proof.finish(verdict)
        if len(fds) != 2 and lost:
            raise TransferFailed(
                "the descriptors of the peer's memory were lost: too many files are open here"
            )
        if len(fds) != 2 or not host.sealed(fds[0]) or not 0 < nbytes <= host.size(fds[0]):
            raise PeerRefused("the peer's memory is not what its endpoint says")
        if not host.sealed(fds[1]) or host.size(fds[1]) < TABLE_BYTES:
            # A table that can shrink would end this process at the next look.
            raise PeerRefused("the peer's table of grants is too small, or could become so")
        return _map(host, fds[0], nbytes, fds[1])
    finally:
        for fd in fds:
            host.close(fd)


def _map(host: ShmHost, pool_fd: int, nbytes: int, table_fd: int) -> tuple[mmap.mmap, GrantView]:
    with ExitStack() as undo:
        try:
            pool = host.map_pool(pool_fd, nbytes)
            undo.callback(pool.close)
            grants = GrantView(table_fd, host)
        except OSError as exc:
            raise OutOfCapacity(
                f"the peer's pool of {nbytes / 2**30:.2f} GiB cannot be mapped here: {exc.strerror}"
            ) from exc
        undo.pop_all()
        return pool, grants


def read_frame(sock: socket.socket, nbytes: int) -> bytes:
    """One frame of the handshake, of exactly so many bytes. Raises TransferFailed when the peer closed the
    socket, which it may do for want of a descriptor, and PeerRefused for anything else."""
    return _whole(sock.recv(nbytes + 1), nbytes)


def _whole(frame: bytes, nbytes: int) -> bytes:
    if not frame:
        raise TransferFailed("the peer closed the shm socket during the handshake")
    if len(frame) != nbytes:
        raise PeerRefused("the address of the peer does not answer as a segue transport")
    return frame
