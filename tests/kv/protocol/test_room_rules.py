"""The eleven rules of rooms: prefill opens one before it knows decode, and a destination binds it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from room_bench import (
    CLAIM,
    ME,
    ONE,
    PAGES,
    PROMPT,
    ROOM,
    THREE,
    TWO,
    Bench,
    all_sent,
    bound,
    destination,
    opened,
    refusal,
    refused,
    said,
    transfer,
    words,
    writing,
)

from segue.kv.errors import (
    AbortedByClient,
    BootstrapUnreachable,
    DpRankConflict,
    ErrorCode,
    ErrorInfo,
    InvalidRequest,
    OutOfCapacity,
    TransferFailed,
)
from segue.kv.ids import KVPoll, LeaderId, Role, RoomKey, Span, TransferId
from segue.kv.limits import Limits
from segue.kv.protocol import events
from segue.kv.protocol.exchange import Exchange
from segue.kv.protocol.machine import IllegalEvent
from segue.kv.protocol.messages import (
    Abort,
    Accepted,
    ChunkPosted,
    Committed,
    Declined,
    Failed,
    Gone,
    HandoffMessage,
    Metadata,
    Moved,
)
from segue.kv.protocol.room_ranks import (
    FAIL_ON_CONFLICT,
    DpRanks,
)
from segue.kv.ready import ReadyEvent

LEFT = AbortedByClient("the client left").info
BROKE = TransferFailed("it broke").info
FULL = OutOfCapacity("others need the pages").info


# ---- 1: the handle -----------------------------------------------------------------------------


def test_rule_1_a_room_for_which_nobody_came_ends_at_its_deadline() -> None:
    b = opened(budget_s=30.0)
    b.send()
    b.finish()
    assert b.at(29.9) == []
    b.at(30.0)
    assert (b.phase(), b.error().code) == (KVPoll.FAILED, ErrorCode.BOOTSTRAP_TIMEOUT)
    assert b.releases == {ROOM: 1}
    assert [phase.phase for phase in b.phases[ROOM]] == [KVPoll.BOOTSTRAPPING, KVPoll.FAILED]


def test_rule_1_what_the_engine_gave_before_decode_came_is_replayed_in_order() -> None:
    b = opened()
    assert b.send(0, 4) == b.send(4, 8, layers=1) == b.finish(b"mine") == []
    effects = b.hear(destination())
    assert words(effects) == ["Accepted", "Metadata"]
    writes = [effect for effect in effects if isinstance(effect, events.PostWrite)]
    assert [len(write.blocks) > 0 for write in writes] == [True, True]
    b.send(4, 8)
    b.send(8, PROMPT)
    chunks = [message for message in said(b.land()) if isinstance(message, ChunkPosted)]
    assert [(chunk.span, chunk.final) for chunk in chunks] == [
        (Span(0, 4), False),
        (Span(4, 8), False),
        (Span(8, PROMPT), True),
    ]
    b.hear(Committed(transfer()))
    assert [phase.phase for phase in b.phases[ROOM]] == [
        KVPoll.BOOTSTRAPPING,
        KVPoll.WAITING_FOR_INPUT,
        KVPoll.TRANSFERRING,
        KVPoll.SUCCESS,
    ]
    assert b.releases == {ROOM: 1}


def test_rule_1_a_room_that_was_placed_is_bound_by_its_decode_leader_alone() -> None:
    b = opened(decode=TWO)
    assert refused(b.hear(destination())) == (ErrorCode.PEER_REFUSED, False)
    assert words(b.hear(destination(decode=TWO)), TWO) == ["Accepted"]


# ---- 2: the claim ------------------------------------------------------------------------------

WRONG = {"another": b"another", "none": b"", "a longer one": CLAIM + b"!"}


@pytest.mark.parametrize("parked", [True, False], ids=["before expect", "after it"])
@pytest.mark.parametrize("wrong", WRONG)
def test_rule_2_a_bad_first_claimant_leaves_the_room_open(wrong: str, parked: bool) -> None:
    b = Bench()
    message = destination(decode=TWO, claim=WRONG[wrong])
    if parked:
        assert b.hear(message) == []
        effects = b.expect()
    else:
        b.expect()
        effects = b.hear(message)
    assert refused(effects, TWO) == (ErrorCode.METADATA_MISMATCH, False)
    assert not b.writes
    assert (b.phase(), b.exchange.sizes()["rooms"], b.exchange.sizes()["transfers"]) == (
        KVPoll.BOOTSTRAPPING,
        1,
        0,
    )
    b.send()
    assert refused(b.hear(destination(decode=TWO)), TWO)[0] is ErrorCode.METADATA_MISMATCH, "it is over"
    assert words(b.hear(destination())) == ["Accepted"]


@pytest.mark.parametrize("word", [Abort, Gone], ids=["abort", "gone"])
def test_rule_2_the_end_of_a_later_attempt_that_was_refused_leaves_a_placed_room_open(word: type) -> None:
    b = opened(decode=ONE)
    later = destination(attempt=1, claim=b"another")
    assert refused(b.hear(later))[0] is ErrorCode.METADATA_MISMATCH
    assert words(b.hear(word(later.transfer))) in (["Gone"], [])
    assert b.phase() is KVPoll.BOOTSTRAPPING
    assert words(b.hear(destination())) == ["Accepted"]


def test_rule_2_the_end_of_the_placed_attempt_that_was_refused_ends_its_room() -> None:
    """Its decode has ended its half, and no other may come: the engine need not wait for the deadline."""
    b = opened(decode=ONE)
    placed = destination(claim=b"another")
    assert refused(b.hear(placed))[0] is ErrorCode.METADATA_MISMATCH
    b.hear(Abort(placed.transfer))
    assert b.phase() is KVPoll.FAILED


def test_rule_2_an_epoch_that_is_in_use_is_refused_and_leaves_both_rooms_as_they_are() -> None:
    b, other = bound(), RoomKey(8)
    b.expect(other)
    assert "two hand-offs" in refusal(b.hear(destination(room=other, epoch=destination().epoch))).text
    assert (b.phase(), b.phase(other)) == (KVPoll.WAITING_FOR_INPUT, KVPoll.BOOTSTRAPPING)
    assert words(b.hear(destination(1, room=other))) == ["Accepted"]


def test_rule_2_where_no_claim_is_known_the_empty_one_must_be_empty_on_both_sides() -> None:
    b = opened(claim=b"")
    assert refused(b.hear(destination(decode=TWO)), TWO)[0] is ErrorCode.METADATA_MISMATCH
    assert words(b.hear(destination(claim=b""))) == ["Accepted"]


def test_rule_2_a_claim_has_at_most_64_bytes_on_both_sides() -> None:
    b = Bench()
    with pytest.raises(InvalidRequest, match="at most 64 bytes, not 65"):
        b.expect(claim=b"x" * 65)
    b.expect(claim=b"x" * 64)
    decode = Exchange(Role.DECODE, ONE, "decode", Limits(), "fake")
    opening = {"key": ROOM, "prefill": ME, "prompt_tokens": 1, "deadline": 9.0}
    with pytest.raises(InvalidRequest, match="at most 64 bytes, not 65"):
        decode.handle(events.OpenReceiver(**opening, claim=b"x" * 65), 0.0)


# ---- 3: attempts -------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [bound, writing, all_sent])
def test_rule_3_while_one_binding_lives_another_decode_is_refused_and_may_try_again(
    make: Callable[..., Bench],
) -> None:
    b = make()
    before = b.phase()
    assert refused(b.hear(destination(1, TWO)), TWO) == (ErrorCode.TRANSFER_FAILED, True)
    assert refused(b.hear(destination(1, ONE)), ONE) == (ErrorCode.TRANSFER_FAILED, True), "by number alone"
    assert b.phase() is before
    assert b.exchange.sizes()["early"] == 0


def test_rule_3_of_two_that_wait_the_valid_one_binds_and_the_other_is_refused() -> None:
    b = Bench()
    assert b.hear(destination(0, TWO, claim=b"another")) == []
    assert b.hear(destination(1, ONE)) == b.hear(destination(2, THREE)) == []
    effects = b.expect()
    assert refused(effects, TWO) == (ErrorCode.METADATA_MISMATCH, False)
    assert words(effects, ONE) == ["Accepted"]
    assert refused(effects, THREE) == (ErrorCode.TRANSFER_FAILED, True)
    assert b.exchange.sizes()["early"] == 0


def test_rule_3_a_doubled_destination_changes_nothing_parked_or_bound() -> None:
    b = Bench()
    assert b.hear(destination()) == b.hear(destination()) == []
    assert b.exchange.sizes()["early"] == 1
    b.expect()
    assert b.hear(destination()) == b.hear(destination(pages=[7, 8, 9])) == []
    assert b.exchange.counters["repeats"] == 3


def test_rule_3_after_one_has_failed_the_next_one_binds() -> None:
    b = writing(retain_s=30.0)
    b.hear(Failed(transfer(), BROKE))
    assert not b.phase().terminal
    effects = b.hear(destination(1, TWO))
    assert words(effects, TWO) == ["Accepted"]
    assert [write.transfer for write in b.writes] == [transfer(), transfer(1, TWO)]
    b.fence(transfer())
    b.land()
    b.finish()
    b.hear(Committed(transfer(1, TWO)))
    b.end(LEFT)
    assert (b.phase(), b.phases[ROOM][-1].peer) == (KVPoll.SUCCESS, TWO)


def test_rule_3_generations_and_ordinals_are_rooms_of_their_own() -> None:
    rooms = [RoomKey(7, generation, ordinal) for generation in (0, 1) for ordinal in (0, 1)]
    b = Bench()
    for room in rooms:
        b.expect(room)
    for room in reversed(rooms):  # the order of arrival says nothing
        effects = b.hear(destination(room=room))
        assert [e.key for e in effects if isinstance(e, events.Phase)] == [room]
    b.send(room=rooms[2])
    assert [write.transfer for write in b.writes] == [transfer(room=rooms[2])]
    b.end(LEFT, rooms[3])
    assert [b.phase(room) for room in rooms] == [
        KVPoll.WAITING_FOR_INPUT,
        KVPoll.WAITING_FOR_INPUT,
        KVPoll.TRANSFERRING,
        KVPoll.FAILED,
    ]
    with pytest.raises(InvalidRequest, match="a room of its own"):
        b.expect(rooms[3])
    assert len({room.registered for room in rooms}) == 2, "one number for each generation"


# ---- the placer has given the room to another decode leader --------------------------------------

PLACED_AGAIN = events.PlaceRoom(ROOM, 1, TWO)


@pytest.mark.parametrize("decode", [TWO, ONE], ids=["another leader", "the same"])
@pytest.mark.parametrize("make", [writing, all_sent])
@pytest.mark.parametrize("word_first", [True, False])
def test_the_placer_s_word_ends_the_live_attempt_and_nothing_else_does(
    word_first: bool, make: Callable[..., Bench], decode: LeaderId
) -> None:
    b = make(decode=ONE, retain_s=0.0)
    wrong = destination(5, decode, claim=b"another")
    assert refused(b.hear(wrong), decode)[0] is ErrorCode.METADATA_MISMATCH
    comes, word = destination(1, decode), events.PlaceRoom(ROOM, 1, decode)
    effects = []
    if not word_first:
        assert b.hear(comes) == b.hear(comes) == [], "a number ends nothing"
        assert b.exchange.counters["repeats"] == 1
    effects += b.tell(word)
    assert "Failed" in words(effects, ONE)
    if word_first:
        effects += b.hear(comes)
    assert "Accepted" in words(effects, decode)
    b.fence(transfer())
    assert b.hear(Committed(transfer())) == [], "the placer takes nothing of it"
    b.land()
    if make is writing:
        b.finish()
    b.hear(Committed(transfer(1, decode)))
    assert (b.phase(), b.phases[ROOM][-1].peer) == (KVPoll.SUCCESS, decode)
    assert b.releases == {ROOM: 1}


@pytest.mark.parametrize("options", [{"retain_s": 30.0}, {"decode": ONE}], ids=["not placed", "not retained"])
def test_a_later_attempt_waits_only_in_a_room_that_is_placed_and_retained(options: Any) -> None:
    b = all_sent(**options)
    assert refused(b.hear(destination(2, THREE)), THREE) == (ErrorCode.TRANSFER_FAILED, True)


@pytest.mark.parametrize("how", ["never bound", "failed", "lost in doubt"])
def test_a_destination_that_comes_before_the_placer_s_word_waits_for_it(how: str) -> None:
    b = opened(decode=ONE, retain_s=0.0)
    if how != "never bound":
        b.hear(destination())
        b.send()
    if how == "failed":
        b.hear(Failed(transfer(), BROKE))
    if how == "lost in doubt":
        b.finish()
        b.land()
        b.down(ONE)
        b.up(ONE)
    waits = destination(1, TWO)
    assert b.hear(waits) == b.hear(waits) == []
    assert b.exchange.sizes()["early"] == 1
    assert words(b.tell(PLACED_AGAIN), TWO)[0] == "Accepted"
    assert b.exchange.sizes()["early"] == 0


def test_without_the_placer_s_word_it_is_refused_in_time_and_ends_nothing() -> None:
    b = opened(decode=ONE, retain_s=0.0)
    b.hear(destination(1, TWO, budget_s=5.0))
    assert refused(b.at(5.0), TWO)[0] is ErrorCode.DEADLINE_EXCEEDED
    assert words(b.hear(destination())) == ["Accepted"]


def test_a_room_that_was_placed_again_is_not_for_the_decode_leader_before() -> None:
    b = opened(decode=ONE, retain_s=0.0)
    assert b.tell(PLACED_AGAIN) == []
    assert refused(b.hear(destination()))[0] is ErrorCode.PEER_REFUSED
    b.hear(Failed(transfer(), LEFT))
    b.down(ONE)
    assert words(b.hear(destination(1, TWO)), TWO) == ["Accepted"]


def test_an_attempt_that_was_replaced_twice_does_not_bind_again() -> None:
    """The first decode leader has the room again; what it says of its first attempt is late."""
    b = opened(decode=ONE, retain_s=0.0)
    b.tell(PLACED_AGAIN)
    b.tell(events.PlaceRoom(ROOM, 2, ONE))
    assert refused(b.hear(destination())) == (ErrorCode.TRANSFER_FAILED, True)
    assert words(b.hear(destination(2))) == ["Accepted"]


@pytest.mark.parametrize("fenced", [True, False])
def test_a_commit_that_the_session_has_lost_is_asked_for_and_ends_the_room(fenced: bool) -> None:
    """Nobody is placed again: else the pages would wait for the request's deadline."""
    b = all_sent(decode=ONE, retain_s=0.0)
    b.down(ONE)
    if fenced:
        b.fence()
    assert words(b.up(ONE)) == ["Failed"], "decode answers with what it has sent before"
    b.hear(Committed(transfer()))
    b.hear(Gone(transfer()))
    b.fence()
    assert (b.phase(), b.phases[ROOM][-1].peer) == (KVPoll.SUCCESS, ONE)
    assert b.releases == {ROOM: 1}


