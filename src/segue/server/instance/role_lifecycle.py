"""One replica as a process: its model, then one role after another, as `segue switch` orders.

The engine, its memory and its other ranks stay. Everything else is made anew with each role (pool, scheduler,
sessions, transports and the incarnation): to its peers it is an instance that left and another one that came.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import signal
import sys
from collections.abc import Callable

from segue.engine.models.progress import step
from segue.kv import LeaderId
from segue.kv.ids import successor
from segue.kv.session import url_of
from segue.server.instance.gc import frozen_imports
from segue.server.instance.instance import Instance
from segue.server.instance.rank_process import SWITCH_INTERVAL_S
from segue.server.instance.rank_workers import OpenedReplica, open_replica
from segue.server.messages.records import RequestRecord
from segue.server.observe.logs import log_record
from segue.server.observe.traces import traces
from segue.server.settings.commands import InstanceConfig
from segue.server.supervisor import service_manager

log = logging.getLogger("segue.instance")


class RoleLifecycle:
    """`instance` is the one that serves now. `drain` may be called from a signal handler."""

    def __init__(self, config: InstanceConfig, replica: OpenedReplica) -> None:
        self._replica = replica
        self._leaving = False
        self.instance = self._made(config, None)

    def _made(self, config: InstanceConfig, me: LeaderId | None) -> Instance:
        engine, memory, workers, expert_peers = self._replica
        return Instance(config, engine, memory, me=me, workers=workers, expert_peers=expert_peers)

    def drain(self) -> None:
        """Finish what is there, then let `run` return."""
        self._leaving = True
        self.instance.drain()

    def run(self, ready: Callable[[Instance], object]) -> None:
        """Serve on this thread until drained, in every role that an operator orders; `ready` is told of each
        instance that has registered. Raises what `Instance.start` does."""
        while True:
            instance = self.instance
            try:
                if self._leaving:  # the signal came while there was none, and was told to the one before
                    if instance.expert_peers is None:
                        return
                    instance.drain()
                started = instance.start()
                if started:
                    ready(instance)
                elif instance.expert_peers is None:
                    return
                # Expert peers compute with us until all of them are done, and take it for a loss if one goes
                # without saying so: what kept us from registering waits in the leader's inbox.
                instance.run()
            finally:
                instance.close()
            config = instance.next_config
            if config is None or instance.failure is not None:
                return
            me = LeaderId(successor(instance.me.incarnation, config.role), instance.me.dp_rank)
            self.instance = self._made(config, me)
            # `segue explain` still asks for the records of earlier requests.
            self.instance.scheduler.admission.records = instance.scheduler.admission.records
            # The collector was told to keep what the first role needed.
            del instance
            gc.unfreeze()
            gc.collect()
            gc.freeze()


def run_instance(
    config: InstanceConfig, *, on_ready: Callable[[InstanceConfig, str, str], None], supervised: bool = False
) -> int:
    """Load the model, serve until a signal, drain; the exit status. `config` names a registry that was there.

    The first SIGINT or SIGTERM drains. The second ends the process at once, unless it is `supervised`: a
    supervisor sends SIGKILL for that, and its SIGTERM may follow a service manager's. `on_ready` is called
    with the instance's control address and the URL of its HTTP server ("": none) each time that it is
    registered; the role is that of its configuration.
    """
    with frozen_imports(), step("imports", "modules=torch,transformers"):
        # Most of it is imported by transformers only while it loads a model: here it costs less.
        importlib.import_module("transformers.modeling_utils")
        importlib.import_module("segue.engine.cpu.cpu_forward")

    sys.setswitchinterval(SWITCH_INTERVAL_S)
    spans = traces(os.environ, f"segue-{config.role}")
    replica = open_replica(config)
    lifecycle = RoleLifecycle(config, replica)

    def ended(record: RequestRecord) -> None:
        log_record(record)
        if spans is not None:
            spans.on_record(record)

    lifecycle.instance.scheduler.admission.records.on_record = ended
    gc.collect()
    gc.freeze()
    signals = 0

    def on_signal(number: int, frame: object) -> None:
        nonlocal signals
        signals += 1
        if signals == 1:
            service_manager.stopping()
        if signals > 1 and not supervised:
            os._exit(128 + number)
        lifecycle.drain()

    previous = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}

    def ready(instance: Instance) -> None:
        host, port = instance.plane.address
        role = instance.config.role.value
        if not instance.scheduler.cache.reusable:
            log.info(
                "no prefix is reused: this model keeps a state beside its KV, and nobody has copies of it"
            )
        door = "" if instance.http is None else url_of("http", *instance.http.address)
        on_ready(instance.config, f"{host}:{port}", door)
        log.info("serving role=%s leader=%s address=%s:%d", role, instance.me, host, port)

    try:
        lifecycle.run(ready)
    finally:
        if replica.engine.formats is not None:
            replica.engine.formats.close()
        if spans is not None:
            spans.close()
        for number, handler in previous.items():
            signal.signal(number, handler)
    return 0 if lifecycle.instance.failure is None else 1
