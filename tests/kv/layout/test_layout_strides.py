"""Pools of any strides against an oracle that walks every layer, K and V, head and token by itself."""

from __future__ import annotations

import random
from itertools import pairwise, product

import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_oracle import SIZES, Pool, copy, keys_of, kv, laid_out, rank, shapes

from segue.kv.errors import Internal, LayoutMismatch
from segue.kv.ids import Span
from segue.kv.layout.blocks import CopyBlock
from segue.kv.layout.content import LayerSample, Part, canonical_content, checksum, whole_pages
from segue.kv.layout.overlap import Box, box, first_clash
from segue.kv.layout.planner import PairPlan, plan_pair
from segue.kv.layout.spec import KVShape, Plane, PlaneSpec, PoolSpec


def shared(a: PoolSpec, b: PoolSpec) -> Part:
    layers = [range(s.layer_start, s.layer_start + s.layer_count) for s in (a, b)]
    heads = [range(s.head_start, s.head_start + s.head_count) for s in (a, b)]
    both = [sorted(set(one) & set(other)) for one, other in (layers, heads)]
    return Part(both[0][0], len(both[0]), both[1][0], len(both[1]))


def a_pool(shape: KVShape, rng: random.Random, first_token: int, tokens: int, size: int) -> Pool:
    count = -(-(tokens - first_token) // size)
    spec = rank(shape, count + rng.randint(0, 3) or 1, size)
    return Pool.of(laid_out(spec, rng) if rng.random() < 0.8 else spec, rng, first_token, tokens)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), sizes=st.tuples(SIZES, SIZES), tokens=st.integers(1, 20))
