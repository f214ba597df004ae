"""The messages of sessions, transports and ranks that a manager accepts or ignores."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from decode_rig import PREFILL, Line, Rig
from kv_sides import receive

from segue.kv import manager as managers
from segue.kv.errors import ErrorCode, OutOfCapacity, PeerLost, TransferFailed
from segue.kv.ids import OPEN_RANK, Incarnation, LeaderId, RankId, RoomKey, TransferId
from segue.kv.peers import PathSpeed, Peer
from segue.kv.protocol import events
from segue.kv.protocol.messages import Accepted, Failed, Gone, PathChosen
from segue.kv.protocol.room_ranks import DpRanks, PrefillInstance
from segue.kv.transport.base import Fenced, PeerGone, WriteFailed, Written
from segue.server.messages.control import Load

ANOTHER = LeaderId(Incarnation("b" * 32))
GONE = PeerLost("the cable")


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()


# ---- sessions ----------------------------------------------------------------------------------------


def test_messages_of_a_session_that_is_not_the_peer_s_are_nobody_s(rig: Rig) -> None:
    told, old, stranger = rig.seen(), Line(), Line(ANOTHER)
    for session in (old, stranger):
        rig.manager.received(session, Failed(rig.one, GONE.info))  # type: ignore[arg-type]
        rig.manager.received(session, "nonsense")  # type: ignore[arg-type]
        rig.manager.closed(session, GONE)  # type: ignore[arg-type]
        assert session.closed_with == []
    assert told == []
    rig.manager.received(rig.line, Accepted(rig.one))  # type: ignore[arg-type]
    assert told == [events.Received(PREFILL, Accepted(rig.one))]


def test_what_is_no_message_between_leaders_ends_the_session(rig: Rig) -> None:
    told = rig.seen()
    load = Load(dp_rank=0, running=0, waiting=0, tokens=0, pages_free=0, pages_total=0)
    rig.manager.received(rig.line, load)  # type: ignore[arg-type]
    [error] = rig.line.closed_with
    assert isinstance(error, TransferFailed)
    assert "Load is no message between leaders" in str(error)
    assert told == []


def test_what_comes_before_the_path_is_open_waits_and_is_heard_in_its_order_once_it_is(rig: Rig) -> None:
    peer = rig.peer
    opening = rig.manager.io.loop.create_future()
    peer.opening = opening  # type: ignore[assignment]
    told = rig.seen()
    words = [Accepted(rig.one), Gone(rig.other), Failed(rig.one, GONE.info)]
    for word in words:
        rig.manager.received(rig.line, word)  # type: ignore[arg-type]
    assert told == []
    rig.manager._ready(peer)
    up, *heard = told
    assert isinstance(up, events.PeerUp)
    assert (up.peer, up.transport) == (PREFILL, "fake")
    assert heard == [events.Received(PREFILL, word) for word in words]
    assert peer.early == []
    rig.manager.received(rig.line, Accepted(rig.other))  # type: ignore[arg-type]
    assert told[-1] == events.Received(PREFILL, Accepted(rig.other))
    opening.cancel()


def test_no_more_waits_for_a_path_than_there_is_to_say_of_each_hand_off(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(managers, "EARLY_PER_TRANSFER", 1 / 1024)
    limit = rig.manager.config.limits.max_transfers // 1024
    peer = rig.peer
    opening = rig.manager.io.loop.create_future()
    peer.opening = opening  # type: ignore[assignment]
    for _ in range(limit):
        rig.manager.received(rig.line, Accepted(rig.one))  # type: ignore[arg-type]
    assert rig.line.closed_with == []
    rig.manager.received(rig.line, Accepted(rig.one))  # type: ignore[arg-type]
    [error] = rig.line.closed_with
    assert "too many messages" in str(error)
    opening.cancel()


def test_the_end_of_a_session_ends_its_hand_offs_and_the_opening_of_its_path(rig: Rig) -> None:
    elsewhere = _with_another(rig)
    peer = rig.peer
    opening = rig.manager.io.loop.create_future()
    peer.opening = opening  # type: ignore[assignment]
    rig.manager.closed(rig.line, GONE)  # type: ignore[arg-type]
    assert opening.cancelled()
    assert PREFILL not in rig.manager._peers
    assert rig.ended(rig.one) == rig.ended(rig.other) == [ErrorCode.PEER_LOST]
    assert rig.ended(elsewhere) == []
    # A path that is ready all the same is of nobody now.
    told = rig.seen()

    async def opened(_: Peer) -> None: ...

    rig.manager.opening.open = opened  # type: ignore[method-assign]
    rig.manager.io.loop.run_until_complete(rig.manager._open_paths(peer))
    assert told == []


def _with_another(rig: Rig) -> TransferId:
    """A third hand-off, with a peer of its own."""
    rig.meets(Line(ANOTHER))
    return rig.opened(9, ANOTHER)


def test_a_refusal_ends_what_waits_for_a_peer_that_is_not_there_and_nothing_of_one_that_is(rig: Rig) -> None:
    waits = TransferId(9, 0, ANOTHER, rig.manager.config.me)
    receive(rig.manager, waits, 4, 60)
    rig.turn()
    refusal = OutOfCapacity("too many sessions")
    rig.manager._peer_refused(PREFILL, refusal)
    assert rig.ended(rig.one) == rig.ended(waits) == []
    rig.manager._peer_refused(ANOTHER, refusal)
    assert rig.ended(waits) == [ErrorCode.OUT_OF_CAPACITY]
    assert rig.ended(rig.one) == []


def test_the_first_word_about_the_choice_of_a_path_counts(rig: Rig) -> None:
    peer = rig.peer
    peer.chosen = rig.manager.io.loop.create_future()
    for name in ("first", "second"):
        rig.manager.received(rig.line, PathChosen(name))  # type: ignore[arg-type]
    assert peer.chosen.result() == "first"
    assert rig.line.closed_with == []


# ---- transports --------------------------------------------------------------------------------------


def epoch_of(rig: Rig, transfer: TransferId) -> int:
    return rig.manager.exchange.machines[transfer].epoch


def test_what_a_transport_says_of_an_epoch_reaches_its_hand_off_and_of_one_that_is_over_nobody(
    rig: Rig,
) -> None:
    told = rig.seen()
    epoch, peer = epoch_of(rig, rig.one), RankId(PREFILL)
    broke = TransferFailed("x")
    rig.moved(2, "fake", Written(peer, epoch, 4, 100, 0.5))
    rig.moved(2, "fake", WriteFailed(peer, epoch, 4, broke, True))
    assert told == [
        events.WriteLanded(rig.one, 2, 4, 0.5),
        events.WriteBroken(rig.one, 2, 4, broke.info, True),
    ]
    assert rig.manager.paths() == {str(PREFILL): PathSpeed("fake", 100, 0.5)}
    told.clear()
    for event in (
        Written(peer, epoch + 100, 4, 100, 0.5),
        Written(RankId(ANOTHER), epoch, 4, 100, 0.5),
        WriteFailed(peer, epoch + 100, 4, broke),
        Fenced(peer, epoch + 100, True),
    ):
        rig.moved(0, "fake", event)
    assert told == []
    assert rig.manager.paths()[str(PREFILL)].nbytes == 100


def test_a_closed_manager_hears_nothing_any_more(rig: Rig) -> None:
    told, epoch, asked = rig.seen(), epoch_of(rig, rig.one), list[Any]()
    rig.manager._ranks.carry_out = lambda *what: bool(asked.append(what))  # type: ignore[method-assign]
    rig.manager._closed = True
    rig.moved(0, "fake", Written(RankId(PREFILL), epoch, 4, 100, 0.5))
    rig.moved(0, "fake", PeerGone(RankId(PREFILL), True, GONE))
    rig.manager._hashed(events.ChecksumReady(rig.one, 0, 1, 5))
    rig.manager._fence_again(events.Fence(rig.one, 0, RankId(PREFILL), epoch), None)
    assert (told, asked) == ([], [])
    rig.manager._closed = False


@pytest.mark.parametrize("proven", [True, False])
def test_the_end_of_the_path_in_use_ends_its_session_and_is_a_proof_only_if_it_says_so(
    rig: Rig, proven: bool
) -> None:
    elsewhere = _with_another(rig)
    told = rig.seen()
    rig.moved(0, "fake", PeerGone(RankId(PREFILL), proven, GONE))
    assert told[0] == events.PeerDown(PREFILL, GONE.info, dead=proven, over="fake")
    assert rig.line.closed_with == [GONE]
    assert rig.ended(rig.one) == [ErrorCode.PEER_LOST]
    assert rig.ended(elsewhere) == []


@pytest.mark.parametrize("proven", [True, False])
def test_while_a_path_is_being_chosen_the_end_of_one_ends_nothing(rig: Rig, proven: bool) -> None:
    peer = rig.peer
    peer.opening = object()  # type: ignore[assignment]
    told = rig.seen()
    rig.moved(0, "fake", PeerGone(RankId(PREFILL), proven, GONE))
    assert not [event for event in told if isinstance(event, events.PeerDown)]
    assert rig.line.closed_with == []
    peer.opening = None
    rig.moved(0, "fake", PeerGone(RankId(PREFILL), False, GONE))
    assert rig.line.closed_with == [GONE]


def test_the_end_of_a_path_that_is_not_in_use_proves_what_was_written_over_it(rig: Rig) -> None:
    told = rig.seen()
    rig.happens(events.EndRoom(rig.one.received_as, GONE.info))
    rig.manager._ranks.choose(PREFILL, "another", ((0, 0),), {PREFILL})
    asked: list[tuple[int, str]] = []
    rank: Any = rig.manager._ranks[0]
    rank.fence = lambda name, peer, epoch: asked.append((epoch, name))
    told.clear()
    rig.moved(0, "fake", PeerGone(RankId(PREFILL), False, GONE))
    assert asked == [], "it proves nothing"
    rig.moved(0, "fake", PeerGone(RankId(PREFILL), True, GONE))
    assert asked == [(epoch_of(rig, rig.one), "fake")]
    assert not [event for event in told if isinstance(event, events.PeerDown)]
    assert rig.line.closed_with == []


def test_a_path_between_our_own_ranks_that_ends_costs_those_who_use_it(rig: Rig) -> None:
    elsewhere = _with_another(rig)
    rig.manager._ranks.choose(PREFILL, "fake", ((0, 0),), {PREFILL, ANOTHER}, ((0, 0, 1),))
    own = PeerGone(RankId(rig.manager.config.me, 1), False, GONE)
    rig.moved(0, "another", own)
    assert rig.line.closed_with == []
    rig.moved(0, "fake", own)
    assert rig.line.closed_with == [GONE]
    assert rig.ended(rig.one) == [ErrorCode.PEER_LOST]
    assert rig.ended(elsewhere) == [], "nothing of its KV is passed on"


def test_what_a_path_carries_is_shown_once_it_was_chosen(rig: Rig) -> None:
    """Before that it would be the speed of one that is perhaps not taken."""
    peer = rig.peer
    assert rig.manager.paths() == {str(PREFILL): peer.speed}
    peer.opening = object()  # type: ignore[assignment]
    assert rig.manager.paths() == {}
    peer.opening = None
    assert rig.manager.paths() == {str(PREFILL): peer.speed}


# ---- the engine --------------------------------------------------------------------------------------


def test_what_the_registry_is_asked_is_asked_on_behalf_of_the_one_that_asked(rig: Rig) -> None:
    key = RoomKey(9)
    rig.manager.prefill_instances({PREFILL.incarnation: PrefillInstance(DpRanks(size=2), frozenset({0, 1}))})
    handle = rig.manager.receive(key, LeaderId(PREFILL.incarnation, OPEN_RANK), 4, 60)
    for _ in range(6):
        rig.turn()
    assert handle.error is not None
    assert handle.error.code is ErrorCode.BOOTSTRAP_UNREACHABLE, "there is no registry"
    assert rig.ended(rig.one) == rig.ended(rig.other) == []
    assert rig.manager.sizes()["room_queries"] == 0


def test_the_next_deadline_is_waited_for_after_every_event_also_one_that_has_no_effect(rig: Rig) -> None:
    """A destination that comes too early, say, is kept until its own: nothing else happens then."""
    waited: list[float | None] = []
    alarm: Any = rig.manager._alarm
    alarm.set = lambda deadline, now: waited.append(deadline)
    told = rig.seen()
    rig.manager.received(rig.line, Accepted(rig.one))  # type: ignore[arg-type]
    assert told == [events.Received(PREFILL, Accepted(rig.one))]
    assert waited == [rig.manager.exchange.next_deadline()]


# ---- ranks -------------------------------------------------------------------------------------------


def test_a_rank_that_is_lost_ends_everything_with_its_reason_and_nothing_begins_any_more(rig: Rig) -> None:
    rig.manager.lost(1, GONE)
    rig.turn()
    assert rig.ended(rig.one) == rig.ended(rig.other) == [ErrorCode.PEER_LOST]
    assert rig.losses == [GONE]
    late = TransferId(9, 0, PREFILL, rig.manager.config.me)
    handle = receive(rig.manager, late, 4, 60)
    rig.turn()
    assert handle.error == GONE.info
    assert handle.released


def test_what_a_rank_could_not_grant_ends_its_hand_off_and_an_old_grant_is_nobody_s(rig: Rig) -> None:
    full = OutOfCapacity("no grant is free").info
    epoch = epoch_of(rig, rig.one)
    rig.manager.granted(0, RankId(PREFILL), epoch + 100, full)
    rig.turn()
    assert rig.ended(rig.one) == rig.ended(rig.other) == []
    rig.manager.granted(0, RankId(PREFILL), epoch, full)
    rig.turn()
    assert rig.ended(rig.one) == [ErrorCode.OUT_OF_CAPACITY]
    assert rig.ended(rig.other) == []


# ---- prefill -----------------------------------------------------------------------------------------


def test_a_write_to_a_peer_that_has_left_is_broken_and_nothing_is_asked_of_a_rank(rig: Rig) -> None:
    told = rig.seen()
    asked: list[Any] = []
    rig.manager._ranks.carry_out = lambda *what: bool(asked.append(what))  # type: ignore[method-assign]
    del rig.manager._peers[PREFILL]
    rig.line.sent.clear()
    rig.manager._carry_out(events.PostWrite(rig.one, 0, 1, 4, 0, ()))
    assert (asked, told) == ([], []), "not at once: the protocol is in the middle of a turn"
    rig.turn()
    [broken] = [event for event in told if isinstance(event, events.WriteBroken)]
    assert (broken.transfer, broken.rank, broken.tag, broken.refused) == (rig.one, 0, 4, False)
    for effect in (events.Fence(rig.one, 0, RankId(PREFILL), 1), events.Grant(rig.one, 0, 1, ())):
        rig.manager._carry_out(effect)
        assert asked.pop() == (effect,), "a fence may come after its session"
    rig.manager._carry_out(events.Send(PREFILL, Gone(rig.one)))
    assert rig.line.sent == [], "nobody is there to hear it"
