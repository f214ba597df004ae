"""Each machine in each state, and each event that can meet it there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from handoff_world import Job, Node, World, expect, peer_up, pool_spec, receive

from segue.kv.errors import (
    AbortedByClient,
    ErrorCode,
    ErrorInfo,
    InvalidRequest,
    MetadataMismatch,
    PeerLost,
    SegueError,
    TransferFailed,
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
    Declined,
    Destination,
    Drained,
    Failed,
    Gone,
    Metadata,
    Moved,
)
from segue.kv.protocol.receiver import ReceiverMachine, ReceiverState
from segue.kv.protocol.sender import REASON_WAIT_S, SenderMachine
from segue.kv.protocol.tally import Tally

PROMPT = 10
CLIENT = AbortedByClient("client left").info


def kinds(effects: list[events.Effect]) -> list[str]:
    """Effects as short words: the type, with the message or phase it carries. What a machine says to its
    room or receiver (`events.HandoffEffect`) is left out: their own word follows."""
    words = []
    for effect in effects:
        if isinstance(effect, events.HandoffEffect):
            continue
        word = type(effect).__name__
        if isinstance(effect, events.Send):
            word = type(effect.message).__name__
        elif isinstance(effect, events.Phase):
            word = effect.phase.name
        words.append(word)
    return words


class Case(World):
    """One hand-off brought into a given state, with both halves real: `s` and `r`, once they are open."""

    s: Job
    r: Job

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.transfer = self.new_transfer()

    @property
    def sender_state(self) -> str:
        machine = self.prefill.exchange.machines.get(self.transfer)
        return machine.state.value if machine else "-"

    @property
    def receiver_state(self) -> str:
        machine = self.decode.exchange.machines.get(self.transfer)
        return machine.state.value if machine else "-"

    def open(self, prefix: int = 0) -> Case:
        self.s = self.open_sender(self.transfer, PROMPT)
        self.r = self.open_receiver(self.transfer, PROMPT, prefix)
        return self

    def early(self) -> Case:
        """A destination waits for its request."""
        self.from_decode(self.destination())
        return self

    def published(self, prefix: int = 0) -> Case:
        """Prefill has not read yet where to write."""
        self.open(prefix)
        self.publish(self.r)
        return self

    def waiting(self, prefix: int = 0) -> Case:
        self.published(prefix)
        self.deliver(Role.PREFILL)
        self.deliver(Role.DECODE)
        return self

    def transferring(self, tokens: int = 4) -> Case:
        """The first chunk's bytes have landed, and decode knows; the rest is still to come."""
        self.waiting()
        self.send_chunk(self.s, tokens)
        self.land()
        self.finish()
        self.deliver(Role.DECODE)
        return self

    def partly_sent(self) -> Case:
        """One of two layers of the first chunk is on its way."""
        self.waiting()
        self.send_layers(self.s, 4, 1)
        return self

    def sent_metadata(self) -> Case:
        self.waiting()
        self.send_metadata(self.s)
        return self

    def in_flight(self) -> Case:
        self.waiting()
        self.send_chunk(self.s, PROMPT)
        return self

    def fence_done(self, node: Node, *, proven: bool = True) -> events.FenceDone:
        """The answer of the one rank of `node` to its fence."""
        return events.FenceDone(self.transfer, 0, RankId(self.other(node).me), proven)

    def from_decode(self, message: Any) -> list[events.Effect]:
        return self.tell(self.prefill, events.Received(self.decode.me, message))

    def from_prefill(self, message: Any) -> list[events.Effect]:
        return self.tell(self.decode, events.Received(self.prefill.me, message))

    def chunk(self, **changes: Any) -> ChunkPosted:
        good = ChunkPosted(
            transfer=self.transfer,
            source=0,
            target=0,
            sequence=0,
            span=Span(0, PROMPT),
            nbytes=PROMPT * 32,
            final=True,
        )
        return msgspec.structs.replace(good, **changes)

    def destination(self, **changes: Any) -> Destination:
        """A legal destination for this transfer."""
        plan = self.prefill.exchange.links[self.decode.me].plan
        good = Destination(
            transfer=self.transfer,
            epoch=77,
            budget_s=60.0,
            prompt_tokens=PROMPT,
            prefix_tokens=0,
            pages=[3, 1, 2],
            transport="fake",
            plan_hash=plan.hash(PROMPT, 0, 3),
        )
        return msgspec.structs.replace(good, **changes)

    def metadata(self, **changes: Any) -> Metadata:
        good = Metadata(transfer=self.transfer, prompt_tokens=PROMPT, content=b"7")
        return msgspec.structs.replace(good, **changes)


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


# ---- the good way ------------------------------------------------------------------------------


