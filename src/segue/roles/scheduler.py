"""What the three roles share: admission, the outbox, the deadline, the one end of a request.

A role is a pure object that the leader's loop drives: `submit`, `cancel`, `on_change`, `advance`,
`plan`, `complete`. Between `plan` and `complete` the engine runs and nothing is called but `stored`.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

from segue.conn.handles import Change
from segue.core.control import Load, Submit
from segue.core.errors import (
    DeadlineExceeded,
    Draining,
    ErrorInfo,
    Internal,
    InvalidRequest,
    OutOfCapacity,
    SegueError,
)
from segue.core.limits import Limits
from segue.core.request import Output
from segue.core.types import Incarnation, LeaderId, TransferId
from segue.engine.base import Engine, SequenceResult, SequenceStep
from segue.engine.pages import PagePool
from segue.engine.prefix import PrefixTree, allocate_evicting
from segue.handoff.ticket import SpentTickets, verify
from segue.roles.request_state import RequestKey, RequestState

T = TypeVar("T")


class Scheduler(ABC):
    """The requests of one instance, from their admission to their one end.

    Subclasses release what a request holds in `_drop` and say in `_admit` where a new request goes.
    """

    def __init__(
        self,
        engine: Engine,
        pool: PagePool,
        *,
        me: LeaderId,
        name: str,
        limits: Limits,
        chunk_tokens: int = 512,
        secret: bytes = b"",
    ) -> None:
        self.engine = engine
        self.pool = pool
        self.tree = PrefixTree(pool, pool.page_tokens)
        self.me = me
        self.name = name
        self.limits = limits
        self.chunk_tokens = chunk_tokens
        self.secret = secret
        self.outbox: list[tuple[Incarnation, Output]] = []
        self.bugs: list[tuple[str, Exception]] = []
        self.requests: dict[RequestKey, RequestState] = {}
        self.by_seq: dict[int, RequestState] = {}
        self.draining = False
        self._deadlines: list[tuple[float, int]] = []
        self._next_seq = 1
        self._spent = SpentTickets(limits.max_spent_tickets)

    # ---- admission ----------------------------------------------------------------------------

    @property
    def room_tokens(self) -> int:
        """The longest sequence, prompt and answer together, that this instance can hold."""
        return min(self.engine.info.context_tokens, self.pool.total * self.pool.page_tokens)

    def submit(self, origin: Incarnation, submit: Submit, now: float) -> None:
        """Admit a request or answer it with one typed error; nothing else is touched by its failure."""
        try:
            state = self._open(origin, submit, now)
        except SegueError as error:
            self._answer(origin, submit.request.request_id, self._located(error.info, submit.ticket.room))
            return
        try:
            self._admit(state, now)
        except SegueError as error:
            self.fail(state, error.info, now)

    def _open(self, origin: Incarnation, submit: Submit, now: float) -> RequestState:
        request, ticket = submit.request, submit.ticket
        if self.draining:
            raise Draining(f"{self.name} is leaving and takes no new requests")
        if len(self.requests) >= self.limits.max_queue:
            raise OutOfCapacity(f"{self.name} already holds {len(self.requests)} requests; try again later")
        if (origin, request.request_id) in self.requests:
            raise InvalidRequest(f"request id {request.request_id!r} is in use")
        if not request.prompt:
            raise InvalidRequest("the prompt is empty; send at least one token")
        deadline = verify(ticket, self.secret, origin, now, self.limits.request_budget_s)
        self._spent.spend(ticket, deadline, now)
        info, prompt_tokens, given = self.engine.info, len(request.prompt), len(request.output)
        if not all(0 <= token < info.vocab_size for token in request.prompt):
            raise InvalidRequest(f"a prompt token is outside the vocabulary of {info.vocab_size}")
        if given and not (
            given < request.sampling.max_tokens and all(0 <= t < info.vocab_size for t in request.output)
        ):
            raise InvalidRequest(f"{given} tokens were given already: that is no output to be continued")
        room_tokens = self.room_tokens
        if prompt_tokens + 1 > room_tokens:
            raise InvalidRequest(
                f"the prompt has {prompt_tokens} tokens; {self.name} holds at most {room_tokens - 1} "
                f"(context {info.context_tokens}, KV pool {self.pool.total * self.pool.page_tokens}); "
                "shorten it or raise --kv-gib"
            )
        if given and prompt_tokens + given + 1 > room_tokens:
            # Not the client's fault: the instance it began on could hold more.
            raise OutOfCapacity(
                f"{prompt_tokens + given} tokens to continue; {self.name} holds {room_tokens}"
            )
        state = RequestState(
            origin=origin,
            request=request,
            ticket=ticket,
            seq_id=self._next_seq,
            entered=now,
            deadline=deadline,
            max_tokens=min(request.sampling.max_tokens, room_tokens - prompt_tokens),
        )
        self.engine.open(state.seq_id, request.prompt, request.sampling, request.output)
        self._next_seq += 1
        self.requests[state.key] = state
        self.by_seq[state.seq_id] = state
        heapq.heappush(self._deadlines, (state.deadline, state.seq_id))
        return state

    @abstractmethod
    def on_change(self, change: Change, now: float) -> None:
        """What the protocol says of a hand-off."""

    @abstractmethod
    def advance(self, now: float) -> None:
        """What time brings: deadlines, and requests that can move without a forward."""

    @abstractmethod
    def plan(self, now: float) -> list[SequenceStep]:
        """The next forward; empty if there is nothing to compute."""

    @abstractmethod
    def stored(self, seq_ids: Collection[int]) -> None:
        """The KV that the running forward computes for these sequences is in the pool, and final."""

    @abstractmethod
    def complete(self, results: Sequence[SequenceResult], now: float) -> None:
        """The forward that was planned has ended."""

    @property
    @abstractmethod
    def idle(self) -> bool:
        """Nothing is here that is still to end."""

    @abstractmethod
    def _admit(self, state: RequestState, now: float) -> None:
        """Where a new request goes. Raises a SegueError to refuse it."""

    @abstractmethod
    def _drop(self, state: RequestState, error: ErrorInfo | None, now: float) -> None:
        """Let go of what a request holds; `error` is None after a success."""

    # ---- the end -----------------------------------------------------------------------------

    def cancel(self, origin: Incarnation, request_id: str, error: ErrorInfo, now: float) -> None:
        """End a request for the frontend's reason, without an answer: it knows. Unknown ids are ignored."""
        state = self.requests.get((origin, request_id))
        if state is not None:
            self.end(state, error, now)

    def frontend_gone(self, origin: Incarnation, error: ErrorInfo, now: float) -> None:
        """End everything that `origin` asked for; nobody is left to read it."""
        for state in [j for j in self.requests.values() if j.origin == origin]:
            self.end(state, error, now)
        self.outbox = [item for item in self.outbox if item[0] != origin]

    def fail(self, state: RequestState, error: ErrorInfo, now: float) -> None:
        """End `state` and answer its frontend with `error`, at most once."""
        if not state.ended:
            located = self._located(error, state.ticket.room, state, now)
            self._answer(state.origin, state.request.request_id, located)
            self.end(state, located, now)

    def end(self, state: RequestState, error: ErrorInfo | None, now: float) -> None:
        """The one end of a request: it leaves every table and lets go of what it holds. Idempotent."""
        if state.ended:
            return
        state.ended = True
        del self.requests[state.key]
        del self.by_seq[state.seq_id]
        self.attempt("close", state, now, self.engine.close, state.seq_id)
        self._drop(state, error, now)

    def attempt(
        self, what: str, state: RequestState, now: float, call: Callable[..., T], *args: object
    ) -> T | None:
        """Ask the engine for something that is of `state` alone. An error there fails that request (which may
        have ended already) and nobody else, and is answered with None; a bug is kept in `bugs`."""
        try:
            return call(*args)
        except SegueError as error:  # it says itself what is wrong
            self.fail(state, error.info, now)
            return None
        except Exception as exc:  # the boundary: what others share the step with is not theirs to suffer
            self.bugs.append((f"{what} of room {state.ticket.room}", exc))
            self.fail(state, Internal(f"the engine broke in {what}: {exc!r}").info, now)
            return None

    def broken(self, origin: Incarnation, request_id: str, error: ErrorInfo, now: float) -> None:
        """Something of this request was not handled, by a bug: it ends with `error`, known or not."""
        state = self.requests.get((origin, request_id))
        if state is None:
            at_submit = error.exception().at(phase="submit").info
            self._answer(origin, request_id, self._located(at_submit, 0))
        else:
            self.fail(state, error, now)

    def broken_handoff(self, transfer: TransferId, error: ErrorInfo, now: float) -> None:
        """As `broken`, for the request whose hand-off is `transfer`; one that has ended stays ended."""
        state = next((j for j in self.requests.values() if j.transfer == transfer), None)
        if state is not None:
            self.fail(state, error, now)

    def _answer(self, origin: Incarnation, request_id: str, error: ErrorInfo) -> None:
        self.outbox.append((origin, Output(request_id=request_id, error=error)))

    def _located(
        self, error: ErrorInfo, room: int, state: RequestState | None = None, now: float = 0.0
    ) -> ErrorInfo:
        raised = error.exception().at(origin=self.name, room=room)
        if state is not None:
            raised.at(phase=state.phase, elapsed_s=now - state.entered)
        return raised.info

    # ---- time --------------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """When `advance` must be called at the latest, or None."""
        while self._deadlines and self._deadlines[0][1] not in self.by_seq:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def expire(self, now: float) -> None:
        """Fail every request whose deadline has passed, whatever it waits for."""
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            state = self.by_seq[heapq.heappop(self._deadlines)[1]]
            budget_s = state.deadline - state.entered
            late = DeadlineExceeded(f"not finished within {budget_s:.1f} s; it was in phase {state.phase!r}")
            self.fail(state, late.info, now)

    def step_failed(self, steps: Sequence[SequenceStep], error: ErrorInfo, now: float) -> None:
        """The engine could not run `steps`: fail exactly their requests."""
        for step in steps:
            if (state := self.by_seq.get(step.seq_id)) is not None:
                self.fail(state, error, now)

    def fail_all(self, error: ErrorInfo, now: float) -> None:
        """A bug that is nobody's alone, as in planning a step: everything that is here ends with `error`, so
        that the next step begins afresh."""
        for state in list(self.requests.values()):
            try:
                self.fail(state, error, now)
            except Exception as exc:  # the boundary: the others are to end all the same
                self.bugs.append((f"the end of room {state.ticket.room}", exc))

    # ---- pages -------------------------------------------------------------------------------

    def take_pages(self, count: int, *, after: int | None = None, room: int = 0) -> list[int] | None:
        """`count` pages, emptying unused parts of the prefix tree if need be; None if there are too few."""
        if not self.has_pages(count):
            return None
        return allocate_evicting(self.pool, self.tree, count, after, room)

    def has_pages(self, count: int) -> bool:
        """Whether `take_pages(count)` would succeed now."""
        return count <= self.pool.free or count <= self.pool.free + self.tree.evictable

    def remember(self, state: RequestState, tokens: int) -> None:
        """Offer the whole pages of the request's first `tokens` tokens to the prefix tree."""
        whole = tokens // self.pool.page_tokens
        sequence = (state.prompt + state.output)[: whole * self.pool.page_tokens]
        self.tree.insert(sequence, state.pages[:whole])

    # ---- what others see ---------------------------------------------------------------------

    def load(self) -> Load:
        """What placement needs."""
        running = self._running()
        return Load(
            dp_rank=self.me.dp_rank,
            running=running,
            waiting=len(self.requests) - running,
            tokens=self._tokens(),
            pages_free=self.pool.free + self.tree.evictable,
            pages_total=self.pool.total,
            pages_quarantined=self.pool.quarantined,
            draining=self.draining,
        )

    @abstractmethod
    def _running(self) -> int:
        """Requests that the next step works on."""

    def _tokens(self) -> int:
        """Tokens of all requests here, a measure of work and memory."""
        return sum(state.tokens for state in self.requests.values())

    def sizes(self) -> dict[str, int]:
        """Tables whose entries belong to requests; all zero at rest."""
        return self._counts()

    def drain(self) -> None:
        """Take no new requests from now on."""
        self.draining = True

    def _counts(self) -> dict[str, int]:
        return {"requests": len(self.requests), "by_seq": len(self.by_seq)}

    def check_integrity(self) -> None:
        """Raise AssertionError with what is wrong, if anything is."""
        self.pool.check_integrity()
        self.tree.check_integrity()
        assert {j.seq_id for j in self.requests.values()} == set(self.by_seq), "tables of requests differ"
        if not any(self._counts().values()):
            held = self.tree.pages
            assert self.pool.used == held, f"{self.pool.used} pages used at rest, {held} of them by the tree"
            assert self.pool.quarantined == 0, f"{self.pool.quarantined} pages quarantined at rest"
