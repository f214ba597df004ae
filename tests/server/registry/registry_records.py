"""Parts that the registry tests share."""

from __future__ import annotations

from typing import Any

from segue.kv.clock import VirtualClock
from segue.kv.ids import Incarnation, Role
from segue.server.registry.registry_records import InstanceRecord, ReplicaRecord
from segue.server.registry.registry_store import RegistryStore

SECRET = b"a secret of the tests"
#: When a test is given up: no machine stands still for so long.
DEADLINE_S = 60.0
A, B, C = (Incarnation(letter * 32) for letter in "abc")


def record(incarnation: Incarnation = A, dp_rank: int = 0, **changes: Any) -> InstanceRecord:
    """One rank of an instance; its port follows from rank and incarnation."""
    port = changes.pop("port", 9000 + 100 * (ord(incarnation[0]) - ord("a")) + dp_rank)
    fields: dict[str, Any] = {
        "incarnation": incarnation,
        "role": Role.PREFILL,
        "model": "m",
        "served_model": "smollm2",
        "context_tokens": 2048,
        "replicas": [ReplicaRecord(dp_rank=dp_rank, host="127.0.0.1", port=port)],
    }
    return InstanceRecord(**(fields | changes))


def store(ttl_s: float = 10.0, **changes: Any) -> tuple[RegistryStore, VirtualClock]:
    clock = VirtualClock()
    return RegistryStore(clock, ttl_s=ttl_s, **changes), clock


def names(records: list[InstanceRecord]) -> list[Incarnation]:
    return [each.incarnation for each in records]
