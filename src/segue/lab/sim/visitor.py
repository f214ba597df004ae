"""A visitor: whoever else comes to the port at which an instance listens for sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from segue.kv.errors import ErrorCode, PeerRefused, SegueError
from segue.kv.ids import LeaderId, Role
from segue.kv.limits import Limits
from segue.kv.session.api import PeerInfo, Session
from segue.kv.session.connection import Connection
from segue.kv.session.frames import (
    NONCE_BYTES,
    Opened,
    SessionFrame,
    SessionHello,
    SessionRefused,
    decode_frame,
)
from segue.kv.session.inbox import Inbox
from segue.kv.session.node import SessionNode
from segue.lab.sim.loop import SimSockets
from segue.lab.sim.outsider import GRACE_S, Outsider, RawConnection
from segue.lab.sim.sim_leader import LeaderNode
from segue.lab.sim.world import new_leader
from segue.server.messages.control import ControlMessage

if TYPE_CHECKING:
    from segue.lab.sim.deployment import Deployment


class FrameConnection(RawConnection):
    """A connection on which somebody types bytes, and hears frames of a session."""

    def __init__(self) -> None:
        super().__init__()
        self._inbox = Inbox()
        self._preamble = False
        self.frames: list[SessionFrame] = []

    def data_received(self, data: bytes) -> None:
        while data:
            space = self._inbox.space()
            size = min(len(space), len(data))
            space[:size], data = data[:size], data[size:]
            self._inbox.add(size)
            self._preamble = self._preamble or self._inbox.preamble() is not None
            while self._preamble and (frame := self._inbox.next_frame()) is not None:
                self.frames.append(decode_frame(frame[1]))
        self.news.set()

    def first(self, kind: type[Any]) -> Any:
        """The first frame of `kind`, None if there was none."""
        return next((frame for frame in self.frames if isinstance(frame, kind)), None)

    async def frame(self, kind: type[Any]) -> Any:
        """The first frame of `kind`; None if the connection ends without one."""
        while self.first(kind) is None and not self.ended.is_set():
            self.news.clear()
            await self.news.wait()
        return self.first(kind)


class Visitor(Outsider):
    """One visitor: comes to an instance, does one thing, and goes."""

    WHAT, DONE = "visitor", "visits"

    def __init__(
        self, deployment: Deployment, target: LeaderNode, name: str, kind: str, work: Work | None = None
    ) -> None:
        rng = deployment.world.rng(f"{name} comes from")
        super().__init__(deployment, name, kind, f"127.0.4.{1 + rng.randrange(3)}")
        self.target = target
        self._work = work
        self.me = new_leader(self.rng)
        self.ends: list[SegueError] = []
        self.sessions_ended = asyncio.Event()
        deployment.by_leader[self.me] = self
        deployment.network.processes[self.me] = self

    async def visits(self) -> None:
        """What it comes for."""
        assert self._work is not None
        await self._work(self)

    # ---- what it is told ----------------------------------------------------------------------------

    @property
    def undisturbed(self) -> bool:
        """Nothing but ourselves has come between us and the target."""
        target, network = self.target, self.deployment.network
        quiet = target.alive and not target.paused and target.resumed_at < self.began_at
        let_in = all(listener.starved_until < self.began_at for listener in network.listeners(target))
        struck = max(target.jumped_at, target.struck_at) >= self.began_at
        return quiet and let_in and not target.drained and not struck and not network.flips

    async def raw(self) -> FrameConnection | None:
        """A connection of bytes."""
        return await self.types(FrameConnection, self.target.host, self.target.port)

    async def is_cut(
        self, raw: RawConnection, within_s: float | None = None, grace_s: float = GRACE_S
    ) -> None:
        """As any; and nobody is let in who is."""
        await super().is_cut(raw, self.target.limits.handshake_s if within_s is None else within_s, grace_s)
        if isinstance(raw, FrameConnection) and raw.first(Opened) is not None:
            self.wrong("was let in")

    async def is_refused(self, raw: FrameConnection, *codes: ErrorCode) -> None:
        """The target says why, and ends it."""
        await self.is_cut(raw, 0.5)
        refusals = [frame for frame in raw.frames if isinstance(frame, SessionRefused)]
        if not raw.ended.is_set() or not refusals:
            self.wrong(f"was not told why: {raw.frames}")
        elif refusals[-1].error.code not in codes:
            self.wrong(f"was told {refusals[-1].error}")

    def hello(self) -> bytes:
        """As `SessionHandler`."""
        if self.kind == "failing hello":
            raise ZeroDivisionError("injected into hello")
        return b""

    def accept(self, peer: PeerInfo) -> None:
        """As `SessionHandler`."""
        if self.kind == "refuses":
            raise PeerRefused("I do not want you")
        if self.kind == "failing accept":
            raise ZeroDivisionError("injected into accept")

    def opened(self, session: Session) -> None:
        """As `SessionHandler`."""
        if self.kind == "failing opened":
            raise ZeroDivisionError("injected into opened")

    def received(self, session: Session, message: object) -> None:
        """As `SessionHandler`."""
        if self.kind == "failing received":
            raise ZeroDivisionError("injected into received")

    def closed(self, session: Session, error: SegueError) -> None:
        """As `SessionHandler`."""
        self.ends.append(error)
        self.sessions_ended.set()
        if self.kind == "failing closed":
            raise ZeroDivisionError("injected into closed")

    # ---- bytes --------------------------------------------------------------------------------------

    def my_hello(self, **changes: Any) -> SessionHello:
        """Our claims."""
        claims: dict[str, Any] = {
            "incarnation": self.me.incarnation,
            "role": Role.FRONTEND,
            "dp_rank": self.me.dp_rank,
            "advertised": "",
            "nonce": self.rng.randbytes(NONCE_BYTES),
            "keyed": self.deployment.secret is not None,
            "keepalive_s": 0.5,
        }
        return SessionHello(**{**claims, **changes})

    def node(self, *, knows: bool = True, **options: Any) -> SessionNode:
        """Production's node in this process."""
        secret = self.deployment.secret
        if not knows:
            secret = (
                None if secret is not None and self.rng.random() < 0.5 else b"some other secret of somebody"
            )
        timing = self.deployment.timing
        given: dict[str, Any] = {
            "me": self.me,
            "role": Role.FRONTEND,
            "limits": Limits(keepalive_s=timing.keepalive_s, peer_silence_s=timing.silence_s),
            "message_type": ControlMessage,
            "handlers": dict.fromkeys(Role, self),
            "secret": secret,
        }
        sockets = SimSockets(self.loop)
        return SessionNode(**{**given, **options}, random_bytes=self.rng.randbytes, sockets=sockets)

    async def dials(
        self, node: SessionNode, *codes: ErrorCode, expect: LeaderId | None = None
    ) -> Connection | None:
        """A session with the target, which is refused with one of `codes`, or given if there are none."""
        try:
            session = await node.connect(self.target.host, self.target.port, expect=expect, timeout_s=10.0)
        except SegueError as error:
            if error.info.code not in codes:
                self.wrong(f"was refused with {error}")
            return None
        if codes:
            self.wrong("got a session")
        assert isinstance(session, Connection)
        return session

    async def is_ended(self, *codes: ErrorCode) -> None:
        """The session that was there has ended."""
        try:
            async with asyncio.timeout(GRACE_S + self.deployment.timing.silence_s):
                await self.sessions_ended.wait()
        except TimeoutError:
            self.wrong("its session goes on")
            return
        if self.ends[-1].info.code not in codes:
            self.wrong(f"its session ended with {self.ends[-1]}")


Work = Callable[[Visitor], Coroutine[Any, Any, None]]


class Visits(dict[str, Work]):
    """What visitors of one sort come for, by kind."""

    def kind(self, name: str) -> Callable[[Work], Work]:
        """A decorator: this is what those of the kind `name` do."""

        def add(work: Work) -> Work:
            self[name] = work
            return work

        return add
