"""What systemd hears of a service of `Type=notify`, at a socket of either kind."""

from __future__ import annotations

import asyncio
import os
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from segue.server.supervisor import service_manager


@pytest.fixture(params=["file", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[socket.socket, dict[str, str]]]:
    """A service manager's socket, and the variables that it gives its service."""
    at = f"@segue-{uuid.uuid4()}" if request.param == "abstract" else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(at.replace("@", "\0", 1) if at.startswith("@") else at)
        sock.settimeout(60)
        yield sock, {"NOTIFY_SOCKET": at}


def test_a_service_manager_hears_of_the_start_and_of_the_end(
    manager: tuple[socket.socket, dict[str, str]],
) -> None:
    sock, environ = manager
    service_manager.ready("http://127.0.0.1:8000", environ)
    assert sock.recv(1024).split(b"\n") == [b"READY=1", b"STATUS=serving http://127.0.0.1:8000"]
    service_manager.stopping(environ)
    assert sock.recv(1024).split(b"\n") == [b"STOPPING=1", b"STATUS=draining"]


def test_a_watchdog_is_fed_only_while_the_leader_answers(
    manager: tuple[socket.socket, dict[str, str]],
) -> None:
    sock, environ = manager
    environ |= {"WATCHDOG_USEC": "2000", "WATCHDOG_PID": str(os.getpid())}
    asked: list[int] = []

    async def answers() -> None:
        asked.append(1)
        if len(asked) > 3:
            raise TimeoutError

    with pytest.raises(TimeoutError):
        asyncio.run(service_manager.feed_watchdog(environ, answers))
    assert [sock.recv(64) for _ in range(3)] == [b"WATCHDOG=1"] * 3
    sock.setblocking(False)
    with pytest.raises(BlockingIOError):
        sock.recv(64)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"NOTIFY_SOCKET": "vsock:2:1"},
        {"NOTIFY_SOCKET": "/no/such/socket", "WATCHDOG_USEC": "0"},
        {"WATCHDOG_USEC": "1000", "WATCHDOG_PID": "1"},
        {"WATCHDOG_USEC": "often"},
    ],
)
def test_without_a_service_manager_nothing_is_told_and_nothing_fails(environ: dict[str, str]) -> None:
    service_manager.ready("here", environ)
    asyncio.run(service_manager.feed_watchdog(environ))


def test_variables_of_the_service_manager_are_not_for_children() -> None:
    mine = {"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "1", "WATCHDOG_PID": "2"}
    assert service_manager.addressed(mine | {"PATH": "/bin"}) == mine
