"""uvicorn behind a `GuardedListener`: every HTTP server of segue. Nothing else touches uvicorn.

- A connection *waits* until one of its requests is let in. The server chooses who is let in: who shows a
  secret (the registry), a whole head (the public server), nobody (an instance's server). On the public
  server it waits again when all its requests are answered.
- At most `max_pending` connections wait: one more closes the oldest. At most `max_requests` have been let in:
  for one more a connection is closed whose client waits for no answer; else it is refused.
- Each request, also a later one, has a deadline for its head and for its last byte, and a bound for its head:
  a slow or endless one costs one connection for seconds.
- An offer to speak another protocol (`Upgrade`) is ignored: the request is answered as it stands.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import ssl
from collections.abc import Callable, Generator
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

import httptools
import msgspec
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from segue.kv import ErrorInfo, Internal, InvalidRequest, OutOfCapacity, SegueError
from segue.kv.errors import RequestTimeout, RequestTooLarge
from segue.kv.session import (
    GIVE_BOTH,
    HANDSHAKE_RECORD,
    MAX_PENDING,
    Deadline,
    GuardedListener,
    awaited,
    send_at_once,
)
from segue.server.http.http_exchange import EXCHANGE, HttpExchange

log = logging.getLogger(__name__)

#: In an ASGI scope: call it when the request has proven who it comes from. May raise OutOfCapacity.
LET_IN: Final = "segue.let_in"

#: Limit of a request's line and headers together, and of the trailers after its body.
MAX_HEAD_BYTES: Final = 64 * 2**10
#: Requests that one connection may have sent ahead of their answers.
MAX_PIPELINED: Final = 16
#: Time that an idle client has to end TLS when the server stops, in seconds.
GOODBYE_S: Final = 1.0
#: Connections of the public listener, however many descriptors there are: each costs some 20 KB.
MAX_CONNECTIONS: Final = 8192
#: Descriptors that are not clients' connections: sessions to workers, the registry, files, logs.
RESERVED_DESCRIPTORS: Final = 256

#: Headers and options of `Connection` that offer another protocol (RFC 9110, 7.8).
_HEAD_TOO_LARGE: Final = f"a request's head has more than {MAX_HEAD_BYTES} bytes"
_OFFERS: Final = frozenset({b"upgrade", b"http2-settings"})


class ErrorBody(msgspec.Struct, frozen=True):
    """How an error travels."""

    error: ErrorInfo


class HeadTooLarge(RequestTooLarge):
    """HTTP has a status of its own for it."""

    status = 431


def _as_error_body(error: SegueError) -> bytes:
    return msgspec.json.encode(ErrorBody(error.info))


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """A server's limits for its clients; times in seconds.

    A request's head has `head_s` from its first byte (or the connection's start), its last byte `request_s`.
    A connection without a request is closed after `idle_s`. At most `max_requests` connections are answered
    at a time, and at most `max_pending` wait; with `head_is_proof` a whole head is all that must be shown.
    `body_of` is the body of an error that no handler answers, `tls_hint` what to do if only one of client and
    server speaks TLS.
    """

    head_s: float
    request_s: float
    max_requests: int
    idle_s: float = 5.0
    max_pending: int = MAX_PENDING
    head_is_proof: bool = False
    tls_hint: str = GIVE_BOTH
    body_of: Callable[[SegueError], bytes] = _as_error_body


def raise_descriptor_limit() -> int:
    """Let this process open as many files as the system allows it; how many that is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError) as error:
            log.warning("the limit of %d open files stays: %s", soft, error)
            return soft
    return 2**31 if hard == resource.RLIM_INFINITY else hard


def max_connections(descriptors: int) -> int:
    """How many connections a public server may have, besides what else needs descriptors."""
    return max(8, min(MAX_CONNECTIONS, descriptors - RESERVED_DESCRIPTORS))


