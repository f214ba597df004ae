"""The requests of clients to a deployment, and their results: at the client, and on the wire of the
frontend."""

from __future__ import annotations

from dataclasses import dataclass, field

from segue.engine.request import SamplingParams, TokenLogprob, Usage
from segue.kv.errors import ErrorInfo
from segue.kv.ids import LeaderId, Role
from segue.server.messages.ticket import Ticket


@dataclass(slots=True)
class Wanted:
    """One request of a client; part of a scenario."""

    name: str
    at: float
    prompt: list[int]
    sampling: SamplingParams
    budget_s: float
    front: int = 0
    abort_after_s: float | None = None
    #: for decode and prefill: delay of this half's first submission after it is sent
    leg_delay_s: tuple[float, float] = (0.0, 0.0)
    #: for decode and prefill: the budget of this half alone, if it differs
    leg_budget_s: tuple[float | None, float | None] = (None, None)
    #: empty, or what is wrong with it
    bad: str = ""
    #: the DP rank of prefill that the client asks for
    prefill_dp_rank: int | None = None
    #: and that decode is to ask the registry for it
    force_query: bool = False
    priority: int = 0
    tenant: str = ""


@dataclass(slots=True, eq=False)
class SentAttempt:
    """One attempt of a request, as its frontend submitted it. `ticket` is what went out, which is not what
    the frontend made where the request is a bad one; `live` are the halves of which neither side has said
    that they have ended. `prefill_id` is another one where prefill's half is that of an attempt before."""

    request_id: str
    prefill_id: str
    pair: tuple[LeaderId, LeaderId]
    made: Ticket
    ticket: Ticket
    live: dict[LeaderId, Role]
    #: decode has sent a token
    begun: bool = False

    def id_at(self, leader: LeaderId) -> str:
        """The id of the half there."""
        return self.prefill_id if leader == self.pair[0] else self.request_id


@dataclass(slots=True, eq=False)
class Asked:
    """A request on its way, and what its client has of it."""

    wanted: Wanted
    deadline: float
    attempts: list[SentAttempt] = field(default_factory=list)
    #: replicas whose session ended while this request ran there
    dead: set[LeaderId] = field(default_factory=set)
    #: replicas of an attempt that has reported one of them gone
    suspect: set[LeaderId] = field(default_factory=set)
    #: attempts that do not count: prefill did not have its half any more
    gone: int = 0
    #: the error of its last attempt
    failure: ErrorInfo | None = None
    tokens: list[int] = field(default_factory=list)
    usage: Usage | None = None
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    outcome: str = ""
    error: ErrorInfo | None = None
    #: how many attempts it had when it was last seen to run nowhere
    idle_at: int = -1

    @property
    def rooms(self) -> list[int]:
        """The rooms of its attempts, in order."""
        return [attempt.ticket.room for attempt in self.attempts]

    @property
    def room(self) -> int:
        """The room of the running attempt; 0 before the first."""
        return self.attempts[-1].ticket.room if self.attempts else 0

    @property
    def begun(self) -> bool:
        """The attempt that runs has given a token."""
        return bool(self.attempts) and self.attempts[-1].begun
