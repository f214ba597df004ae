"""The invariants of `docs/protocol.md`, checked while a scenario runs.

Cheap ones at each effect, those over one node's tables after its leader's turns, those over everybody
at intervals and at rest. Each raises `Violation` with the number of the invariant.
"""

from __future__ import annotations

from typing import Any

from segue.kv.errors import ErrorInfo, Internal
from segue.kv.ids import KVPoll, LeaderId, Role, RoomKey, TransferId
from segue.kv.protocol import events
from segue.kv.protocol.messages import Destination, Drained, Gone, Moved
from segue.kv.protocol.room_ranks import REDIRECT_ON_CONFLICT
from segue_lab.sim.answer_checks import AnswerChecks
from segue_lab.sim.bit_flips import BitFlips
from segue_lab.sim.causes import Causes
from segue_lab.sim.node_views import Exposed, KVView, NodeView, fronts, leaders
from segue_lab.sim.rank_checks import Half, RankChecks
from segue_lab.sim.request_checks import RequestChecks
from segue_lab.sim.room_checks import RoomChecks
from segue_lab.sim.sim_state import SimState
from segue_lab.sim.world import Violation

NEXT = {
    None: {KVPoll.BOOTSTRAPPING},
    KVPoll.BOOTSTRAPPING: {KVPoll.WAITING_FOR_INPUT, KVPoll.FAILED},
    KVPoll.WAITING_FOR_INPUT: {KVPoll.TRANSFERRING, KVPoll.FAILED},
    KVPoll.TRANSFERRING: {KVPoll.SUCCESS, KVPoll.FAILED},
    KVPoll.SUCCESS: set[KVPoll](),
    KVPoll.FAILED: set[KVPoll](),
}


