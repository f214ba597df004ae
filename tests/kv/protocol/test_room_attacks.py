"""An authenticated decode leader that is wrong or malicious cannot harm the rooms of others; a bug in one
room cannot harm the rest."""

from __future__ import annotations

import math
import time

import msgspec
import pytest
from room_bench import (
    CLAIM,
    ME,
    ONE,
    PAGES,
    PLAN,
    PROMPT,
    ROOM,
    THREE,
    TWO,
    Bench,
    all_sent,
    destination,
    opened,
    refused,
    transfer,
    words,
)

from segue.kv.errors import (
    MAX_ERROR_TEXT,
    AbortedByClient,
    ErrorCode,
    InvalidRequest,
    OutOfCapacity,
    PeerLost,
    TransferFailed,
)
from segue.kv.ids import KVPoll, LeaderId, Role, RoomKey
from segue.kv.limits import Limits
from segue.kv.protocol import events
from segue.kv.protocol.exchange import Exchange
from segue.kv.protocol.messages import Abort, Committed, Declined, Failed, HandoffMessage
from segue.kv.protocol.receptions import Reception, Receptions
from segue.kv.protocol.room_ranks import DpRanks
from segue.kv.protocol.rooms import Rooms
from segue.kv.session.frames import encode_message

LEFT = AbortedByClient("the client left").info
BROKE = TransferFailed("it broke").info


def test_destinations_that_wait_for_the_placer_have_no_more_than_their_leader_s_share() -> None:
    """Where no claim is known, one leader could fill all places and shut out the rooms of the others."""
    b = Bench(limits=Limits(max_early_destinations=8, early_share=0.25))
    rooms = [RoomKey(number) for number in range(1, 20)]
    for room in rooms:
        b.expect(room, claim=b"", decode=ONE, retain_s=0.0)
        b.hear(destination(room=room, claim=b""))
    for room in rooms:
        b.hear(destination(9, THREE, room=room, claim=b""))
    assert b.exchange.sizes()["early"] == 2
    assert b.exchange.counters["early_refused"] == 17
    assert b.hear(destination(decode=TWO, room=RoomKey(99))) == []
    assert all(b.phase(room) is KVPoll.WAITING_FOR_INPUT for room in rooms)


@pytest.mark.parametrize("word", [lambda t: Failed(t, BROKE), Abort], ids=["Failed", "Abort"])
def test_one_leader_s_words_displace_no_tombstone_of_another(word: type[HandoffMessage]) -> None:
    """Prefill would wait for a decode that has given up, and what was said to be gone could bind."""
    b = Bench(limits=Limits(max_transfers=8))
    b.hear(Abort(transfer()))
    for number in range(1000, 1100):
        b.hear(word(transfer(decode=THREE, room=RoomKey(number))))  # type: ignore[call-arg, arg-type]
    assert refused(b.hear(destination()))[0] is ErrorCode.TRANSFER_FAILED
    b.expect(decode=ONE)
    assert b.phase() is KVPoll.FAILED


def test_the_texts_of_a_peer_are_kept_no_longer_than_ours() -> None:
    b = Bench()
    long = msgspec.structs.replace(LEFT, text="x" * 10**6, origin="y" * 10**6)
    encoded = msgspec.msgpack.encode(Failed(transfer(), long))
    b.hear(msgspec.msgpack.decode(encoded, type=Failed))
    b.hear(Declined(transfer(room=RoomKey(8)), long, CLAIM))
    b.expect(decode=ONE)
    b.expect(RoomKey(8), decode=ONE)
    for room in (ROOM, RoomKey(8)):
        assert len(b.error(room).text) == len(b.error(room).origin) == MAX_ERROR_TEXT


@pytest.mark.parametrize(
    "message",
    [
        destination(claim=b"x" * 65),
        destination(transport="x" * 65),
        Declined(transfer(), LEFT, b"x" * 65),
    ],
    ids=["claim", "transport", "declined"],
)
def test_no_word_that_waits_is_longer_than_its_page_list(message: HandoffMessage) -> None:
    encoded = encode_message(msgspec.msgpack.Encoder(), message)
    with pytest.raises(msgspec.ValidationError, match="length <= 64"):
        msgspec.msgpack.decode(bytes(encoded)[-len(msgspec.msgpack.encode(message)) :], type=HandoffMessage)


