"""An etcd in memory, as `EtcdBackend` uses one: keys with revisions, leases, watches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

from segue.kv.clock import VirtualClock
from segue.kv.limits import Limits
from segue.server.registry.etcd import Compacted, KeyEvent, Kv, NoLease, Read
from segue.server.registry.etcd_backend import EtcdBackend


@dataclass
class MemoryEtcd:
    """The tests look into it, end leases, and write between a read and the write that follows (`between`)."""

    keys: dict[bytes, Kv] = field(default_factory=dict)
    leases: set[int] = field(default_factory=set)
    #: for how long each lease was granted, in seconds, and which were prolonged
    granted: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    between: list[Callable[[], None]] = field(default_factory=list)
    #: what happens when the next watches begin, each of which then ends in silence
    lapses: list[Callable[[], None]] = field(default_factory=list)
    revision: int = 1
    _history: list[tuple[int, KeyEvent]] = field(default_factory=list)
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    async def get(self, key: bytes) -> tuple[Kv, int]:
        return self.keys.get(key, Kv(key)), self.revision

    async def read(self, prefix: bytes) -> Read:
        found = [kv for key, kv in self.keys.items() if key.startswith(prefix)]
        return Read(sorted(found, key=lambda kv: kv.create_revision), self.revision)

    async def put(self, known: Kv, value: bytes, lease: int | None) -> bool:
        if self.between:
            self.between.pop(0)()
        there = self.keys.get(known.key, Kv(known.key))
        if there.mod_revision != known.mod_revision:
            return False
        if lease is not None and lease not in self.leases:
            raise NoLease("requested lease not found")
        self.write(known.key, value, there.lease if lease is None else lease)
        return True

    def write(self, key: bytes, value: bytes, lease: int = 0) -> None:
        """Write as any client."""
        self.revision += 1
        created = self.keys[key].create_revision if key in self.keys else self.revision
        self._tell(KeyEvent(Kv(key, value, created, self.revision, lease)))

    def end(self, lease: int) -> None:
        """The lease has ended, and what was written under it is gone."""
        self.leases.discard(lease)
        for key in [key for key, kv in self.keys.items() if kv.lease == lease]:
            self.revision += 1
            self._tell(KeyEvent(Kv(key, b"", 0, self.revision), "DELETE"))

    def compact(self) -> None:
        """A lapse: what was to be watched from has been thrown away."""
        raise Compacted

    def _tell(self, event: KeyEvent) -> None:
        if event.gone:
            del self.keys[event.kv.key]
        else:
            self.keys[event.kv.key] = event.kv
        self._history.append((self.revision, event))
        self._news.set()
        self._news = asyncio.Event()

    async def grant(self, ttl_s: int) -> int:
        self.granted.append(ttl_s)
        self.leases.add(lease := 100 + len(self.granted))
        return lease

    async def keep_alive(self, lease: int) -> bool:
        self.kept.append(lease)
        return lease in self.leases

    async def revoke(self, lease: int) -> None:
        self.end(lease)

    async def watch(
        self, key: bytes, revision: int, silent_s: float, *, prefix: bool = False
    ) -> AsyncGenerator[list[KeyEvent], None]:
        if self.lapses:
            self.lapses.pop(0)()
            return
        while True:
            news = self._news
            found = [
                (at, event)
                for at, event in self._history
                if at >= revision and (event.kv.key.startswith(key) if prefix else event.kv.key == key)
            ]
            if found:
                revision = found[-1][0] + 1
                yield [event for _, event in found]
            else:
                await news.wait()

    async def close(self) -> None: ...


def backend_on(
    etcd: MemoryEtcd, secret: bytes, clock: VirtualClock | None = None, ttl_s: float = 2.0
) -> EtcdBackend:
    """One process's view of it."""
    made = EtcdBackend("etcd://127.0.0.1:1", secret, Limits(registry_ttl_s=ttl_s), None, clock)
    made._etcd = made._mirror._etcd = etcd  # type: ignore[assignment]
    return made
