"""Requests that wait for their turn: who is next, and for how long anybody may be passed over.

Lower `priority` first; among equals the tenant (an API key or a user) that was given least work, counted in
tokens of prompts; then the order of arrival. With one priority and one tenant this is the order of arrival.

Nobody starves: younger requests may pass the oldest one by `passed_tokens` tokens of prompts, then it is the
next one, whatever its priority and tenant. A request that cannot start now (`can_start`) is not passed and
keeps its count; the oldest request that can start is passed instead. So a request that can start, with `n`
older ones before it, starts before more than `(n + 1) * (passed_tokens + longest) + n * longest` tokens of
others were started, `longest` being the longest prompt.

A tenant's share is its start tag (start-time fair queueing, Goyal 1996): a request of a tenant begins where
that tenant's last one ends, or where the one that is being served began, whichever is later.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import takewhile

from segue.server.schedulers.request_state import RequestState

#: Tenants of which is known how much they were given; the one that came longest ago is forgotten first.
MAX_TENANTS = 4096
#: The oldest request may be passed over by prompts of so many full steps.
PASSED_STEPS = 8


def _always(_state: RequestState) -> bool:
    return True


class FairQueue:
    """See the module's text. Its size is bounded by whoever admits requests."""

    def __init__(self, passed_tokens: int) -> None:
        self._passed_tokens = passed_tokens
        #: by arrival, with its place in `_order`
        self._entries: dict[RequestState, tuple[int, float, int]] = {}
        self._order: list[tuple[int, float, int]] = []
        self._by_place: dict[tuple[int, float, int], RequestState] = {}
        #: tokens of younger prompts that have passed a request, if any did
        self._passed: dict[RequestState, int] = {}
        #: where each tenant's last request ends
        self._ends: OrderedDict[str, float] = OrderedDict()
        self._served = 0.0
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, state: object) -> bool:
        return state in self._entries

    def __iter__(self) -> Iterator[RequestState]:
        """In order; a copy, so that who is next may leave meanwhile."""
        due = self._due()
        rest = [self._by_place[place] for place in self._order]
        return iter([*due, *(state for state in rest if state not in due)] if due else rest)

    @property
    def first(self) -> RequestState | None:
        """The next request."""
        return next(iter(self._due()), None) or (self._by_place[self._order[0]] if self._order else None)

    def _due(self) -> list[RequestState]:
        """The requests that were passed for long enough, by arrival."""
        late = [state for state, tokens in self._passed.items() if tokens >= self._passed_tokens]
        return sorted(late, key=lambda state: self._entries[state][2])

    def add(self, state: RequestState) -> None:
        """`state` waits from now on."""
        tenant, cost = state.request.tenant, len(state.prompt)
        began = max(self._served, self._ends.pop(tenant, 0.0))
        self._ends[tenant] = began + cost
        if len(self._ends) > MAX_TENANTS:
            self._ends.popitem(last=False)
        self._arrivals += 1
        place = (state.request.priority, began, self._arrivals)
        self._entries[state], self._by_place[place] = place, state
        insort(self._order, place)

    def remove(self, state: RequestState) -> None:
        """`state` does not wait any more. Unknown ones are ignored."""
        if state not in self._entries:
            return
        self._passed.pop(state, None)
        place = self._entries.pop(state)
        del self._by_place[place], self._order[bisect_left(self._order, place)]
        if not self._order:
            self._ends.clear()
            self._served = 0.0

    def start(self, state: RequestState, can_start: Callable[[RequestState], bool] = _always) -> str:
        """`state` has its turn; `can_start` says which others could have had it. Returns how it came to that,
        for who asks afterwards."""
        priority, began, _ = self._entries[state]
        before = list(takewhile(lambda other: other is not state, self._entries))
        oldest = next((other for other in before if can_start(other)), None)
        self._served = max(self._served, began)
        count, older, passed = len(self), len(before), self._passed.get(state, 0)
        self.remove(state)
        if oldest is not None:
            self._passed[oldest] = self._passed.get(oldest, 0) + len(state.prompt)
        if passed >= self._passed_tokens:
            which = f"{older} of them older," if older else "the oldest,"
            return f"chosen of {count} waiting, {which} after {passed} tokens of others had passed it"
        tenant = f", tenant {state.request.tenant}" if state.request.tenant else ""
        return f"chosen of {count} waiting, {older} of them older; priority {priority}{tenant}"
