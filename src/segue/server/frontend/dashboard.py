"""`/dashboard`: one page, the events that it lives from, and the timeline of a request.

With several API keys a client sees its own requests, as this frontend knows them, unless its key is an
operator's.

While nobody looks, nothing runs: the first viewer starts the looks, the last one ends them.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.resources
import re
import time
from base64 import b64encode
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Final

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from segue import __version__
from segue.kv import AbortedByClient, OutOfCapacity, SegueError
from segue.kv.errors import NotFound
from segue.kv.session import background, keep_running
from segue.server.fleet.call import Signal
from segue.server.fleet.fleet import Fleet
from segue.server.fleet.fleet_view import (
    LOOK_S,
    MAX_LATEST,
    PATH,
    WINDOW_S,
    Change,
    FleetView,
    Window,
    error_views,
    link_views,
    percentiles,
    replica_views,
    request_views,
    totals,
)
from segue.server.fleet.life import Life, life_of
from segue.server.fleet.operator import DIGITS, Operator, Row
from segue.server.frontend.app import Asgi
from segue.server.frontend.http_call import KEY_OWNER, HttpCall, KeyOwner, Receive, Scope, Send
from segue.server.messages.records import check_name
from segue.server.observe.metrics import Metrics

#: Viewers at one time; each has a connection.
MAX_VIEWERS: Final = 32
#: Timelines that are asked for at one time; each asks all leaders.
MAX_QUESTIONS: Final = 8
#: Time without reading after which a viewer is cut.
STALL_S: Final = 30.0


class Dashboard:
    """The dashboard of one frontend. `open_operator` opens a view of the fleet for the links between
    instances and for timelines."""

    def __init__(
        self,
        fleet: Fleet,
        metrics: Metrics,
        *,
        model: str,
        open_operator: Callable[[], AbstractAsyncContextManager[Operator]],
    ) -> None:
        self._fleet = fleet
        self._metrics = metrics
        self._model = model
        self._asker = SharedOperator(open_operator)
        self._questions = 0
        self._started_s = time.monotonic()
        self._page = importlib.resources.files(__package__).joinpath("dashboard.html").read_bytes()
        self._headers = _page_headers(self._page)
        #: by the tenant whose requests they see; the empty one sees all
        self._viewers: Counter[str] = Counter()
        self._looking: asyncio.Task[None] | None = None
        self._latest: dict[str, bytes] = {}
        self._news = Signal()
        self._closed = False
        self._rows: list[Row] = []
        self._trouble = ""
        self._error: SegueError | None = None

    def routes(self) -> list[BaseRoute]:
        """The routes below `PATH`."""
        return [
            Route(PATH, self.page, methods=["GET"]),
            Route(f"{PATH}/events", Asgi(self.events), methods=["GET"]),
            Route(f"{PATH}/requests/{{name:path}}", Asgi(self.timeline), methods=["GET"]),
        ]

    async def close(self) -> None:
        """End the viewers' streams."""
        self._closed = True
        self._news.notify()
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        await self._asker.close()

    # ---- what clients ask -----------------------------------------------------------------------

    async def page(self, request: HttpRequest) -> Response:
        """The page, which asks for nothing but the other two."""
        return Response(self._page, headers=self._headers)

    async def events(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A `FleetView` as JSON each second, as server-sent events."""

        async def work(call: HttpCall) -> None:
            if self._viewers.total() >= MAX_VIEWERS:
                raise OutOfCapacity(f"{MAX_VIEWERS} viewers look already; close one")
            stream = call.stream(stall_s=STALL_S)
            try:
                async with contextlib.aclosing(self._views(scope.get(KEY_OWNER, KeyOwner()).sees)) as views:
                    async for view in views:
                        behind = stream.events(b"data: %b\n\n" % view)
                        if behind is not None:
                            await behind()
                await stream.end()
            finally:
                stream.close()

        await _answered(scope, receive, work)

    async def timeline(self, scope: Scope, receive: Receive, send: Send) -> None:
        """All that the fleet knows of one request, as `segue explain --json` prints it."""
        name, tenant = scope["path_params"]["name"], scope.get(KEY_OWNER, KeyOwner()).sees

        async def work(call: HttpCall) -> None:
            check_name(name)
            if tenant:
                # No leader knows whose request it is, and another client may have used the same id.
                own = [record for record in self._fleet.explain(name) if record.tenant == tenant]
                life = life_of(name, [own], [])
            else:
                life = await self._asked(name)
            if not life.parts:
                raise NotFound(f"no process knows the request {name[:128]!r} any more")
            await call.answer(200, life)

        await _answered(scope, receive, work)

    async def _asked(self, name: str) -> Life:
        if self._questions >= MAX_QUESTIONS:
            raise OutOfCapacity(f"{MAX_QUESTIONS} timelines are asked for already; try again")
        self._questions += 1
        try:
            async with self._asker.operator() as operator:
                return await operator.explain(name)
        finally:
            self._questions -= 1

    # ---- the looks ------------------------------------------------------------------------------

    async def _views(self, tenant: str) -> AsyncGenerator[bytes, None]:
        """Each look from now on, as `tenant` sees it; one that a slow viewer misses is left out."""
        self._viewers[tenant] += 1
        if self._looking is None:
            self._error = None
            self._looking = background(self._look(), name="the dashboard", failed=self._failed)
        seen = b""
        try:
            while not self._closed:
                latest = self._latest.get(tenant, b"")
                if latest is not seen:
                    seen = latest
                    yield seen
                elif self._error is not None:
                    raise self._error.info.exception()
                else:
                    await self._news.wait()
        finally:
            self._viewers[tenant] -= 1
            self._viewers += Counter()  # without those of whom none is left
            if not self._viewers and self._looking is not None:
                self._looking.cancel()
                self._looking, self._latest, self._rows, self._trouble = None, {}, [], ""

    async def _look(self) -> None:
        window = Window()
        asking = keep_running(self._ask, name="the links of the dashboard", failed=self._links_are_old)
        try:
            while True:
                now = time.monotonic()
                change = window.add(totals(self._metrics, now))
                self._latest = {
                    tenant: msgspec.json.encode(self._view(change, now, tenant)) for tenant in self._viewers
                }
                self._news.notify()
                await asyncio.sleep(LOOK_S)
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    async def _ask(self) -> None:
        """Keep the rows of all leaders; a leader that does not answer delays its own row and the next round,
        not the looks."""
        async with self._asker.operator() as operator:
            while True:
                self._rows, self._trouble = await operator.ps(), ""
                await asyncio.sleep(2 * LOOK_S)

    def _links_are_old(self, error: SegueError) -> None:
        self._trouble = f"links between instances are old: {error.info.text}"

    def _failed(self, error: SegueError) -> None:
        self._error = error
        self._news.notify()

    def _view(self, change: Change, now: float, tenant: str) -> FleetView:
        fleet, records = self._fleet, self._fleet.records
        first, last = change.first, change.last
        latest = request_views(
            fleet.live(MAX_LATEST // 2, tenant), records.latest("http", MAX_LATEST, tenant), now
        )
        ready = fleet.can_serve and fleet.proven
        others = {
            name[:DIGITS] for row in self._rows if row.sight is not None for name in row.sight.frontends
        }
        return FleetView(
            model=self._model,
            frontend=fleet.membership.name,
            frontends=sorted(others),
            version=__version__,
            uptime_s=now - self._started_s,
            ready=ready,
            reason=""
            if ready
            else "no request has completed yet"
            if fleet.can_serve
            else fleet.lacking().info.text,
            answering=fleet.in_flight,
            window_s=min(WINDOW_S, change.seconds),
            requests_per_s=change.rate(sum(first.outcomes.values()), sum(last.outcomes.values())),
            tokens_per_s=change.rate(first.tokens, last.tokens),
            ttft_ms=percentiles(first.ttft, last.ttft),
            itl_ms=percentiles(first.itl, last.itl),
            ttft_parts_ms=change.parts_ms,
            replicas=replica_views(fleet.membership.replicas.values()),
            links=link_views(self._rows),
            requests=latest,
            errors=error_views(last.outcomes, latest),
            trouble=self._trouble,
        )


class SharedOperator:
    """One operator for all who ask at the same time: `open_operator` makes it for the first, and it is closed
    after the last."""

    def __init__(self, open_operator: Callable[[], AbstractAsyncContextManager[Operator]]) -> None:
        self._open = open_operator
        self._changing = asyncio.Lock()
        self._opened = AsyncExitStack()
        self._operator: Operator | None = None
        self._users = 0

    @asynccontextmanager
    async def operator(self) -> AsyncIterator[Operator]:
        """The operator, open while inside."""
        self._users += 1
        try:
            async with self._changing:
                if self._operator is None:
                    self._operator = await self._opened.enter_async_context(self._open())
            yield self._operator
        finally:
            self._users -= 1
            await self.close()

    async def close(self) -> None:
        """Close it unless somebody uses it."""
        async with self._changing:
            if not self._users:
                self._operator = None
                await self._opened.aclose()


async def _answered(scope: Scope, receive: Receive, work: Callable[[HttpCall], Awaitable[None]]) -> None:
    """Run `work` for one request. It is none of the requests that a drain waits for."""
    call = HttpCall(scope, receive)
    try:
        async with call:
            await work(call)
    except AbortedByClient:
        return
    except SegueError as error:
        await call.fail(error.with_traceback(None))


def _page_headers(page: bytes) -> dict[str, str]:
    """Headers that let the page run its own script and style, and ask this server alone."""
    allowed = {
        name: " ".join(
            f"'sha256-{b64encode(hashlib.sha256(text).digest()).decode()}'"
            for text in re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), page, re.DOTALL)
        )
        for name, tag in (("script-src", b"script"), ("style-src", b"style"))
    }
    policy = "; ".join(f"{name} {hashes}" for name, hashes in allowed.items())
    policy = f"default-src 'none'; connect-src 'self'; frame-ancestors 'none'; {policy}"
    return {
        "content-type": "text/html; charset=utf-8",
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