class Checks:
    """The ledger of a deployment, and its rules; those over what clients get are `answers`, those over the
    requests of one instance `requests`."""

    def __init__(self, state: SimState, causes: Causes, check_every: int) -> None:
        self.state = state
        self.causes = causes
        self.world = state.world
        #: turns of leaders between two looks at the tables of a node: one looks at all of them
        self._check_every = check_every
        #: (leader, transfer) → half
        self.halves: dict[tuple[LeaderId, TransferId], Half] = {}
        #: (leader, the engine's name of its half) → its newest hand-off, and the last phase
        self.transfers: dict[tuple[LeaderId, RoomKey], TransferId] = {}
        self._rooms: dict[tuple[LeaderId, RoomKey], KVPoll] = {}
        #: when each of these phases began
        self._began_at: dict[tuple[LeaderId, RoomKey], float] = {}
        #: halves that the protocol has refused
        self.never_opened: set[tuple[LeaderId, RoomKey]] = set()
        self._freed: set[tuple[LeaderId, RoomKey]] = set()
        #: the leader that a half may speak with before it has a hand-off: prefill's placed decode, decode's
        #: instance
        self._placed: dict[tuple[LeaderId, RoomKey], LeaderId | None] = {}
        #: by room, what prefill's engine sends decode's
        self._contents: dict[int, bytes] = {}
        self.open: dict[tuple[LeaderId, TransferId], Half] = {}
        self.reads: dict[tuple[LeaderId, LeaderId, int], TransferId] = {}
        self.flips = BitFlips(state.counts, state.flipped)
        #: (leader, peer) → when they last began a session
        self._joined: dict[tuple[LeaderId, LeaderId], float] = {}
        self._turns = 0
        self._orphaned: dict[tuple[LeaderId, RoomKey], float] = {}
        self.answers = AnswerChecks(state, causes)
        self.requests = RequestChecks(state, causes)
        self.ranks = RankChecks(state, self.halves, self.reads)
        self.rooms = RoomChecks(state, self.halves)
        self.bound_s = state.timing.bound_s

    # ---- each effect ---------------------------------------------------------------------------

    def effect(self, node: KVView, effect: Any) -> None:
        """Look at one effect of a node's exchange before it is carried out."""
        kind = type(effect)
        if kind is events.HandoffPhase:
            self._phase(node, effect)
        elif kind is events.Phase:
            self._room_phase(node, effect)
        elif kind is events.Release:
            self._room_freed(node, effect.key)
        elif kind is events.Send:
            if isinstance(effect.message, Destination):
                self._published(node, effect.message)
            elif isinstance(effect.message, Drained | Gone | Moved):
                self.ranks.drained(node, effect.message.transfer)
            if isinstance(effect.message, Moved):
                redirect = node.spec.on_conflict == REDIRECT_ON_CONFLICT
                if redirect != (effect.message.error is None):
                    text = f"{node.name} answers a conflict with {effect.message}"
                    raise Violation("conflict", text, (effect.message.transfer.room,))
                self.state.counts["sent on to another DP rank"] += redirect
        elif kind is events.PostWrite:
            self._posted(node, effect)
            self.ranks.posted(node, effect)
        elif kind is events.Relay:
            self.state.counts["passed on"] += 1
        elif kind is events.HandoffReleased:
            self._released(node, effect.transfer)
        elif kind is events.HandoffQuarantined:
            half = self.half(node, effect.transfer)
            if half.quarantined or half.phase is not KVPoll.FAILED:
                raise Violation(
                    "3", f"{node.name} quarantined {effect.transfer} again or alive", (effect.transfer.room,)
                )
            half.quarantined = True

    def scope(self, node: KVView, event: Any, effects: list[Any]) -> None:
        """12 and 13: an event changes its own hand-off, a lost peer exactly those bound to it."""
        rooms = self.rooms
        if isinstance(event, events.PeerDown):
            rooms.parked_of(node, event.peer)
        (rooms.prefill if node.spec.role is Role.PREFILL else rooms.decode)(node, event, effects)
        if isinstance(event, events.ExpectRoom):
            self._placed[node.me, event.key] = event.decode
            if event.decode is not None and event.retain_s is None:
                key = event.key
                placed = TransferId(
                    key.room, event.attempt, node.me, event.decode, key.generation, key.ordinal
                )
                self.transfers[node.me, key] = placed
        elif isinstance(event, events.PlaceRoom):
            self._placed[node.me, event.key] = event.decode
        elif isinstance(event, events.OpenReceiver):
            self._placed[node.me, event.key] = event.prefill
        elif isinstance(event, events.SendMetadata):
            self._contents[event.key.room] = event.content
        if isinstance(event, events.Tick | events.PrefillInstances):
            return
        if isinstance(event, events.PeerUp | events.PeerDown):
            for effect in effects:
                about, peer = self._about(node, effect)
                if (
                    peer is not None
                    and event.peer
                    not in (
                        peer,
                        LeaderId(peer.incarnation, event.peer.dp_rank),
                    )
                    and event.peer not in rooms.came.get((node.me, about), ())
                ):
                    raise Violation("13", f"{node.name}: {event} touched {about}", (about.room,))
            return
        own, _ = self._about(node, event)
        if isinstance(event, events.FenceDone):
            self.half(node, event.transfer).fenced = True
        for effect in effects:
            about, _ = self._about(node, effect)
            if about != own:
                raise Violation("12", f"{node.name}: {event} touched {about}", (about.room, own.room))
        if isinstance(event, events.AbortTransfer):
            phase = node.exchange.phase(event.transfer)
            if phase is not None and not phase.terminal:
                raise Violation("18", f"{node.name} was told to end {own} and did not", (own.room,))

    def _about(self, node: KVView, what: Any) -> tuple[RoomKey, LeaderId | None]:
        """The half of this node's engine that an event or effect concerns, and its peer."""
        if isinstance(what, events.Send | events.Received):
            what = what.message
        transfer: TransferId | None = getattr(what, "transfer", None)
        prefill = node.spec.role is Role.PREFILL
        if transfer is None:
            return what.key, self._placed.get((node.me, what.key))
        if prefill:
            return transfer.sent_as, transfer.decode
        return transfer.received_as, transfer.prefill

    def joined(self, node: KVView, peer: KVView) -> None:
        """9: an illegal pair is refused before anything is asked of it."""
        self._joined[node.me, peer.me] = self.world.now
        mine, theirs = node.spec, peer.spec
        if mine.role is theirs.role or (mine.model, mine.layers) != (theirs.model, theirs.layers):
            raise Violation("9", f"{node.name} joined {peer.name}, whose KV is not its own: {mine}, {theirs}")
        ours, other = node.peers[peer.me], peer.peers.get(node.me, node.peers[peer.me])
        met = other.session.handshake.id == ours.session.handshake.id
        if met and not (ours.opening or other.opening) and other.transport != ours.transport:
            raise Violation("9", f"{node.name} and {peer.name} do not meet over one transport")
        if len(self.state.transports) > 1 and ours.transport == "tcp":
            self.state.counts["pairs that went on without shm"] += 1

    def is_over(self, node: KVView, event: Any) -> bool:
        """Whether the hand-off that `event` speaks of has ended here and let everything go."""
        if (key := getattr(event, "key", None)) is not None:
            return (node.me, key) in self._freed or (node.me, key) in self.never_opened
        half = self.halves.get((node.me, getattr(event, "transfer", None)))  # type: ignore[arg-type]
        return half is not None and half.released_at is not None

    def _room_phase(self, node: KVView, effect: events.Phase) -> None:
        """2: what an engine is told of its half never goes back, and ends once. A room that was placed for a
        decode leader counts as a half of that hand-off before it is bound."""
        key = (node.me, effect.key)
        before = self._rooms.get(key)
        begins = effect.phase is KVPoll.BOOTSTRAPPING
        over = before is not None and before.terminal and key in self._freed
        if begins and over:
            self._freed.discard(key)
        elif begins != (before is None) or (before is not None and before.terminal):
            raise Violation("2", f"{node.name}: room {effect.key} from {before} to {effect}", (key[1].room,))
        self._rooms[key] = effect.phase
        self._began_at[key] = self.world.now
        transfer = self.transfers.get(key)
        if node.spec.role is not Role.PREFILL or transfer is None:
            return
        half = self.halves.get((node.me, transfer))
        unbound = half is not None and half.phase is KVPoll.BOOTSTRAPPING
        if unbound and effect.phase is KVPoll.SUCCESS:  # another attempt had it
            del self.halves[node.me, transfer], self.open[node.me, transfer]
        elif begins or (unbound and effect.phase is KVPoll.FAILED):
            self._phase(node, events.HandoffPhase(transfer, effect.phase, effect.error))

    def _room_freed(self, node: KVView, key: RoomKey) -> None:
        """3: the engine has its pages back once, after the end, when no machine of the half holds them."""
        phase = self._rooms.get((node.me, key))
        if phase is None or not phase.terminal or (node.me, key) in self._freed:
            raise Violation("3", f"{node.name} released room {key} in {phase}, or twice", (key.room,))
        self._freed.add((node.me, key))
        transfer = self.transfers.get((node.me, key))
        half = self.halves.get((node.me, transfer)) if transfer is not None else None
        if transfer is None or half is None or half.released_at is not None:
            return
        if half.epoch or node.spec.role is Role.DECODE:
            raise Violation(
                "3", f"{node.name} released room {key}, of which {transfer} holds pages", (key.room,)
            )
        self._released(node, transfer)

    def half(self, node: KVView, transfer: TransferId) -> Half:
        """The record of `node` about a hand-off."""
        half = self.halves.get((node.me, transfer))
        if half is None:
            raise Violation("1", f"{node.name} speaks of {transfer}, which it never opened", (transfer.room,))
        return half

    def _phase(self, node: KVView, effect: events.HandoffPhase) -> None:
        key = (node.me, effect.transfer)
        half = self.halves.get(key)
        room = (effect.transfer.room,)
        if effect.phase is KVPoll.BOOTSTRAPPING:
            # A tombstone lasts as long as messages of the first transfer can be under way, no longer.
            until_s = 0.85 * self.state.timing.silence_s
            if half is not None and (
                half.ended_at is None
                or (self.world.now < half.ended_at + until_s and node.jumped_at < half.ended_at)
            ):
                raise Violation("1", f"a second half of {effect.transfer} on {node.name}", room)
            half = self._begin(key, node)
            if node.spec.role is Role.DECODE:
                self.transfers[node.me, effect.transfer.received_as] = effect.transfer
                self.state.counts["hand-offs"] += 1
        elif half is None and effect.phase is KVPoll.WAITING_FOR_INPUT and node.spec.role is Role.PREFILL:
            # Somebody has bound a room that was not placed for this hand-off.
            half = self._begin(key, node)
            half.phase = KVPoll.BOOTSTRAPPING
        if half is None:
            raise Violation("1", f"a phase of {effect.transfer}, which {node.name} never opened", room)
        if effect.phase not in NEXT[half.phase]:
            raise Violation(
                "2", f"{node.name}: {effect.transfer} from {half.phase} to {effect.phase.name}", room
            )
        half.phase = effect.phase
        if effect.phase is KVPoll.SUCCESS and node.spec.role is Role.DECODE:
            self.ranks.succeeded(node, effect.transfer)
        if not effect.phase.terminal:
            return
        half.ended_at = self.world.now
        self.flips.ended(node, effect)
        peer = effect.transfer.decode if node.spec.role is Role.PREFILL else effect.transfer.prefill
        half.connected = peer in node.peers
        if effect.phase is KVPoll.SUCCESS:
            spoiled = self.state.spoiled.get((effect.transfer.room, effect.transfer.attempt))
            foreign = not spoiled and effect.metadata != self._contents.get(effect.transfer.room)
            if node.spec.role is Role.DECODE and (spoiled == "prompt tokens" or foreign):
                raise Violation(
                    "7", f"{effect.transfer} succeeded with the metadata {effect.metadata!r}", room
                )
            self.state.counts["succeeded" if node.spec.role is Role.DECODE else "committed"] += 1
        else:
            self._root_cause(effect.error, room)

    def _begin(self, key: tuple[LeaderId, TransferId], node: KVView) -> Half:
        half = self.halves[key] = self.open[key] = Half(node, self.world.now)
        return half

    def _root_cause(self, error: ErrorInfo | None, rooms: tuple[int, ...]) -> None:
        """25, and no reason that nothing in this scenario can give."""
        if error is None or not error.origin or not error.phase:
            raise Violation("25", f"a failure without origin or phase: {error}", rooms)
        self.causes.require(error, rooms)

    def _published(self, node: KVView, message: Destination) -> None:
        half = self.half(node, message.transfer)
        half.epoch, half.pages = message.epoch, tuple(message.pages)
        if message.epoch in node.exposed:
            raise Violation("13", f"{node.name} uses epoch {message.epoch:x} again", (message.transfer.room,))
        touched = node.engine.touched(message.pages, message.slot)
        others = [e for e in node.exposed.values() if e.pages & touched]
        if others:
            raise Violation(
                "3", f"{node.name} publishes pages of {others[0].transfer}", (message.transfer.room,)
            )
        self.ranks.published(node, message)
        node.exposed[message.epoch] = Exposed(message.transfer, touched)
        for page in message.pages:
            if node.pool.references(page) != 1:
                raise Violation(
                    "3", f"{node.name} publishes page {page}, which others use", (message.transfer.room,)
                )

    def _posted(self, node: KVView, effect: events.PostWrite) -> None:
        room = (effect.transfer.room,)
        half = self.half(node, effect.transfer)
        other = self.halves.get((effect.transfer.decode, effect.transfer))
        if half.phase is not None and half.phase.terminal:
            raise Violation("2", f"{node.name} writes for {effect.transfer}, which has ended", room)
        if other is None or other.epoch != effect.epoch:
            raise Violation(
                "8", f"{node.name} writes under epoch {effect.epoch:x}, which was not given", room
            )
        half.epoch = effect.epoch
        self.reads[node.me, effect.transfer.decode, effect.epoch] = effect.transfer

    def _released(self, node: KVView, transfer: TransferId) -> None:
        half = self.half(node, transfer)
        if half.released_at is not None:
            raise Violation("3", f"{node.name} released {transfer} twice", (transfer.room,))
        if half.phase is None or not half.phase.terminal:
            raise Violation("3", f"{node.name} released {transfer}, which has not ended", (transfer.room,))
        if half.quarantined and not half.fenced:
            raise Violation(
                "4",
                f"{node.name} takes {transfer} out of quarantine while its transport may be inside a write",
            )
        self.ranks.released(node, transfer, half.epoch)
        half.released_at = self.world.now
        self.open.pop((node.me, transfer), None)
        if node.spec.role is Role.DECODE:
            if half.phase is KVPoll.FAILED and half.epoch:
                self.rooms.granted_no_more(node, transfer, half.epoch)
            node.exposed.pop(half.epoch, None)
            if half.quarantined:
                self.state.counts["quarantined"] += 1
        elif half.epoch:
            self.reads.pop((node.me, transfer.decode, half.epoch), None)

    # ---- one node ------------------------------------------------------------------------------

    def after_turn(self, node: NodeView) -> None:
        """The node's own tables; the O(n) ones each few turns."""
        pool = node.pool
        if pool.free + pool.used + pool.quarantined != pool.total or pool.free < 0 or pool.quarantined < 0:
            raise Violation("3", f"{node.name}: free + used + quarantined is not total")
        self.requests.had_a_turn(node)
        self._turns += 1
        if self._turns % self._check_every == 0:
            self.node(node)

    def retracted(self, node: NodeView, times: int) -> None:
        """Count what was retracted, and how often that was beside a hand-off of this node under way, and
        beside one of which chunks had landed already."""
        counts = self.state.counts
        counts["retracted"] += times
        phases = {
            half.phase for (me, _), half in self.open.items() if me == node.me and half.ended_at is None
        }
        counts["retracted beside a hand-off"] += times if phases else 0
        counts["retracted beside a transfer"] += times if KVPoll.TRANSFERRING in phases else 0

    def node(self, node: NodeView) -> None:
        """Everything about one node."""
        try:
            if node.borrowed:
                node.pool.check_integrity()
            else:
                node.scheduler.check_integrity()
        except (AssertionError, Internal) as exc:
            raise Violation("3", f"{node.name}: {exc}") from exc
        if isinstance(node, KVView) and (problems := node.manager.problems()):
            raise Violation("3", f"{node.name}: {problems}")
        self._page_owners(node)
        self._deadlines(node)
        self._bounds(node)
        self.requests.node(node)
        if isinstance(node, KVView):
            self._orphans(node)
            self._hidden_quarantine(node)

    def _page_owners(self, node: NodeView) -> None:
        """3: the leases on each page are those of its known owners."""
        scheduler: Any = node.scheduler
        owners = [0] * node.pool.total
        jobs = {id(job): job for job in scheduler.admission.requests.values()}
        if isinstance(node, KVView):
            jobs |= {id(entry.state): entry.state for entry in scheduler.table.values()}
        jobs |= {id(state): state for state, _ in scheduler._held}
        held = [
            node.borrowed,
            *(job.pages for job in jobs.values()),
            *(n.pages for n in scheduler.cache.tree._recent),
        ]
        for pages in held:
            for page in pages:
                owners[page] += 1
        counts = node.pool._counts
        if owners == counts:
            self._slot_owners(node, [job.slot for job in jobs.values() if job.slot is not None])
            return
        page = next(p for p, count in enumerate(counts) if count != owners[p])
        rooms = tuple(j.ticket.room for j in jobs.values() if page in j.pages)
        text = f"page {page} of {node.name} has {counts[page]} leases, {owners[page]} owners"
        raise Violation("3", text, rooms)

    def _slot_owners(self, node: NodeView, owned: list[int]) -> None:
        """3: each slot has the one owner that it is leased to."""
        slots = node.scheduler.cache.slots
        leased = [] if slots is None else [s for s in range(slots.total) for _ in range(slots.references(s))]
        if sorted(owned) != leased:
            raise Violation("3", f"slots {leased} of {node.name} are leased, {sorted(owned)} have owners")

    def turned(self, node: NodeView) -> None:
        """4: the next role of its process takes its memory, so nobody else may touch a page of it."""
        pool = node.pool
        left = {name: count for name, count in node.scheduler.sizes().items() if count}
        if isinstance(node, KVView):
            left |= {
                name: count for name in ("transfers", "handles") if (count := node.manager.sizes()[name])
            }
        if left or pool.quarantined:
            raise Violation("4", f"{node.name} gives its memory to its next role and holds {left}, "
                            f"{pool.quarantined} pages in quarantine")  # fmt: skip

    def _deadlines(self, node: NodeView) -> None:
        """15: nothing outlasts its deadline and a fixed slack, unless its process sleeps. A jump
        of its clock is noticed within the slack. A drained node leaves with its open hand-offs."""
        scheduler: Any = node.scheduler
        slack_s = 0.3
        since_s = self.world.now - max(node.resumed_at, node.jumped_at, 0.0)
        now = node.clock.now()
        if node.paused or node.drained or since_s < slack_s:
            return
        for job in scheduler.admission.requests.values():
            if not now <= job.entered + job.ticket.budget_s + slack_s:  # not what production made of it
                raise Violation("15", f"{node.name}: a job outlived its deadline", (job.ticket.room,))
        if isinstance(node, KVView):
            for key, entry in scheduler.table.items():
                phase = node.exchange.phase_of(key)
                late_s = now - entry.state.entered - entry.state.ticket.budget_s
                if phase is not None and not phase.terminal and not late_s <= slack_s:
                    raise Violation(
                        "15", f"{node.name}: room {key} outlived its own half's deadline", (key.room,)
                    )
            for machine in node.exchange.machines.values():
                if not machine.phase.terminal and not now <= machine.deadline + slack_s:
                    raise Violation(
                        "15",
                        f"{node.name}: {machine.transfer} outlived its deadline",
                        (machine.transfer.room,),
                    )

    def _orphans(self, node: KVView) -> None:
        """18 and 21: a job and its hand-off end together, give or take a turn of each thread."""
        if node.drained:
            return  # its drain has taken too long: nobody turns any more, and it waits for the registry to go
        scheduler: Any = node.scheduler
        since_s = self.world.now - node.resumed_at
        found: set[RoomKey] = set()
        for key, entry in scheduler.table.items():
            phase = node.exchange.phase_of(key)
            if entry.state.ended and phase is not None and not phase.terminal:
                found.add(key)
        if node.spec.role is Role.PREFILL:
            keys = {scheduler.key_of(job) for job in scheduler.admission.requests.values()}
            found |= {key for key in keys if (node.me, key) in self._freed}
        for key in found:
            first = self._orphaned.setdefault((node.me, key), self.world.now)
            if min(self.world.now - first, since_s) > 1.0:
                raise Violation(
                    "18", f"{node.name}: only one of job and hand-off of room {key} ended", (key.room,)
                )

    def _hidden_quarantine(self, node: KVView) -> None:
        """3: pages that wait for a proof are counted as such, or nobody would hear the alarm."""
        scheduler: Any = node.scheduler
        for key in [*scheduler.table, *node.room_keys]:
            transfer = self.transfers.get((node.me, key))
            half = None if transfer is None else self.halves.get((node.me, transfer))
            if half is None or not half.quarantined or half.released_at is not None or half.ended_at is None:
                continue
            if not self._rooms[node.me, key].terminal:
                continue  # on its way to another rank: the pages are still those of a live request
            told = max(half.ended_at, self._began_at[node.me, key], node.resumed_at)
            if self.world.now - told < 1.0:
                continue
            if not set(half.pages) <= set(node.pool._holds):
                raise Violation("3", f"{node.name} does not count {transfer} as quarantined", (key.room,))

    def _bounds(self, node: NodeView) -> None:
        """20 and 22."""
        scheduler: Any = node.scheduler
        if len(scheduler.admission.requests) > node.limits.max_queue:
            raise Violation("20", f"{node.name} holds {len(scheduler.admission.requests)} jobs")
        if isinstance(node, KVView) and node.exchange.sizes()["peers"] > len(node.peers):
            raise Violation("22", f"{node.name} remembers peers without a session")

    # ---- everybody -----------------------------------------------------------------------------

    def sweep(self) -> None:
        """16, 13 and 18: what one side ended, the other learns; and memory comes back."""
        now = self.world.now
        for leader in leaders(self.state):
            # An empty scheduler is unchanged since the last look.
            if not leader.paused and not leader.busy and any(leader.scheduler.sizes().values()):
                self.node(leader)
                self.requests.stands(leader)
        for front in fronts(self.state):
            if front.alive and not front.paused and front.resumed_at < now - 1.0:
                self.answers.waiting(front)
        by_leader = self.state.by_leader
        for (me, transfer), half in list(self.open.items()):
            node = half.node
            if not node.alive:
                del self.open[me, transfer]
                continue
            peer = transfer.decode if node.spec.role is Role.PREFILL else transfer.prefill
            other = by_leader.get(peer)
            if node.paused or other is None or other.paused:
                continue
            awake = max(node.resumed_at, other.resumed_at, self.state.healed_at)
            if half.ended_at is None:
                twin = self.halves.get((peer, transfer))
                if not other.alive:
                    since = max(awake, other.died_at, half.opened_at)
                    if peer in node.peers and now - since > self.bound_s:
                        raise Violation("13", f"{node.name}: {transfer} outlived its peer", (transfer.room,))
                elif twin is not None and twin.ended_at is not None and twin.connected:
                    since = max(awake, twin.ended_at)
                    if half.opened_at < twin.ended_at and now - since > self.bound_s:
                        raise Violation(
                            "16", f"{node.name} did not hear of the end of {transfer}", (transfer.room,)
                        )
                continue
            if transfer in self.state.buggy:
                continue
            answers = max(node.no_answer_until, getattr(other, "no_answer_until", 0.0))
            # Hand-offs that ended without a session are settled over the next one.
            met = max(self._joined.get(pair, 0.0) for pair in ((me, peer), (peer, me)))
            since = max(awake, half.ended_at, met, answers, 0.0 if other.alive else other.died_at)
            connected = peer in node.peers and (other.alive and me in getattr(other, "peers", {}))
            if (connected or not other.alive) and now - since > self.bound_s:
                raise Violation(
                    "18", f"{node.name} still holds {transfer}, which has ended", (transfer.room,)
                )

    # ---- at rest -------------------------------------------------------------------------------

    def at_rest(self) -> None:
        """15, 21: everything has ended and everything is back."""
        # Where one sequence at a time has a place for its state, hundreds wait for it.
        narrow = any(node.engine.spec.slots == 1 for node in leaders(self.state))
        for name, asked in self.state.asked.items():
            rooms = tuple(asked.rooms)
            if not asked.outcome:
                raise Violation("15", f"{name} never ended", rooms)
            conflict = asked.room in self.causes.conflicts
            expected = ("done", "aborted", *["failed"] * conflict, *["late"] * narrow)
            if self.state.calm and not asked.wanted.bad and asked.outcome not in expected:
                text = f"{name} {asked.outcome} though nothing went wrong: {asked.error}"
                raise Violation("12", text, rooms)
        for front in fronts(self.state):
            if front.alive and any(front.fleet.sizes().values()):
                raise Violation("21", f"{front.name} at rest still has {front.fleet.sizes()}")
        for node in leaders(self.state):
            self._at_rest(node)
        if self.reads:
            raise Violation("21", f"{len(self.reads)} hand-offs still read their source pages")

    def something_left(self) -> bool:
        """Whether a request, a hand-off or the memory of one is left anywhere."""
        clients = any(not asked.outcome for asked in self.state.asked.values())
        calls = any(front.alive and any(front.fleet.sizes().values()) for front in fronts(self.state))
        # A fault that lay in wait may take pages late.
        held = any(node.squeezed or self._held(node) for node in leaders(self.state))
        return clients or calls or bool(self.reads) or held

    def _held(self, node: NodeView) -> dict[str, int]:
        """The resources that a node must not hold at rest, with their numbers."""
        sizes = {f"role {k}": v for k, v in node.scheduler.sizes().items()}
        sizes |= {f"engine {k}": v for k, v in node.engine.sizes().items()}
        if isinstance(node, KVView):
            sizes |= {k: v for k, v in node.manager.sizes().items() if k != "peers"}
            sizes |= {"exposed": len(node.exposed), "grants": node.grants, "slots": node.lent}
        return {k: v for k, v in sizes.items() if v}

    def _at_rest(self, node: NodeView) -> None:
        self.node(node)
        if held := self._held(node):
            rooms = tuple(t.room for t in getattr(node, "handles", {}))
            raise Violation("21", f"{node.name} at rest still has {held}", rooms)
        pool, tree = node.pool, node.scheduler.cache.tree
        if pool.quarantined or pool.free + tree.pages != pool.total:
            raise Violation(
                "21", f"{node.name} at rest: {pool.free} pages free, {tree.pages} cached of {pool.total}"
            )
