"""`ascend`: memfabric_hybrid between NPUs, by their SDMA engines. Not verified on hardware; written from
the 1.3.0 package, from sources of older and newer versions, and from what vLLM's Ascend plug-in does with
it.

A process has one engine and the engine has one role for its life: `Decode` is written to, and runs the
store in which its writers find its memory; `Prefill` writes, and connects to a store at its first use of
that peer. The role is that of the first path. A rank that needs both (a decode rank that passes KV on to
others of its instance) cannot use this transport. The store asks nobody for a key and nothing is encrypted.

The library publishes whole pages of 2 MiB: what else lies in the first and the last one of a region would
be writable by peers. So regions must begin and end on such pages.

Proof of an end: a call that returns 0 has landed. Any other end of it proves nothing; `unregister_memory`
and `destroy` stop no write that runs, so a receiving end proves nothing either. How long a call may take,
the sources do not say: it blocks the thread of its path alone, and holds no lock of the interpreter.
"""

from __future__ import annotations

import importlib
import threading
from pathlib import Path
from time import monotonic
from typing import Annotated, Any

import msgspec

from segue.kv.errors import DECODE_ERRORS, BootstrapTimeout, ConfigError, PeerRefused, TransferFailed
from segue.kv.ids import RankId
from segue.kv.transport.base import Endpoint, EventSink
from segue.kv.transport.library.library_api import Handle, Library, ReceivingEnd, UnprovenEnd, WritingEnd
from segue.kv.transport.library.library_modules import Modules, device_number, missing
from segue.kv.transport.library.library_transport import LibraryTransport
from segue.kv.transport.memory.pool_memory import Memory, MemoryKind
from segue.kv.transport.options import TransportOptions
from segue.kv.transport.tcp.tcp_wire import PartRows

PAGE_BYTES = 2 * 2**20
#: A peer's memory is seen by a thread of the library that looks every 3 s.
MEET_S = 30.0
AGAIN_S = 0.5
_PROBE_BYTES = 64
_DRIVER = Path("/dev/davinci_manager")


class AscendBlob(msgspec.Struct, frozen=True, array_like=True):
    """How a writer reaches a receiver: the session (`IP:PORT`) of its engine."""

    session: Annotated[str, msgspec.Meta(min_length=3, max_length=64)]


class AscendTransport(LibraryTransport):
    """See this module and `library`."""

    name = "ascend"
    preference = 31
    memory_kinds = frozenset({MemoryKind.DEVICE})
    #: Where regions must begin and end.
    page_bytes = PAGE_BYTES

    def __init__(
        self, on_event: EventSink, options: TransportOptions, modules: Modules = importlib.import_module
    ) -> None:
        super().__init__(on_event, options, AscendLibrary(options, modules))

    @classmethod
    def unusable(cls) -> str:
        """The package, or the driver of NPUs, is missing."""
        reason = super().unusable() or missing("memfabric_hybrid", "memfabric-hybrid")
        if not reason and not _DRIVER.exists():
            reason = f"no NPU driver ({_DRIVER})"
        return reason

    def register(self, memory: Memory) -> Endpoint:
        """See `Transport.register`. Raises ConfigError for memory that is not of one NPU, and for regions
        that do not begin and end on pages of 2 MiB."""
        if len({device_number(region.device, "npu") for region in memory.regions}) > 1:
            raise ConfigError("ascend registers the memory of one NPU; give each NPU a rank of its own")
        for region in memory.regions:
            if region.address % self.page_bytes or region.nbytes % self.page_bytes:
                raise ConfigError(
                    f"a region of {region.nbytes} bytes at {region.address:#x} does not begin and end on "
                    f"pages of {self.page_bytes} bytes, and ascend publishes whole ones; allocate the pool "
                    "so, or use another --transport"
                )
        return super().register(memory)


