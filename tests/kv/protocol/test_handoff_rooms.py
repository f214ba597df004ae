"""Prefill's queries about a room that decode looks for too early, and the memory of unknown rooms."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from handoff_world import expect, peer_up
from test_handoff_tombstones import ME, ONE, SPEC, TWO, destination, prefill

from segue.kv.errors import ErrorCode, InvalidRequest, PeerLost, TransferFailed
from segue.kv.ids import KVPoll, LeaderId, Role, RoomKey, Span, TransferId
from segue.kv.limits import Limits
from segue.kv.protocol import events
from segue.kv.protocol.exchange import Exchange
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
    HandoffMessage,
    Metadata,
    Moved,
)
from segue.kv.protocol.room_ranks import (
    FAIL_ON_CONFLICT,
    FOLLOW_BOOTSTRAP_ROOM,
    REDIRECT_ON_CONFLICT,
    DpRanks,
)

TRANSFER = TransferId(5, 0, ME, ONE)
ROOM = TRANSFER.sent_as


def elsewhere(rank: int) -> events.RoomFound:
    """The registry's answer: that rank of our own instance has the room."""
    return events.RoomFound(ROOM, LeaderId(ME.incarnation, rank))


LEFT = TransferFailed("it left", origin="decode far away").info


def asking(
    on_conflict: str = REDIRECT_ON_CONFLICT, *, inferred: bool = True, budget_s: float = 20.0
) -> Exchange:
    """A prefill leader at which a destination has come too early."""
    limits, dp = Limits(request_budget_s=100.0), DpRanks(size=4, on_conflict=on_conflict)
    exchange = Exchange(Role.PREFILL, ME, "prefill here", limits, dp=dp)
    for peer in (ONE, TWO):
        exchange.handle(peer_up(peer, SPEC, "tcp"), 0.0)
    plan = exchange.links[ONE].plan
    early = msgspec.structs.replace(
        destination(TRANSFER, 1, budget_s), inferred=inferred, plan_hash=plan.hash(4, 0, 1)
    )
    effects = exchange.handle(events.Received(ONE, early), 1.0)
    assert effects == ([events.AskRoom(ROOM, min(budget_s, 100.0))] if inferred else [])
    return exchange


def said(effects: list[events.Effect], peer: LeaderId = ONE) -> list[HandoffMessage]:
    """The sent messages, all to `peer`."""
    sent = [effect for effect in effects if isinstance(effect, events.Send)]
    assert {effect.peer for effect in sent} <= {peer}
    return [effect.message for effect in sent]


def settled(effects: list[events.Effect]) -> int:
    found = [effect for effect in effects if isinstance(effect, events.RoomSettled)]
    assert all(effect == events.RoomSettled(ROOM) for effect in found)
    return len(found)


@pytest.mark.parametrize("budget_s", [20.0, 1e9])
def test_the_registry_is_asked_once_and_for_as_long_as_the_destination_waits(budget_s: float) -> None:
    exchange = asking(budget_s=budget_s)
    again = msgspec.structs.replace(destination(TRANSFER, 1, budget_s), inferred=True)
    assert exchange.handle(events.Received(ONE, again), 2.0) == []
    assert exchange.counters["repeats"] == 1
    assert exchange.next_deadline() == 1.0 + min(budget_s, 100.0)


ENDS: dict[str, tuple[events.Event, list[type[Any]]]] = {
    "its request comes": (expect(TRANSFER, 4, 60.0), []),
    "its time is over": (events.Tick(), [Failed, Gone]),
    "its peer is lost": (events.PeerDown(ONE, PeerLost("cut").info), []),
    "it is aborted": (events.Received(ONE, Abort(TRANSFER)), [Drained]),
    "it has failed": (events.Received(ONE, Failed(TRANSFER, LEFT)), [Drained]),
    "it is gone": (events.Received(ONE, Gone(TRANSFER)), []),
    "it is elsewhere": (elsewhere(2), [Moved]),
}