def test_a_hand_off_from_open_to_success_effect_by_effect() -> None:
    w = Case()
    w.open()
    assert (w.sender_state, w.receiver_state) == ("-", "WAITING_FOR_INPUT"), "a room, and no machine yet"
    w.log.clear()
    w.publish(w.r)
    assert [type(e).__name__ for side, e in w.log if side == "  decode"] == ["Grant", "Send"]
    destination = w.queues[Role.PREFILL][0][1]
    assert destination.budget_s == pytest.approx(60.0)
    w.deliver(Role.PREFILL)
    assert (w.sender_state, w.receiver_state) == ("WAITING_FOR_INPUT", "PUBLISHED")
    w.send_chunk(w.s, 4)
    w.send_metadata(w.s)
    assert w.sender_state == "TRANSFERRING"
    assert [type(m).__name__ for _, m in w.queues[Role.DECODE]] == ["Accepted", "Metadata"]
    w.deliver(Role.DECODE)
    w.deliver(Role.DECODE)
    assert w.receiver_state == "PUBLISHED"  # metadata alone is no transfer
    w.land()
    w.finish()
    w.deliver(Role.DECODE)
    assert w.receiver_state == "TRANSFERRING"
    w.send_chunk(w.s, 6)
    w.land()
    w.finish()
    final = w.queues[Role.DECODE][0][1]
    assert kinds(w.from_prefill(final)) == ["SUCCESS", "Committed", "Fence", "Release"]
    assert w.receiver_state == "-"
    w.queues[Role.DECODE].clear()
    w.now = 2.5
    assert kinds(w.from_decode(Committed(w.transfer))) == ["SUCCESS", "Release"]
    assert w.prefill.exchange.phase(w.transfer) is KVPoll.SUCCESS
    w.come_to_rest()


def test_a_chunk_is_announced_once_when_its_layers_have_landed_in_whatever_order() -> None:
    w = Case().partly_sent()
    w.queues[Role.DECODE].clear()
    w.send_chunk(w.s, 4)
    assert [write.effect.blocks[0].rows for write in w.writes] == [2, 2], "K and V of one layer each"
    w.land(1)
    w.finish(1)
    assert not w.queues[Role.DECODE], "a layer is missing"
    w.land()
    w.finish()
    ((_, chunk),) = w.queues[Role.DECODE]
    assert (chunk.span, chunk.sequence, chunk.nbytes) == (Span(0, 4), 0, 4 * 32)
    w.send_layers(w.s, 6, 1)
    w.send_chunk(w.s, 6)
    w.send_metadata(w.s)
    w.settle()
    assert w.prefill.exchange.phase(w.transfer) is KVPoll.SUCCESS
    w.come_to_rest()


def test_a_chunk_whose_first_layers_have_landed_alone_is_not_announced() -> None:
    w = Case().partly_sent()
    w.queues[Role.DECODE].clear()
    w.tell(w.prefill, events.WriteLanded(w.transfer, 0, 0, 3.0))
    assert not w.queues[Role.DECODE], "the other layer is still to come"
    w.send_chunk(w.s, 4)
    assert not w.queues[Role.DECODE]
    w.tell(w.prefill, events.WriteLanded(w.transfer, 0, 1, 0.5))
    ((_, chunk),) = w.queues[Role.DECODE]
    assert (chunk.span, chunk.nbytes, chunk.wire_s) == (Span(0, 4), 4 * 32, 0.5)


def test_a_hand_off_that_ends_between_the_layers_of_a_chunk_waits_for_its_fence() -> None:
    w = Case().partly_sent()
    w.abort(w.prefill, w.s)
    assert w.sender_state == "DRAINING"
    assert w.s.releases == 0, "the write may still read the pages"
    w.settle()
    assert w.s.releases == 1
    w.come_to_rest()


def test_wire_time_is_from_the_first_post_to_the_last_landing() -> None:
    w = Case().waiting()
    w.now = 10.0
    w.send_chunk(w.s, 4)
    w.now = 11.0
    w.send_chunk(w.s, 6)
    w.send_metadata(w.s)
    w.tell(w.prefill, events.WriteLanded(w.transfer, 0, 1, 0.25))
    w.now = 12.5
    w.tell(w.prefill, events.WriteLanded(w.transfer, 0, 0, 2.5))
    w.now = 20.0
    w.settle()
    (end,) = [
        e for _, e in w.log if isinstance(e, events.Phase) and e.phase is KVPoll.SUCCESS and not e.metadata
    ]
    assert end.wire_s == 2.5


def test_chunks_are_announced_in_order_whatever_order_they_land_in() -> None:
    w = Case().waiting()
    for tokens in (3, 3, 4):
        w.send_chunk(w.s, tokens)
    w.queues[Role.DECODE].clear()
    for index in (2, 1, 0):
        w.land(index)
    sent = []
    for tag in (2, 0, 1):
        effects = w.tell(w.prefill, events.WriteLanded(w.transfer, 0, tag, 0.1))
        sent.append([e.message.sequence for e in effects])
    assert sent == [[], [0], [1, 2]]


@pytest.mark.parametrize("prefix", [0, 3, 4, 7, 9, 10])
def test_what_decode_has_already_is_not_sent_again(prefix: int) -> None:
    w = Case(page_tokens=(4, 3)).waiting(prefix)
    while w.send_chunk(w.s, 3):
        pass
    spans = [e.blocks for _, e in w.log if isinstance(e, events.PostWrite)]
    assert sum(b.nbytes for blocks in spans for b in blocks) == (PROMPT - prefix) * 32
    w.send_metadata(w.s)
    w.settle()
    assert w.s.phases[-1] is w.r.phases[-1] is KVPoll.SUCCESS
    w.come_to_rest()


