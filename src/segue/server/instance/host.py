"""The cores and free memory of this host for this process, within the limits of its cgroup."""

from __future__ import annotations

import os
from pathlib import Path

from segue.engine.pool_size import Host
from segue.kv.transport.memory.host_memory import available_bytes, cpu_quota


def this_host(root: Path = Path("/")) -> Host:
    """Cores that this process may run on and memory that is free, both as its cgroup allows."""
    cores, quota = len(os.sched_getaffinity(0)), cpu_quota(root)
    if quota is not None:
        cores = min(cores, max(1, int(quota)))
    return Host(cores=cores, free_bytes=available_bytes(root))