@pytest.mark.parametrize("inferred", [True, False])
@pytest.mark.parametrize("end", ENDS)
def test_once_the_destination_waits_no_longer_the_registry_is_not_asked_any_more(
    end: str, inferred: bool
) -> None:
    exchange = asking(inferred=inferred)
    event, words = ENDS[end]
    effects = exchange.handle(event, 21.0 if end == "its time is over" else 2.0)
    if end == "it is elsewhere" and not inferred:
        assert effects == [], "the placer has said that it comes to this rank"
        return
    assert settled(effects) == (1 if inferred else 0)
    if end != "its request comes":
        assert [type(message) for message in said(effects)] == words
    assert exchange.sizes()["early"] == 0
    assert exchange.handle(elsewhere(2), 22.0) == [], "too late"
    exchange.check_integrity()


@pytest.mark.parametrize(
    ("end", "code", "text"),
    [
        ("its peer is lost", ErrorCode.PEER_LOST, "cut"),
        ("it is aborted", ErrorCode.TRANSFER_FAILED, "before it began here"),
        ("it has failed", ErrorCode.TRANSFER_FAILED, "it left"),
        ("it is gone", ErrorCode.TRANSFER_FAILED, "before it began here"),
        ("it is elsewhere", ErrorCode.DP_RANK_CONFLICT, "DP rank 2"),
    ],
)
def test_a_request_that_comes_after_its_destination_has_ended_fails_at_once_for_that_reason(
    end: str, code: ErrorCode, text: str
) -> None:
    exchange = asking()
    exchange.handle(ENDS[end][0], 2.0)
    assert exchange.phase(TRANSFER) is None, "nothing was opened here"
    begun, ended, release = exchange.handle(expect(TRANSFER, 4, 60.0), 3.0)
    assert begun == events.Phase(ROOM, KVPoll.BOOTSTRAPPING)
    assert (ended.phase, ended.error.code, ended.error.room) == (
        KVPoll.FAILED,
        code,
        0 if text == "it left" else 5,
    )
    assert text in ended.error.text
    assert ended.error.origin == ("decode far away" if text == "it left" else "prefill here")
    assert release == events.Release(ROOM)
    with pytest.raises(InvalidRequest, match="used already"):
        exchange.handle(expect(TRANSFER, 4, 60.0), 4.0)


@pytest.mark.parametrize("on_conflict", [REDIRECT_ON_CONFLICT, FAIL_ON_CONFLICT])
def test_decode_is_sent_to_the_rank_that_has_the_room_or_both_halves_end(on_conflict: str) -> None:
    exchange = asking(on_conflict)
    assert exchange.handle(elsewhere(ME.dp_rank), 2.0) == [], "it is here: the request comes"
    assert exchange.handle(events.RoomFound(ROOM, LeaderId(TWO.incarnation, 2)), 2.0) == [], "not ours"
    assert exchange.handle(events.RoomFound(RoomKey(6), LeaderId(ME.incarnation, 2)), 2.0) == []
    assert exchange.sizes()["early"] == 1
    [word] = said(exchange.handle(elsewhere(3), 2.0))
    assert (word.transfer, word.dp_rank) == (TRANSFER, 3)
    if on_conflict == REDIRECT_ON_CONFLICT:
        assert word.error is None
    else:
        assert (word.error.code, word.error.room) == (ErrorCode.DP_RANK_CONFLICT, 5)
        assert not word.error.retryable
    late = said(exchange.handle(events.Received(ONE, destination(TRANSFER, 1)), 3.0))
    assert [type(message) for message in late] == [Failed, Gone], "it stays so: nothing is written here"


def test_a_room_that_is_found_after_its_request_has_come_changes_nothing() -> None:
    exchange = asking()
    exchange.handle(expect(TRANSFER, 4, 60.0), 2.0)
    assert exchange.handle(elsewhere(2), 3.0) == []
    assert exchange.phase(TRANSFER) is KVPoll.WAITING_FOR_INPUT


