"""The moment from which on the KV of a chunk is complete, named before it has come.

Pure: no lock and no thread. `then` and `over` may be called from different threads at once: each callback is
taken out of the queue by one of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from segue.kv.errors import SegueError, TransferFailed


class Waiter(Protocol):
    """Runs `wait`, which blocks, on a thread that may wait. Then it tells `ended`, which must not raise, what
    `wait` has raised, or why it was not called. Raises nothing."""

    def __call__(
        self, wait: Callable[[], object], ended: Callable[[BaseException | None], None], /
    ) -> None: ...


class ReadyEvent:
    """The moment at which the KV of one chunk is complete in the pools of this process's ranks;
    `KVManager.ready` makes one, and `KVSender.send` is given it before that moment has come.

    `number` tells it from the others of its leader: in the process of another rank `RankWorker.signal` is
    told the same number. `waiter` runs what `signal` is given to wait for.
    """

    __slots__ = ("__weakref__", "_ended", "_then", "_waiter", "error", "number", "signalled_at")

    def __init__(self, number: int, waiter: Waiter) -> None:
        self.number = number
        #: why the KV will never be complete
        self.error: SegueError | None = None
        #: ranks in other processes that have said so
        self.signalled_at: set[int] = set()
        self._waiter = waiter
        self._ended = False
        self._then: deque[Callable[[], object]] = deque()

    def __repr__(self) -> str:
        # Without an address: events are written into logs and into the simulator's digest of a run.
        return f"ReadyEvent({self.number})"

    def signal(self, wait: Callable[[], object] | None = None) -> None:
        """The KV is complete now; or, with `wait`, once that returns: it is called on another thread, and
        blocks until then (`torch.cuda.Event.synchronize`), after those that were given before. If it raises,
        or too many wait already (OUT_OF_CAPACITY), the chunk fails. From any thread; the first time counts.
        Raises nothing."""
        if wait is None:
            self.end(None)
        else:
            self._waiter(wait, self._waited)

    def _waited(self, error: BaseException | None) -> None:
        if error is not None and not isinstance(error, SegueError):
            error = TransferFailed(f"what a chunk was to wait for has failed: {error!r}")
        self.end(error)

    def end(self, error: SegueError | None) -> None:
        """The moment has come, or never will, because of `error`."""
        if self._ended:
            return
        self.error = error
        self._ended = True
        self._run()

    @property
    def over(self) -> bool:
        """Whether the event has occurred, or never will."""
        return self._ended

    def then(self, call: Callable[[], object]) -> None:
        """Have `call` called once it is over, on the thread that says so; at once if it is."""
        self._then.append(call)
        if self._ended:
            self._run()

    def _run(self) -> None:
        while self._then:
            try:
                call = self._then.popleft()
            except IndexError:  # the other thread has taken it
                return
            call()
