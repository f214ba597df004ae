"""The registry in this process: its store on an event loop, without polling, with one timer and a bounded
number of waiting queries."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from segue.kv import Clock, Draining, Incarnation, LeaderId, MonotonicClock, OutOfCapacity, Role
from segue.server.registry.backends import RegistryBackend
from segue.server.registry.registry_records import (
    DrainFlag,
    InstanceList,
    InstanceRecord,
    Registered,
    RoomRecord,
)
from segue.server.registry.registry_store import TIMERS, TOPOLOGY, RegistryStore

T = TypeVar("T")


#: A registry that holds anything looks at its clock this often, in seconds, …
LOOK_S = 0.5
#: … and one that has not for so long was stopped or starved.
ASLEEP_S = 2.0


class AwakeClock:
    """A monotonic clock without the time in which this process stood still.

    Messages of the instances wait in the sockets meanwhile: no instance may be given up for a silence that
    was ours. Its owner calls it every `LOOK_S`; `clock` is the time that it corrects.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or MonotonicClock()
        self._looked_at = self._clock.now()
        self._asleep_s = 0.0

    def now(self) -> float:
        now = self._clock.now()
        gap_s = now - self._looked_at
        if gap_s > ASLEEP_S:
            self._asleep_s += gap_s
        self._looked_at = now
        return now - self._asleep_s


class StoreBackend(RegistryBackend):
    """A store in this process; queries wait for its changes, and one timer of the running loop keeps its
    time. `clock` is the store's."""

    def __init__(self, store: RegistryStore, clock: Clock | None = None, *, max_waiters: int = 4096) -> None:
        self.store = store
        self._clock = clock or MonotonicClock()
        self._max_waiters = max_waiters
        self._waiters: dict[asyncio.Event, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._unsubscribe = store.subscribe(TIMERS, self._arm)
        self._closed = False

    async def put_rank(self, record: InstanceRecord) -> Registered:
        return self.store.register(record, record.replicas[0].dp_rank)

    async def put_draining(self, incarnation: Incarnation, flag: DrainFlag) -> None:
        self.store.set_draining(incarnation, flag.draining, flag.dp_rank)

    async def delete(self, leader: LeaderId) -> None:
        self.store.leave(leader)

    async def put_room(self, room: int, record: RoomRecord) -> None:
        self.store.register_room(room, record)

    async def instances(self, role: Role | None, version: int | None, wait_s: float) -> InstanceList:
        """The topology as soon as its version is not `version`, at the latest after `wait_s`."""

        def look() -> InstanceList | None:
            found = self.store.instances(role)
            return found if version is None or found.version != version else None

        return await self._wait(TOPOLOGY, look, wait_s) or self.store.instances(role)

    async def room(self, room: int, wait_s: float) -> LeaderId | None:
        """The owner of `room`, as soon as it is registered; None after `wait_s`."""
        return await self._wait(room, lambda: self.store.room(room), wait_s)

    async def close(self) -> None:
        """Release everybody who waits (with Draining) and stop the timer. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._unsubscribe()
        if self._timer is not None:
            self._timer.cancel()
        for event in self._waiters:
            event.set()

    async def _wait(self, topic: int, look: Callable[[], T | None], wait_s: float) -> T | None:
        self._arm()
        found = look()
        if found is not None or wait_s <= 0:
            return found
        if self._closed:
            raise Draining("the registry is stopping")
        if len(self._waiters) >= self._max_waiters:
            raise OutOfCapacity(f"{self._max_waiters} queries already wait at the registry")
        event = asyncio.Event()
        unsubscribe = self.store.subscribe(topic, event.set)
        self._waiters[event] = None
        try:
            async with asyncio.timeout(wait_s):
                while found is None:
                    await event.wait()
                    event.clear()
                    if self._closed:
                        raise Draining("the registry is stopping")
                    found = look()
        except TimeoutError:
            return None
        finally:
            unsubscribe()
            del self._waiters[event]
        return found

    def _arm(self) -> None:
        """Hold a timer for the store's next expiry; without a running loop, the next wait does."""
        due = self.store.next_expiry()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if due is None or self._closed:
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return
        # Not later than `LOOK_S`, for an `AwakeClock`: only by looking does it know that it was awake.
        self._timer = loop.call_later(min(max(0.0, due - self._clock.now()), LOOK_S), self._expire)

    def _expire(self) -> None:
        self._timer = None
        self.store.expire()
        self._arm()
