"""All ranks of one leader: which transport leads to which peer, and one answer where several ranks answer."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Container, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from segue.conn.io import Io
from segue.conn.rank import Rank, RankOwner
from segue.core.errors import ErrorInfo
from segue.core.types import LeaderId, RankId, Role, TransferId
from segue.handoff.events import AbortTransfer, ComputeChecksum, Fence, Grant, Granted, PostWrite
from segue.handoff.messages import LeaderInfo
from segue.session.tasks import awaited
from segue.transport.base import Fenced


@dataclass(frozen=True, slots=True)
class PeerRoute:
    """How a peer is reached: by which transport, and which of its ranks each of ours exchanges bytes with."""

    transport: str
    partners: Mapping[int, tuple[int, ...]]


@dataclass(slots=True)
class _OpenFence:
    """A fence of one of our ranks: which of the peer's ranks it is still to hold against, and whether all
    that have answered did so with proof."""

    waiting: set[int]
    proven: bool = True


class Ranks:
    """The ranks of one leader, asked by the effects of the protocol. Lives on the leader's loop."""

    def __init__(self, ranks: Sequence[Rank], role: Role, max_peers: int) -> None:
        self._ranks = ranks
        self._sending = role is Role.PREFILL
        self._max_peers = max_peers
        #: What peers are told, by the transport's name: an encoded `Endpoint` for each rank.
        self.endpoints = {
            name: [rank.endpoints[name] for rank in ranks]
            for name in ranks[0].endpoints
            if all(name in rank.endpoints for rank in ranks)
        }
        # Outlives the session: a fence may come after it. One entry per peer ever seen, bounded.
        self._routes: dict[LeaderId, PeerRoute] = {}
        self._connecting: dict[LeaderId, asyncio.Task[None]] = {}
        #: grants of our ranks, each with the peer's ranks that cannot write there yet
        self._grants: dict[tuple[LeaderId, int, int], set[int]] = {}
        self._fences: dict[tuple[LeaderId, int, int], _OpenFence] = {}
        #: of each peer, its ranks that are known to be dead
        self._dead: dict[LeaderId, set[int]] = {}

    async def start(self, owner: RankOwner, io: Io) -> None:
        """As `Rank.start`, all of them."""
        for rank in self._ranks:
            await rank.start(owner, io)

    @property
    def unanswered(self) -> int:
        """How many grants and fences wait for answers that are put together here."""
        return len(self._grants) + len(self._fences)

    def withdraw(self, name: str) -> bool:
        """Offer `name` to no further peer; those that use it keep it. False where nothing else is offered."""
        if len(self.endpoints) < 2 or name not in self.endpoints:
            return False
        self.endpoints = {other: data for other, data in self.endpoints.items() if other != name}
        return True

    def choose(
        self,
        peer: LeaderId,
        name: str,
        pairs: Collection[tuple[int, int]],
        live: Container[LeaderId],
    ) -> None:
        """From now on `peer` is reached by the transport `name`; `pairs` are those of the plan, (source rank,
        target rank). No `live` peer is forgotten for it."""
        partners: dict[int, tuple[int, ...]] = {}
        for source, target in pairs:
            ours, theirs = (source, target) if self._sending else (target, source)
            partners[ours] = (*partners.get(ours, ()), theirs)
        self._routes[peer] = PeerRoute(name, partners)
        self._dead.pop(peer, None)
        while len(self._routes) > self._max_peers:
            oldest = next(known for known in self._routes if known not in live)
            del self._routes[oldest]
            self._dead.pop(oldest, None)

    async def connect(self, peer: LeaderId, info: LeaderInfo, timeout_s: float) -> None:
        """Open the paths from our ranks to those of a peer that was chosen a transport for. It may block, so
        it does so on a thread of its own: a peer that swallows packets keeps nobody waiting but itself, for
        what it was asked before is waited for. Raises what `Transport.connect` does."""
        while (earlier := self._connecting.get(peer)) is not None:
            await asyncio.wait({earlier})
        task = awaited(self._connect(peer, info, timeout_s), name=f"connecting to {peer}")
        self._connecting[peer] = task
        task.add_done_callback(lambda _: self._connected(peer, task))
        # Who is cancelled (the session has ended) leaves a thread behind that cannot be.
        await asyncio.shield(task)

    def _connected(self, peer: LeaderId, task: asyncio.Task[None]) -> None:
        del self._connecting[peer]
        if not task.cancelled():
            task.exception()  # seen: who asked may be gone

    async def _connect(self, peer: LeaderId, info: LeaderInfo, timeout_s: float) -> None:
        route = self._routes[peer]
        endpoints = info.endpoints[route.transport]
        for ours, theirs in route.partners.items():
            for rank in theirs:
                await self._ranks[ours].connect(
                    route.transport, RankId(peer, rank), endpoints[rank], timeout_s
                )

    def peer_of(self, transfer: TransferId) -> LeaderId:
        """The other side of a transfer."""
        return transfer.decode if self._sending else transfer.prefill

    def route_to(self, peer: LeaderId) -> PeerRoute | None:
        """How `peer` is reached now, if that is known."""
        return self._routes.get(peer)

    def carry_out(
        self, effect: PostWrite | Grant | Fence | ComputeChecksum, route: PeerRoute | None = None
    ) -> bool:
        """Have the rank do what is for it, over the transport that was chosen for the transfer's peer, or by
        a `route` of before. True for a grant that holds already."""
        rank = self._ranks[effect.rank]
        if isinstance(effect, ComputeChecksum):
            rank.checksum(effect)
            return False
        peer = self.peer_of(effect.transfer)
        route = route or self._routes[peer]
        name, partners = route.transport, route.partners[effect.rank]
        match effect:
            case PostWrite():
                rank.write(name, RankId(peer, effect.target), effect.epoch, effect.tag, effect.blocks)
            case Grant():
                waiting = {
                    p for p in partners if not rank.grant(name, RankId(peer, p), effect.epoch, effect.pages)
                }
                if waiting:
                    self._grants[peer, effect.epoch, effect.rank] = waiting
                return not waiting
            case Fence():
                self._grants.pop((peer, effect.epoch, effect.rank), None)
                if len(partners) > 1:
                    self._fences[peer, effect.epoch, effect.rank] = _OpenFence(set(partners))
                for theirs in partners:
                    rank.fence(name, RankId(peer, theirs), effect.epoch)
        return False

    def fence_anew(self, transport: str, fences: Sequence[Fence]) -> None:
        """Ask again where a rank of a peer has died: what could not be proven while it lived can be now."""
        for fence in fences:
            route = self._routes.get(self.peer_of(fence.transfer))
            if route is not None:
                self.carry_out(fence, PeerRoute(transport, route.partners))

    def granted(
        self, transfer: TransferId, rank: int, peer: RankId, epoch: int, error: ErrorInfo | None
    ) -> Granted | AbortTransfer | None:
        """One of our ranks lets one rank of the peer write, or cannot. What follows: nothing, before it lets
        all those that it exchanges bytes with."""
        if error is not None:
            return AbortTransfer(transfer, error)
        waiting = self._grants.get((peer.leader, epoch, rank), set())
        if peer.rank not in waiting:
            return None
        waiting.discard(peer.rank)
        if waiting:
            return None
        del self._grants[peer.leader, epoch, rank]
        return Granted(transfer, rank)

    def fenced(self, rank: int, event: Fenced) -> bool | None:
        """One of our ranks has answered a fence for one rank of the peer. None before it has for all that it
        exchanges bytes with; then whether all of it is proven."""
        leader = event.peer.leader
        key = (leader, event.epoch, rank)
        fence = self._fences.get(key)
        if fence is None:
            route = self._routes.get(leader)
            alone = route is not None and route.partners.get(rank) == (event.peer.rank,)
            return event.proven if alone else None
        if event.peer.rank not in fence.waiting:
            return None
        fence.waiting.discard(event.peer.rank)
        fence.proven = fence.proven and event.proven
        if fence.waiting:
            return None
        del self._fences[key]
        return fence.proven

    def died(self, peer: RankId) -> bool:
        """A rank of a peer is dead. True once every one that exchanges bytes with ours is known to be: the
        death of one proves nothing of the others, and its leader says what follows."""
        route = self._routes.get(peer.leader)
        if route is None:
            return True  # it was never told where to write
        dead = self._dead.setdefault(peer.leader, set())
        dead.add(peer.rank)
        return all(theirs in dead for partners in route.partners.values() for theirs in partners)

    def close(self) -> None:
        """End all of them, whatever one raises; no answer after it returns."""
        with ExitStack() as stack:
            for rank in self._ranks:
                stack.callback(rank.close)
