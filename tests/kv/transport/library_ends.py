"""One side of a transport over a library, and what it told."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from segue.kv.ids import RankId
from segue.kv.transport.base import Fenced, Transport, TransportEvent
from segue.kv.transport.memory.pool_memory import Memory

PATIENCE_S = 60.0
E = TypeVar("E", bound=TransportEvent)


class End:
    """The transport that `make` gives for `me`, over `memory`."""

    def __init__(self, make: Callable[[Any, RankId], Transport], me: RankId, memory: Memory) -> None:
        self.me, self.memory = me, memory
        self.log: list[TransportEvent] = []
        self._changed = threading.Condition()
        self.transport: Any = make(self._event, me)
        try:
            self.endpoint = self.transport.register(memory)
        except BaseException:
            self.transport.close()
            raise

    @property
    def arrays(self) -> list[np.ndarray]:
        """Views for one expression: kept ones would hold the memory open."""
        return [np.asarray(region.owner) for region in self.memory.regions]

    def _event(self, event: TransportEvent) -> None:
        with self._changed:
            self.log.append(event)
            self._changed.notify_all()

    def take(self, kind: type[E], **fields: object) -> E:
        """The first event of `kind` with these fields; waits for it."""

        def found() -> list[E]:
            events = [event for event in self.log if isinstance(event, kind)]
            return [e for e in events if all(getattr(e, k) == v for k, v in fields.items())]

        with self._changed:
            assert self._changed.wait_for(found, PATIENCE_S), (kind, fields, self.log)
            return found()[0]

    def fenced(self, peer: RankId, epoch: int) -> Fenced:
        """The answer of a fence."""
        self.transport.fence(peer, epoch)
        return self.take(Fenced, peer=peer, epoch=epoch)
