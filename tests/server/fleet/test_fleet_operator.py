"""An operator's questions to leaders that are real sessions: who is meant, and what is an answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from fleet_records import instance_record, load
from msgspec import structs

from jumps import Jumps
from segue.kv.errors import (
    BootstrapTimeout,
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    PeerLost,
    SegueError,
)
from segue.kv.ids import Incarnation, LeaderId, Role, successor
from segue.kv.limits import Limits
from segue.kv.session.node import SessionNode
from segue.server.fleet.operator import ASK_S, Operator, operator
from segue.server.messages.control import Explain, Explained
from segue.server.messages.operate import (
    GetStatus,
    OperationRefused,
    OperatorMessage,
    SetDraining,
    State,
    Status,
    Switch,
)
from segue.server.messages.records import RequestRecord
from segue.server.registry.registry_records import InstanceRecord, ReplicaRecord

SECRET = b"a secret of enough bytes"
LIMITS = Limits(handshake_s=60.0, connect_s=60.0)
#: When a test is given up.
DEADLINE_S = 60.0


class Listed:
    """A registry that tests write; `asked` counts the questions."""

    def __init__(self) -> None:
        self.there: list[InstanceRecord] = []
        self.asked = asyncio.Semaphore(0)
        self._version = 0
        self._news = asyncio.Event()

    def put(self, *records: InstanceRecord) -> None:
        """These are registered now."""
        self.there = list(records)
        self._version += 1
        self._news.set()

    async def instances(self, role: Role | None, version: int | None, wait_s: float) -> Any:
        self.asked.release()
        while version == self._version:
            self._news.clear()
            await self._news.wait()
        return SimpleNamespace(instances=list(self.there), version=self._version)


class Told:
    """One leader; `answers` says what it answers to each kind of message."""

    def __init__(self, me: LeaderId, role: Role = Role.DECODE) -> None:
        self.me, self.role = me, role
        self.answers: dict[type[Any], Callable[[Any], list[OperatorMessage]]] = {}
        self.asked: list[Any] = []
        self.news = asyncio.Event()
        self.session: Any = None
        self.node = SessionNode(
            me=me,
            role=role,
            secret=SECRET,
            handlers={Role.OPERATOR: self},
            message_type=OperatorMessage,
            limits=LIMITS,
        )

    def hello(self) -> bytes:
        return b""

    def accept(self, peer: object) -> None: ...
    def opened(self, session: Any) -> None: ...
    def closed(self, session: object, error: SegueError) -> None: ...

    def received(self, session: Any, message: object) -> None:
        self.session = session
        self.asked.append(message)
        for answer in self.answers.get(type(message), lambda _: [])(message):
            session.send(answer)
        self.news.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                self.news.clear()
                await self.news.wait()


def sight(state: State = "serving", running: int = 0, frontends: tuple[Incarnation, ...] = ()) -> Status:
    now = load(running=running, waiting=1, pages_free=1, pages_total=4, pages_quarantined=3)
    return Status(
        role=Role.DECODE, state=state, version="1", uptime_s=1.0, load=now, frontends=list(frontends)
    )


class World:
    def __init__(self) -> None:
        self.registry = Listed()
        self.operator = Operator(self.registry, SECRET, LIMITS, None)  # type: ignore[arg-type]
        self.leaders: list[Told] = []

    async def add(self, letter: str, ranks: int = 1, role: Role = Role.DECODE) -> InstanceRecord:
        incarnation = Incarnation(letter * 32)
        ports = []
        for rank in range(ranks):
            leader = Told(LeaderId(incarnation, rank), role)
            self.leaders.append(leader)
            ports.append((await leader.node.listen("127.0.0.1", 0))[1])
        record = instance_record(incarnation, *ports, role=role)
        self.registry.put(*self.registry.there, record)
        return record


@asynccontextmanager
async def a_world() -> AsyncIterator[World]:
    world = World()
    try:
        async with asyncio.timeout(3 * DEADLINE_S):
            yield world
        assert not any(world.operator._inboxes.values()), "somebody still waits for an answer"
    finally:
        await world.operator.node.close()
        for leader in world.leaders:
            await leader.node.close()


@pytest.fixture
def world() -> AbstractAsyncContextManager[World]:
    return a_world()


async def test_an_instance_is_named_by_enough_digits_of_its_own(world: World) -> None:
    for letter in "ab":
        await world.add(letter)
    assert (await world.operator.named("aaaa")).incarnation == "a" * 32
    assert (await world.operator.named("BBBBB")).incarnation == "b" * 32
    for short in ("a", "aaa", ""):
        with pytest.raises(NotFound, match="registered are: aaaaaaaa, bbbbbbbb"):
            await world.operator.named(short)
    world.registry.put(*world.registry.there, world.registry.there[0])
    with pytest.raises(NotFound, match="2 instances begin with aaaa"):
        await world.operator.named("aaaa")


async def test_each_leader_is_a_row_and_one_that_refuses_says_so_in_its_own(world: World) -> None:
    await world.add("a", ranks=2)
    [record] = world.registry.there
    flagged = [record.replicas[0], structs.replace(record.replicas[1], draining=True)]
    world.registry.put(structs.replace(record, replicas=flagged))
    good, bad = world.leaders
    good.answers[GetStatus] = lambda _: [sight("draining", 5)]
    bad.answers[GetStatus] = lambda _: [OperationRefused(InvalidRequest("not now").info)]
    first, second = await world.operator.ps()
    for rank, row in enumerate((first, second)):
        where = record.replicas[rank]
        assert (row.instance, row.dp_rank, row.role) == (record.incarnation, rank, Role.DECODE)
        assert (row.served_model, row.address) == ("tiny", f"127.0.0.1:{where.port}")
        assert row.draining is (rank == 1), "each leader's own flag"
    assert first.sight is not None
    assert (first.sight.state, first.sight.load.running, first.trouble) == ("draining", 5, "")
    assert (second.sight, second.trouble) == (None, "not now")


async def test_a_leader_that_is_silent_or_leaves_is_told_apart(world: World) -> None:
    jumps = Jumps()
    record = await world.add("a", ranks=2)
    silent, leaving = world.leaders

    def leave(_: GetStatus) -> list[OperatorMessage]:
        leaving.session.close(PeerLost("it leaves"))
        return []

    leaving.answers[GetStatus] = leave
    with pytest.raises(PeerLost, match="decode aaaaaaaa dp1 left"):
        await world.operator.ask(record, record.replicas[1], GetStatus(), lambda _: None, DEADLINE_S)
    asking = world.operator.ask(record, record.replicas[0], GetStatus(), lambda _: None, DEADLINE_S)
    asked = asyncio.ensure_future(asking)
    await silent.until(lambda: bool(silent.asked))
    jumps.over(DEADLINE_S)
    with pytest.raises(DeadlineExceeded, match=r"decode aaaaaaaa dp0 did not answer within 60 s"):
        await asked
    assert len(silent.asked) == 1


async def test_a_drain_is_over_when_every_leader_is_drained_and_not_before(world: World) -> None:
    record = await world.add("a", ranks=2)
    heard: list[tuple[int, str]] = []
    news = asyncio.Event()

    def say(where: ReplicaRecord, answer: Status) -> None:
        heard.append((where.dp_rank, answer.state))
        news.set()

    for leader in world.leaders:
        leader.answers[SetDraining] = lambda asked: [sight("draining" if asked.draining else "serving")]
    steering = asyncio.ensure_future(
        world.operator.steer(record, draining=True, timeout_s=DEADLINE_S, say=say)
    )
    for leader in world.leaders:
        await leader.until(lambda at=leader: at.asked == [SetDraining(True)])  # type: ignore[misc]
    first, second = world.leaders
    first.session.send(sight("drained"))
    second.session.send(sight("draining"))
    while len(heard) < 4:
        news.clear()
        await news.wait()
    assert not steering.done()
    second.session.send(sight("drained"))
    await steering
    assert sorted(set(heard)) == [(0, "drained"), (0, "draining"), (1, "drained"), (1, "draining")]
    await world.operator.steer(record, draining=False, timeout_s=DEADLINE_S)
    assert [leader.asked[-1] for leader in world.leaders] == [SetDraining(False)] * 2


async def test_a_drain_that_takes_too_long_says_what_is_left_of_the_leader_that_is_late(world: World) -> None:
    jumps, told = Jumps(), asyncio.Semaphore(0)
    record = await world.add("a", ranks=2)
    world.leaders[0].answers[SetDraining] = lambda _: [sight("drained")]
    world.leaders[1].answers[SetDraining] = lambda _: [sight("draining", 6)]
    steering = asyncio.ensure_future(
        world.operator.steer(record, draining=True, timeout_s=DEADLINE_S, say=lambda *_: told.release())
    )
    for _ in world.leaders:
        await told.acquire()
    jumps.over(DEADLINE_S)
    with pytest.raises(DeadlineExceeded) as caught:
        await steering
    assert "decode aaaaaaaa dp1 is draining after 60 s: 7 requests are left and 3 pages" in str(caught.value)


def switching(world: World, turned: dict[int, list[State]]) -> None:
    """Leaders that drain at once; told to turn they answer what is given for their rank, or leave."""
    for rank, leader in enumerate(world.leaders):

        def answer(asked: Switch, rank: int = rank, leader: Told = leader) -> list[OperatorMessage]:
            if not asked.turn:
                return [sight("drained")]
            if turned.get(rank):
                return [sight(turned[rank].pop(0))]
            leader.session.send(sight("drained"))  # a word of before, which is no answer to this
            leader.session.close(PeerLost("it comes back"))
            return []

        leader.answers[Switch] = answer


async def test_a_switched_instance_is_told_to_turn_once_all_have_drained_and_is_awaited_in_its_new_role(
    world: World,
) -> None:
    record = await world.add("a", ranks=2)
    switching(world, {})
    after = asyncio.ensure_future(world.operator.switch(record, Role.PREFILL, timeout_s=DEADLINE_S))
    for leader in world.leaders:
        await leader.until(lambda at=leader: len(at.asked) == 2)  # type: ignore[misc]
        assert leader.asked == [Switch(Role.PREFILL), Switch(Role.PREFILL, turn=True)]
    for _ in range(2):  # it has looked at the list, and waits for the next one
        await world.registry.asked.acquire()
    other = await world.add("c")
    await world.registry.asked.acquire()
    new = structs.replace(record, incarnation=successor(record.incarnation, Role.PREFILL))
    half = structs.replace(new, replicas=new.replicas[:1])
    world.registry.put(other, half)
    await world.registry.asked.acquire()
    assert not after.done(), "another instance, and half of the one that is awaited: neither is it"
    world.registry.put(other, new)
    assert await after == new
    assert [len(leader.asked) for leader in world.leaders[:2]] == [2, 2]


async def test_of_several_leaders_only_the_one_with_work_is_drained_and_told_again(world: World) -> None:
    record = await world.add("a", ranks=2)
    switching(world, {0: ["draining"]})
    back = structs.replace(record, incarnation=successor(record.incarnation, Role.PREFILL), role=Role.PREFILL)
    world.registry.put(record, back)
    assert await world.operator.switch(record, Role.PREFILL, timeout_s=DEADLINE_S) == back
    turns = [[asked.turn for asked in leader.asked] for leader in world.leaders]
    assert turns == [[False, True, False, True], [False, True]]


async def test_a_switch_whose_ranks_leave_again_before_all_are_back_ends_as_soon_as_that_is_known(
    world: World,
) -> None:
    """A registry that has forgotten them for a moment is no reason."""

    record = await world.add("a", ranks=2)
    switching(world, {})
    switched = asyncio.ensure_future(world.operator.switch(record, Role.PREFILL, timeout_s=DEADLINE_S))
    for leader in world.leaders:
        await leader.until(lambda at=leader: len(at.asked) == 2)  # type: ignore[misc]
    back = Told(LeaderId(successor(record.incarnation, Role.PREFILL), 0), Role.PREFILL)
    back.answers[GetStatus] = lambda _: [sight()]
    world.leaders.append(back)
    host, port = await back.node.listen("127.0.0.1", 0)
    one = structs.replace(
        record,
        role=Role.PREFILL,
        incarnation=back.me.incarnation,
        replicas=[ReplicaRecord(dp_rank=0, host=host, port=port)],
    )
    for there in ([one], [], [one]):
        while not world.registry.asked.locked():
            await world.registry.asked.acquire()
        world.registry.put(*there)
        await world.registry.asked.acquire()
    assert back.asked == [GetStatus()]
    assert not switched.done()
    await back.node.close()
    world.registry.put()
    with pytest.raises(PeerLost, match=r"prefill .* dp0 has left again before all of its DP ranks"):
        await switched


async def test_what_the_drain_took_is_no_time_for_the_turn(world: World) -> None:
    jumps = Jumps()
    record = await world.add("a")
    switching(world, {})
    [leader] = world.leaders
    turn, leader.answers[Switch] = leader.answers[Switch], lambda _: []
    switched = asyncio.ensure_future(world.operator.switch(record, Role.PREFILL, timeout_s=DEADLINE_S))
    await leader.until(lambda: bool(leader.asked))
    jumps.over(DEADLINE_S * 0.6)
    leader.answers[Switch] = turn
    leader.session.send(sight("drained"))
    await world.registry.asked.acquire()  # it has left, and its successor is looked for
    jumps.over(DEADLINE_S * 0.6)
    with pytest.raises(DeadlineExceeded, match="is not back as prefill"):
        await switched


async def test_a_leader_that_cannot_be_reached_is_not_dialled_for_as_long_as_a_drain_may_take(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record = await world.add("a")
    dialled: list[float] = []

    async def connect(*_: object, timeout_s: float, **__: object) -> None:
        dialled.append(timeout_s)
        raise BootstrapTimeout("nobody answers")

    monkeypatch.setattr(world.operator.node, "connect", connect)
    for timeout_s in (600.0, 1.0):
        with pytest.raises(DeadlineExceeded, match="does not answer"):
            await world.operator.steer(record, draining=True, timeout_s=timeout_s)
    assert dialled == [ASK_S, 1.0]


def test_the_registry_is_left_however_a_command_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []

    class Registry(Listed):
        async def close(self) -> None:
            closed.append("registry")

    monkeypatch.setattr("segue.server.fleet.operator.open_backend", lambda *_: Registry())

    async def main() -> None:
        async with operator("http://x", secret=SECRET, limits=LIMITS, tls=None):
            raise NotFound("no such instance")

    with pytest.raises(NotFound):
        asyncio.run(main())
    assert closed == ["registry"]


async def test_one_that_somebody_has_resumed_does_not_turn(world: World) -> None:
    record = await world.add("a")
    switching(world, {0: ["serving"]})
    with pytest.raises(InvalidRequest, match="somebody has resumed it"):
        await world.operator.switch(record, Role.PREFILL, timeout_s=DEADLINE_S)


async def test_one_that_does_not_come_back_is_said_so_in_time(world: World) -> None:
    jumps = Jumps()
    record = await world.add("a")
    switching(world, {})
    switched = asyncio.ensure_future(world.operator.switch(record, Role.PREFILL, timeout_s=DEADLINE_S))
    await world.registry.asked.acquire()  # it has left, and its successor is looked for
    jumps.over(DEADLINE_S)
    with pytest.raises(DeadlineExceeded, match=r"has drained, but is not back as prefill after 60 s"):
        await switched


def record_of(where: str) -> RequestRecord:
    return RequestRecord(request_id="r", where=where, began=1.0, seconds=1.0)


async def test_every_leader_is_asked_for_a_request_and_each_frontend_once_through_one_of_them(
    world: World,
) -> None:
    front, silent = Incarnation("f" * 32), Incarnation("e" * 32)

    await world.add("a", ranks=2)
    await world.add("b", role=Role.PREFILL)
    first, second, leaving = world.leaders
    me = world.operator.node.me

    def left(leader: Told) -> list[OperatorMessage]:
        leader.session.close(PeerLost("it leaves"))
        return []

    def one(asked: Explain) -> list[OperatorMessage]:
        noise = Explained([record_of("noise")], me, [front])
        if asked.frontend is None:
            # What a frontend has said to an asker is no answer of the leader's own, nor the other way.
            return [noise, Explained([record_of("decode")], None, [front])]
        others = [Explained([record_of("noise")], None, [front]), Explained([], me, [silent])]
        return [*others, Explained([record_of("frontend")], me, [front])]

    def two(asked: Explain) -> list[OperatorMessage]:
        known = Explained([record_of("decode too")], None, [front, silent])
        return [known] if asked.frontend is None else left(second)

    first.answers[Explain], second.answers[Explain] = one, two
    leaving.answers[Explain] = lambda _: left(leaving)
    life = await world.operator.explain("r")
    found = sorted(part.record.where for part in life.parts)
    assert found == ["decode", "decode too", "frontend"]
    assert [text.split(":")[0] for text in life.silent] == [
        "prefill bbbbbbbb dp0",
        f"frontend {silent[:8]}",
    ]
    for leader, wanted in ((first, [None, front]), (second, [None, silent])):
        assert [asked.frontend for asked in leader.asked] == wanted, "once is enough"


async def test_questions_about_two_requests_at_once_are_told_apart(world: World) -> None:
    await world.add("a")
    [leader] = world.leaders
    first: list[str] = []

    def answers(asked: Explain) -> list[OperatorMessage]:
        first.append(asked.request_id)
        if len(first) < 2:
            return []
        # The second one's answer comes first, and then an empty one.
        found = [RequestRecord(request_id="two", where="decode", began=1.0, seconds=1.0)]
        return [Explained(found, request_id="two"), Explained([], request_id="one")]

    leader.answers[Explain] = answers
    one = asyncio.ensure_future(world.operator.explain("one"))
    await leader.until(lambda: bool(first))
    two = await world.operator.explain("two")
    assert [part.record.request_id for part in two.parts] == ["two"]
    assert (await one).parts == []


async def test_nobody_is_asked_for_a_name_that_no_request_has(world: World) -> None:
    await world.add("a")
    with pytest.raises(InvalidRequest, match="at most 160 characters"):
        await world.operator.explain("x" * 161)
    assert world.leaders[0].asked == []
