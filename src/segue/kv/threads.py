"""The threads of a leader beside its I/O loop. Nothing is decided here; a simulator has its own."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from typing import ParamSpec, Protocol, TypeVar

from segue.kv.errors import ConfigError, OutOfCapacity

P = ParamSpec("P")
T = TypeVar("T")


@contextmanager
def threads_on(cpus: Iterable[int]) -> Iterator[None]:
    """Threads and processes that the calling thread starts within it run on these `cpus`, and so does what
    they start: make and start a manager, a rank, a link or an agent in it, and all their threads do. An
    engine binds its threads to cores that its forward needs; a thread inherits that otherwise. The calling
    thread itself runs there meanwhile.

    Raises ConfigError if this process may use none of these CPUs; those that it may not use are left out."""
    own, wanted = os.sched_getaffinity(0), set(cpus)
    try:
        os.sched_setaffinity(0, wanted)
    except (OSError, ValueError, OverflowError, TypeError) as error:
        raise ConfigError(f"cpus: {sorted(wanted)} cannot be used here: {error}") from error
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)


class Wakeable(Protocol):
    """Somebody who does the same piece of work as often as it is woken; a `WorkerThread` in a process."""

    def start(self) -> None: ...
    def wake(self) -> None: ...
    def end(self) -> None: ...


class WorkerThread:
    """A thread that does `work`, which must not raise, once for each `wake`, until its `end`."""

    def __init__(self, work: Callable[[], object], name: str) -> None:
        self._work = work
        self._turns = threading.Semaphore(0)
        self._ended = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Do it once more."""
        self._turns.release()

    def end(self) -> None:
        """End the thread after the work that it is at, and wait for that. Idempotent."""
        self._ended = True
        self._turns.release()
        if self._thread.is_alive():
            self._thread.join(10)

    def _run(self) -> None:
        while self._turns.acquire() and not self._ended:
            self._work()


def start_thread(name: str, run: Callable[[], None]) -> None:
    """Run `run` on a thread of its own. Raises RuntimeError when no thread can be started."""
    threading.Thread(target=run, name=name, daemon=True).start()


class ThreadPerCall(Executor):
    """Runs each call on a thread of its own: a call that hangs delays no other call, nor the end of the
    process. The caller bounds their number."""

    def __init__(self, name: str, spawn: Callable[[str, Callable[[], None]], None] = start_thread) -> None:
        self._name = name
        self._spawn = spawn

    def submit(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """See `Executor.submit`. Raises what `start_thread` does."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = call(*args, **kwargs)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self._spawn(self._name, run)
        return future


#: Calls of one leader, or of one rank's process, that wait for their turn.
MAX_WAITS = 16_384

Ended = Callable[[BaseException | None], None]


class Waits:
    """Runs calls that block until something has happened, in their order on one thread of `threads`, which
    ends when none is left. Equal calls in a row, such as those that wait for a whole device, are one. At most
    `MAX_WAITS` wait for their turn."""

    def __init__(self, threads: Executor) -> None:
        self._threads = threads
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Callable[[], object], Ended]] = deque()
        self._runs = False

    def __call__(self, wait: Callable[[], object], ended: Ended, /) -> None:
        """See `ready.Waiter`."""
        with self._lock:
            full = len(self._waiting) >= MAX_WAITS
            if not full:
                self._waiting.append((wait, ended))
            begins, self._runs = not self._runs, True
        if full:
            ended(OutOfCapacity(f"{MAX_WAITS} chunks wait for their KV already"))
        if begins:
            try:
                self._threads.submit(self._run)
            except BaseException as error:
                while waiting := self._next():
                    _end(waiting[1], error)

    def _run(self) -> None:
        while waiting := self._next():
            wait, told = waiting
            failure: BaseException | None = None
            try:
                wait()
            except BaseException as error:
                failure = error
            _end(told, failure)

    def _next(self) -> tuple[Callable[[], object], list[Ended]] | None:
        """The call whose turn it is, and who is told of its end; None: nobody waits."""
        with self._lock:
            if not self._waiting:
                self._runs = False
                return None
            wait, told = self._waiting[0][0], []
            while self._waiting and self._waiting[0][0] == wait:
                told.append(self._waiting.popleft()[1])
            return wait, told


def _end(told: list[Ended], error: BaseException | None) -> None:
    for ended in told:
        ended(error)
