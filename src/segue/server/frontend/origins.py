"""Pages of other origins in browsers (CORS): which may ask, by `--allowed-origins`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

from segue.server.frontend.http_call import EXTRA_HEADERS, Receive, Scope, Send, request_id_of
from segue.server.http.http_exchange import Header

#: Headers of an answer that a page may read.
_EXPOSED: Final = b"x-request-id, x-segue-unknown-fields, retry-after"
_MAX_AGE_S: Final = b"600"


class Origins:
    """An ASGI application in front of `app`: answers browsers' questions before a request (which carry no API
    key), and tells them of each answer whether the page may read it. `*` in `allowed` is every origin."""

    def __init__(
        self, app: Callable[[Scope, Receive, Send], Awaitable[None]], allowed: frozenset[str]
    ) -> None:
        self._app = app
        self._allowed = frozenset(origin.encode() for origin in allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        origin = headers.get(b"origin", b"")
        if not origin or self._allowed.isdisjoint({origin, b"*"}):
            await self._app(scope, receive, send)
            return
        about: tuple[Header, ...] = (
            (b"access-control-allow-origin", b"*" if b"*" in self._allowed else origin),
            (b"vary", b"origin"),
            (b"access-control-expose-headers", _EXPOSED),
        )
        if scope["method"] == "OPTIONS" and b"access-control-request-method" in headers:
            asked = headers.get(b"access-control-request-headers", b"")
            more = (
                *about,
                (b"access-control-allow-methods", b"GET, POST"),
                (b"access-control-max-age", _MAX_AGE_S),
                (b"x-request-id", request_id_of(scope).encode()),
                *([(b"access-control-allow-headers", asked)] if asked else ()),
            )
            await send({"type": "http.response.start", "status": 204, "headers": more})
            await send({"type": "http.response.body", "body": b""})
            return
        scope[EXTRA_HEADERS] = about

        async def with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *about]}
            await send(message)

        await self._app(scope, receive, with_headers)
