"""The checks of `segue doctor` on this host: one function per problem, which looks at the host and judges.

`checks` calls all of them. None starts a process or leaves anything behind.
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
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Literal

import msgspec
import psutil

from segue.engine.cpu.processor import this_processor
from segue.kv import KINDS, USABLE
from segue.kv.model_weights import cache_folder
from segue.kv.transport.memory.host_memory import limited_groups
from segue.server.instance.host import this_host

#: Packages without which the engine cannot run.
ENGINE_PACKAGES = ("torch", "transformers", "safetensors", "msgspec", "uvloop")
#: Packages that a transport needs: the transport, and what its library is called by pip.
TRANSPORT_PACKAGES = {
    "nixl": ("nixl", "nixl-cu13", "nixl-cu12"),
    "mooncake": (
        "mooncake-transfer-engine",
        "mooncake-transfer-engine-non-cuda",
        "mooncake-transfer-engine-cuda13",
        "mooncake-transfer-engine-rocm",
        "mooncake-transfer-engine-npu",
    ),
    "mori": ("amd-mori",),
    "ascend": ("memfabric-hybrid",),
}
#: Ports that a deployment takes unless told otherwise, and the flag that takes another.
PORTS = {8000: "--port", 8998: "--bootstrap-port"}
GIB, MIB = 2**30, 2**20
#: Below these a default deployment of the default model does not fit.
MEMORY_BYTES = 3 * GIB
DISK_BYTES = 2 * GIB
OPEN_FILES = 1024
#: Bytes that other libraries (UCX, torch) put into /dev/shm.
DEV_SHM_BYTES = 64 * MIB
#: Reading these clocks is a system call or worse, thousands of times a second.
_SLOW_CLOCKS = ("hpet", "acpi_pm", "jiffies")
_ACCELERATORS = {"nvidia": "nixl", "amd": "mori", "ascend": "ascend"}
_MADV_POPULATE_WRITE = 23
_F_ADD_SEALS, _SEAL_SHRINK = 1033, 0x2
_STA_UNSYNC, _TIMEX_WORDS = 0x40, 32
_WILDCARDS = ("0.0.0.0", "::")


class Check(msgspec.Struct, frozen=True):
    """One checked property: `found` is the state, `mend` the remedy, if any. `warn`: it works, and something
    will be slow, full or missing. `wrong`: it does not work, or must not be used like this."""

    name: str
    state: Literal["ok", "warn", "wrong"]
    found: str
    mend: str = ""


def python() -> Check:
    """The interpreter."""
    found = sys.version_info[:3]
    text = f"{'.'.join(map(str, found))} on {platform.machine()}, {platform.system()}"
    if found >= (3, 11, 0):
        return Check("python", "ok", text)
    return Check("python", "wrong", text, "install Python 3.11 or newer")


def kernel() -> Check:
    """The operating system."""
    text = f"{platform.system()} {platform.release()}"
    if platform.system() != "Linux":
        return Check("kernel", "wrong", text, "segue needs Linux")
    return Check("kernel", "ok", text)


def cpu() -> Check:
    """The type that `--dtype auto` stands for here, and why."""
    processor = this_processor()
    text = f"{this_host().cores} cores; --dtype auto is {processor.best}: {processor.reason}"
    if not processor.is_slow("bfloat16"):
        return Check("cpu", "ok", text)
    mend = "in a fleet whose other processors do, give every instance --dtype float32"
    return Check("cpu", "warn", text, mend)


def memory() -> Check:
    """Room for weights and KV pools, within the cgroup and those above it."""
    free = this_host().free_bytes
    limit = min((group.limit_bytes for group in limited_groups()), default=None)
    text = f"{free / GIB:.1f} GiB free"
    text += f", the cgroup may have {limit / GIB:.1f} GiB" if limit is not None else ", no limit by a cgroup"
    if free >= MEMORY_BYTES:
        return Check("memory", "ok", text)
    return Check("memory", "warn", text, "set --kv-gib low, use --unified, or raise the cgroup's limit")


def open_files() -> Check:
    """How many descriptors a process may have: each session, connection and pool is one."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{allowed} open files allowed"
    if allowed >= OPEN_FILES:
        return Check("open files", "ok", text)
    return Check("open files", "warn", text, f"raise it: ulimit -n {OPEN_FILES}")


