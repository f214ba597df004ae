"""A rank of this process, over transports that do as they are told: what it grants and ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from kv_sides import spec

from segue.kv.errors import OutOfCapacity, TransferFailed
from segue.kv.ids import LeaderId, RankId, TransferId, new_incarnation
from segue.kv.layout.content import Content, whole_pages
from segue.kv.layout.spec import PoolSpec
from segue.kv.protocol import events
from segue.kv.ranks import local_rank
from segue.kv.ranks.local_rank import LocalRank
from segue.kv.ready import ReadyEvent
from segue.kv.threads import ThreadPerCall, Waits
from segue.kv.transport.base import Endpoint, Fenced, WriteFailed
from segue.kv.transport.memory.pool_memory import allocate
from segue_lab.sim.sim_engine import lineage_spec

PEER = RankId(LeaderId(new_incarnation()), 1)


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
    def __init__(self, pool: PoolSpec, names: tuple[str, ...] = ("one", "two")) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.memory = allocate(pool.nbytes)
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
            {name: made(name) for name in names},
            digester,
            None,  # type: ignore[arg-type]
        )
        self.moved: list[Any] = []
        self.hashed: list[Any] = []

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        owner: Any = SimpleNamespace(moved=lambda *event: self.moved.append(event), hashed=self.hashed.append)
        await self.rank.start(owner, SimpleNamespace(post=loop.call_soon, loop=loop))  # type: ignore[arg-type]


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


@pytest.mark.parametrize(("names", "waited"), [(("one", "two"), ["one", "two"]), (("one",), [])])
def test_libraries_are_waited_for_only_where_another_transport_could_be_taken(
    names: tuple[str, ...], waited: list[str]
) -> None:
    async def test(rig: Rig) -> None:
        assert [asked[1] for asked in rig.asked if asked[0] == "loaded"] == waited

    run(test, names=names)


def test_what_may_be_written_are_the_pages_and_the_slot_of_the_state() -> None:
    pool = lineage_spec(8, 4, slots=3)

    async def test(rig: Rig) -> None:
        rig.asked.clear()
        assert rig.rank.grant("two", PEER, 7, (5, 2), 1)
        assert rig.asked == [("grant", "two", PEER, 7, whole_pages(pool, (5, 2), 1))]
        assert rig.asked[0][4].state is not None

    run(test, pool=pool)


def test_an_endpoint_that_cannot_be_read_is_a_typed_error() -> None:
    async def test(rig: Rig) -> None:
        with pytest.raises(TransferFailed, match="unreadable endpoint"):
            await rig.rank.connect("one", PEER, b"\xc1", 1.0)

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
