"""The I/O thread of a process: one asyncio loop that owns sockets, timers and the protocol."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

import uvloop

T = TypeVar("T")


class MonotonicClock:
    """The host's monotonic clock (`time.monotonic`), the same one that asyncio uses."""

    def now(self) -> float:
        return time.monotonic()


class Io(Protocol):
    """Where sockets, timers and the protocol run; `IoThread` in a process."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...
    @property
    def running(self) -> bool: ...
    def start(self) -> None: ...
    def post(self, function: Callable[..., object], *args: object) -> None: ...
    def let_others_run(self) -> None: ...
    def call(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T: ...
    def stop(self) -> None: ...


class IoThread:
    """An asyncio loop in a thread of its own.

    A handler that raises does not end the loop: asyncio reports it to `on_error`.
    """

    def __init__(self, on_error: Callable[[dict[str, Any]], None] | None = None) -> None:
        self.loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        if on_error is not None:
            self.loop.set_exception_handler(lambda _loop, context: on_error(context))
        self._thread = threading.Thread(target=self._run, name="segue-io", daemon=True)
        self._started = threading.Event()

    def start(self) -> None:
        """Start the thread; returns when the loop runs."""
        self._thread.start()
        self._started.wait(10)

    @property
    def running(self) -> bool:
        """The thread has been started and the loop not ended."""
        return self._thread.is_alive()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.call_soon(self._started.set)
        self.loop.run_forever()

    def post(self, function: Callable[..., object], *args: object) -> None:
        """Run `function` on the loop soon; from any thread; ignored once the loop is closed."""
        try:
            self.loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            if not self.loop.is_closed():
                raise

    def let_others_run(self) -> None:
        """Give the interpreter's lock once to a thread that waits for it. One that was just woken would
        else get it only when the loop has nothing left to do."""
        time.sleep(0)

    def call(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run `coroutine` on the loop and wait for its result, at most `timeout_s` seconds."""
        future: Future[T] = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            future.cancel()
            raise

    def stop(self) -> None:
        """Cancel what still runs, end the loop and its thread. Idempotent."""
        if self.loop.is_closed():
            return
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(_cancel_all(), self.loop).result(10)
            asyncio.run_coroutine_threadsafe(self.loop.shutdown_default_executor(), self.loop).result(10)
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(10)
        self.loop.close()


async def _cancel_all() -> None:
    tasks = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
