"""Sequences that generate: continuous batching, page growth, retraction. For decode and unified."""

from __future__ import annotations

from bisect import insort
from collections import deque

from segue.engine.engine_api import Engine, HostPages, SequenceStep
from segue.server.schedulers.kv_cache import KVCache
from segue.server.schedulers.request_state import RequestState


class RunningBatch:
    """`waiting` (ready, no place in the batch yet), `running`, and `retracted` (KV in host memory).

    When a running sequence needs a page and there is none, the youngest of `waiting`, or else of `running`,
    is retracted: its KV is copied out, its pages go back, and it continues later with the same tokens. So the
    oldest that runs always has its next token. `retracted` is in order of arrival, as its requests come back.
    One of which the engine could not copy the KV has left all three and has no pages; `take_failed` names it.
    """

    def __init__(self, cache: KVCache, engine: Engine, max_batch: int) -> None:
        self.waiting: deque[RequestState] = deque()
        self.running: list[RequestState] = []
        self.retracted: list[tuple[RequestState, HostPages]] = []
        self.retractions = 0
        self._now = 0.0
        self._cache = cache
        self._engine = engine
        self._max_batch = max_batch
        self._failed: list[tuple[str, RequestState, Exception]] = []

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running) + len(self.retracted)

    def add(self, state: RequestState) -> None:
        """`state` has its prompt's KV and its first token; it may run from the next step on."""
        self.waiting.append(state)

    def remove(self, state: RequestState) -> None:
        """Forget a request wherever it is."""
        if state in self.running:
            self.running.remove(state)
        elif state in self.waiting:
            self.waiting.remove(state)
        else:
            self.retracted = [item for item in self.retracted if item[0] is not state]

    def plan(self, now: float) -> list[SequenceStep]:
        """One token of every running sequence, after making room and filling the batch."""
        self._now = now
        self._fill(now)
        if not self.running:
            # The last one gave way to itself: of a prefix that was cached meanwhile it had pages of its own,
            # and the cached ones could not be evicted while it held what follows them.
            self._fill(now)
        return [
            SequenceStep(s.seq_id, s.output[-1:], s.computed, s.pages, True, s.slot) for s in self.running
        ]

    def take_failed(self) -> list[tuple[str, RequestState, Exception]]:
        """Failed calls to the engine: the call, its request, and the exception."""
        failed, self._failed = self._failed, []
        return failed

    def _fill(self, now: float) -> None:
        """The batch of the next step, each of it with a place for its token's KV."""
        self._resume()
        while self.waiting and len(self.running) < self._max_batch:
            state = self.waiting.popleft()
            state.enter("decode", now)
            self.running.append(state)
        for state in list(self.running):
            if state in self.running:
                self._grow(state)

    # ---- pages -------------------------------------------------------------------------------

    def _grow(self, state: RequestState) -> None:
        """Make sure that the KV of the request's last token has a place; retract others if needed."""
        pool = self._cache.pool
        while len(state.pages) < pool.pages_for(state.computed + 1):
            left = state.max_tokens - state.produced
            page = self._cache.take(1, after=state.pages[-1], room=pool.pages_for(left))
            if page is not None:
                state.pages += page
                continue
            victim = max(self.waiting or self.running, key=_age)
            self._retract(victim)
            if victim is state:
                return

    def _retract(self, state: RequestState) -> None:
        held = self._cache.pool.pages_for(state.computed)
        self.remove(state)
        try:
            host = self._engine.copy_out(state.pages[:held], state.slot)
        except Exception as exc:  # the boundary: it fails alone, and its pages are free all the same
            self._failed.append(("copy_out", state, exc))
        else:
            insort(self.retracted, (state, host), key=lambda item: _age(item[0]))
            self.retractions += 1
            state.enter("retracted", self._now)
        self._cache.release(state)

    def _resume(self) -> None:
        """Bring retracted sequences back, oldest first, while there is room for them to move on."""
        pool = self._cache.pool
        while self.retracted and len(self.running) < self._max_batch:
            state, host = self.retracted[0]
            # A page of slack for everybody that runs: or it would be retracted again at once.
            needed = pool.pages_for(state.computed + 1)
            slack = len(self.running)
            if not (self._cache.has_slot and self._cache.has(needed + slack)):
                return
            pages = self._cache.take(needed, room=pool.pages_for(state.max_tokens - state.produced))
            if pages is None:
                return
            del self.retracted[0]
            state.pages, state.slot = pages, self._cache.take_slot()
            try:
                self._engine.copy_in(host, pages[: pool.pages_for(state.computed)], state.slot)
            except Exception as exc:  # the boundary: it fails alone
                self._cache.release(state)
                self._failed.append(("copy_in", state, exc))
            else:
                state.enter("decode", self._now)
                self.running.append(state)


def _age(state: RequestState) -> int:
    """Orders requests by their arrival here."""
    return state.seq_id
