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
from dataclasses import dataclass

Ready = Callable[[int], None]
Call = Callable[[], None]
#: Events that epoll always reports.
ALWAYS = select.EPOLLERR | select.EPOLLHUP
_BATCH = 64
_MAX_WAIT_S = 3600.0  # epoll counts in milliseconds, in 32 bits: a longer timer would end the loop


@dataclass(slots=True)
class _Watch:
    """One registration of a descriptor. `turn` is the turn of the loop in which it was made."""

    ready: Ready
    events: int
    turn: int


class Timer:
    """A pending call of `IoLoop.later`."""

    __slots__ = ("call",)

    def __init__(self, call: Call) -> None:
        self.call: Call | None = call

    def cancel(self) -> None:
        """Never run it. A no-op when it has run."""
        self.call = None


class Poller:
    """The operating system calls of a loop: which descriptors are ready, and waking it."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._lock = threading.Lock()
        #: Becomes ready by `wake`; `woken` takes that back.
        self.wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self.wake_fd, select.EPOLLIN)

    def register(self, fd: int, events: int) -> None:
        """Tell of `fd` from now on. Raises OSError."""
        self._epoll.register(fd, events)

    def modify(self, fd: int, events: int) -> None:
        """Tell of other events of it."""
        self._epoll.modify(fd, events)

    def unregister(self, fd: int) -> None:
        """Tell of it no more."""
        self._epoll.unregister(fd)

    def poll(self, timeout_s: float) -> list[tuple[int, int]]:
        """Descriptors that are ready, and for what; waits for the first, -1: for ever."""
        return self._epoll.poll(timeout_s, _BATCH)

    def wake(self) -> None:
        """Let `poll` return; from any thread."""
        with self._lock:
            if self.wake_fd >= 0:
                os.eventfd_write(self.wake_fd, 1)

    def woken(self) -> None:
        """`poll` has told of `wake_fd`."""
        os.eventfd_read(self.wake_fd)

    def close(self) -> None:
        """A late `wake` must not write into a descriptor that is not ours."""
        with self._lock:
            self._epoll.close()
            os.close(self.wake_fd)
            self.wake_fd = -1


class IoLoop:
    """An epoll loop in a daemon thread. Only `post` and `stop` may be called from other threads.

    A batch of events was collected before the first callback of the turn ran. Callbacks close descriptors
    and open others that the kernel gives the same numbers, so an event is given to no registration that is
    younger than its batch, and only what is still asked for is told. Nothing is lost by that: readiness is
    level-triggered, and the next batch tells of what is true then.

    An exception in a callback is a bug: `on_crash` is told, so that everything that depends on
    the thread fails at once, and the exception goes on to `threading.excepthook`.
    """

    def __init__(
        self,
        name: str,
        on_crash: Callable[[BaseException], None],
        clock: Callable[[], float] = time.monotonic,
        poller: Poller | None = None,
    ) -> None:
        self._poller = poller or Poller()
        self._watches: dict[int, _Watch] = {}
        self._turns = 0
        self._calls: deque[Call] = deque()
        self._timers: list[tuple[float, int, Timer]] = []
        self._sequence = itertools.count()
        self._on_crash = on_crash
        self._clock = clock
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
            self._poller.wake()

    def watch(self, fd: int, events: int, ready: Ready) -> None:
        """Call `ready(events)` whenever `fd` is ready (level-triggered). Raises OSError when the kernel has
        no room for it (then it is not watched), FileExistsError when it is watched already."""
        self._poller.register(fd, events)
        self._watches[fd] = _Watch(ready, events, self._turns)

    def change(self, fd: int, events: int) -> None:
        """Wait for other `events` of a watched descriptor."""
        self._poller.modify(fd, events)
        self._watches[fd].events = events

    def unwatch(self, fd: int) -> None:
        """Forget `fd`; to be called before it is closed. Idempotent."""
        if self._watches.pop(fd, None) is not None:
            self._poller.unregister(fd)

    def later(self, delay_s: float, call: Call) -> Timer:
        """Run `call` on the thread after `delay_s`."""
        timer = Timer(call)
        heapq.heappush(self._timers, (self._clock() + delay_s, next(self._sequence), timer))
        return timer

    def time(self) -> float:
        """Seconds, monotonic: what `later` counts in."""
        return self._clock()

    def inside(self) -> bool:
        """True on the loop's own thread."""
        return threading.current_thread() is self._thread

    def stop(self, last: Call, timeout_s: float) -> bool:
        """Run `last` on the thread as its last call (here, if the thread has crashed) and end it. No
        callback, call or timer runs after it, also none of the same turn.

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
        self._poller.wake()
        if not self._join(timeout_s):
            return False
        if not ran:  # the thread had crashed before; nobody else uses its things now
            end()
        return True

    def _join(self, timeout_s: float) -> bool:
        """Wait for the thread's end. False when it did not end in time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while self._running:
                self._turn(self._poller.poll(self._rest()))
        except BaseException as exc:
            self._on_crash(exc)
            raise
        finally:
            self._forget()

    def _forget(self) -> None:
        """The thread has ended."""
        self._poller.close()
        self._calls.clear()
        self._watches.clear()
        self._timers.clear()

    def _rest(self) -> float:
        """The time that the loop may sleep; -1: no limit. A call that is posted afterwards wakes it."""
        self._asleep = True
        return 0.0 if self._calls else self._next_timeout_s()

    def _turn(self, events: list[tuple[int, int]]) -> None:
        """Run what is due: callbacks of `events`, the calls posted until now, timers."""
        self._asleep = False
        self._turns += 1  # descriptors watched from here on are younger than this batch
        for fd, mask in events:
            if fd == self._poller.wake_fd:
                self._poller.woken()
                continue
            watch = self._watches.get(fd)
            if watch is None or watch.turn == self._turns or not self._running:
                continue
            if told := mask & (watch.events | ALWAYS):
                watch.ready(told)
        for _ in range(len(self._calls)):
            if self._running:
                self._calls.popleft()()
        now = self._clock()
        while self._running and self._timers and self._timers[0][0] <= now:
            call = heapq.heappop(self._timers)[2].call
            if call is not None:
                call()

    def _next_timeout_s(self) -> float:
        """Until the nearest timer that was not cancelled; -1 without one."""
        while self._timers and self._timers[0][2].call is None:
            heapq.heappop(self._timers)
        if not self._timers:
            return -1.0
        return min(_MAX_WAIT_S, max(0.0, self._timers[0][0] - self._clock()))