def test_ranks_of_unequal_parts_share_exactly_the_part_that_both_hold(
    seed: int, sizes: tuple[int, int], tokens: int
) -> None:
    rng = random.Random(seed)
    shape = kv(layers=4, heads=4)
    part = Part(rng.randrange(4), 1, rng.randrange(4), 1)
    part = part._replace(
        layers=rng.randint(1, 4 - part.layer_start), heads=rng.randint(1, 4 - part.head_start)
    )
    pools = []
    for size in sizes:
        low, high = rng.randint(0, part.layer_start), rng.randint(part.layer_start + part.layers, 4)
        left, right = rng.randint(0, part.head_start), rng.randint(part.head_start + part.heads, 4)
        held = {"layer_start": low, "layer_count": high - low, "head_start": left, "head_count": right - left}
        spec = rank(shape, -(-tokens // size), size, **held)
        pools.append(Pool.of(laid_out(spec, rng), rng, 0, tokens))
    src, dst = pools
    plan = PairPlan((src.spec,), (dst.spec,), ((0, 0),), (), b"")
    part = shared(src.spec, dst.spec)
    span = Span(0, tokens)
    written = copy(plan.blocks(0, 0, span, src.pages, dst.pages, 0), src.memory, dst.memory)
    keys = keys_of(part, 2, span)
    assert all(src.get(key) == dst.get(key) for key in keys)
    assert (
        len(written)
        == sum(width for _, width in map(dst.where, keys))
        == plan.chunk_bytes(0, 0, 1, False) * tokens
    )
    theirs = [
        checksum(p.regions, canonical_content(p.spec, part, span, p.pages, 0, LayerSample(), ""))
        for p in pools
    ]
    assert theirs[0] == theirs[1] == xxhash.xxh3_64_intdigest(b"".join(map(src.get, keys)))


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    sizes=st.tuples(SIZES, SIZES),
    tokens=st.integers(1, 40),
    every=st.integers(1, 3),
)
def test_pools_of_unequal_strides_have_one_checksum_and_each_of_its_bits_counts(
    seed: int, sizes: tuple[int, int], tokens: int, every: int
) -> None:
    rng = random.Random(seed)
    shape = shapes(rng)
    start = rng.randrange(tokens)
    span, sample = Span(start, rng.randint(start + 1, tokens)), LayerSample(every, rng.randrange(9))
    part, every = Part(0, shape.layers, 0, shape.kv_heads), min(every, shape.layers)
    keys = [k for k in keys_of(part, 2 if shape.v_dim else 1, span) if k[0] % every == sample.key % every]
    first = start // sizes[1] * sizes[1]
    a, b = a_pool(shape, rng, 0, tokens, sizes[0]), a_pool(shape, rng, first, tokens, sizes[1])
    data = {key: rng.randbytes(a.where(key)[1]) for key in keys}
    wanted = xxhash.xxh3_64_intdigest(b"".join(data.values()))
    for pool in (a, b):
        pool.put(data)
        content = canonical_content(pool.spec, part, span, pool.pages, pool.first_token, sample, "test")
        assert content.nbytes == sum(map(len, data.values()))
        assert checksum(pool.regions, content) == wanted
        mine = {at + i for at, width in map(pool.where, keys) for i in range(width)}
        assert mine == {at for low, high in content.ranges().tolist() for at in range(low, high)}
        others = sorted(set(range(len(pool.memory))) - mine)
        for places, changes in ((others, False), (sorted(mine), True)):
            if places:
                pool.memory[rng.choice(places)] ^= 1 << rng.randrange(8)
                assert (checksum(pool.regions, content) != wanted) is changes


@pytest.mark.parametrize(("pages", "size", "dim"), [(4, 4, 3000), (2, 40, 3000), (2, 2, 40_000)])
def test_pages_and_tokens_larger_than_a_piece_are_hashed_whole(pages: int, size: int, dim: int) -> None:
    shape = kv(layers=1, heads=2, k_dim=dim, v_dim=dim)
    pool = Pool.of(vllm(shape, pages, size, "NKHB"), random.Random(1), 0, pages * size)
    part, span = Part(0, 1, 0, 2), Span(1, pages * size)
    content = canonical_content(pool.spec, part, span, pool.pages, 0, LayerSample(), "test")
    wanted = xxhash.xxh3_64_intdigest(b"".join(map(pool.get, keys_of(part, 2, span))))
    assert checksum(pool.regions, content) == wanted


@pytest.mark.parametrize("cut", [0, 1])
def test_content_that_is_not_in_order_and_outside_its_region_is_no_checksum(cut: int) -> None:
    spec = vllm(kv(layers=2), 4, 4, "NKHB")
    pool = Pool.of(spec, random.Random(1), 0, 16)
    content = canonical_content(spec, Part(0, 2, 0, 4), Span(0, 16), pool.pages, 0, LayerSample(), "test")
    regions = pool.regions
    regions[1] = regions[1][: len(regions[1]) - cut]
    if cut:
        with pytest.raises(Internal, match="outside"):
            checksum(regions, content)
    else:
        checksum(regions, content)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), size=SIZES, count=st.integers(0, 5))
def test_a_grant_of_pages_is_their_content_in_ordered_ranges_that_do_not_touch(
    seed: int, size: int, count: int
) -> None:
    rng = random.Random(seed)
    shape = shapes(rng)
    spec = laid_out(rank(shape, 7, size), rng)
    pages = rng.sample(range(7), count)
    ranges = whole_pages(spec, pages).ranges().tolist()
    assert all(low < high for low, high in ranges)
    assert all(one[1] < other[0] for one, other in pairwise(ranges))
    pool = Pool(spec, pages, 0, bytearray())
    keys = keys_of(Part(0, shape.layers, 0, shape.kv_heads), spec.kinds, Span(0, count * size))
    assert {at for low, high in ranges for at in range(low, high)} == {
        at + i for at, width in map(pool.where, keys) for i in range(width)
    }


# ---- how many blocks ---------------------------------------------------------------------------------


