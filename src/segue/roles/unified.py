"""The unified role: prompts and generation in one engine, without a hand-off. The baseline."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from segue.conn.handles import Change
from segue.core.errors import ErrorInfo, Internal, InvalidRequest
from segue.core.types import Span
from segue.engine.api import SequenceResult, SequenceStep
from segue.roles.base import Desk
from segue.roles.generation import Generation, by_sequence, first_usage
from segue.roles.job import Job
from segue.roles.prompts import Prompts


class UnifiedRole(Desk):
    """Each step runs one token of every generating sequence and a chunk of waiting prompts.

    While a sequence is retracted no prompt starts, but one that has its pages goes on: it would hold them
    for ever. So something always moves while there is a job, and the tokens that are still to be computed
    (retraction loses none) grow fewer with each step:

    - a half-computed prompt has all its pages, and its next chunk needs nothing else;
    - without one, all pages are with sequences that generate, or can be evicted. The oldest that runs has its
      next token: the others give their pages up for it, then it does so itself, and comes back;
    - where none runs, the oldest that is retracted finds the whole pool, or else the first prompt does, and
      alone each fits (`submit` has looked).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.prompts = Prompts(self, self._cached)
        self.generation = Generation(self)
        self._chunks: list[SequenceStep] = []

    def _cached(self, job: Job, span: Span) -> None:
        """Nobody has to be told: the pages are where they are needed."""

    def _admit(self, job: Job, now: float) -> None:
        if job.ticket.decode.incarnation != self.me:
            raise InvalidRequest("the ticket names another instance")
        self.prompts.add(job)

    def _drop(self, job: Job, error: ErrorInfo | None, now: float) -> None:
        self.prompts.remove(job)
        self.generation.remove(job)
        self.pool.release(job.pages)
        job.pages = []

    def on_change(self, change: Change, now: float) -> None:
        """A unified instance has no hand-offs."""
        raise Internal(f"a unified instance has no hand-off {change.transfer}")

    def advance(self, now: float) -> None:
        """Timers."""
        self.expire(now)

    def plan(self, now: float) -> list[SequenceStep]:
        """Generating sequences first, then prompt chunks with what is left of the token budget."""
        steps = self.generation.plan(now)
        start = not self.generation.retracted
        self._chunks = self.prompts.plan(self.chunk_tokens - len(steps), now, start=start)
        return steps + self._chunks

    def stored(self, seq_ids: Collection[int]) -> None:
        """The KV is where it is needed."""

    def complete(self, results: Sequence[SequenceResult], now: float) -> None:
        """Hand the new tokens out; a finished prompt starts to generate."""
        by_seq = by_sequence(results)
        chunks, self._chunks = self._chunks, []
        for step in chunks:
            job = self.by_seq.get(step.seq_id)
            result = by_seq.pop(step.seq_id, None)
            if job is None:
                continue
            if result is not None and result.error is not None:
                self.fail(job, Internal(result.error).info, now)
                continue
            self.prompts.complete(job, step, result)
            if not step.sample:
                continue
            self.remember(job, len(job.prompt))
            if result is None or result.token is None:
                self.fail(job, Internal("the engine returned no first token").info, now)
                continue
            job.usage = first_usage(len(job.request.prompt), 0, job.cached)
            self.generation.start(job, result.token, result.logprob, now)
        for seq_id, result in by_seq.items():
            if (job := self.by_seq.get(seq_id)) is not None:
                self.generation.complete(job, result, now)

    @property
    def idle(self) -> bool:
        """Nothing is queued or running."""
        return not self.jobs

    def _running(self) -> int:
        return len(self.generation.running) + len(self.prompts.running)

    def _counts(self) -> dict[str, int]:
        return {
            **super()._counts(),
            "prompts": len(self.prompts),
            "generation": len(self.generation),
        }
