"""Production's `IoLoop` in virtual time: its thread and its epoll are the simulation's, the rest its own."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from typing import Protocol

from segue.kv.transport.net.ioloop import ALWAYS, IoLoop, Poller
from segue_lab.sim.world import Injected, Process, SkewedClock, Violation

#: Timers fire this much late, so that a clock of another rate has surely reached their time.
LATE_S = 1e-6
BATCH = 64


class Descriptor(Protocol):
    """An open file of a process."""

    def ready(self) -> int:
        """Its epoll events."""

    def vanish(self) -> None:
        """Its process has ended."""


class SimPoller(Poller):
    """The epoll of one loop, over the descriptors of one process."""

    def __init__(self, fds: dict[int, Descriptor], rng: random.Random) -> None:
        self.wake_fd = -1
        self.wanted: Callable[[], None] = lambda: None
        self._fds = fds
        self._rng = rng
        self._watched: dict[int, tuple[Descriptor, int]] = {}

    def register(self, fd: int, events: int) -> None:
        """As epoll: of a descriptor that is open, and once."""
        if fd in self._watched:
            raise FileExistsError(errno.EEXIST, "File exists")
        if fd not in self._fds:
            raise OSError(errno.EBADF, "Bad file descriptor")
        self._watched[fd] = (self._fds[fd], events)
        self.changed(fd)

    def modify(self, fd: int, events: int) -> None:
        """As epoll."""
        if fd not in self._watched:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")
        self._watched[fd] = (self._fds[fd], events)
        self.changed(fd)

    def unregister(self, fd: int) -> None:
        """As epoll."""
        if self._watched.pop(fd, None) is None:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    def closed(self, fd: int) -> None:
        """A descriptor was closed: the kernel forgets it."""
        self._watched.pop(fd, None)

    def changed(self, fd: int) -> None:
        """Something happened at `fd`."""
        if self._told(fd):
            self.wanted()

    def _told(self, fd: int) -> int:
        watched = self._watched.get(fd)
        return 0 if watched is None else watched[0].ready() & (watched[1] | ALWAYS)

    def ready(self) -> list[tuple[int, int]]:
        """The events that epoll would report now, in any order."""
        found = [(fd, told) for fd in self._watched if (told := self._told(fd))]
        if len(found) > 1:
            self._rng.shuffle(found)
        return found[:BATCH]

    def wake(self) -> None:
        """A call was posted."""
        self.wanted()

    def close(self) -> None:
        """The loop has ended."""
        self._watched.clear()


class SimIoLoop(IoLoop):
    """Turns of the loop's thread are events of its process, a little after what they are due to."""

    def __init__(
        self,
        name: str,
        on_crash: Callable[[BaseException], None],
        process: Process,
        clock: SkewedClock,
        hop_s: float,
        poller: SimPoller,
    ) -> None:
        super().__init__(name, on_crash, clock.now, poller)
        self._process = process
        self._skewed = clock
        self._hop_s = hop_s
        self._rng = process.world.rng(f"{name} {process.name}")
        self._epoll = poller
        self._due: float | None = None
        self._turning = self.over = False
        #: the thread ends by this at its next turn
        self.breaks: Injected | None = None
        poller.wanted = self._soon

    def start(self) -> None:
        """Its thread waits for something to do."""
        self._sleep()

    def inside(self) -> bool:
        return self._turning

    def _join(self, timeout_s: float) -> bool:
        """The stopping thread waits: the loop runs posted calls, and ends."""
        if not self.over:
            self._go()
        return True

    def end(self) -> None:
        """Its thread ends by an exception at its next turn."""
        self.breaks = Injected("injected into an I/O thread")
        self._soon()

    def _soon(self) -> None:
        if not self._turning and not self.over:
            self._at(self._process.world.now + self._hop_s * self._rng.random())

    def _at(self, time: float) -> None:
        if self._due is None or time < self._due:
            self._due = time
            self._process.world.at(time, self._process, self._woken, time)

    def _woken(self, time: float) -> None:
        if self._due == time and not self.over:
            self._due = None
            self._go()

    def _sleep(self) -> None:
        timeout_s = self._rest()
        if timeout_s == 0.0 or self._epoll.ready():
            self._soon()
        elif timeout_s > 0:
            self._at(self._process.world.now + timeout_s / self._skewed.rate + LATE_S)

    def _go(self) -> None:
        """One turn, and what `_run` makes of its end."""
        self._turning = True
        try:
            if self.breaks is not None:
                raise self.breaks
            self._turn(self._epoll.ready())
        except Exception as exc:
            self._crashed(exc)
        finally:
            self._turning = False
        if self._running:
            self._sleep()
        else:
            self._end()

    def _crashed(self, exc: Exception) -> None:
        world = self._process.world
        if not isinstance(exc, Injected):
            ended = Violation("14", f"an I/O thread of {self._process.name} ended: {exc!r}")
            world.fail(exc if isinstance(exc, Violation) else ended)
        self._running = False
        self._on_crash(exc)

    def _end(self) -> None:
        self.over = True
        self._forget()
