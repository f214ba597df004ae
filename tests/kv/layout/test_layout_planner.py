"""The copy planner: who writes what to whom, each byte once, in as few blocks as the pages allow."""

from __future__ import annotations

import random
import subprocess
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_oracle import SIZES, carry_out, laid_out, shapes, split

from segue.kv.errors import LayoutMismatch
from segue.kv.ids import RankCoord, Span
from segue.kv.layout.blocks import CopyBlock
from segue.kv.layout.planner import PairPlan, plan_hash, plan_pair
from segue.kv.layout.spec import KVShape, PoolSpec


def shape(**changes: object) -> KVShape:
    values: dict[str, object] = {
        "kind": "mha",
        "layers": 3,
        "kv_heads": 2,
        "k_dim": 2,
        "v_dim": 2,
        "dtype": "int64",
        "item_bytes": 8,
    }
    return KVShape(**(values | changes))  # type: ignore[arg-type]


def whole(kv: KVShape, pages: int = 8, page_tokens: int = 4) -> PoolSpec:
    return PoolSpec(
        shape=kv, pages=pages, page_tokens=page_tokens, layer_count=kv.layers, head_count=kv.kv_heads
    )


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32), prompt=st.integers(1, 24), sizes=st.tuples(SIZES, SIZES))
def test_every_destination_byte_is_written_once_and_from_its_own_origin(
    seed: int, prompt: int, sizes: tuple[int, int]
) -> None:
    """Ranks of any splits, planes of any strides, pages in runs and with holes, with and without a prefix."""
    rng = random.Random(seed)
    shape, prefix = shapes(rng), rng.randint(0, prompt)
    sides = []
    for first, size, places in ((0, sizes[0], rng.randint(1, 3)), (prefix, sizes[1], 1)):
        needed = -(-prompt // size) - first // size
        pages = max(1, needed + rng.randint(0, 5))
        ids = rng.sample(range(pages), pages) if rng.random() < 0.5 else list(range(pages))
        start = rng.randint(0, pages - needed)
        ranks = split(shape, rng.randint(1, 5), rng.randint(1, shape.layers), pages, size, places)
        if rng.random() < 0.7:
            ranks = [laid_out(rank, rng) for rank in ranks]
        sides.append((ranks, ids[start : start + needed]))
    (sources, src_pages), (targets, dst_pages) = sides
    carry_out(sources, targets, rng, prompt, prefix, src_pages, dst_pages)


@pytest.mark.parametrize(("src_pages", "dst_pages"), [(2, 2), (2, 5), (5, 2)])
@pytest.mark.parametrize("v_dim", [2, 1])
def test_a_prompt_that_fills_a_pool_goes_into_one_of_another_size(
    src_pages: int, dst_pages: int, v_dim: int
) -> None:
    kv, rng = shape(v_dim=v_dim), random.Random(1)
    carry_out([whole(kv, src_pages)], [whole(kv, dst_pages)], rng, 8, 0, [0, 1], [0, 1])


def boxes(ranks: list[PoolSpec]) -> list[tuple[int, int, int, int]]:
    """For each rank the first and the last layer, the first and the last KV head."""
    return [
        (r.layer_start, r.layer_start + r.layer_count - 1, r.head_start, r.head_start + r.head_count - 1)
        for r in ranks
    ]


@pytest.mark.parametrize(
    ("heads", "sources", "targets", "pairs", "relays"),
    [
        (3, (2, 1), (1, 1), [(0, 0), (1, 0)], []),
        (3, (1, 1), (2, 1), [(0, 0), (0, 1)], []),
        (3, (3, 1), (2, 1), [(0, 0), (1, 1), (2, 1)], []),
        (2, (1, 2), (2, 1), [(0, 0), (0, 1), (1, 0), (1, 1)], []),
        # Of sources that hold the same each sends a part, or nothing.
        (1, (2, 1), (1, 1), [(0, 0)], []),
        (1, (2, 1), (1, 3), [(0, 0), (0, 2), (1, 1)], []),
        (2, (4, 1), (2, 1), [(0, 0), (2, 1)], []),
        (2, (4, 1), (2, 2), [(0, 0), (1, 2), (2, 1), (3, 3)], []),
        # Of targets that hold the same each receives a part, or nothing, and gets the rest from the others.
        (1, (1, 1), (3, 1), [(0, 0)], [(0, 0, 1), (0, 0, 2)]),
        (1, (1, 2), (2, 1), [(0, 0), (1, 1)], [(0, 0, 1), (1, 1, 0)]),
        (1, (2, 1), (2, 1), [(0, 0)], [(0, 0, 1)]),
        (2, (1, 1), (4, 1), [(0, 0), (0, 2)], [(0, 0, 1), (0, 2, 3)]),
        # With context parallelism each place sends.
        (1, (1, 1, 2), (2, 1), [(0, 0), (1, 1)], [(0, 0, 1), (1, 1, 0)]),
        (1, (2, 1, 2), (1, 1), [(0, 0), (2, 0)], []),
    ],
)
def test_who_writes_to_whom(
    heads: int,
    sources: tuple[int, ...],
    targets: tuple[int, int],
    pairs: list[tuple[int, int]],
    relays: list[tuple[int, int, int]],
) -> None:
    kv, (tp, pp, *cp) = shape(layers=4, kv_heads=heads), sources
    plan = plan_pair(split(kv, tp, pp, 8, 4, *cp), split(kv, *targets, 8, 4))
    assert list(plan.pairs) == pairs
    assert list(plan.relays) == relays


@pytest.mark.parametrize(
    ("span", "shares"),
    [
        (Span(0, 12), [(0, 4), (4, 12)]),
        (Span(0, 13), [(0, 8), (8, 13)]),
        (Span(6, 13), [(6, 8), (8, 13)]),
        (Span(4, 6), [(4, 4), (4, 6)]),
        (Span(5, 5), [(5, 5), (5, 5)]),
    ],
)
def test_places_of_context_parallelism_share_out_the_pages_of_a_chunk(
    span: Span, shares: list[tuple[int, int]]
) -> None:
    plan = plan_pair(split(shape(), 1, 1, 8, 4, 2), [whole(shape(), 8, 16)])
    assert [(s.start, s.end) for s in (plan.share(0, span), plan.share(1, span))] == shares


def test_sizes_that_do_not_divide_one_another_share_out_all_layers_and_heads() -> None:
    kv = shape(layers=30, kv_heads=3)
    assert boxes(split(kv, 2, 1, 8, 4)) == [(0, 29, 0, 0), (0, 29, 1, 2)]
    assert [b[:2] for b in boxes(split(kv, 1, 4, 8, 4))] == [(0, 6), (7, 14), (15, 21), (22, 29)]
    plan = plan_pair(split(kv, 2, 1, 8, 4), split(kv, 1, 4, 8, 4))
    assert plan.pairs == tuple((s, t) for s in range(2) for t in range(4))
    assert plan.chunk_bytes(1, 0, 1, False) == 7 * 2 * 4 * 8


def smollm2() -> PairPlan:
    kv = shape(layers=30, kv_heads=3, k_dim=64, v_dim=64, dtype="bfloat16", item_bytes=2)
    return plan_pair([whole(kv, 512, 16)], [whole(kv, 300, 16)])


def test_a_run_of_pages_is_one_block_with_a_row_per_layer_and_half() -> None:
    pages = list(range(40, 72))
    (block,) = smollm2().blocks(0, 0, Span(0, 512), pages, list(range(7, 39)), 0)
    assert (block.rows, block.row_bytes) == (60, 512 * 3 * 64 * 2)


def test_scattered_pages_cost_one_block_per_run() -> None:
    scattered = [0, 1, 2, 9, 10, 40, *range(100, 126)]
    assert len(scattered) == 32
    assert len(smollm2().blocks(0, 0, Span(0, 512), scattered, list(range(32)), 0)) == 4
    assert len(smollm2().blocks(0, 0, Span(0, 512), list(range(0, 64, 2)), list(range(32)), 0)) == 32


def test_descending_pages_are_not_a_run() -> None:
    assert len(smollm2().blocks(0, 0, Span(0, 48), [5, 4, 3], [0, 1, 2], 0)) == 3


def test_unequal_k_and_v_make_two_blocks_and_mla_one() -> None:
    for kv, blocks in ((shape(k_dim=3), 2), (shape(kind="mla", kv_heads=1, k_dim=5, v_dim=0), 1)):
        plan = plan_pair([whole(kv)], [whole(kv, 9)])
        assert len(plan.blocks(0, 0, Span(0, 8), [1, 2], [3, 4], 0)) == blocks


@pytest.mark.parametrize("pages", [(9, 5), (5, 9)])
def test_a_page_exists_where_it_does_in_every_rank_of_the_target(pages: tuple[int, int]) -> None:
    model = shape(layers=2, kv_heads=1)
    targets = [
        PoolSpec(
            shape=model,
            coord=RankCoord(pp=layer),
            pages=count,
            page_tokens=4,
            layer_start=layer,
            layer_count=1,
            head_count=1,
        )
        for layer, count in enumerate(pages)
    ]
    assert plan_pair(targets, targets).target_pages == 5


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_start": 1},
        {"layer_start": -1},
        {"layer_count": 3},
        {"layer_count": 0},
        {"head_start": 1},
        {"head_start": -1},
        {"head_count": 3},
        {"head_count": 0},
        {"pages": 0},
        {"page_tokens": 0},
    ],
)
def test_a_pool_is_a_part_of_its_model(changes: dict[str, int]) -> None:
    model = shape(layers=2)
    fields = {"pages": 1, "page_tokens": 1, "layer_count": 2, "head_count": 2}
    PoolSpec(shape=model, **fields)
    with pytest.raises(LayoutMismatch, match="not a part"):
        PoolSpec(shape=model, **(fields | changes))


