"""The DP rank of prefill comes from the first source that knows it, and is never guessed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from handoff_world import pool_spec

from segue.kv.errors import (
    BootstrapUnreachable,
    DpRankConflict,
    ErrorCode,
    InvalidRequest,
    OutOfCapacity,
    TransferFailed,
)
from segue.kv.ids import OPEN_RANK, Incarnation, KVPoll, LeaderId, Role, RoomKey, TransferId
from segue.kv.layout.planner import plan_pair
from segue.kv.limits import Limits
from segue.kv.protocol import events
from segue.kv.protocol.exchange import Exchange
from segue.kv.protocol.machine import IllegalEvent
from segue.kv.protocol.messages import (
    Accepted,
    Declined,
    Destination,
    Drained,
    Failed,
    Gone,
    HandoffMessage,
    Moved,
)
from segue.kv.protocol.room_ranks import FOLLOW_BOOTSTRAP_ROOM, DpRanks, PrefillInstance

P, D = Incarnation("a" * 32), LeaderId(Incarnation("d" * 32))
#: A second attempt: prefill has the room under its number, and no other.
KEY = RoomKey(4 * 25 + 1, attempt=1)
PLAIN = DpRanks(size=4)
FOLLOWS = DpRanks(size=4, load_balance=FOLLOW_BOOTSTRAP_ROOM)
SPEC = pool_spec(24, 4)
PAGES = (3, 1)
PROMPT = 8
LEFT = TransferFailed("the client left").info


def rank(dp_rank: int) -> LeaderId:
    return LeaderId(P, dp_rank)


def on(dp_rank: int) -> TransferId:
    return TransferId(KEY.room, KEY.attempt, rank(dp_rank), D)


class Decode:
    """A decode leader with sessions to all ranks of prefill. Its own ranks grant at once."""

    def __init__(self, *, limits: Limits | None = None, dp: DpRanks | None = None, up: bool = True) -> None:
        self.exchange = Exchange(
            Role.DECODE, D, f"decode {D}", limits or Limits(), "fake", dp=dp or DpRanks()
        )
        self.now = 0.0
        self.granted: set[int] = set()
        self.fences: list[events.Fence] = []
        for dp_rank in range(4) if up else ():
            self.tell(events.PeerUp(rank(dp_rank), plan_pair([SPEC], [SPEC])))

    def tell(self, event: events.Event) -> list[events.Effect]:
        effects = self.exchange.handle(event, self.now)
        self.exchange.check_integrity()
        for effect in list(effects):
            if isinstance(effect, events.Grant):
                self.granted.add(effect.epoch)
                effects += self.tell(events.Granted(effect.transfer, effect.rank))
            if isinstance(effect, events.Fence):
                self.fences.append(effect)
            if isinstance(effect, events.Send) and isinstance(effect.message, Destination):
                withdrawn = self.granted - {effect.message.epoch}
                assert not withdrawn, "the pages were published twice at once"
        return effects

    def instances(self, dp: DpRanks, *ranks: int) -> list[events.Effect]:
        instance = PrefillInstance(dp, frozenset(ranks or range(dp.size)))
        return self.tell(events.PrefillInstances({P: instance}))

    def open(self, key: RoomKey = KEY, dp_rank: int = OPEN_RANK, **options: Any) -> list[events.Effect]:
        options = {"deadline": 30.0, **options}
        return self.tell(events.OpenReceiver(key=key, prefill=rank(dp_rank), prompt_tokens=PROMPT, **options))

    def publish(self) -> list[events.Effect]:
        return self.tell(events.Publish(KEY, PAGES, 0))

    def hear(self, dp_rank: int, message: HandoffMessage) -> list[events.Effect]:
        return self.tell(events.Received(rank(dp_rank), message))

    def fence(self, *, proven: bool = True) -> list[events.Effect]:
        """Our ranks have stopped all that was granted."""
        fences, self.fences = self.fences, []
        found = []
        for fence in fences:
            self.granted.discard(fence.epoch)
            found += self.tell(events.FenceDone(fence.transfer, fence.rank, fence.partner, proven))
        return found

    def answer(self, dp_rank: int) -> list[events.Effect]:
        return self.tell(events.RoomFound(KEY, rank(dp_rank)))

    def goes_to(self) -> list[int]:
        """The ranks with which it has a hand-off."""
        return [peer.dp_rank for peer in self.exchange.peers()]


def opened(dp: DpRanks, *ranks: int) -> Decode:
    """A receiver whose rank is open, and the registry has named prefill's instance."""
    d = Decode()
    d.instances(dp, *ranks)
    d.open()
    return d