def as_before(src: PoolSpec, dst: PoolSpec, src_slot: int, dst_slot: int, tokens: int) -> list[CopyBlock]:
    """The formula of layer-major pools, as it was before pools were described by strides."""
    out = []
    shape = src.shape
    areas = [pool.pages * pool.page_tokens * pool.head_count * shape.item_bytes for pool in (src, dst)]
    layers = [area * (shape.k_dim + shape.v_dim) for area in areas]
    kinds = (
        [(shape.k_dim, 0, 2 * src.layer_count)]
        if shape.k_dim == shape.v_dim
        else [
            (shape.k_dim, 0, src.layer_count),
            (shape.v_dim, shape.k_dim, src.layer_count),
        ]
    )
    for dim, skip, rows in kinds:
        width = dim * src.head_count * shape.item_bytes
        strides = [layer // (2 if len(kinds) == 1 else 1) for layer in layers]
        a, b = areas[0] * skip + src_slot * width, areas[1] * skip + dst_slot * width
        if not width:
            continue
        if rows == 1 or strides[0] == strides[1] == tokens * width:
            out.append(CopyBlock(a, b, 1, rows * tokens * width))
        else:
            out.append(CopyBlock(a, b, rows, tokens * width, *strides))
    return out


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    sizes=st.tuples(SIZES, SIZES),
    dims=st.sampled_from([(2, 2), (2, 3), (3, 0)]),
    tokens=st.integers(1, 60),
)
def test_layer_major_pools_move_in_the_same_blocks_as_ever(
    seed: int, sizes: tuple[int, int], dims: tuple[int, int], tokens: int
) -> None:
    rng = random.Random(seed)
    shape = kv(layers=rng.randint(1, 4), k_dim=dims[0], v_dim=dims[1])
    src, dst = (rank(shape, -(-tokens // size) + rng.randrange(3), size) for size in sizes)
    first = [rng.randint(0, pool.pages - -(-tokens // pool.page_tokens)) for pool in (src, dst)]
    pages = [range(at, pool.pages) for at, pool in zip(first, (src, dst), strict=True)]
    found = plan_pair([src], [dst]).blocks(0, 0, Span(0, tokens), pages[0], pages[1], 0)
    assert found == as_before(src, dst, first[0] * sizes[0], first[1] * sizes[1], tokens)


def vllm(shape: KVShape, pages: int, page_tokens: int, order: str) -> PoolSpec:
    """One tensor for each layer, its axes in this order, the outermost first (`N`: pages, `K`: K and V)."""
    sizes = {"N": pages, "K": 2, "B": page_tokens, "H": shape.kv_heads}
    strides, extent = {}, shape.k_dim * shape.item_bytes
    for axis in reversed(order):
        strides[axis] = extent
        extent *= sizes[axis]
    return rank(
        shape,
        pages,
        page_tokens,
        regions=(extent,) * shape.layers,
        planes=tuple(
            PlaneSpec(layer, value * strides["K"], strides["N"], strides["B"], strides["H"])
            for layer in range(shape.layers)
            for value in (0, 1)
        ),
    )


LLAMA = kv(layers=32, heads=8, k_dim=128, v_dim=128)


@pytest.mark.parametrize(
    ("source", "target", "run", "scattered"),
    [
        ("KNBH", "KNBH", 1, 32),  # K of all layers, V of all layers
        ("NKBH", "NKBH", 1, 32),  # a run of pages is one range of each layer
        ("NKHB", "NKHB", 1, 32),
        ("KNHB", "KNHB", 1, 32),
        ("", "KNBH", 1, 32),
        ("KNBH", "", 1, 32),
        ("NKBH", "", 2, 32),
        ("NKHB", "KNHB", 2, 32),
        (
            "",
            "KNHB",
            2 * 8 * 16,
            32 * 2 * 8,
        ),  # another order of heads and tokens: rows of one head of a token
    ],
)
def test_runs_are_as_few_blocks_as_the_strides_allow(
    source: str, target: str, run: int, scattered: int
) -> None:
    def pool(order: str) -> PoolSpec:
        return vllm(LLAMA, 64, 16, order) if order else rank(LLAMA, 64, 16)

    plan = plan_pair([pool(source)], [pool(target)])
    neighbours = list(range(5, 37))
    assert len(plan.blocks(0, 0, Span(0, 512), neighbours, neighbours, 0)) == run
    apart = list(range(0, 64, 2))
    assert len(plan.blocks(0, 0, Span(0, 512), apart, apart, 0)) == scattered


# ---- what is refused ------------------------------------------------------------------------------------

GOOD = vllm(kv(layers=2), 4, 4, "NKBH")


def changed(index: int, **fields: int) -> tuple[PlaneSpec, ...]:
    planes = list(GOOD.planes)
    planes[index] = msgspec.structs.replace(planes[index], **fields)
    return tuple(planes)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"planes": GOOD.planes[:-1]}, "planes: 3 of them where 2 layers need 4"),
        ({"planes": ()}, "planes: 0 of them"),
        ({"regions": GOOD.regions[:1]}, r"planes\[2\].region is 1 of 1 regions"),
        ({"regions": (GOOD.regions[0], GOOD.regions[1] - 1)}, r"planes\[3\].offset: .* outside regions\[1\]"),
        (
            {"planes": changed(3, offset=GOOD.planes[3].offset + 1)},
            r"planes\[3\].offset: .* outside regions\[1\]",
        ),
        ({"planes": changed(1, offset=0)}, r"planes\[1\].offset: .* overlaps planes\[0\]"),
        ({"planes": changed(2, region=0)}, r"planes\[2\].offset: .* overlaps planes\[0\]"),
        ({"planes": changed(0, page_stride=0)}, r"planes\[0\].page_stride is 0 bytes"),
        ({"planes": changed(0, page_stride=63)}, r"planes\[0\].page_stride is 63 bytes"),
        ({"planes": changed(2, token_stride=15)}, r"planes\[2\].token_stride is 15 bytes"),
        ({"planes": changed(2, head_stride=3)}, r"planes\[2\].head_stride is 3 bytes"),
        ({"planes": changed(2, page_stride=65)}, r"planes\[.\].* overlaps planes\[2\]"),
    ],
)
def test_a_description_that_cannot_be_is_refused_and_the_field_is_named(
    fields: dict[str, object], words: str
) -> None:
    with pytest.raises(LayoutMismatch, match=words):
        msgspec.structs.replace(GOOD, **fields)
    # On the wire as well, where the field may also be no number at all.
    raw = msgspec.to_builtins(GOOD) | {k: msgspec.to_builtins(v) for k, v in fields.items()}
    with pytest.raises(LayoutMismatch, match=words):
        msgspec.convert(raw, PoolSpec)


@pytest.mark.parametrize("value", [-1, 2**56, "1", None])
@pytest.mark.parametrize("field", PlaneSpec.__struct_fields__)
def test_a_number_outside_the_limits_is_no_description(field: str, value: object) -> None:
    raw = msgspec.to_builtins(GOOD)
    raw["planes"][1][field] = value
    with pytest.raises(msgspec.ValidationError, match=rf"planes\[1\]\.{field}"):
        msgspec.convert(raw, PoolSpec)
    raw = msgspec.to_builtins(GOOD) | {"regions": [value]}
    with pytest.raises(msgspec.ValidationError, match="regions"):
        msgspec.convert(raw, PoolSpec)


@settings(max_examples=300, deadline=None)
@given(
    strides=st.lists(st.tuples(*[st.integers(0, 30)] * 4), min_size=2, max_size=2),
    heads=st.integers(1, 3),
    tokens=st.integers(1, 3),
    pages=st.integers(1, 3),
)
def test_whatever_is_accepted_has_each_byte_once(
    strides: list[tuple[int, int, int, int]], heads: int, tokens: int, pages: int
) -> None:
    shape = kv(layers=1, heads=heads, k_dim=2, v_dim=2, item_bytes=1)
    try:
        spec = rank(shape, pages, tokens, regions=(80,), planes=tuple(PlaneSpec(0, *one) for one in strides))
    except LayoutMismatch:
        return
    pool = Pool(spec, list(range(pages)), 0, bytearray())
    keys = keys_of(Part(0, 1, 0, heads), 2, Span(0, pages * tokens))
    held = [at + i for at, width in map(pool.where, keys) for i in range(width)]
    assert len(set(held)) == len(held)
    assert max(held) < 80


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32), size=st.integers(1, 5))
def test_every_nested_description_is_accepted_and_travels(seed: int, size: int) -> None:
    rng = random.Random(seed)
    spec = laid_out(rank(shapes(rng), rng.randint(1, 5), size), rng)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode([spec]), type=list[PoolSpec]) == [spec]


