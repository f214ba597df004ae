"""The epochs a receiver grants, in memory that its writers can read.

An optimisation, not a proof: a writer looks before each slice, so a write after an abort stops
early instead of filling pages that are quarantined anyway. The writer's own `Drained` or its death proves
that nothing lands any more. A connection made after an epoch ended is the exception: it has no slice in
progress and finds the epoch gone before its first one.
"""

from __future__ import annotations

import hashlib

import numpy as np

from segue.kv.errors import OutOfCapacity
from segue.kv.ids import RankId
from segue.kv.transport.net import key_handshake as handshake
from segue.kv.transport.shm.shm_host import HOST, ShmHost

SLOTS = 16384
TABLE_BYTES = SLOTS * 8


def token(peer: RankId, epoch: int) -> int:
    """The value of a granted (writer, epoch) pair in the table: never 0, equal on both sides."""
    digest = hashlib.blake2b(handshake.pack_rank(peer) + epoch.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little") | 1


class GrantTable:
    """The receiver's end. Not thread-safe; the transport's lock covers it."""

    def __init__(self, host: ShmHost = HOST) -> None:
        self._host = host
        self.fd, self._map = host.table(TABLE_BYTES)
        self._slots = np.frombuffer(self._map, np.uint64)
        self._free = list(range(SLOTS - 1, -1, -1))
        self._of: dict[tuple[RankId, int], int] = {}

    def add(self, peer: RankId, epoch: int) -> None:
        """Publish a grant. Raises OutOfCapacity when all slots are taken."""
        if (peer, epoch) in self._of:
            return
        if not self._free:
            raise OutOfCapacity(f"{SLOTS} hand-offs may already be written to; none was fenced")
        slot = self._free.pop()
        self._of[peer, epoch] = slot
        self._slots[slot] = token(peer, epoch)

    def remove(self, peer: RankId, epoch: int) -> None:
        """End a grant. Idempotent."""
        slot = self._of.pop((peer, epoch), None)
        if slot is not None:
            self._slots[slot] = 0
            self._free.append(slot)

    def remove_peer(self, peer: RankId) -> None:
        """End all grants of `peer`."""
        for key in [key for key in self._of if key[0] == peer]:
            self.remove(*key)

    def __len__(self) -> int:
        return len(self._of)

    def close(self) -> None:
        """End all grants, unmap and close."""
        self._slots[:] = 0
        del self._slots
        self._map.close()
        self._host.close(self.fd)


class GrantView:
    """The writer's end: read-only."""

    def __init__(self, fd: int, host: ShmHost = HOST) -> None:
        self._map = host.map_table(fd, TABLE_BYTES)
        self._slots = np.frombuffer(self._map, np.uint64)

    def find(self, wanted: int) -> int:
        """The slot that holds `wanted`, or -1."""
        found = np.flatnonzero(self._slots == np.uint64(wanted))
        return int(found[0]) if len(found) else -1

    def holds(self, slot: int, wanted: int) -> bool:
        """True while `slot` holds `wanted`; one load."""
        return bool(self._slots[slot] == wanted)

    def close(self) -> None:
        """Unmap. Idempotent."""
        if not self._map.closed:
            del self._slots
            self._map.close()
