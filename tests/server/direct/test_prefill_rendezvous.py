"""Where the two legs of a request meet on prefill's side: who is told what, and that nothing stays."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, cast

import msgspec
import pytest

from segue.kv.errors import (
    BootstrapTimeout,
    DeadlineExceeded,
    DpRankConflict,
    DpRankOutOfRange,
    ErrorCode,
    Internal,
    InvalidRequest,
    OutOfCapacity,
    PeerLost,
    SegueError,
)
from segue.kv.protocol.room_ranks import FAIL_ON_CONFLICT, FOLLOW_BOOTSTRAP_ROOM, DpRanks
from segue.kv.session.api import Session
from segue.server.direct.prefill_rendezvous import PrefillRendezvous
from segue.server.messages.control import Done, FindPrefill, PrefillFound

ROOM = 77
BROKEN = Internal("the engine broke")


class Door:
    """The session of a decode door: keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[PrefillFound] = []
        self.news = asyncio.Event()

    def send(self, message: msgspec.Struct) -> None:
        assert isinstance(message, PrefillFound)
        self.told.append(message)
        self.news.set()

    @property
    def session(self) -> Session:
        return cast(Session, self)

    def codes(self) -> list[ErrorCode | None]:
        return [met.error.code if met.error else None for met in self.told]


def made(meet_s: float = 30.0, limit: int = 8, **dp: Any) -> PrefillRendezvous:
    return PrefillRendezvous("prefill test", DpRanks(**dp), limit, meet_s)


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(work())


async def leg(
    rooms: PrefillRendezvous, routed: int | None = None, budget_s: float = 60.0
) -> asyncio.Task[None]:
    """A prefill leg that has come and waits."""
    task = asyncio.get_running_loop().create_task(rooms.wait(ROOM, routed, budget_s))
    await asyncio.sleep(0)
    return task


async def failure(work: Awaitable[None]) -> SegueError:
    with pytest.raises(SegueError) as caught:
        await work
    return caught.value


@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_the_legs_meet_in_either_order_and_prefill_is_answered_when_its_part_is_done(first: str) -> None:
    async def main() -> None:
        rooms, door = made(), Door()
        if first == "decode":
            rooms.meet(door.session, FindPrefill(room=ROOM))
            assert door.told == []
        waiting = await leg(rooms)
        if first == "prefill":
            rooms.meet(door.session, FindPrefill(room=ROOM))
        assert door.told == [PrefillFound(room=ROOM)]
        assert not waiting.done()
        rooms.over(door.session, Done(room=ROOM))
        await waiting
        assert rooms.sizes() == {"legs": 0}
        assert rooms.rooms == 0
        assert rooms.abandoned == 0

    run(main)


@pytest.mark.parametrize("after", [False, True])
def test_what_decode_fails_with_ends_the_prefill_leg_now_or_when_it_comes(after: bool) -> None:
    async def main() -> None:
        rooms, door = made(), Door()
        rooms.meet(door.session, FindPrefill(room=ROOM))
        waiting = None if after else await leg(rooms)
        rooms.over(door.session, Done(room=ROOM, error=BROKEN.info))
        assert (await failure(waiting or rooms.wait(ROOM, None, 60))).code is ErrorCode.INTERNAL
        assert rooms.sizes() == {"legs": 0}
        rooms.close()

    run(main)


@pytest.mark.parametrize("after", [False, True])
def test_a_prefill_leg_whose_client_leaves_ends_decode_s_leg_now_or_when_it_comes(after: bool) -> None:
    async def main() -> None:
        rooms, door = made(), Door()
        waiting = await leg(rooms)
        if not after:
            rooms.meet(door.session, FindPrefill(room=ROOM))
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        if after:
            rooms.meet(door.session, FindPrefill(room=ROOM))
        assert door.codes()[-1] is ErrorCode.ABORTED_BY_CLIENT
        assert not door.told[-1].elsewhere, "it was here"
        rooms.close()

    run(main)


def test_the_end_of_decode_s_session_ends_what_it_asked_for_and_nothing_else() -> None:
    async def main() -> None:
        rooms, door, other = made(), Door(), Door()
        waiting = await leg(rooms)
        rooms.meet(door.session, FindPrefill(room=ROOM))
        rooms.closed(other.session, PeerLost("gone"))
        rooms.over(other.session, Done(room=ROOM))
        assert not waiting.done()
        rooms.closed(door.session, PeerLost("gone"))
        assert (await failure(waiting)).code is ErrorCode.PEER_LOST
        assert rooms.rooms == 0

    run(main)


