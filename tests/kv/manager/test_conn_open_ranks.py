"""The DP rank of prefill comes from the first source that knows it, and is never guessed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from segue.kv.clock import Clock
from segue.kv.config import KVConfig
from segue.kv.errors import BootstrapTimeout, ErrorCode, TransferFailed, Unauthorized
from segue.kv.handles import Change
from segue.kv.ids import OPEN_RANK, Incarnation, KVPoll, LeaderId, Role, TransferId
from segue.kv.layout.spec import PoolSpec
from segue.kv.limits import Limits
from segue.kv.open_ranks import OpenRanks, PrefillInstance
from segue.kv.protocol import events
from segue.kv.protocol.room_ranks import FOLLOW_BOOTSTRAP_ROOM, DpRanks

P, D = Incarnation("a" * 32), LeaderId(Incarnation("d" * 32))
ROOM = 4 * 25 + 1
#: A second attempt: prefill has it under this number, and no other.
ATTEMPT = 1
OPEN = TransferId(ROOM, ATTEMPT, LeaderId(P, OPEN_RANK), D)
PLAIN = DpRanks(size=4)
FOLLOWS = DpRanks(size=4, load_balance=FOLLOW_BOOTSTRAP_ROOM)


def on(rank: int, room: int = ROOM) -> TransferId:
    return TransferId(room, ATTEMPT, LeaderId(P, rank), D)


def instance(dp: DpRanks, *ranks: int) -> dict[Incarnation, PrefillInstance]:
    return {P: PrefillInstance(dp, frozenset(ranks or range(dp.size)))}


class FakeRooms:
    """Answers when the test says so."""

    def __init__(self) -> None:
        self.asked: dict[int, asyncio.Future[LeaderId]] = {}
        self.told: list[tuple[int, LeaderId, float]] = []
        self.waits_s: list[float] = []
        self.refuses: Exception | None = None

    async def register_room(self, room: int, leader: LeaderId, ttl_s: float) -> None:
        if self.refuses is not None:
            raise self.refuses
        self.told.append((room, leader, ttl_s))

    async def resolve_room(self, room: int, timeout_s: float) -> LeaderId:
        assert room not in self.asked, "one request, no polling"
        self.waits_s.append(timeout_s)
        self.asked[room] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                return await self.asked[room]
        except TimeoutError:
            raise BootstrapTimeout(f"nobody registered room {room}") from None
        finally:
            del self.asked[room]


class Rig:
    def __init__(self, spec: PoolSpec | None = None, **options: Any) -> None:
        loop = asyncio.get_running_loop()
        self.rooms = FakeRooms()
        self.delivered: list[events.Event] = []
        self.reported: list[Change] = []
        clock: Clock = SimpleNamespace(now=loop.time)
        self.timers: list[asyncio.TimerHandle] = []
        call_later = loop.call_later

        def noted(delay: float, call: Callable[..., object], *args: Any) -> asyncio.TimerHandle:
            self.timers.append(call_later(delay, call, *args))
            return self.timers[-1]

        loop.call_later = noted  # type: ignore[method-assign, assignment]
        config = KVConfig(role=Role.DECODE, me=D, model="m", spec=spec, **options)  # type: ignore[arg-type]
        io: Any = SimpleNamespace(loop=loop)
        self.told = asyncio.Event()
        self.ranks = OpenRanks(config, io, clock, self.delivered.append, self.report)
        self.ranks.registry = self.rooms
        self.deadline = loop.time() + 30

    def report(self, change: Change) -> None:
        self.reported.append(change)
        self.told.set()

    def open(self, **options: Any) -> None:
        options.setdefault("deadline", self.deadline)
        assert self.ranks.take(events.OpenReceiver(OPEN, 40, **options))

    def named(self, rank: int, *, inferred: bool) -> events.OpenReceiver:
        return events.OpenReceiver(on(rank), 40, self.deadline, inferred)

    def failure(self) -> Any:
        """The one error that the engine was told, and that nothing is left."""
        phase, release = self.reported
        assert isinstance(phase, events.Phase)
        assert isinstance(release, events.Release)
        assert {phase.transfer, release.transfer} == {OPEN}
        assert phase.error is not None
        assert phase.error.room == ROOM
        assert phase.error.origin == f"decode {D}"
        assert not any(self.ranks.sizes().values())
        now = asyncio.get_running_loop().time()
        assert all(timer.cancelled() or timer.when() <= now for timer in self.timers), (
            "nobody is late any more"
        )
        return phase.error


def drive(main: Callable[[Rig], Awaitable[None]], **options: Any) -> None:
    async def run() -> None:
        async with asyncio.timeout(60):
            await main(Rig(**options))

    asyncio.run(run())


async def settle() -> None:
    """All that follows by itself has happened."""
    for _ in range(6):
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("dp", "options", "rank", "inferred"),
    [
        (PLAIN, {"hint": 3}, 3, True),
        (FOLLOWS, {"hint": 3}, 3, True),
        (FOLLOWS, {"hint": 3, "force_query": True}, 3, True),
        (DpRanks(), {}, 0, False),
        (DpRanks(), {"force_query": True}, 0, False),
        (FOLLOWS, {}, 1, True),
    ],
)
def test_what_is_known_is_used_at_once(
    dp: DpRanks, options: dict[str, Any], rank: int, inferred: bool
) -> None:
    async def main(rig: Rig) -> None:
        rig.ranks.instances(instance(dp))
        rig.open(**options)
        await settle()
        assert rig.delivered == [rig.named(rank, inferred=inferred)]
        assert not rig.rooms.asked

    drive(main)


@pytest.mark.parametrize(
    ("dp", "options", "config"),
    [
        (PLAIN, {}, {}),
        (FOLLOWS, {"force_query": True}, {}),
        (FOLLOWS, {}, {"dp": DpRanks(force_query=True)}),
    ],
)
def test_else_the_registry_is_asked_once_and_the_receiver_waits_for_the_answer(
    dp: DpRanks, options: dict[str, Any], config: dict[str, Any]
) -> None:
    async def main(rig: Rig) -> None:
        rig.ranks.instances(instance(dp))
        rig.open(**options)
        await settle()
        assert rig.delivered == []
        rig.ranks.instances(instance(dp))  # news, but nothing new
        await settle()
        [wait_s] = rig.rooms.waits_s
        assert 0 < wait_s <= 30, "as long as there is"
        rig.rooms.asked[ROOM].set_result(LeaderId(P, 2))
        await settle()
        assert rig.delivered == [rig.named(2, inferred=False)]

    drive(main, **config)


def test_a_receiver_exists_before_its_instance_is_known_and_is_looked_at_again_when_it_is() -> None:
    async def main(rig: Rig) -> None:
        rig.open()
        rig.ranks.instances({Incarnation("b" * 32): PrefillInstance(DpRanks(), frozenset({0}))})
        await settle()
        assert rig.delivered == []
        assert rig.reported == []
        rig.ranks.instances(instance(FOLLOWS))
        await settle()
        assert rig.delivered == [rig.named(1, inferred=True)]

    drive(main)


@pytest.mark.parametrize("hint", [-1, 4, 2**40])
def test_a_hint_out_of_range_is_refused_before_anything_is_reserved(hint: int) -> None:
    async def main(rig: Rig) -> None:
        rig.ranks.instances(instance(PLAIN))
        rig.open(hint=hint)
        await settle()
        assert rig.failure().code is ErrorCode.DP_RANK_OUT_OF_RANGE
        assert rig.delivered == []

    drive(main)


def test_a_rank_that_is_gone_fails_who_names_it_and_nobody_waits_for_it() -> None:
    async def main(rig: Rig) -> None:
        rig.ranks.instances(instance(PLAIN, 0, 1, 2))
        rig.open(hint=3)
        assert rig.failure().code is ErrorCode.PEER_LOST

    drive(main)


def test_where_the_rule_names_a_rank_that_is_gone_the_registry_is_asked() -> None:
    async def main(rig: Rig) -> None:
        rig.ranks.instances(instance(FOLLOWS, 0, 2, 3))
        rig.open()
        await settle()
        rig.rooms.asked[ROOM].set_result(LeaderId(P, 3))
        await settle()
        assert rig.delivered == [rig.named(3, inferred=False)]

    drive(main)


def test_whoever_waits_for_an_instance_that_leaves_fails_at_once() -> None:
    async def main(rig: Rig) -> None:
        rig.ranks.instances(instance(PLAIN))
        rig.open()
        await settle()
        rig.ranks.instances({})
        assert rig.failure().code is ErrorCode.PEER_LOST
        await settle()
        assert not rig.rooms.asked, "its query waits no longer"

    drive(main)


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (LeaderId(Incarnation("b" * 32), 0), ErrorCode.DP_RANK_CONFLICT),
        (LeaderId(P, 3), ErrorCode.PEER_LOST),
        (Unauthorized("wrong secret"), ErrorCode.UNAUTHORIZED),
        (RuntimeError("a bug"), ErrorCode.INTERNAL),
    ],
)
def test_an_answer_that_is_none_is_a_typed_error(answer: LeaderId | Exception, code: ErrorCode) -> None:
    async def main(rig: Rig) -> None:
        rig.ranks.instances(instance(PLAIN, 0, 1, 2))
        rig.open()
        await settle()
        if isinstance(answer, LeaderId):
            rig.rooms.asked[ROOM].set_result(answer)
        else:
            rig.rooms.asked[ROOM].set_exception(answer)
        await settle()
        assert rig.failure().code is code

    drive(main)


@pytest.mark.parametrize("known", [True, False])
def test_nobody_waits_longer_than_the_deadline(known: bool) -> None:
    async def main(rig: Rig) -> None:
        if known:
            rig.ranks.instances(instance(PLAIN))
        rig.open(deadline=asyncio.get_running_loop().time() + 0.05)
        await asyncio.wait_for(rig.told.wait(), 60)
        await settle()
        assert rig.failure().code in (ErrorCode.DEADLINE_EXCEEDED, ErrorCode.BOOTSTRAP_TIMEOUT)
        rig.ranks.instances(instance(FOLLOWS))  # too late
        await settle()
        assert rig.delivered == []
        assert len(rig.reported) == 2

    drive(main)


def test_an_answer_after_the_end_changes_nothing() -> None:
    async def main(rig: Rig) -> None:
        rig.ranks.instances(instance(PLAIN))
        rig.open()
        await settle()
        rig.rooms.asked[ROOM].set_result(LeaderId(P, 0))
        assert rig.ranks.take(events.AbortTransfer(OPEN, TransferFailed("the client left").info))
        await settle()
        assert rig.failure().text == "the client left"
        assert rig.delivered == []

    drive(main)


def test_without_a_registry_it_is_unreachable() -> None:
    async def main(rig: Rig) -> None:
        rig.ranks.registry = None
        rig.ranks.instances(instance(PLAIN))
        rig.open()
        await settle()
        assert rig.failure().code is ErrorCode.BOOTSTRAP_UNREACHABLE

    drive(main)


def test_as_many_wait_as_there_may_be_hand_offs() -> None:
    async def main(rig: Rig) -> None:
        rig.open()
        other = TransferId(5, 0, LeaderId(P, OPEN_RANK), D)
        rig.ranks.take(events.OpenReceiver(other, 40, rig.deadline))
        phase = rig.reported[0]
        assert isinstance(phase, events.Phase)
        assert phase.error is not None
        assert phase.error.code is ErrorCode.OUT_OF_CAPACITY
        assert rig.ranks.sizes()["open_receivers"] == 1

    drive(main, limits=Limits(max_transfers=1))


def test_the_engine_hears_of_the_hand_off_under_its_own_name() -> None:
    async def main(rig: Rig) -> None:
        rig.ranks.instances(instance(FOLLOWS))
        rig.open()
        await settle()
        rig.ranks.carry_out(events.Phase(on(1), KVPoll.WAITING_FOR_INPUT))
        rig.ranks.take(events.Publish(OPEN, (1, 2), 0))
        rig.ranks.carry_out(events.Phase(on(1), KVPoll.SUCCESS))
        rig.ranks.carry_out(events.Release(on(1)))
        other = events.Release(on(1, room=9))
        rig.ranks.carry_out(other)
        await settle()
        assert [c.transfer for c in rig.reported[:3]] == [OPEN] * 3
        assert rig.reported[3] == other
        assert rig.delivered[1:] == [events.Publish(on(1), (1, 2), 0)]
        assert not any(rig.ranks.sizes().values())
        assert rig.ranks.engine_name(on(1)) == on(1), "its other name is over with it"
        assert not rig.ranks.take(rig.named(1, inferred=False)), "the protocol knows whether it was used"

    drive(main)


def test_one_hand_off_under_two_names_fails_for_the_second_request_alone() -> None:
    async def main(rig: Rig) -> None:
        rig.ranks.instances(instance(FOLLOWS))
        rig.open()
        await settle()
        again = events.OpenReceiver(on(1), 40, rig.deadline)
        assert rig.ranks.take(again), "the protocol would refuse it, and nobody could tell whom"
        assert {change.transfer for change in rig.reported} == {on(1)}
        assert isinstance(rig.reported[0], events.Phase)
        assert rig.reported[0].error is not None
        assert rig.reported[0].error.code is ErrorCode.INVALID_REQUEST
        assert not rig.ranks.take(events.OpenReceiver(on(2), 40, rig.deadline))

    drive(main)


def moved(rig: Rig, to: int) -> None:
    """Rank 1 says that the room is on rank `to`; decode's pages wait for a proof."""
    error = TransferFailed("moved").info
    rig.ranks.carry_out(events.Redirected(on(1), to))
    rig.ranks.carry_out(events.Phase(on(1), KVPoll.FAILED, error=error))
    rig.ranks.carry_out(events.Quarantined(on(1), 2))