@pytest.mark.parametrize("sent", [True, False])
def test_a_lost_commit_is_not_taken_after_the_placer_s_word_or_before_everything_was_sent(sent: bool) -> None:
    b = (all_sent if sent else writing)(decode=ONE, retain_s=0.0)
    b.down(ONE)
    b.up(ONE)
    if sent:
        b.tell(PLACED_AGAIN)
    b.hear(Committed(transfer()))
    assert not b.phase().terminal


@pytest.mark.parametrize("commits", [False, True])
def test_an_attempt_waits_for_the_placer_s_words_although_the_one_that_it_replaces_never_came(
    commits: bool,
) -> None:
    """The placer gives up two decodes before prefill has read its first word. The first one has the room."""
    b = all_sent(decode=ONE, retain_s=0.0)
    assert said(b.hear(destination(2, THREE)), THREE) == []
    if commits:
        effects = b.hear(Committed(transfer()))
        assert refused(effects, THREE) == (ErrorCode.OUT_OF_CAPACITY, True), "an attempt that does not count"
        return
    b.tell(PLACED_AGAIN)
    b.fence()
    assert b.phase() is KVPoll.TRANSFERRING, "the word is of another attempt"
    effects = b.tell(events.PlaceRoom(ROOM, 2, THREE))
    assert words(effects, THREE) == ["Accepted", "Metadata"]
    b.land()
    b.hear(Committed(transfer(2, THREE)))
    assert b.phase() is KVPoll.SUCCESS


