"""The peers of a leader: which two replicas may be joined, and what is known of one that is."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

import msgspec

from segue.kv.errors import DECODE_ERRORS, LayoutMismatch, PeerRefused
from segue.kv.ids import ChecksumKind, Role
from segue.kv.layout.planner import PairPlan, plan_pair
from segue.kv.model_match import model_difference
from segue.kv.protocol.messages import HANDOFF_VERSIONS, HandoffMessage, LeaderInfo
from segue.kv.session.api import PeerInfo, Session
from segue.kv.transport.base import Endpoint
from segue.kv.transport.kinds import KINDS, TransportKinds
from segue.kv.versions import Versions

log = logging.getLogger("segue.kv")

#: So much must have been written before a path's speed says something.
MEASURED_BYTES = 2**20
#: Peers between being let in and the opening of their session, which follow one another in milliseconds.
#: For a further peer the result is computed again.
BETWEEN = 64


@dataclass(slots=True)
class PathSpeed:
    """The writes to one peer over `transport`: `nbytes` in `seconds`, each write counted from its call until
    it landed."""

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
    """One live session to a peer leader, over one of the transports `names`. While `opening`, messages wait
    in `early`."""

    session: Session
    info: LeaderInfo
    names: list[str]
    plan: PairPlan
    #: on decode: the transport that prefill has chosen
    chosen: asyncio.Future[str]
    opening: asyncio.Task[None] | None = None
    early: list[HandoffMessage] = field(default_factory=list)
    checksum: ChecksumKind | None = ChecksumKind.XXH3
    #: version of the hand-off's messages
    version: int = HANDOFF_VERSIONS.newest
    speed: PathSpeed = field(init=False)

    def __post_init__(self) -> None:
        self.take(self.names[0])

    @property
    def transport(self) -> str:
        """The transport in use; while `opening`, the one that is tried."""
        return self.speed.transport

    def take(self, transport: str) -> None:
        """Use this transport from now on."""
        self.speed = PathSpeed(transport)

    def measure(self, nbytes: int, seconds: float) -> None:
        """A write has landed. A slow path must not be taken silently: its speed is logged once, and shown
        for ever."""
        if self.speed.add(nbytes, seconds):
            leader, mib_per_s = self.session.peer.leader, self.speed.bytes_per_s / 2**20
            log.info("path measured peer=%s transport=%s mib_per_s=%.1f", leader, self.transport, mib_per_s)


@dataclass(frozen=True, slots=True)
class PeerPlan:
    """A legal pair: what the peer said of itself, what both will use (one of the transports `names`, in
    prefill's order; checksum; version of the hand-off's messages), and what is copied from which rank to
    which."""

    info: LeaderInfo
    names: list[str]
    plan: PairPlan
    checksum: ChecksumKind | None = ChecksumKind.XXH3
    version: int = HANDOFF_VERSIONS.newest


class Compatibility:
    """The properties that a leader sends to its peers, and the plan for a pair that follows from both
    sides'."""

    def __init__(self, role: Role, info: LeaderInfo, kinds: TransportKinds) -> None:
        self._role = role
        self._kinds = kinds
        #: All introductions of ourselves that were sent, by their bytes: one more with each withdrawn
        #: transport.
        self._introductions: dict[bytes, LeaderInfo] = {}
        #: The peers that were let in and whose sessions have not opened; at most `BETWEEN`.
        self._checked: dict[PeerInfo, PeerPlan] = {}
        self.say(info)

    def say(self, info: LeaderInfo) -> None:
        """Send `info` to peers from now on."""
        self.info = info
        self.hello = msgspec.msgpack.encode(info)
        self._introductions[self.hello] = info

    def check_peer(self, peer: PeerInfo) -> PeerPlan:
        """See `join`; by what the peer was told, so that both sides come to the same."""
        plan = self._join(peer)
        if len(self._checked) >= BETWEEN:
            del self._checked[next(iter(self._checked))]
        self._checked[peer] = plan
        return plan

    def checked(self, peer: PeerInfo) -> PeerPlan:
        """The result of `check_peer` for a peer that was just accepted; may be called once."""
        return self._checked.pop(peer, None) or self._join(peer)

    def _join(self, peer: PeerInfo) -> PeerPlan:
        return join(self._role, self._introductions.get(peer.sent, self.info), peer, self._kinds)


class _Spoken(msgspec.Struct, frozen=True):
    """The part of a `LeaderInfo` that every version can read."""

    versions: Versions


def join(role: Role, mine: LeaderInfo, peer: PeerInfo, kinds: TransportKinds = KINDS) -> PeerPlan:
    """Check that the two replicas can hand KV over, and how. Pure.

    Raises PeerRefused (protocol, model, no common transport) or LayoutMismatch, each with
    both sides' values.
    """
    try:
        spoken = msgspec.msgpack.decode(peer.hello, type=_Spoken).versions
        version = mine.versions.common(spoken)
        if version is None:
            raise PeerRefused(
                f"no hand-off protocol in common: {peer.address} speaks {spoken}, this side {mine.versions}; "
                "run segue versions that meet on both sides"
            )
        theirs = msgspec.msgpack.decode(peer.hello, type=LeaderInfo)
    except DECODE_ERRORS as exc:
        raise PeerRefused(f"{peer.address} sent an unreadable description of itself: {exc}") from exc
    prefill, decode = (mine, theirs) if role is Role.PREFILL else (theirs, mine)
    if theirs.model != mine.model:
        found, mend = model_difference(prefill.model, decode.model)
        raise PeerRefused(f"{found}; {mend}")
    plan = plan_pair(prefill.ranks, decode.ranks)
    endpoints = [
        {name: [_endpoint(data) for data in of_ranks or [b""]] for name, of_ranks in i.endpoints.items()}
        for i in (prefill, decode)
    ]
    if not (names := kinds.common(endpoints[0], endpoints[1])):
        raise PeerRefused(
            f"no common transport: prefill offers {sorted(prefill.endpoints)}, "
            f"decode {sorted(decode.endpoints)}; start both sides with the same --transport, between "
            "hosts with tcp"
        )
    return PeerPlan(theirs, names, plan, common_checksum(prefill, decode), version)


def common_checksum(prefill: LeaderInfo, decode: LeaderInfo) -> ChecksumKind | None:
    """The preferred kind of checksum that both sides compute; None where there is none and both want that.
    Raises PeerRefused where one of them does not."""
    for kind in ChecksumKind:
        if kind in prefill.checksums and kind in decode.checksums:
            return kind
    if prefill.unchecked and decode.unchecked:
        return None
    ours, theirs = list(prefill.checksums), list(decode.checksums)
    raise PeerRefused(
        f"no common checksum: prefill computes {ours}, decode {theirs}; to hand over unchecked, set "
        "kv_checksum (--kv-checksum) to off on both sides"
    )


def _endpoint(data: bytes) -> Endpoint:
    try:
        return msgspec.msgpack.decode(data, type=Endpoint)
    except DECODE_ERRORS as exc:
        raise LayoutMismatch(f"unreadable transport endpoint: {exc}") from exc
