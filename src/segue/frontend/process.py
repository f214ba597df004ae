"""The frontend's process: from its configuration to `run_frontend`, with signals and the registry."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path

from segue.bootstrap.client import Registry, RegistryClient
from segue.bootstrap.records import InstanceRecord
from segue.core.config import FrontendConfig
from segue.core.errors import ConfigError, SegueError
from segue.frontend import server

log = logging.getLogger("segue.frontend")

Resolve = Callable[[str], Path]


async def run(config: FrontendConfig, resolve: Resolve, *, on_ready: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM, then drain; a second signal ends the process at once.

    `resolve` turns a model's name or path into a folder. Without `--model` the first instance in
    the registry says which model is served; until one is there the frontend waits.
    """
    stop = _stop_on_signals()
    limits, secret = config.limit.limits(), config.secret or None
    registry = RegistryClient(config.registry, secret=secret, limits=limits, on_error=_trouble)
    try:
        model, name = config.model, config.served_model_name
        if model is None or name is None:
            first = await _first_instance(registry, stop)
            if first is None:
                return
            model, name = model or first.source, name or first.served_model
        try:
            folder = await asyncio.to_thread(resolve, model)
        except ConfigError as error:
            hint = "give --model with the tokenizer's folder on this host"
            raise ConfigError(f"{error}; {hint}") if config.model is None else error from error
        settings = server.FrontendConfig(
            registry=registry,
            model_folder=folder,
            served_model=name,
            host=config.host,
            port=config.port,
            secret=secret,
            policy=config.policy,
            limits=limits,
        )
        await server.run_frontend(settings, stop, on_ready=on_ready)
    finally:
        await registry.aclose()


async def _first_instance(registry: Registry, stop: asyncio.Event) -> InstanceRecord | None:
    """The first instance that serves something, or None if we were stopped before there was one."""

    async def look() -> InstanceRecord | None:
        async for records in registry.watch():
            if records:
                return records[0]
            log.info("waiting for the first instance to register")
        return None

    looking, stopping = asyncio.create_task(look()), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({looking, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return looking.result() if looking.done() else None
    finally:
        looking.cancel()
        stopping.cancel()


def _stop_on_signals() -> asyncio.Event:
    stop = asyncio.Event()

    def on_signal(number: int) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    return stop


def _trouble(error: SegueError) -> None:
    log.warning("registry: %s", error)
