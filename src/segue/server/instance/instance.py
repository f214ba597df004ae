"""One leader of one instance: role, leader loop, sessions, registry; from start to drain.

The main thread runs the leader; the I/O thread (`kv.io`) runs sessions, transports' events, the
registry client and the instance's HTTP server. The registry was found before
(`server.instance.registry_link`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from functools import partial

from segue import __version__
from segue.engine.engine_api import Engine, ExpertPeers
from segue.engine.kv_events import KVEvent
from segue.engine.pages import PagePool
from segue.kv import (
    HOST,
    Change,
    Draining,
    Incarnation,
    Internal,
    InvalidRequest,
    KVManager,
    LeaderId,
    Memory,
    MonotonicClock,
    Role,
    SegueError,
    local_rank,
    model_identity,
    new_incarnation,
)
from segue.kv.control_plane import ControlPlane
from segue.kv.session import SessionHandler, background, is_loopback, tls_from_files
from segue.server.direct.direct_routes import LazyDirectServer
from segue.server.frontend.keys import ApiKeys
from segue.server.http.guarded_http import GuardedServer
from segue.server.instance.frontend_sessions import FrontendSessions
from segue.server.instance.instance_http import InstanceStatus, start_http
from segue.server.instance.integrity import instance_state
from segue.server.instance.kv_settings import dp_ranks, kv_config, session_config, usable_transports
from segue.server.instance.leader import Abandon, Drain, Hold, Inspect, Leader, NextRole, PeersAdvanced
from segue.server.instance.local_cost import measure_pauses
from segue.server.instance.operators import OperatorSessions, StatusReporter
from segue.server.instance.rank_workers import Workers
from segue.server.instance.registry_link import follow_prefill, wait_for_registry
from segue.server.kv_events.kv_publisher import KVPublisher
from segue.server.messages.control import Load
from segue.server.messages.operate import SetDraining, Switch
from segue.server.messages.records import RequestRecord
from segue.server.registry.arrival import until_answered
from segue.server.registry.client import RegistryClient
from segue.server.registry.registry_records import InstanceRecord, ReplicaRecord
from segue.server.schedulers.admission import SchedulerConfig
from segue.server.schedulers.decode import DecodeScheduler
from segue.server.schedulers.local_prompts import LocalPrompts
from segue.server.schedulers.prefill import PrefillScheduler
from segue.server.schedulers.scheduler import Scheduler
from segue.server.schedulers.unified import UnifiedScheduler
from segue.server.settings.commands import InstanceConfig
from segue.server.supervisor import service_manager

log = logging.getLogger("segue.instance")

#: After so long tables are looked at once more that were not empty when the leader had drained.
LOOK_AGAIN_S = 0.1


class Instance:
    """One leader of one instance, on any engine. `start`, then `run` on the main thread, `close`.

    `me` names the leader. Each leader of an instance (`config.dp`) has a process of its own, with an engine,
    a pool, sessions and an entry in the registry. By default it is the one that `config` names, or the only
    one. `workers` are its other ranks, and `expert_peers` the DP ranks that it computes every step with, if
    it has any; it ends both.
    """

    def __init__(
        self,
        config: InstanceConfig,
        engine: Engine,
        memory: Memory,
        *,
        me: LeaderId | None = None,
        workers: Workers | None = None,
        expert_peers: ExpertPeers | None = None,
    ) -> None:
        self.config = config
        self.engine = engine
        self.limits = config.limit.limits()
        self.tls = tls_from_files(config.tls, config.peer_host)
        self.frontends = FrontendSessions()
        self.me = me or LeaderId(Incarnation(config.incarnation or new_incarnation()), config.dp_rank or 0)
        self.dp = dp_ranks(config)
        self.model = model_identity(engine.info.fingerprint, engine.info.dtype)
        pool = PagePool(engine.spec.pages, engine.spec.page_tokens)
        scheduling = SchedulerConfig(
            me=self.me,
            name=f"{config.label} {self.me}",
            limits=self.limits,
            chunk_tokens=config.engine.chunk_tokens,
            send_layers=config.engine.send_layers,
            secret=config.secret,
            dp=self.dp,
            role=str(config.role),
        )
        self._sights = StatusReporter(config.role, self.frontends, self.limits.max_sessions)
        self.operators = OperatorSessions(
            self._ask_load, self._sights.of, self._steer, self._find, self.frontends, self._record
        )
        frontends: dict[Role, SessionHandler] = {
            Role.FRONTEND: self.frontends,
            Role.OPERATOR: self.operators,
        }
        self.workers = workers
        self.expert_peers = expert_peers
        self.manager: KVManager | None = None
        #: Offered to peers.
        self.transports: tuple[str, ...] = ()
        if config.role is Role.UNIFIED:
            self.plane = ControlPlane(session_config(config, self.me, self.tls), frontends)
            self.plane.on_lost = self._lost
            self.scheduler: Scheduler = UnifiedScheduler(engine, pool, scheduling)
        else:
            self.manager = self._sights.manager = self._make_manager(memory, frontends)
            self.plane = self.manager.plane
            make = PrefillScheduler if config.role is Role.PREFILL else DecodeScheduler
            self.scheduler = make(engine, pool, scheduling, self.manager)
            if isinstance(self.scheduler, DecodeScheduler):
                self.scheduler.local = self._local_prompts(self.scheduler)
        self.leader = Leader(
            self.scheduler,
            engine,
            limits=self.limits,
            clock=MonotonicClock(),
            send=lambda origin, outputs: self.plane.io.post(self.frontends.send, origin, outputs),
            report=lambda load: self.plane.io.post(self._reported, load),
            prefixes=self._prefixes,
            expert_peers=expert_peers,
        )
        self.frontends.deliver = self.leader.inbox.put
        self._stack = AsyncExitStack()
        self._stop = asyncio.Event()
        #: changes for the registry, sent one after the other
        self._draining = False
        self._telling = asyncio.Event()
        self._registered = False
        self._registry: RegistryClient | None = None
        self._publisher: KVPublisher | None = None
        self.http: GuardedServer | None = None
        self._direct_server: LazyDirectServer | None = None
        #: Keys that clients of the direct-mode server must show, if there are any.
        self._keys = ApiKeys.of(config.access)
        #: The configuration to serve with once `run` has returned, if the instance was switched.
        self.next_config: InstanceConfig | None = None
        #: Why this instance leaves, if something failed that it cannot be without.
        self.failure: SegueError | None = None

    def _local_prompts(self, scheduler: DecodeScheduler) -> LocalPrompts | None:
        """The prompts that frontends should send to decode alone."""
        chosen, chunk_tokens = self.config.engine.max_local_prefill_length, self.config.engine.chunk_tokens
        if chosen >= 0:
            return LocalPrompts(chosen) if chosen else None
        pauses = measure_pauses(self.engine, scheduler.cache, chunk_tokens)
        shown = ", ".join(f"{tokens}: {1000 * pause_s:.2f}" for tokens, pause_s in pauses)
        log.info("a step with so many tokens of a prompt takes longer by so many ms: %s", shown)
        return LocalPrompts(pauses=pauses)

    def _make_manager(self, memory: Memory, others: Mapping[Role, SessionHandler]) -> KVManager:
        config, workers = self.config, self.workers
        self.transports = names = usable_transports(config.transport, memory)
        kv = kv_config(
            config,
            self.me,
            model=self.model,
            spec=self.engine.spec,
            transports=names,
            tls=self.tls,
        )
        if workers is None:
            return KVManager(kv, memory, self._changed, on_rank_lost=self._lost, others=others)
        ranks = [local_rank(kv, memory, HOST), *workers.serve(self.me, names, config, self._lost)]
        return KVManager(kv, ranks, self._changed, on_rank_lost=workers.fail, others=others)

    def _lost(self, error: SegueError) -> None:
        """The replica cannot compute any more, or hears nobody: every request ends now, and the instance
        leaves. From any thread."""
        log.error("leaving: a rank of this replica is lost: %s", error)
        self.failure = self.failure or error
        self.leader.inbox.put(Abandon(error.info))
        self.plane.io.post(self._stop.set)
        self.plane.io.post(self._say_draining)

    def _changed(self, change: Change) -> None:
        self._sights.changed(change)
        self.leader.changed(change)

    # ---- operators, on the I/O thread -----------------------------------------------------------

    def _reported(self, load: Load) -> None:
        self.frontends.report(load)
        self.operators.report(load)
        if load.drained and self._sights.held and self.operators.watched:
            # Answers of a rank or of the protocol change the load without a report of the leader.
            self.plane.io.loop.call_later(LOOK_AGAIN_S, self._ask_load, self._reported)

    def _prefixes(self, only: Incarnation | None, events: list[KVEvent]) -> None:
        """Pass events of the prefix cache from the leader's thread to the I/O thread."""
        if only is None and self._publisher is not None:
            self._publisher.publish(events)
        self.plane.io.post(self.frontends.prefixes, only, self.scheduler.cache.pool.page_tokens, events)

    def _ask_load(self, answer: Callable[[Load], None]) -> None:
        self.leader.inbox.put(Inspect(lambda scheduler: self.plane.io.post(answer, scheduler.load())))

    async def _answers(self) -> None:
        """Returns when the leader has."""
        answered = asyncio.Event()
        self._ask_load(lambda _load: answered.set())
        await answered.wait()

    def _find(self, request_id: str, answer: Callable[[list[RequestRecord]], None]) -> None:
        def look(scheduler: Scheduler) -> None:
            found = scheduler.admission.explain(request_id, self.leader.clock.now())
            self.plane.io.post(answer, found)

        self.leader.inbox.put(Inspect(look))

    def _steer(self, order: SetDraining | Switch) -> None:
        if self._stop.is_set() or self.next_config is not None:
            raise Draining(f"{self.config.label} {self.me} is leaving")
        if isinstance(order, Switch):
            config = self._in_role(order.role)
            if order.turn:
                self._ask_load(partial(self._turn, config))
                return
        draining = isinstance(order, Switch) or order.draining
        self.leader.inbox.put(Hold(draining))
        self._say_draining(draining)

    def _in_role(self, role: Role) -> InstanceConfig:
        """The configuration of this process in another role. Raises InvalidRequest, and ConfigError if its
        settings do not fit to it."""
        who = f"{self.config.label} {self.me}"
        if role not in (Role.PREFILL, Role.DECODE, Role.UNIFIED) or role is self.config.role:
            raise InvalidRequest(f"{who} cannot become {role}: it is {self.config.role}")
        return dataclasses.replace(self.config, role=role, name=None)

    def _turn(self, config: InstanceConfig, load: Load) -> None:
        if load.drained and not self._sights.held and not self._stop.is_set() and self.next_config is None:
            # Now, so that nobody resumes it any more. If somebody did before, its leader refuses.
            self.next_config = config
            self.leader.inbox.put(NextRole(lambda: self.plane.io.post(self._stays)))

    def _stays(self) -> None:
        self.next_config = None

    # ---- life --------------------------------------------------------------------------------

    def start(self) -> bool:
        """Listen, then register: from here on peers and frontends find this instance. False if it is to leave
        and has not registered: it was asked to before the registry answered, or its expert peers have told
        so. Then `run` still ends as it does after a drain, of which expert peers hear.

        Raises ConfigError (port in use), BootstrapUnreachable or Unauthorized.
        """
        if self.config.events.kv_events_port is not None:
            self._publisher = KVPublisher(self.config.events, self.me.dp_rank)
            self.leader.journal()
        (self.manager or self.plane).start()
        if self.expert_peers is not None:
            put = self.leader.inbox.put
            self.expert_peers.listen(lambda: put(PeersAdvanced()), self.drain, self._lost)
        return self.plane.io.call(self._join(), self.config.registry_wait_s + 4 * self.limits.connect_s)

    async def _join(self) -> bool:
        config, secret = self.config, self.config.secret or None
        until = time.monotonic() + config.registry_wait_s
        if not await wait_for_registry(config, self.tls, self._stop):
            return False
        registry = RegistryClient(
            config.registry_url, secret=secret, limits=self.limits, on_error=_registry_trouble, tls=self.tls
        )
        self._registry = registry
        if self.manager is not None:
            self.manager.use_registry(registry)
        self._stack.push_async_callback(registry.aclose)
        if config.http_port is not None:
            if config.door == "all":
                self._direct_server = self._make_direct_server(registry)
            self.http = start_http(
                self._status(),
                config.host,
                config.http_port,
                self.limits.handshake_s,
                lazy=self._direct_server,
                keys=self._keys,
                hosts=(config.peer_host, *config.access.hosts),
            )
            self._stack.push_async_callback(self.http.stop)
            self._spawn(self.http.ended(), "the HTTP server")
            log.info("http server at %s:%d", *self.http.address)
        # Last: who finds this instance may ask it anything at once.
        if not await until_answered(
            lambda: registry.register(self._record()),
            wait_s=until - time.monotonic(),
            stop=self._stop,
            say=log.warning,
        ):
            return False
        self._registered = True
        self._spawn(registry.keep_alive(), "keep-alive")
        self._spawn(service_manager.feed_watchdog(answers=self._answers), "feeding the watchdog")
        self._spawn(self._tell_registry(), "telling the registry whether it drains")
        if self.manager is not None and config.role is Role.DECODE:
            self._spawn(follow_prefill(registry, self.manager), "watch")
            self.frontends.meet = self.manager.meet_peer
        return True

    def _make_direct_server(self, registry: RegistryClient) -> LazyDirectServer:
        config = self.config
        lazy = LazyDirectServer(
            config,
            self.me,
            registry,
            dp=self.dp,
            where=self._record(),
            halves=self.manager,
            tls=self.tls,
        )
        self._sights.door = lazy.tables
        self._stack.push_async_callback(lazy.close)
        if not self._keys and not is_loopback(config.host):
            log.warning(
                "--host %s without an API key: everybody who can reach --http-port %s may use this instance; "
                "give --api-key-file",
                config.host,
                config.http_port,
            )
        return lazy

    def _counts(self) -> dict[str, int]:
        """Tables and counters that `/metrics` shows."""
        found = {} if self.manager is None else dict(self.manager.sizes())
        if isinstance(self.scheduler, PrefillScheduler):
            found |= {"unbound_rooms": self.scheduler.unbound, "abandoned_rooms": self.scheduler.abandoned}
        return found if self._direct_server is None else {**found, **self._direct_server.counts()}

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
                "disable_radix_cache": not self.scheduler.cache.reusable,
            },
            load=lambda: self.frontends.load,
            counts=self._counts,
            alive=lambda: self.leader.running and self.failure is None,
            integrity=lambda: instance_state(
                self.leader,
                self.plane,
                manager,
                {} if self._direct_server is None else self._direct_server.tables(),
            ),
            paths=dict if manager is None else manager.paths,
            lacking=self._lacking,
            figures=self.scheduler.figures,
            handoffs=lambda: self._sights.handoffs,
            page_tokens=self.engine.spec.page_tokens,
            pages=self.engine.spec.pages,
        )

    def _lacking(self) -> str:
        """Why nobody should send requests here now; empty: everybody may."""
        if self.failure is not None:
            return f"a part has failed: {self.failure}"
        if self._stop.is_set() or self._draining:
            return "the instance is leaving" if self._stop.is_set() else "the instance is draining"
        if not self._registered:
            return "the instance has not registered yet: its registry does not answer"
        return "" if self.leader.running else "the instance is starting"

    def _record(self) -> InstanceRecord:
        port = self.config.advertise_port or self.plane.address[1]
        return InstanceRecord(
            incarnation=self.me.incarnation,
            role=self.config.role,
            model=self.model,
            served_model=self.config.served_model,
            # Every accepted request gets it: no sequence is longer than the pool.
            context_tokens=self.scheduler.admission.room_tokens,
            source=self.config.model,
            dp_size=self.dp.size,
            tp_size=self.config.tp,
            pp_size=self.config.pp,
            cp_size=self.config.cp,
            shared_experts=self.expert_peers is not None,
            load_balance=self.dp.load_balance,
            bootstrap_port=self.config.bootstrap_port if self.config.role is Role.PREFILL else 0,
            draining=self._draining,
            replicas=[
                ReplicaRecord(
                    dp_rank=self.me.dp_rank,
                    host=self.config.peer_host,
                    port=port,
                    version=__version__,
                    transports=list(self.transports),
                )
            ],
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
        """Serve on this thread until drained. Fails if the next role would take memory in which others may
        still write or read."""
        self.leader.run()
        if self.next_config is not None and not self.scheduler.drained:
            left = {**self.scheduler.sizes(), **self.scheduler.load().pages}
            role = self.next_config.role
            self.failure = self.failure or Internal(
                f"{self.config.label} {self.me} cannot become {role} and leaves: it holds {left}"
            )
            log.error("leaving: %s", self.failure)

    def drain(self) -> None:
        """Take nothing new, finish what is there, then let `run` return. From any thread or signal."""
        self.leader.inbox.put(Drain())
        self.plane.io.post(self._stop.set)
        self.plane.io.post(self._say_draining)

    def _say_draining(self, draining: bool = True) -> None:
        # Without a registry the leader still refuses what is new, and leaves when it is done.
        self._draining = draining
        if self._registry is not None:
            self._telling.set()

    async def _tell_registry(self) -> None:
        """Send changes to the registry one after the other, so that the last one arrives last."""
        while True:
            await self._telling.wait()
            self._telling.clear()
            try:
                if self._registry is not None:
                    await self._registry.set_draining(self._draining)
            except SegueError as error:
                _registry_trouble(error)

    def close(self) -> None:
        """Leave the registry, end sessions, transports and threads; the other ranks and the expert peers too,
        unless this process serves on in another role. Idempotent."""
        try:
            if self.plane.io.running and self._registry is not None:
                self.plane.io.call(self._leave(self._registry), 2 * self.limits.connect_s)
        finally:
            (self.manager or self.plane).close()
            if self.next_config is None or self.failure is not None:
                if self.workers is not None:
                    self.workers.close()
                if self.expert_peers is not None:
                    self.expert_peers.close()
            elif self.expert_peers is not None:
                self.expert_peers.stop_listening()  # or they would keep all of this instance
            if self._publisher is not None:
                self._publisher.close()

    async def _leave(self, registry: RegistryClient) -> None:
        self._registry = None
        await registry.leave(self.me)
        await self._stack.aclose()


def _registry_trouble(error: SegueError) -> None:
    log.warning("registry: %s", error)
