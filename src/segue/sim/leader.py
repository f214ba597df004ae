"""A simulated instance as its leader sees it: the loop of `serve.leader` around a production role."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from segue.bootstrap.records import InstanceRecord, ReplicaRecord
from segue.core.clock import Clock
from segue.core.control import Cancel, Outputs, Submit
from segue.core.errors import ErrorInfo, Internal, PeerLost, SegueError
from segue.core.limits import Limits
from segue.core.request import Output
from segue.core.types import Incarnation, Integrity, Role
from segue.engine.api import SequenceStep
from segue.engine.pages import PagePool
from segue.roles.base import Role as RoleLogic
from segue.roles.unified import UnifiedRole
from segue.sim.engine import LineageEngine, WrongKV, lineage_spec
from segue.sim.faults import Injected, NodeFaults
from segue.sim.network import End, Timing
from segue.sim.world import Process, SkewedClock, Violation

if TYPE_CHECKING:
    from segue.sim.deployment import Deployment


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpec:
    """What one instance is; survives its restarts."""

    name: str
    role: Role
    pages: int
    page_tokens: int
    chunk_tokens: int
    max_batch: int
    model: str = "lineage-1"
    layers: int = 2
    integrity: Integrity = Integrity.FULL
    clock_offset_s: float = 0.0
    clock_rate: float = 1.0
    pace: float = 1.0


VOCAB = 1000


class LeaderNode(Process):
    """One replica in one life: the leader's loop around a role."""

    def __init__(self, deployment: Deployment, spec: NodeSpec, life: int) -> None:
        super().__init__(deployment.world, f"{spec.name}#{life}" if life else spec.name)
        self.deployment = deployment
        self.spec = spec
        self.rng: random.Random = deployment.world.rng(f"node {self.name}")
        self.me = Incarnation(f"{self.rng.getrandbits(128):032x}")
        self.peer_name = f"{self.me}/0"
        self.world_timing: Timing = deployment.timing
        self.skewed = SkewedClock(deployment.world, spec.clock_offset_s, spec.clock_rate)
        self.clock: Clock = self.skewed
        self.limits: Limits = deployment.limits(spec)
        self.engine = LineageEngine(
            lineage_spec(spec.pages, spec.page_tokens, spec.layers), vocab_size=VOCAB, context_tokens=512
        )
        self.pool = PagePool(spec.pages, spec.page_tokens)
        self.faults = NodeFaults(self)
        self.inbox: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self.fronts: dict[Incarnation, End] = {}
        self._sent_at = 0.0
        self.squeezed: list[int] = []
        self.busy = False
        self.steps = 0
        self.drain_until: float | None = None
        self.drained = False
        self._waking = False
        self._wake_at: float | None = None
        self.role: RoleLogic = self._make_role()

    def _make_role(self) -> RoleLogic:
        return UnifiedRole(self.engine, self.pool, **self._common())

    def _common(self) -> dict[str, Any]:
        return {
            "me": self.me,
            "name": f"{self.spec.role.value} {self.me[:8]}",
            "limits": self.limits,
            "chunk_tokens": self.spec.chunk_tokens,
            "secret": self.deployment.secret,
        }

    def record(self) -> InstanceRecord:
        """What the registry is told."""
        return InstanceRecord(
            incarnation=self.me,
            role=self.spec.role,
            model=self.spec.model,
            served_model="m",
            context_tokens=512,
            replicas=[ReplicaRecord(dp_rank=0, host=self.spec.name, port=1)],
        )

    def instances_changed(self, found: dict[Incarnation, InstanceRecord]) -> None:
        """The registry's topology; only some follow it."""

    # ---- the loop (`serve.leader.Leader`) -------------------------------------------------------

    def put(self, call: Callable[..., None], *args: Any) -> None:
        """The I/O thread gives the leader something to do."""
        self.inbox.append((call, args))
        self.wake()

    def wake(self) -> None:
        """An idle leader looks at its inbox soon; a busy one after its step."""
        if not self.busy and not self._waking:
            self._waking = True
            self.after(self.world_timing.hop_s * self.rng.random(), self._woken)

    def _woken(self) -> None:
        self._waking = False
        if not self.busy:
            self._turn()

    def _timer(self) -> None:
        self._wake_at = None
        self.wake()

    def _turn(self) -> None:
        while self.inbox:
            call, args = self.inbox.popleft()
            self._bounded(call, *args)
        now = self.clock.now()
        steps = self._bounded_plan(now)
        if steps:
            self.busy = True
            self._flush()
            tokens = sum(len(s.tokens) for s in steps)
            timing = self.world_timing
            pace = self.spec.pace * (0.5 + self.rng.random())
            self.after(pace * (timing.step_s + tokens * timing.token_s), self._finish, steps)
            return
        self._flush()
        self.deployment.checks.after_turn(self)
        if self._leave_if_drained():
            return
        self._sleep()

    def _bounded_plan(self, now: float) -> Sequence[SequenceStep]:
        try:
            self.role.advance(now)
            return self.role.plan(now)
        except Exception as exc:
            raise Violation("14", f"the loop of {self.name} would have ended: {exc!r}") from exc

    def _bounded(self, call: Callable[..., None], *args: Any) -> None:
        try:
            call(*args)
        except Injected:
            pass
        except (Violation, WrongKV):
            raise
        except Exception as exc:
            raise Violation("handler", f"{self.name}: {getattr(call, '__name__', call)}: {exc!r}") from exc

    def _finish(self, steps: Sequence[SequenceStep]) -> None:
        self.busy = False
        self.steps += 1
        now = self.clock.now()
        try:
            results = self.faults.spoil(steps, self.engine.step)
            self.role.complete(results, now)
        except Injected as exc:
            self.role.step_failed(steps, Internal(f"the step failed: {exc!r}").info, now)
        except WrongKV as exc:
            jobs = [self.role.by_seq.get(s.seq_id) for s in steps]  # type: ignore[attr-defined]
            rooms = tuple(j.ticket.room for j in jobs if j is not None)
            raise Violation("5", f"{self.name}: {exc}", rooms) from exc
        except Exception as exc:
            raise Violation("handler", f"{self.name}: a step failed: {exc!r}") from exc
        self._flush()
        self.deployment.checks.after_turn(self)
        if not self._leave_if_drained():
            self._turn()

    def _flush(self) -> None:
        outbox = self.role.outbox
        if not outbox:
            return
        self.role.outbox = []
        by_front: dict[Incarnation, list[Output]] = {}
        for origin, output in outbox:
            by_front.setdefault(origin, []).append(output)
        world = self.world
        at = world.now + self.world_timing.hop_s * self.rng.random()
        self._sent_at = at = max(at, self._sent_at + 1e-9)
        world.at(at, self, self._send_outputs, by_front)

    def _send_outputs(self, by_front: dict[Incarnation, list[Output]]) -> None:
        for origin, outputs in by_front.items():
            end = self.fronts.get(origin)
            if end is not None:
                end.send(Outputs(outputs))
        if self.faults.triggers:
            self.faults.reached("Outputs", by_front)

    def _sleep(self) -> None:
        deadlines = [d for d in (self.role.next_deadline(), self.drain_until) if d is not None]
        if not deadlines:
            return
        at = self.world.now + self.skewed.delay_until(min(deadlines)) + 1e-6
        if self._wake_at is None or at < self._wake_at - 1e-9:
            self._wake_at = at
            self.world.at(at, self, self._timer)

    # ---- drain ---------------------------------------------------------------------------------

    def drain(self) -> None:
        """SIGTERM."""
        self.put(self._drain)
        self.deployment.registry_call("set_draining", self.me, True)

    def _drain(self) -> None:
        self.role.drain()
        if self.drain_until is None:
            self.drain_until = self.clock.now() + self.limits.drain_s

    def _leave_if_drained(self) -> bool:
        if self.drain_until is None:
            return False
        if not self.role.idle and self.clock.now() < self.drain_until:
            return False
        self.drained = True
        self.deployment.leave(self)
        return True

    # ---- frontends (`serve.control.FrontendSessions`) -------------------------------------------

    def session_opened(self, end: End) -> None:
        """A process has connected to us."""
        self.front_opened(end)

    def front_opened(self, end: End) -> None:
        """A frontend."""
        peer: Any = end.other.owner
        end.data = peer.me
        old = self.fronts.get(peer.me)
        if old is not None:
            old.shut(PeerLost("gave this session up and opened another"))
        self.fronts[peer.me] = end

    def session_received(self, end: End, message: Any) -> None:
        """A control message of a frontend."""
        self.put(self._control, end.data, message)

    def _control(self, origin: Incarnation, message: Any) -> None:
        now = self.clock.now()
        if isinstance(message, Submit):
            self.role.submit(origin, message, now)
        elif isinstance(message, Cancel):
            self.role.cancel(origin, message.request_id, message.reason, now)

    def session_closed(self, end: End, error: SegueError) -> None:
        """A frontend is gone."""
        if self.fronts.get(end.data) is end:
            del self.fronts[end.data]
            self.put(self._front_gone, end.data, error.info)

    def _front_gone(self, origin: Incarnation, error: ErrorInfo) -> None:
        self.role.frontend_gone(origin, error, self.clock.now())

    # ---- life ----------------------------------------------------------------------------------

    def squeeze(self, pages: int) -> None:
        """Somebody else takes free pages: allocations fail."""
        self.squeezed += self.pool.allocate(min(pages, self.pool.free))

    def unsqueeze(self) -> None:
        """And gives them back."""
        self.pool.release(self.squeezed)
        self.squeezed = []
        self.wake()
