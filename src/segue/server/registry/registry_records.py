"""The records of the registry. Wire types of its HTTP API (`/v1/…`, JSON)."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from segue.kv import Incarnation, LeaderId, Role

#: The roles whose instances serve requests.
SERVING = (Role.PREFILL, Role.DECODE, Role.UNIFIED)


class ReplicaRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One data-parallel rank of an instance: where its leader's session listens.

    `version` is that of its segue and `transports` what it offers to peers; they decide nothing, `segue
    doctor` compares them.
    """

    dp_rank: int
    host: str
    port: int
    draining: bool = False
    version: str = ""
    transports: list[str] = []


class InstanceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One instance in one incarnation. Immutable: a second writer is refused.

    It is `ready` for others only once all the ranks `0 … dp_size - 1` have been there: then it is
    `complete`, and a rank that is missing has left or died. `draining` says that all of its ranks take no
    new work. `model` is a fingerprint, `source` what the instance was started with (a name or a path on
    its host). With `shared_experts` its ranks compute each step together: the end of one is that of all.
    Foreign routers know a prefill instance by its host and `bootstrap_port`.
    """

    incarnation: Incarnation
    role: Role
    model: str
    served_model: str
    context_tokens: int
    source: str = ""
    dp_size: int = 1
    tp_size: int = 1
    pp_size: int = 1
    cp_size: int = 1
    shared_experts: bool = False
    load_balance: str = "round_robin"
    bootstrap_port: int = 0
    http_host: str = ""
    http_port: int = 0
    complete: bool = False
    draining: bool = False
    replicas: list[ReplicaRecord] = []

    def leaders(self) -> Iterator[tuple[LeaderId, ReplicaRecord]]:
        """The leaders of this instance, and where each one listens."""
        return ((LeaderId(self.incarnation, where.dp_rank), where) for where in self.replicas)

    @property
    def ready(self) -> bool:
        """All ranks have registered, now or earlier, and one is there."""
        # The lengths first: a `dp_size` from the wire must not be counted to.
        whole = len(self.replicas) == self.dp_size and {r.dp_rank for r in self.replicas} == set(
            range(self.dp_size)
        )
        return whole or (self.complete and bool(self.replicas))


class InstanceList(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a topology query.

    `version` changes with every visible change; a query with the version that it has seen waits
    for the next. `epoch` names one life of the registry and `age_s` is its length so far in
    seconds: a young registry has not heard of everybody yet.
    """

    version: int
    epoch: str
    age_s: float
    instances: list[InstanceRecord]


class RoomRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The owner of a room: an instance and a DP rank. Immutable; gone after `ttl_s` seconds."""

    incarnation: Incarnation
    dp_rank: int
    ttl_s: float


class DrainFlag(msgspec.Struct, frozen=True, kw_only=True):
    """The one thing about an instance that it may change: of one rank, or of all that are there."""

    draining: bool
    dp_rank: int | None = None


class Registered(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a rank that registers. `epoch` as in `InstanceList`; a new one has forgotten all rooms,
    and whether the instance was `complete`. So has a registry to which the rank is `new`."""

    version: int
    epoch: str
    complete: bool
    new: bool = False
