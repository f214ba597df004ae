"""`KVManager`: carries the hand-offs of one leader between engine, peers and transports.

The protocol is `protocol.Exchange`, which does no I/O. The manager feeds it (engine, sessions, ranks, clock)
and carries out its effects, all on one I/O thread. The manager keeps only the engine's handle of each
hand-off.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

from msgspec import structs

from segue.kv.alarm import Alarm
from segue.kv.clock import Clock
from segue.kv.config import COUNTERPART, HOST, KVConfig, LeaderRuntime
from segue.kv.control_plane import ControlPlane
from segue.kv.errors import (
    Draining,
    ErrorInfo,
    InvalidRequest,
    SegueError,
    TransferFailed,
)
from segue.kv.handles import Handles, OnChange
from segue.kv.ids import ChecksumMode, Incarnation, KVPoll, LeaderId, RankId, Role, RoomKey, TransferId
from segue.kv.io import MonotonicClock
from segue.kv.peers import Compatibility, PathSpeed, Peer
from segue.kv.protocol import events
from segue.kv.protocol.messages import HANDOFF_VERSIONS, HandoffMessage, LeaderInfo, PathChosen
from segue.kv.protocol.room_ranks import PrefillInstance
from segue.kv.ranks.local_rank import FENCE_AGAIN_S, Rank, local_rank
from segue.kv.ranks.rank_group import PeerRoute, Ranks
from segue.kv.room_queries import RoomQueries, RoomRegistry
from segue.kv.session.api import PeerInfo, Session, SessionHandler
from segue.kv.session.tasks import background, typed
from segue.kv.transport import base as transport_base
from segue.kv.transport.memory.pool_memory import Memory
from segue.kv.transport_negotiation import TransportNegotiation

log = logging.getLogger("segue.kv")

#: Messages per hand-off that may arrive on a new session before our path is open (a failure, a wait for our
#: last write, a destination); more closes the session.
EARLY_PER_TRANSFER = 4


class KVManager(Handles):
    """The hand-offs of one replica, and its sessions with peer replicas. Methods may be called from any
    thread but its own I/O thread (`close`, `start`), and never block on a peer.

    `pool` is the memory of the replica's one rank, laid out as `config.spec` says (`allocate`, `pool_of`), or
    a list of its ranks (`local_rank`, `WorkerRank`). `on_change` is called on the I/O thread with each
    `Change` of a hand-off, after its handle is up to date; it must not block or raise. `on_rank_lost` is
    called there once when a rank cannot go on, or that thread has ended: all hand-offs end, none begins, and
    the replica should end.
    `others` handles the sessions of peers with other roles, `clock` and `runtime` are for tests and the
    simulator.

    Raises ConfigError for a transport that does not work here or a `pool` that does not fit `config.spec`.
    """

    def __init__(
        self,
        config: KVConfig,
        pool: Memory | Sequence[Rank],
        on_change: OnChange | None = None,
        *,
        on_rank_lost: Callable[[SegueError], None] = lambda _: None,
        others: Mapping[Role, SessionHandler] = MappingProxyType({}),
        clock: Clock | None = None,
        runtime: LeaderRuntime = HOST,
    ) -> None:
        self.config = config
        super().__init__(clock or MonotonicClock(), runtime.connecting("segue-ready"))
        self.plane = ControlPlane(config, {**others, COUNTERPART[config.role]: self}, runtime)
        self.io = self.plane.io
        self.plane.on_lost = self._io_lost
        self._on_change = on_change
        self._peers: dict[LeaderId, Peer] = {}
        #: grants that were carried out a moment ago
        self._granted: list[events.Granted] = []
        self._alarm = Alarm(self.io, self._tick)
        self._closed = False
        self._on_rank_lost = on_rank_lost
        #: why hand-offs are impossible from now on
        self._lost: SegueError | None = None
        try:
            ranks = [local_rank(config, pool, runtime)] if isinstance(pool, Memory) else pool
        except BaseException:  # a transport refuses the memory
            self.plane.close()
            raise
        self._ranks = Ranks(ranks, config.me, config.role, config.limits.max_sessions)
        info = LeaderInfo(
            versions=HANDOFF_VERSIONS,
            model=config.model,
            dp_size=config.dp.size,
            ranks=[rank.spec for rank in ranks],
            endpoints=self._ranks.endpoints,
            max_transfers=config.limits.max_transfers,
            checksums=self._ranks.checksums,
            unchecked=config.kv_checksum is ChecksumMode.OFF,
        )
        self.compatibility = Compatibility(config.role, info, runtime.transports)
        self.exchange = runtime.exchange(
            role=config.role,
            me=config.me,
            origin=f"{config.role.value} {config.me}",
            limits=config.limits,
            kv_checksum=config.kv_checksum,
            dp=config.dp,
        )
        self.opening = TransportNegotiation(
            config.role,
            config.limits,
            self.compatibility,
            self._ranks,
        )
        self.queries = RoomQueries(config.me, self.io, self._handle)

    # ---- life --------------------------------------------------------------------------------

    def start(self) -> tuple[str, int]:
        """Start the I/O thread and listen; returns the `(host, port)` at which peers open sessions. Call
        once.

        Raises ConfigError for a port in use, and without a secret beyond loopback; the manager is closed
        then. Raises InvalidRequest when it was started or closed before.
        """
        try:
            return self.plane.start(self._ranks.start(self, self.io), self._ranks.close)
        except InvalidRequest:
            raise
        except BaseException:
            self._closed = True
            raise

    def close(self) -> None:
        """End all sessions, transports and the thread. Open hand-offs fail on the peer's side; on this side
        nothing is reported any more, and calls on the manager and its handles do nothing.

        Idempotent; call it from outside the I/O thread. Each call returns when the manager is closed: also
        one from another thread, and one during `start` once that has ended. Free the pool's memory only after
        it returns.
        """
        self._closed = True
        self.plane.close(self._ranks.close)

    # ---- the engine's side -------------------------------------------------------------------

    def use_registry(self, registry: RoomRegistry) -> None:
        """Ask and tell this registry whose a room is, from now on. On the I/O thread."""
        self.queries.registry = registry

    def prefill_instances(self, instances: Mapping[Incarnation, PrefillInstance]) -> None:
        """The prefill instances that exist now, for receivers whose DP rank is open. On the I/O thread."""
        self._handle(events.PrefillInstances(instances))

    def post(self, *batch: events.Event) -> None:
        """See `Handles.post`."""
        self.io.post(self._handle_all, batch)

    def add_peer(self, leader: LeaderId, host: str, port: int) -> None:
        """Keep a session to this leader, which listens at `host`:`port` (its `start`), until `remove_peer`; a
        lost session is dialled again. Idempotent. Decode calls it.

        Hand-offs with a leader that cannot be reached for `limits.connect_s`, or that refuses the session,
        fail with its reason. A restarted process is another leader: add it, and remove the old one.
        """
        self.io.post(self.plane.keep_session, leader, host, port, partial(self._peer_refused, leader))

    def meet_peer(self, leader: LeaderId, host: str, port: int) -> None:
        """Open a session to this leader once, if there is none: who placed a request there has named it
        before our registry has. On the I/O thread."""
        self.plane.meet(leader, host, port, partial(self._peer_refused, leader))

    def remove_peer(self, leader: LeaderId) -> None:
        """Do not dial this leader any more. An open session goes on."""
        self.io.post(self.plane.drop_session, leader)

    def _peer_refused(self, leader: LeaderId, error: SegueError) -> None:
        # Hand-offs that wait for this peer end now with the reason, not by their deadline.
        if leader not in self._peers:
            self._handle(events.PeerDown(leader, error.info))

    def problems(self) -> list[str]:
        """Inconsistencies of the tables at this moment; call it on the I/O thread."""
        sessions = self.plane.sessions
        found = [
            f"no session for peer {leader}"
            for leader, peer in self._peers.items()
            if leader not in sessions and not peer.session.closing
        ]
        try:
            self.exchange.check_integrity()
        except SegueError as error:
            found.append(str(error))
        return found

    def sizes(self) -> dict[str, int]:
        """The number of entries of every table, for leak checks: all zero at rest but `peers`."""
        return {
            **self.exchange.sizes(),
            "handles": len(self.handles),
            "unanswered": self._ranks.unanswered,
            "room_queries": len(self.queries),
        }

    # ---- the protocol, on the I/O thread -----------------------------------------------------

    def _handle_all(self, batch: Sequence[events.Event]) -> None:
        for event in batch:
            self._handle(event)

    def _handle(self, event: events.Event) -> None:
        """Handle one event and all its effects. A bug ends the hand-off of the event, and costs no other one
        an effect or its deadline: nothing is raised."""
        now = self.clock.now()
        end: events.Event | None = None
        try:
            effects = self._decide(event, now)
        except Exception as exc:
            effects, error = self.exchange.decided, typed(exc, f"handling {type(event).__name__}")
            if (
                isinstance(event, events.ExpectRoom | events.OpenReceiver)
                and not effects
                and not self.exchange.holds(event.key)
            ):
                effects = events.refusal(event, error.info, held=False)  # there is no half that could end
            else:
                end = self._undecided(event, error)
        for effect in effects:
            try:
                self._carry_out(effect)
            except Exception as exc:
                self._not_done(effect, typed(exc, f"carrying out {type(effect).__name__}"))
        if end is not None:
            self._handle(end)  # before the next event of a batch, which would be refused for another reason
        while self._granted:
            self._handle(self._granted.pop())
        self._alarm.set(self.exchange.next_deadline(), now)

    def _decide(self, event: events.Event, now: float) -> list[events.Effect]:
        if self._lost is not None and isinstance(event, events.ExpectRoom | events.OpenReceiver):
            return events.refusal(event, self._lost.info, held=self.exchange.holds(event.key))
        try:
            return self.exchange.handle(event, now)
        except SegueError as error:
            if self.exchange.decided:
                raise  # no refusal: it came in the middle
            return self._refused(event, error, now)

    def _undecided(self, event: events.Event, error: SegueError) -> events.Event | None:
        """A hand-off met a bug: the event that ends it on both sides; a session that allows none ends."""
        match event:
            case events.PeerUp():
                self._part(event.peer, error)
                return None
            case events.PeerDown() | events.Tick() | events.AbortTransfer() | events.EndRoom():
                return None  # nothing of one hand-off, or its end already
            case events.PrefillInstances():
                return None  # they are told again with the next change
            case events.Received():
                return events.AbortTransfer(event.message.transfer, error.info)
            case _ if isinstance(event, events.RankEvent):
                return events.AbortTransfer(event.transfer, error.info)
            case _:
                return events.EndRoom(event.key, error.info)

    def _not_done(self, effect: events.Effect, error: SegueError) -> None:
        """An effect was not carried out, or only in part: its hand-off ends, unless it has already."""
        log.warning("%s was not carried out: %s", type(effect).__name__, error)
        match effect:
            case events.ComputeChecksum():
                # Its answer is what the pages wait for, whatever becomes of the hand-off.
                answer = events.ChecksumReady(effect.transfer, effect.rank, effect.tag, 0, error=error.info)
                self.io.loop.call_soon(self._handle, answer)
            case events.Fence():
                # So it is here, and to fence twice does no harm.
                # By then the pair may have another transport, which would know nothing of the writes.
                route = self._ranks.route_to(self._ranks.peer_of(effect.transfer))
                self.io.loop.call_later(FENCE_AGAIN_S, self._fence_again, effect, route)
            case events.Send():
                transfer = effect.message.transfer
                phase = self.exchange.phase(transfer)
                if phase is None or phase.terminal:
                    # Nothing is left to end, and the peer waits for this word: it will ask again.
                    self._part(effect.peer, error)
                self._end_later(transfer, error)
            case _ if isinstance(effect, events.RegistryEffect | events.Change):
                self._end_room_later(effect.key, error)
            case _:
                self._end_later(effect.transfer, error)

    def _part(self, leader: LeaderId, error: SegueError) -> None:
        if (peer := self._peers.get(leader)) is not None:
            peer.session.close(error)

    def _end_later(self, transfer: TransferId, error: SegueError) -> None:
        self.io.loop.call_soon(self._handle, events.AbortTransfer(transfer, error.info))

    def _end_room_later(self, key: RoomKey, error: SegueError) -> None:
        self.io.loop.call_soon(self._handle, events.EndRoom(key, error.info))

    def _fence_again(self, effect: events.Fence, route: PeerRoute | None) -> None:
        """Ask for it over the way that its writes went, until it is taken."""
        if self._closed:
            return
        try:
            self._ranks.carry_out(effect, route)
        except Exception as exc:
            log.warning("a fence was not taken again: %s", typed(exc, "carrying out Fence"))
            self.io.loop.call_later(FENCE_AGAIN_S, self._fence_again, effect, route)

    def _refused(self, event: events.Event, error: SegueError, now: float) -> list[events.Effect]:
        """End the hand-off of an event that the protocol refused, and no other one."""
        if isinstance(event, events.ExpectRoom | events.OpenReceiver):
            return events.refusal(event, error.info, held=self.exchange.holds(event.key))
        if not isinstance(event, events.Publish | events.SendChunk | events.SendMetadata):
            raise error
        phase = self.exchange.phase_of(event.key)
        if phase is None or phase.terminal:
            # After a long pause not even the tombstone is left, and the engine could not know yet.
            log.debug("too late for its hand-off: %s", error)
            return []
        return self.exchange.handle(events.EndRoom(event.key, error.info), now)

    def _carry_out(self, effect: events.Effect) -> None:
        match effect:
            case events.Send():
                if (peer := self._peers.get(effect.peer)) is not None:
                    peer.session.send(effect.message)
            case events.PostWrite() | events.Relay() | events.Grant() | events.Fence():
                self._move(effect)
            case events.ComputeChecksum():
                if effect.ready is not None:
                    self._digest(effect)  # a fence that follows must find what waits
                else:
                    # After all else that is to be said now: hashing holds the interpreter's lock for 1 ms.
                    self.io.loop.call_soon(self._digest, effect)
            case events.Phase() | events.Release() | events.Quarantined():
                if self.ended is None:
                    self._tell_engine(effect)
            case events.AskRoom() | events.RegisterRoom() | events.RoomSettled():
                self.queries.carry_out(effect)
            case _:
                pass  # for the room or receiver of a hand-off, which has heard it

    def _digest(self, effect: events.ComputeChecksum) -> None:
        try:
            self._ranks.carry_out(effect)
        except Exception as exc:
            self._not_done(effect, typed(exc, "asking for a checksum"))

    def _tell_engine(self, change: events.Change) -> None:
        self.apply(change)
        if self._on_change is not None:
            self._on_change(change)
            if isinstance(change, events.Phase) and change.phase.terminal:
                self.io.yield_gil()  # the engine, before the peer and the books hear of it

    def _move(self, effect: events.PostWrite | events.Relay | events.Grant | events.Fence) -> None:
        transfer = effect.transfer
        leader = self._ranks.peer_of(transfer)
        if isinstance(effect, events.PostWrite) and leader not in self._peers:
            gone = TransferFailed(f"the session to {leader} has ended", room=transfer.room)
            self.io.loop.call_soon(
                self._handle, events.WriteBroken(transfer, effect.rank, effect.tag, gone.info)
            )
        elif self._ranks.carry_out(effect):
            self._granted.append(events.Granted(transfer, effect.rank))

    def _tick(self) -> None:
        self._handle(events.Tick())

    # ---- ranks (RankOwner; from any thread) ---------------------------------------------------

    def moved(self, rank: int, transport: str, event: transport_base.TransportEvent) -> None:
        """See `RankOwner.moved`."""
        self.io.post(self._moved, rank, transport, event)

    def granted(self, rank: int, peer: RankId, epoch: int, error: ErrorInfo | None = None) -> None:
        """See `RankOwner.granted`."""
        self.io.post(self._now_granted, rank, peer, epoch, error)

    def hashed(self, answer: events.ChecksumReady) -> None:
        """See `RankOwner.hashed`."""
        self.io.post(self._hashed, answer)

    def signalled(self, rank: int, number: int, error: ErrorInfo | None) -> None:
        """See `RankOwner.signalled`."""
        self.io.post(self._signalled, rank, number, error)

    def _signalled(self, rank: int, number: int, error: ErrorInfo | None) -> None:
        ready = self.moments.get(number)
        if ready is not None and error is None:
            ready.signalled_at.add(rank)
        elif ready is not None and error is not None:
            ready.end(error.exception())

    def lost(self, rank: int, error: SegueError) -> None:
        """See `RankOwner.lost`: all hand-offs of this leader end now, on both sides; none begins any more."""
        self.io.post(self._rank_lost, rank, error)

    def _now_granted(self, rank: int, peer: RankId, epoch: int, error: ErrorInfo | None) -> None:
        transfer = self.exchange.transfer_of(peer.leader, epoch)
        if transfer and (event := self._ranks.granted(transfer, rank, peer, epoch, error)):
            self._handle(event)

    def _hashed(self, answer: events.ChecksumReady) -> None:
        if not self._closed:
            self._handle(answer)

    def _rank_lost(self, rank: int, error: SegueError) -> None:
        log.error("rank %d of this leader is lost: %s", rank, error)
        self._lost = error
        for key in self.exchange.open_halves():
            self._handle(events.EndRoom(key, error.info))
        self._on_rank_lost(error)

    def _io_lost(self, error: SegueError) -> None:
        """The I/O thread has ended. All hand-offs fail here; their pages are not released, for transports may
        still read and write. Peers hear it from their sessions."""
        log.error("%s", error)
        self.ended = error  # before the halves are looked at: one that begins now finds it
        for key, handle in list(self.handles.items()):
            if not handle.poll().terminal:
                info = structs.replace(error.info, room=key.room)
                self._tell_engine(events.Phase(key, KVPoll.FAILED, error=info))
        self._on_rank_lost(error)

    def _moved(self, rank: int, name: str, event: transport_base.TransportEvent) -> None:
        if self._closed:
            return  # nothing is asked of ranks any more
        leader = event.peer.leader
        if isinstance(event, transport_base.PeerGone) and leader == self.config.me:
            self._relays_end(name, event.error)
            return
        if isinstance(event, transport_base.PeerGone):
            peer = self._peers.get(leader)
            # A path of an earlier session, or one that was only tried, says nothing of the one in use.
            other = self._ranks.transport_to(leader) not in (None, name) or (peer and peer.opening)
            if event.proven and (other or not self._ranks.died(event.peer)):
                for fence in self.exchange.unproven_fences(leader, name):  # can be proven now, maybe
                    self._fence_again(fence, self._ranks.route_over(name, leader))
                return
            if other:
                return
            self._handle(events.PeerDown(leader, event.error.info, dead=event.proven, over=name))
            if peer is not None:
                peer.session.close(event.error)
            return
        transfer = self.exchange.transfer_of(leader, event.epoch)
        if transfer is None:
            return  # ended meanwhile; the exchange needs no proof any more
        match event:
            case transport_base.Written():
                if (peer := self._peers.get(leader)) is not None:
                    peer.measure(event.nbytes, event.seconds)
                self._handle(events.WriteLanded(transfer, rank, event.tag, event.seconds))
            case transport_base.WriteFailed():
                self._handle(events.WriteBroken(transfer, rank, event.tag, event.error.info, event.refused))
            case transport_base.Fenced():
                self._handle(events.FenceDone(transfer, rank, event.peer, event.proven))

    def _relays_end(self, name: str, error: SegueError) -> None:
        """A path between two ranks of ours has ended: the peers whose KV goes over such paths meet anew."""
        for leader, peer in list(self._peers.items()):
            if peer.transport == name and self._ranks.writes_for(leader):
                self._handle(events.PeerDown(leader, error.info))
                peer.session.close(error)

    def paths(self) -> dict[str, PathSpeed]:
        """The traffic on the path to each live peer, by its name; none while its paths are opened."""
        return {str(leader): peer.speed for leader, peer in list(self._peers.items()) if not peer.opening}

    # ---- sessions with peer leaders (SessionHandler) -----------------------------------------

    def hello(self) -> bytes:
        """Our `LeaderInfo`."""
        return self.compatibility.hello

    def accept(self, peer: PeerInfo) -> None:
        """Refuse a peer whose KV cannot be joined with ours, before anything is served."""
        self.compatibility.check_peer(peer)

    def opened(self, session: Session) -> None:
        """Open the path to its memory, then tell the protocol."""
        joined, leader = self.compatibility.checked(session.peer), session.peer.leader
        plan = joined.plan
        peer = Peer(
            session,
            joined.info,
            joined.names,
            plan,
            self.io.loop.create_future(),
            checksum=joined.checksum,
            version=joined.version,
        )
        self._peers[leader] = peer
        needed = self._peers.keys() | self.exchange.peers()
        self._ranks.choose(leader, peer.transport, plan.pairs, needed, plan.relays)
        name = f"opening the paths for {leader}"
        peer.opening = background(self._open_paths(peer), name=name, failed=session.close, loop=self.io.loop)

    async def _open_paths(self, peer: Peer) -> None:
        await self.opening.open(peer)
        if self._peers.get(peer.session.peer.leader) is peer:
            self._ready(peer)

    def _ready(self, peer: Peer) -> None:
        """Before this no message is handled."""
        peer.opening, who = None, peer.session.peer
        about = (who.role.value, who.leader, who.address, peer.transport, peer.version)
        log.info("peer joined role=%s leader=%s address=%s transport=%s handoff=%d", *about)
        self._handle(events.PeerUp(who.leader, peer.plan, peer.transport, peer.checksum))
        early, peer.early = peer.early, []
        for message in early:
            self._handle(events.Received(who.leader, message))

    def received(self, session: Session, message: object) -> None:
        """A message goes to the protocol, or waits until the path is open."""
        peer = self._peers.get(session.peer.leader)
        if peer is None or peer.session is not session:
            return
        if isinstance(message, PathChosen) and self.config.role is Role.DECODE:
            if not peer.chosen.done():  # a repeated one changes nothing
                peer.chosen.set_result(message.transport)
        elif not isinstance(message, HandoffMessage):
            session.close(TransferFailed(f"{type(message).__name__} is no message between leaders"))
        elif peer.opening is not None:
            if len(peer.early) >= EARLY_PER_TRANSFER * self.config.limits.max_transfers:
                session.close(TransferFailed("too many messages before the path is open"))
            peer.early.append(message)
        else:
            self._handle(events.Received(session.peer.leader, message))

    def closed(self, session: Session, error: SegueError) -> None:
        """The session ended: exactly its transfers fail."""
        leader = session.peer.leader
        peer = self._peers.get(leader)
        if peer is None or peer.session is not session:
            return
        del self._peers[leader]
        if peer.opening is not None:
            peer.opening.cancel()
        level = logging.INFO if isinstance(error, Draining) else logging.WARNING
        log.log(level, "peer left leader=%s reason=%s", leader, error)
        self._handle(events.PeerDown(leader, error.info))
