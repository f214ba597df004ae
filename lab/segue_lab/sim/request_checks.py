"""The requests of one instance, checked by the numbers of `docs/protocol.md`: tickets, frontends, bugs."""

from __future__ import annotations

from typing import Any

from segue.kv.ids import KVPoll, LeaderId, TransferId
from segue.kv.protocol import events
from segue.kv.protocol.rooms import Room, RoomState
from segue.server.instance.leader import FromFrontend, FrontendGone, Item
from segue.server.messages.control import Cancel, Replace, Submit
from segue.server.schedulers.prefill import HELD_S
from segue.server.schedulers.request_state import RequestState
from segue_lab.sim.causes import Causes
from segue_lab.sim.fair_checks import FairChecks
from segue_lab.sim.node_views import KVView, NodeView
from segue_lab.sim.sim_state import SimState
from segue_lab.sim.world import Process, Violation, World

#: Prefill ends a placed room that no decode has for others that have waited `HELD_S`; it asks as often.
FORSAKEN_S = 2 * HELD_S + 0.5


class RequestChecks:
    """Checks of an instance against the requests that it got."""

    def __init__(self, state: SimState, causes: Causes) -> None:
        self._state = state
        self._causes = causes
        self.world: World = state.world
        self._fair = FairChecks()
        #: nodes that stood still at the last look, and have had no turn since
        self._standing: set[NodeView] = set()
        #: (leader, ticket) → the one job it has placed, and until when it may place no other
        self._placed: dict[tuple[LeaderId, TransferId], tuple[int, float]] = {}

    def had_a_turn(self, node: NodeView) -> None:
        """The leader has had a turn, so it does not stand still; and whether requests wait there is noted."""
        self._causes.short(node, self._waits_for_pages(node))
        self._fair.turn(node)
        self._standing.discard(node)

    def node(self, node: NodeView) -> None:
        """Its tables."""
        self._tickets(node)
        self._abandoned(node)

    def _tickets(self, node: NodeView) -> None:
        """1: a ticket places one request. (Of hand-offs the exchange's tombstones say the same.)"""
        scheduler: Any = node.scheduler
        for job in scheduler.admission.requests.values():
            key = (node.me, job.received_as)
            seq_id, until = self._placed.setdefault(key, (job.seq_id, job.deadline))
            if seq_id == job.seq_id:
                continue
            if job.entered < until:
                raise Violation(
                    "1", f"{node.name} took the ticket of room {job.received_as} twice", (job.ticket.room,)
                )
            self._placed[key] = (job.seq_id, job.deadline)

    def _abandoned(self, node: NodeView) -> None:
        """16, of frontends: what nobody waits for any more ends when its session does, not by itself."""
        scheduler: Any = node.scheduler
        if node.was_paused:
            return
        for job in scheduler.admission.requests.values():
            front = self._state.by_leader.get(LeaderId(job.origin))
            if job.ended or front is None or not self._is_gone(node, front):
                continue
            state = "silent" if front.alive else "dead"
            raise Violation(
                "16", f"{node.name} still serves {front.name}, which is {state}", (job.ticket.room,)
            )

    def _is_gone(self, node: NodeView, front: Process) -> bool:
        """Whether `node` must have noticed by now that nothing comes from `front` any more."""
        network, timing, now = self._state.network, self._state.timing, node.world.now
        # By a clock that runs slow.
        silent_s = timing.silence_s / 0.9 + 0.5
        if not front.alive:
            return now - front.died_at > (silent_s if network.ever_blocked else timing.break_seen_s + 0.3)
        if front.paused and not network.ever_blocked and now - front.paused_at > silent_s:
            return True
        return network.blocked_s(front, node) > silent_s

    def _waits_for_pages(self, node: NodeView) -> bool:
        """Whether requests wait here because others have what they need."""
        scheduler: Any = node.scheduler
        batch, queue = getattr(scheduler, "batch", None), getattr(scheduler, "queue", None)
        return bool(
            (batch is not None and (batch.retracted or batch.waiting))
            or (queue is not None and queue.waiting)
            or getattr(scheduler, "preallocation", ())
        )

    def stands(self, node: NodeView) -> None:
        """17: a leader that nobody wakes stands still as well. Something may be about to wake it, so it
        must have been so at the last look too, and have had no turn since."""
        try:
            self.nothing_to_do(node)
        except Violation:
            if node in self._standing and node.resumed_at < self.world.now - 1.0:
                raise
            self._standing.add(node)
        else:
            self._standing.discard(node)

    def nothing_to_do(self, node: NodeView) -> None:
        """17: the leader has planned no step. Then every request here waits for somebody else: for its
        prefill side, or for pages that a hand-off has, which come back by its end. A deadline is no such end.
        """
        scheduler: Any = node.scheduler
        if node.borrowed:
            return
        batch, queue = getattr(scheduler, "batch", None), getattr(scheduler, "queue", None)
        ready: list[Any] = []
        if batch is not None:
            ready += [*batch.waiting, *batch.running, *(job for job, _ in batch.retracted)]
        if queue is not None:
            ready += [*queue.waiting, *queue.running]
        table = getattr(scheduler, "table", None)
        entries = list(table.values()) if table is not None else []
        in_flight = [e.state for e in entries if e.state.pages and not any(e.state is job for job in ready)]
        waited_s = self.world.now - min((job.since for job in ready), default=self.world.now)
        in_flight = [job for job in in_flight if min(waited_s, self._forsaken_s(node, job)) < FORSAKEN_S]
        queued = getattr(scheduler, "preallocation", ())
        ready += [
            e.state for e in entries if e.state in queued and e.handle.poll() is KVPoll.WAITING_FOR_INPUT
        ]
        if ready and not in_flight:
            rooms = tuple(job.ticket.room for job in ready)
            raise Violation("17", f"{node.name} stands still: {scheduler.sizes()}", rooms)

    def _forsaken_s(self, node: NodeView, job: RequestState) -> float:
        """How long no decode has had the placed room of a prompt since it is computed; 0 if one has it."""
        if not isinstance(node, KVView):
            return 0.0
        room: Room | None = node.exchange.rooms.rooms.get(job.sent_as)
        waits = room is not None and room.state is RoomState.EXPECTED
        if room is None or not waits or job.phase != "in_flight" or job.direct:
            return 0.0
        return self.world.now - max(room.unbound_at, job.since)

    def broken(self, node: NodeView, item: Item) -> None:
        """12: what the role broke on ends at once, not by its deadline; a last word is heard all the same."""
        scheduler: Any = node.scheduler
        rooms: tuple[int, ...] = ()
        match item:
            case FromFrontend(origin, (Submit() | Replace() | Cancel()) as message):
                asked = message.request.request_id if isinstance(message, Submit) else message.request_id
                left = (origin, asked) in scheduler.admission.requests
            case FrontendGone(origin):
                left = any(job.origin == origin for job in scheduler.admission.requests.values())
            case events.Phase(key):
                left, rooms = (
                    any(scheduler.key_of(job) == key for job in scheduler.admission.requests.values()),
                    (key.room,),
                )
            case events.Release(key):
                left, rooms = scheduler.table.get(key) is not None, (key.room,)
            case events.Quarantined(key):
                entry = scheduler.table.get(key)
                left, rooms = entry is not None and not entry.quarantined, (key.room,)
            case _:
                left = False
        if left:
            raise Violation("12", f"{node.name} broke on {item} and left it behind", rooms)
