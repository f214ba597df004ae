"""Memory that peers of the same host can map: an anonymous memfd, never a name in a file system."""

from __future__ import annotations

import fcntl
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

from segue.core.errors import OutOfCapacity

_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_SEAL_SHRINK, _SEAL_GROW = 0x2, 0x4


def sealed(fd: int) -> bool:
    """True when nobody can shrink this memfd: a mapping of it then never raises SIGBUS."""
    return bool(fcntl.fcntl(fd, _F_GET_SEALS) & _SEAL_SHRINK)


@dataclass(frozen=True, slots=True)
class Memory:
    """One region of host memory. `fd` is its memfd; `buffer` maps all of it, writable."""

    buffer: mmap.mmap
    fd: int

    @property
    def nbytes(self) -> int:
        return len(self.buffer)

    def close(self) -> None:
        """Unmap and close. Raises BufferError while a tensor or view still uses the mapping."""
        self.buffer.close()
        os.close(self.fd)


def available_bytes() -> int:
    """Memory that this process can still take without swapping: the host's, or its cgroup's if less."""
    words = Path("/proc/meminfo").read_text(encoding="ascii").split()
    available = int(words[words.index("MemAvailable:") + 1]) * 1024
    group = Path("/proc/self/cgroup").read_text(encoding="ascii").rpartition("0::")[2].strip()
    folder = Path("/sys/fs/cgroup") / group.lstrip("/")
    try:
        limit = (folder / "memory.max").read_text(encoding="ascii").strip()
        used = int((folder / "memory.current").read_text(encoding="ascii"))
    except OSError:
        return available  # no memory controller: the host's figure is the only one
    return available if limit == "max" else max(0, min(available, int(limit) - used))


def allocate(nbytes: int, name: str = "segue-kv") -> Memory:
    """A zeroed region of `nbytes` (rounded up to whole pages), all of it resident.

    Raises OutOfCapacity when the host cannot back it: better now than as SIGBUS in a request.
    """
    nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    # The kernel does not refuse a memfd larger than the host: it fills it until it kills processes.
    if nbytes > (limit := available_bytes()):
        raise OutOfCapacity(
            f"cannot allocate {nbytes / 2**30:.2f} GiB for the KV pool: {limit / 2**30:.2f} GiB of memory "
            "are available; lower --kv-gib"
        )
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, nbytes)
        fcntl.fcntl(fd, _F_ADD_SEALS, _SEAL_SHRINK | _SEAL_GROW)
        return Memory(mmap.mmap(fd, nbytes, mmap.MAP_SHARED | mmap.MAP_POPULATE), fd)
    except OSError as exc:
        os.close(fd)
        raise OutOfCapacity(
            f"cannot allocate {nbytes / 2**30:.2f} GiB for the KV pool: {exc.strerror}; lower --kv-gib"
        ) from exc