def test_a_fully_cached_prompt_posts_no_write_and_still_ends_by_the_book() -> None:
    w = Case().waiting(prefix=PROMPT)
    w.now = 5.0
    w.send_chunk(w.s, PROMPT)
    assert not w.writes
    chunk = w.queues[Role.DECODE][-1][1]
    assert (chunk.span, chunk.nbytes, chunk.final) == (Span(PROMPT, PROMPT), 0, True)
    w.send_metadata(w.s)
    w.settle()
    assert w.s.phases[-1] is KVPoll.SUCCESS
    ends = [e for _, e in w.log if isinstance(e, events.Phase) and e.phase is KVPoll.SUCCESS]
    assert [(end.wire_s, end.nbytes) for end in ends] == [(0.0, 0)] * 2
    w.come_to_rest()


def test_publish_leaves_out_pages_after_the_prompt() -> None:
    w = Case()
    w.r = w.open_receiver(w.transfer, 8, prefix=8)
    w.tell(w.decode, events.Publish(w.transfer.received_as, (5,), 8))
    [(_, message)] = w.queues[Role.PREFILL]
    assert message.pages == []
    w = Case().open()
    w.tell(w.decode, events.Publish(w.transfer.received_as, (1, 2, 3, 4, 5), 0))
    [(_, message)] = w.queues[Role.PREFILL]
    assert message.pages == [1, 2, 3]


# ---- the engine's illegal events ---------------------------------------------------------------

Act = Callable[[Case], events.Event]


def chunk(start: int, end: int, pages: int = 3, layers: int | None = None) -> Act:
    return lambda w: events.SendChunk(
        w.transfer.sent_as, Span(start, end), tuple(range(pages)), layers=layers
    )


def publish(*pages: int, prefix: int = 0) -> Act:
    return lambda w: events.Publish(w.transfer.received_as, pages, prefix)


def metadata(w: Case) -> events.Event:
    return events.SendMetadata(w.transfer.sent_as, b"7")


def nothing(w: Case) -> Case:
    """Nobody has opened a half."""
    return w


ILLEGAL: dict[Role, dict[str, tuple[Callable[[Case], Case], Act]]] = {
    Role.PREFILL: {
        "a gap before destination": (Case.open, chunk(1, 4)),
        "no layers before destination": (Case.open, chunk(0, 4, layers=0)),
        "metadata of what nobody expects": (nothing, metadata),
        "metadata of a room that waits for its request": (Case.early, metadata),
        "metadata twice": (Case.sent_metadata, metadata),
        "chunk with a gap": (Case.waiting, chunk(1, 4)),
        "chunk again": (Case.transferring, chunk(0, 4)),
        "chunk past the end": (Case.waiting, chunk(0, 11)),
        "empty chunk": (Case.waiting, chunk(0, 0)),
        "too few pages": (Case.waiting, chunk(0, 9, pages=2)),
        "no layers": (Case.waiting, chunk(0, 4, layers=0)),
        "all layers by their number": (Case.waiting, chunk(0, 4, layers=2)),
        "layers again": (Case.partly_sent, chunk(0, 4, layers=1)),
        "another chunk than the one of which layers were sent": (Case.partly_sent, chunk(0, 5)),
        "publish at a sender": (Case.open, publish(0, 1, 2)),
        "open without a prompt": (nothing, lambda w: expect(w.transfer, 0, 9.0)),
        "chunk of nothing known": (nothing, chunk(0, 4, pages=1)),
    },
    Role.DECODE: {
        "publish again": (Case.waiting, publish(0, 1, 2)),
        "publish too few": (Case.open, publish(0, 1)),
        "publish a page twice": (Case.open, publish(0, 1, 1)),
        "publish outside the pool": (Case.open, publish(0, 1, 24)),
        "publish a long prefix": (Case.open, publish(prefix=11)),
        "open at the wrong side": (nothing, lambda w: expect(w.transfer, 1, 9.0)),
        "open without a prompt": (nothing, lambda w: receive(w.transfer, 0, 9.0)),
    },
}


@pytest.mark.parametrize(("role", "name"), [(role, name) for role in ILLEGAL for name in ILLEGAL[role]])
def test_an_illegal_event_raises_and_changes_nothing(role: Role, name: str) -> None:
    make, act = ILLEGAL[role][name]
    w = make(Case())
    node = w.prefill if role is Role.PREFILL else w.decode
    before = (w.sender_state, w.receiver_state, node.exchange.sizes())
    with pytest.raises(IllegalEvent):
        node.exchange.handle(act(w), w.now)
    assert (w.sender_state, w.receiver_state, node.exchange.sizes()) == before
    node.exchange.check_integrity()


@pytest.mark.parametrize("make", [Case.open, Case.waiting])
def test_metadata_has_a_largest_size(make: Callable[[Case], Case]) -> None:
    w = make(Case(limits=Limits(max_metadata_bytes=5)))
    key = w.transfer.sent_as
    with pytest.raises(InvalidRequest, match=r"6 bytes, limits\.max_metadata_bytes allows 5"):
        w.prefill.exchange.handle(events.SendMetadata(key, b"123456"), w.now)
    assert "FAILED" not in kinds(w.tell(w.prefill, events.SendMetadata(key, b"12345")))