async def published_at_1(rig: Rig) -> None:
    rig.ranks.instances(instance(FOLLOWS))
    rig.open()
    await settle()
    rig.ranks.carry_out(events.Phase(on(1), KVPoll.WAITING_FOR_INPUT))
    rig.ranks.take(events.Publish(OPEN, (1, 2), 0))
    await settle()
    rig.delivered.clear()
    rig.reported.clear()


def test_a_room_on_another_rank_is_followed_there_once_nobody_can_write_for_the_first() -> None:
    async def main(rig: Rig) -> None:
        await published_at_1(rig)
        moved(rig, 3)
        await settle()
        assert rig.delivered == [], "the pages still wait for a proof"
        rig.ranks.carry_out(events.Release(on(1)))
        await settle()
        assert rig.delivered == [rig.named(3, inferred=False)]
        rig.ranks.carry_out(events.Phase(on(3), KVPoll.BOOTSTRAPPING))
        rig.ranks.carry_out(events.Phase(on(3), KVPoll.WAITING_FOR_INPUT))
        await settle()
        assert rig.delivered[1:] == [events.Publish(on(3), (1, 2), 0)]
        assert rig.reported == [], "its engine has nothing to do for it"
        rig.ranks.carry_out(events.Phase(on(3), KVPoll.SUCCESS))
        rig.ranks.carry_out(events.Release(on(3)))
        assert [c.transfer for c in rig.reported] == [OPEN, OPEN]
        assert not any(rig.ranks.sizes().values())
        assert [rig.ranks.engine_name(on(rank)) for rank in (1, 3)] == [on(1), on(3)]

    drive(main)


