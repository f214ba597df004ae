"""Tickets: who may place a request, once, and which DP rank of prefill it goes to (never guessed)."""

from __future__ import annotations

import enum
import hashlib
import hmac
import math
from collections import OrderedDict

import msgspec

from segue.core.errors import (
    DeadlineExceeded,
    DpRankOutOfRange,
    InvalidRequest,
    OutOfCapacity,
    Unauthorized,
)
from segue.core.request import Ticket

_DOMAIN = b"segue ticket 1\0"

#: What `InstanceRecord.load_balance` says when prefill places by `room % dp_size`.
FOLLOW_BOOTSTRAP_ROOM = "follow_bootstrap_room"


class Ask(enum.Enum):
    """An answer that is not a rank."""

    REGISTRY = "ask the bootstrap registry, which waits for prefill's own answer"


def sign(ticket: Ticket, secret: bytes) -> Ticket:
    """`ticket` with its HMAC-SHA256 under `secret`; unsigned if the deployment has no secret."""
    return msgspec.structs.replace(ticket, signature=_signature(ticket, secret))


def verify(ticket: Ticket, secret: bytes, now: float, max_budget_s: float = math.inf) -> float:
    """Check a ticket that just arrived; returns its deadline in seconds of the caller's clock.

    The budget counts from its arrival, so the longest one to accept is bounded by
    `max_budget_s`. Raises Unauthorized for a wrong signature, InvalidRequest for a budget that is
    not a finite number or a room that is none, DeadlineExceeded for a budget that is spent.
    """
    if not hmac.compare_digest(ticket.signature, _signature(ticket, secret)):
        raise Unauthorized("the ticket's signature is wrong; give all parts the same --secret-file")
    if not 1 <= ticket.room < 2**64 or not 0 <= ticket.attempt < 2**16:
        raise InvalidRequest(f"no such room or attempt: {ticket.room}, {ticket.attempt}")
    if not math.isfinite(ticket.budget_s):
        raise InvalidRequest("the ticket's budget_s is not a finite number")
    if ticket.budget_s <= 0:
        raise DeadlineExceeded("the ticket's deadline had passed when it arrived", room=ticket.room)
    return now + min(ticket.budget_s, max_budget_s)


def _signature(ticket: Ticket, secret: bytes) -> bytes:
    if not secret:
        return b""
    fields = (
        ticket.room,
        ticket.attempt,
        ticket.prefill.incarnation,
        ticket.prefill.dp_rank,
        ticket.decode.incarnation,
        ticket.decode.dp_rank,
        float(ticket.budget_s),
    )
    # An array of scalars has one msgpack encoding, so both sides sign the same bytes.
    return hmac.new(secret, _DOMAIN + msgspec.msgpack.encode(fields), hashlib.sha256).digest()


class SpentTickets:
    """Which tickets were used already: at most `limit` of them, each at least until its deadline.

    It is never emptied early to make room: a ticket that cannot be remembered is refused.
    """

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"limit must be positive, not {limit}")
        self._limit = limit
        self._spent: OrderedDict[tuple[int, int, str, str], float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._spent)

    def spend(self, ticket: Ticket, deadline: float, now: float) -> None:
        """Use `ticket` up. Raises InvalidRequest the second time, OutOfCapacity when full."""
        key = (ticket.room, ticket.attempt, ticket.prefill.incarnation, ticket.decode.incarnation)
        if key in self._spent:
            raise InvalidRequest(
                f"room {ticket.room}, attempt {ticket.attempt} was used already; a retry is a new attempt",
                room=ticket.room,
            )
        if len(self._spent) >= self._limit:
            self.forget_expired(now)
        if len(self._spent) >= self._limit:
            raise OutOfCapacity(f"{self._limit} tickets are in use", room=ticket.room)
        self._spent[key] = deadline

    def forget_expired(self, now: float) -> None:
        """Drop every ticket whose deadline has passed."""
        self._spent = OrderedDict((k, until) for k, until in self._spent.items() if until > now)


def resolve_prefill_dp_rank(
    *,
    room: int,
    dp_size: int,
    load_balance: str,
    force_query: bool,
    ticket_rank: int | None = None,
    request_rank: int | None = None,
) -> int | Ask:
    """Which DP rank of prefill owns `room`, or that only the registry knows.

    In this order: the ticket; the request (`disagg_prefill_dp_rank`); the only rank there is;
    `room % dp_size` if prefill declares that it follows the room and `force_query`
    (`force_query_prefill_dp_rank`) is off; else the registry. Raises DpRankOutOfRange for a named
    rank that does not exist.
    """
    if dp_size < 1:
        raise InvalidRequest(f"prefill declares {dp_size} DP ranks")
    for source, rank in (("the ticket", ticket_rank), ("disagg_prefill_dp_rank", request_rank)):
        if rank is None:
            continue
        if not 0 <= rank < dp_size:
            raise DpRankOutOfRange(
                f"{source} names DP rank {rank}, prefill has ranks 0 to {dp_size - 1}", room=room
            )
        return rank
    if dp_size == 1:
        return 0
    if load_balance == FOLLOW_BOOTSTRAP_ROOM and not force_query:
        return room % dp_size
    return Ask.REGISTRY
