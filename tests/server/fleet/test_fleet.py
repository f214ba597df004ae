"""`Fleet` against leaders that are real sessions and fake models."""

import asyncio
import contextlib
import weakref

import msgspec
import pytest
from fleet_records import load
from fleet_rig import DEADLINE_S, Leader, Rig, a_rig, no_collector

from jumps import Jumps
from segue.kv.errors import (
    AbortedByClient,
    BootstrapUnreachable,
    DeadlineExceeded,
    Draining,
    ErrorCode,
    ErrorInfo,
    Internal,
    OutOfCapacity,
    PeerLost,
    SegueError,
    Starting,
    TransferFailed,
)
from segue.kv.ids import Role
from segue.server.balance.attempts import Next
from segue.server.fleet import router
from segue.server.frontend.frontend_process import keep_proving
from segue.server.messages.control import Replace


async def test_both_halves_get_the_same_signed_ticket_and_decode_is_streamed(rig: Rig) -> None:
    p, d = await rig.add(Role.PREFILL), await rig.add(Role.DECODE)
    assert rig.fleet.can_serve
    assert not rig.fleet.proven
    loop = asyncio.get_running_loop()
    began = loop.time()
    assert await rig.run() == [5, 6, 7]
    took_s = loop.time() - began
    assert rig.fleet.proven
    await p.until(lambda: len(p.submits) == 1)
    assert p.submits == d.submits
    ticket, where = d.submits[0].ticket, p.record.replicas[0]
    assert d.submits[0].prefill_at == (where.host, where.port)
    assert (ticket.prefill, ticket.decode) == (
        p.node.me,
        d.node.me,
    )
    assert DEADLINE_S - took_s <= ticket.budget_s <= DEADLINE_S
    assert p.cancels == d.cancels == []
    assert rig.fleet.context_tokens == 100


async def test_a_request_that_has_ended_leaves_nothing_to_the_garbage_collector(rig: Rig) -> None:
    await rig.add(Role.PREFILL)
    await rig.add(Role.DECODE)
    async with no_collector():
        stream = rig.fleet.submit(rig.request(), budget_s=DEADLINE_S)
        assert [output.position async for output in stream] == [0, 1, 2]
        seen = weakref.ref(stream)
        del stream
        assert seen() is None


async def test_a_unified_replica_serves_alone(rig: Rig) -> None:
    u = await rig.add(Role.UNIFIED)
    assert await rig.run() == [5, 6, 7]
    assert u.submits[0].ticket.prefill == u.submits[0].ticket.decode
    assert len(u.submits) == 1


async def test_nobody_to_serve_is_a_clear_503(rig: Rig) -> None:
    await rig.add(Role.PREFILL)
    assert not rig.fleet.can_serve
    with pytest.raises(Starting, match=r"is starting.*1 prefill, 0 decode.*waiting for decode to"):
        await rig.run()


async def test_who_was_there_and_left_is_not_awaited_as_at_the_start(rig: Rig) -> None:
    with pytest.raises(Starting, match="waiting for prefill and decode"):
        await rig.run()
    await rig.add(Role.PREFILL)
    d = await rig.add(Role.DECODE)
    assert await rig.run() == [5, 6, 7]
    await d.node.close()
    while rig.fleet.can_serve:
        await rig.fleet.changed()
    with pytest.raises(BootstrapUnreachable, match=r"nobody can serve: .*1 prefill, 0 decode.*1 that are"):
        await rig.run()
    rig.fleet.drain()
    assert rig.fleet.lacking().info.code is ErrorCode.DRAINING


async def test_before_the_first_token_a_failure_is_tried_on_another_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(router, "FIRST_COOL_S", router.LONGEST_COOL_S)  # for all that follows

    async with a_rig(policy="round_robin") as rig:
        p = await rig.add(Role.PREFILL)
        bad = await rig.add(Role.DECODE, "fail:TRANSFER_FAILED")
        good = await rig.add(Role.DECODE)
        for _ in range(4):
            assert await rig.run() == [5, 6, 7]
        await p.until(lambda: len(p.submits) + 1 == len(bad.submits) + len(good.submits))
        assert len(bad.submits) == 1, "it is avoided after its failure"
        retry = next(s for s in good.submits if s.ticket.attempt == 1)
        first = bad.submits[0]
        assert retry.request.request_id != first.request.request_id
        assert retry.ticket.room == first.ticket.room, "prefill's half goes on"
        assert p.replaces == [Replace(first.request.request_id, retry.ticket)]
        value = rig.metrics.registry.get_sample_value
        assert value("segue_retries_total", {"code": "TRANSFER_FAILED"}) == 1


