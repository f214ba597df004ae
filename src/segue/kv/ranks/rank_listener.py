"""How the processes of an engine's ranks find that of their leader, where nobody has made a socket pair.

The leader listens at an abstract unix socket of this host, under a name drawn by chance. Any process of the
host may connect there; so each end looks at the other's user, as the kernel tells it, and a rank must show
the nonce that the engine's own group has carried to it.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Iterable

from segue.kv.errors import BootstrapTimeout, BootstrapUnreachable, ConfigError, Unauthorized

log = logging.getLogger("segue.kv")

_NONCE_BYTES = 32
_HELLO = struct.Struct(f"!I{_NONCE_BYTES}s")
_WELCOME = b"\x01"
_CREDENTIALS = struct.Struct("=iII")
#: Connections that have not said who they are; the oldest gives way to the next one.
MAX_UNKNOWN = 64


class RankListener:
    """Where the processes of a leader's ranks connect; of the leader's thread.

    `invitation` is what a rank's process gives to `connect_rank`. It is a secret: bring it there by what
    the engine's ranks have in common already (a collective, a pipe, the environment of a child), and log it
    nowhere. Raises ConfigError where there are no abstract unix sockets (all but Linux).
    """

    def __init__(self) -> None:
        name = f"segue-{secrets.token_hex(16)}"
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._sock.bind(f"\0{name}")
            self._sock.listen(MAX_UNKNOWN)
        except (OSError, ValueError) as exc:
            self._sock.close()
            raise ConfigError(f"ranks in other processes need abstract unix sockets: {exc}") from exc
        self._sock.setblocking(False)
        self.invitation = self._nonce + name.encode()

    def accept(self, ranks: Iterable[int], within_s: float) -> dict[int, socket.socket]:
        """The connected socket of each of these `ranks`, for its `RankLink`. A connection of another user, or
        with another nonce, is closed and logged, and delays no other one. Raises BootstrapTimeout after
        `within_s` seconds, which names the ranks that have not come; the others' sockets are closed then."""
        missing, found = set(ranks), dict[int, socket.socket]()
        unknown: dict[socket.socket, bytes] = {}
        ends_at = time.monotonic() + within_s
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._sock, selectors.EVENT_READ)
                while missing:
                    left_s = ends_at - time.monotonic()
                    if left_s <= 0:
                        names = ", ".join(map(str, sorted(missing)))
                        raise BootstrapTimeout(f"ranks {names} did not connect within {within_s:g} s")
                    for key, _ in selector.select(left_s):
                        sock = key.fileobj
                        assert isinstance(sock, socket.socket)
                        if sock is self._sock:
                            self._admit(selector, unknown)
                        elif sock in unknown and (rank := self._heard(selector, unknown, sock, missing)) >= 0:
                            missing.discard(rank)
                            found[rank] = sock
        except BaseException:
            for sock in found.values():
                sock.close()
            raise
        finally:
            for sock in unknown:
                sock.close()
        return found

    def _admit(self, selector: selectors.BaseSelector, unknown: dict[socket.socket, bytes]) -> None:
        """Somebody has connected."""
        try:
            sock, _ = self._sock.accept()
        except OSError:
            return  # it has gone again
        if (stranger := _stranger(sock)) is not None:
            log.warning("a process of user %d tried to be a rank of this leader", stranger)
            sock.close()
            return
        if len(unknown) >= MAX_UNKNOWN:
            oldest = next(iter(unknown))
            selector.unregister(oldest)
            del unknown[oldest]
            oldest.close()
        sock.setblocking(False)
        selector.register(sock, selectors.EVENT_READ)
        unknown[sock] = b""

    def _heard(
        self,
        selector: selectors.BaseSelector,
        unknown: dict[socket.socket, bytes],
        sock: socket.socket,
        missing: set[int],
    ) -> int:
        """The rank that has connected, or -1 if it is unknown or was refused."""
        try:
            data = sock.recv(_HELLO.size - len(unknown[sock]))
        except OSError:
            data = b""
        unknown[sock] += data
        if data and len(unknown[sock]) < _HELLO.size:
            return -1
        selector.unregister(sock)
        said = unknown.pop(sock)
        if len(said) == _HELLO.size:
            rank, nonce = _HELLO.unpack(said)
            if hmac.compare_digest(nonce, self._nonce) and rank in missing:
                with contextlib.suppress(OSError):  # it has died meanwhile: its link says so
                    sock.send(_WELCOME)
                sock.setblocking(True)
                return int(rank)
            log.warning("a process showed another nonce, or is no rank that is waited for (rank %d)", rank)
        sock.close()
        return -1

    def close(self) -> None:
        """Listen no more; who has connected stays. Idempotent."""
        self._sock.close()


def connect_rank(invitation: bytes, rank: int, within_s: float) -> socket.socket:
    """The connected socket between this process, which has the rank `rank`, and its leader, whose
    `RankListener` has made the `invitation`; for its `RankLink`. Each step may take `within_s` seconds.
    Raises BootstrapUnreachable if nobody listens there, Unauthorized if a process of another user does or if
    we are refused, and BootstrapTimeout."""
    nonce, name = invitation[:_NONCE_BYTES], invitation[_NONCE_BYTES:]
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(within_s)
    try:
        sock.connect(b"\0" + name)
        if (stranger := _stranger(sock)) is not None:
            raise Unauthorized(f"a process of user {stranger} listens where the leader is to be")
        sock.sendall(_HELLO.pack(rank, nonce))
        if sock.recv(1) != _WELCOME:
            raise Unauthorized(f"the leader has refused rank {rank}: another invitation, or rank")
    except BaseException as exc:
        sock.close()
        match exc:
            case TimeoutError():
                raise BootstrapTimeout(f"the leader did not take rank {rank} in {within_s:g} s") from exc
            case ConnectionResetError() | BrokenPipeError():
                raise Unauthorized(f"the leader has refused rank {rank}: {exc}") from exc
            case OSError():
                raise BootstrapUnreachable(f"the leader of rank {rank} cannot be reached: {exc}") from exc
        raise
    sock.settimeout(None)
    return sock


def _stranger(sock: socket.socket) -> int | None:
    """The user of the other end, if it is another than ours."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(data)
    return None if uid == os.geteuid() else int(uid)
