"""Sequences that generate: continuous batching, page growth, retraction. For decode and unified."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Sequence

from msgspec.structs import replace

from segue.core.errors import Internal
from segue.core.request import Output, TokenLogprob, Usage
from segue.core.types import FinishReason
from segue.engine.api import HostPages, SequenceResult, SequenceStep
from segue.roles.base import Desk
from segue.roles.job import Job


class Generation:
    """`waiting` (ready, no place in the batch yet), `running`, and `retracted` (KV in host memory).

    When a running sequence needs a page and there is none, the youngest of `waiting`, or else of `running`,
    is retracted: its KV is copied out, its pages go back, and it continues later with the same tokens. So the
    oldest that runs always has its next token. `retracted` is in order of arrival, as its requests come back.
    """

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []
        self.retracted: list[tuple[Job, HostPages]] = []
        self.retractions = 0

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running) + len(self.retracted)

    def start(self, job: Job, token: int, logprob: TokenLogprob | None, now: float) -> None:
        """`job` has its prompt's KV and its first token; it may run from the next step on."""
        job.enter("ready", now)
        first = Output(
            request_id=job.request.request_id,
            position=job.produced,
            token_ids=[token],
            logprobs=[logprob] if logprob is not None else [],
            prompt_logprobs=job.prompt_logprobs or None,
            usage=job.usage,
            timeline=dict(job.timeline),
        )
        self.waiting.append(job)
        self._emit(job, token, first, now)

    def remove(self, job: Job) -> None:
        """Forget a job wherever it is."""
        if job in self.running:
            self.running.remove(job)
        elif job in self.waiting:
            self.waiting.remove(job)
        else:
            self.retracted = [item for item in self.retracted if item[0] is not job]

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
        while self.waiting and len(self.running) < self.desk.limits.max_batch:
            job = self.waiting.popleft()
            job.enter("decode", now)
            self.running.append(job)
        for job in list(self.running):
            if job in self.running:
                self._grow(job, now)

    def complete(self, job: Job, result: SequenceResult, now: float) -> None:
        """A running sequence has its next token."""
        if result.error is not None or result.token is None:
            self.desk.fail(job, Internal(result.error or "the engine returned no token").info, now)
            return
        job.computed += 1
        output = Output(
            request_id=job.request.request_id,
            position=job.produced,
            token_ids=[result.token],
            logprobs=[result.logprob] if result.logprob is not None else [],
        )
        self._emit(job, result.token, output, now)

    def _emit(self, job: Job, token: int, output: Output, now: float) -> None:
        job.output.append(token)
        finish, stop_token = self._finish(job, token)
        if finish is not None:
            usage = replace(job.usage, output_tokens=job.produced)
            output = replace(output, finish=finish, stop_token=stop_token, usage=usage)
        self.desk.outbox.append((job.origin, output))
        if finish is not None:
            self.desk.remember(job, job.computed)
            self.desk.end(job, None, now)

    def _finish(self, job: Job, token: int) -> tuple[FinishReason | None, int | None]:
        sampling = job.sampling
        if job.produced > sampling.min_tokens:
            if token in self.desk.engine.info.eos_token_ids and not sampling.ignore_eos:
                return FinishReason.STOP, token
            if token in sampling.stop_token_ids:
                return FinishReason.STOP, token
        if job.produced >= job.max_tokens:
            return FinishReason.LENGTH, None
        return None, None

    # ---- pages -------------------------------------------------------------------------------

    def _grow(self, job: Job, now: float) -> None:
        """Make sure that the KV of the job's last token has a place; retract others if needed."""
        desk = self.desk
        while len(job.pages) < desk.pool.pages_for(job.computed + 1):
            left = job.max_tokens - job.produced
            page = desk.take_pages(1, after=job.pages[-1], room=desk.pool.pages_for(left))
            if page is not None:
                job.pages += page
                continue
            victim = max(self.waiting or self.running, key=_age)
            self._retract(victim, now)
            if victim is job:
                return

    def _retract(self, job: Job, now: float) -> None:
        desk = self.desk
        held = desk.pool.pages_for(job.computed)
        host = desk.attempt("copy_out", job, now, desk.engine.copy_out, job.pages[:held])
        if host is None:
            return  # it has failed, and its pages are free all the same
        self.remove(job)
        insort(self.retracted, (job, host), key=lambda item: _age(item[0]))
        desk.pool.release(job.pages)
        job.pages = []
        self.retractions += 1

    def _resume(self, now: float) -> None:
        """Bring retracted sequences back, oldest first, while there is room for them to move on."""
        while self.retracted and len(self.running) < self.desk.limits.max_batch:
            job, host = self.retracted[0]
            # A page of slack for everybody that runs: or it would be retracted again at once.
            needed = self.desk.pool.pages_for(job.computed + 1)
            slack = len(self.running)
            if not self.desk.has_pages(needed + slack):
                return
            pages = self.desk.take_pages(needed, room=self.desk.pool.pages_for(job.max_tokens - job.produced))
            if pages is None:
                return
            del self.retracted[0]
            job.pages = pages
            self.running.append(job)
            kv = pages[: self.desk.pool.pages_for(job.computed)]
            self.desk.attempt("copy_in", job, now, self.desk.engine.copy_in, host, kv)


def _age(job: Job) -> int:
    """Orders requests by their arrival here."""
    return job.seq_id


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
