"""The tables of the machines, and what a bug in a handler may cost; what each event does is in `scripts/`."""

from __future__ import annotations

from typing import Any

import pytest
from handoff_world import CLIENT, PROMPT, Case, World, kinds, peer_up, pool_spec, receive
from script_driver import Desk

from segue.kv.errors import (
    ErrorCode,
    MetadataMismatch,
    SegueError,
)
from segue.kv.ids import ChecksumMode, Incarnation, KVPoll, LeaderId, RankId, Role, Span, TransferId
from segue.kv.layout.planner import PairPlan
from segue.kv.limits import Limits
from segue.kv.protocol import events
from segue.kv.protocol import receiver as receiver_module
from segue.kv.protocol.events import Turn
from segue.kv.protocol.exchange import Exchange
from segue.kv.protocol.lease import LEASE_TABLE, Lease
from segue.kv.protocol.machine import IllegalEvent, Machine, MachineArgs
from segue.kv.protocol.messages import (
    Abort,
    Accepted,
    ChunkPosted,
    Committed,
    Destination,
    Drained,
    Failed,
    Gone,
    Metadata,
    Moved,
)
from segue.kv.protocol.receiver import ReceiverMachine, ReceiverState
from segue.kv.protocol.sender import SenderMachine
from segue.kv.protocol.tally import Tally

# ---- the tables themselves ---------------------------------------------------------------------


HALVES: list[type[Machine]] = [SenderMachine, ReceiverMachine]


def a_machine(kind: type[Machine], world: World) -> Machine:
    exchange = world.prefill.exchange
    turn, transfer = Turn(), world.new_transfer()
    link = exchange.links[world.decode.me]
    args = MachineArgs(
        exchange.local, turn, lambda: 1, lambda _: None, transfer, world.decode.me, link, 1, 1.0
    )
    if issubclass(kind, ReceiverMachine):
        return kind(args, b"", inferred=False)
    assert issubclass(kind, SenderMachine)
    return kind(args, a_destination(transfer, link.plan.hash(1, 0, 1)))


def a_destination(transfer: TransferId, plan_hash: int) -> Destination:
    """One of a prompt of one token."""
    return Destination(
        transfer=transfer,
        epoch=1,
        budget_s=1.0,
        prompt_tokens=1,
        prefix_tokens=0,
        pages=[0],
        transport="fake",
        plan_hash=plan_hash,
    )


def one_of_each(w: World) -> list[object]:
    """Every event that a machine may be given."""
    t = w.new_transfer()
    return [
        w.prefill.exchange.links[w.decode.me],
        events.Publish(t.received_as, (), 0),
        events.SendChunk(t.sent_as, Span(0, 1), (0,)),
        events.SendMetadata(t.sent_as, b"1"),
        events.AbortTransfer(t, CLIENT),
        events.PeerDown(w.decode.me, CLIENT),
        events.WriteLanded(t, 0, 0, 0.0),
        events.WriteBroken(t, 0, 0, CLIENT),
        events.ChecksumReady(t, 0, 0, 0),
        events.FenceDone(t, 0, RankId(t.decode), True),
        events.Granted(t, 0),
        events.Tick(),
        a_destination(t, 0),
        Accepted(t),
        Moved(t, 0),
        ChunkPosted(transfer=t, source=0, target=0, sequence=0, span=Span(0, 0), nbytes=0, final=True),
        Metadata(transfer=t, prompt_tokens=1, content=b"1"),
        Committed(t),
        Failed(t, CLIENT),
        Abort(t),
        Drained(t),
        Gone(t),
    ]


@pytest.mark.parametrize("kind", HALVES)
def test_an_event_without_a_row_is_refused_and_nothing_changes(kind: type[Machine]) -> None:
    world = World()
    known = {type(event) for event in one_of_each(world)}
    refused = 0
    for state, table in kind.TABLE.items():
        assert set(table) <= known
        for event in one_of_each(world):
            if type(event) in table:
                continue
            machine = a_machine(kind, world)
            machine.state = state
            with pytest.raises(IllegalEvent, match="not legal in"):
                machine.take(event)
            assert machine.state is state
            assert machine.turn.effects == []
            refused += 1
    assert refused > 50


@pytest.mark.parametrize("kind", HALVES)
def test_the_tables_are_closed_monotone_and_end(kind: type[Machine]) -> None:
    assert set(kind.STATES) == set(kind.TABLE)
    assert set(kind.FOLLOWS) <= set(kind.TABLE)
    for before, after in moves(kind):
        phase, then = kind.STATES[before][0], kind.STATES[after][0]
        assert then is phase or then is KVPoll.FAILED or then > phase
        assert not phase.terminal or then is phase, "a terminal phase is final"
    for state, table in kind.TABLE.items():
        phase, lease = kind.STATES[state]
        assert bool(table) != (lease is Lease.RELEASED)
        if not phase.terminal:
            for end in (events.AbortTransfer, events.Tick, events.PeerDown, Failed, Gone):
                assert all(kind.STATES[after][0] is KVPoll.FAILED for after in table[end][1:])
    for start in kind.FOLLOWS:
        state, seen = start, set()
        while state in kind.FOLLOWS:
            assert state not in seen, "what follows by itself never comes to an end"
            seen.add(state)
            state = kind.FOLLOWS[state][2]


