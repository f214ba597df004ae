"""A decode manager whose loop, sessions and ranks do as a test tells them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from kv_sides import receive

from segue.kv.config import KVConfig, LeaderRuntime
from segue.kv.errors import ErrorCode, SegueError
from segue.kv.ids import Incarnation, KVPoll, LeaderId, Role, TransferId
from segue.kv.layout.planner import plan_pair
from segue.kv.layout.spec import KVShape, PoolSpec
from segue.kv.manager import KVManager
from segue.kv.peers import Peer
from segue.kv.protocol import events
from segue.kv.session.api import PeerInfo
from segue.kv.transport.base import TransportEvent
from segue.kv.transport.memory.pool_memory import allocate

SHAPE = KVShape(layers=1, kv_heads=1, k_dim=8, v_dim=8, dtype="float16", item_bytes=2)
SPEC = PoolSpec(shape=SHAPE, page_tokens=4, pages=4, layer_count=1, head_count=1)
PREFILL = LeaderId(Incarnation("a" * 32))
PLAN = plan_pair([SPEC], [SPEC])


class StillIo:
    """An I/O thread without a thread: tests say when its loop turns."""

    def __init__(self, _on_error: object) -> None:
        self.loop = asyncio.new_event_loop()
        self.running = False

    def post(self, function: Callable[..., object], *args: object) -> None:
        self.loop.call_soon(function, *args)

    def yield_gil(self) -> None: ...
    def start(self) -> None: ...

    def turn(self) -> None:
        self.loop.run_until_complete(asyncio.sleep(0))

    def stop(self) -> None:
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.turn()
        self.turn()
        self.loop.close()


class Line:
    """A session that takes everything, or breaks on messages of one hand-off."""

    def __init__(self, leader: LeaderId = PREFILL, hello: bytes = b"") -> None:
        self.peer = PeerInfo(leader, Role.PREFILL, "there", hello)
        self.breaks: TransferId | None = None
        self.closing = False
        self.sent: list[Any] = []
        self.closed_with: list[Any] = []

    def send(self, message: Any) -> None:
        if message.transfer == self.breaks:
            raise RuntimeError("a bug")
        self.sent.append(message)

    def close(self, error: object = None) -> None:
        self.closed_with.append(error)


class Rig:
    """A decode manager with two open hand-offs; whatever it is asked for the first one can be broken."""

    def __init__(self) -> None:
        self.memory = allocate(SPEC.nbytes)
        self.changes: list[Any] = []
        self.on_change: Callable[[], object] = lambda: None
        self.breaks_change: type[Any] | None = None
        config = KVConfig(role=Role.DECODE, model="m", spec=SPEC, transports=["fake"])
        #: the losses of ranks that the owner of the manager was told
        self.losses: list[SegueError] = []
        self.manager = KVManager(
            config,
            self.memory,
            self.changed,
            on_rank_lost=self.losses.append,
            runtime=LeaderRuntime(io=StillIo),  # type: ignore[arg-type]
        )
        self.line = Line(PREFILL, self.manager.hello())
        self.peer = self.meets(self.line)
        self.one, self.other = self.opened(5), self.opened(6)
        self.changes.clear()

    def meets(self, line: Line) -> Peer:
        """The peer of this session joins over `fake`."""
        info, leader = self.manager.compatibility.info, line.peer.leader
        peer = Peer(line, info, ["fake"], PLAN, self.manager.io.loop.create_future())  # type: ignore[arg-type]
        self.manager._peers[leader] = peer
        self.manager._ranks.choose(leader, "fake", ((0, 0),), self.manager._peers)
        self.happens(events.PeerUp(leader, PLAN, "fake"))
        return peer

    def opened(self, room: int, leader: LeaderId = PREFILL) -> TransferId:
        """A hand-off that has said where to write."""
        transfer = TransferId(room, 0, leader, self.manager.config.me)
        handle = receive(self.manager, transfer, 4, 60)
        self.turn()
        assert handle.poll() is KVPoll.WAITING_FOR_INPUT
        handle.publish([room % 4])
        self.turn()
        return transfer

    def turn(self) -> None:
        self.manager.io.turn()  # type: ignore[attr-defined]

    def happens(self, event: events.Event) -> None:
        """The manager handles `event`."""
        self.manager.post(event)
        self.turn()

    def moved(self, rank: int, transport: str, event: TransportEvent) -> None:
        """A rank reports an event of one of its transports."""
        self.manager.moved(rank, transport, event)
        self.turn()

    def changed(self, change: Any) -> None:
        one = getattr(self, "one", None)
        if one is not None and change.key == one.received_as and type(change) is self.breaks_change:
            self.breaks_change = None
            raise RuntimeError("a bug")
        self.changes.append(change)
        self.on_change()

    def handle(self, *effects: events.Effect) -> None:
        """Something happens that has these effects."""
        exchange: Any = self.manager.exchange
        normal = exchange.handle

        def once(event: events.Event, now: float) -> list[events.Effect]:
            exchange.handle = normal
            return list(effects)

        exchange.handle = once
        self.manager._handle(events.Tick())  # what it leaves for the next turn is still to come

    def seen(self) -> list[events.Event]:
        """The protocol's events from now on."""
        told: list[events.Event] = []
        exchange: Any = self.manager.exchange
        normal = exchange.handle

        def handle(event: events.Event, now: float) -> list[events.Effect]:
            told.append(event)
            result: list[events.Effect] = normal(event, now)
            return result

        exchange.handle = handle
        return told

    def close(self) -> None:
        self.manager.close()
        self.memory.close()

    def ended(self, transfer: TransferId) -> list[ErrorCode]:
        """The errors with which it has failed."""
        phases = [change for change in self.of(transfer, events.Phase) if change.phase is KVPoll.FAILED]
        return [phase.error.code for phase in phases]

    def of(self, transfer: TransferId, kind: type[Any]) -> list[Any]:
        key = transfer.received_as
        return [change for change in self.changes if change.key == key and type(change) is kind]
