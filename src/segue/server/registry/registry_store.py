"""The registry's tables. Pure: time is injected, nothing waits here.

An entry is what one incarnation said of itself, once; the only change it may make is the drain
flag of a rank. Ranks are kept alive by saying the same again. A caller that waits subscribes, and looks again
when it is called.
"""

from __future__ import annotations

import heapq
import secrets
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import msgspec

from segue.kv import (
    MAX_ROOM,
    Clock,
    DpRankConflict,
    DpRankOutOfRange,
    Draining,
    Incarnation,
    InvalidRequest,
    LeaderId,
    OutOfCapacity,
    PeerRestarted,
    Role,
    SegueError,
)
from segue.kv.errors import NotFound
from segue.server.registry.registry_records import (
    InstanceList,
    InstanceRecord,
    Registered,
    ReplicaRecord,
    RoomRecord,
)

MAX_DP_SIZE = 2**16

#: Topics of `subscribe` beside the rooms, whose ids are positive.
TOPOLOGY: Final = 0
TIMERS: Final = -1

_MAX_TEXT = 512
#: Limit of `source`, which may be a path.
_MAX_SOURCE = 4096


@dataclass(slots=True)
class _RankEntry:
    record: ReplicaRecord
    expires_at: float
    alive: bool = True
    draining: bool = False


@dataclass(slots=True)
class _Entry:
    record: InstanceRecord  # without replicas; `complete` is current
    ranks: dict[int, _RankEntry] = field(default_factory=dict)
    rooms: set[int] = field(default_factory=set)

    @property
    def deserted(self) -> bool:
        return not any(rank.alive for rank in self.ranks.values())

    def shown(self) -> InstanceRecord:
        """The record as others see it."""
        alive = [rank for _, rank in sorted(self.ranks.items()) if rank.alive]
        return msgspec.structs.replace(
            self.record,
            draining=all(rank.draining for rank in alive),
            replicas=[msgspec.structs.replace(rank.record, draining=rank.draining) for rank in alive],
        )


@dataclass(frozen=True, slots=True)
class _StoredRoom:
    leader: LeaderId
    expires_at: float


