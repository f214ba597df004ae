"""Requests passed through to a real HTTP server: bodies, streams, clients that leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from segue.kv import Internal
from segue.kv.session import listening
from segue.server.http.guarded_http import Guard, GuardedServer
from segue.server.http.pass_through import PassThrough


class Upstream:
    """Echoes, or streams a piece for each `more` until it is `done`."""

    def __init__(self) -> None:
        self.more: asyncio.Queue[bytes] = asyncio.Queue()
        self.left = asyncio.Event()
        self.seen: dict[str, Any] = {}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.seen = scope
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        if scope["path"] == "/stream":
            await self._stream(receive, send)
            return
        headers = [(b"x-from", b"there"), (b"x-from", b"again"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": 418, "headers": headers})
        await send({"type": "http.response.body", "body": scope["raw_path"] + b"|" + body})

    async def _stream(self, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        gone = asyncio.ensure_future(receive())
        while True:
            piece = asyncio.ensure_future(self.more.get())
            await asyncio.wait({gone, piece}, return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                piece.cancel()
                self.left.set()
                return
            await send(
                {"type": "http.response.body", "body": piece.result(), "more_body": bool(piece.result())}
            )
            if not piece.result():
                gone.cancel()
                return


@asynccontextmanager
async def passing(limit: int = 8) -> AsyncIterator[tuple[PassThrough, Upstream]]:
    upstream = Upstream()
    sock = listening("127.0.0.1", 0, what="a test", flag="--port")
    guard = Guard(head_s=10, request_s=10, max_requests=16, head_is_proof=True)
    server = GuardedServer(upstream, sock, guard=guard, drain_s=0.1)
    server.start()
    through = PassThrough("http://{}:{}".format(*server.address), silence_s=30, limit=limit)
    try:
        async with asyncio.timeout(60):
            yield through, upstream
    finally:
        await through.close()
        await server.stop()


class Client:
    """One ASGI call: `pieces` are the answer's."""

    def __init__(self, path: str, query: bytes = b"", body: tuple[bytes, ...] = (), **scope: Any) -> None:
        length = [(b"content-length", b"%d" % sum(map(len, body)))] if body else []
        self.scope = {
            "type": "http",
            "method": "POST" if body else "GET",
            "path": path,
            "query_string": query,
            "headers": [(b"host", b"me"), (b"x-mine", b"1"), (b"keep-alive", b"3"), *length],
            **scope,
        }
        self.body = list(body)
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.pieces: asyncio.Queue[bytes | None] = asyncio.Queue()

    async def receive(self) -> dict[str, Any]:
        piece = self.body.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(self.body)}

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], list(message["headers"])
            return
        if message.get("body"):
            self.pieces.put_nowait(message["body"])
        if not message.get("more_body"):
            self.pieces.put_nowait(None)

    async def all(self) -> bytes:
        found = b""
        while (piece := await self.pieces.get()) is not None:
            found += piece
        return found


def test_path_query_headers_and_body_arrive_unchanged() -> None:
    async def run() -> None:
        async with passing() as (through, upstream):
            client = Client("/v1/a b%", b"q=1&r=%20", (b"one", b"", b"two"))
            await through(client.scope, client.receive, client.send)
            assert (client.status, await client.all()) == (418, b"/v1/a%20b%25|onetwo")
            assert [value for name, value in client.headers if name == b"x-from"] == [b"there", b"again"]
            assert b"connection" not in dict(client.headers)
            asked = dict(upstream.seen["headers"])
            assert (asked[b"x-mine"], asked[b"host"], asked[b"content-length"]) == (b"1", b"me", b"6")
            assert b"keep-alive" not in asked
            assert upstream.seen["query_string"] == b"q=1&r=%20"
            below = Client("/segue/health", root_path="/segue")
            await through(below.scope, below.receive, below.send)
            assert await below.all() == b"/health|"

    asyncio.run(run())


def test_each_piece_of_a_stream_comes_before_the_next_one_exists() -> None:
    async def run() -> None:
        async with passing() as (through, upstream):
            client = Client("/stream")
            call = asyncio.ensure_future(through(client.scope, client.receive, client.send))
            for piece in (b"data: 1\n\n", b"data: 2\n\n"):
                upstream.more.put_nowait(piece)
                assert await client.pieces.get() == piece
            assert not call.done()
            upstream.more.put_nowait(b"")
            assert await client.all() == b""
            await call

    asyncio.run(run())


def test_a_client_that_leaves_is_seen_by_the_server_and_frees_its_place() -> None:
    async def run() -> None:
        async with passing(limit=1) as (through, upstream):
            client = Client("/stream")
            call = asyncio.ensure_future(through(client.scope, client.receive, client.send))
            upstream.more.put_nowait(b"x")
            await client.pieces.get()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await upstream.left.wait()
            again = Client("/echo")
            await through(again.scope, again.receive, again.send)
            assert again.status == 418

    asyncio.run(run())


def test_without_a_server_the_client_gets_a_retryable_error() -> None:
    async def run() -> None:
        through = PassThrough("http://127.0.0.1:9", silence_s=5, limit=1)
        client = Client("/v1/models")
        await through(client.scope, client.receive, client.send)
        assert client.status == 503
        assert b'"PEER_LOST"' in await client.all()
        assert dict(client.headers)[b"retry-after"] == b"1"
        with pytest.raises(Internal, match="only HTTP is passed through, not websocket"):
            await through({"type": "websocket"}, client.receive, client.send)
        await through.close()

    asyncio.run(run())
