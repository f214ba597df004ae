"""The DP ranks of one instance that share out a model's experts: no rank computes a step without the others.

Each rank is the leader of a process of its own, with its own requests. A rank with something to compute says
so to the others (`StepBegins`) and waits for them in the step's first exchange. There each rank tells how
many rows it has, possibly none. Between steps nobody computes or asks: each leader waits for its own requests
and for such a message. Messages go in a star around rank 0, which passes them on; the tensors go over Gloo.

Ranks that have counted other steps, or other rows in any of them, find out at the next step. Any error, and
the end or silence of any rank before all have drained, ends the group for all of its ranks.
"""

from __future__ import annotations

import contextlib
import hashlib
import queue
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec
import torch

from segue.engine.ranks.collectives import TIMEOUT_S, TensorGroup, meeting_point
from segue.kv import (
    ErrorCode,
    ErrorInfo,
    Internal,
    IoThread,
    Limits,
    PeerLost,
    RankDivergence,
    SegueError,
)
from segue.kv.process_link import ProcessLink
from segue.kv.session import typed

#: For a rank to load its part of the model, from when the first one has.
LOAD_S = 600.0
#: How long a rank whose exchange has failed waits for the message of the rank that knows why.
CAUSE_S = 1.0


class RankLoaded(msgspec.Struct, frozen=True, tag=True):
    """To rank 0: this rank has loaded its part."""


class MeetingPoint(msgspec.Struct, frozen=True, tag=True):
    """From rank 0: all have loaded, and meet at this port of loopback."""

    port: int


class StepBegins(msgspec.Struct, frozen=True, tag=True):
    """The step with this number, counted from 1, is to be computed."""

    number: int


class RankDrained(msgspec.Struct, frozen=True, tag=True):
    """This rank drains and will have no rows any more; it still computes for the others."""

    rank: int


class GroupLost(msgspec.Struct, frozen=True, tag=True):
    """The group is over for this reason."""

    error: ErrorInfo


DpMessage = RankLoaded | MeetingPoint | StepBegins | RankDrained | GroupLost
M = TypeVar("M", RankLoaded, MeetingPoint)


