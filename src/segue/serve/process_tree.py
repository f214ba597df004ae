"""A tree of child processes, of which nothing outlives the process that keeps them.

`ProcessTree` starts its children, waits until all are ready, serves until a signal or until nothing can serve
any more, and drains. It restarts nothing: a child that dies is reported with its last lines, and the others
go on. Children hang on a lifeline pipe, so they leave even if this process is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from segue.core.settings import PREFIX
from segue.core.types import Role
from segue.serve.children import Child, ChildSpec, Console
from segue.serve.lifeline import CannotStart, Ready, Report
from segue.session.tasks import awaited

log = logging.getLogger("segue.serve")

#: How long a child may load before it counts as stuck.
STARTUP_S = 600.0
#: What a child gets beyond its own drain time before it is killed.
MARGIN_S = 5.0
#: What children get to leave when the start has failed.
ABORT_S = 5.0

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")

#: How a child that was asked to leave may end; the signal itself if it was still loading.
_CLEAN = (0, -signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class ServeResult:
    """How the deployment ended: the exit status and, unless it was a clean drain, why."""

    status: int
    reason: str = ""


@contextlib.contextmanager
def secret_fd(secret: bytes) -> Iterator[int]:
    """An anonymous file that holds `secret` and cannot be changed any more; no name, no disk."""
    fd = os.memfd_create("segue-secret", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(fd, 0o600)
        os.write(fd, secret)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def lifeline() -> Iterator[int]:
    """The reading end of a pipe whose other end lives exactly as long as this process."""
    read, write = os.pipe()
    try:
        yield read
    finally:
        os.close(read)
        os.close(write)


class ProcessTree(ABC):
    """The children of one process. `drain_s` is what those in flight get when it ends."""

    def __init__(
        self,
        drain_s: float,
        *,
        console: Console | None = None,
        environ: Mapping[str, str] | None = None,
        startup_s: float = STARTUP_S,
    ) -> None:
        self.children: list[Child] = []
        self._drain_s = drain_s
        self._console = Console() if console is None else console
        self._environ = dict(os.environ if environ is None else environ)
        self._startup_s = startup_s
        self._stop = asyncio.Event()
        self._halt = asyncio.Event()

    @abstractmethod
    def ready(self, urls: Sequence[tuple[Role, str]]) -> None:
        """All children are ready; the addresses that they have reported, in their order."""

    def ended(self, died: Sequence[Child], *, clean: bool) -> ServeResult:
        """How all of it ended, after a signal. `died` are those that went before; `clean` says that nobody
        else had to be killed or failed on its way out."""
        return ServeResult(0) if clean else ServeResult(1, "not everything drained; see the log")

    async def keep(self, specs: Iterable[ChildSpec], lifeline_fd: int) -> ServeResult:
        """Start the children, serve until a signal or the end of what can serve, drain. Every child is
        reaped when it returns."""
        try:
            return await self._keep(specs, lifeline_fd)
        finally:
            await self._reap()

    async def _keep(self, specs: Iterable[ChildSpec], lifeline_fd: int) -> ServeResult:
        for spec in specs:
            self.children.append(await Child.start(spec, self._console, lifeline_fd))
            log.info("event=started child=%s pid=%d", spec.name, self.children[-1].process.pid)
        failed = await self._started()
        if failed is not None:
            await self._leave(self.children, ABORT_S)
            return failed
        if not self._stop.is_set():
            lost = await self._watch()
            if lost is not None:
                await self._drain()
                return lost
        log.info("event=draining")
        died = [c for c in self.children if not c.alive]
        return self.ended(died, clean=await self._drain())

    def spec(
        self, name: str, role: Role, argv: Sequence[str], threads: int, fds: tuple[int, ...]
    ) -> ChildSpec:
        """A child. Settings reach it as flags alone: a SEGUE_PORT meant for one is not everybody's."""
        environ = {k: v for k, v in self._environ.items() if not k.startswith(PREFIX)}
        environ |= dict.fromkeys(THREAD_VARIABLES, str(threads))
        environ["TOKENIZERS_PARALLELISM"] = "false"
        environ["PYTHONUNBUFFERED"] = "1"
        return ChildSpec(name, role, argv, environ, fds)

    # ---- start -------------------------------------------------------------------------------

    async def _started(self) -> ServeResult | None:
        """Wait until every child is ready (None), one of them ends, or somebody wants us to stop."""
        loop = asyncio.get_running_loop()
        stop = awaited(self._stop.wait())
        reports: dict[asyncio.Future[Report | None], Child] = {c.report: c for c in self.children}
        exits: dict[asyncio.Task[int], Child] = {c.exited: c for c in self.children}
        deadline = loop.time() + self._startup_s
        try:
            while reports:
                left = deadline - loop.time()
                news: set[asyncio.Future[Any]] = {stop, *reports, *exits}
                done, _ = await asyncio.wait(news, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                if stop in done:
                    return None
                if not done:
                    names = ", ".join(c.name for c in reports.values())
                    return ServeResult(1, f"{names} did not start within {self._startup_s:g} s")
                for child in [reports.pop(task) for task in list(reports) if task in done]:
                    report = child.report.result()
                    if not isinstance(report, Ready):
                        return await self._why(child, report)
                    log.info("event=ready child=%s", child.name)
                for task, child in exits.items():
                    if task in done:
                        return await self._why(child, await child.report)
        finally:
            stop.cancel()
        found = [(c.spec.role, c.report.result()) for c in self.children]
        self.ready([(role, report.url) for role, report in found if isinstance(report, Ready)])
        return None

    async def _why(self, child: Child, report: Report | None) -> ServeResult:
        """Why `child` could not start: its own word, or what is seen of its end."""
        if isinstance(report, CannotStart):
            return ServeResult(report.status, f"{child.name}: {report.error.text}")
        await asyncio.wait({child.exited}, timeout=ABORT_S)
        if child.alive:
            return ServeResult(1, f"{child.name} closed its report pipe without a report")
        last = child.last_lines[-1] if child.last_lines else "it wrote nothing"
        return ServeResult(1, f"{child.name} ended during the start with {child.exit_text()}: {last}")

    # ---- serve -------------------------------------------------------------------------------

    async def _watch(self) -> ServeResult | None:
        """Wait for a stop signal (None) or for so many deaths that nothing can serve."""
        stop = awaited(self._stop.wait())
        alive = {c.exited: c for c in self.children if c.alive}
        gone = [c for c in self.children if not c.alive]
        try:
            while True:
                for child in gone:
                    self._log_exit(child)
                if (missing := self._missing()) is not None:
                    return ServeResult(1, f"nothing can serve any more: no {missing} is left")
                done, _ = await asyncio.wait({stop, *alive}, return_when=asyncio.FIRST_COMPLETED)
                gone = [alive.pop(task) for task in list(alive) if task in done]
                if stop in done:
                    for child in gone:
                        self._log_exit(child)
                    return None
        finally:
            stop.cancel()

    def _log_exit(self, child: Child) -> None:
        log.error("event=died child=%s how=%r; it is not restarted", child.name, child.exit_text())
        for line in child.last_lines:
            log.error("event=last_lines child=%s line=%r", child.name, line)

    def _missing(self) -> Role | None:
        """The role without which no request completes and of which nobody is alive."""
        here = {c.role for c in self.children if c.alive}
        if Role.UNIFIED in here:  # a pair was switched
            here |= {Role.PREFILL, Role.DECODE}
        return min({c.role for c in self.children} - here, default=None)

    # ---- end ---------------------------------------------------------------------------------

    async def _drain(self) -> bool:
        """The frontend first, then who computes; True if all left by themselves."""
        patience_s = self._drain_s + MARGIN_S
        frontends = [c for c in self.children if c.spec.role is Role.FRONTEND]
        others = [c for c in self.children if c.spec.role is not Role.FRONTEND]
        clean = await self._leave(frontends, patience_s)
        return await self._leave(others, patience_s) and clean

    async def _leave(self, children: Iterable[Child], patience_s: float) -> bool:
        """Ask `children` to leave; kill those that have not after `patience_s` or at a second
        signal. True if none had to be killed and none failed on its way out."""
        alive = [c for c in children if c.alive]
        if not alive:
            return True
        for child in alive:
            child.signal(signal.SIGTERM)
        halt = awaited(self._halt.wait())
        left = awaited(asyncio.wait({c.exited for c in alive}, timeout=patience_s))
        await asyncio.wait({halt, left}, return_when=asyncio.FIRST_COMPLETED)
        for task in (halt, left):
            task.cancel()
        await asyncio.gather(halt, left, return_exceptions=True)
        late = [c for c in alive if c.alive]
        for child in late:
            log.warning("event=killed child=%s pid=%d", child.name, child.process.pid)
        await self._kill(late)
        failed = [c for c in alive if c not in late and c.exited.result() not in _CLEAN]
        for child in failed:
            log.error("event=failed_to_leave child=%s how=%r", child.name, child.exit_text())
        return not late and not failed

    async def _kill(self, children: Iterable[Child]) -> None:
        alive = [c for c in children if c.alive]
        for child in alive:
            child.signal(signal.SIGKILL)
        if alive:
            await asyncio.wait({c.exited for c in alive})

    async def _reap(self) -> None:
        """Nothing outlives us, whatever went wrong."""
        await self._kill(self.children)
        for child in self.children:
            child.listens.cancel()
        await asyncio.gather(*(c.listens for c in self.children), return_exceptions=True)

    @contextlib.asynccontextmanager
    async def signals(self) -> AsyncIterator[None]:
        """The first signal asks for a drain, the second one for the end at once."""
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        for number in numbers:
            loop.add_signal_handler(number, self.stop)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def stop(self) -> None:
        """What a signal does; a second call ends everything at once."""
        if self._stop.is_set():
            self._halt.set()
        self._stop.set()
