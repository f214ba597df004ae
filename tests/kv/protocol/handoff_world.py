"""A small world around two exchanges: engines, pools with content, a network and a transport.

Nothing happens by itself. Tests choose what happens next; the world checks the invariants of the
protocol after each step and whenever bytes land. Messages of a session keep their order; everything
else (each rank's fences, write completions and checksums, notices that a session broke) comes in any order.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from segue.kv.errors import AbortedByClient, ErrorCode, ErrorInfo, PeerLost, TransferFailed
from segue.kv.ids import (
    ChecksumMode,
    Incarnation,
    KVPoll,
    LeaderId,
    RankCoord,
    RankId,
    Role,
    RoomKey,
    Span,
    TransferId,
)
from segue.kv.layout.content import checksum
from segue.kv.layout.planner import plan_pair
from segue.kv.layout.spec import KVShape, PoolSpec
from segue.kv.limits import Limits
from segue.kv.protocol import events
from segue.kv.protocol.exchange import Exchange
from segue.kv.protocol.link import partners, writes
from segue.kv.protocol.messages import ChunkPosted, HandoffMessage, Metadata

KV = KVShape(layers=2, kv_heads=1, k_dim=1, v_dim=1, dtype="int64", item_bytes=8)
#: Layers where a side has several ranks: they divide by 1, 2 and 3.
MANY_LAYERS = 6
POISON = -1
#: The prompt of a `Case`.
PROMPT = 10
CLIENT = AbortedByClient("client left").info


def pool_spec(pages: int, page_tokens: int) -> PoolSpec:
    return PoolSpec(shape=KV, pages=pages, page_tokens=page_tokens, layer_count=2, head_count=1)


@dataclass(frozen=True)
class Side:
    """`ranks` that divide the layers among them, each so many times: `copies` that hold the same, and all of
    these at each of the `cp` places of context parallelism."""

    ranks: int = 1
    copies: int = 1
    cp: int = 1

    def specs(self, pages: int, page_tokens: int) -> list[PoolSpec]:
        """The pools of all ranks."""
        shape, count = msgspec.structs.replace(KV, layers=MANY_LAYERS), MANY_LAYERS // self.ranks
        return [
            PoolSpec(
                shape=shape,
                coord=RankCoord(pp=rank, cp=place, tp=copy),
                pages=pages,
                page_tokens=page_tokens,
                layer_start=rank * count,
                layer_count=count,
                head_count=1,
            )
            for rank in range(self.ranks)
            for place in range(self.cp)
            for copy in range(self.copies)
        ]


Sides = tuple[int | Side, int | Side]


def peer_up(peer: LeaderId, spec: PoolSpec, transport: str = "") -> events.PeerUp:
    """A session to a peer whose one pool is as our own."""
    return events.PeerUp(peer, plan_pair([spec], [spec]), transport)


def expect(transfer: TransferId, prompt: int, deadline: float, **options: Any) -> events.ExpectRoom:
    """Prefill's engine begins the room of `transfer`, placed for its decode leader."""
    placed = {"decode": transfer.decode, "attempt": transfer.attempt, **options}
    return events.ExpectRoom(key=transfer.sent_as, prompt_tokens=prompt, deadline=deadline, **placed)


def receive(transfer: TransferId, prompt: int, deadline: float, **options: Any) -> events.OpenReceiver:
    """Decode's engine begins its half of `transfer`."""
    return events.OpenReceiver(
        key=transfer.received_as,
        prefill=transfer.prefill,
        prompt_tokens=prompt,
        deadline=deadline,
        **options,
    )


def content(transfer: TransferId, token: int, layer: int, value: bool) -> int:
    return transfer.room * 10_000 + token * 16 + layer * 2 + value


@dataclass
class Job:
    """An engine's record of one hand-off."""

    transfer: TransferId
    prompt: int
    prefix: int = 0
    pages: list[int] = field(default_factory=list)
    published: bool = False
    sent: int = 0
    #: of the tokens until `begun` the first `layers` layers were sent
    begun: int = 0
    layers: int = 0
    metadata_sent: bool = False
    phases: list[KVPoll] = field(default_factory=list)
    errors: list[ErrorInfo] = field(default_factory=list)
    releases: int = 0
    quarantined: int = 0


