"""The registry over HTTP (`/v1/…`, JSON), as an ASGI app and as a server in a running loop.

    GET    /v1/health, /ready                          200 while the registry answers
    GET    /v1/instances?role=&version=&wait_s=        waits while the version is the one given
    PUT    /v1/instances/{incarnation}/ranks/{dp_rank} register, and keep alive: the same again
    DELETE /v1/instances/{incarnation}/ranks/{dp_rank} one rank leaves, the others stay
    PUT    /v1/instances/{incarnation}/draining        {"draining": bool, "dp_rank": int or null for all}
    PUT    /v1/rooms/{room}                            {"incarnation", "dp_rank", "ttl_s"}
    GET    /v1/rooms/{room}?wait_s=                    waits until somebody owns the room

Errors are `{"error": ErrorInfo}` with the status of their code.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from segue.kv import (
    DECODE_ERRORS,
    BootstrapTimeout,
    ChecksumMismatch,
    Clock,
    ConfigError,
    Incarnation,
    Internal,
    InvalidRequest,
    LeaderId,
    Limits,
    Role,
    SegueError,
    Unauthorized,
)
from segue.kv.errors import NotFound, RequestTooLarge, status_of
from segue.kv.session import Tls, awaited, is_loopback, listening, url_of
from segue.server.http.guarded_http import LET_IN, ErrorBody, Guard, GuardedServer
from segue.server.http.host_check import HostCheck
from segue.server.http.readiness import readiness
from segue.server.registry.message_headers import DIGEST_HEADER, authorized, digest_of
from segue.server.registry.registry_records import DrainFlag, InstanceRecord, RoomRecord
from segue.server.registry.registry_store import RegistryStore
from segue.server.registry.waiting import AwakeClock, StoreBackend

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 * 2**10
#: A waiting query is answered at the latest after this; the client then asks again.
MAX_WAIT_S = 30.0

T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]


def _json(value: object, status: int = 200) -> Response:
    body = msgspec.json.encode(value)
    headers = {DIGEST_HEADER: digest_of(b"%d" % status, body)}
    return Response(body, status, media_type="application/json", headers=headers)


def _verify(request: Request, body: bytes | bytearray = b"") -> None:
    """Raises ChecksumMismatch for a query that is not as its client sent it."""
    scope = request.scope
    target = scope.get("raw_path", b"").partition(b"?")[0]
    if query := scope["query_string"]:
        target += b"?" + query
    given = request.headers.get(DIGEST_HEADER)
    if given is not None and given != digest_of(request.method.encode() + b" " + target, body):
        raise ChecksumMismatch("the query was changed on its way to the registry")


async def _read(request: Request) -> bytearray:
    """The request's body, bounded, and as its client sent it."""
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > MAX_BODY_BYTES:
            raise RequestTooLarge(f"a body of more than {MAX_BODY_BYTES} bytes")
    _verify(request, data)
    return data


async def _body(request: Request, type_: type[T]) -> T:
    """The request's body, typed."""
    data = await _read(request)
    try:
        return msgspec.json.decode(data, type=type_)
    except DECODE_ERRORS as error:
        raise InvalidRequest(f"the body is no {type_.__name__}: {error}") from error


def _number(request: Request, name: str, type_: type[T], *, path: bool = False) -> T | None:
    """A number from the query or the path; None if the query does not have it."""
    text = request.path_params[name] if path else request.query_params.get(name)
    if text is None:
        return None
    try:
        value = msgspec.convert(text, type_, strict=False)
    except DECODE_ERRORS as error:
        raise InvalidRequest(f"{name} must be a number, not {text[:64]!r}") from error
    return value


def _wait_s(request: Request) -> float:
    wait_s = _number(request, "wait_s", float) or 0.0
    if not 0 <= wait_s < float("inf"):
        raise InvalidRequest(f"wait_s must not be negative or infinite, as {wait_s} is")
    return min(wait_s, MAX_WAIT_S)


