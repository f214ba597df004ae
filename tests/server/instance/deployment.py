"""A whole deployment in one process: registry, instances on lineage engines, and a plain frontend."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from segue.engine.engine_api import Engine
from segue.engine.parallel import ParallelSize
from segue.engine.request import Output, RankHints, Request, SamplingParams
from segue.kv.errors import AbortedByClient, SegueError
from segue.kv.ids import OPEN_RANK, LeaderId, Role, new_incarnation, new_room
from segue.kv.io import IoThread
from segue.kv.session.api import PeerInfo, Session
from segue.kv.session.node import SessionNode
from segue.kv.transport.memory.pool_memory import Memory, allocate
from segue.server.instance.instance import Instance
from segue.server.instance.leader import Inspect
from segue.server.instance.rank_workers import OpenedReplica, open_replica
from segue.server.messages.control import Cancel, ControlMessage, Load, Outputs, Submit
from segue.server.messages.ticket import Ticket
from segue.server.registry.registry_server import serve as serve_registry
from segue.server.schedulers.scheduler import Scheduler
from segue.server.settings.commands import InstanceConfig
from segue.server.settings.shared_config import LimitsConfig, ModelConfig
from segue_lab.sim.sim_engine import LineageEngine, lineage_spec

VOCAB = 1000
LIMITS = LimitsConfig(keepalive_s=0.5, peer_silence_s=20, drain_s=5, max_queue=4096)


class Front:
    """The least that a frontend is: sessions to leaders, requests out, outputs in."""

    def __init__(self) -> None:
        self.me = LeaderId(new_incarnation())
        self.io = IoThread()
        self.outputs: dict[str, list[Output]] = {}
        self.done: dict[str, threading.Event] = {}
        self.sessions: dict[LeaderId, Session] = {}
        self.loads: dict[LeaderId, Load] = {}
        self.io.start()
        self.node = self.io.call(self._make(), 60)

    async def _make(self) -> SessionNode:
        return SessionNode(
            me=self.me,
            role=Role.FRONTEND,
            secret=None,
            handlers=dict.fromkeys(Role, self),
            message_type=ControlMessage,
            limits=LIMITS.limits(),
        )

    def join(self, instance: Instance) -> None:
        host, port = instance.plane.address
        connect = self.node.connect(host, port, expect=instance.me, timeout_s=60)
        self.sessions[instance.me] = self.io.call(connect, 70)

    def submit(
        self,
        name: str,
        prompt: list[int],
        prefill: Instance,
        decode: Instance,
        *,
        max_tokens: int = 4,
        budget_s: float = 60.0,
        only: Instance | None = None,
        room: int | None = None,
        is_open: bool = False,
        ranks: RankHints | None = None,
        prefill_at: tuple[str, int] | None = None,
        **sampling_options: Any,
    ) -> SamplingParams:
        """With `is_open` the ticket does not say which DP rank of prefill has the request."""
        sampling = SamplingParams(**{"max_tokens": max_tokens, "seed": 1, **sampling_options})
        ticket = Ticket(
            room=room or new_room(),
            attempt=0,
            prefill=LeaderId(prefill.me.incarnation, OPEN_RANK) if is_open else prefill.me,
            decode=decode.me,
            budget_s=budget_s,
        )
        self.done.setdefault(name, threading.Event())
        request = Request(request_id=name, prompt=prompt, sampling=sampling, ranks=ranks or RankHints())
        message = Submit(request, ticket, prefill_at)
        for me in {prefill.me, decode.me} if only is None else {only.me}:
            self.io.post(self.sessions[me].send, message)
        return sampling

    def cancel(self, name: str, *instances: Instance) -> None:
        for instance in instances:
            reason = AbortedByClient("left").info
            self.io.post(self.sessions[instance.me].send, Cancel(name, reason))

    def wait(self, name: str, timeout_s: float = 60) -> list[Output]:
        assert self.done[name].wait(timeout_s), f"{name} did not end"
        return self.outputs[name]

    def tokens(self, name: str) -> list[int]:
        outputs = self.wait(name)
        assert outputs[-1].error is None, outputs[-1].error
        return [t for o in outputs for t in o.token_ids]

    def close(self) -> None:
        self.io.call(self.node.close(), 60)
        self.io.stop()

    # SessionHandler

    def hello(self) -> bytes:
        return b""

    def accept(self, peer: PeerInfo) -> None: ...

    def opened(self, session: Session) -> None: ...

    def closed(self, session: Session, error: SegueError) -> None: ...

    def received(self, session: Session, message: object) -> None:
        if isinstance(message, Load):
            self.loads[session.peer.leader] = message
        if isinstance(message, Outputs):
            for output in message.outputs:
                self.outputs.setdefault(output.request_id, []).append(output)
                if output.finish is not None or output.error is not None:
                    self.done[output.request_id].set()


def lineage_engine() -> tuple[Engine, Memory]:
    """An engine whose KV proves its origin, over a pool that transports can reach."""
    spec = lineage_spec(256)
    memory = allocate(spec.nbytes)
    return LineageEngine(spec, memoryview(memory.buffer), vocab_size=VOCAB), memory


def lineage_config(role: Role, registry: str = "http://127.0.0.1:1", **settings: Any) -> InstanceConfig:
    """The configuration of an instance on a lineage engine."""
    engine = ModelConfig(page_tokens=lineage_spec(256).page_tokens)
    fixed: dict[str, Any] = {"model": "test", "transport": "shm", "limit": LIMITS, "engine": engine}
    return InstanceConfig(role=role, registry=registry, **fixed | settings)


class Running:
    """An instance whose leader runs in a thread of its own: on the engine that `make_engine` makes, or with
    the model in the folder `model` on the ranks of its role, with processes for all but the first."""

    def __init__(
        self,
        role: Role,
        registry: str,
        *,
        transport: str = "shm",
        chunk_tokens: int = 512,
        http_port: int | None = None,
        secret: bytes = b"",
        make_engine: Callable[[], tuple[Engine, Memory]] = lineage_engine,
        me: LeaderId | None = None,
        model: str = "",
        ranks: Mapping[Role, ParallelSize] = MappingProxyType({}),
        kv_gib: float = 0.05,
        **settings: Any,
    ) -> None:
        size = ranks.get(role, ParallelSize())
        config = InstanceConfig(
            model=model or "test",
            role=role,
            registry=registry,
            transport=transport,
            limit=LIMITS,
            http_port=http_port,
            tp=size.tp,
            pp=size.pp,
            cp=size.cp,
            engine=ModelConfig(chunk_tokens=chunk_tokens, dtype="float32", kv_gib=kv_gib),
            **settings,
        )
        replica = open_replica(config) if model else OpenedReplica(*make_engine())
        self.engine, self.memory, self.workers, _ = replica
        page_tokens = self.engine.spec.page_tokens
        config = replace(config, engine=ModelConfig(chunk_tokens=chunk_tokens, page_tokens=page_tokens))
        self.instance = Instance(config, self.engine, self.memory, me=me, workers=self.workers)
        if secret:
            self.instance.scheduler.admission.secret = secret
        self.instance.start()
        self.thread = threading.Thread(target=self.instance.run)
        self.thread.start()

    def ask(self) -> dict[str, int]:
        """Sizes of every table, taken on the threads that own them; checks integrity too."""
        sizes: dict[str, int] = {}
        done = threading.Event()

        def inspect(scheduler: Scheduler) -> None:
            try:
                scheduler.check_integrity()
                sizes.update(scheduler.sizes())
            finally:
                done.set()

        self.instance.leader.inbox.put(Inspect(inspect))
        assert done.wait(60)
        assert sizes, "the integrity check failed"
        manager = self.instance.manager
        if manager is not None:
            wire = threading.Event()
            manager.io.post(lambda: (sizes.update(manager.sizes()), wire.set()))
            assert wire.wait(60)
        return {k: v for k, v in sizes.items() if k not in ("peers", "ended", "deadlines")}

    def close(self) -> None:
        self.instance.drain()
        self.thread.join(60)
        assert not self.thread.is_alive(), "the leader did not drain"
        self.instance.close()
        if isinstance(self.engine, LineageEngine):
            self.engine.memory.release()
            self.memory.close()


def generates_only_with(decode: Instance, count: int) -> None:
    """It computes nothing until `count` sequences are there to generate: that they compete for its pages is
    not left to the speed of who sends them."""
    scheduler: Any = decode.scheduler
    plan, batch = scheduler.plan, scheduler.batch

    def waits(now: float) -> Any:
        if len(batch.running) + len(batch.waiting) < count:
            return []
        del scheduler.plan
        return plan(now)

    scheduler.plan = waits


class Deployment:
    """Registry, instances by role, one frontend that knows them all."""

    def __init__(self, roles: list[Role], **options: object) -> None:
        self.io = IoThread()
        self.io.start()
        limits = LIMITS.limits()
        self.registry = self.io.call(serve_registry("127.0.0.1", 0, secret=None, limits=limits), 60)
        url = f"http://127.0.0.1:{self.registry.port}"
        self.running = [Running(role, url, **options) for role in roles]
        self.front = Front()
        for running in self.running:
            self.front.join(running.instance)

    def by_role(self, role: Role) -> list[Instance]:
        return [r.instance for r in self.running if r.instance.config.role is role]

    def has(self, instance: Instance, count: int = 1) -> None:
        """Wait until so many requests have reached `instance`: a session sends them, and nobody is told."""
        until = time.monotonic() + 60
        while len(instance.scheduler.admission.requests) < count:
            assert time.monotonic() < until
            time.sleep(0.001)

    def assert_comes_to_rest(self) -> None:
        """Every table of every instance empties by itself, within a bounded time."""
        until = time.monotonic() + 60
        while any(any(r.ask().values()) for r in self.running):
            assert time.monotonic() < until, [r.ask() for r in self.running]

    def close(self) -> None:
        self.front.close()
        for running in self.running:
            running.close()
        self.io.call(self.registry.close(), 60)
        self.io.stop()


@contextmanager
def deployment(*roles: Role, **options: object) -> Iterator[Deployment]:
    made = Deployment(list(roles), **options)
    try:
        yield made
    finally:
        made.close()
