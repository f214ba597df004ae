"""The common part of the three schedulers: one admission, one KV cache, and one end of a request.

A scheduler is a pure object that the leader's loop drives: `plan`, `launched`, then `complete` or
`step_failed`. While the forward runs everything but `plan` may be called, and what it reads and writes stays
where it is, even of a request that ends meanwhile.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

from segue.engine.engine_api import Engine, OnStored, SequenceResult, SequenceStep
from segue.engine.pages import PagePool
from segue.engine.request import Output, TokenLogprob
from segue.kv import (
    Change,
    DeadlineExceeded,
    ErrorCode,
    ErrorInfo,
    Incarnation,
    Internal,
    OutOfCapacity,
    RoomKey,
    SegueError,
)
from segue.server.messages.control import Load, Replace, Submit
from segue.server.schedulers.admission import Admission, SchedulerConfig
from segue.server.schedulers.kv_cache import KVCache
from segue.server.schedulers.request_figures import RequestFigures
from segue.server.schedulers.request_state import RequestState

T = TypeVar("T")


def _nobody(seq_ids: Collection[int], layers: int | None = None) -> None:
    """The KV is where it is needed."""


class Scheduler(ABC):
    """The requests of one instance, from their admission to their one end.

    Subclasses say in `_admit` where a new request goes, plan and complete forwards, and release in `_drop`
    what a request holds.
    """

    def __init__(self, engine: Engine, pool: PagePool, config: SchedulerConfig) -> None:
        self.engine = engine
        self.config = config
        self.cache = KVCache(pool, engine.spec.slots)
        self.admission = Admission(config, engine.info, pool.total * pool.page_tokens)
        self.figures = RequestFigures()
        #: bugs of the engine for the log: the call that raised, and the exception
        self.bugs: list[tuple[str, Exception]] = []
        #: requests of the running forward, by sequence
        self._computing: dict[int, RequestState] = {}
        #: its requests that have ended meanwhile, and why
        self._held: list[tuple[RequestState, ErrorInfo | None]] = []

    # ---- admission ---------------------------------------------------------------------------

    def submit(self, origin: Incarnation, submit: Submit, now: float) -> None:
        """Admit a request or answer it with one typed error; nothing else is touched by its failure."""
        request = submit.request
        try:
            state = self.admission.check(origin, submit, now)
            self.engine.open(state.seq_id, request.prompt, request.sampling, request.output)
        except SegueError as error:
            self.refuse(origin, submit, error.info, now)
            return
        self.admission.add(state)
        try:
            self._admit(state, now)
        except SegueError as error:
            self.fail(state, error.info, now)

    def replace(self, origin: Incarnation, message: Replace, now: float) -> None:
        """The frontend has placed the other half of a request again."""
        gone = OutOfCapacity(f"{self.config.name} does not have its half of this request any more")
        self.admission.refuse(origin, message.request_id, gone.info, now, message.ticket)

    @abstractmethod
    def _admit(self, state: RequestState, now: float) -> None:
        """Put a new request into its queue. Raises a SegueError to refuse it."""

    def refuse(self, origin: Incarnation, submit: Submit, error: ErrorInfo, now: float) -> None:
        """A request is not taken: its frontend is told, and whoever has its other half."""
        self.admission.refuse(origin, submit.request.request_id, error, now, submit.ticket)
        self.leave_out(submit, error)

    def leave_out(self, submit: Submit, error: ErrorInfo) -> None:
        """A request that was not admitted ends with `error`: whoever has its other half is told, unless its
        placer does. A ticket that nobody has signed is no reason to tell anybody."""
        if submit.ticket.ordinal is not None and error.code is not ErrorCode.UNAUTHORIZED:
            self._tell_other_half(submit, error)

    @abstractmethod
    def _tell_other_half(self, submit: Submit, error: ErrorInfo) -> None:
        """The half of direct mode that was not admitted ends with `error`."""

    # ---- the end -----------------------------------------------------------------------------

    def cancel(
        self, origin: Incarnation, request_id: str, error: ErrorInfo, now: float, *, complete: bool = False
    ) -> None:
        """End a request for the frontend's reason, without an answer: it knows. Unknown ids are ignored.
        A `complete` one is recorded as a success."""
        state = self.admission.requests.get((origin, request_id))
        if state is not None:
            self.end(state, error, now, complete=complete)

    def frontend_gone(self, origin: Incarnation, error: ErrorInfo, now: float) -> None:
        """End everything that `origin` asked for; nobody is left to read it."""
        for state in [s for s in self.admission.requests.values() if s.origin == origin]:
            self.end(state, error, now)
        self.admission.frontend_gone(origin)

    def fail(self, state: RequestState, error: ErrorInfo, now: float) -> None:
        """End `state` and answer its frontend with `error`, at most once."""
        if not state.ended:
            self.end(state, self.admission.tell_failed(state, error, now), now)

    def end(
        self, state: RequestState, error: ErrorInfo | None, now: float, *, complete: bool = False
    ) -> None:
        """The one end of a request: it leaves every table and lets go of what it holds. Idempotent.

        `error` ends a hand-off that goes on, and is recorded unless the request is `complete`."""
        if state.ended:
            return
        state.ended = True
        error_shown = None if complete else error
        self.admission.remove(state, error_shown, now)
        self.figures.end(state, error_shown, now)
        if state.seq_id in self._computing:
            self._held.append((state, error))
        else:
            self._let_go(state, error, now)

    def _let_go(self, state: RequestState, error: ErrorInfo | None, now: float) -> None:
        self.attempt("close", state, now, self.engine.close, state.seq_id)
        self._drop(state, error, now)

    @abstractmethod
    def _drop(self, state: RequestState, error: ErrorInfo | None, now: float) -> None:
        """Release what a request holds; `error` is None after a success."""

    def attempt(
        self, what: str, state: RequestState, now: float, call: Callable[..., T], *args: object
    ) -> T | None:
        """Ask the engine for something that is of `state` alone. An error there fails that request (which may
        have ended already) and nobody else, and is answered with None."""
        try:
            return call(*args)
        except Exception as exc:  # the boundary: what others share the step with is not theirs to suffer
            self.engine_broke(what, state, exc, now)
            return None

    def engine_broke(self, what: str, state: RequestState, exc: Exception, now: float) -> None:
        """The engine raised `exc` at something that is of `state` alone; a bug is kept in `bugs`."""
        if isinstance(exc, SegueError):  # it says itself what is wrong
            self.fail(state, exc.info, now)
            return
        self.bugs.append((f"{what} of room {state.ticket.room}", exc))
        self.fail(state, Internal(f"the engine broke in {what}: {exc!r}").info, now)

    def broken(
        self,
        origin: Incarnation,
        request_id: str,
        error: ErrorInfo,
        now: float,
        submit: Submit | None = None,
    ) -> None:
        """Something of this request was not handled, by a bug: it ends with `error`, known or not. `submit`
        if that was its admission."""
        state = self.admission.requests.get((origin, request_id))
        if state is not None:
            self.fail(state, error, now)
            return
        error = error.exception().at(phase="submit").info
        if submit is None:
            self.admission.refuse(origin, request_id, error, now)
        else:
            self.refuse(origin, submit, error, now)

    def key_of(self, state: RequestState) -> RoomKey:
        """The half of a hand-off that `state` has here."""
        return state.received_as

    def broken_handoff(self, key: RoomKey, error: ErrorInfo, now: float) -> None:
        """Like `broken`, for the request of the half `key`; a finished one stays finished."""
        requests = self.admission.requests.values()
        state = next((state for state in requests if self.key_of(state) == key), None)
        if state is not None:
            self.fail(state, error, now)

    def fail_all(self, error: ErrorInfo, now: float) -> None:
        """A bug that is nobody's alone, as in planning a step: everything that is here ends with `error`, so
        that the next step begins afresh."""
        for state in list(self.admission.requests.values()):
            try:
                self.fail(state, error, now)
            except Exception as exc:  # the boundary: the others are to end all the same
                self.bugs.append((f"the end of room {state.ticket.room}", exc))

    # ---- time and hand-offs ------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """When `advance` must be called at the latest, or None."""
        return self.admission.next_deadline()

    def advance(self, now: float) -> None:
        """Advance time: every request whose deadline has passed fails, in any state."""
        while (state := self.admission.next_late(now)) is not None:
            self.fail(state, self._late(state).info, now)

    def _late(self, state: RequestState) -> SegueError:
        """The error of a request whose deadline has passed."""
        budget_s = state.deadline - state.entered
        return DeadlineExceeded(f"not finished within {budget_s:.1f} s; it was in phase {state.phase!r}")

    @abstractmethod
    def on_change(self, change: Change, now: float) -> None:
        """A change of a hand-off, unless `computes` says that it must wait."""

    def computes(self, key: RoomKey) -> bool:
        """Whether the running forward works on the request of this half: what the protocol says of it (its
        pages are free, perhaps) is told after the forward."""
        return any(self.key_of(state) == key for state in self._computing.values())

    # ---- the forward -------------------------------------------------------------------------

    @abstractmethod
    def plan(self, now: float) -> list[SequenceStep]:
        """The next forward; empty if there is nothing to compute."""

    def launched(self, steps: Sequence[SequenceStep]) -> None:
        """A forward over `steps` runs from now on, until `complete` or `step_failed`."""
        self._computing = {step.seq_id: self.admission.by_seq[step.seq_id] for step in steps}

    def on_stored(self) -> OnStored:
        """The callback for KV that the last planned forward has stored; may be called on any thread."""
        return _nobody

    def complete(self, results: Sequence[SequenceResult], now: float) -> None:
        """The forward that was planned has ended, with these results."""
        self._forward_ended(now)
        self._complete({result.seq_id: result for result in results}, now)

    @abstractmethod
    def _complete(self, results: Mapping[int, SequenceResult], now: float) -> None:
        """Take the results, by sequence; some requests have ended meanwhile."""

    def step_failed(self, steps: Sequence[SequenceStep], error: ErrorInfo, now: float) -> None:
        """The engine could not run `steps`: fail exactly their requests."""
        self._forward_ended(now)
        for step in steps:
            if (state := self.admission.by_seq.get(step.seq_id)) is not None:
                self.fail(state, error, now)

    def _forward_ended(self, now: float) -> None:
        self._computing = {}
        while self._held:
            self._let_go(*self._held.pop(0), now)

    def _generated(self, state: RequestState, result: SequenceResult, now: float) -> None:
        """A running sequence has its next token."""
        if result.error is not None or result.token is None:
            self.fail(state, result.failure("the engine returned no token"), now)
            return
        state.computed += 1
        self._emit(state, result.token, result.logprob, now)

    def _emit(self, state: RequestState, token: int, logprob: TokenLogprob | None, now: float) -> None:
        """Tell the frontend the next token of `state`; the last one ends it."""
        output = state.add_token(token, logprob, self.engine.info.eos_token_ids)
        self.figures.token(state, now)
        self.admission.answer(state, output)
        if output.finish is not None:
            self.cache.remember(state, state.computed)
            self.end(state, None, now)

    # ---- what others see ---------------------------------------------------------------------

    @property
    def outbox(self) -> list[tuple[Incarnation, Output]]:
        """Outputs for frontends; the sender clears the list."""
        return self.admission.outbox

    def load(self) -> Load:
        """The load, for placement."""
        pool, slots, requests = self.cache.pool, self.cache.slots, self.admission.requests
        running = sum(not state.ended for state in self._running())
        return Load(
            dp_rank=self.config.me.dp_rank,
            running=running,
            waiting=len(requests) - running,
            tokens=sum(map(self._tokens, requests.values())),
            pages_free=self.cache.available,
            pages_total=pool.total,
            pages_quarantined=pool.quarantined,
            slots_free=0 if slots is None else slots.free,
            slots_total=0 if slots is None else slots.total,
            slots_quarantined=0 if slots is None else slots.quarantined,
            draining=self.admission.draining,
            drained=self.drained,
        )

    @abstractmethod
    def _running(self) -> Collection[RequestState]:
        """Requests that the next step works on."""

    def _tokens(self, state: RequestState) -> int:
        """Tokens of one request, a measure of work and memory."""
        return state.tokens

    def drain(self, draining: bool = True) -> None:
        """Take no new requests from now on, or take them again."""
        self.admission.draining = draining

    @property
    def idle(self) -> bool:
        """No request holds anything here, and no forward runs."""
        return not self._computing and not any(self.sizes().values())

    @property
    def drained(self) -> bool:
        """The scheduler admits nothing new, and no other process uses its pages: none is published or in
        quarantine."""
        slots = self.cache.slots
        quarantined = self.cache.pool.quarantined + (0 if slots is None else slots.quarantined)
        return self.admission.draining and self.idle and not quarantined

    def sizes(self) -> dict[str, int]:
        """Tables whose entries belong to requests; all zero at rest."""
        admission = self.admission
        return {
            "requests": len(admission.requests),
            "by_seq": len(admission.by_seq),
            "held": len(self._held),
        }

    def check_integrity(self) -> None:
        """Raise AssertionError or Internal with what is wrong, if anything is."""
        self.admission.check_integrity()
        self.cache.check_integrity(at_rest=self.idle)