@pytest.mark.parametrize("later_first", [False, True])
def test_an_attempt_that_waits_for_the_placer_is_not_refused_by_the_one_that_it_follows(
    later_first: bool,
) -> None:
    b = writing(decode=ONE, retain_s=0.0)
    earlier, later = destination(1, ONE), destination(2, THREE)
    effects = [
        effect for word in ((later, earlier) if later_first else (earlier, later)) for effect in b.hear(word)
    ]
    assert said(effects, THREE) == []
    b.finish()
    b.land()
    b.fence()
    effects = b.tell(events.PlaceRoom(ROOM, 2, THREE))
    assert words([*effects, *b.fence()], THREE) == ["Accepted", "Metadata"]


@pytest.mark.parametrize("first", ["destination", "commit"])
def test_a_commit_that_comes_before_the_placer_s_word_ends_the_next_attempt_so_that_it_is_repeated(
    first: str,
) -> None:
    """The placer has given the first decode up, and cannot know that it commits."""
    b = all_sent(decode=ONE, retain_s=0.0)
    steps = [lambda: b.hear(destination(1, TWO)), lambda: b.hear(Committed(transfer()))]
    effects = [effect for step in (steps if first == "destination" else reversed(steps)) for effect in step()]
    assert refused(effects, TWO) == (ErrorCode.OUT_OF_CAPACITY, True)
    assert refusal(effects, TWO).origin == "prefill here", "the next decode is not at fault"
    assert b.tell(PLACED_AGAIN) == []
    assert b.phase() is KVPoll.SUCCESS


def test_a_word_that_comes_after_its_own_attempt_has_bound_changes_nothing() -> None:
    """The decode leader that the room is placed for may bind with a later attempt."""
    b = opened(decode=ONE, retain_s=0.0)
    assert words(b.hear(destination(1))) == ["Accepted"]
    assert b.tell(events.PlaceRoom(ROOM, 1, ONE)) == []
    assert b.phase() is KVPoll.WAITING_FOR_INPUT


@pytest.mark.parametrize(("error", "over"), [(BROKE, False), (LEFT, True)], ids=["may be mended", "final"])
@pytest.mark.parametrize("when", ["before prefill", "unbound", "bound"])
def test_a_failure_that_no_other_attempt_can_mend_ends_the_room_of_a_placed_decode(
    when: str, error: ErrorInfo, over: bool
) -> None:
    b = Bench()
    if when == "before prefill":
        b.hear(Failed(transfer(), error))
    b.expect(decode=ONE, retain_s=0.0)
    if when == "bound":
        b.hear(destination())
    if when != "before prefill":
        b.hear(Failed(transfer(), error))
    assert b.phase().terminal == over
    if not over:
        b.tell(PLACED_AGAIN)
        assert words(b.hear(destination(1, TWO)), TWO) == ["Accepted"]


