"""A library that copies within this process, on a thread of its own, and fails in the worst way when told to.

It behaves as UCX over tcp does: what was posted lies between the two sides, and the receiving end's thread
puts it into memory, also when the writer is long gone. Only closing the receiving end ends that.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections import deque
from dataclasses import dataclass, field

from segue.kv.errors import TransferFailed
from segue.kv.ids import RankId
from segue.kv.transport.base import EventSink
from segue.kv.transport.library.library_api import Handle, Library, ReceivingEnd, WritingEnd
from segue.kv.transport.library.library_transport import LibraryTransport
from segue.kv.transport.memory.pool_memory import Memory, MemoryKind
from segue.kv.transport.options import TransportOptions
from segue.kv.transport.tcp.tcp_wire import PartRows

NAME = "library"


@dataclass(eq=False)
class Faults:
    """Faults in the libraries of this process, from now on.

    running: clear it, and nothing lands until it is set again.
    fail_after: so many posts are taken, the next raises, and lands all the same.
    says_failed: posts that land are said to have failed.
    closing: clear it, and no writing end can be closed until it is set again.
    unproven: closing a receiving end stops what lands, and does not say so.
    reads_on: closing a writing end does not end what it reads.
    """

    running: threading.Event = field(default_factory=threading.Event)
    closing: threading.Event = field(default_factory=threading.Event)
    fail_after: int | None = None
    says_failed: bool = False
    unproven: bool = False
    reads_on: bool = False
    loading: threading.Event | None = None
    refuse: str = ""
    posts: list[tuple[int, int]] = field(default_factory=list)  # rows and bytes of each
    taken: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))  # one for each

    def reset(self) -> None:
        """Nothing is wrong."""
        self.__init__()  # type: ignore[misc]
        self.running.set()
        self.closing.set()


FAULTS = Faults()
FAULTS.reset()


@dataclass(eq=False)
class Landing:
    """One post, between the two sides: the bytes themselves, as in a socket's buffer."""

    data: list[tuple[int, bytes]]
    landed: bool = False
    lost: bool = False


class DoubleReceivingEnd(ReceivingEnd):
    """Puts what was posted into memory."""

    numbers = itertools.count()
    open: dict[bytes, DoubleReceivingEnd] = {}  # noqa: RUF012

    def __init__(self) -> None:
        if FAULTS.refuse:
            raise RuntimeError(FAULTS.refuse)
        self.blob = b"end %d" % next(self.numbers)
        self.arriving: deque[Landing] = deque()
        self.changed = threading.Condition()
        self.closed = False
        self.open[self.blob] = self
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.arriving or self.closed)
                if self.closed:
                    return
                landing = self.arriving[0]
            for address, data in landing.data:
                while not FAULTS.running.wait(0.01):
                    if self.closed:
                        return
                ctypes.memmove(address, data, len(data))
                if self.closed:
                    return
            landing.landed = True
            with self.changed:
                self.arriving.popleft()

    def close(self) -> bool:
        with self.changed:
            self.closed = True
            self.changed.notify()
        self.thread.join()
        for landing in self.arriving:
            landing.lost = True
        del self.open[self.blob]
        return not FAULTS.unproven


class DoubleWritingEnd(WritingEnd):
    """Copies what is posted out of memory at once."""

    def __init__(self, memory: Memory, target: Memory, blob: bytes) -> None:
        if blob not in DoubleReceivingEnd.open:
            raise TransferFailed("there is no such end")
        self.memory, self.target = memory, target
        self.to = DoubleReceivingEnd.open[blob]

    def post(self, rows: PartRows) -> Handle:
        FAULTS.posts.append((len(rows.source), rows.nbytes))
        source, target = rows.source.copy(), rows.target.copy()
        self.memory.to_addresses(source)
        self.target.to_addresses(target)
        pairs = zip(source.tolist(), target[:, 0].tolist(), strict=True)
        landing = Landing([(to, ctypes.string_at(at, n)) for (at, n), to in pairs])
        with self.to.changed:
            if self.to.closed:
                raise RuntimeError("disconnected")
            self.to.arriving.append(landing)
            self.to.changed.notify()
        FAULTS.taken.release()
        if FAULTS.fail_after is not None:
            FAULTS.fail_after -= 1
            if FAULTS.fail_after < 0:
                raise RuntimeError("the post failed")
        return landing

    def done(self, handle: Handle) -> bool:
        assert isinstance(handle, Landing)
        if FAULTS.says_failed and handle.landed:
            raise RuntimeError("the write failed")
        if handle.lost:
            raise RuntimeError("disconnected")
        return handle.landed

    def close(self) -> bool:
        return FAULTS.closing.wait(60) and not FAULTS.reads_on


class DoubleLibrary(Library):
    """See this module."""

    def load(self) -> None:
        if FAULTS.loading is not None:
            FAULTS.loading.wait(60)

    def greeting(self) -> bytes:
        return b"double"

    def receiving(self, peer: RankId, memory: Memory, greeting: bytes) -> ReceivingEnd:
        assert greeting == b"double"
        return DoubleReceivingEnd()

    def writing(self, peer: RankId, memory: Memory, target: Memory, blob: bytes) -> WritingEnd:
        return DoubleWritingEnd(memory, target, blob)


class DoubleTransport(LibraryTransport):
    """`LibraryTransport` over it."""

    name = NAME
    preference = 99
    memory_kinds = frozenset({MemoryKind.SHARED, MemoryKind.HOST})

    def __init__(self, on_event: EventSink, options: TransportOptions) -> None:
        super().__init__(on_event, options, DoubleLibrary())
