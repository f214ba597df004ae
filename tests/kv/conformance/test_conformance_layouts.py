"""The oracle of parallel layouts: for every legal pair the plan moves every byte to every rank that holds it,
and nothing else, and no byte crosses the wire twice."""

from __future__ import annotations

import functools
import itertools
import random

import numpy as np
import pytest

from layouts import SHAPES, TOKENS, Bytes, Sizes, image, page_ids
from segue.kv.ids import Span
from segue.kv.layout.blocks import CopyBlock
from segue.kv.layout.planner import plan_pair

PREFIX = 17
SOURCES = [Sizes(*s) for s in itertools.product((1, 2, 3, 4, 8), (1, 2, 4), (1, 2), (1, 16, 64))]
TARGETS = [sizes for sizes in SOURCES if sizes.cp == 1]


@functools.cache
def side(kind: str, sizes: Sizes, first_token: int) -> list[Bytes]:
    """The content of each rank's pool with the prompt from `first_token` on."""
    first, pages = first_token // sizes.page * sizes.page, page_ids(sizes, first_token)
    specs = sizes.ranks(kind, -(-TOKENS // sizes.page) + 3)
    return [image(kind, spec, pages, first, Span(first_token, TOKENS), TOKENS) for spec in specs]


def carry_out(blocks: list[CopyBlock], source: Bytes, target: Bytes) -> int:
    """Copy, and say how many bytes."""
    for b in blocks:
        shape = (b.groups, b.rows, b.row_bytes)
        strides = (b.src_group_stride, b.src_stride, 1), (b.dst_group_stride, b.dst_stride, 1)
        rows = np.ndarray(shape, np.uint8, source.data, b.src_offset, strides[0])
        np.ndarray(shape, np.uint8, target.data, b.dst_offset, strides[1])[:] = rows
    return sum(b.nbytes for b in blocks)


def hand_over(kind: str, prefill: Sizes, decode: Sizes, prefix: int, cut: int) -> None:
    sources, wanted = side(kind, prefill, 0), side(kind, decode, prefix)
    specs = [sizes.ranks(kind, -(-TOKENS // sizes.page) + 3) for sizes in (prefill, decode)]
    plan = plan_pair(*specs)
    targets = [np.zeros(len(pool), np.uint8) for pool in wanted]
    pages = page_ids(prefill, 0), page_ids(decode, prefix)
    first, wire = prefix // decode.page * decode.page, 0
    for source, target in plan.pairs:
        for chunk in (Span(prefix, cut), Span(cut, TOKENS)):
            span = plan.share(source, chunk)
            if len(span) == 0:
                continue
            blocks = plan.blocks(source, target, span, *pages, first)
            wire += carry_out(blocks, sources[source], targets[target])
            for other in plan.passed_on(source, target):
                blocks = plan.relay_blocks(source, target, other, span, pages[1], first)
                carry_out(blocks, targets[target], targets[other])
    for rank, (pool, due) in enumerate(zip(targets, wanted, strict=True)):
        assert np.array_equal(pool, due), (kind, str(prefill), str(decode), f"rank {rank} of decode")
    assert wire == (TOKENS - prefix) * SHAPES[kind].token_bytes, (kind, str(prefill), str(decode))


@pytest.mark.slow
def test_a_sample_of_all_pairs_of_layouts_moves_every_byte_once() -> None:
    rng = random.Random(11)
    for _ in range(1500):
        kind, prefill, decode = rng.choice(list(SHAPES)), rng.choice(SOURCES), rng.choice(TARGETS)
        hand_over(kind, prefill, decode, rng.choice((0, PREFIX)), rng.randint(PREFIX, TOKENS))


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("kind", SHAPES)
def test_every_pair_of_layouts_moves_every_byte_once(kind: str) -> None:
    rng = random.Random(kind)
    for prefill, decode in itertools.product(SOURCES, TARGETS):
        hand_over(kind, prefill, decode, rng.choice((0, PREFIX)), rng.randint(PREFIX, TOKENS))
