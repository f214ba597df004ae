"""A thread that blocks, in virtual time: it and the simulation take turns, so one of them runs at a time.

Production code that waits inside a call (a connect on a thread of the executor) runs in one unchanged.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import ClassVar

from segue.lab.sim.world import Process


class ProcessEnded(BaseException):
    """What a blocked call raises when its process is killed: nothing may catch it."""


class SimThread:
    """A thread of `process` that runs `call`, which must not raise."""

    #: the one that runs now; None in the simulation itself
    current: ClassVar[SimThread | None] = None

    def __init__(self, process: Process, call: Callable[[], None]) -> None:
        self._process = process
        self._call = call
        self._ours, self._theirs = threading.Lock(), threading.Lock()
        self._ours.acquire()
        self._theirs.acquire()
        self._waits = 0
        self._killed = False
        self.over = False
        threading.Thread(target=self._run, name=f"sim {process.name}", daemon=True).start()
        process.threads.append(self)
        process.world.threads.add(self)

    def run(self) -> None:
        """Go on until it waits or has ended."""
        if self.over:
            return
        before, SimThread.current = SimThread.current, self
        self._ours.release()
        self._theirs.acquire()
        SimThread.current = before
        if self in self._process.threads and not self._alive():
            self._process.threads.remove(self)

    def _alive(self) -> bool:
        return not self.over

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
        self._theirs.release()
        self._ours.acquire()
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
        self._ours.acquire()
        try:
            if not self._killed:
                self._call()
        except ProcessEnded:
            pass
        finally:
            self.over = True
            self._process.world.threads.discard(self)
            self._theirs.release()
