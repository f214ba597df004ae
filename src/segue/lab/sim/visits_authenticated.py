"""Visits of those who know the secret and still do not belong here, or misbehave once they have a session."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable

from segue.kv.errors import AbortedByClient, ErrorCode, SegueError
from segue.kv.ids import Role
from segue.kv.session.frames import (
    KIND_MESSAGE,
    KIND_SESSION,
    SESSION_VERSION,
    Bye,
    encode_frame,
    pack_frame,
)
from segue.kv.session.tls import Tls
from segue.lab.sim.visitor import FrameConnection, Visitor, Visits
from segue.lab.sim.visits_unauthenticated import changed_frame, header_of
from segue.lab.sim.world import new_leader
from segue.server.messages.control import Cancel

AUTHENTICATED = Visits()


def tls_of_nobody() -> Tls:
    """Contexts without a certificate: nobody can be talked to with them, and everybody must say why."""
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    return Tls(server, client)


@AUTHENTICATED.kind("another secret")
async def _secret(visitor: Visitor) -> None:
    await visitor.dials(visitor.node(knows=False), ErrorCode.UNAUTHORIZED)


@AUTHENTICATED.kind("another protocol version")
async def _protocol(visitor: Visitor) -> None:
    await visitor.dials(visitor.node(protocol=SESSION_VERSION + 1), ErrorCode.PEER_REFUSED)


@AUTHENTICATED.kind("tls here only")
async def _tls(visitor: Visitor) -> None:
    await visitor.dials(
        visitor.node(tls=tls_of_nobody()), ErrorCode.PEER_REFUSED, ErrorCode.BOOTSTRAP_UNREACHABLE
    )


@AUTHENTICATED.kind("tls there only")
async def _tls_there(visitor: Visitor) -> None:
    """A visitor that listens and speaks TLS: whoever comes without is told why, and nobody hangs."""
    node = visitor.node(tls=tls_of_nobody())
    host, port = await node.listen(visitor.loop.host, 0)
    other = new_leader(visitor.rng)
    for tls, codes in (
        (None, (ErrorCode.PEER_REFUSED,)),
        (tls_of_nobody(), (ErrorCode.BOOTSTRAP_UNREACHABLE, ErrorCode.UNAUTHORIZED)),
    ):
        try:
            await visitor.node(me=other, tls=tls).connect(host, port, timeout_s=10.0)
        except SegueError as error:
            if error.info.code not in codes:
                visitor.wrong(f"was told {error}")
        else:
            visitor.wrong("has a session without a certificate")
    raws = [(await visitor.loop.create_connection(FrameConnection, host, port))[1] for _ in range(3)]
    raws[0].transport.abort()
    raws[1].transport.write(b"\x16\x03\x01\x00\x02hm")
    for raw in raws[1:]:
        await visitor.is_cut(raw)
    last = (await visitor.loop.create_connection(FrameConnection, host, port))[1]
    await node.close()
    await visitor.is_cut(last)
    if node.pending:
        visitor.wrong(f"{node.pending} pending connections are left")


@AUTHENTICATED.kind("another role")
async def _role(visitor: Visitor) -> None:
    await visitor.dials(visitor.node(role=Role.UNIFIED), ErrorCode.PEER_REFUSED)


@AUTHENTICATED.kind("expects another")
async def _another(visitor: Visitor) -> None:
    expected = new_leader(visitor.rng)
    await visitor.dials(visitor.node(), ErrorCode.PEER_RESTARTED, expect=expected)


@AUTHENTICATED.kind("refuses")
async def _refuses(visitor: Visitor) -> None:
    await visitor.dials(visitor.node(), ErrorCode.PEER_REFUSED)


async def _fails(visitor: Visitor) -> None:
    await visitor.dials(visitor.node(), ErrorCode.INTERNAL)


AUTHENTICATED["failing hello"] = AUTHENTICATED["failing accept"] = _fails


@AUTHENTICATED.kind("nobody there")
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
    @AUTHENTICATED.kind(kind)
    async def says(visitor: Visitor) -> None:
        session = await visitor.dials(visitor.node())
        if session is not None:
            session._write(frame(visitor))
            await visitor.is_ended(*codes)


_on_open("hello on a session", lambda v: encode_frame(v.my_hello()), ErrorCode.PEER_LOST)
_on_open("no message", lambda v: pack_frame(KIND_MESSAGE, b"\x93abc"), ErrorCode.PEER_LOST)
_on_open("no session frame", lambda v: pack_frame(KIND_SESSION, b"\x93abc"), ErrorCode.PEER_LOST)
_on_open("changed message", lambda v: changed_frame(v), ErrorCode.PEER_LOST)
_on_open("unknown kind", lambda v: pack_frame(7, b"\x80"), ErrorCode.PEER_LOST)
_on_open("endless message", lambda v: header_of(2**31), ErrorCode.PEER_LOST)
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
    AUTHENTICATED[_kind] = _goes_on


@AUTHENTICATED.kind("many at once")
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


@AUTHENTICATED.kind("gives up")
async def _gives_up(visitor: Visitor) -> None:
    node = visitor.node()
    try:
        await node.connect(visitor.target.host, visitor.target.port, timeout_s=visitor.rng.random() * 0.003)
    except SegueError as error:
        if error.info.code is not ErrorCode.BOOTSTRAP_TIMEOUT:
            visitor.wrong(f"was told {error}")
    await node.close()
