"""The writes to one peer: what waits for its turn, what is under way, and the fences that wait for that.

A path cuts each write into pieces of its own kind. Not safe for threads: its path's thread alone uses it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from segue.kv.errors import OutOfCapacity, SegueError, TransferFailed
from segue.kv.ids import RankId
from segue.kv.transport.base import Fenced, TransportEvent, WriteFailed, Written

PieceT = TypeVar("PieceT")


@dataclass(slots=True, eq=False)
class Write:
    """One call of `Transport.write`, complete when all `parts` that it was cut into have ended."""

    epoch: int
    tag: int
    nbytes: int
    posted: float
    parts: int = 0
    error: SegueError | None = None
    refused: bool = False

    def fail(self, error: SegueError | None, *, refused: bool = False) -> None:
        """It will end with `error`, if there is one and none was before."""
        if error is not None and self.error is None:
            self.error, self.refused = error, refused

    def end(self, peer: RankId, now: float) -> Written | WriteFailed:
        """The one event that tells how it has ended."""
        if self.error is not None:
            return WriteFailed(peer, self.epoch, self.tag, self.error, self.refused)
        return Written(peer, self.epoch, self.tag, self.nbytes, now - self.posted)


class WriteBook(Generic[PieceT]):
    """At most `max_waiting` pieces wait. `emit` is told the end of each write, once its last piece has ended,
    and the answer of each fence, once no piece of its epoch is under way."""

    def __init__(
        self,
        peer: RankId,
        emit: Callable[[TransportEvent], None],
        clock: Callable[[], float],
        max_waiting: int,
    ) -> None:
        self._peer = peer
        self._emit = emit
        self._clock = clock
        self._max_waiting = max_waiting
        self.waiting: deque[tuple[Write, PieceT]] = deque()
        #: Writes with pieces under way, and how many.
        self.under_way: Counter[Write] = Counter()
        #: Epochs with pieces whose end nobody knows: their fences are answered as not proven.
        self.unproven: set[int] = set()
        #: Epochs for which something may read our memory until the process ends: their fences have no answer.
        self.still_read: set[int] = set()
        self._fences: Counter[int] = Counter()

    def add(self, write: Write, pieces: Iterable[PieceT]) -> None:
        """Queue a write in its pieces; without any it has landed."""
        if len(self.waiting) >= self._max_waiting:
            self.fail(write, OutOfCapacity(f"too many writes to {self._peer} are waiting"))
            return
        queued = [(write, piece) for piece in pieces]
        write.parts = len(queued)
        self.waiting.extend(queued)
        self._ended(write)

    def fail(self, write: Write, error: SegueError, *, refused: bool = False) -> None:
        """End a write that was not queued."""
        write.fail(error, refused=refused)
        self._ended(write)

    def begin(self) -> tuple[Write, PieceT]:
        """The piece whose turn it is. It is under way until `over`."""
        write, piece = self.waiting.popleft()
        self.under_way[write] += 1
        return write, piece

    def over(self, write: Write, error: SegueError | None = None, *, refused: bool = False) -> None:
        """A piece of `write` is under way no more: it has landed, or `write` fails."""
        self.under_way[write] -= 1
        if not self.under_way[write]:
            del self.under_way[write]
        write.fail(error, refused=refused)
        write.parts -= 1
        self._ended(write)
        self.settle(write.epoch)

    def drop(self, error: SegueError, epoch: int | None = None, *, refused: bool = False) -> None:
        """Fail the writes (of `epoch`) with a piece that waits. Each ends after its pieces under way."""
        dropped: Counter[Write] = Counter()
        for write, _ in self.waiting:
            if epoch in (None, write.epoch):
                dropped[write] += 1
        if dropped:
            self.waiting = deque(item for item in self.waiting if item[0] not in dropped)
        for write, count in dropped.items():
            write.fail(error, refused=refused)
            write.parts -= count
            self._ended(write)

    def fence(self, epoch: int) -> None:
        """Fail what waits of an epoch, and answer once nothing of it is under way."""
        self.drop(fenced(epoch), epoch)
        self._fences[epoch] += 1
        self.settle(epoch)

    def busy(self, epoch: int) -> bool:
        """Whether a piece of the epoch is under way."""
        return any(write.epoch == epoch for write in self.under_way)

    def settle(self, epoch: int) -> None:
        """Answer the fences of an epoch if they need not wait."""
        if epoch in self._fences and epoch not in self.still_read and not self.busy(epoch):
            for _ in range(self._fences.pop(epoch)):
                self._emit(Fenced(self._peer, epoch, epoch not in self.unproven))

    def end(self, error: SegueError) -> None:
        """The path has ended: every write fails, also those under way, of which nobody knows an end."""
        writes = dict.fromkeys([*self.under_way, *(write for write, _ in self.waiting)])
        self.unproven.update(write.epoch for write in self.under_way)
        self.under_way.clear()
        self.waiting.clear()
        for write in writes:
            write.parts = 0
            self.fail(write, error)

    def settle_all(self) -> None:
        """Answer every fence that need not wait."""
        for epoch in list(self._fences):
            self.settle(epoch)

    def _ended(self, write: Write) -> None:
        if not write.parts:
            self._emit(write.end(self._peer, self._clock()))


def fenced(epoch: int) -> TransferFailed:
    """The error for writes of an epoch that this side has fenced."""
    return TransferFailed(f"epoch {epoch:x} was fenced", retryable=False)


def not_granted(peer: RankId, epoch: int) -> TransferFailed:
    """The error for writes of an epoch that the receiver does not grant (any more)."""
    return TransferFailed(f"epoch {epoch:x} is not granted by {peer}", retryable=False)