def asked(effects: list[events.Effect]) -> list[events.AskRoom]:
    return [effect for effect in effects if isinstance(effect, events.AskRoom)]


def changes(effects: list[events.Effect]) -> list[Any]:
    """The changes that the engine gets."""
    return [e for e in effects if isinstance(e, events.Phase | events.Release | events.Quarantined)]


def destinations(effects: list[events.Effect]) -> list[Destination]:
    return [
        effect.message
        for effect in effects
        if isinstance(effect, events.Send) and isinstance(effect.message, Destination)
    ]


def failure(d: Decode, effects: list[events.Effect], key: RoomKey = KEY) -> Any:
    """The one error that the engine was told, and that nothing is left."""
    phase, release = changes(effects)
    assert release == events.Release(key)
    assert phase.key == key
    assert phase.error.room == key.room
    assert phase.error.origin == f"decode {D}"
    sizes = d.exchange.sizes()
    assert (sizes["receivers"], sizes["open_receivers"], sizes["transfers"]) == (0, 0, 0)
    assert d.exchange.next_deadline() is None
    return phase.error


# ---- who knows it --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dp", "options", "found", "inferred"),
    [
        (PLAIN, {"hint": 3}, 3, True),
        (FOLLOWS, {"hint": 3}, 3, True),
        (FOLLOWS, {"hint": 3, "force_query": True}, 3, True),
        (DpRanks(), {}, 0, False),
        (DpRanks(), {"force_query": True}, 0, False),
        (FOLLOWS, {}, 1, True),
    ],
)
def test_what_is_known_is_used_at_once(
    dp: DpRanks, options: dict[str, Any], found: int, inferred: bool
) -> None:
    d = Decode()
    d.instances(dp)
    effects = d.open(**options)
    assert asked(effects) == []
    assert [change.phase for change in changes(effects)] == [KVPoll.BOOTSTRAPPING, KVPoll.WAITING_FOR_INPUT]
    effects = d.publish()
    [message] = destinations(effects)
    assert (message.transfer, message.inferred, message.pages) == (on(found), inferred, list(PAGES))


@pytest.mark.parametrize(
    ("dp", "options", "own"),
    [
        (PLAIN, {}, DpRanks()),
        (FOLLOWS, {"force_query": True}, DpRanks()),
        (FOLLOWS, {}, DpRanks(force_query=True)),
    ],
)
def test_else_the_registry_is_asked_once_and_the_receiver_waits_for_the_answer(
    dp: DpRanks, options: dict[str, Any], own: DpRanks
) -> None:
    d = Decode(dp=own)
    d.now = 10.0
    d.instances(dp)
    assert asked(d.open(**options)) == [events.AskRoom(KEY, 20.0)], "as long as there is"
    assert d.goes_to() == []
    assert d.instances(dp) == [], "news, but nothing new"
    effects = d.answer(2)
    assert events.RoomSettled(KEY) in effects
    assert d.goes_to() == [2]
    [message] = destinations(d.publish())
    assert not message.inferred


def test_a_rank_that_the_placer_named_needs_no_registry_at_all() -> None:
    d = Decode()
    effects = d.open(dp_rank=2)
    assert asked(effects) == []
    [message] = destinations(d.publish())
    assert (message.transfer, message.inferred) == (on(2), False)


def test_a_receiver_exists_before_its_instance_is_known_and_is_looked_at_again_when_it_is() -> None:
    d = Decode()
    assert changes(d.open()) == [events.Phase(KEY, KVPoll.BOOTSTRAPPING)]
    other = {Incarnation("b" * 32): PrefillInstance(DpRanks(), frozenset({0}))}
    assert d.tell(events.PrefillInstances(other)) == []
    assert d.tell(events.PrefillInstances({})) == [], "ours was not there yet, and may come"
    assert d.exchange.sizes()["open_receivers"] == 1
    d.instances(FOLLOWS)
    assert d.goes_to() == [1]


