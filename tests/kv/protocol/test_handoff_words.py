"""The messages of each half at its end and after it, its proofs, and its report of the bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from handoff_world import expect, peer_up, pool_spec, receive
from test_handoff_transitions import CLIENT, PEER_SAYS, PROMPT, Case, kinds

from segue.kv.errors import MAX_ERROR_TEXT, ErrorCode, PeerLost, TransferFailed
from segue.kv.ids import (
    OPEN_RANK,
    ChecksumMode,
    Incarnation,
    KVPoll,
    LeaderId,
    RankId,
    Role,
    Span,
    TransferId,
)
from segue.kv.layout.spec import PoolSpec
from segue.kv.limits import Limits
from segue.kv.protocol import events
from segue.kv.protocol.exchange import Exchange
from segue.kv.protocol.machine import IllegalEvent
from segue.kv.protocol.messages import (
    Abort,
    ChunkPosted,
    Committed,
    Destination,
    Drained,
    Failed,
    Gone,
    HandoffMessage,
    Moved,
)
from segue.kv.protocol.room_ranks import FOLLOW_BOOTSTRAP_ROOM, DpRanks, PrefillInstance
from segue_lab.sim.sim_engine import lineage_spec

P, D = LeaderId(Incarnation("a" * 32)), LeaderId(Incarnation("d" * 32))
THIRD = LeaderId(Incarnation("e" * 32))


def again(w: Case, role: Role) -> list[str]:
    """A new session with the same two: what this side says on it by itself."""
    node, peer = (w.prefill, w.decode) if role is Role.PREFILL else (w.decode, w.prefill)
    return kinds(w.tell(node, events.PeerUp(peer.me, w.plan)))


@pytest.mark.parametrize("over", [True, False], ids=["over", "waits for a proof"])
@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_a_failure_is_said_again_on_a_new_session_unless_it_came_from_the_peer(
    role: Role, over: bool
) -> None:
    for by_peer in (True, False):
        w = Case(one_sided=True)
        w = w.open() if over else w.in_flight() if role is Role.PREFILL else w.waiting()
        node, job = (w.prefill, w.s) if role is Role.PREFILL else (w.decode, w.r)
        other = w.decode if role is Role.PREFILL else w.prefill
        if by_peer:
            w.tell(node, events.Received(other.me, Failed(w.transfer, PEER_SAYS)))
        else:
            w.abort(node, job)
        assert (job.releases == 1) is over
        assert kinds(w.tell(node, events.PeerDown(other.me, PeerLost("cut").info))) == []
        wanted = [] if by_peer else ["Failed"]
        if role is Role.DECODE and not over:
            wanted.append("Abort")
        assert again(w, role) == wanted


@pytest.mark.parametrize("word", [Drained, Gone])
def test_the_word_of_prefill_is_not_taken_back_by_the_end_of_its_session(word: Any) -> None:
    w = Case(one_sided=True).waiting()
    w.abort(w.decode, w.r)
    assert kinds(w.from_prefill(word(w.transfer))) == []
    assert kinds(w.tell(w.decode, events.PeerDown(w.prefill.me, PeerLost("cut").info))) == []
    assert kinds(w.tell(w.decode, w.fence_done(w.decode, proven=False))) == ["Release"]


def test_a_death_that_is_known_is_not_taken_back_by_a_later_end_of_a_session() -> None:
    w = Case(one_sided=True).waiting()
    dead = PeerLost("dead").info
    w.tell(w.decode, events.PeerDown(w.prefill.me, dead, dead=True))
    assert kinds(w.tell(w.decode, events.PeerDown(w.prefill.me, dead))) == []
    assert kinds(w.tell(w.decode, w.fence_done(w.decode, proven=False))) == ["Release"]


@pytest.mark.parametrize("published", [True, False])
def test_a_room_that_is_elsewhere_is_told_before_the_end_and_frees_nothing_by_itself(published: bool) -> None:
    w = Case(one_sided=True)
    w = w.published() if published else w.open()
    effects = w.from_prefill(Moved(w.transfer, 3))
    assert effects[0] == events.Redirected(w.transfer, 3)
    rest = ["Failed", "Abort", "Fence", "Quarantined"] if published else ["Declined", "Release"]
    assert kinds(effects[1:]) == ["FAILED", *rest]


@pytest.mark.parametrize("make", [Case.waiting, Case.transferring], ids=["accepted", "written"])
def test_a_rank_that_has_accepted_a_room_cannot_send_decode_elsewhere_any_more(
    make: Callable[[Case], Case],
) -> None:
    """It may have written, so it is a failure like any other, with a full fence (handoff rule 5)."""
    w = make(Case(one_sided=True))
    effects = w.from_prefill(Moved(w.transfer, 3))
    assert not [effect for effect in effects if isinstance(effect, events.Redirected)]
    assert kinds(effects) == ["FAILED", "Failed", "Abort", "Fence", "Quarantined"]
    assert w.r.errors[0].code is ErrorCode.TRANSFER_FAILED
    assert "after it had accepted" in w.r.errors[0].text


def test_a_chunk_that_comes_again_and_is_not_what_it_was_ends_the_hand_off() -> None:
    first = {"span": Span(0, 4), "nbytes": 128, "final": False}
    for changes in ({"span": Span(0, 5), "nbytes": 160}, {"wire_s": 0.5}, {"checksum": 1}):
        w = Case().waiting()
        w.from_prefill(w.chunk(**first))
        w.from_prefill(w.chunk(sequence=1, span=Span(4, 8), nbytes=128, final=False))
        assert w.from_prefill(w.chunk(**first)) == []
        assert kinds(w.from_prefill(w.chunk(**(first | changes))))[0] == "FAILED"
        assert "chunk 0 came where chunk 2 was due" in w.r.errors[0].text


def test_the_largest_epoch_that_there_can_be_is_one() -> None:
    w = Case()
    w.s = w.open_sender(w.transfer, PROMPT)
    assert kinds(w.from_decode(w.destination(epoch=2**64 - 1))) == ["WAITING_FOR_INPUT", "Accepted"]


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_what_an_error_says_of_its_origin_is_kept_and_what_it_leaves_open_is_filled_in(role: Role) -> None:
    w = Case().waiting()
    w.now = 7.5
    node, job = (w.prefill, w.s) if role is Role.PREFILL else (w.decode, w.r)
    peer = w.decode if role is Role.PREFILL else w.prefill
    known = TransferFailed("x", origin="elsewhere", phase="COMPUTING").info
    known = msgspec.structs.replace(known, text="x" * 10_000)  # as of a peer that keeps no limit
    whole = msgspec.structs.replace(known, text="x", peer="a third", room=99, elapsed_s=1.5)
    machine = node.exchange.machines[w.transfer]
    assert machine.fill(whole) == whole, "what is said already stays"
    w.tell(
        node,
        events.EndRoom(w.transfer.sent_as if role is Role.PREFILL else w.transfer.received_as, known),
    )
    [error] = job.errors
    assert (error.origin, error.phase, error.room) == ("elsewhere", "COMPUTING", w.transfer.room)
    assert (error.peer, error.elapsed_s) == (f"{peer.role} {peer.me}", 7.5)
    assert error.text == "x" * MAX_ERROR_TEXT


# ---- commits that come too early -------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", [0, PROMPT])
@pytest.mark.parametrize(
    "missing", ["every chunk", "the last chunk", "the landing", "the checksum", "the metadata"]
)
def test_a_commit_is_believed_only_after_everything_was_sent_landed_and_announced(
    missing: str, prefix: int
) -> None:
    if prefix and missing in ("the landing", "the checksum"):
        return
    w = Case(kv_checksum=ChecksumMode.FULL).waiting(prefix)
    if missing != "the metadata":
        w.send_metadata(w.s)
    if missing != "every chunk":
        w.send_chunk(w.s, PROMPT if missing != "the last chunk" else PROMPT - 1)
    if missing != "the landing":
        w.land()
        w.finish()
    if missing != "the checksum":
        w.answer_checksum(w.prefill)
    w.from_decode(Committed(w.transfer))
    assert w.s.phases[-1] is KVPoll.FAILED
    assert "before every write" in w.s.errors[0].text


# ---- what is reported of the bytes -----------------------------------------------------------------------


@pytest.mark.parametrize("prefix", [0, 3])
def test_both_sides_report_the_bytes_that_landed_and_decode_the_slowest_last_write(prefix: int) -> None:
    w = Case(ranks=(2, 1)).waiting(prefix)
    for tokens in (5, 5):
        w.send_chunk(w.s, tokens)
    w.send_metadata(w.s)
    for _ in range(4):
        w.land()
    # Of two ranks two chunks each: the seconds that the transport took, in order of the posts.
    posts = [effect for _, effect in w.log if isinstance(effect, events.PostWrite)]
    for post, seconds in zip(posts, (9.0, 8.0, 0.25, 0.5), strict=True):
        w.tell(w.prefill, events.WriteLanded(w.transfer, post.rank, post.tag, seconds))
    w.writes.clear()
    w.settle()
    ends = {
        side.strip(): effect
        for side, effect in w.log
        if isinstance(effect, events.Phase) and effect.phase is KVPoll.SUCCESS
    }
    nbytes = (PROMPT - prefix) * w.decode.specs[0].shape.token_bytes
    assert (ends["prefill"].nbytes, ends["decode"].nbytes) == (nbytes, nbytes)
    assert ends["decode"].wire_s == 0.5, "each rank's last chunk counts"


# ---- the tables ------------------------------------------------------------------------------------------


def exchange_of(role: Role, spec: PoolSpec, *peers: LeaderId, transport: str = "tcp") -> Exchange:
    me = P if role is Role.PREFILL else D
    made = Exchange(role, me, role.value, Limits(), "the exchange's own")
    for peer in peers:
        made.handle(peer_up(peer, spec, transport), 0.0)
    return made


def published(exchange: Exchange, transfer: TransferId, now: float = 0.0) -> Destination:
    """The destination of a receiver that publishes its one page."""
    exchange.handle(events.Publish(transfer.received_as, (1,), 0), now)
    [sent] = exchange.handle(events.Granted(transfer, 0), now)
    return sent.message


def test_an_epoch_belongs_to_its_peer_and_an_open_hand_off_to_the_books() -> None:
    spec = pool_spec(8, 4)
    exchange = exchange_of(Role.DECODE, spec, P, THIRD)
    mine, other = TransferId(1, 0, P, D), TransferId(2, 0, THIRD, D)
    epochs: dict[TransferId, int] = {}
    for page, transfer in enumerate((mine, other)):
        exchange.handle(receive(transfer, 4, 60.0), 0.0)
        effects = exchange.handle(events.Publish(transfer.received_as, (page,), 0), 0.0)
        epochs |= {e.transfer: e.epoch for e in effects if isinstance(e, events.Grant)}
    assert exchange.transfer_of(P, epochs[mine]) == mine
    assert exchange.transfer_of(D, epochs[mine]) == mine, "decode's ranks pass on under it"
    assert exchange.transfer_of(THIRD, epochs[mine]) is None, "it is not theirs to write for"
    assert exchange.transfer_of(P, epochs[mine] + 100) is None
    assert (exchange.open_halves(), exchange.peers()) == (
        [mine.received_as, other.received_as],
        {P, THIRD},
    )
    exchange.handle(events.EndRoom(mine.received_as, CLIENT), 1.0)
    assert (exchange.open_halves(), exchange.peers()) == ([other.received_as], {P, THIRD}), "not yet proven"
    assert (exchange.phase_of(mine.received_as), exchange.phase_of(other.received_as)) == (
        KVPoll.FAILED,
        KVPoll.WAITING_FOR_INPUT,
    )
    assert exchange.transfer_of(P, epochs[mine]) == mine
    exchange.handle(events.FenceDone(mine, 0, RankId(P), True), 2.0)
    assert exchange.peers() == {THIRD}
    assert exchange.transfer_of(P, epochs[mine]) is None


def test_an_epoch_of_prefill_is_one_of_the_decode_that_gave_it() -> None:
    w = Case()
    w.open_sender(w.transfer, PROMPT)
    w.from_decode(w.destination(epoch=7))
    stranger = LeaderId(Incarnation("9" * 32))
    assert w.prefill.exchange.transfer_of(w.decode.me, 7) == w.transfer
    assert w.prefill.exchange.transfer_of(stranger, 7) is None
    # Another decode may give the same number: it is another epoch.
    w.tell(w.prefill, events.PeerUp(stranger, w.plan, "fake"))
    second = TransferId(99, 0, w.prefill.me, stranger)
    w.prefill.exchange.handle(expect(second, PROMPT, 60.0), w.now)
    effects = w.prefill.exchange.handle(
        events.Received(stranger, w.destination(epoch=7, transfer=second)), w.now
    )
    assert kinds(effects) == ["WAITING_FOR_INPUT", "Accepted"]
    assert w.prefill.exchange.transfer_of(stranger, 7) == second
    assert w.prefill.exchange.transfer_of(w.decode.me, 7) == w.transfer


@pytest.mark.parametrize(("chosen", "said"), [("shm", "shm"), ("", "the exchange's own")])
def test_decode_names_the_transport_that_was_chosen_for_this_peer(chosen: str, said: str) -> None:
    exchange = exchange_of(Role.DECODE, pool_spec(8, 4), P, transport=chosen)
    transfer = TransferId(1, 0, P, D)
    exchange.handle(receive(transfer, 4, 60.0), 0.0)
    message = published(exchange, transfer, 5.0)
    assert (message.transport, message.budget_s) == (said, 55.0)


def test_all_deadlines_that_have_passed_end_with_one_tick_and_each_by_its_own() -> None:
    exchange = exchange_of(Role.DECODE, pool_spec(8, 4), P)
    transfers = [TransferId(room, 0, P, D) for room in range(1, 5)]
    for transfer, deadline in zip(transfers, (3.0, 5.0, 5.0, 5.5), strict=True):
        exchange.handle(receive(transfer, 4, deadline), 0.0)
    effects = exchange.handle(events.Tick(), 5.0)
    ended = [e.key for e in effects if isinstance(e, events.Phase) and e.phase is KVPoll.FAILED]
    assert ended == [transfer.received_as for transfer in transfers[:3]]
    assert exchange.phase(transfers[3]) is KVPoll.WAITING_FOR_INPUT
    assert exchange.handle(events.Tick(), 5.4) == []
    assert exchange.open_halves() == [transfers[3].received_as]


# ---- a model that keeps a state --------------------------------------------------------------------------


class StatePair:
    """One hand-off of ten tokens of a model with a state, between two exchanges and no network."""

    def __init__(self, mode: ChecksumMode = ChecksumMode.FULL) -> None:
        spec = lineage_spec(8, 4, slots=3)
        self.transfer = TransferId(1, 0, P, D)
        self.prefill = Exchange(Role.PREFILL, P, "prefill", Limits(), "tcp", mode)
        self.decode = Exchange(Role.DECODE, D, "decode", Limits(), "tcp", mode)
        self.prefill.handle(peer_up(D, spec), 0.0)
        self.decode.handle(peer_up(P, spec), 0.0)
        self.prefill.handle(expect(self.transfer, PROMPT, 60.0), 0.0)
        self.decode.handle(receive(self.transfer, PROMPT, 60.0), 0.0)
        self.decode.handle(events.Publish(self.transfer.received_as, (1, 2, 3), 0, 2), 0.0)
        [sent] = self.decode.handle(events.Granted(self.transfer, 0), 0.0)
        assert sent.message.slot == 2
        self.prefill.handle(events.Received(D, sent.message), 0.0)

    def chunk(self, start: int, end: int, slot: int | None) -> list[events.Effect]:
        return self.prefill.handle(
            events.SendChunk(self.transfer.sent_as, Span(start, end), (4, 5, 6), slot), 0.0
        )

    def of(self, effects: list[events.Effect], kind: type[Any]) -> Any:
        [found] = [effect for effect in effects if isinstance(effect, kind)]
        return found

    def heard(self, message: HandoffMessage) -> list[events.Effect]:
        return self.decode.handle(events.Received(P, message), 0.0)


def test_the_state_is_written_hashed_and_verified_with_the_last_chunk_alone() -> None:
    pair = StatePair()
    posted: list[ChunkPosted] = []
    for start, end in ((0, 6), (6, PROMPT)):
        final = end == PROMPT
        effects = pair.chunk(start, end, 1)
        write = pair.of(effects, events.PostWrite)
        size = lineage_spec(8, 4, slots=3).shape
        nbytes = (end - start) * size.token_bytes + (size.state_bytes if final else 0)
        assert sum(block.nbytes for block in write.blocks) == nbytes
        asked = pair.of(effects, events.ComputeChecksum)
        assert (asked.content.state is not None) is final
        pair.prefill.handle(events.WriteLanded(pair.transfer, 0, write.tag, 0.1), 0.0)
        [sent] = pair.prefill.handle(events.ChecksumReady(pair.transfer, 0, asked.tag, 5), 0.0)
        assert (sent.message.nbytes, sent.message.final) == (nbytes, final)
        posted.append(sent.message)
        verified = pair.of(pair.heard(sent.message), events.ComputeChecksum)
        assert (verified.content.state is not None) is final


def test_a_last_chunk_without_the_state_that_decode_waits_for_is_the_engine_s_mistake() -> None:
    pair = StatePair()
    pair.chunk(0, 6, None)  # before the last chunk it is nobody's concern
    with pytest.raises(IllegalEvent, match="slot None of the source for slot 2"):
        pair.chunk(6, PROMPT, None)
    assert pair.prefill.phase(pair.transfer) is KVPoll.TRANSFERRING
    pair.of(pair.chunk(6, PROMPT, 0), events.PostWrite)


def test_a_slot_where_decode_waits_for_none_is_the_engine_s_mistake() -> None:
    w = Case().waiting()
    with pytest.raises(IllegalEvent, match="slot 1 of the source for slot None"):
        w.prefill.exchange.handle(events.SendChunk(w.transfer.sent_as, Span(0, PROMPT), (0, 1, 2), 1), 0.0)


@pytest.mark.parametrize("slot", [0, 2])
def test_no_prefix_is_published_where_the_state_at_its_end_is_not(slot: int) -> None:
    exchange = exchange_of(Role.DECODE, lineage_spec(8, 4, slots=3), P)
    transfer = TransferId(1, 0, P, D)
    exchange.handle(receive(transfer, 8, 60.0), 0.0)
    with pytest.raises(IllegalEvent, match="without the state at its end"):
        exchange.handle(events.Publish(transfer.received_as, (1,), 4, slot), 0.0)
    exchange.handle(events.Publish(transfer.received_as, (1, 2), 0, slot), 0.0)


@pytest.mark.parametrize("slot", [-1, 3, None])
def test_a_destination_with_a_slot_that_decode_does_not_have_is_refused(slot: int | None) -> None:
    spec = lineage_spec(8, 4, slots=3)
    exchange = exchange_of(Role.DECODE, spec, P)
    transfer = TransferId(1, 0, P, D)
    exchange.handle(receive(transfer, 4, 60.0), 0.0)
    with pytest.raises(IllegalEvent, match="in a pool of 3 slots"):
        exchange.handle(events.Publish(transfer.received_as, (1,), 0, slot), 0.0)
    assert exchange.phase(transfer) is KVPoll.WAITING_FOR_INPUT
    exchange.handle(events.Publish(transfer.received_as, (1,), 0, 2), 0.0)


# ---- what opens while its session is up, and what is said after its end ----------------------------------


@pytest.mark.parametrize("session_first", [True, False])
@pytest.mark.parametrize(("rank", "inferred"), [(0, False), (OPEN_RANK, True)])
def test_prefill_is_told_whether_decode_has_inferred_its_rank(
    rank: int, inferred: bool, session_first: bool
) -> None:
    exchange = exchange_of(Role.DECODE, pool_spec(8, 4))
    dp = DpRanks(size=2, load_balance=FOLLOW_BOOTSTRAP_ROOM)
    instance = PrefillInstance(dp, frozenset({0, 1}))
    exchange.handle(events.PrefillInstances({P.incarnation: instance}), 0.0)
    transfer = TransferId(2, 0, P, D)
    opened = receive(transfer, 4, 60.0)
    opened = msgspec.structs.replace(opened, prefill=LeaderId(P.incarnation, rank), claim=b"both")
    up = peer_up(P, pool_spec(8, 4), "tcp")
    for event in (up, opened) if session_first else (opened, up):
        exchange.handle(event, 0.0)
    assert exchange.phase(transfer) is KVPoll.WAITING_FOR_INPUT
    message = published(exchange, transfer)
    assert (message.inferred, message.claim) == (inferred, b"both")


@pytest.mark.parametrize("opened", [True, False])
@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_no_word_is_heard_without_a_session(role: Role, opened: bool) -> None:
    """What was still queued when the session ended is of nobody any more: a parked destination, say, would be
    one that decode has given up."""
    transfer, peer = TransferId(5, 0, P, D), D if role is Role.PREFILL else P
    for message in (
        Destination(
            transfer=transfer,
            epoch=1,
            budget_s=9.0,
            prompt_tokens=4,
            prefix_tokens=0,
            pages=[0],
            transport="tcp",
            plan_hash=0,
        ),
        Committed(transfer),
        Abort(transfer),
        Failed(transfer, PEER_SAYS),
        Drained(transfer),
        Gone(transfer),
        Moved(transfer, 1),
    ):
        exchange = exchange_of(role, pool_spec(8, 4), peer)
        exchange.handle(events.PeerDown(peer, PeerLost("cut").info), 1.0)
        if opened:
            opening = expect if role is Role.PREFILL else receive
            exchange.handle(opening(transfer, 4, 60.0), 1.0)
        before = exchange.sizes()
        assert exchange.handle(events.Received(peer, message), 2.0) == []
        assert (exchange.counters["stray_messages"], exchange.sizes()) == (1, before)
