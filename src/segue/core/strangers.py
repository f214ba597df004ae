"""Who has knocked and not yet proven itself: few, and never all from one address. Pure.

One more than fit, and an older one goes: a flood must then outrun an honest handshake (milliseconds), not
merely fill a table once. Whoever floods loses its own: the victim is the oldest of the address that
has too many, or else of the one that has most.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Generic, TypeVar

#: Connections that have not proven themselves, of one listening socket.
MAX_STRANGERS: Final = 128

Guest = TypeVar("Guest")


class Strangers(Generic[Guest]):
    """At most `limit` guests, at most `per_host` of them (default: half) from one address."""

    def __init__(self, limit: int = MAX_STRANGERS, per_host: int | None = None) -> None:
        if limit < 1:
            raise ValueError(f"limit must be positive, not {limit}")
        self._limit = limit
        self._per_host = per_host or max(1, limit // 2)
        self._host_of: dict[Guest, str] = {}
        self._of: dict[str, dict[Guest, None]] = {}

    def __len__(self) -> int:
        return len(self._host_of)

    def __iter__(self) -> Iterator[Guest]:
        return iter(list(self._host_of))

    def __contains__(self, guest: Guest) -> bool:
        return guest in self._host_of

    def add(self, guest: Guest, host: str) -> Guest | None:
        """Let `guest` wait. Returns who has to go for it, already forgotten here."""
        victim = None
        if len(self._of.get(host, ())) >= self._per_host:
            victim = self._oldest_of(host)
        elif len(self._host_of) >= self._limit:
            victim = self.oldest()
        if victim is not None:
            self.discard(victim)
        self._host_of[guest] = host
        self._of.setdefault(host, {})[guest] = None
        return victim

    def oldest(self) -> Guest | None:
        """The oldest of the address that has most, or None if nobody waits."""
        if not self._of:
            return None
        return self._oldest_of(max(self._of, key=lambda host: len(self._of[host])))

    def discard(self, guest: Guest) -> bool:
        """It has proven itself or is gone. False if it was not here."""
        host = self._host_of.pop(guest, None)
        if host is None:
            return False
        guests = self._of[host]
        del guests[guest]
        if not guests:
            del self._of[host]
        return True

    def _oldest_of(self, host: str) -> Guest:
        return next(iter(self._of[host]))
