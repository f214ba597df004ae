"""Engines that open rooms before they know the other side, as vLLM's and SGLang's do, on the nodes there are.

They use production's `KVManager` beside the node's own role, with pages of the same pool. `RoomStories` has
each plan of a scenario, executed by the present incarnations of its nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from msgspec import structs

from segue.engine.request import SamplingParams
from segue.kv.errors import AbortedByClient, ErrorCode, OutOfCapacity, SegueError
from segue.kv.handles import KVReceiver, KVSender
from segue.kv.ids import OPEN_RANK, KVPoll, LeaderId, Role, RoomKey, Span
from segue.kv.protocol import events
from segue.kv.protocol.messages import Accepted, Destination, HandoffMessage, Moved
from segue.server.schedulers.prefill_result import PrefillResult
from segue_lab.sim.causes import Causes
from segue_lab.sim.clients import Asked, Wanted
from segue_lab.sim.node_spec import VOCAB
from segue_lab.sim.node_views import KVView
from segue_lab.sim.room_plans import Claim, RoomPlan
from segue_lab.sim.sim_engine import WrongKV, lineage
from segue_lab.sim.sim_state import SimState
from segue_lab.sim.world import Violation

#: Where two decodes may meet, or one that is late or wrong, a half may end with any of these.
CONTESTED = frozenset(ErrorCode) - {
    ErrorCode.INTERNAL,
    ErrorCode.CHECKSUM_MISMATCH,
    ErrorCode.RANK_DIVERGENCE,
}
#: How often an engine looks whether it lacks memory.
LOOK_S = 0.02


class RoomNode(Protocol):
    """A node whose engine opens rooms."""

    rooms: RoomEngine


@dataclass(slots=True, eq=False)
class OpenRoom:
    """A plan as it is played."""

    plan: RoomPlan
    number: int
    #: have a decode come for it
    comes: Callable[[Claim], None] = lambda claim: None
    route: set[LeaderId] = field(default_factory=set)
    #: errors that its halves may end with without a fault
    codes: set[ErrorCode] = field(default_factory=set)
    #: for each rank of prefill, other ones: the target of a hint, and the target of `Moved`
    hints: dict[LeaderId, int] = field(default_factory=dict)
    sent_on: dict[LeaderId, int] = field(default_factory=dict)
    told: set[str] = field(default_factory=set)

    @property
    def key(self) -> RoomKey:
        """Prefill's name of it."""
        return RoomKey(self.number, self.plan.generation)

    def heard(self, message: HandoffMessage) -> tuple[HandoffMessage, HandoffMessage | None, float]:
        """The message that arrives instead of this one; and perhaps a second one, with its delay."""
        transfer = message.transfer
        claim = next((c for c in self.plan.claims if c.attempt == transfer.attempt), None)
        if claim is None:
            return message, None, 0.0
        if isinstance(message, Destination) and claim.repeat and claim.repeat not in self.told:
            self.told.add(claim.repeat)
            changed: dict[str, dict[str, Any]] = {
                "pages": {"pages": message.pages[::-1]},
                "epoch": {"epoch": message.epoch + 1},
                "claim": {"claim": self.digest(wrong=not claim.wrong)},
            }
            again = structs.replace(message, **changed.get(claim.repeat, {}))
            return message, again, claim.repeat_s
        if isinstance(message, Accepted) and claim.moved and transfer.prefill in self.sent_on:
            return Moved(transfer, self.sent_on[transfer.prefill]), None, 0.0
        return message, None, 0.0

    def digest(self, *, wrong: bool) -> bytes:
        """The claim that prefill's engine and a right claimant share."""
        return f"{'another' if wrong else 'the'} prompt of {self.number}".encode()


@dataclass(slots=True, eq=False)
class EngineHalf:
    """An engine's resources for one room."""

    room: OpenRoom
    handle: KVSender | KVReceiver
    pages: list[int]
    claim: Claim | None = None
    published: list[int] = field(default_factory=list)
    quarantined: bool = False
    ended: bool = False


