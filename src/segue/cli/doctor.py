"""`segue doctor`: look at this host and say what works, what is missing and what is slow."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Literal

import msgspec
from rich.console import Console
from rich.table import Table

from segue.core.errors import SegueError
from segue.serve.host import this_host

GIB = 2**30
#: Below these a default deployment of the default model does not fit.
MEMORY_BYTES = 3 * GIB
DISK_BYTES = 2 * GIB
_FILE_LIMIT = 1024


class Finding(msgspec.Struct, frozen=True):
    """One thing that was looked at. `slow` and `absent` are not faults; `broken` is."""

    what: str
    state: Literal["ok", "slow", "absent", "broken"]
    text: str


def _python() -> Finding:
    state: Literal["ok", "broken"] = "ok" if sys.version_info >= (3, 11) else "broken"
    return Finding(
        "python", state, f"{platform.python_version()} on {platform.machine()}, {platform.system()}"
    )


def _package(name: str) -> Finding:
    try:
        return Finding(name, "ok", metadata.version(name))
    except metadata.PackageNotFoundError:
        return Finding(name, "broken", "not installed; pip install 'segue[engine]'")


def _cpu() -> Finding:
    return cpu_finding(_read("/proc/cpuinfo"), this_host().cores)


def cpu_finding(cpuinfo: str, cores: int) -> Finding:
    """What the processor of `cpuinfo` (text of /proc/cpuinfo) has for matrix products in bfloat16."""
    flags: set[str] = set()
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            flags |= set(value.split())
    found = [
        name for name in ("amx_bf16", "avx512_bf16", "avx512f", "avx2", "bf16", "asimd") if name in flags
    ]
    text = f"{cores} cores, {' '.join(found) or 'no vector extensions known to segue'}"
    if flags & {"amx_bf16", "avx512_bf16", "bf16"}:
        return Finding("cpu", "ok", text)
    return Finding("cpu", "slow", f"{text}; no bfloat16 products: --dtype float32 may be faster")


def _memory() -> Finding:
    free = this_host().free_bytes
    if free >= MEMORY_BYTES:
        return Finding("memory", "ok", f"{free / GIB:.1f} GiB free")
    return Finding("memory", "slow", f"{free / GIB:.1f} GiB free; set --kv-gib low, or use --unified")


def _memfd() -> Finding:
    """Pools are anonymous memory; /dev/shm and its size limit are not used."""
    try:
        fd = os.memfd_create("segue-doctor", os.MFD_CLOEXEC)
    except OSError as exc:
        return Finding("memfd", "broken", f"the kernel refuses memfd_create: {exc.strerror}")
    os.close(fd)
    return Finding("memfd", "ok", "anonymous shared memory works; /dev/shm is not used")


def _loopback() -> Finding:
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname()[:2], timeout=5.0) as client,
        ):
            server.settimeout(5.0)
            peer, _ = server.accept()
            with peer:
                client.sendall(b"segue")
                peer.settimeout(5.0)
                echoed = peer.recv(5)
    except OSError as exc:
        return Finding("loopback", "broken", f"cannot connect to 127.0.0.1: {exc.strerror or exc}")
    state: Literal["ok", "broken"] = "ok" if echoed else "broken"
    return Finding("loopback", state, "listening and connecting on 127.0.0.1 work")


def _files() -> Finding:
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= _FILE_LIMIT:
        return Finding("files", "ok", f"{soft} open files allowed")
    return Finding("files", "slow", f"only {soft} open files allowed; raise it with ulimit -n {_FILE_LIMIT}")


def _transports() -> list[Finding]:
    from segue.transport.kinds import KINDS, OK

    found, automatic = KINDS.available(), KINDS.automatic()

    def without(name: str, reason: str) -> Finding:
        # What `auto` means belongs to every version: where it does not work, the host is the reason.
        rest = [other for other in automatic if found[other] == OK]
        if name not in automatic or not rest:
            return Finding(f"transport {name}", "absent", reason)
        text = f"{reason}; between processes of this host --transport auto takes {rest[0]}"
        return Finding(f"transport {name}", "slow", text)

    return [
        Finding(f"transport {name}", "ok", "works here") if reason == OK else without(name, reason)
        for name, reason in found.items()
    ]


def _cache(cache: str | None) -> Finding:
    from segue.engine.store import cache_folder

    folder = Path(cache) if cache else cache_folder()
    there = next(p for p in (folder, *folder.absolute().parents) if p.is_dir())
    if not os.access(there, os.W_OK):
        return Finding("model cache", "broken", f"{folder} cannot be written; choose another with --cache")
    free = shutil.disk_usage(there).free
    text = f"{folder}, {free / GIB:.1f} GiB free"
    return Finding("model cache", "ok" if free >= DISK_BYTES else "slow", text)


def findings(cache: str | None = None) -> list[Finding]:
    """Everything that can be seen without starting anything."""
    looks: list[Callable[[], Finding]] = [_python, _cpu, _memory, _memfd, _loopback, _files]
    found = [look() for look in looks]
    found += [_package(name) for name in ("torch", "transformers", "safetensors", "msgspec", "uvloop")]
    try:
        found += _transports()
        found.append(_cache(cache))
    except (SegueError, OSError) as exc:
        found.append(Finding("doctor", "broken", str(exc)))
    return found


def doctor(*, cache: str | None, as_json: bool) -> int:
    """Print the findings; 1 if something is broken."""
    found = findings(cache)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(found)).decode())
    else:
        colours = {"ok": "green", "slow": "yellow", "absent": "dim", "broken": "red"}
        table = Table("what", "state", "finding")
        for finding in found:
            table.add_row(finding.what, f"[{colours[finding.state]}]{finding.state}[/]", finding.text)
        Console().print(table)
    return 1 if any(f.state == "broken" for f in found) else 0


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
