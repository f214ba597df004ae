"""Simulated instances: the production role, exchange, handles and pool, with the loop of `serve.leader`.

A node has two threads, as in production: the leader (role and engine) and the I/O thread (exchange,
sessions, data paths). What one gives the other arrives a little later, in order; everything else of
the two interleaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from segue.bootstrap.records import InstanceRecord
from segue.conn.handles import Change, KVReceiver, KVSender
from segue.conn.peers import join
from segue.core.errors import Draining, Internal, PeerLost, SegueError, TransferFailed
from segue.core.types import Incarnation, Role, TransferId
from segue.handoff import api
from segue.handoff.exchange import Exchange
from segue.handoff.machine import IllegalEvent
from segue.handoff.messages import PROTOCOL_VERSION, LeaderInfo
from segue.layout.content import checksum
from segue.roles.base import Role as RoleLogic
from segue.roles.decode import DecodeRole
from segue.roles.prefill import PrefillRole
from segue.session.api import PeerInfo
from segue.sim.leader import VOCAB, LeaderNode, NodeSpec
from segue.sim.network import End
from segue.sim.wire import Path, check_landing
from segue.sim.world import Violation
from segue.transport.base import Endpoint, Fenced, PeerGone, TransportEvent, WriteFailed, Written

if TYPE_CHECKING:
    from segue.sim.deployment import Deployment


__all__ = ["VOCAB", "KVNode", "LeaderNode", "NodeSpec"]

H = TypeVar("H", KVSender, KVReceiver)


@dataclass(slots=True)
class Exposed:
    """Pages of one receiver that a peer may write into."""

    transfer: TransferId
    pages: set[int]


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
            spec.role,
            self.me,
            f"{spec.role.value} {self.me[:8]} dp0",
            self.limits,
            self.info,
            integrity=spec.integrity,
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
        elif isinstance(effect, api.Digest):
            self._digest(effect)
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

    def _digest(self, effect: api.Digest) -> None:
        """As `conn.digest`: a thread reads the bytes a little later."""
        if self.faults.page_flips and self.spec.role is Role.DECODE:
            self.faults.page_flips -= 1
            self.deployment.checks.flips.page(self, effect, self.rng)
        self.after(self.world_timing.slice_s * 2 * self.rng.random(), self._read, effect)

    def _read(self, effect: api.Digest) -> None:
        size = self.engine.spec.page_tokens
        pages = {
            page
            for slot, tokens in effect.content.runs
            for page in range(slot // size, -(-(slot + tokens) // size))
        }
        self.deployment.checks.hashing(self, effect.transfer, pages)
        found = checksum(memoryview(self.engine.memory), effect.content)
        self.handle(api.Digested(effect.transfer, effect.tag, found))

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