def moves(kind: type[Machine]) -> set[tuple[Any, Any]]:
    """Every state with every next one, by an event or by itself."""
    found = {(s, after) for s, table in kind.TABLE.items() for row in table.values() for after in row[1:]}
    return found | {(state, follow[2]) for state, follow in kind.FOLLOWS.items()}


@pytest.mark.parametrize("kind", HALVES)
def test_no_move_frees_pages_that_somebody_may_touch_without_completion_or_proof(
    kind: type[Machine],
) -> None:
    for before, after in moves(kind):
        lease, then = kind.STATES[before][1], kind.STATES[after][1]
        assert then is lease or then in LEASE_TABLE[lease].values(), (before, after)
        if lease is Lease.PUBLISHED and then is Lease.RELEASED:
            assert kind.STATES[after][0] is KVPoll.SUCCESS
        if lease is Lease.QUARANTINED and then is Lease.RELEASED:
            assert kind.FOLLOWS[before][2] is after
            assert not any(after in row[1:] for row in kind.TABLE[before].values())
    assert not LEASE_TABLE[Lease.RELEASED]


# ---- epochs ----------------------------------------------------------------


def test_the_epochs_of_two_leaders_of_one_incarnation_differ() -> None:
    epochs = set()
    peer, spec = LeaderId(Incarnation("a" * 32)), pool_spec(24, 4)
    for rank in (0, 1):
        me = LeaderId(Incarnation("b" * 32), rank)
        exchange = Exchange(Role.DECODE, me, "here", Limits(), "fake")
        transfer = TransferId(1, 0, peer, me)
        exchange.handle(peer_up(peer, spec), 0.0)
        exchange.handle(receive(transfer, 4, 9.0), 0.0)
        effects = exchange.handle(events.Publish(transfer.received_as, (0,), 0), 0.0)
        epochs |= {e.epoch for e in effects if isinstance(e, events.Grant)}
    assert len(epochs) == 2


def test_a_role_without_hand_offs_has_no_exchange() -> None:
    with pytest.raises(IllegalEvent):
        Exchange(Role.FRONTEND, LeaderId(Incarnation("a" * 32)), "x", Limits(), "fake")


def test_epochs_rise_are_never_zero_and_differ_between_incarnations() -> None:
    seen: list[int] = []
    for _ in range(2):
        w = World()
        w.births += len(seen)
        w.crash(Role.DECODE)
        w.notice()
        w.notice()
        w.connect()
        epochs = []
        for _ in range(3):
            job = w.open_receiver(w.new_transfer(), PROMPT)
            w.publish(job)
            epochs.append(max(epoch for _, epoch in w.decode.epochs))
        assert epochs == sorted(set(epochs))
        seen += epochs
    assert len(set(seen)) == 6
    assert all(0 < epoch < 2**64 for epoch in seen)


def test_an_epoch_belongs_to_its_peer_as_long_as_its_hand_off_holds_pages() -> None:
    desk = Desk("new d\nOpenReceiver; Publish\nOpenReceiver p1 room=8; Publish 4,5,6 room=8 of=p1")
    d = desk.nodes["d"]
    mine, other = desk.transfer(d, {}), desk.transfer(d, {"room": "8", "of": "p1"})
    epoch = {transfer: epoch for (_, epoch), transfer in d.granted.items()}[mine]
    assert d.exchange.transfer_of(mine.prefill, epoch) == mine
    assert d.exchange.transfer_of(mine.decode, epoch) == mine, "decode's ranks pass on under it"
    assert d.exchange.transfer_of(other.prefill, epoch) is None, "it is not theirs to write for"
    assert d.exchange.transfer_of(mine.prefill, epoch + 100) is None
    desk.do("EndRoom")
    assert d.exchange.transfer_of(mine.prefill, epoch) == mine, "not yet proven"
    desk.do("FenceDone")
    assert d.exchange.transfer_of(mine.prefill, epoch) is None


def test_an_epoch_of_prefill_is_one_of_the_decode_that_gave_it() -> None:
    """Another decode may give the same number: it is another epoch. One that was refused is none."""
    desk = Desk("new p\nExpectRoom; ExpectRoom room=8; d says Destination epoch=7")
    p = desk.nodes["p"]
    mine, other = desk.transfer(p, {}), desk.transfer(p, {"room": "8", "of": "e"})
    assert p.exchange.transfer_of(mine.decode, 7) == mine
    assert p.exchange.transfer_of(other.decode, 7) is None
    desk.do("d says Destination room=8 epoch=9 plan_hash=1; e says Destination room=8 epoch=7")
    assert p.exchange.transfer_of(other.decode, 7) == other
    assert p.exchange.transfer_of(mine.decode, 7) == mine
    assert p.exchange.transfer_of(mine.decode, 9) is None


