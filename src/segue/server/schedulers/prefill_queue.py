"""Prompts being computed, chunk by chunk: for prefill and unified."""

from __future__ import annotations

from collections import deque

from segue.engine.engine_api import SequenceResult, SequenceStep
from segue.server.schedulers.fair_queue import PASSED_STEPS, FairQueue
from segue.server.schedulers.kv_cache import KVCache
from segue.server.schedulers.request_state import RequestState


class PrefillQueue:
    """`waiting` for pages, in the order of `fair_queue`, then `running` in chunks, first come, first served.

    Several short prompts share a step, as long as the step's token budget lasts. The first chunk of a prompt
    begins where the prefix that was found in the cache ends.
    """

    def __init__(self, cache: KVCache, chunk_tokens: int) -> None:
        self.waiting = FairQueue(PASSED_STEPS * chunk_tokens)
        self.running: deque[RequestState] = deque()
        #: the first of `waiting`, if there were no pages for it when the last step was planned
        self.short: RequestState | None = None
        self._cache = cache

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running)

    def add(self, state: RequestState) -> None:
        """Queue a request that may be computed as soon as there are pages."""
        self.waiting.add(state)

    def remove(self, state: RequestState) -> None:
        """Forget a request wherever it is."""
        self.waiting.remove(state)
        if state in self.running:
            self.running.remove(state)
        if self.short is state:
            self.short = None

    def plan(self, budget_tokens: int, now: float, *, start: bool = True) -> list[SequenceStep]:
        """The next chunks, at most `budget_tokens` tokens in total. Without `start` only those of prompts
        that have their pages."""
        steps: list[SequenceStep] = []
        self.short = None
        for state in list(self.running):
            if budget_tokens <= 0:
                return steps
            budget_tokens -= self._chunk(state, budget_tokens, steps)
        while start and budget_tokens > 0 and (first := self.waiting.first) is not None:
            if not self._give_pages(first):
                self.short = first
                break
            first.enter("prefill", now, self.waiting.start(first))
            self.running.append(first)
            budget_tokens -= self._chunk(first, budget_tokens, steps)
        return steps

    def _give_pages(self, state: RequestState) -> bool:
        """Give the request its pages: those of the longest cached prefix, and new ones for the rest; and its
        slot."""
        if not self._cache.has_slot:
            return False
        pool, prompt = self._cache.pool, state.prompt
        cached: list[int] = []
        if state.sampling.prompt_logprobs is None:
            # The last token is always computed: its logits choose the next one.
            cached = self._cache.tree.match(prompt[:-1], state.request.cache_salt).pages
        missing = pool.pages_for(len(prompt)) - len(cached)
        fresh = self._cache.take(missing, after=cached[-1] if cached else None)
        if fresh is None:
            pool.release(cached)
            return False
        state.pages, state.slot = cached + fresh, self._cache.take_slot()
        state.cached = state.computed = len(cached) * pool.page_tokens
        return True

    def _chunk(self, state: RequestState, budget_tokens: int, steps: list[SequenceStep]) -> int:
        start, prompt = state.computed, state.prompt
        end = min(len(prompt), start + budget_tokens)
        last = end == len(prompt)
        steps.append(SequenceStep(state.seq_id, prompt[start:end], start, state.pages, last, state.slot))
        return end - start

    def complete(self, state: RequestState, step: SequenceStep, result: SequenceResult | None) -> None:
        """A chunk has been computed. The request leaves the queue with its last one.

        The caller remembers the computed tokens, after more urgent work.
        """
        state.computed = step.span.end
        if result is not None and result.prompt_logprobs is not None:
            state.prompt_logprobs.extend(result.prompt_logprobs)
        if state.computed == len(state.prompt):
            self.running.remove(state)
