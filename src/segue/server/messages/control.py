"""The control channel between a frontend and a replica's leader: typed messages. The one address in them is
the frontend's own word about prefill (`Submit.prefill_at`); nothing that a client sends gets there.

The frontend sends `Submit` to both leaders of a ticket at once; decode answers `Outputs`; prefill
answers only `Outputs` with an error, so that a failure is known at once on either leg. If decode fails before
its first token, prefill's half goes on, and gets `Replace` with the next ticket in place of a `Submit`.

The server of an instance in direct mode is such a frontend, and its ticket is for one half
(`Ticket.ordinal`): prefill answers it with the first token.
"""

from __future__ import annotations

import msgspec

from segue.engine.kv_events import FollowPrefixes, Prefixes
from segue.engine.request import Output, Request
from segue.kv import ErrorInfo, Incarnation, LeaderId
from segue.server.messages.records import RequestRecord
from segue.server.messages.ticket import Ticket


class Submit(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Frontend → leader: run `request` as `ticket` says. `prefill_at` is where the frontend's registry has
    the ticket's prefill leader: decode, whose registry may name it later, has a session with it then."""

    request: Request
    ticket: Ticket
    prefill_at: tuple[str, int] | None = None


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Frontend → leader: end the request now. Unknown ids are ignored.

    `complete`: the frontend has all that it wants, as after a stop string: the request is a success, and
    `reason` ends only a hand-off that still goes on.
    """

    request_id: str
    reason: ErrorInfo
    complete: bool = False


class Replace(msgspec.Struct, frozen=True, tag=True):
    """Frontend → prefill: the request goes on in its room, with decode's half on another leader or once more
    on the same one. `ticket` is that half's; of earlier ones nothing is taken any more.

    Prefill answers `OUT_OF_CAPACITY` if it does not have its half any more.
    """

    request_id: str
    ticket: Ticket


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """Leader → frontend: the results of one engine step, for all of this frontend's requests."""

    outputs: list[Output]


class Load(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Leader → frontend, after a change, at most every 100 ms: the load, for placement."""

    dp_rank: int
    running: int
    waiting: int
    tokens: int
    pages_free: int
    pages_total: int
    pages_quarantined: int = 0
    #: state slots, one per sequence; 0 for models without a recurrent state
    slots_free: int = 0
    slots_total: int = 0
    slots_quarantined: int = 0
    draining: bool = False
    #: draining, and no request, hand-off or quarantined page is left
    drained: bool = False
    #: decode computes prompts with at most so many uncached tokens itself, without a hand-off, and longer
    #: ones if no other instance can; None: no prompts
    local_tokens: int | None = None

    @property
    def pages(self) -> dict[str, int]:
        """The number of pages in each state."""
        return _by_state(self.pages_total, self.pages_free, self.pages_quarantined)

    @property
    def slots(self) -> dict[str, int]:
        """How many slots are in each state; empty for a model without any."""
        if not self.slots_total:
            return {}
        return _by_state(self.slots_total, self.slots_free, self.slots_quarantined)


def _by_state(total: int, free: int, quarantined: int) -> dict[str, int]:
    return {"used": total - free - quarantined, "free": free, "quarantined": quarantined}


class Explain(msgspec.Struct, frozen=True, tag=True):
    """Operator → leader, and leader → frontend: what is known of the request that a client knows by
    `request_id`? An operator that names a `frontend` has the leader ask that one, for `asker`."""

    request_id: str
    frontend: Incarnation | None = None
    asker: LeaderId | None = None


class Explained(msgspec.Struct, frozen=True, tag=True):
    """The answer: what is known there of `request_id`. `frontends`, of a leader, could be asked through
    it."""

    records: list[RequestRecord]
    asker: LeaderId | None = None
    frontends: list[Incarnation] = []
    #: Empty in an answer of a version that does not say it.
    request_id: str = ""


class FlushCache(msgspec.Struct, frozen=True, tag=True):
    """Frontend → leader: forget every cached prefix."""


ControlMessage = (
    Submit | Replace | Cancel | Outputs | Load | FlushCache | Explain | Explained | FollowPrefixes | Prefixes
)
