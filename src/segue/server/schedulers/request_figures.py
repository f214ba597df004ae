"""How long the requests of one instance wait, as histograms that only grow. Pure.

The leader's thread counts, another one reads: each number is right, and a sum may be a value ahead.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

from segue.kv import ErrorInfo
from segue.server.schedulers.request_state import RequestState

#: Upper bounds of buckets, in seconds: between two tokens, and for a whole request.
FAST_S: Final = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
SLOW_S: Final = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 2, 3, 5, 10, 30, 60, 120, 300, 600)


class Buckets:
    """The numbers of a histogram without labels, which costs less for each value than prometheus's own."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = [*map(float, bounds), float("inf")]
        #: how many values each bucket has
        self.counts = [0] * len(self.bounds)
        #: the sum of all values
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one more value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class RequestFigures:
    """The requests of one leader: times from their arrival here, tokens, and how they ended."""

    def __init__(self) -> None:
        self.ttft = Buckets(SLOW_S)
        self.itl = Buckets(FAST_S)
        self.e2e = Buckets(SLOW_S)
        self.prompt_tokens = 0
        self.output_tokens = 0
        #: requests that have ended, by error code; `ok`: well
        self.ended: dict[str, int] = {}

    def token(self, state: RequestState, now: float) -> None:
        """The next token of `state` is known."""
        if state.token_at is None:
            self.ttft.observe(now - state.entered)
            self.prompt_tokens += len(state.prompt)
        else:
            self.itl.observe(now - state.token_at)
        state.token_at = now
        self.output_tokens += 1

    def end(self, state: RequestState, error: ErrorInfo | None, now: float) -> None:
        """`state` has ended. Only a request that ended well has a whole time."""
        outcome = "ok" if error is None else error.code.value
        self.ended[outcome] = self.ended.get(outcome, 0) + 1
        if error is None:
            self.e2e.observe(now - state.entered)
