"""One segue process in the care of another supervisor, such as an actor of Ray.

It is started, watched and drained here, and never started again: the owner ends and is replaced as a whole,
so that the next process is a new incarnation. The process hangs on a lifeline pipe: it drains and leaves if
its owner is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Sequence

from segue.kv import ConfigError, Internal, PeerLost, Role
from segue.kv.session import awaited
from segue.server.supervisor.children import ChildSpec
from segue.server.supervisor.console import Console
from segue.server.supervisor.lifeline import Ready, encode_restarting
from segue.server.supervisor.process_tree import STARTUP_S, ProcessTree, ServeResult, Unit

#: The roles whose instances come back, as a frontend is told.
_COME_BACK = [Role.PREFILL, Role.DECODE]


class KeptProcess(ProcessTree):
    """The process `name` of `role`, started by the command line `words`. It gets `drain_s` to leave, and
    computes with `threads` threads. A frontend waits for instances that are lost: the scheduler of its owner
    starts others."""

    def __init__(
        self,
        name: str,
        role: Role,
        words: Sequence[str],
        *,
        drain_s: float,
        threads: int = 1,
        startup_s: float = STARTUP_S,
        console: Console | None = None,
    ) -> None:
        super().__init__(drain_s, console=console, startup_s=startup_s)
        self._unit = Unit(name, role, lambda _: [self._spec(words, threads)])
        self._up = asyncio.Event()
        self._kept: asyncio.Task[ServeResult] | None = None

    async def start(self) -> Ready:
        """Start the process; its report that it serves. Raises ConfigError for a wrong setting, Internal for
        all other reasons."""
        self._kept = awaited(self._keep_it())
        up = awaited(self._up.wait())
        try:
            await asyncio.wait({self._kept, up}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await self.leave()
            raise
        finally:
            up.cancel()
        if not self._up.is_set():
            outcome = self._kept.result()
            raise ConfigError(outcome.reason) if outcome.status == 2 else Internal(outcome.reason)
        report = self.children[0].report.result()
        assert isinstance(report, Ready)
        return report

    def check(self) -> None:
        """Raise PeerLost if the process has ended."""
        if self._kept is not None and self._kept.done():
            [child] = self.children
            raise PeerLost(f"the process {self._unit.name} has ended with {child.exit_text()}")

    async def leave(self) -> None:
        """Drain the process and wait for its end; it is killed when it is late. Idempotent."""
        if self._kept is None:
            return
        if not self._stop.is_set():
            self.stop()
        await asyncio.wait({self._kept})

    def ready(self, urls: Sequence[tuple[Role, str]]) -> None:
        """See `ProcessTree.ready`."""
        if self._unit.role is Role.FRONTEND:
            self.children[0].tell(encode_restarting(_COME_BACK))
        self._up.set()

    def _spec(self, words: Sequence[str], threads: int) -> ChildSpec:
        spec = self.spec(self._unit.name, self._unit.role, words, threads, ())
        return dataclasses.replace(spec, told=self._unit.role is Role.FRONTEND)

    async def _keep_it(self) -> ServeResult:
        with contextlib.closing(self._console):
            return await self.keep([self._unit])
