"""Prompts being computed, chunk by chunk: shared by the prefill and the unified role."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from segue.core.types import Span
from segue.engine.api import SequenceResult, SequenceStep
from segue.roles.base import Desk
from segue.roles.job import Job


class Prompts:
    """First come, first served: `waiting` for pages, then `running` in chunks.

    Several short prompts share a step, as long as the step's token budget lasts. `on_cached`
    hears of a prefix whose KV was found complete when its job started.
    """

    def __init__(self, desk: Desk, on_cached: Callable[[Job, Span], None]) -> None:
        self.desk = desk
        self.on_cached = on_cached
        self.waiting: deque[Job] = deque()
        self.running: deque[Job] = deque()

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running)

    def add(self, job: Job) -> None:
        """Queue a job that may be computed as soon as there are pages."""
        self.waiting.append(job)

    def remove(self, job: Job) -> None:
        """Forget a job wherever it is."""
        for queue in (self.waiting, self.running):
            if job in queue:
                queue.remove(job)

    def plan(self, budget_tokens: int, now: float, *, start: bool = True) -> list[SequenceStep]:
        """The next chunks, at most `budget_tokens` tokens in total. Without `start` only those of prompts
        that have their pages."""
        steps: list[SequenceStep] = []
        for job in list(self.running):
            if budget_tokens <= 0:
                return steps
            budget_tokens -= self._chunk(job, budget_tokens, steps)
        while start and budget_tokens > 0 and self.waiting and self._start(self.waiting[0], now):
            job = self.waiting.popleft()
            self.running.append(job)
            budget_tokens -= self._chunk(job, budget_tokens, steps)
        return steps

    def _start(self, job: Job, now: float) -> bool:
        """Give the job its pages: those of the longest cached prefix, and new ones for the rest."""
        desk, prompt = self.desk, job.prompt
        cached: list[int] = []
        if job.sampling.prompt_logprobs is None:
            # The last token is always computed: its logits choose the next one.
            match = desk.tree.match(prompt[:-1])
            cached = match.pages
        fresh = desk.take_pages(
            desk.pool.pages_for(len(prompt)) - len(cached), after=cached[-1] if cached else None
        )
        if fresh is None:
            desk.pool.release(cached)
            return False
        job.pages = cached + fresh
        job.cached = job.computed = len(cached) * desk.pool.page_tokens
        job.enter("prefill", now)
        if job.cached:
            self.on_cached(job, Span(0, job.cached))
        return True

    def _chunk(self, job: Job, budget_tokens: int, steps: list[SequenceStep]) -> int:
        end = min(len(job.prompt), job.computed + budget_tokens)
        steps.append(
            SequenceStep(
                job.seq_id, job.prompt[job.computed : end], job.computed, job.pages, end == len(job.prompt)
            )
        )
        return end - job.computed

    def complete(self, job: Job, step: SequenceStep, result: SequenceResult | None) -> None:
        """A chunk has been computed. The job leaves the queue with its last one.

        What was computed is for the caller to `remember`, once it needs nothing more urgently.
        """
        job.computed = step.span.end
        if result is not None and result.prompt_logprobs is not None:
            job.prompt_logprobs.extend(result.prompt_logprobs)
        if job.computed == len(job.prompt):
            self.running.remove(job)
