"""Visits of those who are several nodes themselves: how sessions between two begin, meet, fill up and end."""

from __future__ import annotations

import asyncio
from typing import Any

from segue.kv.errors import AbortedByClient, ConfigError, ErrorCode, RequestTooLarge, SegueError
from segue.kv.ids import LeaderId, Role
from segue.kv.limits import Limits
from segue.kv.session.api import PeerInfo, Session
from segue.kv.session.connection import Connection, State
from segue.kv.session.node import SessionNode
from segue.lab.sim.outsider import GRACE_S
from segue.lab.sim.visitor import Visitor, Visits
from segue.lab.sim.world import new_leader
from segue.server.messages.control import Cancel

BETWEEN_NODES = Visits()
#: How much may wait for a peer that does not read, and the largest message.
BACKLOG_BYTES, FRAME_BYTES = 2**15, 2**12
#: An end that was said, on its way.
SOON_S = 0.3


class VisitorOwner:
    """The owner of a node, which remembers what it heard."""

    def __init__(self, visitor: Visitor, **limits: Any) -> None:
        timing = visitor.deployment.timing
        self.begun = 0
        self.received_here = 0
        self.ends: list[SegueError] = []
        limits = {"keepalive_s": timing.keepalive_s, "peer_silence_s": timing.silence_s, **limits}
        self.node: SessionNode = visitor.node(
            me=new_leader(visitor.rng), handlers=dict.fromkeys(Role, self), limits=Limits(**limits)
        )

    def hello(self) -> bytes:
        """As `SessionHandler`."""
        return b""

    def accept(self, peer: PeerInfo) -> None:
        """As `SessionHandler`."""

    def opened(self, session: Session) -> None:
        """As `SessionHandler`."""
        self.begun += 1

    def received(self, session: Session, message: object) -> None:
        """As `SessionHandler`."""
        self.received_here += 1

    def closed(self, session: Session, error: SegueError) -> None:
        """As `SessionHandler`."""
        self.ends.append(error)


def _message(nbytes: int = 1) -> Cancel:
    return Cancel("r" * nbytes, AbortedByClient("it left").info)


async def _dialled(
    visitor: Visitor,
    node: SessionNode,
    place: tuple[str, int],
    *codes: ErrorCode,
    expect: LeaderId | None = None,
) -> Connection | None:
    """A session of `node` with whoever is at `place`, or None if it is refused with one of `codes`."""
    try:
        session = await node.connect(*place, expect=expect, timeout_s=10.0)
    except SegueError as error:
        if error.info.code not in codes:
            visitor.wrong(f"was told {error}")
        return None
    if codes:
        visitor.wrong("got a session")
    assert isinstance(session, Connection)
    return session


@BETWEEN_NODES.kind("dial one another")
async def _dial_one_another(visitor: Visitor) -> None:
    """Two who dial each other at the same time have one session, both the same, and once it has ended they
    can have another."""
    owners = [VisitorOwner(visitor), VisitorOwner(visitor)]
    places = [await owner.node.listen(visitor.loop.host, 0) for owner in owners]
    latency_s, network = visitor.deployment.timing.latency_s, visitor.deployment.network

    async def dials(us: int) -> Connection | None:
        await asyncio.sleep(3 * latency_s * visitor.rng.random())
        them = 1 - us
        return await _dialled(visitor, owners[us].node, places[them], expect=owners[them].node.me)

    for number in range(1, 5):
        found = [session for session in await asyncio.gather(dials(0), dials(1)) if session is not None]
        await asyncio.sleep(SOON_S)
        if len({session.handshake.id for session in found}) != 1 or [o.begun for o in owners] != [number] * 2:
            visitor.wrong(f"{[owner.begun for owner in owners]} sessions have begun after {number} meetings")
        if any(len(owner.node.sessions) != 1 for owner in owners):
            visitor.wrong("not each of the two has one session")
        for session in found:
            session.send(_message())
        await asyncio.sleep(SOON_S)
        if any(owner.received_here != number for owner in owners):
            visitor.wrong(f"{[owner.received_here for owner in owners]} messages came, not {number}")
        if visitor.rng.random() < 0.5:
            visitor.rng.choice(found).close()
        else:
            for connection in network.between(visitor, visitor):
                connection.snap()
        await asyncio.sleep(GRACE_S)
        if any(len(owner.ends) != number or owner.node.sessions for owner in owners):
            visitor.wrong(f"{[len(owner.ends) for owner in owners]} sessions have ended, not {number}")
    for owner in owners:
        await owner.node.close()


@BETWEEN_NODES.kind("comes back")
async def _comes_back(visitor: Visitor) -> None:
    """A peer that has forgotten its session and dials again gets another one, and the old one ends."""
    old = await visitor.dials(visitor.node())
    session = await visitor.dials(visitor.node())
    if session is None or old is None:
        return
    await asyncio.sleep(GRACE_S)
    kept = [there for there in visitor.target.sessions if there.peer.leader == visitor.me]
    if len(kept) != 1 or session.state is not State.OPEN or old.state is not State.ENDED:
        visitor.wrong(f"has {len(kept)} sessions there, the new one {session.state}, the old one {old.state}")
    session.close()