def test_decode_takes_no_more_metadata_than_its_own_limit_whatever_prefill_s_is() -> None:
    for size in (5, 6):
        w = Case(limits=Limits(max_metadata_bytes=5)).waiting()
        w.from_prefill(w.metadata(content=b"7" * size))
        assert [e.code for e in w.r.errors] == [ErrorCode.METADATA_MISMATCH] * (size > 5)


def test_what_the_engine_says_after_the_end_is_late_not_wrong() -> None:
    w = Case().transferring()
    w.abort(w.prefill, w.s)
    w.abort(w.decode, w.r)
    for node, event in (
        (w.prefill, events.SendChunk(w.transfer.sent_as, Span(4, 10), (0, 1, 2))),
        (w.prefill, events.SendMetadata(w.transfer.sent_as, b"7")),
        (w.prefill, events.EndRoom(w.transfer.sent_as, CLIENT)),
        (w.prefill, events.AbortTransfer(w.transfer, CLIENT)),
        (w.decode, events.Publish(w.transfer.received_as, (0, 1, 2), 0)),
        (w.decode, events.EndRoom(w.transfer.received_as, CLIENT)),
        (w.prefill, events.WriteLanded(w.transfer, 0, 0, 0.1)),
        (w.prefill, events.WriteBroken(w.transfer, 0, 5, CLIENT)),
    ):
        assert node.exchange.handle(event, w.now) == []
    assert w.prefill.exchange.counters["late_events"] == 4
    w.settle()
    w.come_to_rest()
    for event in (events.WriteLanded(w.transfer, 0, 0, 0.1), w.fence_done(w.prefill)):
        assert w.prefill.exchange.handle(event, w.now) == []
    for node, key in ((w.prefill, w.transfer.sent_as), (w.decode, w.transfer.received_as)):
        assert node.exchange.handle(events.EndRoom(key, CLIENT), w.now) == []
    assert w.decode.exchange.handle(events.AbortTransfer(w.transfer, CLIENT), w.now) == []


# ---- what a destination may not say ------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"plan_hash": 1}, ErrorCode.LAYOUT_MISMATCH, "different copy plans"),
        ({"prompt_tokens": 9}, ErrorCode.TRANSFER_FAILED, "9 tokens, prefill one of 10"),
        ({"prompt_tokens": 11}, ErrorCode.TRANSFER_FAILED, "11 tokens, prefill one of 10"),
        ({"pages": [1, 2]}, ErrorCode.LAYOUT_MISMATCH, "2 pages where 3"),
        ({"pages": [1, 2, 24]}, ErrorCode.LAYOUT_MISMATCH, "in a pool of 24"),
        ({"pages": [1, 2, -1]}, ErrorCode.LAYOUT_MISMATCH, "in a pool of 24"),
        ({"pages": [1, 2, 2]}, ErrorCode.LAYOUT_MISMATCH, "occurs twice"),
        ({"prefix_tokens": 11}, ErrorCode.LAYOUT_MISMATCH, "prefix of 11"),
        ({"prefix_tokens": -1}, ErrorCode.LAYOUT_MISMATCH, "prefix of -1"),
        ({"epoch": 0}, ErrorCode.TRANSFER_FAILED, "epoch 0"),
        ({"epoch": -1}, ErrorCode.TRANSFER_FAILED, "epoch -1"),
        ({"epoch": 2**64}, ErrorCode.TRANSFER_FAILED, f"epoch {2**64}"),
        ({"transport": "tcp"}, ErrorCode.TRANSFER_FAILED, "same --transport"),
    ],
)
def test_an_impossible_destination_is_refused_and_leaves_the_room_open(
    changes: dict[str, Any], code: ErrorCode, words: str
) -> None:
    w = Case()
    w.s = w.open_sender(w.transfer, PROMPT)
    effects = w.from_decode(w.destination(**changes))
    assert kinds(effects) == ["Failed", "Gone"]
    error = failure_in(effects)
    assert error.code is code
    assert words in error.text
    assert error.origin == w.prefill.exchange.local.origin
    assert (error.phase, error.peer) == ("BOOTSTRAPPING", f"decode {w.decode.me}")
    configured = changes.keys() & {"prompt_tokens", "transport"}
    assert error.retryable is (code is ErrorCode.TRANSFER_FAILED and not configured), "another try may help"
    assert w.s.phases == [KVPoll.BOOTSTRAPPING]
    assert w.prefill.exchange.transfer_of(w.decode.me, w.destination(**changes).epoch) is None
    assert kinds(w.from_decode(w.destination(**changes))) == ["Failed", "Gone"], "nor is it bound later"
    second = msgspec.structs.replace(w.transfer, attempt=1)
    effects = w.from_decode(w.destination(transfer=second))
    assert kinds(effects) == ["WAITING_FOR_INPUT", "Accepted"]


def failure_in(effects: list[events.Effect]) -> ErrorInfo:
    """The error of the one `Failed` that is sent."""
    [failed] = [e.message for e in effects if isinstance(e, events.Send) and isinstance(e.message, Failed)]
    return failed.error


