"""The resources of one call: while it runs, in its outputs, and after its end."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from fleet_rig import DEADLINE_S, LIMITS, Rig, a_rig, no_collector
from msgspec import structs
from test_fleet_attempts import LEFT, begun, heard, said

from jumps import Jumps
from segue.engine.request import FinishReason, Output, RankHints, Wait
from segue.kv.errors import (
    AbortedByClient,
    DeadlineExceeded,
    DpRankOutOfRange,
    Draining,
    Internal,
    OutOfCapacity,
    PeerLost,
)
from segue.kv.ids import Role
from segue.kv.session.wire import Wire
from segue.server.fleet.call import Signal
from segue.server.messages.control import Outputs
from segue.server.messages.records import MAX_FOUND


def tokens(rig: Rig) -> dict[str, int]:
    """The counted tokens on each replica, by its role."""
    return {r.role.value: r.tokens for r in rig.fleet.membership.replicas.values()}


async def test_a_replica_is_counted_what_a_request_may_need_there_at_most_until_it_leaves_it(
    rig: Rig,
) -> None:
    p, d = await rig.add(Role.PREFILL, "hang"), await rig.add(Role.DECODE, "hang")
    stream, task = await begun(rig, p, d, request=rig.request(max_tokens=7, prompt=[1, 2, 3, 4]))
    assert tokens(rig) == {"prefill": 11, "decode": 11}
    said(d, d.submits[0])  # an output without tokens
    assert (await task).token_ids == []
    assert tokens(rig) == {"prefill": 11, "decode": 11}, "prefill has still work to do"
    said(d, d.submits[0], token_ids=[5])
    assert (await anext(stream)).token_ids == [5]
    assert tokens(rig) == {"prefill": 0, "decode": 11}
    said(d, d.submits[0], position=1, finish=FinishReason.STOP)
    assert (await anext(stream)).finish is FinishReason.STOP
    assert tokens(rig) == {"prefill": 0, "decode": 0}


async def test_an_answer_that_ends_without_a_token_leaves_both_halves(rig: Rig) -> None:
    p, d = await rig.add(Role.PREFILL, "hang"), await rig.add(Role.DECODE, "hang")
    _, task = await begun(rig, p, d)
    said(d, d.submits[0], finish=FinishReason.STOP)
    assert (await task).finish is FinishReason.STOP
    assert tokens(rig) == {"prefill": 0, "decode": 0}


async def test_who_stops_waiting_for_a_signal_leaves_nothing_there() -> None:
    signal = Signal()
    waits = [asyncio.ensure_future(signal.wait()) for _ in range(2)]
    await asyncio.sleep(0)
    waits[0].cancel()
    await asyncio.gather(waits[0], return_exceptions=True)
    assert len(signal._waiters) == 1
    signal.notify()
    await waits[1]
    assert not signal._waiters


async def test_the_end_of_a_request_and_the_failure_of_an_attempt_are_news(rig: Rig) -> None:
    """By them `/ready` changes, and the canary begins again."""

    u = await rig.add(Role.UNIFIED)
    for behave, proven in (("serve", True), ("fail:INTERNAL", False)):
        u.behave = behave
        news = asyncio.ensure_future(rig.fleet.changed())
        await asyncio.sleep(0)
        await asyncio.gather(rig.run(), return_exceptions=True)
        await asyncio.sleep(0)
        assert (news.done(), rig.fleet.proven) == (True, proven)


async def test_who_is_refused_is_told_how_long_requests_take_here(rig: Rig) -> None:
    jumps = Jumps()
    u = await rig.add(Role.UNIFIED, "hang")
    _, task = await begun(rig, u)
    jumps.over(7)
    said(u, u.submits[0], token_ids=[5], finish=FinishReason.LENGTH)
    await task
    u.behave = "fail:OUT_OF_CAPACITY"
    with pytest.raises(OutOfCapacity) as at_worker:
        await rig.run()
    rig.fleet.limits = structs.replace(LIMITS, max_queue=1)
    request = rig.request()
    rig.fleet.submit(request, budget_s=DEADLINE_S)
    with pytest.raises(OutOfCapacity) as at_door:
        rig.fleet.submit(rig.request(), budget_s=DEADLINE_S)
    rig.fleet.cancel(request.request_id, LEFT)
    assert 7 <= at_worker.value.retry_after_s < at_door.value.retry_after_s <= 60


@pytest.mark.parametrize("how", ["served", "failed"])
async def test_a_call_whose_reader_was_behind_leaves_nothing_to_the_garbage_collector(how: str) -> None:
    async with a_rig(backlog_outputs=0, backlog_wait_s=DEADLINE_S) as rig, no_collector():
        u = await rig.add(Role.UNIFIED, "hang")
        request = rig.request()
        stream, task = await begun(rig, u, request=request)
        said(u, u.submits[0], token_ids=[5])
        said(u, u.submits[0], position=1, token_ids=[6])
        await task
        await heard(rig, u)
        if how == "served":
            said(u, u.submits[0], position=2, token_ids=[7], finish=FinishReason.LENGTH)
            assert [output.position async for output in stream] == [1, 2]
        else:
            rig.fleet.cancel(request.request_id, LEFT)
        seen = weakref.ref(stream)
        del stream, task
        await asyncio.sleep(0)
        assert seen() is None


async def test_a_reader_that_has_caught_up_once_is_cut_when_it_falls_behind_again() -> None:
    async with a_rig(backlog_outputs=1, backlog_wait_s=5) as rig:
        jumps = Jumps()
        u = await rig.add(Role.UNIFIED, "hang")
        stream, task = await begun(rig, u)
        said(u, u.submits[0], token_ids=[5])
        await task
        for position in (1, 3):
            for more in range(2):
                said(u, u.submits[0], position=position + more, token_ids=[6])
            await heard(rig, u)
            u.session.send(structs.replace(rig.fleet.membership.replicas[u.node.me].load, draining=False))
            await rig.until(lambda: rig.fleet.can_serve)
            if position == 1:
                assert [(await anext(stream)).position for _ in range(2)] == [1, 2]
            jumps.over(5)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        with pytest.raises(AbortedByClient, match="too slowly"):
            await anext(stream)


class Broken(Exception):
    """The exception of a reader."""


async def test_what_comes_at_once_is_given_one_after_the_other_and_never_beside_a_wait_or_after_an_error(
    rig: Rig,
) -> None:
    """Two outputs may come in one message: the second waits for what the first made the reader wait for."""
    taken: list[int] = []
    go = asyncio.Event()

    async def drained() -> None:
        await go.wait()
        assert taken == [0], "nothing is given to one who waits"

    def slow(output: Output) -> Wait | None:
        taken.append(output.position)
        return drained if output.position == 0 else None

    def broken(output: Output) -> Wait | None:
        taken.append(output.position)
        raise Broken

    async def deliver(rig: Rig, number: int, take: Callable[[Output], Wait | None]) -> Any:
        u = rig.leaders[0]
        request = rig.request()
        task = asyncio.ensure_future(rig.fleet.submit(request, budget_s=DEADLINE_S).deliver(take))
        await u.until(lambda: len(u.submits) > number)
        made = [Output(request_id=request.request_id, position=i, token_ids=[i]) for i in range(2)]
        made[1] = structs.replace(made[1], finish=FinishReason.LENGTH)
        u.session.send(Outputs(made))
        return task

    await rig.add(Role.UNIFIED, "hang")
    task = await deliver(rig, 0, slow)
    await rig.until(lambda: not rig.fleet.in_flight)
    assert taken == [0]
    go.set()
    await task
    assert taken == [0, 1]
    taken.clear()
    task = await deliver(rig, 1, broken)
    with pytest.raises(Broken):
        await task
    assert taken == [0]


async def test_what_is_told_of_a_request_is_bounded_and_has_its_trace_and_its_end(rig: Rig) -> None:
    u = await rig.add(Role.UNIFIED)
    await rig.run(structs.replace(rig.request(), request_id="t", traceparent="00-a-b-01"))
    [told] = rig.fleet.explain("t")
    assert (told.traceparent, told.ended, told.error) == ("00-a-b-01", True, None)
    assert told.facts == {"prompt_tokens": 3, "output_tokens": 3, "attempts": 1}
    u.behave = "hang"
    rig.fleet.limits = structs.replace(LIMITS, max_queue=2 * MAX_FOUND)
    many = [structs.replace(rig.request(), request_id=f"many-{i}") for i in range(MAX_FOUND + 2)]
    for request in many:
        rig.fleet.submit(request, budget_s=DEADLINE_S)
    assert len(rig.fleet.explain("many")) == MAX_FOUND
    for request in many:
        rig.fleet.cancel(request.request_id, LEFT)


async def test_a_deadline_names_the_room_if_there_was_one() -> None:
    async with a_rig(no_replica_wait_s=2 * DEADLINE_S) as rig:
        jumps = Jumps()
        nowhere = asyncio.ensure_future(rig.run())
        await asyncio.sleep(0)
        jumps.over(DEADLINE_S)
        with pytest.raises(DeadlineExceeded) as before:
            await nowhere
        u = await rig.add(Role.UNIFIED, "hang")
        _, task = await begun(rig, u)
        jumps.over(DEADLINE_S)
        with pytest.raises(DeadlineExceeded) as after:
            await task
        assert (before.value.info.room, after.value.info.room) == (0, u.submits[0].ticket.room)
        assert f"unified {u.node.me}" in after.value.info.text


async def test_what_another_attempt_gets_is_what_is_left_of_the_request_s_time(rig: Rig) -> None:
    jumps = Jumps()
    decodes = [await rig.add(Role.UNIFIED, "hang") for _ in range(2)]
    _, task = await begun(rig)
    waits = [asyncio.ensure_future(d.until(lambda at=d: bool(at.submits))) for d in decodes]  # type: ignore[misc]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    jumps.over(DEADLINE_S / 2)
    first, second = sorted(decodes, key=lambda d: not d.submits)
    said(first, first.submits[0], error=Draining("it leaves").info)
    await asyncio.gather(*waits)
    assert first.submits[0].ticket.budget_s > DEADLINE_S / 2 >= second.submits[0].ticket.budget_s
    said(second, second.submits[0], error=Internal("a bug").info)
    with pytest.raises(Internal):
        await task


async def test_a_rank_that_nobody_has_is_refused_before_anything_is_begun(rig: Rig) -> None:
    await rig.add(Role.UNIFIED)
    asked = structs.replace(rig.request(), ranks=RankHints(routed_dp_rank=7))
    with pytest.raises(DpRankOutOfRange):
        rig.fleet.submit(asked, budget_s=DEADLINE_S)
    assert rig.fleet.in_flight == 0


async def test_the_only_pair_is_asked_again_after_a_moment_and_not_after_all_that_one_may_wait() -> None:
    async with a_rig(no_replica_wait_s=10 * DEADLINE_S, reported_loss_wait_s=0.01) as rig:
        p, d = await rig.add(Role.PREFILL, "hang"), await rig.add(Role.DECODE, "hang")
        _, task = await begun(rig, p, d)
        gone = PeerLost("the link broke").at(origin=f"decode {d.node.me}", peer=f"prefill {p.node.me}")
        d.behave = "serve"
        said(d, d.submits[0], error=gone.info)
        assert (await task).token_ids == [5]
        await rig.until(lambda: not rig.fleet.in_flight)


async def test_a_frontend_that_drains_waits_for_somebody_to_go_on_with_what_it_has_begun() -> None:
    async with a_rig(replacement_wait_s=DEADLINE_S) as rig:
        first = await rig.add(Role.UNIFIED, "one")
        stream = rig.fleet.submit(rig.request(), budget_s=DEADLINE_S)
        await anext(stream)
        rig.fleet.drain()
        rig.registry.drop(first.node.me.incarnation)
        first.session.close(PeerLost("gone"))
        await rig.until(lambda: not rig.fleet.membership.replicas)
        rest = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        second = await rig.add(Role.UNIFIED, "hang")
        await second.until(lambda: bool(second.submits))
        said(second, second.submits[0], position=1, token_ids=[6], finish=FinishReason.LENGTH)
        assert (await rest).token_ids == [6]


async def test_what_requests_of_one_turn_send_to_a_leader_is_one_write(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.add(Role.UNIFIED)
    [connection] = rig.fleet.membership._node._connections
    flushes, flush = [], Wire.flush

    def counted(wire: Wire) -> None:
        if wire is connection.wire and wire._out:
            flushes.append(wire)
        flush(wire)

    monkeypatch.setattr(Wire, "flush", counted)
    assert await asyncio.gather(*(rig.run() for _ in range(3))) == [[5, 6, 7]] * 3
    assert len(flushes) == 1, "a write of its own goes past it"
