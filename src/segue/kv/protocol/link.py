"""This side and the other one, as machines know them; what a session to a peer makes possible."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from segue.kv.ids import ChecksumKind, ChecksumMode, LeaderId, RankId, Role
from segue.kv.layout.planner import PairPlan
from segue.kv.limits import Limits
from segue.kv.protocol.events import PeerUp
from segue.kv.protocol.room_ranks import DpRanks


@dataclass(frozen=True, slots=True)
class LocalLeader:
    """This side, as all its machines know it."""

    role: Role
    me: LeaderId
    origin: str
    limits: Limits
    kv_checksum: ChecksumMode
    dp: DpRanks = field(default_factory=DpRanks)

    def name_of(self, peer: LeaderId) -> str:
        """How errors name a peer."""
        other = Role.DECODE if self.role is Role.PREFILL else Role.PREFILL
        return f"{other} {peer}"


@dataclass(frozen=True, slots=True)
class PeerLink:
    """A peer whose session is up. `partners` are, of each rank of ours that takes part in the plan, the ranks
    that it exchanges bytes with. `checksum` is the kind that both can compute; None: hand-offs are not
    checked."""

    peer: LeaderId
    transport: str
    plan: PairPlan
    partners: Mapping[int, Sequence[RankId]]
    checksum: ChecksumKind | None = ChecksumKind.XXH3


def writes(
    prefill: LeaderId,
    decode: LeaderId,
    pairs: Collection[tuple[int, int]],
    relays: Collection[tuple[int, int, int]],
) -> list[tuple[RankId, RankId]]:
    """The writes between ranks, by the `pairs` and `relays` of a plan."""
    found = [(RankId(prefill, source), RankId(decode, target)) for source, target in pairs]
    return found + [(RankId(decode, target), RankId(decode, other)) for _, target, other in relays]


def partners(me: LeaderId, written: Collection[tuple[RankId, RankId]]) -> dict[int, tuple[RankId, ...]]:
    """For each of our ranks: the ranks that it writes to, or that write to it, each once."""
    found: dict[int, dict[RankId, None]] = {}
    for writer, reader in written:
        if writer.leader == me:
            found.setdefault(writer.rank, {})[reader] = None
        if reader.leader == me:
            found.setdefault(reader.rank, {})[writer] = None
    return {rank: tuple(found[rank]) for rank in sorted(found)}


def make_link(local: LocalLeader, event: PeerUp, transport: str) -> PeerLink:
    """The link to this peer."""
    plan, me = event.plan, local.me
    prefill, decode = (me, event.peer) if local.role is Role.PREFILL else (event.peer, me)
    written = writes(prefill, decode, plan.pairs, plan.relays)
    name = event.transport or transport
    return PeerLink(event.peer, name, plan, partners(me, written), event.checksum)
