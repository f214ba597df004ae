"""A rank's own process: carries out what the leader asks of it over the link, with a `LocalRank`."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from segue.kv.errors import ErrorInfo, Internal, SegueError, TransferFailed
from segue.kv.ids import RankId
from segue.kv.protocol.events import ChecksumReady, ComputeChecksum
from segue.kv.ranks import rank_wire as wire
from segue.kv.ranks.local_rank import FENCE_AGAIN_S, LocalRank
from segue.kv.ranks.rank_link import RankLink
from segue.kv.ready import ReadyEvent
from segue.kv.session.tasks import background, typed
from segue.kv.threads import ThreadPerCall, Waits
from segue.kv.transport.base import TransportEvent, WriteFailed


class RankWorker:
    """A rank in a process of its own: carries out on `rank` (`local_rank`) what the leader asks over `link`,
    at whose other end is a `WorkerRank`. It runs on the link's thread, so the thread of the engine may
    compute meanwhile. The link's `limits` must be those of the leader.

    `leader_gone` is called once, on that thread, when the leader has closed the link or died: nothing will be
    asked any more, and the process should `close` and end. `threads` run what `signal` waits for.
    """

    def __init__(
        self,
        rank: LocalRank,
        link: RankLink,
        leader_gone: Callable[[SegueError], None],
        threads: Executor | None = None,
    ) -> None:
        self._rank = rank
        self._link = link
        self._leader_gone = leader_gone
        self._closed = False
        self._waits = Waits(threads or ThreadPerCall("segue-ready"))
        #: moments that a write waits for, and that somebody still has; and those that have come or are waited
        #: for here, until the leader knows
        self._moments: WeakValueDictionary[int, ReadyEvent] = WeakValueDictionary()
        self._signalled: dict[int, ReadyEvent] = {}
        # Nothing of this worker: the link may stay open, and would keep the pool.
        self._moment = link.ready_event = partial(_moment, self._moments, self._waits)

    def start(self) -> None:
        """Tell the leader what this rank has, and serve. Raises TimeoutError after `limits.connect_s`."""
        self._link.io.call(self._start(), self._link.limits.connect_s)

    async def _start(self) -> None:
        self._link.attach(self._asked, self._ended)
        await self._rank.start(self, self._link.io)
        rank = self._rank
        self._say(wire.ReadyAnswer(rank.spec, dict(rank.endpoints), tuple(rank.checksums)))

    def signal(self, number: int, wait: Callable[[], object] | None = None) -> None:
        """The KV of the chunks that the leader sends at the moment `number` (`ReadyEvent.number`) is complete
        in the pool of this rank, or will be once `wait` returns, as in `ReadyEvent.signal`. From any
        thread."""
        self._link.io.post(self._signal, number, wait)

    def _signal(self, number: int, wait: Callable[[], object] | None) -> None:
        if self._closed or number in self._signalled:
            return
        ready = self._signalled[number] = self._moment(number)
        ready.then(lambda: self._link.io.post(self._told_leader, ready))
        ready.signal(wait)

    def fail(self, error: SegueError) -> None:
        """The pool of this rank cannot be relied on any more: its leader ends all hand-offs. From any
        thread."""
        self._link.io.post(self._broken, error)

    def _told_leader(self, ready: ReadyEvent) -> None:
        self._say(wire.SignalledAnswer(ready.number, None if ready.error is None else ready.error.info))

    def close(self) -> None:
        """End the transports, and only then the link, if it carries nothing else: its end says that nothing
        is written any more."""
        try:
            self._rank.close()
        finally:
            self._closed = True
            self._link.release()

    # ---- what the leader asks --------------------------------------------------------------------

    def _asked(self, command: wire.Command) -> None:
        if self._closed:
            return  # a leader's before
        try:
            self._do(command)
        except Exception as exc:
            self._refuse(command, typed(exc, f"carrying out {type(command).__name__}"))

    def _do(self, command: wire.Command) -> None:
        match command:
            case wire.ConnectCommand(number, transport, peer, endpoint, timeout_s):
                connecting = self._rank.connect(transport, peer, endpoint, timeout_s)
                what = f"connecting to {peer}"
                background(self._answer(number, connecting, what), name=what, failed=self._broken)
            case wire.WriteCommand(transport, peer, epoch, number, blocks, ready):
                self._rank.write(transport, peer, epoch, number, blocks, ready)
            case wire.GrantCommand(transport, peer, epoch, pages, slot):
                self._rank.grant(transport, peer, epoch, pages, slot)
                self._say(wire.GrantAnswer(peer, epoch))
            case wire.FenceCommand(transport, peer, epoch):
                self._rank.fence(transport, peer, epoch)
            case ComputeChecksum():
                self._rank.checksum(command)
            case wire.ForgetCommand(number):
                self._signalled.pop(number, None)
            case _:
                raise TransferFailed(f"{type(command).__name__} is not for a rank")

    async def _answer(self, number: int, work: Coroutine[Any, Any, None], what: str) -> None:
        """Answer the command `number` once `work` has ended."""
        error = None
        try:
            await work
        except Exception as exc:
            error = typed(exc, what).info
        self._say(wire.DoneAnswer(number, error))

    def _refuse(self, command: wire.Command, error: SegueError) -> None:
        """The command failed, and its hand-off ends; a fence is repeated until it succeeds."""
        match command:
            case wire.WriteCommand(transport, peer, epoch, number):
                self._say(wire.MovedAnswer(transport, WriteFailed(peer, epoch, number, error)))
            case ComputeChecksum(transfer, rank, tag):
                self._say(ChecksumReady(transfer, rank, tag, 0, error.info))
            case wire.GrantCommand(_, peer, epoch):
                self._say(wire.GrantAnswer(peer, epoch, error.info))
            case wire.ConnectCommand(number):
                self._say(wire.DoneAnswer(number, error.info))
            case wire.FenceCommand():
                self._link.io.loop.call_later(FENCE_AGAIN_S, self._asked, command)
            case _:
                self._broken(error)

    def _broken(self, error: SegueError) -> None:
        self._say(wire.FailedAnswer(error.info))

    def _ended(self, error: SegueError, over: bool) -> None:
        if over:
            self._leader_gone(error)

    # ---- what the rank answers (RankOwner; on any thread) ----------------------------------------

    def moved(self, rank: int, transport: str, event: TransportEvent) -> None:
        """See `RankOwner.moved`."""
        self._link.io.post(self._say, wire.MovedAnswer(transport, event))

    def granted(self, rank: int, peer: RankId, epoch: int, error: ErrorInfo | None = None) -> None:
        """See `RankOwner.granted`; a rank of this process grants at once."""
        raise Internal(f"rank {rank} of this process has granted twice")

    def hashed(self, answer: ChecksumReady) -> None:
        """See `RankOwner.hashed`."""
        self._link.io.post(self._say, answer)

    def signalled(self, rank: int, number: int, error: ErrorInfo | None) -> None:
        """See `RankOwner.signalled`; a rank of this process has no process of its own."""
        raise Internal(f"rank {rank} of this process has signalled {number}")

    def lost(self, rank: int, error: SegueError) -> None:
        """See `RankOwner.lost`; a rank of this process is not lost before the process."""
        raise Internal(f"rank {rank} of this process is lost: {error}")

    def _say(self, answer: wire.Answer) -> None:
        if not self._closed:  # or it would be taken for one of the rank that begins next
            self._link.send(answer)


def _moment(moments: WeakValueDictionary[int, ReadyEvent], waits: Waits, number: int) -> ReadyEvent:
    ready = moments.get(number)
    if ready is None:
        ready = moments[number] = ReadyEvent(number, waits)
    return ready
