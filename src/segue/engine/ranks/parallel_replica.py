"""A replica of several ranks: the leader orders, every rank carries out the same orders in the same order.

The leader is rank 0 and computes its part on its own thread. It alone reads clocks, queues and peers, checks
steps and samples; the others decide nothing. Each order is one numbered frame, each rank answers it, and both
ends chain a hash over the frames: ranks that have carried out other orders are found at that very step.

An error on the way ends the replica: a group that has failed once is never used again.
"""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import torch

from segue.engine.engine_api import HostPages
from segue.engine.forward import RankForward, Stored, raised_at_end
from segue.engine.kvpool import HostKV, KVPool
from segue.engine.packing import Packed, pack
from segue.engine.ranks.collectives import STAGE_S, TIMEOUT_S
from segue.engine.ranks.rank_orders import (
    CopyInOrder,
    CopyOutOrder,
    DoneWord,
    FailedWord,
    ForwardOrder,
    OrderFrame,
    TellOrder,
    due,
)
from segue.kv import ErrorCode, ErrorInfo, Internal, PeerLost, RankDivergence, RankLink, SegueError
from segue.kv.session import typed

#: How long the leader looks for the cause once something has failed.
CAUSE_S = 1.0
_DIGEST_BYTES = 8


T = TypeVar("T")
_encoder = msgspec.msgpack.Encoder()


def _chained(digest: bytes, frame: OrderFrame) -> bytes:
    return hashlib.blake2b(digest + _encoder.encode(frame), digest_size=_DIGEST_BYTES).digest()


@dataclass(frozen=True, eq=False)
class RankPages:
    """`HostPages` of all ranks: the leader's own part, and the number by which the others know theirs."""

    own: HostKV
    copy: int
    nbytes: int


class RanksForward:
    """`Forward` of a whole replica: `own` is the leader's rank, `workers` lead to the others, rank 1 first;
    `page_bytes` is what one page takes in all pools together.

    One order at a time: pages are copied when the running forward has ended, whichever thread asks. `lost` is
    told once, on any thread, why nothing can be computed any more; whatever is asked after it raises the same
    error. No worker may take `patience_s` longer than the leader itself.
    """

    def __init__(
        self,
        own: RankForward,
        workers: Sequence[RankLink],
        page_bytes: int,
        lost: Callable[[SegueError], None],
        patience_s: float | None = None,
    ) -> None:
        self.own = own
        self._workers = workers
        self._page_bytes = page_bytes
        self._lost = lost
        self._patience_s = patience_s or (STAGE_S if own.place.pp is not None else TIMEOUT_S)
        self._number = 0
        self._digest = b""
        self._copies = 0
        self._dropped: deque[int] = deque()
        self._error: SegueError | None = None
        self._ordering = threading.Lock()

    @property
    def pool(self) -> KVPool:
        """See `Forward.pool`."""
        return self.own.pool

    def run(self, packed: Packed, stored: Stored) -> torch.Tensor:
        """See `Forward.run`. An exception of `stored` is raised when all ranks have done their part."""
        with raised_at_end(stored) as safely:

            def together() -> torch.Tensor:
                self._order(ForwardOrder([segment.step for segment in packed.segments]))
                hidden = self.own.run(packed, safely)
                self._done()
                return hidden

            with self._ordering:
                return self._safely(together)

    def along(self) -> None:
        """See `Forward.along`; no other DP rank computes with a replica of several ranks."""

    def copy_out(self, pages: Sequence[int], slot: int | None = None) -> RankPages:
        """See `Engine.copy_out`: every rank keeps its part in its own memory. No replica of several ranks has
        a model with slots."""
        self._copies += 1
        copy = self._copies
        try:
            own = self._on_all(CopyOutOrder(copy, list(pages)), lambda: self.own.copy_out(pages, slot))
        except Exception:
            self._dropped.append(copy)
            raise
        made = RankPages(own, copy, self._page_bytes * len(pages))
        weakref.finalize(made, self._dropped.append, copy).atexit = False
        return made

    def copy_in(self, host: HostPages, pages: Sequence[int], slot: int | None = None) -> None:
        """See `Engine.copy_in`."""
        if not isinstance(host, RankPages):
            raise Internal(f"not pages of this engine: {type(host).__name__}")
        self._on_all(CopyInOrder(host.copy, list(pages)), lambda: self.own.copy_in(host.own, pages, slot))

    def tell(self, words: bytes) -> None:
        """Have every other rank's `told` do what `words` say; what kept the first from it is raised when all
        have ended."""
        self._on_all(TellOrder(words), lambda: None)

    def _on_all(self, order: CopyOutOrder | CopyInOrder | TellOrder, act: Callable[[], T]) -> T:
        """Have the others do `order` while we `act`. An error of either is raised when all have ended."""
        with self._ordering:
            self._safely(lambda: self._order(order))
            try:
                return act()
            finally:
                if (error := self._safely(self._done)) is not None:
                    raise error.exception()

    def _safely(self, step: Callable[[], T]) -> T:
        try:
            return step()
        except Exception as exc:
            raise self._lose(exc) from exc

    # ---- orders and words ------------------------------------------------------------------------

    def _order(self, order: ForwardOrder | CopyOutOrder | CopyInOrder | TellOrder) -> None:
        if self._error is not None:
            raise self._error
        self._number += 1
        dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
        frame = OrderFrame(self._number, order, dropped)
        self._digest = _chained(self._digest, frame)
        for worker in self._workers:
            worker.post(frame)

    def _hear(self) -> list[DoneWord]:
        """The next word of every worker, which must be that it has carried out the running order."""
        words = []
        for rank, worker in enumerate(self._workers, 1):
            word = worker.receive(self._patience_s)
            if isinstance(word, FailedWord):
                raise _failure(rank, word)
            if not isinstance(word, DoneWord) or word.number != self._number:
                raise RankDivergence(f"at step {self._number} rank {rank} said {word}")
            words.append(word)
        return words

    def _done(self) -> ErrorInfo | None:
        """Wait until every worker has carried out the order; why the first could not, and goes on."""
        words = self._hear()
        for rank, word in enumerate(words, 1):
            if word.digest != self._digest:
                raise RankDivergence(
                    f"up to step {self._number} rank {rank} has carried out other orders than its leader gave"
                )
        return next((word.error for word in words if word.error is not None), None)

    # ---- the end ---------------------------------------------------------------------------------

    def _lose(self, exc: Exception) -> SegueError:
        if self._error is None:
            error = typed(exc, f"step {self._number} of a replica of several ranks")
            self._error = self._cause(error) if error.code is ErrorCode.PEER_LOST else error
            self._lost(self._error)
        return self._error

    def _cause(self, seen: SegueError) -> SegueError:
        """The reason why the group ended. The error that the leader sees is seldom the cause; another rank
        may know it."""
        ends = [f"rank 0: {seen}"]
        for rank, worker in enumerate(self._workers, 1):
            try:
                while not isinstance(word := worker.receive(CAUSE_S / len(self._workers)), FailedWord):
                    pass  # its earlier messages
            except SegueError as end:
                ends.append(f"rank {rank}: {end}")
                continue
            if word.error.code is not ErrorCode.PEER_LOST:
                return _failure(rank, word)
            ends.append(f"rank {rank}: {word.error.text}")
        return PeerLost(f"the ranks could not do step {self._number} together: {'; '.join(ends)}")


