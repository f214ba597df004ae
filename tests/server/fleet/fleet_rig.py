"""A fleet over leaders that are real sessions and fake models, and a registry that tests write."""

import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fleet_records import instance_record, load

from segue.engine.request import FinishReason, Output, Request, SamplingParams
from segue.kv.errors import (
    ErrorCode,
    ErrorInfo,
    SegueError,
)
from segue.kv.ids import LeaderId, Role, new_incarnation
from segue.kv.limits import Limits
from segue.kv.session.node import SessionNode
from segue.server.fleet.fleet import Fleet
from segue.server.fleet.fleet_settings import FleetSettings
from segue.server.messages.control import Cancel, ControlMessage, Outputs, Replace, Submit
from segue.server.messages.ticket import verify_ticket
from segue.server.observe.metrics import Metrics
from segue.server.registry.registry_records import InstanceRecord, ReplicaRecord

SECRET = b"a secret of enough bytes"
#: Nobody is late on a machine that stands still for a while.
LIMITS = Limits(max_queue=8, handshake_s=60.0, connect_s=60.0)
#: When a test is given up, and what a request has that is to be answered.
DEADLINE_S = 60.0


class Leader:
    """One replica's leader. `behave` says what it does with a Submit."""

    def __init__(
        self,
        role: Role,
        behave: str = "serve",
        load_balance: str = "round_robin",
        me: LeaderId | None = None,
        dp_size: int = 1,
    ) -> None:
        self.role = role
        self.behave = behave
        self.load_balance = load_balance
        self.dp_size = dp_size
        self.submits: list[Submit] = []
        self.cancels: list[Cancel] = []
        self.replaces: list[Replace] = []
        self.news = asyncio.Event()
        self.session: Any = None
        self.node = SessionNode(
            me=me or LeaderId(new_incarnation()),
            role=role,
            secret=SECRET,
            handlers=dict.fromkeys(Role, self),
            message_type=ControlMessage,
            limits=LIMITS,
        )

    async def start(self) -> InstanceRecord:
        host, port = await self.node.listen("127.0.0.1", 0)
        me = self.node.me
        self.record = instance_record(
            me.incarnation,
            role=self.role,
            dp_size=self.dp_size,
            load_balance=self.load_balance,
            replicas=[ReplicaRecord(dp_rank=me.dp_rank, host=host, port=port)],
        )
        return self.record

    def hello(self) -> bytes:
        return b""

    def accept(self, peer: object) -> None: ...

    def closed(self, session: object, error: SegueError) -> None: ...

    def opened(self, session: Any) -> None:
        self.session = session
        session.send(load())

    def received(self, session: Any, message: object) -> None:
        if isinstance(message, Cancel):
            self.cancels.append(message)
        elif isinstance(message, Replace):
            self.replaces.append(message)
            verify_ticket(message.ticket, SECRET, session.peer.leader.incarnation, 0.0)
        elif isinstance(message, Submit):
            self.submits.append(message)
            verify_ticket(message.ticket, SECRET, session.peer.leader.incarnation, 0.0)
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
        async with asyncio.timeout(DEADLINE_S):
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

    async def watch(self) -> AsyncIterator[list[InstanceRecord]]:
        event = asyncio.Event()
        self._waiters.append(event)
        while True:
            event.clear()
            yield list(self.records.values())
            await event.wait()


class Rig:
    def __init__(self, **settings: Any) -> None:
        self.registry = FakeRegistry()
        self.metrics = Metrics()
        settings.setdefault("policy", "total_tokens")
        settings.setdefault("no_replica_wait_s", 0.05)
        self.fleet = Fleet(
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
        # Its first load: by then both sides have the session.
        await self.until(
            lambda: any(
                r.leader == leader.node.me and r.load is not None for r in self.fleet.router.usable(role)
            )
        )
        return leader

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                await self.fleet.changed()

    def request(self, max_tokens: int = 3, prompt: list[int] | None = None) -> Request:
        self.serial += 1
        return Request(
            request_id=f"r{self.serial}",
            prompt=prompt or [1, 2, 3],
            sampling=SamplingParams(max_tokens=max_tokens),
        )

    async def run(self, request: Request | None = None, budget_s: float = DEADLINE_S) -> list[int]:
        stream = self.fleet.submit(request or self.request(), budget_s=budget_s)
        return [t async for output in stream for t in output.token_ids]

    def at_rest(self) -> bool:
        return self.fleet.in_flight == 0 and all(
            not r.running and r.tokens == 0 for r in self.fleet.membership.replicas.values()
        )


@asynccontextmanager
async def a_rig(**settings: Any) -> AsyncIterator[Rig]:
    """A fleet that serves; at its end nothing of a request may be left."""
    rig = Rig(**settings)
    rig.fleet.start()
    try:
        async with asyncio.timeout(3 * DEADLINE_S):
            yield rig
        assert rig.at_rest(), "something of a request was left behind"
    finally:
        await rig.fleet.close()
        for leader in rig.leaders:
            await leader.node.close()


@asynccontextmanager
async def no_collector() -> AsyncIterator[None]:
    """What is freed meanwhile is freed by its last reference."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
