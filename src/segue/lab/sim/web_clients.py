"""Clients of the public HTTP server: honest, slow, silent, endless, too many. The honest notice no other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

import httptools

from segue.kv.errors import OutOfCapacity
from segue.lab.sim.outsider import Outsider, RawConnection
from segue.lab.sim.web_server import HEAD_S, HOST, IDLE_S, MEMBERS, PENDING, PIECE_S, PIECES, PORT, REQUEST_S
from segue.server.http.guarded_http import MAX_HEAD_BYTES, MAX_PIPELINED

if TYPE_CHECKING:
    from segue.lab.sim.deployment import Deployment

#: Latency, and a turn of the server.
GRACE_S = 0.3
#: What `/stream` answers.
WHOLE = (200, b"".join(PIECES))
ASK = b"GET /echo HTTP/1.1\r\nhost: a\r\n\r\n"
STREAM = b"GET /stream HTTP/1.1\r\nhost: a\r\n\r\n"
CHUNKED = b"POST /echo HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"
HONEST = ("asks", "posts in pieces", "streams", "asks ahead")


def post(length: int, path: bytes = b"/echo") -> bytes:
    """The head of a request with `length` bytes of body."""
    return b"POST %b HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % (path, length)


class WebConnection(RawConnection):
    """A connection that hears answers: status and body of each."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[tuple[int, bytes]] = []
        #: what has come of the body of an answer that is not complete
        self.unfinished = b""
        self._parser = httptools.HttpResponseParser(self)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._parser.feed_data(data)

    def on_body(self, data: bytes) -> None:
        """A piece of a body."""
        self.unfinished += data

    def on_message_complete(self) -> None:
        """All of an answer is there."""
        self.answers.append((self._parser.get_status_code(), self.unfinished))
        self.unfinished = b""

    def write(self, data: bytes) -> None:
        """Send it, if anybody is there to hear it."""
        self.transport.write(data)

    async def answer(self, number: int = 1) -> None:
        """Wait for so many answers, or for the end."""
        while len(self.answers) < number and not self.ended.is_set():
            self.news.clear()
            await self.news.wait()


class WebClient(Outsider):
    """One client; of the honest ones each comes from an address of its own."""

    WHAT, DONE = "http", "web clients"

    def __init__(self, deployment: Deployment, name: str, kind: str) -> None:
        host = f"127.0.7.{1 + deployment.world.rng(f'{name} comes from').randrange(4)}"
        if kind in HONEST:
            host = f"127.0.8.{1 + len(deployment.visitors) % 250}"
        super().__init__(deployment, name, kind, host)
        self.server = deployment.web
        self._dropped = self.dropped

    @property
    def dropped(self) -> int:
        """How many had to go for others until now: of those who had sent no head, only the like of this one.
        One that is alone at its address, which a translator would hide, goes when everybody is."""
        counts = self.server.server.counts if self.server is not None else {}
        alone = self.kind in HONEST and not self.deployment.network.translator
        pending = counts.get("pending_dropped_among_equals" if alone else "pending_dropped", 0)
        return counts.get("members_dropped", 0) + pending

    @property
    def undisturbed(self) -> bool:
        return self.server is not None and not self.server.closing

    def excused(self, raw: WebConnection) -> bool:
        """All places are taken by answers, so it was told to come again; or somebody had to go for others,
        who waited for nothing or had not sent all, and this may be it."""
        full = self.server is not None and (self.server.full or self.server.full_at >= self.began_at)
        told = [status for status, _ in raw.answers if status != 200]
        return (full and told == [OutOfCapacity.status]) or (
            self.dropped > self._dropped and not told and not raw.unfinished
        )

    async def visits(self) -> None:
        """What it comes for."""
        await WEB_CLIENTS[self.kind](self)
        if self.server is not None and not self.server.closing:
            self.server.check()

    async def connection(self) -> WebConnection | None:
        """A connection to the server."""
        return await self.types(WebConnection, HOST, PORT)

    async def crowd(self, data: bytes, count: int) -> list[WebConnection]:
        """So many connections, on each of which it sends `data` at once."""
        found: list[WebConnection] = []
        for _ in range(count):
            if (raw := await self.connection()) is not None:
                raw.write(data)
                found.append(raw)
            if self.server is not None and not self.server.closing:
                self.server.check()
        return found

    def was_told(self, raw: WebConnection, *answers: tuple[int, bytes]) -> None:
        """It was given these answers, and no others."""
        if raw.answers != list(answers) and not self.excused(raw):
            self.wrong(f"was answered {raw.answers}, not {answers}")

    async def is_told(self, raw: WebConnection, status: int, within_s: float) -> None:
        """It is told so, once, and its connection ends in time."""
        await self.is_cut(raw, within_s, GRACE_S)
        if [code for code, _ in raw.answers] != [status] and not self.excused(raw):
            self.wrong(f"was told {raw.answers}, not {status}")


# ---- honest ones ----------------------------------------------------------------------------------


async def _asks(client: WebClient) -> None:
    """Twice on one connection, which ends when nothing more is asked."""
    raw = await client.connection()
    if raw is None:
        return
    raw.write(ASK)
    await raw.answer()
    client.was_told(raw, (200, b""))
    if not raw.ended.is_set():
        raw.write(post(4) + b"body")
        await raw.answer(2)
        await client.is_cut(raw, IDLE_S, GRACE_S)
        client.was_told(raw, (200, b""), (200, b"body"))


async def _posts(client: WebClient) -> None:
    """A body in pieces, within its time."""
    raw = await client.connection()
    if raw is None:
        return
    raw.write(post(30))
    for _ in range(3):
        await asyncio.sleep(0.2 * REQUEST_S)
        raw.write(b"0123456789")
    await raw.answer()
    client.was_told(raw, (200, b"0123456789" * 3))
    raw.transport.abort()


