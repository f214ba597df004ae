"""Admission by ticket, the tables of requests, their deadlines, and the messages to frontends."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from segue.engine.engine_api import ModelInfo
from segue.engine.request import Output
from segue.kv import (
    DpRanks,
    Draining,
    ErrorInfo,
    Incarnation,
    InvalidRequest,
    LeaderId,
    Limits,
    OutOfCapacity,
)
from segue.server.messages.control import Submit
from segue.server.messages.records import MAX_FOUND, Records, RequestRecord, Step, matcher
from segue.server.messages.ticket import SpentTickets, Ticket, verify_ticket
from segue.server.schedulers.request_state import RequestKey, RequestState


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """`me` is the leader that tickets must name, `name` what errors call it, `role` its kind in records. A
    step computes at most `chunk_tokens` tokens of prompts. Tickets are signed with `secret`, or not at all if
    it is empty. `dp` are the DP ranks of our instance. Prefill sends `send_layers` layers of a chunk at a
    time (0: all)."""

    me: LeaderId
    name: str
    limits: Limits = field(default_factory=Limits)
    chunk_tokens: int = 512
    send_layers: int = 0
    secret: bytes = b""
    dp: DpRanks = field(default_factory=DpRanks)
    role: str = ""


class Admission:
    """The requests of one instance until they end. `outbox` is what frontends are to be told, in this order.
    `room_tokens` is the longest sequence, prompt and answer together, that the instance can hold."""

    def __init__(self, config: SchedulerConfig, info: ModelInfo, pool_tokens: int) -> None:
        self.config = config
        self.secret = config.secret
        self.room_tokens = min(info.context_tokens, pool_tokens)
        self.draining = False
        self.outbox: list[tuple[Incarnation, Output]] = []
        self.requests: dict[RequestKey, RequestState] = {}
        self.by_seq: dict[int, RequestState] = {}
        self._info = info
        self._pool_tokens = pool_tokens
        self._deadlines: list[tuple[float, int]] = []
        self._next_seq = 1
        self._spent = SpentTickets()
        #: records of the latest requests
        self.records = Records()

    def check(self, origin: Incarnation, submit: Submit, now: float) -> RequestState:
        """The state of a new request, not yet in a table. Raises a SegueError for one that is refused."""
        request, ticket, name = submit.request, submit.ticket, self.config.name
        if self.draining:
            raise Draining(f"{name} is draining and takes no new requests")
        if len(self.requests) >= self.config.limits.max_queue:
            raise OutOfCapacity(f"{name} already holds {len(self.requests)} requests; try again later")
        if (origin, request.request_id) in self.requests:
            raise InvalidRequest(f"request id {request.request_id!r} is in use")
        if not request.prompt:
            raise InvalidRequest("the prompt is empty; send at least one token")
        deadline = self.spend(origin, ticket, now)
        vocab_size, prompt_tokens, given = self._info.vocab_size, len(request.prompt), len(request.output)
        if not all(0 <= token < vocab_size for token in request.prompt):
            raise InvalidRequest(f"a prompt token is outside the vocabulary of {vocab_size}")
        if given and not (
            given < request.sampling.max_tokens and all(0 <= t < vocab_size for t in request.output)
        ):
            raise InvalidRequest(f"{given} tokens were given already: that is no output to be continued")
        if prompt_tokens + 1 > self.room_tokens:
            raise InvalidRequest(
                f"the prompt has {prompt_tokens} tokens; {name} holds at most {self.room_tokens - 1} "
                f"(context {self._info.context_tokens}, KV pool {self._pool_tokens}); "
                "shorten it or raise --kv-gib"
            )
        if given and prompt_tokens + given + 1 > self.room_tokens:
            # Not the client's fault: the instance it began on could hold more.
            raise OutOfCapacity(
                f"{prompt_tokens + given} tokens to continue; {name} holds {self.room_tokens}"
            )
        return RequestState(
            origin=origin,
            request=request,
            ticket=ticket,
            seq_id=self._next_seq,
            entered=now,
            deadline=deadline,
            max_tokens=min(request.sampling.max_tokens, self.room_tokens - prompt_tokens),
        )

    def spend(self, origin: Incarnation, ticket: Ticket, now: float) -> float:
        """Use a ticket up; returns its deadline. Raises a SegueError for one that is not good."""
        deadline = verify_ticket(ticket, self.secret, origin, now, self.config.limits.request_budget_s)
        self._spent.spend(ticket, deadline, now)
        return deadline

    def add(self, state: RequestState) -> None:
        """The request is here from now on."""
        self._next_seq = state.seq_id + 1
        self.requests[state.key] = state
        self.by_seq[state.seq_id] = state
        heapq.heappush(self._deadlines, (state.deadline, state.seq_id))

    def remove(self, state: RequestState, error: ErrorInfo | None, now: float) -> None:
        """The request has ended, badly with `error`."""
        del self.requests[state.key]
        del self.by_seq[state.seq_id]
        self.records.put(state.record(self.config.name, self.config.role, now, error))

    def explain(self, request_id: str, now: float) -> list[RequestRecord]:
        """The records of a request: its finished attempts here, then the running ones."""
        fits = matcher(request_id)
        here = [s for s in self.requests.values() if fits(s.request.request_id)]
        live = [state.record(self.config.name, self.config.role, now, None) for state in here[:MAX_FOUND]]
        return self.records.find(request_id) + live

    # ---- time --------------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """When a request is late next, or None."""
        while self._deadlines and self._deadlines[0][1] not in self.by_seq:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def next_late(self, now: float) -> RequestState | None:
        """A request whose deadline has passed; each once."""
        deadline = self.next_deadline()
        if deadline is None or deadline > now:
            return None
        return self.by_seq[heapq.heappop(self._deadlines)[1]]

    # ---- what frontends are told -------------------------------------------------------------

    def answer(self, state: RequestState, output: Output) -> None:
        """Tell the frontend of `state` what came of a step."""
        self.outbox.append((state.origin, output))

    def refuse(
        self, origin: Incarnation, request_id: str, error: ErrorInfo, now: float, ticket: Ticket | None = None
    ) -> None:
        """Tell a frontend that its request was not taken."""
        room = ticket.room if ticket is not None else 0
        located = error.exception().at(origin=self.config.name, room=room).info
        self.outbox.append((origin, Output(request_id=request_id, error=located)))
        refused = RequestRecord(
            request_id=request_id,
            where=self.config.name,
            role=self.config.role,
            began=now,
            seconds=0.0,
            steps=[Step("refused", 0.0)],
            room=room,
            attempt=ticket.attempt if ticket is not None else 0,
            error=located,
        )
        self.records.put(refused)

    def tell_failed(self, state: RequestState, error: ErrorInfo, now: float) -> ErrorInfo:
        """Tell the frontend of `state` why it has failed; returns the error with the place and time."""
        raised = error.exception().at(origin=self.config.name, room=state.ticket.room)
        located = raised.at(phase=state.phase, elapsed_s=now - state.entered).info
        self.answer(state, Output(request_id=state.request.request_id, error=located))
        return located

    def frontend_gone(self, origin: Incarnation) -> None:
        """Nobody is left to read what `origin` was to be told."""
        self.outbox = [item for item in self.outbox if item[0] != origin]

    def check_integrity(self) -> None:
        """Raise AssertionError if the tables differ."""
        assert {s.seq_id for s in self.requests.values()} == set(self.by_seq), "tables of requests differ"