@pytest.mark.parametrize("hint", [-1, 4, 2**40])
def test_a_hint_out_of_range_is_refused_before_anything_is_reserved(hint: int) -> None:
    d = Decode()
    d.instances(PLAIN)
    effects = d.open(hint=hint)[1:]
    assert failure(d, effects).code is ErrorCode.DP_RANK_OUT_OF_RANGE


def test_a_rank_that_is_gone_fails_who_names_it_and_nobody_waits_for_it() -> None:
    d = Decode()
    d.instances(PLAIN, 0, 1, 2)
    assert failure(d, d.open(hint=3)[1:]).code is ErrorCode.PEER_LOST


def test_where_the_rule_names_a_rank_that_is_gone_the_registry_is_asked() -> None:
    d = Decode()
    d.instances(FOLLOWS, 0, 2, 3)
    assert len(asked(d.open())) == 1
    d.answer(3)
    assert d.goes_to() == [3]


def test_whoever_waits_for_an_instance_that_leaves_fails_at_once() -> None:
    d = opened(PLAIN)
    effects = d.tell(events.PrefillInstances({}))
    assert failure(d, effects).code is ErrorCode.PEER_LOST
    assert events.RoomSettled(KEY) in effects, "its question waits no longer"


def test_an_instance_that_leaves_ends_nothing_that_has_begun() -> None:
    d = opened(FOLLOWS)
    d.publish()
    assert d.tell(events.PrefillInstances({})) == []


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (LeaderId(Incarnation("b" * 32), 0), ErrorCode.DP_RANK_CONFLICT),
        (rank(3), ErrorCode.PEER_LOST),
    ],
)
def test_an_answer_that_is_none_is_a_typed_error(answer: LeaderId, code: ErrorCode) -> None:
    d = opened(PLAIN, 0, 1, 2)
    assert failure(d, d.tell(events.RoomFound(KEY, answer))).code is code


def test_a_registry_without_an_answer_is_the_receiver_s_error() -> None:
    d = opened(PLAIN)
    error = BootstrapUnreachable("no registry").info
    assert failure(d, d.tell(events.RoomUnknown(KEY, error))).code is ErrorCode.BOOTSTRAP_UNREACHABLE


@pytest.mark.parametrize(("known", "text"), [(True, "nobody registered"), (False, "names no such instance")])
def test_nobody_waits_longer_than_the_deadline(known: bool, text: str) -> None:
    d = Decode()
    if known:
        d.instances(PLAIN)
    d.open()
    assert d.exchange.next_deadline() == 30.0
    d.now = 30.0
    error = failure(d, d.tell(events.Tick()))
    assert error.code is ErrorCode.DEADLINE_EXCEEDED
    assert text in error.text
    assert d.instances(FOLLOWS) == d.answer(2) == [], "too late"


def test_an_answer_after_the_end_changes_nothing() -> None:
    d = opened(PLAIN)
    effects = d.tell(events.EndRoom(KEY, LEFT))
    assert failure(d, effects).text == "the client left"
    assert events.RoomSettled(KEY) in effects
    assert d.answer(0) == d.tell(events.RoomUnknown(KEY, LEFT)) == []
    assert d.publish() == d.tell(events.EndRoom(KEY, LEFT)) == [], "its engine could not know"


def test_an_answer_about_what_has_begun_changes_nothing() -> None:
    d = opened(PLAIN)
    d.answer(2)
    assert d.answer(3) == d.tell(events.RoomUnknown(KEY, LEFT)) == []
    assert d.goes_to() == [2]


def test_as_many_wait_as_there_may_be_hand_offs() -> None:
    d = Decode(limits=Limits(max_transfers=1))
    d.open()
    with pytest.raises(OutOfCapacity):
        d.open(RoomKey(5))
    assert d.exchange.sizes()["open_receivers"] == 1


@pytest.mark.parametrize("dp_rank", [OPEN_RANK, 1, 2])
def test_the_same_room_twice_is_refused_the_second_time_and_the_first_goes_on(dp_rank: int) -> None:
    d = opened(FOLLOWS)
    with pytest.raises(InvalidRequest, match="a room of its own"):
        d.open(dp_rank=dp_rank)
    [message] = destinations(d.publish())
    assert message.transfer == on(1)


