"""Whoever else comes to the listening ports of a deployment: strangers, misfits, and peers that misbehave.

Nothing that they do may harm anybody else; each is told why it is not let in, or cut in bounded time. A
visitor lives in a process of its own, so it can be looked at which error it was given.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from segue.core.control import Cancel, ControlMessage
from segue.core.errors import AbortedByClient, ErrorCode, PeerRefused, SegueError
from segue.core.limits import Limits
from segue.core.types import Incarnation, Role
from segue.session.api import PeerInfo, Session
from segue.session.connection import Connection
from segue.session.frames import (
    HANDSHAKE_FRAME_BYTES,
    HEADER,
    KIND_MESSAGE,
    KIND_SESSION,
    NONCE_BYTES,
    PROTOCOL_VERSION,
    Bye,
    Hello,
    Opened,
    Proof,
    Refused,
    SessionFrame,
    Welcome,
    body_check,
    decode_frame,
    encode_frame,
    encode_preamble,
    lead_check,
    pack_frame,
)
from segue.session.handshake import prove, session_key
from segue.session.inbox import Inbox
from segue.session.node import SessionNode
from segue.session.tls import Tls
from segue.sim.leader import LeaderNode
from segue.sim.loop import SimLoop
from segue.sim.world import Process, SkewedClock, Violation

if TYPE_CHECKING:
    from segue.sim.deployment import Deployment

#: What an ended connection may linger, and some latency.
GRACE_S = 2.0
FLOOD = 160


def tls_of_nobody() -> Tls:
    """Contexts without a certificate: nobody can be talked to with them, and everybody must say why."""
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    return Tls(server, client)


class _Raw(asyncio.BufferedProtocol):
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

    def __init__(self, deployment: Deployment, target: LeaderNode, name: str, kind: str) -> None:
        super().__init__(deployment.world, name)
        self.deployment = deployment
        self.target = target
        self.kind = kind
        self.rng = deployment.world.rng(name)
        self.me = Incarnation(f"{self.rng.getrandbits(128):032x}")
        clock = SkewedClock(deployment.world, 0.0, 1.0)
        host = f"127.0.4.{1 + self.rng.randrange(3)}"
        self.loop = SimLoop(self, clock, deployment.network, host)  # type: ignore[abstract]
        self.ends: list[SegueError] = []
        self.sessions_ended = asyncio.Event()
        deployment.by_incarnation[self.me] = self
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
        await VISITS[self.kind](self)

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

    async def raw(self) -> _Raw | None:
        """A connection of bytes."""
        try:
            _, protocol = await self.loop.create_connection(_Raw, self.target.host, self.target.port)
        except OSError as error:
            self.wrong(f"could not connect: {error}")
            return None
        assert isinstance(protocol, _Raw)
        return protocol

    async def is_cut(self, raw: _Raw, within_s: float | None = None) -> None:
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

    async def is_refused(self, raw: _Raw, *codes: ErrorCode) -> None:
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
            "incarnation": self.me,
            "role": Role.FRONTEND,
            "dp_rank": 0,
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
            "incarnation": self.me,
            "role": Role.FRONTEND,
            "limits": Limits(keepalive_s=timing.keepalive_s, peer_silence_s=timing.silence_s),
            "message_type": ControlMessage,
        }
        return SessionNode(
            **{**given, **options},
            dp_rank=0,
            secret=secret,
            handler=self,
            random_bytes=self.rng.randbytes,
        )

    async def dials(
        self, node: SessionNode, *codes: ErrorCode, expect: Incarnation | None = None
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


VISITS: dict[str, Callable[[Visitor], Coroutine[Any, Any, None]]] = {}


def _visit(
    kind: str,
) -> Callable[
    [Callable[[Visitor], Coroutine[Any, Any, None]]], Callable[[Visitor], Coroutine[Any, Any, None]]
]:
    def name(
        work: Callable[[Visitor], Coroutine[Any, Any, None]],
    ) -> Callable[[Visitor], Coroutine[Any, Any, None]]:
        VISITS[kind] = work
        return work

    return name


# ---- strangers: those who never prove themselves ----------------------------------------------------


@_visit("silence")
async def _silence(visitor: Visitor) -> None:
    raw = await visitor.raw()
    if raw is not None:
        await visitor.is_cut(raw)


@_visit("half a preamble")
async def _half(visitor: Visitor) -> None:
    raw = await visitor.raw()
    if raw is not None:
        raw.transport.write(encode_preamble(PROTOCOL_VERSION)[:5])
        await visitor.is_cut(raw)


@_visit("half a hello")
async def _stalled(visitor: Visitor) -> None:
    raw = await visitor.raw()
    if raw is not None:
        frame = encode_frame(visitor.my_hello())
        cut = visitor.rng.randrange(len(frame))
        raw.transport.write(encode_preamble(PROTOCOL_VERSION) + frame[:cut])
        await visitor.is_cut(raw)


@_visit("another protocol")
async def _other(visitor: Visitor) -> None:
    raw = await visitor.raw()
    if raw is not None:
        raw.transport.write(
            visitor.rng.choice((b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc"))
        )
        await visitor.is_cut(raw, 0.5)


@_visit("another version")
async def _version(visitor: Visitor) -> None:
    raw = await visitor.raw()
    if raw is not None:
        raw.transport.write(encode_preamble(PROTOCOL_VERSION + 1))
        await visitor.is_refused(raw, ErrorCode.PEER_REFUSED)


@_visit("leaves")
async def _leaves(visitor: Visitor) -> None:
    raw = await visitor.raw()
    if raw is not None:
        if visitor.rng.random() < 0.5:
            raw.transport.write(encode_preamble(PROTOCOL_VERSION) + encode_frame(visitor.my_hello()))
        raw.transport.abort()


def _key_or_not(visitor: Visitor) -> list[bytes]:
    return [encode_frame(visitor.my_hello(keyed=visitor.deployment.secret is None))]


def _itself(visitor: Visitor) -> list[bytes]:
    return [encode_frame(visitor.my_hello(incarnation=visitor.target.me))]


def _false_proof(visitor: Visitor) -> list[bytes]:
    return [encode_frame(visitor.my_hello()), encode_frame(Proof(visitor.rng.randbytes(32)))]


def _frames(kind: str, make: Callable[[Visitor], list[bytes]], *codes: ErrorCode) -> None:
    @_visit(kind)
    async def says(visitor: Visitor) -> None:
        raw = await visitor.raw()
        if raw is not None:
            raw.transport.write(encode_preamble(PROTOCOL_VERSION) + b"".join(make(visitor)))
            await visitor.is_refused(raw, *codes)


_frames("no hello", lambda v: [encode_frame(Proof(b""))], ErrorCode.PEER_REFUSED)
_frames("hello twice", lambda v: [encode_frame(v.my_hello())] * 2, ErrorCode.PEER_REFUSED)
_frames("message first", lambda v: [pack_frame(KIND_MESSAGE, b"\x80")], ErrorCode.PEER_REFUSED)
_frames("no frame", lambda v: [pack_frame(KIND_SESSION, b"\x93abc")], ErrorCode.PEER_REFUSED)
_frames("long frame", lambda v: [_header(HANDSHAKE_FRAME_BYTES + 1)], ErrorCode.PEER_REFUSED)
_frames("changed frame", lambda v: [_changed(v)], ErrorCode.BOOTSTRAP_UNREACHABLE)
_frames("itself", _itself, ErrorCode.PEER_REFUSED)
_frames("rare pings", lambda v: [encode_frame(v.my_hello(keepalive_s=1e3))], ErrorCode.PEER_REFUSED)
_frames("other key", _key_or_not, ErrorCode.UNAUTHORIZED)
_frames("false proof", _false_proof, ErrorCode.UNAUTHORIZED)


def _header(length: int) -> bytes:
    return HEADER.pack(length, KIND_SESSION, lead_check(length, KIND_SESSION), body_check(b""))


def _changed(visitor: Visitor) -> bytes:
    frame = bytearray(encode_frame(visitor.my_hello()))
    bit = visitor.rng.randrange(8 * len(frame))
    frame[bit // 8] ^= 1 << bit % 8
    return bytes(frame)


@_visit("own nonce back")
async def _reflection(visitor: Visitor) -> None:
    raw = await visitor.raw()
    if raw is not None:
        raw.transport.write(encode_preamble(PROTOCOL_VERSION))
        theirs = await raw.frame(Hello)
        if theirs is not None:
            raw.transport.write(encode_frame(visitor.my_hello(nonce=theirs.nonce)))
            await visitor.is_refused(raw, ErrorCode.UNAUTHORIZED)


async def _proven(
    visitor: Visitor, by_dialler: bool, hello: Hello | None = None
) -> tuple[_Raw, bytes] | None:
    """A handshake up to our proof: that of the dialler, or the listener's own sent back; and the frame."""
    raw = await visitor.raw()
    if raw is None:
        return None
    mine = hello or visitor.my_hello()
    raw.transport.write(encode_preamble(PROTOCOL_VERSION) + encode_frame(mine))
    theirs = await raw.frame(Hello)
    if theirs is None:
        return None
    key = session_key(visitor.deployment.secret)
    proof = encode_frame(Proof(prove(key, PROTOCOL_VERSION, mine, theirs, by_dialler)))
    return raw, proof


