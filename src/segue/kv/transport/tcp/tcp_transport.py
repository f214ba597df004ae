"""`tcp`: scatter and gather straight between two pools, over one stream per peer.

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

import socket
from collections.abc import Callable
from functools import partial

from segue.kv.errors import Internal, SegueError
from segue.kv.ids import RankId
from segue.kv.transport.base import Endpoint, EventSink, Fenced, PeerGone
from segue.kv.transport.memory.pool_memory import Memory, MemoryKind
from segue.kv.transport.net.stream import Channel
from segue.kv.transport.options import TransportOptions
from segue.kv.transport.path_transport import PathTransport
from segue.kv.transport.tcp.tcp_in import InStream, InStreams
from segue.kv.transport.tcp.tcp_net import NET, Net, TcpTuning
from segue.kv.transport.tcp.tcp_out import PeerWriter

_CLOSE_S = 5.0


class TcpTransport(PathTransport[PeerWriter]):
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
        super().__init__(on_event, options, net)
        self._tuning = tuning
        self._stall_s = options.limits.peer_silence_s
        self._views: list[memoryview] = []  # exports: no mapping can be unmapped under our feet
        self._incoming = InStreams(self._in_stream, self._writer_gone, tuning.max_streams)
        self._loop.start()

    # ---- the six methods -----------------------------------------------------------------------

    def register(self, memory: Memory) -> Endpoint:
        """See `Transport.register`. Raises ConfigError when the port cannot be listened on."""
        with self._lock:
            self._paths.check_register(memory)
            sock = self._sockets.listen()
            self._paths.memory = memory
            self._views = [memoryview(region.buffer) for region in memory.regions]
            return self._listen(
                sock,
                memory.nbytes,
                self._incoming.admit,
                open_channel=self._open_channel,
                max_pending=self._tuning.max_pending,
            )

    def connect(self, peer: RankId, endpoint: Endpoint, timeout_s: float) -> None:
        """See `Transport.connect`. Raises also ConfigError before `register`."""
        with self._lock:
            memory = self._paths.check_connect(peer)
        if memory is None:
            return
        address = self._sockets.address(peer, endpoint)
        channel = self._sockets.open_stream(peer, address, timeout_s)
        path = PeerWriter(
            self._loop,
            peer,
            channel,
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
        channel.close()

    def fence(self, peer: RankId, epoch: int) -> None:
        """See `Transport.fence`; proven, except when the path broke under a write of this side."""
        with self._lock:
            if self._emitter.closed:
                return
            self.grants.remove(peer, epoch)  # seen before the next slice lands
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
        paths, incoming = dict(self._paths.of), dict(self._incoming.of)
        for path in paths.values():  # its writes and fences are answered
            self._emitter.run_soon(self._loop, partial(path.end, Internal(self._emitter.failure)))
        self._emitter.all_gone(peer for peer in incoming if peer not in paths)

    def _release(self) -> None:
        for path in self._paths.of.values():
            path.close()
        self._paths.of.clear()
        if self._listener is not None:
            self._listener.close()
        self._incoming.close()
        self._views.clear()
        self._paths.memory = None

    def _open_channel(self, sock: socket.socket) -> Channel | None:
        return None if self._incoming.full else self._sockets.accepted(sock)

    def _in_stream(self, channel: Channel, peer: RankId, broken: Callable[[SegueError], None]) -> InStream:
        assert self._paths.memory is not None
        return InStream(
            self._loop,
            channel,
            peer,
            self._paths.memory,
            self.grants,
            broken,
            tuning=self._tuning,
            stall_s=self._stall_s,
        )

    def _writer_gone(self, peer: RankId, error: SegueError) -> None:
        with self._lock:
            self.grants.remove_peer(peer)
        self._emitter.emit(PeerGone(peer, True, error))

    def _path_gone(self, path: PeerWriter, error: SegueError) -> None:
        with self._lock:
            self._paths.remove(path.peer, path)
        self._emitter.emit(PeerGone(path.peer, False, error))
