"""SGLang's pool and metadata slots as `KVArgs` describes them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sglang_pair import LAYERS, PAGE, PAGES, ROW, kv_args

from segue.integrations.sglang.sglang_pool import MetadataSlots, page_pool
from segue.kv import ConfigError, LayoutMismatch, Limits, MetadataMismatch


def buffers(count: int, row: int = ROW, pages: int = PAGES) -> list[np.ndarray]:
    return [np.zeros((pages, PAGE * row), np.uint8) for _ in range(count)]


@pytest.mark.parametrize("v_row", [ROW, 2 * ROW])
def test_k_and_v_of_each_layer_lie_where_sglang_says(v_row: int) -> None:
    kv = buffers(LAYERS) + buffers(LAYERS, v_row)
    pool = page_pool(kv_args(kv), mla=False)
    for layer in range(LAYERS):
        for value in (False, True):
            buffer = kv[layer + LAYERS * value]
            for page in (0, PAGES - 1):
                offset = pool.spec.offset(layer, value, page)
                region = max(at for at, start in enumerate(pool.memory.starts) if start <= offset)
                place = pool.memory.regions[region].address + offset - pool.memory.starts[region]
                assert place == buffer[page].ctypes.data
            assert pool.spec.plane(layer, value).head_bytes == buffer[0].nbytes
    assert (pool.units(1), pool.units(PAGE), pool.units(PAGE + 1)) == (1, 1, 2)


def test_a_latent_is_one_buffer_for_each_layer() -> None:
    pool = page_pool(kv_args(buffers(5)), mla=True)
    assert (pool.spec.shape.kind, pool.spec.layer_count, pool.spec.page_bytes) == ("mla", 5, 5 * PAGE * ROW)


def test_neighbouring_pages_are_one_run_and_scattered_ones_are_not() -> None:
    pool = page_pool(kv_args(buffers(2 * LAYERS)), mla=False)
    assert all(pool.spec.plane(layer, value).dense(1) for layer in range(LAYERS) for value in (False, True))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"state_types": [SimpleNamespace(value="mamba")]}, "mamba"),
        ({"num_draft_entries": 2}, "without speculative decoding"),
        (
            {
                "kv_item_lens": [PAGE * ROW] * 5 + [PAGE * ROW // 2],
                "kv_data_lens": [PAGE * ROW * PAGES] * 5 + [PAGE * ROW * PAGES // 2],
            },
            "layers are alike",
        ),
        ({"kv_data_lens": [PAGE * ROW * PAGES] * 5 + [PAGE * ROW]}, "different numbers of pages"),
        ({"kv_item_lens": []}, "0 item lengths"),
    ],
)
def test_what_is_not_described_is_refused_by_name(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        page_pool(kv_args(buffers(2 * LAYERS), **changes), mla=False)


def test_an_odd_number_of_buffers_is_no_pool_of_k_and_v() -> None:
    with pytest.raises(ConfigError, match="layers are alike"):
        page_pool(kv_args(buffers(5)), mla=False)


def test_sides_whose_pages_differ_are_described_differently() -> None:
    first = page_pool(kv_args(buffers(6)), mla=False).spec.shape
    for changes in ({"kv_cache_dtype_str": "fp8_e5m2"}, {"kv_layout": "hnd"}, {"page_size": 2 * PAGE}):
        assert page_pool(kv_args(buffers(6), **changes), mla=False).spec.shape != first
    assert page_pool(kv_args(buffers(6, pages=3)), mla=False).spec.shape == first


def test_buffers_that_overlap_are_refused() -> None:
    kv = buffers(6)
    args = kv_args(kv, kv_item_lens=[PAGE * ROW] * 6, kv_data_lens=[0] * 6)
    with pytest.raises((ConfigError, LayoutMismatch)):
        page_pool(args, mla=False)


def slots(*rows: np.ndarray) -> MetadataSlots:
    return MetadataSlots([r.ctypes.data for r in rows], [r.nbytes for r in rows], [r[0].nbytes for r in rows])


def test_a_slot_is_read_and_written_and_no_other_one() -> None:
    source = [
        np.arange(4 * 16, dtype=np.int32).reshape(4, 16),
        np.arange(4 * 8, dtype=np.uint64).reshape(4, 8),
    ]
    target = [np.zeros_like(rows) for rows in source]
    content = slots(*source).read(2)
    slots(*target).write(1, content)
    for rows, copied in zip(source, target, strict=True):
        assert np.array_equal(copied[1], rows[2])
        assert not copied[[0, 2, 3]].any()


@pytest.mark.parametrize("slot", [-1, 4])
def test_a_slot_that_does_not_exist_is_no_memory(slot: int) -> None:
    rows = np.zeros((4, 16), np.int32)
    with pytest.raises(IndexError):
        slots(rows).read(slot)
    with pytest.raises(IndexError):
        slots(rows).write(slot, bytes(64))


def test_metadata_of_another_size_is_not_written() -> None:
    rows = np.zeros((4, 16), np.int32)
    with pytest.raises(MetadataMismatch, match="63 bytes of metadata for a slot of 64"):
        slots(rows).write(0, bytes(63))


def test_a_slot_that_no_hand_off_carries_is_refused() -> None:
    limit = Limits().max_metadata_bytes
    with pytest.raises(ConfigError, match="SAMPLING_MASK"):
        MetadataSlots([1], [limit + 1], [limit + 1])
