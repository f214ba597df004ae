"""Tells systemd how a service of `Type=notify` is doing: sd_notify(3), one datagram each.

The variables are those of systemd, so that a process which it did not start tells nobody anything.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Mapping

log = logging.getLogger("segue.service")

_ADDRESS, _WATCHDOG, _WATCHED = "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"


def addressed(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that concern the started process alone, and no child of it."""
    return {name: environ[name] for name in (_ADDRESS, _WATCHDOG, _WATCHED) if name in environ}


def tell(*assignments: str, environ: Mapping[str, str] = os.environ) -> None:
    """Send assignments such as `READY=1`; without a service manager nothing happens. A manager that does not
    read is no reason to wait or to fail."""
    address = environ.get(_ADDRESS, "")
    if address[:1] not in ("/", "@"):  # others, of vsock, are for virtual machines
        return
    if address[0] == "@":
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sock:
            sock.sendto("\n".join(assignments).encode(), address)
    except OSError as error:
        log.warning("event=service_manager_unreachable reason=%r", str(error))


def ready(where: str, environ: Mapping[str, str] = os.environ) -> None:
    """The process serves, at `where`."""
    tell("READY=1", f"STATUS=serving {where}", environ=environ)


def stopping(environ: Mapping[str, str] = os.environ) -> None:
    """The process was asked to end."""
    tell("STOPPING=1", "STATUS=draining", environ=environ)


def watchdog_s(environ: Mapping[str, str] = os.environ) -> float | None:
    """Silence after which the service manager ends this process, in seconds; None: never."""
    text, pid = environ.get(_WATCHDOG, ""), environ.get(_WATCHED, str(os.getpid()))
    return int(text) / 1e6 if text.isdecimal() and int(text) and pid == str(os.getpid()) else None


async def _at_once() -> None:
    """The loop that runs this answers."""


async def feed_watchdog(
    environ: Mapping[str, str] = os.environ, answers: Callable[[], Awaitable[object]] = _at_once
) -> None:
    """Tell the service manager twice in each of its periods that this loop runs and that `answers` returns;
    for ever. Returns at once where it does not ask for that."""
    period_s = watchdog_s(environ)
    while period_s is not None:
        await answers()
        tell("WATCHDOG=1", environ=environ)
        await asyncio.sleep(period_s / 2)
