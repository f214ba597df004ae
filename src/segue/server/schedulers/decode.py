"""The decode role: pre-allocation queue → transfer queue → waiting → running (↔ retracted).

A request enters the pre-allocation queue at once, whatever is known of its prefill side; what is known
later only changes the receiver's phase. It leaves in the order of `fair_queue`, when its receiver may
publish, there are credits (`server.schedulers.credits`) and there are pages. Published pages belong to
the peer until the hand-off ends.

A ticket that names this leader for both halves asks for no hand-off: the prompt is computed here, as on a
unified instance. Where the next hand-off or the next prompt lacks pages, none of the other kind that came
later is given any.
"""

from __future__ import annotations

from msgspec.structs import replace

from segue.engine.engine_api import Engine
from segue.engine.pages import PagePool
from segue.kv import (
    Change,
    ErrorInfo,
    Handles,
    Internal,
    InvalidRequest,
    KVPoll,
    KVReceiver,
    MetadataMismatch,
    Phase,
    Quarantined,
    Release,
    RoomKey,
    SegueError,
)
from segue.server.messages.control import Load, Submit
from segue.server.schedulers.admission import SchedulerConfig
from segue.server.schedulers.credits import Credits
from segue.server.schedulers.fair_queue import PASSED_STEPS, FairQueue
from segue.server.schedulers.local_prompts import LocalPrompts
from segue.server.schedulers.prefill_result import decode_result
from segue.server.schedulers.request_state import (
    RequestState,
    RoleTransfer,
    check_free,
    claim_of,
    first_usage,
)
from segue.server.schedulers.unified import UnifiedScheduler


