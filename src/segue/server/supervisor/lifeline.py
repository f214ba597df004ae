"""The pipes between a child process and the supervisor that started it: two inherited ones, a third for a
frontend.

The *lifeline* is a pipe whose writing end only the supervisor holds. It carries nothing; its end
of file means that the supervisor is gone, however it went, and the child drains and leaves. Over
the *report* pipe the child says that it is ready, or why it cannot be, and later each role that it takes.
Over its standard input a frontend is told which roles are being started again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Iterator

import msgspec

from segue.kv import DECODE_ERRORS, ErrorInfo, Role

#: The largest report that the supervisor accepts, in bytes.
MAX_REPORT_BYTES = 16 * 1024


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The child serves; `url` is where, if it has an address that matters to a person. `role` is as what, of
    a child that can be switched, which says so each time. `door` is the URL of an instance's HTTP server, if
    it has one."""

    url: str = ""
    role: Role | None = None
    door: str = ""


class CannotStart(msgspec.Struct, frozen=True, tag=True):
    """The child ends with `status` because of `error`."""

    error: ErrorInfo
    status: int


class Restarting(msgspec.Struct, frozen=True):
    """To a frontend: instances of these roles have ended and are being started again. Each message replaces
    the one before; none of them means that nobody comes whom the frontend would have to wait for."""

    roles: list[Role]


Report = Ready | CannotStart
_restarting: msgspec.json.Decoder[Restarting] = msgspec.json.Decoder(Restarting)
_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Report] = msgspec.json.Decoder(Report)


def decode_report(data: bytes) -> Report:
    """The report in `data`. Raises one of `DECODE_ERRORS` for anything else."""
    return _decoder.decode(data)


def encode_restarting(roles: list[Role]) -> bytes:
    """The line that a frontend reads."""
    return _encoder.encode(Restarting(roles)) + b"\n"


async def lines(fd: int) -> AsyncGenerator[bytes, None]:
    """The lines of at most `MAX_REPORT_BYTES` that come over the pipe `fd`, until it ends or a line is
    longer; `fd` is closed then."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=MAX_REPORT_BYTES)
    pipe = os.fdopen(fd, "rb", buffering=0)
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    try:
        while True:
            yield await reader.readuntil()
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        return
    finally:
        transport.close()


@contextlib.contextmanager
def on_signals(handler: Callable[[], object], *numbers: int) -> Iterator[None]:
    """Call `handler` in the running loop for each of these signals while this is open."""
    loop = asyncio.get_running_loop()
    for number in numbers:
        loop.add_signal_handler(number, handler)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def terminate_self() -> None:
    """Ask the own process to drain, by the signal that a person would send."""
    os.kill(os.getpid(), signal.SIGTERM)


class Lifeline:
    """The child's ends of both pipes; either may be absent in a process started by hand."""

    def __init__(self, lifeline_fd: int | None = None, report_fd: int | None = None) -> None:
        self._lifeline_fd = lifeline_fd
        self._report_fd = report_fd

    @property
    def supervised(self) -> bool:
        """Somebody listens to reports."""
        return self._report_fd is not None

    def watch(self, grace_s: float, on_lost: Callable[[], None] = terminate_self) -> None:
        """Call `on_lost` (in another thread) when the supervisor is gone, and end the process by
        force if it still exists `grace_s` later. Without a lifeline, nothing happens."""
        if self._lifeline_fd is None:
            return
        fd = self._lifeline_fd

        def wait() -> None:
            while os.read(fd, 1):  # nothing is ever written; the end of file is the message
                pass
            on_lost()
            threading.Event().wait(grace_s)
            os._exit(1)

        threading.Thread(target=wait, name="lifeline", daemon=True).start()

    def report(self, report: Report) -> None:
        """Say `report` to the supervisor, in a line of its own."""
        if self._report_fd is None:
            return
        with contextlib.suppress(BrokenPipeError):  # the supervisor is gone; the lifeline ends this process
            os.write(self._report_fd, _encoder.encode(report) + b"\n")

    async def follow(self, told: Callable[[list[Role]], object]) -> None:
        """Call `told` with the roles of each `Restarting` that a supervisor writes to our standard input;
        returns when it writes no more. Without a supervisor, at once."""
        if not self.supervised:
            return
        async with contextlib.aclosing(lines(os.dup(sys.stdin.fileno()))) as messages:
            async for message in messages:
                try:
                    told(_restarting.decode(message).roles)
                except DECODE_ERRORS:
                    return
