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
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from segue.bootstrap.client import Registry, RegistryClient
from segue.bootstrap.records import InstanceRecord, ReplicaRecord
from segue.conn.config import KVConfig, SessionConfig
from segue.conn.control_plane import ControlPlane
from segue.conn.handles import Change
from segue.conn.io import MonotonicClock
from segue.conn.manager import KVManager
from segue.core.config import InstanceConfig
from segue.core.errors import ConfigError, SegueError
from segue.core.types import ChecksumMode, LeaderId, Role, new_incarnation
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
from segue.serve.leader import Drain, Leader
from segue.serve.registry import follow_prefill, wait_for_registry
from segue.session import tls
from segue.session.guarded_http import GuardedServer
from segue.session.tasks import background
from segue.transport.kinds import KINDS, OK
from segue.transport.memory import Memory

log = logging.getLogger("segue.instance")

#: How often the interpreter lets another thread run: the I/O thread must not wait 5 ms for a leader
#: that is busy between two torch calls.
SWITCH_INTERVAL_S = 0.0005


class Instance:
    """One leader of one instance, on any engine. `start`, then `run` on the main thread, `close`.

    `me` names the leader, `dp_size` how many leaders its instance has. Each has a process of its own, with an
    engine, a pool, sessions and an entry in the registry. By default it is the only one, newly named.
    """

    def __init__(
        self,
        config: InstanceConfig,
        engine: Engine,
        memory: Memory,
        *,
        me: LeaderId | None = None,
        dp_size: int = 1,
    ) -> None:
        self.config = config
        self.engine = engine
        self.limits = config.limit.limits()
        self.tls = tls.from_config(config.tls, config.peer_host)
        self.frontends = FrontendSessions()
        self.me = me or LeaderId(new_incarnation())
        self.dp_size = dp_size
        self.model = f"{engine.info.fingerprint}/{engine.info.dtype}"
        pool = PagePool(engine.spec.pages, engine.spec.page_tokens)
        scheduling = SchedulerConfig(
            me=self.me,
            name=f"{config.label} {self.me}",
            limits=self.limits,
            chunk_tokens=config.engine.chunk_tokens,
            secret=config.secret,
        )
        frontends = {Role.FRONTEND: self.frontends}
        self.manager: KVManager | None = None
        if config.role is Role.UNIFIED:
            self.plane = ControlPlane(self._session_config(), frontends)
            self.scheduler: Scheduler = UnifiedScheduler(engine, pool, scheduling)
        else:
            self.manager = KVManager(self._kv_config(memory), memory, self._changed, others=frontends)
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

    def _session_config(self) -> SessionConfig:
        config = self.config
        return SessionConfig(
            role=config.role,
            me=self.me,
            host=config.host,
            port=config.port,
            advertise=config.advertise_host,
            advertise_port=config.advertise_port,
            secret=config.secret or None,
            limits=self.limits,
            tls=self.tls,
        )

    def _kv_config(self, memory: Memory) -> KVConfig:
        config = self.config
        names = transports(config.transport, memory)
        moves_bytes = all(KINDS.kind(name).moves_bytes for name in names)
        return KVConfig(
            **vars(self._session_config()),
            model=self.model,
            spec=self.engine.spec,
            transports=names,
            transport_port=config.data_port,
            advertise_transport_port=config.advertise_data_port,
            dp_size=self.dp_size,
            kv_checksum=ChecksumMode(config.kv_checksum) if moves_bytes else ChecksumMode.OFF,
        )

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
                "tp_size": 1,
                "dp_size": self.dp_size,
                "load_balance_method": "round_robin",
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
            dp_size=self.dp_size,
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

    async def _leave(self, registry: Registry) -> None:
        self._registry = None
        await registry.leave(self.me)
        await self._stack.aclose()


def transports(setting: str, memory: Memory) -> tuple[str, ...]:
    """The transports to offer for `--transport`; of what `auto` means, those that work here. Raises
    ConfigError if none does."""
    found = KINDS.offered(setting, memory)
    usable = tuple(name for name, reason in found.items() if reason == OK)
    for name, reason in found.items():
        if reason != OK:
            log.warning("%s cannot be used, only %s is offered: %s", name, ", ".join(usable), reason)
    if not usable:
        raise ConfigError(f"no transport works here: {found}; see segue doctor")
    return usable


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
        from segue.engine.cpu_engine import load_engine

    sys.setswitchinterval(SWITCH_INTERVAL_S)
    engine = load_engine(
        Path(config.model),
        dtype=config.engine.dtype,
        pool_bytes=int((config.engine.kv_gib or 1.0) * 2**30),
        page_tokens=config.engine.page_tokens,
        threads=config.engine.threads_per_worker or 1,
    )
    instance = Instance(config, engine, engine.memory)
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
