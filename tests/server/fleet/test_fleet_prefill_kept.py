"""Decode fails before its first token: prefill's half goes on, and only decode's is placed again."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fleet_rig import DEADLINE_S, LIMITS, Leader, Rig, a_rig

from segue.engine.request import Output
from segue.kv.errors import (
    AbortedByClient,
    ChecksumMismatch,
    Draining,
    ErrorCode,
    OutOfCapacity,
    PeerLost,
    SegueError,
    TransferFailed,
)
from segue.kv.ids import Role
from segue.server.messages.control import Outputs, Replace

LOST = TransferFailed("the write did not land")


def says(leader: Leader, error: SegueError, nth: int = -1) -> None:
    """The half there fails."""
    request_id = leader.submits[nth].request.request_id
    leader.session.send(Outputs([Output(request_id=request_id, error=error.info)]))


async def asked(rig: Rig, *decodes: Leader) -> tuple[asyncio.Task[Any], Leader]:
    """A request that runs, and the decode that has it."""
    task = asyncio.ensure_future(rig.run())
    waits = [asyncio.ensure_future(d.until(lambda d=d: bool(d.submits))) for d in decodes]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    return task, next(d for d in decodes if d.submits)


async def left(rig: Rig, task: asyncio.Task[Any], p: Leader) -> None:
    """The client leaves: prefill's half ends, too."""
    rig.fleet.cancel(p.submits[0].request.request_id.partition("~")[0], AbortedByClient("left").info)
    with pytest.raises(AbortedByClient):
        await task
    last = p.submits[-1].request.request_id
    await p.until(lambda: any(c.request_id == last for c in p.cancels))


@pytest.mark.parametrize("times", [1, 2])
async def test_the_next_decode_gets_a_request_and_prefill_only_the_ticket(rig: Rig, times: int) -> None:
    p = await rig.add(Role.PREFILL, "hang")
    decodes = [await rig.add(Role.DECODE, "hang") for _ in range(times + 1)]
    task, one = await asked(rig, *decodes)
    for attempt in range(1, times + 1):
        says(one, LOST)
        await p.until(lambda n=attempt: len(p.replaces) == n)
        ticket = p.replaces[-1].ticket
        one = next(d for d in decodes if d.node.me == ticket.decode)
        await one.until(lambda d=one: bool(d.submits))
        assert one.submits[-1].ticket == ticket
        assert ticket.attempt == attempt
    [first] = p.submits
    assert {(r.request_id, r.ticket.room) for r in p.replaces} == {
        (first.request.request_id, first.ticket.room)
    }
    assert len({r.ticket.decode for r in p.replaces} | {first.ticket.decode}) == times + 1
    assert not p.cancels
    await left(rig, task, p)


async def test_a_room_is_asked_for_no_more_bindings_than_it_outlives(rig: Rig) -> None:
    p = await rig.add(Role.PREFILL, "hang")
    for _ in range(4):
        await rig.add(Role.DECODE, "fail:TRANSFER_FAILED")
    with pytest.raises(TransferFailed):
        await rig.run()
    assert [s.ticket.attempt for s in p.submits] == [0, 3]
    assert [r.ticket.attempt for r in p.replaces] == [1, 2]
    assert LIMITS.max_bindings == 3


@pytest.mark.parametrize(
    ("error", "kept"),
    [
        (LOST, True),
        (OutOfCapacity("decode is full"), True),
        (Draining("decode leaves"), True),
        (ChecksumMismatch("other bytes have come"), False),
    ],
    ids=lambda value: value.code.value if isinstance(value, SegueError) else "",
)
async def test_prefill_s_half_goes_on_unless_what_it_computed_is_in_doubt(
    rig: Rig, error: SegueError, kept: bool
) -> None:
    p = await rig.add(Role.PREFILL, "hang")
    decodes = [await rig.add(Role.DECODE, "hang") for _ in range(2)]
    task, one = await asked(rig, *decodes)
    [two] = [d for d in decodes if d is not one]
    says(one, error)
    await two.until(lambda: bool(two.submits))
    if kept:
        await p.until(lambda: bool(p.replaces))
    else:
        await p.until(lambda: bool(p.cancels) and len(p.submits) == 2)
        assert p.cancels[0].reason.code is error.code, "prefill hears why"
    assert (two.submits[0].ticket.room == one.submits[0].ticket.room) == kept
    assert (len(p.submits), len(p.replaces), len(p.cancels)) == ((1, 1, 0) if kept else (2, 0, 1))
    await left(rig, task, p)


