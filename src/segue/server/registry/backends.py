"""The registry's operations (`RegistryBackend`), and how they reach our registry over HTTP."""

from __future__ import annotations

import asyncio
import ssl
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx2 as httpx
import msgspec

from segue.kv import (
    DECODE_ERRORS,
    BootstrapTimeout,
    BootstrapUnreachable,
    ChecksumMismatch,
    ConfigError,
    Draining,
    Incarnation,
    InvalidRequest,
    LeaderId,
    Limits,
    PeerRefused,
    Role,
    SegueError,
    Unauthorized,
)
from segue.kv.session import Tls, explain_tls, not_tls
from segue.server.http.guarded_http import ErrorBody
from segue.server.registry.message_headers import DIGEST_HEADER, bearer_token, digest_of
from segue.server.registry.registry_records import (
    DrainFlag,
    InstanceList,
    InstanceRecord,
    Registered,
    RoomRecord,
)

T = TypeVar("T")

#: Bytes of one answer of a registry: the list of some 25,000 ranks.
MAX_ANSWER = 16 * 2**20
#: A connection that was not used for so long is not used again. Its other end may have gone without a word,
#: and each query that takes such a connection waits in vain.
IDLE_S = 5.0


def proxy_in_trouble(status: int) -> bool:
    """Whether an answer without a body of ours may be another one later: a proxy is busy, limits the rate of
    requests, or has nobody behind it."""
    return status >= 500 or status in (408, 425, 429)


class RegistryBackend(ABC):
    """The store's operations, however they are reached. Each raises SegueErrors only. The record of
    `put_rank` has one replica: the rank that registers."""

    @abstractmethod
    async def put_rank(self, record: InstanceRecord) -> Registered: ...

    @abstractmethod
    async def put_draining(self, incarnation: Incarnation, flag: DrainFlag) -> None: ...

    @abstractmethod
    async def delete(self, leader: LeaderId) -> None: ...

    @abstractmethod
    async def instances(self, role: Role | None, version: int | None, wait_s: float) -> InstanceList: ...

    @abstractmethod
    async def put_room(self, room: int, record: RoomRecord) -> None: ...

    @abstractmethod
    async def room(self, room: int, wait_s: float) -> LeaderId | None: ...

    @abstractmethod
    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class RegistryAnswer:
    """A whole answer of a registry."""

    status: int
    headers: httpx.Headers
    content: bytes


class BoundedClient(httpx.AsyncClient):
    """A client that reads at most `MAX_ANSWER` bytes of an answer.

    Raises SegueErrors and errors of httpx and ssl, and no others. Raises Draining once it is closed, also to
    a caller that waited for a connection; httpx raises a bare RuntimeError then.
    """

    def __init__(self, **how: Any) -> None:
        # Never through a proxy of the environment, and never to where an answer points.
        super().__init__(trust_env=False, follow_redirects=False, **how)
        # A few compressed bytes can be an answer of any size.
        self.headers["Accept-Encoding"] = "identity"

    async def send(self, request: httpx.Request, **how: Any) -> httpx.Response:
        """An answer of which only the head was read: httpx itself would read all of it."""
        if self.is_closed:
            raise Draining("the registry's client was closed")
        try:
            return await super().send(request, **how | {"stream": True})
        except (httpx.HTTPError, ssl.SSLError):
            raise
        except Exception as error:
            # On uvloop a connection that is reset while it is made (its server was killed, or is overrun) has
            # no socket any more; anyio asks it for one, and the AttributeError passes through httpx.
            raise httpx.ReadError(f"its connection was not made: {error!r}", request=request) from error

    async def ask(self, request: httpx.Request, within_s: float) -> RegistryAnswer:
        """The answer to `request`. ReadTimeout unless all of it is here after `within_s`; PeerRefused if it
        is too large."""
        try:
            async with asyncio.timeout(within_s):
                answer = await self.send(request)
                try:
                    return RegistryAnswer(answer.status_code, answer.headers, await self.content(answer))
                finally:
                    await answer.aclose()
        except TimeoutError as error:
            raise httpx.ReadTimeout(f"no whole answer within {within_s:g} s", request=request) from error

    async def content(self, answer: httpx.Response) -> bytes:
        """The whole body of `answer`. PeerRefused if it is too large."""
        content = bytearray()
        async for piece in self.pieces(answer):
            content += piece
            if len(content) > MAX_ANSWER:
                raise PeerRefused(f"{_origin(answer.request)} answered with more than {MAX_ANSWER} bytes")
        return bytes(content)

    async def pieces(self, answer: httpx.Response) -> AsyncIterator[bytes]:
        """The body of `answer` as it comes. PeerRefused if it is compressed."""
        encoding = answer.headers.get("Content-Encoding", "identity")
        if encoding != "identity":
            raise PeerRefused(f"{_origin(answer.request)} answered with Content-Encoding {encoding[:20]!r}")
        try:
            async for piece in answer.aiter_bytes():
                yield piece
        except (httpx.HTTPError, ssl.SSLError):
            raise
        except Exception as error:  # as in `send`
            raise httpx.ReadError(f"its connection ended: {error!r}", request=answer.request) from error


