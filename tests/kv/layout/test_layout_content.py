"""The canonical content of a chunk and its checksum, against bytes that a test puts together by hand."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from areas import stretch
from segue.kv.errors import Internal, LayoutMismatch
from segue.kv.ids import RankCoord, Span
from segue.kv.layout.content import (
    PIECE_BYTES,
    Content,
    LayerSample,
    Part,
    canonical_content,
    checksum,
    whole_pages,
)
from segue.kv.layout.planner import plan_pair
from segue.kv.layout.spec import KVShape, Plane, PoolSpec

Key = tuple[int, bool, int, int]  # layer, value, token, head


def kv(layers: int = 3, heads: int = 4, k_dim: int = 2, v_dim: int = 2) -> KVShape:
    kind = "mha" if v_dim else "mla"
    return KVShape(
        kind=kind,  # type: ignore[arg-type]
        layers=layers,
        kv_heads=heads if v_dim else 1,
        k_dim=k_dim,
        v_dim=v_dim,
        dtype="x",
        item_bytes=3,
    )


def ranks(shape: KVShape, tp: int, pp: int, page_tokens: int) -> list[PoolSpec]:
    """A replica split as evenly as it goes; the last ranks hold the rest."""
    found = []
    for p in range(pp):
        layer, layer_end = shape.layers * p // pp, shape.layers * (p + 1) // pp
        for t in range(tp):
            head, head_end = shape.kv_heads * t // tp, shape.kv_heads * (t + 1) // tp
            found.append(
                PoolSpec(
                    shape=shape,
                    coord=RankCoord(pp=p, tp=t),
                    pages=12,
                    page_tokens=page_tokens,
                    layer_start=layer,
                    layer_count=layer_end - layer,
                    head_start=head,
                    head_count=head_end - head,
                )
            )
    return found


@dataclass
class Pool:
    """A rank's memory, random where the prompt is not."""

    spec: PoolSpec
    pages: list[int]
    first_token: int
    memory: bytearray

    @classmethod
    def holding(
        cls, spec: PoolSpec, rng: random.Random, first_token: int, tokens: int, data: dict[Key, bytes]
    ) -> Pool:
        count = -(-(tokens - first_token) // spec.page_tokens)
        pool = cls(spec, rng.sample(range(12), count), first_token, bytearray(rng.randbytes(spec.nbytes)))
        for (layer, value, token, head), item in data.items():
            inside = 0 <= layer - spec.layer_start < spec.layer_count
            if inside and 0 <= head - spec.head_start < spec.head_count and token >= first_token:
                at = pool.where(layer, value, token, head)
                pool.memory[at : at + len(item)] = item
        return pool

    def where(self, layer: int, value: bool, token: int, head: int) -> int:
        spec = self.spec
        page, inside = divmod(token - self.first_token, spec.page_tokens)
        slot = self.pages[page] * spec.page_tokens + inside
        dim = spec.shape.v_dim if value else spec.shape.k_dim
        return spec.offset(layer - spec.layer_start, value, slot) + (
            (head - spec.head_start) * dim * spec.shape.item_bytes
        )

    def content(self, part: Part, span: Span, sample: LayerSample) -> Content:
        return canonical_content(self.spec, part, span, self.pages, self.first_token, sample, "test")

    def sum(self, part: Part, span: Span, sample: LayerSample) -> int:
        return checksum([memoryview(self.memory)], self.content(part, span, sample))


def everything(shape: KVShape, tokens: int, rng: random.Random) -> dict[Key, bytes]:
    return {
        (layer, value, token, head): rng.randbytes((shape.v_dim if value else shape.k_dim) * shape.item_bytes)
        for layer in range(shape.layers)
        for value in ((False, True) if shape.v_dim else (False,))
        for token in range(tokens)
        for head in range(shape.kv_heads)
    }


def part_of(a: PoolSpec, b: PoolSpec) -> Part | None:
    layer = max(a.layer_start, b.layer_start)
    layers = min(a.layer_start + a.layer_count, b.layer_start + b.layer_count) - layer
    head = max(a.head_start, b.head_start)
    heads = min(a.head_start + a.head_count, b.head_start + b.head_count) - head
    return Part(layer, layers, head, heads) if layers > 0 and heads > 0 else None


def covered(key: Key, part: Part, span: Span, sample: LayerSample) -> bool:
    layer, _, token, head = key
    every = min(sample.every, part.layers)
    return (
        0 <= layer - part.layer_start < part.layers
        and (layer - part.layer_start) % every == sample.key % every
        and 0 <= head - part.head_start < part.heads
        and span.start <= token < span.end
    )


SPLITS = st.tuples(st.integers(1, 3), st.integers(1, 3))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    layers=st.integers(3, 5),
    mla=st.booleans(),
    pages=st.tuples(st.integers(2, 5), st.integers(2, 5)),
    splits=st.tuples(SPLITS, SPLITS),
    tokens=st.integers(1, 20),
    every=st.integers(1, 4),
)
def test_equal_content_has_one_checksum_however_it_lies(
    seed: int,
    layers: int,
    mla: bool,
    pages: tuple[int, int],
    splits: tuple[tuple[int, int], tuple[int, int]],
    tokens: int,
    every: int,
) -> None:
    """Other page sizes, placements, prefixes and splits of layers and heads; and any one bit counts."""
    rng = random.Random(seed)
    shape = kv(layers=layers, v_dim=0) if mla else kv(layers=layers, k_dim=rng.randint(1, 3))
    if mla:
        splits = ((1, splits[0][1]), (1, splits[1][1]))
    data = everything(shape, tokens, rng)
    start = rng.randrange(tokens)
    span = Span(start, rng.randint(start + 1, tokens))
    sample = LayerSample(every, rng.randrange(100))
    first = start // pages[1] * pages[1]
    for source in ranks(shape, *splits[0], pages[0]):
        for target in ranks(shape, *splits[1], pages[1]):
            part = part_of(source, target)
            if part is None:
                continue
            a = Pool.holding(source, rng, 0, tokens, data)
            b = Pool.holding(target, rng, first, tokens, data)
            keys = sorted(key for key in data if covered(key, part, span, sample))
            assert keys
            wanted = xxhash.xxh3_64_intdigest(b"".join(data[key] for key in keys))
            assert a.sum(part, span, sample) == b.sum(part, span, sample) == wanted
            assert b.content(part, span, sample).nbytes == sum(len(data[key]) for key in keys)
            # One bit of what is covered changes it; one bit of anything else does not.
            mine = {b.where(*key) + i for key in keys for i in range(len(data[key]))}
            others = sorted(set(range(len(b.memory))) - mine)
            for at, changes in ((rng.choice(others), False), (rng.choice(sorted(mine)), True)):
                b.memory[at] ^= 1 << rng.randrange(8)
                assert (b.sum(part, span, sample) != wanted) is changes


