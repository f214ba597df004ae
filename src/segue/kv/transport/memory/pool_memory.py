"""The memory of a rank: regions that somebody allocated, in one flat space of offsets.

A region is any contiguous memory that KV lies in: a memfd from `allocate`, the memory of an engine's own
tensors, or a device's. Nothing is copied; a region holds a reference to the memory's owner. Which of it a
transport can register, its `memory_kinds` say.

`allocate` gives memory that peers of one host can map: an anonymous memfd, never a name in a file system.
A process with the descriptor of a pool can write anywhere in it, and can have the kernel empty parts of it
(`fallocate` with FALLOC_FL_PUNCH_HOLE, which is a write of zeros: no seal forbids it that lets a peer write).
It can not shrink or grow it, so no mapping ever ends in SIGBUS for that, and can not seal it, so others can
still map it. A page that was emptied is taken from the host again, by whoever touches it first.
"""

from __future__ import annotations

import enum
import errno
import fcntl
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from segue.kv.errors import ConfigError, OutOfCapacity
from segue.kv.layout.spec import PoolSpec, region_starts
from segue.kv.transport.memory.host_memory import available_bytes

_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW, _SEAL_FUTURE_WRITE = 0x1, 0x2, 0x4, 0x10
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_POPULATE_BYTES = 64 * 2**20


def sealed(fd: int) -> bool:
    """True when nobody can shrink this memfd: a mapping of it then never raises SIGBUS."""
    return bool(fcntl.fcntl(fd, _F_GET_SEALS) & _SEAL_SHRINK)


#: Bytes of this process, writable.
HostBytes = mmap.mmap | memoryview


class MemoryKind(enum.StrEnum):
    """How memory can be reached, which decides which transports can register it."""

    SHARED = "shared"  #: host memory with a descriptor that other processes of this host can map
    HOST = "host"  #: other host memory, pinned or not: this process reads and writes it by its address
    DEVICE = "device"  #: memory of an accelerator


@dataclass(frozen=True, slots=True)
class Region:
    """`nbytes` of memory at `address` of this process (or of `device`), whoever allocated it.

    `device` is "cpu", for pinned memory too, or a device as torch names it ("cuda:0"). `fd` is the memfd
    whose first `nbytes` it maps, if there is one. `owner` is kept: the memory must live as long as it does.
    A tensor of torch is `Region(t.data_ptr(), t.nbytes, str(t.device), owner=t)`, if it is contiguous.
    """

    address: int
    nbytes: int
    device: str = "cpu"
    fd: int | None = None
    owner: object = field(default=None, repr=False, compare=False)

    @property
    def kind(self) -> MemoryKind:
        """How it can be reached."""
        if self.device != "cpu":
            return MemoryKind.DEVICE
        return MemoryKind.HOST if self.fd is None else MemoryKind.SHARED

    @property
    def buffer(self) -> HostBytes:
        """Its bytes, writable and where they lie. Raises ConfigError for memory of a device."""
        if isinstance(self.owner, mmap.mmap):
            return self.owner  # which cannot be unmapped while somebody uses it
        if self.kind is MemoryKind.DEVICE:
            raise ConfigError(
                f"memory of {self.device} cannot be read by address; copy it with its own library"
            )
        return np.asarray(_Bytes(self)).data


class _Bytes:
    """The buffer that numpy makes an array from; the array keeps it, and with it the owner."""

    def __init__(self, region: Region) -> None:
        self.region = region
        self.__array_interface__ = {
            "version": 3,
            "data": (region.address, False),
            "shape": (region.nbytes,),
            "typestr": "|u1",
        }


def host_region(buffer: mmap.mmap | bytearray | memoryview | npt.NDArray[Any]) -> Region:
    """The memory of `buffer`, where it lies: a numpy array (of any strides: from its lowest byte to its
    highest), a mapping or a bytearray. Raises ConfigError if it is read-only."""
    array = buffer if isinstance(buffer, np.ndarray) else np.frombuffer(buffer, np.uint8)
    if not array.flags.writeable:
        raise ConfigError("read-only memory cannot be registered: KV is written into it")
    low, high = np.lib.array_utils.byte_bounds(array)
    return Region(low, high - low, owner=buffer)


