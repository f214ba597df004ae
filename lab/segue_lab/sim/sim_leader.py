"""A simulated instance as its leader sees it: production's leader, role and sessions of frontends.

A node has two threads, as in production: the leader (role and engine) and the I/O thread (sessions,
hand-offs). Messages from one to the other arrive a little later, in order; everything else interleaves. Only
the forward is not production's: it takes virtual time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from segue.engine.engine_api import HostPages, OnStored, SequenceResult, SequenceStep, StepHandle
from segue.engine.pages import PagePool
from segue.engine.ranks.rank_orders import due
from segue.engine.request import Output
from segue.kv.clock import Clock
from segue.kv.config import LeaderRuntime, SessionConfig
from segue.kv.control_plane import ControlPlane
from segue.kv.errors import RankDivergence, SegueError
from segue.kv.ids import Incarnation, Role
from segue.kv.limits import Limits
from segue.kv.protocol.events import Change
from segue.kv.session.api import Session
from segue.server.instance.frontend_sessions import FrontendSessions
from segue.server.instance.kv_settings import LeaderMessage
from segue.server.instance.leader import Drain, Hold, Inspect, Item, Leader, NextRole
from segue.server.messages.control import Load
from segue.server.registry.registry_records import InstanceRecord, ReplicaRecord
from segue.server.schedulers.admission import SchedulerConfig
from segue.server.schedulers.scheduler import Scheduler
from segue.server.schedulers.unified import UnifiedScheduler
from segue_lab.sim.causes import Causes
from segue_lab.sim.faults import NodeFaults
from segue_lab.sim.invariants import Checks
from segue_lab.sim.loop import SimLoop
from segue_lab.sim.node_spec import CONTEXT_TOKENS, VOCAB, NodeSpec
from segue_lab.sim.node_views import NodeView
from segue_lab.sim.runtime import SimIo, SimSessionNode
from segue_lab.sim.sim_engine import Copied, LineageEngine, WrongKV, lineage_spec
from segue_lab.sim.sim_state import SimState
from segue_lab.sim.sim_threads import SimThread
from segue_lab.sim.timing import Timing
from segue_lab.sim.world import SkewedClock, Violation

#: How often an engine says that the KV is there before its forward ends; it need not.
TELLS = 0.8
#: How often an operator looks whether a leader has drained, and when it gives up.
LOOK_S, LOOKS = 0.02, 150


@dataclass(slots=True)
class SimForward:
    """A forward under way."""

    steps: Sequence[SequenceStep]
    on_stored: OnStored
    on_ready: Callable[[], None]
    ready: bool
    computed: list[SequenceStep] = field(default_factory=list)
    refused: list[SequenceResult] = field(default_factory=list)
    raised: Exception | None = None
    #: the rank that has computed something else, which its answer tells
    diverged: int | None = None


class CheckedEngine(LineageEngine):
    """The engine, its forward drawn out and spoiled by faults; what only a bug can cause ends the run,
    whoever would catch it."""

    node: LeaderNode

    def launch(
        self, steps: Sequence[SequenceStep], on_stored: OnStored, on_ready: Callable[[], None]
    ) -> StepHandle:
        """A forward that takes virtual time. Whether the leader's thread or a device computes it, what is
        raised in it is raised by `collect`."""
        node, timing = self.node, self.node.world_timing
        tokens = sum(len(step.tokens) for step in steps)
        pace = node.spec.pace * (0.5 + node.rng.random())
        forward_s = pace * (timing.step_s + tokens * timing.token_s)
        tail_s = forward_s * node.rng.random()
        forward = SimForward(steps, on_stored, on_ready, ready=not node.device)
        node.after(forward_s - tail_s, self._store_forward, forward)
        if node.faults.slow_step_s and not node.device:
            # The leader stands still, though not its I/O thread.
            forward_s, node.faults.slow_step_s, node.was_paused = node.faults.slow_step_s, 0.0, True
            node.after(forward_s - 1e-9, node.stood_still)
        node.after(forward_s, self._end_forward, forward)
        return forward

    def _store_forward(self, forward: SimForward) -> None:
        """A forward until its KV is there."""
        try:
            forward.computed, forward.refused = self.node.faults.forward_begins(forward.steps)
            self._store_checked(forward.computed)
            forward.diverged = self._diverge(forward.computed)
            seq_ids = [step.seq_id for step in forward.computed]
            for layers in range(1, self.spec.shape.layers if self.node.spec.send_layers else 0):
                if self.node.rng.random() < TELLS:
                    forward.on_stored(seq_ids, layers)
                    self._signal(forward, layers)
            if self.node.rng.random() < TELLS:
                forward.on_stored(seq_ids)
                self._signal(forward)
        except Exception as exc:
            forward.raised = exc
        if self.node.device:
            self.node.wake()

    def _signal(self, forward: SimForward, layers: int | None = None) -> None:
        """As the forward of a rank in another process (`serve_rank`)."""
        for step in forward.computed:
            for number in due(step, layers):
                self.node.signal(number)

    def _end_forward(self, forward: SimForward) -> None:
        if self.node.device:
            forward.ready = True
            forward.on_ready()
            self.node.wake()
        else:
            self.node.forward_ended()

    def collect(self, handle: StepHandle) -> list[SequenceResult]:
        """The rest of the forward."""
        assert isinstance(handle, SimForward)
        if handle.raised is not None:
            raise handle.raised
        if handle.diverged is not None:
            error = RankDivergence(f"injected: rank {handle.diverged} has carried out other orders")
            self.node.rank_diverged(handle.diverged, error)
            raise error
        self._signal(handle)
        return self.node.faults.forward_ends(handle.refused + self.draw(handle.computed))

    def _diverge(self, steps: Sequence[SequenceStep]) -> int | None:
        """Now and then a rank has stored other KV than it was ordered to; which one."""
        faults, self.node.faults.diverges = self.node.faults.diverges, None
        if faults is None or len(self.ranks) == 1:
            return None
        rank = faults % len(self.ranks)
        self.node.state.counts["ranks that diverged"] += 1
        for step in steps:
            for position in range(step.span.start, step.span.end):
                self.spoil(rank, step.pages, position)
        return rank

    def copy_out(self, pages: Sequence[int], slot: int | None = None) -> HostPages:
        """As production's; one bit of the copy may change where it lies."""
        host, faults, rng = super().copy_out(pages, slot), self.node.faults, self.node.rng
        if not faults.copy_flips or not isinstance(host, Copied):
            return host
        faults.copy_flips -= 1
        self.node.state.counts["flipped copies"] += 1
        copies = [bytearray(page) for page in host.pages]
        wrong = rng.choice(copies)
        wrong[rng.randrange(len(wrong))] ^= 1 << rng.randrange(8)
        return replace(host, pages=tuple(map(bytes, copies)))

    def _store_checked(self, steps: Sequence[SequenceStep]) -> None:
        node = self.node
        try:
            self.store(steps)
        except WrongKV as exc:
            jobs = [node.scheduler.admission.by_seq.get(s.seq_id) for s in steps]
            rooms = tuple(j.ticket.room for j in jobs if j is not None)
            node.world.fail(Violation("5", f"{node.name}: {exc}", rooms))
            raise


