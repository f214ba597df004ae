"""Prompts being computed, chunk by chunk: for prefill and unified."""

from __future__ import annotations

from collections import deque

from segue.engine.base import SequenceResult, SequenceStep
from segue.roles.kv_cache import KVCache
from segue.roles.request_state import RequestState


class PrefillQueue:
    """First come, first served: `waiting` for pages, then `running` in chunks.

    Several short prompts share a step, as long as the step's token budget lasts. The first chunk of a prompt
    begins where the prefix that was found in the cache ends.
    """

    def __init__(self, cache: KVCache) -> None:
        self.waiting: deque[RequestState] = deque()
        self.running: deque[RequestState] = deque()
        self._cache = cache

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running)

    def add(self, state: RequestState) -> None:
        """Queue a request that may be computed as soon as there are pages."""
        self.waiting.append(state)

    def remove(self, state: RequestState) -> None:
        """Forget a request wherever it is."""
        for queue in (self.waiting, self.running):
            if state in queue:
                queue.remove(state)

    def plan(self, budget_tokens: int, now: float, *, start: bool = True) -> list[SequenceStep]:
        """The next chunks, at most `budget_tokens` tokens in total. Without `start` only those of prompts
        that have their pages."""
        steps: list[SequenceStep] = []
        for state in list(self.running):
            if budget_tokens <= 0:
                return steps
            budget_tokens -= self._chunk(state, budget_tokens, steps)
        while start and budget_tokens > 0 and self.waiting and self._start(self.waiting[0], now):
            state = self.waiting.popleft()
            self.running.append(state)
            budget_tokens -= self._chunk(state, budget_tokens, steps)
        return steps

    def _start(self, state: RequestState, now: float) -> bool:
        """Give the request its pages: those of the longest cached prefix, and new ones for the rest."""
        pool, prompt = self._cache.pool, state.prompt
        cached: list[int] = []
        if state.sampling.prompt_logprobs is None:
            # The last token is always computed: its logits choose the next one.
            cached = self._cache.tree.match(prompt[:-1]).pages
        missing = pool.pages_for(len(prompt)) - len(cached)
        fresh = self._cache.take(missing, after=cached[-1] if cached else None)
        if fresh is None:
            pool.release(cached)
            return False
        state.pages = cached + fresh
        state.cached = state.computed = len(cached) * pool.page_tokens
        state.enter("prefill", now)
        return True

    def _chunk(self, state: RequestState, budget_tokens: int, steps: list[SequenceStep]) -> int:
        start, prompt = state.computed, state.prompt
        end = min(len(prompt), start + budget_tokens)
        steps.append(SequenceStep(state.seq_id, prompt[start:end], start, state.pages, end == len(prompt)))
        return end - start

    def complete(self, state: RequestState, step: SequenceStep, result: SequenceResult | None) -> None:
        """A chunk has been computed. The request leaves the queue with its last one.

        What was computed is for the caller to remember, once it needs nothing more urgently.
        """
        state.computed = step.span.end
        if result is not None and result.prompt_logprobs is not None:
            state.prompt_logprobs.extend(result.prompt_logprobs)
        if state.computed == len(state.prompt):
            self.running.remove(state)
