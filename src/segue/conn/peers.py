"""The peers of a leader: which two replicas may be joined, and what is known of one that is."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

import msgspec

from segue.core.errors import DECODE_ERRORS, LayoutMismatch, PeerRefused
from segue.core.types import Role
from segue.handoff.messages import PROTOCOL_VERSION, HandoffMessage, LeaderInfo
from segue.layout.planner import PairPlan, plan_pair
from segue.session.api import PeerInfo, Session
from segue.transport.base import Endpoint
from segue.transport.kinds import KINDS, TransportKinds

log = logging.getLogger("segue.conn")

#: So much must have been written before a path's speed says something.
MEASURED_BYTES = 2**20


@dataclass(slots=True)
class PathSpeed:
    """What a path to a peer has carried: `nbytes` in `seconds`, each write from when it was given to
    the transport until it had landed."""

    transport: str
    nbytes: int = 0
    seconds: float = 0.0

    @property
    def bytes_per_s(self) -> float:
        """Zero as long as nothing was written."""
        return self.nbytes / self.seconds if self.seconds > 0 else 0.0

    def add(self, nbytes: int, seconds: float) -> bool:
        """One more write; True once, when enough was written to know the speed."""
        before = self.nbytes
        self.nbytes += nbytes
        self.seconds += seconds
        return before < MEASURED_BYTES <= self.nbytes


@dataclass(slots=True)
class Peer:
    """One live session to a peer leader. While `opening`, messages wait in `early`."""

    session: Session
    info: LeaderInfo
    transport: str
    speed: PathSpeed
    opening: asyncio.Task[None] | None = None
    early: list[HandoffMessage] = field(default_factory=list)

    def measure(self, nbytes: int, seconds: float) -> None:
        """A write has landed. A slow path must not be taken silently: its speed is logged once, and shown
        for ever."""
        if self.speed.add(nbytes, seconds):
            leader, mib_per_s = self.session.peer.leader, self.speed.bytes_per_s / 2**20
            log.info("path measured peer=%s transport=%s mib_per_s=%.1f", leader, self.transport, mib_per_s)


@dataclass(frozen=True, slots=True)
class Joined:
    """A legal pair: what the peer said of itself, the transport that both will use, and what is copied from
    which rank to which."""

    info: LeaderInfo
    transport: str
    plan: PairPlan


def join(role: Role, mine: LeaderInfo, peer: PeerInfo, kinds: TransportKinds = KINDS) -> Joined:
    """Check that the two replicas can hand KV over, and how. Pure.

    Raises PeerRefused (protocol, model, no common transport) or LayoutMismatch, each with
    both sides' values.
    """
    try:
        theirs = msgspec.msgpack.decode(peer.hello, type=LeaderInfo)
    except DECODE_ERRORS as exc:
        raise PeerRefused(f"{peer.address} sent an unreadable description of itself: {exc}") from exc
    if theirs.protocol != PROTOCOL_VERSION:
        raise PeerRefused(
            f"{peer.address} speaks hand-off protocol {theirs.protocol}, this side {PROTOCOL_VERSION}; "
            "run the same segue version on both"
        )
    if theirs.model != mine.model:
        raise PeerRefused(
            f"{peer.address} serves another model or dtype (fingerprint {theirs.model[:16]}, here "
            f"{mine.model[:16]}); start both sides with the same --model and --dtype"
        )
    prefill, decode = (mine, theirs) if role is Role.PREFILL else (theirs, mine)
    plan = plan_pair(prefill.ranks, decode.ranks)
    endpoints = [
        {name: [_endpoint(data) for data in of_ranks or [b""]] for name, of_ranks in i.endpoints.items()}
        for i in (prefill, decode)
    ]
    name = kinds.choose(endpoints[0], endpoints[1])
    if name is None:
        raise PeerRefused(
            f"no common transport: prefill offers {sorted(prefill.endpoints)}, "
            f"decode {sorted(decode.endpoints)}; start both sides with the same --transport, between "
            "hosts with tcp"
        )
    return Joined(theirs, name, plan)


def _endpoint(data: bytes) -> Endpoint:
    try:
        return msgspec.msgpack.decode(data, type=Endpoint)
    except DECODE_ERRORS as exc:
        raise LayoutMismatch(f"unreadable transport endpoint: {exc}") from exc
