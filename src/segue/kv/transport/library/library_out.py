"""The writing end of a path of `library`: one thread, which alone calls the library's writing end.

It posts what is queued, looks whether what was posted has landed, and keeps every post until the library says
success. Libraries tell nobody when they are done, so it looks every `POLL_S` while something is in flight.
With nothing in flight it sleeps until it is asked for something.

Anything else than success ends the path: the writing end is closed, so that nothing reads our memory any
more, and only then is anybody told.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from segue.kv.errors import OutOfCapacity, PeerLost, PeerRefused, SegueError, TransferFailed
from segue.kv.ids import RankId
from segue.kv.layout.blocks import CopyBlock
from segue.kv.transport.base import PeerGone, TransportEvent
from segue.kv.transport.epochs import MAX_GRANTS
from segue.kv.transport.library import library_wire
from segue.kv.transport.library.library_api import Handle, Library, WritingEnd
from segue.kv.transport.memory import ranges
from segue.kv.transport.memory.pool_memory import Memory, Region
from segue.kv.transport.tcp import tcp_wire
from segue.kv.transport.tcp.tcp_wire import PartRows
from segue.kv.transport.write_book import Write, WriteBook, fenced, not_granted

#: Between two looks at what is in flight.
POLL_S = 0.0005
#: Limit for one path. More would only make a fence wait longer.
MAX_IN_FLIGHT_BYTES = 32 * 2**20
MAX_IN_FLIGHT_POSTS = 64
#: Pieces that wait for one peer.
MAX_WAITING = 65536

Call = Callable[[], None]


@dataclass(slots=True, eq=False)
class Post:
    """A piece of a write that the library has, and what it is called there."""

    write: Write
    rows: PartRows
    handle: Handle


class _PathEnds(Exception):
    """The path is to end without anything being wrong."""


class WritingPath:
    """The path to the receiver `peer`, from its thread's start (`start`) until that ends.

    library: waits until the library is loaded, and gives it.
    tell: says something to the peer, on the control stream. True: the peer owes an answer.
    gone: called once, on the thread, after the writing end was closed; from then on nothing may be asked.
        It is told whether nothing reads our memory any more, and says whether the path's end is to be told.
    """

    def __init__(
        self,
        name: str,
        peer: RankId,
        memory: Memory,
        target_bytes: int,
        library: Callable[[], Library],
        emit: Callable[[TransportEvent], None],
        tell: Callable[[library_wire.FromWriter, bool], None],
        gone: Callable[[WritingPath, bool], bool],
        *,
        silence_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.peer = peer
        self.target_bytes = target_bytes
        #: Set when the path can be written to, or has ended: then `error` says why.
        self.opened = threading.Event()
        self.error: SegueError | None = None
        #: After the end: epochs of which something was in flight.
        self.unsettled: set[int] = set()
        self._name = name
        self._memory = memory
        self._library = library
        self._emit = emit
        self._tell = tell
        self._gone = gone
        self._silence_s = silence_s
        self._clock = clock
        self._calls: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self._end: WritingEnd | None = None
        self._target: Memory | None = None
        self._limits = (Library.post_bytes, Library.max_rows)
        self._book: WriteBook[PartRows] = WriteBook(peer, emit, clock, MAX_WAITING)
        self._in_flight: deque[Post] = deque()
        self._bytes = 0  # in flight
        self._granted: set[int] = set()
        self._asking: dict[int, list[tuple[Write, Sequence[CopyBlock]]]] = {}
        self._settling: set[int] = set()  # epochs that the receiver has ended, and waits for our word
        self._closing = False
        self._moved_at = 0.0
        self._looked_at = 0.0
        self._thread = threading.Thread(target=self._run, name=f"segue-{name}-out", daemon=True)

    # ---- from any thread -------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def told(self, message: library_wire.Message) -> None:
        """A message of the receiver on the control stream."""
        self._calls.put(partial(self._told, message))

    def write(self, write: Write, blocks: Sequence[CopyBlock]) -> None:
        """Queue a write whose blocks lie inside both memories."""
        self._calls.put(partial(self._write, write, blocks))

    def fence(self, epoch: int) -> None:
        """Fail what is queued; say `Fenced` when what is in flight has landed, or is not read any more."""
        self._calls.put(partial(self._fence, epoch))

    def end(self, error: SegueError) -> None:
        """The control stream has ended, or the path is not wanted."""
        self._calls.put(partial(self._fail, error))

    def close(self) -> None:
        """Drop the queue, let what is in flight land, say goodbye and end the thread."""
        self._calls.put(self._close)

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread, if it runs: the host may have had none to start. False when it has not ended
        in time. A thread that starts after `close` touches no memory."""
        if threading.current_thread() is not self._thread and self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # ---- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        error: SegueError | None = None
        try:
            self._tell(library_wire.Greeting(self._library().greeting()), True)
            self._serve()
        except _PathEnds:
            pass
        except Exception as exc:
            error = self._typed(exc)
        self.error = error or TransferFailed(f"the {self._name} path to {self.peer} was closed")
        self.opened.set()
        self.unsettled = {post.write.epoch for post in self._in_flight}
        quiet = self._close_end()
        if not self.unsettled:
            self._tell(library_wire.Goodbye(), False)
        self._settle(self.error, quiet)

    def _serve(self) -> None:
        moved = False
        while not self._closing or self._in_flight:
            self._take(None if not self._in_flight else 0 if moved else POLL_S)
            moved = self._look() | self._post()

    def _take(self, wait_s: float | None) -> None:
        """Do what was asked for until now; wait that long for the first, for ever if None."""
        try:
            call = self._calls.get(block=wait_s != 0, timeout=wait_s or None)
            for _ in range(self._calls.qsize()):
                call()
                call = self._calls.get_nowait()
            call()
        except queue.Empty:
            return

    def _look(self) -> bool:
        """Take out what has landed. Raises what the library says of a post that failed, and PeerLost when
        nothing has landed for too long."""
        if not self._in_flight:
            return False
        assert self._end is not None
        now = self._clock()
        if now - self._looked_at > self._silence_s / 2:  # we slept ourselves: a stopped process
            self._moved_at = now
        self._looked_at = now
        landed = [post for post in self._in_flight if self._end.done(post.handle)]
        for post in landed:
            self._in_flight.remove(post)
            self._bytes -= post.rows.nbytes
            self._book.over(post.write)
            self._answer(post.write.epoch)
        if landed:
            self._moved_at = now
        elif now - self._moved_at > self._silence_s:
            raise PeerLost(f"nothing has landed at {self.peer} for {self._silence_s} s", peer=str(self.peer))
        return bool(landed)

    def _post(self) -> bool:
        """Give the library what it may have more."""
        posted = False
        while self._book.waiting:
            full = self._bytes + self._book.waiting[0][1].nbytes > MAX_IN_FLIGHT_BYTES
            if self._in_flight and (full or len(self._in_flight) >= MAX_IN_FLIGHT_POSTS):
                break
            assert self._end is not None
            write, rows = self._book.begin()
            post = Post(write, rows, None)
            if not self._in_flight:
                self._moved_at = self._looked_at = self._clock()
            # Before the call: of one that raises nothing is known.
            self._in_flight.append(post)
            self._bytes += rows.nbytes
            post.handle = self._end.post(rows)
            posted = True
        return posted

    # ---- what is asked for -----------------------------------------------------------------------

    def _told(self, message: library_wire.Message) -> None:
        match message:
            case library_wire.ReceiverReady() if self._end is None:
                self._open(message)
            case library_wire.GrantEpoch(epoch) | library_wire.AskAnswer(epoch, True):
                self._grant(epoch)
            case library_wire.AskAnswer(epoch, False):
                self._refuse(epoch, not_granted(self.peer, epoch), refused=True)
            case library_wire.FenceEpoch(epoch):
                self._granted.discard(epoch)
                self._refuse(epoch, not_granted(self.peer, epoch), refused=True)
                self._book.drop(not_granted(self.peer, epoch), epoch, refused=True)
                self._settling.add(epoch)
                self._answer(epoch)
            case _:
                raise TransferFailed(f"{self.peer} says {type(message).__name__}, which is not its turn")

    def _open(self, ready: library_wire.ReceiverReady) -> None:
        """The receiver has made its end: make ours."""
        target = Memory([Region(r.address, r.nbytes, r.device) for r in ready.regions])
        if target.nbytes != self.target_bytes:
            raise PeerRefused(
                f"{self.peer} has {target.nbytes} bytes of memory; its endpoint says {self.target_bytes}"
            )
        library = self._library()
        self._limits = (library.post_bytes, library.max_rows)
        self._end = library.writing(self.peer, self._memory, target, ready.blob)
        self._target = target
        self.opened.set()

    def _grant(self, epoch: int) -> None:
        if len(self._granted) >= MAX_GRANTS:
            raise OutOfCapacity(f"{self.peer} grants more than {MAX_GRANTS} epochs")
        self._granted.add(epoch)
        for write, blocks in self._asking.pop(epoch, ()):
            self._write(write, blocks)

    def _write(self, write: Write, blocks: Sequence[CopyBlock]) -> None:
        assert self._target is not None
        if write.epoch not in self._granted:
            if write.epoch not in self._asking:
                self._tell(library_wire.Ask(write.epoch), True)
            self._asking.setdefault(write.epoch, []).append((write, blocks))
            return
        try:
            ranges.check_target(blocks, self._target)
        except TransferFailed as exc:
            self._book.fail(write, exc)
            return
        self._book.add(write, pieces(blocks, *self._limits))

    def _fence(self, epoch: int) -> None:
        self._refuse(epoch, fenced(epoch))
        self._book.fence(epoch)

    def _fail(self, error: SegueError) -> None:
        raise error

    def _close(self) -> None:
        self._closing = True
        self._book.waiting.clear()
        if self._end is None:
            raise _PathEnds

    # ---- books -----------------------------------------------------------------------------------

    def _refuse(self, epoch: int, error: SegueError, *, refused: bool = False) -> None:
        """Fail the writes of an epoch for which the peer was asked."""
        for write, _ in self._asking.pop(epoch, ()):
            self._book.fail(write, error, refused=refused)

    def _answer(self, epoch: int) -> None:
        """Say that an epoch is over to a receiver that waits for that, if nothing of it is in flight."""
        if epoch in self._settling and not self._book.busy(epoch):
            self._settling.discard(epoch)
            self._tell(library_wire.Settled(epoch), False)

    # ---- the end ---------------------------------------------------------------------------------

    def _close_end(self) -> bool:
        """True when nothing reads our memory any more."""
        try:
            return self._end is None or self._end.close()
        except Exception as exc:
            self._typed(exc)
            return False

    def _settle(self, error: SegueError, quiet: bool) -> None:
        """Everything that waits fails; fences are answered where that is true."""
        if not quiet:
            self._book.still_read |= self.unsettled
        self._book.end(error)
        for epoch in list(self._asking):
            self._refuse(epoch, error)
        connected = self._gone(self, quiet)  # from here on no call is added
        while not self._calls.empty():
            call = self._calls.get_nowait()
            if isinstance(call, partial) and call.func == self._write:
                self._book.fail(call.args[0], error)
            elif isinstance(call, partial) and call.func == self._fence:
                self._book.fence(*call.args)
        self._book.settle_all()
        if connected:
            self._emit(PeerGone(self.peer, False, error))

    def _typed(self, exc: Exception) -> SegueError:
        """The typed error for an exception; a library's own are of any type."""
        if isinstance(exc, SegueError):
            return exc
        return TransferFailed(f"{self._name} to {self.peer} failed: {exc!r}")


def pieces(blocks: Sequence[CopyBlock], post_bytes: int, max_rows: int) -> Iterator[PartRows]:
    """The posts of a checked write; rows that go on where the last ended, on both sides, are one."""
    for rows in tcp_wire.cut(blocks, post_bytes, max_rows):
        lengths = rows.source[:, 1]
        starts = np.ones(len(lengths), bool)
        starts[1:] = (rows.source[1:, 0] != rows.source[:-1, 0] + lengths[:-1]) | (
            rows.target[1:, 0] != rows.target[:-1, 0] + lengths[:-1]
        )
        first = starts.nonzero()[0]
        source, target = rows.source[first], rows.target[first]
        source[:, 1] = target[:, 1] = np.add.reduceat(lengths, first)
        yield PartRows(source, target, rows.nbytes)
