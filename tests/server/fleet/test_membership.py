"""Faults while following the registry and keeping sessions are visible, and repaired."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from fleet_rig import DEADLINE_S, FakeRegistry, Leader, Rig

from segue.engine.request import FinishReason, Output
from segue.kv.errors import BootstrapUnreachable, PeerLost, PeerRefused, Unauthorized
from segue.kv.ids import LeaderId, Role
from segue.kv.session.node import SessionNode
from segue.server.messages.control import Outputs
from segue.server.registry.registry_records import InstanceRecord


@pytest.fixture(autouse=True)
def no_long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("segue.kv.session.tasks.FIRST_PAUSE_S", 0.001)


class Broken(InstanceRecord, frozen=True, kw_only=True):
    """A record that breaks whoever looks at its leaders."""

    def leaders(self) -> Any:
        raise KeyError("a bug")


class Failing(FakeRegistry):
    """A registry whose first watches go wrong."""

    def __init__(self, *outcomes: BaseException | list[InstanceRecord]) -> None:
        super().__init__()
        self.outcomes = list(outcomes)

    async def watch(self) -> AsyncIterator[list[InstanceRecord]]:
        if self.outcomes:
            outcome = self.outcomes.pop(0)
            if isinstance(outcome, BaseException):
                raise outcome
            yield outcome
            return
        async for records in super().watch():
            yield records


BROKEN = Broken(incarnation="b" * 32, role=Role.DECODE, model="m", served_model="tiny", context_tokens=9)


@pytest.mark.parametrize(
    "outcome",
    [KeyError("a bug"), Unauthorized("a wrong secret"), BootstrapUnreachable("away"), [], [BROKEN]],
    ids=["a bug", "refused", "away", "ended", "a bug in what was listed"],
)
async def test_whatever_ends_the_watch_of_the_registry_it_begins_again(
    rig: Rig, outcome: BaseException | list[InstanceRecord], caplog: pytest.LogCaptureFixture
) -> None:
    rig.fleet.membership._registry = rig.registry = Failing(outcome)
    await rig.add(Role.UNIFIED)
    assert await rig.run() == [5, 6, 7]
    assert not rig.registry.outcomes
    assert "the watch of instances begins again" in caplog.text


async def test_a_bug_in_a_dial_is_logged_and_dialled_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    outcomes: list[Exception] = [KeyError("a bug"), OverflowError("port must be 0-65535")]
    normal = SessionNode.connect

    async def connect(self: SessionNode, *args: Any, **options: Any) -> Any:
        if outcomes:
            raise outcomes.pop(0)
        return await normal(self, *args, **options)

    monkeypatch.setattr(SessionNode, "connect", connect)

    await rig.add(Role.UNIFIED)
    assert await rig.run() == [5, 6, 7]
    assert not outcomes
    assert "KeyError('a bug')" in caplog.text


async def test_a_session_that_ends_is_opened_again(rig: Rig) -> None:
    leader = await rig.add(Role.UNIFIED)
    assert await rig.run() == [5, 6, 7]
    leader.session.close(PeerLost("the cable"))
    await rig.until(lambda: not rig.fleet.can_serve)
    await rig.until(lambda: rig.fleet.can_serve)
    assert await rig.run() == [5, 6, 7]


async def test_a_replica_that_leaves_the_list_is_forgotten_when_nothing_runs_on_it_any_more(rig: Rig) -> None:
    leader = await rig.add(Role.UNIFIED, "one")
    stream = rig.fleet.submit(rig.request(), budget_s=DEADLINE_S)
    await anext(stream)
    rig.registry.drop(leader.node.me.incarnation)
    await rig.until(lambda: not rig.fleet.can_serve)
    assert rig.fleet.sizes()["unlisted"] == 1, "its request goes on"
    submitted = leader.submits[0].request.request_id
    last = Output(request_id=submitted, position=1, token_ids=[9], finish=FinishReason.LENGTH)
    leader.session.send(Outputs([last]))
    assert [output.token_ids async for output in stream] == [[9]]
    assert rig.fleet.membership.replicas == {}
    assert rig.fleet.sizes() == {"streams": 0, "legs": 0, "tokens": 0, "unlisted": 0}


async def test_one_that_is_forgotten_is_neither_dialled_nor_talked_to_any_more(rig: Rig) -> None:
    leader = await rig.add(Role.UNIFIED)
    ended = asyncio.Event()
    leader.closed = lambda *_: ended.set()  # type: ignore[method-assign]
    dialer = rig.fleet.membership._dialers[leader.node.me]
    rig.registry.drop(leader.node.me.incarnation)
    await rig.until(lambda: not rig.fleet.membership.replicas)
    await asyncio.wait_for(ended.wait(), DEADLINE_S)
    assert dialer._task is not None
    await asyncio.wait_for(asyncio.gather(dialer._task, return_exceptions=True), DEADLINE_S)


async def test_the_late_end_of_an_older_session_ends_nothing_of_the_newer_one(rig: Rig) -> None:
    leader = await rig.add(Role.UNIFIED, "one")
    stream = rig.fleet.submit(rig.request(), budget_s=DEADLINE_S)
    await anext(stream)
    replica = rig.fleet.membership.replicas[leader.node.me]
    older: Any = SimpleNamespace(peer=replica.session.peer)  # type: ignore[union-attr]
    rig.fleet.membership.closed(older, PeerLost("late"))
    assert replica.session is not None
    last = Output(request_id="r1", position=1, token_ids=[9], finish=FinishReason.LENGTH)
    leader.session.send(Outputs([last]))
    assert [output.token_ids async for output in stream] == [[9]]


async def test_a_session_has_the_time_of_a_connection_and_of_a_hand_shake(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[float] = []
    normal = SessionNode.connect

    async def connect(self: SessionNode, *args: Any, timeout_s: float, **options: Any) -> Any:
        given.append(timeout_s)
        return await normal(self, *args, timeout_s=timeout_s, **options)

    monkeypatch.setattr(SessionNode, "connect", connect)

    await rig.add(Role.UNIFIED)
    assert given == [rig.fleet.limits.connect_s + rig.fleet.limits.handshake_s]


async def test_another_rank_of_an_instance_that_is_listed_is_not_listed_by_that(rig: Rig) -> None:
    listed = await rig.add(Role.UNIFIED)
    for leader, fine in ((listed.node.me, True), (LeaderId(listed.node.me.incarnation, 1), False)):
        peer: Any = SimpleNamespace(leader=leader, role=Role.UNIFIED)
        if fine:
            rig.fleet.membership.accept(peer)
        else:
            with pytest.raises(PeerRefused):
                rig.fleet.membership.accept(peer)


async def test_a_leader_that_the_registry_does_not_list_is_refused(rig: Rig) -> None:
    listed, stranger = await rig.add(Role.UNIFIED), Leader(Role.UNIFIED)
    rig.leaders.append(stranger)
    host, port = await stranger.node.listen("127.0.0.1", 0)
    with pytest.raises(Exception, match="not in the registry's list"):
        await rig.fleet.membership._node.connect(host, port, expect=stranger.node.me, timeout_s=DEADLINE_S)
    assert list(rig.fleet.membership.replicas) == [listed.node.me]


async def test_closing_ends_the_watch_and_every_dialler() -> None:
    rig = Rig()
    rig.fleet.start()
    leader = await rig.add(Role.UNIFIED)
    await leader.node.close()
    await rig.fleet.close()
    membership = rig.fleet.membership
    assert membership._watch is not None
    assert membership._watch.done()
    tasks = [dialer._task for dialer in membership._dialers.values()]
    assert tasks
    await asyncio.gather(*(task for task in tasks if task is not None), return_exceptions=True)
