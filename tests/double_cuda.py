"""`cuda.bindings` as far as `cuda_ipc` uses it, with the same signatures. Device memory is memory of this
process; a stream is a thread that copies. `Faults` says what goes wrong."""

from __future__ import annotations

import ctypes
import enum
import queue
import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from segue.kv.transport.memory.pool_memory import Memory, Region

UUID = bytes(range(16))


class cudaError_t(enum.IntEnum):
    cudaSuccess = 0
    cudaErrorInvalidValue = 1
    cudaErrorNotReady = 600
    cudaErrorIllegalAddress = 700


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_NOT_FOUND = 500


class cudaMemcpySrcAccessOrder(enum.IntEnum):
    cudaMemcpySrcAccessOrderStream = 1


cudaStreamNonBlocking = 1
cudaEventDisableTiming = 2
cudaIpcMemLazyEnablePeerAccess = 1
_OK = cudaError_t.cudaSuccess


@dataclass
class Faults:
    """running: clear it, and streams stand still. fails: functions that return an error from now on.
    copies_fail: what is copied ends with an error. visible: GPUs of the process. no_handles: allocations of
    `cuMemCreate`. What was done: opened: allocations that are mapped. batches: rows of each copy. events: how
    many there are. streams: the GPU of each. ends: what of a path was ended, in order."""

    running: threading.Event = field(default_factory=threading.Event)
    fails: set[str] = field(default_factory=set)
    copies_fail: bool = False
    visible: list[bytes] = field(default_factory=lambda: [UUID])
    no_handles: bool = False
    opened: list[int] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    taken: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))  # one for each write
    events: int = 0
    streams: list[int] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)


FAULTS = Faults()
ALLOCATIONS: dict[int, int] = {}
#: Each thread has a current GPU, and begins with the first.
CURRENT = threading.local()


def reset() -> None:
    """Nothing is wrong, nothing is allocated."""
    FAULTS.__init__()  # type: ignore[misc]
    FAULTS.running.set()
    ALLOCATIONS.clear()


reset()


def device_memory(nbytes: int, device: str = "cuda:0", before: int = 4096) -> Memory:
    """Memory of a device that begins `before` bytes into its allocation."""
    array = np.zeros(before + nbytes, np.uint8)
    ALLOCATIONS[array.ctypes.data] = array.nbytes
    part = array[before:]
    return Memory([Region(part.ctypes.data, nbytes, device, owner=part)])


class cudaIpcMemHandle_t:
    def __init__(self) -> None:
        self.data = ctypes.create_string_buffer(64)

    def getPtr(self) -> int:
        return ctypes.addressof(self.data)


class cudaMemcpyAttributes:
    srcAccessOrder: cudaMemcpySrcAccessOrder


class Stream:
    """Does what it is given, in order."""

    def __init__(self) -> None:
        self.work: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.failed = False
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self) -> None:
        while (work := self.work.get()) is not None:
            if isinstance(work, Event):
                work.failed = self.failed
                work.reached.set()
                continue
            for to, at, n in work:
                FAULTS.running.wait(20)
                if FAULTS.copies_fail:
                    self.failed = True
                else:
                    ctypes.memmove(to, at, n)


class Event:
    def __init__(self) -> None:
        self.reached = threading.Event()
        self.failed = False


def cudaGetDeviceCount() -> tuple[cudaError_t, int]:
    return _OK, len(FAULTS.visible)


def cudaSetDevice(device: int) -> tuple[cudaError_t]:
    CURRENT.device = device
    return (_OK,)


def cudaGetDeviceProperties(device: int) -> tuple[cudaError_t, Any]:
    return _OK, SimpleNamespace(uuid=SimpleNamespace(bytes=FAULTS.visible[device]))


