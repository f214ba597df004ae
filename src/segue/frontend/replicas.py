"""Who is there: replicas as the registry lists them, with a session to each and its last load.

The registry is needed to learn of newcomers only: while it is away, the sessions that are open go on.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from segue.balance.base import Candidate
from segue.bootstrap.records import InstanceRecord, ReplicaRecord
from segue.core.control import ControlMessage, Load, Outputs
from segue.core.errors import PeerRefused, SegueError
from segue.core.limits import Limits
from segue.core.request import Output
from segue.core.types import Incarnation, LeaderId, Role, new_incarnation
from segue.observe.metrics import Metrics
from segue.session.api import PeerInfo, Session
from segue.session.node import SessionNode
from segue.session.tasks import keep_running
from segue.session.tls import Tls

log = logging.getLogger("segue.frontend.fleet")

SERVING = (Role.PREFILL, Role.DECODE, Role.UNIFIED)
_FIRST_WAIT_S = 0.1
_LONGEST_WAIT_S = 5.0
_FIRST_COOL_S = 0.5
_LONGEST_COOL_S = 30.0


class InstanceWatch(Protocol):
    """The part of the registry's client that the frontend needs."""

    def watch(self, role: Role) -> AsyncIterator[list[InstanceRecord]]:
        """The instances of `role`: now, and again at each change."""
        ...


class Leg(Protocol):
    """A request that runs on a replica, as the replica's session sees it."""

    def output(self, replica: Replica, output: Output) -> None: ...

    def lost(self, replica: Replica, error: SegueError) -> None: ...


@dataclass(slots=True, eq=False)
class Replica:
    """One data-parallel rank of one incarnation."""

    record: InstanceRecord
    where: ReplicaRecord
    session: Session | None = None
    load: Load | None = None
    #: Still in the registry's list.
    listed: bool = True
    legs: dict[str, Leg] = field(default_factory=dict)
    tokens: int = 0
    failures: int = 0
    #: Passed over until then if there is a choice; seconds of the loop's clock.
    cool_until: float = 0.0
    task: asyncio.Task[None] | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def role(self) -> Role:
        return self.record.role

    @property
    def leader(self) -> LeaderId:
        return LeaderId(self.record.incarnation, self.where.dp_rank)

    @property
    def name(self) -> str:
        """As `ErrorInfo.origin` names it."""
        return f"{self.role} {self.record.incarnation[:8]} dp{self.where.dp_rank}"

    @property
    def usable(self) -> bool:
        """May be given a new request."""
        draining = self.record.draining or (self.load is not None and self.load.draining)
        return self.session is not None and self.listed and not draining

    def candidate(self) -> Candidate:
        """As placement policies see it."""
        return Candidate(self.leader, self.record.dp_size, self.load, len(self.legs), self.tokens)


class Signal:
    """Wakes everybody who waits. Look at the state first, then wait: nothing runs between."""

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[None]] = set()

    def notify(self) -> None:
        waiters, self._waiters = self._waiters, set()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)


