"""Telling the events of a transport that has a thread: where, and until when."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from segue.core.errors import Internal
from segue.transport.base import EventSink, PeerGone, TransportEvent
from segue.transport.ioloop import IoLoop


class Teller:
    """Tells the events of the transport called `name` to its owner; nothing more once `closed` is set.

    `failure` says why, once a thread of the transport has ended by a bug.
    """

    def __init__(self, name: str, on_event: EventSink) -> None:
        self._name = name
        self._on_event = on_event
        self.closed = False
        self.failure = ""

    def emit(self, event: TransportEvent) -> None:
        """Tell `event` here and now."""
        if not self.closed:
            self._on_event(event)

    def soon(self, loop: IoLoop, event: TransportEvent) -> None:
        """Tell `event` from the thread of `loop`."""
        self.run_soon(loop, partial(self.emit, event))

    def run_soon(self, loop: IoLoop, call: Callable[[], None]) -> None:
        """Run `call`, which tells something, on the thread of `loop`; when that has died, on the caller's."""
        if not self.failure:
            loop.post(call)
        else:
            call()

    def fail(self, exc: BaseException) -> None:
        """A thread ended by a bug: nothing can be asked of it from now on."""
        self.failure = f"the {self._name} transport has failed: {exc!r}"

    def all_gone(self, peers: Iterable[str]) -> None:
        """After `fail`: none of `peers` can be reached any more, which proves nothing of them."""
        error = Internal(self.failure)
        for peer in peers:
            self.emit(PeerGone(peer, False, error))