def cudaIpcGetMemHandle(devPtr: int) -> tuple[cudaError_t, cudaIpcMemHandle_t | None]:
    if FAULTS.no_handles or devPtr not in ALLOCATIONS:
        return cudaError_t.cudaErrorInvalidValue, None
    handle = cudaIpcMemHandle_t()
    ctypes.memmove(handle.getPtr(), devPtr.to_bytes(64, "little"), 64)
    return _OK, handle


def cudaIpcOpenMemHandle(handle: cudaIpcMemHandle_t, flags: int) -> tuple[cudaError_t, int | None]:
    base = int.from_bytes(ctypes.string_at(handle.getPtr(), 64), "little")
    if base not in ALLOCATIONS:
        return cudaError_t.cudaErrorInvalidValue, None
    assert flags == cudaIpcMemLazyEnablePeerAccess
    FAULTS.opened.append(base)
    return _OK, base


def cudaIpcCloseMemHandle(devPtr: int) -> tuple[cudaError_t]:
    FAULTS.opened.remove(devPtr)
    FAULTS.ends.append("mapping")
    return (_OK,)


def cudaStreamCreateWithFlags(flags: int) -> tuple[cudaError_t, Stream | None]:
    assert flags == cudaStreamNonBlocking
    if "cudaStreamCreateWithFlags" in FAULTS.fails:
        return cudaError_t.cudaErrorInvalidValue, None
    FAULTS.streams.append(getattr(CURRENT, "device", 0))
    return _OK, Stream()


def cudaStreamSynchronize(stream: Stream) -> tuple[cudaError_t]:
    event = Event()
    stream.work.put(event)
    event.reached.wait(20)
    FAULTS.ends.append("copies")
    return (cudaError_t.cudaErrorIllegalAddress if event.failed else _OK,)


def cudaStreamDestroy(stream: Stream) -> tuple[cudaError_t]:
    stream.work.put(None)
    stream.thread.join(20)
    FAULTS.ends.append("stream")
    return (_OK,)


def cudaMemcpyBatchAsync(
    dsts: list[int],
    srcs: list[int],
    sizes: list[int],
    count: int,
    attrs: list[cudaMemcpyAttributes],
    attrsIdxs: list[int],
    numAttrs: int,
    stream: Stream,
) -> tuple[cudaError_t]:
    fits = len(dsts) == len(srcs) == len(sizes) == count and len(attrs) == len(attrsIdxs) == numAttrs
    if not fits or "cudaMemcpyBatchAsync" in FAULTS.fails:
        return (cudaError_t.cudaErrorInvalidValue,)
    assert attrsIdxs == [0]
    assert attrs[0].srcAccessOrder == cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
    FAULTS.batches.append(count)
    FAULTS.taken.release()
    stream.work.put(list(zip(dsts, srcs, sizes, strict=True)))
    return (_OK,)


def cudaEventCreateWithFlags(flags: int) -> tuple[cudaError_t, Event]:
    assert flags == cudaEventDisableTiming
    FAULTS.events += 1
    return _OK, Event()


def cudaEventRecord(event: Event, stream: Stream) -> tuple[cudaError_t]:
    stream.work.put(event)
    return (_OK,)


def cudaEventQuery(event: Event) -> tuple[cudaError_t]:
    if not event.reached.is_set():
        return (cudaError_t.cudaErrorNotReady,)
    return (cudaError_t.cudaErrorIllegalAddress if event.failed else _OK,)


def cudaEventDestroy(event: Event) -> tuple[cudaError_t]:
    FAULTS.events -= 1
    return (_OK,)


def cuMemGetAddressRange(dptr: int) -> tuple[CUresult, int, int]:
    for base, nbytes in ALLOCATIONS.items():
        if base <= dptr < base + nbytes:
            return CUresult.CUDA_SUCCESS, base, nbytes
    return CUresult.CUDA_ERROR_NOT_FOUND, 0, 0


def modules(name: str) -> Any:
    """Both modules are this one."""
    import double_cuda

    assert name in ("cuda.bindings.runtime", "cuda.bindings.driver")
    return double_cuda
