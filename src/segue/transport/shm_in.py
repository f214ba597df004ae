"""The receiving end of `shm`: who is let in, who may hold a mapping of our pool, and the proof that it
does not any more.

Everything here runs on the loop's thread, but for `may_write`. A system call that fails costs the peer
that it was made for, never the loop.
"""

from __future__ import annotations

import errno
import logging
import select
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from segue.core.errors import PeerLost, PeerRefused
from segue.core.types import RankId
from segue.transport import handshake
from segue.transport.base import PeerGone, TransportEvent
from segue.transport.ioloop import IoLoop, Timer
from segue.transport.shm_host import HOST, ShmHost
from segue.transport.shm_table import GrantTable
from segue.transport.shm_wire import DEATH_GRACE_S, GOODBYE, send

REST_S = 0.1
#: An honest writer has one path. One that comes again and again without a goodbye may hold as many mappings,
#: and each costs us a descriptor until its process ends.
MAX_PER_RANK = 8
_LEFT_AGAIN = frozenset({errno.EAGAIN, errno.EINTR, errno.ECONNABORTED})

log = logging.getLogger("segue.shm")


@dataclass(slots=True, eq=False)
class Incoming:
    """A peer's socket. `rank` is None until it proved that it knows the key."""

    sock: socket.socket
    proof: handshake.Listener
    rank: RankId | None = None
    pidfd: int | None = None
    timer: Timer | None = None


