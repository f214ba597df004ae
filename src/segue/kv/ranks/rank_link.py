"""The link between a leader and the process of one of its ranks.

Two kinds of messages go over it, each in the order in which it was sent. Messages of the hand-off
(`rank_wire`) are handled on the link's thread, while the engine computes. Messages of the engine, if it has
any, wait until one of its threads takes them with `receive`.
"""

from __future__ import annotations

import queue
import socket
from typing import Any

from segue.kv.errors import BootstrapTimeout, PeerLost, SegueError
from segue.kv.io import Io
from segue.kv.limits import Limits
from segue.kv.process_link import ProcessLink
from segue.kv.ranks import rank_wire as wire

#: Limit of the engine's messages; the other end waits for an answer after one or two.
MAX_WAITING = 64


class RankLink(ProcessLink):
    """One end of the link between a leader and the process of one of its ranks, over `sock`: a connected
    stream socket, which the link closes. Errors call the other end `name`. A `WorkerRank` takes the leader's
    end, a `RankWorker` that of the rank.

    `messages` is the union of the tagged msgspec structs that the engine sends over it beside, if any: `post`
    and `receive` are its calls. Both ends need the same. Such a link stays open when its `WorkerRank` or
    `RankWorker` closes, and may then have another one; a link without `messages` closes with it.

    At most `limits.max_session_backlog_bytes` wait for another end that does not read. `io` is the thread
    that it lives on, by default one of its own.
    """

    def __init__(
        self,
        sock: socket.socket,
        name: str,
        *,
        limits: Limits | None = None,
        messages: Any = None,
        io: Io | None = None,
    ) -> None:
        #: before the first message arrives, which is while the base class is made
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._ready: queue.SimpleQueue[wire.ReadyAnswer | None] = queue.SimpleQueue()
        self._lasting = messages is not None
        kinds = wire.HandOff if messages is None else wire.HandOff | messages
        super().__init__(sock, name, kinds, limits=limits, io=io)

    def receive(self, within_s: float | None = None) -> Any:
        """The next of the engine's messages; without `within_s` it waits until the link ends. Raises PeerLost
        if the other end says nothing in that time or has ended, TransferFailed if it said nonsense."""
        try:
            return self._next(self._inbox, within_s)
        except queue.Empty:
            raise PeerLost(f"{self.name} said nothing in the time that it had") from None

    def ready(self) -> wire.ReadyAnswer:
        """The rank's description when it begins to serve, at most `limits.connect_s` from now. Raises
        BootstrapTimeout, and what `receive` does."""
        try:
            ready: wire.ReadyAnswer = self._next(self._ready, self.limits.connect_s)
            return ready
        except queue.Empty:
            raise BootstrapTimeout(f"{self.name} was not ready within {self.limits.connect_s:g} s") from None

    def _next(self, waiting: queue.SimpleQueue[Any], within_s: float | None) -> Any:
        message = waiting.get(timeout=within_s)
        if message is None:  # the end, which stays
            waiting.put(None)
            assert self._error is not None
            raise self._error.info.exception()
        return message

    def release(self) -> None:
        """A `WorkerRank` or a `RankWorker` is through with it. Idempotent."""
        if self._lasting:
            self.io.post(self.detach)
        else:
            self.close()

    def _deliver(self, message: Any) -> None:
        match message:
            case wire.ReadyAnswer():
                self._ready.put(message)
            case _ if type(message) in wire.HAND_OFF:
                super()._deliver(message)  # to nobody, if it is of a role that is over
            case _ if self._inbox.qsize() < MAX_WAITING:
                self._inbox.put(message)
            case _:
                self._end(PeerLost(f"{self.name} says more than it is asked"))

    def _end(self, error: SegueError) -> None:
        first = self._error is None
        super()._end(error)
        if first:  # the reason is known to a thread that this wakes
            self._inbox.put(None)
            self._ready.put(None)