def test_who_is_sent_on_before_it_has_published_is_asked_for_its_pages_there() -> None:
    async def main(rig: Rig) -> None:
        rig.ranks.instances(instance(FOLLOWS))
        rig.open()
        await settle()
        moved(rig, 3)
        rig.ranks.carry_out(events.Release(on(1)))
        await settle()
        rig.reported.clear()
        rig.ranks.carry_out(events.Phase(on(3), KVPoll.BOOTSTRAPPING))
        rig.ranks.carry_out(events.Phase(on(3), KVPoll.WAITING_FOR_INPUT))
        assert rig.reported == [events.Phase(OPEN, KVPoll.WAITING_FOR_INPUT)]
        rig.ranks.take(events.Publish(OPEN, (1, 2), 0))
        await settle()
        assert rig.delivered[-1] == events.Publish(on(3), (1, 2), 0)

    drive(main)


@pytest.mark.parametrize("to", [4, -1])
def test_a_rank_that_is_not_there_is_not_followed(to: int) -> None:
    async def main(rig: Rig) -> None:
        await published_at_1(rig)
        moved(rig, to)
        rig.ranks.carry_out(events.Release(on(1)))
        assert [type(c) for c in rig.reported] == [events.Phase, events.Quarantined, events.Release]
        assert not any(rig.ranks.sizes().values())

    drive(main)


