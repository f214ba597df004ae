"""The receiving end of `shm`: who is let in, who may hold a mapping of our pool, and the proof that it
does not any more.

Everything here runs on the loop's thread, but for `may_write`.
"""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from segue.kv.errors import PeerLost, PeerRefused
from segue.kv.ids import RankId
from segue.kv.transport.base import PeerGone, TransportEvent
from segue.kv.transport.net.ioloop import IoLoop, Timer
from segue.kv.transport.net.listener import AuthenticatedListener
from segue.kv.transport.net.stream import Channel, PlainChannel
from segue.kv.transport.shm.shm_host import HOST, ShmHost
from segue.kv.transport.shm.shm_table import GrantTable
from segue.kv.transport.shm.shm_wire import DEATH_GRACE_S, GOODBYE, send

#: An honest writer has one path. A writer that reconnects without a goodbye may hold as many mappings, and
#: each costs us a descriptor until its process ends.
MAX_PER_RANK = 8


@dataclass(slots=True, eq=False)
class Incoming:
    """A process of the rank `peer` that may hold a mapping of our pool, and the socket that it came in by."""

    peer: RankId
    sock: socket.socket
    pidfd: int
    timer: Timer | None = None


class ShmListener:
    """Every process that came in and has proven itself.

    `memory_fd` is the pool that is passed to those who know `key`, with `table`; `lock` covers the
    table and the list of writers.
    """

    def __init__(
        self,
        loop: IoLoop,
        lock: threading.RLock,
        sock: socket.socket,
        key: bytes,
        memory_fd: int,
        table: GrantTable,
        emit: Callable[[TransportEvent], None],
        *,
        max_pending: int,
        handshake_s: float,
        host: ShmHost = HOST,
    ) -> None:
        self._host = host
        self._loop = loop
        self._lock = lock
        self._memory_fd = memory_fd
        self._table = table
        self._emit = emit
        #: Connections that may hold a mapping: one rank may have come in more than once.
        self.writers: dict[RankId, list[Incoming]] = {}
        self.listener = AuthenticatedListener(
            loop,
            sock,
            key,
            self._open_channel,
            self._admit,
            name="shm",
            handshake_s=handshake_s,
            max_pending=max_pending,
            per_address=max_pending,
        )

    def may_write(self, rank: RankId) -> bool:
        """Whether a process of this rank may hold a mapping (under the lock)."""
        return rank in self.writers

    def close(self) -> None:
        """Close every socket, with a goodbye; no event."""
        self.listener.close()
        for peer in [peer for named in self.writers.values() for peer in named]:
            send(peer.sock, GOODBYE)
            self._release(peer)
        self.writers.clear()

    def _release(self, peer: Incoming) -> None:
        """Close what we hold of a connection."""
        if peer.timer is not None:
            peer.timer.cancel()
        self._loop.unwatch(peer.sock.fileno())
        peer.sock.close()
        self._loop.unwatch(peer.pidfd)
        self._host.close(peer.pidfd)

    def _open_channel(self, sock: socket.socket) -> Channel | None:
        """Only for processes of our own user."""
        mine = self._host.peer_uid(sock) == self._host.uid()
        return PlainChannel(sock, messages=True) if mine else None

    def _admit(self, channel: Channel, rank: RankId, verdict: bytes) -> None:
        assert isinstance(channel, PlainChannel)
        if len(self.writers.get(rank, ())) >= MAX_PER_RANK:
            raise PeerRefused(f"{MAX_PER_RANK} connections of this rank have not said goodbye")
        pidfd = self._host.peer_pidfd(channel.sock)
        if pidfd is None:
            raise PeerRefused("the process is gone")
        peer = Incoming(rank, channel.sock, pidfd)
        try:
            self._loop.watch(peer.sock.fileno(), select.EPOLLIN, partial(self._received, peer))
            self._loop.watch(pidfd, select.EPOLLIN, partial(self._died, peer))
        except OSError:
            self._host.close(pidfd)
            raise
        with self._lock:  # from here on the peer may hold a mapping
            self.writers.setdefault(rank, []).append(peer)
        try:
            self._host.send_fds(peer.sock, verdict, [self._memory_fd, self._table.fd])
        except OSError:  # then no descriptor has left this process
            self._gone(peer, "it left before it had the memory")

    # ---- writers ---------------------------------------------------------------------------------

    def _received(self, peer: Incoming, _events: int) -> None:
        try:
            data = peer.sock.recv(64)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data == GOODBYE:
            self._gone(peer, "said goodbye")
        elif not data:
            self._socket_ended(peer)

    def _socket_ended(self, peer: Incoming) -> None:
        """The socket has ended without a goodbye, which proves nothing: wait for the process."""
        self._loop.unwatch(peer.sock.fileno())
        peer.sock.close()
        peer.timer = self._loop.later(DEATH_GRACE_S, partial(self._still_alive, peer))

    def _still_alive(self, peer: Incoming) -> None:
        text = f"{peer.peer} closed its shm socket but its process lives"
        self._emit(PeerGone(peer.peer, False, PeerLost(text, peer=str(peer.peer))))

    def _died(self, peer: Incoming, _events: int) -> None:
        if self._host.ended(peer.pidfd):
            self._gone(peer, "its process has ended")

    def _gone(self, peer: Incoming, why: str) -> None:
        """Proven: nothing of this connection can land any more."""
        rank = peer.peer
        self._release(peer)
        with self._lock:
            left = self.writers[rank]
            left.remove(peer)
            if left:
                return  # another connection of this rank may still write
            del self.writers[rank]
            self._table.remove_peer(rank)
        self._emit(PeerGone(rank, True, PeerLost(f"{rank} is gone: {why}", peer=str(rank))))