@pytest.mark.parametrize("budget_s", [math.nan, -math.inf, -1.0, 0.0, math.inf, 1e308])
@pytest.mark.parametrize("parked", [True, False])
def test_any_budget_ends_within_the_room_s_own(budget_s: float, parked: bool) -> None:
    b = Bench()
    b.now = 5.0
    if parked:
        b.hear(destination(budget_s=budget_s))
    b.expect(retain_s=1.0)
    if not parked:
        b.hear(destination(budget_s=budget_s))
    b.at(65.0)
    assert b.phase() is KVPoll.FAILED
    assert b.releases == {ROOM: 1}
    b.at(2000.0)
    assert b.exchange.sizes()["ended"] == b.exchange.sizes()["deadlines"] == 0


def test_a_question_that_ended_unanswered_is_asked_again_for_who_comes_later() -> None:
    """Else a first destination with a short budget would keep others from their DP rank."""
    b = Bench(dp=DpRanks(size=4))
    b.hear(destination(decode=THREE, inferred=True, budget_s=0.01))
    b.hear(destination(decode=TWO, budget_s=9.0))
    b.tell(events.RoomUnknown(ROOM, BROKE))
    assert events.AskRoom(ROOM, 60.0) in b.hear(destination(inferred=True))
    assert words(b.tell(events.RoomFound(ROOM, LeaderId(ME.incarnation, 1)))) == ["Moved"]


# ---- retention -----------------------------------------------------------------------------------


@pytest.mark.parametrize("committed", [True, False])
def test_a_retained_room_is_evicted_between_two_bindings_unless_it_was_committed(committed: bool) -> None:
    b = all_sent(retain_s=30.0)
    b.hear(Committed(transfer()) if committed else Failed(transfer(), BROKE))
    b.end(OutOfCapacity("full").info, unbound_s=0.0)
    assert (b.phase() is KVPoll.FAILED) == (not committed)
    assert words(b.hear(destination(1, TWO)), TWO)[0] == ("Accepted" if committed else "Failed")


# ---- many rooms ----------------------------------------------------------------------------------


def test_the_work_for_a_word_does_not_grow_with_the_number_of_rooms() -> None:
    def took(rooms: int) -> float:
        b = Bench(limits=Limits(max_transfers=10_000, max_early_destinations=10_000))
        for number in range(rooms):
            b.exchange.handle(
                events.ExpectRoom(key=RoomKey(10**6 + number), prompt_tokens=10, deadline=60.0), 0.0
            )
        messages = [events.Received(ONE, destination(room=RoomKey(number))) for number in range(1, 101)]
        best = math.inf
        for batch in range(4):
            began = time.perf_counter()
            for message in messages[25 * batch : 25 * batch + 25]:
                b.exchange.handle(message, 0.0)
            best = min(best, time.perf_counter() - began)
        return best

    assert took(8000) < 8 * took(10)


def test_closed_rooms_in_quarantine_are_not_searched_for_the_oldest_and_displace_no_other() -> None:
    b = Bench(limits=Limits(max_transfers=2))
    for number in range(1, 6):
        room = RoomKey(number)
        b.expect(room)
        b.hear(destination(room=room))
        b.send(room=room)
        b.end(LEFT, room)
    over = RoomKey(9)
    b.expect(over)
    b.end(LEFT, over)
    assert refused(b.hear(destination(decode=TWO, room=over)), TWO)[0] is LEFT.code, "it is remembered"
    b.fence()
    assert len(b.exchange.rooms.rooms) == 2
    assert set(b.releases.values()) == {1}


# ---- bugs ----------------------------------------------------------------------------------------


def test_what_was_decided_before_a_bug_of_another_room_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    b, other = Bench(), RoomKey(8)
    b.expect()
    b.expect(other)
    normal = Rooms._late

    def breaks(self: Rooms, room: object) -> object:
        if room is self.rooms[other]:
            raise RuntimeError("a bug")
        return normal(self, room)  # type: ignore[arg-type]

    monkeypatch.setattr(Rooms, "_late", breaks)
    with pytest.raises(RuntimeError):
        b.exchange.handle(events.Tick(), 60.0)
    ended = [effect.key for effect in b.exchange.decided if isinstance(effect, events.Release)]
    assert ended == [ROOM]


