"""Records of single ranks become the list of instances, by the rules of the store; others wait for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from segue.kv import SegueError, VirtualClock
from segue.server.registry.registry_records import InstanceRecord
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


class Shown:
    """The list of instances as it is now, or what keeps it from being known."""

    def __init__(self) -> None:
        self.instances: list[InstanceRecord] = []
        #: Changes with each list; 0 before the first one.
        self.version = 0
        self._error: SegueError | None = None
        self._changed = asyncio.Event()

    async def other_than(self, version: int | None, wait_s: float) -> None:
        """Return as soon as the version is not `version`, at the latest after `wait_s`. Raises the error."""
        until = asyncio.get_running_loop().time() + wait_s
        while self._error is None and self.version in (0, version):
            changed = self._changed
            try:
                # The first list, or an error in its place, has a limit of its own.
                async with asyncio.timeout_at(until if self.version else None):
                    await changed.wait()
            except TimeoutError:
                break
        if self._error is not None:
            raise self._error.info.exception()

    def show(self, records: Iterable[InstanceRecord]) -> None:
        """These are all the ranks that there are, the oldest first."""
        new = listed(records).instances().instances
        if new != self.instances or not self.version or self._error is not None:
            self.instances, self._error = new, None
            self.version += 1
            self._notify()

    def fail(self, error: SegueError) -> None:
        """Readers get `error` until there is a list again."""
        self._error = error
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
