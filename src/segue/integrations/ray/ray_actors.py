"""The actors of an application of Ray Serve: one keeps the registry, each other one a segue process.

Serve calls them: `__init__` starts (as a coroutine), `check_health` is asked at intervals, `__del__` drains
when Serve takes an actor away. An actor that fails its checks, or dies, is replaced by a new one, whose
process is a new incarnation.
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import httpx2 as httpx
import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import Response

from segue.cli import flags
from segue.integrations.ray.ray_plan import PartPlan
from segue.kv import Internal, PeerLost
from segue.kv.session import tls_from_files
from segue.server.http.pass_through import PassThrough
from segue.server.registry.registry_server import RegistryServer
from segue.server.registry.registry_server import serve as serve_registry
from segue.server.settings.commands import FrontendConfig, InstanceConfig
from segue.server.settings.layers import argv
from segue.server.supervisor.kept_process import KeptProcess
from segue.server.supervisor.lifeline import Ready

#: Deadlines of the answer to one health check, and of the registry's address, in seconds.
CHECK_S = 5.0
REGISTRY_S = 60.0
#: Requests at a time through the actor of one frontend.
MAX_REQUESTS = 1024
#: Time of one piece of an answer beyond the budget of its request, in seconds.
_SILENCE_MARGIN_S = 15.0


class RayRegistry:
    """The registry, at `port` of the node. `config` has the secret, the TLS files and the limits."""

    async def __init__(self, config: FrontendConfig, port: int) -> None:  # type: ignore[misc]
        host = ray.util.get_node_ip_address()
        config = flags.with_secret(config)
        self._server: RegistryServer = await serve_registry(
            host,
            port,
            secret=config.secret or None,
            limits=config.limit.limits(),
            tls=tls_from_files(config.tls, host),
        )

    async def url(self) -> str:
        """The address for `--registry`."""
        return self._server.url

    async def __del__(self) -> None:
        await self._server.close()


class RayProcess:
    """An actor that keeps one segue process. `health` is the path that its health check asks."""

    health = "/ready"
    _process: KeptProcess | None = None
    _url = ""

    async def _start(self, part: PartPlan, config: InstanceConfig | FrontendConfig) -> Ready:
        words = [sys.executable, "-m", "segue.cli.main", part.role.value, *argv(config)]
        self._process = KeptProcess(
            config.label, part.role, words, drain_s=config.limit.drain_s, threads=part.threads
        )
        return await self._process.start()

    async def check_health(self) -> None:
        """Raise PeerLost if the process has ended, does not answer or is not ready."""
        if self._process is None:
            raise PeerLost("the process has not started")
        self._process.check()
        try:
            async with httpx.AsyncClient(timeout=CHECK_S, trust_env=False) as client:
                answer = await client.get(f"{self._url}{self.health}")
        except httpx.TransportError as error:
            raise PeerLost(f"{self._url}{self.health} does not answer: {error!r}") from error
        if answer.status_code != 200:
            raise PeerLost(f"{self._url}{self.health}: {answer.status_code} {answer.text[:200]}")

    async def __del__(self) -> None:
        if self._process is not None:
            await self._process.leave()


class RayInstance(RayProcess):
    """An instance. `parts` has its plan; in a gang, those of all its members in their order."""

    async def __init__(self, parts: Sequence[PartPlan], registry: Any) -> None:  # type: ignore[misc]
        gang = serve.get_replica_context().gang_context
        part = parts[0 if gang is None else gang.rank]
        if not isinstance(part.config, InstanceConfig):
            raise Internal(f"{part.role} is no instance")
        config = dataclasses.replace(
            part.config,
            name=_name(part),
            host=ray.util.get_node_ip_address(),
            http_port=0,
            door="probes",
            registry=await _registry_url(registry),
        )
        self._url = (await self._start(part, config)).door


class RayFrontend(RayProcess):
    """A frontend, and the way of Serve's requests to it."""

    #: Not `/ready`: without instances a frontend refuses requests, and another frontend would, too.
    health = "/health"

    async def __init__(self, part: PartPlan, registry: Any, *instances: Any) -> None:  # type: ignore[misc]
        if not isinstance(part.config, FrontendConfig):
            raise Internal(f"{part.role} is no frontend")
        config = dataclasses.replace(part.config, name=_name(part), registry=await _registry_url(registry))
        self._url = (await self._start(part, config)).url
        silence_s = config.limit.request_budget_s + _SILENCE_MARGIN_S
        self._through = PassThrough(self._url, silence_s=silence_s, limit=MAX_REQUESTS)

    async def __call__(self, request: Request) -> Response:
        """The frontend's answer; it is fetched as it is sent."""
        return _Passed(self._through)


class _Passed(Response):
    """A response that is another server's."""

    def __init__(self, through: PassThrough) -> None:
        super().__init__()
        self._through = through

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._through(scope, receive, send)


def _name(part: PartPlan) -> str:
    return f"{part.role.value}-{serve.get_replica_context().replica_id.unique_id}"


async def _registry_url(registry: Any) -> str:
    """The address of `registry`: itself, or what the actor of the registry answers."""
    if isinstance(registry, str):
        return registry
    async with asyncio.timeout(REGISTRY_S):
        return str(await registry.url.remote())