class Memory:
    """All memory of a rank: its `regions`, one after the other in one flat space of offsets. `buffer` is the
    memory of a single region, for `numpy.frombuffer` or `torch.frombuffer`.

    Blocks, pools and grants name bytes by their offset in this space. Region `i` begins at `starts[i]`
    (`layout.spec.region_starts`); between two regions there is a gap, so that no range lies in both.
    """

    def __init__(self, regions: Sequence[Region]) -> None:
        if not regions or min(region.nbytes for region in regions) < 1:
            raise ConfigError("the memory of a rank needs at least one region, and none without bytes")
        self.regions = tuple(regions)
        self.starts = region_starts([region.nbytes for region in regions])
        self.nbytes = self.starts[-1] + regions[-1].nbytes
        self._starts = np.array(self.starts, np.uint64)
        self._ends = self._starts + np.array([region.nbytes for region in regions], np.uint64)
        self._shifts = np.array([region.address for region in regions], np.uint64) - self._starts

    @property
    def only(self) -> Region:
        """Its region, where there is just one. Raises ConfigError."""
        if len(self.regions) > 1:
            raise ConfigError(f"one region of memory is needed here, not {len(self.regions)}")
        return self.regions[0]

    @property
    def buffer(self) -> HostBytes:
        """The bytes of its only region. Raises ConfigError."""
        return self.only.buffer

    @cached_property
    def buffers(self) -> list[HostBytes]:
        """The bytes of each region. Raises ConfigError where one is a device's."""
        return [region.buffer for region in self.regions]

    def check_pool(self, spec: PoolSpec) -> None:
        """Raises ConfigError unless it is the memory that `spec` describes: the same regions, or for a
        layer-major pool one that is large enough."""
        sizes = tuple(region.nbytes for region in self.regions)
        if not spec.planes and (len(sizes) > 1 or sizes[0] < spec.nbytes):
            raise ConfigError(f"the pool needs {spec.nbytes} bytes in one region, not regions of {sizes}")
        if spec.planes and spec.regions != sizes:
            raise ConfigError(
                f"the pool is described in regions of {spec.regions} bytes, its memory has {sizes}"
            )

    def check_kinds(self, transport: str, kinds: frozenset[MemoryKind]) -> None:
        """Raises ConfigError, with what to do, unless a transport that can register `kinds` can register
        all of it."""
        for region in self.regions:
            if region.kind not in kinds:
                what = (
                    f"memory of {region.device}"
                    if region.kind is MemoryKind.DEVICE
                    else "memory without a memfd"
                )
                raise ConfigError(
                    f"{transport} cannot register {what}, only {' or '.join(sorted(kinds))} memory; "
                    + _ADVICE[region.kind]
                )

    def holds(self, offsets: npt.NDArray[np.uint64], nbytes: npt.NDArray[np.uint64]) -> bool:
        """True when each range (its offset, its bytes) lies inside one region."""
        at, _ = self.places(offsets)
        return bool((offsets + nbytes <= self._ends[at]).all())

    def places(self, offsets: npt.NDArray[np.uint64]) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.uint64]]:
        """The region that each offset lies in, and the offset from that region's first byte."""
        at = self._starts.searchsorted(offsets, "right") - 1
        return at, offsets - self._starts[at]

    def to_addresses(self, rows: npt.NDArray[np.uint64]) -> None:
        """Turn the first column of `rows`, offsets in this space, into addresses of this process."""
        if len(self.regions) == 1:
            rows[:, 0] += self._shifts[0]
        else:
            rows[:, 0] += self._shifts[self._starts.searchsorted(rows[:, 0], "right") - 1]

    def close(self) -> None:
        """Unmap and close what `allocate` made; the memory of others is theirs. Raises BufferError while a
        tensor or view still uses a mapping."""
        for region in self.regions:
            if isinstance(region.owner, mmap.mmap) and region.fd is not None:
                region.owner.close()
                os.close(region.fd)


_ADVICE = {
    MemoryKind.DEVICE: "keep the pool in host memory",
    MemoryKind.HOST: "let segue.kv.transport.memory.pool_memory.allocate allocate it, or use tcp",
    MemoryKind.SHARED: "use another transport",
}


def allocate(nbytes: int, name: str = "segue-kv") -> Memory:
    """One zeroed region of `nbytes` (rounded up to whole pages) with a memfd called `name`, all of it
    resident. The memory lives as long as the returned object or a buffer of it.

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
        mapping = mmap.mmap(fd, nbytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)
    except OSError as exc:
        os.close(fd)
        raise OutOfCapacity(
            f"cannot allocate {nbytes / 2**30:.2f} GiB for the KV pool: {exc.strerror}; lower --kv-gib"
        ) from exc
    return Memory([replace(host_region(mapping), fd=fd)])


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
