"""`tcp`: scatter and gather straight between two pools, over several streams per peer.

The receiver performs every write into its memory itself, so its `fence` and its `PeerGone` are proofs:
all receiving runs on one thread, each slice looks for its grant first, and `Fenced` is told from that
thread after the grant has ended. Each stream is authenticated at its start by the endpoint's key (see
`handshake`), which the peer learned over its session. With `tls` it is encrypted too, and both sides show
certificates; without, the KV crosses the network as it is, neither encrypted nor signed: run it in a
network that you trust as much as your hosts.

At the writer, `PeerGone` is never proven: a broken stream says nothing about what the other process
still does on other paths.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial

from segue.kv.errors import Internal, SegueError
from segue.kv.ids import RankId
from segue.kv.layout.blocks import CopyBlock
from segue.kv.layout.content import Content
from segue.kv.transport.base import Endpoint, EventSink, Fenced, PeerGone, Transport, WriteFailed
from segue.kv.transport.emitter import EventEmitter
from segue.kv.transport.epochs import Grants
from segue.kv.transport.memory import ranges
from segue.kv.transport.memory.pool_memory import Memory, MemoryKind
from segue.kv.transport.net import key_handshake as handshake
from segue.kv.transport.net.stream import Channel
from segue.kv.transport.options import TransportOptions
from segue.kv.transport.paths import Paths
from segue.kv.transport.tcp.tcp_in import InStream, TcpListener
from segue.kv.transport.tcp.tcp_net import NET, Net, TcpTuning
from segue.kv.transport.tcp.tcp_out import PeerWriter
from segue.kv.transport.tcp.tcp_sockets import TcpSockets

_CLOSE_S = 5.0


class TcpTransport(Transport):
    """`Transport` over TCP. It listens from `register` on. A peer that takes or gives no byte of a write for
    the limit of silence, or acknowledges none, is gone."""

    name = "tcp"
    preference = 20
    memory_kinds = frozenset({MemoryKind.SHARED, MemoryKind.HOST})
    automatic = True
    receiver_writes = True

    def __init__(
        self,
        on_event: EventSink,
        options: TransportOptions,
        tuning: TcpTuning = TcpTuning(),  # noqa: B008
        net: Net = NET,
    ) -> None:
        self._options = options
        self._tuning = tuning
        self._stall_s = options.limits.peer_silence_s
        self._lock = threading.RLock()
        self._emitter = EventEmitter(self.name, on_event)
        self._views: list[memoryview] = []  # exports: no mapping can be unmapped under our feet
        self._incoming: TcpListener | None = None
        self._grants = Grants()
        self._paths: Paths[PeerWriter] = Paths(self.name, self.memory_kinds, self._emitter)
        self._net = net
        self._sockets = TcpSockets(self.name, options, net)
        self._loop = net.loop("segue-tcp", self._crashed)
        self._loop.start()

    # ---- the six methods -----------------------------------------------------------------------

    def register(self, memory: Memory) -> Endpoint:
        """See `Transport.register`. Raises ConfigError when the port cannot be listened on."""
        with self._lock:
            self._paths.check_register(memory)
            listener = self._sockets.listen()
            self._paths.memory = memory
            self._views = [memoryview(region.buffer) for region in memory.regions]
            key = handshake.new_key(self._net.random_bytes)
            self._incoming = TcpListener(
                self._loop,
                listener,
                key,
                partial(self._in_stream, memory),
                self._writer_gone,
                self._sockets.accepted,
                tuning=self._tuning,
                handshake_s=self._options.limits.handshake_s,
            )
            self._loop.post(self._incoming.listener.open)
        return self._sockets.endpoint(listener, key, memory.nbytes)

    def connect(self, peer: RankId, endpoint: Endpoint, timeout_s: float) -> None:
        """See `Transport.connect`. Raises also ConfigError before `register`."""
        with self._lock:
            memory = self._paths.check_connect(peer)
        if memory is None:
            return
        address = self._sockets.address(peer, endpoint)
        channels = self._sockets.open_streams(peer, address, self._tuning.streams, timeout_s)
        path = PeerWriter(
            self._loop,
            peer,
            channels,
            memory,
            endpoint.nbytes,
            self._emitter.emit,
            self._path_gone,
            tuning=self._tuning,
            stall_s=self._stall_s,
        )
        with self._lock:
            if self._paths.add(peer, path):
                self._loop.post(path.open)
                return
        for channel in channels:
            channel.close()

    def grant(self, peer: RankId, epoch: int, area: Content) -> None:
        """See `Transport.grant`. Raises OutOfCapacity when too many grants live."""
        with self._lock:
            if not self._emitter.closed:
                self._grants.add(peer, epoch, area)

    def write(self, peer: RankId, epoch: int, tag: int, blocks: Sequence[CopyBlock]) -> None:
        """See `Transport.write`."""
        posted = self._loop.time()
        with self._lock:
            try:
                path, memory = self._paths.check_write(peer, epoch)
                nbytes = ranges.check_memory(blocks, memory, path.target_bytes)
            except SegueError as exc:
                failed = WriteFailed(peer, epoch, tag, exc)
            else:
                write = partial(path.write, epoch, tag, blocks, nbytes, posted)
                self._emitter.run_soon(self._loop, write)
                return
        self._emitter.soon(self._loop, failed)

    def fence(self, peer: RankId, epoch: int) -> None:
        """See `Transport.fence`; proven, except when the path broke under a write of this side."""
        with self._lock:
            if self._emitter.closed:
                return
            self._grants.remove(peer, epoch)  # seen before the next slice lands
            self._paths.fenced.add(peer, epoch)
            path = self._paths.of.get(peer)
            if path is not None:
                self._emitter.run_soon(self._loop, partial(path.fence, epoch))
                return
        self._emitter.soon(self._loop, Fenced(peer, epoch, True))

    def close(self) -> None:
        """See `Transport.close`."""
        with self._lock:
            if self._emitter.closed:
                return
            self._emitter.closed = True
        self._loop.stop(self._release, _CLOSE_S)

    # ---- inside (loop thread) ---------------------------------------------------------------------

    def _crashed(self, exc: BaseException) -> None:
        self._emitter.fail(exc)
        paths, incoming = dict(self._paths.of), self._incoming.groups if self._incoming is not None else ()
        for path in paths.values():  # its writes and fences are answered
            self._emitter.run_soon(self._loop, partial(path.end, Internal(self._emitter.failure)))
        self._emitter.all_gone(peer for peer in incoming if peer not in paths)

    def _release(self) -> None:
        for path in self._paths.of.values():
            path.close()
        self._paths.of.clear()
        if self._incoming is not None:
            self._incoming.close()
        self._views.clear()
        self._paths.memory = None

    def _in_stream(
        self, memory: Memory, channel: Channel, peer: RankId, broken: Callable[[SegueError], None]
    ) -> InStream:
        return InStream(
            self._loop,
            channel,
            peer,
            memory,
            self._grants,
            broken,
            tuning=self._tuning,
            stall_s=self._stall_s,
        )

    def _writer_gone(self, peer: RankId, error: SegueError) -> None:
        with self._lock:
            self._grants.remove_peer(peer)
        self._emitter.emit(PeerGone(peer, True, error))

    def _path_gone(self, path: PeerWriter, error: SegueError) -> None:
        with self._lock:
            self._paths.remove(path.peer, path)
        self._emitter.emit(PeerGone(path.peer, False, error))
