"""Lesson 11: a pair is a transaction, and only a worker's own faults count against it."""

from __future__ import annotations

import asyncio

import pytest
from fleet_rig import DEADLINE_S, Leader, a_rig

from segue.kv.errors import ErrorCode, PeerLost, SegueError
from segue.kv.ids import Role
from segue.server.fleet.router import Cooling

#: What a client, a deadline, a drain or a wrong pair causes; written down here, not asked of the code.
NOBODYS_FAULT = {
    ErrorCode.ABORTED_BY_CLIENT,
    ErrorCode.DEADLINE_EXCEEDED,
    ErrorCode.DP_RANK_CONFLICT,
    ErrorCode.DP_RANK_OUT_OF_RANGE,
    ErrorCode.DRAINING,
    ErrorCode.INVALID_REQUEST,
    # Two healthy halves that cannot be joined.
    ErrorCode.LAYOUT_MISMATCH,
    ErrorCode.PEER_REFUSED,
    ErrorCode.NOT_FOUND,
    ErrorCode.OUT_OF_CAPACITY,
    ErrorCode.REQUEST_TIMEOUT,
    ErrorCode.REQUEST_TOO_LARGE,
    ErrorCode.UNAUTHORIZED,
}


@pytest.mark.parametrize("code", list(ErrorCode))
async def test_lesson_11_only_transport_errors_and_5xx_count_against_a_worker(code: ErrorCode) -> None:
    """A client that sends nonsense all day must not close a healthy worker to the others."""

    async with a_rig(max_attempts=1) as rig:
        prefill, decode = await rig.add(Role.PREFILL), await rig.add(Role.DECODE)
        assert await rig.run() == [5, 6, 7]
        decode.behave = f"fail:{code}"
        for _ in range(3):
            with pytest.raises(SegueError) as caught:
                await rig.run()
            assert caught.value.info.code is code
        [at_prefill] = rig.fleet.router.usable(Role.PREFILL)
        [at_decode] = rig.fleet.router.usable(Role.DECODE)
        cooling = rig.fleet.router.cooling
        assert cooling(at_prefill.leader) == Cooling(0, 0.0), "it did its half"
        counted = 0 if code in NOBODYS_FAULT else 3
        assert cooling(at_decode.leader).failures == counted
        assert (cooling(at_decode.leader).until > 0) == bool(counted)
        assert rig.fleet.proven == (not counted), "/ready goes only with a worker's own fault"
        decode.behave = "serve"
        assert await rig.run() == [5, 6, 7]
        assert cooling(at_decode.leader).failures == 0
        await prefill.until(lambda: len(prefill.submits) == 5)


async def test_lesson_11_a_session_that_breaks_counts_against_its_worker() -> None:
    async with a_rig(max_attempts=1) as rig:
        await rig.add(Role.PREFILL)
        decode = await rig.add(Role.DECODE, "hang")
        [replica] = rig.fleet.router.usable(Role.DECODE)
        stream = rig.fleet.submit(rig.request(), budget_s=DEADLINE_S)
        task = asyncio.ensure_future(anext(aiter(stream)))
        await decode.until(lambda: bool(decode.submits))
        decode.session.close(PeerLost("the cable"))
        with pytest.raises(PeerLost):
            await task
        assert rig.fleet.router.cooling(replica.leader).failures == 1


@pytest.mark.parametrize("broken", [Role.PREFILL, Role.DECODE])
@pytest.mark.parametrize("how", ["says so", "is gone"])
async def test_lesson_11_a_pair_is_a_transaction_what_ends_one_half_ends_the_other(
    broken: Role, how: str
) -> None:
    async with a_rig(max_attempts=1) as rig:
        halves = {role: await rig.add(role, "hang") for role in (Role.PREFILL, Role.DECODE)}
        bad: Leader = halves.pop(broken)
        [other] = halves.values()
        stream = rig.fleet.submit(rig.request(), budget_s=DEADLINE_S)
        task = asyncio.ensure_future(anext(aiter(stream)))
        for leader in (bad, other):
            await leader.until(lambda at=leader: bool(at.submits))
        if how == "is gone":
            bad.session.close(PeerLost("the cable"))
        else:
            bad.behave = "fail:INTERNAL"
            bad.answer(bad.session, bad.submits[0])
        with pytest.raises(SegueError):
            await task
        await other.until(lambda: len(other.cancels) == 1)
        assert other.cancels[0].request_id == other.submits[0].request.request_id
        assert rig.at_rest()


@pytest.mark.parametrize("code", [ErrorCode.BOOTSTRAP_UNREACHABLE, ErrorCode.BOOTSTRAP_TIMEOUT])
async def test_a_pair_that_cannot_reach_one_another_does_not_take_from_the_fleets_retry_budget(
    code: ErrorCode,
) -> None:
    """All that wait for one peer fail together: what heals them is bounded by each one's attempts."""

    async with a_rig(policy="round_robin", retry_budget=0.0) as rig:
        await rig.add(Role.PREFILL)
        cut_off = await rig.add(Role.DECODE, f"fail:{code}")
        await rig.add(Role.DECODE)
        for _ in range(3):
            assert await rig.run() == [5, 6, 7]
        assert cut_off.submits
        value = rig.metrics.registry.get_sample_value("segue_retries_total", {"code": code.value})
        assert value == len(cut_off.submits)