@_visit("replayed proof")
async def _replay(visitor: Visitor) -> None:
    if visitor.deployment.secret is None:
        return
    hello = visitor.my_hello()
    first = await _proven(visitor, True, hello)
    if first is None:
        return
    first[0].transport.abort()
    again = await _proven(visitor, True, hello)
    if again is not None:
        again[0].transport.write(first[1])
        await visitor.is_refused(again[0], ErrorCode.UNAUTHORIZED)


@_visit("reflected proof")
async def _reflected(visitor: Visitor) -> None:
    if visitor.deployment.secret is None:
        return
    found = await _proven(visitor, False)
    if found is not None:
        found[0].transport.write(found[1])
        await visitor.is_refused(found[0], ErrorCode.UNAUTHORIZED)


@_visit("proof and silence")
async def _half_open(visitor: Visitor) -> None:
    found = await _proven(visitor, True)
    if found is None:
        return
    raw, proof = found
    raw.transport.write(proof)
    if await raw.frame(Welcome) is None:
        visitor.wrong("was not welcome, which knows the secret")
    await visitor.is_cut(raw)


@_visit("flood")
async def _flood(visitor: Visitor) -> None:
    """More strangers than fit: the oldest of them go, and nobody else."""
    raws = [raw for raw in [await visitor.raw() for _ in range(FLOOD)] if raw is not None]
    if visitor.target.strangers > 128:
        visitor.wrong(f"{visitor.target.strangers} strangers are kept")
    for raw in raws:
        await visitor.is_cut(raw)


