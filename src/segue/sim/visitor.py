"""A visitor: whoever else comes to the listening ports of a deployment.

Nothing that they do may harm anybody else; each is told why it is not let in, or cut in bounded time. A
visitor lives in a process of its own, so it can be looked at which error it was given.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from segue.core.control import ControlMessage
from segue.core.errors import ErrorCode, PeerRefused, SegueError
from segue.core.limits import Limits
from segue.core.types import LeaderId, Role
from segue.session.api import PeerInfo, Session
from segue.session.connection import Connection
from segue.session.frames import (
    NONCE_BYTES,
    Hello,
    Opened,
    Refused,
    SessionFrame,
    decode_frame,
)
from segue.session.inbox import Inbox
from segue.session.node import SessionNode
from segue.sim.leader import LeaderNode
from segue.sim.loop import SimLoop
from segue.sim.world import Process, SkewedClock, Violation, new_leader

if TYPE_CHECKING:
    from segue.sim.deployment import Deployment

#: What an ended connection may linger, and some latency.
GRACE_S = 2.0


class RawConnection(asyncio.BufferedProtocol):
    """A connection on which somebody types bytes, and hears frames."""

    def __init__(self) -> None:
        self.transport: Any = None
        self.heard = bytearray()
        self.ended = asyncio.Event()
        self._news = asyncio.Event()
        self._inbox = Inbox()
        self._preamble = False
        self.frames: list[SessionFrame] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._inbox.space()

    def buffer_updated(self, nbytes: int) -> None:
        self.heard += self._inbox.space()[:nbytes]
        self._inbox.add(nbytes)
        if not self._preamble:
            self._preamble = self._inbox.preamble() is not None
        while self._preamble and (frame := self._inbox.next_frame()) is not None:
            self.frames.append(decode_frame(frame[1]))
        self._news.set()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set()
        self._news.set()

    async def frame(self, kind: type[Any]) -> Any:
        """The first frame of `kind`; None if the connection ends without one."""
        while not self.ended.is_set():
            for frame in self.frames:
                if isinstance(frame, kind):
                    return frame
            self._news.clear()
            await self._news.wait()
        return next((frame for frame in self.frames if isinstance(frame, kind)), None)


class Visitor(Process):
    """One visitor: comes to an instance, does one thing, and goes."""

    def __init__(
        self, deployment: Deployment, target: LeaderNode, name: str, kind: str, work: Work | None = None
    ) -> None:
        super().__init__(deployment.world, name)
        self.deployment = deployment
        self.target = target
        self.kind = kind
        self._work = work
        self.rng = deployment.world.rng(name)
        self.me = new_leader(self.rng)
        clock = SkewedClock(deployment.world, 0.0, 1.0)
        host = f"127.0.4.{1 + self.rng.randrange(3)}"
        self.loop = SimLoop(self, clock, deployment.network, host)  # type: ignore[abstract]
        self.ends: list[SegueError] = []
        self.sessions_ended = asyncio.Event()
        deployment.by_leader[self.me] = self
        deployment.network.processes[self.me] = self

    def start(self) -> None:
        """Begin."""
        self.loop.enter(self.loop.create_task, self._visit())

    #: how its visits are counted
    WHAT = "visitor"

    async def _visit(self) -> None:
        self.deployment.counts[f"{self.WHAT}: {self.kind}"] += 1
        try:
            await self.visits()
        except Exception as error:
            self.world.fail(error)
        self.deployment.counts["visits"] += 1

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

    def wrong(self, text: str) -> None:
        """What must not happen has."""
        if self.undisturbed:
            self.world.fail(Violation("visitor", f"{self.kind} at {self.target.name}: {text}"))

    async def raw(self) -> RawConnection | None:
        """A connection of bytes."""
        try:
            _, protocol = await self.loop.create_connection(RawConnection, self.target.host, self.target.port)
        except OSError as error:
            self.wrong(f"could not connect: {error}")
            return None
        assert isinstance(protocol, RawConnection)
        return protocol

    async def is_cut(self, raw: RawConnection, within_s: float | None = None) -> None:
        """The target ends this connection in time."""
        limits = self.target.limits
        try:
            async with asyncio.timeout(GRACE_S + (limits.handshake_s if within_s is None else within_s)):
                await raw.ended.wait()
        except TimeoutError:
            self.wrong("its connection is still there")
            raw.transport.abort()
        if any(isinstance(frame, Opened) for frame in raw.frames):
            self.wrong("was let in")

    async def is_refused(self, raw: RawConnection, *codes: ErrorCode) -> None:
        """The target says why, and ends it."""
        await self.is_cut(raw, 0.5)
        refusals = [frame for frame in raw.frames if isinstance(frame, Refused)]
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

    def my_hello(self, **changes: Any) -> Hello:
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
        return Hello(**{**claims, **changes})

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
        }
        return SessionNode(
            **{**given, **options},
            secret=secret,
            handler=self,
            random_bytes=self.rng.randbytes,
        )

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
