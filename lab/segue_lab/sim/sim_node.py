"""Simulated prefill and decode instances: production's `KVManager`, checked, over virtual data paths."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import numpy as np

from segue.kv.config import KVConfig, LeaderRuntime
from segue.kv.errors import SegueError
from segue.kv.handles import KVReceiver, KVSender
from segue.kv.ids import ChecksumKind, LeaderId, RankId, Role, RoomKey
from segue.kv.layout.content import whole_pages
from segue.kv.layout.spec import PoolSpec
from segue.kv.manager import KVManager
from segue.kv.peers import Peer
from segue.kv.protocol import events
from segue.kv.protocol.exchange import Exchange
from segue.kv.protocol.machine import IllegalEvent
from segue.kv.protocol.messages import ChunkPosted, Destination, HandoffMessage, Metadata, PathChosen
from segue.kv.ranks.checksums import Digester
from segue.kv.ranks.local_rank import Rank, local_rank
from segue.kv.session.api import Session
from segue.kv.threads import ThreadPerCall
from segue.kv.transport.base import EventSink
from segue.kv.transport.memory.pool_memory import Memory, host_region
from segue.kv.transport.options import TransportOptions
from segue.server.instance.leader import Abandon
from segue.server.observe.integrity_report import busy
from segue.server.schedulers.decode import DecodeScheduler
from segue.server.schedulers.local_prompts import LocalPrompts
from segue.server.schedulers.prefill import PrefillScheduler
from segue.server.schedulers.scheduler import Scheduler
from segue_lab.sim.datapath import DataPath, SimKinds, SimShm, SimTcp, SimTransport
from segue_lab.sim.faulty import Hearing
from segue_lab.sim.node_spec import NodeSpec
from segue_lab.sim.node_views import Exposed, KVView
from segue_lab.sim.room_engine import RoomEngine
from segue_lab.sim.runtime import SimWorker
from segue_lab.sim.sim_leader import LeaderNode, NodeParts
from segue_lab.sim.sim_workers import SimWorkerRank
from segue_lab.sim.staging import SimStagedShm, SimStagedTcp
from segue_lab.sim.world import Injected, Violation

_SIMULATED = (SimShm, SimTcp, SimStagedShm, SimStagedTcp)
MADE: dict[str, Callable[[KVNode, EventSink, TransportOptions], SimTransport]] = {
    made.name: made for made in _SIMULATED
}
#: The effects that may raise: what the others do cannot fail.
BREAKABLE = (events.Send, events.PostWrite, events.Grant, events.Fence, events.ComputeChecksum)
#: Events that a bug at the exchange's entry may lose: a proof that memory is free comes only once.
UNDECIDED = (
    events.PeerUp,
    events.Publish,
    events.SendChunk,
    events.SendMetadata,
    Destination,
    ChunkPosted,
    Metadata,
)


class CheckedExchange(Exchange):
    """Production's exchange; each event and what follows from it are looked at."""

    def __init__(self, node: KVNode, **options: Any) -> None:
        super().__init__(**options)
        self._node = node

    def handle(self, event: events.Event, now: float) -> list[events.Effect]:
        node = self._node
        node.world.note(node.name, event)
        if isinstance(event, events.OpenReceiver):
            later = event.prefill.dp_rank > 0 or node.me.dp_rank
            node.state.counts["hand-offs with a later leader of an incarnation"] += bool(later)
        about = event.message if isinstance(event, events.Received) else event
        if node.faults.event_fails and isinstance(about, UNDECIDED):
            node.faults.event_fails -= 1
            node.state.counts[f"exception at {type(about).__name__}"] += 1
            node.failed_at = node.world.now
            raise Injected(f"injected into {type(about).__name__}")
        try:
            effects = super().handle(event, now)
        except IllegalEvent as exc:
            # Production quietly refuses events that come after the tombstone has gone (a pause).
            if not node.checks.is_over(node, event):
                named = getattr(event, "key", None) or getattr(event, "transfer", None)
                rooms = (named.room,) if named is not None else ()
                node.world.fail(Violation("2", f"{node.name}: {exc}", rooms))
            raise
        except SegueError as error:
            node.world.note(node.name, f"refused: {error}")
            node.checks.rooms.refused(node, event)
            raise
        node.checked(node.checks.scope, node, event, effects)
        return effects