# ---- the tally ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"source": 1}, "the plan does not have"),
        ({"target": 1}, "the plan does not have"),
        ({"sequence": 1}, "chunk 0 was due"),
        ({"span": Span(1, 10)}, "where 0 was due"),
        ({"span": Span(0, 11), "nbytes": 11 * 32}, "after the prompt's end"),
        ({"span": Span(0, 9), "nbytes": 9 * 32}, "final=True"),
        ({"final": False}, "final=False"),
        ({"nbytes": 1}, "moved 1 bytes"),
        ({"span": Span(0, 0), "final": False, "nbytes": 0}, "is empty"),
    ],
)
def test_a_chunk_that_is_not_the_next_planned_one_fails_the_transfer(
    changes: dict[str, Any], words: str
) -> None:
    w = Case().waiting()
    effects = w.from_prefill(w.chunk(**changes))
    assert kinds(effects) == ["FAILED", "Failed", "Abort", "Fence", "Quarantined"]
    assert w.r.errors[0].code is ErrorCode.TRANSFER_FAILED
    assert words in w.r.errors[0].text
    assert w.r.releases == 0


def test_overlap_gap_and_chunks_after_the_final_one_are_refused() -> None:
    first = {"span": Span(0, 4), "nbytes": 128, "final": False}
    for second, words in (
        ({"span": Span(3, 10), "nbytes": 224}, "from 3 where 4"),
        ({"span": Span(5, 10), "nbytes": 160}, "from 5 where 4"),
    ):
        w = Case().waiting()
        assert kinds(w.from_prefill(w.chunk(**first))) == ["TRANSFERRING"]
        w.from_prefill(w.chunk(sequence=1, **second))
        assert words in w.r.errors[0].text
    w = Case().waiting()
    w.from_prefill(w.chunk())
    w.from_prefill(w.chunk(sequence=1, span=Span(10, 10), nbytes=0))
    assert "after the final one" in w.r.errors[0].text


def test_a_repeated_chunk_or_metadata_changes_nothing() -> None:
    w = Case().waiting()
    w.from_prefill(w.metadata())
    assert w.from_prefill(w.metadata()) == []
    chunk = w.chunk(span=Span(0, 4), nbytes=128, final=False)
    w.from_prefill(chunk)
    assert w.from_prefill(chunk) == []
    assert w.receiver_state == "TRANSFERRING"


@pytest.mark.parametrize(
    ("changes", "alone"),
    [
        ({"prompt_tokens": 9}, True),
        ({"prompt_tokens": 11}, True),
        ({"content": b"8"}, False),
    ],
)
def test_metadata_that_is_not_ours_fails_the_transfer(changes: dict[str, Any], alone: bool) -> None:
    for after_ours in (True, False) if alone else (True,):
        w = Case().waiting()
        if after_ours:
            w.from_prefill(w.metadata())
        w.from_prefill(w.metadata(**changes))
        assert w.r.errors[0].code is ErrorCode.METADATA_MISMATCH


@pytest.mark.parametrize("message", ["chunk", "metadata"])
def test_news_before_anything_was_published_is_refused(message: str) -> None:
    w = Case().open()
    effects = w.from_prefill(getattr(w, message)())
    assert kinds(effects) == ["FAILED", "Declined", "Release"]


def test_the_tally_itself_refuses_metadata_of_another_transfer() -> None:
    w = Case().waiting()
    machine = w.decode.exchange.machines[w.transfer]
    with pytest.raises(MetadataMismatch, match="came for"):
        machine.tally.note_metadata(w.metadata(transfer=w.new_transfer()))
    assert machine.tally.metadata is None


def test_moved_names_the_rank_that_owns_the_room() -> None:
    w = Case().published()
    w.from_prefill(Moved(w.transfer, 3))
    assert w.r.errors[0].code is ErrorCode.DP_RANK_CONFLICT
    assert "DP rank 3" in w.r.errors[0].text


# ---- every way to fail, in every phase ---------------------------------------------------------

PEER_SAYS = TransferFailed("it broke", origin="far away", phase="TRANSFERRING", room=1, elapsed_s=3.0).info
SENDER_PLACES = {
    "WAITING_FOR_INPUT": Case.waiting,
    "TRANSFERRING": Case.in_flight,
}
RECEIVER_PLACES = {
    "WAITING_FOR_INPUT": Case.open,
    "PUBLISHED": Case.waiting,
    "TRANSFERRING": Case.transferring,
}


#: The code of each cause; `TRANSFER_FAILED` for the rest.
CODES = {
    "abort": ErrorCode.ABORTED_BY_CLIENT,
    "down": ErrorCode.PEER_LOST,
    "dead": ErrorCode.PEER_LOST,
    "deadline": ErrorCode.DEADLINE_EXCEEDED,
}


