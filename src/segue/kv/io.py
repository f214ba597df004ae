"""The I/O thread of a process: one asyncio loop that owns sockets, timers and the protocol."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from segue.kv.errors import Internal, SegueError
from segue.kv.session.event_loop import EventLoop

T = TypeVar("T")

log = logging.getLogger("segue.kv")

#: See `LoopIo.wait`.
SLICE_S = 0.5


class MonotonicClock:
    """The host's monotonic clock (`time.monotonic`), the same one that asyncio uses."""

    def now(self) -> float:
        """Seconds; see `Clock.now`."""
        return time.monotonic()


class Io(Protocol):
    """The loop that runs sockets, timers and the protocol; `IoThread` in a process."""

    on_end: Callable[[SegueError], None]

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...
    @property
    def running(self) -> bool: ...
    def start(self) -> None: ...
    def post(self, function: Callable[..., object], *args: object) -> None: ...
    def yield_gil(self) -> None: ...
    def call(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T: ...
    def stop(self) -> None: ...


class LoopIo:
    """Operations on an event loop that any other thread may call. `on_end` is called once, on the loop's
    thread, when the loop has stopped, whatever stopped it; it is closed then."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.on_end: Callable[[SegueError], None] = lambda _: None

    def post(self, function: Callable[..., object], *args: object) -> None:
        """Run `function` on the loop soon; from any thread; ignored once the loop is closed."""
        try:
            self.loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            if not self.loop.is_closed():
                raise

    def call(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run `coroutine` on the loop and wait for its result, at most `timeout_s` seconds."""
        future: Future[T] = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return self.wait(future, timeout_s)
        except TimeoutError:
            future.cancel()
            raise

    def wait(self, future: Future[T], timeout_s: float) -> T:
        """The result of `future`. TimeoutError if it is not there in time.

        It is waited for in slices, of which each counts as what it should have taken: while this process
        stands still (stopped, or starved) the loop has no time either.
        """
        while True:
            slice_s = min(timeout_s, SLICE_S)
            try:
                return future.result(slice_s)
            except TimeoutError:
                if future.done():
                    return future.result(0)  # its own error, or the result of this very moment
                timeout_s -= slice_s
                if timeout_s <= 0:
                    raise

    def yield_gil(self) -> None:
        """Give the interpreter's lock once to a thread that waits for it. A thread that was just woken would
        otherwise get it only when the loop is idle."""
        time.sleep(0)


class IoThread(LoopIo):
    """An asyncio loop in a thread of its own.

    A handler that raises does not end the loop: asyncio reports it to `on_error`.
    """

    def __init__(self, on_error: Callable[[dict[str, Any]], None] | None = None) -> None:
        self._runner = asyncio.Runner(loop_factory=EventLoop)
        super().__init__(self._runner.get_loop())
        if on_error is not None:
            self.loop.set_exception_handler(lambda _loop, context: on_error(context))
        self._stopped = asyncio.Event()
        self._ended = False
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="segue-io", daemon=True)

    def start(self) -> None:
        """Start the thread; returns when the loop runs."""
        self._thread.start()
        self._started.wait(10)

    @property
    def running(self) -> bool:
        """The thread has been started and the loop not ended."""
        return self._thread.is_alive() and not self._ended

    def stop(self) -> None:
        """Cancel what still runs, end the loop and its thread. Idempotent."""
        if self._thread.is_alive():
            self.post(self._stopped.set)
            self._thread.join(10)
        else:
            self.loop.close()

    def _run(self) -> None:
        with self._runner:
            reason = "it was stopped"
            try:
                self._runner.run(self._until_stopped())
            except BaseException as error:  # a callback's exit, or a loop that broke
                log.critical("the I/O thread ends", exc_info=error)
                reason = repr(error)
            self._ended = True
            self.on_end(
                Internal(f"the thread of the KV hand-off has ended ({reason}); start this process again")
            )

    async def _until_stopped(self) -> None:
        self._started.set()
        await self._stopped.wait()
