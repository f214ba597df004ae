"""Decode's side of two legs: whom it hears of once it has found the prefill instance with the other leg."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from segue.engine.request import Output, RankHints, Request, SamplingParams
from segue.kv.errors import (
    BootstrapTimeout,
    BootstrapUnreachable,
    ErrorCode,
    Internal,
    InvalidRequest,
    OutOfCapacity,
    PeerLost,
    SegueError,
)
from segue.kv.ids import Incarnation, LeaderId, Role
from segue.server.direct import decode_rendezvous as module
from segue.server.direct.decode_rendezvous import DecodeRendezvous, Meeting
from segue.server.fleet.replica import Replica
from segue.server.frontend.legs import Bootstrap, RetainedTicket
from segue.server.messages.control import Done, FindPrefill, PrefillFound
from segue.server.registry.registry_records import InstanceRecord, ReplicaRecord

ROOM = 5


class Session:
    """What was sent."""

    def __init__(self) -> None:
        self.sent: list[object] = []

    def send(self, message: object) -> None:
        self.sent.append(message)


def prefill(
    letter: str, host: str = "127.0.0.1", port: int = 8998, role: Role = Role.PREFILL
) -> tuple[Replica, Session]:
    record = InstanceRecord(
        incarnation=Incarnation(letter * 32),
        role=role,
        model="m",
        served_model="tiny",
        context_tokens=100,
        bootstrap_port=port,
        replicas=[ReplicaRecord(dp_rank=0, host=host, port=9)],
    )
    session = Session()
    return Replica(record, record.replicas[0], session=session), session  # type: ignore[arg-type]


@pytest.mark.parametrize("gone", ["the other", "its holder"])
def test_once_the_leg_is_found_only_its_holder_s_end_is_that_of_the_request(gone: str) -> None:
    async def main() -> None:
        (holder, its), (other, others) = prefill("a"), prefill("b")
        replicas = {replica.leader: replica for replica in (holder, other)}
        cancelled: list[str] = []
        fleet: Any = SimpleNamespace(
            membership=SimpleNamespace(replicas=replicas),
            submit=lambda request, **_: request,
            cancel=lambda request_id, _reason: cancelled.append(request_id),
        )
        meetings = DecodeRendezvous(limit=4)
        async with Meeting(meetings, fleet, Bootstrap("127.0.0.1", 8998, ROOM)) as meeting:
            await meeting.ask()
            meetings.met(holder, PrefillFound(room=ROOM, dp_rank=0))
            await meeting.wait(1)
            meeting.submit(Request(request_id="r", prompt=[1], sampling=SamplingParams()), budget_s=1.0)
            meetings.lost(holder if gone == "its holder" else other, PeerLost("gone"))
            assert cancelled == (["r"] if gone == "its holder" else [])
        assert [type(message) for message in others.sent] == [FindPrefill, Done], (
            "told once, and then left alone"
        )
        assert [type(message) for message in its.sent] == (
            [FindPrefill] if gone == "its holder" else [FindPrefill, Done]
        )
        assert not any(meetings.sizes().values())

    asyncio.run(main())


class TwoTokens:
    """A generation, whose first output says where the time went."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id

    async def deliver(self, take: Callable[[Output], object]) -> None:
        take(Output(request_id=self.request_id))
        for position in range(2):
            take(Output(request_id=self.request_id, position=position, token_ids=[7]))


class Place:
    """Decode's door among these prefill instances; also the fleet that its requests are placed in."""

    def __init__(self, *there: tuple[Replica, Session], limit: int = 4) -> None:
        self.meetings = DecodeRendezvous(limit)
        self.membership = SimpleNamespace(replicas={replica.leader: replica for replica, _ in there})
        self.submitted: list[tuple[Request, Incarnation | None]] = []
        self.cancelled: list[tuple[str, ErrorCode]] = []
        self.completed: list[str] = []
        self.news = asyncio.Event()

    async def changed(self) -> None:
        await self.news.wait()

    def submit(self, request: Request, *, budget_s: float, prefill: Incarnation | None = None) -> TwoTokens:
        self.submitted.append((request, prefill))
        return TwoTokens(request.request_id)

    def complete(self, request_id: str) -> None:
        self.completed.append(request_id)

    def cancel(self, request_id: str, reason: Any) -> None:
        self.cancelled.append((request_id, reason.code))

    def meeting(self, legs: Any = None, hint: int | None = None, meet_s: float = 30.0) -> Meeting:
        fleet: Any = self
        return Meeting(self.meetings, fleet, legs or Bootstrap("127.0.0.1", 8998, ROOM), hint, meet_s)


def request(name: str) -> Request:
    ranks = RankHints(disagg_prefill_dp_rank=0, force_query_prefill_dp_rank=True)
    return Request(request_id=name, prompt=[1], sampling=SamplingParams(), ranks=ranks)


def told(session: Session) -> list[ErrorCode | None]:
    """How prefill's leg heard that it is over, each time."""
    overs = [message for message in session.sent if isinstance(message, Done)]
    assert all(over.room == ROOM for over in overs)
    return [over.error.code if over.error else None for over in overs]


