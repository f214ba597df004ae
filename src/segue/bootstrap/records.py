"""What the registry stores. Wire types of its HTTP API (`/v1/…`, JSON)."""

from __future__ import annotations

import msgspec

from segue.core.types import Incarnation, Role


class ReplicaRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One data-parallel rank of an instance: where its leader's session listens."""

    dp_rank: int
    host: str
    port: int


class InstanceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One instance in one incarnation. Immutable: a second writer is refused.

    It is `ready` for others only when `replicas` holds exactly the ranks `0 … dp_size - 1`.
    """

    incarnation: Incarnation
    role: Role
    model: str
    served_model: str
    context_tokens: int
    dp_size: int = 1
    tp_size: int = 1
    pp_size: int = 1
    cp_size: int = 1
    load_balance: str = "round_robin"
    http_host: str = ""
    http_port: int = 0
    draining: bool = False
    replicas: list[ReplicaRecord] = []

    @property
    def ready(self) -> bool:
        """All ranks have registered."""
        return {r.dp_rank for r in self.replicas} == set(range(self.dp_size)) and len(
            self.replicas
        ) == self.dp_size
