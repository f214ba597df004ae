"""FleetBackend against leaders that are real sessions and fake models."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest

from segue.balance.attempts import Next
from segue.bootstrap.records import InstanceRecord, ReplicaRecord
from segue.core.control import Cancel, ControlMessage, Load, Outputs, Submit
from segue.core.errors import (
    AbortedByClient,
    BootstrapUnreachable,
    DeadlineExceeded,
    Draining,
    ErrorCode,
    ErrorInfo,
    OutOfCapacity,
    PeerLost,
    SegueError,
    Starting,
    TransferFailed,
)
from segue.core.limits import Limits
from segue.core.request import Output, Request, SamplingParams
from segue.core.types import FinishReason, Role, new_incarnation
from segue.frontend.fleet import FleetBackend, FleetSettings
from segue.frontend.ready import keep_proving
from segue.handoff.ticket import verify
from segue.observe.metrics import Metrics
from segue.session.node import SessionNode

SECRET = b"a secret of enough bytes"
LIMITS = Limits(max_queue=8)


class Leader:
    """One replica's leader. `behave` says what it does with a Submit."""

    def __init__(self, role: Role, behave: str = "serve", load_balance: str = "round_robin") -> None:
        self.role = role
        self.behave = behave
        self.load_balance = load_balance
        self.submits: list[Submit] = []
        self.cancels: list[Cancel] = []
        self.news = asyncio.Event()
        self.session: Any = None
        self.node = SessionNode(
            incarnation=new_incarnation(),
            role=role,
            dp_rank=0,
            secret=SECRET,
            handler=self,
            message_type=ControlMessage,
            limits=LIMITS,
        )

    async def start(self) -> InstanceRecord:
        host, port = await self.node.listen("127.0.0.1", 0)
        return InstanceRecord(
            incarnation=self.node.incarnation,
            role=self.role,
            model="m",
            served_model="tiny",
            context_tokens=100,
            load_balance=self.load_balance,
            replicas=[ReplicaRecord(dp_rank=0, host=host, port=port)],
        )

    def hello(self) -> bytes:
        return b""

    def accept(self, peer: object) -> None: ...

    def closed(self, session: object, error: SegueError) -> None: ...

    def opened(self, session: Any) -> None:
        self.session = session
        session.send(Load(dp_rank=0, running=0, waiting=0, tokens=0, pages_free=9, pages_total=9))

    def received(self, session: Any, message: object) -> None:
        if isinstance(message, Cancel):
            self.cancels.append(message)
        elif isinstance(message, Submit):
            self.submits.append(message)
            verify(message.ticket, SECRET, session.peer.incarnation, 0.0)
            self.answer(session, message)
        self.news.set()

    def answer(self, session: Any, submit: Submit) -> None:
        rid = submit.request.request_id
        if self.behave.startswith("fail:"):
            code = ErrorCode(self.behave.removeprefix("fail:"))
            info = ErrorInfo(code=code, text="as told", retryable=True)
            session.send(Outputs([Output(request_id=rid, error=info)]))
        elif self.role is not Role.PREFILL and self.behave in ("serve", "one", "flood"):
            n = {"serve": submit.request.sampling.max_tokens, "one": 1, "flood": 50}[self.behave]
            for i in range(n):
                finish = FinishReason.LENGTH if self.behave == "serve" and i == n - 1 else None
                session.send(Outputs([Output(request_id=rid, position=i, token_ids=[i + 5], finish=finish)]))

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                self.news.clear()
                await self.news.wait()


class FakeRegistry:
    """A list of instances that tests change."""

    def __init__(self) -> None:
        self.records: dict[str, InstanceRecord] = {}
        self._waiters: list[asyncio.Event] = []

    def put(self, record: InstanceRecord) -> None:
        self.records[record.incarnation] = record
        self._wake()

    def drop(self, incarnation: str) -> None:
        del self.records[incarnation]
        self._wake()

    def _wake(self) -> None:
        for event in self._waiters:
            event.set()

    async def watch(self, role: Role) -> AsyncIterator[list[InstanceRecord]]:
        event = asyncio.Event()
        self._waiters.append(event)
        while True:
            event.clear()
            yield [r for r in self.records.values() if r.role is role]
            await event.wait()