def test_a_room_that_is_retained_for_no_time_outlives_failures_and_ends_with_its_first_success() -> None:
    b = all_sent(decode=ONE, retain_s=0.0)
    b.down(ONE)
    b.tell(PLACED_AGAIN)
    b.hear(destination(1, TWO))
    b.land()
    assert not b.phase().terminal
    b.hear(Committed(transfer(1, TWO)))
    assert b.phase() is KVPoll.SUCCESS


# ---- 5: what proves that nothing is written ------------------------------------------------------


def test_rule_5_what_still_drains_is_never_said_to_be_gone() -> None:
    b = writing()
    b.end(LEFT)
    for message in (Abort(transfer()), Failed(transfer(), BROKE), destination(), Gone(transfer())):
        assert "Gone" not in words(b.hear(message))
    assert words(b.fence()) == ["Drained"]
    assert refusal(b.hear(destination())).code is ErrorCode.ABORTED_BY_CLIENT
    assert words(b.hear(Abort(transfer()))) == ["Gone"]


def test_rule_5_a_hand_off_that_was_said_to_be_gone_never_binds() -> None:
    """Its tombstone came before the answer: the bench sees each write after `Gone`."""
    b = bound(retain_s=30.0)
    b.hear(destination(1, TWO))
    b.hear(Failed(transfer(), BROKE))
    b.send()
    assert refused(b.hear(destination(1, TWO)), TWO) == (ErrorCode.TRANSFER_FAILED, True)
    assert words(b.hear(destination(2, TWO)), TWO) == ["Accepted"]


def test_rule_5_a_rank_that_has_said_moved_never_binds_that_hand_off() -> None:
    b = Bench(dp=DpRanks(size=4))
    b.hear(destination(inferred=True))
    assert words(b.tell(events.RoomFound(ROOM, LeaderId(ME.incarnation, 3)))) == ["Moved"]
    b.expect()
    b.send()
    assert refused(b.hear(destination()))[0] is ErrorCode.DP_RANK_CONFLICT
    assert words(b.hear(destination(1))) == ["Accepted"], "another attempt was told nothing"


def test_rule_5_moved_is_not_said_once_the_room_is_bound() -> None:
    b = Bench(dp=DpRanks(size=4))
    b.hear(destination(inferred=True))
    b.expect()
    assert b.tell(events.RoomFound(ROOM, LeaderId(ME.incarnation, 3))) == []
    assert b.phase() is KVPoll.WAITING_FOR_INPUT


# ---- 6: tombstones -----------------------------------------------------------------------------


def ended(how: str) -> Bench:
    b = all_sent() if how == "committed" else bound()
    if how == "committed":
        b.hear(Committed(transfer()))
    else:
        b.end(LEFT)
    return b


@pytest.mark.parametrize("how", ["committed", "aborted"])
def test_rule_6_a_late_destination_of_a_closed_room_gets_failed_and_gone_and_makes_nothing(how: str) -> None:
    b = ended(how)
    error = refusal(b.hear(destination(1, TWO)), TWO)
    assert error.code is (ErrorCode.INVALID_REQUEST if how == "committed" else ErrorCode.ABORTED_BY_CLIENT)
    assert refusal(b.hear(destination(2, ONE, inferred=True))).code is error.code
    sizes = b.exchange.sizes()
    assert (sizes["early"], sizes["rooms"], sizes["transfers"]) == (0, 0, 0)
    assert b.hear(Declined(transfer(3, TWO), LEFT, CLAIM)) == []


@pytest.mark.parametrize("how", ["committed", "aborted"])
def test_rule_6_a_closed_room_is_not_expected_again_until_it_is_forgotten(how: str) -> None:
    b = ended(how)
    b.at(59.9)
    with pytest.raises(InvalidRequest, match="a room of its own"):
        b.expect()
    b.at(10 * b.exchange.local.limits.request_budget_s)
    assert b.exchange.sizes()["ended"] == 0
    b.phases.clear()
    b.expect()


def test_rule_6_closed_rooms_are_bounded_and_the_oldest_is_forgotten_first() -> None:
    b = Bench(limits=Limits(max_transfers=3))
    rooms = [RoomKey(number) for number in range(1, 6)]
    for room in rooms:
        b.expect(room)
        b.end(LEFT, room)
    assert b.exchange.sizes()["ended"] == 3
    with pytest.raises(InvalidRequest):
        b.expect(rooms[2])
    b.phases.clear()
    b.expect(rooms[0])


# ---- 7: parking --------------------------------------------------------------------------------


def test_rule_7_parking_is_bounded_in_count() -> None:
    b = Bench(limits=Limits(max_early_destinations=4, early_share=1.0))
    for number in range(1, 5):
        assert b.hear(destination(room=RoomKey(number))) == []
    assert refused(b.hear(destination(decode=TWO, room=RoomKey(5))), TWO) == (ErrorCode.OUT_OF_CAPACITY, True)
    b.expect(RoomKey(2))
    assert b.hear(destination(decode=TWO, room=RoomKey(6))) == [], "one has found its room"
    assert b.exchange.sizes()["early"] == 4


def test_rule_7_parking_is_bounded_in_pages() -> None:
    b = Bench(limits=Limits(max_early_pages=7, early_share=1.0))
    for number in (1, 2):
        assert b.hear(destination(room=RoomKey(number))) == []
    assert refused(b.hear(destination(decode=TWO, room=RoomKey(3))), TWO) == (ErrorCode.OUT_OF_CAPACITY, True)
    assert b.hear(destination(decode=TWO, room=RoomKey(4), prefix=8)) == [], "one page is left"
    b.hear(Abort(transfer(room=RoomKey(1))))
    assert b.hear(destination(decode=TWO, room=RoomKey(5))) == []


def test_rule_7_one_decode_leader_has_a_share_and_leaves_the_rest_to_others() -> None:
    b = Bench(limits=Limits(max_early_destinations=8, early_share=0.25))
    for number in (1, 2):
        assert b.hear(destination(room=RoomKey(number))) == []
    for number in range(3, 100):
        assert refused(b.hear(destination(room=RoomKey(number)))) == (ErrorCode.OUT_OF_CAPACITY, True)
    for number, peer in enumerate((TWO, TWO, THREE, THREE), start=200):
        assert b.hear(destination(decode=peer, room=RoomKey(number))) == []
    assert b.exchange.counters["early_refused"] == 97