class Replicas:
    """The membership of the fleet; the handler of the frontend's sessions."""

    def __init__(
        self,
        registry: InstanceWatch,
        *,
        secret: bytes | None,
        limits: Limits,
        metrics: Metrics,
        served_model: str,
        changed: Callable[[], None],
        tls: Tls | None = None,
    ) -> None:
        self._registry = registry
        self._limits = limits
        self._metrics = metrics
        self._served_model = served_model
        self._changed = changed
        self._known: dict[LeaderId, Replica] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self.node = SessionNode(
            incarnation=new_incarnation(),
            role=Role.FRONTEND,
            dp_rank=0,
            secret=secret,
            handler=self,
            message_type=ControlMessage,
            limits=limits,
            tls=tls,
        )

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._known.values())

    def usable(self, role: Role) -> list[Replica]:
        """Replicas of `role` that may be given a request."""
        return [r for r in self._known.values() if r.record.role is role and r.usable]

    def sizes(self) -> dict[str, int]:
        """What runs on the replicas; all zero at rest."""
        return {
            "legs": sum(len(r.legs) for r in self),
            "tokens": sum(r.tokens for r in self),
            "unlisted": sum(not r.listed for r in self),
        }

    def start(self) -> None:
        """Begin to watch the registry."""
        self._tasks = [
            keep_running(partial(self._watch, role), name=f"the watch of {role} instances")
            for role in SERVING
        ]

    async def close(self) -> None:
        """End all sessions; requests that still run on them fail with Draining."""
        tasks = self._tasks + [r.task for r in self._known.values() if r.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.node.close()

    # ---- the registry ---------------------------------------------------------------------------

    async def _watch(self, role: Role) -> None:
        wait_s = _FIRST_WAIT_S
        while True:
            try:
                async for records in self._registry.watch(role):
                    wait_s = _FIRST_WAIT_S
                    self._apply(role, records)
                log.warning("the registry ended the watch of %s instances", role)
            except SegueError as error:
                log.warning("the registry cannot be watched for %s instances: %s", role, error)
            await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    def _apply(self, role: Role, records: list[InstanceRecord]) -> None:
        listed: dict[LeaderId, tuple[InstanceRecord, ReplicaRecord]] = {}
        for record in records:
            if record.served_model != self._served_model:
                log.warning(
                    "%s %s serves %r, not %r: it is left alone",
                    role,
                    record.incarnation[:8],
                    record.served_model,
                    self._served_model,
                )
            elif record.ready and record.role is role:
                for where in record.replicas:
                    listed[LeaderId(record.incarnation, where.dp_rank)] = (record, where)
        for leader, (record, where) in listed.items():
            known = self._known.get(leader)
            if known is None:
                self._known[leader] = known = Replica(record, where)
                known.task = keep_running(partial(self._keep, known), name=f"the session to {known.name}")
            else:
                # The same incarnation: nothing but `draining` can have changed.
                known.record, known.where, known.listed = record, where, True
        for leader, replica in list(self._known.items()):
            if replica.role is role and leader not in listed:
                replica.listed = False
                self._retire(replica)
        self._changed()

    def _retire(self, replica: Replica) -> None:
        """Forget a replica that has left, when nothing runs on it any more."""
        if replica.listed or replica.legs:
            return
        if self._known.get(replica.leader) is not replica:
            return
        del self._known[replica.leader]
        if replica.task is not None:
            replica.task.cancel()
        session, replica.session = replica.session, None
        if session is not None:
            session.close()
        self._metrics.forget(replica.role, replica.name)

    # ---- sessions -------------------------------------------------------------------------------

    async def _keep(self, replica: Replica) -> None:
        """A session to `replica`, again and again, for as long as it is listed."""
        wait_s = _FIRST_WAIT_S
        while True:
            try:
                session = await self.node.connect(
                    replica.where.host,
                    replica.where.port,
                    expect=replica.record.incarnation,
                    timeout_s=self._limits.connect_s + self._limits.handshake_s,
                )
                if session.peer.dp_rank != replica.where.dp_rank:
                    raise PeerRefused(
                        f"{replica.where.host}:{replica.where.port} is dp rank {session.peer.dp_rank}, "
                        f"not {replica.where.dp_rank} as registered"
                    )
                wait_s = _FIRST_WAIT_S
                if replica.session is session:
                    await replica.ended.wait()
            except SegueError as error:
                log.warning("no session with %s: %s", replica.name, error)
            await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    def hello(self) -> bytes:
        return b""

    def accept(self, peer: PeerInfo) -> None:
        if LeaderId(peer.incarnation, peer.dp_rank) not in self._known:
            raise PeerRefused(f"{peer.role} {peer.incarnation[:8]} is not in the registry's list")

    def opened(self, session: Session) -> None:
        peer = session.peer
        replica = self._known.get(LeaderId(peer.incarnation, peer.dp_rank))
        if replica is None:
            session.close(PeerRefused("it has left the registry's list"))
            return
        replica.session = session
        replica.ended.clear()
        log.info("session with %s at %s", replica.name, peer.address)
        self._count()
        self._changed()

    def received(self, session: Session, message: object) -> None:
        peer = session.peer
        replica = self._known.get(LeaderId(peer.incarnation, peer.dp_rank))
        if replica is None:
            return
        if isinstance(message, Outputs):
            for output in message.outputs:
                leg = replica.legs.get(output.request_id)
                if leg is not None:
                    leg.output(replica, output)
        elif isinstance(message, Load):
            draining = replica.load is not None and replica.load.draining
            first = replica.load is None
            replica.load = message
            self._metrics.load(replica.role, replica.name, message)
            if first or message.draining != draining:
                self._changed()

    def closed(self, session: Session, error: SegueError) -> None:
        replica = self._known.get(LeaderId(session.peer.incarnation, session.peer.dp_rank))
        if replica is None or replica.session is not session:
            return
        replica.session = None
        replica.load = None
        replica.ended.set()
        self._metrics.forget(replica.role, replica.name)
        log.warning("the session with %s ended: %s", replica.name, error)
        # Exactly its requests fail, with this error.
        for leg in list(replica.legs.values()):
            leg.lost(replica, error.info.exception().at(peer=replica.name))
        self._retire(replica)
        self._count()
        self._changed()

    # ---- what runs where ------------------------------------------------------------------------

    def enter(self, replica: Replica, request_id: str, leg: Leg, tokens: int) -> None:
        """`leg` runs on `replica` from now on."""
        replica.legs[request_id] = leg
        replica.tokens += tokens

    def leave(self, replica: Replica, request_id: str, tokens: int) -> None:
        """It does not any more. Harmless if it never did."""
        if replica.legs.pop(request_id, None) is not None:
            replica.tokens -= tokens
            self._retire(replica)

    def record_failure(self, replica: Replica, now: float) -> None:
        """A request failed because of this replica: prefer others for a while."""
        replica.failures += 1
        cool_s = min(_FIRST_COOL_S * 2 ** (replica.failures - 1), _LONGEST_COOL_S)
        replica.cool_until = now + cool_s

    def record_success(self, replica: Replica) -> None:
        """A request succeeded there."""
        replica.failures = 0
        replica.cool_until = 0.0

    def _count(self) -> None:
        for role in SERVING:
            open_sessions = sum(1 for r in self if r.role is role and r.session is not None)
            self._metrics.replicas.labels(role).set(open_sessions)

    @property
    def incarnation(self) -> Incarnation:
        """This frontend's own."""
        return self.node.incarnation
