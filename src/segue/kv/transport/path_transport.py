"""The common part of transports that listen at a TCP port and have one path to each peer."""

from __future__ import annotations

import socket
import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, Protocol, TypeVar

from segue.kv.errors import BootstrapTimeout, SegueError
from segue.kv.ids import RankId
from segue.kv.layout.blocks import CopyBlock
from segue.kv.layout.content import Content
from segue.kv.transport.base import Endpoint, EventSink, Transport, WriteFailed
from segue.kv.transport.emitter import EventEmitter
from segue.kv.transport.epochs import Grants
from segue.kv.transport.memory import ranges
from segue.kv.transport.memory.pool_memory import Memory
from segue.kv.transport.net import key_handshake as handshake
from segue.kv.transport.net.listener import AuthenticatedListener
from segue.kv.transport.net.stream import Channel
from segue.kv.transport.options import TransportOptions
from segue.kv.transport.paths import Paths
from segue.kv.transport.tcp.tcp_net import NET, Net
from segue.kv.transport.tcp.tcp_sockets import TcpSockets
from segue.kv.transport.write_book import Write


class WritePath(Protocol):
    """The path to one peer, whose memory has `target_bytes`."""

    target_bytes: int

    def write(self, write: Write, blocks: Sequence[CopyBlock]) -> None:
        """Queue a write whose blocks lie inside both memories."""


PathT = TypeVar("PathT", bound=WritePath)


class PathTransport(Transport, Generic[PathT]):
    """A subclass starts `_loop` when it is made."""

    def __init__(self, on_event: EventSink, options: TransportOptions, net: Net = NET) -> None:
        self._options = options
        self._net = net
        self._lock = threading.RLock()
        self._emitter = EventEmitter(self.name, on_event)
        self._sockets = TcpSockets(self.name, options, net)
        self._listener: AuthenticatedListener | None = None
        self.grants = Grants()
        self._paths: Paths[PathT] = Paths(self.name, self.memory_kinds, self._emitter)
        self._loop = net.loop(f"segue-{self.name}", self._crashed)

    def grant(self, peer: RankId, epoch: int, area: Content) -> None:
        """See `Transport.grant`. Raises OutOfCapacity when too many grants live."""
        with self._lock:
            if not self._emitter.closed and self.grants.add(peer, epoch, area):
                self._granted(peer, epoch)

    def write(self, peer: RankId, epoch: int, tag: int, blocks: Sequence[CopyBlock]) -> None:
        """See `Transport.write`."""
        posted = self._net.time()
        with self._lock:
            try:
                path, memory = self._paths.check_write(peer, epoch)
                nbytes = ranges.check_memory(blocks, memory, path.target_bytes)
            except SegueError as exc:
                failed = WriteFailed(peer, epoch, tag, exc)
            else:
                self._begin(path, Write(epoch, tag, nbytes, posted), list(blocks))
                return
        self._emitter.soon(self._loop, failed)

    def _granted(self, peer: RankId, epoch: int) -> None:
        """A grant is new (under the lock)."""
        return

    def _begin(self, path: PathT, write: Write, blocks: Sequence[CopyBlock]) -> None:
        """Hand a checked write to its path (under the lock)."""
        self._emitter.run_soon(self._loop, partial(path.write, write, blocks))

    @abstractmethod
    def _crashed(self, exc: BaseException) -> None:
        """A bug has ended the loop's thread."""

    def _listen(
        self,
        sock: socket.socket,
        nbytes: int,
        admit: Callable[[Channel, RankId, bytes], None],
        *,
        open_channel: Callable[[socket.socket], Channel | None] | None = None,
        max_pending: int = 32,
    ) -> Endpoint:
        """Let peers in at `sock` that prove themselves; how they reach memory of `nbytes` bytes."""
        key = handshake.new_key(self._net.random_bytes)
        self._listener = AuthenticatedListener(
            self._loop,
            sock,
            key,
            open_channel or self._sockets.accepted,
            admit,
            name=self.name,
            handshake_s=self._options.limits.handshake_s,
            max_pending=max_pending,
        )
        self._loop.post(self._listener.open)
        return self._sockets.endpoint(sock, key, nbytes)

    def _memory_for(
        self, peer: RankId, ending: Callable[[PathT], Callable[[float], bool] | None], timeout_s: float
    ) -> Memory | None:
        """The memory to open a path from; None if there is one. A path that is ending is waited for, so that
        its end is told before: `ending` gives the wait, or None. Raises BootstrapTimeout."""
        with self._lock:
            memory, old = self._paths.check_connect(peer), self._paths.of.get(peer)
        wait = None if old is None else ending(old)
        if wait is None:
            return memory
        if not wait(timeout_s):
            raise BootstrapTimeout(f"the old {self.name} path to {peer} did not end within {timeout_s} s")
        with self._lock:
            return self._paths.check_connect(peer)