def test_rule_7_one_decode_leader_has_a_share_of_the_pages_and_at_least_one_destination() -> None:
    b = Bench(limits=Limits(max_early_pages=16, early_share=0.25))
    assert b.hear(destination(room=RoomKey(1))) == []
    assert refused(b.hear(destination(room=RoomKey(2)))) == (ErrorCode.OUT_OF_CAPACITY, True)
    assert b.hear(destination(room=RoomKey(3), prefix=8)) == [], "four pages in all"
    b = Bench(limits=Limits(max_early_pages=8, early_share=0.25))
    assert b.hear(destination(room=RoomKey(1))) == [], "a long prompt is one, however long"


def test_rule_7_the_limit_of_waiting_is_no_limit_of_the_hand_off() -> None:
    b = Bench(limits=Limits(early_wait_s=10.0))
    b.hear(destination(budget_s=40.0))
    b.at(1.0)
    assert words(b.expect()) == ["Accepted"]
    b.at(39.0)
    assert b.phase() is KVPoll.WAITING_FOR_INPUT
    b.at(40.0)
    assert (b.phase(), b.error().code) == (KVPoll.FAILED, ErrorCode.DEADLINE_EXCEEDED)


def test_rule_7_a_parked_destination_that_expires_is_told_bootstrap_timeout() -> None:
    """So is the first word to a prefill that has restarted at the same address and knows no request."""
    b = Bench()
    b.hear(destination(budget_s=5.0))
    assert b.exchange.next_deadline() == 5.0
    error = refusal(b.at(5.0))
    assert (error.code, error.room, error.origin) == (ErrorCode.BOOTSTRAP_TIMEOUT, ROOM.room, "prefill here")
    assert b.exchange.sizes()["early"] == 0
    b.expect()
    assert words(b.hear(destination())) == ["Failed", "Gone"], "that attempt is over"
    assert words(b.hear(destination(1))) == ["Accepted"], "and the room is not"


@pytest.mark.parametrize("word", [Abort, lambda t: Failed(t, BROKE), Committed, Gone])
def test_rule_7_words_of_what_is_unknown_make_no_room(word: Callable[[TransferId], HandoffMessage]) -> None:
    b = Bench()
    b.hear(word(transfer()))
    assert b.exchange.rooms.rooms == {}
    b.expect()
    assert words(b.hear(destination(1, TWO)), TWO) == ["Accepted"], "another decode is not concerned"


def test_rule_7_early_words_are_bounded_and_leave_destinations_their_place() -> None:
    b = Bench(limits=Limits(max_early_destinations=8, early_share=0.5))
    for number in range(1, 100):
        assert b.hear(Declined(transfer(room=RoomKey(number)), LEFT, CLAIM)) == []
    assert b.exchange.sizes()["ended"] == 4
    assert b.hear(destination(decode=TWO, room=RoomKey(200))) == []
    assert b.hear(Declined(transfer(decode=TWO, room=RoomKey(99)), LEFT, CLAIM)) == []
    b.expect(RoomKey(99), decode=TWO)
    assert b.error(RoomKey(99)) == LEFT, "one leader's words do not displace another's"
    b.at(1e4)
    assert not b.exchange.rooms.rooms


@pytest.mark.parametrize("peers", [1, 2])
def test_rule_7_words_make_place_for_destinations(peers: int) -> None:
    """A client that has one leg after the other refused must not shut out the requests of that decode."""
    limits = Limits(max_early_destinations=8, early_share=0.5 if peers == 2 else 1.0)
    b = Bench(limits=limits)
    for number in range(1, 100):
        for peer in (ONE, TWO)[:peers]:
            b.hear(Declined(transfer(decode=peer, room=RoomKey(number)), LEFT, CLAIM))
    assert b.exchange.rooms.parked == 8
    for number in range(200, 204):
        assert b.hear(destination(room=RoomKey(number))) == []
    assert b.hear(destination(decode=THREE, room=RoomKey(300))) == []
    b.expect(RoomKey(99))
    assert b.error(RoomKey(99)) == LEFT, "the newest are kept"


def test_rule_7_a_word_takes_no_place_of_a_destination() -> None:
    b = Bench(limits=Limits(max_early_destinations=2, early_share=1.0))
    for number in (1, 2):
        b.hear(destination(room=RoomKey(number)))
    assert b.hear(Declined(transfer(room=RoomKey(3)), LEFT, CLAIM)) == []
    assert b.exchange.sizes()["early"] == 2


def test_rule_7_a_word_may_be_displaced_by_the_destination_of_its_own_room() -> None:
    b = Bench(limits=Limits(max_early_destinations=1, early_share=1.0))
    b.hear(Declined(transfer(), LEFT, CLAIM))
    assert b.hear(destination(decode=TWO)) == []
    assert words(b.expect(), TWO) == ["Accepted"]


# ---- a room that nobody will open --------------------------------------------------------------


@pytest.mark.parametrize("early", [True, False])
def test_a_refused_room_has_its_error_for_what_waits_and_for_what_comes(early: bool) -> None:
    b = Bench()
    refuse = events.RefuseRoom(key=ROOM, error=BROKE, deadline=60.0)
    if early:
        b.hear(destination())
        effects = b.tell(refuse)
    else:
        assert b.tell(refuse) == []
        effects = b.hear(destination())
    assert refusal(effects).text == BROKE.text
    assert b.phases == {}, "it is no half of the engine"
    with pytest.raises(InvalidRequest):
        b.expect()
    b.at(1e4)
    assert b.exchange.rooms.rooms == {}


def test_a_room_that_was_opened_is_not_refused() -> None:
    b = opened()
    assert b.tell(events.RefuseRoom(key=ROOM, error=BROKE, deadline=60.0)) == []
    assert words(b.hear(destination())) == ["Accepted"]


def test_a_refused_room_is_announced_and_its_early_words_are_void() -> None:
    b = Bench()
    b.hear(Declined(transfer(), LEFT, CLAIM))
    effects = b.tell(events.RefuseRoom(key=ROOM, error=BROKE, deadline=60.0, announce=True))
    assert effects == [events.RegisterRoom(ROOM, 60.0)]


def test_refused_rooms_are_bounded_and_the_newest_are_kept() -> None:
    b = Bench(limits=Limits(max_transfers=4))
    for number in range(1, 20):
        b.tell(events.RefuseRoom(key=RoomKey(number), error=BROKE, deadline=60.0))
    assert b.exchange.sizes()["ended"] == 4
    assert refusal(b.hear(destination(room=RoomKey(19)))).text == BROKE.text


# ---- 8: the registry -----------------------------------------------------------------------------


