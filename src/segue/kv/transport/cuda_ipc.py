"""`cuda_ipc`: from one GPU's memory into another process's, on one host. Not verified on hardware; written
from cuda-bindings 13.5.0 and NVIDIA's manual of the runtime.

The receiver exports each region: a handle of the whole allocation that it lies in, the offset in it, and
the UUID of the GPU, for numbers differ with CUDA_VISIBLE_DEVICES. The writer maps it and copies in batches
on a stream of its own. Memory of `cuMemCreate` has no such handle: torch must not use
`expandable_segments`.

`write` copies what is in memory when it is called: who computes on other streams waits for them first. That
bytes have landed is visible to work that is given to the peer's GPU after its owner heard of it.

Proof of an end: the event behind a batch is its end. A writer that can synchronise its stream reads nothing
any more. The receiver can revoke nothing, and whether a copy still runs when the writer's process has ended
is not established, so a receiving end proves nothing.
"""

from __future__ import annotations

import ctypes
import threading
from dataclasses import replace
from typing import Annotated, Any

import msgspec

from segue.kv.errors import DECODE_ERRORS, ConfigError, PeerRefused, TransferFailed
from segue.kv.ids import RankId
from segue.kv.transport.base import Endpoint, EventSink
from segue.kv.transport.library.library_api import Handle, Library, ReceivingEnd, WritingEnd
from segue.kv.transport.library.library_modules import Modules, device_number, import_module, missing
from segue.kv.transport.library.library_transport import LibraryTransport
from segue.kv.transport.memory.pool_memory import Memory, MemoryKind
from segue.kv.transport.options import TransportOptions
from segue.kv.transport.tcp.tcp_wire import PartRows

_RUNTIME, _DRIVER = "cuda.bindings.runtime", "cuda.bindings.driver"
_HANDLE_BYTES = 64


class Exported(msgspec.Struct, frozen=True, array_like=True):
    """One region: the handle of its allocation, and where it begins in it."""

    handle: Annotated[bytes, msgspec.Meta(min_length=_HANDLE_BYTES, max_length=_HANDLE_BYTES)]
    offset: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class CudaBlob(msgspec.Struct, frozen=True, array_like=True):
    """How a writer reaches a receiver: its GPU, and each region."""

    uuid: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    regions: Annotated[list[Exported], msgspec.Meta(min_length=1, max_length=65536)]


class CudaIpcTransport(LibraryTransport):
    """See this module and `library`."""

    name = "cuda_ipc"
    preference = 5
    memory_kinds = frozenset({MemoryKind.DEVICE})

    def __init__(
        self, on_event: EventSink, options: TransportOptions, modules: Modules = import_module
    ) -> None:
        self._cuda = CudaLibrary(modules)
        super().__init__(on_event, options, self._cuda)

    @classmethod
    def unusable(cls) -> str:
        """The package, the driver or a GPU is missing."""
        reason = super().unusable() or missing(_RUNTIME, "cuda-bindings")
        if reason:
            return reason
        runtime = import_module(_RUNTIME)
        error, count = runtime.cudaGetDeviceCount()
        if error != runtime.cudaError_t.cudaSuccess:
            return f"the CUDA driver cannot be used: {error.name}"
        return "" if count else "no GPU is visible"

    def register(self, memory: Memory) -> Endpoint:
        """See `Transport.register`. Raises ConfigError for memory that is not of one GPU or that cannot be
        exported."""
        if len({device_number(region.device, "cuda") for region in memory.regions}) > 1:
            raise ConfigError("cuda_ipc registers the memory of one GPU; give each GPU a rank of its own")
        self._cuda.export(memory)
        return super().register(memory)


