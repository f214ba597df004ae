"""One HTTP request: its body in, its answer or error out, and the client's leaving in between."""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import msgspec

from segue.engine.request import Wait
from segue.kv import AbortedByClient, SegueError
from segue.kv.errors import RequestTimeout, RequestTooLarge
from segue.server.frontend.dialects import dialect_of
from segue.server.frontend.request_memory import SMALL_BYTES, MemoryBudget, RequestMemory
from segue.server.frontend.trace_context import NO_TRACE
from segue.server.http.http_exchange import EXCHANGE, Header, HttpExchange
from segue.server.messages.records import Attribute

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

MAX_REQUEST_ID_CHARS = 128
#: The header that lists fields of the body that no part of segue knows.
UNKNOWN_FIELDS = b"x-segue-unknown-fields"
#: Names that it lists, and characters of each.
MAX_SHOWN, MAX_SHOWN_CHARS = 16, 64
_LEAST_READ = 64 * 2**10
_UNSAFE = re.compile(r"[^A-Za-z0-9._:-]")

_JSON = (b"content-type", b"application/json")
_SSE = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
_encode = msgspec.json.Encoder().encode


def request_id_of(scope: Scope) -> str:
    """The client's X-Request-ID made harmless for headers and logs, or a fresh one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            wanted = _UNSAFE.sub("", value.decode("latin-1"))[:MAX_REQUEST_ID_CHARS]
            if wanted:
                return wanted
    return secrets.token_hex(16)


#: Where in an ASGI scope the check of API keys says whose key it was: a `KeyOwner`.
KEY_OWNER = "segue.key_owner"
#: Where headers stand that an answer has besides its own.
EXTRA_HEADERS = "segue.headers"


class KeyOwner(NamedTuple):
    """The rights of an API key. `tenant` is its number, empty if there is only one key; `sees` the tenant
    whose requests it may see, empty for all; `cache_domain` that of the cached prefixes that it may use,
    empty for the common one."""

    tenant: str = ""
    sees: str = ""
    cache_domain: str = ""


class HttpCall:
    """The exchange with one client of `endpoint`. `gone` once it has left; `begun` once a status was sent."""

    def __init__(
        self, scope: Scope, receive: Receive, held: RequestMemory | None = None, endpoint: str = ""
    ) -> None:
        self._scope = scope
        self.endpoint = endpoint
        #: its part of the memory of requests
        self.held = RequestMemory(MemoryBudget(0)) if held is None else held
        self._receive = receive
        self._exchange: HttpExchange = scope[EXCHANGE]()
        self.id = request_id_of(scope)
        self.status = 0
        self.begun = False
        self.gone = False
        #: When it was known what to generate, on the clock of `time.monotonic`; 0 before.
        self.planned_at = 0.0
        self.trace = NO_TRACE
        #: makes the attributes of the inference's span; None before planning, and without spans
        self.inference: Callable[[], dict[str, Attribute]] | None = None
        #: the client has shown an API key
        self.has_key = KEY_OWNER in scope
        self.owner: KeyOwner = scope.get(KEY_OWNER, KeyOwner())
        #: the form of errors, and the end of streams
        self.dialect = dialect_of(scope.get("path", ""))
        #: the event of an error in a stream that has begun; None: the dialect's
        self.failed: Callable[[SegueError], bytes | None] = lambda error: None
        self._finished = False
        self._own_headers: tuple[Header, ...] = (
            (b"x-request-id", self.id.encode()),
            *scope.get(EXTRA_HEADERS, ()),
        )

    def list_unknown(self, names: Sequence[str]) -> None:
        """Have the answer list names of fields that have no meaning here."""
        if names:
            shown = [_UNSAFE.sub("", name)[:MAX_SHOWN_CHARS] for name in names[:MAX_SHOWN]]
            self._own_headers = (*self._own_headers, (UNKNOWN_FIELDS, ", ".join(shown).encode()))

    # ---- in -------------------------------------------------------------------------------------

    async def body(self, limit_bytes: int, held: RequestMemory, *, timeout_s: float) -> bytes:
        """The whole body, which counts in `held`. RequestTooLarge beyond `limit_bytes`; what is too much is
        read and dropped, within reason, because a client that is still writing would not see the answer."""
        raw = self._exchange.take_body()
        if raw is None:
            raw = await self._received(limit_bytes, held, timeout_s)
        elif len(raw) > limit_bytes:
            raise _too_large(limit_bytes)
        held.set(len(raw))
        return raw

    async def _received(self, limit_bytes: int, held: RequestMemory, timeout_s: float) -> bytes:
        pieces: list[bytes] = []
        seen, said = 0, self.header(b"content-length")
        whole_bytes = limit_bytes if said is None else int(said)
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
                        held.add(len(piece))
                        pieces.append(piece)
                    else:
                        pieces.clear()
                        held.set(0)
                    if not message.get("more_body", False) or seen > 8 * limit_bytes:
                        break
                    if seen > SMALL_BYTES:
                        await held.turn(len(piece), whole_bytes - seen)
        except TimeoutError:
            raise RequestTimeout(f"the body did not arrive within {timeout_s:g} s") from None
        if seen > limit_bytes:
            raise _too_large(limit_bytes)
        return b"".join(pieces)

    # ---- the client's leaving -------------------------------------------------------------------

    async def __aenter__(self) -> HttpCall:
        """While inside, the client's leaving cancels the current task (`gone` is then set)."""
        task = asyncio.current_task()
        assert task is not None
        self._exchange.watch(lambda: self._left(task))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exchange.watch(None)
        if self.gone and kind is asyncio.CancelledError:
            task = asyncio.current_task()
            assert task is not None
            if task.uncancel() == 0:
                raise AbortedByClient("the client closed the connection") from None

    def _left(self, main: asyncio.Task[Any]) -> None:
        if not self._finished:
            self.gone = True
            main.cancel()

    def http_attributes(self) -> dict[str, Attribute]:
        """The attributes of its span that OpenTelemetry's conventions for HTTP define. No endpoint that
        generates has parameters in its route, so the path is the route."""
        scope = self._scope
        found: dict[str, Attribute] = {
            "http.request.method": scope["method"],
            "http.route": scope["path"],
            "url.path": scope["path"],
            "url.scheme": scope["scheme"],
            "network.protocol.version": scope["http_version"],
        }
        return found if self.gone else {**found, "http.response.status_code": self.status}

    def http_labels(self, error: str) -> tuple[str, str, str, str, str]:
        """The same as labels of a metric: method, route, status, scheme, error. `error` is the code with
        which the request ended; the label is empty for a 4xx, as the conventions ask."""
        scope, status = self._scope, "" if self.gone else str(self.status)
        fault = "" if status.startswith("4") else error
        return scope["method"], scope["path"], status, scope["scheme"], fault

    def header(self, name: bytes) -> str | None:
        """The value of the client's header `name` (lower case), or None."""
        found = (value for key, value in self._scope["headers"] if key == name)
        value: bytes | None = next(found, None)
        return None if value is None else value.decode("latin-1")

    # ---- out ------------------------------------------------------------------------------------

    async def answer(self, status: int, body: object, *, headers: tuple[Header, ...] = ()) -> None:
        """Send a whole JSON answer."""
        raw = _encode(body)
        if self._exchange.behind:
            await self._exchange.drained()
        self.begun = self._finished = True
        self.status = status
        self._exchange.answer(status, (_JSON, *headers, *self._own_headers), raw)

    async def fail(self, error: SegueError) -> None:
        """Send an error: as the status if there is none yet, else as the stream's last event."""
        if self.gone:
            self.status = AbortedByClient.status
            return
        if self._finished:
            return  # there is nothing left to say it in
        if self.begun:
            raw = (self.failed(error) or self.dialect.event(error, self.id)) + self.dialect.done
            self._finished = True
            self._exchange.send(raw, last=True)
            return
        status = type(error).status
        headers: tuple[Header, ...] = ()
        if status in (429, 503):
            headers = ((b"retry-after", b"%d" % error.retry_after_s),)
        elif status in (408, 413):
            headers = ((b"connection", b"close"),)
        await self.answer(status, self.dialect.body(error, self.id), headers=headers)

    async def taken(self, *, stall_s: float) -> None:
        """Until the client has read most of its answer. It is cut if it reads less than `_LEAST_READ` in
        `stall_s` seconds: what waits for it is memory."""
        left = 0
        while self._exchange.behind:
            before, left = left, self._exchange.unread_bytes
            if before and before - left < _LEAST_READ:
                self._exchange.abort()
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(stall_s):
                    await self._exchange.drained()

    def stream(self, *, stall_s: float, quiet_s: float = 0.0) -> EventStream:
        """An answer of events. The status goes out with the first of them."""
        return EventStream(self, self._exchange, stall_s, quiet_s)

    def start_stream(self) -> None:
        """Answer with a stream of events from now on."""
        self.begun = True
        self.status = 200
        self._exchange.begin(200, (*_SSE, *self._own_headers))

    def finish_stream(self) -> None:
        """Its last event is about to be sent."""
        self._finished = True


