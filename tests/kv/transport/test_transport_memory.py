"""Regions: memory of others, without a copy; which transport can register which."""

from __future__ import annotations

import errno
import gc
import os
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from ranks import make_shm, options, rank
from segue.kv.errors import ConfigError, Internal, OutOfCapacity, TransferFailed
from segue.kv.layout.blocks import CopyBlock
from segue.kv.layout.spec import KVShape, PlaneSpec, PoolSpec
from segue.kv.transport.fake import FakeTransport
from segue.kv.transport.memory import ranges
from segue.kv.transport.memory.device_tensors import flat_tensor, why_no_tensors
from segue.kv.transport.memory.host_memory import available_bytes, limited_groups
from segue.kv.transport.memory.pool_memory import Memory, MemoryKind, Region, allocate, host_region
from segue.kv.transport.memory.tensors import PointerView, _plane, _regions, _view, pool_of
from segue.kv.transport.shm.shm_transport import ShmTransport
from segue.kv.transport.tcp.tcp_transport import TcpTransport


def test_a_region_is_the_array_itself_whatever_the_order_of_its_axes() -> None:
    array = np.arange(120, dtype=np.int16).reshape(4, 5, 6)
    for view in (array, array.transpose(2, 0, 1), array[:, ::-1]):
        region = host_region(view)
        assert (region.address, region.nbytes) == (array.ctypes.data, array.nbytes)
        assert region.kind is MemoryKind.HOST
    region.buffer[2:4] = b"\x07\x01"
    assert array.flat[1] == 0x0107


def test_a_region_keeps_its_owner_alive_and_so_does_its_buffer() -> None:
    class Owned(np.ndarray):
        pass

    array = np.zeros(100, np.uint8).view(Owned)
    gone = weakref.ref(array)
    buffer = host_region(array).buffer
    del array
    gc.collect()
    buffer[99] = 5
    assert gone() is not None
    del buffer
    gc.collect()
    assert gone() is None


def test_read_only_memory_and_no_memory_are_no_region() -> None:
    array = np.zeros(3, np.uint8)
    array.flags.writeable = False
    with pytest.raises(ConfigError, match="read-only"):
        host_region(array)
    for regions in ([], [Region(4096, 0)]):
        with pytest.raises(ConfigError, match="at least one region"):
            Memory(regions)


def test_offsets_of_several_regions_lead_to_their_addresses() -> None:
    arrays = [np.zeros(size, np.uint8) for size in (100, 5000, 4096)]
    memory = Memory([host_region(array) for array in arrays])
    rows = np.array(
        [
            (start + at, 1)
            for start, array in zip(memory.starts, arrays, strict=True)
            for at in (0, array.size - 1)
        ],
        np.uint64,
    )
    memory.to_addresses(rows)
    assert rows[:, 0].tolist() == [a.ctypes.data + at for a in arrays for at in (0, a.size - 1)]
    assert memory.nbytes == memory.starts[-1] + 4096


@pytest.mark.parametrize(("offset", "nbytes", "inside"), [(0, 100, True), (0, 101, False), (100, 1, False)])
def test_no_row_lies_between_two_regions_or_across_their_ends(offset: int, nbytes: int, inside: bool) -> None:
    memory = Memory([host_region(np.zeros(100, np.uint8)) for _ in range(3)])
    for start in memory.starts:
        block = CopyBlock(start + offset, 0, 1, nbytes)
        if inside:
            assert ranges.check_memory([block], memory, 1000) == nbytes
        else:
            with pytest.raises(TransferFailed, match=r"outside the (regions of the )?source memory"):
                ranges.check_memory([block], memory, 1000)
    stride = memory.starts[1]
    with pytest.raises(TransferFailed, match="outside the regions"):
        ranges.check_memory([CopyBlock(0, 0, 3, 100, stride - 1, 100)], memory, 1000)
    assert ranges.check_memory([CopyBlock(0, 0, 3, 100, stride, 100)], memory, 1000) == 300
    with pytest.raises(TransferFailed, match="outside the regions"):
        ranges.check_memory([CopyBlock(0, 0, 2, 10, 90, 10, 2, stride + 1, 20)], memory, 1000)
    assert ranges.check_memory([CopyBlock(0, 0, 2, 10, 90, 10, 3, stride, 20)], memory, 1000) == 60


