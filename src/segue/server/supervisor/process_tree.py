"""A tree of child processes, of which nothing outlives the process that keeps them.

`ProcessTree` starts its children, waits until all are ready, serves until a signal or until nothing can serve
any more, and drains. A child that dies is reported with its last lines, and the others go on; `Unit.restarts`
says whether it is started again. Children hang on a lifeline pipe, so they leave even if this process is
killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from segue.kv import ErrorCode, Role
from segue.kv.session import awaited, background
from segue.server.settings.layers import PREFIX
from segue.server.supervisor import service_manager
from segue.server.supervisor.children import Child, ChildSpec
from segue.server.supervisor.console import Console
from segue.server.supervisor.lifeline import CannotStart, Ready, Report, on_signals
from segue.server.supervisor.restarts import PAUSES_S, WINDOW_S, Restarts

log = logging.getLogger("segue.serve")

#: How long a child may load before it counts as stuck.
STARTUP_S = 600.0
#: Time that a child gets beyond its own drain time before it is killed.
MARGIN_S = 5.0
#: Time for children to leave when the start has failed.
ABORT_S = 5.0

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")

#: How a child that was asked to leave may end; the signal itself if it was still loading.
_CLEAN = (0, -signal.SIGTERM)
#: Lines of a child that ended without a known cause, in the reason.
SHOWN_LINES = 10

#: Causes that a signal shows, while the child loads.
_CAUSES = {
    -signal.SIGKILL: "the host has most likely run out of memory; give a lower --kv-gib, fewer instances, or "
    "a --dtype with fewer bytes",
    -signal.SIGBUS: "memory that was promised is not there; give a lower --kv-gib, or more memory to this "
    "container",
    -signal.SIGILL: "a library uses instructions that this processor does not have; see segue doctor",
}


@dataclass(frozen=True, slots=True)
class ServeResult:
    """How the deployment ended: the exit status and, unless it was a clean drain, why."""

    status: int
    reason: str = ""


@dataclass(slots=True, eq=False)
class Unit:
    """Children that start and end as one: an instance with all of its DP ranks, or the frontend.

    `name` is that of its log lines. `make` gives their specs, new ones each time. `restarts` decides whether
    they are started again when one of them fails; None: never, and the others go on. `role` is what they
    serve as, `url` what the first one has reported, `since` when they were ready (seconds of the loop's
    clock), None while they are not.
    """

    name: str
    role: Role
    make: Callable[[Unit], Sequence[ChildSpec]]
    restarts: Restarts | None = None
    url: str = ""
    children: list[Child] = field(default_factory=list)
    since: float | None = None
    #: It is being started again.
    restarting: bool = False

    def were_ready(self, now: float) -> None:
        """All of its children have reported that they are ready."""
        report = self.children[0].report.result()
        assert isinstance(report, Ready)
        self.url, self.since, self.restarting = report.url, now, False

    def ended(self, now: float) -> float | None:
        """The unit has failed: the pause before the next start, None if there is none."""
        assert self.restarts is not None
        served_s = 0.0 if self.since is None else now - self.since
        self.since = None
        # An operator may have switched it, and it comes back as what it was.
        self.role = next((c.role for c in self.children if c.role is not self.role), self.role)
        return self.restarts.ended(served_s)


def missing(units: Iterable[Unit], kept: Iterable[Unit]) -> Role | None:
    """The role without which no request completes, of which nobody is alive or will be. `kept` are the units
    that have not ended for good."""
    children = [child for unit in units for child in unit.children]
    here = {c.role for c in children if c.alive}
    here |= {u.role for u in kept if u.restarts is not None and not any(c.alive for c in u.children)}
    if Role.UNIFIED in here:  # a pair was switched
        here |= {Role.PREFILL, Role.DECODE}
    return min({c.role for c in children} - here, default=None)


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
    """The children of one process. `drain_s` is what those in flight get when it ends; a frontend serves on
    for `delay_s` before."""

    def __init__(
        self,
        drain_s: float,
        *,
        console: Console | None = None,
        environ: Mapping[str, str] | None = None,
        startup_s: float = STARTUP_S,
        delay_s: float = 0.0,
    ) -> None:
        self.units: list[Unit] = []
        self._lifeline_fd = -1
        self._drain_s = drain_s
        self._delay_s = delay_s
        self._console = Console() if console is None else console
        self._environ = dict(os.environ if environ is None else environ)
        self._startup_s = startup_s
        self._stop = asyncio.Event()
        self._halt = asyncio.Event()

    @property
    def children(self) -> list[Child]:
        """All children, without those whose unit was started again since."""
        return [child for unit in self.units for child in unit.children]

    @abstractmethod
    def ready(self, urls: Sequence[tuple[Role, str]]) -> None:
        """All children are ready; the addresses that they have reported, in their order."""

    def restarting(self) -> None:  # noqa: B027  who does not start children again has nobody to tell
        """Units began or ceased to be started again (`Unit.restarting`)."""

    def ended(self, died: Sequence[Child], *, clean: bool) -> ServeResult:
        """How all of it ended, after a signal. `died` are those that went before; `clean` says that nobody
        else had to be killed or failed on its way out."""
        return ServeResult(0) if clean else ServeResult(1, "not everything drained; see the log")

    async def keep(self, units: Iterable[Unit]) -> ServeResult:
        """Start the children, serve until a signal or the end of what can serve, drain. Every child is
        reaped when it returns."""
        watchdog = background(service_manager.feed_watchdog(self._environ), name="watchdog", failed=_say)
        with lifeline() as self._lifeline_fd:
            try:
                return await self._keep(units)
            finally:
                watchdog.cancel()
                await self._reap(self.children)

    async def _keep(self, units: Iterable[Unit]) -> ServeResult:
        for unit in units:
            self.units.append(unit)
            failed = await self._start(unit)
            if failed is not None:
                await self._leave(self.children, ABORT_S)
                return failed
        stop, starting = awaited(self._stop.wait()), awaited(self._started(self.children))
        try:
            await asyncio.wait({stop, starting}, return_when=asyncio.FIRST_COMPLETED)
            failed = starting.result() if starting.done() else None
            if starting.done() and failed is None:
                now = asyncio.get_running_loop().time()
                for unit in self.units:
                    unit.were_ready(now)
                self.restarting()
                found = [(c.spec.role, c.report.result()) for c in self.children]
                self.ready([(role, report.url) for role, report in found if isinstance(report, Ready)])
        finally:
            await _cancelled(stop, starting)
        if failed is not None:
            await self._leave(self.children, ABORT_S)
            return failed
        if not starting.cancelled() and not self._stop.is_set():
            lost = await self._watch()
            if lost is not None:
                await self._drain()
                return lost
        if starting.cancelled():
            return await self._stopped_while_loading()
        log.info("event=draining")
        died = [c for c in self.children if not c.alive]
        return self.ended(died, clean=await self._drain())

    async def _stopped_while_loading(self) -> ServeResult:
        log.info("event=stopped_while_loading")
        count = sum(child.alive for child in self.children)
        clean = await self._leave(self.children, ABORT_S)
        how = "ended" if clean else "ended, not all by themselves"
        return ServeResult(1, f"stopped while loading: {count} processes {how}; nothing was served")

    def spec(
        self, name: str, role: Role, argv: Sequence[str], threads: int, fds: tuple[int, ...]
    ) -> ChildSpec:
        """A child. Settings reach it as flags alone: a SEGUE_PORT meant for one is not everybody's."""
        kept = self._environ.items() - service_manager.addressed(self._environ).items()
        environ = {k: v for k, v in kept if not k.startswith(PREFIX)}
        environ |= dict.fromkeys(THREAD_VARIABLES, str(threads))
        environ["TOKENIZERS_PARALLELISM"] = "false"
        environ["PYTHONUNBUFFERED"] = "1"
        return ChildSpec(name, role, argv, environ, fds)

    # ---- start -------------------------------------------------------------------------------

    async def _start(self, unit: Unit) -> ServeResult | None:
        """Start the children of a unit, in the place of those before; the reason if one cannot be."""
        await self._reap(unit.children)
        unit.children = []
        specs: Sequence[ChildSpec] = ()
        try:
            specs = unit.make(unit)
            for spec in specs:
                child = await Child.start(spec, self._console, self._lifeline_fd)
                child.role = unit.role  # it may have been switched before
                unit.children.append(child)
                log.info("event=started child=%s pid=%d", spec.name, child.process.pid)
        except OSError as exc:
            return ServeResult(1, f"a process for {unit.name} could not be started: {exc}")
        finally:
            for spec in specs:
                for own in spec.sockets:
                    own.close()
        return None

    async def _started(self, children: Sequence[Child]) -> ServeResult | None:
        """Wait until every one of `children` is ready (None) or one of them ends."""
        loop = asyncio.get_running_loop()
        reports: dict[asyncio.Future[Report | None], Child] = {c.report: c for c in children}
        exits: dict[asyncio.Task[int], Child] = {c.exited: c for c in children}
        deadline = loop.time() + self._startup_s
        while reports:
            left = deadline - loop.time()
            news: set[asyncio.Future[Any]] = {*reports, *exits}
            done, _ = await asyncio.wait(news, timeout=left, return_when=asyncio.FIRST_COMPLETED)
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
        return None

    async def _why(self, child: Child, report: Report | None) -> ServeResult:
        """Why `child` could not start: its own word, or what is seen of its end."""
        child.told = True
        if isinstance(report, CannotStart):
            text = f"{child.name}: {report.error.text}"
            known = report.error.code is not ErrorCode.INTERNAL
            if not known:  # its traceback may come after its report
                await asyncio.wait({child.exited}, timeout=ABORT_S)
            return ServeResult(report.status, text if known else self._with_lines(text, child))
        await asyncio.wait({child.exited}, timeout=ABORT_S)
        if child.alive:
            return ServeResult(1, f"{child.name} closed its report pipe without a report")
        text = f"{child.name} ended during the start with {child.exit_text()}"
        cause = _CAUSES.get(child.exited.result())
        return ServeResult(1, f"{text}: {cause}" if cause else self._with_lines(text, child))

    def _with_lines(self, text: str, child: Child) -> str:
        """`text`, and the last lines of `child`."""
        lines = [line for line in child.last_lines if line.strip()][-SHOWN_LINES:]
        shown = "".join(f"\n    {line}" for line in lines) or " it wrote nothing"
        return f"{text}; its last lines:{shown}" if lines else f"{text};{shown}"

    # ---- serve -------------------------------------------------------------------------------

    async def _watch(self) -> ServeResult | None:
        """Wait for a stop signal (None), for a unit that has failed too often, or for so many ends that
        nothing can serve."""
        stop = awaited(self._stop.wait())
        keeping = {awaited(self._keep_up(unit)): unit for unit in self.units}
        try:
            while True:
                if (role := missing(self.units, keeping.values())) is not None:
                    return ServeResult(1, f"nothing can serve any more: no {role} is left")
                done, _ = await asyncio.wait({stop, *keeping}, return_when=asyncio.FIRST_COMPLETED)
                if stop in done:
                    return None
                for task in [task for task in keeping if task in done]:
                    del keeping[task]
                    if (failed := task.result()) is not None:
                        return failed
        finally:
            await _cancelled(stop, *keeping)
            for unit in self.units:
                unit.restarting = False
            self.restarting()
            for child in self.children:
                if not child.alive:
                    self._tell_end(child, "it is not started again")

    async def _keep_up(self, unit: Unit) -> ServeResult | None:
        """Start `unit` again each time it fails. Returns when nothing of it is left that runs (None), or why
        it is not started any more."""
        loop = asyncio.get_running_loop()
        failed = await self._failed(unit)
        while failed is not None:
            pause_s = unit.ended(loop.time())
            if pause_s is None:
                text = f"{unit.name} was started again {len(PAUSES_S)} times within {WINDOW_S:g} s of service"
                return ServeResult(1, f"{text}, and failed again: {failed.reason}")
            unit.restarting = True
            self.restarting()
            log.warning("event=restarts child=%s in_s=%g", unit.name, pause_s)
            # All ranks of an incarnation run, or none: the other DP ranks finish their requests.
            await self._leave(unit.children, self._drain_s + MARGIN_S)
            await asyncio.sleep(pause_s)
            failed = await self._start(unit) or await self._started(unit.children)
            if failed is None:
                unit.were_ready(loop.time())
                log.info("event=serves_again child=%s", unit.name)
                self.restarting()
                failed = await self._failed(unit)
            else:
                log.error("event=restart_failed child=%s reason=%r", unit.name, failed.reason)
                await self._kill(unit.children)
        return None

    async def _failed(self, unit: Unit) -> ServeResult | None:
        """Wait until a child of `unit` has failed, and say how; None once all of them have left without, or
        have ended where none is started again."""
        alive = {child.exited: child for child in unit.children}
        while alive:
            done, _ = await asyncio.wait(alive, return_when=asyncio.FIRST_COMPLETED)
            for child in [alive.pop(task) for task in list(alive) if task in done]:
                again = unit.restarts is not None and child.exited.result() not in _CLEAN
                self._tell_end(child, "" if again else "it is not started again")
                if again:
                    return ServeResult(1, self._with_lines(f"it ended with {child.exit_text()}", child))
        return None

    def _tell_end(self, child: Child, more: str) -> None:
        """Log the end of a child, once."""
        if child.told:
            return
        child.told = True
        if child.exited.result() in _CLEAN:
            log.warning("event=left child=%s how=%r; %s", child.name, child.exit_text(), more)
            return
        log.error("event=died child=%s how=%r%s", child.name, child.exit_text(), f"; {more}" if more else "")
        for line in child.last_lines:
            log.error("event=last_lines child=%s line=%r", child.name, line)

    # ---- end ---------------------------------------------------------------------------------

    async def _drain(self) -> bool:
        """The frontend first, then who computes; True if all left by themselves."""
        patience_s = self._drain_s + MARGIN_S
        here = [c for c in self.children if c.alive]
        frontends = [c for c in here if c.spec.role is Role.FRONTEND]
        others = [c for c in here if c.spec.role is not Role.FRONTEND]
        clean = await self._leave(frontends, patience_s + self._delay_s)
        clean = await self._leave(others, patience_s) and clean
        # Children that ended before they were asked to, while the frontend drained.
        early = [c for c in here if not c.told]
        for child in early:
            self._tell_end(child, "it is not started again")
        return clean and all(c.exited.result() in _CLEAN for c in early)

    async def _leave(self, children: Iterable[Child], patience_s: float) -> bool:
        """Ask `children` to leave; kill those that have not after `patience_s` or at a second
        signal. True if none had to be killed and none failed on its way out."""
        alive = [c for c in children if c.alive]
        if not alive:
            return True
        for child in alive:
            child.told = True
            child.signal(signal.SIGTERM)
        halt = awaited(self._halt.wait())
        left = awaited(asyncio.wait({c.exited for c in alive}, timeout=patience_s))
        try:
            await asyncio.wait({halt, left}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _cancelled(halt, left)
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

    async def _reap(self, children: Sequence[Child]) -> None:
        """Nothing of `children` outlives us, whatever went wrong."""
        await self._kill(children)
        await _cancelled(*(child.listens for child in children))

    def signals(self) -> AbstractContextManager[None]:
        """The first signal asks for a drain, the second one for the end at once."""
        return on_signals(self.stop, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def stop(self) -> None:
        """The effect of a signal: drain; a second call ends everything at once."""
        if self._stop.is_set():
            self._halt.set()
        else:
            service_manager.stopping(self._environ)
        self._stop.set()


def _say(error: Exception) -> None:
    log.warning("event=trouble error=%r", str(error))


async def _cancelled(*tasks: asyncio.Task[Any]) -> None:
    """Cancel `tasks`, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
