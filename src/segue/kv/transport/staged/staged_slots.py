"""Staging slots as credits: who waits for one gets it in turn, and no peer holds more than half of them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable


class Slots:
    """`count` slots of `nbytes` bytes each from `offset` on. Not safe for threads."""

    def __init__(self, offset: int, nbytes: int, count: int) -> None:
        self._free = deque(offset + nbytes * number for number in range(count))
        self._share = max(1, count // 2)
        self._held: dict[int, Hashable] = {}
        self._of: Counter[Hashable] = Counter()
        self._waiting: deque[tuple[Hashable, Callable[[int], bool]]] = deque()

    @property
    def held(self) -> int:
        """How many are not free."""
        return len(self._held)

    def take(self, peer: Hashable, got: Callable[[int], bool]) -> None:
        """Call `got` with the offset of a slot, now or when one is free. It answers whether it still wants
        it."""
        self._waiting.append((peer, got))
        self._serve()

    def give(self, offset: int) -> None:
        """A slot is free again."""
        self._of[self._held.pop(offset)] -= 1
        self._free.append(offset)
        self._serve()

    def _serve(self) -> None:
        passed: list[tuple[Hashable, Callable[[int], bool]]] = []
        while self._free and self._waiting:
            peer, got = self._waiting.popleft()
            if self._of[peer] >= self._share:
                passed.append((peer, got))
                continue
            offset = self._free.popleft()
            self._held[offset] = peer
            self._of[peer] += 1
            if not got(offset):
                self._of[peer] -= 1
                del self._held[offset]
                self._free.appendleft(offset)
        self._waiting.extendleft(reversed(passed))
