"""`segue frontend` as a coroutine: find the registry and the tokenizer, serve, drain at a signal."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

from segue.bootstrap.client import RegistryClient
from segue.bootstrap.records import InstanceRecord
from segue.cli.models import resolve
from segue.core.config import FrontendConfig
from segue.core.errors import ConfigError
from segue.core.records import Records
from segue.fleet.fleet import Fleet
from segue.fleet.settings import FleetSettings
from segue.frontend import server
from segue.frontend.keys import ApiKeys, read_keys
from segue.frontend.trace_context import TraceContext, passed_on
from segue.observe.metrics import Metrics
from segue.observe.traces import traces
from segue.session.tasks import awaited
from segue.session.tls import from_config

log = logging.getLogger("segue.frontend")


async def run(config: FrontendConfig, on_ready: Callable[[str], None]) -> None:
    """Serve until the first signal, then drain; the second signal ends at once."""
    limits = config.limit.limits()
    tls = from_config(config.tls, None)
    registry = RegistryClient(
        config.registry, secret=config.secret or None, limits=limits, on_error=_say, tls=tls
    )
    try:
        async with _signals() as stop, contextlib.AsyncExitStack() as closing:
            records, spans = Records(), traces(os.environ, "segue-frontend")
            if spans is not None:
                records.heard = spans.heard
                closing.callback(spans.close)
            model, name = config.model, config.served_model_name
            if model is None or name is None:
                record = await _first_record(registry, stop)
                if record is None:
                    return
                model = model or record.source or record.served_model
                name = name or record.served_model
            try:
                folder = await asyncio.to_thread(
                    partial(resolve, model, config.cache, config.revision, weights=False)
                )
            except ConfigError as exc:
                if config.model is not None:
                    raise
                raise ConfigError(
                    f"the instances serve {model}, whose tokenizer is not known here; give --model PATH"
                ) from exc
            metrics = Metrics()
            fleet = Fleet(
                registry,
                FleetSettings(
                    served_model=name, policy=config.policy, max_attempts=config.answers.max_attempts
                ),
                secret=config.secret or None,
                limits=limits,
                metrics=metrics,
                tls=tls,
                records=records,
            )
            settings = server.FrontendSettings(
                model_folder=Path(folder),
                served_model=name,
                host=config.host,
                port=config.port,
                model_defaults=config.answers.sampling_defaults == "model",
                limits=limits,
                keys=ApiKeys(read_keys(config.access)),
            )
            trace = passed_on if spans is None else lambda parent: TraceContext(parent, spans.context(parent))
            await server.run_frontend(
                settings, fleet, metrics, stop, records=records, trace=trace, on_ready=on_ready
            )
    finally:
        await registry.aclose()


async def _first_record(registry: RegistryClient, stop: asyncio.Event) -> InstanceRecord | None:
    """The first instance that the registry lists; None if somebody wants us to stop before."""
    log.info("event=waiting_for_an_instance")

    async def first() -> InstanceRecord | None:
        async with contextlib.aclosing(registry.watch()) as lists:  # type: ignore[type-var]
            async for records in lists:
                if records:
                    return records[0]
        return None

    found, stopped = awaited(first()), awaited(stop.wait())
    try:
        await asyncio.wait({found, stopped}, return_when=asyncio.FIRST_COMPLETED)
        return found.result() if found.done() else None
    finally:
        for task in (found, stopped):
            task.cancel()
        await asyncio.gather(found, stopped, return_exceptions=True)


def _say(error: Exception) -> None:
    log.warning("event=registry_error error=%r", str(error))


@contextlib.asynccontextmanager
async def _signals() -> AsyncIterator[asyncio.Event]:
    """An event that the first signal sets; the second cancels the task that entered this."""
    loop, task, stop = asyncio.get_running_loop(), asyncio.current_task(), asyncio.Event()
    assert task is not None

    def on_signal() -> None:
        if stop.is_set():
            task.cancel()
        stop.set()

    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, on_signal)
    try:
        yield stop
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
