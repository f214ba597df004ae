"""The seam of one rank: its pool, the transports over it, and what hashes it.

A leader decides; its ranks move and hash bytes. `LocalRank` is a rank of the leader's own process,
`WorkerRank` (`conn.worker_rank`) one in a process of its own. A leader knows neither from the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Protocol

import msgspec

from segue.conn.config import KVConfig, Runtime
from segue.conn.digest import Digester
from segue.conn.io import Io
from segue.core.errors import DECODE_ERRORS, ErrorInfo, SegueError, TransferFailed
from segue.core.types import RankId
from segue.handoff.events import ChecksumReady, ComputeChecksum
from segue.layout.blocks import CopyBlock
from segue.layout.content import whole_pages
from segue.layout.spec import PoolSpec
from segue.transport.base import Endpoint, EventSink, Transport, TransportEvent
from segue.transport.memory import Memory
from segue.transport.options import TransportOptions

#: After a fence that a transport did not take, before it is asked again.
FENCE_AGAIN_S = 1.0


class RankOwner(Protocol):
    """Who is told what a rank answers. Called on any thread; `rank` is the rank's index."""

    def moved(self, rank: int, transport: str, event: TransportEvent) -> None:
        """An event of the rank's transport of this name."""
        ...

    def granted(self, rank: int, peer: RankId, epoch: int, error: ErrorInfo | None = None) -> None:
        """What a `grant` asked for that was not done at once has been done, or why it was not."""
        ...

    def hashed(self, answer: ChecksumReady) -> None:
        """A checksum, or why there is none."""
        ...

    def lost(self, rank: int, error: SegueError) -> None:
        """The rank answers no more, once; nothing may be asked of it from now on but fences."""
        ...


class Rank(Protocol):
    """One rank, as its leader drives it, on the leader's loop. No method but `connect` and `close` waits.

    Each write is answered by one `Written` or `WriteFailed`, each fence by one `Fenced`, each checksum by one
    `ChecksumReady`, until `close`. `endpoints` has an encoded `Endpoint` for each transport's name.
    """

    @property
    def spec(self) -> PoolSpec: ...
    @property
    def endpoints(self) -> Mapping[str, bytes]: ...

    async def start(self, owner: RankOwner, io: Io) -> None:
        """Begin to answer, to `owner`. Called once, on the loop of `io`."""
        ...

    async def connect(self, transport: str, peer: RankId, endpoint: bytes, timeout_s: float) -> None:
        """Open the path to a peer's rank (see `Transport.connect`)."""
        ...

    def write(
        self, transport: str, peer: RankId, epoch: int, tag: int, blocks: Sequence[CopyBlock]
    ) -> None: ...

    def grant(self, transport: str, peer: RankId, epoch: int, pages: Sequence[int]) -> bool:
        """True once writes may land; False if `RankOwner.granted` will say so."""
        ...

    def fence(self, transport: str, peer: RankId, epoch: int) -> None: ...

    def checksum(self, effect: ComputeChecksum) -> None: ...

    def close(self) -> None:
        """No answer after it returns. Idempotent."""
        ...


class LocalRank:
    """A rank whose pool lies in this process.

    `transports` makes each transport that is offered, by its name, from a sink for events; `digester` what
    hashes, from the memory and a sink for answers. What blocks runs in `threads`.
    """

    def __init__(
        self,
        index: int,
        spec: PoolSpec,
        memory: Memory,
        transports: Mapping[str, Callable[[EventSink], Transport]],
        digester: Callable[[Memory, Callable[[ChecksumReady], None]], Digester],
        threads: Executor,
    ) -> None:
        memory.check_pool(spec)
        self.spec: PoolSpec = spec
        self._index = index
        self._owner: RankOwner | None = None
        self._threads = threads
        self._by_name = {name: make(partial(self._moved, name)) for name, make in transports.items()}
        self.endpoints = {
            name: msgspec.msgpack.encode(transport.register(memory))
            for name, transport in self._by_name.items()
        }
        self._digester = digester(memory, self._hashed)

    async def start(self, owner: RankOwner, io: Io) -> None:
        """See `Rank.start`."""
        self._owner = owner
        self._digester.start()

    async def connect(self, transport: str, peer: RankId, endpoint: bytes, timeout_s: float) -> None:
        """See `Rank.connect`."""
        try:
            known = msgspec.msgpack.decode(endpoint, type=Endpoint)
        except DECODE_ERRORS as exc:
            raise TransferFailed(f"unreadable endpoint: {exc}") from exc
        connect = self._by_name[transport].connect
        await asyncio.get_running_loop().run_in_executor(self._threads, connect, peer, known, timeout_s)

    def write(self, transport: str, peer: RankId, epoch: int, tag: int, blocks: Sequence[CopyBlock]) -> None:
        """See `Transport.write`."""
        self._by_name[transport].write(peer, epoch, tag, blocks)

    def grant(self, transport: str, peer: RankId, epoch: int, pages: Sequence[int]) -> bool:
        """See `Transport.grant`; the area is all of `pages`."""
        self._by_name[transport].grant(peer, epoch, whole_pages(self.spec, pages))
        return True

    def fence(self, transport: str, peer: RankId, epoch: int) -> None:
        """See `Transport.fence`."""
        self._by_name[transport].fence(peer, epoch)

    def checksum(self, effect: ComputeChecksum) -> None:
        """Hash what `effect` names, now or soon."""
        self._digester.submit(effect)

    def close(self) -> None:
        """End the digester first, so that no answer asks anything of transports that are closed."""
        self._digester.close()
        for transport in self._by_name.values():
            transport.close()

    def _moved(self, name: str, event: TransportEvent) -> None:
        if self._owner is not None:
            self._owner.moved(self._index, name, event)

    def _hashed(self, answer: ChecksumReady) -> None:
        if self._owner is not None:
            self._owner.hashed(answer)


def local_rank(config: KVConfig, memory: Memory, runtime: Runtime, index: int = 0) -> LocalRank:
    """A rank over `memory`, laid out as `config.spec` says. Raises ConfigError for a transport that cannot be
    used here."""
    options = TransportOptions(
        me=RankId(config.me, index),
        host=config.host,
        port=config.transport_port,
        advertise=config.advertise,
        advertise_port=config.advertise_transport_port,
        limits=config.limits,
        tls=config.tls,
    )

    def transport(name: str) -> Callable[[EventSink], Transport]:
        return lambda on_event: runtime.transports.create(name, on_event, options)

    return LocalRank(
        index,
        config.spec,
        memory,
        {name: transport(name) for name in config.transports},
        lambda memory, answer: runtime.digester(memory, answer, config.limits.max_transfers),
        runtime.connecting("segue-connect"),
    )