class DecodeScheduler(UnifiedScheduler):
    """See the module's text. `handoffs` makes the receivers; `local` says which prompts frontends are to give
    to this instance alone (None: none)."""

    def __init__(self, engine: Engine, pool: PagePool, config: SchedulerConfig, handoffs: Handles) -> None:
        super().__init__(engine, pool, config)
        self.handoffs = handoffs
        self.local: LocalPrompts | None = None
        self.table: dict[RoomKey, RoleTransfer[KVReceiver]] = {}
        self.preallocation = FairQueue(PASSED_STEPS * config.chunk_tokens)
        #: the first hand-off that could go on and lacks pages
        self._short: RequestState | None = None

    # ---- admission ---------------------------------------------------------------------------

    def _admit(self, state: RequestState, now: float) -> None:
        if state.ticket.decode != self.config.me:
            raise InvalidRequest("the ticket names another decode replica")
        if state.ticket.prefill == self.config.me:
            super()._admit(state, now)
            return
        check_free(self.table, state.received_as, state)
        hints = state.request.ranks
        receiver = self.handoffs.receive(
            state.received_as,
            state.ticket.prefill,
            len(state.prompt),
            state.deadline - now,
            claim=claim_of(state.request),
            prefill_dp_rank=hints.disagg_prefill_dp_rank,
            force_query=hints.force_query_prefill_dp_rank,
            placed=not state.direct,
        )
        self.table[state.received_as] = RoleTransfer(state, receiver)
        state.enter("reserve", now)
        self.preallocation.add(state)

    def _tell_other_half(self, submit: Submit, error: ErrorInfo) -> None:
        ticket = submit.ticket
        key = RoomKey(ticket.room, ordinal=ticket.ordinal or 0, attempt=ticket.attempt)
        self.handoffs.decline(key, ticket.prefill, error, claim=claim_of(submit.request))

    def _drop(self, state: RequestState, error: ErrorInfo | None, now: float) -> None:
        self.preallocation.remove(state)
        self.queue.remove(state)
        self.batch.remove(state)
        entry = self.table.get(state.received_as)
        if entry is None or entry.state is not state:
            self.cache.release(state)
        elif error is not None:
            # The peer may be writing into these pages: they come back with `Release`.
            entry.handle.abort(error)

    # ---- the hand-off ------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        """Timers first, then give pages to the requests that wait for them, in order of arrival."""
        super().advance(now)
        self._short = None
        if not self.preallocation:
            return
        reserved = [e.state for e in self.table.values() if e.state.phase == "transfer" and not e.state.ended]
        credits = Credits(self.cache.pool, reserved)

        def can_start(state: RequestState) -> bool:
            return self._settled(state) is not None and credits.allow(state)

        for state in self.preallocation:
            entry = self._settled(state)
            if entry is None:
                continue  # it must not hold up the others
            if not credits.allow(state):
                if state.phase == "reserve":
                    state.enter("credit", now)
                continue  # another prefill may have some
            if self.queue.short is not None and self.queue.short.seq_id < state.seq_id:
                return
            if not self._reserve(state):
                self._short = state
                return  # full: nobody may overtake, or a large request would starve
            state.enter("transfer", now, self.preallocation.start(state, can_start))
            credits.take(state)
            skipped = state.cached // self.cache.pool.page_tokens
            entry.handle.publish(state.pages[skipped:], state.cached, slot=state.slot)

    def _settled(self, state: RequestState) -> RoleTransfer[KVReceiver] | None:
        """The hand-off of `state`, once its prefill side is known."""
        entry = self.table.get(state.received_as)
        return entry if entry is not None and entry.handle.poll() is KVPoll.WAITING_FOR_INPUT else None

    def _reserve(self, state: RequestState) -> bool:
        """Pages for the whole prompt and the first token, cached ones included, and a slot for its state.

        Each running sequence keeps a claim on one more page, so that admission does not force
        a retraction at the next step.
        """
        pool, batch = self.cache.pool, self.batch
        match = self.cache.tree.match(state.prompt, state.request.cache_salt)
        needed = pool.pages_for(len(state.prompt) + 1) - len(match.pages)
        claims = len(batch.running) + len(batch.waiting) + len(self.queue.running)
        fresh = None
        if not batch.retracted and self.cache.has_slot and self.cache.has(needed + claims):
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
        state.slot = self.cache.take_slot()
        return True

    def on_change(self, change: Change, now: float) -> None:
        """A change of a hand-off."""
        entry = self.table.get(change.key)
        if entry is None:
            return
        state = entry.state
        match change:
            case Phase(phase=KVPoll.FAILED):
                self.fail(state, change.error or Internal("failed without a reason").info, now)
            case Phase(phase=KVPoll.SUCCESS):
                self._landed(entry, change.metadata, now)
            case Quarantined():
                if not entry.quarantined:  # after a bug it is said again
                    self.cache.quarantine(self._published(state), state.slot)
                    entry.quarantined = True
            case Release():
                self._released(entry)
            case _:
                pass

    def _landed(self, entry: RoleTransfer[KVReceiver], content: bytes | None, now: float) -> None:
        """Everything is here. The pages are the request's own; it may run from the next step on."""
        state = entry.state
        if state.ended:
            return  # its frontend left while the last bytes landed; `Release` frees the pages
        if content is None:
            self.fail(state, Internal("the hand-off ended without metadata").info, now)
            return
        try:
            result = decode_result(content)
            if not 0 <= result.first_token < self.engine.info.vocab_size:
                raise MetadataMismatch(
                    f"prefill's first token {result.first_token} is outside the vocabulary"
                )
        except SegueError as error:
            self.fail(state, error.info, now)
            return
        state.prompt_logprobs = result.prompt_logprobs or []
        state.handed_bytes = entry.handle.nbytes
        if self._too_early(state, result.first_token):
            state.computed = len(state.prompt) - 1
            state.prompt_logprobs = state.prompt_logprobs[:-1]  # that token's come with its forward
            state.enter("prefill", now, "prefill was not told min_tokens: the first token is drawn here")
            self.queue.running.append(state)
            return
        state.computed = len(state.prompt)
        state.usage = first_usage(len(state.request.prompt), state.cached, result.prefill_cached)
        state.enter("ready", now)
        state.timeline |= result.timeline | {
            "wire": entry.handle.wire_s,
            "commit": now - entry.handle.changed_at,
            "at_ready": now,
        }
        self.engine.append(state.seq_id, result.first_token)
        self.cache.remember(state, len(state.prompt))
        self.batch.add(state)
        if self.local is not None:
            spent = sum(result.timeline.get(name, 0.0) for name in ("queue", "prefill"))
            self.local.handed_over(max(0.0, now - state.entered - spent))
        self._emit(state, result.first_token, result.first_logprob, now)

    def _too_early(self, state: RequestState, token: int) -> bool:
        """Whether `token` would end an answer that has to be longer: vllm-router sends prefill `min_tokens` 1
        in place of the client's."""
        ends = token in self.engine.info.eos_token_ids or token in state.sampling.stop_token_ids
        return state.direct and ends and state.produced < state.sampling.min_tokens

    def _published(self, state: RequestState) -> list[int]:
        return state.pages[state.cached // self.cache.pool.page_tokens :]

    def _released(self, entry: RoleTransfer[KVReceiver]) -> None:
        state = entry.state
        if state.ended:  # else it is committed: the pages go on with the request
            self._give_back(entry)
        del self.table[state.received_as]
        entry.handle.clear()

    def _give_back(self, entry: RoleTransfer[KVReceiver]) -> None:
        state, cache = entry.state, self.cache
        if entry.quarantined:
            cache.unquarantine(self._published(state), state.slot)
            state.pages = state.pages[: state.cached // cache.pool.page_tokens]
            state.slot = None
        cache.release(state)

    # ---- the forward -------------------------------------------------------------------------

    def _may_start(self) -> bool:
        """See `UnifiedScheduler`."""
        first = self.queue.waiting.first
        overtakes = first is not None and self._short is not None and self._short.seq_id < first.seq_id
        return super()._may_start() and not overtakes

    # ---- what others see ---------------------------------------------------------------------

    def load(self) -> Load:
        """See `Scheduler.load`."""
        return replace(super().load(), local_tokens=None if self.local is None else self.local.tokens)

    def sizes(self) -> dict[str, int]:
        """See `Scheduler.sizes`."""
        return {
            **super().sizes(),
            "handoffs": len(self.table),
            "preallocation": len(self.preallocation),
        }
