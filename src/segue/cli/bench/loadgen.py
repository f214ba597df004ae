"""A cheap HTTP client for measuring streams: one connection a worker, time taken when bytes arrive.

It speaks as much HTTP/1.1 as an OpenAI server needs (POST and GET, chunked or sized bodies, keep-alive,
TLS) and reads server-sent events. Time stamps are taken once per received piece of data.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

import httptools
import msgspec

from segue.kv import DECODE_ERRORS, ConfigError

MAX_BODY_BYTES = 64 * 2**20
MAX_EVENT_BYTES = 8 * 2**20
CONNECT_S = 10.0


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None


class _ChunkChoice(msgspec.Struct, frozen=True):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _ChunkUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Event(msgspec.Struct, frozen=True):
    """As much of one stream event as a measurement needs; other fields are skipped unparsed."""

    choices: list[_ChunkChoice] = []
    usage: _ChunkUsage | None = None
    error: object = None
    timeline: dict[str, float] | None = None

    def carries_tokens(self) -> bool:
        """True if the event brought output. A completion's event without text does too (a token
        that is half a character) unless it only ends the stream; a chat's role event does not."""
        for choice in self.choices:
            if choice.token_ids or choice.text or (choice.delta is not None and choice.delta.content):
                return True
            if choice.text is not None and choice.token_ids is None and choice.finish_reason is None:
                return True
        return False


_decode_event = msgspec.json.Decoder(Event).decode


@dataclass(frozen=True, slots=True)
class Target:
    """Where a server is: from a URL `http://HOST:PORT[/base]`."""

    host: str
    port: int
    base: str
    tls: ssl.SSLContext | None

    @classmethod
    def of(cls, url: str, tls: Callable[[], ssl.SSLContext] = ssl.create_default_context) -> Target:
        """Raises ConfigError for anything that is not an http(s) URL. `tls` makes the context for https."""
        try:
            parts = urlsplit(url)
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError:
            parts, port = urlsplit(""), 0
        if parts.scheme not in ("http", "https") or not parts.hostname or not port:
            raise ConfigError(f"URL must look like http://HOST:PORT, not {url!r}")
        base = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port, base, tls() if parts.scheme == "https" else None)


class Failure(Exception):
    """A request failed; its text is the kind of error that the report counts."""


class ClientConnection(asyncio.Protocol):
    """One keep-alive connection, one request at a time; reconnects when the server closed it."""

    def __init__(self, target: Target, headers: dict[str, str] | None = None) -> None:
        self._target = target
        self._headers = "".join(f"{k}: {v}\r\n" for k, v in (headers or {}).items())
        self._transport: asyncio.Transport | None = None
        self._sink: Callable[[bytes], None] | None = None
        self._done: asyncio.Future[int] | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._answered = False

    async def request(
        self, method: str, path: str, body: bytes, sink: Callable[[bytes], None], timeout_s: float
    ) -> int:
        """Send one request, pass its body on to `sink` as it arrives, return the status.
        Raises Failure: `connect`, `disconnected`, `timeout`, `protocol`."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._request(method, path, body, sink)
        except TimeoutError as exc:
            self.close()
            raise Failure("timeout") from exc
        except BaseException:
            self.close()
            raise

    async def _request(self, method: str, path: str, body: bytes, sink: Callable[[bytes], None]) -> int:
        reused = self._transport is not None
        try:
            return await self._exchange(method, path, body, sink)
        except Failure as exc:
            # A server may close an idle connection just as we use it again: not the request's fault.
            if not reused or self._answered or str(exc) != "disconnected":
                raise
            return await self._exchange(method, path, body, sink)

    async def _exchange(self, method: str, path: str, body: bytes, sink: Callable[[bytes], None]) -> int:
        loop = asyncio.get_running_loop()
        self._answered = False
        if self._transport is None:
            await self._connect()
        assert self._transport is not None
        self._done = loop.create_future()
        self._sink = sink
        self._parser = httptools.HttpResponseParser(self)
        target = self._target
        head = (
            f"{method} {target.base}{path} HTTP/1.1\r\nHost: {target.host}:{target.port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n{self._headers}\r\n"
        )
        self._transport.write(head.encode() + body)
        return await self._done

    async def _connect(self) -> None:
        target, loop = self._target, asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_S):
                await loop.create_connection(lambda: self, target.host, target.port, ssl=target.tls)
        except (OSError, TimeoutError) as exc:
            raise Failure("connect") from exc

    def close(self) -> None:
        """Close the connection; a request in flight is cancelled at the server by that."""
        if self._transport is not None:
            self._transport.abort()
        self._transport = None

    # ---- asyncio.Protocol ------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's, but have their methods.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._parser is None:
            return
        self._answered = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._finish(Failure("protocol"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._finish(Failure("disconnected"))

    # ---- httptools callbacks ---------------------------------------------------------------------

    def on_body(self, body: bytes) -> None:
        """httptools: a piece of the response's body."""
        if self._sink is None:
            return
        try:
            self._sink(body)
        except Failure as exc:
            self._sink = None
            self._finish(exc)

    def on_message_complete(self) -> None:
        """httptools: the response is complete."""
        parser, done = self._parser, self._done
        if parser is None or done is None or done.done():
            return
        status = parser.get_status_code()
        if not parser.should_keep_alive():
            self.close()
        done.set_result(status)

    def _finish(self, failure: Failure) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(failure)