class CudaLibrary(Library):
    """`modules` imports the bindings."""

    def __init__(self, modules: Modules) -> None:
        self._modules = modules
        self._lock = threading.Lock()
        self._blob = b""

    def export(self, memory: Memory) -> None:
        """Make handles of all regions. Raises ConfigError."""
        self.runtime, self.driver = self._modules(_RUNTIME), self._modules(_DRIVER)
        self.number = device_number(memory.regions[0].device, "cuda")
        self.call("cudaSetDevice", self.number)
        (properties,) = self.call("cudaGetDeviceProperties", self.number)
        exported = []
        for region in memory.regions:
            try:
                base, _ = self.allocation(region.address)
                (handle,) = self.call("cudaIpcGetMemHandle", base)
            except TransferFailed as exc:
                raise ConfigError(
                    f"the memory at {region.address:#x} of {region.device} cannot be shared with other "
                    f"processes: {exc.info.text}; if torch allocated it, unset expandable_segments in "
                    "PYTORCH_CUDA_ALLOC_CONF"
                ) from exc
            data = ctypes.string_at(handle.getPtr(), _HANDLE_BYTES)
            exported.append(Exported(data, region.address - base))
        self._blob = msgspec.msgpack.encode(CudaBlob(bytes(properties.uuid.bytes), exported))

    def call(self, name: str, *arguments: Any) -> tuple[Any, ...]:
        """The results of the runtime's function `name` besides its error. Raises TransferFailed for an
        error."""
        error, *found = getattr(self.runtime, name)(*arguments)
        if error != self.runtime.cudaError_t.cudaSuccess:
            raise TransferFailed(f"{name} failed: {error.name}")
        return tuple(found)

    def allocation(self, address: int) -> tuple[int, int]:
        """The first byte of the allocation that `address` lies in, and its size. Raises TransferFailed."""
        error, base, nbytes = self.driver.cuMemGetAddressRange(address)
        if error != self.driver.CUresult.CUDA_SUCCESS:
            raise TransferFailed(f"cuMemGetAddressRange failed: {error.name}")
        return int(base), int(nbytes)

    def receiving(self, peer: RankId, memory: Memory, greeting: bytes) -> ReceivingEnd:
        """See `Library.receiving`."""
        return CudaReceivingEnd(self._blob)

    def writing(self, peer: RankId, memory: Memory, target: Memory, blob: bytes) -> WritingEnd:
        """See `Library.writing`. Its thread belongs to this path, so that its current device is ours."""
        try:
            told = msgspec.msgpack.decode(blob, type=CudaBlob)
        except DECODE_ERRORS as exc:
            raise PeerRefused(f"unreadable handles of GPU memory: {exc}") from exc
        if len(told.regions) != len(target.regions):
            raise PeerRefused(f"{peer} exports {len(told.regions)} regions and has {len(target.regions)}")
        if told.uuid not in self._visible():
            raise PeerRefused(
                f"the GPU of {peer} is not visible to this process: it is on another host, or "
                "CUDA_VISIBLE_DEVICES leaves it out here"
            )
        self.call("cudaSetDevice", self.number)
        return CudaWritingEnd(self, memory, target, told.regions)

    def _visible(self) -> set[bytes]:
        (count,) = self.call("cudaGetDeviceCount")
        found = [self.call("cudaGetDeviceProperties", number)[0] for number in range(count)]
        return {bytes(properties.uuid.bytes) for properties in found}


class CudaReceivingEnd(ReceivingEnd):
    """Nothing is made for one peer alone."""

    def __init__(self, blob: bytes) -> None:
        self.blob = blob

    def close(self) -> bool:
        """Proves nothing: what was exported cannot be taken back."""
        return False


class CudaWritingEnd(WritingEnd):
    """A stream that copies into one peer's regions, which are mapped here."""

    def __init__(self, library: CudaLibrary, memory: Memory, target: Memory, regions: list[Exported]) -> None:
        self._call = library.call
        self._runtime = runtime = library.runtime
        self._memory = memory
        self._opened: dict[bytes, int] = {}
        mapped = []
        try:
            for region, exported in zip(target.regions, regions, strict=True):
                base = self._open(exported.handle)
                _, nbytes = library.allocation(base)
                if exported.offset + region.nbytes > nbytes:
                    raise PeerRefused(f"a region of {region.nbytes} bytes ends outside its GPU allocation")
                mapped.append(replace(region, address=base + exported.offset))
            (self._stream,) = self._call("cudaStreamCreateWithFlags", runtime.cudaStreamNonBlocking)
        except BaseException:
            self._unmap()
            raise
        self._target = Memory(mapped)
        self._order = runtime.cudaMemcpyAttributes()
        self._order.srcAccessOrder = runtime.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream

    def _open(self, handle: bytes) -> int:
        if handle not in self._opened:
            theirs = self._runtime.cudaIpcMemHandle_t()
            ctypes.memmove(theirs.getPtr(), handle, _HANDLE_BYTES)
            (base,) = self._call("cudaIpcOpenMemHandle", theirs, self._runtime.cudaIpcMemLazyEnablePeerAccess)
            self._opened[handle] = int(base)
        return self._opened[handle]

    def post(self, rows: PartRows) -> Handle:
        """See `WritingEnd.post`."""
        source, target = rows.source.copy(), rows.target.copy()
        self._memory.to_addresses(source)
        self._target.to_addresses(target)
        self._call(
            "cudaMemcpyBatchAsync",
            target[:, 0].tolist(),
            source[:, 0].tolist(),
            source[:, 1].tolist(),
            len(source),
            [self._order],
            [0],
            1,
            self._stream,
        )
        (event,) = self._call("cudaEventCreateWithFlags", self._runtime.cudaEventDisableTiming)
        self._call("cudaEventRecord", event, self._stream)
        return event

    def done(self, handle: Handle) -> bool:
        """See `WritingEnd.done`."""
        (error,) = self._runtime.cudaEventQuery(handle)
        if error == self._runtime.cudaError_t.cudaErrorNotReady:
            return False
        if error != self._runtime.cudaError_t.cudaSuccess:
            raise TransferFailed(f"a copy failed: {error.name}")
        self._call("cudaEventDestroy", handle)
        return True

    def close(self) -> bool:
        """Wait for the stream, which takes milliseconds; then nothing reads our memory."""
        self._call("cudaStreamSynchronize", self._stream)
        self._call("cudaStreamDestroy", self._stream)
        self._unmap()
        return True

    def _unmap(self) -> None:
        while self._opened:
            self._call("cudaIpcCloseMemHandle", self._opened.popitem()[1])
