"""A hand-off that the protocol refuses to open ends like any other: once, with its reason, and empty."""

from __future__ import annotations

import pytest

from segue.kv.config import KVConfig
from segue.kv.errors import ErrorCode, Internal
from segue.kv.ids import Incarnation, KVPoll, LeaderId, Role, TransferId
from segue.kv.layout.spec import KVShape, PoolSpec
from segue.kv.limits import Limits
from segue.kv.manager import KVManager
from segue.kv.protocol import events
from segue.kv.transport.memory.pool_memory import allocate

SHAPE = KVShape(layers=1, kv_heads=1, k_dim=8, v_dim=8, dtype="float16", item_bytes=2)
SPEC = PoolSpec(shape=SHAPE, page_tokens=4, pages=4, layer_count=1, head_count=1)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
@pytest.mark.parametrize("reason", ["used before", "too many"])
def test_a_refused_hand_off_is_reported_and_forgotten(role: Role, reason: str) -> None:
    memory = allocate(SPEC.nbytes)
    changes: list[object] = []
    limits = Limits(max_transfers=1 if reason == "too many" else 8)
    config = KVConfig(role=role, model="m", spec=SPEC, transports=["fake"], limits=limits)
    manager = KVManager(config, memory, changes.append)
    try:
        other = LeaderId(Incarnation("d" * 32))
        ids = (config.me, other) if role is Role.PREFILL else (other, config.me)
        first = TransferId(5, 0, *ids)
        second = TransferId(6, 0, *ids) if reason == "too many" else first
        open_half = events.OpenSender if role is Role.PREFILL else events.OpenReceiver
        manager._handle(open_half(first, 4, manager.clock.now() + 60))
        if reason == "used before":
            manager._handle(events.AbortTransfer(first, Internal("ended").info))
        changes.clear()
        handle = manager.sender(second) if role is Role.PREFILL else manager.receiver(second)
        manager._handle(open_half(second, 4, manager.clock.now() + 60))
        assert handle.poll() is KVPoll.FAILED
        assert handle.error is not None
        assert handle.error.code in (ErrorCode.INVALID_REQUEST, ErrorCode.OUT_OF_CAPACITY)
        assert handle.released
        assert [type(c) for c in changes] == [events.Phase, events.Release]
        handle.clear()
        assert manager.sizes()["handles"] == 0
    finally:
        manager.close()
        memory.close()


def test_only_opening_can_be_refused() -> None:
    transfer = TransferId(5, 0, LeaderId(Incarnation("a" * 32)), LeaderId(Incarnation("d" * 32)))
    with pytest.raises(Internal, match="a bug"):
        events.refusal(events.AbortTransfer(transfer, Internal("x").info), Internal("a bug").info)
