"""A hand-off that the protocol refuses to open ends like any other: once, with its reason, and empty."""

from __future__ import annotations

import math

import pytest
from test_manager import expect, receive

from segue.kv.config import KVConfig
from segue.kv.errors import ErrorCode, Internal, InvalidRequest
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
        posted: list[events.Event] = []
        manager.post = lambda *batch: posted.extend(batch)  # type: ignore[method-assign]
        opened = expect if role is Role.PREFILL else receive
        opened(manager, first, 4, 60)
        manager._handle(posted.pop())
        if reason == "used before":
            manager._handle(events.EndRoom(first.received_as, Internal("ended").info))
            manager.forget(first.received_as)
        changes.clear()
        handle = opened(manager, second, 4, 60)
        manager._handle(posted.pop())
        assert handle.poll() is KVPoll.FAILED
        assert handle.error is not None
        assert handle.error.code in (ErrorCode.INVALID_REQUEST, ErrorCode.OUT_OF_CAPACITY)
        assert handle.released
        assert [type(c) for c in changes] == [events.Phase, events.Release]
        handle.clear()
        assert manager.sizes()["handles"] == (1 if reason == "too many" else 0), "of the first one"
    finally:
        manager.close()
        memory.close()


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
@pytest.mark.parametrize("budget_s", [math.nan, math.inf, -math.inf])
def test_a_budget_without_an_end_is_refused(role: Role, budget_s: float) -> None:
    """The deadline of NaN never passes."""
    memory = allocate(SPEC.nbytes)
    manager = KVManager(KVConfig(role=role, model="m", spec=SPEC, transports=["fake"]), memory)
    try:
        other = LeaderId(Incarnation("d" * 32))
        ids = (manager.config.me, other) if role is Role.PREFILL else (other, manager.config.me)
        with pytest.raises(InvalidRequest, match="budget_s"):
            (expect if role is Role.PREFILL else receive)(manager, TransferId(5, 0, *ids), 8, budget_s)
        assert manager.sizes()["handles"] == 0
    finally:
        manager.close()
        memory.close()
