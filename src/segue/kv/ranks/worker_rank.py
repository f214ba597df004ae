"""A rank in a process of its own, as its leader sees it: the same seam, over a link.

A worker closes its end of the link only after its transports, and a process that dies closes it too. So the
end of the link proves that the worker writes and hashes no more; and its pool is gone with it: what lands
there is never read, for the replica cannot serve without it. Silence proves nothing: the writes are given up,
and the fences stay open until the link has ended.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from functools import partial

from msgspec.structs import replace

from segue.kv.errors import (
    BootstrapTimeout,
    ErrorInfo,
    SegueError,
    TransferFailed,
)
from segue.kv.ids import RankId
from segue.kv.io import Io
from segue.kv.layout.blocks import CopyBlock
from segue.kv.protocol.events import ChecksumReady, ComputeChecksum
from segue.kv.ranks import rank_wire as wire
from segue.kv.ranks.local_rank import RankOwner
from segue.kv.ranks.rank_link import RankLink
from segue.kv.ready import ReadyEvent
from segue.kv.transport.base import Fenced, PeerGone, TransportEvent, WriteFailed


class WorkerRank:
    """The rank `index` of a leader, in another process: see `Rank`. At the other end of `link` is a
    `RankWorker`. The constructor waits for what that one says first, at most `limits.connect_s` of the link;
    it raises BootstrapTimeout, and PeerLost or TransferFailed for a process that has ended or says nonsense.

    A process that ends, or says nothing for `limits.peer_silence_s`, counts as lost (PeerLost).
    """

    def __init__(self, index: int, link: RankLink) -> None:
        ready = link.ready()
        self.spec = ready.spec
        self.endpoints = ready.endpoints
        self.checksums = ready.checksums
        self._index = index
        self._link = link
        self._owner: RankOwner | None = None
        self._io: Io | None = None
        self._error: SegueError | None = None
        self._over = False
        self._send: Callable[[wire.Command], None] = link.post
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[None]] = {}
        self._writes: set[tuple[str, RankId, int, int]] = set()
        self._fences: dict[tuple[str, RankId, int], None] = {}
        self._checksums: dict[tuple[object, int], ComputeChecksum] = {}

    async def start(self, owner: RankOwner, io: Io) -> None:
        """See `Rank.start`."""
        self._owner = owner
        self._io = io
        link = self._link
        if io is link.io:
            self._send = link.send
            link.attach(self._answered, self._ended, ping=True)
        else:
            answered, ended = partial(io.post, self._answered), partial(io.post, self._ended)
            link.io.post(partial(link.attach, answered, ended, ping=True))  # before what is asked

    # ---- what it is asked ------------------------------------------------------------------------

    async def connect(self, transport: str, peer: RankId, endpoint: bytes, timeout_s: float) -> None:
        """See `Rank.connect`."""
        number = next(self._numbers)
        await self._ask(number, wire.ConnectCommand(number, transport, peer, endpoint, timeout_s), timeout_s)

    async def _ask(self, number: int, command: wire.Command, timeout_s: float) -> None:
        """Ask what the worker answers within `timeout_s`; one that does not is waited for a little longer."""
        if self._error is not None:
            raise self._error
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(command)
            async with asyncio.timeout(timeout_s + self._link.limits.peer_silence_s):
                await answer
        except TimeoutError:
            raise BootstrapTimeout(
                f"{self._link.name} has not answered {type(command).__name__} in time"
            ) from None
        finally:
            del self._asked[number]

    def write(
        self,
        transport: str,
        peer: RankId,
        epoch: int,
        tag: int,
        blocks: Sequence[CopyBlock],
        ready: ReadyEvent | None = None,
    ) -> None:
        """See `Rank.write`."""
        error = self._error or (None if ready is None else ready.error)
        if error is not None:
            self._moved(transport, WriteFailed(peer, epoch, tag, error))
            return
        self._send(wire.WriteCommand(transport, peer, epoch, tag, list(blocks), self._unsignalled(ready)))
        self._writes.add((transport, peer, epoch, tag))

    def grant(
        self, transport: str, peer: RankId, epoch: int, pages: Sequence[int], slot: int | None = None
    ) -> bool:
        """See `Rank.grant`."""
        if self._error is not None:
            raise self._error
        self._send(wire.GrantCommand(transport, peer, epoch, list(pages), slot))
        return False

    def fence(self, transport: str, peer: RankId, epoch: int) -> None:
        """See `Transport.fence`."""
        if self._over:
            self._moved(transport, Fenced(peer, epoch, True))
            return
        self._fences[transport, peer, epoch] = None
        self._send(wire.FenceCommand(transport, peer, epoch))

    def checksum(self, effect: ComputeChecksum) -> None:
        """Have the worker hash what `effect` names."""
        ready = effect.ready
        error = self._error or (None if ready is None else ready.error)
        if error is not None:
            raise error
        self._send(replace(effect, ready=self._unsignalled(ready)))
        self._checksums[effect.transfer, effect.tag] = effect

    def _unsignalled(self, ready: ReadyEvent | None) -> ReadyEvent | None:
        """A moment that the worker has not said to have come: it forgets those that it has."""
        return None if ready is None or self._index in ready.signalled_at else ready

    def close(self) -> None:
        """Ask nothing any more, and end the link if it carries nothing else. Idempotent."""
        self._owner = None
        self._link.release()

    # ---- what it answers -------------------------------------------------------------------------

    def _answered(self, answer: wire.Answer) -> None:
        match answer:
            case wire.MovedAnswer(transport, event):
                if isinstance(event, Fenced):
                    self._fences.pop((transport, event.peer, event.epoch), None)
                elif not isinstance(event, PeerGone):
                    self._writes.discard((transport, event.peer, event.epoch, event.tag))
                self._moved(transport, event)
            case wire.GrantAnswer(peer, epoch, error):
                if self._owner is not None:
                    self._owner.granted(self._index, peer, epoch, error)
            case ChecksumReady(transfer, _, tag):
                self._checksums.pop((transfer, tag), None)
                self._hashed(answer)
            case wire.DoneAnswer(number, error):
                self._told(number, error)
            case wire.SignalledAnswer(number, error):
                if self._owner is not None and self._io is not None:
                    self._owner.signalled(self._index, number, error)
                    # Behind that: after all commands that name it.
                    self._io.post(self._send, wire.ForgetCommand(number))
            case wire.FailedAnswer(error):
                self._give_up(error.exception())
            case _:
                self._give_up(TransferFailed(f"{type(answer).__name__} is no answer of a rank"))

    def _told(self, number: int, error: ErrorInfo | None) -> None:
        waiting = self._asked.get(number)
        if waiting is None or waiting.done():
            return
        if error is None:
            waiting.set_result(None)
        else:
            waiting.set_exception(error.exception())

    def _ended(self, reason: SegueError, over: bool) -> None:
        """The link has ended (`over`), or its worker is not heard any more."""
        self._give_up(reason)
        if over and not self._over:
            self._over = True
            for transport, peer, epoch in list(self._fences):
                self._moved(transport, Fenced(peer, epoch, True))
            self._fences.clear()
            for effect in list(self._checksums.values()):
                self._hashed(ChecksumReady(effect.transfer, effect.rank, effect.tag, 0, reason.info))
            self._checksums.clear()

    def _give_up(self, reason: SegueError) -> None:
        if self._error is not None:
            return
        self._error = reason
        for number in list(self._asked):
            self._told(number, reason.info)
        writes, self._writes = self._writes, set()
        for transport, peer, epoch, tag in sorted(writes):
            self._moved(transport, WriteFailed(peer, epoch, tag, reason))
        if self._owner is not None:
            self._owner.lost(self._index, reason)

    def _moved(self, transport: str, event: TransportEvent) -> None:
        if self._owner is not None:
            self._owner.moved(self._index, transport, event)

    def _hashed(self, answer: ChecksumReady) -> None:
        if self._owner is not None:
            self._owner.hashed(answer)
