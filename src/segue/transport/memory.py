"""Memory that peers of the same host can map: an anonymous memfd, never a name in a file system.

Who is given the descriptor of a pool can write anywhere in it, and can have the kernel empty parts of it
(`fallocate` with FALLOC_FL_PUNCH_HOLE, which is a write of zeros: no seal forbids it that lets a peer write).
It can not shrink or grow it, so no mapping ever ends in SIGBUS for that, and can not seal it, so others can
still map it. A page that was emptied is taken from the host again, by whoever touches it first.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from segue.core.errors import OutOfCapacity

_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW, _SEAL_FUTURE_WRITE = 0x1, 0x2, 0x4, 0x10
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_POPULATE_BYTES = 64 * 2**20


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
        # The last seal: without it a peer that was given the descriptor could forbid all later writers.
        fcntl.fcntl(fd, _F_ADD_SEALS, _SEAL_SHRINK | _SEAL_GROW | _SEAL_SEAL)
        return Memory(mmap.mmap(fd, nbytes, mmap.MAP_SHARED | mmap.MAP_POPULATE), fd)
    except OSError as exc:
        os.close(fd)
        raise OutOfCapacity(
            f"cannot allocate {nbytes / 2**30:.2f} GiB for the KV pool: {exc.strerror}; lower --kv-gib"
        ) from exc


def readable(nbytes: int) -> tuple[int, mmap.mmap]:
    """Memory that whoever is given its memfd can only read, and our own mapping of it."""
    fd = os.memfd_create("segue-epochs", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    ours = mmap.mmap(fd, nbytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)
    fcntl.fcntl(fd, _F_ADD_SEALS, _SEAL_SEAL | _SEAL_SHRINK | _SEAL_GROW | _SEAL_FUTURE_WRITE)
    return fd, ours


def map_shared(fd: int, nbytes: int) -> mmap.mmap:
    """Map a peer's memfd of `nbytes`, writable, with its pages resident; a fork does not inherit it.

    In steps, so that no other thread waits for long. Raises OSError when this process may not or cannot
    hold the mapping (its limits, its cgroup's memory for page tables); nothing is mapped then.
    """
    pool = mmap.mmap(fd, nbytes, mmap.MAP_SHARED)
    try:
        pool.madvise(mmap.MADV_DONTFORK)
        for start in range(0, nbytes, _POPULATE_BYTES):
            _populate(pool, fd, start, min(_POPULATE_BYTES, nbytes - start))
    except BaseException:
        pool.close()
        raise
    return pool


def _populate(pool: mmap.mmap, fd: int, start: int, nbytes: int) -> None:
    try:
        pool.madvise(_MADV_POPULATE_WRITE, start, nbytes)
    except OSError as exc:
        if exc.errno != errno.EINVAL:
            raise
        # A kernel before 5.14. A page that is missing is an error here, and would be SIGBUS below. Reading
        # is enough: the kernel maps a page of shared memory writable at once.
        os.posix_fallocate(fd, start, nbytes)
        np.max(np.ndarray(-(-nbytes // mmap.PAGESIZE), np.uint8, pool, start, mmap.PAGESIZE))
