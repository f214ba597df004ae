"""A rank's own process: carries out what the leader asks of it over the channel, with a `LocalRank`."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from typing import Any

from segue.kv.errors import ErrorInfo, Internal, SegueError
from segue.kv.ids import RankId
from segue.kv.io import Io
from segue.kv.limits import Limits
from segue.kv.path_figures import PathFigures
from segue.kv.protocol.events import ChecksumReady, ComputeChecksum
from segue.kv.ranks import rank_wire as wire
from segue.kv.ranks.local_rank import FENCE_AGAIN_S, LocalRank
from segue.kv.ranks.rank_channel import RankChannel
from segue.kv.session.tasks import background, typed
from segue.kv.transport.base import Fenced, PeerGone, TransportEvent, WriteFailed, Written


class RankWorker:
    """A rank in a worker process: carries out on `rank` (`local_rank`) what the leader asks over `sock`, a
    connected stream socket whose other end a `WorkerRank` has. It runs on `io`'s thread (`IoThread`), so the
    thread of the engine may compute meanwhile. `limits` must be those of the leader.

    `leader_gone` is called once, on that thread, when the leader has closed the channel or died: nothing will
    be asked any more, and the process should end.
    """

    def __init__(
        self,
        rank: LocalRank,
        sock: socket.socket,
        io: Io,
        limits: Limits,
        leader_gone: Callable[[SegueError], None],
    ) -> None:
        self._rank = rank
        self._sock = sock
        self._io = io
        self._limits = limits
        self._leader_gone = leader_gone
        self._channel: RankChannel | None = None

    def start(self) -> None:
        """Start `io`, tell the leader what this rank has, and serve. Raises TimeoutError after
        `limits.connect_s`."""
        self._io.start()
        self._io.call(self._start(), self._limits.connect_s)

    async def _start(self) -> None:
        channel = RankChannel(
            "the leader",
            wire.Frames(wire.Command),
            self._asked,
            self._ended,
            backlog_bytes=self._limits.max_session_backlog_bytes,
        )
        await asyncio.get_running_loop().create_connection(lambda: channel, sock=self._sock)
        self._channel = channel
        await self._rank.start(self, self._io)
        channel.send(wire.ReadyAnswer(self._rank.spec, dict(self._rank.endpoints), self._rank.scratch))

    def close(self) -> None:
        """End the transports, and only then the channel: its end says that nothing is written any more."""
        self._rank.close()
        try:
            if self._io.running:
                self._io.call(self._close(), self._limits.connect_s)
        finally:
            self._io.stop()

    async def _close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            await self._channel.closed(self._limits.connect_s / 2)

    # ---- what the leader asks --------------------------------------------------------------------

    def _asked(self, command: wire.Command) -> None:
        try:
            self._do(command)
        except Exception as exc:
            self._refuse(command, typed(exc, f"carrying out {type(command).__name__}"))

    def _do(self, command: wire.Command) -> None:
        match command:
            case wire.ConnectCommand(number, transport, peer, endpoint, timeout_s):
                connecting = self._rank.connect(transport, peer, endpoint, timeout_s)
                self._answer(number, connecting, f"connecting to {peer}")
            case wire.AdmitCommand(number, transports, peer, epoch):
                self._rank.admit_now(transports, peer, epoch)
                self._say(wire.DoneAnswer(number))
            case wire.MeasureCommand(number, transport, peer, epoch, scratch, shape, timeout_s):
                measuring = self._rank.measure(transport, peer, epoch, scratch, shape, timeout_s)
                self._answer(number, measuring, f"measuring {peer}")
            case wire.WriteCommand(transport, peer, epoch, number, blocks):
                self._rank.write(transport, peer, epoch, number, blocks)
            case wire.GrantCommand(transport, peer, epoch, pages, slot):
                self._rank.grant(transport, peer, epoch, pages, slot)
                self._say(wire.GrantAnswer(peer, epoch))
            case wire.FenceCommand(transport, peer, epoch):
                self._rank.fence(transport, peer, epoch)
            case wire.ChecksumCommand(transfer, rank, number, content):
                self._rank.checksum(ComputeChecksum(transfer, rank, number, content))

    def _answer(self, number: int, work: Coroutine[Any, Any, PathFigures | None], what: str) -> None:
        """Do what takes its time, and say what came of it."""

        async def answered() -> None:
            figures = error = None
            try:
                figures = await work
            except Exception as exc:
                error = typed(exc, what).info
            self._say(wire.DoneAnswer(number, figures, error))

        background(answered(), name=what, failed=self._broken)

    def _refuse(self, command: wire.Command, error: SegueError) -> None:
        """What was asked was not done, and its hand-off ends; but a fence is asked for until it is taken."""
        match command:
            case wire.WriteCommand(transport, peer, epoch, number):
                self._say(wire.BrokenAnswer(transport, peer, epoch, number, error.info, False))
            case wire.ChecksumCommand(transfer, rank, number):
                self._say(wire.ChecksumAnswer(transfer, rank, number, 0, error.info))
            case wire.GrantCommand(_, peer, epoch):
                self._say(wire.GrantAnswer(peer, epoch, error.info))
            case wire.ConnectCommand(number) | wire.AdmitCommand(number) | wire.MeasureCommand(number):
                self._say(wire.DoneAnswer(number, None, error.info))
            case wire.FenceCommand():
                self._io.loop.call_later(FENCE_AGAIN_S, self._asked, command)

    def _broken(self, error: SegueError) -> None:
        self._say(wire.FailedAnswer(error.info))

    def _ended(self, error: SegueError, over: bool) -> None:
        if over:
            self._leader_gone(error)

    # ---- what the rank answers (RankOwner; on any thread) ----------------------------------------

    def moved(self, rank: int, transport: str, event: TransportEvent) -> None:
        """See `RankOwner.moved`."""
        match event:
            case Written(peer, epoch, tag, nbytes, seconds):
                answer: wire.Answer = wire.LandedAnswer(transport, peer, epoch, tag, nbytes, seconds)
            case WriteFailed(peer, epoch, tag, error, refused):
                answer = wire.BrokenAnswer(transport, peer, epoch, tag, error.info, refused)
            case Fenced(peer, epoch, proven):
                answer = wire.FenceAnswer(transport, peer, epoch, proven)
            case PeerGone(peer, proven, error):
                answer = wire.PeerGoneAnswer(transport, peer, proven, error.info)
        self._io.post(self._say, answer)

    def granted(self, rank: int, peer: RankId, epoch: int, error: ErrorInfo | None = None) -> None:
        """See `RankOwner.granted`; a rank of this process grants at once."""
        raise Internal(f"rank {rank} of this process has granted twice")

    def hashed(self, answer: ChecksumReady) -> None:
        """See `RankOwner.hashed`."""
        said = wire.ChecksumAnswer(answer.transfer, answer.rank, answer.tag, answer.checksum, answer.error)
        self._io.post(self._say, said)

    def lost(self, rank: int, error: SegueError) -> None:
        """See `RankOwner.lost`; a rank of this process is not lost before the process."""
        raise Internal(f"rank {rank} of this process is lost: {error}")

    def _say(self, answer: wire.Answer) -> None:
        if self._channel is not None:
            self._channel.send(answer)
