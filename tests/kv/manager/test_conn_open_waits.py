"""Whom the search for a DP rank asks, for how long, and whose answer it takes; and the alarm of a leader."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from test_conn_open_ranks import (
    FOLLOWS,
    OPEN,
    PLAIN,
    ROOM,
    P,
    Rig,
    drive,
    instance,
    moved,
    on,
    published_at_1,
    settle,
)

from segue.kv.alarm import Alarm
from segue.kv.errors import ErrorCode, TransferFailed
from segue.kv.ids import Incarnation, KVPoll, LeaderId
from segue.kv.open_ranks import PrefillInstance
from segue.kv.protocol import events


class PrefillRendezvous:
    """A registry that notes how long it may take."""

    def __init__(self) -> None:
        self.resolved: list[tuple[int, float]] = []
        self.registered: list[tuple[int, LeaderId, float]] = []
        self.cancelled = 0
        self.answer: asyncio.Future[LeaderId] = asyncio.get_running_loop().create_future()

    async def register_room(self, room: int, leader: LeaderId, ttl_s: float) -> None:
        self.registered.append((room, leader, ttl_s))

    async def resolve_room(self, room: int, timeout_s: float) -> LeaderId:
        self.resolved.append((room, timeout_s))
        try:
            return await asyncio.shield(self.answer)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


def test_the_registry_is_given_the_time_that_the_request_has_and_a_room_as_long_as_is_said() -> None:
    async def main(rig: Rig) -> None:
        rooms = PrefillRendezvous()
        rig.ranks.registry = rooms
        rig.ranks.instances(instance(PLAIN))
        rig.open()
        rig.ranks.take(events.AnnounceRoom(on(2), 12.5))
        rig.ranks.carry_out(events.AskRoom(on(3), 7.5))
        await settle()
        (_, ours), asked = sorted(rooms.resolved, key=lambda each: -each[1])
        assert rig.deadline - asyncio.get_running_loop().time() <= ours <= 30.0
        assert asked == (ROOM, 7.5)
        assert rooms.registered == [(ROOM, LeaderId(P, 2), 12.5)]
        rig.ranks.take(events.AbortTransfer(OPEN, TransferFailed("left").info))
        rig.ranks.carry_out(events.RoomSettled(on(3)))
        await settle()
        assert rooms.cancelled == 2, "nobody waits for these answers any more"

    drive(main)


def test_an_answer_that_names_another_instance_says_nothing_of_our_room() -> None:
    async def main(rig: Rig) -> None:
        rooms = PrefillRendezvous()
        rig.ranks.registry = rooms
        rig.ranks.carry_out(events.AskRoom(on(1), 20.0))
        await settle()
        rooms.answer.set_result(LeaderId(Incarnation("b" * 32), 3))
        await settle()
        assert rig.delivered == []
        assert not any(rig.ranks.sizes().values())

    drive(main)


def test_the_same_open_room_twice_is_refused_the_second_time_and_the_first_goes_on() -> None:
    async def main(rig: Rig) -> None:
        rig.open()
        rig.open()
        phase, release = rig.reported
        assert isinstance(phase, events.Phase)
        assert phase.error is not None
        assert (phase.error.code, release) == (ErrorCode.INVALID_REQUEST, events.Release(OPEN))
        assert rig.ranks.sizes()["open_receivers"] == 1
        rig.ranks.instances(instance(FOLLOWS))
        await settle()
        assert rig.delivered == [rig.named(1, inferred=True)]

    drive(main)


def test_an_instance_that_leaves_ends_what_waits_for_it_and_nothing_that_has_begun_or_is_another_s() -> None:
    async def main(rig: Rig) -> None:
        await published_at_1(rig)
        rig.ranks.instances({})
        await settle()
        assert rig.reported == []
        assert rig.delivered == []

    async def another(rig: Rig) -> None:
        other = {Incarnation("b" * 32): PrefillInstance(PLAIN, frozenset({0}))}
        rig.ranks.instances(other)
        rig.open()
        rig.ranks.instances({})
        await settle()
        assert rig.reported == [], "ours was not there yet, and may come"

    drive(main)
    drive(another)


def test_a_hand_off_that_has_begun_has_the_protocol_s_deadline_and_no_second_one() -> None:
    async def main(rig: Rig) -> None:
        rig.ranks.instances(instance(FOLLOWS))
        rig.open()
        await settle()
        assert rig.ranks._receivers[OPEN].timer.cancelled()
        rig.ranks.take(events.AbortTransfer(OPEN, TransferFailed("late").info))
        await settle()
        assert rig.delivered[1:] == [events.AbortTransfer(on(1), TransferFailed("late").info)]

    drive(main)


def test_what_an_engine_publishes_or_aborts_while_its_room_moves_waits_for_the_other_rank() -> None:
    async def main(rig: Rig) -> None:
        rig.ranks.instances(instance(FOLLOWS))
        rig.open()
        await settle()
        rig.ranks.carry_out(events.Phase(on(1), KVPoll.WAITING_FOR_INPUT))
        rig.ranks.carry_out(events.Redirected(on(1), 3))
        rig.delivered.clear()
        rig.ranks.take(events.Publish(OPEN, (4,), 0))  # its engine could not know
        await settle()
        assert rig.delivered == []
        rig.ranks.carry_out(events.Phase(on(1), KVPoll.FAILED, error=TransferFailed("moved").info))
        rig.ranks.carry_out(events.Release(on(1)))
        await settle()
        rig.ranks.carry_out(events.Phase(on(3), KVPoll.WAITING_FOR_INPUT))
        await settle()
        assert rig.delivered == [rig.named(3, inferred=False), events.Publish(on(3), (4,), 0)]

    drive(main)


def test_what_comes_for_a_receiver_that_has_ended_is_taken_and_does_nothing() -> None:
    async def main(rig: Rig) -> None:
        assert rig.ranks.take(events.Publish(OPEN, (4,), 0))
        assert rig.ranks.take(events.AbortTransfer(OPEN, TransferFailed("x").info))
        assert not rig.ranks.take(events.Publish(on(1), (4,), 0))
        assert not rig.ranks.take(events.AbortTransfer(on(1), TransferFailed("x").info))
        await settle()
        assert (rig.delivered, rig.reported) == ([], [])

    drive(main)


def test_a_redirection_of_a_hand_off_whose_rank_was_named_moves_nobody() -> None:
    async def main(rig: Rig) -> None:
        await published_at_1(rig)
        rig.ranks.carry_out(events.Redirected(on(2), 3))
        moved(rig, 3)
        rig.ranks.carry_out(events.Release(on(1)))
        await settle()
        assert rig.delivered == [rig.named(3, inferred=False)], "once, for the one that is open"

    drive(main)


# ---- the alarm ---------------------------------------------------------------------------------------


class Timer:
    def __init__(self, delay: float, ring: Any) -> None:
        self.delay, self.ring = delay, ring
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class Loop:
    def __init__(self) -> None:
        self.loop = self
        self.timers: list[Timer] = []

    def call_later(self, delay: float, ring: Any) -> Timer:
        self.timers.append(Timer(delay, ring))
        return self.timers[-1]


def test_the_alarm_is_set_for_the_nearest_deadline_and_anew_for_each_nearer_one() -> None:
    loop, rung = Loop(), list[int]()
    alarm = Alarm(loop, lambda: rung.append(1))  # type: ignore[arg-type]
    alarm.set(None, 0.0)
    assert loop.timers == []
    alarm.set(10.0, 4.0)
    alarm.set(12.0, 4.0)
    alarm.set(10.0, 5.0)
    assert [timer.delay for timer in loop.timers] == [6.0]
    alarm.set(9.0, 5.0)
    assert [(timer.delay, timer.cancelled) for timer in loop.timers] == [(6.0, True), (4.0, False)]
    alarm.set(None, 5.0)
    assert loop.timers[1].cancelled, "there is nothing to wait for any more"
    alarm.set(20.0, 5.0)
    assert loop.timers[2].delay == 15.0
    loop.timers[2].ring()
    assert rung == [1]
    alarm.set(20.0, 21.0)
    assert loop.timers[3].delay == 0.0, "what is due already rings at once"
    assert len(loop.timers) == 4


@pytest.mark.parametrize("nearer", [True, False])
def test_an_alarm_that_has_rung_is_set_again(nearer: bool) -> None:
    loop = Loop()
    alarm = Alarm(loop, lambda: None)  # type: ignore[arg-type]
    alarm.set(10.0, 0.0)
    loop.timers[0].ring()
    alarm.set(5.0 if nearer else 15.0, 0.0)
    assert [timer.delay for timer in loop.timers] == [10.0, 5.0 if nearer else 15.0]


def test_the_next_deadline_is_waited_for_although_it_is_set_while_the_alarm_rings() -> None:
    loop = Loop()
    alarm = Alarm(loop, lambda: alarm.set(15.0, 10.0))  # type: ignore[arg-type]
    alarm.set(10.0, 0.0)
    loop.timers[0].ring()
    assert [timer.delay for timer in loop.timers] == [10.0, 5.0]
    alarm.set(15.0, 10.0)
    assert len(loop.timers) == 2
    alarm.set(None, 10.0)
    assert loop.timers[1].cancelled
