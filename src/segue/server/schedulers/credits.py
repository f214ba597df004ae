"""How far ahead decode reserves: the credits of the prompts that prefill has not handed over yet.

A reservation is what lets prefill compute a prompt. An early reservation keeps memory from sequences that
run, for as long as the prompt queues for prefill. So only a part of the pool is given ahead, whatever prefill
has to compute; what is left over waits here without memory, and prefill, which may not compute it, holds none
for it either. It all counts in `max_queue`, beyond which a request is refused (429).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from segue.engine.pages import PagePool
from segue.kv import LeaderId
from segue.server.schedulers.request_state import RequestState

#: One in so many pages of the pool may be reserved ahead.
SHARE = 4
#: So many hand-offs with each prefill leader go on in any case: the one that it computes, and its next.
ALWAYS = 2


class Credits:
    """The rest of `pool` that may be reserved while `ahead` is reserved and has not arrived."""

    def __init__(self, pool: PagePool, ahead: Iterable[RequestState]) -> None:
        self._page_tokens = pool.page_tokens
        self._left = pool.total // SHARE
        self._hand_offs: Counter[LeaderId] = Counter()
        for state in ahead:
            self.take(state)

    def allow(self, state: RequestState) -> bool:
        """Whether it may be given pages now. The last one may take more than is left."""
        return self._left > 0 or self._hand_offs[state.ticket.prefill] < ALWAYS

    def take(self, state: RequestState) -> None:
        """The request has its pages; cached ones cost nothing."""
        self._left -= len(state.pages) - state.cached // self._page_tokens
        self._hand_offs[state.ticket.prefill] += 1