class DpGroup:
    """One rank's end of the group. `identity` tells what it has loaded, and must be equal on all ranks.

    One step at a time. Messages arrive on a thread of its own. Once `listen` was called, a rank that says
    nothing for `peer_silence_s` is lost (a stopped process, say), whether or not there is a step.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        sockets: Sequence[socket.socket],
        identity: str,
        timeout_s: float = TIMEOUT_S,
        limits: Limits | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        #: the rows of each rank in the running step, and which of them all are ours
        self.rows: list[int] = [0] * size
        self.own = slice(0, 0)
        self._timeout_s = timeout_s
        self._number = 0
        self._awaited = 0
        self._digest = _chained(b"", f"{size} {identity}".encode())
        self._drained: set[int] = set()
        self._gloo: TensorGroup | None = None
        self._error: SegueError | None = None
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._closed = self._listened = False
        self._wake: Callable[[], None]
        self._leave: Callable[[], None]
        self._on_lost: Callable[[SegueError], None]
        self.stop_listening()
        #: messages for `meet`; None once the group is over
        self._met: queue.SimpleQueue[RankLoaded | MeetingPoint | None] = queue.SimpleQueue()
        self._io = IoThread()
        self._io.start()
        self._links: dict[int, ProcessLink] = {}
        for peer, sock in enumerate(sockets, 1 if rank == 0 else 0):
            name = f"DP rank {peer} of this instance"
            received, ended = partial(self._received, peer), partial(self._link_ended, peer)
            self._links[peer] = ProcessLink(
                sock, name, DpMessage, limits=limits, io=self._io, received=received, ended=ended
            )

    # ---- the start -------------------------------------------------------------------------------

    def meet(self, within_s: float = LOAD_S) -> None:
        """Wait until all have loaded, then connect. Raises PeerLost, and RankDivergence if they have
        loaded different models."""
        if self.rank == 0:
            for _ in self._links:
                self._next(RankLoaded, within_s)
            store = meeting_point(timeout_s=self._timeout_s)
            self._send(MeetingPoint(store.port))
        else:
            self._send(RankLoaded())
            store = meeting_point(self._next(MeetingPoint, within_s).port, self._timeout_s)
        self._gloo = TensorGroup(store, "dp", self.rank, self.size, self._timeout_s)
        self._agree(0)

    def listen(
        self, wake: Callable[[], None], leave: Callable[[], None], lost: Callable[[SegueError], None]
    ) -> None:
        """See `ExpertPeers.listen`."""
        with self._lock:
            self._wake, self._leave, self._on_lost = wake, leave, lost
            error = self._error
        # The group may have learned these while nobody listened.
        if error is not None:
            lost(error)
        elif self._drained:
            leave()
        wake()
        if not self._listened:
            self._listened = True
            for link in self._links.values():
                self._io.post(link.watch)

    def stop_listening(self) -> None:
        """See `ExpertPeers.stop_listening`."""
        with self._lock:
            self._wake, self._leave, self._on_lost = _nothing, _nothing, lambda _: None

    # ---- steps -----------------------------------------------------------------------------------

    @property
    def behind(self) -> bool:
        """See `ExpertPeers.behind`."""
        return self._awaited > self._number and self._error is None

    @contextlib.contextmanager
    def step(self, rows: int) -> Iterator[None]:
        """One step of all ranks, to which this one brings `rows`. An error within it ends the group. Raises
        this error, or the one that ended the group before."""
        try:
            self._begin(rows)
            yield
        except Exception as exc:
            error = self._lose(self._cause(typed(exc, f"step {self._number} of a DP group")))
            if self._gloo is not None:
                self._gloo.close()  # wakes the ranks that wait for ours in an exchange
            raise error from exc

    def _begin(self, rows: int) -> None:
        if self._error is not None:
            raise self._error
        self._number += 1
        if self._awaited < self._number:
            self._send(StepBegins(self._number))
        self.rows = self._agree(rows)
        first = sum(self.rows[: self.rank])
        self.own = slice(first, first + rows)
        self._digest = _chained(self._digest, repr((self._number, self.rows)).encode())

    def _agree(self, rows: int) -> list[int]:
        """The rows of each rank. Raises RankDivergence on every rank if one is at another step, or has come
        there another way."""
        assert self._gloo is not None
        digest = int.from_bytes(self._digest, signed=True)
        own = torch.tensor([[self._number, digest, rows]])
        found = [part[0].tolist() for part in self._gloo.gather(own, [1] * self.size)]
        for rank, (number, theirs, _) in enumerate(found):
            if (number, theirs) != (self._number, digest):
                raise RankDivergence(
                    f"at step {self._number} of DP rank {self.rank}, rank {rank} is at step {number} and has "
                    f"computed {'the same' if theirs == digest else 'another model or other steps'} before"
                )
        return [count for _, _, count in found]

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """The rows of every rank in this step, of which this one has `x`."""
        assert self._gloo is not None
        return self._gloo.gather(x, self.rows)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """See `TensorGroup.sum`."""
        assert self._gloo is not None
        return self._gloo.sum(x)

    def done(self) -> bool:
        """See `ExpertPeers.done`."""
        if self.rank not in self._drained:
            self._drained.add(self.rank)
            self._send(RankDrained(self.rank))
        return self._error is not None or self._all_drained

    # ---- messages --------------------------------------------------------------------------------

    def _send(self, message: DpMessage, but: int | None = None) -> None:
        """Send to every rank that we have a link to, but to `but`."""
        for peer, link in self._links.items():
            if peer != but:
                link.post(message)

    def _next(self, kind: type[M], within_s: float) -> M:
        try:
            message = self._met.get(timeout=within_s)
        except queue.Empty:
            raise PeerLost(f"another DP rank has not started within {within_s:g} s") from None
        if self._error is not None:
            raise self._error
        if not isinstance(message, kind):
            raise Internal(f"another DP rank sent {message} where a {kind.__name__} was due")
        return message

    def _received(self, peer: int, message: Any) -> None:
        match message:
            case RankLoaded() | MeetingPoint():
                self._met.put(message)
                return
            case StepBegins(number):
                self._awaited = max(self._awaited, number)
                self._wake()
            case RankDrained(rank):
                self._drained.add(rank)
                self._leave()
                self._wake()
            case GroupLost(error):
                self._lose(error.exception())
                return  # it has sent that to all
        if self.rank == 0:
            self._send(message, but=peer)

    def _link_ended(self, peer: int, reason: SegueError, _over: bool) -> None:
        if not self._closed and not self._all_drained:
            self._lose(
                PeerLost(f"{reason.info.text}; the experts of DP rank {peer} are needed in every step")
            )

    @property
    def _all_drained(self) -> bool:
        return len(self._drained) == self.size

    # ---- the end ---------------------------------------------------------------------------------

    def _cause(self, seen: SegueError) -> SegueError:
        """The reason why the group ended. The error that a rank sees is seldom the cause; a rank that knows
        more sends it."""
        if seen.code is ErrorCode.PEER_LOST and self._listened:
            self._ended.wait(CAUSE_S)
        return seen

    def _lose(self, error: SegueError) -> SegueError:
        """The group is over; why."""
        with self._lock:
            first, on_lost = self._error is None, self._on_lost
            self._error = self._error or error
        if first:
            self._send(GroupLost(error.info))
            self._ended.set()
            self._met.put(None)
            on_lost(error)
        return self._error

    def close(self) -> None:
        """Leave; the others hear so. Idempotent."""
        self._closed = True
        for link in self._links.values():
            link.close()
        self._io.stop()


def _chained(digest: bytes, more: bytes) -> bytes:
    return hashlib.blake2b(digest + more, digest_size=8).digest()


def _nothing() -> None:
    pass