def test_interleaved_axes_are_taken_for_an_overlap_and_boxes_are_joined() -> None:
    assert box(0, 0, 4, [(64, 3), (4, 16)]) == Box(0, 0, 192, ())
    assert box(0, 7, 4, [(64, 3), (8, 8), (1000, 1)]) == Box(0, 7, 4, ((8, 24),))
    assert box(0, 0, 4, [(10, 3), (12, 2)]) == (12, 2)


def test_what_reaches_into_the_next_period_meets_what_begins_it() -> None:
    key = Box(0, 0, 40, ((100, 8),))
    assert first_clash([key, Box(1, 60, 40, ((100, 8),))]) is None
    assert first_clash([key, Box(1, 61, 40, ((100, 8),))]) in ((0, 1), (1, 0))
    assert first_clash([key, Box(1, 80, 40, ((100, 8),))]) in ((0, 1), (1, 0))


@pytest.mark.parametrize("backwards", ["layers", "values"])
@pytest.mark.parametrize("side", [0, 1])
def test_no_row_lies_before_the_one_before_it_whatever_the_order_of_layers_and_values(
    backwards: str, side: int
) -> None:
    """A step back would be a number without a sign on its way to a transport."""
    shape = kv(layers=3)
    plain = rank(shape, 4, 4)
    width = shape.k_dim * shape.item_bytes
    row = plain.head_count * width
    page, whole = 4 * row, 16 * row
    order = [5, 4, 3, 2, 1, 0] if backwards == "layers" else [1, 0, 3, 2, 5, 4]
    planes = tuple(PlaneSpec(0, at * whole, page, row, width) for at in order)
    turned = msgspec.structs.replace(plain, regions=(6 * whole,), planes=planes)
    pools = [turned, plain] if side == 0 else [plain, turned]
    plan = plan_pair([pools[0]], [pools[1]])
    blocks = plan.blocks(0, 0, Span(0, 8), [0, 1], [2, 3], 0)
    assert all(min(b.src_stride, b.dst_stride, b.src_group_stride, b.dst_group_stride) >= 0 for b in blocks)
    assert sum(b.nbytes for b in blocks) == 8 * shape.token_bytes