async def test_the_retry_budget_is_for_the_whole_fleet() -> None:
    async with a_rig(retry_budget=2.0) as rig:
        await rig.add(Role.PREFILL)
        bad = [await rig.add(Role.DECODE, "fail:TRANSFER_FAILED") for _ in range(4)]
        for _ in range(3):
            with pytest.raises(TransferFailed):
                await rig.run()
        assert sum(len(b.submits) for b in bad) == 3 + 2


async def test_a_continuation_takes_from_the_budget_as_any_retry_does() -> None:
    async with a_rig(retry_budget=2.0) as rig:
        left = [rig.fleet.router.may_retry(ErrorCode.INTERNAL, Next.CONTINUE) for _ in range(3)]
        assert left == [True, True, False]


async def test_a_lost_session_fails_exactly_its_requests() -> None:
    async with a_rig(policy="round_robin", max_attempts=1) as rig:
        await rig.add(Role.PREFILL)
        d1, d2 = await rig.add(Role.DECODE, "one"), await rig.add(Role.DECODE, "one")
        streams = [rig.fleet.submit(rig.request(), budget_s=DEADLINE_S) for _ in range(4)]
        for stream in streams:
            await anext(stream)
        on_d1 = {s.request.request_id for s in d1.submits}
        assert len(on_d1) == len(d2.submits) == 2
        d1.session.close(PeerLost("gone"))
        await rig.until(lambda: rig.fleet.in_flight == 2)
        for i, stream in enumerate(streams, 1):
            if f"r{i}" in on_d1:
                with pytest.raises(PeerLost):
                    await anext(stream)
            else:
                rig.fleet.cancel(f"r{i}", ErrorInfo(code=ErrorCode.ABORTED_BY_CLIENT, text="enough"))


async def test_lesson_09_a_restarted_worker_serves_the_next_request(rig: Rig) -> None:
    await rig.add(Role.PREFILL)
    old = await rig.add(Role.DECODE)
    assert await rig.run() == [5, 6, 7]
    await old.node.close()
    await rig.until(lambda: not rig.fleet.can_serve)
    assert not rig.fleet.proven
    rig.registry.drop(old.node.me.incarnation)
    new = await rig.add(Role.DECODE)
    assert not rig.fleet.proven, "the new incarnation has proven nothing yet"
    assert await rig.run() == [5, 6, 7]
    assert len(new.submits) == 1
    assert rig.fleet.proven


async def test_a_request_waits_a_little_for_a_worker_to_come() -> None:
    async with a_rig(no_replica_wait_s=DEADLINE_S) as rig:
        await rig.add(Role.PREFILL)
        task = asyncio.create_task(rig.run())
        await asyncio.sleep(0)
        await rig.add(Role.DECODE)
        assert await task == [5, 6, 7]


async def test_a_request_whose_client_left_while_it_waited_for_a_worker_is_given_to_nobody() -> None:
    async with a_rig(no_replica_wait_s=DEADLINE_S) as rig:
        await rig.add(Role.PREFILL)
        left = rig.request()
        reading = asyncio.ensure_future(anext(rig.fleet.submit(left, budget_s=DEADLINE_S)))
        await asyncio.sleep(0)  # it waits now
        rig.fleet.cancel(left.request_id, ErrorInfo(code=ErrorCode.ABORTED_BY_CLIENT, text="left"))
        d = await rig.add(Role.DECODE)
        assert await rig.run() == [5, 6, 7]
        assert left.request_id not in [submit.request.request_id for submit in d.submits]
        with contextlib.suppress(StopAsyncIteration, SegueError):
            await reading


