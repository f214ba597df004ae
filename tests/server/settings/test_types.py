"""The words that everybody uses: what may be one, and which of them are the same."""

from __future__ import annotations

import secrets

import pytest

from segue.kv.ids import (
    MAX_ROOM,
    Incarnation,
    KVPoll,
    LeaderId,
    Role,
    Span,
    TransferId,
    new_room,
    successor,
)

A, B = Incarnation("a" * 32), Incarnation("b" * 32)


def test_a_new_room_is_one_that_foreign_routers_accept_too(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    for draw, room in ((0, 1), (2**63 - 2, 2**63 - 1)):
        monkeypatch.setattr(secrets, "randbelow", lambda n, draw=draw: asked.append(n) or draw)
        assert new_room() == room
    assert asked == [2**63 - 1] * 2, "0 … 2**63 - 2 are drawn"


@pytest.mark.parametrize(
    ("room", "attempt", "legal"),
    [
        (0, 0, False),
        (1, 0, True),
        (MAX_ROOM, 2**16 - 1, True),
        (MAX_ROOM + 1, 0, False),
        (1, -1, False),
        (1, 2**16, False),
    ],
)
def test_a_transfer_has_a_room_and_an_attempt_of_the_wires_sizes(
    room: int, attempt: int, legal: bool
) -> None:
    if legal:
        assert TransferId(room, attempt, LeaderId(A), LeaderId(B)).room == room
    else:
        with pytest.raises(ValueError, match="must be in"):
            TransferId(room, attempt, LeaderId(A), LeaderId(B))


@pytest.mark.parametrize(
    ("start", "end", "length"), [(0, 0, 0), (3, 3, 0), (2, 9, 7), (-1, 3, None), (4, 3, None)]
)
def test_a_span_does_not_end_before_it_begins(start: int, end: int, length: int | None) -> None:
    if length is None:
        with pytest.raises(ValueError, match="a span needs"):
            Span(start, end)
    else:
        assert len(Span(start, end)) == length


def test_what_an_instance_becomes_is_one_that_nobody_else_becomes() -> None:
    becomes = [successor(who, role) for who in (A, B) for role in (Role.PREFILL, Role.DECODE, Role.UNIFIED)]
    assert len({A, B, *becomes}) == 8
    assert all(len(one) == 32 for one in becomes)
    assert successor(A, Role.DECODE) == becomes[1], "whoever works it out"


def test_only_what_has_failed_or_succeeded_is_over() -> None:
    assert [one for one in KVPoll if one.terminal] == [KVPoll.FAILED, KVPoll.SUCCESS]
    assert min(KVPoll) is KVPoll.FAILED, "the slowest rank's phase is the least, and one failure is all"
