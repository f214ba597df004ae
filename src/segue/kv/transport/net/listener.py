"""The listening end of every transport with sockets. Nobody is handed on who has not proven itself.

- Unauthenticated connections are bounded, in all and per address. One too many, and the oldest of the fullest
  address is closed.
- Each has a deadline for its whole handshake, TLS included.
- The proof is an HMAC over a fresh nonce with the endpoint's key (see `handshake`).
- A system call that fails costs the connection that it was made for, never the loop. Without descriptors the
  oldest connection is closed, and accepting rests for a moment.

Everything here runs on the loop's thread.
"""

from __future__ import annotations

import errno
import logging
import select
import socket
import ssl
from collections.abc import Callable
from functools import partial

from segue.kv.errors import PeerRefused
from segue.kv.ids import RankId
from segue.kv.pending import PendingConnections, Refusals
from segue.kv.session.tls import explain_tls
from segue.kv.transport.net import key_handshake as handshake
from segue.kv.transport.net.ioloop import IoLoop, Timer
from segue.kv.transport.net.stream import Channel

REST_S = 0.1
#: The connection that was to be accepted has gone again; nothing is wrong with the next one.
_GONE_AGAIN = frozenset(
    {
        errno.EAGAIN,
        errno.EINTR,
        errno.ECONNABORTED,
        errno.EPROTO,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.EHOSTUNREACH,
    }
)

log = logging.getLogger("segue.kv.transport")


class PendingConnection:
    """A connection that has not yet proven that it knows the key. Under TLS it must show a certificate
    first."""

    def __init__(self, channel: Channel, key: bytes) -> None:
        self.channel = channel
        self.fd = channel.fileno()
        self.proof = handshake.ListenerProof(key)
        self.frame = b""
        self.challenged = False
        self.timer: Timer | None = None


class AuthenticatedListener:
    """Accepts at `sock`, from `open` on until `close`.

    open_channel: makes the channel of a socket that was accepted. None: it is closed without a word.
    admit: is given the channel of one that has proven itself, who it is, and the verdict, which it sends.
        PeerRefused is told to the other end; that and OSError close the channel.
    max_pending, per_address: how many may be unauthenticated, in all and from one address (default: half).
    """

    def __init__(
        self,
        loop: IoLoop,
        sock: socket.socket,
        key: bytes,
        open_channel: Callable[[socket.socket], Channel | None],
        admit: Callable[[Channel, RankId, bytes], None],
        *,
        name: str,
        handshake_s: float,
        max_pending: int,
        per_address: int | None = None,
    ) -> None:
        self._loop = loop
        self._sock = sock
        self._key = key
        self._open_channel = open_channel
        self._admit = admit
        self._name = name
        self._handshake_s = handshake_s
        self._pending: PendingConnections[PendingConnection] = PendingConnections(max_pending, per_address)
        self._refusals = Refusals()
        self._rests: Timer | None = None

    def open(self) -> None:
        """Start to accept; also after a rest."""
        try:
            self._loop.watch(self._sock.fileno(), select.EPOLLIN, self._accept)
        except OSError as exc:
            self._rest(exc)

    def close(self) -> None:
        """Accept nobody any more, and close who has not proven itself."""
        self._loop.unwatch(self._sock.fileno())
        self._sock.close()
        if self._rests is not None:
            self._rests.cancel()
        for pending in self._pending:
            self._drop(pending)

    def _accept(self, _events: int) -> None:
        try:
            sock, where = self._sock.accept()
        except OSError as exc:
            if exc.errno not in _GONE_AGAIN:
                self._rest(exc)
            return
        try:
            sock.setblocking(False)
            channel = self._open_channel(sock)
        except OSError as exc:
            self._failed(exc)
            channel = None
        if channel is None:
            sock.close()
            return
        pending = PendingConnection(channel, self._key)
        # A unix socket has no address: all come from one.
        victim = self._pending.add(pending, str(where[0]) if where else "")
        if victim is not None:
            self._drop(victim)
        pending.timer = self._loop.later(self._handshake_s, partial(self._drop, pending))
        try:
            self._loop.watch(pending.fd, select.EPOLLIN, partial(self._ready, pending))
        except OSError as exc:
            self._failed(exc)
            self._drop(pending)
            return
        self._guard(pending, self._challenge)

    def _rest(self, exc: OSError) -> None:
        """The kernel would call us again at once, and for nothing. Most likely a descriptor is missing. No
        event tells when one is free, so this one wait is blind."""
        log.error("%s cannot accept connections: %s", self._name, exc.strerror)
        if (oldest := self._pending.oldest()) is not None:
            self._drop(oldest)
        self._loop.unwatch(self._sock.fileno())
        self._rests = self._loop.later(REST_S, self.open)

    def _failed(self, exc: OSError) -> None:
        self._warn(f"{self._name} cannot let a peer in", exc.strerror or repr(exc))

    def _warn(self, what: str, reason: str) -> None:
        if line := self._refusals.line(f"{what}: {reason}", reason, self._loop.time()):
            log.warning("%s", line)

    def _ready(self, pending: PendingConnection, _events: int) -> None:
        self._guard(pending, self._read if pending.challenged else self._challenge)

    def _guard(self, pending: PendingConnection, step: Callable[[PendingConnection], None]) -> None:
        try:
            step(pending)
        except ssl.SSLError as exc:
            self._warn(f"a {self._name} connection was refused", explain_tls(exc))
            self._drop(pending)
        except OSError:
            self._drop(pending)  # its end

    def _challenge(self, pending: PendingConnection) -> None:
        """One step of the channel's own handshake; when it is done, the challenge."""
        wants = pending.channel.handshake()
        if pending.channel.buffered:
            self._loop.change(pending.fd, wants or select.EPOLLIN)
        if not wants:
            pending.challenged = True
            pending.channel.send(pending.proof.challenge())

    def _read(self, pending: PendingConnection) -> None:
        # One byte more than there may be: what is too long is no answer.
        data = pending.channel.receive(handshake.RESPONSE_BYTES + 1 - len(pending.frame))
        if data is None:
            return
        pending.frame += data
        if not data:
            self._drop(pending)
        elif pending.channel.messages or len(pending.frame) >= handshake.RESPONSE_BYTES:
            self._judge(pending)

    def _judge(self, pending: PendingConnection) -> None:
        try:
            peer, verdict = pending.proof.accept(pending.frame)
            self._forget(pending)
            self._admit(pending.channel, peer, verdict)
        except PeerRefused as exc:
            self._warn(f"a {self._name} connection was refused", str(exc))
            pending.channel.send(pending.proof.refuse(exc.info.text))
            self._drop(pending)
        except OSError as exc:
            self._failed(exc)
            self._drop(pending)

    def _forget(self, pending: PendingConnection) -> None:
        if pending.timer is not None:
            pending.timer.cancel()
        self._loop.unwatch(pending.fd)
        self._pending.discard(pending)

    def _drop(self, pending: PendingConnection) -> None:
        self._forget(pending)
        pending.channel.close()
