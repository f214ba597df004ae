"""The HTTP endpoints of an instance in direct mode: its routes, and the server behind them.

That server (`server.direct.direct_server`) needs a tokenizer and sessions, which an instance that is
only probed does not: it is made when the first request comes that needs it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from segue.kv import DpRanks, Handles, LeaderId, Role
from segue.kv.session import Tls, awaited, typed
from segue.server.direct.direct_server import (
    DecodeDirectServer,
    DirectServer,
    OwnInstance,
    PrefillDirectServer,
    as_load,
)
from segue.server.fleet.fleet import Fleet
from segue.server.fleet.fleet_settings import FleetSettings
from segue.server.frontend.app import OPERATIONS, Asgi, OpenAIServerSettings, handlers
from segue.server.frontend.frontend_process import model_bounds
from segue.server.frontend.http_call import HttpCall, Receive, Scope, Send
from segue.server.frontend.refusals import model_object, model_of
from segue.server.frontend.sampling_defaults import of_model
from segue.server.frontend.tokenizer import ModelTokenizer
from segue.server.messages.control import Load
from segue.server.messages.records import Records
from segue.server.observe.metrics import Metrics
from segue.server.registry.client import InstanceWatch
from segue.server.registry.registry_records import InstanceRecord
from segue.server.settings.commands import InstanceConfig

_Handler = Callable[[Scope, Receive, Send], Awaitable[None]]


class LazyDirectServer:
    """Makes the direct-mode server of an instance at the first call of `opened`. `dp` are the DP ranks of the
    instance, `where` is its entry in the registry, `halves` are those of this process's leader."""

    def __init__(
        self,
        config: InstanceConfig,
        me: LeaderId,
        registry: InstanceWatch,
        *,
        dp: DpRanks,
        where: InstanceRecord,
        halves: Handles | None,
        tls: Tls | None,
    ) -> None:
        self.metrics = Metrics()
        self._config = config
        self._me = me
        self._registry = registry
        self._dp = dp
        self._where = where
        self._halves = halves
        self._tls = tls
        self._opening: asyncio.Task[DirectServer] | None = None
        self.server: DirectServer | None = None

    def counts(self) -> dict[str, int]:
        """Its counters for `/metrics`."""
        return {f"door_{name}": count for name, count in self.tables().items()}

    def tables(self) -> dict[str, int]:
        """Resources that requests hold here; all zero at rest."""
        return {} if self.server is None else self.server.sizes()

    async def close(self) -> None:
        """End what runs, and the server's sessions."""
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.gather(self._opening, return_exceptions=True)
        if self.server is not None:
            await self.server.fleet.close()
            self.server.close()

    async def opened(self) -> DirectServer:
        """The server. Raises ConfigError if the model's folder has no usable tokenizer."""
        if self.server is not None:
            return self.server
        if self._opening is None or self._opening.done():
            self._opening = awaited(self._open(), name="opening the direct-mode server")
        # A client that leaves must not take the others' server with it.
        return await asyncio.shield(self._opening)

    async def _open(self) -> DirectServer:
        config, limits = self._config, self._config.limit.limits()
        folder = Path(config.model)
        tokenizer = await asyncio.to_thread(ModelTokenizer.load, folder)
        context_tokens, vocab_size = model_bounds(folder, tokenizer)
        settings = OpenAIServerSettings(
            model=config.served_model,
            context_tokens=context_tokens,
            vocab_size=vocab_size,
            limits=limits,
            defaults=of_model(folder, vocab_size),
            access=config.access,
        )
        records = Records()
        # A router places its requests again by itself, elsewhere.
        listed = OwnInstance(self._registry, self._me.incarnation)
        fleet = Fleet(
            listed,
            FleetSettings(served_model=config.served_model, policy=config.load_balance, max_attempts=1),
            secret=config.secret or None,
            limits=limits,
            metrics=self.metrics,
            tls=self._tls,
            records=records,
        )
        common = (fleet, tokenizer, settings, self.metrics, records, self._me, self._halves)
        if config.role is Role.PREFILL:
            server: DirectServer = PrefillDirectServer(*common, dp=self._dp, where=self._where)
        elif config.role is Role.DECODE:
            server = DecodeDirectServer(*common, listed=listed)
        else:
            server = DirectServer(*common)
        fleet.start()
        self.server = server
        return server


def _handler(path: str, server: DirectServer) -> _Handler:
    found: _Handler = handlers(server, "POST")[path]
    return found


def direct_routes(
    lazy: LazyDirectServer,
    served_model: str,
    load: Callable[[], Load | None],
    answers: Callable[[], Awaitable[object]],
) -> list[BaseRoute]:
    """The routes of an instance that foreign routers use. `load` is the leader's last one, `answers` returns
    when the leader's loop has answered, and raises a SegueError if it does not."""

    def asgi(choose: Callable[[DirectServer], _Handler]) -> Asgi:
        async def handle(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                handler = choose(await lazy.opened())
            except Exception as error:
                await HttpCall(scope, receive).fail(typed(error, "opening the direct-mode server"))
                return
            await handler(scope, receive, send)

        return Asgi(handle)

    def post(path: str, choose: Callable[[DirectServer], _Handler]) -> Route:
        return Route(path, asgi(choose), methods=["POST"])

    def served() -> dict[str, object]:
        # The context is known once a request has come that needs the server.
        return model_object(served_model, lazy.server.card().context_tokens if lazy.server else 0)

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [served()]})

    async def model(request: Request) -> Response:
        return model_of(request, served())

    async def model_info(request: Request) -> Response:
        # No path: a router would look for it on a hub.
        return JSONResponse({"served_model_name": served_model, "is_generation": True})

    async def health_generate(request: Request) -> Response:
        await answers()
        return JSONResponse({"status": "ok"})

    def loads() -> list[dict[str, int]]:
        if lazy.server is not None and (found := lazy.server.loads()):
            return found
        own = load()
        return [] if own is None else [as_load(own)]

    async def get_load(request: Request) -> Response:
        return JSONResponse(loads())

    async def v1_loads(request: Request) -> Response:
        found = loads()
        return JSONResponse({"timestamp": time.time(), "dp_rank_count": len(found), "loads": found})

    async def flush_cache(request: Request) -> Response:
        try:
            await (await lazy.opened()).flush_cache()
        except Exception as error:
            raise typed(error, "flushing the cache") from error
        return JSONResponse({"status": "ok"})

    return [
        *(post(o.path, partial(_handler, o.path)) for o in OPERATIONS if o.method == "POST"),
        post("/generate", lambda server: server.native),
        post("/v1/chat/completions/render", lambda server: server.render_chat),
        post("/v1/completions/render", lambda server: server.render_completion),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/model_info", model_info),
        Route("/get_model_info", model_info),
        Route("/health_generate", health_generate),
        Route("/get_load", get_load),
        Route("/v1/loads", v1_loads),
        Route("/flush_cache", flush_cache, methods=["GET", "POST"]),
    ]
