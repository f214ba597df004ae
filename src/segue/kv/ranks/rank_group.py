"""All ranks of one leader: which transport leads to which peer, and one answer where several ranks answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Container, Coroutine, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from segue.kv.errors import ErrorInfo
from segue.kv.ids import ChecksumKind, LeaderId, RankId, Role, TransferId
from segue.kv.io import Io
from segue.kv.protocol.events import AbortTransfer, ComputeChecksum, Fence, Grant, Granted, PostWrite, Relay
from segue.kv.protocol.link import partners, writes
from segue.kv.protocol.messages import LeaderInfo
from segue.kv.ranks.local_rank import Rank, RankOwner
from segue.kv.session.tasks import awaited


@dataclass(frozen=True, slots=True)
class PeerRoute:
    """By which transport a peer is reached, and which ranks each of ours exchanges bytes with: of the peer,
    and on decode of our own, where some pass on what has landed. `targets` are those that it writes to."""

    transport: str
    partners: Mapping[int, Collection[RankId]]
    targets: Mapping[int, Collection[RankId]]


class Ranks:
    """The ranks of one leader, asked by the effects of the protocol. Lives on the leader's loop."""

    def __init__(self, ranks: Sequence[Rank], me: LeaderId, role: Role, max_peers: int) -> None:
        self._ranks = ranks
        self._me = me
        self._sending = role is Role.PREFILL
        self._max_peers = max_peers
        #: The endpoints told to peers, by the transport's name: an encoded `Endpoint` for each rank.
        self.endpoints = {
            name: [rank.endpoints[name] for rank in ranks]
            for name in ranks[0].endpoints
            if all(name in rank.endpoints for rank in ranks)
        }
        #: The kinds of checksums that all ranks compute.
        self.checksums = tuple(str(kind) for kind in ChecksumKind if all(kind in r.checksums for r in ranks))
        # Outlives the session: a fence may come after it. Bounded: see `choose`.
        self._routes: dict[LeaderId, PeerRoute] = {}
        self._connecting: dict[tuple[LeaderId, str], asyncio.Task[None]] = {}
        #: by our rank and epoch (a number of this decode leader): the ranks that cannot write yet
        self._grants: dict[tuple[LeaderId, int, int], set[RankId]] = {}
        #: by peer: its ranks that are known to be dead
        self._dead: dict[LeaderId, set[int]] = {}

    async def start(self, owner: RankOwner, io: Io) -> None:
        """Like `Rank.start`, for all ranks."""
        for rank in self._ranks:
            await rank.start(owner, io)

    @property
    def unanswered(self) -> int:
        """The number of grants whose answers are incomplete."""
        return len(self._grants)

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
        needed: Container[LeaderId],
        relays: Collection[tuple[int, int, int]] = (),
    ) -> None:
        """Reach `peer` by the transport `name` from now on; `pairs` and `relays` are those of the plan. No
        `needed` peer is forgotten for it: one with a session or an unfinished hand-off."""
        prefill, decode = (self._me, peer) if self._sending else (peer, self._me)
        written = writes(prefill, decode, pairs, relays)
        targets: dict[int, dict[RankId, None]] = {}
        for writer, reader in written:
            if writer.leader == self._me:
                targets.setdefault(writer.rank, {})[reader] = None
        self._routes[peer] = PeerRoute(name, partners(self._me, written), targets)
        self._dead.pop(peer, None)
        spare = [known for known in self._routes if known not in needed]
        for oldest in spare[: max(0, len(self._routes) - self._max_peers)]:
            del self._routes[oldest]
            self._dead.pop(oldest, None)

    def change(self, peer: LeaderId, name: str) -> None:
        """A peer that was chosen a transport for is reached by this one instead."""
        self._routes[peer] = replace(self._routes[peer], transport=name)

    async def connect(self, peer: LeaderId, info: LeaderInfo, timeout_s: float) -> None:
        """Open the paths that our ranks need for a peer that was chosen a transport for. It may block, so it
        does so on a thread of its own: a peer that swallows packets keeps nobody waiting but itself, for
        what it was asked before is waited for. Paths between our own ranks are opened one after the other:
        several peers need the same ones. Raises what `Transport.connect` does."""
        whose = peer if self._sending else self._me
        key = (whose, self._routes[peer].transport)
        await self._alone(key, partial(self._connect, peer, info, timeout_s))

    async def _alone(self, key: tuple[LeaderId, str], work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while (earlier := self._connecting.get(key)) is not None:
            await asyncio.wait({earlier})
        task = awaited(work(), name=f"connecting {key[1]} for {key[0]}")
        self._connecting[key] = task
        task.add_done_callback(lambda _: self._connected(key, task))
        # A cancelled caller (the session has ended) leaves a thread behind that cannot be cancelled.
        await asyncio.shield(task)

    def _connected(self, key: tuple[LeaderId, str], task: asyncio.Task[None]) -> None:
        del self._connecting[key]
        if not task.cancelled():
            task.exception()  # seen: who asked may be gone

    async def _connect(self, peer: LeaderId, info: LeaderInfo, timeout_s: float) -> None:
        route = self._routes[peer]
        for rank, targets in route.targets.items():
            for to in targets:
                if to.leader == self._me:
                    endpoint = self._ranks[to.rank].endpoints[route.transport]
                else:
                    endpoint = info.endpoints[route.transport][to.rank]
                await self._ranks[rank].connect(route.transport, to, endpoint, timeout_s)

    def __getitem__(self, index: int) -> Rank:
        return self._ranks[index]

    def peer_of(self, transfer: TransferId) -> LeaderId:
        """The other side of a transfer."""
        return transfer.decode if self._sending else transfer.prefill

    def writes_for(self, peer: LeaderId) -> bool:
        """Whether ranks of ours write something: on prefill to the peer, on decode what has come from it to
        one another."""
        return bool(self._routes[peer].targets)

    def route_to(self, peer: LeaderId) -> PeerRoute | None:
        """How `peer` is reached now, if that is known."""
        return self._routes.get(peer)

    def carry_out(
        self, effect: PostWrite | Relay | Grant | Fence | ComputeChecksum, route: PeerRoute | None = None
    ) -> bool:
        """Have the rank do what is for it, over the transport that was chosen for the transfer's peer, or by
        a `route` of before. True for a grant that holds already."""
        rank = self._ranks[effect.rank]
        if isinstance(effect, ComputeChecksum):
            rank.checksum(effect)
            return False
        peer = self.peer_of(effect.transfer)
        route = route or self._routes[peer]
        name = route.transport
        match effect:
            case PostWrite():
                to = RankId(peer, effect.target)
                rank.write(name, to, effect.epoch, effect.tag, effect.blocks, effect.ready)
            case Relay():
                rank.write(name, RankId(self._me, effect.target), effect.epoch, effect.tag, effect.blocks)
            case Grant():
                area = (effect.epoch, effect.pages, effect.slot)
                asked = route.partners[effect.rank]
                waiting = {partner for partner in asked if not rank.grant(name, partner, *area)}
                if waiting:
                    self._grants[effect.transfer.decode, effect.epoch, effect.rank] = waiting
                return not waiting
            case Fence():
                self._grants.pop((effect.transfer.decode, effect.epoch, effect.rank), None)
                rank.fence(name, effect.partner, effect.epoch)
        return False

    def transport_to(self, peer: LeaderId) -> str | None:
        """The transport by which `peer` is reached now, or was last; None if it was never known."""
        route = self._routes.get(peer)
        return None if route is None else route.transport

    def route_over(self, transport: str, peer: LeaderId) -> PeerRoute | None:
        """How `peer` was reached while that was by this transport."""
        route = self._routes.get(peer)
        return route and replace(route, transport=transport)

    def granted(
        self, transfer: TransferId, rank: int, partner: RankId, epoch: int, error: ErrorInfo | None
    ) -> Granted | AbortTransfer | None:
        """One of our ranks lets another rank write, or cannot. Returns the event that follows: None until the
        rank lets all ranks write that it exchanges bytes with."""
        if error is not None:
            return AbortTransfer(transfer, error)
        key = (transfer.decode, epoch, rank)
        waiting = self._grants.get(key, set())
        if partner not in waiting:
            return None
        waiting.discard(partner)
        if waiting:
            return None
        del self._grants[key]
        return Granted(transfer, rank)

    def died(self, peer: RankId) -> bool:
        """A rank of a peer is dead. True once every one that exchanges bytes with ours is known to be: the
        death of one proves nothing of the others, and its leader says what follows."""
        route = self._routes.get(peer.leader)
        if route is None:
            return True  # it was never told where to write
        dead = self._dead.setdefault(peer.leader, set())
        dead.add(peer.rank)
        theirs = (p for others in route.partners.values() for p in others if p.leader == peer.leader)
        return all(partner.rank in dead for partner in theirs)

    def close(self) -> None:
        """End all of them, whatever one raises; no answer after it returns."""
        with ExitStack() as stack:
            for rank in self._ranks:
                stack.callback(rank.close)
