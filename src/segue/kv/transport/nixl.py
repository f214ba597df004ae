"""`nixl`: the bytes go by NVIDIA's NIXL and its UCX. `library` has everything else.

An agent per peer and direction, under a name that is never used again. A receiving agent has a progress
thread, which sleeps in the kernel until bytes come (it looks by itself every 10 ms, too); with UCX over TCP
that thread copies out of the socket into our memory, so the end of the agent is the end of what lands. A
writing agent has no thread: `library_out`, which owns it, moves it on each time it looks whether a post has
landed. NIXL can neither cancel nor revoke, and has no event for a post's end.

UCX listens without authentication, and encrypts nothing. Its own environment variables choose what it uses;
variables that the user has set are left alone. On a host without InfiniBand it is told TCP, and only the
interface that has the address of `--host`: shared memory is what `shm` is for, and a receiver that another
process writes into can prove nothing. On a host with InfiniBand nothing is set, UCX takes what is fastest,
and to close a receiving agent is not taken for a proof: only host memory over TCP was tried.

Memory of a device is registered as "VRAM", where UCX was built with CUDA; that was not tried on a GPU.
"""

from __future__ import annotations

import fcntl
import importlib
import importlib.util
import logging
import os
import runpy
import secrets
import socket
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from segue.kv.errors import TransferFailed
from segue.kv.ids import RankId
from segue.kv.transport.base import EventSink
from segue.kv.transport.library.library_api import Handle, Library, ReceivingEnd, WritingEnd
from segue.kv.transport.library.library_transport import LibraryTransport
from segue.kv.transport.memory.pool_memory import Memory, MemoryKind
from segue.kv.transport.options import TransportOptions
from segue.kv.transport.tcp.tcp_wire import PartRows, Rows

#: One package for each version of CUDA, the newest first. All of them move host memory.
_BUILDS = ("nixl_cu13", "nixl_cu12")
#: UCX may miss a wake-up (a comment in its back-end says so), then a receiving agent looks by itself.
LOOK_US = 10_000
#: With these alone, whatever lands in host memory is put there by a thread of the receiving agent.
_OURS = frozenset({"tcp", "cuda_copy"})
_SIOCGIFADDR = 0x8915

log = logging.getLogger("segue.nixl")


class NixlTransport(LibraryTransport):
    """`Transport` over NIXL; between hosts, and for memory of accelerators."""

    name = "nixl"
    preference = 25
    memory_kinds = frozenset(MemoryKind)

    def __init__(self, on_event: EventSink, options: TransportOptions) -> None:
        os.environ.update(missing(os.environ, options.host))
        if options.tls is not None:
            log.warning("nixl encrypts no KV; the certificates protect its control streams only")
        super().__init__(on_event, options, NixlLibrary())

    @classmethod
    def unusable(cls) -> str:
        """Looks for the library, and imports it."""
        if reason := super().unusable():
            return reason
        try:
            bindings()
        except ImportError as exc:
            return f"{exc}; pip install 'segue[nixl]'"
        return ""


def bindings() -> ModuleType:
    """NIXL's own module; the Python class around it would let the progress thread spin. The package `nixl`,
    which other engines import, chooses among the builds for versions of CUDA. Without it the build for
    torch's CUDA is taken, else any. Raises ImportError."""
    for package in ("nixl", f"nixl_cu{_cuda_of_torch()}", *_BUILDS):
        if importlib.util.find_spec(package) is not None:
            return importlib.import_module(f"{package}._bindings")
    raise ImportError("NIXL is not installed")


def _cuda_of_torch() -> str:
    """The major version of CUDA that the installed torch is built for, if any. Reads one file of torch:
    importing it takes a second, and a process with host memory may do without it."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return ""
    version = Path(torch.origin).with_name("version.py")
    cuda = runpy.run_path(str(version)).get("cuda") if version.is_file() else None
    return (cuda or "").partition(".")[0]


def missing(environment: Mapping[str, str], host: str, sysfs: Path = Path("/sys/class")) -> dict[str, str]:
    """Variables of UCX to set besides `environment` in a process that listens at `host`."""
    wanted = {"UCX_LOG_FILE": "stderr"}  # its own choice is the standard output
    if not any(sysfs.glob("infiniband/*")):
        gpu = Path("/dev/nvidiactl").exists()
        wanted["UCX_TLS"] = "tcp,cuda_copy" if gpu else "tcp"
        # Its modules for InfiniBand bring a second libnl; with another one in the process its end is a crash.
        wanted["UCX_MODULES"] = "cuda" if gpu else "none"
        if (interface := interface_of(host)) is not None:
            wanted["UCX_NET_DEVICES"] = interface
    return {name: value for name, value in wanted.items() if name not in environment}


def interface_of(host: str) -> str | None:
    """The network interface that has this IPv4 address, if one has it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:
                continue  # it has no IPv4 address
            if socket.inet_ntoa(answer[20:24]) == host:
                return name
    return None


