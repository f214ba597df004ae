"""Records and reports of instances, of which a test names what matters to it."""

from __future__ import annotations

from typing import Any

from segue.kv.ids import Incarnation, Role
from segue.server.messages.control import Load
from segue.server.registry.registry_records import InstanceRecord, ReplicaRecord


def load(**changes: Any) -> Load:
    """What a leader without requests reports."""
    idle = {"dp_rank": 0, "running": 0, "waiting": 0, "tokens": 0, "pages_free": 9, "pages_total": 9}
    return Load(**idle | changes)


def instance_record(incarnation: Incarnation, *ports: int, **changes: Any) -> InstanceRecord:
    """An instance with a DP rank at each of these ports of loopback."""
    fields: dict[str, Any] = {
        "incarnation": incarnation,
        "role": Role.DECODE,
        "model": "m",
        "served_model": "tiny",
        "context_tokens": 100,
        "dp_size": len(ports),
        "replicas": [ReplicaRecord(dp_rank=n, host="127.0.0.1", port=port) for n, port in enumerate(ports)],
    }
    return InstanceRecord(**fields | changes)