def shared_memory() -> Check:
    """The parts of `shm`: memfds that cannot shrink, and pidfds that signal the end of a peer."""

    def seal() -> None:
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        with os.fdopen(os.memfd_create("segue-doctor", flags)) as file:
            fcntl.fcntl(file, _F_ADD_SEALS, _SEAL_SHRINK)

    memfd = _tried(lambda: os.close(os.memfd_create("segue-doctor")))
    seals = _tried(seal)
    pidfd = _tried(lambda: os.close(os.pidfd_open(os.getpid())))
    tried = {"memfd_create": memfd, "seals of memfds": seals, "pidfd_open": pidfd}
    broken = [f"{what}: {why}" for what, why in tried.items() if why]
    if not broken:
        return Check("shared memory", "ok", "memfds, their seals and pidfds work; /dev/shm is not used")
    return Check(
        "shared memory",
        "wrong" if memfd or seals else "warn",
        "; ".join(broken),
        "let the sandbox or seccomp profile allow these calls; KV pools are memfds, and shm needs all three",
    )


def populate() -> Check:
    """Whether the kernel can map a peer's pool without touching each page."""

    def attempt() -> None:
        with mmap.mmap(-1, mmap.PAGESIZE) as page:
            page.madvise(_MADV_POPULATE_WRITE)

    why = _tried(attempt)
    if not why:
        return Check("MADV_POPULATE_WRITE", "ok", "works")
    text = f"{why}: pools are mapped page by page, which takes longer at the first meeting"
    return Check("MADV_POPULATE_WRITE", "warn", text, "Linux 5.14 or newer has it")


def dev_shm() -> Check:
    """Room in /dev/shm, which UCX and torch use."""
    try:
        free = shutil.disk_usage("/dev/shm").free
        text = f"{free / MIB:.0f} MiB free"
    except OSError:
        free, text = 0, "not there"
    if free >= DEV_SHM_BYTES:
        return Check("/dev/shm", "ok", f"{text}; segue itself does not use it")
    if not _installed("nixl"):
        return Check("/dev/shm", "ok", f"{text}; not needed")
    mend = "mount a larger one (docker run --shm-size 1g): UCX, below nixl, uses it"
    return Check("/dev/shm", "warn", text, mend)