def test_each_transport_says_which_memory_it_registers_and_what_to_do_about_other() -> None:
    mine = allocate(4096)
    plain = Memory([host_region(np.zeros(4096, np.uint8))])
    device = Memory([Region(1 << 40, 4096, "cuda:0")])
    assert [m.only.kind.value for m in (mine, plain, device)] == ["shared", "host", "device"]
    for make in (ShmTransport, TcpTransport, FakeTransport):
        for memory in (mine, plain, device):
            transport = make(lambda _event: None, options(rank("aaaa")))
            if memory.only.kind in make.memory_kinds:
                assert transport.register(memory).nbytes == 4096
            else:
                advice = "allocate" if memory is plain else "keep the pool in host memory"
                with pytest.raises(ConfigError, match=f"{make.name} cannot register .*{advice}"):
                    transport.register(memory)
            transport.close()
    with pytest.raises(ConfigError, match="cannot be read by address"):
        _ = device.buffer
    mine.close()


def test_shm_takes_one_region() -> None:
    first, second = allocate(4096), allocate(4096)
    transport = make_shm(lambda _event: None, rank("aaaa"))
    both = Memory([*first.regions, *second.regions])
    with pytest.raises(ConfigError, match="one region of memory is needed here, not 2"):
        transport.register(both)
    transport.close()
    both.close()


def test_closing_memory_leaves_that_of_others_alone() -> None:
    mine, array = allocate(4096), np.zeros(10, np.uint8)
    both = Memory([mine.only, host_region(array)])
    both.regions[1].buffer[3] = 9
    both.close()
    assert array[3] == 9
    with pytest.raises(ValueError, match="closed"):
        mine.buffer[0]
    foreign = replace(host_region(array), fd=None)
    Memory([foreign]).close()


def spec_of(regions: tuple[int, ...], planes: bool) -> PoolSpec:
    """A pool of 128 bytes, layer-major or as an engine describes it."""
    made = PoolSpec(
        shape=KVShape(layers=1, kv_heads=1, k_dim=8, v_dim=8, dtype="x", item_bytes=1),
        pages=2,
        page_tokens=4,
        layer_count=1,
        head_count=1,
    )
    assert made.nbytes == 128
    if not planes:
        return made
    places = (PlaneSpec(0, 0, 32, 8, 8), PlaneSpec(len(regions) - 1, 0, 32, 8, 8))
    return msgspec.structs.replace(made, regions=regions, planes=places)


def of_sizes(*sizes: int) -> Memory:
    return Memory([host_region(np.zeros(size, np.uint8)) for size in sizes])


@pytest.mark.parametrize(
    ("sizes", "fits"), [((128,), True), ((127,), False), ((500,), True), ((128, 128), False)]
)
def test_a_layer_major_pool_needs_one_region_that_is_large_enough(sizes: tuple[int, ...], fits: bool) -> None:
    check(of_sizes(*sizes), spec_of((), planes=False), fits, "in one region")


@pytest.mark.parametrize(
    ("sizes", "fits"), [((64, 64), True), ((64, 65), False), ((65, 64), False), ((64,), False)]
)
def test_a_pool_that_was_described_needs_the_regions_of_its_description(
    sizes: tuple[int, ...], fits: bool
) -> None:
    check(of_sizes(*sizes), spec_of((64, 64), planes=True), fits, "described in regions")


def check(memory: Memory, spec: PoolSpec, fits: bool, why: str) -> None:
    if fits:
        memory.check_pool(spec)
    else:
        with pytest.raises(ConfigError, match=why):
            memory.check_pool(spec)


GiB = 2**30


def host_files(root: Path, groups: str | None = None) -> Callable[[str, str], None]:
    """Writes a file of a kernel below `root`, where a host with 8 GiB is already, and which `groups` we are
    in."""

    def write(name: str, text: str) -> None:
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    write("proc/meminfo", f"MemTotal: {32 * 2**20} kB\nMemAvailable: {8 * 2**20} kB\nCached: 9 kB\n")
    if groups is not None:
        write("proc/self/cgroup", groups)
    return write


