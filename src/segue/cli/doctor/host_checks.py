"""The checks of `segue doctor` on a host's facts: one small function per problem."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

import msgspec

from segue.cli.doctor.host_facts import ENGINE_PACKAGES, PORTS, TRANSPORT_PACKAGES, HostFacts
from segue.kv import USABLE

GIB, MIB = 2**30, 2**20
#: Below these a default deployment of the default model does not fit.
MEMORY_BYTES = 3 * GIB
DISK_BYTES = 2 * GIB
OPEN_FILES = 1024
#: Bytes that other libraries (UCX, torch) put into /dev/shm.
DEV_SHM_BYTES = 64 * MIB
#: Reading these clocks is a system call or worse, thousands of times a second.
_SLOW_CLOCKS = ("hpet", "acpi_pm", "jiffies")
_ACCELERATORS = {"nvidia": "cuda_ipc", "amd": "mori", "ascend": "ascend"}


class Check(msgspec.Struct, frozen=True):
    """One checked property: `found` is the state, `mend` the remedy, if any. `warn`: it works, and something
    will be slow, full or missing. `wrong`: it does not work, or must not be used like this."""

    name: str
    state: Literal["ok", "warn", "wrong"]
    found: str
    mend: str = ""


def python(facts: HostFacts) -> Check:
    """The interpreter."""
    text = f"{'.'.join(map(str, facts.python))} on {facts.machine}, {facts.system}"
    if facts.python >= (3, 11, 0):
        return Check("python", "ok", text)
    return Check("python", "wrong", text, "install Python 3.11 or newer")


def kernel(facts: HostFacts) -> Check:
    """The operating system."""
    if facts.system != "Linux":
        return Check("kernel", "wrong", f"{facts.system} {facts.kernel}", "segue needs Linux")
    return Check("kernel", "ok", f"Linux {facts.kernel}")


def cpu(facts: HostFacts) -> Check:
    """The type that `--dtype auto` stands for here, and why."""
    processor = facts.processor
    text = f"{facts.cores} cores; --dtype auto is {processor.best}: {processor.reason}"
    if not processor.is_slow("bfloat16"):
        return Check("cpu", "ok", text)
    mend = "in a fleet whose other processors do, give every instance --dtype float32"
    return Check("cpu", "warn", text, mend)


def memory(facts: HostFacts) -> Check:
    """Room for weights and KV pools, within the cgroup."""
    limit = facts.memory_limit_bytes
    text = f"{facts.free_bytes / GIB:.1f} GiB free"
    text += f", the cgroup may have {limit / GIB:.1f} GiB" if limit is not None else ", no limit by a cgroup"
    if facts.free_bytes >= MEMORY_BYTES:
        return Check("memory", "ok", text)
    return Check("memory", "warn", text, "set --kv-gib low, use --unified, or raise the cgroup's limit")


def open_files(facts: HostFacts) -> Check:
    """How many descriptors a process may have: each session, connection and pool is one."""
    text = f"{facts.open_files} open files allowed"
    if facts.open_files >= OPEN_FILES:
        return Check("open files", "ok", text)
    return Check("open files", "warn", text, f"raise it: ulimit -n {OPEN_FILES}")


def shared_memory(facts: HostFacts) -> Check:
    """The parts of `shm`: memfds that cannot shrink, and pidfds that signal the end of a peer."""
    tried = {"memfd_create": facts.memfd, "seals of memfds": facts.seals, "pidfd_open": facts.pidfd}
    broken = [f"{what}: {why}" for what, why in tried.items() if why]
    if not broken:
        return Check("shared memory", "ok", "memfds, their seals and pidfds work; /dev/shm is not used")
    return Check(
        "shared memory",
        "wrong" if facts.memfd or facts.seals else "warn",
        "; ".join(broken),
        "let the sandbox or seccomp profile allow these calls; KV pools are memfds, and shm needs all three",
    )


def populate(facts: HostFacts) -> Check:
    """Whether the kernel can map a peer's pool without touching each page."""
    if not facts.populate:
        return Check("MADV_POPULATE_WRITE", "ok", "works")
    text = f"{facts.populate}: pools are mapped page by page, which takes longer at the first meeting"
    return Check("MADV_POPULATE_WRITE", "warn", text, "Linux 5.14 or newer has it")


def dev_shm(facts: HostFacts) -> Check:
    """Room in /dev/shm, which UCX and torch use."""
    free = facts.dev_shm_free_bytes
    if free is not None and free >= DEV_SHM_BYTES:
        return Check("/dev/shm", "ok", f"{free / MIB:.0f} MiB free; segue itself does not use it")
    text = "not there" if free is None else f"{free / MIB:.0f} MiB free"
    needs = _installed(facts, "nixl")
    mend = "mount a larger one (docker run --shm-size 1g): UCX, below nixl, uses it"
    return Check("/dev/shm", "warn", text, mend) if needs else Check("/dev/shm", "ok", f"{text}; not needed")