class Fleet:
    def __init__(self, **settings: Any) -> None:
        self.registry = FakeRegistry()
        self.metrics = Metrics()
        settings.setdefault("no_replica_wait_s", 0.05)
        self.backend = FleetBackend(
            self.registry,
            FleetSettings(served_model="tiny", **settings),
            secret=SECRET,
            limits=LIMITS,
            metrics=self.metrics,
        )
        self.leaders: list[Leader] = []
        self.serial = 0

    async def add(self, role: Role, behave: str = "serve", **kw: Any) -> Leader:
        leader = Leader(role, behave, **kw)
        self.leaders.append(leader)
        self.registry.put(await leader.start())
        await self.until(
            lambda: any(
                r.leader.incarnation == leader.node.incarnation for r in self.backend.replicas.usable(role)
            )
        )
        return leader

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                await self.backend.changed()

    def request(self, max_tokens: int = 3, prompt: list[int] | None = None) -> Request:
        self.serial += 1
        return Request(
            request_id=f"r{self.serial}",
            prompt=prompt or [1, 2, 3],
            sampling=SamplingParams(max_tokens=max_tokens),
        )

    async def run(self, request: Request | None = None, budget_s: float = 10.0) -> list[int]:
        stream = self.backend.submit(request or self.request(), budget_s=budget_s)
        return [t async for output in stream for t in output.token_ids]

    def at_rest(self) -> bool:
        return self.backend.in_flight == 0 and all(
            not r.legs and r.tokens == 0 for r in self.backend.replicas
        )


def run(test: Callable[[Fleet], Awaitable[None]], **settings: Any) -> None:
    async def main() -> None:
        fleet = Fleet(**settings)
        fleet.backend.start()
        try:
            async with asyncio.timeout(30):
                await test(fleet)
            assert fleet.at_rest(), "something of a request was left behind"
        finally:
            await fleet.backend.close()
            for leader in fleet.leaders:
                await leader.node.close()

    asyncio.run(main())


def test_both_halves_get_the_same_signed_ticket_and_decode_is_streamed() -> None:
    async def test(fleet: Fleet) -> None:
        p, d = await fleet.add(Role.PREFILL), await fleet.add(Role.DECODE)
        assert fleet.backend.can_serve
        assert not fleet.backend.proven
        assert await fleet.run() == [5, 6, 7]
        assert fleet.backend.proven
        await p.until(lambda: len(p.submits) == 1)
        assert p.submits == d.submits
        ticket = d.submits[0].ticket
        assert (ticket.prefill.incarnation, ticket.decode.incarnation) == (
            p.node.incarnation,
            d.node.incarnation,
        )
        assert 9 < ticket.budget_s <= 10
        assert p.cancels == d.cancels == []
        assert fleet.backend.context_tokens == 100

    run(test)


def test_a_unified_replica_serves_alone() -> None:
    async def test(fleet: Fleet) -> None:
        u = await fleet.add(Role.UNIFIED)
        assert await fleet.run() == [5, 6, 7]
        assert u.submits[0].ticket.prefill == u.submits[0].ticket.decode
        assert len(u.submits) == 1

    run(test)


def test_nobody_to_serve_is_a_clear_503() -> None:
    async def test(fleet: Fleet) -> None:
        await fleet.add(Role.PREFILL)
        assert not fleet.backend.can_serve
        with pytest.raises(Starting, match=r"is starting.*1 prefill, 0 decode.*waiting for decode to"):
            await fleet.run()

    run(test)


def test_who_was_there_and_left_is_not_awaited_as_at_the_start() -> None:
    async def test(fleet: Fleet) -> None:
        with pytest.raises(Starting, match="waiting for prefill and decode"):
            await fleet.run()
        await fleet.add(Role.PREFILL)
        d = await fleet.add(Role.DECODE)
        assert await fleet.run() == [5, 6, 7]
        await d.node.close()
        while fleet.backend.can_serve:
            await fleet.backend.changed()
        with pytest.raises(
            BootstrapUnreachable, match=r"nobody can serve: .*1 prefill, 0 decode.*1 that are"
        ):
            await fleet.run()
        fleet.backend.drain()
        assert fleet.backend.lacking().info.code is ErrorCode.DRAINING

    run(test)


def test_lesson_10_an_error_on_prefill_ends_decode_at_once() -> None:
    async def test(fleet: Fleet) -> None:
        await fleet.add(Role.PREFILL, "fail:LAYOUT_MISMATCH")
        d = await fleet.add(Role.DECODE, "hang")
        with pytest.raises(SegueError) as caught:
            await fleet.run()
        assert caught.value.info.code in (ErrorCode.LAYOUT_MISMATCH,)
        await d.until(lambda: bool(d.cancels))

    run(test, retry_budget=0.0)


def test_an_error_on_decode_ends_prefill_at_once() -> None:
    async def test(fleet: Fleet) -> None:
        p = await fleet.add(Role.PREFILL, "hang")
        await fleet.add(Role.DECODE, "fail:INTERNAL")
        with pytest.raises(SegueError) as caught:
            await fleet.run()
        assert caught.value.info.origin.startswith("decode ")
        await p.until(lambda: bool(p.cancels))

    run(test, retry_budget=0.0)


