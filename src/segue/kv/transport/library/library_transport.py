"""The common part of transports whose library moves bytes on threads of its own.

The endpoint names a control stream (TCP, authenticated as the streams of `tcp` are, and under TLS if that
is set). The bytes of KV go by the library alone, which encrypts nothing. When a writer has proven itself on
that stream, the receiver makes an end of the library for this peer alone, with its whole memory registered,
and says how that is reached. The stream stays open for as long as the path. `library_out` has the writing
end, `library_in` the receiving end, `library_wire` what they say to each other, `library_api` what is asked
of a library.

Proofs:

- `Written`: the library's own success, nothing else. An error, a time that has passed and a handle that was
  released are no end of a write: each of them ends the whole path, on both sides.
- `fence` at the writer: every post of the epoch has ended in success. Not `proven` after a path broke: then
  it comes when the writing end was closed, and nothing reads our memory any more. Where closing it proves
  nothing, there is no answer for what was in flight, also when the peer has a new path.
- `fence` at the receiver: the writer's word, over this stream, that every post of the epoch has ended in
  success; or that our receiving end was closed, where the library makes that a proof
  (`ReceivingEnd.close`). It is not answered before, and always `proven`: what a writer has given up may
  still lie in our own socket buffers, and a library's thread copies it from there. A peer that owes this
  word for `peer_silence_s` loses its path.
- `PeerGone(proven=True)` at the receiver: the same of everything that the peer was granted. The end of its
  stream and the death of its process are no proof, for the same reason.

Not prevented: the writer may write anywhere in the registered memory, as with `shm`. It writes where it was
granted, and asks first where it was told nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial

from segue.kv.errors import BootstrapTimeout, OutOfCapacity, SegueError
from segue.kv.ids import RankId
from segue.kv.layout.blocks import CopyBlock
from segue.kv.transport.base import Endpoint, EventSink, Fenced, TransportEvent
from segue.kv.transport.library import library_wire
from segue.kv.transport.library.library_api import Library
from segue.kv.transport.library.library_in import Receiving, ReceivingPath
from segue.kv.transport.library.library_out import WritingPath
from segue.kv.transport.library.library_wire import ControlStream
from segue.kv.transport.memory.pool_memory import HostBytes, Memory, MemoryKind
from segue.kv.transport.net.stream import Channel
from segue.kv.transport.options import TransportOptions
from segue.kv.transport.path_transport import PathTransport
from segue.kv.transport.write_book import Write

_CLOSE_S = 5.0
#: For a library to load. Plug-ins are looked for on slow disks, drivers are asked.
_LOAD_S = 60.0
#: Memory of closed transports that nothing proves to be out of use: it must not become anybody else's.
STILL_USED: list[tuple[Memory | None, list[memoryview]]] = []

log = logging.getLogger("segue.kv.transport")


class LibraryTransport(PathTransport[WritingPath]):
    """`Transport` over a `Library`. A subclass has its name, its library and what memory that registers."""

    def __init__(self, on_event: EventSink, options: TransportOptions, library: Library) -> None:
        super().__init__(on_event, options)
        self._silence_s = options.limits.peer_silence_s
        self._library = library
        self._loaded: Future[None] = Future()
        self._views: list[memoryview] = []  # exports: no mapping can be unmapped under our feet
        self._receiving = Receiving(self._lock, self.grants, self._emitter.emit, self._receiving_path)
        #: Every path whose stream is open, with that; one that is not written by any more, too.
        self._writing: dict[WritingPath, ControlStream] = {}
        #: Epochs of paths that have ended, and nothing says that our memory is not read for them any more.
        self._unquiet: set[tuple[RankId, int]] = set()
        self._loop.start()

    # ---- the six methods -----------------------------------------------------------------------

    def register(self, memory: Memory) -> Endpoint:
        """See `Transport.register`. The library is loaded in the background, and registers the memory when
        a peer comes. Raises ConfigError when the port cannot be listened on."""
        with self._lock:
            self._paths.check_register(memory)
            sock = self._sockets.listen()
            self._paths.memory = memory
            self._views = [memoryview(buffer) for buffer in _host_buffers(memory)]
            endpoint = self._listen(sock, memory.nbytes, self._receiving.admit)
        threading.Thread(target=self._load, name=f"segue-{self.name}-load", daemon=True).start()
        return endpoint

    def loaded(self, timeout_s: float) -> None:
        """See `Transport.loaded`. Whether it could be loaded, `connect` says."""
        if wait([self._loaded], timeout_s).not_done:
            log.warning(
                "%s is not loaded after %g s: pairs that meet meanwhile may take another transport",
                self.name,
                timeout_s,
            )

    def connect(self, peer: RankId, endpoint: Endpoint, timeout_s: float) -> None:
        """See `Transport.connect`. Raises also ConfigError before `register`."""
        deadline = time.monotonic() + timeout_s
        memory = self._memory_for(peer, lambda old: None if old.error is None else old.join, timeout_s)
        if memory is None:
            return
        address = self._sockets.address(peer, endpoint)
        channel = self._sockets.open_stream(peer, address, round(deadline - time.monotonic(), 3))

        def told(message: library_wire.Message) -> None:
            if isinstance(message, library_wire.ReceiverReady | library_wire.AskAnswer):
                stream.answered()
            path.told(message)

        path = WritingPath(
            self.name,
            peer,
            memory,
            endpoint.nbytes,
            self._when_loaded,
            self._tell,
            lambda message, owes: self._loop.post(partial(stream.send, message, owes=owes)),
            self._writer_gone,
            silence_s=self._silence_s,
        )
        stream = ControlStream(self._loop, channel, peer, told, path.end, self._silence_s)
        with self._lock:
            wanted = not self._emitter.closed
            if wanted:
                self._writing[path] = stream
        if not wanted:
            channel.close()
            self._paths.check_connect(peer)  # says why
        self._loop.post(stream.open)
        try:
            path.start()
        except RuntimeError as exc:  # the host gives this process no more threads
            self._loop.post(partial(self._shut, path))
            raise OutOfCapacity(f"no thread for the path to {peer}: {exc}") from exc
        if not path.opened.wait(max(0.0, deadline - time.monotonic())):
            path.end(BootstrapTimeout(f"{peer} made no {self.name} path within {timeout_s} s"))
            raise BootstrapTimeout(f"{peer} made no {self.name} path within {timeout_s} s")
        with self._lock:
            if path.error is None and not self._paths.add(peer, path):
                path.close()
                self._paths.check_connect(peer)
        if path.error is not None:
            raise path.error

    def fence(self, peer: RankId, epoch: int) -> None:
        """See `Transport.fence` and this module's docstring for what is proven, and when."""
        with self._lock:
            if self._emitter.closed:
                return
            self.grants.remove(peer, epoch)
            self._paths.fenced.add(peer, epoch)
        writes = partial(self._fence_writes, peer, epoch)
        self._emitter.run_soon(self._loop, partial(self._receiving.fence, peer, epoch, writes))

    def close(self) -> None:
        """See `Transport.close`. Writes in flight may land first, so that peers hear a goodbye."""
        with self._lock:
            if self._emitter.closed:
                return
            self._emitter.closed = True
            memory, writing = self._paths.memory, list(self._writing)
        for path in writing:
            path.close()
        deadline = time.monotonic() + _CLOSE_S
        ended = [path.join(max(0.0, deadline - time.monotonic())) for path in writing]
        self._loop.stop(self._release, _CLOSE_S)
        ended += [path.join(max(0.0, deadline - time.monotonic())) for path in self._receiving]
        if not all(ended) or self._unquiet or not all(path.quiet for path in self._receiving):
            log.error("%s: memory that may still be in use is kept until this process ends", self.name)
            STILL_USED.append((memory, self._views))
        self._views = []

    # ---- inside ----------------------------------------------------------------------------------

    def _granted(self, peer: RankId, epoch: int) -> None:
        self._loop.post(partial(self._receiving.grant, peer, epoch))

    def _begin(self, path: WritingPath, write: Write, blocks: Sequence[CopyBlock]) -> None:
        path.write(write, blocks)

    def _load(self) -> None:
        try:
            self._library.load()
        except BaseException as exc:
            self._loaded.set_exception(exc)
        else:
            self._loaded.set_result(None)

    def _when_loaded(self) -> Library:
        self._loaded.result(_LOAD_S)
        return self._library

    def _crashed(self, exc: BaseException) -> None:
        self._emitter.fail(exc)
        self._emitter.all_gone((*self._paths.of, *self._receiving.of))

    def _release(self) -> None:
        """The loop's last call."""
        if self._listener is not None:
            self._listener.close()
        self._receiving.close()
        for stream in self._writing.values():
            stream.close()
        self._paths.of.clear()
        self._paths.memory = None

    def _receiving_path(
        self,
        channel: Channel,
        peer: RankId,
        ready: Callable[[ReceivingPath], None],
        gone: Callable[[ReceivingPath, SegueError], None],
    ) -> ReceivingPath:
        assert self._paths.memory is not None
        return ReceivingPath(
            self.name,
            self._loop,
            channel,
            peer,
            self._paths.memory,
            self._when_loaded,
            self.grants,
            ready,
            gone,
            silence_s=self._silence_s,
        )

    def _fence_writes(self, peer: RankId, epoch: int) -> None:
        """The peer writes nothing of `epoch` any more: now what we write."""
        with self._lock:
            if (path := self._paths.of.get(peer)) is not None:
                path.fence(epoch)
                return
        self._tell(Fenced(peer, epoch, True))

    def _tell(self, event: TransportEvent) -> None:
        """Every event of the writing side. A fence that any path has not settled is never answered, whichever
        path answers: something may read our memory for it."""
        if isinstance(event, Fenced):
            with self._lock:
                if (event.peer, event.epoch) in self._unquiet:
                    return
        self._emitter.emit(event)

    def _writer_gone(self, path: WritingPath, quiet: bool) -> bool:
        """On the path's thread, which is about to end. True if the path was connected."""
        with self._lock:
            connected = self._paths.remove(path.peer, path)
            if not quiet:
                self._unquiet.update((path.peer, epoch) for epoch in path.unsettled)
        self._loop.post(partial(self._shut, path))
        return connected

    def _shut(self, path: WritingPath) -> None:
        """On the loop's thread; where that has died, `_release` closes the stream."""
        with self._lock:
            stream = self._writing.pop(path)
        stream.close()


def _host_buffers(memory: Memory) -> list[HostBytes]:
    return [region.buffer for region in memory.regions if region.kind is not MemoryKind.DEVICE]