def _failure(rank: int, word: FailedWord) -> SegueError:
    text = f"rank {rank} failed at step {word.number}: {word.error.text}"
    return msgspec.structs.replace(word.error, text=text).exception()


# ---- the worker's side -------------------------------------------------------------------------------


def serve_rank(
    link: RankLink,
    forward: RankForward,
    told: Callable[[bytes], None],
    signal: Callable[[int], None] = lambda _: None,
) -> None:
    """Carry out the leader's orders, on this thread, until it ends the link; `told` gets the words of
    `RanksForward.tell`, `signal` the number of each moment (`SequenceStep.ready`) that has come. Raises what
    ends the rank, which the leader has been told."""
    copies: dict[int, HostKV] = {}
    digest, number = b"", 0
    while True:
        try:
            frame = link.receive()
        except PeerLost:
            return  # the leader has left, or died
        number, digest = number + 1, _chained(digest, frame)
        try:
            error = _carry_out(frame, number, forward, copies, told, signal)
        except Exception as exc:
            failed = typed(exc, f"step {number}")
            link.post(FailedWord(number, failed.info))
            raise failed from exc
        link.post(DoneWord(number, digest, error))


def _carry_out(
    frame: OrderFrame,
    number: int,
    forward: RankForward,
    copies: dict[int, HostKV],
    told: Callable[[bytes], None],
    signal: Callable[[int], None],
) -> ErrorInfo | None:
    """Do one order; why a copy could not be made, or what was told not be done. Raises what leaves the others
    alone with a step."""
    if frame.number != number:
        raise RankDivergence(f"order {frame.number} came where {number} was due")
    for copy in frame.dropped:
        copies.pop(copy, None)
    match frame.order:
        case ForwardOrder(steps):
            signalled: set[int] = set()

            def stored(layers: int | None = None) -> None:
                for number in [number for step in steps for number in due(step, layers)]:
                    if number not in signalled:
                        signalled.add(number)
                        signal(number)

            with torch.inference_mode():
                packed = pack(steps, {}, forward.pool.spec.page_tokens)
                forward.run(packed, stored)
        case other:
            try:
                match other:
                    case CopyOutOrder(copy, pages):
                        copies[copy] = forward.copy_out(pages)
                    case CopyInOrder(copy, pages):
                        forward.copy_in(copies[copy], pages)
                    case TellOrder(words):
                        told(words)
            except Exception as exc:
                return typed(exc, f"step {number}").info
    return None
