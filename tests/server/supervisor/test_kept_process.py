"""One process in the care of another supervisor, over children without a model."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest
from supervised import FAKE

from segue.kv import ConfigError, Internal, PeerLost, Role
from segue.server.supervisor.console import Console
from segue.server.supervisor.kept_process import KeptProcess


def kept(journal: Path, behaviour: str = "ok", name: str = "decode-0", drain_s: float = 30.0) -> KeptProcess:
    words = [sys.executable, str(FAKE), str(journal), name, behaviour]
    role = Role.FRONTEND if name == "frontend" else Role.DECODE
    return KeptProcess(
        name, role, words, drain_s=drain_s, threads=3, startup_s=60, console=Console(io.StringIO())
    )


async def noted(journal: Path, word: str) -> None:
    """Wait for `word`; nobody tells a test of a line."""
    async with asyncio.timeout(60):
        while not has(journal, word):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def has(journal: Path, word: str) -> bool:
    return journal.exists() and word in journal.read_text()


def pid(journal: Path) -> int:
    return int(journal.read_text().split("pid=")[1].split()[0])


async def test_it_starts_and_drains(tmp_path: Path) -> None:
    journal = tmp_path / "journal"

    process = kept(journal)
    report = await process.start()
    assert report.url == ""
    process.check()
    await process.leave()
    await process.leave()
    with pytest.raises(PeerLost):
        process.check()
    assert "threads=3" in journal.read_text()
    assert journal.read_text().splitlines()[1:] == ["decode-0 asked", "decode-0 left"]
    assert not psutil.pid_exists(pid(journal))


async def test_a_frontend_is_told_that_lost_instances_come_back(tmp_path: Path) -> None:
    journal = tmp_path / "journal"

    process = kept(journal, name="frontend")
    assert (await process.start()).url == "http://127.0.0.1:1"
    await noted(journal, "told")
    await process.leave()
    assert 'frontend told {"roles":["prefill","decode"]}' in journal.read_text()


@pytest.mark.parametrize(
    ("behaviour", "kind", "says"),
    [
        ("refuse", ConfigError, "decode-0: the model is broken"),
        ("bug", Internal, "ValueError: not foreseen"),
        ("crash", Internal, "the last word"),
        ("killed", Internal, "run out of memory"),
    ],
)
async def test_it_says_why_it_cannot_start(
    tmp_path: Path, behaviour: str, kind: type[Exception], says: str
) -> None:
    process = kept(tmp_path / "journal", behaviour)
    with pytest.raises(kind, match=says):
        await process.start()
    await process.leave()
    assert not psutil.pid_exists(pid(tmp_path / "journal"))


async def test_an_end_that_nobody_asked_for_is_seen_and_never_repaired(tmp_path: Path) -> None:
    journal = tmp_path / "journal"

    process = kept(journal, "late-crash")
    await process.start()
    os.kill(pid(journal), signal.SIGUSR1)
    async with asyncio.timeout(30):
        assert process._kept is not None
        await asyncio.wait({process._kept})
    with pytest.raises(PeerLost, match="the process decode-0 has ended with exit status 7"):
        process.check()
    await process.leave()
    assert journal.read_text().count("pid=") == 1


async def test_a_start_that_is_cancelled_leaves_nothing(tmp_path: Path) -> None:
    journal = tmp_path / "journal"

    process = kept(journal, "silent")
    starting = asyncio.ensure_future(process.start())
    await noted(journal, "pid=")
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not psutil.pid_exists(pid(journal))
