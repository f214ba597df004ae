"""Requests that outlive their workers: placed again before the first token, continued after it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fleet_rig import DEADLINE_S, Leader, Rig, a_rig

from jumps import Jumps
from segue.engine.request import FinishReason, Output, Request, SamplingParams, TokenLogprob, Usage
from segue.kv.errors import (
    BootstrapUnreachable,
    DeadlineExceeded,
    Draining,
    ErrorCode,
    ErrorInfo,
    Internal,
    OutOfCapacity,
    PeerLost,
    SegueError,
    TransferFailed,
)
from segue.kv.ids import Role
from segue.server.messages.control import Outputs, Submit

COUNT = 6


class Worker(Leader):
    """Generates `100 + position`, as one that was given `output` must; may end on the way.

    `cut` is the position at which it dies: the session ends, or `error` is sent. `None`: never.
    """

    def __init__(self, role: Role, cut: int | None = None, error: SegueError | None = None) -> None:
        super().__init__(role, "worker")
        self.cut = cut
        self.error = error
        self.skip = 0

    def answer(self, session: Any, submit: Submit) -> None:
        request = submit.request
        if self.role is Role.PREFILL:
            if self.cut is not None:
                self.die(session, request)
            return
        given = len(request.output)
        for at in range(given, request.sampling.max_tokens):
            if at == self.cut:
                self.die(session, request)
                return
            last = at == request.sampling.max_tokens - 1
            output = Output(
                request_id=request.request_id,
                position=at + self.skip * (at > given),
                token_ids=[100 + at],
                logprobs=[TokenLogprob(100 + at, -0.25)],
                prompt_logprobs=[None] if at == given and request.sampling.prompt_logprobs else None,
                timeline={"queue": 1.0 + given} if at == given else {},
                usage=Usage(
                    prompt_tokens=len(request.prompt), prefill_cached=1, computed=2, output_tokens=at + 1
                )
                if last or at == given
                else None,
                finish=FinishReason.LENGTH if last else None,
            )
            session.send(Outputs([output]))

    def die(self, session: Any, request: Request) -> None:
        if self.error is not None:
            session.send(Outputs([Output(request_id=request.request_id, error=self.error.info)]))
        else:
            session.close(PeerLost("killed"))


async def add(rig: Rig, role: Role, cut: int | None = None, error: SegueError | None = None) -> Worker:
    worker = Worker(role, cut, error)
    rig.leaders.append(worker)
    rig.registry.put(await worker.start())
    await rig.until(lambda: usable(rig, worker))
    return worker


def usable(rig: Rig, worker: Leader) -> bool:
    me = worker.node.me
    return any(r.leader == me for r in rig.fleet.router.usable(worker.role))


def request(name: str = "r", count: int = COUNT, **sampling: Any) -> Request:
    return Request(
        request_id=name, prompt=[1, 2, 3], sampling=SamplingParams(max_tokens=count, seed=77, **sampling)
    )


async def outputs(rig: Rig, asked: Request, budget_s: float = DEADLINE_S) -> list[Output]:
    return [output async for output in rig.fleet.submit(asked, budget_s=budget_s)]


def tokens(found: list[Output]) -> list[int]:
    return [token for output in found for token in output.token_ids]


def value(rig: Rig, name: str, **labels: str) -> float:
    return rig.metrics.registry.get_sample_value(name, labels) or 0.0


async def first_asked(leaders: list[Leader]) -> Leader:
    """The leader that gets the request."""
    waits = [asyncio.ensure_future(leader.until(lambda at=leader: bool(at.submits))) for leader in leaders]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    await asyncio.gather(*waits, return_exceptions=True)
    return next(leader for leader in leaders if leader.submits)


WANTED = [100 + i for i in range(COUNT)]


@pytest.mark.parametrize("cut", range(COUNT))
async def test_decode_dies_at_each_token_and_nobody_notices(cut: int) -> None:
    async with a_rig(policy="round_robin", retry_budget=0.0) as rig:
        prefills = [await add(rig, Role.PREFILL) for _ in range(3)]
        dying, other = await add(rig, Role.DECODE, cut), await add(rig, Role.DECODE)
        found, serial = list[Output](), 0
        while not dying.submits:
            # Round robin: the second request at the latest goes to the one that dies.
            found = await outputs(rig, request(f"r{serial}"))
            serial += 1
        assert tokens(found) == WANTED
        assert [o.position for o in found] == list(range(COUNT))
        assert {o.request_id for o in found} == {f"r{serial - 1}"}
        again = next(s for s in other.submits if s.ticket.attempt == 1)
        first = dying.submits[0]
        assert again.request.output == WANTED[:cut]
        assert again.request.prompt == first.request.prompt
        assert again.request.sampling == first.request.sampling
        assert again.request.request_id != first.request.request_id
        assert (again.ticket.room == first.ticket.room) == (cut == 0), "prefill's half goes on before a token"
        assert again.ticket.prefill == first.ticket.prefill, "the prefill that has the KV is asked again"
        assert again.ticket.budget_s <= first.ticket.budget_s
        labels = {"code": "PEER_LOST"}
        assert value(rig, "segue_continuations_total", **labels) == (1 if cut else 0)
        assert value(rig, "segue_retries_total", **labels) == (0 if cut else 1)
        assert value(rig, "segue_placed_again_prompt_tokens_total", kv="kept") == (1 if cut else 3)
        assert len(prefills) == 3


async def test_what_the_client_is_told_stays_that_of_one_generation() -> None:
    async with a_rig(policy="round_robin") as rig:
        await add(rig, Role.PREFILL)
        await add(rig, Role.DECODE, cut=2)
        task = await add(rig, Role.DECODE)
        found = await outputs(rig, request(prompt_logprobs=1, logprobs=1))
        while not any(s.ticket.attempt for s in task.submits):
            found = await outputs(rig, request(f"again{len(task.submits)}", prompt_logprobs=1, logprobs=1))
        assert tokens(found) == WANTED
        assert [lp.token for o in found for lp in o.logprobs] == WANTED
        assert [bool(o.timeline) for o in found] == [True] + [False] * (COUNT - 1)
        assert [o.prompt_logprobs is not None for o in found] == [True] + [False] * (COUNT - 1)
        assert found[-1].usage == Usage(prompt_tokens=3, prefill_cached=1, computed=2, output_tokens=COUNT)
        again = next(s for s in task.submits if s.ticket.attempt)
        assert again.request.sampling.prompt_logprobs is None, "they were delivered already"
        assert again.request.sampling.logprobs == 1


async def test_workers_that_die_one_after_the_other() -> None:
    async with a_rig(no_replica_wait_s=DEADLINE_S) as rig:
        await add(rig, Role.PREFILL)
        dying = [await add(rig, Role.DECODE, 2) for _ in range(2)]
        coming = asyncio.ensure_future(outputs(rig, request()))
        for worker in dying:
            await worker.until(lambda at=worker: bool(at.submits))
            rig.registry.drop(worker.node.me.incarnation)
        last = await add(rig, Role.DECODE)
        assert tokens(await coming) == WANTED
        assert [w.submits[0].ticket.attempt for w in (*dying, last)][-1] == 2
        assert last.submits[0].request.output == WANTED[:2]
        assert value(rig, "segue_continuations_total", code="PEER_LOST") == 2


async def test_the_attempts_of_one_request_are_bounded_and_its_error_is_one_record() -> None:
    async with a_rig(max_attempts=3) as rig:
        await add(rig, Role.PREFILL)
        dying = [await add(rig, Role.DECODE, cut) for cut in (1, 1, 1, 1, 1)]
        for worker in dying:
            worker.error = PeerLost("lost its card", origin=f"decode {worker.node.me}")
        # The one that gives its token last in the row cannot give a second: all die at token 1.
        with pytest.raises(PeerLost) as caught:
            await outputs(rig, request())
        info = caught.value.info
        assert sum(len(w.submits) for w in dying) == 3
        assert max(len(w.submits) for w in dying) == 1, "nobody is asked twice"
        assert "attempt 3 of 3, after 1 tokens" in info.text
        assert info.text.count("PEER_LOST at decode") == 2
        assert info.origin.startswith("decode ")
        assert info.retryable


async def test_never_again_on_the_one_that_died_and_its_successor_is_waited_for() -> None:
    async with a_rig(no_replica_wait_s=DEADLINE_S) as rig:
        await add(rig, Role.PREFILL)
        dying = await add(rig, Role.DECODE, cut=2)
        stream = rig.fleet.submit(request(), budget_s=DEADLINE_S)
        found = [await anext(stream), await anext(stream)]
        # It listens still, so it would take the request again; but it is said to be gone.
        rig.registry.drop(dying.node.me.incarnation)
        successor = Worker(Role.DECODE)
        rig.leaders.append(successor)
        rig.registry.put(await successor.start())
        found += [output async for output in stream]
        assert tokens(found) == WANTED
        assert len(dying.submits) == 1
        assert [s.request.output for s in successor.submits] == [WANTED[:2]]


@pytest.mark.parametrize("told_first", [False, True])
@pytest.mark.parametrize("cut", [0, 2])
async def test_whoever_is_being_started_again_is_waited_for_within_the_request_s_budget(
    cut: int, told_first: bool
) -> None:
    """Longer than for a successor of which nobody has said that it comes."""

    async with a_rig(no_replica_wait_s=0.01, replacement_wait_s=DEADLINE_S if told_first else 0.01) as rig:
        await add(rig, Role.PREFILL)
        dying = await add(rig, Role.DECODE, cut)
        rig.fleet.await_restarted([])
        rig.fleet.await_restarted([Role.DECODE])
        running = asyncio.ensure_future(outputs(rig, request()))
        await dying.until(lambda: bool(dying.submits))
        rig.registry.drop(dying.node.me.incarnation)
        await rig.until(lambda: not rig.fleet.can_serve)
        late = asyncio.ensure_future(outputs(rig, request("late")))
        for _ in range(3):  # each of them would have ended a wait without that word
            await asyncio.sleep(0.02)
        assert not running.done()
        assert not late.done()
        if told_first:  # its supervisor hears of it before its session is here
            rig.fleet.await_restarted([])
            await asyncio.sleep(0.02)
        await add(rig, Role.DECODE)
        rig.fleet.await_restarted([])
        assert tokens(await running) == tokens(await late) == WANTED


@pytest.mark.parametrize("cut", [0, 2])
@pytest.mark.parametrize("draining", [False, True])
async def test_when_nobody_is_started_again_any_more_the_error_says_who_is_missing(
    cut: int, draining: bool
) -> None:
    """A frontend that drains is not alone to blame: there may be no other."""

    async with a_rig(no_replica_wait_s=0.01, replacement_wait_s=2 * DEADLINE_S if draining else 0.01) as rig:
        await add(rig, Role.PREFILL)
        dying = await add(rig, Role.DECODE, cut)
        rig.fleet.await_restarted([Role.DECODE])
        running = asyncio.ensure_future(outputs(rig, request()))
        await dying.until(lambda: bool(dying.submits))
        rig.registry.drop(dying.node.me.incarnation)
        await rig.until(lambda: not rig.fleet.can_serve)
        assert "being started again: decode" in rig.fleet.lacking().info.text
        if draining:
            rig.fleet.drain()
        else:
            rig.fleet.await_restarted([])
        with pytest.raises(BootstrapUnreachable, match="usable replicas are 1 prefill, 0 decode") as caught:
            await running
        assert caught.value.info.retryable
        assert ("waits for nobody" in caught.value.info.text) is draining
        assert "ask another" not in caught.value.info.text


async def test_a_deadline_that_passes_while_somebody_is_waited_for_says_who() -> None:
    async with a_rig(no_replica_wait_s=0.01, replacement_wait_s=0.01) as rig:
        await add(rig, Role.PREFILL)
        dying = await add(rig, Role.DECODE, cut=2)
        rig.fleet.await_restarted([Role.DECODE])
        running = asyncio.ensure_future(outputs(rig, request(), budget_s=0.3))
        await dying.until(lambda: bool(dying.submits))
        rig.registry.drop(dying.node.me.incarnation)
        with pytest.raises(
            DeadlineExceeded, match=r"while it waited: nobody can serve.*started again: decode"
        ):
            await running


async def test_nobody_left_is_said_with_what_came_before() -> None:
    async with a_rig(no_replica_wait_s=0.05, replacement_wait_s=0.05) as rig:
        await add(rig, Role.PREFILL)
        dying = await add(rig, Role.DECODE, cut=2)
        stream = rig.fleet.submit(request(), budget_s=DEADLINE_S)
        await anext(stream)
        rig.registry.drop(dying.node.me.incarnation)
        await anext(stream)
        with pytest.raises(
            BootstrapUnreachable, match=r"0 decode.*after 2 tokens; before it: PEER_LOST"
        ) as e:
            await anext(stream)
        assert e.value.info.retryable


@pytest.mark.parametrize("error", [Draining("it leaves"), TransferFailed("x"), OutOfCapacity("no page")])
async def test_a_worker_that_leaves_or_cannot_go_on_is_replaced(error: SegueError) -> None:
    async with a_rig(policy="round_robin") as rig:
        await add(rig, Role.PREFILL)
        for cut in (3, None):
            await add(rig, Role.DECODE, cut, error)
        for serial in range(2):
            assert tokens(await outputs(rig, request(f"r{serial}"))) == WANTED
        assert value(rig, "segue_continuations_total", code=error.info.code.value) >= 1


async def test_what_no_other_worker_could_heal_ends_the_stream(rig: Rig) -> None:
    await add(rig, Role.PREFILL)
    workers = [await add(rig, Role.DECODE, 2, Internal("a bug")) for _ in range(2)]
    with pytest.raises(Internal, match="a bug"):
        await outputs(rig, request())
    assert sum(len(w.submits) for w in workers) == 1
    assert value(rig, "segue_continuations_total", code="INTERNAL") == 0


async def test_the_deadline_stays_the_one_of_the_request() -> None:
    async with a_rig(no_replica_wait_s=DEADLINE_S) as rig:
        jumps = Jumps()
        await add(rig, Role.PREFILL)
        dying = await add(rig, Role.DECODE, cut=2)
        rig.leaders.append(silent := Leader(Role.DECODE, "hang"))
        stream = rig.fleet.submit(request(), budget_s=DEADLINE_S)
        await anext(stream)
        jumps.over(DEADLINE_S / 6)
        rig.registry.put(await silent.start())
        rig.registry.drop(dying.node.me.incarnation)
        await anext(stream)
        last = asyncio.ensure_future(anext(stream))
        await silent.until(lambda: bool(silent.submits))
        assert silent.submits[0].ticket.budget_s < DEADLINE_S * 5 / 6
        jumps.over(DEADLINE_S * 5 / 6)
        with pytest.raises(DeadlineExceeded, match=r"during decode.*after 2 tokens"):
            await last


async def test_prefills_end_after_the_first_token_changes_nothing(rig: Rig) -> None:
    p = await add(rig, Role.PREFILL)
    d = await rig.add(Role.DECODE, "one")
    stream = rig.fleet.submit(request(), budget_s=DEADLINE_S)
    await anext(stream)
    assert not next(r for r in rig.fleet.membership.replicas.values() if r.role is Role.PREFILL).running
    p.session.close(PeerLost("killed"))
    await rig.until(lambda: not usable(rig, p))
    d.session.send(Outputs([Output(request_id="r", position=1, token_ids=[6], finish=FinishReason.LENGTH)]))
    assert [o.token_ids async for o in stream] == [[6]]
    assert len(d.submits) == 1


async def test_a_prefill_that_dies_before_the_first_token_is_replaced_and_so_is_the_next() -> None:
    async with a_rig(retry_budget=0.0, no_replica_wait_s=DEADLINE_S) as rig:
        prefills = [await add(rig, Role.PREFILL, cut=0) for _ in range(2)]
        silent = await rig.add(Role.DECODE, "hang")
        stream = rig.fleet.submit(request(), budget_s=DEADLINE_S)
        task = stream.__anext__()
        coming = asyncio.ensure_future(task)
        await silent.until(lambda: len(silent.cancels) == 2)
        last = await add(rig, Role.PREFILL)
        await silent.until(lambda: len(silent.submits) == 3)
        assert [len(p.submits) for p in prefills] == [1, 1]
        third = silent.submits[2]
        assert third.ticket.prefill == last.node.me
        silent.session.send(
            Outputs([Output(request_id=third.request.request_id, token_ids=[9], finish=FinishReason.LENGTH)])
        )
        assert (await coming).token_ids == [9]
        assert [o async for o in stream] == []
        assert value(rig, "segue_retries_total", code="PEER_LOST") == 2


@pytest.mark.parametrize(("gone", "kept"), [(Role.DECODE, Role.PREFILL), (Role.PREFILL, Role.DECODE)])
async def test_who_says_that_its_peer_is_gone_is_not_the_one_to_avoid(gone: Role, kept: Role) -> None:
    async with a_rig(policy="round_robin" if gone is Role.DECODE else "total_requests") as rig:
        pairs = {
            role: [await rig.add(role, "hang") for _ in range(2)] for role in (Role.PREFILL, Role.DECODE)
        }
        stream = rig.fleet.submit(request(), budget_s=DEADLINE_S)
        coming = asyncio.ensure_future(stream.__anext__())
        said = {role: await first_asked(leaders) for role, leaders in pairs.items()}
        there, lost = said[kept], said[gone]
        info = ErrorInfo(
            code=ErrorCode.PEER_LOST,
            text="its process is gone",
            phase="TRANSFERRING",
            origin=f"{kept} {there.node.me}",
            peer=f"{gone} {lost.node.me}",
            retryable=True,
        )
        there.session.send(Outputs([Output(request_id="r", error=info)]))
        other = next(leader for leader in pairs[gone] if leader is not lost)
        await other.until(lambda: bool(other.submits))
        assert len(lost.submits) == 1
        if gone is Role.DECODE:
            again = other.submits[0].ticket
            assert again.prefill == there.node.me, "it has the KV"
        await lost.until(lambda: bool(lost.cancels))
        assert lost.cancels[0].reason == info
        rig.fleet.cancel("r", ErrorInfo(code=ErrorCode.ABORTED_BY_CLIENT, text="enough"))
        with pytest.raises(SegueError, match="enough"):
            await coming


async def test_a_token_lost_or_repeated_on_the_way_is_a_bug_and_not_guessed(rig: Rig) -> None:
    await add(rig, Role.PREFILL)
    worker = await add(rig, Role.DECODE)
    worker.skip = 1
    with pytest.raises(Internal, match="begins at token 2 where 1 was expected"):
        await outputs(rig, request())
    await worker.until(lambda: bool(worker.cancels))


async def test_a_frontend_that_drains_still_continues_what_it_began(rig: Rig) -> None:
    await add(rig, Role.PREFILL)
    dying, other = await add(rig, Role.DECODE, cut=1), await add(rig, Role.DECODE, cut=1)
    stream = rig.fleet.submit(request(), budget_s=DEADLINE_S)
    found = [await anext(stream)]
    rig.fleet.drain()
    for worker in (dying, other):
        worker.cut = None
    found += [output async for output in stream]
    assert tokens(found) == WANTED
