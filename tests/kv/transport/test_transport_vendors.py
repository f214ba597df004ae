"""`mori` and `ascend` over doubles that have their libraries' signatures. No hardware is here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import pytest
from library_ends import PATIENCE_S, End

import double_memfabric
import double_mori
from areas import whole
from ranks import options, rank
from segue.kv.errors import BootstrapTimeout, ConfigError, PeerRefused, SegueError, TransferFailed
from segue.kv.ids import RankId
from segue.kv.layout.blocks import CopyBlock
from segue.kv.transport.ascend import PAGE_BYTES, AscendBlob, AscendLibrary, AscendTransport
from segue.kv.transport.base import Fenced, PeerGone, Transport, WriteFailed, Written
from segue.kv.transport.library import library_modules
from segue.kv.transport.library import library_transport as library
from segue.kv.transport.library.library_modules import device_number, missing
from segue.kv.transport.library.library_out import pieces
from segue.kv.transport.memory.pool_memory import Memory, Region, allocate, host_region
from segue.kv.transport.mori import MoriBlob, MoriLibrary, MoriTransport

MiB = 2**20
Make = Callable[[Any, RankId], Transport]


def mori(sink: Any, me: RankId) -> Transport:
    return MoriTransport(sink, options(me), double_mori.modules)


def ascend(sink: Any, me: RankId) -> Transport:
    return AscendTransport(sink, options(me), double_memfabric.modules)


def host_arrays(*sizes: int) -> Memory:
    return Memory([host_region(np.zeros(n, np.uint8)) for n in sizes])


def npu_memory(nbytes: int) -> Memory:
    return double_memfabric.device_memory(nbytes, page_bytes=PAGE_BYTES)


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
    for double in (double_mori, double_memfabric):
        double.FAULTS.running.set()
    for end in made:
        end.transport.close()
    for double in (double_mori, double_memfabric):
        double.reset()


def move(writer: End, reader: End, epoch: int, *blocks: CopyBlock) -> Written | WriteFailed:
    reader.transport.grant(writer.me, epoch, whole(reader.memory.nbytes))
    writer.transport.write(reader.me, epoch, 1, blocks)

    event = writer.take((Written, WriteFailed), epoch=epoch)
    assert isinstance(event, Written | WriteFailed)
    return event


# ---- what all three say of an end that is no success -------------------------------------------------


def unsettled(writer: End, reader: End) -> None:
    """After a write that failed: no fence of its epoch is answered as proven, on either side, and the path
    is gone; what lies there may still be read and written, also when the transport is closed."""
    assert isinstance(move(writer, reader, 3, CopyBlock(0, 0, 1, 4096)), WriteFailed)
    assert not writer.take(PeerGone).proven
    reader.transport.fence(writer.me, 3)
    reader.transport.fence(writer.me, 99)  # after which that one was decided
    assert reader.take(Fenced, epoch=99).proven
    assert not [e for e in reader.log if isinstance(e, Fenced) and e.epoch == 3]
    writer.transport.fence(reader.me, 3)
    writer.transport.fence(reader.me, 99)
    assert writer.take(Fenced, epoch=99).proven
    assert not [e for e in writer.log if isinstance(e, Fenced) and e.epoch == 3]
    library.STILL_USED.clear()
    for end in (writer, reader):
        end.transport.close()
    assert [memory for memory, _ in library.STILL_USED] == [writer.memory, reader.memory]
    library.STILL_USED.clear()


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


@pytest.mark.parametrize(
    ("make", "memory", "double"),
    [
        (mori, lambda: host_arrays(MiB), double_mori),
        (ascend, lambda: npu_memory(PAGE_BYTES), double_memfabric),
    ],
)
def test_a_fence_waits_for_what_runs(ends: Ends, make: Make, memory: Any, double: Any) -> None:
    writer, reader = ends(make, memory(), memory())
    writer.arrays[0][:4096] = 7
    reader.transport.grant(writer.me, 3, whole(reader.memory.nbytes))
    double.FAULTS.running.clear()
    writer.transport.write(reader.me, 3, 1, [CopyBlock(0, 0, 1, 4096)])
    assert double.FAULTS.taken.acquire(timeout=PATIENCE_S), "from here on it runs"
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
        assert (reader.arrays[0][:4096] == 7).all()


# ---- mori ------------------------------------------------------------------------------------------


def test_mori_writes_name_offsets_in_regions_and_go_from_region_to_region(ends: Ends) -> None:
    writer, reader = ends(mori, host_arrays(MiB, 2 * MiB), host_arrays(MiB, MiB, 4096))
    for region in (0, 1):
        writer.arrays[region][:] = region + 1
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
    assert (reader.arrays[2][:100] == 1).all()
    assert not reader.arrays[2][100:].any()
    assert (reader.arrays[1][9:109] == 2).all()
    assert (reader.arrays[1][2009:2109] == 2).all()
    assert np.count_nonzero(reader.arrays[1]) == 200
    assert np.count_nonzero(reader.arrays[0]) == 10
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


def mori_library(me: RankId, **fields: Any) -> MoriLibrary:
    made = MoriLibrary(options(me, **fields), double_mori.modules)
    made.load()
    return made


@contextmanager
def mori_held() -> Iterator[None]:
    """Its engines stand still; at the end they do what they were given, while the memory is there."""
    double_mori.FAULTS.running.clear()
    try:
        yield
    finally:
        double_mori.FAULTS.running.set()
        double_mori.reset()


@pytest.mark.parametrize(
    ("host", "advertise", "told"),
    [
        ("0.0.0.0", "10.0.0.7", "10.0.0.7"),
        ("::", "10.0.0.7", "10.0.0.7"),
        ("10.0.0.1", "10.0.0.7", "10.0.0.1"),
        ("0.0.0.0", None, "0.0.0.0"),
    ],
)
def test_mori_peers_are_told_where_its_engine_can_be_reached(host: str, advertise: str, told: str) -> None:
    made = mori_library(rank("aaaa"), host=host, advertise=advertise)
    assert made.engine.get_engine_desc().host == told
    double_mori.reset()


def test_mori_a_peer_that_is_silent_is_not_connected_and_its_status_is_kept(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library writes into the status whenever the read ends."""
    monkeypatch.setattr("segue.kv.transport.mori.MEET_MS", 1)
    writer, reader = (mori_library(rank(word)) for word in ("aaaa", "bbbb"))
    source, target = host_arrays(MiB), host_arrays(MiB)
    blob = reader.receiving(rank("aaaa"), target, b"").blob
    with mori_held():
        with pytest.raises(BootstrapTimeout):
            writer.writing(rank("bbbb"), source, target, blob)
        assert [status.InProgress() for status in writer.unfinished] == [True]


