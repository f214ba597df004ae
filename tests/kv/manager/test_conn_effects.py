"""An exception while one effect is carried out: the others are, time goes on, its hand-off alone fails."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from decode_rig import PLAN, PREFILL, Line, Rig
from kv_sides import receive

from segue.kv.errors import ErrorCode, Internal, OutOfCapacity, PeerLost
from segue.kv.ids import KVPoll, RankId, TransferId
from segue.kv.layout.content import Content
from segue.kv.peers import Peer
from segue.kv.protocol import events
from segue.kv.protocol.messages import Abort, Accepted, Failed
from segue.kv.ranks.local_rank import FENCE_AGAIN_S
from segue.kv.transport.base import PeerGone


def broken(rig: Rig, kind: type[Any], monkeypatch: pytest.MonkeyPatch) -> events.Effect:
    """An effect of the first hand-off whose carrying out raises once."""

    def bug(*_: object) -> None:
        monkeypatch.undo()
        raise RuntimeError("a bug")

    one = rig.one
    on_ranks = {
        events.PostWrite: events.PostWrite(one, 0, 1, 1, 0, ()),
        events.Relay: events.Relay(one, 0, 1, 1, 1, ()),
        events.Grant: events.Grant(one, 0, 1, (0,)),
        events.Fence: events.Fence(one, 0, RankId(PREFILL), 1),
        events.ComputeChecksum: events.ComputeChecksum(one, 0, 1, Content((), ())),
    }
    told = {
        events.Phase: events.Phase(one.received_as, KVPoll.TRANSFERRING),
        events.Release: events.Release(one.received_as),
        events.Quarantined: events.Quarantined(one.received_as, 1),
    }
    if kind is events.Send:
        rig.line.breaks = one
        return events.Send(PREFILL, Abort(one))
    if kind in on_ranks:
        monkeypatch.setattr(rig.manager._ranks, "carry_out", bug)
        return on_ranks[kind]
    if kind in told:
        rig.breaks_change = kind
        return told[kind]
    monkeypatch.setattr(rig.manager.queries, "carry_out", bug)
    key = one.received_as
    return events.RoomSettled(key) if kind is events.RoomSettled else kind(key, 1.0)


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()


#: What a hand-off says to its room or receiver, which have heard it: nothing is carried out.
CARRIED_OUT = [kind for kind in get_args(events.Effect) if kind not in get_args(events.HandoffEffect)]


@pytest.mark.parametrize("kind", CARRIED_OUT, ids=lambda kind: kind.__name__)
def test_a_bug_in_one_effect_costs_no_other_hand_off_an_effect_or_its_deadline(
    rig: Rig, kind: type[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = rig.manager._alarm._timer
    assert before is not None
    before.cancel()
    rig.manager._alarm._timer = None
    effect = broken(rig, kind, monkeypatch)
    rig.handle(effect, events.Send(PREFILL, Abort(rig.other)), events.Release(rig.other.received_as))
    assert [message.transfer for message in rig.line.sent][-1:] == [rig.other]
    assert rig.of(rig.other, events.Release), "a later effect was dropped"
    assert rig.manager._alarm._timer is not None, "time stands still"
    rig.line.breaks = None
    for _ in range(4):
        rig.turn()
    assert not rig.of(rig.other, events.Phase), "another hand-off felt it"
    ends = [phase for phase in rig.of(rig.one, events.Phase) if phase.phase is KVPoll.FAILED]
    if kind is events.Fence or kind is events.ComputeChecksum:
        return  # what these are answered is the next tests'
    assert [end.error.code for end in ends] == [ErrorCode.INTERNAL]
    # A peer may still write into its pages: they are kept until the fence says otherwise.
    assert rig.of(rig.one, events.Quarantined)


def test_a_documented_refusal_of_the_transport_keeps_its_code(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        monkeypatch.undo()
        raise OutOfCapacity("too many grants")

    monkeypatch.setattr(rig.manager._ranks, "carry_out", full)
    rig.handle(events.Grant(rig.one, 0, 1, (0,)))
    for _ in range(4):
        rig.turn()
    ends = [phase for phase in rig.of(rig.one, events.Phase) if phase.phase is KVPoll.FAILED]
    assert [end.error.code for end in ends] == [ErrorCode.OUT_OF_CAPACITY]


def test_a_checksum_that_cannot_be_asked_for_is_answered(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[events.Event] = []
    effect = broken(rig, events.ComputeChecksum, monkeypatch)
    rig.handle(effect)
    normal = rig.manager.exchange.handle
    rig.manager.exchange.handle = lambda event, now: heard.append(event) or normal(event, now)  # type: ignore[method-assign, func-returns-value]
    for _ in range(3):
        rig.turn()
    [answer] = [event for event in heard if isinstance(event, events.ChecksumReady)]
    assert (answer.transfer, answer.tag) == (rig.one, 1)
    assert answer.error is not None
    assert answer.error.code is ErrorCode.INTERNAL


def test_a_fence_that_the_transport_did_not_take_is_asked_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    later: list[tuple[float, Any, tuple[Any, ...]]] = []
    effect = broken(rig, events.Fence, monkeypatch)
    loop: Any = rig.manager.io.loop
    normal = loop.call_later
    loop.call_later = lambda delay, call, *args: (
        later.append((delay, call, args)) or normal(delay, call, *args)
    )
    rig.handle(effect)
    [(delay, call, args)] = [item for item in later if item[2][:1] == (effect,)]
    assert delay == FENCE_AGAIN_S
    rig.manager._ranks.choose(PREFILL, "another", ((0, 0),), ())
    broken(rig, events.Fence, monkeypatch)
    call(*args)
    assert [item[2] for item in later if item[2][:1] == (effect,)] == [args, args]
    asked: list[Any] = []
    rig.manager._ranks.carry_out = lambda *what: asked.append(what)  # type: ignore[method-assign, assignment]
    call(*args)
    [(again, route)] = asked
    assert (again, route.transport) == (effect, "fake")


def test_a_fence_that_raises_when_a_rank_of_the_peer_has_died_costs_no_other_one_its_proof(rig: Rig) -> None:
    rig.manager._ranks.choose(PREFILL, "fake", ((0, 0), (1, 0)), ())
    fences = [events.Fence(rig.one, 0, RankId(PREFILL), 1), events.Fence(rig.other, 0, RankId(PREFILL), 2)]
    rig.manager.exchange.unproven_fences = lambda *_: fences  # type: ignore[method-assign]
    asked: list[tuple[events.Fence, str]] = []

    def carry_out(fence: events.Fence, route: Any) -> None:
        asked.append((fence, route.transport))
        if fence is fences[0]:
            raise RuntimeError("a bug")

    rig.manager._ranks.carry_out = carry_out  # type: ignore[method-assign, assignment]
    gone = PeerGone(RankId(PREFILL, 1), True, PeerLost("gone"))
    rig.moved(0, "fake", gone)
    assert asked == [(fence, "fake") for fence in fences]


def test_a_peer_that_the_protocol_refuses_hears_so_and_does_not_stay_half_joined(rig: Rig) -> None:
    def bug(event: object, now: float) -> None:
        raise RuntimeError("a bug")

    rig.manager.exchange.handle = bug  # type: ignore[method-assign, assignment]
    rig.happens(events.PeerUp(PREFILL, PLAN, "fake"))
    assert type(rig.line.closed_with[-1]) is Internal


def test_a_last_word_that_was_not_sent_ends_the_session_so_that_the_peer_asks_again(rig: Rig) -> None:
    over = TransferId(99, 0, PREFILL, rig.manager.config.me)
    rig.happens(events.EndRoom(rig.other.received_as, PeerLost("x").info))
    assert rig.manager.exchange.phase(rig.other) is KVPoll.FAILED, "it waits for a proof"
    for transfer in (over, rig.other):
        rig.line.breaks = transfer
        rig.line.closed_with.clear()
        rig.handle(events.Send(PREFILL, Abort(transfer)))
        assert [type(said) for said in rig.line.closed_with] == [Internal]
    rig.line.closed_with.clear()
    rig.line.breaks = rig.one
    rig.handle(events.Send(PREFILL, Accepted(rig.one)))
    assert rig.line.closed_with == [], "this one ends, and with words of its own"


def test_a_bug_that_a_peer_s_message_meets_ends_its_hand_off_on_both_sides(rig: Rig) -> None:
    exchange: Any = rig.manager.exchange
    normal = exchange.handle

    def bug(event: object, now: float) -> None:
        exchange.handle = normal
        raise RuntimeError("a bug")

    exchange.handle = bug
    rig.happens(events.Received(PREFILL, Accepted(rig.one)))
    rig.turn()
    [end] = rig.of(rig.one, events.Phase)
    assert (end.phase, end.error.code) == (KVPoll.FAILED, ErrorCode.INTERNAL)
    assert [type(said) for said in rig.line.sent[-2:]] == [Failed, Abort]
    assert not rig.of(rig.other, events.Phase)


def test_what_was_decided_before_a_bug_is_carried_out(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    exchange: Any = rig.manager.exchange
    normal = exchange._receptions.end

    def ends_and_breaks(event: events.EndRoom) -> None:
        normal(event)
        monkeypatch.undo()
        raise RuntimeError("a bug")

    monkeypatch.setitem(exchange._handlers, events.EndRoom, ends_and_breaks)
    rig.happens(events.EndRoom(rig.one.received_as, PeerLost("x").info))
    rig.turn()
    [end] = rig.of(rig.one, events.Phase)
    assert (end.phase, end.error.code) == (KVPoll.FAILED, ErrorCode.PEER_LOST)
    assert [type(said) for said in rig.line.sent[-2:]] == [Failed, Abort]


def test_the_timer_waits_for_the_nearest_deadline_also_when_it_came_last(rig: Rig) -> None:
    """The other two hand-offs have a minute."""
    transfer = TransferId(9, 0, PREFILL, rig.manager.config.me)
    over = asyncio.Event()
    handle = receive(rig.manager, transfer, 4, 0.01)
    rig.on_change = lambda: over.set() if handle.poll().terminal else None
    rig.turn()
    rig.manager.io.loop.run_until_complete(asyncio.wait_for(over.wait(), 60))
    assert handle.error is not None
    assert handle.error.code is ErrorCode.DEADLINE_EXCEEDED


def test_the_late_end_of_a_session_is_not_the_end_of_the_one_after_it(rig: Rig) -> None:
    old, new = rig.line, Line()
    rig.manager._peers[PREFILL] = Peer(new, rig.manager.compatibility.info, ["fake"], PLAN, rig.peer.chosen)  # type: ignore[arg-type]
    rig.manager.closed(old, OutOfCapacity("x"))  # type: ignore[arg-type]
    assert rig.manager._peers[PREFILL].session is new  # type: ignore[comparison-overlap]
    assert not rig.changes


def test_a_peer_without_a_session_is_a_problem_unless_the_end_of_its_session_is_still_to_be_told(
    rig: Rig,
) -> None:
    """Between `Session.close` and `closed` lies a turn of the loop, in which nothing is wrong."""
    [found] = rig.manager.problems()
    assert found == f"no session for peer {PREFILL}"
    rig.line.closing = True
    assert rig.manager.problems() == []


def test_what_is_wrong_with_the_tables_of_hand_offs_is_a_problem(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_self: object) -> None:
        raise Internal("a hand-off without a deadline")

    rig.line.closing = True
    monkeypatch.setattr(type(rig.manager.exchange), "check_integrity", broken)
    assert rig.manager.problems() == ["a hand-off without a deadline"]