def test_before_the_first_token_a_failure_is_tried_on_another_worker() -> None:
    async def test(fleet: Fleet) -> None:
        p = await fleet.add(Role.PREFILL)
        bad = await fleet.add(Role.DECODE, "fail:TRANSFER_FAILED")
        good = await fleet.add(Role.DECODE)
        for _ in range(4):
            assert await fleet.run() == [5, 6, 7]
        await p.until(lambda: len(p.submits) == len(bad.submits) + len(good.submits))
        assert len(bad.submits) == 1, "it is avoided after its failure"
        retry = next(s for s in good.submits if s.ticket.attempt == 1)
        assert retry.ticket.room != bad.submits[0].ticket.room
        assert retry.request.request_id != bad.submits[0].request.request_id
        value = fleet.metrics.registry.get_sample_value
        assert value("segue_retries_total", {"code": "TRANSFER_FAILED"}) == 1

    run(test, policy="round_robin")


def test_no_more_attempts_than_set() -> None:
    async def test(fleet: Fleet) -> None:
        await fleet.add(Role.PREFILL)
        bad = [await fleet.add(Role.DECODE, "fail:TRANSFER_FAILED") for _ in range(4)]
        with pytest.raises(TransferFailed):
            await fleet.run()
        assert [len(b.submits) for b in bad].count(1) == 3

    run(test, max_attempts=3)


def test_the_retry_budget_is_for_the_whole_fleet() -> None:
    async def test(fleet: Fleet) -> None:
        await fleet.add(Role.PREFILL)
        bad = [await fleet.add(Role.DECODE, "fail:TRANSFER_FAILED") for _ in range(4)]
        for _ in range(3):
            with pytest.raises(TransferFailed):
                await fleet.run()
        assert sum(len(b.submits) for b in bad) == 3 + 2

    run(test, retry_budget=2.0)


def test_a_continuation_takes_from_the_budget_as_any_retry_does() -> None:
    async def test(fleet: Fleet) -> None:
        left = [fleet.backend.may_retry(ErrorCode.INTERNAL, Next.CONTINUE) for _ in range(3)]
        assert left == [True, True, False]

    run(test, retry_budget=2.0)


def test_a_lost_session_fails_exactly_its_requests() -> None:
    async def test(fleet: Fleet) -> None:
        await fleet.add(Role.PREFILL)
        d1, d2 = await fleet.add(Role.DECODE, "one"), await fleet.add(Role.DECODE, "one")
        streams = [fleet.backend.submit(fleet.request(), budget_s=10) for _ in range(4)]
        for stream in streams:
            await anext(stream)
        on_d1 = {s.request.request_id for s in d1.submits}
        assert len(on_d1) == len(d2.submits) == 2
        d1.session.close(PeerLost("gone"))
        await fleet.until(lambda: fleet.backend.in_flight == 2)
        for i, stream in enumerate(streams, 1):
            if f"r{i}" in on_d1:
                with pytest.raises(PeerLost):
                    await anext(stream)
            else:
                fleet.backend.cancel(f"r{i}", ErrorInfo(code=ErrorCode.ABORTED_BY_CLIENT, text="enough"))

    run(test, policy="round_robin", max_attempts=1)


def test_lesson_09_a_restarted_worker_serves_the_next_request() -> None:
    async def test(fleet: Fleet) -> None:
        await fleet.add(Role.PREFILL)
        old = await fleet.add(Role.DECODE)
        assert await fleet.run() == [5, 6, 7]
        await old.node.close()
        await fleet.until(lambda: not fleet.backend.can_serve)
        assert not fleet.backend.proven
        fleet.registry.drop(old.node.incarnation)
        new = await fleet.add(Role.DECODE)
        assert not fleet.backend.proven, "the new incarnation has proven nothing yet"
        assert await fleet.run() == [5, 6, 7]
        assert len(new.submits) == 1
        assert fleet.backend.proven

    run(test)


def test_a_request_waits_a_little_for_a_worker_to_come() -> None:
    async def test(fleet: Fleet) -> None:
        await fleet.add(Role.PREFILL)
        task = asyncio.create_task(fleet.run())
        await asyncio.sleep(0)
        await fleet.add(Role.DECODE)
        assert await task == [5, 6, 7]

    run(test, no_replica_wait_s=10.0)


def test_draining_workers_are_not_chosen() -> None:
    async def test(fleet: Fleet) -> None:
        await fleet.add(Role.PREFILL)
        leaving, staying = await fleet.add(Role.DECODE), await fleet.add(Role.DECODE)
        leaving.session.send(
            Load(dp_rank=0, running=0, waiting=0, tokens=0, pages_free=9, pages_total=9, draining=True)
        )
        await fleet.until(lambda: len(fleet.backend.replicas.usable(Role.DECODE)) == 1)
        for _ in range(3):
            await fleet.run()
        assert (len(leaving.submits), len(staying.submits)) == (0, 3)

    run(test, policy="round_robin")