def test_a_room_that_breaks_on_the_end_of_its_hand_off_still_hears_its_release(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    b = opened()
    b.hear(destination())
    normal = Rooms.on_phase

    def breaks(self: Rooms, room: object, effect: events.HandoffPhase) -> None:
        normal(self, room, effect)  # type: ignore[arg-type]
        if effect.phase.terminal:
            raise RuntimeError("a bug")

    monkeypatch.setattr(Rooms, "on_phase", breaks)
    b.end(LEFT)
    assert (b.phase(), b.releases) == (KVPoll.FAILED, {ROOM: 1})


@pytest.mark.parametrize("at", [KVPoll.WAITING_FOR_INPUT, KVPoll.TRANSFERRING, KVPoll.FAILED])
def test_a_room_that_breaks_ends_alone_and_is_released(at: KVPoll, monkeypatch: pytest.MonkeyPatch) -> None:
    b, other = Bench(), RoomKey(8)
    normal, broke = Rooms.on_phase, []

    def breaks(self: Rooms, room: object, effect: events.HandoffPhase) -> None:
        if effect.transfer == transfer() and effect.phase is at and not broke:
            broke.append(at)
            raise RuntimeError("a bug")
        normal(self, room, effect)  # type: ignore[arg-type]

    monkeypatch.setattr(Rooms, "on_phase", breaks)
    for room in (ROOM, other):
        b.expect(room)
        b.hear(destination(room=room))
        if not b.phase(room).terminal:
            b.send(room=room)
    assert not b.phase(other).terminal
    b.down(ONE)
    b.fence()
    assert broke
    assert [b.error(room).code for room in (ROOM, other)] == [ErrorCode.INTERNAL, ErrorCode.PEER_LOST]
    assert b.releases == {ROOM: 1, other: 1}


@pytest.mark.parametrize("at", [KVPoll.WAITING_FOR_INPUT, KVPoll.FAILED])
@pytest.mark.parametrize("published", [True, False])
def test_a_receiver_that_breaks_ends_alone_and_is_released(
    at: KVPoll, published: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange = Exchange(Role.DECODE, ONE, "decode there", Limits(), "fake")
    normal, broke = Receptions._on_phase, []

    def breaks(self: Receptions, reception: Reception, effect: events.HandoffPhase) -> None:
        if reception.key == ROOM and effect.phase is at and not broke:
            broke.append(at)
            raise RuntimeError("a bug")
        normal(self, reception, effect)

    monkeypatch.setattr(Receptions, "_on_phase", breaks)
    effects = exchange.handle(events.PeerUp(ME, PLAN), 0.0)
    rooms = (ROOM, RoomKey(8))
    for key in rooms:
        opening = events.OpenReceiver(key=key, prefill=ME, prompt_tokens=PROMPT, deadline=60.0)
        effects += exchange.handle(opening, 0.0)
        if published and exchange.phase_of(key) is KVPoll.WAITING_FOR_INPUT:
            effects += exchange.handle(events.Publish(key, PAGES, 0), 0.0)
    effects += exchange.handle(events.PeerDown(ME, PeerLost("dead").info, dead=True), 1.0)
    for fence in [effect for effect in effects if isinstance(effect, events.Fence)]:
        effects += exchange.handle(events.FenceDone(fence.transfer, fence.rank, fence.partner, True), 1.0)
    assert broke
    for key in rooms:
        ends = [e for e in effects if isinstance(e, events.Phase) and e.key == key and e.phase.terminal]
        releases = [e for e in effects if e == events.Release(key)]
        assert (len(ends), len(releases)) == (1, 1)
        assert effects.index(ends[0]) < effects.index(releases[0])
    exchange.check_integrity()


def test_nothing_of_a_refused_event_is_carried_out() -> None:
    b = opened()
    with pytest.raises(InvalidRequest, match="a room of its own"):
        b.expect()
    assert b.exchange.decided == []
