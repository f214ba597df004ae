"""One thread that waits for descriptors, timers and calls: what `shm` and `tcp` run on."""

from __future__ import annotations

import heapq
import itertools
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable

Ready = Callable[[int], None]
Call = Callable[[], None]


class Timer:
    """A pending call of `IoLoop.later`."""

    __slots__ = ("call",)

    def __init__(self, call: Call) -> None:
        self.call: Call | None = call

    def cancel(self) -> None:
        """Never run it. A no-op when it has run."""
        self.call = None


class IoLoop:
    """An epoll loop in a daemon thread. Only `post` and `stop` may be called from other threads.

    An exception in a callback is a bug: `on_crash` is told, so that everything that depends on
    the thread fails at once, and the exception goes on to `threading.excepthook`.
    """

    def __init__(self, name: str, on_crash: Callable[[BaseException], None]) -> None:
        self._epoll = select.epoll()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self._wake_lock = threading.Lock()
        self._ready: dict[int, Ready] = {}
        self._calls: deque[Call] = deque()
        self._timers: list[tuple[float, int, Timer]] = []
        self._sequence = itertools.count()
        self._on_crash = on_crash
        self._running = True
        self._asleep = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def post(self, call: Call) -> None:
        """Run `call` on the thread, soon and in order. After the loop's end it is dropped."""
        self._calls.append(call)
        if self._asleep:
            self._asleep = False
            self._wake()

    def _wake(self) -> None:
        with self._wake_lock:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def watch(self, fd: int, events: int, ready: Ready) -> None:
        """Call `ready(events)` whenever `fd` is ready (level-triggered)."""
        self._ready[fd] = ready
        self._epoll.register(fd, events)

    def change(self, fd: int, events: int) -> None:
        """Wait for other `events` of a watched descriptor."""
        self._epoll.modify(fd, events)

    def unwatch(self, fd: int) -> None:
        """Forget `fd`; to be called before it is closed. Idempotent."""
        if self._ready.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def later(self, delay_s: float, call: Call) -> Timer:
        """Run `call` on the thread after `delay_s`."""
        timer = Timer(call)
        heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._sequence), timer))
        return timer

    def inside(self) -> bool:
        """True on the loop's own thread."""
        return threading.current_thread() is self._thread

    def stop(self, last: Call, timeout_s: float) -> bool:
        """Run `last` on the thread as its last call (here, if the thread has crashed) and end it.

        False when the thread did not end within `timeout_s` (it then still owns them). On the
        loop's own thread it runs `last` now and the loop ends when the callback returns.
        """

        ran = False

        def end() -> None:
            nonlocal ran
            self._running, ran = False, True
            last()

        if self.inside():
            end()
            return True
        self.post(end)
        self._wake()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        if not ran:  # the thread had crashed before; nobody else uses its things now
            end()
        return True

    def _run(self) -> None:
        try:
            while self._running:
                self._turn()
        except BaseException as exc:
            self._on_crash(exc)
            raise
        finally:
            with self._wake_lock:  # a late `post` must not write into a descriptor that is not ours
                self._epoll.close()
                os.close(self._wake_fd)
                self._wake_fd = -1
            self._calls.clear()
            self._ready.clear()

    def _turn(self) -> None:
        self._asleep = True
        timeout_s = 0.0 if self._calls else self._next_timeout_s()
        events = self._epoll.poll(timeout_s, 64)
        self._asleep = False
        for fd, mask in events:
            if fd == self._wake_fd:
                os.eventfd_read(fd)
            elif (ready := self._ready.get(fd)) is not None:  # an earlier callback may have closed it
                ready(mask)
        for _ in range(len(self._calls)):
            self._calls.popleft()()
        now = time.monotonic()
        while self._timers and (self._timers[0][0] <= now or self._timers[0][2].call is None):
            call = heapq.heappop(self._timers)[2].call
            if call is not None:
                call()

    def _next_timeout_s(self) -> float:
        if not self._timers:
            return -1.0
        return max(0.0, self._timers[0][0] - time.monotonic())
