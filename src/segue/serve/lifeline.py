"""What ties a child process to the supervisor that started it: two inherited pipes.

The *lifeline* is a pipe whose writing end only the supervisor holds. It carries nothing; its end
of file means that the supervisor is gone, however it went, and the child drains and leaves. Over
the *report* pipe the child says that it is ready, or why it cannot be, and later each role that it takes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable

import msgspec

from segue.core.errors import ErrorInfo
from segue.core.types import Role

#: What the supervisor accepts as one report, in bytes.
MAX_REPORT_BYTES = 16 * 1024


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The child serves; `url` is where, if it has an address that matters to a person. `role` is as what, of
    a child that can be switched, which says so each time."""

    url: str = ""
    role: Role | None = None


class CannotStart(msgspec.Struct, frozen=True, tag=True):
    """The child ends with `status` because of `error`."""

    error: ErrorInfo
    status: int


Report = Ready | CannotStart
_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Report] = msgspec.json.Decoder(Report)


def decode_report(data: bytes) -> Report:
    """The report in `data`. Raises one of `DECODE_ERRORS` for anything else."""
    return _decoder.decode(data)


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
