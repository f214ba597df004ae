"""Events of a transport that has a thread: from which thread they are told, and until when."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

from segue.kv.errors import Internal
from segue.kv.ids import RankId
from segue.kv.transport.base import EventSink, PeerGone, TransportEvent
from segue.kv.transport.net.ioloop import IoLoop


class EventEmitter:
    """Tells the events of the transport called `name` to its owner; nothing more once `closed` is set.

    `failure` says why, once a thread of the transport has ended by a bug. The thread that failed still tells
    the events due by then: an awaited answer must not end with the loop.
    """

    def __init__(self, name: str, on_event: EventSink) -> None:
        self._name = name
        self._on_event = on_event
        self.closed = False
        self.failure = ""
        self._lock = threading.Lock()
        self._pending: deque[Callable[[], None]] = deque()

    def emit(self, event: TransportEvent) -> None:
        """Tell `event` here and now."""
        if not self.closed:
            self._on_event(event)

    def soon(self, loop: IoLoop, event: TransportEvent) -> None:
        """Tell `event` from the thread of `loop`."""
        self.run_soon(loop, partial(self.emit, event))

    def run_soon(self, loop: IoLoop, call: Callable[[], None]) -> None:
        """Run `call`, which tells something, on the thread of `loop`; when that has died, on the caller's."""
        with self._lock:
            if alive := not self.failure:
                self._pending.append(call)
        if alive:
            loop.post(self._next)
        else:
            call()

    def _next(self) -> None:
        with self._lock:
            call = self._pending.popleft() if self._pending else None
        if call is not None:
            call()

    def fail(self, exc: BaseException) -> None:
        """A thread ended by a bug: nothing can be asked of it from now on."""
        with self._lock:
            self.failure = f"the {self._name} transport has failed: {exc!r}"

    def all_gone(self, peers: Iterable[RankId]) -> None:
        """After `fail`: tell what was still to be told, and that none of `peers` can be reached any more,
        which proves nothing of them."""
        while self._pending:
            self._next()
        error = Internal(self.failure)
        for peer in dict.fromkeys(
            peers
        ):  # in their order: the order of a set differs from process to process
            self.emit(PeerGone(peer, False, error))
