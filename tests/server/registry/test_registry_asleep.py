"""A registry that stood still (SIGSTOP, a starved host) gives nobody up for its own silence."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from registry_records import A, record

from segue.kv.clock import VirtualClock
from segue.kv.io import MonotonicClock
from segue.server.registry.registry_records import RoomRecord
from segue.server.registry.registry_store import RegistryStore
from segue.server.registry.waiting import ASLEEP_S, LOOK_S, AwakeClock, StoreBackend

TTL_S = 10.0


def test_time_passes_while_somebody_looks_and_not_while_nobody_does() -> None:
    machine = VirtualClock(100.0)
    clock = AwakeClock(machine)
    machine.advance(ASLEEP_S)
    assert clock.now() == 100.0 + ASLEEP_S
    machine.advance(3600.0)
    assert clock.now() == 100.0 + ASLEEP_S
    machine.advance(LOOK_S)
    assert clock.now() == 100.0 + ASLEEP_S + LOOK_S


def test_an_instance_outlives_the_registrys_sleep_but_not_its_own_silence() -> None:
    machine = VirtualClock()
    store = RegistryStore(AwakeClock(machine), ttl_s=TTL_S)
    store.register(record(), 0)
    machine.advance(10 * TTL_S)
    assert len(store.instances(None).instances) == 1, "given up for a sleep that was the registry's"
    for _ in range(int(TTL_S / LOOK_S)):
        machine.advance(LOOK_S)
        store.expire()
    assert store.instances(None).instances == []


@pytest.mark.slow
async def test_the_timer_looks_often_though_nothing_is_due() -> None:
    class Counting(MonotonicClock):
        looks = 0
        often = asyncio.Event()

        def now(self) -> float:
            self.looks += 1
            if self.looks > 12:  # more than registering and arming take
                self.often.set()
            return super().now()

    clock = Counting()
    store = RegistryStore(clock, ttl_s=3600.0)
    backend = StoreBackend(store, clock)
    store.register(record(), 0)
    try:
        assert not clock.often.is_set()
        async with asyncio.timeout(60):
            await clock.often.wait()
    finally:
        await backend.close()


async def test_one_timer_is_held_however_often_the_next_expiry_comes_nearer() -> None:
    loop, timers = asyncio.get_running_loop(), list[asyncio.TimerHandle]()
    normal = loop.call_later

    def noted(*args: Any) -> asyncio.TimerHandle:
        timers.append(normal(*args))
        return timers[-1]

    loop.call_later = noted  # type: ignore[method-assign, assignment]
    clock = VirtualClock()
    store = RegistryStore(clock, ttl_s=1000.0)
    backend = StoreBackend(store, clock)
    store.register(record(), 0)
    for room in range(1, 6):
        store.register_room(room, RoomRecord(incarnation=A, dp_rank=0, ttl_s=100.0 / room))
    assert len(timers) > 5
    assert sum(not timer.cancelled() for timer in timers) == 1
    await backend.close()
    assert all(timer.cancelled() for timer in timers)
