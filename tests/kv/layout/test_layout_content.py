"""The canonical content of a chunk and its checksum, against bytes that a test puts together by hand."""

from __future__ import annotations

import random

import pytest
import xxhash
from layout_oracle import kv, rank

from areas import stretch
from segue.kv.errors import Internal, LayoutMismatch
from segue.kv.ids import Span
from segue.kv.layout.content import (
    PIECE_BYTES,
    Content,
    LayerSample,
    Part,
    canonical_content,
    checksum,
)
from segue.kv.layout.spec import Plane, PoolSpec


def test_a_sample_covers_every_layer_in_turn_and_at_least_one() -> None:
    spec = rank(kv(layers=5), 12, 4)

    def layers_of(sample: LayerSample, part: Part) -> set[int]:
        found = canonical_content(spec, part, Span(0, 3), [0], 0, sample, "test")
        return {plane.offset * spec.layer_count // spec.nbytes for plane in found.planes}

    whole = Part(0, 5, 0, 4)
    assert [layers_of(LayerSample(3, key), whole) for key in range(4)] == [{0, 3}, {1, 4}, {2}, {0, 3}]
    assert layers_of(LayerSample(8, 6), whole) == {1}
    assert [layers_of(LayerSample(8, key), Part(3, 2, 0, 4)) for key in (0, 1)] == [{3}, {4}]
    assert layers_of(LayerSample(), whole) == set(range(5))


def test_a_run_longer_than_one_piece_is_hashed_whole() -> None:
    data = bytearray(random.Random(2).randbytes(2 * PIECE_BYTES + 100))
    content = stretch(7, len(data) - 7)
    assert checksum([memoryview(data)], content) == xxhash.xxh3_64_intdigest(data[7:])
    for at in (7, PIECE_BYTES + 7, len(data) - 1):
        changed = bytearray(data)
        changed[at] ^= 4
        assert checksum([memoryview(changed)], content) != checksum([memoryview(data)], content)


@pytest.mark.parametrize("nbytes", [1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 2 * PIECE_BYTES + 100])
def test_what_lies_around_a_run_is_not_hashed(nbytes: int) -> None:
    data = bytearray(random.Random(3).randbytes(nbytes + 2 * PIECE_BYTES))
    content = stretch(PIECE_BYTES, nbytes)
    run = slice(PIECE_BYTES, PIECE_BYTES + nbytes)
    assert checksum([memoryview(data)], content) == xxhash.xxh3_64_intdigest(data[run])


@pytest.mark.parametrize(
    "plane", [Plane(95, 2, 2, 2, 1, 2), Plane(-1, 2, 2, 2, 1, 2), Plane(96, 4, 4, 2, 1, 2)]
)
def test_content_outside_the_memory_is_no_checksum(plane: Plane) -> None:
    with pytest.raises(Internal, match="outside"):
        checksum([memoryview(bytearray(100))], Content((plane,), ((0, 3),)))


@pytest.mark.parametrize(
    "part", [Part(0, 4, 0, 4), Part(1, 3, 0, 4), Part(0, 3, 1, 4), Part(0, 0, 0, 4), Part(0, 3, 0, 0)]
)
def test_a_part_that_a_pool_does_not_hold_is_refused(part: Part) -> None:
    spec = rank(kv(), 12, 4)
    with pytest.raises(LayoutMismatch):
        canonical_content(spec, part, Span(0, 3), [0], 0, LayerSample(), "test")


@pytest.mark.parametrize("part", [Part(0, 1, 2, 1), Part(1, 1, 1, 1), Part(1, 2, 2, 1), Part(1, 1, 2, 2)])
def test_what_lies_before_or_behind_the_layers_and_heads_of_a_rank_is_not_its_own(part: Part) -> None:
    spec = PoolSpec(
        shape=kv(), pages=9, page_tokens=4, layer_start=1, layer_count=1, head_start=2, head_count=1
    )
    own = canonical_content(spec, Part(1, 1, 2, 1), Span(0, 3), [0], 0, LayerSample(), "test")
    assert own.nbytes == 3 * (spec.k_token_bytes + spec.v_token_bytes)
    with pytest.raises(LayoutMismatch):
        canonical_content(spec, part, Span(0, 3), [0], 0, LayerSample(), "test")


def test_pages_that_do_not_hold_the_tokens_are_refused_and_no_tokens_are_no_content() -> None:
    spec = rank(kv(), 12, 4)
    whole = Part(0, 3, 0, 4)
    for pages in ([0], [0, 99], [0, -1]):
        with pytest.raises(LayoutMismatch):
            canonical_content(spec, whole, Span(0, 8), pages, 0, LayerSample(), "test")
    with pytest.raises(LayoutMismatch):
        canonical_content(spec, whole, Span(0, 3), [0], 0, LayerSample(0, 1), "test")
    assert canonical_content(spec, whole, Span(3, 3), [], 0, LayerSample(), "test").nbytes == 0
