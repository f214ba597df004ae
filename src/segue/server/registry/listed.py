"""Records of single ranks become the list of instances, by the rules of the store; others wait for it."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from segue.kv import Role, SegueError
from segue.kv.clock import VirtualClock
from segue.kv.session import keep_running
from segue.server.registry.registry_records import InstanceList, InstanceRecord
from segue.server.registry.registry_store import RegistryStore

log = logging.getLogger(__name__)

#: Nobody falls silent at a clock that stands still.
_TTL_S = 1.0


def listed(records: Iterable[InstanceRecord]) -> RegistryStore:
    """A store that was told `records`, each of one rank, in this order: of two that contradict each other the
    first one counts."""
    store = RegistryStore(VirtualClock(), ttl_s=_TTL_S)
    for record in records:
        try:
            store.register(record, record.replicas[0].dp_rank)
        except SegueError as error:
            log.warning("event=registry_conflict reason=%r", str(error))
    return store


class FollowedList:
    """The list of instances as `follow` shows it, or what keeps it from being known. `follow` runs from the
    first query on, for ever; what it raises is told to those who ask, and it begins again. `name` stands in
    the log."""

    def __init__(self, follow: Callable[[], Coroutine[Any, Any, object]], name: str) -> None:
        self._follow = follow
        self._name = name
        self._task: asyncio.Task[None] | None = None
        self._instances: list[InstanceRecord] = []
        #: Changes with each list; 0 before the first one.
        self._version = 0
        self._error: SegueError | None = None
        self._changed = asyncio.Event()

    async def instances(self, role: Role | None, version: int | None, wait_s: float) -> InstanceList:
        """The list as soon as its version is not `version`, at the latest after `wait_s`. Raises the error.
        In this life of the list nobody is missing."""
        if self._task is None:
            self._task = keep_running(self._follow, name=self._name, failed=self.fail)
        until = asyncio.get_running_loop().time() + wait_s
        while self._error is None and self._version in (0, version):
            try:
                # The first list, or an error in its place, has a limit of its own.
                async with asyncio.timeout_at(until if self._version else None):
                    await self._changed.wait()
            except TimeoutError:
                break
        if self._error is not None:
            raise self._error.info.exception()
        some = [record for record in self._instances if role in (None, record.role)]
        return InstanceList(version=self._version, epoch="", age_s=math.inf, instances=some)

    def show(self, records: Iterable[InstanceRecord]) -> list[InstanceRecord]:
        """These are all the ranks that there are, the oldest first; returns their instances."""
        new = listed(records).instances().instances
        if new != self._instances or not self._version or self._error is not None:
            self._instances, self._error = new, None
            self._version += 1
            self._notify()
        return self._instances

    def fail(self, error: SegueError) -> None:
        """Readers get `error` until there is a list again."""
        self._error = error
        self._notify()

    def close(self) -> None:
        """End `follow`."""
        if self._task is not None:
            self._task.cancel()

    def _notify(self) -> None:
        self._changed.set()
        self._changed.clear()
