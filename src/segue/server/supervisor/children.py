"""One child process as the supervisor sees it: its reports, its log lines, its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass

from segue.kv import DECODE_ERRORS, Role
from segue.kv.session import awaited
from segue.server.observe.logs import as_text
from segue.server.supervisor.console import Console
from segue.server.supervisor.lifeline import Ready, Report, decode_report, lines

MAX_LINE_BYTES = 64 * 1024
LAST_LINES = 20
#: Reads of a child's output after its end, more than a full pipe and our buffer take: the rest is from other
#: processes.
CHUNKS_AFTER_END = 16
#: Characters of one of its last lines that are kept; its log has all of them.
LAST_LINE_CHARS = 1000


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """A child to start: its name in logs, its role, its command and its environment. `sockets` are its alone
    once it runs: their other ends are to see its end. A `told` child reads messages from its standard input
    (`Child.tell`)."""

    name: str
    role: Role
    argv: Sequence[str]
    environ: Mapping[str, str]
    pass_fds: tuple[int, ...] = ()
    sockets: Sequence[socket.socket] = ()
    told: bool = False


class _Pipes(asyncio.subprocess.SubprocessStreamProtocol):
    """The pipes of a process, as asyncio has them, and `ended`: `Process.wait` waits for the end of the pipes
    too, which somebody else may hold open."""

    def __init__(self) -> None:
        super().__init__(MAX_LINE_BYTES, asyncio.get_running_loop())
        self.ended = asyncio.Event()

    def process_exited(self) -> None:
        super().process_exited()
        self.ended.set()


class Child:
    """A running child. `report`, its first one or None, and `exited` end with what their names say; `listens`
    with the pipe of its reports. `role` is the one it serves in now. `told` is set once its end needs no line
    in the log: it was asked to leave, or the line is there."""

    def __init__(
        self,
        spec: ChildSpec,
        transport: asyncio.SubprocessTransport,
        output: _Pipes,
        report_fd: int,
        console: Console,
    ) -> None:
        self.spec = spec
        self.role = spec.role
        self.told = False
        self._transport = transport
        self._ended = output.ended
        self.process = asyncio.subprocess.Process(transport, output, asyncio.get_running_loop())
        self.last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self._console = console
        self.report: asyncio.Future[Report | None] = asyncio.get_running_loop().create_future()
        self.listens = awaited(self._listen(report_fd))
        self.exited: asyncio.Task[int] = awaited(self._until_exit())

    @classmethod
    async def start(cls, spec: ChildSpec, console: Console, lifeline_fd: int) -> Child:
        """Start `plan` in a session of its own, so that a terminal's Ctrl-C reaches only the supervisor."""
        report_read, report_write = os.pipe()
        try:
            transport, output = await asyncio.get_running_loop().subprocess_exec(
                _Pipes,
                *spec.argv,
                f"--lifeline-fd={lifeline_fd}",
                f"--report-fd={report_write}",
                stdin=asyncio.subprocess.PIPE if spec.told else asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=dict(spec.environ),
                pass_fds=(lifeline_fd, report_write, *spec.pass_fds, *(s.fileno() for s in spec.sockets)),
                start_new_session=True,
            )
        except BaseException:
            os.close(report_read)
            raise
        finally:
            os.close(report_write)
            for own in spec.sockets:
                own.close()
        return cls(spec, transport, output, report_read, console)

    @property
    def name(self) -> str:
        """The child's name in logs, with its role once it has been switched."""
        return self.spec.name if self.role is self.spec.role else f"{self.spec.name}-as-{self.role}"

    @property
    def alive(self) -> bool:
        """The child is not yet reaped."""
        return not self.exited.done()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the child; SIGKILL also goes to everything it started."""
        if self.process.returncode is not None:
            return
        # `Popen.send_signal` would reap a child that has just ended, and asyncio lose its exit status.
        send = os.killpg if number is signal.SIGKILL else os.kill
        with contextlib.suppress(ProcessLookupError):  # it ended between the look and the signal
            send(self.process.pid, number)

    def tell(self, message: bytes) -> None:
        """Send a line to the standard input of a child that is `told`; it may have ended."""
        if self.process.stdin is not None and self.process.returncode is None:
            self.process.stdin.write(message)

    def exit_text(self) -> str:
        """How it ended, in words."""
        status = self.exited.result()
        if status >= 0:
            return f"exit status {status}"
        try:
            name = signal.Signals(-status).name
        except ValueError:
            name = "unknown"
        return f"signal {-status} ({name})"

    async def _listen(self, fd: int) -> None:
        try:
            async with contextlib.aclosing(_reports(fd)) as reports:
                async for report in reports:
                    if not self.report.done():
                        self.report.set_result(report)
                    if isinstance(report, Ready) and report.role is not None:
                        self.role = report.role
        finally:
            if not self.report.done():
                self.report.set_result(None)

    async def _until_exit(self) -> int:
        await self._forward_lines()
        self._transport.close()
        status = self.process.returncode
        assert status is not None
        return status

    async def _forward_lines(self) -> None:
        """Forward lines until the child's output ends or the child does: a grandchild that keeps
        the pipe open, or writes to it, must not hide the child's end."""
        output = self.process.stdout
        assert output is not None
        ended = awaited(self._ended.wait())
        pending = b""
        chunks_left = CHUNKS_AFTER_END
        while chunks_left:
            chunks_left -= ended.done()
            chunk_task = awaited(output.read(MAX_LINE_BYTES))
            await asyncio.wait({chunk_task, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not chunk_task.done():
                # Output from before the end is in the pipe already; nothing else is waited for.
                await asyncio.wait({chunk_task}, timeout=0.2)
            if not chunk_task.done():
                chunk_task.cancel()
                break
            chunk = chunk_task.result()
            if not chunk:
                break
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                self._line(line)
            if len(pending) >= MAX_LINE_BYTES:
                self._line(pending)
                pending = b""
        if pending:
            self._line(pending)
        await ended

    def _line(self, raw: bytes) -> None:
        text = raw.decode("utf-8", "replace").rstrip("\r")
        self.last_lines.append(as_text(text)[:LAST_LINE_CHARS])
        self._console.line(self.name, text)


async def _reports(fd: int) -> AsyncGenerator[Report, None]:
    """The reports of a child, line by line, until the pipe ends or brings an invalid one."""
    async with contextlib.aclosing(lines(fd)) as said:
        async for line in said:
            try:
                yield decode_report(line)
            except DECODE_ERRORS:
                return
