"""The sessions of an instance with frontends."""

from __future__ import annotations

import logging
from collections.abc import Callable

from segue.engine.kv_events import KVEvent, Prefixes, net
from segue.engine.request import Output
from segue.kv import Incarnation, LeaderId, PeerRefused, SegueError
from segue.kv.session import PeerInfo, Session
from segue.server.instance.leader import FromFrontend, FrontendGone, Item, Order
from segue.server.messages.control import (
    Explained,
    Load,
    Outputs,
    Submit,
)

log = logging.getLogger("segue.instance")


class FrontendSessions:
    """The sessions of frontends: what arrives goes into the leader's inbox, outputs go back.

    A `SessionHandler`. Everything but `deliver` is used on the I/O thread only.
    """

    def __init__(self) -> None:
        #: Hears what a frontend answers an operator.
        self.on_explained: Callable[[Incarnation, Explained], None] = lambda _frontend, _answer: None
        #: Puts an item into the leader's inbox; None until there is a leader.
        self.deliver: Callable[[Item], None] | None = None
        #: Hears where the prefill leader of a request is; decode opens a session with it.
        self.meet: Callable[[LeaderId, str, int], None] = lambda _leader, _host, _port: None
        self.sessions: dict[Incarnation, Session] = {}
        self.load: Load | None = None
        #: followers of our prefix cache, with the number of the last message to each
        self._following: dict[Incarnation, int] = {}

    def hello(self) -> bytes:
        """Empty: the registry's record is enough for a frontend."""
        return b""

    def accept(self, peer: PeerInfo) -> None:
        """Every frontend that knows the secret is welcome."""
        if peer.leader.dp_rank:
            raise PeerRefused(f"a frontend has no data-parallel ranks, and this one says {peer.leader}")

    def opened(self, session: Session) -> None:
        """Tell a new frontend the load at once: placement needs it."""
        self.sessions[session.peer.leader.incarnation] = session
        if self.load is not None:
            session.send(self.load)

    def received(self, session: Session, message: object) -> None:
        """Orders to the leader, and answers for operators."""
        if (
            isinstance(message, Submit)
            and message.prefill_at is not None
            and not message.ticket.prefill.is_open
        ):
            self.meet(message.ticket.prefill, *message.prefill_at)
        if self.deliver is not None and isinstance(message, Order):
            self.deliver(FromFrontend(session.peer.leader.incarnation, message))
        elif isinstance(message, Explained):
            self.on_explained(session.peer.leader.incarnation, message)
        else:
            log.warning("a frontend sent a %s", type(message).__name__)

    def closed(self, session: Session, error: SegueError) -> None:
        """Nobody is left to read its outputs."""
        incarnation = session.peer.leader.incarnation
        if self.sessions.get(incarnation) is session:
            del self.sessions[incarnation]
            self._following.pop(incarnation, None)
            if self.deliver is not None:
                self.deliver(FrontendGone(incarnation, error.info))

    def send(self, origin: Incarnation, outputs: list[Output]) -> None:
        """Outputs of one step to their frontend, if it is still there."""
        if (session := self.sessions.get(origin)) is not None:
            session.send(Outputs(outputs))

    def prefixes(self, only: Incarnation | None, page_tokens: int, events: list[KVEvent]) -> None:
        """Send the content of the prefix cache to `only`, which follows it from now on; without `only`, send
        the changes to all followers."""
        cleared, stored, removed = net(events)
        for incarnation in [only] if only is not None else list(self._following):
            if (session := self.sessions.get(incarnation)) is None:
                continue
            seq = self._following[incarnation] = 0 if only is not None else self._following[incarnation] + 1
            session.send(
                Prefixes(seq=seq, page_tokens=page_tokens, stored=stored, removed=removed, cleared=cleared)
            )

    def report(self, load: Load) -> None:
        """The load to every frontend."""
        self.load = load
        for session in self.sessions.values():
            session.send(load)