class Fronts(FrontendSessions):
    """Production's sessions of frontends, seen by the faults of a node."""

    def __init__(self, node: LeaderNode) -> None:
        super().__init__()
        self._node = node

    def send(self, origin: Incarnation, outputs: list[Output]) -> None:
        """As production; a fault may wait for it."""
        super().send(origin, outputs)
        if self._node.faults.triggers:
            self._node.faults.reached("Outputs", outputs)

    def closed(self, session: Session, error: SegueError) -> None:
        """As production; a frontend that was given up because it was stopped or cut off is counted."""
        node, state = self._node, self._node.state
        front = state.by_leader[session.peer.leader]
        if "silent" in error.info.text and (front.paused or state.network.blocked(front, node)):
            state.counts["silent frontends"] += 1
        super().closed(session, error)


class CheckedLeader(Leader):
    """Production's leader; what becomes of an item on which the role broke is looked at."""

    node: LeaderNode

    def _handle(self, item: Item) -> None:
        super()._handle(item)
        node = self.node
        if node.faults.broke:
            node.faults.broke = False
            try:
                node.checks.requests.broken(node, item)
            except Violation as violation:
                node.world.fail(violation)


@dataclass(frozen=True, slots=True)
class NodeParts:
    """The parts of a node, and the callbacks for its news: that it takes nothing new, and that it has drained
    and leaves."""

    state: SimState
    causes: Causes
    checks: Checks
    draining: Callable[[NodeView], None]
    leaves: Callable[[NodeView], None]


