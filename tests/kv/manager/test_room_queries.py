"""A leader's queries and messages to the registry about rooms: valid answers, and their lifetime."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from segue.kv.errors import BootstrapTimeout, ErrorCode, Unauthorized
from segue.kv.ids import Incarnation, LeaderId, RoomKey
from segue.kv.protocol import events
from segue.kv.room_queries import RoomQueries

ME, OTHER = LeaderId(Incarnation("a" * 32), 1), LeaderId(Incarnation("a" * 32), 3)
KEY = RoomKey(7)


class Registry:
    """Answers when the test says so."""

    def __init__(self) -> None:
        self.asked: dict[int, asyncio.Future[LeaderId]] = {}
        self.waits_s: list[float] = []
        self.told: list[tuple[int, LeaderId, float]] = []
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
            return await self.asked[room]
        finally:
            del self.asked[room]


class Rig:
    def __init__(self) -> None:
        self.registry = Registry()
        self.heard: list[events.RoomFound | events.RoomUnknown] = []
        io: Any = SimpleNamespace(loop=asyncio.get_running_loop())
        self.queries = RoomQueries(ME, io, self.heard.append)
        self.queries.registry = self.registry


def drive(main: Callable[[Rig], Awaitable[None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(60):
            rig = Rig()
            await main(rig)
            await settle()
            assert len(rig.queries) == 0, "a question was forgotten"
            assert rig.registry.asked == {}

    asyncio.run(run())


async def settle() -> None:
    """All that follows by itself has happened."""
    for _ in range(6):
        await asyncio.sleep(0)


def test_a_question_is_asked_for_as_long_as_is_said_and_its_answer_is_delivered() -> None:
    async def main(rig: Rig) -> None:
        rig.queries.carry_out(events.AskRoom(KEY, 20.0))
        await settle()
        assert (rig.registry.waits_s, len(rig.queries)) == ([20.0], 1)
        rig.registry.asked[KEY.room].set_result(OTHER)
        await settle()
        assert rig.heard == [events.RoomFound(KEY, OTHER)]

    drive(main)


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (BootstrapTimeout("nobody registered it"), ErrorCode.BOOTSTRAP_TIMEOUT),
        (Unauthorized("wrong secret"), ErrorCode.UNAUTHORIZED),
        (RuntimeError("a bug"), ErrorCode.INTERNAL),
    ],
)
def test_an_answer_that_is_none_is_a_typed_error(answer: Exception, code: ErrorCode) -> None:
    async def main(rig: Rig) -> None:
        rig.queries.carry_out(events.AskRoom(KEY, 20.0))
        await settle()
        rig.registry.asked[KEY.room].set_exception(answer)
        await settle()
        [unknown] = rig.heard
        assert isinstance(unknown, events.RoomUnknown)
        assert (unknown.key, unknown.error.code) == (KEY, code)

    drive(main)


def test_a_room_is_told_with_its_leader_and_how_long_it_may_be_open_and_only_a_refusal_is_answered() -> None:
    async def main(rig: Rig) -> None:
        rig.queries.carry_out(events.RegisterRoom(KEY, 12.5))
        await settle()
        assert (rig.registry.told, rig.heard) == ([(KEY.room, ME, 12.5)], [])
        rig.registry.refuses = Unauthorized("wrong secret")
        rig.queries.carry_out(events.RegisterRoom(RoomKey(8), 12.5))
        await settle()
        [unknown] = rig.heard
        assert isinstance(unknown, events.RoomUnknown)
        assert (unknown.key, unknown.error.code) == (RoomKey(8), ErrorCode.UNAUTHORIZED)

    drive(main)


def test_another_generation_has_a_number_of_its_own_and_all_ordinals_of_one_share_it() -> None:
    async def main(rig: Rig) -> None:
        for key in (KEY, RoomKey(7, generation=1), RoomKey(7, generation=1, ordinal=3)):
            rig.queries.carry_out(events.RegisterRoom(key, 1.0))
            await settle()
        first, second, third = [room for room, _, _ in rig.registry.told]
        assert (first, second) == (7, third)
        assert second not in (0, 7)

    drive(main)


def test_what_is_settled_is_given_up_and_its_late_answer_is_nobody_s() -> None:
    async def main(rig: Rig) -> None:
        rig.queries.carry_out(events.AskRoom(KEY, 20.0))
        await settle()
        rig.queries.carry_out(events.RoomSettled(KEY))
        await settle()
        assert (rig.registry.asked, rig.heard) == ({}, [])
        rig.queries.carry_out(events.RoomSettled(KEY))  # once more does no harm

    drive(main)


@pytest.mark.parametrize("turns", range(6))
@pytest.mark.parametrize("found", [True, False])
def test_an_answer_that_is_under_way_when_its_question_is_settled_is_nobody_s_too(
    turns: int, found: bool
) -> None:
    """Prefill's engine may have opened the room in between: an answer to the question would end it."""

    async def main(rig: Rig) -> None:
        rig.queries.carry_out(events.AskRoom(KEY, 20.0))
        await settle()
        asked = rig.registry.asked[KEY.room]
        if found:
            asked.set_result(OTHER)
        else:
            asked.set_exception(BootstrapTimeout("nobody registered it"))
        for _ in range(turns):
            await asyncio.sleep(0)
        heard = len(rig.heard)
        rig.queries.carry_out(events.RoomSettled(KEY))
        await settle()
        assert len(rig.heard) == heard

    drive(main)


def test_what_was_stopped_may_end_only_after_the_next_question_was_begun() -> None:
    async def main(rig: Rig) -> None:
        rig.queries.carry_out(events.AskRoom(KEY, 20.0))
        await settle()
        rig.queries.carry_out(events.RoomSettled(KEY))
        rig.queries.carry_out(events.AskRoom(KEY, 10.0))
        await settle()
        assert (rig.registry.waits_s, len(rig.queries)) == ([20.0, 10.0], 1)
        rig.registry.asked[KEY.room].set_result(OTHER)
        await settle()
        assert rig.heard == [events.RoomFound(KEY, OTHER)]

    drive(main)


def test_an_answer_is_never_delivered_in_the_middle_of_a_turn() -> None:
    async def main(rig: Rig) -> None:
        rig.queries.registry = None
        rig.queries.carry_out(events.AskRoom(KEY, 20.0))
        assert rig.heard == [], "the protocol is in the middle of one"
        await settle()
        [unknown] = rig.heard
        assert isinstance(unknown, events.RoomUnknown)
        assert unknown.error.code is ErrorCode.BOOTSTRAP_UNREACHABLE, "without a registry"

    drive(main)
