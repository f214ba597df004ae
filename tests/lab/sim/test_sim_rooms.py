"""Rooms without a placement in the simulator: each rule's check can fail, and each story can be played."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from msgspec import structs

from segue.kv.errors import AbortedByClient, BootstrapTimeout, ErrorInfo, TransferFailed
from segue.kv.ids import Incarnation, KVPoll, LeaderId, RoomKey, Span, TransferId
from segue.kv.limits import Limits
from segue.kv.protocol import events
from segue.kv.protocol.messages import Abort, Accepted, Committed, Declined, Destination, Failed, Gone, Moved
from segue_lab.sim.room_checks import RULES, RoomChecks
from segue_lab.sim.room_plans import STORIES
from segue_lab.sim.run import load
from segue_lab.sim.scenario import make_scenario
from segue_lab.sim.sim_state import SimState
from segue_lab.sim.world import Violation

ME, ONE, TWO = (LeaderId(Incarnation(letter * 32)) for letter in "abc")
KEY = RoomKey(7)
WHY = TransferFailed("it broke", origin="here", phase="BOOTSTRAPPING").info


def transfer(attempt: int = 0, decode: LeaderId = ONE) -> TransferId:
    return TransferId(7, attempt, ME, decode)


def destination(of: TransferId, claim: bytes = b"it", **changes: Any) -> Destination:
    good = Destination(
        transfer=of,
        epoch=1,
        budget_s=9.0,
        prompt_tokens=4,
        prefix_tokens=0,
        pages=[1],
        transport="tcp",
        plan_hash=0,
        claim=claim,
    )
    return structs.replace(good, **changes)


def refused(of: TransferId) -> list[events.Effect]:
    return [events.Send(of.decode, Failed(of, WHY)), events.Send(of.decode, Gone(of))]


class Bench:
    """The checks, and prefill and decode leaders that do what a test says. A room is open."""

    def __init__(self, **expected: Any) -> None:
        state = SimState(load(0), records=False)
        here = {"me": ME, "name": "prefill", "limits": Limits(), "jumped_at": -1.0}
        links = {ONE: None, TWO: None}
        self.node: Any = SimpleNamespace(
            **here, exchange=SimpleNamespace(links=links, rooms=SimpleNamespace(rooms={}))
        )
        self.decodes: Any = {me: SimpleNamespace(me=me, name="decode", alive=True) for me in (ONE, TWO)}
        state.by_leader.update(self.decodes)
        self.checks = RoomChecks(state, {})
        opening = {"key": KEY, "prompt_tokens": 4, "deadline": 9.0, "claim": b"it", **expected}
        self.opens = events.ExpectRoom(**opening)
        self.does(self.opens)

    def does(self, event: Any, *effects: Any) -> None:
        self.checks.prefill(self.node, event, effects)

    def hears(self, message: Any, *effects: Any) -> None:
        self.does(events.Received(message.transfer.decode, message), *effects)

    def binds(self, of: TransferId, **changes: Any) -> None:
        self.hears(destination(of, **changes), events.Send(of.decode, Accepted(of)))

    def commits(self, of: TransferId) -> None:
        self.checks.decode(self.decodes[of.decode], object(), [events.HandoffPhase(of, KVPoll.SUCCESS)])

    def ends(self, event: Any, error: ErrorInfo = WHY, *more: Any) -> None:
        self.does(event, *more, events.Phase(KEY, KVPoll.FAILED, error))


def fails(of: TransferId) -> events.HandoffPhase:
    return events.HandoffPhase(of, KVPoll.FAILED, WHY)


def ended_late_without_a_timeout(b: Bench) -> None:
    b.ends(events.Tick())


def bound_with_another_claim(b: Bench) -> None:
    b.binds(transfer(), claim=b"other")


def ended_by_another_claim(b: Bench) -> None:
    b.hears(destination(transfer(), b"other"), *refused(transfer()), events.Phase(KEY, KVPoll.FAILED, WHY))


def ended_by_the_end_of_another_claim(b: Bench) -> None:
    later = transfer(1)
    b.hears(destination(later, b"other"), *refused(later))
    b.ends(events.Received(ONE, Abort(later)))


def bound_twice(b: Bench) -> None:
    b.binds(transfer())
    b.binds(transfer(0, TWO))


def replaced_by_a_number(b: Bench) -> None:
    b.binds(transfer())
    b.hears(destination(transfer(1)), fails(transfer()))


def bound_before_the_placer_s_word(b: Bench) -> None:
    b.does(events.PlaceRoom(KEY, 1, ONE))
    b.binds(transfer(2, TWO))


def committed_twice(b: Bench) -> None:
    b.commits(transfer())
    b.commits(transfer(1, TWO))


def gone_while_draining(b: Bench) -> None:
    b.binds(transfer())
    b.hears(Abort(transfer()), fails(transfer()), events.Send(ONE, Gone(transfer())))


def written_after_gone(b: Bench) -> None:
    b.hears(destination(transfer(), b"other"), *refused(transfer()))
    b.does(events.SendChunk(KEY, Span(0, 4), (1,)), events.PostWrite(transfer(), 0, 1, 0, 0, ()))


def bound_after_gone(b: Bench) -> None:
    b.hears(destination(transfer(), b"other"), *refused(transfer()))
    b.checks._heard.clear()
    b.binds(transfer())


def moved_after_gone(b: Bench) -> None:
    b.hears(destination(transfer(), b"other"), *refused(transfer()))
    b.does(events.RoomFound(KEY, LeaderId(ME.incarnation, 1)), events.Send(ONE, Moved(transfer(), 1)))


def refused_without_gone(b: Bench) -> None:
    b.hears(destination(transfer(), b"other"), events.Send(ONE, Failed(transfer(), WHY)))


def parked_after_its_end(b: Bench) -> None:
    b.ends(events.EndRoom(KEY, WHY))
    b.hears(destination(transfer()))


def opened_again(b: Bench) -> None:
    b.ends(events.EndRoom(KEY, WHY))
    b.does(b.opens)


def waits_though_refused(b: Bench) -> None:
    other = msgspec.structs.replace(transfer(), room=KEY.room + 1)
    b.hears(destination(other))
    b.does(events.RefuseRoom(key=other.sent_as, error=WHY, deadline=9.0))


def refused_for_another_reason(b: Bench) -> None:
    other = msgspec.structs.replace(transfer(), room=KEY.room + 1)
    b.hears(destination(other))
    b.does(
        events.RefuseRoom(key=other.sent_as, error=AbortedByClient("left").info, deadline=9.0),
        *refused(other),
    )


def parked_though_refused(b: Bench) -> None:
    other = msgspec.structs.replace(transfer(), room=KEY.room + 1)
    b.does(events.RefuseRoom(key=other.sent_as, error=WHY, deadline=9.0))
    b.hears(destination(other))


def left_waiting(b: Bench) -> None:
    b.checks._rooms.clear()
    b.hears(destination(transfer()))
    b.does(b.opens)


def sent_on_twice(b: Bench) -> None:
    decode = b.decodes[ONE]
    open_rank = LeaderId(ME.incarnation, -1)
    opening = events.OpenReceiver(key=KEY, prefill=open_rank, prompt_tokens=4, deadline=9.0)
    b.checks.decode(decode, opening, [])
    for rank in range(3):
        other = TransferId(7, 0, LeaderId(ME.incarnation, rank), ONE)
        b.checks.decode(decode, object(), [events.HandoffPhase(other, KVPoll.BOOTSTRAPPING)])


def asked_for_a_named_rank(b: Bench) -> None:
    opening = events.OpenReceiver(key=KEY, prefill=ME, prompt_tokens=4, deadline=9.0)
    b.checks.decode(b.decodes[ONE], opening, [events.AskRoom(KEY, 1.0)])


def asked_without_need(b: Bench) -> None:
    b.checks._rooms.clear()
    b.hears(destination(transfer()), events.AskRoom(KEY, 1.0))


def evicted_though_bound(b: Bench) -> None:
    b.binds(transfer())
    b.ends(events.EndRoom(KEY, WHY, unbound_s=0.0))


def bound_after_three_failures(b: Bench) -> None:
    for attempt in range(4):
        b.binds(transfer(attempt))
        b.does(events.AbortTransfer(transfer(attempt), WHY), fails(transfer(attempt)))


def bound_after_its_commit(b: Bench) -> None:
    b.binds(transfer())
    b.hears(Committed(transfer()), events.HandoffPhase(transfer(), KVPoll.SUCCESS))
    b.binds(transfer(1))


def released_while_read(b: Bench) -> None:
    b.binds(transfer())
    b.ends(events.AbortTransfer(transfer(), WHY), WHY, fails(transfer()))
    b.does(events.Tick(), events.Release(KEY))


def declined_by_a_stranger(b: Bench) -> None:
    b.ends(events.Received(TWO, Declined(transfer(0, TWO), AbortedByClient("left").info, b"other")))


def declined_though_bound(b: Bench) -> None:
    b.binds(transfer())
    b.ends(events.Received(TWO, Declined(transfer(0, TWO), AbortedByClient("left").info, b"it")))


CASES: list[tuple[int, Callable[[Bench], None]]] = [
    (1, ended_late_without_a_timeout),
    (2, bound_with_another_claim),
    (2, ended_by_another_claim),
    (2, ended_by_the_end_of_another_claim),
    (3, bound_twice),
    (3, replaced_by_a_number),
    (3, bound_before_the_placer_s_word),
    (4, committed_twice),
    (5, gone_while_draining),
    (5, written_after_gone),
    (5, bound_after_gone),
    (5, moved_after_gone),
    (5, refused_without_gone),
    (6, parked_after_its_end),
    (6, opened_again),
    (6, waits_though_refused),
    (6, refused_for_another_reason),
    (6, parked_though_refused),
    (7, left_waiting),
    (8, sent_on_twice),
    (8, asked_for_a_named_rank),
    (8, asked_without_need),
    (9, evicted_though_bound),
    (9, bound_after_three_failures),
    (9, bound_after_its_commit),
    (10, released_while_read),
    (11, declined_by_a_stranger),
    (11, declined_though_bound),
]


@pytest.mark.parametrize(("rule", "spoil"), CASES, ids=[f"{r}-{f.__name__}" for r, f in CASES])
def test_a_broken_rule_is_seen(rule: int, spoil: Callable[[Bench], None]) -> None:
    b = Bench()
    with pytest.raises(Violation) as caught:
        spoil(b)
    assert caught.value.rule == f"room {rule}", str(caught.value)


def test_each_rule_has_a_check_that_can_fail() -> None:
    assert {rule for rule, _ in CASES} == set(RULES)


def test_what_the_rules_allow_is_none() -> None:
    b = Bench(retain_s=2.0)
    b.hears(destination(transfer(2), b"other"), *refused(transfer(2)))
    b.binds(transfer())
    b.hears(destination(transfer(1, TWO)))
    b.does(
        events.PlaceRoom(KEY, 1, TWO),
        fails(transfer()),
        events.HandoffReleased(transfer()),
        events.Send(TWO, Accepted(transfer(1, TWO))),
    )
    b.hears(Committed(transfer(1, TWO)), events.HandoffPhase(transfer(1, TWO), KVPoll.SUCCESS))
    b.binds(transfer(3, TWO))
    late = BootstrapTimeout("late", origin="here", phase="BOOTSTRAPPING").info
    nobody = Bench()
    nobody.ends(events.Tick(), late)


def test_rooms_are_drawn_with_every_story_and_can_be_left_out() -> None:
    drawn = [make_scenario(seed) for seed in range(60)]
    rooms = [plan for scenario in drawn for plan in scenario.rooms]
    assert any(plan.plain for plan in rooms)
    assert len(STORIES) > 10
    claims = [claim for plan in rooms for claim in plan.claims]
    for told in (
        "wrong",
        "given_s",
        "open_rank",
        "hint",
        "repeat",
        "moved",
        "declines",
        "abort_s",
    ):
        assert any(getattr(claim, told) not in (None, False, "") for claim in claims), told
    for told in ("retain_s", "placed", "twin", "again_s", "evict_s", "close_s", "generation"):
        assert any(getattr(plan, told) not in (None, 0, "") for plan in rooms), told
    assert any(not plan.claims for plan in rooms)
    whole = next(scenario for scenario in drawn if scenario.rooms)
    name = whole.rooms[0].name
    assert [plan.name for plan in whole.only(frozenset({name})).rooms] == [name]
    assert name in whole.names