@pytest.mark.parametrize("dp_rank", [OPEN_RANK, 1])
def test_a_hand_off_that_is_over_is_not_begun_again_under_either_name(dp_rank: int) -> None:
    d = opened(FOLLOWS)
    d.tell(events.EndRoom(KEY, LEFT))
    if dp_rank == OPEN_RANK:
        phase, release = changes(d.open())[1:]
        assert (phase.error.code, release) == (ErrorCode.INVALID_REQUEST, events.Release(KEY))
    else:
        with pytest.raises(InvalidRequest, match="was used already"):
            d.open(dp_rank=dp_rank)
    assert changes(d.open(RoomKey(KEY.room, attempt=2)))[-1].key.attempt == 2, (
        "another attempt is another one"
    )


def test_pages_before_prefill_is_known_are_the_engine_s_mistake() -> None:
    d = Decode()
    d.open()
    with pytest.raises(IllegalEvent, match="before prefill is known"):
        d.publish()


# ---- the room is on another rank -------------------------------------------------------------------


def published() -> Decode:
    """Rank 1 has been told where to write."""
    d = opened(FOLLOWS)
    d.publish()
    return d


@pytest.mark.parametrize("word", [Gone, Drained])
def test_a_room_on_another_rank_is_followed_there_once_nobody_can_write_for_the_first(word: Any) -> None:
    d = published()
    effects = d.hear(1, Moved(on(1), 3))
    assert changes(effects) == destinations(effects) == [], "the pages still wait for a proof"
    assert d.hear(1, word(on(1))) == [], "prefill's word is one half of it"
    effects = d.fence(proven=False)
    [message] = destinations(effects)
    assert (message.transfer, message.pages, message.inferred) == (on(3), list(PAGES), False)
    assert changes(effects) == [], "its engine has nothing to do for it"
    assert changes(d.hear(3, Accepted(on(3)))) == []
    d.tell(events.EndRoom(KEY, LEFT))
    d.hear(3, Gone(on(3)))
    assert changes(d.fence()) == [events.Release(KEY)]
    assert d.exchange.sizes()["receivers"] == 0


@pytest.mark.parametrize("session", [True, False], ids=["its session is up", "it is not"])
def test_who_is_sent_on_before_it_has_published_goes_there_with_its_pages(session: bool) -> None:
    d = opened(FOLLOWS)
    if not session:
        d.tell(events.PeerDown(rank(3), LEFT))
    effects = d.hear(1, Moved(on(1), 3))
    assert changes(effects) == [], "it is its engine's turn already"
    assert d.goes_to() == [3]
    effects = d.publish()
    if not session:
        assert effects == [], "they wait for the session"
        effects = d.tell(events.PeerUp(rank(3), plan_pair([SPEC], [SPEC])))
    [message] = destinations(effects)
    assert (message.transfer, message.pages) == (on(3), list(PAGES))


@pytest.mark.parametrize("to", [4, -1])
def test_a_rank_that_is_not_there_is_not_followed(to: int) -> None:
    d = published()
    effects = d.hear(1, Moved(on(1), to))
    assert [type(change) for change in changes(effects)] == [events.Phase, events.Quarantined]
    d.hear(1, Gone(on(1)))
    assert changes(d.fence()) == [events.Release(KEY)]


def test_a_rank_that_was_named_is_not_followed_anywhere() -> None:
    d = Decode()
    d.instances(FOLLOWS)
    d.open(dp_rank=1)
    d.publish()
    [phase, _] = changes(d.hear(1, Moved(on(1), 3)))
    assert phase.error.code is ErrorCode.DP_RANK_CONFLICT


def test_it_is_followed_once() -> None:
    d = published()
    d.hear(1, Moved(on(1), 3))
    d.fence()
    assert d.goes_to() == [3]
    effects = d.hear(3, Moved(on(3), 1))
    assert [type(change) for change in changes(effects)] == [events.Phase, events.Quarantined]
    assert changes(d.fence()) == [events.Release(KEY)]
    assert d.exchange.sizes()["receivers"] == 0


