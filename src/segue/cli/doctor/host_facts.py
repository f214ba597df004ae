"""The facts of this host that `segue doctor` judges.

Everything that touches the host is here, so that `host_checks` is a set of functions over `HostFacts` that
tests give whatever facts they like.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import platform
import resource
import shutil
import socket
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path

import psutil

from segue.engine.cpu.processor import Processor, this_processor
from segue.kv import KINDS, limited_groups
from segue.server.instance.host import this_host

#: Packages without which the engine cannot run.
ENGINE_PACKAGES = ("torch", "transformers", "safetensors", "msgspec", "uvloop")
#: Packages that a transport needs: the transport, and what its library is called by pip.
TRANSPORT_PACKAGES = {
    "nixl": ("nixl-cu12", "nixl-cu13"),
    "mooncake": (
        "mooncake-transfer-engine",
        "mooncake-transfer-engine-non-cuda",
        "mooncake-transfer-engine-cuda13",
        "mooncake-transfer-engine-rocm",
        "mooncake-transfer-engine-npu",
    ),
    "mori": ("amd-mori",),
    "ascend": ("memfabric-hybrid",),
    "cuda_ipc": ("cuda-bindings",),
}
#: Ports that a deployment takes unless told otherwise, and the flag that takes another.
PORTS = {8000: "--port", 8998: "--bootstrap-port"}
_MADV_POPULATE_WRITE = 23
_F_ADD_SEALS, _SEAL_SHRINK = 1033, 0x2
_STA_UNSYNC, _TIMEX_WORDS = 0x40, 32
_WILDCARDS = ("0.0.0.0", "::")


@dataclass(frozen=True, slots=True)
class ListeningSocket:
    """A socket of process `pid` that listens on every interface."""

    pid: int
    process: str
    port: int


@dataclass(frozen=True, slots=True)
class CacheFolder:
    """The folder of downloaded and converted models."""

    folder: str
    writable: bool
    free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """Facts of this host. For a trial an empty text means success; any other text is the reason of the
    failure."""

    python: tuple[int, int, int]
    system: str
    kernel: str
    machine: str
    processor: Processor
    #: As the cgroup allows, like `free_bytes`.
    cores: int
    free_bytes: int
    #: The least of the cgroup and those above it; None without one.
    memory_limit_bytes: int | None
    #: Installed versions by package.
    packages: Mapping[str, str]
    #: Versions of the kernel's drivers by accelerator ("nvidia", "amd", "ascend"), if they are loaded.
    drivers: Mapping[str, str]
    #: State of each port of an RDMA device, as the kernel says it ("4: ACTIVE").
    rdma_ports: Mapping[str, str]
    memfd: str
    seals: str
    populate: str
    pidfd: str
    loopback: str
    #: None where there is no /dev/shm.
    dev_shm_free_bytes: int | None
    #: -1 means without a limit.
    memlock_bytes: int
    open_files: int
    #: Why each of `PORTS` cannot be listened on.
    ports: Mapping[int, str]
    clock_source: str
    #: None where the kernel does not say it.
    clock_synchronised: bool | None
    #: Variables of UCX and Mooncake.
    environment: Mapping[str, str]
    #: Sockets of processes that use Mooncake, as far as this user may look.
    mooncake_listeners: tuple[ListeningSocket, ...]
    #: As `TransportKinds.available` says it.
    transports: Mapping[str, str]
    automatic: tuple[str, ...]
    cache: CacheFolder


def gather(cache: str | None = None) -> HostFacts:
    """Look at this host. Nothing is started, and nothing stays behind."""
    host = this_host()
    return HostFacts(
        python=sys.version_info[:3],
        system=platform.system(),
        kernel=platform.release(),
        machine=platform.machine(),
        processor=this_processor(),
        cores=host.cores,
        free_bytes=host.free_bytes,
        memory_limit_bytes=min((group.limit_bytes for group in limited_groups()), default=None),
        packages=_packages(),
        drivers=_drivers(),
        rdma_ports=_rdma_ports(),
        memfd=_tried(_try_memfd),
        seals=_tried(_try_seals),
        populate=_tried(_try_populate),
        pidfd=_tried(_try_pidfd),
        loopback=_tried(_try_loopback),
        dev_shm_free_bytes=_dev_shm(),
        memlock_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        ports={port: _tried(partial(_try_port, port)) for port in PORTS},
        clock_source=_read("/sys/devices/system/clocksource/clocksource0/current_clocksource"),
        clock_synchronised=_clock_synchronised(),
        environment={
            k: v for k, v in sorted(os.environ.items()) if k.startswith(("UCX_", "MC_", "MOONCAKE_"))
        },
        mooncake_listeners=tuple(_mooncake_listeners()),
        transports=KINDS.available(),
        automatic=KINDS.automatic(),
        cache=_cache(cache),
    )


def _read(path: str | Path) -> str:
    """The content of a small file of the kernel; empty where this host has none."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _tried(attempt: Callable[[], None]) -> str:
    """Why `attempt` does not work here, or ""."""
    try:
        attempt()
    except OSError as exc:
        return exc.strerror or str(exc) or type(exc).__name__
    return ""


