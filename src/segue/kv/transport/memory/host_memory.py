"""Memory and CPU time that this process can still take, within the limits of its control groups.

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
    """The memory limit of a control group, and the memory in it that the kernel cannot drop."""

    limit_bytes: int
    used_bytes: int


@dataclass(frozen=True, slots=True)
class _Files:
    """How a version of control groups calls it: files, and the keys of cache in `memory.stat`."""

    limit: str
    used: str
    cache: tuple[str, str]


_V1 = _Files(
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_active_file", "total_inactive_file"),
)
_V2 = _Files("memory.max", "memory.current", ("active_file", "inactive_file"))


def available_bytes(root: Path = Path("/")) -> int:
    """Bytes that this process can still take without swapping, by the host and its control groups. `root` is
    another file system in tests."""
    words = (root / "proc/meminfo").read_text(encoding="ascii").split()
    host = int(words[words.index("MemAvailable:") + 1]) * 1024
    return max(0, min([host, *(group.limit_bytes - group.used_bytes for group in limited_groups(root))]))


def limited_groups(root: Path = Path("/")) -> list[GroupMemory]:
    """The control groups of this process with a limit of memory, from its own up to the last that it sees: in
    a container that is the container's, whatever path the kernel names. `root` is another file system in
    tests."""
    is_v1, folders = _groups(root, "memory")
    files = _V1 if is_v1 else _V2
    found = []
    for at in folders:
        limit, used = _read(at / files.limit), _read(at / files.used)
        if limit.isdigit() and used.isdigit() and int(limit) < _NO_LIMIT_BYTES:
            words = _read(at / "memory.stat").split()
            stat = dict(zip(words[::2], words[1::2], strict=False))
            cache = sum(int(stat.get(key, "0")) for key in files.cache)
            found.append(GroupMemory(int(limit), max(0, int(used) - cache)))
    return found


def cpu_quota(root: Path = Path("/")) -> float | None:
    """CPUs whose time this process may take: the least quota of its control groups; None without one. `root`
    is another file system in tests."""
    is_v1, folders = _groups(root, "cpu")
    found = []
    for at in folders:
        if is_v1:
            words = [_read(at / "cpu.cfs_quota_us"), _read(at / "cpu.cfs_period_us")]
        else:
            words = _read(at / "cpu.max").split()
        if len(words) == 2 and all(word.isdigit() and int(word) for word in words):
            found.append(int(words[0]) / int(words[1]))
    return min(found, default=None)


def _groups(root: Path, controller: str) -> tuple[bool, list[Path]]:
    """Whether `controller` is one of version 1, and the folders of this process's group and of those above
    it. Where a hierarchy of version 1 has a controller, that of version 2 has not."""
    mounts = root / "sys/fs/cgroup"
    hybrid = (mounts / "unified/cgroup.controllers").exists()
    is_v1, mount, group = False, mounts / "unified" if hybrid else mounts, ""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller in controllers.split(","):
            names = (controller, controllers)  # `cpu` is most often a link to `cpu,cpuacct`
            mount = next((mounts / name for name in names if (mounts / name).exists()), mounts / controller)
            is_v1, group = True, path
        elif not controllers and not is_v1:
            group = path
    folder = PurePosixPath(group.lstrip("/"))
    return is_v1, [mount / part for part in (folder, *folder.parents)]


def _read(path: Path) -> str:
    """The content of a small file of the kernel; empty where this host has none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