def test_a_small_box_inside_a_large_one_does_not_hide_what_meets_the_large_one_behind_it() -> None:
    large, inside = Box(0, 0, 100, ()), Box(0, 10, 10, ())
    assert first_clash([large, inside, Box(1, 50, 10, ())]) == (0, 1)
    assert first_clash([large, inside, Box(1, 100, 10, ())]) is None


def test_a_pair_of_unequal_strides_has_one_plan_hash_and_another_than_layer_major_pools() -> None:
    shape = kv(layers=2)
    pools = [
        rank(shape, 4, 4),
        vllm(shape, 4, 4, "NKBH"),
        vllm(shape, 4, 4, "KNBH"),
        vllm(shape, 4, 4, "NKHB"),
    ]
    digests = {plan_pair([a], [b]).digest for a, b in product(pools, pools)}
    assert len(digests) == len(pools) ** 2
    assert np.unique([p.nbytes for p in pools[1:]]).size == 1


@pytest.mark.parametrize(
    ("change", "dense"),
    [
        ({}, True),
        ({"head_stride": 16}, False),
        ({"heads": 1, "token_stride": 8, "page_stride": 32, "head_stride": 99}, True),
        ({"heads": 1}, False),
        ({"token_stride": 32, "page_stride": 128}, False),
        ({"page_stride": 65}, False),
    ],
)
def test_a_plane_is_dense_where_its_tokens_lie_without_gaps(change: dict[str, int], dense: bool) -> None:
    plane = Plane(offset=3, page_stride=64, token_stride=16, head_stride=8, heads=2, head_bytes=8)
    assert plane._replace(**change).dense(4) is dense