class ShmListener:
    """The listening socket and every process that came in through it.

    `memory_fd` is the pool that is passed to those who know `key`, with `table`; `lock` covers the
    table and the list of writers.
    """

    def __init__(
        self,
        loop: IoLoop,
        lock: threading.RLock,
        listener: socket.socket,
        key: bytes,
        memory_fd: int,
        table: GrantTable,
        emit: Callable[[TransportEvent], None],
        *,
        max_strangers: int,
        handshake_s: float,
        host: ShmHost = HOST,
    ) -> None:
        self._host = host
        self._loop = loop
        self._lock = lock
        self._listener = listener
        self._key = key
        self._memory_fd = memory_fd
        self._table = table
        self._emit = emit
        self._max_strangers = max_strangers
        self._handshake_s = handshake_s
        self._strangers: dict[Incoming, None] = {}
        #: Those who may hold a mapping: one rank may have come in more than once.
        self.writers: dict[RankId, list[Incoming]] = {}

    def open(self) -> None:
        """Start to accept; also after a rest."""
        try:
            self._loop.watch(self._listener.fileno(), select.EPOLLIN, self._accept)
        except OSError as exc:
            self._rest(exc)

    def may_write(self, rank: RankId) -> bool:
        """Whether a process of this rank may hold a mapping (under the lock)."""
        return rank in self.writers

    def close(self) -> None:
        """Close every socket, with a goodbye; no event."""
        for peer in [*self._strangers, *(p for named in self.writers.values() for p in named)]:
            send(peer.sock, GOODBYE)
            self._release(peer)
        self._loop.unwatch(self._listener.fileno())
        self._listener.close()
        self._strangers.clear()
        self.writers.clear()

    def _release(self, peer: Incoming) -> None:
        """Close what we hold of a connection."""
        if peer.timer is not None:
            peer.timer.cancel()
        self._loop.unwatch(peer.sock.fileno())
        peer.sock.close()
        if peer.pidfd is not None:
            self._loop.unwatch(peer.pidfd)
            self._host.close(peer.pidfd)
            peer.pidfd = None

    # ---- strangers -------------------------------------------------------------------------------

    def _accept(self, _events: int) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as exc:
            if exc.errno not in _LEFT_AGAIN:
                self._rest(exc)
            return
        peer = Incoming(sock, handshake.Listener(self._key))
        try:
            self._let_wait(peer)
        except OSError as exc:
            log.warning("shm cannot let a peer in: %s", exc.strerror)
            self._drop_stranger(peer)

    def _rest(self, exc: OSError) -> None:
        """No descriptor is free: do not let the kernel call us again at once, for nothing."""
        log.error("shm cannot accept peers: %s", exc.strerror)
        if self._strangers:
            self._drop_stranger(next(iter(self._strangers)))
        self._loop.unwatch(self._listener.fileno())
        self._loop.later(REST_S, self.open)

    def _let_wait(self, peer: Incoming) -> None:
        sock = peer.sock
        sock.setblocking(False)
        if self._host.peer_uid(sock) != self._host.uid():
            send(sock, peer.proof.refuse("another user"))
            sock.close()
            return
        if len(self._strangers) >= self._max_strangers:
            # The oldest, so that a crowd cannot keep a peer out that proves itself at once.
            self._drop_stranger(next(iter(self._strangers)))
        self._strangers[peer] = None
        peer.timer = self._loop.later(self._handshake_s, partial(self._drop_stranger, peer))
        self._loop.watch(sock.fileno(), select.EPOLLIN, partial(self._greet, peer))
        send(sock, peer.proof.challenge())

    def _drop_stranger(self, peer: Incoming) -> None:
        self._strangers.pop(peer, None)
        self._release(peer)

    def _greet(self, peer: Incoming, _events: int) -> None:
        try:
            hello, verdict = peer.proof.accept(peer.sock.recv(handshake.RESPONSE_BYTES + 1))
            self._watch_process(peer, hello.rank)
        except PeerRefused as exc:
            send(peer.sock, peer.proof.refuse(exc.info.text))
            self._drop_stranger(peer)
            return
        except OSError as exc:
            log.warning("shm cannot let a peer in: %s", exc.strerror)
            self._drop_stranger(peer)
            return
        if peer.timer is not None:
            peer.timer.cancel()
        del self._strangers[peer]
        peer.rank = hello.rank
        with self._lock:  # from here on the peer may hold a mapping
            self.writers.setdefault(hello.rank, []).append(peer)
        try:
            self._host.send_fds(peer.sock, verdict, [self._memory_fd, self._table.fd])
        except OSError:  # then no descriptor has left this process
            self._gone(peer, "it left before it had the memory")

    def _watch_process(self, peer: Incoming, rank: RankId) -> None:
        if len(self.writers.get(rank, ())) >= MAX_PER_RANK:
            raise PeerRefused(f"{MAX_PER_RANK} connections of this rank have not said goodbye")
        peer.pidfd = self._host.peer_pidfd(peer.sock)
        if peer.pidfd is None:
            raise PeerRefused("the process is gone")
        self._loop.unwatch(peer.sock.fileno())
        self._loop.watch(peer.sock.fileno(), select.EPOLLIN, partial(self._says, peer))
        self._loop.watch(peer.pidfd, select.EPOLLIN, partial(self._died, peer))

    # ---- writers ---------------------------------------------------------------------------------

    def _says(self, peer: Incoming, _events: int) -> None:
        try:
            data = peer.sock.recv(64)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data == GOODBYE:
            self._gone(peer, "said goodbye")
        elif not data:
            self._left(peer)

    def _left(self, peer: Incoming) -> None:
        """The socket has ended without a goodbye, which proves nothing: wait for the process."""
        self._loop.unwatch(peer.sock.fileno())
        peer.sock.close()
        peer.timer = self._loop.later(DEATH_GRACE_S, partial(self._silent, peer))

    def _silent(self, peer: Incoming) -> None:
        assert peer.rank is not None
        text = f"{peer.rank} closed its shm socket but its process lives"
        self._emit(PeerGone(peer.rank, False, PeerLost(text, peer=str(peer.rank))))

    def _died(self, peer: Incoming, _events: int) -> None:
        if peer.pidfd is not None and self._host.ended(peer.pidfd):
            self._gone(peer, "its process has ended")

    def _gone(self, peer: Incoming, why: str) -> None:
        """Proven: nothing of this connection can land any more."""
        rank = peer.rank
        assert rank is not None
        self._release(peer)
        with self._lock:
            left = self.writers[rank]
            left.remove(peer)
            if left:
                return  # another connection of this rank may still write
            del self.writers[rank]
            self._table.remove_peer(rank)
        self._emit(PeerGone(rank, True, PeerLost(f"{rank} is gone: {why}", peer=str(rank))))