def asked(effects: list[events.Effect]) -> list[events.Effect]:
    return [e for e in effects if isinstance(e, events.AskRoom | events.RegisterRoom | events.RoomSettled)]


def test_rule_8_the_fast_path_makes_no_registry_call() -> None:
    b = Bench()
    effects = b.hear(destination())
    effects += b.expect()
    effects += b.send() + b.finish() + b.land()
    effects += b.hear(Committed(transfer()))
    assert b.phase() is KVPoll.SUCCESS
    assert asked(effects) == []


def test_rule_8_a_room_is_announced_once_for_as_long_as_it_may_be_open() -> None:
    b = Bench()
    b.now = 5.0
    assert asked(b.expect(budget_s=20.0, announce=True, retain_s=9.0)) == [events.RegisterRoom(ROOM, 20.0)]
    effects = b.hear(destination()) + b.hear(Failed(transfer(), BROKE)) + b.hear(destination(1, TWO))
    assert asked(effects) == []
    assert asked(b.end(LEFT)) == [], "another rank of ours may be asked about the room that has failed"


def test_rule_8_a_room_that_another_rank_has_registered_fails_with_its_reason_on_both_sides() -> None:
    b = opened(decode=ONE, announce=True)
    conflict = DpRankConflict("DP rank 1 has this room").info
    effects = b.tell(events.RoomUnknown(ROOM, conflict))
    assert (b.error().code, b.error().text) == (ErrorCode.DP_RANK_CONFLICT, conflict.text)
    assert refusal(effects).code is ErrorCode.DP_RANK_CONFLICT


def test_rule_8_a_registry_that_cannot_be_reached_ends_no_room_that_decode_has_found() -> None:
    b = opened(announce=True)
    b.hear(destination())
    b.tell(events.RoomUnknown(ROOM, BootstrapUnreachable("the registry is away").info))
    assert b.phases[ROOM][-1].phase is KVPoll.WAITING_FOR_INPUT
    b = opened(announce=True)
    b.tell(events.RoomUnknown(ROOM, BootstrapUnreachable("the registry is away").info))
    assert b.error().code is ErrorCode.BOOTSTRAP_UNREACHABLE


def test_rule_8_the_registry_is_asked_once_for_all_that_wait() -> None:
    b = Bench(dp=DpRanks(size=4))
    assert asked(b.hear(destination(inferred=True, budget_s=9.0))) == [events.AskRoom(ROOM, 9.0)]
    assert asked(b.hear(destination(inferred=True))) == []
    assert asked(b.hear(destination(1, TWO, inferred=True))) == []
    effects = b.tell(events.RoomFound(ROOM, LeaderId(ME.incarnation, 2)))
    assert (words(effects, ONE), words(effects, TWO)) == (["Moved"], ["Moved"])


def test_rule_8_no_answer_leaves_the_destination_waiting_for_its_own_deadline() -> None:
    b = Bench(dp=DpRanks(size=4))
    b.hear(destination(inferred=True))
    assert b.tell(events.RoomUnknown(ROOM, BROKE)) == []
    assert words(b.expect()) == ["Accepted"]


def test_rule_8_by_the_policy_fail_both_halves_and_the_rank_that_opened_the_room_hear_it() -> None:
    b = Bench(dp=DpRanks(size=4, on_conflict=FAIL_ON_CONFLICT))
    b.hear(destination(inferred=True))
    [moved] = said(b.tell(events.RoomFound(ROOM, LeaderId(ME.incarnation, 1))))
    assert isinstance(moved, Moved)
    assert moved.error.code is ErrorCode.DP_RANK_CONFLICT
    assert "--dp-rank-conflict redirect" in moved.error.text
    # Decode tells the rank that has opened the room, which ends it for the same reason.
    b = opened(decode=ONE)
    b.hear(Declined(transfer(), moved.error, CLAIM))
    assert b.error() == moved.error
    assert b.releases == {ROOM: 1}


# ---- 9: retention ------------------------------------------------------------------------------


def test_rule_9_without_retention_the_room_ends_at_its_commit() -> None:
    b = all_sent()
    effects = b.hear(Committed(transfer()))
    assert b.phase() is KVPoll.SUCCESS
    assert b.releases == {ROOM: 1}
    assert words(effects) == []


def test_rule_9_a_room_that_was_placed_for_one_decode_ends_with_its_failed_binding() -> None:
    b = writing(decode=ONE)
    b.hear(Failed(transfer(), BROKE))
    assert b.error() == BROKE
    assert b.releases == {}, "the writes are in flight"
    b.fence()
    assert b.releases == {ROOM: 1}


@pytest.mark.parametrize("prefix", [0, 3, 4, 9, PROMPT])
def test_rule_9_a_retained_room_is_replayed_to_a_second_binding_less_its_prefix(prefix: int) -> None:
    b = all_sent(retain_s=30.0)
    b.hear(Committed(transfer()))
    assert not b.phase().terminal
    assert b.releases == {}
    b.now = 20.0
    effects = b.hear(destination(1, TWO, prefix=prefix))
    assert words(effects, TWO)[0] == "Accepted"
    assert [m.content for m in said(effects, TWO) if isinstance(m, Metadata)] == [b"7"]
    nbytes = sum(block.nbytes for write in b.writes for block in write.blocks)
    assert nbytes == (PROMPT - prefix) * 32
    b.land()
    b.hear(Committed(transfer(1, TWO)))
    assert b.at(29.9) == []
    b.at(30.0)
    assert (b.phase(), b.releases[ROOM]) == (KVPoll.SUCCESS, 1), "it counts from the first success"


