"""A hand-off that the protocol refuses to open ends like any other: once, with its reason, and empty."""

from __future__ import annotations

import math
from contextlib import closing

import pytest
from kv_sides import Side, expect, receive

from segue.kv.errors import ErrorCode, InvalidRequest
from segue.kv.ids import Incarnation, KVPoll, LeaderId, Role, TransferId
from segue.kv.limits import Limits
from segue.kv.protocol import events

OPENED = {Role.PREFILL: expect, Role.DECODE: receive}


def hand_off(side: Side, room: int = 5) -> TransferId:
    """One of `side` with a leader that never comes."""
    other = LeaderId(Incarnation("d" * 32))
    pair = (side.me, other) if side.manager.config.role is Role.PREFILL else (other, side.me)
    return TransferId(room, 0, *pair)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
@pytest.mark.parametrize("reason", [ErrorCode.INVALID_REQUEST, ErrorCode.OUT_OF_CAPACITY])
def test_a_refused_hand_off_is_reported_and_forgotten(role: Role, reason: ErrorCode) -> None:
    """Its room was used before, or there are too many."""
    many = reason is ErrorCode.OUT_OF_CAPACITY
    with closing(Side(role, transport="fake", limits=Limits(max_transfers=1 if many else 8))) as side:
        side.manager.start()
        first = OPENED[role](side.manager, hand_off(side), 4, 60)
        if not many:
            first.abort()
            side.next(events.Release)
            first.clear()
        refused = OPENED[role](side.manager, hand_off(side, 6 if many else 5), 4, 60)
        side.next(events.Release)
        assert side.changes.empty()
        assert (refused.poll(), refused.released) == (KVPoll.FAILED, True)
        assert refused.error is not None
        assert refused.error.code is reason
        refused.clear()
        assert side.manager.sizes()["handles"] == many, "of the first one"


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
@pytest.mark.parametrize("budget_s", [math.nan, math.inf, -math.inf])
def test_a_budget_without_an_end_is_refused(role: Role, budget_s: float) -> None:
    """The deadline of NaN never passes."""
    with closing(Side(role, transport="fake")) as side:
        with pytest.raises(InvalidRequest, match="budget_s"):
            OPENED[role](side.manager, hand_off(side), 8, budget_s)
        assert side.manager.sizes()["handles"] == 0


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_an_argument_that_cannot_be_handled_ends_the_hand_off_at_once(role: Role) -> None:
    """Not by its deadline: there is no half that would have one."""
    with closing(Side(role, transport="fake")) as side:
        side.manager.start()
        transfer, wrong = hand_off(side), {"claim": None}
        if role is Role.PREFILL:
            half = side.manager.expect(transfer.sent_as, 4, 60, **wrong)
        else:
            half = side.manager.receive(transfer.received_as, transfer.prefill, 4, 60, **wrong)
        side.next(events.Release)
        assert side.changes.empty()
        assert (half.poll(), half.released) == (KVPoll.FAILED, True)
        assert half.error.code is ErrorCode.INTERNAL
