"""This side and the other one, as machines know them; what a session to a peer makes possible."""

from __future__ import annotations

from dataclasses import dataclass, field

from segue.kv.errors import ErrorInfo, Internal, LayoutMismatch, PeerRefused, SegueError
from segue.kv.ids import ChecksumMode, LeaderId, Role
from segue.kv.layout.planner import PairPlan, plan_pair
from segue.kv.limits import Limits
from segue.kv.protocol.events import PeerUp
from segue.kv.protocol.messages import LeaderInfo
from segue.kv.protocol.room_ranks import DpRanks


@dataclass(frozen=True, slots=True)
class LocalLeader:
    """This side, as all its machines know it."""

    role: Role
    me: LeaderId
    origin: str
    limits: Limits
    info: LeaderInfo
    kv_checksum: ChecksumMode
    dp: DpRanks = field(default_factory=DpRanks)

    def name_of(self, peer: LeaderId) -> str:
        """How errors name a peer."""
        other = Role.DECODE if self.role is Role.PREFILL else Role.PREFILL
        return f"{other} {peer}"


@dataclass(frozen=True, slots=True)
class PeerLink:
    """A peer whose session is up. Exactly one of `plan` and `error` is set. `ranks` are those of our own
    that take part in the plan."""

    peer: LeaderId
    info: LeaderInfo
    transport: str
    plan: PairPlan | None = None
    error: ErrorInfo | None = None
    ranks: tuple[int, ...] = ()

    def usable_plan(self) -> PairPlan:
        """The plan, or the reason why there is none, raised."""
        if self.plan is None:
            raise self.error.exception() if self.error else Internal("a link without plan or reason")
        return self.plan


def make_link(local: LocalLeader, event: PeerUp, transport: str) -> PeerLink:
    """What we can do with this peer. A mismatch fails its hand-offs, and nothing else: the session
    normally refuses such a peer before it comes this far."""
    info = event.info
    transport = event.transport or transport
    prefill, decode = (local.info, info) if local.role is Role.PREFILL else (info, local.info)
    try:
        if prefill.protocol != decode.protocol:
            raise PeerRefused(
                f"prefill speaks protocol {prefill.protocol}, decode {decode.protocol}; "
                "start both with the same version of segue"
            )
        if prefill.model != decode.model:
            raise LayoutMismatch(
                f"prefill serves model {prefill.model}, decode {decode.model}; "
                "start both with the same --model"
            )
        plan = plan_pair(prefill.ranks, decode.ranks)
    except SegueError as error:
        at_us = error.at(origin=local.origin, peer=local.name_of(event.peer)).info
        return PeerLink(event.peer, info, transport, error=at_us)
    if local.role is Role.PREFILL:
        ours = {source for source, _ in plan.pairs}
    else:
        ours = {target for _, target in plan.pairs} | {other for _, _, other in plan.relays}
    return PeerLink(event.peer, info, transport, plan, ranks=tuple(sorted(ours)))