def test_a_plan_gives_both_sides_the_same_content() -> None:
    shape, rng = kv(), random.Random(1)
    [source], [target] = ranks(shape, 1, 1, 4), ranks(shape, 1, 1, 3)
    plan = plan_pair([source], [target])
    data = everything(shape, 17, rng)
    a = Pool.holding(source, rng, 0, 17, data)
    b = Pool(target, rng.sample(range(12), 5), 3, bytearray(target.nbytes))
    for span in (Span(5, 11), Span(11, 17)):
        for block in plan.blocks(0, 0, span, a.pages, b.pages, 3):
            for src, dst, nbytes in block.ranges():
                b.memory[dst : dst + nbytes] = a.memory[src : src + nbytes]
        for sample in (LayerSample(), LayerSample(2, 1)):
            mine = plan.source_content(0, 0, span, a.pages, sample)
            theirs = plan.target_content(0, 0, span, b.pages, 3, sample)
            assert mine.nbytes == theirs.nbytes
            assert checksum([memoryview(a.memory)], mine) == checksum([memoryview(b.memory)], theirs)


def test_a_sample_covers_every_layer_in_turn_and_at_least_one() -> None:
    [spec] = ranks(kv(layers=5), 1, 1, 4)

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
    [spec] = ranks(kv(), 1, 1, 4)
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


def test_whole_pages_are_all_their_bytes_in_the_order_of_the_memory() -> None:
    spec = PoolSpec(shape=kv(), pages=9, page_tokens=4, layer_count=3, head_count=4)
    area = whole_pages(spec, [7, 2, 3])
    held = [at for start, end in area.ranges().tolist() for at in range(start, end)]
    assert held == sorted(set(held))
    assert len(held) == area.nbytes == 3 * spec.page_bytes
    assert area == whole_pages(spec, [3, 7, 2])
    assert whole_pages(spec, []).nbytes == 0


def test_pages_that_do_not_hold_the_tokens_are_refused_and_no_tokens_are_no_content() -> None:
    [spec] = ranks(kv(), 1, 1, 4)
    whole = Part(0, 3, 0, 4)
    for pages in ([0], [0, 99], [0, -1]):
        with pytest.raises(LayoutMismatch):
            canonical_content(spec, whole, Span(0, 8), pages, 0, LayerSample(), "test")
    with pytest.raises(LayoutMismatch):
        canonical_content(spec, whole, Span(0, 3), [0], 0, LayerSample(0, 1), "test")
    assert canonical_content(spec, whole, Span(3, 3), [], 0, LayerSample(), "test").nbytes == 0
