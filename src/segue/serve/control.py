"""The sessions of an instance with frontends."""

from __future__ import annotations

import logging
from collections.abc import Callable

from segue.core.control import Cancel, Load, Outputs, Submit
from segue.core.errors import PeerRefused, SegueError
from segue.core.request import Output
from segue.core.types import Incarnation
from segue.serve.leader import FromFrontend, FrontendGone, Item
from segue.session.api import PeerInfo, Session

log = logging.getLogger("segue.instance")


class FrontendSessions:
    """The sessions of frontends: what arrives goes into the leader's inbox, outputs go back.

    A `SessionHandler`. Everything but `deliver` is used on the I/O thread only.
    """

    def __init__(self) -> None:
        #: Puts an item into the leader's inbox; None until there is a leader.
        self.deliver: Callable[[Item], None] | None = None
        self.sessions: dict[Incarnation, Session] = {}
        self.load: Load | None = None

    def hello(self) -> bytes:
        """A frontend needs to know nothing but what the registry says."""
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
        """Only `Submit` and `Cancel` go this way."""
        if self.deliver is not None and isinstance(message, Submit | Cancel):
            self.deliver(FromFrontend(session.peer.leader.incarnation, message))
        else:
            log.warning("a frontend sent a %s", type(message).__name__)

    def closed(self, session: Session, error: SegueError) -> None:
        """Nobody is left to read its outputs."""
        incarnation = session.peer.leader.incarnation
        if self.sessions.get(incarnation) is session:
            del self.sessions[incarnation]
            if self.deliver is not None:
                self.deliver(FrontendGone(incarnation, error.info))

    def send(self, origin: Incarnation, outputs: list[Output]) -> None:
        """Outputs of one step to their frontend, if it is still there."""
        if (session := self.sessions.get(origin)) is not None:
            session.send(Outputs(outputs))

    def report(self, load: Load) -> None:
        """The load to every frontend."""
        self.load = load
        for session in self.sessions.values():
            session.send(load)