@BETWEEN_NODES.kind("more than fit")
async def _more_than_fit(visitor: Visitor) -> None:
    """One more session than there may be is refused, and costs the others nothing; a place that is free again
    is given."""
    server = VisitorOwner(visitor, max_sessions=2)
    place = await server.node.listen(visitor.loop.host, 0)
    clients = [VisitorOwner(visitor).node for _ in range(3)]
    first = await _dialled(visitor, clients[0], place)
    await _dialled(visitor, clients[1], place)
    await _dialled(visitor, clients[2], place, ErrorCode.OUT_OF_CAPACITY)
    await asyncio.sleep(SOON_S)
    if len(server.node.sessions) != 2 or server.ends:
        visitor.wrong(f"{len(server.node.sessions)} sessions are left")
    if first is not None:
        first.close()
    await asyncio.sleep(SOON_S)
    await _dialled(visitor, clients[2], place)
    for node in (*clients, server.node):
        await node.close()


@BETWEEN_NODES.kind("does not read")
async def _does_not_read(visitor: Visitor) -> None:
    """What waits for a peer that does not read is bounded, and so is a message; only their session ends."""
    writer = VisitorOwner(visitor, max_session_backlog_bytes=BACKLOG_BYTES, max_frame_bytes=FRAME_BYTES)
    reader = VisitorOwner(visitor)
    session = await _dialled(visitor, writer.node, await reader.node.listen(visitor.loop.host, 0))
    if session is None:
        return
    try:
        session.send(_message(2 * FRAME_BYTES))
        visitor.wrong("could send a message that is too large")
    except RequestTooLarge:
        session.send(_message())
    await asyncio.sleep(SOON_S)
    if reader.received_here != 1 or session.state is not State.OPEN:
        visitor.wrong(f"{reader.received_here} messages came")
    ends = visitor.deployment.network.between(visitor, visitor)[0].ends
    for end in ends:
        end.pause_reading()
    waiting = 0
    while session.state is State.OPEN:
        session.send(_message(FRAME_BYTES // 4))
        waiting = max(waiting, session.wire.backlog_bytes)
        await asyncio.sleep(0.001)
        if waiting > BACKLOG_BYTES + FRAME_BYTES:
            visitor.wrong(f"{waiting} bytes wait")
            return
    await asyncio.sleep(SOON_S)
    if [end.info.code for end in writer.ends] != [ErrorCode.PEER_LOST]:
        visitor.wrong(f"its session ended with {writer.ends}")
    for end in ends:
        end.resume_reading()
    await writer.node.close()
    await reader.node.close()


@BETWEEN_NODES.kind("addresses of nobody")
async def _addresses_of_nobody(visitor: Visitor) -> None:
    """What no resolver knows, what has no address, what is none, and another machine without a secret."""
    node = visitor.node()
    for place in (("nobody.invalid", 1), ("nothing.invalid", 1), ("127.0.5.1", 1 << 16)):
        await _dialled(visitor, node, place, ErrorCode.BOOTSTRAP_UNREACHABLE)
    safe = visitor.deployment.secret is not None
    code = ErrorCode.BOOTSTRAP_UNREACHABLE if safe else ErrorCode.UNAUTHORIZED
    await _dialled(visitor, node, ("10.9.9.9", 1), code)
    await node.close()


@BETWEEN_NODES.kind("closes while it dials")
async def _closes_while_it_dials(visitor: Visitor) -> None:
    """Nobody accepts where it dials: it is told so in time, and at once when its own node is closed."""
    listener = visitor.loop.network.listening(visitor.loop, 0)
    node = visitor.node()
    waiting = asyncio.ensure_future(_dialled(visitor, node, listener.place, ErrorCode.DRAINING))
    await asyncio.sleep(visitor.rng.random())
    await node.close()
    await asyncio.wait({waiting}, timeout=SOON_S)
    if not waiting.done():
        visitor.wrong("still waits for a session of a node that is closed")
        waiting.cancel()
    listener.close()


@BETWEEN_NODES.kind("cannot start")
async def _cannot_start(visitor: Visitor) -> None:
    """An address that is taken, of another host or of none, or open to all without a secret; a second one; a
    secret that is too short; a keepalive that is too rare. Who listens there does not notice."""
    busy, another = VisitorOwner(visitor), new_leader(visitor.rng)
    here = visitor.loop.host
    place = await busy.node.listen(here, 0)
    places = [place, (visitor.target.host, 0), ("nobody.invalid", 0)]
    places += [("0.0.0.0", 0)] if visitor.deployment.secret is None else []
    for where in places:
        await _is_refused(visitor, visitor.node(me=another), where)
    await _is_refused(visitor, busy.node, (here, 0))
    for options in (
        {"secret": b"short"},
        {"limits": Limits(keepalive_s=2.0, peer_silence_s=1.0)},
    ):
        try:
            visitor.node(me=another, **options)
            visitor.wrong(f"was made with {options}")
        except ConfigError:
            pass
    client = visitor.node(me=another)
    if await _dialled(visitor, client, place, expect=busy.node.me) is not None:
        await client.close()
    await busy.node.close()
    await _is_refused(visitor, busy.node, place)


async def _is_refused(visitor: Visitor, node: SessionNode, place: tuple[str, int]) -> None:
    try:
        await node.listen(*place)
    except ConfigError:
        return
    visitor.wrong(f"listens at {place}")
