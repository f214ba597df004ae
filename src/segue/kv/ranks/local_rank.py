"""The seam of one rank: its pool, the transports over it, and what hashes it.

A leader decides; its ranks move and hash bytes. `LocalRank` is a rank of the leader's own process,
`WorkerRank` (`kv.ranks.worker_rank`) one in a process of its own. A leader knows neither from the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import msgspec

from segue.kv.config import KVConfig, LeaderRuntime
from segue.kv.errors import (
    DECODE_ERRORS,
    ErrorInfo,
    Internal,
    OutOfCapacity,
    SegueError,
    TransferFailed,
)
from segue.kv.ids import RankId
from segue.kv.io import Io
from segue.kv.layout.blocks import CopyBlock
from segue.kv.layout.content import whole_pages
from segue.kv.layout.spec import PoolSpec
from segue.kv.protocol.events import ChecksumReady, ComputeChecksum
from segue.kv.ranks.checksums import Digester, checksum_kinds
from segue.kv.ready import ReadyEvent
from segue.kv.session.tasks import typed
from segue.kv.transport.base import (
    Endpoint,
    EventSink,
    Transport,
    TransportEvent,
    WriteFailed,
)
from segue.kv.transport.memory.pool_memory import Memory
from segue.kv.transport.options import TransportOptions
from segue.kv.transport.write_book import fenced

#: After a fence that a transport did not take, before it is asked again.
FENCE_AGAIN_S = 1.0
#: Writes and checksums of one hand-off that wait until their KV is ready.
MAX_HELD = 65536
#: For the libraries of transports, before anybody is met.
LOAD_S = 10.0


class RankOwner(Protocol):
    """Receives the answers of a rank. Called on any thread; `rank` is the rank's index."""

    def moved(self, rank: int, transport: str, event: TransportEvent) -> None:
        """An event of the rank's transport of this name."""
        ...

    def granted(self, rank: int, peer: RankId, epoch: int, error: ErrorInfo | None = None) -> None:
        """An earlier `grant` is now done, or failed with `error`."""
        ...

    def hashed(self, answer: ChecksumReady) -> None:
        """A checksum, or why there is none."""
        ...

    def signalled(self, rank: int, number: int, error: ErrorInfo | None) -> None:
        """The moment `number` (`ReadyEvent`) has come in the process of the rank, or never will."""
        ...

    def lost(self, rank: int, error: SegueError) -> None:
        """The rank answers no more, once; nothing may be asked of it from now on but fences."""
        ...


