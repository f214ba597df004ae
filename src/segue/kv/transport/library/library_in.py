"""The receiving end of paths of `library`: who is let in, who may write what, and the proof that it does not.

Each writer that has proven itself gets a receiving end of the library of its own. A thread of its own makes
that, waits for the path's end, and closes it: with most libraries to close it is the only proof there is that
stays true whatever the writer does. Everything else here runs on the loop's thread.

A granted epoch may be written until its writer has sent `Settled` (every post ended in the library's own
success) or goodbye. Where it is a proof, the close of the receiving end ends it as well. A fence is answered
then and not before. Where none of these comes, it never is: the pages stay in quarantine.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from functools import partial

from segue.kv.errors import OutOfCapacity, PeerLost, PeerRefused, SegueError, TransferFailed
from segue.kv.ids import RankId
from segue.kv.transport.base import PeerGone, TransportEvent
from segue.kv.transport.epochs import Grants
from segue.kv.transport.library import library_wire
from segue.kv.transport.library.library_api import Library, ReceivingEnd
from segue.kv.transport.library.library_wire import ControlStream
from segue.kv.transport.memory.pool_memory import Memory
from segue.kv.transport.net.ioloop import IoLoop
from segue.kv.transport.net.stream import Channel

#: An honest writer has one path. More are left of paths that broke and that nothing proved an end of.
MAX_PATHS_PER_RANK = 8
MAX_PATHS = 1024

log = logging.getLogger("segue.kv.transport")


class ReceivingPath:
    """One writer's connection, and the receiving end that was made for it.

    ready: called when the writer may be granted something. gone: called once, at the end; then `epochs` has
    those that nothing proves an end of.
    """

    def __init__(
        self,
        name: str,
        loop: IoLoop,
        channel: Channel,
        peer: RankId,
        memory: Memory,
        library: Callable[[], Library],
        grants: Grants,
        ready: Callable[[ReceivingPath], None],
        gone: Callable[[ReceivingPath, SegueError], None],
        *,
        silence_s: float,
    ) -> None:
        self.peer = peer
        #: Epochs that the writer was granted and has not settled.
        self.epochs: set[int] = set()
        self.ready = False
        #: Why the path has ended, or is about to.
        self.over: SegueError | None = None
        self._name = name
        self._loop = loop
        self._memory = memory
        self._library = library
        self._grants = grants
        self._on_ready = ready
        self._gone = gone
        self._fences: dict[int, list[Callable[[], None]]] = {}
        self._greeting: bytes | None = None
        self._stream = ControlStream(loop, channel, peer, self._told, self.end, silence_s)
        self._ended = threading.Event()
        self._proven = False
        self._thread = threading.Thread(target=self._run, name=f"segue-{name}-in", daemon=True)

    def open(self) -> None:
        """Start to listen to the writer."""
        self._stream.open()
        self._stream.expect()  # its greeting

    def grant(self, epoch: int) -> None:
        """Let it write, and tell it so."""
        self.epochs.add(epoch)
        self._stream.send(library_wire.GrantEpoch(epoch))

    def fence(self, epoch: int, done: Callable[[], None]) -> None:
        """End one of `epochs`: `done` is called when nothing of it can land any more."""
        self._fences.setdefault(epoch, []).append(done)
        if self.over is None and len(self._fences[epoch]) == 1:
            self._stream.send(library_wire.FenceEpoch(epoch), owes=True)

    def end(self, error: SegueError) -> None:
        """Close the stream, and then the receiving end. Idempotent."""
        if self.over is not None:
            return
        self.over = error
        self._stream.close()
        self._ended.set()
        if self._greeting is None:
            self._closed(True)

    @property
    def quiet(self) -> bool:
        """After its end: nothing that its writer was granted can land any more."""
        return self._proven or not self.epochs

    def join(self, timeout_s: float) -> bool:
        """Wait until the receiving end is closed. False when it is not in time."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # ---- what the writer says ----------------------------------------------------------------------

    def _told(self, message: library_wire.Message) -> None:
        match message:
            case library_wire.Greeting(blob) if self._greeting is None:
                self._stream.answered()
                self._greeting = blob
                try:
                    self._thread.start()
                except RuntimeError as exc:  # the host gives this process no more of them
                    self._greeting = None  # so that the end does not wait for it
                    raise OutOfCapacity(f"no thread for the path of {self.peer}: {exc}") from exc
            case library_wire.Ask(epoch) if self.ready:
                granted = (self.peer, epoch) in self._grants
                if granted:
                    self.epochs.add(epoch)
                self._stream.send(library_wire.AskAnswer(epoch, granted))
            case library_wire.Settled(epoch) if epoch in self._fences:
                self._stream.answered()
                self._over(epoch)
            case library_wire.Goodbye():
                for epoch in list(self.epochs):
                    self._over(epoch)
                self.end(PeerLost(f"{self.peer} is gone: it said goodbye", peer=str(self.peer)))
            case _:
                raise TransferFailed(f"{self.peer} says {type(message).__name__}, which is not its turn")

    def _over(self, epoch: int) -> None:
        """Nothing of `epoch` can land any more."""
        self.epochs.discard(epoch)
        for done in self._fences.pop(epoch, ()):
            done()

    # ---- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        end: ReceivingEnd | None = None
        try:
            assert self._greeting is not None
            end = self._library().receiving(self.peer, self._memory, self._greeting)
        except Exception as exc:
            self._loop.post(partial(self.end, self._typed(exc)))
        else:
            self._loop.post(partial(self._made, end))
        self._ended.wait()  # until the path ends, which has no time limit
        proven = end is None
        try:
            if end is not None:
                end.unsettled = bool(self.epochs)
                proven = end.close()
        except Exception as exc:
            log.error("%s: the receiving end of %s cannot be closed: %r", self._name, self.peer, exc)
        self._proven = proven
        self._loop.post(partial(self._closed, proven))

    def _typed(self, exc: Exception) -> SegueError:
        if isinstance(exc, SegueError):
            return exc
        return TransferFailed(f"{self._name} cannot let {self.peer} write: {exc!r}")

    def _made(self, end: ReceivingEnd) -> None:
        if self.over is not None:
            return
        regions = tuple(
            library_wire.RegionAt(region.address, region.nbytes, region.device)
            for region in self._memory.regions
        )
        self.ready = True
        self._stream.send(library_wire.ReceiverReady(regions, end.blob))
        self._on_ready(self)

    def _closed(self, proven: bool) -> None:
        if proven:
            for epoch in list(self.epochs):
                self._over(epoch)
        if self.epochs:
            log.error(
                "%s: %s is gone with %d hand-offs under way, and nothing proves that their last bytes have "
                "come: their pages stay in quarantine until this process ends",
                self._name,
                self.peer,
                len(self.epochs),
            )
        assert self.over is not None
        self._gone(self, self.over)


