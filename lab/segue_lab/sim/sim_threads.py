"""A thread that blocks, in virtual time: it and the simulation take turns, so one of them runs at a time.

Production code that waits inside a call (a connect on a thread of the executor) runs in one unchanged.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import ClassVar

from segue_lab.sim.world import Process


class ProcessEnded(BaseException):
    """Raised in a blocked call when its process is killed: nothing may catch it."""


class _CarrierThread:
    """A thread of this machine that carries one `SimThread` after another: to start one costs more."""

    #: idle carriers; as many as `SimThread`s ever lived at a time
    idle: ClassVar[list[_CarrierThread]] = []

    def __init__(self) -> None:
        self.ours, self.theirs = threading.Lock(), threading.Lock()
        self.ours.acquire()
        self.theirs.acquire()
        self._work: Callable[[], None] | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @classmethod
    def take(cls, name: str, work: Callable[[], None]) -> _CarrierThread:
        """A carrier that runs `work` once `ours` is released, and releases `theirs` when it has ended."""
        found = cls.idle.pop() if cls.idle else cls()
        found._work, found._thread.name = work, name
        return found

    def _run(self) -> None:
        while True:
            self.ours.acquire()
            assert self._work is not None
            try:
                self._work()
            except BaseException:  # a bug of the simulator: this thread ends by it
                self.theirs.release()
                raise
            self._work, self._thread.name = None, "idle"
            self.idle.append(self)
            self.theirs.release()


class SimThread:
    """A thread of `process` that runs `call`, which must not raise."""

    #: the one that runs now; None in the simulation itself
    current: ClassVar[SimThread | None] = None

    def __init__(self, process: Process, call: Callable[[], None]) -> None:
        self._process = process
        self._call = call
        self._waits = 0
        self._killed = False
        self.over = False
        self._carrier: _CarrierThread | None = None
        process.threads.append(self)
        process.world.threads.add(self)

    def run(self) -> None:
        """Go on until it waits or has ended."""
        if self.over:
            return
        if self._carrier is None:
            self._carrier = _CarrierThread.take(f"sim {self._process.name}", self._run)
        carrier = self._carrier
        before, SimThread.current = SimThread.current, self
        carrier.ours.release()
        carrier.theirs.acquire()
        SimThread.current = before
        if self._ended() and self in self._process.threads:
            self._process.threads.remove(self)

    def _ended(self) -> bool:
        return self.over

    def kill(self) -> None:
        """Its process is gone: what it waits for raises."""
        self._killed = True
        if SimThread.current is not self:
            self.run()

    def sleep(self, seconds: float | None) -> None:
        """Inside it: let virtual time go on, for `seconds` (None: for ever) or until `woken`."""
        if self._killed:  # it tidies up
            raise ProcessEnded
        self._waits += 1
        if seconds is not None:
            self._process.after(seconds, self._due, self._waits)
        assert self._carrier is not None
        self._carrier.theirs.release()
        self._carrier.ours.acquire()
        if self._killed:
            raise ProcessEnded

    def woken(self, delay_s: float = 0.0) -> None:
        """End its sleep soon."""
        self._process.after(delay_s, self._due, self._waits)

    def _due(self, wait: int) -> None:
        if wait == self._waits and not self.over:
            self._waits += 1
            self.run()

    def _run(self) -> None:
        try:
            if not self._killed:
                self._call()
        except ProcessEnded:
            pass
        finally:
            self.over = True
            self._process.world.threads.discard(self)
