"""The unified role: prompts and generation in one engine, without a hand-off. The baseline."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from segue.engine.engine_api import Engine, SequenceResult, SequenceStep
from segue.engine.pages import PagePool
from segue.kv import Change, ErrorInfo, Internal, InvalidRequest
from segue.server.messages.control import Submit
from segue.server.schedulers.admission import SchedulerConfig
from segue.server.schedulers.prefill_queue import PrefillQueue
from segue.server.schedulers.request_state import RequestState, first_usage
from segue.server.schedulers.running_batch import RunningBatch
from segue.server.schedulers.scheduler import Scheduler


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

    def __init__(self, engine: Engine, pool: PagePool, config: SchedulerConfig) -> None:
        super().__init__(engine, pool, config)
        self.queue = PrefillQueue(self.cache, config.chunk_tokens)
        self.batch = RunningBatch(self.cache, engine, config.limits.max_batch)
        self._chunks: list[SequenceStep] = []

    def _admit(self, state: RequestState, now: float) -> None:
        if state.ticket.decode != self.config.me:
            raise InvalidRequest("the ticket names another instance")
        self.queue.add(state)

    def _tell_other_half(self, submit: Submit, error: ErrorInfo) -> None:
        """There is no other half."""

    def _drop(self, state: RequestState, error: ErrorInfo | None, now: float) -> None:
        self.queue.remove(state)
        self.batch.remove(state)
        self.cache.release(state)

    def on_change(self, change: Change, now: float) -> None:
        """A unified instance has no hand-offs."""
        raise Internal(f"a unified instance has no hand-off {change.key}")

    def plan(self, now: float) -> list[SequenceStep]:
        """Generating sequences first, then prompt chunks with what is left of the token budget."""
        steps = self.batch.plan(now)
        for what, state, exc in self.batch.take_failed():
            self.engine_broke(what, state, exc, now)
        self._chunks = self.queue.plan(self.config.chunk_tokens - len(steps), now, start=self._may_start())
        return steps + self._chunks

    def _may_start(self) -> bool:
        """Whether a prompt may take pages now."""
        return not self.batch.retracted

    def _complete(self, results: Mapping[int, SequenceResult], now: float) -> None:
        """Hand the new tokens out; a finished prompt starts to generate."""
        chunks, self._chunks = self._chunks, []
        for step in chunks:
            state, result = self.admission.by_seq.get(step.seq_id), results.get(step.seq_id)
            if state is None:
                continue
            if result is not None and result.error is not None:
                self.fail(state, result.failure("the prefill failed"), now)
                continue
            self.queue.complete(state, step, result)
            if not step.sample:
                continue
            self.cache.remember(state, len(state.prompt))
            if result is None or result.token is None:
                self.fail(state, Internal("the engine returned no first token").info, now)
                continue
            state.usage = first_usage(len(state.request.prompt), 0, state.cached)
            state.enter("ready", now)
            self.batch.add(state)
            self._emit(state, result.token, result.logprob, now)
        prompts = {step.seq_id for step in chunks}
        for seq_id, result in results.items():
            state = self.admission.by_seq.get(seq_id)
            if state is not None and seq_id not in prompts:
                self._generated(state, result, now)

    def _running(self) -> Collection[RequestState]:
        return [*self.batch.running, *self.queue.running]

    def sizes(self) -> dict[str, int]:
        """See `Scheduler.sizes`."""
        return {**super().sizes(), "queue": len(self.queue), "batch": len(self.batch)}