def test_the_tally_itself_refuses_metadata_of_another_transfer() -> None:
    w = Case().waiting()
    machine = w.decode.exchange.machines[w.transfer]
    with pytest.raises(MetadataMismatch, match="came for"):
        machine.tally.note_metadata(w.metadata(transfer=w.new_transfer()))
    assert machine.tally.metadata is None


def test_the_deadline_heap_does_not_grow_with_what_is_over() -> None:
    desk = Desk("new d max_transfers=8\nOpenReceiver deadline=1")  # its entry stays on top: nothing is popped
    desk.do("OpenReceiver room=1000..1499; EndRoom room=1000..1499")
    assert desk.nodes["d"].exchange.sizes()["deadlines"] <= 64 + 2 * 9


# ---- one hand-off's bug is its own -------------------------------------------------------------


def test_an_exception_in_one_hand_off_fails_that_one_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    w = Case().waiting()
    other = w.new_transfer()
    healthy = w.open_sender(other, PROMPT)
    receiver = w.open_receiver(other, PROMPT)
    w.publish(receiver)
    w.settle()

    def explode(*args: object) -> None:
        raise ZeroDivisionError("planted")

    machine = w.prefill.exchange.machines[w.transfer]
    monkeypatch.setattr(type(machine.plan), "blocks", explode)
    w.send_chunk(w.s, PROMPT)
    monkeypatch.undo()
    assert w.s.errors[0].code is ErrorCode.INTERNAL
    assert "ZeroDivisionError" in w.s.errors[0].text
    assert w.prefill.exchange.counters["internal_errors"] == 1
    w.work()
    assert healthy.phases[-1] is receiver.phases[-1] is KVPoll.SUCCESS
    assert w.r.errors == w.s.errors  # the record reached decode unchanged


@pytest.mark.parametrize("half", [Role.PREFILL, Role.DECODE])
def test_a_handler_that_breaks_in_its_middle_has_posted_and_granted_nothing(
    half: Role, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its state stays one whose pages count as untouched, and they are free at once: so they must be."""

    def explode(*args: object) -> None:
        raise ZeroDivisionError("planted")

    w = Case(kv_checksum=ChecksumMode.FULL)
    if half is Role.PREFILL:
        w.waiting()
        monkeypatch.setattr(PairPlan, "source_content", explode)
        w.send_chunk(w.s, PROMPT)
        expected = ["FAILED", "Failed", "Drained", "Release"]
    else:
        w.open()
        monkeypatch.setattr(receiver_module, "Tally", explode)
        w.publish(w.r)
        expected = ["FAILED", "Declined", "Release"]
    said = kinds([e for side, e in w.log if side == f"  {half.value}"])  # type: ignore[misc]
    assert said[-len(expected) :] == expected
    seen = [type(e) for _, e in w.log]
    assert (events.PostWrite if half is Role.PREFILL else events.Grant) not in seen


def test_a_bug_in_what_follows_takes_back_nothing_of_what_was_done_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its state has moved by then: what belongs to it is carried out, or it would never be."""

    class Broken(dict[Any, Any]):
        def __bool__(self) -> bool:
            raise ZeroDivisionError("planted")

    w = Case().waiting()
    w.from_prefill(w.metadata())
    monkeypatch.setattr(Tally, "last_wire_s", property(lambda _: 1 / 0))
    effects = w.from_prefill(w.chunk())
    assert kinds(effects) == ["TRANSFERRING", "FAILED", "Failed", "Abort", "Fence", "Quarantined"]
    w = Case().in_flight()
    w.abort(w.prefill, w.s)
    machine = w.prefill.exchange.machines[w.transfer]
    machine._reading = Broken()
    assert kinds(w.tell(w.prefill, w.fence_done(w.prefill))) == ["Drained"]
    assert w.sender_state == "DRAINED"


def test_integrity_checks_see_a_broken_table() -> None:
    w = Case().waiting()
    exchange = w.decode.exchange
    machine = exchange.machines[w.transfer]
    machine.state = ReceiverState.SUCCESS
    with pytest.raises(SegueError, match="has ended but is kept"):
        exchange.check_integrity()
    machine.state = ReceiverState.QUARANTINED
    with pytest.raises(SegueError, match="failed without an error"):
        exchange.check_integrity()
    machine.state = ReceiverState.PUBLISHED
    exchange.check_integrity()
    exchange._deadlines.cancel(machine.timer)
    with pytest.raises(SegueError, match="no deadline"):
        exchange.check_integrity()
