"""The prefill role: bootstrap queue → waiting → running → in flight.

A request waits in the bootstrap queue until decode has said where its KV goes; then it waits for
pages, is computed chunk by chunk, each chunk leaving while the next one is computed, and stays in
flight until decode has confirmed. Its pages are its own until the hand-off reports `Release`.

A ticket that names this leader for both halves asks for no hand-off: the prompt is computed and retained, for
the attempt with a decode that follows (a foreign router asks prefill first).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from functools import partial

from msgspec.structs import replace

from segue.engine.engine_api import Engine, OnStored, SequenceResult, SequenceStep
from segue.engine.pages import PagePool
from segue.kv import (
    FAIL_ON_CONFLICT,
    OPEN_RANK,
    Change,
    ErrorCode,
    ErrorInfo,
    Handles,
    Internal,
    InvalidRequest,
    KVPoll,
    KVSender,
    LeaderId,
    Phase,
    ReadyEvent,
    Release,
    RoomKey,
    Span,
    dp_rank_conflict,
)
from segue.server.schedulers.admission import SchedulerConfig
from segue.server.schedulers.prefill_queue import PrefillQueue
from segue.server.schedulers.prefill_result import PrefillResult
from segue.server.schedulers.request_state import (
    RequestState,
    RoleTransfer,
    check_free,
    first_usage,
)
from segue.server.schedulers.retained_prompts import RetainedPrompts
from segue.server.schedulers.scheduler import Scheduler

#: After these, what was computed is not to be trusted: it is computed again.
_DOUBTS = frozenset({ErrorCode.CHECKSUM_MISMATCH, ErrorCode.METADATA_MISMATCH, ErrorCode.INTERNAL})


class PrefillScheduler(Scheduler):
    """See the module's text. `handoffs` makes the senders."""

    def __init__(self, engine: Engine, pool: PagePool, config: SchedulerConfig, handoffs: Handles) -> None:
        super().__init__(engine, pool, config)
        self.handoffs = handoffs
        self.table: dict[RoomKey, RoleTransfer[KVSender]] = {}
        self.queue = PrefillQueue(self.cache, config.chunk_tokens)
        self.retained = RetainedPrompts()
        self._steps: list[SequenceStep] = []
        #: of each sequence of the newest forward, when so many layers of its chunk are complete
        self._moments: dict[int, list[tuple[int, ReadyEvent]]] = {}

    # ---- admission ----------------------------------------------------------------------------

    def _admit(self, state: RequestState, now: float) -> None:
        me, named = self.config.me, state.ticket.prefill
        if named not in (me, LeaderId(me.incarnation, OPEN_RANK)):
            raise InvalidRequest("the ticket names another prefill replica")
        state.ticket = replace(state.ticket, prefill=me)
        if state.ticket.decode == me:
            if state.sampling.max_tokens != 1:
                raise InvalidRequest("prefill alone gives one token: set max_tokens to 1")
            self.queue.add(state)
            return
        check_free(self.table, state.sent_as, state)
        looked_for = self._looked_for(state, named)
        sender = self.handoffs.expect(
            state.sent_as,
            len(state.prompt),
            state.deadline - now,
            claim=state.claim,
            decode=state.ticket.decode,
            attempt=state.ticket.attempt,
            announce=named.is_open and looked_for != me.dp_rank,
        )
        self.table[state.sent_as] = RoleTransfer(state, sender)
        state.enter("bootstrap", now)
        if looked_for not in (None, me.dp_rank) and self.config.dp.on_conflict == FAIL_ON_CONFLICT:
            raise dp_rank_conflict(state.ticket.room, me.dp_rank, looked_for)

    def _looked_for(self, state: RequestState, named: LeaderId) -> int | None:
        """On which of our ranks decode looks for this request without the registry, or our own rule puts it.
        None if neither names one. Raises DpRankOutOfRange for a hint that names no rank."""
        dp, room, hints = self.config.dp, state.ticket.room, state.request.ranks
        if not named.is_open:
            return dp.follows(room)
        if hints.force_query_prefill_dp_rank:
            dp = replace(dp, force_query=True)
        return dp.inferred(room, hints.disagg_prefill_dp_rank)

    def _drop(self, state: RequestState, error: ErrorInfo | None, now: float) -> None:
        self.queue.remove(state)
        if error is not None and error.retryable and error.code not in _DOUBTS:
            self._keep(state, now)
        entry = self.table.get(state.sent_as)
        if entry is None or entry.state is not state:
            self.cache.release(state)
            return
        # The pages stay until `Release`: the transport may still be reading them.
        if error is not None:
            entry.handle.abort(error)

    # ---- a new attempt after a failed one ----------------------------------------------------

    def _keep(self, state: RequestState, now: float) -> None:
        """What `state` has computed stays for the attempt that may follow: its whole pages in the prefix
        tree, the rest aside. Pressure evicts the pages, as any others there. Of a model with a state nothing
        stays."""
        if not self.cache.reusable:
            return
        self.cache.remember(state, state.computed)
        if state.result is None or state.sampling.prompt_logprobs is not None:
            return
        whole, rest = divmod(len(state.prompt), self.cache.pool.page_tokens)
        tail = None
        if rest:
            pages = state.pages[whole : whole + 1]
            tail = self.attempt("copy_out", state, now, self.engine.copy_out, pages)
            if tail is None:
                return
        self.retained.put(state, state.result, tail)

    def _resume(self, state: RequestState, now: float) -> bool:
        """Answer `state` from what an earlier attempt computed, without a forward. False if that is gone."""
        retained = self.retained.take(state)
        if retained is None:
            return False
        size, tokens = self.cache.pool.page_tokens, len(state.prompt)
        match = self.cache.tree.match(state.prompt[: tokens // size * size], state.request.cache_salt)
        tail: list[int] | None = None
        if match.tokens == tokens // size * size:
            tail = self.cache.take(1, after=match.pages[-1] if match.pages else None) if retained.tail else []
        if tail is None:
            self.cache.pool.release(match.pages)
            return False
        try:
            if retained.tail is not None:
                self.engine.copy_in(retained.tail, tail)
        except Exception as exc:  # the boundary: what was kept is no help then, and nothing else is lost
            self.bugs.append((f"copy_in of what was kept for room {state.ticket.room}", exc))
            self.cache.pool.release(match.pages + tail)
            return False
        state.pages = match.pages + tail
        state.cached = state.computed = tokens
        state.enter("in_flight", now)
        state.result = replace(
            retained.result,
            prefill_cached=tokens,
            computed=0,
            timeline=self._times(state) | {"at_forward_end": now},
        )
        self._sender(state).send(Span(0, tokens), state.pages, state.result.encode())
        return True

    # ---- the hand-off ------------------------------------------------------------------------

    def on_change(self, change: Change, now: float) -> None:
        """What the protocol says of a hand-off."""
        entry = self.table.get(change.key)
        if entry is None:
            return
        state = entry.state
        match change:
            case Phase(phase=KVPoll.WAITING_FOR_INPUT):
                if not state.ended:
                    state.enter("queue", now)
                    if not self._resume(state, now):
                        self.queue.add(state)
            case Phase(phase=KVPoll.FAILED):
                self.fail(state, change.error or Internal("failed without a reason").info, now)
            case Phase(phase=KVPoll.SUCCESS):
                state.handed_bytes = entry.handle.nbytes
                self.end(state, None, now)
            case Release():
                self.cache.release(state)
                del self.table[change.key]
                entry.handle.clear()
            case _:
                pass

    def key_of(self, state: RequestState) -> RoomKey:
        """See `Scheduler.key_of`."""
        return state.sent_as

    def _sender(self, state: RequestState) -> KVSender:
        entry = self.table.get(state.sent_as)
        if entry is None:
            raise Internal(f"no hand-off of room {state.ticket.room}")
        return entry.handle

    # ---- the forward -------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """See `Scheduler.next_deadline`; what is retained ends in time, too."""
        ends = [end for end in (super().next_deadline(), self.retained.next_end()) if end is not None]
        return min(ends, default=None)

    def advance(self, now: float) -> None:
        """Timers."""
        super().advance(now)
        self.retained.expire(now)

    def plan(self, now: float) -> list[SequenceStep]:
        """The next forward: chunks of prompts whose destination is known. What was cached of a prompt leaves
        as it starts; the chunks are sent, too, and leave when the forward says that they are stored."""
        self._moments, self._steps = {}, []
        for step in self.queue.plan(self.config.chunk_tokens, now):
            state = self.admission.by_seq[step.seq_id]
            try:
                self._steps.append(self._sent(step, state))
            except Exception as exc:  # the boundary: it ends, and no other one of the step
                self.engine_broke("sending", state, exc, now)
        return self._steps

    def _sent(self, step: SequenceStep, state: RequestState) -> SequenceStep:
        if self._alone(state):
            return step
        sender, total, every = self._sender(state), self.engine.spec.layer_count, self.config.send_layers
        if 0 < step.start == state.cached:
            sender.send(Span(0, state.cached), state.pages)
        moments = [
            (layers, self.handoffs.ready()) for layers in (range(every, total, every) if every else ())
        ]
        for layers, ready in moments:
            sender.send(step.span, state.pages, slot=state.slot, layers=layers, ready=ready)
        moments.append((total, self.handoffs.ready()))
        sender.send(step.span, state.pages, slot=state.slot, ready=moments[-1][1])
        self._moments[step.seq_id] = moments
        return dataclasses.replace(step, ready=tuple((upto, ready.number) for upto, ready in moments))

    def on_stored(self) -> OnStored:
        """Let the chunks of these sequences, or so many layers of them, leave while the forward goes on."""
        return partial(_signal, self._moments)

    def _complete(self, results: Mapping[int, SequenceResult], now: float) -> None:
        """Send what is left of the chunks that the forward computed, and the metadata with the last ones."""
        for step in self._steps:
            state = self.admission.by_seq.get(step.seq_id)
            if state is None:
                continue
            result = results.get(step.seq_id)
            if result is not None and result.error is not None:
                self.fail(state, result.failure("the prefill failed"), now)
                continue
            self.queue.complete(state, step, result)
            _signal(self._moments, (step.seq_id,))  # a forward need not have said so
            if step.sample:
                if result is None or result.token is None:
                    self.fail(state, Internal("the engine returned no first token").info, now)
                    continue
                state.result = self._result(state, result, result.token, now)
                if self._alone(state):
                    self._retain(state, result, result.token, now)
                    continue
                self._sender(state).finish(state.result.encode())
                self.cache.remember(state, len(state.prompt))
        self._steps = []

    def _alone(self, state: RequestState) -> bool:
        """No decode takes the KV of `state` now."""
        return state.ticket.decode == self.config.me

    def _retain(self, state: RequestState, result: SequenceResult, token: int, now: float) -> None:
        """Keep what was computed of `state` until its deadline, and answer with the first token."""
        self._keep(state, now)
        if state.ended:
            return  # the engine broke
        state.usage = first_usage(len(state.request.prompt), 0, state.cached)
        self._emit(state, token, result.logprob, now)

    def _result(self, state: RequestState, result: SequenceResult, token: int, now: float) -> PrefillResult:
        state.enter("in_flight", now)
        return PrefillResult(
            first_token=token,
            first_logprob=result.logprob,
            prompt_logprobs=state.prompt_logprobs or None,
            prefill_cached=state.cached,
            computed=len(state.prompt) - state.cached,
            timeline=self._times(state) | {"at_forward_end": now},
        )

    def _times(self, state: RequestState) -> dict[str, float]:
        return {name: state.timeline.get(name, 0.0) for name in ("queue", "bootstrap", "prefill")}

    def check_integrity(self) -> None:
        """See `Scheduler.check_integrity`."""
        super().check_integrity()
        self.retained.check_integrity()

    # ---- what others see ---------------------------------------------------------------------

    def _running(self) -> Collection[RequestState]:
        return self.queue.running

    def _tokens(self, state: RequestState) -> int:
        """Those that are still to be computed."""
        return len(state.prompt) - state.computed

    def sizes(self) -> dict[str, int]:
        """See `Scheduler.sizes`; what is retained belongs to no request."""
        return {**super().sizes(), "handoffs": len(self.table), "queue": len(self.queue)}


def _signal(
    moments: Mapping[int, list[tuple[int, ReadyEvent]]], seq_ids: Collection[int], layers: int | None = None
) -> None:
    """So many layers of these sequences' chunks are complete on this process's ranks (None: all)."""
    for seq_id in seq_ids:
        for upto, ready in moments.get(seq_id, ()):
            if layers is None or upto <= layers:
                ready.signal()