def test_it_is_followed_once() -> None:
    async def main(rig: Rig) -> None:
        await published_at_1(rig)
        moved(rig, 3)
        rig.ranks.carry_out(events.Release(on(1)))
        await settle()
        rig.ranks.carry_out(events.Redirected(on(3), 1))
        rig.ranks.carry_out(events.Phase(on(3), KVPoll.FAILED, error=TransferFailed("again").info))
        rig.ranks.carry_out(events.Release(on(3)))
        assert [type(c) for c in rig.reported] == [events.Phase, events.Release]
        assert not any(rig.ranks.sizes().values())

    drive(main)


def test_an_abort_on_the_way_is_told_at_once_and_the_pages_come_back_with_the_proof() -> None:
    async def main(rig: Rig) -> None:
        await published_at_1(rig)
        moved(rig, 3)
        error = TransferFailed("the client left").info
        rig.ranks.take(events.AbortTransfer(OPEN, error))
        rig.ranks.take(events.AbortTransfer(OPEN, error))
        assert rig.reported == [
            events.Phase(OPEN, KVPoll.FAILED, error=error),
            events.Quarantined(OPEN, 2),
        ]
        rig.ranks.carry_out(events.Release(on(1)))
        await settle()
        assert rig.reported[2:] == [events.Release(OPEN)]
        assert rig.delivered == []
        assert not any(rig.ranks.sizes().values())

    drive(main)


