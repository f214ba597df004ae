"""The sessions of an instance with frontends and operators: who is told what, and what their end leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from fleet_records import instance_record, load

from segue.engine.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, FollowPrefixes, Prefixes
from segue.engine.request import Output
from segue.kv.errors import Draining, PeerLost, PeerRefused
from segue.kv.ids import Incarnation, KVPoll, LeaderId, Role, RoomKey
from segue.kv.peers import PathSpeed
from segue.kv.protocol import events
from segue.kv.session.api import PeerInfo
from segue.server.instance.frontend_sessions import FrontendSessions
from segue.server.instance.leader import FromFrontend, FrontendGone, Item
from segue.server.instance.operators import OperatorSessions, StatusReporter
from segue.server.messages.control import (
    Cancel,
    Explain,
    Explained,
    FlushCache,
    Load,
    Outputs,
)
from segue.server.messages.operate import GetStatus, OperationRefused, SetDraining, Status
from segue.server.messages.records import RequestRecord
from segue.server.registry.registry_records import InstanceRecord

LEFT = PeerLost("left")


def leader(letter: str, dp_rank: int = 0) -> LeaderId:
    return LeaderId(Incarnation(letter * 32), dp_rank)


class Session:
    """Keeps what it is sent."""

    closing = False

    def __init__(self, letter: str = "f", dp_rank: int = 0) -> None:
        self.sent: list[Any] = []
        self.peer = PeerInfo(leader(letter, dp_rank), Role.FRONTEND, "10.0.0.1:5", b"")

    def send(self, message: Any) -> None:
        self.sent.append(message)


# ---- frontends ---------------------------------------------------------------------------------------


def frontends() -> tuple[FrontendSessions, list[Item]]:
    sessions, inbox = FrontendSessions(), list[Item]()
    sessions.deliver = inbox.append
    return sessions, inbox


def test_a_new_frontend_hears_the_load_at_once_and_everybody_each_later_one() -> None:
    sessions, _ = frontends()
    early, late = Session("f"), Session("g")
    sessions.opened(early)
    assert early.sent == []
    first, second = load(running=1), load(running=2)
    sessions.report(first)
    sessions.opened(late)
    assert late.sent == [first]
    sessions.report(second)
    assert (early.sent, late.sent) == ([first, second], [first, second])
    sessions.closed(early, LEFT)
    sessions.report(first)
    assert len(early.sent) == 2


def test_orders_reach_the_leader_with_who_gave_them_and_nothing_else_does() -> None:
    sessions, inbox = frontends()
    one = Session("f")
    for message in (Cancel("r", LEFT.info), FlushCache(), FollowPrefixes(), load(), Outputs([])):
        sessions.received(one, message)
    wanted = [Cancel("r", LEFT.info), FlushCache(), FollowPrefixes()]
    assert inbox == [FromFrontend(one.peer.leader.incarnation, message) for message in wanted]
    sessions.deliver = None  # before there is a leader
    sessions.received(one, FlushCache())
    assert len(inbox) == 3


def test_outputs_go_to_the_frontend_that_asked_and_nowhere_once_it_has_gone() -> None:
    sessions, inbox = frontends()
    one, other = Session("f"), Session("g")
    for session in (one, other):
        sessions.opened(session)
    outputs = [Output(request_id="r", token_ids=[7])]
    sessions.send(Incarnation("f" * 32), outputs)
    assert (one.sent, other.sent) == ([Outputs(outputs)], [])
    sessions.closed(one, LEFT)
    sessions.send(Incarnation("f" * 32), outputs)
    assert len(one.sent) == 1
    assert inbox == [FrontendGone(Incarnation("f" * 32), LEFT.info)]


def test_the_late_end_of_a_session_that_was_replaced_ends_nothing_of_the_new_one() -> None:
    sessions, inbox = frontends()
    old, new = Session("f"), Session("f")
    sessions.opened(old)
    sessions.opened(new)
    sessions.prefixes(Incarnation("f" * 32), 4, [])
    sessions.closed(old, LEFT)
    assert inbox == []
    sessions.prefixes(None, 4, [AllBlocksCleared()])
    assert [message.seq for message in new.sent] == [0, 1]


def test_a_frontend_has_no_dp_ranks() -> None:
    sessions, _ = frontends()
    sessions.accept(Session("f").peer)
    with pytest.raises(PeerRefused, match="no data-parallel ranks"):
        sessions.accept(Session("f", dp_rank=1).peer)


def test_prefixes_are_numbered_for_each_who_follows_and_told_to_nobody_else() -> None:
    sessions, _ = frontends()
    one, other, none = Session("f"), Session("g"), Session("h")
    for session in (one, other, none):
        sessions.opened(session)
    whole = [BlockStored([1, 2], None, [1, 2, 3, 4], 2)]
    sessions.prefixes(one.peer.leader.incarnation, 2, whole)
    sessions.prefixes(None, 2, [BlockRemoved([2])])
    sessions.prefixes(other.peer.leader.incarnation, 2, whole)
    sessions.prefixes(None, 2, [AllBlocksCleared(), BlockStored([3], None, [5, 6], 2)])
    first = Prefixes(seq=0, page_tokens=2, stored=[1, 2])
    last = Prefixes(seq=2, page_tokens=2, stored=[3], cleared=True)
    assert one.sent == [first, Prefixes(seq=1, page_tokens=2, removed=[2]), last]
    assert other.sent == [first, msgspec.structs.replace(last, seq=1)]
    assert none.sent == []
    sessions.prefixes(one.peer.leader.incarnation, 2, whole)
    assert one.sent[-1] == first, "who asks again has all of it, and its numbers begin anew"


def test_who_follows_prefixes_is_forgotten_with_its_session_also_if_it_left_before_the_answer() -> None:
    sessions, _ = frontends()
    one = Session("f")
    sessions.opened(one)
    sessions.prefixes(one.peer.leader.incarnation, 2, [])
    sessions.closed(one, LEFT)
    sessions.prefixes(one.peer.leader.incarnation, 2, [])
    sessions.prefixes(None, 2, [AllBlocksCleared()])
    assert len(one.sent) == 1
    assert sessions._following == {}


# ---- operators ---------------------------------------------------------------------------------------


class Desk:
    """An instance as operators see it: `state` is what it is, and what they ask waits for `answer`."""

    def __init__(self) -> None:
        self.state = "serving"
        self.steered: list[object] = []
        self.refuses: Draining | None = None
        self.waiting: list[Callable[[Load], None]] = []
        self.frontends, _ = frontends()
        self.records: list[RequestRecord] = []
        self.sessions = OperatorSessions(
            self.waiting.append, self._sight, self._steer, self._find, self.frontends, self._record
        )

    def _sight(self, said: Load) -> Status:
        return Status(role=Role.DECODE, state=self.state, version="1", uptime_s=1.0, load=said)  # type: ignore[arg-type]

    def _steer(self, order: object) -> None:
        if self.refuses is not None:
            raise self.refuses
        self.steered.append(order)

    def _find(self, request_id: str, answer: Callable[[list[RequestRecord]], None]) -> None:
        answer(self.records)

    def _record(self) -> InstanceRecord:
        return instance_record(Incarnation("d" * 32), 1)

    def answer(self) -> None:
        waiting, self.waiting[:] = list(self.waiting), []
        for told in waiting:
            told(load())


def states(session: Session) -> list[str]:
    return [sight.state for sight in session.sent]


def test_who_steers_hears_the_state_and_each_change_of_it_and_who_only_looks_hears_it_once() -> None:
    desk, one, other = Desk(), Session("1"), Session("2")
    for session in (one, other):
        desk.sessions.opened(session)
    desk.sessions.received(other, GetStatus())
    desk.sessions.received(one, SetDraining(draining=True))
    assert desk.steered == [SetDraining(draining=True)]
    assert not desk.sessions.watched, "not before it has its first answer"
    desk.state = "draining"
    desk.answer()
    desk.sessions.report(load(running=1))
    assert (states(one), states(other)) == (["draining"], ["draining"]), "the load is no change of the state"
    assert desk.sessions.watched
    desk.state = "drained"
    for _ in range(2):
        desk.sessions.report(load())
    assert (states(one), states(other)) == (["draining", "drained"], ["draining"])
    desk.sessions.closed(one, LEFT)
    assert not desk.sessions.watched
    desk.state = "serving"
    desk.sessions.report(load())
    assert len(one.sent) == 2


def test_an_operator_that_left_before_its_first_answer_is_not_watched_for_ever() -> None:
    desk, one = Desk(), Session("1")
    desk.sessions.opened(one)
    desk.sessions.received(one, SetDraining(draining=True))
    one.closing = True
    desk.answer()
    assert not desk.sessions.watched


def test_an_order_that_is_refused_is_answered_with_why_and_nobody_waits_for_it() -> None:
    desk, one = Desk(), Session("1")
    desk.sessions.opened(one)
    desk.refuses = Draining("it is leaving")
    desk.sessions.received(one, SetDraining(draining=False))
    assert one.sent == [OperationRefused(desk.refuses.info)]
    assert (desk.waiting, desk.sessions.watched) == ([], False)


def test_a_question_about_a_request_is_answered_here_or_by_the_frontend_that_is_named() -> None:
    desk, one, other, frontend = Desk(), Session("1"), Session("2"), Session("f")
    for session in (one, other):
        desk.sessions.opened(session)
    desk.frontends.opened(frontend)
    who = frontend.peer.leader.incarnation
    desk.sessions.received(one, Explain("r"))
    assert one.sent == [Explained([], frontends=[who], request_id="r")], (
        "and which frontends may be asked through it"
    )
    desk.sessions.received(one, Explain("r", who))
    desk.sessions.received(one, Explain("r", Incarnation("e" * 32)))  # which has no session here
    assert frontend.sent == [Explain("r", asker=one.peer.leader)]
    desk.frontends.received(frontend, Explained([], asker=one.peer.leader, request_id="r"))
    desk.frontends.received(frontend, Explained([], asker=leader("9")))  # who has gone
    desk.frontends.received(frontend, Explained([]))
    assert one.sent[1:] == [Explained([], one.peer.leader, [who], "r")]
    assert other.sent == []


def test_an_operator_without_a_registry_hears_who_this_is() -> None:
    desk = Desk()
    assert msgspec.msgpack.decode(desk.sessions.hello(), type=InstanceRecord) == desk._record()


# ---- what is shown -----------------------------------------------------------------------------------


class Tables:
    """A manager: its tables, and the paths to its peers."""

    def __init__(self, *peers: LeaderId) -> None:
        self.held = 0
        self._peers = peers

    def sizes(self) -> dict[str, int]:
        return {"transfers": self.held, "peers": 5}

    def paths(self) -> dict[str, PathSpeed]:
        return {str(peer): PathSpeed("shm", 10, 5.0) for peer in self._peers}


def phase(peer: str, poll: KVPoll) -> events.Phase:
    return events.Phase(RoomKey(1), poll, peer=leader(peer))


def sights(role: Role, limit: int = 8, *peers: LeaderId) -> tuple[StatusReporter, Tables]:
    found = StatusReporter(role, frontends()[0], limit)
    tables = Tables(*peers)
    found.manager = tables  # type: ignore[assignment]
    return found, tables


@pytest.mark.parametrize(
    ("said", "held", "door", "state"),
    [
        ({}, 0, 0, "serving"),
        ({"draining": True}, 0, 0, "draining"),
        ({"draining": True, "drained": True}, 0, 0, "drained"),
        ({"draining": True, "drained": True}, 1, 0, "draining"),
        ({"draining": True, "drained": True}, 0, 1, "draining"),
    ],
)
def test_an_instance_is_drained_when_nothing_is_left_in_the_role_below_it_and_in_its_door(
    said: dict[str, bool], held: int, door: int, state: str
) -> None:
    found, tables = sights(Role.PREFILL)
    tables.held, found.door = held, lambda: {"legs": door}
    assert found.of(load(**said)).state == state
    assert found.held is bool(held or door)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_ends_of_hand_offs_are_counted_by_their_peer_and_by_how_they_ended(role: Role) -> None:
    peer, other = ("d", "e") if role is Role.PREFILL else ("p", "q")
    found, _ = sights(role, 8, leader(peer), leader(other), leader("0"))
    for poll in (*KVPoll, KVPoll.SUCCESS):
        found.changed(phase(peer, poll))
    found.changed(phase(other, KVPoll.FAILED))
    found.changed(events.Release(RoomKey(1)))
    assert [(pair.succeeded, pair.failed) for pair in found.of(load()).pairs] == [(2, 1), (0, 1), (0, 0)]


def test_peers_whose_hand_offs_are_counted_are_bounded_and_the_latest_stay() -> None:
    found, _ = sights(Role.PREFILL, 2, *(leader(letter) for letter in "123"))
    for letter in "12131":
        found.changed(phase(letter, KVPoll.SUCCESS))
    assert [pair.succeeded for pair in found.of(load()).pairs] == [3, 0, 1]
