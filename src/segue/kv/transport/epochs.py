"""Books that every transport keeps: which epochs were granted, and which were ended."""

from __future__ import annotations

from collections import OrderedDict

from segue.kv.errors import OutOfCapacity
from segue.kv.ids import RankId
from segue.kv.layout.content import Content
from segue.kv.transport.tcp import tcp_wire

MAX_GRANTS = 16384
#: A post and a fence of one epoch are calls of one thread, so the race is over long before this many others.
MAX_FENCED = 4096


class GrantedEpoch:
    """The area that one peer may write under one epoch."""

    def __init__(self, area: Content) -> None:
        self._area = area
        self._ranges: tcp_wire.Rows | None = None

    def holds(self, rows: tcp_wire.Rows, memory_bytes: int) -> bool:
        """Whether each row (offset, length) lies inside. Raises Internal for an area that is not in a memory
        of `memory_bytes` bytes."""
        if self._ranges is None:
            self._ranges = tcp_wire.ranges_of(self._area, memory_bytes)
        return tcp_wire.inside(rows, self._ranges)


class Grants:
    """The live grants of a receiving side: (peer, epoch) pairs with their areas, at most `limit`. The areas
    of live grants share no page, so that together they are no larger than the pool's table of pages."""

    def __init__(self, limit: int = MAX_GRANTS) -> None:
        self._limit = limit
        self._of: dict[RankId, dict[int, GrantedEpoch]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, key: tuple[RankId, int]) -> bool:
        return key[1] in self._of.get(key[0], ())

    def find(self, peer: RankId, epoch: int) -> GrantedEpoch | None:
        """Where writes of `epoch` by `peer` may land; None if nowhere (any more)."""
        return self._of.get(peer, {}).get(epoch)

    def of(self, peer: RankId) -> list[int]:
        """The epochs that `peer` may write."""
        return list(self._of.get(peer, ()))

    def add(self, peer: RankId, epoch: int, area: Content) -> bool:
        """True when it is new. Raises OutOfCapacity when `limit` grants live."""
        epochs = self._of.get(peer)
        if epochs is not None and epoch in epochs:
            return False
        if self._count >= self._limit:
            raise OutOfCapacity(f"{self._limit} hand-offs may already be written to; none was fenced")
        self._of.setdefault(peer, {})[epoch] = GrantedEpoch(area)
        self._count += 1
        return True

    def remove(self, peer: RankId, epoch: int) -> bool:
        """True when it was there."""
        epochs = self._of.get(peer)
        if epochs is None or epoch not in epochs:
            return False
        del epochs[epoch]
        self._count -= 1
        if not epochs:
            del self._of[peer]
        return True

    def remove_peer(self, peer: RankId) -> None:
        """End all grants of `peer`."""
        self._count -= len(self._of.pop(peer, {}))


class FencedEpochs:
    """The epochs this writing side has fenced: a write of one is refused. Epochs are never used
    again, so only a caller that races with its own fence can ask; the last `limit` are kept."""

    def __init__(self, limit: int = MAX_FENCED) -> None:
        self._limit = limit
        self._keys: OrderedDict[tuple[RankId, int], None] = OrderedDict()

    def __contains__(self, key: tuple[RankId, int]) -> bool:
        return key in self._keys

    def add(self, peer: RankId, epoch: int) -> None:
        """Remember it, and forget the oldest beyond the limit."""
        self._keys[peer, epoch] = None
        if len(self._keys) > self._limit:
            self._keys.popitem(last=False)