@pytest.mark.parametrize(
    ("groups", "left_gib"),
    [
        ({}, 8),
        ({"pod": ("max", 1)}, 8),
        ({"pod": (6 * GiB, 1 * GiB)}, 5),
        ({"pod": (40 * GiB, 1 * GiB)}, 8),
        ({"pod": (2 * GiB, 3 * GiB)}, 0),
        ({"pod": ("max", 1), "": (4 * GiB, 1 * GiB)}, 3),
        ({"pod": (6 * GiB, 1 * GiB), "": (4 * GiB, 1 * GiB)}, 3),
        ({"pod": (4 * GiB, 1 * GiB), "": ("max", 1)}, 3),
        ({"pod": (4 * GiB, 4 * GiB, f"anon 7\ninactive_file {3 * GiB}\nslab 9\n")}, 3),
        ({"pod": (4 * GiB, 4 * GiB, f"active_file {GiB}\ninactive_file {GiB}\n")}, 2),
        ({"pod": (4 * GiB, 4 * GiB, f"file {3 * GiB}\nshmem {3 * GiB}\ninactive_anon {3 * GiB}\n")}, 0),
        ({"": (4 * GiB, 4 * GiB, f"inactive_file {3 * GiB}\n")}, 3),
        ({"pod": (4 * GiB, 1 * GiB, f"inactive_file {2 * GiB}\n")}, 4),
    ],
)
def test_what_is_available_is_what_the_host_and_each_group_above_still_have(
    groups: dict[str, tuple[int | str, ...]], left_gib: int, tmp_path: Path
) -> None:
    """More would be taken, and then some process is killed. What the kernel drops before is not taken."""
    write = host_files(tmp_path, "0::/node/pod\n")
    for name, (limit, used, *stat) in groups.items():
        write(f"sys/fs/cgroup/node/{name}/memory.max", f"{limit}\n")
        write(f"sys/fs/cgroup/node/{name}/memory.current", f"{used}\n")
        for text in stat:
            write(f"sys/fs/cgroup/node/{name}/memory.stat", str(text))
    assert available_bytes(tmp_path) == left_gib * GiB


def test_version_2_beside_version_1_is_looked_at_where_it_is_mounted(tmp_path: Path) -> None:
    write = host_files(tmp_path, "3:cpu,cpuacct:/pod\n0::/pod\n")
    write("sys/fs/cgroup/unified/cgroup.controllers", "memory\n")
    write("sys/fs/cgroup/unified/pod/memory.max", f"{6 * GiB}\n")
    write("sys/fs/cgroup/unified/pod/memory.current", f"{GiB}\n")
    assert available_bytes(tmp_path) == 5 * GiB


NO_LIMIT = 2**63 - 4096
V1_CACHE = f"cache {3 * GiB}\ninactive_file 1\ntotal_inactive_file {2 * GiB}\ntotal_active_file {GiB}\n"


@pytest.mark.parametrize(
    "lines", ["4:memory:/node/pod\n0::/\n", "0::/\n7:cpu,memory:/node/pod\n", "4:memory:/node/pod\n1:cpu:/\n"]
)
@pytest.mark.parametrize(
    ("groups", "left_gib", "limits_gib"),
    [
        ({}, 8, []),
        ({"": (NO_LIMIT, 30 * GiB), "node/pod": (NO_LIMIT, GiB)}, 8, []),
        ({"": (NO_LIMIT, 30 * GiB), "node/pod": (6 * GiB, GiB)}, 5, [6]),
        ({"node": (4 * GiB, 2 * GiB), "node/pod": (6 * GiB, GiB)}, 2, [6, 4]),
        ({"node/pod": (4 * GiB, 4 * GiB, V1_CACHE)}, 3, [4]),
        # In a container: the mount begins at the container's own group.
        ({"": (4 * GiB, GiB)}, 3, [4]),
    ],
)
def test_limits_of_groups_of_version_1_count_as_well(
    lines: str,
    groups: dict[str, tuple[int | str, ...]],
    left_gib: int,
    limits_gib: list[int],
    tmp_path: Path,
) -> None:
    write = host_files(tmp_path, lines)
    for name, (limit, used, *stat) in groups.items():
        write(f"sys/fs/cgroup/memory/{name}/memory.limit_in_bytes", f"{limit}\n")
        write(f"sys/fs/cgroup/memory/{name}/memory.usage_in_bytes", f"{used}\n")
        for text in stat:
            write(f"sys/fs/cgroup/memory/{name}/memory.stat", str(text))
    assert available_bytes(tmp_path) == left_gib * GiB
    assert [group.limit_bytes / GiB for group in limited_groups(tmp_path)] == limits_gib


def test_a_kernel_without_control_groups_limits_nothing(tmp_path: Path) -> None:
    host_files(tmp_path)
    assert available_bytes(tmp_path) == 8 * GiB


def test_memory_that_the_kernel_does_not_give_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_args: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OutOfCapacity, match="lower --kv-gib"):
        allocate(4096)
    assert len(os.listdir("/proc/self/fd")) == before


def test_every_range_must_lie_in_one_region() -> None:
    memory = of_sizes(100, 50)
    second = memory.starts[1]
    good = [(0, 100), (99, 1), (second, 50), (second + 49, 1)]
    for bad in ([], [(0, 101)], [(second, 51)], [(100, 1)]):
        for rows in (good + bad, bad + good):
            offsets, nbytes = np.array(rows, np.uint64).T
            assert memory.holds(offsets, nbytes) is not bool(bad)