def cause_of(w: Case, half: Role, cause: str) -> events.Event:
    """What ends this half; the deadline passes."""
    t, peer = w.transfer, (w.decode if half is Role.PREFILL else w.prefill).me
    if cause == "deadline":
        w.now = 61.0
    found: dict[str, events.Event] = {
        "abort": events.EndRoom(t.sent_as if half is Role.PREFILL else t.received_as, CLIENT),
        "failed": events.Received(peer, Failed(t, PEER_SAYS)),
        "abort message": events.Received(peer, Abort(t)),
        "gone": events.Received(peer, Gone(t)),
        "drained": events.Received(peer, Drained(t)),
        "declined": events.Received(peer, Declined(t, PEER_SAYS)),
        "down": events.PeerDown(peer, PeerLost("cut").info),
        "dead": events.PeerDown(peer, PeerLost("dead").info, dead=True),
        "broken": events.WriteBroken(t, 0, 0, TransferFailed("no route").info),
        "deadline": events.Tick(),
    }
    return found[cause]


@pytest.mark.parametrize("place", SENDER_PLACES)
@pytest.mark.parametrize("cause", ["abort", "failed", "abort message", "gone", "down", "deadline", "broken"])
def test_a_sender_fails_in_the_same_way_everywhere(place: str, cause: str) -> None:
    w = SENDER_PLACES[place](Case())
    assert w.sender_state == place
    posted = place == "TRANSFERRING"
    if cause == "broken" and not posted:
        return
    effects = w.tell(w.prefill, cause_of(w, Role.PREFILL, cause))
    peer_notified = cause in ("failed", "abort message", "gone", "down")
    if posted:
        assert kinds(effects) == ["Fence", "FAILED"] + ([] if peer_notified else ["Failed"])
        assert w.sender_state == "DRAINING"
        assert kinds(w.tell(w.prefill, w.fence_done(w.prefill))) == ["Drained", "Release"]
    else:
        expected = (
            ["FAILED"] + ([] if peer_notified else ["Failed"]) + ([] if cause == "down" else ["Drained"])
        )
        assert kinds(effects) == [*expected, "Release"]
    assert w.sender_state == "-"
    (error,) = w.s.errors
    assert error.code is CODES.get(cause, ErrorCode.TRANSFER_FAILED)
    if cause == "failed":
        assert error == PEER_SAYS  # carried unchanged
    else:
        assert (error.phase, error.room) == (place, w.transfer.room)
    if cause == "deadline":
        assert error.elapsed_s == 61.0


@pytest.mark.parametrize("cause", ["abort", "failed", "abort message", "declined", "down", "deadline"])
def test_a_room_that_was_placed_for_one_decode_ends_with_it_before_it_is_bound(cause: str) -> None:
    w = Case()
    w.s = w.open_sender(w.transfer, PROMPT)
    effects = kinds(w.tell(w.prefill, cause_of(w, Role.PREFILL, cause)))
    told = ["Failed", "Gone"] if cause in ("abort", "deadline", "down") else []
    answer = ["Gone"] if cause in ("failed", "abort message") else []
    assert effects == [*answer, "FAILED", *told, "Release"]
    (error,) = w.s.errors
    codes = {**CODES, "deadline": ErrorCode.BOOTSTRAP_TIMEOUT}
    assert error.code is codes.get(cause, ErrorCode.TRANSFER_FAILED)
    if cause in ("failed", "declined"):
        assert error == PEER_SAYS  # carried unchanged
    else:
        assert (error.phase, error.room) == ("BOOTSTRAPPING", w.transfer.room)
    if cause == "deadline":
        assert error.elapsed_s == 61.0
    if cause == "down":
        assert kinds(w.tell(w.prefill, events.PeerUp(w.decode.me, w.plan))) == ["Failed"], "it is said then"
    assert kinds(w.from_decode(w.destination())) == ["Failed", "Gone"], "nor does it begin again"


@pytest.mark.parametrize("message", [Committed, Gone])
def test_what_says_nothing_of_a_room_without_a_binding_leaves_it_open(message: Callable[..., Any]) -> None:
    w = Case()
    w.open_sender(w.transfer, PROMPT)
    assert kinds(w.from_decode(message(w.transfer))) == []
    assert kinds(w.from_decode(w.destination())) == ["WAITING_FOR_INPUT", "Accepted"]


def refused(w: Case) -> list[events.Effect]:
    error = TransferFailed("this epoch is not granted").info
    return w.tell(w.prefill, events.WriteBroken(w.transfer, 0, 0, error, refused=True))


@pytest.mark.parametrize("cause", ["failed", "abort message", "down", "abort"])
def test_lesson_10_a_refused_write_waits_for_the_reason_of_the_refusal(cause: str) -> None:
    """The refusal may overtake decode's word, which says why. (The engine may send on meanwhile.)"""
    w = Case().waiting()
    w.send_chunk(w.s, 4)
    assert refused(w) == []
    assert w.sender_state == "TRANSFERRING"
    w.send_chunk(w.s, 4)
    again = events.WriteBroken(w.transfer, 0, 1, TransferFailed("nor is this").info, refused=True)
    assert w.tell(w.prefill, again) == []
    w.now += 0.9
    effects = kinds(w.tell(w.prefill, cause_of(w, Role.PREFILL, cause)))
    assert effects == ["Fence", "FAILED"] + (["Failed"] if cause == "abort" else [])
    assert kinds(w.tell(w.prefill, w.fence_done(w.prefill))) == ["Drained", "Release"]
    (error,) = w.s.errors
    assert error.text != "this epoch is not granted"
    if cause == "failed":
        assert error == PEER_SAYS


