"""The transports of one leader, and which of them leads to which peer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container
from concurrent.futures import Executor
from functools import partial

import msgspec

from segue.conn.config import KVConfig
from segue.core.errors import DECODE_ERRORS, TransferFailed
from segue.core.types import LeaderId, RankId, Role, TransferId
from segue.handoff import events
from segue.handoff.messages import LeaderInfo
from segue.layout.content import whole_pages
from segue.session.tasks import awaited
from segue.transport.base import Endpoint, TransportEvent
from segue.transport.kinds import TransportKinds
from segue.transport.memory import Memory
from segue.transport.options import TransportOptions


class Transports:
    """One transport of each configured name, with the pool registered at each.

    `on_event` is called with a transport's name and event, on any thread. What blocks runs in `threads`.
    Raises ConfigError for a transport that cannot be used here.
    """

    def __init__(
        self,
        config: KVConfig,
        memory: Memory,
        kinds: TransportKinds,
        on_event: Callable[[str, TransportEvent], None],
        threads: Executor,
    ) -> None:
        memory.check_pool(config.spec)
        self._sending = config.role is Role.PREFILL
        self._spec = config.spec
        self._max_peers = config.limits.max_sessions
        options = TransportOptions(
            me=RankId(config.me),
            host=config.host,
            port=config.transport_port,
            advertise=config.advertise,
            advertise_port=config.advertise_transport_port,
            limits=config.limits,
            tls=config.tls,
        )
        self._by_name = {
            name: kinds.create(name, partial(on_event, name), options) for name in config.transports
        }
        #: What peers are told, by the transport's name: an encoded `Endpoint` for each rank.
        self.endpoints = {
            name: [msgspec.msgpack.encode(transport.register(memory))]
            for name, transport in self._by_name.items()
        }
        # Outlives the session: a fence may come after it. One string per peer ever seen, bounded.
        self._chosen: dict[LeaderId, str] = {}
        self._connecting: dict[LeaderId, asyncio.Task[None]] = {}
        self._threads = threads

    def withdraw(self, name: str) -> bool:
        """Offer `name` to no further peer; those that use it keep it. False where nothing else is offered."""
        if len(self.endpoints) < 2 or name not in self.endpoints:
            return False
        self.endpoints = {other: data for other, data in self.endpoints.items() if other != name}
        return True

    def choose(self, peer: LeaderId, name: str, live: Container[LeaderId]) -> None:
        """From now on `peer` is reached by the transport `name`. No `live` peer is forgotten for it."""
        self._chosen[peer] = name
        while len(self._chosen) > self._max_peers:
            oldest = next(known for known in self._chosen if known not in live)
            del self._chosen[oldest]

    async def connect(self, peer: LeaderId, info: LeaderInfo, timeout_s: float) -> None:
        """Open the path to each rank of a peer that was chosen a transport for. It may block, so it does so
        on a thread of its own: a peer that swallows packets keeps nobody waiting but itself, for what
        it was asked before is waited for. Raises what `Transport.connect` does."""
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
        name = self._chosen[peer]
        connect = self._by_name[name].connect
        for rank, data in enumerate(info.endpoints[name]):
            try:
                endpoint = msgspec.msgpack.decode(data, type=Endpoint)
            except DECODE_ERRORS as exc:
                raise TransferFailed(f"unreadable endpoint: {exc}") from exc
            await asyncio.get_running_loop().run_in_executor(
                self._threads, connect, RankId(peer, rank), endpoint, timeout_s
            )

    def peer_of(self, transfer: TransferId) -> LeaderId:
        """The other side of a transfer."""
        return transfer.decode if self._sending else transfer.prefill

    def move(self, effect: events.PostWrite | events.Grant | events.Fence) -> None:
        """Hand an effect to the transport that was chosen for the transfer's peer."""
        peer = self.peer_of(effect.transfer)
        transport = self._by_name[self._chosen[peer]]
        match effect:
            case events.PostWrite():
                rank = RankId(peer, effect.target)
                transport.write(rank, effect.epoch, effect.tag, effect.blocks)
            case events.Grant():
                area = whole_pages(self._spec, effect.pages)
                transport.grant(RankId(peer), effect.epoch, area)
            case events.Fence():
                transport.fence(RankId(peer), effect.epoch)

    def close(self) -> None:
        """End all of them; no event after it returns."""
        for transport in self._by_name.values():
            transport.close()
