"""A rank of this process, over transports that do as they are told: what it grants, measures and ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from test_manager import spec

from segue.kv.errors import BootstrapTimeout, Internal, OutOfCapacity, TransferFailed
from segue.kv.ids import LeaderId, RankId, TransferId, new_incarnation
from segue.kv.layout.content import Content, whole_pages
from segue.kv.layout.spec import PoolSpec
from segue.kv.protocol import events
from segue.kv.ranks import local_rank
from segue.kv.ranks.local_rank import LocalRank
from segue.kv.ready import ReadyEvent
from segue.kv.threads import ThreadPerCall, Waits
from segue.kv.transport.base import Endpoint, Fenced, WriteFailed, Written
from segue.kv.transport.memory.pool_memory import allocate
from segue.kv.transport.probe import PageShape, Scratch
from segue.lab.sim.sim_engine import lineage_spec

PEER = RankId(LeaderId(new_incarnation()), 1)
SCRATCH = 4096
THEIRS, SHAPE = Scratch(0, 64), PageShape(1, 8)


class Noting:
    """A transport, or a digester, that notes what is asked of it."""

    def __init__(self, name: str, asked: list[tuple[Any, ...]], on_event: Any) -> None:
        self.name, self.asked, self.on_event = name, asked, on_event
        #: the tag of each write
        self.written: asyncio.Queue[int] = asyncio.Queue()

    def register(self, memory: Any) -> Endpoint:
        return Endpoint(self.name, memory.nbytes, b"")

    def loaded(self, timeout_s: float) -> None:
        self.asked.append(("loaded", self.name))

    def grant(self, peer: RankId, epoch: int, area: Any) -> None:
        self.asked.append(("grant", self.name, peer, epoch, area))

    def write(self, peer: RankId, epoch: int, tag: int, blocks: Any) -> None:
        self.written.put_nowait(tag)

    def fence(self, peer: RankId, epoch: int) -> None:
        self.on_event(Fenced(peer, epoch, True))

    def submit(self, effect: events.ComputeChecksum) -> None:
        self.asked.append(("hash", effect.tag))

    def start(self) -> None: ...

    def close(self) -> None:
        self.asked.append(("close", self.name))


class Rig:
    def __init__(self, pool: PoolSpec, scratch_bytes: int = SCRATCH) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.memory = allocate(pool.nbytes + scratch_bytes)
        self.transports: dict[str, Noting] = {}

        def made(name: str) -> Callable[[Any], Any]:
            def make(on_event: Any) -> Noting:
                self.transports[name] = Noting(name, self.asked, on_event)
                return self.transports[name]

            return make

        digester: Any = lambda memory, answer: Noting("digester", self.asked, answer)  # noqa: E731
        self.rank = LocalRank(
            0,
            pool,
            self.memory,
            {name: made(name) for name in ("one", "two")},
            digester,
            None,  # type: ignore[arg-type]
            scratch_bytes,
        )
        self.moved: list[Any] = []
        self.hashed: list[Any] = []

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        owner: Any = SimpleNamespace(moved=lambda *event: self.moved.append(event), hashed=self.hashed.append)
        await self.rank.start(owner, SimpleNamespace(post=loop.call_soon, loop=loop))  # type: ignore[arg-type]

    def measure(self, timeout_s: float = 60.0) -> asyncio.Task[Any]:
        return asyncio.ensure_future(self.rank.measure("one", PEER, 7, THEIRS, SHAPE, timeout_s))


def run(test: Callable[[Rig], Awaitable[None]], **options: Any) -> None:
    errors: list[Any] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        rig = Rig(options.pop("pool", spec()), **options)
        try:
            async with asyncio.timeout(60):
                await rig.start()
                await test(rig)
        finally:
            rig.memory.close()

    asyncio.run(main())
    assert errors == []


@pytest.mark.parametrize("scratch_bytes", [SCRATCH, 0])
def test_libraries_are_waited_for_only_where_paths_are_measured(scratch_bytes: int) -> None:
    async def test(rig: Rig) -> None:
        loaded = [asked[1] for asked in rig.asked if asked[0] == "loaded"]
        assert loaded == (["one", "two"] if scratch_bytes else [])

    run(test, scratch_bytes=scratch_bytes)


def test_a_peer_is_let_into_scratch_over_each_transport_and_nowhere_else() -> None:
    async def test(rig: Rig) -> None:
        rig.asked.clear()
        await rig.rank.admit(["one", "two"], PEER, 7)
        assert rig.rank.scratch is not None
        area = rig.rank.scratch.area
        assert rig.asked == [("grant", name, PEER, 7, area) for name in ("one", "two")]
        assert area.ranges().tolist() == [[rig.rank.spec.nbytes, rig.rank.spec.nbytes + SCRATCH]]

    run(test)


def test_a_rank_without_scratch_lets_nobody_in_and_measures_nothing() -> None:
    async def test(rig: Rig) -> None:
        rig.asked.clear()
        for refused in (
            rig.rank.admit(["one"], PEER, 7),
            rig.rank.measure("one", PEER, 7, THEIRS, SHAPE, 60),
        ):
            with pytest.raises(Internal, match="no scratch"):
                await refused
        assert rig.asked == []

    run(test, scratch_bytes=0)


def test_what_may_be_written_are_the_pages_and_the_slot_of_the_state() -> None:
    pool = lineage_spec(8, 4, slots=3)

    async def test(rig: Rig) -> None:
        rig.asked.clear()
        assert rig.rank.grant("two", PEER, 7, (5, 2), 1)
        assert rig.asked == [("grant", "two", PEER, 7, whole_pages(pool, (5, 2), 1))]
        assert rig.asked[0][4].state is not None

    run(test, pool=pool, scratch_bytes=0)


def test_a_write_of_an_earlier_measurement_answers_none_of_a_later_one() -> None:
    """It is still under way when its time is over: it says how slow the path was then."""

    async def test(rig: Rig) -> None:
        one = rig.transports["one"]
        with pytest.raises(BootstrapTimeout):
            await rig.measure(timeout_s=0.001)
        first = one.written.get_nowait()
        again = rig.measure()
        second = await one.written.get()
        assert second != first
        one.on_event(Written(PEER, 7, first, 8, 600.0))
        one.on_event(WriteFailed(PEER, 7, second, OutOfCapacity("the ring is full")))
        one.on_event(WriteFailed(PEER, 7, second, OutOfCapacity("said twice")))
        with pytest.raises(OutOfCapacity, match="the ring is full"):
            await again
        assert not rig.rank._measuring
        assert one.written.empty()
        assert [event[2].tag for event in rig.moved] == [first], "the owner knows no such write"

    run(test)


def test_a_measurement_ends_with_what_its_writes_took() -> None:
    async def test(rig: Rig) -> None:
        one, measured = rig.transports["one"], rig.measure()

        async def land() -> None:
            while True:
                one.on_event(Written(PEER, 7, await one.written.get(), 8, 0.25))

        landing = asyncio.ensure_future(land())
        await measured
        landing.cancel()
        figures = measured.result()
        assert figures.page_s > 0
        assert not rig.rank._measuring
        assert rig.moved == []

    run(test)


def test_nothing_is_hashed_any_more_when_the_first_transport_ends() -> None:
    async def test(rig: Rig) -> None:
        rig.asked.clear()
        rig.rank.close()
        assert rig.asked == [("close", "digester"), ("close", "one"), ("close", "two")]

    run(test)


def test_a_fence_answers_each_write_and_checksum_that_waits_and_leaves_those_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local_rank, "MAX_HELD", 4)
    other = RankId(PEER.leader, 2)
    transfer = TransferId(5, 0, PEER.leader, PEER.leader)

    async def test(rig: Rig) -> None:
        ready = ReadyEvent(1, Waits(ThreadPerCall("waits")))
        for peer, epoch, tag in ((PEER, 7, 1), (other, 7, 2), (PEER, 8, 3)):
            rig.rank.write("one", peer, epoch, tag, (), ready)
        for epoch, tag in ((7, 4), (8, 5)):
            rig.rank.checksum(
                events.ComputeChecksum(transfer, 0, tag, Content((), ()), epoch=epoch, ready=ready)
            )
        rig.rank.fence("one", PEER, 7)
        (_, _, failed), (_, _, fenced) = rig.moved
        assert isinstance(failed, WriteFailed)
        assert (failed.peer, failed.epoch, failed.tag, failed.refused) == (PEER, 7, 1, False)
        assert fenced == Fenced(PEER, 7, True), "after what it ends"
        assert [(answer.tag, answer.error is None) for answer in rig.hashed] == [(4, False)]
        rig.rank.fence("two", PEER, 8)
        assert len(rig.moved) == 3, "another transport's"
        for tag in (6, 7, 8):
            rig.rank.write("one", PEER, 9, tag, (), ready)
        rig.rank.write("one", PEER, 9, 9, (), ready)
        with pytest.raises(OutOfCapacity):
            rig.rank.write("one", PEER, 9, 10, (), ready)
        ready.signal()
        written = [await rig.transports["one"].written.get() for _ in range(6)]
        assert sorted(written) == [2, 3, 6, 7, 8, 9]
        await asyncio.sleep(0)
        assert ("hash", 5) not in rig.asked, "its checksum went with the fence of its epoch"

    run(test)


@pytest.mark.parametrize("asked_before", [True, False])
def test_kv_that_never_comes_answers_each_write_and_checksum_and_none_is_done(asked_before: bool) -> None:
    transfer = TransferId(5, 0, PEER.leader, PEER.leader)

    async def test(rig: Rig) -> None:
        ready = ReadyEvent(1, Waits(ThreadPerCall("waits")))
        never = TransferFailed("the forward has failed")
        if not asked_before:
            ready.end(never)
        rig.rank.write("one", PEER, 7, 1, (), ready)
        rig.rank.write("two", PEER, 7, 2, (), ready)
        rig.rank.checksum(events.ComputeChecksum(transfer, 0, 3, Content((), ()), epoch=7, ready=ready))
        if asked_before:
            assert (rig.moved, rig.hashed) == ([], [])
            ready.end(never)
        for _ in range(3):
            await asyncio.sleep(0)
        answers = [(name, event.tag, event.error) for _, name, event in rig.moved]
        assert answers == [("one", 1, never), ("two", 2, never)]
        assert [(answer.tag, answer.error) for answer in rig.hashed] == [(3, never.info)]
        assert not any(transport.written.qsize() for transport in rig.transports.values())
        assert ("hash", 3) not in rig.asked

    run(test)