def _try_memfd() -> None:
    os.close(os.memfd_create("segue-doctor", os.MFD_CLOEXEC))


def _try_seals() -> None:
    fd = os.memfd_create("segue-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        fcntl.fcntl(fd, _F_ADD_SEALS, _SEAL_SHRINK)
    finally:
        os.close(fd)


def _try_populate() -> None:
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        page.madvise(_MADV_POPULATE_WRITE)


def _try_pidfd() -> None:
    os.close(os.pidfd_open(os.getpid()))


def _try_loopback() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()[:2], timeout=5.0) as client,
    ):
        server.settimeout(5.0)
        peer, _ = server.accept()
        with peer:
            client.sendall(b"segue")
            peer.settimeout(5.0)
            if not peer.recv(5):
                raise ConnectionResetError("the connection was closed")


def _try_port(port: int) -> None:
    socket.create_server(("127.0.0.1", port)).close()


def _packages() -> dict[str, str]:
    found = {}
    for name in (*ENGINE_PACKAGES, *(name for names in TRANSPORT_PACKAGES.values() for name in names)):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _drivers() -> dict[str, str]:
    found = {}
    if lines := _read("/proc/driver/nvidia/version").splitlines():
        words = lines[0].split()
        found["nvidia"] = next((word for word in words if word[0].isdigit()), "unknown version")
    if Path("/dev/kfd").exists():
        found["amd"] = _read("/sys/module/amdgpu/version") or "of this kernel"
    if Path("/dev/davinci_manager").exists():
        found["ascend"] = (
            _read("/usr/local/Ascend/driver/version.info").partition("\n")[0] or "unknown version"
        )
    return found


def _rdma_ports(devices: Path = Path("/sys/class/infiniband")) -> dict[str, str]:
    return {
        f"{state.parents[2].name}/{state.parent.name}": _read(state)
        for state in sorted(devices.glob("*/ports/*/state"))
    }


def _dev_shm() -> int | None:
    try:
        return shutil.disk_usage("/dev/shm").free
    except OSError:
        return None


def _clock_synchronised() -> bool | None:
    """Whether the kernel counts the wall clock as synchronised: `status` of `adjtimex(2)`, which is asked for
    nothing (`modes` 0) and so may be called by everybody."""
    # Words of eight bytes: modes, offset, freq, maxerror, esterror, status, …
    words = (ctypes.c_long * _TIMEX_WORDS)()
    try:
        adjtimex = ctypes.CDLL(None, use_errno=True).adjtimex
    except (OSError, AttributeError):
        return None
    if adjtimex(words) < 0:
        return None
    return not int(words[5]) & 0xFFFFFFFF & _STA_UNSYNC


def _mooncake_listeners() -> Iterable[ListeningSocket]:
    """Sockets on all interfaces of processes that have loaded Mooncake, which asks nobody for a key."""
    try:
        open_ = [
            c
            for c in psutil.net_connections("tcp")
            if c.status == psutil.CONN_LISTEN and c.pid and c.laddr and c.laddr.ip in _WILDCARDS
        ]
    except (psutil.Error, OSError):
        return
    for pid in sorted({c.pid for c in open_}):
        if "mooncake" in _read(f"/proc/{pid}/maps").lower():
            ports = sorted({c.laddr.port for c in open_ if c.pid == pid})
            for port in ports:
                yield ListeningSocket(pid, _read(f"/proc/{pid}/comm"), port)


def _cache(cache: str | None) -> CacheFolder:
    from segue.engine.models.model_store import cache_folder

    folder = Path(cache) if cache else cache_folder()
    there = next(p for p in (folder, *folder.absolute().parents) if p.is_dir())
    return CacheFolder(str(folder), os.access(there, os.W_OK), shutil.disk_usage(there).free)
