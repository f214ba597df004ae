"""Requests passed through to an HTTP server of this host, each answer piece by piece as it comes.

An ASGI application. A caller whose client leaves cancels the call: the connection to the server is closed
then, and the server sees that its client has left.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any, Final
from urllib.parse import quote

import httpx2 as httpx
import msgspec

from segue.kv import Internal, PeerLost
from segue.server.http.guarded_http import ErrorBody

_Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[_Message]]
Send = Callable[[_Message], Awaitable[None]]

#: Headers that concern one connection, not the request (RFC 9110, 7.6.1).
_HOP: Final = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade"}
)
#: Characters of a path that stand for themselves (RFC 3986, 3.3), beside letters and digits.
_PATH: Final = "/:@!$&'()*+,;=-._~"
CONNECT_S: Final = 5.0


class PassThrough:
    """Passes to the server at `url`. `silence_s` bounds the wait for each piece of an answer, `limit` the
    requests at a time."""

    def __init__(self, url: str, *, silence_s: float, limit: int) -> None:
        self._url = httpx.URL(url)
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(silence_s, connect=CONNECT_S),
            limits=httpx.Limits(max_connections=limit),
            trust_env=False,
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def __call__(self, scope: _Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise Internal(f"only HTTP is passed through, not {scope['type']}")
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        target = quote(path or "/", safe=_PATH).encode()
        if scope["query_string"]:
            target += b"?" + scope["query_string"]
        headers = [(k, v) for k, v in scope["headers"] if k.lower() not in _HOP]
        has_body = any(k.lower() in (b"content-length", b"transfer-encoding") for k, _ in scope["headers"])
        request = self._client.build_request(
            scope["method"],
            self._url.copy_with(raw_path=target),
            headers=headers,
            content=_body(receive) if has_body else None,
        )
        try:
            answer = await self._client.send(request, stream=True)
        except httpx.TransportError as error:
            await _refuse(send, PeerLost(f"the frontend does not answer: {error!r}"))
            return
        try:
            kept = [(k.lower(), v) for k, v in answer.headers.raw if k.lower() not in _HOP]
            await send({"type": "http.response.start", "status": answer.status_code, "headers": kept})
            async for piece in answer.aiter_raw():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await answer.aclose()


async def _body(receive: Receive) -> AsyncIterator[bytes]:
    more = True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            return
        yield message.get("body", b"")
        more = message.get("more_body", False)


async def _refuse(send: Send, error: PeerLost) -> None:
    headers = [(b"content-type", b"application/json"), (b"retry-after", b"1")]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": msgspec.json.encode(ErrorBody(error.info))})
