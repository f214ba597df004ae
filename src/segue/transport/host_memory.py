"""Memory that this process can still take: what its host has, within the limits of its control groups.

A group is bound by each one above it, too. The cache of files that is charged to a group counts as free, as
it does in the host's MemAvailable: the kernel drops it before it refuses memory or kills. Memory of memfds
and tmpfs does not: the kernel cannot drop it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

#: From here on a limit of version 1 is none: its files have no word for that.
_NO_LIMIT_BYTES = 2**62


@dataclass(frozen=True, slots=True)
class GroupMemory:
    """What a control group may have, and what it has that the kernel cannot drop."""

    limit_bytes: int
    used_bytes: int


@dataclass(frozen=True, slots=True)
class _Files:
    """Where a version of control groups says it: folder and names, and the keys of cache in `memory.stat`."""

    folder: str
    limit: str
    used: str
    cache: tuple[str, str]


_V1 = _Files(
    "sys/fs/cgroup/memory",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_active_file", "total_inactive_file"),
)
_V2 = _Files("sys/fs/cgroup", "memory.max", "memory.current", ("active_file", "inactive_file"))


def available_bytes(root: Path = Path("/")) -> int:
    """Memory that this process can still take without swapping."""
    words = (root / "proc/meminfo").read_text(encoding="ascii").split()
    host = int(words[words.index("MemAvailable:") + 1]) * 1024
    return max(0, min([host, *(group.limit_bytes - group.used_bytes for group in limited_groups(root))]))


def limited_groups(root: Path = Path("/")) -> list[GroupMemory]:
    """The control groups of this process with a limit of memory, from its own up to the last that it sees: in
    a container that is the container's, whatever path the kernel names."""
    files, group = _memory_group(root)
    found = []
    for folder in (group, *group.parents):
        at = root / files.folder / folder
        limit, used = _read(at / files.limit), _read(at / files.used)
        if limit.isdigit() and used.isdigit() and int(limit) < _NO_LIMIT_BYTES:
            words = _read(at / "memory.stat").split()
            stat = dict(zip(words[::2], words[1::2], strict=False))
            cache = sum(int(stat.get(key, "0")) for key in files.cache)
            found.append(GroupMemory(int(limit), max(0, int(used) - cache)))
    return found


def _memory_group(root: Path) -> tuple[_Files, PurePosixPath]:
    """The group of this process that its memory is charged to. Where a hierarchy of version 1 has the memory
    controller, that of version 2 has not."""
    files, group = _V2, ""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            files, group = _V1, path
        elif not controllers and files is _V2:
            group = path
    return files, PurePosixPath(group.lstrip("/"))


def _read(path: Path) -> str:
    """The content of a small file of the kernel; empty where this host has none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
