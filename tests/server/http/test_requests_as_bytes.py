"""What the HTTP server makes of a client's bytes: offers of other protocols, and heads at their limit."""

from __future__ import annotations

import asyncio
import contextlib
import re
import ssl
from pathlib import Path
from typing import Any

import pytest

from segue.kv.session.listen import listening
from segue.server.http.guarded_http import MAX_HEAD_BYTES, Guard, GuardedServer
from tls_files import Authority

DEADLINE_S = 60.0
H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
WEBSOCKET = b"Upgrade: websocket\r\nconnection: keep-alive,upgrade\r\n"
INNER = b"GET /inner HTTP/1.1\r\nHost: x\r\n\r\n"
LAST = b"GET /last HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
Asked = list[tuple[str, bytes]]


async def asked_by(pieces: list[bytes], tls: Any = None) -> tuple[Asked, list[int]]:
    """The requests, path and body, that a server with one client reads in these pieces, and the statuses."""
    asked: Asked = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert b"upgrade" not in dict(scope["headers"])
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        asked.append((scope["path"], body))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    guard = Guard(head_s=DEADLINE_S, request_s=DEADLINE_S, max_requests=8, head_is_proof=True)
    server = GuardedServer(
        app,
        listening("127.0.0.1", 0, what="a test", flag="port"),
        guard=guard,
        drain_s=1.0,
        server_tls=None if tls is None else tls.server,
    )
    context = None
    if tls is not None:
        context = tls.client
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    await server.answering()
    try:
        async with asyncio.timeout(DEADLINE_S):
            reader, writer = await asyncio.open_connection(*server.address, ssl=context)
            said = b""
            with contextlib.suppress(ConnectionError):
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                    for _ in range(5):  # the server reads it by itself
                        await asyncio.sleep(0)
                while more := await reader.read(2**16):
                    said += more
            writer.close()
    finally:
        await server.stop()
    return asked, [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", said)]


def post(body: bytes, offer: bytes, *, chunked: bool = False) -> tuple[bytes, bytes]:
    """Head and body."""
    length = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: %d" % len(body)
    head = b"POST /asked HTTP/1.1\r\nHost: x\r\n" + offer + length + b"\r\n\r\n"
    return head, b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if chunked else body


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("offer", [H2C, WEBSOCKET], ids=["h2c", "websocket"])
@pytest.mark.parametrize("cut", ["together", "apart", "in the head"])
def test_an_offer_of_another_protocol_is_ignored(
    cut: str, offer: bytes, chunked: bool, tls: bool, tmp_path: Path
) -> None:
    """Its body, which may look like a request, was lost or read as the next one; so was what followed."""
    head, body = post(INNER, offer, chunked=chunked)
    pieces = {
        "together": [head + body + LAST],
        "apart": [head, body, LAST],
        "in the head": [head[:60], head[60:] + body[:9], body[9:], LAST],
    }[cut]
    asked, statuses = asyncio.run(asked_by(pieces, Authority(tmp_path).issue().load() if tls else None))
    assert asked == [("/asked", INNER), ("/last", b"")]
    assert statuses == [200, 200]


def test_offers_without_a_body_leave_the_requests_behind_them() -> None:
    offers = b"GET /offer HTTP/1.1\r\nHost: x\r\n" + H2C + b"\r\n"
    asked, statuses = asyncio.run(asked_by([offers * 5 + LAST]))
    assert [path for path, _ in asked] == ["/offer"] * 5 + ["/last"]
    assert statuses == [200] * 6


def test_an_offer_keeps_the_other_options_of_its_connection() -> None:
    offer = b"GET /offer HTTP/1.1\r\nHost: x\r\nConnection: close, Upgrade\r\nUpgrade: h2c\r\n\r\n"
    assert asyncio.run(asked_by([offer])) == ([("/offer", b"")], [200])


def test_a_request_for_a_tunnel_is_refused() -> None:
    assert asyncio.run(asked_by([b"CONNECT a:1 HTTP/1.1\r\nHost: a:1\r\n\r\n" + INNER])) == ([], [400])


def head_of(nbytes: int) -> bytes:
    head = LAST[:-2] + b"X-Big: "
    return head + b"a" * (nbytes - len(head) - 4) + b"\r\n\r\n"


@pytest.mark.parametrize("before", [0, 1, 3])
@pytest.mark.parametrize("piece", [2**20, 50_000, 4096])
@pytest.mark.parametrize(
    ("nbytes", "fits"),
    [(MAX_HEAD_BYTES, True), (MAX_HEAD_BYTES + 300, False), (90_000, False), (131_000, False)],
)
def test_a_head_is_counted_whatever_the_pieces(nbytes: int, fits: bool, piece: int, before: int) -> None:
    """One of 66,000 to 120,000 bytes was accepted: the count began again within it."""
    said = INNER * before + head_of(nbytes)
    asked, statuses = asyncio.run(asked_by([said[at : at + piece] for at in range(0, len(said), piece)]))
    assert (("/last", b"") in asked) is fits
    # A connection that ends with bytes that were not read is reset: its answer may be lost.
    assert statuses == [200] * (before + 1) if fits else statuses[-1:] in ([431], [200], [])


def test_one_byte_more_than_the_limit_is_refused() -> None:
    assert asyncio.run(asked_by([head_of(MAX_HEAD_BYTES + 1)]))[1] == [431]
