"""An instance's use of its registry: it finds or runs it before it downloads or loads a model, and decode
follows the list of prefill leaders."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import signal
from collections.abc import Iterator

from segue.kv import DpRanks, IoThread, KVManager, LeaderId, Role
from segue.kv.protocol.room_ranks import PrefillInstance
from segue.kv.session import Tls, tls_from_files
from segue.server.registry.arrival import arrival
from segue.server.registry.client import InstanceWatch
from segue.server.registry.registry_records import InstanceRecord, ReplicaRecord
from segue.server.registry.registry_server import serve as serve_registry
from segue.server.settings.commands import InstanceConfig
from segue.server.supervisor.lifeline import on_signals

log = logging.getLogger("segue.instance")


@contextlib.contextmanager
def registry_of(config: InstanceConfig) -> Iterator[InstanceConfig | None]:
    """`config` with the address of a registry that answers; None if a signal asked us to leave before.

    An instance that is given none runs it for as long as this is entered, from before its model is loaded:
    those that wait for it can load at the same time. Raises ConfigError (port in use), BootstrapUnreachable
    after `registry_wait_s`, Unauthorized or PeerRefused at once.
    """
    tls = tls_from_files(config.tls, config.peer_host)
    if config.registry is not None:
        yield config if _wait(config, tls) else None
        return
    limits, secret = config.limit.limits(), config.secret or None
    io = IoThread()
    io.start()
    try:
        serve = serve_registry(config.host, config.bootstrap_port, secret=secret, limits=limits, tls=tls)
        server = io.call(serve, limits.connect_s)
        log.info("event=registry_runs url=%s", config.registry_url)
        try:
            yield dataclasses.replace(config, registry=config.registry_url)
        finally:
            io.call(server.close(), 2 * limits.connect_s)
    finally:
        io.stop()


def _wait(config: InstanceConfig, tls: Tls | None) -> bool:
    async def wait() -> bool:
        stop = asyncio.Event()
        with on_signals(stop.set, signal.SIGINT, signal.SIGTERM):
            return await wait_for_registry(config, tls, stop)

    return asyncio.run(wait())


async def wait_for_registry(config: InstanceConfig, tls: Tls | None, stop: asyncio.Event) -> bool:
    """Wait for the registry of `config`; False if `stop` is set before it answers. Raises as `arrival`."""
    return await arrival(
        config.registry_url,
        secret=config.secret or None,
        limits=config.limit.limits(),
        tls=tls,
        wait_s=config.registry_wait_s,
        stop=stop,
        say=log.warning,
    )


def _prefill(record: InstanceRecord) -> PrefillInstance:
    dp = DpRanks(size=record.dp_size, load_balance=record.load_balance)
    return PrefillInstance(dp, frozenset(replica.dp_rank for replica in record.replicas))


async def follow_prefill(registry: InstanceWatch, manager: KVManager) -> None:
    """Keep a session to every prefill leader that the registry names, and to no other host; for ever.
    Hand-offs whose prefill rank is open are looked at again with each change."""
    known: dict[LeaderId, ReplicaRecord] = {}
    async for records in registry.watch(Role.PREFILL):
        manager.prefill_instances({record.incarnation: _prefill(record) for record in records})
        now = {leader: where for record in records for leader, where in record.leaders()}
        for leader in [leader for leader in known if leader not in now]:
            manager.remove_peer(leader)
        for leader in [leader for leader in now if leader not in known]:
            manager.add_peer(leader, now[leader].host, now[leader].port)
        known = now
