"""A rank in a process of its own, as its leader sees it: the same seam, over a local channel.

A worker closes its end of the channel only after its transports, and a process that dies closes it too.
So the end of the channel proves that the worker writes and hashes no more; and its pool is gone with it: what
lands there is never read, for the replica cannot serve without it. Silence proves nothing: the writes are
given up, and the fences stay open until the channel has ended.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from collections.abc import Sequence

from segue.kv.errors import (
    BootstrapTimeout,
    ErrorInfo,
    Internal,
    PeerLost,
    SegueError,
    TransferFailed,
)
from segue.kv.ids import RankId
from segue.kv.io import Io
from segue.kv.layout.blocks import CopyBlock
from segue.kv.limits import Limits
from segue.kv.path_figures import PathFigures
from segue.kv.protocol.events import ChecksumReady, ComputeChecksum
from segue.kv.ranks import rank_wire as wire
from segue.kv.ranks.local_rank import RankOwner
from segue.kv.ranks.rank_channel import RankChannel
from segue.kv.transport.base import Fenced, PeerGone, WriteFailed, Written
from segue.kv.transport.probe import PageShape, Scratch


class WorkerRank:
    """The rank `index` of a leader, in another process: see `Rank`. `sock` is our end of a socket pair whose
    other end a `RankWorker` has. The constructor waits for the worker's first message, at most
    `limits.connect_s`; it raises BootstrapTimeout, or TransferFailed for a worker that has died.

    At most `limits.max_session_backlog_bytes` wait for a worker that does not read. A worker that sends
    nothing for `limits.peer_silence_s` counts as lost.
    """

    def __init__(self, index: int, sock: socket.socket, limits: Limits) -> None:
        ready = _first_words(index, sock, limits.connect_s)
        self.spec = ready.spec
        self.endpoints = ready.endpoints
        self.scratch = ready.scratch
        self._index = index
        self._sock = sock
        self._limits = limits
        self._owner: RankOwner | None = None
        self._channel: RankChannel | None = None
        self._io: Io | None = None
        self._error: SegueError | None = None
        self._over = False
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[PathFigures | None]] = {}
        self._writes: set[tuple[str, RankId, int, int]] = set()
        self._fences: dict[tuple[str, RankId, int], None] = {}
        self._checksums: dict[tuple[object, int], ComputeChecksum] = {}

    async def start(self, owner: RankOwner, io: Io) -> None:
        """See `Rank.start`."""
        self._owner = owner
        self._io = io
        self._channel = channel = RankChannel(
            f"the worker of rank {self._index}",
            wire.Frames(wire.Answer),
            self._answered,
            self._ended,
            backlog_bytes=self._limits.max_session_backlog_bytes,
            ping_s=self._limits.keepalive_s,
            silence_s=self._limits.peer_silence_s,
        )
        await self._io.loop.create_connection(lambda: channel, sock=self._sock)

    # ---- what it is asked ------------------------------------------------------------------------

    async def connect(self, transport: str, peer: RankId, endpoint: bytes, timeout_s: float) -> None:
        """See `Rank.connect`."""
        number = next(self._numbers)
        await self._ask(number, wire.ConnectCommand(number, transport, peer, endpoint, timeout_s), timeout_s)

    async def admit(self, transports: Sequence[str], peer: RankId, epoch: int) -> None:
        """See `Rank.admit`."""
        number = next(self._numbers)
        await self._ask(number, wire.AdmitCommand(number, list(transports), peer, epoch), 0.0)

    async def measure(
        self, transport: str, peer: RankId, epoch: int, theirs: Scratch, shape: PageShape, timeout_s: float
    ) -> PathFigures:
        """See `Rank.measure`."""
        number = next(self._numbers)
        command = wire.MeasureCommand(number, transport, peer, epoch, theirs, shape, timeout_s)
        figures = await self._ask(number, command, timeout_s)
        if figures is None:
            raise Internal(f"the worker of rank {self._index} has measured nothing and says not why")
        return figures

    async def _ask(self, number: int, command: wire.Command, timeout_s: float) -> PathFigures | None:
        """Ask what the worker answers within `timeout_s`; one that does not is waited for a little longer."""
        if self._error is not None:
            raise self._error
        answer: asyncio.Future[PathFigures | None]
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            self._say(command)
            async with asyncio.timeout(timeout_s + self._limits.peer_silence_s):
                return await answer
        except TimeoutError:
            raise BootstrapTimeout(
                f"the worker of rank {self._index} has not answered {type(command).__name__} in time"
            ) from None
        finally:
            del self._asked[number]

    def write(self, transport: str, peer: RankId, epoch: int, tag: int, blocks: Sequence[CopyBlock]) -> None:
        """See `Transport.write`."""
        if self._error is not None:
            self._moved(transport, WriteFailed(peer, epoch, tag, self._error))
            return
        self._say(wire.WriteCommand(transport, peer, epoch, tag, list(blocks)))
        self._writes.add((transport, peer, epoch, tag))

    def grant(
        self, transport: str, peer: RankId, epoch: int, pages: Sequence[int], slot: int | None = None
    ) -> bool:
        """See `Rank.grant`."""
        if self._error is not None:
            raise self._error
        self._say(wire.GrantCommand(transport, peer, epoch, list(pages), slot))
        return False

    def fence(self, transport: str, peer: RankId, epoch: int) -> None:
        """See `Transport.fence`."""
        if self._over:
            self._moved(transport, Fenced(peer, epoch, True))
            return
        self._fences[transport, peer, epoch] = None
        self._say(wire.FenceCommand(transport, peer, epoch))

    def checksum(self, effect: ComputeChecksum) -> None:
        """Have the worker hash what `effect` names."""
        if self._error is not None:
            raise self._error
        self._say(wire.ChecksumCommand(effect.transfer, effect.rank, effect.tag, effect.content))
        self._checksums[effect.transfer, effect.tag] = effect

    def close(self) -> None:
        """End the channel, upon which the worker ends its transports. Idempotent."""
        self._owner = None
        if self._channel is None or self._io is None:
            self._sock.close()
        elif not self._io.loop.is_closed():
            self._io.call(self._hang_up(self._channel), self._limits.connect_s)

    async def _hang_up(self, channel: RankChannel) -> None:
        channel.close()
        await channel.closed(self._limits.connect_s / 2)

    # ---- what it answers -------------------------------------------------------------------------

    def _answered(self, answer: wire.Answer) -> None:
        match answer:
            case wire.LandedAnswer(transport, peer, epoch, number, nbytes, seconds):
                self._settle(transport, peer, epoch, number)
                self._moved(transport, Written(peer, epoch, number, nbytes, seconds))
            case wire.BrokenAnswer(transport, peer, epoch, number, error, refused):
                self._settle(transport, peer, epoch, number)
                self._moved(transport, WriteFailed(peer, epoch, number, error.exception(), refused))
            case wire.GrantAnswer(peer, epoch, error):
                if self._owner is not None:
                    self._owner.granted(self._index, peer, epoch, error)
            case wire.FenceAnswer(transport, peer, epoch, proven):
                self._fences.pop((transport, peer, epoch), None)
                self._moved(transport, Fenced(peer, epoch, proven))
            case wire.PeerGoneAnswer(transport, peer, proven, error):
                self._moved(transport, PeerGone(peer, proven, error.exception()))
            case wire.ChecksumAnswer(transfer, rank, number, checksum, error):
                self._checksums.pop((transfer, number), None)
                self._hashed(ChecksumReady(transfer, rank, number, checksum, error))
            case wire.DoneAnswer(number, figures, error):
                self._told(number, figures, error)
            case wire.FailedAnswer(error):
                self._give_up(error.exception())

    def _told(self, number: int, figures: PathFigures | None, error: ErrorInfo | None) -> None:
        waiting = self._asked.get(number)
        if waiting is None or waiting.done():
            return
        if error is None:
            waiting.set_result(figures)
        else:
            waiting.set_exception(error.exception())

    def _settle(self, transport: str, peer: RankId, epoch: int, number: int) -> None:
        self._writes.discard((transport, peer, epoch, number))

    def _ended(self, reason: SegueError, over: bool) -> None:
        """The channel has ended (`over`), or its worker is not heard any more."""
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
            self._told(number, None, reason.info)
        writes, self._writes = self._writes, set()
        for transport, peer, epoch, tag in sorted(writes):
            self._moved(transport, WriteFailed(peer, epoch, tag, reason))
        if self._owner is not None:
            self._owner.lost(self._index, reason)

    def _say(self, command: wire.Command) -> None:
        if self._channel is None:
            raise Internal(f"rank {self._index} was asked before it was started")
        self._channel.send(command)

    def _moved(self, transport: str, event: Written | WriteFailed | Fenced | PeerGone) -> None:
        if self._owner is not None:
            self._owner.moved(self._index, transport, event)

    def _hashed(self, answer: ChecksumReady) -> None:
        if self._owner is not None:
            self._owner.hashed(answer)


def _first_words(index: int, sock: socket.socket, timeout_s: float) -> wire.ReadyAnswer:
    """What a worker says of itself, read before the loop has the socket."""
    frames = wire.Frames(wire.Answer)
    ends_at = time.monotonic() + timeout_s
    while True:
        sock.settimeout(max(1e-3, ends_at - time.monotonic()))
        try:
            data = sock.recv(64 * 1024)
        except TimeoutError:
            raise BootstrapTimeout(
                f"the worker of rank {index} was not ready within {timeout_s:g} s"
            ) from None
        except OSError as exc:
            raise TransferFailed(f"the worker of rank {index} cannot be heard: {exc}") from exc
        if not data:
            raise PeerLost(f"the worker of rank {index} has ended before it was ready")
        for message in frames.feed(data):
            if not isinstance(message, wire.ReadyAnswer):
                raise TransferFailed(f"the worker of rank {index} began with {type(message).__name__}")
            sock.setblocking(False)
            return message