class NixlLibrary(Library):
    """See this module."""

    def load(self) -> None:
        """The first agent loads the plug-ins, which takes seconds on some hosts."""
        _agent(bindings(), False)

    def receiving(self, peer: RankId, memory: Memory, greeting: bytes) -> ReceivingEnd:
        """See `Library.receiving`."""
        return NixlReceivingEnd(bindings(), memory)

    def writing(self, peer: RankId, memory: Memory, target: Memory, blob: bytes) -> WritingEnd:
        """See `Library.writing`."""
        return NixlWritingEnd(bindings(), memory, target, blob)


def _agent(nixl: ModuleType, progress: bool) -> Any:
    config = nixl.nixlAgentConfig()
    config.useProgThread = progress
    config.pthrDelay = LOOK_US
    agent = nixl.nixlAgent(f"segue-{secrets.token_hex(8)}", config)
    agent.createBackend("UCX", {})
    return agent


def _device(nixl: ModuleType, memory: Memory) -> tuple[Any, int]:
    """NIXL's kind of memory, and its number of the device. Raises TransferFailed for several devices."""
    devices = {region.device for region in memory.regions}
    device = devices.pop()
    if devices:
        raise TransferFailed("nixl moves the memory of one device at a time", retryable=False)
    if device == "cpu":
        return nixl.DRAM_SEG, 0
    number = device.rpartition(":")[2]
    return nixl.VRAM_SEG, int(number) if number.isdecimal() else 0


def _register(nixl: ModuleType, agent: Any, memory: Memory) -> tuple[Any, int]:
    kind, number = _device(nixl, memory)
    regions = [(region.address, region.nbytes, number, b"") for region in memory.regions]
    agent.registerMem(nixl.nixlRegDList(kind, regions), [])
    return kind, number


class NixlReceivingEnd(ReceivingEnd):
    """An agent with all of `memory` registered."""

    def __init__(self, nixl: ModuleType, memory: Memory) -> None:
        self._agent = _agent(nixl, True)
        kind, _ = _register(nixl, self._agent, memory)
        self._proves = kind == nixl.DRAM_SEG and set(os.environ.get("UCX_TLS", "").split(",")) <= _OURS
        self.blob = self._agent.getLocalMD()

    def close(self) -> bool:
        """See `ReceivingEnd.close`: the agent's last reference ends its thread and its connections."""
        last = sys.getrefcount(self._agent) == 2  # the attribute's, and this call's
        del self._agent
        return last and self._proves


class NixlWritingEnd(WritingEnd):
    """An agent with all of `memory` registered that knows one other."""

    def __init__(self, nixl: ModuleType, memory: Memory, target: Memory, blob: bytes) -> None:
        self._nixl = nixl
        self._memory = memory
        self._target = target
        self._to = _device(nixl, target)
        self._agent = _agent(nixl, False)
        self._from = _register(nixl, self._agent, memory)
        self._peer = self._agent.loadRemoteMD(blob).decode()
        self._agent.makeConnection(self._peer, [])

    def post(self, rows: PartRows) -> Handle:
        """See `WritingEnd.post`."""
        handle = self._agent.createXferReq(
            self._nixl.NIXL_WRITE,
            self._list(rows.source, self._memory, *self._from),
            self._list(rows.target, self._target, *self._to),
            self._peer,
            b"",
            [],
        )
        self._check(self._agent.postXferReq(handle, b""))
        return handle

    def done(self, handle: Handle) -> bool:
        """See `WritingEnd.done`. It also moves the agent's other posts on."""
        if not self._check(self._agent.getXferStatus(handle)):
            return False
        self._agent.releaseXferReq(handle)
        return True

    def close(self) -> bool:
        """See `WritingEnd.close`: only this agent's own connections read our memory."""
        last = sys.getrefcount(self._agent) == 2
        del self._agent
        return last

    def _list(self, rows: Rows, memory: Memory, kind: Any, number: int) -> Any:
        found = np.empty((len(rows), 3), np.uint64)
        found[:, :2] = rows
        found[:, 2] = number
        memory.to_addresses(found)
        return self._nixl.nixlXferDList(kind, found)

    def _check(self, status: Any) -> bool:
        """Whether it is the end. Raises TransferFailed when it is an end without success."""
        if status not in (self._nixl.NIXL_SUCCESS, self._nixl.NIXL_IN_PROG):
            raise TransferFailed(f"NIXL says {status} of a write")
        return bool(status == self._nixl.NIXL_SUCCESS)
