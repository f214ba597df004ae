"""Instances of which not every rank has registered: nothing is placed there until the last one has."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest
from fleet_rig import DEADLINE_S, LIMITS, Leader, Rig

from segue.kv.errors import DeadlineExceeded, PeerLost, Starting
from segue.kv.ids import LeaderId, Role, new_incarnation
from segue.kv.io import MonotonicClock
from segue.server.registry.client import BackendRegistry
from segue.server.registry.registry_records import InstanceRecord
from segue.server.registry.registry_store import RegistryStore
from segue.server.registry.waiting import StoreBackend


class Halves:
    """A decode instance of two ranks, of which the registry hears one by one."""

    def __init__(self, leaders: list[Leader], records: list[InstanceRecord]) -> None:
        self.leaders = leaders
        self.records = records

    @property
    def asked(self) -> list[int]:
        """The requests that each rank was asked for."""
        return [len(leader.submits) for leader in self.leaders]


async def two_ranks() -> Halves:
    incarnation = new_incarnation()
    leaders = [Leader(Role.DECODE, me=LeaderId(incarnation, rank), dp_size=2) for rank in (0, 1)]
    return Halves(leaders, [await leader.start() for leader in leaders])


class Unfiltered:
    """A registry that lists what it has, ready or not: the frontend must look for itself."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig

    async def register(self, record: InstanceRecord) -> None:
        known = self._rig.registry.records.get(record.incarnation)
        replicas = [*(known.replicas if known is not None else []), *record.replicas]
        self._rig.registry.put(msgspec.structs.replace(record, replicas=replicas))


@asynccontextmanager
async def a_fleet(real: bool, **settings: float) -> AsyncIterator[tuple[Rig, BackendRegistry | Unfiltered]]:
    """A fleet and where its instances register: the registry's own client and store, or `Unfiltered`."""
    rig = Rig(**settings)
    registry: BackendRegistry | Unfiltered = Unfiltered(rig)
    if real:
        registry = BackendRegistry(StoreBackend(RegistryStore(MonotonicClock(), ttl_s=600.0)), LIMITS, None)
        rig.fleet.membership._registry = registry
    rig.fleet.start()
    try:
        async with asyncio.timeout(3 * DEADLINE_S):
            yield rig, registry
        assert rig.at_rest()
    finally:
        await rig.fleet.close()
        if isinstance(registry, BackendRegistry):
            await registry.aclose()
        for leader in rig.leaders:
            await leader.node.close()


Test = Callable[[Rig, "BackendRegistry | Unfiltered", Halves], Awaitable[None]]


def run(test: Test, real: bool, **settings: float) -> None:
    async def main() -> None:
        async with a_fleet(real, **settings) as (rig, registry):
            prefill, halves = Leader(Role.PREFILL), await two_ranks()
            rig.leaders += [prefill, *halves.leaders]
            await registry.register(halves.records[0])
            # Registered after it: once this one is usable, the frontend has seen the other too.
            await registry.register(await prefill.start())
            await rig.until(lambda: bool(rig.fleet.router.usable(Role.PREFILL)))
            await test(rig, registry, halves)

    asyncio.run(main())


real_or_not = pytest.mark.parametrize("real", [True, False], ids=["registry", "unfiltered"])


@real_or_not
def test_nothing_is_placed_on_half_an_instance_and_the_request_is_refused_typed(real: bool) -> None:
    async def test(rig: Rig, registry: BackendRegistry | Unfiltered, halves: Halves) -> None:
        assert not rig.fleet.can_serve
        with pytest.raises(Starting, match="1 prefill, 0 decode"):
            await rig.run()
        assert halves.leaders[0].session is None, "nobody even connected"
        assert LeaderId(halves.records[0].incarnation) not in {
            r.leader for r in rig.fleet.membership.replicas.values()
        }
        await registry.register(halves.records[1])
        await rig.until(lambda: rig.fleet.can_serve)
        assert await rig.run() == [5, 6, 7]
        assert sum(halves.asked) == 1

    run(test, real)


@real_or_not
def test_each_of_two_leaders_of_one_incarnation_gets_a_session_and_requests_of_its_own(real: bool) -> None:
    async def test(rig: Rig, registry: BackendRegistry | Unfiltered, halves: Halves) -> None:
        await registry.register(halves.records[1])
        await rig.until(lambda: len(rig.fleet.router.usable(Role.DECODE)) == 2)
        for _ in range(6):
            assert await rig.run() == [5, 6, 7]
        assert halves.asked == [3, 3]
        for leader in halves.leaders:
            assert {submit.ticket.decode for submit in leader.submits} == {leader.node.me}

    run(test, real)


@real_or_not
@pytest.mark.parametrize("dies", [0, 1])
def test_one_of_two_leaders_dies_and_only_its_own_requests_are_placed_anew(real: bool, dies: int) -> None:
    async def test(rig: Rig, registry: BackendRegistry | Unfiltered, halves: Halves) -> None:
        await registry.register(halves.records[1])
        await rig.until(lambda: len(rig.fleet.router.usable(Role.DECODE)) == 2)
        for leader in halves.leaders:
            leader.behave = "silent"
        running = [asyncio.create_task(rig.run()) for _ in range(2)]
        for leader in halves.leaders:
            await leader.until(lambda of=leader: len(of.submits) == 1)  # type: ignore[misc]
        dying, other = halves.leaders[dies], halves.leaders[1 - dies]
        other.behave = "serve"
        await dying.node.close(PeerLost("it was killed"))
        await other.until(lambda: len(other.submits) == 2)
        assert not other.cancels
        other.answer(other.session, other.submits[0])
        assert await asyncio.gather(*running) == [[5, 6, 7]] * 2
        assert [r.leader for r in rig.fleet.router.usable(Role.DECODE)] == [other.node.me]

    run(test, real)


@real_or_not
def test_a_request_that_waits_is_placed_as_soon_as_the_second_rank_registers(real: bool) -> None:
    async def test(rig: Rig, registry: BackendRegistry | Unfiltered, halves: Halves) -> None:
        waiting = asyncio.create_task(rig.run())
        await asyncio.sleep(0)
        assert rig.fleet.in_flight == 1
        assert halves.asked == [0, 0]
        await registry.register(halves.records[1])
        assert await waiting == [5, 6, 7]
        assert sum(halves.asked) == 1

    run(test, real, no_replica_wait_s=DEADLINE_S)


@real_or_not
def test_a_request_that_waits_for_half_an_instance_ends_by_its_own_deadline(real: bool) -> None:
    async def test(rig: Rig, registry: BackendRegistry | Unfiltered, halves: Halves) -> None:
        with pytest.raises((Starting, DeadlineExceeded)):
            await rig.run(budget_s=0.1)
        assert halves.asked == [0, 0]

    run(test, real, no_replica_wait_s=DEADLINE_S)
