"""`mori`, `ascend` and `cuda_ipc` over doubles that have their libraries' signatures. No hardware is here."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import pytest

import double_cuda
import double_memfabric
import double_mori
from areas import whole
from ranks import options, rank
from segue.core.errors import BootstrapTimeout, ConfigError, PeerRefused, SegueError, TransferFailed
from segue.core.types import RankId
from segue.layout.blocks import CopyBlock
from segue.transport import library, library_modules
from segue.transport.ascend import PAGE_BYTES, AscendTransport
from segue.transport.base import Fenced, PeerGone, Transport, TransportEvent, WriteFailed, Written
from segue.transport.cuda_ipc import CudaIpcTransport
from segue.transport.library_modules import device_number, missing
from segue.transport.memory import Memory, Region, allocate, host_region
from segue.transport.mori import MoriTransport

MiB = 2**20
PATIENCE_S = 60.0
E = TypeVar("E", bound=TransportEvent)
Make = Callable[[Any, RankId], Transport]


def mori(sink: Any, me: RankId) -> Transport:
    return MoriTransport(sink, options(me), double_mori.modules)


def ascend(sink: Any, me: RankId) -> Transport:
    return AscendTransport(sink, options(me), double_memfabric.modules)


def cuda_ipc(sink: Any, me: RankId) -> Transport:
    return CudaIpcTransport(sink, options(me), double_cuda.modules)


def host_arrays(*sizes: int) -> Memory:
    return Memory([host_region(np.zeros(n, np.uint8)) for n in sizes])


def npu_memory(nbytes: int) -> Memory:
    return double_memfabric.device_memory(nbytes, page_bytes=PAGE_BYTES)


class End:
    """A transport, its memory and what it told."""

    def __init__(self, make: Make, me: RankId, memory: Memory) -> None:
        self.me, self.memory = me, memory
        self.log: list[TransportEvent] = []
        self._changed = threading.Condition()
        self.transport = make(self._event, me)
        try:
            self.endpoint = self.transport.register(memory)
        except BaseException:
            self.transport.close()
            raise

    def _event(self, event: TransportEvent) -> None:
        with self._changed:
            self.log.append(event)
            self._changed.notify_all()

    def take(self, kind: type[E], **fields: object) -> E:
        def found() -> list[E]:
            events = [event for event in self.log if isinstance(event, kind)]
            return [e for e in events if all(getattr(e, k) == v for k, v in fields.items())]

        with self._changed:
            assert self._changed.wait_for(found, PATIENCE_S), (kind, fields, self.log)
            return found()[0]

    def array(self, region: int = 0) -> np.ndarray:
        owner: Any = self.memory.regions[region].owner
        return np.asarray(owner)


Ends = Callable[..., tuple[End, End]]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """Makes a connected writer and reader, and closes them."""
    made: list[End] = []

    def connected(make: Make, memory: Memory, target: Memory) -> tuple[End, End]:
        made.extend([End(make, rank("aaaa"), memory), End(make, rank("bbbb"), target)])
        writer, reader = made[-2:]
        writer.transport.connect(reader.me, reader.endpoint, PATIENCE_S)
        return writer, reader

    yield connected
    for double in (double_mori, double_memfabric, double_cuda):
        double.FAULTS.running.set()
    for end in made:
        end.transport.close()
    for double in (double_mori, double_memfabric, double_cuda):
        double.reset()


def move(writer: End, reader: End, epoch: int, *blocks: CopyBlock) -> Written | WriteFailed:
    reader.transport.grant(writer.me, epoch, whole(reader.memory.nbytes))
    writer.transport.write(reader.me, epoch, 1, blocks)

    def ended() -> bool:
        return any(isinstance(e, Written | WriteFailed) and e.epoch == epoch for e in writer.log)

    with writer._changed:
        assert writer._changed.wait_for(ended, PATIENCE_S), writer.log
    return next(e for e in writer.log if isinstance(e, Written | WriteFailed) and e.epoch == epoch)


# ---- what all three say of an end that is no success -------------------------------------------------


def unsettled(writer: End, reader: End) -> None:
    """After a write that failed: no fence of its epoch is answered as proven, on either side, and the path
    is gone; what lies there may still be read and written."""
    assert isinstance(move(writer, reader, 3, CopyBlock(0, 0, 1, 4096)), WriteFailed)
    assert not writer.take(PeerGone).proven
    reader.transport.fence(writer.me, 3)
    reader.transport.fence(writer.me, 99)  # after which that one was decided
    assert reader.take(Fenced, epoch=99).proven
    assert not [e for e in reader.log if isinstance(e, Fenced) and e.epoch == 3]


def test_mori_a_failed_status_leaves_its_epoch_unsettled_and_its_statuses_alive(ends: Ends) -> None:
    writer, reader = ends(mori, host_arrays(MiB), host_arrays(MiB))
    double_mori.FAULTS.fails = True
    unsettled(writer, reader)
    library: Any = writer.transport._library  # type: ignore[attr-defined]
    assert [status.Failed() for status in library.unfinished] == [True]


def test_ascend_a_status_other_than_0_leaves_its_epoch_unsettled(ends: Ends) -> None:
    writer, reader = ends(ascend, npu_memory(PAGE_BYTES), npu_memory(PAGE_BYTES))
    double_memfabric.FAULTS.status = 1
    unsettled(writer, reader)


def test_cuda_ipc_a_copy_that_ended_with_an_error_leaves_its_epoch_unsettled(ends: Ends) -> None:
    writer, reader = ends(cuda_ipc, double_cuda.device_memory(MiB), double_cuda.device_memory(MiB))
    double_cuda.FAULTS.copies_fail = True
    unsettled(writer, reader)


@pytest.mark.parametrize(
    ("make", "memory", "double"),
    [
        (mori, lambda: host_arrays(MiB), double_mori),
        (ascend, lambda: npu_memory(PAGE_BYTES), double_memfabric),
        (cuda_ipc, lambda: double_cuda.device_memory(MiB), double_cuda),
    ],
)
def test_a_fence_waits_for_what_runs(ends: Ends, make: Make, memory: Any, double: Any) -> None:
    writer, reader = ends(make, memory(), memory())
    writer.array()[:4096] = 7
    reader.transport.grant(writer.me, 3, whole(reader.memory.nbytes))
    double.FAULTS.running.clear()
    writer.transport.write(reader.me, 3, 1, [CopyBlock(0, 0, 1, 4096)])
    writer.transport.write(reader.me, 4, 1, [CopyBlock(0, 0, 1, 1)])
    reader.transport.fence(writer.me, 99)
    reader.take(Fenced, epoch=99)
    reader.transport.fence(writer.me, 3)
    writer.transport.fence(reader.me, 3)
    assert not [e for e in writer.log + reader.log if isinstance(e, Fenced) and e.epoch == 3]
    double.FAULTS.running.set()
    assert reader.take(Fenced, epoch=3).proven
    assert writer.take(Fenced, epoch=3).proven
    ended = [e for e in writer.log if isinstance(e, Written | WriteFailed) and e.epoch == 3]
    assert len(ended) == 1
    if isinstance(ended[0], Written):
        assert (reader.array()[:4096] == 7).all()


# ---- mori ------------------------------------------------------------------------------------------


def test_mori_writes_name_offsets_in_regions_and_go_from_region_to_region(ends: Ends) -> None:
    writer, reader = ends(mori, host_arrays(MiB, 2 * MiB), host_arrays(MiB, MiB, 4096))
    for region in (0, 1):
        writer.array(region)[:] = region + 1
    at, to = writer.memory.starts, reader.memory.starts
    done = move(
        writer,
        reader,
        3,
        CopyBlock(at[0] + 5, to[2], 1, 100),
        CopyBlock(at[1] + 7, to[1] + 9, 2, 100, 1000, 2000),
        CopyBlock(at[1], to[0], 1, 10),
    )
    assert isinstance(done, Written)
    assert (reader.array(2)[:100] == 1).all()
    assert not reader.array(2)[100:].any()
    assert (reader.array(1)[9:109] == 2).all()
    assert (reader.array(1)[2009:2109] == 2).all()
    assert np.count_nonzero(reader.array(1)) == 200
    assert np.count_nonzero(reader.array(0)) == 10
    assert sum(double_mori.FAULTS.writes) == 4
    assert len(double_mori.FAULTS.writes) == 3, "a call for each pair of regions"


def test_mori_regions_are_registered_once_for_all_peers(ends: Ends) -> None:
    _, reader = ends(mori, host_arrays(MiB), host_arrays(MiB, MiB))
    other = End(mori, rank("cccc"), host_arrays(MiB))
    try:
        other.transport.connect(reader.me, reader.endpoint, PATIENCE_S)
    finally:
        other.transport.close()
    assert len(double_mori.ENGINES[str(reader.me)].memory) == 3, "two regions, and a page to meet with"


def test_mori_memory_of_a_gpu_is_registered_with_its_number(ends: Ends) -> None:
    memory = host_arrays(MiB)
    device = Memory([Region(memory.only.address, MiB, "cuda:3", owner=memory)])
    _, reader = ends(mori, host_arrays(MiB), device)
    described = double_mori.ENGINES[str(reader.me)].memory
    assert (described[1].loc, described[1].device_id) == (double_mori.MemoryLocationType.GPU, 3)
    assert (described[0].loc, described[0].device_id) == (double_mori.MemoryLocationType.CPU, -1)


@pytest.mark.parametrize("raises", ["insufficient RDMA endpoints", ""])
def test_mori_a_peer_that_cannot_be_read_is_not_connected(ends: Ends, raises: str) -> None:
    double_mori.FAULTS.raises, double_mori.FAULTS.fails = raises, not raises
    with pytest.raises(TransferFailed, match=raises or "the peer does not answer"):
        ends(mori, host_arrays(MiB), host_arrays(MiB))


def test_mori_what_was_posted_before_a_call_raised_is_kept(ends: Ends) -> None:
    writer, reader = ends(mori, host_arrays(MiB, MiB), host_arrays(MiB))
    double_mori.FAULTS.running.clear()
    library: Any = writer.transport._library  # type: ignore[attr-defined]
    real, calls = library.engine.batch_write, []

    def second_raises(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 2:
            raise RuntimeError("no connection")
        return real(*arguments)

    library.engine.batch_write = second_raises
    failed = move(writer, reader, 3, CopyBlock(0, 0, 1, 10), CopyBlock(writer.memory.starts[1], 10, 1, 10))
    assert isinstance(failed, WriteFailed)
    writer.take(PeerGone)
    assert [status.InProgress() for status in library.unfinished] == [True]


def test_mori_an_engine_without_a_port_is_refused(ends: Ends) -> None:
    double_mori.FAULTS.port = 0
    with pytest.raises(ConfigError, match="listens at no port"):
        ends(mori, host_arrays(MiB), host_arrays(MiB))


# ---- ascend ----------------------------------------------------------------------------------------


def test_ascend_registers_whole_pages_of_one_npu_alone() -> None:
    odd = double_memfabric.device_memory(MiB, page_bytes=PAGE_BYTES)
    with pytest.raises(ConfigError, match="does not begin and end on pages of 2097152 bytes"):
        End(ascend, rank("aaaa"), odd)
    one, two = npu_memory(PAGE_BYTES).only, npu_memory(PAGE_BYTES).only
    shifted = Region(one.address + 4096, PAGE_BYTES, "npu:0", owner=one.owner)
    with pytest.raises(ConfigError, match="does not begin"):
        End(ascend, rank("aaaa"), Memory([shifted]))
    other = Region(two.address, PAGE_BYTES, "npu:1", owner=two.owner)
    with pytest.raises(ConfigError, match="one NPU"):
        End(ascend, rank("aaaa"), Memory([one, other]))
    with pytest.raises(ConfigError, match="npu:N is needed"):
        End(ascend, rank("aaaa"), Memory([Region(one.address, PAGE_BYTES, "cuda:0", owner=one.owner)]))


def test_ascend_the_first_path_decides_the_role_and_the_other_one_is_refused(ends: Ends) -> None:
    writer, reader = ends(ascend, npu_memory(PAGE_BYTES), npu_memory(PAGE_BYTES))
    made = [call[1:] for call in double_memfabric.FAULTS.made]
    assert made == [("127.0.0.1", "Decode", 0), ("127.0.0.1", "Prefill", 0)]
    with pytest.raises(SegueError):
        reader.transport.connect(writer.me, writer.endpoint, 10)
    assert "as Prefill, and cannot be Decode" in str(writer.take(PeerGone).error)


def test_ascend_a_peer_is_connected_when_its_memory_is_seen(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("segue.transport.ascend._AGAIN_S", 0.01)
    double_memfabric.FAULTS.unseen = 3
    writer, reader = ends(ascend, npu_memory(PAGE_BYTES), npu_memory(PAGE_BYTES))
    assert double_memfabric.FAULTS.unseen < 0
    assert isinstance(move(writer, reader, 3, CopyBlock(0, 0, 1, 10)), Written)


def test_ascend_a_peer_that_is_never_seen_is_not_connected(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("segue.transport.ascend._AGAIN_S", 0.01)
    monkeypatch.setattr("segue.transport.ascend._MEET_S", 0.05)
    double_memfabric.FAULTS.unseen = 1000
    with pytest.raises(BootstrapTimeout, match="did not find"):
        ends(ascend, npu_memory(PAGE_BYTES), npu_memory(PAGE_BYTES))


@pytest.mark.parametrize(("fault", "text"), [({"initialize": -1}, "returned -1"), ({"port": 0}, "no port")])
def test_ascend_what_cannot_be_initialised_says_so_and_is_not_tried_again(
    fault: dict[str, int], text: str
) -> None:
    for name, value in fault.items():
        setattr(double_memfabric.FAULTS, name, value)
    reader, writer = (End(ascend, rank(word), npu_memory(PAGE_BYTES)) for word in ("bbbb", "aaaa"))
    try:
        for _ in range(2):
            with pytest.raises(SegueError):
                writer.transport.connect(reader.me, reader.endpoint, PATIENCE_S)
            assert text in str(reader.take(PeerGone).error)
        assert len(double_memfabric.FAULTS.made) == 1
    finally:
        writer.transport.close()
        reader.transport.close()
        double_memfabric.reset()


# ---- cuda_ipc --------------------------------------------------------------------------------------


def test_cuda_ipc_a_region_inside_an_allocation_is_found_by_its_offset(ends: Ends) -> None:
    writer, reader = ends(
        cuda_ipc, double_cuda.device_memory(MiB), double_cuda.device_memory(MiB, before=12288)
    )
    writer.array()[:] = 5
    assert isinstance(move(writer, reader, 3, CopyBlock(0, 4096, 2, 100, 1000, 2000)), Written)
    assert (reader.array()[4096:4196] == 5).all()
    assert (reader.array()[6096:6196] == 5).all()
    assert np.count_nonzero(reader.array()) == 200
    assert double_cuda.FAULTS.batches == [2]


def test_cuda_ipc_what_was_mapped_is_unmapped_at_the_end(ends: Ends) -> None:
    writer, _ = ends(cuda_ipc, double_cuda.device_memory(MiB), double_cuda.device_memory(MiB))
    assert len(double_cuda.FAULTS.opened) == 1
    writer.transport.close()
    assert double_cuda.FAULTS.opened == []


def test_cuda_ipc_a_path_that_cannot_be_made_maps_nothing(ends: Ends) -> None:
    double_cuda.FAULTS.fails.add("cudaStreamCreateWithFlags")
    with pytest.raises(TransferFailed, match="cudaStreamCreateWithFlags failed: cudaErrorInvalidValue"):
        ends(cuda_ipc, double_cuda.device_memory(MiB), double_cuda.device_memory(MiB))
    assert double_cuda.FAULTS.opened == []


def test_cuda_ipc_memory_without_a_handle_is_refused_with_what_to_do() -> None:
    double_cuda.reset()
    double_cuda.FAULTS.no_handles = True
    with pytest.raises(ConfigError, match="expandable_segments"):
        End(cuda_ipc, rank("aaaa"), double_cuda.device_memory(MiB))
    double_cuda.reset()
    memory = double_cuda.device_memory(MiB, "cuda:1")
    with pytest.raises(ConfigError, match="one GPU"):
        End(cuda_ipc, rank("aaaa"), Memory([memory.only, Region(memory.only.address, MiB, "cuda:0")]))


def test_cuda_ipc_a_gpu_that_is_not_visible_here_is_refused(ends: Ends) -> None:
    def elsewhere(sink: Any, me: RankId) -> Transport:
        made = cuda_ipc(sink, me)
        if me == rank("aaaa"):
            made._cuda._visible = lambda: {bytes(16)}  # type: ignore[attr-defined]
        return made

    with pytest.raises(PeerRefused, match="CUDA_VISIBLE_DEVICES"):
        ends(elsewhere, double_cuda.device_memory(MiB), double_cuda.device_memory(MiB))


def test_memory_that_may_still_be_written_to_is_kept_when_its_transport_is_closed(
    ends: Ends, caplog: pytest.LogCaptureFixture
) -> None:
    memory = allocate(MiB)
    writer, reader = ends(mori, host_arrays(MiB), memory)
    writer.array()[:] = 7
    reader.transport.grant(writer.me, 3, whole(MiB))
    double_mori.FAULTS.running.clear()
    writer.transport.write(reader.me, 3, 1, [CopyBlock(0, 0, 1, MiB)])
    deadline = time.monotonic() + PATIENCE_S
    while not double_mori.FAULTS.writes:
        assert time.monotonic() < deadline
    reader.transport.close()
    assert "kept until this process ends" in caplog.text
    with pytest.raises(BufferError):
        memory.close()
    double_mori.FAULTS.running.set()
    double_mori.reset()
    library.STILL_USED.clear()
    assert bytes(memory.buffer[:1]) == b"\7", "which is why"
    memory.close()


# ---- what is not here --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [MoriTransport, AscendTransport, CudaIpcTransport])
def test_a_package_that_is_missing_is_named(kind: type[Transport], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_modules.importlib.util, "find_spec", lambda _name: None)
    assert "is not installed: pip install" in kind.unusable()


def test_a_package_whose_own_libraries_are_missing_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    def loads(_name: str) -> Any:
        raise OSError("libamdhip64.so: cannot open shared object file")

    monkeypatch.setattr(library_modules.importlib, "import_module", loads)
    assert missing("numpy", "x") == "numpy cannot be imported: libamdhip64.so: cannot open shared object file"


def test_host_memory_is_no_memory_of_these_devices() -> None:
    for make in (ascend, cuda_ipc):
        memory = allocate(4096)
        with pytest.raises(ConfigError):
            End(make, rank("aaaa"), memory)
        memory.close()
    assert device_number("cuda", "cuda") == 0
    assert device_number("npu:12", "npu") == 12
