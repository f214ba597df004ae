"""What this host offers to this process: cores and free memory, within the limits of its cgroup."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from segue.core.pool_size import Host

_CGROUP = Path("/sys/fs/cgroup")


def this_host(cgroup: Path = _CGROUP) -> Host:
    """Cores that this process may run on and memory that is free, both as its cgroup allows."""
    return Host(cores=_cores(cgroup), free_bytes=_free_bytes(cgroup))


def _cores(cgroup: Path) -> int:
    cores = len(os.sched_getaffinity(0))
    quota, _, period = _read(cgroup / "cpu.max").partition(" ")
    if quota.isdigit() and period.strip().isdigit():
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def _free_bytes(cgroup: Path) -> int:
    free = int(psutil.virtual_memory().available)
    limit, used = _read(cgroup / "memory.max"), _read(cgroup / "memory.current")
    if limit.isdigit() and used.isdigit():
        free = min(free, max(0, int(limit) - int(used)))
    return free


def _read(path: Path) -> str:
    """The content of a small file of the kernel; empty where this host has none."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
