"""Unauthenticated connections, bounded in all and per address, and what the log says of them. Pure.

One more than fit closes an older one: the oldest of its own address if that has too many, else the oldest of
the addresses that have most. So a flood has to outrun a handshake (milliseconds) of its own address, instead
of filling a table once; one from as many addresses as there are places has to outrun everybody's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final, Generic, TypeVar

#: Unauthenticated connections of one listening socket.
MAX_PENDING: Final = 128
#: Seconds between two log lines of one reason to refuse a connection: more could fill a disk.
REFUSED_S: Final = 60.0
#: Reasons that are told apart; all others are one.
MAX_REASONS: Final = 16

ConnectionT = TypeVar("ConnectionT")


class PendingConnections(Generic[ConnectionT]):
    """At most `limit` connections, at most `per_host` of them (default: half) from one address."""

    def __init__(self, limit: int = MAX_PENDING, per_host: int | None = None) -> None:
        if limit < 1:
            raise ValueError(f"limit must be positive, not {limit}")
        self._limit = limit
        self._per_host = per_host or max(1, limit // 2)
        self._host_of: dict[ConnectionT, str] = {}
        self._of: dict[str, dict[ConnectionT, None]] = {}

    def __len__(self) -> int:
        return len(self._host_of)

    def __iter__(self) -> Iterator[ConnectionT]:
        return iter(list(self._host_of))

    def __contains__(self, connection: ConnectionT) -> bool:
        return connection in self._host_of

    @property
    def most(self) -> int:
        """How many the address with most has."""
        return max(map(len, self._of.values()), default=0)

    def add(self, connection: ConnectionT, host: str) -> ConnectionT | None:
        """Note `connection`. Returns the one to close for it, already forgotten here."""
        victim = None
        if len(self._of.get(host, ())) >= self._per_host:
            victim = self._oldest_of(host)
        elif len(self._host_of) >= self._limit:
            victim = self.oldest()
        if victim is not None:
            self.discard(victim)
        self._host_of[connection] = host
        self._of.setdefault(host, {})[connection] = None
        return victim

    def oldest(self) -> ConnectionT | None:
        """The oldest of the addresses that have most, or None without any."""
        most = self.most
        return next((one for one, host in self._host_of.items() if len(self._of[host]) == most), None)

    def discard(self, connection: ConnectionT) -> bool:
        """Remove a connection that is authenticated or closed. False if it was not in the table."""
        host = self._host_of.pop(connection, None)
        if host is None:
            return False
        of_host = self._of[host]
        del of_host[connection]
        if not of_host:
            del self._of[host]
        return True

    def _oldest_of(self, host: str) -> ConnectionT:
        return next(iter(self._of[host]))


class Refusals:
    """The log lines of refused connections: one for each reason in `REFUSED_S`, with the count of those that
    had none."""

    def __init__(self) -> None:
        #: by reason: when it was logged last, and how many were not since
        self._seen: dict[str, tuple[float, int]] = {}

    def line(self, text: str, reason: str, now: float) -> str:
        """The line for a refusal that `text` describes, "" if it gets none. `now` is in seconds."""
        if len(self._seen) >= MAX_REASONS and reason not in self._seen:
            self._seen = {each: seen for each, seen in self._seen.items() if now - seen[0] < REFUSED_S}
            reason = reason if len(self._seen) < MAX_REASONS else ""
        logged_at, unsaid = self._seen.get(reason, (-math.inf, 0))
        if now - logged_at < REFUSED_S:
            self._seen[reason] = logged_at, unsaid + 1
            return ""
        self._seen[reason] = now, 0
        return text + (f"; {unsaid} more since the last such line" if unsaid else "")