async def _streams(client: WebClient) -> None:
    """An answer that takes longer than a request may: whoever is being answered is never cut."""
    raw = await client.connection()
    if raw is not None:
        raw.write(STREAM)
        await raw.answer()
        client.was_told(raw, WHOLE)
        raw.transport.abort()


async def _asks_ahead(client: WebClient) -> None:
    """Asks again while it is being answered, also for longer than a head may take."""
    raw = await client.connection()
    if raw is not None:
        raw.write(STREAM)
        await asyncio.sleep(client.rng.random() * PIECE_S * len(PIECES))
        raw.write(ASK * 3)
        await raw.answer(4)
        client.was_told(raw, WHOLE, *[(200, b"")] * 3)
        raw.transport.abort()


# ---- the rest -------------------------------------------------------------------------------------


def _sends(kind: str, data: Callable[[WebClient], bytes], status: int, within_s: float) -> None:
    """It sends `data` and nothing more; it is told `status` (0: nothing), and its connection ends."""

    async def sends(client: WebClient) -> None:
        raw = await client.connection()
        if raw is None:
            return
        raw.write(data(client))
        if status:
            await client.is_told(raw, status, within_s)
        else:
            await client.is_cut(raw, within_s, GRACE_S)
            client.was_told(raw)

    WEB_CLIENTS[kind] = sends


async def _drips(client: WebClient) -> None:
    """A head, byte by byte: its time is from its first byte."""
    raw = await client.connection()
    if raw is not None:
        raw.write(ASK[:-2] + b"x: ")
        cut = asyncio.ensure_future(client.is_told(raw, 408, HEAD_S))
        while not cut.done():
            raw.write(b"x")
            await asyncio.wait({cut}, timeout=0.1)
        await cut


async def _half_of_the_next(client: WebClient) -> None:
    """A request, and half of another one after which nothing comes."""
    raw = await client.connection()
    if raw is not None:
        raw.write(ASK + ASK[:10])
        await client.is_cut(raw, HEAD_S, GRACE_S)
        if [status for status, _ in raw.answers] != [200, 408] and not client.excused(raw):
            client.wrong(f"was told {raw.answers}, not 200 and 408")


async def _early(client: WebClient) -> None:
    """It was answered before its body came, which never does."""
    raw = await client.connection()
    if raw is not None:
        raw.write(post(100, b"/early"))
        await client.is_cut(raw, REQUEST_S, GRACE_S)
        client.was_told(raw, (200, b""))


async def _asks_too_much(client: WebClient) -> None:
    """More requests ahead of their answers than anybody may send."""
    raw = await client.connection()
    if raw is not None:
        raw.write(STREAM + ASK * (MAX_PIPELINED + 2))
        await client.is_cut(raw, 0.0, GRACE_S)
        client.was_told(raw)


async def _leaves(client: WebClient) -> None:
    """It leaves in the middle of its answer: the handler hears so."""
    raw = await client.connection()
    if raw is None or client.server is None:
        return
    raw.write(client.rng.choice((STREAM, STREAM + ASK, post(9))))
    await asyncio.sleep(client.rng.random())
    raw.transport.abort()
    await asyncio.sleep(GRACE_S)
    client.server.check()


async def _crowd(client: WebClient, data: bytes, count: int, within_s: float) -> None:
    """Many connections at once: the places are bounded, and each connection ends in time."""
    for raw in await client.crowd(data, count):
        await client.is_cut(raw, within_s, GRACE_S)


async def _silent_crowd(client: WebClient) -> None:
    await _crowd(client, b"", 4 * PENDING, HEAD_S)


async def _idle_crowd(client: WebClient) -> None:
    await _crowd(client, ASK, MEMBERS + 8, IDLE_S)


async def _uploading_crowd(client: WebClient) -> None:
    await _crowd(client, post(100) + b"half", MEMBERS + 8, REQUEST_S)


async def _streaming_crowd(client: WebClient) -> None:
    """All places are taken by answers: who comes then is told to come again, and no answer is cut."""
    for raw in await client.crowd(STREAM, MEMBERS + 4):
        await raw.answer()
        if [status for status, _ in raw.answers] != [OutOfCapacity.status]:
            client.was_told(raw, WHOLE)
        raw.transport.abort()


WEB_CLIENTS: dict[str, Callable[[WebClient], Coroutine[Any, Any, None]]] = {
    "asks": _asks,
    "posts in pieces": _posts,
    "streams": _streams,
    "asks ahead": _asks_ahead,
    "drips": _drips,
    "half of the next": _half_of_the_next,
    "answered early": _early,
    "asks too much": _asks_too_much,
    "leaves": _leaves,
    "silent crowd": _silent_crowd,
    "idle crowd": _idle_crowd,
    "uploading crowd": _uploading_crowd,
    "streaming crowd": _streaming_crowd,
}
_sends("says nothing", lambda _: b"", 0, HEAD_S)
_sends("half a head", lambda client: ASK[: client.rng.randrange(4, len(ASK) - 1)], 408, HEAD_S)
_sends("half a body", lambda _: post(100) + b"half", 408, REQUEST_S)
_sends("long head", lambda _: ASK[:-2] + b"x: " + b"x" * (MAX_HEAD_BYTES + 9), 431, 0.0)
_sends("long trailers", lambda _: CHUNKED + b"0\r\nx: " + b"x" * (2 * MAX_HEAD_BYTES), 431, 0.0)
_sends("noise", lambda client: b"\x00" + client.rng.randbytes(99), 400, 0.0)
_sends("tls", lambda _: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", 400, 0.0)
WEB_KINDS = tuple(WEB_CLIENTS)