class LeaderNode(NodeView):
    """One incarnation of a replica."""

    def __init__(self, parts: NodeParts, spec: NodeSpec, restart: int) -> None:
        state = parts.state
        super().__init__(state.world, f"{spec.name}#{restart}" if restart else spec.name)
        self.parts = parts
        self.state = state
        self.causes = parts.causes
        self.checks = parts.checks
        self.spec = spec
        self.rng: random.Random = state.world.rng(f"node {self.name}")
        self.me = state.identity(spec, self.rng)
        self.instance_restart = state.instance_restarts[spec.instance]
        self.world_timing: Timing = state.timing
        self.skewed = SkewedClock(state.world, spec.clock_offset_s, spec.clock_rate)
        self.clock: Clock = self.skewed
        self.limits: Limits = state.limits(spec)
        splits = state.scenario.splits
        whole = lineage_spec(
            spec.pages,
            spec.page_tokens,
            spec.layers * splits.layers,
            splits.heads,
            latent=splits.latent,
            page_major=state.world.rng(f"layout {spec.name}").random() < 0.4,
            slots=state.world.rng(f"slots {spec.name}").choice((1, 3, 16)) if state.scenario.state else 0,
        )
        self.engine = CheckedEngine(
            whole,
            ranks=splits.of(spec.role).ranks(whole),
            vocab_size=VOCAB,
            context_tokens=CONTEXT_TOKENS,
            model=spec.model,
            eos_token_ids=state.eos,
        )
        self.engine.node = self
        self.pool = PagePool(spec.pages, spec.page_tokens)
        self.faults = NodeFaults(self)
        self.host, self.port = state.addresses.of(spec.name)
        self.loop = SimLoop(self, self.skewed, state.network, self.host, state.timing.hop_s)  # type: ignore[abstract]
        self.io = SimIo(self.loop)
        self.runtime = LeaderRuntime(
            io=lambda _on_error: self.io,
            node=partial(SimSessionNode, loop=self.loop),
            uniform=state.world.rng(f"dialer {self.name}").uniform,
        )
        self.fronts = Fronts(self)
        self.squeezed: list[int] = []
        self.draining = self.drained = self.steered = False
        #: whether another thread or a device computes, as in production, or the leader's thread
        self.device = state.world.rng(f"device {spec.name}").random() < 0.5
        self.draining_since: float | None = None
        self._waking = False
        self._wake_at: float | None = None
        self.scheduler: Scheduler = self._make_scheduler()
        self.leader = CheckedLeader(
            self.scheduler,
            self.engine,
            limits=self.limits,
            clock=self.clock,
            send=self._send,
            report=self._report_load,
        )
        self.leader.node = self
        self.fronts.deliver = self.put
        self._listen()

    def signal(self, number: int) -> None:
        """This moment has come at ranks in processes of their own."""

    def _make_scheduler(self) -> Scheduler:
        return UnifiedScheduler(self.engine, self.pool, self._scheduling())

    def _scheduling(self) -> SchedulerConfig:
        return SchedulerConfig(
            me=self.me,
            name=f"{self.spec.role.value} {self.me}",
            limits=self.limits,
            chunk_tokens=self.spec.chunk_tokens,
            send_layers=int(self.spec.send_layers),
            secret=self.state.secret or b"",
            dp=self.spec.dp,
        )

    def _listen(self) -> None:
        self.plane = ControlPlane(self._session_config(), {Role.FRONTEND: self.fronts}, self.runtime)
        self.plane.start()

    def _session_config(self) -> SessionConfig:
        return SessionConfig(
            role=self.spec.role,
            me=self.me,
            host=self.host,
            port=self.port,
            secret=self.state.secret,
            limits=self.limits,
            messages=LeaderMessage,
        )

    def record(self) -> InstanceRecord:
        """The record for the registry."""
        return InstanceRecord(
            incarnation=self.me.incarnation,
            role=self.spec.role,
            model=self.spec.model,
            served_model="m",
            context_tokens=CONTEXT_TOKENS,
            dp_size=self.spec.dp_size,
            load_balance=self.spec.load_balance,
            replicas=[ReplicaRecord(dp_rank=self.me.dp_rank, host=self.host, port=self.port)],
        )

    # ---- the leader's thread ---------------------------------------------------------------------

    def _send(self, origin: Incarnation, outputs: list[Output]) -> None:
        self.io.post(self.fronts.send, origin, outputs)

    def _report_load(self, load: Load) -> None:
        self.io.post(self.fronts.report, load)

    def put(self, item: Item) -> None:
        """Into the leader's inbox."""
        self.leader.inbox.put(item)
        self.wake()

    def changed(self, change: Change) -> None:
        """A manager's change of a hand-off."""
        self.leader.changed(change)
        self.wake()

    @property
    def busy(self) -> bool:
        """A forward runs."""
        return self.leader.forward is not None

    def wake(self) -> None:
        """A leader that waits looks at its inbox soon; one that computes after its forward."""
        if not self._waking and not self.drained and (self.device or not self.busy):
            self._waking = True
            self.after(self.world_timing.hop_s * self.rng.random(), self._woken)

    def _woken(self) -> None:
        self._waking = False
        if self.device or not self.busy:
            self._turn()

    def _timer(self, at: float) -> None:
        if self._wake_at == at:
            self._wake_at = None
        self.wake()

    def _turn(self) -> None:
        """As `Leader.run`. A forward that the leader's thread computes is drawn out."""
        batch: Any = getattr(self.scheduler, "batch", None)
        retracted = batch.retractions if batch is not None else 0
        more = False
        try:
            if self.device:
                more = self.leader.turn()
            elif steps := self.leader.decide():
                self.leader.launch(steps)
        except Exception as exc:
            raise Violation("14", f"the loop of {self.name} would have ended: {exc!r}") from exc
        if batch is not None and batch.retractions > retracted:
            self.checks.retracted(self, batch.retractions - retracted)
        if self.busy and not self.device:
            return
        if not more and not self.busy:
            self.checks.requests.nothing_to_do(self)
        self._turned(more)

    def forward_ended(self) -> None:
        """The leader's thread has computed its forward."""
        self.leader.collect()
        self._turned(more=True)

    def _turned(self, more: bool) -> None:
        self.checks.after_turn(self)
        if self._leave_if_drained():
            return
        if more:
            self._turn()
        else:
            self._sleep()

    def _sleep(self) -> None:
        patience_s = self.leader.patience_s()
        if patience_s is None:
            return
        at = self.world.now + patience_s / self.skewed.rate + 1e-6
        if self._wake_at is None or at < self._wake_at - 1e-9:
            self._wake_at = at
            self.world.at(at, self, self._timer, at)

    # ---- drain -----------------------------------------------------------------------------------

    def drain(self) -> None:
        """SIGTERM."""
        self.causes.record("drained", self)
        self.draining = True
        self.put(Drain())
        if self.draining_since is None:
            self.draining_since = self.world.now
        self.parts.draining(self)

    def switch(self, *, resumes: bool, late_s: float) -> None:
        """An operator drains it, and has it turn once it says that it is drained; with `resumes` another one
        has it take requests again then, and it is told to turn `late_s` after that."""
        if not self.draining and not self.steered:
            self.steered = True
            self.causes.record("drained", self)
            self.put(Hold(True))
            self._look(LOOKS, resumes, late_s)

    def _look(self, times: int, resumes: bool, late_s: float) -> None:
        def seen(load: Load) -> None:
            if not load.drained or self.held:
                if times:
                    self.after(LOOK_S, self._look, times - 1, resumes, late_s)
                else:  # the operator has given up
                    self._stays()
            elif resumes:
                self.put(Hold(False))
                self.after(late_s, self.put, NextRole(self._stays))
            else:
                self.put(NextRole(self._stays))

        self.put(Inspect(lambda scheduler: self.io.post(seen, scheduler.load())))

    def _stays(self) -> None:
        self.steered = False
        self.put(Hold(False))

    @property
    def held(self) -> bool:
        """A hand-off still holds something below the role."""
        return False

    def _leave_if_drained(self) -> bool:
        if not self.drained and self.leader.drained():
            if not self.draining:
                self.state.counts["switches"] += 1
                self.checks.turned(self)
            self.drained = True
            self.parts.leaves(self)
        return self.drained

    def rank_diverged(self, rank: int, error: SegueError) -> None:
        """A forward has shown that one of its ranks did something else."""
        raise Violation("scenario", f"{self.name} has one rank, not {rank}: {error}")

    def close(self) -> None:
        """As an instance that leaves, on a thread that may wait."""
        self.plane.close()

    def spawn(self, _name: str, run: Callable[[], None]) -> None:
        """A thread of this process that may wait; it begins a little later."""
        self.after(self.world_timing.latency_s * self.rng.random(), SimThread(self, run).run)

    @property
    def pending(self) -> int:
        """Connections here that have not proven themselves."""
        return self.plane.node.pending

    @property
    def sessions(self) -> list[Session]:
        """Every open session."""
        return list(self.plane.sessions.values())

    # ---- start and end ------------------------------------------------------------------------------------

    def jump(self, seconds: float) -> None:
        """The machine stood still, and its clock did not."""
        self.jumped_at = self.world.now
        self.skewed.jump(seconds)
        self.loop.jumped()
        self.wake()

    def stood_still(self) -> None:
        """The process continues after a pause."""
        self.resumed_at = self.world.now

    def squeeze(self, pages: int) -> None:
        """Somebody else takes free pages: allocations fail."""
        self.squeezed += self.pool.allocate(min(pages, self.pool.free))

    def unsqueeze(self) -> None:
        """And gives them back."""
        self.pool.release(self.squeezed)
        self.squeezed = []
        self.wake()