class RegistryStore:
    """Instances and rooms, in memory.

    `ttl_s` is how long a rank lives after it was last heard of, in seconds. All tables are
    bounded: `max_instances`, `max_rooms`, `max_room_ttl_s`. `random_bytes` is for a simulator whose
    every run must be the same.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        ttl_s: float,
        max_instances: int = 4096,
        max_rooms: int = 65536,
        max_room_ttl_s: float = 3600.0,
        random_bytes: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        self.epoch = random_bytes(8).hex()
        self._clock = clock
        self._ttl_s = ttl_s
        self._max_instances = max_instances
        self._max_rooms = max_rooms
        self._max_room_ttl_s = max_room_ttl_s
        self._started_at = clock.now()
        # A random start: after a restart no watcher's last version means anything by accident.
        self._version = int.from_bytes(random_bytes(6))
        self._entries: dict[Incarnation, _Entry] = {}
        self._rooms: dict[int, _StoredRoom] = {}
        #: Ranks that must not come back, with the reason; the oldest are forgotten.
        self._past: OrderedDict[LeaderId, type[SegueError]] = OrderedDict()
        self._addresses: dict[tuple[str, int], LeaderId] = {}
        self._watchers: dict[int, list[Callable[[], None]]] = {}
        self._due: list[tuple[float, int, int | LeaderId]] = []
        self._pushes = 0

    # ---- instances ------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Changes with every visible change of the topology."""
        return self._version

    def register(self, record: InstanceRecord, dp_rank: int) -> Registered:
        """Add rank `dp_rank` of an instance, or keep it alive. `record.replicas` holds that rank.

        The same content again only prolongs its life. Other content under the same incarnation is
        DpRankConflict, a rank beyond `dp_size` DpRankOutOfRange, a nonsensical record
        InvalidRequest; a rank that left is refused with Draining, one whose address a new incarnation holds
        with PeerRestarted.
        """
        self.expire()
        replica = _check(record, dp_rank)
        entry = self._entries.get(record.incarnation)
        known = entry.ranks.get(dp_rank) if entry is not None else None
        past = self._past.get(LeaderId(record.incarnation, dp_rank))
        if past is not None:
            raise past(
                f"rank {dp_rank} of {_name(record)} has left the registry and cannot come back under the "
                "same incarnation"
            )
        base = msgspec.structs.replace(record, replicas=[], draining=False, complete=False)
        if entry is not None:
            _check_same(entry, base, replica)
        elif len(self._entries) >= self._max_instances:
            raise OutOfCapacity(f"the registry already holds {self._max_instances} instances")
        self._supersede(record.incarnation, replica)
        if entry is None:
            entry = self._entries[record.incarnation] = _Entry(base)
        leader = LeaderId(record.incarnation, dp_rank)
        expires_at = self._clock.now() + self._ttl_s
        # A heartbeat that was made before the flag changed must not change it back.
        draining = record.draining if known is None else known.draining
        entry.ranks[dp_rank] = _RankEntry(replica, expires_at, draining=draining)
        self._addresses[replica.host, replica.port] = leader
        self._expect_expiry(expires_at, leader)
        alive = sum(rank.alive for rank in entry.ranks.values())
        complete = entry.record.complete or record.complete or alive == entry.record.dp_size
        if known is None or not known.alive or complete != entry.record.complete:
            entry.record = msgspec.structs.replace(entry.record, complete=complete)
            self._changed()
        return Registered(version=self._version, epoch=self.epoch, complete=complete, new=known is None)

    def leave(self, leader: LeaderId) -> None:
        """This rank is gone, now and for good; the others stay. Unknown ones are ignored: leaving twice is
        fine."""
        self.expire()
        entry = self._entries.get(leader.incarnation)
        if entry is not None and leader.dp_rank in entry.ranks:
            self._take_out(leader, Draining)
            self._changed()

    def set_draining(self, incarnation: Incarnation, draining: bool, dp_rank: int | None = None) -> None:
        """Flag that the rank, or each one that is there, takes no new work. NotFound if it is not here."""
        self.expire()
        entry = self._entries.get(incarnation)
        if entry is None:
            raise NotFound(f"no instance {incarnation[:8]} is registered")
        if dp_rank is not None and dp_rank not in entry.ranks:
            raise NotFound(f"no rank {dp_rank} of {_name(entry.record)} is registered")
        ranks = entry.ranks.values() if dp_rank is None else [entry.ranks[dp_rank]]
        changed = [rank for rank in ranks if rank.draining != draining]
        for rank in changed:
            rank.draining = draining
        if changed:
            self._changed()

    def instances(self, role: Role | None = None) -> InstanceList:
        """Everybody who is alive, in the order of their incarnations, ready or not."""
        self.expire()
        found = [
            entry.shown()
            for _, entry in sorted(self._entries.items())
            if role is None or entry.record.role is role
        ]
        return InstanceList(
            version=self._version,
            epoch=self.epoch,
            age_s=self._clock.now() - self._started_at,
            instances=found,
        )

    # ---- rooms ----------------------------------------------------------------------------------

    def register_room(self, room: int, record: RoomRecord) -> None:
        """`room` belongs to this rank until `ttl_s` has passed. The same again changes nothing;
        another owner is DpRankConflict. NotFound if the instance is not registered."""
        self.expire()
        if not 1 <= room <= MAX_ROOM:
            raise InvalidRequest(f"room must be in 1 … 2**64 - 1, not {room}", room=0)
        if not 0 < record.ttl_s < float("inf"):
            raise InvalidRequest(f"ttl_s must be positive and finite, not {record.ttl_s}", room=room)
        entry = self._entries.get(record.incarnation)
        if entry is None:
            raise NotFound(f"no instance {record.incarnation[:8]} is registered", room=room)
        if not 0 <= record.dp_rank < entry.record.dp_size:
            raise DpRankOutOfRange(
                f"{_name(entry.record)} has ranks 0 … {entry.record.dp_size - 1}, not {record.dp_rank}",
                room=room,
            )
        leader = LeaderId(record.incarnation, record.dp_rank)
        known = self._rooms.get(room)
        if known is not None:
            if known.leader != leader:
                raise DpRankConflict(
                    f"room {room} belongs to {known.leader.incarnation[:8]} dp{known.leader.dp_rank}, "
                    f"not to {leader.incarnation[:8]} dp{leader.dp_rank}",
                    room=room,
                )
            return
        if len(self._rooms) >= self._max_rooms:
            raise OutOfCapacity(f"the registry already holds {self._max_rooms} rooms", room=room)
        ttl_s = min(record.ttl_s, self._max_room_ttl_s)
        expires_at = self._clock.now() + ttl_s
        self._rooms[room] = _StoredRoom(leader, expires_at)
        entry.rooms.add(room)
        self._expect_expiry(expires_at, room)
        self._notify(room)

    def room(self, room: int) -> LeaderId | None:
        """The owner of `room`, or None while it is not registered."""
        self.expire()
        known = self._rooms.get(room)
        return known.leader if known is not None else None

    # ---- time and watchers ----------------------------------------------------------------------

    def expire(self) -> None:
        """Drop what has not been heard of in time. Called by every operation, and by whoever holds
        a timer for `next_expiry`, so that watchers hear of a silence as soon as it counts."""
        now = self._clock.now()
        changed = False
        while self._due and self._due[0][0] <= now:
            expires_at, _, what = heapq.heappop(self._due)
            # Entries are never taken out of the heap; one that was prolonged or removed is stale.
            if isinstance(what, int):
                room = self._rooms.get(what)
                if room is not None and room.expires_at == expires_at:
                    self._forget_room(what)
                continue
            entry = self._entries.get(what.incarnation)
            rank = entry.ranks.get(what.dp_rank) if entry is not None else None
            if entry is None or rank is None or not rank.alive or rank.expires_at != expires_at:
                continue
            # The record stays while the incarnation does: it must not change later either.
            rank.alive = False
            changed = True
            if entry.deserted:
                self._remove(what.incarnation)
        if changed:
            self._changed()

    def next_expiry(self) -> float | None:
        """A time, on the store's clock, by which `expire` must be called next."""
        return self._due[0][0] if self._due else None

    def subscribe(self, topic: int, watcher: Callable[[], None]) -> Callable[[], None]:
        """Call `watcher` after every change of `topic` (a room, TOPOLOGY, or TIMERS for an earlier
        `next_expiry`) until the returned function is called. It must not raise and must not call
        back into the store."""
        self._watchers.setdefault(topic, []).append(watcher)

        def unsubscribe() -> None:
            watchers = self._watchers[topic]
            watchers.remove(watcher)
            if not watchers:
                del self._watchers[topic]

        return unsubscribe

    def subscribed(self, topic: int | None = None) -> int:
        """The number of watchers of `topic`, or of all topics."""
        if topic is None:
            return sum(map(len, self._watchers.values()))
        return len(self._watchers.get(topic, ()))

    @property
    def rooms_held(self) -> int:
        """The number of registered rooms."""
        return len(self._rooms)

    # ---- inside ---------------------------------------------------------------------------------

    def _supersede(self, incarnation: Incarnation, replica: ReplicaRecord) -> None:
        """Two processes cannot listen at one address: whoever had it before is gone."""
        holder = self._addresses.get((replica.host, replica.port))
        if holder is not None and holder.incarnation != incarnation:
            self._take_out(holder, PeerRestarted)

    def _take_out(self, leader: LeaderId, why: type[SegueError]) -> None:
        """Remove one rank for good; the others stay as long as one of them is alive."""
        self._past[leader] = why
        while len(self._past) > self._max_instances:
            self._past.popitem(last=False)
        entry = self._entries[leader.incarnation]
        where = entry.ranks.pop(leader.dp_rank).record
        del self._addresses[where.host, where.port]
        for room in [room for room in entry.rooms if self._rooms[room].leader == leader]:
            self._forget_room(room)
        if entry.deserted:
            self._remove(leader.incarnation)

    def _remove(self, incarnation: Incarnation) -> None:
        entry = self._entries.pop(incarnation)
        for room in list(entry.rooms):
            self._forget_room(room)
        for rank in entry.ranks.values():
            del self._addresses[rank.record.host, rank.record.port]

    def _forget_room(self, room: int) -> None:
        known = self._rooms.pop(room)
        entry = self._entries.get(known.leader.incarnation)
        if entry is not None:
            entry.rooms.discard(room)

    def _changed(self) -> None:
        self._version += 1
        self._notify(TOPOLOGY)

    def _expect_expiry(self, expires_at: float, what: int | LeaderId) -> None:
        self._pushes += 1
        heapq.heappush(self._due, (expires_at, self._pushes, what))
        if self._due[0][1] == self._pushes:
            self._notify(TIMERS)

    def _notify(self, topic: int) -> None:
        for watcher in list(self._watchers.get(topic, ())):
            watcher()


