"""Pauses between tries of something that fails."""

from __future__ import annotations

from collections.abc import Callable

#: Draws a number uniformly between its two arguments; injected, so that tests and the simulator decide.
Uniform = Callable[[float, float], float]


class Backoff:
    """Pauses in seconds: each twice as long as the last one, from `first_s` up to `longest_s`.

    With `uniform` each is drawn between half of that and all of it: those who failed together must not all
    try again together.
    """

    def __init__(
        self, first_s: float = 0.1, longest_s: float = 5.0, *, uniform: Uniform | None = None
    ) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._uniform = uniform
        self._next_s = first_s

    def next_s(self) -> float:
        """How long to wait before the next try."""
        pause_s, self._next_s = self._next_s, min(2 * self._next_s, self._longest_s)
        return pause_s if self._uniform is None else self._uniform(pause_s / 2, pause_s)

    def reset(self) -> None:
        """A try has succeeded."""
        self._next_s = self._first_s