class GuardedHttp(HttpToolsProtocol):
    """One connection; a `PendingProtocol`. `server_of` is set before anything else is called."""

    server_of: GuardedServer
    _refuse_with: SegueError | None = None
    _refused: SegueError | None = None
    _began_s = 0.0
    #: Bytes since anything was completed: a head, a piece of a body, a message.
    _loose_bytes = 0
    _in_head = True
    _begun = False
    _spoken = False
    _said = False

    # ---- PendingProtocol -------------------------------------------------------------------------

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        #: Requests that have not been answered, the oldest first. uvicorn knows the newest only, and would
        #: tell no other that the client has left.
        self._open: list[HttpExchange] = []
        #: Deadline of the head or body that is being received.
        self._late = Deadline(self.loop, self._too_late)

    def refuse_when_made(self, error: SegueError) -> None:
        """See `PendingProtocol`."""
        self._refuse_with = error

    def cut(self, error: SegueError) -> None:
        """See `PendingProtocol`."""
        log.debug("an http connection was ended: %s", error)
        self._late.close()
        self._nobody_listens()
        if self.transport is not None:
            self.transport.abort()

    # ---- asyncio --------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """The server stops: close now, or after the answer."""
        idle = self.answered and not self.transport.get_write_buffer_size()
        super().shutdown()
        if idle:
            # A connection in a client's pool reads nothing: its part of the end of TLS would not come.
            self.loop.call_later(GOODBYE_S, self.transport.abort)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # Without it a router in front of another server delayed each first token by 41 ms.
        send_at_once(transport)
        self._start_clock()
        if self._refuse_with is not None:
            where = "a client" if self.client is None else "{}:{}".format(*self.client)
            self.server_of.log_refused(where, str(self._refuse_with))
            self._last_words(self._refuse_with)

    def connection_lost(self, exc: Exception | None) -> None:
        self._late.close()
        self.server_of.left(self)
        self._nobody_listens()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def data_received(self, data: bytes) -> None:
        if not self._spoken:
            self._spoken = True
            if data[0] == HANDSHAKE_RECORD:
                self.server_of.spoke_tls(self)
        # In pieces, so that the bound is exact whatever the size of a read: the parser calls us in between.
        while data and not self.transport.is_closing():
            if self._in_head:
                self._start_clock()
            size = MAX_HEAD_BYTES - self._loose_bytes
            piece, data = data[:size], data[size:]
            self._loose_bytes += len(piece)
            self._unset_keepalive_if_required()
            try:
                self.parser.feed_data(piece)
            except httptools.HttpParserUpgrade as end:
                data = self._without_offer() + piece[end.args[0] :] + data
            except httptools.HttpParserError:
                self._last_words(self._refused or InvalidRequest("what came is not an HTTP request"))
                return
            if self._loose_bytes >= MAX_HEAD_BYTES:
                self._last_words(HeadTooLarge(_HEAD_TOO_LARGE))

    def _without_offer(self) -> bytes:
        """The head that has just ended without its offer of another protocol, for a new parser: the old one
        takes all that follows for that protocol's."""
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b\r\n" % (self.parser.get_method(), self.url, version)]
        for name, value in self.headers:
            if name == b"connection":
                options = [option for option in value.split(b",") if option.strip().lower() not in _OFFERS]
                value = b",".join(options)
            if name not in _OFFERS:
                lines.append(b"%b: %b\r\n" % (name, value))
        self.parser = httptools.HttpRequestParser(self)
        with contextlib.suppress(AttributeError):  # as uvicorn does it: httptools has it from 0.6.3 on
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._loose_bytes = 0
        return b"".join(lines) + b"\r\n"

    # ---- requests -------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._unset_keepalive_if_required()
        self._begun = True
        # The rest of a read may hold half of the next request, after which nothing comes.
        self._start_clock()
        self.scope[LET_IN] = self._let_in  # type: ignore[typeddict-unknown-key]
        self.scope[EXCHANGE] = self._exchange  # type: ignore[typeddict-unknown-key]

    def on_headers_complete(self) -> None:
        guard = self.server_of.guard
        try:
            # Counted again: the piece in which the last message ended may hold a part of this head.
            if (
                len(self.url) + sum(len(name) + len(value) + 3 for name, value in self.headers)
                > MAX_HEAD_BYTES
            ):
                raise HeadTooLarge(_HEAD_TOO_LARGE)
            if self.parser.should_upgrade():
                if self.parser.get_method() == b"CONNECT":
                    raise InvalidRequest("this server is no proxy: CONNECT is not answered")
                return  # it comes again without the offer
            if len(self.pipeline) >= MAX_PIPELINED:
                raise OutOfCapacity(f"more than {MAX_PIPELINED} requests were sent ahead of their answers")
            if guard.head_is_proof:
                self._let_in()
        except SegueError as error:
            # The parser ends at it, and `data_received` says it.
            self._refused = error
            raise
        self._progress()
        self._in_head = False
        if guard.request_s > guard.head_s:
            self._restart_clock(self._began_s)
        super().on_headers_complete()
        self._open.append(HttpExchange(self.cycle))

    def on_body(self, body: bytes) -> None:
        self._progress()
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._progress()
        self._late.lift()
        self._in_head = True
        self._begun = False
        super().on_message_complete()
        if self.answered:  # before its body had come, whose bytes ended uvicorn's timer
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_response_complete(self) -> None:
        del self._open[0]
        super().on_response_complete()
        if self._late.is_set and self._in_head:
            # Bytes that came meanwhile were not read: their time begins now.
            self._restart_clock(self.loop.time())
        self._may_wait()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._may_wait()

    def _may_wait(self) -> None:
        """Wait if all is answered, and the client has read most of it."""
        if self.answered and not self.flow.write_paused:
            self.server_of.waits(self)

    @property
    def answered(self) -> bool:
        """Nothing is being answered."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def receiving(self) -> bool:
        """A body has not come whole."""
        return not self._in_head

    def _nobody_listens(self) -> None:
        """Handlers learn it now, so that none writes into a connection that is ending."""
        for exchange in self._open:
            exchange.leave()

    def _exchange(self) -> HttpExchange:
        """The exchange of the request that is being answered."""
        return self._open[0]

    def _let_in(self) -> None:
        self.server_of.let_in(self)

    def _progress(self) -> None:
        self._loose_bytes = 0

    def _start_clock(self) -> None:
        if not self._late.is_set:
            self._restart_clock(self.loop.time())

    def _restart_clock(self, began_s: float) -> None:
        guard = self.server_of.guard
        self._began_s = began_s
        self._late.set(began_s + (guard.request_s if self.receiving else guard.head_s))

    def _too_late(self) -> None:
        if self.pipeline or (self._in_head and not self.answered):
            # It sends the next request before it has its answer, and we do not read on: not late yet.
            self._start_clock()
            return
        self.server_of.count("late_requests")
        guard = self.server_of.guard
        if not self._begun or (self.receiving and self.answered):
            self.transport.close()  # nobody waits for an answer
        elif self._in_head:
            self._last_words(RequestTimeout(f"a request's head did not arrive within {guard.head_s:g} s"))
        else:
            self._last_words(RequestTimeout(f"a request was not complete after {guard.request_s:g} s"))

    def _last_words(self, error: SegueError) -> None:
        """An error that no handler answers; the connection ends with it."""
        if self._said or self.transport.is_closing():
            return
        self._said = True
        self._late.lift()
        status = 400 if self._refuse_with is not None else error.status
        # In the middle of another answer, or after this request's own, nobody would know what it belongs to.
        cycle = self.cycle
        unanswered = (self.answered and not self.receiving) or not (cycle is None or cycle.response_started)
        if unanswered and not self.pipeline:
            body = self.server_of.guard.body_of(error)
            head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            if status in (429, 503):
                head += "retry-after: 1\r\n"
            head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            self.transport.write(head.encode() + body)
        self._nobody_listens()
        self.transport.close()


class GuardedServer(uvicorn.Server):
    """Serves `app` on a bound, listening, non-blocking socket from `start` until `stop`; running answers
    then have `drain_s` seconds."""

    def __init__(
        self,
        app: Callable[..., Any],
        sock: socket.socket,
        *,
        guard: Guard,
        drain_s: float,
        server_tls: ssl.SSLContext | None = None,
    ) -> None:
        config = uvicorn.Config(
            app,
            http=GuardedHttp,
            ws="none",
            loop="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=guard.idle_s,  # type: ignore[arg-type]  # it is only given to `call_later`
            timeout_graceful_shutdown=max(1, int(drain_s)),
        )
        super().__init__(config)
        # It writes a line for each request that is none: a means for anybody to fill the disk.
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        self.guard = guard
        self._sock = sock
        #: Connections that are answered, in the order in which they were let in.
        self._answering: dict[GuardedHttp, None] = {}
        self._up = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.counts: dict[str, int] = {}
        self._listener = GuardedListener(
            self._incoming,
            server_tls=server_tls,
            handshake_s=guard.head_s,
            count=self.count,
            max_pending=guard.max_pending,
            per_host=guard.max_pending,  # a proxy has one address
            make_room=self._make_room,
            tls_hint=guard.tls_hint,
        )

    @property
    def address(self) -> tuple[str, int]:
        """The bound address."""
        host, port = self._sock.getsockname()[:2]
        return str(host), int(port)

    @property
    def pending(self) -> int:
        """Connections that wait."""
        return len(self._listener.pending)

    @property
    def busy(self) -> int:
        """Connections that are answered."""
        return len(self._answering)

    def start(self) -> asyncio.Task[None]:
        """Begin to serve; the task ends with the server."""
        self._task = awaited(self.serve([]), name="guarded-http")
        return self._task

    async def answering(self) -> None:
        """Wait until requests are answered; raises what the start raised."""
        task = self._task or self.start()
        up = awaited(self._up.wait())
        try:
            await asyncio.wait({up, task}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            up.cancel()
        if task.done():
            task.result()
            raise Internal("the HTTP server ended at its start")

    async def ended(self) -> None:
        """Wait for the end after `start`; raises what ended it, and Internal when nobody asked for it."""
        assert self._task is not None
        await asyncio.wait({self._task})
        if not self._task.cancelled():
            self._task.result()
        if not self.should_exit:
            raise Internal("the HTTP server has ended")

    async def stop(self) -> None:
        """Accept nobody, end what is idle, and give the rest its drain time. Frees the port. Idempotent."""
        await self._listener.close()
        self._sock.close()
        self.should_exit = True
        for connection in self._listener.pending:
            connection.shutdown()
        if self._task is not None:
            await asyncio.wait({self._task})
        for left_over in list(self.server_state.connections):
            left_over.transport.abort()

    # ---- uvicorn --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Signals are the process's."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Open the guarded listener instead of uvicorn's own servers."""
        self.servers = []
        self._listener.open(self._sock)
        self.started = True
        self._up.set()

    # ---- connections ----------------------------------------------------------------------------

    def let_in(self, connection: GuardedHttp) -> None:
        """A request of `connection` is answered from now on. OutOfCapacity if there are too many."""
        if connection in self._answering:
            return
        if len(self._answering) >= self.guard.max_requests and not self._make_room():
            raise OutOfCapacity(f"{self.guard.max_requests} clients are being answered already")
        self._listener.authenticated(connection)
        self._answering[connection] = None

    def waits(self, connection: GuardedHttp) -> None:
        """All requests of `connection` are answered. After a proof by secret it keeps its place."""
        if self.guard.head_is_proof and connection in self._answering:
            del self._answering[connection]
            self._listener.waits(connection, connection.client[0] if connection.client else "")

    def left(self, connection: GuardedHttp) -> None:
        """Its socket is gone."""
        self._answering.pop(connection, None)
        self._listener.closed(connection)

    def log_refused(self, where: str, reason: str) -> None:
        """See `GuardedListener.log_refused`."""
        self._listener.log_refused(where, reason)

    def count(self, what: str) -> None:
        """Count one more of `what`."""
        self.counts[what] = self.counts.get(what, 0) + 1

    def spoke_tls(self, connection: GuardedHttp) -> None:
        """A client sends TLS to a server without TLS. Warned of once: more could fill a disk."""
        self.count("spoke_tls")
        level = logging.WARNING if self.counts["spoke_tls"] == 1 else logging.DEBUG
        hint = self.guard.tls_hint
        log.log(level, "%s speaks TLS and this side does not; %s", connection.client, hint)

    def _make_room(self) -> bool:
        """End a connection whose client waits for no answer, the first that was let in. False without one."""
        victim = next((one for one in self._answering if one.receiving or one.answered), None)
        if victim is None:
            return False
        self.left(victim)
        self.count("requests_dropped")
        victim.cut(OutOfCapacity("others need the connection more"))
        return True

    def _incoming(self) -> GuardedHttp:
        connection = GuardedHttp(
            config=self.config,
            server_state=self.server_state,
            app_state={},
            _loop=asyncio.get_running_loop(),
        )
        connection.server_of = self
        return connection