@pytest.mark.parametrize("wrong", ["engine", "memory", "first memory", "size", "count"])
def test_mori_what_a_peer_describes_must_be_its_own_and_of_the_sizes_that_it_says(
    ends: Ends, wrong: str
) -> None:
    writer, reader, other = (mori_library(rank(word)) for word in ("aaaa", "bbbb", "cccc"))
    target = host_arrays(MiB, MiB)
    told = msgspec.msgpack.decode(reader.receiving(rank("aaaa"), target, b"").blob, type=MoriBlob)
    foreign = msgspec.msgpack.decode(other.receiving(rank("aaaa"), target, b"").blob, type=MoriBlob)
    (larger,) = mori_library(rank("bbbb")).memories(host_arrays(2 * MiB))
    engine, memories = told.engine, told.memories
    match wrong:
        case "engine":
            engine, memories = foreign.engine, foreign.memories
        case "memory":
            memories = [memories[0], foreign.memories[1]]
        case "first memory":
            memories = [foreign.memories[0], memories[1]]
        case "size":
            memories = [memories[0], larger.pack()]
        case "count":
            memories = memories[:1]
    with pytest.raises(PeerRefused, match="describes"):
        writer.writing(
            rank("bbbb"), host_arrays(MiB), target, msgspec.msgpack.encode(MoriBlob(engine, memories))
        )


@pytest.mark.parametrize("last", [0, 1, 2])
def test_mori_a_post_is_done_when_the_rows_of_all_regions_have_landed(ends: Ends, last: int) -> None:
    writer, reader = mori_library(rank("aaaa")), mori_library(rank("bbbb"))
    source, target = host_arrays(MiB, MiB, MiB), host_arrays(MiB)
    end = writer.writing(rank("bbbb"), source, target, reader.receiving(rank("aaaa"), target, b"").blob)
    (rows,) = pieces([CopyBlock(0, 0, 3, 10, source.starts[1], 20)], MiB, 100)
    with mori_held():
        handle: Any = end.post(rows)
        assert len(handle) == 3
        for status in (status for n, status in enumerate(handle) if n != last):
            assert not end.done(handle)
            status.code = double_mori.StatusCode.SUCCESS
        assert not end.done(handle)
        assert not end.close()
        handle[last].code = double_mori.StatusCode.SUCCESS
        assert end.done(handle)
        assert end.close()


