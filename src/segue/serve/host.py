"""What this host offers to this process: cores and free memory, within the limits of its cgroup."""

from __future__ import annotations

import os
from pathlib import Path

from segue.core.pool_size import Host
from segue.transport.host_memory import available_bytes


def this_host(root: Path = Path("/")) -> Host:
    """Cores that this process may run on and memory that is free, both as its cgroup allows."""
    return Host(cores=_cores(root / "sys/fs/cgroup/cpu.max"), free_bytes=available_bytes(root))


def _cores(cpu_max: Path) -> int:
    cores = len(os.sched_getaffinity(0))
    try:
        quota, _, period = cpu_max.read_text(encoding="ascii").partition(" ")
    except OSError:  # this host has no such file
        return cores
    if quota.isdigit() and period.strip().isdigit():
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores
