"""The paths of a transport to the peers that it writes to, and what must hold before each of its methods.

Used under the transport's lock.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from segue.kv.errors import ConfigError, Internal, TransferFailed
from segue.kv.ids import RankId
from segue.kv.transport.emitter import EventEmitter
from segue.kv.transport.epochs import FencedEpochs
from segue.kv.transport.memory.pool_memory import Memory, MemoryKind
from segue.kv.transport.write_book import fenced

PathT = TypeVar("PathT")


class Paths(Generic[PathT]):
    """Paths by peer of the transport called `name`, which registers memory of `kinds`."""

    def __init__(self, name: str, kinds: frozenset[MemoryKind], emitter: EventEmitter) -> None:
        self._name = name
        self._kinds = kinds
        self._emitter = emitter
        #: The registered memory; None before that, and after the end.
        self.memory: Memory | None = None
        self.of: dict[RankId, PathT] = {}
        self.fenced = FencedEpochs()

    def check_register(self, memory: Memory) -> None:
        """Raises ConfigError unless `memory` can be registered now."""
        if self.memory is not None or self._emitter.closed:
            raise ConfigError("a transport registers one memory, once, before it is closed")
        memory.check_kinds(self._name, self._kinds)

    def check_connect(self, peer: RankId) -> Memory | None:
        """The memory to open a path from; None if there is a path already. Raises TransferFailed when the
        transport is closed, ConfigError before `register`."""
        if self._emitter.closed:
            raise TransferFailed("the transport is closed")
        if self.memory is None:
            raise ConfigError("register the memory before connecting")
        return None if peer in self.of else self.memory

    def add(self, peer: RankId, path: PathT) -> bool:
        """A path was opened. False when it is not wanted: the transport is closed, or there is one."""
        if self._emitter.closed or peer in self.of:
            return False
        self.of[peer] = path
        return True

    def remove(self, peer: RankId, path: PathT) -> bool:
        """A path has ended. False when it is not the peer's (any more)."""
        if self.of.get(peer) is not path:
            return False
        del self.of[peer]
        return True

    def check_write(self, peer: RankId, epoch: int) -> tuple[PathT, Memory]:
        """The path to write by and the memory to write from. Raises Internal when a thread of the transport
        has failed, TransferFailed when there is no path or the epoch was fenced."""
        if self._emitter.failure:
            raise Internal(self._emitter.failure)
        if self._emitter.closed:  # the memory of a path may be unmapped
            raise TransferFailed("the transport is closed")
        path = self.of.get(peer)
        if path is None or self.memory is None:
            raise TransferFailed(f"no {self._name} path to {peer}")
        if (peer, epoch) in self.fenced:
            raise fenced(epoch)
        return path, self.memory
