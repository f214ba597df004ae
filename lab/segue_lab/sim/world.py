"""Virtual time: one heap of events, processes that can be paused or killed, and a record of what happened.

Everything that is random is drawn from generators that are seeded by name, so taking one request or
one fault out of a scenario changes as little of the rest as possible.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections.abc import Callable
from math import inf
from typing import Any

from segue.kv.ids import Incarnation, LeaderId


class Violation(AssertionError):
    """An invariant does not hold. `rule` is its number in `docs/protocol.md`, or a short name."""

    def __init__(self, rule: str, text: str, rooms: tuple[int, ...] = ()) -> None:
        super().__init__(f"[{rule}] {text}")
        self.rule = rule
        self.rooms = rooms


class Injected(Exception):
    """An exception that the simulator put into production's code."""


def new_leader(rng: random.Random) -> LeaderId:
    """A leader (or a frontend) in an incarnation of its own."""
    return LeaderId(Incarnation(f"{rng.getrandbits(128):032x}"))


class World:
    """The event heap. `now` is true time in seconds; nodes see it through their own clocks."""

    def __init__(self, seed: int, *, records: bool = True) -> None:
        self.seed = seed
        self.now = 0.0
        self.events = 0
        #: whether `trace` is kept: without it a run holds far fewer objects
        self.records = records
        #: (time, who, what): `what` is an event, effect or short text; rendered only when asked
        self.trace: list[tuple[float, str, Any]] = []
        #: calls that are due: (time, order, process, function, arguments)
        self.heap: list[tuple[float, int, Process | None, Callable[..., None], tuple[Any, ...]]] = []
        #: threads of all processes that have not ended: see `threads`
        self.threads: set[Any] = set()
        self._sequence = 0
        self._failure: Exception | None = None

    def rng(self, name: str) -> random.Random:
        """The generator of one thing, the same whatever else the scenario contains."""
        digest = hashlib.blake2b(f"{self.seed}/{name}".encode(), digest_size=8).digest()
        return random.Random(int.from_bytes(digest, "big"))

    def at(self, time: float, process: Process | None, call: Callable[..., None], *args: Any) -> None:
        """Run `call` at `time` in `process` (None: outside all of them)."""
        self._sequence += 1
        heapq.heappush(self.heap, (time, self._sequence, process, call, args))

    def after(self, delay: float, process: Process | None, call: Callable[..., None], *args: Any) -> None:
        """Run `call` after `delay` seconds."""
        self._sequence += 1
        heapq.heappush(self.heap, (self.now + delay, self._sequence, process, call, args))

    def note(self, who: str, what: Any) -> None:
        """Remember something for the timeline."""
        if self.records:
            self.trace.append((self.now, who, what))

    def fail(self, failure: Exception | str) -> None:
        """Something is wrong where an error boundary of production would hide it: end the run after
        this step. The first failure counts."""
        if self._failure is None:
            self._failure = failure if isinstance(failure, Exception) else Violation("14", failure)

    def step(self) -> bool:
        """Run the next event; False if there is none."""
        return self.run(inf, 1) > 0

    def run(self, end: float, most: int = 1 << 62) -> int:
        """Run what is due until `end`, at most so many events; how many those were."""
        heap, pop, count = self.heap, heapq.heappop, 0
        while count < most and heap and heap[0][0] <= end:
            time, _, process, call, args = pop(heap)
            if time > self.now:
                self.now = time
            count += 1
            self.events += 1
            if process is None:
                call(*args)
            elif process.alive:
                if process.paused:
                    process.frozen.append((call, args))
                else:
                    call(*args)
            if self._failure is not None:
                raise self._failure
        return count

    def hasten(self, process: Process, call: Callable[..., None], when: Callable[..., float | None]) -> None:
        """Run `call` in `process` when `when` of its arguments says, if that is earlier."""
        for place, (time, number, whose, what, args) in enumerate(self.heap):
            if whose is process and what == call and (due := when(*args)) is not None and due < time:
                self.heap[place] = (due, number, whose, what, args)
        heapq.heapify(self.heap)

    @property
    def next_at(self) -> float | None:
        """When the next event is due."""
        return self.heap[0][0] if self.heap else None

    def digest(self) -> str:
        """A hash over everything that happened, in order."""
        found = hashlib.blake2b(digest_size=16)
        for time, who, what in self.trace:
            found.update(f"{time:.9f} {who} {what!r}\n".encode())
        return found.hexdigest()


class Process:
    """One incarnation of a process. A dead one never runs again; a paused one later runs what it missed."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.alive = True
        #: and the kernel has cleaned up after it
        self.ended = False
        self.paused = self.was_paused = False
        self.began_at = world.now
        self.died_at = self.paused_at = 0.0
        self.resumed_at = -1.0
        #: when its clock last jumped
        self.jumped_at = -1.0
        #: when a fault last raised inside it
        self.failed_at = -1.0
        self.frozen: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        #: its threads that may be inside a call that waits: see `threads`
        self.threads: list[Any] = []

    def after(self, delay: float, call: Callable[..., None], *args: Any) -> None:
        """Run `call` in this process after `delay` seconds."""
        world = self.world
        world._sequence += 1
        heapq.heappush(world.heap, (world.now + delay, world._sequence, self, call, args))

    def pause(self) -> None:
        """SIGSTOP."""
        self.paused = self.was_paused = True
        self.paused_at = self.world.now

    def resume(self) -> None:
        """SIGCONT: what came meanwhile is handled now, in the order it came."""
        if not self.paused:
            return
        self.paused = False
        self.resumed_at = self.world.now
        missed, self.frozen = self.frozen, []
        for place, (call, args) in enumerate(missed):
            if self.paused or not self.alive:
                self.frozen = missed[place:] + self.frozen
                return
            call(*args)

    def kill(self) -> None:
        """SIGKILL: from here on nothing of it runs."""
        self.alive = False
        self.died_at = self.world.now
        self.frozen.clear()
        for thread in list(self.threads):
            thread.kill()


class SkewedClock:
    """A node's own monotonic clock: another origin and another rate than the world's."""

    def __init__(self, world: World, offset_s: float, rate: float) -> None:
        self._world = world
        self._offset_s = offset_s
        self.rate = rate

    def now(self) -> float:
        return self._offset_s + self._world.now * self.rate

    def jump(self, seconds: float) -> None:
        """The clock shows more from now on."""
        self._offset_s += seconds

    def delay_until(self, local: float) -> float:
        """World seconds from now until this clock shows `local`."""
        return max(0.0, (local - self.now()) / self.rate)
