"""One instance as a process: model, role, leader loop, sessions, registry; from start to drain.

The main thread runs the leader; the I/O thread (`conn.io`) runs sessions, transports' events, the
registry client and the instance's HTTP server. The registry was found before (`serve.registry`).
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from functools import partial

from segue.bootstrap.client import Registry, RegistryClient
from segue.bootstrap.records import InstanceRecord, ReplicaRecord
from segue.conn.config import HOST
from segue.conn.control_plane import ControlPlane
from segue.conn.handles import Change
from segue.conn.io import MonotonicClock
from segue.conn.manager import KVManager
from segue.conn.rank import local_rank
from segue.core.config import InstanceConfig
from segue.core.errors import SegueError
from segue.core.types import Incarnation, LeaderId, Role, new_incarnation
from segue.engine.base import Engine
from segue.engine.pages import PagePool
from segue.roles.admission import SchedulerConfig
from segue.roles.decode import DecodeScheduler
from segue.roles.prefill import PrefillScheduler
from segue.roles.scheduler import Scheduler
from segue.roles.unified import UnifiedScheduler
from segue.serve.control import FrontendSessions
from segue.serve.gc import frozen_imports
from segue.serve.http import InstanceStatus, start_http
from segue.serve.integrity import instance_state
from segue.serve.kv import dp_ranks, kv_config, session_config, usable_transports
from segue.serve.leader import Abandon, Drain, Leader
from segue.serve.rank_process import SWITCH_INTERVAL_S
from segue.serve.registry import follow_prefill, wait_for_registry
from segue.serve.workers import Workers, open_replica
from segue.session import tls
from segue.session.api import SessionHandler
from segue.session.guarded_http import GuardedServer
from segue.session.tasks import background
from segue.transport.memory import Memory

log = logging.getLogger("segue.instance")


class Instance:
    """One leader of one instance, on any engine. `start`, then `run` on the main thread, `close`.

    `me` names the leader. Each leader of an instance (`config.dp`) has a process of its own, with an engine,
    a pool, sessions and an entry in the registry. By default it is the one that `config` names, or the only
    one. `workers` are its other ranks, if it has any; it ends them.
    """

    def __init__(
        self,
        config: InstanceConfig,
        engine: Engine,
        memory: Memory,
        *,
        me: LeaderId | None = None,
        workers: Workers | None = None,
    ) -> None:
        self.config = config
        self.engine = engine
        self.limits = config.limit.limits()
        self.tls = tls.from_config(config.tls, config.peer_host)
        self.frontends = FrontendSessions()
        self.me = me or LeaderId(Incarnation(config.incarnation or new_incarnation()), config.dp_rank or 0)
        self.dp = dp_ranks(config)
        self.model = f"{engine.info.fingerprint}/{engine.info.dtype}"
        pool = PagePool(engine.spec.pages, engine.spec.page_tokens)
        scheduling = SchedulerConfig(
            me=self.me,
            name=f"{config.label} {self.me}",
            limits=self.limits,
            chunk_tokens=config.engine.chunk_tokens,
            secret=config.secret,
            dp=self.dp,
        )
        frontends = {Role.FRONTEND: self.frontends}
        self.workers = workers
        self.manager: KVManager | None = None
        if config.role is Role.UNIFIED:
            self.plane = ControlPlane(session_config(config, self.me, self.tls), frontends)
            self.scheduler: Scheduler = UnifiedScheduler(engine, pool, scheduling)
        else:
            self.manager = self._make_manager(memory, frontends)
            self.plane = self.manager.plane
            make = PrefillScheduler if config.role is Role.PREFILL else DecodeScheduler
            self.scheduler = make(engine, pool, scheduling, self.manager)
        self.leader = Leader(
            self.scheduler,
            engine,
            limits=self.limits,
            clock=MonotonicClock(),
            send=lambda origin, outputs: self.plane.io.post(self.frontends.send, origin, outputs),
            report=lambda load: self.plane.io.post(self.frontends.report, load),
        )
        self.frontends.deliver = self.leader.inbox.put
        self._stack = AsyncExitStack()
        self._stop = asyncio.Event()
        self._registry: Registry | None = None
        self.http: GuardedServer | None = None
        #: Why this instance leaves, if something failed that it cannot be without.
        self.failure: SegueError | None = None

    def _make_manager(self, memory: Memory, others: Mapping[Role, SessionHandler]) -> KVManager:
        config, workers = self.config, self.workers
        names = usable_transports(config.transport, memory)
        kv = kv_config(
            config,
            self.me,
            model=self.model,
            spec=self.engine.spec,
            transports=names,
            tls=self.tls,
        )
        if workers is None:
            return KVManager(kv, memory, self._changed, others=others)
        ranks = [local_rank(kv, memory, HOST), *workers.serve(self.me, names, config, self._lost)]
        return KVManager(kv, ranks, self._changed, on_rank_lost=workers.fail, others=others)

    def _lost(self, error: SegueError) -> None:
        """The replica cannot compute any more: every request ends now, and the instance leaves. From any
        thread."""
        log.error("leaving: a rank of this replica is lost: %s", error)
        self.failure = self.failure or error
        self.leader.inbox.put(Abandon(error.info))
        self.plane.io.post(self._stop.set)
        self.plane.io.post(self._say_draining)

    def _changed(self, change: Change) -> None:
        self.leader.changed(change)

    # ---- life --------------------------------------------------------------------------------

    def start(self) -> bool:
        """Listen, then register: from here on peers and frontends find this instance. False if it was
        asked to drain while the registry, there when the model began to load, was away.

        Raises ConfigError (port in use), BootstrapUnreachable or Unauthorized.
        """
        (self.manager or self.plane).start()
        return self.plane.io.call(self._join(), self.config.registry_wait_s + 4 * self.limits.connect_s)

    async def _join(self) -> bool:
        config, secret = self.config, self.config.secret or None
        if not await wait_for_registry(config, self.tls, self._stop):
            return False
        registry = RegistryClient(
            config.registry_url, secret=secret, limits=self.limits, on_error=_registry_trouble, tls=self.tls
        )
        self._registry = registry
        if self.manager is not None:
            self.manager.open_ranks.registry = registry
        self._stack.push_async_callback(registry.aclose)
        await registry.register(self._record())
        self._spawn(registry.keep_alive(self.me.incarnation), "keep-alive")
        if self.manager is not None and config.role is Role.DECODE:
            self._spawn(follow_prefill(registry, self.manager), "watch")
        if config.http_port is not None:
            self.http = start_http(self._status(), config.host, config.http_port, self.limits.handshake_s)
            self._stack.push_async_callback(self.http.stop)
            self._spawn(self.http.ended(), "the HTTP server")
            log.info("http server at %s:%d", *self.http.address)
        return True

    def _status(self) -> InstanceStatus:
        config, manager = self.config, self.manager
        return InstanceStatus(
            about={
                "disaggregation_mode": config.role.value,
                "served_model_name": config.served_model,
                "incarnation": self.me.incarnation,
                "tp_size": config.tp,
                "pp_size": config.pp,
                "cp_size": config.cp,
                "dp_size": self.dp.size,
                "dp_rank": self.me.dp_rank,
                "load_balance_method": self.dp.load_balance,
            },
            load=lambda: self.frontends.load,
            counts=dict if manager is None else manager.sizes,
            alive=lambda: self.leader.running and self.failure is None,
            integrity=lambda: instance_state(self.leader, self.plane, manager),
            paths=dict if manager is None else manager.paths,
        )

    def _record(self) -> InstanceRecord:
        port = self.config.advertise_port or self.plane.address[1]
        return InstanceRecord(
            incarnation=self.me.incarnation,
            role=self.config.role,
            model=self.model,
            served_model=self.config.served_model,
            # What every request gets that is accepted: no sequence is longer than the pool.
            context_tokens=self.scheduler.admission.room_tokens,
            source=self.config.model,
            dp_size=self.dp.size,
            tp_size=self.config.tp,
            pp_size=self.config.pp,
            cp_size=self.config.cp,
            load_balance=self.dp.load_balance,
            replicas=[ReplicaRecord(dp_rank=self.me.dp_rank, host=self.config.peer_host, port=port)],
        )

    def _spawn(
        self,
        work: Coroutine[object, object, object],
        name: str,
        failed: Callable[[SegueError], None] | None = None,
    ) -> None:
        """Run `work` until close. If it fails, `failed` is told; without one this instance leaves, for what
        must not end has ended."""
        task = background(work, name=name, failed=failed or partial(self._leave_for, name))
        self._stack.callback(task.cancel)

    def _leave_for(self, name: str, error: SegueError) -> None:
        """A part has failed for good: drain, be unhealthy from now on, and exit with a status but 0."""
        log.error("leaving: %s failed: %s", name, error)
        self.failure = self.failure or error
        self.drain()

    def run(self) -> None:
        """Serve on this thread until drained."""
        self.leader.run()

    def drain(self) -> None:
        """Take nothing new, finish what is there, then let `run` return. From any thread or signal."""
        self.leader.inbox.put(Drain())
        self.plane.io.post(self._stop.set)
        self.plane.io.post(self._say_draining)

    def _say_draining(self) -> None:
        registry = self._registry
        if registry is not None:
            # Without the registry's ear the leader still refuses what is new, and leaves when it is done.
            self._spawn(
                registry.set_draining(self.me.incarnation, True), "saying that it drains", _registry_trouble
            )

    def close(self) -> None:
        """Leave the registry, end sessions, transports and threads. Idempotent."""
        try:
            if self.plane.io.running and self._registry is not None:
                self.plane.io.call(self._leave(self._registry), 2 * self.limits.connect_s)
        finally:
            (self.manager or self.plane).close()
            if self.workers is not None:
                self.workers.close()

    async def _leave(self, registry: Registry) -> None:
        self._registry = None
        await registry.leave(self.me)
        await self._stack.aclose()


def _registry_trouble(error: SegueError) -> None:
    log.warning("registry: %s", error)


def run_instance(config: InstanceConfig, *, on_ready: Callable[[str], None]) -> int:
    """Load the model, serve until a signal, drain; the exit status. `config` names a registry that was there.

    The first SIGINT or SIGTERM drains, the second ends the process at once. `on_ready` is called
    with the instance's control address once it is registered.
    """
    with frozen_imports():
        # Most of it is imported by transformers only while it loads a model: here it costs less.
        importlib.import_module("transformers.modeling_utils")
        importlib.import_module("segue.engine.cpu_engine")

    sys.setswitchinterval(SWITCH_INTERVAL_S)
    replica = open_replica(config)
    instance = Instance(config, replica.engine, replica.memory, workers=replica.workers)
    gc.collect()
    gc.freeze()
    signals = 0

    def on_signal(number: int, frame: object) -> None:
        nonlocal signals
        signals += 1
        if signals > 1:
            os._exit(128 + number)
        instance.drain()

    previous = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        if not instance.start():
            return 0
        host, port = instance.plane.address
        log.info("serving role=%s leader=%s address=%s:%d", config.role.value, instance.me, host, port)
        on_ready(f"{host}:{port}")
        instance.run()
    finally:
        instance.close()
        for number, handler in previous.items():
            signal.signal(number, handler)
    return 0 if instance.failure is None else 1