class SimManager(KVManager):
    """Production's manager; faults are injected between its effects."""

    def __init__(self, node: KVNode, config: KVConfig, runtime: LeaderRuntime) -> None:
        self._sim_node = node
        #: effects about hand-offs that were never opened
        self._refusals: list[events.Effect] = []
        super().__init__(
            config,
            node.make_ranks(config, runtime),
            node.told,
            on_rank_lost=node.rank_lost,
            others={Role.FRONTEND: node.fronts},
            clock=node.clock,
            runtime=runtime,
        )

    def _carry_out(self, effect: events.Effect) -> None:
        node = self._sim_node
        if not node.alive:
            return
        node.world.note(node.name, effect)
        if any(refusal is effect for refusal in self._refusals):
            self._refusals = [refusal for refusal in self._refusals if refusal is not effect]
        else:
            node.checked(node.checks.effect, node, effect)
        if isinstance(effect, events.Send) and isinstance(effect.message, Metadata):
            effect = self._spoiled(effect, effect.message)
        if node.faults.effect_fails and isinstance(effect, BREAKABLE):
            node.faults.effect_fails -= 1
            node.state.counts[f"exception in {type(effect).__name__}"] += 1
            node.failed_at = node.world.now
            # Before or after it was done; but a checksum that was taken on is answered, and not refused too.
            if not isinstance(effect, events.ComputeChecksum) and node.rng.random() < 0.5:
                super()._carry_out(effect)
            raise Injected(f"injected into {type(effect).__name__}")
        super()._carry_out(effect)
        if node.faults.triggers:
            what = effect.message if isinstance(effect, events.Send) else effect
            node.faults.reached(type(what).__name__, effect)

    def _spoiled(self, effect: events.Send, metadata: Metadata) -> events.Send:
        message, lost = self._sim_node.faults.metadata(metadata)
        if lost:
            node = self._sim_node
            node.causes.break_session(node, node.state.by_leader[effect.peer])
        return msgspec.structs.replace(effect, message=message)

    def _decide(self, event: events.Event, now: float) -> list[events.Effect]:
        effects = super()._decide(event, now)
        if self._lost is not None and isinstance(event, events.ExpectRoom | events.OpenReceiver):
            self._refusals += effects
            node = self._sim_node
            node.checks.never_opened.add((node.me, event.key))
        return effects

    def _refused(self, event: events.Event, error: SegueError, now: float) -> list[events.Effect]:
        effects = super()._refused(event, error, now)
        if not isinstance(event, events.Publish | events.SendChunk | events.SendMetadata):
            # It speaks of a hand-off that was never opened, perhaps in the name of one that was.
            self._refusals += effects
            if isinstance(event, events.ExpectRoom | events.OpenReceiver):
                node = self._sim_node
                node.checks.never_opened.add((node.me, event.key))
        return effects

    def _hears_again(self, session: Session, message: HandoffMessage) -> None:
        """A destination that a decode with a bug sends twice."""
        if self.plane.sessions.get(session.peer.leader) is session and not session.closing:
            self._sim_node.state.counts["doubled destinations"] += 1
            super().received(session, message)

    def opened(self, session: Session) -> None:
        super().opened(session)
        node, me = self._sim_node, session.peer.leader
        peer = node.state.by_leader[me]
        if me in self._peers and isinstance(peer, KVNode):
            node.checked(node.checks.joined, node, peer)

    def _ready(self, peer: Peer) -> None:
        super()._ready(peer)
        node = self._sim_node
        if len(peer.names) > 1:
            node.state.counts[f"pairs with a choice that took {peer.transport}"] += 1
        other = node.state.by_leader[peer.session.peer.leader]
        if peer.session.peer.leader in self._peers and isinstance(other, KVNode):
            node.checked(node.checks.joined, node, other)

    def received(self, session: Session, message: object) -> None:
        node = self._sim_node
        if not isinstance(message, HandoffMessage):
            super().received(session, message)
            if isinstance(message, PathChosen):
                node.faults.reached(f"<{type(message).__name__}", message)
            return
        room = node.state.open_rooms.get(message.transfer.room)
        for heard in node.hearing.heard(message):
            word, again, after_s = (heard, None, 0.0) if room is None else room.heard(heard)
            super().received(session, word)
            if again is not None:
                node.after(after_s, self._hears_again, session, again)
        if node.faults.triggers:
            node.faults.reached(f"<{type(message).__name__}", message)


