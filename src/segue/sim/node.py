"""Simulated instances: the production role, exchange, handles and pool, with the loop of `serve.leader`.

A node has two threads, as in production: the leader (role and engine) and the I/O thread (exchange,
sessions, data paths). What one gives the other arrives a little later, in order; everything else of
the two interleaves.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from segue.bootstrap.records import InstanceRecord, ReplicaRecord
from segue.conn.handles import Change, KVReceiver, KVSender
from segue.conn.peers import join
from segue.core.clock import Clock
from segue.core.control import Cancel, Outputs, Submit
from segue.core.errors import Draining, ErrorInfo, Internal, PeerLost, SegueError, TransferFailed
from segue.core.limits import Limits
from segue.core.request import Output
from segue.core.types import Incarnation, Role, TransferId
from segue.engine.api import SequenceStep
from segue.engine.pages import PagePool
from segue.handoff import api
from segue.handoff.exchange import Exchange
from segue.handoff.machine import IllegalEvent
from segue.handoff.messages import PROTOCOL_VERSION, LeaderInfo
from segue.roles.base import Role as RoleLogic
from segue.roles.decode import DecodeRole
from segue.roles.prefill import PrefillRole
from segue.roles.unified import UnifiedRole
from segue.session.api import PeerInfo
from segue.sim.engine import LineageEngine, WrongKV, lineage_spec
from segue.sim.faults import Injected, NodeFaults
from segue.sim.network import End, Timing
from segue.sim.wire import Path, check_landing
from segue.sim.world import Process, SkewedClock, Violation
from segue.transport.base import Endpoint, Fenced, PeerGone, TransportEvent, WriteFailed, Written

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
    clock_offset_s: float = 0.0
    clock_rate: float = 1.0
    pace: float = 1.0


@dataclass(slots=True)
class Exposed:
    """Pages of one receiver that a peer may write into."""

    transfer: TransferId
    pages: set[int]


VOCAB = 1000
H = TypeVar("H", KVSender, KVReceiver)


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


class KVNode(LeaderNode):
    """A prefill or a decode instance; its second half does what `conn.manager.KVManager` does."""

    def __init__(self, deployment: Deployment, spec: NodeSpec, life: int) -> None:
        self.handles: dict[TransferId, KVSender | KVReceiver] = {}
        self.peers: dict[Incarnation, End] = {}
        self.paths: dict[Incarnation, Path] = {}
        self.exposed: dict[int, Exposed] = {}
        self.grants: set[tuple[Incarnation, int]] = set()
        self.targets: dict[Incarnation, InstanceRecord] = {}
        self._dialling: dict[Incarnation, float] = {}
        super().__init__(deployment, spec, life)
        endpoint = msgspec.msgpack.encode(Endpoint("tcp", self.engine.spec.nbytes, b""))
        self.info = LeaderInfo(
            protocol=PROTOCOL_VERSION,
            model=spec.model,
            dp_rank=0,
            dp_size=1,
            ranks=[self.engine.spec],
            endpoints={"tcp": [endpoint]},
            max_transfers=self.limits.max_transfers,
        )
        self.hello = msgspec.msgpack.encode(self.info)
        self.exchange = Exchange(
            spec.role, self.me, f"{spec.role.value} {self.me[:8]} dp0", self.limits, self.info
        )
        self._io_ready_at = 0.0
        self._tick_at: float | None = None

    def _make_role(self) -> RoleLogic:
        make = PrefillRole if self.spec.role is Role.PREFILL else DecodeRole
        return make(self.engine, self.pool, handoffs=self, **self._common())

    # ---- the handles' owner --------------------------------------------------------------------

    def sender(self, transfer: TransferId) -> KVSender:
        """See `roles.handoffs.Handoffs`."""
        return self._remember(transfer, KVSender(self, transfer))

    def receiver(self, transfer: TransferId) -> KVReceiver:
        """See `roles.handoffs.Handoffs`."""
        return self._remember(transfer, KVReceiver(self, transfer))

    def _remember(self, transfer: TransferId, handle: H) -> H:
        if self.handles.setdefault(transfer, handle) is not handle:
            raise Internal(f"transfer {transfer} exists already", room=transfer.room)
        return handle

    def post(self, *events: api.Event) -> None:
        """From the leader's thread to the I/O thread, in order."""
        world = self.world
        at = world.now + self.world_timing.hop_s * self.rng.random()
        self._io_ready_at = at = max(at, self._io_ready_at + 1e-9)
        world.at(at, self, self._handle_all, events)

    def forget(self, transfer: TransferId) -> None:
        """The engine has dropped its handle."""
        self.handles.pop(transfer, None)

    # ---- the protocol --------------------------------------------------------------------------

    def _handle_all(self, events: Sequence[api.Event]) -> None:
        for event in events:
            self.handle(event)

    def handle(self, event: api.Event) -> None:
        """One event into the exchange, its effects out."""
        self.world.trace.append((self.world.now, self.name, event))
        try:
            effects = self.exchange.handle(event, self.clock.now())
        except IllegalEvent as exc:
            if self.deployment.checks.is_over(self, event):
                return  # a pause outlived even the tombstone: production logs it, nothing happens
            raise Violation("2", f"{self.name}: {exc}", self._rooms(event)) from exc
        except SegueError as error:
            effects = api.refusal(event, error.info)
            self.world.note(self.name, f"refused: {error}")
            for effect in effects:
                self._report(effect)  # type: ignore[arg-type]
            return
        self.deployment.checks.scope(self, event, effects)
        for effect in effects:
            if not self.alive:
                return
            self._carry_out(effect)
        self._arm()

    def _rooms(self, event: Any) -> tuple[int, ...]:
        transfer = getattr(event, "transfer", None)
        return (transfer.room,) if transfer is not None else ()

    def _carry_out(self, effect: api.Effect) -> None:
        self.world.trace.append((self.world.now, self.name, effect))
        self.deployment.checks.effect(self, effect)
        kind = type(effect)
        if kind is api.Send:
            end = self.peers.get(effect.peer)  # type: ignore[union-attr]
            if end is not None:
                end.send(effect.message)  # type: ignore[union-attr]
            if self.faults.triggers:
                self.faults.reached(type(effect.message).__name__, effect)  # type: ignore[union-attr]
            return
        if isinstance(effect, api.PostWrite):
            self._post_write(effect)
        elif isinstance(effect, api.Grant):
            self.grants.add((effect.transfer.prefill, effect.epoch))
        elif isinstance(effect, api.Fence):
            self._fence(effect)
        else:
            self._report(effect)  # type: ignore[arg-type]
        if self.faults.triggers:
            self.faults.reached(kind.__name__, effect)

    def _report(self, change: Change) -> None:
        handle = self.handles.get(change.transfer)
        if handle is not None:
            handle.apply(change)
        self.put(self._changed, change)

    def _changed(self, change: Change) -> None:
        self.role.on_change(change, self.clock.now())

    def _arm(self) -> None:
        deadline = self.exchange.next_deadline()
        if deadline is None:
            return
        at = self.world.now + self.skewed.delay_until(deadline) + 1e-6
        if self._tick_at is None or at < self._tick_at - 1e-9:
            self._tick_at = at
            self.world.at(at, self, self._tick, at)

    def _tick(self, at: float) -> None:
        if self._tick_at is not None and self._tick_at <= at:
            self._tick_at = None
        self.handle(api.Tick())

    # ---- the transport -------------------------------------------------------------------------

    def _post_write(self, effect: api.PostWrite) -> None:
        peer = effect.transfer.decode
        path = self.paths.get(peer)
        if peer not in self.peers or path is None:
            gone = TransferFailed(f"the session to {peer[:8]} has ended", room=effect.transfer.room)
            self.after(0.0, self.handle, api.WriteBroken(effect.transfer, effect.tag, gone.info))
            return
        path.write(effect.epoch, effect.tag, effect.blocks)

    def _fence(self, effect: api.Fence) -> None:
        if self.spec.role is Role.PREFILL:
            path = self.paths.get(effect.transfer.decode)
            if path is None:
                self._soon(effect.transfer.decode, Fenced("", effect.epoch, True))
            else:
                path.fence(effect.epoch)
            return
        peer = effect.transfer.prefill
        self.grants.discard((peer, effect.epoch))
        self._soon(peer, Fenced("", effect.epoch, not self.deployment.one_sided))

    def _soon(self, peer: Incarnation, event: TransportEvent) -> None:
        self.after(self.world_timing.hop_s * self.rng.random(), self.transport_event, peer, event)

    def transport_event(self, peer: Incarnation, event: TransportEvent) -> None:
        """As `KVManager._transport_event`."""
        if isinstance(event, PeerGone):
            self.handle(api.PeerDown(peer, event.error.info, dead=event.proven))
            end = self.peers.get(peer)
            if end is not None:
                end.close(event.error)
            return
        transfer = self.exchange.transfer_of(peer, event.epoch)
        if transfer is None:
            return
        if isinstance(event, Written):
            self.handle(api.WriteLanded(transfer, event.tag, event.seconds))
        elif isinstance(event, WriteFailed):
            self.handle(api.WriteBroken(transfer, event.tag, event.error.info))
        else:
            self.handle(api.FenceDone(transfer, event.proven))

    def granted(self, peer: Incarnation, epoch: int) -> bool:
        """Two-sided: whether this process would write what has just arrived."""
        return (peer, epoch) in self.grants

    def landing(self, path: Path, epoch: int, data: list[tuple[int, bytes]]) -> None:
        """Bytes land in our memory."""
        if self.alive:
            check_landing(self, epoch, data)
        memory = self.engine.memory
        for to, chunk in data:
            memory[to : to + len(chunk)] = chunk

    def check_source(self, path: Path, epoch: int, part: list[tuple[int, int, int]]) -> None:
        """Invariant 3, on prefill: what is being read still belongs to its hand-off."""
        pages = {page for at, _, size in part for page in self.pages_at(at, size)}
        self.deployment.checks.reading(self, path.reader.me, epoch, pages)

    def pages_at(self, offset: int, nbytes: int) -> set[int]:
        """The pages that a range of the pool's bytes touches."""
        spec = self.engine.spec
        token = spec.k_token_bytes
        plane = spec.pages * spec.page_tokens * token
        first = offset % plane // token
        last = (offset + nbytes - 1) % plane // token
        return set(range(first // spec.page_tokens, last // spec.page_tokens + 1))

    # ---- sessions ------------------------------------------------------------------------------

    def instances_changed(self, found: dict[Incarnation, InstanceRecord]) -> None:
        """Decode keeps a session to every prefill leader that the registry names."""
        if self.spec.role is not Role.DECODE:
            return
        self.targets = {i: r for i, r in found.items() if r.role is Role.PREFILL}
        for incarnation in self.targets:
            if incarnation not in self.peers:
                self.dial(incarnation, self.world_timing.retry_s)

    def dial(self, incarnation: Incarnation, pause_s: float) -> None:
        """Connect, and go on trying while the registry names it."""
        if incarnation in self._dialling:
            return
        self._dialling[incarnation] = pause_s
        self._try(incarnation)

    def _try(self, incarnation: Incarnation) -> None:
        record = self.targets.get(incarnation)
        if record is None or incarnation in self.peers:
            self._dialling.pop(incarnation, None)
            return
        self.deployment.connect(self, record, self._connected, self._refused)

    def _connected(self, end: End, peer: LeaderNode) -> None:
        self._dialling.pop(peer.me, None)
        assert isinstance(peer, KVNode)
        self._peer_opened(end, peer)
        self._ready(end, peer)

    def _refused(self, record: InstanceRecord) -> None:
        pause_s = self._dialling.get(record.incarnation, self.world_timing.retry_s)
        self._dialling[record.incarnation] = min(2 * pause_s, 8 * self.world_timing.retry_s)
        self.after(pause_s * (0.8 + 0.4 * self.rng.random()), self._try, record.incarnation)

    def accept(self, peer: KVNode) -> None:
        """Raises what production's `join` says against this pair."""
        join(self.spec.role, self.info, PeerInfo(peer.me, peer.spec.role, 0, peer.spec.name, peer.hello))

    def session_opened(self, end: End) -> None:
        """Somebody has connected to us: decode to prefill, or a frontend."""
        peer = end.other.owner
        if not isinstance(peer, KVNode):
            self.front_opened(end)
            return
        old = self.peers.get(peer.me)
        if old is not None:
            old.shut(PeerLost("gave this session up and opened another"))
        self._peer_opened(end, peer)
        end.data = []
        path = self.paths.get(peer.me)
        if path is None or path.closed:
            self.paths[peer.me] = Path(self, peer, self.deployment.one_sided)
        self.after(self.world_timing.latency_s * self.rng.random(), self._path_open, end, peer)

    def _peer_opened(self, end: End, peer: KVNode) -> None:
        self.peers[peer.me] = end

    def _path_open(self, end: End, peer: KVNode) -> None:
        if self.peers.get(peer.me) is end:
            early, end.data = end.data, None
            self._ready(end, peer)
            for message in early:
                self.handle(api.Received(peer.me, message))

    def _ready(self, end: End, peer: KVNode) -> None:
        self.handle(api.PeerUp(peer.me, peer.info, "tcp"))

    def session_received(self, end: End, message: Any) -> None:
        """A message of a peer leader, or of a frontend."""
        peer = end.other.owner
        if not isinstance(peer, KVNode):
            super().session_received(end, message)
        elif self.peers.get(peer.me) is end:
            if end.data is not None:
                end.data.append(message)
            else:
                self.handle(api.Received(peer.me, message))
                if self.faults.triggers:
                    self.faults.reached(f"<{type(message).__name__}", message)

    def session_closed(self, end: End, error: SegueError) -> None:
        """Exactly this session's transfers fail."""
        peer = end.other.owner
        if not isinstance(peer, KVNode):
            super().session_closed(end, error)
            return
        if self.peers.get(peer.me) is not end:
            return
        del self.peers[peer.me]
        self.handle(api.PeerDown(peer.me, error.info))
        if self.spec.role is Role.DECODE and not isinstance(error, Draining):
            self.after(self.world_timing.retry_s, self.dial, peer.me, self.world_timing.retry_s)