@pytest.mark.parametrize("how", ["abort", "deadline"])
def test_an_end_on_the_way_is_told_at_once_and_the_pages_come_back_with_the_proof(how: str) -> None:
    d = published()
    d.hear(1, Moved(on(1), 3))
    if how == "deadline":
        d.now = 30.0
    end = events.EndRoom(KEY, LEFT) if how == "abort" else events.Tick()
    phase, quarantined = changes(d.tell(end))
    code = LEFT.code if how == "abort" else ErrorCode.DEADLINE_EXCEEDED
    assert (phase.phase, phase.error.code) == (KVPoll.FAILED, code)
    assert quarantined == events.Quarantined(KEY, len(PAGES))
    assert d.tell(end) == [], "once"
    effects = d.fence()
    assert changes(effects) == [events.Release(KEY)]
    assert destinations(effects) == []
    assert d.exchange.sizes()["receivers"] == 0


def test_the_other_rank_may_have_ended_it_before_it_came() -> None:
    d = published()
    d.hear(1, Moved(on(1), 3))
    d.hear(3, Failed(on(3), LEFT))
    phase, release = changes(d.fence())
    assert (phase.error.text, release) == ("the client left", events.Release(KEY))


def test_the_lost_session_of_the_rank_that_sent_it_on_changes_nothing() -> None:
    d = published()
    d.hear(1, Moved(on(1), 3))
    assert changes(d.tell(events.PeerDown(rank(1), LEFT))) == []
    d.fence()
    assert d.goes_to() == [3]


# ---- what prefill is told of a room that decode will not take ---------------------------------------


def told(effects: list[events.Effect]) -> dict[LeaderId, Declined]:
    """The `Declined` messages, by the leader that each is for."""
    sent = [e for e in effects if isinstance(e, events.Send) and isinstance(e.message, Declined)]
    assert all(e.message.transfer.prefill == e.peer for e in sent)
    return {e.peer: e.message for e in sent if isinstance(e.message, Declined)}


def test_by_the_policy_fail_the_rank_that_has_the_room_hears_why_decode_s_half_ends() -> None:
    d = Decode()
    d.instances(FOLLOWS)
    d.open(claim=b"both")
    d.publish()
    conflict = DpRankConflict("DP rank 3 has this room").info
    effects = d.hear(1, Moved(on(1), 3, conflict))
    assert [e.error for e in effects if isinstance(e, events.Phase)] == [conflict]
    assert told(effects) == {rank(3): Declined(on(3), conflict, b"both")}


def test_every_rank_is_told_where_the_rank_is_open_and_a_receiver_tells_by_itself() -> None:
    """The room may be on another one than the rule names."""
    d = Decode()
    d.instances(PLAIN)
    assert list(told(d.tell(events.DeclineRoom(KEY, rank(OPEN_RANK), LEFT)))) == [rank(n) for n in range(4)]
    d.open()
    assert d.tell(events.DeclineRoom(KEY, rank(OPEN_RANK), LEFT)) == []


@pytest.mark.parametrize("listed", [True, False])
def test_without_a_session_prefill_is_told_on_the_next_one(listed: bool) -> None:
    """As by a decode that has just started. An engine without a registry lists no instance."""
    d = Decode()
    if listed:
        d.instances(PLAIN)
    d.tell(events.PeerDown(rank(1), LEFT))
    assert d.tell(events.DeclineRoom(KEY, rank(1), LEFT, b"both")) == []
    [word] = told(d.tell(events.PeerUp(rank(1), plan_pair([SPEC], [SPEC])))).values()
    assert (word.transfer, word.claim) == (on(1), b"both")


def test_a_rank_that_its_instance_does_not_have_is_never_told() -> None:
    d = Decode(up=False)
    d.instances(PLAIN)
    assert d.tell(events.DeclineRoom(KEY, rank(99), LEFT)) == []
    assert told(d.tell(events.PeerUp(rank(99), plan_pair([SPEC], [SPEC])))) == {}