class AscendLibrary(Library):
    """`modules` imports the library and torch."""

    max_rows = 1024

    def __init__(self, options: TransportOptions, modules: Modules) -> None:
        # Numeric, as the library wants it; peers are told the same.
        self._host = options.advertise or options.host
        self._modules = modules
        self._lock = threading.Lock()
        self._role = ""
        self._failed = ""

    def load(self) -> None:
        """Import it. Its engine is initialised when the role is known."""
        self._memfabric = self._modules("memfabric_hybrid")
        self._torch = self._modules("torch")

    def engine(self, role: str, memory: Memory) -> Any:
        """The engine of this process, in `role`, with all regions of `memory` registered. Raises ConfigError
        for a second role."""
        with self._lock:
            if self._failed:
                raise TransferFailed(self._failed, retryable=False)
            if self._role not in ("", role):
                raise ConfigError(
                    f"memfabric has initialised this process as {self._role}, and cannot be {role} as well: "
                    "on ascend a rank writes or is written to; use another --transport"
                )
            if not self._role:
                self._role = role
                try:
                    self._initialise(role, memory)
                except BaseException as exc:
                    # The effect of a second attempt in one process is not established.
                    self._failed = f"memfabric could not be initialised: {exc}"
                    raise
            return self._engine

    def _initialise(self, role: str, memory: Memory) -> None:
        engine = self._memfabric.TransferEngine()
        number = device_number(memory.regions[0].device, "npu")
        if (status := engine.initialize(f"tcp://{self._host}", self._host, role, number)) != 0:
            raise TransferFailed(f"initialize returned {status}; the driver and CANN must be there")
        addresses = [region.address for region in memory.regions]
        if (status := engine.batch_register_memory(addresses, [r.nbytes for r in memory.regions])) != 0:
            raise TransferFailed(f"batch_register_memory returned {status}")
        if role == "Decode" and not (port := engine.get_rpc_port()):
            raise TransferFailed("the engine has no port; memfabric-hybrid 1.3.0 or newer is needed")
        self.session = f"{self._host}:{port}" if role == "Decode" else ""
        self._engine = engine

    def scratch(self, device: str) -> Any:
        """Memory of `device` that nothing else uses."""
        return self._torch.zeros(_PROBE_BYTES, dtype=self._torch.uint8, device=device)

    def receiving(self, peer: RankId, memory: Memory, greeting: bytes) -> ReceivingEnd:
        """See `Library.receiving`."""
        self.engine("Decode", memory)
        return UnprovenEnd(msgspec.msgpack.encode(AscendBlob(self.session)))

    def writing(self, peer: RankId, memory: Memory, target: Memory, blob: bytes) -> WritingEnd:
        """See `Library.writing`. Waits until the peer's memory can be read."""
        try:
            session = msgspec.msgpack.decode(blob, type=AscendBlob).session
        except DECODE_ERRORS as exc:
            raise PeerRefused(f"unreadable description of an ascend engine: {exc}") from exc
        end = AscendWritingEnd(self.engine("Prefill", memory), session, memory, target)
        end.meet(self.scratch(memory.regions[0].device))
        return end


class AscendWritingEnd(WritingEnd):
    """Writes to one peer; each post blocks until it has landed."""

    def __init__(self, engine: Any, session: str, memory: Memory, target: Memory) -> None:
        self._engine = engine
        self._session = session
        self._memory, self._target = memory, target
        self._unknown = False  # a call ended with an error: what it began may still read our memory

    def meet(self, scratch: Any) -> None:
        """Wait until the library knows the peer's memory, which it tells nobody. Raises BootstrapTimeout."""
        theirs, deadline = self._target.regions[0].address, monotonic() + MEET_S
        while self._engine.transfer_sync_read(self._session, scratch.data_ptr(), theirs, _PROBE_BYTES) != 0:
            if monotonic() > deadline:
                raise BootstrapTimeout(f"memfabric did not find {self._session} within {MEET_S} s")
            threading.Event().wait(AGAIN_S)

    def post(self, rows: PartRows) -> Handle:
        """See `WritingEnd.post`."""
        source, target = rows.source.copy(), rows.target.copy()
        self._memory.to_addresses(source)
        self._target.to_addresses(target)
        self._unknown = True
        status = self._engine.batch_transfer_sync_write(
            self._session, source[:, 0].tolist(), target[:, 0].tolist(), source[:, 1].tolist()
        )
        if status != 0:
            raise TransferFailed(f"memfabric returned {status} for a write to {self._session}")
        self._unknown = False
        return None

    def done(self, handle: Handle) -> bool:
        """True: the post has returned."""
        return True

    def close(self) -> bool:
        """Nothing ends what still runs."""
        return not self._unknown
