"""One HTTP request: its body in, its answer or error out, and the client's leaving in between."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from types import TracebackType
from typing import Any

import msgspec

from segue.core.errors import AbortedByClient, OutOfCapacity, RequestTimeout, RequestTooLarge, SegueError
from segue.frontend.problems import RETRY_AFTER_S, body_of
from segue.session.guarded_http import TRANSPORT
from segue.session.tasks import background

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

MAX_REQUEST_ID_CHARS = 128
_UNSAFE = re.compile(r"[^A-Za-z0-9._:-]")

_JSON = (b"content-type", b"application/json")
_SSE = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
_encode = msgspec.json.Encoder().encode


class BodyBudget:
    """Bytes of request bodies that are in memory at one time, over all connections."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.used_bytes = 0

    def take(self, nbytes: int) -> None:
        if self.used_bytes + nbytes > self._limit_bytes:
            raise OutOfCapacity("too many request bodies are being read")
        self.used_bytes += nbytes

    def give_back(self, nbytes: int) -> None:
        self.used_bytes -= nbytes


def request_id_of(scope: Scope) -> str:
    """The client's X-Request-ID made harmless for headers and logs, or a fresh one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            wanted = _UNSAFE.sub("", value.decode("latin-1"))[:MAX_REQUEST_ID_CHARS]
            if wanted:
                return wanted
    return secrets.token_hex(16)


class HttpCall:
    """The exchange with one client. `gone` once it has left; `begun` once a status was sent."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self.id = request_id_of(scope)
        self.status = 0
        self.begun = False
        self.gone = False
        self._finished = False
        self._id_header = (b"x-request-id", self.id.encode())

    # ---- in -------------------------------------------------------------------------------------

    async def body(self, limit_bytes: int, budget: BodyBudget, *, timeout_s: float) -> bytes:
        """The whole body. RequestTooLarge beyond `limit_bytes`; what is too much is read and dropped, within
        reason, because a client that is still writing would not see the answer."""
        pieces: list[bytes] = []
        held = seen = 0
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        self.gone = True
                        raise AbortedByClient("the client left while sending its request")
                    piece = message.get("body", b"")
                    seen += len(piece)
                    if seen <= limit_bytes:
                        budget.take(len(piece))
                        held += len(piece)
                        pieces.append(piece)
                    else:
                        pieces.clear()
                    if not message.get("more_body", False) or seen > 8 * limit_bytes:
                        break
        except TimeoutError:
            raise RequestTimeout(f"the body did not arrive within {timeout_s:g} s") from None
        finally:
            budget.give_back(held)
        if seen > limit_bytes:
            raise RequestTooLarge(f"the body has more than {limit_bytes} bytes")
        return b"".join(pieces)

    # ---- the client's leaving -------------------------------------------------------------------

    async def __aenter__(self) -> HttpCall:
        """While inside, the client's leaving cancels the current task (`gone` is then set)."""
        task = asyncio.current_task()
        assert task is not None
        self._watcher = background(
            self._watch(task), name="watching for the client's leaving", failed=lambda _: self._left(task)
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watcher.cancel()
        if self.gone and kind is asyncio.CancelledError:
            task = asyncio.current_task()
            assert task is not None
            if task.uncancel() == 0:
                raise AbortedByClient("the client closed the connection") from None

    async def _watch(self, main: asyncio.Task[Any]) -> None:
        while not self._finished:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self._left(main)
                return

    def _left(self, main: asyncio.Task[Any]) -> None:
        if not self._finished:
            self.gone = True
            main.cancel()

    def header(self, name: bytes) -> str | None:
        """What the client says under `name` (lower case), if it does."""
        found = (value for key, value in self._scope["headers"] if key == name)
        value: bytes | None = next(found, None)
        return None if value is None else value.decode("latin-1")

    # ---- out ------------------------------------------------------------------------------------

    async def answer(
        self, status: int, body: object, *, headers: tuple[tuple[bytes, bytes], ...] = ()
    ) -> None:
        """Send a whole JSON answer."""
        await self.answer_raw(status, _encode(body), (_JSON, *headers))

    async def answer_raw(
        self, status: int, raw: bytes, headers: tuple[tuple[bytes, bytes], ...] = ()
    ) -> None:
        self.begun = True
        self.status = status
        length = (b"content-length", str(len(raw)).encode())
        await self._send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [*headers, length, self._id_header],
            }
        )
        self._finished = True
        await self._send({"type": "http.response.body", "body": raw})

    async def fail(self, error: SegueError) -> None:
        """Send an error: as the status if there is none yet, else as the stream's last event."""
        if self.gone:
            self.status = AbortedByClient.status
            return
        if self.begun:
            raw = b"data: " + _encode(body_of(error)) + b"\n\ndata: [DONE]\n\n"
            self._finished = True
            await self._send({"type": "http.response.body", "body": raw})
            return
        status = type(error).status
        headers: tuple[tuple[bytes, bytes], ...] = ()
        if status in (429, 503):
            headers = ((b"retry-after", str(RETRY_AFTER_S).encode()),)
        elif status in (408, 413):
            headers = ((b"connection", b"close"),)
        await self.answer(status, body_of(error), headers=headers)

    def stream(self, *, stall_s: float) -> EventStream:
        """An answer of events. The status goes out with the first of them."""
        return EventStream(self, self._send, self._scope.get(TRANSPORT), stall_s)

    async def start_stream(self) -> None:
        self.begun = True
        self.status = 200
        await self._send({"type": "http.response.start", "status": 200, "headers": [*_SSE, self._id_header]})

    def finish_stream(self) -> None:
        self._finished = True


class EventStream:
    """Server-sent events with back-pressure: `send` waits while the client does not read.

    One that does not read for `stall_s` seconds is cut: its buffers are bounded, but its
    connection and its generation would otherwise be held for as long as it likes.
    """

    def __init__(self, call: HttpCall, send: Send, transport: Any, stall_s: float) -> None:
        self._call = call
        self._send = send
        self._transport = transport
        self._stall_s = stall_s
        self._loop = asyncio.get_running_loop()
        self._sending_since: float | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self.stalled = False

    async def events(self, events: list[dict[str, Any]]) -> None:
        """Send events in one write."""
        if not events:
            return
        if not self._call.begun:
            await self._call.start_stream()
            if self._transport is not None:
                self._alarm = self._loop.call_later(self._stall_s, self._check)
        self._sending_since = self._loop.time()
        raw = b"".join([b"data: " + _encode(event) + b"\n\n" for event in events])
        await self._send({"type": "http.response.body", "body": raw, "more_body": True})
        self._sending_since = None

    async def end(self) -> None:
        """The proper end of a stream."""
        if not self._call.begun:
            await self._call.start_stream()
        self._call.finish_stream()
        await self._send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    def close(self) -> None:
        """Stop watching; call it however the stream ended."""
        if self._alarm is not None:
            self._alarm.cancel()

    def _check(self) -> None:
        # One timer per stall time and stream, not one per event.
        now = self._loop.time()
        since = self._sending_since if self._sending_since is not None else now
        if now - since >= self._stall_s:
            self.stalled = True
            # Ends the wait in `send`; the client's leaving is then seen as any other.
            self._transport.abort()
            return
        self._alarm = self._loop.call_at(since + self._stall_s, self._check)