def test_every_prefill_at_the_named_address_is_asked_and_nobody_else() -> None:
    async def main() -> None:
        here = prefill("a", host="10.0.0.1")
        others = [
            prefill("b", host="10.0.0.1", port=8999),
            prefill("c", host="10.0.0.2"),
            prefill("d", host="10.0.0.1", role=Role.DECODE),
        ]
        away, silent = prefill("e", host="10.0.0.1")
        away.session = None
        place = Place(here, *others, (away, silent))
        async with place.meeting(Bootstrap("10.0.0.1", 8998, ROOM), hint=1) as meeting:
            await meeting.ask()
        assert here[1].sent[0] == FindPrefill(room=ROOM, hint=1)
        assert [session.sent for _, session in others] == [[], [], []]
        assert silent.sent == []

    asyncio.run(main())


@pytest.mark.parametrize(
    ("registered", "named", "same"),
    [
        ("10.0.0.1", "10.0.0.1", True),
        ("10.0.0.1", "10.0.0.2", False),
        ("Node-1.example", "node-1.EXAMPLE", True),
        ("fd00::1", "[FD00::1]", True),
        ("127.0.0.1", "localhost", True),
        ("127.0.0.1", "[::1]", True),
        ("10.0.0.1", "127.0.0.1", False),
        ("127.0.0.1", "10.0.0.1", False),
    ],
)
def test_hosts_are_one_as_they_are_written_or_if_both_are_this_machine(
    registered: str, named: str, same: bool
) -> None:
    assert module._same_host(registered, named) is same


def test_a_ticket_is_shown_to_who_gave_it_out_and_nobody_hears_of_its_end() -> None:
    async def main() -> None:
        issuer, other = prefill("a"), prefill("b")
        place = Place(issuer, other)
        ticket = RetainedTicket(ROOM, LeaderId(Incarnation("a" * 32)), 0, 1)
        async with place.meeting(ticket) as meeting:
            await meeting.ask()
            place.meetings.met(issuer[0], PrefillFound(room=ROOM, dp_rank=0))
            await meeting.wait(1)
        assert issuer[1].sent == [FindPrefill(room=ROOM, ticket=True)]
        assert other[1].sent == []

    asyncio.run(main())


def test_what_another_than_the_holder_of_the_leg_says_changes_nothing() -> None:
    """One that was asked as well may say later that it had no room for it, and a third was never asked."""

    async def main() -> None:
        holder, other, stranger = prefill("a"), prefill("b"), prefill("c", port=1)
        place = Place(holder, other, stranger)
        async with place.meeting() as meeting:
            await meeting.ask()
            place.meetings.met(stranger[0], PrefillFound(room=ROOM, error=Internal("no").info))
            place.meetings.met(stranger[0], PrefillFound(room=ROOM, dp_rank=1))
            place.meetings.met(holder[0], PrefillFound(room=ROOM, dp_rank=0))
            await meeting.wait(1)
            meeting.submit(request("r"), budget_s=1.0)
            place.meetings.met(other[0], PrefillFound(room=ROOM, error=OutOfCapacity("full").info))
            place.meetings.met(other[0], PrefillFound(room=ROOM, dp_rank=1))
            meeting.submit(request("s"), budget_s=1.0)
        assert place.cancelled == []
        assert {who for _, who in place.submitted} == {holder[0].record.incarnation}
        assert told(other[1]) == [None], "told once that it has not got the request"

    asyncio.run(main())


def test_what_the_holder_s_leg_fails_with_ends_all_samples_and_those_that_were_to_come() -> None:
    async def main() -> None:
        holder = prefill("a")
        place = Place(holder)
        async with place.meeting() as meeting:
            await meeting.ask()
            place.meetings.met(holder[0], PrefillFound(room=ROOM, dp_rank=0))
            await meeting.wait(3)
            for name in ("r", "s"):
                meeting.submit(request(name), budget_s=1.0)
            place.meetings.met(holder[0], PrefillFound(room=ROOM, error=Internal("prefill broke").info))
            place.meetings.lost(holder[0], PeerLost("later"))
            assert place.cancelled == [("r", ErrorCode.INTERNAL), ("s", ErrorCode.INTERNAL)]
            with pytest.raises(Internal, match="broke"):
                meeting.submit(request("t"), budget_s=1.0)
        assert told(holder[1]) == [], "its leg has ended by itself"

    asyncio.run(main())


def lost(place: Place, replica: Replica, error: SegueError) -> None:
    place.meetings.lost(replica, error)


def not_there(place: Place, replica: Replica, error: SegueError) -> None:
    """Its door is full, or was never opened, or nobody came to it in time."""
    place.meetings.met(replica, PrefillFound(room=ROOM, error=error.info, elsewhere=True))


Says = Callable[[Place, Replica, SegueError], None]


