"""A replica as a frontend sees it, and the route of one attempt over two of them. State only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from segue.engine.request import Output
from segue.kv import LeaderId, Role, SegueError
from segue.kv.session import Session
from segue.server.balance.policy import Candidate
from segue.server.messages.control import Load
from segue.server.registry.registry_records import InstanceRecord, ReplicaRecord


class OutputSink(Protocol):
    """Receives the outputs of a replica for one of its running requests."""

    def output(self, replica: Replica, output: Output) -> None:
        """The next output."""
        ...

    def lost(self, replica: Replica, error: SegueError) -> None:
        """The session ended: no output comes any more."""
        ...


@dataclass(slots=True, eq=False)
class Replica:
    """One data-parallel rank of one incarnation: what the registry says of it, the session to its leader
    and its last load. `running` are the request ids that were sent there and have not ended, `tokens` the
    tokens that they may need at most."""

    record: InstanceRecord
    where: ReplicaRecord
    session: Session | None = None
    load: Load | None = None
    #: Still in the registry's list.
    listed: bool = True
    running: dict[str, OutputSink] = field(default_factory=dict)
    tokens: int = 0
    # Fixed: later records of the registry do not change them.
    role: Role = field(init=False)
    leader: LeaderId = field(init=False)
    #: as `ErrorInfo.origin` names it
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.role = self.record.role
        self.leader = LeaderId(self.record.incarnation, self.where.dp_rank)
        self.name = f"{self.role} {self.leader}"

    @property
    def usable(self) -> bool:
        """May be given a new request."""
        draining = self.where.draining or (self.load is not None and self.load.draining)
        return self.session is not None and self.listed and not draining

    @property
    def alone(self) -> bool:
        """Can run a request without a prefill replica."""
        limit = None if self.load is None else self.load.local_tokens
        return self.role is Role.UNIFIED or (self.role is Role.DECODE and limit is not None)

    def candidate(self) -> Candidate:
        """The replica as placement policies see it."""
        return Candidate(self.leader, self.record.dp_size, self.load, len(self.running), self.tokens)


#: Why the KV of a prompt is handed over or not.
REASONS = {
    "unified": "computed by a unified instance",
    "short": "computed by decode: its uncached part is short",
    "no_prefill": "computed by decode: no prefill instance can take it",
    "long": "handed over: its uncached part is too long for decode",
    "never": "handed over: this decode instance computes no prompts",
    "asked": "handed over: the client or router named its prefill side",
}


class Route(msgspec.Struct, frozen=True):
    """The replicas of one attempt, and the reason of the choice. Both halves are equal if one replica
    computes the prompt and decodes. `reason` is one of `REASONS`."""

    room: int
    prefill: Replica
    decode: Replica
    why: str = ""
    reason: str = "long"

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """Each of them once, decode first."""
        return (self.decode,) if self.prefill is self.decode else (self.decode, self.prefill)

    @property
    def pair(self) -> tuple[LeaderId, LeaderId]:
        """The prefill and the decode leader."""
        return (self.prefill.leader, self.decode.leader)