def locked_memory() -> Check:
    """RDMA pins what it registers."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    text = "no limit" if limit < 0 else f"{limit / MIB:.0f} MiB may be locked"
    if limit < 0 or not _rdma_ports():
        return Check("locked memory", "ok", text)
    return Check(
        "locked memory",
        "warn",
        f"{text}; a pool that is registered for RDMA is locked as a whole",
        "ulimit -l unlimited, or LimitMEMLOCK=infinity in the service",
    )


def loopback() -> Check:
    """Connections to ourselves."""

    def attempt() -> None:
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

    why = _tried(attempt)
    if not why:
        return Check("loopback", "ok", "listening and connecting on 127.0.0.1 work")
    mend = "bring the interface up: ip link set lo up"
    return Check("loopback", "wrong", f"cannot connect to 127.0.0.1: {why}", mend)


def ports() -> Check:
    """The ports that a deployment takes unless told otherwise."""

    def listen(port: int) -> None:
        socket.create_server(("127.0.0.1", port)).close()

    taken = {port: why for port in PORTS if (why := _tried(listen, port))}
    if not taken:
        return Check("ports", "ok", f"{' and '.join(map(str, PORTS))} are free")
    text = ", ".join(f"{port}: {why}" for port, why in taken.items())
    flags = " and ".join(f"{PORTS[port]} in place of {port}" for port in taken)
    return Check("ports", "warn", text, f"unless that is a running segue, give another {flags}")


def clocks() -> Check:
    """The clock that deadlines are counted with, and the one that logs and certificates speak of."""
    source = _read("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    synchronised = _clock_synchronised()
    said = {True: "synchronised", False: "not synchronised", None: "not known to be synchronised"}
    text = f"{source or 'unknown'} clock; wall clock {said[synchronised]}"
    if source in _SLOW_CLOCKS:
        mend = "boot with clocksource=tsc, or kvm-clock in a virtual machine"
        return Check("clocks", "warn", f"{text}; this clock is slow to read", mend)
    if synchronised is False:
        mend = (
            "run chrony or systemd-timesyncd: logs and traces of several hosts, and TLS certificates, need it"
        )
        return Check("clocks", "warn", text, mend)
    return Check("clocks", "ok", text)


def accelerators() -> Check:
    """Accelerators that the kernel has a driver for."""
    found = _drivers()
    if not found:
        return Check("accelerators", "ok", "none; everything runs on CPUs")
    text = ", ".join(f"{name} driver {version}" for name, version in found.items())
    without = [name for name in found if not _installed(_ACCELERATORS[name])]
    if without:
        mend = "; ".join(
            f"{name}: pip install {TRANSPORT_PACKAGES[_ACCELERATORS[name]][0]}" for name in without
        )
        return Check("accelerators", "warn", f"{text}; no library to hand over their memory", mend)
    return Check("accelerators", "ok", text)


def torch_build() -> Check:
    """Whether torch can use the accelerator that is there."""
    version = _version("torch")
    if "nvidia" in _drivers() and version.endswith("+cpu"):
        return Check(
            "torch build", "warn", f"torch {version} beside an NVIDIA driver", "install a CUDA build"
        )
    return Check("torch build", "ok", f"torch {version}" if version else "no torch")


def rdma() -> Check:
    """RDMA devices and the state of their ports."""
    found = _rdma_ports()
    if not found:
        return Check("rdma", "ok", "no device; nixl and mooncake use tcp")
    text = ", ".join(f"{port} {state}" for port, state in found.items())
    if all("ACTIVE" in state for state in found.values()):
        return Check("rdma", "ok", text)
    return Check("rdma", "warn", text, "bring the port up (cable, switch, subnet manager), or leave it out")


def package(name: str) -> Check:
    """One package that the engine needs."""
    if version := _version(name):
        return Check(name, "ok", version)
    return Check(name, "wrong", "not installed", "pip install 'segue[engine]'")


def transport_libraries() -> Check:
    """The libraries of transports, with their versions."""
    names = [name for names in TRANSPORT_PACKAGES.values() for name in names]
    found = {name: version for name in names if (version := _version(name))}
    text = ", ".join(f"{name} {version}" for name, version in found.items())
    engines = [name for name in TRANSPORT_PACKAGES["mooncake"] if name in found]
    if len(engines) > 1:
        text += f": {' and '.join(engines)} overwrite each other's files"
        mend = "uninstall all of them, then install the one for this host"
        return Check("transport libraries", "wrong", text, mend)
    return Check("transport libraries", "ok", text or "none; shm and tcp need none")


def ucx() -> Check:
    """Settings of UCX, which `nixl` moves bytes with."""
    given = _variables("UCX_")
    text = " ".join(f"{k}={v}" for k, v in given.items()) or "no UCX_ variable is set"
    if set(given.get("UCX_TLS", "").split(",")) == {"tcp"} and _rdma_ports():
        return Check("ucx", "warn", f"{text}; the RDMA device is not used", "unset UCX_TLS")
    return Check("ucx", "ok", text)


def mooncake() -> Check:
    """Settings of Mooncake."""
    given = _variables("MC_", "MOONCAKE_")
    text = " ".join(f"{k}={v}" for k, v in given.items()) or "no MC_ or MOONCAKE_ variable is set"
    if given.get("MC_TCP_PROTO") == "1":
        return Check(
            "mooncake settings",
            "wrong",
            f"{text}; this protocol says that bytes have landed before they have",
            "unset MC_TCP_PROTO, on every host of the fleet",
        )
    if given.get("MC_FORCE_TCP") == "1" and _rdma_ports():
        return Check(
            "mooncake settings", "warn", f"{text}; the RDMA device is not used", "unset MC_FORCE_TCP"
        )
    return Check("mooncake settings", "ok", text)


def mooncake_listeners() -> Check:
    """Sockets on every interface of processes that have loaded Mooncake: it asks nobody for a key."""
    try:
        listening = {
            (c.pid, c.laddr.port)
            for c in psutil.net_connections("tcp")
            if c.status == psutil.CONN_LISTEN and c.pid and c.laddr and c.laddr.ip in _WILDCARDS
        }
    except (psutil.Error, OSError):
        listening = set()
    pids = {pid for pid, _ in listening}
    users = {pid for pid in pids if "mooncake" in _read(f"/proc/{pid}/maps").lower()}
    found = [(pid, port) for pid, port in sorted(listening) if pid in users]
    if not found:
        return Check("mooncake listeners", "ok", "none that this user can see")
    text = ", ".join(f"port {port} ({_read(f'/proc/{pid}/comm')} {pid})" for pid, port in found)
    return Check(
        "mooncake listeners",
        "warn",
        f"{text}: whoever reaches these can write into registered memory",
        "let a firewall or a network namespace admit the peers alone, or use another transport",
    )


def automatic_transports() -> Check:
    """Whether what `--transport auto` means works."""
    available = KINDS.available()
    reasons = {name: available[name] for name in KINDS.automatic()}
    broken = {name: why for name, why in reasons.items() if why != USABLE}
    usable = [name for name in reasons if name not in broken]
    if not broken:
        return Check("--transport auto", "ok", f"takes {', '.join(usable)}")
    text = "; ".join(f"{name} does not work: {why}" for name, why in broken.items())
    if usable:
        return Check("--transport auto", "warn", f"{text}; it takes {', '.join(usable)}", "see shared memory")
    return Check("--transport auto", "wrong", text, "see shared memory and loopback")


def model_cache(cache: str | None) -> Check:
    """The folder of downloaded and converted models."""
    folder = Path(cache) if cache else cache_folder()
    there = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    if not os.access(there, os.W_OK):
        return Check("model cache", "wrong", f"{folder} cannot be written", "choose another with --cache")
    free = shutil.disk_usage(there).free
    text = f"{folder}, {free / GIB:.1f} GiB free"
    if free < DISK_BYTES:
        return Check("model cache", "warn", text, "free some, or choose another with --cache")
    return Check("model cache", "ok", text)


def checks(cache: str | None) -> list[Check]:
    """All of them. `cache`: the folder of models, if not the usual one."""
    return [
        python(),
        kernel(),
        cpu(),
        memory(),
        open_files(),
        shared_memory(),
        populate(),
        dev_shm(),
        locked_memory(),
        loopback(),
        ports(),
        clocks(),
        accelerators(),
        torch_build(),
        rdma(),
        *(package(name) for name in ENGINE_PACKAGES),
        transport_libraries(),
        ucx(),
        mooncake(),
        mooncake_listeners(),
        automatic_transports(),
        model_cache(cache),
    ]


def _read(path: str | Path) -> str:
    """The content of a small file of the kernel; empty where this host has none."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _tried(attempt: Callable[..., None], *arguments: object) -> str:
    """Why `attempt` does not work here, or ""."""
    try:
        attempt(*arguments)
    except OSError as exc:
        return exc.strerror or str(exc) or type(exc).__name__
    return ""