class EventStream:
    """Server-sent events with back-pressure.

    A client that does not read for `stall_s` seconds is cut: its buffers are bounded, but its connection and
    its generation would otherwise be held for as long as it likes. A stream without events for `quiet_s`
    seconds (0: ever) gets a comment, so that proxies between do not take it for dead. Close it.
    """

    def __init__(self, call: HttpCall, exchange: HttpExchange, stall_s: float, quiet_s: float) -> None:
        self._call = call
        self._exchange = exchange
        self._stall_s = stall_s
        self._quiet_s = quiet_s
        self._loop = asyncio.get_running_loop()
        self._spoke_s = self._loop.time()
        self._timer = self._loop.call_later(quiet_s, self._quiet) if quiet_s > 0 else None

    def close(self) -> None:
        """No comments any more. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _quiet(self) -> None:
        """The timer has ended; events since it was set only put it off."""
        now = self._loop.time()
        if now - self._spoke_s >= self._quiet_s:
            self._spoke_s = now
            if not self._exchange.behind and not self._call.gone:
                self.events(self._call.dialect.comment)
        self._timer = self._loop.call_at(self._spoke_s + self._quiet_s, self._quiet)

    def events(self, raw: bytes) -> Wait | None:
        """Send events in one write. If the client is behind: what to await before the next ones."""
        if not raw:
            return None
        if not self._call.begun:
            self._call.start_stream()
        self._spoke_s = self._loop.time()
        self._exchange.send(raw)
        return self._drained if self._exchange.behind else None

    async def end(self, raw: bytes = b"") -> None:
        """The proper end of a stream, after the events `raw`; the dialect ends a stream, or `raw` does."""
        if self._exchange.behind:
            await self._drained()
        if not self._call.begun:
            self._call.start_stream()
        self._call.finish_stream()
        self._exchange.send(raw + self._call.dialect.done, last=True)

    async def _drained(self) -> None:
        held, unread = self._call.held, self._exchange.unread_bytes
        held.add(unread)
        try:
            async with asyncio.timeout(self._stall_s):
                await self._exchange.drained()
        except TimeoutError:
            self._call.gone = True
            self._exchange.abort()
            raise AbortedByClient(f"the client read nothing for {self._stall_s:g} s") from None
        finally:
            held.add(-unread)


def _too_large(limit_bytes: int) -> RequestTooLarge:
    return RequestTooLarge(f"the body has more than {limit_bytes} bytes")
