"""The registry's operations on etcd.

| key, below the deployment's prefix | value | lives |
|---|---|---|
| `ranks/HOST:PORT` | the record of the rank that listens there | under a lease of its process |
| `rooms/ROOM` | the leader that owns the room | under a lease that nobody prolongs |

One address is one key: of two incarnations there only one can be alive, and whoever finds another one at its
key has been replaced. Each value carries a code of the deployment's secret (`sealed.py`).

A rank that leaves says so (its record then has no replica). One whose key vanishes without that may only
have lost its lease, as all have at once when etcd was stopped for longer than they last: it stays on the list
for half a TTL, in which whoever lives has registered again.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from contextlib import aclosing
from typing import NamedTuple

import msgspec

from segue.kv import (
    MAX_ROOM,
    BootstrapTimeout,
    Clock,
    ConfigError,
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
from segue.kv.session import Tls, is_loopback
from segue.server.registry.backends import RegistryBackend
from segue.server.registry.etcd import Compacted, Etcd, KeyEvent, Kv, NoLease
from segue.server.registry.listed import FollowedList, listed
from segue.server.registry.registry_records import (
    DrainFlag,
    InstanceList,
    InstanceRecord,
    Registered,
    RoomRecord,
)
from segue.server.registry.sealed import Seal
from segue.server.settings.registry_address import bracket, registry_places, registry_user

#: How often somebody else may write between our read and our write, one after the other.
_TRIES = 8
#: A lease for rooms serves those that come within this time.
_ROOM_LEASE_S = 60
_MAX_ROOM_TTL_S = 3600.0


class _OwnRank(NamedTuple):
    """The rank that this process has registered, its key and its lease."""

    leader: LeaderId
    dp_size: int
    key: bytes
    lease: int


class EtcdBackend(RegistryBackend):
    """The registry in the etcd cluster that `url` names, for one rank at most."""

    def __init__(
        self, url: str, secret: bytes | None, limits: Limits, tls: Tls | None, clock: Clock | None = None
    ) -> None:
        places = registry_places(url)
        if secret is None and not all(is_loopback(host) for host, _ in places):
            raise ConfigError(
                f"{url} can be written to by others; give --secret-file with the deployment's secret"
            )
        self._etcd = Etcd(places, limits, tls, user=registry_user(url))
        self._seal = Seal(secret)
        self._ranks = self._seal.prefix + b"ranks/"
        self._rooms = self._seal.prefix + b"rooms/"
        self._ttl_s = limits.registry_ttl_s
        self._mirror = _Mirror(self._etcd, self._seal, self._ranks, self._ttl_s, clock or MonotonicClock())
        self._clock = clock or MonotonicClock()
        self._own: _OwnRank | None = None
        #: the rank that has left, which a late keep-alive must not register again
        self._gone: LeaderId | None = None
        self._room_lease, self._room_lease_ends = 0, -math.inf

    # ---- ranks ------------------------------------------------------------------------------------

    async def put_rank(self, record: InstanceRecord) -> Registered:
        where = record.replicas[0]
        leader = LeaderId(record.incarnation, where.dp_rank)
        key = self._ranks + f"{bracket(where.host)}:{where.port}".encode()
        mine = self._own if self._own is not None and self._own.leader == leader else None
        if mine is None or mine.key != key:
            await self._check(record)
        lease = mine.lease if mine is not None else None
        if lease is not None and not await self._etcd.keep_alive(lease):
            lease = None
        for _ in range(_TRIES):
            self._still_here(leader)
            known, revision = await self._etcd.get(key)
            held = self._record(known)
            if held is not None and held.incarnation != record.incarnation:
                if mine is not None:
                    raise PeerRestarted(
                        f"{held.role} {held.incarnation[:8]} has taken the address of {record.role} {leader}"
                    )
                held = None
            if held is not None and not held.replicas:
                raise Draining(f"{record.role} {leader} has left the registry and cannot come back")
            complete = record.complete or (held is not None and held.complete)
            complete = complete or await self._complete(record)
            # A heartbeat that was made before the flag changed must not change it back.
            draining = record.draining if held is None else held.draining
            record = msgspec.structs.replace(record, complete=complete, draining=draining)
            if lease is None:
                lease = await self._etcd.grant(math.ceil(self._ttl_s))
            if held == record and known.lease == lease:
                return Registered(version=revision, epoch=str(lease), complete=complete)
            try:
                written = await self._etcd.put(known, self._seal.close(key, record), lease)
            except NoLease:
                lease = None
                continue
            if leader == self._gone:
                await self._etcd.revoke(lease)
            elif written:
                mine = self._own = _OwnRank(leader, record.dp_size, key, lease)
        self._still_here(leader)
        raise _too_often(key)

    def _still_here(self, leader: LeaderId) -> None:
        if leader == self._gone:
            raise Draining(f"rank {leader} has left the registry and cannot come back")

    async def _check(self, record: InstanceRecord) -> None:
        """Refuse a record that contradicts a live instance. If two come at once, watchers take the first."""
        others = [r for r in await self._all() if r.replicas and not _replaced(r, record)]
        known = listed(others)
        known.register(record, record.replicas[0].dp_rank)

    async def _complete(self, record: InstanceRecord) -> bool:
        if record.dp_size == 1:
            return True
        others = [r for r in await self._all() if r.replicas and not _replaced(r, record)]
        return any(r.complete for r in listed([*others, record]).instances().instances if _same(r, record))

    async def _all(self) -> list[InstanceRecord]:
        read = await self._etcd.read(self._ranks)
        return [record for kv in read.kvs if (record := self._record(kv)) is not None]

    def _record(self, kv: Kv) -> InstanceRecord | None:
        """The record of a rank; None if there is none or it was written without the secret."""
        return self._seal.open(kv.key, kv.value, InstanceRecord) if kv.value else None

    async def put_draining(self, incarnation: Incarnation, flag: DrainFlag) -> None:
        found = False
        for kv in (await self._etcd.read(self._ranks)).kvs:
            known, record = kv, self._record(kv)
            for _ in range(_TRIES):
                if record is None or not record.replicas or record.incarnation != incarnation:
                    break
                if flag.dp_rank not in (None, record.replicas[0].dp_rank):
                    break
                found = True
                new = msgspec.structs.replace(record, draining=flag.draining)
                if new == record or await self._etcd.put(known, self._seal.close(kv.key, new), None):
                    break
                known, _ = await self._etcd.get(kv.key)
                record = self._record(known)
            else:
                raise _too_often(kv.key)
        if not found:
            raise NotFound(f"no instance {incarnation[:8]} is registered")

    async def delete(self, leader: LeaderId) -> None:
        self._gone, own = leader, self._own
        for kv in (await self._etcd.read(self._ranks)).kvs:
            record = self._record(kv)
            if record is None or LeaderId(record.incarnation, _dp_rank(record)) != leader:
                continue
            left = msgspec.structs.replace(record, replicas=[])
            await self._etcd.put(kv, self._seal.close(kv.key, left), None)
        if own is not None and own.leader == leader:
            self._own = None
            await self._etcd.revoke(own.lease)

    async def instances(self, role: Role | None, version: int | None, wait_s: float) -> InstanceList:
        return await self._mirror.instances(role, version, wait_s)

    # ---- rooms ------------------------------------------------------------------------------------

    async def put_room(self, room: int, record: RoomRecord) -> None:
        key, leader = self._room_key(room), LeaderId(record.incarnation, record.dp_rank)
        if not 0 < record.ttl_s < math.inf:
            raise InvalidRequest(f"ttl_s must be positive and finite, not {record.ttl_s}", room=room)
        if self._own is None or self._own.leader.incarnation != leader.incarnation:
            raise NotFound(f"no instance {leader.incarnation[:8]} is registered here", room=room)
        if not 0 <= leader.dp_rank < self._own.dp_size:
            last = self._own.dp_size - 1
            raise DpRankOutOfRange(f"there are ranks 0 … {last}, not {leader.dp_rank}", room=room)
        for _ in range(_TRIES):
            known, _ = await self._etcd.get(key)
            owner = self._leader(known)
            if owner == leader:
                return
            if owner is not None:
                raise DpRankConflict(f"room {room} belongs to {owner}, not to {leader}", room=room)
            lease = await self._lease_for_rooms(min(record.ttl_s, _MAX_ROOM_TTL_S))
            try:
                if await self._etcd.put(known, self._seal.close(key, leader), lease):
                    return
            except NoLease:
                self._room_lease_ends = -math.inf
        raise _too_often(key)

    async def room(self, room: int, wait_s: float) -> LeaderId | None:
        key = self._room_key(room)
        try:
            async with asyncio.timeout(max(wait_s, 0.0) or None):
                while True:
                    known, revision = await self._etcd.get(key)
                    if (owner := self._leader(known)) is not None or wait_s <= 0:
                        return owner
                    try:
                        async with aclosing(self._etcd.watch(key, revision + 1, self._ttl_s)) as news:
                            async for events in news:
                                if any(self._leader(event.kv) is not None for event in events):
                                    break
                    except Compacted:
                        continue
        except TimeoutError:
            return None

    def _room_key(self, room: int) -> bytes:
        if not 1 <= room <= MAX_ROOM:
            raise InvalidRequest(f"room must be in 1 … 2**64 - 1, not {room}", room=0)
        return self._rooms + str(room).encode()

    def _leader(self, kv: Kv) -> LeaderId | None:
        return self._seal.open(kv.key, kv.value, LeaderId) if kv.value else None

    async def _lease_for_rooms(self, ttl_s: float) -> int:
        """A lease that lives for `ttl_s` more, and not for much longer."""
        if self._clock.now() + ttl_s > self._room_lease_ends:
            whole_s = math.ceil(ttl_s) + _ROOM_LEASE_S
            began = self._clock.now()
            self._room_lease = await self._etcd.grant(whole_s)
            self._room_lease_ends = began + whole_s
        return self._room_lease

    async def close(self) -> None:
        self._mirror.close()
        await self._etcd.close()


class _Mirror:
    """A copy of the keys under the prefix of ranks; one watch serves all readers, from the first one on."""

    def __init__(self, etcd: Etcd, seal: Seal, prefix: bytes, ttl_s: float, clock: Clock) -> None:
        self._etcd = etcd
        self._seal = seal
        self._prefix = prefix
        self._ttl_s = ttl_s
        self._clock = clock
        #: by key: the revision of its creation, and the record
        self._records: dict[bytes, tuple[int, InstanceRecord]] = {}
        self._list = FollowedList(self._follow, "the watch of etcd")
        #: changes when somebody vanished without a word, see the module's docstring
        self._epoch, self._epoch_began = 0, -math.inf

    async def instances(self, role: Role | None, version: int | None, wait_s: float) -> InstanceList:
        """See `FollowedList.instances`, but for the life of the list."""
        found = await self._list.instances(role, version, wait_s)
        age_s = self._clock.now() - self._epoch_began + self._ttl_s / 2
        return msgspec.structs.replace(found, epoch=str(self._epoch), age_s=age_s)

    def close(self) -> None:
        self._list.close()

    async def _follow(self) -> None:
        while True:
            read = await self._etcd.read(self._prefix)
            self._begin(read.kvs)
            news = self._etcd.watch(self._prefix, read.revision + 1, self._ttl_s, prefix=True)
            with contextlib.suppress(Compacted):
                async with aclosing(news):
                    async for events in news:
                        self._hear(events)

    def _begin(self, kvs: list[Kv]) -> None:
        """These are all the keys: those that are not among them have vanished."""
        before, self._records = self._records, {}
        for kv in kvs:
            self._take(kv)
        there = {kv.key for kv in kvs}
        if any(record.replicas for key, (_, record) in before.items() if key not in there):
            self._vanished()
        self._show()

    def _hear(self, events: list[KeyEvent]) -> None:
        for event in events:
            if not event.gone:
                self._take(event.kv)
            elif (known := self._records.pop(event.kv.key, None)) is not None and known[1].replicas:
                self._vanished()
        self._show()

    def _take(self, kv: Kv) -> None:
        self._records.pop(kv.key, None)
        if (record := self._seal.open(kv.key, kv.value, InstanceRecord)) is not None:
            self._records[kv.key] = kv.create_revision, record

    def _vanished(self) -> None:
        self._epoch += 1
        self._epoch_began = self._clock.now()

    def _show(self) -> None:
        order = sorted(self._records.values(), key=lambda pair: pair[0])
        self._list.show(record for _, record in order if record.replicas)


def _same(one: InstanceRecord, other: InstanceRecord) -> bool:
    return one.incarnation == other.incarnation


def _replaced(old: InstanceRecord, new: InstanceRecord) -> bool:
    """`old` is what was at the address of `new`, be it an earlier incarnation or this very rank."""
    a, b = old.replicas[0], new.replicas[0]
    return (a.host, a.port) == (b.host, b.port)


def _dp_rank(record: InstanceRecord) -> int:
    return record.replicas[0].dp_rank if record.replicas else -1


def _too_often(key: bytes) -> SegueError:
    return BootstrapTimeout(f"{key.decode()} in etcd changed under our hands {_TRIES} times")