def _version(package: str) -> str:
    """The version of a package; empty if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _installed(transport: str) -> bool:
    return any(_version(name) for name in TRANSPORT_PACKAGES[transport])


def _variables(*prefixes: str) -> dict[str, str]:
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(prefixes)}


def _drivers() -> dict[str, str]:
    """Versions of the kernel's drivers by accelerator, if they are loaded."""
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


def _rdma_ports() -> dict[str, str]:
    """State of each port of an RDMA device, as the kernel says it ("4: ACTIVE")."""
    return {
        f"{state.parents[2].name}/{state.parent.name}": _read(state)
        for state in sorted(Path("/sys/class/infiniband").glob("*/ports/*/state"))
    }


def _clock_synchronised() -> bool | None:
    """Whether the kernel counts the wall clock as synchronised, None if it does not say it: `status` of
    `adjtimex(2)`, which is asked for nothing (`modes` 0) and so may be called by everybody."""
    # Words of eight bytes: modes, offset, freq, maxerror, esterror, status, …
    words = (ctypes.c_long * _TIMEX_WORDS)()
    try:
        adjtimex = ctypes.CDLL(None, use_errno=True).adjtimex
    except (OSError, AttributeError):
        return None
    if adjtimex(words) < 0:
        return None
    return not int(words[5]) & 0xFFFFFFFF & _STA_UNSYNC
