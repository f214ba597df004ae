"""`segue frontend` as a coroutine: listen, find the registry and the tokenizer, serve, drain at a signal.

The modules that read tokenizers take seconds to import. A thread does it while the port answers `STARTING`.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from prometheus_client import ProcessCollector

from segue.cli.commands.models import resolve
from segue.kv import ConfigError, SegueError
from segue.kv.session import Tls, awaited, background, tls_from_files
from segue.server.fleet.fleet import Fleet
from segue.server.fleet.fleet_settings import FleetSettings
from segue.server.fleet.operator import operator
from segue.server.frontend.frontend_listener import FrontendListener
from segue.server.frontend.keys import ApiKeys
from segue.server.frontend.trace_context import TraceContext, passed_on
from segue.server.instance.gc import frozen_imports
from segue.server.messages.records import Records
from segue.server.observe.metrics import Metrics
from segue.server.observe.traces import Traces, traces
from segue.server.registry.client import RegistryClient
from segue.server.registry.registry_records import InstanceRecord
from segue.server.settings.commands import FrontendConfig
from segue.server.supervisor import service_manager
from segue.server.supervisor.lifeline import Lifeline, on_signals

log = logging.getLogger("segue.frontend")


async def run(config: FrontendConfig, on_ready: Callable[[str], None], lifeline: Lifeline) -> bool:
    """Serve until the first signal, then drain; see `drain_signals` for the second. A supervisor tells over
    `lifeline` which instances it starts again, for the requests that wait for them. False if the signal
    came while modules were still imported, in a thread that cannot be stopped."""
    limits = config.limit.limits()
    tls = tls_from_files(config.tls, None)
    keys = ApiKeys.of(config.access)
    registry = RegistryClient(
        config.registry, secret=config.secret or None, limits=limits, on_error=_say, tls=tls
    )
    try:
        async with contextlib.AsyncExitStack() as closing:
            stop = closing.enter_context(drain_signals(supervised=lifeline.supervised))
            metrics = Metrics()
            ProcessCollector(registry=metrics.registry)
            listener = FrontendListener(
                config.host,
                config.port,
                drain_s=limits.drain_s,
                keys=keys,
                metrics=metrics,
                clients=config.clients,
                hosts=config.access.hosts,
            )
            closing.push_async_callback(listener.close)
            log.info("event=listening url=%s", listener.url)
            imported = _in_thread(_import_server)
            try:
                return await _serve(
                    config, keys, registry, tls, metrics, listener, imported, stop, on_ready, lifeline
                )
            except SegueError:
                await asyncio.wait({imported})  # no process may end while a thread of it imports
                raise
    finally:
        await registry.aclose()


async def _serve(
    config: FrontendConfig,
    keys: ApiKeys,
    registry: RegistryClient,
    tls: Tls | None,
    metrics: Metrics,
    listener: FrontendListener,
    imported: asyncio.Future[ModuleType],
    stop: asyncio.Event,
    on_ready: Callable[[str], None],
    lifeline: Lifeline,
) -> bool:
    """See `run`."""
    limits = config.limit.limits()
    with contextlib.ExitStack() as closing:
        records, spans = Records(), traces(os.environ, "segue-frontend")
        if spans is not None:
            records.on_record = spans.on_record
            closing.callback(spans.close)
        model, name = config.model, config.served_model_name
        if model is None or name is None:
            listener.reason = "the frontend is waiting for an instance, which says what is served"
            record = await first_record(registry, stop)
            if record is None:
                return imported.done()
            model = model or record.source or record.served_model
            name = name or record.served_model
        listener.reason = f"the frontend is looking for the tokenizer of {name}"
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
        listener.reason = "the frontend is loading the tokenizer"
        if not await _before(imported, stop):
            return False
        server = imported.result()
        fleet = Fleet(
            registry,
            FleetSettings(
                served_model=name, policy=config.answers.policy, max_attempts=config.answers.max_attempts
            ),
            secret=config.secret or None,
            limits=limits,
            metrics=metrics,
            tls=tls,
            records=records,
            span_below=None if spans is None else spans.below,
        )
        telling = background(lifeline.follow(fleet.await_restarted), name="news of restarts", failed=_say)
        closing.callback(telling.cancel)
        watchdog = background(service_manager.feed_watchdog(), name="watchdog", failed=_say)
        closing.callback(watchdog.cancel)
        trace = passed_on if spans is None else partial(followed, spans)
        await server.run_frontend(
            config,
            fleet,
            metrics,
            stop,
            model_folder=Path(folder),
            served_model=name,
            keys=keys,
            records=records,
            trace=trace,
            listener=listener,
            dashboard=server.Dashboard(
                fleet,
                metrics,
                model=name,
                open_operator=partial(
                    operator, config.registry, secret=config.secret or None, limits=limits, tls=tls
                ),
            ),
            on_ready=on_ready,
        )
        return True


def followed(spans: Traces, parent: str) -> TraceContext:
    """Spans of our own for a request that the client has sent below its span `parent`."""
    span = spans.context(parent)
    return TraceContext(parent, spans.below(span), span)


def _import_server() -> ModuleType:
    with frozen_imports():
        return importlib.import_module("segue.server.frontend.frontend_process")


def _in_thread(work: Callable[[], ModuleType]) -> asyncio.Future[ModuleType]:
    """Run `work` on a thread that the process does not wait for when it ends; its result or exception."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[ModuleType] = loop.create_future()

    def tell(result: ModuleType | None, error: Exception | None) -> None:
        if result is not None:
            found.set_result(result)
        elif error is not None:
            found.set_exception(error)

    def run() -> None:
        told: tuple[ModuleType | None, Exception | None]
        try:
            told = work(), None
        except Exception as exc:  # raised where it is awaited
            told = None, exc
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(tell, *told)

    threading.Thread(target=run, name="imports", daemon=True).start()
    return found


async def _before(work: asyncio.Future[Any], stop: asyncio.Event) -> bool:
    """Whether `work` was done before somebody wanted us to stop."""
    stopped = awaited(stop.wait())
    either: set[asyncio.Future[Any]] = {work, stopped}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopped.cancel()
    return work.done()


async def first_record(registry: RegistryClient, stop: asyncio.Event) -> InstanceRecord | None:
    """The first instance that the registry lists; None if somebody wants us to stop before."""
    log.info("event=waiting_for_an_instance")

    async def first() -> InstanceRecord | None:
        async with contextlib.aclosing(registry.watch()) as lists:  # type: ignore[type-var]
            async for records in lists:
                if records:
                    return records[0]
        return None

    found = awaited(first())
    try:
        return found.result() if await _before(found, stop) else None
    finally:
        found.cancel()
        await asyncio.gather(found, return_exceptions=True)


def _say(error: Exception) -> None:
    log.warning("event=trouble error=%r", str(error))


@contextlib.contextmanager
def drain_signals(*, supervised: bool) -> Iterator[asyncio.Event]:
    """An event that the first signal sets. The second cancels the task that entered this, unless it is
    `supervised`: a supervisor sends SIGKILL for that, and its SIGTERM may follow a service manager's."""
    task, stop = asyncio.current_task(), asyncio.Event()
    assert task is not None

    def on_signal() -> None:
        if stop.is_set() and not supervised:
            task.cancel()
        if not stop.is_set():
            service_manager.stopping()
        stop.set()

    with on_signals(on_signal, signal.SIGINT, signal.SIGTERM):
        yield stop
