"""etcd, as far as the registry needs it, over its JSON gateway (`/v3/…`, on etcd's client port).

https://etcd.io/docs/v3.4/dev-guide/api_grpc_gateway/: keys and values are base64, 64-bit integers are
strings, a watch is an answer that goes on, one JSON object a line.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import httpx2 as httpx
import msgspec

from segue.kv import (
    DECODE_ERRORS,
    BootstrapTimeout,
    BootstrapUnreachable,
    ConfigError,
    Limits,
    OutOfCapacity,
    PeerRefused,
    SegueError,
    Unauthorized,
)
from segue.kv.session import Tls
from segue.server.registry.backends import BoundedClient, proxy_in_trouble, unreachable
from segue.server.settings.registry_address import EtcdUser, bracket

T = TypeVar("T")

#: Keys that one read returns, and bytes of all its answers together; keys that one answer holds.
MAX_KEYS, MAX_READ, PAGE_KEYS = 4096, 64 * 2**20, 512
#: Bytes of one line of a watch; etcd's own requests are at most 1.5 MiB.
MAX_LINE = 16 * 2**20
#: gRPC codes that another caller, address or time would not mend: INVALID_ARGUMENT (etcd says so to a caller
#: without a user), PERMISSION_DENIED, UNAUTHENTICATED.
_REFUSED = (3, 7, 16)
_NOT_FOUND = 5
#: How etcd refuses a token that it does not know any more: since it was idle for minutes, since the server
#: has restarted, or since users have changed.
_STALE = ("invalid auth token", "auth store is old")
MAX_PASSWORD_BYTES = 4096


class Kv(msgspec.Struct, frozen=True):
    """A key, and its value; `mod_revision` 0: it is not there."""

    key: bytes
    value: bytes = b""
    create_revision: Annotated[int, msgspec.Meta(ge=0)] = 0
    mod_revision: Annotated[int, msgspec.Meta(ge=0)] = 0
    lease: int = 0


class KeyEvent(msgspec.Struct, frozen=True):
    """A change of a key in a watch."""

    kv: Kv
    type: str = "PUT"

    @property
    def gone(self) -> bool:
        """The key was deleted, or its lease has ended."""
        return self.type == "DELETE"


class _ReplyHeader(msgspec.Struct, frozen=True):
    revision: int = 0


class _Found(msgspec.Struct, frozen=True):
    header: _ReplyHeader
    kvs: list[Kv] = []
    more: bool = False


class _GrantedLease(msgspec.Struct, frozen=True):
    ID: int = 0
    TTL: int = 0


class _Kept(msgspec.Struct, frozen=True):
    result: _GrantedLease


class _TxnResult(msgspec.Struct, frozen=True):
    succeeded: bool = False


class _News(msgspec.Struct, frozen=True):
    events: list[KeyEvent] = []
    canceled: bool = False
    compact_revision: int = 0


class _Line(msgspec.Struct, frozen=True):
    result: _News | None = None
    error: Any = None


class _Wrong(msgspec.Struct, frozen=True):
    error: str
    code: int = 0


class _Token(msgspec.Struct, frozen=True):
    token: str = ""


class StaleToken(Exception):
    """etcd does not know our token any more."""


class NoLease(Exception):
    """The lease has ended, or etcd has lost its data."""


class Compacted(Exception):
    """etcd has discarded the revision to watch from: read all keys again, and watch from their revision."""


@dataclass(frozen=True, slots=True)
class Read:
    """Keys as they were at `revision`."""

    kvs: list[Kv]
    revision: int


class Etcd:
    """A client of one cluster at `places`, of which it asks the next one when one does not answer.

    Every call raises SegueErrors: retryable ones if no member answers in time, or has no leader. As `user` it
    gets a token with the first call, and another one when etcd does not know that one any more; the file with
    the password is read each time.
    """

    def __init__(
        self,
        places: Sequence[tuple[str, int]],
        limits: Limits,
        tls: Tls | None,
        transport: httpx.AsyncBaseTransport | None = None,
        user: EtcdUser | None = None,
    ) -> None:
        self._user = user
        self._token = ""
        self._logging_in = asyncio.Lock()
        scheme = "http" if tls is None else "https"
        self._bases = [f"{scheme}://{bracket(host)}:{port}" for host, port in places]
        self._at = 0
        self._connect_s = limits.connect_s
        self._client = BoundedClient(
            verify=tls.client if tls is not None else False,
            transport=transport,
            # A room that is waited for, and the list of instances, hold a connection each.
            limits=httpx.Limits(max_connections=2 * limits.max_queue, max_keepalive_connections=16),
        )

    async def get(self, key: bytes) -> tuple[Kv, int]:
        """The key, and the revision at which it was read."""
        found = _decode(await self._ask("kv/range", key=_b64(key)), _Found)
        return (found.kvs[0] if found.kvs else Kv(key)), found.header.revision

    async def read(self, prefix: bytes) -> Read:
        """All keys that begin with `prefix`, oldest first. OutOfCapacity beyond `MAX_KEYS` or `MAX_READ`."""
        kvs, revision, size, page = list[Kv](), 0, 0, _under(prefix)
        while True:
            data = await self._ask("kv/range", **page, limit=PAGE_KEYS)
            found = _decode(data, _Found)
            kvs += found.kvs
            size += len(data)
            revision = revision or found.header.revision
            if not found.more:
                return Read(sorted(kvs, key=lambda kv: kv.create_revision), revision)
            if len(kvs) >= MAX_KEYS or size > MAX_READ or not found.kvs:
                raise OutOfCapacity(
                    f"etcd holds more than {MAX_KEYS} keys, or {MAX_READ} bytes, under {prefix.decode()}"
                )
            # Each page as of the first one's revision.
            page |= {"key": _b64(found.kvs[-1].key + b"\0"), "revision": str(revision)}

    async def put(self, known: Kv, value: bytes, lease: int | None) -> bool:
        """Write `value` at the key of `known`, if nobody has written there since; under the lease it has if
        `lease` is None. Raises NoLease."""
        write: dict[str, object] = {"key": _b64(known.key), "value": _b64(value)}
        write |= {"ignore_lease": True} if lease is None else {"lease": str(lease)}
        same = {
            "target": "MOD",
            "result": "EQUAL",
            "key": _b64(known.key),
            "mod_revision": str(known.mod_revision),
        }
        data = await self._ask("kv/txn", compare=[same], success=[{"request_put": write}])
        return _decode(data, _TxnResult).succeeded

    async def grant(self, ttl_s: int) -> int:
        """A new lease; etcd may make it longer than `ttl_s`."""
        return _decode(await self._ask("lease/grant", TTL=ttl_s), _GrantedLease).ID

    async def keep_alive(self, lease: int) -> bool:
        """Begin the time of `lease` anew; False if it has ended."""
        return _decode(await self._ask("lease/keepalive", ID=str(lease)), _Kept).result.TTL > 0

    async def revoke(self, lease: int) -> None:
        """End `lease`, and what was written under it."""
        try:
            await self._ask("lease/revoke", ID=str(lease))
        except NoLease:
            return

    async def watch(
        self, key: bytes, revision: int, silent_s: float, *, prefix: bool = False
    ) -> AsyncGenerator[list[KeyEvent], None]:
        """Changes of `key`, or of all keys that begin with it, from `revision` on. Ends after `silent_s`
        without one, for nobody says that a machine is gone. Raises Compacted."""
        create = _under(key) if prefix else {"key": _b64(key)}
        body = {"create_request": {**create, "start_revision": str(revision)}}
        timeout = httpx.Timeout(self._connect_s, read=silent_s)
        url = f"{self._bases[self._at]}/v3/watch"
        try:
            headers = self._shown(await self._login(""))
            request = self._client.build_request("POST", url, json=body, timeout=timeout, headers=headers)
            async with asyncio.timeout(silent_s):
                answer = await self._client.send(request)
            try:
                if answer.status_code != 200:
                    async with asyncio.timeout(self._connect_s):
                        raise self._refusal(answer.status_code, await self._client.content(answer))
                async with aclosing(_lines(self._client.pieces(answer))) as lines:
                    while True:
                        # A line has so long as a whole: its bytes could come one by one.
                        async with asyncio.timeout(silent_s):
                            line = await anext(lines, None)
                        news = _decode(line, _Line).result if line is not None else None
                        if news is None or news.canceled:
                            if news is not None and news.compact_revision:
                                raise Compacted
                            break
                        if news.events:
                            yield news.events
            finally:
                await answer.aclose()
            raise BootstrapUnreachable(f"etcd at {self._bases[self._at]} ended a watch")
        except (httpx.ReadTimeout, TimeoutError):
            return
        except StaleToken:
            return  # the next question gets another one
        except (httpx.HTTPError, ssl.SSLError) as error:
            raise self._away(error) from error

    async def close(self) -> None:
        """End all calls, and give the connections back."""
        await self._client.aclose()

    # ---- inside ---------------------------------------------------------------------------------

    async def _ask(self, method: str, **body: object) -> bytes:
        token = ""
        for _ in range(2):
            token = await self._login(token)
            with contextlib.suppress(StaleToken):
                return await self._ask_as(token, method, **body)
        raise self._distrusts()

    async def _login(self, stale: str) -> str:
        """Our token, another one than `stale`; empty without a user."""
        if self._user is None:
            return ""
        async with self._logging_in:  # each costs etcd a tenth of a second
            if self._token in ("", stale):
                name, password = self._user.name, _password(self._user.password_file)
                data = await self._ask_as("", "auth/authenticate", name=name, password=password)
                self._token = _decode(data, _Token).token
            return self._token

    def _distrusts(self) -> SegueError:
        return BootstrapUnreachable(
            f"etcd at {self._bases[self._at]} refuses the token that it has just given"
        )

    def _shown(self, token: str) -> dict[str, str]:
        return {"Authorization": token} if token else {}

    async def _ask_as(self, token: str, method: str, **body: object) -> bytes:
        content = msgspec.json.encode(body)
        for left in range(len(self._bases) - 1, -1, -1):
            try:
                url = f"{self._bases[self._at]}/v3/{method}"
                request = self._client.build_request(
                    "POST", url, content=content, timeout=self._connect_s, headers=self._shown(token)
                )
                answer = await self._client.ask(request, self._connect_s)
                if answer.status == 200:
                    return answer.content
                raise self._refusal(answer.status, answer.content)
            except (httpx.HTTPError, ssl.SSLError) as error:
                trouble: SegueError = self._away(error)
            except SegueError as error:
                trouble = error
            except StaleToken:
                if token:
                    raise
                trouble = self._distrusts()
            if not trouble.info.retryable or not left:
                raise trouble
        raise AssertionError("there is a place")

    def _refusal(self, status: int, data: bytes) -> SegueError:
        where = self._bases[self._at]
        try:
            wrong = msgspec.json.decode(data, type=_Wrong)
        except DECODE_ERRORS:
            if not proxy_in_trouble(status):
                return PeerRefused(f"{where} answered {status} and is no etcd with a JSON gateway")
            wrong = _Wrong(f"a proxy answered {status}")
        if wrong.code == _NOT_FOUND:
            raise NoLease(wrong.error)
        if wrong.code in _REFUSED and self._user is not None and any(s in wrong.error for s in _STALE):
            raise StaleToken
        if wrong.code in _REFUSED:
            return Unauthorized(f"etcd at {where} refuses: {wrong.error}")
        self._next()
        return BootstrapUnreachable(f"etcd at {where} cannot answer: {wrong.error}")

    def _away(self, error: httpx.HTTPError | ssl.SSLError) -> SegueError:
        where = self._bases[self._at]
        self._next()
        if isinstance(error, httpx.TimeoutException):
            return BootstrapTimeout(f"etcd at {where} did not answer in time ({type(error).__name__})")
        return unreachable(f"etcd at {where}", error, encrypted=where.startswith("https:"))

    def _next(self) -> None:
        self._at = (self._at + 1) % len(self._bases)


def _password(file: str) -> str:
    """Its first line. Raises ConfigError."""
    try:
        with Path(file).open("rb") as opened:
            text = opened.read(MAX_PASSWORD_BYTES + 1).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the password file {file} of --registry cannot be read: {error}") from error
    password = text.partition("\n")[0].removesuffix("\r")
    if not password or len(text) > MAX_PASSWORD_BYTES:
        raise ConfigError(
            f"the password file {file} of --registry must hold one line of at most {MAX_PASSWORD_BYTES} bytes"
        )
    return password


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _under(prefix: bytes) -> dict[str, object]:
    return {"key": _b64(prefix), "range_end": _b64(prefix[:-1] + bytes([prefix[-1] + 1]))}


def _decode(data: bytes, type_: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=type_, strict=False)
    except DECODE_ERRORS as error:
        raise PeerRefused(f"an answer of etcd is no {type_.__name__.strip('_')}: {error}") from error


async def _lines(pieces: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """Whole lines of a bounded length."""
    rest = bytearray()
    async for piece in pieces:
        rest += piece
        if b"\n" in piece:
            *lines, tail = rest.split(b"\n")
            for line in filter(None, lines):
                yield bytes(line)
            rest = bytearray(tail)
        if len(rest) > MAX_LINE:
            raise PeerRefused(f"a line of etcd's watch is longer than {MAX_LINE} bytes")
