"""Events of a transport that has a thread: from which thread they are told, and until when."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

from segue.kv.errors import Internal
from segue.kv.ids import RankId
from segue.kv.transport.base import EventSink, PeerGone, TransportEvent
from segue.kv.transport.net.ioloop import IoLoop

log = logging.getLogger("segue.kv.transport")


class EventEmitter:
    """Tells the events of the transport called `name` to its owner; nothing more once `closed` is set.

    `failure` says why, once a thread of the transport has ended by a bug. From then on the threads that ask
    run the calls themselves, one call at a time: an awaited answer must not end with the loop. A call that
    raises then is logged, and the next one runs.
    """

    def __init__(self, name: str, on_event: EventSink) -> None:
        self._name = name
        self._on_event = on_event
        self.closed = False
        self.failure = ""
        self._lock = threading.Lock()
        self._pending: deque[Callable[[], None]] = deque()
        self._turn = threading.Lock()

    def emit(self, event: TransportEvent) -> None:
        """Tell `event` here and now."""
        if not self.closed:
            self._on_event(event)

    def soon(self, loop: IoLoop, event: TransportEvent) -> None:
        """Tell `event` from the thread of `loop`."""
        self.run_soon(loop, partial(self.emit, event))

    def run_soon(self, loop: IoLoop, call: Callable[[], None]) -> None:
        """Run `call` on the thread of `loop`, in order. After `fail` the caller runs it, or the thread that
        is running another call."""
        with self._lock:
            self._pending.append(call)
            alive = not self.failure
        if alive:
            loop.post(self._next)
        else:
            self._drain()

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
        error = Internal(self.failure)
        told = [partial(self.emit, PeerGone(peer, False, error)) for peer in dict.fromkeys(peers)]
        with self._lock:  # in the order of `peers`, which must not be that of a set
            self._pending.extend(told)
        self._drain()

    def _drain(self) -> None:
        while self._pending and self._turn.acquire(blocking=False):
            try:
                self._next()
            except Exception:  # the boundary: the bug may be met again, and costs no other call its answer
                log.exception("after the end of a thread of %s a call has failed, too", self._name)
            finally:
                self._turn.release()
