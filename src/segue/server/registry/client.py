"""The registry as one process uses it: it registers one rank and keeps it alive, and watches instances.

`BackendRegistry` does so over any `RegistryBackend`, `RegistryClient` over the one that a URL names. All
errors are SegueErrors.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Protocol, TypeVar

import httpx2 as httpx
import msgspec

from segue.kv import (
    BootstrapTimeout,
    Clock,
    DpRankConflict,
    DpRankOutOfRange,
    Draining,
    Incarnation,
    InvalidRequest,
    LeaderId,
    Limits,
    MonotonicClock,
    PeerRestarted,
    Role,
    SegueError,
)
from segue.kv.errors import NotFound
from segue.kv.session import Backoff, Tls, awaited
from segue.server.registry.address_backend import AddressBackend
from segue.server.registry.backends import HttpBackend, RegistryBackend
from segue.server.registry.etcd_backend import EtcdBackend
from segue.server.registry.registry_records import DrainFlag, InstanceList, InstanceRecord, RoomRecord
from segue.server.registry.registry_server import MAX_WAIT_S

T = TypeVar("T")
ErrorReport = Callable[[SegueError], None]

#: Errors that end a keep-alive: the registry contradicts us, or this incarnation is over. Anything else
#: (away, full, a wrong secret until somebody corrects it) may pass.
_OVER = (PeerRestarted, Draining, DpRankConflict, DpRankOutOfRange, InvalidRequest)

#: The longest pause between two tries of a query.
LONGEST_PAUSE_S = 2.0


def open_backend(
    url: str,
    secret: bytes | None,
    limits: Limits,
    tls: Tls | None,
    transport: httpx.AsyncBaseTransport | None = None,
) -> RegistryBackend:
    """How the registry at `url` is asked. Raises ConfigError. `transport` takes the place of sockets in a
    test."""
    scheme = url.partition(":")[0]
    if scheme == "etcd":
        return EtcdBackend(url, secret, limits, tls)
    if scheme in ("dns", "static"):
        return AddressBackend(url, secret, limits, tls)
    return HttpBackend(url, secret, limits, tls, transport)


class InstanceWatch(Protocol):
    """The part of a registry that tells who is there."""

    def watch(self, role: Role | None = None) -> AsyncIterator[list[InstanceRecord]]:
        """The ready instances of `role` (draining ones too, flagged), now and after every change,
        until `aclose` or cancellation. While the registry is away the last list stands; errors go
        to the registry's `on_error`. Raises only if the very first question is refused for good
        (Unauthorized, …)."""
        ...


class BackendRegistry:
    """The registry behind `backend`, for one process: of an instance that is the rank of one leader."""

    def __init__(
        self,
        backend: RegistryBackend,
        limits: Limits,
        on_error: ErrorReport | None,
        clock: Clock | None = None,
    ) -> None:
        self.backend = backend
        self._clock = clock or MonotonicClock()
        self._ttl_s = limits.registry_ttl_s
        #: how long one question waits: of a registry whose machine is gone nobody tells, and it is noticed as
        #: soon as it would notice us
        self._longest_s = min(MAX_WAIT_S, self._ttl_s)
        self._max_rooms = limits.max_transfers
        self._on_error = on_error
        #: the record of our rank, from its registration until it leaves
        self._own: InstanceRecord | None = None
        self._left = asyncio.Event()
        #: the registry has not heard of our drain flag
        self._unsaid = False
        #: rooms that are registered here, with the time of their end; the oldest first
        self._rooms: dict[int, tuple[LeaderId, float]] = {}
        #: the life of the registry that has answered last
        self._epoch = ""
        #: rooms that the registry has forgotten and not been told again, and whether there are any
        self._unsaid_rooms: list[int] = []
        self._forgotten = asyncio.Event()
        self._closing = asyncio.Event()
        #: The last error that `watch` or `keep_alive` survived; None once the registry answers.
        self.last_error: SegueError | None = None

    async def register(self, record: InstanceRecord) -> None:
        """Register the one rank in `record.replicas`."""
        complete = await self._put(record)
        self._own = msgspec.structs.replace(record, complete=complete)

    async def keep_alive(self) -> None:
        """Keep our rank alive, also across restarts of the registry, until `leave` (then it returns) or
        cancellation. Raises if the registry says that this incarnation is over (PeerRestarted, Draining) or
        contradicts itself (DpRankConflict)."""
        if self._own is None:
            raise NotFound("nothing was registered here")
        backoff = Backoff(longest_s=LONGEST_PAUSE_S)
        wait_s, also = self._ttl_s / 3, [self._forgotten]
        while True:
            await self._pause(wait_s, self._left, *also)
            if self._left.is_set() or self._closing.is_set():
                return
            try:
                await self._say_again()
            except SegueError as error:
                if self._left.is_set() or self._closing.is_set():
                    return
                if isinstance(error, _OVER):
                    raise
                self._report(error)
                wait_s, also = min(backoff.next_s(), self._ttl_s / 3), []
                continue
            self._healthy()
            backoff.reset()
            wait_s, also = self._ttl_s / 3, [self._forgotten]

    async def leave(self, leader: LeaderId) -> None:
        """Say that our rank is gone; others of its instance stay. Never raises because the registry is
        away."""
        self._own = None
        self._left.set()
        try:
            await self.backend.delete(leader)
        except SegueError as error:
            self._report(error)  # it will hear of us no more, and drop us after its TTL

    async def set_draining(self, draining: bool) -> None:
        """Flag that our rank takes no new work, or takes it again. The next keep-alive repeats a flag that
        the registry did not hear."""
        if self._own is None:
            raise NotFound("nothing was registered here")
        # Remembered first: a registry that is away, or restarts, learns it from the next keep-alive.
        self._own = msgspec.structs.replace(self._own, draining=draining)
        self._unsaid = True
        try:
            await self._say_draining()
        except SegueError as error:
            if self._own is not None and isinstance(error, _OVER):
                raise
            self._report(error)

    async def watch(self, role: Role | None = None) -> AsyncIterator[list[InstanceRecord]]:
        """See `InstanceWatch.watch`."""
        view = InstanceView(self._ttl_s, self._clock)
        backoff = Backoff(longest_s=LONGEST_PAUSE_S)
        shown: list[InstanceRecord] | None = None
        while not self._closing.is_set():
            try:
                answer = await self._unless_closing(
                    self.backend.instances(role, view.version, view.wait_s(self._longest_s))
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

    async def register_room(self, room: int, leader: LeaderId, ttl_s: float) -> None:
        """Say that `room` belongs to `leader` for `ttl_s` seconds; a registry that is away is tried for so
        long. DpRankConflict if it belongs to another. The keep-alive says it again to a registry that has
        restarted."""
        until, backoff = self._clock.now() + ttl_s, Backoff(longest_s=LONGEST_PAUSE_S)
        # Before it is said: the answer of a registry that has ended since may be heard after that of the next
        # one, which is told what is known here by then.
        mine = leader, until
        self._remember(room, mine)
        try:
            while True:
                try:
                    await self._put_room(room, leader, until)
                    return
                except SegueError as error:
                    pause_s = backoff.next_s()
                    too_late = self._clock.now() + pause_s >= until
                    if not self._may_pass(error, leader) or too_late or await self._pause(pause_s):
                        raise
                    if self._clock.now() >= until:  # this process stood still meanwhile
                        raise
        except BaseException:
            if self._rooms.get(room) is mine:
                del self._rooms[room]
            raise

    async def resolve_room(self, room: int, timeout_s: float) -> LeaderId:
        """The owner of `room`; waits until it is registered. BootstrapTimeout after `timeout_s`."""
        backoff = Backoff(longest_s=LONGEST_PAUSE_S)
        trouble: SegueError | None = None
        try:
            async with asyncio.timeout(timeout_s):
                while not self._closing.is_set():
                    try:
                        leader = await self._unless_closing(
                            self.backend.room(room, min(timeout_s, self._longest_s))
                        )
                    except SegueError as error:
                        if not error.info.retryable:
                            raise
                        trouble = error
                        await self._pause(backoff.next_s())
                        continue
                    backoff.reset()
                    if leader is not None:
                        return leader
        except TimeoutError:
            because = f"; last: {trouble}" if trouble is not None else ""
            text = f"nobody registered room {room} within {timeout_s} s{because}"
            raise BootstrapTimeout(text, room=room) from trouble
        raise Draining("the registry's client was closed", room=room)

    async def aclose(self) -> None:
        """End every watch and keep-alive, and give the connections back."""
        self._closing.set()
        await self.backend.close()

    # ---- inside ---------------------------------------------------------------------------------

    def _remember(self, room: int, mine: tuple[LeaderId, float]) -> None:
        """Remember a room, to register it again after a registry's restart, if there is space."""
        if len(self._rooms) >= self._max_rooms:
            now = self._clock.now()
            self._rooms = {room: mine for room, mine in self._rooms.items() if mine[1] > now}
        if len(self._rooms) < self._max_rooms:
            self._rooms[room] = mine

    def _may_pass(self, error: SegueError, leader: LeaderId) -> bool:
        """A registry that knows nothing of us has begun anew, once more since we told it who we are."""
        return error.info.retryable or (isinstance(error, NotFound) and self._is_ours(leader))

    def _is_ours(self, leader: LeaderId) -> bool:
        return self._own is not None and self._own.incarnation == leader.incarnation

    async def _say_again(self) -> None:
        """All that a registry may have forgotten."""
        if self._own is None:
            return
        complete = await self._put(self._own)
        if self._own is not None:  # it may have left meanwhile
            self._own = msgspec.structs.replace(self._own, complete=complete)
        if self._unsaid:
            await self._say_draining()
        await self._say_rooms()

    async def _put(self, record: InstanceRecord) -> bool:
        """Returns whether all ranks of the instance have been there."""
        answer = await self.backend.put_rank(record)
        if self._rooms and (answer.new or self._epoch not in ("", answer.epoch)):
            # Said by a keep-alive, at once: not by each request that finds it out and has a deadline.
            self._unsaid_rooms = list(self._rooms)
            self._forgotten.set()
        self._epoch = answer.epoch
        return record.complete or answer.complete

    async def _put_room(self, room: int, leader: LeaderId, until: float) -> None:
        ttl_s = until - self._clock.now()
        body = RoomRecord(incarnation=leader.incarnation, dp_rank=leader.dp_rank, ttl_s=ttl_s)
        try:
            await self.backend.put_room(room, body)
        except NotFound:
            if self._own is None or not self._is_ours(leader):
                raise
            # The registry restarted and has not heard of us yet.
            await self._put(self._own)
            await self.backend.put_room(room, body)

    async def _say_rooms(self) -> None:
        """Register rooms again with a restarted registry, the newest first; as many as fit between two
        keep-alives."""
        self._forgotten.clear()
        pause_at = self._clock.now() + self._ttl_s / 3
        while self._unsaid_rooms:
            room = self._unsaid_rooms.pop()
            leader, until = self._rooms.get(room, (None, 0.0))
            now = self._clock.now()
            if leader is None or until <= now:
                continue
            try:
                await self._put_room(room, leader, until)
            except BaseException as error:
                if not isinstance(error, (NotFound, *_OVER)) or self._may_pass(error, leader):
                    self._unsaid_rooms.append(room)
                    self._forgotten.set()
                    raise
                self._rooms.pop(room, None)  # it has another owner by now: of one room nobody dies
                self._report(error)
            if self._clock.now() >= pause_at and self._unsaid_rooms:
                self._forgotten.set()
                return

    async def _say_draining(self) -> None:
        if (record := self._own) is None:
            return
        flag = DrainFlag(draining=record.draining, dp_rank=record.replicas[0].dp_rank)
        try:
            await self.backend.put_draining(record.incarnation, flag)
        except NotFound:
            await self._put(record)  # the registry restarted and has not heard of us yet
            await self.backend.put_draining(record.incarnation, flag)
        if self._own is not None and self._own.draining == flag.draining:
            self._unsaid = False

    def _report(self, error: SegueError) -> None:
        self.last_error = error
        if self._on_error is not None:
            self._on_error(error)

    def _healthy(self) -> None:
        self.last_error = None

    async def _pause(self, wait_s: float, *others: asyncio.Event) -> bool:
        """Wait; True, at once, when this client closes or one of `others` happens."""
        events = (self._closing, *others)
        waits = [awaited(event.wait()) for event in events]
        try:
            await asyncio.wait(waits, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            # Not which of `waits` are done: they are so a turn after their event.
            return any(event.is_set() for event in events)
        finally:
            for wait in waits:
                wait.cancel()

    async def _unless_closing(self, question: Coroutine[object, object, T]) -> T | None:
        """The answer, or None as soon as this client closes."""
        task = awaited(question)
        closing = awaited(self._closing.wait())
        try:
            await asyncio.wait({task, closing}, return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            task.cancel()
            closing.cancel()


def _as_many(record: InstanceRecord, before: InstanceRecord) -> bool:
    """An instance is as it was `before`, or has more ranks."""
    return record.ready and len(record.replicas) >= len(before.replicas)


class InstanceView:
    """A watcher's list, over restarts of the registry.

    A restarted registry is empty until each instance has registered again, which takes up to a TTL. In that
    time known instances stay listed unless contradicted.
    """

    def __init__(self, ttl_s: float, clock: Clock) -> None:
        self._clock = clock
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
        return min(longest_s, max(0.0, self._settled_at - self._clock.now()))

    def merge(self, answer: InstanceList) -> list[InstanceRecord]:
        """The list to show after `answer`."""
        if answer.epoch != self._epoch:
            self._unconfirmed = self._known | self._unconfirmed
            self._epoch = answer.epoch
            self._settled_at = self._clock.now() + max(0.0, self._ttl_s - answer.age_s)
        self.version = answer.version
        self._known = {record.incarnation: record for record in answer.instances}
        taken = {(r.host, r.port) for record in answer.instances for r in record.replicas}
        if self._clock.now() >= self._settled_at:
            self._unconfirmed = {}
        self._unconfirmed = {
            incarnation: record
            for incarnation, record in self._unconfirmed.items()
            if (incarnation not in self._known or not _as_many(self._known[incarnation], record))
            and not any((r.host, r.port) in taken for r in record.replicas if incarnation not in self._known)
        }
        found = self._known | self._unconfirmed
        # In one order, whoever came back first: the same instances are no news.
        return [found[incarnation] for incarnation in sorted(found)]


class RegistryClient(BackendRegistry):
    """The registry that `url` names: ours over HTTP(S), or etcd; `tls` is for both.

    Make it inside the event loop that uses it. `on_error` hears what `watch` and `keep_alive`
    survive. `transport` takes the place of sockets in a test.
    """

    def __init__(
        self,
        url: str,
        *,
        secret: bytes | None,
        limits: Limits,
        on_error: ErrorReport | None = None,
        tls: Tls | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        super().__init__(open_backend(url, secret, limits, tls, transport), limits, on_error)