@pytest.mark.parametrize(
    "changes",
    [{"kind": "mla"}, {"v_dim": 0}, {"v_dim": -1}, {"layers": 0}, {"kv_heads": 0}, {"k_dim": 0}],
)
def test_a_shape_has_something_of_each_and_only_a_latent_has_no_v(changes: dict[str, Any]) -> None:
    fields: dict[str, Any] = {"layers": 1, "kv_heads": 1, "k_dim": 1, "v_dim": 1, "item_bytes": 1}
    KVShape(dtype="int8", **fields)
    KVShape(dtype="int8", **(fields | {"kind": "mla", "v_dim": 0}))
    with pytest.raises(LayoutMismatch, match="not a KV shape"):
        KVShape(dtype="int8", **(fields | changes))


def test_a_whole_pool_is_one_range() -> None:
    plan = plan_pair([whole(shape(), 2)], [whole(shape(), 2)])
    (block,) = plan.blocks(0, 0, Span(0, 8), [0, 1], [0, 1], 0)
    assert block == CopyBlock(0, 0, 1, plan.sources[0].nbytes)


def test_layers_of_a_chunk_are_those_rows_of_its_block() -> None:
    plan, pages = smollm2(), (list(range(40, 72)), list(range(7, 39)))
    (block,) = plan.blocks(0, 0, Span(0, 512), *pages, 0)
    (part,) = plan.blocks(0, 0, Span(0, 512), *pages, 0, Span(10, 15))
    assert part == msgspec.structs.replace(
        block,
        src_offset=block.src_offset + 20 * block.src_stride,
        dst_offset=block.dst_offset + 20 * block.dst_stride,
        rows=10,
    )
    assert plan.blocks(0, 0, Span(16, 16), [0], [], 16, Span(10, 15)) == []