def locked_memory(facts: HostFacts) -> Check:
    """RDMA pins what it registers."""
    limit = facts.memlock_bytes
    text = "no limit" if limit < 0 else f"{limit / MIB:.0f} MiB may be locked"
    if limit < 0 or not facts.rdma_ports:
        return Check("locked memory", "ok", text)
    return Check(
        "locked memory",
        "warn",
        f"{text}; a pool that is registered for RDMA is locked as a whole",
        "ulimit -l unlimited, or LimitMEMLOCK=infinity in the service",
    )


def loopback(facts: HostFacts) -> Check:
    """Connections to ourselves."""
    if not facts.loopback:
        return Check("loopback", "ok", "listening and connecting on 127.0.0.1 work")
    mend = "bring the interface up: ip link set lo up"
    return Check("loopback", "wrong", f"cannot connect to 127.0.0.1: {facts.loopback}", mend)


def ports(facts: HostFacts) -> Check:
    """The ports that a deployment takes unless told otherwise."""
    taken = {port: why for port, why in facts.ports.items() if why}
    if not taken:
        return Check("ports", "ok", f"{' and '.join(map(str, PORTS))} are free")
    text = ", ".join(f"{port}: {why}" for port, why in taken.items())
    flags = " and ".join(f"{PORTS[port]} in place of {port}" for port in taken)
    return Check("ports", "warn", text, f"unless that is a running segue, give another {flags}")


def clocks(facts: HostFacts) -> Check:
    """The clock that deadlines are counted with, and the one that logs and certificates speak of."""
    synchronised = facts.clock_synchronised
    said = {True: "synchronised", False: "not synchronised", None: "not known to be synchronised"}
    text = f"{facts.clock_source or 'unknown'} clock; wall clock {said[synchronised]}"
    if facts.clock_source in _SLOW_CLOCKS:
        mend = "boot with clocksource=tsc, or kvm-clock in a virtual machine"
        return Check("clocks", "warn", f"{text}; this clock is slow to read", mend)
    if synchronised is False:
        mend = (
            "run chrony or systemd-timesyncd: logs and traces of several hosts, and TLS certificates, need it"
        )
        return Check("clocks", "warn", text, mend)
    return Check("clocks", "ok", text)


def drivers(facts: HostFacts) -> Check:
    """Accelerators that the kernel has a driver for."""
    if not facts.drivers:
        return Check("accelerators", "ok", "none; everything runs on CPUs")
    text = ", ".join(f"{name} driver {version}" for name, version in facts.drivers.items())
    without = [name for name in facts.drivers if not _installed(facts, _ACCELERATORS[name])]
    if without:
        mend = "; ".join(f"{name}: {_pip(_ACCELERATORS[name])}" for name in without)
        return Check("accelerators", "warn", f"{text}; no library to hand over their memory", mend)
    return Check("accelerators", "ok", text)


def torch_build(facts: HostFacts) -> Check:
    """Whether torch can use the accelerator that is there."""
    version = facts.packages.get("torch", "")
    if "nvidia" in facts.drivers and version.endswith("+cpu"):
        return Check(
            "torch build", "warn", f"torch {version} beside an NVIDIA driver", "install a CUDA build"
        )
    return Check("torch build", "ok", f"torch {version}" if version else "no torch")


def rdma(facts: HostFacts) -> Check:
    """RDMA devices and the state of their ports."""
    if not facts.rdma_ports:
        return Check("rdma", "ok", "no device; nixl and mooncake use tcp")
    text = ", ".join(f"{port} {state}" for port, state in facts.rdma_ports.items())
    if any("ACTIVE" not in state for state in facts.rdma_ports.values()):
        return Check(
            "rdma", "warn", text, "bring the port up (cable, switch, subnet manager), or leave it out"
        )
    return Check("rdma", "ok", text)


def package(name: str) -> Callable[[HostFacts], Check]:
    """The check of one package that the engine needs."""

    def check(facts: HostFacts) -> Check:
        if version := facts.packages.get(name):
            return Check(name, "ok", version)
        return Check(name, "wrong", "not installed", "pip install 'segue[engine]'")

    return check


