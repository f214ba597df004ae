"""Regions: memory of others, without a copy; which transport can register which."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import numpy as np
import pytest

from ranks import make_shm, options, rank
from segue.core.errors import ConfigError, TransferFailed
from segue.layout.blocks import CopyBlock
from segue.transport import ranges
from segue.transport.fake import FakeTransport
from segue.transport.memory import Memory, MemoryKind, Region, allocate, host_region
from segue.transport.shm import ShmTransport
from segue.transport.tcp import TcpTransport


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
