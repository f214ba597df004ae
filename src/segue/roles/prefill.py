"""The prefill role: bootstrap queue → waiting → running → in flight.

A request waits in the bootstrap queue until decode has said where its KV goes; then it waits for
pages, is computed chunk by chunk, each chunk leaving while the next one is computed, and stays in
flight until decode has confirmed. Its pages are its own until the hand-off reports `Release`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from segue.conn.handles import Change, KVSender
from segue.core.errors import ErrorInfo, Internal, InvalidRequest
from segue.core.types import KVPoll, Span, TransferId
from segue.engine.api import SequenceResult, SequenceStep
from segue.handoff import api
from segue.handoff.messages import Metadata
from segue.roles.base import Desk
from segue.roles.handoffs import Handoffs, HandoffTable
from segue.roles.job import Job
from segue.roles.prompts import Prompts


class PrefillRole(Desk):
    """See the module's text. `handoffs` makes the senders."""

    def __init__(self, *args: Any, handoffs: Handoffs, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.handoffs = handoffs
        self.table: HandoffTable[KVSender] = HandoffTable()
        self.prompts = Prompts(self, self._send_cached)
        self._steps: list[SequenceStep] = []

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
        entry = self.table.get(job.transfer)
        if entry is None or entry.job is not job:
            self.pool.release(job.pages)
            return
        # The pages stay until `Release`: the transport may still be reading them.
        if error is not None:
            entry.handle.abort(error)

    # ---- the hand-off ------------------------------------------------------------------------

    def on_change(self, change: Change, now: float) -> None:
        """What the protocol says of a hand-off."""
        entry = self.table.get(change.transfer)
        if entry is None:
            return
        job = entry.job
        match change:
            case api.Phase(phase=KVPoll.WAITING_FOR_INPUT):
                if not job.ended:
                    job.enter("queue", now)
                    self.prompts.add(job)
            case api.Phase(phase=KVPoll.FAILED):
                self.fail(job, change.error or Internal("failed without a reason").info, now)
            case api.Phase(phase=KVPoll.SUCCESS):
                self.end(job, None, now)
            case api.Release():
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

    def plan(self, now: float) -> list[SequenceStep]:
        """The next forward: chunks of prompts whose destination is known."""
        self._steps = self.prompts.plan(self.chunk_tokens, now)
        return self._steps

    def complete(self, results: Sequence[SequenceResult], now: float) -> None:
        """Send the chunks that the forward computed, the last ones with their metadata."""
        by_seq = {r.seq_id: r for r in results}
        for step in self._steps:
            job = self.by_seq.get(step.seq_id)
            if job is None:
                continue
            result = by_seq.get(step.seq_id)
            if result is not None and result.error is not None:
                self.fail(job, Internal(result.error).info, now)
                continue
            span = self.prompts.complete(job, step, result)
            metadata = None
            if step.sample:
                if result is None or result.token is None:
                    self.fail(job, Internal("the engine returned no first token").info, now)
                    continue
                metadata = self._metadata(job, result, result.token, now)
            self._sender(job.transfer).send(span, job.pages, metadata)
        self._steps = []

    def _metadata(self, job: Job, result: SequenceResult, token: int, now: float) -> Metadata:
        job.enter("in_flight", now)
        times = {name: job.timeline.get(name, 0.0) for name in ("queue", "bootstrap", "prefill")}
        return Metadata(
            transfer=job.transfer,
            prompt_tokens=len(job.prompt),
            first_token=token,
            prompt_hash=job.prompt_hash,
            first_logprob=result.logprob,
            prompt_logprobs=job.prompt_logprobs or None,
            prefill_cached=job.cached,
            computed=len(job.prompt) - job.cached,
            timeline=times | {"at_forward_end": now},
        )

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
