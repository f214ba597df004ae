"""A loop whose time the test tells, with the timers that were asked of it."""

from __future__ import annotations

from collections.abc import Callable


class _Timer:
    def __init__(self, timers: list[_Timer], at: float, call: Callable[[], None]) -> None:
        self.at, self.call, self._timers = at, call, timers

    def cancel(self) -> None:
        if self in self._timers:
            self._timers.remove(self)


class HandLoop:
    """The part of asyncio's loop and of `IoLoop` that tells the time and keeps timers."""

    def __init__(self) -> None:
        self.now = 100.0
        self.timers: list[_Timer] = []

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, call: Callable[[], None]) -> _Timer:
        timer = _Timer(self.timers, self.now + delay, call)
        self.timers.append(timer)
        return timer

    later = call_later

    def call_at(self, when: float, call: Callable[..., None], *args: object) -> _Timer:
        return self.call_later(when - self.now, lambda: call(*args))

    def unwatch(self, fd: int) -> None: ...

    def advance(self, seconds: float) -> None:
        """Each timer fires at its time."""
        until = self.now + seconds
        while due := [timer for timer in self.timers if timer.at <= until]:
            timer = min(due, key=lambda each: each.at)
            self.timers.remove(timer)
            self.now = max(self.now, timer.at)
            timer.call()
        self.now = until

    def stand_still(self, seconds: float) -> None:
        """Advance the clock without running the loop: due calls run afterwards."""
        self.now += seconds
        for timer in [timer for timer in self.timers if timer.at <= self.now]:
            self.timers.remove(timer)
            timer.call()