# ---- misfits: production's nodes that cannot belong here --------------------------------------------


@_visit("another secret")
async def _secret(visitor: Visitor) -> None:
    await visitor.dials(visitor.node(knows=False), ErrorCode.UNAUTHORIZED)


@_visit("another protocol version")
async def _protocol(visitor: Visitor) -> None:
    await visitor.dials(visitor.node(protocol=PROTOCOL_VERSION + 1), ErrorCode.PEER_REFUSED)


@_visit("tls here only")
async def _tls(visitor: Visitor) -> None:
    await visitor.dials(
        visitor.node(tls=tls_of_nobody()), ErrorCode.PEER_REFUSED, ErrorCode.BOOTSTRAP_UNREACHABLE
    )


@_visit("tls there only")
async def _tls_there(visitor: Visitor) -> None:
    """A visitor that listens and speaks TLS: whoever comes without is told why, and nobody hangs."""
    port = 7100 + visitor.rng.randrange(10000)
    host = visitor.loop.host
    listener: Any = visitor.loop.network.listen(visitor.loop, port)
    node = visitor.node(tls=tls_of_nobody())
    node._listen_on(listener, host, port)
    other = Incarnation(f"{visitor.rng.getrandbits(128):032x}")
    for tls, codes in (
        (None, (ErrorCode.PEER_REFUSED,)),
        (tls_of_nobody(), (ErrorCode.BOOTSTRAP_UNREACHABLE, ErrorCode.UNAUTHORIZED)),
    ):
        try:
            await visitor.node(incarnation=other, tls=tls).connect(host, port, timeout_s=10.0)
        except SegueError as error:
            if error.info.code not in codes:
                visitor.wrong(f"was told {error}")
        else:
            visitor.wrong("has a session without a certificate")
    raws = [(await visitor.loop.create_connection(_Raw, host, port))[1] for _ in range(3)]
    raws[0].transport.abort()
    raws[1].transport.write(b"\x16\x03\x01\x00\x02hm")
    for raw in raws[1:]:
        await visitor.is_cut(raw)
    last = (await visitor.loop.create_connection(_Raw, host, port))[1]
    await node.close()
    await visitor.is_cut(last)
    if node.strangers:
        visitor.wrong(f"{node.strangers} strangers are left")


