"""The prompts that a decode instance computes itself: those whose uncached part is at most `tokens` long.

Decode computes a prompt within the steps of the sequences that it generates, which pause for as long as the
prompt takes. So a prompt is short if it makes them wait no longer than the hand-off would make its own client
wait. The pause is measured at start (`server.instance.local_cost`), the wait over the first hand-offs:
the median of `HANDOFFS` of them. It stays as it is from then on. Under load both would grow together,
and an instance that is busy would take on more and more.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

#: So many hand-offs are measured.
HANDOFFS = 16


class LocalPrompts:
    """`tokens` is the limit: a fixed one, or by `pauses`. A pause is how many tokens of a prompt are computed
    in one step, and by how much the step takes longer, in seconds; pauses come in order of their tokens."""

    def __init__(self, fixed: int = 0, pauses: Sequence[tuple[int, float]] = ()) -> None:
        self.tokens = fixed
        self._pauses = pauses
        self._waits: list[float] = []

    def handed_over(self, wait_s: float) -> None:
        """A hand-off has added `wait_s` to the time to its first token."""
        if not self._pauses or len(self._waits) == HANDOFFS:
            return
        self._waits.append(wait_s)
        if len(self._waits) == HANDOFFS:
            self.tokens = longest(self._pauses, median(self._waits))


def longest(pauses: Sequence[tuple[int, float]], wait_s: float) -> int:
    """The longest prompt that makes others wait for at most `wait_s`; between two pauses they grow evenly."""
    tokens, pause_s = 0, 0.0
    for next_tokens, next_pause_s in pauses:
        if next_pause_s > wait_s:
            rest = (wait_s - pause_s) / (next_pause_s - pause_s) if wait_s > pause_s else 0.0
            return tokens + int(rest * (next_tokens - tokens))
        tokens, pause_s = next_tokens, next_pause_s
    return tokens