# ---- what is unknown ---------------------------------------------------------------------------------


@pytest.mark.parametrize("word", [lambda transfer: Failed(transfer, LEFT), Abort])
def test_a_failure_of_what_is_not_open_yet_is_remembered_as_long_as_a_request_may_take(word: Any) -> None:
    exchange = prefill(request_budget_s=50.0, peer_silence_s=1.0)
    transfers = [TransferId(room, 0, ME, ONE) for room in (1, 2)]
    for transfer in transfers:
        exchange.handle(events.Received(ONE, word(transfer)), 10.0)
    assert exchange.next_deadline() == 60.0
    late = said(exchange.handle(events.Received(ONE, destination(transfers[0], 1)), 10.5))
    assert [type(message) for message in late] == [Failed, Gone], "it hears why, and writes for nothing"
    again = exchange.handle(peer_up(ONE, SPEC, "tcp"), 11.0)
    assert again == [], "who said it knows it"
    exchange.handle(events.Tick(), 59.9)
    phases = exchange.handle(expect(transfers[0], 4, 90.0), 59.9)
    assert [type(effect) for effect in phases] == [events.Phase, events.Phase, events.Release]
    exchange.handle(events.Tick(), 60.0)
    assert exchange.handle(expect(transfers[1], 4, 90.0), 60.0) == [
        events.Phase(transfers[1].sent_as, KVPoll.BOOTSTRAPPING)
    ]


DECODE_HEARS = {Accepted, Moved, ChunkPosted, Metadata, Failed, Drained, Gone}
PREFILL_HEARS = {Destination, Declined, Committed, Failed, Abort, Gone}


def one_of_each(transfer: TransferId) -> list[HandoffMessage]:
    return [
        destination(transfer, 1),
        Accepted(transfer),
        Moved(transfer, 1),
        Declined(transfer, LEFT),
        ChunkPosted(transfer=transfer, source=0, target=0, sequence=0, span=Span(0, 4), nbytes=0, final=True),
        Metadata(transfer=transfer, prompt_tokens=4, content=b"1"),
        Committed(transfer),
        Failed(transfer, LEFT),
        Abort(transfer),
        Drained(transfer),
        Gone(transfer),
    ]


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_a_word_of_the_wrong_direction_is_nobody_s_and_is_not_answered(role: Role) -> None:
    legal = PREFILL_HEARS if role is Role.PREFILL else DECODE_HEARS
    for number in range(len(one_of_each(TRANSFER))):
        exchange = Exchange(role, ME, "here", Limits(), "tcp")
        exchange.handle(peer_up(ONE, SPEC, "tcp"), 0.0)
        ids = (ME, ONE) if role is Role.PREFILL else (ONE, ME)
        message = one_of_each(TransferId(5, 0, *ids))[number]
        effects = exchange.handle(events.Received(ONE, message), 1.0)
        assert exchange.counters["stray_messages"] == (0 if type(message) in legal else 1), type(message)
        if type(message) not in legal:
            assert effects == []
        # Of another leader it is stray in any case, and so it is over the session of another one.
        other = one_of_each(TransferId(5, 0, *((TWO, ONE) if role is Role.PREFILL else (ONE, TWO))))[number]
        before = exchange.counters["stray_messages"]
        assert exchange.handle(events.Received(ONE, other), 1.0) == []
        assert exchange.handle(events.Received(TWO, message), 1.0) == []
        assert exchange.counters["stray_messages"] == before + 2


@pytest.mark.parametrize(
    ("dp", "rank"),
    [
        (DpRanks(size=4, load_balance=FOLLOW_BOOTSTRAP_ROOM), 2),
        (DpRanks(size=1, load_balance=FOLLOW_BOOTSTRAP_ROOM), None),
        (DpRanks(size=4), None),
    ],
)
def test_a_room_names_a_rank_where_prefill_has_several_and_goes_by_rooms(
    dp: DpRanks, rank: int | None
) -> None:
    assert dp.follows(4 * 10**18 + 6) == rank