def test_a_leg_without_the_other_ends_in_time_and_is_counted() -> None:
    async def main() -> None:
        rooms, door = made(meet_s=0.01), Door()
        assert isinstance(await failure(rooms.wait(ROOM, None, 60)), BootstrapTimeout)
        rooms.meet(door.session, FindPrefill(room=ROOM + 1))
        await door.news.wait()
        assert door.codes() == [ErrorCode.BOOTSTRAP_TIMEOUT]
        assert rooms.abandoned == 2
        assert rooms.rooms == 0

    run(main)


def test_a_room_whose_leg_has_left_holds_no_leg_and_says_why_to_the_next() -> None:
    async def main() -> None:
        rooms = made()
        waiting = await leg(rooms)
        assert rooms.sizes() == {"legs": 1}
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert rooms.sizes() == {"legs": 0}
        assert (await failure(rooms.wait(ROOM, None, 60))).code is ErrorCode.ABORTED_BY_CLIENT
        rooms.close()

    run(main)


def test_once_they_have_met_only_the_request_s_own_deadline_counts() -> None:
    async def main() -> None:
        rooms, door, loop = made(meet_s=0.01), Door(), asyncio.get_running_loop()
        waiting = loop.create_task(rooms.wait(ROOM, None, 0.1))
        # In the same turn of the loop: no timer runs between, however long the machine takes.
        loop.call_soon(rooms.meet, door.session, FindPrefill(room=ROOM))
        assert isinstance(await failure(waiting), DeadlineExceeded)
        assert door.codes() == [None, ErrorCode.DEADLINE_EXCEEDED]
        assert rooms.rooms == 0

    run(main)


def test_a_room_has_one_leg_of_each_kind() -> None:
    async def main() -> None:
        rooms, door, other = made(), Door(), Door()
        waiting = await leg(rooms)
        assert isinstance(await failure(rooms.wait(ROOM, None, 60)), InvalidRequest)
        rooms.meet(door.session, FindPrefill(room=ROOM))
        rooms.meet(other.session, FindPrefill(room=ROOM))
        assert other.codes() == [ErrorCode.INVALID_REQUEST]
        assert not other.told[0].elsewhere
        assert not waiting.done()
        rooms.over(door.session, Done(room=ROOM))
        await waiting

    run(main)


def test_rooms_are_bounded_and_room_0_is_none() -> None:
    async def main() -> None:
        rooms, door = made(limit=2), Door()
        for room in (1, 2, 3, 0):
            rooms.meet(door.session, FindPrefill(room=room))
        assert door.codes() == [ErrorCode.OUT_OF_CAPACITY, ErrorCode.INVALID_REQUEST]
        assert all(met.elsewhere for met in door.told), "its leg was never here"
        for room in (5, 6, 0):
            rooms.over(door.session, Done(room=room, error=BROKEN.info))
        assert rooms.rooms == 2
        rooms.close()
        for room in (0, 2**63, 5, 6, 7):
            rooms.over(door.session, Done(room=room, error=BROKEN.info))
        assert rooms.rooms == 2
        rooms.close()

    run(main)


@pytest.mark.parametrize(
    ("routed", "hint", "dp", "rank"),
    [
        (None, None, {}, None),
        (None, 1, {"size": 2}, 1),
        (1, None, {"size": 2}, 1),
        (1, 0, {"size": 2}, 1),
        (None, None, {"size": 2, "load_balance": FOLLOW_BOOTSTRAP_ROOM}, ROOM % 2),
        (None, 0, {"size": 2, "load_balance": FOLLOW_BOOTSTRAP_ROOM}, 0),
        (0, None, {"size": 2, "load_balance": FOLLOW_BOOTSTRAP_ROOM}, 0),
        (1, 0, {"size": 2, "on_conflict": FAIL_ON_CONFLICT}, DpRankConflict),
        (
            0,
            None,
            {"size": 2, "load_balance": FOLLOW_BOOTSTRAP_ROOM, "on_conflict": FAIL_ON_CONFLICT},
            DpRankConflict,
        ),
        (2, None, {"size": 2}, DpRankOutOfRange),
        (-1, None, {"size": 2}, DpRankOutOfRange),
        (0, -1, {"size": 2}, DpRankOutOfRange),
        (None, 1, {}, DpRankOutOfRange),
    ],
)
@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_the_dp_rank_is_that_of_the_prefill_leg_then_the_hint_then_the_room_s(
    routed: int | None, hint: int | None, dp: dict[str, Any], rank: Any, first: str
) -> None:
    async def main() -> None:
        rooms, door = made(**dp), Door()
        if first == "decode":
            rooms.meet(door.session, FindPrefill(room=ROOM, hint=hint))
        waiting = await leg(rooms, routed)
        if first == "prefill":
            rooms.meet(door.session, FindPrefill(room=ROOM, hint=hint))
        if isinstance(rank, type):
            assert isinstance(await failure(waiting), rank)
            assert door.codes() == [rank.code]
            assert rooms.rooms == 0
            return
        assert door.told == [PrefillFound(room=ROOM, dp_rank=rank)]
        rooms.over(door.session, Done(room=ROOM))
        await waiting

    run(main)


