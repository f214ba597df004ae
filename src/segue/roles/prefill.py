"""The prefill role: bootstrap queue → waiting → running → in flight.

A request waits in the bootstrap queue until decode has said where its KV goes; then it waits for
pages, is computed chunk by chunk, each chunk leaving while the next one is computed, and stays in
flight until decode has confirmed. Its pages are its own until the hand-off reports `Release`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from msgspec.structs import replace

from segue.conn.handles import Change, KVSender
from segue.core.errors import ErrorCode, ErrorInfo, Internal, InvalidRequest
from segue.core.types import KVPoll, Span, TransferId
from segue.engine.api import SequenceResult, SequenceStep
from segue.handoff import events
from segue.handoff.messages import Metadata
from segue.roles.base import Desk
from segue.roles.handoffs import Handoffs, HandoffTable
from segue.roles.job import Job
from segue.roles.kept import KeptPrompts
from segue.roles.prompts import Prompts

#: After these, what was computed is not to be trusted: it is computed again.
_DOUBTS = frozenset({ErrorCode.CHECKSUM_MISMATCH, ErrorCode.METADATA_MISMATCH, ErrorCode.INTERNAL})


class PrefillRole(Desk):
    """See the module's text. `handoffs` makes the senders."""

    def __init__(self, *args: Any, handoffs: Handoffs, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.handoffs = handoffs
        self.table: HandoffTable[KVSender] = HandoffTable()
        self.prompts = Prompts(self, self._send_cached)
        self.kept = KeptPrompts()
        self._steps: list[SequenceStep] = []
        #: the steps of the running forward whose chunks have not been sent yet
        self._unsent: dict[int, SequenceStep] = {}

    # ---- the door ----------------------------------------------------------------------------

    def _admit(self, job: Job, now: float) -> None:
        if job.ticket.prefill.incarnation != self.me or job.ticket.prefill.dp_rank != self.dp_rank:
            raise InvalidRequest("the ticket names another prefill replica")
        self.table.check_free(job)
        sender = self.handoffs.sender(job.transfer)
        self.table.add(job, sender)
        job.enter("bootstrap", now)
        sender.init(len(job.prompt), job.deadline - now)

    def _drop(self, job: Job, error: ErrorInfo | None, now: float) -> None:
        self.prompts.remove(job)
        if error is not None and error.retryable and error.code not in _DOUBTS:
            self._keep(job, now)
        entry = self.table.get(job.transfer)
        if entry is None or entry.job is not job:
            self.pool.release(job.pages)
            return
        # The pages stay until `Release`: the transport may still be reading them.
        if error is not None:
            entry.handle.abort(error)

    # ---- a new attempt after a failed one ----------------------------------------------------

    def _keep(self, job: Job, now: float) -> None:
        """What `job` has computed stays for the attempt that may follow: its whole pages in the prefix
        tree, the rest aside. Pressure evicts the pages, as any others there."""
        self.remember(job, job.computed)
        if job.metadata is None or job.sampling.prompt_logprobs is not None:
            return
        whole, rest = divmod(len(job.prompt), self.pool.page_tokens)
        tail = None
        if rest:
            pages = job.pages[whole : whole + 1]
            tail = self.attempt("copy_out", job, now, self.engine.copy_out, pages)
            if tail is None:
                return
        self.kept.put(job, job.metadata, tail)

    def _resume(self, job: Job, now: float) -> bool:
        """Answer `job` from what an earlier attempt computed, without a forward. False if that is gone."""
        kept = self.kept.take(job)
        if kept is None:
            return False
        size, tokens = self.pool.page_tokens, len(job.prompt)
        match = self.tree.match(job.prompt[: tokens // size * size])
        tail: list[int] | None = None
        if match.tokens == tokens // size * size:
            tail = self.take_pages(1, after=match.pages[-1] if match.pages else None) if kept.tail else []
        if tail is None:
            self.pool.release(match.pages)
            return False
        try:
            if kept.tail is not None:
                self.engine.copy_in(kept.tail, tail)
        except Exception as exc:  # the boundary: what was kept is no help then, and nothing else is lost
            self.bugs.append((f"copy_in of what was kept for room {job.ticket.room}", exc))
            self.pool.release(match.pages + tail)
            return False
        job.pages = match.pages + tail
        job.cached = job.computed = tokens
        job.enter("in_flight", now)
        job.metadata = replace(
            kept.metadata,
            transfer=job.transfer,
            prefill_cached=tokens,
            computed=0,
            timeline=self._times(job) | {"at_forward_end": now},
        )
        self._sender(job.transfer).send(Span(0, tokens), job.pages, job.metadata)
        return True

    # ---- the hand-off ------------------------------------------------------------------------

    def on_change(self, change: Change, now: float) -> None:
        """What the protocol says of a hand-off."""
        entry = self.table.get(change.transfer)
        if entry is None:
            return
        job = entry.job
        match change:
            case events.Phase(phase=KVPoll.WAITING_FOR_INPUT):
                if not job.ended:
                    job.enter("queue", now)
                    if not self._resume(job, now):
                        self.prompts.add(job)
            case events.Phase(phase=KVPoll.FAILED):
                self.fail(job, change.error or Internal("failed without a reason").info, now)
            case events.Phase(phase=KVPoll.SUCCESS):
                self.end(job, None, now)
            case events.Release():
                self.pool.release(job.pages)
                job.pages = []
                self.table.remove(change.transfer)
                entry.handle.clear()
            case _:
                pass

    def _send_cached(self, job: Job, span: Span) -> None:
        self._sender(job.transfer).send(span, job.pages)

    def _sender(self, transfer: TransferId) -> KVSender:
        entry = self.table.get(transfer)
        if entry is None:
            raise Internal(f"no hand-off {transfer}")
        return entry.handle

    # ---- the engine --------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        """Timers."""
        self.expire(now)
        self.kept.expire(now)

    def plan(self, now: float) -> list[SequenceStep]:
        """The next forward: chunks of prompts whose destination is known."""
        self._steps = self.prompts.plan(self.chunk_tokens, now)
        self._unsent = {step.seq_id: step for step in self._steps}
        return self._steps

    def stored(self, seq_ids: Collection[int]) -> None:
        """Send the chunks of these sequences while the forward ends and the first token is drawn."""
        for seq_id in seq_ids:
            step, job = self._unsent.pop(seq_id, None), self.by_seq.get(seq_id)
            if step is not None and job is not None:
                self._sender(job.transfer).send(step.span, job.pages)

    def complete(self, results: Sequence[SequenceResult], now: float) -> None:
        """Send what is left of the chunks that the forward computed, and the metadata with the last ones."""
        by_seq = {r.seq_id: r for r in results}
        for step in self._steps:
            job = self.by_seq.get(step.seq_id)
            if job is None:
                continue
            result = by_seq.get(step.seq_id)
            if result is not None and result.error is not None:
                self.fail(job, Internal(result.error).info, now)
                continue
            self.prompts.complete(job, step, result)
            self.stored((step.seq_id,))
            if step.sample:
                if result is None or result.token is None:
                    self.fail(job, Internal("the engine returned no first token").info, now)
                    continue
                job.metadata = self._metadata(job, result, result.token, now)
                self._sender(job.transfer).finish(job.metadata)
                self.remember(job, len(job.prompt))
        self._steps = []

    def _metadata(self, job: Job, result: SequenceResult, token: int, now: float) -> Metadata:
        job.enter("in_flight", now)
        return Metadata(
            transfer=job.transfer,
            prompt_tokens=len(job.prompt),
            first_token=token,
            prompt_hash=job.prompt_hash,
            first_logprob=result.logprob,
            prompt_logprobs=job.prompt_logprobs or None,
            prefill_cached=job.cached,
            computed=len(job.prompt) - job.cached,
            timeline=self._times(job) | {"at_forward_end": now},
        )

    def _times(self, job: Job) -> dict[str, float]:
        return {name: job.timeline.get(name, 0.0) for name in ("queue", "bootstrap", "prefill")}

    def check_integrity(self) -> None:
        """See `Desk.check_integrity`."""
        super().check_integrity()
        self.kept.check_integrity()

    # ---- what others see ---------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Nothing is queued, running or in flight."""
        return not self.jobs and not len(self.table)

    def _running(self) -> int:
        return len(self.prompts.running)

    def _tokens(self) -> int:
        return sum(len(j.prompt) - j.computed for j in self.jobs.values())

    def _counts(self) -> dict[str, int]:
        return {**super()._counts(), "handoffs": len(self.table), "prompts": len(self.prompts)}