class _Unreadable:
    """Memory that cannot be read."""

    @property
    def buffers(self) -> Any:
        raise Injected("injected into a checksum")

    regions = buffers


class SimDigester(Digester):
    """Production's; what is read is looked at, reading may take its time and fail, and a bit may have changed
    in what has landed. A rank hashes what it was asked, and only its own part of the pool."""

    def __init__(
        self, node: KVNode, rank: int, memory: Memory, answer: Callable[..., None], max_waiting: int
    ) -> None:
        rng = node.world.rng(f"digests {node.name}")
        self._rank = rank
        spec = node.specs[rank]
        mine = whole_pages(spec, range(spec.pages))
        if spec.slots:
            mine = replace(mine, state=(spec.slots_at, spec.nbytes - spec.slots_at))
        ranges = mine.ranges()
        self._starts, self._ends = ranges[:, 0].tolist(), ranges[:, 1].tolist()
        if "full queues" in node.state.scenario.features:
            max_waiting = rng.choice((1, 4, max_waiting))
        worker = partial(SimWorker, node, self._takes_s)
        super().__init__(memory, answer, max_waiting, inline_bytes=rng.choice((0, 0, 256)), worker=worker)
        self._node = node
        self._fails = False

    def submit(self, effect: events.ComputeChecksum) -> None:
        """As production."""
        node = self._node
        if node.faults.page_flips and node.spec.role is Role.DECODE:
            node.faults.page_flips -= 1
            node.checks.flips.page(node, effect, node.rng)
        super().submit(effect)

    def hash(self, effect: events.ComputeChecksum) -> events.ChecksumReady:
        """As production, at one moment."""
        node, memory = self._node, self._memory
        size = node.engine.spec.page_tokens
        pages = {
            page
            for slot, tokens in effect.content.runs
            for page in range(slot // size, -(-(slot + tokens) // size))
        }
        if effect.content.state is not None:
            pages |= node.pages_at(*effect.content.state)
        node.checked(self._is_mine, effect)
        node.checked(node.checks.ranks.hashing, node, effect.transfer, pages)
        if self._fails:
            self._memory, self._fails = _Unreadable(), False  # type: ignore[assignment]
        try:
            return super().hash(effect)
        finally:
            self._memory = memory

    def _is_mine(self, effect: events.ComputeChecksum) -> None:
        """5: no rank vouches for the bytes of another, nor hashes in a way that it has not offered."""
        if effect.kind not in self._node.checksums:
            raise Violation("5", f"{self._node.name} is asked for {effect.kind}, which it does not compute")
        content = effect.content
        heads = [
            (plane.at(slot + token, content.page_tokens), plane.head_bytes)
            for plane in content.planes
            for slot, tokens in content.runs
            for token in (0, tokens - 1)
        ]
        if content.state is not None:
            heads.append(content.state)
        if effect.rank != self._rank or not all(self._holds(at, nbytes) for at, nbytes in heads):
            rank = f"rank {self._rank} of {self._node.name}"
            raise Violation("5", f"{rank} hashes for rank {effect.rank}, or what is not its own")

    def _holds(self, at: int, nbytes: int) -> bool:
        around = bisect_right(self._starts, at) - 1
        return around >= 0 and at + nbytes <= self._ends[around]

    def _takes_s(self) -> float:
        """How long the next one takes, and whether it fails."""
        node = self._node
        took_s = node.world_timing.slice_s * 2 * node.rng.random()
        slow_s = node.faults.digests.pop(0) if node.faults.digests else 0.0
        self._fails = slow_s is None
        if slow_s:
            node.no_answer_until = max(node.no_answer_until, node.world.now + took_s + slow_s)
        return took_s + (slow_s or 0.0)


class KVNode(LeaderNode, KVView):
    """A prefill or a decode instance."""

    scheduler: PrefillScheduler | DecodeScheduler

    def __init__(self, parts: NodeParts, spec: NodeSpec, restart: int) -> None:
        #: from a rank to one of a decode node, over a transport
        self.paths: dict[tuple[int, RankId, str], DataPath] = {}
        self.hearing = Hearing(self)
        #: before which its ranks owe no answer: a fault made a checksum slow, or a worker stand still
        self.no_answer_until = 0.0
        self.exposed: dict[int, Exposed] = {}
        #: by rank and name
        self.transports: dict[tuple[int, str], SimTransport] = {}
        self.workers: list[SimWorkerRank] = []
        #: one of its ranks is lost, and with it the replica
        self.lost_rank = False
        #: ranks whose worker has ended
        self.ended_ranks: set[int] = set()
        self._pool_at = 0
        self.rooms = RoomEngine(self)
        super().__init__(parts, spec, restart)

    def _make_scheduler(self) -> Scheduler:
        config = KVConfig(
            **vars(self._session_config()),
            model=self.spec.model,
            spec=self.engine.spec,
            transports=self.state.transports,
            dp=self.spec.dp,
            kv_checksum=self.spec.kv_checksum,
        )
        runtime = replace(
            self.runtime,
            transports=SimKinds(self._make_transport),
            connecting=lambda name: ThreadPerCall(name, self.spawn),
            exchange=partial(CheckedExchange, self),
        )
        self.manager = SimManager(self, config, runtime)
        make = PrefillScheduler if self.spec.role is Role.PREFILL else DecodeScheduler
        made = make(self.engine, self.pool, self._scheduling(), self.manager)
        limit, timing = self.spec.local_tokens, self.world_timing
        if isinstance(made, DecodeScheduler) and limit is not None:
            pauses = [(tokens, tokens * timing.token_s) for tokens in (4, 16, 64)]
            made.local = LocalPrompts(limit) if limit >= 0 else LocalPrompts(pauses=pauses)
        return made

    def _make_transport(self, name: str, on_event: EventSink, options: TransportOptions) -> SimTransport:
        self._pool_at = int(np.frombuffer(self.engine.memory, np.uint8).ctypes.data)
        self.transports[options.me.rank, name] = made = MADE[name](self, on_event, options)
        return made

    @property
    def checksums(self) -> list[str]:
        """The kinds that its ranks compute: some instances have only that of devices."""
        words = self.state.scenario.words and self.world.rng(f"words {self.spec.name}").random() < 0.6
        return [kind.value for kind in ChecksumKind if not words or kind is ChecksumKind.WORDS]

    @property
    def specs(self) -> list[PoolSpec]:
        """The part of the engine's pool that each rank has."""
        return self.engine.ranks

    def _listen(self) -> None:
        self.plane = self.manager.plane
        self.manager.start()

    def make_ranks(self, config: KVConfig, runtime: LeaderRuntime) -> list[Rank]:
        """Its ranks, here or as workers."""
        found: list[Rank] = []
        for index, spec in enumerate(self.specs):
            memory = Memory([host_region(self.engine.memory)])
            mine = replace(runtime, digester=partial(SimDigester, self, index))
            rank = local_rank(replace(config, spec=spec), memory, mine, index)
            rank.checksums = self.checksums
            if self.state.scenario.workers:
                self.workers.append(SimWorkerRank(self, index, rank))
            found.append(self.workers[index] if self.workers else rank)
        return found

    def signal(self, number: int) -> None:
        """See `LeaderNode.signal`."""
        for rank in self.workers:
            rank.worker.signal(number)

    def told(self, change: events.Change) -> None:
        """Pass a manager's change of a half to the engine that owns it."""
        if change.key in self.rooms.halves:
            self.after(self.world_timing.hop_s, self.rooms.heard, change)
        else:
            self.changed(change)

    @property
    def borrowed(self) -> list[int]:
        """Pages that a fault has taken, and those of rooms."""
        return self.squeezed + self.rooms.pages

    @property
    def room_keys(self) -> list[RoomKey]:
        """See `KVView.room_keys`."""
        return list(self.rooms.halves)

    def owned(self, key: RoomKey) -> set[int]:
        """The pages that the owner of this half holds for it."""
        scheduler: Any = self.scheduler
        entry, half = scheduler.table.get(key), self.rooms.halves.get(key)
        found: set[int] = set() if half is None else set(half.pages)
        return found if entry is None else found | self.engine.touched(entry.state.pages, entry.state.slot)

    def rank_diverged(self, rank: int, error: SegueError) -> None:
        """As `RanksForward`: nothing can be computed any more."""
        self.manager.lost(rank, error)

    def rank_lost(self, error: SegueError) -> None:
        """As `Instance._lost`: it cannot compute any more, so every request ends and the instance leaves."""
        if self.lost_rank:
            return
        self.lost_rank = True
        for worker in self.workers[1:]:
            self.spawn("a worker is killed", worker.leave)
        self.put(Abandon(error.info))
        self.drain()

    def close(self) -> None:
        """As an instance that leaves, on a thread that may wait."""
        self.manager.close()
        self.manager.close()
        for rank in self.workers:
            rank.worker.close()

    @property
    def held(self) -> bool:
        """As `StatusReporter.held`."""
        return bool(busy(self.manager.sizes()) or self.rooms.pages)

    @property
    def handles(self) -> dict[RoomKey, KVSender | KVReceiver]:
        """The handles that the role still holds."""
        return self.manager.handles

    def checked(self, check: Callable[..., None], *args: Any) -> None:
        """Look at something; what is wrong ends the run, whatever production makes of the exception."""
        try:
            check(*args)
        except Violation as violation:
            self.world.fail(violation)
            raise

    # ---- what lands here ---------------------------------------------------------------------------

    def flipped(
        self, epoch: int, data: list[tuple[int, bytes]], rng: random.Random
    ) -> list[tuple[int, bytes]]:
        """`data` as it lands here with one bit changed."""
        return self.checks.flips.wire(self, epoch, data, rng)

    def data_path(self, mine: int, reader: KVView, rank: int, name: str) -> DataPath:
        """The path from our rank `mine` to one of a decode node over the transport `name`."""
        key = (mine, RankId(reader.me, rank), name)
        path = self.paths.get(key)
        if path is None:
            path = self.paths[key] = self.transports[mine, name].make_path(self, mine, reader, rank)
        return path

    def paths_to(self, reader: LeaderId) -> list[DataPath]:
        """All of them; the one in use, if there is one, first."""
        peer = self.peers.get(reader)
        found = [path for (_, to, _), path in self.paths.items() if to.leader == reader]
        return sorted(found, key=lambda path: peer is None or path.name != peer.transport)

    def offset_of(self, address: int, nbytes: int) -> int | None:
        """The offset of an address in our pool; None unless all of these bytes are in it."""
        offset = address - self._pool_at
        return offset if 0 <= offset <= len(self.engine.memory) - nbytes else None

    def check_source(self, peer: LeaderId, epoch: int, ranges: list[tuple[int, int]]) -> None:
        """Invariant 3: what is being read still belongs to its hand-off."""
        pages = {page for at, size in ranges for page in self.pages_at(at, size)}
        self.checks.ranks.reading(self, peer, epoch, pages)