class Receiving:
    """All writers that have proven themselves, by their rank. `path` makes the path of an authenticated
    channel."""

    def __init__(
        self,
        lock: threading.RLock,
        grants: Grants,
        emit: Callable[[TransportEvent], None],
        path: Callable[
            [
                Channel,
                RankId,
                Callable[[ReceivingPath], None],
                Callable[[ReceivingPath, SegueError], None],
            ],
            ReceivingPath,
        ],
    ) -> None:
        self._lock = lock
        self._grants = grants
        self._emit = emit
        self._path = path
        self.of: dict[RankId, list[ReceivingPath]] = {}

    def __iter__(self) -> Iterator[ReceivingPath]:
        return iter([path for paths in self.of.values() for path in paths])

    def admit(self, channel: Channel, peer: RankId, verdict: bytes) -> None:
        """See `AuthenticatedListener`."""
        paths = self.of.get(peer, [])
        if len(paths) >= MAX_PATHS_PER_RANK or sum(map(len, self.of.values())) >= MAX_PATHS:
            raise PeerRefused("too many paths to this process are open, or broke without a proof")
        for old in paths:  # the peer connects anew
            old.end(PeerLost(f"{peer} connects anew", peer=str(peer)))
        channel.send(verdict)
        path = self._path(channel, peer, self._ready, self._gone)
        self.of.setdefault(peer, []).append(path)
        path.open()

    def grant(self, peer: RankId, epoch: int) -> None:
        """Tell the peer, if it is there; else it is told when it comes."""
        if (path := self._live(peer)) is not None:
            path.grant(epoch)

    def fence(self, peer: RankId, epoch: int, done: Callable[[], None]) -> None:
        """Call `done` when nothing that `peer` writes for `epoch` can land any more."""
        paths = [path for path in self.of.get(peer, ()) if epoch in path.epochs]
        waiting = len(paths)

        def one() -> None:
            nonlocal waiting
            waiting -= 1
            if not waiting:
                done()

        for path in paths:
            path.fence(epoch, one)
        if not paths:
            done()

    def close(self) -> None:
        """End every path; their threads close their ends."""
        for path in self:
            path.end(TransferFailed("the transport is closed"))

    def _live(self, peer: RankId) -> ReceivingPath | None:
        return next((path for path in self.of.get(peer, ()) if path.ready and path.over is None), None)

    def _ready(self, path: ReceivingPath) -> None:
        with self._lock:
            epochs = self._grants.of(path.peer)
        for epoch in epochs:
            path.grant(epoch)

    def _gone(self, path: ReceivingPath, error: SegueError) -> None:
        paths = self.of[path.peer]
        if not path.epochs:
            paths.remove(path)
        if any(other.over is None for other in paths):
            return  # it is here again, by another path
        with self._lock:
            self._grants.remove_peer(path.peer)
        if not paths:
            del self.of[path.peer]
        self._emit(PeerGone(path.peer, not paths, error))
