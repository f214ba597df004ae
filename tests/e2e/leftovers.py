"""Processes, and shared memory of the tests' own process, that outlive their test."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
from served import Served

#: Every process that a test of this run starts inherits it, and so do its children, orphans too.
MARK = "E2E_TEST_RUN"


def strangers(within_s: float = 30) -> list[psutil.Process]:
    """Processes of this run that are no part of a command that still runs, once `within_s` are over."""
    ours = {process.pid for part in Served.live for process in part.family()}
    found = [p for p in psutil.process_iter() if p.pid not in ours and _marked(p.pid)]
    return psutil.wait_procs(found, timeout=within_s)[1]


def _marked(pid: int) -> bool:
    try:
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False  # it has ended, or is another user's
    return f"{MARK}={os.getpid()}".encode() in words


def mapped() -> set[str]:
    """Device and inode of each of segue's shared segments in the memory of this very process."""
    lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    return {" ".join(line.split()[3:5]) for line in lines if "/memfd:segue" in line}