async def test_a_half_that_prefill_does_not_have_any_more_costs_no_attempt_and_blames_nobody() -> None:
    async with a_rig(max_attempts=2) as rig:
        p = await rig.add(Role.PREFILL, "hang")
        decodes = [await rig.add(Role.DECODE, "hang") for _ in range(3)]
        task, one = await asked(rig, *decodes)
        says(one, LOST)
        await p.until(lambda: bool(p.replaces))
        says(p, OutOfCapacity("prefill does not have its half any more"))
        await p.until(lambda: len(p.submits) == 2)
        first, second = p.submits
        assert second.ticket.room != first.ticket.room
        assert second.ticket.attempt == 2
        last = next(d for d in decodes if any(s.ticket == second.ticket for s in d.submits))
        says(last, LOST)
        with pytest.raises(TransferFailed):
            await task
        assert len(p.submits) == 2, "two attempts that count, as many as are allowed"
        assert rig.fleet.router.cooling(p.node.me).failures == 0


async def test_decode_may_be_the_first_to_hear_that_prefill_does_not_have_its_half_any_more() -> None:
    """Prefill's leader computes while its rooms answer decode."""

    async with a_rig(max_attempts=2) as rig:
        p = await rig.add(Role.PREFILL, "hang")
        decodes = [await rig.add(Role.DECODE, "hang") for _ in range(2)]
        task, one = await asked(rig, *decodes)
        [two] = [d for d in decodes if d is not one]
        says(one, LOST)
        await two.until(lambda: bool(two.submits))
        one.behave = two.behave = "serve"
        name = f"prefill {p.node.me.incarnation[:8]} dp0"
        says(two, OutOfCapacity("other prompts need what this one holds", origin=name))
        assert await task == [5, 6, 7]
        first, second = p.submits
        assert second.ticket.room != first.ticket.room
        assert [c.request_id for c in p.cancels] == [first.request.request_id]
        assert len(p.replaces) == 1
        assert rig.fleet.router.cooling(p.node.me).failures == 0


async def test_a_half_that_fails_while_nobody_decodes_is_not_asked_again() -> None:
    async with a_rig(no_replica_wait_s=DEADLINE_S) as rig:
        p = await rig.add(Role.PREFILL, "hang")
        one = await rig.add(Role.DECODE, "hang")
        task, _ = await asked(rig, one)
        rig.registry.drop(one.node.me.incarnation)
        one.session.close(PeerLost("killed"))
        await rig.until(lambda: not rig.fleet.router.usable(Role.DECODE))
        ended = asyncio.Event()
        leave = rig.fleet.membership.leave
        rig.fleet.membership.leave = lambda *half: (leave(*half), ended.set())
        says(p, OutOfCapacity("other prompts need what it holds"))
        await ended.wait()
        assert not rig.fleet.sizes()["legs"]
        two = await rig.add(Role.DECODE)
        assert await task == [5, 6, 7]
        assert [s.ticket.room for s in p.submits[1:]] == [s.ticket.room for s in two.submits]
        assert not p.replaces


@pytest.mark.parametrize("end", ["left", "nobody comes", "elsewhere"])
async def test_a_half_that_nobody_wants_any_more_is_ended(end: str) -> None:
    async with a_rig(no_replica_wait_s=0.05 if end == "nobody comes" else DEADLINE_S) as rig:
        p = await rig.add(Role.PREFILL, "hang")
        one = await rig.add(Role.DECODE, "hang")
        task, _ = await asked(rig, one)
        rig.registry.drop(one.node.me.incarnation)
        one.session.close(PeerLost("killed"))
        await rig.until(lambda: not rig.fleet.router.usable(Role.DECODE))
        assert rig.fleet.sizes()["legs"] == 1 or end == "nobody comes"
        if end == "left":
            rig.fleet.cancel(p.submits[0].request.request_id, AbortedByClient("left").info)
            with pytest.raises(AbortedByClient):
                await task
        elif end == "elsewhere":
            await rig.add(Role.UNIFIED)
            assert await task == [5, 6, 7]
        else:
            with pytest.raises(SegueError) as failed:
                await task
            assert failed.value.code is ErrorCode.BOOTSTRAP_UNREACHABLE
        await p.until(lambda: bool(p.cancels))
        assert [c.request_id for c in p.cancels] == [p.submits[0].request.request_id]
        assert rig.fleet.sizes()["legs"] == 0


async def test_prefill_is_killed_while_its_half_goes_on(rig: Rig) -> None:
    p = await rig.add(Role.PREFILL, "hang")
    decodes = [await rig.add(Role.DECODE, "hang") for _ in range(2)]
    task, one = await asked(rig, *decodes)
    says(one, LOST)
    await p.until(lambda: bool(p.replaces))
    [two] = [d for d in decodes if d is not one]
    two.behave = one.behave = "serve"
    other = await rig.add(Role.PREFILL)
    p.session.close(PeerLost("killed"))
    assert await task == [5, 6, 7]
    assert other.submits[0].ticket.room != p.submits[0].ticket.room
    assert isinstance(p.replaces[0], Replace)