def test_a_refused_write_whose_reason_never_comes_fails_the_sender_after_a_second() -> None:
    w = Case().in_flight()
    assert refused(w) == []
    at = w.prefill.exchange.next_deadline()
    assert at == w.now + REASON_WAIT_S
    w.now = at
    effects = w.tell(w.prefill, events.Tick())
    assert kinds(effects) == ["Fence", "FAILED", "Failed"]
    assert kinds(w.tell(w.prefill, w.fence_done(w.prefill))) == ["Drained", "Release"]
    (error,) = w.s.errors
    assert (error.text, error.phase) == ("this epoch is not granted", "TRANSFERRING")
    # It is remembered as long as any other: until the hand-off's own deadline.
    assert w.prefill.exchange.next_deadline() == 60.0


def test_of_several_refused_writes_the_first_one_says_how_long_and_why() -> None:
    w = Case().waiting()
    w.send_chunk(w.s, 4)
    refused(w)
    at = w.now + REASON_WAIT_S
    w.now += 0.5
    w.send_chunk(w.s, 4)
    again = events.WriteBroken(w.transfer, 0, 1, TransferFailed("nor is this").info, refused=True)
    assert w.tell(w.prefill, again) == []
    w.now = at
    assert kinds(w.tell(w.prefill, events.Tick())) == ["Fence", "FAILED", "Failed"]
    assert [error.text for error in w.s.errors] == ["this epoch is not granted"]
    w.tell(w.prefill, w.fence_done(w.prefill))
    assert w.prefill.exchange.next_deadline() == 60.0


def test_a_refused_write_does_not_outlive_the_deadline() -> None:
    w = Case().in_flight()
    w.now = 59.5
    refused(w)
    w.now = 60.0
    assert kinds(w.tell(w.prefill, events.Tick())) == ["Fence", "FAILED", "Failed"]
    assert w.s.errors[0].code is ErrorCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize("place", RECEIVER_PLACES)
@pytest.mark.parametrize("cause", ["abort", "failed", "drained", "gone", "down", "dead", "deadline"])
def test_a_receiver_fails_in_the_same_way_everywhere(place: str, cause: str) -> None:
    w = RECEIVER_PLACES[place](Case(one_sided=True))
    assert w.receiver_state == place
    effects = kinds(w.tell(w.decode, cause_of(w, Role.DECODE, cause)))
    failed = ["Failed"] if cause in ("abort", "deadline") else []
    if place == "WAITING_FOR_INPUT":  # prefill knows its room by now, and nothing of this hand-off
        declined = ["Declined"] if failed else []
        assert effects == ["FAILED", *declined, "Release"]
    else:
        abort = [] if cause in ("down", "dead") else ["Abort"]
        proven = ["Release"] if cause in ("drained", "gone", "dead") else []
        assert effects == ["FAILED", *failed, *abort, "Fence", "Quarantined"]
        assert w.receiver_state == "QUARANTINED"
        # The peer's word is one half; our own transport may still be inside a slice of what had been sent.
        assert kinds(w.tell(w.decode, w.fence_done(w.decode, proven=False))) == proven
        assert w.receiver_state == ("-" if proven else "QUARANTINED")
        assert w.decode.exchange.quarantined_pages() == (0 if proven else 3)
    assert w.r.errors[0].code is CODES.get(cause, ErrorCode.TRANSFER_FAILED)
    if cause == "deadline" and place != "WAITING_FOR_INPUT":
        assert "without ranks 0 to 0, the metadata" in w.r.errors[0].text


@pytest.mark.parametrize(
    ("event", "proven"),
    [
        (lambda w: w.fence_done(w.decode), True),
        (lambda w: w.fence_done(w.decode, proven=False), False),
        (lambda w: events.Received(w.prefill.me, Drained(w.transfer)), True),
        (lambda w: events.Received(w.prefill.me, Gone(w.transfer)), True),
        (lambda w: events.Received(w.prefill.me, Failed(w.transfer, CLIENT)), False),
        (lambda w: events.Received(w.prefill.me, Accepted(w.transfer)), False),
        (lambda w: events.Received(w.prefill.me, w.chunk()), False),
        (lambda w: events.Received(w.prefill.me, w.metadata()), False),
        (lambda w: events.PeerDown(w.prefill.me, PeerLost("cut").info), False),
        (lambda w: events.PeerDown(w.prefill.me, PeerLost("dead").info, dead=True), True),
        (lambda w: events.PeerDown(w.prefill.me, PeerLost("gone").info, dead=True, over="fake"), True),
        (lambda w: events.PeerDown(w.prefill.me, PeerLost("gone").info, dead=True, over="another"), False),
        (lambda w: events.PeerDown(LeaderId(Incarnation("e" * 32)), PeerLost("dead").info, dead=True), False),
        (lambda w: events.EndRoom(w.transfer.received_as, CLIENT), False),
        (lambda w: events.AbortTransfer(w.transfer, CLIENT), False),
        (lambda w: events.Tick(), False),
    ],
)
def test_only_a_proof_ends_quarantine(event: Act, proven: bool) -> None:
    w = Case(one_sided=True).waiting()
    w.abort(w.decode, w.r)
    assert kinds(w.tell(w.decode, w.fence_done(w.decode, proven=False))) == []
    w.now = 1e6
    effects = w.tell(w.decode, event(w))
    assert kinds(effects) == (["Release"] if proven else [])
    assert w.receiver_state == ("-" if proven else "QUARANTINED")


