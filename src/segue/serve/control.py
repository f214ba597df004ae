"""The control side of an instance: frontends' sessions, and a host for them without hand-offs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Protocol

from segue.conn.io import Io, IoThread
from segue.conn.peers import PathSpeed
from segue.core.control import Cancel, ControlMessage, Load, Outputs, Submit
from segue.core.errors import PeerRefused, SegueError
from segue.core.limits import Limits
from segue.core.request import Output
from segue.core.types import Incarnation, LeaderId, Role
from segue.serve.leader import FromFrontend, FrontendGone, Item
from segue.session.api import PeerInfo, Session
from segue.session.node import SessionNode
from segue.session.tls import Tls

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
        """Every frontend that knows the secret is welcome, and nobody else comes here."""
        if peer.role is not Role.FRONTEND:
            raise PeerRefused(f"this instance has no hand-offs with a {peer.role.value} instance")
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


class Host(Protocol):
    """What an instance needs of the thread that owns its sockets: a `KVManager` or a `ControlHost`."""

    io: Io
    address: tuple[str, int]

    @property
    def sessions(self) -> Mapping[LeaderId, Session]: ...
    def start(self) -> tuple[str, int]: ...
    def close(self) -> None: ...
    def sizes(self) -> dict[str, int]: ...
    def problems(self) -> list[str]: ...
    def paths(self) -> dict[str, PathSpeed]: ...


class ControlHost:
    """An I/O thread that listens for frontends only; for a unified instance."""

    def __init__(
        self,
        handler: FrontendSessions,
        *,
        me: LeaderId,
        host: str,
        port: int,
        secret: bytes | None,
        limits: Limits,
        tls: Tls | None = None,
        advertise: str | None = None,
        advertise_port: int | None = None,
    ) -> None:
        self.io: Io = IoThread(lambda context: log.error("error in the I/O loop: %s", context.get("message")))
        self.address = (host, port)
        self._limits = limits
        self._node = SessionNode(
            me=me,
            role=Role.UNIFIED,
            secret=secret,
            handler=handler,
            message_type=ControlMessage,
            limits=limits,
            tls=tls,
            advertise=advertise,
            advertise_port=advertise_port,
        )
        self._closed = False

    def start(self) -> tuple[str, int]:
        """As `KVManager.start`."""
        self.io.start()
        try:
            self.address = self.io.call(self._node.listen(*self.address), self._limits.connect_s)
        except BaseException:
            self.close()
            raise
        return self.address

    @property
    def sessions(self) -> Mapping[LeaderId, Session]:
        """As `KVManager.sessions`."""
        return self._node.sessions

    def sizes(self) -> dict[str, int]:
        """There are no hand-offs."""
        return {}

    def problems(self) -> list[str]:
        """There is nothing that could be wrong."""
        return []

    def paths(self) -> dict[str, PathSpeed]:
        """No KV leaves here."""
        return {}

    def close(self) -> None:
        """As `KVManager.close`."""
        if self._closed:
            return
        self._closed = True
        try:
            if self.io.running:
                self.io.call(self._node.close(), self._limits.connect_s)
        finally:
            self.io.stop()