def test_a_full_fleet_and_a_full_worker_are_429() -> None:
    async def test(fleet: Fleet) -> None:
        await fleet.add(Role.PREFILL)
        d = await fleet.add(Role.DECODE, "fail:OUT_OF_CAPACITY")
        with pytest.raises(OutOfCapacity):
            await fleet.run()
        assert len(d.submits) == 1, "the only worker said it is full; asking again at once helps nobody"
        requests = [fleet.request() for _ in range(9)]
        for request in requests[:8]:
            fleet.backend.submit(request, budget_s=10)
        with pytest.raises(OutOfCapacity, match="8 requests"):
            fleet.backend.submit(requests[8], budget_s=10)
        for request in requests:
            fleet.backend.cancel(request.request_id, ErrorInfo(code=ErrorCode.ABORTED_BY_CLIENT, text="x"))

    run(test)


def test_a_client_that_leaves_ends_both_halves() -> None:
    async def test(fleet: Fleet) -> None:
        p, d = await fleet.add(Role.PREFILL), await fleet.add(Role.DECODE, "one")
        request = fleet.request()
        stream = fleet.backend.submit(request, budget_s=10)
        await anext(stream)
        fleet.backend.cancel(request.request_id, ErrorInfo(code=ErrorCode.ABORTED_BY_CLIENT, text="left"))
        await p.until(lambda: bool(p.cancels))
        await d.until(lambda: bool(d.cancels))
        assert d.cancels[0].reason.code is ErrorCode.ABORTED_BY_CLIENT

    run(test)


def test_the_deadline_ends_a_request_in_any_phase() -> None:
    async def test(fleet: Fleet) -> None:
        p, d = await fleet.add(Role.PREFILL, "hang"), await fleet.add(Role.DECODE, "hang")
        with pytest.raises(DeadlineExceeded, match="prefill"):
            await fleet.run(budget_s=0.05)
        await p.until(lambda: bool(p.cancels))
        await d.until(lambda: bool(d.cancels))

    run(test)


def test_a_reader_that_falls_behind_is_ended_and_not_kept_in_memory() -> None:
    async def test(fleet: Fleet) -> None:
        await fleet.add(Role.PREFILL)
        d = await fleet.add(Role.DECODE, "flood")
        stream = fleet.backend.submit(fleet.request(max_tokens=50), budget_s=10)
        # It asks for the first output and then never again, while fifty arrive.
        await anext(stream)
        await d.until(lambda: bool(d.cancels))
        with pytest.raises(AbortedByClient, match="too slowly"):
            await anext(stream)

    run(test, backlog_outputs=10, backlog_wait_s=0.05)


def test_a_burst_that_comes_before_the_reader_has_a_turn_is_not_the_readers_fault() -> None:
    """As after a pause of the frontend: what decode sent meanwhile is read at once."""

    async def test(fleet: Fleet) -> None:
        await fleet.add(Role.PREFILL)
        d = await fleet.add(Role.DECODE, "flood")
        request = fleet.request(max_tokens=50)
        stream = fleet.backend.submit(request, budget_s=10)
        for _ in range(45):
            await anext(stream)
        await asyncio.sleep(0.1)  # the limit's wait is over, and it has caught up
        await anext(stream)
        assert not d.cancels
        fleet.backend.cancel(request.request_id, ErrorInfo(code=ErrorCode.ABORTED_BY_CLIENT, text="left"))
        await d.until(lambda: bool(d.cancels))

    run(test, backlog_outputs=10, backlog_wait_s=0.05)


def test_draining_takes_nothing_new() -> None:
    async def test(fleet: Fleet) -> None:
        await fleet.add(Role.UNIFIED)
        fleet.backend.drain()
        assert not fleet.backend.can_serve
        with pytest.raises(Draining):
            fleet.backend.submit(fleet.request(), budget_s=10)

    run(test)


def test_another_model_is_left_alone() -> None:
    async def test(fleet: Fleet) -> None:
        leader = Leader(Role.UNIFIED)
        fleet.leaders.append(leader)
        record = await leader.start()
        fleet.registry.put(msgspec.structs.replace(record, served_model="other"))
        await fleet.backend.changed()
        assert list(fleet.backend.replicas) == []

    run(test)


def test_lesson_09_ready_comes_from_a_canary_and_goes_with_the_workers() -> None:
    async def test(fleet: Fleet) -> None:
        canary = asyncio.create_task(keep_proving(fleet.backend, [1, 2]))
        await fleet.add(Role.PREFILL)
        bad = await fleet.add(Role.DECODE, "fail:INTERNAL")
        await bad.until(lambda: bool(bad.submits))
        assert not fleet.backend.proven
        bad.behave = "serve"
        await fleet.until(lambda: fleet.backend.proven)
        await bad.node.close()
        await fleet.until(lambda: not fleet.backend.proven)
        canary.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await canary

    run(test)