def _name(record: InstanceRecord) -> str:
    return f"{record.role} {record.incarnation[:8]}"


def _check(record: InstanceRecord, dp_rank: int) -> ReplicaRecord:
    """The one replica in `record`, if the record makes sense."""
    if not 1 <= len(record.incarnation) <= 64:
        raise InvalidRequest(f"an incarnation has 1 to 64 characters, not {len(record.incarnation)}")
    texts = (record.model, record.served_model, record.load_balance, record.http_host)
    if any(len(text) > _MAX_TEXT for text in texts):
        raise InvalidRequest(f"a text of {_name(record)} is longer than {_MAX_TEXT} characters")
    if len(record.source) > _MAX_SOURCE:
        raise InvalidRequest(f"the source of {_name(record)} is longer than {_MAX_SOURCE} characters")
    for name in ("dp_size", "tp_size", "pp_size", "cp_size"):
        if not 1 <= getattr(record, name) <= MAX_DP_SIZE:
            raise InvalidRequest(f"{name} must be in 1 … {MAX_DP_SIZE}, not {getattr(record, name)}")
    for name in ("http_port", "bootstrap_port"):
        if not 0 <= getattr(record, name) < 2**16:
            raise InvalidRequest(f"{name} must be in 0 … 65535, not {getattr(record, name)}")
    if not 0 <= dp_rank < record.dp_size:
        raise DpRankOutOfRange(f"{_name(record)} has ranks 0 … {record.dp_size - 1}, not {dp_rank}")
    if len(record.replicas) != 1 or record.replicas[0].dp_rank != dp_rank:
        raise InvalidRequest(f"the record must hold exactly replica {dp_rank}, which it registers")
    # Its flag is the record's.
    replica = msgspec.structs.replace(record.replicas[0], draining=False)
    if not 1 <= replica.port < 2**16 or not 1 <= len(replica.host) <= 255 or not replica.host.isprintable():
        raise InvalidRequest(
            f"{replica.host[:255]!r}:{replica.port} is no address that a peer could connect to"
        )
    if max(len(text) for text in (replica.version, str(replica.transports))) > _MAX_TEXT:
        raise InvalidRequest(
            f"the version and transports of {_name(record)} are longer than {_MAX_TEXT} characters"
        )
    return replica