# ---- an engine's own tensors -------------------------------------------------------------------------


class Tensor:
    """The used methods of a torch tensor, of a device that does not exist here."""

    def __init__(
        self, device: str = "cuda:0", strides: tuple[int, ...] = (32, 8, 8, 1), item: int = 2
    ) -> None:
        self.shape, self.device, self._strides, self._item = (2, 4, 1, 8), device, strides, item

    def data_ptr(self) -> int:
        return 1 << 40

    def stride(self) -> tuple[int, ...]:
        return self._strides

    def element_size(self) -> int:
        return self._item


SHAPE = KVShape(layers=1, kv_heads=1, k_dim=8, v_dim=8, dtype="float16", item_bytes=2)


@pytest.mark.parametrize(
    "other",
    [
        Tensor(device="cuda:1"),
        Tensor(device="cpu"),
        Tensor(item=4),
        Tensor(item=1, strides=(64, 16, 16, 2)),
        Tensor(strides=(32, -8, 8, 1)),
        Tensor(strides=(64, 16, 16, 2)),
    ],
    ids=["device", "host", "wider items", "narrower items", "backwards", "items apart"],
)
def test_tensors_that_do_not_fit_together_are_no_pool(other: Tensor) -> None:
    """The moved bytes would not be their content."""
    for layer in ([Tensor(), other], [other, Tensor()]):
        with pytest.raises(ConfigError, match=r"layers\[0\]\[[01]\]"):
            pool_of(SHAPE, [layer])


def test_layers_on_two_devices_are_no_pool_though_their_addresses_do_not_overlap() -> None:
    views = [
        PointerView(address=at, shape=(2, 4, 1, 8), strides=(64, 16, 16, 2), item_bytes=2, device=device)
        for at, device in ((1 << 40, "cuda:0"), (1 << 41, "cuda:1"))
    ]
    with pytest.raises(ConfigError, match=r"layers\[0\]\[1\]\.device is cuda:1"):
        pool_of(SHAPE, [views])


def test_interleaved_tensors_are_one_region_that_keeps_them_all() -> None:
    whole = np.zeros((2, 4, 2, 8), np.float16)  # pages, tokens, K or V, items
    views = [whole[:, :, k_v, None] for k_v in (0, 1)]
    for layer in (views, views[::-1]):
        spec, memory = pool_of(SHAPE, [layer])
        assert (memory.only.address, memory.only.nbytes) == (whole.ctypes.data, whole.nbytes)
        assert {id(view) for view in memory.only.owner} == {id(view) for view in layer}  # type: ignore[attr-defined]
        assert [plane.offset for plane in spec.planes] == ([0, 16] if layer is views else [16, 0])
    first, inside = whole[:, :, 0, None], whole[:, :2, 1, None]
    (region,) = _regions([_view(view) for view in (first, inside)])
    assert region.nbytes == whole.nbytes - 16, "the one that begins later ends before"


def test_a_tensor_lies_only_in_memory_of_its_own_device() -> None:
    """Addresses of a GPU and of the host may be equal."""
    memory = Memory([Region(1 << 40, 4096, "cuda:1"), Region(1 << 40, 4096, "cuda:0")])
    assert _plane(_view(Tensor()), memory.regions).region == 1
    with pytest.raises(ConfigError, match="none of the memory's regions"):
        _plane(_view(Tensor(device="cpu")), memory.regions)


@pytest.mark.parametrize(("before", "behind"), [(0, 1), (1, 0)])
def test_a_region_outside_the_storage_of_its_tensor_is_no_memory(before: int, behind: int) -> None:
    tensor = torch.zeros(64, dtype=torch.uint8)
    whole = Region(tensor.data_ptr(), 64, "cpu:0", owner=tensor)
    assert flat_tensor(whole).data_ptr() == tensor.data_ptr()
    outside = Region(tensor.data_ptr() - before, 64 + behind, "cpu:0", owner=tensor)
    with pytest.raises(Internal, match="does not lie in the storage"):
        flat_tensor(outside)


def test_a_region_that_was_joined_from_several_tensors_is_read_by_one_of_them() -> None:
    tensor = torch.arange(64, dtype=torch.uint8)
    joined = Region(tensor.data_ptr(), 64, "cpu:0", owner=((object(), tensor), object()))
    assert why_no_tensors(Memory([joined])) == ""
    assert torch.equal(flat_tensor(joined), tensor)
