"""Tickets: who may place a request, once."""

from __future__ import annotations

import hashlib
import heapq
import hmac
import math

import msgspec

from segue.kv import (
    DeadlineExceeded,
    DpRankOutOfRange,
    Incarnation,
    InvalidRequest,
    LeaderId,
    OutOfCapacity,
    Unauthorized,
)
from segue.kv.ids import OPEN_RANK

_DOMAIN = b"segue ticket 2\0"
_KEY_BYTES = 16
#: Tickets that one instance remembers until their deadlines.
MAX_SPENT_TICKETS = 2**18


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """The placement of one request, made and signed by the frontend that chose it.

    `room`, `attempt`, `prefill` and `decode` are the fields of its `TransferId`. `budget_s` is the time left
    until the request's deadline when the ticket was sent. For a unified instance `prefill == decode` and no
    hand-off takes place. If `prefill.is_open`, its instance alone is named: prefill is who got the ticket,
    and decode finds the DP rank.

    With `ordinal` a router has posted one half of the request here, and places the other half itself (direct
    mode): the hand-off is of the request's sample number `ordinal` in the room, and no placer ends it on both
    sides. Prefill's ticket names its own leader for both halves then, and any decode may bind the room.

    `signature` is an HMAC-SHA256 over the other fields under the deployment's shared secret (empty without
    one).
    """

    room: int
    attempt: int
    prefill: LeaderId
    decode: LeaderId
    budget_s: float
    ordinal: int | None = None
    signature: bytes = b""


def sign_ticket(ticket: Ticket, secret: bytes, origin: Incarnation) -> Ticket:
    """`ticket` with its HMAC-SHA256 under `secret`; unsigned if the deployment has no secret.

    `origin` is who places the request: the incarnation that the session to the leaders proves.
    """
    return msgspec.structs.replace(ticket, signature=_signature(ticket, secret, origin))


def verify_ticket(
    ticket: Ticket, secret: bytes, origin: Incarnation, now: float, max_budget_s: float = math.inf
) -> float:
    """Check a `ticket` that just arrived, signed under `secret`; returns its deadline in seconds of the
    caller's clock, which shows `now`.

    The budget counts from its arrival, so the longest one to accept is bounded by `max_budget_s`,
    and whoever overheard a ticket could use it as a fresh one later, when nobody remembers it any
    more (`SpentTickets`). So it is good only in the session of its own `origin`.

    Raises Unauthorized for a wrong signature, InvalidRequest for a budget that is not a finite
    number or a room that is none, DeadlineExceeded for a budget that is spent.
    """
    room, attempt, ordinal = ticket.room, ticket.attempt, ticket.ordinal or 0
    if not 1 <= room < 2**64 or not 0 <= attempt < 2**16 or not 0 <= ordinal < 2**16:
        raise InvalidRequest(f"no such room, attempt or sample: {room:#x}, {attempt:#x}, {ordinal:#x}"[:200])
    if not (OPEN_RANK <= ticket.prefill.dp_rank < 2**32 and 0 <= ticket.decode.dp_rank < 2**32):
        raise DpRankOutOfRange("no such DP rank as the ticket names", room=ticket.room)
    if not hmac.compare_digest(ticket.signature, _signature(ticket, secret, origin)):
        raise Unauthorized(
            "the ticket's signature is wrong, or it was made by another than who sent it; "
            "give all parts the same --secret-file"
        )
    if not math.isfinite(ticket.budget_s):
        raise InvalidRequest("the ticket's budget_s is not a finite number")
    if ticket.budget_s <= 0:
        raise DeadlineExceeded("the ticket's deadline had passed when it arrived", room=ticket.room)
    return now + min(ticket.budget_s, max_budget_s)


def _signature(ticket: Ticket, secret: bytes, origin: Incarnation) -> bytes:
    if not secret:
        return b""
    fields: tuple[object, ...] = (
        ticket.room,
        ticket.attempt,
        ticket.prefill.incarnation,
        ticket.prefill.dp_rank,
        ticket.decode.incarnation,
        ticket.decode.dp_rank,
        float(ticket.budget_s),
        origin,
    )
    if ticket.ordinal is not None:  # other tickets are signed as by versions that know no ordinal
        fields += (ticket.ordinal,)
    # An array of scalars has one msgpack encoding, so both sides sign the same bytes.
    return hmac.new(secret, _DOMAIN + msgspec.msgpack.encode(fields), hashlib.sha256).digest()


class SpentTickets:
    """The used tickets: at most `limit` of them, each exactly until its deadline.

    It is never emptied early to make room: a ticket that cannot be remembered is refused.
    """

    def __init__(self, limit: int = MAX_SPENT_TICKETS) -> None:
        if limit < 1:
            raise ValueError(f"limit must be positive, not {limit}")
        self._limit = limit
        # One digest per ticket: a quarter of the memory of its fields.
        self._spent: set[bytes] = set()
        self._expiries: list[tuple[float, bytes]] = []

    def __len__(self) -> int:
        return len(self._spent)

    def spend(self, ticket: Ticket, deadline: float, now: float) -> None:
        """Use `ticket` up until `deadline`. Raises InvalidRequest the second time, OutOfCapacity
        when full; then nothing has changed."""
        self.forget_expired(now)
        key = _key(ticket)
        if key in self._spent:
            raise InvalidRequest(
                f"the ticket of room {ticket.room}, attempt {ticket.attempt} was used already; "
                "each request needs a room of its own, and a retry is a new attempt",
                room=ticket.room,
            )
        if len(self._spent) >= self._limit:
            raise OutOfCapacity(f"{self._limit} tickets are in use", room=ticket.room)
        self._spent.add(key)
        heapq.heappush(self._expiries, (deadline, key))

    def forget_expired(self, now: float) -> None:
        """Drop every ticket whose deadline has passed."""
        while self._expiries and self._expiries[0][0] <= now:
            self._spent.remove(heapq.heappop(self._expiries)[1])


def _key(ticket: Ticket) -> bytes:
    # Without the rank of prefill: an open ticket and one that names a rank are the same placement.
    fields = (ticket.room, ticket.attempt, ticket.ordinal, ticket.prefill.incarnation, ticket.decode)
    return hashlib.blake2b(msgspec.msgpack.encode(fields), digest_size=_KEY_BYTES).digest()
