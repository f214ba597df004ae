"""`segue serve`: a whole deployment as one process tree, of which nothing outlives the supervisor.

The supervisor runs the registry itself and starts every instance and the frontend as a child
process. It restarts nothing: a child that dies is reported with its last lines, and the service
goes on with what is left or ends. Children hang on a lifeline pipe, so they leave even if the
supervisor is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import logging
import os
import secrets
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from segue.core.config import AccessConfig, FrontendConfig, InstanceConfig, ServeConfig
from segue.core.errors import ConfigError
from segue.core.pool_size import Host, ModelSize
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

#: Makes the command of a child: its role and its configuration in, words out.
Command = Callable[[Role, InstanceConfig | FrontendConfig], Sequence[str]]
#: Runs a registry on loopback under the given secret while entered; gives its URL.
Registry = Callable[[bytes], AbstractAsyncContextManager[str]]


@dataclass(frozen=True, slots=True)
class ServeResult:
    """How the deployment ended: the exit status and, unless it was a clean drain, why."""

    status: int
    reason: str = ""


def check_port(host: str, port: int) -> None:
    """Raise a ConfigError if nobody can listen on `host:port` now; before anything is started."""
    try:
        info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(info[0], info[1]) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(info[4])
    except OSError as exc:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {exc.strerror or exc}; choose another --host or --port"
        ) from exc


@contextlib.contextmanager
def _secret_fd(secret: bytes) -> Iterator[int]:
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
def _lifeline() -> Iterator[int]:
    """The reading end of a pipe whose other end lives exactly as long as this process."""
    read, write = os.pipe()
    try:
        yield read
    finally:
        os.close(read)
        os.close(write)


class Supervisor:
    """One run of `segue serve`. `config.model` is already a local path; `announce` gets the
    frontend's URL once a request can complete. `keys` are those that clients must show, if there are any: the
    frontend reads them from an anonymous file, never from its command line."""

    def __init__(
        self,
        config: ServeConfig,
        *,
        host: Host,
        command: Command,
        registry: Registry,
        announce: Callable[[str], None],
        size: ModelSize | None = None,
        console: Console | None = None,
        environ: Mapping[str, str] | None = None,
        startup_s: float = STARTUP_S,
        keys: Sequence[str] = (),
    ) -> None:
        self.config = config
        self.children: list[Child] = []
        self._host = host
        self._size = size
        self._command = command
        self._registry = registry
        self._announce = announce
        self._console = Console() if console is None else console
        self._environ = dict(os.environ if environ is None else environ)
        self._startup_s = startup_s
        self._keys = "\n".join(keys).encode()
        self._stop = asyncio.Event()
        self._halt = asyncio.Event()

    async def run(self) -> ServeResult:
        """Start, serve until a signal or the end of what can serve, drain. Every child is reaped
        when it returns. Raises ConfigError before anything is started."""
        check_port(self.config.host, self.config.port)
        secret = secrets.token_hex(32).encode()
        try:
            async with self._signals(), self._registry(secret) as url:
                with (
                    _secret_fd(secret) as secret_fd,
                    _secret_fd(self._keys) as keys_fd,
                    _lifeline() as lifeline_fd,
                ):
                    try:
                        return await self._serve(url, secret_fd, keys_fd, lifeline_fd)
                    finally:
                        await self._reap()
        finally:
            self._console.close()

    async def _serve(self, url: str, secret_fd: int, keys_fd: int, lifeline_fd: int) -> ServeResult:
        for spec in self.child_specs(url, secret_fd, keys_fd):
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
        clean = await self._drain()
        return ServeResult(0) if clean else ServeResult(1, "not everything drained; see the log")

    # ---- start -------------------------------------------------------------------------------

    def child_specs(self, url: str, secret_fd: int, keys_fd: int) -> list[ChildSpec]:
        """The children of this deployment, for a registry at `url`. The descriptors are those of the files
        with its secret and with the clients' keys."""
        config, host = self.config, self._host
        counts = (
            {Role.UNIFIED: 1}
            if config.unified
            else {Role.PREFILL: config.prefill, Role.DECODE: config.decode}
        )
        secret_file = f"/proc/self/fd/{secret_fd}"
        specs = []
        for role, count in counts.items():
            for index in range(count):
                name = f"{role}-{index}"
                instance = config.instance(role, name, host, url, self._size)
                instance = dataclasses.replace(instance, secret_file=secret_file)
                specs.append(
                    self._spec(name, role, instance, instance.engine.threads_per_worker or 1, (secret_fd,))
                )
        access = AccessConfig(api_key_file=f"/proc/self/fd/{keys_fd}" if self._keys else None)
        frontend = dataclasses.replace(config.frontend(url), secret_file=secret_file, access=access)
        specs.append(self._spec("frontend", Role.FRONTEND, frontend, 1, (secret_fd, keys_fd)))
        return specs

    def _spec(
        self,
        name: str,
        role: Role,
        config: InstanceConfig | FrontendConfig,
        threads: int,
        fds: tuple[int, ...],
    ) -> ChildSpec:
        # Settings reach a child as flags alone: a SEGUE_PORT meant for the frontend is not everybody's.
        environ = {k: v for k, v in self._environ.items() if not k.startswith(PREFIX)}
        environ |= dict.fromkeys(THREAD_VARIABLES, str(threads))
        environ["TOKENIZERS_PARALLELISM"] = "false"
        environ["PYTHONUNBUFFERED"] = "1"
        return ChildSpec(name, role, self._command(role, config), environ, fds)

    async def _started(self) -> ServeResult | None:
        """Wait until every child is ready (None), one of them ends, or somebody wants us to stop."""
        loop = asyncio.get_running_loop()
        stop = awaited(self._stop.wait())
        reports: dict[asyncio.Task[Report | None], Child] = {c.report: c for c in self.children}
        exits: dict[asyncio.Task[int], Child] = {c.exited: c for c in self.children}
        deadline = loop.time() + self._startup_s
        url = ""
        try:
            while reports:
                left = deadline - loop.time()
                done, _ = await asyncio.wait(
                    {stop, *reports, *exits}, timeout=left, return_when=asyncio.FIRST_COMPLETED
                )
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
                    if child.spec.role is Role.FRONTEND:
                        url = report.url
                for task, child in exits.items():
                    if task in done:
                        return await self._why(child, await child.report)
        finally:
            stop.cancel()
        self._announce(url)
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
        needed = {c.spec.role for c in self.children}
        for role in sorted(needed):
            if not any(c.alive for c in self.children if c.spec.role is role):
                return role
        return None

    # ---- end ---------------------------------------------------------------------------------

    async def _drain(self) -> bool:
        """The frontend first, then who computes; True if all left by themselves."""
        patience_s = self.config.limit.drain_s + MARGIN_S
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
            child.report.cancel()
        await asyncio.gather(*(c.report for c in self.children), return_exceptions=True)

    @contextlib.asynccontextmanager
    async def _signals(self) -> AsyncIterator[None]:
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
