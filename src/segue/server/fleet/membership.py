"""The replicas that the registry lists, with a session to each and its last load.

The registry is needed to learn of newcomers only: while it is away, the sessions that are open go on.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

from segue.engine.kv_events import FollowPrefixes, Prefixes
from segue.kv import LeaderId, Limits, PeerRefused, Role, SegueError, new_incarnation
from segue.kv.session import Dialer, PeerInfo, Session, SessionNode, Tls, Uniform, keep_running
from segue.server.balance.prefix_index import PrefixIndex
from segue.server.fleet.replica import OutputSink, Replica
from segue.server.messages.control import ControlMessage, Explain, Explained, Load, Outputs
from segue.server.messages.records import RequestRecord
from segue.server.messages.ticket import Ticket, sign_ticket
from segue.server.observe.metrics import Metrics
from segue.server.registry.client import InstanceWatch
from segue.server.registry.registry_records import SERVING, InstanceRecord, ReplicaRecord

log = logging.getLogger("segue.fleet")


class Membership:
    """The replicas of the fleet, and the handler of the sessions to their leaders.

    `replicas` is its table, for others to read. `changed` is called whenever it changed in what placement
    looks at, `explain` says what is known of a request, `index` hears what prefix caches hold. `make_node`
    and `uniform` take the place of the network and of chance in a simulation.
    """

    def __init__(
        self,
        registry: InstanceWatch,
        *,
        secret: bytes | None,
        limits: Limits,
        metrics: Metrics,
        served_model: str,
        changed: Callable[[], None],
        explain: Callable[[str], list[RequestRecord]],
        tls: Tls | None = None,
        me: LeaderId | None = None,
        make_node: Callable[..., SessionNode] = SessionNode,
        uniform: Uniform = random.uniform,
        index: PrefixIndex | None = None,
    ) -> None:
        #: pages in the prefix caches of replicas; None if the policy does not use them
        self.prefix_index = index
        self.replicas: dict[LeaderId, Replica] = {}
        self._registry = registry
        self._secret = secret
        self.limits = limits
        self._metrics = metrics
        self._served_model = served_model
        self._changed = changed
        self._explain = explain
        self._uniform = uniform
        self._dialers: dict[LeaderId, Dialer] = {}
        self._watch: asyncio.Task[None] | None = None
        self._node = make_node(
            me=me or LeaderId(new_incarnation()),
            role=Role.FRONTEND,
            secret=secret,
            handlers=dict.fromkeys(SERVING, self),
            message_type=ControlMessage,
            limits=limits,
            tls=tls,
        )

    def sizes(self) -> dict[str, int]:
        """Numbers of running requests on the replicas; all zero at rest."""
        return {
            "legs": sum(len(r.running) for r in self.replicas.values()),
            "tokens": sum(r.tokens for r in self.replicas.values()),
            "unlisted": sum(not r.listed for r in self.replicas.values()),
        }

    def start(self) -> None:
        """Begin to watch the registry."""
        self._watch = keep_running(self._follow, name="the watch of instances")

    async def close(self) -> None:
        """End all sessions; whoever runs on them hears of it."""
        for dialer in self._dialers.values():
            dialer.stop()
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        await self._node.close()

    @property
    def name(self) -> str:
        """This frontend's name in records."""
        return f"frontend {self._node.me.incarnation[:8]}"

    def signed(self, ticket: Ticket) -> Ticket:
        """`ticket` with this frontend's signature."""
        return sign_ticket(ticket, self._secret or b"", self._node.me.incarnation)

    def gather(self) -> None:
        """See `SessionNode.gather`."""
        self._node.gather()

    # ---- the registry ---------------------------------------------------------------------------

    async def _follow(self) -> None:
        async for records in self._registry.watch():
            self._apply(records)

    def _apply(self, records: list[InstanceRecord]) -> None:
        listed: dict[LeaderId, tuple[InstanceRecord, ReplicaRecord]] = {}
        for record in records:
            if record.served_model != self._served_model:
                log.warning(
                    "%s %s serves %r, not %r: it is left alone",
                    record.role,
                    record.incarnation[:8],
                    record.served_model,
                    self._served_model,
                )
            elif record.ready and record.role in SERVING:
                listed |= {leader: (record, where) for leader, where in record.leaders()}
        for leader, (record, where) in listed.items():
            known = self.replicas.get(leader)
            if known is None:
                self.replicas[leader] = known = Replica(record, where)
                self._dial(known)
            else:
                # The same incarnation: nothing but `draining` can have changed.
                known.record, known.where, known.listed = record, where, True
        for leader, replica in list(self.replicas.items()):
            if leader not in listed:
                replica.listed = False
                self._retire(replica)
        self._changed()

    def _retire(self, replica: Replica) -> None:
        """Forget a replica that has left, when nothing runs on it any more."""
        if replica.listed or replica.running or self.replicas.get(replica.leader) is not replica:
            return
        del self.replicas[replica.leader]
        self._dialers.pop(replica.leader).stop()
        session, replica.session = replica.session, None
        if session is not None:
            session.close()
        self._metrics.forget(replica.role, replica.name)
        self._count()

    # ---- sessions -------------------------------------------------------------------------------

    def _dial(self, replica: Replica) -> None:
        """Keep a session to `replica` open for as long as it is listed."""
        where = replica.where

        async def connect() -> Session:
            timeout_s = self.limits.connect_s + self.limits.handshake_s
            return await self._node.connect(
                where.host, where.port, expect=replica.leader, timeout_s=timeout_s
            )

        dialer = Dialer(connect, replica.name, uniform=self._uniform)
        self._dialers[replica.leader] = dialer
        dialer.start(asyncio.get_running_loop())

    def hello(self) -> bytes:
        return b""

    def accept(self, peer: PeerInfo) -> None:
        if peer.leader not in self.replicas:
            raise PeerRefused(f"{peer.role} {peer.leader} is not in the registry's list")

    def opened(self, session: Session) -> None:
        peer = session.peer
        replica = self.replicas.get(peer.leader)
        if replica is None:
            session.close(PeerRefused("it has left the registry's list"))
            return
        replica.session = session
        if self.prefix_index is not None:
            session.send(FollowPrefixes())
        log.info("session with %s at %s", replica.name, peer.address)
        self._count()
        self._changed()

    def received(self, session: Session, message: object) -> None:
        peer = session.peer
        replica = self.replicas.get(peer.leader)
        if replica is None:
            return
        if isinstance(message, Explain):
            name = message.request_id
            session.send(Explained(self._explain(name), message.asker, request_id=name))
        elif isinstance(message, Outputs):
            for output in message.outputs:
                sink = replica.running.get(output.request_id)
                if sink is not None:
                    sink.output(replica, output)
        elif isinstance(message, Load):
            draining = replica.load is not None and replica.load.draining
            first = replica.load is None
            replica.load = message
            self._metrics.load(replica.role, replica.name, message)
            if message.draining != draining:
                log.info("%s %s", replica.name, "drains" if message.draining else "takes requests again")
            if first or message.draining != draining:
                self._changed()
        elif isinstance(message, Prefixes) and self.prefix_index is not None:
            heard = self.prefix_index.heard(peer.leader, message)
            if not heard:
                session.send(FollowPrefixes())

    def closed(self, session: Session, error: SegueError) -> None:
        replica = self.replicas.get(session.peer.leader)
        if replica is None or replica.session is not session:
            return
        replica.session = None
        replica.load = None
        if self.prefix_index is not None:
            self.prefix_index.forget(replica.leader)
        self._metrics.forget(replica.role, replica.name)
        log.warning("the session with %s ended: %s", replica.name, error)
        # Exactly its requests fail, with this error.
        for sink in list(replica.running.values()):
            sink.lost(replica, error.info.exception().at(peer=replica.name))
        self._retire(replica)
        self._count()
        self._changed()

    def _count(self) -> None:
        for role in SERVING:
            sessions = (r.session for r in self.replicas.values() if r.role is role)
            self._metrics.replicas.labels(role).set(sum(session is not None for session in sessions))

    # ---- what runs where ------------------------------------------------------------------------

    def enter(self, replica: Replica, request_id: str, sink: OutputSink, tokens: int) -> None:
        """`request_id` runs on `replica` from now on; `sink` hears of it."""
        replica.running[request_id] = sink
        replica.tokens += tokens

    def leave(self, replica: Replica, request_id: str, tokens: int) -> None:
        """The request does not run on `replica` any more. Harmless if it never did."""
        if replica.running.pop(request_id, None) is not None:
            replica.tokens -= tokens
            self._retire(replica)