# ---- ascend ----------------------------------------------------------------------------------------


def test_ascend_peers_are_told_the_address_that_is_advertised() -> None:
    made = AscendLibrary(
        options(rank("aaaa"), host="0.0.0.0", advertise="10.0.0.7"), double_memfabric.modules
    )
    made.load()
    end = made.receiving(rank("bbbb"), npu_memory(PAGE_BYTES), b"")
    assert msgspec.msgpack.decode(end.blob, type=AscendBlob).session.startswith("10.0.0.7:")
    assert double_memfabric.FAULTS.made[-1][:2] == ("tcp://10.0.0.7", "10.0.0.7")
    double_memfabric.reset()


def test_ascend_a_call_has_no_more_rows_than_the_library_takes(ends: Ends) -> None:
    writer, reader = ends(ascend, npu_memory(PAGE_BYTES), npu_memory(PAGE_BYTES))
    assert isinstance(move(writer, reader, 3, CopyBlock(0, 0, 3000, 10, 20, 20)), Written)
    assert double_memfabric.FAULTS.sizes == [1024, 1024, 952]


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
    monkeypatch.setattr("segue.kv.transport.ascend.AGAIN_S", 0.01)
    double_memfabric.FAULTS.unseen = 3
    writer, reader = ends(ascend, npu_memory(PAGE_BYTES), npu_memory(PAGE_BYTES))
    assert double_memfabric.FAULTS.unseen < 0
    assert isinstance(move(writer, reader, 3, CopyBlock(0, 0, 1, 10)), Written)


def test_ascend_a_peer_that_is_never_seen_is_not_connected(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("segue.kv.transport.ascend.AGAIN_S", 0.01)
    monkeypatch.setattr("segue.kv.transport.ascend.MEET_S", 0.05)
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


def test_memory_that_may_still_be_written_to_is_kept_when_its_transport_is_closed(
    ends: Ends, caplog: pytest.LogCaptureFixture
) -> None:
    memory = allocate(MiB)
    writer, reader = ends(mori, host_arrays(MiB), memory)
    writer.arrays[0][:] = 7
    reader.transport.grant(writer.me, 3, whole(MiB))
    double_mori.FAULTS.running.clear()
    writer.transport.write(reader.me, 3, 1, [CopyBlock(0, 0, 1, MiB)])
    assert double_mori.FAULTS.taken.acquire(timeout=PATIENCE_S)
    reader.transport.close()
    assert "kept until this process ends" in caplog.text
    with pytest.raises(BufferError):
        memory.close()
    double_mori.FAULTS.running.set()
    double_mori.reset()
    library.STILL_USED.clear()
    assert bytes(memory.buffer[:1]) == b"\7", "which is why"
    memory.close()


@pytest.mark.parametrize(("device", "number"), [("cuda:0", 0), ("cuda:1", 1), ("cuda:17", 17), ("cuda", 0)])
def test_the_number_of_a_device_is_in_its_name(device: str, number: int) -> None:
    assert device_number(device, "cuda") == number


@pytest.mark.parametrize("device", ["cpu", "npu:1", "cuda:x", "cuda:-1"])
def test_what_names_no_such_device_is_refused(device: str) -> None:
    with pytest.raises(ConfigError, match="cuda:N is needed"):
        device_number(device, "cuda")


# ---- what is not here --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [MoriTransport, AscendTransport])
def test_a_package_that_is_missing_is_named(kind: type[Transport], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_modules.importlib.util, "find_spec", lambda _name: None)
    assert "is not installed: pip install" in kind.unusable()


def test_a_package_whose_own_libraries_are_missing_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    def loads(_name: str) -> Any:
        raise OSError("libamdhip64.so: cannot open shared object file")

    monkeypatch.setattr(library_modules.importlib, "import_module", loads)
    assert missing("numpy", "x") == "numpy cannot be imported: libamdhip64.so: cannot open shared object file"


def test_host_memory_is_no_memory_of_an_npu() -> None:
    memory = allocate(4096)
    with pytest.raises(ConfigError):
        End(ascend, rank("aaaa"), memory)
    memory.close()
    assert device_number("cuda", "cuda") == 0
    assert device_number("npu:12", "npu") == 12