async def test_draining_workers_are_not_chosen() -> None:
    async with a_rig(policy="round_robin") as rig:
        await rig.add(Role.PREFILL)
        leaving, staying = await rig.add(Role.DECODE), await rig.add(Role.DECODE)
        leaving.session.send(load(draining=True))
        await rig.until(lambda: len(rig.fleet.router.usable(Role.DECODE)) == 1)
        for _ in range(3):
            await rig.run()
        assert (len(leaving.submits), len(staying.submits)) == (0, 3)


async def test_a_full_fleet_and_a_full_worker_are_429(rig: Rig) -> None:
    await rig.add(Role.PREFILL)
    d = await rig.add(Role.DECODE, "fail:OUT_OF_CAPACITY")
    # Requests take 30 s here: that is when a place is free for the first who is refused.
    rig.fleet._parts.vacancies.served(30.0)
    with pytest.raises(OutOfCapacity) as refused:
        await rig.run()
    assert refused.value.retry_after_s == 30
    assert len(d.submits) == 1, "the only worker said it is full; asking again at once helps nobody"
    requests = [rig.request() for _ in range(9)]
    for request in requests[:8]:
        rig.fleet.submit(request, budget_s=DEADLINE_S)
    with pytest.raises(OutOfCapacity, match="8 requests"):
        rig.fleet.submit(requests[8], budget_s=DEADLINE_S)
    for request in requests:
        rig.fleet.cancel(request.request_id, ErrorInfo(code=ErrorCode.ABORTED_BY_CLIENT, text="x"))


async def test_a_request_of_which_the_caller_has_enough_is_a_success_everywhere(rig: Rig) -> None:
    p, d = await rig.add(Role.PREFILL), await rig.add(Role.DECODE, "one")
    request = rig.request()
    stream = rig.fleet.submit(request, budget_s=DEADLINE_S)
    await anext(stream)
    assert not rig.fleet.proven
    rig.fleet.complete(request.request_id)
    rig.fleet.complete(request.request_id)  # an ended id is ignored
    await d.until(lambda: bool(d.cancels))
    await p.until(lambda: bool(p.cancels))
    assert [(c.request_id, c.complete) for c in d.cancels] == [(d.submits[0].request.request_id, True)]
    assert p.cancels[0].complete
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    [record] = rig.fleet.records.find(request.request_id)
    assert (record.error, record.ended) == (None, True)
    assert rig.fleet.proven, "decode gave a token: the pair works"
    assert rig.fleet.in_flight == 0
    waiting = rig.request()
    rig.fleet.submit(waiting, budget_s=DEADLINE_S)
    rig.fleet.complete(waiting.request_id)  # before it is placed
    assert rig.fleet.in_flight == 0


async def test_a_client_that_leaves_ends_both_halves(rig: Rig) -> None:
    p, d = await rig.add(Role.PREFILL), await rig.add(Role.DECODE, "one")
    request = rig.request()
    stream = rig.fleet.submit(request, budget_s=DEADLINE_S)
    await anext(stream)
    rig.fleet.cancel(request.request_id, ErrorInfo(code=ErrorCode.ABORTED_BY_CLIENT, text="left"))
    await p.until(lambda: bool(p.cancels))
    await d.until(lambda: bool(d.cancels))
    assert d.cancels[0].reason.code is ErrorCode.ABORTED_BY_CLIENT


async def test_a_reader_that_falls_behind_is_ended_and_not_kept_in_memory() -> None:
    async with a_rig(backlog_outputs=10, backlog_wait_s=0.05) as rig:
        await rig.add(Role.PREFILL)
        d = await rig.add(Role.DECODE, "flood")
        stream = rig.fleet.submit(rig.request(max_tokens=50), budget_s=DEADLINE_S)
        # It asks for the first output and then never again, while fifty arrive.
        await anext(stream)
        await d.until(lambda: bool(d.cancels))
        with pytest.raises(AbortedByClient, match="too slowly"):
            await anext(stream)