def test_prefill_asks_whose_a_room_is_that_decode_looks_for_here_until_it_knows() -> None:
    async def main(rig: Rig) -> None:
        rig.ranks.carry_out(events.AskRoom(on(1), 20.0))
        await settle()
        assert rig.rooms.waits_s == [20.0]
        rig.rooms.asked[ROOM].set_result(LeaderId(P, 3))
        await settle()
        assert rig.delivered == [events.RoomFound(on(1), 3)]
        rig.ranks.carry_out(events.AskRoom(on(1), 20.0))
        await settle()
        rig.ranks.carry_out(events.RoomSettled(on(1)))
        await settle()
        assert not rig.rooms.asked
        assert not any(rig.ranks.sizes().values())
        # What was stopped may end only after the next question was begun.
        rig.ranks.carry_out(events.AskRoom(on(1), 20.0))
        await settle()
        rig.ranks.carry_out(events.RoomSettled(on(1)))
        rig.ranks.carry_out(events.AskRoom(on(1), 20.0))
        await settle()
        assert (list(rig.rooms.asked), rig.ranks.sizes()["room_queries"]) == ([ROOM], 1)
        rig.ranks.carry_out(events.RoomSettled(on(1)))
        await settle()
        assert not rig.rooms.asked

    drive(main)


def test_a_room_that_cannot_be_announced_ends_our_half() -> None:
    async def main(rig: Rig) -> None:
        assert rig.ranks.take(events.AnnounceRoom(on(1), 20.0))
        await settle()
        assert rig.rooms.told == [(ROOM, LeaderId(P, 1), 20.0)]
        rig.rooms.refuses = Unauthorized("wrong secret")
        rig.ranks.take(events.AnnounceRoom(on(2), 20.0))
        await settle()
        [abort] = rig.delivered
        assert isinstance(abort, events.AbortTransfer)
        assert abort.transfer == on(2)
        assert abort.error.code is ErrorCode.UNAUTHORIZED
        assert not any(rig.ranks.sizes().values())

    drive(main)