def test_the_same_incarnation_is_asked_again_after_a_break() -> None:
    w = Case(one_sided=True).in_flight()
    w.lose()
    assert (w.sender_state, w.receiver_state) == ("DRAINING", "QUARANTINED")
    w.connect()
    assert [type(m).__name__ for _, m in w.queues[Role.PREFILL]] == ["Failed", "Abort"]
    w.deliver(Role.PREFILL)
    w.deliver(Role.PREFILL)
    w.deliver(Role.DECODE)  # prefill says again, too, that it has failed
    assert not w.queues[Role.DECODE], "no answer while the write is in flight"
    assert not w.answer_fence(w.prefill)
    w.land()
    w.answer_fence(w.prefill)
    assert [type(m).__name__ for _, m in w.queues[Role.DECODE]] == ["Drained"]
    w.come_to_rest()


# ---- what is unknown, early or over ------------------------------------------------------------


def test_messages_for_what_is_unknown_are_answered_gone_or_not_at_all() -> None:
    w = Case()
    for message, answer in (
        (w.chunk(), ["Gone"]),
        (Accepted(w.transfer), ["Gone"]),
        (w.metadata(), ["Gone"]),
        (Moved(w.transfer, 1), ["Gone"]),
        (Drained(w.transfer), []),
        (Gone(w.transfer), []),
    ):
        assert kinds(w.from_prefill(message)) == answer
    assert w.decode.exchange.sizes()["transfers"] == 0
    for message, answer in (
        (Committed(w.transfer), []),
        (Gone(w.transfer), []),
        (Abort(w.transfer), ["Gone"]),
    ):
        assert kinds(w.from_decode(message)) == answer
    assert w.decode.exchange.counters["gone_answers"] == 4


def test_the_deadline_heap_does_not_grow_with_what_is_over() -> None:
    w = World(limits=Limits(max_transfers=8))
    w.open_receiver(w.new_transfer(), PROMPT, budget_s=1.0)  # its entry stays on top: nothing is popped
    for _ in range(500):
        job = w.open_receiver(w.new_transfer(), PROMPT)
        w.abort(w.decode, job)
        w.queues[Role.PREFILL].clear()
    assert w.decode.exchange.sizes()["deadlines"] <= 64 + 2 * 9


@pytest.mark.parametrize(("own_s", "budget_s", "ends_at"), [(60.0, 30.0, 50.0), (25.0, 30.0, 25.0)])
def test_decode_s_budget_counts_from_its_destination_and_prolongs_nothing(
    own_s: float, budget_s: float, ends_at: float
) -> None:
    w = Case(limits=Limits(peer_silence_s=1.0))
    w.s = w.open_sender(w.transfer, PROMPT, budget_s=own_s)
    w.now = 20.0
    w.from_decode(w.destination(budget_s=budget_s))
    assert w.prefill.exchange.next_deadline() == ends_at
    w.from_decode(Abort(w.transfer))
    assert w.prefill.exchange.next_deadline() == ends_at, "so long it is remembered"


# ---- leaders of one incarnation ----------------------------------------------------------------


@pytest.mark.parametrize("lost", [0, 1])
def test_two_leaders_of_one_incarnation_are_two_peers_and_one_loss_ends_its_own_hand_off_only(
    lost: int,
) -> None:
    me, other = LeaderId(Incarnation("a" * 32)), Incarnation("b" * 32)
    spec = pool_spec(24, 4)
    exchange = Exchange(Role.DECODE, me, "here", Limits(), "fake")
    peers = [LeaderId(other, 0), LeaderId(other, 1)]
    transfers = [TransferId(1 + peer.dp_rank, 0, peer, me) for peer in peers]
    for peer, transfer in zip(peers, transfers, strict=True):
        exchange.handle(peer_up(peer, spec), 0.0)
        exchange.handle(receive(transfer, 4, 9.0), 0.0)
        exchange.handle(events.Publish(transfer.received_as, (peer.dp_rank,), 0), 0.0)
    # A word about the other one's hand-off is nobody's.
    assert not exchange.handle(events.Received(peers[1 - lost], Failed(transfers[lost], CLIENT)), 1.0)
    assert exchange.counters["stray_messages"] == 1
    effects = exchange.handle(events.PeerDown(peers[lost], PeerLost("dead").info, dead=True), 2.0)
    [failed] = [e for e in effects if isinstance(e, events.Phase)]
    assert failed.key == transfers[lost].received_as
    assert failed.error.peer == f"prefill {other[:8]} dp{lost}"
    assert exchange.phase(transfers[1 - lost]) is KVPoll.WAITING_FOR_INPUT
    exchange.check_integrity()


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
