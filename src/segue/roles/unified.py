"""The unified role: prompts and generation in one engine, without a hand-off. The baseline."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from segue.conn.handles import Change
from segue.core.errors import ErrorInfo, Internal, InvalidRequest
from segue.core.types import Span
from segue.engine.base import SequenceResult, SequenceStep
from segue.roles.prefill_queue import PrefillQueue
from segue.roles.request_state import RequestState
from segue.roles.running_batch import RunningBatch, by_sequence, first_usage
from segue.roles.scheduler import Scheduler


class UnifiedScheduler(Scheduler):
    """Each step runs one token of every generating sequence and a chunk of waiting prompts.

    While a sequence is retracted no prompt starts, but one that has its pages goes on: it would hold them
    for ever. So something always moves while there is a request, and the tokens that are still to be computed
    (retraction loses none) grow fewer with each step:

    - a half-computed prompt has all its pages, and its next chunk needs nothing else;
    - without one, all pages are with sequences that generate, or can be evicted. The oldest that runs has its
      next token: the others give their pages up for it, then it does so itself, and comes back;
    - where none runs, the oldest that is retracted finds the whole pool, or else the first prompt does, and
      alone each fits (`submit` has looked).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.queue = PrefillQueue(self, self._cached)
        self.batch = RunningBatch(self)
        self._chunks: list[SequenceStep] = []

    def _cached(self, state: RequestState, span: Span) -> None:
        """Nobody has to be told: the pages are where they are needed."""

    def _admit(self, state: RequestState, now: float) -> None:
        if state.ticket.decode != self.me:
            raise InvalidRequest("the ticket names another instance")
        self.queue.add(state)

    def _drop(self, state: RequestState, error: ErrorInfo | None, now: float) -> None:
        self.queue.remove(state)
        self.batch.remove(state)
        self.pool.release(state.pages)
        state.pages = []

    def on_change(self, change: Change, now: float) -> None:
        """A unified instance has no hand-offs."""
        raise Internal(f"a unified instance has no hand-off {change.transfer}")

    def advance(self, now: float) -> None:
        """Timers."""
        self.expire(now)

    def plan(self, now: float) -> list[SequenceStep]:
        """Generating sequences first, then prompt chunks with what is left of the token budget."""
        steps = self.batch.plan(now)
        start = not self.batch.retracted
        self._chunks = self.queue.plan(self.chunk_tokens - len(steps), now, start=start)
        return steps + self._chunks

    def stored(self, seq_ids: Collection[int]) -> None:
        """The KV is where it is needed."""

    def complete(self, results: Sequence[SequenceResult], now: float) -> None:
        """Hand the new tokens out; a finished prompt starts to generate."""
        by_seq = by_sequence(results)
        chunks, self._chunks = self._chunks, []
        for step in chunks:
            state = self.by_seq.get(step.seq_id)
            result = by_seq.pop(step.seq_id, None)
            if state is None:
                continue
            if result is not None and result.error is not None:
                self.fail(state, Internal(result.error).info, now)
                continue
            self.queue.complete(state, step, result)
            if not step.sample:
                continue
            self.remember(state, len(state.prompt))
            if result is None or result.token is None:
                self.fail(state, Internal("the engine returned no first token").info, now)
                continue
            state.usage = first_usage(len(state.request.prompt), 0, state.cached)
            self.batch.start(state, result.token, result.logprob, now)
        for seq_id, result in by_seq.items():
            if (state := self.by_seq.get(seq_id)) is not None:
                self.batch.complete(state, result, now)

    @property
    def idle(self) -> bool:
        """Nothing is queued or running."""
        return not self.requests

    def _running(self) -> int:
        return len(self.batch.running) + len(self.queue.running)

    def _counts(self) -> dict[str, int]:
        return {
            **super()._counts(),
            "prompts": len(self.queue),
            "generation": len(self.batch),
        }
