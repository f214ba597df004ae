"""The prefill role: bootstrap queue → waiting → running → in flight.

A request waits in the bootstrap queue until decode has said where its KV goes; then it waits for
pages, is computed chunk by chunk, each chunk leaving while the next one is computed, and stays in
flight until decode has confirmed. Its pages are its own until the hand-off reports `Release`.

A request in direct mode (`RequestState.direct`) has no decode yet: any one with its claim may bind its room.
It is computed at once, as far as half of the pool goes, and answered with its first token; the room waits for
decode until the request's deadline. `_unbound` has these rooms.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import partial

from msgspec.structs import replace

from segue.engine.engine_api import Engine, OnStored, SequenceResult, SequenceStep
from segue.engine.pages import PagePool
from segue.kv import (
    BootstrapTimeout,
    Change,
    ErrorCode,
    ErrorInfo,
    Handles,
    Incarnation,
    Internal,
    InvalidRequest,
    KVPoll,
    KVSender,
    LeaderId,
    OutOfCapacity,
    Phase,
    ReadyEvent,
    Release,
    RoomKey,
    SegueError,
    Span,
)
from segue.kv.ids import OPEN_RANK
from segue.kv.protocol.room_ranks import FAIL_ON_CONFLICT, dp_rank_conflict
from segue.server.balance.attempts import DOUBTS
from segue.server.messages.control import Replace, Submit
from segue.server.schedulers.admission import SchedulerConfig
from segue.server.schedulers.prefill_queue import PrefillQueue
from segue.server.schedulers.prefill_result import PrefillResult
from segue.server.schedulers.request_state import (
    RequestState,
    RoleTransfer,
    check_free,
    claim_of,
    first_usage,
)
from segue.server.schedulers.scheduler import Scheduler

#: A room that no decode has bound for so long ends if others need what it holds, or if we drain. A decode
#: that is full binds late, so it is not ended without need.
STALE_S = 30.0
#: A prompt waits so long for pages before those whose decode was placed again, and has not come, give theirs.
HELD_S = 1.0


class PrefillScheduler(Scheduler):
    """See the module's text. `handoffs` makes the senders."""

    def __init__(self, engine: Engine, pool: PagePool, config: SchedulerConfig, handoffs: Handles) -> None:
        super().__init__(engine, pool, config)
        self.handoffs = handoffs
        self.table: dict[RoomKey, RoleTransfer[KVSender]] = {}
        self.queue = PrefillQueue(self.cache, config.chunk_tokens)
        #: rooms of direct mode that no decode has bound yet, the oldest first
        self._unbound: dict[RoomKey, RoleTransfer[KVSender]] = {}
        #: when rooms that nobody has bound may be ended for others
        self._evict_at: float | None = None
        #: when placed rooms were last asked to end
        self._evicted_at = 0.0
        #: how many of them have ended because no decode came
        self.abandoned = 0
        self._steps: list[SequenceStep] = []
        #: by sequence of the newest forward: a number of layers of its chunk, and the event of their
        #: completion
        self._moments: dict[int, list[tuple[int, ReadyEvent]]] = {}

    # ---- admission ----------------------------------------------------------------------------

    def _admit(self, state: RequestState, now: float) -> None:
        me, named = self.config.me, state.ticket.prefill
        if named not in (me, LeaderId(me.incarnation, OPEN_RANK)):
            raise InvalidRequest("the ticket names another prefill replica")
        state.ticket = replace(state.ticket, prefill=me)
        check_free(self.table, state.sent_as, state)
        if state.direct:
            state.max_tokens = state.produced + 1
            named = LeaderId(me.incarnation, OPEN_RANK)  # decode was not told the rank
        looked_for = self._looked_for(state, named)
        sender = self.handoffs.expect(
            state.sent_as,
            len(state.prompt),
            state.deadline - now,
            claim=claim_of(state.request),
            decode=None if state.direct else state.ticket.decode,
            attempt=state.ticket.attempt,
            retain_s=None if state.direct else 0.0,
            announce=named.is_open and looked_for != me.dp_rank,
        )
        self.table[state.sent_as] = RoleTransfer(state, sender)
        state.enter("bootstrap", now)
        if state.direct:
            self._add_unbound(self.table[state.sent_as], now)
        if looked_for not in (None, me.dp_rank) and self.config.dp.on_conflict == FAIL_ON_CONFLICT:
            raise dp_rank_conflict(state.ticket.room, me.dp_rank, looked_for)

    def _looked_for(self, state: RequestState, named: LeaderId) -> int | None:
        """On which of our ranks decode looks for this request without the registry, or our own rule puts it.
        None if neither names one. Raises DpRankOutOfRange for a hint that names no rank."""
        dp, room = self.config.dp, state.ticket.room
        return state.request.ranks.looked_for(dp, room) if named.is_open else dp.follows(room)

    def _tell_other_half(self, submit: Submit, error: ErrorInfo) -> None:
        ticket, config = submit.ticket, self.config
        key = RoomKey(ticket.room, ordinal=ticket.ordinal or 0)
        with suppress(SegueError):  # a hint that names no rank: decode refuses it, too
            announce = submit.request.ranks.looked_for(config.dp, ticket.room) != config.me.dp_rank
            self.handoffs.refuse(key, error, config.limits.request_budget_s, announce=announce)

    def _late(self, state: RequestState) -> SegueError:
        if state.sent_as not in self._unbound:
            return super()._late(state)
        return BootstrapTimeout(f"no decode came for room {state.ticket.room} in the time of its request")

    # ---- rooms that no decode has bound ------------------------------------------------------

    def _add_unbound(self, entry: RoleTransfer[KVSender], now: float) -> None:
        if len(self._unbound) >= self.config.limits.max_queue and not self._evict(now):
            raise OutOfCapacity(f"{len(self._unbound)} prompts wait here for a decode instance")
        self._unbound[entry.state.sent_as] = entry

    def _evict(self, now: float) -> bool:
        """End the oldest room that no decode has bound, if it is stale. Its memory is free soon."""
        entry = next(iter(self._unbound.values()), None)
        self._evict_at = None if entry is None else entry.state.entered + STALE_S
        if entry is None or now < entry.state.entered + STALE_S:
            return False
        room, waited_s = entry.state.ticket.room, now - entry.state.entered
        need = "this prefill drains" if self.admission.draining else "others need what it holds"
        text = f"no decode came for room {room} within {waited_s:.1f} s, and {need}"
        del self._unbound[entry.state.sent_as]
        entry.handle.evict(OutOfCapacity(text).info)
        self.abandoned += 1
        self._evict_at = None
        return True

    def _start_unbound(self, now: float) -> None:
        """Compute prompts that no decode has bound, in their order, while they hold at most half of the pool:
        prompts that decode has bound always find the other half."""
        self._evict_at = None
        while self.admission.draining and self._evict(now):
            pass
        pool, slots = self.cache.pool, self.cache.slots
        held = count = 0
        for entry in self._unbound.values():
            state, pages = entry.state, pool.pages_for(len(entry.state.prompt))
            if state.phase == "bootstrap" and not state.ended:
                full = held + pages > pool.total // 2 or (slots is not None and count >= slots.total // 2)
                if count and full:
                    self._evict(now)
                    return
                state.enter("queue", now)
                self.queue.add(state)
            held, count = held + pages, count + 1

    def _drop(self, state: RequestState, error: ErrorInfo | None, now: float) -> None:
        self.queue.remove(state)
        if error is not None and error.retryable and error.code not in DOUBTS:
            self.cache.remember(state, state.computed)
        entry = self.table.get(state.sent_as)
        if entry is None or entry.state is not state:
            self.cache.release(state)
            return
        # The pages stay until `Release`: the transport may still be reading them.
        if error is not None:
            entry.handle.abort(error)

    # ---- decode's half is placed again ---------------------------------------------------------

    def replace(self, origin: Incarnation, message: Replace, now: float) -> None:
        """Decode's half of a request goes to another leader; ours, and its room, go on."""
        state = self.admission.requests.get((origin, message.request_id))
        entry = self.table.get(state.sent_as) if state is not None else None
        if state is None or entry is None:
            super().replace(origin, message, now)
            return
        try:
            self.admission.spend(origin, message.ticket, now)
            if (message.ticket.room, message.ticket.ordinal) != (state.ticket.room, state.ticket.ordinal):
                raise InvalidRequest("the ticket names another room")  # the table has the half by its room
        except SegueError as error:
            self.fail(state, error.info, now)
            return
        entry.handle.place(message.ticket.attempt, message.ticket.decode)
        state.ticket = replace(message.ticket, prefill=self.config.me, budget_s=state.ticket.budget_s)
        state.path.enter(state.phase, now, f"attempt {state.ticket.attempt}: decode {state.ticket.decode}")

    def _evict_placed(self, since: float, now: float) -> None:
        """End the placed rooms that no decode has had for a while, if `since` as long ago others need what
        they hold: the next decode may wait for what the decode of a waiting prompt holds, or none may come,
        because the request has ended at a decode whose `Committed` was lost."""
        held = [e for e in self.table.values() if e.state.phase == "in_flight" and not e.state.direct]
        if not held:
            return
        due = max(since, self._evicted_at) + HELD_S
        if now >= due:
            error = OutOfCapacity("no decode has this prompt, and others need what it holds").info
            for entry in held:
                entry.handle.evict(error, HELD_S)
            self._evicted_at, due = now, now + HELD_S
        self._evict_at = min(self._evict_at or due, due)

    # ---- the hand-off ------------------------------------------------------------------------

    def on_change(self, change: Change, now: float) -> None:
        """A change of a hand-off."""
        entry = self.table.get(change.key)
        if entry is None:
            return
        state = entry.state
        waits = isinstance(change, Phase) and change.phase is KVPoll.BOOTSTRAPPING
        unbound = None if waits else self._unbound.pop(change.key, None)
        match change:
            case Phase(phase=KVPoll.WAITING_FOR_INPUT):
                if not state.ended and state.phase == "bootstrap":
                    state.enter("queue", now)
                    self.queue.add(state)
            case Phase(phase=KVPoll.FAILED):
                timeout = change.error is not None and change.error.code is ErrorCode.BOOTSTRAP_TIMEOUT
                self.abandoned += unbound is not None and timeout
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
        """See `Scheduler.next_deadline`."""
        ends = [end for end in (super().next_deadline(), self._evict_at) if end is not None]
        return min(ends, default=None)

    def advance(self, now: float) -> None:
        """Timers."""
        super().advance(now)
        self._start_unbound(now)
        if self.admission.draining:
            self._evict_placed(0.0, now)

    def plan(self, now: float) -> list[SequenceStep]:
        """The next forward: chunks of prompts whose destination is known. The cached part of a prompt is sent
        as its first forward starts, and each chunk when the forward reports it stored."""
        self._moments, self._steps = {}, []
        planned = self.queue.plan(self.config.chunk_tokens, now)
        if self.queue.short is not None:
            self._evict(now)
            self._evict_placed(self.queue.short.since, now)
        for step in planned:
            state = self.admission.by_seq[step.seq_id]
            try:
                self._steps.append(self._sent(step, state))
            except Exception as exc:  # the boundary: it ends, and no other one of the step
                self.engine_broke("sending", state, exc, now)
        return self._steps

    def _sent(self, step: SequenceStep, state: RequestState) -> SequenceStep:
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
                self._sender(state).finish(state.result.encode())
                self.cache.remember(state, len(state.prompt))
                if state.direct:  # the router that has asked us hears that the prompt is computed
                    state.usage = first_usage(len(state.request.prompt), 0, state.cached)
                    self._emit(state, result.token, result.logprob, now)
                else:
                    self.figures.token(state, now)
        self._steps = []

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

    # ---- what others see ---------------------------------------------------------------------

    def _running(self) -> Collection[RequestState]:
        return self.queue.running

    def _tokens(self, state: RequestState) -> int:
        """The tokens that are still to be computed."""
        return len(state.prompt) - state.computed

    @property
    def unbound(self) -> int:
        """Rooms of direct mode that no decode has bound."""
        return len(self._unbound)

    def sizes(self) -> dict[str, int]:
        """See `Scheduler.sizes`."""
        tables = {"handoffs": len(self.table), "queue": len(self.queue), "unbound_rooms": self.unbound}
        return {**super().sizes(), **tables}


def _signal(
    moments: Mapping[int, list[tuple[int, ReadyEvent]]], seq_ids: Collection[int], layers: int | None = None
) -> None:
    """This number of layers (None: all) of these sequences' chunks is complete on this process's ranks."""
    for seq_id in seq_ids:
        for upto, ready in moments.get(seq_id, ()):
            if layers is None or upto <= layers:
                ready.signal()