def transport_libraries(facts: HostFacts) -> Check:
    """The libraries of transports, with their versions."""
    found = [
        f"{name} {facts.packages[name]}"
        for names in TRANSPORT_PACKAGES.values()
        for name in names
        if name in facts.packages
    ]
    engines = [name for name in TRANSPORT_PACKAGES["mooncake"] if name in facts.packages]
    if len(engines) > 1:
        text = f"{', '.join(found)}: {' and '.join(engines)} overwrite each other's files"
        mend = "uninstall all of them, then install the one for this host"
        return Check("transport libraries", "wrong", text, mend)
    return Check("transport libraries", "ok", ", ".join(found) or "none; shm and tcp need none")


def ucx(facts: HostFacts) -> Check:
    """Settings of UCX, which `nixl` moves bytes with."""
    given = {k: v for k, v in facts.environment.items() if k.startswith("UCX_")}
    text = " ".join(f"{k}={v}" for k, v in given.items()) or "no UCX_ variable is set"
    slow = set(given.get("UCX_TLS", "").split(",")) == {"tcp"} and facts.rdma_ports
    if slow:
        return Check("ucx", "warn", f"{text}; the RDMA device is not used", "unset UCX_TLS")
    return Check("ucx", "ok", text)


def mooncake(facts: HostFacts) -> Check:
    """Settings of Mooncake."""
    given = {k: v for k, v in facts.environment.items() if not k.startswith("UCX_")}
    text = " ".join(f"{k}={v}" for k, v in given.items()) or "no MC_ or MOONCAKE_ variable is set"
    if given.get("MC_TCP_PROTO") == "1":
        return Check(
            "mooncake settings",
            "wrong",
            f"{text}; this protocol says that bytes have landed before they have",
            "unset MC_TCP_PROTO, on every host of the fleet",
        )
    if given.get("MC_FORCE_TCP") == "1" and facts.rdma_ports:
        return Check(
            "mooncake settings", "warn", f"{text}; the RDMA device is not used", "unset MC_FORCE_TCP"
        )
    return Check("mooncake settings", "ok", text)


def mooncake_listeners(facts: HostFacts) -> Check:
    """Sockets that Mooncake opened on every interface: it asks nobody for a key."""
    if not facts.mooncake_listeners:
        return Check("mooncake listeners", "ok", "none that this user can see")
    text = ", ".join(f"port {s.port} ({s.process} {s.pid})" for s in facts.mooncake_listeners)
    return Check(
        "mooncake listeners",
        "warn",
        f"{text}: whoever reaches these can write into registered memory",
        "let a firewall or a network namespace admit the peers alone, or use another transport",
    )


def automatic_transports(facts: HostFacts) -> Check:
    """Whether what `--transport auto` means works."""
    reasons = {name: facts.transports[name] for name in facts.automatic}
    broken = {name: why for name, why in reasons.items() if why != USABLE}
    usable = [name for name in reasons if name not in broken]
    if not broken:
        return Check("--transport auto", "ok", f"takes {', '.join(usable)}")
    text = "; ".join(f"{name} does not work: {why}" for name, why in broken.items())
    if usable:
        return Check("--transport auto", "warn", f"{text}; it takes {', '.join(usable)}", "see shared memory")
    return Check("--transport auto", "wrong", text, "see shared memory and loopback")


def model_cache(facts: HostFacts) -> Check:
    """The folder of downloaded and converted models."""
    cache = facts.cache
    text = f"{cache.folder}, {cache.free_bytes / GIB:.1f} GiB free"
    if not cache.writable:
        return Check(
            "model cache", "wrong", f"{cache.folder} cannot be written", "choose another with --cache"
        )
    if cache.free_bytes < DISK_BYTES:
        return Check("model cache", "warn", text, "free some, or choose another with --cache")
    return Check("model cache", "ok", text)


CHECKS: tuple[Callable[[HostFacts], Check], ...] = (
    python,
    kernel,
    cpu,
    memory,
    open_files,
    shared_memory,
    populate,
    dev_shm,
    locked_memory,
    loopback,
    ports,
    clocks,
    drivers,
    torch_build,
    rdma,
    *(package(name) for name in ENGINE_PACKAGES),
    transport_libraries,
    ucx,
    mooncake,
    mooncake_listeners,
    automatic_transports,
    model_cache,
)


def checks(facts: HostFacts) -> list[Check]:
    """All of them."""
    return [check(facts) for check in CHECKS]


def wrong(found: Iterable[Check]) -> bool:
    """Whether any of `found` is wrong."""
    return any(check.state == "wrong" for check in found)


def _installed(facts: HostFacts, transport: str) -> bool:
    return any(name in facts.packages for name in TRANSPORT_PACKAGES[transport])


def _pip(transport: str) -> str:
    return f"pip install {TRANSPORT_PACKAGES[transport][0]}"