@dataclass
class Write:
    """One write in flight. `landed` before `finished`: the bytes are there, nobody knows yet."""

    effect: events.PostWrite | events.Relay
    by: LeaderId
    landed: bool = False
    cut: bool = False


class Node:
    """One leader in one incarnation, its engine's pages and its memory."""

    def __init__(
        self,
        world: World,
        role: Role,
        me: str,
        pages: int,
        page_tokens: int,
        limits: Limits,
        side: int | Side,
    ):
        self.world = world
        self.role = role
        self.me = LeaderId(Incarnation(me))
        self.spec = pool_spec(pages, page_tokens)
        side = Side(side) if isinstance(side, int) else side
        self.specs = [self.spec] if world.ranks == (1, 1) else side.specs(pages, page_tokens)
        name = f"{role} {self.me}"
        self.exchange = Exchange(role, self.me, name, limits, "fake", world.kv_checksum)
        self.jobs: dict[TransferId, Job] = {}
        self.keys: dict[RoomKey, Job] = {}
        self.free = set(range(pages))
        self.owner: dict[int, TransferId] = {}
        self.memory = [np.full(spec.nbytes // 8, POISON, np.int64) for spec in self.specs]
        self.epochs: dict[tuple[int, int], bool] = {}
        self.fences: list[events.Fence] = []
        self.checksums: list[events.ComputeChecksum] = []

    def take(self, job: Job, count: int, rng: random.Random) -> bool:
        if len(self.free) < count:
            return False
        job.pages = rng.sample(sorted(self.free), count)
        for page in job.pages:
            self.free.discard(page)
            self.owner[page] = job.transfer
        return True

    def give_back(self, job: Job) -> None:
        """Pages are free: the engine writes other things into them at once."""
        for page in job.pages:
            assert self.owner.pop(page) == job.transfer, "two owners of a page"
            self.free.add(page)
            for rank, memory in enumerate(self.memory):
                memory[self.indices(rank, page)] = POISON
        job.pages = []

    def indices(self, rank: int, page: int) -> list[int]:
        """Where one rank holds a page."""
        spec = self.specs[rank]
        slots = range(page * spec.page_tokens, (page + 1) * spec.page_tokens)
        layers = range(spec.layer_count)
        return [spec.offset(layer, v, slot) // 8 for layer in layers for v in (False, True) for slot in slots]

    def at(self, job: Job, token: int, first_page: int) -> list[tuple[int, int, int]]:
        """(rank, index in its memory, content) of one token."""
        page = job.pages[token // self.spec.page_tokens - first_page]
        slot = page * self.spec.page_tokens + token % self.spec.page_tokens
        return [
            (rank, spec.offset(n, v, slot) // 8, content(job.transfer, token, spec.layer_start + n, v))
            for rank, spec in enumerate(self.specs)
            for n in range(spec.layer_count)
            for v in (False, True)
        ]


class World:
    """See the module's text. `one_sided` transports cannot stop a write from the receiving side."""

    def __init__(
        self,
        seed: int = 0,
        *,
        one_sided: bool = False,
        page_tokens: tuple[int, int] = (4, 4),
        limits: Limits | None = None,
        kv_checksum: ChecksumMode = ChecksumMode.OFF,
        ranks: Sides = (1, 1),
    ) -> None:
        self.kv_checksum = kv_checksum
        self.ranks = ranks
        self.flipped: set[TransferId] = set()
        self.rng = random.Random(seed)
        self.one_sided = one_sided
        self.page_tokens = page_tokens
        self.limits = limits or Limits()
        #: grants are answered by the test, not at once
        self.grants_late = False
        self.now = 0.0
        self.rooms = 0
        self.births = 0
        self.up = False
        self.notices: list[tuple[Node, events.PeerDown]] = []
        self.queues: dict[Role, deque[tuple[LeaderId, HandoffMessage]]] = {}
        self.writes: list[Write] = []
        self.log: list[tuple[str, object]] = []
        self.fault: Callable[[Node, events.Event], None] | None = None
        self.prefill = self.born(Role.PREFILL)
        self.decode = self.born(Role.DECODE)
        self.plan = plan_pair(self.prefill.specs, self.decode.specs)
        self.dead: list[Node] = []
        self._clear_queues()
        self.connect()

    def born(self, role: Role) -> Node:
        self.births += 1
        index = 0 if role is Role.PREFILL else 1
        me = f"{role.value[0]}{self.births:07d}".ljust(32, "0")
        return Node(self, role, me, 24, self.page_tokens[index], self.limits, self.ranks[index])

    def _clear_queues(self) -> None:
        self.queues = {Role.PREFILL: deque(), Role.DECODE: deque()}

    def nodes(self) -> tuple[Node, Node]:
        return (self.prefill, self.decode)

    def other(self, node: Node) -> Node:
        return self.decode if node is self.prefill else self.prefill

    # ---- events and effects --------------------------------------------------------------------

    def tell(self, node: Node, event: events.Event) -> list[events.Effect]:
        before = {t: node.exchange.phase(t) for t in node.jobs}
        effects = node.exchange.handle(event, self.now)
        self.log.append((node.role.value, event))
        for effect in effects:
            self.log.append((f"  {node.role.value}", effect))
            self._carry_out(node, effect)
        if isinstance(event, events.PeerDown):
            self._check_peer_down(node, event, before)
        self.check()
        return effects

    def _check_peer_down(
        self, node: Node, event: events.PeerDown, before: dict[TransferId, KVPoll | None]
    ) -> None:
        for transfer, phase in before.items():
            bound = (transfer.decode if node.role is Role.PREFILL else transfer.prefill) == event.peer
            after = node.jobs[transfer].phases[-1]
            if bound and phase not in (None, KVPoll.SUCCESS):
                assert after is KVPoll.FAILED, "a transfer outlived its peer"
            elif phase is not None:
                assert after is phase, "a peer's end changed another transfer"

    def _carry_out(self, node: Node, effect: events.Effect) -> None:
        match effect:
            case events.Send():
                other = self.other(node)
                if self.up and effect.peer == other.me:
                    self.queues[other.role].append((node.me, effect.message))
            case events.PostWrite() | events.Relay():
                assert node.jobs[effect.transfer].phases[-1] is KVPoll.TRANSFERRING
                assert isinstance(effect, events.Relay) == (node.role is Role.DECODE)
                self.writes.append(Write(effect, node.me))
            case events.ComputeChecksum():
                node.checksums.append(effect)
            case events.Grant():
                assert (effect.rank, effect.epoch) not in node.epochs, "an epoch was used twice"
                assert effect.epoch != 0
                node.epochs[effect.rank, effect.epoch] = True
                if not self.grants_late:
                    self.tell(node, events.Granted(effect.transfer, effect.rank))
            case events.Fence():
                node.fences.append(effect)
            case events.Phase():
                self._phase(node, effect)
            case events.Release():
                job = node.keys[effect.key]
                job.releases += 1
                assert job.releases == 1, "released twice"
                assert job.phases[-1].terminal, "released before its end"
                node.give_back(job)
            case events.Quarantined():
                job = node.keys[effect.key]
                job.quarantined += 1
                assert effect.pages == len(job.pages)
                assert job.quarantined == 1
                assert job.releases == 0

    def _phase(self, node: Node, effect: events.Phase) -> None:
        job = node.keys[effect.key]
        if job.phases:
            assert not job.phases[-1].terminal, "a phase after the last one"
            assert effect.phase is KVPoll.FAILED or effect.phase > job.phases[-1], "phases go back"
        job.phases.append(effect.phase)
        if effect.phase is KVPoll.FAILED:
            assert effect.error is not None
            assert effect.error.origin, effect.error
            assert effect.error.phase, effect.error
            assert effect.error.room == effect.key.room
            job.errors.append(effect.error)
            if effect.error.code is ErrorCode.CHECKSUM_MISMATCH:
                assert job.transfer in self.flipped, "a checksum is wrong though no bit is"
        if effect.phase is KVPoll.SUCCESS and node.role is Role.DECODE:
            assert effect.metadata == str(effect.key.room).encode(), "consumed another's metadata"
            first = job.prefix // node.spec.page_tokens
            for token in range(job.prefix, job.prompt):
                for rank, index, value in node.at(job, token, first):
                    assert node.memory[rank][index] == value, "success over wrong bytes"

    def check(self) -> None:
        for node in self.nodes():
            node.exchange.check_integrity()
            assert not node.free & set(node.owner)
            assert len(node.free) + len(node.owner) == node.spec.pages
            for transfer, job in node.jobs.items():
                phase = node.exchange.phase(transfer)
                assert phase is None or phase is job.phases[-1], "poll and events disagree"

    # ---- what an engine does -------------------------------------------------------------------

    def new_transfer(self) -> TransferId:
        self.rooms += 1
        return TransferId(self.rooms, 0, self.prefill.me, self.decode.me)

    def fits(self, role: Role, transfer: TransferId, prompt: int) -> bool:
        """Whether the half of this side can be opened: its leader is alive and has the pages."""
        if role is Role.DECODE:
            return self.decode.me == transfer.decode
        node = self.prefill
        return node.me == transfer.prefill and len(node.free) >= -(-prompt // node.spec.page_tokens)

    def open_sender(self, transfer: TransferId, prompt: int, budget_s: float = 60.0) -> Job:
        node = self.prefill
        job = Job(transfer, prompt)
        assert node.take(job, -(-prompt // node.spec.page_tokens), self.rng)
        node.jobs[transfer] = node.keys[transfer.sent_as] = job
        self.tell(node, expect(transfer, prompt, self.now + budget_s))
        return job

    def open_receiver(
        self, transfer: TransferId, prompt: int, prefix: int = 0, budget_s: float = 60.0
    ) -> Job:
        node = self.decode
        job = Job(transfer, prompt, prefix)
        node.jobs[transfer] = node.keys[transfer.received_as] = job
        self.tell(node, receive(transfer, prompt, self.now + budget_s))
        return job

    def publish(self, job: Job) -> bool:
        """Reserve pages and publish them; False if the pool is full or it is not the time."""
        node = self.decode
        if job.published or job.phases[-1] is not KVPoll.WAITING_FOR_INPUT:
            return False
        size = node.spec.page_tokens
        if not node.take(job, -(-job.prompt // size) - job.prefix // size, self.rng):
            return False
        job.published = True
        self.tell(node, events.Publish(job.transfer.received_as, tuple(job.pages), job.prefix))
        return True

    def send_chunk(self, job: Job, tokens: int) -> bool:
        """Compute up to `tokens` tokens, or what `send_layers` has left of them, and send them."""
        return self.send_layers(job, tokens, None)

    def send_layers(self, job: Job, tokens: int, layers: int | None) -> bool:
        """Compute the first `layers` layers (None: all) of up to `tokens` tokens and send them."""
        node = self.prefill
        if job.phases[-1] not in (KVPoll.WAITING_FOR_INPUT, KVPoll.TRANSFERRING) or job.sent == job.prompt:
            return False
        most = node.specs[0].shape.layers
        if layers is not None and not job.layers < layers < most:
            return False
        span = Span(job.sent, job.begun or min(job.prompt, job.sent + tokens))
        for token in range(span.start, span.end):
            for rank, index, value in node.at(job, token, 0):
                if value % 16 // 2 < (layers or most):
                    node.memory[rank][index] = value
        if layers is None:
            job.sent, job.begun, job.layers = span.end, 0, 0
        elif span.end > job.prefix:
            job.begun, job.layers = span.end, layers
        self.tell(node, events.SendChunk(job.transfer.sent_as, span, tuple(job.pages), layers=layers))
        return True

    def send_metadata(self, job: Job) -> bool:
        if job.phases[-1] not in (KVPoll.WAITING_FOR_INPUT, KVPoll.TRANSFERRING) or job.metadata_sent:
            return False
        job.metadata_sent = True
        content = str(job.transfer.room).encode()
        self.tell(self.prefill, events.SendMetadata(job.transfer.sent_as, content))
        return True

    def abort(self, node: Node, job: Job) -> None:
        key = job.transfer.sent_as if node is self.prefill else job.transfer.received_as
        self.tell(node, events.EndRoom(key, AbortedByClient("client left").info))

    # ---- network -------------------------------------------------------------------------------

    def deliver(self, role: Role, times: int = 1) -> bool:
        """The next message of the session towards `role`, as often as said."""
        queue = self.queues[role]
        node = self.prefill if role is Role.PREFILL else self.decode
        if not queue or any(n is node for n, _ in self.notices):
            return False
        peer, message = queue.popleft()
        if times > 1:
            queue.insert(self.rng.randint(0, len(queue)), (peer, message))
        self.tell(node, events.Received(peer, message))
        return True

    def connect(self) -> bool:
        """Open a session, once both sides know that the last one is over."""
        if self.up or self.notices:
            return False
        self.up = True
        for node in self.nodes():
            other = self.other(node)
            self.tell(node, events.PeerUp(other.me, self.plan))
        return True

    def cut(self) -> bool:
        """The session breaks; each side notices later, and what was under way is lost."""
        if not self.up:
            return False
        self.up = False
        self._clear_queues()
        for node in self.nodes():
            self.notices.append((node, events.PeerDown(self.other(node).me, PeerLost("cut").info)))
        return True

    def notice(self, index: int = 0) -> bool:
        if not self.notices:
            return False
        node, event = self.notices.pop(index % len(self.notices))
        if node in self.nodes():
            self.tell(node, event)
        return True

    def lose(self) -> None:
        """The session breaks, and both sides know."""
        self.cut()
        self.notice()
        self.notice()

    def crash(self, role: Role) -> None:
        """A process dies and a new incarnation starts at its address. Its writes die with it."""
        self.cut()
        old = self.prefill if role is Role.PREFILL else self.decode
        self.dead.append(old)
        if role is Role.PREFILL:
            self.prefill = self.born(role)
        else:
            self.decode = self.born(role)
        survivor = self.other(self.prefill if role is Role.PREFILL else self.decode)
        self.notices = [n for n in self.notices if n[0] is not old]
        self.notices.append((survivor, events.PeerDown(old.me, PeerLost("dead").info, dead=True)))
        for write in list(self.writes):
            if write.by == old.me:
                self.writes.remove(write)
            elif write.effect.transfer.decode == old.me:
                write.cut = True

    # ---- transport -----------------------------------------------------------------------------

    def land(self, index: int = 0) -> bool:
        """The bytes of a write reach decode's memory (or are refused there)."""
        todo = [w for w in self.writes if not w.landed and not w.cut]
        if not todo:
            return False
        write = todo[index % len(todo)]
        effect, node, writer = write.effect, self.decode, self.writer(write)
        open_here = self.one_sided or node.epochs.get((effect.target, effect.epoch))
        if effect.transfer.decode != node.me or not open_here:
            write.cut = True
            return True
        write.landed = True
        for b in effect.blocks:
            for at, to, nbytes in b.ranges():
                src, dst, size = at // 8, to // 8, nbytes // 8
                source = writer.memory[effect.rank]
                node.memory[effect.target][dst : dst + size] = source[src : src + size]
        touched = {
            page
            for page in range(node.spec.pages)
            for index_ in node.indices(effect.target, page)
            for b in effect.blocks
            for _, to, nbytes in b.ranges()
            if 0 <= index_ - to // 8 < nbytes // 8
        }
        for page in touched:
            assert node.owner.get(page) == effect.transfer, "a write landed in memory whose lease ended"
        return True

    def writer(self, write: Write) -> Node:
        """The side whose rank writes: decode's if it relays."""
        return self.decode if write.by == self.decode.me else self.prefill

    def finish(self, index: int = 0) -> bool:
        """Tell the writer what became of a write."""
        done = [w for w in self.writes if w.landed or w.cut]
        if not done:
            return False
        write = done[index % len(done)]
        self.writes.remove(write)
        writer = self.writer(write)
        transfer, rank, tag = write.effect.transfer, write.effect.rank, write.effect.tag
        if write.cut:
            error = TransferFailed("cut by the fence").info
            self.tell(writer, events.WriteBroken(transfer, rank, tag, error, refused=True))
        else:
            self.tell(writer, events.WriteLanded(transfer, rank, tag, 0.1))
        return True

    def answer_fence(self, node: Node, index: int = 0) -> bool:
        """A rank answers its fence, and no write of the epoch lands there any more; on the writing side only
        when none of its own is in flight."""
        ready = [
            f
            for f in node.fences
            if not any(
                (w.by, w.effect.transfer, w.effect.rank) == (node.me, f.transfer, f.rank)
                and not w.landed
                and not w.cut
                for w in self.writes
            )
        ]
        if not ready:
            return False
        fence = ready[index % len(ready)]
        node.fences.remove(fence)
        node.epochs[fence.rank, fence.epoch] = False
        proven = node.role is Role.PREFILL or not self.one_sided
        self.tell(node, events.FenceDone(fence.transfer, fence.rank, fence.partner, proven))
        return True

    def partners(self, node: Node, rank: int) -> tuple[RankId, ...]:
        """The ranks that one of `node` exchanges bytes with."""
        written = writes(self.prefill.me, self.decode.me, self.plan.pairs, self.plan.relays)
        return partners(node.me, written)[rank]

    def answer_checksum(self, node: Node, index: int = 0) -> bool:
        """The bytes of a chunk are read now, and its answer is told."""
        if not node.checksums:
            return False
        asked = node.checksums.pop(index % len(node.checksums))
        for slot, tokens in asked.content.runs:
            for at in range(slot, slot + tokens):
                owner = node.owner.get(at // node.spec.page_tokens)
                assert owner == asked.transfer, "read for a checksum after the lease had ended"
        found = checksum([memoryview(node.memory[asked.rank]).cast("B")], asked.content)
        self.tell(node, events.ChecksumReady(asked.transfer, asked.rank, asked.tag, found))
        return True

    def flip(self, index: int = 0) -> bool:
        """One bit changes in bytes that have landed and are about to be verified."""
        checksums = self.decode.checksums
        if not checksums:
            return False
        asked = checksums[index % len(checksums)]
        start, end = self.rng.choice(asked.content.ranges().tolist())
        at = self.rng.randrange(start, end)
        self.decode.memory[asked.rank].view(np.uint8)[at] ^= 1 << self.rng.randrange(8)
        self.flipped.add(asked.transfer)
        return True

    def arrive(self) -> None:
        """All that prefill has posted lands and is announced, and decode hears it."""
        while self.land() and self.finish():
            pass
        while self.answer_checksum(self.prefill):
            pass
        while self.deliver(Role.DECODE):
            pass

    # ---- time and rest -------------------------------------------------------------------------

    def advance(self, seconds: float) -> None:
        self.now += seconds
        for node in self.nodes():
            due = node.exchange.next_deadline()
            if due is not None and due <= self.now:
                self.tell(node, events.Tick())
            due = node.exchange.next_deadline()
            assert due is None or due > self.now

    def settle(self) -> None:
        """Everything under way arrives; no engine does anything new."""
        steps: list[Callable[[], bool]] = [
            lambda: self.deliver(Role.PREFILL),
            lambda: self.deliver(Role.DECODE),
            lambda: self.land(self.rng.randrange(8)),
            lambda: self.finish(self.rng.randrange(8)),
            lambda: self.answer_fence(self.prefill),
            lambda: self.answer_fence(self.decode),
            lambda: self.answer_checksum(self.prefill, self.rng.randrange(8)),
            lambda: self.answer_checksum(self.decode, self.rng.randrange(8)),
            self.notice,
        ]
        moved = True
        while moved:
            self.rng.shuffle(steps)
            moved = any(step() for step in steps)

    def work(self) -> None:
        """Engines carry on without faults until nothing moves."""
        moved = True
        while moved:
            self.settle()
            moved = self.connect()
            for job in list(self.decode.jobs.values()):
                moved = self.publish(job) or moved
            for job in list(self.prefill.jobs.values()):
                self.send_layers(job, self.rng.randint(1, 20), self.rng.randint(1, 8))
                moved = self.send_chunk(job, self.rng.randint(1, 20)) or self.send_metadata(job) or moved

    def _check_both_know(self) -> None:
        """With a session and nothing under way, neither side waits for one that has ended, unless
        so many ended that the oldest were forgotten: then the deadline ends the wait."""
        if any(n.exchange.sizes()["ended"] == self.limits.max_transfers for n in self.nodes()):
            return
        for transfer, sender in self.prefill.jobs.items():
            receiver = self.decode.jobs.get(transfer)
            if receiver is not None:
                ends = (sender.phases[-1].terminal, receiver.phases[-1].terminal)
                assert ends[0] == ends[1], f"one side has ended, the other waits: {sender} {receiver}"

    def come_to_rest(self) -> None:
        """Faults stop; sessions return, deadlines pass; then nothing may be left anywhere."""
        self.settle()
        self.connect()
        self.settle()
        self._check_both_know()
        self.advance(200.0)
        self.settle()
        for node in self.nodes():
            for job in node.jobs.values():
                assert job.phases[-1].terminal, (node.role, job)
                assert job.releases == 1, (node.role, job)
                assert sum(phase.terminal for phase in job.phases) == 1
            assert not node.owner
            assert not any(node.epochs.values()), "an epoch is still open in the transport"
            sizes = node.exchange.sizes()
            assert (sizes["transfers"], sizes["early"], sizes["epochs"]) == (0, 0, 0), sizes
            assert node.exchange.quarantined_pages() == 0
        self.advance(2 * self.limits.request_budget_s)
        for node in self.nodes():
            sizes = node.exchange.sizes()
            assert sizes.pop("peers") == 1
            assert not any(sizes.values()), sizes
            assert node.exchange.counters["internal_errors"] == 0


def kinds(effects: list[events.Effect]) -> list[str]:
    """Effects as short words: the type, with the message or phase it carries. What a machine says to its
    room or receiver (`events.HandoffEffect`) is left out: their own word follows."""
    words = []
    for effect in effects:
        if isinstance(effect, events.HandoffEffect):
            continue
        word = type(effect).__name__
        if isinstance(effect, events.Send):
            word = type(effect.message).__name__
        elif isinstance(effect, events.Phase):
            word = effect.phase.name
        words.append(word)
    return words


class Case(World):
    """One hand-off brought into a given state, with both halves real: `s` and `r`, once they are open."""

    s: Job
    r: Job

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.transfer = self.new_transfer()

    @property
    def sender_state(self) -> str:
        machine = self.prefill.exchange.machines.get(self.transfer)
        return machine.state.value if machine else "-"

    @property
    def receiver_state(self) -> str:
        machine = self.decode.exchange.machines.get(self.transfer)
        return machine.state.value if machine else "-"

    def open(self, prefix: int = 0) -> Case:
        self.s = self.open_sender(self.transfer, PROMPT)
        self.r = self.open_receiver(self.transfer, PROMPT, prefix)
        return self

    def published(self, prefix: int = 0) -> Case:
        """Prefill has not read yet where to write."""
        self.open(prefix)
        self.publish(self.r)
        return self

    def waiting(self, prefix: int = 0) -> Case:
        self.published(prefix)
        self.deliver(Role.PREFILL)
        self.deliver(Role.DECODE)
        return self

    def in_flight(self) -> Case:
        self.waiting()
        self.send_chunk(self.s, PROMPT)
        return self

    def fence_done(self, node: Node, *, proven: bool = True) -> events.FenceDone:
        """The answer of the one rank of `node` to its fence."""
        return events.FenceDone(self.transfer, 0, RankId(self.other(node).me), proven)

    def from_prefill(self, message: Any) -> list[events.Effect]:
        return self.tell(self.decode, events.Received(self.prefill.me, message))

    def chunk(self, **changes: Any) -> ChunkPosted:
        good = ChunkPosted(
            transfer=self.transfer,
            source=0,
            target=0,
            sequence=0,
            span=Span(0, PROMPT),
            nbytes=PROMPT * 32,
            final=True,
        )
        return msgspec.structs.replace(good, **changes)

    def metadata(self, **changes: Any) -> Metadata:
        good = Metadata(transfer=self.transfer, prompt_tokens=PROMPT, content=b"7")
        return msgspec.structs.replace(good, **changes)