class Rank(Protocol):
    """One rank, as its leader drives it, on the leader's loop; `local_rank` and `WorkerRank` make one. Only
    coroutines and `close` wait.

    Each write is answered by one `Written` or `WriteFailed`, each fence by one `Fenced`, each checksum by one
    `ChecksumReady`, until `close`.
    """

    @property
    def spec(self) -> PoolSpec:
        """The rank's part of the model, and its pool."""
        ...

    @property
    def endpoints(self) -> Mapping[str, bytes]:
        """An encoded `Endpoint` for each transport's name."""
        ...

    @property
    def checksums(self) -> Sequence[str]:
        """The kinds of checksums (`ChecksumKind`) that it computes of its memory."""
        ...

    async def start(self, owner: RankOwner, io: Io) -> None:
        """Begin to answer, to `owner`. Called once, on the loop of `io`."""
        ...

    async def connect(self, transport: str, peer: RankId, endpoint: bytes, timeout_s: float) -> None:
        """Open the path to a peer's rank (see `Transport.connect`)."""
        ...

    def write(
        self,
        transport: str,
        peer: RankId,
        epoch: int,
        tag: int,
        blocks: Sequence[CopyBlock],
        ready: ReadyEvent | None = None,
    ) -> None:
        """Copy `blocks` of our memory into the peer's, once they are `ready`; `tag` comes back with the
        answer."""
        ...

    def grant(
        self, transport: str, peer: RankId, epoch: int, pages: Sequence[int], slot: int | None = None
    ) -> bool:
        """True once writes may land; False if `RankOwner.granted` will say so."""
        ...

    def fence(self, transport: str, peer: RankId, epoch: int) -> None:
        """Ask for the proof that no write of `epoch` between us and `peer` is under way or can begin. Writes
        and checksums of `epoch` that are not `ready` fail."""
        ...

    def checksum(self, effect: ComputeChecksum) -> None:
        """Hash a chunk in our memory, once it is `ready`."""
        ...

    def close(self) -> None:
        """No answer after it returns. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class _HeldWrite:
    """The arguments of a `write` that waits."""

    transport: str
    peer: RankId
    epoch: int
    tag: int
    blocks: Sequence[CopyBlock]


class LocalRank:
    """A rank whose pool lies in this process.

    `transports` makes each transport that is offered, by its name, from a sink for events; `digester` what
    hashes, from the memory and a sink for answers. Blocking calls run in `threads`.
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
        self.checksums: Sequence[str] = checksum_kinds(memory)
        self._index = index
        self._owner: RankOwner | None = None
        self._io: Io | None = None
        self._threads = threads
        #: by epoch: writes that wait until their KV is ready
        self._held: dict[int, dict[ReadyEvent, list[_HeldWrite | ComputeChecksum]]] = {}
        self._closed = False
        self._by_name: dict[str, Transport] = {}
        try:
            for name, make in transports.items():
                self._by_name[name] = make(partial(self._moved, name))
            self.endpoints = {
                name: msgspec.msgpack.encode(transport.register(memory))
                for name, transport in self._by_name.items()
            }
            if len(self._by_name) > 1:  # a library that still loads must not look like one that fails
                for transport in self._by_name.values():
                    transport.loaded(LOAD_S)
        except BaseException:
            for transport in self._by_name.values():
                transport.close()
            raise
        self._digester = digester(memory, self._hashed)

    async def start(self, owner: RankOwner, io: Io) -> None:
        """See `Rank.start`."""
        self._owner = owner
        self._io = io
        self._digester.start()

    async def connect(self, transport: str, peer: RankId, endpoint: bytes, timeout_s: float) -> None:
        """See `Rank.connect`."""
        try:
            known = msgspec.msgpack.decode(endpoint, type=Endpoint)
        except DECODE_ERRORS as exc:
            raise TransferFailed(f"unreadable endpoint: {exc}") from exc
        connect = self._by_name[transport].connect
        await asyncio.get_running_loop().run_in_executor(self._threads, connect, peer, known, timeout_s)

    def write(
        self,
        transport: str,
        peer: RankId,
        epoch: int,
        tag: int,
        blocks: Sequence[CopyBlock],
        ready: ReadyEvent | None = None,
    ) -> None:
        """See `Transport.write`."""
        if ready is not None and not ready.over:
            self._hold(ready, epoch, _HeldWrite(transport, peer, epoch, tag, blocks))
        elif ready is not None and ready.error is not None:
            self._moved(transport, WriteFailed(peer, epoch, tag, ready.error))
        else:
            self._by_name[transport].write(peer, epoch, tag, blocks)

    def grant(
        self, transport: str, peer: RankId, epoch: int, pages: Sequence[int], slot: int | None = None
    ) -> bool:
        """See `Transport.grant`; the area is all of `pages`, and the `slot`."""
        self._by_name[transport].grant(peer, epoch, whole_pages(self.spec, pages, slot))
        return True

    def fence(self, transport: str, peer: RankId, epoch: int) -> None:
        """See `Transport.fence`. Writes that are not ready fail before the fence is answered."""
        self._drop(transport, peer, epoch)
        self._by_name[transport].fence(peer, epoch)

    def checksum(self, effect: ComputeChecksum) -> None:
        """Hash what `effect` names, now or soon."""
        if effect.ready is None:
            self._digester.submit(effect)
        elif effect.ready.over:
            self._hash_soon(effect)
        else:
            self._hold(effect.ready, effect.epoch, effect)

    # ---- what waits until its KV is ready ----------------------------------------------------------

    def _hold(self, ready: ReadyEvent, epoch: int, item: _HeldWrite | ComputeChecksum) -> None:
        """Raises OutOfCapacity."""
        if self._io is None:
            raise Internal("a rank that was not started")
        held = self._held.setdefault(epoch, {})
        if sum(map(len, held.values())) >= MAX_HELD:
            raise OutOfCapacity(f"{MAX_HELD} writes of one hand-off wait until their KV is ready")
        if ready not in held:
            held[ready] = []
            ready.then(partial(self._io.post, self._now, ready, epoch))
        held[ready].append(item)

    def _now(self, ready: ReadyEvent, epoch: int) -> None:
        """The moment has come, or never will."""
        held = self._held.get(epoch, {})
        items = held.pop(ready, [])
        if not held:
            self._held.pop(epoch, None)
        if self._closed:
            return
        for item in items:
            if isinstance(item, ComputeChecksum):
                self._hash_soon(item)
                continue
            try:
                self.write(item.transport, item.peer, item.epoch, item.tag, item.blocks, ready)
            except Exception as exc:
                error = typed(exc, "posting what has become ready")
                self._moved(item.transport, WriteFailed(item.peer, item.epoch, item.tag, error))

    def _hash_soon(self, effect: ComputeChecksum) -> None:
        """After all writes: hashing holds the interpreter's lock."""
        if self._io is None:
            raise Internal("a rank that was not started")
        self._io.loop.call_soon(self._hash, effect)

    def _hash(self, effect: ComputeChecksum) -> None:
        if self._closed:
            return
        if effect.ready is not None and effect.ready.error is not None:
            self._hashed(_no_checksum(effect, effect.ready.error))
            return
        try:
            self._digester.submit(effect)
        except Exception as exc:
            self._hashed(_no_checksum(effect, typed(exc, "hashing what has become ready")))

    def _drop(self, transport: str, peer: RankId, epoch: int) -> None:
        """Fail what of `epoch` for `peer` waits, and its checksums."""
        held = self._held.pop(epoch, {})
        left: dict[ReadyEvent, list[_HeldWrite | ComputeChecksum]] = {}
        for ready, items in held.items():
            for item in items:
                if isinstance(item, ComputeChecksum):
                    self._hashed(_no_checksum(item, fenced(epoch)))
                elif (item.transport, item.peer) == (transport, peer):
                    self._moved(transport, WriteFailed(peer, epoch, item.tag, fenced(epoch)))
                else:
                    left.setdefault(ready, []).append(item)
        if left:
            self._held[epoch] = left

    def close(self) -> None:
        """End the digester first, so that no answer asks anything of transports that are closed."""
        self._closed = True
        self._digester.close()
        for transport in self._by_name.values():
            transport.close()

    def _moved(self, name: str, event: TransportEvent) -> None:
        if self._owner is not None:
            self._owner.moved(self._index, name, event)

    def _hashed(self, answer: ChecksumReady) -> None:
        if self._owner is not None:
            self._owner.hashed(answer)


def _no_checksum(effect: ComputeChecksum, error: SegueError) -> ChecksumReady:
    return ChecksumReady(effect.transfer, effect.rank, effect.tag, 0, error.info)


def local_rank(config: KVConfig, memory: Memory, runtime: LeaderRuntime, index: int = 0) -> LocalRank:
    """The rank `index` of a replica in this process, over `memory`, laid out as `config.spec` says. `runtime`
    is `HOST` but in the simulator. Raises ConfigError for a transport that does not work here, and for
    `memory` that does not fit."""
    options = TransportOptions(
        me=RankId(config.me, index),
        host=config.host,
        port=config.transport_port,
        advertise=config.advertise,
        advertise_port=config.advertise_transport_port,
        limits=config.limits,
        tls=config.tls,
        staging_bytes=config.staging_bytes,
    )

    def transport(name: str) -> Callable[[EventSink], Transport]:
        return lambda on_event: runtime.transports.create(name, on_event, options)

    return LocalRank(
        index,
        config.spec,
        memory,
        {name: transport(name) for name in runtime.transports.for_memory(config.transports, memory)},
        lambda memory, answer: runtime.digester(memory, answer, config.limits.max_transfers),
        runtime.connecting("segue-connect"),
    )
