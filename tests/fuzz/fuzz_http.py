"""The target at the public door's guard: bytes of a client, in pieces with pauses, into one connection.

Input: the first byte says into how many pieces the rest is cut, the second how long the client pauses in
between. Whatever was said: nothing raises, what is answered is HTTP, and in the end the connection is closed
and nothing of it is kept. Time is virtual.
"""

from __future__ import annotations

import asyncio
import socket
from functools import cache
from typing import Any

import httptools
from fuzz_changes import Target

from segue.server.frontend.http_server import HttpServer, public_guard
from segue.server.http.guarded_http import MAX_HEAD_BYTES, GuardedHttp
from segue.server.http.http_exchange import EXCHANGE

#: Seconds that a client pauses between two pieces; a head has 10, a request 75, an idle connection 75.
PAUSES_S = (0.0, 0.0, 0.5, 4.0, 11.0, 80.0)


class _Loop(asyncio.SelectorEventLoop):
    """Time passes when it is told to."""

    now_s = 0.0

    def time(self) -> float:
        return self.now_s


class _Wire(asyncio.Transport):
    """The bytes that the connection writes, and whether it was closed."""

    def __init__(self) -> None:
        super().__init__()
        self.said = b""
        self.closed = False
        self.paused = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"peername": ("10.0.0.1", 1), "sockname": ("10.0.0.2", 2)}.get(name, default)

    def write(self, data: Any) -> None:
        assert not self.closed, "written after the end"
        self.said += bytes(data)

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False


class _Answers:
    """Statuses of a client's side."""

    def __init__(self) -> None:
        self.statuses: list[int] = []
        self.parser = httptools.HttpResponseParser(self)

    def on_headers_complete(self) -> None:
        self.statuses.append(self.parser.get_status_code())


async def _app(scope: Any, receive: Any, send: Any) -> None:
    """Reads a body, unless the path says that it is not looked at, and answers after a turn of the loop, in
    ASGI's messages or as bytes."""
    if "now" not in scope["path"]:
        while (message := await receive())["type"] == "http.request" and message.get("more_body"):
            pass
    await asyncio.sleep(0)
    if "bytes" in scope["path"]:
        scope[EXCHANGE]().answer(200, [], b"ok")
        return
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@cache
def _setting() -> tuple[_Loop, HttpServer]:
    loop = _Loop()
    sock = socket.socket()
    try:
        return loop, HttpServer(_app, sock, drain_s=1, guard=public_guard(descriptors=1024))
    finally:
        sock.close()


def _guard(data: bytes) -> str:
    loop, server = _setting()
    pieces, pause_s = (
        1 + (data[0] if data else 0) % 8,
        PAUSES_S[(data[1] if len(data) > 1 else 0) % len(PAUSES_S)],
    )
    said, wire, failures = data[2:], _Wire(), []
    loop.set_exception_handler(lambda _, context: failures.append(context))

    async def turns() -> None:
        for _ in range(6):
            await asyncio.sleep(0)

    async def wait(seconds: float) -> None:
        until = loop.now_s + seconds
        while loop.now_s < until:
            loop.now_s = min(until, loop.now_s + 2.0)
            await turns()

    async def talk() -> GuardedHttp:
        connection: GuardedHttp = server._listener.connection_from("10.0.0.1")
        connection.connection_made(wire)
        step = max(1, -(-len(said) // pieces))
        for at in range(0, len(said), step):
            if wire.closed or wire.paused:
                break
            connection.data_received(said[at : at + step])
            await turns()
            assert connection._loose_bytes <= 2 * MAX_HEAD_BYTES
            await wait(pause_s)
        await wait(400.0)
        assert wire.closed, "a connection is held for ever"
        connection.connection_lost(None)
        await turns()
        return connection

    connection = loop.run_until_complete(talk())
    assert not failures, failures
    assert (server.pending, server.busy, len(server.server_state.connections)) == (0, 0, 0)
    assert connection._late._timer is None
    answers = _Answers()
    answers.parser.feed_data(wire.said)
    return " ".join(map(str, answers.statuses[:4]))


_WHOLE = b"GET /x HTTP/1.1\r\nhost: x\r\n\r\n"
_BODY = b"POST /x HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nhello"
_NOW = b"POST /now HTTP/1.1\r\nhost: x\r\ncontent-length: 50\r\n\r\nhello"
_BYTES = b"POST /bytes/now HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nhello"
_CHUNKED = b"POST /x HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n2;e=1\r\nok\r\n0\r\nt: v\r\n\r\n"
SAID = (
    _WHOLE,
    _BODY,
    _NOW,
    _BYTES,
    _CHUNKED,
    _WHOLE[:-2],
    b"\r\n",
    b"x: " + b"y" * 70_000,
    b"",
    b"\x16\x03\x01",
)


def _seeds() -> list[bytes]:
    """Each beginning at once, in pieces, and in pieces with pauses that are too long."""
    return [bytes(how) + said for said in SAID for how in ((0, 0), (3, 2), (1, 4), (7, 5))] + [
        b"\0\0" + _WHOLE * 40,
        b"\5\1" + _BODY + _WHOLE + _CHUNKED,
    ]


TARGETS: list[Target] = [Target("public_http", _seeds, _guard, found=(b"\7\0" + _BYTES,))]