async def test_a_burst_that_comes_before_the_reader_has_a_turn_is_not_the_readers_fault() -> None:
    """As after a pause of the frontend: what decode sent meanwhile is read at once."""

    async with a_rig(backlog_outputs=10, backlog_wait_s=0.05) as rig:
        await rig.add(Role.PREFILL)
        d = await rig.add(Role.DECODE, "flood")
        request = rig.request(max_tokens=50)
        stream = rig.fleet.submit(request, budget_s=DEADLINE_S)
        for _ in range(45):
            await anext(stream)
        await asyncio.sleep(0.1)  # the limit's wait is over, and it has caught up
        await anext(stream)
        assert not d.cancels
        rig.fleet.cancel(request.request_id, ErrorInfo(code=ErrorCode.ABORTED_BY_CLIENT, text="left"))
        await d.until(lambda: bool(d.cancels))


async def test_draining_takes_nothing_new(rig: Rig) -> None:
    await rig.add(Role.UNIFIED)
    rig.fleet.drain()
    assert not rig.fleet.can_serve
    with pytest.raises(Draining):
        rig.fleet.submit(rig.request(), budget_s=DEADLINE_S)


async def test_another_model_is_left_alone(rig: Rig) -> None:
    leader = Leader(Role.UNIFIED)
    rig.leaders.append(leader)
    record = await leader.start()
    rig.registry.put(msgspec.structs.replace(record, served_model="other"))
    await rig.fleet.changed()
    assert list(rig.fleet.membership.replicas.values()) == []


async def test_lesson_09_ready_comes_from_a_canary_and_goes_with_the_workers(rig: Rig) -> None:
    canary = asyncio.create_task(keep_proving(rig.fleet, [1, 2]))
    await rig.add(Role.PREFILL)
    bad = await rig.add(Role.DECODE, "fail:INTERNAL")
    await bad.until(lambda: bool(bad.submits))
    assert not rig.fleet.proven
    bad.behave = "serve"
    await rig.until(lambda: rig.fleet.proven)
    await bad.node.close()
    await rig.until(lambda: not rig.fleet.proven)
    canary.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await canary


async def test_a_request_id_in_use_is_a_bug_of_whoever_gives_it_twice(rig: Rig) -> None:
    request = rig.request()
    rig.fleet.submit(request, budget_s=DEADLINE_S)
    with pytest.raises(Internal, match="in use"):
        rig.fleet.submit(request, budget_s=DEADLINE_S)
    rig.fleet.cancel(request.request_id, ErrorInfo(code=ErrorCode.ABORTED_BY_CLIENT, text="enough"))
    rig.fleet.submit(request, budget_s=DEADLINE_S)
    rig.fleet.cancel(request.request_id, ErrorInfo(code=ErrorCode.ABORTED_BY_CLIENT, text="enough"))


async def test_a_deadline_says_in_which_phase_it_passed(rig: Rig) -> None:
    jumps = Jumps()
    p, d = await rig.add(Role.PREFILL, "hang"), await rig.add(Role.DECODE, "hang")
    running = asyncio.ensure_future(rig.run())
    for leader in (p, d):
        await leader.until(lambda at=leader: bool(at.submits))  # type: ignore[misc]
    jumps.over(DEADLINE_S)
    with pytest.raises(DeadlineExceeded) as before:
        await running
    for leader in (p, d):
        await leader.until(lambda at=leader: bool(at.cancels))  # type: ignore[misc]
    d.behave = "one"
    stream = rig.fleet.submit(rig.request(), budget_s=DEADLINE_S)
    await anext(stream)
    jumps.over(DEADLINE_S)
    with pytest.raises(DeadlineExceeded) as after:
        await anext(stream)
    assert (before.value.info.phase, after.value.info.phase) == ("first token", "stream")


async def test_sessions_and_loads_of_replicas_are_counted_and_forgotten(rig: Rig) -> None:
    value = rig.metrics.registry.get_sample_value
    leader = await rig.add(Role.UNIFIED)
    assert await rig.run() == [5, 6, 7]
    labels = {"role": "unified", "replica": f"unified {leader.node.me}"}
    assert value("segue_replicas", {"role": "unified"}) == 1
    assert value("segue_pages", labels | {"state": "free"}) == 9
    rig.registry.drop(leader.node.me.incarnation)
    await rig.until(lambda: not rig.fleet.membership.replicas)
    assert value("segue_pages", labels | {"state": "free"}) is None
    assert value("segue_replicas", {"role": "unified"}) == 0
