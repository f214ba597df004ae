"""The registry as its users see it: `Registry`, over HTTP or in the same process.

Both implementations share everything but the way a question reaches the store (`_Door`), so that a
test with `LocalRegistry` tests what `RegistryClient` does.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Protocol, TypeVar

import httpx
import msgspec

from segue.bootstrap.auth import bearer_token
from segue.bootstrap.digest import DIGEST_HEADER, digest_of
from segue.bootstrap.guarded_http import ErrorBody
from segue.bootstrap.records import DrainFlag, InstanceList, InstanceRecord, RoomRecord
from segue.bootstrap.server import MAX_WAIT_S
from segue.bootstrap.store import RegistryStore
from segue.bootstrap.waiting import StoreWaiter, SystemClock
from segue.core.clock import Clock
from segue.core.errors import (
    DECODE_ERRORS,
    BootstrapTimeout,
    BootstrapUnreachable,
    ChecksumMismatch,
    ConfigError,
    DpRankConflict,
    DpRankOutOfRange,
    Draining,
    InvalidRequest,
    NotFound,
    PeerRefused,
    PeerRestarted,
    SegueError,
    Unauthorized,
)
from segue.core.limits import Limits
from segue.core.types import Incarnation, Placement, Role
from segue.session.tls import Tls, explain, not_tls

T = TypeVar("T")
ErrorReport = Callable[[SegueError], None]

#: What ends a keep-alive: the registry contradicts us, or this incarnation is over. Anything else
#: (away, full, a wrong secret until somebody corrects it) may pass.
_OVER = (PeerRestarted, Draining, DpRankConflict, DpRankOutOfRange, InvalidRequest)

_FIRST_BACKOFF_S = 0.1
_LAST_BACKOFF_S = 2.0


class Registry(Protocol):
    """Who is there, and which DP rank owns which room. All errors are SegueErrors."""

    async def register(self, record: InstanceRecord) -> None:
        """Register the ranks in `record.replicas` (usually one: the caller's own)."""
        ...

    async def keep_alive(self, incarnation: Incarnation) -> None:
        """Keep what was registered alive, also across restarts of the registry, until `leave` (then
        it returns) or cancellation. Raises if the registry says that this incarnation is over
        (PeerRestarted, Draining) or contradicts itself (DpRankConflict)."""
        ...

    async def leave(self, incarnation: Incarnation) -> None:
        """Say that the instance is gone. Never raises because the registry is away."""
        ...

    async def set_draining(self, incarnation: Incarnation, draining: bool) -> None:
        """Flag that the instance takes no new work (or takes it again)."""
        ...

    def watch(self, role: Role | None = None) -> AsyncIterator[list[InstanceRecord]]:
        """The ready instances of `role` (draining ones too, flagged), now and after every change,
        until `aclose` or cancellation. While the registry is away the last list stands; errors go
        to the registry's `on_error`. Raises only if the very first question is refused for good
        (Unauthorized, …)."""
        ...

    async def register_room(self, room: int, placement: Placement, ttl_s: float) -> None:
        """Say that `room` belongs to `placement` for `ttl_s` seconds. DpRankConflict if it belongs
        to another."""
        ...

    async def resolve_room(self, room: int, timeout_s: float) -> Placement:
        """Who owns `room`; waits until somebody says so. BootstrapTimeout after `timeout_s`."""
        ...

    async def aclose(self) -> None:
        """End every watch and keep-alive, and give the connections back."""
        ...


class _Door(ABC):
    """The store's operations, however they are reached. Each raises SegueErrors only."""

    @abstractmethod
    async def put_rank(self, record: InstanceRecord, dp_rank: int) -> None: ...

    @abstractmethod
    async def put_draining(self, incarnation: Incarnation, draining: bool) -> None: ...

    @abstractmethod
    async def delete(self, incarnation: Incarnation) -> None: ...

    @abstractmethod
    async def instances(self, role: Role | None, version: int | None, wait_s: float) -> InstanceList: ...

    @abstractmethod
    async def put_room(self, room: int, record: RoomRecord) -> None: ...

    @abstractmethod
    async def room(self, room: int, wait_s: float) -> Placement | None: ...

    @abstractmethod
    async def close(self) -> None: ...


class _HttpDoor(_Door):
    def __init__(self, url: str, secret: bytes | None, limits: Limits, tls: Tls | None) -> None:
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
        self._client = httpx.AsyncClient(
            base_url=self._url,
            headers=headers,
            verify=tls.client if tls is not None else False,
            # Never through a proxy of the environment, and never to where an answer points.
            trust_env=False,
            follow_redirects=False,
            limits=httpx.Limits(max_connections=limits.max_queue, max_keepalive_connections=16),
        )

    async def put_rank(self, record: InstanceRecord, dp_rank: int) -> None:
        await self._ask("PUT", f"/v1/instances/{record.incarnation}/ranks/{dp_rank}", body=record)

    async def put_draining(self, incarnation: Incarnation, draining: bool) -> None:
        await self._ask("PUT", f"/v1/instances/{incarnation}/draining", body=DrainFlag(draining=draining))

    async def delete(self, incarnation: Incarnation) -> None:
        await self._ask("DELETE", f"/v1/instances/{incarnation}")

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

    async def room(self, room: int, wait_s: float) -> Placement | None:
        try:
            data = await self._ask("GET", f"/v1/rooms/{room}", query={"wait_s": wait_s}, wait_s=wait_s)
        except _NotYet:
            return None
        return self._decode(data, Placement)

    async def close(self) -> None:
        await self._client.aclose()

    async def _ask(
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
            answer = await self._client.send(request)
        except httpx.TimeoutException as error:
            text = f"the registry at {self._url} did not answer in time ({type(error).__name__})"
            raise BootstrapTimeout(text) from error
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        told = answer.headers.get(DIGEST_HEADER)
        if told is not None and told != digest_of(b"%d" % answer.status_code, answer.content):
            raise ChecksumMismatch(f"an answer of the registry at {self._url} was changed on its way")
        if answer.status_code == 200:
            return answer.content
        try:
            info = msgspec.json.decode(answer.content, type=ErrorBody).error
        except DECODE_ERRORS as error:
            text = f"{self._url} answered {answer.status_code} and is no segue registry"
            raise PeerRefused(text) from error
        if path.startswith("/v1/rooms/") and isinstance(info.exception(), BootstrapTimeout):
            raise _NotYet(info.text)
        raise info.exception()

    def _unreachable(self, error: httpx.HTTPError) -> SegueError:
        reason = _ssl_error(error)
        if isinstance(reason, ssl.SSLCertVerificationError):
            return Unauthorized(f"the registry at {self._url}: {explain(reason)}")
        if reason is not None and not_tls(reason):
            return PeerRefused(f"the registry at {self._url}: {explain(reason)}")
        text = f"the registry at {self._url} cannot be reached: {error or type(error).__name__}"
        if self._url.startswith("https:") and not isinstance(error, httpx.ConnectError):
            # Of TLS 1.3 the client hears nothing when the server rejects its certificate.
            text += "; it may not accept our --tls-cert (then its log says why)"
        return BootstrapUnreachable(text)

    def _decode(self, data: bytes, type_: type[T]) -> T:
        try:
            return msgspec.json.decode(data, type=type_)
        except DECODE_ERRORS as error:
            raise PeerRefused(f"{self._url} answered with something else than a {type_.__name__}") from error


class _NotYet(Exception):
    """The registry waited in vain; it is there, and may be asked again."""


def _ssl_error(error: BaseException) -> ssl.SSLError | None:
    """The TLS error at the root of an error of httpx, if there is one."""
    cause: BaseException | None = error
    for _ in range(8):  # httpx, httpcore and anyio each put a layer around it
        if cause is None or isinstance(cause, ssl.SSLError):
            return cause
        cause = cause.__cause__ or cause.__context__
    return None


class _LocalDoor(_Door):
    def __init__(self, store: RegistryStore, clock: Clock) -> None:
        self._store = store
        self._waiter = StoreWaiter(store, clock)

    async def put_rank(self, record: InstanceRecord, dp_rank: int) -> None:
        self._store.register(record, dp_rank)

    async def put_draining(self, incarnation: Incarnation, draining: bool) -> None:
        self._store.set_draining(incarnation, draining)

    async def delete(self, incarnation: Incarnation) -> None:
        self._store.leave(incarnation)

    async def instances(self, role: Role | None, version: int | None, wait_s: float) -> InstanceList:
        return await self._waiter.instances(role, version, wait_s)

    async def put_room(self, room: int, record: RoomRecord) -> None:
        self._store.register_room(room, record)

    async def room(self, room: int, wait_s: float) -> Placement | None:
        return await self._waiter.room(room, wait_s)

    async def close(self) -> None:
        self._waiter.close()


class _Registry:
    """`Registry` over a door."""

    def __init__(self, door: _Door, limits: Limits, on_error: ErrorReport | None) -> None:
        self._door = door
        self._ttl_s = limits.registry_ttl_s
        self._on_error = on_error
        self._mine: dict[Incarnation, InstanceRecord] = {}
        self._left: dict[Incarnation, asyncio.Event] = {}
        self._closing = asyncio.Event()
        #: The last error that `watch` or `keep_alive` survived; None once the registry answers.
        self.last_error: SegueError | None = None

    async def register(self, record: InstanceRecord) -> None:
        await self._put(record)
        known = self._mine.get(record.incarnation)
        if known is not None:
            more = {r.dp_rank: r for r in (*known.replicas, *record.replicas)}
            record = msgspec.structs.replace(record, replicas=list(more.values()))
        self._mine[record.incarnation] = record
        self._left.setdefault(record.incarnation, asyncio.Event())

    async def keep_alive(self, incarnation: Incarnation) -> None:
        left = self._left.get(incarnation)
        if left is None:
            raise NotFound(f"{incarnation[:8]} was not registered here")
        backoff = _Backoff()
        wait_s = self._ttl_s / 3
        while not await self._pause(wait_s, left):
            try:
                await self._put(self._mine[incarnation])
            except SegueError as error:
                if left.is_set():
                    return
                if isinstance(error, _OVER):
                    raise
                self._report(error)
                wait_s = min(backoff.next_s(), self._ttl_s / 3)
                continue
            self._healthy()
            backoff.reset()
            wait_s = self._ttl_s / 3

    async def leave(self, incarnation: Incarnation) -> None:
        self._mine.pop(incarnation, None)
        left = self._left.pop(incarnation, None)
        if left is not None:
            left.set()
        try:
            await self._door.delete(incarnation)
        except SegueError as error:
            self._report(error)  # it will hear of us no more, and drop us after its TTL

    async def set_draining(self, incarnation: Incarnation, draining: bool) -> None:
        record = self._mine.get(incarnation)
        if record is not None:
            # Remembered first: a registry that restarts learns it from the next keep-alive.
            self._mine[incarnation] = msgspec.structs.replace(record, draining=draining)
        try:
            await self._door.put_draining(incarnation, draining)
        except NotFound:
            if record is None:
                raise
            await self._put(self._mine[incarnation])
            await self._door.put_draining(incarnation, draining)

    async def watch(self, role: Role | None = None) -> AsyncIterator[list[InstanceRecord]]:
        view = _View(self._ttl_s)
        backoff = _Backoff()
        shown: list[InstanceRecord] | None = None
        while not self._closing.is_set():
            try:
                answer = await self._unless_closing(
                    self._door.instances(role, view.version, view.wait_s(MAX_WAIT_S))
                )
            except SegueError as error:
                if self._closing.is_set():
                    return
                if shown is None and not error.info.retryable:
                    raise
                self._report(error)
                await self._pause(backoff.next_s())
                continue
            if answer is None:
                return
            self._healthy()
            backoff.reset()
            ready = [record for record in view.merge(answer) if record.ready]
            if ready != shown:
                shown = ready
                yield list(ready)

    async def register_room(self, room: int, placement: Placement, ttl_s: float) -> None:
        body = RoomRecord(incarnation=placement.incarnation, dp_rank=placement.dp_rank, ttl_s=ttl_s)
        try:
            await self._door.put_room(room, body)
        except NotFound:
            record = self._mine.get(placement.incarnation)
            if record is None:
                raise
            # The registry restarted and has not heard of us yet.
            await self._put(record)
            await self._door.put_room(room, body)

    async def resolve_room(self, room: int, timeout_s: float) -> Placement:
        backoff = _Backoff()
        trouble: SegueError | None = None
        try:
            async with asyncio.timeout(timeout_s):
                while not self._closing.is_set():
                    try:
                        placement = await self._unless_closing(
                            self._door.room(room, min(timeout_s, MAX_WAIT_S))
                        )
                    except SegueError as error:
                        if not error.info.retryable:
                            raise
                        trouble = error
                        await self._pause(backoff.next_s())
                        continue
                    backoff.reset()
                    if placement is not None:
                        return placement
        except TimeoutError:
            because = f"; last: {trouble}" if trouble is not None else ""
            text = f"nobody registered room {room} within {timeout_s} s{because}"
            raise BootstrapTimeout(text, room=room) from trouble
        raise Draining("the registry's client was closed", room=room)

    async def aclose(self) -> None:
        self._closing.set()
        await self._door.close()

    # ---- inside ---------------------------------------------------------------------------------

    async def _put(self, record: InstanceRecord) -> None:
        for replica in record.replicas:
            await self._door.put_rank(msgspec.structs.replace(record, replicas=[replica]), replica.dp_rank)

    def _report(self, error: SegueError) -> None:
        self.last_error = error
        if self._on_error is not None:
            self._on_error(error)

    def _healthy(self) -> None:
        self.last_error = None

    async def _pause(self, wait_s: float, *others: asyncio.Event) -> bool:
        """Wait; True, at once, when this client closes or one of `others` happens."""
        waits = [asyncio.ensure_future(event.wait()) for event in (self._closing, *others)]
        try:
            done, _ = await asyncio.wait(waits, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            return bool(done)
        finally:
            for wait in waits:
                wait.cancel()

    async def _unless_closing(self, question: Coroutine[object, object, T]) -> T | None:
        """The answer, or None as soon as this client closes."""
        task = asyncio.ensure_future(question)
        closing = asyncio.ensure_future(self._closing.wait())
        try:
            await asyncio.wait({task, closing}, return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            task.cancel()
            closing.cancel()


class _View:
    """What a watcher believes, over restarts of the registry.

    A restarted registry knows nobody until each instance has said its name again, which takes up
    to a TTL. In that time what was known and is not contradicted still stands.
    """

    def __init__(self, ttl_s: float) -> None:
        self.version: int | None = None
        self._ttl_s = ttl_s
        self._epoch = ""
        self._known: dict[Incarnation, InstanceRecord] = {}
        self._unconfirmed: dict[Incarnation, InstanceRecord] = {}
        self._settled_at = 0.0

    def wait_s(self, longest_s: float) -> float:
        """How long the next question may wait for news."""
        if not self._unconfirmed:
            return longest_s
        return min(longest_s, max(0.0, self._settled_at - time.monotonic()))

    def merge(self, answer: InstanceList) -> list[InstanceRecord]:
        """The list to show after `answer`."""
        if answer.epoch != self._epoch:
            self._unconfirmed = self._known | self._unconfirmed
            self._epoch = answer.epoch
            self._settled_at = time.monotonic() + max(0.0, self._ttl_s - answer.age_s)
        self.version = answer.version
        self._known = {record.incarnation: record for record in answer.instances}
        taken = {(r.host, r.port) for record in answer.instances for r in record.replicas}
        if time.monotonic() >= self._settled_at:
            self._unconfirmed = {}
        self._unconfirmed = {
            incarnation: record
            for incarnation, record in self._unconfirmed.items()
            if not (incarnation in self._known and self._known[incarnation].ready)
            and not any((r.host, r.port) in taken for r in record.replicas if incarnation not in self._known)
        }
        return list((self._known | self._unconfirmed).values())


class _Backoff:
    """Waits that double up to a cap."""

    def __init__(self) -> None:
        self._next_s = _FIRST_BACKOFF_S

    def next_s(self) -> float:
        wait_s, self._next_s = self._next_s, min(2 * self._next_s, _LAST_BACKOFF_S)
        return wait_s

    def reset(self) -> None:
        self._next_s = _FIRST_BACKOFF_S


class RegistryClient(_Registry):
    """A registry at `url`, over HTTP; `tls` is for https, which it is mandatory for.

    Make it inside the event loop that uses it. `on_error` hears what `watch` and `keep_alive`
    survive.
    """

    def __init__(
        self,
        url: str,
        *,
        secret: bytes | None,
        limits: Limits,
        on_error: ErrorReport | None = None,
        tls: Tls | None = None,
    ) -> None:
        super().__init__(_HttpDoor(url, secret, limits, tls), limits, on_error)


class LocalRegistry(_Registry):
    """A registry in this process and loop, without HTTP; `store` may also be served to others."""

    def __init__(
        self,
        store: RegistryStore,
        *,
        limits: Limits,
        clock: Clock | None = None,
        on_error: ErrorReport | None = None,
    ) -> None:
        super().__init__(_LocalDoor(store, clock or SystemClock()), limits, on_error)