def _origin(request: httpx.Request) -> str:
    return f"{request.url.scheme}://{request.url.netloc.decode('ascii', 'replace')}"


class HttpBackend(RegistryBackend):
    """The registry at `url`, over HTTP(S); `transport` takes the place of sockets in a test."""

    def __init__(
        self,
        url: str,
        secret: bytes | None,
        limits: Limits,
        tls: Tls | None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        try:
            parsed = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise ConfigError(f"{url!r} is no address of a registry: {error}") from error
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise ConfigError(f"a registry's address looks like http://host:8998, unlike {url!r}")
        if (parsed.scheme == "https") != (tls is not None):
            raise ConfigError(
                f"{url}: an https registry, and only that, needs --tls-cert, --tls-key and --tls-ca"
            )
        headers = {"Authorization": f"Bearer {bearer_token(secret)}"} if secret is not None else {}
        self._connect_s = limits.connect_s
        self._url = url.rstrip("/")
        self._client = BoundedClient(
            base_url=self._url,
            headers=headers,
            verify=tls.client if tls is not None else False,
            limits=httpx.Limits(
                max_connections=limits.max_queue, max_keepalive_connections=16, keepalive_expiry=IDLE_S
            ),
            transport=transport,
        )

    async def put_rank(self, record: InstanceRecord) -> Registered:
        path = f"/v1/instances/{record.incarnation}/ranks/{record.replicas[0].dp_rank}"
        return self._decode(await self._ask("PUT", path, body=record), Registered)

    async def put_draining(self, incarnation: Incarnation, flag: DrainFlag) -> None:
        await self._ask("PUT", f"/v1/instances/{incarnation}/draining", body=flag)

    async def delete(self, leader: LeaderId) -> None:
        await self._ask("DELETE", f"/v1/instances/{leader.incarnation}/ranks/{leader.dp_rank}")

    async def instances(self, role: Role | None, version: int | None, wait_s: float) -> InstanceList:
        query: dict[str, str | int | float] = {"wait_s": wait_s}
        if role is not None:
            query["role"] = role.value
        if version is not None:
            query["version"] = version
        data = await self._ask("GET", "/v1/instances", query=query, wait_s=wait_s)
        return self._decode(data, InstanceList)

    async def put_room(self, room: int, record: RoomRecord) -> None:
        await self._ask("PUT", f"/v1/rooms/{room}", body=record)

    async def room(self, room: int, wait_s: float) -> LeaderId | None:
        try:
            data = await self._ask("GET", f"/v1/rooms/{room}", query={"wait_s": wait_s}, wait_s=wait_s)
        except _NotYet:
            return None
        return self._decode(data, LeaderId)

    async def close(self) -> None:
        await self._client.aclose()

    async def _ask(self, method: str, path: str, **what: Any) -> bytes:
        """The body of the answer, as `_ask_once`. No digest covers our secret, so one bit of it that was
        changed on its way reads like a wrong one, which is an answer for good: it must be said twice."""
        try:
            return await self._ask_once(method, path, **what)
        except Unauthorized:
            return await self._ask_once(method, path, **what)

    async def _ask_once(
        self,
        method: str,
        path: str,
        *,
        body: msgspec.Struct | None = None,
        query: dict[str, str | int | float] | None = None,
        wait_s: float = 0.0,
    ) -> bytes:
        content = None if body is None else msgspec.json.encode(body)
        timeout = httpx.Timeout(self._connect_s, read=wait_s + self._connect_s)
        try:
            request = self._client.build_request(method, path, content=content, params=query, timeout=timeout)
            start = method.encode() + b" " + request.url.raw_path
            request.headers[DIGEST_HEADER] = digest_of(start, content or b"")
            answer = await self._client.ask(request, wait_s + self._connect_s)
        except httpx.TimeoutException as error:
            text = f"the registry at {self._url} did not answer in time ({type(error).__name__})"
            raise BootstrapTimeout(text) from error
        except (httpx.HTTPError, ssl.SSLError) as error:
            who = f"the registry at {self._url}"
            raise unreachable(who, error, encrypted=self._url.startswith("https:")) from error
        told = answer.headers.get(DIGEST_HEADER)
        if told is not None and told != digest_of(b"%d" % answer.status, answer.content):
            raise ChecksumMismatch(f"an answer of the registry at {self._url} was changed on its way")
        if answer.status == 200:
            return answer.content
        try:
            info = msgspec.json.decode(answer.content, type=ErrorBody).error
        except DECODE_ERRORS as error:
            if proxy_in_trouble(answer.status):
                text = f"a proxy at {self._url} answered {answer.status} for the registry"
                raise BootstrapUnreachable(text) from error
            text = f"{self._url} answered {answer.status} and is no segue registry"
            raise PeerRefused(text) from error
        if path.startswith("/v1/rooms/") and isinstance(info.exception(), BootstrapTimeout):
            raise _NotYet(info.text)
        if told is None and isinstance(info.exception(), InvalidRequest):
            # No handler has said it. Ours was HTTP when it left: what arrived was something else.
            raise ChecksumMismatch(
                f"a query to the registry at {self._url} was changed on its way: {info.text}"
            )
        raise info.exception()

    def _decode(self, data: bytes, type_: type[T]) -> T:
        try:
            return msgspec.json.decode(data, type=type_)
        except DECODE_ERRORS as error:
            raise PeerRefused(f"{self._url} answered with something else than a {type_.__name__}") from error


class _NotYet(Exception):
    """The registry waited in vain; it is there, and may be asked again."""


def unreachable(who: str, error: httpx.HTTPError | ssl.SSLError, *, encrypted: bool) -> SegueError:
    """Why nothing came back from `who`: to be tried again, unless certificates or missing TLS are the cause.
    httpx makes errors of its own of those of TLS while it connects, and none of an alert that comes later."""
    reason = _ssl_error(error)
    if isinstance(reason, ssl.SSLCertVerificationError):
        return Unauthorized(f"{who}: {explain_tls(reason)}")
    if reason is not None and not_tls(reason):
        return PeerRefused(f"{who}: {explain_tls(reason)}")
    text = f"{who} cannot be reached: {str(error) or repr(error)}"
    if encrypted and not isinstance(error, httpx.ConnectError):
        # With TLS 1.3 the client hears nothing when the server rejects its certificate.
        text += "; it may not accept our --tls-cert (then its log says why)"
    elif encrypted and not str(error):  # it has closed the connection in the handshake
        text += "; it may not speak TLS"
    return BootstrapUnreachable(text)


def _ssl_error(error: BaseException) -> ssl.SSLError | None:
    """The TLS error at the root of an error of httpx, if there is one."""
    cause: BaseException | None = error
    for _ in range(8):  # httpx, httpcore and anyio each put a layer around it
        if cause is None or isinstance(cause, ssl.SSLError):
            return cause
        cause = cause.__cause__ or cause.__context__
    return None
