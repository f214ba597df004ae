"""Sessions of an instance with two leaders: one incarnation, two data-parallel ranks, two listeners."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from session_peers import DEADLINE_S, Events, Note, closing, leader, node

from loops import in_loop
from segue.kv.errors import PeerLost, PeerRefused
from segue.kv.ids import Role
from segue.kv.session.node import SessionNode

Met = tuple[SessionNode, Events, list[SessionNode], list[Events], list[tuple[str, int]]]


@asynccontextmanager
async def met() -> AsyncIterator[Met]:
    """One node, and two leaders of the incarnation `a` that listen: each with what it hears, and where."""
    here, theirs = Events(), [Events(), Events()]
    one = node("b", here, role=Role.FRONTEND)
    two = [node("a", theirs[rank], me=leader("a", rank)) for rank in (0, 1)]
    async with closing(one, *two):
        yield one, here, two, theirs, [await each.listen("127.0.0.1", 0) for each in two]


@in_loop
async def test_each_has_a_session_of_its_own_and_the_end_of_one_is_not_the_others() -> None:
    async with met() as (one, here, _two, theirs, at):
        first, second = [
            await one.connect(*at[rank], expect=leader("a", rank), timeout_s=DEADLINE_S) for rank in (0, 1)
        ]
        assert first is not second
        assert one.sessions == {leader("a", 0): first, leader("a", 1): second}
        first.send(Note(0))
        second.send(Note(1))
        assert [await events.wait("received") for events in theirs] == [[Note(0)], [Note(1)]]
        assert await one.connect(*at[1], expect=leader("a", 1), timeout_s=DEADLINE_S) is second
        first.close(PeerLost("enough"))
        await theirs[0].wait("closed")
        await here.wait("closed")
        assert one.sessions == {leader("a", 1): second}
        second.send(Note(2))
        assert await theirs[1].wait("received", 2) == [Note(1), Note(2)]
        assert not theirs[1].of("closed")


@in_loop
async def test_one_at_the_other_s_address_is_refused_as_a_mistake_and_neither_is_taken_for_restarted() -> (
    None
):
    async with met() as (one, here, _two, theirs, at):
        first = await one.connect(*at[0], expect=leader("a", 0), timeout_s=DEADLINE_S)
        with pytest.raises(PeerRefused, match="an instance has registered the wrong ports"):
            await one.connect(*at[0], expect=leader("a", 1), timeout_s=DEADLINE_S)
        first.send(Note(1))
        assert await theirs[0].wait("received") == [Note(1)]
        assert not here.of("closed")
        # What refused rank 1 there keeps it from nothing at its own address.
        second = await one.connect(*at[1], expect=leader("a", 1), timeout_s=DEADLINE_S)
        assert set(one.sessions.values()) == {first, second}


@in_loop
async def test_two_leaders_of_one_incarnation_that_dial_each_other_agree_on_one_session() -> None:
    async with met() as (_one, _here, two, theirs, at):
        first, second = await asyncio.gather(
            two[0].connect(*at[1], expect=leader("a", 1), timeout_s=DEADLINE_S),
            two[1].connect(*at[0], expect=leader("a", 0), timeout_s=DEADLINE_S),
        )
        first.send(Note(1))
        second.send(Note(2))
        assert await theirs[1].wait("received") == [Note(1)]
        assert await theirs[0].wait("received") == [Note(2)]
        assert [len(events.of("opened")) for events in theirs] == [1, 1]


@in_loop
async def test_a_leader_does_not_connect_to_itself() -> None:
    async with met() as (_one, _here, two, _theirs, at):
        with pytest.raises(PeerRefused, match="this very leader"):
            await two[1].connect(*at[1], timeout_s=DEADLINE_S)


@in_loop
async def test_another_leader_at_a_leader_s_address_is_its_successor_there() -> None:
    async with met() as (one, here, two, _theirs, at):
        await one.connect(*at[0], expect=leader("a", 0), timeout_s=DEADLINE_S)
        await two[0]._listener.close()  # its port is another's from now on; nobody is told
        assert two[0]._socket is not None
        two[0]._socket.close()
        third = node("a", Events(), me=leader("a", 2))
        async with closing(third):
            await third.listen(*at[0])
            await one.connect(*at[0], expect=leader("a", 2), timeout_s=DEADLINE_S)
            [error] = await here.wait("closed")
            assert "was restarted" in str(error)
            assert set(one.sessions) == {leader("a", 2)}