def test_rule_9_a_second_binding_is_given_all_spans_partial_layers_and_the_newest_pages() -> None:
    b = opened(retain_s=30.0)
    b.send(0, 4, pages=(4,))
    b.hear(destination())
    b.send(4, 8, pages=(4, 5))
    b.send(8, PROMPT, layers=1, pages=(14, 15, 16))
    b.hear(Failed(transfer(), BROKE))
    b.fence()
    effects = b.hear(destination(1, TWO))
    posts = [effect for effect in effects if isinstance(effect, events.PostWrite)]
    sources = {at % (24 * 32) // 32 for post in posts for block in post.blocks for at, _, _ in block.ranges()}
    assert (len(posts), sources) == (3, {14, 15, 16}), "they are read from the newest pages"
    b.send(8, PROMPT, pages=(14, 15, 16))
    chunks = [m for m in said(b.land(), TWO) if isinstance(m, ChunkPosted)]
    assert [(m.span.start, m.span.end, m.final) for m in chunks] == [
        (0, 4, False),
        (4, 8, False),
        (8, 10, True),
    ]
    assert words(b.finish(), TWO) == ["Metadata"]


def test_rule_9_retention_counts_from_the_success_and_not_beyond_the_deadline() -> None:
    b = all_sent(retain_s=100.0, budget_s=60.0)
    b.now = 10.0
    b.hear(Committed(transfer()))
    assert b.at(59.9) == []
    b.at(60.0)
    assert b.phase() is KVPoll.SUCCESS
    assert refused(b.hear(destination(1, TWO)), TWO)[0] is ErrorCode.INVALID_REQUEST


def test_rule_9_closing_a_retained_room_reports_the_success_it_had() -> None:
    b = all_sent(retain_s=30.0)
    b.hear(Committed(transfer()))
    b.hear(destination(1, TWO))
    b.end(LEFT)
    assert (b.phase(), b.phases[ROOM][-1].peer, b.phases[ROOM][-1].nbytes) == (
        KVPoll.SUCCESS,
        ONE,
        PROMPT * 32,
    )
    assert b.releases == {}, "the second binding's writes are in flight"
    b.fence()
    assert b.releases == {ROOM: 1}


@pytest.mark.parametrize(
    ("make", "evicted"), [(lambda: Bench(), True), (bound, False), (writing, False), (all_sent, False)]
)
def test_rule_9_only_a_room_that_nobody_has_bound_is_evicted(
    make: Callable[[], Bench], evicted: bool
) -> None:
    b = make()
    if evicted:
        b.expect()
        b.send()
    effects = b.end(FULL, unbound_s=0.0)
    assert b.phase().terminal is evicted
    if evicted:
        assert b.releases == {ROOM: 1}
        assert refused(b.hear(destination())) == (ErrorCode.OUT_OF_CAPACITY, True), "a later claim"
    else:
        assert effects == []


def test_rule_9_a_placed_room_that_no_decode_has_had_for_a_while_is_evicted() -> None:
    """A decode that has committed, and whose word and process are lost: nobody comes any more."""
    b = all_sent(decode=ONE, retain_s=0.0)
    assert b.end(FULL, unbound_s=1.0) == []
    b.down(ONE)
    b.fence()
    b.at(0.5)
    assert b.end(FULL, unbound_s=1.0) == [], "the next decode may be on its way"
    b.tell(PLACED_AGAIN)
    b.at(1.25)
    assert b.end(FULL, unbound_s=1.0) == [], "the next decode has as long"
    b.at(1.5)
    b.end(FULL, unbound_s=1.0)
    assert b.error().code is ErrorCode.OUT_OF_CAPACITY
    assert b.releases == {ROOM: 1}


def test_rule_9_a_decode_that_comes_before_the_placer_s_word_has_as_long_as_the_word_gives() -> None:
    b = all_sent(decode=ONE, retain_s=0.0)
    b.down(ONE)
    b.fence()
    b.at(5.0)
    b.hear(destination(1, TWO))
    assert b.end(FULL, unbound_s=1.0) == []
    b.at(6.0)
    assert refused(b.end(FULL, unbound_s=1.0), TWO) == (ErrorCode.OUT_OF_CAPACITY, True)


def test_rule_9_three_unfinished_bindings_end_the_room() -> None:
    b = Bench(limits=Limits(max_bindings=3))
    b.expect(retain_s=30.0)
    for attempt in range(3):
        assert not b.phase().terminal
        assert words(b.hear(destination(attempt))) == ["Accepted"]
        b.hear(Failed(transfer(attempt), BROKE))
    assert b.error() == BROKE
    assert refusal(b.hear(destination(3, TWO)), TWO).text == BROKE.text


def test_rule_9_a_room_that_nobody_takes_after_a_failure_names_it_at_its_deadline() -> None:
    b = bound(retain_s=30.0)
    b.hear(Failed(transfer(), BROKE))
    b.at(60.0)
    assert b.error().code is ErrorCode.BOOTSTRAP_TIMEOUT
    assert f"after one failed with {BROKE.text}" in b.error().text


def test_rule_9_what_is_not_to_be_trusted_is_given_to_nobody_else() -> None:
    for code in (ErrorCode.CHECKSUM_MISMATCH, ErrorCode.METADATA_MISMATCH):
        b = writing(retain_s=30.0)
        b.hear(Failed(transfer(), msgspec.structs.replace(BROKE, code=code)))
        assert b.phase() is KVPoll.FAILED


def test_rule_9_rooms_are_bounded_and_one_more_is_retryable() -> None:
    b = Bench(limits=Limits(max_transfers=2))
    for number in (1, 2):
        b.expect(RoomKey(number), retain_s=9.0)
    with pytest.raises(OutOfCapacity) as caught:
        b.expect(RoomKey(3))
    assert caught.value.info.retryable
    b.end(LEFT, RoomKey(1))
    b.expect(RoomKey(3))


# ---- 10: a stuck binding -------------------------------------------------------------------------


def test_rule_10_the_engine_hears_the_outcome_at_once_and_unproven_pages_stay_counted() -> None:
    b = writing()
    b.end(LEFT)
    assert b.error().code is LEFT.code
    assert (b.exchange.quarantined_pages(), b.exchange.sizes()["quarantined"]) == (len(PAGES), 1)
    assert b.releases == {}
    b.at(100_000.0)
    assert b.releases == {}, "no time is a proof"
    with pytest.raises(InvalidRequest):
        b.expect()
    b.fence()
    assert (b.releases, b.exchange.quarantined_pages()) == ({ROOM: 1}, 0)


def test_rule_10_a_stuck_attempt_holds_the_pages_and_not_the_room() -> None:
    b = writing(retain_s=30.0)
    b.hear(Failed(transfer(), BROKE))
    b.hear(destination(1, TWO))
    b.finish()
    b.land(transfer(1, TWO))
    b.hear(Committed(transfer(1, TWO)))
    b.end(LEFT)
    assert b.phase() is KVPoll.SUCCESS
    assert b.releases == {}
    b.fence()
    assert b.releases == {ROOM: 1}


# ---- 11: declined ------------------------------------------------------------------------------


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("retain_s", [None, 30.0])
def test_rule_11_the_placed_decode_declines_its_room(retain_s: float | None, early: bool) -> None:
    b = Bench()
    word = Declined(transfer(), LEFT, CLAIM)
    if early:
        b.hear(word)
        b.expect(decode=ONE, retain_s=retain_s)
    else:
        b.expect(decode=ONE, retain_s=retain_s)
        b.hear(word)
    assert b.error() == LEFT
    assert b.releases == {ROOM: 1}


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize(
    ("word", "placed"),
    [
        (Declined(transfer(decode=TWO), LEFT, CLAIM), ONE),
        (Declined(transfer(), LEFT, b"another"), ONE),
        (Declined(transfer(), LEFT), ONE),
        (Declined(transfer(), LEFT, b"another"), None),
    ],
    ids=["another leader", "another claim", "no claim", "another claim, nobody placed"],
)
def test_rule_11_nobody_else_declines_it(word: Declined, placed: LeaderId | None, early: bool) -> None:
    b = Bench()
    if early:
        b.hear(word)
        b.expect(decode=placed)
    else:
        b.expect(decode=placed)
        b.hear(word)
    assert b.phase() is KVPoll.BOOTSTRAPPING
    assert words(b.hear(destination(1))) == ["Accepted"]


@pytest.mark.parametrize("early", [True, False])
def test_rule_11_a_room_that_was_placed_for_nobody_is_declined_without_its_claim(early: bool) -> None:
    """A request that was refused unread has none. The number is known to the placer alone."""
    b = Bench()
    word = Declined(transfer(), LEFT)
    if early:
        b.hear(word)
        b.expect()
    else:
        b.expect()
        b.hear(word)
    assert b.error() == LEFT
    assert b.releases == {ROOM: 1}


def test_rule_11_without_a_claim_a_binding_goes_on() -> None:
    b = writing()
    assert b.hear(Declined(transfer(1, TWO), LEFT)) == []
    assert b.phase() is KVPoll.TRANSFERRING


def test_rule_11_a_wrong_early_word_does_not_hide_the_right_one() -> None:
    b = Bench(limits=Limits(max_bindings=1))
    b.hear(Declined(transfer(), LEFT, b"another"))
    b.hear(Declined(transfer(), LEFT, CLAIM))
    b.expect(decode=ONE)
    assert b.error() == LEFT


@pytest.mark.parametrize("make", [bound, writing, all_sent])
def test_rule_11_while_a_binding_lives_it_is_not_obeyed(make: Callable[..., Bench]) -> None:
    b = make(decode=ONE)
    before = b.phase()
    assert b.hear(Declined(transfer(1), LEFT, CLAIM)) == []
    assert b.phase() is before


# ---- words of the engine -------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["unknown", "parked"])
@pytest.mark.parametrize(
    "event",
    [
        events.SendChunk(ROOM, Span(0, 4), PAGES),
        events.SendMetadata(ROOM, b""),
        events.PlaceRoom(ROOM, 1, TWO),
    ],
)
def test_an_engine_that_speaks_of_a_room_that_it_never_opened_is_wrong(state: str, event: Any) -> None:
    b = Bench()
    if state == "parked":
        b.hear(destination())
    with pytest.raises(IllegalEvent, match="is not open here"):
        b.tell(event)
    assert b.end(LEFT) == [], "an end of nothing is none"


def test_a_rank_has_its_own_rooms_and_the_effects_of_both_levels_follow_each_other_at_once() -> None:
    """A caller that carries out effects in order never sees a hand-off's end without its room's."""
    b = writing()
    effects = b.end(LEFT)
    kinds = [type(effect) for effect in effects]
    at = kinds.index(events.HandoffPhase)
    assert kinds[at + 1] is events.Phase
    effects = b.fence()
    kinds = [type(effect) for effect in effects]
    assert kinds[kinds.index(events.HandoffReleased) + 1] is events.Release


def test_accepted_is_said_to_the_one_that_binds_and_before_anything_of_the_replay() -> None:
    b = opened()
    b.send()
    b.finish()
    [first, *rest] = [
        e for e in b.hear(destination()) if not isinstance(e, events.Phase | events.HandoffPhase)
    ]
    assert first == events.Send(ONE, Accepted(transfer()))
    assert rest


def test_a_destination_that_a_bug_lost_is_refused_and_the_room_waits_on() -> None:
    """The caller of the exchange says so; without an answer both halves would wait for their deadline."""
    b = opened()
    effects = b.tell(events.AbortTransfer(transfer(), BROKE))
    assert [type(e.message) for e in effects if isinstance(e, events.Send)] == [Failed, Gone]
    assert b.tell(events.AbortTransfer(transfer(), BROKE)) == [], "once"
    b.hear(destination(1, TWO))
    assert b.phases[ROOM][-1].phase is KVPoll.WAITING_FOR_INPUT


@pytest.mark.parametrize("fenced_first", [True, False])
@pytest.mark.parametrize("bound", [True, False])
def test_rule_11_it_ends_a_retained_room_whose_binding_fails(bound: bool, fenced_first: bool) -> None:
    """Whether the binding has ended before, after, or still waits for its fences."""
    b = writing(retain_s=5.0)
    if bound:
        b.hear(Declined(transfer(), LEFT, CLAIM))
    b.hear(Abort(transfer()))
    if fenced_first:
        b.fence()
    if not bound:
        assert b.phase() is not KVPoll.FAILED
        b.hear(Declined(transfer(), LEFT, CLAIM))
    b.fence()
    assert b.phase() is KVPoll.FAILED
    assert b.releases[ROOM] == 1


@pytest.mark.parametrize("layers", [None, 1])
def test_a_retained_room_ends_when_its_kv_will_never_be_complete(layers: int | None) -> None:
    """That of a whole chunk, or of its first layers."""
    b = bound(retain_s=5.0)
    ready = ReadyEvent(1, lambda wait, ended: None)
    b.tell(events.SendChunk(ROOM, Span(0, PROMPT), PAGES, layers=layers, ready=ready))
    error = TransferFailed("the device has failed")
    ready.end(error)
    [write] = b.writes
    b.tell(events.WriteBroken(write.transfer, write.rank, write.tag, error.info))
    assert b.error().code is error.info.code
    b.fence()
    assert b.releases[ROOM] == 1


@pytest.mark.parametrize("attempt", [-1, 2**16, "1"])
def test_an_attempt_that_cannot_be_is_refused_and_costs_no_page(attempt: Any) -> None:
    b = opened(decode=ONE, retain_s=5.0)
    with pytest.raises(InvalidRequest, match="attempt must be in"):
        b.tell(events.PlaceRoom(ROOM, attempt, TWO))
    b.end(BROKE)
    assert b.releases[ROOM] == 1
    other = RoomKey(8)
    with pytest.raises(InvalidRequest, match="attempt must be in"):
        b.expect(other, decode=ONE, attempt=attempt)
    assert not b.exchange.holds(other)
