"""The decode role: pre-allocation queue → transfer queue → waiting → running (↔ retracted).

A request enters the pre-allocation queue at once, whatever is known of its prefill side; what is known
later only changes the receiver's phase. It leaves in order of arrival, when its receiver may
publish and there are pages. Published pages belong to the peer until the hand-off ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping

from segue.conn.handles import Change, KVReceiver
from segue.core.errors import ErrorInfo, Internal, InvalidRequest, MetadataMismatch
from segue.core.types import KVPoll, TransferId
from segue.engine.base import Engine, SequenceResult, SequenceStep
from segue.engine.pages import PagePool
from segue.handoff import events
from segue.handoff.messages import Metadata
from segue.roles.admission import SchedulerConfig
from segue.roles.handoffs import Handoffs, RoleTransfer, check_free
from segue.roles.request_state import RequestState, first_usage
from segue.roles.running_batch import RunningBatch
from segue.roles.scheduler import Scheduler


class DecodeScheduler(Scheduler):
    """See the module's text. `handoffs` makes the receivers."""

    def __init__(self, engine: Engine, pool: PagePool, config: SchedulerConfig, handoffs: Handoffs) -> None:
        super().__init__(engine, pool, config)
        self.handoffs = handoffs
        self.table: dict[TransferId, RoleTransfer[KVReceiver]] = {}
        self.preallocation: deque[RequestState] = deque()
        self.batch = RunningBatch(self.cache, engine, config.limits.max_batch)

    # ---- admission ---------------------------------------------------------------------------

    def _admit(self, state: RequestState, now: float) -> None:
        if state.ticket.decode != self.config.me:
            raise InvalidRequest("the ticket names another decode replica")
        check_free(self.table, state)
        receiver = self.handoffs.receiver(state.transfer)
        self.table[state.transfer] = RoleTransfer(state, receiver)
        state.enter("reserve", now)
        hints = state.request.ranks
        receiver.init(
            len(state.prompt),
            state.deadline - now,
            prefill_dp_rank=hints.disagg_prefill_dp_rank,
            force_query=hints.force_query_prefill_dp_rank,
        )
        self.preallocation.append(state)

    def _drop(self, state: RequestState, error: ErrorInfo | None, now: float) -> None:
        if state in self.preallocation:
            self.preallocation.remove(state)
        self.batch.remove(state)
        entry = self.table.get(state.transfer)
        if entry is None or entry.state is not state:
            self.cache.release(state)
        elif error is not None:
            # The peer may be writing into these pages: they come back with `Release`.
            entry.handle.abort(error)

    # ---- the hand-off ------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        """Timers first, then give pages to the requests that wait for them, in order of arrival."""
        super().advance(now)
        for state in list(self.preallocation):
            entry = self.table.get(state.transfer)
            if entry is None or entry.handle.poll() is not KVPoll.WAITING_FOR_INPUT:
                continue  # its prefill side is not settled yet; that must not hold up the others
            if not self._reserve(state):
                return  # full: nobody may overtake, or a large request would starve
            self.preallocation.remove(state)
            state.enter("transfer", now)
            skipped = state.cached // self.cache.pool.page_tokens
            entry.handle.send_metadata(state.pages[skipped:], state.cached)

    def _reserve(self, state: RequestState) -> bool:
        """Pages for the whole prompt and the first token, cached ones included.

        Each running sequence keeps a claim on one more page, so that admission does not force
        a retraction at the next step.
        """
        pool, batch = self.cache.pool, self.batch
        match = self.cache.tree.match(state.prompt)
        needed = pool.pages_for(len(state.prompt) + 1) - len(match.pages)
        claims = len(batch.running) + len(batch.waiting)
        fresh = None
        if not batch.retracted and self.cache.has(needed + claims):
            fresh = self.cache.take(
                needed,
                after=match.pages[-1] if match.pages else None,
                room=pool.pages_for(state.max_tokens - state.produced),
            )
        if fresh is None:
            pool.release(match.pages)
            return False
        state.pages = match.pages + fresh
        state.cached = state.computed = match.tokens
        return True

    def on_change(self, change: Change, now: float) -> None:
        """What the protocol says of a hand-off."""
        entry = self.table.get(change.transfer)
        if entry is None:
            return
        state = entry.state
        match change:
            case events.Phase(phase=KVPoll.FAILED):
                self.fail(state, change.error or Internal("failed without a reason").info, now)
            case events.Phase(phase=KVPoll.SUCCESS):
                self._landed(entry, change.metadata, now)
            case events.Quarantined():
                if not entry.quarantined:  # after a bug it is said again
                    self.cache.pool.quarantine(self._published(state))
                    entry.quarantined = True
            case events.Release():
                self._released(entry)
            case _:
                pass

    def _landed(self, entry: RoleTransfer[KVReceiver], metadata: Metadata | None, now: float) -> None:
        """Everything is here. The pages are the request's own; it may run from the next step on."""
        state = entry.state
        if state.ended:
            return  # its frontend left while the last bytes landed; `Release` frees the pages
        if metadata is None:
            self.fail(state, Internal("the hand-off ended without metadata").info, now)
            return
        if not 0 <= metadata.first_token < self.engine.info.vocab_size:
            text = f"prefill's first token {metadata.first_token} is outside the vocabulary"
            self.fail(state, MetadataMismatch(text).info, now)
            return
        if metadata.prompt_hash != state.prompt_hash:
            text = "prefill computed another prompt under this room; each request needs a room of its own"
            self.fail(state, MetadataMismatch(text, retryable=False).info, now)
            return
        state.computed = len(state.prompt)
        state.prompt_logprobs = metadata.prompt_logprobs or []
        state.usage = first_usage(len(state.request.prompt), state.cached, metadata.prefill_cached)
        state.enter("ready", now)
        state.timeline |= metadata.timeline | {
            "wire": entry.handle.wire_s,
            "commit": now - entry.handle.changed_at,
            "at_ready": now,
        }
        self.engine.append(state.seq_id, metadata.first_token)
        self.cache.remember(state, len(state.prompt))
        self.batch.add(state)
        self._emit(state, metadata.first_token, metadata.first_logprob, now)

    def _published(self, state: RequestState) -> list[int]:
        return state.pages[state.cached // self.cache.pool.page_tokens :]

    def _released(self, entry: RoleTransfer[KVReceiver]) -> None:
        state = entry.state
        if state.ended:  # else it is committed: the pages go on with the request
            self._give_back(entry)
        del self.table[state.transfer]
        entry.handle.clear()

    def _give_back(self, entry: RoleTransfer[KVReceiver]) -> None:
        state, pool = entry.state, self.cache.pool
        if entry.quarantined:
            pool.unquarantine(self._published(state))
            state.pages = state.pages[: state.cached // pool.page_tokens]
        self.cache.release(state)

    # ---- the forward -------------------------------------------------------------------------

    def plan(self, now: float) -> list[SequenceStep]:
        """The next forward: one token of every running sequence."""
        steps = self.batch.plan(now)
        for what, state, exc in self.batch.take_failed():
            self.engine_broke(what, state, exc, now)
        return steps

    def stored(self, seq_ids: Collection[int]) -> None:
        """Nobody else waits for the KV of a token."""

    def _complete(self, results: Mapping[int, SequenceResult], now: float) -> None:
        """Hand the new tokens out."""
        for seq_id, result in results.items():
            if (state := self.admission.by_seq.get(seq_id)) is not None:
                self._generated(state, result, now)

    # ---- what others see ---------------------------------------------------------------------

    def _running(self) -> Collection[RequestState]:
        return self.batch.running

    def sizes(self) -> dict[str, int]:
        """See `Scheduler.sizes`."""
        return {
            **super().sizes(),
            "handoffs": len(self.table),
            "preallocation": len(self.preallocation),
            "batch": len(self.batch),
        }
