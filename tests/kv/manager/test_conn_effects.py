"""An exception while one effect is carried out: the others are, time goes on, its hand-off alone fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, get_args

import pytest
from test_conn_refusal import SPEC
from test_manager import receive

from segue.kv.config import KVConfig, LeaderRuntime
from segue.kv.errors import ErrorCode, Internal, OutOfCapacity, PeerLost, SegueError
from segue.kv.ids import Incarnation, KVPoll, LeaderId, RankId, Role, TransferId
from segue.kv.layout.content import Content
from segue.kv.layout.planner import plan_pair
from segue.kv.manager import KVManager
from segue.kv.peers import PathSpeed, Peer
from segue.kv.protocol import events
from segue.kv.protocol.messages import Abort, Accepted, Failed
from segue.kv.ranks.local_rank import FENCE_AGAIN_S
from segue.kv.transport.base import PeerGone, TransportEvent
from segue.kv.transport.memory.pool_memory import allocate

PREFILL = LeaderId(Incarnation("a" * 32))
PLAN = plan_pair([SPEC], [SPEC])


class StillIo:
    """An I/O thread without a thread: tests say when its loop turns."""

    def __init__(self, _on_error: object) -> None:
        self.loop = asyncio.new_event_loop()
        self.running = False

    def post(self, function: Callable[..., object], *args: object) -> None:
        self.loop.call_soon(function, *args)

    def yield_gil(self) -> None: ...
    def start(self) -> None: ...

    def turn(self) -> None:
        self.loop.run_until_complete(asyncio.sleep(0))

    def stop(self) -> None:
        self.loop.close()


class Line:
    """A session that takes everything, or breaks on messages of one hand-off."""

    breaks: TransferId | None = None
    closing = False

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        if message.transfer == self.breaks:
            raise RuntimeError("a bug")
        self.sent.append(message)

    def close(self, error: object = None) -> None:
        self.sent.append(error)


class Rig:
    """A decode manager with two open hand-offs; whatever it is asked for the first one can be broken."""

    def __init__(self) -> None:
        self.memory = allocate(SPEC.nbytes)
        self.changes: list[Any] = []
        self.on_change: Callable[[], object] = lambda: None
        self.breaks_change: type[Any] | None = None
        config = KVConfig(role=Role.DECODE, model="m", spec=SPEC, transports=["fake"])
        #: the losses of ranks that the owner of the manager was told
        self.losses: list[SegueError] = []
        self.manager = KVManager(
            config,
            self.memory,
            self.changed,
            on_rank_lost=self.losses.append,
            runtime=LeaderRuntime(io=StillIo),  # type: ignore[arg-type]
        )
        self.line = Line()
        info = self.manager.compatibility.info
        self.peer = Peer(self.line, info, "fake", PathSpeed("fake"), PLAN)  # type: ignore[arg-type]
        self.manager._peers[PREFILL] = self.peer
        self.manager._ranks.choose(PREFILL, "fake", ((0, 0),), ())
        self.happens(events.PeerUp(PREFILL, PLAN, "fake"))
        self.one, self.other = self.opened(5), self.opened(6)
        self.changes.clear()

    def opened(self, room: int) -> TransferId:
        transfer = TransferId(room, 0, PREFILL, self.manager.config.me)
        handle = receive(self.manager, transfer, 4, 60)
        self.turn()
        assert handle.poll() is KVPoll.WAITING_FOR_INPUT
        handle.publish([room - 5])
        self.turn()
        return transfer

    def turn(self) -> None:
        self.manager.io.turn()  # type: ignore[attr-defined]

    def happens(self, event: events.Event) -> None:
        """The manager handles `event`."""
        self.manager.post(event)
        self.turn()

    def moved(self, rank: int, transport: str, event: TransportEvent) -> None:
        """A rank reports an event of one of its transports."""
        self.manager.moved(rank, transport, event)
        self.turn()

    def changed(self, change: Any) -> None:
        one = getattr(self, "one", None)
        if one is not None and change.key == one.received_as and type(change) is self.breaks_change:
            self.breaks_change = None
            raise RuntimeError("a bug")
        self.changes.append(change)
        self.on_change()

    def handle(self, *effects: events.Effect) -> None:
        """Something happens that has these effects."""
        exchange: Any = self.manager.exchange
        normal = exchange.handle

        def once(event: events.Event, now: float) -> list[events.Effect]:
            exchange.handle = normal
            return list(effects)

        exchange.handle = once
        self.manager._handle(events.Tick())  # what it leaves for the next turn is still to come

    def of(self, transfer: TransferId, kind: type[Any]) -> list[Any]:
        key = transfer.received_as
        return [change for change in self.changes if change.key == key and type(change) is kind]


def broken(rig: Rig, kind: type[Any], monkeypatch: pytest.MonkeyPatch) -> events.Effect:
    """An effect of the first hand-off whose carrying out raises once."""

    def bug(*_: object) -> None:
        monkeypatch.undo()
        raise RuntimeError("a bug")

    one = rig.one
    match kind.__name__:
        case "Send":
            rig.line.breaks = one
            return events.Send(PREFILL, Abort(one))
        case "PostWrite":
            monkeypatch.setattr(rig.manager._ranks, "carry_out", bug)
            return events.PostWrite(one, 0, 1, 1, 0, ())
        case "Relay":
            monkeypatch.setattr(rig.manager._ranks, "carry_out", bug)
            return events.Relay(one, 0, 1, 1, 1, ())
        case "Grant":
            monkeypatch.setattr(rig.manager._ranks, "carry_out", bug)
            return events.Grant(one, 0, 1, (0,))
        case "Fence":
            monkeypatch.setattr(rig.manager._ranks, "carry_out", bug)
            return events.Fence(one, 0, RankId(PREFILL), 1)
        case "ComputeChecksum":
            monkeypatch.setattr(rig.manager._ranks, "carry_out", bug)
            return events.ComputeChecksum(one, 0, 1, Content((), ()))
        case "Phase":
            rig.breaks_change = kind
            return events.Phase(one.received_as, KVPoll.TRANSFERRING)
        case "Release":
            rig.breaks_change = kind
            return events.Release(one.received_as)
        case "Quarantined":
            rig.breaks_change = kind
            return events.Quarantined(one.received_as, 1)
        case "AskRoom" | "RegisterRoom" | "RoomSettled":
            monkeypatch.setattr(rig.manager.queries, "carry_out", bug)
            key = one.received_as
            return events.RoomSettled(key) if kind is events.RoomSettled else kind(key, 1.0)
        case _:
            raise AssertionError(f"no way to break {kind.__name__} yet")


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.manager.close()
    made.memory.close()


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


def test_a_closed_manager_asks_for_no_fence_again(rig: Rig) -> None:
    asked: list[Any] = []
    rig.manager._ranks.carry_out = lambda *what: asked.append(what)  # type: ignore[method-assign, assignment]
    fence = events.Fence(rig.one, 0, RankId(PREFILL), 1)
    for closed in (False, True):
        rig.manager._closed = closed
        rig.manager._fence_again(fence, None)
        assert asked == [(fence, None)]
    rig.manager._closed = False


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
    assert type(rig.line.sent[-1]) is Internal


def test_a_last_word_that_was_not_sent_ends_the_session_so_that_the_peer_asks_again(rig: Rig) -> None:
    over = TransferId(99, 0, PREFILL, rig.manager.config.me)
    rig.happens(events.EndRoom(rig.other.received_as, PeerLost("x").info))
    assert rig.manager.exchange.phase(rig.other) is KVPoll.FAILED, "it waits for a proof"
    for transfer in (over, rig.other):
        rig.line.breaks = transfer
        rig.line.sent.clear()
        rig.handle(events.Send(PREFILL, Abort(transfer)))
        assert [type(said) for said in rig.line.sent] == [Internal]
    rig.line.sent.clear()
    rig.line.breaks = rig.one
    rig.handle(events.Send(PREFILL, Accepted(rig.one)))
    assert rig.line.sent == [], "this one ends, and with words of its own"


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
    old.peer = type("P", (), {"role": Role.PREFILL, "leader": PREFILL})()  # type: ignore[attr-defined]
    rig.manager._peers[PREFILL] = Peer(new, rig.manager.compatibility.info, "fake", PathSpeed("fake"), PLAN)  # type: ignore[arg-type]
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
