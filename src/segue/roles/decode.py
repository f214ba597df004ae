"""The decode role: pre-allocation queue → transfer queue → waiting → running (↔ retracted).

A request enters the pre-allocation queue at once, whatever is known of its prefill side; what is known
later only changes the receiver's phase. It leaves in order of arrival, when its receiver may
publish and there are pages. Published pages belong to the peer until the hand-off ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

from segue.conn.handles import Change, KVReceiver
from segue.core.errors import ErrorInfo, Internal, InvalidRequest, MetadataMismatch
from segue.core.types import KVPoll
from segue.engine.api import SequenceResult, SequenceStep
from segue.handoff import events
from segue.handoff.messages import Metadata
from segue.roles.base import Desk
from segue.roles.generation import Generation, by_sequence, first_usage
from segue.roles.handoffs import Entry, Handoffs, HandoffTable
from segue.roles.job import Job


class DecodeRole(Desk):
    """See the module's text. `handoffs` makes the receivers."""

    def __init__(self, *args: Any, handoffs: Handoffs, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.handoffs = handoffs
        self.table: HandoffTable[KVReceiver] = HandoffTable()
        self.preallocation: deque[Job] = deque()
        self.generation = Generation(self)

    # ---- the door ----------------------------------------------------------------------------

    def _admit(self, job: Job, now: float) -> None:
        if job.ticket.decode.incarnation != self.me or job.ticket.decode.dp_rank != self.dp_rank:
            raise InvalidRequest("the ticket names another decode replica")
        self.table.check_free(job)
        receiver = self.handoffs.receiver(job.transfer)
        self.table.add(job, receiver)
        job.enter("reserve", now)
        receiver.init(len(job.prompt), job.deadline - now)
        self.preallocation.append(job)

    def _drop(self, job: Job, error: ErrorInfo | None, now: float) -> None:
        if job in self.preallocation:
            self.preallocation.remove(job)
        self.generation.remove(job)
        entry = self.table.get(job.transfer)
        if entry is None or entry.job is not job:
            self.pool.release(job.pages)
            job.pages = []
        elif error is not None:
            # The peer may be writing into these pages: they come back with `Release`.
            entry.handle.abort(error)

    # ---- the hand-off ------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        """Timers first, then give pages to the requests that wait for them, in order of arrival."""
        self.expire(now)
        for job in list(self.preallocation):
            entry = self.table.get(job.transfer)
            if entry is None or entry.handle.poll() is not KVPoll.WAITING_FOR_INPUT:
                continue  # its prefill side is not settled yet; that must not hold up the others
            if not self._reserve(job):
                return  # full: nobody may overtake, or a large request would starve
            self.preallocation.remove(job)
            job.enter("transfer", now)
            skipped = job.cached // self.pool.page_tokens
            entry.handle.send_metadata(job.pages[skipped:], job.cached)

    def _reserve(self, job: Job) -> bool:
        """Pages for the whole prompt and the first token, cached ones included.

        Each running sequence keeps a claim on one more page, so that admission does not force
        a retraction at the next step.
        """
        match = self.tree.match(job.prompt)
        needed = self.pool.pages_for(len(job.prompt) + 1) - len(match.pages)
        claims = len(self.generation.running) + len(self.generation.waiting)
        fresh = None
        if not self.generation.retracted and self.has_pages(needed + claims):
            fresh = self.take_pages(
                needed,
                after=match.pages[-1] if match.pages else None,
                room=self.pool.pages_for(job.max_tokens - job.produced),
            )
        if fresh is None:
            self.pool.release(match.pages)
            return False
        job.pages = match.pages + fresh
        job.cached = job.computed = match.tokens
        return True

    def on_change(self, change: Change, now: float) -> None:
        """What the protocol says of a hand-off."""
        entry = self.table.get(change.transfer)
        if entry is None:
            return
        job = entry.job
        match change:
            case events.Phase(phase=KVPoll.FAILED):
                self.fail(job, change.error or Internal("failed without a reason").info, now)
            case events.Phase(phase=KVPoll.SUCCESS):
                self._landed(entry, change.metadata, now)
            case events.Quarantined():
                if not entry.quarantined:  # after a bug it is said again
                    self.pool.quarantine(self._published(job))
                    entry.quarantined = True
            case events.Release():
                self._released(entry)
            case _:
                pass

    def _landed(self, entry: Entry[KVReceiver], metadata: Metadata | None, now: float) -> None:
        """Everything is here. The pages are the job's own; it may run from the next step on."""
        job = entry.job
        if job.ended:
            return  # its frontend left while the last bytes landed; `Release` frees the pages
        if metadata is None:
            self.fail(job, Internal("the hand-off ended without metadata").info, now)
            return
        if not 0 <= metadata.first_token < self.engine.info.vocab_size:
            text = f"prefill's first token {metadata.first_token} is outside the vocabulary"
            self.fail(job, MetadataMismatch(text).info, now)
            return
        if metadata.prompt_hash != job.prompt_hash:
            text = "prefill computed another prompt under this room; each request needs a room of its own"
            self.fail(job, MetadataMismatch(text, retryable=False).info, now)
            return
        job.computed = len(job.prompt)
        job.prompt_logprobs = metadata.prompt_logprobs or []
        job.usage = first_usage(len(job.request.prompt), job.cached, metadata.prefill_cached)
        job.enter("ready", now)
        job.timeline |= metadata.timeline | {
            "wire": entry.handle.wire_s,
            "commit": now - entry.handle.changed_at,
            "at_ready": now,
        }
        self.engine.append(job.seq_id, metadata.first_token)
        self.remember(job, len(job.prompt))
        self.generation.start(job, metadata.first_token, metadata.first_logprob, now)

    def _published(self, job: Job) -> list[int]:
        return job.pages[job.cached // self.pool.page_tokens :]

    def _released(self, entry: Entry[KVReceiver]) -> None:
        job = entry.job
        if job.ended:  # else it is committed: the pages go on with the job
            self._give_back(entry)
        self.table.remove(job.transfer)
        entry.handle.clear()

    def _give_back(self, entry: Entry[KVReceiver]) -> None:
        job = entry.job
        if entry.quarantined:
            self.pool.unquarantine(self._published(job))
            self.pool.release(job.pages[: job.cached // self.pool.page_tokens])
        else:
            self.pool.release(job.pages)
        job.pages = []

    # ---- the engine --------------------------------------------------------------------------

    def plan(self, now: float) -> list[SequenceStep]:
        """The next forward: one token of every running sequence."""
        return self.generation.plan(now)

    def stored(self, seq_ids: Collection[int]) -> None:
        """Nobody else waits for the KV of a token."""

    def complete(self, results: Sequence[SequenceResult], now: float) -> None:
        """Hand the new tokens out."""
        for seq_id, result in by_sequence(results).items():
            if (job := self.by_seq.get(seq_id)) is not None:
                self.generation.complete(job, result, now)

    # ---- what others see ---------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Nothing is queued, transferring, running or quarantined."""
        return not self.jobs and not len(self.table)

    def _running(self) -> int:
        return len(self.generation.running)

    def _counts(self) -> dict[str, int]:
        return {
            **super()._counts(),
            "handoffs": len(self.table),
            "preallocation": len(self.preallocation),
            "generation": len(self.generation),
        }
