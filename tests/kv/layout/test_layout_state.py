"""The state that a sequence keeps beside its KV: slots behind the pages, in plans and checksums."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import xxhash
from msgspec.structs import replace

from segue.kv.errors import Internal, LayoutMismatch
from segue.kv.ids import RankCoord, Span
from segue.kv.layout.content import LayerSample, canonical_content, checksum, part_of, whole_pages
from segue.kv.layout.planner import plan_pair
from segue.kv.layout.spec import STATE_ALIGN, KVShape, PlaneSpec, PoolSpec, StateTensor

CONV = StateTensor(name="conv", layers=2, shape=(3, 5), dtype="bfloat16", item_bytes=2)
SUMS = StateTensor(name="sums", layers=3, shape=(4, 4), dtype="float32", item_bytes=4)
SHAPE = KVShape(layers=2, kv_heads=2, k_dim=3, v_dim=3, dtype="bfloat16", item_bytes=2, state=(CONV, SUMS))


def pool(pages: int = 5, slots: int = 3, **changes: Any) -> PoolSpec:
    return PoolSpec(
        shape=changes.pop("shape", SHAPE),
        pages=pages,
        page_tokens=4,
        layer_count=2,
        head_count=2,
        slots=slots,
        **changes,
    )


def test_slots_lie_behind_the_pages_one_beside_the_other() -> None:
    spec = pool()
    assert (CONV.nbytes, SUMS.nbytes) == (60, 192)
    assert SHAPE.state_offsets == (0, 64)
    assert SHAPE.state_bytes == 256
    assert SHAPE.state_layers == 3, "of the tensor that most layers keep"
    assert spec.slots_at == -(-5 * spec.page_bytes // STATE_ALIGN) * STATE_ALIGN
    assert [spec.slot_offset(slot) for slot in range(3)] == [spec.slots_at + 256 * slot for slot in range(3)]
    assert spec.nbytes == spec.slots_at + 3 * 256
    for slot in (-1, 3):
        with pytest.raises(LayoutMismatch, match=f"slot {slot} is not one of the 3"):
            spec.slot_offset(slot)


def test_what_is_granted_is_the_pages_and_the_slot_and_nothing_else() -> None:
    spec = pool()
    granted = np.zeros(spec.nbytes, bool)
    for start, end in whole_pages(spec, [1, 4], 2).ranges():
        granted[int(start) : int(end)] = True
    assert granted.sum() == 2 * spec.page_bytes + SHAPE.state_bytes
    assert granted[spec.slot_offset(2) :].all()


def test_a_state_is_content_also_without_tokens_and_is_hashed_whole_or_not_at_all() -> None:
    spec = pool()
    content = canonical_content(spec, part_of(spec), Span(3, 3), [], 0, LayerSample(), "test", 2)
    assert content.state == (spec.slot_offset(2), SHAPE.state_bytes)
    assert content.nbytes == SHAPE.state_bytes
    data = bytearray(range(256)) * (spec.nbytes // 256 + 1)
    whole = memoryview(data)[: spec.nbytes]
    assert checksum([whole], content) == xxhash.xxh3_64_intdigest(whole[spec.slot_offset(2) :])
    for short in (1, SHAPE.state_bytes):
        with pytest.raises(Internal, match="outside"):
            checksum([whole[:-short]], content)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"slots": 0}, "slots: 0 of them for a state of 2 tensors"),
        ({"shape": replace(SHAPE, state=())}, "slots: 3 of them for a state of 0 tensors"),
        ({"regions": (2**20,), "planes": (PlaneSpec(0, 0, 1, 1, 1),)}, "slots: they are described behind"),
    ],
)
def test_a_description_that_contradicts_itself_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(LayoutMismatch, match=text):
        pool(**changes)


def test_sides_with_another_state_are_refused_at_the_start_with_the_reason() -> None:
    wider = replace(SHAPE, state=(CONV, replace(SUMS, dtype="bfloat16", item_bytes=2)))
    with pytest.raises(LayoutMismatch, match="the KV of the two sides differs in state"):
        plan_pair([pool()], [pool(shape=wider)])


def test_a_state_over_several_ranks_is_refused_with_what_to_change() -> None:
    ranks = [pool(shape=SHAPE, coord=RankCoord(cp=cp)) for cp in range(2)]
    with pytest.raises(LayoutMismatch, match=r"prefill declares 2 ranks.*--tp 1 --pp 1 --cp 1"):
        plan_pair(ranks, [pool()])


def test_the_last_chunk_moves_the_state_and_its_checksum_covers_it() -> None:
    src, dst = pool(), pool(pages=9, slots=7)
    plan = plan_pair([src], [dst])
    draw = np.random.default_rng(3)
    here = draw.integers(0, 256, src.nbytes, np.uint8)
    there = draw.integers(0, 256, dst.nbytes, np.uint8)
    span, pages, to = Span(4, 11), [3, 0, 1], [8, 2, 5]
    blocks = [*plan.blocks(0, 0, span, pages, to, 0), plan.state_block(0, 0, 1, 6)]
    assert sum(block.nbytes for block in blocks) == plan.chunk_bytes(0, 0, len(span), True)
    assert plan.chunk_bytes(0, 0, len(span), False) == len(span) * SHAPE.token_bytes
    for block in blocks:
        for at, into, nbytes in block.ranges():
            there[into : into + nbytes] = here[at : at + nbytes]
    # Of the KV one layer alone; of the state all.
    sample = LayerSample(2, 1)
    sent = plan.source_content(0, 0, span, pages, sample, 1)
    landed = plan.target_content(0, 0, span, to, 0, sample, 6)
    assert sent.nbytes == landed.nbytes == len(span) * SHAPE.token_bytes // 2 + SHAPE.state_bytes
    assert checksum([memoryview(here)], sent) == checksum([memoryview(there)], landed)
    for offset in (0, SHAPE.state_bytes - 1):
        there[dst.slot_offset(6) + offset] ^= 1
        assert checksum([memoryview(here)], sent) != checksum([memoryview(there)], landed)
        there[dst.slot_offset(6) + offset] ^= 1
