"""Tickets cannot be forged, changed or used twice."""

from __future__ import annotations

import msgspec
import pytest

from segue.kv.errors import (
    DeadlineExceeded,
    DpRankOutOfRange,
    InvalidRequest,
    OutOfCapacity,
    Unauthorized,
)
from segue.kv.ids import OPEN_RANK, Incarnation, LeaderId
from segue.server.messages.ticket import SpentTickets, Ticket, sign_ticket, verify_ticket

P, D, FRONT = Incarnation("a" * 32), Incarnation("b" * 32), Incarnation("f" * 32)
SECRET = b"0123456789abcdef"


def ticket(**changes: object) -> Ticket:
    values: dict[str, object] = {
        "room": 7,
        "attempt": 0,
        "prefill": LeaderId(P, 1),
        "decode": LeaderId(D, 0),
        "budget_s": 30.0,
    }
    return Ticket(**(values | changes))  # type: ignore[arg-type]


def test_a_signed_ticket_survives_the_wire_and_gives_its_deadline() -> None:
    wire = msgspec.msgpack.encode(sign_ticket(ticket(), SECRET, FRONT))
    assert verify_ticket(msgspec.msgpack.decode(wire, type=Ticket), SECRET, FRONT, now=100.0) == 130.0
    assert (
        verify_ticket(sign_ticket(ticket(), SECRET, FRONT), SECRET, FRONT, now=100.0, max_budget_s=5.0)
        == 105.0
    )
    whole = msgspec.json.decode(
        msgspec.json.encode(sign_ticket(ticket(budget_s=30), SECRET, FRONT)), type=Ticket
    )
    assert verify_ticket(whole, SECRET, FRONT, now=0.0) == 30.0


@pytest.mark.parametrize(
    "changes",
    [
        {"room": 8},
        {"attempt": 1},
        {"prefill": LeaderId(D, 1)},
        {"prefill": LeaderId(P, 0)},
        {"decode": LeaderId(P, 0)},
        {"decode": LeaderId(D, 1)},
        {"budget_s": 31.0},
        {"signature": b""},
        {"signature": b"\0" * 32},
    ],
)
def test_any_changed_field_breaks_the_signature(changes: dict[str, object]) -> None:
    forged = msgspec.structs.replace(sign_ticket(ticket(), SECRET, FRONT), **changes)
    with pytest.raises(Unauthorized):
        verify_ticket(forged, SECRET, FRONT, now=0.0)


def test_another_secret_or_none_is_refused_both_ways() -> None:
    with pytest.raises(Unauthorized):
        verify_ticket(sign_ticket(ticket(), SECRET, FRONT), b"another secret...", FRONT, now=0.0)
    with pytest.raises(Unauthorized):
        verify_ticket(sign_ticket(ticket(), b"", FRONT), SECRET, FRONT, now=0.0)
    with pytest.raises(Unauthorized):
        verify_ticket(sign_ticket(ticket(), SECRET, FRONT), b"", FRONT, now=0.0)
    assert verify_ticket(sign_ticket(ticket(), b"", FRONT), b"", FRONT, now=0.0) == 30.0


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"budget_s": 0.0}, DeadlineExceeded),
        ({"budget_s": -1.0}, DeadlineExceeded),
        ({"budget_s": float("nan")}, InvalidRequest),
        ({"budget_s": float("inf")}, InvalidRequest),
        ({"room": 0}, InvalidRequest),
        ({"room": -1}, InvalidRequest),
        ({"attempt": 65536}, InvalidRequest),
        ({"attempt": -1}, InvalidRequest),
        ({"prefill": LeaderId(P, OPEN_RANK - 1)}, DpRankOutOfRange),
        ({"prefill": LeaderId(P, 2**32)}, DpRankOutOfRange),
        ({"decode": LeaderId(D, OPEN_RANK)}, DpRankOutOfRange),
        ({"decode": LeaderId(D, 2**32)}, DpRankOutOfRange),
    ],
)
def test_a_signed_ticket_can_still_be_refused(changes: dict[str, object], error: type[Exception]) -> None:
    with pytest.raises(error):
        verify_ticket(sign_ticket(ticket(**changes), SECRET, FRONT), SECRET, FRONT, now=0.0)


def test_the_numbers_of_a_ticket_may_be_as_large_as_the_wire_has_them() -> None:
    largest = ticket(
        room=2**64 - 1,
        attempt=2**16 - 1,
        prefill=LeaderId(P, OPEN_RANK),
        decode=LeaderId(D, 2**32 - 1),
    )
    assert verify_ticket(sign_ticket(largest, SECRET, FRONT), SECRET, FRONT, now=1.0) == 31.0
    with pytest.raises(InvalidRequest):
        verify_ticket(msgspec.structs.replace(largest, room=2**64), b"", FRONT, now=0.0)


def test_a_ticket_is_spent_once_and_a_retry_is_another_ticket() -> None:
    spent = SpentTickets(10)
    spent.spend(ticket(), deadline=30.0, now=0.0)
    with pytest.raises(InvalidRequest):
        spent.spend(ticket(budget_s=99.0), deadline=99.0, now=29.0)
    spent.spend(ticket(attempt=1), deadline=30.0, now=0.0)
    assert len(spent) == 2


def test_an_open_ticket_and_one_that_names_a_rank_are_one_placement() -> None:
    spent = SpentTickets(10)
    spent.spend(ticket(prefill=LeaderId(P, OPEN_RANK)), deadline=30.0, now=0.0)
    for rank in (OPEN_RANK, 0, 1):
        with pytest.raises(InvalidRequest, match="used already"):
            spent.spend(ticket(prefill=LeaderId(P, rank)), deadline=30.0, now=1.0)
    spent.spend(ticket(prefill=LeaderId(FRONT, OPEN_RANK)), deadline=30.0, now=1.0)


def test_a_ticket_is_good_only_in_the_session_of_who_made_it() -> None:
    with pytest.raises(Unauthorized, match="made by another"):
        verify_ticket(sign_ticket(ticket(), SECRET, FRONT), SECRET, Incarnation("e" * 32), now=0.0)


def test_tickets_die_at_their_deadline_without_being_asked_for_in_any_order() -> None:
    spent = SpentTickets(100)
    for room in range(1, 51):
        spent.spend(ticket(room=room), deadline=float(100 - room), now=0.0)
    spent.spend(ticket(room=99), deadline=200.0, now=75.0)
    assert len(spent) == 24 + 1  # those of rooms 1 … 24, which are good until 99 … 76
    with pytest.raises(InvalidRequest):
        spent.spend(ticket(room=24), deadline=200.0, now=75.5)
    spent.spend(ticket(room=24), deadline=200.0, now=76.0)


def test_the_memory_of_spent_tickets_is_bounded_and_refuses_rather_than_forgets() -> None:
    spent = SpentTickets(2)
    spent.spend(ticket(room=1), deadline=10.0, now=0.0)
    spent.spend(ticket(room=2), deadline=20.0, now=0.0)
    with pytest.raises(OutOfCapacity):
        spent.spend(ticket(room=3), deadline=20.0, now=9.0)
    spent.spend(ticket(room=3), deadline=20.0, now=10.0)
    with pytest.raises(InvalidRequest):
        spent.spend(ticket(room=2), deadline=20.0, now=10.0)
    spent.forget_expired(now=20.0)
    assert len(spent) == 0
    with pytest.raises(ValueError, match="positive"):
        SpentTickets(0)