def test_a_ticket_is_good_once_and_until_its_time() -> None:
    async def main() -> None:
        rooms, door = made(limit=1), Door()
        with rooms.ticket(ROOM, 1, 60):
            pass
        with pytest.raises(OutOfCapacity), rooms.ticket(8, 0, 60):
            pass
        for _ in range(2):
            rooms.meet(door.session, FindPrefill(room=ROOM, ticket=True))
        assert door.told[0] == PrefillFound(room=ROOM, dp_rank=1)
        assert door.codes() == [None, ErrorCode.INVALID_REQUEST]
        with pytest.raises(ZeroDivisionError), rooms.ticket(9, 0, 60):
            raise ZeroDivisionError
        assert (rooms.tickets, rooms.abandoned) == (0, 0)
        with rooms.ticket(10, 0, 0.0):
            pass
        while rooms.tickets:  # noqa: ASYNC110  nothing tells of it
            await asyncio.sleep(0)
        assert rooms.abandoned == 1
        rooms.meet(door.session, FindPrefill(room=10, ticket=True))
        assert door.codes()[-1] is ErrorCode.INVALID_REQUEST

    run(main)


def test_it_is_said_which_leg_is_missing_and_a_leg_that_has_failed_is_not_missed() -> None:
    async def main() -> None:
        rooms, door = made(meet_s=0.01), Door()
        error = (await failure(rooms.wait(ROOM, None, 60))).info
        assert ("the decode leg" in error.text, error.origin, error.room) == (True, "prefill test", ROOM)
        rooms.meet(door.session, FindPrefill(room=ROOM + 1))
        await door.news.wait()
        assert door.told[0].error is not None
        assert "the prefill leg" in door.told[0].error.text
        assert door.told[0].elsewhere
        assert rooms.abandoned == 2
        for lost in (BROKEN, PeerLost("and what came of it")):
            rooms.over(door.session, Done(room=ROOM + 2, error=lost.info))
        assert rooms.rooms
        async with asyncio.timeout(60):
            while rooms.rooms:  # noqa: ASYNC110  nothing tells of it
                await asyncio.sleep(0)
        assert rooms.abandoned == 2, "nobody came for it because it had ended"

    run(main)


def test_the_first_thing_that_decode_fails_with_is_what_the_prefill_leg_hears() -> None:
    async def main() -> None:
        rooms, door = made(), Door()
        for lost in (BROKEN, PeerLost("and what came of it")):
            rooms.over(door.session, Done(room=ROOM, error=lost.info))
        assert (await failure(rooms.wait(ROOM, None, 60))).code is ErrorCode.INTERNAL
        rooms.close()

    run(main)


def test_a_room_is_forgotten_with_the_request_s_own_deadline_if_that_is_the_nearer_one() -> None:
    async def main() -> None:
        rooms = made(meet_s=30)
        assert isinstance(await failure(rooms.wait(ROOM, None, 0.01)), BootstrapTimeout | DeadlineExceeded)
        assert rooms.rooms == 0

    run(main)


def test_a_refusal_says_which_instance_it_comes_from_and_opens_no_room() -> None:
    async def main() -> None:
        rooms, door = made(limit=1), Door()
        rooms.meet(door.session, FindPrefill(room=ROOM))
        rooms.meet(door.session, FindPrefill(room=ROOM + 1))
        rooms.meet(door.session, FindPrefill(room=ROOM + 2, ticket=True))
        assert [met.error.origin for met in door.told if met.error] == ["prefill test"] * 2
        assert rooms.rooms == 1
        rooms.close()
        assert (rooms.sizes(), rooms.tickets) == ({"legs": 0}, 0)

    run(main)