def test_an_empty_span_moves_nothing() -> None:
    assert smollm2().blocks(0, 0, Span(16, 16), [0], [], 16) == []


@pytest.mark.parametrize(
    ("source", "target", "span", "src_pages", "dst_pages", "first", "words"),
    [
        (0, 1, Span(0, 4), [0], [0], 0, "not a pair"),
        (0, 0, Span(0, 5), [0], [0, 1], 0, "source pages"),
        (0, 0, Span(0, 5), [0, 1], [0], 0, "destination pages"),
        (0, 0, Span(0, 4), [8], [0], 0, "outside its pool"),
        (0, 0, Span(0, 4), [0], [-1], 0, "outside its pool"),
        (0, 0, Span(4, 8), [0, 1], [0], 3, "multiple of 4"),
        (0, 0, Span(0, 8), [0, 1], [0], 4, "not after the chunk"),
    ],
)
def test_a_wrong_call_is_refused_before_a_byte_moves(
    source: int, target: int, span: Span, src_pages: list[int], dst_pages: list[int], first: int, words: str
) -> None:
    plan = plan_pair([whole(shape())], [whole(shape())])
    with pytest.raises(LayoutMismatch, match=words):
        plan.blocks(source, target, span, src_pages, dst_pages, first)


def two(**changes: object) -> list[PoolSpec]:
    ranks = split(shape(), 2, 1, 8, 4)
    return [ranks[0], msgspec.structs.replace(ranks[1], **changes)]