class RoomEngine:
    """The rooms of one incarnation of a node."""

    def __init__(self, node: KVView) -> None:
        self._node = node
        self.halves: dict[RoomKey, EngineHalf] = {}
        self._looking = False

    @property
    def pages(self) -> list[int]:
        """All that it has."""
        return [page for half in self.halves.values() for page in half.pages]

    def _allocate(self, tokens: int) -> list[int] | None:
        """Pages for a prompt; most of the pool is left to the node's own role."""
        pool = self._node.pool
        count = pool.pages_for(tokens)
        return pool.allocate(count) if pool.free - count > pool.total // 2 else None

    # ---- prefill -----------------------------------------------------------------------------------

    def expect(self, room: OpenRoom, decode: LeaderId | None) -> None:
        """Open a room, and compute its prompt; or refuse its request."""
        node, plan = self._node, room.plan
        if plan.refuses:
            error = OutOfCapacity("prefill takes no more requests", room=room.number)
            node.manager.refuse(room.key, error.info, plan.budget_s, announce=plan.announce)
            return
        pages = None if room.key in self.halves else self._allocate(len(plan.prompt))
        if pages is None:
            room.codes |= CONTESTED
            return
        sender = node.manager.expect(
            room.key,
            len(plan.prompt),
            plan.budget_s,
            claim=room.digest(wrong=False),
            decode=decode,
            retain_s=plan.retain_s or None,
            announce=plan.announce,
        )
        half = self.halves[room.key] = EngineHalf(room, sender, pages)
        self._compute(half, sender, 0)
        if plan.evict_s is not None:
            node.after(plan.evict_s, self._evict, half)
        if plan.close_s is not None:
            node.after(plan.close_s, sender.close)
        for claim in plan.claims:
            leader = getattr(node.state.nodes[claim.node], "me", None)
            if claim.given_s is not None and leader is not None:
                node.after(claim.given_s, sender.place, claim.attempt, leader)
        if not self._looking:
            self._looking = True
            node.after(LOOK_S, self._look)

    def _compute(self, half: EngineHalf, sender: KVSender, done: int) -> None:
        """The next chunk of the prompt, of equal ones."""
        plan, node = half.room.plan, self._node
        if half.ended:
            return
        size = -(-len(plan.prompt) // len(plan.chunk_s))
        span = Span(done, min(done + size, len(plan.prompt)))
        node.engine.put(plan.prompt, span, half.pages)
        sender.send(span, half.pages[: node.pool.pages_for(span.end)])
        pause_s = plan.chunk_s[min(done // size, len(plan.chunk_s) - 1)]
        if span.end < len(plan.prompt):
            node.after(pause_s, self._compute, half, sender, span.end)
            return
        result = PrefillResult(first_token=lineage(plan.prompt) % VOCAB, computed=len(plan.prompt))
        node.after(pause_s, self._finish, half, sender, result.encode())

    def _finish(self, half: EngineHalf, sender: KVSender, content: bytes) -> None:
        sender.finish(content)
        for claim in half.room.plan.claims:
            if claim.follows:
                self._node.world.after(claim.after_s, None, half.room.comes, claim)

    def _evict(self, half: EngineHalf) -> None:
        if isinstance(half.handle, KVSender) and not half.ended:
            half.handle.evict(OutOfCapacity("the engine lacks memory for unbound rooms").info)

    def _look(self) -> None:
        """If memory is short, evict the oldest unbound room."""
        rooms = [half for half in self.halves.values() if isinstance(half.handle, KVSender)]
        unbound = [half for half in rooms if half.handle.poll() is KVPoll.BOOTSTRAPPING and not half.ended]
        if unbound and self._node.pool.free < self._node.pool.total // 4:
            unbound[0].room.codes |= CONTESTED
            self._node.state.counts["rooms evicted under pressure"] += 1
            self._evict(unbound[0])
        self._looking = bool(rooms)
        if rooms:
            self._node.after(LOOK_S, self._look)

    # ---- decode ------------------------------------------------------------------------------------

    def claim(self, room: OpenRoom, claim: Claim, prefill: LeaderId) -> None:
        """Come for a room."""
        node, key = self._node, RoomKey(room.number, room.plan.generation, attempt=claim.attempt)
        digest = room.digest(wrong=claim.wrong)
        if claim.declines:
            error = AbortedByClient("decode has the prompt already", room=room.number)
            node.manager.decline(key, prefill, error.info, claim=b"" if claim.unread else digest)
            return
        receiver = node.manager.receive(
            key,
            LeaderId(prefill.incarnation, OPEN_RANK) if claim.open_rank else prefill,
            len(room.plan.prompt),
            claim.budget_s,
            claim=digest,
            prefill_dp_rank=room.hints.get(prefill) if claim.hint else None,
            placed=claim.placed,
        )
        self.halves[key] = EngineHalf(room, receiver, [], claim)
        if claim.abort_s is not None:
            node.after(claim.abort_s, receiver.abort)

    def _publish(self, half: EngineHalf, receiver: KVReceiver, claim: Claim) -> None:
        node, prompt = self._node, half.room.plan.prompt
        if half.ended:
            return
        pages = self._allocate(len(prompt))
        if pages is None:
            half.room.codes |= CONTESTED
            receiver.abort(OutOfCapacity("decode has no memory for this room", room=half.room.number).info)
            return
        prefix = int(len(prompt) * claim.prefix)
        node.engine.put(prompt, Span(0, prefix), pages)
        half.pages = pages
        half.published = pages[prefix // node.pool.page_tokens :]
        receiver.publish(half.published, prefix)

    # ---- what the protocol says --------------------------------------------------------------------

    def heard(self, change: events.Change) -> None:
        """A step of one of its halves."""
        half = self.halves[change.key]
        match change:
            case events.Phase(phase=KVPoll.WAITING_FOR_INPUT) if half.claim is not None:
                assert isinstance(half.handle, KVReceiver)
                self._node.after(half.claim.publish_s, self._publish, half, half.handle, half.claim)
            case events.Phase() if change.phase.terminal:
                half.ended = True
                if change.phase is KVPoll.SUCCESS and half.claim is not None:
                    self._verify(half)
            case events.Quarantined() if not half.quarantined:
                half.quarantined = True
                self._node.pool.quarantine(half.published)
            case events.Release():
                self._released(change.key, half)
            case _:
                pass

    def _verify(self, half: EngineHalf) -> None:
        """5: decode has the KV of its whole prompt."""
        node, number = self._node, half.room.number
        try:
            node.engine.verify(half.room.plan.prompt, half.pages)
        except WrongKV as error:
            node.world.fail(Violation("5", f"{node.name}, room {number:x}: {error}", (number,)))

    def _released(self, key: RoomKey, half: EngineHalf) -> None:
        pool = self._node.pool
        if half.quarantined:
            pool.unquarantine(half.published)
            half.pages = half.pages[: len(half.pages) - len(half.published)]
        pool.release(half.pages)
        del self.halves[key]
        half.handle.clear()
        wake: Any = self._node
        wake.wake()


class RoomStories:
    """Plays the plans of a scenario."""

    def __init__(self, state: SimState, causes: Causes) -> None:
        self._state = state
        self._causes = causes
        self._rng = state.world.rng("rooms")

    def start(self) -> None:
        """Have all that the plans say come at its time."""
        world = self._state.world
        for plan in self._state.scenario.rooms:
            room = OpenRoom(plan, self._rng.getrandbits(63) or 1)
            room.comes = partial(self._claim, room)
            room.codes |= frozenset() if plan.plain else CONTESTED
            room.codes |= {ErrorCode.OUT_OF_CAPACITY} if plan.refuses else frozenset()
            if any(claim.wrong for claim in plan.claims):
                # Refused for its claim, beside a binding, after the end (as a later attempt than the one that
                # succeeded: without capacity), or as another than the placed one.
                room.codes |= {
                    ErrorCode.OUT_OF_CAPACITY,
                    ErrorCode.METADATA_MISMATCH,
                    ErrorCode.TRANSFER_FAILED,
                    ErrorCode.INVALID_REQUEST,
                    ErrorCode.PEER_REFUSED,
                }
            self._state.open_rooms[room.number] = room
            opens = [(plan.node, plan.at)]
            if plan.twin:
                opens.append((plan.twin, plan.at + 0.005))
            if plan.again_s is not None:
                opens.append((plan.node, plan.at + plan.again_s))
            for name, at in opens:
                world.at(at, None, self._expect, room, name)
            for claim in plan.claims:
                if not claim.follows:
                    world.at(max(0.01, plan.at + claim.after_s), None, self._claim, room, claim)

    def _there(self, room: OpenRoom, name: str, role: Role) -> Any:
        """The present incarnation of a node that accepts requests; None if there is none."""
        node: Any = self._state.nodes.get(name)
        takes = isinstance(node, KVView) and node.alive and node.spec.role is role
        if takes and not (node.draining or node.steered or node.lost_rank):
            return node
        room.codes |= CONTESTED
        return None

    def _placed(self, room: OpenRoom, *nodes: KVView) -> None:
        """The leaders that serve it. Later incarnations are other leaders."""
        plan, names = room.plan, {self._state.by_leader[me].name.partition("#")[0] for me in room.route}
        known = {node.name.partition("#")[0] for node in nodes if node.me not in room.route} & names
        if known:
            room.codes |= CONTESTED
        room.route |= {node.me for node in nodes}
        budget_s = min(plan.budget_s, *(claim.budget_s for claim in plan.claims), plan.budget_s)
        wanted = Wanted(plan.name, plan.at, list(plan.prompt), SamplingParams(max_tokens=1), budget_s)
        self._causes.placed(room.number, Asked(wanted, self._state.world.now + budget_s), set(room.route))
        self._causes.of_rooms[room.number] = room.codes

    def _expect(self, room: OpenRoom, name: str) -> None:
        node = self._there(room, name, Role.PREFILL)
        if node is None:
            return
        decode = self._state.nodes.get(room.plan.placed)
        placed = [decode] if isinstance(decode, KVView) and decode.spec.role is Role.DECODE else []
        self._placed(room, node, *placed)
        node.after(0.0, node.rooms.expect, room, placed[0].me if placed else None)

    def _claim(self, room: OpenRoom, claim: Claim) -> None:
        prefill = self._state.nodes.get(room.plan.node)
        decode = self._there(room, claim.node, Role.DECODE)
        if decode is None or not isinstance(prefill, KVView) or prefill.spec.role is not Role.PREFILL:
            room.codes |= CONTESTED
            return
        self._placed(room, decode, *(self._ranks_of(prefill) if claim.open_rank else [prefill]))
        if claim.open_rank:
            self._causes.open_rooms.add(room.number)
            ranks = [p.me for p in self._ranks_of(prefill)]
            if len(ranks) > 1:  # neither the rank in the hint nor our own
                room.hints = {me: ranks[at - 1].dp_rank for at, me in enumerate(ranks)}
                room.sent_on = {me: ranks[at - 2].dp_rank for at, me in enumerate(ranks)}
                room.sent_on |= {me: rank for me, rank in room.hints.items() if len(ranks) == 2}
        decode.after(0.0, partial(self._come, decode, room, claim, prefill.me))

    def _ranks_of(self, node: KVView) -> list[KVView]:
        every = (other for other in self._state.nodes.values() if isinstance(other, KVView))
        return [other for other in every if other.me.incarnation == node.me.incarnation]

    @staticmethod
    def _come(decode: RoomNode, room: OpenRoom, claim: Claim, prefill: LeaderId) -> None:
        try:
            decode.rooms.claim(room, claim, prefill)
        except SegueError:  # its handle is still there: an attempt is made once
            room.codes |= CONTESTED