@pytest.mark.parametrize("first", [lost, not_there])
@pytest.mark.parametrize("last", [lost, not_there])
def test_while_the_leg_is_looked_for_only_the_last_end_of_those_asked_ends_the_wait(
    first: Says, last: Says
) -> None:
    async def main() -> None:
        one, other = prefill("a"), prefill("b")
        place = Place(one, other)
        async with place.meeting() as meeting:
            await meeting.ask()
            waiting = asyncio.ensure_future(meeting.wait(1))
            await asyncio.sleep(0)
            first(place, one[0], PeerLost("gone"))
            await asyncio.sleep(0)
            assert not waiting.done()
            last(place, other[0], PeerLost("gone, too"))
            with pytest.raises(PeerLost, match="too"):
                await waiting
        assert place.meetings.abandoned == 0

    asyncio.run(main())


def test_a_decode_leg_for_which_there_is_no_place_tells_prefill_so_unless_its_room_has_one() -> None:
    async def main() -> None:
        there = prefill("a")
        place = Place(there, limit=1)
        async with place.meeting() as meeting:
            await meeting.ask()
            with pytest.raises(InvalidRequest, match="in use"):
                async with place.meeting():
                    raise AssertionError("two decode legs have one room")
            assert told(there[1]) == [], "the first one's leg waits there"
            assert place.meetings.sizes() == {"meetings": 1}
            place.meetings.met(there[0], PrefillFound(room=ROOM))
            await meeting.wait(1)
            with pytest.raises(OutOfCapacity):
                async with place.meeting(Bootstrap("127.0.0.1", 8998, ROOM + 1)):
                    raise AssertionError("more than the limit")
            assert [message for message in there[1].sent if isinstance(message, Done)] == [
                Done(room=ROOM + 1, error=OutOfCapacity("1 requests are in flight already").info)
            ]
        assert place.meetings.sizes() == {"meetings": 0}

    asyncio.run(main())


def test_prefill_s_part_is_done_with_the_first_token_of_the_last_sample() -> None:
    async def main() -> None:
        holder = prefill("a")
        place = Place(holder)
        async with place.meeting() as meeting:
            await meeting.ask()
            place.meetings.met(holder[0], PrefillFound(room=ROOM, dp_rank=3))
            await meeting.wait(2)
            for name in ("r", "s"):
                seen: list[list[ErrorCode | None]] = []
                generation = meeting.submit(request(name), budget_s=1.0)
                await generation.deliver(lambda _, seen=seen: seen.append(told(holder[1])))  # type: ignore[misc]
                assert seen == ([[], [], []] if name == "r" else [[], [None], [None]]), name
        assert told(holder[1]) == [None], "told once"
        for asked, _ in place.submitted:
            assert asked.ranks.disagg_prefill_dp_rank == 3, "where the leg is, whatever its body says"
            assert not asked.ranks.force_query_prefill_dp_rank

    asyncio.run(main())


def test_a_prefill_leg_that_does_not_come_ends_decode_s_in_time_and_is_counted() -> None:
    async def main() -> None:
        there = prefill("a")
        place = Place(there)

        async def waits() -> None:
            async with place.meeting(meet_s=0.01) as meeting:
                await meeting.ask()
                await meeting.wait(1)

        with pytest.raises(BootstrapTimeout) as caught:
            await waits()
        assert caught.value.info.room == ROOM
        assert place.meetings.abandoned == 1
        assert told(there[1]) == [ErrorCode.BOOTSTRAP_TIMEOUT], "it may still come, and is not to wait"
        assert place.meetings.sizes() == {"meetings": 0}

    asyncio.run(main())


def test_a_prefill_that_appears_while_it_is_looked_for_is_asked() -> None:
    async def main() -> None:
        (late, session), place = prefill("a"), Place()
        async with place.meeting() as meeting:
            asking = asyncio.ensure_future(meeting.ask())
            await asyncio.sleep(0)
            assert not asking.done()
            place.membership.replicas[late.leader] = late
            place.news.set()
            await asking
            assert session.sent == [FindPrefill(room=ROOM)]

    asyncio.run(main())


def test_a_leg_whose_prefill_does_not_exist_is_refused_wherever_it_may_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        elsewhere = prefill("a", port=1)
        place = Place(elsewhere)
        monkeypatch.setattr(module, "FIND_S", 0.01)
        with pytest.raises(BootstrapUnreachable):
            async with place.meeting() as meeting:
                await meeting.ask()
        assert told(elsewhere[1]) == [ErrorCode.BOOTSTRAP_UNREACHABLE]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (None, None),
        (InvalidRequest("too long"), ErrorCode.INVALID_REQUEST),
        (asyncio.CancelledError(), ErrorCode.ABORTED_BY_CLIENT),
    ],
)
def test_however_a_decode_leg_ends_prefill_s_hears_of_it_once(
    end: BaseException | None, code: ErrorCode | None
) -> None:
    async def main() -> None:
        holder = prefill("a")
        place = Place(holder)
        meeting = await place.meeting().__aenter__()
        await meeting.ask()
        place.meetings.met(holder[0], PrefillFound(room=ROOM, dp_rank=0))
        await meeting.wait(1)
        await meeting.__aexit__(type(end) if end else None, end, None)
        place.meetings.met(holder[0], PrefillFound(room=ROOM, error=Internal("late").info))
        assert told(holder[1]) == [code]

    asyncio.run(main())