class EventReader:
    """Cuts a body into server-sent events and calls `on_event` with each event's data."""

    def __init__(self, on_event: Callable[[bytes], None]) -> None:
        self._on_event = on_event
        self._rest = b""

    def feed(self, data: bytes) -> None:
        """Take the next piece of the body. Raises Failure for an event that is too long."""
        if self._rest:
            data = self._rest + data
        *lines, self._rest = data.split(b"\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise Failure("protocol")
        for line in lines:
            # One line of data an event is what OpenAI servers send; comments and names are skipped.
            if line.startswith(b"data:"):
                self._on_event(line[5:].strip())


@dataclass(slots=True)
class StreamResult:
    """The result of one streamed generation. `token_times` are those of the loop's monotonic clock."""

    token_times: list[float]
    end: float = 0.0
    usage: _ChunkUsage | None = None
    finished: bool = False
    error: str = ""
    timeline: dict[str, float] | None = None


async def stream(connection: ClientConnection, path: str, body: bytes, timeout_s: float) -> StreamResult:
    """Run one streamed generation and note when each of its tokens arrived. Never raises for what
    a server does: `error` then names the kind."""
    result = StreamResult([])

    def on_event(data: bytes) -> None:
        if data == b"[DONE]":
            result.finished = True
            return
        event = _decode_event(data)
        if event.error is not None:
            raise Failure("in_stream")
        if event.carries_tokens():
            result.token_times.append(now)
        if event.usage is not None:
            result.usage = event.usage
        if event.timeline is not None:
            result.timeline = event.timeline

    reader = EventReader(on_event)
    now = 0.0

    def sink(data: bytes) -> None:
        nonlocal now
        now = time.perf_counter()
        try:
            reader.feed(data)
        except DECODE_ERRORS as exc:
            raise Failure("protocol") from exc

    try:
        status = await connection.request("POST", path, body, sink, timeout_s)
        if status != 200:
            result.error = f"http_{status}"
        elif not result.finished:
            result.error = "cut_off"
        elif not result.token_times:
            result.error = "no_tokens"
    except Failure as exc:
        result.error = str(exc)
    result.end = time.perf_counter()
    return result


async def fetch_json(
    connection: ClientConnection, method: str, path: str, payload: object, timeout_s: float
) -> object:
    """The JSON answer of a plain request. Raises Failure, also for a status other than 200."""
    pieces: list[bytes] = []
    size = 0

    def sink(data: bytes) -> None:
        nonlocal size
        size += len(data)
        if size > MAX_BODY_BYTES:
            raise Failure("protocol")
        pieces.append(data)

    body = b"" if payload is None else msgspec.json.encode(payload)
    status = await connection.request(method, path, body, sink, timeout_s)
    if status != 200:
        raise Failure(f"http_{status}")
    try:
        return msgspec.json.decode(b"".join(pieces))
    except DECODE_ERRORS as exc:
        raise Failure("protocol") from exc
