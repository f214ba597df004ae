"""The messages of one attempt, and the messages of a replica that concern a request, an attempt, or
neither."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fleet_records import load
from fleet_rig import DEADLINE_S, Leader, Rig, a_rig
from msgspec import structs

from segue.engine.request import FinishReason, Output, RankHints
from segue.kv.errors import (
    AbortedByClient,
    BootstrapUnreachable,
    Draining,
    ErrorCode,
    ErrorInfo,
    Internal,
    PeerLost,
    TransferFailed,
)
from segue.kv.ids import OPEN_RANK, LeaderId, Role
from segue.server.messages.control import Explain, Outputs, Submit

LEFT = ErrorInfo(code=ErrorCode.ABORTED_BY_CLIENT, text="left")


def said(leader: Leader, submit: Submit, **output: Any) -> None:
    """`leader` answers a request."""
    leader.session.send(Outputs([Output(request_id=submit.request.request_id, **output)]))


async def seen(*leaders: Leader) -> None:
    """Each of them has a request."""
    for leader in leaders:
        await leader.until(lambda at=leader: bool(at.submits))


async def begun(rig: Rig, *leaders: Leader, request: Any = None) -> Any:
    """A stream whose request has come to `leaders`, and a task that waits for its first output."""
    stream = rig.fleet.submit(request or rig.request(), budget_s=DEADLINE_S)
    task = asyncio.ensure_future(anext(stream))
    await seen(*leaders)
    return stream, task


async def test_a_client_that_wants_the_registry_asked_gets_a_ticket_that_names_no_rank_of_prefill(
    rig: Rig,
) -> None:
    p, d = await rig.add(Role.PREFILL), await rig.add(Role.DECODE)
    hints = RankHints(force_query_prefill_dp_rank=True)
    await rig.run(structs.replace(rig.request(), ranks=hints))
    await p.until(lambda: bool(p.submits))
    assert p.submits == d.submits
    assert d.submits[0].ticket.prefill == LeaderId(p.node.me.incarnation, OPEN_RANK)
    assert d.submits[0].request.ranks == hints
    await rig.run()
    assert d.submits[1].ticket.prefill == p.node.me


async def test_on_a_unified_instance_there_is_no_rank_to_ask_for(rig: Rig) -> None:
    u = await rig.add(Role.UNIFIED)
    hints = RankHints(force_query_prefill_dp_rank=True)
    await rig.run(structs.replace(rig.request(), ranks=hints))
    assert u.submits[0].ticket.prefill == u.node.me


async def test_prefill_gives_no_tokens_and_one_that_does_ends_the_request(rig: Rig) -> None:
    p, d = await rig.add(Role.PREFILL, "hang"), await rig.add(Role.DECODE, "hang")
    _, task = await begun(rig, p, d)
    said(p, p.submits[0])  # an output without tokens is none
    said(p, p.submits[0], token_ids=[5])
    with pytest.raises(Internal, match="prefill sent tokens") as caught:
        await task
    assert caught.value.info.origin == f"prefill {p.node.me}"
    await d.until(lambda: bool(d.cancels))
    await p.until(lambda: bool(p.cancels))


@pytest.mark.parametrize("half", [Role.PREFILL, Role.DECODE])
async def test_the_half_that_says_why_it_has_ended_is_not_told_to_end(half: Role) -> None:
    async with a_rig(max_attempts=1) as rig:
        halves = {role: await rig.add(role, "hang") for role in (Role.PREFILL, Role.DECODE)}
        _, task = await begun(rig, *halves.values())
        error = ErrorInfo(code=ErrorCode.INTERNAL, text="a bug")
        said(halves[half], halves[half].submits[0], error=error)
        with pytest.raises(Internal) as caught:
            await task
        assert caught.value.info.origin == f"{half} {halves[half].node.me}", "who said it, where it says not"
        other = halves[Role.DECODE if half is Role.PREFILL else Role.PREFILL]
        await other.until(lambda: bool(other.cancels))
        # What is sent on one session comes in its order: a request that follows has passed a cancel.
        halves[half].behave = other.behave = "serve"
        await rig.run()
        for leader in (halves[half], other):
            await leader.until(lambda at=leader: len(at.submits) == 2)  # type: ignore[misc]
        assert halves[half].cancels == []
        assert len(other.cancels) == 1


async def test_an_answer_that_is_complete_ends_neither_half_by_a_word_and_late_ones_are_nobody_s(
    rig: Rig,
) -> None:
    p, d = await rig.add(Role.PREFILL, "hang"), await rig.add(Role.DECODE, "hang")
    stream, task = await begun(rig, p, d)
    submit = d.submits[0]
    said(d, submit, token_ids=[5])
    assert (await task).token_ids == [5]
    said(p, submit, error=ErrorInfo(code=ErrorCode.INTERNAL, text="after decode has begun"))
    said(d, submit, position=1, token_ids=[6], finish=FinishReason.LENGTH)
    said(d, submit, position=2, token_ids=[7])
    said(d, submit, error=ErrorInfo(code=ErrorCode.INTERNAL, text="after the end"))
    assert [out.token_ids async for out in stream] == [[6]]
    d.behave = "serve"
    assert await rig.run() == [5, 6, 7]
    await p.until(lambda: len(p.submits) == 2)
    assert p.cancels == d.cancels == []


async def test_what_the_attempt_before_says_late_is_no_word_of_the_one_that_runs(rig: Rig) -> None:
    await rig.add(Role.PREFILL, "hang")
    decodes = [await rig.add(Role.DECODE, "hang") for _ in range(2)]
    stream = rig.fleet.submit(rig.request(), budget_s=DEADLINE_S)
    task = asyncio.ensure_future(anext(stream))
    waits = [asyncio.ensure_future(d.until(lambda at=d: bool(at.submits))) for d in decodes]  # type: ignore[misc]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    first, second = sorted(decodes, key=lambda d: not d.submits)
    broke = ErrorInfo(code=ErrorCode.TRANSFER_FAILED, text="broke", retryable=True)
    said(first, first.submits[0], error=broke)
    await asyncio.gather(*waits)
    said(first, first.submits[0], token_ids=[99])
    said(first, first.submits[0], error=ErrorInfo(code=ErrorCode.INTERNAL, text="late"))
    await heard(rig, first)
    said(second, second.submits[0], token_ids=[5], finish=FinishReason.LENGTH)
    assert (await task).token_ids == [5]
    assert [out async for out in stream] == []


async def heard(rig: Rig, leader: Leader) -> None:
    """All that `leader` has said so far; it drains from now on."""
    leader.session.send(load(draining=True))
    replica = rig.fleet.membership.replicas[leader.node.me]
    await rig.until(lambda: replica.load is not None and replica.load.draining)


async def test_a_request_that_has_failed_gives_its_error_and_nothing_that_came_before_it(rig: Rig) -> None:
    await rig.add(Role.PREFILL, "hang")
    d = await rig.add(Role.DECODE, "hang")
    request = rig.request()
    stream, task = await begun(rig, d, request=request)
    for position in range(3):
        said(d, d.submits[0], position=position, token_ids=[5])
    assert (await task).position == 0
    await heard(rig, d)
    rig.fleet.cancel(request.request_id, LEFT)
    rig.fleet.cancel(request.request_id, structs.replace(LEFT, text="left again"))
    for _ in range(2):
        with pytest.raises(AbortedByClient, match=r"left$"):
            await anext(stream)


async def test_a_client_that_left_while_nobody_was_there_hears_that_it_left(rig: Rig) -> None:
    """Not that nobody came, which is found out later."""

    request = rig.request()
    task = asyncio.ensure_future(anext(rig.fleet.submit(request, budget_s=DEADLINE_S)))
    await asyncio.sleep(0)
    rig.fleet.cancel(request.request_id, LEFT)
    with pytest.raises(AbortedByClient):
        await task


async def test_what_fails_at_the_end_of_the_process_says_that_it_drains_and_workers_are_told() -> None:
    rig = Rig()
    rig.fleet.start()
    d = await rig.add(Role.DECODE, "hang")
    p = await rig.add(Role.PREFILL, "hang")
    _, task = await begun(rig, p, d)
    await rig.fleet.close()
    with pytest.raises(Draining):
        await task
    assert rig.fleet.in_flight == 0
    await d.until(lambda: bool(d.cancels))
    assert d.cancels[0].reason.code is ErrorCode.DRAINING
    for leader in rig.leaders:
        await leader.node.close()


async def test_a_request_that_waits_for_a_worker_hears_at_once_that_its_frontend_drains() -> None:
    async with a_rig(no_replica_wait_s=DEADLINE_S) as rig:
        task = asyncio.ensure_future(rig.run())
        await asyncio.sleep(0)
        rig.fleet.drain()
        with pytest.raises(Draining):
            await task


async def test_one_whose_client_has_tokens_waits_longer_for_a_worker_than_one_that_has_none() -> None:
    async with a_rig(no_replica_wait_s=0.02, replacement_wait_s=DEADLINE_S) as rig:
        await rig.add(Role.PREFILL, "hang")
        d = await rig.add(Role.DECODE, "one")
        stream = rig.fleet.submit(rig.request(), budget_s=DEADLINE_S)
        await anext(stream)
        rig.registry.drop(d.node.me.incarnation)
        await rig.until(lambda: not rig.fleet.can_serve)
        d.session.close(PeerLost("gone"))
        task = asyncio.ensure_future(anext(stream))
        with pytest.raises(BootstrapUnreachable, match="nobody can serve"):
            await rig.run()
        assert not task.done()
        other = await rig.add(Role.DECODE, "hang")
        await seen(other)
        assert other.submits[0].request.output == [5]
        said(other, other.submits[0], position=1, token_ids=[6], finish=FinishReason.LENGTH)
        assert (await task).token_ids == [6]
        assert [out async for out in stream] == []


async def test_what_is_told_of_a_request_names_its_attempts_and_why_each_ended() -> None:
    async with a_rig(max_attempts=2) as rig:
        await rig.add(Role.PREFILL, "hang")
        bad = await rig.add(Role.DECODE, "fail:TRANSFER_FAILED")
        request = rig.request()
        with pytest.raises(TransferFailed):
            await rig.run(request)
        bad.behave = "hang"
        going = structs.replace(request, request_id=f"{request.request_id}-1")
        _, task = await begun(rig, request=going)
        await bad.until(lambda: len(bad.submits) == 3)
        ended, live = rig.fleet.explain(request.request_id)
        assert (ended.ended, live.ended) == (True, False)
        assert ended.error is not None
        assert ended.error.code is ErrorCode.TRANSFER_FAILED
        assert ended.facts == {"prompt_tokens": 3, "output_tokens": 0, "attempts": 2}
        assert [step.name for step in ended.steps] == ["place", "attempt", "place", "attempt"]
        assert "TRANSFER_FAILED at decode" in ended.steps[2].text
        assert f"decode {bad.node.me}" in ended.steps[1].text
        assert (live.error, live.facts["attempts"]) == (None, 1)
        assert live.room == bad.submits[2].ticket.room
        assert rig.fleet.explain("another") == []
        rig.fleet.cancel(going.request_id, LEFT)
        with pytest.raises(AbortedByClient):
            await task


# ---- membership --------------------------------------------------------------------------------------


async def test_a_replica_that_the_registry_flags_gets_nothing_until_the_flag_is_gone(rig: Rig) -> None:
    leader = await rig.add(Role.UNIFIED)
    me = leader.node.me.incarnation
    record = rig.registry.records[me]
    where = structs.replace(record.replicas[0], draining=True)
    rig.registry.put(structs.replace(record, replicas=[where]))
    await rig.until(lambda: not rig.fleet.can_serve)
    session = rig.fleet.membership.replicas[leader.node.me].session
    rig.registry.put(record)
    await rig.until(lambda: rig.fleet.can_serve)
    assert rig.fleet.membership.replicas[leader.node.me].session is session, "what runs there goes on"
    leader.session.send(load(draining=True))
    await rig.until(lambda: not rig.fleet.can_serve)
    leader.session.send(load())
    await rig.until(lambda: rig.fleet.can_serve)


async def test_one_that_comes_back_to_the_list_while_it_is_still_needed_is_kept(rig: Rig) -> None:
    leader = await rig.add(Role.UNIFIED, "one")
    me = leader.node.me.incarnation
    record = rig.registry.records[me]
    stream = rig.fleet.submit(rig.request(), budget_s=DEADLINE_S)
    await anext(stream)
    rig.registry.drop(me)
    await rig.until(lambda: not rig.fleet.can_serve)
    rig.registry.put(record)
    await rig.until(lambda: rig.fleet.can_serve)
    said(leader, leader.submits[0], position=1, token_ids=[6], finish=FinishReason.LENGTH)
    assert [out.token_ids async for out in stream] == [[6]]
    assert leader.node.me in rig.fleet.membership.replicas
    leader.behave = "serve"
    assert await rig.run() == [5, 6, 7]


async def test_what_was_last_said_of_a_load_is_forgotten_with_the_session(rig: Rig) -> None:
    leader = await rig.add(Role.UNIFIED)
    replica = rig.fleet.membership.replicas[leader.node.me]
    leader.session.send(load(running=7))
    assert await rig.run() == [5, 6, 7]
    assert replica.load is not None
    assert replica.load.running == 7
    leader.session.close(PeerLost("the cable"))
    await rig.until(lambda: not rig.fleet.can_serve)
    assert replica.load is None
    assert replica.session is None


async def test_a_leader_that_asks_for_a_request_is_told_with_the_name_of_who_asks(rig: Rig) -> None:
    answers: list[Any] = []
    leader = await rig.add(Role.UNIFIED)
    request = rig.request()
    await rig.run(request)
    normal = leader.received

    def received(session: Any, message: object) -> None:
        answers.append(message)
        normal(session, message)

    leader.received = received  # type: ignore[method-assign]
    asker = LeaderId(leader.node.me.incarnation, 3)
    leader.session.send(Explain(request.request_id, None, asker))
    await leader.until(lambda: bool(answers))
    [answer] = answers
    assert answer.asker == asker
    assert [record.request_id for record in answer.records] == [request.request_id]


async def test_a_replica_lost_with_a_request_is_named_in_its_error() -> None:
    async with a_rig(max_attempts=1) as rig:
        leader = await rig.add(Role.UNIFIED, "one")
        stream = rig.fleet.submit(rig.request(), budget_s=DEADLINE_S)
        await anext(stream)
        leader.session.close(PeerLost("the cable"))
        with pytest.raises((PeerLost, BootstrapUnreachable)) as caught:
            await anext(stream)
        assert caught.value.info.peer == f"unified {leader.node.me}"