async def _while_connected(request: Request, work: Coroutine[object, object, T]) -> T:
    """`work`, abandoned when the client goes away: a waiting query must not outlive its client."""
    task = awaited(work)
    gone = awaited(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class _Api:
    """The handlers; each may raise a SegueError."""

    def __init__(self, backend: StoreBackend) -> None:
        self.backend = backend
        self.store = backend.store

    async def health(self, request: Request) -> Response:
        return _json({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        return _json(readiness()[1])

    async def list_instances(self, request: Request) -> Response:
        text = request.query_params.get("role")
        if text and text not in Role.__members__.values():
            raise InvalidRequest(f"{text[:64]!r} is no role; roles are {', '.join(Role)}")
        role = Role(text) if text else None
        version = _number(request, "version", int)
        return _json(await _while_connected(request, self.backend.instances(role, version, _wait_s(request))))

    async def put_rank(self, request: Request) -> Response:
        record = await _body(request, InstanceRecord)
        if record.incarnation != request.path_params["incarnation"]:
            raise InvalidRequest("the incarnation in the body is not the one in the path")
        dp_rank = _number(request, "dp_rank", int, path=True)
        assert dp_rank is not None
        return _json(self.store.register(record, dp_rank))

    async def put_draining(self, request: Request) -> Response:
        flag = await _body(request, DrainFlag)
        incarnation = Incarnation(request.path_params["incarnation"])
        self.store.set_draining(incarnation, flag.draining, flag.dp_rank)
        return _json({"version": self.store.version})

    async def leave(self, request: Request) -> Response:
        dp_rank = _number(request, "dp_rank", int, path=True)
        assert dp_rank is not None
        self.store.leave(LeaderId(Incarnation(request.path_params["incarnation"]), dp_rank))
        return _json({"version": self.store.version})

    async def put_room(self, request: Request) -> Response:
        record = await _body(request, RoomRecord)
        room = _number(request, "room", int, path=True)
        assert room is not None
        self.store.register_room(room, record)
        return _json({})

    async def get_room(self, request: Request) -> Response:
        room = _number(request, "room", int, path=True)
        assert room is not None
        wait_s = _wait_s(request)
        leader = await _while_connected(request, self.backend.room(room, wait_s))
        if leader is None:
            raise BootstrapTimeout(f"nobody registered room {room} within {wait_s} s", room=max(room, 0))
        return _json(leader)


def registry_app(backend: StoreBackend, secret: bytes | None) -> Starlette:
    """The registry as an ASGI app. With a secret every query but health needs the bearer token;
    without one only clients on loopback are answered."""
    api = _Api(backend)

    def guarded(handler: Handler, *, open_to_all: bool = False) -> Handler:
        async def handle(request: Request) -> Response:
            try:
                if not open_to_all:
                    _authenticate(request, secret)
                    if (let_in := request.scope.get(LET_IN)) is not None:
                        let_in()
                if request.method != "PUT":  # the body of a PUT is still to be read
                    _verify(request)
                return await handler(request)
            except SegueError as error:
                return _json(ErrorBody(error.info), status_of(error.info.code))
            except ClientDisconnect:
                return Response(status_code=499)
            except Exception:
                # One query's bug is that query's: it is logged whole and answered honestly.
                log.exception("the registry failed on %s %s", request.method, request.url.path)
                info = Internal("the registry failed on this query; its log has the reason").info
                return _json(ErrorBody(info), status_of(info.code))

        return handle

    async def nothing(request: Request) -> Response:
        await _read(request)  # a path that was changed on its way is none that the client asked for
        raise NotFound(f"the registry has no {request.method} {request.url.path[:200]}")

    async def unknown(request: Request, error: Exception) -> Response:
        return await guarded(nothing, open_to_all=True)(request)

    routes = [
        Route("/v1/health", guarded(api.health, open_to_all=True), methods=["GET"]),
        Route("/ready", guarded(api.ready, open_to_all=True), methods=["GET"]),
        Route("/v1/instances", guarded(api.list_instances), methods=["GET"]),
        Route("/v1/instances/{incarnation}/ranks/{dp_rank}", guarded(api.put_rank), methods=["PUT"]),
        Route("/v1/instances/{incarnation}/ranks/{dp_rank}", guarded(api.leave), methods=["DELETE"]),
        Route("/v1/instances/{incarnation}/draining", guarded(api.put_draining), methods=["PUT"]),
        Route("/v1/rooms/{room}", guarded(api.put_room), methods=["PUT"]),
        Route("/v1/rooms/{room}", guarded(api.get_room), methods=["GET"]),
    ]
    return Starlette(routes=routes, exception_handlers={404: unknown, 405: unknown})


def _authenticate(request: Request, secret: bytes | None) -> None:
    if secret is not None:
        if not authorized(secret, request.headers.get("authorization", "")):
            raise Unauthorized("the registry needs the deployment's secret: give the same --secret-file")
    elif request.client is None or not is_loopback(request.client.host):
        raise Unauthorized("this registry has no secret and answers only its own machine")


class RegistryServer:
    """A running registry. Made by `serve`."""

    def __init__(self, backend: StoreBackend, server: GuardedServer, *, encrypted: bool) -> None:
        self.store = backend.store
        self._backend = backend
        self.host, self.port = server.address
        self.server = server
        self._scheme = "https" if encrypted else "http"
        server.start()

    @property
    def url(self) -> str:
        """The URL for clients on this machine; a wildcard host is shown as loopback."""
        return url_of(self._scheme, self.host, self.port)

    async def started(self) -> None:
        """Wait until queries are answered; raises what the start raised."""
        await self.server.answering()

    async def close(self) -> None:
        """Release waiting queries and stop. Returns when the port is free again."""
        await self._backend.close()
        await self.server.stop()


async def serve(
    host: str,
    port: int,
    *,
    secret: bytes | None,
    limits: Limits,
    store: RegistryStore | None = None,
    clock: Clock | None = None,
    tls: Tls | None = None,
) -> RegistryServer:
    """Run a registry in the current loop (port 0: any free one). ConfigError if the port is in use
    or the host is not loopback and there is no secret. Ends with `close`."""
    sock = listening(host, port, what="the registry", flag="--bootstrap-port")
    if secret is None and not is_loopback(str(sock.getsockname()[0])):
        sock.close()
        raise ConfigError(
            f"a registry at {host} would answer other machines and there is no shared secret: give one "
            "with --secret-file, or use 127.0.0.1"
        )
    clock = clock or AwakeClock()
    store = store or RegistryStore(clock, ttl_s=limits.registry_ttl_s)
    backend = StoreBackend(store, clock, max_waiters=4 * limits.max_queue)
    app = HostCheck(
        registry_app(backend, secret),
        hosts=(host,) if secret is None else None,
        body_of=lambda error: msgspec.json.encode(ErrorBody(error.info)),
        hosts_hint="give all parts the same --secret-file",
    )
    http = GuardedServer(
        app,
        sock,
        server_tls=tls.server if tls is not None else None,
        guard=Guard(
            head_s=limits.handshake_s, request_s=limits.handshake_s, max_requests=4 * limits.max_queue
        ),
        drain_s=2.0,
    )
    server = RegistryServer(backend, http, encrypted=tls is not None)
    try:
        await server.started()
    except BaseException:
        await server.close()
        raise
    return server