def _check_same(entry: _Entry, base: InstanceRecord, replica: ReplicaRecord) -> None:
    """Check that an incarnation's new record equals its earlier one."""
    said = msgspec.structs.replace(entry.record, complete=False)
    for name in base.__struct_fields__:
        old, new = getattr(said, name), getattr(base, name)
        if old != new:
            raise DpRankConflict(
                f"{_name(base)} registered with {name} {old!r} and rank {replica.dp_rank} now says {new!r}: "
                "all ranks of an incarnation must agree, and it never changes"
            )
    known = entry.ranks.get(replica.dp_rank)
    if known is not None and known.record != replica and _same_place(known, replica):
        raise DpRankConflict(
            f"rank {replica.dp_rank} of {_name(base)} registered with segue {known.record.version} and "
            f"{known.record.transports}, and now says {replica.version} and {replica.transports}"
        )
    if known is not None and known.record != replica:
        raise DpRankConflict(
            f"rank {replica.dp_rank} of {_name(base)} is at {known.record.host}:{known.record.port} and "
            f"cannot move to {replica.host}:{replica.port} within one incarnation"
        )
    clash = next(
        (r for d, r in entry.ranks.items() if d != replica.dp_rank and _same_place(r, replica)), None
    )
    if clash is not None:
        raise DpRankConflict(
            f"ranks {clash.record.dp_rank} and {replica.dp_rank} of {_name(base)} both claim "
            f"{replica.host}:{replica.port}"
        )


def _same_place(rank: _RankEntry, replica: ReplicaRecord) -> bool:
    return (rank.record.host, rank.record.port) == (replica.host, replica.port)