@pytest.mark.parametrize(
    ("sources", "targets", "words"),
    [
        ([whole(shape())], [whole(shape(layers=4))], r"layers \(3 on prefill, 4 on decode\).*--model"),
        ([whole(shape())], [whole(shape(dtype="f32", item_bytes=4))], r"dtype.*same --dtype$"),
        (
            two(head_start=0, head_count=2),
            two(),
            r"ranks 0 and 1 of prefill hold partly the same: rank 0 layers 0 to 2 and KV heads 0 to 0 "
            r"\(pp 0, cp 0, tp 0\), rank 1 .*KV heads 0 to 1 \(.*tp 1\); give both the same, or",
        ),
        (
            two(),
            two(layer_count=1),
            r"no rank of decode holds layer 1, KV head 1 \(and 1 more.*rank 1 layers 0.*tp 1\); declare",
        ),
        (
            [whole(shape(layers=10))],
            split(shape(layers=10), 1, 10, 8, 4)[:9],
            r"no rank of decode holds layer 9.*rank 7 .*tp 0\) and 1 more ranks; declare every",
        ),
        (two(), two(layer_count=2), "no rank of decode holds layer 2, KV head 1: rank 0"),
        (two(coord=RankCoord()), two(), "ranks 0 and 1 of prefill both say that they are pp 0, cp 0, tp 0;"),
        ([], [whole(shape())], "prefill declares no ranks"),
        # What a peer declares costs nothing before it is known to be ours: this took 9 GB (fuzzing).
        ([whole(shape(layers=2**40))], [whole(shape())], r"layers \(1099511627776 on prefill"),
        ([whole(shape())] * 1025, [whole(shape())], "prefill declares 1025 ranks; .* at most 1024"),
        ([whole(shape())], split(shape(), 2, 1, 8, 4)[:1], "no rank of decode holds layer 0, KV head 1"),
        (two(), two(page_tokens=8), "rank 1 of decode has pages of 8 tokens"),
        (
            two(coord=RankCoord(cp=1)),
            two(),
            "rank 0 of prefill holds .* no rank of cp 1 does; .* --cp 2",
        ),
        (two(coord=RankCoord(cp=9)), two(), "rank 1 of prefill is at cp 9 of 2 ranks"),
        (two(), two(coord=RankCoord(cp=1)), "rank 1 of decode is at cp 1; .* start it with --cp 1"),
        (two(), two(shape=shape(dtype="other")), "rank 1 of decode has another KV shape"),
    ],
)
def test_lesson_13_what_cannot_be_joined_is_refused_with_what_to_change(
    sources: list[PoolSpec], targets: list[PoolSpec], words: str
) -> None:
    with pytest.raises(LayoutMismatch, match=words):
        plan_pair(sources, targets)


def test_the_plan_hash_covers_everything_both_sides_must_agree_on() -> None:
    a, b = [whole(shape(), 8)], [whole(shape(), 9)]
    variants = {
        plan_hash(a, b, 10, 0, 3),
        plan_hash(b, a, 10, 0, 3),
        plan_hash(a, b, 11, 0, 3),
        plan_hash(a, b, 10, 1, 3),
        plan_hash(a, b, 10, 0, 4),
        plan_hash([whole(shape(), 8, 2)], b, 10, 0, 3),
    }
    assert len(variants) == 6
    assert all(0 <= value < 2**64 for value in variants)
    assert plan_pair(a, b).hash(10, 0, 3) == plan_hash(a, b, 10, 0, 3)


def test_lesson_23_the_plan_hash_is_the_same_in_another_process() -> None:
    code = (
        "from segue.kv.layout.planner import plan_hash\n"
        "from segue.kv.layout.spec import KVShape, PoolSpec\n"
        "kv = KVShape(layers=3, kv_heads=2, k_dim=2, v_dim=2, dtype='int64', item_bytes=8)\n"
        "spec = PoolSpec(shape=kv, pages=8, page_tokens=4, layer_count=3, head_count=2)\n"
        "assert plan_hash([spec], [spec], 10, 0, 3) == {value}, 'differs'\n"
    )
    value = plan_hash([whole(shape())], [whole(shape())], 10, 0, 3)
    for seed in ("1", "2"):
        env = {"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)}
        done = subprocess.run(
            [sys.executable, "-c", code.format(value=value)], env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
