"""Sequences that generate: continuous batching, page growth, retraction. For decode and unified."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Sequence

from msgspec.structs import replace

from segue.core.errors import Internal
from segue.core.request import Output, TokenLogprob, Usage
from segue.core.types import FinishReason
from segue.engine.base import HostPages, SequenceResult, SequenceStep
from segue.roles.request_state import RequestState
from segue.roles.scheduler import Scheduler


class RunningBatch:
    """`waiting` (ready, no place in the batch yet), `running`, and `retracted` (KV in host memory).

    When a running sequence needs a page and there is none, the youngest of `waiting`, or else of `running`,
    is retracted: its KV is copied out, its pages go back, and it continues later with the same tokens. So the
    oldest that runs always has its next token. `retracted` is in order of arrival, as its requests come back.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.waiting: deque[RequestState] = deque()
        self.running: list[RequestState] = []
        self.retracted: list[tuple[RequestState, HostPages]] = []
        self.retractions = 0

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running) + len(self.retracted)

    def start(self, state: RequestState, token: int, logprob: TokenLogprob | None, now: float) -> None:
        """`state` has its prompt's KV and its first token; it may run from the next step on."""
        state.enter("ready", now)
        first = Output(
            request_id=state.request.request_id,
            position=state.produced,
            token_ids=[token],
            logprobs=[logprob] if logprob is not None else [],
            prompt_logprobs=state.prompt_logprobs or None,
            usage=state.usage,
            timeline=dict(state.timeline),
        )
        self.waiting.append(state)
        self._emit(state, token, first, now)

    def remove(self, state: RequestState) -> None:
        """Forget a request wherever it is."""
        if state in self.running:
            self.running.remove(state)
        elif state in self.waiting:
            self.waiting.remove(state)
        else:
            self.retracted = [item for item in self.retracted if item[0] is not state]

    # ---- one step ----------------------------------------------------------------------------

    def plan(self, now: float) -> list[SequenceStep]:
        """One token of every running sequence, after making room and filling the batch."""
        self._fill(now)
        if not self.running:
            # The last one gave way to itself: of a prefix that was cached meanwhile it had pages of its own,
            # and the cached ones could not be evicted while it held what follows them.
            self._fill(now)
        return [SequenceStep(j.seq_id, j.output[-1:], j.computed, j.pages, True) for j in self.running]

    def _fill(self, now: float) -> None:
        """The batch of the next step, each of it with a place for its token's KV."""
        self._resume(now)
        while self.waiting and len(self.running) < self.scheduler.limits.max_batch:
            state = self.waiting.popleft()
            state.enter("decode", now)
            self.running.append(state)
        for state in list(self.running):
            if state in self.running:
                self._grow(state, now)

    def complete(self, state: RequestState, result: SequenceResult, now: float) -> None:
        """A running sequence has its next token."""
        if result.error is not None or result.token is None:
            self.scheduler.fail(state, Internal(result.error or "the engine returned no token").info, now)
            return
        state.computed += 1
        output = Output(
            request_id=state.request.request_id,
            position=state.produced,
            token_ids=[result.token],
            logprobs=[result.logprob] if result.logprob is not None else [],
        )
        self._emit(state, result.token, output, now)

    def _emit(self, state: RequestState, token: int, output: Output, now: float) -> None:
        state.output.append(token)
        finish, stop_token = self._finish(state, token)
        if finish is not None:
            usage = replace(state.usage, output_tokens=state.produced)
            output = replace(output, finish=finish, stop_token=stop_token, usage=usage)
        self.scheduler.outbox.append((state.origin, output))
        if finish is not None:
            self.scheduler.remember(state, state.computed)
            self.scheduler.end(state, None, now)

    def _finish(self, state: RequestState, token: int) -> tuple[FinishReason | None, int | None]:
        sampling = state.sampling
        if state.produced > sampling.min_tokens:
            if token in self.scheduler.engine.info.eos_token_ids and not sampling.ignore_eos:
                return FinishReason.STOP, token
            if token in sampling.stop_token_ids:
                return FinishReason.STOP, token
        if state.produced >= state.max_tokens:
            return FinishReason.LENGTH, None
        return None, None

    # ---- pages -------------------------------------------------------------------------------

    def _grow(self, state: RequestState, now: float) -> None:
        """Make sure that the KV of the request's last token has a place; retract others if needed."""
        scheduler = self.scheduler
        while len(state.pages) < scheduler.pool.pages_for(state.computed + 1):
            left = state.max_tokens - state.produced
            page = scheduler.take_pages(1, after=state.pages[-1], room=scheduler.pool.pages_for(left))
            if page is not None:
                state.pages += page
                continue
            victim = max(self.waiting or self.running, key=_age)
            self._retract(victim, now)
            if victim is state:
                return

    def _retract(self, state: RequestState, now: float) -> None:
        scheduler = self.scheduler
        held = scheduler.pool.pages_for(state.computed)
        host = scheduler.attempt("copy_out", state, now, scheduler.engine.copy_out, state.pages[:held])
        if host is None:
            return  # it has failed, and its pages are free all the same
        self.remove(state)
        insort(self.retracted, (state, host), key=lambda item: _age(item[0]))
        scheduler.pool.release(state.pages)
        state.pages = []
        self.retractions += 1

    def _resume(self, now: float) -> None:
        """Bring retracted sequences back, oldest first, while there is room for them to move on."""
        while self.retracted and len(self.running) < self.scheduler.limits.max_batch:
            state, host = self.retracted[0]
            # A page of slack for everybody that runs: or it would be retracted again at once.
            needed = self.scheduler.pool.pages_for(state.computed + 1)
            slack = len(self.running)
            if not self.scheduler.has_pages(needed + slack):
                return
            pages = self.scheduler.take_pages(
                needed, room=self.scheduler.pool.pages_for(state.max_tokens - state.produced)
            )
            if pages is None:
                return
            del self.retracted[0]
            state.pages = pages
            self.running.append(state)
            kv = pages[: self.scheduler.pool.pages_for(state.computed)]
            self.scheduler.attempt("copy_in", state, now, self.scheduler.engine.copy_in, host, kv)


def _age(state: RequestState) -> int:
    """Orders requests by their arrival here."""
    return state.seq_id


def first_usage(prompt_tokens: int, decode_cached: int, prefill_cached: int) -> Usage:
    """Where the KV of a prompt of `prompt_tokens` came from. What both sides had cached counts as
    decode's. In a continuation the counts go beyond the prompt; a cached prefix begins with it."""
    shared = min(decode_cached, prefill_cached, prompt_tokens)
    cached = min(prefill_cached, prompt_tokens) - shared
    return Usage(
        prompt_tokens=prompt_tokens,
        decode_cached=shared,
        prefill_cached=cached,
        computed=prompt_tokens - shared - cached,
    )


def by_sequence(results: Sequence[SequenceResult]) -> dict[int, SequenceResult]:
    """Results keyed by sequence."""
    return {r.seq_id: r for r in results}