@pytest.mark.parametrize("session", [True, False])
def test_a_receiver_that_ends_before_it_has_published_declines_with_its_claim(session: bool) -> None:
    d = Decode(up=session)
    d.open(dp_rank=1, claim=b"both", placed=session)
    effects = d.tell(events.EndRoom(KEY, LEFT))
    if not session:  # what was said to nobody is said again
        effects = d.tell(events.PeerUp(rank(1), plan_pair([SPEC], [SPEC])))
    [word] = told(effects).values()
    assert (word.transfer, word.claim) == (on(1), b"both")
    # The engine's reason becomes the one of prefill's room, and says where it began.
    begun = "WAITING_FOR_INPUT" if session else "BOOTSTRAPPING"
    assert (word.error.text, word.error.phase, word.error.origin) == (LEFT.text, begun, f"decode {D}")


def stranger(number: int) -> LeaderId:
    """A leader that no registry lists and that has no session."""
    return LeaderId(Incarnation(f"{number:032x}"))


def declines(d: Decode, leader: LeaderId, number: int) -> None:
    d.tell(events.DeclineRoom(RoomKey(number), leader, LEFT))


def opens_and_leaves(d: Decode, leader: LeaderId, number: int) -> None:
    key = RoomKey(number)
    d.tell(events.OpenReceiver(key=key, prefill=leader, prompt_tokens=PROMPT, deadline=30.0))
    d.tell(events.EndRoom(key, LEFT))


@pytest.mark.parametrize("asks", [declines, opens_and_leaves])
def test_requests_for_made_up_leaders_displace_no_word_to_a_listed_one(
    asks: Callable[[Decode, LeaderId, int], None],
) -> None:
    d = Decode(limits=Limits(max_transfers=8), up=False)
    d.instances(PLAIN)
    for number in range(1, 8):
        declines(d, rank(1), number)
    for number in range(1000, 1100):
        asks(d, stranger(number), number)
    assert d.exchange.sizes()["ended"] == 8
    told = d.tell(events.PeerUp(rank(1), plan_pair([SPEC], [SPEC])))
    assert [e.message.transfer.room for e in told if isinstance(e, events.Send)] == [1, 2, 3, 4, 5, 6, 7]


def test_words_to_listed_leaders_leave_those_that_no_registry_lists_their_share() -> None:
    """And need what these had of the rest."""
    d = Decode(limits=Limits(max_transfers=16), up=False)
    d.instances(PLAIN)
    for number in range(1000, 1016):
        declines(d, stranger(1000), number)
    for number in range(1, 101):
        declines(d, rank(number % 4), number)
    told = d.tell(events.PeerUp(stranger(1000), plan_pair([SPEC], [SPEC])))
    assert [e.message.transfer.room for e in told if isinstance(e, events.Send)] == [1014, 1015]


def test_a_room_may_be_used_again_when_no_word_of_its_last_use_can_be_under_way() -> None:
    """That is `peer_silence_s` after its end, not at its deadline."""
    d = Decode(limits=Limits(peer_silence_s=10.0))
    d.open(dp_rank=1, deadline=30.0)
    d.now = 29.9
    d.tell(events.EndRoom(KEY, LEFT))
    d.now = 39.8
    d.tell(events.Tick())
    with pytest.raises(InvalidRequest, match="used already"):
        d.open(dp_rank=1, deadline=60.0)
    d.now = 40.0
    d.tell(events.Tick())
    d.open(dp_rank=1, deadline=60.0)


def test_a_leader_that_the_registry_has_not_named_yet_is_told_when_it_comes() -> None:
    d = Decode(up=False)
    for number in range(1000, 1003):
        declines(d, stranger(number), number)
    told = d.tell(events.PeerUp(stranger(1001), plan_pair([SPEC], [SPEC])))
    assert [e.message.transfer.room for e in told if isinstance(e, events.Send)] == [1001]


def test_hand_offs_of_a_session_that_was_lost_are_no_strangers_words() -> None:
    """Its pages were published: what it is told after an unlisted flood still names this hand-off."""
    d = Decode(limits=Limits(max_transfers=8))
    d.open(dp_rank=1)
    d.publish()
    d.tell(events.PeerDown(rank(1), LEFT))
    d.fence()
    for number in range(1000, 1100):
        declines(d, stranger(number), number)
    told = d.tell(events.PeerUp(rank(1), plan_pair([SPEC], [SPEC])))
    assert [e.message.transfer for e in told if isinstance(e, events.Send)] == [on(1)]