@_visit("another role")
async def _role(visitor: Visitor) -> None:
    await visitor.dials(visitor.node(role=Role.UNIFIED), ErrorCode.PEER_REFUSED)


@_visit("expects another")
async def _another(visitor: Visitor) -> None:
    expected = Incarnation(f"{visitor.rng.getrandbits(128):032x}")
    await visitor.dials(visitor.node(), ErrorCode.PEER_RESTARTED, expect=expected)


@_visit("refuses")
async def _refuses(visitor: Visitor) -> None:
    await visitor.dials(visitor.node(), ErrorCode.PEER_REFUSED)


async def _fails(visitor: Visitor) -> None:
    await visitor.dials(visitor.node(), ErrorCode.INTERNAL)


VISITS["failing hello"] = VISITS["failing accept"] = _fails


@_visit("nobody there")
async def _nobody(visitor: Visitor) -> None:
    try:
        await visitor.node().connect("127.0.5.1", 1, timeout_s=5.0)
    except SegueError as error:
        if error.info.code is not ErrorCode.BOOTSTRAP_UNREACHABLE:
            visitor.wrong(f"was told {error}")
        return
    visitor.wrong("has a session with nobody")


# ---- peers that misbehave once they are in ----------------------------------------------------------


def _on_open(kind: str, frame: Callable[[Visitor], bytes], *codes: ErrorCode) -> None:
    @_visit(kind)
    async def says(visitor: Visitor) -> None:
        session = await visitor.dials(visitor.node())
        if session is not None:
            session._write(frame(visitor))
            await visitor.is_ended(*codes)


_on_open("hello on a session", lambda v: encode_frame(v.my_hello()), ErrorCode.PEER_LOST)
_on_open("no message", lambda v: pack_frame(KIND_MESSAGE, b"\x93abc"), ErrorCode.PEER_LOST)
_on_open("no session frame", lambda v: pack_frame(KIND_SESSION, b"\x93abc"), ErrorCode.PEER_LOST)
_on_open("changed message", lambda v: _changed(v), ErrorCode.PEER_LOST)
_on_open("unknown kind", lambda v: pack_frame(7, b"\x80"), ErrorCode.PEER_LOST)
_on_open("endless message", lambda v: _header(2**31), ErrorCode.PEER_LOST)
_on_open("says goodbye", lambda v: encode_frame(Bye(AbortedByClient("enough").info)), ErrorCode.PEER_LOST)


async def _goes_on(visitor: Visitor) -> None:
    """Its own handler breaks: the session goes on, and its end is told."""
    node = visitor.node()
    session = await visitor.dials(node)
    if session is None:
        return
    session.send(Cancel("a request that nobody has", AbortedByClient("it left").info))
    await asyncio.sleep(2 * visitor.deployment.timing.silence_s)
    if visitor.ends:
        visitor.wrong(f"its session ended: {visitor.ends}")
    await node.close()
    if len(visitor.ends) != 1:
        visitor.wrong(f"its session ended {len(visitor.ends)} times")


for _kind in ("failing opened", "failing received", "failing closed", "behaves"):
    VISITS[_kind] = _goes_on


@_visit("many at once")
async def _many(visitor: Visitor) -> None:
    """Dialling the same place at once is one session."""
    node = visitor.node()
    dials = [asyncio.ensure_future(visitor.dials(node)) for _ in range(3)]
    sessions = {await dial for dial in dials}
    if len(sessions) != 1:
        visitor.wrong(f"{len(sessions)} sessions at once")
    await node.close()
    try:
        await node.connect(visitor.target.host, visitor.target.port, timeout_s=1.0)
    except SegueError as error:
        if error.info.code is not ErrorCode.DRAINING:
            visitor.wrong(f"a closed node says {error}")


@_visit("gives up")
async def _gives_up(visitor: Visitor) -> None:
    node = visitor.node()
    try:
        await node.connect(visitor.target.host, visitor.target.port, timeout_s=visitor.rng.random() * 0.003)
    except SegueError as error:
        if error.info.code is not ErrorCode.BOOTSTRAP_TIMEOUT:
            visitor.wrong(f"was told {error}")
    await node.close()


KINDS = tuple(VISITS)
