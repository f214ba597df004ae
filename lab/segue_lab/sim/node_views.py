"""Leaders and frontends as the other parts of the simulator see them.

The checks, the data paths and the faults of a node need some of what it has; the classes themselves are in
`sim_leader.py`, `sim_node.py` and `front.py`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from segue.engine.pages import PagePool
from segue.kv.clock import Clock
from segue.kv.ids import LeaderId, RoomKey, TransferId
from segue.kv.limits import Limits
from segue.kv.manager import KVManager
from segue.kv.protocol.exchange import Exchange
from segue.server.fleet.fleet import Fleet
from segue.server.fleet.replica import Replica
from segue.server.registry.registry_records import InstanceRecord
from segue.server.schedulers.scheduler import Scheduler
from segue_lab.sim.clients import Asked, Wanted
from segue_lab.sim.loop import SimLoop
from segue_lab.sim.node_spec import NodeSpec
from segue_lab.sim.runtime import SimIo
from segue_lab.sim.sim_engine import LineageEngine
from segue_lab.sim.sim_state import SimState
from segue_lab.sim.timing import Timing
from segue_lab.sim.world import Process, SkewedClock


class NodeView(Process):
    """One incarnation of an instance's leader."""

    state: SimState
    spec: NodeSpec
    me: LeaderId
    #: restarts of its instance before this incarnation: a leader that ends does not return within it
    instance_restart: int
    rng: random.Random
    host: str
    port: int
    loop: SimLoop
    io: SimIo
    skewed: SkewedClock
    clock: Clock
    limits: Limits
    world_timing: Timing
    engine: LineageEngine
    pool: PagePool
    scheduler: Scheduler
    #: pages that a fault has taken
    squeezed: list[int]
    draining: bool
    #: an operator has it drain, to turn it
    steered: bool
    drained: bool
    draining_since: float | None

    @property
    def busy(self) -> bool:
        """A forward runs."""
        raise NotImplementedError

    @property
    def borrowed(self) -> list[int]:
        """Pages of the pool that its role knows nothing of."""
        return self.squeezed

    def record(self) -> InstanceRecord:
        """The record for the registry."""
        raise NotImplementedError


@dataclass(slots=True)
class Exposed:
    """Pages of one receiver that a peer may write into."""

    transfer: TransferId
    pages: set[int]


class PathView(Protocol):
    """A data path."""

    def busy_with(self, epoch: int) -> bool: ...


class KVView(NodeView):
    """A leader of a prefill or decode instance."""

    manager: KVManager
    exposed: dict[int, Exposed]
    #: by rank and name
    transports: Mapping[tuple[int, str], Any]
    #: before which its ranks owe no answer: a fault made a checksum slow, or a worker stand still
    no_answer_until: float
    #: one of its ranks is lost, and with it the replica
    lost_rank: bool
    #: ranks whose worker has ended
    ended_ranks: set[int]

    @property
    def exchange(self) -> Exchange:
        """The protocol's state."""
        return self.manager.exchange

    @property
    def peers(self) -> dict[LeaderId, Any]:
        """The peers that hand-offs are possible with now."""
        return self.manager._peers

    @property
    def grants(self) -> int:
        """How many live grants its transports have."""
        return sum(len(transport.grants) for transport in self.transports.values())

    @property
    def lent(self) -> int:
        """How many slots of its staging pools are in use."""
        return sum(transport.lent for transport in self.transports.values())

    def paths_to(self, reader: LeaderId) -> Sequence[PathView]:
        """Its paths to a decode node."""
        raise NotImplementedError

    def data_path(self, mine: int, reader: KVView, rank: int, name: str) -> Any:
        """The path from our rank `mine` to one of a decode node over the transport `name`."""
        raise NotImplementedError

    def offset_of(self, address: int, nbytes: int) -> int | None:
        """The offset of an address in our pool; None unless all of these bytes are in it."""
        raise NotImplementedError

    @property
    def room_keys(self) -> Sequence[RoomKey]:
        """The halves of rooms that were not placed here."""
        raise NotImplementedError

    def owned(self, key: RoomKey) -> set[int]:
        """The pages and the slot, as `LineageEngine.touched` counts them, of whoever has this half."""
        raise NotImplementedError

    def check_source(self, peer: LeaderId, epoch: int, ranges: list[tuple[int, int]]) -> None:
        """Invariant 3: what is being read still belongs to its hand-off."""
        raise NotImplementedError

    def flipped(
        self, epoch: int, data: list[tuple[int, bytes]], rng: random.Random
    ) -> list[tuple[int, bytes]]:
        """`data` as it lands here with one bit changed."""
        raise NotImplementedError

    def pages_at(self, offset: int, nbytes: int) -> set[int]:
        """The pages that a range of the pool's bytes touches."""
        return set(self.engine.page_of_word[offset // 8 : (offset + nbytes - 1) // 8 + 1])


class FrontView(Process):
    """One incarnation of a frontend."""

    state: SimState
    me: LeaderId
    rng: random.Random
    loop: SimLoop
    fleet: Fleet
    #: requests that have not ended, by their names
    asked: dict[str, Asked]

    def pairs(self, wanted: Wanted | None = None) -> list[tuple[Replica, Replica]]:
        """The pairs that could serve a request, as far as anybody knows."""
        raise NotImplementedError


def leaders(state: SimState) -> Iterator[NodeView]:
    """Every live leader of an instance."""
    return (node for node in state.nodes.values() if isinstance(node, NodeView) and node.alive)


def leaders_of(node: NodeView) -> list[NodeView]:
    """`node` and the other leaders of its incarnation that have begun, alive or not."""
    found = (other for other in node.state.nodes.values() if isinstance(other, NodeView))
    return [
        other
        for other in found
        if other.spec.instance == node.spec.instance and other.instance_restart == node.instance_restart
    ]


def fronts(state: SimState) -> Iterator[FrontView]:
    """Every frontend's present incarnation."""
    return (front for front in state.fronts.values() if isinstance(front, FrontView))


__all__ = ["Exposed", "FrontView", "KVView", "NodeView", "PathView", "fronts", "leaders", "leaders_of"]
