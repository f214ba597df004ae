"""The face of `session`: ordered, authenticated, typed messages between leaders and frontends.

Everything runs on one asyncio loop (the process's I/O thread). One TCP connection is one session;
a broken connection is the end of the session, seen by both sides; it never heals silently.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import msgspec

from segue.kv.errors import SegueError
from segue.kv.ids import LeaderId, Role


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """The peer of a session, as proven in the handshake: its `leader` and `role`, and the `address`
    (`host:port`) that it was reached at or that it advertises.

    `hello` is the payload that the peer sent (msgpack bytes that the session does not interpret), `sent` the
    one that we sent.
    """

    leader: LeaderId
    role: Role
    address: str
    hello: bytes
    sent: bytes = b""


class Session(Protocol):
    """One open session. Equal only to itself. Used on the loop of its node."""

    @property
    def peer(self) -> PeerInfo:
        """The other end."""
        ...

    @property
    def closing(self) -> bool:
        """The session has ended; `SessionHandler.closed` follows in the loop's next turn."""
        ...

    def send(self, message: msgspec.Struct) -> None:
        """Queue `message`; never blocks. After the end it is dropped. A peer that does not read
        (bounded backlog exceeded) ends the session with PeerLost. RequestTooLarge if the encoded
        message is larger than the peer takes (both sides' `max_frame_bytes`): nothing is sent and
        the session lives on."""
        ...

    def close(self, error: SegueError | None = None) -> None:
        """End the session; `SessionHandler.closed` is called on both sides."""
        ...

    async def ended(self) -> None:
        """Returns when the session has ended, whoever has ended it."""
        ...


class SessionHandler(Protocol):
    """Handles the sessions with peers of one role. Called on the loop; must not block."""

    def hello(self) -> bytes:
        """Our payload for the handshake, in both directions."""
        ...

    def accept(self, peer: PeerInfo) -> None:
        """Look at the peer before the session opens (both sides). Raise a SegueError to refuse:
        its record reaches the peer, whose `connect` raises it."""
        ...

    def opened(self, session: Session) -> None:
        """The session is open on both sides; messages can be sent."""
        ...

    def received(self, session: Session, message: object) -> None:
        """A decoded message. An exception here ends neither the session nor the process: it is
        logged and counted (the handler is expected to have its own error boundary)."""
        ...

    def closed(self, session: Session, error: SegueError) -> None:
        """The session ended (PeerLost, PeerRestarted, Draining, …). Comes exactly once after `opened`."""
        ...
